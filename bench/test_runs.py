"""runs.py: its verdicts on runs made up by hand, its fits on exact lines, its peers on a few real steps."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import runs
import train
from common import Run
from config import parse_args
from test_shard import skip_plots


def made_up(loss: float = 2.0, speed=100.0, memory=1.0, wall=50.0, samples=2) -> Run:
    records = [{"step": s, "tok_per_s": speed if s > 2 else 1.0, "mem_gib": memory} for s in (1, 2, 4, 6, 8, 10)]
    records = [record | {"loss": 3.0} for record in records]
    records[-1]["val_loss"] = loss
    return Run(records, wall, {"start": 2.0, "steps": 47.5, "samples": 0.5}, samples)


def switches_of(monkeypatch, trained) -> list[dict]:
    """What the suite says of runs by (flags, processes)."""
    monkeypatch.setattr(runs, "train_in", lambda folder, flags, processes=1, env=None: trained(flags, processes))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return list(runs.bench_switches(Namespace(steps=10)))


def of_seed(flags: str, **figures) -> Run:
    seed = re.search(r"--seed (\d)", flags)
    return made_up(2.0 + 0.1 * int(seed[1] if seed else 0), **figures)


def test_switches_compare_with_the_first_row_and_find_no_fault(monkeypatch):
    rows = switches_of(monkeypatch, lambda flags, n: of_seed(flags, speed=300.0 if "bf16" in flags else 100.0))
    assert rows[0]["median"] == pytest.approx(0.2)  # seeds 0, 1, 2
    by_name = {row["what"]: row for row in rows}
    assert [by_name[n]["ratio"] for n in ("fp32", "bf16", "+ compile")] == pytest.approx([1.0, 3.0, 3.0])
    assert by_name["TF32"]["note"] == "not on this machine" and by_name["TF32"]["median"] is None
    assert not any("failed" in row["note"] for row in rows)


@pytest.mark.parametrize(
    ("is_faulty", "figures", "message"),
    [
        (lambda flags, n: "block --attention sdpa" in flags, {"loss": 2.3}, r"\+ compile: failed: outside"),
        (lambda flags, n: "fp32" in flags, {"wall": 60.0}, "fp32: .* failed: 16.7% of 60.0 s are in no logged part"),
        (lambda flags, n: n == 2 and "none" not in flags, {"samples": 1}, "failed: 1 samples were written, 2 were"),
        (lambda flags, n: n == 2 and flags[-1] != "0", {"memory": 1.2}, "peak memory .*: failed"),
    ],
    ids=["loss", "time", "samples", "memory"],
)
def test_each_trap_is_seen(monkeypatch, is_faulty, figures, message):
    def trained(flags: str, processes: int) -> Run:
        return made_up(**figures) if is_faulty(flags, processes) else of_seed(flags)

    notes = [f"{row['what']}: {row['note']}" for row in switches_of(monkeypatch, trained)]
    failed = [note for note in notes if "failed" in note]
    assert len(failed) == 1
    assert re.search(message, failed[0])


def test_the_flags_of_every_variant_are_known():
    tables = [runs.switches(cuda, gpus) for cuda, gpus in ((False, 0), (True, 1), (True, 2))]
    assert [v.name for table in tables for v in table if not v.flags] == ["TF32", "+ 2 processes"]
    flags = [f"@recipes/char-gpt.args {v.flags}" for table in tables for v in table]
    flags += [f"{runs.GROWTH} {of(values[0])}" for values, of in runs.AXES.values()]
    for words in [*flags, *(f"{runs.PARITY} {recipe}" for recipe in runs.RECIPES.values())]:
        parse_args(words.split())


def test_growth_is_fitted_and_drawn(monkeypatch, tmp_path):
    counts = iter(range(1, 100))
    monkeypatch.setattr(runs, "train_in", lambda *_, **__: made_up(speed=1e9 / next(counts), memory=0.5))
    monkeypatch.setattr(runs, "PLOTS", tmp_path)
    rows = list(runs.bench_growth(Namespace()))
    assert {row["case"] for row in rows} > {*runs.AXES} - {"processes"} and rows[-1][
        "what"
    ] == "drawn: bench/growth.png"
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    x = [256, 1024, 4096, 16384]
    assert runs.fit(x, [3.0 + 0.5 * n for n in x]) == pytest.approx((3.0, 0.5))


def test_predictions_are_compared_and_the_recipes_scaling_is_drawn(monkeypatch, tmp_path):
    words = "--compile none --model tiny-llama --seq_len 8 --micro_batch 1 --dtype fp32 --documents separate"
    run_python = runs.run_python
    gib = float(run_python(Path(runs.__file__), *words.split(), env=runs.ONE_THREAD))
    assert 0.1 < gib < 0.6
    monkeypatch.setattr(runs, "run_python", lambda *_, **__: "1.0")
    monkeypatch.setattr(runs, "PLOTS", tmp_path)
    monkeypatch.setattr(runs.plan, "step_figures", lambda *_: {"mem_gib": 1.1})
    monkeypatch.setattr(runs, "SCALED", ("gpt2-124m",))
    monkeypatch.setattr(runs, "NODES", (1, 2))
    rows = list(runs.bench_plan(Namespace()))
    flags = [row["what"] for row in rows[:20]]
    assert len({*flags}) == 20 and all(parse_args(words.split()) for words in flags)
    assert rows[20]["note"] == "failed: median 10.0%, worst 10.0%; 5 % and 12 % allowed"
    assert [row["what"] for row in rows[21:]] == ["8 GPUs", "16 GPUs", "drawn: bench/scaling.png"]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_transformers_trains_as_we_do(tmp_path, monkeypatch):
    """Three steps from the same weights on the same batches: the same loss, to rounding."""
    flags = f"{runs.REFERENCE} --n_layers 2 --steps 3 --eval_every 3 --eval_batches 2 --dtype fp32 --lr 1e-2".split()
    skip_plots(monkeypatch.setattr)
    assert train.main([*flags, "--out", str(tmp_path / "ours")]) == 0
    records = map(json.loads, (tmp_path / "ours/metrics.jsonl").read_text().splitlines())
    ours = next(record["val_loss"] for record in records if "val_loss" in record)
    theirs = runs.train_peer(parse_args(flags), tmp_path, "transformers")
    assert theirs == pytest.approx(ours, abs=2e-5) and ours < 5


def test_fp8_parity_says_how_far_each_recipe_is(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "train_in", lambda folder, flags: made_up(2.0 + 0.01 * ("--fp8" in flags)))
    monkeypatch.setattr(runs, "PLOTS", tmp_path)
    rows = list(runs.bench_fp8_parity(Namespace(steps=10)))
    assert len(rows) == 6 and (rows[-1]["what"], rows[-1]["median"]) == ("row_gw_hp", 2.01)
    assert rows[-1]["note"] == "training loss 3.0000, validation +0.0100 beside bf16's"
    assert (tmp_path / "fp8-parity.png").stat().st_size > 10_000
