"""lib/weights.py. Oracles: transformers for folders and exports, the safetensors library for bits, torch's slicing for
parts, the published config.json files for the rows of MODELS."""

import json
import os
import random
import re
import shutil
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from lib import weights
from lib.errors import UserError
from lib.weights import config_json, dropout_note, export_model, find_files, load_model, open_weights
from model import MODELS, ModelConfig, Transformer
from test_model import FAMILY, error, make_reference, random_tokens
from test_shard import run_code

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


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    @cache
    def write(name: str, dtype: torch.dtype, shard: str) -> Path:
        folder = tmp_path_factory.mktemp("theirs")
        make_reference(FAMILY[name]).to(dtype).save_pretrained(folder, max_shard_size=shard)
        return folder

    return write


@pytest.fixture
def save(tmp_path, written):
    """save(name) -> folder that transformers has written."""

    def save(name: str, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
        return shutil.copytree(written(name, dtype, shard), tmp_path / f"theirs-{len(os.listdir(tmp_path))}")

    return save


def edit_json(path: Path, change) -> None:
    """change(the dict) edits it in place, or returns another."""
    values = json.loads(path.read_text())
    path.write_text(json.dumps(change(values) or values))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def whole(shape) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Every bit pattern, NaNs and infinities too."""
    high = 2 if dtype == torch.bool else 256
    values = torch.randint(0, high, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8, generator=g)
    return values.view(dtype).view(shape)


def random_slices(shape, r: random.Random) -> tuple[slice, ...]:
    """Of any length from 0 to all."""
    return tuple(slice(*sorted((r.randint(0, n), r.randint(0, n)))) for n in shape)


# ---- safetensors


def test_we_read_what_the_library_writes(tmp_path):
    """Every dtype and number of dimensions, whole and in slices; with metadata."""
    g, r = torch.Generator().manual_seed(0), random.Random(0)
    shapes = ((), (1,), (17,), (0,), (3, 0), (7, 5), (4, 3, 5))
    tensors = {
        f"{d} {i}": random_bits(s, dtype, g) for d, dtype in weights.DTYPES.items() for i, s in enumerate(shapes)
    }
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt", "a": '{"dtype": 5}'})
    file = weights.TensorFile(tmp_path / "x.safetensors")
    assert file.entries == {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    for name, tensor in tensors.items():
        for slices in (whole(tensor.shape), *(random_slices(tensor.shape, r) for _ in range(5))):
            assert same_bits(file.read(name, slices), tensor[slices]), (name, slices)


def test_damaged_files(tmp_path):
    """Cut short anywhere, and headers that the library refuses."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(2)}, path)
    data = path.read_bytes()
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(UserError, match=f"cut short .*: {n} bytes"):
            weights.TensorFile(path)
    row = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    for wrong in ({"data_offsets": [0, 40]}, {"shape": [2, 4]}, {"dtype": "f32"}):
        text = json.dumps({"a": row | wrong}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
        with pytest.raises(UserError, match="x.safetensors is damaged") as e:
            weights.TensorFile(path)
        assert len(str(e.value)) < 2000
    with pytest.raises(UserError, match="cannot be read"):
        weights.TensorFile(tmp_path)


OTHERS = {
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-LFS pointer.*git lfs pull"),
    "HTML": (b"\n\n  <html>429 Too Many Requests</html>", "HTML.*download.py"),
    "XML": (b"<?xml version='1.0'?><Error>AccessDenied</Error>", "XML.*download.py"),
    "zip": (b"PK\x03\x04" + bytes(100), "pickle.*run code"),
    "old pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(100), "pickle.*run code"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(100), "damaged"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_files_in_place_of_weights(save, case):
    content, message = OTHERS[case]
    for folder in (save("llama3"), save("llama3", shard="40KB")):
        file = find_files(folder)[-1]
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"{file.name} is .*{message}"):
            load_model(folder)


# ---- reading


@pytest.mark.parametrize("dtype, shard", [("fp32", "5GB"), ("fp32", "40KB"), ("bf16", "20KB"), ("fp16", "5GB")])
@pytest.mark.parametrize("name", FAMILY)
def test_reads_what_transformers_writes(save, name, dtype, shard):
    """Computed in fp32, whatever the file's dtype."""
    folder = save(name, DTYPES[dtype], shard)
    assert (len(find_files(folder)) > 2) == (shard != "5GB")
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(DTYPES[dtype])[6:]
    assert error(load_model(folder).logits(TOKENS), reference(name, DTYPES[dtype])(TOKENS).logits) < 1e-5


def strip(name: str) -> str:
    return name.removeprefix("model.").removeprefix("transformer.")


BUFFERS = {
    "gpt2": {"transformer.h.{}.attn.bias": torch.ones(1, 1, 128, 128, dtype=torch.bool).tril(),
             "transformer.h.{}.attn.masked_bias": torch.tensor(-1e4)},
    "llama": {"model.layers.{}.self_attn.rotary_emb.inv_freq": torch.rand(8)},
}  # fmt: skip
VARIANTS = {
    "buffers, head": lambda t, head: t | old_buffers(t) | {"lm_head.weight": head.clone()},
    "buffers, no prefix": lambda t, head: {strip(n): v for n, v in (t | old_buffers(t)).items()},
}


def old_buffers(tensors: dict) -> dict:
    kind = "gpt2" if "transformer.wte.weight" in tensors else "llama"
    return {n.format(i): t.clone() for n, t in BUFFERS[kind].items() for i in range(2)}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama3.2", "mixtral", "qwen2.5", "qwen3"])
def test_names_of_older_files(save, name, variant):
    folder, theirs = save(name), reference(name)
    head = theirs.get_output_embeddings().weight.detach()
    save_file(VARIANTS[variant](load_file(folder / "model.safetensors"), head), folder / "model.safetensors")
    assert error(load_model(folder).logits(TOKENS), theirs(TOKENS).logits) < 1e-5


# ---- slices and memory


def split_dtypes(folder: Path) -> None:
    """A fused parameter's tensors in several dtypes."""
    tensors = load_file(folder / "model.safetensors")
    kinds = {"k_proj": torch.bfloat16, "v_proj": torch.float16, "up_proj": torch.bfloat16, "w3": torch.float16}
    for name in tensors:
        tensors[name] = tensors[name].to(next((d for k, d in kinds.items() if k in name), torch.float32))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("mixed", [False, True], ids=["one dtype", "mixed dtypes"])
@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama3.2", "mixtral", "wide-heads"])
def test_slices_of_every_parameter(save, name, mixed):
    """Any slice equals the same part of the whole."""
    folder, r = save(name, shard="30KB" if not mixed else "5GB"), random.Random(0)
    if mixed:
        split_dtypes(folder)
    parameters = {n: p.detach() for n, p in load_model(folder).named_parameters()}
    read = open_weights(folder, FAMILY[name])
    for n, p in parameters.items():
        for _ in range(8):
            slices = random_slices(p.shape, r)
            assert torch.equal(read(n, slices), p[slices]), (n, slices)


MEMORY = """
import ctypes, sys
from pathlib import Path
import torch
from lib.weights import export, load_model, open_weights, read_config
from test_shard import peak_rss

ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: freed memory is returned at once, in any thread
for name in ("small", "large"):  # the small model pays for everything that happens once
    source, copy = (Path(sys.argv[1]) / folder for folder in (name, f"{name}-copy"))
    config, before = read_config(source), peak_rss(reset=True)
    export(config, open_weights(source, config), copy, torch.bfloat16, 0.02)
    exported = peak_rss()
    model = load_model(copy, torch.bfloat16)
    loaded = peak_rss()
    del model
print((exported - before) / 2**20, (loaded - exported) / 2**20)
"""


def test_peak_memory_is_not_twice_the_model(tmp_path):
    """116 MiB of weights, whose largest tensor has 2 MiB (as a parameter, two of them): an export needs the memory of a
    shard (20 MB) and a few tensors, loading needs the memory of the model and a few tensors."""
    for name, n_layers in (("small", 1), ("large", 14)):
        config = ModelConfig(vocab_size=2000, dim=512, n_layers=n_layers, n_heads=8, ffn_dim=2048, max_seq_len=64)
        export_model(Transformer(config).bfloat16(), tmp_path / name)
    done = run_code(MEMORY, ["measure", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    export, load = map(float, done.stdout.split())
    large, copy = tensors_of(tmp_path / "large"), tensors_of(tmp_path / "large-copy")
    size = sum(t.nbytes for t in large.values()) / 2**20
    assert size > 110 and len(find_files(tmp_path / "large-copy")) > 5
    assert export < 20 + 24 and load < size + 6
    assert large.keys() == copy.keys() and all(same_bits(large[n], copy[n]) for n in large)


# ---- export


@pytest.mark.parametrize("name, dtype", [*((n, d) for n in FAMILY for d in ("fp32", "bf16")), ("mixtral", "fp16")])
def test_import_export_import(save, tmp_path, name, dtype):
    """The same names with the same bits; transformers finds every key, no other, and computes equal logits."""
    dtype = DTYPES[dtype]
    source = save(name, dtype)
    model = load_model(source, dtype)
    export_model(model, tmp_path / "single")
    export_model(load_model(tmp_path / "single", dtype), tmp_path / "sharded", shard_gb=2e-5)
    theirs, expected = tensors_of(source), load_theirs(source, dtype)[0](TOKENS).logits
    for folder in (tmp_path / "single", tmp_path / "sharded"):
        ours = tensors_of(folder)
        assert ours.keys() == theirs.keys() and all(same_bits(ours[n], t) for n, t in theirs.items())
        again = dict(load_model(folder, dtype).named_parameters())
        assert all(same_bits(p.detach(), again[n].detach()) for n, p in model.named_parameters())
        loaded, info = load_theirs(folder, "auto")
        assert not any(info.values()), info
        assert {p.dtype for p in loaded.parameters()} == {dtype}
        assert torch.equal(loaded(TOKENS).logits, expected)


class FakeTokenizer:
    bos_id, eos_id = 5, 7

    def __init__(self, *files: Path):
        self.files, self.eos_ids = {file: file.name for file in files}, [7]


@pytest.mark.parametrize("name", FAMILY)
def test_exported_config(save, tmp_path, name):
    """In version 4's keys, which transformers reads to the values that it wrote itself."""
    (tmp_path / "tokenizer.model").write_bytes(b"\0pieces")
    tokenizer = FakeTokenizer(tmp_path / "tokenizer.model")
    source = save(name)
    export_model(load_model(source).bfloat16(), tmp_path / "out", tokenizer=tokenizer)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"rope_parameters", "dtype"} & set(values) and values["torch_dtype"] == "bfloat16"
    if name != "gpt2":
        assert values["rope_theta"] == FAMILY[name].rope_theta
        assert (values["rope_scaling"] or {}).get("rope_type") == (FAMILY[name].rope_scaling and "llama3")
    found, expected = (transformers.AutoConfig.from_pretrained(f).to_dict() for f in (tmp_path / "out", source))
    expected |= {"dtype": found["dtype"], "bos_token_id": 5, "eos_token_id": 7}
    differ = {k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k)}
    assert differ <= {"_name_or_path", "transformers_version", "attn_pdrop", "embd_pdrop", "resid_pdrop"}, differ
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"\0pieces"
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.bos_token_id, generation.eos_token_id) == (5, 7)


def test_export_replaces_only_an_export(save, tmp_path):
    model, other = load_model(save("llama3")), load_model(save("gpt2"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    before = set(os.listdir(tmp_path))
    for replaces in (False, True):
        with pytest.raises(UserError, match="mine exists already"):
            export_model(model, tmp_path / "mine", replaces=replaces)
    assert (tmp_path / "mine" / "thesis.txt").exists() and set(os.listdir(tmp_path)) == before
    export_model(model, tmp_path / "new" / "out")  # makes the folders above
    with pytest.raises(UserError, match="out exists already"):
        export_model(other, tmp_path / "new" / "out")
    export_model(other, tmp_path / "new" / "out", replaces=True)
    assert weights.read_config(tmp_path / "new" / "out") == FAMILY["gpt2"]
    assert os.listdir(tmp_path / "new") == ["out"]
    out = tmp_path / "new" / "out"
    assert (out / "model.safetensors").stat().st_mode & 0o777 == out.stat().st_mode & 0o666


def test_export_that_fails_leaves_the_older_one(monkeypatch, save, tmp_path):
    model = load_model(save("llama3"))
    export_model(model, tmp_path / "out")
    before, listing = tensors_of(tmp_path / "out"), set(os.listdir(tmp_path))

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(weights, "write_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export_model(model, tmp_path / "out", replaces=True)
    after = tensors_of(tmp_path / "out")
    assert all(same_bits(after[n], t) for n, t in before.items()) and set(os.listdir(tmp_path)) == listing


@pytest.mark.parametrize("name, change, message", [
    ("llama3", {"bias": True}, ""), ("llama3", {"norm": "layernorm"}, ""), ("llama3", {"mlp": "gelu"}, ""),
    ("llama3", {"positions": "learned"}, ""), ("qwen3", {"qkv_bias": True}, ""), ("mixtral", {"qk_norm": True}, ""),
    ("gpt2", {"n_kv_heads": 2}, ": GPT-2 has n_kv_heads = n_heads"),
], ids=str)  # fmt: skip
def test_shape_without_a_family(tmp_path, name, change, message):
    with pytest.raises(UserError, match=f"no Hugging Face form{message}"):
        export_model(Transformer(replace(FAMILY[name], **change)), tmp_path / "out")
    assert not os.listdir(tmp_path)


# ---- strictness


Q, EMBED = (f"model.{n}.weight" for n in ("layers.1.self_attn.q_proj", "embed_tokens"))


def change(name: str, function):
    """-> a function that changes a tensor among others."""
    return lambda tensors: tensors | {name: function(tensors[name]).contiguous()}


WRONG = {  # family, change of the tensors, message
    "missing": ("llama3", lambda t: {n: v for n, v in t.items() if n != Q}, f"Missing: '{Q}'. Unexpected: none"),
    "nothing": ("llama3", lambda t: {}, "Missing: 'lm_head.weight'"),
    "extra": ("llama3", lambda t: t | {"model.adapter.weight": torch.zeros(3)}, "Missing: none. Une.*'model.adapter"),
    "escapes": ("llama3", lambda t: t | {"a\nb\x1b[31m": torch.zeros(3)}, r"Unexpected: 'a\\nb\\x1b\[31m'"),
    "biases": ("llama3", lambda t: t | {Q.replace("weight", "bias"): torch.zeros(64)}, r"Unexpected: .*1.self_attn.q"),
    "extra and missing": (
        "llama3", lambda t: {n.replace("q_proj", "query"): v for n, v in t.items()}, "q_proj.*Unexpected: .*query"),
    "wrong shape": ("llama3", change(Q, lambda t: t[:32]), rf"'{Q}' has shape \[32, 64\].*expected \[64, 64\]"),
    "GPT-2 as if linear": ("gpt2", change("transformer.h.0.mlp.c_fc.weight", lambda t: t.T),
                           r"h.0.mlp.c_fc.weight' has shape \[48, 64\].*expected \[64, 48\]"),
    "expert": ("mixtral", change("model.layers.1.block_sparse_moe.experts.3.w2.weight", lambda t: t.T),
               r"experts.3.w2.weight' has shape \[48, 64\].*expected \[64, 48\]"),
    "fewer experts": ("mixtral", lambda t: {n: v for n, v in t.items() if "experts.3" not in n}, "Missing.*experts.3"),
    "fp8": ("llama3", change(Q, lambda t: t.to(torch.float8_e4m3fn)), f"'{Q}' has .*F8_E4M3, expected"),
    "with and without prefix": (
        "llama3", lambda t: t | {strip(Q): t[Q].clone()}, f"'{Q}' is stored a second time, also in"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_other_tensors_are_refused(save, case):
    name, wrong, message = WRONG[case]
    folder = save(name)
    save_file(wrong(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(UserError, match=message) as e:
        load_model(folder)
    assert str(folder) in str(e.value)


INDEX_TEXTS = {
    "no weight_map": ("{}", "it has no weight_map"),
    "weight_map is a list": ('{"weight_map": ["x.safetensors"]}', "it has no weight_map"),
    "a list": ("[]", "holds a list, not an object"),
    "no JSON": ("{", "is damaged"),
}
INDEX_TEXTS |= {
    repr(name): (json.dumps({"weight_map": {"a": name}}), "lacks 1 of 1 files that its index names")
    for name in ("../x.safetensors", "/etc/passwd", "b/x.safetensors", "..", "", 5, ["x"])
}


@pytest.mark.parametrize("case", INDEX_TEXTS)
def test_wrong_index(save, case):
    folder = save("llama3", shard="40KB")
    text, message = INDEX_TEXTS[case]
    (folder / INDEX).write_text(text)
    with pytest.raises(UserError, match=message) as e:
        load_model(folder)
    assert str(folder) in str(e.value)


def test_files_that_are_not_there(save, tmp_path):
    folder = save("llama3", shard="40KB")
    find_files(folder)[2].unlink()
    with pytest.raises(UserError, match="lacks 1 of [0-9]+ files that its index names: 'model-00003-of"):
        load_model(folder)
    (folder / INDEX).unlink()
    with pytest.raises(UserError, match="holds neither model.safetensors nor its index"):
        load_model(folder)
    (folder / "config.json").unlink()
    for missing in (folder, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=re.escape(str(missing))):
            load_model(missing)


class Trap:
    def __reduce__(self):
        return os._exit, (3,)


def test_pickles_are_refused_with_a_conversion_that_works(save, tmp_path):
    """Runs the Python code in the message; a Trap would end this process. Other pickles in the folder do
    not matter."""
    source, folder = save("gpt2"), tmp_path / "pickled"
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    torch.save(reference("gpt2").state_dict(), folder / "pytorch_model.bin")
    torch.save(Trap(), folder / "training_args.bin")
    with pytest.raises(UserError, match="can run code. If you trust its source") as e:
        load_model(folder)
    code = str(e.value).partition("in Python: ")[2]
    exec(code, {"FOLDER": folder, "NEW": tmp_path / "new"})
    assert error(load_model(tmp_path / "new").logits(TOKENS), reference("gpt2")(TOKENS).logits) < 1e-5


# ---- config.json

GPT2_FACTS = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
LLAMA2_FACTS = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
LLAMA3_FACTS = LLAMA2_FACTS | {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "num_key_value_heads": 8, "rope_theta": 500000.0,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.0.dev0", "vocab_size": 128256,
}  # fmt: skip
SCALING = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
           "rope_type": "llama3"}  # fmt: skip
LLAMA31_FACTS = LLAMA3_FACTS | {
    "eos_token_id": [128001, 128008, 128009], "max_position_embeddings": 131072, "mlp_bias": False,
    "rope_scaling": SCALING, "transformers_version": "4.43.0.dev0",
}  # fmt: skip
MIXTRAL_FACTS = LLAMA2_FACTS | {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_experts_per_tok": 2, "num_key_value_heads": 8,
    "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0",
}  # fmt: skip
MISTRAL_FACTS = {key: value for key, value in MIXTRAL_FACTS.items() if not re.search("expert|router", key)} | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 1e6, "vocab_size": 32768,
}  # fmt: skip
QWEN25_FACTS = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_FACTS = QWEN25_FACTS | {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "eos_token_id": 151645, "head_dim": 128,
    "hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 40960, "max_window_layers": 36,
    "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "transformers_version": "4.51.0",
}  # fmt: skip
PUBLISHED = {
    "gpt2": GPT2_FACTS,
    "gpt2-large": GPT2_FACTS | {
        "n_embd": 1280, "n_head": 20, "n_layer": 36, "n_special": 0, "predict_special_tokens": True,
    },
    "llama2-7b": LLAMA2_FACTS,
    "llama3-8b": LLAMA3_FACTS,
    "llama3.1-8b": LLAMA31_FACTS,
    "llama3.1-405b": LLAMA31_FACTS | {
        "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126,
    },
    "llama3.2-1b": LLAMA31_FACTS | {
        "eos_token_id": 128001, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "rope_scaling": SCALING | {"factor": 32.0}, "tie_word_embeddings": True,
    },
    "mixtral-8x7b": MIXTRAL_FACTS,
    "mistral-7b": MISTRAL_FACTS,
    "qwen2.5-0.5b": QWEN25_FACTS,
    "qwen2.5-7b": QWEN25_FACTS | {
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072,
        "tie_word_embeddings": False, "vocab_size": 152064,
    },
    "qwen3-4b": QWEN3_FACTS,
}  # fmt: skip


def read(folder: Path, values: dict | str) -> ModelConfig:
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return weights.read_config(folder)


def newer_keys(values: dict) -> dict:
    """As version 5 writes it."""
    rope = {"rope_type": "default"} | (values.get("rope_scaling") or {})
    rope["rope_theta"] = values.get("rope_theta", 10000.0)
    rest = {k: v for k, v in values.items() if k not in ("rope_scaling", "rope_theta", "torch_dtype")}
    return rest | {"dtype": "bfloat16"} | ({} if values["model_type"] == "gpt2" else {"rope_parameters": rope})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config(tmp_path, name):
    """The folder's shape is the row's, but for the initialisation, which is ours."""
    for values in (PUBLISHED[name], newer_keys(PUBLISHED[name])):
        assert replace(read(tmp_path, values), init_std=MODELS[name].init_std) == MODELS[name]


@pytest.mark.parametrize("name", MODELS)
def test_config_round_trip(tmp_path, name):
    values = config_json(MODELS[name], torch.bfloat16)
    assert read(tmp_path, values) == MODELS[name]
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert read(tmp_path, json.dumps(theirs, default=str)) == MODELS[name]


BASE = {
    "llama": LLAMA31_FACTS, "gpt2": GPT2_FACTS, "mixtral": MIXTRAL_FACTS, "mistral": MISTRAL_FACTS,
    "qwen2": QWEN25_FACTS, "qwen3": QWEN3_FACTS,
}  # fmt: skip
SAME = [  # a family, harmless changes
    ("llama", {"num_key_value_heads": 8, "head_dim": 128}),
    ("llama", {"head_dim": None, "mlp_bias": False, "sliding_window": None, "partial_rotary_factor": 1.0}),
    ("llama", {"hidden_act": "swish", "pad_token_id": 128004, "use_cache": False, "attention_dropout": 0.1}),
    ("llama", {"_name_or_path": "x", "_attn_implementation_autoset": True, "quantization_config": None}),
    ("llama", {"is_causal": True, "pruned_heads": {}, "chunk_size_feed_forward": 0, "bad_words_ids": None}),
    ("llama", {"rope_scaling": {**{k: v for k, v in SCALING.items() if k != "rope_type"}, "type": "llama3"}}),
    ("gpt2", {"activation_function": "gelu_pytorch_tanh", "n_inner": None, "gradient_checkpointing": False}),
    ("gpt2", {"n_inner": 3072, "scale_attn_weights": True, "reorder_and_upcast_attn": False, "resid_pdrop": 0}),
    ("mixtral", {"router_jitter_noise": 0.0, "output_router_logits": True}),
    ("qwen2", {"layer_types": ["full_attention"] * 24, "sliding_window": 4096, "use_sliding_window": None}),
    ("qwen3", {"max_window_layers": 1, "sliding_window": 4096}),
]


@pytest.mark.parametrize("kind, changes", SAME, ids=str)
def test_harmless_fields(tmp_path, kind, changes):
    assert read(tmp_path, BASE[kind] | changes) == read(tmp_path, BASE[kind])


@pytest.mark.parametrize("kind", BASE)
def test_absent_fields_have_transformers_defaults(tmp_path, kind):
    """Absent keys have the values that transformers' configuration class fills in."""
    values = {k: BASE[kind][k] for k in ("model_type", *SHORT[kind])} | THEIRS.get(kind, {})
    found = read(tmp_path, values)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert found == read(tmp_path, json.dumps(theirs.to_dict(), default=str))


YARN = {"rope_type": "yarn", "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 500000.0}
UNKNOWN = {
    "logits_scaling": 8.0, "logit_scale": 0.0625, "final_logit_softcapping": 30.0, "use_qk_norm": True,
    "residual_multiplier": 0.22, "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "rope_interleaved": True,
    "auto_map": {"AutoModel": "modeling.py"},
    "layer_types": ["sliding_attention"], "no_rope_layers": [1], "num_experts": 8, "": 1,
}  # fmt: skip
SHORT = {
    "llama": ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head"),
    "mixtral": ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
}
SHORT |= dict.fromkeys(("mistral", "qwen2", "qwen3"), SHORT["llama"])
THEIRS = {"mistral": {"sliding_window": None}, "qwen2": {"hidden_size": 4096, "num_attention_heads": 32}}


def scaling(**changes) -> dict:
    return {"rope_scaling": {k: v for k, v in (SCALING | changes).items() if v is not ...}}


FALSY = {  # keys that may mean something where they are null, false, 0 or empty; GPT-2's are aliases in transformers
    "llama": {"attn_logit_softcapping": None, "use_rms_norm": False, "no_such_key": "", "layer_types": 0, "bias": {}},
    "gpt2": {"hidden_size": 0, "num_attention_heads": None, "num_hidden_layers": 0.0, "max_position_embeddings": False},
}
REFUSED = [  # a family, changes of its config.json above (...: without the key), the message
    *(("llama", {"model_type": m}, f"model_type {m!r} is not supported; supported are llama, mistral, .*gpt2")
      for m in ("qwen3_moe", "gemma", "Llama", "", None, 3, {})),
    *(("llama", scaling(rope_type=t), f"rope_type is '{t}' .supported: 'default'") for t in ("dynamic", "longrope")),
    ("llama", scaling(rope_type=..., type="yarn"), "type is 'yarn' .supported: 'default'"),
    ("llama", {"rope_scaling": None, "rope_parameters": YARN}, "rope_type is 'yarn' .supported: 'default'"),
    ("llama", {"rope_scaling": None, "rope_parameters": {"full_attention": DEFAULT}}, "full_attention"),
    *(("llama", scaling(**{key: ...}), f"lacks {key}") for key in SCALING if key != "rope_type"),
    *(("llama", scaling(factor=v), "positive") for v in (0, "8", True, [8.0], float("nan"), float("inf"))),
    ("llama", scaling(low_freq_factor=4.0), "high_freq_factor must be above low_freq_factor"),
    *(("llama", {"rope_theta": v}, "rope_theta|positive") for v in (0, -1, "5e5", True, False, 10**400)),
    ("llama", {"rope_scaling": "llama3"}, "rope_scaling is 'llama3', expected an object"),
    *(("llama", {"hidden_act": v}, f"hidden_act is {v!r} .*'silu'") for v in ("gelu", "relu", "gelu_new", None)),
    *(("gpt2", {"activation_function": v}, f"activation_function is '{v}'") for v in ("gelu", "relu", "silu")),
    *((kind, {key: value}, f"{key} is {value!r}") for kind, key, value in (
        ("mixtral", "sliding_window", 4096), ("llama", "attention_bias", True), ("llama", "mlp_bias", True),
        ("mixtral", "router_jitter_noise", 0.1), ("llama", "partial_rotary_factor", 0.5),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True), ("gpt2", "scale_attn_weights", False),
        ("gpt2", "add_cross_attention", True), ("llama", "is_encoder_decoder", True))),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config is .*gptq"),
    *(("llama", {key: value}, f"{key} is .*supported: 'none'") for key, value in UNKNOWN.items()),
    *((kind, {key: value}, f"{key} is .*supported: 'none'") for kind, keys in FALSY.items()
      for key, value in keys.items()),
    *(("mixtral", {"is_causal": value}, "is_causal is .*supported: True") for value in (None, False, 0)),
    ("gpt2", {"num_key_value_heads": 4}, "num_key_value_heads is 4 .*supported: 'none'"),
    *((kind, {key: ...}, f"lacks {key}") for kind, keys in SHORT.items() for key in keys),
    *(("llama", {key: value}, f"{key} is {re.escape(repr(value))}, expected a positive whole number") for key in (
        "vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings") for value in (
        "64", True, 64.0, [64])),
    *((kind, {key: -1}, f"{key} is -1, expected a positive") for kind, keys in SHORT.items() for key in keys),
    *(("llama", {"tie_word_embeddings": value}, "tie_word_embeddings is .*true or false") for value in (1, "false")),
    ("mixtral", {"num_experts_per_tok": 9}, "config.json: "),
    *(("mistral", {"sliding_window": value}, "sliding_window is 4096 .*supported: None") for value in (4096, ...)),
    *((kind, {"use_sliding_window": True}, "use_sliding_window is True .*: False") for kind in ("qwen2", "qwen3")),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*supported: 'none'"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("llama", {"vocab_size": 2**40}, "config.json: no machine holds it: .* 1099511627776 x 4096"),
    ("llama", {"num_key_value_heads": 5}, "n_heads 32 does not divide by n_kv_heads 5"),
    ("llama", {"hidden_size": 4100}, "dim 4100 does not divide by n_heads 32"),
]  # fmt: skip


@pytest.mark.parametrize("kind, changes, message", REFUSED, ids=lambda value: str(value)[:60])
def test_refused_configs(tmp_path, kind, changes, message):
    with pytest.raises(UserError, match=message) as e:
        read(tmp_path, {k: v for k, v in (BASE[kind] | changes).items() if v is not ...})
    assert str(tmp_path / "config.json") in str(e.value)


def test_dropout_is_named(tmp_path):
    read(tmp_path, GPT2_FACTS)
    note = dropout_note(tmp_path / "config.json")
    assert all(f"{k!r}: 0.1" in note for k in ("attn_pdrop", "embd_pdrop", "resid_pdrop")) and "\n" not in note
    read(tmp_path, LLAMA31_FACTS | {"attention_dropout": 0.25})
    assert "'attention_dropout': 0.25" in dropout_note(tmp_path / "config.json")
    read(tmp_path, LLAMA31_FACTS)
    assert dropout_note(tmp_path / "config.json") == ""
