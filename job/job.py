"""Supervises a run: its folder and lock, requests to stop, ranks that hang, and the report of its end.

All ranks decide the same at the same step. A vote is read one step late, so that no step waits for it."""

import contextlib
import faulthandler
import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import SoftFileLease, Timeout

from base import disk, torch_private
from base.disk import lease, write_json
from base.errors import (
    EXIT,
    FOLLOWED,
    STOP_REASON,
    UserError,
    describe_error,
    logger,
    say_error,
    start_logging,
    write_error,
)
from base.ranks import Ranks, on_every_rank, on_first_rank

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
TOGETHER = 2.0  # seconds within which signals are one
ANSWER = 20.0  # seconds that a stopping rank waits for others
BEAT = 1.5  # seconds between two reports of a rank to the store
LONG = 1800  # seconds without progress in the start, the first step, an evaluation, samples, a save or an export
PATIENCE = 40.0  # seconds that a job waits for a lock that is being renewed
APPEARS = 75  # looks, five a second, for a file to appear on another machine


# ---- the clock and the trackers of a run


class Clock:
    """Wall time by part. Time inside a nested part counts only for that part, so the parts add up to the whole."""

    def __init__(self):
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # in ticks since boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
        self.begin = time.perf_counter() - age  # includes imports
        self.parts = Counter()  # seconds by part
        self.stack, self.since, self.step = ["start"], self.begin, 0

    def _lap(self) -> None:
        now = time.perf_counter()
        self.parts[self.stack[-1]] += now - self.since
        self.since = now

    def switch(self, part: str, step: int = 0) -> None:
        """From now on time belongs to `part`. step: the last finished one."""
        self._lap()
        self.stack[-1], self.step = part, step

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._lap()
        self.stack.append(name)
        try:
            with torch.profiler.record_function(f"part: {name}"):
                yield
        finally:
            self._lap()
            self.stack.pop()

    def seconds(self, *names: str) -> float:
        self._lap()
        return sum(self.parts[name] for name in names)

    def report(self) -> str:
        self._lap()
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        return f"Time taken: {self.since - self.begin:.1f} seconds ({parts})"


def refuse_unusable(names: tuple[str, ...]) -> None:
    """Refuses trackers that are unknown or not installed."""
    for name in names:
        if name not in ("tensorboard", "wandb") or importlib.util.find_spec(name) is None:
            raise UserError(f"tracker {name!r}: expected tensorboard or wandb, after `pip install tensorboard wandb`")


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
        self.pending_vote = None
        # `with run.phase(name)`: time inside belongs to that part. The watchdog allows --timeout in "data" and "steps",
        # and in any other phase hang_limit without progress.
        self.phase = self.clock.part

    def __enter__(self) -> "Run":
        self.nonce = on_first_rank(self._take_folder, self.ranks)
        self.store = dist.PrefixStore(self.nonce, self.store)  # torchrun keeps the store when it restarts the ranks
        on_every_rank(self._check_shared, self.ranks)  # after an error the lock is released with this object
        self.watchdog = Watchdog(self)
        return self

    def _take_folder(self) -> str:
        self.is_new = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
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

    def agrees_to_stop(self, failed: bool = False) -> bool:
        """Casts this step's vote and returns the outcome of the step before, so nobody waits for the answer. A request
        that the watchdog noticed on any rank, or a save that `failed` on a rank, ends the run on all ranks at the same
        step. All ranks must call, once a step."""
        wants_to_stop = bool(self.stop_reason or failed)
        if self.ranks.world_size == 1:
            return wants_to_stop
        outcome = False
        if self.pending_vote:
            work, vote = self.pending_vote
            work.wait(timedelta(seconds=ANSWER)) if self.stop_reason else work.wait()  # a peer may be dead
            outcome = bool(vote)
        vote = torch.tensor(int(wants_to_stop))
        self.pending_vote = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.ranks.control, async_op=True), vote
        if self.profiles:
            # torch may lose the events of all threads if a thread records its first while the profile ends
            self.pending_vote[0].wait()
        return outcome

    def end(self, state: str, step: int) -> None:
        """state: finished or stopped. All ranks must call."""
        logger.info(self.clock.report())
        message = ""
        if state == "stopped":
            message = f"by {self.stop_reason or 'another rank'}"
            logger.info(f"Stopped {message} after step {step}; the same command resumes from there")

        def record() -> None:
            self.write_status(state, step, message)
            (self.folder / "logs" / "stop").unlink(missing_ok=True)

        on_first_rank(record, self.ranks)

    def __exit__(self, kind, error: BaseException | None, trace) -> bool:
        self.clock.switch("end", self.clock.step)  # which may take longer than --timeout
        if isinstance(error, Exception):
            self.exit_code, message = describe_error(error)
            self.report("error" if self.exit_code == 2 else "failed", message)
        elif error is None:
            self.exit_code = 0
        self.watchdog.ended = True
        if self.lock:
            refused = self.exit_code == 2 and not self.clock.step and not (self.folder / "checkpoints").exists()
            if self.is_new and (refused or not self.began):
                shutil.rmtree(self.folder, ignore_errors=True)
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
                start_logging(self.folder, on_screen=False)  # there it is `error: ...`
                logger.error(message)
        if self.ranks.world_size > 1 and state != "stopped":
            time.sleep(2)  # torchrun ends all ranks when one exits: the others also have to report


# ---- signals, and ranks that hang


class Watchdog:
    """A thread that votes to stop at a signal of STOPS, or on rank 0 at a request in `logs/stop`, and that ends this
    process at a second signal or request, when the run folder's lock is lost, or when it hangs.

    Two signals within TOGETHER seconds count as one: Slurm signals torchrun and its ranks, and torchrun passes its own
    signal on. The process hangs when no step ends for --timeout seconds, or when no rank makes progress
    (base/disk.py) in another phase for `hang_limit` seconds: a rank may wait while another rank loads. Each rank
    reports its position to the store where the ranks met. Only a rank that has waited too long reads the reports. So
    the rank that is behind is named even if all main threads are blocked, and waiting ranks cost nothing."""

    def __init__(self, run: Run):
        self.run, self.ranks, self.clock, self.store = run, run.ranks, run.clock, run.store
        self.stopped_at = 0.0  # when the first request to stop came
        self.renews = False  # the lock: filelock's thread has given up
        self.beats, self.others_at = 0, 0.0  # others_at: when a rank made progress, as far as this rank knows
        self.ended = False
        self._beat()  # a rank may stop before its next one
        for number in STOPS:
            signal.signal(number, lambda *_: None)  # Python also writes the number to the socket
        self.signals, self.sender = socket.socketpair()
        self.signals.settimeout(BEAT)
        self.sender.setblocking(False)
        signal.set_wakeup_fd(self.sender.fileno())  # also while the main thread is in C++
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def _watch(self) -> None:
        while True:
            arrived = b""
            with contextlib.suppress(TimeoutError):
                arrived = self.signals.recv(64)
            if self.ended:
                return
            self._obey(arrived)
            if reason := self._lost_lock():
                self.run.ended = True  # status.json may be another job's by now
                what = f"the lock is lost, perhaps to another job ({reason})"
                self._end("failed", f"--out {self.run.folder}: {what}")
            with contextlib.suppress(RuntimeError):  # the store is gone with its machine
                self._beat()
            self._check_progress()

    def _lost_lock(self) -> str:
        """The proof that the lock is not this job's any more. An error of the disk is none: then this thread renews the
        lock, because filelock's thread gives up."""
        lost, path = self.run.lock and self.run.lock.compromise, self.run.folder / "lock"
        if not lost:
            return ""
        if lost.reason != "refresh-failed":
            return lost.reason
        if not self.renews:
            self.renews = True
            logger.warning(f"{path} cannot be renewed, which is tried again: {lost.error}")
        try:
            if lost.token.encode() not in path.read_bytes():
                return "owner-changed"
            os.utime(path)
        except FileNotFoundError:
            return "marker-missing" * os.path.isdir(self.run.folder)  # which may be unmounted for a while
        except OSError:
            pass
        return ""

    def _obey(self, arrived: bytes) -> None:
        """arrived: numbers of signals. `launch.sh stop` writes its request for rank 0, empty or "now"."""
        requests = [number.name for number in STOPS if number in arrived]
        if self.ranks.rank == 0:
            with contextlib.suppress(OSError):
                requests += STOP_REASON, (self.run.folder / "logs" / "stop").read_text()
        if not requests:
            return
        now, reason = time.perf_counter(), requests[0]
        if not self.run.stop_reason:
            self.run.stop_reason, self.stopped_at = reason, now
        if "now" in requests or (reason != STOP_REASON and now - self.stopped_at > TOGETHER):
            self._end("stopped", f"stopped at once by {reason}, without saving")
        if self.clock.stack[-1] in ("start", "compile"):  # nothing is to be saved
            # Of several ranks, status 1 makes torchrun end the others.
            self._end("stopped", f"stopped by {reason} before the first step", int(self.ranks.world_size > 1))

    def _idle(self) -> float:
        """Seconds since this rank's last step or progress."""
        return time.perf_counter() - max(self.clock.since, disk.advanced_at)

    def _beat(self) -> None:
        """Reports this rank's position: the last step and the number of collectives that it has started."""
        self.beats += 1
        groups = [None, self.ranks.control, *self.run.groups] if self.ranks.world_size > 1 else []
        position = self.clock.step, sum(map(torch_private.count_collectives, groups))
        text = f"{self.ranks.name} is behind: its last step was {self.clock.step}, it is in {self.clock.stack[-1]!r}"
        self.store.set(str(self.ranks.rank), json.dumps([self.beats, position, self._idle(), text]))

    def _check_progress(self) -> None:
        phase, now = self.clock.stack[-1], time.perf_counter()
        waited, limit = now - self.clock.since, self.run.timeout
        may_wait = phase not in ("steps", "data")  # for a rank that makes progress
        if may_wait:
            waited, limit = min(self._idle(), now - self.others_at), self.run.hang_limit
        if waited <= limit:
            return
        idle, behind = self._ask_all()
        if may_wait and idle <= limit:
            self.others_at = now - idle
            return
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        what = f"After step {self.clock.step}: no step has ended for {waited:.0f} s (limit {limit}), in phase {phase!r}"
        self._end("failed", "; ".join([what, *behind]))

    def _ask_all(self) -> tuple[float, list[str]]:
        """-> (seconds since any rank made progress; descriptions of the ranks whose reports do not change within three
        beats, or else of the ranks that are behind)"""
        keys = [*map(str, range(self.ranks.world_size))]
        try:
            before = self.store.multi_get(keys)
            for _ in range(3):
                time.sleep(BEAT)
                self._beat()
            after = self.store.multi_get(keys)
        except RuntimeError:  # the store is gone with its machine
            return self._idle(), []
        silent = [rank for rank, report in enumerate(before) if report == after[rank]]
        _, positions, idle, texts = zip(*map(json.loads, after), strict=True)
        first, last = min(positions), max(positions)
        behind = [text for position, text in zip(positions, texts, strict=True) if position == first < last]
        return min(idle), [f"rank {rank} does not answer: stopped, gone, or cut off" for rank in silent] or behind

    def _end(self, state: str, what: str, code: int = 1) -> None:
        """Ends this process with the status `code`."""
        self.run.report(state, f"{self.ranks.name}: {what}")
        if state == "stopped":
            with contextlib.suppress(OSError):
                (self.run.folder / "logs" / "stop").unlink(missing_ok=True)
        os._exit(code)


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
