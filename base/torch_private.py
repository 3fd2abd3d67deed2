"""Every private name of torch that the project uses. Each has a docstring or comment that states its purpose and the
public API that would replace it. If torch lacks a name, importing this module fails. Tested with torch 2.11 to 2.15."""

import sys
from collections.abc import Sequence
from importlib import import_module
from operator import attrgetter

import torch
from torch import Tensor
from torch._C import _distributed_c10d as _c10d

_all_to_all = torch.ops._c10d_functional.all_to_all_single
_wait = torch.ops._c10d_functional.wait_tensor
_dump_record = getattr(_c10d, "_dump_nccl_trace", None) or _c10d._dump_fr_trace
_foreach_norm = torch._foreach_norm
add_to = torch._foreach_add_  # adds a number or a scalar to each tensor of a list. Waits for torch.foreach.
DispatchMode = torch.utils._python_dispatch.TorchDispatchMode  # shown every operator; waits for a public name
# The value of the SDPBackend that scaled_dot_product_attention would choose. Waits for a public query.
choose_sdpa = torch._fused_sdp_choice
# FP8 products of matrices, and of groups of rows. torch 2.11 does not compile F.scaled_mm and F.scaled_grouped_mm, and
# until 2.13 the latter: they replace these names when the oldest supported torch does.
scaled_mm, scaled_grouped_mm = torch._scaled_mm, torch._scaled_grouped_mm


# ---- distributed


def count_collectives(group) -> int:
    """How many collectives this rank has started in a group; None: the default group. Waits for a public counter."""
    return (group or torch.distributed.group.WORLD)._get_sequence_number_for_group()


def dump_collectives() -> bytes:
    """The pickle of torch's record of this rank's last collectives: NCCL's, or gloo's in a build for CPUs. Waits for a
    public name."""
    return _dump_record(includeStackTraces=False)


def all_to_all(x: Tensor, group_name: str, size: int) -> Tensor:
    """Sends the `size` equal parts of x, along dimension 0, to the ranks of a group, and returns theirs. The compiler
    traces it; on a GPU the host does not wait. Waits for the collectives that the compiler traces to be public."""
    lengths = [len(x) // size] * size
    return _wait(_all_to_all(x.contiguous(), lengths, lengths, group_name))


def held_tensor(parameter: Tensor) -> Tensor:
    """The very tensor that a DTensor holds, because FSDP looks for its all-gather hooks there; other tensors
    themselves. Waits for a public way to register these hooks: `DTensor.to_local` returns a view."""
    return parameter._local_tensor if hasattr(parameter, "to_local") else parameter


# ---- optimizer


def norms(tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """The norm of each tensor, computed in `dtype`, in one launch. Waits for torch.foreach.norm, which begins with
    torch 2.15; torch.nn.utils.get_total_norm returns only the total."""
    return _foreach_norm(tensors, order, dtype=dtype) if tensors else ()


# ---- operators and the compiler


EXPENSIVE = (
    "aten.mm", "aten.addmm", "aten._scaled_mm", "aten._grouped_mm", "aten._scaled_grouped_mm",
    "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable", "aten._flash_attention_forward",
    "torch_attn._varlen_attn",
)  # fmt: skip


def expensive_operators() -> list:
    """Matrix products and attention: what selective checkpointing keeps. Waits for public names of these operators."""
    import_module("torch.nn.attention.varlen")  # registers its operator; takes seconds
    return [attrgetter(f"{name}.default")(torch.ops) for name in EXPENSIVE]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """A fused kernel, also on the meta device, where scaled_dot_product_attention takes the unfused one: a GPU's, which
    is causal, or with a mask a CPU's. Waits for a way to choose the kernel there."""
    if mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)[0]


def is_compiler_loaded() -> bool:
    """Whether this process has compiled anything, or is about to: without that, loading the compiler takes seconds.
    Waits for a public query."""
    return "torch._dynamo" in sys.modules


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Makes the compiler treat this size as variable from the first call on. Waits for a function in torch.compiler."""
    import_module("torch._dynamo").maybe_mark_dynamic(tensor, dim)
