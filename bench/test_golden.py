"""This checkout's losses against golden.json. Tolerances for other machines catch three deliberate mistakes."""

import copy
import json
import re
import warnings

import pytest
import torch

import attention
import golden
import train

RUN = {"loss": [3.0, 2.0] + [1.5] * 4, "grad_norm": [0.5] * 6, "val_loss": 1.75, "weights": "a"}
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in golden.sets_here()[1:]]


@pytest.mark.parametrize("instructions", [golden.sets_here()[0], *OTHERS])
def test_the_losses_are_the_recorded_ones(instructions):
    lines, statement = golden.compare(instructions)
    warnings.warn(statement, stacklevel=1)  # pytest prints it: bit for bit, or why within tolerances
    assert not lines, "\n".join([*lines, golden.INTENDED])


def eps(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["eps"] = 1e-7


def no_bias_correction(optimizer: torch.optim.Optimizer) -> None:
    """After many steps the correction is 1."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p].update(step=torch.tensor(1e6), **moments)


@pytest.mark.parametrize("mistake", ["none", "eps 1e-7", "no bias correction", "mask off by one"])
def test_the_tolerance_catches_deliberate_mistakes(mistake, tmp_path, monkeypatch):
    """The first steps of one recipe, compared with the record as another machine's would be."""
    golden.write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    golden.skip_plots(monkeypatch.setattr)
    make, sdpa = train.make_optimizer, torch.nn.functional.scaled_dot_product_attention
    change = {"eps 1e-7": eps, "no bias correction": no_bias_correction}.get(mistake, lambda optimizer: None)

    def make_wrong(*args):
        optimizer = make(*args)
        change(optimizer)
        return optimizer

    def look_ahead(q, k, v, **_):
        ahead = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(1)
        return sdpa(q, k, v, attn_mask=ahead)

    monkeypatch.setattr(train, "make_optimizer", make_wrong)
    if mistake == "mask off by one":
        monkeypatch.setattr(attention.F, "scaled_dot_product_attention", look_ahead)
    flags = f"{golden.COMMON} {golden.RECIPES['gpt2']} --attention sdpa --steps {golden.FIRST} --out run"
    assert train.main(flags.split()) == 0
    name, run = "gpt2 on 1 rank", golden.figures(tmp_path / "run")
    expected = copy.deepcopy(golden.find_record("avx2")[0][name])
    for key in ("loss", "grad_norm"):
        del expected[key][golden.FIRST :]
    expected["val_loss"] = run["val_loss"]
    lines = golden.differences({name: expected}, {name: run}, "fp32")
    assert bool(lines) == (mistake != "none"), lines


@pytest.mark.parametrize(
    "change, exact, close",
    [
        ({"loss": [3.0, 2 + 2**-20] + [1.5] * 4}, r"the loss of step 2 is 2.00000095\d*, recorded 2.0; earlier", ""),
        ({"loss": [3.0, 2 + 2**-17] + [1.5] * 4}, "the loss of step 2", "the loss of step 2 is .*; earlier"),
        ({"grad_norm": [0.5] * 5 + [0.7]}, "the gradient norm of step 6", ""),
        ({"loss": [3.0, 2.0] + [1.5] * 3 + [1.7]}, "the loss of step 6", "the loss of step 6 is .*; earlier"),
        ({"loss": [3.0, 2.0] + [1.5] * 3 + [float("nan")]}, "the loss of step 6", "the loss of step 6 is nan"),
        ({"loss": [3.0], "grad_norm": [0.5]}, "the loss of step 2 is None", "the loss of step 2 is None, recorded 2.0"),
        ({"val_loss": 1.8}, "the validation loss", ""),
        ({"val_loss": 1.9}, "the validation loss", "the validation loss is 1.9, recorded 1.75"),
        ({"weights": "b"}, "the checksum of the weights is b, recorded a", ""),
    ],
)
def test_the_first_figure_that_differs_is_named(change, exact, close):
    for dtype, message in (("", exact), ("fp32", close)):
        lines = golden.differences({"llama on 1 rank": RUN}, {"llama on 1 rank": RUN | change}, dtype)
        assert len(lines) == bool(message) and all(re.match(f"llama on 1 rank: {message}", line) for line in lines)


def test_the_comparison_says_why_it_is_not_bit_for_bit(tmp_path, monkeypatch):
    record = {"torch": "1.0", "makers": {"AuthenticAMD family 25": {"sets": {"avx2": {"llama on 1 rank": RUN}}}}}
    monkeypatch.setattr(golden, "RECORD", tmp_path / "golden.json")
    monkeypatch.setattr(golden, "measure", lambda _: {"llama on 1 rank": RUN | {"weights": "b"}})
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
        assert len(lines) == (how == "bit for bit")  # another checksum of the weights


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
            for run in runs.values():
                assert len(run["loss"]) == len(run["grad_norm"]) == golden.STEPS
                assert run["loss"][-1] < run["loss"][0] / 2
