"""The losses of this checkout against golden.json, and what is said where they differ or nothing is recorded."""

import json
import re

import pytest

import golden
from lib.errors import Failure


@pytest.mark.parametrize(
    "instructions",
    [
        next(iter(golden.sets_here()), "unknown"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in golden.sets_here()[1:]),
    ],
)
def test_the_losses_are_the_recorded_ones(instructions):
    try:
        expected = golden.expected_runs(instructions)
    except Failure as reason:
        pytest.skip(str(reason))
    lines = golden.differences(expected, golden.measure(instructions))
    assert not lines, "\n".join([*lines, golden.MEANT])


def test_what_has_no_record_says_so_and_how_to_make_one(tmp_path, monkeypatch):
    record = {"torch": golden.TORCH, "sets": {"avx2": {"missing": "the CPU lacks it"}, "avx512": {"runs": 1}}}
    monkeypatch.setattr(golden, "RECORD", tmp_path / "golden.json")
    golden.RECORD.write_text(json.dumps(record))
    assert golden.expected_runs("avx512") == {"runs": 1}
    for instructions, message in (("avx2", "for avx2: the CPU lacks it; .*--record"), ("unknown", "none of.*--record")):
        with pytest.raises(Failure, match=message):
            golden.expected_runs(instructions)
    golden.RECORD.write_text(json.dumps(record | {"torch": "1.0"}))
    with pytest.raises(Failure, match="the golden losses are of torch 1.0, this is .*--record"):
        golden.expected_runs("avx512")


def test_the_record_has_every_recipe_of_every_set_or_says_why_not():
    sets = json.loads(golden.RECORD.read_text())["sets"]
    assert list(sets) == list(golden.SETS)
    for runs in sets.values():
        assert "missing" in runs or len(runs) == 2 * len(golden.RECIPES)
        for run in runs.values() if "missing" not in runs else ():
            assert len(run["loss"]) == len(run["grad_norm"]) == golden.STEPS and run["loss"][-1] < run["loss"][0] / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": [3.0, 2 + 2**-20, 1.5]}, r"the loss of step 2 is 2.00000095\d*, recorded 2.0: \+9.54e-07"),
        ({"grad_norm": [1.0, 1.0, 0.5 + 2**-20]}, "the gradient norm of step 3 is .* recorded 0.5"),
        ({"loss": [3.0], "grad_norm": [1.0]}, "the loss of step 2 is None, recorded 2.0; all before it agree"),
        ({"val_loss": 3.5}, "the validation loss is 3.5, recorded 1.75: .*all before it agree"),
        ({"weights": "b"}, "the checksum of the weights is b, recorded a; all before it agree"),
    ],
)
def test_the_first_figure_that_differs_is_named(change, message):
    run = {"loss": [3.0, 2.0, 1.5], "grad_norm": [1.0, 1.0, 0.5], "val_loss": 1.75, "weights": "a"}
    (line,) = golden.differences({"llama on 1 rank": run}, {"llama on 1 rank": run | change})
    assert re.match(f"llama on 1 rank: {message}", line)
    assert not golden.differences({"a": run}, {"a": run})
    assert golden.differences({"a": run}, {})[0].startswith("a: the loss of step 1 is None, recorded 3.0")
