"""The benchmarks' own logic, peers that train as we do, and this checkout's losses against golden.json. Tolerances for
other machines catch three deliberate mistakes."""

import itertools
import json
import math
import re
import warnings
from argparse import Namespace
from functools import partial

import pytest
import torch

import attention
import common
import golden
import peers
import run
import train
from config import parse_args
from data import make_loader
from lib.curves import read_records
from lib.errors import Failure, UserError
from lib.weights import export_model
from model import Transformer
from test_shard import skip_plots

# As many records as its first argument says. It needs a package, then it hangs.
TRAINER = """
import json, pathlib, sys, time
steps, package, out = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
out.mkdir()
__import__(package)
assert steps, "no memory"
for step in range(1, steps + 1):
    record = {"step": step, "loss": 6.0 - step, "step_ms": 100.0 * step, "tokens": step, "mem_gib": 2.5, "mfu": 0.1}
    with open(out / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\\n{}\\n")
time.sleep(60)
"""


def test_contenders_take_turns_until_their_last_record_and_errors_are_rows(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    lacking, order = "a_package_that_nobody_has", []
    cases = {"a": (5, "os", 50), "crashes": (0, "os", 50), "lacks": (5, lacking, 50), "hangs": (1, "os", 0.5)}

    def turn(name: str) -> common.Turn:
        order.append(name)
        steps, package, limit = cases[name]
        return common.train([tmp_path / "trainer.py", steps, package], 5, limit)

    works = {name: partial(turn, name) for name in cases} | {"b": lambda: common.Turn([0.8])}
    crashed, missing, hung, a, b = common.race("case", "tokens/s", 10.0, works, 2)
    assert order == ["a", "crashes", "lacks", "hangs", "a"]
    assert re.search("failed: status 1: .*no memory", crashed["note"]) and "stopped after 0 s" in hung["note"]
    assert missing["note"].startswith("not available: ") and lacking in missing["note"]
    assert (a["p10"], a["median"], a["p90"], a["ratio"]) == (20.0, 25.0, pytest.approx(100 / 3), 1.0)
    assert (a["mfu"], a["gib"], a["note"]) == (0.1, 2.5, "5 tokens, loss 5.0000 4.0000 3.0000 2.0000 1.0000")
    assert (b["median"], b["ratio"], b["mfu"], b["gib"], b["note"]) == (12.5, 0.5, None, None, "")


def test_transformers_takes_the_same_first_steps(tmp_path, monkeypatch):
    skip_plots(monkeypatch.setattr)
    flags, folder = ["--model", "tiny-gpt2", "--seq_len", "32", "--micro_batch", "2"], tmp_path / "model"
    export_model(run.fill_randomly(Transformer(parse_args(flags).model_config), 0.08), folder)
    more = f"--dtype fp32 --compile none --weights {folder} --steps 3 --log_every 1 --out {tmp_path}/ours"
    assert train.main([*flags, *peers.SAME, *more.split()]) == 0
    ours = [record for record in read_records(tmp_path / "ours") if "loss" in record]
    monkeypatch.setattr(peers, "make_loader", lambda config: itertools.islice(make_loader(config), 3))
    peers.train_here("transformers, fp32", folder, 1, math.inf, flags, tmp_path / "theirs")
    for a, b in zip(ours, read_records(tmp_path / "theirs"), strict=True):
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=peers.SAME_STEP)


def test_a_peer_that_computes_something_else_is_not_timed(tmp_path, monkeypatch):
    timed, names = [], ("flatland", "transformers, mixed", "litgpt, bf16")
    (tmp_path / "model.safetensors").write_text("")

    def turn(command, count, limit) -> common.Turn:
        timed.extend([command[1]] * (count > 1))
        record = {"loss": 5.0 + 0.01 * ("litgpt" in command[1]), "grad_norm": 1.0, "tokens": 64, "mem_gib": 1.0}
        return common.Turn([1.0], [record])

    monkeypatch.setattr(peers, "train", turn)
    rows = [*peers.race_training("tiny", "--micro_batch 2", names, tmp_path, 1, 1, math.inf)]
    assert timed == ["--micro_batch", "transformers, mixed"]  # ours, and one peer
    assert "litgpt" in rows[0]["what"] and "differs from ours by a relative 2.0e-03" in rows[0]["note"]


def test_the_flags_of_every_race_are_valid():
    races = [race[1:] for part in run.GPU.values() for race in part]
    for words, names in [*races, *run.CPU.values()]:
        for ours, _, more in (name.partition(" ") for name in names):
            parse_args([*words.split(), *peers.SAME, *more.split()] if ours == "flatland" else words.split())


def test_generation_equals_transformers_and_is_timed(monkeypatch):
    monkeypatch.setattr(run, "GENERATED", {"tiny-llama": run.GENERATED["tiny-llama"]})
    rows = [*run.bench_generate(Namespace(repeats=1))]
    assert [row["what"] for row in rows] == ["transformers", "flatland"] * 2
    assert all(row["median"] > 0 for row in rows)


def test_a_suite_that_cannot_run_and_one_that_failed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="finds no GPU"):
        run.main(["gpu"])
    monkeypatch.setattr(run, "SUITES", {"cpu": lambda args: [common.row("case", "b", "failed: no memory")]})
    with pytest.raises(Failure, match="1 contenders failed"):
        run.main(["cpu"])


def test_a_race_in_time_to_loss(monkeypatch):
    """Contenders take turns; a turn of two seconds has a validation loss after each tenth."""
    monkeypatch.setattr(peers, "DEFAULT", [*peers.DEFAULT, "--eval_batches=1", "--n_layers=1"])
    monkeypatch.setattr(peers, "race", lambda *args: args)
    _, _, tokens, works, rounds = peers.bench_loss(Namespace(nanogpt=None, nanochat=None))
    assert [*works][:3] == ["flatland adamw, 0.006", "flatland muon, 0.009", "flatland adamw, 0.003"]
    assert (tokens, len(works), rounds) == (2048, 6, 1)
    command, count = works["flatland muon, 0.009"].args
    records = common.train([*command[:4], 2, *command[5:]], count).records
    assert [record["tokens"] % tokens for record in records] == [0] * 10
    assert records[-1]["val_loss"] < 5.8 and records[-1]["loss"] < 5.8


# ---- golden losses

LLAMA = "llama on 1 rank"
RUN = {"loss": [3.0, 2.0] + [1.5] * 4, "grad_norm": [0.5] * 6, "val_loss": 1.75}
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in golden.sets_here()[1:]]


@pytest.mark.parametrize("instructions", [golden.sets_here()[0], *OTHERS])
def test_the_losses_are_the_recorded_ones(instructions):
    lines, statement = golden.compare(instructions, golden.measure(instructions))
    warnings.warn(statement, stacklevel=1)  # pytest prints it: bit for bit, or why within tolerances
    assert not lines, "\n".join([*lines, golden.INTENDED])


@pytest.mark.parametrize("mistake", ["none", "eps", "bias correction", "mask"])
def test_the_tolerance_catches_deliberate_mistakes(mistake, tmp_path, monkeypatch):
    """The first steps of one recipe, compared with the record as another machine's would be."""
    skip_plots(monkeypatch.setattr)
    golden.write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    make = train.make_optimizer

    def make_wrong(*args):
        optimizer = make(*args)
        if mistake == "eps":
            optimizer.eps = 1e-7
        if mistake == "bias correction":  # after many steps the correction is 1
            for state in optimizer.state.values():
                state["step"].fill_(1e6)
        return optimizer

    def look_ahead(q, k, v, **_) -> torch.Tensor:
        ahead = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=ahead)

    monkeypatch.setattr(train, "make_optimizer", make_wrong)
    if mistake == "mask":
        monkeypatch.setattr(attention, "F", Namespace(scaled_dot_product_attention=look_ahead))
    assert train.main([*golden.flags_of("gpt2", ""), "--attention=sdpa", f"--steps={golden.FIRST}", "--out=run"]) == 0
    name, run = "gpt2 on 1 rank", golden.figures(tmp_path / "run")
    record = next(iter(json.loads(golden.RECORD.read_text())["makers"].values()))["sets"]["avx2"][name]
    expected = {key: record[key][: golden.FIRST] for key in ("loss", "grad_norm")} | {"val_loss": run["val_loss"]}
    lines = golden.differences({name: expected}, {name: run}, "fp32")
    assert bool(lines) == (mistake != "none"), lines


@pytest.mark.parametrize("losses, message, tolerated", [
    ([3.0, 2 + 2**-20, 1.5, 1.5, 1.5, 1.5], r"loss of step 2 is 2.00000095\d*, recorded 2.0", True),
    ([3.0, 2 + 2**-17, 1.5, 1.5, 1.5, 1.5], "loss of step 2 is", False),
    ([3.0, 2.0, 1.5, 1.5, 1.5, 1.7], "loss of step 6 is", False),
    ([3.0], "loss of step 2 is nan, recorded 2.0", False),
])  # fmt: skip
def test_the_first_figure_that_differs_is_named(losses, message, tolerated):
    measured = RUN | {"loss": losses}
    assert re.match(f"{LLAMA}: {message}", golden.differences({LLAMA: RUN}, {LLAMA: measured})[0])
    assert len(golden.differences({LLAMA: RUN}, {LLAMA: measured}, "fp32")) == (not tolerated)


def test_comparisons_and_records(tmp_path, monkeypatch, capsys):
    for name in ("RECORD", "CPUINFO"):
        monkeypatch.setattr(golden, name, tmp_path / name)
    golden.RECORD.write_text(json.dumps({"torch": golden.TORCH, "makers": {"B": {"sets": {"avx2": {LLAMA: RUN}}}}}))

    def says(words: str, val_loss: float, expected: str) -> None:
        monkeypatch.setattr(golden, "measure", lambda _: {LLAMA: RUN | {"val_loss": val_loss}})
        golden.main(words.split())
        assert re.search(f"(?s){expected}", capsys.readouterr().out)

    golden.CPUINFO.write_text("vendor_id\t: A\ncpu family\t: 25\nflags\t\t: fma avx2\n")
    says("", 1.75001, "1 runs of torch 2.* on A family 25 with avx2, compared within .* on B with avx2\nno differences")
    says("--record", 1.75001, "with avx2, compared within .* with default, compared within")
    assert list(json.loads(golden.RECORD.read_text())["makers"]) == ["A family 25", "B"]
    says("", 1.75001, "with avx2, compared bit for bit\nno differences")
    with pytest.raises(Failure, match="(?s)val_loss of step 60 is 1.75002, recorded 1.75001\n.*--record"):
        says("", 1.75002, "")
    says("--record", 1.9, "the records of other makers are removed")
    assert list(json.loads(golden.RECORD.read_text())["makers"]) == ["A family 25"]
    golden.CPUINFO.write_text("Features\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\n")
    says("", 1.90001, "on 0x41 family 8 with default, compared within tolerances, .* on A family 25 with default")
    golden.CPUINFO.write_text("vendor_id\t: A\ncpu family\t: 25\n")
    monkeypatch.setattr(golden, "TORCH", "9.9")
    says("", 1.90001, "torch 9.9 on A family 25 with default, compared within tolerances, .* of torch [^9]")
