"""Finds the model, its tokenizer, an adapter and the data that flags name on this disk. It imports torch only for
adapters, so that a user sees a mistake at once. preflight.py and data.py call it."""

import glob
import os
from dataclasses import replace
from pathlib import Path

from base.errors import UserError, naming, nearest
from base.hub import local_path
from config import Config, check_model, is_shards, parse_args, split_weight
from dataset.prepare import find_files
from hf.families import read_config
from hf.tokenizer import holds_tokenizer
from shapes import MODELS

BYTES_UP_TO = 1024  # --tokenizer defaults to bytes (258 ids) up to this vocabulary
ADAPTED = ("q", "k", "v", "o", "gate", "up", "down")  # the default of --lora_targets


def settled_args(argv: list[str]) -> Config:
    """What parse_args gives, with the model settled: for commands that do not train."""
    return settle_model(parse_args(argv))


def settle_model(config: Config) -> Config:
    """Gives the model's shape, --tokenizer and the flags of adapters their values where they are empty, and looks for
    no folder otherwise. The tokenizer is the one next to --weights or --model. Refuses values that do not fit the
    model."""
    shape, tokenizer = config.model_config, config.tokenizer
    if shape is None:
        shape = config.with_sizes(MODELS.get(config.model) or read_config(_folder_of(config.model, config)))
    if not tokenizer:
        named = [spec for spec in (config.weights, config.model) if spec and spec not in MODELS]
        tokenizer = next((spec for spec in named if holds_tokenizer(_folder_of(spec, config))), "bytes")
    config = _settle_adapters(replace(config, model_config=shape, tokenizer=tokenizer))
    check_model(config)
    return config


def _folder_of(spec: str, config: Config) -> Path:
    """The folder that --weights or --model names."""
    if spec == config.weights:
        return local_path(spec, "--weights")
    near = nearest(Path(spec).name, MODELS)
    meant = f"did you mean {near}? " if near else ""
    with naming(f"--model {spec}: unknown; {meant}--help lists all. As a folder"):
        return local_path(spec, "--model")


def _settle_adapters(config: Config) -> Config:
    """A flag that is given counts more than --lora_weights'."""
    theirs = {}
    if config.lora_weights and not (config.lora and config.lora_alpha and config.lora_targets):
        from hf.weights import adapter_flags

        theirs = adapter_flags(local_path(config.lora_weights, "--lora_weights"))
    rank = config.lora or theirs.get("lora", 0)
    alpha = config.lora_alpha or theirs.get("lora_alpha", 2.0 * rank)
    targets = config.lora_targets or theirs.get("lora_targets", ADAPTED)
    if rank:
        from hf import lora

        targets = tuple(lora.sizes(config.model_config)) if targets == ("all",) else targets
        lora.check_flags(replace(config, lora_targets=targets))
    return replace(config, lora=rank, lora_alpha=alpha, lora_targets=targets)


def settle_inputs(config: Config) -> Config:
    """Settles the model of a run that trains, and refuses files that are not on this disk, and flags that were likely
    forgotten."""
    chose_bytes = config.tokenizer == "bytes"
    config = settle_model(config)
    if not chose_bytes:
        _refuse_forgotten(config)
    # Under torchrun a run reports its errors itself and machines may lack files; a run that continues may need none.
    if "RANK" in os.environ or Path(config.out, "checkpoints").exists():
        return config
    if config.tokenizer != "bytes":
        local_path(config.tokenizer, "--tokenizer")
    for flag in ("data", "val_data"):
        for path, _ in map(split_weight, getattr(config, flag)):
            if "://" not in path and not glob.glob(os.path.expanduser(path)):
                find_files(path, f"--{flag}")  # names the missing file
    return config


def _refuse_forgotten(c: Config) -> None:
    """Refuses samples of unknown tokens, the built-in text for a real model, and bytes in a vocabulary of words. A user
    who means the last two names --tokenizer bytes."""
    size, as_bytes = c.model_config.vocab_size, c.tokenizer == "bytes"
    shards = [*map(is_shards, c.data + c.val_data)]
    unread = as_bytes and not all(shards) or not c.data and (as_bytes or not c.model.startswith("tiny-"))
    if size > BYTES_UP_TO and unread:
        raise UserError(
            f"--model {c.model} has a vocabulary of {size}: name --data and, for text, the model's --tokenizer;"
            " `--tokenizer bytes` trains on bytes, or on the built-in text"
        )
    for name in ("sample_every", "eval_score"):
        if getattr(c, name) and as_bytes and any(shards):
            raise UserError(f"--{name} needs the --tokenizer of these shards")
