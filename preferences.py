"""Training on pairs of answers to one prompt, the preferred and the other one: DPO and its relatives.

A pair is two neighbouring documents of a packed row, the chosen conversation and then the rejected one. Only the tokens
of their last answers are trained on. Let log p be the sum of an answer's log-probabilities, n their number, and p_ref
the same of the reference, which is the model before its first step. beta says how strongly the model is held to it.

    s = log p - log p_ref of each answer;   m = s_chosen - s_rejected
    sigmoid       -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)              e = label_smoothing
    sigmoid_norm  -log sigmoid(beta (s_chosen / n_chosen - s_rejected / n_rejected))
    ipo           (s_chosen / n_chosen - s_rejected / n_rejected - 1 / (2 beta))^2
    simpo         -log sigmoid(beta (log p_chosen / n_chosen - log p_rejected / n_rejected) - gamma), without reference

Where they come from: a model that maximises a reward r, minus beta times its divergence from the reference, has
r = beta log(p / p_ref) + a term that only the prompt decides. In the difference of two answers' rewards this term
cancels, so sigmoid(r_chosen - r_rejected) = sigmoid(beta m), the probability that the chosen answer wins (Bradley and
Terry), needs no model of rewards. At the first step p is p_ref: m is 0, and the loss of a pair ln 2.

The loss of a step is the sum over the pairs of all ranks, divided by the number of pairs. --dpo_sft adds the mean
cross-entropy of the chosen answer's tokens to each pair.

Sources: DPO (arXiv 2305.18290); label smoothing (2310.12036, Mitchell's cDPO note); IPO (2310.12036), averaged over the
tokens as in TRL; SimPO (2405.14734); the cross-entropy (RPO, 2404.19733)."""

import itertools
import logging
import math
import shutil
import time
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from base import disk
from base.errors import UserError
from base.ranks import gather, on_every_rank, on_first_rank
from config import Config
from shard import free_gathered

logger = logging.getLogger("flatland")
FIGURES = ("rewards_chosen", "rewards_rejected", "reward_accuracy", "reward_margin", "logp_chosen", "logp_rejected")


def pair_sums(losses: Tensor, batch) -> tuple[Tensor, Tensor]:
    """Losses of tokens [B, T] -> (log p, trained tokens), [B, P, 2] each: of the chosen and the rejected answer. A
    document begins where the position is 0. Sums of a mask, unlike a scatter, add in the same order in every run."""
    document = (batch.positions == 0).cumsum(1)[:, None]  # [B, 1, T], from 1
    pairs = batch.pairs.shape[1]
    number = torch.arange(1, 2 * pairs + 1, device=losses.device)[:, None]
    values = torch.stack((-losses, (batch.targets >= 0).float()))[:, :, None]  # [2, B, 1, T]
    sums = torch.where(document == number, values, 0).sum(3)  # [2, B, 2 P]
    return sums.view(2, -1, pairs, 2).unbind()


def pair_loss(config: Config, batch, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The objective of a data.Batch with pairs. losses: of its tokens, [B, T]. -> (the loss summed over the pairs;
    their number; the sums of FIGURES, fp64 without gradient)"""
    kind, beta = config.dpo, config.dpo_beta
    pairs = batch.pairs >= 0  # [B, P]: a row has up to P pairs
    logp, tokens = pair_sums(losses, batch)  # [B, P, 2], as the reference: of chosen and rejected answers
    tokens = tokens.clamp(min=1)  # places without a pair have none
    score = logp if kind == "simpo" else logp - batch.reference
    reward = score if kind == "sigmoid" else score / tokens
    margin = reward[..., 0] - reward[..., 1]
    if kind == "ipo":
        each = (margin - 1 / (2 * beta)).square()
    else:
        margin = beta * margin
        if kind == "simpo":
            margin = margin - config.simpo_gamma
        e = config.label_smoothing
        each = -(1 - e) * F.logsigmoid(margin)
        if e:
            each = each - e * F.logsigmoid(-margin)
    if config.dpo_sft:
        each = each - config.dpo_sft * (logp / tokens)[..., 0]
    loss = torch.where(pairs, each, 0).sum()

    # Reported rewards are beta s, and for simpo beta log p / n.
    chosen, rejected = (beta * (reward if kind == "simpo" else score).detach()).unbind(-1)
    figures = torch.stack(
        (chosen, rejected, (chosen > rejected).float(), chosen - rejected, *logp.detach().unbind(-1)), -1
    )
    return loss, pairs.sum(), torch.where(pairs[..., None], figures, 0).double().sum((0, 1))


# ---- the reference


@torch.no_grad()
def compute_reference(model, data, steps: int, ranks) -> np.ndarray:
    """log p of both answers of each pair that the first `steps` steps of a Loader visit, [pairs, 2] fp32; NaN for the
    others. The passes are training's, so that log p of the first step is bit-equal. All ranks must call."""
    visits, reported = [np.zeros((0, 4))], time.perf_counter()  # rows: order, number of a pair, log p of its answers
    for step, micro_batches in enumerate(itertools.islice(copy(data), steps)):
        for batch in micro_batches:
            batch = batch.to(ranks.device)
            *_, details = model(
                batch.tokens, batch.targets, batch.positions, batch.documents, True,
                lambda losses, batch=batch: (losses.sum(), 0, pair_sums(losses, batch)[0]),
            )  # fmt: skip
            numbers, logp = (x[batch.pairs >= 0].cpu().double() for x in (batch.pairs, details.figures))
            visits.append(
                torch.cat((torch.full_like(numbers, len(visits))[:, None], numbers[:, None], logp), 1).numpy()
            )
            disk.advance()
        if time.perf_counter() > reported + 10:
            reported = time.perf_counter()
            logger.info("Reference of the %s split: step %d of %s", data.split, step + 1, steps or "the evaluation")
    # One array of each rank: with 100 micro-batches each, reading their tensors would take 1,024 ranks 9 s.
    order, numbers, *logp = np.concatenate(gather(np.concatenate(visits), ranks)).T
    values = np.full((int(data.pair_begins[-1]), 2), np.nan, np.float32)
    # A pair's first visit counts, which is assigned last: a later epoch has other micro-batches, and other bits.
    first_last = np.argsort(-order, kind="stable")
    values[numbers[first_last].astype(int)] = np.stack(logp, 1)[first_last]
    return values


def make_objective(config, run, model, weight_scales, data, val_data, resume_from) -> Callable | None:
    """objective(batch, losses) of a run: see pair_loss; None without --dpo. Gives its Loaders the reference of their
    pairs: computed before the first step, and kept in the run folder as reference.npz. A resume reads it there. All
    ranks must call.

    weight_scales: of FP8. data, val_data: for training, and for validation or None."""
    ranks, begin = run.ranks, time.perf_counter()
    if config.dpo == "none":
        return None
    objective = partial(pair_loss, config)
    if config.dpo == "simpo":
        return objective
    loaders, share = [loader for loader in (data, val_data) if loader], sum(data.weights)
    # Until every row has been visited once.
    samples = max(s.count * share / weight for s, weight in zip(data.sources, data.weights, strict=True) if weight)
    steps = min(config.steps, math.ceil(samples / data.step_rows) + 1)
    keys = on_first_rank(lambda: [f"{loader.split} {loader.fingerprint}" for loader in loaders], ranks)  # reads files
    if resume_from:
        values = on_first_rank(lambda: _read_reference(run.folder, resume_from.folder, keys, steps), ranks)
    else:
        weight_scales.refresh()  # as a step does
        visits = steps, None  # of training, and all of validation
        values = [compute_reference(model, *row, ranks) for row in zip(loaders, visits, strict=False)]
        arrays = dict(zip(keys, values, strict=True), steps=np.array(steps))
        on_first_rank(lambda: np.savez(run.folder / "reference.npz", **arrays), ranks)
        free_gathered(model)
        logger.info(f"Computed the reference of the pairs in {time.perf_counter() - begin:.1f} s")
    for loader, reference in zip(loaders, values, strict=True):
        loader.reference = reference
    if resume_from:
        on_every_rank(lambda: [*map(len, val_data or ())], ranks)  # refuses --eval_batches that adds pairs, now
    return objective


def _read_reference(run: Path, resume_from: Path, keys: list[str], steps: int) -> list[np.ndarray]:
    """resume_from: a checkpoint, which --resume may name in another run. keys: the names of the arrays."""
    path = resume_from.parent.parent / "reference.npz"
    try:
        with np.load(path) as stored:
            if stored["steps"] >= steps:
                if not path.parent.samefile(run):
                    shutil.copy(path, run)
                return [stored[key] for key in keys]
            problem = f"has only the pairs of the first {stored['steps']} steps, and --steps asks for more"
    except Exception as e:  # any kind, if the archive is damaged; a KeyError, if it lacks a split
        problem = f"cannot be read: {e}"
    raise UserError(
        f"{path} {problem}. A resume needs the log-probabilities of the weights before the first step: restore the"
        " file, or start anew with another --out"
    )
