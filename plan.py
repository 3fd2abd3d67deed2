"""Will a run fit, how long does it take, what does it cost: before a GPU is rented.

    python plan.py [@recipes/NAME.args ...] [train.py's flags] --nodes 8 --gpus 8 --gpu h100-80

Memory. The real model is built on the meta device, where tensors have shapes and no values, with two layers and with
three, and goes through a real forward and backward pass while every allocation is counted. A layer more adds the same
each time, so the two say what any number of layers needs. What is not asked of the model stands in formulas here:
what FSDP2 gathers and reduces, what a compiler spares, what CUDA takes for itself.

Time. FLOPs at the share of the data sheet's rate that large products reach (machine.GPUS), elementwise work at the
memory's bandwidth, transfers where they take longer than the computation that hides them, the optimizer's traffic.

It needs neither GPU, weights nor data."""

from lib import errors  # first: it finds the Python that has torch

import argparse  # isort: skip
import contextlib
import functools
import itertools
import math
import os
import textwrap
import timeit
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

from config import DEFAULT, Config, check_batch, conflict, parse_args, refuse_unsupported, split_batch, with_recipes
from lib.errors import UserError, amount

import torch  # isort: skip
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
import fp8
import model as transformer
import shard
from lib import lora, machine
from lib.machine import GPUS, Gpu
from optim import DTYPES, keep_copies, trained
from shapes import ModelConfig
from shard import mesh_shape, sharded_dim

GIB, META = 2**30, torch.device("meta")
CUDA_BYTES = int(1.5 * GIB)  # CUDA's own, NCCL's buffers and cuBLAS's workspaces: outside of torch's allocator
LOOSE = 0.04  # of what torch allocates: blocks that are reserved and too small for what is needed next
OUTSIDE = ("loose in torch's allocator", "CUDA and NCCL")  # parts of a GPU's memory that torch does not count
PROCESS_BYTES = {True: 3 * GIB, False: int(0.335 * GIB)}  # of the host: Python, torch, what it loads, the data
GROUPED_BYTES = int(0.09 * GIB)  # of a CPU's process: torch imports sympy for bf16 experts' backward pass
FUSED = 3  # a compiled block moves an elementwise result about a third as often
RATES = {"bf16": 1.0, "tf32": 0.5, "fp32": 0.07}  # of GPUs, as multiples of that in bf16
NARROW = 200  # columns: matrices of this width reach half of the rate of very wide ones
ATTENTION = 0.6  # of the rate of large products
HIDDEN = 0.9  # of the computation has transfers beside it
HOST_BANDWIDTH = 350e9  # bytes per second of a node's memory, which an update on the CPU takes


class Cluster(NamedTuple):
    """Where a run is to be: `nodes` machines of `gpus` devices. network: bytes per second of each GPU out of its node.
    price: of a GPU for an hour. host_gib: memory of a node."""

    nodes: int
    gpus: int
    gpu: Gpu
    network: float = 50e9
    price: float = 0.0
    host_gib: float = math.inf

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def cuda(self) -> bool:
        return self.gpu.name != "CPU"


# ---- memory


class _Live(TorchDispatchMode):
    """Counts the bytes of tensors that exist: now, at most since the last lap, and all that were ever made. known:
    tensors that are not counted."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.now = self.peak = self.made = 0
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op is torch.ops.aten.logsumexp.default:  # its kernel holds the exponentials
            self.peak = max(self.peak, self.now + args[0].nbytes)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.sizes:
            return
        self.sizes[storage._cdata] = size = storage.nbytes()
        weakref.finalize(storage, self._forget, storage._cdata)
        self.now, self.made = self.now + size, self.made + size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def lap(self) -> int:
        peak, self.peak = self.peak, self.now
        return peak


def _even_experts(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """model.grouped_matmul's loop, without the numbers in `ends`: the meta device has none."""
    parts = zip(x.tensor_split(len(weight)), weight.to(x.dtype), strict=True)
    return torch.cat([part @ w.T for part, w in parts])


@contextlib.contextmanager
def _as_on(cuda: bool, config: Config) -> Iterator[None]:
    """The model's choices by device are those for a GPU or a CPU, though it computes on the meta device, where torch
    itself would choose the plain attention."""

    def attend(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False) -> Tensor:
        if cuda:
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        bias = None if attn_mask is None else attn_mask.to(q.dtype)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=bias)[0]

    def add_in_place(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        return torch.empty(len(a), b.shape[1], device=META) if total is None else total

    with contextlib.ExitStack() as stack:

        def put(owner, name: str, value) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        put(attention.F, "scaled_dot_product_attention", attend)
        if cuda:  # whose kernels share keys among heads, and add products up in place
            put(attention, "_shares_heads", lambda q, group, mask: group > 1)
            put(transformer, "add_product", add_in_place)
        if config.dtype != "bf16":
            put(transformer.MoE, "matmul", staticmethod(_even_experts))
        yield


def _build(config: Config, layers: int, sharded: bool) -> transformer.Transformer:
    """The model as train.build makes it, on the meta device, with so many layers; neither compiled nor sharded."""
    shape, dtype = replace(config.model_config, n_layers=layers), DTYPES[config.dtype]
    with META:
        model = transformer.Transformer(shape, dtype, config.attention)
    if config.fp8 != "off":
        fp8.convert(model, config, META)
    lora.convert(model, config)
    if sharded:
        model.to(dtype)
    mode = config.checkpointing
    if config.compile != "none":  # a compiler, too, keeps products and attention and computes the rest again
        mode = {"none": "selective"}.get(mode, mode)
        model.lm_head.cross_entropy = lambda logits, targets, grads: logits.new_empty(len(logits), dtype=torch.float32)
    shard.checkpoint_activations(model, mode)
    if sharded or config.update_in_backward:
        for p in trained(model).values():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return model


def trace(config: Config, cuda: bool, sharded: bool, accumulates: bool) -> tuple[list[int], int]:
    """A forward and a backward pass of the real model -> (bytes that exist beside parameters and moments, at the most:
    until the loss, until the last block's backward pass is done, until all are; bytes that were made in all).

    sharded: gradients leave as soon as they are complete, and parameters are gathered in the compute dtype.
    accumulates: gradients of an earlier micro-batch exist."""
    same = {"state_dtype": "fp32", "offload": "none", "shard_size": 0, "reshard": "auto", "batch_tokens": 0}
    if sharded:
        same["param_dtype"] = "fp32"
    return _trace(replace(config, **same), cuda, sharded, accumulates)


@functools.lru_cache(4096)
def _trace(config: Config, cuda: bool, sharded: bool, accumulates: bool) -> tuple[list[int], int]:
    with _as_on(cuda, config):
        two, three = (_trace_layers(config, n, sharded, accumulates) for n in (2, 3))
    more = config.model_config.n_layers - 2
    *peaks, made = (a + more * (b - a) for a, b in zip(two, three, strict=True))
    return peaks, made


def _trace_layers(config: Config, layers: int, sharded: bool, accumulates: bool) -> list[int]:
    model, laps = _build(config, layers, sharded), []
    tokens = torch.empty(config.micro_batch, config.seq_len, dtype=torch.int64, device=META)
    documents = (tokens, tokens[0, :64].int()) if config.documents == "separate" else ()
    live = _Live([tokens, *documents, *model.parameters()])

    def lap(_=None) -> None:
        laps.append(live.lap())

    model.layers[-1].register_forward_pre_hook(lambda m, args: args[0].register_hook(lap) and None)
    with live:
        fp8.WeightScales(model, model.dtype, None, accumulates and not sharded, False)
        keep_copies(model, None, config, accumulates and not sharded)
        for _ in range(1 + (accumulates and not sharded)):
            live.lap()
            laps.clear()
            loss = model(tokens, tokens, *documents)
            lap()
            loss.backward()
            lap()
    return [*laps, live.made]


def elements(config: Config, shards: int, trains: bool | None = None) -> list[int]:
    """Of each parameter, or of those that are trained or frozen, the numbers that rank 0 holds, whose part is a largest
    one. FSDP2 cuts a parameter's rows into parts of equal size, of which the last may be short; experts as
    shard.sharded_dim says."""
    rows = _elements(config.model_config, config.lora, config.lora_targets, shards)
    return [n for n, is_trained in rows if trains in (None, is_trained)]


@functools.lru_cache
def _elements(shape: ModelConfig, rank: int, targets: tuple, shards: int) -> list[tuple[int, bool]]:
    with META:
        model = transformer.Transformer(shape)
    lora.add_adapters(model, rank, targets)
    lengths = [(p, p.shape[sharded_dim(p, shards)]) for p in model.parameters()]
    return [(-(-length // shards) * (p.numel() // length), p.requires_grad) for p, length in lengths]


def state(config: Config, shards: int, pinned: bool = False) -> dict[str, int]:
    """Bytes of a rank's parameters, gradients and moments. pinned: on the host, where torch rounds each tensor that a
    GPU copies from up to a power of two."""
    masters = [n * DTYPES[config.param_dtype].itemsize for n in elements(config, shards, True)]
    frozen = [n * DTYPES[config.dtype].itemsize for n in elements(config, shards, False)]
    copies = []
    if pinned:
        if shards == 1 and config.param_dtype == "fp32" and config.dtype == "bf16":  # offload.py's
            copies = [size // 2 for size in masters]
        masters, frozen, copies = ([1 << (n - 1).bit_length() for n in sizes] for sizes in (masters, frozen, copies))
    gradients = sum(masters)
    if config.update_in_backward:  # of a block at a time
        total, block, _ = _units(config)
        gradients = gradients * block // total
    moments = 2 * sum(elements(config, shards, True)) * DTYPES[config.state_dtype].itemsize
    return {"parameters": sum(masters + frozen + copies), "gradients": gradients, "moments": moments}


def _units(config: Config) -> tuple[int, int, int]:
    """Numbers in the units that FSDP2 gathers: in all, in a block, in the larger of embedding and lm_head."""
    shape = config.model_config
    total, end = sum(elements(config, 1)), shape.vocab_size * shape.dim
    return total, (total - end * (2 - shape.tied)) // shape.n_layers, end


def memory(config: Config, cluster: Cluster) -> tuple[dict[str, int], dict[str, int]]:
    """-> (bytes on each GPU by part, bytes on each host by part) at the peak. Without GPUs the first is empty."""
    _, shards = mesh_shape(config.shard_size, cluster.ranks)
    offload = cluster.cuda and config.offload == "cpu"
    held = state(config, shards, offload)
    host = {"processes": PROCESS_BYTES[cluster.cuda], "tokens of a step": 16 * config.batch_tokens // cluster.ranks}
    if not cluster.cuda and config.dtype == "bf16" and config.model_config.n_experts:
        host["processes"] += GROUPED_BYTES
    gradients = held["gradients"]
    if offload:
        host, held, gradients = host | held, {}, 0
    parts = held | _working(config, cluster, gradients)
    if config.offload_activations and cluster.cuda:
        width = config.model_config.n_layers * config.model_config.dim * DTYPES[config.dtype].itemsize
        host["block inputs"] = width * config.micro_batch * config.seq_len
        parts["activations"] -= host["block inputs"]
    if cluster.cuda:
        parts |= dict(zip(OUTSIDE, (int(LOOSE * sum(parts.values())), CUDA_BYTES), strict=True))
    else:
        host, parts = host | parts, {}
    return parts, {name: cluster.gpus * size for name, size in host.items()}


def _working(config: Config, cluster: Cluster, gradients: int) -> dict[str, int]:
    """What a step needs beside parameters and moments, in that of its three phases (see trace) that needs most."""
    sharded = cluster.ranks > 1 or (cluster.cuda and config.offload == "cpu")
    accumulates = config.batch_tokens > config.micro_batch * config.seq_len * cluster.ranks
    peaks, _ = trace(config, cluster.cuda, sharded, accumulates)
    grads = [gradients * accumulates, gradients * accumulates, gradients]
    if not sharded and not config.update_in_backward:  # then they were counted
        peaks = [peak - size for peak, size in zip(peaks, grads, strict=True)]
    transferred = _transferred(config, cluster) if sharded else ([0] * 3, [0] * 3)
    sizes = max(zip(grads, peaks, *transferred, strict=True), key=sum)
    return dict(zip(("gradients", "activations", "gathered parameters", "gradients being reduced"), sizes, strict=True))


def _transferred(config: Config, cluster: Cluster) -> tuple[list[int], list[int]]:
    """Bytes of FSDP2's buffers in each phase: gathered parameters; gradients of the unit being reduced, in the compute
    dtype and in that of the reduction. While one block computes, the next `prefetch` are gathered, and one is copied
    out of the buffer that it was gathered in (torch.distributed.fsdp, _fsdp_param_group.py)."""
    total, block, end = _units(config)
    compute, reduce = (DTYPES[name].itemsize for name in (config.dtype, config.reduce_dtype))
    _, shards = mesh_shape(config.shard_size, cluster.ranks)
    if config.reshard == "never" or shards == 1 and config.offload == "none":
        gathered = [total + block] * 3
    else:
        blocks = (2 + config.prefetch) * block
        gathered = [max(blocks, 2 * end + block), blocks, blocks]
    parts = [sum(elements(config, 1, True)) // config.model_config.n_layers] if config.lora else [block, end]
    reduced = parts[0] * compute + max(parts) * reduce
    return [compute * n for n in gathered], [0, reduced, reduced]


def disk(config: Config) -> int:
    """Bytes of a checkpoint: the masters and both moments."""
    itemsize = DTYPES[config.param_dtype].itemsize + 2 * DTYPES[config.state_dtype].itemsize
    return sum(elements(config, 1, True)) * itemsize


# ---- time


def seconds(config: Config, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step by part; the sum is the step's."""
    parts = _computation(config, cluster)
    transfers = _transfers(config, cluster)
    parts["transfers that no computation hides"] = max(transfers - HIDDEN * sum(parts.values()), 0.05 * transfers)
    masters, moments = (DTYPES[name].itemsize for name in (config.param_dtype, config.state_dtype))
    traffic = (3 * masters + 4 * moments) * _held(config, cluster)  # all is read, and written but for the gradients
    offload = config.offload == "cpu"
    parts["update"] = traffic / (HOST_BANDWIDTH / cluster.gpus if offload else cluster.gpu.bandwidth)
    return parts


def _held(config: Config, cluster: Cluster) -> int:
    """Numbers that a GPU trains."""
    return sum(elements(config, mesh_shape(config.shard_size, cluster.ranks)[1], True))


def _computation(config: Config, cluster: Cluster) -> dict[str, float]:
    """Seconds that a GPU computes in a step."""
    shape, gpu, tokens = config.model_config, cluster.gpu, config.batch_tokens / cluster.ranks
    rate = gpu.tflops * 1e12 * gpu.reach * shape.dim / (shape.dim + NARROW)
    if cluster.cuda:
        rate *= RATES[config.dtype]
    passes = 2 if config.lora else 3  # the gradients of frozen weights are not computed
    in_products = 2 * passes * transformer.matmul_params(shape)  # FLOPs per token
    head = 2 * passes * shape.vocab_size * shape.dim * tokens / rate
    products = in_products * tokens / rate - head
    if config.fp8 != "off":
        products /= gpu.fp8 or 1.0  # a CPU computes it as fp32
    attends = (lora.flops_per_token(config) - in_products) * tokens / rate / ATTENTION
    _, made = trace(config, cluster.cuda, True, False)
    moved = 3 * made * tokens / (config.micro_batch * config.seq_len)  # an operation reads about twice what it writes
    return {
        "products": products,
        "lm_head and loss": head,
        "attention": attends,
        "computed again": products / passes + attends / 3 if config.checkpointing == "block" else 0.0,
        "elementwise": moved / (FUSED if config.compile != "none" else 1) / gpu.bandwidth,
    }


def _transfers(config: Config, cluster: Cluster) -> float:
    """Seconds that a step's slowest link works: parameters are gathered twice for each micro-batch, gradients reduced
    once, replicas summed once a step."""
    replicas, shards = mesh_shape(config.shard_size, cluster.ranks)
    (total, _, _), held = _units(config), _held(config, cluster)
    gradients = sum(elements(config, 1, True))
    compute, reduce, masters = (DTYPES[n].itemsize for n in (config.dtype, config.reduce_dtype, config.param_dtype))
    micro_batches = config.batch_tokens / (config.micro_batch * config.seq_len * cluster.ranks)
    link, nodes = cluster.gpu.link, -(-shards // cluster.gpus)
    if nodes > 1:  # all network cards of a node take part in what comes to it from others
        link = min(link, cluster.gpus * cluster.network * nodes / (nodes - 1))
    gathers = 2 if config.reshard != "never" else 1 / micro_batches
    out = (total * gathers * compute + gradients * reduce) * (shards - 1) / shards / link * micro_batches
    link = cluster.gpu.link if cluster.nodes == 1 else cluster.network
    out += 2 * held * reduce * (replicas - 1) / replicas / link
    if config.offload == "cpu":
        frozen = sum(elements(config, shards, False)) * compute
        down = held * (compute if shards == 1 else masters)  # see offload.py
        out += (2 * (down + frozen) + held * masters) * micro_batches / cluster.gpu.host
    return out


# ---- what to change


class Plan(NamedTuple):
    """What is predicted of a run on a cluster. gpu, host: bytes by part on each; times: seconds of a step by part."""

    config: Config
    gpu: dict[str, int]
    host: dict[str, int]
    times: dict[str, float]
    fits: bool

    @property
    def seconds(self) -> float:
        return sum(self.times.values())


def settle(config: Config, cluster: Cluster) -> Config:
    """Every `auto` and every size that a number of ranks decides. Refuses what train.py refuses, in the same words."""
    mesh_shape(config.shard_size, cluster.ranks)
    check_batch(config, cluster.ranks)
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    compile = "block" if config.compile == "auto" else config.compile
    packed = dtype == "bf16" and cluster.cuda and config.documents == "separate" and config.attention == "auto"
    config = replace(_split(config, cluster), dtype=dtype, compile=compile, attention="varlen" if packed else "sdpa")
    refuse_unsupported(config, cluster.ranks)
    if config.fp8 != "off" and not cluster.gpu.fp8:
        raise UserError(f"--fp8 {config.fp8}: the {cluster.gpu.name} has no FP8; --fp8 off trains in bf16 there")
    return config


def predict(config: Config, cluster: Cluster) -> Plan:
    """config: as `settle` left it."""
    gpu, host = memory(config, cluster)
    fits = sum(gpu.values()) <= cluster.gpu.gib * GIB and sum(host.values()) <= cluster.host_gib * GIB
    return Plan(config, gpu, host, seconds(config, cluster), fits)


def variants(config: Config, cluster: Cluster) -> list[Plan]:
    """What fits of the same training, step by step, by other means, the fastest first: flags that cost memory or time
    and change no result beyond rounding, --state_dtype and --offload."""
    rows = config.batch_tokens // (config.seq_len * cluster.ranks)
    grid = {
        "micro_batch": {config.micro_batch, *(n for n in (1, 2, 4, 8, 16, 32, 64) if rows % n == 0)},
        "checkpointing": ("none", "selective", "block") if config.compile == "none" else ("none", "block"),
        "param_dtype": {config.param_dtype, "bf16"},
        "state_dtype": {config.state_dtype, "bf16"},
        "offload": {config.offload, "cpu"},
        "update_in_backward": {config.update_in_backward, not config.clip},
        "shard_size": {config.shard_size, 0},
        "reshard": {config.reshard, "auto"},
    }
    others = [replace(config, **dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]
    plans = [predict(other, cluster) for other in others if not conflict(other, cluster.ranks)]
    fitting = [plan for plan in plans if plan.fits]
    return sorted(fitting, key=lambda plan: (plan.seconds, changes(config, plan.config)))


def changes(config: Config, other: Config) -> str:
    """The flags that make the one the other."""
    new = [f"--{name} {value}" for name, value in vars(other).items() if value != getattr(config, name)]
    return " ".join(new) or "(as it is)"


def least_gpus(config: Config, cluster: Cluster) -> int:
    """How many such GPUs hold the training with --micro_batch 1 --checkpointing block, without offload, in nodes as
    here; 0: no number up to 4,096."""
    small = replace(config, micro_batch=1, shard_size=0, offload="none", checkpointing="block")
    for n in (2**i for i in range(13)):
        at = cluster._replace(nodes=-(-n // cluster.gpus), gpus=min(n, cluster.gpus))
        gpu, _ = memory(replace(small, batch_tokens=at.ranks * config.seq_len), at)
        if sum(gpu.values()) <= at.gpu.gib * GIB:
            return at.ranks
    return 0


# ---- held to its word


def cluster_here(device: torch.device, ranks: int, flops: float = 1e12) -> Cluster:
    """The machines that this process and its peers run on. flops: what a device reaches, where the table of GPUs does
    not know it."""
    gpus = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks)
    if device.type == "cpu":
        gpu = Gpu("CPU", flops / 1e12, 0, 2e10, 1e10, 1e10, 100, 0.8)
        return Cluster(ranks // gpus, gpus, gpu, host_gib=machine.available_memory() / GIB or math.inf)
    gpu = machine.known_gpu(device) or Gpu("GPU", flops / 1e12, 0, 1e12, 5e10, 2.5e10, 300)
    size = torch.cuda.get_device_properties(device).total_memory
    return Cluster(ranks // gpus, gpus, gpu._replace(gib=size / GIB))


def _split(config: Config, cluster: Cluster) -> Config:
    micro_batch, batch_tokens = split_batch(config, cluster.ranks)
    return replace(config, micro_batch=micro_batch, batch_tokens=batch_tokens)


def step_figures(config: Config, cluster: Cluster) -> dict[str, float]:
    """What is predicted of a record of metrics.jsonl: `mem_gib`, of what torch allocates on a GPU or of a process on a
    CPU, and `step_ms`."""
    config = _split(config, cluster)
    gpu, host = memory(config, cluster)
    size = sum(size for part, size in gpu.items() if part not in OUTSIDE) or sum(host.values()) // cluster.gpus
    return {"mem_gib": size / GIB, "step_ms": 1e3 * sum(seconds(config, cluster).values())}


# ---- what it says


def gib(parts: dict[str, int]) -> str:
    """The sum of the parts in GiB, and each part of some size."""
    rows = sorted(((size / GIB, name) for name, size in parts.items()), reverse=True)
    shown = ", ".join(f"{name} {size:.1f}" for size, name in rows if size >= 0.05)
    return f"{sum(parts.values()) / GIB:.1f} GiB ({shown})"


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2g} s"


def speed(plan: Plan, cluster: Cluster) -> str:
    config = plan.config
    rate = config.batch_tokens / plan.seconds / cluster.ranks
    mfu = rate * lora.flops_per_token(config) / (cluster.gpu.tflops * 1e12)
    return f"{rate:,.0f} tokens/s per GPU, {plan.seconds:.3g} s a step, MFU {mfu:.0%}"


def memory_line(config: Config, cluster: Cluster) -> str:
    gpu, host = memory(_split(config, cluster), cluster)
    return f"about {gib(gpu)} per GPU; {gib(host)} per host" if gpu else f"about {gib(host)} per host"


def summary(plan: Plan, cluster: Cluster, steps: float) -> str:
    config, gpu, length = plan.config, cluster.gpu, steps * plan.seconds
    slow = sorted(((s / plan.seconds, name) for name, s in plan.times.items()), reverse=True)
    times = ", ".join(f"{name} {share:.0%}" for share, name in slow if share > 0.02)
    hours = length / 3600 * cluster.ranks
    kwh = hours * gpu.watts * 1.3 / 1000  # a node's other parts draw about a third as much
    price = f", {hours * cluster.price:,.0f} at {cluster.price:g} an hour" * (cluster.price > 0)
    tokens, saved = steps * config.batch_tokens / 1e9, disk(config)
    return (
        f"{config.model}, {sum(elements(config, 1)) / 1e9:.3g} B parameters, on {cluster.nodes} x {cluster.gpus}"
        f" {gpu.name}: {'it fits' if plan.fits else 'it does not fit'}.\n"
        f"  each GPU: {gib(plan.gpu)} of {gpu.gib:g} GiB\n"
        f"  each host: {gib(plan.host)}" + f" of {cluster.host_gib:.0f} GiB" * (cluster.host_gib < math.inf) + "\n"
        f"  disk: {amount(saved)} a checkpoint, {amount((config.keep + 1) * saved)} for --keep {config.keep} and the"
        " one being written\n"
        f"  speed: {speed(plan, cluster)} ({times})\n"
        f"  time: {duration(length)} for {tokens:,.3g} B tokens ({steps:,.0f} steps), about {kwh:,.0f} kWh{price}"
    )


def advice(plan: Plan, cluster: Cluster, best: int = 3) -> str:
    """What does not fit: the smallest changes that make it fit, with what they cost in speed. What fits: the fastest
    settings found."""
    ways, text = variants(plan.config, cluster), "Faster, if you like, and by how much:"
    if plan.fits:
        ways = [way for way in ways if way.seconds < 0.98 * plan.seconds or best > 3]
    else:
        ways.sort(key=lambda way: changes(plan.config, way.config).count("--"))
        text = "What makes it fit, the smallest change first, and its speed as a multiple of the plan above:"
    lines = [
        f"  {changes(plan.config, way.config)}: {sum(way.gpu.values()) / GIB:.1f} GiB per GPU,"
        f" {sum(way.host.values()) / GIB:.0f} per host, {plan.seconds / way.seconds:.2f} x"
        for way in ways[:best]
    ]
    least = f"At least {least_gpus(plan.config, cluster)} x {cluster.gpu.name} hold this training"
    least += " with --micro_batch 1 --checkpointing block and without --offload."
    return "\n".join([text, *(lines or ["  nothing found among the flags"]), least])


def table(config: Config, cluster: Cluster) -> str:
    """The fastest setting on as many GPUs of each size."""
    lines = []
    for name in ("rtx4090", "a100-40", "h100-80", "h200", "mi300x"):
        at = cluster._replace(gpu=GPUS[name])
        ways = [f"{changes(config, way.config)}: {speed(way, at)}" for way in variants(config, at)[:1]]
        lines.append(f"  {name}, {at.gpu.gib:g} GiB: {''.join(ways) or 'does not fit'}")
    return "\n".join(lines)


# ---- the command


def calibrated() -> Gpu:
    """This machine's first GPU, or its CPU, with its rate of products and of copies measured."""
    from lib.machine import peak_flops

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    rate, _ = peak_flops(device, torch.bfloat16 if cuda else torch.float32)
    here, a = cluster_here(device, 1, rate), torch.empty(2**28 if cuda else 2**25, device=device)
    best = min(timeit.repeat(lambda: a.clone()[0].item(), number=1, repeat=5))
    gpu = here.gpu._replace(tflops=rate / 1e12, bandwidth=8 * len(a) / best, gib=here.gpu.gib or here.host_gib)
    print(f"Measured here: {rate / 1e12:.3g} TFLOP/s, {gpu.bandwidth / 1e9:.3g} GB/s of memory, {gpu.gib:.1f} GiB")
    return gpu


OWN = {  # plan.py's own flags: default, meaning
    "nodes": (1, "machines"),
    "gpus": (1, "GPUs in each"),
    "gpu": ("h100-80", f"{', '.join(GPUS)}; or TFLOP/s,GB,GB/s,GB/s to the next GPU"),
    "network": (50.0, "GB/s from each GPU to other machines"),
    "host_gib": (math.inf, "memory of each machine"),
    "price": (0.0, "of a GPU for an hour"),
    "tokens": (0.0, "to train on; default: --steps"),
    "search": (False, "print the fastest settings as flags"),
    "table": (False, "the same for cards of 24 to 192 GB"),
    "head": (False, "print the head of the recipe"),
    "calibrate": (False, "measure this machine and plan for it"),
}


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """-> (plan.py's own flags, the Config of the others). Weights need not be there where --model names the shape."""
    usage = "python plan.py [@recipes/NAME.args ...] [train.py's flags] [--nodes N --gpus N --gpu KIND]"
    text = "Says whether a run fits, how fast it is and what it costs."
    parser = argparse.ArgumentParser("plan.py", usage, text, allow_abbrev=False)
    for name, (default, meaning) in OWN.items():
        how = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", help=meaning, **how)
    own, words = parser.parse_known_args(argv)
    for name in ("nodes", "gpus"):
        if getattr(own, name) < 1:
            raise UserError(f"--{name} {getattr(own, name)}: it must be at least 1")
    words = words or DEFAULT
    if any(word.partition("=")[0] == "--model" for word in with_recipes(words)):
        words = [*words, "--weights=", "--load=direct", "--lora_weights="]
    return own, parse_args(words)


def main(argv: list[str]) -> int:
    own, config = parse(argv)
    gpu = calibrated() if own.calibrate else machine.read_gpu(own.gpu)
    cluster = Cluster(own.nodes, own.gpus, gpu, own.network * 1e9, own.price, own.host_gib)
    plan = predict(settle(config, cluster), cluster)
    said = summary(plan, cluster, own.tokens / plan.config.batch_tokens or config.steps)
    if own.head:  # for the top of a recipe
        for line in said.splitlines():
            print(textwrap.fill(line, 120, initial_indent="# ", subsequent_indent="#     "))
        return 0
    print(said)
    print(advice(plan, cluster, 8 if own.search else 3))
    if own.table:
        print(table(plan.config, cluster))
    return 0


if __name__ == "__main__":
    errors.run_script(main)
