"""Trains a Llama or GPT model: the way of a token from the disk to the optimizer, on one page. The imports name
the file of each call.

    python train.py [@recipes/NAME.args ...] [--flag value ...]        one process
    torchrun --nproc-per-node N train.py ...          one process per GPU, as `bash launch.sh` starts it

Every step reads this rank's micro-batches and computes the loss of each, summed over its trained tokens, and its
gradients, which the backward pass also sums over the ranks. Then it divides by the global number of trained tokens,
clips, and updates the parameters with AdamW or Muon. Between records Python runs one step ahead of the GPU, which
therefore always has work. `Gradients.check` in optim.py draws this as a time line.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from base import errors
from config import Config, parse_args
from inputs import settle_inputs

if __name__ == "__main__":  # before torch is imported, which takes seconds: the environment, and a user's mistakes
    errors.prepare_python()
    errors.end_with_torchrun()
    errors.check_words(lambda words: settle_inputs(parse_args(words, trains=True)))

import torch  # isort: skip
from torch import Tensor

import checkpoint
import fp8
import nf4
import plan
import preferences
import preflight
import score
import shard
from base import disk, host
from base.disk import human
from base.ranks import Ranks, init_ranks, leave, on_first_rank, set_timeout
from data import Batch, Loader
from generate import write_samples
from hf import lora
from hf.weights import export_run
from job.job import Run
from log import Log, logger, profile_steps
from model import Details, Transformer
from optim import DTYPES, Gradients, Optimizer, learning_rate, make_optimizer, trainable_parameters


def main(argv: list[str]) -> int:
    config = parse_args(argv, trains=True)
    if config.check:
        return preflight.check(config)
    host.set_allocators()
    ranks = init_ranks()
    with Run(config.out, ranks, config.timeout, config.profile > 0) as run:  # before anything slow begins
        config = preflight.settle(config, ranks)
        host.set_numerics(config.dtype, config.deterministic)
        train(config, run)
    if run.exit_code == 0:
        leave(ranks)  # several ranks: the process ends in this call
    return run.exit_code


def train(config: Config, run: Run) -> None:
    """From the newest checkpoint, or from the start, to the last step. All ranks must call."""
    ranks = run.ranks
    resume_from, damaged = checkpoint.find(config, ranks)
    checkpoint.refuse_changes(resume_from, config)
    start = resume_from.step if resume_from else 0
    run.best = best = checkpoint.Best(config, resume_from, damaged)
    if start >= config.steps or best.reason:
        return finish_again(config, run, start, best)
    run.begin(start, damaged + config.warnings)
    data, val_data, questions, read_values = preflight.open_inputs(config, resume_from, best, ranks)
    run.mesh = mesh = shard.make_mesh(config.shard_size, ranks, config.offload == "cpu")
    row_group = shard.make_row_group(config.context_parallel, ranks)
    run.groups = shard.groups_of(mesh, row_group)
    set_timeout(run.hang_limit, ranks, run.groups)
    model = build(config, ranks, mesh, row_group)
    scales = fp8.WeightScales(model, mesh, config.fp8_all_gather, data.accumulates, config.compile != "none")
    optimizer = make_optimizer(model, config)
    fill(model, optimizer, data, resume_from, read_values, config, ranks)
    objective = preferences.make_objective(config, run, model, scales, data, val_data, resume_from)
    gradients = Gradients(model, config, ranks, mesh, resume_from.manifest.get("spikes", ()) if resume_from else ())
    saver = checkpoint.Saver(config, run, model, optimizer, data, start)
    log = Log(config, run, model, start, data.names)
    log.describe_run(data, val_data, plan.predict_record(config, ranks))
    with saver, log, host.without_collector() as collect, profile_steps(config.profile, run) as profiler:
        steps = iter(data)
        run.clock.switch("compile", start)  # the first step, which compiles
        for step in range(start + 1, config.steps + 1):
            with run.phase("data"):
                micro_batches = next(steps)
            lr = learning_rate(config, step)
            loss, grad_norm, details = train_step(model, optimizer, micro_batches, lr, gradients, scales, objective)
            log.sum_details(details)
            todo = actions_after(config, step, run.vote())  # of all ranks; of several, one step late
            gradients.check(step, wait=todo.record)  # raises for the step before, or, before a record, for this one
            val = evaluate(model, val_data, run, objective, questions) if todo.evaluate else {}
            todo.save |= best.update(step, val)
            todo.stop |= bool(best.reason)
            if todo.record:
                log.step(step, loss, grad_norm, lr, val | gradients.count_skipped())
            if todo.save:
                probe = micro_batches[0].tokens[0]  # a resume computes its loss again
                facts = {"spikes": gradients.accepted_values()} | ({"best": {**vars(best)}} if best.step else {})
                log.add(step, save_ms=saver.save(step, probe, facts, last=todo.stop or step == config.steps))
            if todo.evaluate or todo.save:
                log.add(step, **fp8.watched(model))
                log.draw()
            if todo.sample:
                log.add(step, sample=write_samples(config, run, model, step))
            collect(todo.record, todo.save)
            if todo.stop:
                break
            run.clock.switch("steps", step)
            profiler.step()
    if todo.stop and not best.reason:
        return run.end("stopped", step)
    finish(config, run, step, best)


def finish_again(config: Config, run: Run, step: int, best: checkpoint.Best) -> None:
    """For a run that has nothing left to train: exports it, if its export was interrupted, and tells that it is
    finished. All ranks must call."""
    if not checkpoint.is_finished(config, step):
        run.begin(step)
        finish(config, run, step, best)
    on_first_rank(lambda: preflight.say_finished(config, step, best), run.ranks)


def actions_after(config: Config, step: int, stops: bool) -> SimpleNamespace:
    """The actions of the loop after a step: true or false for each. stops: the ranks have agreed to stop."""

    last = step == config.steps

    def due(every: int, at_end: bool = False) -> bool:
        return every > 0 and (step % every == 0 or (last and at_end))

    evaluate, sample = due(config.eval_every, at_end=True), due(config.sample_every, at_end=True)
    save = last or stops or due(config.save_every)
    record = step == 1 or evaluate or save or due(config.log_every)
    stop = stops and not last
    return SimpleNamespace(evaluate=evaluate, record=record, save=save, sample=sample, stop=stop)


def train_step(
    model: Transformer, optimizer: Optimizer, micro_batches: list[Batch], lr: float, gradients: Gradients,
    weight_scales: fp8.WeightScales, objective: Callable | None = None,
) -> tuple[Tensor, Tensor, list[tuple[Batch, Details]]]:  # fmt: skip
    """One optimizer step on this rank's micro-batches -> (loss per unit, gradient norm, each micro-batch with its
    Details). The units are the trained tokens, or with an objective the pairs. Loss and norm count all ranks: fp32
    scalars on the gradients' device. All ranks must call.

    Losses and gradients are sums over trained tokens. They are divided once, by the trained tokens of all ranks and
    micro-batches. Suppose rank 0 trains on 10 tokens and rank 1 on 1,000:

                              rank 0    rank 1    together
        summed loss               30     2,000       2,030
        trained tokens            10     1,000       1,010
        mean                    3.00      2.00    2,030 / 1,010 = 2.01, not the means' mean of 2.50

    In the means' mean, a token of rank 0 would count as much as 100 tokens of rank 1. It would also change with the
    number of ranks and with the size of micro-batches; the quotient of sums does not. A gradient is a sum of its
    tokens' gradients like the loss, so the same division makes it the gradient of 2.01."""
    config, device = gradients.config, gradients.ranks.device
    weight_scales.refresh()  # of FP8, if there is some
    local_loss, local_units, details = torch.zeros((), device=device), 0, []
    for i, batch in enumerate(micro_batches):
        shard.prepare_backward(model, i == len(micro_batches) - 1, config.reshard)
        local_units += batch.units()  # on the host, which does not wait for the GPU
        batch = batch.to(device)
        batch_loss, batch_details = forward(model, batch, objective)
        batch_loss.backward()
        local_loss += batch_loss.detach()
        details.append((batch, batch_details))

    loss_sum, units, squared_norm = gradients.global_sums(local_loss, local_units)  # over all ranks
    loss = loss_sum / units  # the mean over the units; without any it is NaN, and the update is skipped
    grad_norm = squared_norm.sqrt() / units  # of the mean's gradient; the gradients themselves are still sums
    # Clipping multiplies the mean's gradient by clip / grad_norm if it is longer than clip: a divisor of at least 1.
    clip_divisor = (grad_norm / config.clip).clamp(min=1.0) if config.clip else 1.0
    gradients.skip = (~(loss.isfinite() & grad_norm.isfinite())).float()  # gradients.check reads it one step later
    if config.skip_spikes:
        gradients.skip_spike(loss, grad_norm)
    optimizer.step(lr, grad_divisor=units * clip_divisor, skip=gradients.skip)
    return loss, grad_norm, details


def forward(model: Transformer, batch: Batch, objective: Callable | None = None) -> tuple[Tensor, Details]:
    """-> (the loss of a micro-batch, summed over its units, Details)"""
    reduction = partial(objective, batch) if objective else None
    return model(batch.tokens, batch.targets, batch.positions, batch.documents, details=True, reduction=reduction)


def build(config: Config, ranks: Ranks, mesh, row_group=None) -> Transformer:
    """The model, ready to be filled: parameters allocated, nothing in them yet. The order is explained in shard.py."""
    logger.info("Creating Model")
    with torch.device("meta"):
        model = Transformer(config.model_config, DTYPES[config.dtype], config.attention)
    if config.fp8 != "off":
        logger.info(fp8.convert_model(model, config.fp8, config.fp8_skip, ranks.device))
    lora.add_adapters(model, config)
    shard.set_dtypes(model, DTYPES[config.param_dtype])
    total = sum(p.numel() for p in model.parameters()) + nf4.elements(model)
    trainable = sum(p.numel() for p in trainable_parameters(model).values())
    logger.info(f"Created model with total parameters: {total} ({human(total)}), trainable: {trainable}")
    offload = config.offload == "cpu"
    shard.share_rows(model, row_group)
    shard.checkpoint_activations(model, config.checkpointing)
    shard.compile_model(model, config.compile)
    shard.offload_activations(model, config.offload_activations, ranks.device)
    pairs = config.dpo != "none"
    shard.shard_model(
        model, mesh, model.dtype, DTYPES[config.reduce_dtype], config.reshard, config.prefetch, offload, pairs
    )
    model.to_empty(device="cpu" if offload else ranks.device)
    model.tie_weights()
    return model


def fill(model, optimizer, data, resume_from, read_values, config: Config, ranks: Ranks) -> None:
    """Sets parameters, moments and the position in the data from a checkpoint, weights or random values. All ranks."""
    if resume_from:
        shard.fill_parameters(model, read_values, config.load, ranks, only_frozen=True)  # those below adapters
        checkpoint.restore(resume_from, model, optimizer, ranks, config)
        on_first_rank(lambda: data.load_state_dict(resume_from.manifest["position"]), ranks)  # refuses other data
    else:
        shard.fill_parameters(model, read_values, config.load, ranks)
    # All ranks take rank 0's position, and wait here: a rank may read for hours, later collectives wait for --timeout.
    data.load_state_dict(on_first_rank(data.state_dict, ranks))


@torch.no_grad()
def evaluate(
    model: Transformer, data: Loader | None, run: Run, objective: Callable | None = None,
    questions: list[dict] = (),
) -> dict[str, float]:  # fmt: skip
    """Means per unit over the validation batches: val_loss, with an objective also its figures. score_acc and the like:
    of the questions of --eval_score. All ranks must call."""
    names = ["loss", *preferences.FIGURES] if objective else ["loss"]
    sums = torch.zeros(1 + len(names), dtype=torch.float64, device=run.ranks.device)  # units, then the figures
    model.eval()  # the compute dtype, not FP8
    with run.phase("evaluation"):
        for micro_batches in data or ():
            for batch in micro_batches:
                sums[0] += batch.units()
                batch = batch.to(run.ranks.device)
                loss, details = forward(model, batch, objective)
                sums[1] += loss
                if objective:
                    sums[2:] += details.figures
                disk.advance()
        scores = score.summarize(score.score(model, questions, run.ranks)) if questions else {}
        shard.free_gathered(model)
        model.train()
        if run.ranks.world_size > 1:
            torch.distributed.all_reduce(sums)
        means = dict(zip(names, (sums[1:] / sums[0]).tolist(), strict=True)) if data else {}
    return {f"val_{name}": value for name, value in means.items()} | {f"score_{k}": v for k, v in scores.items()}


def finish(config: Config, run: Run, step: int, best: checkpoint.Best) -> None:
    """Exports the best checkpoint, or else the last one, as a Hugging Face folder, hf/, and records that the run is
    finished. All ranks must call."""
    with run.phase("export"):
        export_run(best.checkpoint(config, step, run), run.folder, run.ranks)
    run.end("finished", step)


if __name__ == "__main__":
    errors.run_script(main)
