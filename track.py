"""Trackers: what a run records, sent to TensorBoard or Weights & Biases under the names of metrics.jsonl.

    train.py --track tensorboard,wandb            while it trains
    python log.py track RUN [--to NAMES]          a run that has ended

Each tracker has a thread of its own, on rank 0: one that fails is said once, and never stops or slows the run.
metrics.jsonl is what counts: when a run goes on, TensorBoard's files and those that wandb wrote offline are written
anew from it; a server of wandb gets the steps that it does not have, under the run's id in wandb.json. The variables of
wandb (WANDB_MODE, WANDB_PROJECT) work as usual; `wandb sync RUN/wandb/offline-run-*` uploads what was written
offline."""

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

from curves import read_records
from errors import UserError, read_json, write_whole

PATIENCE = 30  # seconds at the end of a run for what is still to be sent
logger = logging.getLogger("flatland")


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, config: dict, fresh: bool):
        from torch.utils.tensorboard import SummaryWriter

        for old in (folder / "tensorboard").glob("events.out.tfevents.*"):
            old.unlink()
        # purge_step: a reader that is open forgets what it has read
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=0, flush_secs=10)
        self.writer.add_text("config", "    " + json.dumps(config, indent=1).replace("\n", "\n    "), 0)

    def send(self, step: int, values: dict[str, float | str]) -> None:
        for name, value in values.items():
            add = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
            add(name, value, step)

    def close(self) -> None:
        self.writer.close()


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
        self.next = self.run.step  # of a run that goes on, the first that the server does not have

    def send(self, step: int, values: dict[str, float | str]) -> None:
        if step >= self.next:
            self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB}


class Tracker:
    """Sends records to one tracker. earlier: the records that a run goes on from."""

    def __init__(self, name: str, folder: Path, earlier: list[dict]):
        self.name, self.folder, self.earlier = name, folder, earlier
        self.records: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True, name=name)

    def close(self) -> None:
        """Waits a while for what is not sent yet."""
        self.records.put(None)
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            logger.warning("--track %s: not all was sent within %d s", self.name, PATIENCE)

    def _work(self) -> None:
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
