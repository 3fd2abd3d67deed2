"""Models from and to Hugging Face folders: reading and writing their tensors, the exports of a run with the files of
its tokenizer, and PEFT's adapters.

FAMILIES (hf/families.py) names the tensors that a file stores for each of our parameters. Reading is strict: every
tensor must be present with its shape, and no other tensor may be. RoPE keeps Hugging Face's half-split layout, so
nothing is permuted. Reading needs the memory of the model and one tensor.

An export rounds values to its dtype only: in the dtype of an imported folder it has the same bits. The ranks share the
files; an export needs the memory of one file.

Sources: configuration and modelling files of transformers 4 and 5."""

import logging
import math
import re
import shlex
import shutil
from dataclasses import asdict, replace
from functools import cache, partial, reduce
from pathlib import Path

import torch

from base import disk
from base.disk import read_json, read_object, sample_digest, write_json
from base.errors import UserError
from base.hub import local_path
from base.ranks import ALONE, Ranks, on_every_rank, on_first_rank
from base.tensors import TensorFile, assemble, write_file
from config import Config
from hf import lora
from hf.chat import chat_template, render_chat
from hf.families import Piece, config_json, family, pieces_of, read_config
from hf.lora import Read
from hf.tokenizer import Tokenizer, begins_with_bos, load_tokenizer
from model import Transformer
from shapes import ModelConfig
from shard import fill_parameters

logger = logging.getLogger("flatland")
tell_once = cache(logger.info)
# Masks and frequencies that older versions of transformers stored.
IGNORED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
PICTURES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")  # tensors that a text part does not have
HEAD = "lm_head.weight"
FLOATS = torch.float32, torch.float16, torch.bfloat16  # the dtypes that weights may have


def pieces(config: ModelConfig) -> dict[str, list[Piece]]:
    """The tensors in the file for each of our parameters, without a tied lm_head."""
    with torch.device("meta"):
        parameters = Transformer(config).named_parameters()
    return {name: pieces_of(name, tuple(p.shape), config) for name, p in parameters}


# ---- reading


def find_files(folder: Path) -> list[Path]:
    """The safetensors files with a folder's weights: model.safetensors, or exactly the files that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise UserError(
            f"{folder} holds neither model.safetensors nor its index. Pickles are not loaded, because they can run"
            " code: convert them with save_pretrained of transformers"
        )
    # A name with folders in it could be of any file.
    return sorted({folder / Path(str(name)).name for name in read_object(index).get("weight_map", {}).values()})


def open_weights(folder: Path, config: ModelConfig) -> Read:
    """Checks names, shapes and dtypes of a folder's weights against the model -> read(name, slices) of our parameters,
    in the files' dtype (the widest dtype of a fused parameter's tensors). The head that a tied model's files may hold
    is compared with the embedding."""
    # Other weights may have the same shapes: a wrong rope_theta would show only in the results.
    stored = asdict(read_config(folder))
    ignored = "init_std", "router_aux_loss_coef", "max_seq_len"  # they change no output, or a shape shows them
    differ = {k: v for k, v in asdict(config).items() if k not in ignored and stored[k] != v}
    if differ:
        raise UserError(f"{folder / 'config.json'} differs from the model, which has {differ}; use --model {folder}")
    files = [TensorFile(path) for path in find_files(folder)]
    if config.n_layers > sum(len(file.entries) for file in files):  # a list of their tensors could take very long
        raise UserError(f"{folder} has fewer tensors than its config.json has layers, {config.n_layers}")
    return _reader(folder, pieces(config), files)


def _reader(folder, plan, files, remedy=""):
    """Checks the tensors of a folder's files against the plan -> read(name, slices) of the plan's parameters."""
    expected = {piece.name: piece.stored for row in plan.values() for piece in row}
    stored, wrong = {}, []  # stored: the file of each tensor, its name there, and its dtype
    for file in files:
        for name, (dtype, shape) in file.entries.items():
            if picture := PICTURES.match(name):
                tell_once(f"{folder}: only the text part is read, without {picture[0]}*")
                continue
            # Files that were saved without the head lack the names' first part; a text part has one more.
            bare = name.replace("language_model.", "")
            full = next((n for n in (f"model.{bare}", f"transformer.{bare}") if n in expected), bare)
            if full in expected and (dtype not in FLOATS or shape != expected[full]):
                wrong.append(f"{name} is {list(shape)} {dtype}, expected {list(expected[full])}")
            if full in expected or not IGNORED.search(bare):
                stored[full] = file, name, dtype
    head = HEAD not in expected and stored.pop(HEAD, None)  # a tied model's
    missing, extra = sorted(expected.keys() - stored), sorted(stored.keys() - expected)
    if wrong or missing or extra:
        problems = {"missing": missing, "unexpected": extra, "of another shape or dtype": wrong}
        listed = "; ".join(f"{what}: {names[:4]}" for what, names in problems.items() if names)
        raise UserError(f"{folder} does not fit the model; {listed}{remedy}")

    def read_piece(piece, slices):
        file, name, _ = stored[piece.name]
        values = file.read(name, slices[::-1] if piece.transposed else slices[-2:])
        return values.T if piece.transposed else values

    def read(name, slices):
        row = plan[name]
        dtype = reduce(torch.promote_types, (stored[piece.name][2] for piece in row))
        sources = ((piece.place, partial(read_piece, piece)) for piece in row)
        return assemble(slices, [s.stop for s in row[-1].place], dtype, sources)

    if head:
        (file, name, _), whole = head, (slice(None), slice(None))
        values = read("embed_tokens.weight", whole)
        if not torch.equal(file.read(name, whole).to(values.dtype), values):
            raise UserError(f"{folder}: {HEAD} is not the embedding: set its tie_word_embeddings to false to use it")
    return read


# ---- reading PEFT adapters

MERGE = ": merge the adapter with PEFT's merge_and_unload(), and give the merged folder as --weights"
# Fields of adapter_config.json, and the values that hf/lora.py supports; others may be null, false, 0 or empty.
ADAPTER_MEANS_OURS = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva"),
}
# Keys that may have any value. All others must be null, false, 0 or empty.
ADAPTER_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode", "r",
    "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "megatron_core",
    "qalora_group_size",
}  # fmt: skip


def adapter_pieces(config: Config) -> dict[str, list[Piece]]:
    """The tensors in PEFT's file for each parameter of the adapters."""
    out, rank = {}, config.lora
    for name, row in pieces(config.model_config).items():
        a, b, start = [], [], 0
        for piece in row:
            if piece.part in config.lora_targets:
                rows, width = piece.stored
                stem = f"base_model.model.{piece.name.removesuffix('weight')}lora"
                a.append(Piece(f"{stem}_A.weight", (slice(len(a) * rank, (len(a) + 1) * rank), slice(0, width))))
                b.append(Piece(f"{stem}_B.weight", (slice(start, start + rows), slice(0, rank))))
                start += rows
        if a:
            layer = name.removesuffix(".weight")
            out |= {f"{layer}.lora_A": a, f"{layer}.lora_B": b}
    return out


def adapter_flags(folder: Path) -> dict:
    """The values of --lora, --lora_alpha and --lora_targets for a PEFT adapter. The scale of rsLoRA (arXiv 2312.03732),
    alpha / sqrt(rank), becomes a larger alpha. Refuses adapters of other kinds."""
    path = folder / "adapter_config.json"
    values = read_object(path)
    for key in {key for key, value in values.items() if value} - ADAPTER_HARMLESS:
        if values[key] not in ADAPTER_MEANS_OURS.get(key, ()):
            raise UserError(f"{path}: {key} is {values[key]!r}"[:500] + f", which is not implemented{MERGE}")
    rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)  # PEFT's defaults
    if values.get("use_rslora"):
        alpha *= math.sqrt(rank)
    names = "\n".join(TensorFile(folder / "adapter_model.safetensors").entries)
    targets = set(re.findall(r"(\w+)_proj\.lora_A\.weight$", names, re.M))
    return {"lora": rank, "lora_alpha": alpha, "lora_targets": tuple(sorted(targets))}


def open_adapter(folder: Path, config: Config) -> Read:
    """Checks the tensors of a PEFT adapter against a run's flags -> read(name, slices) of lora.py's parameters."""
    adapter_flags(folder)  # refuses adapters of other kinds
    return _reader(folder, adapter_pieces(config), [TensorFile(folder / "adapter_model.safetensors")], MERGE)


# ---- the model of a checkpoint


def base_fingerprint(config: Config, ranks: Ranks) -> str:
    """Identifies the frozen weights of a run with adapters; "0" if no weights were read. All ranks must call."""
    if not (config.lora and config.weights):
        return "0"
    return on_first_rank(lambda: sample_digest(find_files(local_path(config.weights, "--weights"))), ranks)


def refuse_other_base(config: Config, fingerprint: str, ranks: Ranks) -> None:
    """Refuses frozen weights that differ from those at the start of the run. All ranks must call."""
    if base_fingerprint(config, ranks) != fingerprint:
        raise UserError(f"--weights {config.weights} has changed since the adapters were trained on it: restore it")


def open_trained(saved, ranks: Ranks = ALONE) -> Read:
    """read(name, slices) of all weights, with adapters merged into the weights of --weights. saved: a
    checkpoint.Checkpoint, also below. All ranks must call."""
    config = saved.config
    refuse_other_base(config, saved.manifest["base"], ranks)
    if not config.lora:
        return saved.read_weights
    base = open_weights(local_path(config.weights, "--weights"), config.model_config)
    return lora.merge(base, saved.read_weights, config)


def load_model(
    folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """The model of a folder or of a downloaded hub id, with parameters and computation in `dtype`."""
    folder = local_path(str(folder), "folder")
    config = read_config(folder)
    read = open_weights(folder, config)  # first: a wrong size in config.json is no reason to allocate
    return make_model(config, read, dtype, device)


def make_model(config: ModelConfig, read: Read, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """A model for evaluation with parameters in `dtype`."""
    with torch.device("meta"):
        model = Transformer(config, dtype).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    fill_parameters(model, read)
    return model.eval()


def export(
    config: ModelConfig, read: Read, folder: Path, dtype: torch.dtype, tokenizer: Tokenizer | None = None,
    chat_format: str = "", replaces: bool = False, ranks: Ranks = ALONE, shard_gb: float = 5,
) -> None:  # fmt: skip
    """Writes a Hugging Face folder with values rounded to `dtype`. Each file is written by one rank. The folder gets
    its name when it is complete. chat_format: see write_tokenizer. replaces: replace an earlier export. shard_gb: size
    of a file (10^9 bytes; a larger tensor has its own). UserError: no family has this shape. All ranks must call; an
    error on one rank is raised on all."""
    from huggingface_hub import split_state_dict_into_shards_factory

    rows = {piece.name: (piece, name) for name, row in pieces(config).items() for piece in row}
    split = split_state_dict_into_shards_factory(
        rows,
        get_storage_size=lambda row: math.prod(row[0].stored) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(shard_gb * 1e9),
    )
    folder = folder.absolute()
    temporary = folder.with_name(f"{folder.name}.tmp")

    def begin():
        refuse_in_the_way(folder, replaces)
        shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
        temporary.mkdir(parents=True)

    def write_shards():
        for file, names in [*split.filename_to_tensors.items()][ranks.rank :: ranks.world_size]:
            write_file(temporary / file, _shard([rows[name] for name in names], dtype, read))

    def finish():
        _write_json_files(temporary, split, config_json(config, str(dtype)[6:]), tokenizer, chat_format)
        open_weights(temporary, config)  # refuses an incomplete folder
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)

    on_first_rank(begin, ranks)
    try:
        on_every_rank(write_shards, ranks)
        on_first_rank(finish, ranks)
    finally:  # a full disk needs the room again
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _shard(rows, dtype, read):
    """The tensors of a file. rows: each piece, and our parameter that holds its values."""
    tensors = {}
    for piece, name in rows:
        values = read(name, piece.place).to(dtype)
        disk.advance()
        tensors[piece.name] = (values.T if piece.transposed else values.reshape(piece.stored)).contiguous()
    return tensors


def _write_json_files(folder, split, config, tokenizer, chat_format):
    """Writes the tokenizer's files, the index, config.json and generation_config.json."""
    ids = write_tokenizer(tokenizer, folder, chat_format) if tokenizer else {"bos_token_id": None, "eos_token_id": None}
    generation, ends = folder / "generation_config.json", {}
    if tokenizer and not chat_format and tokenizer.bos_id not in tokenizer.eos_ids:
        ends = {"eos_token_id": [*tokenizer.eos_ids, tokenizer.bos_id]}  # a document ends where the next one begins
    write_json(generation, read_json(generation) | ids | ends)  # there may be one from the tokenizer's folder
    write_json(folder / "config.json", config | ids | {"pad_token_id": None})  # its default may exceed the vocabulary
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


def refuse_in_the_way(folder: Path, replaces: bool) -> None:
    """Refuses an export to a folder with contents, unless it replaces an earlier export."""
    is_export = replaces and (folder / "generation_config.json").exists()
    if folder.exists() and not is_export and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already: move it away, or give another folder")


def export_model(model: Transformer, folder: Path | str, shard_gb: float = 5, **how) -> None:
    """Writes an unsharded model as a Hugging Face folder, in its parameters' dtype. how: as for export."""
    dtype = next(model.parameters()).dtype

    def read(name, slices):
        return model.get_parameter(name).detach()[slices].cpu()

    export(model.config, read, Path(folder), dtype, shard_gb=shard_gb, **how)


# ---- exports of a run


def export_trained(saved, folder: Path, dtype: torch.dtype, ranks: Ranks = ALONE, spec: str = "", **how) -> None:
    """Writes a Hugging Face folder with the run's tokenizer, and the chat template if the run trained on conversations.
    It names the longest text that was trained on. spec: another tokenizer than the run's. how: arguments of export. All
    ranks must call."""
    config, shape = saved.config, saved.model_config
    chat_format = shape.chat_format if saved.manifest["position"].get("chat") else ""
    spec = spec or saved.tokenizer
    tokenizer = load_tokenizer(spec) if spec else None
    if shape.positions == "rope":  # GPT-2's table of learned positions keeps its size
        shape = replace(shape, max_seq_len=config.trained_length(shape))
    read = open_trained(saved, ranks)
    export(shape, read, folder, dtype, tokenizer=tokenizer, chat_format=chat_format, ranks=ranks, **how)


def export_run(saved, run: Path, ranks: Ranks) -> None:
    """Writes the folders hf/ and, with adapters, adapter/ of a run that ends. All ranks must call."""
    try:
        family(saved.model_config)
    except UserError as e:
        return logger.warning(f"No export to hf/: {e}")
    export_trained(saved, run / "hf", torch.float32, ranks, replaces=True)
    if saved.tokenizer:
        bos = "" if load_tokenizer(saved.tokenizer).adds_bos else ",add_bos_token=True"
        model = shlex.quote(f"pretrained={run}/hf{bos}")
        chat = " --apply_chat_template" * saved.manifest["position"].get("chat", False)
        lm_eval = f"lm_eval --model hf --model_args {model} --tasks hellaswag{chat}"
        logger.info(f"For scores, `pip install 'lm_eval[hf]'` in another environment: {lm_eval}")
    if saved.config.lora:
        on_first_rank(lambda: export_adapter(saved.config, saved.read_weights, run / "adapter"), ranks)


# ---- writing PEFT adapters

# The same in every adapter that we write.
ADAPTER_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
}


def export_adapter(config: Config, read: Read, folder: Path) -> None:
    """Writes the folder that PEFT loads: adapter_config.json and adapter_model.safetensors, in fp32. read: of
    hf/lora.py's parameters."""
    rows = [(piece, name) for name, row in adapter_pieces(config).items() for piece in row]
    temporary = folder / "adapter_model.safetensors.tmp"
    folder.mkdir(exist_ok=True)
    write_file(temporary, _shard(rows, torch.float32, read))
    temporary.rename(folder / "adapter_model.safetensors")
    how = {"base_model_name_or_path": config.weights or None, "r": config.lora, "lora_alpha": config.lora_alpha}
    targets = [f"{target}_proj" for target in config.lora_targets]
    write_json(folder / "adapter_config.json", ADAPTER_CONFIG | how | {"target_modules": targets})


# ---- the files of a tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, chat_format: str = "") -> dict:
    """Writes a tokenizer's files into a model's folder -> the ids of BOS, EOS and padding for its config.json. With
    the files, transformers 4 and 5 give our ids.

    chat_format: of a model that was trained on conversations. Their template is written, and the token that ends an
    answer also ends a text."""
    for file, name in tokenizer.files.items():
        shutil.copyfile(file, folder / name)
    if not tokenizer.files:
        model = BYTES_JSON["model"] | {"vocab": tokenizer.vocab}
        write_json(folder / "tokenizer.json", BYTES_JSON | {"model": model})
    settings_file = folder / "tokenizer_config.json"
    settings = tokenizer.names | (read_json(settings_file) or {"clean_up_tokenization_spaces": False})
    settings.pop("add_eos_token", None)
    if not begins_with_bos(tokenizer, folder / "tokenizer.json") and not chat_format:
        bos = tokenizer.names["bos_token"]
        logger.warning(f"Texts began with {bos} in training, and other programs will not add it: write it")
    if (folder / "tokenizer.json").exists():
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the class for Llama reads only the vocabulary
        settings.pop("add_bos_token", None)  # transformers 5 would obey it, and 4 the tokenizer.json
    else:
        settings |= {"legacy": tokenizer.legacy, "add_bos_token": tokenizer.adds_bos}
        if not tokenizer.is_llama:
            settings.pop("tokenizer_class", None)
    if isinstance(settings.get("extra_special_tokens"), list):  # transformers 4 expects an object
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    write_json(settings_file, settings)
    ends = tokenizer.eos_ids
    if chat_format:
        chat = chat_template(tokenizer, chat_format)
        (folder / "chat_template.jinja").write_text(chat, "utf-8")
        ends = sorted({*ends, *_turn_ends(tokenizer, chat)})
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if len(ends) > 1 else ends[0]}
    pad = tokenizer.pad_id
    return ids if pad is None or pad >= tokenizer.vocab_size else ids | {"pad_token_id": pad}


def _turn_ends(tokenizer: Tokenizer, chat: str) -> list[int]:
    """The control token that ends an answer: the last trained one of a short conversation; all usual ones if the
    template refuses it."""
    try:
        ids, mask = render_chat(tokenizer, [{"role": r, "content": "x"} for r in ("user", "assistant")], chat)
    except UserError:
        return [*tokenizer.stop_ids - {tokenizer.bos_id}]
    return [i for i, trained in zip(ids, mask, strict=True) if trained and i in tokenizer.control.values()][-1:]


# The tokenizer.json of `bytes`, without its vocabulary.
BYTES_JSON = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 256,
            "content": "<s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        },
        {
            "id": 257,
            "content": "</s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        },
    ],
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<s>", "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    },
    "model": {"type": "BPE", "byte_fallback": True, "merges": []},
}  # fmt: skip
