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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import nf4
from attention import WHOLE, RowPart
from base import disk, torch_private
from base.disk import read_ahead
from base.errors import UserError
from base.ranks import ALONE, Ranks, fill_in_turn, on_first_rank
from base.tensors import local, shard_slices, sharding

logger = logging.getLogger("flatland")


def mesh_shape(shard_size: int, world_size: int) -> tuple[int, int]:
    """-> (number of copies of the parameters, number of ranks over which each copy is sharded)

        4 ranks, --shard_size 0       (1, 4)    0 1 2 3          each rank keeps a quarter of every parameter
        4 ranks, --shard_size 2       (2, 2)    0 1 | 2 3        halves; ranks 0 and 2 keep the same half
        4 ranks, --shard_size 1       (4, 1)    0 | 1 | 2 | 3    every rank keeps everything

    Gradients are summed over the ranks of a copy first, then between the copies."""
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
    """x [N, ...]: part i goes to rank i of the group.

        rank 0 has a0 a1    ->    a0 b0
        rank 1 has b0 b1    ->    a1 b1

    This transposes the matrix of parts. The transpose is its own inverse, so the backward pass is the same exchange of
    the gradient."""

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
    for layer in nf4.four_bit_layers(model).values():
        layer.recomputed = mode == "block"  # see Nf4Linear.recomputed


def _checkpointed(forward: Callable, options: dict) -> Callable:
    def run(*args):
        return recompute(forward, *args, use_reentrant=False, **options)

    return run


@dataclass(eq=False)
class SavedInput:
    host: Tensor  # the copy in the host's memory
    fetched: Tensor | None = None  # the copy back on the device


class ActivationOffload:
    """Keeps the inputs of blocks, which checkpointing saves, in the host's memory until the backward pass. In Llama 3
    8B, 16,384 tokens have 32 inputs of 128 MiB in bf16, 4 GiB.

    On a GPU both ways are pinned copies on a separate stream. The forward pass does not wait for them. The backward
    pass needs the last input first; while it computes with one input, the next one is fetched. On a CPU the copies are
    made too, and save nothing."""

    def __init__(self, device: torch.device):
        self.device, self.backend = device, torch.get_device_module(device)
        self.stream = self.backend.Stream()
        self.entries: list[SavedInput] = []  # in the order of the forward pass

    def wrap(self, forward: Callable) -> Callable:
        def run(x: Tensor, *args):
            key = x.data_ptr(), x.shape, x.dtype  # not x: autograd keeps the hook, which would keep x

            def save(saved: Tensor):  # autograd passes every tensor that it saves for the backward pass
                return self._save(saved) if (saved.data_ptr(), saved.shape, saved.dtype) == key else saved

            with torch.autograd.graph.saved_tensors_hooks(save, self._restore):
                return forward(x, *args)

        return run

    def _save(self, x: Tensor) -> SavedInput:
        saved = SavedInput(torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda))
        self.stream.wait_stream(self.backend.current_stream())
        with self.backend.stream(self.stream):
            saved.host.copy_(x, non_blocking=True)
        if x.is_cuda:
            x.record_stream(self.stream)  # its memory is not used again before the copy is made
        self.entries.append(saved)
        return saved

    def _restore(self, saved: SavedInput | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        while self.entries and self.entries.pop() is not saved:
            pass  # the later blocks' inputs are not needed any more
        current = self.backend.current_stream()
        for entry in (saved, *self.entries[-1:]):  # this one, and the next that the backward pass needs
            if entry.fetched is None:
                with self.backend.stream(self.stream):  # which has copied it to the host before
                    entry.fetched = entry.host.to(self.device, non_blocking=True, copy=True)
            if entry is saved:
                current.wait_stream(self.stream)
        if saved.fetched.is_cuda:
            saved.fetched.record_stream(current)
        return saved.fetched


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
        model.lm_head.cross_entropy_ = torch.compile(model.lm_head.cross_entropy_, dynamic=False)
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


# The order of shard_model's units for three blocks, with prefetch 1 and reshard auto. E is the embedding, H is lm_head.
# The rest, which holds the last norm, is gathered first and kept. Everything in a column happens at the same time:
#
#     forward     gather   E  0  1  2  H             one unit ahead of the computation
#                 compute     E  0  1  2  H
#                 free           E  0  1     H       not 2: the backward pass needs it at once
#     backward    gather               1  0          in the reverse order
#                 compute           H  2  1  0  E
#                 reduce               H  2  1  0  E     sum the gradients, keep this rank's shard, free the unit
#
# So about two blocks are whole at a time. A larger prefetch adds one block for each unit, and hides slower networks.
# `--reshard always` frees 2 as well, and gathers it again. `--reshard never` frees nothing before the step's last
# backward pass: whole parameters stay in memory, and several micro-batches gather them once.
def shard_model(
    model: nn.Module,
    mesh: DeviceMesh | None,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype = torch.float32,
    reshard: str = "auto",
    prefetch: int = 1,
    offload: bool = False,
    head_in_backward: bool = False,
) -> None:
    """FSDP2: parameters are gathered in `dtype` unit by unit, gradients summed in `reduce_dtype`. The units are the
    embedding, each block, lm_head, and the rest of the model. Tied embeddings belong to the rest.

    offload: parameters, gradients and moments are kept in the host's memory. With several micro-batches, adding up
    their gradients there makes each backward pass wait for the copies.

    The backward pass of the embedding needs no weight, and that of our loss head only for an objective of pairs
    (head_in_backward): otherwise theirs are not gathered again."""
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
        unit.set_unshard_in_backward(unit not in ends or head_in_backward and unit is model.lm_head)
    in_order = [model, *units[:-1]]  # the rest of the model is gathered first
    if prefetch:
        for i, unit in enumerate(in_order):
            unit.set_modules_to_forward_prefetch(in_order[i + 1 : i + 1 + prefetch])
            # The backward pass runs in reverse. It gathers the rest of the model, entry 0, when it begins.
            unit.set_modules_to_backward_prefetch(in_order[max(1, i - prefetch) : i][::-1])
    register_fsdp_forward_method(model, "logits")
    logger.info("Wrapped model with FSDP")


# ---- filling parameters

FILL_BYTES = 2**25  # read and copied at a time


@torch.no_grad()
def fill_parameters(
    model: nn.Module,
    read: Callable[[str, tuple[slice, ...]], Tensor],
    load: str = "direct",
    ranks: Ranks = ALONE,
    only_frozen: bool = False,
) -> None:
    """Gives every parameter, or every frozen one, its values: read(name, slices) returns a part of them, on the CPU, in
    any dtype. direct: every rank reads the values that it keeps; rank0: only rank 0 reads, and the others get theirs
    from it. Weights in NF4, which every rank holds, are read and quantized once, and sent. All ranks must call."""
    named = [(name, p) for name, p in model.named_parameters() if not (only_frozen and p.requires_grad)]
    sends = load == "rank0" and ranks.world_size > 1
    if named:
        fill_tensors(named, read, ranks if sends else None)
    quantized = []
    for name, layer in nf4.four_bit_layers(model).items():
        shape = slice(0, layer.out_features), slice(0, layer.in_features)
        work = partial(_fill, layer.fill, f"{name}.weight", shape, read, 2 * layer.in_features)
        quantized.append((work, [*layer.buffers()]))
    fill_in_turn(quantized, 1 if sends else ranks.world_size, ranks)


@torch.no_grad()
def fill_tensors(named: list[tuple[str, Tensor]], read: Callable, ranks: Ranks | None = None) -> None:
    """fill_parameters for tensors by name. ranks: rank 0 reads for all of these; None: each reads its shards."""
    begin = reported = time.perf_counter()
    done, total = 0, sum(tensor.nbytes for _, tensor in named)
    for name, tensor in named:
        if ranks:
            _fill_from_rank0(tensor, name, read, ranks)
        else:
            shard = local(tensor)
            slices = shard_slices(tensor.shape, *sharding(tensor))
            _fill(shard.__setitem__, name, slices, read, shard[:1].nbytes)
        disk.advance()
        done += tensor.nbytes
        now = time.perf_counter()
        if now > reported + 10:
            reported = now
            logger.info("Loading: %.0f %%, %.0f s left", 100 * done / total, (now - begin) * (total / done - 1))
    logger.info("Filled %d tensors: %.3f GB in %.1f s", len(named), total / 1e9, time.perf_counter() - begin)


def _fill_from_rank0(tensor: Tensor, name: str, read: Callable, ranks: Ranks) -> None:
    """Rank 0 reads the whole tensor and sends each rank its shard. Meanwhile every rank has memory for all of it.
    An error in reading is raised on all ranks."""
    from torch.distributed.tensor import distribute_tensor

    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device_mesh.device_type)
    slices = [slice(0, n) for n in tensor.shape]
    on_first_rank(lambda: _fill(whole.__setitem__, name, slices, read, whole[:1].nbytes), ranks)
    local(tensor).copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local())


def _fill(put: Callable[[slice, Tensor], None], name: str, slices: Sequence[slice], read: Callable, row: int) -> None:
    """Calls put(rows, values) for a few rows after the other, counted from the first; the next ones are read meanwhile.
    row: bytes of a row."""
    first, stop = slices[0].start, slices[0].stop
    starts = range(first, stop, max(1, FILL_BYTES // max(1, row)))
    parts = (read(name, (slice(a, min(a + starts.step, stop)), *slices[1:])) for a in starts)
    for start, values in zip(starts, read_ahead(parts, 1), strict=True):
        put(slice(start - first, start - first + len(values)), values)
        disk.advance()


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
