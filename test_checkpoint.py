"""checkpoint.py: the oracle is the state that was saved, and a run that was never interrupted (test_faults.py)."""

import errno
import json
import math
import os
import pickle
import pkgutil
import re
import shutil
import sys
import threading
import time
import zlib
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import plan
import shard
from base import disk
from base.errors import Failure, UserError, describe_error
from base.ranks import ALONE, Ranks, init_ranks, leave
from base.tensors import HostCopies, local, shard_slices
from config import parse_args
from hf.weights import export_trained, load_model
from inputs import settled_args
from model import Transformer
from optim import make_optimizer
from test_shard import allocate, fill, run_ranks

SMALL = ["--model", "tiny-llama", "--dim", "16", "--n_heads", "2", "--n_kv_heads", "1", "--n_layers", "1"]
SMALL += ["--ffn_dim", "16", "--seq_len", "16"]


def make_saver(model, optimizer, position: dict, config, ranks: Ranks = ALONE, mesh=None, start: int = 0):
    """Like train.py, without a loader and a run."""
    data = SimpleNamespace(state_dict=lambda: position)
    run = {"ranks": ranks, "mesh": mesh, "folder": Path(config.out), "nonce": 32 * "0", "phase": nullcontext}
    run = SimpleNamespace(**run, stopped_by="SIGTERM")
    return checkpoint.Saver(config, run, model, optimizer, data, start)


def save(run: Path, step: int, model, optimizer, position: dict, config, *more, **options) -> Path:
    run.mkdir(exist_ok=True)
    saver = make_saver(model, optimizer, position, replace(config, out=str(run)), *more, **options)
    saver.save(step, torch.arange(20))
    saver.wait()
    return checkpoint.step_folder(run, step)


def make_state(run: Path, *flags: str, steps: int = 3):
    """A model and optimizer after a few steps."""
    config = settled_args(["--out", str(run), *flags])
    model = fill(Transformer(config.model_config))
    optimizer = make_optimizer(model, config)
    for _ in range(steps):
        update(model, optimizer)
    return config, model, optimizer


def update(model, optimizer) -> None:
    tokens = torch.randint(0, 258, (2, 16), generator=torch.Generator().manual_seed(0))
    model(tokens, tokens).backward()
    optimizer.step(optimizer.config.lr, torch.ones(()), torch.zeros(()))


def assert_equal(model, optimizer, other, other_optimizer) -> None:
    """Parameters and states, bit for bit, in the same dtypes."""
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        want, got = ({"": p.detach()} | o.state[p] for p, o in ((a, optimizer), (b, other_optimizer)))
        assert want.keys() == got.keys()
        assert all(torch.equal(want[k], got[k]) and want[k].dtype == got[k].dtype for k in want)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama3.2", "tiny-mixtral", "tiny-gpt2"])
def test_round_trip_is_bit_exact(tmp_path, monkeypatch, name):
    """A rank's tensors need several files here. A copy of the run folder is as good: it holds no absolute path."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100_000)
    config, model, optimizer = make_state(tmp_path / "run", "--model", name)
    folder = save(tmp_path / "run", 3, model, optimizer, {"samples": 5}, config)
    assert len(list(folder.glob("rank-00000-*.safetensors"))) > 5
    assert {p.suffix for p in folder.iterdir()} == {".safetensors", ".json"}  # no pickle
    _, other, other_optimizer = make_state(tmp_path / "run", "--model", name, steps=0)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    found, skipped = checkpoint.find(replace(config, out=str(tmp_path / "moved")))
    checkpoint.restore(found, other, other_optimizer, ALONE, config)
    assert_equal(model, optimizer, other, other_optimizer)
    assert (found.step, found.manifest["position"]["samples"], skipped) == (3, 5, [])
    for key, layout in found.layouts.items():  # also of the scalars of the optimizer, each read is progress
        monkeypatch.setattr(disk, "advanced_at", 0.0)
        found.read(key, tuple(slice(0, n) for n in layout.shape))
        assert disk.advanced_at, key
    assert {v.file for k, v in found.layouts.items() if k.startswith("step.")} == {"rank-*.safetensors"}
    whole = model.embed_tokens.weight.detach()
    for slices in ((slice(0, 258), slice(0, 64)), (slice(5, 9), slice(60, 64)), (slice(3, 3), slice(0, 64))):
        assert torch.equal(found.read_weights("embed_tokens.weight", slices), whole[slices])


def test_whatever_state_an_optimizer_has_is_kept(tmp_path):
    """Of the parameter's shape and of others, in their dtypes; fields that a checkpoint is older than have their
    default, and others are refused."""
    config, model, _ = make_state(tmp_path, "--model", "tiny-llama3.2", steps=0)
    optimizer, other = (SimpleNamespace(state={}, may_update=threading.Event()) for _ in range(2))
    for p in model.parameters():
        state = {"momentum_buffer": torch.randn_like(p).bfloat16(), "rows": torch.rand(len(p)), "scale": torch.rand(())}
        optimizer.state[p] = state
        other.state[p] = {name: torch.zeros_like(value) for name, value in state.items()}
    folder = save(tmp_path, 3, model, optimizer, {}, config)
    checkpoint.restore(checkpoint.find(config)[0], model, other, ALONE, config)
    assert_equal(model, optimizer, model, other)
    rewrite(folder, lambda m: (m["model"]["rope_scaling"].pop("low_freq_factor"), m["model"].pop("n_experts")))
    checkpoint.refuse_changes(checkpoint.find(config)[0], config)
    rewrite(folder, lambda m: m["model"].pop("tied"))
    with pytest.raises(UserError, match="--model was .*tied=False.*, is .*tied=True"):
        checkpoint.refuse_changes(checkpoint.find(config)[0], config)


def reshard() -> None:
    """A rank that loads, saves and exports."""
    run, name, size, optimizer = Path(sys.argv[2]), *sys.argv[3:]
    ranks = init_ranks()
    config = settled_args(["--out", str(run), *RESHARDED, "--model", name, "--optimizer", optimizer])
    mesh = shard.make_mesh(int(size), ranks)
    model = allocate(config.model_config, mesh)
    optimizer = make_optimizer(model, config)
    read, bytes_read = checkpoint.TensorFile.read, []

    def count(*args):
        values = read(*args)
        bytes_read.append(values.nbytes)
        return values

    checkpoint.TensorFile.read = count
    checkpoint.restore(checkpoint.find(config)[0], model, optimizer, ranks, replace(config, load="rank0"))
    state = [t for tensors in optimizer.state.values() for t in tensors.values()]
    assert sum(bytes_read) == sum(local(t).nbytes for t in (*state, *model.parameters()))
    save(run, 4, model, optimizer, {"samples": 5}, config, ranks, mesh)
    saved = checkpoint.find(config)[0]
    checkpoint.restore(saved, model, optimizer, ranks, config)
    save(run, 5, model, optimizer, {"samples": 5}, config, ranks, mesh, 4)
    export_trained(saved, run / "hf", torch.float32, ranks, shard_gb=1e-4)
    if ranks.rank == 1:
        checkpoint._write_shards = lambda *args: Path("/no/such/folder").stat()
    checkpoint.PAUSE = 0
    with pytest.raises(Failure, match="3 of 3: rank 1 on .*/no/such/folder"):
        make_saver(model, optimizer, {}, replace(config, out=str(run)), ranks, mesh, 5).save(
            6, torch.arange(20), last=True
        )
    assert ranks.rank or not [*run.glob("checkpoints/*.tmp*")]
    leave(ranks)


RESHARDED = ["--dtype", "fp32", "--compile", "none"]


@pytest.mark.parametrize("name, size, ranks, optimizer", [
    ("tiny-llama", 2, 2, "muon"), ("tiny-mixtral", 0, 3, "adamw"), ("tiny-gpt2", 1, 2, "adamw"),
])  # fmt: skip
def test_ranks_load_save_and_export_every_bit(tmp_path, name, size, ranks, optimizer):
    """1 rank -> several, on full, hybrid and uneven meshes -> the same -> 1 rank. Every rank reads only what it keeps,
    whatever --load is. They share an export. An error of one in a save is an error on all."""
    flags = [*RESHARDED, "--model", name, "--optimizer", optimizer]
    config, model, state = make_state(tmp_path, *flags)
    save(tmp_path, 3, model, state, {}, config)
    run_ranks(ranks, reshard, str(tmp_path), name, str(size), optimizer)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step-00000004", "step-00000005"}
    _, other, other_optimizer = make_state(tmp_path, *flags, steps=0)
    found, _ = checkpoint.find(config)
    assert found.step == 5
    checkpoint.restore(found, other, other_optimizer, ALONE, config)
    assert_equal(model, state, other, other_optimizer)
    assert_same_weights(load_model(tmp_path / "hf"), model)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3


def assert_same_weights(exported, model, dtype=torch.float32) -> None:
    pairs = zip(exported.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a, b.to(dtype)) for a, b in pairs)


def test_the_command_line_exports_the_saved_values(tmp_path, capsys):
    config, model, optimizer = make_state(tmp_path, "--model", "tiny-mixtral")
    save(tmp_path, 3, model, optimizer, {}, config)
    words = ["export", str(tmp_path), str(tmp_path / "one")]
    assert not checkpoint.main(words)
    assert "step 3" in capsys.readouterr().err
    exported = load_model(tmp_path / "one")
    assert exported.config == replace(model.config, max_seq_len=config.seq_len)
    assert_same_weights(exported, model)
    with pytest.raises(UserError, match="exists already"):
        checkpoint.main(words)
    assert (tmp_path / "one/tokenizer.json").exists()
    checkpoint.main([*words[:2], str(tmp_path / "half"), "--dtype", "bf16", "--tokenizer", str(tmp_path / "one")])
    assert_same_weights(load_model(tmp_path / "half", torch.bfloat16), model, torch.bfloat16)
    assert (tmp_path / "half/tokenizer.json").read_bytes() == (tmp_path / "one/tokenizer.json").read_bytes()


class Operators(TorchDispatchMode):
    names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator.name().split(".")[0])
        return operator(*args, **(kwargs or {}))


def test_copies_for_a_save_run_no_operator_of_torch():
    """One that computes or copies starts threads of OpenMP for the thread of saves. With more threads than cores, those
    of training no longer spin, and its steps take longer."""
    tensors = {"x": torch.arange(12.0).view(3, 4), "bf16": torch.ones(5, dtype=torch.bfloat16), "n": torch.tensor(3.0)}
    tensors["nothing"] = torch.ones(0, 4)  # of a rank beyond the end of an uneven tensor
    with Operators() as seen:
        copies = HostCopies(ALONE.device).make(tensors)
    assert seen.names <= {"aten::view", "aten::detach", "aten::alias", "aten::lift_fresh", "aten::slice", "aten::split"}
    assert all(copies[key].equal(tensor) and copies[key].dtype == tensor.dtype for key, tensor in tensors.items())


@pytest.mark.parametrize("chunk", [0, 1000])
def test_slow_saves_have_the_values_of_their_step(tmp_path, monkeypatch, chunk):
    """Steps go on while copies, as a GPU makes them, and writes are slow. The memory of a save is poisoned after it.
    The files are those of a run that waits for its saves."""
    make, write, checksums = HostCopies.make, checkpoint.write_file, []
    for mode in ("off", "on"):
        config, model, optimizer = make_state(tmp_path / mode, *SMALL, "--keep=9", f"--save_async={mode}", steps=1)
        (tmp_path / mode).mkdir()
        saver = make_saver(model, optimizer, {}, config)
        if chunk:
            monkeypatch.setattr("base.tensors.PINNED", chunk)
            saver.copies.chunk = torch.empty(chunk, dtype=torch.uint8)
        for step in (1, 2, 3):
            saver.save(step, torch.arange(20))
            assert optimizer.may_update.is_set() == (mode == "off")
            update(model, optimizer)
            assert bool(saver.writing and not saver.writing.done()) == (mode == "on")
            saver.wait()
            for copy in saver.copies.copies.values():
                copy.fill_(math.nan)
        manifests = map(checkpoint.read_manifest, checkpoint.folders(tmp_path / mode))
        checksums.append([row["crc32"] for manifest in manifests for row in manifest["files"]])
        monkeypatch.setattr(HostCopies, "make", lambda *args: (time.sleep(0.1), make(*args))[1])
        monkeypatch.setattr(checkpoint, "write_file", lambda *args: (time.sleep(0.1), write(*args)))
    assert checksums[0] == checksums[1] and len({*checksums[0]}) == 3


def test_keep_does_not_count_damaged_checkpoints(tmp_path):
    """A resume skips two damaged checkpoints. They are removed once --keep intact checkpoints exist."""
    config, model, optimizer = make_state(tmp_path, "--keep", "3", "--save_async", "off")
    for step in (1, 2, 3):
        folder = save(tmp_path, step, model, optimizer, {}, replace(config, keep=9))
        if step > 1:
            (folder / "manifest.json").unlink()
    found, skipped = checkpoint.find(config)
    assert (found.step, len(skipped)) == (1, 2)
    (tmp_path / f"checkpoints/step-00000001.tmp-{32 * 'd'}").mkdir()
    saver, left = make_saver(model, optimizer, {}, config, start=1), {}
    for step in (2, 4, 6):
        saver.save(step, torch.arange(20))
        names = (p.name.replace("step-0000000", "") for p in tmp_path.glob("checkpoints/*"))
        left[step] = sorted(name.rstrip("0123456789") if "damaged" in name else name for name in names)
        assert step > 2 or checkpoint.find(config)[0].step == 2  # the later damaged checkpoint does not displace it
    assert left == {2: ["1", "2", "2.damaged", "3.damaged"], 4: ["1", "2", "4"], 6: ["2", "4", "6"]}
    assert all(intact for _, intact, _ in checkpoint.verify(tmp_path))


def test_rotation_removes_only_what_runs_wrote(tmp_path):
    """--keep_every 2 with --save_every 2 keeps steps 4 and 8 for good, and a file `keep` keeps step 6. What a user puts
    next to the checkpoints stays, whatever its name; the rest of an interrupted save goes."""
    config, model, optimizer = make_state(tmp_path, "--keep", "2", "--save_every", "2", "--keep_every", "2")
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    mine = ["step-00000002.good", "step-2", "step-00000001.tmp-x", "notes.tmp-1", "step-00000002-b"]
    for name in (*mine, elsewhere):
        (folder / name).mkdir(parents=True)
        (folder / name / "manifest.json").touch()
    (folder / "step-00000001.damaged").symlink_to(elsewhere)
    (folder / "step-00000003").write_text("a file")
    torn = folder / f"step-00000004.tmp-{32 * 'a'}"
    torn.mkdir()
    (torn / "keep").touch()
    for step in (2, 4, 6, 8, 10, 12):
        saved = save(tmp_path, step, model, optimizer, {}, config)
        if step == 6:
            (saved / "keep").write_text("the best one")
    kept = [f"step-{step:08d}" for step in (4, 6, 8, 10, 12)]
    assert {p.name for p in folder.iterdir()} == {*kept, *mine, "step-00000001.damaged", "step-00000003"}
    assert [(folder / name / "keep").exists() for name in kept] == [True, True, True, False, True]
    assert (elsewhere / "manifest.json").exists()
    assert checkpoint.find(config)[0].step == 12
    checkpoint.clean(tmp_path, 4)
    assert [*folder.glob("step-00000006.damaged*/keep")]


def simulate_ranks(run: Path, tensors: dict, ranks: int) -> checkpoint.Checkpoint:
    """A checkpoint of tensors [rows, ...] that so many ranks have saved, without their processes."""
    layouts = {k: checkpoint.Layout([*t.shape], "float32", 0, ranks) for k, t in tensors.items()}
    checkpoint.assign_files(layouts)
    folder, rows = checkpoint.step_folder(run, 1), []
    run.mkdir()
    for rank in range(ranks):
        own = {k: t[shard_slices(t.shape, 0, ranks, rank)] for k, t in tensors.items()}
        rows += checkpoint._write_shards(folder.with_name("temporary"), own, layouts, rank)
    manifest = {"format": checkpoint.FORMAT, "step": 1, "tensors": layouts, "files": rows}
    checkpoint._commit(folder.with_name("temporary"), folder, manifest, parse_args(["--out", str(run)]))
    return checkpoint.Checkpoint(folder)


def test_metadata_and_opened_files_do_not_grow_with_ranks_times_tensors(tmp_path, monkeypatch):
    """A row per tensor and one per file; a rank opens the files that overlap its slices, a few at a time."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 2**11)
    tensors = {f"model.{i}": torch.randn(90, 4 + i) for i in range(20)}
    for saved_by, read_by, sources in ((6, 18, 1), (18, 6, 3)):
        saved = simulate_ranks(tmp_path / f"{saved_by}-{read_by}", tensors, saved_by)
        files = {layout.file for layout in saved.layouts.values()}
        size = (saved.folder / "manifest.json").stat().st_size
        assert size < 120 * (len(tensors) + saved_by * len(files)) + 200, size
        opened, open_file = set(), saved.open
        saved.open = lambda file, opened=opened, open_file=open_file: opened.add(file) or open_file(file)
        for rank in range(read_by):
            opened.clear()
            for key, tensor in tensors.items():
                slices = shard_slices(tensor.shape, 0, read_by, rank)
                assert torch.equal(saved.read(key, slices), tensor[slices])
            assert len(opened) == sources * len(files), (saved_by, read_by, rank)
    assert open_file.cache_info().maxsize <= checkpoint.OPEN_FILES < 100


READS = [  # functions that read a file in a verification and a load
    ("pathlib.Path.read_bytes", "manifest.json"), ("base.tensors.open", "rank-00000.safetensors"),
    ("base.disk.open", "rank-00000.safetensors"), ("base.tensors.TensorFile._read_rows", "rank-00000.safetensors"),
]  # fmt: skip


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
@pytest.mark.parametrize("name, file", READS)
def test_a_failing_read_is_tried_again_and_condemns_nothing(tmp_path, monkeypatch, caplog, code, name, file):
    config, model, optimizer = make_state(tmp_path, *SMALL)
    folder = save(tmp_path, 1, model, optimizer, {}, config)
    module, _, function = name.rpartition(".")
    works = getattr(pkgutil.resolve_name(module), function, open)
    monkeypatch.setattr("base.disk.WAITS", (0, 0))
    failures = []

    def fail(*args, **how):
        if failures and ("_read_rows" in name or file in str(args[0])):
            raise failures.pop()
        return works(*args, **how)

    monkeypatch.setattr(name, fail, raising=False)

    def load() -> None:
        checkpoint.restore(checkpoint.find(config)[0], model, optimizer, ALONE, config)

    failures += [OSError(code, os.strerror(code))] * 2
    load()
    assert caplog.text.count(f"{os.strerror(code)}: '{folder / file}'; trying again") == 2
    failures += [OSError(code, os.strerror(code))] * 99
    with pytest.raises(OSError, match=f"{os.strerror(code)}: '{folder / file}'") as error:
        load()
    assert describe_error(error.value)[0] == 1 and len(failures) == 96
    failures.clear()
    assert checkpoint.verify(tmp_path) == [(1, True, "")]


def test_which_checkpoint_a_run_resumes_from(tmp_path):
    config, model, optimizer = make_state(tmp_path)
    save(tmp_path, 1, model, optimizer, {}, config)
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match=f"--resume {folder}: it is not a checkpoint.* RUN/checkpoints/step-N"):
            checkpoint.find(replace(config, resume=str(folder)))
    other = replace(config, out=str(tmp_path / "other"), resume=str(tmp_path / "checkpoints/step-00000001"))
    assert checkpoint.find(other)[0].step == 1
    assert checkpoint.find(replace(other, resume="never"))[0] is None
    with pytest.raises(UserError, match="already holds step-00000001; give another --out"):
        checkpoint.find(replace(config, resume="never"))
    (tmp_path / "checkpoints/step-00000001/manifest.json").unlink()
    with pytest.raises(UserError, match="No checkpoint is intact"):
        checkpoint.find(config)


def test_a_full_disk_leaves_the_old_checkpoint_and_no_torn_one(mount, caplog, monkeypatch):
    """A real one: a checkpoint has 1.5 MB, the disk 2 MB. A run warns at its start."""
    disk = mount("2m")
    config, model, optimizer = make_state(disk)
    save(disk, 1, model, optimizer, {}, config)
    plan.refuse_without_room(replace(config, dtype="fp32"), ALONE)
    assert re.search("The first save will fail: it needs 1.51 MB, .* has [0-9]+ kB", caplog.text)
    monkeypatch.setattr(checkpoint, "PAUSE", 0)
    message = "Stopped by SIGTERM without a save. .*: 3 of 3: the disk is full: .* No space left on device: "
    with pytest.raises(Failure, match=message):
        make_saver(model, optimizer, {}, config).save(2, torch.arange(20), last=True)
    assert [caplog.text.count(f"{n} of 3: the disk is full") for n in (1, 2)] == [1, 1]
    assert sorted(p.name for p in (disk / "checkpoints").iterdir()) == ["step-00000001"]
    assert checkpoint.find(config)[0].step == 1


# ---- damage

SHARD = "rank-00000.safetensors"


def spoil(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def rewrite(folder: Path, change) -> None:
    """change(manifest), with its checksum made right again."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["crc32"]
    change(manifest)
    path.write_text(json.dumps(manifest | {"crc32": zlib.crc32(json.dumps(manifest).encode())}))


def replace_shard(folder: Path, data: bytes) -> None:
    (folder / SHARD).write_bytes(data)
    rewrite(folder, lambda m: m["files"][0].update(bytes=len(data), crc32=zlib.crc32(data)))


def layout_of(manifest: dict) -> dict:
    return manifest["tensors"]["model.norm.weight"]


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


DAMAGE = {  # of a file
    "a bit in the header": lambda p: spoil(p, 40),
    "a bit in the middle": lambda p: spoil(p, p.stat().st_size // 2),
    "zeros at its end": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2].ljust(p.stat().st_size, b"\0")),
    "cut short": lambda p: os.truncate(p, p.stat().st_size - 1),
    "empty": lambda p: os.truncate(p, 0),
    "longer": lambda p: p.write_bytes(p.read_bytes() + b"\0"),
    "deleted": lambda p: p.unlink(),
    "a folder in its place": lambda p: (p.unlink(), p.mkdir()),
}
HOSTILE = {  # contents of a file with a right checksum
    "a pickle": pickle.dumps(Evil()),
    "a huge header": (2**62).to_bytes(8, "little") + b"{}" + bytes(99),
    "other tensors": safetensors.torch.save({"a": torch.zeros(2)}),
}
WRONG = {  # changes of a manifest with a right checksum
    "another step": lambda m: m.update(step=1),
    "no step": lambda m: m.pop("step"),
    "another dtype": lambda m: layout_of(m).update(dtype="bfloat16"),
    "an unknown dtype": lambda m: layout_of(m).update(dtype="complex"),
    "another shape": lambda m: layout_of(m).update(shape=[1, 1]),
    "more parts": lambda m: layout_of(m).update(parts=2),
    "a tensor more": lambda m: m["tensors"].update(more=layout_of(m)),
    "files are a list of lists": lambda m: m.update(files=[[]]),
    "files are a number": lambda m: m.update(files=-1.5),
}
for key in ("file", "part", "bytes", "crc32"):
    WRONG[f"a file's {key}"] = lambda m, key=key: m["files"][0].update({key: [None]})
for key in ("shape", "dtype", "dim", "parts", "file"):
    WRONG[f"a tensor's {key}"] = lambda m, key=key: layout_of(m).update({key: [None]})
NOT_JSON = {"no text": "", "a list": "[]", "nested lists": "[" * 100_000, "no UTF-8": "\xff"}


def damages():
    """(name that the message must hold, damage of a checkpoint folder)"""
    for file in ("manifest.json", SHARD):
        for kind, damage in DAMAGE.items():
            yield pytest.param(file, lambda p, file=file, damage=damage: damage(p / file), id=f"{kind} of {file}")
    for kind, data in HOSTILE.items():
        yield pytest.param(SHARD, partial(replace_shard, data=data), id=kind)
    for kind, change in WRONG.items():
        yield pytest.param("", partial(rewrite, change=change), id=kind)
    for kind, text in NOT_JSON.items():
        yield pytest.param("manifest.json", lambda p, t=text: (p / "manifest.json").write_text(t, "latin1"), id=kind)
    yield pytest.param("", lambda p: (shutil.rmtree(p), p.write_text("a file")), id="a file in the folder's place")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A run with checkpoints of steps 1 and 2."""
    run = tmp_path_factory.mktemp("two")
    config, model, optimizer = make_state(run, *SMALL)
    for step in (1, 2):
        save(run, step, model, optimizer, {}, config)
    return run


def test_intact_checkpoints_are_listed_and_verified(two_steps, capsys):
    for verb in ("list", "verify"):
        assert checkpoint.main([verb, str(two_steps)]) == 0
        assert capsys.readouterr().out == "step 1: intact\nstep 2: intact\n"


@pytest.mark.parametrize("file, damage", [*damages()])
def test_damage_is_named_and_the_checkpoint_before_is_used(two_steps, tmp_path, capsys, monkeypatch, file, damage):
    """No file's content runs code."""
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(two_steps, tmp_path / "run")
    folder = checkpoint.step_folder(run, 2)
    damage(folder)
    before, skipped = checkpoint.find(parse_args(["--out", str(run)]))
    fault = checkpoint.fault_of(folder)
    assert fault and file in fault
    assert (before.step, checkpoint.newest(run).step) == (1, 1)
    assert skipped == [f"Skipped the damaged checkpoint {folder}: {fault}"]
    for verb, status in (("verify", 1), ("list", int(not fault.startswith("the checksum of")))):
        assert checkpoint.main([verb, str(run)]) == status
    assert f"step 1: intact\nstep 2: {fault}\n" in capsys.readouterr().out
    assert not Path("evil").exists()
