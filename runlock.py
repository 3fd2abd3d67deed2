"""One run folder, one job: the file `lock`; and one folder for all machines.

It holds the host, the process and a word of this start's own. Whether its holder is alive is known at once on the same
machine, and elsewhere by watching whether it is touched: no clocks are compared."""

import json
import os
import platform
import secrets
import time
from pathlib import Path

from errors import UserError

TOUCH = 10.0  # seconds between touches; a lock that three of them miss is stale
LOOK = 15.0  # seconds for a file to appear on another machine


def _process(pid: int) -> list | None:
    """[pid, when it began, its namespace]: a number that was given to another process is not the same. None: gone."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if began[0] == "Z" else [pid, int(began[19]), os.readlink("/proc/self/ns/pid")]
    except OSError:
        if Path("/proc/self").exists():
            return None
    try:  # where there is no /proc
        os.kill(pid, 0)
        return [pid, 0, ""]
    except OSError:
        return None


class RunLock:
    """Held by rank 0 from a job's start to its end. Raises UserError if another job has it."""

    def __init__(self, run: Path):
        self.path, self.touched, self.missed = run / "lock", time.monotonic(), 0
        self.word = secrets.token_hex(4)
        mine = {"host": platform.node(), "process": _process(os.getpid()), "word": self.word}
        while True:
            try:
                with open(self.path, "x") as f:
                    f.write(json.dumps(mine))
                return
            except FileExistsError:
                self._remove_stale()

    def _read(self) -> dict:
        """{}: not there, or not written to its end."""
        try:
            return json.loads(self.path.read_text())
        except (FileNotFoundError, ValueError):
            return {}

    def _remove_stale(self) -> None:
        held = self._read()
        host, process = held.get("host"), held.get("process") or [0, 0, ""]
        here = _process(os.getpid())
        if host == platform.node() and process[2] == here[2]:
            alive = _process(process[0]) == process and process != here
        else:
            alive = self._is_touched(held)
        if alive:
            raise UserError(
                f"--out {self.path.parent}: process {process[0]} on {host} is training there; wait for it, stop it with"
                f" `bash launch.sh stop`, or give another --out"
            )
        aside = self.path.with_name(f"lock.tmp-{self.word}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        try:
            if held and json.loads(aside.read_text()) != held:  # somebody else was first, and this is theirs
                os.link(aside, self.path)
        except ValueError:
            pass
        finally:
            aside.unlink()

    def _is_touched(self, held: dict) -> bool:
        try:
            before, end = self.path.stat().st_mtime_ns, time.monotonic() + 3 * TOUCH
            while time.monotonic() < end:
                time.sleep(0.5)
                if self.path.stat().st_mtime_ns != before or self._read() != held:
                    return True
        except FileNotFoundError:
            pass
        return False

    def keep(self) -> str:
        """Touches it now and then -> what is wrong, if it is no longer this job's."""
        if time.monotonic() - self.touched < TOUCH:
            return ""
        self.touched = time.monotonic()
        try:
            if self._read().get("word") == self.word:
                os.utime(self.path)
                self.missed = 0
                return ""
            self.missed += 1
        except OSError:
            self.missed += 1
        if self._read():
            return "another job has taken the run folder over"
        return "the run folder has vanished, or its file `lock` has" if self.missed == 3 else ""

    def release(self) -> None:
        try:
            if self._read().get("word") == self.word:
                self.path.unlink()
        except OSError:
            pass


def sees(run: Path, word: str) -> bool:
    """Whether the lock that rank 0 took is to be seen here, too."""
    end = time.monotonic() + LOOK
    while True:
        try:
            if json.loads((run / "lock").read_text())["word"] == word:
                return True
        except (OSError, ValueError, KeyError):
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
