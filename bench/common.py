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

from lib.errors import Failure  # first: it finds the Python that has torch

import numpy as np  # isort: skip

Row = dict[str, str | float | None]
COLUMNS = ("case", "what", "median", "unit", "p10", "p90", "ratio", "mfu", "gib", "note")


class Turn(NamedTuple):
    """Measured steps of a contender. gib: peak memory. norm: gradient norm of the first step."""

    seconds: list[float]
    gib: float | None = None
    losses: list[float] | None = None
    norm: float = 0.0
    mfu: float | None = None


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
        last = several[-1]
        first = first or (median, last.mfu)
        ratio = median / first[0]
        mfu = first[1] and first[1] * ratio  # of the same model
        note = f"loss {last.losses[0]:.4f} to {last.losses[-1]:.4f}" if last.losses else ""
        yield row(case, name, note, unit=unit, median=median, p10=low, p90=high, ratio=ratio, mfu=mfu, gib=last.gib)


def train(command: list[object], out: Path, steps: int, limit: float) -> Turn:
    """Runs a trainer until out/metrics.jsonl has the record of step `steps`, and kills it: a finished train.py would
    write a checkpoint. The first two records are warm-up."""
    end, records, output = time.monotonic() + limit, [], out.with_suffix(".log")
    with open(output, "w") as file:
        process = subprocess.Popen([sys.executable, *map(str, command)], stdout=file, stderr=file)
    try:
        while not (records and records[-1]["step"] >= steps):
            if time.monotonic() > end:
                raise Failure(f"it was stopped after {limit:.0f} s, at step {records[-1]['step'] if records else 0}")
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
    last, losses = records[-1], [record["loss"] for record in records]
    return Turn(
        [r["step_ms"] / 1e3 for r in records[2:]], last["mem_gib"], losses, records[0]["grad_norm"], last.get("mfu")
    )
