"""Watches a rank of a run from a thread: signals, requests to stop, the lock, and steps that do not end."""

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from base import disk, torch_private
from base.errors import STOP_REASON, logger

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
TOGETHER = 2.0  # seconds within which signals are one
BEAT = 1.5  # seconds between two reports of a rank to the store


class Watchdog:
    """A thread that votes to stop at a signal of STOPS, or on rank 0 at a request in `logs/stop`, and that ends this
    process at a second signal or request, when the run folder's lock is lost, when another rank is gone, or when it
    hangs.

    A rank that fails sets the end in the store. One that is killed cannot, but the other ranks of its torchrun miss its
    process. Every watchdog looks for both at each beat: NCCL does not notice a dead rank before --timeout.

    Two signals within TOGETHER seconds count as one: Slurm signals torchrun and its ranks, and torchrun passes its own
    signal on. The process hangs when no step ends for --timeout seconds, or when no rank makes progress
    (base/disk.py) in another phase for `hang_limit` seconds: a rank may wait while another rank loads. Each rank
    reports its position to the store where the ranks met. Only a rank that has waited too long reads the reports. So
    the rank that is behind is named even if all main threads are blocked."""

    def __init__(self, run):
        """run: a job.Run."""
        self.run, self.ranks, self.clock, self.store = run, run.ranks, run.clock, run.store
        self.stopped_at = 0.0  # when the first request to stop came
        self.warned = False  # of a disk that does not let it renew the lock
        self.lost = ""  # the result of the last look at the lock
        self.beats, self.others_at = 0, 0.0  # others_at: when a rank made progress, as far as this rank knows
        self.ended = False
        self.parent, self.siblings = os.getppid(), 0  # siblings: ranks that the parent, torchrun, has, if it has all
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
            with contextlib.suppress(RuntimeError, OSError):  # the store is gone with its machine, or the parent is
                self._beat()
                self._follow()
            self._obey(arrived)
            before, self.lost = self.lost, self._lost_lock() if self.run.lock else ""
            # At the end the main thread may release it during a look, and filelock may move it aside for a moment.
            if before and self.lost:
                self.run.ended = True  # status.json may be another job's by now
                what = f"the lock is lost, perhaps to another job ({self.lost})"
                self._end("failed", f"--out {self.run.folder}: {what}")
            self._check_progress()

    def _follow(self) -> None:
        """Ends this process if another rank is gone. In the phase "end" the main thread does."""
        if self.clock.stack[-1] == "end":
            return
        if self.store.check(["end"]):
            self._dump()
            self.run.report(*json.loads(self.store.get("end"))[1:])
            os._exit(1)
        present = len(Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text().split())
        if 0 < present < self.siblings:
            self._dump()
            self._end("failed", "another rank of this machine is gone: killed, or crashed")
        self.siblings = present * (present == int(os.environ.get("LOCAL_WORLD_SIZE", 0)))

    def _lost_lock(self) -> str:
        """The proof that the lock is not this job's any more. An error of the disk is none. It also renews the lock,
        because filelock's thread gives up after an error."""
        path = self.run.folder / "lock"
        try:
            text = path.read_text(errors="replace")
            if text and self.run.nonce not in text:  # a power failure can empty it
                return "it names another one"
            os.utime(path)
        except FileNotFoundError:
            return "it is gone" * self.run.folder.is_dir()  # which may be unmounted for a while
        except OSError as e:
            if not self.warned:
                logger.warning(f"{path} cannot be renewed, which is tried again: {e}")
            self.warned = True
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
        what = f"After step {self.clock.step}: no step has ended for {waited:.0f} s (limit {limit}), in phase {phase!r}"
        self._end("failed", "; ".join([what, *self._dump(), *behind]))

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

    def _dump(self) -> list[str]:
        """Writes all stacks to stderr, and torch's record of the last collectives to logs/flight_RANK, for torchfrtrace
        -> the first of them that is not complete, if there is one. NCCL would write it too late, after --timeout."""
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        names = []
        with contextlib.suppress(Exception):  # nothing here keeps this process from ending, neither a disk nor torch
            record = torch_private.dump_collectives()
            for entry in pickle.loads(record)["entries"]:
                if not entry["retired"]:
                    names.append(f"{entry['profiling_name']} of {entry['process_group'][1]} waits")
            (self.run.folder / "logs" / f"flight_{self.ranks.rank}").write_bytes(record)
        return names[:1]

    def _end(self, state: str, what: str, code: int = 1) -> None:
        """Ends this process with the status `code`."""
        self.run.report(state, f"{self.ranks.name}: {what}")
        if state == "stopped":
            with contextlib.suppress(OSError):
                (self.run.folder / "logs" / "stop").unlink(missing_ok=True)
        os._exit(code)
