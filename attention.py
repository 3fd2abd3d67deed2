"""Causal attention: one function, several back-ends.

    out[t] = sum_s softmax_s(q[t] . k[s] / sqrt(h)) v[s]      over s <= t (and, packed, s in the same document)

Causality is `is_causal`, a boolean mask, or the shape of the blocks: never an additive mask, whose dtype has to follow
the query's through every compiler pass (where it does not, training dies with "invalid dtype for bias").

Back-ends: `sdpa`, torch's fused kernels; `blocked`, plain matrix products over blocks of queries for CPUs, where
torch's kernel reaches a fraction of the matmul rate: a block of queries meets only the keys up to its own end, so half
of the work is never done. It keeps the probabilities for the backward pass ([B, H, T, T] / 2), hence it is for short
rows.

Letters: B batch, T tokens (queries), S keys, H heads, K key/value heads, h head_dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BACKENDS = ("sdpa", "blocked")
BLOCK = 128  # queries per block: large enough for the matmul rate, small enough to skip nearly half of the work
BLOCKED_MAX_TOKENS = 1024  # beyond this the stored probabilities cost more memory than the time they save


def choose_backend(name: str, device_type: str, dtype: str, compiled: bool, seq_len: int) -> str:
    """Resolves `auto`; other names are returned as they are. `blocked` pays where it was measured to: compiled, in
    bf16 (in fp32 torch's CPU kernel is as fast), for rows of more than one block."""
    if name != "auto":
        return name
    blocked = device_type == "cpu" and dtype == "bf16" and compiled and BLOCK < seq_len <= BLOCKED_MAX_TOKENS
    return "blocked" if blocked else "sdpa"


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, backend: str = "sdpa") -> Tensor:
    """q [B, T, H, h], k and v [B, S, K, h] with K dividing H -> [B, T, H, h].

    mask: None for plain causal attention (then T == S), or boolean [B or 1, 1, T, S], True where a query sees a key; it
    says everything, causality too."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or K, T or S, h]
    if backend == "blocked":
        out = _blocked(q, k, v, mask, group)
    elif group > 1 and q.device.type == "cpu":  # the CPU's fused kernel takes equal head counts only
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=group > 1)
    return out.transpose(1, 2)


def _blocked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, group: int) -> Tensor:
    B, H, T, h = q.shape
    q = (q * h**-0.5).view(B, H // group, group, T, h)  # the heads of a group share their keys
    k, v = k.unsqueeze(2), v.unsqueeze(2)  # [B, K, 1, S, h]
    out = []
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        seen = stop if mask is None else k.shape[3]
        scores = q[..., start:stop, :] @ k[..., :seen, :].transpose(-1, -2)  # [B, K, group, block, seen]
        if mask is None:
            row = torch.arange(start, stop, device=q.device)[:, None]
            keep = torch.arange(seen, device=q.device)[None, :] <= row
        else:
            keep = mask[:, :, None, start:stop]
        weights = scores.float().masked_fill(~keep, float("-inf")).softmax(-1).to(q.dtype)
        out.append(weights @ v[..., :seen, :])
    return torch.cat(out, 3).view(B, H, T, h)
