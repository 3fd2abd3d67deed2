"""Ranks, and the steps that make a plain model train on them.

The order is fixed, each step one call in train.py's `build`; its `fill` follows:

    meta device -> FP8, LoRA, dtypes -> share rows -> checkpointing -> compile each block -> activation offload
    -> fully_shard -> to_empty -> tie weights

Checkpointing comes first, because the compiler must see it. Compilation comes before sharding, so that a compiled graph
holds the computation without the gathering, and before activation offload, which the compiler must not see. Memory is
allocated last, when every rank knows its part. Checkpointing, compilation and offload rebind a block's `forward`; FSDP
changes the class of a module. No step wraps or renames a module, so parameters keep the model's names.

One 2-D mesh (replicate, shard) describes replication, full sharding and hybrids: --shard_size 1 replicates, 0 shards
over all ranks. FSDP gets it if there are several replicas. With one replica FSDP gets its 1-D part `shard`: on a 2-D
mesh FSDP2 would keep the reduced gradients of all units until the backward pass ends. One rank alone is not sharded,
unless its parameters are offloaded.

With --context_parallel N, consecutive ranks share a row: each computes an N-th of its tokens (attention.RowPart). They
form separate groups. The mesh does not change, because losses and gradients are sums over tokens."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import nf4
from attention import WHOLE, RowPart
from lib import progress, torch_private
from lib.errors import UserError
from lib.files import read_ahead
from lib.parts import is_sharded, local, shard_slices, sharding
from lib.ranks import Ranks, on_first_rank

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
    try:
        yield
    finally:
        _set_part(model, part)


def set_dtypes(model: nn.Module, param_dtype: torch.dtype) -> None:
    """Gives trained parameters `param_dtype`, and frozen ones the compute dtype. In place, before they have values."""
    for p in model.parameters():
        p.data = p.data.to(param_dtype if p.requires_grad else model.dtype)


# ---- activations: tensors that the forward pass keeps for the backward pass


def checkpoint_activations(model: nn.Module, mode: str) -> None:
    """block: each block keeps its input only and computes the rest again in the backward pass (arXiv 1604.06174);
    selective: it also keeps the outputs of its matrix products and of attention."""
    if mode == "none":
        return
    options = {}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, torch_private.expensive_operators())
    for block in model.layers:
        block.forward = _checkpointed(block.forward, options)
    for layer in nf4.layers(model).values():
        layer.recomputed = mode == "block"  # see Nf4Linear.recomputed


def _checkpointed(forward: Callable, options: dict) -> Callable:
    def run(*args):
        return recompute(forward, *args, use_reentrant=False, **options)

    return run


def _key_of(x: Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.dtype


@dataclass(eq=False)
class SavedInput:
    host: Tensor  # the copy in the host's memory
    fetched: Tensor | None = None  # the copy back on the device


class ActivationOffload:
    """Keeps the inputs of blocks, which checkpointing saves, in the host's memory until the backward pass. On a GPU
    both ways are pinned copies on a separate stream: the forward pass does not wait for them, and while the backward
    pass, which needs the last one first, computes with one input, the next one is fetched. On a CPU the copies are made
    too, and save nothing."""

    def __init__(self, device: torch.device):
        self.device, self.backend = device, torch.get_device_module(device)
        self.stream = self.backend.Stream()
        self.entries: list[SavedInput] = []  # in the order of the forward pass

    def wrap(self, forward: Callable) -> Callable:
        def run(x: Tensor, *args):
            key = _key_of(x)  # not x: autograd keeps the hook, which would keep x

            def save(saved: Tensor):  # autograd passes every tensor that it saves for the backward pass
                return self._save(saved) if _key_of(saved) == key else saved

            with torch.autograd.graph.saved_tensors_hooks(save, self._restore):
                return forward(x, *args)

        return run

    def _save(self, x: Tensor) -> SavedInput:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        self.stream.wait_stream(self.backend.current_stream())
        with self.backend.stream(self.stream):
            host.copy_(x, non_blocking=True)
        self._hold(x, self.stream)
        self.entries.append(SavedInput(host))
        return self.entries[-1]

    def _hold(self, x: Tensor, stream) -> None:
        """Keeps the memory of x until the stream has done its present work."""
        if x.is_cuda:
            x.record_stream(stream)

    def _fetch(self, entry: SavedInput) -> None:
        if entry.fetched is None:
            with self.backend.stream(self.stream):  # which has copied it to the host before
                entry.fetched = entry.host.to(self.device, non_blocking=True, copy=True)

    def _restore(self, entry: SavedInput | Tensor) -> Tensor:
        if isinstance(entry, Tensor):
            return entry
        self._fetch(entry)
        while self.entries and self.entries.pop() is not entry:
            pass  # the later blocks' inputs are not needed any more
        self.backend.current_stream().wait_stream(self.stream)
        self._hold(entry.fetched, self.backend.current_stream())
        if self.entries:
            self._fetch(self.entries[-1])
        return entry.fetched


def offload_activations(model: nn.Module, on: bool, device: torch.device) -> None:
    if on:
        offload = ActivationOffload(device)
        for block in model.layers:
            block.forward = offload.wrap(block.forward)


# ---- compilation and sharding


def compile_model(model: nn.Module, mode: str) -> None:
    """block: every block on its own, all sharing one compiled graph, and the loss head's cross-entropy; model:
    everything as one graph. In place."""
    if mode == "model":
        model.compile(dynamic=False)
    elif mode == "block":
        model.lm_head.cross_entropy = torch.compile(model.lm_head.cross_entropy, dynamic=False)
        for block in model.layers:
            block.forward = torch.compile(block.forward, dynamic=False)


def uncompiled():
    """Within it, compiled functions run uncompiled: for one short row they would be compiled again. A compiler
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
    ends = [model.embed_tokens, model.lm_head]
    if ends[0].weight is ends[1].weight:
        ends = []
    units = [*ends[:1], *model.layers, *ends[1:], model]
    first_in_backward = {model, model.layers[-1]}  # needed again as soon as the forward pass ends
    # Inputs are not cast: the model does it, and its rope tables must stay fp32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for unit in units:
        reshard_after = {"auto": unit not in first_in_backward, "always": True, "never": False}[reshard]
        fully_shard(
            unit,
            mesh=mesh if replicas > 1 else mesh["shard"],
            mp_policy=policy,
            reshard_after_forward=(size > 1 or offload) and reshard_after,
            shard_placement_fn=lambda parameter: Shard(sharded_dim(parameter, size)),
            offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
        )
        if mesh.size() > 1:  # for one rank, FSDP would copy the gradients to divide them by 1
            unit.set_gradient_divide_factor(1.0)  # sums: the step divides by the number of trained tokens later
            unit.set_force_sum_reduction_for_comms(True)  # plain sums: gloo has no scaled ones
        unit.set_unshard_in_backward(unit not in ends)
    in_order = [model, *units[:-1]]  # the rest of the model is gathered first
    if prefetch:
        for i, unit in enumerate(in_order):
            unit.set_modules_to_forward_prefetch(in_order[i + 1 : i + 1 + prefetch])
            # The backward pass runs in reverse. It gathers the rest of the model, entry 0, when it begins.
            unit.set_modules_to_backward_prefetch(in_order[max(1, i - prefetch) : i][::-1])
    register_fsdp_forward_method(model, "logits")
    logger.info("Wrapped model with FSDP")


# ---- filling parameters

FILL_BYTES = 2**25  # of a rank's shard, read, sent and copied at a time; small parameters share a message of this size


def fill_parameters(
    model: nn.Module,
    read: Callable[[str, tuple[slice, ...]], Tensor],
    load: str = "direct",
    only_frozen: bool = False,
) -> None:
    """Gives every parameter, or every frozen one, its values: read(name, slices) returns a part of them, on the CPU, in
    any dtype. direct: every rank reads the values that it keeps; rank0: only rank 0 reads, and sends each rank its
    shard. Both work chunk by chunk, and read the next one while others are sent and copied. All ranks must call."""
    named = [(name, p) for name, p in model.named_parameters() if not (only_frozen and p.requires_grad)]
    if named:
        fill_tensors(named, read, load)
    fill_quantized(model, read, load)


@torch.no_grad()
def fill_quantized(model: nn.Module, read: Callable, load: str = "direct") -> None:
    """Quantizes the weights of layers in NF4, which every rank holds. rank0: rank 0 does, and sends the others the
    result. All ranks must call."""
    sends = load == "rank0" and dist.is_initialized() and dist.get_world_size() > 1
    for name, layer in nf4.layers(model).items():
        if sends:
            on_first_rank(partial(_quantize, name, layer, read), _everyone())
            for buffer in layer.buffers():
                dist.broadcast(buffer, 0)
                progress.advance()
        else:
            _quantize(name, layer, read)


def _quantize(name: str, layer: nf4.Nf4Linear, read: Callable) -> None:
    shape = layer.out_features, layer.in_features
    for rows in _cut_rows(shape, 0, 1, FILL_BYTES // 2):  # values of two bytes
        layer.fill(rows, read(f"{name}.weight", (rows, slice(0, shape[1]))))
        progress.advance()


def _everyone() -> Ranks:
    """All ranks, with the default group for messages, because callers of this file pass no Ranks."""
    return Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), dist.group.WORLD)


def fill_tensors(named: list[tuple[str, Tensor]], read: Callable, load: str = "direct") -> None:
    """fill_parameters for tensors by name: either all are sharded, or none."""
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
                logger.info("Loading: %.0f %%, %.0f s left", 100 * done / kept, seconds * (kept / max(done, 1) - 1))
    size = sum(tensor.nbytes for _, tensor in named) / 1e9
    logger.info("Filled %d tensors: %.3f GB in %.1f s", len(named), size, seconds)


class Chunk(NamedTuple):
    """Some rows of each shard of a tensor."""

    name: str
    tensor: Tensor
    rows: slice

    @property
    def target(self) -> Tensor:
        """These rows of this rank's shard."""
        return local(self.tensor.detach())[self.rows]

    def slices(self, index: int | None = None) -> tuple[slice, ...]:
        """Where these rows of shard `index`, or of this rank's, lie in the whole tensor."""
        dim, shards, own = sharding(self.tensor)
        return shard_slices(self.tensor.shape, dim, shards, own if index is None else index, self.rows)


def _chunks(named: list[tuple[str, Tensor]]) -> Iterator[Chunk]:
    for name, tensor in named:
        dim, shards, _ = sharding(tensor)
        for rows in _cut_rows(tensor.shape, dim, shards, FILL_BYTES // tensor.element_size()):
            yield Chunk(name, tensor, rows)


def _cut_rows(shape: torch.Size, dim: int, shards: int, elements: int) -> Iterator[slice]:
    """Cuts the rows of the largest shard into slices of about this many elements."""
    rows = -(-shape[0] // shards) if dim == 0 else shape[0]
    width = math.prod(shape[1:]) // (1 if dim == 0 else shards)
    step = max(1, elements // max(width, 1))
    return (slice(a, min(a + step, rows)) for a in range(0, rows, step))


def _read_here(named: list[tuple[str, Tensor]], read: Callable) -> Iterator[tuple[Tensor, Tensor]]:
    """-> (rows of this rank's shard of a tensor, their values)"""
    return read_ahead(((chunk.target, read(chunk.name, chunk.slices())) for chunk in _chunks(named)), 1)


def _sent_by_rank0(named: list[tuple[str, Tensor]], read: Callable) -> Iterator[tuple[Tensor, Tensor]]:
    """-> (rows of this rank's shard, their values), as `_read_here`. A message holds chunks of one shard:

        rank 0                            reads the message of each shard in turn, and sends it to the rank of its
                                          replica that has this shard, while it reads the next one
        the other ranks of its replica    receive their message
        every replica                     gets the messages from rank 0's replica by a broadcast

    The memory that this needs does not grow with the number of ranks. After an error in reading, the messages are sent
    without values, because ranks wait for them, and all ranks raise it."""
    mesh, is_rank0 = named[0][1].device_mesh, dist.get_rank() == 0
    errors = []  # of reading
    in_first_replica = mesh.ndim == 1 or mesh.get_local_rank("replicate") == 0
    group, shards = mesh.get_group("shard"), mesh.size(-1)

    def read_chunk(chunk: Chunk, index: int) -> Tensor:
        slices = chunk.slices(index)
        try:
            if not errors:
                return read(chunk.name, slices).flatten()
        except Exception as error:
            errors.append(error)
        return torch.empty(math.prod(s.stop - s.start for s in slices))

    def read_messages() -> Iterator[Tensor]:
        for chunks in _messages(named):
            for index in range(shards):
                yield torch.cat([read_chunk(chunk, index) for chunk in chunks]).to(chunks[0].tensor.dtype)

    def raise_error() -> None:
        if errors:
            raise errors[0]

    dist.barrier(group)  # NCCL connects a group's ranks in its first collective, not in a transfer between two
    to_send = read_ahead(read_messages(), 1) if is_rank0 else None
    sending = []
    for chunks in _messages(named):
        targets = [chunk.target for chunk in chunks]
        sizes = [target.numel() for target in targets]
        message = torch.empty(sum(sizes), dtype=targets[0].dtype, device=mesh.device_type)
        if is_rank0:
            message = next(to_send).to(mesh.device_type)  # its own
            for peer in range(1, shards):
                peers_message = next(to_send).to(mesh.device_type)
                _wait(sending)
                sending = _transfer(dist.isend, peers_message, peer, group)
                progress.advance()
        elif in_first_replica:
            _wait(_transfer(dist.irecv, message, 0, group))
        if mesh.ndim > 1 and len(message):
            dist.broadcast(message, group=mesh.get_group("replicate"), group_src=0)
        on_first_rank(raise_error, _everyone())
        yield from ((t, values.view(t.shape)) for t, values in zip(targets, message.split(sizes), strict=True))
    _wait(sending)


def _transfer(operation: Callable, message: Tensor, peer: int, group: dist.ProcessGroup) -> list[dist.Work]:
    transfers = [dist.P2POp(operation, message, group=group, group_peer=peer)]
    return dist.batch_isend_irecv(transfers) if message.numel() else []


def _wait(transfers: list[dist.Work]) -> None:
    for transfer in transfers:
        transfer.wait()


def _messages(named: list[tuple[str, Tensor]]) -> Iterator[list[Chunk]]:
    """Chunks of one dtype, which together have at least FILL_BYTES in the largest shard, except for the
    last ones of a dtype."""
    message, size = [], 0
    for chunk in _chunks(named):
        if message and (size >= FILL_BYTES or message[0].tensor.dtype != chunk.tensor.dtype):
            yield message
            message, size = [], 0
        message.append(chunk)
        size += math.prod(s.stop - s.start for s in chunk.slices(0)) * chunk.tensor.element_size()
    yield message


# ---- in the loop


def prepare_backward(model: nn.Module, last: bool, reshard: str = "auto") -> None:
    """Call it before each micro-batch. last: it is the last of its step. Within a replica gradients are summed after
    every micro-batch: whole gradients of a large model would not fit. Between replicas they are summed after the last.
    With --reshard never the parameters stay gathered until the last."""
    if hasattr(model, "set_requires_all_reduce"):  # FSDP's
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or reshard != "never")


def free_gathered(model: nn.Module) -> None:
    """Call it after a forward pass without a backward pass. Such a pass leaves parameters gathered: whole copies in the
    compute dtype, which must not be saved or updated."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
