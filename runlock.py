"""One run folder, one job: the file `lock`; and one folder for all machines.

It holds the host, the process and a word of this start's own. Whether its holder is alive is known at once on the same
machine, and elsewhere by watching whether it is touched: no clocks are compared."""

import contextlib
import json
import os
import platform
import secrets
import time
from pathlib import Path

from errors import UserError

TOUCH = 10.0  # seconds between touches; a lock that three of them miss is stale
LOOK = 15.0  # seconds for a file to appear on another machine
TAKEN = "another job has taken the run folder over"


def _machine() -> str:
    """What two machines do not share, whatever they are called, nor two containers, nor a machine after a restart."""
    said = platform.node()
    with contextlib.suppress(OSError):
        said += " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        said += " " + os.readlink("/proc/self/ns/pid")
    return said


def _began(pid: int) -> int | None:
    """When the process of that number began: it may be another than it was. None: there is none, or a dead one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:  # where there is no /proc
        os.kill(pid, 0)
        return 0
    except OSError:
        return None


def _read(lock: Path) -> dict:
    """{}: not there, not written to its end, or damaged."""
    try:
        held = json.loads(lock.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


class RunLock:
    """Held by rank 0 from a job's start to its end. Raises UserError if another job has it."""

    def __init__(self, run: Path):
        self.path, self.touched, self.missed = run / "lock", time.monotonic(), 0
        self.word = secrets.token_hex(4)
        pid = os.getpid()
        mine = {"host": platform.node(), "machine": _machine(), "pid": pid, "began": _began(pid), "word": self.word}
        while True:
            try:
                with open(self.path, "x") as f:
                    f.write(json.dumps(mine))
                return
            except FileExistsError:
                self._remove_stale()

    def _remove_stale(self) -> None:
        held = _read(self.path)
        if held.get("machine") == _machine() and type(held.get("pid")) is int:
            alive = held["pid"] != os.getpid() and _began(held["pid"]) == held.get("began", -1)
        else:
            alive = self._is_touched(held)
        if alive:
            held = _read(self.path) or held
            raise UserError(
                f"--out {self.path.parent}: process {held.get('pid')} on {held.get('host')} is training there; wait for"
                f" it, stop it with `bash launch.sh stop`, or give another --out"
            )
        aside = self.path.with_name(f"lock.tmp-{self.word}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        try:
            if held and json.loads(aside.read_text()) != held:  # somebody else was first, and this is theirs
                os.link(aside, self.path)
        except (ValueError, FileExistsError):
            pass
        finally:
            aside.unlink()

    def _is_touched(self, held: dict) -> bool:
        try:
            before, end = self.path.stat().st_mtime_ns, time.monotonic() + 3 * TOUCH
            while time.monotonic() < end:
                time.sleep(0.5)
                if self.path.stat().st_mtime_ns != before or _read(self.path) != held:
                    return True
        except FileNotFoundError:
            pass
        return False

    def keep(self) -> str:
        """Touches it now and then -> what is wrong, if it is no longer this job's."""
        if time.monotonic() - self.touched < TOUCH:
            return ""
        self.touched, why = time.monotonic(), "has vanished, or holds something else"
        try:
            held = _read(self.path)
            if held.get("word") == self.word:
                os.utime(self.path)
                self.missed = 0
                return ""
            if "word" in held:
                return TAKEN
        except OSError as e:
            why = f"cannot be touched: {e}"
        self.missed += 1
        return f"its file `lock` {why}" if self.missed == 3 else ""

    def release(self) -> None:
        try:
            if _read(self.path).get("word") == self.word:
                self.path.unlink()
        except OSError:
            pass


def sees(run: Path, word: str) -> bool:
    """Whether the lock that rank 0 took is to be seen here, too."""
    end = time.monotonic() + LOOK
    while True:
        with contextlib.suppress(OSError):
            if _read(run / "lock").get("word") == word:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
