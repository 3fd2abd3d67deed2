"""Text that is tokenised while it is trained on, never stored: lanes, and the position in each.

The files of a stream are dealt to a fixed number of lanes, file f to lane f mod lanes; where there are fewer files than
lanes, the rows of a file are dealt to its lanes. A lane puts its documents one behind the other and cuts that into rows
of seq_len tokens and their successors; its epochs follow each other, each in another order of its files. Global row r
of the run is the next one of lane r mod lanes: the same rows in the same order on any number of ranks, each of which
reads the lanes of its own rows. Where a lane is, is said by (rows given, epoch, file, row, token of that row's
document, bad rows left out); to go there again, its current file is read from the beginning up to that row.

Worker processes read and tokenise, each for some of a rank's lanes, a few rows ahead."""

import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from download import Damaged
from errors import RankError, UserError
from order import permute
from prepare import cores
from remote import Remote
from text import BadRow, encoder, read_rows
from workers import Worker

CHUNK = 4  # rows that are asked of a worker at once
MAX_WORKERS = 8  # per rank
Position = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class Plan:
    """What a worker must know of a stream."""

    files: tuple[Path | Remote, ...]
    settings: tuple[str, str, str]  # of an Encoder
    lanes: int
    seq_len: int
    seed: int
    skip_bad: int
    ahead: int  # bytes on disk for what one hub file is read ahead

    def lane_files(self, lane: int) -> list[int]:
        if len(self.files) < self.lanes:
            return [lane % len(self.files)]
        return list(range(lane, len(self.files), self.lanes))

    def where(self, lane: int, position: Position) -> str:
        """The document that a row's end is in."""
        _, epoch, file, row, _, _ = position
        mine = self.lane_files(lane)
        order = permute(np.arange(len(mine)), len(mine), f"{self.seed}/{epoch}/{lane}")
        source = self.files[mine[int(order[file])]]
        return f"{source.path if isinstance(source, Remote) else source} up to row {row} (lane {lane}, epoch {epoch})"

    def dealt(self, lane: int) -> tuple[int, int]:
        """(i, n): of a file's rows, those whose number is i modulo n are the lane's."""
        n = len(self.files)
        return (lane // n, -(-(self.lanes - lane % n) // n)) if n < self.lanes else (0, 1)


def lane_rows(plan: Plan, lane: int, position: Position) -> Iterator[tuple[np.ndarray, Position, list[str]]]:
    """A lane's rows from a position on, without end: (seq_len + 1 tokens, the position behind it, bad rows)."""
    encode, mine, (deal, of) = encoder(*plan.settings), plan.lane_files(lane), plan.dealt(lane)
    given, epoch, at, first, skip, skipped = position
    tokens, bad = np.zeros(0, np.uint32), []
    marks = []  # of each document in tokens: where it begins, what position there is, but for the rows given
    while True:
        order, found = permute(np.arange(len(mine)), len(mine), f"{plan.seed}/{epoch}/{lane}"), at or first
        for k in range(at, len(mine)):
            source = plan.files[mine[int(order[k])]]
            name = str(source.path if isinstance(source, Remote) else source)
            for row, _ in read_rows(source, encode.fields(), max(first - 1, 0), 0, plan.ahead):
                if (row.number - 1) % of != deal:
                    continue
                try:
                    ids, mask = encode(name, row)
                    if mask is not None:
                        raise BadRow(f"{name} line {row.line}: a conversation; these are not streamed")
                except BadRow as e:
                    skipped += 1
                    if skipped > plan.skip_bad:
                        raise UserError(f"{e}; --skip_bad N leaves out up to N such rows per lane") from None
                    bad.append(str(e))
                    continue
                found, offset = True, skip if row.number == first else 0
                marks.append((len(tokens), (epoch, k, row.number, offset, skipped)))
                tokens = np.concatenate((tokens, np.array(ids[offset:], dtype=np.uint32)))
                start = 0
                while len(tokens) - start > plan.seq_len:
                    end, given = start + plan.seq_len, given + 1
                    while len(marks) > 1 and marks[1][0] <= end:
                        marks.pop(0)
                    begin, (e, f, r, o, s) = marks[0]
                    yield tokens[start : end + 1], (given, e, f, r, o + end - begin, s), bad
                    start, bad = end, []
                tokens, marks = tokens[start:], [(begin - start, mark) for begin, mark in marks]
            first, skip = 0, 0
        if not found:
            raise UserError(
                f"Lane {lane}: no rows are left for it in {', '.join(str(plan.files[i]) for i in mine[:3])}; give a"
                f" smaller --lanes than {plan.lanes}, or leave out --stream"
            )
        epoch, at, first, skip = epoch + 1, 0, 0, 0


_state: dict = {}  # of a worker: its plan, and for each of its lanes (rows to come, position)


def begin(plan: Plan) -> None:
    """In a worker, before all else."""
    _state.update(plan=plan, lanes={})


def next_rows(lane: int, position: Position, count: int) -> list[tuple]:
    """In a worker: `count` rows of a lane from a position on, which is where its last call ended, or its first."""
    rows, there = _state["lanes"].get(lane, (None, None))
    if there != position:
        rows = lane_rows(_state["plan"], lane, position)
    out = [next(rows) for _ in range(count)]
    _state["lanes"][lane] = rows, out[-1][1]
    return out


class Stream:
    """The lanes that a rank reads. `take(lane, n)` gives row n of a lane; n may grow only."""

    def __init__(self, plan: Plan, mine: list[int], positions: dict[int, Position], warn: Callable[[str], None]):
        self.plan, self.warn = plan, warn
        self.positions = {lane: tuple(positions.get(lane, (0,) * 6)) for lane in mine}
        self.ready: dict[int, queue.Queue] = {lane: queue.Queue(2) for lane in mine}
        self.waiting: dict[int, list] = {lane: [] for lane in mine}
        self.errors: dict[int, Exception] = {}
        self.stop = threading.Event()
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        count = max(1, min(MAX_WORKERS, len(mine), cores() // ranks_here - 1))
        self.notes: dict[int, str] = {}  # what a worker waits for, by its number
        self.workers = [Worker(functools.partial(self._hear, i)) for i in range(count)]
        for i, worker in enumerate(self.workers):
            threading.Thread(target=self._feed, args=(i, worker, mine[i::count]), daemon=True).start()

    def _hear(self, number: int, text: str) -> None:
        self.notes[number] = text
        self.warn(text)

    def _feed(self, number: int, worker: Worker, lanes: list[int]) -> None:
        """A thread: keeps the lanes of one worker filled. It waits for none of them: a rank may need many rows of one
        lane before it comes to the next."""
        at = {lane: self.positions[lane] for lane in lanes}
        try:
            worker(begin, self.plan)
            while not self.stop.is_set():
                wanted = [lane for lane in lanes if not self.ready[lane].full()]
                if not wanted:
                    self.stop.wait(0.002)
                for lane in wanted:  # this thread alone puts, so there is room
                    rows = worker(next_rows, lane, at[lane], CHUNK)
                    self.notes.pop(number, None)
                    at[lane] = rows[-1][1]
                    self.ready[lane].put(rows)
        except Exception as e:
            self.errors.update(dict.fromkeys(lanes, e))

    def take(self, lane: int, number: int) -> tuple[np.ndarray, Position]:
        while True:
            waiting = self.waiting[lane]
            while not waiting:
                try:
                    waiting += self.ready[lane].get(timeout=0.5)
                except queue.Empty:
                    error = self.errors.get(lane)
                    if error is None or not self.ready[lane].empty():
                        continue  # rows that were read before the error come first
                    error = RankError(str(error)) if isinstance(error, UserError) else error
                    if isinstance(error, Damaged):
                        error = Damaged(f"{error}, and trained on: --resume a checkpoint from before that")
                    error.alone = True  # other ranks may have met nothing
                    raise error from None
            tokens, position, bad = waiting.pop(0)
            for message in bad:
                self.warn(f"left out: {message}")
            if position[0] == number + 1:
                return tokens, position
            assert position[0] <= number, f"lane {lane} is at row {position[0]}, row {number} was asked for"

    def close(self) -> None:
        self.stop.set()
        for worker in self.workers:
            worker.close()
