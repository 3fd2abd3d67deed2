"""Converts files (local, on the hub, in other stores) to documents and conversations, and these to shards of token ids.

`TextFile.rows` yields the rows that lib/readers.py reads. An `Encoder` turns a row into ids, in worker processes,
because that takes 20 times as long as reading. A row with the field that --text_field names is a document: BOS, then
its text. Without that flag, a row with the fields of CHAT_FIELDS or --chat_fields is a conversation, and another one
with a field named text is a document. Of conversations the assistant's tokens and the token that ends each answer are
trained on.

`prepare` writes a folder of shards: train-00000.bin ... and val-00000.bin ... with llm.c's header (256 int32: magic
20240520, version 1, uint16 tokens; or magic 20240801, version 7, uint32), and index.json (sources, tokenizer, hashes).
Tokens of conversations are uint32 with the bits TRAINED and BEGINS. Shards hold the rows in their order, for any number
of processes. While `prepare` runs, it adds a line to progress.jsonl for each pair of shards: their hashes, and the
position after them, where an interrupted call resumes.

Every format can be read from every address of lib/stores.py. config.py imports this module, so it imports numpy only in
functions, and torch never."""

import contextlib
import functools
import glob
import gzip
import hashlib
import importlib.machinery
import importlib.metadata
import itertools
import json
import logging
import multiprocessing
import os
import platform
import re
import shutil
import struct
import sys
import threading
import uuid
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from lib.chat import CHATS_KNOWN, Notes, chat_template, find_messages, render_chat
from lib.errors import Parser, UserError, nearest, printable
from lib.files import read_ahead, read_json, read_object, write_whole
from lib.progress import advance
from lib.readers import BUILTIN, FORMATS, READERS, SUFFIXES, TextRow, kind_of, read_txt
from lib.stores import bare, fetch, list_files, open_remote, open_store, store_errors, version_of
from lib.tokenizer import load_tokenizer

STDIN = "-"  # the name of standard input
# The sources in lib/ that decide how text becomes tokens.
CODE = (
    "text.py",
    "readers.py",
    "chat.py",
    "tokenizer.py",
)
VAL_EVERY = 20  # one document in so many is held out for validation; of fewer files of text, the last 1/20 of each
MIXED = "documents and conversations together: separate them, and give each its weight, as in A:0.5 B:0.5"
ID, TRAINED, BEGINS = 2**30 - 1, 2**30, 2**31  # bits of a conversation's tokens: the id; trained on; its first token
HEADER = 1024  # bytes of a shard
MAGICS = {20240520: (1, "<u2", 50256), 20240801: (7, "<u4", 128000)}  # version, dtype, token before a document
INDEX, PROGRESS, SHARD = "index.json", "progress.jsonl", ".bin"
SHARD_TOKENS = 100_000_000
VERBS = {
    "prepare": "tokenizes text into a folder of shards, once and on all cores: prepare --help",
    "verify": "compares shards with their headers and checksums: verify DIR|FILE ...",
    "show": "prints --n rows (3) as the model sees them: show --data FILES [any flag of train.py]",
}
BATCH = 2**20  # bytes of text that a worker encodes at a time
PARALLEL = 2**25  # bytes; several processes tokenise a longer text
log = logging.getLogger("flatland")


# ---- entries of --data


def is_shards(spec: str) -> bool:
    """Whether an entry of --data names token shards, and not text."""
    path, _ = split_weight(spec)
    return kind_of(path) == SHARD or "://" not in path and any(Path(path).expanduser().glob(f"*{SHARD}"))


def name_of(spec: str) -> str:
    """The part of the run folder's name for an entry of --data; for a pattern it includes the folder."""
    path = Path(bare(split_weight(spec)[0]).removesuffix(".gz"))
    name = path.stem if path.suffix in (*SUFFIXES, SHARD) else path.name
    return f"{path.parent.name}-{name}" if glob.has_magic(path.name) else name


def knows_text(config) -> bool:
    """Whether the text of tokens is known: it was tokenised here, or --tokenizer names the shards' tokenizer."""
    return config.tokenizer != "bytes" or not any(map(is_shards, (*config.data, *config.val_data)))


def split_weight(spec: str) -> tuple[str, Fraction | None]:
    """An entry of --data, which may end in :NUMBER -> (path or pattern, weight in a mixture or None)."""
    spec = spec.removeprefix("file://")
    parts = re.fullmatch(r"(.+):(-?(?:\d+\.?\d*|\.\d+))", spec)
    return (parts[1], Fraction(parts[2])) if parts and not Path(spec).exists() else (spec, None)


def find_files(spec: str, flag: str) -> list["TextFile"]:
    """The files that an entry names: a path, a pattern, `-`, or an address. A folder or a pattern stands for its token
    shards or, if it has none, for its files of text, without a README.md that describes files of other formats."""
    if spec == STDIN:
        return [TextFile(STDIN, sys.maxsize, uuid.uuid4().hex)]
    spec = spec.removeprefix("file://")
    is_address = "://" in spec
    with store_errors(spec):
        store, path = open_store(spec, flag)
        infos = list_files(store, path)
    files = [info for info in infos if info["type"] != "directory"]
    texts = [info for info in files if kind_of(info["name"]) in SUFFIXES]
    if any(kind_of(info["name"]) != ".md" for info in texts):
        texts = [info for info in texts if os.path.basename(info["name"]) != "README.md"]
    out = []
    for info in [info for info in files if kind_of(info["name"]) == SHARD] or texts:
        name = store.unstrip_protocol(info["name"]) if is_address else info["name"]
        out.append(TextFile(name, info["size"] or 0, version_of(info), store if is_address else None))
    if out:
        return out
    hint = ""
    if len(infos) > len(files):
        hint = f"; with the files in its folders: '{spec.removesuffix('/*').rstrip('/')}/**'"
    elif not is_address:
        path = Path(path).absolute()
        folder = next(p for p in (path, *path.parents) if p.is_dir())
        near = nearest(path.name, {*os.listdir(folder)} - {path.name})
        hint = f" in {folder}" + f"; did you mean {near}?" * bool(near)
    problem = "the format is not known" if files else "no such file of a known format"
    raise UserError(f"{flag} {spec}: {problem}{hint}; {FORMATS} are known")


def fetch_all(files: list["TextFile"], cache: Path) -> list["TextFile"]:
    """The local copies of files: those of a folder are downloaded into one of the cache, with the index.json beside
    token shards. Several processes may call it at the same time."""
    from filelock import FileLock

    out = []
    for parent, group in itertools.groupby(files, lambda file: os.path.dirname(bare(file.name))):
        group = list(group)
        store, names, folder = group[0].store, [file.name for file in group], cache / f"files-{digest(group)}"
        if not store:
            out += group
            continue
        with store_errors(parent), FileLock(f"{folder}.lock"):
            if not folder.exists():
                index = f"{parent}/{INDEX}"
                wanted = names + [index] * (any(kind_of(name) == SHARD for name in names) and store.exists(index))
                os.makedirs(f"{folder}.part", exist_ok=True)
                for name in wanted:
                    fetch(store, name, f"{folder}.part/{Path(bare(name)).name}")
                os.replace(f"{folder}.part", folder)
        out += [find_files(str(folder / Path(bare(name)).name), "--data")[0] for name in names]
    return out


# ---- files


class TextFile(NamedTuple):
    """A file of text. name: a path, an address (on the hub: hf://datasets/ORG/NAME@COMMIT/PATH), STDIN or BUILTIN.
    size: in bytes, 0 if unknown. version: changes with the content, if the store tells. store: the fsspec file system
    of an address."""

    name: str
    size: int
    version: str
    store: object = None

    @property
    def is_document(self) -> bool:
        """Whether the file is one document, and not rows."""
        return READERS.get(kind_of(self.name)) is read_txt

    def _open(self, in_sequence):
        if self.store:
            return open_remote(self.store, self.name, in_sequence)
        path = os.devnull if self.name == BUILTIN else self.name
        return sys.stdin.buffer if path == STDIN else open(path, "rb")

    def rows(self, first: int = 0, val_every: int = VAL_EVERY) -> Iterator[TextRow]:
        """The rows after number `first`. val_every: 0 holds no row out. UserError if the file is damaged."""
        name, number, kind = self.name, 0, kind_of(self.name)
        # The table of contents of a .parquet is at its end, and so is what is held out of a file of text.
        in_sequence = kind != ".parquet" and not (self.is_document and val_every)
        with store_errors(name), self._open(in_sequence) as raw:
            if name == STDIN:
                kind = ".jsonl" if raw.peek(4096).lstrip()[:1] == b"{" else ".txt"
            if kind not in READERS:
                raise UserError(f"{name} holds token ids, not text")
            stream = raw
            try:
                if bare(name).endswith(".gz"):
                    stream = gzip.GzipFile(fileobj=raw)
                    if not raw.peek(1):
                        raise EOFError("it has no bytes")
                for number, row in enumerate(READERS[kind](self, stream, val_every), 1):
                    if number > first and row.content != b"":  # a blank line has a number, but is not a row
                        val = number % val_every == 0 if val_every and row.val is None else row.val
                        yield row._replace(number=number, val=val)
            except (EOFError, zlib.error, gzip.BadGzipFile) as e:
                raise UserError(
                    f"{name}: the gzip data is damaged or cut short after row {number} ({e}): get the file again"
                ) from None
        if not number:
            log.warning(f"{name} is empty")


def builtin_file() -> TextFile:
    return TextFile(BUILTIN, 0, f"{platform.python_version()} {importlib.metadata.version('torch')}")


# ---- encoding


# load_tokenizer looks whether the files of a tokenizer have changed: not for each row.
_tokenizer = functools.lru_cache(maxsize=4)(load_tokenizer)


class Encoder(NamedTuple):
    """Rows -> token ids. tokenizer, text_field, chat_fields: as the flags name them. chat: the chat format's family,
    llama or mixtral, where the tokenizer does not say it."""

    tokenizer: str
    text_field: str = ""
    chat: str = "llama"
    chat_fields: tuple[str, ...] = ()

    @classmethod
    def of(cls, config) -> "Encoder":
        return cls(config.tokenizer, config.text_field, config.model_config.chat_format, config.chat_fields)

    def __call__(self, row: TextRow, notes: Notes | None = None) -> tuple[list[int], str]:
        """A row -> (its tokens, its kind: text or chat, whose tokens carry TRAINED and BEGINS). notes: gets what of a
        conversation is changed or left out. UserError if it is a bad row."""
        content, tokenizer, name = row.content, _tokenizer(self.tokenizer), self.text_field or "text"
        if isinstance(content, UserError):
            raise content
        if isinstance(content, bytes):
            try:
                content = json.loads(content.decode("utf-8-sig"))  # Windows begins files with a BOM
            except (ValueError, RecursionError) as e:
                raise UserError(f"not JSON in UTF-8: {e}") from None
        elif isinstance(content, str):
            content = {name: content}
        fields = decode_bytes(content) if isinstance(content, dict) else {}
        text = fields.get(name)
        is_named = self.text_field and isinstance(text, str)
        chat = None if is_named else find_messages(fields, self.chat_fields)
        if chat is not None:
            messages, inputs, unread = chat
            template = chat_template(tokenizer, self.chat, inputs.get("tools"))
            notes = [] if notes is None else notes
            ids, mask = render_chat(tokenizer, messages, template, inputs, notes)
            notes += unread
            if not any(mask):
                raise UserError("a conversation without an assistant's turn that has a weight: nothing is trained on")
            ids = [i | TRAINED * trained for i, trained in zip(ids, mask, strict=True)]
            ids[0] |= BEGINS
            return ids, "chat"
        if not isinstance(text, str):
            found = (
                ", ".join(f"{key} ({type(value).__name__})" for key, value in fields.items()) or type(content).__name__
            )
            raise UserError(
                f"no text in field '{name}' (found: {found[:300]}); --text_field names it. A conversation"
                f" has {CHATS_KNOWN}"
            )
        return [tokenizer.bos_id] * row.begins + tokenizer.encode(text), "text"


def decode_bytes(value):
    """A value of a row, with bytes as text: parquet may hold either. Bytes that are not UTF-8 stay."""
    if isinstance(value, dict):
        return {name: decode_bytes(part) for name, part in value.items()}
    if isinstance(value, list):
        return [*map(decode_bytes, value)]
    with contextlib.suppress(UnicodeDecodeError):
        return value.decode() if isinstance(value, bytes) else value
    return value


def encode_rows(encoder: Encoder, rows: list[TextRow]) -> list[tuple[array | str, str]]:
    """(tokens, kind, notes) of each row; for a bad row (the reason, "", [])."""
    out = []
    for row in rows:
        try:
            tokens, kind = encoder(row, notes := [])
            out.append((array("I", tokens), kind, notes))
        except UserError as e:
            out.append((str(e), "", []))
    return out


def encode(
    jobs: Iterator[tuple], encoder: Encoder, pool: Executor, ahead: int, skip_bad: int, skipped=0, kind=""
) -> Iterator[tuple]:
    """jobs: (label, name of a file, rows of it). -> (label, row, tokens, kind, bad rows so far) of each good row, in
    their order. The pool is up to `ahead` + 1 jobs ahead. UserError after more than skip_bad bad rows, including rows
    of another kind than the first. At the end the log counts the notes on rows, with the first of each kind."""
    examples, counts = {}, Counter()
    submitted = ((job, pool.submit(encode_rows, encoder, job[2])) for job in jobs)
    for (label, name, rows), future in read_ahead(submitted, ahead):
        advance()
        for row, (tokens, its_kind, notes) in zip(rows, future.result(), strict=True):
            kind = kind or its_kind
            unit = "line" if isinstance(row.content, bytes) else "row"
            if its_kind and its_kind == kind:
                counts.update(dict(notes).keys())
                for what, example in notes:
                    examples.setdefault(what, f"{name} {unit} {row.number}: {example[:80]!r}")
                yield label, row, tokens, kind, skipped
                continue
            message = f"{name} {unit} {row.number}: {MIXED if its_kind else tokens}"
            skipped += 1
            if skipped > skip_bad:
                raise UserError(f"{message} (bad row {skipped}; --skip_bad N skips up to N of them)")
            log.warning(f"skipped: {printable(message)}")
    for what, example in examples.items():
        log.warning(f"{counts[what]} rows: {what}, first in {printable(example)}")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def start_workers(processes: int) -> ProcessPoolExecutor:
    """Processes that import only the modules of the functions they run; they end when this process does."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None:  # else each worker would import our script, and torch with it
        main.__spec__ = importlib.machinery.ModuleSpec("__main__", None)
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin_worker)


def _begin_worker():
    os.setsid()  # Ctrl-C is for the parent
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


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


# ---- shards


def write_shard(path: Path, tokens: Sequence[int], vocab_size: int) -> str:
    """Writes tokens (an array) with the header and the dtype that fit the vocabulary -> sha256 of the file."""
    import numpy as np

    magic = 20240520 if vocab_size <= 2**16 else 20240801
    version, dtype, _ = MAGICS[magic]
    header = struct.pack("<3i", magic, version, len(tokens)).ljust(HEADER, b"\0")
    content = header + np.asarray(tokens).astype(dtype).tobytes()
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


class Shard(NamedTuple):
    """A file of token ids, or a stretch of one."""

    path: str
    tokens: int
    dtype: str
    begin: int = 0  # bytes before the first token
    sha256: str = ""  # of the file, if index.json records it
    first: int = 0  # the number of the first token in the file


def find_shard(path: str, size: int, data_dtype: str = "", recorded: dict | None = None) -> tuple[Shard, int | None]:
    """-> (a shard, the id that its format puts before each document or None). size: of the file in bytes. recorded: its
    entry in index.json; without one, the header is read. UserError if they do not fit together."""
    if recorded:
        tokens, content = recorded["tokens"], size - HEADER
        if content not in (2 * tokens, 4 * tokens):
            raise UserError(f"{path}: {content} bytes of tokens, but {INDEX} records {tokens} tokens: get it again")
        return Shard(path, tokens, f"<u{content // tokens}", HEADER, recorded["sha256"]), None
    with open(path, "rb", buffering=0) as file:
        magic, version, count = struct.unpack("<3i", file.read(12)) if size >= HEADER else (0, 0, 0)
    if magic in MAGICS:
        expected, dtype, delimiter = MAGICS[magic]
        promised = count * int(dtype[-1])
        if (version, size - HEADER) != (expected, promised):
            raise UserError(
                f"{path}: version {version} and {size - HEADER} bytes of tokens, but its header (magic {magic}, {count}"
                f" tokens) means version {expected} and {promised} bytes: the file is damaged; write it again"
            )
        return Shard(path, count, dtype, HEADER), delimiter
    if not data_dtype:
        magics = " or ".join(map(str, MAGICS))
        raise UserError(f"{path} has no token-shard header (magic {magics}); give --data_dtype for nanoGPT's files")
    tokens, rest = divmod(size, 2 if data_dtype == "uint16" else 4)
    if not tokens or rest:
        raise UserError(f"{path}: {size} bytes are not a whole number of {data_dtype} tokens, at least one")
    return Shard(path, tokens, data_dtype), None


def read_index(folder: Path) -> dict:
    """index.json of a folder that `prepare` made; {} for shards from other tools."""
    path = folder / INDEX
    index = read_object(path) if path.exists() else {}
    if "position" in index:
        raise UserError(f"{folder} is not prepared to its end: run its `python data.py prepare` again")
    return index if "fingerprint" in index else {}


def prepare(
    sources: list[TextFile], encoder: Encoder, out: Path, shard_tokens=SHARD_TOKENS, val_every=VAL_EVERY, skip_bad=0
) -> dict:
    """Tokenises sources into a new folder of shards of shard_tokens or a few more -> index.json. Resumes an interrupted
    call after its last shard, and waits while another process prepares the same folder. UserError after more than
    skip_bad bad rows."""
    from filelock import FileLock

    tokenizer, key = load_tokenizer(encoder.tokenizer), key_of(sources, encoder, shard_tokens, val_every)
    index = read_json(out / INDEX)
    if index.get("key") == key and "position" not in index:
        return index  # also from a read-only folder; and ranks need not wait for the lock in turn
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / ".lock"), _removed_if_empty(out):  # a lock is not removed while another process may wait for it
        index = read_json(out / INDEX)
        if index.get("key") != key:
            if others := sorted({p.name for p in out.iterdir()} - {".lock", INDEX}):
                raise UserError(
                    f"--out {out} holds {', '.join(others[:3])}, made of other input or with another tokenizer, other"
                    " flags or another version of the code: name another folder, or empty it"
                )
            index = {
                "key": key,
                "tokenizer": encoder.tokenizer,
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "delimiter": tokenizer.bos_id,
                "kind": "",
                "sources": [source.name for source in sources],
                "files": {},
                "skipped": 0,
                "position": [0, 0],  # the source and its row behind the last shard; absent when all is done
            }
        if "position" in index:
            _read_progress(out, index)
            _write_all(sources, encoder, out, index, shard_tokens, val_every, skip_bad)
        (out / PROGRESS).unlink(missing_ok=True)
    return index


@contextlib.contextmanager
def _removed_if_empty(out):
    """Removes the folder after an error if it holds nothing but its lock."""
    try:
        yield
    except BaseException:
        if os.listdir(out) == [".lock"]:
            shutil.rmtree(out)
        raise


def _read_progress(out, index):
    """Moves the shards of an interrupted call into index.json. A kill may have cut the last line."""
    if (out / PROGRESS).exists():
        for record in map(json.loads, (out / PROGRESS).read_text().split("\n")[:-1]):
            index["files"] |= record.pop("files")
            index |= record
        _write_index(out, index)


def _write_index(out, index):
    write_whole(out / INDEX, json.dumps(index, indent=1), sync=True)
    (out / PROGRESS).write_text("")


def _write_all(sources, encoder, out, index, shard_tokens, val_every, skip_bad):
    """Writes the shards behind the index's position."""
    from tqdm import tqdm

    start, first = index["position"]
    rest = tqdm(list(enumerate(sources))[start:], unit=" files", disable=None, leave=False)
    documents, whole = [i for i, source in enumerate(sources) if source.is_document], {}
    if 0 < val_every <= len(documents):
        whole = {i: number % val_every == 0 for number, i in enumerate(documents, 1)}

    def rows_of(i, source):
        passed = first if i == start else 0
        if i not in whole:
            return source.rows(passed, val_every)
        return (row._replace(val=whole[i]) for row in source.rows(passed, 0))

    jobs = ((i, source.name, rows) for i, source in rest for rows in group_rows(rows_of(i, source), BATCH))
    tokens, size = {"train": [], "val": []}, 0
    counts = Counter(name.partition("-")[0] for name in index["files"])
    processes = cores() if sum(source.size for source in sources) > PARALLEL else 0
    with start_workers(processes) if processes else ThreadPoolExecutor(1) as pool:
        done = encode(jobs, encoder, pool, 2 * processes, skip_bad, index["skipped"], index["kind"])
        for i, row, ids, kind, skipped in done:
            tokens["val" if row.val else "train"].append(ids)
            size += len(ids)
            index |= {"kind": kind, "skipped": skipped, "position": [i, row.number]}
            if size >= shard_tokens:
                _write_shards(out, index, tokens, counts)
                size = 0
    if val_every and len(tokens["train"]) > 1 and not tokens["val"] and "val-00000.bin" not in index["files"]:
        tokens["val"].append(tokens["train"].pop())  # one document or conversation, of too few for val_every
    if not any(tokens.values()) and not index["files"]:
        raise UserError(f"{', '.join(index['sources'][:3])}: no rows are left, so there is nothing to prepare")
    _write_shards(out, index, tokens, counts)
    del index["position"]
    _write_index(out, index)


def _write_shards(out, index, tokens, counts):
    """Writes the rows of each split as its next shard, then a line of progress. counts: the shards of each split."""
    files = {}
    for split, rows in tokens.items():
        if rows:
            name = f"{split}-{counts[split]:05}{SHARD}"
            counts[split] += 1
            joined = array("I", b"".join(rows))
            digest = write_shard(out / name, joined, index["vocab_size"] if index["kind"] == "text" else 2**32)
            files[name] = {"tokens": len(joined), "sha256": digest}
            rows.clear()
    index["files"] |= files
    if not (out / PROGRESS).exists():
        return _write_index(out, index)
    record = {name: index[name] for name in ("kind", "skipped", "position")} | {"files": files}
    with open(out / PROGRESS, "a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def digest(files: list[TextFile], *made_with) -> str:
    """A hash of the identity of files, and of what they are made into."""
    return hashlib.sha256(json.dumps([[file[:3] for file in files], made_with]).encode()).hexdigest()[:16]


def key_of(sources: list[TextFile], encoder: Encoder, *options: int) -> str:
    """A hash of everything that prepared tokens depend on."""
    code, tokenizer = (
        [Path(__file__).with_name(name).read_text("utf-8") for name in CODE],
        load_tokenizer(encoder.tokenizer),
    )
    return digest(sources, encoder[1:], tokenizer.fingerprint, tokenizer.templates, options, code)


def verify(path: Path) -> Iterator[str]:
    """Yields a message for each defect of a shard, or of a folder of shards: headers, and checksums if it has them."""
    folder = path if path.is_dir() else path.parent
    index = read_index(folder)
    known, found = index.get("files", {}), [Path(file.name) for file in find_files(str(path), "verify")]
    for file in dict.fromkeys(found + [folder / name for name in known if path.is_dir()]):
        try:
            find_shard(str(file), file.stat().st_size)
        except (FileNotFoundError, UserError) as e:
            yield str(e)
            continue
        if index and hashlib.sha256(file.read_bytes()).hexdigest() != known.get(file.name, {}).get("sha256"):
            yield f"{file} has changed since it was prepared (sha256): prepare the text again"


# ---- the command line


def main(argv: list[str], parse_args: Callable) -> None:
    """argv: prepare or verify, and its flags. parse_args: config.parse_args, for the flags that describe the text."""
    parser = Parser(prog="data.py", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="VERB")
    prepares, verifies, _ = (commands.add_parser(verb, help=VERBS[verb], allow_abbrev=False) for verb in VERBS)
    verifies.add_argument("path", nargs="+", type=Path, help="folders or .bin files")
    prepares.epilog = "Flags of train.py that say how text is read: --text_field, --chat_fields, --skip_bad, --model"
    add = prepares.add_argument
    add(
        "--data",
        "--input",
        nargs="+",
        required=True,
        help=f"files, globs, addresses (hf://, s3://, ...) or - (standard input): {FORMATS}",
    )
    add("--tokenizer", required=True, help="bytes, a file, a folder or a hub id")
    add("--out", type=Path, required=True, help="folder for the shards; the same command resumes at the last one")
    add("--shard_tokens", type=int, default=SHARD_TOKENS, help="tokens per shard, or a few more (%(default)s)")
    add("--val_every", type=int, default=100, help="one document in N is held out; 0 = none (%(default)s)")
    args, flags = parser.parse_known_args(argv)
    if "path" in args:
        if wrong := [line for path in args.path for line in verify(path)] + flags:
            raise UserError("\n".join(wrong))
        print(f"{', '.join(map(str, args.path))}: all is as it should be")
        return
    config = parse_args([*flags, "--tokenizer", args.tokenizer, "--data", *args.data])
    sources = [file for spec in args.data for file in find_files(spec, "--data")]
    if args.shard_tokens < 1 or args.val_every < 0:
        raise UserError("--shard_tokens must be at least 1, and --val_every at least 0")
    files = prepare(sources, Encoder.of(config), args.out, args.shard_tokens, args.val_every, config.skip_bad)["files"]
    print(f"{args.out}: {sum(file['tokens'] for file in files.values())} tokens in {len(files)} shards")
    print(f"Use it: --data {args.out} --tokenizer {args.tokenizer}")
