"""The benchmarks' own logic, peers that train as we do, and this checkout's losses against golden.json. Tolerances for
other machines catch three deliberate mistakes."""

import copy
import json
import re
import warnings
from argparse import Namespace

import pytest
import torch

import attention
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
        return common.train([tmp_path / "trainer.py", tmp_path / what, what], tmp_path / what, 5, limit)

    assert measure("works") == common.Turn([3.0, 4.0, 5.0], 2.5, [5.0, 4.0, 3.0, 2.0, 1.0], 0.5, 0.4)
    with pytest.raises(Failure, match="(?s)status 1: .*no memory"):
        measure("crash")
    with pytest.raises(ImportError, match="a_package_that_nobody_has"):
        measure("missing")
    with pytest.raises(Failure, match="stopped after 0 s"):
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

    def turn(command, out, steps, limit) -> common.Turn:
        name = command[1] if "transformers" in str(command) or "litgpt" in str(command) else "flatland"
        if steps > 1:
            timed.append(name)
        return common.Turn([1.0], losses=[5.0 + 0.01 * ("litgpt" in name)], norm=1.0)

    monkeypatch.setattr(peers, "train", turn)
    rows = [*peers.race_training("tiny", ["--micro_batch", "2"], names, tmp_path, 5, 1, 1, 1e9)]
    assert timed == ["flatland", "transformers, mixed"]
    assert "litgpt" in rows[0]["what"] and "differs from ours by a relative 2.0e-03" in rows[0]["note"]


def test_the_flags_of_every_race_are_valid():
    races = [race for part in gpu.RACES.values() for race in part]
    assert len(races) == 7
    for words, names in [race[1:] for race in races] + [*cpu.SHAPES.values()]:
        assert names[0].startswith("flatland")
        for more in (name.removeprefix("flatland") for name in names if name.startswith("flatland")):
            parse_args(f"{words}{gpu.OURS}{more}".split())


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
    rows = [common.row("case", "a", median=1.0), common.row("case", "b", "failed: no memory")]
    monkeypatch.setattr(run, "SUITES", {"cpu": lambda args: rows})
    with pytest.raises(Failure, match="1 contenders failed"):
        run.main(["cpu"])
    assert "| case | b |" in capsys.readouterr().out


def test_a_race_in_time_to_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "DEFAULT", [*peers.DEFAULT, "--eval_batches=1"])
    peers.train_for("flatland muon, 0.006", tmp_path, tmp_path / "record", 2.0)
    records = json.loads((tmp_path / "record").read_text())
    last = records[-1]
    assert len(records) == 10 and last["seconds"] >= 2 and last["tokens"] >= 1024 and last["val_loss"] < 5.8


# ---- golden losses

RUN = {"loss": [3.0, 2.0] + [1.5] * 4, "grad_norm": [0.5] * 6, "val_loss": 1.75}
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in golden.sets_here()[1:]]


@pytest.mark.parametrize("instructions", [golden.sets_here()[0], *OTHERS])
def test_the_losses_are_the_recorded_ones(instructions):
    lines, statement = golden.compare(instructions)
    warnings.warn(statement, stacklevel=1)  # pytest prints it: bit for bit, or why within tolerances
    assert not lines, "\n".join([*lines, golden.INTENDED])


def change_eps(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["eps"] = 1e-7


def skip_bias_correction(optimizer: torch.optim.Optimizer) -> None:
    """After many steps the correction is 1."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        optimizer.state[p] = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p]["step"] = torch.tensor(1e6)


def look_ahead(q, k, v, **_) -> torch.Tensor:
    ahead = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=ahead)


@pytest.mark.parametrize("mistake", [None, change_eps, skip_bias_correction, look_ahead])
def test_the_tolerance_catches_deliberate_mistakes(mistake, tmp_path, monkeypatch):
    """The first steps of one recipe, compared with the record as another machine's would be."""
    golden.write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    golden.skip_plots(monkeypatch.setattr)
    make = train.make_optimizer

    def make_wrong(*args) -> torch.optim.Optimizer:
        optimizer = make(*args)
        if mistake in (change_eps, skip_bias_correction):
            mistake(optimizer)
        return optimizer

    monkeypatch.setattr(train, "make_optimizer", make_wrong)
    if mistake is look_ahead:
        monkeypatch.setattr(attention, "F", Namespace(scaled_dot_product_attention=look_ahead))
    flags = f"{golden.COMMON} {golden.RECIPES['gpt2']} --attention sdpa --steps {golden.FIRST} --out run"
    assert train.main(flags.split()) == 0
    name, run = "gpt2 on 1 rank", golden.figures(tmp_path / "run")
    expected = copy.deepcopy(golden.find_record("avx2")[0][name])
    for key in ("loss", "grad_norm"):
        del expected[key][golden.FIRST :]
    expected["val_loss"] = run["val_loss"]
    lines = golden.differences({name: expected}, {name: run}, "fp32")
    assert bool(lines) == (mistake is not None), lines


@pytest.mark.parametrize(
    "change, exact, close",
    [
        ({"loss": [3.0, 2 + 2**-20] + [1.5] * 4}, r"the loss of step 2 is 2.00000095\d*, recorded 2.0; earlier", ""),
        ({"loss": [3.0, 2 + 2**-17] + [1.5] * 4}, "the loss of step 2", "the loss of step 2 is .*; earlier"),
        ({"loss": [3.0, 2.0] + [1.5] * 3 + [1.7]}, "the loss of step 6", "the loss of step 6 is .*; earlier"),
        ({"loss": [3.0, 2.0] + [1.5] * 3 + [float("nan")]}, "the loss of step 6", "the loss of step 6 is nan"),
        ({"loss": [3.0], "grad_norm": [0.5]}, "the loss of step 2 is None", "the loss of step 2 is None, recorded 2.0"),
        ({"val_loss": 1.9}, "the validation loss", "the validation loss is 1.9, recorded 1.75"),
    ],
)
def test_the_first_figure_that_differs_is_named(change, exact, close):
    for dtype, message in (("", exact), ("fp32", close)):
        lines = golden.differences({"llama on 1 rank": RUN}, {"llama on 1 rank": RUN | change}, dtype)
        assert len(lines) == bool(message) and all(re.match(f"llama on 1 rank: {message}", line) for line in lines)


def test_the_comparison_says_why_it_is_not_bit_for_bit(tmp_path, monkeypatch):
    record = {"torch": "1.0", "makers": {"AuthenticAMD family 25": {"sets": {"avx2": {"llama on 1 rank": RUN}}}}}
    monkeypatch.setattr(golden, "RECORD", tmp_path / "golden.json")
    monkeypatch.setattr(golden, "measure", lambda _: {"llama on 1 rank": RUN | {"val_loss": 1.7500001}})
    cpu = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nflags\t\t: fma avx2\n"
    arm = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n"
    for text, version, instructions, how in (
        (cpu, golden.TORCH, "avx2", "bit for bit"),
        (cpu, "1.0", "avx2", f"within tolerances, .* recorded with torch 1.0, this is {re.escape(golden.TORCH)}$"),
        (arm, golden.TORCH, "default", r"no record of this CPU \(CPU implementer 0x41\), .* set default, .* with avx2"),
        ("", golden.TORCH, "default", r"no record of this CPU \(CPU implementer unknown\)"),
    ):
        monkeypatch.setattr(golden, "cpuinfo", lambda text=text: text)
        golden.RECORD.write_text(json.dumps(record | {"torch": version}))
        assert golden.sets_here()[0] == instructions
        lines, statement = golden.compare(instructions)
        assert re.search(f"1 runs with {instructions}, compared .*{how}", statement), statement
        assert len(lines) == (how == "bit for bit")  # another validation loss


def test_a_new_record_keeps_those_of_other_makers_while_the_numerics_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "RECORD", tmp_path / "golden.json")
    monkeypatch.setattr(golden, "cpuinfo", lambda: "vendor_id : A\ncpu family : 1\nflags : fma avx2\n")
    other = {"B family 2": {"cpu": "B", "sets": {"avx2": {"llama on 1 rank": RUN}}}}
    golden.RECORD.write_text(json.dumps({"torch": golden.TORCH, "makers": other}))
    for loss, makers in ((3.0 + 2**-20, ["A family 1", "B family 2"]), (3.1, ["A family 1"])):
        measured = {"llama on 1 rank": RUN | {"loss": [loss] + RUN["loss"][1:]}}
        monkeypatch.setattr(golden, "measure", lambda _, measured=measured: measured)
        golden.main(["--record"])
        record = json.loads(golden.RECORD.read_text())
        assert list(record["makers"]) == makers and record["makers"]["A family 1"]["sets"]["avx2"] == measured


def test_every_record_has_every_recipe():
    for entry in json.loads(golden.RECORD.read_text())["makers"].values():
        for runs in entry["sets"].values():
            assert len(runs) == 2 * len(golden.RECIPES)
            for figures in runs.values():
                assert len(figures["loss"]) == len(figures["grad_norm"]) == golden.STEPS
                assert figures["loss"][-1] < figures["loss"][0] / 2
