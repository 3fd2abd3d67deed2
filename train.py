"""Trains a Llama or GPT model: everything that happens to a token between the disk and the optimizer, on one page.

    python train.py [@recipes/NAME.args ...] [--flag value ...]        one process
    torchrun --nproc-per-node N train.py ...                           one process per GPU; `bash launch.sh` does it for
    you

Every step: read this rank's micro-batches; forward and backward on each (loss = sum over its trained tokens); reduce
gradients over ranks with the last one; divide by the global number of trained tokens, clip, AdamW. Nothing in it waits
for the GPU.

Exit status: 0 finished or stopped, 2 a mistake in flags, files or data (one message), 1 anything else.
"""

import errno
import math
import os
import platform
import shlex
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from errors import RankError, UserError  # first: it finds the Python that has torch

import torch  # isort: skip
import torch.distributed as dist

import activations
import checkpoint
import fp8
import generate
import machine
import shard
from attention import choose_backend
from config import Config, check_batch, parse_args, split_batch
from data import IGNORE, Loader, check_tokens, make_loader, merge_positions
from download import Failed, find
from log import Clock, Log, describe_run, logger, peak_flops, read_json, start_logging, write_status
from model import MODELS, Transformer, flops_per_token, loss_head_bytes, random_init
from optim import DTYPES, learning_rate, make_optimizer, update
from tokenizer import load_tokenizer
from weights import dropout_note, family, open_weights, refuse_in_the_way

DEFAULT = ["@recipes/default.args"]
SAMPLE_TOKENS, SAMPLE_TEMPERATURE, SAMPLE_TOP_P = 200, 0.8, 0.95


def train(config: Config, ranks: shard.Ranks, clock: Clock, built: list) -> None:
    """built: where the model and the optimizer are put, so that what ends the run can tell of them."""
    # ---- set-up
    run, first = Path(config.out), ranks.rank == 0
    found, skipped = shard.on_first_rank(lambda: checkpoint.find(config), ranks)
    start = found.step if found else 0
    if start >= config.steps:
        if not is_exported(config):  # the end was cut short
            shard.on_first_rank(lambda: open_run_folder(run, start), ranks)
            export(config, found.folder, ranks)
            shard.on_first_rank(lambda: write_status(run, "finished", start, 0), ranks)
        return say_finished(config, start) if first else None
    if not found:
        check_batch(config, ranks.world_size)
    shard.on_first_rank(lambda: open_run_folder(run, start), ranks)
    start_logging(run if first else None)
    stop = shard.StopVote(
        ranks,
        lambda: first and write_status(run, "stopped", last_logged(run), 1, "stopped at once, without saving"),
    )
    for message in skipped:
        logger.warning(message)

    shard.on_first_rank(lambda: check_inputs(config, bool(found)), ranks)
    loader = make_loader(config, ranks.rank, ranks.world_size)
    val_loader = make_loader(config, ranks.rank, ranks.world_size, "val") if config.eval_every else None

    opened = shard.on_every_rank(lambda: open_first_weights(config, bool(found), ranks), ranks)
    mesh = shard.make_mesh(config.shard_size, ranks, config.offload == "cpu")
    model = build(config, ranks, mesh, built)
    weight_scales = prepare_fp8(model, config, ranks, mesh)
    optimizer = make_optimizer(model, config)
    built.append(optimizer)
    logger.info("Created optimizer")
    torch.manual_seed(config.seed + ranks.rank)  # nothing here draws from it; a dropout of your own would
    if found:
        checkpoint.restore(found, model, optimizer, ranks, config.load)
        logger.info("Resumed from %s after step %d", found.folder, start)
    else:
        shard.fill(model, *first_values(config, model, opened))
    position = found.manifest["position"] if found else shard.on_first_rank(loader.state_dict, ranks)
    loader.load_state_dict(position)  # at the start too: all ranks take rank 0's revision of a stream
    guard = shard.GradientGuard(model, config.clip, ranks, mesh)
    peak, peak_source = peak_flops(ranks.device, model.dtype)
    log = Log(
        run, ranks, clock, config, flops_per_token(config.model_config, config.seq_len), peak, start, loader.names
    )
    if first:
        describe_run(config, ranks, loader, val_loader, peak_source, start)

    # ---- the loop
    stopped, steps = False, iter(loader)
    fp8_every = config.fp8_log_every if config.fp8 != "off" else 0
    clock.switch("compile")  # the first step, which compiles
    for step in range(start + 1, config.steps + 1):
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
        loss, grad_norm, grad_scale = guard.reduce(loss, trained)
        update(optimizer, lr, grad_scale, guard.suppress)

        last = step == config.steps
        stopped = stop.agreed() and not last
        evaluated = val_loader is not None and (last or every(step, config.eval_every))
        saved = last or stopped or every(step, config.save_every)
        if step == 1 or evaluated or saved or any(every(step, n) for n in (config.log_every, fp8_every)):
            guard.check(step, wait=True)  # what follows is not the step's time, nor to be done with broken weights
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
                    checkpoint.save(run, step, model, optimizer, position, config, ranks)
                    log.amend(save_ms=1e3 * (clock.seconds("saves") - before))
            if evaluated or last or stopped:
                with clock.part("evaluation"):
                    log.draw()
        else:
            guard.check(step)
        if every(step, config.sample_every) or (last and config.sample_every):
            with clock.part("samples"):
                write_samples(config, model, run, step, ranks)
        if stopped:
            break
        if step == start + 1:
            shard.set_timeout(config.timeout, ranks, mesh)
        clock.switch("steps")

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


def build(config: Config, ranks: shard.Ranks, mesh, built: list) -> Transformer:
    """The model, ready to be filled: parameters allocated, nothing in them yet. The order is explained in shard.py."""
    logger.info("Creating Model")
    with torch.device("meta"):
        model = Transformer(config.model_config, DTYPES[config.dtype], config.attention)
    total = sum(p.numel() for p in model.parameters())
    logger.info("Created model with total parameters: %d (%s)", total, human(total))
    logger.info("Trainable parameters: %d (%s)", total, human(total))
    if config.fp8 != "off":
        rows = convert_to_fp8(model, config, ranks.device)
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
    built.append(model)
    if offload:
        shard.on_every_rank(
            lambda: machine.refuse_without_room(model, DTYPES[config.state_dtype], machine.available_memory()), ranks
        )
    model.to_empty(device="cpu" if offload else ranks.device)
    model.tie_weights()
    return model


def convert_to_fp8(model: Transformer, config: Config, device: torch.device) -> list:
    grad_dtype = {"auto": "e5m2"}.get(config.fp8_grad_dtype, config.fp8_grad_dtype)
    try:
        return fp8.convert_linears(model, config.fp8, grad_dtype, config.fp8_skip, small=device.type == "cpu")
    except ValueError as e:
        raise UserError(f"--fp8_skip: {e}") from None


def prepare_fp8(model: Transformer, config: Config, ranks: shard.Ranks, mesh) -> fp8.WeightScales:
    """What FP8 does once per step (nothing, where it is off), once the parameters are allocated."""
    blocks = [list(fp8.layers(block)) for block in model.layers]
    if config.fp8_log_every:  # the last product of three blocks, the down projection: where outliers grow first
        chosen = {0, len(blocks) // 2, len(blocks) - 1}
        fp8.watch(model, [f"layers.{i}.{blocks[i][-1]}" for i in chosen if blocks[i]])
    if mesh is not None and config.fp8_all_gather:
        fp8.gather_in_fp8(model, mesh["shard"])
    group = None if mesh is None else mesh["shard"].get_group()
    micro_batch, batch_tokens = split_batch(config, ranks.world_size)
    reuse = batch_tokens > micro_batch * config.seq_len * ranks.world_size
    return fp8.WeightScales(model, model.dtype, group, reuse, config.compile != "none")


def open_first_weights(config: Config, resumes: bool, ranks: shard.Ranks):
    """read(name, slices) of --weights, on the ranks that read them; before anything is allocated, for a machine may
    lack the files."""
    if config.weights and not resumes and (config.load == "direct" or ranks.rank == 0):
        return open_weights(find(config.weights, "--weights"), config.model_config)


def first_values(config: Config, model: Transformer, opened) -> tuple:
    """What training starts from, for shard.fill: --weights, or random values, which every rank draws itself."""
    note = dropout_note(find(config.model, "--model")) if config.model not in MODELS else ""
    if note:
        logger.info(note)
    if config.weights:
        logger.info("Reading weights from %s", config.weights)
        return opened, config.load
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return (random_init(config.model_config, shapes, config.seed),)


def export(config: Config, saved: Path, ranks: shard.Ranks) -> None:
    """The last checkpoint as a Hugging Face folder, hf/. All ranks must call."""
    try:
        family(config.model_config)
    except ValueError as e:
        return logger.warning("No export to hf/: %s", e)
    tokenizer = load_tokenizer(config.tokenizer) if config.knows_text else None
    found, folder = checkpoint.Checkpoint(saved), Path(config.out) / "hf"
    checkpoint.export(found, folder, ranks, tokenizer=tokenizer, replaces=True)


def is_exported(config: Config) -> bool:
    """Whether all is there that a finished run leaves."""
    try:
        family(config.model_config)
    except ValueError:
        return True
    return (Path(config.out) / "hf").exists()


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


# ---- around it


def every(step: int, n: int) -> bool:
    return n > 0 and step % n == 0


def check_inputs(config: Config, resumes: bool) -> None:
    """Tokens, tokenizer, weights and prompt against the model; also tokenises text, once."""
    check_tokens(config)
    refuse_in_the_way(Path(config.out) / "hf", True)
    if config.weights and not resumes:
        open_weights(find(config.weights, "--weights"), config.model_config)
    if config.sample_every:
        prompt = 1 + len(load_tokenizer(config.tokenizer).encode(config.prompt))
        generate.check_length(config.model_config, prompt, 1)


def open_run_folder(run: Path, step: int) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as e:
        raise UserError(f"--out {run}: no folder can be there: {e}") from None
    write_status(run, "running", step)


def last_logged(run: Path) -> int:
    return read_json(run / "status.json").get("step", 0)


def human(n: int) -> str:
    unit, name = next((u for u in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if n >= u[0]), (1, ""))
    return f"{n / unit:.2f} {name}".strip()


def resolve(config: Config, device: torch.device, world_size: int) -> Config:
    """Replaces every `auto` by what it means here, so that flags.json says what was done."""
    dtype, compile_mode = config.dtype, config.compile
    if dtype == "auto":
        cpu_has_it = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        dtype = (
            "bf16"
            if (torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else cpu_has_it)
            else "fp32"
        )
    if compile_mode != "none":
        problem = machine.compiler_problem()
        if problem and compile_mode != "auto":
            raise UserError(f"--compile {compile_mode}: {problem}")
        if problem and int(os.environ.get("RANK", 0)) == 0:
            print(f"Training without torch.compile: {problem}", file=sys.stderr)
        compile_mode = "none" if problem else "block" if compile_mode == "auto" else compile_mode
    shard.refuse_unsupported(replace(config, compile=compile_mode), world_size)
    attention = choose_backend(
        config.attention, device.type, dtype, compile_mode != "none", config.seq_len, config.model_config.head_dim
    )
    shard.mesh_shape(config.shard_size, world_size)  # refuses what does not divide
    if config.fp8 != "off":
        check_fp8(config, device, dtype, compile_mode, world_size)
    _, batch_tokens = split_batch(config, world_size)
    return replace(config, dtype=dtype, compile=compile_mode, attention=attention, batch_tokens=batch_tokens)


def check_fp8(config: Config, device: torch.device, dtype: str, compile_mode: str, world_size: int) -> None:
    """Refuses what FP8 cannot do here."""
    flag, micro_batch = f"--fp8 {config.fp8}", split_batch(config, world_size)[0]
    if micro_batch * config.seq_len % fp8.MULTIPLE:  # weight gradients sum over them
        unit = fp8.MULTIPLE // math.gcd(micro_batch, fp8.MULTIPLE)
        near = max(unit, round(config.seq_len / unit) * unit)
        raise UserError(
            f"{flag}: micro_batch x seq_len = {micro_batch} x {config.seq_len} = {micro_batch * config.seq_len} tokens"
            f" do not divide by {fp8.MULTIPLE}; the nearest is --seq_len {near}"
        )
    if config.fp8_skip:
        with torch.device("meta"):
            convert_to_fp8(Transformer(config.model_config), config, device)
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        found = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        raise UserError(f"{flag}: {found}, FP8 needs 8.9 (Ada, Hopper or later); --fp8 off trains in bf16 here")
    if compile_mode == "none":
        raise UserError(f"{flag}: uncompiled, FP8 is several times slower than bf16; --compile block, or --fp8 off")
    if dtype != "bf16":
        raise UserError(f"{flag}: on a GPU what is not FP8 is bf16; --dtype bf16, or --fp8 off")


def say_finished(config: Config, step: int) -> None:
    words = sys.argv[1:] or DEFAULT
    if "--check" in words:  # launch.sh's last words
        words = words[: words.index("--check")] or DEFAULT
    again = f"bash launch.sh {shlex.join(words)}"
    weights = f"  its weights:   {config.out}/hf, for transformers, vLLM and others\n"
    print(
        f"{config.out} is finished: {step} of {config.steps} steps are done.\n"
        f"{weights * (Path(config.out) / 'hf').exists()}"
        f"  sample:        python generate.py --run {shlex.quote(config.out)} --prompt 'The'\n"
        f"  go on:         {again} --steps {2 * step}\n"
        f"  start afresh:  {again} --out {shlex.quote(config.out + '-2')}"
    )


def check(config: Config) -> None:
    """--check: everything that can be known without training; prints key=value lines for launch.sh."""
    device = machine.find_device(int(os.environ.get("LOCAL_WORLD_SIZE", config.check)))  # of all, those on this machine
    processes = config.check or max(1, torch.cuda.device_count() if device.type == "cuda" else 1)
    config = resolve(config, device, processes)
    there = next(p for p in [Path(config.out).absolute(), *Path(config.out).absolute().parents] if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"--out {config.out}: {there} is no folder that can be written to")
    found, _ = checkpoint.find(config)
    if not found:
        check_batch(config, processes)
    done = found is not None and found.step >= config.steps and is_exported(config)
    if done:
        say_finished(config, found.step)
    else:
        check_inputs(config, bool(found))
        if config.eval_every:
            make_loader(config, 0, processes, "val")
        loader = make_loader(config, 0, processes)
        if found:
            loader.load_state_dict(found.manifest["position"])
    state = "finished" if done else "resume" if found else "fresh"
    print(f"out={config.out}\ndevice={device.type}\nprocesses={processes}\nstate={state}\ntimeout={config.timeout}")


def main(argv: list[str]) -> int:
    clock, config, rank, built = Clock(), None, int(os.environ.get("RANK", 0)), []
    try:
        config = parse_args(argv or DEFAULT)
        if config.check >= 0:
            check(config)
            return 0
        machine.keep_memory()
        ranks = shard.init_ranks()
        config = resolve(config, ranks.device, ranks.world_size)
        train(config, ranks, clock, built)
        shard.leave(ranks)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report(error, config, rank, built)


def describe_memory(config: Config, model: Transformer, optimizer=None) -> str:
    device, statistics = torch.device("cuda", torch.cuda.current_device()), torch.cuda.memory_stats()
    used = {k: statistics[f"{k}_bytes.all.peak"] for k in ("allocated", "reserved")}
    used["total"] = torch.cuda.get_device_properties(device).total_memory
    micro_batch, _ = split_batch(config, int(os.environ.get("WORLD_SIZE", 1)))
    head = loss_head_bytes(config.model_config, micro_batch * config.seq_len, device.type)
    return machine.explain_out_of_memory(model, optimizer, config, head, used, str(device))


def report(error: Exception, config: Config | None, rank: int, built: list) -> int:
    """Says what ended the run, on stderr and in status.json -> the exit status."""
    code, message, alone = (
        1,
        f"{type(error).__name__}: {error}",
        isinstance(error, RankError) or getattr(error, "alone", False),
    )
    if isinstance(error, UserError):
        code, message = 2, str(error)
    elif isinstance(error, PermissionError):
        code, message = 2, f"no permission: {error}"
    elif isinstance(error, (shard.NotFinite, Failed)):
        message = str(error)
    elif isinstance(error, torch.OutOfMemoryError) and built:
        message, alone = f"rank {rank} on {platform.node()}: {describe_memory(config, *built)}", True
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = f"the disk is full: {error}; what was saved before is intact: free some space and start again"
    else:
        traceback.print_exc()
        alone = True
        message = f"rank {rank} on {platform.node()}: {message}"
    run = Path(config.out) if config else None
    status = read_json(run / "status.json") if run else {}
    if alone and "onnection" in message and "rss_gib" in status:  # so gloo and NCCL speak of a rank that is gone
        resident = ", ".join(f"{rank}: {gib:.2f}" for rank, gib in enumerate(status["rss_gib"]))
        message += (
            f"\nAnother rank is gone. If it was killed (-9), its machine has probably run out of memory; the last"
            f" resident memory of the ranks, in GiB: {resident}"
        )
    running = status.get("state") == "running" and (rank > 0 or status.get("pid") == os.getpid())  # and this job's
    if rank == 0 or alone:  # what all ranks see alike is said once
        print(f"error: {message}", file=sys.stderr)
    if running:  # the first rank to fail says why; what follows from it elsewhere does not replace it
        try:
            write_status(run, "error" if code == 2 else "failed", status["step"], code, message)
        except OSError:
            print(f"{run}/status.json could not be written", file=sys.stderr)
    return code


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if dist.is_initialized():  # a rank that failed: see shard.leave
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
