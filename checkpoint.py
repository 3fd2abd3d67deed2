"""Checkpoints: a folder per step with the weights, the optimizer's moments, the data position and the random state.

    checkpoints/step-00000100/rank-00000.safetensors ...   each rank's parts of the tensors
                              manifest.json                step, settings, data position, every part's place, sizes,
                              checksums

safetensors and JSON only: loading runs no code. A save writes into a temporary folder, which is synced and then
renamed: a checkpoint is there whole or not at all, and is never written again. Every tensor is stored in parts with
their offsets, so any number of ranks, on any mesh, reads just the slices it keeps."""

import json
import os
import re
import secrets
import shutil
import zlib
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from config import Config
from errors import UserError
from shard import Ranks, fill, gather, local, local_slices, owns

MOMENTS = ("exp_avg", "exp_avg_sq")
# What may differ when a run goes on: how often things happen, where, and how the same step is split and computed.
MAY_CHANGE = {
    "steps", "out", "log_every", "eval_every", "eval_batches", "save_every", "keep", "resume", "sample_every", "prompt",
    "check", "micro_batch", "shard_size", "checkpointing", "compile", "attention", "val_data", "data",
    "fp8", "fp8_grad_dtype", "fp8_all_gather", "fp8_skip", "fp8_log_every",
}  # fmt: skip


def _checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb") as f:
        while block := f.read(2**24):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: dict,
    config: Config,
    ranks: Ranks,
) -> Path:
    """Writes the state after `step` updates and removes the oldest checkpoints beyond --keep. All ranks must call; an
    error on one is raised on all."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    temporary = folder.with_name(f"{folder.name}.tmp-{gather(secrets.token_hex(4), ranks)[0]}")
    error, part = None, {}
    if folder.exists() and not _fault(folder):
        return folder
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        part = _write_part(temporary, model, optimizer, ranks)
    except (OSError, SafetensorError) as e:
        error = _as_oserror(e, temporary)
    results = gather((part, error), ranks)
    error = next((e for _, e in results if e), None)
    if error is None and ranks.rank == 0:
        try:
            _write_manifest(temporary, folder, step, [p for p, _ in results], optimizer, position, config, ranks)
            _prune(run, config.keep, step)
        except OSError as e:
            error = e
    error = next((e for e in gather(error, ranks) if e), None)
    if error is not None:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise error
    return folder


def _as_oserror(error: Exception, path: Path) -> OSError:
    """safetensors reports a full disk as text."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]) if number else 5, str(error), str(path))


def _write_part(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict:
    """This rank's file -> its line of the manifest."""
    assert not optimizer.state or all(p in optimizer.state for p in model.parameters()), "parameters are still gathered"
    tensors = {"rng": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(ranks.device)
    places = {}
    for name, parameter in model.named_parameters():
        values = {f"model.{name}": parameter} | {
            f"{m}.{name}": optimizer.state[parameter][m] for m in MOMENTS if parameter in optimizer.state
        }
        for key, value in values.items():
            if owns(value) and local(value).numel():
                tensors[key] = local(value.detach()).contiguous().cpu()
                places[key] = {
                    "start": [s.start for s in local_slices(value)],
                    "shape": list(tensors[key].shape),
                    "whole": list(value.shape),
                    "dtype": str(value.dtype)[6:],
                }
    path = folder / f"rank-{ranks.rank:05d}.safetensors"
    save_file(tensors, path)
    _sync(path)
    return {"file": path.name, "bytes": path.stat().st_size, "crc32": _checksum(path), "tensors": places}


def _write_manifest(
    temporary: Path, folder: Path, step: int, parts: list[dict], optimizer, position: dict, config: Config, ranks: Ranks
) -> None:
    updates = [int(state["step"].item()) for state in optimizer.state.values()]
    manifest = {
        "format": 1,
        "step": step,
        "tokens": step * config.batch_tokens,
        "updates": max(updates, default=0),
        "world_size": ranks.world_size,
        "position": position,
        "config": asdict(config),
        "files": parts,
    }
    path = temporary / "manifest.json"
    path.write_text(json.dumps(manifest))
    _sync(path)
    _sync(temporary)
    damaged = folder.with_name(f"{temporary.name}.old")
    if folder.exists():  # passed over when the run was resumed from an older one
        os.rename(folder, damaged)
    os.rename(temporary, folder)
    shutil.rmtree(damaged, ignore_errors=True)
    _sync(folder.parent)
    pointer = folder.parent / "latest.tmp"
    pointer.write_text(folder.name + "\n")
    os.replace(pointer, folder.parent / "latest")


def folders(run: Path) -> list[Path]:
    """Step folders, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name))


def _prune(run: Path, keep: int, step: int) -> None:
    for old in [p for p in folders(run) if int(p.name[5:]) <= step][
        :-keep
    ]:  # later ones are damaged, and count for none
        (old / "manifest.json").unlink(missing_ok=True)  # first, so that half a folder is never taken for a checkpoint
        shutil.rmtree(old)
    for torn in (run / "checkpoints").glob("step-*.tmp-*"):
        shutil.rmtree(torn, ignore_errors=True)


def verify(run: Path | str) -> list[tuple[int, bool, str]]:
    """(step, whether it is whole, what is wrong with it) of every checkpoint of a run, oldest first."""
    faults = {p: _fault(p) for p in folders(Path(run))}
    return [(int(p.name[5:]), not fault, fault) for p, fault in faults.items()]


def _fault(folder: Path) -> str:
    """Why a checkpoint cannot be trusted; empty if it can."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for part in manifest["files"]:
            path = folder / part["file"]
            if path.stat().st_size != part["bytes"]:
                return f"{path.name} has {path.stat().st_size} bytes, expected {part['bytes']}"
            if _checksum(path) != part["crc32"]:
                return f"the checksum of {path.name} is wrong"
    except FileNotFoundError as e:
        return f"{Path(e.filename).name} is missing"
    except (ValueError, KeyError, OSError) as e:
        return f"unreadable: {e}"
    return ""


class Checkpoint:
    """A checkpoint folder, opened for reading."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.step = self.manifest["step"]
        self.files, self.places = {}, {}
        for part in self.manifest["files"]:
            for key, place in part["tensors"].items():
                self.places.setdefault(key, []).append((part["file"], place))

    def read(self, key: str, slices: tuple[slice, ...]) -> Tensor:
        """Those values of the tensor, put together from the parts that hold them."""
        if key not in self.places:
            raise UserError(f"{self.folder} holds no tensor {key}: it is a checkpoint of another model")
        first = self.places[key][0][1]
        bounds = [s.indices(n)[:2] for s, n in zip(slices, first["whole"], strict=True)]
        out = torch.empty([max(0, b - a) for a, b in bounds], dtype=getattr(torch, first["dtype"]))
        for file, place in self.places[key]:
            overlap = [
                (max(a, s), min(b, s + n)) for (a, b), s, n in zip(bounds, place["start"], place["shape"], strict=True)
            ]
            if any(a >= b for a, b in overlap):
                continue
            if file not in self.files:
                self.files[file] = safe_open(self.folder / file, framework="pt")
            there = tuple(slice(a - s, b - s) for (a, b), s in zip(overlap, place["start"], strict=True))
            here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, bounds, strict=True))
            out[here] = self.files[file].get_slice(key)[there]
        return out

    def read_weights(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        return self.read(f"model.{name}", slices)

    def restore_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Moments and update count; on the mesh that the model is on now."""
        if not self.manifest["updates"]:
            return
        for parameter in model.parameters():
            device = local(parameter).device
            optimizer.state[parameter] = {"step": torch.tensor(float(self.manifest["updates"]), device=device)}
            for moment in MOMENTS:
                optimizer.state[parameter][moment] = torch.zeros_like(parameter, requires_grad=False)
        for moment in MOMENTS:
            for name, parameter in model.named_parameters():
                state = optimizer.state[parameter][moment]
                local(state).copy_(self.read(f"{moment}.{name}", local_slices(state)))

    def restore_rng(self, ranks: Ranks) -> None:
        """The random state of this rank; on another number of ranks there is none to restore."""
        if self.manifest["world_size"] != ranks.world_size:
            return
        with safe_open(self.folder / f"rank-{ranks.rank:05d}.safetensors", framework="pt") as f:
            torch.set_rng_state(f.get_tensor("rng"))
            if ranks.device.type == "cuda" and "rng.cuda" in f.keys():  # noqa: SIM118 (no mapping)
                torch.cuda.set_rng_state(f.get_tensor("rng.cuda"), ranks.device)


def find(config: Config) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from (None: a fresh start), and what a user should know about those that were passed
    over. Refuses a run folder whose checkpoints are all damaged, and one that was trained with other settings."""
    skipped = []
    if config.resume == "never":
        _check_room(config, 0)
        return None, skipped
    if config.resume == "auto":
        candidates = folders(Path(config.out))[::-1]
    else:
        candidates = [Path(config.resume)]
        if not candidates[0].is_dir():
            raise UserError(f"--resume {config.resume}: no such checkpoint folder (nor is it auto or never)")
    for folder in candidates:
        fault = _fault(folder)
        if not fault:
            found = Checkpoint(folder)
            _check_settings(found, config)
            if config.resume != "auto":
                _check_room(config, found.step)
            return found, skipped
        skipped.append(f"Skipped the damaged checkpoint {folder}: {fault}")
    if candidates:
        raise UserError(
            "\n".join(
                [*skipped, f"No whole checkpoint is left in {config.out}: mend it, or start afresh with another --out"]
            )
        )
    return None, skipped


def _check_room(config: Config, step: int) -> None:
    """A run that does not go on from its folder's newest checkpoint must not meet later ones there."""
    later = [p.name for p in folders(Path(config.out)) if int(p.name[5:]) > step]
    if later:
        raise UserError(f"--resume {config.resume}: {config.out} holds {later[-1]} already; give another --out")


def _check_settings(found: Checkpoint, config: Config) -> None:
    now, then = json.loads(json.dumps(asdict(config))), found.manifest["config"]
    changed = [k for k in now if k not in MAY_CHANGE and k in then and now[k] != then[k]]
    if changed:
        lines = [f"--{k} was {then[k]!r}, is {now[k]!r}" for k in changed]
        raise UserError(
            f"{found.folder} was trained with other settings:\n  "
            + "\n  ".join(lines)
            + "\nGive the old ones to go on, or a new --out to start afresh"
        )


def restore(found: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Weights, optimizer and random state. All ranks must call."""
    fill(model, found.read_weights)
    found.restore_optimizer(model, optimizer)
    found.restore_rng(ranks)
