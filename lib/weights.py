"""Models from and to Hugging Face folders; the exports of a run, with the files of its tokenizer; adapters for PEFT.
lib/folders.py names and reads the tensors.

An export rounds values to its dtype only: in the dtype of an imported folder it has the same bits. The ranks share the
files; an export needs the memory of one file. Sources: as in lib/folders.py."""

import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from lib import progress
from lib.chat import chat_template, render_chat
from lib.errors import UserError
from lib.families import config_json, family, read_config
from lib.files import read_json, write_json
from lib.folders import Trained, adapter_pieces, open_trained, open_weights, pieces, write_file
from lib.hub import local_path
from lib.lora import Read, Settings
from lib.machine import allocate
from lib.ranks import ALONE, Ranks, on_every_rank, on_first_rank
from lib.text import knows_text
from lib.tokenizer import Tokenizer, load_tokenizer
from model import Transformer
from shapes import ModelConfig
from shard import fill_parameters

logger = logging.getLogger("flatland")


def load_model(
    folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """The model of a folder or of a downloaded hub id, with parameters and computation in `dtype`."""
    folder = local_path(str(folder), "folder")
    config = read_config(folder)
    read = open_weights(folder, config)  # first: a wrong size in config.json is no reason to allocate
    model = empty_model(config, dtype, device)
    fill_parameters(model, read)
    return model


def empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """A model for evaluation with uninitialised parameters in `dtype`."""
    with torch.device("meta"):
        model = Transformer(config, dtype).to(dtype)
    allocate(model, device)
    model.tie_weights()
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
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)

    on_first_rank(begin, ranks)
    try:
        on_every_rank(write_shards, ranks)
        on_first_rank(finish, ranks)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _shard(rows, dtype, read):
    """The tensors of a file. rows: each piece, and our parameter that holds its values."""
    tensors = {}
    for piece, name in rows:
        values = read(name, piece.place).to(dtype)
        if dtype == torch.float16 and values.isinf().any():
            raise UserError(f"{piece.name} holds values beyond float16's range: export bf16 or fp32")
        progress.advance()
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


# ---- the model of a checkpoint


def export_trained(
    saved: Trained, folder: Path, dtype: torch.dtype, ranks: Ranks = ALONE, spec: str = "", **how
) -> None:
    """Writes a Hugging Face folder with the run's tokenizer, and the chat template if the run trained on conversations.
    It names the longest text that was trained on. spec: another tokenizer. how: arguments of export. All ranks must
    call."""
    config, shape = saved.config, saved.model_config
    chat_format = shape.chat_format if saved.manifest["position"].get("chat") else ""
    tokenizer = load_tokenizer(spec or config.tokenizer) if spec or knows_text(config) else None
    if shape.positions == "rope":  # GPT-2's table of learned positions keeps its size
        shape = replace(shape, max_seq_len=config.trained_length(shape))
    read = open_trained(saved, ranks)
    export(shape, read, folder, dtype, tokenizer=tokenizer, chat_format=chat_format, ranks=ranks, **how)


def export_run(saved: Trained, run: Path, ranks: Ranks) -> None:
    """Writes the folders hf/ and, with adapters, adapter/ of a run that ends. All ranks must call."""
    try:
        family(saved.model_config)
    except UserError as e:
        return logger.warning(f"No export to hf/: {e}")
    export_trained(saved, run / "hf", torch.float32, ranks, replaces=True)
    if saved.config.lora:
        on_first_rank(lambda: export_adapter(saved.config, saved.read_weights, run / "adapter"), ranks)


# ---- PEFT adapters

# The same in every adapter that we write.
ADAPTER_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
}


def export_adapter(config: Settings, read: Read, folder: Path) -> None:
    """Writes the folder that PEFT loads: adapter_config.json and adapter_model.safetensors, in fp32. read: of
    lib/lora.py's parameters."""
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
    if (folder / "tokenizer.json").exists():
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the class for Llama reads only the vocabulary
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
