"""Checkpoints: a folder per step with the weights, the optimizer's moments, the data position and the random state.

    checkpoints/step-00000100/rank-00000.safetensors ...   each rank's parts of the tensors
                              manifest.json                step, settings, data position, every part's place, sizes,
                              checksums

safetensors and JSON only: loading runs no code. A save writes into a temporary folder, which is synced and then
renamed: a checkpoint is there whole or not at all, and is never written again. Every tensor is stored in parts with
their offsets, so any number of ranks, on any mesh, reads just the slices it keeps."""

import argparse
import json
import os
import re
import secrets
import shutil
import sys
import zlib
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

from errors import UserError  # first: it finds the Python that has torch

import torch  # isort: skip
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from config import Config
from model import ModelConfig, RopeScaling
from shard import Ranks, fill, fill_tensors, gather, local, local_slices, on_first_rank, owns
from tensorfile import Slices, TensorFile, assemble
from tokenizer import load_tokenizer
from weights import Export

MOMENTS = ("exp_avg", "exp_avg_sq")
# What may differ when a run goes on: how often things happen, where, and how the same step is split and computed.
MAY_CHANGE = {
    "steps", "out", "log_every", "eval_every", "eval_batches", "save_every", "keep", "resume", "sample_every", "prompt",
    "check", "micro_batch", "shard_size", "checkpointing", "compile", "attention", "val_data", "data", "reshard",
    "prefetch", "offload", "offload_activations", "load", "timeout", "skip_bad", "read_ahead_gb", "profile",
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
    folder = step_folder(run, step)
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
        "model": asdict(config.model_config),
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


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


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
        scaling = values.pop("rope_scaling")
        return ModelConfig(**values, rope_scaling=scaling and RopeScaling(**scaling))

    def read(self, key: str, slices: Slices) -> Tensor:
        """Those values of the tensor, put together from the parts that hold them."""
        if key not in self.places:
            raise UserError(f"{self.folder} holds no tensor {key}: it is a checkpoint of another model")
        first = self.places[key][0][1]
        parts = [(p["start"], p["shape"], partial(self._read_part, file, key)) for file, p in self.places[key]]
        return assemble(slices, first["whole"], getattr(torch, first["dtype"]), parts)

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


def restore(
    found: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, load: str = "direct"
) -> None:
    """Weights, optimizer and random state. load: see shard.fill. All ranks must call."""
    fill(model, found.read_weights, load)
    found.restore_optimizer(model, optimizer, load)
    found.restore_rng(ranks)


# ---- for people and other programs


def newest(run: Path) -> Checkpoint:
    """A run's newest whole checkpoint."""
    faults = []
    for folder in folders(run)[::-1]:
        fault = _fault(folder)
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
            found = Checkpoint(folder).manifest
            size, ranks = sum(part["bytes"] for part in found["files"]), found["world_size"]
            print(f"step {found['step']}: {size / 1e9:.3f} GB, {found['tokens']} tokens, written by {ranks} ranks")
        except (OSError, ValueError, KeyError) as e:
            print(f"{folder.name}: no readable manifest ({e})")
    return 0


def _export(args: argparse.Namespace) -> int:
    if not args.shard_gb > 0:
        raise UserError(f"--shard_gb {args.shard_gb}: it must be positive")
    found = newest(args.run)
    tokenizer = load_run_tokenizer(found, args.tokenizer) if args.tokenizer != "none" else None
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    export(found, args.out, Ranks(0, 1, torch.device("cpu")), dtype, args.shard_gb, tokenizer)
    print(f"{args.out}: step {found.step} of {args.run} in {args.dtype}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, OSError) as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or (2 if isinstance(error, UserError) else 1))
    except KeyboardInterrupt:
        sys.exit(130)
