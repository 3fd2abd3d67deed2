"""Guards of a run's numbers: the reaction to non-finite steps, and the comparison of replicas.

The host waits only for the step before, because a step's flags are read one step late."""

import logging
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from config import Config
from lib.errors import Failure
from lib.parts import local
from lib.ranks import Ranks, gather
from optim import Gradients, trainable_parameters

logger = logging.getLogger("flatland")
SKIPS = 10  # updates in a row that --on_nonfinite skip leaves out before it gives up


class GradientGuard(Gradients):
    """The gradients of train.py's loop, and the host's reaction to skipped updates: a non-finite loss or norm
    stops the run; with --on_nonfinite skip, only SKIPS of them in a row do."""

    def __init__(
        self, model: nn.Module, config: Config, ranks: Ranks, mesh: DeviceMesh | None,
        where: Callable[[int], list[str]] = lambda step: [],
    ):  # fmt: skip
        """where(step): the places in the data of this rank's rows of a recent step."""
        group = None
        if ranks.world_size > 1:  # offloaded gradients are on the host, where the control group's backend works
            group = ranks.control if config.offload == "cpu" else dist.group.WORLD
        replicas = 1 if mesh is None else mesh["replicate"].size()
        limit = 1 if config.on_nonfinite == "stop" else SKIPS
        super().__init__([*trainable_parameters(model).values()], config.clip, group, replicas, limit)
        self.model, self.ranks, self.mesh, self.where = model, ranks, mesh, where
        self.every = config.replicas_every
        self.pending = []  # the flags of steps, on their way to the host

    def check(self, step: int, wait: bool = False) -> None:
        """Waits for the step before and reads its flag; with `wait`, also for this step. Raises Failure after `limit`
        skipped updates in a row, and warns after fewer. Also raises it if replicas differ. Call it once a step; the
        outcome is the same on all ranks."""
        flags = torch.stack((self.skipped_in_row, self.local_loss))
        on_host = flags.to("cpu", non_blocking=True)  # into pinned memory
        copied = torch.get_device_module(flags.device).Event()
        copied.record()
        self.pending.append((step, on_host, copied))
        while len(self.pending) > (0 if wait else 1):
            step_read, on_host, copied = self.pending.pop(0)
            copied.synchronize()
            skipped_in_row, local_loss = on_host.tolist()
            if skipped_in_row:
                self._warn_or_stop(step_read, local_loss, int(skipped_in_row))
        if self.every and step % self.every == 0:
            compare_replicas(self.model, self.ranks, self.mesh, step)

    def _warn_or_stop(self, step: int, local_loss: float, in_row: int) -> None:
        """Raises Failure at the limit of skipped updates in a row, else warns. All ranks must call."""
        rank = f"{self.ranks.name}, with the loss {local_loss}"
        reports = gather((rank, local_loss, self.where(step)), self.ranks)
        bad = [report for report in reports if not math.isfinite(report[1])]
        what = f"{'the loss' if bad else 'the gradient norm'} is not finite"
        if not any(loss for _, loss, _ in reports):
            what = "no token of any rank is trained on"
        lines = [f"Step {step}: {what}. Its rows:"]
        lines += [f"  {rank}: {place}" for rank, _, places in bad or reports for place in places][:8]
        if in_row < self.limit:
            lines.append(f"Its update is skipped (--on_nonfinite skip): {in_row} in a row, {self.limit} end the run")
            return logger.warning("\n".join(lines))
        lines.append(
            f"Such steps in a row: {in_row}. Their updates were not applied. A smaller --lr (--resume_override lr), a"
            " longer --warmup_steps or --dtype fp32 usually helps; --on_nonfinite skip skips single steps"
        )
        raise Failure("\n".join(lines))


def parameter_hash(model: nn.Module) -> int:
    """A hash of the bits of this rank's parts of the parameters, and of the buffers. Two flips of the same bit in one
    tensor cancel."""
    parts = [local(p.detach()) for p in (*model.parameters(), *model.buffers())]
    return hash(tuple(torch.hash_tensor(part).item() for part in parts if part.numel()))


def compare_replicas(model: nn.Module, ranks: Ranks, mesh: DeviceMesh | None, step: int) -> None:
    """Raises Failure on all ranks if copies of the parameters differ. All ranks must call."""
    if mesh is None or mesh["replicate"].size() == 1:
        return
    copies = {}  # part of the parameters -> its hash -> the ranks that have it
    mine = mesh.get_coordinate()[1], parameter_hash(model)
    for (part, value), name in gather((mine, ranks.name), ranks):
        copies.setdefault(part, {}).setdefault(value, []).append(name)
    differing = [names for holders in copies.values() if len(holders) > 1 for names in holders.values()]
    if differing:
        listed = " | ".join(map(", ".join, sorted(differing, key=len)))
        raise Failure(
            f"After step {step} not all copies of the parameters are equal, the odd ones out first: {listed}. The"
            " hardware may be faulty; the same command resumes from the newest checkpoint, in which they were equal"
        )
