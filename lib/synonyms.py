"""The names that other trainers use for our flags. Imports no torch."""

from lib.errors import nearest

# Our flag, and its names in nanoGPT, transformers, torchtitan, torchtune, axolotl and the FSDP recipes for Slurm.
ELSEWHERE = {
    "model": ("model_type", "model_name", "model_flavor", "flavor", "model.name"),
    "weights": (
        "model_name_or_path", "hf_pretrained_model_name_or_dir", "base_model", "init_from", "initial_load_path",
    ),
    "dim": ("n_embd", "hidden_size", "hidden_width", "hidden_dim", "d_model", "embed_dim"),
    "n_layers": ("n_layer", "num_layers", "num_hidden_layers"),
    "n_heads": ("n_head", "num_heads", "num_attention_heads"),
    "n_kv_heads": ("n_kv_head", "num_kv_heads", "num_key_value_heads", "llama_num_key_value_heads", "num_query_groups"),
    "ffn_dim": ("intermediate_size", "llama_intermediate_size", "ffn_hidden_size", "n_inner", "intermediate_dim"),
    "data": (
        "dataset", "datasets", "dataset_path", "dataset_name", "data_path", "data_dir", "data_files", "train_file",
        "training_dir", "train_data",
    ),
    "val_data": (
        "validation_file", "eval_file", "test_dir", "eval_dataset", "validation.dataset", "validation.dataset_path",
    ),
    "tokenizer": (
        "tokenizer_name", "tokenizer_path", "tokenizer_name_or_path", "tokenizer_type", "hf_assets_path",
        "tokenizer.path",
    ),
    "cache": ("cache_dir", "dataset_prepared_path"),
    "text_field": ("dataset_text_field", "text_column", "text_column_name"),
    "documents": ("packing", "sample_packing", "packed"),
    "lora": ("lora_r", "lora_rank", "lora_dim"),
    "lora_targets": ("lora_target_modules", "target_modules", "lora_target", "lora_attn_modules"),
    "quantize": ("load_in_4bit", "bnb_4bit_quant_type", "quantization", "quantizer", "use_4bit", "qlora"),
    "lora_weights": ("adapter", "adapter_name_or_path", "lora_model_dir", "peft_path"),
    "seq_len": (
        "block_size", "max_seq_len", "max_seq_length", "max_length", "sequence_len", "sequence_length",
        "seq_length", "context_length", "max_context_width", "model_max_length", "cutoff_len",
    ),
    "micro_batch": (
        "batch_size", "train_batch_size", "per_device_train_batch_size", "micro_batch_size", "local_batch_size",
        "device_batch_size",
    ),
    "batch_tokens": ("total_batch_size",),
    "epochs": ("num_epochs", "num_train_epochs", "max_epochs", "n_epochs", "epoch"),
    "steps": (
        "max_steps", "max_iters", "max_train_steps", "max_training_steps", "num_steps", "train_iters",
        "num_iterations",
    ),
    "lr": ("learning_rate", "max_lr"),
    "optimizer": ("optim", "optimizer_type", "optimizer_name"),
    "min_lr": ("lr_min", "min_learning_rate"),
    "warmup_steps": (
        "warmup", "warmup_iters", "warmup_ratio", "num_warmup_steps", "lr_warmup_steps", "lr_warmup_iters",
    ),
    "schedule": ("lr_scheduler", "lr_scheduler_type", "lr_decay_style", "decay_lr", "decay_type"),
    "decay_steps": ("lr_decay_iters", "lr_decay_steps", "decay_ratio"),
    "beta1": ("adam_beta1",),
    "beta2": ("adam_beta2",),
    "clip": (
        "grad_clip", "max_grad_norm", "clip_grad_norm", "max_norm", "gradient_clip_val", "gradient_clipping",
        "clip_grad",
    ),
    "context_parallel": (
        "cp_size", "context_parallel_degree", "context_parallel_size", "sequence_parallel_size", "ulysses_degree", "sp",
    ),
    "dtype": ("bf16", "fp16", "tf32", "torch_dtype", "precision", "mixed_precision", "mixed_precision_param"),
    "reduce_dtype": ("mixed_precision_reduce",),
    "fp8": ("float8", "enable_fp8", "recipe_name"),
    "fp8_all_gather": ("enable_fsdp_float8_all_gather",),
    "fp8_skip": ("filter_fqns",),
    "shard_size": ("sharding_strategy", "data_parallel_shard_degree", "shard_degree", "fsdp"),
    "reshard": ("fsdp_reshard_after_forward", "reshard_after_forward"),
    "prefetch": ("forward_prefetch", "backward_prefetch", "backward_fetch_policy"),
    "offload": ("cpu_offload", "enable_cpu_offload", "fsdp_cpu_offload", "offload_params"),
    "offload_activations": ("activation_offloading", "enable_activation_offloading"),
    "checkpointing": (
        "gradient_checkpointing", "activation_checkpointing", "enable_activation_checkpointing",
        "activation_checkpoint.mode",
    ),
    "compile": ("torch_compile", "compile_model", "compile.enable"),
    "attention": ("attn_implementation", "flash_attention", "use_flash_attn", "use_flash_attention"),
    "out": ("out_dir", "output_dir", "dump_folder", "checkpoint_dir", "save_dir", "checkpoint.folder"),
    "seed": ("random_seed",),
    "log_every": ("log_interval", "logging_steps", "logging_freq", "log_freq", "log_every_n_steps"),
    "eval_every": (
        "eval_interval", "eval_steps", "eval_freq", "validation_freq", "val_check_interval", "validation.freq",
    ),
    "eval_batches": ("eval_iters", "validation_batches", "max_eval_batches", "limit_val_batches", "validation.steps"),
    "save_every": (
        "save_steps", "save_interval", "checkpoint_freq", "ckpt_freq", "checkpoint_interval",
        "checkpoint_every_n_steps", "checkpoint.interval",
    ),
    "save_async": ("async_mode", "async_save"),
    "keep": ("save_total_limit", "num_kept_checkpoints", "keep_latest_k"),
    "resume": ("resume_from_checkpoint", "resume_from", "auto_resume_from_checkpoints", "load_step"),
    "deterministic": ("full_determinism",),
    "profile": ("enable_profiling",),
    "track": (
        "report_to", "wandb", "wandb_log", "use_wandb", "wandb_project", "tensorboard", "tensorboard_dir", "logger",
        "loggers",
    ),
    "timeout": ("ddp_timeout", "init_timeout_seconds", "train_timeout_seconds"),
}  # fmt: skip

_PARALLEL = (
    "tensors, layers and experts are not divided; --shard_size shards all over ranks, --context_parallel divides rows"
)
_PROCESSES = "there is one process per visible GPU; bash launch.sh --nproc N starts another number of them"
_ACCUMULATION = "--batch_tokens is it in tokens: that number x --micro_batch x --seq_len x ranks"
_DEVICE = (
    "visible GPUs are used, else the CPU; CUDA_VISIBLE_DEVICES=0 or CUDA_VISIBLE_DEVICES= before the command chooses"
)
_DEEPSPEED = (
    "ZeRO's sharding is --shard_size, its offload --offload cpu; batch, learning rate and dtype have their own flags"
)
# What to do instead of a flag whose meaning or unit no flag of ours has.
INSTEAD = {
    "deepspeed": _DEEPSPEED, "deepspeed_config": _DEEPSPEED, "zero_stage": _DEEPSPEED,
    "tensor_parallel_size": _PARALLEL, "tensor_model_parallel_size": _PARALLEL, "tensor_parallel_degree": _PARALLEL,
    "tensor_parallel": _PARALLEL, "tp_size": _PARALLEL, "tp": _PARALLEL, "pipeline_parallel_degree": _PARALLEL,
    "pipeline_model_parallel_size": _PARALLEL, "pipeline_parallel_size": _PARALLEL, "pp_size": _PARALLEL,
    "expert_parallel_size": _PARALLEL, "expert_parallel_degree": _PARALLEL, "expert_model_parallel_size": _PARALLEL,
    "device": _DEVICE, "use_cpu": _DEVICE, "no_cuda": _DEVICE, "device_map": _DEVICE, "accelerator": _DEVICE,
    "num_gpus": _PROCESSES, "n_gpus": _PROCESSES, "gpus": _PROCESSES, "num_processes": _PROCESSES,
    "nproc_per_node": _PROCESSES, "devices": _PROCESSES, "ngpu": _PROCESSES, "num_machines":
    "the file hosts lists the machines; or bash launch.sh --hosts A,B",
    "gradient_accumulation_steps": _ACCUMULATION, "grad_accum_steps": _ACCUMULATION, "grad_accum": _ACCUMULATION,
    "accumulate_grad_batches": _ACCUMULATION,
    "global_batch_size": "--batch_tokens is it in tokens: rows x --seq_len",
    "min_lr_factor": "--min_lr is it as a rate: the factor x --lr",
}  # fmt: skip


def describe_unknown(typed: str, helps: dict[str, str]) -> str:
    """What to use instead of a flag of another trainer or a misspelled one. helps: of our flags."""
    meanings = {theirs: flag for flag, names in ELSEWHERE.items() for theirs in names}
    name = typed.replace("-", "_")
    last = name.rpartition(".")[2]  # torchtitan's names are SECTION.NAME
    if last in INSTEAD:
        return f"unknown flag --{typed}: {INSTEAD[last]}"
    known = meanings.get(name) or meanings.get(last) or nearest(last, helps)
    near = f"the nearest one is --{known} ({helps[known]}); " if known else ""
    return f"unknown flag --{typed}; {near}--help lists all"
