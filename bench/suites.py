"""The small suites: generation, tokenizers, loading weights, checkpoints, data.

torchrun bench/suites.py FOLDER REPEATS          a rank of `load`, which prints seconds and memory as JSON"""

import gzip
import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import Row, Turn, peak_rss, race, require_same, row, rows_of, timed

import numpy as np  # isort: skip
import torch

import checkpoint
import shard
from config import parse_args
from data import make_loader
from generate import sample
from lib.run import Run
from lib.text import Encoder, TextFile, builtin_documents
from lib.tokenizer import LLAMA3_SPLIT, load_tokenizer
from lib.weights import export_model, open_weights, read_config
from model import MODELS, ModelConfig, Transformer
from optim import make_optimizer
from peers import transformers
from prepare import build, write_shard


@torch.no_grad()
def fill_randomly(model: Transformer) -> Transformer:
    for p in model.parameters():
        p.normal_(0, 0.15) if p.ndim > 1 else p.fill_(1)
    return model


# ---- generation

WIDE = ModelConfig(vocab_size=512, dim=256, n_layers=4, n_heads=8, ffn_dim=688, max_seq_len=2048)
GENERATED = {
    "tiny-llama": MODELS["tiny-llama"],
    "4 layers of 256": WIDE,
    "4 layers of 256, 2 key/value heads": replace(WIDE, n_kv_heads=2),
}


def bench_generate(args: Namespace) -> Iterator[Row]:
    """Greedy decoding with random weights, fp32, against transformers' generate: prompts of 32 tokens, 128 new ones."""
    new, length = 128, 32
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    for name, config in GENERATED.items():
        ours = fill_randomly(Transformer(config).eval())
        with tempfile.TemporaryDirectory() as folder:
            export_model(ours, Path(folder, "model"))
            theirs, _ = transformers(Path(folder, "model"), True)
        for prompts, ragged in ((1, False), (8, False), (8, True)):
            ids = torch.randint(0, config.vocab_size, (prompts, length), generator=torch.Generator().manual_seed(0))
            padding = torch.arange(prompts) * 3 * ragged
            mask = (torch.arange(length) >= padding[:, None]).long()
            decode = partial(sample, ours, ids, new, temperature=0, padding=padding if ragged else None)
            their = partial(theirs.generate, ids, attention_mask=mask, **options)
            works = {
                "transformers": lambda their=their: their()[:, length:].tolist(),
                "flatland": lambda decode=decode: torch.stack(list(decode()), 1).tolist(),
            }
            case = f"{name}, {prompts} prompts{' of different lengths' * ragged}"
            require_same(case, *(work() for work in works.values()))
            yield from race(case, "tokens/s", prompts * new, works, args.repeats)


# ---- tokenizers


def builtin_text() -> list[str]:
    """About 4 MB of documents."""
    return [*islice(builtin_documents(), 6000)]


def megabytes(texts: list[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def train_bpe(texts: list[str], path: Path):
    """A byte-level vocabulary with Llama 3's regular expression, as tokenizer.json."""
    import tokenizers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    bpe, split = tokenizers.ByteLevelBPETokenizer(), Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated")
    bpe.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.train_from_iterator(texts, 16000, special_tokens=["<|begin_of_text|>", "<|end_of_text|>"])
    bpe.save(str(path))
    return lambda text: bpe.encode(text).ids


def train_sentencepiece(texts: list[str], path: Path):
    """A BPE of pieces, as Llama 2's tokenizer.model."""
    import sentencepiece

    lines, prefix = (line for text in texts for line in text.splitlines() if line), str(path.with_suffix(""))
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=prefix, vocab_size=16000, remove_extra_whitespaces=False, **options
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(path)).encode


TOKENIZERS = (  # case, who else encodes, how its vocabulary is trained, its file
    ("byte-level BPE (Llama 3)", "tokenizers", train_bpe, "tokenizer.json"),
    ("sentencepiece BPE (Llama 2)", "sentencepiece", train_sentencepiece, "tokenizer.model"),
)


def bench_tokenizer(args: Namespace) -> Iterator[Row]:
    """Encoding the built-in text, document by document, with vocabularies trained on it."""
    texts = builtin_text()
    for case, library, train, file in TOKENIZERS:
        with tempfile.TemporaryDirectory() as folder:
            encoders = {library: train(texts, Path(folder, file))}
            encoders["flatland"] = load_tokenizer(str(Path(folder, file))).encode
        works = {name: lambda encode=encode: [*map(encode, texts)] for name, encode in encoders.items()}
        require_same(case, *(work() for work in works.values()))
        yield from race(case, "MB/s", megabytes(texts), works, args.repeats)


# ---- loading


def forget(path: Path) -> None:
    """Drops the file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def load_rank(folder: Path, repeats: int) -> None:
    """A rank: reads the weights in every way, in turns; rank 0 prints the rows."""
    ranks, config, file = shard.init_ranks(), read_config(folder), folder / "model.safetensors"
    mesh, read, size = shard.make_mesh(0, ranks), open_weights(folder, config), file.stat().st_size
    largest = 4 * config.ffn_dim * config.dim  # gate_up_proj's bytes

    def load(case: str, way: str) -> Turn:
        with torch.device("meta"):
            model = Transformer(config, torch.bfloat16).to(torch.bfloat16)
        shard.shard_model(model, mesh, torch.bfloat16)
        model.to_empty(device="cpu")
        if case == "cold" and ranks.rank == 0:
            forget(file)

        def work() -> None:
            if way != "plain read":
                shard.fill_parameters(model, read, way)
            elif ranks.rank == 0:
                np.fromfile(file, np.uint8)  # into new memory of the file's size
            shard.gather(None, ranks)

        shard.gather(None, ranks)
        before = peak_rss(reset=True)
        turn = timed(work)
        return turn._replace(peak=max(shard.gather(peak_rss() - before, ranks)))

    def note(way: str, speed: float, turns: list[Turn]) -> str:
        peak, shard_size = max(turn.peak for turn in turns), size / ranks.world_size
        return f"peak {peak / shard_size:.2f} shards, {(peak - shard_size) / largest:.1f} tensors beyond it"

    for case in ("cold", "cached"):
        works = {way: partial(load, case, way) for way in ("plain read", "direct", "rank0")}
        title = f"{ranks.world_size} processes, {case}"
        for result in race(title, "GB/s", size / 1e9, works, repeats, lambda work: work(), note, warm_up=False):
            if ranks.rank == 0:
                print("\n" + json.dumps(result))
    shard.leave(ranks)


def bench_load(args: Namespace, layers: int = 4) -> Iterator[Row]:
    """Reading 0.6 GB of weights, bf16 to bf16, against one process that reads the file into memory of its size."""
    with tempfile.TemporaryDirectory() as temporary:
        shape = replace(MODELS["llama3.2-1b"], vocab_size=16000, rope_scaling=None, tied=False, n_layers=layers)
        folder = Path(temporary, "model")
        export_model(fill_randomly(Transformer(shape).bfloat16()), folder)
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # the host's memory
        for ranks in (1, 2, 4):
            yield from rows_of(__file__, folder, args.repeats, processes=ranks, env=env)


# ---- checkpoints


def write_plainly(tensors: list[torch.Tensor], path: Path) -> None:
    with open(path, "wb") as f:
        for tensor in tensors:
            f.write(tensor.reshape(-1).view(torch.uint8).numpy())
        f.flush()
        os.fsync(f.fileno())
    path.unlink()  # as the oldest checkpoint is


def bench_checkpoint(args: Namespace, layers: int = 13) -> Iterator[Row]:
    """Checkpoints of 0.5 GB, fp32 with moments, one process: what a save costs the loop and the disk, and a resume."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--dim 512 --ffn_dim 1408 --vocab_size 2048 --n_layers {layers} --dtype fp32 --out {folder}/run"
        run = Run(parse_args(flags.split()), checkpoint.ALONE)
        run.folder.mkdir()
        run.nonce = "bench"
        yield from checkpoint_rows(run, args.repeats)


def checkpoint_rows(run: Run, repeats: int) -> Iterator[Row]:
    config, ranks = run.config, run.ranks
    model = fill_randomly(Transformer(config.model_config))
    optimizer, tokens = make_optimizer(model, config), torch.arange(256)
    model(tokens[None, :8], tokens[None, :8]).backward()
    optimizer.step()
    optimizer.zero_grad()
    saver = checkpoint.Saver(model, optimizer, make_loader(config), run, None)
    stalls, waits = [], []

    def save() -> None:
        stalls.append(saver.save(saver.last + 1, tokens) / 1e3)
        waits.extend(timed(saver.wait).seconds)

    state, _ = checkpoint.own_parts(model, optimizer, ranks)
    size = sum(t.nbytes for t in state.values()) / 1e9
    plain = partial(write_plainly, list(state.values()), run.folder / "plain")
    case = f"saving {size:.2f} GB"
    works = {"one file, written and synced": plain, "save, until it is on the disk": save}
    rows = [*race(case, "GB/s", size, works, repeats)]
    yield from rows
    thread = size / np.median(waits[1:])
    what = "of the save, the thread: write, checksum, sync, rename, remove the oldest"
    yield row(case, what, thread, "GB/s", thread / rows[0]["median"])
    yield row(case, "of the save, what training waits for: probe and copy", np.median(stalls[1:]), "s")
    probe = partial(checkpoint.probe_loss, model, saver.tokens, ranks.device)
    yield from race(case, "s", 1, {"of these, the probe": probe}, repeats)
    newest = checkpoint.folders(run.folder)[-1]

    def resume() -> None:
        checkpoint.restore(checkpoint.newest(run.folder), model, optimizer, ranks, config)

    works = {
        "read": partial(np.fromfile, newest / "rank-00000.safetensors", np.uint8),
        "verify": partial(checkpoint.fault_of, newest),
        "resume: verify, load, prove": resume,
    }
    yield from race("the same, in the page cache", "GB/s", size, works, repeats)


# ---- data


def bench_data(args: Namespace) -> Iterator[Row]:
    """Batches from token shards in the page cache, one process; shards from text, against the tokenizer alone."""
    with tempfile.TemporaryDirectory() as name:
        folder, texts = Path(name), builtin_text()
        tokens = np.random.default_rng(0).integers(0, 50_000, 50_000_000, dtype=np.uint16)
        write_shard(folder / "tokens.bin", tokens, 50257)
        for rows, seq_len in ((64, 256), (32, 1024), (16, 2048), (8, 8192)):
            yield from batch_rows(folder / "tokens.bin", rows, seq_len, args.repeats)
        source, spec = folder / "a.json.gz", str(folder / "tokenizer.json")
        source.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
        train_bpe(texts, Path(spec))
        encode = load_tokenizer(spec).encode
        works = {
            "the tokenizer alone": lambda: [*map(encode, texts)],
            "prepare, one process, .json.gz": lambda: build([TextFile(str(source))], Encoder(spec), folder, {}),
        }
        yield from race("the built-in text", "MB/s", megabytes(texts), works, args.repeats)


def batch_rows(path: Path, rows: int, seq_len: int, repeats: int) -> Iterator[Row]:
    """Batches, against reading a row at a time."""
    tokens, draw = np.memmap(path, dtype=np.uint16, mode="r", offset=1024), np.random.default_rng(0)
    flags = f"--data {path} --val_data {path} --model llama3.2-1b --seq_len {seq_len} --micro_batch {rows}"
    steps = make_loader(parse_args(flags.split()))._steps(0)  # without the thread that reads ahead

    def by_row() -> None:
        starts = draw.integers(0, len(tokens) - seq_len - 1, rows)
        for shift in (0, 1):
            copies = [tokens[i + shift : i + shift + seq_len].astype(np.int64) for i in starts]
            torch.stack([torch.from_numpy(copy) for copy in copies])

    works = {"a row at a time, in random order": by_row, "flatland": partial(next, steps)}
    take_turn = partial(timed, count=40)
    return race(f"{rows} rows of {seq_len} tokens", "tokens/s", seq_len * rows, works, repeats, take_turn)


if __name__ == "__main__":
    load_rank(Path(sys.argv[1]), int(sys.argv[2]))
