"""Supervises a run: its folder and lock, votes to stop, and the report of its end. watchdog.py watches its steps.

All ranks decide the same at the same step. A vote is read one step late, so that no step waits for it."""

import contextlib
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import SoftFileLease, Timeout

from base import disk
from base.background import Background
from base.disk import lease, write_json
from base.errors import EXIT, FOLLOWED, UserError, describe_error, logger, say_error, start_logging, write_error
from base.ranks import Ranks, on_every_rank, on_first_rank
from job.watchdog import Watchdog

ANSWER = 20.0  # seconds that a stopping rank waits for others
LAST = 150  # seconds that the end of a run waits for a disk that fails or hangs, for each file
LONG = 1800  # seconds without progress in the start, the first step, an evaluation, samples, a save or an export
PATIENCE = 40.0  # seconds that a job waits for a lock that is being renewed
APPEARS = 75  # looks, five a second, for a file to appear on another machine


# ---- the clock of a run


class Clock:
    """Wall time by phase. Time inside a nested phase counts only for that one, so the phases add up to the whole."""

    def __init__(self):
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # in ticks since boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
        self.by_phase = Counter()  # seconds
        self.stack, self.since, self.step = ["start"], time.perf_counter() - age, 0  # includes imports

    def _lap(self) -> None:
        now = time.perf_counter()
        self.by_phase[self.stack[-1]] += now - self.since
        self.since = now

    def switch(self, phase: str, step: int = 0) -> None:
        """From now on time belongs to `phase`. step: the last finished one."""
        self._lap()
        self.stack[-1], self.step = phase, step

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._lap()
        self.stack.append(name)
        try:
            with torch.profiler.record_function(f"phase: {name}"):
                yield
        finally:
            self._lap()
            self.stack.pop()

    def seconds(self, *names: str) -> float:
        self._lap()
        return sum(self.by_phase[name] for name in names)


# ---- the run


class Run:
    """One job in its run folder: the folder and its lock, log.txt, status.json, signals to stop, the watchdog, where
    time goes, and how it ended. All ranks must enter it together.

        with Run(config.out, ranks) as run: ...

    An error inside is shown once, and becomes `exit_code`. A rank that fails sets the end in the store, if it is not
    set, before another rank can fail because of it: this is the first cause, whatever the clocks of the hosts say. Rank
    0 writes it to status.json and log.txt."""

    def __init__(self, folder: str, ranks: Ranks, timeout: int = 600, profiles: bool = False):
        """timeout: as --timeout. profiles: whether the run has a profiler."""
        self.folder, self.ranks, self.timeout, self.profiles = Path(folder), ranks, timeout, profiles
        self.clock = Clock()
        self.lock = None  # on rank 0
        self.best = ""  # the message of status.json while there is no other
        self.mesh = None
        self.groups: list[dist.ProcessGroup] = []  # of the model; the watchdog counts their collectives
        self.hang_limit = max(timeout, LONG)
        self.began, self.exit_code = False, 1
        self.ended, self.status_lock = False, threading.Lock()  # ended: status.json tells the end
        self.store = ranks.store or dist.HashStore()
        self.stop_reason = ""  # why this rank wants to stop; the watchdog sets it
        self.stopped_by = ""  # the same, when all ranks know that one wants to stop
        self.pending_vote = None
        self.phase = self.clock.phase

    def __enter__(self) -> "Run":
        self.nonce = on_first_rank(self._take_folder, self.ranks)
        self.store = dist.PrefixStore(self.nonce, self.store)  # torchrun keeps the store when it restarts the ranks
        on_every_rank(self._check_shared, self.ranks)  # after an error the lock is released with this object
        self.watchdog = Watchdog(self)
        return self

    def _take_folder(self) -> str:
        self.is_new = not self.folder.exists()
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self.lock = take_lock(self.folder)
        return self.lock.token

    def _check_shared(self) -> None:
        """Refuses a folder where this rank's machine does not see the lock that rank 0 took: another lock may be an old
        one."""
        for _ in range(APPEARS):
            with contextlib.suppress(OSError):
                if self.nonce in (self.folder / "lock").read_text():
                    return
            time.sleep(0.2)
        raise UserError(f"--out {self.folder} is not rank 0's folder there: give an --out that all machines see")

    def begin(self, step: int, warnings: list[str] = ()) -> None:
        """From now on status.json and log.txt are this job's; `step` is the last finished step. All ranks must
        call."""
        self.began, self.clock.step = True, step
        on_first_rank(lambda: self.write_status("running", step), self.ranks)
        start_logging(self.folder if self.ranks.rank == 0 else None)
        for message in warnings:
            logger.warning(message)

    def write_status(self, state: str, step: int, message: str = "") -> None:
        """Replaces status.json, unless it tells the end. state: running, or a key of EXIT. Rank 0 calls this."""
        message = message or str(self.best)
        status = {"state": state, "step": step, "exit_code": EXIT.get(state), "message": message, "time": time.time()}
        with self.status_lock:
            if not self.ended:
                write_json(self.folder / "status.json", status | {"attempt": os.environ.get("TORCHELASTIC_RUN_ID")})
                self.ended = state != "running"

    def vote(self) -> bool:
        """Casts this step's vote -> the outcome of the step before, so nobody waits for the answer: whether the
        watchdog of any rank has noticed a request to stop. All ranks must call, once a step."""
        if self.ranks.world_size == 1:
            self.stopped_by = self.stop_reason
            return bool(self.stop_reason)
        outcome = 0
        if self.pending_vote:
            work, vote = self.pending_vote
            work.wait(timedelta(seconds=ANSWER)) if self.stop_reason else work.wait()  # a peer may be dead
            outcome = vote.item()
        vote = torch.tensor(int(bool(self.stop_reason)))
        self.pending_vote = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.ranks.control, async_op=True), vote
        if self.profiles:
            # torch may lose the events of all threads if a thread records its first while the profile ends
            self.pending_vote[0].wait()
        if outcome:
            self.stopped_by = self.stop_reason or "another rank"
        return bool(outcome)

    def end(self, state: str, step: int) -> None:
        """state: finished or stopped. All ranks must call."""
        self.clock.switch("end", step)
        times = self.clock.by_phase
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in times.items())
        logger.info(f"Time taken: {times.total():.1f} seconds ({phases})")
        message = f"by {self.stopped_by}" * (state == "stopped")
        if message:
            logger.info(f"Stopped {message} after step {step}; the same command resumes from there")

        def record() -> None:
            self.write_status(state, step, message)
            (self.folder / "logs" / "stop").unlink(missing_ok=True)

        def finish() -> None:
            Background("status.json", record).finish(LAST)
            logger.handlers[-1].stream.finish(LAST)

        on_first_rank(finish, self.ranks)

    def __exit__(self, kind, error: BaseException | None, trace) -> bool:
        self.clock.switch("end", self.clock.step)  # which may take longer than --timeout
        if isinstance(error, Exception):
            self.exit_code, message = describe_error(error)
            self.report("error" if self.exit_code == 2 else "failed", message)
        elif error is None:
            self.exit_code = 0
        self.watchdog.ended = True
        if self.lock:
            if self.is_new and self.exit_code == 2 and not self.clock.step:
                shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.lock.release()
        return isinstance(error, Exception)

    def report(self, state: str, message: str) -> None:
        """Tells that this rank ends. state: error, failed or stopped, as in status.json."""
        mine, first = [self.ranks.rank, state, message], None
        with contextlib.suppress(RuntimeError):  # the store is gone with its machine
            first = json.loads(self.store.compare_set("end", "", json.dumps(mine)))
        is_cause = first == mine and state != "stopped"
        write_error(state, message, 0 if is_cause else FOLLOWED, self.clock.step)
        if first in (None, mine) or first[1:] != mine[1:]:
            say_error(message, "error: " * (state != "stopped"))
        if self.ranks.rank == 0 and self.began and not self.ended:
            _, state, message = first or mine
            with contextlib.suppress(OSError):  # the disk is full, or the folder is gone
                self.write_status(state, self.clock.step, message)
                logger.handlers = logger.handlers[-1:]  # log.txt: on the screen it is `error: ...`
                logger.error(message)
        if self.ranks.world_size > 1 and state != "stopped":
            time.sleep(2)  # torchrun ends all ranks when one exits: the others also have to report


# ---- one run folder, one job


def take_lock(folder: Path) -> SoftFileLease:
    """Takes the run folder's lock. The lock of a dead process on this machine, or of an earlier attempt of this launch
    (its id is LAUNCH.ATTEMPT, or else unknown), is taken over at once, the lock of another machine after disk.LEASE
    seconds without renewal, and an empty lock after as many.
    Raises UserError if another job holds the lock."""
    path, launch = folder / "lock", os.environ.get("TORCHELASTIC_RUN_ID", "").rpartition(".")[0]
    lock, mark, renewals = lease(path), f"launch={launch}\n", set()  # filelock skips fields that it does not know
    with contextlib.suppress(OSError):
        if launch and mark in path.read_text(errors="replace"):
            lock.force_break()
    begin = time.monotonic()
    while time.monotonic() < begin + (PATIENCE if len(renewals) > 1 else disk.LEASE + 10):
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=min(3, PATIENCE))
            with open(path, "a") as file:
                file.write(mark)
            return lock
        with contextlib.suppress(OSError):  # a power failure can leave an empty lock, which filelock does not take over
            status = path.stat()
            if status.st_size:
                renewals.add(status.st_mtime)
            elif time.time() - status.st_mtime > disk.LEASE:
                path.write_text("damaged")
    raise UserError(
        f"--out {folder}: the process in {folder}/lock is training there; stop it with `bash launch.sh stop`, or remove"
        " the lock if that process is dead"
    )
