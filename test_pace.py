"""Which rank is slow: numbers made by hand, and gloo ranks of which one sleeps in each step."""

import json
import re

import pytest
import torch

from log import StepTimes, Times, describe_gpu, find_slow, without_costs
from test_shard import run_code

WORDS = "--tokenizer bytes --compile none --seq_len 64 --eval_every 0 --log_every 5 --model tiny-llama"
# Trains; rank 1 sleeps in each step from SLOW on.
CODE = """
import sys, time
import train
slow, words = int(sys.argv[1]), sys.argv[2:]
steps, sync = 0, train.shard.sync_gradients

def sync_slowly(model, last, reshard):
    global steps
    steps += 1
    if train.os.environ["RANK"] == "1" and steps >= slow:
        time.sleep(0.2)
    sync(model, last, reshard)

train.shard.sync_gradients = sync_slowly
train.main(words)
"""


def train_slowly(folder, text: str, slow: int, steps: int, *more: str) -> list[dict]:
    """Records of steps. slow: the step from which rank 1 of two sleeps."""
    words = [*WORDS.split(), "--data", text, "--out", str(folder), "--steps", str(steps), *more]
    done = run_code(CODE, ["train.py", str(slow), *words], ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record] + [done.stdout]


@pytest.mark.parametrize("shard_size", ["0", "1"])
def test_a_slow_rank_is_named_within_two_records(tmp_path, text, shard_size):
    """From step 11 on: the record of step 15 suspects it, that of step 20 says it."""
    *records, screen = train_slowly(tmp_path / "run", text, 11, 25, "--shard_size", shard_size)
    for record in records[-2:]:
        assert re.search(r"/rank 1 \+\d+ % \(data \d+ ms, compute \d+ ms\)", record["slowest"])
        compute, wait = record["rank_compute_ms"], record["rank_wait_ms"]
        assert compute[1] > compute[0] and wait[0] > wait[1] and len(record["rank_data_ms"]) == 2
    assert [record["step"] for record in records] == [1, 5, 10, 15, 20, 25]
    assert "rank_wait_ms" not in records[0]  # which compiles
    assert f", slowest {records[-1]['slowest']}" in screen


@pytest.mark.slow
def test_nobody_is_named_on_an_even_run(tmp_path, text):
    *records, _ = train_slowly(tmp_path / "run", text, 10**9, 200, "--log_every", "10")
    assert not [record["slowest"] for record in records if "slowest" in record] and len(records) == 21


def times(*own: float, wait: float = 0.0) -> list[Times]:
    return [Times(f"node{i // 2}", 2.0, ms - 2.0, wait) for i, ms in enumerate(own)]


def test_beyond_a_tenth_of_the_median():
    even = times(100, 105, 109, 100)
    assert find_slow(even) is None and find_slow(even[::-1]) is None and find_slow(times(0, 0)) is None
    assert find_slow(times(100, 101, 99, 100, 98, 114)) == (5, "node2/rank 5 +14 % (data 2 ms, compute 112 ms)")
    assert find_slow(times(1100, 1210))[0] == 1 and find_slow(times(1210, 1100))[0] == 0  # of two, of the faster
    late = Times("a", 30.0, 98.0, 0.0)  # its data are late
    assert find_slow([*times(100, 100), late]) == (2, "a/rank 2 +28 % (data 30 ms, compute 98 ms)")


def test_what_collectives_cost_every_rank_is_no_waiting():
    waiting = [Times("a", 0.0, 50.0, 20.0), Times("a", 0.0, 65.0, 5.0)]
    assert without_costs(waiting) == [Times("a", 0.0, 55.0, 15.0), Times("a", 0.0, 70.0, 0.0)]
    assert find_slow(without_costs(waiting))[0] == 1


def test_a_rank_alone_is_measured_too():
    pace = StepTimes(torch.nn.Linear(1, 1), torch.device("cpu"), 1)
    pace.begin(0.5)
    pace.end()
    pace.begin(2.0)
    pace.end()
    measured = pace.take()
    assert (measured.data, measured.wait) == (1000.0, 0.0) and 0 <= measured.compute < 100
    assert pace.take()[1:] == (0.0, 0.0, 0.0)  # no step since
    assert torch.cuda.is_available() or describe_gpu(torch.device("cpu")) == ""
