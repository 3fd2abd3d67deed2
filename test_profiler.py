"""--profile: the trace and the table of real runs."""

import gzip
import json

import pytest

from config import parse_args
from lib.errors import UserError
from test_train import FAST, records, train


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_profiled_run(tmp_path, text, ranks):
    run = tmp_path / "run"
    words = [*FAST, "--data", text, "--steps", 6, "--log_every", 1, "--eval_every", 0, "--batch_tokens", 512]
    train(*words, "--profile", 2, "--out", run, ranks=ranks)
    assert sorted(p.name for p in (run / "profile").iterdir()) == ["rank-00000.trace.json.gz", "table.txt"]
    with gzip.open(run / "profile/rank-00000.trace.json.gz") as f:
        names = [event.get("name", "") for event in json.load(f)["traceEvents"]]
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#3", "ProfilerStep#4"}
    assert "aten::mm" in names and "part: data" in names and ("gloo:all_reduce" in names) == (ranks > 1)
    table = (run / "profile/table.txt").read_text()
    assert "aten::mm" in table and "Self CPU time total" in table
    train(*words, "--out", tmp_path / "plain", ranks=ranks)
    profiled, plain = ([(r["loss"], r["grad_norm"]) for r in records(f)] for f in (run, tmp_path / "plain"))
    assert profiled == plain


def test_too_few_steps_are_refused():
    with pytest.raises(UserError, match="--profile 3 needs --steps 6"):
        parse_args(["--steps", "5", "--profile", "3"])
