"""Hugging Face's model families as tables, and config.json, read and written. Imports no torch.

FAMILIES names for each of our parameters the tensors that the file stores: one, several fused along dim 0 (q, k, v;
gate, up), or one or two per expert, which we stack.

Sources: configuration and modelling files of transformers 4 and 5."""

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import NamedTuple

from lib.errors import UserError
from lib.files import read_object
from shapes import ModelConfig, RopeScaling

# Our parameter | the tensor in the file | its parts, if several tensors are fused in this order. i: layer, e: expert.
LLAMA_TENSORS = {
    "embed_tokens.weight": ("model.embed_tokens.weight",),
    "layers.{i}.input_layernorm.weight": ("model.layers.{i}.input_layernorm.weight",),
    "layers.{i}.self_attn.qkv_proj.weight": ("model.layers.{i}.self_attn.{part}_proj.weight", "q", "k", "v"),
    "layers.{i}.self_attn.qkv_proj.bias": ("model.layers.{i}.self_attn.{part}_proj.bias", "q", "k", "v"),
    "layers.{i}.self_attn.q_norm.weight": ("model.layers.{i}.self_attn.q_norm.weight",),
    "layers.{i}.self_attn.k_norm.weight": ("model.layers.{i}.self_attn.k_norm.weight",),
    "layers.{i}.self_attn.o_proj.weight": ("model.layers.{i}.self_attn.o_proj.weight",),
    "layers.{i}.post_attention_layernorm.weight": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers.{i}.mlp.gate_up_proj.weight": ("model.layers.{i}.mlp.{part}_proj.weight", "gate", "up"),
    "layers.{i}.mlp.down_proj.weight": ("model.layers.{i}.mlp.down_proj.weight",),
    "layers.{i}.mlp.gate.weight": ("model.layers.{i}.block_sparse_moe.gate.weight",),
    "layers.{i}.mlp.gate_up_proj": ("model.layers.{i}.block_sparse_moe.experts.{e}.w{part}.weight", "1", "3"),
    "layers.{i}.mlp.down_proj": ("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",),
    "norm.weight": ("model.norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}

GPT2_TENSORS = {
    "embed_tokens.weight": ("transformer.wte.weight",),
    "embed_positions.weight": ("transformer.wpe.weight",),
    "layers.{i}.input_layernorm.weight": ("transformer.h.{i}.ln_1.weight",),
    "layers.{i}.self_attn.qkv_proj.weight": ("transformer.h.{i}.attn.c_attn.weight",),
    "layers.{i}.self_attn.o_proj.weight": ("transformer.h.{i}.attn.c_proj.weight",),
    "layers.{i}.post_attention_layernorm.weight": ("transformer.h.{i}.ln_2.weight",),
    "layers.{i}.mlp.up_proj.weight": ("transformer.h.{i}.mlp.c_fc.weight",),
    "layers.{i}.mlp.down_proj.weight": ("transformer.h.{i}.mlp.c_proj.weight",),
    "norm.weight": ("transformer.ln_f.weight",),
    "lm_head.weight": ("lm_head.weight",),
    "layers.{i}.input_layernorm.bias": ("transformer.h.{i}.ln_1.bias",),
    "layers.{i}.self_attn.qkv_proj.bias": ("transformer.h.{i}.attn.c_attn.bias",),
    "layers.{i}.self_attn.o_proj.bias": ("transformer.h.{i}.attn.c_proj.bias",),
    "layers.{i}.post_attention_layernorm.bias": ("transformer.h.{i}.ln_2.bias",),
    "layers.{i}.mlp.up_proj.bias": ("transformer.h.{i}.mlp.c_fc.bias",),
    "layers.{i}.mlp.down_proj.bias": ("transformer.h.{i}.mlp.c_proj.bias",),
    "norm.bias": ("transformer.ln_f.bias",),
}

# Field of ModelConfig | key in config.json.
LLAMA_KEYS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "init_std": "initializer_range",
    "rope_theta": "rope_theta",
}

MIXTRAL_KEYS = LLAMA_KEYS | {
    "n_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "router_aux_loss_coef": "router_aux_loss_coef",
}

GPT2_KEYS = {
    "vocab_size": "vocab_size",
    "dim": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "ffn_dim": "n_inner",
    "max_seq_len": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
    "init_std": "initializer_range",
}


class Family(NamedTuple):
    """shape: fields of ModelConfig; other families list only the differences from Llama's. defaults: transformers'
    values for absent keys, where ModelConfig has another default. names: of the tensors; may include tensors that only
    another family has. keys: of config.json."""

    architecture: str
    shape: dict
    defaults: dict
    names: dict = LLAMA_TENSORS
    keys: dict = LLAMA_KEYS


# model_type | the fields of Family
FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        shape={
            "norm": "rmsnorm",
            "positions": "rope",
            "mlp": "swiglu",
            "bias": False,
            "qkv_bias": False,
            "qk_norm": False,
            "family": "",
        },
        defaults={"hidden_act": "silu", "rope_scaling": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-06},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        shape={"family": "mistral"},
        defaults={
            "hidden_act": "silu",
            "rope_scaling": None,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-06,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        shape={"qkv_bias": True},
        defaults={
            "hidden_act": "silu",
            "rope_scaling": None,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-06,
            "num_key_value_heads": 32,
            "use_sliding_window": False,
        },
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        shape={"qk_norm": True},
        defaults={
            "hidden_act": "silu",
            "rope_scaling": None,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-06,
            "num_key_value_heads": 32,
            "use_sliding_window": False,
            "head_dim": 128,
        },
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        shape={"mlp": "moe"},
        defaults={
            "hidden_act": "silu",
            "rope_scaling": None,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
            "rope_theta": 1000000.0,
        },
        keys=MIXTRAL_KEYS,
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        shape={"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": True},
        defaults={
            "activation_function": "gelu_new",
            "n_inner": 0,
            "n_positions": 1024,
            "tie_word_embeddings": True,
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "resid_pdrop": 0.1,
        },
        names=GPT2_TENSORS,
        keys=GPT2_KEYS,
    ),
}


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


# Keys that change the computation | the values that model.py implements. Exports write the first one.
MEANS_OURS = {
    "hidden_act": ("silu", "swish"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
    "router_jitter_noise": (0, None),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1, None),
    "rope_scaling": (None,),
    "rope_type": ("default", "llama3", None),
    "type": ("default", "llama3", None),
    "is_causal": (True,),
    "attn_pdrop": (0.0,),
    "embd_pdrop": (0.0,),
    "resid_pdrop": (0.0,),
}

# Keys that change nothing in our forward or backward pass.
HARMLESS = (
    "model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "pretraining_tp",
    "n_ctx", "n_special", "predict_special_tokens", "output_past", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "unk_token_id", "id2label", "label2id", "num_labels", "task_specific_params", "problem_type",
    "finetuning_task", "is_decoder", "gradient_checkpointing", "max_length", "output_router_logits",
    "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "do_sample", "temperature", "top_p", "top_k", "return_dict", "output_hidden_states", "output_attentions",
    "max_sequence_length", "max_window_layers", "is_llama_config", "transformers.js_config", "unsloth_version",
    "unsloth_fixed",
)  # fmt: skip

# Keys that change nothing while they are null, false, 0 or empty.
HARMLESS_WHEN_OFF = (
    "quantization_config", "auto_map", "pruned_heads", "chunk_size_feed_forward", "cross_attention_hidden_size",
    "tie_encoder_decoder", "torchscript", "use_bfloat16", "tf_legacy_loss", "use_mrope", "use_qk_norm",
    "rope_interleaved", "rope_parameters", "rope_scaling", "tokenizer_class", "prefix", "decoder_start_token_id",
    "min_length", "early_stopping", "diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip

# rope_type -> RopeScaling's fields | keys in config.json
ROPE_KEYS = {
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_seq_len": "original_max_position_embeddings",
    },
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
    refuse_unknown(family.defaults | values, known, path)
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


def refuse_unknown(values, known, path, supported=MEANS_OURS):
    """Refuses keys that may change the computation. known: keys that are checked elsewhere, or harmless."""
    known = known.union(HARMLESS, (key for key in HARMLESS_WHEN_OFF if not values.get(key)))
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


def config_json(config: ModelConfig, dtype: str) -> dict:
    """The config.json of a shape, with keys that transformers 4 and 5, vLLM and llama.cpp read. UserError: no family
    has this shape. dtype: torch's name, as bfloat16."""
    kind = family(config)
    row = FAMILIES[kind]
    out = {"architectures": [row.architecture], "model_type": kind, "torch_dtype": dtype}
    out |= {key: getattr(config, ours) for ours, key in row.keys.items()}
    out |= {key: MEANS_OURS[key][0] for key in row.defaults if key in MEANS_OURS}
    if scaling := config.rope_scaling:
        numbers = {key: getattr(scaling, ours) for ours, key in ROPE_KEYS[scaling.kind].items()}
        out["rope_scaling"] = {"rope_type": scaling.kind} | numbers
    return out
