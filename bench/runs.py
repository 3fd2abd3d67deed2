"""Benchmarks of whole runs of train.py: what each switch brings, how cost grows, whether the loss is that of others.

Seed noise is the range (largest less smallest) of the validation losses of three runs that differ by --seed alone: by
initial weights and the order of the data. What has the same seed has to be nearer to each other than that."""

import os
import random
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import Row, Run, guarded, row, run_python, train_run  # first: it finds the Python that has torch

import numpy as np  # isort: skip
import torch

import plan
import shard
from check import first_values, resolve
from config import Config, parse_args
from data import Batch, make_loader
from guard import GradientGuard
from log import memory_gib
from machine import GPUS
from model import Transformer
from optim import learning_rate, make_optimizer
from peers import PEERS, adamw, their_step
from shard import ALONE
from train import build, train_step
from weights import export_model

PLOTS = Path(__file__).parent
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def train_in(folder: str, flags: str, processes: int = 1, env: dict[str, str] | None = None) -> Run:
    """A run in a new folder inside of this one."""
    return train_run(Path(tempfile.mkdtemp(dir=folder), "run"), flags.split(), processes, env)


def judge(loss: float, reference: float, noise: float) -> str:
    """How far a validation loss is from the one that it should be."""
    distance = abs(loss - reference) / noise
    verdict = "failed: outside the seed noise: " * (distance > 1)
    return f"{verdict}validation loss {loss:.4f} ({loss - reference:+.4f}, {distance:.2f} of the seed noise)"


def seeds(folder: str, flags: str) -> tuple[list[Run], float]:
    """-> three runs, and the seed noise"""
    runs = [train_in(folder, f"{flags} --seed {seed}") for seed in range(3)]
    losses = [run.loss for run in runs]
    return runs, max(losses) - min(losses)


# ---- switches


class Variant(NamedTuple):
    """flags: empty, if this machine cannot run it."""

    name: str
    flags: str
    processes: int = 1
    env: dict[str, str] | None = None


def switches(cuda: bool, gpus: int) -> list[Variant]:
    """Each with one switch more than before."""
    plain, fused = ("blocked", "sdpa") if cuda else ("sdpa", "blocked")  # plain products are what is slow on a GPU
    last = f"--dtype bf16 --compile block --attention {fused}"
    one_process = [
        Variant("fp32", f"--dtype fp32 --compile none --attention {plain}"),
        Variant("TF32", f"--dtype tf32 --compile none --attention {plain}" * cuda),
        Variant("bf16", f"--dtype bf16 --compile none --attention {plain}"),
        Variant("+ compile", f"--dtype bf16 --compile block --attention {plain}"),
        Variant(f"+ attention {fused}", last),
    ]
    if cuda:
        return [*one_process, Variant("+ 2 processes", last * (gpus > 1), 2)]
    alone = Variant("the same on one thread", last, 1, ONE_THREAD)  # what a process has when two share the machine
    return [*one_process, alone, Variant("+ 2 processes of one thread", last, 2, ONE_THREAD)]


def bench_switches(args: Namespace) -> Iterator[Row]:
    """The byte GPT of recipes/char-gpt.args with one switch after the other: tokens/s, validation loss, memory."""
    cuda = torch.cuda.is_available()
    steps, tokens = args.steps or (1000 if cuda else 30), 16384 if cuda else 2048
    case, variants = f"{tokens} tokens a step, {steps} steps", switches(cuda, torch.cuda.device_count())
    flags = f"@recipes/char-gpt.args --batch_tokens {tokens} --steps {steps} --warmup_steps 0.1 --eval_batches 10"
    flags += f" --log_every {max(1, steps // 5)} --eval_every {steps} --sample_every {max(1, steps // 2)}"
    flags += "" if cuda else " --lr 3e-4"  # 1e-3, an eighth of the batch and a few steps of warm-up: losses jump
    with tempfile.TemporaryDirectory() as folder:
        _, noise = seeds(folder, f"{flags} {variants[4].flags}")
        yield row(case, f"seed noise of the validation loss, three seeds of {variants[4].name}", noise, "nats")
        first = None
        for name, own, processes, env in variants:
            if not own:
                yield row(case, name, note="not on this machine")
                continue
            run = train_in(folder, f"{flags} {own}", processes, env)
            first = first or run
            parts = [judge(run.loss, first.loss, noise), f"{run.memory:.2f} GiB", *traps(run, processes)]
            yield row(case, name, run.speed, "tokens/s", run.speed / first.speed, "; ".join(parts))
        if variants[-1].flags:
            yield samples_row(folder, flags, variants[-1], cuda)


def traps(run: Run, processes: int) -> list[str]:
    """What went wrong in the recipe's own runs: time that nobody counted, samples that hung."""
    uncounted, parts = run.wall - sum(run.parts.values()), []
    if processes == 1:  # torchrun's own start and end are not in the log
        verdict = "failed: " * (abs(uncounted) > max(0.02 * run.wall, 0.5))
        parts.append(f"{verdict}{uncounted / run.wall:.1%} of {run.wall:.1f} s are in no logged part")
    if run.samples != 2:
        parts.append(f"failed: {run.samples} samples were written, 2 were asked for")
    return parts


def samples_row(folder: str, flags: str, last: Variant, cuda: bool) -> Row:
    """Samples that keep memory. What the compiler takes is resident, too, and samples are compiled: on a CPU this is
    told apart without it."""
    short = f"{flags} {last.flags} {'' if cuda else '--compile none'} --steps 6 --eval_every 0 --sample_every"
    silent, talking = (train_in(folder, f"{short} {n}", last.processes, last.env).memory for n in (0, 3))
    verdict = "" if talking <= 1.1 * silent else "failed: more than 10 %"
    what = f"peak memory of {last.processes} processes with samples amid training, less that without them"
    return row("traps", what, talking - silent, "GiB", talking / silent, verdict)


# ---- growth

GROWTH = (
    "--model tiny-llama --dim 128 --n_layers 2 --n_heads 2 --n_kv_heads 2 --ffn_dim 384 --compile none --attention sdpa"
    " --tokenizer bytes --seq_len 256 --micro_batch 16 --steps 5 --log_every 1 --eval_every 0"
)
AXES = {  # axis: values, flags by the value; what is not the axis' own: 16 rows of 256 tokens
    "sequence length": ((256, 1024, 4096, 16384, 32768), lambda n: f"--seq_len {n} --micro_batch {32768 // n}"),
    "rows per step": ((4, 16, 32, 64, 128), lambda n: f"--micro_batch {n}"),
    "vocabulary": ((258, 4096, 16384, 32768, 65536), lambda n: f"--vocab_size {n}"),
    "layers": ((2, 4, 8, 16, 32), lambda n: f"--n_layers {n}"),
    "processes": ((1, 2, 4, 8), lambda n: "--micro_batch 0 --batch_tokens 16384"),
}


def bench_growth(args: Namespace) -> Iterator[Row]:
    """Time and memory against sequence length, batch, vocabulary, layers and processes; draws growth.png."""
    cuda, points = torch.cuda.is_available(), {}
    most = torch.cuda.device_count() if cuda else 2 * (os.cpu_count() or 1)
    base = f"{GROWTH} --dtype {'bf16' if cuda else 'fp32'}"
    with tempfile.TemporaryDirectory() as folder:
        for axis, (values, flags_of) in AXES.items():
            processes, runs = axis == "processes", {}
            for n in values:
                if processes and n > most:
                    continue
                env = ONE_THREAD if processes and not cuda else None
                runs[n] = run = train_in(folder, f"{base} {flags_of(n)}", n if processes else 1, env)
                yield row(axis, str(n), run.speed, "tokens/s", note=f"{run.memory:.2f} GiB")
            points[axis] = runs
            if not processes:
                a, b = fit(list(values), [1e9 / run.speed for run in runs.values()])
                yield row(axis, "time per token, per x", b, "ns", note=f"{a:.4g} ns + {b:.4g} ns x")
                env, two = {"MALLOC_MMAP_THRESHOLD_": "65536"}, values[1:4:2]  # gives every freed block back
                in_use = [train_in(folder, f"{base} {flags_of(n)}", env=env).memory * 2**20 for n in two]
                yield row(axis, "memory in use, per x", fit(two, in_use)[1], "KiB")
    draw_growth(points, PLOTS / "growth.png")
    yield row("all", "drawn: bench/growth.png")


def fit(x: list[float], y: list[float]) -> tuple[float, float]:
    """Least squares of the relative error: y = a + b x."""
    b, a = np.polyfit(x, y, 1, w=1 / np.array(y))
    return float(a), float(b)


def draw_growth(points: dict[str, dict[int, Run]], path: Path) -> None:
    figure, panels = subplots(2, len(points), figsize=(3.1 * len(points), 6), sharex="col")
    for (axis, runs), column in zip(points.items(), panels.T, strict=True):
        for panel, figures in zip(column, ("speed", "memory"), strict=True):
            panel.plot(list(runs), [getattr(run, figures) for run in runs.values()], "o-")
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        column[1].set_xlabel(axis)
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
    case, flags = f"GPT-2, 4 layers of 128, {steps} steps", f"{REFERENCE} --steps {steps} --eval_every {steps} --dtype"
    config = parse_args(f"{flags} fp32".split())
    with tempfile.TemporaryDirectory() as folder:
        runs, noise = seeds(folder, f"{flags} fp32")
        losses = ", ".join(f"{run.loss:.4f}" for run in runs)
        yield row(case, "seed noise of flatland, fp32", noise, "nats", note=losses)
        contenders = {"flatland, bf16": lambda: train_in(folder, f"{flags} bf16").loss}
        for peer in ("transformers", "nanogpt"):
            contenders[f"{peer}, fp32"] = lambda peer=peer: train_peer(config, Path(folder), peer, args.nanogpt)
        for name, train in contenders.items():
            yield from guarded(case, name, loss_row(case, name, train, runs[0].loss, noise))


def loss_row(case: str, name: str, train: Callable[[], float], reference: float, noise: float) -> Iterator[Row]:
    loss = train()
    yield row(case, name, loss, "nats", abs(loss - reference) / noise, judge(loss, reference, noise))


def train_peer(config: Config, folder: Path, peer: str, checkout: Path | None = None) -> float:
    """Our first weights, batches and learning rates; their model, torch's AdamW and clipping -> the validation loss at
    the end."""
    initial = Transformer(config.model_config)
    shard.fill(initial, *first_values(config, initial, None))
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
    "bf16, another seed": "--seed 1",
    "tensor": "--fp8 tensor",
    "tensor, e4m3 gradients": "--fp8 tensor --fp8_grad_dtype e4m3",
    "row": "--fp8 row",
    "row_gw_hp": "--fp8 row_gw_hp",
}


def bench_fp8_parity(args: Namespace) -> Iterator[Row]:
    """A small Llama in bf16, with two seeds, and in each FP8 recipe: losses at the end; draws fp8-parity.png."""
    runs, steps = {}, args.steps or 300
    with tempfile.TemporaryDirectory() as folder:
        for name, own in RECIPES.items():
            runs[name] = run = train_in(folder, f"{PARITY} --steps {steps} {own}")
            late = np.mean([record["loss"] for record in run.records if record["step"] > steps - 50])
            note = f"training loss {late:.4f}, validation {run.loss - runs['bf16'].loss:+.4f} beside bf16's"
            yield row(f"{steps} steps", name, run.loss, "nats", note=note)
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


# ---- the plan

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"} | ONE_THREAD  # freed blocks
SCALED = ("llama2-7b", "llama3-8b", "llama2-70b", "mixtral-8x7b", "llama3.1-405b")  # recipes
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # of 8 H100


def random_run(draw: random.Random) -> str:
    """The flags of a run of two steps on a CPU."""
    model, heads = draw.choice(("tiny-gpt2", "tiny-llama", "tiny-llama3.2", "tiny-mixtral")), draw.randint(2, 6)
    seq_len, micro_batch = draw.choice((64, 128, 256)), draw.choice((1, 2, 4, 8))
    sizes = {
        "vocab_size": draw.choice((512, 8000, 32000)),
        "dim": 64 * heads,
        "n_heads": heads,
        "n_kv_heads": heads if model == "tiny-gpt2" else draw.choice([n for n in (1, 2, heads) if heads % n == 0]),
        "ffn_dim": 64 * heads * draw.randint(1, 4),
        "n_layers": draw.randint(2, 8),
        "seq_len": seq_len,
        "micro_batch": micro_batch,
        "checkpointing": draw.choice(("none", "selective", "block")),
    }
    sizes |= {name: draw.choice(("fp32", "bf16")) for name in ("dtype", "param_dtype", "state_dtype")}
    twice = f"--batch_tokens {2 * seq_len * micro_batch}"
    more = draw.choice(("", twice, "--update_in_backward --clip 0", "--documents separate"))
    return f"--compile none --model {model} {' '.join(f'--{name} {value}' for name, value in sizes.items())} {more}"


def bench_plan(args: Namespace) -> Iterator[Row]:
    """plan.py: the peak memory of random runs on a CPU; how the recipes scale to 16,384 GPUs, drawn in scaling.png."""
    draw, errors, case, cpu = random.Random(0), [], "peak memory", torch.device("cpu")
    for _ in range(20):
        flags = random_run(draw)
        config = resolve(parse_args(flags.split()), cpu, 1)
        predicted = plan.step_figures(config, plan.cluster_here(cpu, 1))["mem_gib"]
        measured = float(run_python(Path(__file__), *flags.split(), env=GIVES_BACK))
        errors.append(predicted / measured - 1)
        yield row(case, flags, predicted, "GiB", predicted / measured, f"{measured:.3f} GiB measured")
    sizes = sorted(abs(error) for error in errors)
    median, worst = float(np.median(sizes)), sizes[-1]
    verdict = "failed: " * (median > 0.05 or worst > 0.12)
    yield row(case, "error", median, "", note=f"{verdict}median {median:.1%}, worst {worst:.1%}; 5 % and 12 % allowed")
    scales = {recipe: scale(recipe) for recipe in SCALED}
    for recipe, points in scales.items():
        for gpus, (gib, speed) in points.items():
            yield row(recipe, f"{gpus} GPUs", speed, "tokens/s per GPU", note=f"{gib:.1f} GiB")
    draw_scaling(scales, PLOTS / "scaling.png")
    yield row("all", "drawn: bench/scaling.png")


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


def scale(recipe: str) -> dict[int, tuple[float, float]]:
    """{GPUs: (GiB, tokens/s) of each}, with one micro-batch a step."""
    words, points = [f"@recipes/{recipe}.args", "--weights=", "--load=direct", "--batch_tokens=0"], {}
    for nodes in NODES:
        cluster = plan.Cluster(nodes, 8, GPUS["h100-80"])
        made = plan.predict(plan.settle(parse_args(words), cluster), cluster)
        speed = made.config.batch_tokens / made.seconds / cluster.ranks
        points[cluster.ranks] = (sum(made.gpu.values()) / 2**30, speed)
    return points


def draw_scaling(scales: dict[str, dict[int, tuple[float, float]]], path: Path) -> None:
    figure, panels = subplots(1, 2, figsize=(9, 3.6), sharex=True)
    for recipe, points in scales.items():
        for panel, values in zip(panels, zip(*points.values(), strict=True), strict=True):
            panel.plot(list(points), values, "o-", markersize=3, label=recipe)
    for panel, name in zip(panels, ("GiB per GPU", "tokens/s per GPU"), strict=True):
        panel.set(xscale="log", yscale="log", xlabel="GPUs (H100, 8 a node)", ylabel=name)
        panel.grid(alpha=0.3)
    panels[0].axhline(GPUS["h100-80"].gib, color="black", linewidth=0.8, linestyle="--")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=90)


SUITES = {
    "switches": bench_switches,
    "growth": bench_growth,
    "reference": bench_reference,
    "fp8-parity": bench_fp8_parity,
    "plan": bench_plan,
}

if __name__ == "__main__":
    train_two_steps(sys.argv[1:])
