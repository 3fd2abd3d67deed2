"""What the suites share: rows of results, contenders that take turns, and runs of train.py.

The processes that train peers import this file too, and their start is measured: it imports little."""

import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from lib.errors import ROOT, Failure  # first: it finds the Python that has torch

import numpy as np  # isort: skip
import torch

Row = dict[str, str | float | None]


def row(
    case: str, what: str, value: float | None = None, unit: str = "", ratio: float | None = None, note: str = ""
) -> Row:
    """case and what name it: `compare` finds it by them in another file of results. Figures and note may change."""
    figures = {"median": value, "p10": value, "p90": value, "unit": unit, "ratio": ratio}
    return {"case": case, "what": what} | figures | {"note": note}


def failed(case: str, what: str, why: object) -> Row:
    return row(case, what, note=f"failed: {' '.join(str(why).split())[:400]}")


def guarded(case: str, what: str, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows. An error, even one that would end the process, becomes the last of them: the others go on."""
    try:
        yield from rows
    except ImportError as error:
        yield row(case, what, note=f"not here: {error}")
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        yield failed(case, what, f"{type(error).__name__}: {error}")


# ---- turns


class Turn(NamedTuple):
    """Some steps of a contender."""

    seconds: list[float]  # of each
    peak: int = 0  # bytes of memory; on a GPU those beyond what was held before
    faults: float = 0.0  # page faults per step
    losses: tuple[float, ...] = ()  # of the step before the timed ones, and of these
    norm: float = 0.0  # of the gradients of the step before
    first: float = 0.0  # time.time() at the end of the step before


def timed(step: Callable[[], object], count: int = 1, cuda: bool = False) -> Turn:
    """Calls `step` so many times. On a GPU its events are the clock, and nothing waits between the calls."""
    if not cuda:
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return Turn([end - begin for begin, end in pairwise(marks)])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
    return Turn(seconds, torch.cuda.max_memory_allocated() - held)


def race(
    case: str, unit: str, amount: float, works: dict[str, Callable], rounds: int, take_turn: Callable = timed,
    note: Callable[[str, float, list[Turn]], str] = lambda *_: "", warm_up: bool = True,
) -> Iterator[Row]:  # fmt: skip
    """A row for each function, which does `amount` of work per step; its median is work per second, or with the unit
    "s" seconds. First comes a turn of each that is not measured, and what fails in it is left out. Then they take
    turns, so that whatever else the machine does meets them alike. Ratios are to the first function's. note(name,
    median, turns). Without rounds nothing is done."""
    turns, first = {}, None

    def start(name: str) -> Iterator[Row]:
        if warm_up:
            take_turn(works[name])
        turns[name] = []
        yield from ()

    for name in works if rounds else ():
        yield from guarded(case, name, start(name))
    for _ in range(rounds):
        for name, several in turns.items():
            several.append(take_turn(works[name]))
    for name, several in turns.items():
        seconds = np.concatenate([turn.seconds for turn in several])
        low, median, high = np.quantile(seconds if unit == "s" else amount / seconds, (0.1, 0.5, 0.9)).tolist()
        first = first or median
        yield row(case, name, median, unit, median / first, note(name, median, several)) | {"p10": low, "p90": high}


def require_same(what: str, *results) -> None:
    if any(result != results[0] for result in results):
        raise Failure(f"{what}: the results differ, so there is nothing to compare")


def peak_rss(reset: bool = False) -> int:
    """Bytes; since the last reset (Linux: proc(5), clear_refs)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


# ---- processes


def python_command(words: tuple, processes: int) -> list[str]:
    """That runs one of our scripts, by torchrun if there are several processes."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    return [str(word) for word in (sys.executable, *(launch if processes > 1 else []), *words)]


def run_python(*words, processes: int = 1, env: dict[str, str] | None = None) -> str:
    """Runs one of our scripts -> what it prints. env: added to the environment."""
    command = python_command(words, processes)
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True, timeout=1800)
    if done.returncode:
        message = done.stderr.strip()[-2000:] or "it said nothing"
        raise Failure(f"{' '.join(command)[:1000]} ended with {done.returncode}: {message}")
    return done.stdout


def rows_of(*words, processes: int = 1, env: dict[str, str] | None = None, limit: float = 1800.0) -> Iterator[Row]:
    """Runs one of our scripts -> the rows that it prints as JSON, as they come. It is killed after `limit` seconds."""
    command = ["timeout", "--signal=KILL", str(limit), *python_command(words, processes)]
    with subprocess.Popen(command, env=os.environ | (env or {}), stdout=subprocess.PIPE, text=True) as process:
        yield from (json.loads(line) for line in process.stdout if line.startswith('{"case"'))
    if process.returncode:
        killed = process.returncode in (137, -9)
        raise Failure(f"killed after {limit:.0f} s" if killed else f"ended with {process.returncode}")


class Run(NamedTuple):
    """A finished run of train.py. parts: seconds of each."""

    records: list[dict]
    parts: dict[str, float]

    @property
    def speed(self) -> float:
        """Tokens/s after the first fifth of the steps: the median of its records."""
        steps = self.records[-1]["step"]
        return float(np.median([r["tok_per_s"] for r in self.records if r["step"] > max(1, steps / 5)]))

    @property
    def loss(self) -> float | None:
        """Of the validation at the end."""
        return self.records[-1].get("val_loss")

    @property
    def memory(self) -> float:
        """GiB, the peak of the rank that has most."""
        return self.records[-1]["mem_gib"]


def train_run(out: Path, flags: list, processes: int = 1, env: dict[str, str] | None = None) -> Run:
    run_python(ROOT / "train.py", *flags, "--out", out, processes=processes, env=env)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    parts = re.search(r"Time taken: .*\((.*)\)", (out / "log.txt").read_text())[1]
    seconds = {name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+)", parts)}
    return Run([record for record in records if "loss" in record], seconds)  # others tell of what came later
