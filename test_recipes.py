"""Every recipe runs, with a tiny model in its place and small files in that of its data, says the truth about its size,
and names what it needs."""

import gzip
import json
import re

import pytest
import torch

from config import _read_recipe, parse_args
from lib.errors import ROOT, UserError
from model import Transformer, flops_per_token
from test_shard import run_ranks

EVERY = sorted(p.name for p in (ROOT / "recipes").glob("*.args"))
WITH_DATA = [name for name in EVERY if "--data" in _read_recipe(f"recipes/{name}")]
RECIPES = [name for name in EVERY if name not in WITH_DATA]
CHATS = [name for name in WITH_DATA if "sft" in name or "lora" in name]
FRESH = ["--weights=", "--load=direct"]  # none of the real weights is here
# Few rows, few steps; all else is the recipe's. Sizes of 0 are the tiny model's.
SHORT = "--seq_len=64 --micro_batch=1 --batch_tokens=0 --steps=2 --eval_batches=1 --sample_every=0 --log_every=1 "
SHORT += "--eval_every=2 --vocab_size=0 --dim=0 --n_layers=0 --n_heads=0 --n_kv_heads=0 --ffn_dim=0 --compile=none"


def c4(split: str, file: int) -> bytes:
    rows = [{"text": f"{split} {file} row {i} " * 5, "url": "x"} for i in range(90)]
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


def chats(split: str, file: int) -> bytes:
    talk = [[("user", f"What is {i}?"), ("assistant", f"It is {i} of {split} {file}.")] for i in range(90)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in talk]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def words(recipe: str, folder) -> list[str]:
    """A recipe with its tiny model, and with files under the names of its data or a text of its own."""
    folder.mkdir()
    tiny = "tiny-gpt2" if "gpt" in recipe else "tiny-mixtral" if "mixtral" in recipe else "tiny-llama"
    tiny = "tiny-qwen3" if "qwen3" in recipe else tiny
    data = [folder / "text.txt"]
    data[0].write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(2000)))
    if recipe in WITH_DATA:
        end, make = (".jsonl", chats) if recipe in CHATS else (".json.gz", c4)
        for split, n in (("train", 3), ("validation", 1)):
            for f in range(n):
                (folder / f"{split}-{f:05}-of-{n:05}{end}").write_bytes(make(split, f))
        data = [folder / f"train-*{end}", "--val_data", folder / f"validation-*{end}", "--tokenizer", "bytes"]
        data += [] if recipe in CHATS else ["--stream", "--lanes", "4"]
    out = [f"@recipes/{recipe}", *FRESH, "--model", tiny, *SHORT.split(), "--data", *data, "--out", folder / "run"]
    return [*map(str, out)]


def train(tmp_path, runs: list[list[str]]) -> None:
    """The runs one after the other, in the same two processes."""
    code = f"""
import train
from lib import check
from config import parse_args
from lib.run import Run
ranks = shard.init_ranks()
for words in {runs!r}:
    config = check.resolve(parse_args(words), ranks.device, ranks.world_size)
    with Run(config, ranks) as run:
        train.train(config, ranks, run)
    assert run.exit_code == 0
    shard.gather(None, ranks)
shard.leave(ranks)
"""
    run_ranks(2, code, str(tmp_path))


def losses(run) -> list[dict]:
    return [r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in r]


def test_every_recipe_runs_on_two_processes(tmp_path):
    train(tmp_path, [words(recipe, tmp_path / recipe) for recipe in EVERY])
    for recipe in EVERY:
        run = tmp_path / recipe / "run"
        records = losses(run)
        assert [r["step"] for r in records] == [1, 2] and all(3 < r["loss"] < 7 for r in records)
        assert [r["step"] for r in records if "val_loss" in r] == [2]
        if recipe in WITH_DATA:
            head, log = (ROOT / "recipes" / recipe).read_text(), (run / "log.txt").read_text()
            assert (".venv/bin/python -m pip install pyarrow" in head) == (".parquet" in head)
            assert "python download.py" in head
            env = json.loads((run / "env.json").read_text())
            assert env["attention"].endswith(", boolean mask") == (recipe in CHATS) and env["data"]["val"]
            assert ("conversations, 0 truncated" if recipe in CHATS else "a stream of 3 files for 4 lanes") in log


@pytest.mark.slow
def test_a_recipe_runs_compiled(tmp_path):
    train(tmp_path, [[*words("llama3-8b.args", tmp_path / "llama"), "--compile=block"]])
    assert len(losses(tmp_path / "llama/run")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["llama2-7b-c4.args", "llama3-8b-sft.args"])
def test_it_goes_on_where_it_stopped(tmp_path, recipe):
    flags = [*words(recipe, tmp_path / "data"), "--schedule", "constant", "--micro_batch=2", "--batch_tokens=1024"]
    at = [("parts", 2), ("parts", 4), ("whole", 4)]
    train(tmp_path, [[*flags, "--steps", str(n), "--out", str(tmp_path / name)] for name, n in at])
    parts, whole = ([r["loss"] for r in losses(tmp_path / name)] for name in ("parts", "whole"))
    assert parts == whole and len(whole) == 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_headers_state_what_the_project_s_own_functions_compute(recipe):
    header = (ROOT / "recipes" / recipe).read_text().partition("\n--")[0]
    config = parse_args([f"@recipes/{recipe}", *FRESH])
    with torch.device("meta"):
        model = Transformer(config.model_config)
    number, unit = re.search(r"([\d.]+) ([BM]) parameters", header).groups()
    total = sum(p.numel() for p in model.parameters())
    assert float(number) * {"B": 1e9, "M": 1e6}[unit] == pytest.approx(total, rel=5e-3)
    flops = re.search(r"([\d.]+) (GFLOP per token|TFLOP per row|PFLOP)", header)
    tokens = {"GFLOP per token": 1e-9, "TFLOP per row": 1e-12 * config.seq_len}
    tokens["PFLOP"] = 1e-15 * config.steps * config.batch_tokens
    computed = tokens[flops[2]] * flops_per_token(config.model_config, config.seq_len)
    assert float(flops[1]) == pytest.approx(computed, rel=5e-3 if flops[2] != "PFLOP" else 0.05)
    if config.batch_tokens and flops[2] != "PFLOP":
        step = int(re.search(r"Each step: ([\d,]+) tokens", header)[1].replace(",", ""))
        assert step == config.batch_tokens
        disk = re.search(r"disk: ([\d.]+) ([MGT])B a checkpoint, ([\d.]+) ([MGT])B for --keep 2", header)
        sizes = [float(disk[i]) * {"M": 1e6, "G": 1e9, "T": 1e12}[disk[i + 1]] for i in (1, 3)]
        assert config.keep == 2 and sizes == pytest.approx([12 * total, 36 * total], rel=0.03)


@pytest.mark.parametrize("recipe", RECIPES)
def test_real_models_need_data_and_the_small_ones_none(recipe):
    words, text = [f"@recipes/{recipe}", *FRESH], ["--data", "my.txt"]
    if recipe in ("default.args", "char-gpt.args"):
        assert parse_args(words, trains=True).tokenizer == parse_args([*words, *text], trains=True).tokenizer == "bytes"
        return
    for missing, more in (("--data", []), ("--tokenizer", text)):
        with pytest.raises(UserError, match=f"vocabulary of [0-9]+, and .* {missing}"):
            parse_args([*words, *more], trains=True)
    assert parse_args([*words, "--data", "tokens/a.bin"], trains=True).data
    assert parse_args([*words, *text, "--tokenizer", "bytes"], trains=True).tokenizer == "bytes"


def test_fine_tuning_starts_from_the_weights_that_the_head_says_to_fetch(monkeypatch):
    monkeypatch.setattr("config.local_path", lambda spec, flag: ROOT)
    for name in ("llama3-8b", "llama3-8b-sft", "llama3.1-405b", "qwen3-4b-sft"):
        weights = parse_args([f"@recipes/{name}.args"]).weights
        head = (ROOT / f"recipes/{name}.args").read_text()
        assert weights.startswith(("meta-llama/", "Qwen/")) and f"Needs, once:  python download.py {weights} " in head
