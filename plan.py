"""Estimates of memory, time and cost before a run. Needs no GPU, weights or data.

    python plan.py [@recipes/NAME.args ...] [train.py's flags] --nodes 8 --gpus 8 --gpu h100-80

Memory. The model is built on the meta device, where tensors have shapes and no values, with two layers. A forward and a
backward pass run while every allocation is counted. Each further layer adds as much as the second one. Formulas add
FSDP2's buffers for gathering and reducing, CUDA's own memory and the tensors that a compiler saves.

Time. FLOPs at the share of the data sheet's rate that large products reach (machine.GPUS), elementwise work at the
memory's bandwidth, transfers where they take longer than the computation that hides them, and the optimizer's traffic.
Times are estimated for GPUs only: the speed of a CPU varies too much to predict."""

import contextlib
import functools
import logging
import math
import os
import platform
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from config import DEFAULT, Config, check_batch, flags_in, parse_args, refuse_unsupported, split_batch, with_recipes
from lib import errors
from lib.errors import Parser, UserError
from lib.files import amount, free_space

if __name__ == "__main__":
    errors.prepare_python()

import torch  # isort: skip
import torch.nn.functional as F
from torch import Tensor

import attention
import fp8
import model as transformer
import shard
from lib import lora, machine, torch_private
from lib.machine import GPUS, Gpu
from lib.ranks import Ranks
from optim import DTYPES, ROUND, matrices, state_layout
from shard import mesh_shape, sharded_dim

log = logging.getLogger("flatland")
GIB, META = 2**30, torch.device("meta")
CUDA_BYTES = int(1.44 * GIB)  # CUDA's own and NCCL's buffers, outside torch's allocator
CUBLAS_BYTES = 2**26  # workspaces of the forward and of the backward thread, from torch's allocator
STACKS = 4.5  # multiples of a stack that Muon needs at once, as torch's allocator measured it
LOOSE = 0.04  # share of allocated memory that torch reserves in blocks too small for the next request
PROCESS_BYTES = {True: 3 * GIB, False: int(0.335 * GIB)}  # of a host's process with or without a GPU: Python, torch
FUSED = 3  # a compiled block moves an elementwise result about a third as often
RATES = {"bf16": 1.0, "tf32": 0.5, "fp32": 0.07}  # multiples of the rate in bf16
NARROW = 200  # columns: matrices of this width reach half of the rate of very wide ones
ATTENTION = 0.6  # of the rate of large products
HIDDEN = 0.9  # of the computation can overlap with transfers
HOST_BANDWIDTH = 350e9  # bytes per second of a node's memory, for updates on the CPU


class Cluster(NamedTuple):
    """`nodes` machines of `gpus` devices each. network: GB per second from each GPU to other nodes. price: of a GPU
    for an hour. host_gib: memory of a node."""

    nodes: int
    gpus: int
    gpu: Gpu
    network: float = 50.0
    price: float = 0.0
    host_gib: float = math.inf

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def cuda(self) -> bool:
        return self.gpu.name != "CPU"


# ---- memory


class _Live(torch_private.DispatchMode):
    """Counts the bytes of existing tensors, now and at the peak since the last mark, and of all tensors ever made.
    known: tensors that are not counted."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.peak = self.made = 0
        self.sizes = weakref.WeakKeyDictionary((tensor.untyped_storage(), 0) for tensor in known)
        self.marks: list[tuple[int, int, int]] = []

    @property
    def now(self) -> int:
        return sum(self.sizes.values())

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op is torch.ops.aten.logsumexp.default:  # its kernel holds the exponentials
            self.peak = max(self.peak, self.now + args[0].nbytes)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self.sizes:
                self.sizes[storage] = storage.nbytes()
                self.made += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out

    def mark(self) -> None:
        self.marks.append((self.now, self.made, self.peak))
        self.peak = self.now


@contextlib.contextmanager
def _as_on(cuda: bool, config: Config) -> Iterator[None]:
    """On the meta device the model takes the branches for a GPU or a CPU; torch alone would choose plain attention."""

    def attend(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False) -> Tensor:
        bias = None if attn_mask is None else attn_mask.to(q.dtype)  # kept for the backward pass
        return torch_private.flash_attention(q, k, v, bias, is_causal, cuda and bias is None)

    def normalize(x, shape, weight, eps) -> Tensor:  # one kernel on a GPU; torch has it for LayerNorm only on meta
        return F.layer_norm(x, shape, weight, None, eps)

    def multiply(x, weight, _) -> Tensor:  # as if all experts had as many rows
        ends = torch.linspace(len(x) / len(weight), len(x), len(weight), dtype=torch.float64)
        return transformer.grouped_matmul(x, weight, ends.int())

    changes = [(F, "scaled_dot_product_attention", attend)]
    if cuda:  # its kernels share keys among heads and accumulate products in place; the head pads its weight
        changes += [
            (attention, "_shares_heads", lambda q, group, mask: group > 1 and mask is None),
            (transformer, "add_product", lambda total, a, b: None),
            (F, "rms_norm", normalize),
            (transformer, "HEAD_ROWS", {"meta": transformer.HEAD_ROWS["cuda"]}),
        ]
    if config.dtype != "bf16":
        changes.append((transformer.MoE, "matmul", staticmethod(multiply)))
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        yield


def _build(config: Config, sharded: bool) -> transformer.Transformer:
    """The model as train.build makes it, on the meta device; neither compiled nor sharded."""
    dtype = DTYPES[config.dtype]
    with META:
        model = transformer.Transformer(config.model_config, dtype, config.attention)
    if config.fp8 != "off":
        fp8.convert(model, config, META)
    lora.convert(model, config)
    if sharded:
        model.to(dtype)
    mode = config.checkpointing
    if config.compile != "none":  # a compiler keeps products and attention, and computes the rest again
        mode = {"none": "selective"}.get(mode, mode)
        model.lm_head.cross_entropy = lambda logits, targets, grads: logits.new_empty(len(logits), dtype=torch.float32)
    shard.checkpoint_activations(model, mode)
    return model


def _is_wrapped(config: Config, cluster: Cluster) -> bool:
    """Whether FSDP2 wraps the model. Then gradients leave as soon as they are complete, and parameters are gathered in
    the compute dtype."""
    return cluster.ranks > 1 or (cluster.cuda and config.offload == "cpu")


def micro_batches(config: Config, cluster: Cluster) -> float:
    """Micro-batches of a step on each rank."""
    return config.batch_tokens / (config.micro_batch * config.seq_len * cluster.ranks)


@functools.lru_cache
def trace(config: Config, cluster: Cluster) -> list[int]:
    """A forward and a backward pass of the model -> peak bytes in addition to parameters and optimizer state: until the
    loss, in the last block's backward pass, in the first block's, and in the rest; and the bytes of all tensors made.
    Two blocks run. Each further block would add as much as the second."""
    wrapped = _is_wrapped(config, cluster)
    passes = 1 if wrapped else 1 + (micro_batches(config, cluster) > 1)
    tokens = torch.empty(config.micro_batch, config.seq_len, dtype=torch.int64, device=META)
    documents = (tokens, tokens[0, :64].int()) if config.documents == "separate" else ()
    with _as_on(cluster.cuda, config):
        model = _build(replace(config, n_layers=2), wrapped)
        live = _Live([tokens, *documents, *model.parameters()])

        def mark_both_passes(unit, args) -> None:
            """Marks the beginning of a unit's forward pass and the end of its backward pass, when the gradient of its
            input exists."""
            live.mark()

            def end(_) -> None:
                if wrapped:
                    model.zero_grad()  # FSDP2 takes the gradients of a unit together
                live.mark()

            if args[0].requires_grad:
                args[0].register_hook(end)

        for unit in (*model.layers, model.norm):
            unit.register_forward_pre_hook(mark_both_passes)
        with live:
            fp8.WeightScales(model, model.dtype, None, passes > 1, False)
            fp8_copies = live.now // 2
            for _ in range(passes):
                live.marks.clear()
                live.mark()
                loss = model(tokens, tokens, *documents)
                live.mark()
                loss.backward()
                live.mark()
    now, made, peaks = zip(*live.marks, strict=True)  # begin, blocks, norm, loss; norm, blocks backwards, end
    gradients = 0 if wrapped else sum(p.nbytes for p in model.layers[1].parameters() if p.requires_grad)
    inputs, later = _kept_inputs(config), fp8_copies + gradients
    kept = now[3] - now[2] + fp8_copies + gradients * (passes > 1) + inputs
    # Memory changes evenly from block to block, so no block in between needs most.
    until_loss, last_block = (max(part) + 2 * inputs for part in (peaks[1:5], peaks[5:7]))
    two = [until_loss, last_block, peaks[7] + inputs, peaks[-1], made[-1] - made[0]]
    more = [kept, kept, later, later, made[3] - made[2] + made[6] - made[5]]
    return [a + (config.model_config.n_layers - 2) * b for a, b in zip(two, more, strict=True)]


def _kept_inputs(config: Config) -> int:
    """Bytes of the inputs of a block's products: the outputs of its norms and of its activation. A compiler that need
    not save memory keeps them, unless they are cast to FP8. `_build` computes them again."""
    if config.compile == "none" or config.checkpointing != "none" or config.fp8 != "off":
        return 0
    shape = config.model_config
    width = 2 * shape.dim + shape.ffn_dim * max(shape.top_k, 1)
    return config.micro_batch * config.seq_len * width * DTYPES[config.dtype].itemsize


class Kept(NamedTuple):
    """What rank 0, whose parts are the largest, keeps of a parameter: elements, their bytes, and bytes of optimizer
    state."""

    elements: int
    size: int
    trains: bool
    state: int


@functools.lru_cache
def kept(config: Config, shards: int) -> list[Kept]:
    """One row for each parameter. FSDP2 cuts a parameter into parts of equal size; the last part may be short. For
    experts see shard.sharded_dim."""
    model = _one_block(config)
    layout, rows = state_layout(model, config), []
    for name, p in model.named_parameters():
        length = p.shape[sharded_dim(p, shards)]
        part = -(-length // shards) * (p.numel() // length)
        state = part * sum(dtype.itemsize for _, dtype in layout.get(name, {}).values())
        dtype = config.param_dtype if p.requires_grad else config.dtype
        row = Kept(part, part * DTYPES[dtype].itemsize, p.requires_grad, state)
        rows += [row] * (config.model_config.n_layers if name.startswith("layers.") else 1)
    return rows


def _one_block(config: Config) -> transformer.Transformer:
    return lora.meta_model(replace(config, n_layers=1))


def elements(config: Config, shards: int) -> tuple[int, int]:
    """Elements that rank 0 keeps of trained and of frozen parameters."""
    trained, frozen = (sum(row.elements for row in kept(config, shards) if row.trains == t) for t in (True, False))
    return trained, frozen


def state(config: Config, shards: int, pinned: bool = False) -> dict[str, int]:
    """Bytes of a rank's parameters, gradients and optimizer state. pinned: the first two are in pinned memory, where
    torch rounds tensors up to a power of two."""
    rows = kept(config, shards)
    sizes = [(1 << (row.size - 1).bit_length() if pinned else row.size, row.trains) for row in rows]
    return {
        "parameters": sum(size for size, _ in sizes),
        "gradients": sum(size for size, trains in sizes if trains),
        "optimizer state": sum(row.state for row in rows),
    }


def memory(config: Config, cluster: Cluster, least: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """-> (bytes on each GPU by part, bytes on each host by part) at the peak. Without GPUs the first is empty. least:
    only the tensors that every run with these flags needs, known without a trace."""
    _, shards = mesh_shape(config.shard_size, cluster.ranks)
    offload = cluster.cuda and config.offload == "cpu"
    shape, held = config.model_config, state(config, shards, offload)
    inputs = shape.n_layers * shape.dim * DTYPES[config.dtype].itemsize * config.micro_batch * config.seq_len
    host = {"processes": PROCESS_BYTES[cluster.cuda], "tokens of a step": 16 * config.batch_tokens // cluster.ranks}
    if cluster.cuda and config.save_async and not offload and not least:
        host["copies for saves"] = checkpoint_bytes(config, shards)
    gradients = held.pop("gradients")
    if offload:
        host, held, gradients = host | held | {"gradients": gradients}, {}, 0
    parked = inputs * (config.offload_activations and cluster.cuda)
    if least:  # after a step of one micro-batch, the last gradients come when the activations are gone
        parts = held | {"gradients or activations": max(gradients, inputs - parked)}
    else:
        parts = held | _working(config, cluster, gradients, parked)
        host["block inputs"] = parked
    if not cluster.cuda:
        host, parts = host | parts, {}
    elif not least:
        parts["cuBLAS"] = CUBLAS_BYTES
        parts["loose in torch's allocator"] = int(LOOSE * sum(parts.values()))
        parts["CUDA and NCCL"] = CUDA_BYTES
    return parts, {name: cluster.gpus * size for name, size in host.items()}


def _working(config: Config, cluster: Cluster, gradients: int, parked: int) -> dict[str, int]:
    """Bytes of a step in addition to parameters and optimizer state, at the moment that needs most (see trace).
    gradients: bytes of all gradients on the device. parked: bytes of activations in the host's memory."""
    until_loss, last_block, *later = trace(config, cluster)[:4]
    peaks = [until_loss - parked, last_block - parked, *later]
    before = gradients * (micro_batches(config, cluster) > 1)  # from earlier micro-batches
    if _is_wrapped(config, cluster):
        moments = _fsdp_moments(config, cluster, peaks, gradients, before)
    else:  # the trace has counted the gradients
        held = [before, before, gradients, gradients]
        moments = [{"gradients": size, "activations": peak - size} for size, peak in zip(held, peaks, strict=True)]
    moments.append({"gradients": gradients, "Muon's stacks": _stacks(config, cluster)})
    return max(moments, key=lambda moment: sum(moment.values()))


def _stacks(config: Config, cluster: Cluster) -> int:
    """Bytes of optim.Muon's temporary tensors while a stack of matrices is orthogonalized."""
    if config.optimizer != "muon":
        return 0
    part = -(-config.model_config.n_layers // cluster.ranks)  # matrices of a kind that a rank takes
    sizes = [p.numel() for p in matrices(_one_block(config))]
    return int(STACKS * DTYPES[config.dtype].itemsize * max(size * min(max(1, ROUND // size), part) for size in sizes))


def _fsdp_moments(
    config: Config, cluster: Cluster, peaks: list[int], gradients: int, before: int
) -> list[dict[str, int]]:
    """Bytes by part at each peak of the trace and while the embedding's gradient is reduced. From
    torch.distributed.fsdp, _fsdp_param_group.py and _fsdp_collectives.py: all gradients of a unit exist before they are
    copied to the buffer that is reduced, and this buffer exists until the next unit's is needed. A unit is gathered in
    a buffer and copied out; a single rank copies its own part only."""
    shape = config.model_config
    total, end = sum(elements(config, 1)), shape.vocab_size * shape.dim  # of the embedding
    head = 0 if shape.tied else end
    block = (total - end - head) // shape.n_layers
    compute, reduce = (DTYPES[name].itemsize for name in (config.dtype, config.reduce_dtype))
    (replicas, shards), offload = mesh_shape(config.shard_size, cluster.ranks), config.offload == "cpu"
    buffer = shards > 1
    stays = config.reshard == "never" or not buffer and not offload
    last = end if stays or not head else 0  # a tied embedding stays gathered until its gradient is reduced
    forward, backward = (total, total) if stays else (end + block, block * (1 + buffer * config.prefetch) + last)
    gathered = [forward + buffer * (head or block), backward, block + last, last]
    if before and config.reshard == "never":
        gathered = gathered[:1] * 4
    if config.lora:  # adapters only; the ends have none
        block, end, head = elements(config, 1)[0] // shape.n_layers, 0, 0
    converts = offload or config.param_dtype != config.reduce_dtype  # a copy of the reduced part is the gradient

    def unit(n: int) -> int:
        return n * reduce + max(n * compute, converts * n * reduce // shards)

    trained = elements(config, shards)[0]
    part = gradients // trained  # bytes per element
    held = [before, max(before, head // shards * part), gradients, gradients, gradients]
    if not before:
        held[3] -= end // shards * part
    # Meanwhile the gradients of the block after it are reduced; if there is none, its own are, when it is freed.
    after_block = block * (reduce if shape.n_layers > 2 else reduce - compute)
    last_block = max(head * reduce, after_block, unit(head) - head * compute)
    reduced = [0, last_block, block * reduce, block * reduce, unit(end)]
    if replicas > 1 and converts:  # the reduced parts of all units stay until the backward pass ends
        reduced = [0, *(size + trained * reduce for size in reduced[1:])]
    gathered = [compute * n for n in (*gathered, 0)]
    moments = zip(held, (*peaks, 0), gathered, reduced, strict=True)
    parts = ("gradients", "activations", "gathered parameters", "gradients being reduced")
    return [dict(zip(parts, moment, strict=True)) for moment in moments]


def checkpoint_bytes(config: Config, shards: int = 1) -> int:
    """Bytes of a rank's part of a checkpoint: the masters and the optimizer state."""
    held = state(config, shards)
    return held["gradients"] + held["optimizer state"]  # a gradient is as large as its master


# ---- time


def seconds(config: Config, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step by part; the sum is the step's."""
    shape, gpu, tokens = config.model_config, cluster.gpu, config.batch_tokens / cluster.ranks
    peak = gpu.tflops * 1e12 * gpu.reach * RATES[config.dtype]
    rate = peak * shape.dim / (shape.dim + NARROW)
    passes = 2 if config.lora else 3  # frozen weights have no gradients
    in_products = 2 * passes * transformer.matmul_params(shape)  # FLOPs per token
    head = 2 * passes * shape.vocab_size * shape.dim * tokens / rate
    products = (in_products * tokens / rate - head) / (gpu.fp8 if config.fp8 != "off" else 1)
    attends = (lora.flops_per_token(config) - in_products) * tokens / rate / ATTENTION
    # An operation reads about twice as many bytes as it writes.
    moved = 3 * trace(config, cluster)[-1] * micro_batches(config, cluster)
    parts = {
        "products": products,
        "lm_head and loss": head,
        "attention": attends,
        "computed again": products / passes + attends / 3 if config.checkpointing == "block" else 0.0,
        "elementwise": moved / (FUSED if config.compile != "none" else 1) / gpu.bandwidth,
    }
    transfers = _transfers(config, cluster)
    parts["transfers that no computation hides"] = max(transfers - HIDDEN * sum(parts.values()), 0.05 * transfers)
    if config.optimizer == "muon":
        parts["Newton-Schulz"] = newton_schulz_flops(config) / cluster.ranks / peak
    held = state(config, mesh_shape(config.shard_size, cluster.ranks)[1])
    traffic = 3 * held["gradients"] + 2 * held["optimizer state"]  # gradients are read; the rest is read and written
    return parts | {"update": traffic / (HOST_BANDWIDTH / cluster.gpus if config.offload == "cpu" else gpu.bandwidth)}


def newton_schulz_flops(config: Config) -> int:
    """FLOPs of a step of Muon: five iterations, each with three matrix products (optim.orthogonalize)."""
    flops = 0
    for p, rows in matrices(_one_block(config)).items():
        for height in rows:
            m, n = sorted((height, p.shape[-1]))
            flops += math.prod(p.shape[:-2]) * 5 * (4 * m * m * n + 2 * m**3)
    return flops * config.model_config.n_layers


def _transfers(config: Config, cluster: Cluster) -> float:
    """Seconds that a step's slowest link works: parameters are gathered twice for each micro-batch, gradients reduced
    once, replicas summed once a step."""
    replicas, shards = mesh_shape(config.shard_size, cluster.ranks)
    (held, frozen), (gradients, others) = elements(config, shards), elements(config, 1)
    compute, reduce, masters = (DTYPES[n].itemsize for n in (config.dtype, config.reduce_dtype, config.param_dtype))
    passes = micro_batches(config, cluster)
    link, nodes = cluster.gpu.link, -(-shards // cluster.gpus)
    if nodes > 1:  # all network cards of a node carry its traffic with other nodes
        link = min(link, cluster.gpus * cluster.network * 1e9 * nodes / (nodes - 1))
    gathers = 2 * passes if config.reshard != "never" else 1
    out = ((gradients + others) * gathers * compute + gradients * passes * reduce) * (shards - 1) / shards / link
    link = cluster.gpu.link if cluster.nodes == 1 else cluster.network * 1e9
    out += 2 * held * reduce * (replicas - 1) / replicas / link
    if config.offload == "cpu":
        out += (3 * held * masters + 2 * frozen * compute) * passes / cluster.gpu.host
    return out


# ---- a run on a cluster


class Plan(NamedTuple):
    """The prediction for a run on a cluster. gpu, host: bytes by part on each; times: seconds of a step by part, empty
    for a GPU that is not in machine.GPUS."""

    config: Config
    gpu: dict[str, int]
    host: dict[str, int]
    times: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.times.values())


def predict(config: Config, cluster: Cluster) -> Plan:
    """config: without `auto`."""
    config = split(config, cluster)
    return Plan(config, *memory(config, cluster), seconds(config, cluster) if cluster.gpu.tflops else {})


def settle(config: Config, cluster: Cluster) -> Config:
    """Resolves every `auto` and every size that depends on the number of ranks. Refuses what train.py refuses, with the
    same messages."""
    check_batch(config, cluster.ranks)
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    compile = "block" if config.compile == "auto" else config.compile
    backend = "varlen" if config.attention == "flash" else config.attention  # flash-attn need not be installed here
    backend = attention.choose_backend(backend, "cuda", dtype, True, config.seq_len, config.model_config.head_dim)
    config = replace(config, dtype=dtype, compile=compile, attention=backend)
    config = split(config, cluster)
    refuse_unsupported(config, cluster.ranks)
    fp8.check_run(config, META, config.micro_batch)
    if config.fp8 != "off" and not cluster.gpu.fp8:
        raise UserError(f"--fp8 {config.fp8}: the {cluster.gpu.name} has no FP8; --fp8 off trains in bf16 there")
    return config


def cluster_here(device: torch.device, ranks: int) -> Cluster:
    """The machines that this process and its peers run on."""
    gpus = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks)
    gpu, host_gib = Gpu("CPU", *[0] * 8), machine.available_memory() / GIB
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).total_memory
        gpu = (machine.known_gpu(device) or gpu._replace(name="GPU"))._replace(gib=size / GIB)
    return Cluster(ranks // gpus, gpus, gpu, host_gib=host_gib)


def split(config: Config, cluster: Cluster) -> Config:
    micro_batch, batch_tokens = split_batch(config, cluster.ranks)
    return replace(config, micro_batch=micro_batch, batch_tokens=batch_tokens)


def refuse_without_room(config: Config, ranks: Ranks) -> None:
    """Refuses a run that cannot fit into this machine, before anything is allocated. It counts only those
    activations that any run needs: the inputs of the blocks."""
    cluster = cluster_here(ranks.device, ranks.world_size)
    on_gpu, on_host = memory(split(config, cluster), cluster, least=True)
    host = f"{platform.node()} ({cluster.gpus} processes)"
    for needs, place, free in (on_gpu, ranks.device, cluster.gpu.gib), (on_host, host, cluster.host_gib):
        if sum(needs.values()) / GIB > free:
            raise UserError(
                f"This run needs more than {gib(needs)} on {place}, which has {free:.1f} GiB. What lowers it, the"
                f" cheapest first: {machine.lower_memory(config, cluster.cuda)}"
            )
    size, (free, folder) = checkpoint_bytes(config), free_space(Path(config.out))
    if size > free:
        log.warning("The first save will fail: it needs %s, %s has %s", amount(size), folder, amount(free))


def predict_record(config: Config, ranks: Ranks) -> dict[str, float]:
    """The prediction for a record of metrics.jsonl: `mem_gib`, allocated by torch, and `step_ms`, if the data sheet of
    the GPU is known; {} on a CPU or if the model cannot be traced."""
    if ranks.rank or ranks.device.type == "cpu":
        return {}
    try:
        plan = predict(config, cluster_here(ranks.device, ranks.world_size))
    except RuntimeError as e:  # a changed model that cannot run on the meta device
        log.warning("Plan: no prediction for this model: %s", e)
        return {}
    allocated = (sum(plan.gpu.values()) - CUDA_BYTES) / (1 + LOOSE)
    return {"mem_gib": allocated / GIB} | ({"step_ms": 1e3 * plan.seconds} if plan.times else {})


# ---- the report


def _largest(parts: dict[str, float], least: float) -> list[tuple[float, str]]:
    rows = ((size, name) for name, size in parts.items() if size >= least)
    return sorted(rows, reverse=True)


def gib(parts: dict[str, int]) -> str:
    """The sum of the parts in GiB, and each part of some size."""
    shown = ", ".join(f"{name} {size / GIB:.1f}" for size, name in _largest(parts, 0.05 * GIB))
    return f"{sum(parts.values()) / GIB:.1f} GiB ({shown})"


def memory_line(config: Config, cluster: Cluster) -> str:
    gpu, host = memory(split(config, cluster), cluster)
    return f"about {gib(gpu)} per GPU; {gib(host)} per host" if gpu else f"about {gib(host)} per host"


def summary(plan: Plan, cluster: Cluster) -> str:
    config, gpu = plan.config, cluster.gpu
    fits = sum(plan.gpu.values()) <= gpu.gib * GIB
    hours = config.steps * plan.seconds / 3600
    slow = _largest(plan.times, 0.02 * plan.seconds)
    times = ", ".join(f"{name} {part / plan.seconds:.0%}" for part, name in slow)
    kwh = hours * cluster.ranks * gpu.watts * 1.3 / 1000  # a node's other parts draw about a third as much
    price = f", {hours * cluster.ranks * cluster.price:,.0f} at {cluster.price:g} an hour" * (cluster.price > 0)
    saved = checkpoint_bytes(config)
    for_good = ""
    if config.keep_every:
        kept = config.steps // (config.save_every * config.keep_every)
        for_good = f", {amount(kept * saved)} for the {kept} of --keep_every {config.keep_every}"
    rate = config.batch_tokens / plan.seconds / cluster.ranks
    mfu = rate * lora.flops_per_token(config) / (gpu.tflops * 1e12)
    return (
        f"{config.model}, {sum(elements(config, 1)) / 1e9:.3g} B parameters, on {cluster.nodes} x {cluster.gpus}"
        f" {gpu.name}: {'it fits' if fits else 'it does not fit'}.\n"
        f"  each GPU: {gib(plan.gpu)} of {gpu.gib:g} GiB\n"
        f"  each host: {gib(plan.host)}\n"
        f"  disk: {amount(saved)} a checkpoint, {amount((config.keep + 1) * saved)} for --keep {config.keep} and the"
        f" one being written{for_good}\n"
        f"  speed: {rate:,.0f} tokens/s per GPU, {plan.seconds:.3g} s a step, MFU {mfu:.0%} ({times})\n"
        f"  time: {hours:,.2f} hours for {config.steps * config.batch_tokens / 1e9:,.3g} B tokens"
        f" ({config.steps:,} steps), about {kwh:,.0f} kWh{price}"
    )


# ---- the command

PLAN_FLAGS = {  # the fields of Cluster: default, meaning
    "nodes": (1, "machines"),
    "gpus": (1, "GPUs in each"),
    "gpu": ("h100-80", "their kind"),
    "network": (50.0, "GB/s from each GPU to other machines"),
    "price": (0.0, "of a GPU for an hour"),
}


def parse(argv: list[str]) -> tuple[Config, Cluster]:
    """-> (the Config of train.py's flags, the cluster). With --model, no weights are looked for."""
    usage = "python plan.py [@recipes/NAME.args ...] [train.py's flags] [--nodes N --gpus N --gpu KIND]"
    parser = Parser("plan.py", usage, "Estimates the memory, the speed and the cost of a run.", allow_abbrev=False)
    for name, (default, meaning) in PLAN_FLAGS.items():
        choices = GPUS if name == "gpu" else None
        parser.add_argument(f"--{name}", type=type(default), default=default, choices=choices, help=meaning)
    flags, words = parser.parse_known_args(argv)
    cluster = Cluster(*vars(flags).values())._replace(gpu=GPUS[flags.gpu])
    if min(cluster[:2]) < 1:
        raise UserError(f"--nodes {cluster.nodes} --gpus {cluster.gpus}: each must be at least 1")
    words = words or DEFAULT
    if "--model" in flags_in(with_recipes(words)):
        words = [*words, "--weights=", "--load=direct", "--lora_weights="]
    config = parse_args(words)
    if config.epochs:
        raise UserError(f"--epochs {config.epochs:g}: plan.py reads no data; give --steps instead")
    return config, cluster


def main(argv: list[str]) -> int:
    config, cluster = parse(argv)
    plan = predict(settle(config, cluster), cluster)
    print(summary(plan, cluster))
    print(f"What lowers the memory, the cheapest first: {machine.lower_memory(plan.config)}")
    return 0


if __name__ == "__main__":
    errors.run_script(main)
