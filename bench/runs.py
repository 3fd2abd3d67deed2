"""Benchmarks of whole runs of train.py: what each switch brings, how cost grows, whether the loss is that of others.

Seed noise is the range (largest less smallest) of the validation losses of three runs that differ by --seed alone: by
initial weights and the order of the data. What has the same seed has to be nearer to each other than that."""

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import Row, Run, failed, guarded, row, run_python, train_run  # first: it finds the Python that has torch

import numpy as np  # isort: skip
import torch

import plan
from config import Config, parse_args
from data import Batch, make_loader
from lib.check import resolve
from lib.machine import GPUS
from lib.run import GradientGuard
from lib.weights import export_model
from log import memory_gib
from model import Transformer
from optim import learning_rate, make_optimizer
from peers import PEERS, adamw, fill, their_step
from shard import ALONE
from train import build, train_step

PLOTS = Path(__file__).parent
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Variant(NamedTuple):
    flags: str
    processes: int = 1
    env: dict[str, str] | None = None


def train_all(case: str, flags: str, variants: dict[str, Variant]) -> Generator[Row, None, dict[str, Run]]:
    """Trains each in a folder of its own, and yields a row of it -> the runs. Ratios are to the first."""
    runs = {}
    for name, (own, processes, env) in variants.items():
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = run = train_run(Path(folder, "run"), f"{flags} {own}".split(), processes, env)
        first, note = next(iter(runs.values())), f"{run.memory:.2f} GiB"
        if run.loss is not None:
            note += f"; validation loss {run.loss:.4f} ({run.loss - first.loss:+.4f})"
        yield row(case, str(name), run.speed, "tokens/s", run.speed / first.speed, note)
    return runs


def judge(case: str, losses: dict[str, float]) -> Iterator[Row]:
    """The seed noise of the losses whose names say seed, and of the first; a row for each that is further from the
    first than that."""
    first, seeds = next(iter(losses.values())), [loss for name, loss in losses.items() if "seed" in name]
    noise = max(first, *seeds) - min(first, *seeds)
    yield row(case, "seed noise of the validation loss", noise, "nats")
    for name, loss in losses.items():
        if abs(loss - first) > noise:
            yield failed(case, name, f"outside the seed noise: {abs(loss - first) / noise:.2f} times as far")


def draw(name: str, panels: list[tuple[str, str, dict]], columns: int, **axes) -> None:
    """Draws bench/NAME.png. panels: what x is, what y is, {label: (xs, ys)}. axes: scales and limits of all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = len(panels) // columns
    figure = pyplot.figure(figsize=(3.6 * columns, 3.2 * rows), layout="constrained")
    for number, (x, y, lines) in enumerate(panels, 1):
        place = figure.add_subplot(rows, columns, number)
        for label, points in lines.items():
            place.plot(*points, ".-", label=label)
        place.set(xlabel=x, ylabel=y, **axes)
        place.legend(fontsize=7)
        place.grid(alpha=0.3)
    figure.savefig(PLOTS / f"{name}.png", dpi=90)


# ---- switches


def switches(cuda: bool, gpus: int) -> dict[str, Variant]:
    """Each with one switch more than before, as far as this machine has them."""
    plain, fused = ("blocked", "sdpa") if cuda else ("sdpa", "blocked")  # plain products are what is slow on a GPU
    eager, compiled = f"--attention {plain} --compile none --dtype", "--dtype bf16 --compile block --attention"
    variants = {
        "fp32": f"{eager} fp32",
        "fp32, seed 1": f"{eager} fp32 --seed 1",
        "fp32, seed 2": f"{eager} fp32 --seed 2",
        "TF32": f"{eager} tf32",
        "bf16": f"{eager} bf16",
        "+ compile": f"{compiled} {plain}",
        f"+ attention {fused}": f"{compiled} {fused}",
    }
    variants = {name: Variant(flags) for name, flags in variants.items() if cuda or name != "TF32"}
    last = variants[f"+ attention {fused}"]
    if cuda:
        return variants | ({"+ 2 processes": last._replace(processes=2)} if gpus > 1 else {})
    alone = last._replace(env=ONE_THREAD)  # what a process has when two share the machine
    return variants | {"the same on one thread": alone, "+ 2 processes of one thread": alone._replace(processes=2)}


def bench_switches(args: Namespace) -> Iterator[Row]:
    """The byte GPT of recipes/char-gpt.args with one switch after the other: tokens/s, validation loss, memory."""
    cuda = torch.cuda.is_available()
    steps, tokens = args.steps or (1000 if cuda else 30), 16384 if cuda else 2048
    flags = f"@recipes/char-gpt.args --batch_tokens {tokens} --steps {steps} --warmup_steps 0.1 --eval_batches 10"
    flags += f" --log_every {max(1, steps // 5)} --eval_every {steps} --sample_every {max(1, steps // 2)}"
    flags += "" if cuda else " --lr 3e-4"  # 1e-3, an eighth of the batch and a few steps of warm-up: losses jump
    case = f"{tokens} tokens a step, {steps} steps"
    runs = yield from train_all(case, flags, switches(cuda, torch.cuda.device_count()))
    yield from judge(case, {name: run.loss for name, run in runs.items()})


# ---- growth

GROWTH = (
    "--model tiny-llama --dim 128 --n_layers 2 --n_heads 2 --n_kv_heads 2 --ffn_dim 384 --compile none --attention sdpa"
    " --tokenizer bytes --seq_len 256 --micro_batch 16 --steps 5 --log_every 1 --eval_every 0"
)
AXES = {  # axis: values, flags by the value and by the rows that make 32,768 tokens; else 16 rows of 256 tokens
    "sequence length": ((256, 1024, 4096, 16384, 32768), "--seq_len {} --micro_batch {}"),
    "rows per step": ((4, 16, 32, 64, 128), "--micro_batch {}"),
    "vocabulary": ((258, 4096, 16384, 32768, 65536), "--vocab_size {}"),
    "layers": ((2, 4, 8, 16, 32), "--n_layers {}"),
    "processes": ((1, 2, 4, 8), "--micro_batch 0 --batch_tokens 16384"),
}


def bench_growth(args: Namespace) -> Iterator[Row]:
    """Time and memory against sequence length, batch, vocabulary, layers and processes; draws growth.png."""
    cuda, speed, memory = torch.cuda.is_available(), [], []
    most = torch.cuda.device_count() if cuda else 2 * (os.cpu_count() or 1)
    for axis, (values, flags) in AXES.items():
        variants = {n: Variant(flags.format(n, 32768 // n)) for n in values}
        if axis == "processes":
            variants = {n: Variant(flags, n, None if cuda else ONE_THREAD) for n in values if n <= most}
        runs = yield from train_all(axis, f"{GROWTH} --dtype {'bf16' if cuda else 'fp32'}", variants)
        speed.append((axis, "tokens per second", {axis: ([*runs], [run.speed for run in runs.values()])}))
        memory.append((axis, "peak GiB of a process", {axis: ([*runs], [run.memory for run in runs.values()])}))
    draw("growth", speed + memory, len(AXES), xscale="log", ylim=(0, None))


# ---- reference

REFERENCE = (
    "--model tiny-gpt2 --dim 128 --n_layers 4 --n_heads 4 --ffn_dim 512 --seq_len 128 --micro_batch 16 --lr 2e-3"
    " --min_lr 2e-4 --warmup_steps 20 --eval_batches 20 --attention sdpa --compile none --dtype fp32"
)


def bench_reference(args: Namespace) -> Iterator[Row]:
    """The same weights, batches and settings in flatland, transformers and nanoGPT: validation losses at the end."""
    steps = args.steps or 200
    case, flags = f"GPT-2, 4 layers of 128, {steps} steps", f"{REFERENCE} --steps {steps} --eval_every {steps}"
    variants = {"fp32": "", "fp32, seed 1": "--seed 1", "fp32, seed 2": "--seed 2", "bf16": "--dtype bf16"}
    runs = yield from train_all(case, flags, {name: Variant(own) for name, own in variants.items()})
    losses = {name: run.loss for name, run in runs.items()}

    def measure(peer: str) -> Iterator[Row]:
        with tempfile.TemporaryDirectory() as folder:
            losses[peer] = train_peer(parse_args(flags.split()), Path(folder), peer, args.nanogpt)
        yield row(case, peer, losses[peer], "nats", note=f"{losses[peer] - losses['fp32']:+.5f}")

    for peer in ("transformers", "nanogpt"):
        yield from guarded(case, peer, measure(peer))
    yield from judge(case, losses)


def train_peer(config: Config, folder: Path, peer: str, checkout: Path | None = None) -> float:
    """Our first weights, batches and learning rates; their model, torch's AdamW and clipping -> the validation loss at
    the end."""
    initial = Transformer(config.model_config)
    fill(initial, config, torch.device("cpu"))
    export_model(initial, folder / peer)
    model, loss_of = PEERS[peer](folder / peer, True, checkout=checkout)
    optimizer = adamw(model, config.lr, (config.beta1, config.beta2), config.weight_decay)
    batches = ((batch.tokens, batch.targets) for (batch,) in make_loader(config))
    train = their_step(model, loss_of, optimizer, partial(next, batches)).step
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        train()
    with torch.no_grad():  # all batches have as many tokens
        return float(np.mean([loss_of(model, b.tokens, b.targets).item() for (b,) in make_loader(config, split="val")]))


# ---- FP8

PARITY = (
    "--model tiny-llama --dim 128 --n_layers 4 --n_heads 4 --n_kv_heads 2 --ffn_dim 384 --seq_len 128 --micro_batch 8"
    " --lr 6e-3 --schedule linear --warmup_steps 0.1 --dtype bf16 --compile none --log_every 5 --eval_every 100"
    " --eval_batches 40"
)
RECIPES = {
    "bf16": "",
    "tensor": "--fp8 tensor",
    "tensor, e4m3 gradients": "--fp8 tensor --fp8_grad_dtype e4m3",
    "row": "--fp8 row",
    "row_gw_hp": "--fp8 row_gw_hp",
    "bf16, another seed": "--seed 1",
}


def bench_fp8_parity(args: Namespace) -> Iterator[Row]:
    """A small Llama in bf16, with two seeds, and in each FP8 recipe: losses at the end; draws fp8-parity.png."""
    case, flags = f"{args.steps or 300} steps", f"{PARITY} --steps {args.steps or 300}"
    runs = yield from train_all(case, flags, {name: Variant(own) for name, own in RECIPES.items()})
    lines, less = {}, {}
    for name, run in runs.items():
        steps, losses = ([record[key] for record in run.records] for key in ("step", "loss"))
        lines[name] = steps, losses
        less[name] = steps, np.subtract(losses, lines["bf16"][1])
    del less["bf16, another seed"]  # which has other data
    draw("fp8-parity", [("step", "loss (nats per token)", lines), ("step", "less bf16's on the same data", less)], 1)


# ---- the plan

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"} | ONE_THREAD  # freed blocks
SCALED = ("llama2-7b", "llama3-8b", "llama2-70b", "mixtral-8x7b", "llama3.1-405b")  # recipes
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # of 8 H100
# Runs drawn at random: flags in columns, and others after them.
DRAWN = """
model dim n_heads n_kv_heads ffn_dim n_layers vocab_size micro_batch seq_len dtype param_dtype state_dtype checkpointing
tiny-mixtral  320 5 5 1280 8 32000 4 64  bf16 bf16 fp32 selective --batch_tokens 512
tiny-llama3.2 192 3 1 576  2 32000 4 64  fp32 bf16 bf16 block
tiny-llama3.2 320 5 5 1280 8 32000 2 128 bf16 fp32 fp32 block
tiny-mixtral  128 2 1 384  7 8000  8 256 fp32 fp32 fp32 none      --batch_tokens 4096
tiny-mixtral  128 2 2 128  4 32000 4 64  bf16 fp32 bf16 block     --batch_tokens 512
tiny-llama3.2 320 5 1 960  3 8000  8 64  fp32 fp32 bf16 none      --documents separate
tiny-gpt2     128 2 2 128  8 512   2 256 bf16 bf16 fp32 none      --batch_tokens 1024
tiny-mixtral  384 6 6 1152 2 8000  8 128 fp32 bf16 bf16 selective --batch_tokens 2048
tiny-llama    128 2 2 256  4 512   4 256 bf16 bf16 fp32 none
tiny-llama    192 3 1 384  6 512   1 64  fp32 bf16 fp32 block     --update_in_backward --clip 0
tiny-gpt2     128 2 2 256  7 512   1 256 bf16 fp32 fp32 none
tiny-mixtral  384 6 1 384  7 512   4 64  bf16 bf16 fp32 selective
tiny-mixtral  128 2 2 256  4 32000 1 256 bf16 fp32 fp32 selective
tiny-llama    192 3 3 384  2 512   4 128 bf16 bf16 bf16 selective --documents separate
tiny-llama3.2 192 3 1 576  7 8000  1 256 bf16 fp32 fp32 none      --documents separate
tiny-llama3.2 384 6 6 768  7 32000 4 128 bf16 bf16 fp32 selective
tiny-llama    256 4 4 1024 5 512   2 64  bf16 fp32 bf16 block     --documents separate
tiny-gpt2     192 3 3 384  5 8000  1 128 bf16 fp32 fp32 block     --documents separate
tiny-llama3.2 256 4 1 256  8 8000  1 128 fp32 fp32 bf16 block     --documents separate
tiny-llama3.2 128 2 1 128  3 32000 1 64  fp32 bf16 bf16 none      --batch_tokens 128
"""


def bench_plan(args: Namespace) -> Iterator[Row]:
    """plan.py: the peak memory of random runs on a CPU; how the recipes scale to 16,384 GPUs, drawn in scaling.png."""
    errors, case, cpu = [], "peak memory", torch.device("cpu")
    names, *lines = (line.split() for line in DRAWN.strip().splitlines())
    for words in lines:
        columns = [f"--{name} {value}" for name, value in zip(names, words, strict=False)]
        flags = " ".join(["--compile none", *columns, *words[len(names) :]]).split()
        config = resolve(parse_args(flags), cpu, 1)
        predicted = plan.step_figures(config, plan.cluster_here(cpu, 1))["mem_gib"]
        measured = float(run_python(Path(__file__), *flags, env=GIVES_BACK))
        errors.append(abs(predicted / measured - 1))
        yield row(case, " ".join(words), predicted, "GiB", predicted / measured, f"{measured:.3f} GiB measured")
    median, worst = float(np.median(errors)), max(errors)
    verdict = "failed: " * (median > 0.05 or worst > 0.12)
    yield row(case, "error", median, "", note=f"{verdict}median {median:.1%}, worst {worst:.1%}; 5 % and 12 % allowed")
    memory, speed = {}, {}
    for recipe in SCALED:
        gpus, *lines = zip(*(scaled(recipe, nodes) for nodes in NODES), strict=True)
        memory[recipe], speed[recipe] = ((gpus, line) for line in lines)
        for n, gib, rate in zip(gpus, *lines, strict=True):
            yield row(recipe, f"{n} GPUs", rate, "tokens/s per GPU", note=f"{gib:.1f} GiB")
    x = "GPUs (H100, 8 a node)"
    draw("scaling", [(x, "GiB per GPU", memory), (x, "tokens/s per GPU", speed)], 2, xscale="log", yscale="log")


def train_two_steps(words: list[str]) -> None:
    """Two steps of random tokens by train.py's own functions; prints this process's peak memory in GiB."""
    config = resolve(parse_args(words), ALONE.device, 1)
    model = build(config, ALONE, None)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0, 0.02)
    optimizer = make_optimizer(model, config)
    gradients = GradientGuard(model, config, ALONE, None, optimizer=optimizer)
    tokens = torch.randint(config.model_config.vocab_size, (config.micro_batch, config.seq_len))
    positions = torch.arange(config.seq_len) % 50 if config.documents == "separate" else None
    batch = Batch(tokens, tokens, None if positions is None else positions.expand_as(tokens))
    batches = [batch] * (config.batch_tokens // tokens.numel())
    for _ in range(2):
        train_step(model, optimizer, batches, 1e-3, gradients, SimpleNamespace(refresh=int), ALONE.device)
    print(memory_gib(ALONE.device))


def scaled(recipe: str, nodes: int) -> tuple[int, float, float]:
    """-> GPUs; GiB and tokens/s of each, with one micro-batch a step"""
    cluster = plan.Cluster(nodes, 8, GPUS["h100-80"])
    config = parse_args([f"@recipes/{recipe}.args", "--weights=", "--load=direct", "--batch_tokens=0"])
    made = plan.predict(plan.settle(config, cluster), cluster)
    speed = made.config.batch_tokens / made.seconds / cluster.ranks
    return cluster.ranks, sum(made.gpu.values()) / 2**30, speed


if __name__ == "__main__":
    train_two_steps(sys.argv[1:])
