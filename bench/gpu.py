"""GPU suite: training steps of train.py and of peers on one GPU.

Each contender is a new process, so that an error or a crash ends only its own row. MFU counts causal attention, against
the data sheet's peak. GiB is the peak of torch's allocator."""

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from common import Row  # first: it finds the Python that has torch

import torch  # isort: skip

from config import parse_args
from lib.weights import config_json
from peers import race_training

LLAMA = "--model llama3-8b --n_layers 8 --seq_len 4096 --micro_batch 2"
GPT2 = "--model gpt2 --seq_len 1024 --micro_batch 64"
OFFLOAD = "--model llama3.2-1b --seq_len 8192 --micro_batch 4 --checkpointing block"
OFFLOAD += " --param_dtype bf16 --state_dtype bf16"
ON_OFF = ("flatland", "flatland --fp8 tensor")
RACES = {  # part: (title, flags of train.py, contenders), in the order of their value
    "models": (
        ("Llama 3 8B, 8 of 32 layers", LLAMA, ON_OFF),
        ("Llama 3.2 1B", "--model llama3.2-1b --seq_len 4096 --micro_batch 4", ON_OFF),
        ("GPT-2 124M", GPT2, ON_OFF),
    ),
    "llama": (("Llama 3 8B, peers", LLAMA, ("flatland", "transformers, bf16, compiled", "transformers, bf16")),),
    "fp8": (("Llama 3 8B, recipes", LLAMA, (*ON_OFF, "flatland --fp8 row", "flatland --fp8 row_gw_hp")),),
    "gpt2": (("GPT-2, peers", GPT2, ("flatland", "transformers, bf16, compiled")),),
    "offload": (("Llama 3.2 1B", OFFLOAD, ("flatland", "flatland --offload cpu")),),
}
OURS = " --tokenizer bytes --dtype bf16 --compile block"
STEPS, EVERY = 20, 5  # the records of steps 1 and 5 are warm-up
BUDGET = 520.0  # seconds; a contender that exceeds it fails, so that a call ends within nine minutes


def bench_gpu(args: Namespace) -> Iterator[Row]:
    """One GPU: tokens/s, MFU and peak memory of full training steps."""
    end = time.monotonic() + BUDGET
    for part in filter(args.parts.__contains__, RACES):
        for title, words, names in RACES[part]:
            flags = f"{words}{OURS}".split()
            with tempfile.TemporaryDirectory() as folder:
                values = config_json(parse_args(flags).model_config, torch.bfloat16)
                Path(folder, "config.json").write_text(json.dumps(values))
                yield from race_training(title, flags, names, Path(folder), STEPS, EVERY, 1, end)
