"""Converts files (local, on the hub, in other stores) to documents and conversations, and these to shards of token ids.

`TextFile.rows` yields the rows that dataset/files.py reads. An `Encoder` turns a row into ids, in worker processes,
because that takes 20 times as long as reading. A row with the field that --text_field names is a document: BOS, then
its text. Without that flag, a row with the fields of CHAT_FIELDS or --chat_fields is a conversation, and another one
with a field named text is a document. Of conversations the assistant's tokens and the token that ends each answer are
trained on.

`prepare` writes a folder of shards: train-00000.bin ... and val-00000.bin ... with llm.c's header (256 int32: magic
20240520, version 1, uint16 tokens; or magic 20240801, version 7, uint32), and index.json (tokenizer, hashes).
Tokens of conversations are uint32 with the bits TRAINED and BEGINS. Shards hold the rows in their order, for any number
of processes. Until `prepare` has done all, index.json also has the position after the finished shards, where an
interrupted call resumes. index.json counts the rows that were left out, with the reasons, and every run reports them.

Every format can be read from every address of dataset/files.py. Other scripts import this module before torch, so it
imports numpy only in functions, and torch never."""

import functools
import hashlib
import importlib.machinery
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import re
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from base.disk import (
    SUBSTITUTES,
    advance,
    describe_content,
    exists,
    plural,
    read_ahead,
    read_json,
    read_object,
    retry,
    write_whole,
)
from base.errors import Parser, UserError, naming, printable, within
from config import SHARD, is_shards, text_fields
from dataset.files import (
    DOCUMENT,
    FORMATS,
    SUFFIXES,
    VAL_EVERY,
    TextFile,
    TextRow,
    find_info,
    list_files,
    log,
    store_errors,
)
from hf.chat import CHATS_KNOWN, Notes, chat_template, find_messages, find_pair, render_chat
from hf.tokenizer import holds_tokenizer, load_tokenizer, train_tokenizer

# Part of the key of prepared tokens. Raise it with any change that makes other tokens or shards of the same text: in
# reading, in conversations and their templates, in tokenizers, or here. The cache then tokenizes all text again.
FORMAT = 1
MIXED = "documents and conversations together: give each its own weight, as in A:0.5 B:0.5"
ID, TRAINED, BEGINS = 2**30 - 1, 2**30, 2**31  # bits of a conversation's tokens: the id; trained on; its first token
HEADER = 1024  # bytes of a shard
MAGICS = {  # of llm.c's headers -> version, bytes per token, token before a document
    20240520: (1, 2, 50256),  # GPT-2
    20240801: (7, 4, 128000),  # Llama 3
}
INDEX = "index.json"
SHARD_TOKENS = 100_000_000
SAMPLE = 2**28  # characters from which a tokenizer is trained
BATCH = 2**20  # bytes of text that a worker encodes at a time
PARALLEL = 2**25  # bytes; several processes tokenise a longer text
warn_once = functools.cache(log.warning)  # each message once in a process


# ---- entries of --data


def knows_text(config) -> bool:
    """Whether the text of tokens is known: it was tokenised here, or --tokenizer names the shards' tokenizer."""
    return config.tokenizer != "bytes" or not any(map(is_shards, (*config.data, *config.val_data)))


def find_files(spec: str, flag: str, text_field: str = "") -> list[TextFile]:
    """The files that a path, a pattern or an address names. A folder or a pattern stands for its token shards or, if it
    has none, for its files of text."""
    files = retry(lambda: list_files(spec, flag, text_field)) if spec else []
    used = (SHARD,) if any(file.kind == SHARD for file in files) else SUFFIXES
    listed = read_index(Path(spec).expanduser()).get("files", {}) if files and not files[0].store else {}
    names = [os.path.basename(file.name) for file in files]
    if missing := listed.keys() - {*names}:
        raise UserError(f"{flag} {spec} lacks {min(missing)}, which its {INDEX} lists: copy or prepare it again")
    others = [
        file.kind or "no suffix"
        for file, name in zip(files, names, strict=True)
        if file.kind not in used and not name.startswith((".", INDEX))
    ]
    kinds = ", ".join(sorted({*others}))
    files = [file for file in files if file.kind in used]
    if not files:
        problem = f"is of unknown kind ({kinds})" if others else "does not exist, or has no file"
        raise UserError(f"{flag} {spec} {problem}: expected {FORMATS}; FOLDER/** includes deeper folders")
    if others:
        what = "of unknown kind" if used == SUFFIXES else "beside token shards"
        warn_once(f"{flag} {spec}: {plural(len(others), 'file')} {what} left out ({kinds})")
    return files


def read_rows(spec: str, flag: str, read: Callable) -> list:
    """read(fields of a row) of all rows. An error names its row."""
    results = []
    for file in find_files(spec, flag):
        for row in file.rows(val_every=0):
            with naming(f"{file.name} row {row.number}"):
                results.append(read(row.fields()))
    if not results:
        raise UserError(f"{flag} {spec} has no rows")
    return results


def fetch_files(files: list[TextFile], cache: Path) -> list[TextFile]:
    """The local copies of files. Files of one remote folder are downloaded into one folder of the cache, with the
    index.json of token shards. Several processes may call it at the same time."""
    local = []
    for parent, group in itertools.groupby(files, lambda file: os.path.dirname(file.name)):
        group = [*group]
        if group[0].store:
            folder = cache / f"files-{digest([file[:3] for file in group])[:16]}"
            retry(functools.partial(_download, group, parent, folder))
            for file in group:
                path = str(folder / os.path.basename(file.name))
                local.append(file._replace(name=path, size=os.path.getsize(path), store=None))
        else:
            local += group
    return local


def _download(files, parent, folder):
    from filelock import FileLock
    from fsspec.callbacks import Callback

    with store_errors(parent), FileLock(f"{folder}.lock"):
        if folder.exists():
            return
        store, names, index = files[0].store, [file.name for file in files], f"{parent}/{INDEX}"
        os.makedirs(f"{folder}.part", exist_ok=True)
        for name in names + [index] * (files[0].kind == SHARD and find_info(store, index) is not None):
            callback = Callback(hooks={"progress": lambda *_, **__: advance()})
            store.get_file(name, f"{folder}.part/{os.path.basename(name)}", callback=callback)
        os.replace(f"{folder}.part", folder)


# ---- encoding


class Encoder(NamedTuple):
    """Rows -> token ids. tokenizer, text_field, chat_fields, skip_bad: as the flags name them. chat: the chat format's
    family, llama or mixtral, where the tokenizer does not say it. pairs: each row holds a pair of answers."""

    tokenizer: str
    text_field: str = ""
    chat: str = "llama"
    chat_fields: tuple[str, ...] = ()
    skip_bad: int = 0
    pairs: bool = False

    @classmethod
    def of(cls, config) -> "Encoder":
        field = text_fields(config).get("", "")
        chat, pairs = config.model_config.chat_format, config.dpo != "none"
        return cls(config.tokenizer, field, chat, config.chat_fields, config.skip_bad, pairs)

    def of_file(self, file: TextFile) -> "Encoder":
        return self._replace(text_field=file.text_field or self.text_field)

    def read(self, row: TextRow) -> tuple[str | None, list[tuple]]:
        """-> (text, []) or (None or a text that is not used, conversations). UserError if a row has neither."""
        name = self.text_field or "text"
        fields = row.fields(name)
        text = fields.get(name)
        is_text, conversations = isinstance(text, str), []
        if self.pairs:
            conversations = find_pair(fields, self.chat_fields)
        elif not (self.text_field and is_text):
            conversations = [chat] if (chat := find_messages(fields, self.chat_fields)) else []
        if not conversations and not is_text:
            found = ", ".join(f"{key} ({type(value).__name__})" for key, value in fields.items())[:300]
            raise UserError(
                f"no text in field '{name}' (found: {found}); --text_field names it. A conversation has {CHATS_KNOWN}"
            )
        return text, conversations

    def __call__(self, row: TextRow) -> tuple[list[int], str, Notes]:
        """-> (tokens, kind: text, or chat or pair, whose tokens carry TRAINED and BEGINS, changes and omissions in a
        conversation). A pair that says nothing has no tokens. UserError if it is a bad row."""
        tokenizer = load_tokenizer(self.tokenizer)
        text, conversations = self.read(row)
        if not conversations:
            return [tokenizer.bos_id] * row.begins + tokenizer.encode(text), "text", []
        answers = [message for messages, *_ in conversations for message in messages[-1:]]  # a bad row may have none
        if self.pairs and not all(str(a.get("content", "")).strip() or "tool_calls" in a for a in answers):
            return [], "pair", [("a pair with an empty answer is dropped", str(answers))]
        rendered, notes, template = [], [], chat_template(tokenizer, self.chat)
        for messages, inputs, others in conversations:
            ids, mask = render_chat(tokenizer, messages, template, inputs, notes, others)
            if not any(mask):
                raise UserError("a conversation without an assistant's turn that has a weight: nothing is trained on")
            ids[0] |= BEGINS
            rendered.append([i | TRAINED * trained for i, trained in zip(ids, mask, strict=True)])
        if self.pairs and rendered[0] == rendered[1]:  # their texts may differ in the space that a template cuts off
            return [], "pair", [("a pair of equal answers is dropped", str(answers))]
        return sum(rendered, []), "pair" if self.pairs else "chat", notes


def encode_rows(encoder: Encoder, rows: list[TextRow]) -> list[tuple[array | str, str, Notes]]:
    """(tokens, kind, notes) of each row; for a bad row (the reason, "", [])."""
    results = []
    for row in rows:
        try:
            tokens, kind, notes = encoder(row)
            results.append((array("I", tokens), kind, notes))
        except UserError as e:
            results.append((str(e), "", []))
    return results


def encode(jobs: Iterator[tuple], encoder: Encoder, pool: Executor, ahead: int, report: dict) -> Iterator[tuple]:
    """jobs: (label, file, rows of it). -> (label, row, tokens) of each good row, in their order. The pool is up to
    `ahead` + 1 jobs ahead. report: the rows so far: their kind, the number of bad ones, and {file and note: [rows, the
    first of them]}. UserError after more than skip_bad bad rows, including rows of another kind than the first."""
    submitted = ((job, pool.submit(encode_rows, encoder.of_file(job[1]), job[2])) for job in jobs)
    for (label, file, rows), future in read_ahead(submitted, ahead):
        advance()
        for row, (tokens, kind, notes) in zip(rows, future.result(), strict=True):
            place = f"{'line' if isinstance(row.content, bytes) else 'row'} {row.number}"
            report["kind"] = report["kind"] or kind
            is_bad = not kind or kind != report["kind"]
            if is_bad:
                reason = MIXED if kind else tokens
                problem = f"{file.name} {place}: {reason}"
                report["bad"] += 1
                if report["bad"] > encoder.skip_bad:
                    raise UserError(f"{problem} (--skip_bad N skips up to N bad rows)")
                log.warning(f"skipped: {printable(problem)}")
                notes = [(f"bad rows left out, {re.split('[:(]', reason)[0]}", reason)]
            for what, example in dict(reversed(notes)).items():  # each once, with its first example
                report["notes"].setdefault(f"{file.name}: {what}", [0, f"{place}: {example[:80]!r}"])[0] += 1
            if not is_bad and tokens:
                yield label, row, tokens


def tell_omissions(index: dict) -> None:
    """Logs, once in a process, the bad rows that an index reports as left out, and the notes on other rows."""
    for what, (count, first) in index.get("notes", {}).items():
        warn_once(printable(f"{what}: {plural(count, 'row')}, first in {first}"))


def start_workers(processes: int) -> ProcessPoolExecutor:
    """Processes that import only the modules of the functions they run; they end when this process does."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None:  # with a spec, no worker imports our script, and torch with it
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
    """Writes tokens (an array) with the header and the width that fit the vocabulary -> sha256 of the file."""
    import numpy as np

    magic = 20240520 if vocab_size <= 2**16 else 20240801
    version, width, _ = MAGICS[magic]
    header = struct.pack("<3i", magic, version, len(tokens)).ljust(HEADER, b"\0")
    content = header + np.asarray(tokens).astype(f"<u{width}").tobytes()
    retry(lambda: path.write_bytes(content), path)
    return hashlib.sha256(content).hexdigest()


class Shard(NamedTuple):
    """A file of token ids, or a stretch of one."""

    path: str
    tokens: int
    width: int  # bytes per token
    offset: int = 0  # bytes before the first token
    sha256: str = ""  # of the file, if index.json records it

    def part(self, start: int, stop: int) -> "Shard":
        """Tokens start ... stop - 1."""
        return self._replace(tokens=stop - start, offset=self.offset + self.width * start)


def find_shard(path: str, size: int, data_dtype: str = "", recorded: dict | None = None) -> tuple[Shard, int | None]:
    """-> (a shard, the id that its format puts before each document or None). size: of the file in bytes. recorded: its
    entry in index.json; without one, the header is read. UserError if they do not fit together."""
    content = size - HEADER
    if recorded and content in (2 * recorded["tokens"], 4 * recorded["tokens"]):
        return Shard(path, recorded["tokens"], content // recorded["tokens"], HEADER, recorded["sha256"]), None

    def read_head() -> bytes:
        with open(path, "rb", buffering=0) as file:
            return file.read(512)

    head = retry(read_head, path)
    if substitute := describe_content(head, SUBSTITUTES):
        raise UserError(f"{path}: {substitute}")
    magic, version, tokens = struct.unpack("<3i", head[:12]) if content >= 0 else (0, 0, 0)
    expected, width, delimiter = MAGICS.get(magic, (0, 0, 0))
    if width and not recorded and (version, content) == (expected, tokens * width):
        return Shard(path, tokens, width, HEADER), delimiter
    if width or recorded:
        raise UserError(f"{path} is damaged: {content} bytes do not fit its header or {INDEX}: get it again")
    width = {"uint16": 2, "uint32": 4}.get(data_dtype, size + 1)
    if not size or size % width:
        raise UserError(f"{path}: {size} bytes without llm.c's header: nanoGPT's files need --data_dtype uint16")
    return Shard(path, size // width, width), None


def read_index(folder: Path) -> dict:
    """index.json of a folder that `prepare` made; {} for shards from other tools."""
    index = read_object(folder / INDEX) if exists(folder / INDEX) else {}
    if "position" in index or exists(folder / "progress.jsonl"):  # the latter of version 0.3
        raise UserError(f"{folder} is not prepared to its end: run its `python data.py prepare` again")
    return index if "fingerprint" in index else {}


def prepare_folder(
    sources: list[TextFile], encoder: Encoder, out: Path, shard_tokens=SHARD_TOKENS, val_every=VAL_EVERY
) -> dict:
    """Tokenises sources into a new folder of shards of shard_tokens or a few more -> index.json. Resumes an interrupted
    call after its last shard, and waits while another process prepares the same folder. UserError after more than
    skip_bad bad rows."""
    from filelock import FileLock

    key, index = key_of(sources, encoder, shard_tokens, val_every), read_json(out / INDEX)
    if index.get("key") == key and "position" not in index:
        return index  # without a lock: the folder may be read-only
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / ".lock"):
        index = read_json(out / INDEX)
        if index.get("key") != key:
            others = {*os.listdir(out)} - {".lock"} - ({INDEX} if "key" in index else set())
            if others:
                raise UserError(f"{out} holds {min(others)}, made of other input or with other flags: empty it")
            tokenizer = load_tokenizer(encoder.tokenizer)
            index = {
                "key": key,
                "tokenizer": encoder.tokenizer,
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "delimiter": tokenizer.bos_id,
                "files": {},
                "position": [0, 0],  # until all is done: the source and its row behind the last shard
                "kind": "",
                "bad": 0,
                "notes": {},
            }
        if "position" in index:
            _write_all(sources, encoder, out, index, shard_tokens, val_every)
    return index


def _write_all(sources, encoder, out, index, shard_tokens, val_every):
    """Writes the shards behind the index's position, and the index after each."""
    start, first = index["position"]
    every, documents = [val_every] * len(sources), [i for i, source in enumerate(sources) if source.kind == DOCUMENT]
    if 0 < val_every <= len(documents):  # all of a document is held out, or nothing
        for number, i in enumerate(documents, 1):
            every[i] = int(number % val_every == 0)
    parts = ((i, sources[i].rows(first if i == start else 0, every[i])) for i in range(start, len(sources)))
    jobs = ((i, sources[i], rows) for i, part in parts for rows in group_rows(part, BATCH))
    tokens = {"train": array("I"), "val": array("I")}
    processes = len(os.sched_getaffinity(0)) if sum(source.size for source in sources) > PARALLEL else 0
    _write_shards(out, index, {})  # the folder is ours from now on
    with start_workers(processes) if processes else ThreadPoolExecutor(1) as pool:
        for i, row, ids in encode(jobs, encoder, pool, 2 * processes, index):
            tokens["val" if row.val else "train"] += ids
            index["position"] = [i, row.number]
            if sum(map(len, tokens.values())) >= shard_tokens:
                _write_shards(out, index, tokens)
    train, val = tokens.values()
    if val_every and train and not val and "val-00000.bin" not in index["files"] and len(ids) < len(train):
        val += ids  # too few for val_every: the last document or conversation
        del train[-len(ids) :]
    if not train and not val and not index["files"]:
        raise UserError(f"{sources[0].name}: no rows are left")
    del index["position"]
    _write_shards(out, index, tokens)


def _write_shards(out, index, tokens):
    """Writes the tokens of each split as its next shard, and the index."""
    for split, ids in tokens.items():
        if ids:
            number = sum(name.startswith(split) for name in index["files"])
            name = f"{split}-{number:05}{SHARD}"
            sha256 = write_shard(out / name, ids, index["vocab_size"] if index["kind"] == "text" else 2**32)
            index["files"][name] = {"tokens": len(ids), "sha256": sha256}
            del ids[:]
    retry(lambda: write_whole(out / INDEX, json.dumps(index, indent=1), sync=True), out / INDEX)


def digest(*content) -> str:
    """The SHA-256 of values that JSON can hold."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def key_of(sources: list[TextFile], encoder: Encoder, *options: int) -> str:
    """A hash of everything that prepared tokens depend on. skip_bad is not part of it: more bad rows than it allows end
    the call, and an interrupted call may continue with a larger one."""
    files = [(file[:3], encoder.of_file(file).text_field) for file in sources]
    tokenizer = load_tokenizer(encoder.tokenizer)
    made_with = encoder._replace(tokenizer=tokenizer.fingerprint, text_field="", skip_bad=0)
    return digest(files, made_with, options, FORMAT)[:16]


def verify_shards(path: Path) -> None:
    """UserError for a shard, of a folder or alone, that does not fit its header, or its checksum if it has one."""
    files = [Path(file.name) for file in find_files(str(path), "verify")]
    recorded = read_index(files[0].parent).get("files", {})
    for file in files:
        find_shard(str(file), file.stat().st_size)
        if recorded and hashlib.sha256(file.read_bytes()).hexdigest() != recorded.get(file.name, {}).get("sha256"):
            raise UserError(f"{file} has changed since it was prepared (sha256): prepare the text again")


# ---- the command line


VERBS = {
    "prepare": {
        "help": "tokenizes text into a folder of shards, once and on all cores",
        "flags": {
            "--data --input": dict(nargs="+", required=True, help="files of text"),
            "--tokenizer": dict(nargs=1, required=True, help="bytes, a folder or a hub id"),
            "--out": dict(nargs=1, required=True, help="the folder for the shards"),
            "--text_field": dict(nargs="+", help="as for train.py, and so the next five"),
            "--chat_fields": dict(nargs="+"),
            "--skip_bad": dict(nargs=1),
            "--dpo": dict(nargs=1, help="sigmoid, for rows that are pairs"),
            "--model": dict(nargs=1),
            "--weights": dict(nargs=1),
            "--shard_tokens": dict(
                type=within(int, 1), default=SHARD_TOKENS, help="tokens per shard, or a few more (%(default)s)"
            ),
            "--val_every": dict(
                type=within(int, 0), default=100, help="one document in N is held out; 0 = none (%(default)s)"
            ),
        },
    },
    "verify": {
        "help": "compares shards with their headers and checksums: verify DIR|FILE ...",
        "flags": {"path": dict(nargs="+", type=Path, help="folders or .bin files")},
    },
    "train-tokenizer": {
        "help": "learns a tokenizer from text: of more than 256 MB, from the beginning of each file",
        "flags": {
            "--data --input": dict(nargs="+", required=True, help="files of text"),
            "--vocab_size": dict(type=within(int, 261, 2**20), required=True, help="ids, at least 261"),
            "--out": dict(nargs=1, required=True, help="the folder for the tokenizer"),
            "--text_field": dict(nargs="+", help="as for train.py, like the next one"),
            "--chat_fields": dict(nargs="+"),
        },
    },
    "show": {
        "help": "prints rows as the model sees them: show --data FILES [any flag of train.py], or --run RUN --step N",
        "flags": {
            "--n": dict(type=within(int, 1), help="rows (3, or all of a step)"),
            "--run": dict(type=Path, help="with --step: a run folder, whose rows of that step are shown"),
            "--step": dict(type=within(int, 1), help="a step of --run"),
        },
    },
}


def _train_tokenizer(sources, encoder, out, vocab_size):
    """Trains a tokenizer on the same share of each file, from its beginning, and measures it."""
    if holds_tokenizer(out):
        raise UserError(f"--out {out} has a tokenizer already: name another folder")
    texts = []
    for file in sources:
        rest = SAMPLE // len(sources)
        for row in file.rows(0, 0):
            with naming(f"{file.name} row {row.number}"):
                text, conversations = encoder.of_file(file).read(row)
            for messages, *_ in conversations:
                text = "\n".join(str(message.get("content", "")) for message in messages)
            texts.append(text[:rest])
            rest -= len(texts[-1])
            if not rest:
                break
    train_tokenizer(iter(texts), vocab_size, out)
    tokenizer, text = load_tokenizer(str(out)), "".join(texts[:1000])[:1_000_000]
    ratio = len(text.encode()) / (len(tokenizer.encode(text)) or 1)
    size = tokenizer.vocab_size
    print(f"{out}: {size} ids, {ratio:.2f} bytes per token; give --vocab_size {size} with it")


def main(argv: list[str], parse_args: Callable) -> None:
    """argv: a verb other than show, and its flags. parse_args: config.parse_args, for the flags about the text."""
    verb = Parser({"verb": dict(choices=VERBS)}, prog="data.py").parse_args(argv[:1]).verb
    about = VERBS[verb]
    args = vars(Parser(about["flags"], prog=f"data.py {verb}", description=about["help"]).parse_args(argv[1:]))
    if verb == "verify":
        for path in args["path"]:
            verify_shards(path)
        return print("all is as it should be")
    how = [value for value in args.values() if isinstance(value, int)]
    given = {name: value for name, value in args.items() if isinstance(value, list)}
    config = parse_args([word for name, words in given.items() for word in (f"--{name}", *words)])
    fields, encoder, out = text_fields(config), Encoder.of(config), Path(config.out)
    sources = [file for spec in config.data for file in find_files(spec, "--data", fields.get(spec, ""))]
    if verb == "train-tokenizer":
        return _train_tokenizer(sources, encoder, out, *how)
    index = prepare_folder(sources, encoder, out, *how)
    tell_omissions(index)
    tokens, shards = sum(file["tokens"] for file in index["files"].values()), plural(len(index["files"]), "shard")
    print(f"{out}: {tokens} tokens in {shards}")
