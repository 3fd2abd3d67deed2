"""The scale suite: costs that could grow with ranks and shards, simulated on one machine without a GPU.

Every rank is a new process. `measure` returns its seconds, its peak memory (with Python and torch), and how many files
of a folder it opened."""

import json
import pickle
import resource
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch

import checkpoint
import data
from config import parse_args
from lib.parts import shard_slices
from lib.ranks import Ranks
from lib.text import HEADER, INDEX, SHARD
from model import Transformer
from optim import AdamW
from shard import sharded_dim

RANKS = 1, 64, 256, 1024
SHARDS = 100, 10_000, 100_000
TOKENS = 150_000_000  # of a shard, which is a sparse file: 100,000 of them hold 15 T tokens
MADE_WITH = {"tokenizer": "bytes", "fingerprint": "bytes", "vocab_size": 128256, "delimiter": 0, "kind": "text"}
SETTINGS = "--model llama3.1-405b --seq_len 8192 --micro_batch 1 --eval_every 0 --data"


def measure(work: Callable, folder: str, *args) -> tuple[dict, object]:
    """Calls work(folder, *args) in a new process -> (its costs, its result)."""
    with get_context("fork").Pool(1) as pool:
        return pool.apply(_measured, (work, folder, *args))


def _measured(work, folder, *args):
    opened = []
    sys.addaudithook(lambda event, a: event == "open" and str(a[0]).startswith(folder) and opened.append(1))
    begin, cpu = time.perf_counter(), time.process_time()
    result = work(folder, *args)
    costs = {"seconds": time.perf_counter() - begin, "on the CPU": time.process_time() - cpu}
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return costs | {"gib": gib, "files opened": len(opened)}, result


def write_shards(folder: str, count: int) -> None:
    """A folder of shards as `data.py prepare` leaves it. All bytes are zero."""
    files = {f"train-{i:05}{SHARD}": {"tokens": TOKENS, "sha256": f"{i:064x}"} for i in range(count)}
    for name in files:
        with open(f"{folder}/{name}", "wb") as file:
            file.truncate(HEADER + 4 * TOKENS)
    Path(folder, INDEX).write_text(json.dumps(MADE_WITH | {"files": files}))


def open_shards(folder: str, rank: int, ranks: int, message: bytes) -> bytes:
    """Opens the data as a rank of a run does, and reads its first step -> the message of rank 0 to the others."""
    sent = [message]

    def on_first_rank(work, _):
        if not rank:
            sent[0] = pickle.dumps(work())
        return pickle.loads(sent[0])

    data.on_first_rank = on_first_rank
    loader, _ = data.open_data(parse_args([*SETTINGS.split(), folder]), Ranks(rank, ranks, torch.device("cpu")))
    next(iter(loader))
    return sent[0]


def write_manifest(run: str, ranks: int) -> int:
    """Writes the manifest of a run on `ranks` ranks, without the files that it lists -> its bytes."""
    config = parse_args([*SETTINGS.split(), "bytes"])
    with torch.device("meta"):
        parameters = Transformer(config.model_config).named_parameters()
    layouts, rows = {}, []
    for name, p in parameters:
        for kind in ("model", *AdamW.state_names):
            dim = sharded_dim(p, ranks)
            layouts[f"{kind}.{name}"] = checkpoint.Layout([*p.shape], "float32", dim, ranks)
        layouts[f"step.{name}"] = checkpoint.Layout([], "float32", 0, 1)
    checkpoint.assign_files(layouts)
    for file in sorted({layout.file for layout in layouts.values()}):
        rows += [{"file": file, "part": rank, "bytes": 2**31, "crc32": 2**31} for rank in range(ranks)]
    manifest = {"format": checkpoint.FORMAT, "step": 1, "config": asdict(config), "model": asdict(config.model_config)}
    manifest |= {"tensors": layouts, "files": rows}
    folder = checkpoint.step_folder(Path(run), 1)
    folder.mkdir(parents=True)
    text = json.dumps(manifest | {"crc32": checkpoint._crc_of(manifest)}, default=vars)
    return (folder / "manifest.json").write_text(text)


def read_manifest(run: str, rank: int, ranks: int) -> int:
    """Reads a manifest -> how many files a rank opens to read its shards of all tensors."""
    saved, opened = checkpoint.Checkpoint(checkpoint.step_folder(Path(run), 1)), set()
    saved.open = lambda file: opened.add(file) or Namespace(read=lambda *_: None)
    checkpoint.assemble = lambda *args: [read(()) for _, read in args[-1]]
    for key, layout in saved.layouts.items():
        saved.read(key, shard_slices(layout.shape, layout.dim, ranks, rank))
    return len(opened)


def bench_scale(args: Namespace) -> Iterator[dict]:
    """Resuming and starting on many ranks and shards, measured on the last rank; metadata: bytes of the manifest, which
    every rank reads, or that rank 0 sends to every other rank."""
    for saved_by, ranks in (*((n, n) for n in RANKS), (64, 1024), (1024, 64)):
        with tempfile.TemporaryDirectory() as run:
            size = write_manifest(run, saved_by)
            costs, files = measure(read_manifest, run, ranks - 1, ranks)
            work = {"what": "read a manifest", "ranks": ranks, "shards": None}
            yield work | costs | {"files opened": files, "metadata": size, "note": f"saved by {saved_by}"}
    for shards in SHARDS:
        with tempfile.TemporaryDirectory() as folder:
            write_shards(folder, shards)
            message = b""  # of rank 0
            for ranks in RANKS:
                costs, message = measure(open_shards, folder, ranks - 1, ranks, message)
                work = {"what": "open shards", "ranks": ranks, "shards": shards}
                yield work | costs | {"metadata": len(message), "note": ""}
