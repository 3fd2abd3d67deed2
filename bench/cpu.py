"""Training on a CPU: whole steps, ours against peers.

Peak memory, page faults, the allocator and the time to start belong to a process: so a contender trains in one of its
own (peers.py), a few steps at a time, and contenders take turns. Ours is what `python train.py` does with these flags.
Weights and tokens are the same for all. A contender whose loss or gradients are others, in fp32 or bf16, is refused:
nothing fast and wrong is timed."""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from common import Failed, Row, row, speed_row, train_run, with_ratios  # first: it finds the Python that has torch

import torch  # isort: skip
from check import resolve
from config import Config, parse_args
from machine import available_memory
from model import flops_per_token
from peers import PEERS, SIDE, random_tokens
from prepare import write_shard

SHAPES = {
    "llama": "--model llama2-7b --vocab_size 32000 --dim 512 --n_layers 8 --n_heads 8 --n_kv_heads 4 --ffn_dim 1408"
    " --seq_len 512 --micro_batch 8",
    "gpt2": "--model gpt2 --vocab_size 50304 --dim 384 --n_layers 6 --n_heads 6 --ffn_dim 1536"
    " --seq_len 256 --micro_batch 12",
}
TINY = {"llama": "--model tiny-llama --seq_len 32 --micro_batch 2 --compile none",
        "gpt2": "--model tiny-gpt2 --seq_len 32 --micro_batch 2 --compile none"}  # fmt: skip
# What machine.keep_memory sets, as glibc's environment variables (mallopt(3)).
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**28)}
TOLERANCE = {"fp32": 1e-5, "gradient": 1e-4, "bf16": 2.0**-8}  # relative; the last is one rounding
ROOM = 5e9  # bytes of memory to be free before a contender starts
STEPS = 4  # of a turn, of which the first is not counted


class Contender(NamedTuple):
    name: str
    peer: str  # flatland, matmul or one of PEERS
    precision: str  # bf16-mixed: autocast, fp32 masters; bf16-true; 32-true
    compile: bool = True
    allocator: bool = False  # set to keep memory, from outside


@dataclass
class Bench:
    """A shape, and what all contenders share. peers: those that are left. folder: temporary."""

    shape: str
    args: Namespace
    folder: Path

    def __post_init__(self):
        self.peers = [peer for peer in PEERS if peer in self.args.peers and not self.missing(peer)]
        self.flags = (TINY if self.args.tiny else SHAPES)[self.shape].split()
        self.cache = self.folder / "cache"

    @cached_property
    def config(self) -> Config:
        return resolve(parse_args(self.flags), torch.device("cpu"), 1)

    @property
    def mixed(self) -> str:
        return "bf16-mixed" if self.config.dtype == "bf16" else "32-true"

    @property
    def title(self) -> str:
        c = self.config.model_config
        return f"{self.shape}: {c.n_layers} layers of {c.dim}, {self.config.micro_batch} x {self.config.seq_len}"

    def missing(self, peer: str) -> str:
        """Why a peer cannot run here; empty if it can."""
        if peer == "nanogpt" and not self.args.nanogpt:
            return "--nanogpt FOLDER names a checkout of github.com/karpathy/nanoGPT"
        if (peer, self.shape) in (("nanogpt", "llama"), ("litgpt", "gpt2")):
            return f"it has no {self.shape}"
        return (
            ""
            if peer == "nanogpt" or importlib.util.find_spec(peer)
            else f"not installed: {sys.executable} -m pip install {peer}"
        )

    def contenders(self, allocator: bool = False) -> list[Contender]:
        """Ours; then the peers at their fastest: compiled, with fused AdamW, in autocast; and litgpt in pure bf16."""
        contenders = [Contender("flatland", "flatland", self.mixed)]
        for peer in self.peers:
            for precision in dict.fromkeys((self.mixed, "bf16-true" if peer == "litgpt" else self.mixed)):
                name = f"{peer}, {precision}, compiled{', allocator set' * allocator}"
                contenders.append(Contender(name, peer, precision, allocator=allocator))
        return contenders

    def run(self, contender: Contender, steps: int, check: bool = False) -> dict:
        """One turn of a contender, in a process of its own; start: seconds until its first step had ended."""
        room = available_memory()
        if not self.args.tiny and 0 < room < ROOM:
            raise Failed(f"only {room / 1e9:.1f} GB of memory are free")
        config = self.config
        spec = contender._asdict() | {
            "model": str(self.folder / "model"), "scaled": str(self.folder / "scaled"), "load": steps > 0,
            "check": check,
            "nanogpt": str(self.args.nanogpt), "compile": contender.compile and not self.args.tiny, "steps": steps,
            "rows": config.micro_batch, "seq_len": config.seq_len, "vocab_size": config.model_config.vocab_size,
            "flags": [*self.flags, *([] if contender.compile else ["--compile", "none"])],
        }  # fmt: skip
        env = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
        env |= {"TORCHINDUCTOR_CACHE_DIR": str(self.cache)} | (ALLOCATOR if contender.allocator else {})
        command, begin = [sys.executable, Path(__file__).with_name("peers.py"), json.dumps(spec)], time.time()
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise Failed(done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else "it said nothing")
        result = json.loads(done.stdout)
        return result | {"start": result.get("first", begin) - begin}


def deviation(what: str, value: float, ours: float, bound: float) -> str:
    """Empty, or what is wrong."""
    error = abs(value - ours) / abs(ours)
    return "" if error <= bound else f"its {what} is {value:.6f}, ours {ours:.6f}: {error:.1e}, allowed {bound:.1e}"


def check(bench: Bench) -> Iterator[Row]:
    """Losses and gradients of a row of tokens, uncompiled. Drops the peers that differ."""
    case, ours = f"{bench.title}: same weights, same tokens", {}
    for peer in (peer for peer in bench.args.peers if bench.missing(peer)):
        yield row(case, f"{peer}: skipped: {bench.missing(peer)}")
    for peer in ["flatland", *bench.peers]:
        try:
            result = bench.run(Contender(peer, peer, bench.mixed), 0, check=True)
        except Failed as error:
            if peer == "flatland":
                raise SystemExit(f"our own model failed: {error}") from None
            bench.peers.remove(peer)
            yield row(case, f"{peer}: failed: {error}")
            continue
        ours = ours or result
        exact = ours | {"bf16": ours["fp32"]}
        faults = [deviation(what, result[what], exact[what], bound) for what, bound in TOLERANCE.items()]
        verdict = "; ".join(filter(None, faults))
        if verdict:
            bench.peers.remove(peer)
        said = f"refused: {verdict}" if verdict else f"gradient norm {result['gradient']:.6f}"
        values = f"{peer}: loss fp32 {result['fp32']:.6f}, bf16 {result['bf16']:.6f}"
        yield row(case, f"{values}; {said}", result["fp32"], "nats")


def bench_race(bench: Bench, allocator: bool) -> Iterator[Row]:
    """Ours against the others, in turn. Ratios to the fastest of the others."""
    case = f"{bench.title}, {'same allocator' if allocator else 'as shipped'}"
    limit = Contender(f"matmul {SIDE}^3, the fastest", "matmul", bench.mixed)
    contenders, results, ours = [limit, *bench.contenders(allocator)], {}, None
    for turn in range(1 + bench.args.repeats):
        for contender in list(contenders):
            try:
                result = bench.run(contender, STEPS * (10 if contender is limit else 1))
            except Failed as error:
                yield row(case, f"{contender.name}: failed: {error}")
                contenders.remove(contender)
                continue
            loss, wrong = result["losses"][0], ""
            if contender is not limit:
                ours = ours or loss
                wrong = deviation("first loss, compiled as it is timed,", loss, ours, TOLERANCE["bf16"])
            if wrong:
                yield row(case, f"{contender.name}: refused: {wrong}")
                contenders.remove(contender)
            elif turn:  # the first is for compiling
                results.setdefault(contender, []).append(result)
    peak = 2 * SIDE**3 / min((s for r in results.pop(limit, []) for s in r["seconds"]), default=float("inf"))
    yield row(case, f"the limit: {limit.name}", peak / 1e9, "GFLOP/s")
    rows, config = [], bench.config
    flops = flops_per_token(config.model_config, config.seq_len)
    for contender, several in results.items():
        seconds = [s for result in several for s in result["seconds"][1:]]
        this = speed_row(case, contender.name, "tokens/s", config.micro_batch * config.seq_len, seconds)
        faults, last = statistics.median(result["faults"] for result in several), several[-1]
        share = this["median"] * flops / peak if peak else 0.0
        this["what"] += f"; {share:.1%} of the limit; {last['peak'] / 1e9:.2f} GB; {faults:.0f} faults per step"
        this["what"] += f"; loss {last['losses'][0]:.4f} to {last['losses'][-1]:.4f}"
        rows.append(this)
    yield from with_ratios(rows[:1] + sorted(rows[1:], key=lambda row: row["median"]))


def start_of_train(bench: Bench, contender: Contender) -> float:
    """Seconds from the start of `python train.py` to the end of its first step."""
    data, c = bench.folder / "tokens.bin", bench.config
    if not data.exists():
        tokens, _ = random_tokens(20 * c.micro_batch, c.seq_len, c.model_config.vocab_size)
        write_shard(data, tokens.flatten().numpy().astype("uint16"), c.model_config.vocab_size)
    flags = [*bench.flags, "--data", data, "--val_data", data, "--steps", 1, "--eval_every", 0]
    flags += [] if contender.compile else ["--compile", "none"]
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        run = train_run(Path(folder, "run"), flags, env={"TORCHINDUCTOR_CACHE_DIR": str(bench.cache)})
    return sum(run.parts.get(part, 0.0) for part in ("start", "data", "compile"))


def bench_start(bench: Bench) -> Iterator[Row]:
    """From the start of the process to the end of the first step: with nothing cached by the compiler, with all of it,
    uncompiled. Ours is a whole train.py, up to there. Ratios to the fastest uncompiled peer."""
    case, seconds = f"{bench.title}, start to end of the first step", {}
    for _ in range(max(1, bench.args.repeats // 3)):
        for contender in {c.peer: c for c in bench.contenders()[::-1]}.values():
            with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
                bench.cache = Path(folder)
                for how in ("compiled, nothing cached", "compiled, cached", "uncompiled"):
                    this = contender._replace(compile=how != "uncompiled")
                    took = start_of_train(bench, this) if this.peer == "flatland" else bench.run(this, 0)["start"]
                    seconds.setdefault((contender.peer, how), []).append(took)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    fastest = min((m for (peer, how), m in medians.items() if peer != "flatland" and how == "uncompiled"), default=None)
    for (peer, how), values in seconds.items():
        took = medians[peer, how]
        result = row(case, f"{peer}, {how}", took, "s", took / fastest if fastest else None)
        yield result | {"p10": min(values), "p90": max(values)}


KINDS = ("shipped", "allocator", "start")
PARTS = [f"{shape}-{kind}" for shape in SHAPES for kind in KINDS]


def bench_cpu(args: Namespace) -> Iterator[Row]:
    """Training on a CPU: full steps (forward, loss, backward, clipping, AdamW), ours against peers."""
    if args.tiny:
        yield row("--tiny", "small shapes under the names of the large ones: the figures say nothing")
    for shape in SHAPES:
        kinds = [kind for kind in KINDS if f"{shape}-{kind}" in args.parts]
        if not kinds:
            continue
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(shape, args, Path(folder))
            yield from check(bench)
            for kind in [] if args.check else kinds:
                try:
                    yield from bench_start(bench) if kind == "start" else bench_race(bench, kind == "allocator")
                except Failed as error:
                    yield row(f"{shape}-{kind}", f"failed: {error}")
