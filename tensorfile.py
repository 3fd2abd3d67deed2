"""The safetensors format: 8 bytes with the header's length, a JSON header (name -> dtype, shape, offsets), the bytes.

The safetensors library checks a header before anything is allocated, and damage is named. Values are read with pread,
just the rows that are asked for. The library maps a file into memory instead: there a failing disk or a file that
shrinks kills the process without a message, and reading a rank's rows from the disk took twice as long (the kernel
reads ahead into the rows of others). Writing streams a portion at a time.

Source: the format's description, github.com/huggingface/safetensors, README."""

import errno
import glob
import itertools
import json
import math
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from errors import UserError

Slices = tuple[slice, ...]
Read = Callable[[str, Slices], Tensor]  # read(name, slices) -> those values of a tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
MAX_HEADER = 100_000_000  # bytes, the format's own limit
PORTION = 2**24  # bytes read or written at a time


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: dtype by its safetensors name, offset from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def what_it_is(path: Path, head: bytes) -> str:
    """A guess at a file that is no safetensors."""
    if head.startswith(b"version https://git-lfs"):
        return "a git-LFS pointer, not the weights: run `git lfs pull` there, or `python download.py ORG/NAME`"
    if head.lstrip()[:1] == b"<":
        return "an HTML or XML page: the download went wrong, repeat it with `python download.py`"
    if head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return f"a pickle, which can run code: only safetensors are loaded. {conversion(path)}"
    return "damaged, or no safetensors file: its header is not what the format says"


def _no_duplicates(pairs: list) -> dict:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


class TensorFile:
    """A safetensors file, its header read and checked; UserError says what is wrong with it."""

    def __init__(self, path: Path):
        self.path = path
        try:
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is no file")
            self.file = open(path, "rb", buffering=0)  # noqa: SIM115 (open as long as this lives)
            size = os.fstat(self.file.fileno()).st_size
            head = self.file.read(512)
            length = int.from_bytes(head[:8], "little")
            text = os.pread(self.file.fileno(), max(0, min(length, size - 8, MAX_HEADER)), 8)
        except OSError as e:
            raise UserError(f"{path} cannot be read: {e.strerror}") from None
        try:
            if len(text) < length <= MAX_HEADER and text[:1] == b"{":
                raise UserError(f"{path} is cut short: {size} bytes, its header alone has {length}")
            rows = json.loads(text, object_pairs_hook=_no_duplicates)
            rows.pop("__metadata__", None)
            end = 8 + length + max((row["data_offsets"][1] for row in rows.values()), default=0)
            if end > size:
                raise UserError(f"{path} is cut short: {size} bytes, its header describes {end}")
            safe_open(path, "numpy")  # refuses other types, sizes that do not fit, gaps, and bytes left over
            self.entries = {}
            for name, row in rows.items():
                if row["dtype"] not in DTYPES:
                    found = f"{name!r} has dtype {row['dtype']}, which is not read (quantised?)"
                    raise UserError(f"{path}: {found}; F32, F16, BF16 are")
                if len(row["shape"]) > 64 or math.prod(max(n, 1) for n in row["shape"]) >= 2**60:  # even beside a 0
                    raise ValueError(f"{name!r} has an impossible shape")
                self.entries[name] = Entry(row["dtype"], tuple(row["shape"]), 8 + length + row["data_offsets"][0])
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            kind = what_it_is(path, head)
            reason = f" ({type(e).__name__}: {str(e)[:500]!r})" * kind.startswith("damaged")
            raise UserError(f"{path} is {kind}{reason}") from None

    def read(self, name: str, slices: Slices) -> Tensor:
        """Those values of a tensor (step 1), in the file's dtype."""
        entry = self.entries[name]
        bounds = [s.indices(n)[:2] for s, n in zip(slices, entry.shape, strict=True)]
        out = torch.empty([max(0, b - a) for a, b in bounds], dtype=DTYPES[entry.dtype])
        if not out.numel():
            return out
        if not bounds:
            self._read_into(out.view(1), entry.offset)
            return out
        row = math.prod(entry.shape[1:])
        whole_rows = all(b - a == n for (a, b), n in zip(bounds[1:], entry.shape[1:], strict=True))
        (first, last), step = bounds[0], max(1, PORTION // (row * out.itemsize))
        if whole_rows:
            self._read_into(out, entry.offset + first * row * out.itemsize)
            return out
        for a in range(first, last, step):
            b = min(a + step, last)
            rows = torch.empty((b - a, *entry.shape[1:]), dtype=out.dtype)
            self._read_into(rows, entry.offset + a * row * out.itemsize)
            out[a - first : b - first] = rows[(slice(None), *(slice(*bound) for bound in bounds[1:]))]
        return out

    def _read_into(self, out: Tensor, offset: int) -> None:
        view, done = memoryview(out.view(-1).view(torch.uint8).numpy()), 0
        while done < len(view):
            n = os.preadv(self.file.fileno(), [view[done : done + PORTION]], offset + done)
            if n == 0:
                raise UserError(f"{self.path} became shorter while it was read")
            done += n


def conversion(path: Path) -> str:
    """How to make safetensors of a pickle and, where its name is a pickle's, of those that belong to it."""
    pattern = glob.escape(str(path))
    if path.suffix != ".safetensors":
        pattern = str(Path(glob.escape(str(path.parent))) / f"{re.split('[-.]', path.name)[0]}*{path.suffix}")
    code = (
        "import glob, torch; from safetensors.torch import save_file; [save_file({k: v.clone().contiguous() for k, v in"
        " torch.load(open(f, 'rb'), map_location='cpu', weights_only=True).items()}, f.removesuffix('.safetensors') +"
        f" '.safetensors') for f in glob.glob({pattern!r})]"
    )
    return f"If you trust its source, convert it: python -c {shlex.quote(code)}"


def assemble(
    slices: Slices, whole: tuple[int, ...], dtype: torch.dtype, parts: Iterable[tuple[tuple, tuple, Callable]]
) -> Tensor:
    """Those values of a tensor of shape `whole` that is kept in parts (start, shape, read): read(slices of the part) is
    called for the parts that are needed."""
    bounds = [s.indices(n)[:2] for s, n in zip(slices, whole, strict=True)]
    out, filled = torch.empty([max(0, b - a) for a, b in bounds], dtype=dtype), 0
    for start, shape, read in parts:
        overlap = [(max(a, s), min(b, s + n)) for (a, b), s, n in zip(bounds, start, shape, strict=True)]
        if all(a < b for a, b in overlap):
            here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, bounds, strict=True))
            values = read(tuple(slice(a - s, b - s) for (a, b), s in zip(overlap, start, strict=True)))
            out[here] = values
            filled += values.numel()
    if filled != out.numel():
        raise UserError(f"a tensor of shape {list(whole)} is kept in parts, and they do not make it up")
    return out


def write_file(path: Path, rows: list[tuple[str, torch.dtype, tuple[int, ...], Callable]]) -> tuple[int, int]:
    """Writes a safetensors file of tensors (name, dtype, shape, function that gives their portions in order), and syncs
    -> (its bytes, their crc32). OSError: what the disk says."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, _ in rows:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    crc = 0
    with open(path, "wb") as f:
        for part in itertools.chain([[len(text).to_bytes(8, "little") + text]], (_bytes(row) for row in rows)):
            for data in part:
                f.write(data)
                crc = zlib.crc32(data, crc)
        f.flush()
        size = f.tell()
        os.fsync(f.fileno())
    return size, crc


def _bytes(row: tuple[str, torch.dtype, tuple[int, ...], Callable]) -> Iterator[memoryview]:
    for values in row[3]():
        view = memoryview(values.contiguous().view(-1).view(torch.uint8).numpy())
        for a in range(0, len(view), PORTION):
            yield view[a : a + PORTION]


def write_tensors(path: Path, rows: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype, read: Read) -> None:
    """Writes a safetensors file of the tensors `rows` (name, shape), a portion of rows of each at a time, and syncs."""

    def portions(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        step = max(1, PORTION // (math.prod(shape[1:]) * dtype.itemsize))
        for a in range(0, shape[0], step):
            values = read(name, (slice(a, min(a + step, shape[0])), *(slice(0, n) for n in shape[1:])))
            if dtype == torch.float16 and values.abs().amax() > torch.finfo(dtype).max:
                raise UserError(f"{name} holds values beyond float16's range: take bf16 or fp32")
            yield values.to(dtype)

    write_file(path, [(name, dtype, shape, partial(portions, name, shape)) for name, shape in rows])
