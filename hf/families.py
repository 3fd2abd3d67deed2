"""Hugging Face's model families as tables, and config.json, read and written. Imports no torch.

FAMILIES names for each of our parameters the tensors that the file stores: one, several fused along dim 0 (q, k, v;
gate, up), or one or two per expert, which we stack; and for each field of ModelConfig the key of config.json.

Reading is strict: a key that could change the computation is refused, unless the model computes what it asks for.

Sources: configuration and modelling files of transformers 4 and 5."""

import contextlib
import functools
import math
import re
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import NamedTuple

from base.disk import read_object
from base.errors import UserError
from shapes import ModelConfig, RopeScaling

# Our parameter: the tensor in the file, and its parts if several tensors are fused in this order. i: layer, e: expert.
# A family may lack some of these parameters.
LLAMA_TENSORS = {
    "embed_tokens.weight": ("model.embed_tokens.weight",),
    "layers.{i}.input_layernorm.weight": ("model.layers.{i}.input_layernorm.weight",),
    "layers.{i}.self_attn.qkv_proj.weight": ("model.layers.{i}.self_attn.{part}_proj.weight", "q", "k", "v"),
    "layers.{i}.self_attn.qkv_proj.bias": ("model.layers.{i}.self_attn.{part}_proj.bias", "q", "k", "v"),
    "layers.{i}.self_attn.q_norm.weight": ("model.layers.{i}.self_attn.q_norm.weight",),
    "layers.{i}.self_attn.k_norm.weight": ("model.layers.{i}.self_attn.k_norm.weight",),
    "layers.{i}.self_attn.o_proj.weight": ("model.layers.{i}.self_attn.o_proj.weight",),
    "layers.{i}.self_attn.o_proj.bias": ("model.layers.{i}.self_attn.o_proj.bias",),
    "layers.{i}.self_attn_norm.weight": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers.{i}.post_attention_layernorm.weight": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers.{i}.mlp.gate_up_proj.weight": ("model.layers.{i}.mlp.{part}_proj.weight", "gate", "up"),
    "layers.{i}.mlp.gate_up_proj.bias": ("model.layers.{i}.mlp.{part}_proj.bias", "gate", "up"),
    "layers.{i}.mlp.down_proj.weight": ("model.layers.{i}.mlp.down_proj.weight",),
    "layers.{i}.mlp.down_proj.bias": ("model.layers.{i}.mlp.down_proj.bias",),
    "layers.{i}.mlp_norm.weight": ("model.layers.{i}.post_feedforward_layernorm.weight",),
    "norm.weight": ("model.norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}
MIXTRAL_TENSORS = LLAMA_TENSORS | {
    "layers.{i}.mlp.gate.weight": ("model.layers.{i}.block_sparse_moe.gate.weight",),
    "layers.{i}.mlp.gate_up_proj": ("model.layers.{i}.block_sparse_moe.experts.{e}.w{part}.weight", "1", "3"),
    "layers.{i}.mlp.down_proj": ("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",),
}
QWEN3_MOE_TENSORS = LLAMA_TENSORS | {
    "layers.{i}.mlp.gate.weight": ("model.layers.{i}.mlp.gate.weight",),
    "layers.{i}.mlp.gate_up_proj": ("model.layers.{i}.mlp.experts.{e}.{part}_proj.weight", "gate", "up"),
    "layers.{i}.mlp.down_proj": ("model.layers.{i}.mlp.experts.{e}.down_proj.weight",),
}
GEMMA3_TENSORS = LLAMA_TENSORS | {
    "layers.{i}.self_attn_norm.weight": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers.{i}.post_attention_layernorm.weight": ("model.layers.{i}.pre_feedforward_layernorm.weight",),
}
PHI3_TENSORS = LLAMA_TENSORS | {
    "layers.{i}.self_attn.qkv_proj.weight": ("model.layers.{i}.self_attn.qkv_proj.weight",),
    "layers.{i}.mlp.gate_up_proj.weight": ("model.layers.{i}.mlp.gate_up_proj.weight",),
}
ARCEE_TENSORS = LLAMA_TENSORS | {
    "layers.{i}.mlp.up_proj.weight": ("model.layers.{i}.mlp.up_proj.weight",),
    "layers.{i}.mlp.up_proj.bias": ("model.layers.{i}.mlp.up_proj.bias",),
}
GPT2_TENSORS = {
    "embed_tokens.weight": ("transformer.wte.weight",),
    "embed_positions.weight": ("transformer.wpe.weight",),
    "layers.{i}.input_layernorm.weight": ("transformer.h.{i}.ln_1.weight",),
    "layers.{i}.input_layernorm.bias": ("transformer.h.{i}.ln_1.bias",),
    "layers.{i}.self_attn.qkv_proj.weight": ("transformer.h.{i}.attn.c_attn.weight",),
    "layers.{i}.self_attn.qkv_proj.bias": ("transformer.h.{i}.attn.c_attn.bias",),
    "layers.{i}.self_attn.o_proj.weight": ("transformer.h.{i}.attn.c_proj.weight",),
    "layers.{i}.self_attn.o_proj.bias": ("transformer.h.{i}.attn.c_proj.bias",),
    "layers.{i}.post_attention_layernorm.weight": ("transformer.h.{i}.ln_2.weight",),
    "layers.{i}.post_attention_layernorm.bias": ("transformer.h.{i}.ln_2.bias",),
    "layers.{i}.mlp.up_proj.weight": ("transformer.h.{i}.mlp.c_fc.weight",),
    "layers.{i}.mlp.up_proj.bias": ("transformer.h.{i}.mlp.c_fc.bias",),
    "layers.{i}.mlp.down_proj.weight": ("transformer.h.{i}.mlp.c_proj.weight",),
    "layers.{i}.mlp.down_proj.bias": ("transformer.h.{i}.mlp.c_proj.bias",),
    "norm.weight": ("transformer.ln_f.weight",),
    "norm.bias": ("transformer.ln_f.bias",),
    "lm_head.weight": ("lm_head.weight",),
}
# Field of ModelConfig: key in config.json.
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
}
BIAS_KEYS = {**LLAMA_KEYS, "attention_bias": "attention_bias"}
MIXTRAL_KEYS = LLAMA_KEYS | {
    "n_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "router_aux_loss_coef": "router_aux_loss_coef",
}
QWEN3_MOE_KEYS = BIAS_KEYS | {
    "ffn_dim": "moe_intermediate_size",
    "n_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "norm_top_k": "norm_topk_prob",
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


SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = (
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)
YARN_KEYS = {
    "factor": "factor",
    "original_seq_len": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}
# rope_type: RopeScaling's fields and their keys in config.json.
ROPE_KEYS = {
    "default": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_seq_len": "original_max_position_embeddings",
    },
    "yarn": YARN_KEYS,
}
MINISTRAL3_ROPE_KEYS = {
    "yarn": YARN_KEYS | {
        "query_growth": "llama_4_scaling_beta",
    },
}  # fmt: skip
# The attention factor is a quotient. mscale raises its numerator, mscale_all_dim its denominator: equal values give 1.
NO_ATTENTION_FACTOR = {
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Keys of models with pictures, whose text part is read.
PICTURE_KEYS = (
    "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "image_token_id", "image_token_index",
    "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "text_config",
    "vision_config", "vision_feature_layer",
)  # fmt: skip
# The model_type of their text part, if text_config has none.
TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
}


class Family(NamedTuple):
    """architecture: the class in transformers. shape: fields of ModelConfig that have one value in the whole family,
    if it is not ModelConfig's default. defaults: transformers' values of absent keys, where ModelConfig has another
    default, and of keys that MEANS_OURS limits. names: of the tensors. keys: of config.json, by ModelConfig's field.
    others: keys that are read in other ways, or that transformers' model never reads. windows: the layers with a window
    if there are any and layer_types is absent; repeated. rope_keys: the implemented rope_types; see ROPE_KEYS.
    aliases: other names of keys. two_ropes: layers with a window have their own rope_parameters. means: rows of
    MEANS_OURS that differ in the family."""

    architecture: str
    shape: dict
    defaults: dict
    names: dict = LLAMA_TENSORS
    keys: dict = LLAMA_KEYS
    others: tuple = ROPE
    windows: tuple = ()
    rope_keys: dict = ROPE_KEYS
    aliases: dict = {}
    two_ropes: bool = False
    means: dict = {}


# By model_type. A shape is exported as the first family that can express it.
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        {},
        {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        keys=BIAS_KEYS | {"mlp_bias": "mlp_bias"},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"family": "mistral"},
        {
            "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        windows=(SLIDING,),
        others=(*ROPE, "sliding_window", *PICTURE_KEYS),
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {"family": "ministral3"},
        {
            "hidden_act": "silu", "max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128,
            "sliding_window": None,
        },
        windows=(SLIDING,),
        others=(*ROPE, "sliding_window", *PICTURE_KEYS),
        rope_keys=MINISTRAL3_ROPE_KEYS,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        {"family": "ministral"},
        {
            "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_key_value_heads": 8,
            "sliding_window": 4096, "layer_types": None,
        },
        windows=(SLIDING,),
        others=(*ROPE, "sliding_window"),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"qkv_bias": True},
        {
            "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32,
            "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28, "layer_types": None,
        },
        windows=(SLIDING,),
        others=(*ROPE, "sliding_window", "use_sliding_window", "attention_bias"),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True},
        {
            "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32,
            "head_dim": 128, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28,
            "layer_types": None,
        },
        keys=BIAS_KEYS,
        windows=(SLIDING,),
        others=(*ROPE, "sliding_window", "use_sliding_window", "use_qk_norm"),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True, "mlp": "moe"},
        {
            "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 4,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1, "mlp_only_layers": [], "sliding_window": 4096,
            "use_sliding_window": False,
        },
        QWEN3_MOE_TENSORS,
        QWEN3_MOE_KEYS,
        windows=(SLIDING,),
        others=(*ROPE, "sliding_window", "use_sliding_window", "intermediate_size", "use_qk_norm"),
        aliases={"num_local_experts": "num_experts"},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"mlp": "moe"},
        {
            "hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 8, "num_local_experts": 8,
            "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "rope_theta": 1e6, "sliding_window": None,
        },
        MIXTRAL_TENSORS,
        MIXTRAL_KEYS,
        windows=(SLIDING,),
        others=(*ROPE, "sliding_window"),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"norm_after": True, "qk_norm_whole": True},
        {"hidden_act": "silu", "max_position_embeddings": 2048},
        keys=BIAS_KEYS,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"norm_after": True, "qk_norm_whole": True},
        {"hidden_act": "silu", "max_position_embeddings": 2048, "rope_theta": 5e5, "sliding_window": 4096,
         "layer_types": None},
        keys=BIAS_KEYS,
        windows=(SLIDING, SLIDING, SLIDING, FULL),
        others=(*ROPE, "sliding_window"),
        two_ropes=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {"norm": "rmsnorm_1p", "norm_around": True, "qk_norm": True, "mlp": "geglu", "embed_scale": 0.0},
        {
            "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 262208, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "sliding_window": 4096, "layer_types": None,
        },
        GEMMA3_TENSORS,
        BIAS_KEYS | {"query_scale": "query_pre_attn_scalar"},
        windows=(SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL),
        others=(
            *ROPE, "sliding_window", "rope_local_base_freq", "hidden_act", *PICTURE_KEYS,
        ),
        two_ropes=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {},
        {
            "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 4,
            "tie_word_embeddings": True, "rope_theta": 2e6, "sliding_window": None, "use_sliding_window": False,
            "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None,
        },
        keys=BIAS_KEYS | {"mlp_bias": "mlp_bias"},
        windows=(SLIDING,),
        others=(*ROPE, "sliding_window", "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"family": "phi3"},
        {"hidden_act": "silu", "max_position_embeddings": 4096, "sliding_window": None},
        PHI3_TENSORS,
        windows=(SLIDING,),
        rope_keys={"default": {}},
        others=(*ROPE, "sliding_window"),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {},
        {
            "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
            "attention_multiplier": 1.0,
        },
        keys=BIAS_KEYS | {
            "mlp_bias": "mlp_bias", "embed_scale": "embedding_multiplier", "attention_scale": "attention_multiplier",
            "residual_scale": "residual_multiplier", "logits_divisor": "logits_scaling",
        },
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        {"mlp": "relu2"},
        {"hidden_act": "relu2", "max_position_embeddings": 4096},
        ARCEE_TENSORS,
        BIAS_KEYS | {"mlp_bias": "mlp_bias"},
        means={"hidden_act": ("relu2",)},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": True},
        {
            "activation_function": "gelu_new", "n_positions": 1024, "tie_word_embeddings": True,
            "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
        },
        GPT2_TENSORS,
        GPT2_KEYS,
        others=(),
    ),
}  # fmt: skip
# model_type: why it is not implemented.
LACKING = {
    "gpt_oss": " (its attention sinks are not implemented)",
    "gemma2": " (attn_logit_softcapping and final_logit_softcapping, its soft caps, are not implemented)",
}
OPTIONAL_IN_YARN = {
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
}
# Keys that change the computation: the values that model.py implements. Exports write the first one.
MEANS_OURS = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "add_cross_attention": (False,),
    "auto_map": (None,),
    "attention_bias": (False, None),
    "attention_multiplier": (None,),
    "attn_pdrop": (0.0,),
    "causal": (True,),
    "decoder_sparse_step": (1,),
    "do_layer_norm_before": (True,),
    "embd_pdrop": (0.0,),
    "embedding_multiplier": (1, None),
    "full_attn_mod": (1, None),
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", None),  # Gemma's name; no other family reads it
    "interpolate_factor": (1, None),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "lm_head_multiplier": (1, None),
    "logit_scale": (1, None),
    "logits_scaling": (1, None),
    "mlp_bias": (False, None),
    "mlp_only_layers": ([], None),
    "mscale": (None, 1),
    "mscale_all_dim": (None, 0, 1),
    "norm_topk_prob": (True,),
    "partial_rotary_factor": (1, None),
    "residual_multiplier": (1, None),
    "resid_pdrop": (0.0,),
    "router_jitter_noise": (0, None),
    "rope_type": ("default", None),
    "scale_attn_by_inverse_layer_idx": (False,),
    "sliding_window_pattern": (6, 0, None),  # Gemma also has it
    "scale_attn_weights": (True,),
    "scale_depth": (None,),
    "scale_emb": (1, None),
    "use_rms_norm": (True,),
    # The rest is of models that are not implemented.
    **dict.fromkeys(
        (
            "activation", "alibi", "apply_residual_connection_post_layernorm", "attention_chunk_size",
            "attention_out_bias", "attention_sink", "attn_config", "attn_logit_softcapping", "attn_temperature_tuning",
            "bias", "clip_qkv", "compression_config", "dim_model_base", "embedding_scale", "ffn_config",
            "final_logit_softcapping", "first_k_dense_replace", "global_attn_every_n_layers",
            "interleave_moe_layer_step", "kv_lora_rank", "layer_norm_eps", "llama_4_scaling_beta", "lm_head_bias",
            "logits_soft_cap", "mlp_layer_types", "moe_layers", "multi_query", "mup_enabled", "n_group",
            "n_routed_experts", "n_shared_experts", "new_decoder_architecture", "no_bias", "norm_bias", "norm_type",
            "num_experts", "num_kv_shared_layers", "num_local_experts", "num_nextn_predict_layers",
            "num_shared_experts", "parallel_attn", "position_embedding_type", "pruned_heads", "q_lora_rank",
            "qk_layernorm", "qk_nope_head_dim", "qk_rope_head_dim", "qkv_bias", "quantization_config",
            "query_pre_attn_scalar", "rope_interleave", "rope_interleaved", "rope_local_base_freq", "rotary_dim",
            "rotary_pct", "routed_scaling_factor", "scale_embedding", "scoring_func", "shared_expert_intermediate_size",
            "shared_intermediate_size", "sliding_window", "swiglu_limit", "text_config",
            "topk_group", "topk_method", "use_bias", "use_bidirectional_attention", "use_mrope",
            "use_parallel_residual", "use_post_norm", "use_qk_norm", "use_qkv_bias", "use_sliding_window", "v_head_dim",
            "vision_config", "window_size",
        ),
        (None, False, 0, "", [], {}),
    ),
}  # fmt: skip
# Values of an unknown key that change nothing.
NEUTRAL = ("None", "False", "0", "0.0", "1.0", "''", "[]", "{}")
# Settings of generation and bookkeeping, most of them in transformers' GenerationConfig and PretrainedConfig.
BOOKKEEPING = {
    "layer_types",  # which _read_layers checks
    # rates of dropout, which are not applied
    "attention_dropout", "attn_dropout", "attn_pdrop", "classifier_dropout", "embd_pdrop", "embedding_dropout",
    "ffn_dropout", "hidden_dropout", "hidden_dropout_prob", "mlp_dropout", "residual_dropout", "resid_dropout",
    "resid_pdrop", "summary_first_dropout",
    "architectures", "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
    "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "eos_token_id", "epsilon_cutoff", "eta_cutoff", "experts_implementation", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "guidance_scale",
    "id2label", "internal_version", "is_decoder", "is_llama_config", "label2id", "length_penalty", "low_memory",
    "max_length", "max_new_tokens", "max_sequence_length", "max_time", "max_window_layers", "min_length",
    "min_new_tokens", "min_p", "model_max_length", "model_type", "n_ctx", "n_special", "name_or_path",
    "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "num_beams",
    "num_labels", "num_return_sequences", "original_max_position_embeddings", "output_attentions",
    "output_hidden_states", "output_logits", "output_past", "output_router_logits", "output_scores", "pad_token_id",
    "penalty_alpha", "predict_special_tokens", "prefix", "pretraining_tp", "problem_type", "prompt_lookup_num_tokens",
    "remove_invalid_values", "renormalize_logits", "reorder_and_upcast_attn", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "stop_strings", "summary_activation", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "suppress_tokens", "target_lookbehind", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "tokenizer_type", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache", "use_flash_attn",
}  # fmt: skip
# Keys of rope_scaling and rope_parameters. The types that do not need a key do not read it.
READ_IN_ROPE = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor", "long_factor",
    "low_freq_factor", "max_position_embeddings", "original_max_position_embeddings",
    "rope_theta", "rope_type", "short_factor", "truncate", "type",
}  # fmt: skip
EXPECTED = {
    int: "a positive whole number",
    float: "a positive number",
    bool: "true or false",
}


@functools.cache
def family(config: ModelConfig) -> str:
    """The model_type of a shape: the first whose config.json expresses it. UserError: none does."""
    for kind in FAMILIES:
        with contextlib.suppress(ValueError):
            if _read(_write(config, kind)) == config:
                return kind
    raise UserError(f"no family in hf/families.py has the shape of this model: {config}")


class Piece(NamedTuple):
    """A tensor in the file. place: its slices of our parameter. transposed: GPT-2 stores its linears as [in, out]."""

    name: str
    place: tuple[slice, ...]
    transposed: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape in the file; an expert lacks our first dimension there."""
        shape = tuple(s.stop - s.start for s in self.place[-2:])
        return shape[::-1] if self.transposed else shape

    @property
    def part(self) -> str:
        """The part of a projection that it holds, as PEFT names it: q, k, v, o, ...; empty for others."""
        return re.search(r"(\w+)_proj\.weight$|$", self.name)[1] or ""


def pieces_of(name: str, shape: tuple[int, ...], config: ModelConfig) -> list[Piece]:
    """The tensors in the file for a parameter: itself, the tensors that it fuses, or the tensors of each expert."""
    kind, layer = family(config), re.search(r"\d+|$", name)[0]
    stored_name, *fused = FAMILIES[kind].names[re.sub(r"\d+", "{i}", name)]
    fused = fused or [""]
    height, *widths = shape[-2:]
    heights = [height // len(fused)] * len(fused)
    if len(fused) == 3:  # q, k, v
        heights = [config.head_dim * n for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
    experts = [(slice(e, e + 1),) for e in range(shape[0])] if len(shape) == 3 else [()]
    transposed = kind == "gpt2" and name.endswith("_proj.weight")
    out, start = [], 0
    for part, rows in zip(fused, heights, strict=True):
        place = slice(start, start + rows), *(slice(0, width) for width in widths)
        for e, expert in enumerate(experts):
            out.append(Piece(stored_name.format(i=layer, e=e, part=part), expert + place, transposed))
        start += rows
    return out


# ---- reading


def read_config(folder: Path) -> ModelConfig:
    """The shape in a folder's config.json, written by transformers 4 or 5. Refuses, by name, keys that ask for what
    model.py does not implement."""
    path = folder / "config.json"
    try:
        return _read(read_object(path))
    except (AttributeError, TypeError, ValueError, LookupError) as e:  # a list in the place of an object, or similar
        raise UserError(f"{path}: {e}") from None


def _read(given):
    if text_part := TEXT_PARTS.get(str(given.get("model_type"))):
        given = given | {"model_type": text_part} | given["text_config"]
    kind, shape = given.get("model_type"), {}
    if str(kind) not in FAMILIES:
        why = LACKING.get(str(kind), "")
        raise ValueError(f"model_type {kind!r} is not supported{why}; supported are {', '.join(FAMILIES)}")
    row = FAMILIES[kind]
    given = {row.aliases.get(key, key): value for key, value in given.items()}
    if given.get("architectures") == [row.architecture]:
        given.pop("auto_map", None)  # transformers takes its own class
    _refuse_keys(given, BOOKKEEPING.union(row.keys.values(), row.others), MEANS_OURS | row.means)
    values = row.defaults | given
    for field in fields(ModelConfig):
        if key := row.keys.get(field.name):
            shape[field.name] = _read_field(values, key, field.type, 0 if key == "n_inner" else field.default)
    shape["ffn_dim"] = shape["ffn_dim"] or 4 * shape["dim"]
    config = ModelConfig(**row.shape, **shape)  # refuses absurd sizes
    rope = _read_rope(given, row) if "rope_theta" in row.others else {}
    return replace(config, **_read_layers(values, row, config.n_layers), **rope)


def _refuse_keys(given, known, means=MEANS_OURS):
    """ValueError: keys that may ask for a computation that is not implemented. known: keys that may have any value."""
    problems = []
    for key, value in given.items():
        if key in known or key.startswith("_"):
            continue
        if key in means and value not in means[key]:
            problems.append(f"{key} is {value!r}"[:90] + f" (supported: {means[key][0]!r})")
        elif key not in means and repr(value) not in NEUTRAL:
            problems.append(f"unknown key {key}: {value!r}"[:90])
    if problems:
        raise ValueError("; ".join(problems))


def _read_layers(values, row, n_layers):
    """-> the fields layer_kinds and window."""
    on = row.windows and values.get("use_sliding_window", True)
    window = _read_field(values, "sliding_window", int, 0) if on else 0
    interval = _read_field(values, "no_rope_layer_interval", int, n_layers + 1)
    rotates = values.get("no_rope_layers") or [(i + 1) % interval for i in range(n_layers)]
    first = _read_field(values, "max_window_layers", int) if "max_window_layers" in row.defaults else 0
    expected = [FULL] * n_layers
    for i in range(first if window else n_layers, n_layers):
        if not (rotates[i] and "no_rope_layers" in row.defaults):  # there, layers with RoPE have no window
            expected[i] = row.windows[i % len(row.windows)]
    types = values.get("layer_types") or expected
    fits = window and "layer_types" in row.defaults and len(types) == n_layers and {SLIDING, FULL}.issuperset(types)
    if not (fits or types == expected):
        raise ValueError(f"layer_types is {str(types)[:90]}, sliding_window is {window or None}: not implemented")
    kinds = [("window" if types[i] == SLIDING else "full") + " nope" * (not rotates[i]) for i in range(n_layers)]
    return {"layer_kinds": tuple(kinds), "window": window}


def _read_rope(given, row):
    """-> the fields rope_theta, window_rope_theta and rope_scaling. Version 4 has the keys rope_theta and rope_scaling,
    version 5 rope_parameters instead, which families with two_ropes have for each type of layer."""
    plain = {"rope_type": "default", "rope_theta": row.defaults.get("rope_theta", 10000.0)}
    top = plain | {key: given[key] for key in ROPE[2:] if given.get(key) is not None}
    old, new = (given.get(key) or {} for key in ROPE[:2])
    rope = near = top | (new or old)
    local = (row.defaults | given).get("rope_local_base_freq")
    if row.two_ropes:
        rope = top | (new.get(FULL) or old)
        near = plain | {"rope_theta": local or plain["rope_theta"]} | new.get(SLIDING, {})
    is_near = near in (rope, plain | {"rope_theta": (near if local else rope)["rope_theta"]})
    kind, scaling = rope.get("type") or rope["rope_type"], None
    if not (is_near and str(kind) in row.rope_keys):
        raise ValueError(f"rope_parameters of type {kind} are not implemented: {new or old!r:.99}")
    _refuse_keys(rope, READ_IN_ROPE.union(row.rope_keys[kind].values()))
    if kind != "default":
        numbers = {}
        for field, key in row.rope_keys[kind].items():
            default = getattr(RopeScaling, field) if field in OPTIONAL_IN_YARN else MISSING
            numbers[field] = _read_field(rope, key, bool if field == "truncate" else float, default)
        if kind == "yarn" and rope.get("attention_factor") is None:
            is_one = NO_ATTENTION_FACTOR.items() <= rope.items()
            numbers["attention_factor"] = 1.0 if is_one else 0.1 * math.log(max(numbers["factor"], 1.0)) + 1.0
        scaling = RopeScaling(kind=kind, **numbers, in_windows=near == rope)
    theta = _read_field(near, "rope_theta", float) if local else 0.0
    return {"rope_theta": _read_field(rope, "rope_theta", float), "rope_scaling": scaling, "window_rope_theta": theta}


def _read_field(values, key, kind, default=MISSING):
    value = values.get(key)
    if value is None and default is not MISSING:
        return default
    least = 0 if key in ("router_aux_loss_coef", "max_window_layers") else 2**-149
    if type(value) not in ((int, float) if kind is float else (kind,)) or not (kind is bool or least <= value < 2**53):
        raise ValueError(f"{key} is {value!r}, expected {EXPECTED[kind]}")
    return kind(value)


# ---- writing


def config_json(config: ModelConfig, dtype: str) -> dict:
    """The config.json of a shape, with keys that transformers 4 and 5, vLLM and llama.cpp read. UserError: no family
    has this shape. dtype: torch's name, as bfloat16."""
    return _write(config, family(config)) | {"torch_dtype": dtype}


def _write(config, kind):
    """The keys of a family for a shape; features that the family lacks are left out."""
    row, layers = FAMILIES[kind], [config.kind(i) for i in range(config.n_layers)]
    types = [SLIDING if "window" in layer else FULL for layer in layers]
    by_layer = {
        "sliding_window": config.window or None,
        "use_sliding_window": config.window > 0,
        "layer_types": types,
        "max_window_layers": [*types, SLIDING].index(SLIDING),  # older versions read it instead of layer_types
        "no_rope_layers": [int("nope" not in layer) for layer in layers],
        "rope_local_base_freq": config.window_rope_theta or config.rope_theta,
        "query_pre_attn_scalar": int(config.query_scale),
    }
    values = {key: value for key, (value, *_) in (MEANS_OURS | row.means).items()} | by_layer
    out = {"architectures": [row.architecture], "model_type": kind}
    out |= {key: values[key] for key in row.defaults if key in values}
    out |= {key: by_layer.get(key) or getattr(config, field) for field, key in row.keys.items()}
    if "rope_theta" not in row.others:
        return out
    scaling, out["rope_theta"] = config.rope_scaling, config.rope_theta
    plain = rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if scaling:
        numbers = {key: getattr(scaling, field) for field, key in row.rope_keys.get(scaling.kind, {}).items()}
        if numbers.get("attention_factor") == 1:
            numbers |= NO_ATTENTION_FACTOR  # which llama.cpp reads instead
        out["rope_scaling"] = {"rope_type": scaling.kind} | numbers
        rope = plain | out["rope_scaling"]
    if row.two_ropes:
        near = rope if scaling and scaling.in_windows else plain
        rope = {FULL: rope, SLIDING: near | {"rope_theta": by_layer["rope_local_base_freq"]}}
    return out | {"rope_parameters": rope}
