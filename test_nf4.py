"""nf4.py and --quantize nf4. Oracles: the nearest level by brute force, bitsandbytes where it is installed, the same
model with the dequantized weights, one process, and an uninterrupted run."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.autograd.graph import saved_tensors_hooks

import nf4
from base.ranks import ALONE, gather, init_ranks
from hf import lora
from hf.weights import export, export_model, load_model, open_adapter, open_weights
from inputs import settled_args
from model import MODELS, Linear, Transformer, random_init
from shard import fill_parameters, set_dtypes
from test_shard import fill, run_ranks
from test_train import FAST, train, values

TOKENS = torch.randint(0, 258, (2, 32), generator=torch.Generator().manual_seed(0))
BASE = replace(MODELS["tiny-llama"], ffn_dim=192)


def dequantized(weight: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    levels = torch.tensor(nf4.LEVELS)
    return nf4.dequantize(*nf4.to_nf4(weight), torch.cartesian_prod(levels, levels), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "zeros", "constant", "negative"])
def test_each_value_becomes_the_nearest_level(kind, dtype):
    """Of normal values at most the half of the widest gap is lost, and 0.7 % of the power."""
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
    weight = {"heavy tails": weight**5, "zeros": 0 * weight}.get(kind, 0.02 * weight)
    weight = {"constant": weight.abs().mean(), "negative": -weight.abs().mean()}.get(kind, weight) * torch.ones(96, 256)
    weight = weight.to(dtype)
    codes, scales = nf4.to_nf4(weight)
    blocks = weight.double().view(96, 4, 64)
    amax = blocks.abs().amax(2, keepdim=True)
    levels = torch.tensor(nf4.LEVELS, dtype=torch.float64)
    distance = (blocks[..., None] - levels * amax[..., None]).abs().amin(-1)
    assert torch.equal(scales, amax[..., 0].float())
    loss = (dequantized(weight).double().view_as(blocks) - blocks).abs()
    assert torch.allclose(loss, distance, rtol=1e-5, atol=1e-7 * amax.max().item())
    if kind == "normal":
        assert (loss <= 0.1521 * amax).all() and 0.004 < loss.square().sum() / blocks.square().sum() < 0.009
    elif kind != "heavy tails":
        assert not loss.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_those_of_bitsandbytes(dtype):
    functional = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(256, 512).pow(3).to(dtype)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    assert torch.equal(codes.view(256, 256), nf4.to_nf4(weight)[0])
    assert torch.equal(functional.dequantize_4bit(codes, state), dequantized(weight, dtype))


def test_the_first_value_is_in_the_upper_half_of_a_byte():
    codes, _ = nf4.to_nf4(torch.tensor([[1.0, -1.0, 0.0, 0.08] + 60 * [0.0]]))
    assert codes[0, :3].tolist() == [0xF0, 0x78, 0x77]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_damaged_value_damages_its_block(value):
    weight = torch.ones(2, 128)
    weight[1, 70] = value
    assert dequantized(weight).isfinite().view(2, 2, 64).sum(2).tolist() == [[64, 64], [64, 0]]


def test_a_compiled_layer_saves_no_weight():
    """The compiler would save the first dequantization, if the second was the same computation."""
    layer = Linear(256, 128)
    nf4.convert_linear(layer)
    shapes = set()
    step = torch.compile(layer, backend="aot_eager_decomp_partition")
    with saved_tensors_hooks(lambda t: shapes.add((*t.shape,)) or t, lambda t: t):
        step(torch.zeros(8, 256, requires_grad=True)).sum().backward()
    assert shapes and (128, 256) not in shapes and (256, 128) not in shapes


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "base"
    export_model(fill(Transformer(BASE)), folder)
    return folder


def test_adapters_have_the_gradients_of_the_dequantized_model(base):
    """Also where a layer has no adapter."""
    read, grads = open_weights(base, BASE), []
    for quantize in "nf4", "none":
        flags = f"--weights {base} --lora 3 --lora_targets q,v,up --quantize {quantize}"
        model = Transformer(BASE, torch.bfloat16)
        lora.add_adapters(model, settled_args(flags.split()))
        set_dtypes(model, torch.float32)
        adapters = random_init(BASE, {n: tuple(p.shape) for n, p in model.named_parameters()}, 3)
        fill_parameters(model, lora.join(read, adapters))
        for name, p in model.named_parameters():
            if quantize == "none" and "proj.weight" in name:
                p.data = dequantized(read(name, (slice(None), slice(None))), torch.bfloat16)
        model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        assert len(nf4.four_bit_layers(model)) == 8 * (quantize == "nf4") and len(grads[-1]) == 8
    assert all(torch.equal(grads[0][name], grads[1][name]) and grads[0][name].any() for name in grads[0])


@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-granite", "tiny-arcee", "tiny-ministral3"])
def test_a_quantized_model_with_adapters_has_transformers_logits(tmp_path, name):
    """Of the dequantized weights with merged adapters, beyond two windows."""
    shape = replace(MODELS[name], ffn_dim=192)
    export_model(fill(Transformer(shape)), tmp_path / "base")
    words = f"--weights {tmp_path}/base --lora 3 --lora_targets all --quantize nf4"
    config, model = settled_args(words.split()), Transformer(shape)
    lora.add_adapters(model, config)
    read = open_weights(tmp_path / "base", shape)
    adapters = random_init(shape, {n: tuple(p.shape) for n, p in model.named_parameters()}, 3)
    fill_parameters(model, lora.join(read, adapters))

    def restored(name, slices):
        values = read(name, tuple(slice(None) for _ in slices))
        return (dequantized(values) if "proj.weight" in name else values)[slices]

    export(shape, lora.merge(restored, adapters, config), tmp_path / "merged", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(TOKENS).logits
    assert torch.allclose(model.logits(TOKENS), theirs, rtol=0, atol=1e-4)


def quantize_in_turn() -> None:
    ranks, values, names = init_ranks(), torch.Generator().manual_seed(0), []
    weights = {name: torch.randn(p.shape, generator=values) for name, p in Transformer(BASE).named_parameters()}
    config, buffers = settled_args(["--model=tiny-llama", "--ffn_dim=192", "--lora=2", "--quantize=nf4"]), []

    def read(name, slices):
        names.append(name)
        return weights.get(name, torch.zeros(999, 999))[slices]

    for among in ALONE, ranks:
        model, names = Transformer(BASE), []
        lora.add_adapters(model, config)
        fill_parameters(model, read, "direct", among)
        buffers.append(dict(model.named_buffers()))
    assert all(torch.equal(buffers[0][name], values) for name, values in buffers[1].items()) and buffers[0]
    read_by_each = gather([name for name in names if "proj.weight" in name], ranks)
    assert sorted(sum(read_by_each, [])) == sorted(name for name in weights if "proj.weight" in name), read_by_each
    assert max(map(len, read_by_each)) - min(map(len, read_by_each)) <= 1


def test_each_weight_is_read_and_quantized_by_one_rank():
    run_ranks(3, quantize_in_turn)


def test_runs_agree_on_any_ranks_and_resume_bit_equal(base, tmp_path, text):
    """Rank 0 of two reads the weights and sends them quantized; four continue, and read them."""
    flags = [*FAST, "--weights", base, "--data", text, "--lora", 4, "--quantize", "nf4", "--lora_targets", "all"]
    flags += ["--lr", "1e-2", "--schedule", "constant", "--save_every", 2, "--log_every", 1, "--eval_every", 0]
    flags += ["--micro_batch", 2, "--batch_tokens", 512, "--tokenizer", "bytes"]
    train(*flags, "--steps", 4, "--out", tmp_path / "whole")
    train(*flags, "--steps", 2, "--out", tmp_path / "parts", "--load", "rank0", ranks=2)
    shutil.copytree(tmp_path / "parts", tmp_path / "resumed")
    train(*flags, "--steps", 4, "--out", tmp_path / "parts", ranks=4)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/step-00000004")
    done = train(*flags, "--steps", 4, "--out", tmp_path / "again")
    for step, (loss, norm, _) in values(tmp_path / "whole").items():
        assert values(tmp_path / "parts")[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5), None)
    stored = "checkpoints/step-00000004/rank-00000.safetensors"
    whole, again = (load_file(tmp_path / run / stored) for run in ("whole", "again"))
    assert "Resumed from" in done.stderr + done.stdout and all(torch.equal(whole[k], again[k]) for k in again)
    assert whole.keys() == again.keys() and all(".lora_" in name for name in whole)
    config = settled_args([*map(str, flags), "--steps", "4"])
    model = Transformer(BASE)
    read = open_adapter(tmp_path / "whole/adapter", config)
    fill_parameters(model, lora.merge(open_weights(base, BASE), read, config))
    assert torch.allclose(load_model(tmp_path / "whole/hf").logits(TOKENS), model.logits(TOKENS), atol=1e-5)
