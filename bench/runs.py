"""Benchmarks of whole runs of train.py: what each switch brings, how cost grows, whether the loss is that of others.

Seed noise is the range (largest less smallest) of the validation losses of three runs that differ by --seed alone: by
initial weights and the order of the data. What has the same seed has to be nearer to each other than that."""

import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from common import Row, Run, row, train_run  # first: it finds the Python that has torch

import numpy as np  # isort: skip
import torch

import shard
from config import Config, parse_args
from data import make_loader
from model import Transformer, random_init
from optim import learning_rate
from peers import PEERS, adamw
from weights import export_model

PLOTS = Path(__file__).parent


def judge(loss: float, reference: float, noise: float) -> str:
    """How far a validation loss is from the one that it should be."""
    distance = abs(loss - reference) / noise
    verdict = "" if distance <= 1 else "; failed: outside the seed noise"
    return f"validation loss {loss:.4f} ({loss - reference:+.4f}, {distance:.2f} of the seed noise){verdict}"


def seeds(folder: Path, words: list) -> tuple[list[Run], float]:
    """-> three runs, and the seed noise"""
    runs = [train_run(folder / f"seed-{seed}", [*words, "--seed", seed]) for seed in range(3)]
    losses = [run.loss for run in runs]
    return runs, max(losses) - min(losses)


# ---- switches


def switches(cuda: bool, gpus: int) -> list[tuple[str, list[str] | None, int, dict[str, str]]]:
    """(name, flags, processes, environment), each with one switch more than before; flags None: not on this machine."""
    own, fused = ("blocked", "sdpa") if cuda else ("sdpa", "blocked")  # plain products are what is slow on a GPU

    def flags(dtype: str, compiled: str, attention: str) -> list[str]:
        return ["--dtype", dtype, "--compile", compiled, "--attention", attention]

    last = flags("bf16", "block", fused)
    rows = [
        ("fp32", flags("fp32", "none", own), 1, {}),
        ("TF32", flags("tf32", "none", own) if cuda else None, 1, {}),
        ("bf16", flags("bf16", "none", own), 1, {}),
        ("+ compile", flags("bf16", "block", own), 1, {}),
        (f"+ attention {fused}", last, 1, {}),
    ]
    if cuda:
        return [*rows, ("+ 2 processes", last if gpus > 1 else None, 2, {})]
    one = {"OMP_NUM_THREADS": "1"}  # what a process has when two share the machine
    return [*rows, ("the same on one thread", last, 1, one), ("+ 2 processes of one thread", last, 2, one)]


def bench_switches(args: Namespace) -> Iterator[Row]:
    """The byte GPT of recipes/char-gpt.args with one switch after the other: tokens/s, validation loss, memory."""
    cuda = torch.cuda.is_available()
    steps, tokens = args.steps or (1000 if cuda else 30), 16384 if cuda else 2048
    case, rows = f"{tokens} tokens a step, {steps} steps", switches(cuda, torch.cuda.device_count())
    words = ["@recipes/char-gpt.args", "--batch_tokens", tokens, "--steps", steps, "--warmup_steps", 0.1]
    words += ["--log_every", max(1, steps // 5), "--eval_every", steps, "--eval_batches", 10]
    words += ["--sample_every", max(1, steps // 2)]
    words += [] if cuda else ["--lr", 3e-4]  # 1e-3, an eighth of the batch and a few steps of warm-up: losses jump
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        same_seed, noise = seeds(Path(folder), [*words, *rows[4][1]])
        runs[rows[4][0]] = same_seed[0]
        yield row(case, f"seed noise of the validation loss, three seeds of {rows[4][0]}", noise, "nats")
        for name, flags, processes, env in rows:
            if flags is None:
                yield row(case, f"{name}: not on this machine")
                continue
            if name not in runs:
                runs[name] = train_run(Path(folder, name.replace(" ", "-")), [*words, *flags], processes, env)
            this, first = runs[name], runs["fp32"]
            said = f"{name}: {judge(this.loss, first.loss, noise)}, {this.memory:.2f} GiB"
            yield row(case, said, this.speed, "tokens/s", this.speed / first.speed)
        yield from traps(Path(folder), words, runs, rows[-1], cuda)


def traps(folder: Path, words: list, runs: dict[str, Run], last: tuple, cuda: bool) -> Iterator[Row]:
    """What went wrong in the recipe's own runs: time that nobody counted, samples that hung, memory that they kept."""
    name, flags, processes, env = last
    # Of one process: torchrun's own start and end are not in the log.
    alone = {run_name: run for run_name, run in runs.items() if "processes" not in run_name}
    uncounted = {run_name: run.wall - sum(run.parts.values()) for run_name, run in alone.items()}
    worst = max(alone, key=lambda run_name: abs(uncounted[run_name]) / alone[run_name].wall)
    wall, share = alone[worst].wall, uncounted[worst] / alone[worst].wall
    verdict = "" if abs(uncounted[worst]) <= max(0.02 * wall, 0.5) else "; failed: more than 2 % and 0.5 s"
    said = f"wall time less its logged parts, the worst of all ({worst}, {wall:.1f} s){verdict}"
    yield row("traps", said, 100 * share, "%")
    if not flags:
        return
    samples = runs[name].samples
    verdict = "" if samples == 2 else "; failed: 2 were asked for"
    yield row("traps", f"samples written by {processes} processes{verdict}", samples, "samples")
    # What the compiler takes is resident, too, and samples are compiled: on a CPU this is told apart without it.
    short = [*words, *flags, *([] if cuda else ["--compile", "none"]), "--steps", 6, "--eval_every", 0]
    silent, talking = (train_run(folder / f"{n}", [*short, "--sample_every", n], processes, env) for n in (0, 3))
    growth = talking.memory - silent.memory
    verdict = "" if growth <= 0.1 * silent.memory else "; failed: more than 10 %"
    said = f"peak memory of {processes} processes with samples amid training, less that without them{verdict}"
    yield row("traps", said, growth, "GiB", talking.memory / silent.memory)


# ---- growth

SMALL = "--model tiny-llama --dim 128 --n_layers 2 --n_heads 2 --n_kv_heads 2 --ffn_dim 384 --compile none"
SMALL += " --tokenizer bytes"  # for the large vocabularies, too


def axes(cuda: bool) -> dict[str, dict[int, list]]:
    """axis -> flags by its values; what is not the axis' own: 16 rows of 256 tokens."""
    base = [*SMALL.split(), "--dtype", "bf16" if cuda else "fp32", "--attention", "sdpa", "--seq_len", 256]
    base += ["--micro_batch", 16, "--log_every", 1, "--eval_every", 0]
    counts = [n for n in (1, 2, 4, 8) if n <= (torch.cuda.device_count() if cuda else 2 * (os.cpu_count() or 1))]
    lengths = (256, 1024, 4096, 16384, 32768)
    long = {n: [*base, "--steps", 3 if n > 4096 and not cuda else 5] for n in lengths}
    base += ["--steps", 5]
    return {
        "sequence length": {n: [*long[n], "--seq_len", n, "--micro_batch", 32768 // n] for n in lengths},
        "rows per step": {n: [*base, "--micro_batch", n] for n in (4, 16, 32, 64, 128)},
        "vocabulary": {n: [*base, "--vocab_size", n] for n in (258, 4096, 16384, 32768, 65536)},
        "layers": {n: [*base, "--n_layers", n] for n in (2, 4, 8, 16, 32)},
        "processes": {n: [*base, "--micro_batch", 0, "--batch_tokens", 64 * 256] for n in counts},
    }


def fit(x: list[float], y: list[float]) -> tuple[float, float]:
    """Least squares of the relative error: y = a + b x."""
    weights = 1 / np.array(y)
    columns = np.stack([np.ones(len(x)), np.array(x, dtype=float)], 1)
    a, b = np.linalg.lstsq(columns * weights[:, None], np.array(y) * weights, rcond=None)[0]
    return float(a), float(b)


def bench_growth(args: Namespace) -> Iterator[Row]:
    """Time and memory against sequence length, batch, vocabulary, layers and processes; draws growth.png."""
    cuda, points = torch.cuda.is_available(), {}
    for axis, values in axes(cuda).items():
        points[axis] = {}
        for n, words in values.items():
            env = {"OMP_NUM_THREADS": "1"} if axis == "processes" and not cuda else {}
            with tempfile.TemporaryDirectory() as folder:
                run = train_run(Path(folder, "run"), words, n if axis == "processes" else 1, env)
            points[axis][n] = run
            yield row(f"{axis} {n}", f"{run.memory:.2f} GiB", run.speed, "tokens/s")
        if axis == "processes":
            continue
        a, b = fit(list(values), [1e9 / run.speed for run in points[axis].values()])
        yield row(axis, f"time per token = {a:.4g} ns + {b:.4g} ns x", b, "ns")
        in_use = {}  # two points again, with an allocator that gives every freed block back
        for n in list(values)[1:4:2]:
            with tempfile.TemporaryDirectory() as folder:
                env = {"MALLOC_MMAP_THRESHOLD_": "65536"}
                in_use[n] = train_run(Path(folder, "run"), values[n], env=env).memory * 2**20
        yield row(axis, "memory in use, per x", fit(list(in_use), list(in_use.values()))[1], "KiB")
    draw_growth(points, PLOTS / "growth.png")
    yield row("all", "drawn: bench/growth.png")


def draw_growth(points: dict[str, dict[int, Run]], path: Path) -> None:
    figure, panels = subplots(2, len(points), figsize=(3.1 * len(points), 6), sharex="col")
    for (axis, runs), above, below in zip(points.items(), *panels, strict=True):
        above.plot(list(runs), [run.speed for run in runs.values()], "o-")
        below.plot(list(runs), [run.memory for run in runs.values()], "o-")
        below.set_xlabel(axis)
        for panel in (above, below):
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("tokens per second")
    panels[1, 0].set_ylabel("peak memory of a process (GiB)")
    figure.savefig(path, dpi=90)


def subplots(*args, **options):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*args, layout="constrained", **options)


# ---- reference

REFERENCE = (
    "--model tiny-gpt2 --dim 128 --n_layers 4 --n_heads 4 --ffn_dim 512 --seq_len 128 --micro_batch 16 --lr 2e-3"
    " --min_lr 2e-4 --warmup_steps 20 --eval_batches 20 --attention sdpa --compile none"
)


def bench_reference(args: Namespace) -> Iterator[Row]:
    """The same weights, batches and settings in flatland, transformers and nanoGPT: validation losses at the end."""
    steps = args.steps or 200
    words, case = (
        [*REFERENCE.split(), "--steps", steps, "--eval_every", steps],
        f"GPT-2, 4 layers of 128, {steps} steps",
    )
    fp32 = [*map(str, words), "--dtype", "fp32"]
    with tempfile.TemporaryDirectory() as folder:
        runs, noise = seeds(Path(folder), fp32)
        ours = runs[0].loss
        said = ", ".join(f"{run.loss:.4f}" for run in runs)
        yield row(case, f"seed noise of flatland, fp32: {said}", noise, "nats")
        losses = {"flatland, bf16": train_run(Path(folder, "bf16"), [*words, "--dtype", "bf16"]).loss}
        losses["transformers, fp32"] = train_peer(parse_args(fp32), Path(folder), "transformers")
        if args.nanogpt:
            losses["nanoGPT, fp32"] = train_peer(parse_args(fp32), Path(folder), "nanogpt", args.nanogpt)
        else:
            yield row(case, "nanoGPT: left out; --nanogpt names a checkout of it")
        for name, loss in losses.items():
            yield row(case, f"{name}: {judge(loss, ours, noise)}", loss, "nats", abs(loss - ours) / noise)


def train_peer(config: Config, folder: Path, peer: str, checkout: Path | None = None) -> float:
    """Our first weights, batches and learning rates; their model, torch's AdamW and clipping -> the validation loss at
    the end."""
    first, initial = folder / f"first-{peer}", Transformer(config.model_config)
    shapes = {name: tuple(p.shape) for name, p in initial.named_parameters()}
    shard.fill(initial, random_init(config.model_config, shapes, config.seed))
    export_model(initial, first)
    model, loss_of = PEERS[peer](first, True, checkout=checkout)
    optimizer = adamw(model.train(), config.lr, (config.beta1, config.beta2), config.weight_decay)
    for step, (batch,) in zip(range(config.steps), make_loader(config), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        loss_of(model, batch.tokens, batch.targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # all batches have as many tokens
        batches = [batch for step in make_loader(config, split="val") for batch in step]
        return float(np.mean([loss_of(model, batch.tokens, batch.targets).item() for batch in batches]))


# ---- FP8

PARITY = (
    "--model tiny-llama --dim 128 --n_layers 4 --n_heads 4 --n_kv_heads 2 --ffn_dim 384 --seq_len 128 --micro_batch 8"
    " --lr 6e-3 --schedule linear --warmup_steps 0.1 --dtype bf16 --compile none --log_every 5 --eval_every 100"
    " --eval_batches 40"
)
RECIPES = {
    "bf16": "",
    "bf16, another seed": "--seed 1",
    "tensor": "--fp8 tensor",
    "tensor, e4m3 gradients": "--fp8 tensor --fp8_grad_dtype e4m3",
    "row": "--fp8 row",
    "row_gw_hp": "--fp8 row_gw_hp",
}


def bench_fp8_parity(args: Namespace) -> Iterator[Row]:
    """A small Llama in bf16, with two seeds, and in each FP8 recipe: losses at the end; draws fp8-parity.png."""
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, own in RECIPES.items():
            words = [*PARITY.split(), "--steps", args.steps or 300, *own.split()]
            runs[name] = run = train_run(Path(folder, str(len(runs))), words)
            last = run.records[-1]["step"]
            late = np.mean([record["loss"] for record in run.records if record["step"] > last - 50])
            said = f"training loss {late:.4f}, validation {run.loss:.4f} ({run.loss - runs['bf16'].loss:+.4f})"
            yield row(f"{last} steps", f"{name}: {said}", run.loss, "nats")
    draw_losses(runs, PLOTS / "fp8-parity.png")


def draw_losses(runs: dict[str, Run], path: Path) -> None:
    figure, (above, below) = subplots(2, 1, figsize=(8, 7), sharex=True)
    base = [record["loss"] for record in runs["bf16"].records]
    for name, run in runs.items():
        steps, losses = zip(*((record["step"], record["loss"]) for record in run.records), strict=True)
        (line,) = above.plot(steps, losses, lw=1, label=name)
        if name != "bf16, another seed":  # which has other data
            below.plot(steps, np.subtract(losses, base), lw=1, color=line.get_color())
    above.set_ylabel("loss (nats per token)")
    below.set_ylabel("less bf16's on the same data")
    above.legend()
    figure.savefig(path, dpi=90)


SUITES = {
    "switches": bench_switches,
    "growth": bench_growth,
    "reference": bench_reference,
    "fp8-parity": bench_fp8_parity,
}
