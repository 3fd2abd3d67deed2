"""Benchmarks of flatland against other trainers, on this machine.

    python bench/run.py generate                         # greedy decoding, against transformers
    python bench/run.py cpu                              # training on a CPU, against transformers and litgpt
    python bench/run.py loss --nanogpt DIR --nanochat DIR  # validation loss after two minutes, against checkouts
    python bench/run.py gpu --parts models               # training on one GPU; without --parts, all parts
    python bench/run.py scale                            # starting on up to 1,024 simulated ranks, 100,000 shards

A row gives the median, the 10th and 90th percentile, the ratio to the first row of its case, MFU, and peak memory in
GiB. On a GPU, MFU counts causal attention, against the data sheet's peak, and GiB is the peak of torch's allocator.
Each contender in training is a new process, so an error or a crash ends only its own row, and then the status is 1.
Missing peers are reported: `bash test.sh` installs transformers, `pip install litgpt` litgpt."""

import json
import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from timeit import timeit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lib.errors import Failure, Parser, UserError, prepare_python, run_script, within

if __name__ == "__main__":
    prepare_python()

import torch  # isort: skip

from common import Row, Turn, race
from config import parse_args
from generate import sample
from lib.families import config_json
from lib.machine import describe_environment
from lib.weights import export_model
from model import Transformer
from peers import bench_loss, race_training, transformers
from scale import bench_scale
from shapes import MODELS, ModelConfig

# Races in training, by part of the suite; peers in their best configurations.
CPU = {  # flags, contenders
    "llama": (
        "--model llama2-7b --vocab_size 32000 --dim 512 --n_layers 8 --n_heads 8 --n_kv_heads 4 --ffn_dim 1408"
        " --seq_len 512 --micro_batch 8",
        ("flatland", "transformers, mixed, compiled", "litgpt, mixed, compiled", "litgpt, bf16, compiled"),
    ),
    "gpt2": (
        "--model gpt2 --vocab_size 50304 --dim 384 --n_layers 6 --n_heads 6 --ffn_dim 1536"
        " --seq_len 256 --micro_batch 12",
        ("flatland", "transformers, mixed, compiled"),
    ),
}
LLAMA = "--model llama3-8b --n_layers 8 --seq_len 4096 --micro_batch 2"
GPT2 = "--model gpt2 --seq_len 1024 --micro_batch 64"
OFFLOAD = "--model llama3.2-1b --seq_len 8192 --micro_batch 4 --checkpointing block"
OFFLOAD += " --param_dtype bf16 --state_dtype bf16"
ON_OFF = ("flatland", "flatland --fp8 tensor")
GPU = {  # (title, flags, contenders), in the order of their value
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
BUDGET = 520.0  # seconds for the GPU suite; a contender that exceeds it fails, so that a call ends within nine minutes
WIDE = ModelConfig(vocab_size=512, dim=256, n_layers=4, n_heads=8, ffn_dim=688, max_seq_len=2048)
GENERATED = {
    "tiny-llama": MODELS["tiny-llama"],
    "4 layers of 256": WIDE,
    "4 layers of 256, 2 key/value heads": replace(WIDE, n_kv_heads=2),
}


@torch.no_grad()
def fill_randomly(model: Transformer, std: float) -> Transformer:
    """std: large enough that a wrong layer changes the result."""
    for p in model.parameters():
        p.normal_(0, std) if p.ndim > 1 else p.fill_(1)
    return model


def bench_cpu(args: Namespace) -> Iterator[Row]:
    """Training on a CPU: tokens/s of full steps (forward, loss, backward, clipping, AdamW)."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for part in filter(args.parts.__contains__, CPU):
        flags, names = CPU[part]
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            export_model(fill_randomly(Transformer(parse_args(flags.split()).model_config), 0.08), folder)
            yield from race_training(part, flags, names, Path(folder), 1, args.repeats, math.inf)


def bench_gpu(args: Namespace) -> Iterator[Row]:
    """One GPU: tokens/s, MFU and peak memory of full training steps."""
    end = time.monotonic() + BUDGET
    for part in filter(args.parts.__contains__, GPU):
        for title, flags, names in GPU[part]:
            with tempfile.TemporaryDirectory() as folder:
                values = config_json(parse_args(flags.split()).model_config, "bfloat16")
                Path(folder, "config.json").write_text(json.dumps(values))
                yield from race_training(title, flags, names, Path(folder), 5, 1, end)


def race_generation(case: str, ours: Transformer, theirs: torch.nn.Module, prompts: int, rounds: int) -> Iterator[Row]:
    ids = torch.randint(0, ours.config.vocab_size, (prompts, 32), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 128, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    works = {
        "transformers": lambda: theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 32:],
        "flatland": lambda: torch.stack([*sample(ours, ids, 128, ours.config.max_seq_len, temperature=0)], 1),
    }
    if not torch.equal(*(work() for work in works.values())):
        raise Failure(f"{case}: the generated ids differ")
    turns = {name: lambda work=work: Turn([timeit(work, number=1)]) for name, work in works.items()}
    yield from race(case, "tokens/s", prompts * 128, turns, rounds)


def bench_generate(args: Namespace) -> Iterator[Row]:
    """Greedy decoding, random weights, fp32: prompts of 32 tokens, 128 new tokens."""
    for name, config in GENERATED.items():
        ours = fill_randomly(Transformer(config).eval(), 0.15)
        with tempfile.TemporaryDirectory() as folder:
            export_model(ours, folder)
            theirs, _ = transformers(Path(folder))
        for prompts in (1, 8):
            yield from race_generation(f"{name}, {prompts} prompts", ours, theirs, prompts, args.repeats)


# ---- the command

SUITES = {
    "generate": bench_generate,
    "cpu": bench_cpu,
    "gpu": bench_gpu,
    "loss": bench_loss,
    "scale": bench_scale,
}
PARTS = [*(CPU | GPU)]
FLAGS = {
    "suite": dict(choices=SUITES, help="what to measure"),
    "--parts": dict(nargs="+", choices=PARTS, default=PARTS, help="of cpu and gpu (default: all)"),
    "--repeats": dict(type=within(int, 1), default=5, help="cpu, generate: turns of each (%(default)s)"),
    "--nanogpt": dict(type=Path, help="loss: folder of a checkout"),
    "--nanochat": dict(type=Path, help="loss: folder of a checkout"),
}


def parse(argv: list[str]) -> Namespace:
    args = Parser(FLAGS, prog="bench/run.py", description=__doc__.splitlines()[0]).parse_args(argv)
    if args.suite == "gpu" and not torch.cuda.is_available():
        raise UserError("gpu: torch finds no GPU on this machine")
    return args


def print_line(cells):
    texts = ["" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(texts)} |", flush=True)


def main(argv: list[str]) -> None:
    args, failures = parse(argv), 0
    print(", ".join(f"{key} {value}" for key, value in describe_environment().items()))
    print(f"\n{SUITES[args.suite].__doc__}\n")
    for i, row in enumerate(SUITES[args.suite](args)):
        if not i:
            print_line(row)
            print_line(["---"] * len(row))
        failures += row["note"].startswith("failed: ")
        print_line(row.values())
    if failures:
        raise Failure(f"{failures} contenders failed: see the rows above")


if __name__ == "__main__":
    run_script(main)
