"""Training on a CPU: whole steps, ours against peers.

Peak memory, page faults, the allocator and the time to start belong to a process. So a contender trains in one of its
own (peers.py), a few steps at a time, and contenders take turns. Ours is what `python train.py` does with these flags.
Weights and tokens are the same for all. A contender whose loss or gradients are others, in fp32 or bf16, is refused:
nothing fast and wrong is timed."""

import json
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common import Row, Turn, failed, guarded, race, row, run_python, speed_rows, train_run  # first: it finds torch

import torch  # isort: skip
from torch import nn

import train
from errors import Failure
from machine import available_memory
from model import flops_per_token
from peers import PEERS, SIDE, fill, our_config, random_tokens
from prepare import write_shard
from weights import export_model

SHAPES = {
    "llama": "--model llama2-7b --vocab_size 32000 --dim 512 --n_layers 8 --n_heads 8 --n_kv_heads 4 --ffn_dim 1408"
    " --seq_len 512 --micro_batch 8",
    "gpt2": "--model gpt2 --vocab_size 50304 --dim 384 --n_layers 6 --n_heads 6 --ffn_dim 1536"
    " --seq_len 256 --micro_batch 12",
}
TINY = "--model tiny-{} --seq_len 32 --micro_batch 2 --compile none"
ONLY = {"litgpt": "llama", "nanogpt": "gpt2"}  # the shape that a peer has
# What machine.keep_memory sets, as glibc's environment variables (mallopt(3)).
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**28)}
TOLERANCE = {"fp32": 1e-5, "gradient": 1e-4, "bf16": 2.0**-8}  # relative; the last is one rounding
ROOM = 5e9  # bytes of memory to be free before a contender starts
STEPS = 3  # of a turn, after two that are not counted


class Contender(NamedTuple):
    peer: str  # flatland, matmul or one of PEERS
    precision: str  # bf16-mixed: autocast, fp32 masters; bf16-true; 32-true
    compile: bool = True


class Bench:
    """A shape, and what all contenders share. peers: those that are left. folder: temporary."""

    def __init__(self, shape: str, args: Namespace, folder: Path):
        self.args, self.folder, self.cache = args, folder, folder / "cache"
        self.flags = (TINY.format(shape) if args.tiny else SHAPES[shape]).split()
        self.config, _ = our_config(self.flags)
        c = self.config.model_config
        self.shape = self.config.micro_batch, self.config.seq_len, c.vocab_size
        self.title = f"{shape}: {c.n_layers} layers of {c.dim}, {self.config.micro_batch} x {self.config.seq_len}"
        self.mixed = "bf16-mixed" if self.config.dtype == "bf16" else "32-true"
        self.peers = [peer for peer in args.peers if ONLY.get(peer, shape) == shape]

    def run(self, contender: Contender, steps: int, env: dict[str, str] | None = None) -> Turn:
        """One turn of a contender, in a process of its own."""
        room = available_memory()
        if not self.args.tiny and 0 < room < ROOM:
            raise Failure(f"only {room / 1e9:.1f} GB of memory are free")
        flags = self.flags if contender.compile else [*self.flags, "--compile", "none"]
        spec = contender._asdict() | {"flags": flags, "shape": self.shape, "steps": steps}
        spec |= {"model": f"{self.folder}/model", "nanogpt": str(self.args.nanogpt)}
        spec["compile"] &= not self.args.tiny
        env = {"TORCHINDUCTOR_CACHE_DIR": str(self.cache)} | (env or {})
        output = run_python(Path(__file__).with_name("peers.py"), json.dumps(spec), env=env)
        return Turn(**json.loads(output.splitlines()[-1]))


# ---- the same results


def results_of(model: nn.Module, loss_of: Callable, tokens: tuple, dtypes=("bf16", "fp32"), autocast=True) -> dict:
    """Its mean loss in each dtype, and in fp32 the norm of all gradients. The weights are four times as large as those
    that are trained, for at their first values layers do so little that a wrong one hardly shows."""
    results = {}
    with torch.no_grad():
        for p in model.train().parameters():
            p.mul_(4 if p.ndim > 1 else 1)
    for dtype in dtypes:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype == "bf16"):
            loss = loss_of(model, *tokens)
        results[dtype] = loss.item()
    loss.backward()
    return results | {"gradient": sum(p.grad.double().square().sum().item() for p in model.parameters()) ** 0.5}


def our_results(bench: Bench, tokens: tuple) -> dict[str, float]:
    """Writes the weights for the peers, too."""
    results = {}
    for dtype in ("bf16", "fp32"):
        config, ranks = our_config([*bench.flags, "--dtype", dtype, "--compile", "none"])
        model = train.build(config, ranks, None)
        fill(model, config, ranks.device)
        export_model(model, bench.folder / "model", replaces=True)
        results |= results_of(model, lambda call, x, y: call(x, y) / y.numel(), tokens, (dtype,), autocast=False)
    return results


def deviation(what: str, value: float, ours: float, bound: float) -> str:
    """Empty, or what is wrong."""
    error = abs(value - ours) / abs(ours)
    return "" if error <= bound else f"its {what} is {value:.6f}, ours {ours:.6f}: {error:.1e}, allowed {bound:.1e}"


def check(bench: Bench) -> Iterator[Row]:
    """Losses and gradients of a row of tokens, uncompiled. Drops the peers that differ or are not there."""
    tokens, left = random_tokens(1, *bench.shape[1:]), []
    case, ours = f"{bench.title}: same weights, same tokens", our_results(bench, tokens)
    exact = ours | {"bf16": ours["fp32"]}

    def judge(peer: str) -> Iterator[Row]:
        if peer == "flatland":
            results = ours
        else:
            made = PEERS[peer](bench.folder / "model", True, checkout=bench.args.nanogpt, tanh=True)
            results = results_of(*made, tokens)
        wrong = [deviation(what, results[what], exact[what], bound) for what, bound in TOLERANCE.items()]
        if any(wrong):
            yield failed(case, peer, "; ".join(filter(None, wrong)))
        else:
            left.append(peer)
            yield row(case, peer, note=", ".join(f"{what} {value:.6f}" for what, value in results.items()))

    for peer in ("flatland", *bench.peers):
        yield from guarded(case, peer, judge(peer))
    if "flatland" not in left:
        raise Failure("our own losses in bf16 and fp32 differ")
    bench.peers = left[1:]


# ---- the races


def bench_race(bench: Bench, allocator: bool) -> Iterator[Row]:
    """Ours against the others, in turn. Ratios to the fastest of the others."""
    case, config = f"{bench.title}, {'same allocator' if allocator else 'as shipped'}", bench.config
    contenders = [Contender(peer, bench.mixed) for peer in ("flatland", *bench.peers)]
    contenders += [Contender("litgpt", "bf16-true")] * ("litgpt" in bench.peers)
    ready, losses = {"limit": partial(bench.run, Contender("matmul", bench.mixed), 10 * STEPS)}, []

    def start(contender: Contender, name: str) -> Iterator[Row]:
        env = ALLOCATOR if allocator and contender.peer != "flatland" else None
        losses.append(bench.run(contender, STEPS, env).losses[0])  # this turn compiles
        wrong = deviation("first loss, compiled as it is timed,", losses[-1], losses[0], TOLERANCE["bf16"])
        if wrong:
            yield failed(case, name, wrong)
        else:
            ready[name] = partial(bench.run, contender, STEPS, env)

    for contender in contenders:
        name = f"{contender.peer}, {contender.precision}, compiled"
        yield from guarded(case, name, start(contender, name))
    turns = race(ready, bench.args.repeats)
    peak = 2 * SIDE**3 / min(second for turn in turns.pop("limit") for second in turn.seconds)
    yield row(case, f"the limit: matmul {SIDE}^3, the fastest", peak / 1e9, "GFLOP/s")
    rows = speed_rows(case, "tokens/s", config.micro_batch * config.seq_len, turns)
    best = max((result["median"] for result in rows[1:]), default=rows[0]["median"])
    share = flops_per_token(config.model_config, config.seq_len) / peak
    for result in rows:
        several = turns[result["what"]]
        faults, last = statistics.median(turn.faults for turn in several), several[-1]
        note = f"{result['median'] * share:.1%} of the limit; {last.peak / 1e9:.2f} GB; {faults:.0f} faults per step"
        note += f"; loss {last.losses[0]:.4f} to {last.losses[-1]:.4f}"
        yield result | {"ratio": result["median"] / best, "note": note}


def start(bench: Bench, contender: Contender, cached: bool) -> Turn:
    """Seconds from the start of its process to the end of its first step. Ours is a whole train.py, up to there."""
    if not cached:
        shutil.rmtree(bench.cache, ignore_errors=True)
    if contender.peer != "flatland":
        begin = time.time()
        return Turn([bench.run(contender, 0).first - begin])
    data, (rows, seq_len, vocab_size) = bench.folder / "tokens.bin", bench.shape
    if not data.exists():
        tokens, _ = random_tokens(20 * rows, seq_len, vocab_size)
        write_shard(data, tokens.flatten().numpy().astype("uint16"), vocab_size)
    flags = [*bench.flags, "--data", data, "--val_data", data, "--steps", 1, "--eval_every", 0]
    flags += [] if contender.compile else ["--compile", "none"]
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        run = train_run(Path(folder, "run"), flags, env={"TORCHINDUCTOR_CACHE_DIR": str(bench.cache)})
    return Turn([sum(run.parts.get(part, 0.0) for part in ("start", "data", "compile"))])


def bench_start(bench: Bench) -> Iterator[Row]:
    """With nothing cached by the compiler, with all of it, uncompiled. Ratios to the fastest uncompiled peer."""
    contenders = {}
    for peer in ("flatland", *bench.peers):
        for how in ("compiled, nothing cached", "compiled, cached", "uncompiled"):
            contender = Contender(peer, bench.mixed, compile=how != "uncompiled")
            contenders[f"{peer}, {how}"] = partial(start, bench, contender, how != "compiled, nothing cached")
    turns = race(contenders, max(1, bench.args.repeats // 3))
    seconds = {name: [second for turn in several for second in turn.seconds] for name, several in turns.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peers = [medians[f"{peer}, uncompiled"] for peer in bench.peers]
    for name, took in medians.items():
        result = row(f"{bench.title}, start to end of the first step", name, took, "s", took / min(peers, default=took))
        yield result | {"p10": min(seconds[name]), "p90": max(seconds[name])}


KINDS = {
    "shipped": partial(bench_race, allocator=False),
    "allocator": partial(bench_race, allocator=True),
    "start": bench_start,
}
PARTS = [f"{shape}-{kind}" for shape in SHAPES for kind in KINDS]


def bench_cpu(args: Namespace) -> Iterator[Row]:
    """Training on a CPU: full steps (forward, loss, backward, clipping, AdamW), ours against peers."""
    if args.tiny:
        yield row("--tiny", "small shapes under the names of the large ones: the figures say nothing")
    for shape in SHAPES:
        parts = {f"{shape}-{kind}": work for kind, work in KINDS.items() if f"{shape}-{kind}" in args.parts}
        if not parts:
            continue
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(shape, args, Path(folder))
            yield from check(bench)
            for part, work in parts.items() if args.repeats else ():
                yield from guarded(part, "all", work(bench))
