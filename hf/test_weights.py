"""hf/weights.py and hf/families.py. Oracles: transformers for folders and exports, the safetensors library for bits,
torch's slicing for parts, the published config.json files for the rows of MODELS."""

import ctypes
import json
import os
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from base.errors import UserError
from base.tensors import TensorFile
from hf import families
from hf.families import config_json
from hf.weights import export, export_model, find_files, load_model, open_weights
from model import MODELS, ModelConfig, Transformer
from test_model import FAMILY, error, make_reference, random_tokens, scramble
from test_shard import peak_rss, run_code

transformers.utils.logging.disable_progress_bar()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS = random_tokens(2, 96)  # twice as long as rope scaling's original context
INDEX = "model.safetensors.index.json"


@cache
def reference(name: str, dtype: torch.dtype = torch.float32):
    """Hugging Face's model in fp32, with weights rounded to dtype. Tests share it and must not change it."""
    model = make_reference(FAMILY[name])
    for p in model.parameters():
        p.data = p.data.to(dtype).float()
    return model


def load_theirs(folder: Path, dtype: torch.dtype):
    """Transformers' model of a folder, computing in dtype, and its report about the loading."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, attn_implementation="eager"
    )


def save(place: Path, name: str, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """-> a new folder in this place, which transformers has written."""
    folder = place / f"theirs-{len(os.listdir(place))}"
    make_reference(FAMILY[name]).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def same_bits(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == t.dtype and torch.equal(a[n].view(torch.uint8), t.view(torch.uint8)) for n, t in b.items()
    )


# ---- reading


@pytest.mark.parametrize("content, message", [
    (b'8\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' + bytes(7), "cut short"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a git-LFS pointer.*git lfs pull"),
    (b"\n\n  <html>429 Too Many Requests</html>", "an HTML or XML page, not the file: repeat the download"),
    (b"PK\x03\x04" + bytes(100), "a pickle, which can run code"),
    ((1 << 40).to_bytes(8, "little") + b"{}", "damaged, cut short or not a safetensors file"),  # a header of 1 TB
    (b'8\0\0\0\0\0\0\0{"a":{"dtype":"f32","shape":[2],"data_offsets":[0,8]}}' + bytes(8), "damaged"),
    (b"", "missing, damaged, cut short"),
], ids=lambda value: str(value)[:20])  # fmt: skip
def test_damaged_files(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path.name} is .*{message}"):
        TensorFile(path)


@pytest.mark.parametrize("name", ["gpt2", "llama3.2", "mixtral"])
def test_names_of_older_files(tmp_path, name):
    """Masks and frequencies are stored too, with a copy of a tied head, or without the names' first part."""
    folder, theirs = save(tmp_path, name), reference(name)
    buffers = {"transformer.h.1.attn.bias": torch.ones(1, 1, 8, 8), "transformer.h.1.attn.masked_bias": torch.ones(())}
    if name != "gpt2":
        buffers = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.rand(8)}
    tensors = load_file(folder / "model.safetensors") | buffers
    bare = {n.removeprefix("model.").removeprefix("transformer."): t for n, t in tensors.items()}
    head = theirs.get_output_embeddings().weight.detach().clone()
    for stored in (bare, tensors | {"lm_head.weight": head}):
        save_file(stored, folder / "model.safetensors")
        assert error(load_model(folder).logits(TOKENS), theirs(TOKENS).logits) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama3.2"])
def test_a_tied_model_with_another_head(tmp_path, name):
    """It is refused; with the setting that the message names, the head is used. Only its last row differs."""
    folder = save(tmp_path, name)
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    head = reference(name).get_output_embeddings().weight.detach().clone()
    for wrong in (torch.cat((head[:-1], head[-1:] + 1)), head[:-1].clone()):
        save_file(load_file(path) | {"lm_head.weight": wrong}, path)
        with pytest.raises(UserError, match="set its tie_word_embeddings to false"):
            load_model(folder)
    save_file(load_file(path) | {"lm_head.weight": -head}, path)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    logits = load_theirs(folder, torch.float32)[0](TOKENS).logits
    assert error(load_model(folder).logits(TOKENS), logits) < 1e-5 < error(logits, reference(name)(TOKENS).logits)


# ---- slices and memory


@pytest.mark.parametrize("name", ["gpt2", "wide-heads", "llama3", "mixtral"])
def test_slices_of_every_parameter(tmp_path, name):
    """Any slice equals the same part of the whole. A fused parameter, whose tensors have several files and dtypes, has
    the narrowest dtype that holds them all."""
    folder, r = save(tmp_path, name, shard="30KB"), random.Random(0)
    for file in find_files(folder):
        tensors = load_file(file)
        for n, t in tensors.items():
            tensors[n] = t.half() if re.search("q_proj|up_proj|w1", n) else t.bfloat16() if "gate_proj" in n else t
        save_file(tensors, file)
    read = open_weights(folder, FAMILY[name])
    for n, p in load_model(folder).named_parameters():
        for _ in range(8):
            slices = tuple(slice(*sorted((r.randint(0, size), r.randint(0, size)))) for size in p.shape)
            part = read(n, slices)
            assert torch.equal(part, p[slices]) and part.dtype == torch.float32, (n, slices)


def measure_memory(place: str) -> None:
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: freed memory is returned at once, in any thread
    for name in ("small", "large"):  # the small model pays for everything that happens once
        source, copy = (Path(place) / folder for folder in (name, f"{name}-copy"))
        config, before = families.read_config(source), peak_rss(reset=True)
        export(config, open_weights(source, config), copy, torch.bfloat16, shard_gb=0.02)
        exported = peak_rss()
        model = load_model(copy, torch.bfloat16)
        loaded = peak_rss()
        del model
    print((exported - before) / 2**20, (loaded - exported) / 2**20)


def test_peak_memory_is_not_twice_the_model(tmp_path):
    """66 MiB of weights, whose largest tensor has 2 MiB (as a parameter, two of them): an export needs the memory of a
    shard (20 MB) and a few tensors, loading needs the memory of the model and a few tensors."""
    for name, n_layers in (("small", 1), ("large", 8)):
        config = ModelConfig(vocab_size=2000, dim=512, n_layers=n_layers, n_heads=8, ffn_dim=2048, max_seq_len=64)
        with torch.device("meta"):
            model = Transformer(config, torch.bfloat16).bfloat16()
        export_model(model.to_empty(device="cpu"), tmp_path / name)  # the values do not matter
    code = f"from hf.test_weights import measure_memory\nmeasure_memory({str(tmp_path)!r})"
    done = run_code(code, ["measure"])
    assert done.returncode == 0, done.stderr
    export, load = map(float, done.stdout.split())
    size = sum(t.nbytes for t in tensors_of(tmp_path / "large").values()) / 2**20
    assert size > 65 and export < 20 + 24 and load < size + 6


# ---- export


@pytest.mark.parametrize("name, dtype", [
    *((name, "bf16") for name in FAMILY), ("gpt2", "fp32"), ("llama3", "fp32"), ("mixtral", "fp16"),
])  # fmt: skip
def test_import_export_import(tmp_path, name, dtype):
    """We compute transformers' logits. An export has the same names with the same bits; transformers finds every key,
    no other, and computes equal logits."""
    shard, dtype = "5GB" if dtype == "fp32" else "20KB", DTYPES[dtype]
    source = save(tmp_path, name, dtype, shard)
    assert (len(find_files(source)) > 2) == (shard == "20KB")
    theirs = reference(name, dtype)(TOKENS).logits
    assert error(load_model(source).logits(TOKENS), theirs) < 1e-5
    export_model(load_model(source, dtype), tmp_path / "single")
    export_model(load_model(tmp_path / "single", dtype), tmp_path / "sharded", shard_gb=2e-5)
    assert same_bits(tensors_of(tmp_path / "single"), tensors_of(source))
    assert same_bits(tensors_of(tmp_path / "sharded"), tensors_of(source))
    loaded, info = load_theirs(tmp_path / "sharded", "auto")
    assert not any(info.values()) and {p.dtype for p in loaded.parameters()} == {dtype}, info
    assert torch.equal(loaded.float()(TOKENS).logits, theirs)


def test_export_replaces_only_an_export(monkeypatch, tmp_path):
    """A failure leaves the older one, and nothing of the new one."""
    model, other = load_model(save(tmp_path, "llama3")), load_model(save(tmp_path, "gpt2"))
    out, mine = tmp_path / "new" / "out", tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    export_model(model, out)  # makes the folders above
    for folder, replaces in ((mine, False), (mine, True), (out, False)):
        with pytest.raises(UserError, match=f"{folder} exists already"):
            export_model(other, folder, replaces=replaces)
    assert os.listdir(mine) == ["thesis.txt"]
    export_model(other, out, replaces=True)
    before = tensors_of(out)
    monkeypatch.setattr("base.tensors.save_file", lambda *_: (tmp_path / "none" / "x").write_text("x"))
    with pytest.raises(FileNotFoundError):
        export_model(model, out, replaces=True)
    assert same_bits(tensors_of(out), before) and os.listdir(out.parent) == ["out"]
    assert families.read_config(out) == FAMILY["gpt2"]


def test_shape_without_a_family(tmp_path):
    llama, gpt2, qwen = FAMILY["llama3"], FAMILY["gpt2"], FAMILY["qwen3"]
    shapes = [replace(llama, mlp="gelu"), replace(llama, positions="learned"), replace(gpt2, n_kv_heads=2)]
    shapes += [replace(FAMILY["phi3"], rope_scaling=FAMILY["yarn"].rope_scaling)]  # transformers reads it as longrope
    for shape in (*shapes, replace(qwen, qkv_bias=True), replace(FAMILY["olmo2"], layer_kinds=("full nope",))):
        with pytest.raises(UserError, match="no family in hf/families.py has"):
            export_model(Transformer(shape), tmp_path / "out")
    assert not os.listdir(tmp_path)


PICTURES = {  # the family of the text part: the class of the whole, and more of its configuration
    "gemma3": ("Gemma3", {"mm_tokens_per_image": 4}),
    "ministral3": ("Mistral3", {"tie_word_embeddings": False}),
    "mistral 0.1": ("Mistral3", {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("name", PICTURES)
def test_a_model_for_pictures_is_its_text_part(tmp_path, caplog, name, older):
    """Both ways of naming; the log names the other part once. What we train and export is the text part's class."""
    text, (kind, others) = config_json(FAMILY[name], "float32"), PICTURES[name]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 9, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **others)
    theirs, folder = scramble(getattr(transformers, f"{kind}ForConditionalGeneration")(config)), tmp_path / "theirs"
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if not older:
        moved = ("", "model."), ("model.language_model.lm_head", "lm_head"), ("language_model.model", "language_model")
        for old, new in moved:
            tensors = {n.replace(old, new, 1): t for n, t in tensors.items()}
    assert ("language_model.model.norm.weight" in tensors) == older != ("model.language_model.norm.weight" in tensors)
    save_file(tensors, folder / "model.safetensors")
    with caplog.at_level("INFO", "flatland"):
        ours = [load_model(folder) for _ in range(2)][0]
    assert [len(re.findall(part, caplog.text)) for part in ("vision_tower", "multi_modal_projector")] == [1, 1]
    expected = theirs(TOKENS).logits
    assert error(ours.logits(TOKENS), expected) < 1e-5
    export_model(ours, tmp_path / "text")
    loaded, info = load_theirs(tmp_path / "text", torch.float32)
    assert type(loaded).__name__ == text["architectures"][0] and not any(info.values())
    assert error(loaded(TOKENS).logits, expected) < 1e-5


# ---- strictness

Q = "model.layers.1.self_attn.q_proj.weight"
C_FC, W2 = "transformer.h.0.mlp.c_fc.weight", "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.mark.parametrize("name, wrong, message", [
    ("llama3", lambda t: {n: v for n, v in t.items() if n != Q}, rf"missing: \['{Q}'\]$"),
    ("llama3", lambda t: t | {"\x1b[31m": torch.zeros(3)}, r"fit the model; unexpected: .'\\x1b\[31m'"),
    ("llama3", lambda t: t | {Q.replace("weight", "bias"): torch.zeros(64)}, "unexpected: .*1.self_attn.q"),
    ("gpt2", lambda t: t | {C_FC: t[C_FC].T.contiguous()}, rf"{C_FC} is \[48, 64\].*expected \[64, 48\]"),
    ("mixtral", lambda t: t | {W2: t[W2].T.contiguous()}, rf"{W2} is \[48, 64\].*expected \[64, 48\]"),
    ("mixtral", lambda t: {n: t[n] for n in t if "experts.3" not in n}, "missing: .*experts.3"),
    ("llama3", lambda t: t | {Q: t[Q].to(torch.float8_e4m3fn)}, f"{Q} is .*float8_e4m3fn, expected"),
    ("llama3", lambda t: {n: v for n, v in t.items() if "layers.1" not in n}, r"missing: .*layers\.1\."),
])  # fmt: skip
def test_other_tensors_are_refused(tmp_path, name, wrong, message):
    folder = save(tmp_path, name)
    save_file(wrong(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{folder}.*{message}"):
        load_model(folder)


def test_absurd_sizes_are_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    folder = save(tmp_path, "llama3")
    values = json.loads((folder / "config.json").read_text())
    for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads"):
        (folder / "config.json").write_text(json.dumps(values | {key: 2**31}))
        with pytest.raises(UserError, match=r"does not fit the model; .* is \[.*expected \[.*\d{10}"):
            load_model(folder)
    (folder / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 10_000}))
    monkeypatch.setattr("hf.weights.pieces", None)  # a list of their tensors takes long
    with pytest.raises(UserError, match="fewer tensors than its config.json has layers, 10000"):
        load_model(folder)


def test_wrong_index(tmp_path):
    folder = save(tmp_path, "llama3", shard="40KB")
    for text, message in (
        ('{"weight_map": {"a": "../x.safetensors", "b": "x.safetensors"}}', r"[^.]/x.safetensors'"),
        ('{"weight_map": {"a": 5}}', "/5 is missing"), ("{}", "fewer tensors than"),
        ("[]", "holds no JSON object"), ("{", "is damaged"),
    ):  # fmt: skip
        (folder / INDEX).write_text(text)
        with pytest.raises(UserError, match=f"{folder}.*{message}"):
            load_model(folder)
    for name, message in ((INDEX, "holds neither model.safetensors nor"), ("config.json", re.escape(str(folder)))):
        (folder / name).unlink()
        with pytest.raises(UserError, match=message):
            load_model(folder)


# ---- config.json

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("vocab_size", "max_position_embeddings")


def facts(base: dict, sizes: str, **others) -> dict:
    """The published config.json, like another one but for its sizes, in the order above, and others."""
    return base | dict(zip(SIZES, map(int, sizes.split()), strict=True)) | others


GPT2_FACTS = {
    "activation_function": "gelu_new", "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
    "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
    "summary_type": "cls_index", "vocab_size": 50257, "task_specific_params": {"text-generation": {"do_sample": True}},
}  # fmt: skip
SCALING = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
           "rope_type": "llama3"}  # fmt: skip
YARN = {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn"}  # fmt: skip
ROUTER = {"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "router_aux_loss_coef": 0.02}
LLAMA2_FACTS = facts({
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02, "model_type": "llama",
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "use_cache": True,
}, "4096 11008 32 32 32 32000 4096")  # fmt: skip
LLAMA3_FACTS = facts(LLAMA2_FACTS, "4096 14336 32 32 8 128256 8192",
                     attention_bias=False, attention_dropout=0.0, rope_theta=500000.0)  # fmt: skip
LLAMA31_FACTS = LLAMA3_FACTS | {"max_position_embeddings": 131072, "mlp_bias": False, "rope_scaling": SCALING}
MISTRAL_FACTS = facts(LLAMA2_FACTS, "4096 14336 32 32 8 32768 32768", model_type="mistral",
                      attention_dropout=0.0, rope_theta=1e6, sliding_window=None)  # fmt: skip
MIXTRAL_FACTS = MISTRAL_FACTS | ROUTER | {"model_type": "mixtral", "rope_theta": 1000000.0, "vocab_size": 32000}
QWEN25_FACTS = facts(LLAMA2_FACTS, "896 4864 24 14 2 151936 32768", model_type="qwen2", max_window_layers=24,
                     rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True,
                     use_mrope=False, use_sliding_window=False)  # fmt: skip
QWEN3_FACTS = facts(QWEN25_FACTS, "2560 9728 36 32 8 151936 40960", model_type="qwen3", max_window_layers=36,
                    attention_bias=False, head_dim=128, rope_theta=1000000, sliding_window=None)  # fmt: skip
QWEN3_MOE_FACTS = facts(QWEN3_FACTS, "2048 6144 48 32 4 151936 40960", model_type="qwen3_moe", max_window_layers=48,
                        decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
                        num_experts=128, num_experts_per_tok=8, output_router_logits=False,
                        router_aux_loss_coef=0.001, tie_word_embeddings=False)  # fmt: skip
OLMO2_FACTS = facts(LLAMA3_FACTS, "4096 11008 32 32 32 100352 4096", model_type="olmo2", eos_token_id=100257,
                    pad_token_id=100277, rms_norm_eps=1e-06, rope_theta=500000)  # fmt: skip
OLMO2_FACTS.pop("pretraining_tp")
OLMO3_FACTS = facts(OLMO2_FACTS, "4096 11008 32 32 32 100278 65536", model_type="olmo3", rope_scaling=YARN,
                    layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8, sliding_window=4096)  # fmt: skip
SMOLLM3_FACTS = facts(LLAMA3_FACTS, "2048 11008 36 16 4 128256 65536", model_type="smollm3", mlp_bias=False,
                      layer_types=["full_attention"] * 36, max_window_layers=28, no_rope_layer_interval=4,
                      no_rope_layers=[1, 1, 1, 0] * 9, pretraining_tp=2, rms_norm_eps=1e-06, rope_theta=5000000.0,
                      sliding_window=None, tie_word_embeddings=True, use_sliding_window=False)  # fmt: skip
PHI4_FACTS = facts(LLAMA2_FACTS, "5120 17920 40 40 10 100352 16384", model_type="phi3", attention_bias=False,
                   attention_dropout=0.0, embd_pdrop=0.0, original_max_position_embeddings=16384, resid_pdrop=0.0,
                   rope_theta=250000, sliding_window=None)  # fmt: skip
GRANITE_FACTS = facts(LLAMA3_FACTS, "4096 12800 40 32 8 49159 131072", model_type="granite", bos_token_id=0,
                      attention_multiplier=0.0078125, embedding_multiplier=12.0, eos_token_id=0, logits_scaling=16.0,
                      mlp_bias=False, pad_token_id=0, residual_multiplier=0.22, rope_theta=10000000.0,
                      tie_word_embeddings=True)  # fmt: skip
GEMMA3_FACTS = facts({  # 1B's
    "attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0,
    "model_type": "gemma3_text", "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "use_cache": True,
}, "1152 6912 26 4 1 262144 32768")  # fmt: skip


def with_pictures(sizes: str, **others) -> dict:
    """The config.json of Gemma 3 4B to 27B. sizes: dim, ffn_dim, layers."""
    text = dict(zip(SIZES, map(int, sizes.split()), strict=False)) | {"model_type": "gemma3_text"}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024} | others
    return {"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eos_token_id": [1, 106],
            "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
            "text_config": text, "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27}}  # fmt: skip


MINISTRAL_FACTS = MISTRAL_FACTS | {"model_type": "ministral", "head_dim": 128, "sliding_window": 8, "layer_types": None}
MINISTRAL3_FACTS = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "text_config": facts({
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
        "model_type": "ministral3", "rms_norm_eps": 1e-05, "sliding_window": None, "tie_word_embeddings": False,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
    }, "4096 14336 34 32 8 131072 262144"),
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"}, "vision_feature_layer": -1,
}  # fmt: skip
PUBLISHED = {
    "mistral-7b-v0.1": MISTRAL_FACTS | {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
    "qwen3-30b-a3b": QWEN3_MOE_FACTS, "olmo2-7b": OLMO2_FACTS, "olmo3-7b": OLMO3_FACTS, "smollm3-3b": SMOLLM3_FACTS,
    "gemma3-1b": GEMMA3_FACTS, "gemma3-4b": with_pictures("2560 10240 34"),
    "gemma3-12b": with_pictures("3840 15360 48 16 8"),
    "gemma3-27b": with_pictures("5376 21504 62 32 16", head_dim=128, query_pre_attn_scalar=168),
    "phi-4": PHI4_FACTS, "ministral3-8b": MINISTRAL3_FACTS, "granite3.3-8b": GRANITE_FACTS,
    "llama2-7b": LLAMA2_FACTS, "llama3-8b": LLAMA3_FACTS, "llama3.1-8b": LLAMA31_FACTS,
    "mixtral-8x7b": MIXTRAL_FACTS, "mistral-7b": MISTRAL_FACTS, "qwen3-4b": QWEN3_FACTS, "gpt2": GPT2_FACTS,
    "gpt2-large": GPT2_FACTS | {"n_embd": 1280, "n_head": 20, "n_layer": 36, "n_special": 0},
    "llama3.1-405b": facts(LLAMA31_FACTS, "16384 53248 126 128 8 128256 131072"),
    "llama3.2-1b": facts(LLAMA31_FACTS, "2048 8192 16 32 8 128256 131072", eos_token_id=128001, head_dim=64,
                         rope_scaling=SCALING | {"factor": 32.0}, tie_word_embeddings=True),
    "qwen2.5-0.5b": QWEN25_FACTS,
    "qwen2.5-7b": facts(QWEN25_FACTS, "3584 18944 28 28 4 152064 131072", max_window_layers=28, sliding_window=131072,
                        tie_word_embeddings=False),
}  # fmt: skip


def read(folder: Path, values: dict) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return families.read_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config(tmp_path, name):
    """The folder's shape is the row's, but for the initialisation, which is ours. An export has the file's values in
    the same types of JSON."""
    theirs = PUBLISHED[name]
    shape = read(tmp_path, theirs)
    assert replace(shape, init_std=MODELS[name].init_std) == MODELS[name]
    ours = config_json(shape, "bfloat16")
    for a, b in ((theirs, ours), (theirs.get("rope_scaling") or {}, ours.get("rope_scaling") or {})):
        both = a.keys() & b.keys() - {"rope_theta", "rope_local_base_freq", "rope_scaling"}
        same = [key for key in both if a[key] == b[key]]
        assert {key: repr(a[key]) for key in same} == {key: repr(b[key]) for key in same}  # 8192 == 8192.0


@pytest.mark.parametrize("name", [*MODELS, *FAMILY, "no balancing loss"])
def test_config_round_trip(tmp_path, name):
    """Together, in version 4's keys alone, and in those with which version 5 replaces them. Every key is one of the
    family's."""
    shape = MODELS.get(name) or FAMILY.get(name) or replace(MODELS["tiny-mixtral"], router_aux_loss_coef=0.0)
    values = config_json(shape, "bfloat16")
    assert values["torch_dtype"] == "bfloat16" and read(tmp_path, values) == shape
    newer = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert ("rope_parameters" in newer) == (shape.positions == "rope") and read(tmp_path, newer) == shape
    their_own = {*newer, "torch_dtype", "rope_theta", "rope_scaling", "head_dim", "max_window_layers", "num_experts"}
    their_own.add("rope_local_base_freq")
    assert their_own.issuperset(values)
    if values["model_type"] != "olmo3" or shape.rope_theta == 5e5:
        assert read(tmp_path, {k: v for k, v in values.items() if k != "rope_parameters"}) == shape


BASE = {
    "llama": LLAMA31_FACTS, "gpt2": GPT2_FACTS, "mixtral": MIXTRAL_FACTS, "mistral": MISTRAL_FACTS,
    "qwen2": QWEN25_FACTS, "qwen3": QWEN3_FACTS, "qwen3_moe": QWEN3_MOE_FACTS, "olmo2": OLMO2_FACTS,
    "olmo3": OLMO3_FACTS, "smollm3": SMOLLM3_FACTS, "phi3": PHI4_FACTS, "ministral": MINISTRAL_FACTS,
    "gemma3_text": GEMMA3_FACTS, "gemma3": PUBLISHED["gemma3-4b"], "granite": GRANITE_FACTS,
    "ministral3": MINISTRAL3_FACTS["text_config"], "mistral3": MINISTRAL3_FACTS,
    "arcee": LLAMA31_FACTS | {"model_type": "arcee", "hidden_act": "relu2"},
}  # fmt: skip
SAME = [  # a family, harmless changes
    ("llama", {"head_dim": None, "mlp_bias": False, "sliding_window": None, "partial_rotary_factor": 1.0}),
    ("llama", {"_name_or_path": "x", "quantization_config": None, "pruned_heads": {}, "chunk_size_feed_forward": 0}),
    ("llama", {"rope_scaling": {**{k: v for k, v in SCALING.items() if k != "rope_type"}, "type": "llama3"}}),
    ("gpt2", {"activation_function": "gelu_pytorch_tanh", "n_inner": 3072, "scale_attn_weights": True}),
    ("qwen2", {"layer_types": ["full_attention"] * 24, "sliding_window": 4096, "use_sliding_window": None}),
    ("qwen2", {"attention_bias": True, "max_window_layers": 3}), ("qwen3", {"use_sliding_window": True}),
    ("llama", {"x_null": None, "x_false": False, "x_zero": 0, "x_one": 1.0, "x_none": [], "alibi": False}),
    ("llama", {"final_logit_softcapping": None, "embedding_multiplier": 1.0, "logits_scaling": 1, "bias": False}),
    ("llama", {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": SCALING | {"rope_theta": 500000}}),
    ("llama", {"rope_scaling": {k: v for k, v in SCALING.items() if k[0] != "o"},
               "original_max_position_embeddings": 8192}),
    ("phi3", {"architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}),
    ("qwen3_moe", {"num_experts": ..., "num_local_experts": 128, "intermediate_size": 99, "mlp_only_layers": None}),
    ("olmo3", {"layer_types": None}), ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": ...}),
    ("olmo3", {"rope_scaling": YARN | {"attention_factor": None, "truncate": True}}),
    ("olmo3", {"rope_scaling": YARN | {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": 0.0}}),
    ("ministral", {"layer_types": ["sliding_attention"] * 32}),
    ("gemma3_text", {"sliding_window_pattern": ..., "rope_local_base_freq": ..., "query_pre_attn_scalar": ...}),
    ("gemma3_text", {"vision_config": {"x": 1}, "hidden_activation": "gelu_new", "hidden_act": "silu"}),
    ("gemma3_text", {"layer_types": [*([*["sliding_attention"] * 5, "full_attention"] * 5)[:26]]}),
    ("gemma3", {"vision_config": None, "image_token_id": 5}), ("granite", {"embedding_multiplier": 12}),
    ("arcee", {"hidden_act": ...}), ("mistral3", {"quantization_config": None, "image_token_id": 5}),
]  # fmt: skip


@pytest.mark.parametrize("kind, changes", SAME, ids=str)
def test_harmless_fields(tmp_path, kind, changes):
    changed = {k: v for k, v in (BASE[kind] | changes).items() if v is not ...}
    assert read(tmp_path, changed) == read(tmp_path, BASE[kind])


MIXED = ["sliding_attention", "full_attention"] * 12
SHORT = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SHORT = dict.fromkeys(BASE, SHORT) | {"gpt2": ("vocab_size", "n_embd", "n_layer", "n_head"), "qwen3_moe": SHORT[:-1]}
SHORT |= {"gemma3_text": SHORT["llama"][1:3] + SHORT["llama"][4:], "gemma3": (), "mistral3": ()}
THEIRS = {
    "gemma3": {"text_config": PUBLISHED["gemma3-4b"]["text_config"]},
    "mistral3": {"text_config": MINISTRAL3_FACTS["text_config"]},
    "ministral3": {"rope_parameters": MINISTRAL3_FACTS["text_config"]["rope_parameters"]},
    "qwen2": {"hidden_size": 4096, "num_attention_heads": 32},
    "ministral": {"head_dim": 128},
}
THEIRS["smollm3"] = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize("kind", BASE)
def test_absent_fields_have_transformers_defaults(tmp_path, kind):
    """Absent keys have the values that transformers' configuration class fills in."""
    values = {k: BASE[kind][k] for k in ("model_type", *SHORT[kind])} | THEIRS.get(kind, {})
    found = read(tmp_path, values)
    assert found == read(tmp_path, transformers.AutoConfig.from_pretrained(tmp_path).to_dict())


def scaling(**changes) -> dict:
    return {"rope_scaling": {k: v for k, v in (SCALING | changes).items() if v is not ...}}


UNKNOWN = {"x_factor": 3, "x_norm": True, "x_scale": 0.5, "x_kind": "post", "x_layers": [1], "": 1}
UNSUPPORTED = (
    ("llama", "hidden_act", "gelu"), ("gpt2", "activation_function", "relu"), ("mistral", "attention_bias", True),
    ("qwen3_moe", "mlp_only_layers", [0]), ("llama", "partial_rotary_factor", 0.5), ("mixtral", "is_causal", None),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True), ("qwen3_moe", "decoder_sparse_step", 2),
    ("llama", "sliding_window", 4096), ("llama", "logits_scaling", 0), ("llama", "final_logit_softcapping", 30.0),
    ("llama", "auto_map", {"AutoModel": "m.py"}), ("llama", "num_experts", 8), ("llama", "use_rms_norm", False),
    ("gemma3_text", "final_logit_softcapping", 30.0), ("gemma3_text", "use_bidirectional_attention", True),
    ("gemma3_text", "sliding_window_pattern", 4),
    ("arcee", "hidden_act", "silu"), ("granite", "hidden_act", "relu2"),
    ("llama", "use_sliding_window", True), ("llama", "quantization_config", {"quant_method": "gptq", "bits": 4}),
)  # fmt: skip
NEAR = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": {"rope_theta": 5e5}}
SCALED = {"sliding_attention": {"rope_type": "linear", "factor": 8.0}, "full_attention": {"rope_theta": 5e5}}
REFUSED = [  # a family, changes of its config.json above (...: without the key), the message
    *(("llama", {"model_type": m}, "model_type .* is not supported; supported are llama, mistral, .*gpt2")
      for m in ("gemma", {"llama": 1}, "", None, ...)),
    ("gemma3_text", {"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "'gemma2' is .*attn_logit_softcapping"),
    ("gemma3", {"text_config": GEMMA3_FACTS | {"hidden_activation": "gelu"}}, "hidden_activation is 'gelu' .supported"),
    ("gemma3", {"text_config": ...}, "config.json: 'text_config'"), ("gemma3", {"bits": 4}, "unknown key bits"),
    ("llama", scaling(rope_type="longrope"), "rope_parameters of type longrope are not implemented: "),
    ("phi3", scaling(rope_type="yarn", original_max_position_embeddings=...), "rope_parameters of type yarn are not"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "config.json: list index"),
    ("llama", scaling(llama_4_scaling_beta=0.1), "llama_4_scaling_beta is 0.1"),
    ("ministral3", {"rope_parameters": ...}, "rope_parameters of type default are not implemented"),
    ("ministral3", {"rope_parameters": YARN}, "llama_4_scaling_beta is None, expected a positive number"),
    ("mistral3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}"),
    ("mistral3", {"text_config": LLAMA3_FACTS | {"model_type": "mistral4"}}, "'mistral4' is not supported"),
    ("olmo3", {"rope_scaling": YARN | {"attention_factor": None, "mscale": 0.7}}, "mscale is 0.7"),
    ("olmo3", {"rope_parameters": NEAR}, "rope_parameters of type .* are not implemented: "),
    ("gemma3_text", {"rope_parameters": SCALED}, "rope_parameters of type .* are not implemented: "),
    *(("llama", scaling(**{key: ...}), f"{key} is None, expected") for key in SCALING if key != "rope_type"),
    *(("llama", scaling(factor=v), "positive") for v in (0, "8", True, [8.0], float("nan"), float("inf"))),
    ("llama", scaling(low_freq_factor=4.0), "high_freq_factor must be above low_freq_factor"),
    ("llama", {"rope_scaling": "llama3"}, "config.json: unsupported operand"),
    *((kind, {key: value}, f"{key} is {re.escape(repr(value))} .supported: [^.]*$")
      for kind, key, value in UNSUPPORTED),
    *(("llama", {key: value}, f"unknown key {key}: ") for key, value in UNKNOWN.items()),
    *((kind, {key: ...}, f"{key} is None, expected a positive") for kind, keys in SHORT.items() for key in keys),
    *(("llama", {"head_dim": v}, "head_dim is .*, expected a positive whole number") for v in ("64", True, 64.0, -1)),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is .*true or false"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected a positive whole number"),
    ("llama", scaling(original_max_position_embeddings=0.5), "embeddings is 0.5, expected a whole number"),
    ("qwen3_moe", {"num_experts": None}, "n_experts is 0, it must be at least 1"),
    ("llama", {"layer_types": ["sliding_attention"]}, "layer_types is .*: not implemented"),
    *((kind, {"layer_types": types, "sliding_window": 8}, "layer_types is .*sliding_window is .*: not implemented")
      for kind, types in (("mistral", ["full_attention"] * 32), ("qwen2", MIXED),
                          ("olmo3", MIXED[:5]), ("olmo3", ["chunked_attention"] * 32))),
    ("llama", {"vocab_size": 2**40}, "config.json: no machine holds it: .* 1099511627776 x 4096"),
    ("llama", {"num_key_value_heads": 5}, "n_heads 32 does not divide by n_kv_heads 5"),
]  # fmt: skip


@pytest.mark.parametrize("kind, changes, message", REFUSED, ids=lambda value: str(value)[:60])
def test_refused_configs(tmp_path, kind, changes, message):
    with pytest.raises(UserError, match=message) as e:
        read(tmp_path, {k: v for k, v in (BASE[kind] | changes).items() if v is not ...})
    assert str(tmp_path / "config.json") in str(e.value)


def test_a_slice_reads_no_other_values(tmp_path, monkeypatch):
    whole, sizes, read = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0)), [], TensorFile._read_rows
    save_file({"w": whole}, tmp_path / "a.safetensors")
    monkeypatch.setattr(TensorFile, "_read_rows", lambda s, rows, at: sizes.append(rows.nbytes) or read(s, rows, at))
    slices = slice(1, 3), slice(2, 4), slice(5, 8)
    found = TensorFile(tmp_path / "a.safetensors").read("w", slices)
    assert torch.equal(found, whole[slices]) and sum(sizes) == found.nbytes
