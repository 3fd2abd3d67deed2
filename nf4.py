"""Linear layers whose frozen weight is kept in four bits (NF4).

    w = LEVELS[code] * scale         scale: the largest magnitude of 64 consecutive values of a row, in fp32

    a block with scale 0.4, four of its values      0.10   -0.31   0.00    0.40
    divided by the scale                            0.25   -0.775  0.00    1.00
    nearest level                                   0.246  -0.696  0.00    1.00
    code                                           10       1      7      15        two bytes: 0xA1 0x7F
    w                                               0.098  -0.278  0.00    0.40

The 16 levels are the quantiles of a normal distribution, scaled to [-1, 1]. A value becomes the nearest level. Two
codes share a byte, the first in its upper half. With the scales a weight takes 4.5 bits per value. The scales are not
quantized themselves: that would save 0.4 bits of these.

A layer dequantizes to the dtype of its input where it multiplies, and once more for the gradient of its input. Neither
pass saves the weight. Dequantization is a table look-up and a product, which the compiler fuses into one kernel. The
table holds the two values of each byte, so that no index is larger than the weight. A scale that is infinite or NaN
makes its whole block non-finite, so that a damaged weight shows in the loss.

Sources: QLoRA (arXiv 2305.14314) section 3 and appendix E; the levels, the blocks and the order in a byte are those of
bitsandbytes, which gives the same bits."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

BLOCK = 64  # values that share a scale
AT_ONCE = 2**20  # bytes of codes that are dequantized together, uncompiled
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in], in a multiple of BLOCK -> (uint8 [out, in / 2], fp32 [out, in / BLOCK]). Llama 3 8B's down_proj
    [4096, 14336] becomes [4096, 7168] and [4096, 224]: 31.5 MiB instead of 112 in bf16."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))  # [out, in / BLOCK, BLOCK]
    scales = blocks.abs().amax(2)
    levels = torch.tensor(LEVELS, device=weight.device)
    shares = blocks / scales.clamp(min=2.0**-149)[..., None]
    codes = torch.bucketize(shares, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    codes = codes.to(torch.uint8).view(len(weight), -1, 2)
    return codes[..., 0] << 4 | codes[..., 1], scales


def dequantize(
    codes: Tensor, scales: Tensor, pairs: Tensor, dtype: torch.dtype, index: torch.dtype = torch.int32
) -> Tensor:
    """The weight [out, in] in `dtype`, from to_nf4's two tensors. pairs: the levels of the two codes in each byte,
    fp32 [256, 2]. Uncompiled, a few rows at a time: the fp32 values of a whole weight take more memory than the
    result."""
    rows, width = codes.shape
    if not torch.compiler.is_compiling() and (few := max(1, AT_ONCE // width)) < rows:
        out = codes.new_empty(rows, 2 * width, dtype=dtype)
        for part, *quantized in zip(out.split(few), codes.split(few), scales.split(few), strict=True):
            part.copy_(dequantize(*quantized, pairs, dtype, index))
        return out
    values = nn.functional.embedding(codes.to(index), pairs).view(*scales.shape, BLOCK)
    return values.mul_(scales[..., None]).to(dtype).flatten(1)


class _Linear(torch.autograd.Function):
    """x [..., in] -> [..., out]"""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Tensor, scales: Tensor, pairs: Tensor, dequantize: Callable) -> Tensor:
        ctx.save_for_backward(codes, scales, pairs)
        ctx.dequantize = dequantize
        return nn.functional.linear(x, dequantize(codes, scales, pairs, x.dtype))

    @staticmethod
    def backward(ctx, g: Tensor):
        # Another type of index: the compiler would recognise the same computation, and save the first one's result.
        return g @ ctx.dequantize(*ctx.saved_tensors, g.dtype, torch.int64), None, None, None, None


class Nf4Linear(nn.Linear):
    """Has three buffers in place of the weight: codes, scales and pairs, as dequantize takes them."""

    dequantize = staticmethod(dequantize)  # looked up on self, so that memory.py can count it as one kernel
    recomputed = False  # whether checkpointing computes the layer again: a compiler keeps the products of a Function

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed and torch.compiler.is_compiling():
            y = nn.functional.linear(x, self.dequantize(self.codes, self.scales, self.pairs, x.dtype))
        else:
            y = _Linear.apply(x, self.codes, self.scales, self.pairs, self.dequantize)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def fill(self, rows: slice, values: Tensor) -> None:
        """Quantizes these rows of the weight, on the layer's device."""
        self.codes[rows], self.scales[rows] = to_nf4(values.to(self.codes.device))
        levels = torch.tensor(LEVELS, device=self.codes.device)
        self.pairs.copy_(torch.cartesian_prod(levels, levels))


def convert_linear(layer: nn.Linear) -> None:
    """Replaces the weight of a layer by buffers without values, in place."""
    empty, (N, K) = layer.weight.new_empty, layer.weight.shape
    del layer.weight
    layer.__class__ = Nf4Linear
    layer.codes = nn.Buffer(empty(N, K // 2, dtype=torch.uint8))
    layer.scales = nn.Buffer(empty(N, K // BLOCK, dtype=torch.float32))
    layer.pairs = nn.Buffer(empty(256, 2, dtype=torch.float32))


def four_bit_layers(model: nn.Module) -> dict[str, Nf4Linear]:
    """The converted layers by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Nf4Linear)}


def elements(model: nn.Module) -> int:
    """Values of the quantized weights."""
    return sum(2 * layer.codes.numel() for layer in four_bit_layers(model).values())
