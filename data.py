"""From files to batches: token shards, text that is tokenised once into shards, their order, and the position in it.

A row is seq_len tokens and their successors. The shards of a split are one long sequence of tokens; row i begins at
token i * seq_len. Rows are visited in a random order that is a pure function of (seed, epoch, i), computed where it is
needed and never stored. Step s of a run trains on rows s * R ... (s + 1) * R - 1 of that order (R = batch_tokens /
seq_len), whatever the number of ranks, the micro-batch or the step the run was resumed at: the position is one integer.

Formats: llm.c's shards (a header of 256 int32: magic 20240520, version 1, uint16 tokens; or magic 20240801, version 7,
uint32), nanoGPT's headerless files (their dtype must be said), UTF-8 .txt (a file is a document) and .jsonl (a row is
one)."""

import glob
import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from config import Config, split_batch, tokenizer_beside
from errors import RankError, UserError
from model import IGNORE
from tokenizer import load_tokenizer

HEADER = 256  # int32
MAGICS = {
    20240520: (1, np.uint16, 50256),
    20240801: (7, np.uint32, 128000),
}  # version, dtype, the token before a document
VAL_NAME = re.compile(r"(?:^|[^a-z])val(?:id|idation)?(?:[^a-z]|$)", re.IGNORECASE)
CACHE = Path(__file__).parent / "cache"
VAL_EVERY = 20  # one document in so many, or the last 1/20 of a single long one, is held out for validation


@dataclass
class Batch:
    """One micro-batch: tokens and targets [B, T] int64, target -100 = not trained on; positions [B, T] int64, 0 at the
    beginning of each document, or None: one sequence per row."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Asynchronous on a GPU."""

        def move(t: Tensor | None) -> Tensor | None:
            return t if t is None or device.type == "cpu" else t.pin_memory().to(device, non_blocking=True)

        return Batch(move(self.tokens), move(self.targets), move(self.positions))


# ---- token shards


def open_shard(path: Path, data_dtype: str = "") -> tuple[np.ndarray, int | None]:
    """Memory-maps a shard -> (its tokens, the id that its format puts before each document, if it has one)."""
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{path} is empty")
    head = np.fromfile(path, dtype="<i4", count=HEADER)
    if len(head) == HEADER and int(head[0]) in MAGICS:
        version, dtype, delimiter = MAGICS[int(head[0])]
        if head[1] != version:
            raise UserError(
                f"{path}: shard version {head[1]} with magic {head[0]}, expected version {version}; write it again"
            )
        found, expected = size - 4 * HEADER, int(head[2]) * np.dtype(dtype).itemsize
        if found != expected:
            raise UserError(
                f"{path}: {found} bytes of tokens, its header says {head[2]} tokens = {expected} bytes;"
                " the file is damaged or cut short"
            )
        return np.memmap(path, dtype=dtype, mode="r", offset=4 * HEADER), delimiter
    if not data_dtype:
        raise UserError(
            f"{path} has no token-shard header (magic {' or '.join(map(str, MAGICS))}); for headerless tokens,"
            " as nanoGPT writes them, say --data_dtype uint16 or uint32"
        )
    if size % np.dtype(data_dtype).itemsize:
        raise UserError(f"{path}: {size} bytes is no whole number of {data_dtype} tokens")
    return np.memmap(path, dtype=data_dtype, mode="r"), None


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Writes tokens with the llm.c header that suits the vocabulary."""
    magic = 20240520 if vocab_size <= 2**16 else 20240801
    version, dtype, _ = MAGICS[magic]
    header = np.zeros(HEADER, dtype="<i4")
    header[:3] = magic, version, len(tokens)
    with open(path, "wb") as f:
        f.write(header.tobytes())
        f.write(tokens.astype(dtype).tobytes())


# ---- text


def builtin_documents() -> Iterator[str]:
    """Real English that is on every machine that can run this: Python's reference topics and the docstrings of the
    standard library and of torch, each of 200 characters or more, once. It changes with their versions."""
    import pydoc_data.topics

    topics = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) >= 200]
    yield from dict.fromkeys(topics)  # once each
    docstring = re.compile(r'(?:\A|:\n|,\n)\s*r?"""(.*?)"""', re.DOTALL)
    no_part_of_it = {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib"}
    seen = set(topics)
    for root in (Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            if no_part_of_it.isdisjoint(path.relative_to(root).parts):
                for match in docstring.findall(path.read_text("utf-8", "replace")):
                    text = inspect.cleandoc(match)
                    if len(text) >= 200 and text not in seen:
                        seen.add(text)
                        yield text


def _pieces(path: Path, text_field: str) -> Iterator[tuple[str, bool, bool]]:
    """(text, whether a document begins, whether it is for validation), a line or a row at a time."""
    size, done, val_begun = path.stat().st_size, 0, False
    cut = size * (VAL_EVERY - 1) // VAL_EVERY
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            try:
                text = line.decode()
            except UnicodeDecodeError as e:
                raise UserError(
                    f"{path}: not UTF-8 at byte {done + e.start} (line {number}); convert the file, e.g. with iconv"
                ) from None
            if path.suffix == ".txt":
                val = done >= cut and done > 0
                if not val and done + len(line) == size:  # nothing would be left: the last line itself is cut
                    held_out = len(line[: cut - done].decode(errors="ignore"))
                    yield text[:held_out], done == 0, False
                    text, val = text[held_out:], True
                yield text, done == 0 or (val and not val_begun), val
                val_begun = val
            elif text.strip():
                try:
                    row = json.loads(text)
                except ValueError as e:
                    raise UserError(f"{path} line {number} is not JSON: {e}") from None
                if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
                    found = f"fields {', '.join(row)}" if isinstance(row, dict) else type(row).__name__
                    raise UserError(
                        f"{path} line {number} has no text field '{text_field}' (found: {found}); --text_field names it"
                    )
                if re.search("[\ud800-\udfff]", row[text_field]):
                    raise UserError(
                        f"{path} line {number}: '{text_field}' holds half of a surrogate pair, which is no text"
                    )
                yield row[text_field], True, number % VAL_EVERY == 0
            done += len(line)


def _builtin_pieces() -> Iterator[tuple[str, bool, bool]]:
    for i, text in enumerate(builtin_documents(), 1):
        yield text, True, i % VAL_EVERY == 0


def _documents(pieces: Iterator[tuple[str, bool, bool]]) -> Iterator[tuple[str, bool, bool]]:
    """The pieces of each document as one: a tokenizer sees white space across lines, and may treat a text's beginning
    in its own way. (Bytes do neither.)"""
    texts, kind = [], False
    for text, begins, val in pieces:
        if begins and texts:
            yield "".join(texts), True, kind
            texts = []
        texts.append(text)
        kind = val
    if texts:
        yield "".join(texts), True, kind


def tokenize(name: str, sources: list[Path], config: Config) -> Path:
    """Tokenises text (no sources: the built-in one) into a folder of the cache, once -> the folder with train.bin,
    val.bin and index.json. Safe when several processes do it at the same time."""
    tokenizer = load_tokenizer(config.tokenizer)
    if sources:
        identity = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in sources] + [config.text_field]
    else:
        identity = [
            platform.python_version(),
            torch.__version__,
            hashlib.sha256(inspect.getsource(builtin_documents).encode()).hexdigest(),
        ]
    key = hashlib.sha256(json.dumps([identity, tokenizer.fingerprint, VAL_EVERY]).encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{key}"
    if (folder / "index.json").exists():
        return folder
    temporary = CACHE / f"{name}-{key}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        raw = {split: open(temporary / f"{split}.raw", "wb") for split in ("train", "val")}  # noqa: SIM115
        for pieces in [_pieces(p, config.text_field) for p in sources] or [_builtin_pieces()]:
            for text, begins, val in pieces if config.tokenizer == "bytes" else _documents(pieces):
                ids = ([tokenizer.bos_id] if begins else []) + tokenizer.encode(text)
                raw["val" if val else "train"].write(np.array(ids, dtype="<u4").tobytes())
        index = {"tokenizer": config.tokenizer, "sources": [str(p) for p in sources] or ["built-in"], "files": {}}
        for split, f in raw.items():
            f.close()
            tokens = np.fromfile(f.name, dtype="<u4")
            path = temporary / f"{split}.bin"
            write_shard(path, tokens, tokenizer.vocab_size)
            index["files"][path.name] = {"tokens": len(tokens), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            os.remove(f.name)
        (temporary / "index.json").write_text(json.dumps(index, indent=1))
        os.rename(temporary, folder)
    except OSError:
        if not (folder / "index.json").exists():  # else another process was first, with the same content
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


# ---- splits


class Tokens:
    """Parts of shards (file, tokens, number of the first in its file) as one sequence of token ids."""

    def __init__(self, parts: list[tuple[Path, np.ndarray, int]]):
        self.paths, self.arrays, self.firsts = ([part[i] for part in parts] for i in range(3))
        self.ends = np.cumsum([len(a) for a in self.arrays])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        out, shard = [], int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            first = int(self.ends[shard]) - len(self.arrays[shard])
            end = min(stop, int(self.ends[shard]))
            out.append(self.arrays[shard][start - first : end - first])
            start, shard = end, shard + 1
        return out[0] if len(out) == 1 else np.concatenate(out)

    def where(self, position: int) -> str:
        shard = int(np.searchsorted(self.ends, position, side="right"))
        inside = position - int(self.ends[shard]) + len(self.arrays[shard])
        return f"{self.paths[shard]} at token {self.firsts[shard] + inside}"


def _find(spec: str, flag: str) -> list[Path]:
    """The files that an entry of --data names: a file, a folder of .bin shards, or a glob."""
    path = Path(spec).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.bin"))
        if not files:
            raise UserError(f"{flag} {spec}: the folder holds no .bin token shards")
        return files
    files = [path] if path.exists() else sorted(Path(p) for p in glob.glob(str(path)))
    if not files or not files[0].exists():
        raise UserError(f"{flag} {spec}: no such file or folder")
    return files


def _split(specs: tuple[str, ...], flag: str, config: Config) -> tuple[dict[str, list], int | None]:
    """-> ({"train": [(path, tokens)], "val": [...]}, document delimiter) of all the entries of a flag."""
    parts, delimiters = {"train": [], "val": []}, set()
    files = [f for spec in specs for f in _find(spec, flag)]
    kinds = {f.suffix for f in files} or {".txt"}
    if not kinds <= {".bin", ".txt", ".jsonl"}:
        bad = next(f for f in files if f.suffix not in (".bin", ".txt", ".jsonl"))
        raise UserError(f"{flag} {bad}: what this file holds is not known; .txt, .jsonl and .bin (token shards) are")
    texts = [f for f in files if f.suffix != ".bin"]
    named = {f for f in files if f.suffix == ".bin" and VAL_NAME.search(f.stem)}
    shards = [(f, "val" if f in named else "train" if named else "") for f in files if f.suffix == ".bin"]
    if texts or not files:
        folder = tokenize(texts[0].stem if texts else "builtin", texts, config)
        shards += [(folder / f"{split}.bin", split) for split in parts]
    for path, split in shards:
        tokens, delimiter = open_shard(path, config.data_dtype)
        if path.is_relative_to(CACHE):
            delimiter = load_tokenizer(config.tokenizer).bos_id
        delimiters.add(delimiter)
        cut = {"train": len(tokens), "val": 0, "": len(tokens) - len(tokens) // VAL_EVERY}[split]
        for name, piece, first in (("train", tokens[:cut], 0), ("val", tokens[cut:], cut)):
            if len(piece):
                parts[name].append((path, piece, first))
    return parts, delimiters.pop() if len(delimiters) == 1 else None


def open_split(config: Config, split: str) -> tuple[Tokens, int | None]:
    """-> (the tokens of a split, "train" or "val"; the id before each document, None if unknown). With --val_data that
    is the validation split and all of --data trains; else shards named *val* are, else a held-out 1/20."""
    parts, delimiter = _split(config.data, "--data", config)
    if config.val_data and split == "train":
        chosen = parts["train"] + [
            part for part in parts["val"] if part[0].is_relative_to(CACHE) or not VAL_NAME.search(part[0].stem)
        ]
    elif config.val_data:
        parts, delimiter = _split(config.val_data, "--val_data", config)
        chosen = parts["train"] + parts["val"]
    else:
        chosen = parts[split]
    tokens = Tokens(chosen)
    if len(tokens) < config.seq_len + 1:
        what = "training data" if split == "train" else "validation split"
        mend = "give more text or a smaller --seq_len" + (
            "" if split == "train" else ", name a --val_data, or turn evaluation off with --eval_every 0"
        )
        raise UserError(
            f"The {what} has {len(tokens)} tokens, one row needs seq_len + 1 = {config.seq_len + 1}: {mend}"
        )
    return tokens, delimiter if config.delimiter < 0 else config.delimiter


# ---- order


def permute(index: np.ndarray, n: int, key: str) -> np.ndarray:
    """A random permutation of range(n) at the given indices, in O(1) memory: a Feistel network over the next power of
    four, applied again to what falls outside (cycle walking, Black and Rogaway 2002)."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u8")
    out = index.astype(np.uint64)
    todo = np.ones(len(out), dtype=bool)
    while todo.any():
        x = out[todo]
        left, right = x >> half, x & mask
        for k in keys:
            z = right + k  # splitmix64's mixing, modulo 2^64
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((z ^ (z >> np.uint64(31))) & mask)
        out[todo] = left << half | right
        todo = out >= n
    return out.astype(np.int64)


class Loader:
    """Iterates over optimizer steps; each item is the list of this rank's micro-batches. Training never ends: epochs
    follow each other, each in another order. Validation goes once through eval_batches global batches, evenly
    spread."""

    def __init__(self, config: Config, rank: int, world_size: int, split: str):
        self.config, self.rank, self.world_size, self.split = config, rank, world_size, split
        self.tokens, self.delimiter = open_split(config, split)
        if config.documents == "separate" and self.delimiter is None:
            raise UserError(
                "--documents separate needs the id of the token that begins a document,"
                " which these shards do not say: give --delimiter ID"
            )
        self.rows = (len(self.tokens) - 1) // config.seq_len  # in an epoch
        self.micro_batch, batch_tokens = split_batch(config, world_size)
        self.step_rows = batch_tokens // config.seq_len  # in a step, over all ranks
        self.samples = 0  # rows handed out so far, over all ranks
        self.fingerprint = hashlib.sha256(json.dumps(self.describe()).encode()).hexdigest()[:16]

    def describe(self) -> list[dict]:
        """Name, size and checksum (of the first and last MiB) of each part of the split, for the run folder."""
        rows = []
        for path, array in zip(self.tokens.paths, self.tokens.arrays, strict=True):
            n = 2**20 // array.itemsize
            digest = hashlib.sha256(array[:n].tobytes() + array[-n:].tobytes()).hexdigest()
            rows.append({"file": path.name, "tokens": len(array), "sha256_ends": digest})
        return rows

    def state_dict(self) -> dict:
        return {
            "samples": self.samples,
            "epoch": self.samples // self.rows,
            "seq_len": self.config.seq_len,
            "data": self.fingerprint,
        }

    def load_state_dict(self, state: dict) -> None:
        for field, found in (("data", self.fingerprint), ("seq_len", self.config.seq_len)):
            if state[field] != found:
                raise UserError(
                    f"The checkpoint was trained on other data ({field} {state[field]}, now {found}):"
                    " give the same --data and --seq_len, or a new --out"
                )
        self.samples = state["samples"]

    def __iter__(self) -> Iterator[list[Batch]]:
        if self.split == "train":
            while True:
                index = np.arange(self.samples, self.samples + self.step_rows)
                epoch, rows = index // self.rows, index % self.rows
                for e in range(epoch[0], epoch[-1] + 1):
                    rows[epoch == e] = permute(rows[epoch == e], self.rows, f"{self.config.seed}/{e}")
                batches = self._batches(rows)
                self.samples += self.step_rows
                yield batches
        else:
            count = min(self.rows, self.config.eval_batches * self.step_rows or self.rows)
            rows = np.arange(count) * self.rows // count
            for a in range(0, count, self.step_rows):
                yield self._batches(rows[a : a + self.step_rows])

    def _batches(self, rows: np.ndarray) -> list[Batch]:
        """Row m * ranks * micro_batch + rank * micro_batch + i of the step is row i of micro-batch m. Where they do not
        divide, the last micro-batch is filled with rows that are not trained on."""
        micro = self.micro_batch
        out = []
        for start in range(0, len(rows), micro * self.world_size):
            a = start + self.rank * micro
            out.append(self._batch(rows[a : a + micro], micro))
        return out

    def _batch(self, rows: np.ndarray, micro: int) -> Batch:
        T = self.config.seq_len
        block = np.zeros((micro, T + 1), dtype=np.int64)
        for i, row in enumerate(rows):
            block[i] = self.tokens.read(int(row) * T, int(row) * T + T + 1)
        if block.max() >= self.config.model_config.vocab_size:
            i, t = np.argwhere(block >= self.config.model_config.vocab_size)[0]
            raise _beyond_vocabulary(self.tokens, int(rows[i]) * T + int(t), self.config)
        targets = block[:, 1:].copy()
        targets[len(rows) :] = IGNORE
        positions = None
        if self.config.documents == "separate":
            begins = block[:, :-1] == self.delimiter
            begins[:, 0] = True
            index = np.arange(T)
            positions = torch.from_numpy(index - np.maximum.accumulate(np.where(begins, index, 0), 1))
        return Batch(torch.from_numpy(block[:, :-1].copy()), torch.from_numpy(targets), positions)


def _beyond_vocabulary(tokens: Tokens, at: int, config: Config) -> RankError:
    return RankError(
        f"{tokens.where(at)}: id {tokens.read(at, at + 1)[0]}, but the model's vocab_size is"
        f" {config.model_config.vocab_size}; tokenizer and --model (or --vocab_size) must match"
    )


def make_loader(config: Config, rank: int = 0, world_size: int = 1, split: str = "train") -> Loader:
    """split: "train" or "val"."""
    return Loader(config, rank, world_size, split)


def check_tokens(config: Config) -> None:
    """Refuses a tokenizer, or ids, beyond the vocabulary before anything is trained; beyond 2^27 tokens per split,
    those rows are checked as they are read."""
    if config.knows_text:
        check_tokenizer(config)
    for split in ("train", "val") if config.eval_every else ("train",):
        tokens, _ = open_split(config, split)
        seen = 0
        for array in tokens.arrays:
            part = array[: max(0, 2**27 - seen)]
            if len(part) and int(part.max()) >= config.model_config.vocab_size:
                at = seen + int(np.argmax(part >= config.model_config.vocab_size))
                raise _beyond_vocabulary(tokens, at, config)
            seen += len(array)


PROBE = "The 12 quick brown foxes' (naïve) jumps\n\n\tover 日本語 🎈 <s></s><|endoftext|> \x00"


def check_tokenizer(config: Config) -> None:
    """Whether a tokenizer, the model and the weights belong together."""
    tokenizer, model = load_tokenizer(config.tokenizer), config.model_config
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"--tokenizer {config.tokenizer} has {tokenizer.vocab_size} ids, --model {config.model} a vocabulary of"
            f" {model.vocab_size}: give the tokenizer that belongs to the model, or --vocab_size {tokenizer.vocab_size}"
        )
    if not config.weights:
        return
    own = tokenizer_beside(config.weights)
    if own and own != config.tokenizer and load_tokenizer(own).encode(PROBE) != tokenizer.encode(PROBE):
        raise UserError(f"--tokenizer {config.tokenizer} is another one than that of --weights {config.weights}")
    padding = 1 if config.tokenizer == "bytes" else 512  # vocabularies are padded to multiples of so much at most
    if not own and model.vocab_size - tokenizer.vocab_size >= padding:
        raise UserError(
            f"--tokenizer {config.tokenizer} has {tokenizer.vocab_size} ids, --weights {config.weights} were trained on"
            f" {model.vocab_size}: name the tokenizer that they were trained with"
        )
