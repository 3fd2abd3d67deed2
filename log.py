"""What a run says and leaves behind: the screen, log.txt, metrics.jsonl, curves.png, env.json, status.json; where its
time went; and which rank holds the others back.

Rank 0 writes. Nothing here waits for a GPU except `Log.step` on the steps that are recorded.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median, median_low
from typing import NamedTuple

from lib.errors import ROOT, Parser, human, printable, process_began, run_script, write_whole  # first: it finds torch

import torch  # isort: skip
import torch.distributed as dist
from torch import Tensor

from attention import kernel
from config import VERSION, Config
from lib.lora import flops_per_token
from lib.machine import known_gpu
from lib.rows import text_bytes
from model import IGNORE, Transformer
from optim import trained
from records import Tracker, draw_runs, plot_runs, read_records, track_run
from shard import gather, mesh_shape, on_first_rank

logger = logging.getLogger("flatland")

NO_NUMBERS = (math.inf, -math.inf)
# Of torch.distributed, what FSDP2 (torch 2.11 to 2.13), optim.py and fp8.py call.
COLLECTIVES = (
    "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce",
)  # fmt: skip
SLOW = 0.095  # beyond the median: what is shown as 10 %
GPU_EVERY = 8  # steps: of a GPU one in so many is measured, as reading the events takes time
COMPARED_AT = 20  # the first step whose record is compared with the plan: speed has settled


class _EveryLine(logging.Formatter):
    """A prefix on each line of a message, so that every line can be grepped and cut alike; control characters are
    escaped."""

    def format(self, record: logging.LogRecord) -> str:
        record.asctime, record.message = self.formatTime(record, self.datefmt), ""
        prefix = self.formatMessage(record)
        return "\n".join(prefix + printable(line) for line in record.getMessage().splitlines() or [""])


def start_logging(folder: Path | None) -> None:
    """Messages go to the screen, with a prefix where that is no terminal, and to log.txt in the folder; None: this rank
    is silent."""
    prefixed = _EveryLine("%(asctime)s %(levelname).1s [%(filename)s:%(lineno)d] ", "%Y-%m-%d %H:%M:%S")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    logging.raiseExceptions = False  # a full disk is told once, by what fails to write the metrics
    logger.setLevel(logging.INFO if folder else logging.CRITICAL + 1)
    if folder:
        screen, file = logging.StreamHandler(sys.stdout), logging.FileHandler(folder / "log.txt", encoding="utf-8")
        file.setFormatter(prefixed)
        screen.setFormatter(_EveryLine() if sys.stdout.isatty() else prefixed)
        logger.handlers += [screen, file]


def write_status(
    folder: Path, state: str, step: int, exit_code: int | None = None, message: str = "", **more: list[float]
) -> None:
    """state: running, finished, stopped, error (the user's mistake) or failed."""
    status = {"state": state, "step": step, "exit_code": exit_code, "message": message, "pid": os.getpid()}
    status["attempt"] = os.environ.get("TORCHELASTIC_RUN_ID", "")  # so that the launcher knows whose end this is
    write_whole(folder / "status.json", json.dumps(status | more) + "\n")


def describe_environment() -> dict:
    """Code, versions and hardware, for env.json."""

    command, git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"], ""
    with contextlib.suppress(OSError):  # there is no git here
        git = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "version": VERSION,
        "git": git.removesuffix("-dirty") or None,
        "git_dirty": git.endswith("-dirty"),
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "host": platform.node(),
        "devices": gpus or [cpu_name()],
        "threads": torch.get_num_threads(),
    }


def cpu_name() -> str:
    with contextlib.suppress(OSError, StopIteration):
        return next(re.finditer("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text()))[1]
    return platform.processor()


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(FLOP/s of a device, where the number is from): the data sheet's for bf16 on a GPU that we know, else a matmul
    measured now."""
    if device.type == "cuda" and dtype == torch.bfloat16 and (gpu := known_gpu(device)):
        return gpu.tflops * 1e12, f"{gpu.name} data sheet, {gpu.tflops:g} TFLOP/s"
    best, n = max((measured_flops(n, device, dtype), n) for n in ((8192,) if device.type == "cuda" else (1024, 2048)))
    return best, f"the best of some {n} x {n} products in {str(dtype)[6:]}, {best / 1e12:.3f} TFLOP/s"


def measured_flops(n: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of six products of n x n matrices."""
    own = torch.Generator(device).manual_seed(0)  # the run's random state is not touched
    a, b = (torch.randn(n, n, device=device, generator=own).to(dtype) for _ in range(2))
    best = min(timeit.repeat(lambda: (a @ b)[0, 0].item(), number=1, repeat=6))
    if device.type == "cuda":
        del a, b
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * n**3 / best


def memory_gib(device: torch.device) -> float:
    """Peak so far: allocated on a GPU, resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status").read_text()  # not getrusage: a child begins with its parent's peak
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def describe_model(model: Transformer) -> None:
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in trained(model).values())
    logger.info("Created model with total parameters: %d (%s)", total, human(total), stacklevel=2)
    logger.info("Trainable parameters: %d (%s)", trainable, human(trainable), stacklevel=2)


class Clock:
    """Wall time by part. A part takes its time from the one around it, so that the parts add up to the whole."""

    def __init__(self):
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        age = since_boot - process_began(os.getpid()) / os.sysconf("SC_CLK_TCK")  # imports included
        self.begin = time.perf_counter() - age
        self.parts: dict[str, float] = {}
        self.stack, self.since, self.step = ["start"], self.begin, 0
        self.after: dict[str, Callable[[float], None]] = {}  # called at the end of a part, with its seconds so far

    def _lap(self) -> None:
        now = time.perf_counter()
        self.parts[self.stack[-1]] = self.parts.get(self.stack[-1], 0.0) + now - self.since
        self.since = now

    def switch(self, part: str, step: int = 0) -> None:
        """From now on time belongs to `part`. step: the last one that was done."""
        self._lap()
        self.stack[-1], self.step = part, step

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._lap()
        self.stack.append(name)
        try:
            with torch.profiler.record_function(f"part: {name}"):  # 8 us where no profiler runs
                yield
        finally:
            self._lap()
            self.stack.pop()
            if name in self.after:
                self.after[name](self.parts[name])

    def seconds(self, name: str) -> float:
        self._lap()
        return self.parts.get(name, 0.0)

    def report(self) -> str:
        self._lap()
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        return f"Time taken: {self.since - self.begin:.1f} seconds ({parts})"


# ---- what every rank spends on a step, and which one holds the others back

# Ranks wait for each other in collectives, so their steps take equally long, whoever is slow: that one waits least. A
# step is measured from when its data are there to its update, and in it each collective of the training: on a CPU by
# the host's clock, for they block there; on a GPU by events on the stream of the collective, which nobody waits for.
# The least that any rank spends in collectives is what they cost; what another spends beyond that is waiting, and the
# rest of a step is its own: data + compute. Medians over a record's steps are compared: one late step names nobody.


class Times(NamedTuple):
    """Of a rank and a step, in ms. wait: within collectives; compute: all else from the data to the update."""

    host: str
    data: float
    compute: float
    wait: float


class Pace:
    """Measures this rank's steps. Wraps functions of torch.distributed until `close`."""

    def __init__(self, device: torch.device):
        self.cuda, self.steps, self.count, self.data = device.type == "cuda", [], 0, 0.0
        self.begun, self.waits = None, []
        known = [name for name in COLLECTIVES if hasattr(dist, name)] if dist.is_initialized() else []
        self.wrapped = {name: getattr(dist, name) for name in known}
        for name, collective in self.wrapped.items():
            setattr(dist, name, self._timed(collective))

    def close(self) -> None:
        for name, collective in self.wrapped.items():
            setattr(dist, name, collective)

    def _now(self) -> float | torch.cuda.Event:
        if not self.cuda:
            return 1e3 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _timed(self, collective: Callable) -> Callable:
        def run(*args, **kwargs):
            if self.begun is None:
                return collective(*args, **kwargs)
            begin = self._now()
            result = collective(*args, **kwargs)
            self.waits.append((begin, self._now()))
            return result

        return run

    def begin(self, data: float) -> None:
        """The data of a step are there. data: seconds that went to them so far, in all steps."""
        self.count, self.data, self.step_data = self.count + 1, data, 1e3 * (data - self.data)
        if not self.cuda or self.count % GPU_EVERY == 0:
            self.begun = self._now()

    def end(self) -> None:
        """Its update is launched."""
        if self.begun is not None:
            self.steps.append((self.step_data, (self.begun, self._now()), self.waits))
        self.begun, self.waits = None, []

    def take(self) -> Times:
        """Medians of the steps since the last call; wait holds what collectives cost, too. On a GPU all of them must
        have ended, as they have when the loss was read."""

        def lasted(span: tuple) -> float:
            return span[0].elapsed_time(span[1]) if self.cuda else span[1] - span[0]

        rows = [(data, lasted(whole), sum(map(lasted, waits))) for data, whole, waits in self.steps]
        self.steps = []
        data, whole, wait = map(median, zip(*rows, strict=True)) if rows else (0.0, 0.0, 0.0)
        return Times(platform.node(), data, whole - wait, wait)


def without_costs(ranks: list[Times]) -> list[Times]:
    """Takes for compute what every rank spends in collectives alike."""
    cost = min(times.wait for times in ranks)
    return [times._replace(compute=times.compute + cost, wait=times.wait - cost) for times in ranks]


def find_slow(ranks: list[Times]) -> tuple[int, str] | None:
    """The slowest rank, and how slow it is in words; None if it is within 10 % of the median."""
    own = [times.data + times.compute for times in ranks]
    rank, usual = own.index(max(own)), median_low(own)
    if own[rank] <= (1 + SLOW) * usual:
        return None
    host, data, compute, _ = ranks[rank]
    return (
        rank,
        f"{host}/rank {rank} {100 * own[rank] / usual - 100:+.0f} % (data {data:,.0f} ms, compute {compute:,.0f} ms)",
    )


def describe_gpu(device: torch.device) -> str:
    """Clock and power, where the device is a GPU and NVML can be reached."""
    try:
        return f", GPU at {torch.cuda.clock_rate(device):,} MHz, {torch.cuda.power_draw(device) / 1e3:.0f} W"
    except Exception:  # no GPU, no nvidia-ml-py, or a driver that does not tell
        return ""


# ---- the step record


def describe_routers(sums: Tensor) -> dict[str, float]:
    """Details.router_sums, over all ranks -> the balancing loss, and the experts' shares of the tokens as multiples of
    an even share: each expert's over all layers, and the extremes of any layer."""
    loads = sums[:-2] / sums[:-2].mean(1, keepdim=True)
    shares = {f"expert_load_{e}": load for e, load in enumerate(loads.mean(0).tolist())}
    extremes = {"expert_load_max": loads.max().item(), "expert_load_min": loads.min().item()}
    return {"router_aux_loss": (sums[-2, 0] / sums[-1, 0]).item()} | extremes | shares


def compare(predicted: dict[str, float], record: dict[str, float], folder: Path) -> str:
    """Writes plan.json: what was predicted of a record, and what was measured -> the log's line on it."""
    measured = {name: record[name] for name in predicted}
    content = {"step": record["step"], "predicted": predicted, "measured": measured}
    write_whole(folder / "plan.json", json.dumps(content, indent=1) + "\n")
    rows = [(name, value, measured[name], value / measured[name] - 1) for name, value in predicted.items()]
    words = [f"{name} {value:.4g} predicted, {found:.4g} measured ({off:+.0%})" for name, value, found, off in rows]
    wrong = [name for name, *_, off in rows if abs(off) > 0.1]
    return f"Plan: {'; '.join(words)}" + f"; off by more than 10 %: {', '.join(wrong)}" * bool(wrong)


class Log:
    """The step record. All ranks must hold one and call it alike: peak memory is gathered when a step is recorded.

    What comes later than its step (a save's duration, a sample) is a record of its own with the step's number."""

    def __init__(self, run, dtype: torch.dtype, resumed_step: int, sources: list[str] = ()):
        """run: a guard.Run. dtype: of matrix products. sources: names of the entries of a mixture."""
        config: Config = run.config
        self.run, self.ranks, self.clock, self.file = run, run.ranks, run.clock, run.folder / "metrics.jsonl"
        self.batch_tokens, self.seq_len = config.batch_tokens, config.seq_len
        self.dtype = dtype
        self.flops_per_token = flops_per_token(config)
        self.peak, self.peak_source = peak_flops(self.ranks.device, dtype)
        self.sources = sources
        self.by_source = torch.zeros(2, len(sources), dtype=torch.float64, device=self.ranks.device)  # losses, tokens
        self.router_sums: Tensor | None = None
        self.draw_after = 0.0  # of time.perf_counter()
        self.val_bytes = self.val_tokens = 0  # of the text that is evaluated, where they are known
        self.predicted, self.compared = {}, False
        self.pace, self.suspect = Pace(self.ranks.device), None  # suspect: the rank that was slow in the last record
        self.clock.after["data"] = self.pace.begin
        run.at_end.append(self.pace.close)
        self.listeners: list[Callable[[dict], None]] = []  # get each record, on rank 0; they must return at once
        self._mark(resumed_step)
        if self.ranks.rank == 0:
            records = read_records(self.file)
            if records and not resumed_step:
                self._keep_aside(records[-1]["step"])
            kept = [r for r in records if r["step"] <= resumed_step]
            write_whole(self.file, "".join(json.dumps(r) + "\n" for r in kept))
            for tracker in [Tracker(name, run.folder, kept) for name in config.track]:
                self.listeners.append(tracker.records.put)
                run.at_end.append(tracker.close)
                tracker.start()

    def _keep_aside(self, last: int) -> None:
        """The records of a run whose checkpoints are gone."""
        names = (self.file.with_name(f"metrics-before-{n}.jsonl") for n in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        os.rename(self.file, aside)
        message = "%s has no checkpoint, but records up to step %d: they are kept in %s; starting at step 1"
        logger.warning(message, self.file.parent, last, aside.name)

    def describe_run(self, model: Transformer, data, val_data, predicted: dict[str, float]) -> None:
        """flags.json, env.json and the head of the log: what is needed to know, later, what was run. data, val_data:
        the Loaders. predicted: of plan.step_figures, to be compared with what is measured."""
        if self.ranks.rank:
            return
        self.predicted = predicted
        config, folder, size = self.run.config, self.run.folder, self.ranks.world_size
        if val_data:
            self.val_bytes, self.val_tokens = text_bytes(val_data.sources, *val_data.val_rows)
        replicate, shard = mesh_shape(config.shard_size, size)
        shape = config.model_config
        attention = kernel(
            config.attention,
            data.separate,
            self.ranks.device,
            self.dtype,
            (shape.n_heads, shape.n_kv_heads, shape.head_dim),
        )
        env = describe_environment() | {
            "parameters": sum(p.numel() for p in model.parameters()),
            "world_size": size,
            "mesh": {"replicate": replicate, "shard": shard},
            "device": self.ranks.device.type,
            "attention": attention,
            "peak": self.peak_source,
            "data": {"train": data.describe(), "val": val_data.describe() if val_data else []},
        }
        write_whole(folder / "flags.json", json.dumps(asdict(config), indent=1) + "\n")
        write_whole(folder / "env.json", json.dumps(env, indent=1) + "\n")
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

    def count(self, parts: list[tuple]) -> None:
        """Adds up what the next record says of its steps' micro-batches, (Batch, model.Details) each: the loss of each
        entry of --data, in a mixture, and what the routers did. Sums stay on the device: reading one would wait."""
        self.pace.end()
        for batch, details in parts:
            if batch.sources is not None:
                trained = (batch.targets != IGNORE).sum(1)
                rows = torch.stack((details.row_losses.double(), trained.double()))
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

    def _ranks(self, ranks: list[Times]) -> dict[str, list[float] | str]:
        """What every rank spends on a step, and the one that was the slowest in this record and in the last. All ranks
        must call."""
        ranks = without_costs(ranks)
        record = {
            f"rank_{name}_ms": [round(getattr(r, name), 3) for r in ranks] for name in ("data", "compute", "wait")
        }
        before, found = self.suspect, find_slow(ranks)
        self.suspect = found and found[0]
        if found and found[0] == before:
            gpus = gather(describe_gpu(self.ranks.device) if self.ranks.rank == before else "", self.ranks)
            record["slowest"] = found[1] + gpus[before]
        return record

    def step(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float, val_loss: float | None = None) -> None:
        """Records a step; reads the loss from the device, which is the only wait for it. All ranks must call."""
        loss, grad_norm = loss.item(), grad_norm.item()
        memory = memory_gib(self.ranks.device), memory_gib(torch.device("cpu"))
        memory, resident, times = zip(*gather((*memory, self.pace.take()), self.ranks), strict=True)
        record = {"step": step, "tokens": step * self.batch_tokens, "loss": loss, "lr": lr, "grad_norm": grad_norm}
        record |= self._speed(step) | {"mem_gib": max(memory)} | self._source_losses()
        if self.router_sums is not None:
            record |= describe_routers(sum(gather(self.router_sums.double().cpu(), self.ranks)))
            self.router_sums = None
        if len(times) > 1 and self.clock.stack[-1] != "compile":
            record |= self._ranks(times)
        if val_loss is not None:
            record["val_loss"] = val_loss  # nats per token
            if self.val_bytes:  # in bits per byte of text it is comparable between tokenizers
                record["val_bpb"] = val_loss * self.val_tokens / math.log(2) / self.val_bytes
                record["val_tokens"] = self.val_tokens
        self._write(record)
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
        if self.predicted and step >= COMPARED_AT and (step == self.run.config.steps or not self.compared):
            self.compared = True
            logger.info(compare(self.predicted, record, self.run.folder))

    def add(self, step: int, **values: float | str) -> None:
        """A record of its own of what came later than the step. All ranks must call."""
        if values:
            self._write({"step": step} | values)

    def _write(self, record: dict[str, float | str]) -> None:
        def write() -> None:  # JSON has no NaN, which a step that --on_nonfinite skip passed over leaves
            with open(self.file, "a") as f:
                f.write(json.dumps({k: None if v in NO_NUMBERS or v != v else v for k, v in record.items()}) + "\n")
            for listen in self.listeners:
                listen(record)

        on_first_rank(write, self.ranks)

    def draw(self, always: bool) -> None:
        """Writes curves.png from metrics.jsonl; unless always, so seldom that it takes a thousandth of a run's time."""
        if always or time.perf_counter() > self.draw_after:
            begin = time.perf_counter()
            with self.run.phase("plots"):
                if self.ranks.rank == 0:
                    draw_runs([self.file.parent], self.file.with_name("curves.png"))
            end = time.perf_counter()
            self.draw_after = end + 1000 * (end - begin)


def main(argv: list[str]) -> None:
    parser = Parser(prog="log.py", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="plot|track")
    plot = commands.add_parser("plot", help="the curves of runs in one picture")
    plot.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    plot.add_argument("-o", dest="out", required=True, metavar="FILE", help=".png, .pdf or .svg")
    track = commands.add_parser("track", help="sends a run's records to trackers")
    track.add_argument("run", type=Path, metavar="RUN", help="run folder")
    track.add_argument("--to", default="tensorboard", metavar="NAMES", help="tensorboard,wandb (default: tensorboard)")
    args = parser.parse_args(argv)
    if args.command == "track":
        track_run(args.run, tuple(args.to.split(",")))
    else:
        plot_runs([Path(run) for run in args.runs], Path(args.out))


if __name__ == "__main__":
    run_script(main)
