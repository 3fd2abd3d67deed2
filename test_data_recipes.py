"""The recipes with data, made tiny, on two processes, from files made here: what they say is what trains."""

import gzip
import json
import math
from pathlib import Path

import pytest

from config import _read_recipe
from test_shard import run_ranks

ROOT = Path(__file__).parent
TINY = "--vocab_size 300 --dim 32 --n_layers 1 --n_heads 4 --n_kv_heads 2 --ffn_dim 64 --tokenizer bytes --compile none"
SMALL = "--seq_len 64 --micro_batch 2 --batch_tokens 1024 --steps 4 --eval_every 2 --eval_batches 2 --log_every 1"
MODELS = {
    "llama2-7b-c4": "tiny-llama",
    "llama2-70b-c4": "tiny-llama",
    "mixtral-8x7b-c4": "tiny-mixtral",
    "llama3-8b-sft": "tiny-llama",
}


def files(folder, recipe) -> list[str]:
    """What stands for the recipe's data: conversations, or C4's files under its names."""
    for split, n in (("train", 3), ("validation", 1)):
        for f in range(n):
            rows = [
                {
                    "messages": [
                        {"role": "user", "content": f"What is {i}?"},
                        {"role": "assistant", "content": f"It is {i}."},
                    ]
                }
                if "sft" in recipe
                else {"text": f"{split} {f} document {i} " * 5, "url": "x"}
                for i in range(90)
            ]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            name = f"{split}-{f}.jsonl" if "sft" in recipe else f"c4-{split}.{f:05}-of-{n:05}.json.gz"
            content = lines.encode() if "sft" in recipe else gzip.compress(lines.encode())
            (folder / name).write_bytes(content)
    pattern = "{}-*.jsonl" if "sft" in recipe else "c4-{}.*.json.gz"
    return ["--data", str(folder / pattern.format("train")), "--val_data", str(folder / pattern.format("validation"))]


def train(tmp_path, runs: dict[str, list[str]]) -> None:
    """The runs one after the other, in the same two processes."""
    code = f"""
import check, train
from config import parse_args
from guard import Run
ranks = shard.init_ranks()
for words in {list(runs.values())!r}:
    config = check.resolve(parse_args(words), ranks.device, ranks.world_size)
    with Run(config, ranks) as run:
        train.train(config, ranks, run)
    assert run.exit_code == 0
    shard.gather(None, ranks)
shard.leave(ranks)
"""
    run_ranks(2, code, str(tmp_path))


def tiny_flags(folder, recipe) -> list[str]:
    said = _read_recipe(f"recipes/{recipe}.args")
    assert "--data" in said and "--val_data" in said
    weights = said.index("--weights") if "--weights" in said else len(said)  # these are not made tiny
    stream = ["--stream", "--lanes", "4"] if "c4" in recipe else []
    rest = [*TINY.split(), *SMALL.split(), *files(folder, recipe), *stream]
    return [*said[:weights], *said[weights + 2 :], "--model", MODELS[recipe], *rest]


def test_tiny(tmp_path):
    runs = {}
    for recipe in MODELS:
        text = (ROOT / "recipes" / f"{recipe}.args").read_text()
        assert (".venv/bin/python -m pip install pyarrow" in text) == (
            ".parquet" in text
        ) and "python download.py" in text
        (tmp_path / recipe).mkdir()
        runs[recipe] = [*tiny_flags(tmp_path / recipe, recipe), "--out", str(tmp_path / recipe / "run")]
    train(tmp_path, runs)
    for recipe in MODELS:
        run = tmp_path / recipe / "run"
        records = [r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in r]
        assert [r["step"] for r in records] == [1, 2, 3, 4] and all(math.isfinite(r["loss"]) for r in records)
        assert [r["step"] for r in records if "val_loss" in r] == [2, 4]
        env, log = json.loads((run / "env.json").read_text()), (run / "log.txt").read_text()
        assert env["attention"] == ("sdpa, boolean mask" if "sft" in recipe else "sdpa") and env["data"]["val"]
        assert ("conversations, 0 truncated" if "sft" in recipe else "a stream of 3 files for 4 lanes") in log


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["llama2-7b-c4", "llama3-8b-sft"])
def test_it_goes_on_where_it_stopped(tmp_path, recipe):
    flags = [*tiny_flags(tmp_path, recipe), "--schedule", "constant"]
    at = {"a": ("parts", 2), "b": ("parts", 4), "c": ("whole", 4)}
    words = {k: [*flags, "--steps", str(n), "--out", str(tmp_path / name)] for k, (name, n) in at.items()}
    train(tmp_path, words)
    runs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("parts", "whole")]
    losses = [[record["loss"] for record in map(json.loads, run) if "loss" in record] for run in runs]
    assert losses[0] == losses[1]
