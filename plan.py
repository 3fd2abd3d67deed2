"""Will a run fit, how long does it take, what does it cost: before a GPU is rented.

    python plan.py [@recipes/NAME.args ...] [train.py's flags] --nodes 8 --gpus 8 --gpu h100-80

Memory. The real model is built on the meta device, where tensors have shapes and no values, with two layers and with
three, and goes through a real forward and backward pass while every allocation is counted. A layer more adds the same
each time, so the two say what any number of layers needs. What is not asked of the model stands in formulas here:
what FSDP2 gathers and reduces, what a compiler spares, what CUDA takes for itself.

Time. FLOPs at the share of the data sheet's rate that large products reach (machine.GPUS), elementwise work at the
memory's bandwidth, transfers where they take longer than the computation that hides them, the optimizer's traffic.

It needs neither GPU, weights nor data."""

import errors  # first: it finds the Python that has torch

import argparse  # isort: skip
import contextlib
import functools
import itertools
import math
import os
import textwrap
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from config import DEFAULT, UNSUPPORTED, Config, check_batch, parse_args, refuse_unsupported, split_batch, with_recipes
from errors import UserError

import torch  # isort: skip
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import activations
import attention
import fp8
import machine
import model as transformer
from machine import GPUS, Gpu
from optim import DTYPES
from shapes import ModelConfig
from shard import mesh_shape, sharded_dim

GIB, META = 2**30, torch.device("meta")
CUDA_BYTES = int(1.5 * GIB)  # CUDA's own, NCCL's buffers and cuBLAS's workspaces: outside of torch's allocator
LOOSE = 0.04  # of what torch allocates: blocks that are reserved and too small for what is needed next
OUTSIDE = ("loose in torch's allocator", "CUDA and NCCL")  # parts of a GPU's memory that torch does not count
PROCESS_BYTES = {"cuda": 3 * GIB, "cpu": int(0.335 * GIB)}  # of the host: Python, torch, what it loads, the data
FUSED = 3  # a compiled block moves an elementwise result about a third as often
RATES = {"bf16": 1.0, "tf32": 0.5, "fp32": 0.07}  # of GPUs, as multiples of that in bf16
NARROW = 200  # columns: matrices of this width reach half of the rate of very wide ones
ATTENTION = 0.6  # of the rate of large products
HIDDEN = 0.9  # of the computation has transfers beside it
HOST_BANDWIDTH = 350e9  # bytes per second of a node's memory, which an update on the CPU takes


@dataclass(frozen=True)
class Cluster:
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
    def device(self) -> str:
        return "cpu" if self.gpu.name == "CPU" else "cuda"


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
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
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


def _fused_attention(name: str):
    """torch's fused kernel as a GPU or a CPU runs it: on the meta device torch would choose the plain one."""
    kernel = getattr(torch.ops.aten, name)
    return lambda q, k, v, attn_mask=None, is_causal=False, enable_gqa=False: kernel(q, k, v, 0.0, True)[0]


def _even_experts(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """model.grouped_matmul's loop, without the numbers in `ends`: the meta device has none."""
    parts = zip(x.tensor_split(len(weight)), weight.to(x.dtype), strict=True)
    return torch.cat([part @ w.T for part, w in parts])


@contextlib.contextmanager
def _as_on(device: str, config: Config) -> Iterator[None]:
    """The model's choices by device are those for `device`, though it computes on the meta device."""

    def add_in_place(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        return torch.empty(len(a), b.shape[1], device=META) if total is None else total

    cuda = device == "cuda"
    kernel = _fused_attention("_scaled_dot_product_flash_attention" + "_for_cpu" * (not cuda))
    places = [
        (attention.F, "scaled_dot_product_attention", kernel),
        (transformer, "CHUNK_BYTES", transformer.CHUNK_BYTES | {"meta": transformer.CHUNK_BYTES[device]}),
    ]
    if cuda:  # whose kernels share keys among heads, and add products up in place
        places += [
            (attention, "_shares_heads", lambda q, group, mask: group > 1),
            (transformer, "add_product", add_in_place),
        ]
    if config.dtype != "bf16":
        places.append((transformer.MoE, "matmul", staticmethod(_even_experts)))
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in places]
    try:
        for place in places:
            setattr(*place)
        yield
    finally:
        for place in before:
            setattr(*place)


def _build(config: Config, layers: int, sharded: bool) -> transformer.Transformer:
    """The model as train.build makes it, on the meta device, with so many layers; neither compiled nor sharded."""
    shape, dtype = replace(config.model_config, n_layers=layers), DTYPES[config.dtype]
    backend = "blocked" if config.attention == "blocked" else "sdpa"
    with META:
        model = transformer.Transformer(shape, dtype, backend)
    if config.fp8 != "off":
        fp8.convert(model, config, META)
    model.to(dtype if sharded else DTYPES[config.param_dtype])
    mode = config.checkpointing
    if config.compile != "none":  # a compiler, too, keeps products and attention and computes the rest again
        mode = {"none": "selective"}.get(mode, mode)
        model.lm_head.cross_entropy = lambda logits, targets, grads: logits.new_empty(len(logits), dtype=torch.float32)
    activations.checkpoint_activations(model, mode)
    return model


TRACED = "model vocab_size dim n_layers n_heads n_kv_heads ffn_dim seq_len micro_batch dtype param_dtype checkpointing"
TRACED = (
    *TRACED.split(),
    "update_in_backward",
    "fp8",
    "fp8_grad_dtype",
    "fp8_skip",
    "attention",
    "compile",
    "offload_activations",
)


def trace(config: Config, device: str, sharded: bool, accumulates: bool) -> tuple[list[int], int]:
    """A forward and a backward pass of the real model -> (bytes that exist beside parameters and moments, at the most:
    until the loss, until the last block's backward pass is done, until all are; bytes that were made in all).

    device: cuda or cpu. sharded: gradients leave as soon as they are complete, and parameters are gathered in the
    compute dtype. accumulates: gradients of an earlier micro-batch exist."""
    if sharded:
        config = replace(config, param_dtype="fp32")  # whatever it is
    key = tuple((name, getattr(config, name)) for name in TRACED)
    return _trace(key, device, sharded, accumulates)


@functools.lru_cache(4096)
def _trace(key: tuple, device: str, sharded: bool, accumulates: bool) -> tuple[list[int], int]:
    config = replace(Config(), **dict(key))
    with _as_on(device, config):
        two, three = (_trace_layers(config, n, sharded, accumulates) for n in (2, 3))
    more = config.model_config.n_layers - 2
    *peaks, made = (a + more * (b - a) for a, b in zip(two, three, strict=True))
    return peaks, made


def _trace_layers(config: Config, layers: int, sharded: bool, accumulates: bool) -> list[int]:
    model, laps = _build(config, layers, sharded), []
    tokens = torch.empty(config.micro_batch, config.seq_len, dtype=torch.int64, device=META)
    live = _Live([tokens, *model.parameters()])
    block = model.layers[-1]
    if sharded or config.update_in_backward:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def first_use(grads) -> None:
        laps.append(live.lap())

    with live:
        for _ in range(1 + (accumulates and not sharded)):
            laps.clear()
            live.lap()
            handle = block.register_forward_pre_hook(lambda m, args: args[0].register_hook(first_use) and None)
            loss = model(tokens, tokens)
            laps.append(live.lap())
            loss.backward()
            laps.append(live.lap())
            handle.remove()
    return [*laps, live.made]


def elements(config: Config, shards: int) -> list[int]:
    """Of each parameter, the numbers that rank 0 holds, whose part is a largest one. FSDP2 cuts a parameter's rows into
    parts of equal size, of which the last may be short; experts as shard.sharded_dim says."""
    return _elements(config.model_config, shards)


@functools.lru_cache
def _elements(shape: ModelConfig, shards: int) -> list[int]:
    with META:
        parameters = list(transformer.Transformer(shape).parameters())
    lengths = [p.shape[sharded_dim(p, shards)] for p in parameters]
    return [-(-length // shards) * (p.numel() // length) for p, length in zip(parameters, lengths, strict=True)]


def state(config: Config, shards: int, pinned: bool = False) -> dict[str, int]:
    """Bytes of a rank's parameters, gradients and moments. pinned: on the host, where torch rounds each tensor that a
    GPU copies from up to a power of two."""
    held = elements(config, shards)
    copies = [n * DTYPES[config.param_dtype].itemsize for n in held]
    if pinned:
        copies = [1 << (size - 1).bit_length() for size in copies]
    gradients = sum(copies)
    if config.update_in_backward:  # of a block at a time
        gradients = sum(copies) * _units(config)["block"] // _units(config)["all"]
    moments = 2 * sum(held) * DTYPES[config.state_dtype].itemsize
    return {"parameters": sum(copies), "gradients": gradients, "moments": moments}


def _units(config: Config) -> dict[str, int]:
    """Numbers in the units that FSDP2 gathers: all, one block, and the larger of embedding and lm_head."""
    shape = config.model_config
    total, ends = sum(elements(config, 1)), shape.vocab_size * shape.dim
    return {"all": total, "block": (total - ends * (2 - shape.tied)) // shape.n_layers, "end": ends}


def memory(config: Config, cluster: Cluster) -> tuple[dict[str, int], dict[str, int]]:
    """-> (bytes on each GPU by part, bytes on each host by part) at the peak. Without GPUs the first is empty."""
    device = cluster.device
    _, shards = mesh_shape(config.shard_size, cluster.ranks)
    offload = device == "cuda" and config.offload == "cpu"
    held, host = state(config, shards, offload), {"processes": cluster.gpus * PROCESS_BYTES[device]}
    host["tokens of a step"] = 16 * config.batch_tokens // cluster.nodes
    if offload:
        host |= {part: cluster.gpus * size for part, size in held.items()}
        held = dict.fromkeys(held, 0)
    parts = held | _working(config, cluster, device, held["gradients"])
    if config.offload_activations and device == "cuda":
        inputs = config.model_config.n_layers * config.model_config.dim * config.micro_batch * config.seq_len
        inputs *= DTYPES[config.dtype].itemsize
        parts["activations"] -= inputs
        host["block inputs"] = inputs * cluster.gpus
    if device == "cpu":
        return {}, host | {part: cluster.gpus * size for part, size in parts.items()}
    parts |= dict(zip(OUTSIDE, (int(LOOSE * sum(parts.values())), CUDA_BYTES), strict=True))
    return parts, host


def _working(config: Config, cluster: Cluster, device: str, gradients: int) -> dict[str, int]:
    """What a step needs beside parameters and moments, in that of its three phases (see trace) that needs most."""
    sharded = cluster.ranks > 1 or (device == "cuda" and config.offload == "cpu")
    accumulates = config.batch_tokens > config.micro_batch * config.seq_len * cluster.ranks
    peaks, _ = trace(config, device, sharded, accumulates)
    gathered, reduced = ([0] * 3 for _ in range(2))
    if sharded:
        gathered, reduced = _transferred(config, cluster)
    grads = [gradients if accumulates else 0] * 2 + [gradients]
    if sharded or config.update_in_backward:
        peaks = [a + b for a, b in zip(peaks, grads, strict=True)]
    totals = [sum(amounts) for amounts in zip(peaks, gathered, reduced, strict=True)]
    phase = totals.index(max(totals))
    return {
        "gradients": grads[phase],
        "activations": peaks[phase] - grads[phase],
        "gathered parameters": gathered[phase],
        "gradients being reduced": reduced[phase],
    }


def _transferred(config: Config, cluster: Cluster) -> tuple[list[int], list[int]]:
    """Bytes of FSDP2's buffers in each phase: gathered parameters; gradients of the unit being reduced, in the compute
    dtype and in that of the reduction. While one block computes, the next `prefetch` are gathered, and one is copied
    out of the buffer that it was gathered in (torch.distributed.fsdp, _fsdp_param_group.py)."""
    units, compute = _units(config), DTYPES[config.dtype].itemsize
    _, shards = mesh_shape(config.shard_size, cluster.ranks)
    block, end = units["block"] * compute, units["end"] * compute
    if config.reshard == "never" or shards == 1:
        gathered = [units["all"] * compute + block] * 3
    else:
        forward = max((2 + config.prefetch) * block, 2 * end + block)
        gathered = [forward, (2 + config.prefetch) * block, (2 + config.prefetch) * block]
    unit = max(units["block"], units["end"])
    reduced = units["block"] * compute + unit * DTYPES[config.reduce_dtype].itemsize
    return gathered, [0, reduced, reduced]


def disk(config: Config) -> int:
    """Bytes of a checkpoint: the masters and both moments."""
    itemsize = DTYPES[config.param_dtype].itemsize + 2 * DTYPES[config.state_dtype].itemsize
    return sum(elements(config, 1)) * itemsize


# ---- time


def seconds(config: Config, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step by part; the sum is the step's."""
    tokens = config.batch_tokens / cluster.ranks
    parts = _computation(config, cluster, tokens)
    transfers = _transfers(config, cluster)
    parts["transfers that no computation hides"] = max(transfers - HIDDEN * sum(parts.values()), 0.05 * transfers)
    _, shards = mesh_shape(config.shard_size, cluster.ranks)
    held = state(config, shards)
    traffic = 2 * sum(held.values()) - held["gradients"]  # all is read, and written but for the gradients
    offload = config.offload == "cpu"
    parts["update"] = traffic / (HOST_BANDWIDTH / cluster.gpus if offload else cluster.gpu.bandwidth)
    return parts


def _computation(config: Config, cluster: Cluster, tokens: float) -> dict[str, float]:
    """Seconds that a GPU computes for so many tokens."""
    shape, gpu = config.model_config, cluster.gpu
    rate = gpu.tflops * 1e12 * gpu.reach * shape.dim / (shape.dim + NARROW)
    if cluster.device == "cuda":
        rate *= RATES[config.dtype]
    head = 6 * shape.vocab_size * shape.dim * tokens / rate
    products = 6 * transformer.matmul_params(shape) * tokens / rate - head
    if config.fp8 != "off":
        products /= gpu.fp8 or 1.0  # a CPU computes it as fp32
    attended = transformer.flops_per_token(shape, config.seq_len) - 6 * transformer.matmul_params(shape)
    attends = attended * tokens / rate / ATTENTION
    again = (products + attends) / 3 if config.checkpointing == "block" else 0.0
    _, made = trace(config, cluster.device, True, False)
    made *= tokens / (config.micro_batch * config.seq_len)
    moved = 3 * made / (FUSED if config.compile != "none" else 1)  # an operation reads about twice what it writes
    return {
        "products": products,
        "lm_head and loss": head,
        "attention": attends,
        "computed again": again,
        "elementwise": moved / gpu.bandwidth,
    }


def _transfers(config: Config, cluster: Cluster) -> float:
    """Seconds that a step's slowest link works: parameters are gathered twice for each micro-batch, gradients reduced
    once, replicas summed once a step."""
    replicas, shards = mesh_shape(config.shard_size, cluster.ranks)
    total, held = _units(config)["all"], sum(elements(config, shards))
    compute, reduce = (DTYPES[name].itemsize for name in (config.dtype, config.reduce_dtype))
    micro_batches = config.batch_tokens / (config.micro_batch * config.seq_len * cluster.ranks)
    nodes = -(-shards // cluster.gpus)  # all network cards of a node take part in what comes to it from others
    link = min(
        cluster.gpu.link, cluster.gpus * cluster.network * nodes / (nodes - 1) if nodes > 1 else cluster.gpu.link
    )
    gathers = 2 if config.reshard != "never" else 1 / micro_batches
    out = total * (gathers * compute + reduce) * (shards - 1) / shards / link * micro_batches
    if replicas > 1:
        link = cluster.gpu.link if cluster.nodes == 1 else cluster.network
        out += 2 * held * reduce * (replicas - 1) / replicas / link
    if config.offload == "cpu":
        masters = DTYPES[config.param_dtype].itemsize
        out += held * (2 * masters + masters) * micro_batches / cluster.gpu.host
    return out


# ---- what to change


@dataclass(frozen=True)
class Plan:
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
    chosen = {"dtype": {"auto": "bf16"}.get(config.dtype, config.dtype), "attention": "sdpa"}
    chosen["compile"] = {"auto": "block"}.get(config.compile, config.compile)
    config = replace(_split(config, cluster), **chosen)
    refuse_unsupported(config, cluster.ranks)
    if config.fp8 != "off" and not cluster.gpu.fp8:
        raise UserError(f"--fp8 {config.fp8}: the {cluster.gpu.name} has no FP8; --fp8 off trains in bf16 there")
    return config


def predict(config: Config, cluster: Cluster) -> Plan:
    """config: as `settle` left it."""
    gpu, host = memory(config, cluster)
    fits = sum(gpu.values()) <= cluster.gpu.gib * GIB and sum(host.values()) <= cluster.host_gib * GIB
    return Plan(config, gpu, host, seconds(config, cluster), fits)


def variants(config: Config, cluster: Cluster) -> Iterator[Plan]:
    """The same training, step by step, by other means: flags that cost memory or time and change no result beyond
    rounding, --state_dtype and --offload."""
    rows = config.batch_tokens // (config.seq_len * cluster.ranks)
    micro_batches = [n for n in (1, 2, 4, 8, 16, 32, 64) if rows % n == 0] or [config.micro_batch]
    grid = {
        "micro_batch": sorted({*micro_batches, config.micro_batch}),
        "checkpointing": ("none", "selective", "block") if config.compile == "none" else ("none", "block"),
        "param_dtype": dict.fromkeys((config.param_dtype, "bf16")),
        "state_dtype": dict.fromkeys((config.state_dtype, "bf16")),
        "offload": dict.fromkeys((config.offload, "cpu")),
        "update_in_backward": {config.update_in_backward, not config.clip},
        "shard_size": dict.fromkeys((config.shard_size, 0)),
        "reshard": dict.fromkeys((config.reshard, "auto")),
    }
    for values in itertools.product(*grid.values()):
        other = replace(config, **dict(zip(grid, values, strict=True)))
        if not any(asked(other, cluster.ranks) for asked, _ in UNSUPPORTED):
            yield predict(other, cluster)


def changes(config: Config, other: Config) -> str:
    """The flags that make the one the other."""
    return " ".join(f"--{f.name} {getattr(other, f.name)}" for f in fields(config) if _differ(config, other, f.name))


def _differ(config: Config, other: Config, name: str) -> bool:
    return getattr(config, name) != getattr(other, name)


def least_gpus(config: Config, cluster: Cluster) -> int:
    """The least power of two of such GPUs that hold the training in some variant without offload, in nodes as here; 0:
    no number up to 4,096."""
    for n in (2**i for i in range(13)):
        at = replace(cluster, nodes=-(-n // cluster.gpus), gpus=min(n, cluster.gpus))
        other = replace(config, batch_tokens=at.ranks * config.seq_len, micro_batch=1, shard_size=0)
        other = replace(other, offload="none")
        ways = [replace(other, checkpointing=mode) for mode in ("none", "block")]
        if any(sum(memory(way, at)[0].values()) <= at.gpu.gib * GIB for way in ways):
            return n
    return 0


# ---- held to its word


def cluster_here(device: torch.device, ranks: int, flops: float = 1e12) -> Cluster:
    """The machines that this process and its peers run on. flops: what a device reaches, where the table of GPUs does
    not know it."""
    gpus = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks)
    if device.type == "cuda":
        name, size = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
        known = next(
            (gpu for gpu in GPUS.values() if gpu.name in name), Gpu("GPU", flops / 1e12, 0, 1e12, 5e10, 2.5e10, 300)
        )
        return Cluster(ranks // gpus, gpus, known._replace(gib=size / GIB))
    size = machine.available_memory() or math.inf
    return Cluster(ranks // gpus, gpus, Gpu("CPU", flops / 1e12, 0, 2e10, 1e10, 1e10, 100, 0.8), host_gib=size / GIB)


def _split(config: Config, cluster: Cluster) -> Config:
    micro_batch, batch_tokens = split_batch(config, cluster.ranks)
    return replace(config, micro_batch=micro_batch, batch_tokens=batch_tokens)


def measured_bytes(config: Config, cluster: Cluster) -> int:
    """What is predicted of that which log.memory_gib measures: what torch allocates on a GPU, or a process on a CPU."""
    gpu, host = memory(config, cluster)
    if cluster.device == "cpu":
        return sum(host.values()) // cluster.gpus
    return sum(size for part, size in gpu.items() if part not in OUTSIDE)


def step_figures(config: Config, cluster: Cluster) -> dict[str, float]:
    """What is predicted of a record of metrics.jsonl: `mem_gib` and `step_ms`."""
    config = _split(config, cluster)
    milliseconds = 1e3 * sum(seconds(config, cluster).values())
    return {"mem_gib": measured_bytes(config, cluster) / GIB, "step_ms": milliseconds}


# ---- what it says


def gib(parts: dict[str, int], least: float = 0.05) -> str:
    """The sum of the parts in GiB, and each part of some size."""
    rows = sorted(((size / GIB, name) for name, size in parts.items()), reverse=True)
    shown = ", ".join(f"{name} {size:.1f}" for size, name in rows if size >= least)
    return f"{sum(parts.values()) / GIB:.1f} GiB ({shown})"


def amount(size: float) -> str:
    """Bytes in GB or TB."""
    if size >= 1e12:
        return f"{size / 1e12:.1f} TB"
    return f"{size / 1e9:.0f} GB" if size >= 1e10 else f"{size / 1e9:.1f} GB"


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2g} s"


def speed(plan: Plan, cluster: Cluster) -> str:
    config = plan.config
    rate = config.batch_tokens / plan.seconds / cluster.ranks
    mfu = rate * transformer.flops_per_token(config.model_config, config.seq_len) / (cluster.gpu.tflops * 1e12)
    return f"{rate:,.0f} tokens/s per GPU, {plan.seconds:.3g} s a step, MFU {mfu:.0%}"


def cost(plan: Plan, cluster: Cluster, steps: float) -> str:
    """Time, energy and money for so many steps."""
    length, gpus = steps * plan.seconds, cluster.ranks
    kwh = length / 3600 * gpus * cluster.gpu.watts * 1.3 / 1000  # a node's other parts draw about a third as much
    tokens = steps * plan.config.batch_tokens
    text = f"{duration(length)} for {tokens / 1e9:,.3g} B tokens ({steps:,.0f} steps), about {kwh:,.0f} kWh"
    return text + f", {length / 3600 * gpus * cluster.price:,.0f} at {cluster.price:g} an hour" * (cluster.price > 0)


def memory_line(config: Config, cluster: Cluster) -> str:
    gpu, host = memory(_split(config, cluster), cluster)
    return f"about {gib(gpu)} per GPU; {gib(host)} per host" if gpu else f"about {gib(host)} per host"


def summary(plan: Plan, cluster: Cluster, steps: float) -> str:
    config, gpu = plan.config, cluster.gpu
    total = sum(elements(config, 1))
    slow = {name: s for name, s in plan.times.items() if s > 0.02 * plan.seconds}
    times = ", ".join(f"{name} {s / plan.seconds:.0%}" for name, s in sorted(slow.items(), key=lambda item: -item[1]))
    lines = [
        f"{config.model}, {total / 1e9:.3g} B parameters, on {cluster.nodes} x {cluster.gpus} {gpu.name}: "
        + ("it fits." if plan.fits else "it does not fit."),
        f"  each GPU: {gib(plan.gpu)} of {gpu.gib} GiB",
        f"  each host: {gib(plan.host)}" + f" of {cluster.host_gib:.0f} GiB" * (cluster.host_gib < math.inf),
        f"  disk: {amount(disk(config))} a checkpoint, {amount((config.keep + 1) * disk(config))} for --keep"
        f" {config.keep} and the one being written",
        f"  speed: {speed(plan, cluster)} ({times})",
        f"  time: {cost(plan, cluster, steps)}",
    ]
    return "\n".join(lines)


def advice(plan: Plan, cluster: Cluster, best: int = 3) -> str:
    """What does not fit: the smallest changes that make it fit, with what they cost in speed. What fits: the fastest
    settings found."""
    ways = [way for way in variants(plan.config, cluster) if way.fits]
    if not plan.fits:
        ways.sort(key=lambda way: (changes(plan.config, way.config).count("--"), way.seconds))
        head = "What makes it fit, the smallest change first, and its speed as a multiple of the plan above:"
    else:
        ways = [way for way in ways if way.seconds < 0.98 * plan.seconds or best > 3]
        ways.sort(key=lambda way: way.seconds)
        head = "Faster, if you like, and by how much:"
    lines = [
        f"  {changes(plan.config, way.config) or '(as it is)'}: {sum(way.gpu.values()) / GIB:.1f} GiB per GPU,"
        f" {sum(way.host.values()) / GIB:.0f} per host, {plan.seconds / way.seconds:.2f} x"
        for way in ways[:best]
    ]
    if not ways:
        lines = ["  nothing that the flags can do" if not plan.fits else "  nothing found: this is the fastest setting"]
    fewest = least_gpus(plan.config, cluster)
    lines.append(
        f"At least {fewest} x {cluster.gpu.name} hold this training without --offload, as it is or with"
        " --micro_batch 1 --checkpointing block."
    )
    return "\n".join([head, *lines])


def table(config: Config, cluster: Cluster) -> str:
    """The fastest setting on as many GPUs of each size."""
    lines = []
    for size, name in ((24, "rtx4090"), (40, "a100-40"), (80, "h100-80"), (141, "h200"), (192, "mi300x")):
        at = replace(cluster, gpu=GPUS[name])
        ways = sorted((way for way in variants(config, at) if way.fits), key=lambda way: way.seconds)
        best = f"{changes(config, ways[0].config) or '(as it is)'}: {speed(ways[0], at)}" if ways else "does not fit"
        lines.append(f"  {size:3} GB ({name}): {best}")
    return "\n".join(lines)


def head(plan: Plan, cluster: Cluster) -> str:
    """The lines on memory and time at the top of a recipe."""
    config = plan.config
    lines = [f"GPU: about {gib(plan.gpu, 0.5)}."]
    if config.offload == "cpu":
        lines.append(f"Host: {gib(plan.host, 0.5)}.")
    if config.save_every:
        kept = "two" if config.keep == 2 else str(config.keep)
        lines.append(
            f"Disk: {amount(disk(config))} a checkpoint, {amount((config.keep + 1) * disk(config))} for the {kept} that"
            " are kept and the one being written."
        )
    lines.append(f"Time: about {speed(plan, cluster)}, {duration(config.steps * plan.seconds)} in all, not measured.")
    wrapped = [textwrap.wrap(line, 120, initial_indent="# ", subsequent_indent="#   ") for line in lines]
    return "\n".join(line for lines in wrapped for line in lines)


# ---- the command


def read_gpu(word: str) -> Gpu:
    numbers = word.split(",")
    if word.lower() in GPUS:
        return GPUS[word.lower()]
    try:
        tflops, size, *rest = map(float, numbers)
        bandwidth, link = (rest + [tflops * 3.4, 50.0])[:2] if len(rest) < 2 else rest
        return Gpu("GPU", tflops, size / 1.074, bandwidth * 1e9, link * 1e9, 25e9, 700)
    except ValueError:
        raise UserError(
            f"--gpu {word}: unknown; there are {', '.join(GPUS)}; or four numbers, as 989,80,3350,450: dense bf16"
            " TFLOP/s, GB of memory, GB/s of the memory, GB/s to the next GPU"
        ) from None


def calibrated() -> Gpu:
    """This machine's first GPU, or its CPU, with its rate of products and of copies measured."""
    from log import peak_flops

    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    rate, _ = peak_flops(device, dtype)
    a = torch.empty(2**28 if cuda else 2**25, device=device)
    b, best = torch.empty_like(a), math.inf
    for _ in range(5):
        begin = time.perf_counter()
        b.copy_(a)
        b[0].item()
        best = min(best, time.perf_counter() - begin)
    size = torch.cuda.get_device_properties(0).total_memory if cuda else machine.available_memory()
    gpu = Gpu("GPU" if cuda else "CPU", rate / 1e12, size / GIB, 8 * len(a) / best, 50e9, 25e9, 200, 0.8)
    print(f"Measured here: {rate / 1e12:.3g} TFLOP/s, {gpu.bandwidth / 1e9:.3g} GB/s of memory, {gpu.gib:.1f} GiB")
    return gpu


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """-> (plan.py's own flags, the Config of the others). Weights need not be there where --model names the shape."""
    parser = argparse.ArgumentParser(
        "plan.py", "python plan.py [@recipes/NAME.args ...] [train.py's flags] [--nodes N --gpus N --gpu KIND]",
        "Says whether a run fits, how fast it is and what it costs.", allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs in each")
    parser.add_argument("--gpu", default="h100-80", help=f"{', '.join(GPUS)}; or TFLOP/s,GB,GB/s,GB/s to the next GPU")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s from each GPU to other machines")
    parser.add_argument("--host_gib", type=float, default=math.inf, help="memory of each machine")
    parser.add_argument("--price", type=float, default=0.0, help="of a GPU for an hour")
    parser.add_argument("--tokens", type=float, default=0.0, help="to train on; default: --steps")
    for name, what in (
        ("--search", "print the fastest settings as flags"), ("--table", "the same for cards of 24 to 192 GB"),
        ("--head", "print the head of the recipe"), ("--calibrate", "measure this machine and plan for it"),
    ):  # fmt: skip
        parser.add_argument(name, action="store_true", help=what)
    own, words = parser.parse_known_args(argv)
    for name in ("nodes", "gpus"):
        if getattr(own, name) < 1:
            raise UserError(f"--{name} {getattr(own, name)}: it must be at least 1")
    words = words or DEFAULT
    if any(word.partition("=")[0] == "--model" for word in with_recipes(words)):
        words = [*words, "--weights=", "--load=direct"]
    return own, parse_args(words)


def main(argv: list[str]) -> int:
    own, config = parse(argv)
    gpu = calibrated() if own.calibrate else read_gpu(own.gpu)
    cluster = Cluster(own.nodes, own.gpus, gpu, own.network * 1e9, own.price, own.host_gib)
    plan = predict(settle(config, cluster), cluster)
    if own.head:
        print(head(plan, cluster))
        return 0
    print(summary(plan, cluster, own.tokens / plan.config.batch_tokens or config.steps))
    print(advice(plan, cluster, 8 if own.search else 3))
    if own.table:
        print(table(plan.config, cluster))
    return 0


if __name__ == "__main__":
    errors.run_script(main)
