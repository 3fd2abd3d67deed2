"""runs.py: its verdicts on runs made up by hand, its fits on exact lines, its peers on a few real steps."""

import re
from argparse import Namespace

import pytest
import torch

import runs
from common import Run, train_run
from config import parse_args


def made_up(loss: float, speed: float = 100.0, memory: float = 1.0, wall: float = 50.0, samples: int = 2) -> Run:
    records = [{"step": s, "tok_per_s": speed if s > 2 else 1.0, "mem_gib": memory} for s in (1, 2, 4, 6, 8, 10)]
    records[-1]["val_loss"] = loss
    return Run(records, wall, {"start": 2.0, "steps": 47.5, "samples": 0.5}, samples)


def switches_of(monkeypatch, trained) -> list[dict]:
    """What the suite says of runs by (flags, processes)."""
    monkeypatch.setattr(
        runs, "train_run", lambda out, words, processes=1, env=None: trained(list(map(str, words)), processes)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return list(runs.bench_switches(Namespace(steps=10)))


def seed_of(words: list[str]) -> int:
    return int(words[words.index("--seed") + 1]) if "--seed" in words else 0


def test_switches_compare_with_the_first_row_and_find_no_fault(monkeypatch):
    def trained(words: list[str], processes: int) -> Run:
        return made_up(2.0 + 0.1 * seed_of(words), speed=300.0 if "bf16" in words else 100.0)

    rows = switches_of(monkeypatch, trained)
    assert rows[0]["median"] == pytest.approx(0.2)  # seeds 0, 1, 2
    by_name = {row["what"].partition(":")[0]: row for row in rows}
    assert [by_name[n]["ratio"] for n in ("fp32", "bf16", "+ compile")] == pytest.approx([1.0, 3.0, 3.0])
    assert by_name["TF32"]["what"] == "TF32: not on this machine" and by_name["TF32"]["median"] is None
    assert not any("failed" in row["what"] for row in rows)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            lambda words, n: made_up(2.3) if "block" in words and "sdpa" in words else None,
            r"\+ compile: .* failed: outside",
        ),
        (lambda words, n: made_up(2.0, wall=60.0) if "fp32" in words else None, "wall time .* failed: more than 2 %"),
        (lambda words, n: made_up(2.0, samples=1) if n == 2 else None, "samples written .* failed: 2 were asked for"),
        (lambda words, n: made_up(2.0, memory=1.2) if n == 2 and words[-1] != "0" else None, "peak memory .* failed"),
    ],
    ids=["loss", "time", "samples", "memory"],
)
def test_each_trap_is_seen(monkeypatch, fault, said):
    def trained(words: list[str], processes: int) -> Run:
        return fault(words, processes) or made_up(2.0 + 0.1 * seed_of(words))

    failed = [row["what"] for row in switches_of(monkeypatch, trained) if "failed" in row["what"]]
    assert len(failed) == 1
    assert re.match(said, failed[0])


def test_the_flags_of_every_switch_are_known():
    for cuda, gpus in ((False, 0), (True, 1), (True, 2)):
        for name, flags, *_ in runs.switches(cuda, gpus):
            if flags:
                parse_args(["@recipes/char-gpt.args", *flags])
            else:
                assert name in (("+ 2 processes",) if cuda else ("TF32",))


def test_a_line_is_found_and_drawn(tmp_path):
    x = [256, 1024, 4096, 16384]
    assert runs.fit(x, [3.0 + 0.5 * n for n in x]) == pytest.approx((3.0, 0.5))
    points = {axis: {n: made_up(2.0, 1e3 / n, 0.1 * n) for n in (1, 2, 4)} for axis in runs.axes(False)}
    runs.draw_growth(points, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    for values in runs.axes(False).values():
        parse_args(list(map(str, next(iter(values.values())))))


def test_transformers_trains_as_we_do(tmp_path):
    """Three steps from the same weights on the same batches: the same loss, to rounding."""
    words = [*runs.REFERENCE.split(), "--n_layers", "2", "--steps", "3", "--eval_every", "3"]
    words += ["--eval_batches", "2", "--dtype", "fp32", "--lr", "1e-2"]
    ours = train_run(tmp_path / "ours", words, env={"OMP_NUM_THREADS": "1"}).loss
    theirs = runs.train_peer(parse_args(words), tmp_path, "transformers")
    assert theirs == pytest.approx(ours, abs=2e-5) and ours < 5


def test_fp8_parity_says_how_far_each_recipe_is(monkeypatch, tmp_path):
    def trained(out, words) -> Run:
        run = made_up(2.0 + 0.01 * ("--fp8" in words))
        return Run([record | {"loss": 3.0} for record in run.records], run.wall, run.parts, 0)

    monkeypatch.setattr(runs, "train_run", trained)
    monkeypatch.setattr(runs, "PLOTS", tmp_path)
    said = [row["what"] for row in runs.bench_fp8_parity(Namespace(steps=10))]
    assert len(said) == 6 and said[-1] == "row_gw_hp: training loss 3.0000, validation 2.0100 (+0.0100)"
    assert (tmp_path / "fp8-parity.png").stat().st_size > 10_000
    for own in runs.RECIPES.values():
        parse_args([*runs.PARITY.split(), *own.split()])
