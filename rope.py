"""Rotary positions (RoPE): each pair of a head's dimensions is rotated by an angle that grows with the position.

    angle = position * frequency[i]        frequency[i] = theta^(-2i / h)        i = 0 ... h/2 - 1

Models for longer texts stretch the frequencies. ROPES has a function for each way: (frequencies [h/2], config) -> the
stretched ones.

Letters: B batch, T tokens, H heads, h head_dim.

Sources: RoPE (arXiv 2104.09864); the papers at each function."""

import math

import torch
from torch import Tensor

from shapes import ModelConfig


def rope_llama3(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Llama 3.1 (arXiv 2407.21783 section 3.4): slow frequencies are divided by the factor."""
    scaling = config.rope_scaling
    turns = scaling.original_seq_len * frequencies / (2 * math.pi)  # rotations within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)  # 1: a fast frequency stays; 0: a slow one is divided by the factor
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def rope_yarn(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """YaRN (arXiv 2309.00071 section 3.2): frequencies that turn less than beta_slow times within the original context
    are divided by the factor, and frequencies that turn more than beta_fast times stay. In between, the share changes
    evenly with the index of the frequency."""
    scaling, h = config.rope_scaling, config.head_dim

    first, last = (  # the indices of the frequencies that turn so often
        h / 2 * math.log(scaling.original_seq_len / (2 * math.pi * turns)) / math.log(config.rope_theta)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, h - 1)
    slow = (torch.arange(h // 2, device=frequencies.device) - first) / ((last - first) or 0.001)
    return frequencies.lerp(frequencies / scaling.factor, slow.clamp(0.0, 1.0))


# Linear: position interpolation (arXiv 2306.15595). Dynamic NTK scaling changes nothing in rows of up to max_seq_len
# tokens; config.py refuses longer ones.
ROPES = {
    "linear": lambda frequencies, config: frequencies / config.rope_scaling.factor,
    "llama3": rope_llama3,
    "yarn": rope_yarn,
    "dynamic": lambda frequencies, _: frequencies,
}


def rope_frequencies(config: ModelConfig, device: torch.device, kind: str = "full") -> tuple[Tensor, float]:
    """Angle per position for each pair of a head's dimensions, fp32 [h/2], and the factor of cosine and sine, in layers
    of this kind; computed, never stored, so no checkpoint, meta device or dtype conversion can get them wrong."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    frequencies, scaling = 1.0 / config.rope_theta**exponents, config.rope_scaling
    if scaling is None or (kind == "window" and not scaling.in_windows):
        return frequencies, 1.0
    return ROPES[scaling.kind](frequencies, config), scaling.attention_factor


def rope_table(config: ModelConfig, positions: Tensor, kind: str = "full") -> tuple[Tensor, Tensor] | None:
    """(cos, cos) and (-sin, sin), fp32 [B or 1, T, 1, h] each, of the angles at `positions` [B or 1, T] in layers of
    this kind; None where these do not rotate."""
    if config.positions != "rope" or "nope" in kind:
        return None
    frequencies, scale = rope_frequencies(config, positions.device, kind)
    angles = positions.float()[..., None, None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (x[i], x[i + h/2]) of x [B, T, H, h]: Hugging Face's half-split layout."""
    cos, sin = rope
    pairs = x.float()
    return (pairs * cos + pairs.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)
