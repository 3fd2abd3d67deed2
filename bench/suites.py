"""The small suites: generation, tokenizers, loading weights, checkpoints, data."""

import base64
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from errors import ROOT  # first: it finds the Python that has torch

import numpy as np  # isort: skip
import torch

import checkpoint
import shard
from common import Row, peak_rss, race, rank_environments, require_same, row, speed_row
from config import parse_args
from data import make_loader
from generate import sample
from model import MODELS, ModelConfig, Transformer, random_init
from optim import make_optimizer
from prepare import build, write_shard
from text import Encoder, TextFile, builtin_documents
from tokenizer import LLAMA3_SPLIT, load_tokenizer
from weights import export_model, open_weights


def fill_randomly(model: Transformer) -> Transformer:
    shard.fill(model, random_init(model.config, {name: tuple(p.shape) for name, p in model.named_parameters()}, 0))
    return model


# ---- generation


def bench_generate(args: Namespace) -> Iterator[Row]:
    """Greedy decoding with random weights, fp32, against transformers' generate: prompts of 32 tokens, 128 new ones."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    wide = ModelConfig(vocab_size=512, dim=256, n_layers=4, n_heads=8, ffn_dim=688, max_seq_len=2048, init_std=0.15)
    models = {
        "tiny-llama": replace(MODELS["tiny-llama"], init_std=0.15),
        "4 layers of 256": wide,
        "4 layers of 256, 2 key/value heads": replace(wide, n_kv_heads=2),
    }
    new, length = 128, 32
    for name, config in models.items():
        ours = fill_randomly(Transformer(config).eval())
        with tempfile.TemporaryDirectory() as folder:
            export_model(ours, Path(folder) / "model")
            theirs = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()
        for prompts, ragged in ((1, False), (8, False), (8, True)):
            ids = torch.randint(0, config.vocab_size, (prompts, length), generator=torch.Generator().manual_seed(0))
            padding = torch.arange(prompts) * 3 * ragged
            mask = (torch.arange(length) >= padding[:, None]).long()
            options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

            def generate(ours=ours, ids=ids, padding=padding if ragged else None) -> list:
                return torch.stack(list(sample(ours, ids, new, temperature=0, padding=padding)), 1).tolist()

            def their_generate(theirs=theirs, ids=ids, mask=mask, options=options) -> list:
                return theirs.generate(ids, attention_mask=mask, **options)[:, length:].tolist()

            case = f"{name}, {prompts} prompts{' of different lengths' * ragged}"
            require_same(case, generate(), their_generate())
            contenders = {"flatland": generate, "transformers": their_generate}
            yield from race(case, "tokens/s", prompts * new, contenders, args.repeats)


# ---- tokenizers


def builtin_text() -> tuple[list[str], int]:
    """-> (4 MB of documents, their bytes)"""
    texts, size = [], 0
    for text in builtin_documents():
        texts.append(text)
        size += len(text.encode())
        if size > 4e6:
            break
    return texts, size


def train_bpe(texts: list[str], path: Path):
    """A byte-level vocabulary with Llama 3's regular expression, as tokenizer.json."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    bpe, level = tokenizers.Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated")
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, level(add_prefix_space=False, use_regex=False)])
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = trainers.BpeTrainer(vocab_size=16000, special_tokens=special, initial_alphabet=level.alphabet())
    bpe.train_from_iterator(texts, trainer)
    bpe.save(str(path))
    return bpe


def train_sentencepiece(texts: list[str], path: Path):
    """A BPE of pieces, as Llama 2's tokenizer.model."""
    import sentencepiece

    lines, data = (line for text in texts for line in text.splitlines() if line), io.BytesIO()
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=data, vocab_size=16000, remove_extra_whitespaces=False, **options
    )
    path.write_bytes(data.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=data.getvalue())


def bench_tokenizer(args: Namespace) -> Iterator[Row]:
    """Encoding the built-in text, document by document, with vocabularies trained on it."""
    texts, size = builtin_text()
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "tokenizer.json"), Path(folder, "tokenizer.model")
        bpe, pieces = train_bpe(texts, files[0]), train_sentencepiece(texts, files[1])
        byte_level, piece_level = (load_tokenizer(str(file)).encode for file in files)
    kinds = {
        "byte-level BPE (Llama 3)": (byte_level, "tokenizers", lambda text: bpe.encode(text).ids),
        "sentencepiece BPE (Llama 2)": (piece_level, "sentencepiece", pieces.encode),
    }
    for case, (ours, name, theirs) in kinds.items():
        require_same(case, [*map(ours, texts)], [*map(theirs, texts)])
        contenders = {"flatland": lambda f=ours: [*map(f, texts)], name: lambda f=theirs: [*map(f, texts)]}
        yield from race(case, "MB/s", size / 1e6, contenders, args.repeats)


# ---- loading


def forget(path: Path) -> None:
    """Drops the file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def read_plainly(path: Path) -> None:
    """One process, from the first byte to the last, into new memory of the file's size."""
    view, done = memoryview(torch.empty(path.stat().st_size, dtype=torch.uint8).numpy()), 0
    with open(path, "rb", buffering=0) as f:
        while done < len(view):
            done += f.readinto(view[done : done + 2**24])


def llama_of(gb: float) -> ModelConfig:
    """So large in bf16."""
    shape = replace(MODELS["llama3.2-1b"], vocab_size=16000, rope_scaling=None, tied=False)
    layer = 2 * shape.dim * (shape.n_heads + shape.n_kv_heads) * shape.head_dim + 3 * shape.dim * shape.ffn_dim
    return replace(shape, n_layers=max(1, round((gb * 1e9 / 2 - 2 * shape.vocab_size * shape.dim) / layer)))


def load_rank(folder: Path, gb: float, repeats: int) -> None:
    """A rank: reads the weights in every way, and prints the seconds and the peak memory of each, as JSON."""
    torch.set_num_threads(1)
    ranks, config, file = shard.init_ranks(), llama_of(gb), folder / "model.safetensors"
    mesh, seconds, peak = shard.make_mesh(0, ranks), {}, {}
    read = open_weights(folder, config)
    for case in ("cold", "cached") * repeats:
        for way in ("direct", "rank0", "plain read"):
            with torch.device("meta"):
                model = Transformer(config, torch.bfloat16).to(torch.bfloat16)
            shard.shard_model(model, mesh, torch.bfloat16)
            model.to_empty(device="cpu")
            if case == "cold" and ranks.rank == 0:
                forget(file)
            shard.gather(None, ranks)
            before, begin = peak_rss(reset=True), time.perf_counter()
            if way != "plain read":
                shard.fill(model, read, way)
            elif ranks.rank == 0:
                read_plainly(file)
            shard.gather(None, ranks)
            seconds.setdefault(case, {}).setdefault(way, []).append(time.perf_counter() - begin)
            peak[way] = max(peak.get(way, 0), peak_rss() - before)
    peaks = shard.gather(peak, ranks)
    if ranks.rank == 0:
        print(json.dumps([seconds, {way: max(p[way] for p in peaks) for way in peak}]))
    shard.leave(ranks)


def bench_load(args: Namespace, gb: float = 0.6) -> Iterator[Row]:
    """Reading 0.6 GB of weights, bf16 to bf16, against one process that reads the file into memory of its size."""
    if args.check:  # test_shard.py does
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder, model = Path(temporary, "model"), Transformer(llama_of(gb)).bfloat16()
        export_model(fill_randomly(model), folder)
        size = (folder / "model.safetensors").stat().st_size
        largest = 2 * max(p.numel() for p in model.parameters())
        del model
        for ranks in (1, 2, 4):
            work = f"import suites; suites.load_rank(suites.Path({str(folder)!r}), {gb}, {args.repeats})"
            path = f"{ROOT}:{Path(__file__).parent}"
            own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}  # the host's memory
            command = [sys.executable, "-c", work]
            processes = [
                subprocess.Popen(command, env=env | own, stdout=subprocess.PIPE, text=True)
                for env in rank_environments(ranks)
            ]
            seconds, peak = json.loads([process.communicate()[0] for process in processes][0].splitlines()[-1])
            for case, ways in seconds.items():
                for way, times in ways.items():
                    memory = f"; peak {peak[way] * ranks / size:.2f} shards, {(peak[way] - size / ranks) / largest:.1f}"
                    what = way if way == "plain read" else f"{way}{memory} tensors beyond it"
                    result = speed_row(f"{ranks} processes, {case}", what, "GB/s", size / 1e9, times)
                    yield result | {"ratio": np.median(ways["plain read"]) / np.median(times)}


# ---- checkpoints


def bench_checkpoint(args: Namespace, gb: float = 0.5) -> Iterator[Row]:
    """Checkpoints of 0.5 GB, fp32 with moments, one process: what a save costs the loop and the disk, and a resume."""
    if args.check:  # test_checkpoint.py does
        return
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        layers = round((gb * 1e9 / 12 - 2 * 2048 * 512) / (512 * (512 * 3 + 3 * 1408)))
        flags = f"--dim 512 --ffn_dim 1408 --vocab_size 2048 --n_layers {layers} --dtype fp32 --out {folder}/run"
        config = parse_args(flags.split())
        Path(config.out).mkdir()
        model = fill_randomly(Transformer(config.model_config))
        optimizer, tokens = make_optimizer(model, config), torch.arange(256)
        model(tokens[None, :8], tokens[None, :8]).backward()
        optimizer.step()
        optimizer.zero_grad()
        saver, stalls, waits = checkpoint.Saver(config, model, optimizer, checkpoint.ALONE, None, None, "bench"), [], []

        def save() -> None:
            begin = time.perf_counter()
            saver.save(saver.last + 1, {}, tokens)
            stalls.append(time.perf_counter() - begin)
            saver.wait()
            waits.append(time.perf_counter() - begin - stalls[-1])

        def write_plainly() -> None:
            with open(Path(folder) / "plain", "wb") as f:
                for tensor in state.values():
                    f.write(tensor.reshape(-1).view(torch.uint8).numpy())
                f.flush()
                os.fsync(f.fileno())
            Path(f.name).unlink()  # as the oldest checkpoint is

        def resume() -> None:
            checkpoint.restore(checkpoint.find(config)[0], model, optimizer, checkpoint.ALONE, config)

        state, _ = checkpoint.own_parts(model, optimizer, checkpoint.ALONE)
        size = sum(t.numel() * t.element_size() for t in state.values()) / 1e9
        case = f"saving {size:.2f} GB"
        contenders = {"save, until it is on the disk": save, "one file, written and synced": write_plainly}
        rows = race(case, "GB/s", size, contenders, args.repeats)
        stall, rest = np.median(stalls[1:]), np.median(waits[1:])
        thread = "of the save, the thread: write, checksum, sync, rename, remove the oldest"
        yield from [*rows, row(case, thread, size / rest, "GB/s", size / rest / rows[-1]["median"])]
        case = "of a save, training waits"
        yield row(case, "with --save_async on (probe and copy)", stall * 1e3, "ms", stall / (stall + rest))
        probe = partial(checkpoint.probe_loss, model, saver.tokens, checkpoint.ALONE.device)
        (probed,) = race(case, "probes/s", 1, {"probe": probe}, args.repeats)
        yield row(case, "of that, the probe", 1e3 / probed["median"], "ms")
        newest = checkpoint.folders(Path(config.out))[-1]
        read = {"read": partial(read_plainly, newest / "rank-00000.safetensors")}
        for name, work in (("verify", partial(checkpoint.fault_of, newest)), ("resume: verify, load, prove", resume)):
            yield from race("the same, in the page cache", "GB/s", size, {name: work} | read, args.repeats)


# ---- data


def bench_data(args: Namespace) -> Iterator[Row]:
    """Batches from token shards in the page cache, one process; shards from text, against the tokenizer alone."""
    if args.check:  # test_data.py does
        return
    with tempfile.TemporaryDirectory() as folder:
        yield from batch_rows(Path(folder), args.repeats)
        texts, size = builtin_text()
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        source, spec = Path(folder, "a.json.gz"), whole_words(texts, Path(folder, "tokenizer.model"))
        source.write_bytes(gzip.compress(lines.encode()))
        encode = load_tokenizer(spec).encode

        def prepare() -> None:
            build([TextFile(str(source))], Encoder(spec), Path(folder), ("train.bin", "val.bin"))

        contenders = {"prepare, one process, .json.gz": prepare, "the tokenizer alone": lambda: [*map(encode, texts)]}
        yield from race("4 MB of text", "MB/s", size / 1e6, contenders, args.repeats)


def batch_rows(folder: Path, repeats: int) -> Iterator[Row]:
    path, n, draw = folder / "tokens.bin", 50_000_000, np.random.default_rng(0)
    write_shard(path, draw.integers(0, 50_000, n, dtype=np.uint16), 50257)
    array = np.memmap(path, dtype=np.uint16, mode="r", offset=1024)
    for seq_len, micro_batch in ((256, 64), (1024, 32), (2048, 16), (8192, 8)):
        flags = f"--data {path} --val_data {path} --model llama3.2-1b --seq_len {seq_len} --micro_batch {micro_batch}"
        steps = make_loader(parse_args(flags.split()))._steps(0)  # without the thread that reads ahead

        def ours(steps=steps) -> None:
            for _ in range(40):
                next(steps)

        def by_row(seq_len=seq_len, micro_batch=micro_batch) -> None:
            for _ in range(40):
                starts = draw.integers(0, n - seq_len - 1, micro_batch)
                for shift in (0, 1):
                    rows = [array[i + shift : i + shift + seq_len].astype(np.int64) for i in starts]
                    torch.stack([torch.from_numpy(row) for row in rows])

        contenders = {"flatland": ours, "a row at a time, in random order": by_row}
        case = f"{micro_batch} rows of {seq_len} tokens"
        yield from race(case, "tokens/s", 40 * seq_len * micro_batch, contenders, repeats)


def whole_words(texts: list[str], path: Path) -> str:
    """Writes a vocabulary of whole words in tiktoken's format, which is about as fast as a trained one -> its path."""
    vocab = {bytes([b]): b for b in range(256)}
    for text in texts[:300]:
        for word in re.findall(rb" ?[A-Za-z]{2,9}", text.encode()):
            for end in range(2, len(word) + 1):
                vocab.setdefault(word[:end], len(vocab))
    path.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for token, i in vocab.items()))
    return str(path)


SUITES: dict[str, Callable[[Namespace], Iterator[Row]]] = {
    "generate": bench_generate,
    "tokenizer": bench_tokenizer,
    "load": bench_load,
    "checkpoint": bench_checkpoint,
    "data": bench_data,
}
