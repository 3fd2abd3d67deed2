"""From sources of text to token ids, row by row: files, patterns, the hub, standard input; documents and conversations.

`read_rows` yields what a file holds without looking into it: a line of .jsonl (.json of JSON lines is the same), a row
of .parquet, a piece of .txt (a file is a document); .gz of the first three. `Encoder` makes a row into ids. The two run
in different processes: parsing costs a few per cent of tokenising, but more than reading does.

A row with --text_field is a document: BOS, then its text. One with `messages`, or `prompt` and `completion`, is a
conversation, rendered by the tokenizer's chat format; the assistant's words and the token that ends them are trained
on. Nothing here knows torch."""

import functools
import glob
import gzip
import io
import json
import re
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

import download
from download import Damaged, Failed
from errors import UserError
from remote import PREFIX, Remote, RemoteFile, resolve
from tokenizer import chat_family, load_tokenizer, render_chat

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
KINDS = f"{', '.join(SUFFIXES)} (.gz of the first three) and .bin (token shards)"
PIECE = 2**24  # bytes up to which a .txt is tokenised as a whole; beyond, in pieces of so many, cut between lines
VAL_EVERY = 20  # one document in so many, or the last 1/20 of a .txt, is held out for validation
BUILTIN = "built-in"  # the name of the text that is on every machine
TRAINED, BEGINS = 1, 2  # bits of a token's mask: it is trained on; a conversation begins with it


class BadRow(UserError):
    """One that --skip_bad may pass over."""


class Row(NamedTuple):
    number: int  # from 1
    line: int  # that it begins with
    offset: int  # of its first byte in the (decompressed) file
    content: bytes | dict
    begins: bool = True  # a document
    val: bool = False


@functools.lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """The suffix that says what a file holds, without .gz; empty if it is none of ours."""
    suffix = Path(name.removesuffix(".gz")).suffix
    return suffix if suffix in SUFFIXES and not (name.endswith(".gz") and suffix == ".parquet") else ""


def is_text(spec: str) -> bool:
    """Whether an entry of --data is text that we tokenise."""
    return spec.startswith(PREFIX) or bool(kind_of(spec))


def split_weight(spec: str) -> tuple[str, Fraction | None]:
    """An entry of --data, which may end in :NUMBER -> (what it names, its weight in a mixture or None)."""
    found = re.fullmatch(r"(.+):(-?(?:\d+\.?\d*|\.\d+))", spec)
    return (found[1], Fraction(found[2])) if found and not Path(spec).exists() else (spec, None)


def find_text(spec: str, flag: str, *how) -> list[Path | Remote]:
    """The files of text that an entry names: a file, a pattern, `-`, or an address on the hub, which `how` is for."""
    if spec.startswith("hf://"):
        return resolve(spec, flag, *how)
    if spec == "-":
        return [Path("-")]
    path = Path(spec).expanduser()
    if path.is_dir():
        files = [p for p in sorted(path.iterdir()) if kind_of(p.name)]
    else:
        files = [path] if path.exists() else sorted(Path(p) for p in glob.glob(str(path), recursive=True))
    if not files:
        what = f"no {', '.join(SUFFIXES)} in this folder" if path.is_dir() else "no such file or folder"
        raise UserError(f"{flag} {spec}: {what}")
    for file in files:
        if not kind_of(file.name):
            raise UserError(f"{flag} {file}: what this file holds is not known; {KINDS} are")
    return files


# ---- reading


def builtin_documents() -> Iterator[str]:
    """Real English that is on every machine that can run this: Python's reference topics and the docstrings of the
    standard library and of torch, each of 200 characters or more, once. It changes with their versions."""
    import importlib.util
    import inspect
    import pydoc_data.topics
    import sysconfig

    topics = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) >= 200]
    yield from dict.fromkeys(topics)  # once each
    docstring = re.compile(r'(?:\A|:\n|,\n)\s*r?"""(.*?)"""', re.DOTALL)
    no_part_of_it = {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib"}
    seen = set(topics)
    for root in (Path(sysconfig.get_paths()["stdlib"]), Path(importlib.util.find_spec("torch").origin).parent):
        for path in sorted(root.rglob("*.py")):
            if no_part_of_it.isdisjoint(path.relative_to(root).parts):
                for match in docstring.findall(path.read_text("utf-8", "replace")):
                    text = inspect.cleandoc(match)
                    if len(text) >= 200 and text not in seen:
                        seen.add(text)
                        yield text


def open_bytes(source: Path | Remote, ahead: int):
    """-> a binary stream from the file's beginning, as it is stored."""
    if isinstance(source, Remote):
        return RemoteFile(source, ahead, kind_of(source.path) == ".parquet")  # its table of contents is at its end
    return sys.stdin.buffer if str(source) == "-" else open(source, "rb")


def place(name: str, number: int) -> str:
    return f"{name} {'row' if kind_of(name) == '.parquet' else 'line'} {number}"


def read_rows(
    source: Path | Remote, fields: tuple[str, ...], first: int = 0, val_every: int = VAL_EVERY, ahead: int = 2**26
) -> Iterator[tuple[Row, int]]:
    """(row, bytes of the stored file read so far) of the rows behind number `first`. fields: the columns that a parquet
    file may have to be read for. UserError where the file itself is damaged. What arrives damaged from the hub is
    fetched once more; Damaged if rows that were given are not the same then."""
    if not isinstance(source, Remote):
        yield from _read_rows(source, fields, first, val_every, ahead)
        return
    given, given_sum, fetched_again = first, 0, False
    while True:
        repeated_sum = 0
        try:
            for row, at in _read_rows(source, fields, first, val_every, ahead):
                if row.number <= given:
                    repeated_sum = _sum(row, repeated_sum)
                elif repeated_sum != given_sum:
                    break
                else:
                    given, given_sum = row.number, _sum(row, given_sum)
                    repeated_sum = given_sum
                    yield row, at
            if repeated_sum == given_sum:
                return
            trouble = f"{source}: what arrived first was damaged"
        except Damaged as e:
            trouble = f"{e}, the second time too; try later"
            if not fetched_again:
                download.say(f"{e}: it is fetched again")
                fetched_again = True
                continue
        raise Damaged(f"{trouble}; its rows up to {given} had been read") if given > first else Failed(trouble)


def _sum(row: Row, begin: int) -> int:
    return zlib.crc32(row.content, begin) if isinstance(row.content, bytes) else begin


def _read_rows(
    source: Path | Remote, fields: tuple[str, ...], first: int, val_every: int, ahead: int
) -> Iterator[tuple[Row, int]]:
    name = str(source.path if isinstance(source, Remote) else source)
    if name == BUILTIN:
        for number, text in enumerate(builtin_documents(), 1):
            yield Row(number, number, 0, {fields[0]: text}, True, number % val_every == 0), 0
        return
    shown, kind = str(source), kind_of(name)
    with open_bytes(source, ahead) as raw:
        if name == "-":
            head = raw.peek(4096).lstrip()[:1]
            kind = ".jsonl" if head == b"{" else ".txt"
        if kind == ".parquet":
            yield from _parquet(raw, shown, fields, first, val_every)
            return
        stream = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
        if isinstance(stream, RemoteFile):
            stream = io.BufferedReader(stream, 2**20)
        number = 0
        try:
            if kind == ".txt":
                plain = isinstance(source, Path) and stream is raw and name != "-"
                for row in _txt(stream, source if plain else None, val_every):
                    number = row.line
                    if row.number > first:
                        yield row, _tell(raw)
                return
            offset = 0
            for number, line in enumerate(stream, 1):
                if number > first and not line.isspace():
                    val = val_every > 0 and number % val_every == 0
                    yield Row(number, number, offset, line, True, val), _tell(raw)
                offset += len(line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            while isinstance(raw, RemoteFile) and raw.read(2**20):
                pass  # if it was damaged on its way, that is said at its end
            where = f"byte {_tell(raw)}, after line {number}"
            raise UserError(
                f"{shown}: the gzip data is damaged or cut short at {where} ({e}): fetch or compress the file again"
            ) from None


def _tell(raw) -> int:
    try:
        return raw.tell()
    except (OSError, ValueError, AttributeError):  # a pipe
        return 0


def _txt(stream, path: Path | None, val_every: int) -> Iterator[Row]:
    """A document in pieces of whole lines. path: a plain file, whose end is held out."""
    size = path.stat().st_size if path else sys.maxsize
    cut = _held_out(stream, size, val_every) if path and val_every else size
    offset, line, number = 0, 1, 0
    for end, val in ((cut, False), (size, True)):
        begins = True
        while offset < end and (piece := stream.read(min(PIECE, end - offset))):
            piece += stream.readline(end - offset - len(piece))
            number += 1
            yield Row(number, line, offset, piece, begins, val)
            offset, line, begins = offset + len(piece), line + piece.count(b"\n"), False


def _held_out(stream, size: int, val_every: int) -> int:
    """Where the last 1/val_every of a .txt begins: with a line, or, if the last one is longer, with a character."""
    cut = size * (val_every - 1) // val_every
    stream.seek(max(cut - 1, 0))
    stream.readline()
    found = stream.tell()
    if found >= size:
        found = cut
        while found and stream.seek(found) and stream.read(1)[0] & 0xC0 == 0x80:
            found -= 1
    stream.seek(0)
    return found


def _parquet(raw, shown: str, fields: tuple[str, ...], first: int, val_every: int) -> Iterator[tuple[Row, int]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{shown}: reading parquet needs pyarrow: {sys.executable} -m pip install pyarrow") from None
    if isinstance(raw, RemoteFile):
        raw.read(1)  # waits until it is verified
        raw = raw.store
    try:
        file = pyarrow.parquet.ParquetFile(raw)
        there = [c for c in fields if c in file.schema_arrow.names]
        if not there:
            names = ", ".join(file.schema_arrow.names)
            raise UserError(f"{shown} has no column '{fields[0]}' (found: {names}); --text_field names it")
        number, total, size = 0, max(file.metadata.num_rows, 1), raw.seek(0, 2)
        for group in range(file.num_row_groups):
            if number + file.metadata.row_group(group).num_rows <= first:
                number += file.metadata.row_group(group).num_rows
                continue
            for batch in file.iter_batches(256, [group], there):
                for row in batch.to_pylist():
                    number += 1
                    if number > first:
                        val = val_every > 0 and number % val_every == 0
                        yield Row(number, number, 0, row, True, val), size * number // total
    except pyarrow.ArrowException as e:
        raise UserError(f"{shown} is no parquet file, or a damaged one: {e}") from None


# ---- encoding


class Encoder:
    """Rows -> token ids. text_field: the field of a document's text; model_type: what the chat format follows where the
    tokenizer does not say it."""

    def __init__(self, tokenizer: str, text_field: str, model_type: str):
        self.tokenizer, self.text_field, self.model_type = load_tokenizer(tokenizer), text_field, model_type

    def fields(self) -> tuple[str, ...]:
        return self.text_field, "messages", "prompt", "completion"

    def __call__(self, name: str, row: Row) -> tuple[list[int], np.ndarray | None]:
        """-> (ids, mask of a conversation or None). BadRow names the place."""
        content = row.content
        if kind_of(name) == ".txt" or (name == "-" and not content.lstrip().startswith(b"{")):
            return ([self.tokenizer.bos_id] if row.begins else []) + self.encode(name, row, content), None
        if isinstance(content, bytes):
            try:
                content = json.loads(self.decode(name, row, content))
            except (ValueError, RecursionError) as e:
                raise BadRow(f"{place(name, row.number)} (byte {row.offset}) is not JSON: {e}") from None
        if isinstance(content, dict):
            if isinstance(text := content.get(self.text_field), str):
                try:
                    ids = self.tokenizer.encode(text)
                except UserError as e:
                    raise BadRow(f"{place(name, row.number)}, '{self.text_field}': {e}") from None
                ids.insert(0, self.tokenizer.bos_id)
                return ids, None
            if content.get("messages") is not None or {"prompt", "completion"} <= content.keys():
                return self.chat(place(name, row.number), content)
        where = place(name, row.number)
        found = f"fields {', '.join(content)}" if isinstance(content, dict) else type(content).__name__
        raise BadRow(f"{where} has no text field '{self.text_field}' (found: {found}); --text_field names it")

    def decode(self, name: str, row: Row, content: bytes) -> str:
        try:
            return content.decode()
        except UnicodeDecodeError as e:
            line = row.line + content[: e.start].count(b"\n")
            raise BadRow(
                f"{name}: not UTF-8 at byte {row.offset + e.start} (line {line}); convert the file, e.g. with iconv"
            ) from None

    def encode(self, name: str, row: Row, content: bytes) -> list[int]:
        return self.tokenizer.encode(self.decode(name, row, content))

    def chat(self, where: str, row: dict) -> tuple[list[int], np.ndarray]:
        messages = row.get("messages")
        if messages is None:
            messages = []
            for role, part in (("user", row["prompt"]), ("assistant", row["completion"])):
                messages += part if isinstance(part, list) else [{"role": role, "content": part}]
        try:
            ids, mask = render_chat(self.tokenizer, messages, chat_family(self.tokenizer, self.model_type))
        except UserError as e:
            raise BadRow(f"{where}: {e}") from None
        if not any(mask):
            raise BadRow(f"{where}: a conversation without an assistant's turn, so nothing in it is trained on")
        mask = np.array(mask, dtype=np.uint8)
        mask[0] |= BEGINS
        return ids, mask


@functools.lru_cache(maxsize=4)
def encoder(tokenizer: str, text_field: str, model_type: str) -> Encoder:
    return Encoder(tokenizer, text_field, model_type)


@dataclass
class Encoded:
    """The tokens of some rows, of one split: uint32, and a mask if they are conversations."""

    tokens: np.ndarray
    mask: np.ndarray | None
    documents: int


def encode_rows(settings: tuple[str, str, str], name: str, rows: list[Row]) -> tuple[dict[bool, Encoded], list[str]]:
    """-> ({is it for validation: tokens}, what is wrong with rows that are left out)."""
    encode, bad = encoder(*settings), []
    ids, masks, count = {False: array("I"), True: array("I")}, {False: [], True: []}, {False: 0, True: 0}
    for row in rows:
        try:
            new, mask = encode(name, row)
        except BadRow as e:
            bad.append(str(e))
            continue
        if mask is None and masks[row.val] or (mask is not None and len(masks[row.val]) < count[row.val]):
            bad.append(f"{place(name, row.number)}: documents and conversations in one file: keep them apart")
            continue
        ids[row.val].extend(new)
        count[row.val] += row.begins
        if mask is not None:
            masks[row.val].append(mask)
    out = {}
    for val in (False, True):
        if ids[val]:
            mask = np.concatenate(masks[val]) if masks[val] else None
            out[val] = Encoded(np.array(ids[val], dtype=np.uint32), mask, count[val])
    return out, bad
