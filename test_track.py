"""Trackers, as their own readers see what was sent: TensorBoard's event reader, and wandb's of files that were written
offline. bash test.sh installs both packages; without them these tests are skipped."""

import json
import struct
import time
from pathlib import Path

import pytest

import log
import records
from config import parse_args
from lib.errors import UserError
from test_log import make_log, record, start_logging, write_run
from test_shard import run_code

# Records steps FIRST + 1 to LAST of a run that goes on after step FIRST, with a sample after every third of them; then
# it is killed, while trackers are at work, or ends.
CODE = """
import json, os, sys, time
from pathlib import Path
from log import Clock
from test_log import make_log, record

folder, first, last, end = Path(sys.argv[1]), *map(int, sys.argv[2:])
run = make_log(folder, Clock(), first, track=("tensorboard", "wandb"))
run.clock.switch("steps")
for step in range(first + 1, last + 1):
    record(run, step, 10.0 - step, save_ms=7.0)
    if step % 3 == 0:
        run.add(step, sample=f"text {step} of {last}\\n")
if not end:
    while not (folder / "wandb.json").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
for close in run.run.at_end:
    close()
"""


def run_steps(folder: Path, first: int, last: int, end: bool) -> None:
    env = {"WANDB_MODE": "offline"}
    done = run_code(CODE, ["x", str(folder), str(first), str(last), str(int(end))], env=env, timeout=120)
    assert done.returncode == (0 if end else -9), done.stderr


def read_tensorboard(folder: Path) -> tuple[dict[str, list], dict[str, list]]:
    """-> ({name: [(step, number)]}, {name: [(step, text)]})"""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "tensors": 0})
    reader.Reload()
    tags = reader.Tags()
    scalars = {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in tags["scalars"]}
    texts = {
        tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in reader.Tensors(tag)] for tag in tags["tensors"]
    }
    return scalars, {tag.removesuffix("/text_summary"): rows for tag, rows in texts.items()}


def read_wandb(folder: Path) -> tuple[list[dict], set[str]]:
    """-> (rows of the history of all files, the ids of their runs). A file is a log of protocol buffers in the format
    of LevelDB: blocks of 32 KiB, in them pieces of records, each behind a checksum, its length and its kind."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    rows, ids = [], set()
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        content, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            _, size, kind = struct.unpack_from("<IHB", content, at)
            whole, at = whole + content[at + 7 : at + 7 + size], at + 7 + size
            if kind in (1, 4):  # it is all of a record, or the last of its pieces
                entry, whole = records.Record.FromString(whole), b""
                ids |= {entry.run.run_id} if entry.HasField("run") else set()
                items = entry.history.item
                rows += [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}] if items else []
            if 2**15 - at % 2**15 < 7:  # no header fits into the rest of the block
                at += 2**15 - at % 2**15
    return rows, ids


def test_a_run_that_is_killed_and_resumed_is_one_curve(tmp_path):
    """Killed after step 10, resumed after step 6: no step comes twice, and none is missing."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    (tmp_path / "flags.json").write_text(json.dumps({"lr": 0.125}))
    run_steps(tmp_path, 0, 10, end=False)
    run_steps(tmp_path, 6, 14, end=True)
    scalars, texts = read_tensorboard(tmp_path)
    for name in ("loss", "tok_per_s", "mem_gib", "save_ms"):
        assert [step for step, _ in scalars[name]] == list(range(1, 15)), name
    assert scalars["loss"] == [(step, 10.0 - step) for step in range(1, 15)]
    assert [step for step, _ in texts["sample"]] == [3, 6, 9, 12] and texts["sample"][2][1] == "text 9 of 14\n"
    assert '"lr": 0.125' in texts["config"][0][1]
    rows, ids = read_wandb(tmp_path)
    assert len(ids) == 1
    losses = [(row["_step"], row["loss"]) for row in rows if "loss" in row]
    assert losses == [(step, 10.0 - step) for step in range(1, 15)]
    assert [row["_step"] for row in rows if "save_ms" in row] == list(range(1, 15))


def test_a_finished_run_is_sent_again_by_itself(tmp_path):
    pytest.importorskip("tensorboard")
    run = write_run(tmp_path / "run", [3.0, 2.5, 2.0], 100)
    for _ in range(2):
        log.main(["track", run])
    scalars, _ = read_tensorboard(tmp_path / "run")
    assert scalars["loss"] == [(1, 3.0), (2, 2.5), (3, 2.0)] and scalars["tokens"][-1] == (3, 300)


class Stuck:
    """A tracker that does not answer."""

    def __init__(self, *_):
        time.sleep(3600)


class Failing:
    """A tracker that fails with the third record."""

    def __init__(self, *_):
        self.sent = 0

    def send(self, step, values):
        self.sent += 1
        if self.sent == 3:
            raise ConnectionError("no route\nto the host")


def test_a_tracker_that_fails_or_hangs_is_said_once_and_stops_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(records, "TRACKERS", {"a": Failing, "b": Stuck})
    monkeypatch.setattr(records, "PATIENCE", 0.2)
    start_logging(tmp_path)
    run = make_log(tmp_path, log.Clock(), track=("a", "b"))
    run.clock.switch("steps")
    for step in range(1, 6):
        record(run, step)
    for close in run.run.at_end:
        close()
    said = capsys.readouterr().out
    start_logging(None)
    assert said.count("--track a fails; the run goes on without it: ConnectionError: no route") == 1
    assert said.count("--track b: not all was sent") == 1 and said.count("Batch") == 5


def test_trackers_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    assert parse_args(["--track", "tensorboard,wandb"]).track == ("tensorboard", "wandb")

    def refused(*names):
        with pytest.raises(UserError) as error:
            records.refuse_unusable(names, tmp_path)
        return str(error.value)

    assert "unknown; there are tensorboard, wandb" in refused("mlflow")
    monkeypatch.setattr(records.importlib.util, "find_spec", lambda name: None)
    assert "-m pip install wandb" in refused("wandb")
    monkeypatch.setattr(records.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "tensorboard").write_text("in the way")
    assert "no folder that can be written to" in refused("tensorboard")
    monkeypatch.setattr(records, "_is_logged_in", lambda: False)
    assert "`wandb login`, or WANDB_MODE=offline" in refused("wandb")


@pytest.mark.parametrize("name, value, expected", [
    ("WANDB_MODE", "online", False), ("WANDB_MODE", "offline", True), ("WANDB_API_KEY", "0" * 40, True),
    ("NETRC", "netrc", True),
])  # fmt: skip
def test_logged_in_or_offline(tmp_path, monkeypatch, name, value, expected):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    Path("netrc").write_text("machine api.wandb.ai login user password 0123\n")
    env = {"NETRC": "none", "HOME": str(tmp_path), "WANDB_BASE_URL": "https://api.wandb.ai", name: value}
    done = run_code(
        f"import os; os.chdir('{tmp_path}'); import records; print(records._is_logged_in())", ["x"], env=env
    )
    assert done.stdout.strip() == str(expected), done.stderr
