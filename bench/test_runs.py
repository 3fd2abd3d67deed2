"""runs.py: its verdicts on runs made up by hand, its peers on a few real steps."""

import json
from argparse import Namespace

import pytest
import torch

import runs
import train
from common import Run
from config import parse_args
from test_shard import skip_plots


def made_up(loss: float = 2.0, speed: float = 100.0) -> Run:
    records = [{"step": s, "loss": 3.0, "tok_per_s": speed if s > 2 else 1.0, "mem_gib": 0.5} for s in (1, 2, 4, 6, 10)]
    records[-1]["val_loss"] = loss
    return Run(records, {})


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """trained(run): runs are made up, by run(flags, processes). -> the flags of those that were asked for"""
    asked = []

    def replace(run):
        def train_run(out, flags, processes=1, env=None) -> Run:
            asked.append(" ".join(flags))
            return run(asked[-1], processes)

        monkeypatch.setattr(runs, "train_run", train_run)
        monkeypatch.setattr(runs, "PLOTS", tmp_path)
        return asked

    return replace


def test_switches_compare_with_the_first_row_and_seeds_say_how_far_is_far(monkeypatch, trained):
    def run(flags: str, processes: int) -> Run:
        loss = 2.0 + 0.1 * ("--seed 1" in flags) + 0.3 * ("blocked" in flags) - 0.1 * (processes == 2)
        return made_up(loss, speed=300.0 if "bf16" in flags else 100.0)

    trained(run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = list(runs.bench_switches(Namespace(steps=10)))
    by_name = {row["what"]: row for row in rows[:8]}
    assert [by_name[n]["ratio"] for n in ("fp32", "bf16", "+ compile")] == pytest.approx([1.0, 3.0, 3.0])
    assert by_name["bf16"]["note"] == "0.50 GiB; validation loss 2.0000 (+0.0000)"
    assert rows[8]["median"] == pytest.approx(0.1)
    names = ["+ attention blocked", "the same on one thread", "+ 2 processes of one thread"]
    assert [row["what"] for row in rows[9:]] == names
    assert rows[9]["note"] == "failed: outside the seed noise: 3.00 times as far"


def test_the_flags_of_every_variant_are_known():
    tables = [runs.switches(cuda, gpus) for cuda, gpus in ((False, 0), (True, 1), (True, 2))]
    assert [len(table) for table in tables] == [8, 7, 8] and "TF32" in tables[1]
    flags = [f"@recipes/char-gpt.args {v.flags}" for table in tables for v in table.values()]
    flags += [f"{runs.GROWTH} {of.format(values[0], 1)}" for values, of in runs.AXES.values()]
    for words in [*flags, *(f"{runs.PARITY} {recipe}" for recipe in runs.RECIPES.values())]:
        parse_args(words.split())


def test_growth_and_the_losses_in_fp8_are_drawn(trained, tmp_path):
    trained(lambda flags, processes: made_up(2.0 + 0.01 * ("--fp8" in flags)))
    rows = list(runs.bench_growth(Namespace()))
    assert {row["case"] for row in rows} == {*runs.AXES} and rows[0]["what"] == "256"
    rows = list(runs.bench_fp8_parity(Namespace(steps=10)))
    assert [row["what"] for row in rows] == [*runs.RECIPES]
    assert rows[1]["note"] == "0.50 GiB; validation loss 2.0100 (+0.0100)"
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("growth", "fp8-parity"))


def test_predictions_are_compared_and_the_recipes_scaling_is_drawn(monkeypatch, tmp_path):
    words = "--compile none --model tiny-llama --seq_len 8 --micro_batch 1 --dtype fp32 --documents separate"
    gib = float(runs.run_python(runs.__file__, *words.split(), env=runs.ONE_THREAD))
    assert 0.1 < gib < 0.6
    monkeypatch.setattr(runs, "run_python", lambda _, *flags, env: "0.5" if parse_args([*flags]) else "")
    monkeypatch.setattr(runs, "PLOTS", tmp_path)
    monkeypatch.setattr(runs.plan, "step_figures", lambda *_: {"mem_gib": 0.55})
    monkeypatch.setattr(runs, "SCALED", ("gpt2-124m",))
    monkeypatch.setattr(runs, "NODES", (1, 2))
    rows = list(runs.bench_plan(Namespace()))
    assert len({row["what"] for row in rows[:20]}) == 20
    assert rows[20]["note"] == "failed: median 10.0%, worst 10.0%; 5 % and 12 % allowed"
    assert [row["what"] for row in rows[21:]] == ["8 GPUs", "16 GPUs"]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_transformers_trains_as_we_do(tmp_path, monkeypatch):
    """Three steps from the same weights on the same batches: the same loss, to rounding."""
    flags = f"{runs.REFERENCE} --n_layers 2 --steps 3 --eval_every 3 --eval_batches 2 --lr 1e-2".split()
    skip_plots(monkeypatch.setattr)
    assert train.main([*flags, "--out", str(tmp_path / "ours")]) == 0
    records = map(json.loads, (tmp_path / "ours/metrics.jsonl").read_text().splitlines())
    ours = next(record["val_loss"] for record in records if "val_loss" in record)
    theirs = runs.train_peer(parse_args(flags), tmp_path, "transformers")
    assert theirs == pytest.approx(ours, abs=2e-5) and ours < 5
