"""Tensors in parts: a rank's shard of a DTensor, tensors in safetensors files, and slices of both.

A DTensor is divided along one dimension into shards of equal height; the last shards may be shorter, or empty. Each
rank holds one shard. A tensor that is not divided counts as one shard.

The safetensors library checks and writes the files (github.com/huggingface/safetensors). Values are read with plain
reads, whose errors have names: a failing disk under the library's memory maps would kill the process with SIGBUS. The
library's own plain reads (backend="pread") read a whole tensor for each slice of it."""

import errno
import json
import math
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from base import disk
from base.disk import MISSING_FILE, describe_content, fsync_path, retry
from base.errors import UserError

PINNED = 2**27  # bytes of a rank's memory for HostCopies


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. isinstance would import DTensor, which takes half a second; most single processes have
    none."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def sharding(tensor: Tensor) -> tuple[int, int, int]:
    """-> (dimension that is divided, number of shards, index of this rank's shard)"""
    if not is_sharded(tensor):
        return 0, 1, 0
    return tensor.placements[-1].dim, tensor.device_mesh.size(-1), tensor.device_mesh.get_coordinate()[-1]


def shard_slices(shape: torch.Size, dim: int, shards: int, index: int) -> tuple[slice, ...]:
    """Where a shard lies in the whole tensor."""
    if not shape:  # a scalar
        return ()
    height, out = -(-shape[dim] // shards), [slice(0, n) for n in shape]
    out[dim] = slice(min(index * height, shape[dim]), min((index + 1) * height, shape[dim]))
    return tuple(out)


def local_start(tensor: Tensor) -> int:
    """The position of this rank's first element in the whole tensor."""
    slices = shard_slices(tensor.shape, *sharding(tensor))
    return sum(s.start * math.prod(tensor.shape[d + 1 :]) for d, s in enumerate(slices))


Slices = tuple[slice, ...]


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
        """Values in the file's dtype, without reading others: experts may be sharded along a later dimension than the
        first. One thread at a time."""
        dtype, shape = self.entries[name]
        wanted = [range(n)[s] for s, n in zip(slices, shape, strict=True)]
        out = torch.empty([len(span) for span in wanted], dtype=dtype)
        buffer = (out if shape else out.view(1)).view(torch.uint8).numpy()
        self._read_part(buffer, self.starts[name], wanted, (*shape, dtype.itemsize))
        return out

    def _read_part(self, out: np.ndarray, start: int, wanted: list[range], shape: tuple[int, ...]) -> None:
        """Reads the wanted part of a tensor that starts at this byte: at once if its rows are whole, or row by row.
        shape: of the tensor, and the bytes of a value."""
        row_bytes = math.prod(shape[1:])
        if [len(span) for span in wanted[1:]] == list(shape[1:-1]):
            first = wanted[0].start if wanted else 0
            retry(partial(self._read_rows, out, start + first * row_bytes), self.path)
        else:
            for i, row in zip(wanted[0], out, strict=True):
                self._read_part(row, start + i * row_bytes, wanted[1:], shape[1:])

    def _read_rows(self, out: np.ndarray, start: int) -> None:
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


class HostCopies:
    """Copies of tensors in the host's memory, which is kept from one copy to the next: pages that the system has to
    clear first take three times as long. From a GPU, values go through a pinned chunk on a separate stream."""

    def __init__(self, device: torch.device):
        self.backend = torch.get_device_module(device)
        self.stream, self.copies, self.chunk = self.backend.Stream(), {}, None
        if device.type == "cuda":
            self.chunk = torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        """Lets the next copies wait until the device has done its present work. Then another thread may make them."""
        self.stream.wait_stream(self.backend.current_stream())

    def make(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies by the same names, valid until the next call. Each call gets tensors of the same shapes."""
        for key, x in tensors.items():
            if key not in self.copies:  # not torch.empty, which --deterministic fills
                values = torch.from_numpy(np.empty(max(x.nbytes, x.itemsize), np.uint8)).view(x.dtype)
                self.copies[key] = values[: x.numel()].view(x.shape)
            with self.backend.stream(self.stream):
                both = x.contiguous(), self.copies[key]
                for part, place in zip(*(y.view(-1).view(torch.uint8).split(PINNED) for y in both), strict=True):
                    if self.chunk is not None:
                        part = self.chunk[: len(part)].copy_(part)  # waits for this stream
                    # Not torch, which would start OpenMP threads for this thread. With more of them than cores,
                    # OpenMP's threads no longer spin, and each later step on a CPU takes 1.6 times as long.
                    np.copyto(place.numpy(), part.numpy())
                    disk.advance()
        return self.copies


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
