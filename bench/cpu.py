"""CPU suites: training steps against peers, and greedy generation against transformers."""

import math
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from common import Row, Turn, race  # first: it finds the Python that has torch

import torch  # isort: skip

from config import parse_args
from generate import sample
from lib.errors import Failure
from lib.weights import export_model
from model import Transformer
from peers import race_training, transformers
from shapes import MODELS, ModelConfig

SHAPES = {  # flags; contenders, peers in their best configurations
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
OURS = " --tokenizer bytes --dtype bf16 --compile block"
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
    for shape in filter(args.parts.__contains__, SHAPES):
        words, names = SHAPES[shape]
        flags = f"{words}{OURS}".split()
        torch.manual_seed(0)
        model = fill_randomly(Transformer(parse_args(flags).model_config), 0.08)
        with tempfile.TemporaryDirectory() as folder:
            export_model(model, Path(folder))
            del model
            yield from race_training(shape, flags, names, Path(folder), 5, 1, args.repeats, math.inf)


def timed(work: Callable) -> Turn:
    begin = time.perf_counter()
    work()
    return Turn([time.perf_counter() - begin])


def bench_generate(args: Namespace) -> Iterator[Row]:
    """Greedy decoding, random weights, fp32: prompts of 32 tokens, 128 new tokens."""
    new, length = 128, 32
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    for name, config in GENERATED.items():
        ours = fill_randomly(Transformer(config).eval(), 0.15)
        with tempfile.TemporaryDirectory() as folder:
            export_model(ours, Path(folder, "model"))
            theirs, _ = transformers(Path(folder, "model"), {"": ours})
        for prompts in (1, 8):
            ids = torch.randint(0, config.vocab_size, (prompts, length), generator=torch.Generator().manual_seed(0))
            decode = partial(sample, ours, ids, new, config.max_seq_len, temperature=0)
            generate = partial(theirs.generate, ids, attention_mask=torch.ones_like(ids), **options)
            case = f"{name}, {prompts} prompts"
            if not torch.equal(generate()[:, length:], torch.stack([*decode()], 1)):
                raise Failure(f"{case}: the generated ids differ")
            works = {"transformers": partial(timed, generate), "flatland": partial(timed, lambda d=decode: [*d()])}
            yield from race(case, "tokens/s", prompts * new, works, args.repeats)
