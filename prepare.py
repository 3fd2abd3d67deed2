"""Text -> token shards, once: in parallel, resumable, checked; what `python data.py prepare` and `verify` do, and what
turns the text that --data names into shards in the cache.

One process reads rows and hands them out by the megabyte; workers parse and tokenise; their tokens are written in the
order of the rows. So the shards are the same for any number of processes, and memory does not grow with the input.
`progress.json` says, every few seconds, how far the input is read and how long each shard is: after a kill, shards are
cut to that length and the input is read on from there.

A folder of shards: train-00000.bin ... and val-00000.bin ... with llm.c's header (256 int32: magic 20240520, version 1,
uint16 tokens; or magic 20240801, version 7, uint32); beside each, where its documents are conversations, a .mask with a
byte per token (bit 0: trained on, bit 1: a conversation begins); index.json says what they were made from and with."""

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from download import Damaged, Failed
from errors import UserError, missing_folders, remove_empty
from remote import Remote
from text import BUILTIN, Encoder, Row, encode_rows, encoder, read_rows
from workers import in_order

HEADER = 256  # int32
MAGICS = {
    20240520: (1, np.uint16, 50256),
    20240801: (7, np.uint32, 128000),
}  # version, dtype, the token before a document
BATCH = 2**20  # bytes of rows that a worker gets at a time
NOTE_EVERY = 5.0  # seconds between two notes of the progress


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_header(f, tokens: int, vocab_size: int) -> type:
    """Writes the llm.c header that suits the vocabulary -> the dtype of the tokens that follow."""
    magic = 20240520 if vocab_size <= 2**16 else 20240801
    version, dtype, _ = MAGICS[magic]
    header = np.zeros(HEADER, dtype="<i4")
    header[:3] = magic, version, tokens
    f.seek(0)
    f.write(header.tobytes())
    return dtype


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    with open(path, "wb") as f:
        dtype = write_header(f, len(tokens), vocab_size)
        f.write(tokens.astype(dtype).tobytes())


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(2**24):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, content: dict) -> None:
    """In one piece, and on the disk."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as f:
        json.dump(content, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def read_index(folder: Path) -> dict:
    """index.json of a folder that we made; {} for shards of others."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        text = (folder / "index.json").read_text("utf-8")
        try:
            found = json.loads(text)
        except ValueError as e:
            raise UserError(f"{folder}/index.json is not JSON ({e}): prepare the folder again") from None
        return found if isinstance(found, dict) and "fingerprint" in found else {}
    return {}


class Shards:
    """The shards of one split while they are written. names: train-{:05}.bin or the like; state: how far they are, as a
    note of the progress says it."""

    def __init__(self, folder: Path, names: str, vocab_size: int, shard_tokens: int, state: dict):
        self.folder, self.names, self.vocab_size, self.shard_tokens = folder, names, vocab_size, shard_tokens
        self.number, self.tokens, self.masked = (state.get(k, 0) for k in ("number", "tokens", "masked"))
        self.files = dict(state.get("files", {}))
        self.bin = self.mask = None

    def state(self) -> dict:
        return {"number": self.number, "tokens": self.tokens, "masked": self.masked, "files": self.files}

    @property
    def path(self) -> Path:
        return self.folder / self.names.format(self.number)

    def _open(self) -> None:
        """The shard that is written now, cut to the length that is known."""
        self.bin = open(self.path, "r+b" if self.tokens else "w+b")  # noqa: SIM115
        self.dtype = write_header(self.bin, 0, self.vocab_size)
        self.bin.seek(4 * HEADER + self.tokens * np.dtype(self.dtype).itemsize)
        self.bin.truncate()
        if self.masked:
            self.mask = open(self.path.with_suffix(".mask"), "r+b" if self.tokens else "w+b")  # noqa: SIM115
            self.mask.seek(self.tokens)
            self.mask.truncate()

    def add(self, tokens: np.ndarray, mask: np.ndarray | None) -> None:
        self.masked = int(mask is not None)
        while len(tokens):
            if self.bin is None:
                self._open()
            n = min(len(tokens), self.shard_tokens - self.tokens)
            self.bin.write(tokens[:n].astype(self.dtype).tobytes())
            if mask is not None:
                self.mask.write(mask[:n].tobytes())
                mask = mask[n:]
            tokens, self.tokens = tokens[n:], self.tokens + n
            if self.tokens == self.shard_tokens:
                self.close()
                self.number, self.tokens = self.number + 1, 0

    def flush(self) -> None:
        for f in (self.bin, self.mask):
            if f is not None:
                f.flush()
                os.fsync(f.fileno())

    def close(self) -> None:
        """Completes the shard that is being written."""
        if self.bin is None:
            if not self.tokens:
                return
            self._open()
        write_header(self.bin, self.tokens, self.vocab_size)
        self.flush()
        for f in (self.bin, self.mask):
            if f is not None:
                f.close()
        self.bin = None
        self.files[self.path.name] = {"tokens": self.tokens, "sha256": sha256_of(self.path)}
        if self.mask is not None:
            mask = self.path.with_suffix(".mask")
            self.files[mask.name] = {"tokens": self.tokens, "sha256": sha256_of(mask)}
            self.mask = None


class Meter:
    """A bar on stderr, with the MB of text per second and the time that is left; a line every ten seconds where that is
    no terminal."""

    def __init__(self, total: int):
        self.total, self.began, self.shown = total, time.monotonic(), time.monotonic()
        self.at_start = None

    def show(self, done: int, text: int, tokens: int, end: bool = False) -> None:
        """done: of the stored bytes; text: bytes of text that this process has seen."""
        now = time.monotonic()
        self.at_start = min(done, self.total) if self.at_start is None else self.at_start
        if not end and now - self.shown < (0.2 if sys.stderr.isatty() else 10):
            return
        self.shown, seconds = now, max(now - self.began, 1e-3)
        share = min(1.0, done / self.total) if self.total else 0.0
        line = f"{text / 1e6:.0f} MB of text, {text / 1e6 / seconds:.1f} MB/s, {tokens / 1e6:.1f} M tokens"
        if self.total:
            line = f"[{'#' * int(20 * share):20}] {100 * share:.0f} %, {line}"
        if share and not end:
            left = seconds * (1 - share) / max(share - self.at_start / self.total, 1e-6) if self.at_start < done else 0
            line += f", {left / 60:.0f} min left" if left > 90 else f", {left:.0f} s left"
        terminal = sys.stderr.isatty()
        print(f"\r\033[K{line}" if terminal else line, end="\n" if end or not terminal else "", file=sys.stderr)
        sys.stderr.flush()


def batches(
    sources: list, encode: Encoder, start: tuple[int, int], val_every: int, position: list
) -> Iterator[tuple[str, list[Row]]]:
    """(name, rows) of about BATCH bytes each, from behind `start` = (source, row) on; what `position` gets is where a
    batch ends: (source, row, stored bytes, bytes of text)."""
    done = sum(size_of(s) for s in sources[: start[0]])
    for i in range(start[0], len(sources)):
        source, rows, size = sources[i], [], 0
        name, row = str(source.path if isinstance(source, Remote) else source), None
        reader = read_rows(source, encode.fields(), start[1] if i == start[0] else 0, val_every)
        for row, at in reader:
            rows.append(row)
            size += len(row.content) if isinstance(row.content, bytes) else sum(map(_length, row.content.values()))
            if size >= BATCH:
                position.append((i, row.number, done + at, size))
                yield name, rows
                rows, size = [], 0
        if rows:
            position.append((i, row.number, done + size_of(source), size))
            yield name, rows
        done += size_of(source)


def _length(value) -> int:
    return len(value) if isinstance(value, str) else len(json.dumps(value)) if value is not None else 0


def size_of(source: Path | Remote) -> int:
    if isinstance(source, Remote):
        return source.size
    return 0 if str(source) in ("-", BUILTIN) else source.stat().st_size


def build(
    sources: list,
    settings: tuple[str, str, str],
    folder: Path,
    names: tuple[str, str],
    processes: int = 0,
    shard_tokens: int = 2**62,
    val_every: int = 20,
    skip_bad: int = 0,
    note: dict | None = None,
    meter: Meter | None = None,
    warn: Callable[[str], None] = print,
) -> dict:
    """Tokenises sources into shards -> what index.json says of them. note: what progress.json said, or {} to begin one;
    None: none is kept. Bad rows beyond skip_bad end it with a UserError."""
    encode = encoder(*settings)
    vocab_size = encode.tokenizer.vocab_size
    state = note or {}
    start = tuple(state.get("position", (0, 0)))
    shards = {
        val: Shards(folder, names[val], vocab_size, shard_tokens, state.get("shards", {}).get(str(int(val)), {}))
        for val in (False, True)
    }
    documents, skipped, kind = state.get("documents", 0), state.get("skipped", 0), state.get("kind", "")
    position: list = []
    jobs = ((settings, name, rows) for name, rows in batches(sources, encode, start, val_every, position))
    noted, text, tokens = time.monotonic(), 0, 0
    for results, bad in in_order(encode_rows, jobs, processes):
        i, row, done, size = position.pop(0)
        for message in bad:
            skipped += 1
            if skipped > skip_bad:
                count = "" if not skip_bad else f" (bad row {skipped} of --skip_bad {skip_bad})"
                raise UserError(f"{message}{count}; --skip_bad N leaves out up to N such rows")
            warn(f"left out: {message}")
        for val, encoded in results.items():
            found = "text" if encoded.mask is None else "chat"
            if kind and kind != found:
                raise UserError(
                    f"{sources[i]}: documents and conversations together (rows before are {kind}):"
                    " give them apart, as A:WEIGHT B:WEIGHT"
                )
            kind = found
            shards[val].add(encoded.tokens, encoded.mask)
            documents, tokens = documents + encoded.documents, tokens + len(encoded.tokens)
        text += size
        if meter:
            meter.show(done, text, tokens)
        if note is not None and time.monotonic() - noted > NOTE_EVERY:
            noted = time.monotonic()
            for s in shards.values():
                s.flush()
            states = {str(int(val)): s.state() for val, s in shards.items()}
            made = {"position": [i, row], "documents": documents, "skipped": skipped, "kind": kind, "shards": states}
            write_json(folder / "progress.json", note | made)
    files = {}
    for s in shards.values():
        s.close()
        files |= s.files
    if meter:
        meter.show(meter.total, text, tokens, end=True)
    return {
        "tokenizer": settings[0],
        "fingerprint": encode.tokenizer.fingerprint,
        "vocab_size": vocab_size,
        "delimiter": encode.tokenizer.bos_id,
        "kind": kind or "text",
        "text_field": settings[1],
        "sources": [str(s) for s in sources],
        "documents": documents,
        "skipped": skipped,
        "files": files,
    }


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """A folder that no other call of `prepare` writes to meanwhile. Made if need be, and removed if it stays empty."""
    try:
        new_folders = missing_folders(out)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {out}: no folder can be there: {e.strerror}") from None
    with open(out / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {out}: another prepare is at work there") from None
        try:
            yield
        finally:
            (out / ".lock").unlink(missing_ok=True)
            remove_empty(new_folders)


def prepare(
    sources: list,
    settings: tuple[str, str, str],
    out: Path,
    processes: int,
    shard_tokens: int,
    val_every: int,
    skip_bad: int,
) -> dict:
    """`data.py prepare`: build in a folder of its own, going on where an earlier call was killed -> index.json."""
    identity = [(str(s), size_of(s), s.oid if isinstance(s, Remote) else s.stat().st_mtime_ns if size_of(s) else 0)
                for s in sources]  # fmt: skip
    made_with = [settings[1:], encoder(*settings).tokenizer.fingerprint, shard_tokens, val_every]
    key = hashlib.sha256(json.dumps([identity, made_with]).encode()).hexdigest()[:16]
    progress = out / "progress.json"
    with _locked(out):
        index = read_index(out)
        if index:
            if index.get("key") != key:
                raise UserError(f"--out {out} holds other shards (input, tokenizer or flags differ): name another")
            if any(str(source) == "-" for source in sources):
                raise UserError(f"--out {out} is ready; whether standard input is the same is not known: name another")
            print(f"{out} is ready already", file=sys.stderr)
            return index
        note = {}
        if progress.exists():
            note = json.loads(progress.read_text("utf-8"))
            if note["key"] != key:
                raise UserError(
                    f"--out {out} holds the beginning of other shards (input, tokenizer or flags differ): name another"
                    " folder, or empty it"
                )
            if str(sources[0]) == "-":
                note = {}  # what came through a pipe does not come again from its middle: from the start
        elif foreign := [p.name for p in out.iterdir() if p.name != ".lock"]:
            raise UserError(f"--out {out} is not empty ({', '.join(sorted(foreign)[:3])}): name another folder")
        note = {"key": key} | note
        write_json(progress, note)
        if "position" in note:
            print(f"Going on in {sources[note['position'][0]]} after row {note['position'][1]}", file=sys.stderr)

        def warn(message: str) -> None:
            print(f"\r\033[K{message}" if sys.stderr.isatty() else message, file=sys.stderr)

        names, size = ("train-{:05}.bin", "val-{:05}.bin"), sum(map(size_of, sources))
        how = shard_tokens, val_every, skip_bad, note, Meter(size), warn
        try:
            index = build(sources, settings, out, names, processes, *how)
            if not index["files"]:
                raise UserError(f"{', '.join(map(str, sources[:3]))}: no rows are left, so there is nothing to prepare")
        except Damaged as e:  # what was made of the damaged rows must not be gone on with
            write_json(progress, {"key": key})
            raise Failed(f"{e}: the same command begins again") from None
        except Exception:
            if "position" not in json.loads(progress.read_text("utf-8")):  # nothing to go on from
                for file in (progress, *out.glob("train-*"), *out.glob("val-*")):
                    file.unlink()
            raise
        index |= {"key": key, "sources": [{"name": str(s), "bytes": size_of(s)} for s in sources]}
        write_json(out / "index.json", index)
        progress.unlink()
    return index
