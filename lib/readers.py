"""Reads files of text as rows: a reader for each format, for files at any address of lib/stores.py. Imports no torch.

A reader takes an open file and yields its rows, without parsing them: lines of .jsonl, rows of .json (JSON lines, or a
list of rows), of .csv or of .parquet. A .txt file is one document. A new format needs a reader in READERS. A
reader raises UserError without the name of the file, which `TextFile` puts before the message."""

import codecs
import csv
import gzip
import importlib.metadata
import inspect
import json
import logging
import os
import platform
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lib.errors import UserError, naming
from lib.files import SUBSTITUTES, describe_content, retry
from lib.stores import open_file, store_errors

BUILTIN = "built-in.text"  # the name of text that is in no file
SHARD = ".bin"
VAL_EVERY = 20  # every 20th document is held out for validation; of fewer files of text, the last 1/20 of each
log = logging.getLogger("flatland")
DOCUMENT = ".txt"  # a file that is one document
TXT_PIECE = 2**24  # bytes; a longer document is tokenised in pieces, cut between lines


class TextRow(NamedTuple):
    content: bytes | str | dict  # a line of JSON, a document or a piece of one, or fields
    number: int = 0  # in its file, from 1
    val: bool = False  # held out for validation
    begins: bool = True  # False: it continues the document of the row before


def kind_of(name: str) -> str:
    """The suffix that tells a file's format, without .gz."""
    return os.path.splitext(name.removesuffix(".gz"))[1]


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


# ---- readers: an open file -> the contents of its rows


def _read_json(stream):
    """JSON lines, or one list of rows, which is read as a whole."""
    if stream.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"[":  # before it a BOM
        yield from map(bytes.strip, stream)
        return
    yield from json.loads(stream.read())


def _read_csv(stream):
    """The first line names the fields."""
    csv.field_size_limit(2**31 - 1)  # the default refuses fields above 128 KiB
    rows = csv.DictReader(codecs.iterdecode(stream, "utf-8-sig"), strict=True)
    for row in rows:
        if None in (*row, *row.values()):  # more or fewer fields than names
            raise UserError(f"line {rows.line_num} has not the first line's fields: put text with commas in quotes")
        yield row


def _read_parquet(stream):
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"parquet needs pyarrow: {sys.executable} -m pip install pyarrow") from None
    for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(256):
        yield from batch.to_pylist()


READERS = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
SUFFIXES = (DOCUMENT, *READERS)
FORMATS = f"{', '.join(SUFFIXES)} (also as .gz, but for .parquet) and .bin (token shards)"
READERS[kind_of(BUILTIN)] = lambda stream: builtin_documents()


def read_rows(stream, kind: str, val_every: int) -> Iterator[TextRow]:
    """The rows of an open file. Every val_every-th is held out (1: all of them, 0: none), or the end of a document."""
    if kind == DOCUMENT:
        yield from _read_document(stream, val_every)
        return
    if kind not in READERS:
        raise UserError("it holds token ids, not text")
    for number, content in enumerate(READERS[kind](stream), 1):
        yield TextRow(content, number, val_every > 0 and number % val_every == 0)


def _read_document(stream, val_every):
    """Pieces of whole lines, whose \\r are kept. The last 1/val_every is held out, unless the file has no known end."""
    parts = [(sys.maxsize, val_every == 1)]  # (where it ends, is it held out)
    if val_every > 1 and stream.seekable() and not isinstance(stream, gzip.GzipFile):
        size = stream.seek(0, os.SEEK_END)
        parts = [(_last_part(stream, size, val_every), False), (size, True)]
    number = offset = 0
    for end, val in parts:
        begins = True
        while offset < end and (piece := stream.read(min(TXT_PIECE, end - offset))):
            piece += stream.readline(end - offset - len(piece))
            number += 1
            # Windows begins files with a BOM.
            yield TextRow(piece.decode("utf-8" if offset else "utf-8-sig"), number, val, begins)
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


# ---- files of rows


class TextFile(NamedTuple):
    """A file of text. name: a path, an address (on the hub: hf://datasets/ORG/NAME@COMMIT/PATH) or BUILTIN. size: in
    bytes, 0 if unknown. version: changes with the content, if the store tells. store: the fsspec file system of an
    address. text_field: the field of --text_field for this file; empty: the encoder's."""

    name: str
    size: int
    version: str
    store: object = None
    text_field: str = ""

    @property
    def kind(self) -> str:
        return kind_of(self.name)

    def rows(self, first: int = 0, val_every: int = VAL_EVERY) -> Iterator[TextRow]:
        """The rows after number `first`. Every val_every-th is held out (1: all, 0: none), or the end of a document.
        After an error that may pass, the file is opened again. UserError if it is damaged."""
        rows = None

        def take():
            nonlocal rows
            try:
                rows = rows or self._rows(first, val_every)
                return next(rows, None)
            except Exception:
                rows = None
                raise

        while row := retry(take):
            first = row.number
            yield row

    def _rows(self, first, val_every):
        """The rows, until an error."""
        name, number, kind = self.name, 0, self.kind
        # The table of contents of a .parquet is at its end, and so is the held-out part of a document.
        in_sequence = kind != ".parquet" and not (kind == DOCUMENT and val_every)
        path = os.devnull if name == BUILTIN else name
        with store_errors(name), open_file(self.store, path, in_sequence) as raw, naming(name):
            stream = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
            try:
                for file in (raw, stream):
                    if content := describe_content(file.peek(512)[:512], SUBSTITUTES):
                        raise UserError(content)
                for row in read_rows(stream, kind, val_every):
                    number = row.number
                    if number > first and row.content != b"":  # a blank line has a number, but is not a row
                        yield row
            except (EOFError, ValueError, RecursionError, zlib.error, gzip.BadGzipFile, csv.Error) as e:
                raise UserError(f"damaged, cut short, or not {kind[1:]} in UTF-8 after row {number}: {e}") from None


def builtin_file() -> TextFile:
    return TextFile(BUILTIN, 0, f"{platform.python_version()} {importlib.metadata.version('torch')}")
