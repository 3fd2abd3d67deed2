"""What is settled before the first step: every `auto` gets its value, `--check`, whether memory, data and weights are
fit for the run, and the values that training starts from. Refusals that the flags and the number of ranks alone decide
are in config.py."""

import os
import platform
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from lib.errors import UserError, local_path  # first: it finds the Python that has torch

import torch  # isort: skip

import checkpoint
import fp8
import plan
import shard
from attention import choose_backend, kernel
from config import DEFAULT, Config, check_batch, refuse_unsupported, split_batch, without
from data import Loader, open_checked, open_loaders, with_steps
from lib import lora, machine
from lib.machine import cpu_name
from lib.rows import Catalog
from lib.run import COMPARED_AT, logger, refuse_unusable
from lib.weights import dropout_note, open_adapter, refuse_in_the_way
from lib.weights import open_weights as open_folder
from model import Transformer, flops_per_token, random_init
from optim import DTYPES
from shapes import MODELS

SHORT_SECONDS = 300  # what is compiled is faster by a tenth to a third
CORE_FLOPS = 5e10  # per second, uncompiled: the default recipe's, in bf16, on a Xeon; wider models reach more


def resolve(config: Config, device: torch.device, world_size: int) -> Config:
    """Replaces every `auto` by what it means here, so that flags.json says what was done; refuses what cannot run."""
    config = replace(config, dtype=_choose_dtype(config.dtype, device), compile=_choose_compile(config, device))
    refuse_unsupported(config, world_size)
    shard.mesh_shape(config.shard_size, world_size)  # refuses what does not divide
    micro_batch, batch_tokens = split_batch(config, world_size)
    if config.fp8 != "off":
        fp8.check_run(config, device, micro_batch)
        with torch.device("meta"):
            fp8.convert(Transformer(config.model_config), config, device)
    compiled, head_dim = config.compile != "none", config.model_config.head_dim
    try:
        attention = choose_backend(config.attention, device.type, config.dtype, compiled, config.seq_len, head_dim)
    except ValueError as e:
        raise UserError(str(e)) from None
    return replace(config, attention=attention, batch_tokens=batch_tokens)


def _choose_dtype(dtype: str, device: torch.device) -> str:
    cuda = device.type == "cuda"
    if dtype == "tf32" and not (cuda and torch.cuda.get_device_capability(device) >= (8, 0)):
        raise UserError(f"--dtype tf32: only NVIDIA GPUs from Ampere on have it, {device.type} here; --dtype fp32")
    if dtype != "auto":
        return dtype
    if cuda:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # AMX is 2 times as fast in bf16, AMD's AVX-512 1 to 2 times; Intel's without AMX 1.4 to 1.6 times slower.
        cpu = torch.cpu.get_capabilities()
        fast_avx512 = cpu.get("avx512_bf16") and "Intel" not in cpu_name()
        has_bf16 = fast_avx512 or cpu.get("amx_tile")
    return "bf16" if has_bf16 else "fp32"


def _choose_compile(config: Config, device: torch.device) -> str:
    mode = config.compile
    if mode == "none":
        return mode
    problem = machine.compiler_problem()
    if problem and mode != "auto":
        raise UserError(f"--compile {mode}: {problem}")
    if problem and int(os.environ.get("RANK", 0)) == 0:
        print(f"Training without torch.compile: {problem}", file=sys.stderr)
    if mode == "auto":
        return "none" if problem or _is_short(config, device) else "block"
    return mode


def _is_short(config: Config, device: torch.device) -> bool:
    """Whether a run on a CPU ends before compiling, which takes half a minute, has paid for itself."""
    tokens = config.steps * (config.batch_tokens or config.micro_batch * config.seq_len)
    flops = tokens * flops_per_token(config.model_config, config.seq_len)
    return device.type == "cpu" and flops < SHORT_SECONDS * CORE_FLOPS * torch.get_num_threads()


def refuse_without_room(config: Config, device: torch.device, world_size: int) -> None:
    """Refuses a run that cannot fit into this machine, before anything is allocated. It counts only what any run needs:
    of the activations, the inputs of the blocks."""
    cluster = plan.cluster_here(device, world_size)
    on_gpu, on_host = plan.memory(plan.split(config, cluster), cluster, least=True)
    places = [(on_host, f"{platform.node()} ({cluster.gpus} processes)", cluster.host_gib)]
    if on_gpu:
        places.append((on_gpu, str(device), cluster.gpu.gib))
    for needs, place, free in places:
        if sum(needs.values()) / plan.GIB > free:
            raise UserError(
                f"This run needs more than {plan.gib(needs)} on {place}, which has {free:.1f} GiB. What lowers it, the"
                f" cheapest first: {machine.lower_memory(config, bool(on_gpu))}"
            )


def check_inputs(config: Config, resumes: bool, world_size: int, catalog: Catalog) -> list[Loader]:
    """Tokens, tokenizer, weights and prompt against the model; also tokenises text, once -> the loaders of rank 0."""
    refuse_unusable(config.track)
    if not resumes:
        check_batch(config, world_size)
    loaders = open_checked(config, world_size, catalog)
    refuse_in_the_way(Path(config.out) / "hf", True)
    _open_weights(config, resumes)
    return loaders


def open_data(
    config: Config, resume_from: checkpoint.Checkpoint | None, ranks: shard.Ranks
) -> tuple[Loader, Loader | None]:
    """The loaders for training and, if the run evaluates, for validation. Rank 0 goes first: it checks all inputs,
    tokenises text, and tells the others what is on the hub. All ranks must call."""
    shard.on_every_rank(lambda: refuse_without_room(config, ranks.device, ranks.world_size), ranks)
    catalog, loaders = Catalog(config, resume_from and resume_from.manifest["position"].get("commits")), []

    def look_up() -> tuple:
        loaders.extend(check_inputs(config, resume_from is not None, ranks.world_size, catalog))
        return catalog.listed, catalog.streamed

    catalog.listed, catalog.streamed = shard.on_first_rank(look_up, ranks)
    data, *rest = loaders or open_loaders(config, ranks.rank, ranks.world_size, catalog)
    return data, rest[0] if rest else None


def report(config: Config) -> int:
    """--check: everything that can be known without training; prints key=value lines for launch.sh."""
    device = machine.find_device(int(os.environ.get("LOCAL_WORLD_SIZE", config.check)))  # of all, those on this machine
    processes = config.check or max(1, torch.cuda.device_count() if device.type == "cuda" else 1)
    config = resolve(with_steps(config, processes), device, processes)
    existing = next(p for p in [Path(config.out).absolute(), *Path(config.out).absolute().parents] if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--out {config.out}: {existing} is no folder that can be written to")
    resume_from, _ = checkpoint.find(config, checksums=False)
    done = (
        resume_from is not None
        and resume_from.step >= config.steps
        and checkpoint.is_finished(config, resume_from.step)
    )
    if done:
        say_finished(config, resume_from.step)
    else:
        refuse_without_room(config, device, processes)
        position = resume_from.manifest["position"] if resume_from else {}
        catalog = Catalog(config, position.get("commits"))
        data, *_ = check_inputs(config, resume_from is not None, processes, catalog)
        if resume_from:
            data.load_state_dict(position)
        shape = config.model_config
        heads = shape.n_heads, shape.n_kv_heads, shape.head_dim
        print(f"attention={kernel(config.attention, data.separate, device, DTYPES[config.dtype], heads)}")
    state = "finished" if done else "resume" if resume_from else "fresh"
    print(f"out={config.out}\ndevice={device.type}\nprocesses={processes}\nstate={state}\ntimeout={config.timeout}")
    if "LOCAL_WORLD_SIZE" not in os.environ:  # a person asks, not a launcher, which trains next
        print(f"memory={plan.memory_line(config, plan.cluster_here(device, processes))}")
    return 0


def say_finished(config: Config, step: int) -> None:
    words = sys.argv[1:] or DEFAULT
    if "--check" in words:  # launch.sh's last words
        words = words[: words.index("--check")] or DEFAULT
    again = f"bash launch.sh {shlex.join(without(words, ('--steps', '--epochs')))}"
    weights = f"  its weights:   {config.out}/hf, a Hugging Face folder, for transformers and others\n"
    print(
        f"{config.out} is finished: {step} of {config.steps} steps are done.\n"
        f"{weights * (Path(config.out) / 'hf').exists()}"
        f"  sample:        python generate.py --run {shlex.quote(config.out)} --prompt 'The'\n"
        f"  continue:      {again} --steps {2 * step}\n"
        f"  start afresh:  {again} --out {shlex.quote(config.out + '-2')}"
    )


def open_weights(config: Config, ranks: shard.Ranks, resumes: bool):
    """read(name, slices) of --weights on the ranks that read them, else None; before anything is allocated, for a
    machine may lack the files. All ranks must call."""
    reads = config.load == "direct" or ranks.rank == 0
    return shard.on_every_rank(lambda: _open_weights(config, resumes) if reads else None, ranks)


def _open_weights(config: Config, resumes: bool):
    """A run with adapters goes on with their frozen base, too."""
    if not config.weights or (resumes and not config.lora):
        return None
    read = open_folder(local_path(config.weights, "--weights"), config.model_config)
    if config.lora_weights and not resumes:
        return lora.join(read, open_adapter(local_path(config.lora_weights, "--lora_weights"), config))
    return read


def first_values(config: Config, model: Transformer, weights) -> tuple:
    """What shard.fill_parameters reads: --weights, or random values, which every rank draws itself."""
    notes = [dropout_note(local_path(config.model, "--model") / "config.json")] if config.model not in MODELS else []
    notes += [dropout_note(local_path(config.lora_weights, "") / "adapter_config.json")] if config.lora_weights else []
    for note in filter(None, notes):
        logger.info(note)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    read = weights or random_init(config.model_config, shapes, config.seed)
    if config.weights:
        logger.info("Reading weights from %s", config.weights)
    if config.lora and not config.lora_weights:
        read = lora.join(read, lora.first_values(config, shapes))
    return read, config.load


def predict(config: Config, run) -> dict[str, float]:
    """The prediction of plan.py for a record of a run on GPUs that is long enough to compare. run: a lib.run.Run."""
    if run.ranks.rank or config.steps < COMPARED_AT or run.ranks.device.type == "cpu":
        return {}
    with run.phase("plan"):
        try:
            return plan.step_figures(config, plan.cluster_here(run.ranks.device, run.ranks.world_size))
        except (RuntimeError, NotImplementedError) as e:  # a changed model that cannot run on the meta device
            logger.warning("Plan: no prediction for this model: %s", e)
            return {}
