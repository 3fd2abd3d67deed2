"""The records of a run: log.txt, metrics.jsonl, curves, trackers, the slow rank, --profile. The tests set the time, so
speeds and parts are known exactly. TensorBoard's own reader reads its files, and a fake module
takes the place of wandb."""

import contextlib
import gzip
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import matplotlib.image
import numpy as np
import pytest
import torch

import log
from config import parse_args
from lib import errors
from lib.errors import read_json, write_whole
from lib.run import Clock, logger, refuse_unusable, start_logging
from log import Log, Times, find_slow
from model import MODELS
from shard import Ranks
from test_shard import run_code
from test_train import FAST, train
from test_train import records as step_records

STARTED = time.perf_counter()
PREFIX = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d I \[\w+\.py:\d+\] "
BATCH = re.compile(  # what those who read our screen look for, after the prefixes of Slurm and ours
    rf"^(?:\d+: )?(?:{PREFIX})?Batch (\d+) Loss: ([\d.]+), Speed: ([\d.]+) samples/sec, lr: ([\d.]+)"
)
KEYS = ["step", "tokens", "loss", "lr", "grad_norm", "step_ms", "data_ms", "samples_per_s", "tok_per_s"]
KEYS += ["tok_per_s_per_device", "mfu", "mem_gib"]
TOKENS, SEQ_LEN, FLOPS, PEAK = 4096, 64, 1e6, 1e9  # per step; per row; per token; per second and device


@pytest.fixture(autouse=True)
def loud_again():
    yield
    for handler in logger.handlers:
        handler.close()
    start_logging(None)


@pytest.fixture
def passes(monkeypatch):
    """Time stands still, but for passes(seconds)."""
    now = [1000.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    begun = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(log.time, "clock_gettime", lambda _: begun + 5.0)  # 5 s after the process began

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def make_log(folder: Path, clock: Clock, resumed_step=0, rank=0, world_size=1, track=()) -> Log:
    config = SimpleNamespace(
        batch_tokens=TOKENS, seq_len=SEQ_LEN, steps=0, lora=0, shard_size=0, model_config=MODELS["tiny-llama"]
    )
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    run = SimpleNamespace(config=config, folder=folder, ranks=ranks, clock=clock, phase=clock.part)
    with mock.patch.object(log, "peak_flops", lambda *_: (PEAK, "made up")):
        made = Log(run, SimpleNamespace(dtype=torch.float32, modules=list), resumed_step)
    made.trackers = [log.open_tracker(name, folder) for name in track]
    made.flops_per_token = FLOPS
    return made


def record(run: Log, step: int, loss=2.5, **values) -> None:
    run.step(step, torch.tensor(loss), torch.tensor(0.75), 1e-4, values.pop("val_loss", None))
    run.add(step, **values)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- lines


@pytest.mark.parametrize("terminal", [False, True])
def test_our_lines_are_parsed_too(tmp_path, passes, monkeypatch, terminal):
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", screen)
    start_logging(tmp_path)
    clock = Clock()
    clock.switch("steps")
    run = make_log(tmp_path, clock)
    passes(8.0)
    record(run, 20, 8.421841, val_loss=8.5)
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    (shown,) = screen.getvalue().splitlines()
    speed = f"{20 * TOKENS / SEQ_LEN / 8.0:.2f}"
    assert BATCH.match(line).groups() == BATCH.match(shown).groups() == ("20", "8.42184", speed, "0.000100")
    assert re.match(PREFIX, line) and bool(re.match(PREFIX, shown)) != terminal
    tok_per_s = 20 * TOKENS / 8.0
    for part in (f"{tok_per_s:.0f} tok/s", f"mfu {100 * tok_per_s * FLOPS / PEAK:.1f}%", "grad norm 0.750", "GiB"):
        assert part in line
    assert "val loss 8.50000" in line


HOSTILE = "a\nb\x1b[31m\r\x9b"  # a name that would write on the terminal


def test_names_from_files_and_hosts_do_not_steer_the_terminal(tmp_path, capsys):
    """Nor does a name that is no UTF-8 end what prints it."""
    start_logging(tmp_path)
    logger.info("read %s: é 日本\tx", HOSTILE)
    for kind in (errors.UserError, errors.Failure, KeyError):

        def fail(argv, kind=kind):
            raise kind(f"é 日本\tx: {HOSTILE}")

        errors.exit_status(fail, [])
    shown = "".join(capsys.readouterr()) + (tmp_path / "log.txt").read_text()
    assert shown.count("b\\x1b[31m") >= 5 and shown.count("é 日本") >= 5
    assert not set("\x1b\r\x9b") & set(shown)


def test_every_line_has_the_prefix(tmp_path, capsys):
    start_logging(tmp_path)
    logger.info("100 %% of %s\n\n%d", "a 50 % line\nand\r\nmore", 7)
    logger.info("")
    logger.warning("careful\nhere")
    written = (tmp_path / "log.txt").read_text()
    assert capsys.readouterr().out == written
    lines = [re.fullmatch(f"({PREFIX.replace(' I ', ' [IW] ')})(.*)", line) for line in written.splitlines()]
    texts = [m[2] for m in lines]
    assert texts == ["100 % of a 50 % line", "and", "more", "", "7", "", "careful", "here"]
    assert len({m[1] for m in lines[:5]}) == 1


def test_other_ranks_are_silent(tmp_path, passes, capsys):
    start_logging(None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "lr": 1.0, "tok_per_s": 1.0, "grad_norm": 1.0}\n')
    before = (tmp_path / "metrics.jsonl").read_text()
    run = make_log(tmp_path, Clock(), rank=1, world_size=2)
    run.clock.switch("steps")
    passes(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "gather", lambda value, ranks: [value] * 2)
        patch.setattr(log, "on_first_rank", lambda work, ranks: None)
        record(run, 1, val_loss=2.0)
    run.draw()
    logger.error("nobody hears this")
    assert capsys.readouterr() == ("", "") and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == before


# ---- records


def test_a_start_without_a_checkpoint_keeps_the_old_records(tmp_path):
    start_logging(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    make_log(tmp_path, Clock())
    (aside,) = tmp_path.glob("metrics-before-*.jsonl")
    assert metrics(tmp_path) == [] and aside.read_text() == '{"step": 1}\n'


def test_records(tmp_path, passes, monkeypatch):
    """Two ranks; the first step compiles; between records also an evaluation and a save, which are no time of steps."""
    monkeypatch.setattr(log, "gather", lambda value, ranks: [value, 4096.0 if isinstance(value, float) else value])
    monkeypatch.setattr(log, "on_first_rank", lambda work, ranks: work())
    clock = Clock()
    run = make_log(tmp_path, clock, world_size=2)
    clock.switch("compile")
    for step in range(1, 6):
        with clock.part("data"):
            passes(0.25)
        passes(9.75 if step == 1 else 1.75)
        run.end_step([])
        if step in (1, 5):
            with clock.part("saves"):
                passes(40.0)
            record(run, step, **({"val_loss": 2.25, "save_ms": 40e3} if step == 5 else {}))
            with clock.part("evaluation"):
                passes(30.0)
        clock.switch("steps")
    passes(2.0)
    record(run, 6)
    first, second, saved, third = metrics(tmp_path)
    assert list(first) == list(third) == KEYS and list(second) == [*KEYS, "val_loss"]
    assert saved == {"step": 5, "save_ms": 40e3}
    assert first == {
        "step": 1, "tokens": TOKENS, "loss": 2.5, "lr": 1e-4, "grad_norm": 0.75, "step_ms": 10e3, "data_ms": 250,
        "samples_per_s": TOKENS / SEQ_LEN / 10, "tok_per_s": TOKENS / 10, "tok_per_s_per_device": TOKENS / 20,
        "mfu": TOKENS / 20 * FLOPS / PEAK, "mem_gib": 4096.0,
    }  # fmt: skip
    assert second == first | {
        "step": 5, "tokens": 5 * TOKENS, "step_ms": 2e3,
        "samples_per_s": TOKENS / SEQ_LEN / 2, "tok_per_s": TOKENS / 2, "tok_per_s_per_device": TOKENS / 4,
        "mfu": TOKENS / 4 * FLOPS / PEAK, "val_loss": 2.25,
    }  # fmt: skip
    status = read_json(tmp_path / "status.json")
    assert (status["state"], status["step"]) == ("running", 6)


def test_bits_per_byte_are_comparable_between_tokenizers(tmp_path, passes, capsys):
    """The same text at the same probability: as 800 tokens of one byte, or 200 of four."""
    start_logging(tmp_path)
    for step, (tokens, loss) in enumerate(((800, 0.5), (200, 2.0)), 1):
        run = make_log(tmp_path, Clock(), resumed_step=step - 1)
        run.clock.switch("steps")
        passes(1.0)
        run.val_bytes, run.val_tokens = 800, tokens
        record(run, step, val_loss=loss)
        written = metrics(tmp_path)[-1]
        assert written["val_bpb"] == pytest.approx(400 / np.log(2) / 800)
    assert capsys.readouterr().out.count(f", {0.5 / np.log(2):.4f} bits per byte") == 2


def test_resume_removes_later_records(tmp_path, passes):
    run = make_log(tmp_path, Clock())
    run.clock.switch("steps")
    for step in (1, 10, 20, 30):
        passes(10.0)
        record(run, step)
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 31, "tok')  # killed while it wrote
    clock = Clock()
    passes(100.0)
    run = make_log(tmp_path, clock, resumed_step=20)
    assert [r["step"] for r in metrics(tmp_path)] == [1, 10, 20]
    clock.switch("steps")
    passes(6.0)
    record(run, 22)
    last = metrics(tmp_path)[-1]
    assert (last["step"], last["tokens"], last["step_ms"]) == (22, 22 * TOKENS, 3e3)


# ---- time


def test_clock_parts_nest_and_add_up(passes):
    clock = Clock()
    passes(1.0)
    clock.switch("compile")
    passes(2.0)
    with clock.part("data"):
        passes(4.0)
    passes(8.0)
    clock.switch("steps")
    with contextlib.suppress(KeyError), clock.part("evaluation"):
        passes(16.0)
        with clock.part("data"):
            passes(32.0)
        raise KeyError
    passes(64.0)
    spent = {"start": 6, "compile": 10, "data": 36, "steps": 64, "evaluation": 16, "saves": 0}
    assert {part: clock.seconds(part) for part in spent} == pytest.approx(spent)  # the age of the process is rounded
    passes(128.0)
    output = clock.report()
    found = re.fullmatch(r"Time taken: ([\d.]+) seconds \((.*)\)", output)
    parts = {name: float(seconds) for name, seconds in (part.split() for part in found[2].split(", "))}
    assert parts == {"start": 6, "compile": 10, "data": 36, "evaluation": 16, "steps": 192}
    assert float(found[1]) == sum(parts.values()) == 5 + 255


def test_the_clock_began_with_the_process():
    clock = Clock()
    assert clock.seconds("start") >= time.perf_counter() - STARTED - 0.1
    uptime = float(Path("/proc/uptime").read_text().split()[0]) if Path("/proc/uptime").exists() else float("inf")
    assert clock.seconds("start") <= uptime


# ---- curves


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn."""
    from matplotlib.figure import Figure

    kept, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: (kept.append(self), save(self, *args, **more)))
    return kept


def drawn_lines(figure) -> dict[str, list]:
    names = {label: name for name, label in log.PANELS.items()}
    return {names[axis.get_ylabel()]: [line.get_xydata() for line in axis.get_lines()] for axis in figure.axes}


@pytest.mark.parametrize("records, val", [(30, True), (1, False)])
def test_curves(tmp_path, passes, figures, val, records):
    run = make_log(tmp_path, Clock())
    run.clock.switch("steps")
    run.val_bytes, run.val_tokens = 8, 2
    for i in range(1, records + 1):
        passes(float(i))
        record(run, i, 5 / i, **({"val_loss": 6 / i} if val and i % 10 in (0, 1) else {}))
    run.draw()
    image = matplotlib.image.imread(tmp_path / "curves.png")
    assert image.shape[:2] == (900, 1000) and image[..., :3].std() > 0.05
    assert {p.name for p in tmp_path.iterdir()} == {"curves.png", "metrics.jsonl", "status.json"}
    written, lines = metrics(tmp_path), drawn_lines(figures[0])
    for key in log.PANELS:
        if val or key != "val_bpb":
            assert np.array_equal(lines[key][0], [(r["step"], r[key]) for r in written if key in r])
    assert len(lines["loss"]) == 2 + val and len(lines["val_bpb"]) == val


def write_run(folder: Path, losses: list[float], step_tokens: int) -> str:
    folder.mkdir()
    rows = ({"step": i, "tokens": i * step_tokens, "loss": loss} for i, loss in enumerate(losses, 1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_runs_are_drawn_over_each_other(tmp_path, figures):
    losses = [10.0 - i % 7 for i in range(200)]
    one, two = (write_run(tmp_path / name, losses, size) for name, size in (("one", 100), ("two", 50)))
    log.main(["plot", one, "-o", str(tmp_path / "a.png")])
    log.main(["plot", one, two, "-o", str(tmp_path / "b.pdf")])
    assert (tmp_path / "a.png").stat().st_size > 10_000 and (tmp_path / "b.pdf").stat().st_size > 5_000
    alone, both = (drawn_lines(figure)["loss"] for figure in figures)
    assert len(alone) == 2 and alone[0][-1].tolist() == [200, losses[-1]]
    assert len(both) == 4 and both[2][-1].tolist() == [200 * 50, losses[-1]]  # over tokens, as steps may differ
    assert min(alone[1][20:, 1]) > 4 and max(alone[1][20:, 1]) < 10  # the running mean


def test_plots_that_cannot_be_drawn_are_refused(tmp_path):
    run, empty = write_run(tmp_path / "run", [1.0], 1), write_run(tmp_path / "empty", [], 1)
    cases = (str(tmp_path), "a.png", "no step is recorded"), (empty, "a.png", "no step"), (run, "a.txt", "txt")
    for folder, out, message in cases:
        with pytest.raises(errors.UserError, match=message):
            log.main(["plot", folder, "-o", str(tmp_path / out)])


# ---- files


def fail(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, call):
    write_whole(tmp_path / "a", "old content")
    write_whole(tmp_path / "a", "new content")
    assert (tmp_path / "a").read_text() == "new content"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(log.os, call, fail)
        write_whole(tmp_path / "a", "newer content", sync=True)
    assert (tmp_path / "a").read_text() == "new content" and [p.name for p in tmp_path.iterdir()] == ["a"]


# ---- figures of the record


def test_routers_are_described_by_shares_of_the_tokens(tmp_path):
    """Two layers, four experts, 12 trained tokens: expert 3 is not used in the first layer."""
    run = make_log(tmp_path, Clock())
    counts = [[8, 8, 8, 0], [2, 2, 2, 18]]
    run.router_sums = torch.tensor([*counts, [12 * 1.5] * 4, [12.0] * 4])
    record = run._router_figures()
    assert record["router_aux_loss"] == pytest.approx(1.5) and run._router_figures() == {}
    shares = [record[f"expert_load_{e}"] for e in range(4)]
    assert shares == pytest.approx([(4 / 3 + 1 / 3) / 2] * 3 + [1.5]) and sum(shares) == pytest.approx(4)


def test_a_closed_pipe_ends_a_script_quietly(tmp_path):
    """The reader of the pipe has gone: no message, and the status that a shell gives for SIGPIPE."""
    code = "import sys; from lib.errors import run_script; run_script(lambda argv: print('x' * 10**6))"
    command = f"{sys.executable} -c {shlex.quote(code)} | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=errors.ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["x141"] and done.stderr == ""


def test_a_full_disk_is_explained_with_its_free_space(tmp_path):
    status, message, _ = errors.describe_error(OSError(28, "No space left on device", str(tmp_path / "a" / "file")))
    assert status == 1 and f"free in {tmp_path}" in message and str(tmp_path / "a/file") in message


# ---- trackers


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


class FakeWandb(SimpleNamespace):
    """A run of wandb: what was sent to it, by the id of the run."""

    runs: dict[str, list] = {}

    @classmethod
    def init(cls, id: str | None, **settings):
        run = cls(id=id or f"id-{len(cls.runs)}")
        run.rows = cls.runs.setdefault(run.id, [])
        return run

    def log(self, record: dict, step: int) -> None:
        self.rows.append(record | {"_step": step})

    def finish(self) -> None:
        self.rows.append("the end")


def test_a_run_that_is_killed_and_resumed_is_one_curve(tmp_path, monkeypatch):
    """Killed after step 10, which leaves its trackers open, and resumed after step 6: no step comes twice."""
    monkeypatch.setattr(FakeWandb, "runs", {})
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=FakeWandb.init, Settings=dict))
    for first, last in ((0, 10), (6, 14)):
        run = make_log(tmp_path, Clock(), first, track=("tensorboard", "wandb"))
        run.clock.switch("steps")
        for step in range(first + 1, last + 1):
            record(run, step, 10.0 - step, save_ms=7.0)
            if step % 3 == 0:
                run.add(step, sample=f"text {step} of {last}\n")
    with run:
        pass
    scalars, texts = read_tensorboard(tmp_path)
    for name in ("loss", "tok_per_s", "mem_gib", "save_ms"):
        assert [step for step, _ in scalars[name]] == list(range(1, 15)), name
    assert scalars["loss"] == [(step, 10.0 - step) for step in range(1, 15)]
    assert [step for step, _ in texts["sample"]] == [3, 6, 9, 12] and texts["sample"][2][1] == "text 9 of 14\n"
    (rows,) = FakeWandb.runs.values()  # whose server ignores steps that it has
    assert {r["_step"]: r["loss"] for r in rows[:-1] if "loss" in r} == {step: 10.0 - step for step in range(1, 15)}
    assert rows[-1] == "the end" and read_json(tmp_path / "wandb.json") == {"id": "id-0"}


def test_a_finished_run_is_sent_again_by_itself(tmp_path):
    run = write_run(tmp_path / "run", [3.0, 2.5, 2.0], 100)
    for _ in range(2):
        log.main(["track", run])
    scalars, _ = read_tensorboard(tmp_path / "run")
    assert scalars["loss"] == [(1, 3.0), (2, 2.5), (3, 2.0)] and scalars["tokens"][-1] == (3, 300)


def test_a_tracker_that_fails_is_reported_once_and_stops_nothing(tmp_path, capsys, monkeypatch):
    def fail(record):
        raise ConnectionError("no route")

    start_logging(tmp_path)
    run = make_log(tmp_path, Clock())
    run.trackers = [log.Tracker("wandb", fail, lambda: None)]
    run.clock.switch("steps")
    for step in range(1, 6):
        record(run, step)
    shown = capsys.readouterr().out
    start_logging(None)
    assert shown.count("--track wandb fails; the run continues without it: ConnectionError: no route") == 1
    assert shown.count("Batch") == 5


def test_trackers_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    assert parse_args(["--track", "tensorboard,wandb"]).track == ("tensorboard", "wandb")
    with pytest.raises(errors.UserError, match="expected tensorboard or wandb"):
        refuse_unusable(["mlflow"])
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(errors.UserError, match="--track tensorboard: .*tensorboard"):
        log.open_tracker("tensorboard", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.UserError, match="-m pip install wandb"):
        refuse_unusable(["wandb"])


# ---- --profile


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
    profiled, plain = ([(r["loss"], r["grad_norm"]) for r in step_records(f)] for f in (run, tmp_path / "plain"))
    assert profiled == plain


def test_too_few_steps_are_refused():
    with pytest.raises(errors.UserError, match="--profile 3 needs at least --steps 6"):
        parse_args(["--steps", "5", "--profile", "3"])


# ---- the slow rank

FLAGS = "--tokenizer bytes --compile none --seq_len 64 --eval_every 0 --log_every 5 --model tiny-llama"
# Trains; rank 1 sleeps in each step from SLOW on.
SLOWED = """
import sys, time
import train
slow, words = int(sys.argv[1]), sys.argv[2:]
steps, sync = 0, train.shard.sync_gradients

def sync_slowly(model, last, reshard):
    global steps
    steps += 1
    if train.os.environ["RANK"] == "1" and steps >= slow:
        time.sleep(0.2)
    sync(model, last, reshard)

train.shard.sync_gradients = sync_slowly
train.main(words)
"""


def train_slowly(folder, text: str, slow: int, steps: int, *more: str) -> list[dict]:
    """Records of steps. slow: the step from which rank 1 of two sleeps."""
    words = [*FLAGS.split(), "--data", text, "--out", str(folder), "--steps", str(steps), *more]
    done = run_code(SLOWED, ["train.py", str(slow), *words], ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record] + [done.stdout]


@pytest.mark.parametrize("shard_size", ["0", "1"])
def test_a_slow_rank_is_named_within_two_records(tmp_path, text, shard_size):
    """From step 11 on: the record of step 15 suspects it, that of step 20 says it."""
    *records, screen = train_slowly(tmp_path / "run", text, 11, 25, "--shard_size", shard_size)
    for record in records[-2:]:
        assert re.search(r"/rank 1 \+\d+% \(data \d+ ms, compute \d+ ms\)", record["slowest"])
    assert [record["step"] for record in records] == [1, 5, 10, 15, 20, 25]
    assert f", slowest {records[-1]['slowest']}" in screen


@pytest.mark.slow
def test_nobody_is_named_on_an_even_run(tmp_path, text):
    *records, _ = train_slowly(tmp_path / "run", text, 10**9, 200, "--log_every", "10")
    assert not [record["slowest"] for record in records if "slowest" in record] and len(records) == 21


def times(*busy: float, wait: float = 0.0) -> list[Times]:
    return [Times(f"node{i // 2}", 2.0, ms - 2.0, wait) for i, ms in enumerate(busy)]


def test_beyond_a_tenth_of_the_median():
    even = times(100, 105, 109, 100)
    assert find_slow(even) is None and find_slow(even[::-1]) is None and find_slow(times(0, 0)) is None
    assert find_slow(times(100, 101, 99, 100, 98, 114)) == (5, "node2/rank 5 +14% (data 2 ms, compute 112 ms)")
    assert find_slow(times(1100, 1210))[0] == 1 and find_slow(times(1210, 1100))[0] == 0  # of two, of the faster
    late = Times("a", 30.0, 98.0, 0.0)  # its data are late
    assert find_slow([*times(100, 100), late]) == (2, "a/rank 2 +28% (data 30 ms, compute 98 ms)")


def test_the_cost_of_collectives_is_not_waiting():
    assert find_slow([Times("a", 0.0, 50.0, 20.0), Times("a", 0.0, 65.0, 5.0)])[1].startswith("a/rank 1 +27% (data 0")
