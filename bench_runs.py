"""Benchmarks of whole runs of train.py: what each switch brings, how cost grows, whether the loss is that of others.

    python bench.py --suite switches [--steps N]
    python bench.py --suite growth
    python bench.py --suite reference [--steps N] [--nanogpt FOLDER]

Seed noise is the range (largest less smallest) of the validation losses of three runs that differ by --seed alone: by
initial weights and the order of the data. What has the same seed has to be nearer to each other than that."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from errors import ROOT, UserError  # first: it finds the Python that has torch

import torch  # isort: skip
import numpy as np
import torch.nn.functional as F

import shard
from bench_rows import Row, note
from config import Config, parse_args
from data import make_loader
from model import Transformer, flops_per_token, matmul_params, random_init
from optim import learning_rate
from weights import export_model


def row(case: str, what: str, value: float | None = None, unit: str = "", ratio: float | None = None, **more) -> Row:
    return note(case, what, value, unit, ratio) | more


@dataclass
class Run:
    """A finished run of train.py. wall: seconds, seen from outside; parts: its own account of them."""

    records: list[dict]
    wall: float
    parts: dict[str, float]
    samples: int

    @property
    def speed(self) -> float:
        """Tokens/s after the first fifth of the steps: the median of its records."""
        steps = self.records[-1]["step"]
        return float(np.median([r["tok_per_s"] for r in self.records if r["step"] > max(1, steps / 5)]))

    @property
    def loss(self) -> float:
        return self.records[-1]["val_loss"]

    @property
    def memory(self) -> float:
        """GiB, the peak of the rank that has most."""
        return self.records[-1]["mem_gib"]


def run(out: Path, words: list, processes: int = 1, env: dict[str, str] | None = None, timeout: int = 900) -> Run:
    """Trains, in processes of their own."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), str(ROOT / "train.py"), *words, "--out", out]
    begin = time.perf_counter()
    done = subprocess.run(
        list(map(str, command)), env=os.environ | (env or {}), capture_output=True, text=True, timeout=timeout
    )
    wall = time.perf_counter() - begin
    if done.returncode:
        raise UserError(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    parts = re.search(r"Time taken: [\d.]+ seconds \((.*)\)", (out / "log.txt").read_text())[1]
    seconds = {name: float(s) for name, s in (part.rsplit(" ", 1) for part in parts.split(", "))}
    samples = out / "samples.txt"
    return Run(records, wall, seconds, samples.read_text().count("--- step ") if samples.exists() else 0)


def judge(loss: float, reference: float, noise: float) -> str:
    """How far a validation loss is from the one that it should be."""
    distance = abs(loss - reference) / noise
    verdict = "" if distance <= 1 else "; failed: outside the seed noise"
    return f"validation loss {loss:.4f} ({loss - reference:+.4f}, {distance:.2f} of the seed noise){verdict}"


def seed_noise(losses: list[float]) -> float:
    return max(losses) - min(losses)


# ---- switches


def switches(cuda: bool, gpus: int) -> list[tuple[str, list[str] | None, int, dict[str, str]]]:
    """(name, flags, processes, environment), each with one switch more than before; flags None: not on this machine."""
    own, fused = ("blocked", "sdpa") if cuda else ("sdpa", "blocked")  # plain products are what is slow on a GPU
    plain, compiled = ["--compile", "none", "--attention", own], ["--dtype", "bf16", "--compile", "block"]
    rows = [
        ("fp32", ["--dtype", "fp32", *plain], 1, {}),
        ("TF32", ["--dtype", "tf32", *plain] if cuda else None, 1, {}),
        ("bf16", ["--dtype", "bf16", *plain], 1, {}),
        ("+ compile", [*compiled, "--attention", own], 1, {}),
        (f"+ attention {fused}", [*compiled, "--attention", fused], 1, {}),
    ]
    last = rows[-1][1]
    if cuda:
        return [*rows, ("+ 2 processes", last if gpus > 1 else None, 2, {})]
    one = {"OMP_NUM_THREADS": "1"}  # what a process has when two share the machine
    return [*rows, ("the same on one thread", last, 1, one), ("+ 2 processes of one thread", last, 2, one)]


def bench_switches(args: Namespace) -> Iterator[Row]:
    """The byte GPT of recipes/char-gpt.args with one switch after the other: tokens/s, validation loss, memory."""
    cuda, gpus = torch.cuda.is_available(), torch.cuda.device_count()
    steps, tokens = args.steps or (1000 if cuda else 30), 16384 if cuda else 2048
    case = f"{tokens} tokens a step, {steps} steps"
    words = ["@recipes/char-gpt.args", "--batch_tokens", tokens, "--steps", steps, "--warmup_steps", 0.1]
    words += ["--log_every", max(1, steps // 5), "--eval_every", steps, "--eval_batches", 10]
    words += ["--sample_every", max(1, steps // 2)]
    words += [] if cuda else ["--lr", 3e-4]  # 1e-3, an eighth of the batch and a few steps of warm-up: losses jump
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        rows = switches(cuda, gpus)
        fastest, flags = rows[4][:2]
        seeds = [run(Path(folder, f"seed-{s}"), [*words, *flags, "--seed", s]) for s in range(3)]
        runs[fastest], noise = seeds[0], seed_noise([r.loss for r in seeds])
        yield row(case, f"seed noise of the validation loss, three seeds of {fastest}", noise, "nats")
        for i, (name, flags, processes, env) in enumerate(rows):
            if flags is None:
                yield row(case, f"{name}: not on this machine")
                continue
            if name not in runs:
                runs[name] = run(Path(folder, str(i)), [*words, *flags], processes, env)
            this, first = runs[name], runs["fp32"]
            said = f"{name}: {judge(this.loss, first.loss, noise)}, {this.memory:.2f} GiB"
            more = {"val_loss": this.loss, "mem_gib": this.memory, "seconds": this.parts}
            yield row(case, said, this.speed, "tokens/s", this.speed / first.speed, **more)
        name, flags, processes, env = rows[-1]
        alone = runs[rows[-2][0]]
        if flags:
            scaling = runs[name].speed / alone.speed
            yield row(case, f"{name}, against {rows[-2][0]}", scaling, "times", scaling)
        yield from traps(Path(folder), words, runs, rows[-1], cuda)


def traps(folder: Path, words: list, runs: dict[str, Run], last: tuple, cuda: bool) -> Iterator[Row]:
    """What went wrong in the recipe's own runs: time that nobody counted, samples that hung, memory that they kept."""
    case = "traps"
    # Of one process: torchrun's own start and end are not in the log.
    alone = {name: r for name, r in runs.items() if "processes" not in name}
    name, worst = max(alone.items(), key=lambda item: abs(item[1].wall - sum(item[1].parts.values())) / item[1].wall)
    missing = worst.wall - sum(worst.parts.values())
    verdict = "" if abs(missing) <= max(0.02 * worst.wall, 0.5) else "; failed: more than 2 % and 0.5 s"
    said = f"wall time less its logged parts, the worst of all ({name}, {worst.wall:.1f} s){verdict}"
    yield row(case, said, 100 * missing / worst.wall, "%")
    name, flags, processes, env = last
    if not flags:
        return
    verdict = "" if runs[name].samples == 2 else "; failed: 2 were asked for"
    seconds = runs[name].parts.get("samples", 0.0)
    yield row(
        case, f"samples written by {processes} processes, in {seconds:.1f} s{verdict}", runs[name].samples, "samples"
    )
    # What the compiler takes is resident, too, and samples are compiled: on a CPU this is told apart without it.
    short = [*words, *flags, *([] if cuda else ["--compile", "none"]), "--steps", 6, "--eval_every", 0]
    silent, talking = (run(folder / f"every-{n}", [*short, "--sample_every", n], processes, env) for n in (0, 3))
    growth = talking.memory - silent.memory
    verdict = "" if growth <= 0.1 * silent.memory else "; failed: more than 10 %"
    said = f"peak memory of {processes} processes with samples amid training, less that without them{verdict}"
    yield row(case, said, growth, "GiB", talking.memory / silent.memory)


# ---- growth

SMALL = "--model tiny-llama --dim 128 --n_layers 2 --n_heads 2 --n_kv_heads 2 --ffn_dim 384 --compile none"
SMALL += " --tokenizer bytes"  # for the large vocabularies, too
T, ROWS = 256, 16  # of the points of all axes but their own


def axes(cuda: bool) -> dict[str, tuple[list[int], dict[int, list], str]]:
    """axis -> (its values, flags, unit). The token count of a step is fixed along `sequence length`."""
    device = ["--dtype", "bf16" if cuda else "fp32", "--attention", "sdpa"]

    def flags(layers: int = 2, seq_len: int = T, rows: int = ROWS, vocab: int = 258) -> list:
        words = [*SMALL.split(), "--n_layers", layers, "--seq_len", seq_len, "--micro_batch", rows]
        return [*words, "--vocab_size", vocab, *device]

    lengths = [256, 1024, 4096, 16384, 32768]
    counts = [n for n in (1, 2, 4, 8) if n <= (torch.cuda.device_count() if cuda else 2 * (os.cpu_count() or 1))]
    return {
        "sequence length": ({n: flags(seq_len=n, rows=32768 // n) for n in lengths}, "32,768 tokens a step"),
        "rows per step": ({n: flags(rows=n) for n in (4, 16, 32, 64, 128)}, f"rows of {T}"),
        "vocabulary": ({n: flags(vocab=n) for n in (258, 4096, 16384, 32768, 65536)}, f"{ROWS} x {T} tokens a step"),
        "layers": ({n: flags(layers=n) for n in (2, 4, 8, 16, 32)}, f"{ROWS} x {T} tokens a step"),
        "processes": (
            {n: [*flags(rows=0), "--batch_tokens", 64 * T] for n in counts}, f"64 x {T} tokens a step, a thread each"
        ),
    }  # fmt: skip


def saved_bytes(config: Config, rows: int) -> int:
    """What autograd keeps between the forward and the backward pass, without the parameters."""
    model = Transformer(config.model_config)
    kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no other takes its place
        return tensor

    tokens = torch.zeros(rows, config.seq_len, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(tokens, tokens)
    del loss
    return sum(size for size, _ in kept.values())


def fit(x: list[float], y: list[float]) -> tuple[float, float]:
    """Least squares of the relative error: y = a + b x."""
    weights = 1 / np.array(y)
    columns = np.stack([np.ones(len(x)), np.array(x, dtype=float)], 1)
    a, b = np.linalg.lstsq(columns * weights[:, None], np.array(y) * weights, rcond=None)[0]
    return float(a), float(b)


def bench_growth(args: Namespace) -> Iterator[Row]:
    """Time and memory against sequence length, batch, vocabulary, layers and processes; draws growth.png."""
    cuda, points, slopes = torch.cuda.is_available(), {}, {}
    for axis, (flags, about) in axes(cuda).items():
        points[axis] = {}
        for n, words in flags.items():
            processes = n if axis == "processes" else 1
            steps = 3 if axis == "sequence length" and n > 4096 and not cuda else 5
            env = {"OMP_NUM_THREADS": "1"} if axis == "processes" and not cuda else {}
            words = [*words, "--steps", steps, "--log_every", 1, "--eval_every", 0]
            with tempfile.TemporaryDirectory() as folder:
                points[axis][n] = this = run(Path(folder, "run"), words, processes, env)
            yield row(f"{axis} {n}", f"{about}: {this.memory:.2f} GiB", this.speed, "tokens/s", mem_gib=this.memory)
        if axis != "processes":
            exact = points[axis] if cuda else exact_memory(flags)
            slopes[axis], rows = explain(axis, points[axis], exact, next(iter(flags.values())))
            yield from rows
    draw(points, slopes)
    yield row("all", "drawn: growth.png")


def exact_memory(flags: dict[int, list]) -> dict[int, Run]:
    """Two points of an axis again, with an allocator that gives every block back: what is resident is what is in use.
    (By default train.py keeps freed blocks, which is faster and fragments the heap.)"""
    out = {}
    for n in list(flags)[1:4:2]:
        with tempfile.TemporaryDirectory() as folder:
            words = [*flags[n], "--steps", 2, "--log_every", 1, "--eval_every", 0]
            out[n] = run(Path(folder, "run"), words, env={"MALLOC_MMAP_THRESHOLD_": "65536"})
    return out


def explain(axis: str, points: dict[int, Run], exact: dict[int, Run], words: list) -> tuple[float, list[Row]]:
    """The slopes of time and memory along an axis, beside what the FLOP count and the sizes of tensors say; -> the
    latter's bytes per unit, and the rows."""
    config = parse_args(list(map(str, words)))
    c, n = config.model_config, list(points)
    a, b = fit(n, [1e9 / p.speed for p in points.values()])
    c0, d = fit(n, [p.memory * 2**30 for p in points.values()])
    _, d_exact = fit(list(exact), [p.memory * 2**30 for p in exact.values()])
    attention = 6 * c.n_heads * c.head_dim  # per layer and token of context
    flops = {  # per token and unit of the axis, forward and backward
        "sequence length": attention * c.n_layers,
        "vocabulary": 6 * c.dim,
        "layers": 6 * (matmul_params(c) - c.vocab_size * c.dim) / c.n_layers + attention * config.seq_len,
    }
    layer = sum(p.numel() for p in Transformer(c).layers[0].parameters())
    more = parse_args([*map(str, words), "--n_layers", str(c.n_layers + 1)])
    expected = {  # parameters, gradients and two moments in fp32; what autograd keeps for the backward pass
        "sequence length": 0.0,
        "rows per step": float(saved_bytes(config, 2) - saved_bytes(config, 1)),
        "vocabulary": 16.0 * 2 * c.dim,
        "layers": 16.0 * layer + config.micro_batch * (saved_bytes(more, 1) - saved_bytes(config, 1)),
    }[axis]
    said = f"time per token = {a:.4g} ns + {b:.4g} ns x"
    if axis in flops:
        said += f": {flops[axis]:,.0f} FLOP per token and unit at {flops[axis] / b:.0f} GFLOP/s"
    else:
        fixed = flops_per_token(c, config.seq_len)
        said += (
            f": {fixed / 1e6:.2f} MFLOP per token at {fixed / a:.0f} GFLOP/s, {b * n[-1] / a:+.0%} with {n[-1]} rows"
        )
    time_row = row(axis, said, b, "ns")
    said = f"memory = {c0 / 2**20:.0f} MiB + {d / 1024:.4g} KiB x; in use {d_exact / 1024:.4g} KiB x"
    said += f"; the tensors' sizes say {expected / 1024:.4g} KiB"
    return expected, [time_row, row(axis, said, d_exact / 1024, "KiB", d_exact / expected if expected else None)]


def draw(points: dict[str, dict[int, Run]], slopes: dict[str, float], path: Path = ROOT / "growth.png") -> None:
    """slopes: bytes per unit of an axis that the sizes of tensors say."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, len(points), figsize=(3.1 * len(points), 6), layout="constrained", sharex="col")
    for i, (axis, found) in enumerate(points.items()):
        n, above, below = list(found), *panels[:, i]
        speeds, memory = [p.speed for p in found.values()], [p.memory for p in found.values()]
        for panel, y, color in ((above, speeds, "C0"), (below, memory, "C3")):
            panel.plot(n, y, "o", color=color, label="measured")
            panel.set_xscale("log", base=2)
            panel.set_ylim(0, 1.15 * max(y))
            panel.grid(alpha=0.3)
            panel.set_xticks(n, [f"{x // 1024}k" if x % 1024 == 0 else str(x) for x in n])
            panel.minorticks_off()
            panel.tick_params("x", rotation=45 if n[-1] > 1000 else 0)
        fine = np.geomspace(n[0], n[-1], 100)
        if axis == "processes":
            above.plot(n, [speeds[0] * x for x in n], "--", color="grey", lw=1, label="as many times one")
            above.set_ylim(0, 1.15 * speeds[0] * n[-1])
        else:
            (a, b), (c, d) = fit(n, [1 / s for s in speeds]), fit(n, memory)
            above.plot(fine, 1 / (a + b * fine), color="C0", lw=1, label="1 / (a + b x)")
            below.plot(fine, c + d * fine, color="C3", lw=1, label="c + d x")
            in_tensors = memory[0] + slopes[axis] / 2**30 * (fine - n[0])
            below.plot(fine, in_tensors, "--", color="grey", lw=1, label="sizes of tensors")
        for panel in (above, below):
            panel.legend(fontsize=8)
        below.set_xlabel(axis)
    panels[0, 0].set_ylabel("tokens per second")
    panels[1, 0].set_ylabel("peak memory of a process (GiB)")
    figure.savefig(path, dpi=90)
    plt.close(figure)


# ---- reference

REFERENCE = (
    "--model tiny-gpt2 --dim 128 --n_layers 4 --n_heads 4 --ffn_dim 512 --seq_len 128 --micro_batch 16 --lr 2e-3"
    " --min_lr 2e-4 --warmup_steps 20 --eval_batches 20 --attention sdpa --compile none"
)


def bench_reference(args: Namespace) -> Iterator[Row]:
    """The same weights, batches and settings in flatland, transformers and nanoGPT: validation losses at the end."""
    steps = args.steps or 200
    words = [*REFERENCE.split(), "--steps", str(steps), "--eval_every", str(steps)]
    case = f"GPT-2, 4 layers of 128, bytes, {steps} steps"
    with tempfile.TemporaryDirectory() as folder:
        fp32 = [*words, "--dtype", "fp32"]
        losses = [run(Path(folder, str(s)), [*fp32, "--seed", s]).loss for s in range(3)]
        noise = seed_noise(losses)
        yield row(case, f"seed noise of flatland, fp32: {', '.join(f'{loss:.4f}' for loss in losses)}", noise, "nats")

        def compared(name: str, loss: float) -> Row:
            return row(case, f"{name}: {judge(loss, losses[0], noise)}", loss, "nats", abs(loss - losses[0]) / noise)

        yield compared("flatland, fp32", losses[0])
        yield compared("flatland, bf16", run(Path(folder, "bf16"), [*words, "--dtype", "bf16"]).loss)
        config = parse_args(fp32)
        for name, make in (("transformers", make_transformers), ("nanoGPT", make_nanogpt)):
            if name == "nanoGPT" and not args.nanogpt:
                yield row(case, "nanoGPT: left out; --nanogpt names a checkout of it")
                continue
            forward, model, optimizer = make(config, Path(folder), args.nanogpt)
            yield compared(f"{name}, fp32", train_theirs(config, forward, model, optimizer))


def export_first(config: Config, folder: Path) -> Path:
    """The weights that train.py starts with, as a Hugging Face folder."""
    model, out = Transformer(config.model_config), folder / "first"
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shard.fill(model, random_init(config.model_config, shapes, config.seed))
    if not out.exists():
        export_model(model, out)
    return out


def decaying(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))


def make_transformers(config: Config, folder: Path, _=None) -> tuple:
    """-> (logits of tokens, model, optimizer)"""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        export_first(config, folder), dtype=torch.float32, **none
    ).train()
    return lambda tokens: model(tokens, use_cache=False).logits, model, decaying(config, model)


def make_nanogpt(config: Config, folder: Path, checkout: Path) -> tuple:
    """-> (logits of tokens, model, optimizer). It computes GELU with erf, GPT-2 and we with tanh."""
    import importlib.util

    if not (checkout / "model.py").exists():
        raise UserError(f"--nanogpt {checkout}: no model.py is there; give a checkout of github.com/karpathy/nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt", checkout / "model.py")
    nanogpt = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt"] = nanogpt  # its dataclass looks itself up
    spec.loader.exec_module(nanogpt)
    c, theirs = config.model_config, make_transformers(config, folder)[1].state_dict()
    size = {"n_layer": c.n_layers, "n_head": c.n_heads, "n_embd": c.dim, "vocab_size": c.vocab_size}
    with open(os.devnull, "w") as quiet:
        sys.stdout, screen = quiet, sys.stdout
        try:
            model = nanogpt.GPT(nanogpt.GPTConfig(block_size=c.max_seq_len, dropout=0.0, bias=True, **size))
            betas = (config.beta1, config.beta2)
            optimizer = model.configure_optimizers(config.weight_decay, config.lr, betas, "cpu")
        finally:
            sys.stdout = screen
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # transformers keeps these as [in, out]
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(theirs[name].T if name.endswith(turned) else theirs[name])

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens, tokens)[0]  # without targets it computes the last token's only

    return forward, model, optimizer


def train_theirs(config: Config, forward, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Our batches and learning rates; their model, torch's AdamW and clipping -> the validation loss at the end."""

    def losses(batch, reduction: str) -> torch.Tensor:
        return F.cross_entropy(forward(batch.tokens).flatten(0, 1), batch.targets.flatten(), reduction=reduction)

    for step, micro_batches in zip(range(config.steps), make_loader(config), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        losses(micro_batches[0], "mean").backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        batches = [batch for micro_batches in make_loader(config, split="val") for batch in micro_batches]
        total = sum(losses(batch, "sum").double() for batch in batches)
    return (total / sum((batch.targets != -100).sum() for batch in batches)).item()


SUITES = {"switches": bench_switches, "growth": bench_growth, "reference": bench_reference}
