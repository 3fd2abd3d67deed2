"""Files of data: their addresses, and a reader for each format. Imports no torch.

Addresses are hf://datasets/ORG/NAME[@REVISION]/PATH on the hub, and addresses of fsspec's other file systems, for
example s3://BUCKET/PATH. PATH is a file, a folder, or a pattern with * (within a name) and **. Names without :// are
local. Packages, login and account are matters of each file system: s3fs reads AWS's files and variables,
for example.

A reader takes an open file and yields its rows, without parsing them: lines of .jsonl, rows of .json (JSON lines, or a
list of rows), of .csv or of .parquet. A .txt file is one document. A new format needs a reader in READERS. A
reader raises UserError without the name of the file, which `TextFile.rows` puts before the message."""

import codecs
import contextlib
import csv
import glob
import gzip
import inspect
import io
import json
import logging
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from base.disk import SUBSTITUTES, describe_content, may_pass, retry
from base.errors import Failure, Message, UserError, naming
from base.hub import guard_token, hub_errors

HUB = "hf://datasets/"  # the address of a data set on the hub begins with it
ADDRESS = re.compile(rf"{HUB}([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")  # ORG/NAME, revision, path
BUFFER = 2**20  # bytes that are read together
# Names, in entries of file systems, of a value that changes with a file's content. The most reliable one is first.
VERSIONS = (
    "blob_id", "ETag", "etag", "md5Hash", "mtime",
    "LastModified", "Last-Modified", "last_modified", "created",
)  # fmt: skip


def list_files(spec: str, flag: str, text_field: str) -> list["TextFile"]:
    """A file, the matches of a pattern, or the files in a folder."""
    is_local = "://" not in spec
    address = str(Path(spec).expanduser().absolute()) if is_local else spec
    with store_errors(spec):
        store, path = (_open_hub if spec.startswith("hf://") else _open_store)(address, flag)
        info = find_info(store, path)  # a name may hold * ? and []
        if info and info["type"] != "directory":
            infos = [info]
        else:
            options = {"on_error": _raise_passing} if is_local else {}
            infos = store.glob(glob.escape(path) + "/*" if info else path, detail=True, **options).values()
    files = []
    for info in infos:
        if info["type"] != "directory":
            name = info["name"] if is_local else store.unstrip_protocol(info["name"])
            if not isinstance(info["size"], int | None):  # a hub may list anything
                raise UserError(f"{name}: its listed size is {info['size']!r:.40}, which is no number of bytes")
            version = next((str(info[key]) for key in VERSIONS if info.get(key)), "")
            files.append(TextFile(name, info["size"] or 0, version, None if is_local else store, text_field))
    return files


def _raise_passing(error: OSError) -> None:
    """For fsspec, which takes a folder for empty whose disk fails."""
    if may_pass(error):
        raise error


def find_info(store, path: str) -> dict | None:
    """The entry of a file or folder; None if there is none. `store.exists` would take a cut connection for a missing
    file, and fsspec calls a file missing if a web server does not answer."""
    try:
        return store.info(path)
    except (FileNotFoundError, NotADirectoryError) as e:
        if path.startswith("http") and getattr(e.__cause__, "status", 0) not in (403, 404, 410):
            raise e.__cause__ or e from None
        return None


def _open_store(spec, flag):
    from fsspec import url_to_fs

    options = {}
    try:
        if spec.startswith("http"):  # else a file has five minutes
            from aiohttp import ClientTimeout

            options["client_kwargs"] = {"timeout": ClientTimeout(sock_read=60)}
        return url_to_fs(spec, **options)
    except (ImportError, ValueError) as e:  # a missing package; an unknown protocol, or one without an account
        package = getattr(e.__cause__ or e, "name", "")
        install = f": {sys.executable} -m pip install {package}" * bool(package)
        raise UserError(f"{flag} {spec}: {e}{install}") from None


def _open_hub(spec, flag):
    """The path names the data set's newest commit, or the commit of the revision."""
    from huggingface_hub import HfApi, HfFileSystem

    address = ADDRESS.fullmatch(spec)
    if not address:
        raise UserError(f"{flag} {spec}: expected {HUB}ORG/NAME[@REVISION]/PATH")
    repo, revision, path = address.groups()
    guard_token()
    commit = HfApi().dataset_info(repo, revision=revision or "main").sha
    return HfFileSystem(skip_instance_cache=True), f"datasets/{repo}@{commit}/{path}"


def open_file(store, name: str, in_sequence: bool) -> io.BufferedIOBase:
    """Opens a path (store: None) or an address for reading, on the hub as one stream if it is read in sequence."""
    if not store:
        return open(name, "rb")
    raw = store.open(name, block_size=0 if in_sequence and name.startswith(HUB) else None)
    return io.BufferedReader(raw, BUFFER)  # the readline of some file systems gives nothing


@contextlib.contextmanager
def store_errors(address: str) -> Iterator[None]:
    """Raises errors of an address's store as one message. Bugs of ours (a TypeError) pass unchanged."""
    repo = ADDRESS.fullmatch(address)
    try:
        with hub_errors(f"datasets/{repo[1]}") if repo else contextlib.nullcontext():
            yield
    except Exception as error:
        is_ours = type(error).__module__ == "builtins" and not isinstance(error, OSError)
        if is_ours or repo or "://" not in address or isinstance(error, Message):
            raise
        cause = error.__cause__ or error
        is_refusal = isinstance(error, (FileNotFoundError, PermissionError)) or "Credential" in type(error).__name__
        raise (UserError if is_refusal else Failure)(f"{address}: {cause!r}") from None


BUILTIN = "built-in.text"  # the name of text that is in no file
VAL_EVERY = 20  # every 20th document is held out for validation; of fewer files of text, the last 1/20 of each
log = logging.getLogger("flatland")
DOCUMENT = ".txt"  # a file that is one document
TXT_PIECE = 2**24  # bytes; a longer document is tokenised in pieces, cut between lines


class TextRow(NamedTuple):
    content: bytes | str | dict  # a line of JSON, a document or a piece of one, or fields
    number: int = 0  # in its file, from 1
    val: bool = False  # held out for validation
    begins: bool = True  # False: it continues the document of the row before

    def fields(self, name: str = "text") -> dict:
        """Its fields; a text is the field `name`. UserError if it is damaged."""
        content = self.content
        if isinstance(content, bytes):
            try:
                content = json.loads(content)  # also after a BOM, with which Windows begins files
            except (ValueError, RecursionError) as e:
                raise UserError(f"not JSON in UTF-8: {e}") from None
        if isinstance(content, str):
            content = {name: content}
        return content if isinstance(content, dict) else {}


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
        if None in (*row, *row.values()) or len(row) < len(rows.fieldnames):  # more or fewer fields than names
            problem = "has not the first line's fields, each of another name"
            raise UserError(f"line {rows.line_num} {problem}: put text with commas in quotes")
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
READERS[".text"] = lambda stream: builtin_documents()  # of BUILTIN


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
        """The suffix that tells the format, without .gz."""
        return os.path.splitext(self.name.removesuffix(".gz"))[1]

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
        if kind not in (DOCUMENT, *READERS):
            raise UserError(f"{name} holds token ids, not text")
        # The table of contents of a .parquet is at its end, and so is the held-out part of a document.
        in_sequence = kind != ".parquet" and not (kind == DOCUMENT and val_every)
        path = os.devnull if name == BUILTIN else name
        with store_errors(name), open_file(self.store, path, in_sequence) as raw, naming(name):
            stream = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
            try:
                for file in (raw, stream):
                    if content := describe_content(file.peek(512)[:512], SUBSTITUTES):
                        raise UserError(content)
                if kind == DOCUMENT:
                    rows = _read_document(stream, val_every)
                else:
                    contents = enumerate(READERS[kind](stream), 1)
                    rows = (TextRow(content, i, val_every > 0 and i % val_every == 0) for i, content in contents)
                for row in rows:
                    number = row.number
                    if number > first and row.content != b"":  # a blank line has a number, but is not a row
                        yield row
            except (EOFError, ValueError, RecursionError, zlib.error, gzip.BadGzipFile, csv.Error) as e:
                raise UserError(f"damaged, cut short, or not {kind[1:]} in UTF-8 after row {number}: {e}") from None
