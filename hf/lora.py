"""LoRA: the weights of a model stay unchanged, and its projections learn a correction of low rank.

    y = W x + (alpha / rank) B A x        W [out, in] frozen; A [rank, in] begins random, B [out, rank] as zeros

A fused projection (q, k, v; gate, up) has an A and a B for each part that --lora_targets names. They are stored as two
parameters: lora_A [n rank, in] stacks the As of the n parts, and lora_B stacks the rows of their Bs. Frozen weights
are kept in the compute dtype. A and B are kept in --param_dtype and cast in the forward pass, like all masters.
Embeddings, norms, the loss head and stacked experts have no adapters. Dropout is not implemented. With --quantize nf4
(QLoRA, arXiv 2305.14314) the weights of all projections of the blocks, with or without adapters, are kept in four bits
(nf4.py).

Sources: LoRA (arXiv 2106.09685). The names of the parts, the scale and A's initial variance follow PEFT
(github.com/huggingface/peft); hf/weights.py reads PEFT's folders and writes them."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model as transformer
import nf4
from base.errors import UserError
from config import Config
from hf.families import pieces_of
from model import Transformer, initial_std, random_init
from shapes import ModelConfig

Read = Callable[[str, tuple[slice, ...]], Tensor]  # read(name, slices) -> those values of a parameter


def parts_of(name: str, layer: nn.Module, shape: ModelConfig) -> dict[str, int]:
    """The rows of each part of a layer that can have an adapter; {} for other layers, and for those of a GPT-2, whose
    q, k and v are one matrix with one adapter for PEFT (c_attn)."""
    if not name.endswith("_proj"):
        return {}
    row = pieces_of(f"{name}.weight", tuple(layer.weight.shape), shape)
    return {} if row[0].transposed else {piece.part: piece.stored[0] for piece in row}


def sizes(shape: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of the weight of each part that can have an adapter."""
    with torch.device("meta"):
        layers = Transformer(replace(shape, n_layers=1)).named_modules()
    return {part: (rows, m.in_features) for name, m in layers for part, rows in parts_of(name, m, shape).items()}


def check_flags(config: Config) -> None:
    """Refuses impossible flags, before any file is read."""
    known = sizes(config.model_config)
    unknown = [target for target in config.lora_targets if target not in known]
    if unknown or not config.lora_targets:
        names = ",".join(known) or "no projection"
        raise UserError(f"--lora_targets {','.join(unknown)}: {config.model} can have adapters for {names}")
    is_odd = any(width % nf4.BLOCK for _, width in known.values())
    if config.quantize == "nf4" and (config.model_config.n_experts or is_odd):
        raise UserError(f"--quantize nf4: {config.model} has stacked experts, or rows not divisible by 64")


def flops_per_token(config: Config) -> int:
    """Forward and backward. Frozen weights have no gradient, which saves a third of the work of their products. The
    small work of the adapters is not counted."""
    shape = config.model_config
    return transformer.flops_per_token(shape, config.seq_len) - 2 * transformer.matmul_params(shape) * (config.lora > 0)


# ---- the layers


class LoraLinear:
    """Adds adapters to the class of a projection."""

    lora_blocks: tuple[tuple[int, int], ...]  # (rows, rank) of each part; the rank is 0 if the part has no adapter
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.lora_A.to(x.dtype)) * self.lora_scale  # [..., n rank]
        return super().forward(x) + F.linear(low, self.spread(self.lora_B.to(x.dtype)))

    def spread(self, B: Tensor) -> Tensor:
        """lora_B as one block-diagonal matrix [out, n rank], so that one product serves all parts."""
        parts = iter(B.split([rows for rows, rank in self.lora_blocks if rank]))
        return torch.block_diag(*(next(parts) if rank else B.new_zeros(rows, 0) for rows, rank in self.lora_blocks))


@functools.cache
def _adapted(cls: type) -> type:
    return type(f"Lora{cls.__name__}", (LoraLinear, cls), {})


def add_adapters(model: Transformer, config: Config) -> None:
    """Adds the adapters of --lora, freezes all other parameters, and quantizes those of --quantize. In place, before
    the parameters have values, and after a conversion to FP8, which applies to the frozen weights."""
    if not config.lora:
        return
    model.requires_grad_(False)
    for name, m in model.named_modules():
        parts = parts_of(name, m, model.config)
        blocks = tuple((rows, config.lora * (part in config.lora_targets)) for part, rows in parts.items())
        heights = [rows for rows, rank in blocks if rank]
        if heights:
            m.lora_A = nn.Parameter(m.weight.new_empty(len(heights) * config.lora, m.in_features))
            m.lora_B = nn.Parameter(m.weight.new_empty(sum(heights), config.lora))
        if parts and config.quantize == "nf4":
            nf4.convert_linear(m)
        if heights:  # last: an adapter adds to the output of the class below it
            m.__class__, m.lora_blocks, m.lora_scale = _adapted(m.__class__), blocks, config.lora_alpha / config.lora


def meta_model(config: Config) -> Transformer:
    """The model with its adapters on the meta device: shapes and no values."""
    with torch.device("meta"):
        model = Transformer(config.model_config)
        add_adapters(model, config)
    return model


# ---- values


def random_adapters(shape: ModelConfig, shapes: dict[str, tuple[int, ...]], seed: int) -> Read:
    """read(name, slices) of new adapters. A is a function of (seed, name, position), like all initial values, and has
    PEFT's variance, 1 / (3 in). B is 0. shapes: of all parameters."""
    random = random_init(shape, shapes, seed)

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        std = name.endswith("lora_A") / math.sqrt(3 * shapes[name][1])
        return random(name, slices) * (std / initial_std(shape, name))

    return read


def join(base: Read, adapters: Read) -> Read:
    """read(name, slices) of all parameters of a model with adapters."""
    return lambda name, slices: (adapters if ".lora_" in name else base)(name, slices)


def merge(base: Read, adapters: Read, config: Config) -> Read:
    """read(name, slices) of a model without adapters: its weights plus the adapters' scale B A, in fp32."""
    adapted = {name: m for name, m in meta_model(config).named_modules() if isinstance(m, LoraLinear)}

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        values, layer = base(name, slices), name.removesuffix(".weight")
        if layer not in adapted:
            return values
        A = adapters(f"{layer}.lora_A", (slice(None), slices[1])).float()
        B = adapters(f"{layer}.lora_B", (slice(None), slice(None))).float()
        return values.float() + adapted[layer].lora_scale * (adapted[layer].spread(B)[slices[0]] @ A)

    return read
