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
from multiprocessing import get_context
from pathlib import Path

import torch

import data
from config import parse_args
from lib.ranks import Ranks
from lib.text import HEADER, INDEX, SHARD

RANKS = 1, 64, 256, 1024
SHARDS = 100, 10_000, 100_000
TOKENS = 150_000_000  # of a shard, which is a sparse file: 100,000 of them hold 15 T tokens
MADE_WITH = {"tokenizer": "bytes", "fingerprint": "bytes", "vocab_size": 128256, "delimiter": 0, "kind": "text"}
SETTINGS = "--model llama3.1-405b --seq_len 8192 --micro_batch 1 --eval_every 0 --data"


def measure(folder: str, work: Callable, *args) -> tuple[dict, object]:
    """Calls work(*args) in a new process -> (its costs, its result)."""
    with get_context("fork").Pool(1) as pool:
        return pool.apply(_measured, (folder, work, *args))


def _measured(folder, work, *args):
    opened = []
    sys.addaudithook(lambda event, a: event == "open" and str(a[0]).startswith(folder) and opened.append(1))
    begin, cpu = time.perf_counter(), time.process_time()
    result = work(*args)
    costs = {"seconds": time.perf_counter() - begin, "on the CPU": time.process_time() - cpu}
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return costs | {"gib": gib, "files opened": len(opened)}, result


def write_shards(folder: Path, count: int) -> None:
    """A folder of shards as `data.py prepare` leaves it. All bytes are zero."""
    files = {f"train-{i:05}{SHARD}": {"tokens": TOKENS, "sha256": f"{i:064x}"} for i in range(count)}
    for name in files:
        with open(folder / name, "wb") as file:
            file.truncate(HEADER + 4 * TOKENS)
    (folder / INDEX).write_text(json.dumps(MADE_WITH | {"files": files}))


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


def bench_scale(args: Namespace) -> Iterator[dict]:
    """Starting on many ranks and shards; metadata: bytes that rank 0 sends to every other rank."""
    for shards in SHARDS:
        with tempfile.TemporaryDirectory() as folder:
            write_shards(Path(folder), shards)
            message = b""
            for ranks in RANKS:
                costs, result = measure(folder, open_shards, folder, ranks - 1, ranks, message)
                message = message or result
                place = {"what": "open shards", "ranks": ranks, "rank": ranks - 1, "shards": shards}
                yield place | costs | {"metadata": len(result), "note": ""}
