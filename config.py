"""Every setting of a run: one frozen dataclass, and the command line made from it.

    python train.py [@recipes/NAME.args ...] [--flag value | --flag=value ...]        later ones win

A recipe is a file of flags with # comments; it may name others with @. Nothing else configures a run: no YAML and
no environment variables.

Nothing here imports torch, which takes seconds, so --help and error messages appear at once. Functions that open files
import their libraries themselves."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from lib.errors import Parser, UserError, nearest
from lib.files import ROOT, VERSION
from lib.hub import local_path
from lib.synonyms import describe_unknown
from shapes import MODELS, ModelConfig

PROFILE_AFTER = 3  # steps before the profiled ones: one compiles, one settles, and one warms up the profiler
DEFAULT = ["@recipes/default.args"]  # used if the command line is empty
LANES = 64  # of a stream, at least
BYTES_UP_TO = 1024  # --tokenizer defaults to bytes (258 ids) up to this vocabulary
REPLACES = {"--data": "--val_data", "--epochs": "--steps", "--steps": "--epochs"}  # a flag drops a recipe's other flag


def _flag(
    default, help: str, choices: tuple = (), least: float = 0, below: float = 2**53, needs: str = "",
    group: str = "", resume: str = "same",
):  # fmt: skip
    """least, below: a number's range, without `below`. needs: the flags without which this one has no effect.
    group: the heading in --help of this flag and those after it. resume: on resume, the value must be the same, may
    change ("free"), or may change if --resume_override names the flag ("override")."""
    return field(default=default, metadata=locals())  # the arguments by name


# Flags that change when, where and how steps are computed, but not their result beyond rounding.
may_change_on_resume = partial(_flag, resume="free")
_tunable = partial(_flag, resume="override")


@dataclass(frozen=True)
class Config:
    model: str = _flag(
        "",
        f"{' '.join(MODELS)}; or a Hugging Face folder, or the hub id of a downloaded one; empty = the model of"
        " --weights, else tiny-llama",
        group="model",
    )
    weights: str = _flag(
        "", "safetensors to start from: a folder, or the hub id of a downloaded one; empty = random values"
    )
    vocab_size: int = _flag(0, "overrides the model's vocabulary size; 0 = do not")
    dim: int = _flag(0, "overrides the model's width")
    n_layers: int = _flag(0, "overrides the model's number of layers")
    n_heads: int = _flag(0, "overrides the model's number of attention heads")
    n_kv_heads: int = _flag(0, "overrides the model's number of key/value heads")
    ffn_dim: int = _flag(0, "overrides the model's feed-forward width")
    router_aux_loss_coef: float = _flag(
        -1.0, "weight of the loss that balances experts; below 0 = the model's", least=-1
    )
    lora: int = _flag(0, "train adapters of this rank (LoRA) and freeze the weights; 0 = train all weights")
    lora_alpha: float = _flag(0.0, "LoRA output is scaled by lora_alpha / rank; 0 = 2 * rank", needs="lora")
    lora_targets: tuple = _flag(
        ("q", "k", "v", "o", "gate", "up", "down"),
        "the projections that get adapters, separated by commas; all = every one that can have an adapter",
        needs="lora",
    )
    quantize: str = _flag(
        "none",
        "nf4 = keep the frozen projections of the blocks in four bits (QLoRA), whole on every rank",
        ("none", "nf4"),
        needs="lora",
    )
    lora_weights: str = _flag("", "the folder of a PEFT adapter of --weights to start from", needs="weights lora")
    data: tuple = may_change_on_resume(
        (),
        "one or more of: token shards (a folder, .bin), .txt, .md, .jsonl, .json, .csv, .parquet, globs,"
        " hf://datasets/ORG/NAME/PATH, s3://, gs://, az:// and https:// addresses; each may end in :WEIGHT; none = the"
        " built-in text; after a recipe, it replaces that recipe's --val_data as well",
        group="data",
    )
    val_data: tuple = may_change_on_resume(
        (), "the same for validation; none = shards named *val*, else a held-out 1/20"
    )
    tokenizer: str = _flag(
        "",
        "bytes, or a tokenizer.json, a tokenizer.model, a folder or the hub id of one; default: that of --weights or"
        f" --model if it has one, else bytes (text for a vocabulary above {BYTES_UP_TO} must name a tokenizer)",
    )
    text_field: str = may_change_on_resume(  # the data's fingerprint tells if it makes a difference
        "",
        "the field of a row that holds the text: a row that has it is a document, even if it has the fields of a"
        " conversation; empty = text, for rows that are no conversation",
    )
    chat_fields: tuple = _flag(
        (),
        "the fields with the user's and the assistant's text, separated by commas, as in question,answer; an"
        " optional first one holds the system message. Known without it: messages, conversations, prompt and completion"
        " or chosen, instruction and output",
    )
    data_dtype: str = _flag("", "dtype of headerless token files", ("", "uint16", "uint32"))
    documents: str = _flag(
        "joined",
        "separate: documents never attend to each other; joined: a row is one sequence",
        ("joined", "separate"),
    )
    long_chats: str = _flag(
        "truncate", "cut conversations longer than --seq_len, or drop them; the log counts them", ("truncate", "drop")
    )
    skip_bad: int = may_change_on_resume(
        0, "bad rows of text to log and skip before the next one ends the run; for streams, per lane"
    )
    stream: bool = _flag(
        False, "tokenize local text during training instead of once into --cache; text of addresses is always streamed"
    )
    cache: str = may_change_on_resume(
        "", "folder for tokenized text and downloaded shards; empty = cache/ beside train.py"
    )
    lanes: int = _flag(
        0,
        "parts that a stream is divided into; the order of rows depends on it. 0 = at a fresh start the first multiple"
        " of micro_batch x ranks from 64 on, so that one rank reads each lane; a resume keeps the number",
        needs="stream",
    )
    delimiter: int = _flag(
        -1, "id of the token that begins a document; -1 = defined by the tokenizer or the shard format", least=-1
    )
    seq_len: int = _flag(256, "tokens per row", least=1, group="batch and length")
    micro_batch: int = may_change_on_resume(
        8, "rows per rank per forward pass; 0 = the rank's whole share of --batch_tokens"
    )
    batch_tokens: int = _flag(0, "tokens per optimizer step over all ranks; 0 = one micro-batch per rank")
    steps: int = may_change_on_resume(1000, "optimizer steps", least=1)
    epochs: float = may_change_on_resume(
        0.0, "passes over --data, instead of --steps, each row trained on once in each; 0 = --steps"
    )
    optimizer: str = _flag(
        "adamw",
        "muon updates the matrices of the blocks with Muon and the rest with AdamW",
        ("adamw", "muon"),
        group="optimizer",
    )
    lr: float = _tunable(3e-4, "peak learning rate", least=1e-12)
    embed_lr: float = _tunable(0.0, "peak learning rate of the embeddings, with the schedule of --lr; 0 = --lr")
    min_lr: float = _tunable(0.0, "learning rate at the end of the decay")
    warmup_steps: float = _tunable(0.02, "linear warm-up: its number of steps, or below 1 its share of --steps")
    schedule: str = _tunable(
        "cosine", "after the warm-up; wsd = constant, then linear decay", ("cosine", "linear", "constant", "wsd")
    )
    decay_steps: float = _tunable(
        0.0,
        "the step at which the decay ends (0 = --steps), for wsd its number of steps (0 = a fifth of --steps); or below"
        " 1 the same as a share of --steps",
    )
    weight_decay: float = _tunable(0.1, "decoupled weight decay of matrices and embeddings")
    beta1: float = _tunable(0.9, "AdamW's first beta", below=1)
    beta2: float = _tunable(0.95, "AdamW's second beta", below=1)
    clip: float = _tunable(1.0, "largest global gradient norm; 0 = no clipping")
    dtype: str = _flag(
        "auto",
        "dtype of activations and matrix products (weights stay fp32); tf32 = fp32 with TF32 products on a GPU; auto ="
        " bf16 if the hardware is faster in it, else fp32",
        ("auto", "bf16", "tf32", "fp32"),
        group="precision, memory and speed",
    )
    param_dtype: str = _flag(
        "fp32",
        "dtype of the master weights and gradients; bf16 rounds updates stochastically, and the sum of 8 micro-batches"
        " is off by 0.003 of itself, of 64 by 0.008",
        ("fp32", "bf16"),
    )
    state_dtype: str = _flag("fp32", "dtype of AdamW's two moments and Muon's momentum", ("fp32", "bf16"))
    reduce_dtype: str = _flag("fp32", "dtype of gradient reductions over ranks", ("fp32", "bf16"))
    fp8: str = may_change_on_resume(
        "off",
        "FP8 matrix products: one scale per tensor, per row and column, or that with weight gradients in bf16;"
        " 0 = off, 1 = tensor",
        ("off", "tensor", "row", "row_gw_hp"),
    )
    fp8_grad_dtype: str = may_change_on_resume(
        "auto",
        "FP8 format of gradients; auto = e5m2 (range) with --fp8 tensor, e4m3 (precision) with the others",
        ("auto", "e5m2", "e4m3"),
        needs="fp8",
    )
    fp8_all_gather: bool = may_change_on_resume(
        False, "gather sharded weights as FP8 (--fp8 tensor): half the bytes", needs="fp8"
    )
    fp8_skip: tuple = may_change_on_resume(
        (), "layers that stay in bf16: their names, or parts of the names between dots, as in down_proj", needs="fp8"
    )
    fp8_log_every: int = may_change_on_resume(
        100, "steps between records of a few layers' FP8 statistics in metrics.jsonl; 0 = never", needs="fp8"
    )
    shard_size: int = may_change_on_resume(
        0, "ranks over which one copy of the parameters is sharded; 0 = all, 1 = every rank holds all parameters"
    )
    context_parallel: int = may_change_on_resume(
        1, "ranks that share each row, for rows too long for one device: each computes an N-th of its tokens", least=1
    )
    reshard: str = may_change_on_resume(
        "auto",
        "free gathered parameters after the forward pass; auto = except the last block's, which are needed next",
        ("auto", "always", "never"),
    )
    prefetch: int = may_change_on_resume(
        1, "units gathered before they are used, forward and backward; 0 = FSDP2's order"
    )
    offload: str = may_change_on_resume(
        "none", "cpu = keep and update parameters, gradients and optimizer state on the CPU", ("none", "cpu")
    )
    offload_activations: bool = may_change_on_resume(
        False, "keep the block inputs of checkpointing in the host's memory"
    )
    checkpointing: str = may_change_on_resume(
        "none",
        "recompute activations in the backward pass: block = all except each block's input; selective = also keeps"
        " matrix products and attention",
        ("none", "block", "selective"),
    )
    compile: str = may_change_on_resume(
        "auto",
        "torch.compile each block or the whole model; auto = block if there is a compiler; on a CPU only for runs of"
        " more than a few minutes",
        ("auto", "none", "block", "model"),
    )
    attention: str = may_change_on_resume(
        "auto",
        "attention backend; auto = torch's varlen on a GPU in bf16 with separate documents; blocked on a CPU in bf16"
        " for rows of up to 512 (compiled: 1024); else sdpa; flash = the flash-attn package",
        ("auto", "sdpa", "blocked", "varlen", "flash"),
    )
    out: str = may_change_on_resume("", "run folder; default runs/ + recipe and data names", group="the run")
    seed: int = _flag(0, "seed of initialization, data order and samples", least=-(2**63), below=2**63)
    log_every: int = may_change_on_resume(10, "steps between records; 0 = the first and the last only")
    eval_every: int = may_change_on_resume(100, "steps between evaluations; 0 = never")
    eval_batches: int = may_change_on_resume(
        10, "global batches per evaluation; 0 = the whole validation split", below=2**20
    )
    save_every: int = may_change_on_resume(1000, "steps between checkpoints; 0 = at the end only")
    save_async: bool = may_change_on_resume(
        True, "write checkpoints in the background, from a copy in the host's memory; not with --offload cpu"
    )
    keep: int = may_change_on_resume(
        2, "checkpoints to keep; at least 2, because a damaged one is replaced by the one before it", least=2
    )
    keep_every: int = may_change_on_resume(
        0, "every N-th checkpoint (step N x save_every, ...) is kept for good; 0 = none", needs="save_every"
    )
    load: str = may_change_on_resume(
        "direct",
        "how --weights are read: direct = every rank reads its part; rank0 = rank 0 reads and sends each rank its part;"
        " a resume reads the checkpoint on every rank",
        ("direct", "rank0"),
        needs="weights",
    )
    resume: str = may_change_on_resume(
        "auto", "auto = the run folder's newest checkpoint; never; or a checkpoint folder"
    )
    resume_override: tuple = may_change_on_resume(
        (), "optimizer settings that may change on resume, separated by commas, as in lr,warmup_steps"
    )
    on_nonfinite: str = may_change_on_resume(
        "stop",
        "on a non-finite loss or gradient norm, before the update: stop the run, or skip the update",
        ("stop", "skip"),
    )
    replicas_every: int = may_change_on_resume(
        100, "steps between comparisons of the replicas' parameters by hash; 0 = at saves only"
    )
    deterministic: bool = may_change_on_resume(
        False, "use only kernels that give the same bits each time; slower on GPUs"
    )
    sample_every: int = may_change_on_resume(0, "steps between text samples; 0 = never")
    prompt: str = may_change_on_resume("", "the start of samples")
    track: tuple = may_change_on_resume(
        (), "trackers that receive the records, separated by commas: tensorboard, wandb"
    )
    profile: int = may_change_on_resume(
        0, "steps to profile with torch's profiler, which writes a trace and a table to profile/; 0 = none"
    )
    timeout: int = may_change_on_resume(
        600,
        "abort if no step finishes within this many seconds, and report where each rank hangs. The start, the first"
        " step, an evaluation, a save and samples may take 30 minutes without reading or writing a byte",
        least=1,
    )
    check: int = may_change_on_resume(
        -1, "check everything that needs no training, for N processes (default: one per GPU, or 1), and exit", least=-1
    )

    @cached_property
    def model_config(self) -> ModelConfig:
        """The shape of --model, with the sizes that flags override."""
        row = MODELS.get(self.model)
        if row is None:
            from lib.families import read_config

            row = read_config(local_path(self.model, "--model"))
        sizes = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
        changes = {f: value for f in sizes if (value := getattr(self, f))}
        if self.router_aux_loss_coef >= 0:
            changes["router_aux_loss_coef"] = self.router_aux_loss_coef
        if "dim" in changes or "n_heads" in changes:
            changes["head_dim"] = 0
        if "n_heads" in changes and row.n_kv_heads == row.n_heads:
            changes.setdefault("n_kv_heads", 0)
        try:
            return replace(row, **changes)
        except ValueError as e:
            raise UserError(
                f"--model {self.model} with {', '.join(f'--{k} {v}' for k, v in changes.items() if v)}: {e}"
            ) from None

    def trained_length(self, shape: ModelConfig) -> int:
        """Tokens of the longest text that the model has been trained on: a row, or for --weights their own length."""
        return max(self.seq_len, shape.max_seq_len) if self.weights else self.seq_len

    @property
    def warmup(self) -> int:
        return round(self.warmup_steps * self.steps if self.warmup_steps < 1 else self.warmup_steps)

    @property
    def warnings(self) -> list[str]:
        """Rows longer than those of the weights' training, or parts of the schedule that do not fit into --steps."""
        found, rest, length = [], self.steps - self.warmup, self.model_config.max_seq_len
        if self.weights and self.seq_len > length:
            found.append(
                f"--seq_len {self.seq_len}: {self.weights} was trained on rows of up to {length} tokens, so it has to"
                " learn the positions after them; the export names the longer length"
            )
        if rest < 0:
            found.append(
                f"--warmup_steps {self.warmup}: the run has {self.steps} steps, so it never reaches --lr {self.lr}"
            )
        elif self.schedule == "wsd" and self.decay_steps > rest:
            decay = f"--decay_steps {self.decay_steps:.0f}"
            found.append(f"{decay}: {rest} steps follow the warm-up, so the decay is that short")
        return found


def fields_that_resume(kind: str) -> list[str]:
    """The flags of that kind: same, free or override; see _flag."""
    return [f.name for f in fields(Config) if f.metadata["resume"] == kind]


def _read_recipe(name: str, inside: tuple[Path, ...] = ()) -> list[str]:
    """The words of a recipe file, with each @NAME in it replaced by the words of that recipe."""
    path = next((p for p in (Path(name), ROOT / name) if p.is_file()), None)
    if path is None:
        others = {p.stem: f"@recipes/{p.name}" for p in sorted((ROOT / "recipes").glob("*.args"))}
        near = nearest(Path(name).stem, others)
        known = f"did you mean {others[near]}?" if near else f"there are {', '.join(others.values())}"
        raise UserError(f"@{name}: this recipe does not exist; {known}")
    if path.resolve() in inside:
        raise UserError(f"@{name}: the recipe names itself")
    try:
        content = path.read_text("utf-8")
        words = shlex.split(content, comments=True)
    except ValueError as e:  # no UTF-8, or an open quote
        raise UserError(f"{path}: {e}") from None
    if words and words[0][:1] not in "-@":
        raise UserError(f"@{name} is not a recipe: it begins with {words[0][:40]!r}, but must begin with a flag")

    def place(word: str) -> str:
        before = re.search(rf"(?m)^[^#\n]*?{re.escape(word)}", content)
        return f"{path} line {content.count(chr(10), 0, before.end()) + 1}: " if before else f"{path}: "

    words = _spelt_as_ours(words, place)
    try:
        make_parser().parse_args([word for word in words if not word.startswith("@")])
    except UserError as e:
        flag = re.search(r"--\w+|$", str(e))[0]
        raise UserError(f"{place(flag)}{e}") from None
    inside = *inside, path.resolve()
    return [word for w in words for word in (_read_recipe(w[1:], inside) if w.startswith("@") else [w])]


def _on_off(word: str) -> bool:
    if word.lower() not in ("on", "off", "true", "false"):
        raise argparse.ArgumentTypeError(f"expected on or off, not {word!r}")
    return word.lower() in ("on", "true")


def make_parser() -> argparse.ArgumentParser:
    """Flags from Config's fields: types from the defaults, everything else from the metadata."""
    parser = Parser(
        prog="train.py",
        description="Trains a Llama or GPT model. @FILE reads flags from a file, a recipe: `bash launch.sh recipes`"
        " lists them. The last value of a repeated flag counts.",
        usage="python train.py [@recipes/NAME.args ...] [--flag value ...]",
    )
    parser.add_argument("--version", action="version", version=f"flatland {VERSION}")
    for f in fields(Config):
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        help, choices = f.metadata["help"], " ".join(filter(None, f.metadata["choices"]))
        shown = {"": "empty", "()": "none", "True": "on", "False": "off"}.get(str(f.default), f.default)
        shown = ",".join(shown) if isinstance(shown, tuple) else shown
        help += f" (default: {shown}; choices: {choices})" if choices else f" (default: {shown})"
        group.add_argument(f"--{f.name}", default=f.default, help=help, **_how_to_read(f))
    return parser


def _how_to_read(f: Field) -> dict:
    """argparse's options for the values of a flag."""
    if f.name == "check":
        return {"nargs": "?", "const": 0, "type": int, "metavar": "N"}
    if isinstance(f.default, tuple):
        return {"nargs": "+"}
    if isinstance(f.default, bool):
        return {"nargs": "?", "const": True, "type": _on_off, "metavar": "on|off"}
    return {"type": type(f.default), "metavar": type(f.default).__name__}


def parse_args(argv: list[str], trains: bool = False) -> Config:
    """Command-line words -> Config. Raises UserError for mistakes that can be found without data or devices.
    trains: an empty command line means the default recipe; also refuses missing data and tokenizers."""
    if trains:
        argv = argv or DEFAULT
    recipes = [Path(word[1:]).stem for word in argv if word.startswith("@")]
    values = _read_values(with_recipes(argv))
    if wrong := [message for f in fields(Config) for message in _mistakes(f, values)]:
        raise UserError("\n".join(wrong))
    values["lora_alpha"] = values["lora_alpha"] or 2.0 * values["lora"]
    chose_bytes = values["tokenizer"] == "bytes"
    _settle_model(values)
    values["out"] = out = values["out"] or _default_out(values, recipes)
    if not out.isprintable():  # launch.sh and train.sbatch read it as a line
        raise UserError(f"--out {out!r}: a run folder's name must be printable")
    config = Config(**values)
    if config.lora_targets in (("all",), ("all-linear",)):
        from lib.lora import sizes

        config = replace(config, lora_targets=tuple(sizes(config.model_config)))
    check_together(config)
    if trains and config.lora and not config.weights:
        raise UserError(f"--lora {config.lora} without --weights would freeze random weights: name --weights")
    if not chose_bytes:
        _check_data(config, trains)
    return config


def with_recipes(words: list[str]) -> list[str]:
    """The words in our spelling, with each @NAME replaced by the words of that recipe. A later --data also replaces a
    recipe's --val_data, and --epochs and --steps replace each other. Raises UserError for an unknown flag."""
    out = []
    for word in reversed(_spelt_as_ours(words)):
        if word.startswith("@"):
            out = without(_read_recipe(word[1:]), {REPLACES[flag] for flag in flags_in(out) & REPLACES.keys()}) + out
        else:
            out = [word, *out]
    return out


def flags_in(words: Iterable[str]) -> set[str]:
    return {word.partition("=")[0] for word in words}


def without(words: Iterable[str], flags: Iterable[str]) -> list[str]:
    """The words without these flags and their values."""
    kept, drops = [], False
    for word in words:
        if word.startswith("--"):
            drops = word.partition("=")[0] in flags
        kept += [] if drops else [word]
    return kept


def _read_values(words: list[str]) -> dict:
    """{flag: value}, including defaults."""
    if {"--steps", "--epochs"} <= flags_in(words):
        raise UserError("--steps and --epochs exclude each other: remove one")
    parsed = vars(make_parser().parse_args(words))
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in parsed.items()}
    values["fp8"] = {"0": "off", "1": "tensor"}.get(values["fp8"], values["fp8"])
    for flag in ("resume_override", "lora_targets", "track", "chat_fields"):
        values[flag] = tuple(name for word in values[flag] for name in word.split(",") if name)
    if values["lora_weights"] and values["weights"] and "--lora" not in flags_in(words):
        from lib.weights import adapter_flags

        theirs = adapter_flags(local_path(values["lora_weights"], "--lora_weights"))
        values |= {flag: value for flag, value in theirs.items() if f"--{flag}" not in flags_in(words)}
    if len(values["chat_fields"]) not in (0, 2, 3):
        raise UserError(f"--chat_fields {','.join(values['chat_fields'])}: expected two or three names")
    return values


def _settle_model(values: dict) -> None:
    """--model defaults to --weights, and --tokenizer to the tokenizer next to --weights or --model."""
    from lib.tokenizer import holds_tokenizer

    folders, weights = {}, values["weights"]
    if weights:
        folders[weights] = local_path(weights, "--weights")
    model = values["model"] = values["model"] or weights or "tiny-llama"
    if model not in MODELS and model not in folders:
        try:
            folders[model] = local_path(model, "--model")
        except UserError as e:
            plain = {re.sub("[-_]", "", name): name for name in MODELS}
            near = plain.get(nearest(re.sub("[-_]", "", model.rpartition("/")[2].lower()), plain))
            meant = f"Did you mean {near}? " if near else ""
            known = f"{meant}Choose from {', '.join(MODELS)}"
            raise UserError(f"--model {model}: unknown. {known}. As a folder: {e}") from None
    beside = [spec for spec, folder in folders.items() if holds_tokenizer(folder)]
    values["tokenizer"] = values["tokenizer"] or (*beside, "bytes")[0]


def _spelt_as_ours(words: list[str], place: Callable[[str], str] = lambda word: "") -> list[str]:
    """--some-flag[=value] -> --some_flag[=value]; other words stay. Raises UserError with all unknown flags, and with
    recipes without @. place: -> where a word is."""
    helps, out, wrong = {f.name: f.metadata["help"] for f in fields(Config)}, [], []
    for word in words:
        flag, equals, value = word.partition("=")
        if not word.startswith("--"):
            out.append(word)
            if (
                word.endswith(".args")
                and not word.startswith("@")
                and any((p / word).is_file() for p in (Path(), ROOT))
            ):
                wrong.append(f"{place(word)}{word} is a recipe: name it with an @, as in @{word}")
        else:
            out.append(flag.replace("-", "_").replace("__", "--", 1) + equals + value)
            if flag[2:].replace("-", "_") not in (*helps, "help", "version"):
                wrong.append(place(flag) + describe_unknown(flag[2:], helps))
    if wrong:
        raise UserError("\n".join(wrong))
    return out


def _default_out(values: dict, recipes: list[str]) -> str:
    from lib.text import name_of

    model = Path(values["model"])
    model = f"{model.parent.name}-hf" if model.name == "hf" else model.name  # runs/NAME/hf
    names = [*(recipes or [model]), *map(name_of, values["data"])]
    return "runs/" + "-".join(re.sub(r"[^\w.-]+", "-", name).strip("-.") or "data" for name in names)


def _mistakes(f: Field, values: dict) -> Iterator[str]:
    """What is wrong with a flag's value, by its field: choices, range, and the flags that it needs."""
    value, rules = values[f.name], f.metadata
    if rules["choices"] and value not in rules["choices"]:
        yield (f"--{f.name} {value}: unknown. Choose from {', '.join(filter(None, rules['choices']))}")
    least, below = rules["least"], rules["below"]
    if isinstance(value, (int, float)) and not least <= value < below:
        yield (f"--{f.name} {value}: it must be at least {least} and below {below} ({rules['help']})")
    streams = f.name == "lanes" and any("://" in d for d in values["data"] + values["val_data"])
    missing = [flag for flag in rules["needs"].split() if values[flag] in ("", "off", 0)]
    if missing and value not in (f.default, 0) and not streams:
        yield (f"--{f.name} has no effect without --{missing[0]}: add it, or remove --{f.name}")


def _check_data(c: Config, trains: bool) -> None:
    """Refuses likely mistakes, unless the user names --tokenizer bytes: samples of unknown tokens and, if it trains,
    the built-in text for a real model, and bytes in a vocabulary of words."""
    from lib.text import is_shards

    size, as_bytes = c.model_config.vocab_size, c.tokenizer == "bytes"
    text = [entry for entry in (*c.data, *c.val_data) if not is_shards(entry)]
    large = trains and size > BYTES_UP_TO
    if large and not c.data and (as_bytes or not c.model.startswith("tiny-")):
        raise UserError(
            f"--model {c.model} has a vocabulary of {size}, but no --data: name it and, for text, --tokenizer (to try"
            " the model on the built-in text, add --tokenizer bytes)"
        )
    if large and text and as_bytes:
        raise UserError(
            f"--model {c.model} has a vocabulary of {size}, but {text[0]} has no --tokenizer: name the model's"
            f" (`python download.py ORG/NAME --skip_model` fetches it); --tokenizer bytes uses 258 of the {size} ids"
        )
    if c.sample_every and as_bytes and any(map(is_shards, c.data)):
        raise UserError(
            "--sample_every needs a --tokenizer to decode these token shards: name it, or give --sample_every 0"
        )


def check_together(c: Config) -> None:
    """Refuses flags that contradict each other."""
    tunable = fields_that_resume("override")
    if wrong := {*c.resume_override} - {*tunable}:
        raise UserError(
            f"--resume_override {min(wrong)}: expected {', '.join(tunable)}; other changes need a new --out"
        )
    if c.profile and c.steps < PROFILE_AFTER + c.profile:
        raise UserError(
            f"--profile {c.profile} needs at least --steps {PROFILE_AFTER + c.profile}, not {c.steps}: {PROFILE_AFTER}"
            " steps come before the profiled ones"
        )
    if c.min_lr > c.lr:
        raise UserError(f"--min_lr {c.min_lr} is above --lr {c.lr}")
    if not c.micro_batch and (not c.batch_tokens or c.batch_tokens % c.seq_len):
        raise UserError(
            f"--micro_batch 0 needs --batch_tokens that divide by --seq_len {c.seq_len}, not {c.batch_tokens}"
        )
    model = c.model_config
    if c.router_aux_loss_coef >= 0 and not model.n_experts:
        raise UserError(f"--router_aux_loss_coef {c.router_aux_loss_coef}: {c.model} has no experts; remove the flag")
    if c.lora:
        from lib.lora import check_flags

        check_flags(c)
    if "dynamic" in str(model.rope_scaling) and c.seq_len > model.max_seq_len:
        raise UserError(
            f"--seq_len {c.seq_len}: rope_scaling of type dynamic beyond {model.max_seq_len:,} positions is not"
            " implemented"
        )
    if model.n_heads % c.context_parallel or c.seq_len % c.context_parallel:
        raise UserError(
            f"--context_parallel {c.context_parallel} must divide the {model.n_heads} heads of {c.model} and --seq_len"
            f" {c.seq_len}"
        )
    if model.positions == "learned" and c.seq_len > model.max_seq_len:
        raise UserError(
            f"--seq_len {c.seq_len}: {c.model} has {model.max_seq_len} learned positions; give at most that many"
        )


def row_groups(c: Config, world_size: int) -> int:
    """Groups of ranks that share rows (--context_parallel)."""
    return max(1, world_size // c.context_parallel)


def split_batch(c: Config, world_size: int) -> tuple[int, int]:
    """-> (micro_batch, batch_tokens), each chosen for the number of ranks if it is 0."""
    groups = row_groups(c, world_size)
    micro_batch = c.micro_batch or -(-c.batch_tokens // (c.seq_len * groups))
    return micro_batch, c.batch_tokens or micro_batch * c.seq_len * groups


def choose_lanes(c: Config, world_size: int) -> int:
    """--lanes, or for 0 a number with which one rank reads each lane."""
    rows = split_batch(c, world_size)[0] * row_groups(c, world_size)
    return c.lanes or rows * -(-LANES // rows)


def check_batch(c: Config, world_size: int) -> None:
    """If both are given, --batch_tokens must be a multiple of --micro_batch x --seq_len x ranks."""
    groups = row_groups(c, world_size)
    unit = c.micro_batch * c.seq_len * groups
    if unit and c.batch_tokens % unit:
        near = max(unit, round(c.batch_tokens / unit) * unit)
        raise UserError(
            f"--batch_tokens {c.batch_tokens} does not divide by micro_batch x seq_len x ranks"
            f"{' / context_parallel' * (c.context_parallel > 1)} = {c.micro_batch} x {c.seq_len} x {groups} = {unit}"
            f" (quotient {c.batch_tokens / unit:.2f}); the nearest multiple is --batch_tokens {near}"
        )


class Conflict(NamedTuple):
    """Two flags that exclude each other, each with its value if only that one conflicts."""

    first: str
    second: str  # a flag, or SEVERAL
    reason: str  # and what to do

    def __str__(self) -> str:
        return f"{self.first} with {self.second}: {self.reason}"


SEVERAL = "several processes"
CONFLICTS = (
    Conflict("--compile model", "--offload cpu", "parameters are fetched block by block: --compile block"),
    Conflict("--compile model", "--offload_activations", "activations are offloaded between blocks: --compile block"),
    Conflict("--offload_activations", "--checkpointing none", "it offloads the block inputs of --checkpointing block"),
    Conflict("--fp8", "--offload cpu", "scales would be computed on the CPU, where the weights are; remove one"),
    Conflict("--fp8 row", "--fp8_grad_dtype e5m2", "its gradients are e4m3; e5m2 is for --fp8 tensor"),
    Conflict("--fp8 row_gw_hp", "--fp8_grad_dtype e5m2", "its gradients are e4m3; e5m2 is for --fp8 tensor"),
    Conflict("--fp8 row", "--fp8_all_gather", "it needs one scale per weight, which only --fp8 tensor has"),
    Conflict("--fp8 row_gw_hp", "--fp8_all_gather", "it needs one scale per weight, which only --fp8 tensor has"),
    Conflict("--decay_steps", "--schedule constant", "it has no decay; remove one"),
    Conflict("--quantize nf4", "--fp8", "weights are in four bits or multiplied in FP8; remove one"),
    Conflict("--quantize nf4", "--offload cpu", "weights in four bits stay on the GPU; remove one"),
    Conflict("--optimizer muon", "--lora", "Muon does not fit the thin matrices of adapters: --optimizer adamw"),
    Conflict("--compile model", SEVERAL, "FSDP gathers parameters by block: --compile block"),
)  # fmt: skip


def refuse_unsupported(c: Config, world_size: int) -> None:
    """Raises UserError with the first conflict between flags."""
    given = {f"--{name} {value}" for name, value in vars(c).items()}
    given |= {f"--{name}" for name, value in vars(c).items() if value not in (0, "off")}
    given |= {SEVERAL} if world_size > 1 else set()
    if world_size % c.context_parallel:
        raise UserError(f"--context_parallel {c.context_parallel} does not divide the {world_size} ranks")
    for conflict in CONFLICTS:
        if given.issuperset((conflict.first, conflict.second)):
            raise UserError(str(conflict))
