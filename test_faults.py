"""Faults: saves that are killed anywhere, and runs that are killed, stopped or cut off, or meet what is no number. The
oracle is the state that was saved, and the run to which nothing happened."""

import contextlib
import errno
import itertools
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch

import checkpoint
import model
import train
from base import errors
from base.disk import read_json
from hf import weights
from hf.weights import load_model
from job.test_job import wait_until
from model import Transformer
from optim import AdamW
from test_checkpoint import SMALL, make_state, replace_shard, rewrite, save
from test_shard import ROOT, run_code, skip_plots
from test_train import metrics, values

# ---- a save that is killed


CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate")  # Python's audit events


def die_at(n: int) -> None:
    """From now on this process ends before its n-th change of what is on the disk."""
    count = itertools.count(1)

    def hook(event: str, args: tuple) -> None:
        changes = event in CHANGES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and next(count) == n:
            os._exit(9)

    sys.addaudithook(hook)


def in_child(work) -> int:
    """Runs work() in a fork of this process -> its exit status."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException as e:
            print(repr(e), file=sys.__stderr__)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def content(folder: Path) -> tuple:
    manifest = checkpoint.read_manifest(folder)
    return manifest | {"config": manifest["config"] | {"keep": 0}}, (folder / "rank-00000.safetensors").read_bytes()


WHOLE = [(3, 7), *(pytest.param(whole, 1, marks=pytest.mark.slow) for whole in (3, 0))]


@pytest.mark.parametrize("whole, every", WHOLE)
def test_a_save_killed_between_two_operations_leaves_the_old_state_or_the_new_one(tmp_path, monkeypatch, whole, every):
    """So many steps are saved whole; the next one, which is damaged if any was, is saved and killed at operation 1, 2,
    ... until it survives. With --keep 3, the first save makes the folder and the fourth removes the oldest step."""
    run, start, truth, damaged = tmp_path / "run", tmp_path / "start", {}, None
    config, model, optimizer = make_state(run, *SMALL, "--keep", "3")
    for step in range(1, whole + 2):  # the state is the same: what differs is the manifest
        folder = save(run, step, model, optimizer, {"samples": step}, replace(config, keep=9))
        truth[step] = content(folder)
    shutil.rmtree(folder)
    if whole:
        shutil.copytree(checkpoint.step_folder(run, whole), folder)
        damaged = (folder / "manifest.json").read_bytes()
    else:
        folder.parent.rmdir()
    loss = truth[1][0]["probe"]["loss"]
    monkeypatch.setattr(checkpoint, "probe_loss", lambda *_: loss)  # OpenMP's threads do not survive a fork
    shutil.move(run, start)
    for n in range(1, 1000, every):
        shutil.copytree(start, run)
        to_be_saved = (run, whole + 1, model, optimizer, {"samples": whole + 1}, config)
        ended = in_child(lambda n=n: (die_at(n), save(*to_be_saved, start=whole)))  # noqa: B023
        assert ended in (0, 9), n
        found, skipped = checkpoint.find(config)
        step = found.step if found else 0
        assert step in (whole, whole + 1)[not ended :], n
        assert len(skipped) == (step == whole and folder.exists())
        for kept in checkpoint.folders(run):
            if step == whole and kept == folder:
                assert (kept / "manifest.json").read_bytes() == damaged, n
            else:
                assert content(kept) == truth[checkpoint.step_of(kept)], n
        enough = {max(step - i, 0) for i in range(3)} - {0}
        assert {*map(checkpoint.step_of, checkpoint.folders(run))} >= enough
        checkpoint.clean(run)
        left = {re.sub(r"damaged\d*", "damaged", p.name) for p in run.glob("checkpoints/*")}
        assert left <= {f"{folder.name}.damaged", *(f"step-{i:08d}" for i in range(1, whole + 2))}, left
        shutil.rmtree(run)
        if not ended:
            break
    assert n > 6  # operations that a save consists of
    assert len(left) == min(3, whole + 1), left


# ---- runs in this process

TINY = [*SMALL, "--compile", "none", "--dtype", "fp32", "--micro_batch", "2", "--eval_every", "0", "--log_every", "1"]
TINY += ["--warmup_steps", "0", "--schedule", "constant", "--lr", "0.01"]


@pytest.fixture
def run_here(monkeypatch, text, capsys):
    """run_here(out, *flags, status=its exit status) -> what was said on stderr and stdout"""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    skip_plots(monkeypatch.setattr)

    def run(out: Path, *flags, status: int = 0) -> str:
        ended = errors.exit_status(train.main, [*TINY, "--data", text, "--out", str(out), *map(str, flags)])
        out_text, err_text = capsys.readouterr()
        assert ended == status, err_text
        assert "Traceback" not in err_text, err_text
        assert err_text.count("error: ") == bool(status), err_text
        assert not (out / "lock").exists()
        return err_text + out_text

    yield run
    signal.set_wakeup_fd(-1)


def assert_ended(run: Path, state: str, message: str) -> None:
    """Of status.json; message: a regular expression."""
    status = read_json(run / "status.json")
    exit_code = {"finished": 0, "stopped": 0, "error": 2, "failed": 1}[state]  # the table in guide/6
    assert (status["state"], status["exit_code"]) == (state, exit_code), status
    assert re.search(message, status["message"]), status


def losses(run: Path) -> list[tuple]:
    """[(step, loss)] of every record"""
    return [(r["step"], r["loss"]) for r in metrics(run) if "loss" in r]


def weights_of(run: Path, step: int) -> list[bytes]:
    """Of a checkpoint, the files of all ranks."""
    return [p.read_bytes() for p in sorted(checkpoint.step_folder(run, step).glob("*.safetensors"))]


def break_losses(monkeypatch, steps, value: float = float("inf")) -> None:
    """The loss of those forward passes of the process, from 1, is no number; one of a run's steps each."""
    forward, count = Transformer.forward, itertools.count(1)

    def broken(self, *args, **more):
        out = forward(self, *args, **more)
        return (out[0] * value, out[1]) if self.training and more and next(count) in steps else out

    monkeypatch.setattr(Transformer, "forward", broken)


def leave_out(monkeypatch, steps: set[int]) -> None:
    """The optimizer of the process does not update in those steps."""
    step, count = AdamW.step, itertools.count(1)

    def step_others(self, *args, **how) -> None:
        if next(count) not in steps:
            return step(self, *args, **how)
        for p in self.state:
            p.grad = None

    monkeypatch.setattr(AdamW, "step", step_others)


def full(*_) -> None:
    """A write, when the disk is full."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_non_finite_loss_stops_the_run_and_saves_nothing(tmp_path, run_here, monkeypatch):
    """After a resume, the losses and weights are those of the uninterrupted run."""
    flags = ["--steps", 8, "--save_every", 3, "--keep", 9]
    run_here(tmp_path / "whole", *flags)
    with monkeypatch.context() as m:
        break_losses(m, {6})
        output = run_here(tmp_path / "run", *flags, status=1)
    assert "Step 6: the loss is not finite" in output
    assert f"(summed loss: inf on rank 0 on {platform.node()})" in output
    assert f"`python data.py show --run {tmp_path / 'run'} --step 6` prints its rows" in output
    assert_ended(tmp_path / "run", "failed", "Step 6:")
    assert [checkpoint.step_of(p) for p in checkpoint.folders(tmp_path / "run")] == [3]
    run_here(tmp_path / "run", *flags)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert weights_of(tmp_path / "run", 8) == weights_of(tmp_path / "whole", 8)


def test_steps_that_are_skipped_leave_no_trace_and_ten_in_a_row_end_the_run(tmp_path, run_here, monkeypatch):
    flags = ["--on_nonfinite", "skip", "--steps", 20, "--eval_every", 10, "--eval_batches", 1]
    with monkeypatch.context() as m:  # the oracle: those updates left out of an optimizer that knows of no guard
        left_out = {3, 4, 10, 20}
        leave_out(m, left_out)
        run_here(tmp_path / "whole", *flags)
    with monkeypatch.context() as m:
        break_losses(m, left_out, float("nan"))
        output = run_here(tmp_path / "run", *flags)
    assert [output.count(f"updates skipped in a row: {n}.") for n in (1, 2, 3)] == [3, 1, 0]
    got, want = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert got == [(step, None if step in left_out else loss) for step, loss in want]
    assert weights_of(tmp_path / "run", 20) == weights_of(tmp_path / "whole", 20)
    with monkeypatch.context() as m:  # every second step is counted anew
        break_losses(m, {*range(1, 6, 2), *range(7, 17)})
        output = run_here(tmp_path / "many", *flags[:4], "--save_every", 3, status=1)
    assert re.search("Step 16: .*in a row: 10", output)
    found = checkpoint.Checkpoint(checkpoint.step_folder(tmp_path / "many", 15))
    assert found.read("step.norm.weight", ()) == 3
    assert found.manifest["position"]["samples"] == 30


def test_spikes_are_skipped_as_if_left_out_and_a_resume_finds_the_same(tmp_path, run_here, monkeypatch):
    """Eleven in a row do not count towards the limit of skips that are not finite."""
    spikes = {70, *range(80, 91), 96}
    flags = ["--log_every", 5, "--save_every", 75, "--keep", 9]
    with monkeypatch.context() as m:
        leave_out(m, spikes)
        run_here(tmp_path / "whole", *flags, "--steps", 100)
    skips = [*flags, "--skip_spikes", 20]
    for run, steps in (("once", 100), ("twice", 83), ("twice", 100)):
        with monkeypatch.context() as m:
            done = 83 * (tmp_path / "twice").exists() * (run == "twice")
            break_losses(m, {step - done for step in spikes}, 1e4)
            output = run_here(tmp_path / run, *skips, "--steps", steps)
    assert output.count("is a spike for --skip_spikes 20 (summed loss: ") == 8
    counts = {r["step"]: r["skipped"] for r in metrics(tmp_path / "once") if "skipped" in r}
    assert counts == {step: {70: 1, 80: 1, 85: 5, 90: 5, 100: 1}.get(step, 0) for step in (1, *range(5, 101, 5))}
    assert weights_of(tmp_path / "once", 100) == weights_of(tmp_path / "whole", 100)
    assert weights_of(tmp_path / "twice", 100) == weights_of(tmp_path / "once", 100)
    states = [checkpoint.Checkpoint(checkpoint.step_folder(tmp_path / run, 100)).manifest["spikes"]
              for run in ("once", "twice")]  # fmt: skip
    assert states[0] == states[1] and [len(states[0]), len(states[0][0])] == [100 - len(spikes), 2]


@pytest.mark.parametrize("flag, owner, work", [
    ("--log_every", train.Log, "step"), ("--eval_every", train, "evaluate"), ("--sample_every", train, "write_samples"),
    ("--save_every", checkpoint.Saver, "save"),
])  # fmt: skip
def test_nothing_of_the_step_after_a_bad_one_is_kept(tmp_path, run_here, monkeypatch, flag, owner, work):
    """Its update may be applied before the host reads the flag of the step before."""
    original, steps = getattr(owner, work), []
    monkeypatch.setattr(owner, work, lambda *a: (steps.append(a), original(*a))[1])
    break_losses(monkeypatch, {5})
    every = {name: 0 for name in ("--eval_every", "--sample_every", "--save_every")} | {"--log_every": 99, flag: 6}
    output = run_here(tmp_path / "run", "--steps", 9, *itertools.chain.from_iterable(every.items()), status=1)
    assert "Step 5: the loss is not finite" in output
    assert len(steps) == (flag == "--log_every")  # step 1 is always recorded


# ---- the best checkpoint


def test_the_best_checkpoint_is_kept_and_exported_and_patience_ends_the_run(tmp_path, run_here, monkeypatch):
    """In the order of the evaluations: their losses, with NaN; the steps that are left, the best of them first."""
    run, losses = tmp_path / "run", []
    monkeypatch.setattr(train, "evaluate", lambda *_: {"val_loss": losses.pop(0)})
    flags = ["--eval_every", 2, "--save_every", 5, "--keep_best", "val_loss", "--steps", 20, "--schedule", "wsd"]

    def check(output: str, best: int, *newest: int) -> None:
        assert losses == [] and f"hf/ gets step {best}: " in output
        assert [checkpoint.step_of(folder) for folder in checkpoint.folders(run)] == [best, *newest]
        saved = checkpoint.Checkpoint(checkpoint.step_folder(run, best))
        exported = load_model(run / "hf").norm.weight
        assert torch.equal(exported, saved.read("model.norm.weight", (slice(None),)))

    losses += [5.0, 4.0, math.nan, 4.5, 4.2]
    output = run_here(run, *flags, "--patience", 3)
    check(output, 4, 5, 10)
    reason = "--patience 3: no better val_loss since step 4"
    assert_ended(run, "finished", reason)
    assert read_json(checkpoint.step_folder(run, 10) / "manifest.json")["best"]["reason"] == reason
    assert "At step 4 --lr had not begun to decay" in output
    before = metrics(run)
    for more in ([], ["--check"]):
        output = run_here(run, *flags, "--patience", 3, *more)
        assert f"after step 10 ({reason}), with the weights of step 4 in" in output
        assert "continues with --patience 0\n" in output
    assert '"state": "finished"' in output and metrics(run) == before
    assert "with --steps 20 --patience 0\n" in run_here(run, *flags, "--patience", 3, "--steps", 10)
    shutil.rmtree(run / "hf")  # the export was interrupted
    (run / "status.json").unlink()
    check(run_here(run, *flags, "--patience", 3), 4, 5, 10)
    losses += [4.1, 3.9, 3.95]
    check(output := run_here(run, *flags, "--steps", 16), 14, 15, 16)
    assert "had not begun" not in output
    assert_ended(run, "finished", "best val_loss at step 14")
    shutil.rmtree(checkpoint.step_folder(run, 14))
    losses += [9.0, 9.5]
    output = run_here(run, *flags, "--schedule", "constant", "--resume_override", "schedule")
    check(output, 18, 20)
    assert "had not begun" not in output  # it never does
    shutil.rmtree(run / "hf")
    (run / "status.json").unlink()
    (checkpoint.step_folder(run, 18) / "rank-00000.safetensors").write_bytes(b"")
    output = run_here(run, *flags, "--schedule", "constant", "--resume_override", "schedule")
    assert "step-00000018, the best by val_loss, is damaged" in output
    last = checkpoint.Checkpoint(checkpoint.step_folder(run, 20)).read("model.norm.weight", (slice(None),))
    assert torch.equal(load_model(run / "hf").norm.weight, last)


# ---- a checkpoint that proves itself


def test_what_is_loaded_must_have_the_loss_that_was_saved(tmp_path, run_here, monkeypatch):
    """Values that changed under right checksums, and code that computes something else. Twenty steps make the layers
    differ enough."""
    flags = ["--steps", 20, "--model", "tiny-llama3.2", "--dim", 32, "--n_layers", 2, "--seq_len", 32]
    run_here(tmp_path / "run", *flags)
    more = [*flags, "--steps", 21]

    def refused(run: Path) -> None:
        output = run_here(run, *more, status=2)
        assert re.search(r"probe was \d\.\d+ at the save and is \d+\.\d+ now", output), output

    shutil.copytree(tmp_path / "run", tmp_path / "swapped")
    folder = checkpoint.step_folder(tmp_path / "swapped", 20)
    path, (a, b) = folder / "rank-00000.safetensors", (f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1))
    tensors = safetensors.torch.load_file(path)
    replace_shard(folder, safetensors.torch.save(tensors | {a: tensors[b], b: tensors[a]}))
    assert checkpoint.fault_of(folder) == ""
    refused(tmp_path / "swapped")
    with monkeypatch.context() as m:
        m.setattr(model, "apply_rope", lambda x, rope: x)
        refused(tmp_path / "run")
    for change in (["--attention", "sdpa"], ["--checkpointing", "block"], ["--fp8", "tensor"]):
        shutil.copytree(tmp_path / "run", tmp_path / change[1])
        run_here(tmp_path / change[1], *more, *change)


# ---- settings


def test_settings_that_may_change_and_those_that_are_overridden(tmp_path, run_here):
    run = tmp_path / "run"
    run_here(run, "--steps", 3)
    other = ["--log_every", 2, "--save_every", 2, "--eval_every", 2, "--eval_batches", 1, "--keep", 3]
    other += ["--micro_batch", 1, "--batch_tokens", 32]
    run_here(run, "--steps", 5, *other)
    run_here(run, "--steps", 4, *other)  # nothing is left to do
    tuned = ["--steps", 8, "--lr", 0.02, "--warmup_steps", 2]
    for flags, messages, absent in (
        ([*tuned, "--seed", 1], ["--lr was 0.01, is 0.02", "--seed was 0, is 1", "--warmup_steps was 0.0"], "override"),
        (tuned, ["--resume_override lr,warmup_steps accepts the new values"], "--seed"),
        ([*tuned, "--resume_override", "lr"], ["--warmup_steps was"], "--lr was"),
        (["--resume_override", "lr,seed"], ["--resume_override seed: expected lr,"], "was"),
    ):
        output = run_here(run, *flags, status=2)
        assert [message for message in messages if message not in output] == [], output
        assert absent not in output
    run_here(run, *tuned, "--resume_override", "lr,warmup_steps")
    rewrite(checkpoint.folders(run)[-1], lambda m: [m["config"].pop(flag) for flag in ("seed", "lr")])  # newer flags
    output = run_here(run, *tuned, status=2)
    assert "--lr was 0.0003, is 0.02" in output
    assert "--seed" not in output
    rewrite(checkpoint.folders(run)[-1], lambda m: m["config"].update(seed=0, lr=0.02))
    run_here(run, *tuned, "--steps", 9)  # the checkpoint has the new ones
    recorded = "Continuing with other settings, [old, new]: {'lr': [0.01, 0.02], 'warmup_steps': [0.0, 2.0]}"
    assert (run / "log.txt").read_text().count("Continuing with") == (run / "log.txt").read_text().count(recorded) == 1


@pytest.mark.parametrize("mode, failures, saved", [
    ("off", [1], [5, 10, 12]), ("off", [1, 2], [10, 12]), ("off", [1, 2, 3], []), ("off", [2, 3], [5, 12]),
    ("off", [3, 4], [5, 10, 12]), ("off", [3, 4, 5], [5, 10]), ("on", [1, 2, 3], []),
])  # fmt: skip
def test_a_failed_save_is_repeated_soon_and_when_one_is_due(tmp_path, run_here, monkeypatch, mode, failures, saved):
    """The third failure in a row ends the run at once, also of saves in the background. The last save is tried three
    times by itself."""
    write, count = checkpoint.write_file, itertools.count(1)
    monkeypatch.setattr(checkpoint, "PAUSE", 0)
    monkeypatch.setattr(checkpoint, "write_file", lambda *a: full() if next(count) in failures else write(*a))
    flags = ["--save_every", 5, "--save_async", mode, "--steps", 12, "--keep", 9]
    run_here(tmp_path / "run", *flags, status=int(len(failures) > 2))
    names = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in saved]
    if len(failures) > 2:
        assert_ended(tmp_path / "run", "failed", "Saves that have failed in a row: 3 of 3: the disk is full")
        assert read_json(tmp_path / "run/status.json")["step"] == (11 if saved else 9)


def test_a_save_that_cannot_remove_old_checkpoints_is_on_disk(tmp_path, run_here, monkeypatch):
    remove, refusals = checkpoint.remove_old, [full] * 3
    monkeypatch.setattr(checkpoint, "remove_old", lambda *a: refusals.pop()() if refusals else remove(*a))
    output = run_here(tmp_path / "run", "--save_every", 2, "--save_async", "off", "--steps", 6)
    assert output.count("Old checkpoints stay until the next save: ") == 3 and "in a row" not in output
    assert [checkpoint.step_of(p) for p in checkpoint.folders(tmp_path / "run")] == [2, 4, 6]
    run_here(tmp_path / "run", "--steps", 7)
    assert [checkpoint.step_of(p) for p in checkpoint.folders(tmp_path / "run")] == [6, 7]


OUTAGE = """
def fail_disk(part, code, ends):  # until ends(), for paths with that part
    lstat = os.lstat
    def refuse(path):
        if not ends() and part in str(path):
            raise OSError(code, os.strerror(code), str(path))
    sys.addaudithook(lambda event, args: event in EVENTS and refuse(args[0]))
    os.lstat = lambda path, **how: (refuse(path), lstat(path, **how))[1]
EVENTS = {"open", *(f"os.{name}" for name in "rename remove mkdir rmdir utime scandir listdir truncate".split())}
"""
DAMAGED = {  # a kind of file, what the log says once
    "/run/lock": "run/lock cannot be renewed",
    "/run/status": "status.json fails and",
    "/run/metrics": "metrics.jsonl fails and",
    "/run/samples": "samples.txt fails and",
    "/run/log.txt": "log.txt fails and",
    "/run/tensorboard": "--track tensorboard fails and",
    "/run/curves": "",
    "/run/checkpoints": "in a row: 1 of 3: ",
    "/run/": "metrics.jsonl fails and",
}


OUTAGES = [(files, 8) for files in [*DAMAGED][:-1]] + [("/run/", 98)]


@pytest.mark.parametrize("files, first", [*(pytest.param(*o, marks=pytest.mark.slow) for o in OUTAGES), ("/run/", 8)])
def test_a_disk_that_fails_for_a_while_costs_nothing(tmp_path, text, run_here, files, first):
    """For fifty steps from `first` on, or in the last save and the end. A checkpoint may be missing, but nothing
    else."""
    code = f"""{OUTAGE}
from base import background, disk; from job import watchdog
background.PAUSES, disk.LEASE, watchdog.BEAT, checkpoint.PAUSE, works = (1.0,), 0.5, 0.05, 5, []
at_step({first}, lambda: fail_disk({files!r}, {errno.ESTALE}, lambda: works))
at_step({first} + 50, lambda: works.append(True))
at_step(99, threading.Timer(6, works.append, [True]).start)
{SLOWER.format(0.02)}"""
    run = tmp_path / "run"
    flags = ["--save_every", 40, "--sample_every", 5, "--track", "tensorboard", "--eval_every", 40]
    run_job(run, text, *flags, "--steps", 100, code=code)
    assert_ended(run, "finished", "")
    log = (run / "log.txt").read_text()
    assert log.count(DAMAGED[files]) == 1 or not DAMAGED[files], log
    assert [step for step, _ in losses(run)] == [*range(1, 101)]
    assert [*map(int, re.findall("--- step (.*)", (run / "samples.txt").read_text()))] == [*range(5, 101, 5)]
    assert [step for step, *_ in checkpoint.verify(run)] == [80, 100]
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(run / "tensorboard")).Reload().Scalars("loss")
    assert {event.step: event.value for event in shown} == pytest.approx(dict(losses(run)))
    assert len(shown) == 100
    run_here(run, "--steps", 101, *flags[:2])


# ---- storage


def test_an_export_that_was_cut_short_is_made_up_for(tmp_path, run_here, monkeypatch):
    """A full disk at the end: the checkpoint is safe, and the same command writes hf/."""
    run = tmp_path / "run"
    with monkeypatch.context() as m:
        m.setattr(weights, "write_file", full)
        assert "the disk is full" in run_here(run, "--steps", 1, status=1)
    assert not (run / "hf").exists()
    assert '"state": "resume"' in run_here(run, "--steps", 1, "--check")
    assert f"{run}/hf" in run_here(run, "--steps", 1)
    assert [p.name for p in run.glob("hf*")] == ["hf"]
    assert_ended(run, "finished", "")
    assert load_model(run / "hf").config.vocab_size == 258


def test_a_run_folder_that_vanishes_or_cannot_be_used_is_named(tmp_path, run_here, monkeypatch):
    write, gone = train.Log.step, tmp_path / "gone"  # at once: a save may be on
    with monkeypatch.context() as m:
        m.setattr(
            train.Log, "step", lambda log, n, *a: (n == 4 and log.file.path.parent.rename(gone), write(log, n, *a))
        )
        output = run_here(tmp_path / "run", "--steps", 9, "--save_every", 2, status=1)
    assert f"No such file or directory: '{tmp_path / 'run'}/" in output
    assert not (tmp_path / "run").exists()
    run_here(tmp_path / "refused", "--data", tmp_path / "absent.txt", status=2)
    assert not (tmp_path / "refused").exists()
    with monkeypatch.context() as m:  # a mistake that shows later leaves the records
        m.setattr(train.Log, "step", mock.Mock(side_effect=[None, errors.UserError("a bad row")]))
        run_here(tmp_path / "late", "--steps", 9, status=2)
    assert_ended(tmp_path / "late", "error", "a bad row")


# ---- runs of their own

JOB = """
import itertools, os, pathlib, signal, sys, threading, time
sys.path.insert(0, {root!r})
import checkpoint, log, shard, train
from base import errors; from job import job as guard
import torch
log.peak_flops, log.Log.draw = (lambda *_: (1e12, "not measured")), (lambda *_, **__: None)  # as test_shard.skip_plots
RANK = int(os.environ.get("RANK", 0))

def at_step(n, do):  # with the data of that step
    clock, count = guard.Clock.phase, itertools.count(1)
    guard.Clock.phase = lambda self, name: (name == "data" and next(count) == n and do(), clock(self, name))[1]

{code}
errors.run_script(train.main)
"""


def run_job(out: Path, text: str, *flags, ranks: int = 2, code: str = "", fails: bool = False) -> str:
    """Trains on so many ranks, with code of a fault in them -> what was said on stderr"""
    words = [*TINY, "--data", text, "--out", out, *flags]
    done = run_code(JOB.format(root=str(ROOT), code=code), ["train.py", *map(str, words)], ranks)
    assert bool(done.returncode) == fails, done.stderr
    return done.stderr


SLOWER = "rate = train.learning_rate\ntrain.learning_rate = lambda *a: time.sleep({}) or rate(*a)"


def test_a_run_that_is_stopped_or_killed_goes_on_and_computes_the_same(tmp_path, text, run_here):
    """Stopped by a signal, which saves, and killed in the save after the next step."""
    flags = ["--save_every", 2, "--steps", 12, "--eval_every", 5, "--eval_batches", 1]
    a_signal = "at_step(7, lambda: os.kill(os.getpid(), 15) or time.sleep(1))"
    in_a_save = "checkpoint.write_file = lambda *a: os.kill(os.getpid(), 9)"
    run_job(tmp_path / "run", text, *flags, ranks=1, code=a_signal)
    assert_ended(tmp_path / "run", "stopped", "by SIGTERM")
    assert "Stopped by SIGTERM after step 7" in (tmp_path / "run/log.txt").read_text()
    run_job(tmp_path / "run", text, *flags, ranks=1, code=in_a_save, fails=True)
    for name in ("run", "whole"):
        run_here(tmp_path / name, *flags)
    assert values(tmp_path / "run") == values(tmp_path / "whole")
    assert [*values(tmp_path / "run")] == [*range(1, 13)]
    assert weights_of(tmp_path / "run", 12) == weights_of(tmp_path / "whole", 12)


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_computes_the_same(tmp_path, text):
    """kill -9 of any rank or of torchrun at random moments, in saves, too: each step once, with the same bits. The
    others then stop by themselves."""
    rng, flags, run, done = random.Random(0), ["--steps", 400, "--save_every", 3], tmp_path / "run", 0
    run_job(tmp_path / "truth", text, *flags)
    (tmp_path / "killed.py").write_text(JOB.format(root=str(ROOT), code=SLOWER.format(0.003)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    words = [*map(str, (*torchrun, tmp_path / "killed.py", *TINY, "--data", text, "--out", run, *flags))]
    words += ["--cache", str(tmp_path / "cache")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    while done < 30:
        before = read_json(run / "status.json")
        job = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=env)
        ready, steps = rng.random() < 0.2, rng.randint(1, 11)  # a fifth of them at their start
        while not ready and job.poll() is None:
            time.sleep(0.02)
            now = read_json(run / "status.json")
            ready = now.get("attempt") != before.get("attempt") and now["step"] >= before.get("step", 0) + steps
        time.sleep(rng.random() * 0.3)
        victims = [job.pid]
        if job.poll() is None:
            victims += map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGKILL)
                done += 1
        job.wait(120)
        wait_until(lambda: not any(map(lives, victims)))  # noqa: B023
        assert all(intact for _, intact, _ in checkpoint.verify(run))
        if read_json(run / "status.json").get("state") == "finished":
            break
    run_job(run, text, *flags)
    assert done >= 3
    assert losses(run) == losses(tmp_path / "truth")
    assert [step for step, _ in losses(run)] == [*range(1, 401)]
    assert weights_of(run, 400) == weights_of(tmp_path / "truth", 400)


FLIP = """
made, build = [], train.build
train.build = lambda *args: made.append(build(*args)) or made[0]
def flip():
    if RANK == 1:
        parameter = __import__("base.tensors").tensors.local(next(made[0].parameters()).detach())
        parameter.view(torch.int32).view(-1)[7] ^= 1
at_step(6, flip)
"""


FLIPS = [(3, 1), *(pytest.param(*p, marks=pytest.mark.slow) for p in [(2, 1), (4, 2)])]


@pytest.mark.parametrize(("ranks", "size"), FLIPS)
def test_replicas_that_differ_by_a_bit_are_found_and_not_saved(tmp_path, text, ranks, size):
    """Of three the one is named, of two both are."""
    flags = ["--steps", 30, "--shard_size", size, "--save_every", 5, "--keep", 9]
    output = run_job(tmp_path / "run", text, *flags, ranks=ranks, code=FLIP, fails=True)
    named = {2: "rank 0 on {0} | rank 1 on {0}. ", 3: "rank 1 on {0} | rank 0 ", 4: "rank 1 on {0} | rank 3 on {0} | "}
    assert output.count("error: After step 10 not all copies") == 1, output
    assert f"the odd ones out first: {named[ranks].format(platform.node())}" in output, output
    assert [p.name for p in checkpoint.folders(tmp_path / "run")] == ["step-00000005"]


BEHIND = r"rank 1 on \S+ is behind: its last step was 4"
HANGS = {  # code, ranks, what the message says
    "data": ("at_step(5, lambda: RANK == 1 and time.sleep(300))", 2, BEHIND),
    "stopped": ("at_step(5, lambda: RANK == 1 and os.kill(os.getpid(), signal.SIGSTOP))", 2, "rank 1 does not answer"),
    "start": ("shard.make_mesh = lambda *a: time.sleep(300)", 1, r"After step 0: .* \d+ s .*in phase 'start'"),
    "compile": ("at_step(1, lambda: RANK or time.sleep(300))", 2, r"rank 0 on \S+ is behind: .* 0, it is in 'compile'"),
    "saves": ("checkpoint.write_file = lambda *a: time.sleep(300)", 1, r"After step 2: .* \d+ s .*in phase 'saves'"),
}


@pytest.mark.parametrize("kind", ["data", *(pytest.param(k, marks=pytest.mark.slow) for k in [*HANGS][1:])])
def test_a_hang_is_named_within_the_limit(tmp_path, text, kind):
    code, ranks, named = HANGS[kind]
    flags = ["--steps", 30, "--timeout", 3, "--save_every", 3, "--save_async", "off"]
    output = run_job(tmp_path / "run", text, *flags, ranks=ranks, code=f"guard.LONG = 6\n{code}", fails=True)
    assert re.search(named, output), output
    assert_ended(tmp_path / "run", "failed", named)
    stacks = re.findall(r'train\.py", line \d+ in train$', output, re.M)
    assert len(stacks) == ranks - (kind == "stopped"), output


@pytest.mark.slow
def test_a_second_signal_stops_at_once_even_in_a_collective(tmp_path, text):
    """Rank 1 sleeps, rank 0 waits for it in C++: no Python signal handler runs there."""
    code = """
from threading import Timer
signals = lambda: [Timer(seconds, os.kill, (os.getpid(), 15)).start() for seconds in (1.0, 3.5)]
at_step(5, lambda: signals() and RANK == 1 and [time.sleep(1) for _ in range(300)])
"""
    run_job(tmp_path / "run", text, "--steps", 30, code=code, fails=True)
    assert_ended(tmp_path / "run", "stopped", "at once")


@pytest.mark.parametrize(("request_text", "message"), [("", "by launch.sh stop"), ("now", "at once")])
def test_a_request_in_the_run_folder_stops_all_ranks(tmp_path, text, request_text, message):
    (tmp_path / "run/logs").mkdir(parents=True)
    code = f"at_step(3, lambda: RANK or pathlib.Path({str(tmp_path / 'run/logs/stop')!r}).write_text({request_text!r}))"
    code = f"{code}\n{SLOWER.format(0.02)}"
    run_job(tmp_path / "run", text, "--steps", 3000, code=code, fails=bool(request_text))
    assert_ended(tmp_path / "run", "stopped", message)
    saved = [checkpoint.step_of(p) for p in checkpoint.folders(tmp_path / "run")]
    assert saved == ([] if request_text else [read_json(tmp_path / "run/status.json")["step"]])
