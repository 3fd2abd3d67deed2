"""Causal attention: one function, several back-ends.

    out[t] = sum_s softmax_s(q[t] . k[s] / sqrt(h)) v[s]      over s <= t (and, packed, s in the same document)

With a window of W positions, over t - W < s <= t: a token sees W positions, its own included (as transformers counts).

Causality is `is_causal`, a boolean mask, or the shape of the blocks: never an additive mask, whose dtype has to follow
the query's through every compiler pass (where it does not, training dies with "invalid dtype for bias").

Back-ends:

    sdpa      torch's fused kernels, with a boolean mask of T x T if a row holds several documents or has a window
    blocked   matrix products over blocks of queries, for CPUs, where torch's kernel reaches a fraction of their rate
    varlen    torch's kernel for packed documents and windows on a GPU. It takes offsets of documents, not a mask
    flash     the same from the flash-attn package, which also runs plain rows

In `blocked`, a block of queries meets only the keys up to its own end, so half of the work is skipped. With a window it
also skips the keys before the first one that is seen. It keeps the probabilities for the backward pass, half of [B, H,
T, T]. Therefore it suits short rows.

cuDNN never gets a mask: on an H100 its gradients can be NaN then (pytorch issue 196678).

`varlen` runs FlashAttention 2. On an H100 with the flash_attn_interface package it runs FlashAttention 3 at about twice
the rate, which torch activates through public functions; torch 2.15 would otherwise prefer cuDNN to both. `auto` never
takes `flash`: flash-attn 2 has the same kernels as torch. For plain rows on an H100 torch prefers cuDNN's kernels
(published: 1.7 to 2.3 times as fast). The log and env.json name the kernel that runs.

Rows may be shared (context parallelism): `attention_of_part` exchanges heads for tokens around `attention`, so the
back-ends see whole rows.

Letters: B batch, T tokens (queries), S keys, H heads, K key/value heads, h head_dim.

Rotary positions (RoPE, arXiv 2104.09864): each pair of a head's dimensions is rotated by an angle that grows with the
position. Models for longer texts stretch the frequencies: ROPES has a function for each way, with its paper,
(frequencies [h/2], config) -> the stretched ones. config is a shapes.ModelConfig.

    angle = position * frequency[i]        frequency[i] = theta^(-2i / h)        i = 0 ... h/2 - 1"""

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    sdpa_kernel,
)

from base import torch_private
from base.errors import UserError

BACKENDS = ("sdpa", "blocked")  # on every device
PACKED = ("varlen", "flash")  # on GPUs; these take where documents begin, not a mask
INSTALL_FLASH = "pip install packaging ninja && pip install flash-attn --no-build-isolation"
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
FA3 = "flash_attn_interface"  # the module that flash-attn's hopper/ folder installs
BLOCK = 128  # queries per block: large enough for the matmul rate, small enough to skip nearly half of the work
# Blocks are faster in rows up to this length, uncompiled and compiled. In longer rows their stores cost more time.
BLOCKED_MAX_TOKENS = {False: 512, True: 1024}


def choose_backend(name: str, device_type: str, dtype: str, compiled: bool, seq_len: int, head_dim: int = 64) -> str:
    """Resolves `auto`; raises UserError for a back-end that cannot run here. Activates FlashAttention 3 for `varlen`.

    With `varlen`, rows of one document go to sdpa. `blocked` is chosen where it was measured to be faster: in bf16 (in
    fp32 torch's CPU kernel is as fast) and for short rows."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
    fits = device_type == "cuda" and dtype == "bf16" and head_dim % 8 == 0 and head_dim <= 256 and capability >= (8, 0)
    if name in PACKED and not fits:
        raise UserError(f"--attention {name} needs a GPU (A100 or later), bf16 and heads of 8, 16, ... 256 dimensions")
    if name == "flash" and not find_spec("flash_attn"):
        raise UserError(f"--attention flash: the package flash-attn is not installed: {INSTALL_FLASH}")
    if name == "auto":
        blocked = device_type == "cpu" and dtype == "bf16" and seq_len <= BLOCKED_MAX_TOKENS[compiled]
        name = "varlen" if fits else "blocked" if blocked else "sdpa"
    if name == "varlen" and capability == (9, 0) and "FA3" in list_flash_attention_impls() and find_spec(FA3):
        activate_flash_attention_impl("FA3")
    return name


def kernel(backend: str, masked: bool, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> str:
    """The kernel that training runs, for env.json and the log. masked: rows hold several documents, or layers have a
    window. heads: H, K, h."""
    if backend == "flash":
        return f"flash-attn {version('flash-attn')}"
    if backend == "varlen" and masked:
        return f"varlen, {current_flash_attention_impl() or 'FA2'}"
    if backend != "blocked":
        H, K, h = heads
        q, k = (torch.empty(1, n, BLOCK, h, device=device, dtype=dtype, requires_grad=True) for n in (H, K))
        mask = torch.ones(1, 1, BLOCK, BLOCK, dtype=torch.bool, device=device) if masked else None
        choice = _fused(torch_private.choose_sdpa, q, k, k, mask)
        backend = f"sdpa, {SDPBackend(choice).name.lower()}"
    return backend + ", boolean mask" * masked


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, backend: str = "sdpa", window: int = 0,
    offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [B, T, H, h], k and v [B, S, K, h] with K dividing H -> [B, T, H, h]. In Llama 3 8B, 4 rows of 2,048 tokens: q
    [4, 2048, 32, 128], k and v [4, 2048, 8, 128].

    Without mask and offsets it is plain causal attention (then T == S). mask: boolean [B or 1, 1, T, S], True where a
    query sees a key; it must include causality. offsets: for the back-ends in PACKED instead, int32 [N + 1], of the N
    documents in the B T tokens, padded with B T. window: positions that a token sees (then T == S); 0: all before it.
    Two rows of 4 tokens, the first with documents of 3 and 1 tokens:

        tokens             a a a b | c c c c             a plain causal row, T = 4      the same with window = 2
        offsets            0, 3, 4, 8, 8, ...                1 . . .                        1 . . .
                                                             1 1 . .                        1 1 . .
                                                             1 1 1 .                        . 1 1 .
                                                             1 1 1 1                        . . 1 1"""
    B, T = q.shape[:2]
    window = window if window < T else 0
    if mask is None and offsets is None and (backend == "flash" or window and backend == "varlen"):
        offsets = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q.device)  # each row is one document
    if offsets is not None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # the kernel that `kernel` names, with every torch
            return _packed(q, k, v, offsets, backend, window)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or K, T or S, h]
    if backend == "blocked":
        return _blocked(q, k, v, mask, window).transpose(1, 2)
    if window:
        near = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        mask = near if mask is None else mask & near
    return _fused(F.scaled_dot_product_attention, q, k, v, mask).transpose(1, 2)


def _fused(function: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None):
    """function: torch's fused attention, or its choice of a kernel. q [B, H, T, h], k and v [B, K, S, h]."""
    group = q.shape[1] // k.shape[1]
    # A GPU's causal kernels take fewer key than query heads, in 16 bits.
    shared = group > 1 and q.device.type != "cpu" and mask is None and q.dtype != torch.float32
    if group > 1 and not shared:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    with nullcontext() if mask is None else sdpa_kernel(WITHOUT_CUDNN):
        return function(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=shared)


class RowPart(NamedTuple):
    """The part of each row that a rank computes: each row has `count` equal parts. exchange(x [count, ...]) sends x[i]
    to the rank with part i and returns the tensors sent here, in the order of their parts. It is differentiable. All
    ranks of the row must call it."""

    index: int = 0
    count: int = 1
    exchange: Callable[[Tensor], Tensor] | None = None

    def gather(self, x: Tensor) -> Tensor:
        """The x of every part, [count, ...]."""
        return x[None] if self.count == 1 else self.exchange(x.expand(self.count, *x.shape))


WHOLE = RowPart()


def attention_of_part(
    q: Tensor, k: Tensor, v: Tensor, part: RowPart, mask: Tensor | None, backend: str, window: int,
    offsets: Tensor | None,
) -> Tensor:  # fmt: skip
    """`attention` for a part of each row, of t = T / N tokens (DeepSpeed-Ulysses, arXiv 2309.14509): q [B, t, H, h], k
    and v [B, t, K, h] -> [B, t, H, h]. mask, offsets: of whole rows. N must divide H.

    Each head attends by itself, but needs all tokens. So an exchange gives each of the N ranks H / N heads of all T
    tokens. After attention another exchange gives it all heads of its part of the tokens. With N = 2, T = 4, H = 4:

                  before               exchange       attention               exchange       after
        rank 0    tokens 0 1, all heads    ->   all tokens, heads 0 1    ->   tokens 0 1, all heads
        rank 1    tokens 2 3, all heads    ->   all tokens, heads 2 3    ->   tokens 2 3, all heads

    Every rank has as many values before as after. Key/value heads are repeated until N divides them."""
    if part.count == 1:
        return attention(q, k, v, mask, backend, window, offsets)
    N, repeats = part.count, part.count // math.gcd(part.count, k.shape[2])
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    by_part = [x.unflatten(2, (N, -1)) for x in (q, k, v)]  # [B, t, N, H / N or K / N, h]
    heads = [x.shape[3] for x in by_part]
    qkv = part.exchange(torch.cat(by_part, 3).movedim(2, 0))  # [N, B, t, (H + 2K) / N, h]
    q, k, v = qkv.movedim(0, 1).flatten(1, 2).split(heads, 2)  # [B, T, H / N or K / N, h]
    out = attention(q, k, v, mask, backend, window, offsets)
    out = part.exchange(out.unflatten(1, (N, -1)).movedim(1, 0))  # [N, B, t, H / N, h]
    return out.movedim(0, 2).flatten(2, 3)


def _packed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, backend: str, window: int) -> Tensor:
    """The kernels see all rows as one sequence of documents. They get T as the length of the longest document: the true
    maximum would change with the batch and recompile the code. Their backward pass keeps fp32 sums of 128 rows per
    entry of `offsets`, in addition to the tokens' sums: for documents of 64 tokens, twice as much."""
    T = q.shape[1]
    if backend == "flash":
        from flash_attn import flash_attn_varlen_func

        attend = partial(flash_attn_varlen_func, causal=True, window_size=(window - 1, 0))
    else:
        from torch.nn.attention.varlen import varlen_attn

        how = {"window_size": (window - 1, 0), "is_causal": True, "enable_gqa": q.shape[2] != k.shape[2]}
        known = inspect.signature(varlen_attn).parameters  # torch 2.11 and later ones differ
        attend = partial(varlen_attn, **{name: value for name, value in how.items() if name in known})
    rows = (x.flatten(0, 1) for x in (q, k, v))  # [B T, heads, h] each
    return attend(*rows, offsets, offsets, T, T).view(q.shape)


def _blocked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int) -> Tensor:
    """The query heads that share a key head are stacked as rows of one head. The softmax computes in fp32 and stores
    its result in the dtype of the products. Slices of contiguous keys and values are views. In 512 tokens, with BLOCK
    = 128, the four blocks of queries meet these keys, 62 % of the square:

        queries   0 ... 127     keys 0 ... 127
        queries 128 ... 255     keys 0 ... 255
        queries 256 ... 383     keys 0 ... 383
        queries 384 ... 511     keys 0 ... 511"""
    B, H, T, h = q.shape
    group = H // k.shape[1]
    q, k, v = q * h**-0.5, k.flatten(0, 1), v.flatten(0, 1)  # k, v [B K, S, h]
    out = []
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        first = max(0, start + 1 - window) if window else 0
        last = stop if window or mask is None else k.shape[1]
        rows = q[:, :, start:stop].reshape(len(k), -1, h)  # [B K, group block, h]
        scores = (rows @ k[:, first:last].mT).view(B, -1, group, stop - start, last - first)
        # Where only causality hides keys, every query of the block sees the keys before it. Compiled code masks in the
        # loop of the softmax, which writing to a slice would divide.
        edge = first if window or mask is not None or torch.compiler.is_compiling() else start
        row = torch.arange(start, stop, device=q.device)[:, None]
        column = torch.arange(edge, last, device=q.device)[None, :]
        keep = column <= row if mask is None else mask[:, :, None, start:stop, first:last]
        if window:
            keep = keep & (column > row - window)
        with torch.no_grad():  # in place, and without a backward pass: softmax's gradient is zero there anyway
            scores[..., edge - first :].masked_fill_(~keep, float("-inf"))
        weights = scores.softmax(-1)
        out.append((weights.view(len(k), -1, last - first) @ v[:, first:last]).view(B, H, stop - start, h))
    return torch.cat(out, 2)


def rope_llama3(frequencies: Tensor, config) -> Tensor:
    """Llama 3.1 (arXiv 2407.21783 section 3.4): slow frequencies are divided by the factor."""
    scaling = config.rope_scaling
    turns = scaling.original_seq_len * frequencies / (2 * math.pi)  # rotations within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)  # 1: a fast frequency stays; 0: a slow one is divided by the factor
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def rope_yarn(frequencies: Tensor, config) -> Tensor:
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


def rope_frequencies(config, device: torch.device, kind: str = "full") -> tuple[Tensor, float]:
    """Angle per position for each pair of a head's dimensions, fp32 [h/2], and the factor of cosine and sine, in layers
    of this kind; computed, never stored, so no checkpoint, meta device or dtype conversion can get them wrong.

    Why frequencies are stretched: with theta = 500,000 and h = 128, the fastest pair turns once in 2 pi = 6 tokens, the
    slowest one once in 2.6 million. Training on 8,192 tokens shows every angle of a fast pair, but only 0.3 % of the
    slowest pair's turn. In longer rows that pair has angles that the model has never seen. With its frequency divided
    by 8, position 65,536 has the angle that 8,192 had. Fast pairs keep their frequencies, because they tell neighbours
    apart. `llama3` and `yarn` differ in the frequencies between fast and slow."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    theta = kind == "window" and config.window_rope_theta or config.rope_theta
    frequencies, scaling = 1.0 / theta**exponents, config.rope_scaling
    if scaling is None or (kind == "window" and not scaling.in_windows):
        return frequencies, 1.0
    return ROPES[scaling.kind](frequencies, config), scaling.attention_factor


def rope_table(config, positions: Tensor, kind: str = "full") -> tuple[Tensor, ...] | None:
    """(cos, cos) and (-sin, sin), fp32 [B or 1, T, 1, h] each, of the angles at `positions` [B or 1, T] in layers of
    this kind; None where these do not rotate. Queries and keys are multiplied by them, so that the fourth root of h /
    query_scale in both turns attention's 1 / sqrt(h) into 1 / sqrt(query_scale). attention_scale is 1 /
    sqrt(query_scale) itself. With query_growth (Ministral 3) a third table is the factor of the queries alone, [B or 1,
    T, 1, 1]."""
    if config.positions != "rope" or "nope" in kind:
        return None
    frequencies, scale = rope_frequencies(config, positions.device, kind)
    squared = config.attention_scale and config.attention_scale**-2 or config.query_scale or config.head_dim
    scale *= (config.head_dim / squared) ** 0.25
    angles = positions.float()[..., None, None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    table = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    scaling = config.rope_scaling
    if scaling and scaling.query_growth:
        contexts = positions[..., None, None] // scaling.original_seq_len
        table += (1 + scaling.query_growth * contexts.log1p(),)
    return table


def apply_rope(x: Tensor, rope: tuple[Tensor, ...]) -> Tensor:
    """Rotates the pairs (x[i], x[i + h/2]) of x [B, T, H, h]: Hugging Face's half-split layout.

    At position m, a pair (a, b) of frequency f is rotated by the angle m f:

        R(m f) (a, b) = [ cos(m f)  -sin(m f) ] [ a ]  =  ( a cos(m f) - b sin(m f),
                        [ sin(m f)   cos(m f) ] [ b ]       b cos(m f) + a sin(m f) )

    Rotations satisfy R(x)^T = R(-x) and R(x) R(y) = R(x + y). So a query at m and a key at n multiply to

        (R(m f) q) . (R(n f) k) = q^T R(-m f) R(n f) k = q^T R((n - m) f) k

    which depends on the distance n - m only, for every pair and for their sum q . k. In the code, `roll` exchanges the
    halves a and b, and `sin` is (-sin, sin)."""
    cos, sin, *factors = rope
    pairs = x.float()
    pairs = pairs * cos + pairs.roll(x.shape[-1] // 2, -1) * sin
    return (pairs * factors[0] if factors else pairs).to(x.dtype)
