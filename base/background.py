"""Work that never stops training: records, the status, pictures, trackers. It is done in threads, which try again until
the disk or the network answers. Imports nothing of the project, because the log is written here, too."""

import logging
import threading
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

KEPT = 10_000  # texts of a file that wait in memory
PAUSES = 1, 5, 15, 30  # seconds before each further try; the last one repeats
SOON = 1.0  # seconds to wait for a healthy disk, so that what is recorded before a save is on disk before it
logger = logging.getLogger("flatland")


class Background:
    """Work in a thread of its own. Of errors in a row the first is a warning."""

    def __init__(self, name: str, work: Callable[[], object]):
        self.name, self.work = name, work
        self.thread, self.fails = threading.Thread(), False

    def start(self, patience: float = SOON) -> None:
        """Does the work, unless it is still being done. Waits at most `patience` seconds, and not for work that
        fails."""
        if not self.thread.is_alive():
            self.thread = threading.Thread(target=self._try, daemon=True, name=self.name)
            self.thread.start()
        if not self.fails:
            self.thread.join(patience)

    def finish(self, patience: float) -> None:
        """Does the work a last time. Waits up to twice `patience` seconds, also for work that fails."""
        if self.thread.is_alive():
            self.thread.join(patience)
        self.start(patience)
        if self.thread.is_alive():
            logger.warning(f"{self.name} does not end: what is left of it is lost")

    def _try(self) -> None:
        for pause in chain(PAUSES, repeat(PAUSES[-1])):
            try:
                self.work()
                self.fails = False
                return
            except Exception as e:
                if not self.fails:
                    self.fails = True
                    logger.warning(f"{self.name} fails and is tried again; the run continues: {type(e).__name__}: {e}")
            time.sleep(pause)


class Appender(Background):
    """A text file to append to, for example for a handler of logging. Up to KEPT texts wait while the disk fails."""

    def __init__(self, path: Path):
        super().__init__(str(path), self._append)
        self.path, self.waiting = path, []
        self.intact = None  # the size of the file before a write that failed

    def write(self, text: str) -> None:
        if len(self.waiting) < KEPT:
            self.waiting.append(text)

    def flush(self) -> None:
        self.start()

    def _append(self) -> None:
        texts = self.waiting[:]
        if not texts:
            return
        with open(self.path, "ab") as file:
            if self.intact is not None:
                file.truncate(self.intact)  # it may end with a part of a line
            self.intact = file.seek(0, 2)
            file.write("".join(texts).encode(errors="backslashreplace"))
        self.intact = None
        del self.waiting[: len(texts)]
