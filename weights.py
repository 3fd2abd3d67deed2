"""Hugging Face folders: safetensors and config.json, in and out. GPT-2, Llama and Mixtral.

Names are data: FAMILIES says for each of our parameters which tensors of the file make it up: one, several that are
fused along dim 0 (q, k, v; gate, up), or one or two per expert that are stacked. Both ways are strict: every tensor of
ours must be there with its shape, and nothing else may be. No value changes on the way, so reading what was written
gives the same bits; RoPE keeps Hugging Face's half-split layout and nothing is permuted.

Only safetensors and JSON are opened, pickles never. An export needs the memory of a part of a tensor, a shard's name is
written when the shard is whole.

Source: the configuration classes and modelling files of transformers 4 and 5."""

import errno
import json
import math
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path

from errors import UserError  # first: it finds the Python that has torch

import torch  # isort: skip
from torch import Tensor

from download import find
from model import ModelConfig, RopeScaling, Transformer
from tensorfile import DTYPES, Read, Slices, TensorFile, assemble, conversion, what_it_is, write_tensors
from tokenizer import ByteTokenizer, write_byte_tokenizer

# ---- names

_BLOCK = "model.layers.{i}."
_LLAMA = {
    "embed_tokens.weight": ("model.embed_tokens.weight",),
    "layers.{i}.input_layernorm.weight": (_BLOCK + "input_layernorm.weight",),
    "layers.{i}.self_attn.qkv_proj.weight": tuple(_BLOCK + f"self_attn.{p}_proj.weight" for p in "qkv"),
    "layers.{i}.self_attn.o_proj.weight": (_BLOCK + "self_attn.o_proj.weight",),
    "layers.{i}.post_attention_layernorm.weight": (_BLOCK + "post_attention_layernorm.weight",),
    "norm.weight": ("model.norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}
_GPT2_MODULES = {
    "embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f", "layers.{i}.input_layernorm": "h.{i}.ln_1",
    "layers.{i}.self_attn.qkv_proj": "h.{i}.attn.c_attn", "layers.{i}.self_attn.o_proj": "h.{i}.attn.c_proj",
    "layers.{i}.post_attention_layernorm": "h.{i}.ln_2", "layers.{i}.mlp.up_proj": "h.{i}.mlp.c_fc",
    "layers.{i}.mlp.down_proj": "h.{i}.mlp.c_proj",
}  # fmt: skip
FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": _LLAMA | {
        "layers.{i}.mlp.gate_up_proj.weight": (_BLOCK + "mlp.gate_proj.weight", _BLOCK + "mlp.up_proj.weight"),
        "layers.{i}.mlp.down_proj.weight": (_BLOCK + "mlp.down_proj.weight",),
    },
    "mixtral": _LLAMA | {
        "layers.{i}.mlp.gate.weight": (_BLOCK + "block_sparse_moe.gate.weight",),
        "layers.{i}.mlp.gate_up_proj": tuple(_BLOCK + f"block_sparse_moe.experts.{{e}}.w{n}.weight" for n in (1, 3)),
        "layers.{i}.mlp.down_proj": (_BLOCK + "block_sparse_moe.experts.{e}.w2.weight",),
    },
    "gpt2": {"lm_head.weight": ("lm_head.weight",)} | {
        f"{ours}.{kind}": (f"transformer.{theirs}.{kind}",)
        for ours, theirs in _GPT2_MODULES.items() for kind in ("weight", "bias")
    },
}  # fmt: skip
PREFIX = {"llama": "model.", "mixtral": "model.", "gpt2": "transformer."}  # absent in files of a model without a head
# Not parameters: masks and frequencies that older versions of transformers have stored.
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Piece:
    """A tensor of the file, and where it lies in our parameter. transposed: GPT-2's linears are kept as [in, out]."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape in the file; of an expert, which is stacked here, without the first dimension."""
        return self.shape[::-1] if self.transposed else self.shape[-2:]


def family(config: ModelConfig) -> str:
    """The model_type of a shape. ValueError: none has it."""
    common = (config.norm, config.positions, config.mlp, config.bias)
    if common == ("layernorm", "learned", "gelu", True):
        if config.n_kv_heads * config.head_dim != config.dim or config.n_heads != config.n_kv_heads:
            raise ValueError("GPT-2 has as many key/value heads as heads, and heads of dim / n_heads")
        return "gpt2"
    kinds = {("rmsnorm", "rope", "swiglu", False): "llama", ("rmsnorm", "rope", "moe", False): "mixtral"}
    if common not in kinds:
        raise ValueError(f"no Hugging Face model that we know has norm, positions, mlp, bias = {common}")
    return kinds[common]


def pieces(config: ModelConfig) -> dict[str, list[Piece]]:
    """For each of our parameters the tensors of the file that make it up; a tied lm_head is none of them."""
    kind, out = family(config), {}
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
    for name, shape in shapes.items():
        layer = re.match(r"layers\.(\d+)\.", name)
        theirs = FAMILIES[kind][re.sub(r"^layers\.\d+\.", "layers.{i}.", name)]
        rows, offset, out[name] = shape[0] if len(shape) < 3 else shape[1], 0, []
        heads = (
            config.head_dim * config.n_heads,
            config.head_dim * config.n_kv_heads,
            config.head_dim * config.n_kv_heads,
        )
        for part, n in zip(theirs, heads if len(theirs) == 3 else [rows // len(theirs)] * len(theirs), strict=True):
            part = part.replace("{i}", layer[1] if layer else "")
            if len(shape) < 3:
                transposed = kind == "gpt2" and name.endswith("_proj.weight")
                out[name].append(Piece(part, (offset, 0)[: len(shape)], (n, *shape[1:]), transposed))
            else:
                out[name] += [
                    Piece(part.replace("{e}", str(e)), (e, offset, 0), (1, n, shape[2])) for e in range(shape[0])
                ]
            offset += n
    return out


# ---- reading


def find_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights, all of them there; an index is checked and obeyed."""
    if folder.is_file():
        return [_refuse_pickle(folder)]
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
        kinds = ("pytorch_model*.bin", "*.bin", "*.pth", "*.pt", "*.ckpt")
        pickles = [p for kind in kinds for p in sorted(folder.glob(kind))]
        if not files and pickles:
            _refuse_pickle(pickles[0])
        if not files:
            raise UserError(
                f"{folder} holds no weights: no model.safetensors, no index of several, no *.safetensors. Was it"
                " fetched with --skip-model? python download.py ORG/NAME takes them, too"
            )
        return files
    table = read_json(index)
    names = sorted(set(map(str, table["weight_map"].values()))) if isinstance(table.get("weight_map"), dict) else []
    bad = [n for n in names if not n.endswith(".safetensors") or Path(n).name != n or "\\" in n or not n.isprintable()]
    if not names or bad:
        found = f"it names {bad[0]!r}, which is no safetensors file beside it" if bad else "it has no weight_map"
        raise UserError(f"{index}: {found}")
    there = set(os.listdir(folder))
    missing = [n for n in names if n not in there]
    if missing:
        raise UserError(f"{folder} lacks {len(missing)} of {len(names)} files that its index names: {_some(missing)}")
    return [folder / n for n in names]


def _refuse_pickle(path: Path) -> Path:
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: only safetensors are loaded; a pickle can run code. {conversion(path)}")
    return path


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def open_weights(folder: Path, config: ModelConfig) -> Read:
    """Checks names, shapes and dtypes of a folder's weights against the model -> read(name, slices), which takes those
    values of one of our parameters from the files, in their dtype (the widest of a fused parameter's)."""
    _check_config(folder, config)
    plan, where = pieces(config), {}
    expected = {piece.name: piece for row in plan.values() for piece in row}
    for file in map(TensorFile, find_files(folder)):
        for name in file.entries:
            full = PREFIX[family(config)] + name
            full = full if full in expected else name
            if full in where:
                both = f"in {where[full][0].path.name!r} and in {file.path.name!r}"
                raise UserError(f"{full!r} is twice in {folder}: {both}")
            if not BUFFERS.search(name):
                where[full] = file, name
    spare = where.pop("lm_head.weight", None) if config.tied else None
    missing, extra = [n for n in expected if n not in where], [n for n in where if n not in expected]
    if missing or extra:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"holds {_some(extra)} besides"] * bool(extra)
        raise UserError(f"{folder} {' and '.join(parts)}: it is another model than the one that was asked for")
    for name, piece in expected.items():
        file, there = where[name]
        entry = file.entries[there]
        if entry.shape != piece.stored:
            raise UserError(f"{file.path}: {there!r} has shape {list(entry.shape)}, expected {list(piece.stored)}")
        if entry.dtype not in ("F32", "F16", "BF16"):
            raise UserError(f"{file.path}: {there!r} has dtype {entry.dtype}; F32, F16 and BF16 are read")
    if spare:
        _check_tied(spare, where[plan["embed_tokens.weight"][0].name])

    def read(name: str, slices: Slices) -> Tensor:
        parts = [(piece, *where[piece.name]) for piece in plan[name]]
        whole = tuple(max(p.start[d] + p.shape[d] for p in plan[name]) for d in range(len(slices)))
        dtype = reduce(torch.promote_types, (DTYPES[file.entries[n].dtype] for _, file, n in parts))
        return assemble(slices, whole, dtype, [(p.start, p.shape, partial(_read_piece, p, *at)) for p, *at in parts])

    return read


def _check_config(folder: Path, config: ModelConfig) -> None:
    """Weights of the same shapes may belong to another model: another rope_theta shows nowhere but in the results."""
    if not (folder / "config.json").exists():
        return
    free = ("init_std", "router_aux_loss_coef")  # they change no output
    found = asdict(read_config(folder)) | {k: getattr(config, k) for k in free}
    if config.positions == "rope":
        found["max_seq_len"] = config.max_seq_len
    wanted = asdict(config)
    differ = [f"{k} is {found[k]!r}, the model has {wanted[k]!r}" for k in wanted if found[k] != wanted[k]]
    if differ:
        raise UserError(f"{folder / 'config.json'}: {'; '.join(differ)}. --model {folder} takes the folder's own")


def _read_piece(piece: Piece, file: TensorFile, name: str, slices: Slices) -> Tensor:
    values = file.read(name, slices[::-1] if piece.transposed else slices[-2:])
    return values.T if piece.transposed else values


def _check_tied(head: tuple[TensorFile, str], embedding: tuple[TensorFile, str]) -> None:
    """A tied model's file may hold lm_head too, if it is the embedding."""
    (a, name), (b, other) = head, embedding
    same = a.entries[name].shape == b.entries[other].shape
    for start in range(0, a.entries[name].shape[0], 4096) if same else ():
        part = (slice(start, start + 4096), slice(None))
        same = same and torch.equal(a.read(name, part), b.read(other, part))
    if not same:
        raise UserError(
            f"{a.path}: lm_head.weight is not the embedding, though config.json ties them (tie_word_embeddings);"
            " if the head is its own, say false there"
        )


def load_model(
    folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """The model of a folder (or of a hub id that has been downloaded), parameters and computation in `dtype`; a tensor
    at a time goes through the CPU's memory."""
    folder = find(str(folder), "folder")
    config = read_config(folder)
    read = open_weights(folder, config)
    with torch.device("meta"):
        model = Transformer(config, dtype).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(name, tuple(slice(0, n) for n in parameter.shape)))
    return model.eval()


# ---- config.json

REQUIRED = object()
# Our field: (its key there, type, default where the key is absent or null), as in transformers' configuration classes.
_LLAMA_KEYS = {
    "vocab_size": ("vocab_size", int, REQUIRED),
    "dim": ("hidden_size", int, REQUIRED),
    "n_layers": ("num_hidden_layers", int, REQUIRED),
    "n_heads": ("num_attention_heads", int, REQUIRED),
    "n_kv_heads": ("num_key_value_heads", int, 0),
    "head_dim": ("head_dim", int, 0),
    "ffn_dim": ("intermediate_size", int, REQUIRED),
    "max_seq_len": ("max_position_embeddings", int, 2048),
    "norm_eps": ("rms_norm_eps", float, 1e-6),
    "tied": ("tie_word_embeddings", bool, False),
    "init_std": ("initializer_range", float, 0.02),
}
KEYS = {
    "llama": _LLAMA_KEYS,
    "mixtral": _LLAMA_KEYS | {
        "n_kv_heads": ("num_key_value_heads", int, 8),
        "max_seq_len": ("max_position_embeddings", int, 131072),
        "norm_eps": ("rms_norm_eps", float, 1e-5),
        "n_experts": ("num_local_experts", int, 8),
        "top_k": ("num_experts_per_tok", int, 2),
        "router_aux_loss_coef": ("router_aux_loss_coef", float, 0.001),
    },
    "gpt2": {
        "vocab_size": ("vocab_size", int, REQUIRED),
        "dim": ("n_embd", int, REQUIRED),
        "n_layers": ("n_layer", int, REQUIRED),
        "n_heads": ("n_head", int, REQUIRED),
        "ffn_dim": ("n_inner", int, 0),
        "max_seq_len": ("n_positions", int, 1024),
        "norm_eps": ("layer_norm_epsilon", float, 1e-5),
        "tied": ("tie_word_embeddings", bool, True),
        "init_std": ("initializer_range", float, 0.02),
    },
}  # fmt: skip
KINDS = {
    "llama": {},
    "mixtral": {"mlp": "moe"},
    "gpt2": {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": True},
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "gpt2": "GPT2LMHeadModel"}
THETA = {"llama": 1e4, "mixtral": 1e6}  # where the file says nothing
# Fields that change what is computed, and the values that mean what model.py computes.
MEANS_OURS = {
    "hidden_act": ("silu", "swish"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "router_jitter_noise": (0, None),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1, None),
    "is_causal": (True,),
}
# Fields that change nothing in a forward or backward pass of ours.
HARMLESS = {
    "model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "pretraining_tp",
    "n_ctx", "n_special", "predict_special_tokens", "output_past", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "unk_token_id", "id2label", "label2id", "num_labels", "task_specific_params", "problem_type",
    "finetuning_task", "is_decoder", "gradient_checkpointing", "max_length", "output_router_logits",
    "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "do_sample", "temperature", "top_p", "top_k", "return_dict", "output_hidden_states",
    "output_attentions", "max_sequence_length", "is_llama_config", "transformers.js_config", "unsloth_version",
    "unsloth_fixed",
}  # fmt: skip
# Fields that ask for nothing while they are null, false, 0 or empty.
HARMLESS_WHEN_OFF = {
    "quantization_config", "auto_map", "pruned_heads", "chunk_size_feed_forward", "cross_attention_hidden_size",
    "tie_encoder_decoder", "torchscript", "use_bfloat16", "tf_legacy_loss", "use_sliding_window", "use_qk_norm",
    "rope_interleaved", "tokenizer_class", "prefix", "decoder_start_token_id", "min_length", "early_stopping",
    "diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
}  # fmt: skip
ROPE_KEYS = {"factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
             "original_seq_len": "original_max_position_embeddings"}  # fmt: skip


def read_json(path: Path) -> dict:
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no file")
        text = path.read_bytes()
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        what = what_it_is(path, text[:512])
        raise UserError(f"{path} is {'damaged: no JSON' if what.startswith('damaged') else what} ({e})") from None
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}, not an object")
    return found


def _read_config_json(folder: Path) -> tuple[dict, Path]:
    path = folder / "config.json" if folder.is_dir() else folder.with_name("config.json")
    if not path.exists():
        more = "; params.json is Meta's own format: take the repository's Hugging Face files" * (
            path.with_name("params.json").exists()
        )
        raise UserError(f"{path.parent} holds no config.json, which says what model it is{more}")
    return read_json(path), path


def read_config(folder: Path) -> ModelConfig:
    """The shape that a folder's config.json describes, in the keys of transformers 4 or 5. Refuses by name what would
    compute something else than model.py does."""
    values, path = _read_config_json(folder)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in KEYS:
        raise UserError(f"{path}: model_type {kind!r} is not known; there are {', '.join(KEYS)}")
    for key, means_ours in MEANS_OURS.items():
        if key in values and values[key] not in means_ours:
            raise UserError(f"{path}: {key} is {values[key]!r}, model.py computes only {means_ours[0]!r}")
    known = {key for key, _, _ in KEYS[kind].values()} | set(MEANS_OURS) | HARMLESS
    known |= {"rope_theta", "rope_scaling", "rope_parameters"} if kind in THETA else set()
    known |= {key for key in HARMLESS_WHEN_OFF if not values.get(key)}
    unknown = [key for key in values if key not in known and key[:1] != "_" and not _is_dropout(key)]
    if unknown:
        raise UserError(
            f"{path}: {', '.join(f'{k!r} = {values[k]!r}'[:80] for k in unknown)}: not known here, and may change what"
            " is computed; remove what does not"
        )
    found = {}
    for ours, (key, type_, default) in KEYS[kind].items():
        value = values.get(key)
        value = default if value is None else value
        if value is REQUIRED:
            raise UserError(f"{path} does not say {key}")
        if type(value) not in ((int, float) if type_ is float else (type_,)):
            raise UserError(f"{path}: {key} is {value!r}, expected {type_.__name__}")
        if key in values and values[key] is not None and type_ is not bool and not 0 < value < 2**53:
            raise UserError(f"{path}: {key} is {value!r}, expected a positive number")
        found[ours] = value
    if kind in THETA:
        found["rope_theta"], found["rope_scaling"] = _read_rope(values, THETA[kind], path)
    elif not found["ffn_dim"]:
        found["ffn_dim"] = 4 * found["dim"]
    if found.get("top_k", 0) > found.get("n_experts", 0):
        raise UserError(f"{path}: num_experts_per_tok is {found['top_k']}, there are {found['n_experts']} experts")
    try:
        return ModelConfig(**found, **KINDS[kind])
    except ValueError as e:
        raise UserError(f"{path}: {e}") from None


def _read_rope(values: dict, theta: float, path: Path) -> tuple[float, RopeScaling | None]:
    """rope_theta and rope_scaling of version 4, or rope_parameters of version 5."""
    given = [values[k] for k in ("rope_parameters", "rope_scaling") if values.get(k) not in (None, {})]
    if len(given) > 1:
        raise UserError(f"{path} has both rope_parameters and rope_scaling: remove the one that does not count")
    if given and not isinstance(given[0], dict):
        raise UserError(f"{path}: rope_parameters or rope_scaling is {given[0]!r}, expected an object")
    rope = dict(*given)
    theta = next((t for t in (rope.pop("rope_theta", None), values.get("rope_theta")) if t is not None), theta)
    kind = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    if kind not in ("default", "llama3"):
        raise UserError(f"{path}: rope_type {kind!r} is not implemented; default and llama3 are")
    scaled, keys = kind == "llama3", set(ROPE_KEYS.values())
    for what, names in (("lacks", keys - set(rope) if scaled else set()), ("has", set(rope) - keys)):
        names -= {"partial_rotary_factor"} if rope.get("partial_rotary_factor") in (1, None) else set()
        if names:
            raise UserError(f"{path}: RoPE of type {kind} {what} {_some(sorted(names))}")
    numbers = [theta, *(rope[k] for k in keys)] if scaled else [theta]
    if any(type(n) not in (int, float) or not 0 < n < 2**53 for n in numbers):
        raise UserError(f"{path}: RoPE's numbers must be positive, found {numbers}")
    if not scaled:
        return float(theta), None
    scaling = RopeScaling(**{ours: rope[theirs] for ours, theirs in ROPE_KEYS.items()})
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise UserError(f"{path}: high_freq_factor must be above low_freq_factor")
    return float(theta), scaling


def _is_dropout(key: str) -> bool:
    return "dropout" in key or key.endswith("_pdrop")


def dropout_note(folder: Path) -> str:
    """One line that names the dropout rates of a config.json, which are not applied; empty if there are none."""
    rates = [f"{k!r}: {v!r}" for k, v in _read_config_json(folder)[0].items() if _is_dropout(k) and v]
    return f"Dropout is not applied: {', '.join(rates)}" if rates else ""


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict:
    """The config.json of a shape, in the keys that transformers 4 and 5, vLLM and llama.cpp read. ValueError: no family
    has this shape."""
    kind = family(config)
    out = {"architectures": [ARCHITECTURES[kind]], "model_type": kind, "torch_dtype": str(dtype)[6:]}
    out |= {key: getattr(config, ours) for ours, (key, _, _) in KEYS[kind].items()}
    if kind == "gpt2":
        return out | {"activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    out |= {"hidden_act": "silu", "rope_theta": config.rope_theta, "rope_scaling": None}
    if scaling := config.rope_scaling:
        numbers = {theirs: getattr(scaling, ours) for ours, theirs in ROPE_KEYS.items()}
        out["rope_scaling"] = {"rope_type": "llama3", **numbers}
    return out


# ---- writing


class Export:
    """A Hugging Face folder in the making: shards of safetensors of at most shard_gb GB each (10^9 bytes; a tensor that
    is larger has a file of its own), to be written one by one, by any number of processes, into `temporary` beside its
    place; `finish` adds the rest and renames it. Values are rounded to `dtype`. replaces: an older export gives way.
    UserError: no family has this shape."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        shard_gb: float = 5.0,
        nonce: str = "",
        replaces: bool = False,
    ):
        try:
            rows = [(piece, name) for name, row in pieces(config).items() for piece in row]
        except ValueError as e:
            raise UserError(f"This model has no Hugging Face form: {e}") from None
        folder = folder.absolute()
        self.folder, self.config, self.dtype, self.replaces = folder, config, dtype, replaces
        self.temporary = folder.with_name(f"{folder.name}.tmp-{nonce or secrets.token_hex(4)}")
        self.shards, room = [], 0.0
        for piece, name in rows:
            size = math.prod(piece.shape) * dtype.itemsize
            if not self.shards or size > room:
                self.shards.append({})
                room = shard_gb * 1e9
            self.shards[-1][piece.name] = piece, name
            room -= size
        self.bytes = sum(math.prod(piece.shape) for piece, _ in rows) * dtype.itemsize
        n = len(self.shards)
        self.files = [
            f"model-{i:05d}-of-{n:05d}.safetensors" if n > 1 else "model.safetensors" for i in range(1, n + 1)
        ]

    def begin(self) -> None:
        """Makes the temporary folder; refuses one that is in the way, and a disk that is too small."""
        refuse_in_the_way(self.folder, self.replaces)
        for left in self.folder.parent.glob(f"{self.folder.name}.tmp-*") if self.replaces else ():
            shutil.rmtree(left, ignore_errors=True)  # of an export that was killed
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder.parent).free
        if self.bytes > free:
            need = f"needs {self.bytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free"
            raise UserError(f"{self.folder}: the export {need}")
        self.temporary.mkdir()

    def write_shard(self, i: int, read: Read) -> None:
        shard = self.shards[i]
        shapes = [(name, piece.stored) for name, (piece, _) in shard.items()]
        write_tensors(self.temporary / self.files[i], shapes, self.dtype, lambda n, s: _read_out(*shard[n], read, s))

    def finish(self, tokenizer=None) -> None:
        """The index, config.json, generation_config.json and the tokenizer's files."""
        if len(self.files) > 1:
            places = {name: file for file, shard in zip(self.files, self.shards, strict=True) for name in shard}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": places}
            _write_json(self.temporary / "model.safetensors.index.json", index)
        ends = (tokenizer.eos_ids or [tokenizer.eos_id]) if tokenizer else [None]
        ids = {"bos_token_id": tokenizer and tokenizer.bos_id, "eos_token_id": ends if len(ends) > 1 else ends[0]}
        _write_json(self.temporary / "config.json", config_json(self.config, self.dtype) | ids)
        _write_json(self.temporary / "generation_config.json", ids)
        for file, name in tokenizer.files.items() if tokenizer else ():
            shutil.copyfile(file, self.temporary / name)
        if isinstance(tokenizer, ByteTokenizer):
            write_byte_tokenizer(self.temporary)
        old = self.temporary.with_name(f"{self.temporary.name}.old")
        if self.folder.exists():
            self.folder.rename(old)
        self.temporary.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)


def refuse_in_the_way(folder: Path, replaces: bool) -> None:
    """Whether an export may be written there: where nothing is, or, if it replaces, where an export is."""
    is_export = replaces and (folder / "generation_config.json").exists() and (folder / "config.json").exists()
    if folder.exists() and not is_export and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} is there already: move it away, or give another folder")


def _read_out(piece: Piece, name: str, read: Read, slices: Slices) -> Tensor:
    """Those values of a tensor of the file, from our parameter."""
    place = slices[::-1] if piece.transposed else (slice(0, 1), *slices)[-len(piece.shape) :]
    place = tuple(slice(s.start + at, s.stop + at) for s, at in zip(place, piece.start, strict=True))
    values = read(name, place)
    return values.T if piece.transposed else values.reshape([s.stop - s.start for s in slices])


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def export_model(
    model: Transformer, folder: Path | str, shard_gb: float = 5, tokenizer=None, replaces: bool = False
) -> None:
    """Writes an unsharded model as a Hugging Face folder, in the dtype of its parameters; see Export."""
    parameters = dict(model.named_parameters())
    export = Export(Path(folder), model.config, next(iter(parameters.values())).dtype, shard_gb, replaces=replaces)
    export.begin()
    try:
        for i in range(len(export.shards)):
            export.write_shard(i, lambda name, slices: parameters[name].detach()[slices].cpu())
        export.finish(tokenizer)
    finally:
        export.abandon()
