"""--replay_every: the first micro-batch of a step is computed once more, before the step, and must give the same bits.

A device that corrupts numbers in silence (bad memory, a marginal unit) seldom does so twice alike. What a rank computes
by itself is compared: its loss, and the gradient of every parameter before it is summed over ranks; so the rank whose
bits differ is the faulty one. Of each gradient a hash is kept, so nothing of its size is held besides. The gradients of
the first pass are thrown away: the step's own numbers are what they are without it."""

import contextlib
import functools
import logging
import platform
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import shard
from errors import Failure
from optim import is_sharded

HASHED = 2**20  # values that are hashed at a time
INTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
logger = logging.getLogger("flatland")


class Corrupted(Failure):
    """A rank computed the same twice, with different results."""


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    numbers = torch.randint(-(2**63), 2**63 - 1, (HASHED,), generator=torch.Generator().manual_seed(0)) | 1
    return numbers.to(device)


def bit_sums(parts: list[Tensor]) -> Tensor:
    """int64 [n]: the bits of each value are multiplied by a random odd number that belongs to its place and summed
    modulo 2^64, HASHED values at a time: so no order of summing changes it, and values that change places, or changes
    whose plain sum is 0, do. Needs 16 MiB beside the tensors, whatever their size."""
    odd = _odd_numbers(parts[0].device)
    bits = [part.contiguous().view(-1).view(INTS[part.element_size()]) for part in parts]
    return torch.stack([x.long().mul_(odd[: len(x)]).sum() for part in bits for x in part.split(HASHED)])


class Replay:
    """Repeats first micro-batches every `every` steps; 0: never."""

    def __init__(self, model: nn.Module, every: int, ranks: shard.Ranks):
        self.model, self.every, self.ranks = model, every, ranks
        self.sums: dict[str, Tensor] = {}  # of the loss and of each gradient of a micro-batch

    @contextlib.contextmanager
    def watch(self, step: int, batch, weight_scales) -> Iterator[None]:
        """Around train_step, of which `batch` is the first micro-batch. Raises Corrupted on all ranks. All ranks must
        call."""
        if not self.every or step % self.every:
            yield
            return
        begin = time.perf_counter()
        with self._watching():
            weight_scales.refresh()
            shard.sync_gradients(self.model, True)
            batch = batch.to(self.ranks.device)
            self.model(batch.tokens, batch.targets, batch.positions, batch.documents, details=True)[0].backward()
            for p in self.model.parameters():
                p.grad = None
            first = self._take()
            seconds = time.perf_counter() - begin
            yield
            second = self._take()
        self._compare(step, first, second, seconds)

    def _take(self) -> dict[str, int]:
        """Waits for the device."""
        sums, self.sums = self.sums, {}
        return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Notes the loss, and each gradient as the backward pass computes it. With FSDP a parameter becomes a whole
        tensor, which has a gradient, when its unit begins its forward pass."""
        units = {name: m for name, m in self.model.named_modules() if hasattr(m, "unshard")}
        hooks, known = [], set()

        def note(name: str) -> Callable[[Tensor], None]:
            def note_once(value: Tensor) -> None:  # later micro-batches of the step do not count
                if name not in self.sums:
                    self.sums[name] = bit_sums([value.detach()]).sum()

            return note_once

        def attach(prefix: str, module: nn.Module) -> None:
            for name, p in module.named_parameters(prefix):
                if p.requires_grad and not is_sharded(p) and name not in known:
                    known.add(name)
                    receivers = {p, getattr(p, "compute_copy", p)}  # the one that is used has the gradient
                    hooks.extend(receiver.register_hook(note(name)) for receiver in receivers)

        for prefix, unit in units.items():
            hooks.append(unit.register_forward_pre_hook(lambda module, _, prefix=prefix: attach(prefix, module)))
        attach("", self.model)
        hooks.append(self.model.lm_head.register_forward_hook(lambda _, args, outputs: note("the loss")(outputs[0])))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _compare(self, step: int, first: dict[str, int], second: dict[str, int], seconds: float) -> None:
        mine = [name for name in first if first[name] != second.get(name)]
        told = shard.gather((platform.node(), mine), self.ranks)
        faulty = [f"rank {rank} on {host} ({', '.join(names[:3])})" for rank, (host, names) in enumerate(told) if names]
        if not faulty:
            return logger.info("Replay: step %d gave the same bits on all ranks; it took %.2f s", step, seconds)
        alike = len(faulty) == self.ranks.world_size > 1
        raise Corrupted(
            f"Step {step}: the same micro-batch computed twice gave different bits: {'; '.join(faulty)}."
            + (" On all ranks alike it is rather a kernel that does not repeat its bits." if alike else "")
            + " No checkpoint of this step was written. Take that machine out, and start again"
        )
