"""How the parameters of --offload cpu come to a GPU that has them whole, on one rank or with --shard_size 1. They live
in the host's memory with gradients and moments; FSDP2 (CPUOffloadPolicy) brings a unit's parameters when the unit
computes. Two things are different here:

- They cross in the compute dtype. The host keeps pinned copies, which are made anew after an update: of fp32 masters
  half the bytes cross, and the GPU casts nothing.
- torch copies on the stream that computes. Here another stream does, from the moment when FSDP is told of the unit,
  which is --prefetch units ahead of its use.

Where parameters are sharded, each GPU fetches its part alone, on a stream that torch has for it; copies would cost the
host more than they win.

A buffer on the GPU belongs to the stream that computes: it is freed and used again in the order of that stream, and the
copying stream waits until the buffer's turn has come. So no more units exist at a time than FSDP asks for, however far
the host is ahead. This stands on private parts of torch.distributed.fsdp, which torch 2.11 and 2.13 have alike."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, alloc_storage


class OffloadedParam(FSDPParam):
    """An FSDPParam with a copy in the compute dtype."""

    copy: Tensor | None = None
    made_from: tuple[int, int] | None = None  # the values that `copy` was made from: their address and version
    arrived: torch.cuda.Event | None = None  # when they are in `all_gather_outputs`; None: they are not on their way

    def values(self) -> Tensor:
        """In the compute dtype, flat, on the host."""
        values = self._sharded_param_data.detach()
        if self.param_dtype in (None, values.dtype):
            return values
        now = values.data_ptr(), values._version
        if self.made_from != now:
            if self.copy is None:
                self.copy = torch.empty_like(values, dtype=self.param_dtype, pin_memory=self.pin_memory)
            self.copy.copy_(values)
            self.made_from = now
        return self.copy

    @torch.no_grad()
    def fetch(self, stream: torch.cuda.Stream) -> None:
        """Begins to bring it."""
        values, computing = self.values(), torch.cuda.current_stream(self.device)
        self.init_all_gather_outputs([values.numel()], [values.dtype], 1, self.device)
        out = self.all_gather_outputs[0]
        alloc_storage(out)
        stream.wait_stream(computing)
        with torch.cuda.stream(stream), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(values, non_blocking=True)
            self.arrived = stream.record_event()

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """FSDP copies these to `all_gather_outputs`: where they are already, after `fetch`."""
        if self.arrived is None:
            return [self.values().to(self.device, non_blocking=True)]
        torch.cuda.current_stream(self.device).wait_event(self.arrived)
        self.arrived = None
        return self.all_gather_outputs


def bring_ahead(model: nn.Module, to_gpu: bool) -> None:
    """Of a model that `fully_shard` has wrapped, with parameters that are whole on this rank."""
    stream = torch.cuda.Stream(priority=-1) if to_gpu else None
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if hasattr(module, "_get_fsdp_state") else None
        for parameter in group.fsdp_params if group else []:
            parameter.__class__ = OffloadedParam
        if group and to_gpu:
            group.unshard = _fetching(group, group.unshard, stream)


def _fetching(group, unshard: Callable, stream: torch.cuda.Stream) -> Callable:
    """FSDP calls it to bring a unit's parameters: when it computes, or as far ahead as is to be prefetched."""

    def fetch_too(async_op: bool = False) -> None:
        pending = group._all_gather_result
        unshard(async_op)
        if group._all_gather_result is not pending:
            for parameter in group.fsdp_params:
                parameter.fetch(stream)

    return fetch_too
