"""The benchmarks' own logic, transformers' loop, and this checkout's losses against the recorded ones. Tolerances for
other machines catch three deliberate mistakes."""

import json
import re
import warnings
from argparse import Namespace

import pytest
import torch

import attention
import golden
import run
import train
import transformers_loop
from base.errors import Failure
from config import parse_args
from curves import read_records
from hf.weights import export_model
from model import Transformer
from test_shard import fill, skip_plots


def test_transformers_takes_the_same_first_steps(tmp_path, monkeypatch):
    skip_plots(monkeypatch.setattr)
    flags = ["--model", "tiny-gpt2", "--seq_len", "32", "--micro_batch", "2", "--batch_tokens", "128"]
    export_model(fill(Transformer(parse_args(flags).model_config)), tmp_path / "model")
    flags += f"--dtype fp32 --compile none --weight_decay 0 --weights {tmp_path}/model --log_every 1 --steps 3".split()
    assert train.main([*flags, "--out", f"{tmp_path}/ours"]) == 0
    transformers_loop.main([*flags, "--out", f"{tmp_path}/theirs"])
    ours = [record for record in read_records(tmp_path / "ours") if "loss" in record]
    for a, b in zip(ours, read_records(tmp_path / "theirs"), strict=True):
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=1e-4)


def test_a_start_and_a_record_on_many_ranks(capfd):
    run.main(["start", "--n_layers=1", "--compile=none"])
    total, parts = re.search(r"Time taken: ([\d.]+) seconds \((start .*)\)", capfd.readouterr().out).groups()
    assert float(total) == pytest.approx(sum(float(part.split()[1]) for part in parts.split(", ")), abs=1)
    assert next(run.bench_scale())["bytes"] == 8 * (96 * 128 + 2 * 1024)


# ---- golden losses

LLAMA = "llama on 1 rank"
RUN = {"loss": [3.0, 2.0] + [1.5] * 4, "grad_norm": [0.5] * 6, "val_loss": [1.75]}
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in golden.sets_here()[1:]]


@pytest.mark.parametrize("instructions", [golden.sets_here()[0], *OTHERS])
def test_the_losses_are_the_recorded_ones(instructions, monkeypatch, capsys):
    monkeypatch.setattr(golden, "sets_here", lambda: [instructions])
    golden.main([])
    warnings.warn(capsys.readouterr().out, stacklevel=1)  # pytest prints it: bit for bit, or why within tolerances


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
    flags = [*golden.COMMON, *golden.RECIPES["gpt2"].split(), "--attention=sdpa", f"--steps={golden.FIRST}"]
    assert train.main([*flags, "--out=run"]) == 0
    name, run = "gpt2 on 1 rank", golden.figures(tmp_path / "run")
    record = next(runs[name] for cpu, runs in json.loads(golden.RECORD.read_text()).items() if "avx2" in cpu)
    expected = run | {key: record[key][: golden.FIRST] for key in ("loss", "grad_norm")}
    lines = golden.differences({name: expected}, {name: run}, "fp32")
    assert bool(lines) == (mistake != "none"), lines


@pytest.mark.parametrize("losses, message, tolerated", [
    ([3.0, 2 + 2**-20, 1.5, 1.5, 1.5, 1.5], r"loss of step 2 is 2.00000095\d*, recorded 2.0", True),
    ([3.0, 2.0, 1.5, 1.5, 1.5, 1.7], "loss of step 6 is", False),
    ([3.0, float("nan"), 1.5, 1.5, 1.5, 1.5], "loss of step 2 is nan, recorded 2.0", False),
])  # fmt: skip
def test_the_first_figure_that_differs_is_named(losses, message, tolerated):
    measured = RUN | {"loss": losses}
    assert re.match(f"{LLAMA}: {message}", golden.differences({LLAMA: RUN}, {LLAMA: measured})[0])
    assert len(golden.differences({LLAMA: RUN}, {LLAMA: measured}, "fp32")) == (not tolerated)


def test_comparisons_and_records(tmp_path, monkeypatch, capsys):
    for name in ("RECORD", "CPUINFO"):
        monkeypatch.setattr(golden, name, tmp_path / name)
    golden.RECORD.write_text(json.dumps({"torch 2 on B with avx2": {LLAMA: RUN}}))

    def says(words: str, val_loss: float, expected: str) -> None:
        monkeypatch.setattr(golden, "measure", lambda _: {LLAMA: RUN | {"val_loss": [val_loss]}})
        golden.main(words.split())
        assert re.search(f"(?s){expected}", capsys.readouterr().out)

    golden.CPUINFO.write_text("vendor_id\t: A\ncpu family\t: 25\nflags\t\t: fma avx2\n")
    says("", 1.75001, "1 runs of .* on A family 25 with avx2, compared within .* 2 on B with avx2\nno differences")
    says("--record", 1.75001, "")
    assert f"torch {golden.TORCH} on A family 25 with avx2" in json.loads(golden.RECORD.read_text())
    says("", 1.75001, "with avx2, compared bit for bit\nno differences")
    with pytest.raises(Failure, match="(?s)val_loss of step 60 is 1.75002, recorded 1.75001\n.*--record"):
        says("", 1.75002, "")
