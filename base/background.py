"""Work that never stops training: records, the status, pictures, trackers. Threads do it, and try again until
the disk or the network answers. The log is also written here, so this file imports nothing of the project."""

import logging
import threading
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

KEPT = 10_000  # texts of a file that wait in memory
PAUSES = 1, 5, 15, 30  # seconds before each further try; the last one repeats
SOON = 1.0  # seconds to wait for a healthy disk: records reach it before the save that follows them
logger = logging.getLogger("flatland")


class Background:
    """Work in a separate thread. The first of several errors in a row is logged as a warning."""

    def __init__(self, name: str, work: Callable[[], object]):
        self.name, self.work = name, work
        self.thread, self.turn = threading.Thread(), threading.Lock()
        self.waits = False  # whether a thread is about to begin, which will do everything

    def start(self, patience: float = SOON) -> None:
        """Does the work, once more if it is being done. Then it does not wait, else at most `patience` seconds."""
        is_busy = self.turn.locked()
        if not self.waits:
            self.waits = True
            self.thread = threading.Thread(target=self._try, daemon=True, name=self.name)
            self.thread.start()
        if not is_busy:
            self.thread.join(patience)

    def finish(self, patience: float) -> None:
        """Does the work a last time. Waits up to `patience` seconds, also for work that fails."""
        self.start(0.0)
        self.thread.join(patience)
        if self.thread.is_alive():
            logger.warning(f"{self.name} does not end: the rest of it is lost")

    def _try(self) -> None:
        with self.turn:
            self.waits = failed = False
            for pause in chain(PAUSES, repeat(PAUSES[-1])):
                try:
                    return self.work()
                except Exception as e:
                    what = f"{type(e).__name__}: {e}"
                if not failed:
                    logger.warning(f"{self.name} fails and is tried again; the run continues: {what}")
                failed = True
                time.sleep(pause)


class Appender(Background):
    """A text file to append to, for example for a handler of logging. Up to KEPT texts wait while the disk fails."""

    def __init__(self, path: Path):
        super().__init__(str(path), self._append)
        self.path, self.waiting, self.lost = path, [], 0
        self.intact = None  # the size of the file before a write that failed

    def write(self, text: str) -> None:
        if len(self.waiting) < KEPT:
            self.waiting.append(text)
        else:
            self.lost += 1

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
        if self.lost:
            lost, self.lost = self.lost, 0
            logger.warning(f"{self.path} lacks {lost} texts: the disk failed for too long")
