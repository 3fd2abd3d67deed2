"""attention.py against the formula written out in fp64."""

import re
import sys

import pytest
import torch
from torch import Tensor

import attention
from attention import BACKENDS, PACKED, choose_backend
from lib.errors import UserError

BF16 = 2.0**-8  # largest relative error of rounding to bfloat16
HEADS = [(4, 4), (6, 2), (4, 1)]  # of queries and of keys


def naive(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """-> output [B, T, H, h] and probabilities [B, H, T, S]. allowed: boolean [B or 1, 1, T, S]."""
    group = q.shape[2] // k.shape[2]
    k, v = (t[:, :, [head // group for head in range(q.shape[2])]] for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[3] ** 0.5
    weights = torch.where(allowed, scores.exp(), 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bhts,bshd->bthd", weights, v), weights


def causal(T: int, S: int) -> Tensor:
    """The T queries are the last of S tokens."""
    return (torch.arange(S) <= torch.arange(S - T, S)[:, None])[None, None]


def random_documents(B: int, T: int) -> Tensor:
    """A mask that differs from row to row: causal within documents of random lengths."""
    document = (torch.rand(B, T, generator=torch.Generator().manual_seed(5)) < 0.1).cumsum(1)
    return (document[:, :, None] == document[:, None, :])[:, None] & causal(T, T)


def make_inputs(T: int, S: int, heads: tuple[int, int], dtype=torch.float32, h: int = 24) -> list[Tensor]:
    """q, k, v and a gradient of the output."""
    g, (H, K) = torch.Generator().manual_seed(T), heads
    shapes = (2, T, H, h), (2, S, K, h), (2, S, K, h), (2, T, H, h)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


CASES = {
    "one token": (1, 1, None),
    "part of a block": (31, 31, None),
    "one block": (32, 32, None),
    "uneven": (101, 101, None),
    "documents": (101, 101, random_documents(2, 101)),
    "one token after others": (1, 70, causal(1, 70)),
    "tokens after others": (40, 70, causal(40, 70)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(monkeypatch, case, heads, backend):
    monkeypatch.setattr(attention, "BLOCK", 32)
    T, S, mask = CASES[case]
    *inputs, gradient = make_inputs(T, S, heads)
    exact = [t.double().requires_grad_() for t in inputs]
    expected, _ = naive(*exact, causal(T, S) if mask is None else mask)
    expected.backward(gradient.double())
    inputs = [t.requires_grad_() for t in inputs]
    found = attention.attention(*inputs, mask, backend)
    found.backward(gradient)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(inputs, exact, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("case", ["uneven", "documents", "tokens after others"])
def test_bf16(monkeypatch, case, heads, backend):
    """Output, element by element: query and score are rounded, which changes a score by at most d and a probability p
    by 2 d p; probability and result are rounded once each. Gradients: eight such roundings in a row."""
    monkeypatch.setattr(attention, "BLOCK", 32)
    T, S, mask = CASES[case]
    *inputs, gradient = make_inputs(T, S, heads, torch.bfloat16)
    exact = [t.double().requires_grad_() for t in inputs]
    expected, weights = naive(*exact, causal(T, S) if mask is None else mask)
    expected.backward(gradient.double())
    inputs = [t.requires_grad_() for t in inputs]
    found = attention.attention(*inputs, mask, backend)
    found.backward(gradient)
    assert {found.dtype, *(t.grad.dtype for t in inputs)} == {torch.bfloat16}

    q, k, v = (t.detach().abs().double() for t in inputs)
    group = heads[0] // heads[1]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    d = 2 * BF16 * torch.einsum("bthd,bshd->bhts", q, k).amax(-1, keepdim=True) / 24**0.5  # [B, H, T, 1]
    bound = torch.einsum("bhts,bshd->bthd", (2 * d + BF16) * weights.detach(), v) + BF16 * expected.abs()
    assert ((found - expected).abs() <= bound).all()
    for a, b in zip(inputs, exact, strict=True):
        assert (a.grad - b.grad).norm() < 8 * BF16 * b.grad.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_the_real_size(backend):
    """Long rows with large scores, whose exponentials would overflow fp32 without the maximum taken off."""
    q, k, v, _ = make_inputs(300, 300, (2, 1))
    found = attention.attention(15 * q, 15 * k, v, None, backend)
    scores = torch.einsum("bthd,bshd->bhts", 15 * q.double(), 15 * k.double().expand(-1, -1, 2, -1)) / 24**0.5
    assert scores.max() > 100
    weights = scores.masked_fill(~causal(300, 300), float("-inf")).softmax(-1)
    expected = torch.einsum("bhts,bshd->bthd", weights, v.double().expand(-1, -1, 2, -1))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_choose_backend():
    longest = attention.BLOCKED_MAX_TOKENS[True]
    for compiled, tokens in attention.BLOCKED_MAX_TOKENS.items():
        assert choose_backend("auto", "cpu", "bf16", compiled, tokens) == "blocked"
    assert choose_backend("auto", "cuda", "bf16", True, 2048, 128) == "varlen"
    for other in (
        ("cuda", "fp32", True, longest),
        ("cuda", "bf16", True, longest, 12),
        ("cpu", "fp32", True, longest),
        ("cpu", "bf16", False, longest),
        ("cpu", "bf16", True, longest + 1),
    ):
        assert choose_backend("auto", *other) == "sdpa"
        assert [choose_backend(name, *other) for name in BACKENDS] == list(BACKENDS)
        for name in PACKED:
            with pytest.raises(UserError, match=f"--attention {name}: .*--attention auto"):
                choose_backend(name, *other)


# ---- several documents in a row, without a mask


def begins(mask: Tensor) -> Tensor:
    """A mask of documents as the packed kernels are told of it, filled up."""
    B, T = mask.shape[0], mask.shape[-1]
    first = mask[:, 0].to(torch.int8).argmax(-1)  # [B, T]: the first token that each sees
    starts = (first == torch.arange(T)).flatten().nonzero().flatten()
    return torch.cat((starts, torch.full((9,), B * T))).int()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_kernels_get_the_documents(monkeypatch, heads):
    """The kernel's place is taken by a loop over documents, as its own documentation describes it."""
    import torch.nn.attention.varlen as varlen

    def loop(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
        assert torch.equal(cu_q, cu_k) and (max_q, max_k) == (101, 101) and window_size == (-1, 0)
        assert enable_gqa == (heads[0] != heads[1]) and cu_q[-1] == len(q) and cu_q.dtype == torch.int32
        out = torch.empty_like(q)
        for a, z in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False):
            if z > a:
                out[a:z] = naive(q[None, a:z], k[None, a:z], v[None, a:z], causal(z - a, z - a))[0][0]
        return out

    monkeypatch.setattr(varlen, "varlen_attn", loop)
    mask = random_documents(2, 101)
    q, k, v, _ = make_inputs(101, 101, heads)
    found = attention.attention(q, k, v, begins(mask), "varlen")
    torch.testing.assert_close(found, naive(q, k, v, mask)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["uneven", "documents"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("backend", ["sdpa", *PACKED])
def test_gpu_kernels(backend, heads, case):
    """Every kernel against fp64, packed and not. A change in one document leaves the bits of the others."""
    if backend == "flash":
        pytest.importorskip("flash_attn", reason=attention.INSTALL_FLASH)
    T, _, mask = CASES[case]
    inputs = [t.cuda() for t in make_inputs(T, T, heads, torch.bfloat16, h=64)]
    *qkv, gradient = inputs
    exact = [t.double().requires_grad_() for t in qkv]
    expected, _ = naive(*exact, (causal(T, T) if mask is None else mask).cuda())
    expected.backward(gradient.double())
    reports = mask if mask is None or backend == "sdpa" else begins(mask)
    reports = None if reports is None else reports.cuda()
    qkv = [t.requires_grad_() for t in qkv]
    found = attention.attention(*qkv, reports, backend)
    found.backward(gradient)
    assert (found - expected).norm() < 4 * BF16 * expected.norm()
    for a, b in zip(qkv, exact, strict=True):
        assert (a.grad - b.grad).norm() < 8 * BF16 * b.grad.norm()
    if mask is not None:
        starts = begins(mask).tolist()
        a, z = next((a, z) for a, z in zip(starts, starts[1:], strict=False) if z - a > 3)
        changed = [t.detach().clone() for t in qkv]
        for t in changed:
            t.view(-1, *t.shape[2:])[a:z] += 1
        after = attention.attention(*changed, reports, backend).flatten(0, 1)
        before = found.detach().flatten(0, 1)
        others = torch.ones(len(before), dtype=torch.bool)
        others[a:z] = False
        assert torch.equal(after[others], before[others]) and not torch.equal(after[a:z], before[a:z])


@pytest.mark.gpu
def test_gpu_model_compiles_with_each_kernel():
    """The same losses and gradients, compiled, from every kernel that is here."""
    from dataclasses import replace

    from model import MODELS, Transformer, document_begins, random_init
    from shard import fill_parameters

    config = replace(MODELS["tiny-llama"], dim=128, n_heads=2, n_kv_heads=1, head_dim=64)
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 258, (2, 256), generator=g).cuda()
    positions = torch.arange(256).expand(2, 256).clone()
    positions[0, 100:] -= 100
    positions[1, 31:] -= 31
    positions = positions.cuda()
    losses, norms = {}, {}
    for backend in ("sdpa", *PACKED):
        if backend == "flash" and not attention.importlib.util.find_spec("flash_attn"):
            continue
        model = Transformer(config, torch.bfloat16, backend)
        fill_parameters(model, random_init(config, {k: tuple(p.shape) for k, p in model.named_parameters()}, 0))
        model.cuda()
        for block in model.layers:
            block.compile(fullgraph=True)
        loss = model(tokens, tokens.roll(-1, 1), positions, document_begins(positions))
        loss.backward()
        losses[backend] = loss.item()
        norms[backend] = model.embed_tokens.weight.grad.norm().item()
    assert len(losses) > 1
    for values in (losses, norms):
        assert max(values.values()) == pytest.approx(min(values.values()), rel=2e-3)


def test_cudnn_never_gets_a_mask(monkeypatch):
    """Also in a compiled graph, which is traced with the same switch."""
    seen, fused = [], attention.F.scaled_dot_product_attention

    def record(*args, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return fused(*args, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", record)
    q, k, v, _ = make_inputs(8, 8, (2, 1))
    expected = [attention.attention(q, k, v, mask) for mask in (None, causal(8, 8))]
    assert seen == [True, False] and torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.undo()
    compiled = torch.compile(attention.attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, causal(8, 8)), expected[1])


def test_packed_rows_use_flash_attention_3_where_it_is_installed(monkeypatch):
    active = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(attention, "activate_flash_attention_impl", active.append)
    for module in (None, "a spec"):
        monkeypatch.setattr(attention.importlib.util, "find_spec", {attention.FA3: module}.get)
        assert choose_backend("auto", "cuda", "bf16", True, 2048, 128) == "varlen"
        assert choose_backend("sdpa", "cuda", "bf16", True, 2048, 128) == "sdpa"
    assert active == ["FA3"]


def test_flash_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(f"{sys.executable} -m pip install flash-attn --no-build")):
        choose_backend("flash", "cuda", "bf16", True, 2048)


def test_document_begins():
    from model import document_begins

    positions = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])
    assert document_begins(positions).tolist() == [0, 3, 4, 5] + 60 * [8]
    assert document_begins(positions).dtype == torch.int32
