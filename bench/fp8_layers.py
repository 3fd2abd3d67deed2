"""What FP8 does to each layer of a run's model."""

import math
import statistics
from argparse import Namespace
from collections.abc import Iterator

from common import Row, row  # first: it finds the Python that has torch

import torch  # isort: skip
from torch import Tensor

import checkpoint
import fp8
import gpu
import shard
from config import Config, split_batch
from data import make_loader
from machine import find_device
from model import Transformer
from optim import DTYPES


def snr_db(exact: Tensor, value: Tensor) -> float:
    exact, value = exact.double(), value.double()
    return 10 * torch.log10(exact.square().sum() / (value - exact).square().sum()).item()


def speed_up(shape: tuple[int, int], tokens: int, recipe: str, device: torch.device) -> float:
    """Of a layer [N, K], forward and backward with all casts, over the same in bf16."""
    torch._dynamo.reset()
    lab = gpu.Lab(shard.Ranks(0, 1, device), False, math.inf)
    seconds, _, _ = gpu.measure(lab, gpu.layer_steps(lab, [shape], tokens, recipe), 1, 4)
    casts, _, bf16 = (statistics.median(values) for values in seconds.values())
    return bf16 / casts


def measure_layers(config: Config, model: Transformer, device: torch.device) -> dict[str, float]:
    """Sends one micro-batch forward and backward -> SNR of each layer's output against bf16; figures are in the layers
    that are watched."""
    outputs = {}
    for name, layer in fp8.layers(model).items():

        def compare(layer, inputs, output, name=name):
            layer.eval()
            with torch.no_grad():
                outputs[name] = snr_db(layer.forward(*inputs), output)
            layer.train()

        layer.register_forward_hook(compare)
    batch = next(iter(make_loader(config)))[0].to(device)
    model(batch.tokens, batch.targets, batch.positions).backward()
    return outputs


def bench_fp8(args: Namespace) -> Iterator[Row]:
    """Each layer of a run's model in FP8: SNR of y against bf16; amax, saturated and flushed shares (in millionths) and
    SNR of x, W and g; on a GPU its speed-up over bf16, as the ratio."""
    device, saved = find_device(1), checkpoint.newest(args.run)
    config = saved.config
    model = Transformer(saved.model_config, DTYPES[config.dtype])
    shard.fill(model, saved.read_weights)
    model.to(device).train()
    recipe = args.recipe or (config.fp8 if config.fp8 != "off" else "tensor")
    grad_dtype = "e5m2" if config.fp8_grad_dtype == "auto" else config.fp8_grad_dtype
    rows = fp8.convert_linears(model, recipe, grad_dtype, config.fp8_skip, small=True)
    fp8.watch(model, list(fp8.layers(model)))
    outputs, tokens = measure_layers(config, model, device), split_batch(config, 1)[0] * config.seq_len
    figures, speeds = fp8.watched(model), {}
    for name, shape, verdict in rows:
        case = f"{name}, {' x '.join(map(str, shape))}"
        if name not in outputs:
            yield row(case, verdict)
            continue
        parts = [f"recipe {recipe}, {tokens} tokens"]
        for operand in "xwg":
            amax, saturated, flushed, snr = (figures[f"fp8/{name}/{operand}_{f}"] for f in fp8.FIGURES)
            shares = f"saturated {1e6 * saturated:.0f} flushed {1e6 * flushed:.0f}"
            parts.append(f"{operand} amax {amax:.2e} {shares}{'' if snr is None else f' {snr:.1f} dB'}")
        if device.type == "cuda" and shape not in speeds:
            speeds[shape] = speed_up(shape, tokens, recipe, device)
        if speeds.get(shape, 1) < 1:
            parts.append(f"LOSES: --fp8_skip {name}")
        yield row(case, "; ".join(parts), outputs[name], "dB", speeds.get(shape))
