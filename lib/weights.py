"""Hugging Face folders: safetensors and config.json, in and out. GPT-2, Llama, Mistral, Mixtral and Qwen.

FAMILIES holds what tells the families apart, as data; of names it says for each of our parameters which tensors of the
file make it up: one, several that are fused along dim 0 (q, k, v; gate, up), or one or two per expert that are stacked.
Both ways are strict: every tensor of ours must be there with its shape, and nothing else may be. No value changes on
the way, so reading what was written gives the same bits; RoPE keeps Hugging Face's half-split layout and nothing is
permuted.

Only safetensors and JSON are opened, pickles never. The safetensors library checks and reads the files. It maps them
into memory: should a disk fail in the middle of a read, the process dies of SIGBUS. Writing is ours, for it streams: an
export needs the memory of a tensor, and a shard's name is written when the shard is whole.

Sources: the configuration classes and modelling files of transformers 4 and 5; github.com/huggingface/safetensors."""

import ctypes
import errno
import glob
import json
import math
import mmap
import operator
import os
import re
import secrets
import shlex
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, asdict, fields
from functools import partial, reduce
from pathlib import Path
from typing import NamedTuple

from lib.errors import UserError, read_json, write_whole  # first: it finds the Python that has torch

import torch  # isort: skip
from safetensors import SafetensorError, safe_open
from torch import Tensor

from download import find, read_object, what_it_is
from lib import lora
from lib.tokenizer import chat_family, write_files
from model import Transformer
from shapes import ModelConfig, RopeScaling
from shard import ALONE, Ranks, fill, gather, on_all, on_first_rank

# ---- families

# Our parameter, and the tensors that make it up; i: the layer, e: the expert, (q|k|v): one of each, in this order.
_LLAMA = """
embed_tokens.weight                           model.embed_tokens.weight
layers.{i}.input_layernorm.weight             model.layers.{i}.input_layernorm.weight
layers.{i}.self_attn.qkv_proj.weight          model.layers.{i}.self_attn.(q|k|v)_proj.weight
layers.{i}.self_attn.qkv_proj.bias            model.layers.{i}.self_attn.(q|k|v)_proj.bias
layers.{i}.self_attn.q_norm.weight            model.layers.{i}.self_attn.q_norm.weight
layers.{i}.self_attn.k_norm.weight            model.layers.{i}.self_attn.k_norm.weight
layers.{i}.self_attn.o_proj.weight            model.layers.{i}.self_attn.o_proj.weight
layers.{i}.post_attention_layernorm.weight    model.layers.{i}.post_attention_layernorm.weight
layers.{i}.mlp.gate_up_proj.weight            model.layers.{i}.mlp.(gate|up)_proj.weight
layers.{i}.mlp.down_proj.weight               model.layers.{i}.mlp.down_proj.weight
layers.{i}.mlp.gate.weight                    model.layers.{i}.block_sparse_moe.gate.weight
layers.{i}.mlp.gate_up_proj                   model.layers.{i}.block_sparse_moe.experts.{e}.w(1|3).weight
layers.{i}.mlp.down_proj                      model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight
norm.weight                                   model.norm.weight
lm_head.weight                                lm_head.weight
"""
_GPT2 = """
embed_tokens.weight                           transformer.wte.weight
embed_positions.weight                        transformer.wpe.weight
layers.{i}.input_layernorm.KIND               transformer.h.{i}.ln_1.KIND
layers.{i}.self_attn.qkv_proj.KIND            transformer.h.{i}.attn.c_attn.KIND
layers.{i}.self_attn.o_proj.KIND              transformer.h.{i}.attn.c_proj.KIND
layers.{i}.post_attention_layernorm.KIND      transformer.h.{i}.ln_2.KIND
layers.{i}.mlp.up_proj.KIND                   transformer.h.{i}.mlp.c_fc.KIND
layers.{i}.mlp.down_proj.KIND                 transformer.h.{i}.mlp.c_proj.KIND
norm.KIND                                     transformer.ln_f.KIND
lm_head.weight                                lm_head.weight
"""


# Our field of ModelConfig, and its key in config.json.
_LLAMA_KEYS = """
vocab_size              vocab_size
dim                     hidden_size
n_layers                num_hidden_layers
n_heads                 num_attention_heads
n_kv_heads              num_key_value_heads
head_dim                head_dim
ffn_dim                 intermediate_size
max_seq_len             max_position_embeddings
norm_eps                rms_norm_eps
tied                    tie_word_embeddings
init_std                initializer_range
"""
_MIXTRAL_KEYS = """
n_experts               num_local_experts
top_k                   num_experts_per_tok
router_aux_loss_coef    router_aux_loss_coef
"""
_GPT2_KEYS = """
vocab_size              vocab_size
dim                     n_embd
n_layers                n_layer
n_heads                 n_head
ffn_dim                 n_inner
max_seq_len             n_positions
norm_eps                layer_norm_epsilon
tied                    tie_word_embeddings
init_std                initializer_range
"""


def _pairs(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\S+) +(\S+)", text))


def _values(text: str) -> dict[str, list]:
    return {key: json.loads(f"[{values}]") for key, values in re.findall(r"(\S+) +(.+)", text)}


def _table(text: str) -> dict[str, list[str]]:
    rows = {}
    for ours, theirs in _pairs(text).items():
        head, several, tail = re.fullmatch(r"([^(]*)\(?([\w|]*)\)?(.*)", theirs).groups()
        rows[ours] = [head + one + tail for one in several.split("|")]
    return rows


class Family(NamedTuple):
    """shape: the fields of ModelConfig that tell this family from the others, but for those that are PLAIN. names: of
    the tensors, also of those that another family alone has. keys: of config.json. defaults: what transformers takes
    for keys that are absent, where ModelConfig takes something else."""

    architecture: str
    shape: dict[str, str | bool]
    names: dict[str, list[str]] = _table(_LLAMA)
    keys: dict[str, str] = _pairs(_LLAMA_KEYS)
    defaults: dict[str, object] = {}


# The fields of ModelConfig that tell families apart, as Llama has them.
PLAIN = {
    "norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": False, "qkv_bias": False, "qk_norm": False,
    "family": "",
}  # fmt: skip
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "use_sliding_window": False,
}  # fmt: skip
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        {},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"family": "mistral"},
        defaults=_MISTRAL | {"rms_norm_eps": 1e-6, "sliding_window": 4096},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"qkv_bias": True},
        defaults=_QWEN,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True},
        defaults=_QWEN | {"head_dim": 128},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"mlp": "moe"},
        keys=_pairs(_LLAMA_KEYS + _MIXTRAL_KEYS),
        defaults=_MISTRAL
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "rope_theta": 1e6},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": True},
        _table(_GPT2.replace("KIND", "weight") + _GPT2.replace("KIND", "bias")),
        _pairs(_GPT2_KEYS),
        {"n_inner": 0, "n_positions": 1024, "tie_word_embeddings": True},  # 0: 4 dim
    ),
}
# Not parameters: masks and frequencies that older versions of transformers have stored.
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


def family(config: ModelConfig) -> str:
    """The model_type of a shape. ValueError: none has it."""
    shape = {field: getattr(config, field) for field in PLAIN}
    name = next((name for name, family in FAMILIES.items() if PLAIN | family.shape == shape), "")
    if not name:
        raise ValueError(f"no Hugging Face model that we know has {shape}")
    if name == "gpt2" and (config.n_kv_heads * config.head_dim != config.dim or config.n_heads != config.n_kv_heads):
        raise ValueError("GPT-2 has as many key/value heads as heads, and heads of dim / n_heads")
    return name


class Piece(NamedTuple):
    """A tensor of the file, and where it lies in our parameter. transposed: GPT-2's linears are kept as [in, out]."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape in the file; of an expert, which is stacked here, without the first dimension."""
        return self.shape[::-1] if self.transposed else self.shape[-2:]


def pieces(config: ModelConfig) -> dict[str, list[Piece]]:
    """For each of our parameters the tensors of the file that make it up; a tied lm_head is none of them."""
    kind = family(config)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
    return {name: _pieces_of(name, shape, kind, config) for name, shape in shapes.items()}


def _pieces_of(name: str, shape: tuple[int, ...], kind: str, config: ModelConfig) -> list[Piece]:
    _, layer, rest = re.fullmatch(r"(layers\.(\d+)\.)?(.*)", name).groups()
    parts = FAMILIES[kind].names["layers.{i}." * (layer is not None) + rest]
    rows = [shape[-2:][0] // len(parts)] * len(parts)
    if len(parts) == 3:
        rows = [config.head_dim * n for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
    transposed = kind == "gpt2" and name.endswith("_proj.weight")
    out, offset = [], 0
    for part, n in zip(parts, rows, strict=True):
        if len(shape) < 3:
            out.append(Piece(part.format(i=layer), (offset, 0)[: len(shape)], (n, *shape[1:]), transposed))
        else:
            stacked = (1, n, shape[2])
            out += [Piece(part.format(i=layer, e=e), (e, offset, 0), stacked) for e in range(shape[0])]
        offset += n
    return out


# ---- safetensors

Slices = tuple[slice, ...]
Read = Callable[[str, Slices], Tensor]  # read(name, slices) -> those values of a tensor

# What the format calls the dtypes of torch.
_DTYPES = """
F64   float64
F32   float32
F16   float16
BF16  bfloat16
I64   int64
I32   int32
I16   int16
I8    int8
U8    uint8
BOOL  bool
"""
DTYPES = {name: getattr(torch, ours) for name, ours in _pairs(_DTYPES).items()}
PORTION, SYNC = 2**24, 2**26  # bytes that are written at a time, and after which they are sent to the disk
LIBC, WILLNEED = ctypes.CDLL(None), 3  # MADV_WILLNEED of Linux and macOS


class Entry(NamedTuple):
    """A tensor of a file. dtype: what the file calls it, if it is none of DTYPES."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]


class TensorFile:
    """A safetensors file, checked by the library; UserError says what is wrong with it. Pages of the file that were
    read count as this process's memory while they are mapped: so it is mapped anew every `room` bytes, which are more
    where the header has many tensors and takes longer to read."""

    def __init__(self, path: Path):
        self.path, head = path, b""
        try:
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is no file")
            with open(path, "rb") as file:
                head = file.read(512)
            self.size, self.since = path.stat().st_size, 0
            self.file = safe_open(path, "pt")
        except OSError as e:
            raise UserError(f"{path} cannot be read: {e.strerror}") from None
        except SafetensorError as e:
            raise UserError(f"{path} is {_name_fault(path, head, self.size, str(e))}") from None
        self.entries = {}
        for name in self.file.offset_keys():
            tensor = self.file.get_slice(name)
            self.entries[name] = Entry(DTYPES.get(dtype := tensor.get_dtype(), dtype), tuple(tensor.get_shape()))
        self.room = max(PORTION, 2**14 * len(self.entries))

    def read(self, name: str, slices: Slices) -> Tensor:
        """Those values of a tensor, in the file's dtype; to be copied soon, for they are the file's pages."""
        if self.path.stat().st_size < self.size:
            raise UserError(f"{self.path} became shorter while it was read")
        if self.since > self.room:
            self.file, self.since = safe_open(self.path, "pt"), 0
        values = self.file.get_slice(name)[slices]
        self.since += values.nbytes
        if values.is_contiguous():  # the disk begins now, while the values before these are copied
            begin = values.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(values.data_ptr() + values.nbytes - begin), WILLNEED)
        return values


def _name_fault(path: Path, head: bytes, size: int, reason: str) -> str:
    """A guess at what a file is that the library refuses."""
    kind = what_it_is(head)
    if kind.startswith("a pickle"):
        return f"{kind}: only safetensors are loaded. {conversion(path)}"
    if "not fully covered" in reason or ("header length" in reason and head[8:9] == b"{"):
        return f"cut short, or longer than its header says: {size} bytes ({reason[:500]})"
    return kind or f"damaged, or no safetensors file: its header is not what the format says ({reason[:500]!r})"


def conversion(path: Path) -> str:
    """How to make safetensors of a pickle and, where its name is a pickle's, of those that belong to it."""
    pattern = glob.escape(str(path))
    if path.suffix != ".safetensors":
        pattern = str(Path(glob.escape(str(path.parent))) / f"{re.split('[-.]', path.name)[0]}*{path.suffix}")
    code = (
        "import glob, torch; from safetensors.torch import save_file; [save_file({k: v.clone().contiguous() for k, v in"
        " torch.load(open(f, 'rb'), map_location='cpu', weights_only=True).items()}, f.removesuffix('.safetensors') +"
        f" '.safetensors') for f in glob.glob({pattern!r})]"
    )
    return f"If you trust its source, convert it: python -c {shlex.quote(code)}"


def assemble(
    slices: Slices, whole: tuple[int, ...], dtype: torch.dtype, parts: Iterable[tuple[tuple, tuple, Callable]]
) -> Tensor:
    """Those values of a tensor of shape `whole` that is kept in parts (start, shape, read): read(slices of the part) is
    called for the parts that are needed."""

    def slices_from(ranges: list[range], origin: Iterable[int]) -> Slices:
        return tuple(slice(r.start - at, r.stop - at) for r, at in zip(ranges, origin, strict=True))

    wanted = [range(n)[s] for s, n in zip(slices, whole, strict=True)]
    out, filled = torch.empty([len(r) for r in wanted], dtype=dtype), 0
    for start, shape, read in parts:
        places = zip(wanted, start, shape, strict=True)
        overlap = [range(max(r.start, at), min(r.stop, at + n)) for r, at, n in places]
        if all(overlap):
            values = read(slices_from(overlap, start))
            out[slices_from(overlap, [r.start for r in wanted])] = values
            filled += values.numel()
    if filled != out.numel():
        raise UserError(f"a tensor of shape {list(whole)} is kept in parts, and they do not make it up")
    return out


def write_file(path: Path, rows: list[tuple[str, torch.dtype, tuple[int, ...], Callable]]) -> tuple[int, int]:
    """Writes a safetensors file of tensors (name, dtype, shape, function that gives their portions in order), and syncs
    -> (its bytes, their crc32). OSError: what the disk says."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, _ in rows:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f, ThreadPoolExecutor(2) as pool:
        crc, begun, sync = 0, 0, pool.submit(os.fdatasync, f.fileno())
        for data in _contents(len(text).to_bytes(8, "little") + text, rows):
            summed = pool.submit(zlib.crc32, data, crc)  # while it is written
            f.write(data)
            crc = summed.result()
            if f.tell() - begun >= SYNC and sync.done():  # to the disk, while more is written
                sync.result()
                begun, sync = f.tell(), pool.submit(os.fdatasync, f.fileno())
        sync.result()
        f.flush()
        os.fsync(f.fileno())
        return f.tell(), crc


def _contents(header: bytes, rows: list) -> Iterator:
    yield header
    for *_, portions in rows:
        for values in portions():
            for block in values.contiguous().view(-1).view(torch.uint8).split(PORTION):
                yield memoryview(block.numpy())


# ---- reading


def find_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights, all of them there; an index is checked and obeyed."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        return _files_of_index(index)
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if files:
        return files
    for kind in ("pytorch_model*.bin", "*.bin", "*.pth", "*.pt", "*.ckpt"):
        for path in sorted(folder.glob(kind)):
            raise UserError(f"{path}: only safetensors are loaded; a pickle can run code. {conversion(path)}")
    raise UserError(
        f"{folder} holds no weights: no model.safetensors, no index of several, no *.safetensors. Was it fetched with"
        " --skip-model? python download.py ORG/NAME takes them, too"
    )


def _files_of_index(index: Path) -> list[Path]:
    """Names with a path in them are not in the listing of the folder either."""
    table, folder = read_object(index).get("weight_map"), index.parent
    names = set(map(str, table.values())) if isinstance(table, dict) else set()
    if not names:
        raise UserError(f"{index}: it has no weight_map")
    if missing := sorted(names.difference(os.listdir(folder))):
        raise UserError(f"{folder} lacks {len(missing)} of {len(names)} files that its index names: {_some(missing)}")
    return [folder / name for name in sorted(names)]


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


Place = tuple[TensorFile, str]  # a tensor: its file, and its name in there


def open_weights(folder: Path, config: ModelConfig) -> Read:
    """Checks names, shapes and dtypes of a folder's weights against the model -> read(name, slices), which takes those
    values of one of our parameters from the files, in their dtype (the widest of a fused parameter's)."""
    _check_config(folder, config)
    plan = pieces(config)
    expected = {piece.name: piece for row in plan.values() for piece in row}
    places = _find_tensors(folder, expected)
    head = places.pop("lm_head.weight", None) if config.tied else None
    read = _reader(folder, plan, places)
    if head:
        _check_tied(head, places[plan["embed_tokens.weight"][0].name])
    return read


def _reader(folder: Path, plan: dict[str, list[Piece]], places: dict[str, Place]) -> Read:
    """read(name, slices) of parameters that tensors of the files make up, all of which must be there as planned."""
    expected = {piece.name: piece for row in plan.values() for piece in row}
    missing, extra = [n for n in expected if n not in places], [n for n in places if n not in expected]
    if missing or extra:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"holds {_some(extra)} besides"] * bool(extra)
        raise UserError(f"{folder} {' and '.join(parts)}: it is another model than the one that was asked for")
    for full, (file, name) in places.items():
        dtype, shape = file.entries[name]
        if shape != expected[full].stored:
            raise UserError(f"{file.path}: {name!r} has shape {list(shape)}, expected {list(expected[full].stored)}")
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            kind = str(dtype).removeprefix("torch.")
            raise UserError(f"{file.path}: {name!r} has dtype {kind}; float32, float16 and bfloat16 are read")

    def read(name: str, slices: Slices) -> Tensor:
        row = [(piece, *places[piece.name]) for piece in plan[name]]
        last = row[-1][0]
        whole = tuple(map(operator.add, last.start, last.shape))
        dtype = reduce(torch.promote_types, (file.entries[stored].dtype for _, file, stored in row))
        return assemble(slices, whole, dtype, [(r[0].start, r[0].shape, partial(_read_piece, *r)) for r in row])

    return read


def _find_tensors(folder: Path, expected: dict[str, Piece]) -> dict[str, Place]:
    """Every tensor of a folder by the name that it has in the file of a model with a head, which begins with a
    prefix."""
    places: dict[str, Place] = {}
    prefix = next(iter(expected)).partition(".")[0] + "."
    for file in map(TensorFile, find_files(folder)):
        for name in file.entries:
            full = prefix + name if prefix + name in expected else name
            if full in places:
                both = f"in {places[full][0].path.name!r} and in {file.path.name!r}"
                raise UserError(f"{full!r} is twice in {folder}: {both}")
            if not BUFFERS.search(name):
                places[full] = file, name
    return places


def _check_config(folder: Path, config: ModelConfig) -> None:
    """Weights of the same shapes may belong to another model: another rope_theta shows nowhere but in the results."""
    if not (folder / "config.json").exists():
        return
    wanted, stored = asdict(config), asdict(read_config(folder))
    free = {"init_std", "router_aux_loss_coef"}  # they change no output
    free |= {"max_seq_len"} if config.positions == "rope" else set()
    differ = [k for k in wanted if k not in free and stored[k] != wanted[k]]
    if differ:
        words = "; ".join(f"{k} is {stored[k]!r}, the model has {wanted[k]!r}" for k in differ)
        raise UserError(f"{folder / 'config.json'}: {words}. --model {folder} takes the folder's own")


def _read_piece(piece: Piece, file: TensorFile, name: str, slices: Slices) -> Tensor:
    values = file.read(name, slices[::-1] if piece.transposed else slices[-2:])
    return values.T if piece.transposed else values


def _check_tied(head: Place, embedding: Place) -> None:
    """A tied model's file may hold lm_head too, if it is the embedding."""
    (file, _), (other_file, _) = head, embedding
    same = file.entries[head[1]] == other_file.entries[embedding[1]]
    if not same or not torch.equal(*(file.read(name, (slice(None),) * 2) for file, name in (head, embedding))):
        raise UserError(
            f"{file.path}: lm_head.weight is not the embedding, though config.json ties them (tie_word_embeddings);"
            " if the head is its own, say false there"
        )


def load_model(
    folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """The model of a folder (or of a hub id that has been downloaded), parameters and computation in `dtype`; a tensor
    at a time goes through the CPU's memory."""
    folder = find(str(folder), "folder")
    config = read_config(folder)
    read, model = open_weights(folder, config), empty_model(config, dtype, device)
    fill(model, read)
    return model


def empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """A model for evaluation, parameters and computation in `dtype`, that is yet to be filled."""
    with torch.device("meta"):
        model = Transformer(config, dtype).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    return model.eval()


# ---- adapters, as PEFT keeps them

# Fields of adapter_config.json, and the values that lib/lora.py supports; others may be null, false, 0 or empty.
ADAPTER_MEANS_OURS = _values("""
peft_type            "LORA"
bias                 "none"
init_lora_weights    true, false, null, "gaussian", "eva"
""")
ADAPTER_HARMLESS = """
auto_mapping base_model_name_or_path revision peft_version task_type inference_mode r lora_alpha lora_dropout
target_modules exclude_modules megatron_core qalora_group_size
"""


def adapter_pieces(config) -> dict[str, list[Piece]]:
    """For each adapter of lib/lora.py the tensors of PEFT's file that make it up. config: a Config."""
    out = {}
    for name, m in lora.layers(lora.meta_model(config)).items():
        place, _, fused = name.rpartition(".")
        first, rank, a, b = 0, config.lora, [], []
        for part, (rows, adapted) in zip(lora.PARTS[fused], m.lora_blocks, strict=True):
            if adapted:
                theirs = f"base_model.model.model.{place}.{part}_proj.lora"
                a.append(Piece(f"{theirs}_A.weight", (len(a) * rank, 0), (rank, m.in_features)))
                b.append(Piece(f"{theirs}_B.weight", (first, 0), (rows, rank)))
                first += rows
        out |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
    return out


def open_adapter(folder: Path, config) -> Read:
    """Checks a PEFT adapter against the flags of a run -> read(name, slices) of lib/lora.py's parameters. config: a
    Config."""
    values, path = read_object(folder / "adapter_config.json"), folder / "adapter_config.json"
    known = ADAPTER_HARMLESS.split()
    for key, value in values.items():
        if value not in ADAPTER_MEANS_OURS[key] if key in ADAPTER_MEANS_OURS else value and key not in known:
            raise UserError(f"{path}: {key} is {value!r}, which lib/lora.py does not compute")
    file = TensorFile(folder / "adapter_model.safetensors")
    targets = {m[1] for name in file.entries if (m := re.search(r"\.(\w+)_proj\.lora_A\.weight$", name))}
    theirs = values.get("r"), values.get("lora_alpha"), targets
    if theirs != (config.lora, config.lora_alpha, set(config.lora_targets)):
        raise UserError(
            f"--lora_weights {folder}: this adapter is of another kind than the flags say; give --lora {theirs[0]}"
            f" --lora_alpha {theirs[1]} --lora_targets {','.join(sorted(targets))}"
        )
    base = values.get("base_model_name_or_path") or config.weights
    if _base_name(base) != _base_name(config.weights):
        raise UserError(
            f"--lora_weights {folder}: it is an adapter for {base}, not for --weights {config.weights}; if these are"
            f" the same, say so in {path} (base_model_name_or_path)"
        )
    return _reader(folder, adapter_pieces(config), {name: (file, name) for name in file.entries})


def _base_name(base: str) -> tuple[str, ...]:
    """What is left of a base's name where its folder has moved; of a run's hf/ the run's name, too."""
    path = Path(base).absolute()
    return path.parts[-1 - (path.name == "hf") :]


def export_adapter(config, read: Read, folder: Path) -> None:
    """Writes the folder that PEFT loads: adapter_config.json and adapter_model.safetensors, in fp32. config: a Config;
    read: of lib/lora.py's parameters."""
    rows = [(piece, name) for name, row in adapter_pieces(config).items() for piece in row]
    folder.mkdir(exist_ok=True)
    temporary = folder / "adapter_model.safetensors.tmp"
    write_pieces(temporary, rows, torch.float32, read)
    temporary.rename(folder / "adapter_model.safetensors")
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.weights or None,
        "r": config.lora,
        "lora_alpha": config.lora_alpha,
        "target_modules": [f"{target}_proj" for target in config.lora_targets],
        "inference_mode": True,
    }
    write_whole(folder / "adapter_config.json", json.dumps(content, indent=2) + "\n")


# ---- config.json

# Fields that change what is computed, and the values that mean what model.py computes; the first is written.
MEANS_OURS = _values("""
hidden_act                         "silu", "swish"
activation_function                "gelu_new", "gelu_pytorch_tanh", "gelu_fast"
attention_bias                     false
mlp_bias                           false
use_sliding_window                 false, null
sliding_window                     null
router_jitter_noise                0, null
scale_attn_weights                 true
scale_attn_by_inverse_layer_idx    false
add_cross_attention                false
is_encoder_decoder                 false
partial_rotary_factor              1, null
is_causal                          true
""")
# Fields that change nothing in a forward or backward pass of ours.
HARMLESS = """
model_type architectures torch_dtype dtype transformers_version use_cache pretraining_tp n_ctx n_special
predict_special_tokens output_past bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id id2label
label2id num_labels task_specific_params problem_type finetuning_task is_decoder gradient_checkpointing
max_length output_router_logits reorder_and_upcast_attn summary_type summary_use_proj summary_activation
summary_proj_to_labels do_sample temperature top_p top_k return_dict output_hidden_states output_attentions
max_sequence_length max_window_layers is_llama_config transformers.js_config unsloth_version unsloth_fixed
"""
# Fields that ask for nothing while they are null, false, 0 or empty.
HARMLESS_WHEN_OFF = """
quantization_config auto_map pruned_heads chunk_size_feed_forward cross_attention_hidden_size
tie_encoder_decoder torchscript use_bfloat16 tf_legacy_loss use_mrope use_qk_norm rope_interleaved
tokenizer_class prefix decoder_start_token_id min_length early_stopping diversity_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids output_scores return_dict_in_generate forced_bos_token_id
forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
# What config.json calls the fields of RopeScaling, by its kind; "default" is none.
ROPE_KEYS = {
    "default": {},
    "llama3": {"factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
               "original_seq_len": "original_max_position_embeddings"},
}  # fmt: skip


EXPECTED = {int: "a positive whole number", float: "a positive number", bool: "true or false"}
ROPE = ("rope_theta", "rope_parameters", "rope_scaling")


def read_config(folder: Path) -> ModelConfig:
    """The shape that a folder's config.json describes, in the keys of transformers 4 or 5. Refuses by name what would
    compute something else than model.py does."""
    path = folder / "config.json"
    if not path.exists():
        raise UserError(
            f"{folder} holds no config.json, which says what model it is; params.json is Meta's own format: take the"
            " repository's Hugging Face files"
        )
    values = read_object(path)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"{path}: model_type {kind!r} is not known; there are {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    known = {*family.keys.values(), *ROPE * ("positions" not in family.shape)}
    if "use_sliding_window" in family.defaults:  # it is off, or refused
        known.add("sliding_window")
    if set(re.findall(r"\w+", str(values.get("layer_types")))) == {"full_attention"}:
        known.add("layer_types")
    _refuse_unknown(family.defaults | values, known, path)
    shape = {}
    for f in fields(ModelConfig):
        if key := family.keys.get(f.name):
            shape[f.name] = _read_field(values, key, f.type, family.defaults.get(key, f.default), path)
    shape["ffn_dim"] = shape["ffn_dim"] or 4 * shape["dim"]
    if shape.get("top_k", 0) > shape.get("n_experts", 0):
        raise UserError(f"{path}: num_experts_per_tok is {shape['top_k']}, there are {shape['n_experts']} experts")
    try:
        return ModelConfig(**shape, **family.shape, **_read_rope(values, family.defaults.get("rope_theta", 1e4), path))
    except ValueError as e:
        raise UserError(f"{path}: {e}") from None


def _refuse_unknown(values: dict, known: set[str], path: Path) -> None:
    """Refuses values that may change what is computed. known: keys whose values are looked at elsewhere."""
    known = known | set(HARMLESS.split()) | {key for key in HARMLESS_WHEN_OFF.split() if not values.get(key)}
    unknown = []
    for key, value in values.items():
        if key in known or key[:1] == "_" or _is_dropout(key):
            continue
        if key == "quantization_config":
            raise UserError(f"{path}: its weights are quantised ({value}): take the original ones, in bf16 or fp32")
        if key not in MEANS_OURS:
            unknown.append(f"{key!r} = {value!r}"[:80])
        elif value not in MEANS_OURS[key]:
            raise UserError(f"{path}: {key} is {value!r}, model.py computes only {MEANS_OURS[key][0]!r}")
    if unknown:
        raise UserError(
            f"{path}: {', '.join(unknown)}: not known here, and may change what is computed; remove what does not"
        )


def _read_field(values: dict, key: str, kind: type, default, path: Path):
    value = values.get(key)
    if value is None:
        value = default
    elif type(value) not in ((int, float) if kind is float else (kind,)) or not (kind is bool or 0 < value < 2**53):
        raise UserError(f"{path}: {key} is {value!r}, expected {EXPECTED[kind]}")
    if value is MISSING:
        raise UserError(f"{path} does not say {key}")
    return value


def _read_rope(values: dict, theta: float, path: Path) -> dict:
    """rope_theta and rope_scaling of version 4, or rope_parameters of version 5 -> those fields of ModelConfig. theta:
    where the file does not say it."""
    given = {key: values[key] for key in ROPE[1:] if values.get(key) not in (None, {})}
    if len(given) > 1:
        raise UserError(f"{path} has both rope_parameters and rope_scaling: remove the one that does not count")
    name, rope = next(iter(given.items()), ("", {}))
    if not isinstance(rope, dict):
        raise UserError(f"{path}: {name} is {rope!r}, expected an object")
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in ROPE_KEYS:
        raise UserError(f"{path}: rope_type {kind!r} is not implemented; {', '.join(ROPE_KEYS)} are")
    _refuse_unknown(rope, {"rope_type", "type", "rope_theta", *ROPE_KEYS[kind].values()}, path)
    says = values if rope.get("rope_theta") is None else rope
    theta = float(_read_field(says, "rope_theta", float, theta, path))
    numbers = {ours: _read_field(rope, key, float, MISSING, path) for ours, key in ROPE_KEYS[kind].items()}
    scaling = RopeScaling(**numbers, kind=kind) if numbers else None
    if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
        raise UserError(f"{path}: high_freq_factor must be above low_freq_factor")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _is_dropout(key: str) -> bool:
    return "dropout" in key or key.endswith("_pdrop")


def dropout_note(path: Path) -> str:
    """One line that names the dropout rates of a config.json or the like, which are not applied; empty if there are
    none."""
    rates = [f"{k!r}: {v!r}" for k, v in read_object(path).items() if _is_dropout(k) and v]
    return f"Dropout is not applied: {', '.join(rates)}" if rates else ""


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict:
    """The config.json of a shape, in the keys that transformers 4 and 5, vLLM and llama.cpp read. ValueError: no family
    has this shape."""
    kind = family(config)
    out = {"architectures": [FAMILIES[kind].architecture], "model_type": kind, "torch_dtype": str(dtype)[6:]}
    out |= {key: getattr(config, ours) for ours, key in FAMILIES[kind].keys.items()}
    if kind == "gpt2":
        return out | {"activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    out |= {key: MEANS_OURS[key][0] for key in FAMILIES[kind].defaults if key in MEANS_OURS}
    out |= {"hidden_act": "silu", "rope_theta": config.rope_theta, "rope_scaling": None}
    if scaling := config.rope_scaling:
        numbers = {theirs: getattr(scaling, ours) for ours, theirs in ROPE_KEYS[scaling.kind].items()}
        out["rope_scaling"] = {"rope_type": scaling.kind, **numbers}
    return out


# ---- writing


def export(
    config: ModelConfig, read: Read, folder: Path, dtype: torch.dtype, shard_gb: float = 5.0, tokenizer=None,
    replaces: bool = False, ranks: Ranks = ALONE, talks: bool = False,
) -> None:  # fmt: skip
    """Writes a Hugging Face folder, values rounded to `dtype`: shards of safetensors of at most shard_gb GB (10^9
    bytes; a tensor that is larger has a file of its own), each by one rank, then the rest. It is written beside its
    place and renamed when it is whole; replaces: an older export gives way; talks: the model was trained on
    conversations, and the folder says how they look. UserError: no family has this shape. All ranks must call; an error
    on one is raised on all."""
    rows, split = _plan_shards(config, dtype, shard_gb * 1e9)
    folder, chat = folder.absolute(), chat_family(tokenizer, config.chat_format) if talks and tokenizer else ""
    temporary = folder.with_name(f"{folder.name}.tmp-{gather(secrets.token_hex(4), ranks)[0]}")

    def begin() -> None:
        refuse_in_the_way(folder, replaces)
        for left in folder.parent.glob(f"{folder.name}.tmp-*") if replaces else ():
            shutil.rmtree(left, ignore_errors=True)  # of an export that was killed
        temporary.mkdir(parents=True)

    def write_shards() -> None:
        for file, names in [*split.filename_to_tensors.items()][ranks.rank :: ranks.world_size]:
            write_pieces(temporary / file, [rows[name] for name in names], dtype, read)

    on_first_rank(begin, ranks)
    try:
        on_all(write_shards, ranks)
        on_first_rank(
            lambda: _finish_export(folder, temporary, split, config_json(config, dtype), tokenizer, chat), ranks
        )
    finally:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _plan_shards(config: ModelConfig, dtype: torch.dtype, limit: float) -> tuple:
    """-> ({tensor: (piece, our parameter)}, huggingface_hub's StateDictSplit: which file holds which)"""
    from huggingface_hub import split_state_dict_into_shards_factory  # takes a while

    try:
        rows = {piece.name: (piece, name) for name, row in pieces(config).items() for piece in row}
    except ValueError as e:
        raise UserError(f"This model has no Hugging Face form: {e}") from None
    split = split_state_dict_into_shards_factory(
        rows,
        get_storage_size=lambda row: math.prod(row[0].shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(limit),
    )
    return rows, split


def _finish_export(folder: Path, temporary: Path, split, config: dict, tokenizer, chat: str) -> None:
    """The tokenizer's files, the index, config.json and generation_config.json; then the folder's name."""
    ids = write_files(tokenizer, temporary, chat) if tokenizer else {"bos_token_id": None, "eos_token_id": None}
    generation = read_json(temporary / "generation_config.json")  # that of the tokenizer's folder
    generation = generation | ids if chat else ids | generation
    contents = {"config.json": config | ids, "generation_config.json": generation}
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        contents["model.safetensors.index.json"] = index
    for name, content in contents.items():
        (temporary / name).write_text(json.dumps(content, indent=2) + "\n")
    old = temporary.with_name(f"{temporary.name}.old")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def refuse_in_the_way(folder: Path, replaces: bool) -> None:
    """Whether an export may be written there: where nothing is, or, if it replaces, where an export is."""
    is_export = replaces and (folder / "generation_config.json").exists() and (folder / "config.json").exists()
    if folder.exists() and not is_export and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} is there already: move it away, or give another folder")


def write_pieces(path: Path, rows: list[tuple[Piece, str]], dtype: torch.dtype, read: Read) -> None:
    """Writes a safetensors file, a tensor at a time, and syncs. rows: each tensor, and our parameter that has its
    values."""

    def values_of(piece: Piece, name: str) -> Iterator[Tensor]:
        values = read(name, tuple(slice(at, at + n) for at, n in zip(piece.start, piece.shape, strict=True)))
        if dtype == torch.float16 and values.abs().amax() > torch.finfo(dtype).max:
            raise UserError(f"{piece.name} holds values beyond float16's range: take bf16 or fp32")
        values = values.to(dtype)
        yield values.T if piece.transposed else values.reshape(piece.stored)

    write_file(path, [(piece.name, dtype, piece.stored, partial(values_of, piece, name)) for piece, name in rows])


def export_model(model: Transformer, folder: Path | str, shard_gb: float = 5, **how) -> None:
    """Writes an unsharded model as a Hugging Face folder, in the dtype of its parameters. how: as for export."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    dtype = next(iter(parameters.values())).dtype
    export(model.config, lambda n, s: parameters[n][s].cpu(), Path(folder), dtype, shard_gb, **how)
