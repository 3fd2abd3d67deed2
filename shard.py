"""Ranks, and what is done to a plain model so that it trains on them.

The order is fixed, each step one call, in train.py's `build`:

    meta device -> checkpointing -> compile each block -> activation offload -> fully_shard -> to_empty -> fill

Checkpointing goes first, because the compiler must see it; compilation before sharding, so that the compiled graph
holds the computation and not the gathering; memory is allocated last, when every rank knows which part is its own.
Each step rebinds a block's `forward`; nothing wraps or renames a module: parameter names stay those of the model.

Replication, full sharding and hybrids are one 2-D mesh (replicate, shard): --shard_size 1 replicates, 0 shards over all
ranks. One rank alone is not wrapped, unless its parameters are offloaded. Works on any module with `.layers`."""

import logging
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from lib.errors import UserError, read_ahead
from lib.machine import find_device, keep_memory, set_determinism
from optim import is_sharded, local, local_part

logger = logging.getLogger("flatland")
WATCHDOG = 15  # seconds that a rank's watchdog has to find out who is behind


@dataclass(frozen=True)
class Ranks:
    """This process among all. control: the gloo group for votes and what ranks tell each other (None: alone), used by
    the main thread only; saving: that of the thread that writes checkpoints."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None


ALONE = Ranks(0, 1, torch.device("cpu"))


def init_ranks(deterministic: bool = False) -> Ranks:
    """Sets up the allocator and the device, and joins the process group that torchrun describes in the environment;
    without one, this process is alone. deterministic: only kernels that give the same bits each time. All ranks must
    call."""
    keep_memory()
    set_determinism(deterministic)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = find_device(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        return Ranks(0, 1, device)
    cuda = device.type == "cuda"
    options = {"backend": "cuda:nccl,cpu:gloo", "device_id": device} if cuda else {"backend": "gloo"}
    dist.init_process_group(timeout=timedelta(minutes=30), **options)
    return Ranks(dist.get_rank(), world_size, device, *(dist.new_group(backend="gloo") for _ in range(2)))


def leave(ranks: Ranks) -> None:
    """Where there is a process group: ends the process with status 0 when all ranks have come this far. All ranks must
    call. The interpreter's own end is skipped: gloo's threads can still hold tensors then, and abort it (pytorch pull
    request 179291; seen here in 1 of 10 runs that had merely destroyed the group)."""
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        dist.barrier(ranks.control)
        dist.destroy_process_group()
        os._exit(0)


def mesh_shape(shard_size: int, world_size: int) -> tuple[int, int]:
    """-> (replicate, shard): how many copies of the parameters there are, and over how many ranks each is spread."""
    size = shard_size or world_size
    if world_size % size:
        raise UserError(f"--shard_size {size} does not divide the {world_size} ranks")
    return world_size // size, size


def make_mesh(shard_size: int, ranks: Ranks, offload: bool = False) -> DeviceMesh | None:
    """The (replicate, shard) mesh; None for one rank, unless it offloads. All ranks must call."""
    shape = mesh_shape(shard_size, ranks.world_size)
    if ranks.world_size == 1:
        if not offload:
            return None
        if not dist.is_initialized():
            backend = "cuda:nccl,cpu:gloo" if ranks.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


def set_timeout(seconds: int, ranks: Ranks, mesh: DeviceMesh | None) -> None:
    """Sets how long collectives wait for a rank. Their error names nobody: the watchdogs (lib/run.py), which name the
    rank, must always come first. They set no limit to a save that makes progress, so nor do the groups that wait for
    it."""
    if ranks.world_size == 1:
        return
    for group in [None, *mesh.get_all_groups()]:
        _set_pg_timeout(timedelta(seconds=seconds + WATCHDOG), group)
    for group in (ranks.control, ranks.saving):
        _set_pg_timeout(timedelta(days=30), group)


# ---- the build order


def compile_model(model: nn.Module, mode: str) -> None:
    """block: every block on its own, sharing one compiled graph, and the loss head's softmax; model: everything as one
    graph. In place."""
    if mode == "model":
        model.compile(dynamic=False)
    elif mode == "block":
        model.lm_head.cross_entropy = torch.compile(model.lm_head.cross_entropy, dynamic=False)
    for block in model.layers if mode == "block" else []:
        block.forward = torch.compile(block.forward, dynamic=False)


def sharded_dim(parameter: Tensor, size: int) -> int:
    """The dimension that `size` ranks divide: the first, which may be uneven, but for stacked experts one that is even,
    if there is any."""
    dims = range(parameter.ndim if parameter.ndim == 3 else 1)
    return next((d for d in dims if parameter.shape[d] % size == 0), 0)


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh | None,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype = torch.float32,
    reshard: str = "auto",
    prefetch: int = 1,
    offload: bool = False,
) -> None:
    """FSDP2: parameters are gathered in `dtype` unit by unit, gradients summed in `reduce_dtype`. Units are the
    embedding, each block, lm_head (tied, these two belong to the rest) and the rest.

    Neither the embedding nor our loss head needs its weight in the backward pass: it is not gathered again."""
    if mesh is None:
        return
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )
    from torch.distributed.tensor import Shard

    size = mesh["shard"].size()

    ends = [getattr(model, name, None) for name in ("embed_tokens", "lm_head")]
    if None in ends or ends[0].weight is ends[1].weight:
        ends = []
    units = [*ends[:1], *model.layers, *ends[1:], model]
    needed_next = {model, model.layers[-1]}  # their backward pass begins when the forward pass ends
    # Inputs are not cast: the model does it, and its rope tables are to stay fp32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for unit in units:
        give_back = {"auto": unit not in needed_next, "always": True, "never": False}[reshard]
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=(size > 1 or offload) and give_back,
            shard_placement_fn=lambda parameter: Shard(sharded_dim(parameter, size)),
            offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
        )
        unit.set_gradient_divide_factor(1.0)  # sums: they are divided by the count of trained tokens, known later
        unit.set_force_sum_reduction_for_comms(True)  # and not as a multiplied sum, which gloo lacks
        unit.set_unshard_in_backward(unit not in ends)
    if offload and size == 1:
        from offload import bring_ahead

        bring_ahead(model, mesh.device_type == "cuda")
    in_order = [model, *units[:-1]]
    for i, unit in enumerate(in_order if prefetch else []):
        unit.set_modules_to_forward_prefetch(in_order[i + 1 : i + 1 + prefetch])
        unit.set_modules_to_backward_prefetch(in_order[max(1, i - prefetch) : i][::-1])
    register_fsdp_forward_method(model, "logits")
    logger.info("Wrapped model with FSDP")


PIECE = 2**23  # elements that are read, sent and copied at a time


def fill(model: nn.Module, read: Callable[[str, tuple[slice, ...]], Tensor], load: str = "direct") -> None:
    """Gives every parameter its values: read(name, slices) returns those of a part of it, on the CPU, in any dtype.
    direct: every rank reads what it keeps; rank0: rank 0 alone reads, and sends each rank its part. Either goes piece
    by piece, the next one being read while this one is sent and copied. All ranks must call."""
    fill_tensors(list(model.named_parameters()), read, load)


def fill_tensors(named: list[tuple[str, Tensor]], read: Callable, load: str) -> None:
    source = _sent_by_rank0 if load == "rank0" and is_sharded(named[0][1]) else _read_here
    total, mine = (sum(p.numel() for p in ps) for ps in ([p for _, p in named], [local(p) for _, p in named]))
    done, size, begin = 0, 0.0, time.perf_counter()
    said = begin
    with torch.no_grad():
        for target, values in source(named, read):
            target.copy_(values)
            done += values.numel()
            size += values.numel() * values.element_size() * total / max(mine, 1)  # of all ranks, who read alike
            seconds = time.perf_counter() - begin
            if begin + seconds - said > 10:
                said, rate, rest = begin + seconds, size / 1e9 / seconds, seconds * (mine / max(done, 1) - 1)
                logger.info("Loading: %.0f %%, %.2f GB/s, %.0f s left", 1e2 * done / mine, rate, rest)
    seconds = time.perf_counter() - begin
    rate = size / 1e9 / seconds
    logger.info("Filled %d tensors: %.3f GB in %.1f s, %.2f GB/s", len(named), size / 1e9, seconds, rate)


def _read_here(named: list, read: Callable) -> Iterator[tuple[Tensor, Tensor]]:
    """-> (part of this rank's part of a parameter, its values)"""

    def pieces():
        for name, parameter in named:
            shape, sharding, target = parameter.shape, _sharding(parameter), local(parameter.detach())
            for rows in _rows(shape, *sharding[:2], PIECE):
                yield target[rows], read(name, _slices(shape, *sharding, rows))

    return read_ahead(pieces(), 1)


def _sent_by_rank0(named: list, read: Callable) -> Iterator[tuple[Tensor, Tensor]]:
    """The same. Rank 0 scatters a piece over the ranks of its copy of the model; they send it to the other copies."""
    mesh, first = named[0][1].device_mesh, dist.get_rank() == 0
    dtypes = [[read(n, tuple(slice(0, 1) for _ in p.shape)).dtype for n, p in named] if first else None]
    dist.broadcast_object_list(dtypes, 0)

    def pieces():
        for (name, parameter), dtype in zip(named, dtypes[0], strict=True):
            shape, (dim, parts, _), target = parameter.shape, _sharding(parameter), local(parameter.detach())
            for rows in _rows(shape, dim, parts, PIECE // parts):
                places = [_slices(shape, dim, parts, i, rows) for i in range(parts)] if first else []
                yield target[rows], rows.stop - rows.start, dtype, [read(name, place) for place in places]

    for target, length, dtype, values in read_ahead(pieces(), 1):
        shape = [length, *target.shape[1:]]
        buffer = torch.empty(shape, dtype=dtype, device=mesh.device_type)
        parts = [_padded(v, shape).to(buffer.device) for v in values] if first else None
        if mesh.get_coordinate()[0] == 0:
            dist.scatter(buffer, parts, group=mesh.get_group("shard"), group_src=0)
        if mesh.size(0) > 1:
            dist.broadcast(buffer, group=mesh.get_group("replicate"), group_src=0)
        yield target, buffer[: len(target)]


def _sharding(parameter: Tensor) -> tuple[int, int, int]:
    """(dimension that is divided, number of parts, this rank's)"""
    if not is_sharded(parameter):
        return 0, 1, 0
    return parameter.placements[-1].dim, parameter.device_mesh.size(-1), parameter.device_mesh.get_coordinate()[-1]


def _rows(shape: torch.Size, dim: int, parts: int, elements: int) -> Iterator[slice]:
    """Cuts the rows of the largest part into slices of about so many elements."""
    rows = -(-shape[0] // parts) if dim == 0 else shape[0]
    width = math.prod(shape[1:]) // (1 if dim == 0 else parts)
    step = max(1, elements // max(width, 1))
    return (slice(a, min(a + step, rows)) for a in range(0, rows, step))


def _slices(shape: torch.Size, dim: int, parts: int, part: int, rows: slice) -> tuple[slice, ...]:
    """Where those rows of a part lie in the whole tensor."""
    step, out = -(-shape[dim] // parts), [slice(0, n) for n in shape]
    out[dim] = slice(min(part * step, shape[dim]), min((part + 1) * step, shape[dim]))
    first = out[0]
    out[0] = slice(min(first.start + rows.start, first.stop), min(first.start + rows.stop, first.stop))
    return tuple(out)


def _padded(values: Tensor, shape: list[int]) -> Tensor:
    """The last part may be smaller, all that is sent is of one size."""
    if list(values.shape) == shape:
        return values.contiguous()
    out = values.new_zeros(shape)
    out[: len(values)] = values
    return out


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor."""
    return tuple(slice(start, start + n) for n, start in zip(*local_part(tensor), strict=True))


def owns(tensor: Tensor) -> bool:
    """Whether this rank, among those that hold the same part, is the one to save it."""
    if not is_sharded(tensor):
        return True
    return all(
        not p.is_replicate() or c == 0
        for p, c in zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    )


# ---- in the loop


def sync_gradients(model: nn.Module, last: bool, reshard: str = "auto") -> None:
    """Before each micro-batch; last: of its step. Replicas reduce over each other with the last one only. Over the
    ranks of a copy each one is reduced: whole gradients of a large model would not fit. With --reshard never the
    parameters stay gathered until the last."""
    if hasattr(model, "set_requires_all_reduce"):  # FSDP's
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or reshard != "never")


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward one: gives back what stayed gathered. Until then parameters are whole
    copies in the compute dtype, nothing to save or to update."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def on_first_rank(work: Callable, ranks: Ranks):
    """Rank 0 runs `work` while the others wait; all ranks get its result, or its error. All ranks must call."""
    result = error = None
    if ranks.rank == 0:
        try:
            result = work()
        except Exception as e:
            error = e
    if ranks.world_size > 1:
        message = [result, error]
        dist.broadcast_object_list(message, 0, ranks.control)
        result, error = message
    if error is not None:
        raise UserError(str(error)) if isinstance(error, UserError) else error
    return result


def on_every_rank(work: Callable, ranks: Ranks):
    """Each rank does it and gets its own result; or all get one error, which names the ranks and machines that had one.
    All ranks must call."""
    result, fault = None, ""
    try:
        result = work()
    except (UserError, OSError) as e:
        fault = f"rank {ranks.rank} on {platform.node()}: {e}"
    faults = [f for f in gather(fault, ranks) if f]
    if faults:
        raise UserError("\n".join(faults))
    return result


def on_all(work: Callable, ranks: Ranks, group=None) -> list:
    """Each rank does it -> the results of all; an error on one is raised on all, as it is. All ranks must call."""
    result = error = None
    try:
        result = work()
    except (OSError, UserError) as e:
        error = e
    except Exception as e:  # it may hold what cannot be sent
        error = RuntimeError(f"{type(e).__name__}: {e}")
    answers = gather((result, error), ranks, group)
    for _, error in answers:
        if error is not None:
            raise error
    return [result for result, _ in answers]


def gather(value, ranks: Ranks, group: dist.ProcessGroup | None = None) -> list:
    """One object of every rank, on all ranks. group: default ranks.control. All ranks must call."""
    if ranks.world_size == 1:
        return [value]
    out = [None] * ranks.world_size
    dist.all_gather_object(out, value, group=group or ranks.control)
    return out
