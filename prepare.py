"""Token shards: their format; text -> shards, in parallel, resumable, checked; `python data.py prepare` and `verify`.

One process reads rows and hands them out by the megabyte; workers parse and tokenise; their tokens are written in the
order of the rows. So the shards are the same for any number of processes, and memory does not grow with the input.
`progress.json` says, every few seconds, how far the input is read and how long each shard is: after a kill, shards are
cut to that length and the input is read on from there.

A folder of shards: train-00000.bin ... and val-00000.bin ... with llm.c's header (256 int32: magic 20240520, version 1,
uint16 tokens; or magic 20240801, version 7, uint32); beside each, where its documents are conversations, a .mask with a
byte per token (bit 0: trained on, bit 1: a conversation begins); token_sizes.npy: the bytes of text that each id stands
for; index.json says what they were made from and with."""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from download import Damaged
from errors import Failure, UserError, listed, missing_folders, printable, read_json, remove_empty, write_whole
from stream import find_text, in_order
from text import FORMATS, VAL_EVERY, Encoded, Encoder, TextFile, encode_rows, find_files, read_chat_fields
from tokenizer import load_tokenizer, token_sizes

HEADER = 1024  # bytes
SIZES = "token_sizes.npy"
MAGICS = {  # version, dtype, the token before a document
    20240520: (1, np.uint16, 50256),
    20240801: (7, np.uint32, 128000),
}
BATCH = 2**20  # bytes of rows that a worker gets at a time
NOTE_EVERY = 5.0  # seconds between two notes of the progress


# ---- token shards


def make_header(tokens: int, vocab_size: int) -> tuple[bytes, type]:
    """The header that suits the vocabulary, and the dtype of the tokens that follow."""
    magic = 20240520 if vocab_size <= 2**16 else 20240801
    version, dtype, _ = MAGICS[magic]
    header = np.zeros(HEADER // 4, dtype="<i4")
    header[:3] = magic, version, tokens
    return header.tobytes(), dtype


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    header, dtype = make_header(len(tokens), vocab_size)
    path.write_bytes(header + tokens.astype(dtype).tobytes())


def open_shard(path: Path, data_dtype: str = "") -> tuple[np.ndarray, int | None]:
    """Memory-maps a shard -> (its tokens, the id that its format puts before each document, if it has one)."""
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{path} is empty")
    magic, version, count = np.fromfile(path, "<i4", 3) if size >= HEADER else (0, 0, 0)
    if magic in MAGICS:
        expected, dtype, delimiter = MAGICS[magic]
        if version != expected:
            raise UserError(
                f"{path}: shard version {version} with magic {magic}, expected version {expected}; write it again"
            )
        expected = int(count) * np.dtype(dtype).itemsize
        if size - HEADER != expected:
            raise UserError(
                f"{path}: {size - HEADER} bytes of tokens, its header says {count} tokens = {expected} bytes;"
                " the file is damaged or cut short"
            )
        return np.memmap(path, dtype, "r", HEADER), delimiter
    if not data_dtype:
        raise UserError(
            f"{path} has no token-shard header (magic {' or '.join(map(str, MAGICS))}); for headerless tokens,"
            " as nanoGPT writes them, say --data_dtype uint16 or uint32"
        )
    if size % np.dtype(data_dtype).itemsize:
        raise UserError(f"{path}: {size} bytes is no whole number of {data_dtype} tokens")
    return np.memmap(path, data_dtype, "r"), None


def find_shards(spec: str, flag: str) -> list[Path]:
    """The files that an entry of --data names: files of shards or text, or a folder of .bin shards."""
    if (Path(spec).expanduser() / "progress.json").exists():
        raise UserError(f"{flag} {spec} is not prepared to its end: run its `python data.py prepare` again")
    return find_files(spec, flag, (".bin",))


def beyond(tokens: np.ndarray, vocab_size: int, starts: Iterable[int], count: int = 2**24) -> int | None:
    """The place of the first id that is not in the vocabulary; looks at `count` tokens from each start on."""
    for start in starts:
        wrong = np.flatnonzero(tokens[start : start + count] >= vocab_size)
        if len(wrong):
            return start + int(wrong[0])
    return None


def read_index(folder: Path) -> dict:
    """index.json of a folder that we made; {} for shards of others."""
    index = read_json(folder / "index.json")
    if not index and (folder / "index.json").exists():
        raise UserError(f"{folder}/index.json is no JSON object: prepare the folder again")
    return index if "fingerprint" in index else {}


def write_json(path: Path, content: dict) -> None:
    write_whole(path, json.dumps(content, indent=1), sync=True)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardWriter:
    """Writes the shards of one split. names: train-{:05}.bin or the like. state: how far they are, from progress.json;
    it is kept up to date."""

    def __init__(self, folder: Path, names: str, vocab_size: int, shard_tokens: int, state: dict):
        self.folder, self.names, self.vocab_size, self.shard_tokens = folder, names, vocab_size, shard_tokens
        self.state = state
        self.dtype = np.dtype(make_header(0, vocab_size)[1])
        self.open = {}  # of the shard that is written: the tokens, and the mask if there is one

    def _open(self):
        """Cut to the length that is known."""
        path, tokens = self.folder / self.names.format(self.state["number"]), self.state["tokens"]
        ends = {path: HEADER + tokens * self.dtype.itemsize}
        if self.state["masked"]:
            ends[path.with_suffix(".mask")] = tokens
        for path, end in ends.items():
            path.touch()
            self.open[path] = file = open(path, "r+b")  # noqa: SIM115
            file.seek(end)
            file.truncate()

    def add(self, encoded: Encoded) -> None:
        columns = [np.asarray(encoded.tokens, self.dtype)] + [encoded.mask] * bool(encoded.mask)
        self.state["masked"] = bool(encoded.mask)
        begin = 0
        while begin < len(encoded.tokens):
            if not self.open:
                self._open()
            end = begin + self.shard_tokens - self.state["tokens"]
            for file, column in zip(self.open.values(), columns, strict=True):
                file.write(column[begin:end])
            self.state["tokens"] += len(columns[0][begin:end])
            begin = end
            if self.state["tokens"] == self.shard_tokens:
                self.close()
                self.state |= {"number": self.state["number"] + 1, "tokens": 0}

    def flush(self) -> None:
        for file in self.open.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Completes the shard that is being written."""
        if self.state["tokens"] and not self.open:
            self._open()
        for path, file in self.open.items():
            if path.suffix == ".bin":
                file.seek(0)
                file.write(make_header(self.state["tokens"], self.vocab_size)[0])
        self.flush()
        for path, file in self.open.items():
            file.close()
            self.state["files"][path.name] = {"tokens": self.state["tokens"], "sha256": sha256_of(path)}
        self.open = {}


# ---- text -> shards


def say(message: str) -> None:
    print("\r\033[K" * sys.stderr.isatty() + printable(message), file=sys.stderr)


class Meter:
    """A bar on stderr, with the MB of text per second and the time that is left; a line every ten seconds where that is
    no terminal. total: bytes of all files as they are stored; text, tokens: made by this process."""

    def __init__(self, total: int):
        self.total, self.start, self.text, self.tokens = total, None, 0, 0
        self.began = self.shown = time.monotonic()

    def show(self, done: int, end: bool = False) -> None:
        """done: of the stored bytes."""
        now, terminal = time.monotonic(), sys.stderr.isatty()
        self.start = done if self.start is None else self.start
        if not end and now - self.shown < (0.2 if terminal else 10):
            return
        self.shown, seconds = now, now - self.began
        line = (
            f"{self.text / 1e6:.0f} MB of text, {self.text / 1e6 / seconds:.1f} MB/s, {self.tokens / 1e6:.1f} M tokens"
        )
        if self.total:
            share = min(1, done / self.total)
            line = f"[{'#' * int(20 * share):20}] {share:.0%}, {line}"
        if self.start < done < self.total:
            line += f", {seconds / 60 * (self.total - done) / (done - self.start):.1f} min left"
        print(f"\r\033[K{line}" if terminal else line, end="\n" if end or not terminal else "", file=sys.stderr)
        sys.stderr.flush()


def batches(sources: list[TextFile], encoder: Encoder, position: list[int], val_every: int) -> Iterator[tuple]:
    """Jobs for encode_rows of about BATCH bytes each, from behind `position` = (source, row) on. Label: (source, last
    row, stored bytes up to it, bytes of text)."""
    start, first = position
    before = sum(s.size for s in sources[:start])
    for i, source in enumerate(sources[start:], start):
        rows, size, stored = [], 0, 0
        for row, stored in source.rows(encoder.fields, first, val_every):
            rows.append(row)
            size += len(row.content if isinstance(row.content, bytes) else str(row.content))
            if size >= BATCH:
                yield (i, row.number, before + stored, size), encoder, str(source), rows
                rows, size = [], 0
        if rows:
            yield (i, rows[-1].number, before + stored, size), encoder, str(source), rows
        before, first = before + source.size, 0


def build(
    sources: list[TextFile],
    encoder: Encoder,
    folder: Path,
    state: dict,
    shard_tokens: int = 2**62,
    val_every: int = VAL_EVERY,
    processes: int = 0,
    skip_bad: int = 0,
    names: tuple[str, str] = ("train-{:05}.bin", "val-{:05}.bin"),
    warn: Callable[[str], None] = say,
) -> dict:
    """Tokenises sources into shards -> index.json's content. names: of the training and the held-out shards. state:
    what progress.json says; it is kept up to date. Bad rows beyond skip_bad end it with a UserError."""
    tokenizer = load_tokenizer(encoder.tokenizer)
    shards = {split: {"number": 0, "tokens": 0, "masked": False, "files": {}} for split in "01"}
    blank = {"position": [0, 0], "documents": 0, "skipped": 0, "kind": "", "shards": shards}
    state, how = blank | state, (tokenizer.vocab_size, shard_tokens)
    writers = [ShardWriter(folder, names[int(i)], *how, shard) for i, shard in state["shards"].items()]
    meter, noted = Meter(sum(s.size for s in sources)), time.monotonic()
    jobs = batches(sources, encoder, state["position"], val_every)
    for (source, row, done, size), (splits, bad) in in_order(encode_rows, jobs, processes):
        _skip(bad, state, skip_bad, warn)
        for val, encoded in splits.items():
            kind = "chat" if encoded.mask else "text"
            if state["kind"] not in ("", kind):
                raise UserError(
                    f"{sources[source]}: documents and conversations together (rows before are {state['kind']}):"
                    " give them apart, as A:WEIGHT B:WEIGHT"
                )
            writers[val].add(encoded)
            state |= {"kind": kind, "documents": state["documents"] + encoded.documents}
            meter.tokens += len(encoded.tokens)
        state["position"] = [source, row]
        meter.text += size
        if processes:
            meter.show(done)
        if time.monotonic() - noted > NOTE_EVERY:
            noted = time.monotonic()
            for writer in writers:
                writer.flush()
            write_json(folder / "progress.json", state)
    for writer in writers:
        writer.close()
    if processes:
        meter.show(meter.total, end=True)
    return {
        "key": state.get("key"),
        "tokenizer": encoder.tokenizer,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "delimiter": tokenizer.bos_id,
        "kind": state["kind"],
        "text_field": encoder.text_field,
        "sources": [str(s) for s in sources],
        "documents": state["documents"],
        "skipped": state["skipped"],
        "files": writers[0].state["files"] | writers[1].state["files"],
    }


def _skip(bad, state, skip_bad, warn):
    for message in bad:
        state["skipped"] += 1
        if state["skipped"] > skip_bad:
            count = f" (bad row {state['skipped']} of --skip_bad {skip_bad})" if skip_bad else ""
            raise UserError(f"{message}{count}; --skip_bad N leaves out up to N such rows")
        warn(f"left out: {message}")


@contextlib.contextmanager
def _locked(out, wait):
    """A folder that no other call of `prepare` writes to meanwhile. Made if need be, and removed if it stays empty."""
    try:
        new_folders = missing_folders(out)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {out}: no folder can be there: {e.strerror}") from None
    with open(out / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {out}: another prepare is at work there") from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            (out / ".lock").unlink(missing_ok=True)
            remove_empty(new_folders)


def prepare(
    sources: list[TextFile],
    encoder: Encoder,
    out: Path,
    shard_tokens: int = 2**62,
    val_every: int = VAL_EVERY,
    wait: bool = False,
    **how,
) -> dict:
    """`build` in a folder of its own, going on where an earlier call was killed -> index.json. wait: for another
    process that is at it."""
    fingerprint = load_tokenizer(encoder.tokenizer).fingerprint
    made_with = [s.identity for s in sources], encoder[1:], fingerprint, shard_tokens, val_every
    key = hashlib.sha256(json.dumps(made_with).encode()).hexdigest()[:16]
    note, piped = out / "progress.json", "-" in map(str, sources)
    with _locked(out, wait):
        state = _find_work(out, key, piped)
        if "files" in state:
            say(f"{out} is ready already")
            return state
        if "position" in state:
            source, row = state["position"]
            say(f"Going on in {sources[source]} after row {row}")
        write_json(note, state)
        try:
            index = build(sources, encoder, out, state, shard_tokens, val_every, **how)
            if not index["files"]:
                raise UserError(f"{', '.join(map(str, sources[:3]))}: no rows are left, so there is nothing to prepare")
        except Damaged as e:  # what was made of the damaged rows must not be gone on with
            write_json(note, {"key": key})
            raise Failure(f"{e}: the same command begins again") from None
        except Exception:
            if "position" not in read_json(note):  # nothing to go on from
                for file in (note, *out.glob("train*"), *out.glob("val*")):
                    file.unlink()
            raise
        np.save(out / SIZES, np.array(token_sizes(load_tokenizer(encoder.tokenizer)), np.uint16))
        write_json(out / "index.json", index)
        note.unlink()
    return index


def _find_work(out, key, piped):
    """index.json of a folder that is ready, or how far an earlier call came; refuses a folder that holds anything
    else."""
    index, progress = read_index(out), read_json(out / "progress.json")
    if (index or progress).get("key", key) != key:
        raise UserError(
            f"--out {out} holds other shards, or the beginning of some (input, tokenizer or flags differ): name another"
            " folder, or empty it"
        )
    if index and piped:
        raise UserError(f"--out {out} is ready; whether standard input is the same is not known: name another")
    if index:
        return index
    foreign = sorted({p.name for p in out.iterdir()} - {".lock"})
    if foreign and not progress:
        raise UserError(f"--out {out} is not empty ({listed(foreign[:3])}): name another folder")
    # What came through a pipe does not come again from its middle.
    return {"key": key} if piped else {"key": key} | progress


def verify(path: Path, vocab_size: int = 0, data_dtype: str = "") -> Iterator[str]:
    """What is wrong with a folder of shards or one of them: checksums, headers, every id."""
    folder = path if path.is_dir() else path.parent
    index, files = read_index(folder), find_shards(str(path), "verify")
    listed, vocab_size = index.get("files", {}), vocab_size or index.get("vocab_size", 0)
    files += [mask for mask in (f.with_suffix(".mask") for f in files) if mask.exists()]
    missing = [folder / name for name in listed] if path.is_dir() else []
    yield from (f"{file} is missing" for file in missing if not file.exists())
    for file in files:
        if index and file.name not in listed:
            yield f"{file} is not in index.json"
        elif index and sha256_of(file) != listed[file.name]["sha256"]:
            yield f"{file} has changed since it was prepared (sha256): prepare the text again"
        if file.suffix == ".mask":
            continue
        if file.suffix != ".bin":
            yield f"{file} is no token shard (.bin)"
            continue
        try:
            tokens, _ = open_shard(file, data_dtype)
        except UserError as e:
            yield str(e)
            continue
        at = beyond(tokens, vocab_size, range(0, len(tokens), 2**24)) if vocab_size else None
        if at is not None:
            yield f"{file} at token {at}: id {tokens[at]}, beyond the {vocab_size} of the vocabulary"


# ---- the command line


def run_prepare(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="data.py prepare", description="Text -> token shards.", allow_abbrev=False)
    add = parser.add_argument
    inputs = f"files, globs, hf:// or - (standard input): {FORMATS}"
    add("--input", nargs="+", required=True, metavar="FILE", help=inputs)
    add("--tokenizer", required=True, help="bytes, a file, a folder or a hub id")
    out = "folder for the shards; the same words go on after a kill"
    add("--out", type=Path, required=True, metavar="DIR", help=out)
    add("--text_field", default="text", help="field or column of the text (default: text)")
    numbers = {
        "shard_tokens": (100_000_000, "tokens per shard"),
        "val_every": (100, "one document in N is held out; 0 = none"),
        "processes": (os.cpu_count() or 1, "workers"),
        "skip_bad": (0, "bad rows that are left out before it ends"),
    }
    for name, (default, text) in numbers.items():
        add(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add("--chat_fields", nargs="+", default=(), metavar="NAME", help="as for train.py: question,answer")
    add("--chat", default="llama", choices=("llama", "mixtral"), help="format, where the tokenizer does not say it")
    args = parser.parse_args(argv)
    values = {name: getattr(args, name) for name in numbers}
    for name, value in values.items():
        if value < (name == "shard_tokens"):
            raise UserError(f"--{name} {value}: it must be at least {int(name == 'shard_tokens')}")
    sources = [file for spec in args.input for file in find_text(spec, "--input")]
    encoder = Encoder(args.tokenizer, args.text_field, args.chat, read_chat_fields(args.chat_fields))
    index = prepare(sources, encoder, args.out, **values)
    tokens = {"train": 0, "val": 0}
    for name, file in index["files"].items():
        if name.endswith(".bin"):
            tokens[name.partition("-")[0]] += file["tokens"]
    print(f"{args.out}: {index['documents']} documents, {tokens['train']} tokens and {tokens['val']} for validation")
    print(f"Use it: --data {args.out} --tokenizer {args.tokenizer}")


def run_verify(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="data.py verify", description="Checks token shards.", allow_abbrev=False)
    parser.add_argument("path", nargs="+", type=Path, help="folders or .bin files")
    parser.add_argument("--vocab_size", type=int, default=0, help="ids must be below it (default: the index's)")
    parser.add_argument("--data_dtype", default="", choices=("uint16", "uint32"), help="of headerless files")
    args = parser.parse_args(argv)
    wrong = [line for path in args.path for line in verify(path, args.vocab_size, args.data_dtype)]
    if wrong:
        raise UserError("\n".join(wrong))
    print(f"{', '.join(map(str, args.path))}: all is as it should be")
