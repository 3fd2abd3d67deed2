"""Linear layers that multiply in FP8. A layer has three matrix products, which FP8 kernels compute on a GPU. A CPU
multiplies the same FP8 values in fp32.

    y = x W^T      dx = g W      dW = g^T x           each operand A becomes q = fp8(A s), the product is divided by s

The scale s takes the largest magnitude of A, amax, to the format's largest value, so that nothing is clipped. It is
computed from the current values of A. Recipes:

    tensor     one s per tensor; x and W in e4m3, g in e5m2 (range) or e4m3 (precision). The fastest.
    row        one s per row of the left operand and column of the right one, a power of two; e4m3. An outlier costs
               its own row only. Each operand is cast along both of its dimensions.
    row_gw_hp  the same, with dW in the compute dtype: the most accurate.

The scale in numbers. e4m3 has 4 bits of exponent and 3 of mantissa: its largest value is 448, its smallest 2^-9 =
0.002, and from 2^-6 on rounding errs by at most 6 %. e5m2 gives one bit of the mantissa to the exponent: its largest
value is 57,344, its smallest 2^-16, and from 2^-14 on rounding errs by at most 13 %.

    amax 3.5       s = 448 / 3.5 = 128       0.01 s = 1.28 -> 1.25, and 1.25 / 128 = 0.0098: 2 % too small
    amax 3,500     s = 0.128                 0.01 s = 0.00128 -> 2^-9, and 2^-9 / 0.128 = 0.0153: 53 % too large
    no scale       1e-5 -> 0, because it is less than half of 2^-9: small gradients would vanish

The second line has an outlier: one large value costs the small values that share its scale their precision. With a
scale per row only the values of its row share it. A product of two operands carries both scales, (A sa) (B sb) = A B
(sa sb), and is divided by both once, at the end.

Quantization is made of plain aten operations, which the compiler fuses into the kernel that produces the operand.
Weights are rounded to the compute dtype before they are quantized. Therefore a weight gives the same bits when its
layer quantizes it, when `WeightScales` does so once per step, and when each rank quantizes its shard before FSDP
gathers it. Stacked experts have a scale per row with every recipe, and dW in the compute dtype. A converted layer keeps
its parameters and their names, and computes as before when it is not training. A checkpoint needs no state of FP8.

Sources: FP8 formats (arXiv 2209.05433); the recipes' names and the sizes worth converting follow torchao's."""

import functools
import math
import re
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from base import torch_private
from base.errors import UserError
from base.torch_private import held_tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("tensor", "row", "row_gw_hp")
GRAD_DTYPES = {"e5m2": E5M2, "e4m3": E4M3}
SKIP = ("lm_head", "gate")  # the head's and the router's precision decides the loss; both are small
MULTIPLE = 16  # of every dimension that a kernel reads along
TINY = 2.0**-100  # least amax, so that zeros stay zeros; 1e-12 would flush small gradients to zero


# ---- quantization and the two kernels


def make_scale(amax: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """fp32, of amax's shape: 448 / amax for e4m3. power_of_two: rounded down, 128 stays and 100 becomes 64. The product
    x scale then has the mantissa of x, and only the cast to FP8 rounds. An infinite amax gives 0 (and its operand NaN),
    a NaN gives NaN or inf: both reach the product."""
    scale = torch.finfo(dtype).max / amax.float().clamp(min=TINY)
    if power_of_two:  # the exponent's bits alone; log2 is inexact on some devices
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def to_fp8(x: Tensor, dtype: torch.dtype, dim: int | None = None, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """-> (x scale in fp8, scale). With dim None, the scale is one fp32 value (0-dim). Otherwise each slice along dim
    has a scale, which is a power of two."""
    if scale is None:
        amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
        scale = make_scale(amax, dtype, dim is not None)
    return (x.float() * scale).to(dtype), scale


def column_major(x: Tensor) -> Tensor:
    """The same matrix (or stack of them), with its columns contiguous."""
    return x.transpose(-2, -1).contiguous().transpose(-2, -1)


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a [M, K], row-major, b [K, N], column-major, / (scale_a scale_b) -> [M, N] of `dtype`. For q, k and v of Llama 3
    8B and 8,192 tokens: a [8192, 4096], b [4096, 6144], and with recipe row scales [8192, 1] and [1, 6144].

    scales: both 0-dim, or [M, 1] and [1, N]. fast: sums in the tensor cores' own, shorter accumulator. A GPU refuses
    other layouts, K or N that do not divide by MULTIPLE, and e5m2 x e5m2; a CPU does not."""
    inverse_a, inverse_b = scale_a.reciprocal(), scale_b.reciprocal()
    if a.device.type == "cpu":  # torch's own kernel is a plain loop there: 34 s where this takes 0.02
        return (a.float() @ b.float() * (inverse_a * inverse_b)).to(dtype)
    return torch_private.scaled_mm(a, b, inverse_a, inverse_b, out_dtype=dtype, use_fast_accum=fast)


def grouped_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """The rows of a [n, K] up to each of `ends` [E] by their expert's b[e] [K, N] -> [n, N]; scales [n, 1] and [E, 1,
    N]. In Mixtral 8x7B, 4,096 tokens with two experts each: a [8192, 4096], b [8, 4096, 28672], ends [8].

    One kernel on a GPU. On a CPU a loop multiplies every row with every expert and keeps the products that belong
    together. Neither needs `ends` on the host."""
    if a.device.type != "cpu":
        inverse_a, inverse_b = scale_a.reciprocal()[:, 0], scale_b.reciprocal()[:, 0]
        return torch_private.scaled_grouped_mm(a, b, inverse_a, inverse_b, ends, out_dtype=dtype, use_fast_accum=True)
    expert, out = _expert_of_row(a, ends), a.new_zeros(len(a), b.shape[2], dtype=dtype)
    for e in range(len(b)):
        out = torch.where(expert == e, scaled_mm(a, b[e], scale_a, scale_b[e], dtype, True), out)
    return out


def _expert_of_row(x: Tensor, ends: Tensor) -> Tensor:
    return (torch.arange(x.shape[0], device=x.device)[:, None] >= ends).sum(1, keepdim=True)  # [n, 1]


# ---- the layers


class _Linear(torch.autograd.Function):
    """x [M, K] and weight [N, K] -> [M, N]. quantized and scale: the weight in FP8 and its scale, or None if the layer
    must compute them. watch [2, 4] receives the figures of x and g as a gradient, which compiler, checkpointing and
    accumulation support without further code."""

    @staticmethod
    def forward(ctx, x, weight, quantized, scale, watch, recipe, grad_dtype):
        ctx.recipe, ctx.grad_dtype, ctx.dtype = recipe, grad_dtype, weight.dtype
        dim = None if recipe == "tensor" else 1
        xq, sx = to_fp8(x, E4M3, dim)
        wq, sw = to_fp8(weight.to(x.dtype), E4M3, dim, scale) if quantized is None else (quantized, scale)
        seen = None if watch is None else figures(x, xq, sx)
        if dim is None:
            ctx.save_for_backward(xq, weight if quantized is None else quantized, seen, sx, sw)
        else:
            ctx.save_for_backward(x, weight, seen)
        return scaled_mm(xq, wq.t(), sx, sw.t(), x.dtype, True)

    @staticmethod
    def backward(ctx, g):
        x, weight, seen, *scales = ctx.saved_tensors
        g = g.contiguous()
        if ctx.recipe == "tensor":
            sx, sw = scales
            gq, sg = to_fp8(g, ctx.grad_dtype)
            wq = weight if weight.dtype == E4M3 else to_fp8(weight.to(g.dtype), E4M3, scale=sw)[0]
            dx = scaled_mm(gq, column_major(wq), sg, sw, g.dtype, False)
            dw = scaled_mm(gq.t().contiguous(), column_major(x), sg, sx, g.dtype, False)
        else:
            gq, sg = to_fp8(g, E4M3, 1)
            wq, sw = to_fp8(weight.to(g.dtype), E4M3, 0)
            dx = scaled_mm(gq, column_major(wq), sg, sw, g.dtype, True)
            if ctx.recipe == "row":
                (gt, st), (xq, sx) = to_fp8(g, E4M3, 0), to_fp8(x, E4M3, 0)
                dw = scaled_mm(gt.t().contiguous(), column_major(xq), st.t(), sx, g.dtype, True)
            else:
                dw = g.t() @ x
        if seen is not None:
            seen = torch.stack((seen, figures(g, gq, sg)))
        return dx, dw.to(ctx.dtype), None, None, seen, None, None


class _Experts(torch.autograd.Function):
    """x [n, K] sorted by expert, weight [E, N, K], ends int32 [E] -> [n, N]."""

    @staticmethod
    def forward(ctx, x, weight, ends):
        ctx.save_for_backward(x, weight, ends)
        (xq, sx), (wq, sw) = to_fp8(x, E4M3, 1), to_fp8(weight.to(x.dtype), E4M3, 2)
        return grouped_scaled_mm(xq, wq.transpose(1, 2), sx, sw.transpose(1, 2), ends, x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, weight, ends = ctx.saved_tensors
        g = g.contiguous()
        (gq, sg), (wq, sw) = to_fp8(g, E4M3, 1), to_fp8(weight.to(g.dtype), E4M3, 1)
        dx = grouped_scaled_mm(gq, column_major(wq), sg, sw, ends, g.dtype)
        if g.device.type != "cpu":
            dw = nn.functional.grouped_mm(g.t(), x, offs=ends)
        else:
            expert = _expert_of_row(x, ends)
            dw = torch.stack([torch.where(expert == e, g, 0.0).t() @ x for e in range(len(ends))])
        return dx, dw.to(weight.dtype), None


class Fp8Linear:
    """Added to the class of a converted nn.Linear."""

    fp8_recipe: str
    fp8_grad_dtype: torch.dtype  # of recipe tensor
    fp8_weight = fp8_scale = None  # the quantized weight and its scale, if WeightScales computes them
    fp8_local = None  # this rank's part of the quantized weight, if WeightScales writes it
    fp8_watch = None  # collects figures as its gradient

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        weight = self.weight, self.fp8_weight, self.fp8_scale
        y = _Linear.apply(rows, *weight, self.fp8_watch, self.fp8_recipe, self.fp8_grad_dtype)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Fp8Experts:
    """Added to the class of a converted module of stacked experts, which calls `matmul`."""

    def matmul(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return _Experts.apply(x.contiguous(), weight, ends) if self.training else super().matmul(x, weight, ends)


@functools.cache
def _mixed(mixin: type, cls: type) -> type:
    return type(f"Fp8{cls.__name__}", (mixin, cls), {})


# ---- conversion


def convert_linears(
    module: nn.Module,
    recipe: str = "tensor",
    grad_dtype: str = "e5m2",
    skip: Sequence[str] = SKIP,
    small: bool | None = None,
) -> list[tuple[str, tuple[int, ...], str]]:
    """Makes the linear layers and stacked experts of a model compute in FP8, in place -> (name, shape, "fp8" or
    "bf16: reason") of each weight that multiplies.

    grad_dtype: e5m2 or e4m3, the format of g with recipe tensor; the other recipes use e4m3 throughout. skip: layers
    that stay in bf16 in addition to SKIP, by their names or by parts of them between dots. Raises UserError for one
    that matches no layer. small: whether to convert layers that are too small to become faster, according to published
    measurements on Hopper GPUs; None: only on a CPU, where no layer becomes faster."""
    assert recipe in RECIPES, recipe
    rows, unmatched, skip = [], {*skip} - {*SKIP}, {*SKIP, *skip}
    for name, m in module.named_modules():
        if hasattr(m, "matmul"):
            mixin, weights = Fp8Experts, {f"{name}.{k}": p for k, p in m.named_parameters(recurse=False) if p.ndim == 3}
        elif isinstance(m, nn.Linear) or name == "lm_head":  # the loss head
            mixin, weights = Fp8Linear, {name: m.weight}
        else:
            continue
        skipping = {part for part in skip for weight in weights if f".{part}." in f".{weight}."}
        unmatched -= skipping
        sizes = [p.shape[-2:] for p in weights.values()]  # the experts of a module go together
        odd = [f"{N} and {K}" for N, K in sizes if N % MULTIPLE or K % MULTIPLE]
        by_tensor = recipe == "tensor" and mixin is Fp8Linear
        tiny = any(N <= 1024 and K <= 4096 if by_tensor else N <= 2048 or K <= 1024 for N, K in sizes)
        is_on_cpu = all(p.device.type == "cpu" for p in weights.values())
        if skipping:
            verdict = "bf16: skipped by name"
        elif odd:
            verdict = f"bf16: {odd[0]} must divide by {MULTIPLE}"
        elif tiny and not (is_on_cpu if small is None else small):
            verdict = "bf16: too small to become faster"
        else:
            verdict = "fp8"
            if not isinstance(m, mixin):
                m.__class__ = _mixed(mixin, m.__class__)
            m.fp8_recipe, m.fp8_grad_dtype = recipe, GRAD_DTYPES[grad_dtype]
        rows += [(weight, tuple(p.shape), verdict) for weight, p in weights.items()]
    if unmatched:
        raise UserError(f"--fp8_skip: no layer is called {', '.join(sorted(unmatched))}")
    return rows


# ---- once per step


class WeightScales:
    """Computes the weights' scales (recipe tensor) once per optimizer step: one norm over all weights, one all-reduce
    over the ranks that share a copy of the parameters. Also quantizes each rank's part of weights that are gathered
    in FP8, and once for all micro-batches, if there are several, weights that are not sharded.

    `refresh` must run before the first forward pass of every step, because the layers do not notice that an optimizer
    has changed a weight. All ranks must call alike."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None, gathers: bool, reuse: bool, compiled: bool):
        """Call it once the parameters are allocated. gathers: in FP8. reuse: steps have several micro-batches.
        compiled: the quantization is compiled."""
        self.modules = [m for m in model.modules() if isinstance(m, Fp8Linear) and m.fp8_recipe == "tensor"]
        self.dtype, self.group = model.dtype, None if mesh is None else mesh["shard"].get_group()
        self.quantize = torch.compile(_quantize_into, dynamic=True) if compiled else _quantize_into
        if not self.modules:
            return
        device = held_tensor(self.modules[0].weight).device
        self.scales = torch.ones(len(self.modules), 4, device=device)  # 16 bytes apart: compiled code needs alignment
        for i, m in enumerate(self.modules):
            m.fp8_scale = self.scales[i, 0]
            if mesh is not None and gathers:
                gather_in_fp8(m, mesh["shard"])
            elif mesh is None and reuse:
                m.fp8_weight = m.fp8_local = torch.empty_like(m.weight, dtype=E4M3, requires_grad=False)

    @torch.no_grad()
    def refresh(self) -> None:
        if not self.modules:
            return
        weights = [held_tensor(m.weight.detach()) for m in self.modules]
        zero = weights[0].new_zeros(1)  # stands for an empty shard
        norms = torch_private.norms([w if w.numel() else zero for w in weights], math.inf)
        amax = torch.stack(norms).float()
        if self.group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        self.scales.copy_(make_scale(amax.to(self.dtype), E4M3, False)[:, None])
        for m, w in zip(self.modules, weights, strict=True):
            if m.fp8_local is not None:
                self.quantize(w.view(-1), m.fp8_scale, self.dtype, m.fp8_local.view(-1)[: w.numel()])


def _quantize_into(w: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    out.copy_(to_fp8(w.to(dtype), E4M3, scale=scale)[0])


def gather_in_fp8(m: nn.Module, mesh: DeviceMesh) -> None:
    """Makes FSDP gather a layer's weight of recipe tensor as the bytes that `WeightScales` quantized, half of bf16's.
    Call it after the parameters are allocated, before the first forward pass. mesh: the dimension they are sharded on.

    In training, the gathered parameter has no memory: it only receives the gradient. In evaluation it has memory and
    the exact values, which are gathered in the compute dtype."""
    shard, (N, K) = held_tensor(m.weight), m.weight.shape
    rows = -(-N // mesh.size())  # FSDP gathers shards of equal size: shorter ones are padded
    payload = torch.zeros(rows, K, dtype=torch.uint8, device=shard.device)  # gloo cannot send fp8
    m.fp8_local = payload.view(E4M3)

    def before(mesh, size, stride, module, policy):
        return (payload,), None

    @torch.no_grad()
    def after(gathered, metadata, dtype, *, out=None):
        weight = torch.empty(N, K, dtype=dtype, device=shard.device) if out is None else out.detach()
        if out is None:  # the first time; a view of memory that FSDP frees and fills again in place
            m.fp8_weight = gathered[0].view(E4M3)[:N]
        if not m.training:
            part, full = shard.new_zeros(rows, K, dtype=dtype), shard.new_empty(rows * mesh.size(), K, dtype=dtype)
            part[: shard.shape[0]] = shard
            dist.all_gather(list(full.chunk(mesh.size())), part, group=mesh.get_group())
            weight.copy_(full[:N])
        elif out is not None:
            weight.untyped_storage().resize_(0)
        return (weight, (weight,)) if out is None else None

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after


# ---- figures that show how quantization changes a run


def figures(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """[4] fp32, over all values of x, those of unused places too: the share that became the format's largest value, the
    share that became zero, the error relative to x; and 1, whose sum counts the calls. q: x scale in FP8."""
    x, values = x.float(), q.float()
    saturated = (values.abs() == torch.finfo(q.dtype).max).float().mean()
    flushed = ((values == 0) & (x != 0)).float().mean()
    error = (values / scale - x).norm() / x.norm().clamp(min=TINY)
    return torch.stack((saturated, flushed, error, torch.ones_like(error)))


def watched(model: nn.Module) -> dict[str, float]:
    """Means of the watched layers' figures since the last call, of this rank's tokens, as "fp8/KIND/OPERAND_FIGURE".
    Waits for the device."""
    out = {}
    for name, m in model.named_modules():
        watch = getattr(m, "fp8_watch", None)
        if watch is None or watch.grad is None:
            continue
        for operand, (*values, calls) in zip("xg", watch.grad.tolist(), strict=True):
            for figure, value in zip(("saturated", "flushed", "error"), values, strict=True):
                out[f"fp8/{name.rpartition('.')[2]}/{operand}_{figure}"] = value / calls
        watch.grad = None
    return out


# ---- in a run, where model is a Transformer


def check_run(recipe: str, tokens: int, device: torch.device, dtype: str) -> None:
    """Refuses a number of tokens of a rank that the kernel of the weight gradient cannot sum over, a GPU without FP8,
    and on GPUs other dtypes than bf16, which kernels of rows and experts do not return. dtype: the flag's value."""
    if tokens % MULTIPLE:
        raise UserError(f"--fp8 {recipe}: the {tokens} tokens of a rank must divide by {MULTIPLE}: change --seq_len")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(f"--fp8 {recipe}: this GPU has no FP8, which begins with compute capability 8.9; --fp8 off")
    if device.type != "cpu" and dtype != "bf16":
        raise UserError(f"--fp8 {recipe}: GPUs need --dtype bf16, not {dtype}; or --fp8 off")


def convert_model(model: nn.Module, recipe: str, skip: tuple[str, ...], device: torch.device) -> str:
    """Converts the model, and watches a middle block -> a line that lists the layers; of those that differ only by a
    number, it has one. If every layer is too small to become faster, as in a model for tests, all are converted.
    Refuses a model without any layer that can be. device: of the computation."""
    for small in (device.type == "cpu", True):
        rows = convert_linears(model, recipe, skip=skip, small=small)
        if any(verdict == "fp8" for _, _, verdict in rows):
            break
    else:
        raise UserError(f"--fp8 {recipe}: no layer would be in FP8 ({rows[0][0]}: {rows[0][2]}, ...); --fp8 off")
    for m in model.layers[len(model.layers) // 2].modules():
        if isinstance(m, Fp8Linear):
            m.fp8_watch = torch.zeros(2, 4, device=device, requires_grad=True)
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) + f" ({verdict})" for name, _, verdict in rows)
    return f"FP8 recipe {recipe}: {', '.join(kinds)}"
