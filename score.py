"""Scores of a model on the rows of a file: how often the right choice is the most probable one, and the loss of texts.

    {"prompt": "The capital of Italy is", "choices": ["Paris", "Rome"], "answer": 1}
    {"messages": [{"role": "user", "content": "..."}], "choices": ["Paris", "Rome"], "answer": "Rome"}
    {"text": "Rome is the capital of Italy."}

Choices are scored as by the tasks of lm-evaluation-harness (`output_type: multiple_choice`), so that their numbers can
be compared. The text of a choice follows the prompt after a space; after messages, it follows the prompt for an answer
at once. A choice's score is the sum of the log-probabilities of its tokens. `acc` counts rows where the right one has
the largest score, `acc_norm` rows where it has the largest score per character. If a prompt is too long, its beginning
is cut off.

A text that is longer than the model's context is divided into windows, and each token is predicted once: from BOS or
the window's first tokens on. bits per byte = nats / (bytes ln 2), which does not depend on the tokenizer."""

import json
import math
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.attention import sdpa_kernel

from attention import WITHOUT_CUDNN
from base import disk
from base.disk import write_whole
from base.errors import UserError
from base.ranks import Ranks, gather
from dataset.prepare import read_rows
from model import IGNORE, Transformer
from shard import uncompiled, whole_rows

BATCH_TOKENS = 2**14  # of a forward pass of a rank
Z = 1.96  # standard deviations of a normal distribution within which 95 % lie


def read_questions(path: str, flag: str, source) -> list[dict]:
    """The rows of a file in any format of --data, each with `parts`, one for each choice or for each window of a text:
    (ids, how many of the last of them are predicted). source: a generate.Source."""
    return read_rows(path, flag, lambda fields: _encode(fields, source))


def _encode(fields: dict, source) -> dict:
    choices, answer, text = (fields.pop(name, None) for name in ("choices", "answer", "text"))
    if text and isinstance(text, str) and choices is None:
        ids = [source.tokenizer.bos_id, *source.tokenizer.encode(text)]
        ends = [*range(1, len(ids), source.context), len(ids)]
        # Each token is predicted once, from as much of the text before it as its window holds.
        parts = [(ids[max(0, end - source.context - 1) : end], end - begin) for begin, end in pairwise(ends)]
        return {"parts": parts, "bytes": len(text.encode())}
    if not (isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)):
        choices = []
    answer = choices.index(answer) if answer in choices else answer
    if isinstance(answer, bool) or answer not in range(len(choices)):
        raise UserError("expected a text, or prompt or messages, choices, and answer, which is a choice or its index")
    ids, prompt = source.read_prompt(fields)
    parts = [_choice(ids, prompt, choice, source) for choice in choices]
    return {"parts": parts, "answer": answer, "lengths": [*map(len, choices)]}


def _choice(ids: list[int], prompt: str | list[dict], choice: str, source) -> tuple[list[int], int]:
    """ids: of a prompt of messages."""
    tokenizer = source.tokenizer
    if isinstance(prompt, str):
        bos = [tokenizer.bos_id] * source.bos
        ids = bos + tokenizer.encode(prompt.rstrip())
        added = (bos + tokenizer.encode(f"{prompt} {choice}"))[len(ids) :]  # spaces belong to the token after them
    else:
        ids = [*ids]
        added = tokenizer.encode(choice, is_first=False)
        while tokenizer.decode(ids[-1:]).isspace():  # as after a text, it is scored with the choice
            added.insert(0, ids.pop())
    if not 0 < len(added) <= source.context:
        raise UserError(f"choice {choice!r:.80} has {len(added)} tokens, expected 1 to {source.context}")
    return ((ids or [tokenizer.bos_id]) + added)[-source.context - 1 :], len(added)


@torch.no_grad()
def score(model: Transformer, rows: list[dict], ranks: Ranks, shows: bool = False) -> list[dict]:
    """The result of each row: `scores`, the summed log-probabilities of its parts, and what follows from them. Parts of
    about equal length are computed together, the longest first. The model is in its evaluation mode. shows: a progress
    bar. All ranks must call."""
    from huggingface_hub.utils import tqdm

    parts, found = [part for row in rows for part in row["parts"]], {}
    order, batches = sorted(range(len(parts)), key=lambda i: -len(parts[i][0])), []
    while order:
        size = max(1, BATCH_TOKENS // len(parts[order[0]][0]))
        batches.append(order[:size])
        order = order[size:]
    with uncompiled(), whole_rows(model), sdpa_kernel(WITHOUT_CUDNN):  # neither plans a kernel for every length
        for first in tqdm(range(0, len(batches), ranks.world_size), "Scoring", disable=ranks.rank > 0 or not shows):
            batch = batches[min(first + ranks.rank, len(batches) - 1)]  # a sharded model needs all ranks in each pass
            losses = _losses(model, [parts[i] for i in batch], ranks.device)
            found |= zip(batch, losses, strict=True)
            disk.advance()
    for others in gather(found, ranks):
        found |= others
    losses = (found[i] for i in range(len(parts)))
    return [_judge(row, [-next(losses) for _ in row["parts"]]) for row in rows]


def _losses(model: Transformer, parts: list[tuple[list[int], int]], device: torch.device) -> list[float]:
    """One forward pass. The unused end of a row comes after its tokens, so they do not see it."""
    tokens = torch.zeros(len(parts), len(parts[0][0]), dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORE)
    for row, (ids, scored) in enumerate(parts):
        end = len(ids)
        tokens[row, :end] = torch.tensor(ids)
        targets[row, end - scored : end] = tokens[row, end - scored : end]
    _, details = model(tokens[:, :-1].to(device), targets[:, 1:].to(device), details=True)
    return details.row_losses.tolist()


def _judge(row: dict, scores: list[float]) -> dict:
    """Whether the right choice has the largest score, and the largest per character; or the loss of a text."""
    if "bytes" in row:
        return {"nats": -sum(scores), "tokens": sum(scored for _, scored in row["parts"]), "bytes": row["bytes"]}
    per_character = [score / length for score, length in zip(scores, row["lengths"], strict=True)]
    best, best_per_character = scores.index(max(scores)), per_character.index(max(per_character))
    answer = row["answer"]
    return {"scores": scores, "answer": answer, "acc": best == answer, "acc_norm": best_per_character == answer}


def summarize(results: list[dict]) -> dict[str, float]:
    """The means of acc and acc_norm over the rows with choices, and the figures of all texts together."""
    names = "acc", "acc_norm", "nats", "tokens", "bytes"
    acc, acc_norm, nats, tokens, size = (sum(result.get(name, 0) for result in results) for name in names)
    figures, count = {}, sum("acc" in result for result in results)
    if count:
        figures = {"acc": acc / count, "acc_norm": acc_norm / count}
    if tokens:
        mean, bits = nats / tokens, nats / math.log(2)
        figures |= {"nats_per_token": mean, "bits_per_byte": bits / size, "perplexity": math.exp(mean)}
    return figures


def interval(share: float, n: int) -> str:
    """Wilson's 95 % interval of a share of n rows."""
    middle, half = share * n + Z * Z / 2, Z * math.sqrt(share * (1 - share) * n + Z * Z / 4)
    return f"({(middle - half) / (n + Z * Z):.4f} to {(middle + half) / (n + Z * Z):.4f}, {n} rows)"


def report(results: list[dict], out: str | None) -> None:
    """Prints the figures. out: a file for the results."""
    if out:
        lines = [json.dumps({"row": number} | result) + "\n" for number, result in enumerate(results, 1)]
        write_whole(Path(out), "".join(lines))
    count = sum("acc" in result for result in results)
    for name, value in summarize(results).items():
        print(f"{name:15} {value:.4f}", interval(value, count) if "acc" in name else "")
