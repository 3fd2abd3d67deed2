"""model.py. Oracles: transformers for the models, F.cross_entropy in fp64 for the loss head, a document alone for
packed ones, a loop over tokens for experts, torch's counter for FLOPs."""

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import attention
import model as source
from attention import BACKENDS
from config import parse_args
from model import MODELS, LossHead, ModelConfig, MoE, Transformer, grouped_matmul, random_init, rope_frequencies
from shapes import RopeScaling
from shard import fill_parameters
from test_shard import run_code

BASE = ModelConfig(vocab_size=97, dim=64, n_layers=2, n_heads=4, ffn_dim=48, max_seq_len=128)
STRETCHED = RopeScaling(factor=8.0, original_seq_len=48)  # some frequencies fast, some slow, some between
FAMILY = {
    "gpt2": replace(BASE, norm="layernorm", positions="learned", mlp="gelu", bias=True, tied=True),
    "llama2": BASE,
    "llama3": replace(BASE, n_kv_heads=2, rope_theta=5e5),
    "llama3.1": replace(BASE, n_kv_heads=2, rope_scaling=STRETCHED),
    "llama3.2": replace(BASE, n_kv_heads=2, rope_scaling=STRETCHED, tied=True),
    "mixtral": replace(BASE, n_kv_heads=2, mlp="moe", n_experts=4, top_k=2, rope_theta=1e6, router_aux_loss_coef=0.001),
    "wide-heads": replace(BASE, n_kv_heads=1, head_dim=24),
    "mistral": replace(BASE, n_kv_heads=2, family="mistral"),
    "qwen2.5": replace(BASE, n_kv_heads=2, qkv_bias=True, tied=True),
    "qwen3": replace(BASE, n_kv_heads=2, qk_norm=True, head_dim=24),
}
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
            p.normal_(0.0, 0.15, generator=g)
            if p.ndim == 1 and name.endswith("weight"):
                p += 1.0
    return module.eval()


def make_model(name: str, dtype: torch.dtype = torch.float32, backend: str = "sdpa") -> Transformer:
    return scramble(Transformer(FAMILY[name], dtype, backend))


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value (to 1e-9 where all of them are 0)."""
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9)).item()


# ---- the table of models

# Parameters, and what they do not pin: heads, positions, rope_theta and its factor, from each config.json on the hub.
ROWS = {
    "gpt2": (124_439_808, 12, 1024, None, None),
    "gpt2-medium": (354_823_168, 16, 1024, None, None),
    "gpt2-large": (774_030_080, 20, 1024, None, None),
    "gpt2-xl": (1_557_611_200, 25, 1024, None, None),
    "llama2-7b": (6_738_415_616, 32, 4096, 1e4, None),
    "llama2-13b": (13_015_864_320, 40, 4096, 1e4, None),
    "llama2-70b": (68_976_648_192, 64, 4096, 1e4, None),
    "llama3-8b": (8_030_261_248, 32, 8192, 5e5, None),
    "llama3-70b": (70_553_706_496, 64, 8192, 5e5, None),
    "llama3.1-8b": (8_030_261_248, 32, 131072, 5e5, 8),
    "llama3.1-70b": (70_553_706_496, 64, 131072, 5e5, 8),
    "llama3.1-405b": (405_853_388_800, 128, 131072, 5e5, 8),
    "llama3.2-1b": (1_235_814_400, 32, 131072, 5e5, 32),
    "llama3.2-3b": (3_212_749_824, 24, 131072, 5e5, 32),
    "mixtral-8x7b": (46_702_792_704, 32, 32768, 1e6, None),
    "mixtral-8x22b": (140_620_634_112, 48, 65536, 1e6, None),
    "mistral-7b": (7_248_023_552, 32, 32768, 1e6, None),
    "qwen2.5-0.5b": (494_032_768, 14, 32768, 1e6, None),
    "qwen2.5-1.5b": (1_543_714_304, 12, 131072, 1e6, None),
    "qwen2.5-7b": (7_615_616_512, 28, 131072, 1e6, None),
    "qwen3-0.6b": (596_049_920, 16, 40960, 1e6, None),
    "qwen3-4b": (4_022_468_096, 32, 40960, 1e6, None),
    "qwen3-8b": (8_190_735_360, 32, 40960, 1e6, None),
}


def count_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


@pytest.mark.parametrize("name", ROWS)
def test_published_row(name):
    parameters, heads, positions, theta, factor = ROWS[name]
    config = MODELS[name]
    assert count_parameters(config) == parameters
    assert (config.n_heads, config.max_seq_len) == (heads, positions)
    assert (config.rope_theta if config.positions == "rope" else None) == theta
    assert config.rope_scaling == (RopeScaling(factor, 1.0, 4.0, 8192) if factor else None)
    narrow = name.startswith(("gpt2", "llama3.2-1b", "qwen2.5-0.5b"))
    assert (config.norm_eps, config.head_dim) == (1e-6 if "qwen" in name else 1e-5, 64 if narrow else 128)


def test_every_row_is_published_or_tiny():
    assert {name for name in MODELS if not name.startswith("tiny-")} == set(ROWS)


def test_vocabulary_override():
    config = parse_args(["--model", "llama2-7b", "--vocab_size", "50432"]).model_config
    assert count_parameters(config) == 6_889_410_560


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_kv_heads": 3}, "n_heads 4 does not divide by n_kv_heads 3"),
        ({"n_kv_heads": 8}, "n_heads 4 does not divide by n_kv_heads 8"),
        ({"dim": 66, "head_dim": 0}, "dim 66 does not divide by n_heads 4"),
        ({"dim": 60, "head_dim": 0}, "even head_dim, not 15"),
        ({"n_layers": 0}, "n_layers is 0"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, **change)


# ---- parity with transformers


def make_reference(config: ModelConfig) -> nn.Module:
    """Hugging Face's model of this shape, scrambled."""
    no_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if config.mlp == "gelu":
        hf = transformers.GPT2Config(
            vocab_size=config.vocab_size, n_embd=config.dim, n_layer=config.n_layers, n_head=config.n_heads,
            n_inner=config.ffn_dim, n_positions=config.max_seq_len, layer_norm_epsilon=config.norm_eps, **no_ids,
        )  # fmt: skip
        return scramble(transformers.GPT2LMHeadModel._from_config(hf, attn_implementation="eager"))
    rope, scaling = {"rope_type": "default", "rope_theta": config.rope_theta}, config.rope_scaling
    if scaling:
        rope |= {
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor, "original_max_position_embeddings": scaling.original_seq_len,
        }  # fmt: skip
    shape = dict(
        vocab_size=config.vocab_size, hidden_size=config.dim, num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads, num_key_value_heads=config.n_kv_heads, head_dim=config.head_dim,
        intermediate_size=config.ffn_dim, max_position_embeddings=config.max_seq_len, rms_norm_eps=config.norm_eps,
        rope_parameters=rope, tie_word_embeddings=config.tied, **no_ids,
    )  # fmt: skip
    if config.family == "mistral":
        hf, kind = transformers.MistralConfig(**shape, sliding_window=None), transformers.MistralForCausalLM
    elif config.qkv_bias:
        hf, kind = transformers.Qwen2Config(**shape), transformers.Qwen2ForCausalLM
    elif config.qk_norm:
        hf, kind = transformers.Qwen3Config(**shape), transformers.Qwen3ForCausalLM
    elif config.mlp == "moe":
        hf = transformers.MixtralConfig(num_local_experts=config.n_experts, num_experts_per_tok=config.top_k, **shape)
        kind = transformers.MixtralForCausalLM
    else:
        hf, kind = transformers.LlamaConfig(**shape), transformers.LlamaForCausalLM
    return scramble(kind._from_config(hf, attn_implementation="eager"))


GPT2_NAMES = {
    "wte": "embed_tokens", "wpe": "embed_positions", "h.": "layers.", "ln_1": "input_layernorm", "ln_f": "norm",
    "ln_2": "post_attention_layernorm", "attn.c_attn": "self_attn.qkv_proj", "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
}  # fmt: skip


def translate(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters or gradients from Hugging Face's names and layouts (experts stacked) to ours."""
    parts = {}
    for name, value in values.items():
        prefix, _, name = name.rpartition("model.") if "model." in name else name.rpartition("transformer.")
        if "transformer.wte.weight" in values:
            for theirs, ours in GPT2_NAMES.items():
                name = name.replace(theirs, ours)
            value = value.T if name.endswith("proj.weight") else value  # Conv1D keeps [in, out]
        else:
            name = re.sub(r"\b[qkv]_proj", "qkv_proj", re.sub(r"\b(gate|up)_proj", "gate_up_proj", name))
            name = name.replace("mlp.experts.", "mlp.")
        parts.setdefault(name, []).append(value.detach())
    return {name: torch.cat(fused) for name, fused in parts.items()}


def make_pair(name: str) -> tuple[Transformer, nn.Module]:
    """Our model and Hugging Face's with the same weights."""
    config = replace(FAMILY[name], router_aux_loss_coef=0.0)  # transformers adds it only where it is asked to
    ours, theirs = Transformer(config), make_reference(config)
    values = translate(dict(theirs.named_parameters()))
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: v.shape for n, v in values.items()}
    fill_parameters(ours, lambda name, slices: values[name])
    return ours, theirs


@pytest.mark.parametrize("name", FAMILY)
def test_parity_with_transformers(name):
    """Logits, loss, every gradient, then the losses of 20 AdamW steps; longer than rope scaling's original context."""
    ours, theirs = make_pair(name)
    tokens, targets = random_tokens(3, 96), uneven_targets(96, 5, 40, length=96)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=2e-3) for m in (ours, theirs)]
    losses = []
    for step in range(20):
        logits = theirs(tokens).logits
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = ours(tokens, targets)
        expected.backward()
        loss.backward()
        if step == 0:
            assert error(ours.logits(tokens), logits) < 1e-5
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
            grads = translate({n: p.grad for n, p in theirs.named_parameters()})
            errors = {n: error(p.grad, grads[n]) for n, p in ours.named_parameters()}
            assert max(errors.values()) < 1e-4, errors
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4), step
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", ["gpt2", "llama3", "mixtral"])
def test_bf16_stays_near_fp32(name):
    """fp32 parameters, gradients, loss and logits around bf16 activations, which some 60 random roundings change."""
    tokens, targets = random_tokens(2, 64), uneven_targets(64, 9, length=64)
    reference, model = make_model(name), make_model(name, torch.bfloat16)
    logits, loss = model.logits(tokens), model(tokens, targets)
    loss.backward()
    assert {logits.dtype, loss.dtype, *(p.grad.dtype for p in model.parameters())} == {torch.float32}
    spread = (logits - reference.logits(tokens)).norm() / reference.logits(tokens).norm()
    assert BF16 / 8 < spread < BF16 * math.sqrt(60)
    assert loss.item() == pytest.approx(reference(tokens, targets).item(), rel=0.01)


@pytest.mark.parametrize("filler", [0, 2])
def test_balancing_loss_is_that_of_transformers(filler):
    """In the gradients and the sums, not in the loss. Rows that only fill up the batch count for nothing."""
    ours, theirs = make_pair("mixtral")
    ours.config = replace(ours.config, router_aux_loss_coef=0.3)
    theirs.router_aux_loss_coef = 0.3
    tokens, targets = random_tokens(2, 40), uneven_targets(40, 7, length=40)
    out = theirs(tokens, output_router_logits=True, labels=tokens)  # labels of its own, only for the auxiliary loss
    logits = out.logits
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (mean + 0.3 * out.aux_loss).backward()
    more = random_tokens(filler, 40, seed=5)
    filled = torch.cat((tokens, more)), torch.cat((targets, torch.full_like(more, -100)))
    loss, details = ours(*filled, details=True)
    assert loss.item() == pytest.approx(47 * mean.item(), rel=1e-5)
    (loss / 47).backward()
    grads = translate({n: p.grad for n, p in theirs.named_parameters()})
    errors = {n: error(p.grad, grads[n]) for n, p in ours.named_parameters()}
    assert max(errors.values()) < 1e-4, errors
    sums = details.router_sums
    assert (sums[2, 0] / 47).item() == pytest.approx(out.aux_loss.item(), rel=1e-5) and sums[3, 0] == 47
    for layer, scores in enumerate(out.router_logits):
        counts = scores.topk(2, -1).indices.flatten().bincount(minlength=4)
        assert sums[layer].tolist() == counts.tolist()
    with torch.no_grad():
        assert ours(*filled, details=True)[1].router_sums is None


def test_an_unknown_kind_of_rope_scaling_is_refused():
    config = replace(BASE, rope_scaling=RopeScaling(factor=4.0, kind="yarn"))
    with pytest.raises(ValueError, match="kind 'yarn'"):
        rope_frequencies(config, torch.device("cpu"))


# ---- the loss head


def make_head(vocab_size: int = 41, dim: int = 16) -> LossHead:
    head = LossHead(replace(BASE, vocab_size=vocab_size, dim=dim))
    with torch.no_grad():
        head.weight.copy_(randn(vocab_size, dim))
    return head


def cross_entropy_fp64(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """-> loss, its gradients by x and by weight, and by the logits, which only exist here."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    logits = x @ weight.T
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss, (x, weight, logits))


MASKS = {"no mask": (15, 15, 15, 15), "uneven": (15, 0, 3, 8), "all masked": (0, 0, 0, 0)}


@pytest.mark.parametrize("rows", [60, 7, 0], ids=lambda rows: f"{rows} rows a chunk")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_rows", [1, 64])
def test_loss_head_is_cross_entropy(monkeypatch, mask, rows, head_rows):
    """head_rows 64: the weight's copy is padded, as on a GPU."""
    head, x = make_head(), randn(4, 15, 16, seed=2).requires_grad_()
    monkeypatch.setattr(source, "HEAD_ROWS", {"cpu": head_rows})
    monkeypatch.setattr(source, "CHUNK_BYTES", rows * 41 * 4)  # 0: less than one row, hence one row a chunk
    targets = uneven_targets(*MASKS[mask], length=15).clamp(max=40)
    loss, dx, dw, _ = cross_entropy_fp64(x, head.weight, targets)
    found, _ = head(x, targets)
    (found * 0.3).backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    assert error(x.grad, 0.3 * dx) < 1e-6
    assert error(head.weight.grad, 0.3 * dw) < 1e-6
    assert x.grad[targets == -100].abs().sum() == 0
    with torch.no_grad():
        assert head(x, targets)[0].item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("rows, head_rows", [(1000, 1), (1, 1), (1000, 64)])
def test_loss_head_in_bf16(monkeypatch, rows, head_rows):
    """The log-sum-exp is fp32: the loss is that of the rounded logits. Gradients are within the bounds of their
    roundings, element by element: if a logit is off by at most d, a probability p is by 2 d p; gradients by logits and
    results are rounded once each. Hundreds of chunks of one sign would show if they were added up in bf16."""
    head, x = make_head(), randn(4, 250, 16, seed=2).abs().bfloat16().requires_grad_()
    monkeypatch.setattr(source, "CHUNK_BYTES", rows * 41 * 2)
    monkeypatch.setattr(source, "HEAD_ROWS", {"cpu": head_rows})
    targets = uneven_targets(250, 0, 50, 130, length=250).clamp(max=3)
    w = head.weight.detach().bfloat16().double()
    _, dx, dw, dlogits = cross_entropy_fp64(x, w, targets)
    logits = x.detach().double() @ w.T
    d = BF16 * logits.abs().max()
    found, _ = head(x, targets)
    found.backward()
    assert (found.dtype, x.grad.dtype, head.weight.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    rounded = (x.detach() @ w.bfloat16().T).double()
    expected = F.cross_entropy(rounded.flatten(0, 1), targets.flatten(), reduction="sum")
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    slack = 2 * BF16 * dlogits.abs() + 2 * d * logits.softmax(-1) * (targets != -100)[..., None]  # [B, T, V]
    assert ((x.grad.double() - dx).abs() <= slack @ w.abs()).all()
    x_abs = x.detach().double().abs().flatten(0, 1)
    assert ((head.weight.grad.double() - dw).abs() <= slack.flatten(0, 1).T @ x_abs).all()


def test_peak_memory_does_not_hold_the_logits():
    """4096 tokens x 65536 words: the fp32 logits alone would be 1024 MiB (tied, of half the tokens: 512). What it is
    compared with is less than a chunk."""
    code = """
import torch
from model import ModelConfig, Transformer
from test_shard import peak_rss

def peak(vocab_size, rows, tied):
    shape = dict(dim=16, n_layers=1, n_heads=4, ffn_dim=16, max_seq_len=256)
    model = Transformer(ModelConfig(vocab_size=vocab_size, tied=tied, **shape))
    tokens = torch.zeros(rows, 256, dtype=torch.long)
    model(tokens, tokens).backward()
    return peak_rss() / 2**20

peak_rss(reset=True)
small = peak(8192, 8, False)
print(max(peak(65536, 16, False), peak(65536, 8, True)) - small)
"""
    done = run_code(code, ["peak"])
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 256


# ---- documents, causality, cache

LENGTHS = [(10, 23, 1, 14), (31, 17), (48,)]  # of the documents in each row


def document_positions() -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name, dtype", [("gpt2", torch.float32), ("llama3", torch.float32), ("llama3", torch.bfloat16),
                                         ("mixtral", torch.float32)])  # fmt: skip
def test_documents_do_not_see_each_other(monkeypatch, name, dtype, backend):
    """Another document's tokens change no bit of the logits (experts: rounding, for rows are grouped differently), and
    packed or alone, a document has the same logits and losses."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    model, tokens, positions = make_model(name, dtype, backend), random_tokens(3, 48), document_positions()
    packed = model.logits(tokens, positions)
    for row, lengths in enumerate(LENGTHS):
        for document, length in enumerate(lengths):
            a = sum(lengths[:document])
            inside = torch.zeros(3, 48, dtype=torch.bool)
            inside[row, a : a + length] = True
            changed = torch.where(inside, (tokens + 1) % BASE.vocab_size, tokens)
            after = model.logits(changed, positions)
            assert (after[inside] != packed[inside]).any(-1).all()
            if name == "mixtral":
                assert error(after[~inside], packed[~inside]) < 1e-5
            else:
                assert torch.equal(after[~inside], packed[~inside])
            if dtype == torch.float32:
                assert error(model.logits(tokens[row : row + 1, a : a + length])[0], packed[inside]) < 1e-5
    targets = uneven_targets(48, 20, 31, length=48)
    expected = F.cross_entropy(packed.flatten(0, 1), targets.flatten(), reduction="sum")
    assert model(tokens, targets, positions).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gpt2", "llama3", "mixtral"])
def test_causality(monkeypatch, name, backend):
    """Changing token t changes no bit of the logits before t (experts: rounding), and all from t on."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    model, tokens = make_model(name, backend=backend), random_tokens(2, 40)
    before = model.logits(tokens)
    for t in (0, 1, 15, 16, 27, 39):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % BASE.vocab_size
        after = model.logits(changed)
        assert (after[:, t:] != before[:, t:]).any(-1).all()
        if name != "mixtral":
            assert torch.equal(after[:, :t], before[:, :t])
        elif t:
            assert error(after[:, :t], before[:, :t]) < 1e-5


# ---- initialisation


def test_init_of_any_slice(monkeypatch):
    """Whatever part a rank asks for, it gets those values of the whole; parameters span several chunks."""
    monkeypatch.setattr(source, "INIT_CHUNK", 100)
    shapes = {"a": (13, 7, 5), "b": (31, 17), "c": (331,), "small": (3, 2)}
    read = random_init(BASE, shapes, 0)
    g = seeded()
    for name, shape in shapes.items():
        whole = read(name, tuple(slice(0, n) for n in shape))
        assert whole.shape == shape and len(whole.unique()) == whole.numel()
        for _ in range(50):
            ends = [torch.randint(0, n + 1, (2,), generator=g).sort().values.tolist() for n in shape]
            slices = tuple(slice(a, b) for a, b in ends)
            assert torch.equal(read(name, slices), whole[slices]), slices


def test_init_depends_on_seed_and_name_only():
    shapes = {"a": (50, 40), "b": (50, 40)}
    everything = (slice(0, 50), slice(0, 40))
    a = random_init(BASE, shapes, 0)("a", everything)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert torch.equal(random_init(BASE, {"a": (50, 40)}, 0)("a", everything), a)
    assert torch.equal(torch.get_rng_state(), state)
    for other in (random_init(BASE, shapes, 1)("a", everything), random_init(BASE, shapes, 0)("b", everything)):
        assert torch.corrcoef(torch.stack((a.flatten(), other.flatten())))[0, 1].abs() < 5 / math.sqrt(2000)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-mixtral", "tiny-qwen2.5", "tiny-qwen3"])
def test_init_statistics(name):
    """Norm weights are ones, biases zeros, the rest normal; what writes to the residual stream 1 / sqrt(2 L) of it."""
    config = replace(MODELS[name], n_layers=3, init_std=0.03)
    model = Transformer(config)
    fill_parameters(model, random_init(config, {n: tuple(p.shape) for n, p in model.named_parameters()}, 0))
    residual = re.compile(r"layers\.\d\.(self_attn\.o_proj(\.weight)?|mlp\.down_proj(\.weight)?)$")
    assert sum(bool(residual.match(n)) for n, _ in model.named_parameters()) == 2 * 3
    for n, p in model.named_parameters():
        if n.endswith("norm.weight") or n.endswith("bias"):
            assert (p == float(n.endswith("weight"))).all(), n
        else:
            std, count = 0.03 / math.sqrt(6) if residual.match(n) else 0.03, p.numel()
            assert abs(p.mean()) < 5 * std / math.sqrt(count), n
            assert p.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * count)), n
            assert (p.abs() < std).float().mean().item() == pytest.approx(0.6827, abs=5 * 0.47 / math.sqrt(count)), n


@pytest.mark.parametrize(
    "name", ["tiny-gpt2", "tiny-llama", "tiny-llama3.2", "tiny-mixtral", "tiny-qwen2.5", "tiny-qwen3"]
)
def test_meta_model_is_filled_everywhere(name):
    """Nothing is left as `to_empty` left it, and a tied head is the embedding again."""
    with torch.device("meta"):
        model = Transformer(MODELS[name])
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().fill_(float("nan"))
    model.tie_weights()
    fill_parameters(model, random_init(MODELS[name], {n: tuple(p.shape) for n, p in model.named_parameters()}, 0))
    assert not any(t.isnan().any() for t in [*model.parameters(), *model.buffers()])
    assert (model.lm_head.weight is model.embed_tokens.weight) == MODELS[name].tied
    tokens, targets = random_tokens(2, 32), random_tokens(2, 32, seed=1)
    assert model(tokens, targets).item() == pytest.approx(64 * math.log(258), rel=0.1)


# ---- experts


@pytest.mark.parametrize("counts", [(5, 0, 8, 3), (0, 16, 0, 0), (1, 2, 3, 0)], ids=str)
@pytest.mark.parametrize("dtype, dim", [(torch.bfloat16, 16), (torch.bfloat16, 12), (torch.float32, 16)], ids=str)
def test_grouped_matmul_is_a_loop(monkeypatch, dtype, dim, counts):
    """With gradients, and experts without tokens; the grouped kernel where it can run."""
    calls, kernel = [], F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    x, weight = randn(sum(counts), dim).to(dtype), randn(4, 24, dim, seed=1)
    gradient = randn(sum(counts), 24, seed=2).to(dtype)
    x.requires_grad_(), weight.requires_grad_()
    ends = torch.tensor(counts).cumsum(0).int()
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


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 8 * BF16)], ids=str)
def test_experts_token_by_token(dtype, bound):
    """Outputs and gradients as from each token's own two experts; no token chooses the last one."""
    moe = scramble(MoE(replace(FAMILY["mixtral"], dim=16, ffn_dim=24)))
    with torch.no_grad():
        moe.gate.weight.copy_((10 * moe.gate.weight).bfloat16())  # clear choices, the same in both dtypes
        moe.gate.weight[3] = torch.tensor([-50.0] + [0.0] * 15)
    x = randn(2, 9, 16, seed=3).bfloat16().to(dtype)
    x[..., 0] = 1.0

    parameters = {n: p.detach().to(dtype).double().requires_grad_() for n, p in moe.named_parameters()}
    rows, inputs = [], x.double().requires_grad_()
    for token in inputs.flatten(0, 1):
        p = (parameters["gate.weight"] @ token).softmax(0)
        best = sorted(range(4), key=lambda e: -p[e].item())[:2]
        row = 0.0
        for e in best:
            gate, up = (parameters["gate_up_proj"][e] @ token).split(24)
            row = row + p[e] / (p[best[0]] + p[best[1]]) * (parameters["down_proj"][e] @ (gate * gate.sigmoid() * up))
        rows.append(row)
        assert 3 not in best
    expected = torch.stack(rows).view_as(x)
    gradient = randn(2, 9, 16, seed=4).bfloat16()
    expected.backward(gradient.double())

    x.requires_grad_()
    found, _ = moe(x)
    found.backward(gradient.to(dtype))
    assert error(found, expected) < bound and error(x.grad, inputs.grad) < bound
    for n, p in moe.named_parameters():
        assert error(p.grad, parameters[n].grad) < bound, n
    assert moe.down_proj.grad[3].abs().sum() == moe.gate_up_proj.grad[3].abs().sum() == 0


# ---- FLOPs


@pytest.mark.parametrize("name", FAMILY)
def test_flops_are_those_that_torch_counts(name):
    """One block of queries computes the full square of attention, of which the causal half is ours to count."""
    model, tokens, T = make_model(name, backend="blocked"), random_tokens(2, 64), 64
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    products = 6 * source.matmul_params(FAMILY[name])
    attention_flops = source.flops_per_token(FAMILY[name], T) - products
    assert counter.get_total_flops() == 2 * T * (products + 2 * attention_flops)
