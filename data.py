"""From rows to batches: the order of rows, mixtures, the position in the data; and the commands for data.

A row is seq_len tokens and their successors. The shards of text of a split are one long sequence of tokens; row i
begins at token i * seq_len. Conversations are packed into rows. Rows are visited in a random order that is a pure
function of (seed, epoch, i). It is computed when it is needed, and never stored. Sample n is the n-th row of that
order, from 0. Let R = batch_tokens / seq_len: step s, from 1, trains on samples (s - 1) R ... s R - 1. Ranks,
micro-batches and resumes do not change this, so the position is one integer. The files of a stream are dealt to lanes
(dataset/rows.py), and each lane adds its position. In a mixture, `turns` decides which source gives the next sample.
dataset/rows.py reads the rows.

    two epochs of 5 rows, R = 4                   order of epoch 0          order of epoch 1
    samples                                       0  1  2  3  4             5  6  7  8  9
    rows, in another order each epoch             3  0  4  1  2             1  3  2  0  4
    step                                          1  1  1  1  2             2  2  2  3  3

A resume after step 2 begins with sample 8. It needs neither the rows before it nor the number of ranks.

    python data.py prepare --data FILES --tokenizer T --out DIR         text -> token shards
    python data.py verify DIR|FILE ...                                  checks headers and checksums
    python data.py train-tokenizer --data FILES --vocab_size N --out DIR
    python data.py show --data FILES --n 3 [any flag of train.py]       decoded rows; [[trained tokens]]
    python data.py show --run RUN --step N                              the rows of a run's step"""

import itertools
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from base.disk import plural, read_ahead, read_object, sample_digest
from base.errors import Parser, UserError, naming, prepare_python, run_script
from config import Config, check_values, choose_lanes, from_json, parse_args, row_groups, split_batch
from dataset.prepare import main as run_text_command
from inputs import settle_model, settled_args

if __name__ == "__main__":
    prepare_python()
if __name__ == "__main__" and sys.argv[1:2] != ["show"]:
    # Ends the process, before torch is imported, which takes seconds.
    run_script(lambda argv: run_text_command(argv, settled_args))

import numpy as np  # isort: skip
import torch
from torch import Tensor

from base import torch_private
from base.ranks import Ranks, on_first_rank
from dataset.prepare import VERBS, digest, knows_text, log
from dataset.rows import Listing, NoRows, find_sources, open_cached, open_source, permute, split_mixture, turns
from hf.tokenizer import decode_marked, load_tokenizer, token_sizes
from shapes import IGNORE, document_begins

CHECKED = 2**24  # tokens of a source whose ids are checked before the run


@dataclass
class Batch:
    """One micro-batch. Ranks that share rows have parts of the tokens and targets, and the positions and documents of
    the whole rows. A packed row of two conversations, `a b C D` and `e F G`, whose capitals are the answers, in T = 8
    places:

        tokens        a  b  C | e  F | 0  0  0          a last token is a target only
        targets       -  C  D | F  G | -  -  -          - is -100: not an answer's token, or nothing follows
        positions     0  1  2 | 0  1 | 0  1  2
        documents     0, 3, 5, 8, 8, ...                their starts, filled up with B T = 8"""

    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64; -100: not trained on
    positions: Tensor | None = None  # [B, T] int64, 0 where a document begins; None: a row is one sequence
    documents: Tensor | None = None  # with positions: int32, see shapes.document_begins
    sources: Tensor | None = None  # in a mixture: [B] int64, the entry of --data that a row is from
    pairs: Tensor | None = None  # with --dpo: [B, P] int64, the numbers of each row's pairs; -1: none
    reference: Tensor | None = None  # with pairs: [B, P, 2] fp32, log p of the reference; see preferences.py

    def units(self) -> int:
        """The number of terms of the summed loss: trained tokens, or pairs."""
        return int((self.targets != IGNORE).sum() if self.pairs is None else (self.pairs >= 0).sum())

    def to(self, device: torch.device) -> "Batch":
        """Asynchronous on a GPU."""
        if device.type == "cpu":
            return self
        batch = Batch(*(t if t is None else t.pin_memory().to(device, non_blocking=True) for t in vars(self).values()))
        if batch.documents is not None:  # its length is the batch's own: code is compiled for any
            torch_private.mark_dynamic(batch.documents, 0)
        return batch


class Loader:
    """Iterates over optimizer steps. Each item is the list of this rank's micro-batches. Training never ends: epochs
    follow each other, each in another order. Validation goes once through eval_batches global batches, evenly spread.

    The rows of a step, with 8 rows, 2 ranks and micro-batches of 2 rows:

        rank 0      0 1 | 4 5           first | second micro-batch
        rank 1      2 3 | 6 7"""

    def __init__(self, config: Config, rank: int, world_size: int, split: str, found: dict[str, list[Listing]]):
        """found: from find_sources, with the sources of this split."""
        self.config = config = replace(config, lanes=choose_lanes(config, world_size))
        self.split, flag = split, flag_of(config, split)

        # The ranks of a row group share their rows: each reads some columns of them.
        self.row_groups = row_groups(config, world_size)
        sharing = world_size // self.row_groups
        self.my_group, index = divmod(rank, sharing)
        width = config.seq_len // sharing
        self.columns = slice(index * width, (index + 1) * width)
        self.micro_batch, batch_tokens = split_batch(config, world_size)
        self.step_rows = batch_tokens // config.seq_len  # over all ranks

        # The sources: each entry of a mixture, or all entries together.
        entries, self.weights = split_mixture(config, flag)
        with naming(f"The {split} split of {flag}"):
            self.sources = [open_source(listing, split, config) for listing in found[flag]]
        self.streams = {str(i): s for i, s in enumerate(self.sources) if s.count is None}
        if self.streams and split == "val" and not (config.val_data and config.eval_batches):
            raise UserError("A stream needs a --val_data and --eval_batches to evaluate, or --eval_every 0")
        self.separate = config.documents == "separate" or any(s.is_chat for s in self.sources)
        # For the log: a file's or folder's name; empty for the built-in text.
        self.names = [re.sub(r"[^\w.*-]+", "-", Path(names[0]).name) if names else "" for names in entries]
        if len(set(self.names)) < len(entries):
            self.names = [f"{i}-{name}" for i, name in enumerate(self.names)]
        # samples: handed out so far, over all ranks. lanes: by stream, the positions of its lanes.
        self.position = {"samples": 0, "lanes": {}}
        self.kept_steps = []  # of a validation stream
        self.pair_begins = np.cumsum([0, *(s.pair_count for s in self.sources)])  # the first pair of each source
        self.reference = None  # of all pairs [pairs, 2] fp32, which preferences.py sets

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.step_rows > self.micro_batch * self.row_groups

    @property
    def epoch_rows(self) -> int:
        """Rows of the sources that are not streamed."""
        return sum(s.count or 0 for s in self.sources)

    @property
    def end(self) -> int:
        """Samples of all --epochs; 0: no end."""
        return math.ceil(self.config.epochs * self.epoch_rows)

    def summary(self) -> list[str]:
        """Lines for the head of the log."""
        c, tokens = self.config, f"{sum(s.tokens for s in self.sources)} tokens{' and a stream' * bool(self.streams)}"
        line = f"Data: {tokens}; {plural(c.steps, 'step')} of {c.batch_tokens} tokens"
        if len(self.sources) == 1 and self.epoch_rows:
            line += f" are {c.epochs or c.steps * self.step_rows / self.epoch_rows:.2f} epochs"
        return [line, *(f"{name}: {s.note}" for name, s in zip(self.names, self.sources, strict=True) if s.note)]

    def describe(self) -> list[dict]:
        """What identifies the data, for the run folder and for a checkpoint."""
        parts = [row for s in self.sources for row in s.about]
        mixture = [f"{name}:{weight}" for name, weight in zip(self.names, self.weights, strict=True)]
        return parts if len(mixture) == 1 else [*parts, {"mixture": mixture}]

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the data of a checkpoint: by recorded hashes, and by samples of the files without one."""
        hashes = {path: sha256 for s in self.sources for path, sha256 in s.hashes.items()}
        unknown = [Path(path) for path, sha256 in hashes.items() if not sha256]
        return digest(*self.describe(), *hashes.values(), sample_digest(unknown))[:32]

    def state_dict(self) -> dict:
        """The position after the last batch that the caller received. It has the lanes that this rank has read, and all
        lanes of the position where it began."""
        chat = any(s.is_chat for s in self.sources)
        return {"seq_len": self.config.seq_len, "chat": chat, "data": self.fingerprint, **self.position}

    def load_state_dict(self, state: dict) -> None:
        """Goes on from a position of state_dict, of any rank or number of ranks. UserError if it is of other data."""
        for field, known in (("data", self.fingerprint), ("seq_len", self.config.seq_len)):
            if state.get(field) != known:
                raise UserError(
                    f"The checkpoint was trained on other data ({field} {state.get(field)}, now {known}): give the same"
                    " --data and --seq_len, or a new --out"
                )
        # Version 0.3 counted the rows that the last step of --epochs did not have.
        samples = min(state["samples"], state.get("end") or state["samples"])
        self.position = {"samples": samples, "lanes": state["lanes"]}

    def text_bytes(self) -> tuple[int, int]:
        """(bytes of text, tokens) of the trained tokens of a validation split on all ranks. (0, 0) if a source is a
        stream, or the text of its tokens is not known."""
        if self.streams or not knows_text(self.config):
            return 0, 0
        counts = np.zeros(self.config.model_config.vocab_size, np.int64)
        for rows in self._validation_order():
            _, targets, _ = self._read(*rows)
            counts += np.bincount(targets[targets != IGNORE], minlength=len(counts))
        sizes = token_sizes(load_tokenizer(self.config.tokenizer))
        return int(counts[: len(sizes)] @ sizes), int(counts.sum())

    def __iter__(self) -> Iterator[list[Batch]]:
        if self.split == "train":
            steps = read_ahead(self._training_steps(), 1)
            for micro_batches, self.position in steps:
                yield micro_batches
            return
        steps = (self._micro_batches(*rows) for rows in self._validation_order())
        if self.streams:  # they are read once, and their rows kept
            self.kept_steps = steps = self.kept_steps or list(steps)
            for stream in self.streams.values():
                stream.start({})
        yield from steps

    def _training_steps(self) -> Iterator[tuple]:
        """(micro-batches, the position after them) without end."""
        samples = self.position["samples"]
        for i, stream in self.streams.items():
            stream.start(self.position["lanes"].get(i, {}))
        try:
            while True:
                stop = samples + self.step_rows
                if samples < self.end < stop:  # the last step of --epochs
                    stop = self.end
                micro_batches = self._micro_batches(*self._rows_of(np.arange(samples, stop)))
                samples, lanes = stop, {i: dict(s.positions) for i, s in self.streams.items()}
                yield micro_batches, {"samples": samples, "lanes": lanes}
        finally:
            for stream in self.streams.values():
                stream.start({})

    def _rows_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """-> (source, row in the source) of each sample."""
        source, row = turns(samples, self.weights)
        for i, s in enumerate(self.sources):
            if s.count:
                epochs, in_epoch = np.divmod(row, s.count)
                for epoch in np.unique(epochs[source == i]):
                    now = (source == i) & (epochs == epoch)
                    key = f"/{i}" * (i > 0)  # the first source has the order that it has alone
                    row[now] = permute(in_epoch[now], s.count, f"{self.config.seed}/{epoch}{key}")
        return source, row

    def _validation_order(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(source, row in the source) of all rows that are evaluated, for each step."""
        limit, counts = self.config.eval_batches * self.step_rows, [s.count for s in self.sources]
        source = turns(np.arange(limit), self.weights)[0] if limit else np.repeat(np.arange(len(counts)), counts)
        row = np.zeros_like(source)
        for i, n in enumerate(counts):
            number = np.arange((source == i).sum())
            row[source == i] = number if n is None else number * n // min(len(number), n)  # spread over its n rows
        kept = row < np.array([n or limit for n in counts])[source]
        source, row = source[kept], row[kept]
        for start in range(0, len(row), self.step_rows):
            yield source[start : start + self.step_rows], row[start : start + self.step_rows]

    def _read(self, source: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens, targets, begins [n, T] of rows. A source of -1 gives a row that is not trained on."""
        shape = len(row), self.config.seq_len
        tokens, targets, begins = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64), np.zeros(shape, bool)
        for i, s in enumerate(self.sources):
            ours = source == i
            tokens[ours], targets[ours], begins[ours] = s.rows(row[ours])
        return tokens, targets, begins

    def _micro_batches(self, source: np.ndarray, row: np.ndarray) -> list[Batch]:
        """This rank's micro-batches of a step, whose rows are given for all ranks. Where the last one reaches beyond
        the step, it is filled with rows that are not trained on."""
        filler = 0, -len(row) % (self.micro_batch * self.row_groups)
        source, row = np.pad(source, filler, constant_values=-1), np.pad(row, filler)
        shape = -1, self.row_groups, self.micro_batch
        source, row = (numbers.reshape(shape)[:, self.my_group].ravel() for numbers in (source, row))
        tokens, targets, begins = self._read(source, row)
        arrays = [
            tokens[:, self.columns],
            targets[:, self.columns],
            begins,
            source.clip(0),
            *self._pairs_of(source, row),
        ]
        split, out = (torch.from_numpy(array).split(self.micro_batch) for array in arrays), []
        for tokens, targets, begins, source, *pairs in zip(*split, strict=True):
            positions = documents = None
            if self.separate:
                begins[:, 0] = True  # a row begins a document, too
                index = torch.arange(begins.shape[1])
                positions = index - torch.where(begins, index, 0).cummax(1).values
                documents = document_begins(positions)
            sources = source if len(self.sources) > 1 else None
            out.append(Batch(tokens, targets, positions, documents, sources, *pairs))
        return out

    def _pairs_of(self, source: np.ndarray, row: np.ndarray) -> list[np.ndarray]:
        """-> [the numbers of the pairs of each row [n, P], log p of their reference [n, P, 2]]; [] without --dpo. A
        source of -1 has none."""
        if not self.pair_begins[-1]:
            return []
        pairs = np.full((len(row), max(s.most for s in self.sources)), -1)
        for places, i, at in zip(pairs, source, row, strict=True):
            numbers = self.sources[i].contents[at] if i >= 0 else []
            places[: len(numbers)] = numbers + self.pair_begins[i]
        reference = np.zeros((*pairs.shape, 2), np.float32)
        if self.reference is not None:
            reference[pairs >= 0] = self.reference[pairs[pairs >= 0]]
            if np.isnan(reference).any():
                raise UserError("reference.npz lacks pairs that --eval_batches adds: give the value of the first start")
        return [pairs, reference]


def flag_of(config: Config, split: str) -> str:
    """The flag that names the data of a split."""
    return "--val_data" if split == "val" and config.val_data else "--data"


def make_loader(config: Config, rank=0, world_size=1, split="train") -> Loader:
    """split: "train" or "val". UserError if it has no row."""
    config = settle_model(config)
    return Loader(config, rank, world_size, split, find_sources(config, [flag_of(config, split)]))


def epochs_as_steps(config: Config, world_size: int) -> Config:
    """Replaces --epochs by the number of steps that it means. Tokenizes text that is not in the cache."""
    if not config.epochs:
        return config
    loader = make_loader(config, 0, world_size)
    if loader.streams or len(loader.sources) > 1:
        raise UserError("--epochs needs one source of known length, not a stream or a mixture: give --steps")
    config = replace(config, steps=-(-loader.end // (loader.step_rows or 1)))  # 0 is refused later
    check_values(config)
    return config


def open_data(config: Config, ranks: Ranks) -> tuple[Loader, Loader | None]:
    """The loaders for training and, if the run evaluates, for validation. A run whose --data is too short for a
    validation row skips evaluation, with a warning. Rank 0 goes first: it finds the files, and checks the ids of the
    first 2^24 tokens of a source; others are checked when a step reads them. All ranks must call."""
    loaders = []

    def open_loaders(found) -> None:
        loaders.append(Loader(config, ranks.rank, ranks.world_size, "train", found))
        try:
            loaders.append(Loader(config, ranks.rank, ranks.world_size, "val", found) if config.eval_every else None)
        except NoRows as e:
            if config.val_data:
                raise
            log.warning(f"{e}. This run skips evaluation")
            loaders.append(None)

    def look_up() -> tuple:
        found = find_sources(config, ["--data"] + ["--val_data"] * bool(config.eval_every and config.val_data))
        open_loaders(found)
        sources = [source for loader in loaders if loader for source in loader.sources]
        for source in sources:
            if source.count:
                source.read(0, min(source.tokens, CHECKED))
        if config.chat_fields and not any(source.is_chat for source in sources):
            raise UserError("--chat_fields is for conversations, and --data has none: leave it out")
        return found, loaders[0].fingerprint

    found, fingerprint = on_first_rank(look_up, ranks)
    if not loaders:
        open_cached(found, config)
        open_loaders(found)
    data, val_data = loaders
    data.fingerprint = fingerprint  # a cached_property: only rank 0 computes it, from the files
    return data, val_data


# ---- the command line


def show(loader: Loader, step: int, n: int) -> Iterator[str]:
    """Up to n rows from a step on as the model sees them, decoded, document by document. Trained tokens are marked. A
    stream is read from its start."""
    tokenizer = load_tokenizer(loader.config.tokenizer)
    loader.position["samples"] = (step - 1) * loader.step_rows
    rows = ((batch, i) for batches in loader for batch in batches for i in range(len(batch.tokens)))
    for number, (batch, i) in enumerate(itertools.islice(rows, n), 1):
        starts = [0] if batch.positions is None else (batch.positions[i] == 0).nonzero().flatten().tolist()
        out = [f"--- row {number}"]
        names = itertools.cycle(["document"] if batch.pairs is None else ["chosen", "rejected"])
        for start, stop in itertools.pairwise([*starts, loader.config.seq_len]):
            tokens, targets = batch.tokens[i, start:stop].tolist(), batch.targets[i, start:stop].tolist()
            trained = [target != IGNORE for target in targets]
            if not any(trained):
                out.append(f"--- {stop - start} places filled up, not trained on")
                continue
            tokens += targets[-1:] * trained[-1]  # a document's last token may be a target alone
            out += [f"--- {next(names)}", decode_marked(tokenizer, tokens, [False, *trained])]
        yield "\n".join(out)


def main(argv: list[str]) -> None:
    if argv[:1] != ["show"]:
        return run_text_command(argv, settled_args)
    verb = VERBS["show"]
    parser = Parser(verb["flags"], prog="data.py show", description=verb["help"])
    args, words = parser.parse_known_args(argv[1:])
    if args.run:
        parser.parse_args(argv[1:])  # refuses other flags, because the run has its own
        config = from_json(read_object(args.run / "flags.json"))
    else:
        config = parse_args(words)
    loader = make_loader(config)
    rows = args.n or (loader.step_rows if args.step else 3)
    for text in show(loader, args.step or 1, rows):
        print(text, flush=True)


if __name__ == "__main__":
    run_script(main)
