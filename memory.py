"""The memory that a run needs on each GPU and each host, without a GPU, weights or data.

The model is built on the meta device, where tensors have shapes and no values, with two layers. A forward and a
backward pass run while every allocation is counted. Each further layer adds as much as the second one. Formulas add
FSDP2's buffers for gathering and reducing, CUDA's own memory and the tensors that a compiler saves."""

import functools
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fp8
import nf4
import shard
from base import torch_private
from base.host import Gpu
from base.tensors import PINNED
from config import Config
from hf import lora
from model import Transformer
from optim import DTYPES, OPTIMIZERS, matrices, stack_alike
from shard import mesh_shape, sharded_dim

GIB, META = 2**30, torch.device("meta")
CUDA_BYTES = int(1.44 * GIB)  # CUDA's own and NCCL's buffers, outside torch's allocator
CUBLAS_BYTES = 2**26  # workspaces of the forward and of the backward thread, from torch's allocator
LOOSE = 0.04  # share of allocated memory that torch reserves in blocks too small for the next request
PROCESS_BYTES = {True: 3 * GIB, False: int(0.335 * GIB)}  # of a host's process with or without a GPU: Python, torch


class Cluster(NamedTuple):
    """`nodes` machines of `gpus` devices each. network: GB per second from each GPU to other nodes. price: dollars for
    an hour of a GPU. host_gib: memory of a node. save_seconds: that training waits for a save; 0 = unknown.
    failure_hours: the mean time between two failures."""

    nodes: int
    gpus: int
    gpu: Gpu
    network: float = 50.0
    price: float = 0.0
    host_gib: float = math.inf
    save_seconds: float = 0.0
    failure_hours: float = 0.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def cuda(self) -> bool:
        return self.gpu.name != "CPU"


def micro_batches(config: Config, cluster: Cluster) -> float:
    """Micro-batches of a step on each rank."""
    return config.batch_tokens / (_tokens(config) * cluster.ranks)


def _tokens(config: Config) -> int:
    """Tokens of a micro-batch that a rank computes."""
    return config.micro_batch * config.seq_len // config.context_parallel


# ---- activations: a step on the meta device


class _Live(torch_private.DispatchMode):
    """Counts the bytes of existing tensors, except `known` ones: at the peak of each moment of a step, and of all
    tensors that were made."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.sizes = weakref.WeakKeyDictionary((tensor.untyped_storage(), 0) for tensor in known)
        self.begin()

    def begin(self) -> None:
        self.made, self.moment, self.peaks = 0, "until the loss", Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self.sizes:
                self.sizes[storage] = storage.nbytes()
                self.made += storage.nbytes()
        exponentials = args[0].nbytes if op is torch.ops.aten.logsumexp.default else 0  # its kernel holds them
        self.peaks[self.moment] = max(self.peaks[self.moment], sum(self.sizes.values()) + exponentials)
        return out


class _Kernels(TorchFunctionMode, ContextDecorator):
    """Decorates a module's forward pass: some functions of torch are replaced by others with the same arguments. Each
    module has one, because torch leaves a mode during a backward pass, where checkpoints compute again."""

    def __init__(self, replacements: dict[Callable, Callable]):
        super().__init__()
        self.replacements = replacements

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self.replacements.get(function, function)(*args, **(kwargs or {}))


def _attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **_) -> Tensor:
    bias = None if attn_mask is None else attn_mask.to(q.dtype)  # kept for the backward pass
    return torch_private.flash_attention(q, k, v, bias)


# On the meta device torch chooses unfused attention and norms. These functions allocate as much as the kernels of a
# GPU: its products are added in place, and its norms are fused (as layer_norm is here).
KERNELS = {
    F.scaled_dot_product_attention: _attend,
    F.rms_norm: F.layer_norm,
    torch.addmm: lambda x, *_, **__: x,
}


def _with_blocks(config: Config, n: int) -> Config:
    return replace(config, n_layers=n, model_config=replace(config.model_config, n_layers=n))


def _build(config: Config, wrapped: bool) -> Transformer:
    """The model as train.build makes it, on the meta device; neither compiled nor sharded."""
    dtype = DTYPES[config.dtype]
    with META:
        model = Transformer(config.model_config, dtype, config.attention)
    if config.fp8 != "off":
        # A skipped layer with a number in its name may not be among the few blocks.
        named = tuple(name for name in config.fp8_skip if not re.search(r"\d", name))
        fp8.convert_linears(model, config.fp8, skip=named)
    lora.add_adapters(model, config)
    shard.set_dtypes(model, DTYPES[config.param_dtype])
    if wrapped:
        model.to(dtype)
    rows = _tokens(config) * model.config.top_k  # of all experts
    even_parts = {Tensor.tolist: lambda sizes: [len(range(i, rows, len(sizes))) for i in range(len(sizes))]}
    for module in (*model.layers, model.norm, model.lm_head):
        module.forward = _Kernels(KERNELS | even_parts)(module.forward)
    if (size := config.context_parallel) > 1:
        shard.share_rows(model, SimpleNamespace(group_name="", rank=lambda: 0, size=lambda: size))
    mode = config.checkpointing
    if config.compile != "none":  # a compiler keeps products and attention, and computes the rest again
        mode = "selective" if mode == "none" else mode
        model.lm_head.cross_entropy_ = lambda logits, targets, grads: logits.new_empty(len(logits), dtype=torch.float32)
        for layer in nf4.four_bit_layers(model).values():
            layer.dequantize = lambda codes, *how: codes.new_empty(len(codes), 2 * codes.shape[1], dtype=how[2])
    shard.checkpoint_activations(model, mode)
    return model


def _is_wrapped(config: Config, cluster: Cluster) -> bool:
    """Whether FSDP2 wraps the model. Then gradients leave as soon as they are complete, and parameters are gathered in
    the compute dtype."""
    return cluster.ranks > 1 or (cluster.cuda and config.offload == "cpu")


def trace(config: Config, cluster: Cluster) -> list[int]:
    """A forward and a backward pass of the model -> peak bytes in addition to parameters and optimizer state: until the
    loss, in the last block's backward pass, in the first block's, and in the rest; and the bytes of all tensors made.
    Memory changes evenly from block to block, so no block in between needs most, and two short models tell the rest."""
    wrapped, n = _is_wrapped(config, cluster), config.model_config.n_layers
    passes = 1 if wrapped else 1 + (micro_batches(config, cluster) > 1)
    two, three = (_trace_blocks(_with_blocks(config, blocks), wrapped, passes) for blocks in (2, 3))
    inputs = 0
    if config.compile != "none" and config.checkpointing == "none" and config.fp8 == "off":
        # A compiler that need not save memory keeps the inputs of a block's products: the outputs of its norms and of
        # its activation, unless they are cast to FP8. `_build` computes them again.
        shape = config.model_config
        width = 2 * shape.dim + shape.ffn_dim * max(shape.top_k, 1)
        inputs = _tokens(config) * width * DTYPES[config.dtype].itemsize
    kept = n * inputs, n * inputs, inputs, 0, 0
    return [a + (n - 2) * (b - a) + extra for a, b, extra in zip(two, three, kept, strict=True)]


@functools.lru_cache
def _trace_blocks(config: Config, wrapped: bool, passes: int) -> list[int]:
    """The five figures of `trace` for a model of few blocks."""
    positions = torch.empty(config.micro_batch, config.seq_len, dtype=torch.int64, device=META)
    tokens = positions.chunk(config.context_parallel, 1)[0]
    documents = (positions, positions[0, :64].int()) if config.documents == "separate" else ()
    model = _build(config, wrapped)
    live = _Live([tokens, *documents, *model.parameters(), *model.buffers()])

    def end_backward(unit: int, _) -> None:
        """The gradient of a unit's input exists."""
        if wrapped:
            model.zero_grad()  # FSDP2 takes the gradients of a unit together
        live.moment = unit

    def watch(unit: int, _, args) -> None:
        if args[0].requires_grad:
            args[0].register_hook(functools.partial(end_backward, unit))

    for unit, module in enumerate((*model.layers, model.norm)):
        module.register_forward_pre_hook(functools.partial(watch, unit))
    with live:
        fp8.WeightScales(model, None, gathers=False, reuse=passes > 1, compiled=False)
        for _ in range(passes):
            live.begin()
            loss = model(tokens, tokens, *documents)
            live.moment = config.n_layers
            loss.backward()
    first = live.peaks[1]
    return [live.peaks["until the loss"], live.peaks[config.n_layers], first, live.peaks.get(0, first), live.made]


# ---- parameters and what belongs to them


class Kept(NamedTuple):
    """What rank 0, whose shards are the largest, keeps of a parameter: elements, their bytes, and bytes of optimizer
    state."""

    elements: int
    size: int
    trains: bool
    state: int


@functools.lru_cache
def kept(config: Config, shards: int) -> list[Kept]:
    """One row for each parameter. FSDP2 cuts a parameter into shards of equal size; the last may be short. For experts
    see shard.sharded_dim."""
    model, rows = lora.meta_model(_with_blocks(config, 1)), []
    by_muon = matrices(model) if config.optimizer == "muon" else {}
    moments = len(OPTIMIZERS[config.optimizer].state_names)
    for name, p in model.named_parameters():
        length = p.shape[sharded_dim(p, shards)]
        size = -(-length // shards) * (p.numel() // length)
        dtype = config.param_dtype if p.requires_grad else config.dtype
        state = size * (1 if p in by_muon else moments) * DTYPES[config.state_dtype].itemsize
        row = Kept(size, size * DTYPES[dtype].itemsize, p.requires_grad, p.requires_grad * state)
        rows += [row] * (config.model_config.n_layers if name.startswith("layers.") else 1)
    return rows


def elements(config: Config, shards: int) -> tuple[int, int]:
    """Elements that rank 0 keeps of trained and of frozen parameters."""
    rows = kept(config, shards)
    return tuple(sum(row.elements for row in rows if row.trains == trains) for trains in (True, False))


def state(config: Config, shards: int, pinned: bool = False) -> dict[str, int]:
    """Bytes of a rank's parameters, gradients and optimizer state. pinned: the first two are in pinned memory, where
    torch rounds tensors up to a power of two."""
    rows = kept(config, shards)
    sizes = [1 << (row.size - 1).bit_length() if pinned else row.size for row in rows]
    block = lora.meta_model(_with_blocks(config, 1))
    in_four_bits = sum(b.nbytes for b in block.buffers()) * config.model_config.n_layers  # see nf4.py
    return {
        "parameters": sum(sizes) + in_four_bits,
        "gradients": sum(size for size, row in zip(sizes, rows, strict=True) if row.trains),
        "optimizer state": sum(row.state for row in rows),
    }


class Stacks(NamedTuple):
    """Bytes of Muon's stacks on each rank: received in a step from ranks of the same replica, and of other replicas;
    and in memory while the largest stack is updated."""

    within: int
    between: int
    peak: int


@functools.lru_cache
def muon_stacks(config: Config, ranks: int) -> Stacks:
    """See Muon._updates: a replica gets a part of each stack, and a rank whole matrices of it. The shards of their
    updates come back; then replicas exchange their parts."""
    replicas, shards = mesh_shape(config.shard_size, ranks)
    within, between, peak = 0, 0, 0
    for stack in stack_alike(matrices(lora.meta_model(config)), ranks) if config.optimizer == "muon" else ():
        p, size = stack[0], stack[0].numel() * DTYPES[config.dtype].itemsize
        if p.ndim == 3 and sharded_dim(p, shards) == 0:  # experts stay where they are
            peak = max(peak, 4 * len(stack) * size // shards)
            continue
        part = -(-len(stack) // replicas)
        whole, gathered = -(-part // shards) * size, part * replicas * size // shards
        within += 2 * whole * (shards - 1) // shards
        between += gathered * (replicas - 1) // replicas
        peak = max(peak, gathered + 3 * whole)  # the shards; a matrix, its square, and their product
    return Stacks(within, between, peak)


# ---- all of it


def memory(config: Config, cluster: Cluster, least: bool = False) -> dict[str, dict[str, int]]:
    """Bytes at the peak by part, on each "GPU" and each "host". Without GPUs all is on the host. least: only the
    tensors that every run with these flags needs, known without a trace."""
    _, shards = mesh_shape(config.shard_size, cluster.ranks)
    offload = cluster.cuda and config.offload == "cpu"
    shape, parts = config.model_config, state(config, shards, offload)
    inputs = shape.n_layers * shape.dim * DTYPES[config.dtype].itemsize * _tokens(config)
    parked = inputs * (config.offload_activations and cluster.cuda)
    host = {"processes": PROCESS_BYTES[cluster.cuda], "tokens of a step": 16 * config.batch_tokens // cluster.ranks}
    if config.save_async and config.offload == "none":
        host["copies for saves"] = checkpoint_bytes(config, shards) + PINNED * cluster.cuda
    if offload:
        host, parts = host | parts, {}
    gradients = parts.pop("gradients", 0)
    if least:  # after a step of one micro-batch, the last gradients come when the activations are gone
        parts["gradients or activations"] = max(gradients, inputs - parked)
    else:
        parts |= max(_moments(config, cluster, gradients, parked), key=lambda moment: sum(moment.values()))
        host["block inputs"] = parked
    if not cluster.cuda:
        host, parts = host | parts, {}
    elif not least:
        parts["cuBLAS"] = CUBLAS_BYTES
        parts["loose in torch's allocator"] = int(LOOSE * sum(parts.values()))
        parts["CUDA and NCCL"] = CUDA_BYTES
    return {"GPU": parts, "host": {name: cluster.gpus * size for name, size in host.items()}}


def _moments(config: Config, cluster: Cluster, gradients: int, parked: int) -> list[dict[str, int]]:
    """Bytes by part in addition to parameters and optimizer state, at the moments of a step that may need most.
    gradients: bytes of all gradients on the device. parked: bytes of activations in the host's memory."""
    until_loss, last_block, *later = trace(config, cluster)[:4]
    peaks = [until_loss - parked, last_block - parked, *later]
    before = gradients * (micro_batches(config, cluster) > 1)  # from earlier micro-batches
    if _is_wrapped(config, cluster):
        moments = _fsdp_moments(config, cluster, peaks, gradients, before)
    else:  # the trace has counted the gradients
        held = [before, before, gradients, gradients]
        moments = [{"gradients": size, "activations": peak - size} for size, peak in zip(held, peaks, strict=True)]
    moments.append({"gradients": gradients, "Muon's stacks": muon_stacks(config, cluster.ranks).peak})
    if config.load == "rank0":  # see shard.fill_parameters
        moments.append({"a whole parameter": max(row.size for row in kept(config, 1))})
    return moments


def _fsdp_moments(
    config: Config, cluster: Cluster, peaks: list[int], gradients: int, before: int
) -> list[dict[str, int]]:
    """Bytes by part at each peak of the trace and while the embedding's gradient is reduced. From
    torch.distributed.fsdp, _fsdp_param_group.py and _fsdp_collectives.py: all gradients of a unit exist before they are
    copied to the buffer that is reduced, and this buffer exists until the next unit's is needed. A unit is gathered in
    a buffer and copied out; a single rank copies its own part only."""
    shape = config.model_config
    (replicas, shards), offload = mesh_shape(config.shard_size, cluster.ranks), config.offload == "cpu"
    compute, reduce = DTYPES[config.dtype].itemsize, DTYPES[config.reduce_dtype].itemsize
    (trained, _), total = elements(config, shards), sum(elements(config, 1))
    end = shape.vocab_size * shape.dim  # of the embedding
    head = 0 if shape.tied else end
    block = (total - end - head) // shape.n_layers
    buffer = shards > 1
    stays = config.reshard == "never" or not buffer and not offload
    last = end if stays or not head else 0  # a tied embedding stays gathered until its gradient is reduced
    forward = total if stays else end + block
    backward = total if stays else block * (1 + buffer * config.prefetch) + last
    gathered = [forward + buffer * (head or block), backward, block + last, last]
    if config.lora:  # adapters only; the ends have none
        block, end, head = elements(config, 1)[0] // shape.n_layers, 0, 0
    # With replicas, the reduced parts of all units stay until the backward pass ends, unless they are the gradients.
    replica_sums = trained * reduce if replicas > 1 and (offload or config.param_dtype != config.reduce_dtype) else 0

    # In the last block's backward pass, the head's gradients are reduced, or those of the block after it. If there is
    # none after it, its own are reduced when it is freed.
    reduced = max(head * reduce, block * (reduce if shape.n_layers > 2 else reduce - compute))
    kept_end = end // shards * (gradients // trained)  # bytes of the gradient that a rank keeps of it
    moments = [  # gradients, activations, gathered parameters, gradients being reduced
        (before, peaks[0], compute * gathered[0], 0),
        (max(before, head and kept_end), peaks[1], compute * gathered[1], replica_sums + reduced),
        (gradients, peaks[2], compute * gathered[2], replica_sums + block * reduce),
        (before or gradients - kept_end, peaks[3], compute * gathered[3], replica_sums + block * reduce),
        (gradients, 0, 0, replica_sums + end * reduce + end * compute),
    ]
    parts = ("gradients", "activations", "gathered parameters", "gradients being reduced")
    return [dict(zip(parts, moment, strict=True)) for moment in moments]


def checkpoint_bytes(config: Config, shards: int = 1) -> int:
    """Bytes of a rank's part of a checkpoint: the masters and the optimizer state."""
    held = state(config, shards)
    return held["gradients"] + held["optimizer state"]  # a gradient is as large as its master
