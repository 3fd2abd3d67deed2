"""Every setting of a run: one frozen dataclass, and the command line made from it.

    python train.py [@recipes/NAME.args ...] [--flag value | --flag=value ...]        later ones win

A recipe is a file of flags with # comments; it may name others with @. Nothing else configures a run: no YAML and
no environment variables.

This file knows words only: it opens recipes and nothing else, and imports no torch, which takes seconds. So --help and
error messages appear at once, and a machine without the weights can start those that have them. inputs.py gives the
values that depend on folders, and preflight.py those that depend on devices."""

import contextlib
import glob
import os
import re
import shlex
from argparse import ArgumentDefaultsHelpFormatter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

from base.disk import ROOT, VERSION
from base.errors import Parser, UserError, within
from shapes import MODELS, ModelConfig

PROFILE_AFTER = 3  # steps before the profiled ones: one compiles, one settles, and one warms up the profiler
SHARD = ".bin"  # the suffix of a file of token ids
SHORTENED = (".txt", ".jsonl", ".json", ".csv", ".parquet", SHARD)  # suffixes that run folders are not named after
DEFAULT = ["@recipes/default.args"]  # used if the command line is empty
LANES = 64  # a stream has at least as many, unless --lanes says otherwise
ALIASES = {"0": "off", "1": "tensor"}  # of --fp8
KINDS = {bool: "on|off", int: "integer", float: "number", str: "text", tuple: "name"}  # as --help shows values
REPLACES = {"data": "val_data", "epochs": "steps", "steps": "epochs"}  # a flag drops a recipe's other flag


def _flag(
    default, help: str, choices: tuple = (), least: float = 0, most: float = 2**53,
    group: str = "", resume: str = "same", needs: tuple = (), excludes: tuple = (),
):  # fmt: skip
    """least, most: a number's range. group: the heading in --help of this flag and those after it.
    resume: on resume, the value must be the same, may change ("free"), or may change if --resume_override names the
    flag ("override"). needs: the flags, alone or with a value, without which this one has no effect. excludes: (this
    flag's value, or empty for all that turn it on; the flag, or flag and value, that it does not go with; the reason,
    and what to do)."""
    return field(default=default, metadata=locals())  # the arguments by name


# Flags that change when, where and how steps are computed, but not their result beyond rounding.
may_change_on_resume = partial(_flag, resume="free")
_tunable = partial(_flag, resume="override")


@dataclass(frozen=True)
class Config:
    model: str = _flag(
        "",
        f"{' '.join(MODELS)}; or a Hugging Face folder or hub id; empty = --weights', else tiny-llama",
        group="model",
    )
    weights: str = _flag("", "safetensors to start from: a folder or hub id; empty = random values")
    vocab_size: int = _flag(0, "vocabulary; 0, as for the next five: the model's own")
    dim: int = _flag(0, "width")
    n_layers: int = _flag(0, "layers")
    n_heads: int = _flag(0, "attention heads")
    n_kv_heads: int = _flag(0, "key/value heads")
    ffn_dim: int = _flag(0, "feed-forward width")
    lora: int = _flag(0, "rank of the adapters (LoRA) of frozen weights; 0 = --lora_weights', or train all weights")
    lora_alpha: float = _flag(0.0, "scale of the adapters x rank; 0 = 2 * rank", needs=("lora",))
    lora_targets: tuple = _flag(
        (), "projections with adapters, or all; none = --lora_weights', or q,k,v,o,gate,up,down", needs=("lora",)
    )
    quantize: str = _flag(
        "none",
        "nf4 = frozen projections in four bits (QLoRA)",
        ("none", "nf4"),
        needs=("lora",),
        excludes=(
            ("nf4", "--fp8", "weights are in four bits or multiplied in FP8; remove one"),
            ("nf4", "--offload cpu", "weights in four bits stay on the GPU; remove one"),
        ),
    )
    lora_weights: str = _flag("", "folder of a PEFT adapter of --weights to start from", needs=("weights",))
    data: tuple = may_change_on_resume(
        (),
        "token shards (a folder, .bin), .txt, .jsonl, .json, .csv, .parquet, globs, hf://datasets/ORG/NAME/PATH,"
        " s3://, gs://, az://, https://, each with an optional :WEIGHT; none = the built-in text. It also replaces"
        " a recipe's --val_data",
        group="data",
    )
    val_data: tuple = may_change_on_resume((), "for validation; none = shards named *val*, else a held-out 1/20")
    tokenizer: str = _flag(
        "",
        "bytes, a tokenizer.json or tokenizer.model, a folder or hub id; empty = --weights' or --model's, or bytes",
    )
    text_field: tuple = may_change_on_resume(  # the data's fingerprint tells if it makes a difference
        (),
        "field of a row's text, even if it has a conversation's fields; for an entry: a.csv=FIELD; none = text",
    )
    chat_fields: tuple = _flag(
        (), "fields of a conversation: user,assistant or system,user,assistant; none = the usual names"
    )
    data_dtype: str = _flag("", "dtype of headerless token files", ("", "uint16", "uint32"))
    documents: str = _flag("joined", "separate = they never attend to each other", ("joined", "separate"))
    long_chats: str = _flag("truncate", "conversations longer than --seq_len", ("truncate", "drop"))
    skip_bad: int = may_change_on_resume(0, "bad rows of text to skip and log; of a stream per lane")
    stream: bool = _flag(False, "tokenize local text while training, not once into --cache")
    cache: str = may_change_on_resume("", "folder of tokenized text and shards; empty = cache/ next to train.py")
    lanes: int = _flag(0, "parts of a stream, which decide its order; 0 = chosen at the start", needs=("stream",))
    delimiter: int = _flag(-1, "token id that begins a document; -1 = the tokenizer's or the shards'", least=-1)
    seq_len: int = _flag(256, "tokens per row", least=2, group="batch and length")
    micro_batch: int = may_change_on_resume(8, "rows per rank per forward pass; 0 = its share of --batch_tokens")
    batch_tokens: int = _flag(0, "tokens per optimizer step, of all ranks; 0 = one micro-batch each at the start")
    steps: int = may_change_on_resume(1000, "optimizer steps", least=1)
    epochs: float = may_change_on_resume(0.0, "passes over --data; 0 = --steps")
    optimizer: str = _flag(
        "adamw",
        "muon = Muon for the matrices of blocks, AdamW for the rest",
        ("adamw", "muon"),
        group="optimizer",
        excludes=(("muon", "--lora", "Muon does not fit the thin matrices of adapters: --optimizer adamw"),),
    )
    equal_neurons: bool = _flag(
        False,
        "updates of Muon move all neurons (rows or columns, on the longer side) equally far",
        needs=("optimizer muon",),
    )
    lr: float = _tunable(3e-4, "peak learning rate", least=1e-12)
    embed_lr: float = _tunable(0.0, "peak learning rate of embeddings; 0 = --lr")
    min_lr: float = _tunable(0.0, "learning rate at the end of the decay")
    warmup_steps: float = _tunable(0.02, "steps of linear warm-up; below 1 = a share of --steps")
    schedule: str = _tunable(
        "cosine", "after the warm-up; wsd = constant, then linear decay", ("cosine", "linear", "constant", "wsd")
    )
    decay_steps: float = _tunable(
        0.0,
        "last step of the decay (0 = --steps), for wsd its length (0 = a fifth); below 1 = a share of --steps",
        excludes=(("", "--schedule constant", "it has no decay; remove one"),),
    )
    weight_decay: float = _tunable(0.1, "decoupled weight decay of matrices and embeddings")
    beta1: float = _tunable(0.9, "AdamW's first beta", most=1 - 1e-6)
    beta2: float = _tunable(0.95, "AdamW's second beta", most=1 - 1e-6)
    clip: float = _tunable(1.0, "largest global gradient norm; 0 = no clipping")
    skip_spikes: float = _tunable(
        0.0, "skip updates whose loss or gradient norm is so many standard deviations above the last; 0 = none"
    )
    dpo: str = _flag(
        "none",
        "train on pairs of a chosen and a rejected answer, by this loss; see preferences.py",
        ("none", "sigmoid", "sigmoid_norm", "ipo", "simpo"),
        group="pairs of answers",
    )
    dpo_beta: float = _flag(
        0.0, "how strongly the reference holds the model; 0 = 0.1 for sigmoid and ipo", needs=("dpo",)
    )
    simpo_gamma: float = _flag(0.5, "margin of --dpo simpo", needs=("dpo simpo",))
    label_smoothing: float = _flag(
        0.0, "share of pairs whose label is wrong, for --dpo sigmoid", most=0.499, needs=("dpo sigmoid",)
    )
    dpo_sft: float = _flag(0.0, "weight of the chosen answer's mean cross-entropy", needs=("dpo",))
    dtype: str = _flag(
        "auto",
        "dtype of activations and matrix products; tf32 = fp32 with TF32 products; auto = bf16 if faster, else fp32",
        ("auto", "bf16", "tf32", "fp32"),
        group="precision, memory and speed",
    )
    param_dtype: str = _flag(
        "fp32",
        "dtype of masters and gradients; bf16 rounds stochastically, off by 0.003 (8 micro-batches) to 0.008 (64)",
        ("fp32", "bf16"),
    )
    state_dtype: str = _flag("fp32", "dtype of the optimizer's moments", ("fp32", "bf16"))
    reduce_dtype: str = _flag("fp32", "dtype of gradient sums over ranks", ("fp32", "bf16"))
    fp8: str = may_change_on_resume(
        "off",
        "FP8 products, scaled by tensor, or by row and column; gw_hp = weight gradients in bf16; 0 = off, 1 = tensor",
        ("off", "tensor", "row", "row_gw_hp"),
        excludes=(
            ("", "--offload cpu", "scales would be computed on the CPU, where the weights are; remove one"),
            ("row", "--fp8_all_gather", "it needs one scale per weight, which only --fp8 tensor has"),
            ("row_gw_hp", "--fp8_all_gather", "it needs one scale per weight, which only --fp8 tensor has"),
        ),
    )
    fp8_all_gather: bool = may_change_on_resume(False, "gather sharded weights as FP8, half the bytes", needs=("fp8",))
    fp8_skip: tuple = may_change_on_resume((), "layers in bf16: names, or their parts, as down_proj", needs=("fp8",))
    shard_size: int = may_change_on_resume(0, "ranks that share one copy of the parameters; 0 = all, 1 = no sharding")
    context_parallel: int = may_change_on_resume(1, "ranks that share each row", least=1)
    reshard: str = may_change_on_resume(
        "auto",
        "free gathered parameters after the forward pass; auto = all but the last block's",
        ("auto", "always", "never"),
    )
    prefetch: int = may_change_on_resume(1, "units gathered ahead; 0 = FSDP2's order")
    offload: str = may_change_on_resume("none", "parameters, gradients and optimizer on the host", ("none", "cpu"))
    offload_activations: bool = may_change_on_resume(
        False,
        "keep inputs of checkpointed blocks on the host",
        excludes=(("", "--checkpointing none", "it offloads the block inputs of --checkpointing block"),),
    )
    checkpointing: str = may_change_on_resume(
        "none",
        "recompute activations: block = all but block inputs; selective = also keeps matrix products and attention",
        ("none", "block", "selective"),
    )
    compile: str = may_change_on_resume(
        "auto",
        "torch.compile; auto = block, if it pays and there is a compiler",
        ("auto", "none", "block", "model"),
        excludes=(
            ("model", "--offload cpu", "parameters are fetched block by block: --compile block"),
            ("model", "--offload_activations", "activations are offloaded between blocks: --compile block"),
            ("model", "several processes", "FSDP gathers parameters by block: --compile block"),
        ),
    )
    attention: str = may_change_on_resume(
        "auto", "backend; flash = the flash-attn package", ("auto", "sdpa", "blocked", "varlen", "flash")
    )
    out: str = may_change_on_resume("", "run folder; empty = runs/ + recipe and data names", group="the run")
    seed: int = _flag(0, "of initialization, data order and samples", least=-(2**63), most=2**63 - 1)
    log_every: int = may_change_on_resume(10, "steps between records; 0 = the first and the last only")
    eval_every: int = may_change_on_resume(100, "steps between evaluations; 0 = never")
    eval_score: str = may_change_on_resume(
        "", "file of questions to score at each evaluation, as with generate.py --score", needs=("eval_every",)
    )
    eval_batches: int = may_change_on_resume(10, "batches per evaluation; 0 = all validation data", most=2**20)
    save_every: int = may_change_on_resume(1000, "steps between checkpoints; 0 = at the end only")
    save_async: bool = may_change_on_resume(True, "write checkpoints in the background, from a copy in host memory")
    keep: int = may_change_on_resume(2, "newest checkpoints to keep", least=2)
    keep_every: int = may_change_on_resume(0, "keep every N-th checkpoint for good; 0 = none", needs=("save_every",))
    keep_best: str = may_change_on_resume(
        "none",
        "also keep the checkpoint of the best evaluation by this figure; hf/ exports it",
        ("none", "val_loss", "score_acc"),
        needs=("eval_every",),
    )
    patience: int = may_change_on_resume(
        0, "evaluations without a better --keep_best until the run ends; 0 = no end", needs=("keep_best",)
    )
    load: str = may_change_on_resume(
        "direct",
        "who reads --weights: every rank its part, or rank 0 for all",
        ("direct", "rank0"),
        needs=("weights",),
    )
    resume: str = may_change_on_resume("auto", "auto = the run's newest checkpoint; never; or a checkpoint folder")
    resume_override: tuple = may_change_on_resume((), "optimizer flags that may change on resume: lr,warmup_steps")
    on_nonfinite: str = may_change_on_resume(
        "stop", "stop the run or skip the update if its loss or gradient norm is not finite", ("stop", "skip")
    )
    deterministic: bool = may_change_on_resume(False, "only kernels that repeat their bits; slower on GPUs")
    sample_every: int = may_change_on_resume(0, "steps between text samples; 0 = never")
    prompt: str = may_change_on_resume("", "start of samples")
    track: tuple = may_change_on_resume((), "trackers: tensorboard, wandb")
    profile: int = may_change_on_resume(0, "steps to profile with torch's profiler, into profile/; 0 = none")
    timeout: int = may_change_on_resume(
        600, "seconds without a step, or 1800 without a byte between steps, until the run ends", least=1
    )
    check: bool = may_change_on_resume(False, "check a start without training; the last line is JSON")

    # The shape of --model, which is no flag. If that is a folder or a hub id, inputs.settle_model reads it.
    model_config: ModelConfig | None = None

    def flags(self) -> dict:
        """{flag: its value}"""
        return {f.name: getattr(self, f.name) for f in FIELDS}

    def with_sizes(self, shape: ModelConfig) -> ModelConfig:
        """The shape of --model with the sizes that flags override."""
        sizes = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
        changes = {name: value for name in sizes if (value := getattr(self, name))}
        if self.dim or self.n_heads:
            changes["head_dim"] = 0
        if self.n_heads and shape.n_kv_heads == shape.n_heads:
            changes.setdefault("n_kv_heads", 0)
        try:
            return replace(shape, **changes)
        except ValueError as e:
            raise UserError(f"--model {self.model} with other sizes: {e}") from None

    def trained_length(self, shape: ModelConfig) -> int:
        """Tokens of the longest text that the model has been trained on: a row, or for --weights their own length."""
        return max(self.seq_len, shape.max_seq_len) if self.weights else self.seq_len

    @property
    def warmup(self) -> int:
        return round(self.warmup_steps * self.steps if self.warmup_steps < 1 else self.warmup_steps)

    @property
    def warnings(self) -> list[str]:
        """Rows longer than the weights were trained on, and parts of the schedule that do not fit into --steps."""
        rest, longest, wsd = self.steps - self.warmup, self.model_config.max_seq_len, self.schedule == "wsd"
        rules = (
            (self.weights and self.seq_len > longest, f"--seq_len: --weights were trained on rows of {longest} tokens"),
            (self.min_lr and self.schedule == "constant", "--min_lr has no effect with --schedule constant"),
            (self.prompt and not self.sample_every, "--prompt has no effect without --sample_every"),
            (
                self.dpo != "none" and not self.lora and self.lr > 1e-5,
                f"--lr {self.lr} with --dpo: without --lora, rates above 1e-5 usually ruin the model",
            ),
            (rest < 0, f"--warmup_steps {self.warmup} of {self.steps} steps: the run never reaches --lr {self.lr}"),
            (0 <= rest < self.decay_steps and wsd, f"--decay_steps: only {rest} steps follow the warm-up"),
        )
        return [message for holds, message in rules if holds]


FIELDS = [f for f in fields(Config) if f.metadata]


def fields_that_resume(kind: str) -> list[str]:
    """The flags of that kind: same, free or override; see _flag."""
    return [f.name for f in FIELDS if f.metadata["resume"] == kind]


def with_recipes(argv: list[str]) -> dict[str, tuple[list[str], str]]:
    """{flag in our spelling: (it and its values, its recipe or nothing)}, with the flags of each @NAME's recipe. Of
    equal flags the last one counts. A flag in REPLACES also removes its counterpart, unless both are in one recipe or
    both on the command line."""
    words = []
    settings = {"": (words, "")}  # before the first flag
    try:
        expanded = [*_expand(argv)]
    except RecursionError:
        raise UserError(f"{' '.join(argv)}: a recipe names itself") from None
    for word, recipe in expanded:
        if word.endswith(".args"):
            raise UserError(f"{word}: a recipe begins with @, as in @recipes/default.args")
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            other = REPLACES.get(name)
            if other in settings and settings[other][1] != recipe:
                del settings[other]
            words = []
            settings[name], word = (words, recipe), f"--{name}{equals}{value}"
        words.append(word)
    return settings


def _expand(words: list[str], recipe: str = "") -> Iterator[tuple[str, str]]:
    """(word, its recipe), with each @NAME replaced by the words of that recipe."""
    for word in words:
        if not word.startswith("@"):
            yield word, recipe
            continue
        path = Path(word[1:]) if Path(word[1:]).is_file() else ROOT / word[1:]
        if not path.is_file():
            raise UserError(f"{word}: this recipe does not exist; `bash launch.sh recipes` lists them")
        try:
            inner = shlex.split(path.read_text("utf-8"), comments=True)
        except ValueError as e:  # no UTF-8, or an open quote
            raise UserError(f"{path}: {e}") from None
        if inner and inner[0][:1] not in "-@":
            raise UserError(f"{path} is not a recipe: it must begin with a flag")
        yield from _expand(inner, str(path))


def on_or_off(word: str) -> bool:
    return ("off", "false", "on", "true").index(word.lower()) > 1


on_or_off.__name__ = KINDS[bool]  # for argparse's message about other words


def make_parser() -> Parser:
    """Everything in it is from Config's fields."""
    parser = Parser(
        prog="train.py",
        description="Trains a Llama or GPT model. @FILE reads flags from a recipe: `bash launch.sh recipes` lists them."
        " Commas separate the names in a list, spaces --data's.",
        usage="python train.py [@recipes/NAME.args ...] [--flag value ...]",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flatland {VERSION}")
    for f in FIELDS:
        kind, rules = type(f.default), f.metadata
        how = {"help": rules["help"], "default": f.default, "metavar": "|".join(rules["choices"]) or KINDS[kind]}
        if rules["group"]:
            group = parser.add_argument_group(rules["group"])
        if rules["choices"]:
            how["choices"] = rules["choices"]
            if f.name == "fp8":
                how["type"] = lambda word: ALIASES.get(word, word)
        elif kind is bool:
            how |= {"nargs": "?", "const": True, "type": on_or_off}
        elif kind is tuple:
            how |= {"nargs": "+", "default": ""}
        elif kind is not str:
            how["type"] = within(kind, rules["least"], rules["most"])
        group.add_argument(f"--{f.name}", **how)
    return parser


def from_json(values: dict) -> Config:
    """The settings that flags.json or a manifest has stored. Those that this version does not know are left out."""
    values = {f.name: values[f.name] for f in FIELDS if f.name in values}
    if isinstance(field := values.get("text_field"), str):  # version 0.3 had one at most
        values["text_field"] = field.split()
    return Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def parse_args(argv: list[str], trains: bool = False) -> Config:
    """Command-line words -> Config. Raises UserError for mistakes that can be found without files or devices.
    trains: an empty command line means the default recipe, and adapters need weights."""
    argv = argv or DEFAULT * trains
    settings = with_recipes(argv)
    try:
        return _make_config(settings, [Path(word[1:]).stem for word in argv if word.startswith("@")], trains)
    except UserError as e:
        _, recipe = settings.get(re.search(r"--(\w+)|$", str(e))[1], ([], ""))
        raise UserError(f"{recipe}: {e}" if recipe else str(e)) from None


def _make_config(settings: dict[str, tuple[list[str], str]], recipes: list[str], trains: bool) -> Config:
    values = vars(make_parser().parse_args([word for words, _ in settings.values() for word in words]))
    for f in FIELDS:
        if isinstance(f.default, tuple):
            words = values[f.name]
            is_spaced = f.name in ("data", "val_data", "text_field")
            values[f.name] = tuple(words if is_spaced else filter(None, ",".join(words).split(",")))
    _refuse_first(
        ({"steps", "epochs"} <= settings.keys(), "--steps and --epochs exclude each other"),
        (
            trains and values["lora"] and not values["weights"],
            f"--lora {values['lora']} without --weights would freeze random weights: name --weights",
        ),
    )
    if values["dpo"] in ("sigmoid", "ipo"):
        values["dpo_beta"] = values["dpo_beta"] or 0.1
    model = values["model"] = values["model"] or values["weights"] or "tiny-llama"
    path = Path(os.path.abspath(model))  # the name of "." is its folder's
    name = f"{path.parent.name}-hf" if path.name == "hf" else path.name  # the export of a run, runs/NAME/hf
    names = "-".join([*(recipes or [name]), *map(name_of, values["data"])])
    values["out"] = values["out"] or "runs/" + re.sub(r"[^\w.-]+", "-", names).strip("-.")
    config = Config(**values)
    if model in MODELS:
        config = replace(config, model_config=config.with_sizes(MODELS[model]))
    refuse_conflicts(config)
    check_values(config)
    if config.model_config:
        check_model(config)
    return config


def check_values(c: Config) -> None:
    """Refuses values that do not fit each other."""
    text_fields(c)  # refuses names of no entry
    tunable = fields_that_resume("override")
    fixed = {*c.resume_override} - {*tunable}
    warm, pairs = PROFILE_AFTER + c.profile, c.dpo != "none"
    _refuse_first(
        (fixed, f"--resume_override {', '.join(fixed)}: expected {', '.join(tunable)}"),
        (not c.out.isprintable(), f"--out {c.out!r} must be printable"),  # launchers read it
        (len(c.chat_fields) not in (0, 2, 3), f"--chat_fields {','.join(c.chat_fields)}: expected two or three names"),
        (c.profile and c.steps < warm, f"--profile {c.profile} needs --steps {warm}, not {c.steps}"),
        (c.keep_best == "score_acc" and not c.eval_score, "--keep_best score_acc needs an --eval_score"),
        (c.min_lr > c.lr, f"--min_lr {c.min_lr} is above --lr {c.lr}"),
        (
            not c.micro_batch and (not c.batch_tokens or c.batch_tokens % c.seq_len),
            f"--micro_batch 0 needs --batch_tokens in a multiple of --seq_len {c.seq_len}",
        ),
        (pairs and not c.dpo_beta, f"--dpo {c.dpo} needs a --dpo_beta: 2 for simpo, 5 for sigmoid_norm are usual"),
        (
            pairs and (c.stream or c.context_parallel > 1),
            "--dpo works neither with --stream nor with --context_parallel",
        ),
    )


def check_model(c: Config) -> None:
    """Refuses values that do not fit the model."""
    model, parts = c.model_config, c.context_parallel
    positions = "dynamic" if "dynamic" in str(model.rope_scaling) else model.positions
    is_short = positions in ("dynamic", "learned") and c.seq_len > model.max_seq_len
    splits_rows = model.n_heads % parts == 0 and c.seq_len % parts == 0 and c.seq_len > parts
    _refuse_first(
        (
            c.delimiter >= model.vocab_size,
            f"--delimiter {c.delimiter}: the ids of {c.model} are below {model.vocab_size}",
        ),
        (
            not splits_rows,
            f"--context_parallel {parts} must divide the {model.n_heads} heads of {c.model} and --seq_len {c.seq_len}",
        ),
        (is_short, f"--seq_len {c.seq_len}: {c.model} has {model.max_seq_len} {positions} positions"),
    )


def _refuse_first(*rules: tuple[object, str]) -> None:
    """UserError with the message of the first rule whose condition holds."""
    for holds, message in rules:
        if holds:
            raise UserError(message)


# ---- entries of --data


def split_weight(spec: str) -> tuple[str, Fraction | None]:
    """An entry of --data, which may end in :NUMBER -> (path or pattern, weight in a mixture or None)."""
    path, _, weight = spec.rpartition(":")
    with contextlib.suppress(ValueError, ZeroDivisionError):  # the name of a file may end like that
        if path and not Path(spec).exists():
            return path, Fraction(weight)
    return spec, None


def is_shards(spec: str) -> bool:
    """Whether an entry of --data names token shards, and not text."""
    path, _ = split_weight(spec)
    return (
        path.removesuffix(".gz").endswith(SHARD) or "://" not in path and any(Path(path).expanduser().glob(f"*{SHARD}"))
    )


def name_of(spec: str) -> str:
    """The part of the run folder's name for an entry of --data; for a pattern it includes the folder."""
    path = Path(split_weight(spec)[0].removesuffix(".gz"))
    name = path.stem if path.suffix in SHORTENED else path.name
    return f"{path.parent.name}-{name}" if glob.has_magic(path.name) and not path.exists() else name


def text_fields(config) -> dict[str, str]:
    """--text_field: FIELD, and NAME=FIELD for an entry of --data, by its path or its last part -> {path of an entry, or
    empty for the others: field}"""
    fields, paths = {}, [split_weight(entry)[0] for entry in config.data + config.val_data]
    for word in config.text_field:
        name, _, field = word.rpartition("=")
        named = [path for path in paths if name in (path, os.path.basename(path.rstrip("/")))] if name else [""]
        if not named or not field or fields.keys() & {*named}:
            raise UserError(f"--text_field {word}: expected FIELD, or NAME=FIELD for one of {', '.join(paths)}, once")
        fields |= dict.fromkeys(named, field)
    return fields


# ---- batches


def row_groups(c: Config, world_size: int) -> int:
    """Groups of ranks that share rows (--context_parallel)."""
    return max(1, world_size // c.context_parallel)


def split_batch(c: Config, world_size: int) -> tuple[int, int]:
    """-> (micro_batch, batch_tokens), each chosen for the number of ranks if it is 0."""
    groups = row_groups(c, world_size)
    micro_batch = c.micro_batch or -(-c.batch_tokens // (c.seq_len * groups))
    return micro_batch, c.batch_tokens or micro_batch * c.seq_len * groups


def choose_lanes(c: Config, world_size: int) -> int:
    """--lanes. If it is 0: a number of lanes that lets one rank read each lane."""
    rows = split_batch(c, world_size)[0] * row_groups(c, world_size)
    return c.lanes or rows * -(-LANES // rows)


def check_batch(c: Config, world_size: int) -> None:
    """If both are given, --batch_tokens must be a multiple of --micro_batch x --seq_len x ranks."""
    groups = row_groups(c, world_size)
    unit = c.micro_batch * c.seq_len * groups
    if unit and c.batch_tokens % unit:
        near = max(unit, round(c.batch_tokens / unit) * unit)
        raise UserError(
            f"--batch_tokens {c.batch_tokens} does not divide by micro_batch x seq_len x ranks / context_parallel ="
            f" {c.micro_batch} x {c.seq_len} x {groups} = {unit}; the nearest multiple is {near}"
        )


def refuse_conflicts(c: Config, world_size: int = 0) -> None:
    """Refuses flags that exclude each other. world_size: 0 for the flags that a user gives, of which it also refuses
    those that have no effect without another one."""
    on = [name for name, value in c.flags().items() if value not in (0, "", "off", "none")]
    on += ["stream"] * any("://" in entry for entry in c.data + c.val_data) + ["lora"] * bool(c.lora_weights)
    flags = {f"--{name} {value}" for name, value in c.flags().items()} | {f"--{name}" for name in on}
    flags |= {"several processes"} if world_size > 1 else set()
    parts = c.context_parallel
    rules = [(world_size % parts, f"--context_parallel {parts} does not divide the {world_size} ranks")]
    for f in FIELDS:
        is_given = world_size == 0 and getattr(c, f.name) not in (f.default, 0)
        for needed in f.metadata["needs"]:
            rules.append((is_given and f"--{needed}" not in flags, f"--{f.name} has no effect without --{needed}"))
        for value, other, reason in f.metadata["excludes"]:
            mine = f"--{f.name} {value}".strip()
            rules.append((flags.issuperset((mine, other)), f"{mine} with {other}: {reason}"))
    _refuse_first(*rules)
