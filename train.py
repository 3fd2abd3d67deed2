"""Trains a Llama or GPT model: everything that happens to a token between the disk and the optimizer, on one page.

    python train.py [@recipes/NAME.args ...] [--flag value ...]        one process
    torchrun --nproc-per-node N train.py ...                           one process per GPU; `bash launch.sh` does it for
    you

Every step: read this rank's micro-batches; forward and backward on each (loss = sum over its trained tokens); reduce
gradients over ranks with the last one; divide by the global number of trained tokens, clip, AdamW. Nothing in it waits
for the GPU.

Exit status: 0 finished or stopped, 2 a mistake in flags, files or data (one message), 1 anything else.
"""

import contextlib
import os
import sys
from pathlib import Path

import errors  # first: it finds the Python that has torch

if "TORCHELASTIC_RUN_ID" in os.environ:
    errors.end_with_torchrun()

import torch  # isort: skip
import torch.distributed as dist

import activations
import checkpoint
import fp8
import generate
import guard
import machine
import preflight
import shard
from config import Config, check_batch, parse_args
from data import IGNORE, Loader, merge_positions
from log import Clock, Log, describe_run, logger, peak_flops, start_logging, write_status
from model import Transformer, flops_per_token
from optim import DTYPES, learning_rate, make_optimizer, update
from profiler import profiled
from tokenizer import load_tokenizer
from weights import family

SAMPLE_TOKENS, SAMPLE_TEMPERATURE, SAMPLE_TOP_P = 200, 0.8, 0.95


def train(config: Config, ranks: shard.Ranks, clock: Clock, made: preflight.Made) -> None:
    """made: where what the run makes is put, so that what ends it can tell of it."""
    # ---- set-up
    run, first = Path(config.out), ranks.rank == 0
    word = preflight.open_run_folder(run, ranks, made)
    made.watchdog = guard.Watchdog(config.timeout, run, ranks, clock, made.lock)
    found, skipped = checkpoint.find(config, ranks)
    start = found.step if found else 0
    if start >= config.steps:
        if not preflight.is_exported(config):  # the end was cut short
            shard.on_first_rank(lambda: write_status(run, "running", start), ranks)
            export(config, found.folder, ranks)
            shard.on_first_rank(lambda: write_status(run, "finished", start, 0), ranks)
        return preflight.say_finished(config, start) if first else None
    if not found:
        check_batch(config, ranks.world_size)
    stop = guard.StopVote(ranks)
    shard.on_first_rank(lambda: write_status(run, "running", start), ranks)
    start_logging(run if first else None)
    for message in skipped:
        logger.warning(message)

    shard.on_every_rank(lambda: preflight.refuse_without_room(config, ranks.device, ranks.world_size), ranks)
    made.watchdog.loaders = preflight.open_data(config, found, ranks)
    loader, val_loader = [*made.watchdog.loaders, None][:2]
    made.loader = loader

    opened = shard.on_every_rank(lambda: preflight.open_first_weights(config, bool(found), ranks), ranks)
    mesh = shard.make_mesh(config.shard_size, ranks, config.offload == "cpu")
    made.watchdog.add_mesh(mesh)
    model = build(config, ranks, mesh, made)
    weight_scales = preflight.prepare_fp8(model, config, ranks, mesh)
    made.optimizer = optimizer = make_optimizer(model, config)
    logger.info("Created optimizer")
    torch.manual_seed(config.seed + ranks.rank)  # nothing here draws from it; a dropout of your own would
    if found:
        checkpoint.restore(found, model, optimizer, ranks, config)
        logger.info("Resumed from %s after step %d", found.folder, start)
    else:
        shard.fill(model, *preflight.first_values(config, model, opened))
    position = found.manifest["position"] if found else shard.on_first_rank(loader.state_dict, ranks)
    loader.load_state_dict(position)  # at the start too: all ranks must see the same data
    gradients = guard.GradientGuard(
        model, config.clip, ranks, mesh, config.on_nonfinite, config.replicas_every, loader.where
    )
    made.saver = saver = checkpoint.Saver(config, model, optimizer, ranks, mesh, found, word)
    peak, peak_source = peak_flops(ranks.device, model.dtype)
    log = Log(
        run, ranks, clock, config, flops_per_token(config.model_config, config.seq_len), peak, start, loader.names
    )
    if first:
        describe_run(config, ranks, loader, val_loader, peak_source, start)

    # ---- the loop
    stopped, steps = False, iter(loader)
    fp8_every = config.fp8_log_every if config.fp8 != "off" else 0
    clock.switch("compile", start)  # the first step, which compiles
    for step in profiled(range(start + 1, config.steps + 1), config, ranks, clock):
        with clock.part("data"):
            micro_batches = next(steps)
        lr = learning_rate(config, step - 1)
        weight_scales.refresh()
        loss, trained = torch.zeros((), device=ranks.device), 0
        for i, batch in enumerate(micro_batches):
            shard.sync_gradients(model, i == len(micro_batches) - 1, config.reshard)
            trained += int((batch.targets != IGNORE).sum())
            batch = batch.to(ranks.device)
            part = model(batch.tokens, batch.targets, batch.positions, batch.documents)
            part.backward()
            log.count(batch, model.lm_head.row_losses)
            loss += part.detach()
        loss, grad_norm, grad_scale = gradients.reduce(loss, trained)
        update(optimizer, lr, grad_scale, gradients.suppress)

        last = step == config.steps
        stopped = stop.agreed(saver.failed) and not last
        evaluated = val_loader is not None and (last or every(step, config.eval_every))
        saved = last or stopped or every(step, config.save_every)
        if step == 1 or evaluated or saved or any(every(step, n) for n in (config.log_every, fp8_every)):
            gradients.check(step, wait=True)  # what follows is not the step's time, nor to be done with broken weights
            val_loss = None
            if evaluated:
                with clock.part("evaluation"):
                    val_loss = evaluate(model, val_loader, ranks)
            # Before the save: a checkpoint's record is never missing.
            log.step(step, loss, grad_norm, lr, val_loss, model.take_router_sums())
            if every(step, fp8_every):
                log.amend(**fp8.watched(model))
            if saved:
                with clock.part("saves"):
                    before = clock.seconds("saves")
                    position = merge_positions(shard.gather(loader.state_dict(), ranks))
                    saver.save(step, position, micro_batches[0].tokens[0])
                    log.amend(save_ms=1e3 * (clock.seconds("saves") - before))
            if evaluated or last or stopped:
                with clock.part("evaluation"):
                    log.draw()
        else:
            gradients.check(step)
        if every(step, config.sample_every) or (last and config.sample_every):
            with clock.part("samples"):
                write_samples(config, model, run, step, ranks)
        if stopped:
            break
        if step == start + 1:
            shard.set_timeout(config.timeout, ranks, mesh)
        clock.switch("steps", step)

    with clock.part("saves"):
        saver.wait()
    if not stopped:
        with clock.part("export"):
            export(config, checkpoint.step_folder(run, step), ranks)
    logger.info(clock.report())
    if stopped:
        logger.info(
            "Stopped by %s after step %d; the same command goes on from there", stop.reason or "another rank", step
        )
    if first:
        write_status(run, "stopped" if stopped else "finished", step, 0)


def build(config: Config, ranks: shard.Ranks, mesh, made: preflight.Made) -> Transformer:
    """The model, ready to be filled: parameters allocated, nothing in them yet. The order is explained in shard.py."""
    logger.info("Creating Model")
    with torch.device("meta"):
        model = Transformer(config.model_config, DTYPES[config.dtype], config.attention)
    total = sum(p.numel() for p in model.parameters())
    logger.info("Created model with total parameters: %d (%s)", total, preflight.human(total))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    logger.info("Trainable parameters: %d (%s)", trainable, preflight.human(trainable))
    if config.fp8 != "off":
        rows = preflight.convert_to_fp8(model, config, ranks.device)
        logger.info(fp8.table(rows, config.fp8, config.model_config.top_k))
        if ranks.device.type == "cpu":
            logger.info("FP8 on a CPU shows what it does to the loss; here it is slower than bf16")
    model.to(DTYPES[config.param_dtype])
    offload = config.offload == "cpu"
    activations.checkpoint_activations(model, config.checkpointing)
    shard.compile_model(model, config.compile)
    activations.offload_activations(model, config.offload_activations, ranks.device)
    shard.shard_model(model, mesh, model.dtype, DTYPES[config.reduce_dtype], config.reshard, config.prefetch, offload)
    if mesh is not None:
        logger.info("Wrapped model with FSDP")
    made.model = model
    model.to_empty(device="cpu" if offload else ranks.device)
    model.tie_weights()
    return model


def export(config: Config, saved: Path, ranks: shard.Ranks) -> None:
    """The last checkpoint as a Hugging Face folder, hf/. All ranks must call."""
    try:
        family(config.model_config)
    except ValueError as e:
        return logger.warning("No export to hf/: %s", e)
    tokenizer = load_tokenizer(config.tokenizer) if config.knows_text else None
    found, folder = checkpoint.Checkpoint(saved), Path(config.out) / "hf"
    checkpoint.export(found, folder, ranks, tokenizer=tokenizer, replaces=True)


@torch.no_grad()
def evaluate(model: Transformer, loader: Loader, ranks: shard.Ranks) -> float:
    """Mean loss per token of the validation batches. All ranks must call."""
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    model.eval()  # FP8 trains; this is bf16
    for micro_batches in loader:
        for batch in micro_batches:
            sums[1] += (batch.targets != IGNORE).sum()
            batch = batch.to(ranks.device)
            sums[0] += model(batch.tokens, batch.targets, batch.positions, batch.documents)
    shard.reshard(model)
    model.train()
    if ranks.world_size > 1:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def write_samples(config: Config, model: Transformer, run: Path, step: int, ranks: shard.Ranks) -> None:
    """A text of the model's own to the log and samples.txt. All ranks must call: sharded layers are gathered for every
    token."""
    tokenizer = load_tokenizer(config.tokenizer)
    ids = [tokenizer.bos_id, *tokenizer.encode(config.prompt)]
    n = min(SAMPLE_TOKENS, config.model_config.max_seq_len - len(ids))
    choice = {"temperature": SAMPLE_TEMPERATURE, "top_p": SAMPLE_TOP_P, "seed": config.seed + step}
    model.eval()
    out = generate.write(model, tokenizer, [ids], n, (), True, **choice)  # no stop: all ranks go through to the end
    text = config.prompt + "".join(piece for _, piece in out)
    shard.reshard(model)
    model.train()
    if ranks.rank == 0:
        logger.info("Sample after step %d:\n%s", step, text)
        with open(run / "samples.txt", "a", encoding="utf-8") as f:
            f.write(f"--- step {step}\n{text}\n")


def every(step: int, n: int) -> bool:
    return n > 0 and step % n == 0


def main(argv: list[str]) -> int:
    clock, config, rank, made = Clock(), None, int(os.environ.get("RANK", 0)), preflight.Made()
    try:
        config = parse_args(argv or preflight.DEFAULT, trains=True)
        if config.check >= 0:
            preflight.check(config)
            return 0
        machine.keep_memory()
        machine.set_determinism(config.deterministic)
        ranks = shard.init_ranks()
        config = preflight.resolve(config, ranks.device, ranks.world_size)
        machine.set_products(config.dtype)
        train(config, ranks, clock, made)
        made.release()
        shard.leave(ranks)
    except KeyboardInterrupt:
        made.release()
        return 130
    except Exception as error:
        return preflight.report(error, config, rank, made)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except SystemExit as end:
        status = end.code
    for screen in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            screen.flush()
    os._exit(status or 0)  # without the interpreter's own end: seconds that nobody counts, and see shard.leave
