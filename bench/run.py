"""Measures flatland on this machine: the figures of BENCHMARKS.md.

    python bench/run.py speed [@recipes/NAME.args] [--flag value ...]    tokens/s, against transformers' model
    python bench/run.py fp8 [...]                   tokens/s in bf16 and with each recipe of FP8
    python bench/run.py start [...]                 a run of one step, which ends with its seconds by part
    python bench/run.py scale                       a record on 1,024 ranks, without the network
    python bench/run.py golden [--record]           golden losses, as bench/golden.py

speed, fp8 and start take train.py's flags, and train on this machine's CPU or one GPU. Contenders take turns, so that
other load affects all of them, and a ratio is to the first contender of the same turn. Each is a new process, because
memory, the allocator and the compiler belong to one. On a GPU, mfu counts causal attention, against the data sheet's
peak, and mem_gib is the peak of torch's allocator."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from base.errors import Failure, Parser, prepare_python, run_script

if __name__ == "__main__":
    prepare_python()

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import golden
from base.disk import ROOT
from base.host import describe_environment
from base.ranks import Ranks, sum_over_ranks
from curves import read_records

TURNS = 3
RECORDS = 5  # of a turn, one every five steps; the first two are warm-up
TRAIN = [ROOT / "train.py", "--eval_every=0", "--sample_every=0", "--log_every=5"]
LOOP = [ROOT / "bench/transformers_loop.py", "--log_every=5"]
CONTENDERS = {
    "speed": {"flatland": TRAIN, "transformers": LOOP},
    "fp8": {
        "off": TRAIN,
        "tensor": [*TRAIN, "--fp8=tensor"],
        "row": [*TRAIN, "--fp8=row"],
        "row_gw_hp": [*TRAIN, "--fp8=row_gw_hp"],
    },
}


def train(command: list, count: int) -> list[dict]:
    """The first `count` records of a trainer, which is killed then: at its end it would write a checkpoint."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        with subprocess.Popen([sys.executable, *command, f"--out={run}"], stdout=subprocess.DEVNULL) as process:
            while len(records) < count and process.poll() is None:
                time.sleep(0.2)
                records = [record for record in read_records(run) if "loss" in record]
            process.kill()
    if len(records) < count:
        raise Failure(f"{command[0]} ended after {len(records)} records")
    return records[:count]


def bench_training(suite: str, flags: list[str]) -> Iterator[dict]:
    for turn in range(1, TURNS + 1):
        first = None
        for name, command in CONTENDERS[suite].items():
            records = train([*command, *flags], RECORDS)
            rate = median(record["tok_per_s"] for record in records[2:])
            first = first or rate
            row = {"turn": turn, "contender": name, "tokens/s": rate, "ratio": rate / first}
            yield row | {key: records[-1].get(key) for key in ("mfu", "mem_gib", "step", "loss")}


def bench_scale(ranks: int = 1024, records: int = 100) -> Iterator[dict]:
    """The time that a record takes each rank. The router of Qwen3-235B has 96 x 128 sums."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    sums, begin = [torch.zeros(96, 128)], time.perf_counter()
    for _ in range(records):
        sums, rows = sum_over_ranks(sums, [1.0, 2.0], Ranks(0, ranks, torch.device("cpu")))
    seconds = (time.perf_counter() - begin) / records
    dist.destroy_process_group()
    yield {"ranks": ranks, "record_ms": 1e3 * seconds, "bytes": 8 * (sums[0].numel() + sum(map(len, rows)))}


def main(argv: list[str]) -> None:
    suites = {"suite": {"choices": [*CONTENDERS, "start", "scale", "golden"]}}
    parser = Parser(suites, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suite, flags = parser.parse_args(argv[:1]).suite, argv[1:]
    if suite == "golden":
        return golden.main(flags)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    print(json.dumps(describe_environment()))
    if suite == "start":
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, *TRAIN, *flags, "--steps=1", f"--out={folder}/run"], check=True)
        return
    for row in bench_scale() if suite == "scale" else bench_training(suite, flags):
        print(json.dumps(row))


if __name__ == "__main__":
    run_script(main)
