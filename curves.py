"""The records of a run in metrics.jsonl, and their curves.

It needs no torch."""

import contextlib
import itertools
import json
import logging
import sys
from pathlib import Path

DOTS = {"marker": "o", "ls": "--"}
LOSSES = {
    "loss": ("training", {"alpha": 0.35}),
    "mean_loss": ("training, running mean", {}),
    "val_loss": ("validation", DOTS),
}
# Titles of the panels, and the fields of metrics.jsonl in them, each with its name in the legend and its style.
ALWAYS = {
    "gradient norm": {"grad_norm": ("", {})},
    "learning rate": {"lr": ("", {})},
    "tokens per second": {"tok_per_s": ("", {})},
}
PANELS = {
    "loss (nats per token)": LOSSES,
    "validation (bits per byte)": {"val_bpb": ("", DOTS)},
    **ALWAYS,
    "memory (GiB)": {"mem_gib": ("", {})},
}
PAIRS = {  # of a run on pairs
    "loss (per pair)": LOSSES,
    "accuracy of the rewards": {"reward_accuracy": ("", {}), "val_reward_accuracy": ("", DOTS)},
    **ALWAYS,
    "margin of the rewards": {"reward_margin": ("", {}), "val_reward_margin": ("", DOTS)},
}
logger = logging.getLogger("flatland")


def read_records(folder: Path) -> list[dict]:
    """The records of a run. Damaged lines are left out and reported."""
    path, records = folder / "metrics.jsonl", []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        record = None
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        else:
            logger.warning(f"{path}: left out a damaged line: {line[:60]}")
    return records


def _select(records: list[dict]) -> list[dict]:
    """The records that are drawn, each with the mean loss of a fiftieth of them, but at least five, around it."""
    steps = [record for record in records if isinstance(record.get("loss"), float)]
    sums, beside = [0.0, *itertools.accumulate(record["loss"] for record in steps)], max(2, len(steps) // 100)
    for i, record in enumerate(steps):
        first, end = max(0, i - beside), min(len(steps), i + beside + 1)
        record["mean_loss"] = (sums[end] - sums[first]) / (end - first)
    return steps


def draw_runs(folders: list[Path], out: Path) -> None:
    """Draws the curves of runs into one picture."""
    from matplotlib.figure import Figure

    x = "step" if len(folders) == 1 else "tokens"
    figure, runs = Figure(figsize=(10, 9)), [_select(read_records(folder)) for folder in folders]
    has_pairs = any("reward_margin" in record for records in runs for record in records)
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.06, top=0.96, wspace=0.2, hspace=0.2)
    figure.supxlabel(x, y=0.005)
    panels = (PAIRS if has_pairs else PANELS).items()
    for axis, (title, fields) in zip(figure.subplots(3, 2, sharex=True).flat, panels, strict=True):
        for number, (folder, records) in enumerate(zip(folders, runs, strict=True)):
            for key, (name, style) in fields.items():
                points = [(r[x], r[key]) for r in records if r.get(key) is not None]
                color = number + len(folders) * key.startswith("val")
                if points:
                    axis.plot(*zip(*points, strict=True), color=f"C{color}", label=f"{folder.name}: {name}", **style)
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
        if "loss" in fields:
            axis.legend(fontsize=8)
        if "grad_norm" in fields:
            axis.set_yscale("log")
    figure.savefig(out, dpi=100)


if __name__ == "__main__":  # log.py draws in a separate process
    draw_runs([Path(sys.argv[1])], Path(sys.argv[2]))
