"""Faults: saves that are killed anywhere, damaged and hostile checkpoints, runs that are killed, stopped or cut off, or
meet what is no number. The oracle is the state that was saved, and the run to which nothing happened."""

import builtins
import io
import json
import os
import pickle
import shutil
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import checkpoint
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
