"""The records of a run: the screen, log.txt, metrics.jsonl, curves.png, TensorBoard, Weights & Biases and
env.json; which rank is slow, and --profile.

    python log.py plot RUN [RUN ...] -o FILE        the curves of runs in one picture
    python log.py track RUN [--to NAMES]            sends the records of a finished run to trackers

Rank 0 writes. Only `Log.step` waits for a GPU, on steps that are recorded. metrics.jsonl is the reference: a
resumed run sends all its records to the trackers again, under the same wandb id (wandb.json). The variables of wandb
(WANDB_MODE, WANDB_PROJECT) work as usual."""

import gc
import itertools
import json
import math
import os
import platform
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median, median_low
from typing import NamedTuple

from lib.errors import Parser, UserError, human, read_json, run_script, write_whole  # first

import torch  # isort: skip
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerAction, profile, schedule

from attention import kernel
from config import PROFILE_AFTER, Config
from lib import torch_private
from lib.lora import flops_per_token
from lib.machine import describe_environment, memory_gib, peak_flops
from lib.rows import text_bytes
from lib.run import COMPARED_AT, TRACKERS, logger, refuse_unusable
from model import IGNORE, Transformer
from optim import trained
from shard import gather, mesh_shape, on_first_rank

SLOW = 0.095  # a rank is named if it is slower than the median by this share, which is shown as 10 %
GPU_EVERY = 8  # on GPUs only one in so many steps is measured, because reading its events takes time
PANELS = {
    "loss": "loss (nats per token)",
    "validation": "validation",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tok_per_s": "tokens per second",
    "mfu": "MFU (share of the peak FLOP/s)",
    "data_share": "share of a step that waits for data",
    "mem_gib": "peak memory of a rank (GiB)",
}


def describe_model(model: Transformer) -> None:
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in trained(model).values())
    logger.info("Created model with total parameters: %d (%s)", total, human(total), stacklevel=2)
    logger.info("Trainable parameters: %d (%s)", trainable, human(trainable), stacklevel=2)


# ---- time


# Ranks wait for each other in collectives, so their steps take equally long whichever rank is slow; the slow rank
# is the one that waits least. A step is measured from the arrival of its data to its update, and in it each collective
# of FSDP: on a CPU with the host's clock, because gloo blocks; on a GPU with events on the collective's stream, without
# waiting for them. The smallest collective time of any rank is what collectives cost; the excess is waiting, and the
# rest of a step is the rank's data + compute. Medians over a record's steps are compared.


class Times(NamedTuple):
    """A rank's step in ms. wait: within collectives; compute: the rest between data and update."""

    host: str
    data: float
    compute: float
    wait: float


class TimedCollective:
    """An all-gather or reduce-scatter for FSDP's set_custom_all_gather and set_custom_reduce_scatter."""

    def __init__(self, collective: Callable, times: "StepTimes"):
        self.collective, self.times = collective, times

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.times.mark()
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options):
        self.times.mark()
        work = self.collective(output_tensor, input_tensor, group=group, **options)
        self.times.end_collective()
        return work


class StepTimes:
    """Measures this rank's steps and FSDP's collectives in them."""

    def __init__(self, model: torch.nn.Module, device: torch.device, replicas: int):
        self.cuda, self.steps, self.count, self.data = device.type == "cuda", [], 0, 0.0
        self.begun, self.last, self.waits = None, None, []
        for unit in [m for m in model.modules() if hasattr(m, "set_custom_all_gather")]:
            unit.set_custom_all_gather(TimedCollective(dist.all_gather_into_tensor, self))
            unit.set_custom_reduce_scatter(TimedCollective(dist.reduce_scatter_tensor, self))
            if replicas > 1:  # FSDP calls this after the all-reduce that follows a reduce-scatter
                unit.set_all_reduce_hook(lambda reduced: self.end_collective())

    def now(self) -> float | torch.cuda.Event:
        if not self.cuda:
            return 1e3 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        self.last = None if self.begun is None else self.now()

    def end_collective(self) -> None:
        if self.last is not None:
            self.waits.append((self.last, self.now()))
            self.mark()

    def begin(self, data: float) -> None:
        """The data of a step has arrived. data: seconds spent on data so far, in all steps."""
        self.count, self.data, self.step_data = self.count + 1, data, 1e3 * (data - self.data)
        if not self.cuda or self.count % GPU_EVERY == 0:
            self.begun = self.now()

    def end(self) -> None:
        """The step's update has been launched."""
        if self.begun is not None:
            self.steps.append((self.step_data, (self.begun, self.now()), self.waits))
        self.begun, self.waits = None, []

    def take(self) -> Times:
        """Medians over the steps since the last call; wait includes the cost of collectives. On a GPU the steps must
        have finished, which reading the loss ensures."""

        def lasted(span: tuple) -> float:
            return span[0].elapsed_time(span[1]) if self.cuda else span[1] - span[0]

        rows = [(data, lasted(whole), sum(map(lasted, waits))) for data, whole, waits in self.steps]
        self.steps = []
        data, whole, wait = map(median, zip(*rows, strict=True)) if rows else (0.0, 0.0, 0.0)
        return Times(platform.node(), data, whole - wait, wait)


def without_costs(ranks: list[Times]) -> list[Times]:
    """Counts the smallest collective time of any rank as compute; only the excess is waiting."""
    cost = min(times.wait for times in ranks)
    return [times._replace(compute=times.compute + cost, wait=times.wait - cost) for times in ranks]


def find_slow(ranks: list[Times]) -> tuple[int, str] | None:
    """The slowest rank and a description; None if it is within 10 % of the median."""
    busy = [times.data + times.compute for times in ranks]
    rank, usual = busy.index(max(busy)), median_low(busy)
    if busy[rank] <= (1 + SLOW) * usual:
        return None
    host, data, compute, _ = ranks[rank]
    more = 100 * busy[rank] / usual - 100
    return rank, f"{host}/rank {rank} {more:+.0f} % (data {data:,.0f} ms, compute {compute:,.0f} ms)"


def describe_gpu(device: torch.device) -> str:
    """Clock and power, if the device is a GPU and NVML is available."""
    try:
        return f", GPU at {torch.cuda.clock_rate(device):,} MHz, {torch.cuda.power_draw(device) / 1e3:.0f} W"
    except Exception:  # no GPU, no nvidia-ml-py, or an old driver
        return ""


def profile_steps(run, start: int) -> profile:
    """torch's profiler for --profile steps of rank 0, from the fourth step of this start on; it writes profile/ when
    they are done. Call its step() after each step. run: a lib.run.Run."""
    steps, folder, cuda = run.config.profile, run.folder / "profile", run.ranks.device.type == "cuda"
    if steps and start + PROFILE_AFTER + steps > run.config.steps:
        logger.warning("--profile %d: too few steps are left, none is profiled", steps)
        steps = 0

    def write(profiler: profile) -> None:
        with run.phase("profile"):
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / "rank-00000.trace.json.gz"))
            order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
            table = profiler.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=60)
            (folder / "table.txt").write_text(table)
            logger.info("Profile of rank 0: %s/table.txt and a trace for https://ui.perfetto.dev", folder)

    active = schedule(wait=PROFILE_AFTER - 1, warmup=1, active=max(steps, 1), repeat=1)
    if not steps or run.ranks.rank:
        return profile(schedule=lambda step: ProfilerAction.NONE)
    torch_private.name_cpu_kernels()
    logger.info("Profiling %d steps after step %d: they and their records are slower", steps, start + PROFILE_AFTER)
    return profile(schedule=active, on_trace_ready=write, record_shapes=True)


# ---- the step record


def describe_routers(sums: Tensor) -> dict[str, float]:
    """Details.router_sums over all ranks -> the balancing loss, and the experts' shares of the tokens as multiples of
    an even share: each expert's over all layers, and the extremes of any layer."""
    loads = sums[:-2] / sums[:-2].mean(1, keepdim=True)
    shares = {f"expert_load_{e}": load for e, load in enumerate(loads.mean(0).tolist())}
    extremes = {"expert_load_max": loads.max().item(), "expert_load_min": loads.min().item()}
    return {"router_aux_loss": (sums[-2, 0] / sums[-1, 0]).item()} | extremes | shares


def compare(predicted: dict[str, float], record: dict[str, float], folder: Path) -> str:
    """Writes plan.json, the predicted and measured values of a record -> a line for the log."""
    measured = {name: record[name] for name in predicted}
    content = {"step": record["step"], "predicted": predicted, "measured": measured}
    write_whole(folder / "plan.json", json.dumps(content, indent=1) + "\n")
    rows = [(name, value, measured[name], value / measured[name] - 1) for name, value in predicted.items()]
    words = [f"{name} {value:.4g} predicted, {actual:.4g} measured ({off:+.0%})" for name, value, actual, off in rows]
    wrong = [name for name, *_, off in rows if abs(off) > 0.1]
    return f"Plan: {'; '.join(words)}" + f"; off by more than 10 %: {', '.join(wrong)}" * bool(wrong)


class Log:
    """The step record. All ranks must hold one and make the same calls, because a record gathers values of all ranks.

    A value that arrives after its step (a save's duration, a sample) gets a separate record with the step's number.
    `with log:` closes the trackers at the end."""

    def __init__(self, run, model: Transformer, start: int, sources: list[str] = ()):
        """run: a lib.run.Run. start: the last finished step. sources: names of the entries of a mixture."""
        config: Config = run.config
        self.run, self.ranks, self.clock, self.file = run, run.ranks, run.clock, run.folder / "metrics.jsonl"
        self.batch_tokens, self.seq_len, self.dtype = config.batch_tokens, config.seq_len, model.dtype
        self.flops_per_token = flops_per_token(config)
        self.peak, self.peak_source = peak_flops(self.ranks.device, self.dtype)
        self.sources = sources
        self.by_source = torch.zeros(2, len(sources), dtype=torch.float64, device=self.ranks.device)  # losses, tokens
        self.router_sums: Tensor | None = None
        self.draw_after = 0.0  # a time.perf_counter()
        self.val_bytes = self.val_tokens = 0  # of the validation text, if its bytes are known
        self.predicted, self.compared = {}, False
        self.mesh = dict(zip(("replicate", "shard"), mesh_shape(config.shard_size, self.ranks.world_size), strict=True))
        self.times = StepTimes(model, self.ranks.device, self.mesh["replicate"])
        self.suspect: int | None = None  # the rank that was slow in the last record
        self.fastest = 0.0  # samples/s of the fastest record; infinite after the warning that the speed fell
        self.trackers: list[tuple] = []
        self._mark(start)
        if self.ranks.rank == 0:
            records = read_records(self.file)
            if records and not start:
                self._keep_aside(records[-1]["step"])
            write_whole(self.file, "".join(json.dumps(r) + "\n" for r in records if r["step"] <= start))

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error) -> None:
        for *_, close in self.trackers:
            close()

    def _keep_aside(self, last: int) -> None:
        """Renames the records of a run whose checkpoints are gone."""
        names = (self.file.with_name(f"metrics-before-{n}.jsonl") for n in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        os.rename(self.file, aside)
        message = "%s has no checkpoint, but records up to step %d: they are kept in %s; starting at step 1"
        logger.warning(message, self.file.parent, last, aside.name)

    def describe_run(self, model: Transformer, data, val_data, predicted: dict[str, float]) -> None:
        """Writes flags.json, env.json and the head of the log, and opens the trackers. data, val_data: the Loaders.
        predicted: plan.step_figures, to be compared with measured values."""
        if self.ranks.rank:
            return
        self.predicted = predicted
        config, folder, size = self.run.config, self.run.folder, self.ranks.world_size
        if val_data:
            self.val_bytes, self.val_tokens = text_bytes(val_data.sources, *val_data.val_rows)
        shape = config.model_config
        heads = shape.n_heads, shape.n_kv_heads, shape.head_dim
        attention = kernel(config.attention, data.separate, self.ranks.device, self.dtype, heads)
        env = describe_environment() | {
            "parameters": sum(p.numel() for p in model.parameters()),
            "world_size": size,
            "mesh": self.mesh,
            "device": self.ranks.device.type,
            "attention": attention,
            "peak": self.peak_source,
            "data": {"train": data.describe(), "val": val_data.describe() if val_data else []},
        }
        write_whole(folder / "flags.json", json.dumps(asdict(config), indent=1) + "\n")
        write_whole(folder / "env.json", json.dumps(env, indent=1) + "\n")
        self.trackers = [open_tracker(name, folder) for name in config.track]
        how = f"{config.dtype}, compile {config.compile}, attention {attention}"
        lines = [f"Run folder: {folder}; torch {torch.__version__} on {env['devices'][0]} x {size}, {how}"]
        lines += data.summary(val_data)
        if data.step_rows % (data.micro_batch * size):
            lines.append("A step does not divide by the ranks: its last micro-batch is filled with untrained rows")
        lines.append(f"mfu counts causal attention; its peak per device is {self.peak_source}")
        lines.append(f"Training from step {self.last_step + 1} to {config.steps}")
        for line in lines:
            logger.info(line, stacklevel=2)

    def _mark(self, step: int) -> None:
        self.last_step = step
        self.last_seconds = [self.clock.seconds(part) for part in ("compile", "steps", "data")]

    def begin_step(self) -> None:
        """The step's data has arrived."""
        self.times.begin(self.clock.seconds("data"))

    def end_step(self, parts: list[tuple]) -> None:
        """The update has been launched. parts: (Batch, model.Details) of each micro-batch, whose losses by source and
        router statistics are summed on the device for the next record."""
        self.times.end()
        for batch, details in parts:
            if batch.sources is not None:
                tokens = (batch.targets != IGNORE).sum(1)
                rows = torch.stack((details.row_losses.double(), tokens.double()))
                self.by_source.index_add_(1, batch.sources, rows)
            if details.router_sums is not None:
                before = self.router_sums
                self.router_sums = details.router_sums if before is None else before + details.router_sums

    def _source_losses(self) -> dict[str, float]:
        """Mean loss per token of each source of a mixture since the last record. All ranks must call."""
        if len(self.sources) < 2:
            return {}
        losses, tokens = sum(gather(self.by_source.cpu(), self.ranks)).tolist()
        self.by_source.zero_()
        rows = zip(self.sources, losses, tokens, strict=True)
        return {f"loss_{name}": loss / n for name, loss, n in rows if n}

    def _speed(self, step: int) -> dict[str, float]:
        """Averages since the last record."""
        last_step, last_seconds = self.last_step, self.last_seconds
        self._mark(step)
        steps, seconds = step - last_step, sum(self.last_seconds) - sum(last_seconds)
        tokens_per_s = steps * self.batch_tokens / seconds
        per_device = tokens_per_s / self.ranks.world_size
        return {
            "step_ms": 1e3 * seconds / steps,
            "data_ms": 1e3 * (self.last_seconds[2] - last_seconds[2]) / steps,
            "samples_per_s": tokens_per_s / self.seq_len,
            "tok_per_s": tokens_per_s,
            "tok_per_s_per_device": per_device,
            "mfu": per_device * self.flops_per_token / self.peak,
        }

    def _rank_times(self, ranks: list[Times]) -> dict[str, list[float] | str]:
        """The times of all ranks, and the rank that was the slowest in this record and the last. All ranks must
        call."""
        ranks = without_costs(ranks)
        record = {
            f"rank_{name}_ms": [round(getattr(r, name), 3) for r in ranks] for name in ("data", "compute", "wait")
        }
        before, slow = self.suspect, find_slow(ranks)
        self.suspect = slow and slow[0]
        if slow and slow[0] == before:
            gpus = gather(describe_gpu(self.ranks.device) if self.ranks.rank == before else "", self.ranks)
            record["slowest"] = slow[1] + gpus[before]
        return record

    def step(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float, val_loss: float | None = None) -> None:
        """Records a step. Reading the loss is the only wait for the device. All ranks must call."""
        loss, grad_norm = loss.item(), grad_norm.item()
        memory = memory_gib(self.ranks.device), memory_gib(torch.device("cpu"))
        memory, resident, times = zip(*gather((*memory, self.times.take()), self.ranks), strict=True)
        record = {"step": step, "tokens": step * self.batch_tokens, "loss": loss, "lr": lr, "grad_norm": grad_norm}
        record |= self._speed(step) | {"mem_gib": max(memory)} | self._source_losses()
        if self.router_sums is not None:
            record |= describe_routers(sum(gather(self.router_sums.double().cpu(), self.ranks)))
            self.router_sums = None
        if len(times) > 1 and self.clock.stack[-1] != "compile":
            record |= self._rank_times(times)
        if val_loss is not None:
            record["val_loss"] = val_loss
            if self.val_bytes:
                record["val_bpb"] = val_loss * self.val_tokens / math.log(2) / self.val_bytes
                record["val_tokens"] = self.val_tokens
        on_first_rank(lambda: self._write(record), self.ranks)
        self.run.write_status("running", step, rss_gib=resident)
        logger.info(
            f"Batch {step} Loss: {loss:.5f}, Speed: {record['samples_per_s']:.2f} samples/sec, lr: {lr:.6f},"
            f" {record['tok_per_s']:.0f} tok/s, mfu {record['mfu']:.1%}, grad norm {grad_norm:.3f},"
            f" mem {record['mem_gib']:.2f} GiB"
            + (f", val loss {val_loss:.5f}" if val_loss is not None else "")
            + (f", {record['val_bpb']:.4f} bits per byte" if "val_bpb" in record else "")
            + (f", slowest {record['slowest']}" if "slowest" in record else ""),
            stacklevel=2,
        )
        speed, is_slow = record["samples_per_s"], record["samples_per_s"] < self.fastest / 10
        if is_slow and self.fastest < math.inf:
            logger.warning(
                "The speed fell from %.1f to %.1f samples/s: does another process use this machine?",
                self.fastest,
                speed,
            )
        self.fastest = math.inf if is_slow else max(self.fastest, speed)
        if self.predicted and step >= COMPARED_AT and (step == self.run.config.steps or not self.compared):
            self.compared = True
            logger.info(compare(self.predicted, record, self.run.folder))

    def add(self, step: int, **values: float | str) -> None:
        """A separate record for values that arrived after the step. All ranks must call."""
        if values:
            on_first_rank(lambda: self._write({"step": step} | values), self.ranks)

    def _write(self, record: dict[str, float | str]) -> None:
        """A non-finite value, which --on_nonfinite skip leaves in a record, becomes null."""
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with open(self.file, "a") as f:
            f.write(json.dumps(record) + "\n")
        for tracker in self.trackers[:]:
            name, send, _ = tracker
            try:
                send(record)
            except Exception as e:
                self.trackers.remove(tracker)
                logger.warning("--track %s fails; the run continues without it: %s: %s", name, type(e).__name__, e)

    def draw(self, always: bool) -> None:
        """Writes curves.png from metrics.jsonl; unless `always`, so rarely that it takes a thousandth of the time."""
        if always or time.perf_counter() > self.draw_after:
            begin = time.perf_counter()
            with self.run.phase("plots"):
                if self.ranks.rank == 0:
                    draw_runs([self.file.parent], self.file.with_name("curves.png"))
            end = time.perf_counter()
            self.draw_after = end + 1000 * (end - begin)


def read_records(path: Path) -> list[dict]:
    """The records of a metrics.jsonl. Damaged lines are left out and reported."""
    records, damaged = [], 0
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            records += [record] if record["step"] >= 0 else []
        except (ValueError, TypeError, KeyError):
            damaged += 1
    if damaged:
        logger.warning("%s: left out %d lines that are cut off or damaged", path, damaged)
    return records


# ---- trackers


def open_tracker(name: str, folder: Path) -> tuple[str, Callable[[dict], None], Callable[[], None]]:
    """Opens a tracker and sends it the records in metrics.jsonl -> (name, a function that sends a record, a function
    that closes the tracker)."""
    config = read_json(folder / "flags.json") | {"env": read_json(folder / "env.json")}
    records = read_records(folder / "metrics.jsonl")
    try:
        send, close = _open_tensorboard(folder, config) if name == TRACKERS[0] else _open_wandb(folder, config, records)
        for record in records:
            send(record)
    except Exception as e:
        raise UserError(f"--track {name}: {e}") from None
    return name, send, close


def _values(record: dict) -> dict[str, float | str]:
    return {k: v for k, v in record.items() if isinstance(v, (int, float, str)) and k != "step"}


def _open_tensorboard(folder: Path, config: dict) -> tuple[Callable, Callable]:
    from torch.utils.tensorboard import SummaryWriter

    for old in (folder / "tensorboard").glob("events.out.tfevents.*"):  # a killed process may not have flushed them
        old.unlink()
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=0, flush_secs=10)
    writer.add_text("config", "    " + json.dumps(config, indent=1).replace("\n", "\n    "), 0)

    def send(record: dict) -> None:
        for name, value in _values(record).items():
            add = writer.add_text if isinstance(value, str) else writer.add_scalar
            add(name, value, record["step"])

    return send, writer.close


def _open_wandb(folder: Path, config: dict, records: list[dict]) -> tuple[Callable, Callable]:
    """A resumed run keeps its id, which is in wandb.json; the server ignores steps that it has already."""
    import wandb

    known = {"id": secrets.token_hex(4)} | (read_json(folder / "wandb.json") if records else {})
    write_whole(folder / "wandb.json", json.dumps(known) + "\n")
    settings = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
    names = {"project": os.environ.get("WANDB_PROJECT", "flatland"), "name": folder.name} | known
    run = wandb.init(**names, resume="allow", dir=str(folder), config=config, settings=settings)
    return lambda record: run.log(_values(record), step=record["step"]), run.finish


def track_run(folder: Path, names: tuple[str, ...]) -> None:
    """`python log.py track`."""
    refuse_unusable(names)
    if not read_records(folder / "metrics.jsonl"):
        raise UserError(f"{folder}: no step is recorded in its metrics.jsonl")
    for name in names:
        *_, close = open_tracker(name, folder)
        close()


# ---- curves


def draw_runs(folders: list[Path], out: Path) -> bool:
    """Draws the curves of runs into a picture -> whether any run has records."""
    runs = {folder: [r for r in read_records(folder / "metrics.jsonl") if "loss" in r] for folder in folders}
    runs = {folder: records for folder, records in runs.items() if records}
    if not runs:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter

    x = "step" if len({records[-1]["tokens"] // records[-1]["step"] for records in runs.values()}) == 1 else "tokens"
    figure, axes = plt.subplots(4, 2, sharex=True, figsize=(10, 11), layout="constrained")
    panels = dict(zip(PANELS, axes.flat, strict=True))
    for number, (folder, records) in enumerate(runs.items()):
        _draw_run(panels, records, x, f"C{number}", f"{folder.name}: " if len(runs) > 1 else "")
    for key, axis in panels.items():
        axis.set_ylabel(PANELS[key])
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes[-1]:
        axis.set_xlabel(x)
    panels["loss"].legend(fontsize=8)
    panels["grad_norm"].set_yscale("log")
    panels["tok_per_s"].yaxis.set_major_formatter(EngFormatter(sep=""))
    for key in ("lr", "tok_per_s", "mfu", "data_share", "mem_gib"):
        panels[key].set_ylim(bottom=0)
    figure.suptitle("\n".join(map(describe, runs)), fontsize=10)
    temporary = out.with_name(f"{out.stem}.tmp-{os.getpid()}{out.suffix}")
    figure.savefig(temporary, dpi=100)
    plt.close(figure)
    gc.collect()  # a figure is full of cycles and would keep its memory
    os.replace(temporary, out)
    return True


def _draw_run(panels: dict, records: list[dict], x: str, colour: str, name: str) -> None:
    """name: a prefix of the labels."""

    def line(panel: str, key: str, label: str = "", **style) -> None:
        rows = [(r[x], r[key]) for r in records if r.get(key) is not None]
        if rows:
            label = f"{name}{label}, last {rows[-1][1]:.3f}" if label else None
            panels[panel].plot(*zip(*rows, strict=True), **{"color": colour, "lw": 1, "ms": 4, "label": label} | style)

    losses, size = [], max(1, len(records) // 50)
    for record in records:
        losses = [*losses, record["loss"]][-size:] if record["loss"] is not None else losses
        record["mean_loss"] = sum(losses) / len(losses) if losses else None
        record["data_share"] = record["data_ms"] / record["step_ms"]
    line("loss", "loss", alpha=0.35 if size > 1 else 1)
    line("loss", "mean_loss", f"training (mean of {size} records)" if size > 1 else "training", lw=1.5)
    dots = {"marker": "o", "linestyle": "--"}
    line("loss", "val_loss", "validation", **dots | ({} if name else {"color": "black"}))
    in_bits = any("val_bpb" in r for r in records)
    line("validation", "val_bpb" if in_bits else "val_loss", **dots)
    panels["validation"].set_title("bits per byte of text" if in_bits else "nats per token", fontsize=8)
    for key in ("grad_norm", "lr", "mem_gib"):
        line(key, key)
    records = records[1:] or records  # the first step compiles
    for key in ("tok_per_s", "mfu", "data_share"):
        line(key, key)


def describe(folder: Path) -> str:
    """A run's model, size, data and machine in one line."""
    flags, env = read_json(folder / "flags.json"), read_json(folder / "env.json")
    if not flags or not env:
        return folder.name
    data = ", ".join(Path(entry).name for entry in flags["data"]) or "the built-in text"
    size = f", {human(env['parameters'])} parameters" if "parameters" in env else ""
    machine = f"{env['devices'][0]} x {env['world_size']}, {flags['dtype']}"
    return f"{folder.name}: {Path(flags['model']).name}{size}; {data[:60]}; {machine}"


def plot_runs(folders: list[Path], out: Path) -> None:
    """`python log.py plot`."""
    missing = [folder for folder in folders if not (folder / "metrics.jsonl").exists()]
    if missing:
        raise UserError(f"{missing[0]} is not a run folder: it has no metrics.jsonl")
    suffixes = ".png", ".pdf", ".svg"
    if out.suffix not in suffixes or not out.absolute().parent.is_dir():
        raise UserError(f"-o {out}: give a file in an existing folder that ends in {', '.join(suffixes)}")
    if not draw_runs(folders, out):
        raise UserError(f"{', '.join(map(str, folders))}: no step is recorded yet")


def main(argv: list[str]) -> None:
    parser = Parser(prog="log.py", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="plot|track")
    plot = commands.add_parser("plot", help="the curves of runs in one picture")
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    plot.add_argument("-o", dest="out", type=Path, required=True, metavar="FILE", help=".png, .pdf or .svg")
    track = commands.add_parser("track", help="sends a run's records to trackers")
    track.add_argument("run", type=Path, metavar="RUN", help="run folder")
    track.add_argument("--to", default="tensorboard", metavar="NAMES", help="tensorboard,wandb (default: tensorboard)")
    args = parser.parse_args(argv)
    if args.command == "track":
        return track_run(args.run, tuple(args.to.split(",")))
    plot_runs(args.runs, args.out)


if __name__ == "__main__":
    run_script(main)
