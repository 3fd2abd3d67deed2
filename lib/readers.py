"""Reads files of text as rows: a reader for each format. Imports no torch.

The rows of a file are, without parsing them: lines of .jsonl, rows of .json (JSON lines, or a list of rows), of .csv or
of .parquet, or pieces of .txt and .md, whose files are one document each. All but .parquet may be compressed, as .gz. A
new format needs a reader in READERS."""

import codecs
import csv
import inspect
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from lib.errors import UserError
from lib.stores import bare

BUILTIN = "built-in.text"  # the name of text that is in no file
TXT_PIECE = 2**24  # bytes; a longer .txt is tokenised in pieces, cut between lines


class TextRow(NamedTuple):
    content: bytes | str | dict | UserError  # a line of JSON, a document or a piece of one, fields, or what is wrong
    val: bool | None = None  # held out for validation; None: decided by its number
    begins: bool = True  # False: it continues the document of the row before
    number: int = 0  # in its file, from 1


def kind_of(name: str) -> str:
    """The suffix that tells a file's format, without .gz."""
    return os.path.splitext(bare(name).removesuffix(".gz"))[1]


def builtin_documents() -> list[str]:
    """English text that every machine has: Python's reference topics and the docstrings of the standard library and of
    torch, each of 200 characters or more, once. It changes with their versions."""
    import importlib.util
    import pydoc_data.topics
    import sysconfig

    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    docstring = re.compile(r'(?:\A|:\n|,\n)\s*r?"""(.*?)"""', re.DOTALL)
    excluded = {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib"}
    for root in (Path(sysconfig.get_paths()["stdlib"]), Path(importlib.util.find_spec("torch").origin).parent):
        for path in sorted(root.rglob("*.py")):
            if excluded.isdisjoint(path.relative_to(root).parts):
                texts += map(inspect.cleandoc, docstring.findall(path.read_text("utf-8", "replace")))
    return [text for text in dict.fromkeys(texts) if len(text) >= 200]


# ---- readers: (file, stream, val_every) -> rows


def _read_builtin(file, stream, val_every):
    return map(TextRow, builtin_documents())


def _read_lines(file, stream, val_every):
    for line in stream:
        yield TextRow(line.strip())


def _read_json(file, stream, val_every):
    """JSON lines, or one list of rows, which is read as a whole."""
    begin = stream.readline()
    lines = itertools.chain([begin], stream)
    if begin.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"[":  # before it a BOM
        yield from _read_lines(file, lines, val_every)
        return
    try:
        rows = json.loads(b"".join(lines))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file.name} begins with [ but is not a JSON list of rows: {e}") from None
    yield from map(TextRow, rows)


def read_txt(file, stream, val_every):
    """A document in pieces of whole lines, whose \\r are kept. The end of a plain file is held out."""
    size = cut = sys.maxsize
    if val_every and not bare(file.name).endswith(".gz"):
        size = stream.seek(0, os.SEEK_END)
        cut = _last_part(stream, size, val_every)
    offset = 0
    for end, val in ((cut, False), (size, True)):
        begins = True
        while offset < end and (piece := stream.read(min(TXT_PIECE, end - offset))):
            piece += stream.readline(end - offset - len(piece))
            try:
                text = piece.decode("utf-8" if offset else "utf-8-sig")  # Windows begins files with a BOM
            except UnicodeDecodeError as e:
                raise UserError(f"{file.name}: not UTF-8 at byte {offset + e.start}; convert it with iconv") from None
            yield TextRow(text, val, begins)
            offset, begins = offset + len(piece), False


def _last_part(stream, size, val_every):
    """Where the last 1/val_every begins: with a line, or, if the last one is longer, with a character."""
    cut = size * (val_every - 1) // val_every
    stream.seek(max(cut - 1, 0))
    stream.readline()
    begin = stream.tell()
    if begin >= size:
        begin = cut
        while stream.seek(begin) and stream.read(1)[0] & 0xC0 == 0x80:
            begin -= 1
    stream.seek(0)
    return begin


def _read_csv(file, stream, val_every):
    """The first line names the fields."""
    csv.field_size_limit(2**31 - 1)  # the default refuses fields above 128 KiB
    rows = csv.DictReader(codecs.iterdecode(stream, "utf-8-sig"), strict=True)
    try:
        names = rows.fieldnames or []
        if len({*names}) < len(names):
            raise UserError(f"{file.name}: the first line must name the fields, each once, but is {names}")
        for row in rows:
            if None in (*row, *row.values()):  # more or fewer fields than names
                problem = f"the fields up to line {rows.line_num} are not the {len(names)} that the first line names"
                row = UserError(f"{problem}: put a field with commas or line breaks in double quotes")
            yield TextRow(row)
    except UnicodeDecodeError as e:
        raise UserError(
            f"{file.name}: not UTF-8 after line {rows.reader.line_num} ({e.reason}); convert it with iconv"
        ) from None
    except csv.Error as e:
        raise UserError(f"{file.name} line {rows.reader.line_num}: not CSV: {e}") from None


def _read_parquet(file, stream, val_every):
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{file.name}: parquet needs pyarrow: {sys.executable} -m pip install pyarrow") from None
    try:
        for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(256):
            for row in batch.to_pylist():
                yield TextRow(row)
    except pyarrow.ArrowException as e:
        raise UserError(f"{file.name} is not a parquet file, or damaged: {e}") from None


READERS = {
    ".txt": read_txt,
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".md": read_txt,
    ".parquet": _read_parquet,
}
SUFFIXES = tuple(READERS)
READERS[kind_of(BUILTIN)] = _read_builtin
FORMATS = f"{', '.join(SUFFIXES)} (also as .gz, but for .parquet) and .bin (token shards)"
