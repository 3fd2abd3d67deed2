"""Estimates of memory, time and cost before a run. Needs no GPU, weights or data.

    python plan.py [@recipes/NAME.args ...] [train.py's flags] --nodes 8 --gpus 8 --gpu h100-80

Memory: see memory.py.

Time: FLOPs at the share of the data sheet's rate that large products reach (GPUS in base/host.py), elementwise work at
the memory's bandwidth, transfers where they take longer than the computation that hides them, and the optimizer's
traffic. Times are estimated for GPUs only: the speed of a CPU varies too much to predict."""

import contextlib
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from base import errors
from base.disk import amount, free_space
from base.errors import MEMORY_ADVICE, Parser, UserError, within
from config import DEFAULT, Config, check_batch, choose_lanes, refuse_conflicts, split_batch, with_recipes

if __name__ == "__main__":
    errors.prepare_python()

import torch  # isort: skip

import attention
import fp8
import model as transformer
import nf4
from base import host
from base.host import GPUS, Gpu
from base.ranks import Ranks
from hf import lora
from inputs import settled_args
from memory import GIB, META, Cluster, checkpoint_bytes, elements, memory, micro_batches, muon_stacks, state, trace
from optim import DTYPES
from shard import mesh_shape

log = logging.getLogger("flatland")
FUSED = 3  # a compiled block moves an elementwise result about a third as often
RATES = {  # multiples of the rate in bf16
    "bf16": 1.0,
    "tf32": 0.5,
    "fp32": 0.07,
}
NARROW = 200  # columns: matrices of this width reach half of the rate of very wide ones
ATTENTION = 0.6  # of the rate of large products
HIDDEN = 0.9  # of the computation can overlap with transfers
RELIABLE = 50_000  # hours of a GPU between failures: 419 in 54 days on 16,384 H100 (Llama 3's paper, section 3.3.4)
HOST_BANDWIDTH = 350e9  # bytes per second of a node's memory, for updates on the CPU


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
        "lm_head and loss": head * (1 + (config.dpo != "none") / passes),  # pairs need the logits twice
        "attention": attends,
        "computed again": products / passes + attends / 3 if config.checkpointing == "block" else 0.0,
        "elementwise": moved / (FUSED if config.compile != "none" else 1) / gpu.bandwidth,
    }
    transfers = _transfers(config, cluster)
    parts["transfers that no computation hides"] = max(transfers - HIDDEN * sum(parts.values()), 0.05 * transfers)
    if config.optimizer == "muon":  # five iterations of 4 to 6 FLOPs per element and row (optim.orthogonalize)
        parts["Newton-Schulz"] = 5 * 5 * shape.dim * sum(elements(config, 1)) / cluster.ranks / peak
        stacks, (within, between) = muon_stacks(config, cluster.ranks), _links(config, cluster)
        parts["exchange of Muon's stacks"] = stacks.within / within + stacks.between / between
    held = state(config, mesh_shape(config.shard_size, cluster.ranks)[1])
    traffic = 3 * held["gradients"] + 2 * held["optimizer state"]  # gradients are read; the rest is read and written
    return parts | {"update": traffic / (HOST_BANDWIDTH / cluster.gpus if config.offload == "cpu" else gpu.bandwidth)}


def _links(config: Config, cluster: Cluster) -> tuple[float, float]:
    """Bytes per second between the ranks of a replica, and between replicas."""
    link, nodes = cluster.gpu.link, -(-mesh_shape(config.shard_size, cluster.ranks)[1] // cluster.gpus)
    between = link if cluster.nodes == 1 else cluster.network * 1e9
    if nodes > 1:  # all network cards of a node carry its traffic with other nodes
        link = min(link, cluster.gpus * cluster.network * 1e9 * nodes / (nodes - 1))
    return link, between


def _transfers(config: Config, cluster: Cluster) -> float:
    """Seconds that a step's slowest link works: parameters are gathered twice for each micro-batch, gradients reduced
    once, replicas summed once a step."""
    replicas, shards = mesh_shape(config.shard_size, cluster.ranks)
    (held, frozen), (gradients, others) = elements(config, shards), elements(config, 1)
    compute, reduce, masters = (DTYPES[n].itemsize for n in (config.dtype, config.reduce_dtype, config.param_dtype))
    passes, (within, between) = micro_batches(config, cluster), _links(config, cluster)
    gathers = 2 * passes if config.reshard != "never" else 1
    out = ((gradients + others) * gathers * compute + gradients * passes * reduce) * (shards - 1) / shards / within
    out += 2 * held * reduce * (replicas - 1) / replicas / between
    if config.offload == "cpu":
        out += (3 * held * masters + 2 * frozen * compute) * passes / cluster.gpu.host
    return out


# ---- a run on a cluster


class Plan(NamedTuple):
    """The prediction for a run on a cluster. bytes: by place (each GPU, each host) and part. times: seconds of a step
    by part, empty for a GPU that is not in GPUS."""

    config: Config
    cluster: Cluster
    bytes: dict[str, dict[str, int]]
    times: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.times.values())

    def needs(self, place: str) -> float:
        """GiB."""
        return sum(self.bytes[place].values()) / GIB

    @property
    def rooms(self) -> dict[str, float]:
        """GiB of each place."""
        return {"GPU": self.cluster.gpu.gib, "host": self.cluster.host_gib}

    def lacking(self) -> list[str]:
        """The places without enough memory."""
        return [place for place, room in self.rooms.items() if self.needs(place) > room]

    def describe(self, place: str) -> str:
        parts = largest(self.bytes[place], ",.1f", GIB)
        return f"each {place}: {self.needs(place):,.1f} GiB ({parts}) of {round(self.rooms[place], 1):,g} GiB"


def predict(config: Config, cluster: Cluster, least: bool = False) -> Plan:
    """config: without `auto`. least: see memory; without times."""
    micro_batch, batch_tokens = split_batch(config, cluster.ranks)
    config = replace(config, micro_batch=micro_batch, batch_tokens=batch_tokens)
    times = {} if least or not cluster.gpu.tflops else seconds(config, cluster)
    return Plan(config, cluster, memory(config, cluster, least), times)


def settle(config: Config, device: torch.device, world_size: int) -> Config:
    """Gives a run the batch, lanes and attention of these ranks and their device, and refuses what they cannot have.
    config: dtype and compile without `auto`. device: meta stands for GPUs that are not here."""
    refuse_conflicts(config, world_size)
    mesh_shape(config.shard_size, world_size)  # refuses a shard size that does not divide the ranks
    micro_batch, batch_tokens = split_batch(config, world_size)
    if config.fp8 != "off":
        tokens = micro_batch * config.seq_len // config.context_parallel
        fp8.check_run(config.fp8, tokens, device, config.dtype)
        with META:
            fp8.convert_model(transformer.Transformer(config.model_config), config.fp8, config.fp8_skip, device)
    kind, compiled = device.type.replace("meta", "cuda"), config.compile != "none"
    head_dim = config.model_config.head_dim
    backend = attention.choose_backend(config.attention, kind, config.dtype, compiled, config.seq_len, head_dim)
    return replace(config, batch_tokens=batch_tokens, lanes=choose_lanes(config, world_size), attention=backend)


def cluster_here(ranks: Ranks) -> Cluster:
    """The machines that this process and its peers run on."""
    gpus = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)), ranks.world_size)
    gpu = Gpu("CPU", *[0] * 7)
    if ranks.device.type == "cuda":
        size = torch.cuda.get_device_properties(ranks.device).total_memory
        gpu = (host.known_gpu(ranks.device) or gpu._replace(name="GPU"))._replace(gib=size / GIB)
    return Cluster(ranks.world_size // gpus, gpus, gpu, host_gib=host.available_memory() / GIB)


def refuse_without_room(config: Config, ranks: Ranks) -> None:
    """Refuses a run that cannot fit into this machine, before anything is allocated. It counts only those
    activations that any run needs: the inputs of the blocks."""
    plan = predict(config, cluster_here(ranks), least=True)
    for place in plan.lacking():
        raise UserError(f"Even without most activations it does not fit: {plan.describe(place)}. {MEMORY_ADVICE}")
    size, (free, folder) = checkpoint_bytes(config), free_space(Path(config.out))
    if size > free:
        log.warning("The first save will fail: it needs %s, %s has %s", amount(size), folder, amount(free))


def describe_room(config: Config, ranks: Ranks) -> str:
    """A line that tells whether a run fits into this machine's memory, for --check."""
    try:
        plan = predict(config, cluster_here(ranks))
    except RuntimeError as e:  # a changed model that cannot run on the meta device
        return f"Memory: no estimate for this model: {e}"
    lacking, place = plan.lacking(), "GPU" if plan.cluster.cuda else "host"
    verdict = "it probably does not fit" if lacking else "it fits"
    return f"Memory: {verdict}: {plan.describe([*lacking, place][0])}"


def predict_record(config: Config, ranks: Ranks) -> dict[str, float]:
    """The prediction for a record of metrics.jsonl: `mem_gib`, allocated by torch, and `step_ms`, if the data sheet of
    the GPU is known; {} on a CPU or if the model cannot be traced."""
    if ranks.rank or ranks.device.type == "cpu":
        return {}
    try:
        plan = predict(config, cluster_here(ranks))
    except RuntimeError as e:  # a changed model that cannot run on the meta device
        log.warning("Plan: no prediction for this model: %s", e)
        return {}
    others = plan.bytes["GPU"]["CUDA and NCCL"] + plan.bytes["GPU"]["loose in torch's allocator"]
    record = {"mem_gib": plan.needs("GPU") - others / GIB}
    return record | {"step_ms": 1e3 * plan.seconds} if plan.times else record


# ---- the report


def largest(parts: dict[str, float], text: str, unit: float) -> str:
    """The three largest parts."""
    return ", ".join(f"{name} {parts[name] / unit:{text}}" for name in sorted(parts, key=parts.get, reverse=True)[:3])


def summary(plan: Plan) -> str:
    config, cluster, gpu = plan.config, plan.cluster, plan.cluster.gpu
    parameters = sum(elements(config, 1)) + nf4.elements(lora.meta_model(config))
    lines = [
        f"{config.model}, {parameters / 1e9:.3g} B parameters, rows of {config.seq_len:,} tokens,"
        f" {config.micro_batch} at a time, on {cluster.nodes} x {cluster.gpus} {gpu.name}:"
        f" it {'does not fit' if plan.lacking() else 'fits'}.",
        plan.describe("GPU"),
        plan.describe("host") + " (--host_gib)",
        f"disk: {amount(checkpoint_bytes(config))} a checkpoint",
    ]
    if not plan.lacking():
        rate = config.batch_tokens / plan.seconds / cluster.ranks
        mfu = rate * lora.flops_per_token(config) / (gpu.tflops * 1e12)
        hours = config.steps * plan.seconds / 3600
        cost = f", ${hours * cluster.ranks * cluster.price:,.0f}" * (cluster.price > 0)
        lines += [
            f"speed: {rate:,.0f} tokens/s per GPU, {plan.seconds:.3g} s a step, MFU {mfu:.0%}"
            f" ({largest(plan.times, '.0%', plan.seconds)})",
            f"time: {hours:,.2f} hours for {config.steps * config.batch_tokens / 1e9:,.3g} B tokens"
            f" ({config.steps:,} steps){cost}",
        ]
        if config.dpo not in ("none", "simpo"):  # a forward pass is a third of a step
            lines.append(f"reference: up to {hours / 3:,.2f} hours more, for a pass over the pairs of the first epoch")
        if cluster.save_seconds:
            lines.append(describe_saves(plan))
    return "\n  ".join(lines)


def describe_saves(plan: Plan) -> str:
    """The interval of saves that loses least time (Young, doi 10.1145/361147.361115; Daly, doi
    10.1016/j.future.2004.11.016). If a save takes S seconds and a failure comes every M seconds, an interval of T
    seconds loses S / T of the time to saves, and T / 2M to steps that are computed again. Both are equal, and their sum
    is least, for T = sqrt(2 S M). A restart takes as long for every interval."""
    ranks, save = plan.cluster.ranks, plan.cluster.save_seconds
    mean = 3600 * (plan.cluster.failure_hours or RELIABLE / ranks)
    interval = math.sqrt(2 * save * mean)
    every, lost = max(1, round(interval / plan.seconds)), 168 * ranks * (save / interval + interval / 2 / mean)
    return (
        f"saves of {save:g} s, a failure in {mean / 3600:,.0f} hours: --save_every {every} loses least,"
        f" {lost:,.0f} GPU hours a week"
    )


def advice(argv: list[str], plan: Plan) -> str:
    """The combination that fits whose most expensive flags are the cheapest. Flags are added in the order of their cost
    in speed until the run fits; then those that it does not need are taken away."""

    def attempt(flags: list[str]) -> Plan | None:
        words = " ".join([*flags, f"--batch_tokens {plan.config.batch_tokens}"]).split()
        with contextlib.suppress(UserError):  # of flags that exclude each other
            return predict(*parse([*argv, *words]))

    chosen, best = [], plan
    for flag in (*LOWER_MEMORY, f"--context_parallel {plan.cluster.gpus}"):
        for flags in ([*chosen, flag], [*chosen[:-1], flag]):  # --offload cpu excludes --quantize nf4
            if best.lacking() and (together := attempt(flags)):
                chosen, best = flags, together
                break
    for flag in reversed(chosen):  # the most expensive first
        fewer = [other for other in chosen if other != flag]
        without = attempt(fewer)
        if without and not without.lacking():
            chosen, best = fewer, without
    verdict = "No flags make it fit" if best.lacking() else "The cheapest flags that make it fit"
    return f"{verdict}: with `{' '.join(chosen)}`, {best.describe((best.lacking() or plan.lacking())[0])}"


# ---- the command

FLAGS = {  # the fields of Cluster
    "--nodes": dict(type=within(int, 1), default=1, help="machines (%(default)s)"),
    "--gpus": dict(type=within(int, 1), default=1, help="GPUs in each (%(default)s)"),
    "--gpu": dict(choices=GPUS, default="h100-80", help="their kind (%(default)s)"),
    "--network": dict(
        type=within(float, 0.001), default=50.0, help="GB/s from each GPU to other machines (%(default)s)"
    ),
    "--price": dict(type=within(float, 0), default=0.0, help="dollars for an hour of a GPU"),
    "--host_gib": dict(type=within(float, 1), default=2048.0, help="memory of each machine (%(default)s)"),
    "--save_seconds": dict(type=within(float, 0), default=0.0, help="that training waits for a save, as in save_ms"),
    "--failure_hours": dict(
        type=within(float, 0), default=0.0, help="between two failures or preemptions (50,000 hours / GPUs)"
    ),
}
ABOUT = {
    "prog": "plan.py",
    "usage": "python plan.py [@recipes/NAME.args ...] [train.py's flags] [--nodes N --gpus N --gpu KIND]",
    "description": "Estimates the memory, the speed and the cost of a run.",
}
LOWER_MEMORY = [  # flags that lower the memory of a run, in the order of their cost in speed
    "--micro_batch 1",
    "--save_async off",
    "--state_dtype bf16",
    "--param_dtype bf16",
    "--checkpointing block",
    "--offload_activations on",
    "--lora 16",
    "--lora 16 --quantize nf4",
    "--offload cpu",
]


def parse(argv: list[str]) -> tuple[Config, Cluster]:
    """-> (the Config of train.py's flags without `auto`, the cluster). With --model, no weights are looked for."""
    parser = Parser(FLAGS, **ABOUT)
    flags, words = parser.parse_known_args(argv)
    cluster = Cluster(*vars(flags).values())._replace(gpu=GPUS[flags.gpu])
    if cluster.failure_hours and not cluster.save_seconds:
        raise UserError("--failure_hours has no effect without --save_seconds")
    words = words or DEFAULT
    if "model" in with_recipes(words):
        words = [*words, "--weights=", "--load=direct"]
    config = settled_args(words)
    if config.epochs:
        raise UserError(f"--epochs {config.epochs:g}: plan.py reads no data; give --steps instead")
    check_batch(config, cluster.ranks)
    config = replace(
        config,
        dtype="bf16" if config.dtype == "auto" else config.dtype,
        compile="block" if config.compile == "auto" else config.compile,
        attention="varlen" if config.attention == "flash" else config.attention,  # whose package need not be here
    )
    config = settle(config, META, cluster.ranks)
    if config.fp8 != "off" and not cluster.gpu.fp8:
        raise UserError(f"--fp8 {config.fp8}: the {cluster.gpu.name} has no FP8; --fp8 off trains in bf16 there")
    return config, cluster


def main(argv: list[str]) -> int:
    plan = predict(*parse(argv))
    print(summary(plan), flush=True)
    if plan.lacking():
        print(advice(argv, plan))
    return 0


if __name__ == "__main__":
    errors.run_script(main)
