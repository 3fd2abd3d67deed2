"""Supervises a run: its folder and lock, requests to stop, ranks that hang, and the report of its end.

All ranks decide the same at the same step. A vote is read one step late, so that no step waits for it."""

import contextlib
import faulthandler
import importlib.util
import json
import logging
import os
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
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from config import Config
from lib import progress, torch_private
from lib.errors import Failure, UserError, describe_error, nearest, printable, say_error
from lib.files import fill_old_lock, make_folder, read_json, write_json
from lib.ranks import Ranks, on_every_rank, on_first_rank

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
TOGETHER = 2.0  # seconds within which signals are one
EXCHANGE = 10.0  # seconds that a hanging job's watchdogs wait for each other; less than ranks.WATCHDOG
ANSWER = 20.0  # seconds that a stopping rank waits for others
ASK = 2.0  # seconds between two questions whether other ranks progress; ASK + EXCHANGE is less than ranks.WATCHDOG
LONG = 1800  # seconds without progress in the start, the first step, an evaluation, samples, a save or an export
LEASE = 30.0  # seconds after which a lock that nobody renews is stale
PATIENCE = 35.0  # seconds that a job waits for the lock
APPEARS = 75  # looks, five a second, for a file to appear on another machine
STOP_REASON = "launch.sh stop"  # launch/cluster.py looks for it in status.json
TRACKERS = ("tensorboard", "wandb")
STATUS_LOCK = threading.RLock()  # held while status.json is written; a watchdog that ends the process keeps it
logger = logging.getLogger("flatland")


# ---- the log, the status, the clock and the trackers of a run


class _PrefixEveryLine(logging.Formatter):
    """Puts the prefix on each line of a message and escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        record.asctime, record.message = self.formatTime(record, self.datefmt), ""
        prefix = self.formatMessage(record)
        return "\n".join(prefix + printable(line) for line in record.getMessage().splitlines() or [""])


def start_logging(folder: Path | None, on_screen: bool = True) -> None:
    """Sends messages to log.txt in the folder and to the screen (with a prefix if it is not a terminal). None: this
    rank is silent."""
    logger.propagate = logging.raiseExceptions = False  # the writer of metrics.jsonl reports a full disk
    logger.setLevel(logging.INFO if folder else logging.CRITICAL + 1)
    logger.handlers = []
    if folder:
        prefixed = _PrefixEveryLine("%(asctime)s %(levelname).1s [%(filename)s:%(lineno)d] ", "%Y-%m-%d %H:%M:%S")
        screen, file = logging.StreamHandler(sys.stdout), logging.FileHandler(folder / "log.txt", encoding="utf-8")
        screen.setFormatter(_PrefixEveryLine() if sys.stdout.isatty() else prefixed)
        file.setFormatter(prefixed)
        logger.handlers = [screen, file] if on_screen else [file]


def write_status(folder: Path, state: str, step: int, exit_code: int | None = None, message: str = "") -> None:
    """state: running, finished, stopped, error (a user error) or failed."""
    status = {
        "state": state,
        "step": step,
        "exit_code": exit_code,
        "message": message,
        "time": time.time(),
        "attempt": os.environ.get("TORCHELASTIC_RUN_ID"),  # for the launcher
    }
    with STATUS_LOCK:
        write_json(folder / "status.json", status)


def age_of(process: int | str) -> float:
    """The seconds since a process of this machine started."""
    started = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])  # in ticks since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


class Clock:
    """Wall time by part. Time inside a nested part counts only for that part, so the parts add up to the whole."""

    def __init__(self):
        self.begin = time.perf_counter() - age_of("self")  # includes imports
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


def refuse_unusable(names: tuple[str, ...], flag: str = "--track") -> None:
    """Refuses trackers that are unknown or not installed."""
    for name in names:
        if name not in TRACKERS:
            near = nearest(name, TRACKERS)
            raise UserError(
                f"{flag} {name!r}: expected {' or '.join(TRACKERS)}" + f"; did you mean {near}?" * bool(near)
            )
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{flag} {name}: it is not installed; {sys.executable} -m pip install {name}")


# ---- the run


class PeerFailure(Failure):
    """This rank ended after a request to stop, so the cause of a failure is to be found elsewhere."""


class Run:
    """One job in its run folder: the folder and its lock, log.txt, status.json, signals to stop, the watchdog, where
    time goes, and how it ended. All ranks must enter it together.

        with Run(config, ranks) as run: ...

    An error inside is reported once, on stderr and in status.json, and becomes `exit_code`."""

    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.ranks, self.folder, self.clock = config, ranks, Path(config.out), Clock()
        self.lock = None  # on rank 0
        self.mesh = None
        self.groups: list[dist.ProcessGroup] = []  # of the model; the watchdog counts their collectives
        self.hang_limit = max(config.timeout, LONG)
        self.began, self.exit_code = False, 1
        self.stop_reason = ""  # why this rank wants to stop; the watchdog sets it
        self.pending_vote = None

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        """`with run.phase(name)`: time inside belongs to that part. The watchdog allows --timeout in "data" and
        "steps", and in any other phase hang_limit without progress."""
        return self.clock.part(name)

    def __enter__(self) -> "Run":
        self.nonce = on_first_rank(self._take_folder, self.ranks)
        on_every_rank(self._check_shared, self.ranks)  # after an error the lock is released with this object
        if self.ranks.rank == 0:
            self._drop_old_request()
        self.watchdog = Watchdog(self)
        return self

    def _drop_old_request(self) -> None:
        """Removes a request to stop that is older than this process and its torchrun. The launcher and train.sbatch do
        that earlier, and make the log folder of their attempt."""
        request, attempt = self.folder / "logs" / "stop", os.environ.get("TORCHELASTIC_RUN_ID")
        if attempt and any(self.folder.glob(f"logs/*/{attempt}")):
            return
        with contextlib.suppress(OSError):  # there is none, or torchrun's process is not visible here
            if time.time() - request.stat().st_mtime > age_of(os.getppid() if attempt else "self"):
                request.unlink()

    def _take_folder(self) -> str:
        make_folder(self.folder, "--out")
        self.lock = take_lock(self.folder)
        return self.lock.token

    def _check_shared(self) -> None:
        """Refuses a folder where this rank's machine does not see the lock that rank 0 took."""
        for _ in range(APPEARS):
            with contextlib.suppress(OSError):
                if self.nonce in (self.folder / "lock").read_text(errors="replace"):
                    return
            time.sleep(0.2)
        raise UserError(
            f"--out {self.folder} is another folder there than on rank 0's machine: give an --out that all machines see"
        )

    def begin(self, step: int, warnings: list[str] = ()) -> None:
        """From now on status.json and log.txt are this job's; `step` is the last finished step. All ranks must
        call."""
        self.began, self.clock.step = True, step
        on_first_rank(lambda: write_status(self.folder, "running", step), self.ranks)
        start_logging(self.folder if self.ranks.rank == 0 else None)
        for message in warnings:
            logger.warning(message)

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
        if self.config.profile:
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
            write_status(self.folder, state, step, 0, message)
            (self.folder / "logs" / "stop").unlink(missing_ok=True)

        on_first_rank(record, self.ranks)

    def __exit__(self, kind, error: BaseException | None, trace) -> bool:
        self.clock.switch("end", self.clock.step)  # which may take longer than --timeout
        if isinstance(error, Exception):
            self._report(error)
        elif error is None:
            self.exit_code = 0
        self.watchdog.ended = True
        if self.lock:
            self.lock.release()
            if not self.began:
                with contextlib.suppress(OSError):  # it was there before, with files
                    self.folder.rmdir()
        return isinstance(error, Exception)

    def _report(self, error: Exception) -> None:
        """Says what ended the run, on stderr and in status.json."""
        self.exit_code, message, alone = describe_error(error)
        self.record_end(error, "error" if self.exit_code == 2 else "failed", self.exit_code, message)
        if self.ranks.rank == 0 or alone:  # rank 0 reports an error that all ranks have
            say_error(message)
        else:
            time.sleep(1)  # torchrun ends all ranks when one exits: rank 0, which reports, must be first

    def record_end(self, error: Exception, state: str, exit_code: int, message: str) -> None:
        """Writes the end to status.json and log.txt, unless another rank has done so or the state is empty, and the
        error to the file that torchrun names for this rank, where launch/node.py finds the first cause."""
        with contextlib.suppress(OSError):  # the disk is full
            status = read_json(self.folder / "status.json")
            if state and status.get("state") == "running":
                write_status(self.folder, state, max(self.clock.step, status.get("step", 0)), exit_code, message)
                start_logging(self.folder, on_screen=False)  # there it is `error: ...`
                logger.error(message)
            get_error_handler().record_exception(error)


# ---- signals, and ranks that hang


class Watchdog:
    """A thread that votes to stop at a signal of STOPS, or on rank 0 at a request in `logs/stop`, and that ends this
    process at a second signal or request, when the run folder's lock is lost, or when it hangs.

    Two signals within TOGETHER seconds count as one: Slurm signals torchrun and its ranks, and torchrun passes its own
    signal on. The process hangs when no step ends for --timeout seconds, or when no rank reports progress
    (lib/progress.py) in another phase for `hang_limit` seconds: a rank may wait while another rank loads. Then every
    rank's watchdog writes its Python stacks to stderr, and the ranks exchange their positions through the store. So the
    rank that is behind is named even if all main threads are blocked."""

    def __init__(self, run: Run):
        self.run, self.ranks, self.clock = run, run.ranks, run.clock
        self.store = None
        if self.ranks.world_size > 1:  # its own connection to the store where the ranks met
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self.store = dist.TCPStore(address, port, timeout=timedelta(seconds=EXCHANGE))
        self.stopped_at = 0.0  # when the first request to stop came
        # when the ranks last exchanged whether they progress; the number of their reports; when it last grew
        self.asked_at, self.reports, self.reported_at = 0.0, 0, 0.0
        self.ended = False
        for number in STOPS:
            signal.signal(number, lambda *_: None)  # Python also writes the number to the socket
        self.signals, self.sender = socket.socketpair()
        self.signals.settimeout(1.0)
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
            if lost := self.run.lock and self.run.lock.compromise:
                self._end(f"--out {self.run.folder}: the lock is lost, perhaps to another job ({lost.reason})", "")
            self._check_progress()

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
            self._end("stopped at once, without saving", "stopped")

    def _check_progress(self) -> None:
        now, phase, timeout = time.perf_counter(), self.clock.stack[-1], self.run.config.timeout
        if self.run.stop_reason and phase in ("start", "compile"):  # nothing is to be saved
            # Of several ranks, status 1 makes torchrun end the others.
            self._end("stopped before the first step", "stopped", int(self.ranks.world_size > 1))
        since, limit = self.clock.since, timeout
        if phase not in ("steps", "data"):
            self._exchange_progress(now)
            since, limit = max(since, progress.advanced_at, self.reported_at), self.run.hang_limit
        if now - since > limit:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            what = f"After step {self.clock.step}: no step has ended for {now - since:.0f} s, in phase {phase!r}"
            self._end("; ".join([f"{what} (limit {limit} s; --timeout {timeout})", *self._find_behind()]))

    def _exchange_progress(self, now: float) -> None:
        """Reports whether this rank has made progress since the last call, and learns whether any rank has."""
        if self.store is None or now - self.asked_at < ASK:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone with its machine
            reports = self.store.add("flatland/progress", int(progress.advanced_at > self.asked_at))
            if reports > self.reports:
                self.reports, self.reported_at = reports, now
        self.asked_at = now

    def _find_behind(self) -> list[str]:
        """Describes the ranks that do not answer within EXCHANGE seconds, or else the ranks that are behind: in
        five requests to the store, for any number of ranks. A single rank is never behind."""
        if self.store is None:
            return []
        started, answers = 0, {}  # collectives; {rank: (step, collectives), and a description}
        for group in [None, self.ranks.control, *self.run.groups]:
            with contextlib.suppress(RuntimeError):
                started += torch_private.count_collectives(group)
        ranks, step = range(self.ranks.world_size), self.clock.step
        text = f"{self.ranks.name} is behind: its last step was {step}, it is in {self.clock.stack[-1]!r}"
        key = f"flatland/{self.run.nonce}/"
        with contextlib.suppress(RuntimeError):  # the store is gone with its machine
            self.store.append(f"{key}answers", json.dumps([self.ranks.rank, [[step, started], text]]) + "\n")
            if self.store.add(f"{key}count", 1) == len(ranks):
                self.store.set(f"{key}complete", "")
            with contextlib.suppress(RuntimeError):  # not all have answered
                self.store.wait([f"{key}complete"])
            answers = dict(map(json.loads, self.store.get(f"{key}answers").splitlines()))
        positions = [position for position, _ in answers.values()]
        silent = [f"rank {r} does not answer: stopped, gone, or cut off" for r in ranks if answers and r not in answers]
        return silent or [text for position, text in answers.values() if position == min(positions) < max(positions)]

    def _end(self, what: str, state: str = "failed", code: int = 1) -> None:
        """Ends this process with the status `code`. state: for status.json; empty: the run folder is another job's by
        now."""
        message, failed = f"{self.ranks.name}: {what}", state != "stopped"
        say_error(message, "error: " * failed)
        error = PeerFailure(message) if self.run.stop_reason else Failure(message)
        if STATUS_LOCK.acquire(timeout=ANSWER):  # and never releases it: the main thread must not write "running" again
            self.run.record_end(error, state, int(failed), message)
        os._exit(code)


# ---- one run folder, one job


def take_lock(folder: Path) -> SoftFileLease:
    """Takes the run folder's lock, which a thread of filelock renews until it is released. The lock of a dead
    process on this machine is taken over at once, the lock of another machine after LEASE seconds without renewal, and
    so is an empty lock. Raises UserError if another job holds the lock."""
    # thread_local=False: the watchdog reads the state of the lock
    lock = SoftFileLease(folder / "lock", lease_duration=LEASE, thread_local=False)
    fill_old_lock(folder / "lock")
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        owner = lock.owner  # None: it died before it wrote its name
        who = f"process {owner.pid} on {owner.hostname.partition('?')[0]}" if owner else "an unnamed process"
        raise UserError(
            f"--out {folder}: {who} is training there; stop it with `bash launch.sh stop`, or remove {folder}/lock if"
            " no job is training there"
        ) from None
    return lock
