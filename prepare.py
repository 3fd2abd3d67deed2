"""Token shards: their format; text -> shards, in parallel, resumable, checked; `python data.py prepare` and `verify`.

One process reads rows and hands them out by the megabyte; workers parse and tokenise; their tokens are written in the
order of the rows. So the shards are the same for any number of processes, and memory does not grow with the input.
`progress.json` says, every few seconds, how far the input is read and how long each shard is: after a kill, shards are
cut to that length and the input is read on from there.

A folder of shards: train-00000.bin ... and val-00000.bin ... with llm.c's header (256 int32: magic 20240520, version 1,
uint16 tokens; or magic 20240801, version 7, uint32: also where documents are conversations, whose tokens carry the bits
TRAINED and BEGINS of lib/text.py); token_sizes.npy: the bytes of text that each id stands
for; index.json says what they were made from and with."""

import argparse
import hashlib
import json
import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock

import hub as download
from lib.errors import Progress, UserError, amount, listed, read_json, write_whole
from lib.text import FORMATS, ID, VAL_EVERY, Encoder, TextFile, encode_rows, find_files, read_chat_fields
from lib.tokenizer import load_tokenizer, token_sizes
from stream import find_text, in_order

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
        promised = int(count) * np.dtype(dtype).itemsize
        if (version, size - HEADER) != (expected, promised):
            raise UserError(
                f"{path}: shard version {version} and {size - HEADER} bytes of tokens; with magic {magic} it must be"
                f" version {expected}, and its header says {count} tokens = {promised} bytes: the file is damaged or"
                " cut short; write it again"
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


def read_index(folder: Path) -> dict:
    """index.json of a folder that we made; {} for shards of others."""
    path = folder / "index.json"
    try:
        index = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, RecursionError):
        index = None
    if not isinstance(index, dict):
        raise UserError(f"{path} is no JSON object: prepare the folder again")
    return index if "fingerprint" in index else {}


def write_json(path: Path, content: dict) -> None:
    write_whole(path, json.dumps(content, indent=1), sync=True)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return download.hash_rest(file, hashlib.sha256()).hexdigest()


class ShardWriter:
    """Writes the shards of one split, train or val. state: how far they are, from progress.json; it is kept up to
    date."""

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_tokens: int, state: dict):
        self.folder, self.split, self.vocab_size, self.shard_tokens = folder, split, vocab_size, shard_tokens
        self.state = state

    @property
    def path(self) -> Path:
        return self.folder / f"{self.split}-{self.state['number']:05}.bin"

    def _header(self):
        return make_header(self.state["tokens"], self.vocab_size if self.state["kind"] == "text" else 2**32)

    def add(self, tokens: array, kind: str) -> None:
        self.state["kind"] = kind
        tokens, begin = np.asarray(tokens, self._header()[1]), 0
        while begin < len(tokens):
            part = tokens[begin : begin + self.shard_tokens - self.state["tokens"]]
            with open(self.path, "ab") as file:
                # What a killed call wrote after its last note is cut off.
                file.truncate(HEADER + self.state["tokens"] * part.itemsize)
                file.write(part)
            self.state["tokens"] += len(part)
            begin += len(part)
            if self.state["tokens"] == self.shard_tokens:
                self.close()

    def sync(self) -> None:
        """Makes sure that the disk has what was written."""
        if self.state["tokens"]:
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Completes the shard that is being written, if there is one."""
        tokens, (header, dtype) = self.state["tokens"], self._header()
        if tokens:
            with open(self.path, "r+b") as file:
                file.write(header)
                file.truncate(HEADER + tokens * dtype().itemsize)
            self.sync()
            self.state["files"][self.path.name] = {"tokens": tokens, "sha256": sha256_of(self.path)}
            self.state |= {"number": self.state["number"] + 1, "tokens": 0}


# ---- text -> shards


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
) -> dict:
    """Tokenises sources into shards -> index.json's content. state: what progress.json says; it is kept up to date. Bad
    rows beyond skip_bad end it with a UserError."""
    tokenizer = load_tokenizer(encoder.tokenizer)
    splits = {split: {"number": 0, "tokens": 0, "kind": "", "files": {}} for split in ("train", "val")}
    state = {"position": [0, 0], "skipped": 0, "kind": "", "splits": splits} | state
    how = tokenizer.vocab_size, shard_tokens
    writers = {name: ShardWriter(folder, name, *how, split) for name, split in state["splits"].items()}
    progress, noted = Progress(sum(s.size for s in sources)), time.monotonic()
    text = tokens = 0
    jobs = batches(sources, encoder, state["position"], val_every)
    for (source, row, done, size), (parts, bad) in in_order(encode_rows, jobs, processes):
        _skip(bad, state, skip_bad)
        for (val, kind), encoded in parts.items():
            if state["kind"] not in ("", kind):
                raise UserError(
                    f"{sources[source]}, up to row {row}: documents and conversations together (rows before are"
                    f" {state['kind']}): give them apart, as A:WEIGHT B:WEIGHT"
                )
            writers["val" if val else "train"].add(encoded, kind)
            state["kind"] = kind
            tokens += len(encoded)
        state["position"] = [source, row]
        text += size
        if processes:
            progress.show(done, text, f"{amount(text)} of text", f"{tokens / 1e6:.1f} M tokens")
        if time.monotonic() - noted > NOTE_EVERY:
            noted = time.monotonic()
            for writer in writers.values():
                writer.sync()
            write_json(folder / "progress.json", state)
    for writer in writers.values():
        writer.close()
    if processes:
        progress.show(progress.total, text, f"{tokens / 1e6:.1f} M tokens", end=True)
    return {
        "key": state.get("key"),
        "tokenizer": encoder.tokenizer,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "delimiter": tokenizer.bos_id,
        "kind": state["kind"],
        "sources": [str(s) for s in sources],
        "files": state["splits"]["train"]["files"] | state["splits"]["val"]["files"],
    }


def _skip(bad, state, skip_bad):
    for message in bad:
        state["skipped"] += 1
        if state["skipped"] > skip_bad:
            count = f" (bad row {state['skipped']} of --skip_bad {skip_bad})" if skip_bad else ""
            raise UserError(f"{message}{count}; --skip_bad N leaves out up to N such rows")
        download.say(f"left out: {message}")


def key_of(sources: list[TextFile], encoder: Encoder, *how: int) -> str:
    """Differs where what is prepared does. how: what else it depends on."""
    made_with = [s.identity for s in sources], encoder[1:], load_tokenizer(encoder.tokenizer).fingerprint, how
    return hashlib.sha256(json.dumps(made_with).encode()).hexdigest()[:16]


def prepare(
    sources: list[TextFile],
    encoder: Encoder,
    out: Path,
    shard_tokens: int = 2**62,
    val_every: int = VAL_EVERY,
    **how,
) -> dict:
    """`build` in a folder of its own, going on where an earlier call was killed -> index.json. Waits for another
    process that is at it."""
    key = key_of(sources, encoder, shard_tokens, val_every)
    note, piped = out / "progress.json", "-" in map(str, sources)
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / ".lock"):  # the file stays: a process that waits for it must not be left with a removed one
        state = _find_work(out, key, piped)
        if "files" in state:
            return state
        write_json(note, state)
        try:
            index = build(sources, encoder, out, state, shard_tokens, val_every, **how)
            if not index["files"]:
                raise UserError(f"{', '.join(map(str, sources[:3]))}: no rows are left, so there is nothing to prepare")
        except Exception as e:
            # What was made of rows that had arrived damaged must not be gone on with.
            if isinstance(e, download.Damaged) or "position" not in read_json(note):
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
    known, vocab_size = index.get("files", {}), vocab_size or index.get("vocab_size", 0)
    files += [folder / name for name in known if path.is_dir()]
    for file in dict.fromkeys(files):
        if not file.exists():
            yield f"{file} is missing"
            continue
        if index and file.name not in known:
            yield f"{file} is not in index.json"
        elif index and sha256_of(file) != known[file.name]["sha256"]:
            yield f"{file} has changed since it was prepared (sha256): prepare the text again"
        try:
            tokens, _ = open_shard(file, data_dtype)
        except UserError as e:
            yield str(e)
            continue
        if vocab_size:
            yield from _beyond(file, tokens, vocab_size, ID if index.get("kind") == "chat" else -1)


def _beyond(file, tokens, vocab_size, bits):
    for start in range(0, len(tokens), 2**24):
        ids = tokens[start : start + 2**24].astype(np.int64) & bits
        wrong = np.flatnonzero(ids >= vocab_size)
        if len(wrong):
            at = wrong[0]
            yield f"{file} at token {start + at}: id {ids[at]}, beyond the {vocab_size} of the vocabulary"
            return


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
    files = index["files"].items()
    train, val = (sum(f["tokens"] for name, f in files if name.startswith(split)) for split in ("train", "val"))
    print(f"{args.out}: {train} tokens and {val} for validation")
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
