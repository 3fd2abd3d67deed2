"""Every recipe runs, with a tiny model in its place, says the truth about its size, and names what it needs."""

import re

import pytest
import torch

from config import _read_recipe, parse_args
from errors import ROOT, UserError
from model import Transformer, flops_per_token
from test_shard import run_ranks

# Those that add data to one of these are in test_data_recipes.py.
RECIPES = sorted(p.name for p in (ROOT / "recipes").glob("*.args") if "--data" not in _read_recipe(f"recipes/{p.name}"))
TINY = {"gpt2": "tiny-gpt2", "mixtral-8x7b": "tiny-mixtral"}
# A text of its own, few rows, few steps; all else is the recipe's.
SHORT = ["--seq_len=64", "--micro_batch=1", "--batch_tokens=0", "--steps=3", "--eval_batches=1", "--sample_every=0"]
FRESH = ["--weights=", "--load=direct"]  # none of the real weights is here
SIZES = ["--vocab_size=0", "--dim=0", "--n_layers=0", "--n_heads=0", "--n_kv_heads=0", "--ffn_dim=0"]


def words(recipe: str) -> list[str]:
    """A recipe with its tiny model. One is compiled, the others not: that is tested elsewhere."""
    full = parse_args([f"@recipes/{recipe}", *FRESH])
    compiled = [] if recipe == "llama3-8b.args" else ["--compile=none"]
    return [f"@recipes/{recipe}", *FRESH, "--model", TINY.get(full.model, "tiny-llama"), *SIZES, *SHORT, *compiled]


def test_every_recipe_runs_on_two_processes(tmp_path):
    text = tmp_path / "numbers.txt"
    text.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(2000)))
    lines = {r: [*words(r), "--data", str(text), "--out", str(tmp_path / r)] for r in RECIPES}
    code = f"""
import json, check, train
from pathlib import Path
from config import _read_recipe, parse_args
from guard import Run
ranks = shard.init_ranks()
for recipe, words in {lines!r}.items():
    config = check.resolve(parse_args(words), ranks.device, ranks.world_size)
    with Run(config, ranks) as run:
        train.train(config, ranks, run)
    assert run.exit_code == 0
    shard.gather(None, ranks)
    records = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if "loss" in record][-1]
    assert last["step"] == 3 and 3 < last["loss"] < 7, last
    sys.stdout.write("ran " + recipe + "\\n")  # in one piece, for two ranks write
shard.leave(ranks)
"""
    out = run_ranks(2, code, str(tmp_path))
    assert all(out.count(f"ran {recipe}") == 2 for recipe in RECIPES), out


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
        assert "GPU: about" in header and "Time: about" in header
        if not config.save_every:
            return
        disk = re.search(r"Disk: ([\d.]+) ([GT])B a checkpoint.* ([\d.]+) ([GT])B for the two that are kept", header)
        sizes = [float(disk[i]) * {"G": 1e9, "T": 1e12}[disk[i + 1]] for i in (1, 3)]
        assert config.keep == 2 and sizes == pytest.approx([12 * total, 36 * total], rel=0.02)


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
    monkeypatch.setattr("config.find", lambda spec, flag: ROOT)
    for name in ("llama3-8b", "llama3-8b-sft", "llama3.1-405b"):
        weights = parse_args([f"@recipes/{name}.args"]).weights
        head = (ROOT / f"recipes/{name}.args").read_text()
        assert weights.startswith("meta-llama/") and f"Needs, once:  python download.py {weights} " in head
