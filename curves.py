"""The records of a run in metrics.jsonl, and their curves.

It needs no torch."""

import contextlib
import itertools
import json
import logging
from pathlib import Path

PANELS = {  # fields of metrics.jsonl, and their labels
    "loss": "loss (nats per token)",
    "val_bpb": "validation (bits per byte)",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tok_per_s": "tokens per second",
    "mem_gib": "memory (GiB)",
}
PAIRS = {  # panels of a run on pairs, instead of others
    "loss": ("loss", "loss (per pair)"),
    "val_bpb": ("reward_accuracy", "accuracy of the rewards"),
    "mem_gib": ("reward_margin", "margin of the rewards"),
}
DOTS = {"marker": "o", "ls": "--"}
STYLES = {  # the name in the legend and the style of fields
    "loss": ("training", {"alpha": 0.35}),
    "mean_loss": ("training, running mean", {}),
    "val_loss": ("validation", DOTS),
    "val_bpb": ("", DOTS),
    "val_reward_accuracy": ("", DOTS),
    "val_reward_margin": ("", DOTS),
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
    titles = dict(PAIRS.get(key, (key, title)) if has_pairs else (key, title) for key, title in PANELS.items())
    panels = dict(zip(titles, figure.subplots(3, 2, sharex=True).flat, strict=True))
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.06, top=0.96, wspace=0.2, hspace=0.2)
    figure.supxlabel(x, y=0.005)
    for number, (folder, records) in enumerate(zip(folders, runs, strict=True)):
        for key in (*titles, "mean_loss", "val_loss", "val_reward_accuracy", "val_reward_margin"):
            name, style = STYLES.get(key, ("", {}))
            points = [(r[x], r[key]) for r in records if r.get(key) is not None]
            color = number + len(folders) * key.startswith("val")
            axis = panels.get(key, panels.get(key.removeprefix("val_"), panels["loss"]))
            if points:
                axis.plot(*zip(*points, strict=True), color=f"C{color}", label=f"{folder.name}: {name}", **style)
    for key, axis in panels.items():
        axis.set_title(titles[key], loc="left", fontsize=10)
        axis.grid(alpha=0.3)
    panels["grad_norm"].set_yscale("log")
    panels["loss"].legend(fontsize=8)
    figure.savefig(out, dpi=100)
