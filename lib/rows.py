"""Where rows come from: token shards, conversations packed into rows, streams; what an entry of --data names.

A source has `count`, the rows per epoch (None for streams, which have no end), `rows(index)` -> tokens [n, T], targets
[n, T] and begins [n, T] (a document begins here; None: a row is one sequence), `note`, a line for the log, and
`describe()` and `paths`, by which a checkpoint knows it again. Text is tokenised once, into shards in the cache, or
streamed (stream.py)."""

import hashlib
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

import hub as download
from config import Config
from lib.errors import RankError, UserError
from lib.text import (
    BEGINS,
    ID,
    TRAINED,
    VAL_EVERY,
    BadRow,
    BuiltinText,
    Encoder,
    TextFile,
    is_shards,
    kind_of,
    knows_text,
)  # fmt: skip
from lib.tokenizer import load_tokenizer
from model import IGNORE
from prepare import SIZES, find_shards, key_of, open_shard, prepare, read_index
from stream import cores, fetch_whole, find_text, permute

VAL_NAME = re.compile(r"(?:^|[^a-z])val(?:id|idation)?(?:[^a-z]|$)", re.IGNORECASE)
CACHE = Path(__file__).parent.parent / "cache"
PARALLEL = 2**25  # bytes of text from which it is tokenised by several processes
OPEN_ROWS = 1000  # rows that a conversation may still be packed into
BLOCK, READ = 2**16, 2**27  # bytes: of a file that are compared at a place, and of all files; see sample_digest


def sample_digest(files: list[Path]) -> str:
    """By which the content of files is known again, without reading all of it: each is cut into equal stretches, and of
    each stretch one BLOCK at a random place (always the same one) is hashed. Up to READ bytes all is; of more files
    than 32 at least 64 blocks of each are."""
    blocks = max(64, READ // BLOCK // max(1, len(files)))

    def digest(path):
        size, rng, hashed = path.stat().st_size, random.Random(0), hashlib.sha256()
        stretch = max(BLOCK, size // blocks)
        with open(path, "rb", buffering=0) as file:
            for start in range(0, size, stretch):
                file.seek(start + int(rng.random() * (stretch - BLOCK + 1)))
                hashed.update(file.read(BLOCK))
        return hashed.hexdigest()

    with ThreadPoolExecutor(16) as threads:  # a disk far away is slow to seek
        return hashlib.sha256("".join(threads.map(digest, files)).encode()).hexdigest()


# ---- what entries of --data name


def make_encoder(config: Config) -> Encoder:
    return Encoder(config.tokenizer, config.text_field, config.model_config.chat_format, config.chat_fields)


def tokenize(sources: list[TextFile], config: Config) -> list[Path]:
    """Tokenises text into a folder of the cache, once -> its shards."""
    encoder, skip_bad = make_encoder(config), config.skip_bad
    key = key_of(sources, encoder, VAL_EVERY, skip_bad)  # other rows are left out: another folder
    folder = CACHE / f"{Path(sources[0].name).name.partition('.')[0]}-{key[:12]}"
    if not read_index(folder):
        processes = cores() if sum(s.size for s in sources) > PARALLEL else 0
        prepare(sources, encoder, folder, processes=processes, skip_bad=skip_bad)
    return sorted(folder.glob("*.bin"))


class Part(NamedTuple):
    """A stretch of a shard."""

    path: Path
    tokens: np.ndarray
    first: int  # the number of its first token in the shard


class Tokens:
    """Parts of shards as one sequence of tokens. What is read of it is refused where it has ids beyond the
    vocabulary."""

    def __init__(self, parts: list[Part], is_chat: bool, config: Config):
        self.parts, self.is_chat, self.config = parts, is_chat, config
        lengths = np.array([len(p.tokens) for p in parts], dtype=np.int64)
        self.ends = np.cumsum(lengths)
        self.begins = self.ends - lengths

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.parts else 0

    def _slice(self, start, stop):
        first, last = np.searchsorted(self.ends, (start, stop - 1), side="right")
        begins = self.begins[first : last + 1].tolist()
        pieces = zip(self.parts[first : last + 1], begins, strict=True)
        return np.concatenate([part.tokens[max(start - begin, 0) : stop - begin] for part, begin in pieces])

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._checked(self._slice(start, stop), [start])

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """[len(starts), length]: tokens from each start on. Those inside one shard are copied by numpy, row by row."""
        out = np.empty((len(starts), length), dtype=np.result_type(*{p.tokens.dtype for p in self.parts}))
        parts = np.searchsorted(self.ends, starts, side="right")
        inside = starts + length <= self.ends[parts]
        for i in set(parts[inside].tolist()):
            here = inside & (parts == i)
            out[here] = sliding_window_view(self.parts[i].tokens, length)[starts[here] - self.begins[i]]
        for i in np.flatnonzero(~inside):
            out[i] = self._slice(int(starts[i]), int(starts[i]) + length)
        return self._checked(out, starts)

    def _checked(self, tokens, starts):
        """The same tokens, whose rows begin at these places."""
        ids = tokens & ID if self.is_chat else tokens
        if ids.size and ids.max() >= self.config.model_config.vocab_size:
            row, at = divmod(int(ids.argmax()), ids.shape[-1])
            raise RankError(
                f"{self.where(int(starts[row]) + at)}: id {ids.max()}, but the model's vocab_size is"
                f" {self.config.model_config.vocab_size}; tokenizer and --model (or --vocab_size) must match"
            )
        return tokens

    def check_ids(self) -> None:
        """Refuses ids beyond the vocabulary. Of more than 2^27 tokens 64 stretches of each part are looked at."""
        for begin, end in zip(self.begins.tolist(), self.ends.tolist(), strict=True):
            step, count = (2**24, 2**24) if len(self) <= 2**27 else (max(1, (end - begin) // 64), 2**14)
            for start in range(begin, end, step):
                self.read(start, min(start + count, end))

    def where(self, position: int) -> str:
        """A place in a file of the user's; of text that was tokenised into the cache, the files that it is from."""
        i = int(np.searchsorted(self.ends, position, side="right"))
        path, _, first = self.parts[i]
        if not path.is_relative_to(CACHE):
            return f"{path} at token {first + position - self.begins[i]}"
        names = read_index(path.parent)["sources"]
        return ", ".join(names[:3]) + (f" or {len(names) - 3} more" if len(names) > 3 else "")


class Catalog:
    """What entries of --data and --val_data name: looked up once in a job, for `listed` and `streamed` can be told to
    other ranks, and opened once in a process. commits: those that hub addresses are to be read at, where a run goes
    on."""

    def __init__(self, config: Config, commits: dict[str, str] | None = None):
        self.config, self.commits = config, commits or {}
        self.listed = {}  # the files of an entry
        self.streamed = {}
        self.shards = {}

    def find(self, spec: str, flag: str) -> list[TextFile]:
        if spec not in self.listed:
            tries = download.TRIES if self.commits else download.LIST_TRIES  # a run that goes on has patience
            self.listed[spec] = find_text(spec, flag, self.commits.get(spec, ""), tries)
        return self.listed[spec]

    def is_stream(self, specs: tuple[str, ...], flag: str) -> bool:
        if specs not in self.streamed:
            self.streamed[specs] = self._is_stream(specs, flag)
        return self.streamed[specs]

    def open(self, split: str, specs: tuple[str, ...], flag: str) -> tuple[Tokens, int | None]:
        """-> (the tokens of a split, "train" or "val"; the id before each document, None if unknown). With --val_data
        that is the validation split and all of --data trains; else shards named *val* are, else a held-out 1/20."""
        config = self.config
        if specs not in self.shards:
            self.shards[specs] = self._open_shards(specs, flag)
        train, val, delimiter, is_chat = self.shards[specs]
        if config.val_data and split == "train":
            val = [p for p in val if read_index(p.path.parent) or not VAL_NAME.search(p.path.stem)]
        tokens = Tokens(train + val if config.val_data else train if split == "train" else val, is_chat, config)
        if len(tokens) < config.seq_len + 1 and not is_chat:
            raise _too_little(split, f"{len(tokens)} tokens, one row needs seq_len + 1 = {config.seq_len + 1}")
        return tokens, delimiter if config.delimiter < 0 else config.delimiter

    def _is_stream(self, specs, flag):
        """Whether entries are streamed: text of the hub, and with --stream all text. Conversations never are."""
        remote = [s for s in specs if s.startswith("hf://")]
        if not remote and not (self.config.stream and specs and not any(map(is_shards, specs))):
            return False
        first = self.find(specs[0], flag)[0]
        if kind_of(first.name) == ".parquet":  # its table of contents is at its end
            (first,) = fetch_whole([first])
        encoder = make_encoder(self.config)
        row, _ = next(first.rows(encoder.fields, 0, 0), (None, 0))
        if row is None:
            raise UserError(f"{flag} {first} is empty")
        try:
            _, kind = encoder(str(first), row)
        except BadRow:
            if not self.config.skip_bad:
                raise
            kind = "text"
        if kind == "text" and len(remote) < len(specs) and not self.config.stream:
            raise UserError(
                f"{flag}: text of the hub is streamed and the rest is not: give each its weight, or --stream"
            )
        return kind == "text"

    def _open_shards(self, specs, flag):
        """-> (parts for training, for validation, the id before a document if they agree on one, is it chat)"""
        parts, delimiters, kinds = {"train": [], "val": []}, set(), set()
        for path, split in self._find_shards(specs, flag):
            tokens, delimiter = open_shard(path, self.config.data_dtype)
            index = read_index(path.parent)
            if index:
                _check_index(index, path, len(tokens), self.config)
                delimiter, split = index["delimiter"], split or "train"
            delimiters.add(delimiter)
            kinds.add(index.get("kind", "text"))
            cut = {"train": len(tokens), "val": 0, "": len(tokens) - len(tokens) // VAL_EVERY}[split]
            for name, stretch, first in (("train", tokens[:cut], 0), ("val", tokens[cut:], cut)):
                if len(stretch):
                    parts[name].append(Part(path, stretch, first))
        if len(kinds) > 1:
            raise UserError(f"{flag}: conversations and text together: give each its weight, as in A:0.5 B:0.5")
        return *parts.values(), delimiters.pop() if len(delimiters) == 1 else None, kinds == {"chat"}

    def _find_shards(self, specs, flag):
        """(a shard, its split: train, val, or empty where neither its name nor its neighbours' say it). Text is
        tokenised; that of the hub holds conversations, or it would be streamed."""
        remote = [spec for spec in specs if spec.startswith("hf://")]
        texts = [file for spec in remote for file in fetch_whole(self.find(spec, flag))]
        files = [file for spec in specs if spec not in remote for file in find_shards(spec, flag)]
        texts += [TextFile(str(file)) for file in files if file.suffix != ".bin"]
        for text in texts:
            if not text.size:
                raise UserError(f"{flag} {text} is empty")
        made = tokenize(texts or [BuiltinText()], self.config) if texts or not specs else []
        return _split_by_name([file for file in files if file.suffix == ".bin"]) + _split_by_name(made)


def _split_by_name(shards):
    held_out = {path for path in shards if VAL_NAME.search(path.stem)}
    other = "train" if held_out else ""
    return [(path, "val" if path in held_out else other) for path in shards]


def _check_index(index, path, tokens, config):
    """Whether a shard is the one that was prepared, and by this run's tokenizer."""
    known = index["files"].get(path.name, {}).get("tokens", "nothing of it")
    if known != tokens:
        raise UserError(
            f"{path}: {tokens} tokens, its index.json says {known}: the folder has changed;"
            f" `python data.py verify {path.parent}` checks all of it"
        )
    if config.tokenizer != "bytes" and index["fingerprint"] != load_tokenizer(config.tokenizer).fingerprint:
        raise UserError(
            f"{path.parent} was prepared with --tokenizer {index['tokenizer']}, which is another one than"
            f" {config.tokenizer}: name that one, or prepare the text again"
        )


def _too_little(split, what):
    name = "training data" if split == "train" else "validation split"
    mend = "" if split == "train" else ", name a --val_data, or turn evaluation off with --eval_every 0"
    return UserError(f"The {name} has {what}: give more text or a smaller --seq_len{mend}")


# ---- sources


class ShardRows:
    """Rows of seq_len tokens of a long sequence."""

    note = ""

    def __init__(self, tokens: Tokens, delimiter: int | None, config: Config):
        if config.documents == "separate" and delimiter is None:
            raise UserError(
                "--documents separate needs the id of the token that begins a document,"
                " which these shards do not say: give --delimiter ID"
            )
        self.tokens, self.delimiter, self.config = tokens, delimiter, config
        self.count = (len(tokens) - 1) // config.seq_len

    @property
    def paths(self) -> list[Path]:
        return [part.path for part in self.tokens.parts]

    def rows(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        T = self.config.seq_len
        block = self.tokens.windows(index * T, T + 1)
        begins = block[:, :-1] == self.delimiter if self.config.documents == "separate" else None
        return block[:, :-1], block[:, 1:], begins

    def begin(self, row: int) -> int:
        """The place of a row's first token."""
        return row * self.config.seq_len

    def where(self, row: int) -> str:
        """The place of a row, and its first characters, if it is known what its tokens mean."""
        where = self.tokens.where(self.begin(row))
        if not knows_text(self.config):
            return where
        ids = self.rows(np.array([row]))[0][0, :400].tolist()
        return f"{where}: {load_tokenizer(self.config.tokenizer).decode(ids)[:80]!r}"

    def describe(self) -> list[dict]:
        """Name and size of each part."""
        return [{"file": path.name, "tokens": len(tokens)} for path, tokens, _ in self.tokens.parts]


class ChatRows(ShardRows):
    """Conversations packed into rows. One of n tokens takes n - 1 places: its last token is only ever a target."""

    def __init__(self, tokens: Tokens, config: Config, split: str):
        self.tokens, self.config = tokens, config
        T, parts = config.seq_len, zip(tokens.parts, tokens.begins, strict=True)
        starts = [begin + np.flatnonzero(part.tokens >= BEGINS) for part, begin in parts]
        starts = np.concatenate([*starts, np.zeros(0, np.int64)])  # there may be no part
        lengths = np.diff(np.append(starts, len(tokens))) - 1
        is_long = lengths > T
        lengths = np.minimum(lengths, T)
        kept = ~is_long | (config.long_chats != "drop")
        for i in np.flatnonzero(is_long & kept):  # what is left of it may hold nothing that is trained on
            kept[i] = (tokens.read(int(starts[i]) + 1, int(starts[i]) + 1 + T) & TRAINED).any()
        total, count, truncated = len(kept), int(kept.sum()), int((is_long & kept).sum())
        if not count:
            what = f"{total} conversations, and none is left ({total} are longer than --seq_len {T})"
            raise _too_little(split, what)
        self.starts, self.lengths = starts[kept], lengths[kept]
        order = permute(np.arange(count), count, f"{config.seed}/pack")
        row = pack(self.lengths[order], T)
        self.count = int(row.max()) + 1
        self.contents = np.split(order[np.argsort(row, kind="stable")], np.cumsum(np.bincount(row))[:-1])
        self.note = (
            f"{total} conversations, {truncated} truncated to --seq_len {T} and {total - count} dropped, packed into"
            f" {self.count} rows that are {self.lengths.sum() / (self.count * T):.1%} full"
        )

    def rows(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = len(index), self.config.seq_len
        tokens, targets, begins = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64), np.zeros(shape, bool)
        for i, row in enumerate(index):
            at = 0
            for document in self.contents[row]:
                start, n = int(self.starts[document]), int(self.lengths[document])
                ids = self.tokens.read(start, start + n + 1).astype(np.int64)
                tokens[i, at : at + n] = ids[:-1] & ID
                targets[i, at : at + n] = np.where(ids[1:] & TRAINED, ids[1:] & ID, IGNORE)
                begins[i, at] = True
                at += n
            begins[i, at : at + 1] = True
        return tokens, targets, begins

    def begin(self, row: int) -> int:
        return int(self.starts[self.contents[row][0]])


def text_bytes(sources: list, which: np.ndarray, rows: np.ndarray) -> tuple[int, int]:
    """(bytes of text, tokens) of what is trained on in rows of several sources; which: the source of each row. (0, 0)
    if one of them is a stream, or does not say how long its tokens are."""
    size = tokens = 0
    for i, source in enumerate(sources):
        files = [part.path.with_name(SIZES) for part in source.tokens.parts] if source.count else [Path()]
        if not all(file.is_file() for file in files):
            return 0, 0
        sizes, ours = np.load(files[0]), rows[which == i]
        for block in np.array_split(ours, len(ours) // OPEN_ROWS + 1):
            targets = source.rows(block)[1]
            trained = targets[targets != IGNORE]
            size, tokens = size + int(sizes[trained].sum()), tokens + len(trained)
    return size, tokens


def pack(lengths: np.ndarray, size: int) -> np.ndarray:
    """The row of each document, first-fit: into the first of the rows that it fits into. Of more than OPEN_ROWS rows
    with room the fullest is closed."""
    out, rows = np.empty(len(lengths), dtype=np.int64), 0
    room, row = np.full(OPEN_ROWS, -1), np.zeros(OPEN_ROWS, dtype=np.int64)  # of the open rows, the oldest first
    for i, n in enumerate(lengths.tolist()):
        at = int((room >= n).argmax())
        if room[at] < n:
            at = int(room.argmin())  # one that is not open yet, or the fullest
            room[at:-1], row[at:-1] = room[at + 1 :].copy(), row[at + 1 :].copy()
            at, room[-1], row[-1], rows = -1, size, rows, rows + 1
        room[at] -= n
        out[i] = row[at]
    return out
