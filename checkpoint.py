"""Checkpoints: a folder per step with the weights, the optimizer's moments, the data position and the random state.

    checkpoints/step-00000100/rank-00000.safetensors ...   each rank's parts of the tensors
                              manifest.json                step, settings, data position, every part's place, sizes,
                                                           checksums, its own too, and the loss of a probe

safetensors and JSON only: loading runs no code. A save writes into a temporary folder, which is synced and then
renamed: a checkpoint is there whole or not at all, and is never written again. Every tensor is stored in parts with
their offsets, so any number of ranks, on any mesh, reads just the slices it keeps. A checkpoint proves itself: the loss
of a fixed row of tokens is in it, and is computed again from what was loaded.

torch.distributed.checkpoint is not used: its metadata are pickles, a torn save into an existing folder loads as a mix
of two, it has no checksums, and with safetensors it took 1.3 to 2 times as long (torch 2.13)."""

import argparse
import json
import logging
import math
import os
import re
import secrets
import shutil
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

from errors import UserError, read_json, run_script  # first: it finds the Python that has torch

import torch  # isort: skip
from torch import Tensor, nn

from config import OVERRIDABLE, Config
from data import Loader, merge_positions
from guard import ANSWER, NotFinite, Run, compare_replicas
from machine import available_memory
from model import ModelConfig, RopeScaling
from shard import (
    Ranks,
    fill,
    fill_tensors,
    gather,
    local,
    local_slices,
    on_first_rank,
    owns,
    reshard,
)
from tensorfile import DTYPES as FILE_DTYPES
from tensorfile import PORTION, Slices, TensorFile, assemble, write_file
from tokenizer import load_tokenizer
from weights import Export, family

FORMAT = 2
DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float32, torch.bfloat16)}
MOMENTS = ("exp_avg", "exp_avg_sq")
PROBE = 128  # tokens whose loss a checkpoint carries
# Nats per token, by compute dtype: what other kernels and meshes may change.
TOLERANCE = {torch.float32: 0.002, torch.bfloat16: 0.03}
PART = re.compile(r"rank-[0-9]{5,}\.safetensors")
# What a manifest is made of, for `fits`.
PLACE = {"start": [int], "shape": [int], "whole": [int], "dtype": str}
MANIFEST = {
    "step": int,
    "tokens": int,
    "updates": int,
    "world_size": int,
    "position": dict,
    "probe": {"tokens": [int], "loss": float, "tolerance": float},
    "config": dict,
    "model": dict,
    "files": [{"file": str, "bytes": int, "crc32": int, "tensors": dict}],
}
ALONE = Ranks(0, 1, torch.device("cpu"))
# What may differ when a run goes on: how often things happen, where, and how the same step is split and computed.
MAY_CHANGE = {
    "steps", "out", "log_every", "eval_every", "eval_batches", "save_every", "keep", "resume", "sample_every", "prompt",
    "check", "micro_batch", "shard_size", "checkpointing", "compile", "attention", "val_data", "data", "reshard",
    "prefetch", "offload", "offload_activations", "load", "timeout", "skip_bad", "read_ahead_gb", "profile",
    "fp8", "fp8_grad_dtype", "fp8_all_gather", "fp8_skip", "fp8_log_every",
    "save_async", "resume_override", "on_nonfinite", "replicas_every", "deterministic",
}  # fmt: skip
logger = logging.getLogger("flatland")


# ---- saving


@torch.no_grad()
def probe_loss(model: nn.Module, tokens: list[int], device: torch.device) -> float:
    """Mean loss of one row of tokens, uncompiled: the same whatever the batch and the compiler. All ranks must call."""
    ids = torch.tensor([tokens], device=device)
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        loss = model(ids[:, :-1], ids[:, 1:]).item() / (len(tokens) - 1)
    reshard(model)
    model.train()
    return loss


class Saver:
    """Writes checkpoints while the training goes on: `save` computes the probe's loss and copies this rank's parts into
    the host's memory; a thread writes them. The next save waits for the one before.

    Around the loop (`with saver:`) it lets what is being written come to its end when an error ends the loop, and saves
    the state before a step whose loss or gradients were no numbers."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Loader, run: Run, found):
        """found: the Checkpoint that the run goes on from, or None."""
        self.model, self.optimizer, self.data, self.phase = model, optimizer, data, run.phase
        self.config, self.ranks, self.mesh = run.config, run.ranks, run.mesh
        self.run, self.nonce = run.folder, run.nonce
        self.tokens = found.manifest["probe"]["tokens"] if found else None
        self.last = found.step if found else 0  # the newest that is whole
        self.damaged = {p for p in folders(self.run) if found and int(p.name[5:]) > found.step}
        on_first_rank(lambda: clean(self.run), self.ranks)
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if error is None:
            return
        with self.phase("saves"):
            if self.thread:
                self.thread.join(ANSWER)  # what is being written is from before this
            if isinstance(error, NotFinite):
                try:
                    error.args = (f"{error}{self._save_before(error.step)}",)
                except Exception as e:
                    error.args = (f"{error}\nThe state before it could not be saved: {e}",)

    def _save_before(self, step: int) -> str:
        """Saves the state before a step, if there is no checkpoint of it -> a sentence that says so. All ranks must
        call."""
        if step - 1 <= self.last:
            return ""
        done = self.data.samples // self.data.step_rows
        self._save(step - 1, self.data.before[step - done - 1], None)
        self.wait()
        return f"\nThe state before it is saved: {step_folder(self.run, step - 1)}"

    def save(self, step: int, row: Tensor) -> float:
        """Saves the state after `step` updates and removes the oldest checkpoints beyond --keep -> milliseconds that
        training waited. row [T]: tokens to probe with; the first call's are kept. An error, that of the save before
        too, is raised on all ranks. All ranks must call."""
        begin = time.perf_counter()
        with self.phase("saves"):
            self._save(step, self.data.state_dict(), row)
        return 1e3 * (time.perf_counter() - begin)

    def _save(self, step: int, position: dict, row: Tensor | None) -> None:
        """position: this rank's, in the data."""
        self.wait()
        if step == self.last:
            return
        position = merge_positions(gather(position, self.ranks))
        compare_replicas(self.model, self.ranks, self.mesh, step)
        if self.tokens is None:
            row = torch.arange(self.config.seq_len) % self.model.config.vocab_size if row is None else row
            self.tokens = gather(row[: PROBE + 1].tolist(), self.ranks)[0]
        loss = probe_loss(self.model, self.tokens, self.ranks.device)
        if not math.isfinite(loss):
            raise RuntimeError(f"The model's loss after step {step} is {loss}: such a state is not saved")
        probe = {"tokens": self.tokens, "loss": loss, "tolerance": TOLERANCE[self.model.dtype]}
        state = next(iter(self.optimizer.state.values()), None)
        manifest = {
            "format": FORMAT,
            "step": step,
            "tokens": step * self.config.batch_tokens,
            "updates": int(state["step"].item()) if state else 0,
            "world_size": self.ranks.world_size,
            "position": position,
            "probe": probe,
            "config": asdict(self.config),
            "model": asdict(self.config.model_config),
        }
        tensors, places = own_parts(self.model, self.optimizer, self.ranks)
        staged = self.config.save_async and all(gather(self._has_room(tensors), self.ranks))
        ready = _stage(tensors) if staged else None
        self.thread = threading.Thread(target=self._write, args=(manifest, tensors, places, ready), name="checkpoint")
        self.thread.start()
        if not staged:
            self.wait()

    def _has_room(self, tensors: dict[str, Tensor]) -> bool:
        size = sum(t.numel() * t.element_size() for t in tensors.values()) * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        size *= 2 if self.ranks.device.type == "cuda" else 1  # torch pins blocks of powers of two
        free = available_memory()
        if free and size > free:
            said = "Saving without --save_async: a copy of the state takes %.1f GiB on this machine, %.1f are free"
            logger.warning(said, size / 2**30, free / 2**30)
        return not free or size <= free

    @property
    def failed(self) -> bool:
        """Whether the save in the background has failed by now; `wait` tells how."""
        return self.error is not None

    def wait(self) -> None:
        """Until what was saved is on the disk, or raises on all ranks why it is not. All ranks must call."""
        with self.phase("saves"):
            if self.thread:
                self.thread.join()
        error, self.thread, self.error = self.error, None, None
        if error is not None:
            raise error

    def _write(self, manifest: dict, tensors: dict[str, Tensor], places: dict[str, dict], ready) -> None:
        """In the thread: every rank writes its part, then rank 0 the manifest."""
        begin = time.perf_counter()
        folder = step_folder(self.run, manifest["step"])
        temporary = folder.with_name(f"{folder.name}.tmp-{self.nonce}")
        part, error = None, None
        try:
            if ready is not None:
                ready.synchronize()
            folder.parent.mkdir(exist_ok=True)  # but no run folder that has vanished
            temporary.mkdir(exist_ok=True)
            path = temporary / f"rank-{self.ranks.rank:05d}.safetensors"
            rows = [(key, t.dtype, tuple(t.shape), partial(_portions, t)) for key, t in tensors.items()]
            size, crc = write_file(path, rows)
            part = {"file": path.name, "bytes": size, "crc32": crc, "tensors": places}
            tensors.clear()
            rows.clear()
        except Exception as e:
            error = e if isinstance(e, OSError) else RuntimeError(f"{type(e).__name__}: {e}")
        try:
            results = gather((part, error), self.ranks, self.ranks.saving)
            error = next((e for _, e in results if e), None)
            if error is None and self.ranks.rank == 0:
                try:
                    _commit(temporary, folder, manifest | {"files": [p for p, _ in results]})
                    self.damaged.discard(folder)
                    _prune(self.run, self.config.keep, manifest["step"], self.damaged)
                except Exception as e:
                    error = e
            error = next((e for e in gather(error, self.ranks, self.ranks.saving) if e), None)
        except RuntimeError as e:  # a peer is gone
            error = e
        self.error = error
        if self.ranks.rank == 0 and error is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        elif error is None:
            self.last = manifest["step"]
            seconds, size = time.perf_counter() - begin, sum(p["bytes"] for p, _ in results)
            logger.info("Saved %s: %.3f GB in %.1f s", folder.name, size / 1e9, seconds)


def own_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """-> (this rank's part of the state by name, where in the whole tensors each lies)"""
    assert not optimizer.state or all(p in optimizer.state for p in model.parameters()), "parameters are still gathered"
    tensors, places = {}, {}
    for name, parameter in model.named_parameters():
        values = {f"model.{name}": parameter} | {
            f"{m}.{name}": optimizer.state[parameter][m] for m in MOMENTS if parameter in optimizer.state
        }
        for key, value in values.items():
            if owns(value) and local(value).numel():
                tensors[key] = local(value.detach())
                places[key] = {
                    "start": [s.start for s in local_slices(value)],
                    "shape": list(tensors[key].shape),
                    "whole": list(value.shape),
                    "dtype": str(value.dtype)[6:],
                }
    tensors["rng"] = torch.get_rng_state()
    if ranks.device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return tensors, places


def _stage(tensors: dict[str, Tensor]) -> torch.cuda.Event | None:
    """Replaces tensors by copies in the host's memory -> when they are there. On a GPU nothing waits: the next update
    comes after the copies in the stream's order."""
    ready = None
    for key, tensor in tensors.items():
        if tensor.is_cuda:
            tensors[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensors[key].copy_(tensor, non_blocking=True)
            ready = ready or torch.cuda.Event()
        else:
            tensors[key] = tensor.clone()
    if ready is not None:
        ready.record()
    return ready


def _portions(tensor: Tensor):
    for portion in tensor.reshape(-1).split(PORTION) if tensor.is_cuda else [tensor]:
        yield portion.cpu()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _commit(temporary: Path, folder: Path, manifest: dict) -> None:
    """Rank 0, when all parts are written: from the rename on the checkpoint is there."""
    metrics, path = folder.parent.parent / "metrics.jsonl", temporary / "manifest.json"
    path.write_text(json.dumps(manifest | {"crc32": _crc_of(manifest)}))
    for written in (path, temporary, *([metrics] if metrics.exists() else [])):  # its step's record, too
        _sync(written)
    if folder.exists():
        if not fault_of(folder):  # never written again
            return shutil.rmtree(temporary)
        os.rename(folder, folder.with_name(f"{temporary.name}-damaged"))  # the run was resumed from an older one
    os.rename(temporary, folder)
    _sync(folder.parent)
    _sync(folder.parent.parent)  # the first save has made folder.parent
    pointer = folder.parent / "latest.tmp"
    pointer.write_text(folder.name + "\n")
    os.replace(pointer, folder.parent / "latest")


def _crc_of(manifest: dict) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def folders(run: Path) -> list[Path]:
    """Step folders, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name))


def _prune(run: Path, keep: int, step: int, damaged: set[Path]) -> None:
    """Of those up to `step` the newest are kept; damaged ones count for none, and go with the first old one."""
    there = [p for p in folders(run) if int(p.name[5:]) <= step]
    kept = [p for p in there if p not in damaged][-keep:]
    for old in [p for p in there if p not in kept] if len(kept) == keep else []:
        os.rename(old, old.with_name(f"{old.name}.tmp-old"))  # first: half a folder is never taken for a checkpoint
    clean(run)


def clean(run: Path) -> None:
    """Removes what torn saves have left."""
    for torn in (run / "checkpoints").glob("step-*.tmp-*"):
        shutil.rmtree(torn, ignore_errors=True)
    (run / "checkpoints" / "latest.tmp").unlink(missing_ok=True)


# ---- trusting


def _checksum(path: Path) -> int:
    crc, block = 0, memoryview(bytearray(PORTION))
    with open(path, "rb", buffering=0) as f:
        while n := f.readinto(block):
            crc = zlib.crc32(block[:n], crc)
    return crc


def fits(value, form) -> bool:
    """Whether JSON is of a form: a type (int: not negative), [form of each], {key: form}."""
    if isinstance(form, list):
        return type(value) is list and all(fits(v, form[0]) for v in value)
    if isinstance(form, dict):
        return type(value) is dict and all(k in value and fits(value[k], f) for k, f in form.items())
    return type(value) is form and (form is not int or value >= 0)


def read_manifest(folder: Path) -> dict:
    """ValueError, or OSError: what is wrong with it."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, this version reads {FORMAT}")
        if manifest.pop("crc32") != _crc_of(manifest):
            raise ValueError("its checksum is wrong")
        for key, form in MANIFEST.items():
            if not fits(manifest.get(key), form):
                raise ValueError(f"{key} is not what it should be")
        places = {}
        for part in manifest["files"]:
            if not PART.fullmatch(part["file"]):
                raise ValueError(f"{part['file']!r} is no part of a checkpoint")
            for key, place in part["tensors"].items():
                if not fits(place, PLACE) or place["dtype"] not in DTYPES:
                    raise ValueError(f"the place of {key} in {part['file']} is not what it should be")
                places.setdefault(key, []).append(place)
        if broken := [key for key, parts in places.items() if not _make_up_a_whole(parts)]:
            raise ValueError(f"the parts of {broken[0]} do not make it up")
        if re.fullmatch(r"step-\d{8,}", folder.name) and manifest["step"] != int(folder.name[5:]):
            raise ValueError(f"it is that of step {manifest['step']}")
    except FileNotFoundError:
        raise ValueError("manifest.json is missing") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        said = f"there is no {e}" if isinstance(e, KeyError) else e
        raise ValueError(f"manifest.json is unreadable: {said}") from None
    return manifest


def _make_up_a_whole(parts: list[dict]) -> bool:
    """Whether they follow each other on the one dimension that is divided, from its beginning to its end."""
    parts = sorted(parts, key=lambda p: p["start"])
    whole, dtype, end = parts[0]["whole"], parts[0]["dtype"], 0
    dim = next((d for d, (n, size) in enumerate(zip(parts[0]["shape"], whole, strict=True)) if n < size), 0)
    for part in parts:
        start, shape = ([0] * len(whole), [*whole])
        start[dim], shape[dim] = end, part["shape"][dim]
        if part != {"start": start, "shape": shape, "whole": whole, "dtype": dtype}:
            return False
        end += shape[dim]
    return end == whole[dim]


def _fault_of_part(folder: Path, size_only: bool, part: dict) -> str:
    path = folder / part["file"]
    try:
        if path.stat().st_size != part["bytes"]:
            return f"{path.name} has {path.stat().st_size} bytes, expected {part['bytes']}"
        if not size_only and _checksum(path) != part["crc32"]:
            return f"the checksum of {path.name} is wrong"
        entries = TensorFile(path).entries
        places = part["tensors"] | {"rng": {"dtype": "uint8", "shape": list(torch.get_rng_state().shape)}}
        for key, place in places.items():
            found = entries.get(key)
            if not found or [*found.shape] != place["shape"] or str(FILE_DTYPES[found.dtype])[6:] != place["dtype"]:
                return f"{path.name} does not hold {key} as it should"
        return ""
    except UserError as e:
        return str(e)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as e:
        return f"{path.name} is unreadable: {e}"


def fault_of(folder: Path, ranks: Ranks = ALONE, sizes_only: bool = False) -> str:
    """Why a checkpoint cannot be trusted; empty if it can. Every byte is read, each rank reads its share. All ranks
    must call."""
    try:
        files = read_manifest(folder)["files"][ranks.rank :: ranks.world_size]
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))) as threads:
            faults = [*threads.map(partial(_fault_of_part, folder, sizes_only), files)]
    except (ValueError, OSError) as e:
        faults = [str(e)]
    return next((fault for of_rank in gather(faults, ranks) for fault in of_rank if fault), "")


def verify(run: Path | str) -> list[tuple[int, bool, str]]:
    """(step, whether it is whole, what is wrong with it) of every checkpoint of a run, oldest first."""
    faults = {p: fault_of(p) for p in folders(Path(run))}
    return [(int(p.name[5:]), not fault, fault) for p, fault in faults.items()]


# ---- loading


class Checkpoint:
    """A checkpoint folder, opened for reading."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.step = self.manifest["step"]
        self.files, self.places = {}, {}
        for part in self.manifest["files"]:
            for key, place in part["tensors"].items():
                self.places.setdefault(key, []).append((part["file"], place))

    @property
    def config(self) -> Config:
        """The settings it was trained with."""
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in self.manifest["config"].items()}
        unknown = set(values) - {f.name for f in fields(Config)}
        if unknown:
            raise UserError(f"{self.folder} was written by another version, with settings {', '.join(sorted(unknown))}")
        return Config(**values)

    @property
    def model_config(self) -> ModelConfig:
        """The shape that it holds, whatever has become of --model since."""
        values = dict(self.manifest["model"])
        try:
            scaling = values.pop("rope_scaling")
            return ModelConfig(**values, rope_scaling=scaling and RopeScaling(**scaling))
        except (ValueError, TypeError, KeyError) as e:
            raise UserError(f"{self.folder} holds a model that this version does not know: {e}") from None

    def read(self, key: str, slices: Slices) -> Tensor:
        """Those values of the tensor, put together from the parts that hold them."""
        if key not in self.places:
            raise UserError(f"{self.folder} holds no tensor {key}: it is a checkpoint of another model")
        first = self.places[key][0][1]
        parts = [(p["start"], p["shape"], partial(self._read_part, file, key)) for file, p in self.places[key]]
        return assemble(slices, first["whole"], DTYPES[first["dtype"]], parts)

    def _read_part(self, file: str, key: str, slices: Slices) -> Tensor:
        if file not in self.files:
            self.files[file] = TensorFile(self.folder / file)
        return self.files[file].read(key, slices)

    def read_weights(self, name: str, slices: Slices) -> Tensor:
        return self.read(f"model.{name}", slices)

    def restore_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer, load: str) -> None:
        """Moments and update count; on the mesh that the model is on now."""
        if not self.manifest["updates"]:
            return
        for parameter in model.parameters():
            device = local(parameter).device
            optimizer.state[parameter] = {"step": torch.tensor(float(self.manifest["updates"]), device=device)}
            for moment in MOMENTS:
                dtype = getattr(optimizer, "state_dtype", parameter.dtype)
                optimizer.state[parameter][moment] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        named = list(model.named_parameters())
        moments = [(f"{moment}.{name}", optimizer.state[p][moment]) for moment in MOMENTS for name, p in named]
        fill_tensors(moments, self.read, load)

    def restore_rng(self, ranks: Ranks) -> None:
        """The random state of this rank; on another number of ranks there is none to restore."""
        if self.manifest["world_size"] != ranks.world_size:
            return
        file, everything = TensorFile(self.folder / f"rank-{ranks.rank:05d}.safetensors"), (slice(None),)
        torch.set_rng_state(file.read("rng", everything))
        if ranks.device.type == "cuda" and "rng.cuda" in file.entries:
            torch.cuda.set_rng_state(file.read("rng.cuda", everything), ranks.device)


def find(config: Config, ranks: Ranks = ALONE, sizes_only: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from (None: a fresh start), and what a user should know about those that were passed
    over. Refuses a run folder whose checkpoints are all damaged, and one that was trained with other settings. All
    ranks must call."""
    skipped = []
    for folder in on_first_rank(lambda: _candidates(config), ranks):
        fault = fault_of(folder, ranks, sizes_only)
        if not fault:
            found = Checkpoint(folder)
            changed(found, config)
            if config.resume != "auto":
                _check_room(config, found.step)
            return found, skipped
        skipped.append(f"Skipped the damaged checkpoint {folder}: {fault}")
    if skipped:
        advice = f"No whole checkpoint is left in {config.out}: mend it, or start afresh with another --out"
        if config.resume != "auto":
            advice = f"--resume {config.resume} is damaged: name another, or auto"
        raise UserError("\n".join([*skipped, advice]))
    return None, skipped


def _candidates(config: Config) -> list[Path]:
    """Newest first."""
    if config.resume == "never":
        _check_room(config, 0)
    if config.resume in ("auto", "never"):
        return folders(Path(config.out))[::-1]
    if not Path(config.resume).is_dir():
        raise UserError(f"--resume {config.resume}: no such checkpoint folder (nor is it auto or never)")
    return [Path(config.resume)]


def _check_room(config: Config, step: int) -> None:
    """A run that does not go on from its folder's newest checkpoint must not meet later ones there."""
    later = [p.name for p in folders(Path(config.out)) if int(p.name[5:]) > step]
    if later:
        raise UserError(f"--resume {config.resume}: {config.out} holds {later[-1]} already; give another --out")


def changed(found: Checkpoint, config: Config) -> dict[str, list]:
    """Settings that differ from the checkpoint's and that --resume_override names: {name: [old, new]}. Refuses those
    that it does not name."""
    now, then = json.loads(json.dumps(asdict(config))), found.manifest["config"]
    differ = {k: [then[k], now[k]] for k in now if k not in MAY_CHANGE and k in then and now[k] != then[k]}
    refused = {k: v for k, v in differ.items() if k not in config.resume_override}
    if not refused:  # a --model folder may hold another config.json by now
        now, then = json.loads(json.dumps(asdict(config.model_config))), found.manifest["model"]
        refused = {f"model's {k}": [then[k], now[k]] for k in now if k in then and now[k] != then[k]}
    if refused:
        lines = [f"--{k} was {old!r}, is {new!r}" for k, (old, new) in refused.items()]
        names = [k for k in refused if k in OVERRIDABLE]
        hint = f"; --resume_override {','.join(names)} goes on with the new" if len(names) == len(refused) else ""
        raise UserError(
            f"{found.folder} was trained with other settings:\n  "
            + "\n  ".join(lines)
            + f"\nGive the old ones to go on{hint}; or a new --out to start afresh"
        )
    return differ


def restore(
    found: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, config: Config
) -> None:
    """Weights, optimizer and random state; refuses weights whose loss is not what the checkpoint says. All ranks must
    call."""
    fill(model, found.read_weights, config.load)
    _prove(found, model, ranks)
    found.restore_optimizer(model, optimizer, config.load)
    found.restore_rng(ranks)
    overridden = changed(found, config)
    if overridden:
        said = "; ".join(f"{name} {old} -> {new}" for name, (old, new) in overridden.items())
        logger.info("Going on with other settings: %s", said)
        on_first_rank(lambda: _record(Path(config.out), found.step, overridden), ranks)


def _record(run: Path, step: int, overridden: dict) -> None:
    with open(run / "overrides.jsonl", "a") as f:
        f.write(json.dumps({"step": step} | overridden) + "\n")


def _prove(found: Checkpoint, model: nn.Module, ranks: Ranks) -> None:
    probe = found.manifest["probe"]
    losses = gather(probe_loss(model, probe["tokens"], ranks.device), ranks)
    loss = max(losses, key=lambda x: abs(x - probe["loss"]) if math.isfinite(x) else math.inf)
    if not abs(loss - probe["loss"]) <= probe["tolerance"]:
        raise UserError(
            f"{found.folder}: the loss of its probe was {probe['loss']:.6f} when it was saved, with what was loaded it"
            f" is {loss:.6f} (allowed: {probe['tolerance']} off). The code computes something else now (rope, ties,"
            " dtypes, names?), or values were changed; go on with the code that saved it"
        )
    logger.info("Loss of the checkpoint's probe: %.6f, it was %.6f", loss, probe["loss"])


# ---- for people and other programs


def newest(run: Path) -> Checkpoint:
    """A run's newest whole checkpoint."""
    faults = []
    for folder in folders(run)[::-1]:
        fault = fault_of(folder)
        if not fault:
            return Checkpoint(folder)
        faults.append(f"\n  {folder.name}: {fault}")
    raise UserError(f"{run}: there is no whole checkpoint in it{''.join(faults) or ' (runs/NAME is a run folder)'}")


def load_run_tokenizer(found: Checkpoint, spec: str | None = None):
    """The tokenizer of a run, whose files may be in its export only by now; None if it is not known."""
    if spec or not found.config.knows_text:
        return load_tokenizer(spec) if spec else None
    exported = found.folder.parent.parent / "hf"
    try:
        return load_tokenizer(found.config.tokenizer)
    except UserError:
        if not (exported / "config.json").exists():
            raise
        return load_tokenizer(str(exported))


def is_exported(config: Config, step: int) -> bool:
    """Whether a run has ended after that step and left all that a finished one leaves."""
    status = read_json(Path(config.out) / "status.json")
    if (status.get("state"), status.get("step")) != ("finished", step):
        return False
    return not _has_family(config.model_config) or (Path(config.out) / "hf").exists()


def _has_family(model: ModelConfig) -> bool:
    try:
        return bool(family(model))
    except ValueError:
        return False


def export_run(config: Config, step: int, ranks: Ranks) -> None:
    """A run's checkpoint as a Hugging Face folder, hf/. All ranks must call."""
    try:
        family(config.model_config)
    except ValueError as e:
        return logger.warning("No export to hf/: %s", e)
    tokenizer = load_tokenizer(config.tokenizer) if config.knows_text else None
    saved, folder = Checkpoint(step_folder(Path(config.out), step)), Path(config.out) / "hf"
    export(saved, folder, ranks, tokenizer=tokenizer, replaces=True)


def export(
    found: Checkpoint,
    folder: Path,
    ranks: Ranks,
    dtype: torch.dtype = torch.float32,
    shard_gb: float = 5.0,
    tokenizer=None,
    replaces: bool = False,
) -> None:
    """Writes a checkpoint's weights as a Hugging Face folder; replaces: an older export there gives way. All ranks must
    call; each writes its share of the shards. An error on one is raised on all."""
    made = Export(folder, found.model_config, dtype, shard_gb, gather(secrets.token_hex(4), ranks)[0], replaces)
    on_first_rank(made.begin, ranks)
    error = None
    try:
        for i in range(ranks.rank, len(made.shards), ranks.world_size):
            made.write_shard(i, found.read_weights)
    except (OSError, UserError) as e:
        error = e
    try:
        if error := next((e for e in gather(error, ranks) if e), None):
            raise error
        on_first_rank(lambda: made.finish(tokenizer), ranks)
    finally:
        if ranks.rank == 0:
            made.abandon()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="checkpoint.py", description="Looks at a run's checkpoints, or exports one.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, help in (
        ("list", "what there is"),
        ("verify", "read every byte and compare checksums; status 1 if something is wrong"),
        ("export", "write the newest whole checkpoint as a Hugging Face folder"),
    ):
        sub = verbs.add_parser(verb, help=help, description=help)
        sub.add_argument("run", type=Path, help="run folder")
        if verb == "export":
            sub.add_argument("out", type=Path, help="the folder to make")
            sub.add_argument(
                "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="fp32 (default) is exact"
            )
            sub.add_argument("--shard_gb", type=float, default=5.0, help="largest file, in 10^9 bytes (default 5)")
            sub.add_argument("--tokenizer", help="whose files to add; default: the run's; none = no files")
    args = parser.parse_args(argv)
    if args.verb == "export":
        return _export(args)
    if not folders(args.run):
        raise UserError(f"{args.run}: there are no checkpoints in it (runs/NAME is a run folder)")
    if args.verb == "verify":
        rows = verify(args.run)
        for step, ok, fault in rows:
            print(f"step {step}: {'whole' if ok else fault}")
        return int(not all(ok for _, ok, _ in rows))
    for folder in folders(args.run):
        try:
            found = read_manifest(folder)
            size, ranks, loss = sum(p["bytes"] for p in found["files"]), found["world_size"], found["probe"]["loss"]
            said = f"{size / 1e9:.3f} GB, {found['tokens']} tokens, written by {ranks} ranks, probe loss {loss:.4f}"
            print(f"step {found['step']}: {said}")
        except (OSError, ValueError) as e:
            print(f"{folder.name}: {e}")
    return 0


def _export(args: argparse.Namespace) -> int:
    if not args.shard_gb > 0:
        raise UserError(f"--shard_gb {args.shard_gb}: it must be positive")
    found = newest(args.run)
    tokenizer = load_run_tokenizer(found, args.tokenizer) if args.tokenizer != "none" else None
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    export(found, args.out, ALONE, dtype, args.shard_gb, tokenizer)
    print(f"{args.out}: step {found.step} of {args.run} in {args.dtype}")
    return 0


if __name__ == "__main__":
    run_script(main)
