"""Benchmarks: ours against what others use for the same work, on this machine.

    python bench.py                          # every suite
    python bench.py --suite generate --json results.json

First the results of all contenders are compared: what is timed computes the same. Then each runs once unmeasured, and
they take turns, so that what else the machine does meets them alike. A row gives the median speed of its runs, and the
10th and 90th percentile; `ratio` is its median over that of the last of its case.

It needs what `bash test.sh` installs on top of requirements.txt."""

import argparse
import io
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from errors import UserError  # first: it finds the Python that has torch

import torch  # isort: skip
import numpy as np

from generate import sample
from model import MODELS, ModelConfig, Transformer, random_init
from shard import fill
from text import builtin_documents
from tokenizer import LLAMA3_SPLIT, load_tokenizer
from weights import export_model

Row = dict[str, str | float]


def race(case: str, unit: str, amount: float, contenders: dict[str, Callable[[], object]], repeats: int) -> list[Row]:
    """Times contenders, each of which does `amount` of work per call -> a row for each, in amount per second."""
    seconds = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, work in contenders.items():
            begin = time.perf_counter()
            work()
            if turn:  # the first is the warm-up
                seconds[name].append(time.perf_counter() - begin)
    rows = []
    for name, values in seconds.items():
        low, median, high = np.quantile(amount / np.array(values), (0.1, 0.5, 0.9)).tolist()
        rows.append({"case": case, "what": name, "unit": unit, "median": median, "p10": low, "p90": high})
    return [row | {"ratio": row["median"] / rows[-1]["median"]} for row in rows]


def same(what: str, *results) -> None:
    if any(result != results[0] for result in results):
        raise SystemExit(f"{what}: the results differ, so there is nothing to compare")


# ---- suites


def bench_generate(repeats: int) -> Iterator[Row]:
    """Greedy decoding with random weights, fp32, against transformers' generate: prompts of 32 tokens, 128 new ones."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    wide = ModelConfig(vocab_size=512, dim=256, n_layers=4, n_heads=8, ffn_dim=688, max_seq_len=2048, init_std=0.15)
    models = {
        "tiny-llama": replace(MODELS["tiny-llama"], init_std=0.15),
        "4 layers of 256": wide,
        "4 layers of 256, 2 key/value heads": replace(wide, n_kv_heads=2),
    }
    n, length = 128, 32
    for name, config in models.items():
        ours = Transformer(config).eval()
        fill(ours, random_init(config, {k: tuple(p.shape) for k, p in ours.named_parameters()}, 0))
        with tempfile.TemporaryDirectory() as folder:
            export_model(ours, Path(folder) / "model")
            theirs = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()
        for prompts, ragged in ((1, False), (8, False), (8, True)):
            ids = torch.randint(0, config.vocab_size, (prompts, length), generator=torch.Generator().manual_seed(0))
            padding = torch.arange(prompts) * 3 if ragged else torch.zeros(prompts, dtype=torch.long)
            mask = (torch.arange(length) >= padding[:, None]).long()
            limits = {"max_new_tokens": n, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

            def generate(ids=ids, padding=padding if ragged else None, ours=ours) -> list:
                return torch.stack(list(sample(ours, ids, n, temperature=0, padding=padding)), 1).tolist()

            def their_generate(ids=ids, mask=mask, limits=limits, theirs=theirs) -> list:
                return theirs.generate(ids, attention_mask=mask, **limits)[:, length:].tolist()

            case = f"{name}, {prompts} prompt{'s of different lengths' if ragged else 's' if prompts > 1 else ''}"
            same(case, generate(), their_generate())
            contenders = {"flatland": generate, "transformers": their_generate}
            yield from race(case, "tokens/s", prompts * n, contenders, repeats)


def bench_tokenizer(repeats: int) -> Iterator[Row]:
    """Encoding the built-in text, document by document, with vocabularies trained on it."""
    import sentencepiece
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    texts, size = [], 0
    for text in builtin_documents():
        texts.append(text)
        size += len(text.encode())
        if size > 4e6:
            break
    lines = [line for text in texts for line in text.splitlines() if line]
    with tempfile.TemporaryDirectory() as folder:
        bpe, level = tokenizers.Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
        split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence([split, level(add_prefix_space=False, use_regex=False)])
        special = ["<|begin_of_text|>", "<|end_of_text|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=16000, special_tokens=special, initial_alphabet=level.alphabet(), show_progress=False
        )
        bpe.train_from_iterator(texts, trainer)
        bpe.save(f"{folder}/tokenizer.json")
        byte_level = load_tokenizer(f"{folder}/tokenizer.json")
        data = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=data, vocab_size=16000, model_type="bpe", byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        )  # fmt: skip
        Path(folder, "tokenizer.model").write_bytes(data.getvalue())
        pieces = load_tokenizer(f"{folder}/tokenizer.model")
    processor = sentencepiece.SentencePieceProcessor(model_proto=data.getvalue())
    kinds = {
        "byte-level BPE (Llama 3)": (byte_level.encode, "tokenizers", lambda text: bpe.encode(text).ids),
        "sentencepiece BPE (Llama 2)": (pieces.encode, "sentencepiece", processor.encode),
    }
    for case, (ours, name, theirs) in kinds.items():
        same(case, [ours(text) for text in texts], [theirs(text) for text in texts])
        contenders = {
            "flatland": lambda encode=ours: [encode(text) for text in texts],
            name: lambda encode=theirs: [encode(text) for text in texts],
        }
        yield from race(case, "MB/s", size / 1e6, contenders, repeats)


SUITES = {"generate": bench_generate, "tokenizer": bench_tokenizer}


# ---- the command line


def describe() -> dict[str, str | int]:
    from importlib.metadata import version

    packages = ("torch", "transformers", "tokenizers", "sentencepiece", "tiktoken")
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    versions = {name: version(name) for name in packages}
    return {"python": platform.python_version(), "cpu": cpu, "threads": torch.get_num_threads(), **versions}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES), help="which; default: all")
    parser.add_argument("--repeats", type=int, default=9, help="measured runs of each contender (default 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows and the machine to a file")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}: it must be at least 1")
    try:
        machine = describe()
    except ImportError as e:
        raise UserError(f"{e.name} is not installed: `bash test.sh` installs what benchmarks compare with") from None
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    rows = []
    for suite in args.suite:
        print(f"\n{SUITES[suite].__doc__.splitlines()[0]}\n\n| case | what | median | p10 | p90 | ratio |")
        print("|---|---|--:|--:|--:|--:|")
        for row in SUITES[suite](args.repeats):
            rows.append({"suite": suite} | row)
            low, median, high = (f"{row[key]:.4g}" for key in ("p10", "median", "p90"))
            print(f"| {row['case']} | {row['what']} | {median} {row['unit']} | {low} | {high} | {row['ratio']:.2f} |")
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(130)
