"""Reads Hugging Face folders (safetensors and config.json) of the model types in lib/families.py, and PEFT's adapters.
lib/weights.py writes them.

FAMILIES (lib/families.py) names the tensors that the file stores for each of our parameters. Reading is strict: every
tensor must be present with its shape, and no other tensor may be. RoPE keeps Hugging Face's half-split layout, so
nothing is permuted.

The safetensors library checks and writes the files. Reading needs the memory of the model and one tensor. Values are
read with plain reads, whose errors have names: a failing disk under the library's memory maps would kill the process
with SIGBUS. The library's own plain reads (backend="pread") read a whole tensor for each slice of it.

Sources: configuration and modelling files of transformers 4 and 5; github.com/huggingface/safetensors."""

import errno
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial, reduce
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lib import lora
from lib.errors import UserError
from lib.families import FAMILIES, family, read_config
from lib.files import MISSING_FILE, describe_content, fsync_path, read_object, retry, sample_digest
from lib.hub import local_path
from lib.lora import Read, Settings
from lib.ranks import ALONE, Ranks, on_first_rank
from model import Transformer
from shapes import ModelConfig

Slices = tuple[slice, ...]
# Masks and frequencies that older versions of transformers stored, and copies of tied embeddings.
IGNORED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|^lm_head\.weight$")
HEAD = "lm_head.weight"
FLOATS = torch.float32, torch.float16, torch.bfloat16  # the dtypes that weights may have


class Piece(NamedTuple):
    """A tensor in the file. place: its slices of our parameter. transposed: GPT-2 stores its linears as [in, out]."""

    name: str
    place: Slices
    transposed: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape in the file; an expert lacks our first dimension there."""
        shape = tuple(s.stop - s.start for s in self.place[-2:])
        return shape[::-1] if self.transposed else shape


def pieces(config: ModelConfig) -> dict[str, list[Piece]]:
    """The tensors in the file for each of our parameters, without a tied lm_head."""
    kind = family(config)
    with torch.device("meta"):
        parameters = Transformer(config).named_parameters()
    return {name: _pieces_of(name, tuple(p.shape), kind, config) for name, p in parameters}


def _pieces_of(name, shape, kind, config):
    """The tensors in the file for a parameter: itself, the tensors that it fuses, or those of each expert."""
    layer = re.search(r"\d+|$", name)[0]
    stored_name, *fused = FAMILIES[kind].names[re.sub(r"\d+", "{i}", name)]
    fused = fused or [""]
    height, *widths = shape[-2:]
    heights = [height // len(fused)] * len(fused)
    if len(fused) == 3:  # q, k, v
        heights = [config.head_dim * n for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
    experts = [(slice(e, e + 1),) for e in range(shape[0])] if len(shape) == 3 else [()]
    transposed = kind == "gpt2" and name.endswith("_proj.weight")
    out, start = [], 0
    for part, rows in zip(fused, heights, strict=True):
        place = slice(start, start + rows), *(slice(0, width) for width in widths)
        for e, expert in enumerate(experts):
            out.append(Piece(stored_name.format(i=layer, e=e, part=part), expert + place, transposed))
        start += rows
    return out


# ---- safetensors


# safetensors' names
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFile:
    """A safetensors file, checked by the library and open for reading. entries: (dtype, shape) by name. UserError if
    the file is missing or damaged, OSError if it cannot be read."""

    def __init__(self, path: Path):
        self.path, self.entries, self.starts = path, {}, {}
        retry(self._open, path)

    def _open(self) -> None:
        head = b""
        try:
            self.file = open(self.path, "rb")  # noqa: SIM115
            head = self.file.read(512)
            safe_open(self.path, "pt", backend="pread")
        except (*MISSING_FILE, SafetensorError) as e:
            if code := _code_of(e) or (errno.EMFILE if head and isinstance(e, OSError) else 0):
                raise OSError(code, os.strerror(code)) from None  # the library calls it a missing file
            content = describe_content(head) or "missing, damaged, cut short or not a safetensors file"
            raise UserError(f"{self.path} is {content}: {str(e)[:500]}") from None
        header_size = int.from_bytes(head[:8], "little")
        self.file.seek(8)
        for name, row in json.loads(self.file.read(header_size)).items():
            if name != "__metadata__":
                self.entries[name] = DTYPES.get(row["dtype"], row["dtype"]), tuple(row["shape"])
                self.starts[name] = 8 + header_size + row["data_offsets"][0]

    def read(self, name: str, slices: Slices) -> Tensor:
        """Values in the file's dtype. One thread at a time."""
        dtype, shape = self.entries[name]
        wanted = [range(n)[s] for s, n in zip(slices, shape, strict=True)]
        out = torch.empty([len(span) for span in wanted], dtype=dtype)
        buffer = (out if shape else out.view(1)).view(torch.uint8).numpy()
        self._read_into(buffer, self.starts[name], wanted, (*shape, dtype.itemsize))
        return out

    def _read_into(self, out: np.ndarray, start: int, wanted: list[range], shape: tuple[int, ...]) -> None:
        """Reads the wanted part of a tensor that starts at this byte: at once if its rows are whole, or row by row.
        shape: of the tensor, and the bytes of a value."""
        row_bytes = math.prod(shape[1:])
        if [len(span) for span in wanted[1:]] == list(shape[1:-1]):
            first = wanted[0].start if wanted else 0
            retry(partial(self._read_run, out, start + first * row_bytes), self.path)
        else:
            for i, row in zip(wanted[0], out, strict=True):
                self._read_into(row, start + i * row_bytes, wanted[1:], shape[1:])

    def _read_run(self, out: np.ndarray, start: int) -> None:
        try:
            self.file.seek(start)
            count = self.file.readinto(out)
        except OSError:
            self.file = open(self.path, "rb")  # noqa: SIM115 - the handle may be stale
            raise
        if count < out.nbytes:
            raise UserError(f"{self.path} is cut short")


def _code_of(error: Exception) -> int:
    """The errno in an error of the library; 0 if the system did not cause it."""
    return int(re.search(r"os error (\d+)|$", str(error))[1] or 0)


def assemble(slices: Slices, whole: tuple[int, ...], dtype: torch.dtype, sources: Iterable[tuple]) -> Tensor:
    """Values of a tensor of shape `whole` that has several sources (place, read), where place is the source's slices of
    the tensor. Calls read(slices of the source) for each source that it needs."""
    wanted = [range(n)[s] for s, n in zip(slices, whole, strict=True)]
    out, filled = torch.empty(list(map(len, wanted)), dtype=dtype), 0
    for place, read in sources:
        common = [range(max(r.start, s.start), min(r.stop, s.stop)) for r, s in zip(wanted, place, strict=True)]
        if all(common):
            values = read(_shift(common, place))
            if common == wanted:  # saves a copy
                return values.to(dtype).reshape(out.shape)
            out[_shift(common, wanted)] = values
            filled += values.numel()
    assert filled == out.numel(), f"the sources of a tensor of shape {list(whole)} do not cover it"
    return out


def _shift(ranges, origins):
    """The ranges as slices that count from the starts of the origins."""
    return tuple(slice(r.start - o.start, r.stop - o.start) for r, o in zip(ranges, origins, strict=True))


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file, with the permissions of its folder, and syncs it to the disk. OSError: why the disk
    refuses it."""

    def write() -> None:
        try:
            save_file(tensors, path, {"format": "pt"})
        except SafetensorError as e:
            path.unlink(missing_ok=True)
            code = _code_of(e) or errno.EIO
            raise OSError(code, os.strerror(code), str(path)) from None
        path.chmod(path.parent.stat().st_mode & 0o666)  # the library lets only the owner read it
        fsync_path(path)

    retry(write, path)


# ---- reading


def find_files(folder: Path) -> list[Path]:
    """The safetensors files with a folder's weights: model.safetensors, or exactly the files that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise UserError(
            f"{folder} holds neither model.safetensors nor its index: `python download.py ORG/NAME` adds them. Pickles"
            " are not loaded, because they can run code: convert them with save_pretrained of transformers"
        )
    table = read_object(index).get("weight_map")
    if not isinstance(table, dict):
        raise UserError(f"{index} has no weight_map")
    names = {*map(str, table.values())}
    if missing := names.difference(os.listdir(folder)):  # a name with a slash in it is never listed
        raise UserError(f"{folder} lacks files that its index names: {sorted(missing)[:4]}")
    return [folder / name for name in sorted(names)]


def open_weights(folder: Path, config: ModelConfig) -> Read:
    """Checks names, shapes and dtypes of a folder's weights against the model -> read(name, slices) of our parameters,
    in the files' dtype (the widest dtype of a fused parameter's tensors). The head that a tied model's files may hold
    is compared with the embedding."""
    # Other weights may have the same shapes: a wrong rope_theta would show only in the results.
    stored = asdict(read_config(folder))
    ignored = "init_std", "router_aux_loss_coef", "max_seq_len"  # they change no output, or a shape shows them
    differ = {k: v for k, v in asdict(config).items() if k not in ignored and stored[k] != v}
    if differ:
        raise UserError(f"{folder / 'config.json'} differs from the model, which has {differ}; use --model {folder}")
    files = [TensorFile(path) for path in find_files(folder)]
    names = " ".join(name for file in files for name in file.entries)
    layers = len({*re.findall(r"\b(?:layers|h)\.(\d+)\.", names)})
    if layers != config.n_layers:  # first, because a list of the tensors of many layers takes long
        raise UserError(f"{folder} has {layers} layers, but its config.json names {config.n_layers}")
    return _reader(folder, pieces(config), files)


def _reader(folder, plan, files, remedy=""):
    """Checks the tensors of a folder's files against the plan -> read(name, slices) of the plan's parameters."""
    expected = {piece.name: piece.stored for row in plan.values() for piece in row}
    stored, wrong, head = {}, [], None  # stored: the file of each tensor, its name there, and its dtype
    for file in files:
        for name, (dtype, shape) in file.entries.items():
            # Files that were saved without the head lack the names' first part.
            full = next((n for n in (f"model.{name}", f"transformer.{name}") if n in expected), name)
            if full in expected and (dtype not in FLOATS or shape != expected[full]):
                wrong.append(f"{name} is {list(shape)} {dtype}, expected {list(expected[full])}")
            if full in expected or not IGNORED.search(name):
                stored[full] = file, name, dtype
            elif name == HEAD:
                head = file
    missing, extra = sorted(expected.keys() - stored), sorted(stored.keys() - expected)
    if wrong or missing or extra:
        problems = {"missing": missing, "unexpected": extra, "of another shape or dtype": wrong}
        listed = "; ".join(f"{what}: {names[:4]}" for what, names in problems.items() if names)
        raise UserError(f"{folder} does not fit the model; {listed}{remedy}")

    def read_piece(piece, slices):
        file, name, _ = stored[piece.name]
        values = file.read(name, slices[::-1] if piece.transposed else slices[-2:])
        return values.T if piece.transposed else values

    def read(name, slices):
        row = plan[name]
        dtype = reduce(torch.promote_types, (stored[piece.name][2] for piece in row))
        sources = ((piece.place, partial(read_piece, piece)) for piece in row)
        return assemble(slices, [s.stop for s in row[-1].place], dtype, sources)

    if head:
        whole = slice(None), slice(None)
        values = read("embed_tokens.weight", whole)
        if not torch.equal(head.read(HEAD, whole).to(values.dtype), values):
            raise UserError(
                f"{head.path}: {HEAD} differs from the embedding, but config.json ties them: set its"
                " tie_word_embeddings to false to use this head"
            )
    return read


# ---- PEFT adapters

MERGE = ": merge the adapter with PEFT's merge_and_unload(), and give the merged folder as --weights"
# Fields of adapter_config.json, and the values that lib/lora.py supports; others may be null, false, 0 or empty.
ADAPTER_MEANS_OURS = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva"),
}
# Keys that may have any value. All others must be null, false, 0 or empty.
ADAPTER_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode", "r",
    "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "megatron_core",
    "qalora_group_size",
}  # fmt: skip


def adapter_pieces(config: Settings) -> dict[str, list[Piece]]:
    """The tensors in PEFT's file for each parameter of the adapters."""
    out, rank = {}, config.lora
    for name, row in pieces(config.model_config).items():
        a, b, start = [], [], 0
        for piece in row:
            if re.search(r"(\w+)_proj\.weight$|$", piece.name)[1] in config.lora_targets:
                rows, width = piece.stored
                stem = f"base_model.model.{piece.name.removesuffix('weight')}lora"
                a.append(Piece(f"{stem}_A.weight", (slice(len(a) * rank, (len(a) + 1) * rank), slice(0, width))))
                b.append(Piece(f"{stem}_B.weight", (slice(start, start + rows), slice(0, rank))))
                start += rows
        if a:
            layer = name.removesuffix(".weight")
            out |= {f"{layer}.lora_A": a, f"{layer}.lora_B": b}
    return out


def adapter_flags(folder: Path) -> dict:
    """The values of --lora, --lora_alpha and --lora_targets for a PEFT adapter. The scale of rsLoRA (arXiv 2312.03732),
    alpha / sqrt(rank), becomes a larger alpha. Refuses adapters of other kinds."""
    path = folder / "adapter_config.json"
    values = read_object(path)
    for key in {key for key, value in values.items() if value} - ADAPTER_HARMLESS:
        if values[key] not in ADAPTER_MEANS_OURS.get(key, ()):
            raise UserError(f"{path}: {key} is {values[key]!r}"[:500] + f", which is not implemented{MERGE}")
    rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)  # PEFT's defaults
    if values.get("use_rslora"):
        alpha *= math.sqrt(rank)
    names = "\n".join(TensorFile(folder / "adapter_model.safetensors").entries)
    targets = set(re.findall(r"(\w+)_proj\.lora_A\.weight$", names, re.M))
    return {"lora": rank, "lora_alpha": alpha, "lora_targets": tuple(sorted(targets))}


def open_adapter(folder: Path, config: Settings) -> Read:
    """Checks the tensors of a PEFT adapter against a run's flags -> read(name, slices) of lora.py's parameters."""
    adapter_flags(folder)  # refuses adapters of other kinds
    return _reader(folder, adapter_pieces(config), [TensorFile(folder / "adapter_model.safetensors")], MERGE)


# ---- the model of a checkpoint


class Trained(Protocol):
    """The part of a checkpoint.Checkpoint that an export reads. This file does not import it."""

    config: Settings
    model_config: ModelConfig
    manifest: dict
    read_weights: Read


def base_fingerprint(config: Settings, ranks: Ranks = ALONE) -> str:
    """Identifies the frozen weights of a run with adapters; "0" if no weights were read. All ranks must call."""
    if not (config.lora and config.weights):
        return "0"
    return on_first_rank(lambda: sample_digest(find_files(local_path(config.weights, "--weights"))), ranks)


def refuse_other_base(config: Settings, fingerprint: str, ranks: Ranks = ALONE) -> None:
    """Refuses frozen weights that differ from those at the start of the run. All ranks must call."""
    if base_fingerprint(config, ranks) != fingerprint:
        raise UserError(f"--weights {config.weights} has changed since the adapters were trained on it: restore it")


def open_trained(saved: Trained, ranks: Ranks = ALONE) -> Read:
    """read(name, slices) of all weights, with adapters merged into the weights of --weights. All ranks must call."""
    config = saved.config
    refuse_other_base(config, saved.manifest["base"], ranks)
    if not config.lora:
        return saved.read_weights
    base = open_weights(local_path(config.weights, "--weights"), config.model_config)
    return lora.merge(base, saved.read_weights, config)
