"""Shared by the suites: rows of results, and contenders that take turns.

Names of contenders: `flatland --fp8 tensor` is train.py with further flags; `litgpt, mixed, compiled` is a peer, its
precision, and torch.compile."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lib.errors import Failure

import numpy as np  # isort: skip

Row = dict[str, str | float | None]
COLUMNS = ("case", "what", "median", "unit", "p10", "p90", "ratio", "mfu", "gib", "note")


class Turn(NamedTuple):
    """Seconds of each measured step of a contender; for training, its records, which are like train.py's."""

    seconds: list[float]
    records: list[dict] = [{}]


def row(case: str, what: str, note: str = "", **values) -> Row:
    return dict.fromkeys(COLUMNS) | {"case": case, "what": what, "note": note} | values


def race(case: str, unit: str, amount: float, works: dict[str, Callable[[], Turn]], rounds: int) -> Iterator[Row]:
    """A row per contender: `amount` of work per step, divided by its seconds. Contenders take turns, so that other load
    on the machine affects all of them. Ratios are to the first. An error becomes a row, and the others continue."""
    turns: dict[str, list[Turn]] = {name: [] for name in works}
    for _ in range(rounds):
        for name in [*turns]:
            try:
                turns[name].append(works[name]())
            except (ImportError, Failure, RuntimeError) as error:
                del turns[name]
                kind = "not available" if isinstance(error, ImportError) else "failed"
                yield row(case, name, f"{kind}: {' '.join(str(error).split()[-40:])}")
    first = None
    for name, several in turns.items():
        rates = amount / np.concatenate([turn.seconds for turn in several])
        low, median, high = np.quantile(rates, (0.1, 0.5, 0.9)).tolist()
        first, records = first or median, several[-1].records
        note = f"loss {records[0]['loss']:.4f} to {records[-1]['loss']:.4f}" if "loss" in records[0] else ""
        values = {"median": median, "p10": low, "p90": high, "ratio": median / first, "note": note}
        yield row(case, name, unit=unit, **values, mfu=records[-1].get("mfu"), gib=records[-1].get("mem_gib"))


def train(command: list[object], out: Path, steps: int, limit: float) -> Turn:
    """Runs a trainer until out/metrics.jsonl has the record of step `steps`, and kills it: a finished train.py would
    write a checkpoint. The first two records are warm-up."""
    end, records, output = time.monotonic() + limit, [], out.with_suffix(".log")
    with open(output, "w") as file:
        process = subprocess.Popen([sys.executable, *map(str, command)], stdout=file, stderr=file)
    try:
        while not (records and records[-1]["step"] >= steps):
            if time.monotonic() > end:
                raise Failure(f"it was stopped after {limit:.0f} s, with {len(records)} records")
            if process.poll() is not None:
                why = f"status {process.poll()}: {output.read_text()[-400:]}"
                raise (ImportError if "ModuleNotFoundError" in why else Failure)(why)
            time.sleep(0.2)
            path = out / "metrics.jsonl"
            lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
            records = [record for record in map(json.loads, lines) if "loss" in record]
    finally:
        process.kill()
        process.wait()
    return Turn([record["step_ms"] / 1e3 for record in records[2:]], records)
