"""One GPU: correctness, then training steps and their parts, against peers and limits; what FP8 does to a run's layers.

    python bench/run.py gpu [--parts NAME ...]

A part makes what it needs and frees it, so that any may be left out."""

import gc
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from errors import ROOT  # first: it finds the Python that has torch

import torch  # isort: skip
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import fp8
import machine
import peers
import shard
import train
from check import first_values, resolve
from common import Row, Wrong, race, row, speed_rows, timed
from config import Config, parse_args
from data import make_loader
from log import PEAKS
from model import MODELS, LossHead, ModelConfig, Transformer, flops_per_token
from optim import DTYPES
from peers import Contender
from profiler import analyse, make_profile, read_trace
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
    tiny: bool = False
    deadline: float = math.inf

    @property
    def cuda(self) -> bool:
        return self.ranks.device.type == "cuda"


# ---- measuring

FIELDS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
SMI = f"timeout 10 nvidia-smi --query-gpu={FIELDS} --format=csv,noheader 2> /dev/null"


def measure(
    lab: Lab, case: str, unit: str, amount: float, steps: dict[str, Callable],
    note: Callable[[str, float, int], str] = lambda *_: "", warm: int = 2, rounds: int = 6,
) -> list[Row]:  # fmt: skip
    """Rounds of 5 steps of each in turn, `warm` of them unmeasured -> a row each, with what nvidia-smi said meanwhile;
    ratios to the last. note(name, amount per second, peak bytes): what to add to a name."""
    counters, length = torch._dynamo.utils.counters["stats"], 1 if lab.tiny else 5
    contenders = {name: partial(timed, step, length, lab.cuda) for name, step in steps.items()}
    race(contenders, 1 if lab.tiny else warm)
    graphs, smi = counters["unique_graphs"], subprocess.Popen(SMI, shell=True, stdout=subprocess.PIPE, text=True)
    turns = race(contenders, 2 if lab.tiny else rounds, lab.deadline)
    state, graphs = smi.communicate()[0].strip(), counters["unique_graphs"] - graphs
    rows = speed_rows(case, unit, amount, turns)
    for result, (name, several) in zip(rows, turns.items(), strict=True):
        result["what"] += note(name, result["median"], several[-1].peak)
        result["what"] += f"; {graphs} graphs compiled meanwhile" * (graphs > 0)
        result |= {"steps": sum(len(turn.seconds) for turn in several), "gpu": state}
    return rows


def profile_rows(lab: Lab, case: str, step: Callable, vocab: int) -> Iterator[Row]:
    """Where the time of a step goes, as `--profile` tells it, and what the host waits for."""
    with tempfile.TemporaryDirectory() as folder:
        path, steps = Path(folder, "trace.json.gz"), 1 if lab.tiny else 3
        with make_profile(steps, lab.cuda, path) as record:
            for _ in range(1 + steps):
                step()
                if lab.cuda:
                    torch.cuda.synchronize()
                record.step()
        events = read_trace(path)
    spent, names, _ = analyse(events, vocab)
    for kind, seconds in spent.items():
        longest = "".join(f": {name[:120]}" for name, _ in names[kind].most_common(1))
        yield row(case, kind + longest, 100 * seconds / sum(spent.values()), "% of a step")
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


NO_MESH, IN_ROOT = "no FSDP", "embedding and lm_head in the root's unit"
DENSE = "flatland, dense, as many FLOPs"  # both of a token's experts as one
COMPILED, EAGER, TORCHAO = "transformers, compiled", "transformers", "torchao tensorwise on our model"


@cache
def resolved(lab: Lab, flags: str) -> Config:
    words = f"--compile block {flags} {TINY * lab.tiny} {'--compile none' * (not lab.cuda)}".split()
    return resolve(parse_args(words), lab.ranks.device, 1)


def config_of(lab: Lab, race: Race, name: str) -> Config:
    memory = torch.cuda.get_device_properties(lab.ranks.device).total_memory if lab.cuda else math.inf
    layers = race.layers // 2 if race.halve and memory < 100e9 else race.layers
    model = "llama2-7b --n_kv_heads 8 --ffn_dim 28672" if name == DENSE else race.model
    size = f"--n_layers {layers} --seq_len {race.seq_len} --micro_batch {race.rows} --fp8_log_every 0"
    return resolved(lab, f"--model {model} {size} {name[name.find('--') :] if '--' in name else ''}")


def theirs(lab: Lab, config: Config, compiled: bool, shared: Contender | None) -> Contender:
    """The same shape in transformers, all in bf16 (parameters and moments, too: ours are fp32), SDPA, clipping, fused
    AdamW."""
    with tempfile.TemporaryDirectory() as folder, torch.device(lab.ranks.device):
        Path(folder, "config.json").write_text(json.dumps(config_json(config.model_config, torch.bfloat16)))
        model, loss_of = peers.transformers(Path(folder), False, torch.bfloat16)
    model = shared.model if shared else model.to(lab.ranks.device)
    optimizer = shared.optimizer if shared else peers.adamw(model)
    batch = peers.batch_of(config).to(lab.ranks.device)
    tokens = batch.tokens, batch.targets
    return peers.their_step(model, loss_of, optimizer, lambda: tokens, compiled and not lab.tiny)


def make_contenders(lab: Lab, race: Race) -> dict[str, Contender]:
    """Those of the same model share its parameters and optimizer."""
    shared, contenders = {}, {}
    for name in race.contenders:
        config = config_of(lab, race, name)
        if name in (COMPILED, EAGER):
            contender = theirs(lab, config, name == COMPILED, shared.get(EAGER))
            shared.setdefault(EAGER, contender)
        else:
            contender = peers.our_step(config, lab.ranks, shared.get(config.model_config))
            shared.setdefault(config.model_config, contender)
        if name != TORCHAO or convert_by_torchao(lab, contender.model):
            contenders[name] = contender
    return contenders


def convert_by_torchao(lab: Lab, model: nn.Module) -> bool:
    """Converts the layers that ours does -> False: it is not installed."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return False
    options = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=not lab.cuda)
    names = {f"layers.{n}" for n, m in model.layers.named_modules() if isinstance(m, nn.Linear)}
    names = {name for name in names if not {*fp8.SKIP} & {*name.split(".")}}
    convert_to_float8_training(model, config=options, module_filter_fn=lambda module, name: name in names)
    return True


def held(contender: Contender) -> dict[int, int]:
    """Bytes of each of its parameters and moments on the GPU, by address: contenders may share them."""
    moments = (t for state in contender.optimizer.state.values() for t in state.values())
    tensors = [shard.local(t.detach()) for t in (*contender.model.parameters(), *moments)]
    return {t.data_ptr(): t.nbytes for t in tensors if t.device.type == "cuda"}


def race_rows(lab: Lab, case: str, config: Config, contenders: dict[str, Contender], **rounds: int) -> list[Row]:
    """Tokens/s, MFU (causal) and peak memory, without what the others hold."""
    flops = flops_per_token(config.model_config, config.seq_len)

    def note(name: str, rate: float, peak: int) -> str:
        own, everything = held(contenders[name]), {}
        for contender in contenders.values():
            everything |= held(contender)
        memory = (peak - sum(everything.values()) + sum(own.values())) / 2**30 * lab.cuda
        return f"; MFU {rate * flops / PEAK:.1%}; {memory:.1f} GiB"

    steps = {name: contender.step for name, contender in contenders.items()}
    return measure(lab, case, "tokens/s", config.micro_batch * config.seq_len, steps, note, **rounds)


def gpu_race(lab: Lab, race: Race) -> Iterator[Row]:
    config = config_of(lab, race, "")
    case = f"{race.title}, {config.model_config.n_layers} layers, {race.rows} x {race.seq_len}"
    if race.alone:
        return (yield from alone_rows(lab, race, f"{case}, one by one"))
    contenders = make_contenders(lab, race)
    for name in race.contenders:
        if name not in contenders:
            yield row(case, f"{name}: not installed")
    yield from race_rows(lab, case, config, contenders)
    if race.profiled:
        yield from profile_rows(lab, f"H: {case}", contenders["flatland"].step, config.model_config.vocab_size)


def alone_rows(lab: Lab, race: Race, case: str) -> Iterator[Row]:
    mesh, first = shard.make_mesh(0, lab.ranks, offload=True), None
    for name in race.contenders:
        config, on_mesh = config_of(lab, race, name), None if name == NO_MESH else mesh
        contender = peers.our_step(config, lab.ranks, None, on_mesh, name != IN_ROOT)
        (result,) = race_rows(lab, case, config, {name: contender}, warm=1, rounds=2)
        del contender
        free(lab)
        first = first or result["median"]
        yield result | {"ratio": result["median"] / first}
    dist.destroy_process_group()


def free(lab: Lab) -> None:
    gc.collect()
    if lab.cuda:
        torch.cuda.empty_cache()


# ---- correctness


def check_bound(case: str, error: float, low: float, high: float) -> Row:
    if not low <= error < high:
        raise Wrong(f"{case}: the error is {error:.2e}, not in [{low:.1e}, {high:.1e}): nothing is measured")
    return row(case, f"allowed {low:.1e} to {high:.1e}", error, "error", error / high)


def relative(value: Tensor, exact: Tensor) -> float:
    exact, value = exact.double().cpu(), value.detach().double().cpu()
    return ((value - exact).norm() / exact.norm()).nan_to_num(nan=math.inf).item()


def gradients(ranks: shard.Ranks, config: Config) -> list[Tensor]:
    """The loss, and every gradient, of the same model and tokens."""
    model = train.build(config, ranks, None)
    shard.fill(model, *first_values(config, model, None))
    batch = peers.batch_of(config).to(ranks.device)
    loss = model(batch.tokens, batch.targets)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def gpu_check(lab: Lab) -> Iterator[Row]:
    """The loss and gradients of a small model, and the products of a layer in FP8, against the CPU."""
    flags = "--model tiny-llama --dim 256 --n_layers 4 --ffn_dim 512 --seq_len 256 --micro_batch 2 --clip 0"
    config, cpu = replace(resolved(lab, flags), attention="sdpa"), shard.Ranks(0, 1, torch.device("cpu"))
    precision, results = torch.get_float32_matmul_precision(), {}
    torch.set_float32_matmul_precision("highest")
    for dtype in ("bf16", "fp32"):
        results["cpu", dtype] = gradients(cpu, replace(config, dtype=dtype, compile="none"))
        results["gpu", dtype] = gradients(lab.ranks, replace(config, dtype=dtype))
    torch.set_float32_matmul_precision(precision)
    worst = {key: max(map(relative, values, results["cpu", "fp32"])) for key, values in results.items()}
    yield check_bound("loss and gradients, fp32, against the CPU's", worst["gpu", "fp32"], 0, 1e-4)
    yield check_bound("the same, bf16; the CPU's own error x 2", worst["gpu", "bf16"], 1e-4, 2 * worst["cpu", "bf16"])
    M, K, N = (256, 512, 384) if lab.tiny else (2048, 4096, 6144)
    for recipe, bounds in ERRORS.items():
        torch.manual_seed(0)
        layer = Layers(lab, [(N, K)], M, recipe)
        weight, (x,), (g,) = layer.modules[0].weight, layer.xs, layer.gs
        nn.init.normal_(weight)
        y = layer.forward()[0]
        y.backward(g)
        X, W, G = (t.detach().double() for t in (x, weight, g))
        pairs = {"y": (y, X @ W.T), "dx": (x.grad, G @ W), "dw": (weight.grad, G.T @ X)}
        for (name, pair), (low, high) in zip(pairs.items(), bounds, strict=True):
            yield check_bound(f"fp8 {recipe}, {M} x {K} x {N}, {name}", relative(*pair), low, high)


def gpu_tests(lab: Lab) -> Iterator[Row]:
    files = [path for path in ROOT.glob("test_*.py") if "mark.gpu" in path.read_text()]
    limit = f"{min(150.0, max(lab.deadline - time.monotonic(), 10.0)):.0f}"
    command = ["timeout", limit, sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    command += ["--version"] if lab.tiny else files
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [*done.stdout.splitlines(), *[f"stopped after {limit} s"] * (done.returncode == 124)]
    if done.returncode:
        print("\n".join(lines[-60:]), file=sys.stderr)
    yield row("pytest -m gpu", f"{'failed: ' if done.returncode else ''}{lines[-1]}")


# ---- matrix products and the loss head


class Layers:
    """Linear layers [N, K] in FP8 and the operands of a step: x and the gradient of y for each."""

    def __init__(self, lab: Lab, shapes: list[tuple[int, int]], tokens: int, recipe: str):
        with torch.device(lab.ranks.device):
            self.modules = nn.ModuleList(nn.Linear(K, N, bias=False, dtype=torch.bfloat16) for N, K in shapes)
            self.xs = [torch.randn(tokens, K, dtype=torch.bfloat16, requires_grad=True) for _, K in shapes]
            self.gs = [torch.randn(tokens, N, dtype=torch.bfloat16) for N, _ in shapes]
        fp8.convert_linears(self.modules, recipe, small=True)
        self.forward = torch.compile(self._forward, dynamic=False, disable=lab.tiny)

    def _forward(self) -> list[Tensor]:
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
            self.step(self._forward)
        assert len(calls) == 3 * len(self.xs), f"{len(calls)} products of {len(self.xs)} layers"
        return calls


def layer_rows(lab: Lab, case: str, shapes: list[tuple[int, int]], tokens: int, recipe: str) -> list[Row]:
    """Forward and backward: in FP8 with all casts; its products alone; in bf16."""
    layers, flops = Layers(lab, shapes, tokens, recipe), 6 * tokens * sum(N * K for N, K in shapes)
    calls = layers.products()

    @torch.no_grad()
    def products() -> None:
        for call in calls:
            call()

    steps = {
        f"{recipe}, with casts": partial(layers.step, layers.forward),
        f"{recipe}, products alone": products,
        "bf16": partial(layers.step, layers.in_bf16),
    }
    rows = measure(lab, case, "TFLOP/s", flops / 1e12, steps, in_ms(flops), 1, 3)
    rows[0]["what"] += f"; casts {1 - rows[0]['median'] / rows[1]['median']:.1%} of its time"
    torch._dynamo.reset()
    return rows


def in_ms(flops: int) -> Callable[[str, float, int], str]:
    return lambda name, rate, peak: f"; {1e3 * flops / 1e12 / rate:.2f} ms"


def gpu_products(lab: Lab, recipes: tuple[str, ...]) -> Iterator[Row]:
    """The linear layers of a block. (In a model the compiler joins casts with what comes before: their share there is
    smaller.)"""
    for name, tokens, recipe in itertools.product(BLOCKS, (2048, 8192), recipes):
        c, n = MODELS[name], tokens
        if lab.tiny:
            c, n = replace(c, dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=176), 32
        wide, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        shapes = [(wide + 2 * kv, c.dim), (c.dim, wide), (2 * c.ffn_dim, c.dim), (c.dim, c.ffn_dim)]
        yield from layer_rows(lab, f"a block's products, {name}, {tokens} tokens", shapes, n, recipe)


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
    F = nn.functional

    def plain() -> Tensor:
        logits = F.linear(x[0], head.weight.to(x.dtype)).float()
        return F.cross_entropy(logits, targets[0], reduction="sum")

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
    fused = getattr(F, "linear_cross_entropy", None)  # of torch 2.13
    if fused:
        losses["F.linear_cross_entropy"] = lambda: fused(x[0], head.weight.to(x.dtype), targets[0], reduction="sum")
    values = [loss().item() for loss in losses.values()]
    if max(values) - min(values) > 1e-2 * values[0]:  # torch's own sums to bf16
        raise RuntimeError(f"the results differ: {values}")
    rest = x.nbytes + head.weight.nbytes + (torch.cuda.memory_allocated() if lab.cuda else 0)  # with the gradients
    steps = {name: partial(step, loss) for name, loss in losses.items()} | {"its three products alone": products}

    def note(name: str, rate: float, peak: int) -> str:
        beyond = f"; {(peak - rest) / 2**30:.2f} GiB beyond gradients" if name in losses else ""
        return beyond + in_ms(6 * N * D * V)(name, rate, peak)

    case = f"F: loss head, {N} x {D} x {V}, weight in {str(dtype)[6:]}"
    return measure(lab, case, "TFLOP/s", 6 * N * D * V / 1e12, steps, note, 1, 4)


# ---- the parts

MODES = ("block", "selective", "block --offload_activations", "none")
CHECKPOINTING = tuple(f"--checkpointing {mode}" for mode in MODES)
PREFETCH = ("--prefetch 1", "--prefetch 0", "--prefetch 2", "--reshard never")
OFFLOAD = ("--offload none", "--offload cpu", "--offload cpu --prefetch 0")
A = Race("A: Llama 8B", "llama3-8b", 8, ("flatland", COMPILED, EAGER), profiled=True)
B = Race("B: Llama 8B", "llama3-8b", 8, (*(f"--fp8 {r}" for r in fp8.RECIPES), TORCHAO, "bf16"), halve=False)
MESH = Race("FSDP on one rank: Llama 8B", "llama3-8b", 4, (NO_MESH, *PREFETCH, IN_ROOT), halve=False, alone=True)
GPT2 = ("flatland --compile block", "flatland --compile model", EAGER, COMPILED)
# Most valuable first; seconds: a guess at what each takes on an H200 whose compiler has nothing cached.
PARTS = {
    "check": (45, gpu_check),
    "tests": (150, gpu_tests),
    "llama": (100, A),
    "fp8": (100, B),
    "recipe3": (70, Race("B: Llama 2 7B", "llama2-7b", 8, ("flatland --fp8 tensor", "flatland", EAGER))),
    "products": (70, partial(gpu_products, recipes=("tensor",))),
    "llama-2048": (70, A._replace(rows=1, seq_len=2048, profiled=False)),
    "fp8-2048": (80, B._replace(rows=1, seq_len=2048)),
    "checkpointing": (80, Race("Llama 8B", "llama3-8b", 8, CHECKPOINTING)),
    "head": (25, gpu_head),
    "mesh": (110, MESH),
    "offload": (70, MESH._replace(title="offload: Llama 8B", layers=2, contenders=OFFLOAD)),
    "gpt2": (110, Race("C: GPT-2 124M", "gpt2 --vocab_size 50304", 12, GPT2, 64, 1024, halve=False)),
    "experts": (70, Race("E: Mixtral", "mixtral-8x7b", 2, ("flatland", EAGER, DENSE), profiled=True)),
    "products-row": (120, partial(gpu_products, recipes=("row", "row_gw_hp"))),
}  # fmt: skip


def bench_gpu(args: Namespace) -> Iterator[Row]:
    """One GPU: correctness, then training steps and their parts against peers and limits."""
    machine.set_products("bf16")
    lab = Lab(shard.init_ranks(), args.tiny, time.monotonic() + args.seconds)
    if args.tiny:
        yield row("--tiny", "small shapes and few steps under the names of the large ones: the figures say nothing")
    torch._dynamo.config.recompile_limit = 64  # contenders share code
    for name, (cost, part) in PARTS.items():
        if name == "check" or (name in args.parts and args.repeats):
            yield from run_part(lab, name, cost, part)


def run_part(lab: Lab, name: str, cost: int, part: Race | Callable) -> Iterator[Row]:
    """One that would not end in time is left out; one that fails does not end the others, which are worth their time,
    but for a wrong result."""
    begin = time.monotonic()
    if lab.deadline - begin < cost and not lab.tiny:
        yield row(name, f"skipped: it takes about {cost} s, {lab.deadline - begin:.0f} s are left")
        return
    try:
        yield from gpu_race(lab, part) if isinstance(part, Race) else part(lab)
    except Wrong:
        raise
    except Exception as error:
        traceback.print_exc()
        yield row(name, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    torch._dynamo.reset()
    free(lab)
    print(f"({name}: {time.monotonic() - begin:.0f} s)", file=sys.stderr)


# ---- the layers of a run's model


def bench_fp8(args: Namespace) -> Iterator[Row]:
    """Each layer of a run's model in FP8: amax, saturated and flushed shares (in millionths) and SNR of x, W and g.

    On a GPU the ratio is its speed-up over bf16."""
    lab, saved = Lab(shard.Ranks(0, 1, machine.find_device(1))), checkpoint.newest(args.run)
    config, device = saved.config, lab.ranks.device
    model = Transformer(saved.model_config, DTYPES[config.dtype])
    shard.fill(model, saved.read_weights)
    model.to(device).train()
    recipe = args.recipe or config.fp8.replace("off", "tensor")
    rows = fp8.convert_linears(model, recipe, config.fp8_grad_dtype.replace("auto", "e5m2"), config.fp8_skip, True)
    fp8.watch(model, list(fp8.layers(model)))
    batch = next(iter(make_loader(config)))[0].to(device)
    model(batch.tokens, batch.targets, batch.positions).backward()
    figures, tokens = fp8.watched(model), batch.tokens.numel()
    speed_up = cache(lambda shape: layer_rows(lab, "", [shape], tokens, recipe)[0]["ratio"] if lab.cuda else None)
    for name, shape, verdict in rows:
        case = f"{name}, {' x '.join(map(str, shape))}"
        if verdict != "fp8":
            yield row(case, verdict)
            continue
        parts = [f"recipe {recipe}, {tokens} tokens"]
        for operand in "xwg":
            amax, saturated, flushed, snr = (figures[f"fp8/{name}/{operand}_{f}"] for f in fp8.FIGURES)
            shares = f"saturated {1e6 * saturated:.0f} flushed {1e6 * flushed:.0f}"
            parts.append(f"{operand} amax {amax:.2e} {shares}{'' if snr is None else f' {snr:.1f} dB'}")
        ratio = speed_up(shape)
        parts += [f"LOSES: --fp8_skip {name}"] if ratio and ratio < 1 else []
        yield row(case, "; ".join(parts), ratio=ratio)
