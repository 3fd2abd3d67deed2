"""From files of text to token ids, row by row: documents and conversations.

`TextFile.rows` yields what a file holds without looking into it: a line of .jsonl, a row of .json (JSON lines, or a
list of rows), a row of .parquet, a piece of .txt (a file is a document); all but .parquet also as .gz. An `Encoder`
turns a row into ids. The two run in different processes: parsing costs a few per cent of tokenising, but more than
reading does.

A row with --text_field is a document: BOS, then its text. A row with the fields of CHAT_FIELDS or --chat_fields is a
conversation, also where it has a field named text besides; it is rendered by the tokenizer's chat format, and the
assistant's words and the token that ends them are trained on. For a new format write a reader and add it to READERS.
Nothing here knows torch."""

import functools
import glob
import gzip
import importlib.metadata
import inspect
import itertools
import json
import os
import platform
import re
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lib.errors import UserError, listed
from lib.tokenizer import chat_family, load_tokenizer, render_chat

HUB = "hf://datasets/"  # begins the address of a data set on the hub
TXT_PIECE = 2**24  # bytes up to which a .txt is tokenised as a whole; a longer one in pieces, cut between lines
VAL_EVERY = 20  # one document in so many, or the last 1/20 of a .txt, is held out for validation
# Fields that hold conversations: one of messages, or those of the user and of the assistant, with text or messages.
CHAT_FIELDS = (
    ("messages",), ("conversations",), ("conversation",), ("prompt", "completion"), ("prompt", "chosen"),
    ("instruction", "output"),
)  # fmt: skip
CHATS_KNOWN = f"{', '.join(' and '.join(names) for names in CHAT_FIELDS)}, or the fields that --chat_fields names"
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
TOOLS = ("tool_calls", "function_call", "tool_call_id")
BESIDE = ("history", "tools", "functions")  # fields of rows whose content would have to be rendered, too
ID, TRAINED, BEGINS = 2**30 - 1, 2**30, 2**31  # bits of a conversation's tokens: the id; trained on; its beginning


class BadRow(UserError):
    """A row that --skip_bad may pass over."""


class TextRow(NamedTuple):
    number: int  # in its file, from 1
    line: int  # of the file that it begins with; 0 where the format has no lines
    offset: int  # of its first byte in the (decompressed) file
    content: bytes | dict  # JSON, or fields
    val: bool  # it is held out
    begins: bool = True  # a document; False: it goes on with one

    @property
    def place(self) -> str:
        return f"line {self.line}" if self.line else f"row {self.number}"


# ---- entries of --data


def kind_of(name: str) -> str:
    """The suffix that says what a file holds, without .gz; empty if we do not read it."""
    suffix = Path(name.removesuffix(".gz")).suffix
    return suffix if suffix in SUFFIXES and not name.endswith(".parquet.gz") else ""


def is_shards(spec: str) -> bool:
    """Whether an entry of --data names token shards, and not text."""
    path = Path(split_weight(spec)[0]).expanduser()
    names = glob.glob(str(path), recursive=True) if glob.has_magic(path.name) else [path]
    return any(Path(name).suffix == ".bin" or Path(name).is_dir() for name in names)


def name_of(spec: str) -> str:
    """What an entry of --data adds to the run folder's name; a glob is told by its folder, too."""
    path = Path(split_weight(spec)[0].removesuffix(".gz"))
    name = path.stem if path.suffix in (*SUFFIXES, ".bin") else path.name
    return f"{path.parent.name}-{name}" if glob.has_magic(path.name) else name


def knows_text(config) -> bool:
    """Whether it is known what tokens mean: text of our tokenising, or shards with a tokenizer that was named."""
    return config.tokenizer != "bytes" or not any(map(is_shards, config.data))


def split_weight(spec: str) -> tuple[str, Fraction | None]:
    """An entry of --data, which may end in :NUMBER -> (what it names, its weight in a mixture or None)."""
    parts = re.fullmatch(r"(.+):(-?(?:\d+\.?\d*|\.\d+))", spec)
    return (parts[1], Fraction(parts[2])) if parts and not Path(spec).exists() else (spec, None)


def find_files(spec: str, flag: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that a path or a pattern names, text or with one of these suffixes; of a folder only the latter."""
    path = Path(spec).expanduser()
    if path.is_dir():
        files = [p for p in sorted(path.iterdir()) if (kind_of(p.name) or p.suffix) in suffixes]
        problem = f"no {', '.join(suffixes)} in this folder"
    else:
        files = [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))
        problem = "no such file or folder"
    if not files:
        raise UserError(f"{flag} {spec}: {problem}")
    for file in files:
        if not kind_of(file.name) and file.suffix not in suffixes:
            raise UserError(f"{flag} {file}: what this file holds is not known; {FORMATS} are")
    return files


@dataclass(frozen=True)
class TextFile:
    """A file on this machine; `-` is standard input."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        return 0 if self.name == "-" else os.stat(self.name).st_size

    @property
    def identity(self) -> list:
        """Differs where the content does."""
        if self.name == "-":
            return ["-"]
        return [os.path.realpath(self.name), self.size, os.stat(self.name).st_mtime_ns]

    def open(self, ahead: int) -> BinaryIO:
        return sys.stdin.buffer if self.name == "-" else open(self.name, "rb")

    def rows(
        self, fields: tuple[str, ...], first: int = 0, val_every: int = VAL_EVERY, ahead: int = 2**26
    ) -> Iterator[tuple[TextRow, int]]:
        """(row, bytes of the stored file read so far) of the rows behind number `first`. fields: those that are needed,
        a document's text first. val_every: 0 holds nothing out. ahead: bytes to fetch ahead from the hub. UserError
        where the file itself is damaged."""
        name, line, val_every = str(self), 0, val_every or sys.maxsize
        with self.open(ahead) as raw:
            kind = kind_of(name)
            if name == "-":
                kind = ".jsonl" if raw.peek(4096).lstrip()[:1] == b"{" else ".txt"
            stream = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
            try:
                for row in READERS[kind](name, stream, fields, val_every):
                    line = row.line
                    if row.number > first:
                        yield row, _tell(raw)
            except (EOFError, zlib.error, gzip.BadGzipFile) as e:
                where = f"byte {_tell(raw)}, after line {line}"
                while name.startswith(HUB) and raw.read(2**20):
                    pass  # if it was damaged on its way, that is said at its end
                raise UserError(
                    f"{name}: the gzip data is damaged or cut short at {where} ({e}): fetch or compress the file again"
                ) from None


@dataclass(frozen=True)
class BuiltinText(TextFile):
    """Text that is on every machine."""

    name: str = "built-in"
    size = 0

    @property
    def identity(self) -> list:
        source = inspect.getsource(builtin_documents)
        return [platform.python_version(), importlib.metadata.version("torch"), source]

    def rows(self, fields, first=0, *_) -> Iterator[tuple[TextRow, int]]:
        for number, text in enumerate(builtin_documents(), 1):
            if number > first:
                yield TextRow(number, 0, 0, {fields[0]: text}, number % VAL_EVERY == 0), 0


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


# ---- readers: (name, stream, fields, val_every) -> rows


def _tell(raw):
    try:
        return raw.tell()
    except (OSError, ValueError):  # a pipe; a file that is closed
        return 0


def _read_lines(name, stream, fields, val_every):
    offset = 0
    for number, line in enumerate(stream, 1):
        if not line.isspace():
            yield TextRow(number, number, offset, line, number % val_every == 0)
        offset += len(line)


def _read_json(name, stream, fields, val_every):
    """JSON lines, or one list of rows, which is read as a whole."""
    begin = stream.readline()
    lines = itertools.chain([begin], stream)
    if begin.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"[":  # before it a BOM
        yield from _read_lines(name, lines, fields, val_every)
        return
    try:
        rows = json.loads(b"".join(lines))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{name} begins with [ and is no JSON list of rows: {e}") from None
    for number, row in enumerate(rows, 1):
        yield TextRow(number, 0, 0, row, number % val_every == 0)


def _read_txt(name, stream, fields, val_every):
    """A document in pieces of whole lines. The end of a plain file is held out."""
    size = cut = os.path.getsize(name) if name.endswith(".txt") and os.path.isfile(name) else sys.maxsize
    if size < sys.maxsize and val_every < sys.maxsize:
        cut = _last_part(stream, size, val_every)
    offset, line, number = 0, 1, 0
    for end, val in ((cut, False), (size, True)):
        begins = True
        while offset < end and (piece := stream.read(min(TXT_PIECE, end - offset))):
            piece += stream.readline(end - offset - len(piece))
            number += 1
            yield TextRow(number, line, offset, {fields[0]: piece}, val, begins)
            offset, line, begins = offset + len(piece), line + piece.count(b"\n"), False


def _last_part(stream, size, val_every):
    """Where the last 1/val_every begins: with a line, or, if the last one is longer, with a character."""
    cut = size * (val_every - 1) // val_every
    stream.seek(max(cut - 1, 0))
    stream.readline()
    begin = stream.tell()
    if begin >= size:
        begin = cut
        while begin and stream.seek(begin) and stream.read(1)[0] & 0xC0 == 0x80:
            begin -= 1
    stream.seek(0)
    return begin


def _read_parquet(name, stream, fields, val_every):
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{name}: reading parquet needs pyarrow: {sys.executable} -m pip install pyarrow") from None
    try:
        file = pyarrow.parquet.ParquetFile(stream)
        columns = file.schema_arrow.names
        wanted = [c for c in fields if c in columns]
        if not wanted:
            raise UserError(f"{name} has no column '{fields[0]}' (found: {listed(columns)}); --text_field names it")
        rows = (row for batch in file.iter_batches(256, columns=wanted) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield TextRow(number, 0, 0, row, number % val_every == 0)
    except pyarrow.ArrowException as e:
        raise UserError(f"{name} is no parquet file, or a damaged one: {e}") from None


READERS = {".txt": _read_txt, ".jsonl": _read_lines, ".json": _read_json, ".parquet": _read_parquet}
SUFFIXES = tuple(READERS)
FORMATS = f"{', '.join(SUFFIXES)} (also as .gz, but for .parquet) and .bin (token shards)"


# ---- encoding


@functools.lru_cache(maxsize=4)
def _tokenizer(spec):
    return load_tokenizer(spec)  # which looks whether its files have changed: not for each row


class Encoder(NamedTuple):
    """Rows -> token ids. tokenizer: as --tokenizer names it; text_field: the field of a document's text; chat: the chat
    format's family, llama or mixtral, where the tokenizer does not say it; chat_fields: as --chat_fields names them."""

    tokenizer: str
    text_field: str = "text"
    chat: str = "llama"
    chat_fields: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        names = [name for names in (self.chat_fields, *CHAT_FIELDS) for name in names]
        return self.text_field, *dict.fromkeys([*names, "system", "input", *BESIDE])

    def __call__(self, name: str, row: TextRow) -> tuple[list[int], str]:
        """A row of the file `name` -> (its tokens, its kind: text or chat, whose tokens carry TRAINED and BEGINS).
        BadRow names the place."""
        content, where, tokenizer = row.content, f"{name} {row.place}", _tokenizer(self.tokenizer)
        try:
            if isinstance(content, bytes):
                content = json.loads(content.decode("utf-8-sig"))  # Windows begins files with a BOM
            fields = content if isinstance(content, dict) else {}
            text, messages = fields.get(self.text_field), find_messages(fields, self.chat_fields)
            text = text.decode() if isinstance(text, bytes) else text
        except UnicodeDecodeError as e:
            line = row.line + e.object[: e.start].count(b"\n")
            raise BadRow(
                f"{name}: not UTF-8 at byte {row.offset + e.start} (line {line}); convert the file, e.g. with iconv"
            ) from None
        except (ValueError, RecursionError) as e:
            raise BadRow(f"{where} (byte {row.offset}) is not JSON: {e}") from None
        is_chat = messages is not None and (self.text_field == "text" or not isinstance(text, str))
        if not is_chat and not isinstance(text, str):
            found = f"fields {listed(fields)}"[:300] if fields else type(content).__name__
            raise BadRow(
                f"{where} has no text field '{self.text_field}' (found: {found}); --text_field names it. A conversation"
                f" has {CHATS_KNOWN}"
            )
        more = [name for name in BESIDE if fields.get(name) not in (None, "", "[]", [], {})]
        if is_chat and more:
            raise BadRow(
                f"{where} has '{more[0]}' beside its conversation: earlier turns belong into its messages, and tools"
                " are not rendered; move or remove it"
            )
        try:
            if is_chat:
                return self._encode_chat(tokenizer, messages), "chat"
            return [tokenizer.bos_id] * row.begins + tokenizer.encode(text), "text"
        except UserError as e:
            raise BadRow(f"{where}: {e}") from None

    def _encode_chat(self, tokenizer, messages):
        messages = [read_message(i, m) for i, m in enumerate(messages)] if isinstance(messages, list) else messages
        ids, mask = render_chat(tokenizer, messages, chat_family(tokenizer, self.chat))
        if not any(mask):
            raise UserError("a conversation without an assistant's turn, so nothing in it is trained on")
        ids = [i | TRAINED * trained for i, trained in zip(ids, mask, strict=True)]
        return [ids[0] | BEGINS, *ids[1:]]


def read_chat_fields(words: Iterable[str]) -> tuple[str, ...]:
    """The names that --chat_fields gives."""
    names = tuple(name for word in words for name in word.split(",") if name)
    if len(names) not in (0, 2, 3):
        raise UserError(f"--chat_fields {','.join(names)}: expected two or three names, as question,answer")
    return names


def find_messages(row: dict, chat_fields: tuple[str, ...]) -> list | None:
    """The messages of a row, in OpenAI's or ShareGPT's form; None if it is no conversation. chat_fields: as
    --chat_fields names them. The first of three chat_fields, else the row's own `system`, goes before them, unless it
    is null or empty."""
    given = {name: value for name, value in row.items() if value is not None}
    named = chat_fields[-2:], *CHAT_FIELDS
    names = next((names for names in named if names and given.keys() >= set(names)), None)
    if names is None:
        return None
    messages, *answer = [given[name] for name in names]
    if names == ("instruction", "output") and given.get("input"):
        messages = f"{messages}\n\n{given['input']}"
    if answer:
        messages = _join(messages, *answer)
    system = next((given[name] for name in (*chat_fields[:-2], "system") if given.get(name)), None)
    if system and isinstance(messages, list):
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def _join(question, answer) -> list:
    """The messages of two fields, each of them text or messages. An answer that does not begin with the assistant is
    the whole conversation."""
    question = question if isinstance(question, list) else [{"role": "user", "content": question}]
    answer = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    return answer if answer and _role(answer[0]) != "assistant" else question + answer


def _role(message) -> str | None:
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return SPEAKERS.get(role, role) if isinstance(role, str) else None


def read_message(number: int, message) -> dict:
    """A message of a row, its content text or parts of text -> {"role", "content": text}."""
    if not isinstance(message, dict):
        message = {"content": message}
    if used := [name for name in TOOLS if message.get(name)]:
        raise UserError(f"Chat message {number} has {used[0]}: calls of tools are not rendered")
    if left_out := [name for name in ("weight", "train") if message.get(name) not in (None, 1)]:
        raise UserError(
            f"Chat message {number} has {left_out[0]} {message[left_out[0]]!r}: all answers are trained on, and alike;"
            " cut the conversation before it, or leave it out"
        )
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise UserError(f"Chat message {number}: its content has a part that is no text: {str(part)[:100]}")
        content = "".join(part["text"] for part in content)
    return {"role": _role(message), "content": content}


def encode_rows(encoder: Encoder, name: str, rows: list[TextRow]) -> tuple[dict[tuple, array], list[str]]:
    """Rows of the file `name` -> (tokens by whether they are held out and their kind; what is wrong with rows that are
    left out)."""
    splits, bad = {}, []
    for row in rows:
        try:
            tokens, kind = encoder(name, row)
        except BadRow as e:
            bad.append(str(e))
            continue
        splits.setdefault((row.val, kind), array("I")).extend(tokens)
    return splits, bad
