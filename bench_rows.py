"""What every suite of bench.py uses: races, rows, and the machine that they are from."""

import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from torch.backends import cudnn

Row = dict[str, str | float | None]


def spread(amount: float, seconds: Sequence[float]) -> Row:
    """Amount per second: median, 10th and 90th percentile."""
    low, median, high = np.quantile(amount / np.array(seconds), (0.1, 0.5, 0.9)).tolist()
    return {"median": median, "p10": low, "p90": high}


def race(case: str, unit: str, amount: float, contenders: dict[str, Callable[[], object]], repeats: int) -> list[Row]:
    """Times contenders, each of which does `amount` of work per call -> a row for each, in amount per second."""
    if not repeats:  # --check
        return []
    seconds = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, work in contenders.items():
            begin = time.perf_counter()
            work()
            if turn:  # the first is the warm-up
                seconds[name].append(time.perf_counter() - begin)
    rows = [{"case": case, "what": name, "unit": unit, **spread(amount, values)} for name, values in seconds.items()]
    return [row | {"ratio": row["median"] / rows[-1]["median"]} for row in rows]


def same(what: str, *results) -> None:
    if any(result != results[0] for result in results):
        raise SystemExit(f"{what}: the results differ, so there is nothing to compare")


def note(case: str, what: str, value: float | None = None, unit: str = "", ratio: float | None = None) -> Row:
    """A row that is not of a race."""
    return {"case": case, "what": what, "unit": unit, "median": value, "p10": value, "p90": value, "ratio": ratio}


def in_table(row: Row) -> str:
    low, median, high = ("" if row[key] is None else f"{row[key]:.4g}" for key in ("p10", "median", "p90"))
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"| {row['case']} | {row['what']} | {median} {row['unit']} | {low} | {high} | {ratio} |"


def peak_rss(reset: bool = False) -> int:
    """Bytes; since the last reset (Linux: proc(5), clear_refs)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun would tell each of so many processes on this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    there = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    there["LOCAL_WORLD_SIZE"] = str(ranks)
    return [there | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


# ---- the machine

NEEDED, OPTIONAL = ("torch", "transformers", "tokenizers", "sentencepiece", "tiktoken"), ("litgpt", "torchao")
SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "TORCH")  # that change what is measured


def describe() -> dict[str, str | int | float]:
    """ImportError: a package that suites need is not installed."""
    cpu = dict(line.split(":", 1) for line in reversed(_lines("/proc/cpuinfo")) if ":" in line)
    cpu = {key.strip(): value.strip() for key, value in cpu.items()}
    out = {"date": time.strftime("%Y-%m-%d %H:%M"), "cpu": cpu.get("model name", platform.machine())}
    out |= {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "MHz": cpu.get("cpu MHz", "unknown")}
    out |= {"load": f"{os.getloadavg()[0]:.1f}", "busy": round(busy(), 2), "python": platform.python_version()}
    out |= {name: version(name) for name in NEEDED}
    for name in OPTIONAL:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "not installed"
    out |= {key: value for key, value in os.environ.items() if key.startswith(SETTINGS)}
    if torch.cuda.is_available():
        out |= {"gpu": torch.cuda.get_device_name(), "CUDA": torch.version.cuda, "cuDNN": cudnn.version()}
    return out


def busy(seconds: float = 1.0) -> float:
    """The share of all cores that others use, while this process sleeps; 0 where it is not known (proc(5), stat)."""
    seen = []
    for pause in (seconds, 0):
        lines = _lines("/proc/stat")
        if not lines:
            return 0.0
        values = [int(n) for n in lines[0].split()[1:9]]
        seen.append((sum(values), values[3] + values[4]))  # idle, and waiting for a disk
        time.sleep(pause)
    (total, idle), (total_then, idle_then) = seen[1], seen[0]
    return 1 - (idle - idle_then) / max(total - total_then, 1)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
