"""What a run says and leaves behind: the screen, log.txt, metrics.jsonl, curves.png, env.json, status.json; and where
its time went.

Rank 0 writes. Nothing here waits for a GPU except `Log.step` on the steps that are recorded.
"""

import gc
import itertools
import json
import logging
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from attention import kernel
from config import Config
from errors import ROOT
from model import IGNORE
from shard import Ranks, gather, mesh_shape, on_first_rank

logger = logging.getLogger("flatland")

# Dense bf16 peaks in TFLOP/s, from the makers' data sheets; the first name that is part of the device's is taken.
PEAKS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "A100": 312,
    "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "RTX 4090": 165, "RTX 3090": 71,
    "A6000": 155,
}  # fmt: skip


class _EveryLine(logging.Formatter):
    """The prefix on each line of a message, so that every line can be grepped and cut alike."""

    def format(self, record: logging.LogRecord) -> str:
        lines, args = record.getMessage().splitlines() or [""], record.args
        record.args, out = (), []
        message = record.msg
        for record.msg in lines:
            record.message = None
            out.append(super().format(record))
        record.msg, record.args = message, args
        return "\n".join(out)


def start_logging(folder: Path | None) -> None:
    """Messages go to the screen, with a prefix where that is no terminal, and to log.txt in the folder; None: this rank
    is silent."""
    prefixed = _EveryLine("%(asctime)s %(levelname).1s [%(filename)s:%(lineno)d] %(message)s", "%Y-%m-%d %H:%M:%S")
    logger.handlers.clear()
    logger.propagate = False
    logging.raiseExceptions = False  # a full disk is told once, by what fails to write the metrics
    logger.setLevel(logging.INFO if folder else logging.CRITICAL + 1)
    if folder:
        screen, file = logging.StreamHandler(sys.stdout), logging.FileHandler(folder / "log.txt", encoding="utf-8")
        file.setFormatter(prefixed)
        if not sys.stdout.isatty():
            screen.setFormatter(prefixed)
        logger.handlers += [screen, file]


def write_whole(path: Path, text: str) -> None:
    """Replaces a file at once: a reader sees the old content or the new one."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_status(
    folder: Path, state: str, step: int, exit_code: int | None = None, message: str = "", **more: list[float]
) -> None:
    """state: running, finished, stopped, error (the user's mistake) or failed."""
    attempt = os.environ.get("TORCHELASTIC_RUN_ID", "")  # so that the launcher knows whose end this is
    status = {"state": state, "step": step, "exit_code": exit_code, "message": message, "pid": os.getpid()}
    status["attempt"] = attempt
    write_whole(folder / "status.json", json.dumps(status | more) + "\n")


def read_json(path: Path) -> dict:
    """{} if there is no such file, or no JSON object in it."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe_environment() -> dict:
    """Code, versions and hardware, for env.json."""

    def git(*args: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
        except OSError:  # there is no git here
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    cpu = ""
    if Path("/proc/cpuinfo").exists():
        cpu = next(
            (
                line.split(":", 1)[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            "",
        )
    return {
        "git": git("rev-parse", "HEAD") or None,
        "git_dirty": bool(git("status", "--porcelain")),
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "host": platform.node(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        or [cpu or platform.processor()],
        "threads": torch.get_num_threads(),
    }


def describe_run(config: Config, ranks: Ranks, loader, val_loader, peak_source: str, start: int) -> None:
    """flags.json, env.json and the head of the log: what is needed to know, later, what was run."""
    run, (replicate, size) = Path(config.out), mesh_shape(config.shard_size, ranks.world_size)
    env = describe_environment() | {
        "world_size": ranks.world_size,
        "mesh": {"replicate": replicate, "shard": size},
        "device": ranks.device.type,
        "attention": kernel(config.attention, loader.separate),
        "peak": peak_source,
        "data": {"train": loader.describe(), "val": val_loader.describe() if val_loader else []},
    }
    write_whole(run / "flags.json", json.dumps(asdict(config), indent=1) + "\n")
    write_whole(run / "env.json", json.dumps(env, indent=1) + "\n")
    device = f"{env['devices'][0]} x {ranks.world_size}"
    how = f"{config.dtype}, compile {config.compile}, attention {config.attention}"
    logger.info(f"Run folder: {run}; torch {torch.__version__} on {device}, {how}", stacklevel=2)
    for line in loader.summary(val_loader):
        logger.info(line, stacklevel=2)
    if loader.step_rows % (loader.micro_batch * ranks.world_size):
        logger.info(
            "A step does not divide by the ranks: its last micro-batch is filled with untrained rows", stacklevel=2
        )
    logger.info(f"mfu counts causal attention; its peak per device is {peak_source}", stacklevel=2)
    logger.info(f"Training from step {start + 1} to {config.steps}", stacklevel=2)


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(FLOP/s of a device, where the number is from): the data sheet's for bf16 on a GPU that we know, else a matmul
    measured now."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        for name, tflops in PEAKS.items():
            if name in torch.cuda.get_device_name(device):
                return tflops * 1e12, f"{name} data sheet, {tflops} TFLOP/s"
    n = 8192 if device.type == "cuda" else 1024
    own = torch.Generator(device).manual_seed(0)  # the run's random state is not touched
    a, b = (torch.randn(n, n, device=device, generator=own).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        begin = time.perf_counter()
        c = a @ b
        c[0, 0].item()
        best = min(best, time.perf_counter() - begin)
    if device.type == "cuda":
        del a, b, c
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * n**3 / best, f"a {n} x {n} matmul measured at start, {2 * n**3 / best / 1e12:.3f} TFLOP/s"


def memory_gib(device: torch.device) -> float:
    """Peak so far: allocated on a GPU, resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")  # not getrusage: a child begins with its parent's peak
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def _process_age() -> float:
    """Seconds since this process was started, imports included."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.process_time()


class Clock:
    """Wall time by part. A part takes its time from the one around it, so that the parts add up to the whole."""

    def __init__(self):
        self.begin = time.perf_counter() - _process_age()
        self.parts: dict[str, float] = {}
        self.stack, self.since, self.step = ["start"], self.begin, 0

    def _lap(self) -> None:
        now = time.perf_counter()
        self.parts[self.stack[-1]] = self.parts.get(self.stack[-1], 0.0) + now - self.since
        self.since = now

    def switch(self, part: str, step: int = 0) -> None:
        """From now on time belongs to `part`. step: the last one that was done."""
        self._lap()
        self.stack[-1], self.step = part, step

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._lap()
        self.stack.append(name)
        try:
            with torch.profiler.record_function(f"part: {name}"):  # 8 us where no profiler runs
                yield
        finally:
            self._lap()
            self.stack.pop()

    def seconds(self, name: str) -> float:
        self._lap()
        return self.parts.get(name, 0.0)

    def report(self) -> str:
        self._lap()
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        return f"Time taken: {self.since - self.begin:.1f} seconds ({parts})"


def describe_routers(sums: Tensor) -> dict[str, float]:
    """Transformer.take_router_sums, over all ranks -> the balancing loss, and the experts' shares of the tokens as
    multiples of an even share: each one's over all layers, and the extremes of any layer."""
    loads = sums[:-2] / sums[:-2].mean(1, keepdim=True)
    shares = {f"expert_load_{e}": load for e, load in enumerate(loads.mean(0).tolist())}
    extremes = {"expert_load_max": loads.max().item(), "expert_load_min": loads.min().item()}
    return {"router_aux_loss": (sums[-2, 0] / sums[-1, 0]).item()} | extremes | shares


def _finite(record: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN, which a step that --on_nonfinite skip passed over leaves."""
    return {k: v if math.isfinite(v) else None for k, v in record.items()}


class Log:
    """The step record. All ranks must hold one and call it alike: peak memory is gathered when a step is recorded."""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        clock: Clock,
        config: Config,
        flops_per_token: int,
        peak: float,
        resumed_step: int,
        sources: list[str] = (),
    ):
        self.folder, self.ranks, self.clock = folder, ranks, clock
        self.batch_tokens, self.seq_len = config.batch_tokens, config.seq_len
        self.flops_per_token, self.peak = flops_per_token, peak
        self.sources = sources
        self.by_source = torch.zeros(2, len(sources), dtype=torch.float64, device=ranks.device)  # losses, tokens
        self._mark(resumed_step)
        if ranks.rank == 0:
            records, path = self.records(), folder / "metrics.jsonl"
            if records and not resumed_step:
                aside = next(p for n in itertools.count(1) if not (p := folder / f"metrics-before-{n}.jsonl").exists())
                os.rename(path, aside)
                message = "%s has no checkpoint, but records up to step %d: they are kept in %s; starting at step 1"
                logger.warning(message, folder, records[-1]["step"], aside.name)
            kept = [r for r in records if r["step"] <= resumed_step]
            write_whole(path, "".join(json.dumps(r) + "\n" for r in kept))

    def records(self) -> list[dict]:
        """Of metrics.jsonl; lines that hold none are told of."""
        path, out, damaged = self.folder / "metrics.jsonl", [], 0
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
                out += [record] if record["step"] >= 0 else []
            except (ValueError, TypeError, KeyError):
                damaged += 1
        if damaged:
            logger.warning("%s: lines left out, as they are cut off or damaged: %d", path, damaged)
        return out

    def _mark(self, step: int) -> None:
        self.last_step = step
        self.last_seconds = [self.clock.seconds(part) for part in ("compile", "steps", "data")]

    def count(self, batch, row_losses: Tensor) -> None:
        """Adds the loss of each row [B] of a micro-batch to that of the entry of --data it is from, in a mixture."""
        if batch.sources is not None:
            trained = (batch.targets != IGNORE).sum(1)
            self.by_source.index_add_(1, batch.sources, torch.stack((row_losses.double(), trained.double())))

    def _source_losses(self) -> dict[str, float]:
        """Mean loss per token of each source of a mixture since the last record. All ranks must call."""
        if len(self.sources) < 2:
            return {}
        losses, tokens = sum(gather(self.by_source.cpu(), self.ranks)).tolist()
        self.by_source.zero_()
        rows = zip(self.sources, losses, tokens, strict=True)
        return {f"loss_{name}": loss / n for name, loss, n in rows if n}

    def step(
        self,
        step: int,
        loss: Tensor,
        grad_norm: Tensor,
        lr: float,
        val_loss: float | None = None,
        router_sums: Tensor | None = None,
    ) -> None:
        """Records a step; reads the loss from the device, which is the only wait for it. Speeds, and what routers do
        with their experts, are averages since the last record."""
        loss, grad_norm = loss.item(), grad_norm.item()
        here = memory_gib(self.ranks.device), memory_gib(torch.device("cpu"))
        memories, resident = zip(*gather(here, self.ranks), strict=True)
        memory = max(memories)
        since = self.last_seconds
        steps = step - self.last_step
        self._mark(step)
        data = self.last_seconds[2] - since[2]
        seconds = sum(self.last_seconds) - sum(since)
        tokens_per_s = steps * self.batch_tokens / seconds
        per_device = tokens_per_s / self.ranks.world_size
        record = {
            "step": step,
            "tokens": step * self.batch_tokens,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "step_ms": 1e3 * seconds / steps,
            "data_ms": 1e3 * data / steps,
            "samples_per_s": tokens_per_s / self.seq_len,
            "tok_per_s": tokens_per_s,
            "tok_per_s_per_device": per_device,
            "mfu": per_device * self.flops_per_token / self.peak,
            "mem_gib": memory,
        }
        record |= self._source_losses()
        if router_sums is not None:
            record |= describe_routers(sum(gather(router_sums.double().cpu(), self.ranks)))
        if val_loss is not None:
            record["val_loss"] = val_loss
        on_first_rank(lambda: self._write(record, resident), self.ranks)
        line = (
            f"Batch {step} Loss: {loss:.5f}, Speed: {record['samples_per_s']:.2f} samples/sec, lr: {lr:.6f},"
            f" {tokens_per_s:.0f} tok/s, mfu {record['mfu']:.1%}, grad norm {grad_norm:.3f}, mem {memory:.2f} GiB"
        )
        line += f", val loss {record['val_loss']:.5f}" if "val_loss" in record else ""
        logger.info(line, stacklevel=2)

    def _write(self, record: dict, resident: tuple[float, ...]) -> None:
        with open(self.folder / "metrics.jsonl", "a") as f:
            f.write(json.dumps(_finite(record)) + "\n")
        write_status(self.folder, "running", record["step"], rss_gib=resident)

    def amend(self, **values: float) -> None:
        """Adds values to the record just written, in place: a crash at any moment leaves it whole. All ranks must
        call."""

        def write() -> None:
            if values:
                with open(self.folder / "metrics.jsonl", "rb+") as f:
                    f.seek(-2, os.SEEK_END)  # the closing brace and the line's end
                    f.write(f", {json.dumps(_finite(values))[1:]}\n".encode())

        on_first_rank(write, self.ranks)

    def draw(self) -> None:
        """Writes curves.png from metrics.jsonl."""
        records = self.records() if self.ranks.rank == 0 else []
        if not records:
            return
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        steps = [r["step"] for r in records]
        figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
        (loss, lr), (speed, norm) = axes
        loss.plot(steps, [r["loss"] for r in records], lw=1, label="training, this step")
        evaluated = [r for r in records if "val_loss" in r]
        if evaluated:
            loss.plot(
                [r["step"] for r in evaluated],
                [r["val_loss"] for r in evaluated],
                "o-",
                ms=4,
                label=f"validation, last {evaluated[-1]['val_loss']:.3f}",
            )
        loss.set_ylabel("loss (nats per token)")
        loss.legend()
        lr.plot(steps, [r["lr"] for r in records])
        lr.set_ylabel("learning rate")
        speed.plot(
            steps[1:] or steps, [r["tok_per_s"] for r in records][1:] or [records[0]["tok_per_s"]]
        )  # the first one compiles
        speed.set_ylabel("tokens per second")
        speed.set_ylim(bottom=0)
        norm.plot(steps, [r["grad_norm"] for r in records], lw=1)
        norm.set_ylabel("gradient norm")
        for axis in axes.flat:
            axis.grid(alpha=0.3)
            axis.set_xlabel("step")
            axis.tick_params(labelbottom=True)
        figure.suptitle(self.folder.name)
        temporary = self.folder / f"curves.tmp-{os.getpid()}.png"
        figure.savefig(temporary, dpi=110)
        plt.close(figure)
        gc.collect()  # a figure is full of cycles: left to itself the memory of several would be held
        os.replace(temporary, self.folder / "curves.png")
