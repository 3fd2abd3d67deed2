"""What watches over a run: gradients that stop being numbers, replicas that differ, signals to stop, ranks that hang.

All ranks come to the same verdict at the same step. Nothing here makes the host wait for the device in every step: what
a step found is read one step late."""

import contextlib
import faulthandler
import hashlib
import json
import logging
import math
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from log import Clock, write_status
from runlock import TAKEN, RunLock
from shard import Ranks, gather, local

SKIPS = 10  # updates in a row that --on_nonfinite skip leaves out before it gives up
TOGETHER = 2.0  # seconds within which signals are one
ANSWER = 20.0  # seconds that a rank which was told to stop waits for others
START = 1800  # seconds that the first step, an evaluation or a save may take
HASHED = 2**20  # values of the parameters that are hashed at a time
logger = logging.getLogger("flatland")


class NotFinite(Exception):
    """The loss or the gradients stopped being numbers; step: in which step."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class Diverged(Exception):
    """Ranks that should hold the same parameters do not."""


class GradientGuard:
    """Global loss, gradient norm, clipping and the guard against non-finite values, from one all-reduce per step and
    without a host synchronisation. A non-finite loss or norm suppresses that update on every rank alike, and with
    --on_nonfinite stop all later ones."""

    def __init__(
        self,
        model: nn.Module,
        clip: float,
        ranks: Ranks,
        mesh: DeviceMesh | None,
        on_nonfinite: str = "stop",
        replicas_every: int = 0,
        where: Callable[[int], list[str]] = lambda step: [],
    ):
        """where(step): the places in the data of this rank's rows of one of the last steps."""
        self.model, self.parameters, self.ranks, self.mesh = model, list(model.parameters()), ranks, mesh
        self.clip, self.limit, self.every = clip, 1 if on_nonfinite == "stop" else SKIPS, replicas_every
        self.where = where
        self.replicas = 1 if mesh is None else mesh["replicate"].size()
        self.in_row = torch.zeros((), device=local(self.parameters[0]).device)  # on the host, if they are offloaded
        self.own = self.suppress = self.in_row
        self.seen = None  # a copy of two of them on its way to the host

    def reduce(self, loss: Tensor, trained: int) -> tuple[Tensor, Tensor, Tensor]:
        """loss: this rank's sum over its `trained` tokens, gradients likewise -> (loss per token, gradient norm, what
        the gradients are to be divided by), global. All ranks must call."""
        # On a CPU torch adds up one value after the other: in fp32 that is wrong by 3e-4 for 10 M of them.
        length = 2**17 if self.in_row.device.type == "cpu" else 2**30
        pieces = [piece for p in self.parameters for piece in local(p.grad).reshape(-1).split(length)]
        norms = torch._foreach_norm(pieces, 2, dtype=torch.float32)
        square = torch.stack(norms).square().sum() / self.replicas
        self.own = loss = loss.to(square.device)
        sums = torch.stack((square, loss, torch.full_like(loss, trained)))
        if self.ranks.world_size > 1:
            dist.all_reduce(sums)
        square, loss, count = sums.unbind()
        norm = square.sqrt() / count
        bad = ~(norm.isfinite() & loss.isfinite())
        # From the limit on nothing is updated any more: the host, which learns of it later, finds the state before.
        self.in_row = (self.in_row + 1) * (bad | (self.in_row >= self.limit))
        self.suppress = (self.in_row > 0).float()
        excess = (norm / self.clip).clamp(min=1.0) if self.clip else torch.ones_like(norm)
        return loss / count, norm, count * excess

    def check(self, step: int, wait: bool = False) -> None:
        """Raises NotFinite if an update was suppressed, or says that it was skipped: up to the step before, which costs
        no waiting, or up to this one; and Diverged. Call once a step; the outcome is the same on all ranks."""
        found = torch.stack((self.in_row, self.own))
        on_host, event = torch.empty(2, pin_memory=found.is_cuda), None
        on_host.copy_(found, non_blocking=True)
        if found.is_cuda:
            event = torch.cuda.Event()
            event.record()
        before, self.seen = self.seen, (step, on_host, event)
        for at, found, event in ([before] if before else []) + ([self.seen] if wait else []):
            if event:
                event.synchronize()
            in_row, own = found.tolist()
            if in_row:
                self._complain(at, own, int(in_row))
        if wait:
            self.seen = None
        if self.every and step % self.every == 0:
            compare_replicas(self.model, self.ranks, self.mesh, step)

    def _complain(self, step: int, own: float, in_row: int) -> None:
        mine = None if math.isfinite(own) else own
        told = gather((platform.node(), mine, self.where(step)), self.ranks)
        guilty = {r: row for r, row in enumerate(told) if row[1] is not None}
        if guilty:
            what = "; ".join(f"the loss of rank {r} on {host} is {value}" for r, (host, value, _) in guilty.items())
        else:
            what = "the gradient norm is not finite, the loss of every rank is"
        suspects = guilty or dict(enumerate(told))
        places = [f"  rank {r}: {place}" for r, (_, _, rows) in suspects.items() for place in rows]
        more = f"\n  and {len(places) - 8} rows more" if len(places) > 8 else ""
        what = f"Step {step}: {what}." + "\nIts rows:\n" * bool(places) + "\n".join(places[:8]) + more
        if in_row < self.limit:
            return logger.warning(
                "%s\nIts update is skipped (--on_nonfinite skip): %d in a row, %d end the run", what, in_row, self.limit
            )
        first = "That update" if in_row == 1 else f"The updates of {in_row} steps in a row"
        raise NotFinite(
            f"{what}\n{first} and all later ones were suppressed, on all ranks."
            " A smaller --lr (with --resume_override lr), a longer --warmup_steps or --dtype fp32"
            " usually mend it; --on_nonfinite skip passes over single steps",
            step,
        )


def parameter_hash(model: nn.Module) -> str:
    """Of this rank's parts of the parameters. The bits of each value are multiplied by a random odd number that belongs
    to its place and summed modulo 2^64, HASHED values at a time: so no order of summing changes it, and values that
    change places, or changes whose plain sum is 0, do. Needs 16 MiB beside the parameters, whatever their size."""
    ints = {4: torch.int32, 2: torch.int16}
    parts = [local(p.detach()).view(ints[p.element_size()]).reshape(-1) for p in model.parameters()]
    weights = torch.randint(-(2**63), 2**63 - 1, (HASHED,), generator=torch.Generator().manual_seed(0)) | 1
    weights = weights.to(parts[0].device)
    sums = [block.long().mul_(weights[: len(block)]).sum() for part in parts for block in part.split(HASHED)]
    return hashlib.sha256(torch.stack(sums).cpu().numpy()).hexdigest()


def compare_replicas(model: nn.Module, ranks: Ranks, mesh: DeviceMesh | None, step: int) -> None:
    """Raises Diverged on all ranks if copies of the parameters differ. All ranks must call."""
    if mesh is None or mesh["replicate"].size() == 1:
        return
    told = gather((mesh.get_coordinate()[1], parameter_hash(model), platform.node()), ranks)
    groups = {}
    for rank, (part, value, _) in enumerate(told):
        groups.setdefault(part, {}).setdefault(value, []).append(rank)
    said = []
    for same in (sorted(by_value.values(), key=len) for by_value in groups.values() if len(by_value) > 1):
        known = len(same[-2]) < len(same[-1])  # most of them agree
        wrong = sorted(rank for ranks in (same[:-1] if known else same) for rank in ranks)
        names = ", ".join(f"rank {rank} on {told[rank][2]}" for rank in wrong)
        said.append(f"the odd ones out: {names}" if known else f"no majority tells which is wrong of {names}")
    if said:
        raise Diverged(
            f"After step {step} not all copies of the parameters are equal; {'; '.join(said)}. No checkpoint was"
            " written since they were compared last. It may be faulty hardware there; start again to go on from the"
            " newest checkpoint"
        )


class StopVote:
    """Agreement to stop: SIGTERM, SIGINT, SIGHUP or SIGUSR1 on any rank, or a save that failed there, ends the run on
    all ranks at the same step, one step after it was noticed: nobody waits for the answer. What a second signal does is
    the watchdog's."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.reason, self.pending = ranks, "", None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame) -> None:
        self.reason = self.reason or signal.Signals(number).name

    def agreed(self, failed: bool = False) -> bool:
        """Casts this step's vote and returns the outcome of the step before. All ranks must call, once a step."""
        mine = bool(self.reason or failed)
        if self.ranks.world_size == 1:
            return mine
        outcome = False
        if self.pending is not None:
            work, vote = self.pending
            work.wait(timedelta(seconds=ANSWER)) if self.reason else work.wait()  # told to stop as a peer is dead?
            outcome = bool(vote.item())
        vote = torch.tensor([int(mine)])
        self.pending = (dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.ranks.control, async_op=True), vote)
        return outcome


class Watchdog:
    """A thread that keeps the run folder's lock, and ends this process at a second signal to stop (unless it comes with
    the first: Slurm signals torchrun and ranks alike, and torchrun passes its own on), and when it hangs: when no step
    ends within --timeout, or none after a signal to stop. Then every rank's watchdog writes its Python stacks to
    logs/HOST, and the ranks tell each other how far they are, through the store that they met at: so the one that is
    behind can be named, even if all main threads are blocked.

    It goes by the clock, which changes its part several times in a step."""

    def __init__(self, timeout: int, run: Path, ranks: Ranks, clock: Clock, lock: RunLock | None):
        self.timeout, self.run, self.ranks, self.clock, self.lock = timeout, run, ranks, clock, lock
        self.groups = [None, ranks.control] if ranks.world_size > 1 else []
        self.store = dist.distributed_c10d._get_default_store().clone() if ranks.world_size > 1 else None
        self.told = None  # when a signal to stop came
        self.loaders = []
        self.longest = 0.0  # seconds between changes of the clock so far, in steps
        self.ended = False
        self.signals, ours = socket.socketpair()
        ours.setblocking(False)
        signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)  # also while the main thread is in C++ code
        self.ours = ours
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def add_mesh(self, mesh: DeviceMesh | None) -> None:
        """Groups whose collectives tell how far a rank is."""
        self.groups += mesh.get_all_groups() if mesh is not None and self.groups else []

    def end(self) -> None:
        """What follows is not the run's."""
        self.ended = True

    def _watch(self) -> None:
        stops = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
        while not self.ended:
            signalled = select.select([self.signals], [], [], 1.0)[0] and stops & set(self.signals.recv(64))
            if self.ended:
                return
            if signalled and self.told and time.perf_counter() - self.told > TOGETHER:
                self._end("stopped at once, without saving", [], "stopped")
            if signalled:
                self.told = self.told or time.perf_counter()
            if self.lock and (lost := self.lock.keep()):
                self._end(f"--out {self.run}: {lost}", [], "" if lost == TAKEN else "failed")
            part, still = self.clock.stack[-1], time.perf_counter() - self.clock.since
            in_step = part in ("steps", "data")
            limit = self.timeout if in_step else max(self.timeout, START)
            if part == "start":  # which may take longer than whoever asks for an end waits; nothing is to be saved
                if self.told:
                    self._end("stopped before the first step", [], "stopped", int(self.ranks.world_size > 1))
                continue
            if in_step and self.told and still > (patience := max(ANSWER, 2 * self.longest)):
                if time.perf_counter() - self.told > patience:
                    self._hang(f"told to stop, and no step has ended for {still:.0f} s: nothing is saved")
            elif still > limit:
                self._hang(f"no step has ended for {still:.0f} s (--timeout {self.timeout})")
            if in_step:
                self.longest = max(self.longest, still)

    def _waits(self) -> str:
        """What of the hub a step waits for that hangs on data."""
        loaders = self.loaders if self.clock.stack[-1] in ("data", "evaluation") else []
        return "".join(f", {waits}" for loader in loaders if (waits := loader.waits_for()))

    def _hang(self, what: str) -> None:
        folder = self.run / "logs" / platform.node()
        file = folder / f"rank-{self.ranks.rank:05d}-stacks.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(file, "w") as f:
                f.write(f"rank {self.ranks.rank} on {platform.node()}: {what}; last step {self.clock.step}\n")
                f.flush()
                faulthandler.dump_traceback(f, all_threads=True)
        except OSError as e:
            print(f"{file} could not be written: {e}", file=sys.stderr)
        where = f"Stacks are in {folder.parent}/*/rank-*-stacks.txt"
        self._end(f"After step {self.clock.step}: {what}{self._waits()}. {where}", self._behind())

    def _behind(self) -> list[str]:
        """Who is behind, in words; nothing for a rank alone."""
        if self.store is None:
            return []
        made = 0
        for group in self.groups:
            with contextlib.suppress(RuntimeError, AttributeError):
                made += (group or dist.group.WORLD)._get_sequence_number_for_group()
        me = [self.clock.step, made, self.clock.stack[-1] + self._waits(), platform.node()]
        rows = {}
        with contextlib.suppress(Exception):  # the store is gone with its machine
            self.store.set_timeout(timedelta(seconds=2))
            self.store.set(f"flatland/watch/{self.ranks.rank}", json.dumps(me))
            end = time.monotonic() + 5
            while len(rows) < self.ranks.world_size and time.monotonic() < end:
                time.sleep(0.2)
                for rank in set(range(self.ranks.world_size)) - set(rows):
                    if self.store.check([key := f"flatland/watch/{rank}"]):
                        rows[rank] = json.loads(self.store.get(key))
        silent = sorted(set(range(self.ranks.world_size)) - set(rows))
        out = [f"rank {rank} does not answer: stopped, gone, or cut off" for rank in silent]
        if rows:
            least, most = min(r[:2] for r in rows.values()), max(r[:2] for r in rows.values())
            behind = [rank for rank, r in sorted(rows.items()) if r[:2] == least < most]
            for rank in behind:
                step, _, part, host = rows[rank]
                out.append(f"rank {rank} on {host} is behind: its last step was {step}, it is in {part!r}")
            if not out and not self._waits():
                out.append("all ranks wait at the same place: the network between them?")
        return out

    def _end(self, what: str, why: list[str], state: str = "failed", code: int = 1) -> None:
        """state: for status.json; empty: the run folder is another job's by now."""
        message = f"rank {self.ranks.rank} on {platform.node()}: " + "; ".join([what, *why])
        print(f"error: {message}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError, KeyError):
            status = json.loads((self.run / "status.json").read_text())
            if state and status["state"] == "running":
                write_status(self.run, state, max(self.clock.step, status["step"]), code, message)
                with open(self.run / "log.txt", "a") as f:
                    f.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} E [guard.py] {message}\n")
        if self.lock and state:
            self.lock.release()
        os._exit(code)
