"""Benchmarks: ours against what others use for the same work, on this machine.

    python bench.py                              # every suite but that of a GPU
    python bench.py --suite gpu --json gpu.json  # on one H200 or H100, at most 9 minutes; --parts picks among its parts
    python bench.py --suite generate --json results.json
    python bench.py --suite switches             # whole runs: bench_runs.py; also growth, reference
    python bench.py fp8 --run runs/NAME          # what FP8 does to each layer of a model; on a GPU, what it wins
    python bench.py fp8-parity [--flag value]    # the same small Llama in bf16 (two seeds) and in each FP8 recipe

`fp8` reads a run's newest checkpoint (a bf16 run's, too) and sends one micro-batch of its data forward and backward.
In a suite, first the results of all contenders are compared: what is timed computes the same. Then each runs once
unmeasured, and they take turns, so that what else the machine does meets them alike. A row gives the median speed of
its runs, and the 10th and 90th percentile; `ratio` is its median over that of the last of its case. The file of --json
is written anew after each row.

Suites need what `bash test.sh` installs on top of requirements.txt."""

import argparse
import base64
import gc
import gzip
import io
import json
import math
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from errors import ROOT, UserError  # first: it finds the Python that has torch

import torch  # isort: skip
import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.backends import cudnn

import bench_runs
import fp8
import shard
import train
from checkpoint import newest
from config import Config, parse_args, split_batch
from data import Batch, builtin_documents, make_loader, write_shard
from generate import sample
from log import write_whole
from machine import find_device
from model import MODELS, LossHead, ModelConfig, Transformer, flops_per_token, initial_std, random_init
from optim import DTYPES, make_optimizer, update
from preflight import prepare_fp8, resolve
from prepare import build
from tokenizer import LLAMA3_SPLIT, load_tokenizer
from weights import config_json, export_model

Row = dict[str, str | float | None]


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
        shard.fill(ours, random_init(config, {k: tuple(p.shape) for k, p in ours.named_parameters()}, 0))
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


def built_in_text() -> tuple[list[str], int]:
    """-> (4 MB of documents, their bytes)"""
    texts, size = [], 0
    for text in builtin_documents():
        texts.append(text)
        size += len(text.encode())
        if size > 4e6:
            break
    return texts, size


def bench_tokenizer(repeats: int) -> Iterator[Row]:
    """Encoding the built-in text, document by document, with vocabularies trained on it."""
    import sentencepiece
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    texts, size = built_in_text()
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


# ---- loading: `shard.fill` from a file of bf16 weights


def raw_reader(path: Path, shapes: dict[str, tuple[int, ...]]) -> Callable[[str, tuple[slice, ...]], Tensor]:
    """-> read(name, slices) of a file that holds the tensors one after the other in bf16"""
    starts, at = {}, 0
    for name, shape in shapes.items():
        starts[name], at = at, at + 2 * torch.Size(shape).numel()
    file = os.open(path, os.O_RDONLY)

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        shape, rows = shapes[name], slices[0]
        width = 2 * torch.Size(shape[1:]).numel()
        out = torch.empty((rows.stop - rows.start) * width, dtype=torch.uint8)
        view, done = memoryview(out.numpy()), 0
        while done < len(view):
            done += os.preadv(file, [view[done:]], starts[name] + rows.start * width + done)
        return out.view(torch.bfloat16).view(-1, *shape[1:])[(slice(None), *slices[1:])]

    return read


def forget(path: Path) -> None:
    """Drops the file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def read_plainly(path: Path) -> None:
    """One process, from the first byte to the last, into memory of the file's size."""
    view, done = memoryview(torch.empty(path.stat().st_size, dtype=torch.uint8).numpy()), 0
    with open(path, "rb", buffering=0) as f:
        while done < len(view):
            done += f.readinto(view[done : done + 2**24])


def peak_rss(reset: bool = False) -> int:
    """Bytes; since the last reset (Linux: proc(5), clear_refs)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def load_config(gb: float) -> ModelConfig:
    """A Llama of so many GB in bf16."""
    row = replace(MODELS["llama3.2-1b"], vocab_size=16000, rope_scaling=None, tied=False)
    layer = 2 * row.dim * (row.n_heads + row.n_kv_heads) * row.head_dim + 3 * row.dim * row.ffn_dim
    return replace(row, n_layers=max(1, round((gb * 1e9 / 2 - 2 * row.vocab_size * row.dim) / layer)))


def load_rank(path: Path, gb: float, repeats: int) -> None:
    """A rank: reads the file in every way, and prints the seconds and the peak memory of each, as JSON."""
    torch.set_num_threads(1)
    ranks, config = shard.init_ranks(), load_config(gb)
    mesh, seconds, peak = shard.make_mesh(0, ranks), {}, {}
    for _ in range(repeats):
        for case in ("cold", "cached"):
            for way in ("direct", "rank0", "plain read"):
                with torch.device("meta"):
                    model = Transformer(config, torch.bfloat16).to(torch.bfloat16)
                shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
                shard.shard_model(model, mesh, torch.bfloat16)
                model.to_empty(device="cpu")
                read = raw_reader(path, shapes)
                if case == "cold" and ranks.rank == 0:
                    forget(path)
                shard.gather(None, ranks)
                before, begin = peak_rss(reset=True), time.perf_counter()
                if way != "plain read":
                    shard.fill(model, read, way)
                elif ranks.rank == 0:
                    read_plainly(path)
                shard.gather(None, ranks)
                seconds.setdefault(case, {}).setdefault(way, []).append(time.perf_counter() - begin)
                peak[way] = max(peak.get(way, 0), peak_rss() - before)
    largest = 2 * max(torch.Size(shape).numel() for shape in shapes.values())
    peaks = shard.gather(peak, ranks)
    if ranks.rank == 0:
        print(json.dumps({"seconds": seconds, "peak": {w: max(p[w] for p in peaks) for w in peak}, "largest": largest}))
    shard.leave(ranks)


def bench_load(repeats: int, gb: float = 0.6) -> Iterator[Row]:
    """Reading 0.6 GB of weights, bf16 to bf16, against one process that reads the file into memory of its size."""
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        path, size = Path(folder) / "weights.bin", 0
        with open(path, "wb") as f:
            for parameter in Transformer(load_config(gb)).parameters():
                values = torch.randn(parameter.shape, device="cpu").bfloat16()
                size += f.write(values.view(torch.uint8).numpy())
        for ranks in (1, 2, 4):
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
            words = [
                sys.executable,
                "-c",
                f"import bench, pathlib; bench.load_rank(pathlib.Path({str(path)!r}), {gb}, {repeats})",
            ]
            env["CUDA_VISIBLE_DEVICES"] = ""  # into the host's memory
            env |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
            processes = [
                subprocess.Popen(words, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
                for rank in range(ranks)
            ]
            found = json.loads([process.communicate()[0] for process in processes][0])
            for case, ways in found["seconds"].items():
                plain = np.median(ways["plain read"])
                for way, times in ways.items():
                    low, median, high = np.quantile(size / 1e9 / np.array(times), (0.1, 0.5, 0.9)).tolist()
                    shards, beyond = (
                        found["peak"][way] * ranks / size,
                        (found["peak"][way] - size / ranks) / found["largest"],
                    )
                    memory = (
                        "" if way == "plain read" else f"; peak {shards:.2f} shards, {beyond:.1f} tensors beyond it"
                    )
                    row = {"case": f"{ranks} process{'es' * (ranks > 1)}, {case}", "what": way + memory, "unit": "GB/s"}
                    yield row | {"median": median, "p10": low, "p90": high, "ratio": plain / np.median(times)}


def bench_data(repeats: int) -> Iterator[Row]:
    """Batches from token shards in the page cache, one process; shards from text, against the tokenizer alone."""
    with tempfile.TemporaryDirectory() as folder:
        path, n = Path(folder, "tokens.bin"), 50_000_000
        tokens = np.random.default_rng(0).integers(0, 50_000, n, dtype=np.uint16)
        write_shard(path, tokens, 50257)
        array = np.memmap(path, dtype=np.uint16, mode="r", offset=1024)
        draw = np.random.default_rng(0)
        for seq_len, micro_batch in ((256, 64), (1024, 32), (2048, 16), (8192, 8)):
            words = (
                f"--data {path} --val_data {path} --model llama3.2-1b --seq_len {seq_len} --micro_batch {micro_batch}"
            )
            steps = make_loader(parse_args(words.split()))._steps(0)  # without the thread that reads ahead

            def ours(steps=steps) -> None:
                for _ in range(40):
                    next(steps)

            def by_row(seq_len=seq_len, micro_batch=micro_batch) -> None:
                for _ in range(40):
                    at = draw.integers(0, n - seq_len - 1, micro_batch)
                    for shift in (0, 1):
                        rows = [array[i + shift : i + shift + seq_len].astype(np.int64) for i in at]
                        torch.stack([torch.from_numpy(row) for row in rows])

            contenders = {"flatland": ours, "a row at a time, in random order": by_row}
            case = f"{micro_batch} rows of {seq_len} tokens"
            yield from race(case, "tokens/s", 40 * seq_len * micro_batch, contenders, repeats)

        texts, size = built_in_text()
        words = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        Path(folder, "a.json.gz").write_bytes(gzip.compress(words.encode()))
        vocab = {bytes([b]): b for b in range(256)}
        for text in texts[:300]:  # a vocabulary of whole words, which is about as fast as a trained one
            for word in re.findall(rb" ?[A-Za-z]{2,9}", text.encode()):
                for end in range(2, len(word) + 1):
                    vocab.setdefault(word[:end], len(vocab))
        lines = (f"{base64.b64encode(token).decode()} {i}" for token, i in vocab.items())
        Path(folder, "tokenizer.model").write_text("\n".join(lines) + "\n")
        settings = f"{folder}/tokenizer.model", "text", "llama"
        encode = load_tokenizer(settings[0]).encode

        def prepared() -> None:
            build([Path(folder, "a.json.gz")], settings, Path(folder), ("train.bin", "val.bin"))

        contenders = {"prepare, one process, .json.gz": prepared, "the tokenizer alone": lambda: [*map(encode, texts)]}
        yield from race("4 MB of text", "MB/s", size / 1e6, contenders, repeats)


# ---- FP8


def snr_db(exact: Tensor, found: Tensor) -> float:
    exact, found = exact.double(), found.double()
    return 10 * torch.log10(exact.square().sum() / (found - exact).square().sum()).item()


def milliseconds(run) -> float:
    """Median of 20 on the GPU, each with its own events, after 5 that compile and warm up."""
    times = []
    for i in range(25):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times += [begin.elapsed_time(end)] if i >= 5 else []
    return sorted(times)[len(times) // 2]


def speed_up(shape: tuple[int, int], tokens: int, recipe: str) -> float:
    """Of a layer [N, K], forward and backward with all casts, over the same in bf16; both compiled."""
    spent = []
    for convert in (False, True):
        layer = nn.Linear(shape[1], shape[0], bias=False, device="cuda", dtype=torch.bfloat16)
        if convert:
            fp8.convert_linears(layer, recipe, small=True)
        x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(tokens, shape[0], device="cuda", dtype=torch.bfloat16)
        torch._dynamo.reset()
        layer.compile(dynamic=False)

        def run(layer=layer, x=x, g=g):
            layer(x).backward(g)
            x.grad = layer.weight.grad = None

        spent.append(milliseconds(run))
    return spent[0] / spent[1]


def report_fp8(run: Path, recipe: str) -> str:
    """A line per converted layer: amax, saturated and flushed shares and SNR of x, W and g; SNR of y against bf16; on a
    GPU the measured speed-up. Shares in parts per million."""
    device = find_device(1)
    checkpoint = newest(run)
    config = checkpoint.config
    model = Transformer(checkpoint.model_config, torch.bfloat16 if config.dtype == "bf16" else torch.float32)
    shard.fill(model, checkpoint.read_weights)
    model.to(device)
    recipe = recipe or (config.fp8 if config.fp8 != "off" else "tensor")
    grad_dtype = "e5m2" if config.fp8_grad_dtype == "auto" else config.fp8_grad_dtype
    rows = fp8.convert_linears(model, recipe, grad_dtype, config.fp8_skip, small=True)
    fp8.watch(model, list(fp8.layers(model)))
    model.train()
    outputs, hooks = {}, []
    for name, layer in fp8.layers(model).items():

        def compare(layer, inputs, output, name=name):
            layer.eval()
            with torch.no_grad():
                outputs[name] = snr_db(layer.forward(*inputs), output)
            layer.train()

        hooks.append(layer.register_forward_hook(compare))
    batch = next(iter(make_loader(config)))[0].to(device)
    model(batch.tokens, batch.targets, batch.positions).backward()
    found, speeds, lost = fp8.watched(model), {}, 0
    tokens = split_batch(config, 1)[0] * config.seq_len
    columns = "".join(f"  {o + ' amax':>9} {'sat':>6} {'flush':>7} {'dB':>5}" for o in "xwg")
    title = f"{run}, step {checkpoint.step}: FP8 recipe {recipe}, {tokens} tokens; saturated and flushed in millionths"
    lines = [title, f"{'layer':36} {'shape':>14}{columns}  {'y dB':>5}{'  speed-up' if device.type == 'cuda' else ''}"]
    for name, shape, verdict in rows:
        if name not in outputs:
            lines.append(f"{name:36} {' x '.join(map(str, shape)):>14}  {verdict}")
            continue
        line = f"{name:36} {f'{shape[0]} x {shape[1]}':>14}"
        for o in "xwg":
            amax, saturated, flushed, snr = (found[f"fp8/{name}/{o}_{f}"] for f in fp8.FIGURES)
            snr = "-" if snr is None else f"{snr:.1f}"
            line += f"  {amax:9.2e} {1e6 * saturated:6.0f} {1e6 * flushed:7.0f} {snr:>5}"
        line += f"  {outputs[name]:5.1f}"
        if device.type == "cuda":
            if shape not in speeds:
                speeds[shape] = speed_up(shape, tokens, recipe)
            lost += speeds[shape] < 1
            line += f"  {speeds[shape]:6.2f} x{'  LOSES: --fp8_skip ' + name if speeds[shape] < 1 else ''}"
        lines.append(line)
    if device.type == "cuda":
        lines.append(f"{lost} of {len(outputs)} layers are slower than in bf16 at {tokens} tokens")
    else:
        lines.append("speed-up: on a GPU only")
    return "\n".join(lines)


PARITY = ["--model", "tiny-llama", "--dim", "128", "--n_layers", "4", "--n_heads", "4", "--n_kv_heads", "2",
          "--ffn_dim", "384", "--seq_len", "128", "--micro_batch", "8", "--steps", "300", "--lr", "6e-3",
          "--schedule", "linear", "--warmup_steps", "30", "--dtype", "bf16", "--log_every", "5", "--eval_every", "100",
          "--eval_batches", "40"]  # fmt: skip
RUNS = {"bf16": [], "bf16, another seed": ["--seed", "1"], "tensor": ["--fp8", "tensor"],
        "tensor, e4m3 gradients": ["--fp8", "tensor", "--fp8_grad_dtype", "e4m3"], "row": ["--fp8", "row"],
        "row_gw_hp": ["--fp8", "row_gw_hp"]}  # fmt: skip


def parity(out: Path, flags: list[str]) -> str:
    """Trains what is not there yet, draws the losses and -> the table, in Markdown."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = {}
    for name, own in RUNS.items():
        folder = out / name.replace(", ", "-").replace(" ", "-")
        command = [sys.executable, str(ROOT / "train.py"), *PARITY, *flags, *own, "--out", str(folder)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
        curves[name] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    base = curves["bf16"]
    lines = ["| run | training loss, last 50 steps | validation loss | less bf16's |", "|---|--:|--:|--:|"]
    for i, (name, records) in enumerate(curves.items()):
        steps, losses = [r["step"] for r in records], [r["loss"] for r in records]
        above.plot(steps, losses, lw=1, color=f"C{i}", label=name)
        if name != "bf16, another seed":  # which has other data
            below.plot(steps, [a - b["loss"] for a, b in zip(losses, base, strict=True)], lw=1, color=f"C{i}")
        late = [r["loss"] for r in records if r["step"] > records[-1]["step"] - 50]
        validation, other = records[-1]["val_loss"], base[-1]["val_loss"]
        lines.append(f"| {name} | {sum(late) / len(late):.4f} | {validation:.4f} | {validation - other:+.4f} |")
    above.set_ylabel("loss (nats per token)")
    below.set_ylabel("less bf16's on the same data")
    below.set_xlabel("step")
    above.legend()
    for axis in (above, below):
        axis.grid(alpha=0.3)
    figure.savefig(out / "fp8-parity.png", dpi=90)
    plt.close(figure)
    return "\n".join([*lines, f"({out / 'fp8-parity.png'})"])


# ---- one GPU

PEAK = 989e12  # FLOP/s, dense bf16, of an H100 or H200 (SXM) by its data sheet; what MFU is a share of
TINY = (
    "--dim 64 --n_layers 2 --n_heads 4 --n_kv_heads 4 --ffn_dim 176 --vocab_size 256 --seq_len 32 --micro_batch 2"
    " --dtype bf16 --attention sdpa"
)


class Lab(NamedTuple):
    """Where the GPU suite runs. tiny: small shapes, few steps. deadline: of time.monotonic()."""

    ranks: shard.Ranks
    tiny: bool
    deadline: float

    @property
    def cuda(self) -> bool:
        return self.ranks.device.type == "cuda"

    def layers(self, n: int) -> int:
        """Half of them where an 80 GB GPU could not hold the models of both contenders."""
        small = self.cuda and torch.cuda.get_device_properties(self.ranks.device).total_memory < 100e9
        return n // 2 if small else n


class Contender(NamedTuple):
    step: Callable[[], object]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def note(case: str, what: str, value: float | None = None, unit: str = "", ratio: float | None = None) -> Row:
    """A row that is not of a race."""
    return {"case": case, "what": what, "unit": unit, "median": value, "p10": value, "p90": value, "ratio": ratio}


def gpu_state() -> dict[str, str]:
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields.split(","), found.split(", "), strict=True))


def measure(lab: Lab, steps: dict[str, Callable], warm: int = 2, rounds: int = 6) -> tuple[dict, dict, dict]:
    """Rounds of 5 steps of each in turn, `warm` of them unmeasured, with no waiting inside a round -> seconds of each
    step, peak bytes, and what nvidia-smi said meanwhile, with the graphs that were compiled after the warm-up."""
    counters, seconds, peaks = torch._dynamo.utils.counters["stats"], {n: [] for n in steps}, dict.fromkeys(steps, 0)
    length, warm, rounds = (1, 1, 2) if lab.tiny else (5, warm, rounds)

    def mark():
        if not lab.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    with ThreadPoolExecutor(1) as thread:
        for turn in range(warm + rounds):
            if turn > warm and time.monotonic() > lab.deadline:
                break
            if turn == warm:
                graphs, state = counters["unique_graphs"], thread.submit(gpu_state)
            for name, step in steps.items():
                if lab.cuda:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                marks = [mark()]
                for _ in range(length):
                    step()
                    marks.append(mark())
                if lab.cuda:
                    torch.cuda.synchronize()
                    peaks[name] = torch.cuda.max_memory_allocated()
                if turn >= warm:
                    both = zip(marks, marks[1:], strict=False)
                    seconds[name] += [a.elapsed_time(b) / 1e3 if lab.cuda else b - a for a, b in both]
        return seconds, peaks, state.result() | {"late graphs": counters["unique_graphs"] - graphs}


def rows_of(case: str, unit: str, amount: float, measured: tuple, says: Callable[[str, float], str]) -> list[Row]:
    """A row for each contender, in amount per second; ratios to the last. says(name, amount per second): what to add to
    its name."""
    (seconds, _, state), rows = measured, []
    late = f"; {state['late graphs']} graphs compiled meanwhile" * bool(state["late graphs"])
    for name, values in seconds.items():
        low, median, high = np.quantile(amount / np.array(values), (0.1, 0.5, 0.9)).tolist()
        row = {"case": case, "what": f"{name}{says(name, median)}{late}", "unit": unit, "median": median, "p10": low}
        rows.append(row | {"p90": high, "steps": len(values), "gpu": state})
    return [row | {"ratio": row["median"] / rows[-1]["median"]} for row in rows]


def held(contender: Contender) -> dict[int, int]:
    """Bytes of each of its parameters and moments on the GPU, by address: contenders may share them."""
    states = (t for state in contender.optimizer.state.values() for t in state.values())
    tensors = [shard.local(t.detach()) for t in (*contender.model.parameters(), *states)]
    return {t.data_ptr(): t.nbytes for t in tensors if t.device.type == "cuda"}


def race_training(lab: Lab, case: str, contenders: dict[str, Contender], flags: str, **rounds: int) -> list[Row]:
    """Tokens/s, MFU (causal) and peak memory, without what the others hold; ratios to the last."""
    config = flags_to_config(lab, flags)
    tokens, flops = config.micro_batch * config.seq_len, flops_per_token(config.model_config, config.seq_len)
    measured = measure(lab, {name: c.step for name, c in contenders.items()}, **rounds)
    own = {name: held(c) for name, c in contenders.items()}
    everything = {k: v for part in own.values() for k, v in part.items()}

    def says(name: str, rate: float) -> str:
        others = sum(everything.values()) - sum(own[name].values())
        return f"; MFU {rate * flops / PEAK:.1%}; {(measured[1][name] - others) / 2**30 * lab.cuda:.1f} GiB"

    return rows_of(case, "tokens/s", tokens, measured, says)


@cache
def flags_to_config(lab: Lab, flags: str) -> Config:
    words = f"--compile block {flags} {TINY * lab.tiny} {'--compile none' * (not lab.cuda)}".split()
    return resolve(parse_args(words), lab.ranks.device, 1)


def random_batch(lab: Lab, config: Config) -> Batch:
    own = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.model_config.vocab_size, (config.micro_batch, config.seq_len + 1), generator=own)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@torch.no_grad()
def fill_on_device(model: Transformer, device: torch.device) -> None:
    """Random values as of `random_init`, but drawn where it takes no time."""
    for name, p in model.named_parameters():
        std, target = initial_std(model.config, name), shard.local(p)
        if std:
            target.copy_(torch.randn(target.shape, device=device).mul_(std))
        else:
            target.fill_(1.0 if std is None else 0.0)


def ours(lab: Lab, flags: str, shared: Contender | None = None, mesh=None, own_units: bool = True) -> Contender:
    """train.py's step for these flags. shared: whose parameters and optimizer it trains."""
    config, ranks, number = flags_to_config(lab, flags), lab.ranks, 0
    model = train.build(config, ranks, mesh if own_units else None, [])
    if shared:
        model.load_state_dict(shared.model.state_dict(keep_vars=True), assign=True)
    else:
        fill_on_device(model, ranks.device)
    if not own_units:  # what build does, with the one argument that no flag sets
        shard.shard_model(model, mesh, model.dtype, reshard=config.reshard, prefetch=config.prefetch, own_units=False)
    scales = prepare_fp8(model, config, ranks, mesh)
    optimizer = shared.optimizer if shared else make_optimizer(model, config)
    guard, batch = shard.GradientGuard(model, config.clip, ranks, mesh), random_batch(lab, config)

    def step() -> None:
        nonlocal number
        number += 1
        scales.refresh()
        shard.sync_gradients(model, True, config.reshard)
        here = batch.to(ranks.device)
        loss = model(here.tokens, here.targets)
        loss.backward()
        _, _, grad_scale = guard.reduce(loss.detach(), batch.targets.numel())
        update(optimizer, 1e-5, grad_scale, guard.suppress)
        model.take_router_sums()
        guard.check(number)

    return Contender(step, model, optimizer)


def theirs(lab: Lab, flags: str, compiled: bool, shared: Contender | None = None) -> Contender:
    """The same shape in transformers, all in bf16 (parameters and moments, too: ours are fp32), SDPA, clipping, fused
    AdamW."""
    import transformers

    config = flags_to_config(lab, flags)
    values = config_json(config.model_config, torch.bfloat16)
    if shared:
        model, optimizer = shared.model, shared.optimizer
    else:
        options = {k: v for k, v in values.items() if k not in ("architectures", "model_type", "torch_dtype")}
        shape = transformers.AutoConfig.for_model(values["model_type"], **options, use_cache=False)
        with torch.device(lab.ranks.device):
            kinds = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
            model = transformers.AutoModelForCausalLM.from_config(shape, **kinds).to(lab.ranks.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batch, call = random_batch(lab, config), model
    if compiled:
        call = torch.compile(model, dynamic=False, disable=lab.tiny)

    def step() -> None:
        tokens = batch.to(lab.ranks.device).tokens
        call(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Contender(step, model, optimizer)


KERNELS = {"compiled": "^triton", "attention": "sdpa|flash|fmha|attention", "optimizer": "multi_tensor_apply",
           "matmul": "gemm|nvjet|cutlass|cublas|xmma|splitK", "copies": "^Mem(cpy|set)"}  # fmt: skip


def profile_rows(lab: Lab, case: str, step: Callable) -> Iterator[Row]:
    from torch.profiler import ProfilerActivity, profile

    steps = 1 if lab.tiny else 3
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * lab.cuda]) as record:
        for _ in range(steps):
            step()
        if lab.cuda:
            torch.cuda.synchronize()
    events = [e for e in record.key_averages() if not getattr(e, "is_user_annotation", False)]
    side = torch.autograd.DeviceType.CUDA if lab.cuda else torch.autograd.DeviceType.CPU
    spent = {e.key: e.self_device_time_total if lab.cuda else e.self_cpu_time_total for e in events
             if e.device_type == side and not e.key.startswith("##")}  # fmt: skip
    yield from kernel_rows(case, {k: v / steps for k, v in spent.items()})
    waits = {k: 0.0 for k in ("cudaStreamSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")}
    waits |= {e.key: e.count / steps for e in events if e.key in waits}
    for name, count in waits.items():  # the event is that of the step before: it costs no waiting
        yield note(case, name, count, "per step")


def kernel_rows(case: str, spent: dict[str, float]) -> Iterator[Row]:
    """spent: microseconds by kernel. Shares of kernel time by kind; eager kernels above 1 % on their own."""
    total, kinds = sum(spent.values()), {}
    for name, time_ in spent.items():
        kind = next((kind for kind, pattern in KERNELS.items() if re.search(pattern, name)), "eager")
        kinds.setdefault(kind, {})[name] = time_
    for kind, named in sorted(kinds.items(), key=lambda item: -sum(item[1].values())):
        names = f": {max(named, key=named.get)[:120]}" if kind == "attention" else ""
        yield note(case, f"{kind}, {len(named)} kernels{names}", 100 * sum(named.values()) / total, "% of kernel time")
    for name, time_ in sorted(kinds.get("eager", {}).items(), key=lambda item: -item[1]):
        if time_ > total / 100:
            yield note(case, f"eager: {name[:120]}", 100 * time_ / total, "% of kernel time")


# The parts. Each makes what it needs and frees it, so that any may be left out.


def check_bound(case: str, found: float, low: float, high: float) -> Row:
    if not low <= found < high:
        raise SystemExit(f"{case}: the error is {found:.2e}, not in [{low:.1e}, {high:.1e}): nothing is measured")
    return note(case, f"allowed {low:.1e} to {high:.1e}", found, "error", found / high)


def relative(found: Tensor, exact: Tensor) -> float:
    exact, found = exact.double().cpu(), found.detach().double().cpu()
    return ((found - exact).norm() / exact.norm()).nan_to_num(nan=math.inf).item()


def gpu_check(lab: Lab) -> Iterator[Row]:
    flags = "--model tiny-llama --dim 256 --n_layers 4 --ffn_dim 512 --seq_len 256 --micro_batch 2 --clip 0 --dtype"
    cpu = shard.Ranks(0, 1, torch.device("cpu"))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    results = {}
    for where, ranks, dtype in [("cpu", cpu, d) for d in DTYPES] + [("gpu", lab.ranks, d) for d in DTYPES]:
        config = flags_to_config(lab, f"{flags} {dtype}")
        config = replace(config, dtype=dtype, compile="none" if where == "cpu" else config.compile, attention="sdpa")
        model = train.build(config, ranks, None, [])
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        shard.fill(model, random_init(config.model_config, shapes, 0))
        batch = random_batch(lab, config)
        here = batch.to(ranks.device)
        loss = model(here.tokens, here.targets)
        loss.backward()
        results[where, dtype] = [loss, *(p.grad for p in model.parameters())]
    exact = results.pop(("cpu", "fp32"))
    worst = {key: max(map(relative, found, exact)) for key, found in results.items()}
    torch.set_float32_matmul_precision(precision)
    yield check_bound("loss and gradients, fp32, against the CPU's", worst["gpu", "fp32"], 0, 1e-4)
    yield check_bound("the same, bf16; the CPU's own error x 2", worst["gpu", "bf16"], 1e-4, 2 * worst["cpu", "bf16"])

    M, K, N = (256, 512, 384) if lab.tiny else (2048, 4096, 6144)
    for recipe in fp8.RECIPES:
        torch.manual_seed(0)
        layer = nn.Linear(K, N, bias=False, dtype=torch.bfloat16, device=lab.ranks.device)
        nn.init.normal_(layer.weight)
        fp8.convert_linears(layer, recipe, small=True)
        if not lab.tiny:
            layer.compile(dynamic=False)
        x, g = (torch.randn(M, n, dtype=torch.bfloat16, device=lab.ranks.device) for n in (K, N))
        x.requires_grad_()
        y = layer(x)
        y.backward(g)
        wide = 0.07 if recipe == "tensor" else 0.045  # as in test_fp8.py: two-sided, so that bf16 would be noticed
        low, bounds = 0.05 if recipe == "tensor" else 0.02, {}
        X, W, G = (t.detach().double() for t in (x, layer.weight, g))
        bounds["y"] = relative(y, X @ W.T), 0.02, 0.045
        bounds["dx"] = relative(x.grad, G @ W), low, wide
        bounds["dw"] = relative(layer.weight.grad, G.T @ X), *((0, 0.004) if recipe == "row_gw_hp" else (low, wide))
        for name, (error, least, most) in bounds.items():
            yield check_bound(f"fp8 {recipe}, {M} x {K} x {N}, {name}", error, least, most)


def gpu_tests(lab: Lab) -> Iterator[Row]:
    files = [path.name for path in ROOT.glob("test_*.py") if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *(["--version"] if lab.tiny else files)]
    limit = min(150.0, max(lab.deadline - time.monotonic(), 10.0))
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
        code, out = done.returncode, done.stdout
    except subprocess.TimeoutExpired as stopped:
        code, out = -1, (stopped.stdout or b"") + f"\nstopped after {limit:.0f} s".encode()
    lines = out.decode(errors="replace").strip().splitlines()
    if code:
        print("\n".join(lines[-60:]), file=sys.stderr)
    yield note("pytest -m gpu", f"{'failed: ' if code else ''}{lines[-1]}")


def gpu_llama(lab: Lab, T: int, B: int) -> Iterator[Row]:
    flags = f"--model llama3-8b --n_layers {lab.layers(8)} --seq_len {T} --micro_batch {B}"
    mine, eager = ours(lab, flags), theirs(lab, flags, False)
    contenders = {"flatland": mine, "transformers, compiled": theirs(lab, flags, True, eager), "transformers": eager}
    case = f"A: Llama 8B, {lab.layers(8)} layers, {B} x {T}"
    yield from race_training(lab, case, contenders, flags)
    if B > 1:
        yield from profile_rows(lab, f"H: {case}", mine.step)


def gpu_fp8(lab: Lab, T: int, B: int) -> Iterator[Row]:
    flags = f"--model llama3-8b --n_layers 8 --fp8_log_every 0 --seq_len {T} --micro_batch {B}"
    bf16 = ours(lab, flags)
    contenders = {f"--fp8 {recipe}": ours(lab, f"{flags} --fp8 {recipe}", bf16) for recipe in fp8.RECIPES}
    case = f"B: Llama 8B, 8 layers, {B} x {T}"
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        yield note(case, "torchao on our model: not installed")
    else:
        names, ao = set(fp8.layers(contenders["--fp8 tensor"].model)), ours(lab, flags, bf16)
        options = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=not lab.cuda)
        convert_to_float8_training(ao.model, config=options, module_filter_fn=lambda module, name: name in names)
        contenders["torchao tensorwise on our model"] = ao
    yield from race_training(lab, case, contenders | {"bf16": bf16}, flags)


def gpu_recipe3(lab: Lab) -> Iterator[Row]:
    flags = f"--model llama2-7b --n_layers {lab.layers(8)} --seq_len 4096 --micro_batch 2"
    bf16 = ours(lab, flags)
    contenders = {"flatland --fp8 tensor": ours(lab, f"{flags} --fp8 tensor", bf16), "flatland": bf16}
    contenders["transformers"] = theirs(lab, flags, False)
    yield from race_training(lab, f"B: Llama 2 7B, {lab.layers(8)} layers, 2 x 4096", contenders, flags)


def roof(x: Tensor, w: Tensor, g: Tensor, recipe: str) -> list[Callable[[], Tensor]]:
    """The three products of a layer by torch._scaled_mm alone, of operands that are quantized and laid out already."""
    E4M3, E5M2, flip, q = fp8.E4M3, fp8.E5M2, fp8.column_major, fp8.quantize
    if recipe == "tensor":
        (xq, sx), (wq, sw), (gq, sg) = q(x, E4M3), q(w, E4M3), q(g, E5M2)
        products = [(xq, wq.t(), sx, sw), (gq, flip(wq), sg, sw), (gq.t().contiguous(), flip(xq), sg, sx)]
    else:
        (xq, sx), (wq, sw), (gq, sg), (wt, swt) = q(x, E4M3, 1), q(w, E4M3, 1), q(g, E4M3, 1), q(w, E4M3, 0)
        (gt, sgt), (xt, sxt) = q(g, E4M3, 0), q(x, E4M3, 0)
        products = [(xq, wq.t(), sx, sw.t()), (gq, flip(wt), sg, swt), (gt.t().contiguous(), flip(xt), sgt.t(), sxt)]
    fast, calls = recipe != "tensor", []
    for i, (a, b, sa, sb) in enumerate(products if recipe != "row_gw_hp" else products[:2]):
        scales = {"scale_a": sa.reciprocal(), "scale_b": sb.reciprocal(), "use_fast_accum": fast or i == 0}
        calls.append(partial(torch._scaled_mm, a, b, out_dtype=torch.bfloat16, **scales))
    return calls if recipe != "row_gw_hp" else [*calls, lambda: g.t() @ x.detach()]


def gpu_products(lab: Lab, recipes: tuple[str, ...]) -> Iterator[Row]:
    for name in ("llama3-8b", "llama3-70b", "llama3.1-405b"):
        for tokens in (2048, 8192):
            for recipe in recipes:
                yield from product_rows(lab, name, tokens, recipe)
                torch._dynamo.reset()


def product_rows(lab: Lab, name: str, tokens: int, recipe: str) -> list[Row]:
    """The linear layers of a block, forward and backward. (In a model the compiler joins casts with what comes before:
    their share there is smaller.)"""
    c = MODELS[name]
    if lab.tiny:
        c, tokens = replace(c, dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=176), 32
    wide = c.n_heads * c.head_dim
    shapes = [(wide + 2 * c.n_kv_heads * c.head_dim, c.dim), (c.dim, wide), (2 * c.ffn_dim, c.dim), (c.dim, c.ffn_dim)]
    with torch.device(lab.ranks.device):
        layers = nn.ModuleList(nn.Linear(K, N, bias=False, dtype=torch.bfloat16) for N, K in shapes)
        xs = [torch.randn(tokens, K, dtype=torch.bfloat16, requires_grad=True) for _, K in shapes]
        gs = [torch.randn(tokens, N, dtype=torch.bfloat16) for N, _ in shapes]
    fp8.convert_linears(layers, recipe, small=True)
    with torch.no_grad():
        three = zip(xs, layers, gs, strict=True)
        calls = [call for x, layer, g in three for call in roof(x, layer.weight, g, recipe)]

    def fp8_layers(xs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for x, layer in zip(xs, layers, strict=True)]

    def bf16_layers(xs: list[Tensor]) -> list[Tensor]:
        return [nn.functional.linear(x, layer.weight) for x, layer in zip(xs, layers, strict=True)]

    def step(run: Callable) -> None:
        torch.autograd.backward(run(xs), gs)
        for t in (*xs, *layers.parameters()):
            t.grad = None

    casts, alone = f"{recipe}, with casts", f"{recipe}, products alone"
    run = torch.compile(fp8_layers, dynamic=False, disable=lab.tiny)
    steps = {casts: partial(step, run), alone: lambda: [call() for call in calls], "bf16": partial(step, bf16_layers)}
    measured = measure(lab, steps, 1, 3)
    ms = {name: 1e3 * float(np.median(times)) for name, times in measured[0].items()}
    share = {casts: f"; casts {1 - ms[alone] / ms[casts]:.1%} of its time"}
    flops, case = 6 * tokens * sum(N * K for N, K in shapes), f"a block's products, {name}, {tokens} tokens"
    return rows_of(case, "TFLOP/s", flops / 1e12, measured, lambda name, _: f"; {ms[name]:.2f} ms{share.get(name, '')}")


def gpu_checkpointing(lab: Lab) -> Iterator[Row]:
    flags = f"--model llama3-8b --n_layers {lab.layers(8)} --seq_len 4096 --micro_batch 2"
    none, contenders = ours(lab, flags), {}
    for more in ("block", "selective", "block --offload_activations"):
        contenders[f"--checkpointing {more}"] = ours(lab, f"{flags} --checkpointing {more}", none)
    case = f"checkpointing: Llama 8B, {lab.layers(8)} layers, 2 x 4096"
    yield from race_training(lab, case, contenders | {"--checkpointing none": none}, flags)


NO_MESH, IN_ROOT = "no FSDP", "embedding and lm_head in the root's unit"


def one_by_one(lab: Lab, case: str, layers: int, variants: dict[str, str]) -> Iterator[Row]:
    """Under FSDP on one rank, contenders that do not fit side by side; ratios to the first. What one GPU cannot show:
    communication, thus what prefetching hides of it, and --reshard, since one rank has nothing to give back."""
    mesh, first = shard.make_mesh(0, lab.ranks, offload=True), 0.0
    flags = f"--model llama3-8b --n_layers {layers} --seq_len 4096 --micro_batch 2"
    for name, more in variants.items():
        contender = ours(lab, f"{flags} {more}", None, None if name == NO_MESH else mesh, name != IN_ROOT)
        title = f"{case}: Llama 8B, {layers} layers, 2 x 4096, one by one"
        (row,) = race_training(lab, title, {name: contender}, flags, warm=1, rounds=2)
        del contender
        free(lab)
        first = first or row["median"]
        yield row | {"ratio": row["median"] / first}


FSDP = {NO_MESH: "", "--prefetch 1": "", "--prefetch 0": "--prefetch 0", "--prefetch 2": "--prefetch 2",
        "--reshard never": "--reshard never", IN_ROOT: ""}  # fmt: skip
OFFLOAD = {"--offload none": "", "--offload cpu": "--offload cpu",
           "--offload cpu --prefetch 0": "--offload cpu --prefetch 0"}  # fmt: skip


def gpu_gpt2(lab: Lab) -> Iterator[Row]:
    flags = "--model gpt2 --vocab_size 50304 --seq_len 1024 --micro_batch 64"
    block, eager = ours(lab, flags), theirs(lab, flags, False)
    contenders = {"flatland --compile block": block}
    contenders["flatland --compile model"] = ours(lab, f"{flags} --compile model", block)
    contenders |= {"transformers": eager, "transformers, compiled": theirs(lab, flags, True, eager)}
    yield from race_training(lab, "C: GPT-2 124M, 64 x 1024", contenders, flags)


def gpu_head(lab: Lab) -> Iterator[Row]:
    for dtype in (torch.bfloat16, torch.float32):
        yield from head_rows(lab, dtype)
        torch._dynamo.reset()


def head_rows(lab: Lab, dtype: torch.dtype) -> list[Row]:
    """dtype: of the weight; x is bf16."""
    N, D, V = (64, 32, 256) if lab.tiny else (16384, 4096, 128256)
    shape = ModelConfig(vocab_size=V, dim=D, n_layers=1, n_heads=1, ffn_dim=D, max_seq_len=N)
    with torch.device(lab.ranks.device):
        head, targets = LossHead(shape).to(dtype), torch.randint(0, V, (1, N))
        nn.init.normal_(head.weight, std=0.02)
        x = torch.randn(1, N, D, dtype=torch.bfloat16, requires_grad=True)

    def plain() -> Tensor:
        logits = nn.functional.linear(x[0], head.weight.to(x.dtype)).float()
        return nn.functional.cross_entropy(logits, targets[0], reduction="sum")

    def fused() -> Tensor:
        return nn.functional.linear_cross_entropy(x[0], head.weight.to(x.dtype), targets[0], reduction="sum")

    def products() -> None:
        with torch.no_grad():
            w = head.weight.to(x.dtype)
            y = x[0] @ w.T
            _ = y @ w, y.T @ x[0]

    def step(loss: Callable) -> None:
        loss().backward()
        x.grad = head.weight.grad = None

    losses = {"flatland": lambda: head(x, targets), "compiled F.cross_entropy": torch.compile(plain, disable=lab.tiny)}
    if hasattr(nn.functional, "linear_cross_entropy"):
        losses["F.linear_cross_entropy"] = fused
    values = [loss().item() for loss in losses.values()]
    if max(values) - min(values) > 1e-2 * values[0]:  # torch's own sums to bf16
        raise RuntimeError(f"the results differ: {values}")
    rest = x.nbytes + head.weight.nbytes + (torch.cuda.memory_allocated() if lab.cuda else 0)  # with the gradients
    steps = {name: partial(step, loss) for name, loss in losses.items()} | {"its three products alone": products}
    measured = measure(lab, steps, 1, 4)

    def says(name: str, rate: float) -> str:
        beyond = f"; {(measured[1][name] - rest) / 2**30:.2f} GiB beyond gradients" if name in losses else ""
        return f"; {1e3 * np.median(measured[0][name]):.2f} ms{beyond}"

    case = f"F: loss head, {N} x {D} x {V}, weight in {str(dtype)[6:]}"
    return rows_of(case, "TFLOP/s", 6 * N * D * V / 1e12, measured, says)


def gpu_experts(lab: Lab) -> Iterator[Row]:
    size = f"--n_layers {lab.layers(2)} --seq_len 4096 --micro_batch 2"
    flags = f"--model mixtral-8x7b {size}"
    experts, peer = ours(lab, flags), theirs(lab, flags, False)
    dense = ours(lab, f"--model llama2-7b --n_kv_heads 8 --ffn_dim 28672 {size}")  # both of a token's experts as one
    case, contenders = f"E: Mixtral, {lab.layers(2)} layers, 2 x 4096", {"flatland": experts, "transformers": peer}
    yield from race_training(lab, case, contenders | {"flatland, dense, as many FLOPs": dense}, flags)
    yield from profile_rows(lab, f"H: {case}", experts.step)


# Most valuable first; seconds: a guess at what each takes on an H200 whose compiler has nothing cached.
PARTS = {
    "check": (45, gpu_check), "tests": (150, gpu_tests), "llama": (100, partial(gpu_llama, T=4096, B=2)),
    "fp8": (100, partial(gpu_fp8, T=4096, B=2)), "recipe3": (70, gpu_recipe3),
    "products": (70, partial(gpu_products, recipes=("tensor",))), "llama-2048": (70, partial(gpu_llama, T=2048, B=1)),
    "fp8-2048": (80, partial(gpu_fp8, T=2048, B=1)), "checkpointing": (80, gpu_checkpointing), "head": (25, gpu_head),
    "mesh": (110, partial(one_by_one, case="FSDP on one rank", layers=4, variants=FSDP)),
    "offload": (70, partial(one_by_one, case="offload", layers=2, variants=OFFLOAD)), "gpt2": (110, gpu_gpt2),
    "experts": (70, gpu_experts), "products-row": (120, partial(gpu_products, recipes=("row", "row_gw_hp"))),
}  # fmt: skip


def free(lab: Lab) -> None:
    gc.collect()
    if lab.cuda:
        torch.cuda.empty_cache()


def bench_gpu(tiny: bool, seconds: float, parts: list[str]) -> Iterator[Row]:
    """One GPU: correctness, then training steps and their parts against peers and limits."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    lab = Lab(shard.init_ranks(), tiny, time.monotonic() + seconds)
    if tiny:
        yield note("--tiny", "small shapes and few steps under the names of the large ones: the figures say nothing")
    limit, torch._dynamo.config.recompile_limit = torch._dynamo.config.recompile_limit, 64  # contenders share code
    try:
        for name, (cost, part) in PARTS.items():
            left = lab.deadline - time.monotonic()
            if name != "check" and name not in parts:
                continue
            if left < cost and not tiny:
                yield note(name, f"skipped: it takes about {cost} s, {left:.0f} s are left")
                continue
            begin = time.monotonic()
            try:
                yield from part(lab)
            except Exception as error:  # the other parts are worth their time
                traceback.print_exc()
                yield note(name, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            torch._dynamo.reset()
            free(lab)
            print(f"({name}: {time.monotonic() - begin:.0f} s)", file=sys.stderr)
    finally:
        torch._dynamo.config.recompile_limit = limit
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- the command line

SUITES = {"generate": bench_generate, "tokenizer": bench_tokenizer, "load": bench_load, "data": bench_data}


def main_fp8(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    report = verbs.add_parser("fp8", help="what FP8 does to each layer of a run's model")
    report.add_argument("--run", required=True, type=Path, help="run folder")
    report.add_argument("--recipe", default="", choices=("", *fp8.RECIPES), help="another than the run's")
    same = verbs.add_parser("fp8-parity", help="losses in bf16 and in each recipe; takes trainer flags, too")
    same.add_argument("--out", default=Path("runs/fp8-parity"), type=Path, help="folder of the runs and the plot")
    args, flags = parser.parse_known_args(argv)
    if flags and args.verb != "fp8-parity":
        raise UserError(f"{flags[0]} is unknown; python bench.py {args.verb} --help lists what there is")
    print(report_fp8(args.run, args.recipe) if args.verb == "fp8" else parity(args.out, flags))


def describe() -> dict[str, str | int]:
    from importlib.metadata import version

    packages = ("torch", "transformers", "tokenizers", "sentencepiece", "tiktoken")
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    versions = {name: version(name) for name in packages}
    if torch.cuda.is_available():
        versions |= {"gpu": torch.cuda.get_device_name(), "CUDA": torch.version.cuda, "cuDNN": cudnn.version()}
    return {"python": platform.python_version(), "cpu": cpu, "threads": torch.get_num_threads(), **versions}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main(argv: list[str]) -> None:
    if argv and argv[0].startswith("fp8"):
        return main_fp8(argv)
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--suite", nargs="+", choices=[*SUITES, "gpu", *bench_runs.SUITES], default=list(SUITES),
                        help="default: but gpu and those of whole runs")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=9, help="measured runs of each contender (default 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows and the machine to a file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="of --suite gpu; default: all")
    parser.add_argument("--seconds", type=float, default=520.0, help="that --suite gpu may take (default 520)")
    parser.add_argument("--tiny", action="store_true", help="--suite gpu in small, on a CPU, too: does its code run?")
    parser.add_argument("--steps", type=int, default=0, help="of --suite switches and reference; 0 = as written there")
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER", help="a checkout of github.com/karpathy/nanoGPT")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}: it must be at least 1")
    if "gpu" in args.suite and not (args.tiny or torch.cuda.is_available()):
        raise UserError("--suite gpu needs a GPU that torch can use; with --tiny its code runs on a CPU, in small")
    try:
        machine = describe()
    except ImportError as e:
        raise UserError(f"{e.name} is not installed: `bash test.sh` installs what benchmarks compare with") from None
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    rows, suites = [], {name: partial(suite, args.repeats) for name, suite in SUITES.items()}
    suites["gpu"] = partial(bench_gpu, args.tiny, args.seconds, args.parts)
    suites |= {name: partial(suite, args) for name, suite in bench_runs.SUITES.items()}
    for suite in args.suite:
        print(f"\n{suites[suite].func.__doc__.splitlines()[0]}\n\n| case | what | median | p10 | p90 | ratio |")
        print("|---|---|--:|--:|--:|--:|")
        for row in suites[suite]():
            rows.append({"suite": suite} | row)
            low, median, high = ("" if row[key] is None else f"{row[key]:.4g}" for key in ("p10", "median", "p90"))
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            print(f"| {row['case']} | {row['what']} | {median} {row['unit']} | {low} | {high} | {ratio} |", flush=True)
            if args.json:
                write_whole(args.json, json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    if any("failed: " in row["what"] for row in rows):
        raise SystemExit("a part failed: see above")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(130)
