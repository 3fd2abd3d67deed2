"""The records of a run: log.txt, metrics.jsonl, curves, trackers, --profile. The tests set the time, so
speeds and parts are known exactly. TensorBoard's own reader reads its files; wandb is a mock."""

import gzip
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import log
from base import background, disk, errors
from base.ranks import Ranks
from job.job import Clock, logger, start_logging
from job.test_job import wait_until
from log import Log, refuse_trackers
from model import MODELS
from test_train import FAST, metrics, train

PREFIX = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d I \[\w+\.py:\d+\] "
BATCH = re.compile(  # other programs look for this line, after the prefixes of Slurm and of start_logging
    rf"^(?:\d+: )?(?:{PREFIX})?Batch (\d+) Loss: ([\d.]+), Speed: ([\d.]+) samples/sec, lr: ([\d.]+)"
)
KEYS = ["step", "tokens", "loss", "lr", "grad_norm", "step_ms", "data_ms", "samples_per_s", "tok_per_s"]
KEYS += ["tok_per_s_per_device", "mfu", "data_rank", "mem_gib"]
TOKENS, SEQ_LEN, FLOPS, PEAK = 4096, 64, 1e6, 1e9  # per step; per row; per token; per second and device


@pytest.fixture
def passes(monkeypatch):
    """Time stands still, but for passes(seconds)."""
    now = [1000.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def make_log(folder: Path, start=0, part="steps", sources=(), world_size=1, track=()) -> Log:
    """A Log without a model, whose clock counts for `part`."""
    sizes = {"batch_tokens": TOKENS, "seq_len": SEQ_LEN, "steps": 0, "lora": 0, "shard_size": 0, "track": track}
    config = SimpleNamespace(**sizes, model_config=MODELS["tiny-llama"])
    clock, ranks = Clock(), Ranks(0, world_size, torch.device("cpu"))
    clock.switch(part)
    run = SimpleNamespace(folder=folder, ranks=ranks, clock=clock, phase=clock.phase, write_status=mock.Mock())
    with mock.patch.object(log, "peak_flops", lambda *_: (PEAK, "made up")):
        made = Log(config, run, SimpleNamespace(dtype=torch.float32, modules=list), start, sources)
    made.flops_per_token = FLOPS
    return made


def record(run: Log, step: int, loss=2.5, **values) -> None:
    run.step(
        step, torch.tensor(loss), torch.tensor(0.75), 1e-4, {n: values.pop(n) for n in [*values] if n == "val_loss"}
    )
    run.add(step, **values)


# ---- lines


@pytest.mark.parametrize("terminal", [False, True])
def test_our_lines_are_parsed_too(tmp_path, passes, monkeypatch, terminal):
    """The validation text has 800 bytes in 200 tokens."""
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", screen)
    start_logging(tmp_path)
    run = make_log(tmp_path)
    run.val_bytes, run.val_tokens = 800, 200
    passes(8.0)
    record(run, 20, 8.421841, val_loss=2.0)
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    (shown,) = screen.getvalue().splitlines()
    tok_per_s = 20 * TOKENS / 8.0
    numbers = "20", "8.42184", f"{tok_per_s / SEQ_LEN:.2f}", "0.000100"
    assert BATCH.match(line).groups() == BATCH.match(shown).groups() == numbers
    assert re.match(PREFIX, line) and bool(re.match(PREFIX, shown)) != terminal
    for part in (f"{tok_per_s:.0f} tok/s", f"mfu {100 * tok_per_s * FLOPS / PEAK:.1f}%", "grad norm 0.750", "GiB"):
        assert part in line
    assert f", val loss 2.00000, {0.5 / np.log(2):.4f} bits per byte" in line
    assert metrics(tmp_path)[0]["val_bpb"] == pytest.approx(400 / np.log(2) / 800)


HOSTILE = "é 日本\tx: a\nb\x1b[31m\r\x9b"  # a name that would write on the terminal


def test_every_line_has_the_prefix_and_steers_no_terminal(tmp_path, capsys):
    start_logging(tmp_path)
    logger.info("100 %% of %s\n\n%d", "a 50 % line\nand\r\nmore", 7)
    logger.info("")
    logger.warning("read %s", HOSTILE)
    written = (tmp_path / "log.txt").read_text()
    assert capsys.readouterr().out == written
    lines = [re.fullmatch(f"({PREFIX.replace(' I ', ' [IW] ')})(.*)", line) for line in written.splitlines()]
    texts = ["100 % of a 50 % line", "and\\r", "more", "", "7", "", "read é 日本\tx: a", "b\\x1b[31m\\r\\x9b"]
    assert [m[2] for m in lines] == texts and len({m[1] for m in lines[:5]}) == 1
    for kind in (errors.UserError, errors.Failure, KeyError):
        errors.exit_status(mock.Mock(side_effect=kind(HOSTILE)), [])
    shown = capsys.readouterr().err
    assert shown.count("b\\x1b[31m") >= 3 and shown.count("é 日本") >= 3 and not set("\x1b\r\x9b") & set(shown)


# ---- records


def test_records(tmp_path, passes, monkeypatch):
    """Two ranks, of which the second waits longer for data and needs more memory; the first step compiles. An
    evaluation and a save between records do not count as time of steps."""
    monkeypatch.setattr(log, "sum_over_ranks", lambda sums, mine, _: (sums, [mine, [2 * mine[0], 4096.0]]))
    run = make_log(tmp_path, part="compile", world_size=2)
    clock = run.clock
    for step in range(1, 6):
        with clock.phase("data"):
            passes(0.25)
        passes(9.75 if step == 1 else 1.75)
        run.sum_details([])
        if step in (1, 5):
            with clock.phase("saves"):
                passes(40.0)
            record(run, step, **({"val_loss": 2.25, "save_ms": 40e3} if step == 5 else {}))
            with clock.phase("evaluation"):
                passes(30.0)
        clock.switch("steps")
    passes(2.0)
    record(run, 6)
    first, second, saved, third = metrics(tmp_path)
    assert list(first) == list(third) == KEYS and list(second) == [*KEYS, "val_loss"]
    assert saved == {"step": 5, "save_ms": 40e3}
    assert first == {
        "step": 1, "tokens": TOKENS, "loss": 2.5, "lr": 1e-4, "grad_norm": 0.75, "step_ms": 10e3, "data_ms": 500,
        "data_rank": 1, "samples_per_s": TOKENS / SEQ_LEN / 10, "tok_per_s": TOKENS / 10,
        "tok_per_s_per_device": TOKENS / 20, "mfu": TOKENS / 20 * FLOPS / PEAK, "mem_gib": 4096.0,
    }  # fmt: skip
    assert second == first | {
        "step": 5, "tokens": 5 * TOKENS, "step_ms": 2e3,
        "samples_per_s": TOKENS / SEQ_LEN / 2, "tok_per_s": TOKENS / 2, "tok_per_s_per_device": TOKENS / 4,
        "mfu": TOKENS / 4 * FLOPS / PEAK, "val_loss": 2.25,
    }  # fmt: skip


def test_losses_by_source_and_shares_of_experts(tmp_path, passes):
    """Two micro-batches of 12 and 1 trained tokens of source a, and 2 of b: rows that are mostly unused, which count
    as whole rows in the speed and by trained tokens in the losses. Two layers have four experts; the first layer does
    not use the last expert. Each record has only its own steps."""
    run = make_log(tmp_path, sources=["a", "b", "unused"])
    batch = SimpleNamespace(pairs=None, targets=torch.tensor([[1] * 12, [1] + [-100] * 11, [1] * 2 + [-100] * 10]))
    batch.sources = torch.tensor([0, 0, 1])
    routers = torch.tensor([[8.0, 8, 8, 0], [2, 2, 2, 18], [12 * 1.5] * 4, [12] * 4])  # model.Details
    details = SimpleNamespace(row_losses=torch.tensor([24.0, 2.0, 4.0]), router_sums=routers)
    for step in (1, 2):
        passes(1.0)
        run.sum_details([(batch, details), (batch, details)])
        record(run, step)
    assert [row["tok_per_s"] for row in metrics(tmp_path)] == [TOKENS] * 2
    first, second = ({k: v for k, v in row.items() if k not in KEYS} for row in metrics(tmp_path))
    shares = {f"expert_load_{e}": (4 / 3 + 1 / 3) / 2 for e in range(3)} | {"expert_load_3": 1.5}
    assert first == second == pytest.approx({"loss_a": 26 / 13, "loss_b": 4 / 2, "router_aux_loss": 1.5} | shares)


def test_resume_removes_later_records(tmp_path, passes):
    """A start without a checkpoint keeps all old records in another file."""
    run = make_log(tmp_path)
    for step in (1, 10, 20, 30):
        passes(10.0)
        record(run, step)
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"loss": 1.0}\n[1]\n5\n{"step": "6"}\n' + "[" * 10**5)
        f.write('\n{"step": 31, "tok')  # killed while it wrote
    passes(100.0)
    run = make_log(tmp_path, start=20)
    assert [r["step"] for r in metrics(tmp_path)] == [1, 10, 20]
    passes(6.0)
    record(run, 22)
    assert metrics(tmp_path)[-1].items() >= {"step": 22, "tokens": 22 * TOKENS, "step_ms": 3e3}.items()
    make_log(tmp_path)
    (aside,) = tmp_path.glob("metrics-before-*.jsonl")
    assert metrics(tmp_path) == [] and len(aside.read_text().splitlines()) == 4


# ---- curves


def write_run(folder: Path, losses: list[float], step_tokens: int) -> str:
    folder.mkdir(exist_ok=True)
    rows = ({"step": i, "tokens": i * step_tokens, "loss": loss} for i, loss in enumerate(losses, 1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_a_ctrl_c_does_not_reach_the_drawing(tmp_path, monkeypatch):
    """A terminal sends it to all processes of the session's group in the foreground."""
    (tmp_path / "curves.py").write_text("import os, sys\nopen(sys.argv[2], 'w').write(str(os.getsid(0)))")
    monkeypatch.setattr("log.ROOT", tmp_path)
    Log._draw(mock.Mock(run=mock.Mock(folder=tmp_path)))
    assert int((tmp_path / "curves.png").read_text()) != os.getsid(0)


def drawn_lines(save: mock.Mock) -> dict[str, list]:
    """The lines of the figure that is saved, by panel."""
    axes = save.call_args.args[0].axes
    return {axis.get_title(loc="left"): [line.get_xydata() for line in axis.get_lines()] for axis in axes}


def test_runs_are_drawn_over_each_other(tmp_path):
    losses = [10.0 - i % 7 for i in range(200)]
    one, two = write_run(tmp_path / "one", losses, 100), write_run(tmp_path / "two", [3.0], 50)
    with mock.patch.object(Figure, "savefig", autospec=True) as save:
        log.main(["plot", one, two])
    line, mean, *second = drawn_lines(save)["loss (nats per token)"]
    assert line[-1].tolist() == [200 * 100, losses[-1]]  # over tokens, as steps may differ
    assert [points.tolist() for points in second] == [[[50, 3.0]]] * 2
    assert mean[100, 1] == pytest.approx(sum(losses[98:103]) / 5)
    with pytest.raises(errors.UserError, match="no step"):
        log.main(["plot", str(tmp_path)])
    with pytest.raises(errors.UserError, match="-o x.foo: expected a .png"):
        log.main(["plot", one, "-o", "x.foo"])


# ---- files


class Torn(io.FileIO):
    """A file on a disk that has room for three bytes."""

    def write(self, data):
        super().write(data[:3])
        raise OSError(28, "No space left on device")


def test_what_a_disk_refuses_is_written_later_and_once(tmp_path, monkeypatch, caplog):
    """Texts that are too many to keep are left out, and counted."""
    monkeypatch.setattr(background, "PAUSES", (0.01,))
    monkeypatch.setattr(background, "KEPT", 4)
    file = background.Appender(tmp_path / "a")
    with monkeypatch.context() as m:
        file.write("line 0\n")
        file.flush()
        m.setattr(background, "open", Torn, raising=False)
        for i in range(1, 7):
            file.write(f"line {i}\n")
            file.flush()
        wait_until(lambda: file.intact == 7)
    file.finish(60)
    assert (tmp_path / "a").read_text() == "line 0\nline 1\nline 2\nline 3\nline 4\n"
    assert caplog.text.count("a fails and is tried again; the run continues: OSError") == 1
    assert caplog.text.count("a lacks 2 texts: the disk failed for too long") == 1


def test_what_is_asked_for_while_work_is_done_is_done_after_it():
    goes_on, done = threading.Event(), []
    work = background.Background("work", lambda: (done.append(len(done)), goes_on.wait(60)))
    work.start(0.0)
    wait_until(lambda: done)
    for _ in range(3):
        work.start(99)  # does not wait
    goes_on.set()
    work.finish(60)
    assert done in ([0, 1], [0, 1, 2])


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, call):
    disk.write_whole(tmp_path / "a", "old content")
    disk.write_whole(tmp_path / "a", "new content")
    full = OSError(28, "No space left on device")
    with mock.patch.object(log.os, call, side_effect=full), pytest.raises(OSError, match="No space"):
        disk.write_whole(tmp_path / "a", "newer content", sync=True)
    assert (tmp_path / "a").read_text() == "new content" and [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("reader", "size", "status", "message"), [
    ("| head -c 1", 10**6, "141", ""),  # the status that a shell gives for SIGPIPE
    (">/dev/full", 1, "1", "error: the disk is full"),  # which only the flush at the end notices
])  # fmt: skip
def test_output_that_nobody_takes(reader, size, status, message):
    code = f"from base.errors import run_script; run_script(lambda argv: print('x' * {size}))"
    command = f'{sys.executable} -c "$0" {reader}; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command, code], cwd=disk.ROOT, capture_output=True, text=True)
    assert done.stdout.split()[-1].lstrip("x") == status
    assert done.stderr.startswith(message) and done.stderr.count("\n") == bool(message)


# ---- trackers


def test_a_run_that_is_killed_and_resumed_is_one_curve(tmp_path, passes, monkeypatch):
    """Killed after step 10, which leaves its trackers open, and resumed after step 6: no step comes twice. A tracker
    that fails is reported once and stops nothing."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    wandb, wandb_run = mock.Mock(), mock.Mock(id="the same")
    wandb.init.return_value = wandb_run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for first, last in ((0, 10), (6, 14)):
        run = make_log(tmp_path, first, track=("tensorboard", "wandb"))
        for step in range(first + 1, last + 1):
            passes(1.0)
            record(run, step, 10.0 - step, save_ms=7.0)
            if step % 3 == 0:
                run.add(step, sample=f"text {step} of {last}\n")
        for tracker in run.trackers:
            tracker.thread.join()
            tracker.start(60)
    start_logging(tmp_path)
    monkeypatch.setattr(background, "PAUSES", (0.1,))
    works, fails = wandb_run.log, mock.Mock(side_effect=ConnectionError("no route"))
    wandb_run.log = fails
    passes(2.0)
    record(run, 15, -5.0, save_ms=7.0)
    wait_until(lambda: fails.call_count > 2)
    wandb_run.log = works
    run.__exit__(None)
    warning = "--track wandb fails and is tried again; the run continues: ConnectionError: no route"
    assert (tmp_path / "log.txt").read_text().count(warning) == 1
    sent = [call.kwargs["step"] for call in works.call_args_list if "loss" in call.args[0]]
    assert sent == [*range(1, 11), *range(7, 16)]  # a resume sends what is new
    log.main(["track", str(tmp_path)])  # sends all records to TensorBoard again
    reader = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), {"scalars": 0, "tensors": 0})
    reader.Reload()
    losses = [(step, 10.0 - step) for step in range(1, 16)]
    assert [(event.step, event.value) for event in reader.Scalars("loss")] == losses
    assert [event.step for event in reader.Scalars("save_ms")] == list(range(1, 16))
    texts = {e.step: e.tensor_proto.string_val[0].decode() for e in reader.Tensors("sample/text_summary")}
    assert texts == {step: f"text {step} of {10 if step < 7 else 14}\n" for step in (3, 6, 9, 12)}
    rows = [(call.kwargs["step"], call.args[0]) for call in wandb_run.log.call_args_list]
    sent = {step: row["loss"] for step, row in rows if "loss" in row}  # the server ignores steps that it has
    assert [*sent.items()] == losses
    assert {call.kwargs["id"] for call in wandb.init.call_args_list[1:]} == {"the same"}
    wandb_run.finish.assert_called_once_with()


def test_a_tracker_that_hangs_stops_nothing(tmp_path, monkeypatch, caplog):
    hangs = threading.Event()
    monkeypatch.setattr(log, "TensorBoard", lambda *_: SimpleNamespace(log=lambda *_, **__: hangs.wait()))
    monkeypatch.setattr(log, "TRACKERS", 0.01)
    run = make_log(tmp_path, track=["tensorboard"])
    for step in range(3):
        run.add(step, loss=1.0)
    monkeypatch.setattr(run, "draw", mock.Mock())
    run.__exit__(None)
    assert len(metrics(tmp_path)) == 3 and "--track tensorboard does not end" in caplog.text
    hangs.set()


def test_trackers_that_cannot_be_used_are_refused(monkeypatch):
    with pytest.raises(errors.UserError, match="tracker 'tensorbord': expected tensorboard or wandb,"):
        refuse_trackers(["tensorbord"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.UserError, match="pip install tensorboard wandb"):
        refuse_trackers(["wandb"])


# ---- --profile


def test_a_profiled_run(tmp_path, text):
    run = tmp_path / "run"
    words = [*FAST, "--data", text, "--steps", 6, "--eval_every", 0, "--batch_tokens", 512, "--n_layers", 1]
    train(*words, "--profile", 2, "--out", run, ranks=2)
    assert sorted(p.name for p in (run / "profile").iterdir()) == ["rank-00000.trace.json.gz"]
    with gzip.open(run / "profile/rank-00000.trace.json.gz") as f:
        names = {event.get("name", "") for event in json.load(f)["traceEvents"]}
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#3", "ProfilerStep#4"}
    assert {"aten::mm", "phase: data", "gloo:all_reduce"} < names
