"""Ranks, and the steps that make a plain model train on them.

The order is fixed, each step one call, in train.py's `build`:

    meta device -> share rows -> checkpointing -> compile each block -> activation offload -> fully_shard -> to_empty
    -> fill

Checkpointing comes first, because the compiler must see it. Compilation comes before sharding, so that a compiled graph
holds the computation without the gathering, and before activation offload, which the compiler must not see. Memory is
allocated last, when every rank knows its part. Checkpointing, compilation and offload rebind a block's `forward`; FSDP
changes the class of a module. No step wraps or renames a module, so parameters keep the model's names. Before the first
of these steps, `build` replaces linear layers for FP8 and LoRA.

Replication, full sharding and hybrids use one 2-D mesh (replicate, shard): --shard_size 1 replicates, 0 shards over all
ranks. A model with one replica is sharded on the mesh's 1-D part `shard`: on a 2-D mesh FSDP2 would keep the reduced
gradients of all units until the backward pass ends. One rank alone is not sharded, unless its parameters are offloaded.

With --context_parallel N, consecutive ranks share a row: each computes an N-th of its tokens (attention.RowPart). They
form groups of their own. The mesh does not change, because losses and gradients are sums over tokens."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import nf4
from attention import WHOLE, RowPart
from lib import progress, torch_private
from lib.errors import UserError
from lib.files import read_ahead
from lib.parts import is_sharded, local, shard_slices, sharding
from lib.ranks import ALONE, Ranks, on_first_rank

logger = logging.getLogger("flatland")


def mesh_shape(shard_size: int, world_size: int) -> tuple[int, int]:
    """-> (number of copies of the parameters, number of ranks over which each copy is sharded)"""
    size = shard_size or world_size
    if world_size % size:
        raise UserError(f"--shard_size {size} does not divide the {world_size} ranks")
    return world_size // size, size


def make_mesh(shard_size: int, ranks: Ranks, offload: bool = False) -> DeviceMesh | None:
    """The (replicate, shard) mesh; None for one rank, unless it offloads. All ranks must call."""
    shape = mesh_shape(shard_size, ranks.world_size)
    if ranks.world_size == 1 and not offload:
        return None
    if not dist.is_initialized():  # one rank that offloads
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


# ---- rows that ranks share


def make_row_group(size: int, ranks: Ranks) -> dist.ProcessGroup | None:
    """The group of this rank and the others that share its rows; None for size 1. All ranks must call."""
    if size == 1:
        return None
    shape = ranks.world_size // size, size
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("rows", "context")).get_group("context")


def groups_of(mesh: DeviceMesh | None, row_group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """The groups of the model's collectives."""
    return [*(mesh.get_all_groups() if mesh else []), *([row_group] if row_group else [])]


class _Exchange(torch.autograd.Function):
    """x [N, ...]: part i goes to rank i of the group. The backward pass is the same exchange of the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return torch_private.all_to_all(x, group_name, len(x))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return torch_private.all_to_all(grad, ctx.group_name, len(grad)), None


def share_rows(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Makes the model compute this rank's part of each row that its group shares."""
    if group is not None:
        name = group.group_name
        _set_part(model, RowPart(group.rank(), group.size(), lambda x: _Exchange.apply(x, name)))


def _set_part(model: nn.Module, part: RowPart) -> None:
    for module in (model, *(block.self_attn for block in model.layers)):
        module.part = part


@contextlib.contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """Within it, every rank computes whole rows, as for the checkpoint's probe and for samples."""
    part = model.part
    _set_part(model, WHOLE)
    yield
    _set_part(model, part)


# ---- activations: tensors that the forward pass keeps for the backward pass


def checkpoint_activations(model: nn.Module, mode: str) -> None:
    """block: each block keeps its input only and computes the rest again in the backward pass (arXiv 1604.06174);
    selective: it also keeps the outputs of its matrix products and of attention."""
    options = {}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, torch_private.expensive_operators())
    for block in model.layers if mode != "none" else []:
        block.forward = _checkpointed(block.forward, options)
    for layer in nf4.layers(model).values():
        layer.recomputed = mode == "block"


def _checkpointed(forward: Callable, options: dict) -> Callable:
    def run(*args):
        return checkpoint(forward, *args, use_reentrant=False, **options)

    return run


def _key_of(x: Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.dtype


class ActivationOffload:
    """Keeps the inputs of blocks, which checkpointing saves, in the host's memory until the backward pass. On a GPU
    both ways are pinned copies on a separate stream: the forward pass does not wait for them, and while the backward
    pass, which needs the last one first, computes with one input, the next one is fetched. On a CPU the copies are made
    too, and save nothing."""

    def __init__(self, device: torch.device):
        self.device, self.streams = device, torch.get_device_module(device)
        self.stream = self.streams.Stream()
        self.entries: list[list] = []  # [copy on the host, fetched copy or None], in the order of the forward pass

    def wrap(self, forward: Callable) -> Callable:
        def run(x: Tensor, *args):
            key = _key_of(x)  # not x: autograd keeps the hook, which would keep x

            def save(saved: Tensor):  # autograd passes every tensor that it saves for the backward pass
                return self._save(saved) if _key_of(saved) == key else saved

            with torch.autograd.graph.saved_tensors_hooks(save, self._restore):
                return forward(x, *args)

        return run

    def _save(self, x: Tensor) -> list:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        self.stream.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.stream):
            host.copy_(x, non_blocking=True)
        self._hold(x, self.stream)
        self.entries.append([host, None])
        return self.entries[-1]

    def _hold(self, x: Tensor, stream) -> None:
        """Keeps the memory of x until the stream has done its present work."""
        if x.is_cuda:
            x.record_stream(stream)

    def _fetch(self, entry: list) -> None:
        if entry[1] is None:
            with self.streams.stream(self.stream):  # which has copied it to the host before
                entry[1] = entry[0].to(self.device, non_blocking=True, copy=True)

    def _restore(self, entry) -> Tensor:
        if isinstance(entry, Tensor):
            return entry
        self._fetch(entry)
        while self.entries and self.entries.pop() is not entry:
            pass  # later blocks need theirs no more
        self.streams.current_stream().wait_stream(self.stream)
        self._hold(entry[1], self.streams.current_stream())
        if self.entries:
            self._fetch(self.entries[-1])
        return entry[1]


def offload_activations(model: nn.Module, on: bool, device: torch.device) -> None:
    if on:
        offload = ActivationOffload(device)
        for block in model.layers:
            block.forward = offload.wrap(block.forward)


# ---- compilation and sharding


def compile_model(model: nn.Module, mode: str) -> None:
    """block: every block on its own, all sharing one compiled graph, and the loss head's softmax; model: everything as
    one graph. In place."""
    if mode == "model":
        model.compile(dynamic=False)
    elif mode == "block":
        model.lm_head.cross_entropy = torch.compile(model.lm_head.cross_entropy, dynamic=False)
        for block in model.layers:
            block.forward = torch.compile(block.forward, dynamic=False)


def uncompiled():
    """Within it, compiled functions run as they are written: for one short row they would be compiled again. A compiler
    that is not loaded stays so, which saves 60 MB and a second."""
    return torch.compiler.set_stance("force_eager") if torch_private.is_compiler_loaded() else contextlib.nullcontext()


def sharded_dim(parameter: Tensor, size: int) -> int:
    """The dimension that is divided over `size` ranks. Stacked experts take the first dimension that divides evenly, if
    they have one. Other parameters take dimension 0."""
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
    """FSDP2: parameters are gathered in `dtype` unit by unit, gradients summed in `reduce_dtype`. The units are the
    embedding, each block, lm_head, and the rest of the model. Tied embeddings belong to the rest.

    offload: parameters, gradients and moments are kept in the host's memory. With several micro-batches, adding up
    their gradients there makes each backward pass wait for the copies.

    The backward pass of the embedding and of our loss head needs no weight: theirs are not gathered again."""
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

    replicas, size = mesh.shape
    ends = [getattr(model, name, None) for name in ("embed_tokens", "lm_head")]
    if None in ends or ends[0].weight is ends[1].weight:
        ends = []
    units = [*ends[:1], *model.layers, *ends[1:], model]
    needed_next = {model, model.layers[-1]}  # their backward pass begins when the forward pass ends
    # Inputs are not cast: the model does it, and its rope tables must stay fp32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for unit in units:
        reshard_after = {"auto": unit not in needed_next, "always": True, "never": False}[reshard]
        fully_shard(
            unit,
            mesh=mesh if replicas > 1 else mesh["shard"],
            mp_policy=policy,
            reshard_after_forward=(size > 1 or offload) and reshard_after,
            shard_placement_fn=lambda parameter: Shard(sharded_dim(parameter, size)),
            offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
        )
        if mesh.size() > 1:  # one rank would divide by 1 in another copy of the gradients
            unit.set_gradient_divide_factor(1.0)  # sums: the step divides by the number of trained tokens later
            unit.set_force_sum_reduction_for_comms(True)  # plain sums: gloo has no scaled ones
        unit.set_unshard_in_backward(unit not in ends)
    in_order = [model, *units[:-1]]  # the rest of the model is gathered first
    for i, unit in enumerate(in_order if prefetch else []):
        unit.set_modules_to_forward_prefetch(in_order[i + 1 : i + 1 + prefetch])
        unit.set_modules_to_backward_prefetch(in_order[max(1, i - prefetch) : i][::-1])
    register_fsdp_forward_method(model, "logits")
    logger.info("Wrapped model with FSDP")


# ---- filling parameters

PIECE_BYTES = 2**25  # of a rank's part, read, sent and copied at a time; small parameters share a message of this size


def fill_parameters(model: nn.Module, read: Callable[[str, tuple[slice, ...]], Tensor], load: str = "direct") -> None:
    """Gives every parameter its values: read(name, slices) returns a part of them, on the CPU, in any dtype.
    direct: every rank reads the values that it keeps; rank0: only rank 0 reads, and sends each rank its part. Both work
    piece by piece, and read the next pieces while others are sent and copied. All ranks must call."""
    fill_tensors(list(model.named_parameters()), read, load)
    fill_quantized(model, read, load)


def fill_frozen(model: nn.Module, read: Callable | None, load: str) -> None:
    """Like fill_parameters, only for the frozen weights of a model with adapters, if there are any."""
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        fill_tensors(frozen, read, load)
        fill_quantized(model, read, load)


@torch.no_grad()
def fill_quantized(model: nn.Module, read: Callable, load: str = "direct") -> None:
    """Quantizes the weights of layers in NF4, which every rank holds. rank0: rank 0 does, and sends the others the
    result. All ranks must call."""
    sends = load == "rank0" and dist.is_initialized() and dist.get_world_size() > 1
    for name, layer in nf4.layers(model).items():
        on_first_rank(partial(_quantize, name, layer, read), _everyone() if sends else ALONE)
        for buffer in layer.buffers() if sends else ():
            dist.broadcast(buffer, 0)
            progress.advance()


def _quantize(name: str, layer: nf4.Nf4Linear, read: Callable) -> None:
    shape = layer.out_features, layer.in_features
    for rows in _rows(shape, 0, 1, PIECE_BYTES // 2):
        layer.fill(rows, read(f"{name}.weight", (rows, slice(0, shape[1]))))
        progress.advance()


def _everyone() -> Ranks:
    """All ranks, for messages in the default group."""
    return Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), dist.group.WORLD)


def fill_tensors(named: list[tuple[str, Tensor]], read: Callable, load: str = "direct") -> None:
    source = _sent_by_rank0 if load == "rank0" and is_sharded(named[0][1]) else _read_here
    kept = sum(local(tensor).numel() for _, tensor in named)  # by this rank
    done, seconds, reported, begin = 0, 0.0, 0.0, time.perf_counter()
    with torch.no_grad():
        for target, values in source(named, read):
            target.copy_(values)
            progress.advance()
            done += values.numel()
            seconds = time.perf_counter() - begin
            if seconds > reported + 10:
                reported = seconds
                logger.info("Loading: %.0f %%, %.0f s left", 100 * done / kept, seconds * (kept / done - 1))
    size = sum(tensor.nbytes for _, tensor in named) / 1e9
    logger.info("Filled %d tensors: %.3f GB in %.1f s", len(named), size, seconds)


def _read_here(named: list, read: Callable) -> Iterator[tuple[Tensor, Tensor]]:
    """-> (piece of this rank's part of a parameter, its values)"""

    def pieces():
        for name, parameter, rows in _pieces(named):
            values = read(name, shard_slices(parameter.shape, *sharding(parameter), rows))
            yield local(parameter.detach())[rows], values

    return read_ahead(pieces(), 1)


def _sent_by_rank0(named: list, read: Callable) -> Iterator[tuple[Tensor, Tensor]]:
    """-> (piece, values), as `_read_here`. Rank 0 sends a message to each rank of its replica in turn, while it reads
    the next one; these ranks pass it on to the other replicas. A message holds pieces of several small parameters. The
    memory that this needs does not grow with the number of ranks. After an error in reading, the messages are sent
    without values, and all ranks raise it."""
    mesh, is_rank0 = named[0][1].device_mesh, dist.get_rank() == 0
    parts, group, device = mesh.size(-1), mesh.get_group("shard"), mesh.device_type
    errors = []

    def try_to_read(name: str, place: tuple[slice, ...]) -> Tensor:
        try:
            if not errors:
                return read(name, place)
        except Exception as error:
            errors.append(error)
        return torch.empty([s.stop - s.start for s in place])

    def raise_error() -> None:
        if errors:
            raise errors[0]

    def messages():
        for batch in _batches(named):
            for part in range(parts):
                places = (shard_slices(p.shape, sharding(p)[0], parts, part, rows) for _, p, rows in batch)
                values = [try_to_read(name, place).flatten() for (name, *_), place in zip(batch, places, strict=True)]
                yield torch.cat(values).to(batch[0][1].dtype)

    def transfer(operation: Callable, message: Tensor, peer: int) -> list:
        transfers = [dist.P2POp(operation, message, group=group, group_peer=peer)]
        return dist.batch_isend_irecv(transfers) if message.numel() else []

    dist.barrier(group)  # NCCL connects a group's ranks in its first collective, not in a transfer between two
    to_send, works = read_ahead(messages(), 1) if is_rank0 else None, []
    for batch in _batches(named):
        targets = [local(p.detach())[rows] for _, p, rows in batch]
        sizes = [target.numel() for target in targets]
        own = torch.empty(sum(sizes), dtype=targets[0].dtype, device=device)
        if is_rank0:
            own = next(to_send).to(device)
            for part in range(1, parts):
                message = next(to_send).to(device)
                for work in works:
                    work.wait()
                works = transfer(dist.isend, message, part)
                progress.advance()
        elif mesh.ndim == 1 or mesh.get_local_rank("replicate") == 0:
            for work in transfer(dist.irecv, own, 0):
                work.wait()
        if mesh.ndim > 1 and len(own):
            dist.broadcast(own, group=mesh.get_group("replicate"), group_src=0)
        on_first_rank(raise_error, _everyone())
        yield from ((t, values.view(t.shape)) for t, values in zip(targets, own.split(sizes), strict=True))
    for work in works:
        work.wait()


def _batches(named: list) -> Iterator[list]:
    """Pieces in groups of one dtype, of at least PIECE_BYTES for the largest part."""
    batch, size = [], 0
    for piece in _pieces(named):
        _, parameter, rows = piece
        if batch and (size >= PIECE_BYTES or batch[0][1].dtype != parameter.dtype):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        dim, parts, _ = sharding(parameter)
        slices = shard_slices(parameter.shape, dim, parts, 0, rows)
        size += math.prod(s.stop - s.start for s in slices) * parameter.element_size()
    yield batch


def _pieces(named: list) -> Iterator[tuple[str, Tensor, slice]]:
    """-> (name, parameter, rows of a rank's part of it)"""
    for name, parameter in named:
        dim, parts, _ = sharding(parameter)
        for rows in _rows(parameter.shape, dim, parts, PIECE_BYTES // parameter.element_size()):
            yield name, parameter, rows


def _rows(shape: torch.Size, dim: int, parts: int, elements: int) -> Iterator[slice]:
    """Cuts the rows of the largest part into slices of about this many elements."""
    rows = -(-shape[0] // parts) if dim == 0 else shape[0]
    width = math.prod(shape[1:]) // (1 if dim == 0 else parts)
    step = max(1, elements // max(width, 1))
    return (slice(a, min(a + step, rows)) for a in range(0, rows, step))


# ---- in the loop


def prepare_backward(model: nn.Module, last: bool, reshard: str = "auto") -> None:
    """Call it before each micro-batch. last: it is the last of its step. Within a replica gradients are summed after
    every micro-batch: whole gradients of a large model would not fit. Between replicas they are summed after the last.
    With --reshard never the parameters stay gathered until the last."""
    if hasattr(model, "set_requires_all_reduce"):  # FSDP's
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or reshard != "never")


def free_gathered(model: nn.Module) -> None:
    """After a forward pass without a backward one: gives back what stayed gathered. Until then parameters are whole
    copies in the compute dtype, nothing to save or to update."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
