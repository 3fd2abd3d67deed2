"""The CPU suite of bench.py: whole training steps, ours against peers.

    python bench.py --suite cpu [--peers NAME ...] [--nanogpt FOLDER] [--parts NAME ...] [--repeats N]

Peak memory, page faults, the allocator and the time to start belong to a process: so each contender has its own
(bench_peers.py), and they take turns, a step at a time, while the others sleep on a pipe. Ours is what `python
train.py` does with these flags; a whole run of it stands beside. Weights and tokens are the same for all.

A contender whose loss or gradients are others, in fp32 or bf16, is refused: nothing fast and wrong is timed."""

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from errors import ROOT  # first: it finds the Python that has torch

import torch  # isort: skip
from bench_peers import PEERS, SIDE
from bench_rows import Row, note, rank_environments, spread
from config import Config, parse_args
from data import write_shard
from machine import available_memory
from model import flops_per_token
from preflight import resolve

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
PRODUCTS = 20  # matrix products per turn, of which the fastest counts
SAME = {"fp32": 1e-5, "gradient": 1e-4, "bf16": 2.0**-8}  # relative; the last is one rounding
ROOM = 5e9  # bytes of memory to be free before a contender starts
ENOUGH = {"as shipped": 1.5, "same allocator": 1.15, "share": 0.5, "start": 1.2}  # what we are to reach


class Contender(NamedTuple):
    name: str
    peer: str  # flatland, matmul or one of PEERS
    precision: str  # bf16-mixed: autocast, fp32 masters; bf16-true; 32-true
    compile: bool = True
    allocator: bool = False  # set to keep memory, from outside
    fused: bool = True
    processes: int = 1


@dataclass
class Bench:
    """A shape, and what all contenders share. folder: temporary."""

    shape: str
    args: Namespace
    folder: Path

    @property
    def flags(self) -> list[str]:
        return (TINY if self.args.tiny else SHAPES)[self.shape].split()

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

    def spec(self, contender: Contender, **more) -> str:
        config = self.config
        spec = {
            "peer": contender.peer, "precision": contender.precision, "fused": contender.fused,
            "compile": contender.compile and not self.args.tiny, "model": str(self.folder / f"{self.shape}-model"),
            "scaled": str(self.folder / f"{self.shape}-scaled"),
            "load": True, "check": False, "nanogpt": str(self.args.nanogpt), "rows": config.micro_batch,
            "seq_len": config.seq_len, "vocab_size": config.model_config.vocab_size,
            "flags": [*self.flags, "--micro_batch", str(config.micro_batch // contender.processes)],
        }  # fmt: skip
        return json.dumps(spec | more)


def missing(peer: str, shape: str, args: Namespace) -> str:
    """Why a peer cannot run here; empty if it can."""
    if peer == "nanogpt":
        if not args.nanogpt:
            return "--nanogpt FOLDER names a checkout of github.com/karpathy/nanoGPT"
        return "" if shape == "gpt2" else "GPT-2 only"
    if importlib.util.find_spec(peer) is None:
        return f"not installed: {sys.executable} -m pip install {peer}"
    return "no learned positions" if (peer, shape) == ("litgpt", "gpt2") else ""


def there(bench: Bench, peer: str) -> bool:
    return peer in bench.args.peers and not missing(peer, bench.shape, bench.args)


def peers_of(bench: Bench, allocator: bool) -> list[Contender]:
    """The peers at their fastest: compiled, with fused AdamW; in autocast, and in pure bf16 where they offer it."""
    label = ", allocator set" if allocator else ""
    out = []
    for peer in filter(partial(there, bench), PEERS):
        for precision in dict.fromkeys((bench.mixed, "bf16-true" if peer == "litgpt" else bench.mixed)):
            out.append(Contender(f"{peer}, {precision}, compiled{label}", peer, precision, allocator=allocator))
    return out


def ours(bench: Bench, **more) -> Contender:
    return Contender("flatland", "flatland", bench.mixed, **more)


# ---- processes


def environment(allocator: bool, cache: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    return kept | (ALLOCATOR if allocator else {}) | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}


class Failed(Exception):
    pass


class Running:
    """A contender's process (or processes), which has done its first step. seconds: from its start to then."""

    def __init__(self, bench: Bench, contender: Contender, cache: Path | None = None, **more):
        begin = time.perf_counter()
        env, self.log = environment(contender.allocator, cache or bench.folder / "cache"), bench.folder / "stderr.txt"
        envs = rank_environments(contender.processes) if contender.processes > 1 else [{}]
        if contender.processes > 1:
            env["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // contender.processes))
        words = [sys.executable, str(ROOT / "bench_peers.py"), bench.spec(contender, **more)]
        with open(self.log, "w") as log:
            self.processes = [
                subprocess.Popen(
                    words, env=own | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
                for own in envs
            ]
        try:
            self.first = self.answers()[0]
        except Failed:
            self.close()
            raise
        self.seconds = time.perf_counter() - begin

    def answers(self) -> list[dict]:
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            said = self.log.read_text(errors="replace").strip().splitlines()
            raise Failed(said[-1][:300] if said else "it said nothing")
        return [json.loads(line) for line in lines]

    def steps(self, n: int) -> dict:
        """-> seconds of each; loss of the last; faults, kernel seconds, bytes at the peak, of all processes."""
        for process in self.processes:
            process.stdin.write(f"{n}\n")
            process.stdin.flush()
        found = self.answers()
        total = {key: sum(one[key] for one in found) for key in ("faults", "kernel", "peak", "waiting")}
        slowest = [max(seconds) for seconds in zip(*(one["seconds"] for one in found), strict=True)]
        return total | {"seconds": slowest, "loss": found[0]["loss"]}

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def far(what: str, found: float, exact: float, bound: float) -> str:
    """Empty, or what is wrong."""
    error = abs(found - exact) / abs(exact)
    return "" if error <= bound else f"its {what} is {found:.6f}, ours {exact:.6f}: {error:.1e}, allowed {bound:.1e}"


def check(bench: Bench) -> Iterator[Row]:
    """Losses and gradients of a row of tokens, uncompiled. Drops the peers that differ from the suite's arguments."""
    case, exact = f"{bench.title}: same weights, same tokens", {}
    for peer in ["flatland", *bench.args.peers]:
        if why := peer in PEERS and missing(peer, bench.shape, bench.args):
            yield note(case, f"{peer}: skipped: {why}")
            continue
        try:
            running = Running(bench, Contender(peer, peer, bench.mixed), check=True)
        except Failed as error:
            if peer == "flatland":
                raise SystemExit(f"our own model failed: {error}") from None
            bench.args.peers.remove(peer)
            yield note(case, f"{peer}: failed: {error}")
            continue
        found = running.first
        running.close()
        exact = exact or found
        faults = [far(what, found[what], exact["fp32" if what == "bf16" else what], SAME[what]) for what in SAME]
        if any(faults):
            bench.args.peers.remove(peer)
        said = (
            f"refused: {'; '.join(filter(None, faults))}" if any(faults) else f"gradient norm {found['gradient']:.6f}"
        )
        yield note(
            case, f"{peer}: loss fp32 {found['fp32']:.6f}, bf16 {found['bf16']:.6f}; {said}", found["fp32"], "nats"
        )


# ---- races


def race(bench: Bench, case: str, contenders: list[Contender]) -> Iterator[Row]:
    """Ours, the first of them, against the others: a step of each in turn. Ratios to the fastest of the others."""
    running: dict[Contender, Running] = {}
    turns: dict[Contender, list[dict]] = {}
    limit = Contender(f"matmul {SIDE}^3, the fastest", "matmul", bench.mixed)
    tokens = bench.config.micro_batch * bench.config.seq_len
    flops = flops_per_token(bench.config.model_config, bench.config.seq_len)
    begin = time.perf_counter()
    try:
        for contender in [limit, *contenders]:
            room = available_memory()
            if not bench.args.tiny and 0 < room < ROOM:
                yield note(case, f"{contender.name}: skipped: only {room / 1e9:.1f} GB of memory are free")
                continue
            try:
                started = Running(bench, contender)
            except Failed as error:
                yield note(case, f"{contender.name}: failed: {error}")
                continue
            mine = running.get(contenders[0])
            loss = "first loss, compiled as it is timed,"
            if wrong := mine and far(loss, started.first["loss"], mine.first["loss"], SAME["bf16"]):
                yield note(case, f"{contender.name}: refused: {wrong}")
                started.close()
                continue
            running[contender] = started
        if contenders[0] not in running:
            return
        for turn in range(1 + bench.args.repeats):
            for contender, one in running.items():
                found = one.steps(PRODUCTS if contender is limit else 1)
                turns.setdefault(contender, []).extend([found] if turn else [])  # the first is for warming up
    except Failed as error:
        yield note(case, f"failed: {error}")
        return
    finally:
        for one in running.values():
            one.close()
    wall = (time.perf_counter() - begin) * max(1, len(running))
    peak = 2 * SIDE**3 / min(s for found in turns.pop(limit) for s in found["seconds"]) if limit in turns else 0.0
    yield note(case, f"the limit: {limit.name}", peak / 1e9, "GFLOP/s")
    waited = sum(found["waiting"] for several in turns.values() for found in several)
    yield note(case, "processor time of those whose turn it is not", 100 * waited / wall, "%")
    rows = []
    for contender, several in turns.items():
        rates = spread(tokens, [s for found in several for s in found["seconds"]])
        row = {
            "share": rates["median"] * flops / peak if peak else None,
            "peak_rss": several[-1]["peak"],
            "faults": statistics.median(found["faults"] for found in several),
            "kernel_s": statistics.median(found["kernel"] for found in several),
            "first_loss": running[contender].first["loss"],
            "loss": several[-1]["loss"],
        }
        what = (
            f"{contender.name}; {row['share'] or 0:.1%} of the limit; {row['peak_rss'] / 1e9:.2f} GB;"
            f" {row['faults']:.0f} faults, {row['kernel_s']:.2f} s in the kernel per step;"
            f" loss {row['first_loss']:.4f} to {row['loss']:.4f}"
        )
        rows.append({"case": case, "what": what, "unit": "tokens/s", **rates, **row})
    rows[1:] = sorted(rows[1:], key=lambda row: row["median"])
    yield from (row | {"ratio": row["median"] / rows[-1]["median"]} for row in rows)


def target(case: str, what: str, found: float, bound: float, most: bool = False) -> Row:
    """A row that says whether a bound is reached; ratio: found / bound."""
    reached = found <= bound if most else found >= bound
    text = f"target, {what}: {'at most' if most else 'at least'} {bound:.4g}: {'reached' if reached else 'NOT reached'}"
    return note(case, text, found, "", found / bound)


def bench_race(bench: Bench, allocator: bool) -> Iterator[Row]:
    kind = "same allocator" if allocator else "as shipped"
    case, timed = f"{bench.title}, {kind}", []
    for row in race(bench, case, [ours(bench), *peers_of(bench, allocator)]):
        timed += [row] if "share" in row else []
        yield row
    if not timed:
        return
    mine, others = timed[0], timed[1:]
    if others:
        best = max(others, key=lambda row: row["median"])
        name = best["what"].partition(";")[0]
        yield target(case, f"times the best peer ({name})", mine["median"] / best["median"], ENOUGH[kind])
        masters = [row for row in others if "bf16-true" not in row["what"]]
        for which, several in (("peers", others), ("peers that keep fp32 masters, as ours does", masters)):
            if several:
                least = min(row["peak_rss"] for row in several) / 1e9
                yield target(case, f"peak GB, the least of the {which}", mine["peak_rss"] / 1e9, least, most=True)
    if mine["share"]:
        yield target(case, f"share of the {bench.config.dtype} matmul peak", mine["share"], ENOUGH["share"])


def bench_shipped(bench: Bench) -> Iterator[Row]:
    yield from bench_race(bench, allocator=False)


def bench_allocator(bench: Bench) -> Iterator[Row]:
    yield from bench_race(bench, allocator=True)


def bench_others(bench: Bench) -> Iterator[Row]:
    """Two processes, a thread each, instead of one; peers uncompiled, and in fp32; then a whole run of train.py."""
    case, timed = f"{bench.title}, others", {}
    contenders = [ours(bench), ours(bench, processes=2)._replace(name="flatland in 2 processes")]
    if there(bench, "transformers"):
        contenders.append(Contender(f"transformers, {bench.mixed}, uncompiled", "transformers", bench.mixed, False))
    if there(bench, "nanogpt") and bench.mixed != "32-true":
        contenders.append(Contender("nanogpt, 32-true, compiled, AdamW unfused", "nanogpt", "32-true", fused=False))
    for row in race(bench, case, contenders):
        yield row
        if "share" in row:
            timed[row["what"].partition(";")[0]] = row["median"]
    if mine := timed.get("flatland"):
        if two := timed.get("flatland in 2 processes"):
            yield note(case, "one process over two (gloo, FSDP)", mine / two, "", mine / two)
        run = whole_run(bench, bench.folder / "cache", 3 + bench.args.repeats)
        seconds = [bench.config.micro_batch * bench.config.seq_len / r["tok_per_s"] for r in run["records"][2:]]
        rates = spread(bench.config.micro_batch * bench.config.seq_len, seconds)
        what = f"python train.py, whole; {run['records'][-1]['mem_gib'] * 2**30 / 1e9:.2f} GB; ratio to the step alone"
        yield {"case": case, "what": what, "unit": "tokens/s", **rates, "ratio": rates["median"] / mine}


def whole_run(bench: Bench, cache: Path, steps: int, *more: str) -> dict:
    """python train.py -> its records, and the seconds from its start to the end of the first step."""
    data, config = bench.folder / f"{bench.shape}.bin", bench.config
    vocab, n = config.model_config.vocab_size, config.micro_batch * config.seq_len * 20
    if not data.exists():
        tokens = torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(0))
        write_shard(data, tokens.numpy().astype("uint16"), vocab)
    with tempfile.TemporaryDirectory(dir=bench.folder) as out:
        flags = ["--data", str(data), "--val_data", str(data), "--steps", str(steps), "--log_every", "1", "--out", out]
        flags += ["--eval_every", "0", "--save_every", "0", "--sample_every", "0", *more]
        words = [sys.executable, str(ROOT / "train.py"), *bench.flags, *flags]
        done = subprocess.run(words, env=environment(False, cache), capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"train.py: {done.stderr.strip().splitlines()[-1][:300]}")
        records = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    spent = dict(re.findall(r"(start|data|compile) ([\d.]+)", done.stdout.rpartition("Time taken")[2]))
    return {"records": records, "first step": sum(map(float, spent.values()))}


# ---- starting


def bench_start(bench: Bench) -> Iterator[Row]:
    """From the start of the process to the end of the first step: with nothing cached by the compiler, with all of it,
    uncompiled. Ours is a whole train.py, up to there. Ratios to the fastest uncompiled peer."""
    case = f"{bench.title}, start to end of the first step"
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(max(1, bench.args.repeats // 3)):
        for peer in ["flatland", *dict.fromkeys(c.peer for c in peers_of(bench, False))]:
            with tempfile.TemporaryDirectory(dir=bench.folder) as cache:
                for how in ("compiled, nothing cached", "compiled, cached", "uncompiled"):
                    if peer == "flatland":
                        more = ["--compile", "none"] if how == "uncompiled" else []
                        took = whole_run(bench, Path(cache), 1, *more)["first step"]
                    else:
                        contender = Contender(peer, peer, bench.mixed, how != "uncompiled")
                        running = Running(bench, contender, Path(cache), load=False)
                        took = running.seconds
                        running.close()
                    seconds.setdefault((peer, how), []).append(took)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    fastest = min((m for (peer, how), m in medians.items() if peer != "flatland" and how == "uncompiled"), default=None)
    for (peer, how), values in seconds.items():
        row = {"case": case, "what": f"{peer}, {how}", "unit": "s", "median": medians[peer, how]}
        ratio = medians[peer, how] / fastest if fastest else None
        yield row | {"p10": min(values), "p90": max(values), "ratio": ratio}
    for how in ("compiled, nothing cached", "compiled, cached", "uncompiled") if fastest else ():
        found = medians["flatland", how] / fastest
        yield target(case, f"flatland, {how}, of the fastest uncompiled peer", found, ENOUGH["start"], most=True)


KINDS = {"shipped": bench_shipped, "allocator": bench_allocator, "others": bench_others, "start": bench_start}
PARTS = [f"{shape}-{kind}" for shape in SHAPES for kind in KINDS]


def bench_cpu(args: Namespace) -> Iterator[Row]:
    """Training on a CPU: full steps (forward, loss, backward, clipping, AdamW), ours against peers."""
    if args.tiny:
        yield note("--tiny", "small shapes under the names of the large ones: the figures say nothing")
    for shape in SHAPES:
        kinds = [kind for kind in KINDS if f"{shape}-{kind}" in args.parts]
        if not kinds:
            continue
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(shape, Namespace(**vars(args) | {"peers": list(args.peers)}), Path(folder))
            yield from check(bench)
            for kind in [] if args.check else kinds:
                try:
                    yield from KINDS[kind](bench)
                except Failed as error:
                    yield note(f"{shape}-{kind}", f"failed: {error}")
