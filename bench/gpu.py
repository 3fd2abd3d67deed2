"""GPU suite: training steps of train.py and of peers, and the loss head, on one GPU.

Each contender is a new process, so that an error or a crash ends only its own row. MFU counts causal attention, against
the data sheet's peak. GiB is the peak of torch's allocator."""

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from common import Row, Turn, race  # first: it finds the Python that has torch

import torch  # isort: skip
from torch import Tensor, nn
from torch.nn import functional as F

from config import parse_args
from lib.machine import find_device
from lib.weights import config_json
from model import LossHead
from peers import race_training
from shapes import ModelConfig

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
    "head": (),
    "llama": (("Llama 3 8B, peers", LLAMA, ("flatland", "transformers, bf16, compiled", "transformers, bf16")),),
    "fp8": (("Llama 3 8B, recipes", LLAMA, (*ON_OFF, "flatland --fp8 row", "flatland --fp8 row_gw_hp")),),
    "gpt2": (("GPT-2, peers", GPT2, ("flatland", "transformers, bf16, compiled")),),
    "offload": (("Llama 3.2 1B", OFFLOAD, ("flatland", "flatland --offload cpu")),),
}
OURS = " --tokenizer bytes --dtype bf16 --compile block"
HEAD = (16384, 4096, 128256)
STEPS, EVERY = 20, 5  # the records of steps 1 and 5 are warm-up
BUDGET = 520.0  # seconds; a contender that exceeds it fails, so that a call ends within nine minutes


def bench_gpu(args: Namespace) -> Iterator[Row]:
    """One GPU: tokens/s, MFU and peak memory of full training steps; the loss head."""
    end = time.monotonic() + BUDGET
    for part in filter(args.parts.__contains__, RACES):
        if part == "head":
            yield from race_heads(*HEAD)
        for title, words, names in RACES[part]:
            flags = f"{words}{OURS}".split()
            with tempfile.TemporaryDirectory() as folder:
                values = config_json(parse_args(flags).model_config, torch.bfloat16)
                Path(folder, "config.json").write_text(json.dumps(values))
                yield from race_training(title, flags, names, Path(folder), STEPS, EVERY, 1, end)


def race_heads(N: int, D: int, V: int) -> Iterator[Row]:
    """The loss head, forward and backward in bf16."""
    device = find_device(1)
    with torch.device(device):
        ours = LossHead(ModelConfig(vocab_size=V, dim=D, n_layers=1, n_heads=1, ffn_dim=D, max_seq_len=N)).bfloat16()
        nn.init.normal_(ours.weight, std=0.02)
        targets, x = torch.randint(0, V, (1, N)), torch.randn(1, N, D, dtype=torch.bfloat16, requires_grad=True)

    def library() -> Tensor:
        if not hasattr(F, "linear_cross_entropy"):
            raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy")
        return F.linear_cross_entropy(x[0], ours.weight, targets[0], reduction="sum")

    def turn(loss_of: Callable[[], Tensor]) -> Turn:
        seconds, losses = [], []
        for _ in range(5):
            begin = time.perf_counter()
            loss = loss_of()
            loss.backward()
            losses.append(loss.item() / N)  # waits for the GPU
            seconds.append(time.perf_counter() - begin)
            x.grad = ours.weight.grad = None
        gib = None
        if device.type == "cuda":
            gib = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        return Turn(seconds[1:], gib, losses)  # the first step compiles

    losses = {"flatland": lambda: ours(x, targets)[0], "F.linear_cross_entropy": library}
    works = {name: partial(turn, loss_of) for name, loss_of in losses.items()}
    return race(f"loss head, {N} x {D} x {V}", "TFLOP/s", 6 * N * D * V / 1e12, works, 3)
