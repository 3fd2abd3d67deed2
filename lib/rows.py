"""Sources of rows: token shards, packed conversations and streams; the files that an entry of --data names.

A source has `count` (rows per epoch; None for streams, which have no end), `rows(index)` -> tokens [n, T], targets
[n, T] and begins [n, T] (a document begins here; None: a row is one sequence), `note` (a line for the log), and
`describe()` and `paths`, which enter a checkpoint's fingerprint of the data. Local text is tokenised once, into
shards in the cache; hf:// text, and all text with --stream, is streamed: tokenised while it is trained on.

The files of a stream are dealt to a fixed number of lanes, file f to lane f mod lanes; if there are fewer files than
lanes, the rows of a file are dealt to its lanes. A lane joins its documents and cuts them into rows of seq_len tokens
and their successors; its epochs follow one another, each with another order of its files. Global row r of the run is
the next row of lane r mod lanes: the same rows in the same order on any number of ranks. Each rank reads the lanes of
its rows. The position of a lane is (rows given, epoch, file, row, token in that row's document, bad rows left
out); a resume reads its current file from the beginning up to that row. A thread per lane reads ahead, and worker
processes tokenise."""

import hashlib
import json
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from config import Config
from lib import text
from lib.errors import Failure, RankError, UserError, read_ahead
from lib.text import TextFile, open_shard, prepare, read_index
from lib.tokenizer import load_tokenizer, token_sizes
from model import IGNORE

VAL_NAME = re.compile(r"(?:^|[^a-z])val(?:id|idation)?(?:[^a-z]|$)", re.IGNORECASE)
CACHE = Path(__file__).parent.parent / "cache"
OPEN_ROWS = 1000  # rows that a conversation may still be packed into
MAX_WORKERS = 8  # per rank
LANE_BATCH = 2**16  # bytes of a lane's text that are tokenised together
RECENT = 4096  # rows of a stream whose positions are remembered
PAUSES = 10, 60, 120, 240  # seconds before a hub that failed is asked again
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


def turns(index: np.ndarray, weights: list[Fraction]) -> tuple[np.ndarray, np.ndarray]:
    """The turns at the given places of a mixture -> (source, the index of its turn). For every n, a source of weight w
    has n w of the first n places, with an error below one turn per source listed before it."""
    source, number = np.zeros_like(index), index.copy()
    if len(weights) == 1:
        return source, number
    rest, left = np.arange(len(index)), sum(weights, Fraction(0))
    for i, weight in enumerate(weights):
        share = (weight / left).limit_denominator(2**30) if left else Fraction(1)
        n, d = share.numerator, share.denominator
        turn = number[rest]
        before = turn // d * n + turn % d * n // d  # floor(turn n / d), whose products fit 64 bits
        taken = (turn % d + 1) * n // d > turn % d * n // d
        source[rest[taken]], number[rest[taken]] = i, before[taken]
        number[rest[~taken]] = (turn - before)[~taken]
        rest, left = rest[~taken], left - weight
    return source, number


# ---- what entries of --data name


def make_encoder(config: Config) -> text.Encoder:
    return text.Encoder(config.tokenizer, config.text_field, config.model_config.chat_format, config.chat_fields)


def tokenize(sources: list[TextFile], config: Config) -> list[Path]:
    """Tokenises text into a folder of the cache, once -> its shards."""
    encoder, skip_bad = make_encoder(config), config.skip_bad
    key = text.key_of(sources, encoder, text.VAL_EVERY, skip_bad)  # skip_bad changes which rows remain
    folder = CACHE / f"{Path(sources[0].name).name.partition('.')[0]}-{key[:12]}"
    prepare(sources, encoder, folder, skip_bad=skip_bad)
    return sorted(folder.glob("*.bin"))


class Part(NamedTuple):
    """A stretch of a shard."""

    path: Path
    tokens: np.ndarray
    first: int  # the number of its first token in the shard


class Tokens:
    """Parts of shards as one sequence of tokens. Reading an id beyond the vocabulary raises RankError."""

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
        return self.windows([start], stop - start)[0]

    def windows(self, starts: list[int], length: int) -> np.ndarray:
        """[len(starts), length]: the tokens after each start."""
        rows = np.array([self._slice(start, start + length) for start in starts]).reshape(-1, length)
        ids = rows & text.ID if self.is_chat else rows
        if ids.size and ids.max() >= self.config.model_config.vocab_size:
            row, at = divmod(int(ids.argmax()), length)
            raise RankError(
                f"{self.where(starts[row] + at)}: id {ids.max()}, but the model's vocab_size is"
                f" {self.config.model_config.vocab_size}; tokenizer and --model (or --vocab_size) must match"
            )
        return rows

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
    """The files that entries of --data and --val_data name: looked up once in a job, opened once in a process. Rank 0
    sends `listed` and `streamed` to the other ranks. commits: the commits that a resumed run reads hub addresses at."""

    def __init__(self, config: Config, commits: dict[str, str] | None = None):
        self.config, self.commits = config, commits or {}
        self.listed = {}  # the files of an entry
        self.streamed = {}
        self.shards = {}

    def find(self, spec: str, flag: str) -> list[TextFile]:
        if spec not in self.listed:
            self.listed[spec] = text.find_files(spec, flag, commit=self.commits.get(spec, ""))
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
        if not remote and not (self.config.stream and specs and not any(map(text.is_shards, specs))):
            return False
        first = self.find(specs[0], flag)[0]
        encoder = make_encoder(self.config)
        row = next(first.rows(0, 0), None)
        if row is None:
            raise UserError(f"{flag} {first} is empty")
        ((message, kind),) = text.encode_rows(encoder, str(first), [row])
        if kind == "bad" and not self.config.skip_bad:
            raise UserError(message)
        if kind != "chat" and len(remote) < len(specs) and not self.config.stream:
            raise UserError(
                f"{flag}: text of the hub is streamed and the rest is not: give each its weight, or --stream"
            )
        return kind != "chat"

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
            cut = {"train": len(tokens), "val": 0, "": len(tokens) - len(tokens) // text.VAL_EVERY}[split]
            for name, stretch, first in (("train", tokens[:cut], 0), ("val", tokens[cut:], cut)):
                if len(stretch):
                    parts[name].append(Part(path, stretch, first))
        if len(kinds) > 1:
            raise UserError(f"{flag}: conversations and text together: give each its weight, as in A:0.5 B:0.5")
        return *parts.values(), delimiters.pop() if len(delimiters) == 1 else None, kinds == {"chat"}

    def _find_shards(self, specs, flag):
        """(a shard, its split: train, val, or empty where neither its name nor its neighbours' say it). Text is
        tokenised. Text of the hub holds conversations here; other text is streamed."""
        remote = [spec for spec in specs if spec.startswith("hf://")]
        texts = [file for spec in remote for file in text.fetch_whole(self.find(spec, flag))]
        files = [file for spec in specs if spec not in remote for file in text.find_files(spec, flag, text.SHARDS)]
        texts += [file for file in files if not file.name.endswith(".bin")]
        for file in texts:
            if not file.size:
                raise UserError(f"{flag} {file} is empty")
        made = tokenize(texts or [text.builtin_file()], self.config) if texts or not specs else []
        shards = [Path(file.name) for file in files if file.name.endswith(".bin")]
        return _split_by_name(shards) + _split_by_name(made)


def _split_by_name(shards):
    held_out = {path for path in shards if VAL_NAME.search(path.stem)}
    other = "train" if held_out else ""
    return [(path, "val" if path in held_out else other) for path in shards]


def _check_index(index, path, tokens, config):
    """Refuses a shard that has changed since it was prepared, or was prepared with another tokenizer."""
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


class TooLittle(UserError):
    """A split has no row."""


def _too_little(split, what, size="smaller"):
    name = "training data" if split == "train" else "validation split"
    more = "" if split == "train" else ", name a --val_data, or turn evaluation off with --eval_every 0"
    return TooLittle(f"The {name} has {what}: give more text or a {size} --seq_len{more}")


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
        block = self.tokens.windows((index * T).tolist(), T + 1)
        begins = block[:, :-1] == self.delimiter if self.config.documents == "separate" else None
        return block[:, :-1], block[:, 1:], begins

    def begin(self, row: int) -> int:
        """The place of a row's first token."""
        return row * self.config.seq_len

    def where(self, row: int) -> str:
        """The place of a row, and its first characters, if it is known what its tokens mean."""
        where = self.tokens.where(self.begin(row))
        if not text.knows_text(self.config):
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
        starts = [begin + np.flatnonzero(part.tokens >= text.BEGINS) for part, begin in parts]
        starts = np.concatenate([*starts, np.zeros(0, np.int64)])  # parts may be empty
        lengths = np.diff(np.append(starts, len(tokens))) - 1
        is_long = lengths > T
        lengths = np.minimum(lengths, T)
        kept = ~is_long | (config.long_chats != "drop")
        for i in np.flatnonzero(is_long & kept):  # the rest may contain no trained token
            kept[i] = (tokens.read(int(starts[i]) + 1, int(starts[i]) + 1 + T) & text.TRAINED).any()
        total, count, truncated = len(kept), int(kept.sum()), int((is_long & kept).sum())
        if not count:
            what = f"{total} conversations, and none is left ({total} are longer than --seq_len {T})"
            raise _too_little(split, what, "larger")
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
                tokens[i, at : at + n] = ids[:-1] & text.ID
                targets[i, at : at + n] = np.where(ids[1:] & text.TRAINED, ids[1:] & text.ID, IGNORE)
                begins[i, at] = True
                at += n
            begins[i, at : at + 1] = True
        return tokens, targets, begins

    def begin(self, row: int) -> int:
        return int(self.starts[self.contents[row][0]])


class Stream:
    """A source of rows without end. catalog: finds the files of an entry. keep: rows are read again and again, from
    memory."""

    count = None

    def __init__(self, specs: tuple[str, ...], flag: str, config: Config, catalog: Catalog, keep: bool):
        self.specs, self.flag, self.config, self.keep = specs, flag, config, keep
        self.encoder = make_encoder(config)
        self.kept = {}  # rows by their number
        self.recent = {}  # the position after each of the last rows
        self.lanes, self.positions, self.workers = {}, {}, None  # lanes: the rows to come of each
        self.awaited = ""  # the lane on the hub that a step waits for
        tokenizer = load_tokenizer(config.tokenizer)
        self.fingerprint = tokenizer.fingerprint
        self.delimiter = tokenizer.bos_id if config.delimiter < 0 else config.delimiter
        self.open(catalog)

    def open(self, catalog: Catalog) -> None:
        """Finds the files, at the catalog's commits if it has any."""
        lists = {spec: catalog.find(spec, self.flag) for spec in self.specs}
        self.files, lanes = sum(lists.values(), []), self.config.lanes
        self.commits = {spec: text.ADDRESS.fullmatch(files[0].name)[2] for spec, files in lists.items() if files[0].hub}
        self.identity = [(Path(file.name).name, file.size) for file in self.files]  # wherever they are
        self.note = f"a stream of {len(self.files)} files for {lanes} lanes"
        if len(self.files) < lanes:
            self.note += f": each file is read by {-(-lanes // len(self.files))} of them"
            self.files = [f for files in lists.values() for f in text.fetch_whole(files)]  # once over the network

    @property
    def paths(self) -> list[Path]:
        return [Path(file.name) for file in self.files if not file.hub]

    def describe(self) -> list[dict]:
        made = [self.config.lanes, self.encoder.text_field, self.fingerprint, self.identity]
        digest = hashlib.sha256(json.dumps(made).encode()).hexdigest()
        return [{"stream": list(self.specs), "files": len(self.identity), "commits": self.commits, "sha256": digest}]

    def start(self, positions: dict[str, list]) -> None:
        """The next rows are those after these positions of lanes."""
        self.close()
        self.positions = {int(lane): tuple(position) for lane, position in positions.items()}

    def state(self) -> dict[str, list]:
        return {str(lane): list(position) for lane, position in self.positions.items()}

    def close(self) -> None:
        self.lanes.clear()
        if self.workers:
            self.workers.shutdown(cancel_futures=True)
            self.workers = None

    def _files(self, lane, epoch):
        """The files of a lane in the order of an epoch."""
        files = self.files[lane % len(self.files) :: self.config.lanes]
        return [files[i] for i in permute(np.arange(len(files)), len(files), f"{self.config.seed}/{epoch}/{lane}")]

    def _read(self, file, first):
        """The rows of a file from number `first` on. A hub that fails is asked again after each of PAUSES."""
        for seconds in (*PAUSES, 0):
            try:
                for row in file.rows(max(first - 1, 0), 0):
                    first = row.number + 1
                    yield row
                return
            except Failure as e:
                if not seconds:
                    raise
                text.log.warning(f"{e}; next try in {seconds} s")
                time.sleep(seconds)

    def _jobs(self, lane, epoch, at, first):
        """A lane's rows from a place on, without end: ((epoch, file), name, rows)."""
        n, lanes = len(self.files), self.config.lanes
        turn, sharing = lane // n, len(range(lane % n, lanes, n))
        while True:
            is_empty = not (at or first)
            for k, file in list(enumerate(self._files(lane, epoch)))[at:]:
                rows = (row for row in self._read(file, first) if (row.number - 1) % sharing == turn)
                for group in text.group_rows(rows, LANE_BATCH):
                    is_empty = False
                    yield (epoch, k), str(file), group
                first = 0
            if is_empty:
                raise UserError(
                    f"Lane {lane} has no rows: {', '.join(map(str, self.files[:3]))} hold fewer rows than lanes; give a"
                    f" smaller --lanes than {lanes}, or leave out --stream"
                )
            epoch, at = epoch + 1, 0

    def _rows(self, lane):
        """(seq_len + 1 tokens, the position after them) of a lane, without end."""
        T, (given, epoch, at, first, offset, bad) = self.config.seq_len, self.positions.get(lane, (0,) * 6)
        tokens, begins = np.zeros(0, np.uint32), []  # begins: of the documents in tokens, (where it begins, its place)
        jobs, skip_bad = self._jobs(lane, epoch, at, first), self.config.skip_bad
        for place, row, ids, _, skipped in text.encode(jobs, self.encoder, self.workers, 1, skip_bad, bad, "text"):
            begins.append((len(tokens) - offset, (*place, row.number, skipped)))
            tokens, offset = np.concatenate((tokens, np.frombuffer(ids, np.uint32)[offset:])), 0
            while len(tokens) > T:
                while len(begins) > 1 and begins[1][0] <= T:
                    begins.pop(0)
                begin, (epoch, file, number, skipped_then) = begins[0]
                given += 1
                yield tokens[: T + 1], (given, epoch, file, number, T - begin, skipped_then)
                tokens, begins = tokens[T:], [(begin - T, place) for begin, place in begins]

    def _take(self, number):
        if number in self.kept:
            return self.kept[number]
        turn, lane = divmod(number, self.config.lanes)
        self.awaited = f"lane {lane} of {' '.join(self.commits)}" if self.commits else ""
        try:
            # The rows before it belong to other ranks.
            tokens, position = next(row for row in self.lanes[lane] if row[1][0] > turn)
        except UserError as e:
            raise RankError(str(e)) from None  # other ranks may not have met it
        self.awaited = ""
        assert position[0] == turn + 1, f"lane {lane} is behind row {turn}: {position}"
        self.positions[lane] = self.recent[number] = position
        if len(self.recent) > RECENT:
            self.recent.pop(next(iter(self.recent)))
        if self.keep:
            self.kept[number] = tokens
        return tokens

    def rows(self, index: np.ndarray) -> tuple:
        numbers = index.tolist()
        for lane in dict.fromkeys(n % self.config.lanes for n in numbers if n not in self.kept):
            if not self.workers:
                ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
                self.workers = text.start_workers(max(1, min(MAX_WORKERS, text.cores() // ranks - 1)))
            if lane not in self.lanes:  # start its reading thread
                self.lanes[lane] = read_ahead(self._rows(lane), 8)
        block = np.array([self._take(n) for n in numbers], np.int64).reshape(-1, self.config.seq_len + 1)
        begins = block[:, :-1] == self.delimiter if self.config.documents == "separate" else None
        return block[:, :-1], block[:, 1:], begins

    def where(self, number: int) -> str:
        """The file and row in which a recent row of the stream ends."""
        if number not in self.recent:
            return f"row {number} of the stream"
        lane, (_, epoch, file, row, *_) = number % self.config.lanes, self.recent[number]
        return f"{self._files(lane, epoch)[file]} up to row {row} (lane {lane}, epoch {epoch})"


def text_bytes(loader) -> tuple[int, int]:
    """(bytes of text, tokens) of the trained tokens that a validation loader gives. (0, 0) if a source is a stream, or
    the text of its tokens is not known."""
    config = loader.config
    if loader.streams or not text.knows_text(config):
        return 0, 0
    sizes, size, tokens = np.zeros(config.model_config.vocab_size, np.int64), 0, 0
    known = token_sizes(load_tokenizer(config.tokenizer))
    sizes[: len(known)] = known
    which, rows = loader.val_rows
    for i, source in enumerate(loader.sources):
        ours = rows[which == i]
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
            at = int(room.argmin())  # a row that is not open yet, or the fullest row
            room[at:-1], row[at:-1] = room[at + 1 :].copy(), row[at + 1 :].copy()
            at, room[-1], row[-1], rows = -1, size, rows, rows + 1
        room[at] -= n
        out[i] = row[at]
    return out
