"""The records of a run in metrics.jsonl, and their curves.

    python -m lib.curves RUN        draws RUN/curves.png

A run draws in another process, which needs no torch, while it trains on. A picture shows at most POINTS records of
steps and as many with a validation, evenly spaced, so a million records cost little more than a thousand: one pass over
the file, and only the records that are drawn are parsed."""

import contextlib
import json
import logging
import os
import sys
from pathlib import Path

from lib.errors import UserError

PANELS = {  # fields of metrics.jsonl, and their labels
    "loss": "loss (nats per token)",
    "val_bpb": "validation (bits per byte)",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tok_per_s": "tokens per second",
    "mem_gib": "memory (GiB)",
}
DOTS = {"marker": "o", "ls": "--"}
STYLES = {  # the name in the legend and the style of fields
    "loss": ("training", {"alpha": 0.35}),
    "mean_loss": ("training, running mean", {}),
    "val_loss": ("validation", DOTS),
    "val_bpb": ("", DOTS),
}
POINTS = 2000
logger = logging.getLogger("flatland")


def read_records(folder: Path) -> list[dict]:
    """The records of a run. Damaged lines are left out and reported."""
    path = folder / "metrics.jsonl"
    return _parse(path, path.read_text(errors="replace").splitlines() if path.exists() else [])


def _parse(path: Path, lines: list[str]) -> list[dict]:
    records = []
    for line in lines:
        record = None
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        else:
            logger.warning(f"{path}: left out a damaged line: {line[:60]}")
    return records


def _sample(path: Path) -> list[dict]:
    """Records of steps with a finite loss, evenly spaced, and so the ones with a validation."""
    with open(path, errors="replace") as file:
        lines = [line for line in file if '"loss": ' in line and '"loss": null' not in line]
    validated = [i for i, line in enumerate(lines) if '"val_loss": ' in line]
    chosen = {*range(0, len(lines), 1 + len(lines) // POINTS), *validated[:: 1 + len(validated) // POINTS]}
    return [
        record for record in _parse(path, [lines[i] for i in sorted(chosen)]) if isinstance(record.get("loss"), float)
    ]


def draw_runs(folders: list[Path], out: Path) -> None:
    """Draws the curves of runs into one picture."""
    from matplotlib.figure import Figure

    x = "step" if len(folders) == 1 else "tokens"
    figure = Figure(figsize=(10, 9), layout="constrained")
    panels = dict(zip(PANELS, figure.subplots(3, 2, sharex=True).flat, strict=True))
    for number, folder in enumerate(folders):
        records = _sample(folder / "metrics.jsonl")
        _add_running_mean(records)
        for key in (*PANELS, "mean_loss", "val_loss"):
            name, style = STYLES.get(key, ("", {}))
            rows = [(r[x], r[key]) for r in records if r.get(key) is not None]
            if rows:
                axis, label = panels.get(key, panels["loss"]), f"{folder.name}: {name}"
                axis.plot(*zip(*rows, strict=True), color=f"C{number}", label=label, **style)
    for key, axis in panels.items():
        axis.set(ylabel=PANELS[key], xlabel=x)
        axis.grid(alpha=0.3)
    panels["grad_norm"].set_yscale("log")
    panels["loss"].legend(fontsize=8)
    try:
        figure.savefig(out, dpi=100)
    except ValueError as e:  # matplotlib does not know the suffix
        raise UserError(f"-o {out}: {e}") from None


def _add_running_mean(records: list[dict]) -> None:
    size, mean = max(1, len(records) // 50), records[0]["loss"] if records else 0.0
    for record in records:
        mean += (record["loss"] - mean) / size
        record["mean_loss"] = mean


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw_runs([folder], folder / "curves.tmp.png")
    os.replace(folder / "curves.tmp.png", folder / "curves.png")
