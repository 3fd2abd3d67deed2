"""The records of a run: the screen, log.txt, metrics.jsonl, curves.png, TensorBoard, Weights & Biases and
env.json; and --profile.

    python log.py plot RUN [RUN ...] [-o FILE]        the curves of runs in one picture
    python log.py track RUN [RUN ...] [--to NAMES]    sends the records of finished runs to trackers

Rank 0 writes. Only `Log.step` waits for a GPU, on steps that are recorded. metrics.jsonl is the reference: the
trackers get its records. Nothing here stops training: threads write and send (base/background.py), and try again after
an error. The variables of wandb (WANDB_MODE, WANDB_PROJECT) work as usual."""

import importlib.util
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from base.background import Appender, Background
from base.disk import ROOT, read_json, write_json, write_whole
from base.errors import Parser, UserError, prepare_python, run_script

if __name__ == "__main__":
    prepare_python()

import torch  # isort: skip
from torch import Tensor
from torch.profiler import ProfilerAction, profile, schedule

from attention import kernel
from base.host import describe_environment, memory_gib, peak_flops
from base.ranks import sum_over_ranks
from config import PROFILE_AFTER, Config
from curves import draw_runs, read_records
from hf.lora import flops_per_token
from job.job import LAST, logger
from model import IGNORE, Transformer
from optim import DTYPES
from preferences import FIGURES
from shard import mesh_shape

DRAW_EVERY = 60  # seconds between two drawings of curves.png
TRACKERS = 60  # seconds that the end of a run waits for a tracker
LINE = (  # of a record on the screen, which other programs parse
    "Batch {step} Loss: {loss:.5f}, Speed: {samples_per_s:.2f} samples/sec, lr: {lr:.6f}, {tok_per_s:.0f} tok/s,"
    " mfu {mfu:.1%}, grad norm {grad_norm:.3f}, mem {mem_gib:.2f} GiB"
)
MORE = {  # parts of the line for values that only some records have
    "val_loss": ", val loss {val_loss:.5f}",
    "val_bpb": ", {val_bpb:.4f} bits per byte",
    "score_acc": ", score acc {score_acc:.4f}",
}
# Names that trackers get, as from TRL's trainer.
TRL = {
    "rewards_chosen": "rewards/chosen",
    "rewards_rejected": "rewards/rejected",
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
    "logp_chosen": "logps/chosen",
    "logp_rejected": "logps/rejected",
}
TRL |= {f"val_{name}": f"eval_{name_there}" for name, name_there in TRL.items()}


def attention_kernel(config: Config, data, device: torch.device) -> str:
    """The kernel that computes attention on the rows of a Loader."""
    shape, N = config.model_config, config.context_parallel
    heads = shape.n_heads // N, math.lcm(shape.n_kv_heads, N) // N, shape.head_dim
    masked = data.separate or 0 < shape.window < config.seq_len
    return kernel(config.attention, masked, device, DTYPES[config.dtype], heads)


def profile_steps(steps: int, run) -> profile:
    """torch's profiler for `steps` of rank 0, from the fourth step of this start on; it writes profile/ when
    they are done. Call its step() after each step. run: a job.job.Run."""
    folder = run.folder / "profile"
    if not steps or run.ranks.rank:
        return profile(schedule=lambda step: ProfilerAction.NONE)

    def write(profiler: profile) -> None:
        with run.phase("profile"):
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / "rank-00000.trace.json.gz"))
            logger.info(f"Profile of rank 0: {folder} has a trace for https://ui.perfetto.dev")

    active = schedule(wait=PROFILE_AFTER - 1, warmup=1, active=steps, repeat=1)
    return profile(schedule=active, on_trace_ready=write, record_shapes=True)


# ---- the step record


class Log(AbstractContextManager):
    """The step record. All ranks must hold one and make the same calls, because a record gathers values of all ranks.

    A value that arrives after its step (a save's duration, a sample) gets a separate record with the step's number.
    `with log:` finishes its files and closes the trackers at the end."""

    def __init__(self, config: Config, run, model: Transformer, start: int, sources: list[str]):
        """run: a job.job.Run. start: the last finished step. sources: names of the entries of a mixture."""
        self.run, self.config, self.ranks, self.clock = run, config, run.ranks, run.clock
        self.file = Appender(run.folder / "metrics.jsonl")
        self.samples = Appender(run.folder / "samples.txt")
        self.status = Background("status.json", lambda: None)
        self.picture = Background("curves.png", self._draw)
        self.flops_per_token = flops_per_token(config)
        self.peak, self.peak_source = peak_flops(self.ranks.device, model.dtype)
        self.sources = sources
        self.by_source = torch.zeros(2, len(sources), dtype=torch.float64, device=self.ranks.device)  # losses, tokens
        self.router_sums = torch.zeros(())
        # pairs, then preferences.FIGURES
        self.pair_sums = torch.zeros(1 + len(FIGURES), dtype=torch.float64, device=self.ranks.device)
        self.val_bytes = self.val_tokens = 0  # of the validation text, if its bytes are known
        self.predicted = {}
        self.trackers: list[Tracker] = []  # of rank 0
        self.drawn_at = -math.inf
        self.last = start, 0.0, 0.0  # the last record's step, and seconds of steps and of their data until then
        if self.ranks.rank == 0:
            keep_records(self.file.path, start)
            self.trackers = [Tracker(name, run.folder, start) for name in config.track]

    def __exit__(self, kind: type | None, *error) -> None:
        with self.run.phase("end"):
            for file in (self.file, self.samples):
                file.finish(5 if kind else LAST)
            if kind is None:
                self.draw(last=True)
            for tracker in self.trackers:
                tracker.work = tracker.close
                tracker.finish(5 if kind else TRACKERS)

    def describe_run(self, data, val_data, predicted: dict[str, float]) -> None:
        """Writes flags.json, env.json and the head of the log. data, val_data: the Loaders.
        predicted: plan.predict_record, to be compared with measured values."""
        if self.ranks.rank:
            return
        self.predicted = predicted
        config, folder, size = self.config, self.run.folder, self.ranks.world_size
        if val_data and config.dpo == "none":
            self.val_bytes, self.val_tokens = val_data.text_bytes()
        attention = attention_kernel(config, data, self.ranks.device)
        env = describe_environment() | {
            "world_size": size,
            "mesh": dict(zip(("replicate", "shard"), mesh_shape(config.shard_size, size), strict=True)),
            "attention": attention,
            "peak": self.peak_source,
            "data": {"train": data.describe(), "val": val_data.describe() if val_data else []},
        }
        for name, value in (("flags.json", config.flags()), ("env.json", env)):
            Background(name, partial(write_json, folder / name, value)).start()
        lines = [
            f"Run folder: {folder}; torch {torch.__version__} on {env['devices'][0]} x {size}, {config.dtype},"
            f" compile {config.compile}, attention {attention}",
            *data.summary(),
            f"mfu counts causal attention; its peak per device is {self.peak_source}",
            f"Training from step {self.last[0] + 1} to {config.steps}",
        ]
        if data.step_rows % (data.micro_batch * data.row_groups):
            lines.append("A step does not divide by the ranks: its last micro-batch is filled with untrained rows")
        logger.info("\n".join(lines))

    def sum_details(self, parts: list[tuple]) -> None:
        """Adds a step's losses by source, of trained tokens, and router statistics, of used places, to the sums for the
        next record, on the device. parts: (Batch, model.Details) of each micro-batch."""
        for batch, details in parts:
            if batch.sources is not None:
                tokens = (batch.targets != IGNORE).sum(1)
                rows = torch.stack((details.row_losses.double(), tokens.double()))
                self.by_source.index_add_(1, batch.sources, rows)
            if details.router_sums is not None:
                self.router_sums = self.router_sums + details.router_sums
            if batch.pairs is not None:
                self.pair_sums[0] += (batch.pairs >= 0).sum()
                self.pair_sums[1:] += details.figures

    def _speed(self, step: int) -> dict[str, float]:
        """Averages since the last record. Tokens, speed and MFU count whole rows, because unused places and tokens
        without a target are computed as well."""
        now = step, self.clock.seconds("data", "compile", "steps"), self.clock.seconds("data")
        steps, seconds, data_seconds = (after - before for after, before in zip(now, self.last, strict=True))
        self.last = now
        tokens_per_s = steps * self.config.batch_tokens / seconds
        per_device = tokens_per_s / self.ranks.world_size
        return {
            "step_ms": 1e3 * seconds / steps,
            "data_ms": 1e3 * data_seconds / steps,
            "samples_per_s": tokens_per_s / self.config.seq_len,
            "tok_per_s": tokens_per_s,
            "tok_per_s_per_device": per_device,
            "mfu": per_device * self.flops_per_token / self.peak,
        }

    def step(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float, more: dict[str, float]) -> None:
        """Records a step. more: means of an evaluation, and counts. Reading the loss is the only wait for the device.
        All ranks must call."""
        loss, grad_norm = loss.item(), grad_norm.item()
        tokens = step * self.config.batch_tokens
        record = {"step": step, "tokens": tokens, "loss": loss, "lr": lr, "grad_norm": grad_norm}
        record |= self._speed(step)
        record |= self._gather(record["data_ms"])
        record |= more
        if self.val_bytes and "val_loss" in more:
            record["val_bpb"] = more["val_loss"] * self.val_tokens / math.log(2) / self.val_bytes
        self.add(**record)
        parts = [text.format_map(record) for name, text in MORE.items() if name in record]
        logger.info(LINE.format_map(record) + "".join(parts))
        if self.predicted and step == self.config.steps:
            measured = {name: record[name] for name in self.predicted}
            plan = {"step": step, "predicted": self.predicted, "measured": measured}
            Background("plan.json", partial(write_json, self.run.folder / "plan.json", plan)).start()

    def _gather(self, data_ms: float) -> dict[str, float]:
        """The figures that need every rank: the longest wait for data and its rank, memory, losses by source and
        experts. Collectives make all ranks equally slow, so step_ms names no slow rank. All ranks must call."""
        tensors, values = [self.by_source, self.router_sums, self.pair_sums], [data_ms, memory_gib(self.ranks.device)]
        (by_source, router_sums, pair_sums), values = sum_over_ranks(tensors, values, self.ranks)
        data_ms, memory = zip(*values, strict=True)
        figures = {"data_ms": max(data_ms), "data_rank": data_ms.index(max(data_ms)), "mem_gib": max(memory)}
        for name, loss, tokens in zip(self.sources, *by_source.tolist(), strict=True):
            if tokens:
                figures[f"loss_{name}"] = loss / tokens
        if router_sums.dim():  # of a model with experts
            *layers, losses, tokens = router_sums
            figures["router_aux_loss"] = (losses[0] / tokens[0]).item()
            loads = sum(layers)  # of each expert, as a multiple of an even share
            figures |= {f"expert_load_{e}": load.item() for e, load in enumerate(loads / loads.mean())}
        pairs, *totals = pair_sums.tolist()
        if pairs:
            figures |= {name: value / pairs for name, value in zip(FIGURES, totals, strict=True)}
        self.by_source.zero_()
        self.pair_sums.zero_()
        self.router_sums = torch.zeros(())
        return figures

    def add(self, step: int, **values: float | str) -> None:
        """Adds a step's record, or a separate record for values that arrived later; a sample is also added to
        samples.txt. Rank 0 writes it and updates status.json. A non-finite value (--on_nonfinite skip) becomes
        null."""
        if self.ranks.rank or not values:
            return
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self.file.write(json.dumps({"step": step} | record) + "\n")
        self.file.flush()
        if "sample" in values:
            self.samples.write(f"--- step {step}\n{values['sample']}\n")
            self.samples.flush()
        self.status.work = partial(self.run.write_status, "running", step)
        self.status.start(0.0)
        for tracker in self.trackers:
            tracker.start(0.0)

    def draw(self, last: bool = False) -> None:
        """Draws curves.png on rank 0, at most once in DRAW_EVERY seconds and at the end (`last`), where it waits."""
        now = time.perf_counter()
        if self.ranks.rank or (now < self.drawn_at + DRAW_EVERY and not last):
            return
        self.drawn_at = now
        with self.run.phase("plots"):
            self.picture.finish(DRAW_EVERY) if last else self.picture.start(0.0)

    def _draw(self) -> None:
        """In another process, which needs no torch and outlives a Ctrl-C, which ends the run after a last save."""
        new = self.run.folder / "curves.tmp.png"
        command = sys.executable, ROOT / "curves.py", self.run.folder, new
        subprocess.run(command, stderr=subprocess.DEVNULL, check=True, start_new_session=True)
        os.replace(new, self.run.folder / "curves.png")


def keep_records(file: Path, start: int) -> None:
    """Removes the records after step `start`, which a resumed run writes again. Without a checkpoint (start 0) the old
    records are kept in a separate file."""
    records = read_records(file.parent)
    if records and not start:
        aside = file.rename(file.with_name(time.strftime("metrics-before-%Y%m%d-%H%M%S.jsonl")))
        logger.warning(f"{file.parent} has records but no checkpoint; the old records are in {aside.name}")
    write_whole(file, "".join(json.dumps(r) + "\n" for r in records if r["step"] <= start))


# ---- trackers


def refuse_trackers(names: tuple[str, ...]) -> None:
    """Refuses trackers that are unknown or not installed."""
    for name in names:
        if name not in ("tensorboard", "wandb") or importlib.util.find_spec(name) is None:
            raise UserError(f"tracker {name!r}: expected tensorboard or wandb, after `pip install tensorboard wandb`")


class Tracker(Background):
    """Sends the records in metrics.jsonl to a tracker. NAME.json in the run folder tells how many bytes of them it has,
    and their last step: a resume sends the others. After an error the tracker is opened again."""

    def __init__(self, name: str, folder: Path, last: int = 0):
        """last: the last step in metrics.jsonl, which a resume may have shortened."""
        super().__init__(f"--track {name}", self.send)
        self.open = _start_wandb if name == "wandb" else TensorBoard
        self.folder, self.note, self.tracker = folder, folder / f"{name}.json", None
        size = (folder / "metrics.jsonl").stat().st_size
        self.state = {"sent": 0, "step": 0} | (read_json(self.note) if size else {})
        if self.state["sent"] > size:
            self.state |= {"sent": size, "step": last}

    def send(self) -> None:
        """Sends the records that the tracker lacks."""
        try:
            self.tracker = self.tracker or self.open(self.folder, self.state)
            state = {**self.state}
            with open(self.folder / "metrics.jsonl", "rb") as file:
                file.seek(state["sent"])
                for line in itertools.takewhile(lambda line: line.endswith(b"\n"), file):
                    record = json.loads(line)
                    renamed = {TRL.get(name, name): value for name, value in record.items()}
                    self.tracker.log(renamed, step=record["step"])
                    state |= {"sent": state["sent"] + len(line), "step": record["step"]}
            if self.open is TensorBoard:
                self.tracker.writer.flush()
            write_json(self.note, state)
            self.state = state
        except Exception:
            self.tracker = None
            raise

    def close(self) -> None:
        self.send()
        self.tracker.finish()


class TensorBoard:
    """Writes records as a run of wandb does."""

    def __init__(self, folder: Path, state: dict):
        from torch.utils.tensorboard import SummaryWriter

        if not state["sent"]:
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        # Records after that step are sent again: TensorBoard leaves out the old ones.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=state["step"] + 1)
        self.finish = self.writer.close

    def log(self, record: dict, step: int) -> None:
        for name, value in record.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, step)
            elif value is not None:
                self.writer.add_scalar(name, value, step)


def _start_wandb(folder: Path, state: dict):
    """A resumed run keeps its id; the server ignores steps that it has already."""
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "flatland"),
        name=folder.name,
        id=state.get("id"),
        resume="allow",
        dir=str(folder),
        config=read_json(folder / "flags.json"),
    )
    state["id"] = run.id
    return run


FLAGS = {
    "command": dict(choices=["plot", "track"]),
    "runs": dict(nargs="+", type=Path, metavar="RUN", help="run folders"),
    "-o": dict(dest="out", type=Path, default="curves.png", help="plot: a .png, .pdf or .svg file"),
    "--to": dict(default="tensorboard", help="track: tensorboard,wandb"),
}


def main(argv: list[str]) -> None:
    args = Parser(FLAGS, prog="log.py").parse_args(argv)
    for folder in args.runs:
        if not read_records(folder):
            raise UserError(f"{folder}: its metrics.jsonl has no step; give the folder of a run")
    if args.command == "plot":
        if args.out.suffix not in (".png", ".pdf", ".svg"):
            raise UserError(f"-o {args.out}: expected a .png, .pdf or .svg file")
        return draw_runs(args.runs, args.out)
    names = args.to.split(",")
    refuse_trackers(names)
    for name, folder in itertools.product(names, args.runs):
        tracker = Tracker(name, folder)
        tracker.state |= {"sent": 0, "step": 0}  # all records again
        try:
            tracker.close()
        except Exception as e:
            raise UserError(f"--track {name}: {e}") from None


if __name__ == "__main__":
    run_script(main)
