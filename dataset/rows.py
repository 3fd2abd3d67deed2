"""Sources of rows: token shards, packed conversations and streams; the files that an entry of --data names.

A source has `count` (rows per epoch; None for streams, which have no end), `rows(index)` -> tokens [n, T], targets
[n, T] and begins [n, T] (a document begins here), `note` (a line for the log), and `about` and `hashes` ({file: its
recorded hash, or ""}), which enter a checkpoint's fingerprint of the data. Local text is tokenised once, into
shards in the cache; text of addresses (hf://, s3:// ...), and all text with --stream, is streamed: tokenised while it
is trained on.

The files of a stream are dealt to a fixed number of lanes, file f to lane f mod lanes; if there are fewer files than
lanes, the rows of a file are dealt to its lanes. A lane joins its documents and cuts them into rows of seq_len tokens
and their successors; its epochs follow one another, each with another order of its files. Global row r of the run is
the next row of lane r mod lanes: the same rows in the same order on any number of ranks. Each rank reads the lanes of
its rows. The position of a lane is (rows given, epoch, file, row, token in that row's document, bad rows left
out); a resume reads its current file from the beginning up to that row. A thread per lane reads ahead, and worker
processes tokenise."""

import functools
import hashlib
import importlib.metadata
import itertools
import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from base import disk
from base.disk import plural, read_ahead, retry
from base.errors import UserError
from config import SHARD, Config, split_weight, text_fields
from dataset import prepare
from dataset.files import BUILTIN, VAL_EVERY, TextFile
from dataset.prepare import (
    ID,
    TRAINED,
    Encoder,
    Shard,
    find_shard,
    prepare_folder,
    read_index,
)
from hf.tokenizer import load_tokenizer
from shapes import IGNORE

VAL_NAME = re.compile(r"(?:^|[^a-z])val(?:id|idation)?(?:[^a-z]|$)", re.IGNORECASE)
CACHE = Path(__file__).parent.parent / "cache"
OPEN_FILES = 64  # shards that a process keeps open
OPEN_ROWS = 1000  # rows that a conversation may still be packed into
MAX_WORKERS = 8  # per rank
LANE_BATCH = 2**16  # bytes of a lane's text that are tokenised together


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
    """The turns at the given places of a mixture -> (source, the index of its turn). For every n, a source whose share
    of the weights is w has n w of the first n places, with an error below one turn per source listed before it."""
    source, number = np.zeros_like(index), index.copy()
    rest, weight_left = np.arange(len(index)), sum(weights, Fraction(0))  # the places that no source has yet
    for i, weight in enumerate(weights):
        share = (weight / weight_left).limit_denominator(2**30) if weight_left else Fraction(1)
        n, d = share.numerator, share.denominator
        turn = number[rest]
        before = turn // d * n + turn % d * n // d  # floor(turn n / d), whose products fit 64 bits
        taken = (turn % d + 1) * n // d > turn % d * n // d
        source[rest[taken]], number[rest[taken]] = i, before[taken]
        number[rest[~taken]] = (turn - before)[~taken]
        rest, weight_left = rest[~taken], weight_left - weight
    return source, number


def split_mixture(config: Config, flag: str) -> tuple[list[tuple[str, ...]], list[Fraction]]:
    """A flag -> the entries of each source of its mixture, and the weights. Without weights, one source."""
    entries = getattr(config, flag[2:])
    parsed = [split_weight(e) for e in entries]
    weights = [w for _, w in parsed if w is not None]
    if not weights:
        return [entries], [Fraction(1)]
    if len(weights) < len(parsed) or min(weights) < 0 or not sum(weights):
        raise UserError(f"{flag} {' '.join(entries)}: give each entry a weight, none negative, as in A:0.7 B:0.3")
    return [(spec,) for spec, _ in parsed], weights


# ---- what entries of --data name


class Listing(NamedTuple):
    """What the entries of a source name: all that other ranks need to know."""

    files: list[TextFile]
    shards: dict[str, list[Shard]] | None = None  # by split; None: a stream
    delimiter: int | None = None  # the id before a document, if the shards agree on one
    kind: str = "text"  # or chat, or pair
    tokenizers: dict[str, str] = {}  # fingerprint -> the folder whose index.json records it


def cache_of(config: Config) -> Path:
    """The folder of --cache. UserError if it cannot be created."""
    folder = Path(config.cache or CACHE).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find_sources(config: Config, flags: list[str]) -> dict[str, list[Listing]]:
    """The sources of --data or --val_data, by flag. Text that is in no cache is tokenized. Refuses data of several
    tokenizers. Rank 0 calls it, and sends the result to the other ranks."""
    found = {flag: [_find(entries, flag, config) for entries in split_mixture(config, flag)[0]] for flag in flags}
    tokenizers = {}
    if config.tokenizer != "bytes":
        tokenizers[load_tokenizer(config.tokenizer).fingerprint] = f"--tokenizer {config.tokenizer}"
    for listing in itertools.chain(*found.values()):
        tokenizers |= listing.tokenizers
    if len(tokenizers) > 1:
        raise UserError(f"The data were tokenised by several tokenizers: {'; '.join(tokenizers.values())}")
    return found


def _find(entries, flag, config):
    """Text of addresses is streamed, and with --stream all text. Conversations never are; the first good row
    decides."""
    fields = text_fields(config)
    files = [file for entry in entries for file in prepare.find_files(entry, flag, fields.get(entry, ""))]
    is_text = all(file.kind != SHARD for file in files)
    if is_text and any(config.stream or file.store for file in files):
        jobs = ((0, file, [row]) for file in files for row in file.rows(0, 0))
        report = {"kind": "", "bad": 0, "notes": {}}
        with ThreadPoolExecutor(1) as pool:
            next(prepare.encode(jobs, Encoder.of(config), pool, 0, report), None)
        if report["kind"] == "text":
            return Listing(files)
    version = f"{platform.python_version()} {importlib.metadata.version('torch')}"
    return _open(files or [TextFile(BUILTIN, 0, version)], flag, config)


def open_cached(found: dict[str, list[Listing]], config: Config) -> None:
    """For other ranks than 0: opens what each machine has in its own cache, tokenized text and copies of remote files,
    in place of rank 0's."""
    for flag, listings in found.items():
        for i, theirs in enumerate(listings):
            if theirs.shards and any(file.store or file.kind != SHARD for file in theirs.files):
                listings[i] = ours = _open(theirs.files, flag, config)
                if [s.sha256 for s in ours.shards["train"]] != [s.sha256 for s in theirs.shards["train"]]:
                    raise UserError(f"{theirs.files[0].name} on {platform.node()} is not rank 0's: copy it again")


def _open(files, flag, config):
    """The shards of each split; first tokenizes text into a folder of the cache. --val_data lets all shards of --data
    train, but another tool's that are named *val*. Without it, such shards are held out, or, if there are none, the
    last 1/20 of each shard."""
    cache, splits, delimiters, kinds = cache_of(config), {"train": [], "val": []}, set(), set()
    local = prepare.fetch_files(files, cache)
    shards = [file for file in local if file.kind == SHARD]
    some_named = any(VAL_NAME.search(os.path.basename(file.name)) for file in shards)
    if texts := [file for file in local if file.kind != SHARD]:
        encoder = Encoder.of(config)
        key = prepare.key_of(texts, encoder, VAL_EVERY, config.skip_bad)  # skip_bad changes which rows remain
        folder = cache / f"{Path(texts[0].name).name.partition('.')[0]}-{key[:12]}"
        prepare_folder(texts, encoder, folder)
        shards += prepare.find_files(str(folder), flag)
    indexes = {folder: read_index(Path(folder)) for folder in {os.path.dirname(file.name) for file in shards}}
    for index in indexes.values():
        prepare.tell_omissions(index)
    for path, size, *_ in shards:
        disk.advance()
        folder, name = os.path.split(path)
        index, is_val = indexes[folder], VAL_NAME.search(name)
        shard, delimiter = find_shard(path, size, config.data_dtype, index.get("files", {}).get(name))
        if not index and is_val and config.val_data and flag == "--data":
            continue  # the validation shards of a folder from another tool
        delimiters.add(index.get("delimiter", delimiter))
        kinds.add(index.get("kind", "text"))
        held_out = 0 if index or some_named else shard.tokens // VAL_EVERY
        cut = 0 if is_val else shard.tokens - held_out
        splits["train"].append(shard.part(0, cut))
        splits["val"].append(shard.part(cut, shard.tokens))
    if len(kinds) > 1:
        raise UserError(f"{flag}: {prepare.MIXED}")
    delimiter = delimiters.pop() if len(delimiters) == 1 else None
    recorded = {i["fingerprint"]: f"{path} with --tokenizer {i['tokenizer']}" for path, i in indexes.items() if i}
    kind = (*kinds, "text")[0]
    if (kind == "pair") != (config.dpo != "none"):
        prepared = f"{flag} is prepared for {kind}, and the run has --dpo {config.dpo}"
        raise UserError(f"{prepared}: `data.py prepare` takes --dpo for pairs")
    return Listing(files, splits, delimiter, kind, recorded)


# ---- sources


class NoRows(UserError):
    """A split has fewer tokens than a row."""


def open_source(listing: Listing, split: str, config: Config):
    """The rows of a split: "train" or "val"."""
    if listing.shards is None:
        return Stream(listing.files, config)
    shards = listing.shards["train"] + listing.shards["val"] if config.val_data else listing.shards[split]
    delimiter = listing.delimiter if config.delimiter < 0 else config.delimiter
    kind = ShardRows if listing.kind == "text" else ChatRows
    return kind(shards, delimiter, config)


# Opening a file of a network for each conversation would take longer than a step.
open_file = functools.lru_cache(OPEN_FILES)(functools.partial(open, mode="rb", buffering=0))


def _read_part(part: Shard) -> bytes:
    try:
        file = open_file(part.path)  # a name, because the cache of another thread may drop and close it
        return os.pread(file.fileno(), part.width * part.tokens, part.offset)
    except OSError:
        open_file.cache_clear()  # a stale handle of a network file system stays stale
        raise


def _shift_targets(source, blocks):
    """seq_len + 1 tokens of each row -> tokens, targets, begins"""
    blocks = np.array(blocks).reshape(-1, source.config.seq_len + 1)
    tokens = blocks[:, :-1]
    return tokens, blocks[:, 1:], (tokens == source.delimiter) & (source.config.documents == "separate")


class ShardRows:
    """Rows of seq_len tokens of a long sequence: stretches of shards, one after another. A delimiter begins each
    document; None: unknown. Reading an id beyond the vocabulary raises UserError."""

    note, id_bits, is_chat, pair_count = "", np.uint32(2**32 - 1), False, 0

    def __init__(self, shards: list[Shard], delimiter: int | None, config: Config):
        self.shards, self.delimiter, self.config = [shard for shard in shards if shard.tokens], delimiter, config
        self.bounds = np.cumsum([0, *(shard.tokens for shard in self.shards)])  # the shards begin here; then the end
        self.tokens = int(self.bounds[-1])
        self.about = [{"file": os.path.basename(shard.path), "tokens": shard.tokens} for shard in self.shards]
        self.hashes = {shard.path: shard.sha256 for shard in self.shards}
        self._arrange()

    def _arrange(self):
        T = self.config.seq_len
        if self.config.documents == "separate" and self.delimiter is None:
            raise UserError("--documents separate: no shard says which id begins a document: give --delimiter ID")
        self.count = max(0, self.tokens - 1) // T
        if not self.count:
            raise NoRows(f"{self.tokens} tokens, one row needs seq_len + 1 = {T + 1}: a smaller --seq_len")

    def read(self, start: int, stop: int) -> np.ndarray:
        first, end = np.searchsorted(self.bounds, (start, stop - 1), side="right")
        pieces, vocab_size = [], self.config.model_config.vocab_size
        for shard, begin in zip(self.shards[first - 1 : end], self.bounds[first - 1 : end], strict=True):
            part = shard.part(max(start - begin, 0), min(stop - begin, shard.tokens))
            content = retry(functools.partial(_read_part, part), part.path)
            if len(content) < part.width * part.tokens:
                raise UserError(f"{part.path} on {platform.node()} is shorter than at the start: copy it again")
            tokens = np.frombuffer(content, f"<u{part.width}")
            if (largest := (tokens & self.id_bits).max()) >= vocab_size:
                raise UserError(
                    f"{shard.path}: id {largest}, but the model's vocab_size is {vocab_size}: tokenizer and --model"
                    " (or --vocab_size) must match"
                )
            pieces.append(tokens)
        return np.concatenate(pieces)

    def rows(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        T = self.config.seq_len
        return _shift_targets(self, [self.read(i * T, i * T + T + 1) for i in index])


class ChatRows(ShardRows):
    """Conversations packed into rows. One of n tokens takes n - 1 places: its last token is only ever a target. The
    units of packing are conversations or, with --dpo, pairs: the chosen answer's conversation, and the rejected one's
    behind it. A pair is not cut, because a cut answer could turn the preference around."""

    id_bits, is_chat = ID, True

    def _arrange(self):
        """Sets starts and lengths (the first token of each conversation, and its places), and packs the units."""
        config, T = self.config, self.config.seq_len
        starts, trained = [np.zeros(0, np.int64)], 0
        for begin, end in itertools.pairwise(self.bounds):
            tokens = self.read(begin, end)
            starts.append(begin + np.flatnonzero(tokens >= prepare.BEGINS))
            trained += np.count_nonzero(tokens & TRAINED)
        starts = np.concatenate(starts)
        lengths = np.diff(np.append(starts, self.tokens)) - 1
        unit, self.per_unit = ("conversation", 1) if config.dpo == "none" else ("pair", 2)
        sizes = lengths.reshape(-1, self.per_unit).sum(1)
        is_long = sizes > T
        kept = ~is_long
        if unit == "conversation" and config.long_chats == "truncate":
            for i in np.flatnonzero(is_long):  # the first T tokens may contain none that is trained on
                kept[i] = (self.read(starts[i] + 1, starts[i] + 1 + T) & TRAINED).any()
        is_kept = kept.repeat(self.per_unit)
        self.pair_count = int(kept.sum()) * (unit == "pair")
        self.starts, self.lengths = starts[is_kept], np.minimum(lengths, T)[is_kept]
        self.note = f"{plural(len(sizes), unit)} with {trained} tokens of answers"
        self.note += f", {(is_long & kept).sum()} truncated to --seq_len {T} and {(~kept).sum()} dropped"
        if is_long.any():
            enough = int(np.quantile(sizes, 0.99, method="higher"))
            self.note += f"; --seq_len {enough} keeps 99 % of them whole"
        self._pack(np.minimum(sizes, T)[kept])
        if (~kept).sum() > len(kept) / 100:
            prepare.log.warning(f"{self.note}: give a larger --seq_len")

    def _pack(self, sizes: np.ndarray):
        """Sets contents, the units of each row, and most, the largest number of units in a row."""
        if not len(sizes):
            raise NoRows(f"{self.note}: a larger --seq_len")
        order = permute(np.arange(len(sizes)), len(sizes), f"{self.config.seed}/pack")
        row = pack(sizes[order], self.config.seq_len)
        self.contents = np.split(order[np.argsort(row, kind="stable")], np.cumsum(np.bincount(row))[:-1])
        self.count, self.most = len(self.contents), max(map(len, self.contents))
        self.note += f", in {plural(self.count, 'row')}"

    def rows(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = len(index), self.config.seq_len
        tokens, targets, begins = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64), np.zeros(shape, bool)
        for i, row in enumerate(index):
            at = 0
            units = self.contents[row][:, None] * self.per_unit
            for document in (units + np.arange(self.per_unit)).ravel():
                start, n = self.starts[document], self.lengths[document]
                ids, places = self.read(start, start + n + 1).astype(np.int64), np.s_[i, at : at + n]
                tokens[places] = ids[:-1] & ID
                targets[places] = np.where(ids[1:] & TRAINED, ids[1:] & ID, IGNORE)
                begins[i, at] = True
                at += n
            begins[i, at : at + 1] = True  # the unused end of a row is a document of its own
        return tokens, targets, begins


class Position(NamedTuple):
    """The place of a lane after its last row. A checkpoint stores it as a list."""

    given: int = 0  # rows of the lane, since the run began
    epoch: int = 0
    file: int = 0  # in the lane's order of this epoch
    row: int = 0  # of the file
    token: int = 0  # of the row's document
    bad: int = 0  # rows left out, since the run began


def merge_positions(states: list[dict]) -> dict:
    """Merges the positions of all ranks. Any number of ranks can resume from the result."""
    merged = {}
    for state in states:
        for source, positions in state.get("lanes", {}).items():
            lanes = merged.setdefault(source, {})
            for lane, position in positions.items():
                lanes[lane] = max(position, lanes.get(lane, position))  # the later: its first field, given
    return states[0] | {"lanes": merged}


class Stream:
    """An endless source of rows. Each row can be read once, in ascending order within its lane."""

    count, tokens, note, is_chat, pair_count = None, 0, "", False, 0

    def __init__(self, files: list[TextFile], config: Config):
        self.files, self.config, self.encoder = files, config, Encoder.of(config)
        self.lanes, self.workers = {}, None  # lanes: the rows to come of each
        self.positions = {}  # {number of a lane, as JSON's text: its Position after the last row given}
        tokenizer = load_tokenizer(config.tokenizer)
        self.delimiter = tokenizer.bos_id if config.delimiter < 0 else config.delimiter
        self.shares = len(files) < config.lanes  # several lanes read the same file, which is downloaded once for all
        self.hashes = {file.name: f"{file.size} {file.version}" if file.store else "" for file in files}
        names = []  # or versions of a store, and sizes of the files, wherever they are
        for file in files:
            has_version = file.store and file.version and not self.shares  # else only the name identifies it
            name = file.version if has_version else Path(file.name).name
            names.append((name, file.size, *filter(None, [file.text_field])))
        identity = prepare.digest(config.lanes, self.encoder.text_field or "text", tokenizer.fingerprint, names)
        self.about = [{"files": len(names), "sha256": identity}]

    def start(self, positions: dict[str, list]) -> None:
        """Stops reading, and goes on from the positions of lanes."""
        self.positions = {lane: Position(*position) for lane, position in positions.items()}
        self.lanes.clear()
        if self.workers:
            self.workers.shutdown(cancel_futures=True)
            self.workers = None

    def _jobs(self, lane, start):
        """The rows of a lane from a Position, without end: ((epoch, file), name, rows)."""
        n, lanes = len(self.files), self.config.lanes
        nth, sharers = lane // n, len(range(lane % n, lanes, n))  # of the lanes that read the same file
        first_file, first_row = start.file, start.row
        files = self.files[lane % n :: lanes]
        for epoch in itertools.count(start.epoch):
            has_rows = first_file or first_row
            order = permute(np.arange(len(files)), len(files), f"{self.config.seed}/{epoch}/{lane}")
            for k, file in enumerate([files[i] for i in order[first_file:]], first_file):
                local = prepare.fetch_files([file], cache_of(self.config))[0] if self.shares else file
                rows = (row for row in local.rows(first_row - 1, 0) if (row.number - 1) % sharers == nth)
                for group in prepare.group_rows(rows, LANE_BATCH):
                    has_rows = True
                    yield (epoch, k), file, group
                first_row = 0
            if not has_rows:
                raise UserError(f"{files[0].name} has fewer rows than --lanes {lanes}: give fewer, or no --stream")
            first_file = 0

    def _rows(self, lane):
        """(seq_len + 1 tokens, the position after them) of a lane, without end."""
        T, start = self.config.seq_len, self.positions.get(str(lane), Position())
        given, offset = start.given, start.token
        tokens = np.zeros(0, np.uint32)  # not in any row yet; at most T of them are of earlier documents
        report = {"kind": "text", "bad": start.bad, "notes": {}}
        for (epoch, file), row, ids in prepare.encode(self._jobs(lane, start), self.encoder, self.workers, 1, report):
            offset -= len(tokens)  # between the beginnings of the document and of `tokens`
            tokens = np.concatenate((tokens, np.frombuffer(ids, np.uint32)[max(offset, 0) :]))
            while len(tokens) > T:
                given, offset = given + 1, offset + T
                yield tokens[: T + 1], Position(given, epoch, file, row.number, offset, report["bad"])
                tokens = tokens[T:]
            offset = 0

    def rows(self, index: np.ndarray) -> tuple:
        if not self.workers:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            self.workers = prepare.start_workers(max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // ranks - 1)))
        starts_before, lanes = np.divmod(index, self.config.lanes)  # rows of the lane before each one, and its lane
        for lane in {*lanes.tolist()} - self.lanes.keys():
            self.lanes[lane] = read_ahead(self._rows(lane), 8)  # starts its reading thread
        blocks = []
        for before, lane in zip(starts_before.tolist(), lanes.tolist(), strict=True):
            # The rows before it belong to other ranks.
            tokens, self.positions[str(lane)] = next(row for row in self.lanes[lane] if row[1].given > before)
            blocks.append(tokens)
        return _shift_targets(self, blocks)


def pack(lengths: np.ndarray, size: int) -> np.ndarray:
    """The row of each document, first-fit: into the first of the rows that it fits into. Of more than OPEN_ROWS rows
    with room the fullest is closed."""
    out, rows = np.empty(len(lengths), dtype=np.int64), 0
    room, row = np.full(OPEN_ROWS, -1), np.zeros(OPEN_ROWS, dtype=np.int64)  # of the open rows, the oldest first
    for i, n in enumerate(lengths.tolist()):
        at = int((room >= n).argmax())
        if room[at] < n:
            closed = room.argmin()  # a row that is not open yet, or the fullest row
            room, row = np.append(np.delete(room, closed), size), np.append(np.delete(row, closed), rows)
            at, rows = -1, rows + 1
        room[at] -= n
        out[i] = row[at]
    return out
