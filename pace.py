"""What every rank spends on a step, and which one holds the others back.

Ranks wait for each other in collectives, so their steps take equally long, whoever is slow: that one waits least. A
step is measured from when its data are there to its update, and in it each collective of the training: on a CPU by the
host's clock, for they block there; on a GPU by events on the stream of the collective, which nobody waits for. The
least that any rank spends in collectives is what they cost; what another spends beyond that is waiting, and the rest
of a step is its own: data + compute. Medians over the steps of a record are compared: one late step names nobody."""

import functools
import platform
import time
from collections.abc import Callable
from statistics import median, median_low
from typing import NamedTuple

import torch
import torch.distributed as dist

# Of torch.distributed, what FSDP2 (torch 2.11 to 2.13), optim.py and fp8.py call.
COLLECTIVES = (
    "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce",
)  # fmt: skip
SLOW = 0.095  # beyond the median: what is shown as 10 %
GPU_EVERY = 8  # steps: of a GPU one in so many is measured, as reading the events takes time


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
        names = [name for name in COLLECTIVES if dist.is_initialized() and hasattr(dist, name)]
        self.wrapped = {name: getattr(dist, name) for name in names}
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
        @functools.wraps(collective)
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
