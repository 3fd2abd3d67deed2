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
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common import Row, Turn, failed, guarded, race, row, run_python, train_run  # first: it finds torch

import torch  # isort: skip

from lib.errors import Failure
from lib.machine import available_memory
from lib.weights import export_model
from model import Transformer, flops_per_token
from peers import SIDE, fill, our_config, random_tokens
from prepare import write_shard

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
        flags = [*self.flags, "--weights", f"{self.folder}/model"]
        flags += ["--dtype", "fp32" if contender.precision == "32-true" else "bf16"]
        flags += ["--compile", "block" if contender.compile else "none"]
        spec = contender._asdict() | {"flags": flags, "shape": self.shape, "steps": steps}
        spec |= {"model": f"{self.folder}/model", "nanogpt": str(self.args.nanogpt or "")}
        spec["compile"] &= not self.args.tiny
        env = {"TORCHINDUCTOR_CACHE_DIR": str(self.cache)} | (env or {})
        output = run_python(Path(__file__).with_name("peers.py"), json.dumps(spec), env=env)
        turn = json.loads(output.splitlines()[-1])
        if "missing" in turn:
            raise ImportError(turn["missing"])
        return Turn(**turn)

    def write_weights(self) -> None:
        """For all contenders: four times as large as those that are trained, for at their first values layers do so
        little that a wrong one hardly shows."""
        model = Transformer(self.config.model_config)
        fill(model, self.config, torch.device("cpu"))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(4 if p.ndim > 1 else 1)
        export_model(model, self.folder / "model")


# ---- the same results


def deviation(what: str, value: float, ours: float, bound: float) -> str:
    """Empty, or what is wrong."""
    error = abs(value - ours) / abs(ours)
    return "" if error <= bound else f"its {what} is {value:.6f}, ours {ours:.6f}: {error:.1e}, allowed {bound:.1e}"


def check(bench: Bench) -> Iterator[Row]:
    """The first loss in fp32 and bf16, and in fp32 the norm of the gradients, uncompiled. Drops the peers that differ
    or are not there."""
    case, exact, left = f"{bench.title}: same weights, same tokens", {}, []
    bench.write_weights()

    def judge(peer: str) -> Iterator[Row]:
        fp32, bf16 = (bench.run(Contender(peer, how, compile=False), 1) for how in ("32-true", "bf16-mixed"))
        results = {"fp32": fp32.losses[0], "gradient": fp32.norm, "bf16": bf16.losses[0]}
        exact.update(exact or results | {"bf16": results["fp32"]})  # ours come first
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
    limit, fastest, losses, rows = f"the limit: matmul {SIDE}^3, the fastest", [], [], []

    def turn(contender: Contender) -> Turn:
        env = ALLOCATOR if allocator and contender.peer != "flatland" else None
        result = bench.run(contender, STEPS, env)
        losses.append(result.losses[0])
        wrong = deviation("first loss, compiled as it is timed,", losses[-1], losses[0], TOLERANCE["bf16"])
        if wrong:
            raise Failure(wrong)
        return result

    def note(name: str, speed: float, turns: list[Turn]) -> str:
        if name == limit:  # it comes first
            fastest.append(2 * SIDE**3 / min(second for turn in turns for second in turn.seconds))
            return ""
        share = speed * flops_per_token(config.model_config, config.seq_len) / fastest[0]
        faults, last = statistics.median(turn.faults for turn in turns), turns[-1]
        text = f"{share:.1%} of the limit; {last.peak / 1e9:.2f} GB; {faults:.0f} faults per step"
        return f"{text}; loss {last.losses[0]:.4f} to {last.losses[-1]:.4f}"

    works = {limit: partial(bench.run, Contender("matmul", bench.mixed), 10 * STEPS)}
    works |= {f"{c.peer}, {c.precision}, compiled": partial(turn, c) for c in contenders}
    amount = config.micro_batch * config.seq_len
    for result in race(case, "tokens/s", amount, works, bench.args.repeats, lambda work: work(), note):
        if result["what"] == limit:
            yield row(case, limit, fastest[0] / 1e9, "GFLOP/s")
        elif result["median"]:
            rows.append(result)
        else:
            yield result
    best = max((result["median"] for result in rows[1:]), default=rows[0]["median"])
    yield from (result | {"ratio": result["median"] / best} for result in rows)


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
    flags += ["--compile", "block" if contender.compile else "none"]
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
    case, rounds = f"{bench.title}, start to end of the first step", max(1, bench.args.repeats // 3)
    rows = [*race(case, "s", 1, contenders, rounds, lambda work: work(), warm_up=False)]
    peers = [result["median"] for result in rows[3:] if result["what"].endswith("uncompiled")]
    yield from (result | {"ratio": result["median"] / min(peers, default=result["median"])} for result in rows)


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
