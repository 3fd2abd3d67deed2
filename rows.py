"""Where rows come from: token shards, conversations packed into rows, streams; what an entry of --data names.

A source has `count`, the rows of its epoch (None: it has no end), `rows(index)` -> tokens [n, T], targets [n, T] and
begins [n, T] (a document begins here; None: a row is one sequence), `note`, a line for the log, and `describe()` and
`files`, by which a checkpoint knows it again. Text is tokenised once, into shards in the cache, or streamed
(stream.py)."""

import glob
import hashlib
import inspect
import json
import logging
import os
import platform
import random
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import download
from config import Config
from errors import RankError, UserError
from model import IGNORE
from order import permute
from prepare import HEADER, MAGICS, Meter, build, cores, read_index, sha256_of, size_of, write_json, write_shard
from remote import Remote, fetch_whole
from stream import Plan, Stream
from text import (
    BEGINS,
    BUILTIN,
    KINDS,
    TRAINED,
    VAL_EVERY,
    builtin_documents,
    encode_rows,
    find_text,
    is_text,
    kind_of,
    read_rows,
)
from tokenizer import load_tokenizer

VAL_NAME = re.compile(r"(?:^|[^a-z])val(?:id|idation)?(?:[^a-z]|$)", re.IGNORECASE)
CACHE = Path(__file__).parent / "cache"
PARALLEL = 2**25  # bytes of text from which it is tokenised by several processes
OPEN_ROWS = 1000  # rows that a conversation may still be packed into
RECENT = 4096  # rows of a stream whose places are remembered
BLOCK, READ = 2**16, 2**27  # bytes: of a file that are compared at a place, and of all files; see sample_digest
logger = logging.getLogger("flatland")


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


def sample_digest(files: list[Path]) -> str:
    """By which the content of files is known again, without reading all of it: each is cut into equal stretches, and of
    each stretch one BLOCK at a random place (always the same one) is hashed. Up to READ bytes all is; of more files
    than 32 at least 64 blocks of each are."""
    blocks = max(64, READ // BLOCK // max(1, len(files)))

    def digest(file: Path) -> str:
        size, rng, hashed = file.stat().st_size, random.Random(0), hashlib.sha256()
        stretch = max(BLOCK, size // blocks)
        with open(file, "rb", buffering=0) as f:
            for start in range(0, size, stretch):
                f.seek(start + int(rng.random() * (stretch - BLOCK + 1)))
                hashed.update(f.read(BLOCK))
        return hashed.hexdigest()

    with ThreadPoolExecutor(16) as threads:  # a disk far away is slow to seek
        return hashlib.sha256("".join(threads.map(digest, files)).encode()).hexdigest()


# ---- text


def tokenize(name: str, sources: list, config: Config) -> Path:
    """Tokenises text (no sources: the built-in one) into a folder of the cache, once -> the folder with train.bin,
    val.bin and index.json. Safe when several processes do it at the same time."""
    tokenizer = load_tokenizer(config.tokenizer)
    settings = text_settings(config)
    if sources:
        identity = [
            (str(p), p.size, p.oid) if isinstance(p, Remote) else (str(p.resolve()), size_of(p), p.stat().st_mtime_ns)
            for p in sources
        ] + [config.text_field, settings[2]]
    else:
        identity = [
            platform.python_version(),
            torch.__version__,
            hashlib.sha256(inspect.getsource(builtin_documents).encode()).hexdigest(),
        ]
    key = hashlib.sha256(json.dumps([identity, tokenizer.fingerprint, VAL_EVERY]).encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{key}"
    index = read_index(folder)
    if index:
        if index["skipped"] > config.skip_bad:
            raise UserError(
                f"{', '.join(map(str, sources[:3]))}: {index['skipped']} bad rows are left out of what is in {folder},"
                f" and --skip_bad is {config.skip_bad}: mend the rows, or give --skip_bad {index['skipped']}"
            )
        return folder
    temporary = CACHE / f"{name}-{key}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    size = sum(map(size_of, sources))
    try:
        index = build(
            sources or [Path(BUILTIN)],
            settings,
            temporary,
            ("train.bin", "val.bin"),
            processes=cores() if size > PARALLEL else 0,
            skip_bad=config.skip_bad,
            meter=Meter(size) if size > PARALLEL else None,
            warn=logger.warning,
        )
        for split in ("train", "val"):
            if f"{split}.bin" not in index["files"]:
                write_shard(temporary / f"{split}.bin", np.zeros(0), tokenizer.vocab_size)
                index["files"][f"{split}.bin"] = {"tokens": 0, "sha256": sha256_of(temporary / f"{split}.bin")}
        write_json(temporary / "index.json", index | {"sources": [str(p) for p in sources] or ["built-in"]})
        os.rename(temporary, folder)
    except OSError:
        if not (folder / "index.json").exists():  # else another process was first, with the same content
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def text_settings(config: Config) -> tuple[str, str, str]:
    """What an Encoder is made of."""
    return config.tokenizer, config.text_field, "mixtral" if config.model_config.mlp == "moe" else "llama"


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

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """[len(starts), length]: tokens from each start on. Those inside one shard are copied by numpy, row by row."""
        out = np.empty((len(starts), length), dtype=np.result_type(*{a.dtype for a in self.arrays}))
        shards = np.searchsorted(self.ends, starts, side="right")
        inside = starts + length <= self.ends[shards]
        for shard in set(shards[inside].tolist()):
            array, here = self.arrays[shard], inside & (shards == shard)
            step = array.itemsize  # every window of the shard, as a view
            view = np.ndarray((len(array) - length + 1, length), array.dtype, array, strides=(step, step))
            out[here] = view[starts[here] - (self.ends[shard] - len(array))]
        for i in np.flatnonzero(~inside):
            out[i] = self.read(int(starts[i]), int(starts[i]) + length)
        return out

    def where(self, position: int) -> str:
        """A place in a file of the user's; of text that was tokenised into the cache, the files that it is from."""
        shard = int(np.searchsorted(self.ends, position, side="right"))
        path, inside = self.paths[shard], position - int(self.ends[shard]) + len(self.arrays[shard])
        if not path.is_relative_to(CACHE):
            return f"{path} at token {self.firsts[shard] + inside}"
        names = read_index(path.parent)["sources"]
        return ", ".join(names[:3]) + (f" or {len(names) - 3} more" if len(names) > 3 else "")


def find_shards(spec: str, flag: str) -> list[Path]:
    """The files that an entry of --data names: a file, a folder of .bin shards, or a glob."""
    path = Path(spec).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.bin"))
        if (path / "progress.json").exists():
            raise UserError(f"{flag} {spec} is not prepared to its end: run its `python data.py prepare` again")
        if not files:
            raise UserError(f"{flag} {spec}: the folder holds no .bin token shards")
        return files
    files = [path] if path.exists() else sorted(Path(p) for p in glob.glob(str(path), recursive=True))
    if not files or not files[0].exists():
        raise UserError(f"{flag} {spec}: no such file or folder")
    for file in files:
        if file.suffix != ".bin" and not kind_of(file.name):
            raise UserError(f"{flag} {file}: what this file holds is not known; {KINDS} are")
    return files


@dataclass
class Shards:
    """Token shards behind entries of --data, by split: (path, tokens, number of the first). delimiter: the id before a
    document, if they agree on one; chat: they are conversations."""

    parts: dict[str, list[tuple[Path, np.ndarray, int]]]
    delimiter: int | None
    chat: bool


def _open_shards(specs: tuple[str, ...], flag: str, config: Config, catalog: "Catalog") -> Shards:
    parts, delimiters, kinds = {"train": [], "val": []}, set(), set()
    remote = [f for spec in specs if spec.startswith("hf://") for f in catalog.find(spec, flag)]
    texts = list(fetch_whole(remote)) if remote else []  # conversations: text of the hub is streamed
    files = [f for spec in specs if not spec.startswith("hf://") for f in find_shards(spec, flag)]
    texts += [f for f in files if f.suffix != ".bin"]
    for file in texts:
        if not file.stat().st_size:
            raise UserError(f"{flag} {file} is empty")
    named = {f for f in files if f.suffix == ".bin" and VAL_NAME.search(f.stem)}
    shards = [(f, "val" if f in named else "train" if named else "") for f in files if f.suffix == ".bin"]
    if texts or not specs:
        folder = tokenize(texts[0].name.partition(".")[0] if texts else "builtin", texts, config)
        shards += [(folder / f"{split}.bin", split) for split in parts]
    for path, split in shards:
        index = read_index(path.parent)
        tokens, delimiter = open_shard(path, config.data_dtype)
        if index:
            _check_index(index, path, len(tokens), config)
            delimiter = index["delimiter"]
            split = split or "train"
        delimiters.add(delimiter)
        kinds.add(index.get("kind", "text"))
        cut = {"train": len(tokens), "val": 0, "": len(tokens) - len(tokens) // VAL_EVERY}[split]
        for name, piece, first in (("train", tokens[:cut], 0), ("val", tokens[cut:], cut)):
            if len(piece):
                parts[name].append((path, piece, first))
    if len(kinds) > 1:
        raise UserError(f"{flag}: conversations and text together: give each its weight, as in A:0.5 B:0.5")
    return Shards(parts, delimiters.pop() if len(delimiters) == 1 else None, kinds == {"chat"})


def _check_index(index: dict, path: Path, tokens: int, config: Config) -> None:
    """Whether a shard is the one that was prepared, and by this run's tokenizer."""
    known = index["files"].get(path.name)
    if known is None or known["tokens"] != tokens:
        raise UserError(
            f"{path}: {tokens} tokens, its index.json says {known['tokens'] if known else 'nothing of it'}: the folder"
            f" has changed; `python data.py verify {path.parent}` checks all of it"
        )
    if config.tokenizer != "bytes" and index["fingerprint"] != load_tokenizer(config.tokenizer).fingerprint:
        raise UserError(
            f"{path.parent} was prepared with --tokenizer {index['tokenizer']}, which is another one than"
            f" {config.tokenizer}: name that one, or prepare the text again"
        )


class Catalog:
    """What entries of --data and --val_data name: looked up once in a job, for `listed` and `streamed` can be told to
    other ranks, and opened once in a process. commits: those that hub addresses are to be read at, where a run goes
    on."""

    def __init__(self, config: Config, commits: dict[str, str] | None = None):
        self.config, self.commits = config, commits or {}
        self.listed: dict[str, list[Remote]] = {}  # the files of a hub address
        self.streamed: dict[tuple[str, ...], bool] = {}
        self.shards: dict[tuple[str, ...], Shards] = {}

    def find(self, spec: str, flag: str) -> list[Path | Remote]:
        if not spec.startswith("hf://"):
            return find_text(spec, flag)
        if spec not in self.listed:
            tries = download.TRIES if self.commits else download.LIST_TRIES  # a run that goes on has patience
            self.listed[spec] = find_text(spec, flag, self.commits.get(spec, ""), tries)
        return self.listed[spec]

    def is_stream(self, specs: tuple[str, ...], flag: str) -> bool:
        if specs not in self.streamed:
            self.streamed[specs] = _is_stream(specs, flag, self.config, self)
        return self.streamed[specs]

    def open(self, split: str, specs: tuple[str, ...], flag: str) -> tuple[Tokens, int | None, bool]:
        """-> (the tokens of a split, "train" or "val"; the id before each document, None if unknown; whether they are
        conversations). With --val_data that is the validation split and all of --data trains; else shards named *val*
        are, else a held-out 1/20."""
        config = self.config
        if specs not in self.shards:
            self.shards[specs] = _open_shards(specs, flag, config, self)
        shards = self.shards[specs]
        parts = shards.parts[split]
        if config.val_data and split == "val":
            parts = shards.parts["train"] + shards.parts["val"]
        elif config.val_data:
            parts = parts + [
                part for part in shards.parts["val"] if read_index(part[0].parent) or not VAL_NAME.search(part[0].stem)
            ]
        tokens = Tokens(parts)
        if len(tokens) < config.seq_len + 1 and not shards.chat:
            raise _too_little(split, f"{len(tokens)} tokens, one row needs seq_len + 1 = {config.seq_len + 1}")
        return tokens, shards.delimiter if config.delimiter < 0 else config.delimiter, shards.chat


def _too_little(split: str, what: str) -> UserError:
    name = "training data" if split == "train" else "validation split"
    mend = "" if split == "train" else ", name a --val_data, or turn evaluation off with --eval_every 0"
    return UserError(f"The {name} has {what}: give more text or a smaller --seq_len{mend}")


# ---- sources: rows(index) -> tokens [n, T], targets [n, T], begins [n, T] or None (one sequence per row)


class ShardRows:
    """Rows of seq_len tokens of a long sequence."""

    def __init__(self, tokens: Tokens, delimiter: int | None, config: Config):
        if config.documents == "separate" and delimiter is None:
            raise UserError(
                "--documents separate needs the id of the token that begins a document,"
                " which these shards do not say: give --delimiter ID"
            )
        self.tokens, self.delimiter, self.config = tokens, delimiter, config
        self.files = tokens.paths
        self.count = (len(tokens) - 1) // config.seq_len
        self.note = ""

    def rows(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        T, vocab_size = self.config.seq_len, self.config.model_config.vocab_size
        block = self.tokens.windows(index * T, T + 1)
        if len(block) and block.max() >= vocab_size:
            i, t = np.argwhere(block >= vocab_size)[0]
            raise beyond_vocabulary(self.tokens, int(index[i]) * T + int(t), self.config)
        begins = block[:, :-1] == self.delimiter if self.config.documents == "separate" else None
        return block[:, :-1], block[:, 1:], begins

    def begin(self, row: int) -> int:
        """The place of a row's first token."""
        return row * self.config.seq_len

    def where(self, row: int) -> str:
        """The place of a row, and its first characters, if it is known what its tokens mean."""
        place = self.tokens.where(self.begin(row))
        prepared_with = read_index(self.tokens.paths[0].parent).get("fingerprint")
        if not self.config.knows_text and prepared_with != "bytes":
            return place
        ids = self.rows(np.array([row]))[0][0, :400].tolist()
        return f"{place}: {load_tokenizer(self.config.tokenizer).decode(ids)[:80]!r}"

    def describe(self) -> list[dict]:
        """Name, size and checksum (of the first and last MiB) of each part."""
        out = []
        for path, array in zip(self.tokens.paths, self.tokens.arrays, strict=True):
            n = 2**20 // array.itemsize
            digest = hashlib.sha256(array[:n].tobytes() + array[-n:].tobytes()).hexdigest()
            out.append({"file": path.name, "tokens": len(array), "sha256_ends": digest})
        return out


class ChatRows(ShardRows):
    """Conversations packed into rows. One of n tokens takes n - 1 places: its last token is only ever a target."""

    def __init__(self, tokens: Tokens, config: Config, split: str):
        masks = []
        for path, array, first in zip(tokens.paths, tokens.arrays, tokens.firsts, strict=True):
            file, length = path.with_suffix(".mask"), read_index(path.parent)["files"][path.name]["tokens"]
            if not file.exists() or file.stat().st_size != length:
                raise UserError(f"{file}: missing, or not a byte for each token of {path.name}: prepare the text again")
            mask = np.memmap(file, dtype=np.uint8, mode="r")
            masks.append((file, mask[first : first + len(array)], first))
        self.tokens, self.masks, self.config = tokens, Tokens(masks), config
        self.files = tokens.paths + self.masks.paths
        starts = [np.flatnonzero(m & BEGINS) for m in self.masks.arrays]
        offsets = self.masks.ends - [len(m) for m in self.masks.arrays]
        starts = np.concatenate([s + o for s, o in zip(starts, offsets, strict=True)] or [np.zeros(0, np.int64)])
        lengths = np.diff(np.append(starts, len(tokens))) - 1
        T, total = config.seq_len, len(starts)
        long = lengths > T
        lengths = np.minimum(lengths, T)
        kept = ~long if config.long_chats == "drop" else np.ones(total, dtype=bool)
        for i in np.flatnonzero(long & kept):  # what is left of it may hold nothing that is trained on
            kept[i] = (self.masks.read(int(starts[i]) + 1, int(starts[i]) + 1 + T) & TRAINED).any()
        truncated, dropped = int((long & kept).sum()), int((~kept).sum())
        self.starts, self.lengths = starts[kept], lengths[kept]
        if not kept.any():
            what = f"{total} conversations, and none is left ({dropped} are longer than --seq_len {T})"
            raise _too_little(split, what)
        order = permute(np.arange(kept.sum()), int(kept.sum()), f"{config.seed}/pack")
        row = pack(self.lengths[order], T)
        self.count = int(row.max()) + 1
        self.contents = np.split(order[np.argsort(row, kind="stable")], np.cumsum(np.bincount(row))[:-1])
        filled = self.lengths.sum() / (self.count * T)
        self.note = (
            f"{total} conversations, {truncated} truncated to --seq_len {T} and {dropped} dropped, packed into"
            f" {self.count} rows that are {filled:.1%} full"
        )

    def rows(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        T, vocab_size = self.config.seq_len, self.config.model_config.vocab_size
        tokens, targets = np.zeros((len(index), T), np.int64), np.full((len(index), T), IGNORE, np.int64)
        begins = np.zeros((len(index), T), dtype=bool)
        for i, row in enumerate(index):
            at = 0
            for document in self.contents[row]:
                start, n = int(self.starts[document]), int(self.lengths[document])
                ids = self.tokens.read(start, start + n + 1).astype(np.int64)
                if ids.max() >= vocab_size:
                    raise beyond_vocabulary(self.tokens, start + int(ids.argmax()), self.config)
                trained = self.masks.read(start + 1, start + n + 1) & TRAINED
                tokens[i, at : at + n], targets[i, at : at + n] = ids[:-1], np.where(trained, ids[1:], IGNORE)
                begins[i, at] = True
                at += n
            if at < T:
                begins[i, at] = True
        return tokens, targets, begins

    def begin(self, row: int) -> int:
        return int(self.starts[self.contents[row][0]])


def pack(lengths: np.ndarray, size: int) -> np.ndarray:
    """The row of each document, first-fit: into the first of the rows that it fits into. Of more than OPEN_ROWS rows
    with room the fullest is closed."""
    out = np.empty(len(lengths), dtype=np.int64)
    free, row, used, rows = np.zeros(OPEN_ROWS, np.int64), np.zeros(OPEN_ROWS, np.int64), 0, 0
    for i, n in enumerate(lengths.tolist()):
        fits = free[:used] >= n
        at = int(fits.argmax()) if used else 0
        if not used or not fits[at]:
            if used == OPEN_ROWS:  # the others move up: first-fit goes by age
                full = int(free.argmin())
                free[full:-1], row[full:-1] = free[full + 1 :].copy(), row[full + 1 :].copy()
                used -= 1
            at, used = used, used + 1
            free[at], row[at] = size, rows
            rows += 1
        free[at] -= n
        out[i] = row[at]
    return out


class StreamRows:
    """Rows of a stream: lanes, each from where it was. keep: rows are read again and again, from memory."""

    count = None  # no end

    def __init__(self, specs: tuple[str, ...], flag: str, config: Config, catalog: Catalog, keep: bool):
        self.config, self.specs, self.flag, self.keep = config, specs, flag, keep
        self.kept: dict[int, np.ndarray] = {}
        self.positions: dict[int, tuple] = {}
        self.recent: dict[int, str] = {}  # where the last rows are from
        self.stream = None
        self.delimiter = load_tokenizer(config.tokenizer).bos_id if config.delimiter < 0 else config.delimiter
        self.open(catalog)

    def open(self, catalog: Catalog) -> None:
        """Finds the files, as of the catalog's commits where it has any."""
        lists = [(spec, catalog.find(spec, self.flag)) for spec in self.specs]
        self.files = [f for _, files in lists for f in files]
        self.commits = {spec: files[0].commit for spec, files in lists if isinstance(files[0], Remote)}
        if len(self.files) < self.config.lanes:
            remote = [f for f in self.files if isinstance(f, Remote)]
            if remote:  # each is read by several lanes: once over the network, then from the disk
                self.identity = self._identify()
                there = dict(zip(remote, fetch_whole(remote), strict=True))
                self.files = [there.get(f, f) for f in self.files]
                self.note = self._note()
                return
        self.identity, self.note = self._identify(), self._note()

    def _identify(self) -> list[dict]:
        return [
            {"file": f.path, "commit": f.commit, "oid": f.oid}
            if isinstance(f, Remote)
            else {"file": f.name, "bytes": size_of(f)}
            for f in self.files
        ]

    def _note(self) -> str:
        lanes, n = self.config.lanes, len(self.files)
        note = f"a stream of {n} files for {lanes} lanes"
        return note + (f": each file is read by {-(-lanes // n)} of them" if n < lanes else "")

    def describe(self) -> list[dict]:
        c = self.config
        made = [c.lanes, c.text_field, load_tokenizer(c.tokenizer).fingerprint, self.identity]
        digest = hashlib.sha256(json.dumps(made).encode()).hexdigest()
        return [{"stream": list(self.specs), "files": len(self.identity), "commits": self.commits, "sha256": digest}]

    def rows(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        T, lanes = self.config.seq_len, self.config.lanes
        block = np.empty((len(index), T + 1), dtype=np.int64)
        for i, number in enumerate(index.tolist()):
            if number in self.kept:
                block[i] = self.kept[number]
                continue
            block[i], position = self.stream.take(number % lanes, number // lanes)
            self.positions[number % lanes] = position
            self.recent[number] = self.stream.plan.where(number % lanes, position)
            if len(self.recent) > RECENT:
                self.recent.pop(next(iter(self.recent)))
            if self.keep:
                self.kept[number] = block[i].astype(np.uint32)
        if len(block) and block.max() >= self.config.model_config.vocab_size:
            raise RankError(
                f"--tokenizer {self.config.tokenizer} gives id {block.max()}, but the model's vocab_size is"
                f" {self.config.model_config.vocab_size}; tokenizer and --model (or --vocab_size) must match"
            )
        begins = block[:, :-1] == self.delimiter if self.config.documents == "separate" else None
        return block[:, :-1], block[:, 1:], begins

    def where(self, number: int) -> str:
        return self.recent.get(number, f"row {number} of the stream")

    def start(self, lanes: list[int], positions: dict[int, tuple], streams: int = 1) -> None:
        """Begins to read so many lanes from there on. streams: how many share what may be read ahead."""
        if self.stream:
            self.stream.close()
        c = self.config
        ahead = read_ahead_bytes(c.read_ahead_gb) // (streams * len(lanes))
        plan = Plan(tuple(self.files), text_settings(c), c.lanes, c.seq_len, c.seed, c.skip_bad, ahead)
        self.positions = dict(positions)
        warn = logger.warning if logger.isEnabledFor(logging.WARNING) else download.say  # rank 0 has the log
        self.stream = Stream(plan, lanes, positions, warn)


def read_ahead_bytes(gb: float) -> int:
    """A rank's share of --read_ahead_gb, of which there is no more than half of the disk's free room."""
    room = min(gb * 2**30, shutil.disk_usage(tempfile.gettempdir()).free / 2)
    return int(room / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _is_stream(specs: tuple[str, ...], flag: str, config: Config, catalog: Catalog) -> bool:
    """Whether entries are streamed: text of the hub, and with --stream all text. Conversations never are."""
    remote = [s for s in specs if s.startswith("hf://")]
    if not remote and not (config.stream and specs and all(map(is_text, specs))):
        return False
    first = catalog.find(specs[0], flag)[0]
    if isinstance(first, Remote) and kind_of(first.path) == ".parquet":  # its table of contents is at its end
        (first,) = fetch_whole([first])
    fields = (config.text_field, "messages", "prompt", "completion")
    row = next((r for r, _ in read_rows(first, fields, 0, 0)), None)
    if row is None:
        raise UserError(f"{flag} {first} is empty")
    encoded, bad = encode_rows(text_settings(config), str(first.path if isinstance(first, Remote) else first), [row])
    if bad and not config.skip_bad:
        raise UserError(f"{bad[0]}; --skip_bad N leaves out up to N such rows per lane")
    if any(e.mask is not None for e in encoded.values()):
        return False
    if len(remote) < len(specs) and not config.stream:
        raise UserError(f"{flag}: text of the hub is streamed and the rest is not: give each its weight, or --stream")
    return True


def beyond_vocabulary(tokens: Tokens, at: int, config: Config) -> RankError:
    return RankError(
        f"{tokens.where(at)}: id {tokens.read(at, at + 1)[0]}, but the model's vocab_size is"
        f" {config.model_config.vocab_size}; tokenizer and --model (or --vocab_size) must match"
    )
