"""model.py and attention.py. Oracles: transformers for the models, fp64 for the loss head and attention, a document
alone for packed ones, a loop over tokens for experts, torch's counter for FLOPs."""

import copy
import math
import re
import tempfile
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import attention
import model as source
from attention import BACKENDS, PACKED, choose_backend
from base.errors import UserError
from hf.families import config_json
from hf.weights import load_model
from model import MODELS, LossHead, ModelConfig, Transformer, document_begins, grouped_matmul, random_init
from shapes import RopeScaling
from test_shard import allocate, fill

BASE = ModelConfig(vocab_size=97, dim=64, n_layers=2, n_heads=4, ffn_dim=48, max_seq_len=128)
STRETCHED = RopeScaling(factor=8.0, original_seq_len=48)  # some frequencies fast, some slow, some between
YARN = RopeScaling(kind="yarn", factor=8.0, original_seq_len=48, beta_fast=4.0, attention_factor=1.7, in_windows=False)
FAMILY = {
    "gpt2": replace(BASE, norm="layernorm", positions="learned", mlp="gelu", bias=True, tied=True),
    "llama2": BASE,
    "llama3": replace(BASE, n_kv_heads=2, rope_theta=5e5),
    "llama3.1": replace(BASE, n_kv_heads=2, rope_scaling=STRETCHED),
    "llama3.2": replace(BASE, n_kv_heads=2, rope_scaling=STRETCHED, tied=True),
    "mixtral": replace(BASE, n_kv_heads=2, mlp="moe", n_experts=4, top_k=2, rope_theta=1e6, router_aux_loss_coef=0.001),
    "one expert": replace(BASE, mlp="moe", n_experts=4, top_k=1, router_aux_loss_coef=0.001),
    "wide-heads": replace(BASE, n_kv_heads=1, head_dim=24),
    "mistral": replace(BASE, n_kv_heads=2, family="mistral"),
    "qwen2.5": replace(BASE, n_kv_heads=2, qkv_bias=True, tied=True),
    "qwen3": replace(BASE, n_kv_heads=2, qk_norm=True, head_dim=24),
    "llama biases": replace(BASE, attention_bias=True, mlp_bias=True),
    "linear": replace(BASE, n_kv_heads=2, rope_scaling=RopeScaling(kind="linear", factor=3.0)),
    "dynamic": replace(BASE, rope_scaling=RopeScaling(kind="dynamic", factor=3.0)),
    "yarn": replace(BASE, rope_scaling=replace(YARN, truncate=False, in_windows=True), tied=True),
    "mistral 0.1": replace(BASE, n_kv_heads=2, window=10, layer_kinds=("window",), family="mistral"),
    "ministral": replace(BASE, window=41, layer_kinds=("full", "window"), family="ministral"),
    "qwen2 windows": replace(BASE, n_kv_heads=2, qkv_bias=True, window=10, layer_kinds=("full", "window")),
    "qwen3 windows": replace(BASE, qk_norm=True, attention_bias=True, window=10, layer_kinds=("window", "full")),
    "qwen3_moe": replace(BASE, qk_norm=True, head_dim=24, mlp="moe", n_experts=16, top_k=4, norm_top_k=False),
    "qwen3_moe windows": replace(
        BASE, n_kv_heads=2, qk_norm=True, mlp="moe", n_experts=8, top_k=3, window=33, layer_kinds=("window",)
    ),
    "olmo2": replace(BASE, n_kv_heads=2, norm_after=True, qk_norm_whole=True),
    "olmo3": replace(
        BASE, n_layers=4, n_kv_heads=2, norm_after=True, qk_norm_whole=True, rope_theta=3e5, rope_scaling=YARN,
        window=10, layer_kinds=("window", "window", "window", "full"),
    ),
    "gemma3": replace(
        BASE, n_layers=7, n_kv_heads=2, head_dim=24, norm_eps=1e-6, qk_norm=True, rope_theta=1e6, query_scale=40,
        rope_scaling=RopeScaling(kind="linear", factor=3.0, in_windows=False), window_rope_theta=1e4, window=10,
        layer_kinds=(*["window"] * 5, "full"), norm="rmsnorm_1p", norm_around=True, mlp="geglu", embed_scale=0.0,
        tied=True,
    ),
    "granite": replace(
        BASE, n_kv_heads=2, embed_scale=3.0, attention_scale=0.3, residual_scale=0.7, logits_divisor=1.7
    ),
    "ministral3": replace(
        BASE, n_kv_heads=2, head_dim=24, family="ministral3",
        rope_scaling=replace(YARN, original_seq_len=20, in_windows=True, query_growth=0.3),
    ),
    "arcee": replace(
        BASE, n_kv_heads=2, head_dim=24, mlp="relu2", mlp_bias=True, rope_scaling=replace(YARN, in_windows=True)
    ),
    "smollm3": replace(BASE, n_layers=4, n_kv_heads=2, tied=True, layer_kinds=("full", "full", "full", "full nope")),
    "smollm3 windows": replace(BASE, mlp_bias=True, window=10, layer_kinds=("window", "window nope")),
    "phi3": replace(BASE, n_kv_heads=2, window=21, layer_kinds=("window",), family="phi3"),
}  # fmt: skip
BF16 = 2.0**-8  # largest relative error of rounding to bfloat16


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, BASE.vocab_size, shape, generator=seeded(seed))


def uneven_targets(*kept: int, length: int) -> Tensor:
    """A row per number: so many targets to train on, -100 after them."""
    targets = random_tokens(len(kept), length, seed=1)
    return targets.masked_fill(torch.arange(length) >= torch.tensor(kept)[:, None], -100)


def scramble(module: nn.Module) -> nn.Module:
    """Random weights, biases and norms, large enough that each shows in the outputs."""
    g = seeded()
    with torch.no_grad():
        for name, p in module.named_parameters():
            first = p.flatten()[0].item()  # of a norm: 1, or 0
            p.normal_(0.0, 0.15, generator=g)
            if p.ndim == 1 and name.endswith("weight"):
                p += first
    return module.eval()


def make_model(name: str, dtype: torch.dtype = torch.float32, backend: str = "sdpa") -> Transformer:
    return scramble(Transformer(FAMILY[name], dtype, backend))


def error(found: Tensor, expected: Tensor, least: float = 1e-9) -> float:
    """Largest difference, relative to the largest expected value, or to `least` where that is smaller."""
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=least)).item()


# ---- the table of models


# Parameters, and what they do not pin: heads, positions and rope_theta, from each config.json on the hub. Those of the
# other models are in hf/test_weights.py.
@pytest.mark.parametrize("name, row", [
    ("gpt2-medium", (354_823_168, 16, 1024, 1e4)), ("gpt2-xl", (1_557_611_200, 25, 1024, 1e4)),
    ("llama2-13b", (13_015_864_320, 40, 4096, 1e4)), ("llama2-70b", (68_976_648_192, 64, 4096, 1e4)),
    ("llama3-70b", (70_553_706_496, 64, 8192, 5e5)), ("llama3.1-70b", (70_553_706_496, 64, 131072, 5e5)),
    ("llama3.2-3b", (3_212_749_824, 24, 131072, 5e5)), ("mixtral-8x22b", (140_620_634_112, 48, 65536, 1e6)),
    ("qwen2.5-1.5b", (1_543_714_304, 12, 131072, 1e6)), ("qwen3-0.6b", (596_049_920, 16, 40960, 1e6)),
    ("qwen3-8b", (8_190_735_360, 32, 40960, 1e6)), ("qwen3-30b-a3b", (30_532_122_624, 32, 40960, 1e6)),
    ("mistral-7b-v0.1", (7_241_732_096, 32, 32768, 1e4)), ("olmo2-1b", (1_484_916_736, 16, 4096, 5e5)),
    ("olmo2-7b", (7_298_617_344, 32, 4096, 5e5)), ("phi-4", (14_659_507_200, 40, 16384, 250000.0)),
    ("smollm3-3b", (3_075_098_624, 16, 65536, 5e6)), ("gemma3-270m", (268_098_176, 4, 32768, 1e6)),
    ("gemma3-1b", (999_885_952, 4, 32768, 1e6)),
])  # fmt: skip
def test_published_row(name, row):
    config, factor = MODELS[name], {"llama3.1-70b": 8, "llama3.2-3b": 32}.get(name)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Transformer(config).parameters())
    assert (parameters, config.n_heads, config.max_seq_len, config.rope_theta) == row
    assert config.rope_scaling == (RopeScaling(factor, 1.0, 4.0, 8192) if factor else None)
    eps = 1e-6 if re.search("qwen|olmo|smollm|gemma", name) else 1e-5
    assert (config.norm_eps, config.head_dim) == (
        eps,
        256 if "gemma" in name else 64 if "gpt2" in name else 128,
    )


# ---- parity with transformers


def make_reference(config: ModelConfig) -> nn.Module:
    """Hugging Face's model of this shape, scrambled."""
    no_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    hf = transformers.AutoConfig.for_model(**config_json(config, "float32"), **no_ids)
    return scramble(transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="eager"))


def as_ours(theirs: nn.Module) -> Transformer:
    """Our model with the parameters of Hugging Face's."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return load_model(folder)


def make_pair(name: str) -> tuple[Transformer, nn.Module]:
    """Our model and Hugging Face's with the same weights."""
    theirs = make_reference(FAMILY[name])
    ours = as_ours(theirs)
    assert replace(ours.config, init_std=FAMILY[name].init_std) == FAMILY[name]
    ours.config = replace(ours.config, router_aux_loss_coef=0.0)  # transformers adds it only where it is asked to
    return ours, theirs


def gradient_error(ours: Transformer, theirs: nn.Module) -> float:
    gradients = copy.deepcopy(theirs)
    for p, q in zip(gradients.parameters(), theirs.parameters(), strict=True):
        p.data = q.grad
    pairs = zip(ours.parameters(), as_ours(gradients).parameters(), strict=True)
    # All of them have values above 2 but that of a router that chooses one expert, which is 0 without rounding.
    return max(error(p.grad, gradient, least=2.0) for p, gradient in pairs)


@pytest.mark.parametrize("name", FAMILY)
def test_parity_with_transformers(monkeypatch, name):
    """Logits, loss, every gradient, then the losses of 10 AdamW steps, whose eps is above the rounding of a gradient
    that is 0; longer than rope scaling's original context, and than two blocks of `blocked` attention."""
    monkeypatch.setattr(attention, "BLOCK", 40)
    ours, theirs = make_pair(name)
    ours.layers[1].self_attn.backend = "blocked"
    tokens, targets = random_tokens(3, 96), uneven_targets(96, 5, 40, length=96)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=2e-3, eps=1e-3) for m in (ours, theirs)]
    losses = []
    for step in range(10):
        logits = theirs(tokens).logits
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = ours(tokens, targets)
        expected.backward()
        loss.backward()
        if step == 0:
            assert error(ours.logits(tokens), logits) < 1e-5
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
            assert gradient_error(ours, theirs) < 1e-4
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4), step
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("name, backend", [("gpt2", "blocked"), ("llama3", "blocked"), ("mixtral", "sdpa")])
def test_bf16_stays_near_fp32(name, backend):
    """fp32 parameters, gradients, loss and logits around bf16 activations, which some 60 random roundings change."""
    tokens, targets = random_tokens(2, 64), uneven_targets(64, 9, length=64)
    reference, model = make_model(name), make_model(name, torch.bfloat16, backend)
    logits, loss = model.logits(tokens), model(tokens, targets)
    loss.backward()
    assert {logits.dtype, loss.dtype, *(p.grad.dtype for p in model.parameters())} == {torch.float32}
    spread = (logits - reference.logits(tokens)).norm() / reference.logits(tokens).norm()
    assert BF16 / 8 < spread < BF16 * math.sqrt(60)
    assert loss.item() == pytest.approx(reference(tokens, targets).item(), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_embeddings_are_rounded_once(dtype):
    """The factor is not rounded: 96 ** 0.5 = 9.798 is 9.8125 in bf16."""
    model, tokens, seen = Transformer(replace(FAMILY["gemma3"], dim=96), torch.bfloat16), random_tokens(2, 9), []
    model.to(dtype).layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.logits(tokens)
    assert torch.equal(seen[0], (model.embed_tokens.weight[tokens].float() * 96**0.5).bfloat16())


def test_balancing_loss_is_that_of_transformers_with_an_attention_mask():
    """In the gradients and the sums, not in the loss. Ours has the documents, which begin with an untrained prompt, in
    two mostly unused rows, and a row that only fills up the batch; transformers has a padded row for each document."""
    ours, theirs = make_pair("mixtral")
    ours.config = replace(ours.config, router_aux_loss_coef=0.3)
    tokens, padded = random_tokens(3, 40), random_tokens(3, 40, seed=5)
    targets, padded_targets, mask = torch.full_like(tokens, -100), torch.full_like(tokens, -100), torch.zeros(3, 40)
    positions = torch.arange(40).repeat(3, 1)
    for i, (row, first, n, trained) in enumerate([(0, 0, 9, 6), (0, 9, 7, 1), (1, 0, 11, 5)]):
        padded[i, :n], mask[i, :n] = tokens[row, first : first + n], 1
        last = random_tokens(trained, seed=i)
        targets[row, first + n - trained : first + n] = padded_targets[i, n - trained : n] = last
        positions[row, first:] = torch.arange(40 - first)
        positions[row, first + n :] = torch.arange(40 - first - n)  # the unused end is a document
    out = theirs(padded, attention_mask=mask, output_router_logits=True)
    mean = F.cross_entropy(out.logits.flatten(0, 1), padded_targets.flatten())
    (12 * mean + 12 * 0.3 * out.aux_loss).backward()
    loss, details = ours(tokens, targets, positions, details=True)
    assert loss.item() == pytest.approx(12 * mean.item(), rel=1e-5)
    loss.backward()
    assert gradient_error(ours, theirs) < 1e-4
    sums = details.router_sums
    assert (sums[2, 0] / 12).item() == pytest.approx(out.aux_loss.item(), rel=1e-5) and sums[3, 0] == 12
    for layer, scores in enumerate(out.router_logits):
        experts = scores.topk(2, -1).indices[mask.flatten() > 0]
        assert sums[layer].tolist() == experts.flatten().bincount(minlength=4).tolist()
    with torch.no_grad():
        assert ours(tokens, targets, positions, details=True)[1].router_sums is None


# ---- the loss head


def make_head(vocab_size: int = 41, dim: int = 16) -> LossHead:
    head = LossHead(replace(BASE, vocab_size=vocab_size, dim=dim))
    with torch.no_grad():
        head.weight.copy_(randn(vocab_size, dim))
    return head


def cross_entropy_fp64(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """-> loss, and its gradients by x and by weight, of logits that are rounded as x is."""
    dtype, weight = x.dtype, weight.detach().to(x.dtype).double().requires_grad_()
    x = x.detach().double().requires_grad_()
    logits = x @ weight.T
    logits = logits + (logits.to(dtype).double() - logits).detach()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


@pytest.mark.parametrize("chunk_bytes", [2**29, 0], ids=["one chunk", "chunks of 128 rows"])
@pytest.mark.parametrize("mask", [(150, 150, 150, 150), (150, 0, 30, 80), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("head_rows", [1, 64])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2 * BF16)], ids=["fp32", "bf16"])
def test_loss_head_is_cross_entropy(monkeypatch, mask, chunk_bytes, head_rows, dtype, bound):
    """head_rows 64: the weight's copy is padded, as on a GPU. In bf16 the loss is that of the rounded logits, and the
    gradients of hundreds of rows, which have one sign, add up in fp32."""
    head, x = make_head(), randn(4, 150, 16, seed=2).abs().to(dtype).requires_grad_()
    monkeypatch.setattr(source, "HEAD_ROWS", {"cpu": head_rows})
    monkeypatch.setattr(source, "CHUNK_BYTES", chunk_bytes)
    targets = uneven_targets(*mask, length=150).clamp(max=40)
    loss, dx, dw = cross_entropy_fp64(x, head.weight, targets)
    found, row_losses = head(x, targets)
    (found * 0.5).backward()
    assert (found.dtype, x.grad.dtype, head.weight.grad.dtype) == (torch.float32, dtype, torch.float32)
    assert found.item() == pytest.approx(loss.item(), rel=bound / 8) and row_losses.sum().allclose(found)
    assert error(x.grad, 0.5 * dx) < bound
    assert error(head.weight.grad, 0.5 * dw) < bound
    assert x.grad[targets == -100].abs().sum() == 0
    with torch.no_grad():
        assert head(x, targets)[0].item() == pytest.approx(loss.item(), rel=bound / 8)


# ---- documents, causality, cache


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name, dtype", [("gpt2", torch.float32), ("llama3", torch.float32), ("llama3", torch.bfloat16),
                                         ("mixtral", torch.float32), ("ministral3", torch.float32)])  # fmt: skip
def test_documents_do_not_see_each_other(monkeypatch, name, dtype, backend):
    """Another document's tokens change no bit of the logits (experts: rounding, for rows are grouped differently), and
    packed or alone, a document has the same logits and losses."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    model, tokens = make_model(name, dtype, backend), random_tokens(3, 48)
    documents = [(10, 23, 1, 14), (31, 17), (48,)]  # their lengths in each row
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])
    packed = model.logits(tokens, positions)
    for row, lengths in enumerate(documents):
        for document, length in enumerate(lengths):
            a = sum(lengths[:document])
            inside = torch.zeros(3, 48, dtype=torch.bool)
            inside[row, a : a + length] = True
            changed = torch.where(inside, (tokens + 1) % BASE.vocab_size, tokens)
            after = model.logits(changed, positions)
            assert (after[inside] != packed[inside]).any(-1).all()
            others = after[~inside], packed[~inside]
            assert error(*others) < 1e-5 if name == "mixtral" else torch.equal(*others)
            if dtype == torch.float32:
                assert error(model.logits(tokens[row : row + 1, a : a + length])[0], packed[inside]) < 1e-5
    targets = uneven_targets(48, 20, 31, length=48)
    expected = F.cross_entropy(packed.flatten(0, 1), targets.flatten(), reduction="sum")
    assert model(tokens, targets, positions).item() == pytest.approx(expected.item(), rel=1e-5)


# ---- initialisation


def test_init_of_any_slice(monkeypatch):
    """Whatever part a rank asks for, it gets those values of the whole; parameters span several chunks. Every name and
    seed has values of its own, and torch's generator is left alone."""
    monkeypatch.setattr(source, "INIT_CHUNK", 100)
    shapes, state, g = {"a": (13, 7, 5), "b": (31, 17), "c": (331,), "small": (3, 2)}, torch.get_rng_state(), seeded()
    drawn = []
    for seed in (0, 1):
        read = random_init(BASE, shapes, seed)
        for name, shape in shapes.items():
            whole = read(name, tuple(slice(0, n) for n in shape))
            drawn.append(whole.flatten())
            assert whole.shape == shape
            for _ in range(50):
                ends = [torch.randint(0, n + 1, (2,), generator=g).sort().values.tolist() for n in shape]
                slices = tuple(slice(a, b) for a, b in ends)
                assert torch.equal(read(name, slices), whole[slices]), slices
    assert len(torch.cat(drawn).unique()) == sum(map(len, drawn))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("tiny-")])
def test_initial_values_of_a_meta_model(name):
    """None is what `to_empty` left. Norm weights are ones (Gemma's zeros), biases zeros, the rest normal, times
    1 / sqrt(2 L) where it writes to the residual stream. A tied head is the embedding again."""
    config = replace(MODELS[name], n_layers=3, init_std=0.03)
    model = allocate(config)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().fill_(float("nan"))
    fill(model)
    assert not any(t.isnan().any() for t in [*model.parameters(), *model.buffers()])
    assert (model.lm_head.weight is model.embed_tokens.weight) == config.tied
    residual = re.compile(r"layers\.\d\.(self_attn\.o_proj(\.weight)?|mlp\.down_proj(\.weight)?)$")
    assert sum(bool(residual.match(n)) for n, _ in model.named_parameters()) == 2 * 3
    for n, p in model.named_parameters():
        if n.endswith("norm.weight") or n.endswith("bias"):
            assert (p == float(n.endswith("weight") and "gemma" not in name)).all(), n
        else:
            std, count = 0.03 / math.sqrt(6) if residual.match(n) else 0.03, p.numel()
            assert abs(p.mean()) < 5 * std / math.sqrt(count), n
            assert p.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * count)), n
            assert (p.abs() < std).float().mean().item() == pytest.approx(0.6827, abs=5 * 0.47 / math.sqrt(count)), n


# ---- experts, FLOPs


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("counts", [(5, 0, 8, 3), (0, 16, 0, 0), (1, 2, 3, 0)], ids=str)
@pytest.mark.parametrize("dtype, dim", [(torch.bfloat16, 16), (torch.bfloat16, 12), (torch.float32, 16)], ids=str)
def test_grouped_matmul_is_a_loop(monkeypatch, dtype, dim, counts, device):
    """With gradients, and experts without tokens; the grouped kernel where it can run."""
    calls, kernel = [], F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    x, weight = randn(sum(counts), dim).to(device, dtype), randn(4, 24, dim, seed=1).to(device)
    gradient = randn(sum(counts), 24, seed=2).to(device, dtype)
    x.requires_grad_(), weight.requires_grad_()
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    found = grouped_matmul(x, weight, ends)
    found.backward(gradient)
    assert found.dtype == x.grad.dtype == dtype and weight.grad.dtype == torch.float32
    assert len(calls) == (dtype == torch.bfloat16 and dim == 16)

    x64, w64 = x.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    expert = [e for e, n in enumerate(counts) for _ in range(n)]
    expected = torch.stack([w64[e] @ row for e, row in zip(expert, x64, strict=True)])
    expected.backward(gradient.double())
    bound = 1.01 * BF16 if dtype == torch.bfloat16 else 1e-6  # products add up in fp32, the sum is rounded once
    for a, b in ((found, expected), (x.grad, x64.grad), (weight.grad, w64.grad)):
        assert ((a.double() - b).abs() <= bound * b.abs() + 1e-6 * b.abs().max()).all()
    assert all(weight.grad[e].abs().sum() == 0 for e, n in enumerate(counts) if n == 0)


@pytest.mark.parametrize("name", FAMILY)
def test_flops_are_those_that_torch_counts(name):
    """One block of queries computes the full square of attention, of which the causal half is ours to count; a window
    is counted as its share of that square."""
    model, tokens, T = make_model(name, backend="blocked"), random_tokens(2, 64), 64
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    products = 6 * source.matmul_params(FAMILY[name])
    config = FAMILY[name]
    attention_flops = source.flops_per_token(replace(config, layer_kinds=("full",)), T) - products
    full = 2 * T * (products + 2 * attention_flops)
    widths = [layer.self_attn.window or T for layer in model.layers]
    if config.window:  # its block of queries is the row, so it computes the full square, too
        attention_flops *= sum(min(t + 0.5, width) for width in widths for t in range(T)) / (len(widths) * T * T / 2)
        assert source.flops_per_token(config, T) == int(products + attention_flops)
    assert counter.get_total_flops() == full


# ---- attention


def naive(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """-> output [B, T, H, h]. allowed: boolean [B or 1, 1, T, S]."""
    group = q.shape[2] // k.shape[2]
    k, v = (t[:, :, [head // group for head in range(q.shape[2])]] for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[3] ** 0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v)


def causal(T: int) -> Tensor:
    return torch.ones(1, 1, T, T, dtype=torch.bool).tril()


def make_inputs(B: int, T: int, heads: tuple[int, int], dtype=torch.float32, h: int = 24) -> list[Tensor]:
    """q, k, v and a gradient of the output."""
    g, (H, K) = seeded(T), heads
    return [torch.randn(B, T, n, h, generator=g).to(dtype) for n in (H, K, K, H)]


def compare_with_naive(inputs: list[Tensor], mask: Tensor, call, bound: float) -> None:
    """Output and gradients of an attention function. inputs: of make_inputs, on any device."""
    *qkv, gradient = inputs
    exact, qkv = [t.double().requires_grad_() for t in qkv], [t.requires_grad_() for t in qkv]
    expected, found = naive(*exact, mask.to(gradient.device)), call(*qkv)
    expected.backward(gradient.double())
    found.backward(gradient)
    assert {found.dtype, *(t.grad.dtype for t in qkv)} == {gradient.dtype}
    assert (found - expected).norm() < bound * expected.norm()
    for a, b in zip(qkv, exact, strict=True):
        assert (a.grad - b.grad).norm() < 2 * bound * b.grad.norm()


def test_choose_backend(monkeypatch):
    """FlashAttention 3 takes varlen's place where it is installed."""
    gpu, longest, active = ("cuda", "bf16", True), attention.BLOCKED_MAX_TOKENS[True], []
    assert choose_backend("auto", "cpu", "bf16", True, longest) == "blocked"
    for other in ((*gpu, longest, 12), ("cuda", "fp32", True, longest), ("cpu", "bf16", True, longest + 1)):
        assert [choose_backend(name, *other) for name in ("auto", *BACKENDS)] == ["sdpa", *BACKENDS]
        for name in PACKED:
            with pytest.raises(UserError, match=f"--attention {name} needs a GPU"):
                choose_backend(name, *other)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(attention, "activate_flash_attention_impl", active.append)
    for module in (None, "a spec"):
        monkeypatch.setattr(attention, "find_spec", {attention.FA3: module}.get)
        assert choose_backend("auto", *gpu, 2048, 128) == "varlen" and len(active) == bool(module)
    with pytest.raises(UserError, match="pip install flash-attn --no-build"):
        choose_backend("flash", *gpu, 2048)


def begins(mask: Tensor) -> Tensor:
    """A mask of documents as the packed kernels take it: a token's position is the number of those that it sees."""
    return document_begins(mask[:, 0].sum(-1) - 1)


def in_window(T: int, window: int) -> Tensor:
    """A token sees `window` positions, its own included; 0: all before it."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return causal(T) & (distance < (window or T))


@pytest.mark.parametrize("packed", [False, True], ids=["plain rows", "documents"])
@pytest.mark.parametrize("window", [0, 7, 101])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)  # of queries and of keys
def test_packed_kernels_get_the_documents(monkeypatch, heads, window, packed):
    """The kernel's place is taken by a loop over documents, as its own documentation describes it. Plain rows go to it
    if a window is narrower than they are."""
    import torch.nn.attention.varlen as varlen

    calls = []

    def loop(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
        calls.append(window_size)
        assert torch.equal(cu_q, cu_k) and (max_q, max_k) == (101, 101) and window_size[1] == 0
        assert enable_gqa == (heads[0] != heads[1]) and cu_q[-1] == len(q) and cu_q.dtype == torch.int32
        out = torch.empty_like(q)
        for a, z in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False):
            if z > a:
                allowed = in_window(z - a, window_size[0] + 1)
                out[a:z] = naive(q[None, a:z], k[None, a:z], v[None, a:z], allowed)[0]
        return out

    monkeypatch.setattr(varlen, "varlen_attn", loop)
    document = (torch.rand(2, 101, generator=seeded(5)) < 0.1 * packed).cumsum(1)  # of random lengths
    mask = (document[:, :, None] == document[:, None, :])[:, None] & causal(101)
    q, k, v, _ = make_inputs(2, 101, heads)
    found = attention.attention(q, k, v, None, "varlen", window, begins(mask) if packed else None)
    torch.testing.assert_close(found, naive(q, k, v, mask & in_window(101, window)), rtol=1e-5, atol=1e-5)
    narrow = 0 < window < 101
    assert set(calls) == ({(window - 1 if narrow else -1, 0)} if packed or narrow else set())


@pytest.mark.parametrize("packed", [False, True], ids=["plain rows", "documents"])
@pytest.mark.parametrize("window", [2, 5, 16, 23, 60])
@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_against_fp64(monkeypatch, backend, window, packed):
    """With gradients. Blocks of 16 queries multiply only keys that one of their queries sees."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    document = (torch.rand(2, 53, generator=seeded(5)) < 0.1 * packed).cumsum(1)
    mask = (document[:, :, None] == document[:, None, :])[:, None] & causal(53)
    given = mask if packed else None
    inputs = make_inputs(2, 53, (6, 2))
    allowed = mask & in_window(53, window)
    compare_with_naive(inputs, allowed, lambda q, k, v: attention.attention(q, k, v, given, backend, window), 1e-6)
    with FlopCounterMode(display=False) as counter:
        attention.attention(*inputs[:3], given, "blocked", window)
    blocks = [(a, min(a + 16, 53)) for a in range(0, 53, 16)]
    if window < 53:
        pairs = sum((z - a) * (z - max(0, a + 1 - window)) for a, z in blocks)
        assert counter.get_total_flops() == 2 * 2 * pairs * 24 * 6 * 2


def test_cudnn_never_gets_a_mask(monkeypatch):
    seen, fused, enabled = [], F.scaled_dot_product_attention, torch.backends.cuda.cudnn_sdp_enabled
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: seen.append(enabled()) or fused(*a, **k))
    for mask in (None, causal(8)):
        attention.attention(*make_inputs(1, 8, (2, 1))[:3], mask)
    assert seen == [True, False] and enabled()
