"""Checkpoints: a folder per step with the weights, the optimizer's state and the position in the data.

    checkpoints/step-00000100/rank-00000.safetensors ...   each rank's shards of the tensors
                              manifest.json                step, settings, data position, how each tensor is divided,
                                                           sizes, checksums, and the loss of a probe
                              keep                         exists if the checkpoint is kept for good

The files are safetensors and JSON, so loading runs no code. A save writes into a temporary folder, calls fsync and
renames the folder: a checkpoint is complete or absent, and never changes afterwards. A tensor is divided evenly along
one dimension, and rank n wrote shard n; so the manifest has one row per tensor and one per file, for any number of
ranks. A resume on any number of ranks and any mesh opens only the files with the values that a rank keeps.

Each checkpoint stores a row of tokens, the probe, with its loss, and a resume computes this loss again from the loaded
weights. Random states are not saved: initial values and the order of rows are functions of the seed, and training
draws nothing else.

We do not use torch.distributed.checkpoint: its metadata are pickles, an interrupted save into an existing folder loads
as a mixture of two states, it has no checksums, and with safetensors it took 1.3 to 2 times as long (torch 2.13)."""

import argparse
import json
import logging
import math
import os
import re
import shutil
import sys
import time
import zlib
from collections import defaultdict
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from base.disk import MISSING_FILE, checksum, fsync_path, read_json, retry, write_whole
from base.errors import Failure, Parser, UserError, check_words, describe_error, prepare_python, run_script

# ---- the command line, parsed before torch is imported, which takes seconds


FLAGS = {
    "verb": dict(
        choices=("list", "verify", "export"),
        help="list: compare sizes; verify: also checksums; export: write the newest as a Hugging Face folder",
    ),
    "run": dict(type=Path, help="run folder; of export, also one of its checkpoints"),
    "out": dict(type=Path, nargs="?", help="folder of the export"),
    "--dtype": dict(choices=("fp32", "bf16"), default="fp32", help="of the export; fp32 is exact"),
    "--tokenizer": dict(default="", help="of the export, if it is not the run's"),
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(FLAGS, description="Lists, verifies or exports a run's checkpoints.")
    args = parser.parse_args(argv)
    if (args.verb == "export") != bool(args.out):
        parser.error("expected list RUN, verify RUN or export RUN OUT")
    return args


if __name__ == "__main__":
    prepare_python()
    check_words(parse)

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from base.ranks import ALONE, Ranks, gather, on_every_rank, on_first_rank
from base.tensors import HostCopies, Slices, TensorFile, assemble, local, shard_slices, sharding, write_file
from config import Config, fields_that_resume, from_json
from data import Loader
from dataset.prepare import knows_text
from dataset.rows import merge_positions
from hf.weights import base_fingerprint, export_trained, refuse_other_base
from job.job import ANSWER, Run
from optim import DTYPES, Optimizer, learning_rate, trainable_parameters
from shapes import ModelConfig, RopeScaling
from shard import fill_tensors, free_gathered, uncompiled, whole_rows

FORMAT = 4
FILE_BYTES = 2**31  # of a file, and at most one tensor more: they are copied into the host's memory to be written
OPEN_FILES = 64  # of a checkpoint, at a time
PROBE = 128  # tokens of the probe
TRIES, PAUSE = 3, 30  # failures of saves in a row that end the run; seconds between two tries of a save
# Largest difference of the probe's loss between kernels and meshes, nats per token, by compute dtype.
TOLERANCE = {
    torch.float32: 0.002,
    torch.bfloat16: 0.03,
}
STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
# Folders that a run makes in checkpoints/: checkpoints, damaged ones, saves in progress, and removals in progress.
MADE = re.compile(rf"{STEP.pattern}(\.damaged\d*)?(\.tmp-([0-9a-f]{{32}}|old))?")
logger = logging.getLogger("flatland")


@dataclass
class Layout:
    """How a tensor is stored: divided evenly along `dim` into `parts` shards, where rank n wrote shard n."""

    shape: list[int]
    dtype: str
    dim: int
    parts: int
    file: str = ""  # the files with its shards: * stands for the rank

    def slices(self, index: int) -> Slices:
        """Where a shard lies in the tensor."""
        return shard_slices(self.shape, self.dim, self.parts, index)

    def entry(self, index: int) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a shard, as in TensorFile.entries."""
        return getattr(torch, self.dtype), tuple(s.stop - s.start for s in self.slices(index))


def file_name(file: str, rank: int) -> str:
    """The file that a rank wrote. file: as in a Layout."""
    return file.replace("*", f"{rank:05d}")


class Best:
    """The best evaluation of a run so far, by --keep_best. Its checkpoint is kept in addition to the newest ones. All
    ranks have the same."""

    def __init__(self, config: Config, resume_from: "Checkpoint | None", warnings: list[str]):
        """Continues from a checkpoint. Adds a warning if its best one is not in this run folder, or was judged by
        another figure."""
        self.name, self.patience = config.keep_best, config.patience
        self.value, self.step, self.since = math.inf, 0, 0  # value: small is good; since: evaluations after the best
        self.data = 0  # identifies what judges; 0: not known
        self.reason = ""  # why the run ends before --steps
        saved = resume_from and resume_from.manifest.get("best")
        if not saved or self.name == "none":
            return
        if saved["name"] == self.name and step_folder(Path(config.out), saved["step"]).exists():
            same_patience = saved["patience"] == self.patience
            vars(self).update(saved, patience=self.patience, reason=saved["reason"] * same_patience)
        else:
            warnings.append(f"The best checkpoint, of step {saved['step']}, is not here or was judged otherwise")

    def judge_by(self, data: int) -> None:
        """Forgets the best one if other data judged it."""
        if self.data not in (0, data):
            logger.warning(f"The best checkpoint, of step {self.step}, was judged by other data")
            self.value, self.step, self.since = math.inf, 0, 0
        self.data = data

    def update(self, step: int, val: dict[str, float]) -> bool:
        """Whether to save this step, because its evaluation is the best so far, or ends the run."""
        if self.name not in val:
            return False
        value = val[self.name] * (-1 if self.name == "score_acc" else 1)
        self.since += 1
        if value < self.value:
            self.value, self.step, self.since = value, step, 0
        if self.step and 0 < self.patience <= self.since:
            self.reason = f"--patience {self.patience}: no better {self.name} since step {self.step}"
        return self.step == step or bool(self.reason)

    def checkpoint(self, config: Config, last: int, run: Run) -> "Checkpoint":
        """The best one for the export, or, if there is none or it is damaged, that of the last step. All ranks must
        call."""
        step = self.step or last
        folder = step_folder(run.folder, step)
        if step < last and (fault := fault_of(folder, run.ranks)):
            logger.warning(f"{folder}, the best by {self.name}, is damaged: {fault}. hf/ gets step {last}")
            return Checkpoint(step_folder(run.folder, last))
        if self.step:
            logger.info(f"hf/ gets step {step}: {self}")
            is_early = step <= config.warmup or learning_rate(config, step) >= config.lr
            if is_early and config.schedule != "constant":
                logger.warning(f"At step {step} --lr had not begun to decay: a run with fewer --steps may be better")
        return Checkpoint(folder)

    def __str__(self) -> str:
        """For the status."""
        return self.reason or f"best {self.name} at step {self.step}" * bool(self.step)


# ---- saving


@torch.no_grad()
def probe_loss(model: nn.Module, tokens: list[int], device: torch.device) -> float:
    """Mean loss of one row of tokens. It is not compiled, so that it does not depend on the compiler. All ranks must
    call."""
    ids = torch.tensor([tokens], device=device)
    model.eval()
    with uncompiled(), whole_rows(model):
        loss = model(ids[:, :-1], ids[:, 1:]).item() / (len(tokens) - 1)
    free_gathered(model)
    model.train()
    return loss


def compare_replicas(model: nn.Module, ranks: Ranks, mesh: DeviceMesh | None, step: int) -> None:
    """Raises Failure on all ranks if copies of the parameters differ in a bit. All ranks must call."""
    if mesh is None or mesh["replicate"].size() == 1:
        return
    tensors = [local(p.detach()) for p in (*model.parameters(), *model.buffers())]
    bits = hash(tuple(torch.hash_tensor(tensor).item() for tensor in tensors if tensor.numel()))
    shards = defaultdict(list)  # (shard, hash of its bits) -> the ranks that hold it
    for key, name in gather(((mesh.get_coordinate()[1], bits), ranks.name), ranks):
        shards[key].append(name)
    if len(shards) > mesh["shard"].size():
        listed = " | ".join(map(", ".join, sorted(shards.values(), key=len)))
        raise Failure(
            f"After step {step} not all copies of the parameters are equal, the odd ones out first: {listed}."
            " The same command resumes from the newest checkpoint"
        )


class Saver(AbstractContextManager):
    """Writes checkpoints in the background: `save` computes the probe's loss, and a thread copies this rank's shards
    into the host's memory and writes them. The optimizer's next step waits for the copies. Each save waits for the
    previous save. One that fails is tried again after PAUSE seconds, and if it fails again, the run goes on until the
    next save, for which training waits; TRIES failures in a row end the run. If an error ends the loop, the context
    manager waits for the save in progress. All ranks must make one."""

    def __init__(self, config: Config, run: Run, model: nn.Module, optimizer: Optimizer, data: Loader, start: int):
        """start: the last step before this start of the run."""
        self.model, self.optimizer, self.data, self.run = model, optimizer, data, run
        self.config, self.ranks = config, run.ranks
        self.ranks_of_thread = replace(self.ranks, control=self.ranks.saving)
        self.base = base_fingerprint(self.config, self.ranks)
        # A checkpoint after `start` is damaged: otherwise the run would resume from it. A fresh start (0) renames none.
        on_first_rank(lambda: clean(run.folder, start or math.inf), self.ranks)
        self.thread, self.writing = ThreadPoolExecutor(1, "checkpoint"), None
        self.failures = 0  # in a row; the same on all ranks
        self.copies = HostCopies(self.ranks.device)

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if error is not None and self.writing:
            with self.run.phase("saves"):
                futures.wait([self.writing], ANSWER)  # seconds

    def save(self, step: int, row: Tensor, facts: dict | None = None, last: bool = False) -> float:
        """Saves the state after `step` updates and removes the oldest checkpoints beyond --keep -> milliseconds that
        training waited. row [T]: tokens for the probe. facts: more for the manifest. last: training ends here, so the
        save is awaited, and tried TRIES times. All ranks must call."""
        begin = time.perf_counter()
        with self.run.phase("saves"):
            self.wait()
            positions = gather(on_every_rank(self.data.state_dict, self.ranks), self.ranks)
            compare_replicas(self.model, self.ranks, self.run.mesh, step)
            tokens = on_first_rank(row[: PROBE + 1].tolist, self.ranks)
            loss = probe_loss(self.model, tokens, self.ranks.device)
            if not math.isfinite(loss):
                raise RuntimeError(f"The model's loss after step {step} is {loss}, so its state is not saved")
            manifest = (facts or {}) | {
                "format": FORMAT,
                "step": step,
                "position": merge_positions(positions),
                "probe": {"tokens": tokens, "loss": loss, "tolerance": TOLERANCE[self.model.dtype]},
                "base": self.base,
                "config": self.config.flags(),
                "model": asdict(self.config.model_config),
            }
            tensors, layouts = own_shards(self.model, self.optimizer, self.ranks)
            # Otherwise training waits: for the last save, for one that may end the run, and for an offloaded state,
            # which fills the host.
            copies = self.config.save_async and self.config.offload == "none" and not (last or self.failures)
            if copies:
                self.optimizer.may_update.clear()
                self.copies.begin()
            if last:
                self.failures = 0
            tries = TRIES if last else 2
            self.writing = self.thread.submit(self._write, manifest, tensors, layouts, copies, tries)
            if not copies:
                self.wait()
        return 1e3 * (time.perf_counter() - begin)

    def wait(self) -> None:
        """Waits for the save in progress. Raises Failure if saves have failed TRIES times. All ranks must call."""
        if self.writing:
            with self.run.phase("saves"):
                self.writing.result()

    def _write(
        self,
        manifest: dict,
        tensors: dict[str, Tensor],
        layouts: dict[str, Layout],
        copies: bool,
        tries: int,
    ) -> None:
        """Runs in the thread: every rank copies its shards, if training goes on, and writes them. Then rank 0 writes
        the manifest. See Saver."""
        begin, ranks = time.perf_counter(), self.ranks_of_thread
        folder = step_folder(self.run.folder, manifest["step"])
        temporary = folder.with_name(f"{folder.name}.tmp-{self.run.nonce}")
        try:
            shards = on_every_rank(lambda: self.copies.make(tensors) if copies else tensors, ranks)
        finally:
            self.optimizer.may_update.set()
        for number in range(tries):
            if number:
                time.sleep(PAUSE)
            try:
                files = on_every_rank(lambda: _write_shards(temporary, shards, layouts, ranks.rank), ranks)
                files = sum(gather(files, ranks), [])
                whole = manifest | {"tensors": layouts, "files": files}
                on_first_rank(partial(_commit, temporary, folder, whole, self.config), ranks)
                size, seconds = sum(row["bytes"] for row in files) / 1e9, time.perf_counter() - begin
                logger.info(f"Saved {folder.name}: {size:.3f} GB in {seconds:.1f} s")
                self.failures = 0
                return
            except Exception as error:  # of any rank
                what = describe_error(error)[1]
            # The others wait: none may write into the folder while it is removed.
            on_first_rank(partial(shutil.rmtree, temporary, ignore_errors=True), ranks)
            self.failures += 1
            message = f"Saves that have failed in a row: {self.failures} of {TRIES}: {what}"
            if self.failures == TRIES:
                stopped_by = self.run.stopped_by
                raise Failure(f"Stopped by {stopped_by} without a save. " * bool(stopped_by) + message)
            logger.warning(f"{message}. It is tried again")


def name_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The trained parameters and the optimizer's state, by their names in a checkpoint."""
    out = {}
    for name, parameter in trainable_parameters(model).items():
        for kind, tensor in {"model": parameter.detach(), **optimizer.state[parameter]}.items():
            out[f"{kind}.{name}"] = tensor
    return out


def own_shards(model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Layout]]:
    """-> (the shards of the state that this rank writes, by name; how each tensor of the state is stored, the same on
    all ranks)"""
    shards, layouts = {}, {}
    for key, tensor in name_tensors(model, optimizer).items():
        dim, count, index = sharding(tensor)
        layouts[key] = Layout([*tensor.shape], str(tensor.dtype)[6:], dim, count)
        if index == ranks.rank and local(tensor).numel():  # the first replica's ranks have the numbers of the shards
            shards[key] = local(tensor)
    assign_files(layouts)
    return shards, layouts


def assign_files(layouts: dict[str, Layout]) -> None:
    """Gives each tensor the name of the files with its shards, where * stands for the rank. Rank 0 decides the sizes,
    because its shards are the largest. It has all scalars, which every rank reads, so they come first, in one file."""
    size = 0
    for layout in sorted(layouts.values(), key=lambda layout: len(layout.shape) > 0):
        number = size // FILE_BYTES
        layout.file = f"rank-*-{number}.safetensors" if number else "rank-*.safetensors"
        dtype, shape = layout.entry(0)
        size += math.prod(shape) * dtype.itemsize


def _write_shards(folder: Path, tensors: dict[str, Tensor], layouts: dict[str, Layout], rank: int) -> list[dict]:
    """Writes the shards of a rank -> a row of the manifest for each file."""
    folder.parent.mkdir(exist_ok=True)  # fails if the run folder was removed
    folder.mkdir(exist_ok=True)
    rows, files = [], defaultdict(dict)
    for key, tensor in tensors.items():
        files[layouts[key].file][key] = tensor
    for file, shards in files.items():
        path = folder / file_name(file, rank)
        write_file(path, {key: shard.contiguous() for key, shard in shards.items()})
        rows.append({"file": file, "part": rank, "bytes": path.stat().st_size, "crc32": checksum(path)})
    return rows


def _commit(temporary: Path, folder: Path, manifest: dict, config: Config) -> None:
    """Writes the manifest and renames the folder, which completes the checkpoint. Then removes old ones. Rank 0 calls
    this last."""
    text = json.dumps(manifest | {"crc32": _crc_of(manifest)}, default=vars)
    write_whole(temporary / "manifest.json", text, sync=True)
    if config.keep_every and manifest["step"] % (config.keep_every * config.save_every) == 0:
        (temporary / "keep").touch()
    fsync_path(temporary)
    os.rename(temporary, folder)
    run = folder.parent.parent
    try:  # what fails from here on must not fail the save: its next try could not rename
        for changed in (folder.parent, run):  # the first save creates folder.parent
            fsync_path(changed)
        remove_old(run, config.keep, manifest.get("best", {"step": 0})["step"])
    except OSError as e:
        logger.warning(f"Old checkpoints stay until the next save: {e}")


def remove_old(run: Path, keep: int, best: int = 0) -> None:
    """Removes the checkpoints before the newest `keep`, except that of step `best`, and the damaged ones with them; see
    _may_remove."""
    newest = folders(run)[-keep:]
    if len(newest) == keep:
        for old in {*(run / "checkpoints").iterdir()} - {*newest, step_folder(run, best)}:
            if _may_remove(old):
                os.rename(old, old.with_name(f"{old.name}.tmp-old"))  # interrupted, it must not look like a checkpoint
    clean(run)


def _may_remove(path: Path) -> bool:
    """Whether a run made this folder in checkpoints/, and no file `keep` keeps it for good."""
    is_made = MADE.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    return is_made and (".tmp-" in path.name or not (path / "keep").exists())


def _crc_of(manifest: dict) -> int:
    return zlib.crc32(json.dumps(manifest, default=vars).encode())


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def folders(run: Path) -> list[Path]:
    """Step folders, oldest first."""
    return sorted((p for p in (run / "checkpoints").glob("step-*") if STEP.fullmatch(p.name)), key=step_of)


def clean(run: Path, last: float = math.inf) -> None:
    """Deletes what interrupted saves and removals have left, and renames checkpoints after step `last`, which are
    damaged."""
    for leftover in (run / "checkpoints").glob("*.tmp-*"):
        if _may_remove(leftover):
            shutil.rmtree(leftover, ignore_errors=True)
    for damaged in folders(run):
        if step_of(damaged) > last:
            os.rename(damaged, damaged.with_name(f"{damaged.name}.damaged{time.time():.0f}"))


# ---- verifying


def read_manifest(folder: Path) -> dict:
    """Raises ValueError with the reason if the manifest is damaged, OSError if it cannot be read."""
    path = folder / "manifest.json"
    text = retry(path.read_bytes, path)
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, this version reads {FORMAT} (README.md)")
        is_other = STEP.fullmatch(folder.name) and manifest["step"] != step_of(folder)
        if manifest.pop("crc32") != _crc_of(manifest) or is_other:
            raise ValueError("its checksum is wrong, or it belongs to another step")
        manifest["tensors"] = {key: Layout(**layout) for key, layout in manifest["tensors"].items()}
    except Exception as e:
        raise ValueError(f"manifest.json is unreadable: {type(e).__name__}: {e}") from None
    return manifest


def _fault_of_file(folder: Path, layouts: dict[str, Layout], checksums: bool, row: dict) -> str:
    """As fault_of, of the file with this row in the manifest."""
    rank = row["part"]
    path = folder / file_name(row["file"], rank)
    size = retry(path.stat, path).st_size
    if size != row["bytes"]:
        return f"{path.name} has {size} bytes, expected {row['bytes']}"
    here = {key: layout for key, layout in layouts.items() if layout.file == row["file"] and rank < layout.parts}
    entries = {key: layout.entry(rank) for key, layout in here.items()}
    if TensorFile(path).entries != {key: entry for key, entry in entries.items() if math.prod(entry[1])}:
        return f"{path.name} does not hold the manifest's tensors"
    is_wrong = checksums and checksum(path) != row["crc32"]
    return f"the checksum of {path.name} is wrong" * is_wrong


def fault_of(folder: Path, ranks: Ranks = ALONE, checksums: bool = True) -> str:
    """The first fault of a checkpoint, or "". Each rank reads its share of the files in threads; without `checksums` it
    compares only sizes and headers. Raises on all ranks the OSError of a rank that cannot read. All ranks must call."""

    def examine() -> str:
        try:
            manifest = read_manifest(folder)
            with ThreadPoolExecutor() as pool:
                rows = manifest["files"][ranks.rank :: ranks.world_size]
                faults = pool.map(partial(_fault_of_file, folder, manifest["tensors"], checksums), rows)
                return next(filter(None, faults), "")
        except Exception as e:  # a damaged file leads to any kind
            if isinstance(e, (OSError, MemoryError)) and not isinstance(e, MISSING_FILE):
                raise  # it says nothing about the content
            return str(e) or repr(e)

    return next(filter(None, gather(on_every_rank(examine, ranks), ranks)), "")


def verify(run: Path | str, checksums: bool = True) -> list[tuple[int, bool, str]]:
    """(step, whether it is intact, its fault or "") of each checkpoint of a run, oldest first."""
    faults = ((step_of(folder), fault_of(folder, checksums=checksums)) for folder in folders(Path(run)))
    return [(step, not fault, fault) for step, fault in faults]


# ---- loading


class Checkpoint:
    """A checkpoint folder, opened for reading."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.step = self.manifest["step"]
        self.layouts = self.manifest["tensors"]
        self.open = lru_cache(OPEN_FILES)(lambda file: TensorFile(folder / file))

    @property
    def config(self) -> Config:
        """The settings of the run that saved it."""
        return replace(from_json(self.manifest["config"]), model_config=self.model_config)

    @property
    def model_config(self) -> ModelConfig:
        """The model's shape when it was saved. Fields that were added later have their default."""
        scaling = self.manifest["model"]["rope_scaling"]
        return ModelConfig(**self.manifest["model"] | {"rope_scaling": scaling and RopeScaling(**scaling)})

    @property
    def tokenizer(self) -> str:
        """The tokenizer of its texts; empty for shards whose text is not known."""
        return self.config.tokenizer * knows_text(self.config)

    def read(self, key: str, slices: Slices) -> Tensor:
        """A slice of a tensor, assembled from the stored shards. Opens only files with a part of it."""
        if key not in self.layouts:
            raise UserError(f"{self.folder} has no tensor {key!r}; it is a checkpoint of another model")
        layout = self.layouts[key]
        needed = range(layout.parts)
        if layout.shape:
            rows = range(layout.shape[layout.dim])
            height, wanted = -(-len(rows) // layout.parts), rows[slices[layout.dim]]
            needed = range(wanted.start // height, -(-wanted.stop // height))

        def read_shard(index: int, slices: Slices) -> Tensor:
            return self.open(file_name(layout.file, index)).read(key, slices)

        sources = ((layout.slices(i), partial(read_shard, i)) for i in needed)
        return assemble(slices, layout.shape, getattr(torch, layout.dtype), sources)

    def read_weights(self, name: str, slices: Slices) -> Tensor:
        return self.read(f"model.{name}", slices)

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Fills the trained parameters and the optimizer's state. Every rank reads only its shards. All ranks must
        call."""
        targets = name_tensors(model, optimizer)
        for key, target in targets.items():
            if not target.ndim:
                target.copy_(self.read(key, ()))
        fill_tensors([(key, target) for key, target in targets.items() if target.ndim], self.read)
        self.open.cache_clear()  # closes the files, so that the disk can free them


def find(config: Config, ranks: Ranks = ALONE, checksums: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to resume from (None: a fresh start), and a message for each damaged checkpoint that was skipped.
    Refuses a run folder whose checkpoints are all damaged. Without `checksums`, damage inside a file is not found. All
    ranks must call."""
    skipped = []
    for folder in on_first_rank(lambda: _candidates(config), ranks):
        if not (fault := fault_of(folder, ranks, checksums)):
            return Checkpoint(folder), skipped
        skipped.append(f"Skipped the damaged checkpoint {folder}: {fault}")
    if skipped:
        raise UserError("\n".join([*skipped, "No checkpoint is intact: name another one, or begin with another --out"]))
    return None, []


def newest(run: Path) -> Checkpoint:
    """A run's newest intact checkpoint, or the one in this folder; says which. UserError if there is none."""
    is_one = (run / "manifest.json").exists()
    if not is_one:
        refuse_empty(run)
    saved, _ = find(Config(out=str(run), resume=str(run) if is_one else "auto"))
    best = saved.manifest.get("best", saved.manifest)["step"]
    hint = f"; the best one is {step_folder(run, best).name}" * (best != saved.step)
    print(f"{run}, step {saved.step}{hint}", file=sys.stderr)
    return saved


def refuse_empty(run: Path) -> None:
    """UserError if a run has no checkpoints."""
    if not folders(run):
        raise UserError(f"{run} has no checkpoints; a run folder is runs/NAME")


def keep_defaults(config: Config) -> Config:
    """--batch_tokens 0 and --lanes 0, whose values depend on the ranks, become those in the checkpoint that the run
    resumes, if there is a checkpoint."""
    manifests = (read_json(folder / "manifest.json") for folder in _candidates(config))
    saved = next(filter(None, manifests), {}).get("config", {})
    absent = {name for name in ("batch_tokens", "lanes") if not getattr(config, name)}
    return replace(config, **{name: saved[name] for name in absent & saved.keys()})


def _candidates(config: Config) -> list[Path]:
    """Newest first. UserError if --resume would ignore the newest checkpoint of the run folder."""
    existing = folders(Path(config.out))[::-1]
    if config.resume == "auto":
        return existing
    chosen = [] if config.resume == "never" else [Path(config.resume)]
    if not all((folder / "manifest.json").exists() for folder in chosen):
        raise UserError(f"--resume {config.resume}: it is not a checkpoint, which is in RUN/checkpoints/step-N")
    if existing and not any(map(existing[0].samefile, chosen)):
        raise UserError(f"--resume {config.resume}: {config.out} already holds {existing[0].name}; give another --out")
    return chosen


def changes(resume_from: Checkpoint, config: Config) -> dict[str, list]:
    """{name: [old, new]} of the settings that differ from the checkpoint's, except settings that may always change."""
    old, new = resume_from.config.flags(), config.flags()
    names = [name for name in new if name not in fields_that_resume("free")]
    return {name: [old[name], new[name]] for name in names if old[name] != new[name]}


def refuse_changes(resume_from: Checkpoint | None, config: Config) -> None:
    """Refuses to resume with other settings; --resume_override names exceptions. Also refuses a checkpoint of another
    run that leaves nothing to train. None: a fresh start."""
    if resume_from is None:
        return
    if resume_from.step >= config.steps and not step_folder(Path(config.out), resume_from.step).exists():
        raise UserError(f"--steps {config.steps}: {resume_from.folder} has done {resume_from.step}; give more")
    refused = {name: pair for name, pair in changes(resume_from, config).items() if name not in config.resume_override}
    if not refused and resume_from.model_config != config.model_config:
        refused["model"] = [resume_from.model_config, config.model_config]  # its config.json has changed
    if refused:
        lines = [f"  --{name} was {old!r}, is {new!r}" for name, (old, new) in refused.items()]
        override = f"--resume_override {','.join(refused)} accepts the new values, "
        override *= set(refused) <= set(fields_that_resume("override"))
        last = f"The old values resume it, {override}a new --out starts another run"
        raise UserError("\n".join([f"{resume_from.folder} was trained with other settings:", *lines, last]))


def restore(
    resume_from: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Ranks,
    config: Config,
) -> None:
    """Loads trained parameters and optimizer state; frozen parameters must have their values. Refuses a checkpoint
    whose frozen weights have changed, or whose probe has another loss now. All ranks must call."""
    refuse_other_base(config, resume_from.manifest["base"], ranks)
    # A rank may read for hours; later collectives wait only for --timeout.
    on_every_rank(lambda: resume_from.load(model, optimizer), ranks)
    probe = resume_from.manifest["probe"]
    losses = gather(probe_loss(model, probe["tokens"], ranks.device), ranks)
    wrong = [loss for loss in losses if not abs(loss - probe["loss"]) <= probe["tolerance"]]
    proof = f"the loss of its probe was {probe['loss']:.6f} at the save and is {(wrong or losses)[0]:.6f} now"
    if wrong:
        raise UserError(f"{resume_from.folder}: {proof}: values or code have changed; use the code that saved it")
    logger.info(f"Resumed from {resume_from.folder} after step {resume_from.step}: {proof}")
    if overridden := changes(resume_from, config):
        logger.info(f"Continuing with other settings, [old, new]: {overridden}")


def is_finished(config: Config, step: int) -> bool:
    """Whether a run has finished at that step, with its export."""
    status = read_json(Path(config.out) / "status.json")
    return (status.get("state"), status.get("step")) == ("finished", step)


# ---- the command line


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.verb == "export":
        export_trained(newest(args.run), args.out, DTYPES[args.dtype], spec=args.tokenizer)
        return 0
    refuse_empty(args.run)
    rows = verify(args.run, checksums=args.verb == "verify")
    print(*(f"step {step}: {fault or 'intact'}" for step, _, fault in rows), sep="\n")
    return int(not all(intact for _, intact, _ in rows))


if __name__ == "__main__":
    run_script(main)
