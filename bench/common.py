"""What the suites share: rows and the table they are printed in, contenders that take turns, runs of train.py, and the
machine that the figures are from."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from errors import ROOT  # first: it finds the Python that has torch

import numpy as np  # isort: skip
import torch

Row = dict[str, str | float | None]


class Failed(Exception):
    """A contender, or a run of train.py, ended with an error."""


def row(case: str, what: str, value: float | None = None, unit: str = "", ratio: float | None = None) -> Row:
    return {"case": case, "what": what, "unit": unit, "median": value, "p10": value, "p90": value, "ratio": ratio}


def speed_row(case: str, what: str, unit: str, amount: float, seconds: Sequence[float]) -> Row:
    """Amount per second: median, 10th and 90th percentile."""
    low, median, high = np.quantile(amount / np.array(seconds), (0.1, 0.5, 0.9)).tolist()
    return row(case, what, median, unit) | {"p10": low, "p90": high}


def with_ratios(rows: list[Row]) -> list[Row]:
    """Ratios are to the last row."""
    return [row | {"ratio": row["median"] / rows[-1]["median"]} for row in rows]


def table_line(row: Row) -> str:
    low, median, high = ("" if row[key] is None else f"{row[key]:.4g}" for key in ("p10", "median", "p90"))
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"| {row['case']} | {row['what']} | {median} {row['unit']} | {low} | {high} | {ratio} |"


def take_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Calls them in turn, once unmeasured and so many times measured -> the seconds of each call."""
    seconds = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, work in contenders.items():
            begin = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def race(case: str, unit: str, amount: float, contenders: dict[str, Callable], rounds: int) -> list[Row]:
    """A row for each contender, which does `amount` of work per call; no rounds: nothing is timed (--check)."""
    if not rounds:
        return []
    seconds = take_turns(contenders, rounds)
    return with_ratios([speed_row(case, name, unit, amount, values) for name, values in seconds.items()])


def require_same(what: str, *results) -> None:
    if any(result != results[0] for result in results):
        raise SystemExit(f"{what}: the results differ, so there is nothing to compare")


# ---- runs of train.py


@dataclass
class Run:
    """A finished run. wall: seconds, seen from outside; parts: its own account of them."""

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


def train_run(out: Path, flags: list, processes: int = 1, env: dict[str, str] | None = None) -> Run:
    """Trains in processes of its own. env: added to the environment."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    command = [sys.executable, *(launch if processes > 1 else []), ROOT / "train.py", *flags, "--out", out]
    command, begin = list(map(str, command)), time.perf_counter()
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True, timeout=900)
    wall = time.perf_counter() - begin
    if done.returncode:
        raise Failed(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    parts = re.search(r"Time taken: [\d.]+ seconds \((.*)\)", (out / "log.txt").read_text())[1]
    seconds = {name: float(s) for name, s in (part.rsplit(" ", 1) for part in parts.split(", "))}
    samples = out / "samples.txt"
    records = [record for record in records if "loss" in record]  # what came later is in records of its own
    return Run(records, wall, seconds, samples.read_text().count("--- step ") if samples.exists() else 0)


# ---- the machine


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun would tell each of so many processes on this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def peak_rss(reset: bool = False) -> int:
    """Bytes; since the last reset (Linux: proc(5), clear_refs)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


PACKAGES = ("torch", "transformers", "tokenizers", "sentencepiece", "tiktoken", "litgpt", "torchao")
SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "TORCH")  # that change what is measured


def describe_machine() -> dict[str, str | int | float]:
    """For the head of the results."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.search(r"^model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.M)
    machine = {"date": time.strftime("%Y-%m-%d %H:%M"), "cpu": cpu[1] if cpu else platform.machine()}
    machine |= {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    machine["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            machine[name] = version(name)
        except PackageNotFoundError:
            machine[name] = "not installed"
    machine |= {key: value for key, value in os.environ.items() if key.startswith(SETTINGS)}
    if torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version()
        machine |= {"gpu": torch.cuda.get_device_name(), "CUDA": torch.version.cuda, "cuDNN": cudnn}
    return machine
