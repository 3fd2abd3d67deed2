"""Converts files (local, on the hub, compressed) to documents and conversations, and these to shards of token ids.

`TextFile.rows` yields rows without parsing them: a line of .jsonl, a row of .json (JSON lines, or a list of rows) or of
.parquet, a piece of .txt (a file is one document); all but .parquet also as .gz. An `Encoder` turns a row into ids, in
worker processes, because that takes 20 times as long as reading. A row with --text_field is a document: BOS, then its
text. A row with the fields of CHAT_FIELDS or --chat_fields is a conversation, even if it also has a field named text:
the assistant's tokens and the token that ends each answer are trained on. A new format needs a reader in READERS.

Addresses on the hub are hf://datasets/ORG/NAME[@REVISION][/PATH]; PATH is a file, a
folder, or a pattern with * (within a name) and **. Nothing here imports torch."""

import codecs
import contextlib
import difflib
import functools
import glob
import gzip
import hashlib
import importlib.machinery
import importlib.metadata
import inspect
import io
import itertools
import json
import logging
import multiprocessing
import os
import platform
import re
import sys
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lib.errors import Failure, UserError, find_damage, guard_token, hub_errors, listed
from lib.tokenizer import chat_family, load_tokenizer, render_chat

HUB = "hf://datasets/"  # the address of a data set on the hub begins with it
STDIN, BUILTIN = "-", "built-in"  # names of text that is in no file
TRAIN_NAME = re.compile(r"(?:^|[^a-z])train(?:ing)?(?:[^a-z]|$)", re.IGNORECASE)
TXT_PIECE = 2**24  # bytes; a longer .txt is tokenised in pieces, cut between lines
VAL_EVERY = 20  # one document in so many, or the last 1/20 of a .txt, is held out for validation
# Fields of conversations: a field with all messages, or a pair of fields (user, assistant) with text or messages.
CHAT_FIELDS = (
    ("messages",), ("conversations",), ("conversation",), ("prompt", "completion"), ("prompt", "chosen"),
    ("instruction", "output"),
)  # fmt: skip
CHATS_KNOWN = f"{', '.join(' and '.join(names) for names in CHAT_FIELDS)}, or the fields that --chat_fields names"
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
TOOLS = ("tool_calls", "function_call", "tool_call_id")
BESIDE = ("history", "tools", "functions")  # fields that would have to be rendered as well
ID, TRAINED, BEGINS = 2**30 - 1, 2**30, 2**31  # bits of a conversation's tokens: the id; trained on; its first token
log = logging.getLogger("flatland")


class BadRow(UserError):
    """A row that --skip_bad may leave out."""


class Damaged(Failure):
    """The bytes of a file that arrived do not have its hash."""


class TextRow(NamedTuple):
    number: int  # in its file, from 1
    line: int  # number of its first line; 0 where the format has no lines
    content: bytes | dict  # JSON, or fields
    val: bool  # held out for validation
    begins: bool = True  # False: it continues the document of the row before

    @property
    def place(self) -> str:
        return f"line {self.line}" if self.line else f"row {self.number}"


# ---- entries of --data


def kind_of(name: str) -> str:
    """The suffix that tells a file's format, without .gz; empty for formats that are not read."""
    suffix = Path(name.removesuffix(".gz")).suffix
    return suffix if suffix in SUFFIXES and not name.endswith(".parquet.gz") else ""


def is_shards(spec: str) -> bool:
    """Whether an entry of --data names token shards, and not text."""
    path = Path(split_weight(spec)[0]).expanduser()
    names = glob.glob(str(path), recursive=True) if glob.has_magic(path.name) else [path]
    return any(Path(name).suffix == ".bin" or Path(name).is_dir() for name in names)


def name_of(spec: str) -> str:
    """The part of the run folder's name for an entry of --data; for a pattern it includes the folder."""
    path = Path(split_weight(spec)[0].removesuffix(".gz"))
    name = path.stem if path.suffix in (*SUFFIXES, ".bin") else path.name
    return f"{path.parent.name}-{name}" if glob.has_magic(path.name) else name


def knows_text(config) -> bool:
    """Whether the text of tokens is known: it was tokenised here, or --tokenizer names the shards' tokenizer."""
    return config.tokenizer != "bytes" or not any(map(is_shards, config.data))


def split_weight(spec: str) -> tuple[str, Fraction | None]:
    """An entry of --data, which may end in :NUMBER -> (path or pattern, weight in a mixture or None)."""
    parts = re.fullmatch(r"(.+):(-?(?:\d+\.?\d*|\.\d+))", spec)
    return (parts[1], Fraction(parts[2])) if parts and not Path(spec).exists() else (spec, None)


def find_files(spec: str, flag: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that a path or a pattern names: text files, or files with these suffixes. A folder stands for its files
    with these suffixes."""
    path = Path(spec).expanduser()
    if path.is_dir():
        files = [p for p in sorted(path.iterdir()) if (kind_of(p.name) or p.suffix) in suffixes]
        kinds = sorted({kind_of(p.name) for p in path.iterdir()} - {""})
        hints = [f"; for its {kind} files: {spec}/*{kind}*" for kind in kinds]
        problem = f"no {', '.join(suffixes)} in this folder{''.join(hints)}"
    else:
        files = [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))
        near = difflib.get_close_matches(path.name, os.listdir(path.parent) if path.parent.is_dir() else (), 3)
        problem = f"no such file or folder in {path.parent.resolve()}" + f"; is it {listed(near)}?" * bool(near)
    if not files:
        raise UserError(f"{flag} {spec}: {problem}")
    for file in files:
        if not kind_of(file.name) and file.suffix not in suffixes:
            raise UserError(f"{flag} {file}: the format of this file is not known; {FORMATS} are")
    return files


def find_text(spec: str, flag: str, commit: str = "") -> list["TextFile"]:
    """The files of text that an entry names: a file, a folder, a pattern, `-`, or an address on the hub (at `commit` if
    given; without a path, the files of its train split)."""
    if spec == STDIN:
        return [TextFile(STDIN)]
    if not spec.startswith("hf://"):
        return [TextFile(str(path)) for path in find_files(spec, flag, SUFFIXES)]
    address = re.fullmatch(rf"{HUB}([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", spec)
    if not address:
        raise UserError(f"{flag} {spec}: expected {HUB}ORG/NAME[@REVISION][/PATH]")
    repo, revision, path = address[1], address[2] or "main", (address[3] or "").strip("/")
    from huggingface_hub import HfApi, HfFileSystem

    guard_token()
    with hub_errors(f"datasets/{repo}"):
        commit = commit or HfApi().dataset_info(repo, revision=revision).sha
        hub, root = HfFileSystem(skip_instance_cache=True), f"datasets/{repo}@{commit}"
        folder = re.split(r"[*?]", path)[0].rpartition("/")[0]
        tree = hub.find(f"{root}/{folder}", detail=True) or hub.find(root, detail=True)
    files = {}
    for name, info in tree.items():
        oid = info["lfs"].sha256 if info["lfs"] else info["blob_id"]
        files[name.removeprefix(f"{root}/")] = TextFile(f"hf://{name}", hub, repo, commit, info["size"], oid)
    return [files[name] for name in _choose(path, files, f"{flag} {spec}", repo)]


def _choose(path, names, entry, repo):
    """The names in a listing that match the path of an address."""
    from fsspec.utils import glob_translate

    data = sorted(name for name in names if kind_of(name))
    chosen = [name for name in data if re.match(glob_translate(path), name)]
    below = [name for name in data if not path or name.startswith(f"{path}/")]
    if below and not chosen:
        chosen = [name for name in below if TRAIN_NAME.search(name)] or (below if path else [])
        if len({name.rpartition("/")[0] for name in chosen}) != 1:
            raise UserError(f"{entry} does not say which files: expected {_candidates(repo, below)}")
    if not chosen:
        raise UserError(f"{entry}: the address matches no data file; the data set has {_candidates(repo, data)}")
    return chosen


def _candidates(repo, names):
    """Files whose names differ only in numbers are listed as one pattern."""
    patterns = list(dict.fromkeys(re.sub(r"\d+-of-\d+|\d{3,}", "*", name) for name in names))
    more = f" and {len(patterns) - 12} more" if len(patterns) > 12 else ""
    return ", ".join(f"{HUB}{repo}/{p}" for p in patterns[:12]) + more or "none"


def fetch_whole(files: list["TextFile"]) -> list["TextFile"]:
    """The files of an entry as local files. Files of the hub are downloaded into HF_HOME's cache if they are missing
    there, and verified. Several processes may call it at the same time."""
    if not files[0].hub:
        return files
    from huggingface_hub import hf_hub_download

    repo, commit = files[0].repo, files[0].commit
    fetch = functools.partial(hf_hub_download, repo, repo_type="dataset", revision=commit)
    with hub_errors(f"datasets/{repo}"):
        paths = [fetch(file.path) for file in files]
    folder = Path(paths[0].removesuffix(files[0].path))
    damaged = set(find_damage(folder)) & {file.path for file in files}
    if damaged:
        raise Damaged(
            f"{folder}: {listed(sorted(damaged)[:3])} arrived damaged: delete it, and run the same command again"
        )
    return [TextFile(path) for path in paths]


# ---- files


@dataclass(frozen=True)
class TextFile:
    """A file of text: a path, an address hf://datasets/ORG/NAME@COMMIT/PATH, STDIN or BUILTIN. The other fields are for
    files on the hub: the file system that opens them, and the listed size and hash (oid: sha256, or git's SHA-1 of the
    blob)."""

    name: str
    hub: object = field(default=None, repr=False, compare=False)
    repo: str = ""
    commit: str = ""
    listed_size: int = 0
    oid: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> str:
        """In the repository of the hub."""
        return self.name.partition(f"@{self.commit}/")[2]

    @property
    def size(self) -> int:
        return self.listed_size if self.hub or self.name in (STDIN, BUILTIN) else os.stat(self.name).st_size

    @property
    def identity(self) -> list:
        """Differs whenever the content does."""
        if self.name == BUILTIN:
            source = inspect.getsource(builtin_documents)
            return [platform.python_version(), importlib.metadata.version("torch"), source]
        if self.hub or self.name == STDIN:
            return [self.name, self.size, self.oid]
        return [os.path.realpath(self.name), self.size, os.stat(self.name).st_mtime_ns]

    def open(self) -> BinaryIO:
        if self.name == STDIN:
            return sys.stdin.buffer
        if self.name == BUILTIN:
            return io.BytesIO()
        if self.hub and kind_of(self.name) == ".parquet":  # its table of contents is at its end
            return self.hub.open(self.name)
        return io.BufferedReader(HubReader(self), 2**20) if self.hub else open(self.name, "rb")

    def rows(self, fields: tuple[str, ...], first: int = 0, val_every: int = VAL_EVERY) -> Iterator[TextRow]:
        """The rows after number `first`. fields: the fields to read, a document's text first. val_every: 0 holds no row
        out. UserError if the file is damaged."""
        name, line = self.name, 0
        with hub_errors(f"datasets/{self.repo}") if self.hub else contextlib.nullcontext(), self.open() as raw:
            kind = BUILTIN if name == BUILTIN else kind_of(name)
            if name == STDIN:
                kind = ".jsonl" if raw.peek(4096).lstrip()[:1] == b"{" else ".txt"
            stream = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
            try:
                for row in READERS[kind](name, stream, fields, val_every or sys.maxsize):
                    line = row.line
                    if row.number > first:
                        yield row
            except (EOFError, zlib.error, gzip.BadGzipFile) as e:
                while self.hub and raw.read(2**20):
                    pass  # at the end of the file, HubReader raises Damaged if its hash is wrong
                raise UserError(
                    f"{name}: the gzip data is damaged or cut short after line {line} ({e}): fetch or compress the file"
                    " again"
                ) from None


class HubReader(io.RawIOBase):
    """A file on the hub, read in sequence while it arrives. At its end, its size and hash must match the listing."""

    def __init__(self, file: TextFile):
        self.file, self.raw, self.count = file, file.hub.open(file.name, block_size=0), 0
        self.digest = hashlib.sha256() if len(file.oid) == 64 else hashlib.sha1(b"blob %d\0" % file.size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self.raw.readinto(buffer)
        self.count += count
        self.digest.update(buffer[:count])
        if not count and (self.count, self.digest.hexdigest()) != (self.file.size, self.file.oid):
            raise Damaged(f"{self.file} arrived damaged (size or hash is not the hub's)")
        return count


def builtin_documents() -> Iterator[str]:
    """English text that every machine has: Python's reference topics and the docstrings of the standard library and of
    torch, each of 200 characters or more, once. It changes with their versions."""
    import importlib.util
    import pydoc_data.topics
    import sysconfig

    topics = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) >= 200]
    yield from dict.fromkeys(topics)  # once each
    docstring = re.compile(r'(?:\A|:\n|,\n)\s*r?"""(.*?)"""', re.DOTALL)
    excluded = {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib"}
    seen = set(topics)
    for root in (Path(sysconfig.get_paths()["stdlib"]), Path(importlib.util.find_spec("torch").origin).parent):
        for path in sorted(root.rglob("*.py")):
            if excluded.isdisjoint(path.relative_to(root).parts):
                for match in docstring.findall(path.read_text("utf-8", "replace")):
                    text = inspect.cleandoc(match)
                    if len(text) >= 200 and text not in seen:
                        seen.add(text)
                        yield text


# ---- readers: (name, stream, fields, val_every) -> rows


def _read_builtin(name, stream, fields, val_every):
    for number, text in enumerate(builtin_documents(), 1):
        yield TextRow(number, 0, {fields[0]: text}, number % val_every == 0)


def _read_lines(name, stream, fields, val_every):
    for number, line in enumerate(stream, 1):
        if not line.isspace():
            yield TextRow(number, number, line, number % val_every == 0)


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
        raise UserError(f"{name} begins with [ but is not a JSON list of rows: {e}") from None
    for number, row in enumerate(rows, 1):
        yield TextRow(number, 0, row, number % val_every == 0)


def _read_txt(name, stream, fields, val_every):
    """A document in pieces of whole lines, whose \\r are kept. The end of a plain file is held out."""
    size = cut = os.path.getsize(name) if name.endswith(".txt") and os.path.isfile(name) else sys.maxsize
    if size < sys.maxsize and val_every < sys.maxsize:
        cut = _last_part(stream, size, val_every)
    offset, line, number = 0, 1, 0
    for end, val in ((cut, False), (size, True)):
        begins = True
        while offset < end and (piece := stream.read(min(TXT_PIECE, end - offset))):
            piece += stream.readline(end - offset - len(piece))
            number += 1
            content = piece if offset else piece.removeprefix(codecs.BOM_UTF8)  # Windows begins files with a BOM
            yield TextRow(number, line, {fields[0]: content}, val, begins)
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
            yield TextRow(number, 0, row, number % val_every == 0)
    except pyarrow.ArrowException as e:
        raise UserError(f"{name} is not a parquet file, or it is damaged: {e}") from None


READERS = {".txt": _read_txt, ".jsonl": _read_lines, ".json": _read_json, ".parquet": _read_parquet}
SUFFIXES = tuple(READERS)
READERS[BUILTIN] = _read_builtin
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
            raise BadRow(f"{name}: not UTF-8 in line {line}; convert the file, e.g. with iconv") from None
        except (ValueError, RecursionError) as e:
            raise BadRow(f"{where} is not JSON: {e}") from None
        is_chat = messages is not None and (self.text_field == "text" or not isinstance(text, str))
        if not is_chat and not isinstance(text, str):
            found = f"fields {listed(fields)}"[:300] if fields else type(content).__name__
            if self.text_field in fields:
                value = json.dumps(text, default=str)[:80]
                raise BadRow(f"{where}: its text field '{self.text_field}' holds {value}, not a string")
            raise BadRow(
                f"{where} has no text field '{self.text_field}' (found: {found}); --text_field names it. A conversation"
                f" has {CHATS_KNOWN}"
            )
        more = [name for name in BESIDE if fields.get(name) not in (None, "", "[]", [], {})]
        if is_chat and more:
            raise BadRow(
                f"{where} has '{more[0]}' next to its conversation: earlier turns belong into its messages, and tools"
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
    """The messages of a row, in OpenAI's or ShareGPT's form; None if the row is not a conversation. chat_fields: as
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
                raise UserError(f"Chat message {number}: its content has a part that is not text: {str(part)[:100]}")
        content = "".join(part["text"] for part in content)
    return {"role": _role(message), "content": content}


def encode_rows(encoder: Encoder, name: str, rows: list[TextRow]) -> list[tuple[array | str, str]]:
    """Rows of the file `name` -> (tokens, kind) of each; for a bad row (the message, "bad")."""
    out = []
    for row in rows:
        try:
            tokens, kind = encoder(name, row)
            out.append((array("I", tokens), kind))
        except BadRow as e:
            out.append((str(e), "bad"))
    return out


# ---- worker processes


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def start_workers(processes: int) -> ProcessPoolExecutor:
    """Processes that import only the modules of the functions they run; they end when this process does."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None:  # else each worker would import our script, and torch with it
        main.__spec__ = importlib.machinery.ModuleSpec("__main__", None)
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # else it warns after a killed run's error
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin_worker)


def _begin_worker():
    os.setsid()  # Ctrl-C is for the parent
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def in_order(function: Callable, jobs: Iterator[tuple], pool: Executor | None, ahead: int = 0) -> Iterator[tuple]:
    """(label, function(*arguments)) of each job (label, *arguments), in their order. The pool is up to `ahead` jobs
    ahead; None: computed here."""
    if not pool:
        yield from ((label, function(*arguments)) for label, *arguments in jobs)
        return
    submitted = ((label, pool.submit(function, *arguments)) for label, *arguments in jobs)
    try:
        waiting = deque(itertools.islice(submitted, ahead))
        while waiting:
            waiting.extend(itertools.islice(submitted, 1))
            label, future = waiting.popleft()
            yield label, future.result()
    except BrokenProcessPool:
        raise Failure("a worker process was killed while it tokenised text (out of memory?)") from None


def group_rows(rows: Iterator[TextRow], size: int) -> Iterator[list[TextRow]]:
    """Lists of rows of about `size` bytes each."""
    group, left = [], size
    for row in rows:
        group.append(row)
        left -= len(row.content if isinstance(row.content, bytes) else str(row.content))
        if left <= 0:
            yield group
            group, left = [], size
    if group:
        yield group
