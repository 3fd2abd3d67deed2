"""tensorfile.py. Oracles: the safetensors library, both ways and for damaged files; torch's own slicing for parts."""

import json
import os
import random
import re
import struct
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import tensorfile
from errors import UserError
from tensorfile import DTYPES, TensorFile, assemble, write_tensors


def whole(shape) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Every bit pattern, NaNs and infinities too."""
    high = 2 if dtype == torch.bool else 256
    values = torch.randint(0, high, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8, generator=g)
    return values.view(dtype).view(shape)


def random_slices(shape, r: random.Random) -> tuple[slice, ...]:
    """Of any length from 0 to all."""
    return tuple(slice(*sorted((r.randint(0, n), r.randint(0, n)))) for n in shape)


def write_raw(path, header, body: bytes = b"", length: int | None = None):
    """A file of this header, JSON or bytes, that says it were so long."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def row(shape=(2, 3), offsets=(0, 24), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def no_allocation(monkeypatch):
    """Nothing is allocated, and no more asked of a file than it has."""
    pread = os.pread

    def checked(fd: int, n: int, offset: int) -> bytes:
        assert not n or offset + n <= os.fstat(fd).st_size
        return pread(fd, n, offset)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("allocates"))
    monkeypatch.setattr(os, "pread", checked)


# ---- both ways


@pytest.mark.parametrize("portion", [1, 100, 2**26], ids=lambda n: f"portions of {n} bytes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_library_reads_what_we_write(monkeypatch, tmp_path, dtype, portion):
    monkeypatch.setattr(tensorfile, "PORTION", portion)
    g = torch.Generator().manual_seed(0)
    tensors = {
        n: random_bits(s, dtype, g) for n, s in {"a": (13, 7), "b.c": (11,), "é": (1, 1), "d": (3, 2, 5)}.items()
    }
    largest = []

    def read(name: str, slices) -> Tensor:
        largest.append(tensors[name][slices].numel() * dtype.itemsize)
        return tensors[name][slices].T.contiguous().T if name == "a" else tensors[name][slices]  # of any strides

    path = tmp_path / "x.safetensors"
    write_tensors(path, [(n, tuple(t.shape)) for n, t in tensors.items()], dtype, read)
    found = load_file(path)
    assert found.keys() == tensors.keys() and all(same_bits(found[n], t) for n, t in tensors.items())
    assert max(largest) <= max(portion, 10 * dtype.itemsize)  # or a row
    with safe_open(path, "pt") as f:
        assert f.metadata() == {"format": "pt"}


def test_rounds_to_the_dtype(tmp_path):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    write_tensors(tmp_path / "x.safetensors", [("x", (5, 3))], torch.bfloat16, lambda name, slices: x[slices])
    assert same_bits(load_file(tmp_path / "x.safetensors")["x"], x.bfloat16())


@pytest.mark.parametrize("portion", [1, 50, 2**26], ids=lambda n: f"portions of {n} bytes")
def test_we_read_what_the_library_writes(monkeypatch, tmp_path, portion):
    """Every dtype and number of dimensions, whole and in slices; with metadata."""
    monkeypatch.setattr(tensorfile, "PORTION", portion)
    g, r = torch.Generator().manual_seed(0), random.Random(0)
    shapes = ((), (1,), (17,), (0,), (3, 0), (7, 5), (4, 3, 5))
    tensors = {f"{d} {i}": random_bits(s, dtype, g) for d, dtype in DTYPES.items() for i, s in enumerate(shapes)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt", "a": '{"dtype": 5}'})
    file = TensorFile(tmp_path / "x.safetensors")
    assert {n: e.shape for n, e in file.entries.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    for name, tensor in tensors.items():
        assert file.entries[name].dtype == name.split()[0]
        for slices in (whole(tensor.shape), *(random_slices(tensor.shape, r) for _ in range(5))):
            assert same_bits(file.read(name, slices), tensor[slices]), (name, slices)


def test_reads_only_the_bytes_of_the_rows(monkeypatch, tmp_path):
    x, counted, preadv = torch.arange(6000).view(100, 10, 6), [], os.preadv
    save_file({"before": x.clone(), "x": x, "y": x.clone()}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    monkeypatch.setattr(os, "preadv", lambda *a: counted.append(preadv(*a)) or counted[-1])
    for slices, rows in (
        ((slice(30, 37), slice(0, 10), slice(0, 6)), 7),
        ((slice(5, 5), slice(0, 10), slice(0, 6)), 0),
        ((slice(0, 100), slice(3, 3), slice(0, 6)), 0),
        ((slice(98, 100), slice(2, 4), slice(1, 5)), 2),
    ):
        counted.clear()
        assert torch.equal(file.read("x", slices), x[slices])
        assert sum(counted) == rows * 60 * 8


def test_file_that_shrinks(tmp_path):
    save_file({"x": torch.zeros(100)}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    os.truncate(tmp_path / "x.safetensors", file.entries["x"].offset + 100)
    with pytest.raises(UserError, match="became shorter"):
        file.read("x", (slice(0, 100),))


def test_assemble_of_parts():
    """Whatever a tensor is cut into, any slice of it; parts that are not needed are not read."""
    g, r = torch.Generator().manual_seed(0), random.Random(0)
    x = torch.randn(9, 8, 7, generator=g)
    cuts = [[0, 4, 5, 9], [0, 3, 8], [0, 7]]
    places = [[(a, b - a) for a, b in zip(c, c[1:], strict=False)] for c in cuts]
    grid = [((i[0], j[0], k[0]), (i[1], j[1], k[1])) for i in places[0] for j in places[1] for k in places[2]]
    read = []

    def read_part(start, shape, slices) -> Tensor:
        part = x[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))][slices]
        read.append(part.numel())
        return part

    for _ in range(100):
        read.clear()
        slices = random_slices(x.shape, r)
        found = assemble(slices, tuple(x.shape), x.dtype, [(*p, partial(read_part, *p)) for p in grid])
        assert torch.equal(found, x[slices]) and sum(read) == found.numel() and 0 not in read


# ---- damage

GOOD = {"a": row(), "b": row((2,), (24, 32))}
BODY = bytes(32)
OFFSET_A, OFFSET_B = (f"damaged.*invalid offset for tensor `{name}`" for name in "ab")
SIZE, LEFT = "damaged.*invalid shape, data type, or offset for tensor", "damaged.*file not fully covered"
DAMAGED = {
    "overlap": ({"a": row(), "b": row((2,), (20, 28))}, OFFSET_B),
    "same place": ({"a": row(), "b": row()}, OFFSET_B),
    "gap": ({"a": row(), "b": row((1,), (28, 32))}, OFFSET_B),
    "gap at the start": ({"a": row((2, 3), (8, 32))}, OFFSET_A),
    "beyond the end": ({"a": row(), "b": row((4,), (24, 40))}, "cut short: 168 bytes, its header describes 176"),
    "far beyond": ({"a": row((2**28, 2**20), (0, 2**50))}, "cut short: [0-9]+ bytes, its header describes 1[0-9]{15}"),
    "bytes left over": ({"a": row()}, LEFT),
    "no tensors": ({}, LEFT),
    "size against shape": ({"a": row((2, 4)), "b": row((2,), (24, 32))}, SIZE),
    "size against dtype": (GOOD | {"a": row(dtype="F16")}, SIZE),
    "overflowing size": (GOOD | {"a": row((2**62, 4), (0, 0))}, "damaged.*overflow"),
    "huge beside zero": (GOOD | {"z": row((2**62, 4, 0), (32, 32))}, "damaged.*overflow"),
    "end before begin": (GOOD | {"a": row((2, 3), (24, 0))}, "damaged.*invalid offset for tensor `a`"),
    "fp8": (GOOD | {"a": row((24,), (0, 24), "F8_E4M3")}, "'a' has dtype F8_E4M3, which is not read"),
    "4 bits": (GOOD | {"a": row((48,), (0, 24), "F4")}, "'a' has dtype F4, which is not read"),
    "no such dtype": (GOOD | {"a": row(dtype="f32")}, "damaged.*unknown variant `f32`"),
    **{
        f"dtype {value!r}": (GOOD | {"a": row(dtype=value)}, "x.safetensors") for value in (None, 32, ["F32"], {}, True)
    },
    **{
        f"shape {value!r}": (GOOD | {"a": row(value)}, "x.safetensors.*damaged")
        for value in ((-2, -3), (2.0, 3), (2, True, 3), ("2", 3), (2, None, 3), None, 6, "6", [[2, 3]])
    },
    "scalar's shape is an object": ({"a": row({}, (0, 4)), "b": row((7,), (4, 32))}, "x.safetensors.*damaged"),
    "scalar's shape is a text": ({"a": row("", (0, 4)), "b": row((7,), (4, 32))}, "x.safetensors.*damaged"),
    **{
        f"offsets {value!r}": (GOOD | {"a": row(offsets=value)}, "x.safetensors.*damaged")
        for value in ((-24, 0), (0.0, 24), (False, 24), ("0", "24"), (0,), (0, 24, 24), (), None, {}, 24)
    },
    **{f"a row is {value!r}": (GOOD | {"a": value}, "x.safetensors.*damaged") for value in (None, 1, [], "F32", {})},
    **{f"the header is {value!r}": (value, "x.safetensors.*damaged") for value in ([], None, 1, "a", [GOOD])},
    "metadata is a list": ({"__metadata__": []} | GOOD, "x.safetensors.*damaged"),
    "metadata of numbers": ({"__metadata__": {"a": 1}} | GOOD, "x.safetensors.*damaged"),
    "a row is a list": (GOOD | {"a": ["F32", [2, 3], [0, 24]]}, "damaged"),
    "dtype is an object": (GOOD | {"a": row(dtype={"F32": None})}, "damaged"),
    "names twice": (json.dumps(GOOD)[:-1].encode() + b', "a": ' + json.dumps(row()).encode() + b"}", "twice"),
    "deeply nested": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "damaged"),
    "deeply nested lists": (b'{"a":' + b"[" * 100_000, "damaged"),
    "a number of 5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "damaged"),
    "infinite": (GOOD | {"a": row((float("inf"),))}, "damaged"),
    "no JSON": (b"{'a': 1}", "damaged"),
    "no UTF-8": (b'{"\xff": 1}', "damaged"),
    "UTF-16": (json.dumps(GOOD).encode("utf-16-le"), "damaged"),
    "empty": (b"", "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_headers(tmp_path, no_allocation, damage):
    """All of them are refused, as the library does, but for names that occur twice, and dtypes that we do not read."""
    header, message = DAMAGED[damage]
    path = write_raw(tmp_path / "x.safetensors", header, BODY)
    with pytest.raises(UserError, match=f"(?s){message}") as e:
        TensorFile(path)
    assert str(path) in str(e.value) and len(str(e.value)) < 2000
    if damage not in ("names twice", "fp8", "4 bits", "a row is a list", "dtype is an object"):
        with pytest.raises(SafetensorError):
            load_file(path)


def test_undamaged(tmp_path, no_allocation):
    """The file that the table above is made from, padded, with a field that the format may get."""
    header = {"__metadata__": {"a": "b"}, "a": row() | {"more": 1}, "b": GOOD["b"]}
    file = TensorFile(write_raw(tmp_path / "x.safetensors", json.dumps(header).encode() + b"   ", BODY))
    assert {n: e.shape for n, e in file.entries.items()} == {"a": (2, 3), "b": (2,)}


@pytest.mark.parametrize("length", [0, 1, 139, 2**31, 2**40, 100_000_001, 2**63, 2**64 - 1])
def test_wrong_header_lengths(tmp_path, no_allocation, length):
    text = json.dumps(GOOD).encode()
    assert len(text) + len(BODY) < 200 and len(text) != length
    with pytest.raises(UserError, match="x.safetensors"):
        TensorFile(write_raw(tmp_path / "x.safetensors", text, BODY, length))


def test_header_of_a_large_hollow_file(tmp_path, no_allocation):
    """More than the format allows, though the file has it."""
    path = write_raw(tmp_path / "x.safetensors", b"{", length=100_000_001)
    os.truncate(path, 2**31)
    with pytest.raises(UserError, match="x.safetensors"):
        TensorFile(path)


def test_cut_short_anywhere(tmp_path, no_allocation):
    whole_file = write_raw(tmp_path / "x.safetensors", GOOD, BODY).read_bytes()
    for n in range(len(whole_file)):
        (tmp_path / "x.safetensors").write_bytes(whole_file[:n])
        with pytest.raises(UserError, match="cut short" if n > 8 else "damaged"):
            TensorFile(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "content, message",
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 497774208\n",
            "git-LFS pointer.*git lfs pull",
        ),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML.*download.py"),
        (b"\n\n  <html>429 Too Many Requests</html>", "HTML.*download.py"),
        (b"<?xml version='1.0'?><Error>AccessDenied</Error>", "XML.*download.py"),
        (b'{"error": "Repository not found"}', "damaged"),
        (b"Access to model meta-llama is restricted", "damaged"),
        (b"PK\x03\x04" + bytes(100), "pickle.*run code"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(100), "pickle.*run code"),
        (b"GGUF\x03\0\0\0" + bytes(100), "damaged"),
        (bytes(1000), "damaged"),
        (b"", "damaged"),
    ],
    ids=["LFS", "HTML", "HTML after blanks", "XML", "JSON", "text", "zip", "old pickle", "GGUF", "zeros", "empty"],
)
def test_other_files_by_name(tmp_path, no_allocation, content, message):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=f"x.safetensors is .*{message}"):
        TensorFile(tmp_path / "x.safetensors")


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match=f"{re.escape(str(path))} cannot be read: it is no file"):
            TensorFile(path)


def mutate(header: dict, body: bytes, r: random.Random) -> bytes:
    """A file with one to three things changed: in the JSON, or in the bytes."""
    values = (0, 1, 2, 3, 4, 6, 8, 24, 32, -1, 2**31, 2**63, 2**64, 10**30, 1.0, True, None, "", "F32", [], {}, [0])
    header = json.loads(json.dumps(header))
    for _ in range(r.randint(1, 3)):
        name, kind = r.choice(sorted(header)), r.randrange(8)
        entry = header[name]
        if kind == 0:
            header[name] = r.choice(values)
        elif kind == 1:
            header[r.choice(("a", "new", "", "__metadata__"))] = header.pop(name)
        elif not isinstance(entry, dict) or "shape" not in entry:
            header.setdefault("a", row())
        elif kind == 2:
            entry[r.choice(sorted(entry))] = r.choice(values)
        elif kind == 3:
            entry.pop(r.choice(sorted(entry)))
        elif kind == 4 and isinstance(entry.get("data_offsets"), list) and entry["data_offsets"]:
            entry["data_offsets"][r.randrange(len(entry["data_offsets"]))] = r.choice(values)
        elif kind == 5 and isinstance(entry.get("shape"), list):
            entry["shape"].insert(r.randrange(len(entry["shape"]) + 1), r.choice((1, 1, 1, *values)))
        elif kind == 6 and isinstance(entry.get("shape"), list):
            r.shuffle(entry["shape"])
        else:
            entry["dtype"] = r.choice(("F32", "I32", "F16", "U32", "F8_E5M2"))
    text = json.dumps(header).encode()
    data = bytearray(struct.pack("<Q", len(text)) + text + body)
    for _ in range(r.choice((0, 0, 1, 2))):
        at, kind = r.randrange(max(len(data), 1)), r.randrange(5)
        if kind == 0:
            data[at : at + 1] = [r.randrange(256)]
        elif kind == 1:
            data.insert(at, r.randrange(256))
        elif kind == 2:
            del data[at : at + 1]
        elif kind == 3:
            del data[at:]
        else:
            data.extend(bytes(r.randint(1, 8)))
    return bytes(data)


def test_fuzz(tmp_path):
    """What is not refused with a UserError is what the library finds in the file, bit for bit."""
    r, path, loaded, refused = random.Random(1), tmp_path / "x.safetensors", 0, 0
    header = {"__metadata__": {"format": "pt"}, "a": row(), "b": row((2,), (24, 32)), "c": row((), (32, 36), "I32")}
    for number in range(600):
        path.write_bytes(mutate(header, bytes(range(36)), r))
        try:
            file = TensorFile(path)
            found = {n: file.read(n, whole(e.shape)) for n, e in file.entries.items()}
        except UserError:
            refused += 1
            continue
        expected, loaded = load_file(path), loaded + 1
        assert found.keys() == expected.keys(), number
        assert all(same_bits(found[n], t) for n, t in expected.items()), number
    assert refused > 300 and loaded > 30
