"""Trackers, as their own readers see what was sent: TensorBoard's event reader, and wandb's of files that were written
offline. bash test.sh installs both packages; without them these tests are skipped."""

import json
import struct
from pathlib import Path

import pytest

import log
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
with run:
    pass
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
    losses = {row["_step"]: row["loss"] for row in rows if "loss" in row}
    assert losses == {step: 10.0 - step for step in range(1, 15)}
    assert {row["_step"] for row in rows if "save_ms" in row} == set(range(1, 15))


def test_a_finished_run_is_sent_again_by_itself(tmp_path):
    pytest.importorskip("tensorboard")
    run = write_run(tmp_path / "run", [3.0, 2.5, 2.0], 100)
    for _ in range(2):
        log.main(["track", run])
    scalars, _ = read_tensorboard(tmp_path / "run")
    assert scalars["loss"] == [(1, 3.0), (2, 2.5), (3, 2.0)] and scalars["tokens"][-1] == (3, 300)


def test_a_tracker_that_fails_is_reported_once_and_stops_nothing(tmp_path, capsys, monkeypatch):
    def fail(record):
        raise ConnectionError("no route")

    start_logging(tmp_path)
    run = make_log(tmp_path, log.Clock())
    run.trackers = [("wandb", fail, lambda: None)]
    run.clock.switch("steps")
    for step in range(1, 6):
        record(run, step)
    shown = capsys.readouterr().out
    start_logging(None)
    assert shown.count("--track wandb fails; the run continues without it: ConnectionError: no route") == 1
    assert shown.count("Batch") == 5


def test_trackers_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    assert parse_args(["--track", "tensorboard,wandb"]).track == ("tensorboard", "wandb")
    with pytest.raises(UserError, match="unknown; choose from tensorboard, wandb"):
        log.refuse_unusable(["mlflow"])
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(UserError, match="--track tensorboard: .*tensorboard"):
        log.open_tracker("tensorboard", tmp_path)
    monkeypatch.setattr(log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="-m pip install wandb"):
        log.refuse_unusable(["wandb"])
