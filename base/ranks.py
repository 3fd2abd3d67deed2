"""Ranks: this process among all, joining and leaving the process group, and work on the first or on every rank.

helper              who works       who gets what
on_every_rank       every rank      each rank its own result
on_first_rank       rank 0          all ranks its result
gather              -               all ranks one object of each
sum_over_ranks      -               all ranks the sums of tensors, and a few numbers of each
fill_in_turn        several ranks   all ranks the tensors that one of them has filled

An error in work is raised on all ranks."""

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from base.disk import advance
from base.errors import Failure, UserError, describe_error
from base.host import find_device

WATCHDOG = 15  # seconds that a rank's watchdog has to find out which rank is behind
ANSWER = timedelta(seconds=10)  # for the store; less than WATCHDOG


@dataclass(frozen=True)
class Ranks:
    """This process among all. control: the gloo group for votes, messages and tensors on the host, used by the main
    thread only (None: one process, or the imagined ranks of --check); saving: the group of the thread that writes
    checkpoints; store: where the ranks met."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None
    store: dist.Store | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank} on {platform.node()}"


ALONE = Ranks(0, 1, torch.device("cpu"))


def init_ranks() -> Ranks:
    """Joins the process group that torchrun describes in the environment; without one, this process is alone. Its
    device becomes torch's current one. All ranks must call."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = find_device(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        return Ranks(0, 1, device)
    # One backend for each group: when a group with two is split, gloo warns on every rank about NCCL's options.
    options = {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
    dist.init_process_group(timeout=timedelta(minutes=30), **options)
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    for group in groups:  # they wait for work that may take days; a watchdog ends it if it makes no progress
        group.set_timeout(timedelta(days=30))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=ANSWER)
    return Ranks(dist.get_rank(), world_size, device, *groups, store)


def leave(ranks: Ranks) -> None:
    """If there is a process group: ends the process with status 0 when all ranks have come this far. All ranks must
    call. Skips the interpreter's own end, where gloo's threads can still hold tensors and abort (pytorch pull request
    179291; without this, 1 of 10 runs aborted after destroying the group)."""
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        dist.barrier(ranks.control)
        dist.destroy_process_group()
        os._exit(0)


def set_timeout(seconds: int, ranks: Ranks, groups: list[dist.ProcessGroup]) -> None:
    """Sets how long collectives of the model and the loss wait for a rank. Their error names nobody: the watchdogs
    (job/watchdog.py), which name the rank, must always come first."""
    if ranks.world_size == 1:
        return
    for group in (dist.group.WORLD, *groups):
        group.set_timeout(timedelta(seconds=seconds + WATCHDOG))


def on_every_rank(work: Callable, ranks: Ranks):
    """Each rank runs `work` and gets its own result. If some ranks fail, all raise one error with the messages of all:
    a UserError if each is one, else a Failure. Errors are sent as text: not every error can be pickled. All ranks must
    call."""
    result = fault = None
    try:
        result = work()
    except Exception as error:
        if ranks.control is None:
            raise
        status, message = describe_error(error)
        named = ranks.rank == 0 or message.startswith(ranks.name)
        fault = status, message if named else f"{ranks.name}: {message}"
    if ranks.control is not None:
        failed = torch.tensor(fault is not None, dtype=torch.int32)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=ranks.control)
        if failed:
            statuses, messages = zip(*filter(None, gather(fault, ranks)), strict=True)
            raise (UserError if min(statuses) == 2 else Failure)("\n".join(messages))
    return result


def on_first_rank(work: Callable, ranks: Ranks):
    """Rank 0 runs `work` while the others wait; all ranks get its result. All ranks must call."""
    result = [on_every_rank(lambda: work() if ranks.rank == 0 else None, ranks)]
    if ranks.control is not None:
        dist.broadcast_object_list(result, 0, ranks.control)
    return result[0]


def gather(value, ranks: Ranks) -> list:
    """One object of every rank, on all ranks. All ranks must call."""
    if ranks.control is None:
        return [value]
    out = [None] * ranks.world_size
    dist.all_gather_object(out, value, group=ranks.control)
    return out


def sum_over_ranks(tensors: list[Tensor], values: list[float], ranks: Ranks) -> tuple[list[Tensor], list[list[float]]]:
    """-> (the sums of the tensors over the ranks, fp64 on the host; `values` of every rank), with one all-reduce on the
    device: reading pickled objects of 1,024 ranks takes every rank a third of a second. All ranks must call."""
    table = torch.zeros(ranks.world_size, len(values), dtype=torch.float64)
    table[ranks.rank] = torch.tensor(values)
    parts = [table, *tensors]
    flat = torch.cat([part.to(ranks.device, torch.float64).flatten() for part in parts])
    if ranks.world_size > 1:
        dist.all_reduce(flat)
    pieces = flat.cpu().split([part.numel() for part in parts])
    table, *sums = (piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True))
    return sums, table.tolist()


def fill_in_turn(work: list[tuple[Callable, list[Tensor]]], owners: int, ranks: Ranks) -> None:
    """work: functions and the tensors that each of them fills. The first `owners` ranks take turns in running them, and
    send the tensors to all ranks. All ranks must call."""

    def fill() -> None:
        for run, _ in work[ranks.rank :: owners] if ranks.rank < owners else ():
            run()

    on_every_rank(fill, ranks)
    for i, (_, tensors) in enumerate(work if ranks.world_size > 1 else ()):
        for tensor in tensors:
            dist.broadcast(tensor, i % owners)
            advance()
