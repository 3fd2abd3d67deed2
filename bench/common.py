"""Shared by the suites: rows of results, and contenders that take turns.

Names of contenders: `flatland --fp8 tensor` is train.py with further flags; `litgpt, mixed, compiled` is a peer, its
precision, and torch.compile."""

import json
import math
import subprocess
import sys
import tempfile
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
    records: list[dict] = []


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
            except (Failure, RuntimeError) as error:
                del turns[name]
                kind = "not available" if "ModuleNotFoundError" in str(error) else "failed"
                yield row(case, name, f"{kind}: {' '.join(str(error).split()[-40:])}")
    first = None
    for name, several in turns.items():
        rates = amount / np.concatenate([turn.seconds for turn in several])
        low, median, high = np.quantile(rates, (0.1, 0.5, 0.9)).tolist()
        first = first or median
        values = {"unit": unit, "median": median, "p10": low, "p90": high, "ratio": median / first}
        if records := several[-1].records:
            losses = " ".join(f"{record.get('val_loss', record['loss']):.4f}" for record in records)
            values["note"] = f"{records[-1]['tokens']:,.0f} tokens, loss {losses}"
            values |= {"mfu": records[-1].get("mfu"), "gib": records[-1]["mem_gib"]}
        yield row(case, name, **values)


def train(command: list[object], count: int, limit: float = math.inf) -> Turn:
    """Runs a trainer, whose last argument is its run folder, until metrics.jsonl has `count` records of steps, and
    kills it: a finished train.py would write a checkpoint. The first two records are warm-up."""
    end, records = time.monotonic() + limit, []
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/output", "w") as output:
        metrics = Path(folder, "run", "metrics.jsonl")
        command = [sys.executable, *map(str, command), str(metrics.parent)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            while len(records) < count:
                if time.monotonic() > end:
                    raise Failure(f"it was stopped after {limit:.0f} s, with {len(records)} records")
                if process.poll() is not None:
                    raise Failure(f"status {process.poll()}: {Path(output.name).read_text()[-400:]}")
                time.sleep(0.2)
                lines = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.exists() else []
                records = [record for record in map(json.loads, lines) if "loss" in record][:count]
        finally:
            process.kill()
            process.wait()
    return Turn([record["step_ms"] / 1e3 for record in records[2:]], records)
