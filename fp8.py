"""Linear layers that multiply in FP8: the three matrix products of a layer through FP8 kernels (on
CPUs, of the same FP8 values as fp32).

    y = x W^T      dx = g W      dW = g^T x           each operand A becomes q = fp8(A s), the product is divided by s

The scale s takes the largest magnitude, amax, to the format's largest value, so that nothing is clipped; it is found
anew for every operand. Recipes:

    tensor     one s per tensor; x and W in e4m3, g in e5m2 (range) or e4m3 (precision). The fastest.
    row        one s per row of the left operand and column of the right one, a power of two; e4m3. An outlier costs
               its own row only. Each operand is cast along both of its dimensions.
    row_gw_hp  the same, with dW in the compute dtype: the most accurate.

Quantization is made of plain aten operations, which the compiler fuses into what produces the operand. Weights are
rounded to the compute dtype before they are quantized: so they give the same bits, whoever quantizes them: the layer,
`WeightScales` once per step, or each rank its shard before FSDP gathers it. Stacked experts have a scale per row,
whatever the recipe, and dW in the compute dtype. A converted layer keeps its parameters and their names, and computes
as before when it is not training. Nothing here has state that a checkpoint would need.

Sources: FP8 formats (arXiv 2209.05433); the recipes' names and the sizes worth converting follow torchao's."""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lib import torch_private
from lib.errors import UserError
from lib.torch_private import held_tensor, version

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("tensor", "row", "row_gw_hp")
GRAD_DTYPES = {"e5m2": E5M2, "e4m3": E4M3}
SKIP = ("lm_head", "gate")  # the head's and the router's precision decides the loss; both are small
MULTIPLE = 16  # of every dimension that a kernel reads along
TINY = 2.0**-100  # least amax: zeros stay zeros, and what is larger keeps its bits (1e-12 would flush small gradients)


# ---- quantization and the two kernels


def make_scale(amax: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """fp32, of amax's shape. An infinite amax gives 0 (and its operand NaN), a NaN gives NaN or inf: both reach the
    product."""
    scale = torch.finfo(dtype).max / amax.float().clamp(min=TINY)
    if power_of_two:  # the exponent's bits alone; log2 is inexact on some devices
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def quantize(
    x: Tensor, dtype: torch.dtype, dim: int | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> (x scale in fp8, scale). dim None: one scale, fp32 and 0-dim; else one for each slice along dim, a power of
    two."""
    if scale is None:
        amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
        scale = make_scale(amax, dtype, dim is not None)
    return (x.float() * scale).to(dtype), scale


def column_major(x: Tensor) -> Tensor:
    """The same matrix (or stack of them), with its columns contiguous."""
    return x.transpose(-2, -1).contiguous().transpose(-2, -1)


def _check(a: Tensor, b: Tensor) -> None:
    """CUDA's rules for the operands of a product, on every device."""
    K, N = b.shape[-2:]
    assert K % MULTIPLE == N % MULTIPLE == 0, f"{tuple(a.shape)} x {tuple(b.shape)}: K and N must divide by {MULTIPLE}"
    assert a.stride() == (K, 1) and b.stride()[-2:] == (1, K), (
        f"strides {a.stride()}, {b.stride()}: not row x column major"
    )
    assert not a.dtype == b.dtype == E5M2, "there is no e5m2 x e5m2 kernel"


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a [M, K] b [K, N] / (scale_a scale_b) -> [M, N] of `dtype`, under CUDA's rules on every device.

    scales: both 0-dim, or [M, 1] and [1, N]. fast: sums in the tensor cores' own, shorter accumulator."""
    _check(a, b)
    shapes = scale_a.shape, scale_b.shape
    assert shapes in (((), ()), ((len(a), 1), (1, b.shape[1]))), f"scales of shapes {shapes}"
    inverse_a, inverse_b = scale_a.reciprocal(), scale_b.reciprocal()
    if a.device.type == "cpu":  # torch's own kernel is a plain loop there: 34 s where this takes 0.02
        return (a.float() @ b.float() * (inverse_a * inverse_b)).to(dtype)
    return torch_private.scaled_mm(a, b, inverse_a, inverse_b, dtype, fast)


def grouped_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """The rows of a [n, K] up to each of `ends` [E] by their own b[e] [K, N] -> [n, N]; scales [n, 1] and [E, 1, N].

    One kernel on a GPU. On a CPU a loop multiplies every row with every expert and keeps the products that belong
    together. Neither needs `ends` on the host."""
    _check(a, b)
    if a.device.type != "cpu":
        inverse_a, inverse_b = scale_a.reciprocal()[:, 0], scale_b.reciprocal()[:, 0]
        return torch_private.scaled_grouped_mm(a, b, inverse_a, inverse_b, ends, dtype)
    expert, out = _expert_of_row(a, ends), a.new_zeros(len(a), b.shape[2], dtype=dtype)
    for e in range(len(b)):
        out = torch.where(expert == e, scaled_mm(a, b[e], scale_a, scale_b[e], dtype, True), out)
    return out


def _expert_of_row(x: Tensor, ends: Tensor) -> Tensor:
    return (torch.arange(x.shape[0], device=x.device)[:, None] >= ends).sum(1, keepdim=True)  # [n, 1]


# ---- the layers


class Recipe(NamedTuple):
    name: str
    grad_dtype: torch.dtype


class _Linear(torch.autograd.Function):
    """x [M, K] and weight [N, K] -> [M, N]. kept, columns, scale: the weight quantized already, the same with
    contiguous columns, and its scale, as far as they are known. watch [11]: receives `figures` as its gradient, which
    needs no more of compiler, checkpointing or accumulation than gradients do."""

    @staticmethod
    def forward(ctx, x, weight, kept, columns, scale, watch, recipe):
        ctx.recipe, ctx.dtype = recipe, weight.dtype
        dim = None if recipe.name == "tensor" else 1
        xq, sx = quantize(x, E4M3, dim)
        wq, sw = (kept, scale) if kept is not None else quantize(weight.to(x.dtype), E4M3, dim, scale)
        seen = None if watch is None else figures(x, E4M3, sx)
        if dim is None:
            kept = kept if columns is None else columns
            ctx.save_for_backward(xq, sx, weight if kept is None else kept, sw, seen)
        else:
            ctx.save_for_backward(x, None, weight, None, seen)
        return scaled_mm(xq, wq.t(), sx, sw.t(), x.dtype, True)

    @staticmethod
    def backward(ctx, g):
        recipe, (x, sx, weight, sw, seen) = ctx.recipe, ctx.saved_tensors
        g = g.contiguous()
        if recipe.name == "tensor":
            gq, sg = quantize(g, recipe.grad_dtype)
            wq = weight if weight.dtype == E4M3 else quantize(weight.to(g.dtype), E4M3, scale=sw)[0]
            dx = scaled_mm(gq, column_major(wq), sg, sw, g.dtype, False)
            dw = scaled_mm(gq.t().contiguous(), column_major(x), sg, sx, g.dtype, False)
        else:
            gq, sg = quantize(g, E4M3, 1)
            wq, sw = quantize(weight.to(g.dtype), E4M3, 0)
            dx = scaled_mm(gq, column_major(wq), sg, sw, g.dtype, True)
            if recipe.name == "row":
                (gt, st), (xq, sx) = quantize(g, E4M3, 0), quantize(x, E4M3, 0)
                dw = scaled_mm(gt.t().contiguous(), column_major(xq), st.t(), sx, g.dtype, True)
            else:
                dw = g.t() @ x
        if seen is not None:
            seen = torch.cat((seen.new_ones(1), seen, figures(g, gq.dtype, sg)))
        return dx, dw.to(ctx.dtype), None, None, None, seen, None


class _Experts(torch.autograd.Function):
    """x [n, K] sorted by expert, weight [E, N, K], ends int32 [E] -> [n, N]."""

    @staticmethod
    def forward(ctx, x, weight, ends):
        ctx.save_for_backward(x, weight, ends)
        (xq, sx), (wq, sw) = quantize(x, E4M3, 1), quantize(weight.to(x.dtype), E4M3, 2)
        return grouped_scaled_mm(xq, wq.transpose(1, 2), sx, sw.transpose(1, 2), ends, x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, weight, ends = ctx.saved_tensors
        g = g.contiguous()
        (gq, sg), (wq, sw) = quantize(g, E4M3, 1), quantize(weight.to(g.dtype), E4M3, 1)
        dx = grouped_scaled_mm(gq, column_major(wq), sg, sw, ends, g.dtype)
        if g.device.type != "cpu":
            dw = nn.functional.grouped_mm(g.t(), x, offs=ends)
        else:
            expert = _expert_of_row(x, ends)
            dw = torch.stack([torch.where(expert == e, g, 0.0).t() @ x for e in range(len(ends))])
        return dx, dw.to(weight.dtype), None


class Fp8Linear:
    """What a converted nn.Linear has on top of its own class."""

    fp8_recipe: Recipe
    fp8_weight = fp8_columns = fp8_scale = fp8_watch = None  # see WeightScales, gather_in_fp8, watch
    fp8_version = None  # of the parameter that fp8_scale was made from

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        if not torch.compiler.is_compiling():
            assert self.fp8_version in (None, version(self.weight)), "a weight changed after WeightScales.refresh"
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        kept = self.fp8_weight, self.fp8_columns, self.fp8_scale
        y = _Linear.apply(rows, self.weight, *kept, self.fp8_watch, self.fp8_recipe)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Fp8Experts:
    """What a converted module of stacked experts has on top of its own class: the `matmul` that it calls."""

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
    "bf16: why") of each weight that multiplies.

    grad_dtype: e5m2 or e4m3, of recipe tensor's g; the other recipes have e4m3 throughout. skip: names, or parts of
    them between dots, of layers to leave alone, besides those in SKIP. small: whether to convert also what is too small
    to become faster; None: on a CPU, where nothing does. Raises ValueError for an unknown recipe or gradient dtype, and
    for a name to skip that matches nothing."""
    for value, known in ((recipe, RECIPES), (grad_dtype, tuple(GRAD_DTYPES))):
        if value not in known:
            raise ValueError(f"{value} is unknown; there are {', '.join(known)}")
    multiplying = list(_multiplying_weights(module))
    _refuse_unmatched(skip, [name for m, weights in multiplying if _is_convertible(m) for name in weights])
    holders = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    rows = []
    for m, weights in multiplying:
        reason = _reason_against(m, weights, recipe, (*SKIP, *skip), small, holders)
        if not reason:
            _convert(m, Recipe(recipe, GRAD_DTYPES[grad_dtype] if recipe == "tensor" else E4M3))
        verdict = f"bf16: {reason}" if reason else "fp8"  # the experts of a module go together
        rows += [(name, tuple(p.shape), verdict) for name, p in weights.items()]
    return rows


def _convert(m: nn.Module, recipe: Recipe) -> None:
    mixin = Fp8Experts if hasattr(m, "matmul") else Fp8Linear
    if not isinstance(m, mixin):
        m.__class__ = _mixed(mixin, m.__class__)
    m.fp8_recipe = recipe


def _is_convertible(m: nn.Module) -> bool:
    return isinstance(m, nn.Linear) or hasattr(m, "matmul")


def _multiplying_weights(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """Every module with weights that multiply, and these by name: a layer's [N, K], or stacked experts [E, N, K]."""
    for name, m in module.named_modules():
        experts = hasattr(m, "matmul")
        parameters = [(k, p) for k, p in m.named_parameters(recurse=False) if p.ndim == (3 if experts else 2)]
        if parameters and not isinstance(m, nn.Embedding):
            yield m, {f"{name}.{k}" if experts else name: p for k, p in parameters}


def _matches(part: str, name: str) -> bool:
    return f".{part}." in f".{name}."


def _refuse_unmatched(skip: Sequence[str], names: list[str]) -> None:
    unmatched = sorted(s for s in set(skip) - set(SKIP) if not any(_matches(s, name) for name in names))
    if unmatched:
        parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
        raise ValueError(f"no layer is called {', '.join(unmatched)}; their names are made of {', '.join(parts)}")


def _reason_against(m: nn.Module, weights: dict[str, Tensor], recipe: str, skip, small: bool | None, holders) -> str:
    """Why a module's weights [N, K] or [E, N, K] are not multiplied in FP8; empty if they are. The limits are where, on
    Hopper, the casts cost what the products win, as published."""
    if any(_matches(s, name) for s in skip for name in weights):
        return "skipped by name"
    if not _is_convertible(m):
        return "no linear layer"
    experts = hasattr(m, "matmul")
    for p in weights.values():
        N, K = p.shape[-2:]
        if holders[id(p)] > 1:
            return "shares its weight with another layer"
        if N % MULTIPLE or K % MULTIPLE:
            return f"{N} and {K} must divide by {MULTIPLE}"
        tiny = N <= 1024 and K <= 4096 if recipe == "tensor" and not experts else N <= 2048 or K <= 1024
        if tiny and not (p.device.type == "cpu" if small is None else small):
            return "too small to become faster"
    if experts and torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return "grouped FP8 kernels need compute capability 9.0"
    return ""


def fp8_share(rows: list, recipe: str, top_k: int = 1) -> float:
    """Of the FLOPs of all matrix products with weights, the share in FP8. top_k: experts that a token meets."""
    done = total = 0.0
    for _, shape, verdict in rows:
        flops = math.prod(shape[-2:]) * (top_k if len(shape) == 3 else 1)
        total += flops
        if verdict == "fp8":  # two of three products, where the weight gradient is not
            done += flops * (2 / 3 if recipe == "row_gw_hp" or len(shape) == 3 else 1)
    return done / max(total, 1.0)


def table(rows: list, recipe: str, top_k: int = 1) -> str:
    """The rows as text, layers that differ by their number only as one, and fp8_share."""
    groups = Counter((re.sub(r"\d+", "*", name, count=1), shape, verdict) for name, shape, verdict in rows)
    lines = [f"FP8 recipe {recipe}: {fp8_share(rows, recipe, top_k):.1%} of the FLOPs of products with weights"]
    for (name, shape, verdict), count in groups.items():
        lines.append(f"  {name:36} {' x '.join(map(str, shape)):>18}  {count:4} x  {verdict}")
    return "\n".join(lines)


# ---- once per step


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The converted linear layers by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Fp8Linear)}


class WeightScales:
    """The weights' scales (recipe tensor), once per optimizer step: one norm over all of them, one all-reduce.

    group: the ranks that share one copy of the parameters; None: this one has them whole. reuse: also quantize each
    weight once, for all micro-batches of the step, and lay it out as either pass wants it; where parameters are
    sharded, that is what `gather_in_fp8` is for. `refresh` must run before the first forward pass of every step: it is
    all that brings an update of the weights to what is kept here, and a layer that runs uncompiled asserts it. All
    ranks must call alike."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, group: dist.ProcessGroup | None, reuse: bool, fuse: bool):
        """dtype: the compute dtype. fuse: compile the quantization."""
        self.modules = [m for m in layers(model).values() if m.fp8_recipe.name == "tensor"]
        self.watched = [m for m in layers(model).values() if m.fp8_watch is not None]
        self.dtype, self.group = dtype, group
        self.quantize = torch.compile(_quantize_into, dynamic=True) if fuse else _quantize_into
        if not self.modules:
            return
        weights = [held_tensor(m.weight) for m in self.modules]
        device = weights[0].device
        self.amax = torch.zeros(len(weights), device=device)
        self.scales = torch.ones(len(weights), 4, device=device)  # 16 bytes apart, as compiled code wants its inputs
        for i, m in enumerate(self.modules):
            m.fp8_scale = self.scales[i, 0]
            if reuse and held_tensor(m.weight) is m.weight:
                m.fp8_weight = torch.empty_like(m.weight, dtype=E4M3, requires_grad=False)
                m.fp8_columns = column_major(m.fp8_weight)

    @torch.no_grad()
    def refresh(self) -> None:
        for m in self.watched:
            m.fp8_watch.grad = None
        if not self.modules:
            return
        weights = [held_tensor(m.weight.detach()) for m in self.modules]
        norms = iter(torch_private.norms([w for w in weights if w.numel()], math.inf))
        none = self.amax.new_zeros(())  # a short shard may be empty
        self.amax.copy_(torch.stack([next(norms).float() if w.numel() else none for w in weights]))
        if self.group is not None:
            dist.all_reduce(self.amax, dist.ReduceOp.MAX, group=self.group)
        self.scales.copy_(make_scale(self.amax.to(self.dtype), E4M3, False)[:, None])
        for m, w in zip(self.modules, weights, strict=True):
            kept = getattr(m, "fp8_shard", m.fp8_weight)
            if kept is not None and w.numel():
                kept = kept.view(E4M3).view(-1)[: w.numel()]
                self.quantize(w.view(-1), m.fp8_scale, self.dtype, kept)
            if held_tensor(m.weight) is m.weight:
                m.fp8_version = version(m.weight)
                if kept is not None:
                    m.fp8_columns.copy_(m.fp8_weight)
            elif hasattr(m, "fp8_shard"):
                m.fp8_shard_version = version(held_tensor(m.weight))


def _quantize_into(w: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    out.copy_(quantize(w.to(dtype), E4M3, scale=scale)[0])


def gather_in_fp8(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes FSDP gather the weights of recipe tensor as the bytes that `WeightScales` quantized: half of bf16's.
    Call it after the parameters are allocated, before the first forward pass. mesh: the dimension they are sharded on.

    The gathered parameter is a stand-in without memory: a place for the gradient. In evaluation it has memory and the
    exact values, gathered in the compute dtype besides."""
    for m in layers(model).values():
        if m.fp8_recipe.name == "tensor":
            _install_hooks(m, mesh)


def _install_hooks(m: nn.Module, mesh: DeviceMesh) -> None:
    shard, (N, K) = held_tensor(m.weight), m.weight.shape
    rows = -(-N // mesh.size())  # FSDP gathers shards of equal size: short ones are filled up
    m.fp8_shard = torch.zeros(rows, K, dtype=torch.uint8, device=shard.device)  # gloo knows no fp8
    group = mesh.get_group()

    def before(mesh, size, stride, module, policy):
        assert not m.training or m.fp8_shard_version == version(shard), "a weight changed after WeightScales.refresh"
        return (m.fp8_shard,), None

    @torch.no_grad()
    def after(gathered, metadata, dtype, *, out=None):
        weight = torch.empty(N, K, dtype=dtype, device=shard.device) if out is None else out.detach()
        if out is None:  # the first time; a view of memory that FSDP frees and fills again in place
            m.fp8_weight = gathered[0].view(E4M3)[:N]
        if not m.training:
            own, full = shard.new_zeros(rows, K, dtype=dtype), shard.new_empty(rows * mesh.size(), K, dtype=dtype)
            own[: shard.shape[0]] = shard
            dist.all_gather(list(full.chunk(mesh.size())), own, group=group)
            weight.copy_(full[:N])
        elif out is not None:
            weight.untyped_storage().resize_(0)
        return (weight, (weight,)) if out is None else None

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after


# ---- what quantization does to a run

FIGURES = ("amax", "saturated", "flushed", "snr_db")


def figures(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """[5] fp32: amax, shares saturated (at the format's largest value) and flushed to zero, sums of squares of x and of
    its error."""
    x = x.float()
    q = (x * scale).to(dtype).float()
    saturated, flushed = (q.abs() == torch.finfo(dtype).max).float(), ((q == 0) & (x != 0)).float()
    error = (q / scale - x).square().sum()
    return torch.stack((x.abs().amax(), saturated.mean(), flushed.mean(), x.square().sum(), error))


def watch(model: nn.Module, names: Sequence[str]) -> None:
    """From now on these layers collect figures of x and g, until the next `WeightScales.refresh`. Call it before
    `WeightScales`."""
    for name in names:
        m = model.get_submodule(name)
        m.fp8_watch = torch.zeros(11, device=held_tensor(m.weight).device, requires_grad=True)


@torch.no_grad()
def watched(model: nn.Module) -> dict[str, float | None]:
    """Figures of the watched layers since the last refresh, averages over its micro-batches, of this rank's tokens and
    part of the weights: "fp8/LAYER/OPERAND_FIGURE" -> value; snr in dB, None where there is no error. Waits for the
    device."""
    out = {}
    for name, m in layers(model).items():
        if m.fp8_watch is None or m.fp8_watch.grad is None:
            continue
        count, *seen = m.fp8_watch.grad.tolist()
        w, dim = held_tensor(m.weight.detach()), None if m.fp8_recipe.name == "tensor" else 1
        operands = {"x": [v / count for v in seen[:5]], "g": [v / count for v in seen[5:]]}
        if w.numel():
            operands["w"] = figures(w, E4M3, quantize(w, E4M3, dim, m.fp8_scale)[1]).tolist()
        for operand, (amax, saturated, flushed, signal, error) in operands.items():
            snr = 10 * math.log10(signal / error) if error > 0 and signal > 0 else None
            for figure, value in zip(FIGURES, (amax, saturated, flushed, snr), strict=True):
                out[f"fp8/{name}/{operand}_{figure}"] = value
    return out


# ---- in a run: config is a Config, model a Transformer


def check_flags(config) -> None:
    """Refuses what the flags alone show to be impossible."""
    recipe, model = config.fp8, config.model_config
    for flag, size in (("dim", model.dim), ("ffn_dim", model.ffn_dim)):
        if size % MULTIPLE:
            near = max(MULTIPLE, round(size / MULTIPLE) * MULTIPLE)
            raise UserError(
                f"--fp8 {recipe}: {flag} {size} does not divide by {MULTIPLE}; the nearest is --{flag} {near}"
            )
    for what, heads in (("n_heads", model.n_heads), ("n_heads + 2 n_kv_heads", model.n_heads + 2 * model.n_kv_heads)):
        if heads * model.head_dim % MULTIPLE:
            raise UserError(
                f"--fp8 {recipe}: {what} = {heads}, times head_dim {model.head_dim}, does not divide by {MULTIPLE};"
                f" --n_heads {max(1, round(model.dim / MULTIPLE))}, of {MULTIPLE} dimensions each, would"
            )
    if recipe != "tensor" and config.fp8_grad_dtype == "e5m2":
        raise UserError(f"--fp8 {recipe} has e4m3 gradients; e5m2 is for --fp8 tensor")
    if recipe != "tensor" and config.fp8_all_gather:
        raise UserError(
            f"--fp8_all_gather needs one scale per weight, which --fp8 tensor has and --fp8 {recipe} has not"
        )


def check_run(config, device: torch.device, micro_batch: int) -> None:
    """Refuses a number of tokens that the weight gradients cannot be summed over, and a GPU without FP8."""
    flag, tokens = f"--fp8 {config.fp8}", micro_batch * config.seq_len
    if tokens % MULTIPLE:
        unit = MULTIPLE // math.gcd(micro_batch, MULTIPLE)
        near = max(unit, round(config.seq_len / unit) * unit)
        raise UserError(
            f"{flag}: micro_batch x seq_len = {micro_batch} x {config.seq_len} = {tokens} tokens do not divide by"
            f" {MULTIPLE}; the nearest is --seq_len {near}"
        )
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        raise UserError(f"{flag}: {name}, FP8 needs 8.9 (Ada, Hopper or later); --fp8 off trains in bf16 here")
    if config.compile == "none":
        raise UserError(f"{flag}: uncompiled, FP8 is several times slower than bf16; --compile block, or --fp8 off")
    if config.dtype != "bf16":
        raise UserError(f"{flag}: on a GPU what is not FP8 is bf16; --dtype bf16, or --fp8 off")


def convert(model: nn.Module, config, device: torch.device) -> str:
    """Converts the model as the flags say -> a table of what was converted. Where every layer is too small to become
    faster, as in a model that is for trying things, all are converted. Refuses names to skip that match nothing, and a
    model of which nothing would be converted."""
    grad_dtype = {"auto": "e5m2"}.get(config.fp8_grad_dtype, config.fp8_grad_dtype)
    for small in (device.type == "cpu", True):
        try:
            rows = convert_linears(model, config.fp8, grad_dtype, config.fp8_skip, small)
        except ValueError as e:
            raise UserError(f"--fp8_skip: {e}") from None
        if any(verdict == "fp8" for _, _, verdict in rows):
            slow = "\nFP8 on a CPU shows what it does to the loss; here it is slower than bf16"
            return table(rows, config.fp8, config.model_config.top_k) + slow * (device.type == "cpu")
    raise UserError(f"--fp8 {config.fp8}: no layer would be in FP8 ({rows[0][0]}: {rows[0][2]}, ...); --fp8 off")


def prepare(model: nn.Module, config, mesh: DeviceMesh | None, accumulates: bool) -> WeightScales:
    """What FP8 does once per step (nothing, where it is off). Call it once the parameters are allocated. accumulates:
    steps have several micro-batches."""
    blocks = [list(layers(block)) for block in model.layers]
    if config.fp8_log_every:  # the last product of three blocks, the down projection: where outliers grow first
        chosen = {0, len(blocks) // 2, len(blocks) - 1}
        watch(model, [f"layers.{i}.{blocks[i][-1]}" for i in chosen if blocks[i]])
    if mesh is not None and config.fp8_all_gather:
        gather_in_fp8(model, mesh["shard"])
    group = None if mesh is None else mesh["shard"].get_group()
    return WeightScales(model, model.dtype, group, accumulates, config.compile != "none")
