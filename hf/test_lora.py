"""hf/lora.py and its folders. Oracles: PEFT on transformers' models, the merged model, and an uninterrupted run.
test_parity.py tests sharding, compilation, checkpointing and packing."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import checkpoint
import shard
from base.errors import UserError
from hf import lora
from hf.weights import export_adapter, export_model, load_model, open_adapter, open_trained, open_weights
from inputs import settle_model, settled_args
from model import MODELS, Transformer, random_init
from optim import trainable_parameters
from test_model import error
from test_shard import fill
from test_train import FAST, train, values

CASES = [
    ("tiny-llama", "q,k,v,o,gate,up,down"), ("tiny-llama", "k,up"), ("tiny-llama3.2", "gate,o"),
    ("tiny-qwen2.5", "k,v,down"), ("tiny-mixtral", "q,k,v,o"), ("tiny-phi3", "qkv,gate_up,down"),
    ("tiny-olmo3", "k,down"), ("tiny-qwen3-moe", "k,o"), ("tiny-gemma3", "q,k,v,o,gate,down"),
    ("tiny-granite", "q,k,v,o,gate,up,down"), ("tiny-arcee", "k,up,down"), ("tiny-ministral3", "q,up"),
]  # fmt: skip
TOKENS = torch.randint(0, 258, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of random weights by the model's name."""
    folders = {}
    for name, _ in CASES:
        folders[name] = tmp_path_factory.mktemp("bases") / name
        export_model(fill(Transformer(MODELS[name])), folders[name])
    return folders


def configure(base, targets: str, *flags: str):
    return settled_args(["--weights", str(base), "--lora", "3", "--lora_targets", targets, "--dtype", "fp32", *flags])


def make(config, adapters=None) -> Transformer:
    """The model of a run. adapters: reads their values; None for random values without zeros."""
    model = Transformer(config.model_config)
    lora.add_adapters(model, config)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    adapters = adapters or random_init(config.model_config, shapes, 3)
    shard.fill_parameters(model, lora.join(open_weights(Path(config.weights), config.model_config), adapters))
    return model


def reader(model: Transformer):
    return lambda name, slices: model.get_parameter(name).detach()[slices]


def peft_model(base, adapter=None):
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft, peft.PeftModel.from_pretrained(model, adapter, is_trainable=True) if adapter else model


def sum_of_losses(logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize(("name", "targets"), CASES)
def test_peft_and_the_merged_weights_compute_the_same(bases, tmp_path, name, targets):
    """PEFT's logits are those of the model, whose adapters are exported, and so are the gradients of every A and B. The
    frozen weights of the base do not change. A slice of the merged weights equals the same part of the whole."""
    config = configure(bases[name], targets, "--lora_alpha", "5")
    model, plain, merged = make(config), load_model(bases[name]), Transformer(config.model_config)
    adapters = {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert trainable_parameters(model).keys() == adapters
    logits, read = model.logits(TOKENS), lora.merge(reader(plain), reader(model), config)
    shard.fill_parameters(merged, read)
    assert error(merged.logits(TOKENS), logits) < 1e-5 and error(plain.logits(TOKENS), logits) > 1e-2
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):  # where the model computes in fp32
        exact = [copy.deepcopy(m).to(torch.float64) for m in (plain, model, merged)]
        for m in exact:
            m.dtype = torch.float64
        shard.fill_parameters(exact[2], lora.merge(reader(exact[0]), reader(exact[1]), config))
        assert error(exact[2].logits(TOKENS), exact[1].logits(TOKENS)) < 1e-12
    part = read("layers.1.self_attn.qkv_proj.weight", (slice(60, 110), slice(5, 40)))
    whole = merged.layers[1].self_attn.qkv_proj.weight
    assert torch.allclose(part, whole[60:110, 5:40], rtol=0, atol=1e-7)

    export_adapter(config, reader(model), tmp_path / "adapter")
    _, theirs = peft_model(bases[name], tmp_path / "adapter")
    their_logits = theirs(TOKENS).logits
    assert error(logits, their_logits) < 1e-5
    sum_of_losses(their_logits).backward()
    # Without the balancing loss of experts, as there.
    (sum_of_losses(logits) if config.model_config.n_experts else model(TOKENS[:, :-1], TOKENS[:, 1:])).backward()
    export_adapter(config, lambda n, s: model.get_parameter(n).grad[s], tmp_path / "gradients")
    ours = load_file(tmp_path / "gradients/adapter_model.safetensors")
    wanted = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    assert ours.keys() == wanted.keys()
    assert max(error(ours[n], wanted[n]) for n in wanted) < 1e-5
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_peft_are_trained_on(bases, tmp_path, rslora):
    """Their rank, scale and targets are those of the run; other flags are refused."""
    peft, model = peft_model(bases["tiny-llama"])
    targets = ["k_proj", "down_proj"]
    kind = peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets, init_lora_weights=False, use_rslora=rslora)
    model = peft.get_peft_model(model, kind)
    model.save_pretrained(tmp_path)
    flags = ["--weights", str(bases["tiny-llama"]), "--lora_weights", str(tmp_path), "--dtype", "fp32"]
    config = settled_args(flags)
    assert (config.lora, config.lora_targets) == (3, ("down", "k"))
    logits = make(config, open_adapter(tmp_path, config)).logits(TOKENS)
    assert error(logits, model(TOKENS).logits) < 1e-5
    same = ["--lora=3", f"--lora_alpha={config.lora_alpha}", "--lora_targets=k,down"]
    open_adapter(tmp_path, settled_args([*flags, *same]))
    assert settled_args([*flags, "--lora=3"]).lora_alpha == config.lora_alpha
    export_adapter(config, open_adapter(tmp_path, config), tmp_path / "ours")
    _, again = peft_model(bases["tiny-llama"], tmp_path / "ours")
    assert error(again(TOKENS).logits, logits) < 1e-5


@pytest.fixture(scope="module")
def run(bases, tmp_path_factory, text):
    """(flags, a folder with runs: `whole`, and `parts`, which two processes stopped after 2 of 4 steps)."""
    folder = tmp_path_factory.mktemp("runs") / "o*[1] a:b@c,d"  # a path that exists is a path, whatever its name
    base = shutil.copytree(bases["tiny-llama"], folder / "base")
    flags = [*FAST, "--weights", base, "--data", text, "--lora", 4, "--lora_targets", "q,v,up,down", "--lr", "1e-2"]
    flags += ["--schedule", "constant", "--save_every", 2, "--log_every", 1, "--eval_every", 0, "--micro_batch", 2]
    flags += ["--batch_tokens", 512, "--tokenizer", "bytes"]
    train(*flags, "--steps", 4, "--out", folder / "whole")
    train(*flags, "--steps", 2, "--out", folder / "parts", ranks=2)
    shutil.rmtree(folder / "parts/hf")
    return flags, folder


def test_a_run_goes_on_and_leaves_both_the_merged_weights_and_the_adapter(run):
    flags, folder = run
    train(*flags, "--steps", 4, "--out", folder / "parts")
    for step, (loss, norm, _) in values(folder / "whole").items():
        assert values(folder / "parts")[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5), None)
    tensors = load_file(folder / "whole/checkpoints/step-00000004/rank-00000.safetensors")
    assert all(".lora_" in name for name in tensors) and len(tensors) == 4 * 2 * 3 * 2
    config = checkpoint.newest(folder / "whole").config
    model = make(config, open_adapter(folder / "whole/adapter", config))
    assert error(load_model(folder / "whole/hf").logits(TOKENS), model.logits(TOKENS)) < 1e-6
    assert error(load_model(folder / "base").logits(TOKENS), model.logits(TOKENS)) > 1e-3
    more = [*flags, "--lora_weights", folder / "whole/adapter", "--steps", 1, "--lr", "1e-9", "--save_every", 0]
    train(*more, "--out", folder / "more")
    probe = checkpoint.newest(folder / "whole").manifest["probe"]
    assert checkpoint.probe_loss(model, probe["tokens"], torch.device("cpu")) == pytest.approx(probe["loss"], abs=1e-5)
    again = checkpoint.newest(folder / "more").read_weights
    for name, p in trainable_parameters(model).items():
        assert torch.allclose(again(name, (slice(None), slice(None))), p, atol=1e-6)


def test_another_base_is_refused(run):
    """One value of it has changed."""
    flags, folder = run
    base = folder / "base/model.safetensors"
    before, tensors = base.read_bytes(), load_file(base)
    tensors["model.layers.1.mlp.up_proj.weight"][7, 5] += 1e-4
    save_file(tensors, base)
    try:
        done = train(*flags, "--steps", 6, "--out", folder / "whole", status=2)
        assert f"--weights {folder / 'base'} has changed since" in done.stderr
        with pytest.raises(UserError, match="has changed since the adapters"):
            open_trained(checkpoint.newest(folder / "whole"))
    finally:
        base.write_bytes(before)


@pytest.mark.parametrize(("flags", "message"), [
    ("--lora 4 --lora_targets q,query", "--lora_targets query: tiny-llama can have adapters for q,k,v,o,gate,up,down$"),
    ("--lora 4 --model tiny-mixtral", "gate,up,down: tiny-mixtral can have adapters for q,k,v,o$"),
    ("--lora 4 --model tiny-gpt2", "tiny-gpt2 can have adapters for no projection$"),
    ("--lora_weights x --lora 4", "--lora_weights has no effect without --weights"),
    ("--quantize nf4", "--quantize has no effect without --lora"),
    ("--lora 4 --quantize nf4", "tiny-llama has .* rows not divisible by 64"),
    ("--lora 4 --quantize nf4 --model tiny-mixtral --lora_targets q", "tiny-mixtral has stacked experts"),
])  # fmt: skip
def test_flags_that_ask_for_no_adapter_or_no_base_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        settled_args(flags.split())


def test_adapters_of_another_kind_are_refused(bases, tmp_path):
    config = configure(bases["tiny-llama"], "q,o")
    export_adapter(config, reader(make(config)), tmp_path)
    path = tmp_path / "adapter_config.json"
    values = json.loads(path.read_text())
    for change, message in (
        ({"use_dora": True}, "use_dora is True, which is not implemented: merge .* merge_and_unload"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], which"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"bias": "all"}, "bias is 'all', which"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ):
        path.write_text(json.dumps(values | change))
        with pytest.raises(UserError, match=message):
            open_adapter(tmp_path, config)
    path.write_text(json.dumps(values | {"init_lora_weights": "eva", "exclude_modules": None}))
    for flags, message in (
        ({"dim": 128, "n_heads": 8}, r"is \[3, 64\] torch.float32, expected \[3, 128\]"),
        ({"n_layers": 3}, "does not fit the model"),
    ):
        with pytest.raises(UserError, match=message):
            open_adapter(tmp_path, settle_model(replace(config, model="tiny-llama", model_config=None, **flags)))
    open_adapter(tmp_path, config)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file({name: t for name, t in tensors.items() if "layers.0" in name}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"missing: .*layers\.1\..*merge .* merge_and_unload"):
        open_adapter(tmp_path, config)
