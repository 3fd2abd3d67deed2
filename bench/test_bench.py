"""The benchmarks' own logic: turns, errors as rows, and peers that train as we do."""

import itertools
import json
from argparse import Namespace

import pytest
import torch

import common
import cpu
import golden
import gpu
import peers
import run
import train
from config import parse_args
from lib.errors import Failure, UserError
from lib.weights import export_model
from model import Transformer

TRAINER = """
import json, pathlib, sys, time
out, what = pathlib.Path(sys.argv[1]), sys.argv[2]
out.mkdir()
assert what != "crash", "no memory"
if what == "missing":
    import a_package_that_nobody_has
for step in range(1, 6 if what == "works" else 2):
    record = {"step": step, "loss": 6.0 - step, "step_ms": 1000.0 * step, "mem_gib": 2.5, "grad_norm": 0.5, "mfu": 0.4}
    with open(out / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\\n" + json.dumps({"step": step, "save_ms": 1.0}) + "\\n")
time.sleep(60)
"""


def test_a_trainer_is_killed_after_its_last_record(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)

    def measure(what: str, limit: float = 50.0) -> common.Turn:
        return common.train([tmp_path / "trainer.py", tmp_path / what, what], tmp_path / what, 5, {}, limit)

    assert measure("works") == common.Turn([3.0, 4.0, 5.0], 2.5, [5.0, 4.0, 3.0, 2.0, 1.0], 0.5, 0.4)
    with pytest.raises(Failure, match="(?s)status 1: .*no memory"):
        measure("crash")
    with pytest.raises(ImportError, match="a_package_that_nobody_has"):
        measure("missing")
    with pytest.raises(Failure, match="status None"):
        measure("hangs", 0.5)


def test_contenders_take_turns_and_errors_are_rows():
    order = []

    def work(name: str, seconds: float, error: Exception | None = None):
        def turn() -> common.Turn:
            order.append(name)
            if error:
                raise error
            return common.Turn([seconds], 1.5, [3.0, 2.0], mfu=0.4 if name == "a" else None)

        return turn

    works = {
        "a": work("a", 0.5),
        "b": work("b", 1.0),
        "c": work("c", 0, ImportError("no c")),
        "d": work("d", 0, Failure("d")),
    }
    missing, failed, a, b = common.race("case", "tokens/s", 10.0, works, 2)
    assert order == ["a", "b", "c", "d", "a", "b"]
    assert (missing["note"], failed["note"]) == ("not available: no c", "failed: d")
    assert (a["median"], a["ratio"], a["mfu"], a["gib"]) == (20.0, 1.0, 0.4, 1.5)
    assert (b["median"], b["ratio"], b["mfu"], b["note"]) == (10.0, 0.5, 0.2, "loss 3.0000 to 2.0000")


def test_transformers_takes_the_same_first_steps(tmp_path, monkeypatch):
    golden.skip_plots(monkeypatch.setattr)
    words = "--model tiny-llama --seq_len 32 --micro_batch 2 --tokenizer bytes --dtype fp32 --compile none"
    flags, folder = words.split(), tmp_path / "model"
    export_model(cpu.fill_randomly(Transformer(parse_args(flags).model_config), 0.08), folder)
    more = f"{peers.SAME} --weights {folder} --steps 3 --log_every 1 --out {tmp_path}/ours".split()
    assert train.main(flags + more) == 0
    peers.train_peer("transformers, fp32", folder, tmp_path / "theirs", 3, 1, flags)
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("ours", "theirs")
    )
    for a, b in zip([record for record in ours if "loss" in record], theirs, strict=True):
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=peers.SAME_STEP)


def test_a_peer_that_computes_something_else_is_not_timed(tmp_path, monkeypatch):
    names, timed = ("flatland", "transformers, mixed", "litgpt, bf16"), []
    (tmp_path / "model.safetensors").write_text("")

    def turn(command, out, steps, env, limit) -> common.Turn:
        name = command[1] if "transformers" in str(command) or "litgpt" in str(command) else "flatland"
        if steps > 1:
            timed.append(name)
        return common.Turn([1.0], losses=[5.0 + 0.01 * ("litgpt" in name)], norm=1.0)

    monkeypatch.setattr(peers, "train", turn)
    rows = [*peers.race_training("tiny", ["--micro_batch", "2"], names, tmp_path, 5, 1, 1, {}, 1e9)]
    assert timed == ["flatland", "transformers, mixed"]
    assert "litgpt" in rows[0]["what"] and "differs from ours by a relative 2.0e-03" in rows[0]["note"]


def test_the_flags_of_every_race_are_valid():
    races = [race for part in gpu.RACES.values() for race in part]
    assert len(races) == 7
    for words, names in [(words, names) for _, words, names in races] + [*cpu.SHAPES.values()]:
        assert names[0].startswith("flatland")
        for name in names:
            parse_args(
                f"{words}{gpu.OURS}{name.removeprefix('flatland')}".split() if "flatland" in name else words.split()
            )


def test_the_loss_head_reports_what_this_torch_lacks(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    missing, ours = gpu.race_heads(16, 8, 32)
    assert missing["note"].startswith("not available: ") and "has no F.linear_cross_entropy" in missing["note"]
    assert ours["what"] == "flatland" and ours["median"] > 0


def test_generation_equals_transformers_and_is_timed(monkeypatch):
    monkeypatch.setattr(cpu, "GENERATED", {"tiny-llama": cpu.GENERATED["tiny-llama"]})
    rows = [*cpu.bench_generate(Namespace(repeats=1))]
    assert [row["what"] for row in rows] == ["transformers", "flatland"] * 2
    assert all(row["median"] > 0 for row in rows)


@pytest.mark.parametrize("words, message", [("gpu", "finds no GPU"), ("cqu", "invalid choice"), ("cpu --parts x", "x")])
def test_the_command_line_refuses(words, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        run.main(words.split())


def test_a_failed_row_makes_the_status_1(monkeypatch, capsys):
    def suite(args):
        """A suite."""
        yield common.row("case", "a", median=1.0)
        yield common.row("case", "b", "failed: no memory")

    monkeypatch.setattr(run, "SUITES", {"cpu": suite})
    with pytest.raises(Failure, match="1 contenders failed"):
        run.main(["cpu"])
    assert "| case | b |" in capsys.readouterr().out


def test_a_race_in_time_to_loss(tmp_path):
    out = tmp_path / "race.jsonl"
    peers.train_for("flatland muon, 0.006", tmp_path, out, 3.0)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert records[-1]["seconds"] >= 3 and records[-1]["tokens"] >= 1024 and records[-1]["val_loss"] < 5.8
    assert all(one["tokens"] <= next["tokens"] for one, next in itertools.pairwise(records))
