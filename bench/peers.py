"""Contenders: flatland's training step and its peers'. As a script, one of them in a process of its own, for cpu.py:

    python bench/peers.py SPEC          SPEC: JSON, see cpu.Bench.run

which trains for some steps and prints what they took as JSON. Peers are trained as their own scripts and manuals say:
autocast or pure bf16, torch.compile of the whole model, AdamW, gradients clipped to 1. Imports are few, because the
start is measured."""

import importlib.util
import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lib import errors  # noqa: F401  (first: it finds the Python that has torch)

import torch  # isort: skip
from torch import Tensor, nn

from common import Turn, peak_rss, timed

LR = 1e-5
SIDE = 2048  # of the matrices whose product is the limit

Loss = Callable[[Callable, Tensor, Tensor], Tensor]  # (model, tokens [B, T], targets [B, T]) -> mean loss


class Contender(NamedTuple):
    step: Callable[[], tuple[Tensor, Tensor]]  # -> loss, norm of the gradients
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_bytes(self) -> int:
        """Of its parameters and moments on the GPU."""
        from shard import local

        moments = (t for state in self.optimizer.state.values() for t in state.values())
        return sum(local(t.detach()).nbytes for t in (*self.model.parameters(), *moments) if t.is_cuda)


def random_tokens(rows: int, seq_len: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """-> tokens and targets [B, T]; the same for every contender."""
    drawn = torch.randint(0, vocab_size, (rows, seq_len + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


# ---- peers: the model of a Hugging Face folder, with its weights if `load`, and its own loss


def transformers(folder: Path, load: bool, dtype=torch.float32, **_) -> tuple[nn.Module, Loss]:
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    kind, options = hf.AutoModelForCausalLM, {"dtype": dtype, "attn_implementation": "sdpa"}
    if load:
        model = kind.from_pretrained(folder, **options)
    else:
        model = kind.from_config(hf.AutoConfig.from_pretrained(folder), **options)
    model.config.use_cache = False  # targets are shifted already
    return model, lambda call, tokens, targets: call(input_ids=tokens, labels=targets, shift_labels=targets).loss


def liger(folder: Path, load: bool, **options) -> tuple[nn.Module, Loss]:
    """transformers with Liger's kernels, its fused loss head too."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model, loss_of = transformers(folder, load, **options)
    _apply_liger_kernel_to_instance(model=model)
    return model, loss_of


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
    model, state = GPT(config), {}
    if load:
        copy_weights_hf_llama(config, {}, state, _weights(folder))
        model.load_state_dict(state)
    return model, lambda call, tokens, targets: chunked_cross_entropy(call(tokens), targets)


def nanogpt(folder: Path, load: bool, checkout: Path | None = None, tanh: bool = False, **_) -> tuple[nn.Module, Loss]:
    """checkout: of nanoGPT. Its GELU is the exact one; tanh: GPT-2's form in its place, for a comparison of results."""
    if not checkout:
        raise ImportError("--nanogpt FOLDER names a checkout of github.com/karpathy/nanoGPT")
    source = importlib.util.spec_from_file_location("nanogpt_model", Path(checkout, "model.py"))
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(source)  # its dataclass looks itself up
    source.loader.exec_module(module)
    values = json.loads((folder / "config.json").read_text())
    shape = {name: values[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    model = module.GPT(module.GPTConfig(**shape, block_size=values["n_positions"], dropout=0.0, bias=True))
    with torch.no_grad():
        for name, w in _weights(folder).items() if load else ():
            turned = ".c_" in name and w.ndim == 2  # Hugging Face keeps the matrices of GPT-2 as [in, out]
            model.transformer.get_parameter(name.removeprefix("transformer.")).copy_(w.t() if turned else w)
    for block in model.transformer.h if tanh else ():
        block.mlp.gelu.approximate = "tanh"
    return model, lambda call, tokens, targets: call(tokens, targets)[1]


def _weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: w for path in folder.glob("*.safetensors") for name, w in load_file(path).items()}


PEERS = {"transformers": transformers, "litgpt": litgpt, "nanogpt": nanogpt, "liger": liger}


def adamw(model: nn.Module, lr: float = LR, betas: tuple = (0.9, 0.95), decay: float = 0.1):
    """Matrices decay."""
    parts = (decay, lambda p: p.ndim > 1), (0.0, lambda p: p.ndim < 2)
    groups = [{"params": [*filter(part, model.parameters())], "weight_decay": decay} for decay, part in parts]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def their_step(
    model: nn.Module, loss_of: Loss, optimizer, batch: Callable, compiled=False, autocast=False
) -> Contender:
    """A Contender. batch() -> tokens and targets."""
    call, parameters = torch.compile(model, dynamic=False) if compiled else model, list(model.train().parameters())

    def step() -> tuple[Tensor, Tensor]:
        tokens, targets = batch()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            loss = loss_of(call, tokens, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    return Contender(step, model, optimizer)


def peer_step(
    name: str, config, device: torch.device, checkout: Path | None, compiled: bool, mesh, shared: Contender | None
) -> Contender:
    """A peer with random weights and the shape and batch of our Config. nanoGPT keeps fp32 masters, as it does by
    itself; the others are bf16 throughout. mesh: FSDP2 keeps the state on the host, and blocks are recomputed. shared:
    as of our_step."""
    from lib.weights import config_json

    with tempfile.TemporaryDirectory() as folder, torch.device(device):
        Path(folder, "config.json").write_text(json.dumps(config_json(config.model_config, torch.bfloat16)))
        model, loss_of = PEERS[name](Path(folder), False, dtype=torch.bfloat16, checkout=checkout)
    model = shared.model if shared else model.to(device)
    if mesh is not None:
        offload(model, mesh)
    batch = batch_of(config).to(device)
    work = batch.tokens, batch.targets
    optimizer = shared.optimizer if shared else adamw(model)
    return their_step(model, loss_of, optimizer, lambda: work, compiled, name == "nanogpt")


def offload(model: nn.Module, mesh) -> None:
    """As torch's manual says: FSDP2's CPUOffloadPolicy, block by block."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model.gradient_checkpointing_enable()
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda"))


def convert_by_torchao(model: nn.Module, emulate: bool) -> None:
    """Converts the layers of our model that --fp8 tensor does, by torchao's tensorwise recipe."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    import fp8

    options = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=emulate)
    names = {f"layers.{n}" for n, m in model.layers.named_modules() if isinstance(m, nn.Linear)}
    names = {name for name in names if not {*fp8.SKIP} & {*name.split(".")}}
    convert_to_float8_training(model, config=options, module_filter_fn=lambda module, name: name in names)


# ---- ours, of a resolved Config


def batch_of(config):
    from data import Batch

    return Batch(*random_tokens(config.micro_batch, config.seq_len, config.model_config.vocab_size))


def fill(model, config, device: torch.device) -> None:
    """With the values that train.py begins with; with a GPU, random ones that it draws, which take no time."""
    import shard
    from lib import check
    from model import initial_std

    if device.type == "cpu":
        return shard.fill_parameters(
            model, *check.first_values(config, model, check.open_weights(config, shard.ALONE, False))
        )
    for name, p in model.named_parameters():
        std, target = initial_std(model.config, name), shard.local(p.detach())
        drawn = torch.ones(target.shape, dtype=target.dtype, device=device)
        target.copy_(drawn if std is None else drawn.normal_(0, std))


def our_step(config, ranks, shared: Contender | None = None, mesh=None) -> Contender:
    """shared: a contender whose parameters and optimizer it trains."""
    import fp8
    import optim
    import train
    from lib import run as guard

    model = train.build(config, ranks, mesh)
    if shared:
        model.load_state_dict(shared.model.state_dict(keep_vars=True), assign=True)
    else:
        fill(model, config, ranks.device)
    optimizer = shared.optimizer if shared else optim.make_optimizer(model, config)
    optim.keep_copies(model, optimizer, config, False)
    scales, gradients = fp8.prepare(model, config, mesh, False), guard.GradientGuard(model, config, ranks, mesh)
    batches, numbers = [batch_of(config)], itertools.count(1)

    def step() -> tuple[Tensor, Tensor]:
        loss, norm, _ = train.train_step(model, optimizer, batches, LR, gradients, scales, ranks.device, config.reshard)
        gradients.check(next(numbers))
        return loss, norm

    return Contender(step, model, optimizer)


def our_config(flags: list[str]):
    import shard
    from config import parse_args
    from lib.check import resolve

    ranks = shard.init_ranks()
    return resolve(parse_args(flags), ranks.device, ranks.world_size), ranks


# ---- a contender's process


def make_step(spec: dict) -> Callable[[], tuple[Tensor, Tensor]]:
    precision, peer = spec["precision"], spec["peer"]
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    if peer == "matmul":
        a, b = (torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(2))
        return lambda: (torch.mm(a, b)[0, 0], a[0, 0])  # the limit
    if peer == "flatland":
        return our_step(*our_config(spec["flags"])).step
    load = spec["steps"] > 0  # else the start is measured, and ours draws its weights, too
    tanh = load and not spec["compile"]  # results are compared
    model, loss_of = PEERS[peer](Path(spec["model"]), load, checkout=spec["nanogpt"], tanh=tanh)
    mixed = precision == "bf16-mixed"
    model.to(torch.float32 if mixed else dtype)
    tokens = random_tokens(*spec["shape"])
    return their_step(model, loss_of, adamw(model), lambda: tokens, spec["compile"], mixed).step


def measure(spec: dict) -> dict:
    """A Turn of so many steps, after one that starts; the first of them is not counted in its seconds."""
    step, results = make_step(spec), []

    def work() -> None:
        loss, norm = step()
        results.append((loss.item(), norm.item()))

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    work()
    first, before = time.time(), faults()
    (_, *seconds), *_ = timed(work, 1 + spec["steps"])
    per_step = (faults() - before) / (1 + spec["steps"])
    losses, norms = zip(*results, strict=True)
    return Turn(seconds, peak_rss(), per_step, losses, norms[0], first)._asdict()


if __name__ == "__main__":
    torch.manual_seed(0)
    try:
        result = measure(json.loads(sys.argv[1]))
    except ImportError as error:
        result = {"missing": str(error)}
    print("\n" + json.dumps(result))
