"""From rows to batches: the order of rows, mixtures, the position in the data; and the commands for data.

A row is seq_len tokens and their successors. The shards of text of a split are one long sequence of tokens; row i
begins at token i * seq_len. Conversations are packed into rows. Rows are visited in a random order that is a pure
function of (seed, epoch, i). It is computed when it is needed, and never stored. Sample n is the n-th row of that
order, from 0. Let R = batch_tokens / seq_len: step s, from 1, trains on samples (s - 1) R ... s R - 1. Ranks,
micro-batches and resumes do not change this, so the position is one integer. The files of a stream are dealt to lanes
(lib/rows.py), and each lane adds its position. In a mixture, `turns` decides which source gives the next sample.
lib/rows.py reads the rows.

    python data.py prepare --data FILES --tokenizer T --out DIR         text -> token shards
    python data.py verify DIR|FILE ...                                  checks headers and checksums
    python data.py train-tokenizer --data FILES --vocab_size N --out DIR
    python data.py show --data FILES --n 3 [any flag of train.py]       decoded rows; [[trained tokens]]
    python data.py show --run RUN --step N                              the rows of a run's step"""

import copy
import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from config import Config, check_values, choose_lanes, parse_args, read_run, row_groups, split_batch
from lib.errors import Parser, UserError, prepare_python, run_script
from lib.files import plural, read_ahead, read_object, sample_digest
from lib.text import main as run_text_command

if __name__ == "__main__":
    prepare_python()
if __name__ == "__main__" and sys.argv[1:2] != ["show"]:
    # Ends the process, before torch is imported, which takes seconds.
    run_script(lambda argv: run_text_command(argv, parse_args))

import numpy as np  # isort: skip
import torch
from torch import Tensor

from lib import torch_private
from lib.ranks import Ranks, on_first_rank
from lib.rows import Catalog, ChatRows, ShardRows, Stream, permute, split_mixture, turns
from lib.settle import check_tokenizer
from lib.text import VERBS, knows_text, log
from lib.tokenizer import decode_marked, load_tokenizer, token_sizes
from model import IGNORE, document_begins

CHECKED = 2**24  # tokens of a source whose ids are checked before the run


@dataclass
class Batch:
    """One micro-batch. Ranks that share rows have parts of the tokens and targets, and the positions and documents of
    the whole rows."""

    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64; -100: not trained on
    positions: Tensor | None = None  # [B, T] int64, 0 where a document begins; None: a row is one sequence
    documents: Tensor | None = None  # with positions: int32, see model.document_begins
    sources: Tensor | None = None  # in a mixture: [B] int64, the entry of --data that a row is from

    def to(self, device: torch.device) -> "Batch":
        """Asynchronous on a GPU."""
        if device.type == "cpu":
            return self
        batch = Batch(*(t if t is None else t.pin_memory().to(device, non_blocking=True) for t in vars(self).values()))
        if batch.documents is not None:  # its length is the batch's own: code is compiled for any
            torch_private.mark_dynamic(batch.documents, 0)
        return batch


class Loader:
    """Iterates over optimizer steps; each item is the list of this rank's micro-batches. Training never ends: epochs
    follow each other, each in another order. Validation goes once through eval_batches global batches, evenly
    spread."""

    def __init__(self, config: Config, rank: int, world_size: int, split: str, catalog: Catalog):
        self.config = config = replace(config, lanes=choose_lanes(config, world_size))
        self.split = split

        # The ranks of a row group share their rows: each reads some columns of them.
        self.row_groups = row_groups(config, world_size)
        sharing = world_size // self.row_groups
        self.my_group, index = divmod(rank, sharing)
        width = config.seq_len // sharing
        self.columns = slice(index * width, (index + 1) * width)
        self.micro_batch, batch_tokens = split_batch(config, world_size)
        self.step_rows = batch_tokens // config.seq_len  # over all ranks
        self.accumulates = self.step_rows > self.micro_batch * self.row_groups  # several micro-batches in a step

        # The sources: each entry of a mixture, or all entries together.
        flag = "--val_data" if split == "val" and config.val_data else "--data"
        sources, self.weights = split_mixture(getattr(config, flag[2:]), flag)
        # For the log: a file's or folder's name; empty for the built-in text.
        self.names = [re.sub(r"[^\w.*-]+", "-", Path(entries[0]).name) if entries else "" for entries in sources]
        if len(set(self.names)) < len(sources):
            self.names = [f"{i}-{name}" for i, name in enumerate(self.names)]
        self.mixture = [f"{name}:{weight}" for name, weight in zip(self.names, self.weights, strict=True)]
        self.sources = [self._open(catalog.find(entries, flag), flag) for entries in sources]
        lack = next((s.lack for s in self.sources if s.count == 0), "")
        others = ", a --val_data, or --eval_every 0" * (split == "val")
        self.lack = lack and f"The {split} split has {lack}; or give more text{others}"  # the message; empty: rows
        self.streams = {str(i): s for i, s in enumerate(self.sources) if s.count is None}
        self.is_chat = any(isinstance(s, ChatRows) for s in self.sources)
        self.separate = config.documents == "separate" or self.is_chat
        self.epoch_rows = sum(s.count or 0 for s in self.sources)  # of the sources that are not streamed

        # The position.
        self.samples = 0  # handed out so far, over all ranks, where each step counts as full
        self.end = math.ceil(config.epochs * self.epoch_rows)  # samples of all --epochs; 0: no end
        self.lanes = {}  # by source: the positions of its lanes
        if split == "val":
            self.val_rows, self.kept_steps = self._validation_rows(), []

    def _open(self, listing, flag):
        config, val, name = self.config, self.split == "val", listing.files[0].name
        if not listing.is_stream:
            shards = listing.splits["train"] + listing.splits["val"] if config.val_data else listing.splits[self.split]
            delimiter = listing.delimiter if config.delimiter < 0 else config.delimiter
            return (ChatRows if listing.is_chat else ShardRows)(shards, delimiter, config)
        if val and flag == "--data":
            raise UserError(f"--data {name} is streamed: name a --val_data, or turn evaluation off with --eval_every 0")
        if val and not config.eval_batches:
            raise UserError("--eval_batches 0: a streamed --val_data has no known end: give a number")
        rows = self.micro_batch * self.row_groups
        # Row r is of lane r mod lanes. A lane meets rows / gcd(rows, lanes) places of a micro-batch of all ranks, and
        # at most that many ranks read it.
        readers = min(self.row_groups, rows // math.gcd(rows, config.lanes))
        if readers > 1 and not val:
            log.warning(
                f"{flag} {name}: every row is read and tokenized {readers} times, because --lanes {config.lanes} is not"
                f" a multiple of the {rows} rows of a micro-batch of all ranks"
            )
        return Stream(listing.files, config)

    @property
    def stored(self) -> list:
        """The sources that are not streamed."""
        return [s for s in self.sources if s.count]

    def summary(self, val: "Loader | None") -> list[str]:
        """Lines for the head of the log."""
        c, rows, sizes = self.config, self.config.steps * self.step_rows, []
        for loader in (self, val) if val else (self,):
            tokens = f"{sum(s.tokens for s in loader.stored)} tokens"
            sizes.append(f"{tokens} and a stream" if loader.streams else tokens)
        lines = [f"Data: {' and, for validation, '.join(sizes)}; {plural(c.steps, 'step')} of {c.batch_tokens} tokens"]
        if len(self.sources) == 1 and self.epoch_rows:
            lines[0] += f" are {min(rows, self.end or rows) / self.epoch_rows:.2f} epochs"
        lines += [f"{name}: {s.note}" for name, s in zip(self.names, self.sources, strict=True) if s.note]
        if len(self.mixture) > 1:
            lines.append(f"A mixture of {', '.join(self.mixture)}")
        return lines

    def describe(self) -> list[dict]:
        """What identifies the data, for the run folder and for a checkpoint."""
        parts = [row for s in self.sources for row in s.describe()]
        return parts if len(self.mixture) == 1 else [*parts, {"mixture": self.mixture}]

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the data of a checkpoint: by recorded hashes, and by samples of the files without one."""
        hashes = {path: sha256 for s in self.sources for path, sha256 in s.hashes.items()}
        unknown = [Path(path) for path, sha256 in hashes.items() if not sha256]
        content = [*self.describe(), *hashes.values(), sample_digest(unknown)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]

    def state_dict(self) -> dict:
        """The position after the last batch that the caller received. It has the lanes that this rank has read, and all
        lanes of the position where it began."""
        return {
            "samples": self.samples,
            "seq_len": self.config.seq_len,
            "chat": self.is_chat,
            "data": self.fingerprint,
            "lanes": self.lanes,
            "end": self.end,
        }

    def load_state_dict(self, state: dict) -> None:
        """Goes on from a position of state_dict, of any rank or number of ranks. UserError if it is of other data."""
        for field, known in (("data", self.fingerprint), ("seq_len", self.config.seq_len)):
            if state.get(field) != known:
                built_in = "" if self.config.data else "; the built-in text changes with Python and torch"
                raise UserError(
                    f"The checkpoint was trained on other data ({field} {state.get(field)}, now {known}): give the same"
                    f" --data and --seq_len, or a new --out{built_in}"
                )
        self.samples, self.lanes = state["samples"], state["lanes"]
        # Rows that the last step took beyond the end of --epochs.
        left_out = self.samples - (state.get("end") or self.samples)
        if left_out > 0 and self.end != state["end"]:
            log.warning(f"The last step of --epochs was short: {plural(left_out, 'row')} of the next epoch left out")

    def text_bytes(self) -> tuple[int, int]:
        """(bytes of text, tokens) of the trained tokens of a validation split on all ranks. (0, 0) if a source is a
        stream, or the text of its tokens is not known."""
        if self.streams or not knows_text(self.config):
            return 0, 0
        all_ranks = copy.copy(self)  # a loader for all rows, as on a single rank
        all_ranks.my_group, all_ranks.row_groups, all_ranks.columns = 0, 1, slice(None)
        counts = np.zeros(self.config.model_config.vocab_size, np.int64)
        for batch in itertools.chain.from_iterable(all_ranks):
            counts += np.bincount(batch.targets[batch.targets != IGNORE], minlength=len(counts))
        sizes = token_sizes(load_tokenizer(self.config.tokenizer))
        return int(counts[: len(sizes)] @ sizes), int(counts.sum())

    def __iter__(self) -> Iterator[list[Batch]]:
        if self.split == "val":
            yield from self._validation_steps()
            return
        for micro_batches, samples, lanes in read_ahead(self._training_steps(self.samples), 1):
            self.samples, self.lanes = samples, lanes
            yield micro_batches

    def _training_steps(self, samples: int) -> Iterator[tuple]:
        """(micro-batches, the position after them) without end."""
        for i, stream in self.streams.items():
            stream.start(self.lanes.get(i, {}))
        try:
            while True:
                stop = samples + self.step_rows
                last = min(stop, self.end) if samples < self.end else stop  # the last step of --epochs may be short
                micro_batches = self._micro_batches(*self._rows_of(np.arange(samples, last)))
                samples = stop
                yield micro_batches, samples, {i: dict(s.positions) for i, s in self.streams.items()}
        finally:
            self._close()

    def _validation_steps(self) -> Iterator[list[Batch]]:
        n, (source, row) = self.step_rows, self.val_rows
        steps = (self._micro_batches(source[i : i + n], row[i : i + n]) for i in range(0, len(row), n))
        if self.streams:  # they are read once, and their rows kept
            self.kept_steps = steps = self.kept_steps or list(steps)
            self._close()
        yield from steps

    def _close(self) -> None:
        for stream in self.streams.values():
            stream.close()

    def _rows_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """-> (source, row in the source) of each sample."""
        source, row = turns(samples, self.weights)
        for i, s in enumerate(self.sources):
            if s.count:
                epochs, in_epoch = np.divmod(row, s.count)
                for epoch in np.unique(epochs[source == i]):
                    now = (source == i) & (epochs == epoch)
                    key = f"{self.config.seed}/{epoch}"
                    if i:  # the first source has the order that it has alone
                        key += f"/{i}"
                    row[now] = permute(in_epoch[now], s.count, key)
        return source, row

    def _validation_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(source, row in the source) of all rows that are evaluated."""
        limit, counts = self.config.eval_batches * self.step_rows, [s.count for s in self.sources]
        if not limit:
            return np.repeat(np.arange(len(counts)), counts), np.concatenate([np.arange(n) for n in counts])
        source, row = turns(np.arange(limit), self.weights)
        for i, n in enumerate(counts):
            if n is not None:
                kept = (source != i) | (row < n)
                source, row = source[kept], row[kept]
                ours = source == i
                row[ours] = row[ours] * n // ours.sum()  # spread evenly over the source's n rows
        return source, row

    def _micro_batches(self, source: np.ndarray, row: np.ndarray) -> list[Batch]:
        """This rank's micro-batches of a step, whose rows are given for all ranks: row (m * row_groups + my_group) *
        micro_batch + i is row i of micro-batch m. Where the last one reaches beyond the step, it is filled with rows
        that are not trained on."""
        starts = np.arange(0, len(row), self.micro_batch * self.row_groups) + self.my_group * self.micro_batch
        mine = (starts[:, None] + np.arange(self.micro_batch)).ravel()
        real = mine < len(row)
        mine = np.where(real, mine, 0)
        source, row = source[mine], row[mine]
        shape = len(mine), self.config.seq_len
        tokens, targets, begins = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64), np.zeros(shape, bool)
        for i, s in enumerate(self.sources):
            ours = real & (source == i)
            tokens[ours], targets[ours], begins[ours] = s.rows(row[ours])
        arrays = tokens[:, self.columns], targets[:, self.columns], begins, source
        out = []
        parts = (torch.from_numpy(array).split(self.micro_batch) for array in arrays)
        for *tokens_and_targets, begins, source in zip(*parts, strict=True):
            positions, documents = _positions(begins) if self.separate else (None, None)
            out.append(Batch(*tokens_and_targets, positions, documents, source if len(self.sources) > 1 else None))
        return out


def _positions(begins: Tensor) -> tuple[Tensor, Tensor]:
    """begins [B, T] -> positions [B, T], and where documents begin in the flattened rows. A row begins one, too: that
    changes `begins`."""
    begins[:, 0] = True
    index = torch.arange(begins.shape[1])
    positions = index - torch.where(begins, index, 0).cummax(1).values
    return positions, document_begins(positions)


def make_loader(config: Config, rank=0, world_size=1, split="train", catalog: Catalog | None = None) -> Loader:
    """split: "train" or "val". UserError if it has no row."""
    loader = Loader(config, rank, world_size, split, catalog or Catalog(config))
    if loader.lack:
        raise UserError(loader.lack)
    return loader


def epochs_as_steps(config: Config, world_size: int) -> Config:
    """Replaces --epochs by the number of steps that it means. Tokenizes text that is not in the cache."""
    loader = make_loader(config, 0, world_size)
    if loader.streams or len(loader.sources) > 1:
        raise UserError("--epochs needs one source of known length, not a stream or a mixture: give --steps")
    config = replace(config, steps=-(-loader.end // (loader.step_rows or 1)))  # 0 is refused later
    check_values(config)
    return config


def open_checked(config: Config, world_size: int = 1, catalog: Catalog | None = None) -> list[Loader]:
    """open_loaders, for rank 0. Refuses a tokenizer that does not fit the model, the weights or the shards, and
    ids beyond the vocabulary among the first 2^24 tokens of a source; other ids are checked when a step reads them."""
    if knows_text(config):
        check_tokenizer(config)
    loaders = open_loaders(config, 0, world_size, catalog or Catalog(config))
    sources = [source for loader in loaders for source in loader.stored]
    for source in sources:
        source.read(0, min(source.tokens, CHECKED))
    if (config.chat_fields or config.long_chats != "truncate") and not any(loader.is_chat for loader in loaders):
        raise UserError("--chat_fields and --long_chats are for conversations, and --data has none: leave them out")
    if config.data_dtype and all(shard.offset for source in sources for shard in source.shards):
        raise UserError(f"--data_dtype {config.data_dtype} is for headerless files, and there are none: leave it out")
    return loaders


def open_loaders(config: Config, rank: int, world_size: int, catalog: Catalog) -> list[Loader]:
    """For training and, if the run evaluates, for validation. A run whose --data is too short for a validation row
    skips evaluation, with a warning."""
    loaders = [make_loader(config, rank, world_size, "train", catalog)]
    if config.eval_every:
        val = Loader(config, rank, world_size, "val", catalog)
        if not val.lack:
            return [*loaders, val]
        if config.val_data:
            raise UserError(val.lack)
        log.warning(f"{val.lack}. This run skips evaluation")
    return loaders


def open_data(config: Config, ranks: Ranks) -> tuple[Loader, Loader | None]:
    """The loaders for training and, if the run evaluates, for validation. Rank 0 goes first: it finds and checks the
    data, and tells the others the files, their sizes and the fingerprint. All ranks must call."""
    catalog, loaders = Catalog(config), []

    def look_up() -> tuple:
        loaders.extend(open_checked(config, ranks.world_size, catalog))
        return catalog.listings, loaders[0].fingerprint

    listings, fingerprint = on_first_rank(look_up, ranks)
    if not loaders:
        catalog.accept(listings)
        loaders = open_loaders(config, ranks.rank, ranks.world_size, catalog)
    loaders[0].fingerprint = fingerprint  # a cached_property: only rank 0 computes it, from the files
    return loaders[0], loaders[1] if len(loaders) > 1 else None


# ---- the command line


def steps_of_run(run: Path, step: int) -> tuple[Loader, Iterator[list[Batch]]]:
    """-> (the loader of a run, its steps from this one on). A stream is read from the newest checkpoint before it, or
    from the start."""
    loader = make_loader(read_run(run))
    saved = [path for path in run.glob("checkpoints/step-*/manifest.json") if int(path.parent.name[5:]) < step]
    if saved:
        loader.load_state_dict(read_object(max(saved))["position"])
    first = (step - 1) * loader.step_rows
    if not loader.streams:
        loader.samples = first
    steps = iter(loader)
    while loader.samples < first:
        next(steps)
    return loader, steps


def show(loader: Loader, steps: Iterator[list[Batch]], n: int) -> Iterator[str]:
    """Up to n rows of a loader's steps as the model sees them, decoded, document by document. Trained tokens
    are marked. The last line explains which conversations are held out for validation."""
    config, tokenizer = loader.config, load_tokenizer(loader.config.tokenizer)
    count = min(n, loader.epoch_rows or n)
    rows = ((batch, i) for batches in steps for batch in batches for i in range(len(batch.tokens)))
    for number, (batch, i) in enumerate(itertools.islice(rows, count), 1):
        starts = [0] if batch.positions is None else (batch.positions[i] == 0).nonzero().flatten().tolist()
        out = [f"--- row {number}"]
        for start, stop in itertools.pairwise([*starts, config.seq_len]):
            tokens, targets = batch.tokens[i, start:stop].tolist(), batch.targets[i, start:stop].tolist()
            trained = [target != IGNORE for target in targets]
            if not any(trained):
                out.append(f"--- {stop - start} places filled up, not trained on")
                continue
            if len(starts) > 1:
                out.append("--- document")
            tokens += targets[-1:] * trained[-1]  # a document's last token may be a target alone
            out.append(decode_marked(tokenizer, tokens, [False, *trained]))
        yield "\n".join(out)
    if count < n:
        yield f"--- these are all rows: {count}"
    if loader.is_chat and not config.val_data:
        yield (
            "--- not shown: every 20th conversation (--val_every-th in a prepared folder) is held out for validation;"
            " with --val_data FILE, all are trained on"
        )


def main(argv: list[str]) -> None:
    if argv[:1] != ["show"]:
        return run_text_command(argv, parse_args)
    verb = VERBS["show"]
    parser = Parser(verb["flags"], prog="data.py show", description=verb["help"])
    args, words = parser.parse_known_args(argv[1:])
    if bool(args.run) != bool(args.step) or args.run and words:
        raise UserError(f"show takes either --run RUN --step N, or the flags of train.py; not {' '.join(words)}")
    if args.run:
        loader, steps = steps_of_run(args.run, args.step)
    else:
        loader = make_loader(parse_args(words))
        steps = iter(loader)
    for text in show(loader, steps, args.n or (loader.step_rows if args.run else 3)):
        print(text, flush=True)


if __name__ == "__main__":
    run_script(main)
