"""From rows to batches: the order of rows, mixtures, the position; and the commands for data.

A row is seq_len tokens and their successors. The shards of a split are one long sequence of tokens; row i begins at
token i * seq_len. Rows are visited in a random order that is a pure function of (seed, epoch, i), computed where it is
needed and never stored. Step s of a run trains on rows s * R ... (s + 1) * R - 1 of that order (R = batch_tokens /
seq_len), whatever the number of ranks, the micro-batch or the step the run was resumed at: the position is one integer.
Streams (stream.py) add a few integers per lane. In a mixture, order.turns says whose turn a row is.

Where rows come from is in rows.py: llm.c's shards (prepare.py writes them), nanoGPT's headerless files, text of many
kinds, conversations.

    python data.py prepare --input FILES --tokenizer T --out DIR        text -> token shards
    python data.py verify DIR|FILE ...                                  checksums, headers, ids
    python data.py show --data FILES --n 3 [any flag of train.py]       rows, decoded; what is trained on in colour"""

import argparse
import hashlib
import itertools
import json
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from errors import UserError  # first: it finds the Python that has torch

import numpy as np  # isort: skip
import torch
from torch import Tensor

from config import Config, parse_args, split_batch, tokenizer_beside
from download import Failed, interrupt_at_signals, interrupted
from model import IGNORE
from order import permute, turns
from prepare import prepare, read_index, sha256_of
from prepare import write_shard as write_shard
from remote import PREFIX
from rows import Catalog, ChatRows, ShardRows, StreamRows, beyond_vocabulary, find_shards, open_shard, sample_digest
from text import KINDS, find_text, split_weight
from text import builtin_documents as builtin_documents
from tokenizer import load_tokenizer
from workers import ahead

LOOK_AHEAD = 2**21  # rows of a mixture with a stream that are looked through for the lanes that a rank reads
ORDER_ROWS = 2048  # rows whose order is computed at a time: for a few it costs more than reading them


@dataclass
class Batch:
    """One micro-batch: tokens and targets [B, T] int64, target -100 = not trained on; positions [B, T] int64, 0 at the
    beginning of each document, or None: one sequence per row. documents, with positions: int32, where each document
    begins in the flattened tokens, filled up with B T to a count that hardly ever changes. sources [B] int64, in a
    mixture: the entry of --data that a row is from."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    sources: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Asynchronous on a GPU."""

        def move(t: Tensor | None) -> Tensor | None:
            return t if t is None or device.type == "cpu" else t.pin_memory().to(device, non_blocking=True)

        return Batch(*(move(t) for t in (self.tokens, self.targets, self.positions, self.documents, self.sources)))


# ---- the loader


class Loader:
    """Iterates over optimizer steps; each item is the list of this rank's micro-batches. Training never ends: epochs
    follow each other, each in another order. Validation goes once through eval_batches global batches, evenly
    spread."""

    def __init__(self, config: Config, rank: int, world_size: int, split: str, catalog: Catalog):
        self.config, self.rank, self.world_size, self.split = config, rank, world_size, split
        entries = config.val_data if split == "val" and config.val_data else config.data
        flag = "--val_data" if split == "val" and config.val_data else "--data"
        parsed = [split_weight(e) for e in entries]
        weighted = [w for _, w in parsed if w is not None]
        if weighted and len(weighted) < len(parsed):
            raise UserError(f"{flag}: a weight for some entries and not for others; give each one, as in A:0.7 B:0.3")
        if weighted and (min(weighted) < 0 or not sum(weighted)):
            raise UserError(f"{flag} {' '.join(entries)}: weights must not be negative, nor sum to nothing")
        groups = [(spec,) for spec, _ in parsed] if weighted else [tuple(spec for spec, _ in parsed)]
        self.weights, self.groups = weighted or [Fraction(1)], groups
        self.names = [re.sub(r"[^\w.*-]+", "-", Path(g[0]).name if g else "built-in") for g in groups]
        if len(set(self.names)) < len(groups):
            self.names = [f"{i}-{name}" for i, name in enumerate(self.names)]
        self.sources = [self._open(group, flag, catalog) for group in groups]
        self.micro_batch, batch_tokens = split_batch(config, world_size)
        self.step_rows = batch_tokens // config.seq_len  # in a step, over all ranks
        self.samples = 0  # rows handed out so far, over all ranks
        self.before: deque[dict] = deque(maxlen=3)  # positions before the last batches that were handed out
        self.lanes: dict[str, dict[str, tuple]] = {}  # by source: positions of the lanes of this rank
        if split == "val":
            self.places = self._validation_rows()

    def _open(self, group: tuple[str, ...], flag: str, catalog: Catalog) -> ShardRows | StreamRows:
        config = self.config
        if catalog.is_stream(group, flag):
            if self.split == "val" and flag == "--data":
                raise UserError(
                    f"--data {group[0]} is streamed, so none of it can be held out: name a --val_data (for C4:"
                    f" {PREFIX}allenai/c4/en/c4-validation.*.json.gz), or turn evaluation off with --eval_every 0"
                )
            if self.split == "val" and not config.eval_batches:
                raise UserError("--eval_batches 0: a streamed --val_data has no end that is known: give a number")
            return StreamRows(group, flag, config, catalog, self.split == "val")
        tokens, delimiter, chat = catalog.open(self.split, group, flag)
        return ChatRows(tokens, config, self.split) if chat else ShardRows(tokens, delimiter, config)

    @property
    def rows(self) -> int:
        """Rows of an epoch of what has one."""
        return sum(s.count or 0 for s in self.sources)

    @property
    def tokens(self) -> list:
        return [s.tokens for s in self.sources if s.count]

    def summary(self, val: "Loader | None") -> list[str]:
        """For the head of the log."""

        def size(loader: Loader) -> str:
            stored = sum(map(len, loader.tokens))
            return " and ".join(
                [f"{stored} tokens"] * bool(stored) + ["a stream"] * (len(loader.tokens) < len(loader.sources))
            )

        c, lanes = self.config, self.config.lanes
        plan = f"{c.steps} steps of {c.batch_tokens} tokens"
        if len(self.sources) == 1 and self.rows:
            plan += f" are {c.steps * self.step_rows / self.rows:.2f} epochs"
        out = [f"Data: {size(self)}{f', {size(val)} for validation' if val else ''}; {plan}"]
        out += [f"{name}: {s.note}" for name, s in zip(self.names, self.sources, strict=True) if s.note]
        if len(self.sources) > 1:
            total = sum(self.weights)
            shares = (f"{name} {float(w / total):.4g}" for name, w in zip(self.names, self.weights, strict=True))
            out.append(f"A mixture of {', '.join(shares)}")
        if any(s.count is None for s in self.sources) and lanes % self.step_rows and self.step_rows % lanes:
            out.append(
                f"A step has {self.step_rows} rows, for {lanes} lanes: neither divides the other, so several ranks read"
                " the same lanes"
            )
        return out

    def describe(self) -> list[dict]:
        """What identifies the data, for the run folder and for a checkpoint."""
        out = [row for s in self.sources for row in s.describe()]
        weights = [f"{name}:{w}" for name, w in zip(self.names, self.weights, strict=True)]
        return out + [{"mixture": weights}] if len(self.sources) > 1 else out

    @cached_property
    def fingerprints(self) -> list[str]:
        """By which a checkpoint knows the data: now by places all over the files, before by their ends alone."""
        files = [f for s in self.sources for f in s.files if isinstance(f, Path)]
        described = self.describe()
        known = ([*described, sample_digest(files)], described)
        return [hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16] for content in known]

    def state_dict(self) -> dict:
        """The position behind the last batch that was handed out; of lanes, those that this rank reads."""
        state = {
            "samples": self.samples,
            "epoch": self.samples // self.rows if self.rows else 0,
            "seq_len": self.config.seq_len,
            "data": self.fingerprints[0],
        }
        commits = {spec: c for s in self.sources if s.count is None for spec, c in s.commits.items()}
        return state | ({"lanes": self.lanes} if self.lanes else {}) | ({"commits": commits} if commits else {})

    def where(self, step: int) -> list[str]:
        """The places in the data of this rank's rows of a step; of a stream, of one of the last steps only."""
        places = self._slots((step - 1) * self.step_rows)
        source, row = self._pick(places)
        return [self.sources[s].where(r) for s, r in zip(source.tolist(), row.tolist(), strict=True)]

    def waits_for(self) -> str:
        """What of the hub the streams wait for; empty if nothing."""
        streams = [s.stream for s in self.sources if s.count is None and s.stream]
        return "; ".join(dict.fromkeys(note for stream in streams for note in list(stream.notes.values())))

    def load_state_dict(self, state: dict) -> None:
        samples, lanes = state.get("samples"), state.get("lanes", {})
        if type(samples) is not int or samples < 0 or type(lanes) is not dict:
            raise UserError(f"The checkpoint's position in the data cannot be: samples {samples}, lanes {lanes}")
        for source in self.sources:
            if source.count is None:
                commits = {spec: c for spec, c in state.get("commits", {}).items() if spec in source.specs}
                if commits and commits != source.commits:
                    source.open(Catalog(self.config, commits))
                    self.__dict__.pop("fingerprints", None)
        for field, known in (("data", self.fingerprints), ("seq_len", [self.config.seq_len])):
            if state.get(field) not in known:
                raise UserError(
                    f"The checkpoint was trained on other data ({field} {state.get(field)}, now {known[0]}):"
                    " give the same --data and --seq_len, or a new --out"
                )
        self.samples, self.lanes = samples, lanes

    def __iter__(self) -> Iterator[list[Batch]]:
        if self.split == "train":
            for batches, samples, lanes in ahead(self._steps(self.samples), 1):
                self.before.append(self.state_dict())
                self.samples, self.lanes = samples, lanes
                yield batches
        else:
            self._start(0, {})
            for first in range(0, len(self.places[0]), self.step_rows):
                stop = min(first + self.step_rows, len(self.places[0]))
                yield self._batches(first, stop, lambda at: (self.places[0][at], self.places[1][at]))
            for source in self.sources:  # from here on its rows come from memory
                if source.count is None and source.stream:
                    source.stream.close()

    def _steps(self, samples: int) -> Iterator[tuple[list[Batch], int, dict]]:
        """(micro-batches, the position behind them) without end."""
        self._start(samples, self.lanes)
        try:
            while True:
                base, count = samples, ORDER_ROWS // self.step_rows + 1
                source, row = self._pick(np.arange(base, base + count * self.step_rows))

                def pick(places: np.ndarray, base=base, source=source, row=row) -> tuple[np.ndarray, np.ndarray]:
                    return source[places - base], row[places - base]

                for _ in range(count):
                    batches = self._batches(samples, samples + self.step_rows, pick)
                    samples += self.step_rows
                    yield batches, samples, self._lane_positions()
        finally:
            for source in self.sources:
                if source.count is None and source.stream:
                    source.stream.close()

    def _lane_positions(self) -> dict:
        return {
            str(i): {str(lane): list(p) for lane, p in s.positions.items()}
            for i, s in enumerate(self.sources)
            if s.count is None
        }

    def _pick(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places in the run -> (source, row of it)."""
        source, number = turns(places, self.weights)
        for i, s in enumerate(self.sources):
            if s.count is None:
                continue
            mine = source == i
            epoch, row = number[mine] // s.count, number[mine] % s.count
            for e in np.unique(epoch):
                key = f"{self.config.seed}/{e}" + (f"/{i}" if i else "")
                row[epoch == e] = permute(row[epoch == e], s.count, key)
            number[mine] = row
        return source, number

    def _validation_rows(self) -> tuple[np.ndarray, np.ndarray]:
        limit, counts = self.config.eval_batches * self.step_rows, [s.count for s in self.sources]
        if not limit:
            source = np.repeat(np.arange(len(counts)), counts)
            return source, np.concatenate([np.arange(n) for n in counts])
        source, number = turns(np.arange(limit), self.weights)
        for i, n in enumerate(counts):
            if n is not None:
                beyond = (source == i) & (number >= n)
                source, number = source[~beyond], number[~beyond]
                mine = source == i
                number[mine] = number[mine] * n // max(1, int(mine.sum()))
        return source, number

    def _start(self, samples: int, lanes: dict) -> None:
        """Starts the streams: which lanes are this rank's, as far as can be seen from the steps to come."""
        streams = sum(s.count is None for s in self.sources)
        for i, source in enumerate(self.sources):
            if source.count is not None or (source.keep and source.stream):
                continue
            saved = {int(lane): tuple(p) for lane, p in lanes.get(str(i), {}).items()}
            steps, whole = self._steps_to_look_at(samples)
            places = np.concatenate([self._slots(samples + k * self.step_rows) for k in range(steps)])
            if self.split == "val":
                places = places[places < len(self.places[0])]
                owner, number = self.places[0][places], self.places[1][places]
            else:
                owner, number = turns(places, self.weights)
            mine = list(dict.fromkeys((number[owner == i] % self.config.lanes).tolist()))
            if not whole:
                mine = list(range(self.config.lanes))
            if mine:
                source.start(mine, saved, streams)

    def _steps_to_look_at(self, samples: int) -> tuple[int, bool]:
        """(steps, whether these show all lanes that this rank will read). With one source the lanes of a rank's rows
        repeat after as many steps as there are lanes."""
        if self.split == "val":
            return -(-len(self.places[0]) // self.step_rows), True
        left = max(1, self.config.steps - samples // self.step_rows + 2)  # what is read ahead, too
        most = self.config.lanes if len(self.sources) == 1 else 1 + LOOK_AHEAD // self.step_rows
        return min(left, most), len(self.sources) == 1 or left <= most

    def _slots(self, first: int) -> np.ndarray:
        """The places of this rank in the step that begins at `first`; a step's last micro-batch may reach beyond it."""
        micro = self.micro_batch
        starts = np.arange(0, self.step_rows, micro * self.world_size) + self.rank * micro
        places = (starts[:, None] + np.arange(micro)).ravel()
        return first + places[places < self.step_rows]

    def _batches(self, first: int, stop: int, pick) -> list[Batch]:
        """Row m * ranks * micro_batch + rank * micro_batch + i of the step is row i of micro-batch m. Where they do not
        divide, the last micro-batch is filled with rows that are not trained on."""
        micro, T = self.micro_batch, self.config.seq_len
        starts = np.arange(first, stop, micro * self.world_size) + self.rank * micro
        places = (starts[:, None] + np.arange(micro)).ravel()
        real = np.flatnonzero(places < stop)
        source, row = pick(places[real])
        tokens = np.zeros((len(places), T), dtype=np.int64)
        targets = np.full((len(places), T), IGNORE, dtype=np.int64)
        begins = None
        for i, s in enumerate(self.sources):
            mine = real[source == i]
            whole = len(mine) == len(places)
            new_tokens, new_targets, new_begins = s.rows(row[source == i])
            tokens[slice(None) if whole else mine] = new_tokens
            targets[slice(None) if whole else mine] = new_targets
            if new_begins is not None:
                begins = np.zeros((len(places), T), dtype=bool) if begins is None else begins
                begins[mine] = new_begins
        owners = np.zeros(len(places), dtype=np.int64)
        owners[real] = source
        tokens, targets = torch.from_numpy(tokens), torch.from_numpy(targets)
        out = []
        for a in range(0, len(places), micro):
            part = slice(a, a + micro)
            batch = Batch(tokens[part], targets[part])
            if begins is not None or self.separate:
                batch.positions, batch.documents = _documents(
                    np.zeros((micro, T), bool) if begins is None else begins[part]
                )
            if len(self.sources) > 1:
                batch.sources = torch.from_numpy(owners[part])
            out.append(batch)
        return out

    @property
    def separate(self) -> bool:
        """Whether batches carry positions: all or none do, or compiled code would be compiled twice."""
        return self.config.documents == "separate" or any(isinstance(s, ChatRows) for s in self.sources)


def _documents(begins: np.ndarray) -> tuple[Tensor, Tensor]:
    """begins [B, T] -> positions [B, T], and where documents begin in the flattened rows."""
    begins[:, 0] = True
    B, T = begins.shape
    index = np.arange(T)
    positions = index - np.maximum.accumulate(np.where(begins, index, 0), 1)
    starts = np.flatnonzero(begins)
    count = 1 << (max(len(starts), 16 * B) - 1).bit_length()
    documents = np.full(count + 1, B * T, dtype=np.int32)
    documents[: len(starts)] = starts
    return torch.from_numpy(positions), torch.from_numpy(documents)


def make_loader(config: Config, rank: int = 0, world_size: int = 1, split: str = "train") -> Loader:
    """split: "train" or "val"."""
    return Loader(config, rank, world_size, split, Catalog(config))


def open_loaders(config: Config, rank: int, world_size: int, catalog: Catalog) -> Iterator[Loader]:
    """For training, and for validation if the run evaluates."""
    splits = ("train", "val") if config.eval_every else ("train",)
    return (Loader(config, rank, world_size, split, catalog) for split in splits)


def merge_positions(states: list[dict]) -> dict:
    """The positions of all ranks as one, from which any number of ranks can go on."""
    merged = dict(states[0])
    for state in states[1:]:
        for source, lanes in state.get("lanes", {}).items():
            ours = merged.setdefault("lanes", {}).setdefault(source, {})
            for lane, position in lanes.items():
                ours[lane] = max(position, ours.get(lane, position), key=lambda p: p[0])
    return merged


def open_checked(config: Config, world_size: int = 1, catalog: Catalog | None = None) -> list[Loader]:
    """open_loaders, for rank 0. Refuses a tokenizer, or ids, beyond the vocabulary before anything is trained. Of
    shards beyond 2^27 tokens per split 64 places are looked at; rows are checked as they are read, and `data.py verify`
    checks all."""
    if config.knows_text:
        check_tokenizer(config)
    made_with: dict[str, Path] = {}  # by the fingerprint of the tokenizer
    headerless = False
    loaders = []
    for loader in open_loaders(config, 0, world_size, catalog or Catalog(config)):
        loaders.append(loader)
        for tokens in loader.tokens:
            headerless |= any(array.offset == 0 for array in tokens.arrays)
            made_with |= {read_index(p.parent)["fingerprint"]: p.parent for p in tokens.paths if read_index(p.parent)}
            if len(made_with) > 1:
                found = (f"{p} with {read_index(p)['tokenizer']}" for p in made_with.values())
                raise UserError(
                    f"The data were tokenised by several tokenizers: {'; '.join(found)}. Name one --tokenizer"
                )
            seen, first = 0, 0
            for array in tokens.arrays:
                whole = seen + len(array) <= 2**27
                blocks = [0] if whole else range(0, len(array), max(1, len(array) // 64))
                for a in blocks:
                    part = array[a:] if whole else array[a : a + 2**14]
                    if len(part) and int(part.max()) >= config.model_config.vocab_size:
                        at = first + a + int(np.argmax(part >= config.model_config.vocab_size))
                        raise beyond_vocabulary(tokens, at, config)
                    seen += len(part)
                first += len(array)
    if config.data_dtype and not headerless:
        raise UserError(
            f"--data_dtype {config.data_dtype} is for headerless token files, and there are none: leave it out"
        )
    return loaders


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


# ---- the command line


def _prepare(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="data.py prepare", description="Text -> token shards.", allow_abbrev=False)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help=f"files, globs, hf:// or - (standard input): {KINDS}")
    add("--tokenizer", required=True, help="bytes, a file, a folder or a hub id")
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the shards; the same words go on after a kill",
    )
    add("--text_field", default="text", help="field or column of the text (default: text)")
    add("--shard_tokens", type=int, default=100_000_000, metavar="N", help="tokens per shard (default: 100000000)")
    add(
        "--val_every", type=int, default=100, metavar="N", help="one document in N is held out; 0 = none (default: 100)"
    )
    add("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="workers (default: one per core)")
    add("--skip_bad", type=int, default=0, metavar="N", help="bad rows that are left out before it ends (default: 0)")
    add("--chat", default="llama", choices=("llama", "mixtral"), help="format, where the tokenizer does not say it")
    args = parser.parse_args(argv)
    for name, least in (("shard_tokens", 1), ("val_every", 0), ("processes", 0), ("skip_bad", 0)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)}: it must be at least {least}")
    sources = [f for spec in args.input for f in find_text(spec, "--input")]
    settings = args.tokenizer, args.text_field, args.chat
    index = prepare(sources, settings, args.out, args.processes, args.shard_tokens, args.val_every, args.skip_bad)
    tokens = {s: sum(f["tokens"] for n, f in index["files"].items() if n.startswith(s) and n.endswith(".bin"))
              for s in ("train", "val")}  # fmt: skip
    print(f"{args.out}: {index['documents']} documents, {tokens['train']} tokens and {tokens['val']} for validation")
    print(f"Use it: --data {args.out} --tokenizer {args.tokenizer}")


def verify(path: Path, vocab_size: int = 0, data_dtype: str = "") -> list[str]:
    """What is wrong with a folder of shards or one of them: checksums, headers, every id."""
    folder = path if path.is_dir() else path.parent
    index, wrong = read_index(folder), []
    files = find_shards(str(path), "verify")
    vocab_size = vocab_size or index.get("vocab_size", 0)
    for name in index.get("files", {}) if path.is_dir() else ():
        if not (folder / name).exists():
            wrong.append(f"{folder / name} is missing")
    wrong += [f"{f} is no token shard (.bin)" for f in files if f.suffix != ".bin"]
    masks = [f.with_suffix(".mask") for f in files if f.with_suffix(".mask").exists()]
    for file in [*(f for f in files if f.suffix == ".bin"), *masks]:
        known = index.get("files", {}).get(file.name)
        if index and known is None:
            wrong.append(f"{file} is not in index.json")
        elif known and sha256_of(file) != known["sha256"]:
            wrong.append(f"{file} has changed since it was prepared (sha256): prepare the text again")
        if file.suffix == ".bin":
            try:
                tokens, _ = open_shard(file, data_dtype)
            except UserError as e:
                wrong.append(str(e))
                continue
            for a in range(0, len(tokens) if vocab_size else 0, 2**24):
                part = tokens[a : a + 2**24]
                if part.max() >= vocab_size:
                    at = int(np.argmax(part >= vocab_size))
                    wrong.append(f"{file} at token {a + at}: id {part[at]}, beyond the {vocab_size} of the vocabulary")
                    break
    return wrong


def _verify(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="data.py verify", description="Checks token shards.", allow_abbrev=False)
    parser.add_argument("path", nargs="+", type=Path, help="folders or .bin files")
    parser.add_argument("--vocab_size", type=int, default=0, help="ids must be below it (default: the index's)")
    parser.add_argument("--data_dtype", default="", choices=("uint16", "uint32"), help="of headerless files")
    args = parser.parse_args(argv)
    wrong = [line for path in args.path for line in verify(path, args.vocab_size, args.data_dtype)]
    if wrong:
        raise UserError("\n".join(wrong))
    print(f"{', '.join(map(str, args.path))}: all is as it should be")


def show(config: Config, n: int, colour: bool) -> Iterator[str]:
    """n rows as they are trained on, decoded, document by document: what is trained on in green (or between [[ and ]]),
    the rest grey."""
    tokenizer = load_tokenizer(config.tokenizer)
    names = {i: text for text, i in tokenizer.control.items()}
    on, off, end = ("\033[32m", "\033[90m", "\033[0m") if colour else ("[[", "", "]]")

    def text(ids: list[int]) -> str:
        runs = itertools.groupby(ids, lambda i: i in names)
        return "".join("".join(map(names.get, run)) if control else tokenizer.decode([*run]) for control, run in runs)

    def rows() -> Iterator[tuple[list[int], list[int], list[int]]]:
        for batch in itertools.chain.from_iterable(make_loader(config)):
            begins = torch.zeros_like(batch.tokens) if batch.positions is None else batch.positions == 0
            for row, targets, first in zip(batch.tokens.tolist(), batch.targets.tolist(), begins, strict=True):
                yield row, targets, sorted({0, *first.nonzero().flatten().tolist()})

    for number, (row, targets, starts) in enumerate(itertools.islice(rows(), n), 1):
        out = [f"--- row {number}"]
        for start, stop in itertools.pairwise([*starts, len(row)]):
            trained = [t != IGNORE for t in targets[start:stop]]
            if not any(trained):
                out.append(f"--- {stop - start} places filled up, not trained on")
                continue
            last = [targets[stop - 1]] if trained[-1] else []  # a document's last token may be a target alone
            pairs = zip(row[start:stop] + last, [False, *trained], strict=False)
            line = "--- document\n" if len(starts) > 1 else ""
            for is_trained, run in itertools.groupby(pairs, lambda pair: pair[1]):
                words = text([i for i, _ in run])
                line += on + words + end if is_trained else off + words + (end if colour else "")
            out.append(line)
        yield "\n".join(out)


def _show(argv: list[str]) -> None:
    own = argparse.ArgumentParser(prog="data.py show", add_help=False, allow_abbrev=False)
    own.add_argument("--n", type=int, default=3)
    own.add_argument("--colour", choices=("auto", "always", "never"), default="auto")
    args, rest = own.parse_known_args(argv)
    if args.n < 1:
        raise UserError(f"--n {args.n}: it must be at least 1")
    colour = args.colour == "always" or (args.colour == "auto" and sys.stdout.isatty())
    for text in show(parse_args(rest), args.n, colour):
        print(text)


def main(argv: list[str]) -> int:
    commands = {"prepare": _prepare, "verify": _verify, "show": _show}
    try:
        if not argv or argv[0] not in commands:
            raise UserError(f"expected python data.py {'|'.join(commands)} ... (each has --help)")
        commands[argv[0]](argv[1:])
        return 0
    except UserError as e:
        print(f"\nerror: {e}" if sys.stderr.isatty() else f"error: {e}", file=sys.stderr)
        return 2
    except (Failed, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as e:
        return interrupted(e)


if __name__ == "__main__":
    interrupt_at_signals()
    sys.exit(main(sys.argv[1:]))
