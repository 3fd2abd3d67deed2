"""GPT-2, Llama 2 and 3, Mistral, Ministral 3, Mixtral, Qwen2.5, Qwen3 (also with experts), OLMo 2 and 3, SmolLM3,
Phi-4, Gemma 3, Granite and Arcee as one `Transformer`, built from the choice fields of `ModelConfig` (shapes.py).

    x = embed(tokens) (+ learned positions)
    for each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    loss = sum over trained tokens of -log softmax(lm_head(norm(x)))[target]

The model is plain torch: it starts no process group, compiles nothing and reads no environment variable; shard.py does
that around it. A few products have another form where the compiler traces them.
Weights are kept in any dtype (fp32 masters by default) and cast to the compute dtype where they are used; no autocast.
Rotary embedding and softmax compute in fp32, and so do torch's kernels for norms, inside. The model has no dropout.

Letters: B batch, T tokens, S keys, D dim, H heads, K key/value heads, h head_dim, F ffn, E experts, V vocab, N = B T, k
experts of a token, L layers.

Sources: GPT-2 (Radford et al. 2019); Llama 2 (arXiv 2307.09288); Llama 3 (2407.21783); Mixtral (2401.04088); Qwen2.5
(2412.15115); Qwen3 (2505.09388); OLMo 2 (2501.00656); Gemma 3 (2503.19786); grouped-query attention (2305.13245);
SwiGLU and GeGLU (2002.05202); squared ReLU (2109.08668); RMSNorm (1910.07467). Names follow Hugging Face's Llama, with
q, k, v and gate, up fused."""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import PACKED, WHOLE, apply_rope, attention_of_part, rope_table
from shapes import IGNORE, ModelConfig, document_begins
from shapes import MODELS as MODELS  # so that `from model import MODELS` works


class Linear(nn.Linear):
    """x W^T + b in x's dtype, whatever dtype the parameters are kept in."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Not on the meta device, which holds no values: there torch's would import the compiler, a second's work."""
        if not self.weight.is_meta:
            super().reset_parameters()


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class RMSNorm1p(RMSNorm):
    """The factor is 1 + weight, in fp32 (Gemma). The weight is not kept as the factor: most weights are small, and a
    sum with 1 would round away their last bits, in bf16 nearly all. So an export has a file's bits, in any dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class HeadsNorm(RMSNorm):
    """Over all heads together: x [B, T, H, h]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(2)).view(x.shape)


NORMS = {
    "rmsnorm": RMSNorm,
    "rmsnorm_1p": RMSNorm1p,
    "layernorm": LayerNorm,
}


class Attention(nn.Module):
    """Grouped-query attention: H / K query heads share one key head and one value head. With H = 8 and K = 2:

        query heads              0 1 2 3 | 4 5 6 7
        key and value heads         0    |    1

    K = H is plain multi-head attention. A smaller K makes keys, values and a cache of them H / K times smaller.
    qkv_proj computes all of them at once: its rows are H heads of q, then K heads of k, then K heads of v."""

    def __init__(self, config: ModelConfig, layer: int = 0):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = H, K, h = config.n_heads, config.n_kv_heads, config.head_dim
        bias = config.bias or config.attention_bias
        self.qkv_proj = Linear(config.dim, (H + 2 * K) * h, bias=bias or config.qkv_bias)
        self.o_proj = Linear(H * h, config.dim, bias=bias)
        norm = NORMS[config.norm] if config.qk_norm else nn.Identity  # which ignores its arguments
        widths = h, h
        if config.qk_norm_whole:
            norm, widths = HeadsNorm, (H * h, K * h)
        self.q_norm, self.k_norm = (norm(width, eps=config.norm_eps) for width in widths)
        self.window = config.window if "window" in config.kind(layer) else 0
        self.backend = "sdpa"  # Transformer sets it
        self.part = WHOLE  # shard.share_rows sets it

    def forward(
        self, x: Tensor, rope: tuple[Tensor, ...] | None, mask: Tensor | None, offsets: Tensor | None, cache=None
    ) -> Tensor:
        """x [B, T, D] -> the same. mask, offsets: see attention.attention."""
        B, T, _ = x.shape
        qkv = self.qkv_proj(x).view(B, T, -1, self.head_dim)  # [B, T, H + 2K, h]
        q, k, v = qkv.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), 2)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope[:2])
        if cache is not None:
            k, v = cache.append(k, v)
        if cache is None or T > 1:  # only the first call with a cache has several tokens: nothing is before them
            out = attention_of_part(q, k, v, self.part, mask, self.backend, self.window, offsets)
        else:  # one token sees all keys that the cache has kept. Query heads that share a key head become its tokens
            q = q.view(B, self.n_kv_heads, -1, self.head_dim)
            mask = None if mask is None else mask[..., -k.shape[1] :]  # a window keeps fewer keys
            # Not `blocked`: for each length, oneDNN would build and keep new matrix products.
            out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)  # [B, K, H / K, h]
        return self.o_proj(out.reshape(B, T, -1))


class SwiGluMLP(nn.Module):
    activation = staticmethod(F.silu)

    def __init__(self, config: ModelConfig):
        super().__init__()
        bias = config.bias or config.mlp_bias
        self.gate_up_proj = Linear(config.dim, 2 * config.ffn_dim, bias=bias)
        self.down_proj = Linear(config.ffn_dim, config.dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)  # [B, T, F] each
        return self.down_proj(self.activation(gate) * up)


class GeGluMLP(SwiGluMLP):
    activation = staticmethod(partial(F.gelu, approximate="tanh"))


class GeluMLP(nn.Module):
    activation = staticmethod(GeGluMLP.activation)

    def __init__(self, config: ModelConfig):
        super().__init__()
        bias = config.bias or config.mlp_bias
        self.up_proj = Linear(config.dim, config.ffn_dim, bias=bias)
        self.down_proj = Linear(config.ffn_dim, config.dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


class ReLU2MLP(GeluMLP):
    activation = staticmethod(lambda x: F.relu(x).square())


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [n, in] sorted by expert, weight [E, out, in], ends int32 [E] (row where each expert's tokens end) -> [n, out].
    In Mixtral 8x7B, 4,096 tokens with two experts each: x [8192, 4096], weight [8, 28672, 4096], ends [8].

    bf16 with rows of 16-byte multiples runs as one grouped kernel, without a host synchronisation. Anything else runs
    as a loop with equal results, which reads `ends` on the host."""
    weight = weight.to(x.dtype)
    if x.dtype == torch.bfloat16 and not any(n % 8 for n in weight.shape[1:]):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([rows @ w.T for rows, w in zip(x.split(sizes), weight, strict=True)])


class _Reorder(torch.autograd.Function):
    """x [N, D], index [N k] -> x[index]. `back` [N k] lists the places of the k copies of each row. The backward pass
    gathers the gradients from these places and adds them in a fixed order; plain indexing adds them in any order. With
    one copy of each row, index and back are inverse permutations, and swapping them undoes the reordering."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.rows = len(x)
        return x[index]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (back,) = ctx.saved_tensors
        return grad[back].view(ctx.rows, -1, grad.shape[1]).sum(1), None, None


class MoE(nn.Module):
    """top_k of E SwiGLU experts per token, weighted by their probabilities, with norm_top_k divided by their sum
    (Mixtral, arXiv 2401.04088 section 2.1). Returns the output and, per row and expert, the tokens assigned and the sum
    of the router's probabilities, [2, B, E], over the `used` places; None without these."""

    matmul = staticmethod(grouped_matmul)  # looked up on self, so that a conversion to FP8 can replace it

    def __init__(self, config: ModelConfig):
        super().__init__()
        n, dim, ffn_dim = config.n_experts, config.dim, config.ffn_dim
        self.top_k, self.norm_top_k = config.top_k, config.norm_top_k
        self.gate = Linear(dim, n, bias=False)  # the router, by its name in Mixtral
        self.gate_up_proj = nn.Parameter(torch.empty(n, 2 * ffn_dim, dim))
        self.down_proj = nn.Parameter(torch.empty(n, dim, ffn_dim))

    def forward(
        self,
        x: Tensor,  # [B, T, D]
        used: Tensor | None = None,  # bool [B, T], see Transformer.used_places
    ) -> tuple[Tensor, Tensor | None]:
        B, T, D = x.shape
        x = x.view(B * T, D)
        probabilities = self.gate(x).float().softmax(-1)  # [N, E]
        scores, experts = probabilities.topk(self.top_k, -1)  # [N, k] each
        if self.norm_top_k:
            scores = scores / scores.sum(-1, keepdim=True)
        E = self.gate.out_features
        routed = None
        if used is not None:
            chosen = (experts.view(B, T, -1, 1) == torch.arange(E, device=x.device)) & used[..., None, None]
            routed = torch.stack((chosen.sum((1, 2)).float(), (probabilities.view(B, T, E) * used[..., None]).sum(1)))
        # Sort the N k assignments by expert, so that each expert multiplies consecutive rows. N = 4, k = 2, E = 3:
        #     experts of tokens 0 ... 3    0 2 | 1 0 | 2 1 | 0 1
        #     order, by expert             0 3 6 | 2 5 7 | 1 4       places in the line above
        #     order // k                   0 1 3 | 1 2 3 | 0 2       the tokens that each expert gets
        #     ends                         3, 6, 8
        # `back` undoes the order. Then the k outputs of a token are side by side again, and are added by their scores.
        experts, order = experts.flatten().sort(stable=True)
        back = order.argsort()
        ends = (experts[:, None] <= torch.arange(E, device=x.device)).sum(0, dtype=torch.int32)  # [E]
        x = _Reorder.apply(x, order // self.top_k, back)  # [N k, D], by expert
        gate, up = self.matmul(x, self.gate_up_proj, ends).chunk(2, -1)  # [N k, F] each
        y = self.matmul(F.silu(gate) * up, self.down_proj, ends)
        y = _Reorder.apply(y, back, order).view(B * T, self.top_k, D)
        return (y * scores[..., None].to(y.dtype)).sum(1).view(B, T, D), routed


MLPS = {
    "swiglu": SwiGluMLP,
    "geglu": GeGluMLP,
    "gelu": GeluMLP,
    "relu2": ReLU2MLP,
    "moe": MoE,
}


class Block(nn.Module):
    """Norms come before attention and MLP; with norm_after behind them (OLMo 2); with norm_around on both sides (Gemma
    3)."""

    def __init__(self, config: ModelConfig, layer: int = 0):
        super().__init__()
        before, after = NORMS[config.norm], nn.Identity  # which ignores its arguments
        if config.norm_around:
            after = before
        elif config.norm_after:
            before, after = after, before
        self.input_layernorm = before(config.dim, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.self_attn_norm = after(config.dim, config.norm_eps)
        self.post_attention_layernorm = before(config.dim, config.norm_eps)
        self.mlp = MLPS[config.mlp](config)
        self.mlp_norm = after(config.dim, config.norm_eps)
        self.add = partial(torch.add, alpha=config.residual_scale)

    def forward(
        self, x: Tensor, rope=None, mask: Tensor | None = None, offsets: Tensor | None = None, cache=None,
        used: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """x [B, T, D] -> (the same, the router's statistics of the `used` places where there are experts)."""
        x = self.add(x, self.self_attn_norm(self.self_attn(self.input_layernorm(x), rope, mask, offsets, cache)))
        y = self.post_attention_layernorm(x)
        y, routed = self.mlp(y, used) if isinstance(self.mlp, MoE) else (self.mlp(y), None)
        return self.add(x, self.mlp_norm(y)), routed


# Each chunk of the logits adds to the weight's fp32 gradient, reading and writing all of it. This costs little if a
# chunk may have 5 times as many bytes as the gradient. Its limit is between CHUNK_BYTES / 5 and 2 CHUNK_BYTES, or
# CHUNK_BYTES for a frozen weight.
#
# Example: Llama 3 8B has a vocabulary of V = 128,256 and D = 4,096. A batch of 8 rows of 2,048 tokens has N = 16,384.
#     all logits at once      2 N V = 3.9 GiB in bf16, and 7.8 GiB if they were also kept in fp32
#     the weight's gradient   4 V D = 2.0 GiB. Five times that is above the limit, so the limit is 2^30 = 1 GiB
#     rows of a chunk         2^30 / (2 V) = 4,185, and 4,096 as a power of two: 4 chunks of 1,002 MiB
CHUNK_BYTES = 2**29


def cross_entropy_(logits: Tensor, targets: Tensor, grads: bool) -> Tensor:
    """Cross-entropy (fp32 [n], 0 for ignored targets) of logits [n, V] against targets [n]. grads: the gradient of its
    sum overwrites the logits, in place as `_` says. The compiled function needs no other memory of this size.

    With x the logits of a token, t its target and p = softmax(x):

        loss = -log p[t] = lse - x[t]                      lse = log sum_j exp(x[j])
        d loss / d x[i] = exp(x[i]) / sum_j exp(x[j]) - (i == t) = p[i] - onehot[i]

    For x = (2, 1, 0) and t = 0: p = (0.67, 0.24, 0.09), the loss is 0.41 and the gradient (-0.33, 0.24, 0.09). A value
    of the gradient needs its own logit and two numbers of the row, lse and t. So it can take its logit's place."""
    trained = (targets != IGNORE)[:, None]
    picked = targets.clamp(min=0)[:, None]
    x = logits.float()
    lse = x.logsumexp(-1, keepdim=True)
    loss = torch.where(trained, lse - x.gather(1, picked), 0.0)
    if not grads:
        return loss[:, 0]
    # p[t] - 1. exp(-loss) is p[t]; expm1 keeps the digits that 1 would cancel where p[t] is nearly 1.
    target_grad = torch.where(trained, torch.expm1(-loss), 0.0)
    lse = lse.masked_fill(~trained, math.inf)  # gives ignored targets a gradient of 0
    if torch.compiler.is_compiling():  # one loop that writes in place: a scatter, or a longer loop, would make a copy
        # cat makes the compiler store both; else the loop would compute them again for each column.
        lse, target_grad = torch.cat((lse, target_grad), 1).split(1, 1)
        logits.copy_(torch.where(torch.arange(x.shape[1], device=x.device) == picked, target_grad, (x - lse).exp()))
    else:
        logits.copy_(x.sub_(lse).exp_().scatter_(1, picked, target_grad))
    return loss[:, 0]


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a b to `total`, which is fp32. A GPU's kernel does both at once, but the compiler cannot trace it."""
    if a.device.type == "cpu":
        total.add_(a @ b)
    elif torch.compiler.is_compiling():
        total.add_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


# A GPU's fastest kernels need rows of the logits in multiples of 16 bytes. 64 values are the usual multiple. meta: for
# memory.py, as on a GPU.
HEAD_ROWS = {"cuda": 64, "meta": 64}


def padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """lm_head's weight [V, D] in the compute dtype, with rows of zeros up to a multiple of HEAD_ROWS."""
    missing = -len(weight) % HEAD_ROWS.get(weight.device.type, 1)
    weight = weight.to(dtype)
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def head_pass(
    x: Tensor,  # [n, D]
    weight: Tensor,  # [V, D]
    targets: Tensor,  # [n]
    cross_entropy_: Callable,
    grads: bool,
    scale: Tensor | None = None,  # fp32 [n]: the gradient of each row's loss; None: ones
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Linear + cross-entropy in chunks of rows, so that only one chunk of the [n, V] logits exists at a time -> (losses
    fp32 [n]; with `grads`, the gradients of their scaled sum for x and, if it is trained, for the weight).

    Let G [N, V] be the gradient of the summed loss with respect to the logits x W^T. Then dx = G W and dW = G^T x. A
    chunk of rows gives its own rows of dx and adds its part to dW. The backward pass only multiplies both by the
    gradient of the sum, which is 1 in training.

    Cross-entropy sees the V columns of the vocabulary. `padded` adds columns of zeros, which it does not touch: so they
    are zero in the gradient of the logits, too. The gradient of the weight leaves them out."""
    w, V = padded(weight, x.dtype), len(weight)
    gradient_bytes, needs_dw = 4 * w.numel(), grads and weight.requires_grad
    chunk_bytes = min(CHUNK_BYTES << needs_dw, max(CHUNK_BYTES // 5, 5 * gradient_bytes))
    rows = chunk_bytes // (w.shape[0] * w.itemsize)
    # Powers of two suit the kernels, and divide most batches: chunks of one shape are compiled once.
    rows = len(x) if len(x) <= rows else 2 ** max(7, rows.bit_length() - 1)
    accumulates = rows < len(x) or weight.dtype != x.dtype  # else one product is the gradient, in the right dtype
    dw = x.new_zeros(w.shape, dtype=torch.float32) if needs_dw and accumulates else None
    dx = torch.empty_like(x) if grads else None
    losses = []
    for a in range(0, len(x), rows):
        chunk = x[a : a + rows]
        logits = chunk @ w.T
        losses.append(cross_entropy_(logits[:, :V], targets[a : a + rows], grads))
        if grads:  # the logits have become their gradient
            if scale is not None:
                logits *= scale[a : a + rows, None]
            dx[a : a + rows] = logits @ w
        if needs_dw and accumulates:
            add_product(dw, logits.T, chunk)
        elif needs_dw:
            dw = logits.T @ chunk
        del logits  # before the next chunk's
    return torch.cat(losses), dx, dw[:V].to(weight.dtype) if needs_dw else None


class _LinearCrossEntropy(torch.autograd.Function):
    """The summed loss. Its gradients are computed in the forward pass, and nothing of the logits is saved."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, grads: bool, cross_entropy_) -> tuple[Tensor, Tensor]:
        losses, dx, dw = head_pass(x, weight, targets, cross_entropy_, grads)
        if grads:
            ctx.save_for_backward(dx, dw)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        dx, dw = ctx.saved_tensors
        if dw is not None:
            dw.mul_(grad)  # in place: it is as large as the weight
        return dx * grad, dw, None, None, None


class _TokenLosses(torch.autograd.Function):
    """The loss of each token, for reductions other than their sum (preferences.py). The weight of each token in the
    gradient is known only in the backward pass, which computes the logits again."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, cross_entropy_) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.cross_entropy_ = cross_entropy_
        return head_pass(x, weight, targets, cross_entropy_, grads=False)[0]

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, targets = ctx.saved_tensors
        _, dx, dw = head_pass(x, weight, targets, ctx.cross_entropy_, grads=True, scale=grad)
        return dx, dw, None, None


class LossHead(nn.Module):
    """lm_head. With targets [B, T] it returns the summed loss (fp32 scalar) and the loss of each token (fp32 [B, T],
    without gradient), or, with per_token, only the latter, with gradient. It never holds the [B, T, V] logits. Without
    targets it returns the logits in fp32. All are in one module, so that sharding gathers its weight for all."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.cross_entropy_ = cross_entropy_  # or that, compiled

    def forward(
        self, x: Tensor, targets: Tensor | None = None, per_token: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        if targets is None:
            return F.linear(x, self.weight.to(x.dtype)).float()
        tensors = x.flatten(0, 1), self.weight, targets.flatten()
        if per_token:
            return _TokenLosses.apply(*tensors, self.cross_entropy_).view(targets.shape)
        loss, losses = _LinearCrossEntropy.apply(*tensors, torch.is_grad_enabled(), self.cross_entropy_)
        return loss, losses.view(targets.shape)


def document_mask(positions: Tensor) -> Tensor:
    """Boolean [B, 1, T, T]: causal, and within the document. A document begins wherever the position is 0. For one row
    with documents of 3 and 2 tokens:

        positions      0 1 2 0 1           the keys that are seen (1), from left to right
        document       1 1 1 2 2           query 0    1 . . . .
                                           query 1    1 1 . . .
                                           query 2    1 1 1 . .
                                           query 3    . . . 1 .
                                           query 4    . . . 1 1

    On a GPU the packed back-ends never build it (see shapes.document_begins)."""
    document = (positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


class Details(NamedTuple):
    """Sums of one forward pass that the log reports, without gradient.

    row_losses: fp32 [B]. router_sums: None without experts, else fp32 [L + 2, E]. Rows 0 ... L - 1: the tokens assigned
    to each expert of a layer. Row L: the balancing loss times the units (trained tokens or pairs). Row L + 1: the
    units. Each of the last two rows repeats one number. One tensor: the log sums all of it over the ranks at once.
    figures: of a reduction."""

    row_losses: Tensor
    router_sums: Tensor | None
    figures: Tensor | None = None


# The losses of tokens [B, T] -> (the loss, summed over units; their number; figures for the log, without gradient)
Reduction = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Transformer(nn.Module):
    """model(tokens [B, T], targets [B, T], positions=None, documents=None) -> loss summed over the targets that are not
    -100, fp32 scalar; with details=True, (loss, Details).

    dtype: of activations and matrix products.
    positions: None if each row is one causal sequence. Otherwise a row holds documents, which never attend to each
    other. A document begins where the position is 0.
    documents: where documents begin, int32, for the packed back-ends (attention.py). If it is left out, it is computed.

    If shard.share_rows has set a `part` of each row, tokens and targets are of that part, positions and documents of
    whole rows, and the loss is the part's. reduction: computes another loss than the sum from those of the tokens, as
    preferences.py does."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, attention_backend: str = "sdpa"):
        super().__init__()
        self.config, self.dtype, self.part = config, dtype, WHOLE
        self.embed_tokens = Embedding(config.vocab_size, config.dim)
        if config.positions == "learned":
            self.embed_positions = Embedding(config.max_seq_len, config.dim)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = NORMS[config.norm](config.dim, config.norm_eps)
        self.lm_head = LossHead(config)
        for block in self.layers:
            block.self_attn.backend = attention_backend
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes a tied lm_head and the embedding one parameter (again: `to_empty` separates them)."""
        if self.config.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, documents: Tensor | None = None,
        details: bool = False, reduction: Reduction | None = None,
    ) -> Tensor | tuple[Tensor, Details]:  # fmt: skip
        used = router_sums = figures = units = None
        if self.config.n_experts and torch.is_grad_enabled():
            used = self.used_places(targets, positions)
        x, routed = self._hidden(tokens, positions, None, documents, used)
        if reduction:
            losses = self.lm_head(x, targets, per_token=True)
            loss, units, figures = reduction(losses)
        else:
            loss, losses = self.lm_head(x, targets)
        if used is not None:
            units = (targets != IGNORE).sum() if units is None else units
            extra, router_sums = self.balance(torch.stack(routed), units, used)
            loss = loss + (extra - extra.detach())  # adds its gradient; the reported loss does not include it
        return (loss, Details(losses.detach().sum(1), router_sums, figures)) if details else loss

    def logits(self, tokens: Tensor, positions: Tensor | None = None, cache=None, last: bool = False) -> Tensor:
        """[B, T, V] fp32; last: only each row's last token, [B, 1, V]. With a cache, the first call may give it many
        tokens, and each later call adds one. Texts of different lengths end at the same place: what fills up the
        beginning of a row is a document of its own. Then each later call needs the positions of its tokens, [B, 1]."""
        x, _ = self._hidden(tokens, positions, cache)
        return self.lm_head(x[:, -1:] if last else x)

    def used_places(self, targets: Tensor, positions: Tensor | None) -> Tensor:
        """bool [B, T]: the places that the router's statistics count: all, prompts included, but the unused end of a
        packed row. That is the row's last document, without a trained token. A row without any only fills up a
        micro-batch, and has no used place."""
        documents = torch.ones_like(targets)  # the number of each place's document in its row, from 1
        if positions is not None:
            documents = (positions == 0).cumsum(1).chunk(self.part.count, 1)[self.part.index]
        last_trained = self.part.gather(documents * (targets != IGNORE)).amax((0, 2))  # [B]
        return documents <= last_trained[:, None]

    def balance(self, routers: Tensor, units: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
        """The load-balancing loss of one forward pass (arXiv 2101.03961, as Hugging Face's Mixtral has it with an
        attention mask), times its coefficient and the units (trained tokens or pairs), so that it and the summed loss
        are divided by their global number alike.

            E sum_e (assignments to e / N L) (router probability of e / N L)    summed over all layers and used places

        N: used places. The loss is k if every expert gets as many tokens as every other. It is larger if an expert has
        many tokens and large probabilities. Its gradient reaches the router through the probabilities, because a count
        has none.

        routers [L, 2, B, E] -> (loss, Details.router_sums). Where ranks share the rows, each of n returns an n-th of
        both."""
        L, _, _, E = routers.shape
        n = self.part.count
        assignments, probabilities = self.part.gather(routers).sum(0).sum(2).unbind(1)  # [L, E] each
        count, units = self.part.gather(torch.stack((used.sum(), units))).sum(0)
        count, units = count.clamp(min=1) * L, units.float()
        loss = E * (assignments.sum(0) * probabilities.sum(0)).sum() / count.float().square()
        sums = torch.cat((assignments, loss * units.expand(1, E), units.expand(1, E))).detach()
        return self.config.router_aux_loss_coef * loss * units / n, sums / n

    def _hidden(
        self, tokens: Tensor, positions: Tensor | None, cache, documents: Tensor | None = None,
        used: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        mask = offsets = None
        if positions is None:
            first = cache[0].length if cache else self.part.index * tokens.shape[1]
            positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]
        elif cache and cache[0].length:  # a token at position p sees the last p + 1 keys
            last = cache[0].length
            mask = (torch.arange(last + 1, device=tokens.device) >= last - positions)[:, None, None]  # [B, 1, 1, S]
        else:  # the documents in the form that the attention back-end takes
            if self.layers[0].self_attn.backend not in PACKED:
                mask = document_mask(positions)
            else:
                offsets = document_begins(positions) if documents is None else documents
            positions = positions.chunk(self.part.count, 1)[self.part.index]
        ropes = {kind: rope_table(self.config, positions, kind) for kind in self.config.layer_kinds}
        x = self.embed_tokens(tokens)
        if (scale := self.config.embed_scale or self.config.dim**0.5) != 1:
            x = x * scale  # in fp32, then rounded: bf16 would round the factor, too
        if self.config.positions == "learned":
            x = x + self.embed_positions(positions)
        x, routed = x.to(self.dtype), []
        for i, block in enumerate(self.layers):
            x, statistics = block(x, ropes[self.config.kind(i)], mask, offsets, cache[i] if cache else None, used)
            routed.append(statistics)
        x = self.norm(x)
        if (divisor := self.config.logits_divisor) != 1:
            x = x / divisor  # here, so that it divides logits and every loss
        return x, routed


# Initialisation is a pure function of (seed, name, position in the parameter). Therefore every rank draws only the
# values that it keeps, and any number of ranks starts from the same bits.

INIT_CHUNK = 2**20  # elements per generator


def initial_std(config: ModelConfig, name: str) -> float | None:
    """Standard deviation of a parameter's initial values by its name; None: ones.

        name                                                         initial values
        embed_tokens, embed_positions, lm_head                       normal, init_std
        qkv_proj, gate_up_proj, up_proj, gate (the router)           normal, init_std
        o_proj, down_proj                                            normal, init_std / sqrt(2 L)
        weights of norms                                             1, or 0 with rmsnorm_1p
        biases                                                       0

    The outputs of o_proj and down_proj are added to the residual stream, twice in each of L layers. Variances of
    independent values add up. So 2 L outputs whose variance is divided by 2 L add as much as one, at any depth
    (GPT-2). Values of a normal distribution are not cut off. hf/lora.py has the initial values of adapters."""
    if name.endswith("bias"):
        return 0.0
    if name.endswith("norm.weight"):
        return 0.0 if config.norm == "rmsnorm_1p" else None
    if "o_proj" in name or "down_proj" in name:
        return config.init_std / math.sqrt(2 * config.n_layers)
    return config.init_std


def random_init(
    config: ModelConfig, shapes: dict[str, tuple[int, ...]], seed: int
) -> Callable[[str, tuple[slice, ...]], Tensor]:
    """read(name, slices) -> those values of the parameter's random initialisation, fp32 on the CPU. shapes: of all
    parameters."""

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        shape, std = shapes[name], initial_std(config, name)
        rows = range(shape[0])[slices[0]]
        begin, end = (row * math.prod(shape[1:]) for row in (rows.start, rows.stop))  # elements
        first = begin - begin % INIT_CHUNK
        if std:
            chunks = [torch.empty(0)]
            for start in range(first, end, INIT_CHUNK):
                key = hashlib.sha256(f"{seed}/{name}/{start // INIT_CHUNK}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
                chunk = torch.empty(min(INIT_CHUNK, math.prod(shape) - start))
                chunks.append(chunk.normal_(0.0, std, generator=generator))
            values = torch.cat(chunks)[begin - first : end - first]
        else:
            values = torch.full((end - begin,), 1.0 if std is None else 0.0)
        return values.view(-1, *shape[1:])[(slice(None), *slices[1:])]

    return read


def matmul_params(config: ModelConfig) -> int:
    """Parameters that multiply each token: projections, active experts and lm_head, without embeddings, norms and
    biases. Counted on a block of the real model, so that another kind of layer needs no formula here."""
    with torch.device("meta"):
        block = Block(config)
    dense, stacked = (sum(p.numel() for p in block.parameters() if p.ndim == ndim) for ndim in (2, 3))
    per_block = dense + stacked * config.top_k // max(config.n_experts, 1)
    return config.n_layers * per_block + config.vocab_size * config.dim


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Forward and backward: 6 x parameters + 6 L H h T, attention counted causally (half of the full square), windows
    as they are."""
    return 6 * matmul_params(config) + 6 * config.n_heads * config.head_dim * config.seen(seq_len) // seq_len
