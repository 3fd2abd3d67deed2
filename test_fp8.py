"""fp8.py. Oracles: fp64 products, bf16 layers for errors and saved memory, torch's meta functions for CUDA's rules, one
process for several, the uncompiled code for the compiled."""

import itertools
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8
from base.errors import UserError, exit_status
from fp8 import E4M3, RECIPES, WeightScales, convert_linears
from model import MODELS, Linear, MoE, SwiGluMLP, Transformer, grouped_matmul
from shard import checkpoint_activations
from test_shard import fill, run_ranks
from test_train import records, train, values
from train import main as train_main

BF16 = torch.bfloat16
KINDS, FIGURES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), ("saturated", "flushed", "error")
WAYS = [("tensor", "e5m2"), ("tensor", "e4m3"), ("row", "e4m3"), ("row_gw_hp", "e4m3")]
ways = pytest.mark.parametrize("recipe, grad_dtype", WAYS)
recipes = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def randn(*shape, seed=0, device="cpu", dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def run(layer, x, g):
    """-> y, dx, dW of a layer."""
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad.to(x.dtype)


def make_layer(weight, recipe, grad_dtype="e5m2"):
    layer = Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
    layer.weight.data.copy_(weight)
    convert_linears(layer, recipe, grad_dtype, small=True)
    return layer


def error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def build(name, recipe="tensor", convert=True):
    model = Transformer(MODELS[name], BF16)
    if convert:
        convert_linears(model, recipe, small=True)
    return fill(model)


def tokens(rows=2, length=32):
    return torch.randint(0, 258, (rows, length), generator=torch.Generator().manual_seed(3))


# ---- numbers


def products(x, w, g):
    """y, dx and dW in fp64."""
    x, w, g = x.double(), w.double(), g.double()
    return x @ w.T, g @ w, g.T @ x


@ways
def test_integers_are_exact(recipe, grad_dtype, device):
    """Products of small integers have no rounding error but the last one, to bf16. 448 / 7 is a power of two; those of
    rows need none, for their scales are rounded to one."""
    generator, top = torch.Generator().manual_seed(4), 7 if recipe == "tensor" else 5
    ints = [torch.randint(-top, top + 1, shape, generator=generator) for shape in ((64, 96), (48, 96), (64, 48))]
    for i in ints:
        i[0, :], i[:, 0] = top, top  # every row's and column's amax
    x, w, g = (i.to(device, BF16) for i in ints)
    for found, expected in zip(run(make_layer(w, recipe, grad_dtype), x, g), products(*ints), strict=True):
        assert torch.equal(found.cpu(), expected.to(BF16))


@ways
def test_errors_are_those_of_fp8(recipe, grad_dtype, device):
    """Neither too large nor those of a silent bf16. A GPU sums in another order, and faster."""
    x, w, g = (randn(*shape, seed=seed) for seed, shape in enumerate([(256, 384), (320, 384), (256, 320)]))
    cpu = run(make_layer(w, recipe, grad_dtype), x, g)
    y, dx, dw = map(error, cpu, products(x, w, g))
    small, large = (0.05, 0.07) if grad_dtype == "e5m2" else (0.02, 0.045)
    assert 0.02 < y < 0.045 and small < dx < large
    assert dw < 0.004 if recipe == "row_gw_hp" else 0.02 < dw < large
    if device == "cuda":
        gpu = run(make_layer(w.cuda(), recipe, grad_dtype), x.cuda(), g.cuda())
        assert max(error(a.cpu(), b) for a, b in zip(gpu, cpu, strict=True)) < 2e-3


@ways
def test_what_is_not_finite_stays_so_and_zeros_stay_zero(recipe, grad_dtype, device):
    x, w, g = randn(32, 64, device=device), randn(48, 64, seed=1, device=device), randn(32, 48, seed=2, device=device)
    layer = make_layer(w, recipe, grad_dtype)
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoiled_x, spoiled_g = x.clone(), g.clone()
        spoiled_x[3, 5] = spoiled_g[3, 5] = bad
        y, _, dw = run(layer, spoiled_x, g)
        assert not y[3].isfinite().any() and not dw[:, 5].isfinite().any()
        assert recipe == "tensor" or y[4:].isfinite().all()  # a row of its own
        y, dx, dw = run(layer, x, spoiled_g)
        assert not dx[3].isfinite().any() and not dw[5].isfinite().any() and y.isfinite().all()
    for zero in (run(layer, x * 0, g)[0], run(layer, x, g * 0)[1], run(make_layer(w * 0, recipe), x, g)[0]):
        assert (zero == 0).all()
    y = run(layer, x * 2.0**-95, g)[0]  # tiny, not zero
    assert 0.02 < error(y.double() * 2.0**95, x.double() @ w.double().T) < 0.045


# ---- CUDA's rules, without a GPU


def cuda_like(t):
    return None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")


@recipes
def test_every_product_obeys_cuda(recipe, monkeypatch):
    """Each call of a model's forward and backward again on fake CUDA tensors, whose meta function knows the rules."""
    plain, calls, one = fp8.scaled_mm, [], torch.ones(())

    def shadowed(a, b, scale_a, scale_b, dtype, fast):
        with FakeTensorMode(allow_non_fake_inputs=True):
            calls.append(plain(*map(cuda_like, (a, b, scale_a, scale_b)), dtype, fast).dtype)
        return plain(a, b, scale_a, scale_b, dtype, fast)

    monkeypatch.setattr(fp8, "scaled_mm", shadowed)
    for name in ("tiny-llama", "tiny-gpt2"):
        calls.clear()
        model = build(name, recipe)
        model(tokens(), tokens()).backward()
        assert calls == [BF16] * 2 * 4 * (2 if recipe == "row_gw_hp" else 3)
    with pytest.raises(RuntimeError, match="major"), FakeTensorMode():
        plain(*map(cuda_like, (torch.zeros(32, 64, dtype=E4M3), torch.zeros(64, 48, dtype=E4M3), one, one)), BF16, True)


# ---- experts


def expert_inputs(device="cpu", dtype=BF16):
    x, w, g = randn(50, 64, dtype=dtype), randn(4, 96, 64, seed=1, dtype=dtype), randn(50, 96, seed=2, dtype=dtype)
    return x.to(device), w.to(device), g.to(device), torch.tensor([20, 20, 33, 50], dtype=torch.int32, device=device)


def run_experts(function, x, w, ends, g):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = function(x, w, ends)
    y.backward(g)
    return y.detach(), x.grad, w.grad


def test_experts_multiply_like_layers_of_their_own(device):
    """Of which one has no tokens, and none a multiple of 16; the weight gradient is bf16's."""
    x, w, g, ends = expert_inputs(device)
    y, dx, dw = run_experts(fp8._Experts.apply, x, w, ends, g)
    close = dict(rtol=2**-7, atol=1e-2) if device == "cuda" else dict(rtol=0, atol=0)
    for e, (start, stop) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if start == stop:
            assert (dw[e] == 0).all()
            continue
        *own, own_dw = run(make_layer(w[e], "row_gw_hp"), x[start:stop], g[start:stop])
        torch.testing.assert_close([y[start:stop], dx[start:stop]], own, **close)
        torch.testing.assert_close(dw[e], own_dw, rtol=2**-7, atol=1e-2)
    bf16 = run_experts(grouped_matmul, x, w, ends, g)
    assert 0.02 < error(y, bf16[0]) < 0.05 and 0.02 < error(dx, bf16[1]) < 0.05 and error(dw, bf16[2]) < 0.004
    x, w, g, ends = (t.to("meta") for t in expert_inputs())  # whose function has the rules of the grouped kernel
    y, dx, dw = run_experts(fp8._Experts.apply, x, w.float(), ends, g)
    assert (y.shape, dx.shape, dw.shape, dw.dtype) == (g.shape, x.shape, w.shape, torch.float32)


# ---- conversion


def on_meta(name, recipe, **options):
    with torch.device("meta"):
        model = Transformer(MODELS[name])
    return {n: v for n, _, v in convert_linears(model, recipe, **options)}, model


def test_what_is_converted():
    rows, model = on_meta("llama3-8b", "tensor")
    assert len(rows) == 4 * 32 + 1 and rows.pop("lm_head").startswith("bf16") and set(rows.values()) == {"fp8"}
    assert sum(isinstance(m, Linear) for m in model.modules()) == 128  # still what they were
    rows, _ = on_meta("llama3.2-1b", "row")  # o_proj and down_proj have 2048 outputs
    assert {n.split(".")[-1] for n, v in rows.items() if v == "fp8"} == {"qkv_proj", "gate_up_proj"}
    assert rows["layers.0.mlp.down_proj"] == "bf16: too small to become faster"
    rows, _ = on_meta("mixtral-8x7b", "tensor", skip=["layers.3", "mlp.down_proj"])
    skipped = ("layers.0.mlp.gate", "layers.3.self_attn.qkv_proj", "layers.4.mlp.gate_up_proj")  # experts go together
    assert {rows[name] for name in skipped} == {"bf16: skipped by name"}
    rows, model = on_meta("mixtral-8x7b", "tensor")
    assert rows["layers.0.mlp.gate_up_proj"] == "fp8" and isinstance(model.layers[0].mlp, MoE)
    others = nn.ModuleDict({"embed": nn.Embedding(32, 16), "odd": nn.Linear(16, 24)})
    assert convert_linears(others) == [("odd", (24, 16), "bf16: 24 and 16 must divide by 16")]


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("tiny-")])
def test_weights_and_evaluation_know_nothing_of_fp8(name):
    plain, model = build(name, convert=False), build(name)
    assert list(plain.state_dict()) == list(model.state_dict()) and not list(model.buffers())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    WeightScales(model, None, False, True, False).refresh()
    assert list(plain.state_dict()) == list(model.state_dict())
    assert not torch.equal(plain(tokens(), tokens()), model(tokens(), tokens()))
    plain.eval(), model.eval()
    assert torch.equal(plain.logits(tokens()), model.logits(tokens()))


# ---- once per step


@pytest.mark.parametrize("ranks", [2, 3])  # three share 64, 128 and 352 rows unevenly
def test_gathered_in_fp8_equals_gathered_in_bf16(ranks):
    code = """
import contextlib, functools, train, types
from test_parity import Cell, real_steps
ranks, step, evaluated = init_ranks(), train.train_step, []
run = types.SimpleNamespace(ranks=ranks, phase=lambda name: contextlib.nullcontext())
def step_and_evaluate(model, optimizer, batches, *args):
    result = step(model, optimizer, batches, *args)
    evaluated.append(train.evaluate(model, [batches], run)["val_loss"])
    run.layer = model.layers[0].mlp.down_proj
    return result
train.train_step = step_and_evaluate
torch.compile = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
size = ranks.world_size
cell = Cell(ranks=size, n_layers=1, micro_batch=2, accumulate=2, dtype="bf16", fp8="tensor")
def values(gather, **changes):
    evaluated.clear()
    steps = real_steps(replace(cell, fp8_all_gather=gather, **changes), ranks)
    return [*(t for step in steps for t in step), torch.tensor(evaluated)]
ways = [{"compile": "block", "checkpointing": "selective"}, {"checkpointing": "block"}]
for changes in ways if size == 2 else [{}]:
    whole, half = (values(gather, **changes) for gather in (False, True))  # both compiled, or neither
    assert all(torch.equal(a, b) for a, b in zip(half, whole, strict=True)), changes
assert run.layer.fp8_weight.untyped_storage().size() == 0 and run.layer.fp8_local.shape == (-(-64 // size), 176)
"""
    run_ranks(ranks, code)


# ---- the compiler


def make_mlp(recipe=None, device="cpu", dtype=torch.float32):
    with torch.device(device):
        mlp = SwiGluMLP(replace(MODELS["tiny-llama"], dim=128, ffn_dim=256)).to(dtype)
    with torch.no_grad():
        for i, p in enumerate(mlp.parameters()):
            p.copy_(randn(*p.shape, seed=i) * 0.1)
    if recipe:
        convert_linears(mlp, recipe, small=True)
    return mlp


@pytest.mark.parametrize("recipe", ["tensor", *(pytest.param(r, marks=pytest.mark.slow) for r in RECIPES[1:])])
@torch._inductor.config.patch(emulate_precision_casts=True)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_layers_compiled_or_quantized_once_per_step_give_the_same_bits(recipe, device):
    """With emulated casts, as one graph, compiled once in three steps of two micro-batches. Until torch 2.13 the
    kernels generated for a CPU do not emulate them; the graph then runs operator by operator."""
    rounds = device == "cuda" or torch.__version__ >= "2.13"
    backend = "inductor" if rounds else "aot_eager_decomp_partition"
    torch._dynamo.reset()
    counters.clear()
    outputs = []
    for once, reuse, compiled in ((False, False, False), (True, False, False), (True, True, False), (True, True, True)):
        mlp = make_mlp(recipe, device)
        optimizer = torch.optim.SGD(mlp.parameters(), 0.01)
        mlp.dtype = BF16
        scales = WeightScales(mlp, None, False, reuse, False) if once else SimpleNamespace(refresh=int)
        assert (mlp.down_proj.fp8_weight is not None) == (reuse and recipe == "tensor")
        if compiled:
            mlp.compile(dynamic=False, fullgraph=True, backend=backend)
        outputs.append([])
        for step in range(3):
            scales.refresh()
            for seed in (9 + step, 19):
                x = randn(64, 128, seed=seed, device=device).requires_grad_()
                y = mlp(x)
                y.backward(randn(64, 128, seed=29, device=device))
                outputs[-1] += [y.detach(), x.grad, *(p.grad.clone() for p in mlp.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1
    for other in outputs[1:]:
        for a, b in zip(outputs[0], other, strict=True):
            assert torch.equal(a, b), error(b, a)


def bytes_kept(recipe: str | None) -> int:
    """For the backward pass of an MLP, without its parameters. None: in bf16."""
    saved, mlp = {}, make_mlp(recipe, dtype=BF16)
    torch._dynamo.reset()
    mlp.compile(dynamic=False, fullgraph=True, backend="aot_eager_decomp_partition")

    def keep(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        mlp(randn(512, 128).requires_grad_()).sum()
    parameters = {p.untyped_storage().data_ptr() for p in mlp.parameters()}
    return sum(size for place, size in saved.items() if place not in parameters)


@recipes
def test_no_more_is_kept_for_the_backward_pass_than_in_bf16(recipe):
    """Under the partitioner that the compiler uses (weights as FSDP gathers them)."""
    assert 0 < bytes_kept(recipe) <= bytes_kept(None)


def test_figures():
    x = torch.tensor([448.0, -448.0, 3.0, 2.0**-12, 0.0, 17.0, 1.0, 1.0])  # 17 lies between 16 and 18
    error = math.sqrt((1 + 2.0**-24) / x.square().sum().item())
    assert fp8.figures(x, *fp8.to_fp8(x, E4M3)).tolist() == pytest.approx([2 / 8, 1 / 8, error, 1])


@recipes
def test_watched_layers_say_how_they_round(recipe):
    """Figures of each kind in the middle block, over two micro-batches, with checkpointing, which recomputes. Hooks on
    a layer see the same operands."""
    model, seen = build("tiny-llama", convert=False), []
    fp8.convert_model(model, recipe, (), torch.device("cpu"))
    scales = WeightScales(model, None, False, True, False)
    layer = model.layers[1].mlp.down_proj
    layer.register_full_backward_hook(lambda m, gx, gy: seen.append(gy[0].flatten(0, 1)))
    checkpoint_activations(model, "block")
    for length in (16, 32):  # the second time starts afresh
        scales.refresh()
        seen.clear()
        for rows in tokens(4, length).chunk(2):
            model(rows, rows).backward()
        found = fp8.watched(model)
    assert found.keys() == {f"fp8/{kind}/{o}_{f}" for kind in KINDS for o in "xg" for f in FIGURES}
    dtype, dim = (fp8.E5M2, None) if recipe == "tensor" else (E4M3, 1)
    *expected, _ = sum(fp8.figures(g, *fp8.to_fp8(g, dtype, dim)) for g in seen) / len(seen)
    assert [found[f"fp8/down_proj/g_{f}"] for f in FIGURES] == pytest.approx(torch.stack(expected).tolist())
    for kind in KINDS:
        assert 0.02 < found[f"fp8/{kind}/x_error"] < 0.04 and 0 < found[f"fp8/{kind}/x_saturated"] < 0.1
        assert (0.04 if recipe == "tensor" else 0.02) < found[f"fp8/{kind}/g_error"] < 0.08


# ---- the command line


def test_runs_are_recorded_and_resumed(tmp_path, text):
    """Resumed equals uninterrupted bit for bit; figures at saves."""
    flags = ["--data", text, "--compile", "none", "--seq_len", 32, "--micro_batch", 2, "--batch_tokens", 128]
    flags += ["--fp8", "1", "--log_every", 1, "--eval_every", 0, "--schedule", "constant"]
    for out, steps in (("parts", 2), ("parts", 4), ("whole", 4)):
        how = ["--steps", steps, "--out", tmp_path / out]
        train(*flags, *how, env={"CUDA_VISIBLE_DEVICES": ""})
    assert values(tmp_path / "whole") == values(tmp_path / "parts")
    assert [r["step"] for r in records(tmp_path / "whole") if "fp8/down_proj/g_error" in r] == [4]


@pytest.mark.parametrize("flags, message", [
    ("--fp8=1 --seq_len 50 --micro_batch 3", "the 150 tokens of a rank must divide by 16: change --seq_len"),
    ("--fp8 row --dim 72", "no layer would be in FP8 .*144 and 72 must divide by 16"),
    ("--fp8 tensor --fp8_skip o_proj proj", "--fp8_skip: no layer is called proj"),  # parts are whole
])  # fmt: skip
def test_flags_are_refused(flags, message, tmp_path, capsys):
    for check in ([], ["--check"]):
        assert exit_status(train_main, [*flags.split(), *check, "--out", str(tmp_path / "run")]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_gpus_without_fp8_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (8, 0))
    with pytest.raises(UserError, match="this GPU has no FP8"):
        fp8.check_run("tensor", 2048, torch.device("cuda"), "bf16")
