"""Hugging Face folders (safetensors and config.json), read and written: GPT-2, Llama, Mistral, Mixtral and Qwen.

FAMILIES describes the model families as data. For each of our parameters it names the tensors that the file stores:
one, several fused along dim 0 (q, k, v; gate, up), or one or two per expert, which we stack. Both directions are
strict: every tensor must be present with its shape, and no other tensor may be. No value changes, so an export of an
imported folder has the same bits. RoPE keeps Hugging Face's half-split layout, so nothing is permuted.

The safetensors library checks, maps and writes the files. An import needs the memory of the model and one tensor, an
export the memory of one shard. If a disk fails or a file is truncated during a read, SIGBUS kills the process.

Sources: configuration and modelling files of transformers 4 and 5; github.com/huggingface/safetensors."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import MISSING, asdict, fields
from functools import partial, reduce
from pathlib import Path
from typing import NamedTuple

# first: it finds the Python that has torch
from lib.errors import (
    UserError,
    amount,
    describe_content,
    free_space,
    local_path,
    read_json,
    read_object,
    write_json,
)

import torch  # isort: skip
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lib import lora
from lib.lora import Read
from lib.machine import allocate
from lib.tokenizer import write_files
from model import Transformer
from shapes import ModelConfig, RopeScaling
from shard import ALONE, Ranks, fill_parameters, on_all, on_first_rank

# ---- families

# Our parameter | the tensor in the file | its parts, if several tensors are fused in this order. i: layer, e: expert.
_LLAMA = """
embed_tokens.weight                           model.embed_tokens.weight
layers.{i}.input_layernorm.weight             model.layers.{i}.input_layernorm.weight
layers.{i}.self_attn.qkv_proj.weight          model.layers.{i}.self_attn.{part}_proj.weight  q k v
layers.{i}.self_attn.qkv_proj.bias            model.layers.{i}.self_attn.{part}_proj.bias   q k v
layers.{i}.self_attn.q_norm.weight            model.layers.{i}.self_attn.q_norm.weight
layers.{i}.self_attn.k_norm.weight            model.layers.{i}.self_attn.k_norm.weight
layers.{i}.self_attn.o_proj.weight            model.layers.{i}.self_attn.o_proj.weight
layers.{i}.post_attention_layernorm.weight    model.layers.{i}.post_attention_layernorm.weight
layers.{i}.mlp.gate_up_proj.weight            model.layers.{i}.mlp.{part}_proj.weight       gate up
layers.{i}.mlp.down_proj.weight               model.layers.{i}.mlp.down_proj.weight
layers.{i}.mlp.gate.weight                    model.layers.{i}.block_sparse_moe.gate.weight
layers.{i}.mlp.gate_up_proj                   model.layers.{i}.block_sparse_moe.experts.{e}.w{part}.weight  1 3
layers.{i}.mlp.down_proj                      model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight
norm.weight                                   model.norm.weight
lm_head.weight                                lm_head.weight
"""
_GPT2 = """
embed_tokens.weight                           transformer.wte.weight
embed_positions.weight                        transformer.wpe.weight
layers.{i}.input_layernorm.KIND               transformer.h.{i}.ln_1.KIND
layers.{i}.self_attn.qkv_proj.KIND            transformer.h.{i}.attn.c_attn.KIND
layers.{i}.self_attn.o_proj.KIND              transformer.h.{i}.attn.c_proj.KIND
layers.{i}.post_attention_layernorm.KIND      transformer.h.{i}.ln_2.KIND
layers.{i}.mlp.up_proj.KIND                   transformer.h.{i}.mlp.c_fc.KIND
layers.{i}.mlp.down_proj.KIND                 transformer.h.{i}.mlp.c_proj.KIND
norm.KIND                                     transformer.ln_f.KIND
lm_head.weight                                lm_head.weight
"""
# Field of ModelConfig | key in config.json.
_LLAMA_KEYS = """
vocab_size              vocab_size
dim                     hidden_size
n_layers                num_hidden_layers
n_heads                 num_attention_heads
n_kv_heads              num_key_value_heads
head_dim                head_dim
ffn_dim                 intermediate_size
max_seq_len             max_position_embeddings
norm_eps                rms_norm_eps
tied                    tie_word_embeddings
init_std                initializer_range
rope_theta              rope_theta
"""
_MIXTRAL_KEYS = """
n_experts               num_local_experts
top_k                   num_experts_per_tok
router_aux_loss_coef    router_aux_loss_coef
"""
_GPT2_KEYS = """
vocab_size              vocab_size
dim                     n_embd
n_layers                n_layer
n_heads                 n_head
ffn_dim                 n_inner
max_seq_len             n_positions
norm_eps                layer_norm_epsilon
tied                    tie_word_embeddings
init_std                initializer_range
"""


def _pairs(text):
    return dict(re.findall(r"(\S+) +(.+)", text))


def _values(text):
    return {key: json.loads(f"[{values}]") for key, values in _pairs(text).items()}


def _table(text):
    return {ours: theirs.split() for ours, theirs in _pairs(text).items()}


class Family(NamedTuple):
    """shape: fields of ModelConfig; other families list only the differences from Llama's. defaults: transformers'
    values for absent keys, where ModelConfig has another default. names: of the tensors; may include tensors that only
    another family has. keys: of config.json."""

    architecture: str
    shape: dict
    defaults: dict
    names: dict = _table(_LLAMA)
    keys: dict = _pairs(_LLAMA_KEYS)


# model_type | the fields of Family
_FAMILIES = """
llama    "LlamaForCausalLM", {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": false, \
          "qkv_bias": false, "qk_norm": false, "family": ""}, \
          {"hidden_act": "silu", "rope_scaling": null, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
mistral  "MistralForCausalLM", {"family": "mistral"}, \
          {"hidden_act": "silu", "rope_scaling": null, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, \
          "num_key_value_heads": 8, "sliding_window": 4096}
qwen2    "Qwen2ForCausalLM", {"qkv_bias": true}, \
          {"hidden_act": "silu", "rope_scaling": null, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, \
          "num_key_value_heads": 32, "use_sliding_window": false}
qwen3    "Qwen3ForCausalLM", {"qk_norm": true}, \
          {"hidden_act": "silu", "rope_scaling": null, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, \
          "num_key_value_heads": 32, "use_sliding_window": false, "head_dim": 128}
mixtral  "MixtralForCausalLM", {"mlp": "moe"}, \
          {"hidden_act": "silu", "rope_scaling": null, "max_position_embeddings": 131072, "num_key_value_heads": 8, \
          "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "rope_theta": 1e6}
gpt2     "GPT2LMHeadModel", {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": true}, \
          {"activation_function": "gelu_new", "n_inner": 0, "n_positions": 1024, "tie_word_embeddings": true, \
          "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
"""  # n_inner 0 means 4 * dim
FAMILIES = {kind: Family(*row) for kind, row in _values(_FAMILIES).items()}
FAMILIES["mixtral"] = FAMILIES["mixtral"]._replace(keys=_pairs(_LLAMA_KEYS + _MIXTRAL_KEYS))
FAMILIES["gpt2"] = FAMILIES["gpt2"]._replace(
    names=_table(_GPT2.replace("KIND", "weight") + _GPT2.replace("KIND", "bias")), keys=_pairs(_GPT2_KEYS)
)
Slices = tuple[slice, ...]
# Masks and frequencies that older versions of transformers stored, and copies of tied embeddings.
IGNORED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|^lm_head\.weight$")


def family(config: ModelConfig) -> str:
    """The model_type of a shape. UserError: no family has this shape."""
    plain = FAMILIES["llama"].shape
    shape = {field: getattr(config, field) for field in plain}
    equal_heads = config.n_kv_heads == config.n_heads and config.n_heads * config.head_dim == config.dim
    for name, row in FAMILIES.items():
        if plain | row.shape == shape and (name != "gpt2" or equal_heads):
            return name
    raise UserError(
        f"This model has no Hugging Face form: no supported family has {shape}; GPT-2 also needs n_kv_heads = n_heads"
        " and head_dim = dim / n_heads"
    )


class Piece(NamedTuple):
    """A tensor in the file. place: its slices of our parameter. transposed: GPT-2 stores its linears as [in, out]."""

    name: str
    place: Slices
    transposed: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape in the file; an expert lacks our first dimension there."""
        shape = tuple(s.stop - s.start for s in self.place[-2:])
        return shape[::-1] if self.transposed else shape


def pieces(config: ModelConfig) -> dict[str, list[Piece]]:
    """The tensors in the file for each of our parameters, without a tied lm_head."""
    kind = family(config)
    with torch.device("meta"):
        parameters = Transformer(config).named_parameters()
    return {name: _pieces_of(name, tuple(p.shape), kind, config) for name, p in parameters}


def _pieces_of(name, shape, kind, config):
    layer = re.search(r"\d+|$", name)[0]
    theirs, *parts = FAMILIES[kind].names[re.sub(r"\d+", "{i}", name)]
    parts = parts or [""]
    height, *widths = shape[-2:]
    rows = [height // len(parts)] * len(parts)
    if len(parts) == 3:
        rows = [config.head_dim * n for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
    experts = [(slice(e, e + 1),) for e in range(shape[0])] if len(shape) == 3 else [()]
    transposed = kind == "gpt2" and name.endswith("_proj.weight")
    out, start = [], 0
    for part, n in zip(parts, rows, strict=True):
        place = slice(start, start + n), *(slice(0, width) for width in widths)
        for e, expert in enumerate(experts):
            out.append(Piece(theirs.format(i=layer, e=e, part=part), expert + place, transposed))
        start += n
    return out


# ---- safetensors


class TensorFile:
    """A safetensors file, checked by the library. entries: (dtype, shape) by name."""

    def __init__(self, path: Path):
        self.path, head = path, b""
        try:
            with open(path, "rb") as start:
                head = start.read(512)
            file = safe_open(path, "pt")
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}  # mapped, not read
        except (OSError, SafetensorError) as e:
            content = describe_content(head) or "missing, damaged, cut short or not a safetensors file"
            raise UserError(f"{path} is {content}: {str(e)[:500]}") from None
        self.entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}

    def read(self, name: str, slices: Slices) -> Tensor:
        """Values in the file's dtype. Copy them soon: they are pages of the file, which is mapped for each call because
        pages that were read count as this process's memory."""
        return safe_open(self.path, "pt").get_slice(name)[slices]


def assemble(slices: Slices, whole: tuple[int, ...], dtype: torch.dtype, parts: Iterable[tuple]) -> Tensor:
    """Values of a tensor of shape `whole` that is stored in parts (place, read), where place is the part's slices of
    the tensor. Calls read(slices of the part) for each part that it needs."""
    wanted = [range(n)[s] for s, n in zip(slices, whole, strict=True)]
    out, filled = torch.empty(list(map(len, wanted)), dtype=dtype), 0
    for place, read in parts:
        common = [range(max(r.start, s.start), min(r.stop, s.stop)) for r, s in zip(wanted, place, strict=True)]
        if all(common):
            values = read(_shift(common, place))
            out[_shift(common, wanted)] = values
            filled += values.numel()
    assert filled == out.numel(), f"the stored parts of a tensor of shape {list(whole)} do not cover it"
    return out


def _shift(ranges, origins):
    """The ranges as slices that count from the starts of the origins."""
    return tuple(slice(r.start - o.start, r.stop - o.start) for r, o in zip(ranges, origins, strict=True))


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file, with the permissions of its folder, and syncs it to the disk. OSError: why the disk
    refuses it, and what is needed and free."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as e:
        code = int(re.search(r"os error (\d+)|$", str(e))[1] or errno.EIO)
        path.unlink(missing_ok=True)
        room = f"it needs {amount(size)}, {amount(free_space(path)[0])} are free"
        raise OSError(code, f"{os.strerror(code)}, {room}", str(path)) from None
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library lets only the owner read it
    with open(path, "rb") as file:
        os.fsync(file.fileno())


# ---- reading


def find_files(folder: Path) -> list[Path]:
    """The safetensors files with a folder's weights: model.safetensors, or exactly the files that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise UserError(
            f"{folder} holds neither model.safetensors nor its index (if --skip_model left them out, `python"
            " download.py ORG/NAME` adds them): only safetensors are loaded, as pickles can run code. If you trust its"
            " source, convert it in Python: from transformers import AutoModelForCausalLM as M;"
            " M.from_pretrained(FOLDER, dtype='auto').save_pretrained(NEW)"
        )
    table = read_object(index).get("weight_map")
    if not isinstance(table, dict):
        raise UserError(f"{index}: it has no weight_map")
    names = set(map(str, table.values()))
    if missing := names.difference(os.listdir(folder)):  # a name with a slash in it is never listed
        raise UserError(f"{folder} lacks {len(missing)} files that its index names: {sorted(missing)[:4]}")
    return [folder / name for name in sorted(names)]


def open_weights(folder: Path, config: ModelConfig) -> Read:
    """Checks names, shapes and dtypes of a folder's weights against the model -> read(name, slices) of our parameters,
    in the files' dtype (the widest dtype of a fused parameter's tensors)."""
    _check_config(folder, config)
    return _reader(folder, pieces(config), find_files(folder))


def _reader(folder, plan, paths):
    """Checks the tensors of a folder's files against the plan -> read(name, slices) of the plan's parameters."""
    expected = {piece.name: piece.stored for row in plan.values() for piece in row}
    dtypes, reads = {}, {}
    for file in map(TensorFile, paths):
        for name, (dtype, shape) in file.entries.items():
            # Files that were saved without the head lack the names' first part.
            full = next((n for n in (f"model.{name}", f"transformer.{name}") if n in expected), name)
            if full not in expected and IGNORED.search(name):
                continue
            if full in reads:
                raise UserError(f"{file.path}: {full!r} is stored a second time")
            is_float = dtype in (torch.float32, torch.float16, torch.bfloat16)
            if full in expected and (not is_float or shape != expected[full]):
                raise UserError(
                    f"{file.path}: {name!r} has shape {list(shape)} and dtype {dtype}, expected {list(expected[full])}"
                    " in float32, float16 or bfloat16"
                )
            dtypes[full], reads[full] = dtype, partial(file.read, name)
    missing, extra = sorted(expected.keys() - reads), sorted(reads.keys() - expected)
    if missing or extra:
        raise UserError(
            f"{folder} does not fit the model. Missing {len(missing)}: {missing[:4]}. Unexpected {len(extra)}:"
            f" {extra[:4]}"
        )

    def read_piece(piece, slices):
        values = reads[piece.name](slices[::-1] if piece.transposed else slices[-2:])
        return values.T if piece.transposed else values

    def read(name, slices):
        row = plan[name]
        dtype = reduce(torch.promote_types, (dtypes[piece.name] for piece in row))
        parts = ((piece.place, partial(read_piece, piece)) for piece in row)
        return assemble(slices, [s.stop for s in row[-1].place], dtype, parts)

    return read


def _check_config(folder, config):
    """Refuses weights with the right shapes of another model: a wrong rope_theta would show only in the results."""
    stored = asdict(read_config(folder))
    ignored = "init_std", "router_aux_loss_coef", "max_seq_len"  # they change no output, or a shape shows them
    differ = {k: v for k, v in asdict(config).items() if k not in ignored and stored[k] != v}
    if differ:
        raise UserError(f"{folder / 'config.json'} differs from the model, which has {differ}; use --model {folder}")


def load_model(
    folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """The model of a folder or of a downloaded hub id, with parameters and computation in `dtype`."""
    folder = local_path(str(folder), "folder")
    config = read_config(folder)
    read, model = open_weights(folder, config), empty_model(config, dtype, device)
    fill_parameters(model, read)
    return model


def empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """A model for evaluation with uninitialised parameters in `dtype`."""
    with torch.device("meta"):
        model = Transformer(config, dtype).to(dtype)
    allocate(model, device)
    model.tie_weights()
    return model.eval()


# ---- PEFT adapters

# Fields of adapter_config.json, and the values that lib/lora.py supports; others may be null, false, 0 or empty.
ADAPTER_MEANS_OURS = _values("""
peft_type            "LORA"
bias                 "none"
init_lora_weights    true, false, null, "gaussian", "eva"
""")
# Keys that may have any value. All others must be null, false, 0 or empty.
ADAPTER_HARMLESS = """
auto_mapping base_model_name_or_path revision peft_version task_type inference_mode r lora_alpha lora_dropout
target_modules exclude_modules megatron_core qalora_group_size
"""


def adapter_pieces(config) -> dict[str, list[Piece]]:
    """The tensors in PEFT's file for each parameter of the adapters. config: a Config."""
    out, base = {}, pieces(config.model_config)
    for name, layer in lora.layers(lora.meta_model(config)).items():
        a, b = out[f"{name}.lora_A"], out[f"{name}.lora_B"] = [], []
        start = 0
        for piece, (rows, rank) in zip(base[f"{name}.weight"], layer.lora_blocks, strict=True):
            if rank:
                stem = f"base_model.model.{piece.name.removesuffix('weight')}lora"
                above = len(a) * rank
                a.append(Piece(f"{stem}_A.weight", (slice(above, above + rank), slice(0, layer.in_features))))
                b.append(Piece(f"{stem}_B.weight", (slice(start, start + rows), slice(0, rank))))
                start += rows
    return out


def open_adapter(folder: Path, config) -> Read:
    """Checks a PEFT adapter against a run's flags -> read(name, slices) of lora.py's parameters. config: a Config."""
    path = folder / "adapter_config.json"
    values = read_object(path)
    in_use = {key: value for key, value in values.items() if value}
    _refuse_unknown(in_use, {*ADAPTER_HARMLESS.split()}, path, ADAPTER_MEANS_OURS)
    path = folder / "adapter_model.safetensors"
    targets = set(re.findall(r"(\w+)_proj\.lora_A\.weight$", "\n".join(TensorFile(path).entries), re.M))
    theirs = values.get("r"), values.get("lora_alpha"), targets
    if theirs != (config.lora, config.lora_alpha, set(config.lora_targets)):
        raise UserError(
            f"--lora_weights {folder}: the adapter does not match the flags; give --lora {theirs[0]} --lora_alpha"
            f" {theirs[1]} --lora_targets {','.join(sorted(targets))}"
        )
    return _reader(folder, adapter_pieces(config), [path])


def export_adapter(config, read: Read, folder: Path) -> None:
    """Writes the folder that PEFT loads: adapter_config.json and adapter_model.safetensors, in fp32. config: a Config;
    read: of lib/lora.py's parameters."""
    rows = [(piece, name) for name, row in adapter_pieces(config).items() for piece in row]
    temporary = folder / "adapter_model.safetensors.tmp"
    folder.mkdir(exist_ok=True)
    write_file(temporary, _shard(rows, torch.float32, read))
    temporary.rename(folder / "adapter_model.safetensors")
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.weights or None,
        "r": config.lora,
        "lora_alpha": config.lora_alpha,
        "target_modules": [f"{target}_proj" for target in config.lora_targets],
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", content)


# ---- config.json

# Keys that change the computation | the values that model.py implements. Exports write the first one.
MEANS_OURS = _values("""
hidden_act                         "silu", "swish"
activation_function                "gelu_new", "gelu_pytorch_tanh", "gelu_fast"
attention_bias                     false
mlp_bias                           false
use_sliding_window                 false, null
sliding_window                     null
router_jitter_noise                0, null
scale_attn_weights                 true
scale_attn_by_inverse_layer_idx    false
add_cross_attention                false
is_encoder_decoder                 false
partial_rotary_factor              1, null
rope_scaling                       null
rope_type                          "default", "llama3", null
type                               "default", "llama3", null
is_causal                          true
attn_pdrop                         0.0
embd_pdrop                         0.0
resid_pdrop                        0.0
""")
# Keys that change nothing in our forward or backward pass.
HARMLESS = """
model_type architectures torch_dtype dtype transformers_version use_cache pretraining_tp n_ctx n_special
predict_special_tokens output_past bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id id2label label2id
num_labels task_specific_params problem_type finetuning_task is_decoder gradient_checkpointing max_length
output_router_logits reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels
do_sample temperature top_p top_k return_dict output_hidden_states output_attentions max_sequence_length
max_window_layers is_llama_config transformers.js_config unsloth_version unsloth_fixed
"""
# Keys that change nothing while they are null, false, 0 or empty.
HARMLESS_WHEN_OFF = """
quantization_config auto_map pruned_heads chunk_size_feed_forward cross_attention_hidden_size tie_encoder_decoder
torchscript use_bfloat16 tf_legacy_loss use_mrope use_qk_norm rope_interleaved rope_parameters rope_scaling
tokenizer_class prefix decoder_start_token_id min_length early_stopping diversity_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids output_scores return_dict_in_generate forced_bos_token_id
forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
# rope_type -> RopeScaling's fields | keys in config.json
ROPE_KEYS = {
    "llama3": _pairs("""
factor                factor
low_freq_factor       low_freq_factor
high_freq_factor      high_freq_factor
original_seq_len      original_max_position_embeddings
"""),
}
EXPECTED = {int: "a positive whole number", float: "a positive number", bool: "true or false"}


def read_config(folder: Path) -> ModelConfig:
    """The shape in a folder's config.json, written by transformers 4 or 5. Refuses, by name, keys that model.py does
    not implement."""
    path = folder / "config.json"
    values = read_object(path)
    kind = values.get("model_type")
    if str(kind) not in FAMILIES:
        raise UserError(f"{path}: model_type {kind!r} is not supported; supported are {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    rope_kind = "" if kind == "gpt2" else _flatten_rope(values, path)
    rope_keys = ROPE_KEYS.get(rope_kind, {})
    known = {*family.keys.values(), *rope_keys.values()}
    if "use_sliding_window" in family.defaults:  # it must be off, so the window's size does not matter
        known.add("sliding_window")
    if re.fullmatch(r"(\W*full_attention)+\W*", str(values.get("layer_types"))):
        known.add("layer_types")
    _refuse_unknown(family.defaults | values, known, path)
    shape = {}
    for field in fields(ModelConfig):
        if key := family.keys.get(field.name):
            default = family.defaults.get(key, field.default)
            shape[field.name] = _read_field(values, key, field.type, default, path)
    shape["ffn_dim"] = shape["ffn_dim"] or 4 * shape["dim"]
    numbers = {ours: _read_field(values, key, float, MISSING, path) for ours, key in rope_keys.items()}
    try:
        return ModelConfig(
            **shape, **family.shape, rope_scaling=RopeScaling(kind=rope_kind, **numbers) if numbers else None
        )
    except ValueError as e:
        raise UserError(f"{path}: {e}") from None


def _flatten_rope(values, path):
    """Moves rope_parameters (transformers 5) or rope_scaling (4) one level up -> its rope_type."""
    rope = values.pop("rope_parameters", None) or values.pop("rope_scaling", None) or {}
    if not isinstance(rope, dict):
        raise UserError(f"{path}: rope_parameters or rope_scaling is {rope!r}, expected an object")
    values |= rope
    return str(rope.get("rope_type") or rope.get("type"))


def _refuse_unknown(values, known, path, supported=MEANS_OURS):
    """Refuses keys that may change the computation. known: keys that are checked elsewhere, or harmless."""
    known = known.union(HARMLESS.split(), (key for key in HARMLESS_WHEN_OFF.split() if not values.get(key)))
    wrong = [
        f"{key} is {value!r}"[:90] + f" (supported: {supported.get(key, ['none'])[0]!r})"
        for key, value in values.items()
        if key not in known and key[:1] != "_" and not _is_dropout(key) and value not in supported.get(key, ())
    ]
    if wrong:
        raise UserError(f"{path}: {'; '.join(wrong)}. Remove keys that do not change the computation")


def _read_field(values, key, kind, default, path):
    value = values.get(key)
    if value is None and default is not MISSING:
        return default
    least = 0 if key == "router_aux_loss_coef" else 2**-149  # 0 switches the balancing loss off
    if type(value) not in ((int, float) if kind is float else (kind,)) or not (kind is bool or least <= value < 2**53):
        raise UserError(f"{path}: {key} is {value!r}, expected {EXPECTED[kind]}")
    return kind(value)


def _is_dropout(key):
    return re.search("dropout|_pdrop$", key)


def dropout_note(path: Path) -> str:
    """A sentence that names the dropout rates of a JSON file, which are not applied; empty if there are none."""
    rates = [f"{k!r}: {v!r}" for k, v in read_object(path).items() if _is_dropout(k) and v]
    return f"Dropout is not applied: {', '.join(rates)}" if rates else ""


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict:
    """The config.json of a shape, with keys that transformers 4 and 5, vLLM and llama.cpp read. UserError: no family
    has this shape."""
    kind = family(config)
    row = FAMILIES[kind]
    out = {"architectures": [row.architecture], "model_type": kind, "torch_dtype": str(dtype)[6:]}
    out |= {key: getattr(config, ours) for ours, key in row.keys.items()}
    out |= {key: MEANS_OURS[key][0] for key in row.defaults if key in MEANS_OURS}
    if scaling := config.rope_scaling:
        numbers = {key: getattr(scaling, ours) for ours, key in ROPE_KEYS[scaling.kind].items()}
        out["rope_scaling"] = {"rope_type": scaling.kind} | numbers
    return out


# ---- writing


def export(
    config: ModelConfig, read: Read, folder: Path, dtype: torch.dtype, shard_gb: float = 5.0, tokenizer=None,
    replaces: bool = False, ranks: Ranks = ALONE, talks: bool = False,
) -> None:  # fmt: skip
    """Writes a Hugging Face folder with values rounded to `dtype`. Each shard of at most shard_gb GB (10^9 bytes; a
    larger tensor has its own file) is written by one rank. The folder gets its name when it is complete. replaces:
    replace an earlier export. talks: the model was trained on conversations, so the folder gets their template.
    UserError: no family has this shape. All ranks must call; an error on one rank is raised on all."""
    from huggingface_hub import split_state_dict_into_shards_factory

    rows = {piece.name: (piece, name) for name, row in pieces(config).items() for piece in row}
    split = split_state_dict_into_shards_factory(
        rows,
        get_storage_size=lambda row: math.prod(row[0].stored) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(shard_gb * 1e9),
    )
    folder = folder.absolute()
    temporary = folder.with_name(f"{folder.name}.tmp")

    def begin():
        refuse_in_the_way(folder, replaces)
        shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
        temporary.mkdir(parents=True)

    def write_shards():
        for file, names in [*split.filename_to_tensors.items()][ranks.rank :: ranks.world_size]:
            write_file(temporary / file, _shard([rows[name] for name in names], dtype, read))

    def finish():
        _write_json_files(temporary, split, config_json(config, dtype), tokenizer, config.chat_format * talks)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)

    on_first_rank(begin, ranks)
    try:
        on_all(write_shards, ranks)
        on_first_rank(finish, ranks)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _shard(rows, dtype, read):
    """The tensors of a file. rows: each piece, and our parameter that holds its values."""
    tensors = {}
    for piece, name in rows:
        values = read(name, piece.place).to(dtype)
        if dtype == torch.float16 and values.isinf().any():
            raise UserError(f"{piece.name} holds values beyond float16's range: use bf16 or fp32")
        tensors[piece.name] = (values.T if piece.transposed else values.reshape(piece.stored)).contiguous()
    return tensors


def _write_json_files(folder, split, config, tokenizer, chat_format):
    """Writes the tokenizer's files, the index, config.json and generation_config.json."""
    ids = write_files(tokenizer, folder, chat_format) if tokenizer else {"bos_token_id": None, "eos_token_id": None}
    generation = folder / "generation_config.json"
    write_json(generation, read_json(generation) | ids)  # there may be one from the tokenizer's folder
    write_json(folder / "config.json", config | ids)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


def refuse_in_the_way(folder: Path, replaces: bool) -> None:
    """Refuses an export to a folder with contents, unless it replaces an earlier export."""
    is_export = replaces and (folder / "generation_config.json").exists()
    if folder.exists() and not is_export and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already: move it away, or give another folder")


def export_model(model: Transformer, folder: Path | str, shard_gb: float = 5, **how) -> None:
    """Writes an unsharded model as a Hugging Face folder, in its parameters' dtype. how: as for export."""
    dtype = next(model.parameters()).dtype
    export(model.config, lambda n, s: model.get_parameter(n).detach()[s].cpu(), Path(folder), dtype, shard_gb, **how)
