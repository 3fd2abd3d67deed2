"""One GPU: tests, then training steps and their parts, against peers and limits; what FP8 does to a run's layers.

    python bench/run.py gpu [--parts NAME ...]

Each part is a process of its own (`python bench/gpu.py PART`), which prints its rows as JSON, so that nothing that ends
one part, not even a GPU that no longer answers, ends the next. A part makes what it needs, so that any may be left
out."""

import copy
import gc
import itertools
import json
import math
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lib.errors import ROOT  # first: it finds the Python that has torch

import torch  # isort: skip
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import fp8
import peers
import shard
import train
from common import Row, Turn, guarded, race, row, rows_of, timed
from config import Config, parse_args
from data import make_loader
from generate import sample
from lib import machine
from lib.check import resolve
from log import peak_flops
from model import MODELS, Block, LossHead, ModelConfig, Transformer, flops_per_token
from optim import DTYPES

TINY = (
    "--dim 64 --n_layers 2 --n_heads 4 --n_kv_heads 4 --ffn_dim 176 --vocab_size 256 --seq_len 32 --micro_batch 2"
    " --dtype bf16 --attention sdpa"
)
SMI = "nvidia-smi --query-gpu=power.draw,clocks.sm,temperature.gpu --format=csv,noheader"


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
        more = f"--fp8_log_every 0 {TINY * self.tiny} {'--compile none' * (not self.cuda)}"
        return resolve(parse_args(f"--compile block {flags} {more}".split()), self.ranks.device, 1)

    def race(
        self, case: str, unit: str, amount: float, works: dict[str, Callable], note: Callable = lambda *_: "", steps=10
    ) -> Iterator[Row]:
        """On a GPU three turns of so many steps each, after one that is not measured."""

        def take_turn(work: Callable) -> Turn:
            return timed(work, 1 if self.tiny else steps, self.cuda)

        return race(case, unit, amount, works, 1 if self.tiny else 3, take_turn, note)


def check(lab: Lab) -> Iterator[Row]:
    """The tests of GPUs, which say more on stderr."""
    files = [path for path in ROOT.glob("test_*.py") if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", *(["--version"] if lab.tiny else files)]
    status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode
    yield row("pytest -m gpu", "all", note=f"failed: status {status}" if status else "passed")


# ---- races of training steps


@dataclass(frozen=True)
class Race:
    """contenders: flatland or a peer, with flags of ours, between bars. Those of one model share its parameters and
    optimizer, and take turns of so many steps; alone: one by one, as on a GPU that cannot hold them all."""

    title: str
    flags: str
    contenders: str
    alone: bool = False
    steps: int = 10

    def __call__(self, lab: Lab) -> Iterator[Row]:
        config, first = lab.config(self.flags), None
        small = lab.cuda and torch.cuda.get_device_properties(lab.ranks.device).total_memory < 100e9
        names = self.contenders.split(" | ")
        groups = [[name] for name in names] if self.alone or small else [names]
        for names in groups:
            for result in self.race(lab, config, names):
                if result["median"] and result["unit"] == "tokens/s":
                    first = first or result["median"]
                    result["ratio"] = result["median"] / first
                yield result
            gc.collect()
            torch.cuda.empty_cache()

    def race(self, lab: Lab, config: Config, names: Sequence[str]) -> Iterator[Row]:
        """Tokens/s; MFU (causal) and GiB on the GPU, without what the other contenders hold."""
        case = f"{self.title}, {config.model_config.n_layers} layers, {config.micro_batch} x {config.seq_len}"
        flops, built = flops_per_token(config.model_config, config.seq_len), {}
        peak = peak_flops(lab.ranks.device, torch.bfloat16)[0] if lab.cuda else math.inf

        def step(name: str) -> None:
            if name not in built:  # in the turn that is not measured
                built[name] = self.build(lab, name, built)
            built[name].step()

        def note(name: str, rate: float, turns: list[Turn]) -> str:
            memory = (turns[-1].peak + built[name].state_bytes()) / 2**30
            return f"MFU {rate * flops / peak:.1%}; {memory:.1f} GiB"

        works = {name: partial(step, name) for name in names}
        yield from lab.race(case, "tokens/s", config.micro_batch * config.seq_len, works, note, self.steps)

    def build(self, lab: Lab, name: str, built: dict) -> peers.Contender:
        """built: gets the first contender of each model, too. "FSDP" in a name shards over the one rank that there
        is."""
        words, _, flags = name.partition(" --")
        config = lab.config(f"{self.flags} {'--' * bool(flags)}{flags}")
        kind, device, mesh = words.partition(",")[0], lab.ranks.device, None
        if "FSDP" in words or config.offload == "cpu":
            mesh = shard.make_mesh(0, lab.ranks, offload=True)
        if kind in ("flatland", "torchao"):
            key = "model", config.model_config
            made = peers.our_step(config, lab.ranks, built.get(key) if mesh is None else None, mesh)
            if kind == "torchao":
                peers.convert_by_torchao(made.model, emulate=not lab.cuda)
        else:
            key, compiled = ("model", kind), "compiled" in words and config.compile != "none"
            made = peers.peer_step(kind, config, device, lab.nanogpt, compiled, mesh, built.get(key))
        built.setdefault(key, made)
        return made


# ---- matrix products, the loss head, decoding


def layer_rows(lab: Lab, case: str, shapes: list[tuple[int, int]], tokens: int, recipe: str) -> Iterator[Row]:
    """Linear layers [N, K], forward and backward: in bf16; in FP8 with all casts; its products alone, of operands that
    are quantized and laid out already."""
    flops, calls = 6 * tokens * sum(N * K for N, K in shapes), []
    with torch.device(lab.ranks.device):
        plain = nn.ModuleList(nn.Linear(K, N, bias=False, dtype=torch.bfloat16) for N, K in shapes)
        xs = [torch.randn(tokens, K, dtype=torch.bfloat16, requires_grad=True) for _, K in shapes]
        gs = [torch.randn(tokens, N, dtype=torch.bfloat16) for N, _ in shapes]
    converted = copy.deepcopy(plain)
    fp8.convert_linears(converted, recipe, small=True)

    def forward(layers: nn.ModuleList) -> list[Tensor]:
        return [layer(x) for layer, x in zip(layers, xs, strict=True)]

    def step(forward: Callable, layers: nn.ModuleList) -> None:
        torch.autograd.backward(forward(layers), gs)
        for t in (*xs, *layers.parameters()):
            t.grad = None

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op in (torch.ops.aten._scaled_mm.default, torch.ops.aten.mm.default):
                calls.append(partial(op, *args, **kwargs or {}))
            return op(*args, **kwargs or {})

    with Record():
        step(forward, converted)

    @torch.no_grad()
    def products() -> None:
        for call in calls:
            call()

    steps = {
        "bf16": partial(step, forward, plain),
        "with casts": partial(step, torch.compile(forward, dynamic=False, disable=lab.tiny), converted),
        "products alone": products,
    }
    yield from lab.race(case, "TFLOP/s", flops / 1e12, steps, steps=5)
    torch._dynamo.reset()


def products(lab: Lab) -> Iterator[Row]:
    """The linear layers of a block. (In a model the compiler joins casts with what comes before: their share there is
    smaller.)"""
    n = 32 if lab.tiny else 8192
    for name, recipe in itertools.product(("llama3-8b", "llama3-70b", "llama3.1-405b"), fp8.RECIPES):
        with torch.device("meta"):
            block = Block(MODELS["tiny-llama" if lab.tiny else name])
        shapes = [tuple(m.weight.shape) for m in block.modules() if isinstance(m, nn.Linear)]
        case = f"a block's products, {name}, {n} tokens, {recipe}"
        yield from guarded(case, "all", layer_rows(lab, case, shapes, n, recipe))


def head(lab: Lab) -> Iterator[Row]:
    """The loss head in bf16, forward and backward."""
    N, D, V = (64, 32, 256) if lab.tiny else (16384, 4096, 128256)
    shape = ModelConfig(vocab_size=V, dim=D, n_layers=1, n_heads=1, ffn_dim=D, max_seq_len=N)
    with torch.device(lab.ranks.device):
        ours, targets = LossHead(shape).bfloat16(), torch.randint(0, V, (1, N))
        nn.init.normal_(ours.weight, std=0.02)
        x = torch.randn(1, N, D, dtype=torch.bfloat16, requires_grad=True)
    weight, F, values = ours.weight, nn.functional, {}

    def liger() -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, x[0], targets[0])

    @torch.no_grad()
    def products() -> None:
        y = x[0] @ weight.T
        _ = y @ weight, y.T @ x[0]

    losses = {
        "flatland": lambda: ours(x, targets)[0],
        "F.linear_cross_entropy": lambda: F.linear_cross_entropy(x[0], weight, targets[0], reduction="sum"),
        "Liger": liger,
    }

    def step(name: str) -> None:
        loss = losses[name]()
        values[name] = loss.detach()
        loss.backward()
        x.grad = weight.grad = None

    def note(name: str, rate: float, turns: list[Turn]) -> str:
        if name not in losses:
            return ""
        off = abs((values[name] / values["flatland"]).item() - 1)
        wrong = "" if off < 1e-2 else f"; failed: its loss is off by {off:.1e}"  # torch's own sums to bf16
        return f"{(turns[-1].peak - x.nbytes - weight.nbytes) / 2**30:.2f} GiB beyond gradients{wrong}"

    steps = {name: partial(step, name) for name in losses} | {"its three products alone": products}
    yield from lab.race(f"F: loss head, {N} x {D} x {V}", "TFLOP/s", 6 * N * D * V / 1e12, steps, note)


def decode(lab: Lab) -> Iterator[Row]:
    """Greedy, one prompt of 512 tokens."""
    config = lab.config("--model llama3.1-8b --param_dtype bf16 --seq_len 1024 --compile none")
    model = train.build(config, lab.ranks, None).eval()
    peers.fill(model, config, lab.ranks.device)
    tokens = sample(model, torch.randint(0, 256, (1, 8 if lab.tiny else 512)), 64, temperature=0)
    yield from lab.race("decoding, Llama 8B, bf16, one prompt", "s", 1, {"a token": partial(next, tokens)})


# ---- the parts

LLAMA = "--model llama3-8b --seq_len 4096 --micro_batch 2 --n_layers"
OFFLOAD = "--offload cpu --param_dtype bf16 --state_dtype bf16 --checkpointing block"
PARTS = {
    "check": check,
    "head": head,
    "decode": decode,
    "products": products,
    "llama": Race("A: Llama 8B", f"{LLAMA} 8", "flatland | transformers, compiled | transformers | liger"),
    "fp8": Race(
        "B: Llama 8B",
        f"{LLAMA} 8",
        "flatland | flatland --fp8 tensor | flatland --fp8 row | flatland --fp8 row_gw_hp | torchao",
    ),
    "gpt2-xl": Race(
        "D: GPT-2 1.5B",
        "--model gpt2-xl --vocab_size 50304 --seq_len 1024 --micro_batch 16",
        "flatland | transformers | nanogpt",
        alone=True,
    ),
    "recipe3": Race(
        "B: Llama 2 7B",
        "--model llama2-7b --seq_len 4096 --micro_batch 2 --n_layers 8",
        "flatland | flatland --fp8 tensor | transformers",
    ),
    "gpt2": Race(
        "C: GPT-2 124M",
        "--model gpt2 --vocab_size 50304 --seq_len 1024 --micro_batch 64",
        "flatland | flatland --compile model | nanogpt, compiled | transformers, compiled",
    ),
    "experts": Race(
        "E: Mixtral",
        "--model mixtral-8x7b --seq_len 4096 --micro_batch 2 --n_layers 2",
        "flatland | transformers | flatland --model llama2-7b --n_kv_heads 8 --ffn_dim 28672",
    ),
    "mesh": Race(
        "FSDP on one rank: Llama 8B",
        f"{LLAMA} 4",
        "flatland | flatland, FSDP --prefetch 1 | flatland, FSDP --prefetch 0 | flatland, FSDP --prefetch 2"
        " | flatland, FSDP --reshard never",
        alone=True,
        steps=5,
    ),
    "checkpointing": Race(
        "Llama 8B",
        f"{LLAMA} 8",
        "flatland | flatland --checkpointing selective | flatland --checkpointing block"
        " | flatland --checkpointing block --offload_activations",
    ),
    "offload": Race(
        "G: 405B's blocks",
        f"--model llama3.1-405b --n_layers 2 --vocab_size 16384 --seq_len 4096 --micro_batch 1 {OFFLOAD}",
        "flatland --prefetch 1 | flatland --prefetch 0 | transformers, CPUOffloadPolicy",
        alone=True,
        steps=1,
    ),
}


def bench_gpu(args: Namespace) -> Iterator[Row]:
    """One GPU: tests, then training steps and their parts against peers and limits."""
    deadline = time.monotonic() + args.budget
    if args.tiny:
        yield row("--tiny", "small shapes and few steps under the names of the large ones: the figures say nothing")
    parts = args.parts if args.repeats else ["check"]
    for name in filter(parts.__contains__, PARTS):
        left = deadline - time.monotonic()
        if left < 1:
            yield row("left out", name, note="the budget is spent")
            continue
        spec = {"name": name, "tiny": args.tiny, "nanogpt": args.nanogpt and str(args.nanogpt.resolve())}
        yield from guarded(name, "all", rows_of(__file__, json.dumps(spec), limit=left))


def run_part(spec: dict) -> None:
    """In this process; prints the rows."""
    begin = time.monotonic()
    machine.set_products("bf16")
    torch._dynamo.config.recompile_limit = 64  # contenders share code
    lab = Lab(shard.init_ranks(), spec["tiny"], spec["nanogpt"])
    for result in guarded(spec["name"], "all", PARTS[spec["name"]](lab)):
        print(json.dumps(result), flush=True)
    seconds = time.monotonic() - begin
    print(json.dumps(row("took", spec["name"], seconds, "s in all", note=subprocess.getoutput(SMI))))


# ---- the layers of a run's model


def bench_fp8(args: Namespace) -> Iterator[Row]:
    """Each layer of a run's model in FP8: figures of x, W and g by the names that they have in metrics.jsonl.

    On a GPU the ratio is its speed-up over bf16."""
    lab, saved = Lab(shard.Ranks(0, 1, machine.find_device(1))), checkpoint.newest(args.run)
    config, device = saved.config, lab.ranks.device
    model = Transformer(saved.model_config, DTYPES[config.dtype])
    shard.fill_parameters(model, saved.read_weights)
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
        ratio = speed_up(shape[-2:]) if verdict == "fp8" else None
        own = [(key.rpartition("/")[2], value) for key, value in figures.items() if f"/{name}/" in key]
        notes = [f"{key} {value:.3g}" for key, value in own if value is not None]
        notes += [f"LOSES: --fp8_skip {name}"] * bool(ratio and ratio < 1)
        what = f"{recipe}, {tokens} tokens" if verdict == "fp8" else verdict
        yield row(f"{name}, {' x '.join(map(str, shape))}", what, ratio=ratio, note=", ".join(notes))


if __name__ == "__main__":
    run_part(json.loads(sys.argv[1]))
