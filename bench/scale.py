"""The scale suite: costs that could grow with the shards of --data or with the ranks, on one machine without a GPU.

First, the time that a record takes each of 1,024 ranks without the network: the router of Qwen3-235B has 96 x 128 sums.
Then starts: rank 0 opens sparse files and tells them to another rank, as it would tell every other. Each is a new
process. `gib` is its peak with Python and torch."""

import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from base.ranks import Ranks, sum_over_ranks
from config import SHARD
from data import open_data
from dataset.prepare import HEADER, INDEX
from inputs import settled_args

SHARDS = 100, 10_000, 100_000
RECORDS = 100
TOKENS = 150_000_000  # of a shard: 100,000 of them hold 15 T tokens
MADE_WITH = {  # the index of a folder of shards, without the files
    "tokenizer": "bytes",
    "fingerprint": "bytes",
    "vocab_size": 128256,
    "delimiter": 0,
    "kind": "text",
}
SETTINGS = "--model llama3.1-405b --seq_len 8192 --micro_batch 1 --eval_every 0 --data"


def open_shards(folder: str, rank: int) -> dict:
    """Opens the data as a rank of a run of two does, and reads its first step -> the costs."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    begin = time.perf_counter()
    ranks = Ranks(rank, 2, torch.device("cpu"), dist.group.WORLD)
    loader, _ = open_data(settled_args([*SETTINGS.split(), f"{folder}/data"]), ranks)
    next(iter(loader))
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": time.perf_counter() - begin, "gib": gib}


def time_record(ranks: int) -> dict:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    sums, begin = [torch.zeros(96, 128)], time.perf_counter()
    for _ in range(RECORDS):
        sums, rows = sum_over_ranks(sums, [1.0, 2.0], Ranks(0, ranks, torch.device("cpu")))
    seconds = (time.perf_counter() - begin) / RECORDS
    dist.destroy_process_group()
    return {"ranks": ranks, "record_ms": 1e3 * seconds, "bytes": 8 * (sums[0].numel() + sum(map(len, rows)))}


def bench_scale() -> Iterator[dict]:
    """A record; then a folder of shards as `data.py prepare` leaves it, whose bytes are all zero, and opens it."""
    yield time_record(1024)
    for shards in SHARDS:
        with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(2) as pool:
            data = Path(folder, "data")
            data.mkdir()
            files = {f"train-{i:05}{SHARD}": {"tokens": TOKENS, "sha256": f"{i:064x}"} for i in range(shards)}
            for name in files:
                (data / name).touch()
                os.truncate(data / name, HEADER + 4 * TOKENS)
            (data / INDEX).write_text(json.dumps(MADE_WITH | {"files": files}))
            for rank, costs in enumerate(pool.starmap(open_shards, [(folder, 0), (folder, 1)], chunksize=1)):
                yield {"shards": shards, "rank": rank} | costs
