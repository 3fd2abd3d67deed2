"""curves.png: what metrics.jsonl holds, drawn for a person; several runs on one picture.

python log.py plot RUN [RUN ...] -o FILE"""

import gc
import json
import logging
import os
from pathlib import Path

from errors import UserError, human, read_json

SUFFIXES = (".png", ".pdf", ".svg")
MEAN = 0.02  # the running mean is over this share of the records
LABELS = {
    "L": "loss (nats per token)",
    "B": "validation (bits per byte of text)",
    "G": "gradient norm (logarithmic)",
    "R": "learning rate",
    "S": "tokens per second",
    "W": "MFU, waiting for data (%)",
    "M": "peak memory of a rank (GiB)",
}
logger = logging.getLogger("flatland")


def read_records(path: Path) -> list[dict]:
    """The records of a metrics.jsonl; lines that hold none are reported and left out."""
    records, damaged = [], 0
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            records += [record] if record["step"] >= 0 else []
        except (ValueError, TypeError, KeyError):
            damaged += 1
    if damaged:
        logger.warning("%s: lines left out, as they are cut off or damaged: %d", path, damaged)
    return records


def describe(folder: Path) -> str:
    """Model, parameters, data and machine of a run, in one line."""
    flags, env = read_json(folder / "flags.json"), read_json(folder / "env.json")
    if not flags or not env:
        return folder.name
    data = ", ".join(Path(entry).name for entry in flags["data"]) or "the built-in text"
    size = f", {human(env['parameters'])} parameters" if "parameters" in env else ""
    machine = f"{env['devices'][0]} x {env['world_size']}, {flags['dtype']}"
    return f"{folder.name}: {Path(flags['model']).name}{size}; {data[:60]}; {machine}"


def _steps(folder: Path) -> list[dict]:
    """The records of steps, with `wait`: the share of a step that waits for data."""
    records = [r for r in read_records(folder / "metrics.jsonl") if "loss" in r]
    return [r | {"wait": r["data_ms"] / r["step_ms"]} for r in records]


def draw_runs(folders: list[Path], out: Path) -> bool:
    """Draws runs into a picture -> whether there was anything to draw."""
    runs = [(folder, _steps(folder)) for folder in folders]
    runs = [(folder, records) for folder, records in runs if records]
    if not runs:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter

    top = "LB" if any("val_bpb" in r for _, records in runs for r in records) else "LL"
    figure, axes = plt.subplot_mosaic(f"{top};GR;SM", figsize=(10, 9), height_ratios=(4, 3, 3), layout="constrained")
    axes["W"] = axes["S"].twinx()
    step_tokens = {round(records[-1]["tokens"] / records[-1]["step"]) for _, records in runs}
    x = "step" if len(step_tokens) == 1 else "tokens"  # where steps differ in size, tokens are what compares
    for number, (folder, records) in enumerate(runs):
        _draw_run(axes, records, x, f"C{number}", f"{folder.name}: " if len(runs) > 1 else "")
    _finish(axes, x)
    if x == "step":
        size = step_tokens.pop()
        second = axes["L"].secondary_xaxis("top", functions=(lambda step: step * size, lambda tokens: tokens / size))
        second.set_xlabel("tokens")
        second.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.suptitle("\n".join(describe(folder) for folder, _ in runs), fontsize=10)
    temporary = out.with_name(f"{out.stem}.tmp-{os.getpid()}{out.suffix}")
    figure.savefig(temporary, dpi=100)
    plt.close(figure)
    gc.collect()  # a figure is full of cycles: left to itself the memory of several would be held
    os.replace(temporary, out)
    return True


def _finish(axes: dict, x: str) -> None:
    """Labels, scales and legends."""
    from matplotlib.ticker import EngFormatter, LogFormatter, MaxNLocator

    for key, axis in axes.items():
        axis.set(xlabel=x, ylabel=LABELS[key])
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        if key != "W":
            axis.grid(alpha=0.3)
    for key in "RSM":
        axes[key].set_ylim(0, 1.1 * axes[key].get_ylim()[1])
    axes["W"].set_ylim(0, 100)
    axes["S"].yaxis.set_major_formatter(EngFormatter(sep=""))
    axes["G"].set_yscale("log")
    for set_formatter in (axes["G"].yaxis.set_major_formatter, axes["G"].yaxis.set_minor_formatter):
        set_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    for axis in (axes["L"], axes.get("B", axes["L"])):
        axis.legend(fontsize=8)
    handles, labels = (a + b for a, b in zip(*(axes[key].get_legend_handles_labels() for key in "SW"), strict=True))
    axes["W"].legend(handles, labels, fontsize=8, loc="center right")


def _draw_run(axes: dict, records: list[dict], x: str, colour: str, name: str) -> None:
    """name: goes before the labels, where there are several runs."""

    def line(axis: str, key: str, label: str = "", scale: float = 1.0, **style) -> None:
        rows = [r for r in records if r.get(key) is not None]
        rows = rows[axis in "SW" :] or rows  # the first step compiles
        if not rows:
            return
        style = {"lw": 1, "ms": 4, "color": colour, "label": label.format(name, rows[-1][key]) or None} | style
        axes[axis].plot([r[x] for r in rows], [scale * r[key] for r in rows], **style)

    size = max(1, round(MEAN * len(records)))
    line("L", "loss", "" if name and size > 1 else "{}training, last {:.3f}", alpha=0.35 if size > 1 else 1)
    if size > 1:
        records = _with_running_mean(records, size)
        line("L", "mean", f"{{}}mean of {size} records, last {{:.3f}}", lw=1.8)
    dots = {"marker": "o", "linestyle": "--", "color": colour if name else "black"}
    line("L", "val_loss", "{}validation, last {:.3f}", **dots)
    if "B" in axes:
        line("B", "val_bpb", "{}last {:.4f}", **dots)
    line("G", "grad_norm")
    line("R", "lr")
    first = not axes["S"].get_lines()  # the styles are said once
    line("S", "tok_per_s", "tokens per second" * first)
    line("W", "mfu", "MFU" * first, scale=100, linestyle=":")
    line("W", "wait", "waiting for data" * first, scale=100, linestyle="-.", alpha=0.7)
    line("M", "mem_gib")


def _with_running_mean(records: list[dict], size: int) -> list[dict]:
    """The records, each with the mean loss of the last `size`; at the start, where it falls fast, of fewer."""
    out, losses = [], []
    for r in records:
        if r["loss"] is not None:
            losses.append(r["loss"])
        last = losses[-min(size, 1 + len(losses) // 10) :]
        out.append(r | {"mean": sum(last) / len(last)} if last else r)
    return out


def plot_runs(folders: list[Path], out: Path) -> None:
    """`python log.py plot`."""
    missing = [folder for folder in folders if not (folder / "metrics.jsonl").exists()]
    if missing:
        raise UserError(f"{missing[0]} is no run folder: there is no metrics.jsonl in it")
    if out.suffix not in SUFFIXES or not out.absolute().parent.is_dir():
        raise UserError(f"-o {out}: give a file in an existing folder that ends in {', '.join(SUFFIXES)}")
    if not draw_runs(folders, out):
        raise UserError(f"{', '.join(map(str, folders))}: no step is recorded yet")
