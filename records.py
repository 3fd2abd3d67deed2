"""What is made of metrics.jsonl: curves.png, drawn for a person, also with several runs on one picture; and what is
sent to TensorBoard or Weights & Biases, under the names of metrics.jsonl.

    python log.py plot RUN [RUN ...] -o FILE
    train.py --track tensorboard,wandb            while it trains
    python log.py track RUN [--to NAMES]          a run that has ended

Each tracker has a thread of its own, on rank 0: one that fails is said once, and never stops or slows the run.
metrics.jsonl is what counts: when a run goes on, TensorBoard's files and those that wandb wrote offline are written
anew from it; a server of wandb gets the steps that it does not have, under the run's id in wandb.json. The variables of
wandb (WANDB_MODE, WANDB_PROJECT) work as usual; `wandb sync RUN/wandb/offline-run-*` uploads what was written
offline."""

import gc
import importlib.util
import itertools
import json
import logging
import netrc
import os
import queue
import secrets
import shutil
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlparse

from lib.errors import UserError, human, read_json, write_whole

SUFFIXES = (".png", ".pdf", ".svg")
MEAN = 0.02  # the running mean is over this share of the records
LABELS = {
    "L": "loss (nats per token)",
    "B": "validation (bits per byte of text)",
    "G": "gradient norm (logarithmic)",
    "R": "learning rate",
    "S": "tokens per second (solid)",
    "W": "MFU, waiting for data (%)",
    "M": "peak memory of a rank (GiB)",
}
PATIENCE = 30  # seconds at the end of a run for what is still to be sent
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


def draw_runs(folders: list[Path], out: Path) -> bool:
    """Draws runs into a picture -> whether there was anything to draw."""
    runs = []
    for folder in folders:
        records = [r for r in read_records(folder / "metrics.jsonl") if "loss" in r]
        if records:  # wait: the share of a step that waits for data
            runs.append((folder, [r | {"wait": r["data_ms"] / r["step_ms"]} for r in records]))
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
    from matplotlib.ticker import EngFormatter, LogFormatter

    for key, axis in axes.items():
        axis.set(xlabel=x, ylabel=LABELS[key])
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        if key in "LBW":
            axis.legend(fontsize=8, loc="center right" if key == "W" else "best")
        if key in "RSM":
            axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        if key != "W":
            axis.grid(alpha=0.3)
    axes["W"].set_ylim(0, 100)
    axes["S"].yaxis.set_major_formatter(EngFormatter(sep=""))
    axes["G"].set_yscale("log")
    for set_formatter in (axes["G"].yaxis.set_major_formatter, axes["G"].yaxis.set_minor_formatter):
        set_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))


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
    line("S", "tok_per_s")
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


# ---- trackers


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, config: dict, fresh: bool):
        from torch.utils.tensorboard import SummaryWriter

        for old in (folder / "tensorboard").glob("events.out.tfevents.*"):
            old.unlink()
        # purge_step: a reader that is open forgets what it has read
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=0, flush_secs=10)
        self.close = self.writer.close
        self.writer.add_text("config", "    " + json.dumps(config, indent=1).replace("\n", "\n    "), 0)

    def send(self, step: int, values: dict[str, float | str]) -> None:
        for name, value in values.items():
            add = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
            add(name, value, step)


class WandB:
    """A run of Weights & Biases; when ours goes on it does, under the same id."""

    def __init__(self, folder: Path, config: dict, fresh: bool):
        import wandb

        known = {} if fresh else read_json(folder / "wandb.json")
        known = {"id": secrets.token_hex(4)} | known
        write_whole(folder / "wandb.json", json.dumps(known) + "\n")
        for old in (folder / "wandb").glob(f"offline-run-*-{known['id']}"):  # of a killed process it lacks the end
            shutil.rmtree(old)
        options = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
        names = {"project": os.environ.get("WANDB_PROJECT", "flatland"), "name": folder.name} | known
        self.run = wandb.init(**names, resume="allow", dir=str(folder), config=config, settings=options)
        self.close = self.run.finish
        self.next = self.run.step  # of a run that goes on, the first that the server does not have

    def send(self, step: int, values: dict[str, float | str]) -> None:
        if step >= self.next:
            self.run.log(values, step=step)


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB}


class Tracker(threading.Thread):
    """Sends records to the tracker of that name. earlier: the records that a run goes on from."""

    def __init__(self, name: str, folder: Path, earlier: list[dict]):
        super().__init__(name=name, daemon=True)
        self.folder, self.earlier, self.records = folder, earlier, queue.SimpleQueue()

    def close(self) -> None:
        """Waits a while for what is not sent yet."""
        self.records.put(None)
        self.join(PATIENCE)
        if self.is_alive():
            logger.warning("--track %s: not all was sent within %d s", self.name, PATIENCE)

    def run(self) -> None:
        try:
            first = self.records.get()  # when it comes, flags.json and env.json are written
            if first:
                self.send(itertools.chain(self.earlier, [first], iter(self.records.get, None)))
        except Exception as e:
            message = (str(e).splitlines() or [""])[0]
            logger.warning("--track %s fails; the run goes on without it: %s: %s", self.name, type(e).__name__, message)

    def send(self, records: Iterable[dict]) -> None:
        """Configuration and records."""
        config = read_json(self.folder / "flags.json") | {"env": read_json(self.folder / "env.json")}
        tracker = TRACKERS[self.name](self.folder, config, not self.earlier)
        for record in records:
            values = {k: v for k, v in record.items() if isinstance(v, (int, float, str)) and k != "step"}
            tracker.send(record["step"], values)
        tracker.close()


def refuse_unusable(names: tuple[str, ...], folder: Path) -> None:
    """Refuses trackers that are unknown, not installed, not logged in, or cannot write."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--track {name}: unknown; there are {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--track {name}: it is not installed: {sys.executable} -m pip install {name}")
        place = folder / name
        if place.exists() and not (place.is_dir() and os.access(place, os.W_OK)):
            raise UserError(f"--track {name}: {place} is no folder that can be written to; move it away")
    if "wandb" in names and not _is_logged_in():
        raise UserError("--track wandb: not logged in: `wandb login`, or WANDB_MODE=offline in the environment")


def _is_logged_in() -> bool:
    """Whether wandb has a key, or needs none."""
    import wandb

    settings = wandb.setup().settings
    if settings.mode != "online" or os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return urlparse(settings.base_url).hostname in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False


def track_run(folder: Path, names: tuple[str, ...]) -> None:
    """`python log.py track`."""
    refuse_unusable(names, folder)
    records = read_records(folder / "metrics.jsonl")
    if not records:
        raise UserError(f"{folder}: no step is recorded in its metrics.jsonl")
    for name in names:
        Tracker(name, folder, records).send(records)
