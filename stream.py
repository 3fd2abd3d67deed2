"""Streams: text that is tokenised while it is trained on, never stored; the worker processes that do it; and files of
the hub, which are read while they arrive.

The files of a stream are dealt to a fixed number of lanes, file f to lane f mod lanes; where there are fewer files than
lanes, the rows of a file are dealt to its lanes. A lane puts its documents one behind the other and cuts that into rows
of seq_len tokens and their successors; its epochs follow each other, each in another order of its files. Global row r
of the run is the next one of lane r mod lanes: the same rows in the same order on any number of ranks, each of which
reads the lanes of its own rows. A lane's position is (rows given, epoch, file, row, token of that row's document, bad
rows left out); to go there again, its current file is read from the beginning up to that row.

    hf://datasets/ORG/NAME[@REVISION][/PATH]        PATH: a file, a folder, or a pattern with * (within a name) and **

A revision is resolved to a commit once; files are named by it from then on. Nothing counts as the end of a file before
its size and hash hold.

A worker is a fresh Python that has not imported torch, so it starts in a fraction of a second, and shares no thread,
GPU or process group with its parent, as a fork would. It ends when its parent does, however that ends: its input
closes."""

import contextlib
import hashlib
import io
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

from lib.errors import Failure, Message, RankError, UserError, read_ahead  # first: it finds the Python that has numpy

import numpy as np  # isort: skip

import hub as download
from hub import Damaged, Hub, NotThere
from lib.text import HUB, SUFFIXES, BadRow, Encoder, TextFile, TextRow, find_files, kind_of
from lib.tokenizer import load_tokenizer

SLOT = 2**20  # bytes of a hub file that are read ahead at a time
LEAST = 4  # slots
VERIFIED_FIRST = 64 * 2**20  # bytes up to which a hub file is not read before its hash has been compared
TRAIN_NAME = re.compile(r"(?:^|[^a-z])train(?:ing)?(?:[^a-z]|$)", re.IGNORECASE)
CHUNK = 4  # rows that are asked of a worker at once
MAX_WORKERS = 8  # per rank
RECENT = 4096  # rows of a stream whose places are remembered


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


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
    """Whose turn it is at the given places of a mixture -> (source, the index of its turn). Of the first n places a
    source of weight w has n w, to less than one turn per source that comes before it, for every n."""
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


# ---- files of the hub


@dataclass(frozen=True)
class HubFile(TextFile):
    """A file of a data set at a commit; name: its path there."""

    repo: str
    commit: str
    bytes: int
    oid: str  # as the hub lists it: sha256, or git's SHA-1 of the blob

    @property
    def size(self) -> int:
        return self.bytes

    def __str__(self) -> str:
        return f"{HUB}{self.repo}@{self.commit[:8]}/{self.name}"

    @property
    def identity(self) -> list:
        return [str(self), self.size, self.oid]

    def open(self, ahead: int) -> BinaryIO:
        if kind_of(self.name) == ".parquet":  # its table of contents is at its end
            return HubReader(self, self.size).whole()
        return io.BufferedReader(HubReader(self, ahead), 2**20)

    def rows(self, fields, first=0, *how) -> Iterator[tuple[TextRow, int]]:
        """What arrives damaged is fetched once more; Damaged if rows that were given are not the same then."""
        last, count, given = first, 0, 0  # number of the last row that was given, how many were, their hash
        for again in (False, True):
            copy, repeated = super().rows(fields, first, *how), 0
            try:
                for row, _ in itertools.islice(copy, count):
                    repeated = hash((repeated, str(row.content)))
                if repeated != given:
                    raise Damaged(f"{self}: what arrived first was damaged")
                for row, stored in copy:
                    last, count, given = row.number, count + 1, hash((given, str(row.content)))
                    yield row, stored
                return
            except Damaged as e:
                if again:
                    raise Damaged(f"{e}; its rows up to {last} had been read") if count else Failure(str(e)) from None
                download.say(f"{e}: it is fetched again")


def find_text(spec: str, flag: str, commit: str = "", tries: int | None = None) -> list[TextFile]:
    """The files of text that an entry names: a file, a folder, a pattern, `-`, or an address on the hub (with `commit`,
    as of it; without a path, the files of its train split). tries: in a row, to list what the hub has."""
    if spec == "-":
        return [TextFile("-")]
    if not spec.startswith("hf://"):
        return [TextFile(str(path)) for path in find_files(spec, flag, SUFFIXES)]
    address = re.fullmatch(rf"{HUB}([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", spec)
    if not address:
        raise UserError(f"{flag} {spec}: expected {HUB}ORG/NAME[@REVISION][/PATH]")
    repo, revision, path = address[1], address[2] or "main", (address[3] or "").strip("/")
    hub = Hub("datasets", repo, tries)
    commit = commit or hub.commit(revision)
    try:
        tree = hub.tree(commit, re.split(r"[*?]", path)[0].rpartition("/")[0])
    except NotThere:  # there is no such folder: the message names the files that there are
        tree = hub.tree(commit)
    return [HubFile(p, repo, commit, *tree[p]) for p in _choose(path, tree, f"{flag} {spec}", repo)]


def _choose(path, tree, entry, repo):
    """The files of a listing that the path of an address names."""
    data = sorted(p for p in tree if kind_of(p))
    pattern = _pattern(path)
    chosen, below = [p for p in data if pattern.fullmatch(p)], [p for p in data if not path or p.startswith(f"{path}/")]
    if below and not chosen:
        chosen = [p for p in below if TRAIN_NAME.search(p)] or (below if path else [])
        if len({p.rpartition("/")[0] for p in chosen}) != 1:
            raise UserError(f"{entry} does not say which files: give one of {_candidates(repo, below)}")
    if not chosen:
        raise UserError(f"{entry}: no such data file there; there are {_candidates(repo, data)}")
    return chosen


def _pattern(path):
    words = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(words.get(w) or re.escape(w) for w in re.split(r"(\*\*|\*|\?)", path)))


def _candidates(repo, paths):
    """Files that differ in numbers alone as one pattern each."""
    patterns = list(dict.fromkeys(re.sub(r"\d+-of-\d+|\d{3,}", "*", p) for p in paths))
    more = f" and {len(patterns) - 12} more" if len(patterns) > 12 else ""
    return ", ".join(f"{HUB}{repo}/{p}" for p in patterns[:12]) + more or "none"


def fetch_whole(files: list[TextFile]) -> list[TextFile]:
    """The files of one entry; those of the hub in HF_HOME's cache, fetched and verified where they are not yet. Safe
    when several processes do it at the same time."""
    if not isinstance(files[0], HubFile):
        return files
    repo, commit = f"datasets/{files[0].repo}", files[0].commit
    base = download.folder_of(repo, commit)[2]
    paths = {file: base / "snapshots" / commit / file.name for file in files}
    missing = {f.name: (f.size, f.oid) for f, path in paths.items() if download.size_of(path) != f.size}
    if missing:
        command = f"python download.py {repo} --revision {commit}"
        what = {"repo": repo, "revision": commit, "commit": commit, "command": command}
        download.fetch(Hub("datasets", files[0].repo), base, missing, what)
    return [TextFile(str(path)) for path in paths.values()]


class HubReader(io.RawIOBase):
    """One file of the hub as a stream of bytes, from its beginning. A thread fetches ahead, piece by piece, into a
    temporary file of at most `ahead` bytes, whose slots are used again. A file that fits into it is verified before
    the first byte is given, unless it is too large to wait for."""

    def __init__(self, file: HubFile, ahead: int):
        slots = max(LEAST, min(ahead // SLOT, -(-file.size // SLOT)))
        self.file, self.room = file, slots * SLOT
        self.store = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self.pieces = read_ahead(self._fetch(), slots - 2)  # one is being written, one is being read
        if file.size <= min(self.room, VERIFIED_FIRST):
            self.pieces = iter(list(self.pieces))
        self.piece, self.given = b"", 0  # what is left of the piece that is read; bytes of the file

    def _fetch(self):
        """Writes the file's content into the store -> where each piece of it is."""
        file, piece, left = self.file, b"", self.file.size
        places = itertools.cycle(range(0, self.room, SLOT))
        for chunk in Hub("datasets", file.repo).read(file.name, file.commit, file.size, file.oid):
            piece, left = piece + chunk, left - len(chunk)
            while len(piece) >= SLOT or (piece and not left):
                begin = next(places)
                download.write_at(self.store.fileno(), piece[:SLOT], begin)
                yield begin, begin + len(piece[:SLOT])
                piece = piece[SLOT:]

    def whole(self) -> BinaryIO:
        """The store, once all of the file is in it; `ahead` must be the file's size."""
        for _ in self.pieces:
            pass
        self.store.seek(0)
        return self.store

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.given

    def readinto(self, buffer) -> int:
        if not self.piece:
            begin, end = next(self.pieces, (0, 0))
            self.piece = os.pread(self.store.fileno(), end - begin, begin)
            assert len(self.piece) == end - begin, "what was written into the store cannot be read"
        data, self.piece = self.piece[: len(buffer)], self.piece[len(buffer) :]
        self.given += len(data)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        super().close()
        self.pieces = iter(())  # which ends the thread that fetches


# ---- worker processes


class Worker:
    """One process. `worker(function, *args)` runs a function of a module of ours there, and waits for its result; what
    it raises is raised here, what it says is said here. `note` is the last line of that in this call."""

    def __init__(self):
        self.note, self.lock = "", threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent
        )

    def __call__(self, function: Callable, *args):
        with self.lock:
            try:
                pickle.dump((function, args), self.process.stdin, pickle.HIGHEST_PROTOCOL)
                self.process.stdin.flush()
                while isinstance(answer := pickle.load(self.process.stdout), str):
                    self.note = answer
                    download.say(answer)
                self.note, (result, error) = "", answer
            except (EOFError, BrokenPipeError, pickle.UnpicklingError):
                code = self.process.wait()
                how = f"was ended by signal {-code} (9: out of memory?)" if code < 0 else f"ended with status {code}"
                raise RuntimeError(f"a worker process {how}") from None
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError, ValueError):  # what was to be sent to it is of no use any more
                pipe.close()


def in_order(function: Callable, jobs: Iterable[tuple], processes: int) -> Iterator[tuple]:
    """(label, function(*arguments)) for each job (label, *arguments), in their order, by so many processes; 0: here.
    Jobs are drawn as they are needed, so memory does not grow with their number."""
    if not processes:
        for label, *arguments in jobs:
            yield label, function(*arguments)
        return
    workers, waiting = [], deque()
    pool = ThreadPoolExecutor(2 * processes)  # one job of each worker is done, one waits
    try:
        for i, (label, *arguments) in enumerate(jobs):
            if i < processes:
                workers.append(Worker())
            waiting.append((label, pool.submit(workers[i % processes], function, *arguments)))
            if len(waiting) >= 2 * processes:
                label, future = waiting.popleft()
                yield label, future.result()
        for label, future in waiting:
            yield label, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.close()


def _serve():
    """A worker's loop."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what is printed must not get among the results
    sending = threading.Lock()

    def send(answer):
        try:
            with sending:
                pickle.dump(answer, sink, pickle.HIGHEST_PROTOCOL)
                sink.flush()
        except BrokenPipeError:  # the parent is gone
            os._exit(1)

    download.say = send
    while source.peek(1):
        try:
            function, args = pickle.load(source)
            answer = function(*args), None
        except (Message, OSError) as e:  # the user's mistakes, the hub's and the disk's
            answer = None, e
        except Exception:
            import traceback

            answer = None, RuntimeError(f"a worker process: {traceback.format_exc()}")
        send(answer)
    os._exit(0)  # without waiting for what is read ahead


# ---- lanes


@dataclass(frozen=True)
class Lane:
    """A lane of a stream: of its files, the rows whose number is `turn` modulo `sharing`. ahead: bytes on disk for what
    one hub file is read ahead."""

    number: int
    files: list[TextFile]
    turn: int
    sharing: int
    encoder: Encoder
    config: object
    ahead: int

    def order(self, epoch: int) -> list[TextFile]:
        n = len(self.files)
        return [self.files[i] for i in permute(np.arange(n), n, f"{self.config.seed}/{epoch}/{self.number}")]

    def where(self, position: tuple) -> str:
        """The document that a row's end is in."""
        _, epoch, file, row, _, _ = position
        return f"{self.order(epoch)[file]} up to row {row} (lane {self.number}, epoch {epoch})"

    def rows(self, position: tuple):
        """Rows from a position on, without end: (seq_len + 1 tokens, the position behind it)."""
        T, (given, *begin) = self.config.seq_len, position
        tokens = np.zeros(0, np.uint32)
        begins = []  # of the documents in tokens: (where it begins, its place)
        for ids, place in self._documents(*begin):
            begins.append((len(tokens), place))
            tokens = np.concatenate((tokens, np.array(ids, np.uint32)))
            start = 0
            while len(tokens) - start > T:
                end, given = start + T, given + 1
                while len(begins) > 1 and begins[1][0] <= end:
                    begins.pop(0)
                begin, (epoch, file, row, offset, skipped) = begins[0]
                yield tokens[start : end + 1], (given, epoch, file, row, offset + end - begin, skipped)
                start = end
            tokens, begins = tokens[start:], [(begin - start, place) for begin, place in begins]

    def _documents(self, epoch, at, first, skip, skipped):
        """(ids, (epoch, file, row, token, bad rows)) from a place on, without end."""
        while True:
            any_rows = at or first
            for k, file in list(enumerate(self.order(epoch)))[at:]:
                for row, _ in file.rows(self.encoder.fields, max(first - 1, 0), 0, self.ahead):
                    if (row.number - 1) % self.sharing != self.turn:
                        continue
                    try:
                        ids, kind = self.encoder(str(file), row)
                        if kind == "chat":
                            raise BadRow(f"{file} {row.place}: a conversation; these are not streamed")
                    except BadRow as e:
                        skipped += 1
                        if skipped > self.config.skip_bad:
                            raise UserError(f"{e}; --skip_bad N leaves out up to N such rows per lane") from None
                        download.say(f"left out: {e}")
                        continue
                    any_rows, offset = True, skip if row.number == first else 0
                    yield ids[offset:], (epoch, k, row.number, offset, skipped)
                first, skip = 0, 0
            if not any_rows:
                raise UserError(
                    f"Lane {self.number}: no rows are left for it in {', '.join(map(str, self.files[:3]))}; give a"
                    f" smaller --lanes than {self.config.lanes}, or leave out --stream"
                )
            epoch, at = epoch + 1, 0


_rows = {}  # of a worker: what is to come of each of its lanes


def open_lane(lane: Lane, position: tuple) -> None:
    """In a worker."""
    _rows[lane.number] = lane.rows(position)


def next_rows(number: int) -> list[tuple]:
    """In a worker: the next rows of a lane."""
    return list(itertools.islice(_rows[number], CHUNK))


class Stream:
    """An endless source of rows (lib/rows.py defines sources). catalog: finds the files of an entry. keep: rows
    are read again and again, from memory. readers: lanes that this rank reads, in all streams."""

    count = None

    def __init__(self, specs: tuple[str, ...], flag: str, config, encoder: Encoder, catalog, keep: bool, readers: int):
        self.specs, self.flag, self.config, self.encoder = specs, flag, config, encoder
        self.keep, self.readers = keep, readers
        self.kept = {}  # rows by their number
        self.recent = {}  # the position behind each of the last rows
        self.workers, self.lanes, self.positions = [], {}, {}  # lanes: the rows to come of each
        tokenizer = load_tokenizer(encoder.tokenizer)
        self.fingerprint = tokenizer.fingerprint
        self.delimiter = tokenizer.bos_id if config.delimiter < 0 else config.delimiter
        self.open(catalog)

    def open(self, catalog) -> None:
        """Finds the files, as of the catalog's commits where it has any."""
        lists = {spec: catalog.find(spec, self.flag) for spec in self.specs}
        self.files, lanes = sum(lists.values(), []), self.config.lanes
        self.commits = {spec: files[0].commit for spec, files in lists.items() if isinstance(files[0], HubFile)}
        self.identity = [(Path(file.name).name, file.size) for file in self.files]  # wherever they are
        self.note = f"a stream of {len(self.files)} files for {lanes} lanes"
        if len(self.files) < lanes:
            self.note += f": each file is read by {-(-lanes // len(self.files))} of them"
            self.files = [f for files in lists.values() for f in fetch_whole(files)]  # once over the network

    @property
    def paths(self) -> list[Path]:
        return [Path(f.name) for f in self.files if not isinstance(f, HubFile)]

    def describe(self) -> list[dict]:
        made = [self.config.lanes, self.encoder.text_field, self.fingerprint, self.identity]
        digest = hashlib.sha256(json.dumps(made).encode()).hexdigest()
        return [{"stream": list(self.specs), "files": len(self.identity), "commits": self.commits, "sha256": digest}]

    def lane(self, number: int) -> Lane:
        c, n = self.config, len(self.files)
        files, sharing = self.files[number % n :: c.lanes], len(range(number % n, c.lanes, n))
        ahead = read_ahead_bytes(c.read_ahead_gb) // self.readers
        return Lane(number, files, number // n, sharing, self.encoder, c, ahead)

    def start(self, positions: dict[str, list]) -> None:
        """Rows are read from these positions of lanes on."""
        self.close()
        self.positions = {int(lane): tuple(position) for lane, position in positions.items()}

    def state(self) -> dict[str, list]:
        return {str(lane): list(position) for lane, position in self.positions.items()}

    def close(self) -> None:
        self.lanes.clear()
        while self.workers:
            self.workers.pop().close()

    def _start_lane(self, number):
        """From now on it is read ahead."""
        most = max(1, min(MAX_WORKERS, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1))
        if len(self.workers) < most:
            self.workers.append(Worker())
        chunks = self._chunks(self.workers[len(self.lanes) % most], number)
        self.lanes[number] = itertools.chain.from_iterable(read_ahead(chunks, 2))

    def _chunks(self, worker, number):
        worker(open_lane, self.lane(number), self.positions.get(number, (0,) * 6))
        while True:
            yield worker(next_rows, number)

    def _take(self, number):
        if number in self.kept:
            return self.kept[number]
        turn, lane = divmod(number, self.config.lanes)
        try:
            # The rows before it are those of other ranks.
            tokens, position = next(row for row in self.lanes[lane] if row[1][0] > turn)
        except UserError as e:
            raise RankError(str(e)) from None  # other ranks may have met nothing
        except Damaged as e:
            raise Damaged(f"{e}, and trained on: --resume a checkpoint from before that") from None
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
            if lane not in self.lanes:
                self._start_lane(lane)
        block = np.array([self._take(n) for n in numbers], np.int64).reshape(-1, self.config.seq_len + 1)
        begins = block[:, :-1] == self.delimiter if self.config.documents == "separate" else None
        return block[:, :-1], block[:, 1:], begins

    def where(self, number: int) -> str:
        if number not in self.recent:
            return f"row {number} of the stream"
        return self.lane(number % self.config.lanes).where(self.recent[number])


def read_ahead_bytes(gb: float) -> int:
    """A rank's share of --read_ahead_gb, of which there is no more than half of the disk's free room."""
    room = min(gb * 2**30, shutil.disk_usage(tempfile.gettempdir()).free / 2)
    return int(room / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


if __name__ == "__main__":
    _serve()
