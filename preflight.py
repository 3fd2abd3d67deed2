"""Settles a run before its first step: gives every `auto` its value, checks the inputs that flags name, opens the data
and the weights, and prints --check. config.py refuses flags that exclude each other."""

import json
import os
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import torch

import checkpoint
import plan
import score
from base import host
from base.disk import free_space
from base.errors import UserError, naming
from base.host import cpu_name
from base.hub import local_path
from base.ranks import Ranks, on_every_rank, on_first_rank
from config import Config, check_batch
from data import epochs_as_steps, open_data
from dataset.prepare import knows_text
from generate import Source
from hf import lora
from hf.tokenizer import begins_with_bos, holds_tokenizer, load_tokenizer
from hf.weights import open_adapter, open_weights, refuse_in_the_way
from inputs import settle_inputs
from job.job import logger
from log import attention_kernel, refuse_trackers
from model import flops_per_token, random_init

SHORT_SECONDS = 300  # compiled steps are faster by a tenth to a third
CORE_FLOPS = 5e10  # per second, uncompiled: the default recipe's, in bf16, on a Xeon; wider models reach more
# Different tokenizers encode this text differently.
SAMPLE = "The 12 quick brown foxes' (naïve) jumps\n\n\tover 日本語 🎈 <s></s><|endoftext|> \x00"


def settle(config: Config, ranks: Ranks) -> Config:
    """Gives flags that are empty, 0 or `auto` their values, which flags.json records. Refuses settings that cannot run
    here. All ranks must call."""
    device, size = ranks.device, ranks.world_size
    config = on_first_rank(lambda: settle_inputs(config), ranks)  # the model, its tokenizer, adapters
    config = on_first_rank(lambda: checkpoint.keep_defaults(config), ranks)  # the values of the run's first start
    config = on_first_rank(lambda: epochs_as_steps(config, size), ranks)  # may tokenize for hours
    config = replace(config, dtype=_choose_dtype(config.dtype, device))
    config = replace(config, compile=_choose_compile(config, device))
    return plan.settle(config, device, size)


def _choose_dtype(dtype: str, device: torch.device) -> str:
    cuda = device.type == "cuda"
    if dtype == "tf32" and not (cuda and torch.cuda.get_device_capability(device) >= (8, 0)):
        raise UserError(f"--dtype tf32: only NVIDIA GPUs from Ampere on have it, not this {device.type}; --dtype fp32")
    if dtype != "auto":
        return dtype
    if cuda:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # AMX is 2 times as fast in bf16, AMD's AVX-512 1 to 2 times; Intel's without AMX 1.4 to 1.6 times slower.
        cpu = torch.cpu.get_capabilities()
        has_bf16 = cpu.get("amx_tile") or cpu.get("avx512_bf16") and "Intel" not in cpu_name()
    return "bf16" if has_bf16 else "fp32"


def _choose_compile(config: Config, device: torch.device) -> str:
    """auto: block, unless a run on a CPU ends before compiling, which takes half a minute, has paid for itself."""
    problem = host.compiler_problem() if config.compile != "none" else ""
    if config.compile != "auto":
        if problem:
            raise UserError(f"--compile {config.compile}: {problem}")
        return config.compile
    if problem and os.environ.get("RANK", "0") == "0":
        print(f"Training without torch.compile: {problem}", file=sys.stderr)
    tokens = config.steps * (config.batch_tokens or config.micro_batch * config.seq_len)
    flops = tokens * flops_per_token(config.model_config, config.seq_len)
    short = device.type == "cpu" and flops < SHORT_SECONDS * CORE_FLOPS * torch.get_num_threads()
    return "none" if problem or short else "block"


def refuse_inputs(config: Config, resumes: bool, world_size: int) -> None:
    """Refuses an output folder, trackers, a batch or a tokenizer that the run could not use."""
    _, existing = free_space(Path(config.out))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--out {config.out}: {existing} is not a folder that you may write to")
    refuse_trackers(config.track)
    if not resumes:
        check_batch(config, world_size)
    refuse_in_the_way(Path(config.out) / "hf", True)
    if knows_text(config):
        check_tokenizer(config)


def check_tokenizer(config: Config) -> None:
    """Whether a tokenizer, the model and the weights belong together."""
    tokenizer, size = load_tokenizer(config.tokenizer), config.model_config.vocab_size
    beside = config.weights and holds_tokenizer(local_path(config.weights, "--weights"))
    padding = 1 if config.tokenizer == "bytes" else 512  # vocabularies are padded to multiples of at most 512
    is_foreign = config.weights and not beside and size - tokenizer.vocab_size >= padding
    differs = beside and load_tokenizer(config.weights).encode(SAMPLE) != tokenizer.encode(SAMPLE)
    if tokenizer.vocab_size > size or is_foreign or differs:
        raise UserError(
            f"--tokenizer {config.tokenizer} has {tokenizer.vocab_size} ids, and is not that of --weights or of a"
            f" model with {size} ids: give the model's, or change its vocabulary"
        )
    with naming(f"--tokenizer {config.tokenizer}"):
        begins_with_bos(tokenizer)  # refuses ids that hf/ would not give
    with naming("--prompt"):
        tokenizer.encode(config.prompt)


def check(config: Config) -> int:
    """--check: settles a run as training does, and prints the result. The last line is JSON, for launchers. torchrun's
    variables give the number of processes, otherwise the devices here."""
    device = host.find_device(int(os.environ.get("LOCAL_WORLD_SIZE", 0)))
    here = torch.cuda.device_count() if device.type == "cuda" else 1
    ranks = Ranks(0, int(os.environ.get("WORLD_SIZE", here)), device)
    config = settle(config, ranks)
    resume_from, damaged = checkpoint.find(config, checksums=False)
    checkpoint.refuse_changes(resume_from, config)
    best = checkpoint.Best(config, resume_from, damaged)
    for message in damaged + config.warnings:
        print(message)
    about = dict(out=config.out, device=device.type, processes=ranks.world_size, state="fresh")
    if resume_from:
        about["state"] = "resume"
    is_done = resume_from and (resume_from.step >= config.steps or best.reason)
    if is_done and checkpoint.is_finished(config, resume_from.step):
        about["state"] = "finished"
        say_finished(config, resume_from.step, best)
    else:
        data, *_ = open_inputs(config, resume_from, best, ranks)
        if resume_from:
            data.load_state_dict(resume_from.manifest["position"])  # refuses other data
        about["attention"] = attention_kernel(config, data, device)
        if "LOCAL_WORLD_SIZE" not in os.environ:  # a launcher need not wait for the trace, which imports the compiler
            print(plan.describe_room(config, ranks))
    print(json.dumps(about))
    return 0


def say_finished(config: Config, step: int, best: checkpoint.Best) -> None:
    more = f"--steps {2 * step} " * (step >= config.steps) + "--patience 0" * bool(best.reason)
    print(
        f"{config.out} is finished after step {step}{f' ({best})' * bool(best.step)}, with the weights of step"
        f" {best.step or step} in {config.out}/hf. The same command continues with {more.strip()}"
    )


def open_inputs(config: Config, resume_from, best: checkpoint.Best, ranks: Ranks):
    """Refuses what cannot work -> (data; validation data or None; the rows of --eval_score; read(name, slices) as of
    open_initial_values). All ranks must call."""
    resumes = resume_from is not None
    on_every_rank(lambda: plan.refuse_without_room(config, ranks), ranks)
    on_first_rank(lambda: refuse_inputs(config, resumes, ranks.world_size), ranks)
    data, val_data = open_data(config, ranks)
    questions = on_every_rank(lambda: read_questions(config), ranks) if config.eval_score else []
    if config.keep_best != "none":
        best.judge_by(on_first_rank(lambda: identify_judge(config, val_data, questions), ranks))
    read_values = on_every_rank(lambda: open_initial_values(config, resumes, ranks.rank), ranks)
    return data, val_data, questions, read_values


def identify_judge(config: Config, val_data, questions: list[dict]) -> int:
    """A checksum of the data that decides which checkpoint is the best."""
    by_loss = config.keep_best == "val_loss"
    if not (val_data if by_loss else any("answer" in row for row in questions)):
        raise UserError(f"--keep_best {config.keep_best} needs validation data, or rows with choices")
    data = [val_data.fingerprint, config.eval_batches] if by_loss else questions
    return zlib.crc32(str(data).encode())


def read_questions(config: Config) -> list[dict]:
    """The rows of --eval_score, encoded as the run's texts."""
    tokenizer, shape = load_tokenizer(config.tokenizer), config.model_config
    source = Source("", shape, None, None, tokenizer, config.trained_length(shape), True, ())
    return score.read_questions(config.eval_score, "--eval_score", source)


def open_initial_values(config: Config, resumes: bool, rank: int):
    """read(name, slices) of a run's first values: --weights, or random values, which every rank draws itself. A resumed
    run reads only the frozen base below its adapters. None for a rank that reads nothing. Call it before anything is
    allocated, because a machine may lack the files."""
    if resumes and not config.lora or rank and config.load == "rank0":
        return None
    shape, model = config.model_config, lora.meta_model(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    read = random_init(shape, shapes, config.seed)
    if config.weights:
        folder = local_path(config.weights, "--weights")
        logger.info(f"Reading weights from {folder}")
        with naming(f"--weights {config.weights}"):
            read = open_weights(folder, shape)
    if resumes or not config.lora:
        return read
    if config.lora_weights:
        adapters = open_adapter(local_path(config.lora_weights, "--lora_weights"), config)
    else:
        adapters = lora.random_adapters(shape, shapes, config.seed)
    return lora.join(read, adapters)
