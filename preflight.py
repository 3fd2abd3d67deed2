"""What is settled before the first step, and what is said at a run's end: every `auto` resolved, inputs checked, first
values found; one message for each way a run can end. train.py tells the story in between."""

import contextlib
import errno
import math
import os
import platform
import shlex
import sys
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

from errors import RankError, UserError, missing_folders, remove_empty  # first: it finds the Python that has torch

import torch  # isort: skip

import checkpoint
import fp8
import generate
import guard
import machine
import shard
from attention import choose_backend
from config import Config, check_batch, split_batch
from data import Loader, merge_positions, open_checked, open_loaders
from download import Failed, find
from log import logger, read_json, write_status
from model import MODELS, Transformer, loss_head_bytes, random_init, saved_bytes
from optim import DTYPES
from rows import Catalog
from runlock import RunLock, sees
from tokenizer import load_tokenizer
from weights import dropout_note, family, open_weights, refuse_in_the_way

DEFAULT = ["@recipes/default.args"]
BEFORE_A_STEP = {"lock", "status.json", "log.txt", "flags.json", "env.json"}  # of the files of a run folder


# ---- before


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
    if dtype == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise UserError(f"--dtype tf32: only NVIDIA GPUs from Ampere on have it, {device.type} here; --dtype fp32")
    if compile_mode != "none":
        problem = machine.compiler_problem()
        if problem and compile_mode != "auto":
            raise UserError(f"--compile {compile_mode}: {problem}")
        if problem and int(os.environ.get("RANK", 0)) == 0:
            print(f"Training without torch.compile: {problem}", file=sys.stderr)
        compile_mode = "none" if problem else "block" if compile_mode == "auto" else compile_mode
    shard.refuse_unsupported(replace(config, compile=compile_mode), world_size)
    compiled, head_dim = compile_mode != "none", config.model_config.head_dim
    try:
        attention = choose_backend(config.attention, device.type, dtype, compiled, config.seq_len, head_dim)
    except ValueError as e:
        raise UserError(str(e)) from None
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
    if device.type == "cuda":
        refuse_gpu_for_fp8(flag, device, dtype, compile_mode)
    with torch.device("meta"):  # refuses names that match nothing, and a model of which nothing would be converted
        convert_to_fp8(Transformer(config.model_config), config, device)


def refuse_gpu_for_fp8(flag: str, device: torch.device, dtype: str, compile_mode: str) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        found = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        raise UserError(f"{flag}: {found}, FP8 needs 8.9 (Ada, Hopper or later); --fp8 off trains in bf16 here")
    if compile_mode == "none":
        raise UserError(f"{flag}: uncompiled, FP8 is several times slower than bf16; --compile block, or --fp8 off")
    if dtype != "bf16":
        raise UserError(f"{flag}: on a GPU what is not FP8 is bf16; --dtype bf16, or --fp8 off")


def convert_to_fp8(model: Transformer, config: Config, device: torch.device) -> list:
    """Where every layer is too small to become faster, as in a model that is for trying things, all are converted."""
    grad_dtype = {"auto": "e5m2"}.get(config.fp8_grad_dtype, config.fp8_grad_dtype)
    for small in (device.type == "cpu", True):
        try:
            rows = fp8.convert_linears(model, config.fp8, grad_dtype, config.fp8_skip, small=small)
        except ValueError as e:
            raise UserError(f"--fp8_skip: {e}") from None
        if any(verdict == "fp8" for _, _, verdict in rows):
            return rows
    raise UserError(f"--fp8 {config.fp8}: no layer would be in FP8 ({rows[0][0]}: {rows[0][2]}, ...); --fp8 off")


def refuse_without_room(config: Config, device: torch.device, world_size: int) -> None:
    """Refuses a run that cannot fit into this machine, before anything is allocated. It counts only a part of what the
    run needs."""
    micro_batch, batch_tokens = split_batch(config, world_size)
    _, shards = shard.mesh_shape(config.shard_size, world_size)
    ranks, gpu = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), device.type == "cuda"
    offload = gpu and config.offload == "cpu"
    with torch.device("meta"):
        elements = [-(-p.numel() // shards) for p in Transformer(config.model_config).parameters()]
    copies = [n * DTYPES[config.param_dtype].itemsize for n in elements]
    if offload:  # pinned, in blocks that torch rounds up to a power of two
        copies = [1 << (size - 1).bit_length() for size in copies]
    copy, moments = sum(copies), 2 * sum(elements) * DTYPES[config.state_dtype].itemsize
    tokens, itemsize = micro_batch * config.seq_len, DTYPES[config.dtype].itemsize
    saved = saved_bytes(config.model_config, tokens, config.checkpointing, itemsize)
    saved *= not (gpu and config.offload_activations)
    on_host, on_gpu = {"tokens of a step": 16 * batch_tokens // world_size}, {}
    state = {"parameters": copy, "moments": moments}
    if offload:
        on_host, on_gpu = on_host | state | {"gradients": copy}, {"activations": saved}
    else:  # in a step of one micro-batch, the last gradients come when the activations are gone
        state |= {"activations": saved} if saved > copy else {"gradients": copy}
        (on_gpu if gpu else on_host).update(state)
    places = [(on_host, ranks, platform.node(), machine.available_memory())]
    if gpu:
        places.append((on_gpu, 1, str(device), torch.cuda.get_device_properties(device).total_memory))
    for needs, times, place, free in places:
        gib = {name: times * size / 2**30 for name, size in needs.items()}
        if free and sum(gib.values()) > free / 2**30:
            parts = ", ".join(f"{name} {amount:.1f}" for name, amount in gib.items())
            raise UserError(
                f"This run needs more than {sum(gib.values()):.1f} GiB on {place} (ranks: {times}; {parts}), which has"
                f" {free / 2**30:.1f} GiB. What lowers it, the cheapest first: {machine.lower_memory(config, gpu)}"
            )


def check_inputs(config: Config, resumes: bool, world_size: int, catalog: Catalog) -> list[Loader]:
    """Tokens, tokenizer, weights and prompt against the model; also tokenises text, once -> the loaders of rank 0."""
    loaders = open_checked(config, world_size, catalog)
    refuse_in_the_way(Path(config.out) / "hf", True)
    if config.weights and not resumes:
        open_weights(find(config.weights, "--weights"), config.model_config)
    if config.sample_every:
        prompt = 1 + len(load_tokenizer(config.tokenizer).encode(config.prompt))
        generate.check_length(config.model_config, prompt, 1)
    return loaders


def open_data(config: Config, found: checkpoint.Checkpoint | None, ranks: shard.Ranks) -> list[Loader]:
    """The loaders for training and, if the run evaluates, for validation. Rank 0 goes first: it checks all inputs,
    tokenises text, and tells the others what is on the hub. All ranks must call."""
    catalog, loaders = Catalog(config, found and found.manifest["position"].get("commits")), []

    def look_up() -> tuple:
        loaders.extend(check_inputs(config, bool(found), ranks.world_size, catalog))
        return catalog.listed, catalog.streamed

    catalog.listed, catalog.streamed = shard.on_first_rank(look_up, ranks)
    return loaders or list(open_loaders(config, ranks.rank, ranks.world_size, catalog))


def check(config: Config) -> None:
    """--check: everything that can be known without training; prints key=value lines for launch.sh."""
    device = machine.find_device(int(os.environ.get("LOCAL_WORLD_SIZE", config.check)))  # of all, those on this machine
    processes = config.check or max(1, torch.cuda.device_count() if device.type == "cuda" else 1)
    config = resolve(config, device, processes)
    there = next(p for p in [Path(config.out).absolute(), *Path(config.out).absolute().parents] if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"--out {config.out}: {there} is no folder that can be written to")
    found, _ = checkpoint.find(config, sizes_only=True)  # training reads every byte
    if found and found.step >= config.steps:
        found, _ = checkpoint.find(config)
    if not found:
        check_batch(config, processes)
    done = found is not None and found.step >= config.steps and is_exported(config)
    if done:
        say_finished(config, found.step)
    else:
        refuse_without_room(config, device, processes)
        position = found.manifest["position"] if found else {}
        loader, *_ = check_inputs(config, bool(found), processes, Catalog(config, position.get("commits")))
        if found:
            loader.load_state_dict(position)
    state = "finished" if done else "resume" if found else "fresh"
    print(f"out={config.out}\ndevice={device.type}\nprocesses={processes}\nstate={state}\ntimeout={config.timeout}")


@dataclass
class Made:
    """What a run has made so far, for what ends it."""

    new_folders: list[Path] = field(default_factory=list)  # the run folder and those around it that were not there
    lock: RunLock | None = None
    watchdog: guard.Watchdog | None = None
    loader: Loader | None = None
    model: Transformer | None = None
    optimizer: torch.optim.Optimizer | None = None
    saver: checkpoint.Saver | None = None

    def is_unused(self) -> bool:
        """Whether this job made the run folder, and has not done a step in it."""
        if not (self.new_folders and self.lock):
            return False
        return {p.name for p in self.new_folders[0].glob("*") if p.is_dir() or p.stat().st_size} <= BEFORE_A_STEP

    def release(self, unused: bool = False) -> None:
        """unused: what the run folder holds is removed."""
        if self.watchdog:
            self.watchdog.end()
        for handler in logger.handlers if unused else ():
            handler.close()
        for file in self.new_folders[0].glob("*") if unused else ():
            if file != self.lock.path:
                file.unlink()
        if self.lock:
            self.lock.release()
        remove_empty(self.new_folders)


def open_run_folder(run: Path, ranks: shard.Ranks, made: Made) -> str:
    """Makes the run folder, takes its lock on rank 0, looks for it on all ranks, and removes what torn saves have left
    -> a word of this start's own. All ranks must call."""

    def take() -> str:
        try:
            made.new_folders = missing_folders(run)
            run.mkdir(parents=True, exist_ok=True)
            made.lock = RunLock(run)
        except (FileExistsError, NotADirectoryError) as e:
            raise UserError(f"--out {run}: no folder can be there: {e}") from None
        except OSError as e:
            if e.errno == errno.EROFS:
                raise UserError(f"--out {run}: the disk is read-only: {e}") from None
            raise
        checkpoint.clean(run)
        return made.lock.word

    def look() -> None:
        if not sees(run, word):
            raise UserError(
                f"--out {run} is not the folder there that it is on rank 0's machine: checkpoints need one that all"
                " machines see; give an --out on a shared disk"
            )

    word = shard.on_first_rank(take, ranks)
    shard.on_every_rank(look, ranks)
    return word


def human(n: int) -> str:
    unit, name = next((u for u in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if n >= u[0]), (1, ""))
    return f"{n / unit:.2f} {name}".strip()


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


# ---- at the end


def is_exported(config: Config) -> bool:
    """Whether all is there that a finished run leaves."""
    try:
        family(config.model_config)
    except ValueError:
        return True
    return (Path(config.out) / "hf").exists()


def say_finished(config: Config, step: int) -> None:
    words = sys.argv[1:] or DEFAULT
    if "--check" in words:  # launch.sh's last words
        words = words[: words.index("--check")] or DEFAULT
    again = f"bash launch.sh {shlex.join(words)}"
    weights = f"  its weights:   {config.out}/hf, a Hugging Face folder, for transformers and others\n"
    print(
        f"{config.out} is finished: {step} of {config.steps} steps are done.\n"
        f"{weights * (Path(config.out) / 'hf').exists()}"
        f"  sample:        python generate.py --run {shlex.quote(config.out)} --prompt 'The'\n"
        f"  go on:         {again} --steps {2 * step}\n"
        f"  start afresh:  {again} --out {shlex.quote(config.out + '-2')}"
    )


def save_before(error: guard.NotFinite, ranks: shard.Ranks, made: Made) -> str:
    """Saves the state before the step that was not finite, if there is no checkpoint of it -> a sentence that says so.
    All ranks must call."""
    step, loader = error.step - 1, made.loader
    if step <= made.saver.last:
        return ""
    handed_out = loader.samples // loader.step_rows
    position = merge_positions(shard.gather(loader.before[error.step - handed_out - 1], ranks))
    made.saver.save(step, position)
    made.saver.wait()
    return f"\nThe state before it is saved: {checkpoint.step_folder(made.saver.run, step)}"


def describe_memory(config: Config, model: Transformer, optimizer=None) -> str:
    device, statistics = torch.device("cuda", torch.cuda.current_device()), torch.cuda.memory_stats()
    used = {k: statistics[f"{k}_bytes.all.peak"] for k in ("allocated", "reserved")}
    used["total"] = torch.cuda.get_device_properties(device).total_memory
    micro_batch, _ = split_batch(config, int(os.environ.get("WORLD_SIZE", 1)))
    head = loss_head_bytes(config.model_config, micro_batch * config.seq_len, device.type)
    return machine.explain_out_of_memory(model, optimizer, config, head, used, str(device))


def report(error: Exception, config: Config | None, rank: int, made: Made) -> int:
    """Says what ended the run, on stderr and in status.json -> the exit status."""
    code, message = 1, f"{type(error).__name__}: {error}"
    if made.watchdog:
        made.watchdog.clock.switch("end", made.watchdog.clock.step)  # which may take longer than --timeout
    if made.saver:
        made.saver.finish(guard.ANSWER)  # what is being written is from before this
    alone = isinstance(error, RankError) or getattr(error, "alone", False)
    if isinstance(error, UserError):
        code, message = 2, str(error)
    elif isinstance(error, PermissionError) or getattr(error, "errno", 0) == errno.ENAMETOOLONG:
        code, message = 2, f"{'no permission' if isinstance(error, PermissionError) else 'a name is too long'}: {error}"
    elif isinstance(error, guard.NotFinite):
        message = str(error)
        try:
            message += save_before(error, made.saver.ranks, made)
        except Exception as e:
            message += f"\nThe state before it could not be saved: {e}"
    elif isinstance(error, (guard.Diverged, Failed)):
        message = str(error)
    elif isinstance(error, torch.OutOfMemoryError) and made.model:
        told = describe_memory(config, made.model, made.optimizer)
        message, alone = f"rank {rank} on {platform.node()}: {told}", True
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = f"the disk is full: {error}; what was saved before is intact: free some space and start again"
    elif isinstance(error, BrokenPipeError):
        message = f"what read this output has ended: {error}"
    elif isinstance(error, OSError) and made.watchdog and not os.path.exists(config.out):
        message = f"--out {config.out} has vanished: {error}"
    elif isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EIO, errno.ESTALE):
        message = f"--out {config.out}: its disk fails: {error}; what was saved before is intact"
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
    elif alone and "imed out" in message and config:
        message += (
            f"\nAnother rank has not answered for --timeout {config.timeout} s: it hangs, or is slow; see its log"
        )
    running = status.get("state") == "running" and made.watchdog  # it began: the run folder is this job's
    unused = code == 2 and made.is_unused()
    if running and not unused:  # the first rank to fail says why; what follows from it elsewhere does not replace it
        try:
            write_status(run, "error" if code == 2 else "failed", status["step"], code, message)
        except OSError:
            message += f"\n{run}/status.json could not be written"
    if rank == 0 or alone:  # what all ranks see alike is said once
        with contextlib.suppress(OSError):  # stderr may be on the disk that is full
            print(f"error: {message}", file=sys.stderr)
    made.release(unused)
    return code
