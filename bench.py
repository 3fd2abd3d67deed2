"""Benchmarks: ours against what others use for the same work, on this machine.

    python bench.py                              # every suite that can run here
    python bench.py --suite cpu --nanogpt PATH   # training on a CPU: whole steps, against peers; --parts, --peers pick
    python bench.py --suite gpu --json gpu.json  # on one H200 or H100, at most 9 minutes; --parts picks among its parts
    python bench.py --suite generate --json results.json
    python bench.py --check                      # only compares results, and times nothing
    python bench.py --suite switches             # whole runs: bench_runs.py; also growth, reference
    python bench.py fp8 --run runs/NAME          # what FP8 does to each layer of a model; on a GPU, what it wins
    python bench.py fp8-parity [--flag value]    # the same small Llama in bf16 (two seeds) and in each FP8 recipe

`fp8` reads a run's newest checkpoint (a bf16 run's, too) and sends one micro-batch of its data forward and backward.
In a suite, first the results of all contenders are compared: what is timed computes the same. Then each runs once
unmeasured, and they take turns, so that what else the machine does meets them alike. A row gives the median speed of
its runs, and the 10th and 90th percentile; `ratio` is its median over that of the last of its case. The file of --json
is written anew after each row. Status 1 if a contender computed something else, or a part failed.

Here: the command line, the small suites, FP8. Suites need what `bash test.sh` installs on top of requirements.txt."""

import argparse
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

from errors import ROOT, UserError  # first: it finds the Python that has torch

import torch  # isort: skip
import numpy as np
from torch import Tensor, nn

import bench_cpu
import bench_gpu
import bench_runs
import checkpoint
import fp8
import shard
from bench_rows import Row, describe, in_table, note, peak_rss, race, rank_environments, same, spread
from config import parse_args, split_batch
from data import builtin_documents, make_loader, write_shard
from generate import sample
from log import write_whole
from machine import find_device
from model import MODELS, ModelConfig, Transformer, random_init
from optim import make_optimizer
from prepare import build
from tokenizer import LLAMA3_SPLIT, load_tokenizer
from weights import export_model

# ---- suites


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
            yield from race(case, "tokens/s", prompts * n, contenders, args.repeats)


def built_in_text() -> tuple[list[str], int]:
    """-> (4 MB of documents, their bytes)"""
    texts, size = [], 0
    for text in builtin_documents():
        texts.append(text)
        size += len(text.encode())
        if size > 4e6:
            break
    return texts, size


def bench_tokenizer(args: Namespace) -> Iterator[Row]:
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
        yield from race(case, "MB/s", size / 1e6, contenders, args.repeats)


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


def bench_load(args: Namespace, gb: float = 0.6) -> Iterator[Row]:
    """Reading 0.6 GB of weights, bf16 to bf16, against one process that reads the file into memory of its size."""
    if args.check:  # test_shard.py does
        return
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        path, size = Path(folder) / "weights.bin", 0
        with open(path, "wb") as f:
            for parameter in Transformer(load_config(gb)).parameters():
                values = torch.randn(parameter.shape, device="cpu").bfloat16()
                size += f.write(values.view(torch.uint8).numpy())
        for ranks in (1, 2, 4):
            work = f"import bench, pathlib; bench.load_rank(pathlib.Path({str(path)!r}), {gb}, {args.repeats})"
            own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}  # the host's memory
            processes = [
                subprocess.Popen([sys.executable, "-c", work], env=env | own, stdout=subprocess.PIPE, text=True)
                for env in rank_environments(ranks)
            ]
            found = json.loads([process.communicate()[0] for process in processes][0])
            for case, ways in found["seconds"].items():
                plain = np.median(ways["plain read"])
                for way, times in ways.items():
                    what, peak = way, found["peak"][way]
                    if way != "plain read":
                        beyond = (peak - size / ranks) / found["largest"]
                        what += f"; peak {peak * ranks / size:.2f} shards, {beyond:.1f} tensors beyond it"
                    row = {"case": f"{ranks} process{'es' * (ranks > 1)}, {case}", "what": what, "unit": "GB/s"}
                    yield row | spread(size / 1e9, times) | {"ratio": plain / np.median(times)}


def bench_checkpoint(args: Namespace, gb: float = 0.5) -> Iterator[Row]:
    """Checkpoints of 0.5 GB, fp32 with moments, one process: what a save costs the loop and the disk, and a resume."""
    if args.check:  # test_checkpoint.py does
        return
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        small = replace(MODELS["tiny-llama"], vocab_size=2048, dim=512, ffn_dim=1408)
        layers = round((gb * 1e9 / 12 - 2 * 2048 * 512) / (small.dim * (small.dim * 3 + 3 * small.ffn_dim)))
        words = f"--dim 512 --ffn_dim 1408 --vocab_size 2048 --n_layers {layers} --dtype fp32 --out {folder}/run"
        config = parse_args(words.split())
        Path(config.out).mkdir()
        model = Transformer(config.model_config)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        shard.fill(model, random_init(config.model_config, shapes, 0))
        optimizer, tokens = make_optimizer(model, config), torch.arange(256)
        model(tokens[None, :8], tokens[None, :8]).backward()
        optimizer.step()
        optimizer.zero_grad()
        saver = checkpoint.Saver(config, model, optimizer, checkpoint.ALONE, None, None, "bench")
        stalls, waits = [], []

        def save() -> None:
            begin = time.perf_counter()
            saver.save(saver.last + 1, {}, tokens)
            stalls.append(time.perf_counter() - begin)
            saver.wait()
            waits.append(time.perf_counter() - begin - stalls[-1])

        def probe() -> None:
            checkpoint.probe_loss(model, saver.tokens, checkpoint.ALONE.device)

        def plain() -> None:
            with open(Path(folder) / "plain", "wb") as f:
                for tensor in state.values():
                    f.write(tensor.reshape(-1).view(torch.uint8).numpy())
                f.flush()
                os.fsync(f.fileno())
            Path(f.name).unlink()  # as the oldest checkpoint is

        state, _ = checkpoint.own_parts(model, optimizer, checkpoint.ALONE)
        size = sum(t.numel() * t.element_size() for t in state.values()) / 1e9
        ways = {"save, until it is on the disk": save, "one file, written and synced": plain}
        yield from (rows := race(f"saving {size:.2f} GB", "GB/s", size, ways, args.repeats))
        stall, rest = np.median(stalls[1:]), np.median(waits[1:])
        what, speed = "of the save, the thread: write, checksum, sync, rename, remove the oldest", size / rest
        yield note(f"saving {size:.2f} GB", what, speed, "GB/s", speed / rows[-1]["median"])
        case = "of a save, training waits"
        yield note(case, "with --save_async on (probe and copy)", stall * 1e3, "ms", stall / (stall + rest))
        (row,) = race(case, "probes/s", 1, {"probe": probe}, args.repeats)
        yield note(case, "of that, the probe", 1e3 / row["median"], "ms")
        newest_folder = checkpoint.folders(Path(config.out))[-1]
        file = newest_folder / "rank-00000.safetensors"
        ways = {"verify": partial(checkpoint.fault_of, newest_folder), "read": partial(read_plainly, file)}
        yield from race("the same, in the page cache", "GB/s", size, ways, args.repeats)

        def resume() -> None:
            found, _ = checkpoint.find(config)
            checkpoint.restore(found, model, optimizer, checkpoint.ALONE, config)

        ways = {"resume: verify, load, prove": resume, "read": partial(read_plainly, file)}
        yield from race("the same, in the page cache", "GB/s", size, ways, args.repeats)


def bench_data(args: Namespace) -> Iterator[Row]:
    """Batches from token shards in the page cache, one process; shards from text, against the tokenizer alone."""
    if args.check:  # test_data.py does
        return
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
            yield from race(case, "tokens/s", 40 * seq_len * micro_batch, contenders, args.repeats)

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
        yield from race("4 MB of text", "MB/s", size / 1e6, contenders, args.repeats)


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
    saved = checkpoint.newest(run)
    config = saved.config
    model = Transformer(saved.model_config, torch.bfloat16 if config.dtype == "bf16" else torch.float32)
    shard.fill(model, saved.read_weights)
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
    title = f"{run}, step {saved.step}: FP8 recipe {recipe}, {tokens} tokens; saturated and flushed in millionths"
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


# ---- the command line


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


# Each takes the command line's flags and yields its rows; the first line of its docstring is the title.
SUITES: dict[str, Callable[[Namespace], Iterator[Row]]] = {
    "generate": bench_generate,
    "tokenizer": bench_tokenizer,
    "load": bench_load,
    "checkpoint": bench_checkpoint,
    "data": bench_data,
    "cpu": bench_cpu.bench_cpu,
    "gpu": bench_gpu.bench_gpu,
    **bench_runs.SUITES,
}


def parts_of(suite: str) -> list[str]:
    return list({"cpu": bench_cpu, "gpu": bench_gpu}[suite].PARTS) if suite in ("cpu", "gpu") else []


def parse(argv: list[str]) -> Namespace:
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    suites = ["all", *SUITES]
    parser.add_argument("--suite", nargs="+", choices=suites, default=["all"], help="default: all that can run here")
    parser.add_argument("--check", action="store_true", help="only compare the results of all contenders, time nothing")
    parser.add_argument("--repeats", type=int, default=0, help="measured runs of each contender (default 9; cpu: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows and the machine to a file")
    parser.add_argument("--parts", nargs="+", default=[], metavar="PART", help="of --suite cpu or gpu; default: all")
    parser.add_argument("--peers", nargs="+", choices=bench_cpu.PEERS, default=list(bench_cpu.PEERS),
                        help="of --suite cpu; default: all that are there")  # fmt: skip
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER", help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--steps", type=int, default=0, help="of --suite switches and reference; 0 = as written there")
    parser.add_argument(
        "--disk", type=Path, metavar="FOLDER", help="of --suite checkpoint; default: where temporary files go"
    )
    parser.add_argument("--seconds", type=float, default=520.0, help="that --suite gpu may take (default 520)")
    parser.add_argument("--tiny", action="store_true", help="cpu and gpu in small, on a CPU, too: does the code run?")
    args = parser.parse_args(argv)
    has_gpu = torch.cuda.is_available()
    if "all" in args.suite:
        args.suite = [name for name in SUITES if name != "gpu" or has_gpu]
    if args.check:  # whole runs compare results while they are timed
        args.suite = [name for name in args.suite if name not in bench_runs.SUITES]
    known = [part for name in args.suite for part in parts_of(name)]
    if unknown := [part for part in args.parts if part not in known]:
        there = f"there are {', '.join(known)}" if known else "parts are of --suite cpu and --suite gpu"
        raise UserError(f"--parts {unknown[0]} is unknown: {there}")
    if args.nanogpt and not (args.nanogpt / "model.py").exists():
        raise UserError(f"--nanogpt {args.nanogpt}: there is no model.py in it")
    if args.repeats < 0:
        raise UserError(f"--repeats {args.repeats}: it must be at least 1")
    if "gpu" in args.suite and not (args.tiny or has_gpu):
        raise UserError("--suite gpu needs a GPU that torch can use; with --tiny its code runs on a CPU, in small")
    return args


def main(argv: list[str]) -> None:
    if argv and argv[0].startswith("fp8"):
        return main_fp8(argv)
    args = parse(argv)
    try:
        machine = describe()
    except ImportError as e:
        raise UserError(f"{e.name} is not installed: `bash test.sh` installs what benchmarks compare with") from None
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    if machine.get("busy", 0) > 0.1:
        print(f"Warning: others use {machine['busy']:.0%} of this machine: ratios are less certain, speeds are too low")
    rows = []
    for suite in args.suite:
        parts = [part for part in parts_of(suite) if part in args.parts or not args.parts]
        own = Namespace(**vars(args) | {"repeats": args.repeats or (5 if suite == "cpu" else 9), "parts": parts})
        if args.check:
            own.repeats, own.parts = 0, ["check"] if suite == "gpu" else parts
        print(f"\n{SUITES[suite].__doc__.splitlines()[0]}\n\n| case | what | median | p10 | p90 | ratio |")
        print("|---|---|--:|--:|--:|--:|")
        for row in SUITES[suite](own):
            rows.append({"suite": suite} | row)
            print(in_table(row), flush=True)
            if args.json:
                write_whole(args.json, json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    if any(word in row["what"] for row in rows for word in ("failed: ", "refused: ")):
        raise SystemExit("a part failed, or a contender was refused: see above")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(130)
