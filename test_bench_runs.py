"""bench_runs.py: its verdicts on runs made up by hand, its fits on exact lines, its peers on a few real steps."""

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import bench_runs
from bench_runs import Run
from config import parse_args
from errors import UserError


def made_up(loss: float, speed: float = 100.0, memory: float = 1.0, wall: float = 50.0, samples: int = 2) -> Run:
    records = [{"step": s, "tok_per_s": speed if s > 2 else 1.0, "mem_gib": memory} for s in (1, 2, 4, 6, 8, 10)]
    records[-1]["val_loss"] = loss
    return Run(records, wall, {"start": 2.0, "steps": 47.5, "samples": 0.5}, samples)


def found(monkeypatch, runs) -> list[dict]:
    """What --suite switches says of runs by (flags, processes)."""
    monkeypatch.setattr(
        bench_runs, "run", lambda out, words, processes=1, env=None: runs(list(map(str, words)), processes)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return list(bench_runs.bench_switches(Namespace(steps=10)))


def test_switches_compare_with_the_first_row_and_find_no_fault(monkeypatch):
    def runs(words: list[str], processes: int) -> Run:
        seed = int(words[words.index("--seed") + 1]) if "--seed" in words else 0
        return made_up(2.0 + 0.1 * seed, speed=300.0 if "bf16" in words else 100.0)

    rows = found(monkeypatch, runs)
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
    def runs(words: list[str], processes: int) -> Run:
        seed = int(words[words.index("--seed") + 1]) if "--seed" in words else 0
        return fault(words, processes) or made_up(2.0 + 0.1 * seed)

    failed = [row["what"] for row in found(monkeypatch, runs) if "failed" in row["what"]]
    assert len(failed) == 1
    assert re.match(said, failed[0])


def test_each_switch_is_one_more_than_before():
    for cuda, gpus in ((False, 0), (True, 1), (True, 2)):
        rows = bench_runs.switches(cuda, gpus)
        for name, flags, *_ in rows:
            if flags:
                parse_args(["@recipes/char-gpt.args", *flags])
            else:
                assert name in (("+ 2 processes",) if cuda else ("TF32",))
        assert [flags for name, flags, *_ in rows if name == "fp32"][0][:2] == ["--dtype", "fp32"]
    recipe = parse_args(["@recipes/char-gpt.args"])
    with torch.device("meta"):
        parameters = sum(p.numel() for p in bench_runs.Transformer(recipe.model_config).parameters())
    assert abs(parameters / 10_921_049 - 1) < 0.01


def test_a_line_is_found_and_drawn(tmp_path):
    x = [256, 1024, 4096, 16384]
    assert bench_runs.fit(x, [3.0 + 0.5 * n for n in x]) == pytest.approx((3.0, 0.5))
    points = {axis: {n: made_up(2.0, 1e3 / n, 0.1 * n) for n in (1, 2, 4)} for axis in bench_runs.axes(False)}
    bench_runs.draw(points, dict.fromkeys(points, 2e8), tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def test_what_autograd_keeps_is_counted():
    words = [*bench_runs.SMALL.split(), "--seq_len", "64", "--dtype", "fp32"]
    one, two = (bench_runs.saved_bytes(parse_args(words), rows) for rows in (1, 2))
    # Per token and layer, in fp32: at least the inputs of the four products and what SwiGLU multiplies.
    least = 64 * 2 * 4 * (128 + 128 + 128 + 384 + 2 * 384)
    assert least < two - one < 4 * least


def test_transformers_trains_as_we_do(tmp_path):
    """Three steps from the same weights on the same batches: the same loss, to rounding."""
    words = [*bench_runs.REFERENCE.split(), "--n_layers", "2", "--steps", "3", "--eval_every", "3"]
    words += ["--eval_batches", "2", "--dtype", "fp32", "--lr", "1e-2"]
    ours = bench_runs.run(tmp_path / "ours", words, env={"OMP_NUM_THREADS": "1"}).loss
    config = parse_args(words)
    theirs = bench_runs.train_theirs(config, *bench_runs.make_transformers(config, tmp_path))
    assert theirs == pytest.approx(ours, abs=2e-5) and ours < 5
    with pytest.raises(UserError, match="--nanogpt nowhere: no model.py is there"):
        bench_runs.make_nanogpt(config, tmp_path, Path("nowhere"))
