"""The scale suite: costs that could grow with ranks and shards, simulated on one machine without a GPU.

`read a manifest`: the last of many ranks finds its part of Llama 3.1 405B in a checkpoint of which only the manifest
exists. `open shards`: rank 0 opens sparse files and tells them to another rank, as it would tell every other. Each
measured rank is a new process. `gib` is its peak with Python and torch, `cpu s` is the time of one core."""

import json
import os
import resource
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
from config import parse_args
from data import open_data
from lib.parts import shard_slices
from lib.ranks import Ranks
from lib.text import HEADER, INDEX, SHARD
from model import Transformer
from optim import AdamW
from shard import sharded_dim

RANKS = (64, 64), (1024, 1024), (1024, 64)  # that saved, that read
SHARDS = 100, 10_000, 100_000
TOKENS = 150_000_000  # of a shard: 100,000 of them hold 15 T tokens
MADE_WITH = {  # the index of a folder of shards, without the files
    "tokenizer": "bytes",
    "fingerprint": "bytes",
    "vocab_size": 128256,
    "delimiter": 0,
    "kind": "text",
}
SETTINGS = "--model llama3.1-405b --seq_len 8192 --micro_batch 1 --eval_every 0 --data"


def measure(work, folder: str, *args) -> dict:
    """The costs of work(folder, *args) in this process."""
    opened, begin, cpu = [], time.perf_counter(), time.process_time()
    sys.addaudithook(lambda event, a: event == "open" and str(a[0]).startswith(folder) and opened.append(1))
    found = work(folder, *args) or {}
    costs = {"seconds": time.perf_counter() - begin, "cpu s": time.process_time() - cpu, "files opened": len(opened)}
    return costs | {"gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20} | found


def write_shards(folder: str, count: int) -> None:
    """A folder of shards as `data.py prepare` leaves it. All bytes are zero."""
    files = {f"train-{i:05}{SHARD}": {"tokens": TOKENS, "sha256": f"{i:064x}"} for i in range(count)}
    for name in files:
        Path(folder, name).touch()
        os.truncate(Path(folder, name), HEADER + 4 * TOKENS)
    Path(folder, INDEX).write_text(json.dumps(MADE_WITH | {"files": files}))


def open_shards(folder: str, store: str, rank: int) -> None:
    """Opens the data as a rank of a run of two does, and reads its first step."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ranks = Ranks(rank, 2, torch.device("cpu"), dist.group.WORLD)
    loader, _ = open_data(parse_args([*SETTINGS.split(), folder]), ranks)
    next(iter(loader))


def write_manifest(run: Path, ranks: int) -> None:
    """Writes the manifest of a checkpoint of `ranks` ranks, without the files that it lists."""
    config, layouts = parse_args([*SETTINGS.split(), "bytes"]), {}
    with torch.device("meta"):
        parameters = Transformer(config.model_config).named_parameters()
    for name, p in parameters:
        for kind in ("model", *AdamW.state_names):
            layouts[f"{kind}.{name}"] = checkpoint.Layout([*p.shape], "float32", sharded_dim(p, ranks), ranks)
        layouts[f"step.{name}"] = checkpoint.Layout([], "float32", 0, 1)
    checkpoint.assign_files(layouts)
    names = sorted({layout.file for layout in layouts.values()})
    files = [{"file": name, "part": rank, "bytes": 2**31, "crc32": 2**31} for name in names for rank in range(ranks)]
    manifest = {"format": checkpoint.FORMAT, "step": 1, "config": asdict(config), "model": asdict(config.model_config)}
    manifest = json.loads(json.dumps(manifest | {"tensors": layouts, "files": files}, default=vars))
    folder = checkpoint.step_folder(run, 1)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest | {"crc32": checkpoint._crc_of(manifest)}))


def read_manifest(run: str, ranks: int) -> dict:
    """Reads a manifest -> how many files the last rank opens for its shards of all tensors."""
    saved, opened = checkpoint.Checkpoint(checkpoint.step_folder(Path(run), 1)), set()
    saved.open = lambda file: opened.add(file) or Namespace(read=lambda *_: None)
    checkpoint.assemble = lambda *args: [read(()) for _, read in args[-1]]  # without the values
    for key, layout in saved.layouts.items():
        saved.read(key, shard_slices(layout.shape, layout.dim, ranks, ranks - 1))
    return {"files to read": len(opened)}


def bench_scale() -> Iterator[dict]:
    for saved_by, ranks in RANKS:
        with tempfile.TemporaryDirectory() as run, get_context("spawn").Pool(1) as pool:
            write_manifest(Path(run), saved_by)
            costs = pool.apply(measure, (read_manifest, run, ranks))
            yield {"what": "read a manifest", "saved by": saved_by, "ranks": ranks, "shards": ""} | costs
    for shards in SHARDS:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as meeting:
            write_shards(folder, shards)
            with get_context("spawn").Pool(2) as pool:
                jobs = [(open_shards, folder, f"{meeting}/store", rank) for rank in range(2)]
                for rank, costs in enumerate(pool.starmap(measure, jobs, chunksize=1)):
                    yield {"what": f"open shards, rank {rank}", "saved by": "", "ranks": 2, "shards": shards} | costs
