"""One GPU: correctness, then training steps and their parts, against peers and limits.

    python bench/run.py gpu [--parts NAME ...]

A part makes what it needs and frees it, so that any may be left out."""

import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from errors import ROOT  # first: it finds the Python that has torch

import torch  # isort: skip
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

import fp8
import machine
import peers
import shard
from check import resolve
from common import Row, row, speed_row, with_ratios
from config import Config, parse_args
from data import Batch
from log import PEAKS
from model import MODELS, LossHead, ModelConfig, flops_per_token, random_init
from peers import Contender, random_tokens
from profiler import analyse, read_trace
from weights import config_json

PEAK = PEAKS["H200"] * 1e12  # FLOP/s, dense bf16; what MFU is a share of
TINY = (
    "--dim 64 --n_layers 2 --n_heads 4 --n_kv_heads 4 --ffn_dim 176 --vocab_size 256 --seq_len 32 --micro_batch 2"
    " --dtype bf16 --attention sdpa"
)
ERRORS = {  # relative, of y, dx and dw of an FP8 layer: two-sided, so that bf16 would be noticed; as in test_fp8.py
    "tensor": ((0.02, 0.045), (0.05, 0.07), (0.05, 0.07)),
    "row": ((0.02, 0.045), (0.02, 0.045), (0.02, 0.045)),
    "row_gw_hp": ((0.02, 0.045), (0.02, 0.045), (0, 0.004)),
}


class Lab(NamedTuple):
    """Where the suite runs. tiny: small shapes, few steps. deadline: of time.monotonic()."""

    ranks: shard.Ranks
    tiny: bool
    deadline: float

    @property
    def cuda(self) -> bool:
        return self.ranks.device.type == "cuda"

    def free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


# ---- measuring


def gpu_state() -> dict[str, str]:
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields.split(","), said.split(", "), strict=True))


def measure(lab: Lab, steps: dict[str, Callable], warm: int = 2, rounds: int = 6) -> tuple[dict, dict, dict]:
    """Rounds of 5 steps of each in turn, `warm` of them unmeasured, with no waiting inside a round -> seconds of each
    step, peak bytes, and what nvidia-smi said meanwhile, with the graphs that were compiled after the warm-up."""
    counters, seconds, peaks = torch._dynamo.utils.counters["stats"], {n: [] for n in steps}, dict.fromkeys(steps, 0)
    length, warm, rounds = (1, 1, 2) if lab.tiny else (5, warm, rounds)
    with ThreadPoolExecutor(1) as thread:
        for turn in range(warm + rounds):
            if turn > warm and time.monotonic() > lab.deadline:
                break
            if turn == warm:
                graphs, state = counters["unique_graphs"], thread.submit(gpu_state)
            for name, step in steps.items():
                spent, peaks[name] = time_steps(lab.cuda, step, length)
                seconds[name] += spent if turn >= warm else []
        return seconds, peaks, state.result() | {"late graphs": counters["unique_graphs"] - graphs}


def time_steps(cuda: bool, step: Callable, n: int) -> tuple[list[float], int]:
    """-> seconds of each of n steps, by the GPU's events where there is one; peak bytes"""
    if not cuda:
        marks = [time.perf_counter(), *(step() and None or time.perf_counter() for _ in range(n))]
        return [b - a for a, b in zip(marks, marks[1:], strict=False)], 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return [a.elapsed_time(b) / 1e3 for a, b in pairs], torch.cuda.max_memory_allocated()


def measured_rows(case: str, unit: str, amount: float, measured: tuple, more: Callable[[str, float], str]) -> list[Row]:
    """A row for each contender, in amount per second; ratios to the last. more(name, amount per second): what to add to
    its name."""
    (seconds, _, state), rows = measured, []
    late = f"; {state['late graphs']} graphs compiled meanwhile" * bool(state["late graphs"])
    for name, values in seconds.items():
        result = speed_row(case, name, unit, amount, values)
        result["what"] += more(name, result["median"]) + late
        rows.append(result | {"steps": len(values), "gpu": state})
    return with_ratios(rows)


def profile_rows(lab: Lab, case: str, step: Callable, vocab: int) -> Iterator[Row]:
    """Where the time of a step goes, as `--profile` tells it, and what the host waits for."""
    steps = 1 if lab.tiny else 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json.gz")
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * lab.cuda]
        plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
        write = {"on_trace_ready": lambda record: record.export_chrome_trace(str(path)), "record_shapes": True}
        with profile(activities=activities, schedule=plan, **write) as record:
            for _ in range(1 + steps):
                step()
                if lab.cuda:
                    torch.cuda.synchronize()
                record.step()
        events = read_trace(path)
    spent, names, _ = analyse(events, vocab)
    for kind, time_ in spent.items():
        most = names[kind].most_common(1)
        longest = f": {most[0][0][:120]}" if most else ""
        yield row(case, kind + longest, 100 * time_ / sum(spent.values()), "% of a step")
    counts = Counter(event["name"] for event in events if event.get("ph") == "X")
    for name in ("cudaStreamSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense"):
        yield row(case, name, counts[name] / steps, "per step")  # the event is that of the step before: no waiting


# ---- races of training steps


class Race(NamedTuple):
    """contenders: flags of ours in their names; transformers or torchao; ratios are to the last. halve: the layers,
    where an 80 GB GPU could not hold the models of both. alone: under FSDP, one by one; ratios are to the first."""

    title: str
    model: str
    layers: int
    contenders: tuple[str, ...]
    rows: int = 2
    seq_len: int = 4096
    halve: bool = True
    alone: bool = False
    profiled: bool = False


@cache
def resolved(lab: Lab, flags: str) -> Config:
    words = f"--compile block {flags} {TINY * lab.tiny} {'--compile none' * (not lab.cuda)}".split()
    return resolve(parse_args(words), lab.ranks.device, 1)


NO_MESH, IN_ROOT = "no FSDP", "embedding and lm_head in the root's unit"
DENSE = "flatland, dense, as many FLOPs"  # both of a token's experts as one
COMPILED, EAGER, TORCHAO = "transformers, compiled", "transformers", "torchao tensorwise on our model"
FP8 = tuple(f"--fp8 {recipe}" for recipe in fp8.RECIPES)


def flags_of(lab: Lab, race: Race, name: str) -> str:
    memory = torch.cuda.get_device_properties(lab.ranks.device).total_memory if lab.cuda else math.inf
    layers = race.layers // 2 if race.halve and memory < 100e9 else race.layers
    model = "llama2-7b --n_kv_heads 8 --ffn_dim 28672" if name == DENSE else race.model
    size = f"--n_layers {layers} --seq_len {race.seq_len} --micro_batch {race.rows} --fp8_log_every 0"
    return f"--model {model} {size} {name[name.find('--') :] if '--' in name else ''}"


def theirs(lab: Lab, config: Config, compiled: bool, shared: Contender | None) -> Contender:
    """The same shape in transformers, all in bf16 (parameters and moments, too: ours are fp32), SDPA, clipping, fused
    AdamW."""
    with tempfile.TemporaryDirectory() as folder, torch.device(lab.ranks.device):
        Path(folder, "config.json").write_text(json.dumps(config_json(config.model_config, torch.bfloat16)))
        model, loss_of = peers.transformers(Path(folder), False, torch.bfloat16)
    model = shared.model if shared else model.to(lab.ranks.device)
    optimizer = shared.optimizer if shared else peers.adamw(model)
    batch = Batch(*random_tokens(config.micro_batch, config.seq_len, config.model_config.vocab_size))

    def on_device() -> tuple[Tensor, Tensor]:
        here = batch.to(lab.ranks.device)
        return here.tokens, here.targets

    return peers.their_step(model, loss_of, optimizer, on_device, compiled and not lab.tiny)


def ours(lab: Lab, config: Config, shared: Contender | None = None, mesh=None, own_units: bool = True) -> Contender:
    tokens = random_tokens(config.micro_batch, config.seq_len, config.model_config.vocab_size)
    return peers.our_step(config, lab.ranks, *tokens, shared, mesh, own_units)


def make_contenders(lab: Lab, race: Race) -> Iterator[tuple[str, Contender | None]]:
    """Those of the same model share its parameters and optimizer. None: torchao is not installed."""
    shared: dict = {}
    for name in race.contenders:
        config = resolved(lab, flags_of(lab, race, name))
        key = "transformers" if name in (COMPILED, EAGER) else config.model_config
        if key == "transformers":
            contender = theirs(lab, config, name == COMPILED, shared.get(key))
        else:
            contender = ours(lab, config, shared.get(key))
        if name == TORCHAO:
            contender = contender if convert_by_torchao(lab, contender.model) else None
        shared.setdefault(key, contender)
        yield name, contender


def convert_by_torchao(lab: Lab, model: nn.Module) -> bool:
    """The layers that ours converts."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return False
    options = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=not lab.cuda)
    linear = [name for name, m in model.layers.named_modules(prefix="layers") if isinstance(m, nn.Linear)]
    names = {name for name in linear if not {*fp8.SKIP} & {*name.split(".")}}
    convert_to_float8_training(model, config=options, module_filter_fn=lambda module, name: name in names)
    return True


def held(contender: Contender) -> dict[int, int]:
    """Bytes of each of its parameters and moments on the GPU, by address: contenders may share them."""
    states = (t for state in contender.optimizer.state.values() for t in state.values())
    tensors = [shard.local(t.detach()) for t in (*contender.model.parameters(), *states)]
    return {t.data_ptr(): t.nbytes for t in tensors if t.device.type == "cuda"}


def race_rows(lab: Lab, case: str, config: Config, contenders: dict[str, Contender], **rounds: int) -> list[Row]:
    """Tokens/s, MFU (causal) and peak memory, without what the others hold."""
    tokens, flops = config.micro_batch * config.seq_len, flops_per_token(config.model_config, config.seq_len)
    measured = measure(lab, {name: c.step for name, c in contenders.items()}, **rounds)
    own = {name: held(c) for name, c in contenders.items()}
    everything = sum({k: v for part in own.values() for k, v in part.items()}.values())

    def more(name: str, rate: float) -> str:
        memory = (measured[1][name] - everything + sum(own[name].values())) / 2**30 * lab.cuda
        return f"; MFU {rate * flops / PEAK:.1%}; {memory:.1f} GiB"

    return measured_rows(case, "tokens/s", tokens, measured, more)


def gpu_race(lab: Lab, race: Race) -> Iterator[Row]:
    config = resolved(lab, flags_of(lab, race, ""))
    size = f"{config.model_config.n_layers} layers, {race.rows} x {race.seq_len}"
    case, first = f"{race.title}, {size}", None
    if race.alone:
        mesh = shard.make_mesh(0, lab.ranks, offload=True)
        for name in race.contenders:
            on_mesh = None if name == NO_MESH else mesh
            contender = ours(lab, resolved(lab, flags_of(lab, race, name)), None, on_mesh, name != IN_ROOT)
            (result,) = race_rows(lab, f"{case}, one by one", config, {name: contender}, warm=1, rounds=2)
            del contender
            lab.free()
            first = first or result["median"]
            yield result | {"ratio": result["median"] / first}
        return
    contenders = dict(make_contenders(lab, race))
    if None in contenders.values():
        contenders.pop(TORCHAO)
        yield row(case, f"{TORCHAO}: not installed")
    yield from race_rows(lab, case, config, contenders)
    if race.profiled:
        yield from profile_rows(lab, f"H: {case}", contenders["flatland"].step, config.model_config.vocab_size)


# ---- correctness


def check_bound(case: str, error: float, low: float, high: float) -> Row:
    if not low <= error < high:
        raise SystemExit(f"{case}: the error is {error:.2e}, not in [{low:.1e}, {high:.1e}): nothing is measured")
    return row(case, f"allowed {low:.1e} to {high:.1e}", error, "error", error / high)


def relative(value: Tensor, exact: Tensor) -> float:
    exact, value = exact.double().cpu(), value.detach().double().cpu()
    return ((value - exact).norm() / exact.norm()).nan_to_num(nan=math.inf).item()


def gradients(ranks: shard.Ranks, config: Config) -> list[Tensor]:
    """The loss, and every gradient, of the same model and tokens."""
    model = peers.build(config, ranks)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shard.fill(model, random_init(config.model_config, shapes, 0))
    batch = Batch(*random_tokens(config.micro_batch, config.seq_len, config.model_config.vocab_size)).to(ranks.device)
    loss = model(batch.tokens, batch.targets)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def gpu_check(lab: Lab) -> Iterator[Row]:
    flags = "--model tiny-llama --dim 256 --n_layers 4 --ffn_dim 512 --seq_len 256 --micro_batch 2 --clip 0"
    config = replace(resolved(lab, flags), attention="sdpa")
    cpu, results = shard.Ranks(0, 1, torch.device("cpu")), {}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    for dtype in ("bf16", "fp32"):
        results["cpu", dtype] = gradients(cpu, replace(config, dtype=dtype, compile="none"))
        results["gpu", dtype] = gradients(lab.ranks, replace(config, dtype=dtype))
    torch.set_float32_matmul_precision(precision)
    exact = results["cpu", "fp32"]
    worst = {key: max(map(relative, values, exact)) for key, values in results.items()}
    yield check_bound("loss and gradients, fp32, against the CPU's", worst["gpu", "fp32"], 0, 1e-4)
    yield check_bound("the same, bf16; the CPU's own error x 2", worst["gpu", "bf16"], 1e-4, 2 * worst["cpu", "bf16"])
    M, K, N = (256, 512, 384) if lab.tiny else (2048, 4096, 6144)
    for recipe, bounds in ERRORS.items():
        torch.manual_seed(0)
        layer = nn.Linear(K, N, bias=False, dtype=torch.bfloat16, device=lab.ranks.device)
        nn.init.normal_(layer.weight)
        fp8.convert_linears(layer, recipe, small=True)
        if not lab.tiny:
            layer.compile(dynamic=False)
        x, g = (torch.randn(M, n, dtype=torch.bfloat16, device=lab.ranks.device) for n in (K, N))
        y = layer(x.requires_grad_())
        y.backward(g)
        X, W, G = (t.detach().double() for t in (x, layer.weight, g))
        pairs = {"y": (y, X @ W.T), "dx": (x.grad, G @ W), "dw": (layer.weight.grad, G.T @ X)}
        for (name, pair), (low, high) in zip(pairs.items(), bounds, strict=True):
            yield check_bound(f"fp8 {recipe}, {M} x {K} x {N}, {name}", relative(*pair), low, high)


def gpu_tests(lab: Lab) -> Iterator[Row]:
    files = [path for path in ROOT.glob("test_*.py") if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *(["--version"] if lab.tiny else files)]
    limit = min(150.0, max(lab.deadline - time.monotonic(), 10.0))
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
        code, out = done.returncode, done.stdout
    except subprocess.TimeoutExpired as stopped:
        code, out = -1, (stopped.stdout or b"") + f"\nstopped after {limit:.0f} s".encode()
    lines = out.decode(errors="replace").strip().splitlines()
    if code:
        print("\n".join(lines[-60:]), file=sys.stderr)
    yield row("pytest -m gpu", f"{'failed: ' if code else ''}{lines[-1]}")


# ---- matrix products and the loss head


def roof(x: Tensor, w: Tensor, g: Tensor, recipe: str) -> list[Callable[[], Tensor]]:
    """The three products of a layer by torch._scaled_mm alone, of operands that are quantized and laid out already."""
    dim, flip = (None, None) if recipe == "tensor" else (1, 0), fp8.column_major
    rows, columns = dim if recipe != "tensor" else (None, None)
    (xq, sx), (wq, sw) = fp8.quantize(x, fp8.E4M3, rows), fp8.quantize(w, fp8.E4M3, rows)
    gq, sg = fp8.quantize(g, fp8.E5M2 if recipe == "tensor" else fp8.E4M3, rows)
    (wt, swt), (xt, sxt) = fp8.quantize(w, fp8.E4M3, columns), fp8.quantize(x, fp8.E4M3, columns)
    gt, sgt = fp8.quantize(g, gq.dtype, columns)
    products = [(xq, wq.t(), sx, sw.t()), (gq, flip(wt), sg, swt), (gt.t().contiguous(), flip(xt), sgt.t(), sxt)]
    calls = []
    for i, (a, b, sa, sb) in enumerate(products if recipe != "row_gw_hp" else products[:2]):
        scales = {"scale_a": sa.reciprocal(), "scale_b": sb.reciprocal()}
        fast = recipe != "tensor" or i == 0
        calls.append(partial(torch._scaled_mm, a, b, out_dtype=torch.bfloat16, use_fast_accum=fast, **scales))
    return calls if recipe != "row_gw_hp" else [*calls, lambda: g.t() @ x.detach()]


def layer_steps(lab: Lab, shapes: list[tuple[int, int]], tokens: int, recipe: str) -> dict[str, Callable]:
    """Linear layers [N, K], forward and backward: in FP8 with all casts; its products alone; in bf16."""
    with torch.device(lab.ranks.device):
        layers = nn.ModuleList(nn.Linear(K, N, bias=False, dtype=torch.bfloat16) for N, K in shapes)
        xs = [torch.randn(tokens, K, dtype=torch.bfloat16, requires_grad=True) for _, K in shapes]
        gs = [torch.randn(tokens, N, dtype=torch.bfloat16) for N, _ in shapes]
    fp8.convert_linears(layers, recipe, small=True)
    with torch.no_grad():
        three = zip(xs, layers, gs, strict=True)
        calls = [call for x, layer, g in three for call in roof(x, layer.weight, g, recipe)]

    def with_casts(xs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for x, layer in zip(xs, layers, strict=True)]

    def in_bf16(xs: list[Tensor]) -> list[Tensor]:
        return [nn.functional.linear(x, layer.weight) for x, layer in zip(xs, layers, strict=True)]

    def step(run: Callable) -> None:
        torch.autograd.backward(run(xs), gs)
        for t in (*xs, *layers.parameters()):
            t.grad = None

    def alone() -> None:
        for call in calls:
            call()

    compiled = torch.compile(with_casts, dynamic=False, disable=lab.tiny)
    casts = partial(step, compiled)
    return {f"{recipe}, with casts": casts, f"{recipe}, products alone": alone, "bf16": partial(step, in_bf16)}


def gpu_products(lab: Lab, recipes: tuple[str, ...]) -> Iterator[Row]:
    """The linear layers of a block. (In a model the compiler joins casts with what comes before: their share there is
    smaller.)"""
    for name, tokens, recipe in [(m, t, r) for m in BLOCKS for t in (2048, 8192) for r in recipes]:
        c, n = MODELS[name], tokens
        if lab.tiny:
            c, n = replace(c, dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=176), 32
        wide, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        shapes = [(wide + 2 * kv, c.dim), (c.dim, wide), (2 * c.ffn_dim, c.dim), (c.dim, c.ffn_dim)]
        measured = measure(lab, layer_steps(lab, shapes, n, recipe), 1, 3)
        ms = {name: 1e3 * statistics.median(times) for name, times in measured[0].items()}
        casts, alone, _ = ms.values()
        case, flops = f"a block's products, {name}, {tokens} tokens", 6 * n * sum(N * K for N, K in shapes)

        def more(name: str, _, ms=ms, casts=casts, alone=alone) -> str:
            share = f"; casts {1 - alone / casts:.1%} of its time" if ms[name] == casts else ""
            return f"; {ms[name]:.2f} ms{share}"

        yield from measured_rows(case, "TFLOP/s", flops / 1e12, measured, more)
        torch._dynamo.reset()


BLOCKS = ("llama3-8b", "llama3-70b", "llama3.1-405b")


def gpu_head(lab: Lab) -> Iterator[Row]:
    for dtype in (torch.bfloat16, torch.float32):
        yield from head_rows(lab, dtype)
        torch._dynamo.reset()


def head_rows(lab: Lab, dtype: torch.dtype) -> list[Row]:
    """dtype: of the weight; x is bf16."""
    N, D, V = (64, 32, 256) if lab.tiny else (16384, 4096, 128256)
    shape = ModelConfig(vocab_size=V, dim=D, n_layers=1, n_heads=1, ffn_dim=D, max_seq_len=N)
    with torch.device(lab.ranks.device):
        head, targets = LossHead(shape).to(dtype), torch.randint(0, V, (1, N))
        nn.init.normal_(head.weight, std=0.02)
        x = torch.randn(1, N, D, dtype=torch.bfloat16, requires_grad=True)

    def plain() -> Tensor:
        logits = nn.functional.linear(x[0], head.weight.to(x.dtype)).float()
        return nn.functional.cross_entropy(logits, targets[0], reduction="sum")

    def fused() -> Tensor:
        return nn.functional.linear_cross_entropy(x[0], head.weight.to(x.dtype), targets[0], reduction="sum")

    @torch.no_grad()
    def products() -> None:
        w = head.weight.to(x.dtype)
        y = x[0] @ w.T
        _ = y @ w, y.T @ x[0]

    def step(loss: Callable) -> None:
        loss().backward()
        x.grad = head.weight.grad = None

    losses = {
        "flatland": lambda: head(x, targets)[0],
        "compiled F.cross_entropy": torch.compile(plain, disable=lab.tiny),
    }
    if hasattr(nn.functional, "linear_cross_entropy"):
        losses["F.linear_cross_entropy"] = fused
    values = [loss().item() for loss in losses.values()]
    if max(values) - min(values) > 1e-2 * values[0]:  # torch's own sums to bf16
        raise RuntimeError(f"the results differ: {values}")
    rest = x.nbytes + head.weight.nbytes + (torch.cuda.memory_allocated() if lab.cuda else 0)  # with the gradients
    steps = {name: partial(step, loss) for name, loss in losses.items()} | {"its three products alone": products}
    measured = measure(lab, steps, 1, 4)

    def more(name: str, _) -> str:
        beyond = f"; {(measured[1][name] - rest) / 2**30:.2f} GiB beyond gradients" if name in losses else ""
        return f"; {1e3 * statistics.median(measured[0][name]):.2f} ms{beyond}"

    case = f"F: loss head, {N} x {D} x {V}, weight in {str(dtype)[6:]}"
    return measured_rows(case, "TFLOP/s", 6 * N * D * V / 1e12, measured, more)


# ---- the parts

CHECKPOINTING = ("block", "selective", "block --offload_activations", "none")
PREFETCH = ("--prefetch 1", "--prefetch 0", "--prefetch 2", "--reshard never")
A = Race("A: Llama 8B", "llama3-8b", 8, ("flatland", COMPILED, EAGER), profiled=True)
B = Race("B: Llama 8B", "llama3-8b", 8, (*FP8, TORCHAO, "bf16"), halve=False)
RACES = {
    "llama": A,
    "fp8": B,
    "recipe3": Race("B: Llama 2 7B", "llama2-7b", 8, ("flatland --fp8 tensor", "flatland", EAGER)),
    "llama-2048": A._replace(rows=1, seq_len=2048, profiled=False),
    "fp8-2048": B._replace(rows=1, seq_len=2048),
    "checkpointing": Race("Llama 8B", "llama3-8b", 8, tuple(f"--checkpointing {c}" for c in CHECKPOINTING)),
    "mesh": Race("FSDP on one rank: Llama 8B", "llama3-8b", 4, (NO_MESH, *PREFETCH, IN_ROOT), halve=False, alone=True),
    "offload": Race("offload: Llama 8B", "llama3-8b", 2, ("--offload none", "--offload cpu",
                    "--offload cpu --prefetch 0"), halve=False, alone=True),
    "gpt2": Race("C: GPT-2 124M", "gpt2 --vocab_size 50304", 12, ("flatland --compile block",
                 "flatland --compile model", EAGER, COMPILED), 64, 1024, halve=False),
    "experts": Race("E: Mixtral", "mixtral-8x7b", 2, ("flatland", EAGER, DENSE), profiled=True),
}  # fmt: skip
OTHERS = {
    "check": gpu_check,
    "tests": gpu_tests,
    "products": partial(gpu_products, recipes=("tensor",)),
    "head": gpu_head,
    "products-row": partial(gpu_products, recipes=("row", "row_gw_hp")),
}
# Most valuable first; seconds: a guess at what each takes on an H200 whose compiler has nothing cached.
SECONDS = {
    "check": 45, "tests": 150, "llama": 100, "fp8": 100, "recipe3": 70, "products": 70, "llama-2048": 70,
    "fp8-2048": 80, "checkpointing": 80, "head": 25, "mesh": 110, "offload": 70, "gpt2": 110, "experts": 70,
    "products-row": 120,
}  # fmt: skip
PARTS = {
    name: (cost, partial(gpu_race, race=RACES[name]) if name in RACES else OTHERS[name])
    for name, cost in SECONDS.items()
}


def bench_gpu(args: Namespace) -> Iterator[Row]:
    """One GPU: correctness, then training steps and their parts against peers and limits."""
    machine.set_products("bf16")
    lab = Lab(shard.init_ranks(), args.tiny, time.monotonic() + args.seconds)
    if args.tiny:
        yield row("--tiny", "small shapes and few steps under the names of the large ones: the figures say nothing")
    limit, torch._dynamo.config.recompile_limit = torch._dynamo.config.recompile_limit, 64  # contenders share code
    try:
        for name, (cost, part) in PARTS.items():
            left = lab.deadline - time.monotonic()
            if name != "check" and (name not in args.parts or args.check):
                continue
            if left < cost and not args.tiny:
                yield row(name, f"skipped: it takes about {cost} s, {left:.0f} s are left")
                continue
            begin = time.monotonic()
            try:
                yield from part(lab)
            except Exception as error:  # the other parts are worth their time
                traceback.print_exc()
                yield row(name, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            torch._dynamo.reset()
            lab.free()
            print(f"({name}: {time.monotonic() - begin:.0f} s)", file=sys.stderr)
    finally:
        torch._dynamo.config.recompile_limit = limit
        if dist.is_initialized():
            dist.destroy_process_group()
