"""What the forward pass keeps for the backward pass: activation checkpointing, and keeping it in the host's memory.

Both rebind a block's `forward`: no wrapper modules, so names stay; and a plain function, which the compiler can trace.
Checkpointing is to be applied before compilation, offloading after it: the compiler must see the one and not the other.
"""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# What selective checkpointing keeps, where this torch has it: matrix products and attention, the expensive part.
KEPT = {
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward",
    )
    if hasattr(torch.ops.aten, name)
}  # fmt: skip


def checkpoint_activations(model: nn.Module, mode: str) -> None:
    """block: each block keeps its input only and computes the rest again in the backward pass (arXiv 1604.06174);
    selective: it keeps the outputs of its matrix products and of attention, too."""
    if mode == "selective":
        with contextlib.suppress(ImportError, AttributeError):
            import torch.nn.attention.varlen  # registers its operator; here, as it also loads the compiler: seconds

            KEPT.add(torch.ops.torch_attn._varlen_attn.default)
    for block in model.layers if mode != "none" else []:
        block.forward = _checkpointed(block.forward, mode)


def _checkpointed(forward: Callable, mode: str) -> Callable:
    if mode == "block":

        def run(*args):
            return checkpoint(forward, *args, use_reentrant=False)
    else:

        def run(*args):
            return checkpoint(forward, *args, use_reentrant=False, context_fn=_selective)

    return run


def _keep(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_selective = partial(create_selective_checkpoint_contexts, _keep)


def offload_activations(model: nn.Module, on: bool, device: torch.device) -> None:
    """The inputs of blocks, which checkpointing keeps, wait in the host's memory for the backward pass."""
    parking = Parking(device)
    for block in model.layers if on else []:
        block.forward = parking.around(block.forward)


class Parking:
    """Tensors on their way to the host and back. On a GPU both ways are pinned copies on a stream of their own: the
    forward pass does not wait for them, and the backward pass, which needs them last to first, has the next one
    fetched while it works on this one. On a CPU the copies are made just the same, and save nothing."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self.parked: list[list] = []  # [on the host, back on the device or None], in the order of the forward pass

    def around(self, forward: Callable) -> Callable:
        def run(x: Tensor, *args):
            def pack(saved: Tensor):  # everything that is saved for the backward pass comes here
                same = saved.data_ptr() == x.data_ptr() and saved.shape == x.shape and saved.dtype == x.dtype
                return self._park(saved) if same else saved

            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpark):
                return forward(x, *args)

        return run

    def _park(self, x: Tensor) -> list:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=self.cuda)
        if self.cuda:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                host.copy_(x, non_blocking=True)
            x.record_stream(self.stream)  # its memory is given out again only after the copy
        else:
            host.copy_(x)
        self.parked.append([host, None])
        return self.parked[-1]

    def _fetch(self, entry: list) -> None:
        if entry[1] is None and self.cuda:
            with torch.cuda.stream(self.stream):  # in the stream's order: after the copy to the host
                entry[1] = entry[0].to(self.stream.device, non_blocking=True)
        elif entry[1] is None:
            entry[1] = entry[0].clone()

    def _unpark(self, entry) -> Tensor:
        if isinstance(entry, Tensor):
            return entry
        self._fetch(entry)
        while self.parked and self.parked.pop() is not entry:
            pass  # those after it are done with
        if self.cuda:
            torch.cuda.current_stream().wait_stream(self.stream)
            entry[1].record_stream(torch.cuda.current_stream())
        if self.parked:
            self._fetch(self.parked[-1])
        return entry[1]
