"""Faults: saves that are killed anywhere, damaged and hostile checkpoints, runs that are killed, stopped or cut off, or
meet what is no number. The oracle is the state that was saved, and the run to which nothing happened."""

import builtins
import errno
import io
import itertools
import json
import math
import os
import pickle
import platform
import re
import shutil
import signal
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import model
import train
from data import write_shard
from errors import UserError
from model import Transformer
from test_checkpoint import make_state, save

ROOT = Path(__file__).parent
SMALL = ["--model", "tiny-llama", "--dim", "16", "--n_heads", "2", "--n_kv_heads", "1", "--n_layers", "1"]
SMALL += ["--ffn_dim", "16", "--seq_len", "16"]


# ---- a save that is killed


def die_at(n: int) -> None:
    """From now on this process ends at its n-th change of what is on the disk, or before an fsync; a write is two."""
    done = [0]

    def tick(*_):
        done[0] += 1
        if done[0] == n:
            os._exit(9)

    def before(name: str) -> None:
        real = getattr(os, name)
        setattr(os, name, lambda *a, **k: tick() or real(*a, **k))

    for name in ("mkdir", "rename", "replace", "fsync", "link", "unlink", "remove", "rmdir"):
        before(name)

    class File:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            tick()
            self.file.close()

        def write(self, data):
            half = len(data) // 2
            self.file.write(data[:half])
            self.file.flush()
            tick()
            self.file.write(data[half:])
            self.file.flush()
            tick()

    real = io.open

    def open_counted(path, mode="r", *args, **options):
        file = real(path, mode, *args, **options)
        return (tick() or File(file)) if set(mode) & set("wax+") else file

    builtins.open = io.open = open_counted


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


@pytest.mark.parametrize("case", ["first", "pruned", "damaged"])
def test_a_save_killed_between_any_two_operations_leaves_the_old_state_or_the_new_one(tmp_path, case):
    """Steps 1 and so on are saved whole, the next one is killed at operation 1, 2, ... until it survives."""
    whole = {"first": 0, "pruned": 3, "damaged": 2}[case]  # --keep 3
    run = tmp_path / "run"
    config, model, optimizer = make_state(run, *SMALL, "--keep", "3")
    truth = {}
    for step in range(1, whole + 2):  # the state is the same: what differs is the manifest
        folder = save(run, step, model, optimizer, {"samples": step}, replace(config, keep=9))
        truth[step] = content(folder)
    shutil.rmtree(folder)
    if case == "damaged":
        shutil.copytree(run / "checkpoints/step-00000002", folder)
    start = tmp_path / "start"
    shutil.move(run, start)
    for n in range(1, 1000):
        shutil.copytree(start, run)
        if not whole:
            shutil.rmtree(run / "checkpoints")
        to_be_saved = (run, whole + 1, model, optimizer, {"samples": whole + 1}, config)
        ended = in_child(lambda n=n: (die_at(n), save(*to_be_saved)))  # noqa: B023
        assert ended in (0, 9), n
        found, skipped = checkpoint.find(config) if whole or checkpoint.folders(run) else (None, [])
        step = found.step if found else 0
        assert step in (whole, whole + 1) and (ended or step == whole + 1), n
        assert len(skipped) == (case == "damaged" and step == whole and folder.exists())
        for kept in checkpoint.folders(run):  # whole, but for the one that was damaged before
            assert (step == whole and kept == folder) or content(kept) == truth[int(kept.name[5:])], n
        enough = {max(step - i, 0) for i in range(3)} - {0}
        assert {int(p.name[5:]) for p in checkpoint.folders(run)} >= enough
        checkpoint.clean(run)
        left = {p.name for p in (run / "checkpoints").iterdir()} if (run / "checkpoints").exists() else set()
        assert left <= {"latest", *(f"step-{i:08d}" for i in range(1, whole + 2))}, left
        shutil.rmtree(run)
        if not ended:
            break
    assert n > 20
    assert len(left) == 1 + min(3, whole + 1), left


# ---- damage


def spoil(path: Path, at: int, bits: int = 1) -> None:
    with open(path, "rb+") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ bits]))


def zero(path: Path, at: int, n: int = 4096) -> None:
    with open(path, "rb+") as f:
        f.seek(at)
        f.write(bytes(min(n, path.stat().st_size - at)))


DAMAGE = {
    "a bit in the header's length": lambda p: spoil(p, 0),
    "a bit in the header": lambda p: spoil(p, 40),
    "a bit in a tensor": lambda p: spoil(p, p.stat().st_size // 2),
    "a page of zeros": lambda p: zero(p, min(8192, p.stat().st_size // 2)),
    "a header of zeros": lambda p: zero(p, 0),
    "cut short": lambda p: os.truncate(p, p.stat().st_size - 1),
    "empty": lambda p: os.truncate(p, 0),
    "longer": lambda p: p.write_bytes(p.read_bytes() + b"\0"),
    "deleted": lambda p: p.unlink(),
    "a folder in its place": lambda p: (p.unlink(), p.mkdir()),
}


@pytest.fixture
def two(tmp_path):
    """A run folder with steps 1 and 2."""
    config, model, optimizer = make_state(tmp_path, *SMALL)
    for step in (1, 2):
        folder = save(tmp_path, step, model, optimizer, {}, config)
    return config, folder


def falls_back(config, folder: Path, capsys) -> str:
    """Asserts that all who look at step 2 name its fault, and that step 1 is taken -> the fault."""
    found, skipped = checkpoint.find(config)
    assert found.step == 1 and len(skipped) == 1 and str(folder) in skipped[0]
    run = Path(config.out)
    assert checkpoint.main(["verify", str(run)]) == 1 and checkpoint.main(["list", str(run)]) == 0
    assert "step 1: whole" in capsys.readouterr().out and checkpoint.newest(run).step == 1
    return checkpoint.fault_of(folder)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_any_file_is_named(two, capsys, kind):
    config, folder = two
    for name in ("rank-00000.safetensors", "manifest.json"):
        kept = (folder / name).read_bytes()
        DAMAGE[kind](folder / name)
        assert name in falls_back(config, folder, capsys)
        if (folder / name).is_dir():
            (folder / name).rmdir()
        (folder / name).write_bytes(kept)
        assert checkpoint.find(config)[0].step == 2
    (Path(config.out) / "checkpoints/latest").write_bytes(b"\xff../../nowhere\n")  # a hint for people only
    assert checkpoint.find(config)[0].step == 2


def test_every_byte_of_a_manifest_counts(two):
    """Changed, it is refused or says the same: e and E in a number, white space."""
    _, folder = two
    path = folder / "manifest.json"
    before, truth = path.read_bytes(), checkpoint.read_manifest(folder)
    refused = 0
    for i in range(len(before)):
        spoil(path, i, 1 << i % 8)
        try:
            assert checkpoint.read_manifest(folder) == truth, i
        except ValueError as e:
            refused += "manifest.json" in str(e)
        spoil(path, i, 1 << i % 8)
    assert refused > 0.99 * len(before) and path.read_bytes() == before


def rewrite(folder: Path, change) -> None:
    """change(manifest), with its checksum made right again."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["crc32"]
    change(manifest)
    path.write_text(json.dumps(manifest | {"crc32": zlib.crc32(json.dumps(manifest).encode())}))


def replace_part(folder: Path, data: bytes) -> None:
    (folder / "rank-00000.safetensors").write_bytes(data)
    rewrite(folder, lambda m: m["files"][0].update(bytes=len(data), crc32=zlib.crc32(data)))


def safetensors(header: str | dict, data: bytes = b"") -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "a pickle": lambda: pickle.dumps(Evil()),
    "torch.save": lambda: (f := io.BytesIO(), torch.save(Evil(), f), f.getvalue())[2],
    "a huge header": lambda: (2**62).to_bytes(8, "little") + b"{}" + bytes(99),
    "a deep header": lambda: safetensors("[" * 100_000),
    "overlapping offsets": lambda: safetensors({"a": ROW, "b": ROW}, bytes(8)),
    "other tensors": lambda: safetensors({"a": ROW}, bytes(8)),
    "no tensors": lambda: safetensors({}),
    "a header that is a list": lambda: safetensors("[]"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_run_no_code_and_are_named(two, capsys, monkeypatch, tmp_path, kind):
    config, folder = two
    monkeypatch.chdir(tmp_path)
    replace_part(folder, HOSTILE[kind]())
    assert "rank-00000.safetensors" in falls_back(config, folder, capsys)
    assert not Path("evil").exists()


def place_of(manifest: dict) -> dict:
    return next(iter(manifest["files"][0]["tensors"].values()))


WRONG = {
    "a path upwards": lambda m: m["files"][0].update(file="../step-00000001/rank-00000.safetensors"),
    "an absolute path": lambda m: m["files"][0].update(file="/etc/passwd"),
    "a name with a line's end": lambda m: m["files"][0].update(file="rank-00000.safetensors\n"),
    "another step": lambda m: m.update(step=1),
    "a hole": lambda m: place_of(m).update(whole=[n + 1 for n in place_of(m)["whole"]]),
    "beyond the end": lambda m: place_of(m).update(start=[5 for _ in place_of(m)["start"]]),
    "another rank": lambda m: place_of(m).update(start=[0]),
    "a part twice": lambda m: m["files"].append(m["files"][0]),
    "another shape": lambda m: [place_of(m).update({k: [1, 1]}) for k in ("shape", "whole")],
    "another dtype": lambda m: place_of(m).update(dtype="bfloat16"),
    "a dtype of none": lambda m: place_of(m).update(dtype="complex"),
    "a tensor more": lambda m: m["files"][0]["tensors"].update(more=place_of(m)),
    "a bool for a number": lambda m: m.update(step=True),
    "a negative size": lambda m: m["files"][0].update(bytes=-1),
}
for key in ("step", "tokens", "updates", "world_size", "position", "probe", "config", "model", "files"):
    WRONG[f"no {key}"] = lambda m, key=key: m.pop(key)
    for value in (None, "x", [1], [[]], {"a": {}}, -1.5):
        WRONG[f"{key} {value}"] = lambda m, key=key, value=value: m.update({key: value})
for key in ("tokens", "loss", "tolerance"):
    WRONG[f"probe's {key}"] = lambda m, key=key: m["probe"].update({key: {"a": 1}})
for key in ("file", "bytes", "crc32", "tensors"):
    WRONG[f"a file's {key}"] = lambda m, key=key: m["files"][0].update({key: [None]})
    WRONG[f"no file's {key}"] = lambda m, key=key: m["files"][0].pop(key)
WRONG = {k: v for k, v in WRONG.items() if k not in ("position {'a': {}}", "config {'a': {}}", "model {'a': {}}")}


def test_a_wrong_manifest_with_a_right_checksum_is_named(two, capsys):
    config, folder = two
    before = (folder / "manifest.json").read_bytes()
    for kind, change in WRONG.items():
        rewrite(folder, change)
        assert falls_back(config, folder, capsys), kind
        (folder / "manifest.json").write_bytes(before)
    for text in ("", "null", "[]", "5", "[" * 100_000, '{"a":' * 100_000, "1" * 5000, '{"format": 2}', "\xff"):
        (folder / "manifest.json").write_text(text, encoding="latin1")
        assert "manifest.json" in falls_back(config, folder, capsys), text
    shutil.rmtree(folder)
    folder.write_text("a file in the place of a folder")
    falls_back(config, folder, capsys)


# ---- runs in this process

TINY = [*SMALL, "--compile", "none", "--dtype", "fp32", "--micro_batch", "2", "--eval_every", "0", "--log_every", "1"]
TINY += ["--warmup_steps", "0", "--schedule", "constant", "--lr", "0.01"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(300)))
    return str(path)


@pytest.fixture
def run_here(monkeypatch, text, capsys):
    """run_here(out, *flags) -> (exit status, what was said on stderr)"""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay

    def run(out: Path, *flags) -> tuple[int, str]:
        try:
            status = train.main([*TINY, "--data", text, "--out", str(out), *map(str, flags)])
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr().err
        assert "Traceback" not in said, said
        assert said.count("error: ") == bool(status), said
        assert not (out / "lock").exists()
        return status, said

    yield run
    signal.set_wakeup_fd(-1)


def losses(run: Path) -> list[tuple]:
    """[(step, loss)] of every record; strict JSON."""

    def refuse(word):
        raise AssertionError(f"{word} in metrics.jsonl")

    records = [json.loads(line, parse_constant=refuse) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in records]


def weights_of(run: Path, step: int) -> list[bytes]:
    """Of a checkpoint, the files of all ranks; without their random states, which nothing draws from."""
    return [p.read_bytes() for p in sorted(checkpoint.step_folder(run, step).glob("*.safetensors"))]


def break_losses(monkeypatch, steps, value: float = float("inf")) -> None:
    """The loss of those forward passes of the process, from 1, is no number; one of a run's steps each."""
    forward, count = Transformer.forward, itertools.count(1)

    def broken(self, *args):
        loss = forward(self, *args)
        return loss * value if self.training and next(count) in steps else loss

    monkeypatch.setattr(Transformer, "forward", broken)


SLOW = [pytest.param(step, 0, marks=pytest.mark.slow) for step in (2, 8)]


@pytest.mark.parametrize(("bad", "save_every"), [(1, 0), (6, 3), (7, 3), *SLOW])
def test_a_loss_that_is_no_number_stops_with_the_state_before_it(tmp_path, run_here, monkeypatch, bad, save_every):
    """In the first step, before and at a save and after one, in the last: the state is the uninterrupted run's."""
    flags = ["--steps", 8, "--save_every", save_every]
    assert run_here(tmp_path / "whole", *flags[:2], "--save_every", 1, "--keep", 9)[0] == 0
    with monkeypatch.context() as m:
        break_losses(m, {bad})
        status, said = run_here(tmp_path / "run", *flags)
    assert status == 1 and f"Step {bad}: the loss of rank 0 on {platform.node()} is inf" in said
    assert said.count("numbers") == 2 and re.search(r"rank 0: \S+ at token \d+", said), said
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["state"] == "failed" and f"Step {bad}:" in status["message"]
    if bad > 1:
        assert (f"The state before it is saved: {checkpoint.step_folder(tmp_path / 'run', bad - 1)}" in said) == (
            (bad - 1) % (save_every or 99) != 0
        )
        assert weights_of(tmp_path / "run", bad - 1) == weights_of(tmp_path / "whole", bad - 1)
    else:
        assert not checkpoint.folders(tmp_path / "run")
    with monkeypatch.context() as m:  # directly after the resume, again
        break_losses(m, {1})
        status, said = run_here(tmp_path / "run", *flags)
        assert status == 1 and f"Step {bad}:" in said
    assert run_here(tmp_path / "run", *flags)[0] == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert weights_of(tmp_path / "run", 8) == weights_of(tmp_path / "whole", 8)


def test_steps_that_are_skipped_leave_no_trace_and_ten_in_a_row_end_the_run(tmp_path, run_here, monkeypatch):
    flags = ["--on_nonfinite", "skip", "--steps", 20, "--eval_every", 10, "--eval_batches", 1]
    with monkeypatch.context() as m:  # the oracle: those updates left out of an optimizer that knows of no guard
        left_out, update, count = {3, 4, 10, 20}, train.update, itertools.count(1)
        m.setattr(train, "update", lambda o, *a: o.zero_grad() if next(count) in left_out else update(o, *a))
        assert run_here(tmp_path / "whole", *flags)[0] == 0
    with monkeypatch.context() as m:
        break_losses(m, left_out, float("nan"))
        assert run_here(tmp_path / "run", *flags)[0] == 0
    got, want = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert got == [(step, None if step in left_out else loss) for step, loss in want]
    assert weights_of(tmp_path / "run", 20) == weights_of(tmp_path / "whole", 20)
    said = (tmp_path / "run/log.txt").read_text()
    assert said.count("Its update is skipped") == 4 and "2 in a row" in said and "rank 0: " in said
    with monkeypatch.context() as m:  # every second step is counted anew, the eleventh is never taken
        break_losses(m, {*range(1, 6, 2), *range(7, 17)})
        status, said = run_here(tmp_path / "many", *flags[:4], "--save_every", 3)
    assert status == 1 and "Step 16: " in said and "10 steps in a row" in said
    manifest = checkpoint.read_manifest(checkpoint.step_folder(tmp_path / "many", 15))
    assert manifest["updates"] == 3 and manifest["position"]["samples"] == 30


def test_a_mixture_a_stream_and_chats_name_their_rows(tmp_path, run_here, monkeypatch, text):
    chats = tmp_path / "chats.jsonl"
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    chats.write_text((json.dumps({"messages": talk}) + "\n") * 20)
    for kind, flags, named in (
        ("mixture", ["--data", f"{text}:1", f"{text}:2"], r"rank 0: \S+ at token"),
        ("stream", ["--data", text, "--stream", "--lanes", 1], r"numbers.txt up to row \d+ \(lane 0, epoch 0\)"),
        ("chats", ["--data", chats, "--seq_len", 64], r"rank 0: \S*chats\S* at token"),
    ):
        with monkeypatch.context() as m:
            break_losses(m, {2})
            status, said = run_here(tmp_path / kind, "--steps", 4, *flags)
        assert status == 1 and re.search(named, said), said
        with monkeypatch.context() as m:
            break_losses(m, {2})
            assert run_here(tmp_path / f"{kind}-skip", "--steps", 4, *flags, "--on_nonfinite", "skip")[0] == 0
        assert [loss is None for _, loss in losses(tmp_path / f"{kind}-skip")] == [False, True, False, False]


# ---- a checkpoint that proves itself


def swap(folder: Path, a: str, b: str) -> None:
    """Two tensors of one shape change places, under right checksums."""
    path = folder / "rank-00000.safetensors"
    entries = checkpoint.TensorFile(path).entries
    data = bytearray(path.read_bytes())
    (x, y), n = (entries[name].offset for name in (a, b)), 4 * math.prod(entries[a].shape)
    assert entries[a].shape == entries[b].shape
    data[x : x + n], data[y : y + n] = data[y : y + n], data[x : x + n]
    replace_part(folder, bytes(data))


def test_what_is_loaded_must_have_the_loss_that_was_saved(tmp_path, run_here, monkeypatch):
    """Values that changed under right checksums, and code that computes something else. Twenty steps make the layers
    differ enough."""
    flags = ["--steps", 20, "--model", "tiny-llama3.2", "--dim", 32, "--n_layers", 2, "--seq_len", 32]
    assert run_here(tmp_path / "run", *flags)[0] == 0
    folder = checkpoint.step_folder(tmp_path / "run", 20)
    both = r"the loss of its probe was \d\.\d+ when it was saved, with what was loaded it is \d+\.\d+"
    more = [*flags, "--steps", 21]

    def refused(pattern: str, run: Path = tmp_path / "run") -> None:
        status, said = run_here(run, *more)
        assert status == 2 and re.search(pattern, said), said

    for name in ("mlp.down_proj", "self_attn.o_proj"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        copy = checkpoint.step_folder(tmp_path / name, 20)
        swap(copy, *(f"model.layers.{i}.{name}.weight" for i in (0, 1)))
        assert checkpoint.fault_of(copy) == ""
        refused(both, tmp_path / name)
    with monkeypatch.context() as m:
        m.setattr(model, "apply_rope", lambda x, rope: x)
        refused(both)
    with monkeypatch.context() as m:
        m.setattr(model.RMSNorm, "forward", lambda self, x: x)
        refused(both)
    with monkeypatch.context() as m:  # what is not tied is not loaded
        m.setattr(Transformer, "tie_weights", lambda self: torch.nn.init.normal_(self.lm_head.weight, 0, 0.02))
        refused(r"lm_head|the loss of its probe")
    before = (folder / "manifest.json").read_bytes()
    rewrite(folder, lambda m: m["model"].update(rope_theta=2e4))
    refused(r"model's rope_theta was 20000\.0, is 500000\.0")
    (folder / "manifest.json").write_bytes(before)
    rewrite(folder, lambda m: m["probe"].update(loss=m["probe"]["loss"] + 0.01))
    refused(both)
    (folder / "manifest.json").write_bytes(before)
    for change in (["--attention", "sdpa"], ["--checkpointing", "block"], ["--fp8", "tensor"]):
        shutil.copytree(tmp_path / "run", tmp_path / change[1])
        assert run_here(tmp_path / change[1], *more, *change)[0] == 0, change


# ---- settings


def test_settings_that_may_change_and_those_that_are_overridden(tmp_path, run_here):
    run = tmp_path / "run"
    assert run_here(run, "--steps", 3)[0] == 0
    other = ["--log_every", 2, "--save_every", 2, "--eval_every", 2, "--eval_batches", 1, "--keep", 3]
    assert run_here(run, "--steps", 5, *other)[0] == 0
    assert run_here(run, "--steps", 4, *other)[0] == 0  # nothing is left to do
    changes = ["--lr", 0.02, "--warmup_steps", 2, "--seed", 1]
    status, said = run_here(run, "--steps", 8, *changes)
    assert status == 2 and "--lr was 0.01, is 0.02" in said and "--seed was 0, is 1" in said
    assert "--warmup_steps was 0.0, is 2.0" in said and "--resume_override" not in said  # seed stays
    status, said = run_here(run, "--steps", 8, *changes[:4])
    assert status == 2 and "--resume_override lr,warmup_steps goes on" in said
    status, said = run_here(run, "--steps", 8, *changes[:4], "--resume_override", "lr")
    assert status == 2 and "--warmup_steps was" in said and "--lr was" not in said
    status, said = run_here(run, "--steps", 8, "--resume_override", "lr,seed")
    assert status == 2 and "--resume_override seed: it can name lr," in said
    assert not (run / "overrides.jsonl").exists()
    assert run_here(run, "--steps", 8, *changes[:4], "--resume_override", "lr,warmup_steps")[0] == 0
    recorded = [json.loads(line) for line in (run / "overrides.jsonl").read_text().splitlines()]
    assert recorded == [{"step": 5, "lr": [0.01, 0.02], "warmup_steps": [0.0, 2.0]}]
    assert run_here(run, "--steps", 9, *changes[:4])[0] == 0  # the checkpoint has the new ones
    assert len((run / "overrides.jsonl").read_text().splitlines()) == 1
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["lr"]) == (9, 0.02)


@pytest.mark.parametrize("stop", [1, 9, 10, pytest.param(19, marks=pytest.mark.slow)])
def test_a_run_stopped_anywhere_in_the_epochs_equals_the_uninterrupted_one(tmp_path, run_here, stop):
    """Two shards of 10 rows of 16 tokens and a little more, 2 rows a micro-batch, 4 a step: epochs end within steps."""
    for i in range(2):
        write_shard(tmp_path / f"data/{i}.bin", np.random.default_rng(i).integers(0, 258, 10 * 16 + 5 + i), 258)
    flags = ["--data", tmp_path / "data", "--batch_tokens", 64]
    assert run_here(tmp_path / "whole", *flags, "--steps", 20)[0] == 0
    for steps in (stop, 20):
        assert run_here(tmp_path / "run", *flags, "--steps", steps)[0] == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 20
    assert weights_of(tmp_path / "run", 20) == weights_of(tmp_path / "whole", 20)


@pytest.mark.parametrize("save_async", ["on", "off"])
def test_a_save_in_the_background_equals_one_that_is_waited_for_and_its_error_ends_the_run(
    tmp_path, run_here, monkeypatch, save_async
):
    flags = ["--steps", 6, "--save_every", 2, "--keep", 9, "--save_async"]
    assert run_here(tmp_path / "run", *flags, save_async)[0] == 0
    assert run_here(tmp_path / "other", *flags, "off")[0] == 0
    for step in (2, 4, 6):
        assert weights_of(tmp_path / "run", step) == weights_of(tmp_path / "other", step)
    write = checkpoint.write_file

    def full(path, rows):
        write(path, rows)
        raise OSError(errno.ENOSPC, "No space left on device")

    shutil.rmtree(checkpoint.step_folder(tmp_path / "run", 6))
    with monkeypatch.context() as m:
        m.setattr(checkpoint, "write_file", full)
        status, said = run_here(tmp_path / "run", *flags, save_async, "--steps", 60, "--save_every", 5)
    assert status == 1 and said.count("the disk is full") == 1
    assert losses(tmp_path / "run")[-1][0] < 9  # the step after at the latest
    names = {p.name for p in (tmp_path / "run/checkpoints").iterdir()}
    assert names == {"latest", "step-00000002", "step-00000004"}


def test_a_crash_right_after_a_save_was_begun_leaves_the_checkpoint(tmp_path, run_here, monkeypatch, text):
    def crash(config, model, run, step, ranks):
        raise UserError("told to")

    write = checkpoint.write_file
    with monkeypatch.context() as m:
        m.setattr(checkpoint, "write_file", lambda *a: time.sleep(1) or write(*a))
        m.setattr(train, "write_samples", crash)
        flags = ["--steps", 9, "--save_every", 3, "--sample_every", 3]
        assert run_here(tmp_path / "run", *flags) == (2, "error: told to\n")
    assert checkpoint.verify(tmp_path / "run") == [(3, True, "")]
