"""Contenders: flatland's training step and its peers'. As a script, one of them in a process of its own, for cpu.py:

    python bench/peers.py SPEC          SPEC: JSON, see cpu.py

which trains for some steps and prints what they took as JSON. Peers are trained as their own scripts and manuals say:
autocast or pure bf16, torch.compile of the whole model, AdamW, gradients clipped to 1. Imports are few: starting is
measured."""

import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import errors  # noqa: F401  (first: it finds the Python that has torch)

import torch  # isort: skip
from torch import Tensor, nn

LR = 1e-5
SIDE = 2048  # of the matrices whose product is the limit

Loss = Callable[[Callable, Tensor, Tensor], Tensor]  # (model, tokens [B, T], targets [B, T]) -> mean loss


class Contender(NamedTuple):
    step: Callable[[], Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def random_tokens(rows: int, seq_len: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """-> tokens and targets [B, T]; the same for every contender."""
    drawn = torch.randint(0, vocab_size, (rows, seq_len + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


# ---- peers: the model of a Hugging Face folder, with its weights if `load`, and its own loss


def transformers(folder: Path, load: bool, dtype=torch.float32, **_) -> tuple[nn.Module, Loss]:
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    kind, options = hf.AutoModelForCausalLM, {"dtype": dtype, "attn_implementation": "sdpa"}
    model = kind.from_pretrained(folder, **options) if load else None
    model = model or kind.from_config(hf.AutoConfig.from_pretrained(folder), **options)
    model.config.use_cache = False  # targets are shifted already
    return model, lambda call, tokens, targets: call(input_ids=tokens, labels=targets, shift_labels=targets).loss


def litgpt(folder: Path, load: bool, **_) -> tuple[nn.Module, Loss]:
    from litgpt import GPT, Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from litgpt.utils import chunked_cross_entropy

    values = json.loads((folder / "config.json").read_text())
    vocab = values["vocab_size"]
    config = Config(
        name="bench", block_size=values["max_position_embeddings"], vocab_size=vocab, padded_vocab_size=vocab,
        n_layer=values["num_hidden_layers"], n_embd=values["hidden_size"], n_head=values["num_attention_heads"],
        n_query_groups=values["num_key_value_heads"], intermediate_size=values["intermediate_size"],
        norm_class_name="RMSNorm", norm_eps=values["rms_norm_eps"], mlp_class_name="LLaMAMLP", bias=False,
        parallel_residual=False, rotary_percentage=1.0, rope_base=int(values["rope_theta"]),
    )  # fmt: skip
    model = GPT(config)
    if load:
        state = {}
        copy_weights_hf_llama(config, {}, state, _weights(folder))
        model.load_state_dict(state)
    return model, lambda call, tokens, targets: chunked_cross_entropy(call(tokens), targets)


def nanogpt(folder: Path, load: bool, checkout: str, tanh: bool = False, **_) -> tuple[nn.Module, Loss]:
    """checkout: of nanoGPT. Its GELU is the exact one; tanh: GPT-2's form in its place, for a comparison of results."""
    source = importlib.util.spec_from_file_location("nanogpt_model", Path(checkout, "model.py"))
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(source)  # its dataclass looks itself up
    source.loader.exec_module(module)
    values = json.loads((folder / "config.json").read_text())
    model = module.GPT(module.GPTConfig(
        block_size=values["n_positions"], vocab_size=values["vocab_size"], n_layer=values["n_layer"],
        n_head=values["n_head"], n_embd=values["n_embd"], dropout=0.0, bias=True,
    ))  # fmt: skip
    theirs = {f"transformer.{name.removeprefix('transformer.')}": w for name, w in _weights(folder).items()}
    with torch.no_grad():
        for name, p in model.named_parameters() if load else ():
            turned = ".c_" in name and p.ndim == 2  # Hugging Face keeps the matrices of GPT-2 as [in, out]
            p.copy_(theirs[name].t() if turned else theirs[name])
    for block in model.transformer.h if tanh else ():
        block.mlp.gelu.approximate = "tanh"
    return model, lambda call, tokens, targets: call(tokens, targets)[1]


def _weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: w for path in folder.glob("*.safetensors") for name, w in load_file(path).items()}


PEERS = {"transformers": transformers, "litgpt": litgpt, "nanogpt": nanogpt}


def adamw(model: nn.Module, lr: float = LR, betas: tuple = (0.9, 0.95), decay: float = 0.1):
    """Matrices decay."""
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": decay},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def their_step(
    model: nn.Module, loss_of: Loss, optimizer, batch: Callable, compiled: bool = False, autocast: bool = False
) -> Contender:
    """batch() -> tokens and targets."""
    call, parameters = torch.compile(model, dynamic=False) if compiled else model, list(model.train().parameters())

    def step() -> Tensor:
        tokens, targets = batch()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            loss = loss_of(call, tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Contender(step, model, optimizer)


# ---- ours


def build(config, ranks, mesh=None):
    """train.py's model, before it is filled."""
    import train

    return train.build(config, ranks, mesh)


def fill(model, config) -> None:
    """With the values that train.py begins with; on a GPU with random ones that take no time to draw."""
    import shard
    from check import first_values
    from model import initial_std

    if next(model.parameters()).device.type == "cpu":
        return shard.fill(model, *first_values(config, model, None))
    for name, p in model.named_parameters():
        std, target = initial_std(model.config, name), shard.local(p.detach())
        target.normal_(0, std) if std else target.fill_(1.0 if std is None else 0.0)


def our_step(config, ranks, tokens: Tensor, targets: Tensor, shared=None, mesh=None, own_units=True) -> Contender:
    """shared: a contender whose parameters and optimizer it trains."""
    import itertools

    import fp8
    import guard
    import shard
    from data import Batch
    from optim import make_optimizer
    from train import train_step

    model = build(config, ranks, mesh if own_units else None)
    if shared:
        model.load_state_dict(shared.model.state_dict(keep_vars=True), assign=True)
    else:
        fill(model, config)
    if not own_units:  # what build does, with the one argument that no flag sets
        shard.shard_model(model, mesh, model.dtype, reshard=config.reshard, prefetch=config.prefetch, own_units=False)
    optimizer = shared.optimizer if shared else make_optimizer(model, config)
    scales, gradients = fp8.prepare(model, config, mesh, False), guard.GradientGuard(model, config, ranks, mesh)
    batch, numbers = Batch(tokens, targets), itertools.count(1)

    def step() -> Tensor:
        loss, *_ = train_step(model, optimizer, [batch], LR, gradients, scales, ranks.device, config.reshard)
        gradients.check(next(numbers))
        return loss

    return Contender(step, model, optimizer)


# ---- a contender's process


def our_config(spec: dict, *more: str):
    import shard
    from check import resolve
    from config import parse_args

    ranks = shard.init_ranks()
    return resolve(parse_args([*spec["flags"], *more]), ranks.device, ranks.world_size), ranks


def make_step(spec: dict) -> Callable[[], Tensor]:
    peer, tokens = spec["peer"], random_tokens(spec["rows"], spec["seq_len"], spec["vocab_size"])
    if peer == "matmul":
        dtype = torch.float32 if spec["precision"] == "32-true" else torch.bfloat16
        a, b = (torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(2))
        return lambda: torch.mm(a, b)[0, 0]  # the limit
    if peer == "flatland":
        return our_step(*our_config(spec), *tokens).step
    model, loss_of = PEERS[peer](Path(spec["model"]), spec["load"], checkout=spec["nanogpt"])
    model.to(torch.bfloat16 if spec["precision"] == "bf16-true" else torch.float32)
    mixed = spec["precision"] == "bf16-mixed"
    return their_step(model, loss_of, adamw(model), lambda: tokens, spec["compile"], mixed).step


def check(spec: dict) -> dict[str, float]:
    """Loss in fp32 and bf16, and the norm of all gradients. Ours writes the weights for the peers, too: to
    spec["model"] what is trained, to spec["scaled"] what is compared: four times as large, for at their first values
    layers do so little that a wrong one hardly shows."""
    results = {}
    tokens, targets = random_tokens(1, spec["seq_len"], spec["vocab_size"])
    if spec["peer"] == "flatland":
        from weights import export_model

        for dtype in ("bf16", "fp32"):
            config, ranks = our_config(spec, "--dtype", dtype, "--compile", "none")
            model = build(config, ranks)
            fill(model, config)
            if dtype == "fp32":
                export_model(model, Path(spec["model"]))
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(4 if p.ndim > 1 else 1)
            loss = model(tokens, targets) / targets.numel()
            results[dtype] = loss.item()
        export_model(model, Path(spec["scaled"]))
    else:
        model, loss_of = PEERS[spec["peer"]](Path(spec["scaled"]), True, checkout=spec["nanogpt"], tanh=True)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            results["bf16"] = loss_of(model.train(), tokens, targets).item()
        loss = loss_of(model, tokens, targets)
        results["fp32"] = loss.item()
    loss.backward()
    norm = sum(p.grad.double().square().sum().item() for p in model.parameters()) ** 0.5
    return results | {"gradient": norm}


def measure(spec: dict) -> dict:
    step, seconds = make_step(spec), []
    losses = [step().item()]
    first, before = time.time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(spec["steps"]):
        begin = time.perf_counter()
        losses.append(step().item())
        seconds.append(time.perf_counter() - begin)
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / max(1, spec["steps"])
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return {"first": first, "seconds": seconds, "losses": losses, "faults": faults, "peak": peak}


if __name__ == "__main__":
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print
    torch.manual_seed(0)
    spec = json.loads(sys.argv[1])
    with os.fdopen(output, "w") as f:
        json.dump(check(spec) if spec["check"] else measure(spec), f)
