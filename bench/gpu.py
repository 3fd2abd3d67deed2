"""One GPU: correctness, then training steps and their parts, against peers and limits; what FP8 does to a run's layers.

    python bench/run.py gpu [--parts NAME ...]

Each part is a process of its own (`python bench/gpu.py PART`), which prints its rows as JSON, so that nothing that ends
one part, not even a GPU that no longer answers, ends the next. A part makes what it needs, so that any may be left
out."""

import contextlib
import gc
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from errors import ROOT  # first: it finds the Python that has torch

import torch  # isort: skip
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import fp8
import machine
import peers
import shard
import train
from check import resolve
from common import Row, Turn, failed, guarded, race, row, timed
from config import Config, parse_args
from data import make_loader
from generate import sample
from log import peak_flops
from model import MODELS, LossHead, ModelConfig, Transformer, flops_per_token
from optim import DTYPES
from peers import Contender
from profiler import analyse, make_profile, read_trace

TINY = (
    "--dim 64 --n_layers 2 --n_heads 4 --n_kv_heads 4 --ffn_dim 176 --vocab_size 256 --seq_len 32 --micro_batch 2"
    " --dtype bf16 --attention sdpa"
)


@dataclass(frozen=True)
class Lab:
    """Where a part runs. tiny: small shapes and few steps. nanogpt: a checkout of it."""

    ranks: shard.Ranks
    tiny: bool = False
    nanogpt: str | None = None

    @property
    def cuda(self) -> bool:
        return self.ranks.device.type == "cuda"

    def config(self, flags: str) -> Config:
        words = f"--compile block {flags} {TINY * self.tiny} {'--compile none' * (not self.cuda)}".split()
        return resolve(parse_args([*words, "--fp8_log_every", "0"]), self.ranks.device, 1)

    def race(
        self, case: str, unit: str, amount: float, works: dict[str, Callable], note: Callable, steps=10, rounds=3
    ) -> Iterator[Row]:
        def take_turn(work: Callable) -> Turn:
            return timed(work, 1 if self.tiny else steps, self.cuda)

        return race(case, unit, amount, works, 1 if self.tiny else rounds, take_turn, note)


# ---- races of training steps


@dataclass(frozen=True)
class Race:
    """contenders: flatland or a peer, with flags of ours. Those of one model share its parameters and optimizer, and
    take turns of so many steps; alone: one by one, as on a GPU that cannot hold them all."""

    title: str
    flags: str
    contenders: tuple[str, ...]
    alone: bool = False
    steps: int = 10
    profiled: bool = False

    def __call__(self, lab: Lab) -> Iterator[Row]:
        config, first = lab.config(self.flags), None
        case = f"{self.title}, {config.model_config.n_layers} layers, {config.micro_batch} x {config.seq_len}"
        small = lab.cuda and torch.cuda.get_device_properties(lab.ranks.device).total_memory < 100e9
        groups = [[name] for name in self.contenders] if self.alone or small else [self.contenders]
        for names in groups:
            contenders, shared = {}, {}
            for name in names:
                yield from guarded(case, name, self.build(lab, name, contenders, shared))
            for result in self.measure(lab, case, config, contenders):
                first = first or result["median"]
                yield result | ({"ratio": result["median"] / first} if result["median"] else {})
            if self.profiled and "flatland" in contenders:
                step, vocab = contenders["flatland"].step, config.model_config.vocab_size
                yield from guarded(case, "profile", profile_rows(lab, f"H: {case}", step, vocab))
            contenders, shared, step = {}, {}, None
            gc.collect()
            torch.cuda.empty_cache()

    def build(self, lab: Lab, name: str, contenders: dict, shared: dict) -> Iterator[Row]:
        """Adds a contender. "FSDP" in a name shards over the one rank that there is."""
        words, _, flags = name.partition(" --")
        config = lab.config(f"{self.flags} {'--' * bool(flags)}{flags}")
        kind, device, mesh = words.partition(",")[0], lab.ranks.device, None
        if "FSDP" in words or config.offload == "cpu":
            mesh = shard.make_mesh(0, lab.ranks, offload=True)
        if kind in ("flatland", "torchao"):
            key = config.model_config
            made = peers.our_step(config, lab.ranks, shared.get(key) if mesh is None else None, mesh)
            if kind == "torchao":
                peers.convert_by_torchao(made.model, emulate=not lab.cuda)
        else:
            key, compiled = kind, "compiled" in words and config.compile != "none"
            made = peers.peer_step(kind, config, device, lab.nanogpt, compiled, mesh, shared.get(key))
        shared.setdefault(key, made)
        contenders[name] = made
        yield from ()

    def measure(self, lab: Lab, case: str, config: Config, contenders: dict[str, Contender]) -> Iterator[Row]:
        """Tokens/s; MFU (causal) and GiB on the GPU, without what the other contenders hold."""
        flops = flops_per_token(config.model_config, config.seq_len)
        peak = peak_flops(lab.ranks.device, torch.bfloat16)[0] if lab.cuda else math.inf

        def note(name: str, rate: float, turns: list[Turn]) -> str:
            memory = (turns[-1].peak + contenders[name].state_bytes()) / 2**30
            return f"MFU {rate * flops / peak:.1%}; {memory:.1f} GiB"

        works = {name: contender.step for name, contender in contenders.items()}
        yield from lab.race(case, "tokens/s", config.micro_batch * config.seq_len, works, note, self.steps)


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")


def profile_rows(lab: Lab, case: str, step: Callable, vocab: int, first: int = 5, last: int = 10) -> Iterator[Row]:
    """Where the time of these steps goes, as `--profile` tells it; eager kernels; what the host waits for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json.gz")
        with make_profile(last + 1 - first, lab.cuda, path) as record:  # which warms up for a step
            for number in range(first - 1, last + 1):
                step()
                if lab.cuda and number in (first - 1, last):  # the kernels of these steps end in them
                    torch.cuda.synchronize()
                record.step()
        events = read_trace(path)
    spent, names, steps = analyse(events, vocab)
    whole = sum(spent.values())
    for kind, time_of_it in spent.items():
        longest = "".join(name[:120] for name, _ in names[kind].most_common(1))
        yield row(case, kind, 100 * time_of_it / whole, "% of a step", note=longest)
    eager = Counter()  # ATen's own kernels: nothing joined them with what comes before or after
    for kind in names.keys() - {"optimizer"}:
        eager += Counter({name: t for name, t in names[kind].items() if "at::native" in name and t > whole / 100})
    listed = "; ".join(f"{t / whole:.1%} {name[:120]}" for name, t in eager.most_common())
    yield row(case, "eager kernels above 1 % of a step", len(eager), "kernels", note=listed or "bar: none")
    counts = Counter(event["name"] for event in events if event.get("ph") == "X")
    counts["cudaDeviceSynchronize"] -= counts["cudaDeviceSynchronize"] > 0  # ours, after the last step
    for name in WAITS:
        yield row(case, f"{name}, steps {first} to {last}", counts[name], "calls", note="bar: none")


# ---- correctness


def bounded(case: str, what: str, error: float, bound: float) -> Row:
    verdict = f"allowed {bound:.1e}" if error < bound else f"failed: allowed {bound:.1e}"
    return row(case, what, error, "error", error / bound, verdict)


def relative(value: Tensor, exact: Tensor) -> float:
    exact, value = exact.double().cpu(), value.detach().double().cpu()
    return ((value - exact).norm() / exact.norm()).nan_to_num(nan=math.inf).item()


def gradients(ranks: shard.Ranks, config: Config) -> list[Tensor]:
    """The loss, and every gradient, of the same model and tokens."""
    model = train.build(config, ranks, None)
    peers.fill(model, config, torch.device("cpu"))
    batch = peers.batch_of(config).to(ranks.device)
    loss = model(batch.tokens, batch.targets)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def check(lab: Lab) -> Iterator[Row]:
    """The loss and the gradients of a small compiled Llama against the CPU's in fp32."""
    flags = "--model tiny-llama --dim 256 --n_layers 4 --ffn_dim 512 --seq_len 256 --micro_batch 2 --clip 0"
    config, cpu = replace(lab.config(flags), attention="sdpa"), shard.Ranks(0, 1, torch.device("cpu"))
    torch.set_float32_matmul_precision("highest")
    exact = gradients(cpu, replace(config, dtype="fp32", compile="none"))
    worst = {}
    for dtype in ("fp32", "bf16"):
        for ranks, mode in ((lab.ranks, config.compile), (cpu, "none")):
            values = gradients(ranks, replace(config, dtype=dtype, compile=mode))
            worst[ranks is cpu, dtype] = max(map(relative, values, exact))
    case = "loss and gradients against the CPU's, the worst of them"
    yield bounded(case, "fp32", worst[False, "fp32"], 1e-4)
    yield bounded(case, "bf16; the CPU's own error x 2", worst[False, "bf16"], 2 * worst[True, "bf16"])


def tests(lab: Lab) -> Iterator[Row]:
    """A row for each test that fails."""
    import pytest  # noqa: F401  (a bare machine may lack it)

    case, last = "pytest -m gpu", ""
    files = [path for path in ROOT.glob("test_*.py") if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", *(["--version"] if lab.tiny else files)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            name, fails, _ = line.partition(" FAILED ")
            if fails:
                yield failed(case, name, "see what it printed")
            last = line.strip() or last
    yield row(case, "all", note=f"{'failed: ' * (process.returncode > 0)}{last}")


# ---- matrix products, the loss head, decoding


class Layers:
    """Linear layers [N, K] in FP8 and the operands of a step: x and the gradient of y for each."""

    def __init__(self, lab: Lab, shapes: list[tuple[int, int]], tokens: int, recipe: str):
        with torch.device(lab.ranks.device):
            self.modules = nn.ModuleList(nn.Linear(K, N, bias=False, dtype=torch.bfloat16) for N, K in shapes)
            self.xs = [torch.randn(tokens, K, dtype=torch.bfloat16, requires_grad=True) for _, K in shapes]
            self.gs = [torch.randn(tokens, N, dtype=torch.bfloat16) for N, _ in shapes]
        fp8.convert_linears(self.modules, recipe, small=True)

    def in_fp8(self) -> list[Tensor]:
        return [layer(x) for x, layer in zip(self.xs, self.modules, strict=True)]

    def in_bf16(self) -> list[Tensor]:
        return [nn.functional.linear(x, layer.weight) for x, layer in zip(self.xs, self.modules, strict=True)]

    def step(self, forward: Callable) -> None:
        torch.autograd.backward(forward(), self.gs)
        for t in (*self.xs, *self.modules.parameters()):
            t.grad = None

    def products(self) -> list[Callable[[], Tensor]]:
        """The matrix products of an uncompiled step, of operands that are quantized and laid out already."""
        calls = []

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                if op in (torch.ops.aten._scaled_mm.default, torch.ops.aten.mm.default):
                    calls.append(partial(op, *args, **kwargs or {}))
                return op(*args, **kwargs or {})

        with Record():
            self.step(self.in_fp8)
        return calls


def layer_rows(lab: Lab, case: str, shapes: list[tuple[int, int]], tokens: int, recipe: str) -> Iterator[Row]:
    """Forward and backward: in bf16; in FP8 with all casts; its products alone."""
    layers, flops = Layers(lab, shapes, tokens, recipe), 6 * tokens * sum(N * K for N, K in shapes)
    calls = layers.products()

    @torch.no_grad()
    def products() -> None:
        for call in calls:
            call()

    steps = {
        "bf16": partial(layers.step, layers.in_bf16),
        "with casts": partial(layers.step, torch.compile(layers.in_fp8, dynamic=False, disable=lab.tiny)),
        "products alone": products,
    }
    yield from lab.race(case, "TFLOP/s", flops / 1e12, steps, in_ms(flops), 5)
    torch._dynamo.reset()


def in_ms(flops: int) -> Callable[[str, float, list[Turn]], str]:
    return lambda name, rate, turns: f"{1e3 * flops / 1e12 / rate:.2f} ms"


def products(lab: Lab) -> Iterator[Row]:
    """The linear layers of a block. (In a model the compiler joins casts with what comes before: their share there is
    smaller.)"""
    for name, recipe in itertools.product(("llama3-8b", "llama3-70b", "llama3.1-405b"), fp8.RECIPES):
        c, n = MODELS[name], 8192
        if lab.tiny:
            c, n = replace(c, dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=176), 32
        wide, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        shapes = [(wide + 2 * kv, c.dim), (c.dim, wide), (2 * c.ffn_dim, c.dim), (c.dim, c.ffn_dim)]
        case = f"a block's products, {name}, {n} tokens, {recipe}"
        yield from guarded(case, "all", layer_rows(lab, case, shapes, n, recipe))


def head(lab: Lab, dtypes=(torch.bfloat16, torch.float32)) -> Iterator[Row]:
    for dtype in dtypes:  # of the weight; x is bf16
        case = f"F: loss head, weight in {str(dtype)[6:]}"
        yield from guarded(case, "all", head_rows(lab, case, dtype))


def head_rows(lab: Lab, case: str, dtype: torch.dtype) -> Iterator[Row]:
    N, D, V = (64, 32, 256) if lab.tiny else (16384, 4096, 128256)
    shape = ModelConfig(vocab_size=V, dim=D, n_layers=1, n_heads=1, ffn_dim=D, max_seq_len=N)
    with torch.device(lab.ranks.device):
        ours, targets = LossHead(shape).to(dtype), torch.randint(0, V, (1, N))
        nn.init.normal_(ours.weight, std=0.02)
        x = torch.randn(1, N, D, dtype=torch.bfloat16, requires_grad=True)
    weight, F = ours.weight, nn.functional

    def plain() -> Tensor:
        return F.cross_entropy(F.linear(x[0], weight.to(x.dtype)).float(), targets[0], reduction="sum")

    @torch.no_grad()
    def products() -> None:
        w = weight.to(x.dtype)
        y = x[0] @ w.T
        _ = y @ w, y.T @ x[0]

    losses = {
        "flatland": lambda: ours(x, targets)[0],
        "compiled F.cross_entropy": torch.compile(plain, disable=lab.tiny),
    }
    if hasattr(F, "linear_cross_entropy"):  # of torch 2.13
        losses["F.linear_cross_entropy"] = lambda: F.linear_cross_entropy(
            x[0], weight.to(x.dtype), targets[0], reduction="sum"
        )
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        losses["Liger"] = lambda: fused(weight.to(x.dtype), x[0], targets[0])
    values = {}

    def step(name: str) -> None:
        loss = losses[name]()
        values.setdefault(name, loss.detach())  # of the first, unmeasured step
        loss.backward()
        x.grad = weight.grad = None

    def note(name: str, rate: float, turns: list[Turn]) -> str:
        text = in_ms(6 * N * D * V)(name, rate, turns)
        if name not in losses:
            return text
        off = relative(values[name], values["flatland"])
        beyond = (turns[-1].peak - x.nbytes - weight.nbytes) / 2**30
        wrong = f"; failed: its loss is off by {off:.1e}" * (off > 1e-2)  # torch's own sums to bf16
        return f"{text}; {beyond:.2f} GiB beyond gradients{wrong}"

    steps = {name: partial(step, name) for name in losses} | {"its three products alone": products}
    yield from lab.race(f"{case}, {N} x {D} x {V}", "TFLOP/s", 6 * N * D * V / 1e12, steps, note)


def decode(lab: Lab, new: int = 64) -> Iterator[Row]:
    """Greedy, one prompt of 512 tokens, the time of a token on the host's clock."""
    config = lab.config("--model llama3.1-8b --param_dtype bf16 --seq_len 1024 --compile none")
    model = train.build(config, lab.ranks, None).eval()
    peers.fill(model, config, lab.ranks.device)
    ids = torch.randint(0, 256, (1, 8 if lab.tiny else 512))
    tokens = sample(model, ids, 8 + new, temperature=0)
    timed(partial(next, tokens), 8)
    low, median, high = torch.tensor(timed(partial(next, tokens), new).seconds).quantile(torch.tensor([0.1, 0.5, 0.9]))
    result = row("decoding, Llama 8B, bf16, one prompt", "a token", 1e3 * median.item(), "ms", note="bar: 15 ms")
    yield result | {"p10": 1e3 * low.item(), "p90": 1e3 * high.item()}


# ---- the parts

LLAMA = "--model llama3-8b --seq_len 4096 --micro_batch 2 --n_layers"
OFFLOAD = "--offload cpu --param_dtype bf16 --state_dtype bf16 --checkpointing block"
# The most valuable of each call first; seconds: a guess at what each takes where nothing is cached.
PARTS = {
    "check": (40, check),
    "head": (60, head),
    "decode": (30, decode),
    "products": (100, products),
    "tests": (240, tests),
    "llama": (150, Race("A: Llama 8B", f"{LLAMA} 8", ("flatland", "transformers, compiled", "transformers", "liger"),
        profiled=True)),
    "fp8": (150, Race("B: Llama 8B", f"{LLAMA} 8",
        ("flatland", *(f"flatland --fp8 {recipe}" for recipe in fp8.RECIPES), "torchao"))),
    "gpt2-xl": (100, Race("D: GPT-2 1.5B", "--model gpt2-xl --vocab_size 50304 --seq_len 1024 --micro_batch 16",
        ("flatland", "transformers", "nanogpt"), alone=True)),
    "recipe3": (90, Race("B: Llama 2 7B", "--model llama2-7b --seq_len 4096 --micro_batch 2 --n_layers 8",
        ("flatland", "flatland --fp8 tensor", "transformers"))),
    "gpt2": (120, Race("C: GPT-2 124M", "--model gpt2 --vocab_size 50304 --seq_len 1024 --micro_batch 64",
        ("flatland", "flatland --compile model", "nanogpt, compiled", "transformers, compiled"), profiled=True)),
    "experts": (90, Race("E: Mixtral", "--model mixtral-8x7b --seq_len 4096 --micro_batch 2 --n_layers 2",
        ("flatland", "transformers", "flatland --model llama2-7b --n_kv_heads 8 --ffn_dim 28672"), profiled=True)),
    "mesh": (80, Race("FSDP on one rank: Llama 8B", f"{LLAMA} 4", ("flatland",
        *(f"flatland, FSDP {x}" for x in ("--prefetch 1", "--prefetch 0", "--prefetch 2", "--reshard never"))),
        alone=True, steps=5)),
    "checkpointing": (80, Race("Llama 8B", f"{LLAMA} 8", ("flatland", *(f"flatland --checkpointing {mode}"
        for mode in ("selective", "block", "block --offload_activations"))))),
    "offload": (140, Race("G: 405B's blocks",
        f"--model llama3.1-405b --n_layers 2 --vocab_size 16384 --seq_len 4096 --micro_batch 1 {OFFLOAD}",
        ("flatland --prefetch 1", "flatland --prefetch 0", "transformers, CPUOffloadPolicy"), alone=True, steps=1)),
}  # fmt: skip


def bench_gpu(args: Namespace) -> Iterator[Row]:
    """One GPU: correctness, then training steps and their parts against peers and limits."""
    deadline = time.monotonic() + args.budget
    if args.tiny:
        yield row("--tiny", "small shapes and few steps under the names of the large ones: the figures say nothing")
    parts = args.parts if args.repeats else ["check"]
    for name in filter(parts.__contains__, PARTS):
        cost, _ = PARTS[name]
        left = deadline - time.monotonic()
        if left < cost and not args.tiny:
            yield row("left out", name, note=f"it takes about {cost} s, {left:.0f} s are left")
        else:
            yield from in_process(name, cost, args, 600 if args.tiny else left)


SMI = "exec nvidia-smi --query-gpu=power.draw,clocks.sm,temperature.gpu --format=csv,noheader -lms 500 2> /dev/null"


def in_process(name: str, cost: int, args: Namespace, limit: float) -> Iterator[Row]:
    """The rows of a part as they come, and what it took. It is killed at the limit, in seconds."""
    begin, nanogpt = time.monotonic(), args.nanogpt and str(args.nanogpt.resolve())
    spec = json.dumps({"name": name, "tiny": args.tiny, "nanogpt": nanogpt})
    command = ["timeout", "--signal=KILL", f"{limit:.0f}", sys.executable, __file__, spec]
    with tempfile.TemporaryFile("w+") as states, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as part:
        smi = subprocess.Popen(SMI, shell=True, stdout=states)
        yield from (json.loads(line) for line in part.stdout if line.startswith('{"case"'))
        if part.wait():
            killed = part.returncode in (137, -9)
            yield failed(name, "all", f"killed after {limit:.0f} s" if killed else f"ended with {part.returncode}")
        smi.terminate()
        smi.wait()
        states.seek(0)
        busiest = max(states.read().splitlines(), key=lambda state: (state.find(","), state), default="no nvidia-smi")
    yield row("took", name, time.monotonic() - begin, "s in all", note=f"estimated {cost} s; busiest: {busiest}")


def run_part(spec: dict) -> None:
    """In this process; prints the rows."""
    machine.set_products("bf16")
    torch._dynamo.config.recompile_limit = 64  # contenders share code
    lab = Lab(shard.init_ranks(), spec["tiny"], spec["nanogpt"])
    _, part = PARTS[spec["name"]]
    for result in guarded(spec["name"], "all", part(lab)):
        print(json.dumps(result), flush=True)


# ---- the layers of a run's model


def bench_fp8(args: Namespace) -> Iterator[Row]:
    """Each layer of a run's model in FP8: amax, saturated and flushed shares (in millionths) and SNR of x, W and g.

    On a GPU the ratio is its speed-up over bf16."""
    lab, saved = Lab(shard.Ranks(0, 1, machine.find_device(1))), checkpoint.newest(args.run)
    config, device = saved.config, lab.ranks.device
    model = Transformer(saved.model_config, DTYPES[config.dtype])
    shard.fill(model, saved.read_weights)
    model.to(device).train()
    recipe = config.fp8.replace("off", "tensor")
    rows = fp8.convert_linears(model, recipe, config.fp8_grad_dtype.replace("auto", "e5m2"), config.fp8_skip, True)
    fp8.watch(model, list(fp8.layers(model)))
    batch = next(iter(make_loader(config)))[0].to(device)
    model(batch.tokens, batch.targets, batch.positions).backward()
    figures, tokens = fp8.watched(model), batch.tokens.numel()

    @cache
    def speed_up(shape: tuple[int, int]) -> float | None:
        return [*layer_rows(lab, "", [shape], tokens, recipe)][1]["ratio"] if lab.cuda else None

    for name, shape, verdict in rows:
        case = f"{name}, {' x '.join(map(str, shape))}"
        if verdict != "fp8":
            yield row(case, verdict)
            continue
        parts = []
        for operand in "xwg":
            amax, saturated, flushed, snr = (figures[f"fp8/{name}/{operand}_{f}"] for f in fp8.FIGURES)
            shares = f"saturated {1e6 * saturated:.0f} flushed {1e6 * flushed:.0f}"
            parts.append(f"{operand} amax {amax:.2e} {shares}{'' if snr is None else f' {snr:.1f} dB'}")
        ratio = speed_up(shape)
        parts += [f"LOSES: --fp8_skip {name}"] if ratio and ratio < 1 else []
        yield row(case, f"recipe {recipe}, {tokens} tokens", ratio=ratio, note="; ".join(parts))


if __name__ == "__main__":
    run_part(json.loads(sys.argv[1]))
