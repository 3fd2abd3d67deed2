"""Contenders of the races: train.py, and other trainers' models, trained as their scripts and manuals say.

    python bench/peers.py NAME FOLDER EVERY SECONDS FLAGS OUT       one contender, see train_here

Memory, the allocator and the compiler belong to a process, so every turn of a contender is a new process, which writes
records like train.py's until it is killed. In races over steps ours is train.py, and peers use autocast or pure bf16,
torch.compile of the whole model, fused AdamW, and gradients clipped to 1. In the race in time to loss the learning rate
follows the share of the time that has passed, so ours is train.py's step."""

import json
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from runpy import run_path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import Row, Turn, race, train

import torch  # isort: skip
from safetensors.torch import load_file
from torch import Tensor, nn

from config import DEFAULT, Config, parse_args, split_batch
from data import Batch, make_loader
from lib.errors import Failure
from lib.files import ROOT
from lib.machine import find_device, memory_gib, set_allocators
from lib.ranks import ALONE

# Further flags of ours: the settings of train_peer.
SAME = [
    "--dtype=bf16",
    "--compile=block",
    "--lr=1e-5",
    "--schedule=constant",
    "--warmup_steps=0",
    "--beta1=0.9",
    "--beta2=0.95",
    "--weight_decay=0",
    "--clip=1",
    "--tokenizer=bytes",
    "--eval_every=0",
    "--save_every=0",
    "--sample_every=0",
]
LITGPT = {  # litgpt's names of sizes: the names in config.json
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "padded_vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_query_groups": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "rope_base": "rope_theta",
}
SAME_STEP = 1e-4  # largest relative difference of loss and gradient norm of the first step in fp32


RECORDS = 5  # of a turn in a race over steps

# A contender is made from a config, the folder of its model or checkout, and the options in its name. It is a pair of
# step(tokens, targets, share), which trains on [B, T] -> {"loss", "grad_norm"}; share: of the time that has passed
# loss_of(tokens, targets) -> the mean loss
Contender = tuple[Callable, Callable]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> dict[str, Tensor]:
    """Backward pass, clipping to 1 and the optimizer's step."""
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss, "grad_norm": norm}


# ---- in races over steps: models of a Hugging Face folder, with its weights if it has some


def load_weights(folder: Path) -> dict[str, Tensor]:
    return {name: w for path in folder.glob("*.safetensors") for name, w in load_file(path).items()}


def transformers(folder: Path) -> tuple[nn.Module, Callable]:
    """The model, and loss_of(model, tokens, targets): its mean loss."""
    import transformers as hf

    config = hf.AutoConfig.from_pretrained(folder)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.load_state_dict(load_weights(folder), strict=False)  # a tied head is not in the folder
    model.config.use_cache = False
    return model, lambda call, tokens, targets: call(input_ids=tokens, labels=targets, shift_labels=targets).loss


def litgpt(folder: Path) -> tuple[nn.Module, Callable]:
    from litgpt import GPT, Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from litgpt.utils import chunked_cross_entropy

    values = json.loads((folder / "config.json").read_text())
    sizes = {key: values[theirs] for key, theirs in LITGPT.items()}
    kinds = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "bias": False, "parallel_residual": False}
    config = Config(name="bench", rotary_percentage=1.0, **sizes, **kinds)
    model, state = GPT(config), {}
    copy_weights_hf_llama(config, {}, state, load_weights(folder))
    model.load_state_dict(state)
    return model, lambda call, tokens, targets: chunked_cross_entropy(call(tokens), targets)


def fused_adamw(make: Callable, config: Config, folder: Path, precision: str, compiled: str = "") -> Contender:
    """precision: mixed (autocast, fp32 masters), bf16 or fp32."""
    device = find_device(1)
    with device:  # random values for 3 B parameters take a CPU minutes
        model, loss_of = make(folder)
    model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32).train()
    call = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(tokens, targets, share):
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "mixed"):
            loss = loss_of(call, tokens, targets)
        return update(model, optimizer, loss)

    return step, partial(loss_of, model)


# ---- in the race in time to loss: lr is the peak learning rate


def flatland(config: Config, checkout: Path, lr: str) -> Contender:
    import shard
    from lib import settle
    from optim import Gradients, learning_rate, make_optimizer, trainable_parameters
    from train import build, resolve, train_step

    device = find_device(1)
    config = replace(resolve(config, replace(ALONE, device=device)), lr=float(lr))
    model = build(config, replace(ALONE, device=device), None)
    shard.fill_parameters(model, settle.first_values(config, model, None), config.load)
    optimizer = make_optimizer(model, config)
    reducer, scales = Gradients([*trainable_parameters(model).values()], config.clip), Namespace(refresh=int)

    def step(tokens, targets, share):
        rate = learning_rate(config, int(share * config.steps) + 1)
        loss, norm, _ = train_step(model, optimizer, [Batch(tokens, targets)], rate, reducer, scales, device)
        return {"loss": loss, "grad_norm": norm}

    return step, lambda tokens, targets: model(tokens, targets) / tokens.numel()


def nanogpt(config: Config, checkout: Path, lr: str) -> Contender:
    """As in config/train_shakespeare_char.py: cosine decay to lr / 10."""
    theirs, c, device = run_path(str(checkout / "model.py")), config.model_config, find_device(1)
    shape = theirs["GPTConfig"](config.seq_len, c.vocab_size, c.n_layers, c.n_heads, c.dim, dropout=0.0, bias=False)
    model = theirs["GPT"](shape).to(device)
    optimizer, call = model.configure_optimizers(0.1, 0.0, (0.9, 0.99), device.type), torch.compile(model)

    def step(tokens, targets, share):
        for group in optimizer.param_groups:
            group["lr"] = float(lr) * min(share / 0.02 + 1e-3, 0.55 + 0.45 * math.cos(math.pi * share))
        return update(model, optimizer, call(tokens, targets)[1])

    return step, lambda tokens, targets: model(tokens, targets)[1]


def nanochat(config: Config, checkout: Path, lr: str) -> Contender:
    """As in scripts/base_train.py: MuonAdamW, a constant rate, then a linear decay in the last 65 %. lr: matrix_lr."""
    sys.path.insert(0, str(checkout))
    from nanochat.gpt import GPT, GPTConfig

    c = config.model_config
    shape = GPTConfig(config.seq_len, c.vocab_size, c.n_layers, c.n_heads, c.n_heads, c.dim, window_pattern="L")
    model = GPT(shape).to(find_device(1))
    model.init_weights()
    optimizer = model.setup_optimizer(unembedding_lr=0.008, embedding_lr=0.3, matrix_lr=float(lr))
    call = torch.compile(model, dynamic=False)

    def step(tokens, targets, share):
        decay = max(0.0, (share - 0.35) / 0.65)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(share / 0.02 + 1e-3, 1 - 0.95 * decay)
            if group["kind"] == "muon":
                group["momentum"] = min(0.85 + 0.12 * share / 0.2, 0.97 - 0.07 * decay)
        loss = call(tokens, targets)
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return {"loss": loss}

    return step, model


CONTENDERS = {
    "transformers": partial(fused_adamw, transformers),
    "litgpt": partial(fused_adamw, litgpt),
    "flatland adamw": flatland,
    "flatland muon": flatland,
    "nanoGPT": nanogpt,
    "nanochat": nanochat,
}


# ---- one turn, and the races


def train_here(name: str, folder: Path, every: int, seconds: float, flags: list[str], out: Path) -> None:
    """Trains a contender in this process, and writes records like train.py's: of each `every`-th step, or, if it is 0,
    after each tenth of `seconds`, with the validation loss. Compilation takes a part of the time, evaluation does not.
    name: in CONTENDERS, and options. folder: of the model, or a checkout. flags: of train.py, for model and data."""
    if not every:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(out / "compiled")  # it compiles anew
    set_allocators()  # all contenders get the allocator that train.py sets up
    out.mkdir()
    config, device = parse_args(flags), find_device(1)
    validation = [] if every else [b.to(device) for part in make_loader(config, split="val") for b in part]
    contender, *options = name.split(", ")
    batches, last, tenths = make_loader(config), 0, 1
    begin = recorded = time.perf_counter()
    step, loss_of = CONTENDERS[contender](config, folder, *options)
    for number, (batch,) in enumerate(batches, 1):
        batch, share = batch.to(device), min((time.perf_counter() - begin) / seconds, 1.0)
        values = step(batch.tokens, batch.targets, share)
        elapsed = time.perf_counter() - begin
        if elapsed < tenths * seconds / 10 and not (every and (number == 1 or number % every == 0)):
            continue
        record = {key: value.item() for key, value in values.items()}  # waits for the device
        now = time.perf_counter()
        record |= {"step": number, "tokens": number * batch.tokens.numel(), "mem_gib": memory_gib(device)}
        record["step_ms"] = 1e3 * (now - recorded) / (number - last)
        if validation:
            with torch.no_grad():
                record["val_loss"] = fmean(loss_of(b.tokens, b.targets).item() for b in validation)
        with open(out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        last, tenths, recorded = number, tenths + 1, time.perf_counter()
        begin += recorded - now


def race_training(
    title: str, words: str, names: tuple[str, ...], folder: Path, every: int, rounds: int, end: float
) -> Iterator[Row]:
    """Tokens/s of the contenders. words: flags for model and batch, of train.py and of the peers' batches. folder:
    config.json of the model. If it has weights, a peer is not timed unless its first step in fp32 equals ours. every:
    steps between records. end: a deadline, in time.monotonic()."""
    flags, weights = words.split(), ["--weights", folder] * bool([*folder.glob("*.safetensors")])
    config = parse_args(flags)

    def run(name: str, count: int) -> Turn:
        ours, _, more = name.partition(" ")
        command = [__file__, name, folder, every, math.inf, *flags]
        if ours == "flatland":
            command = [ROOT / "train.py", *flags, *SAME, *weights, *more.split(), "--log_every", every, "--out"]
        return train(command, count, end - time.monotonic())

    @cache
    def first_step(name: str) -> dict:
        return run(name, 1).records[0]

    def checked(name: str) -> Turn:
        if weights and not name.startswith("flatland"):
            peer = name.partition(",")[0]
            ours, theirs = first_step("flatland --dtype fp32 --compile none"), first_step(f"{peer}, fp32")
            error = max(abs(theirs[key] / ours[key] - 1) for key in ("loss", "grad_norm"))
            if not error <= SAME_STEP:
                raise Failure(f"its loss or gradient norm in fp32 differs from ours by a relative {error:.1e}")
        return run(name, RECORDS)

    works = {name: partial(checked, name) for name in names}
    case = f"{title}, {config.micro_batch} x {config.seq_len}"
    return race(case, "tokens/s", config.micro_batch * config.seq_len, works, rounds)


RATES = {  # contenders in time to loss: further flags, and peak learning rates, for one turn each
    "flatland adamw": ("--optimizer adamw --embed_lr 0 --weight_decay 0.1 --beta1 0.9", (6e-3, 3e-3, 1.5e-3)),
    "flatland muon": ("", (9e-3, 6e-3, 1.2e-2)),
    "nanoGPT": ("", (1e-3, 2e-3, 6e-3)),
    "nanochat": ("", (0.02, 0.03, 0.04)),
}


def bench_loss(args: Namespace) -> Iterator[Row]:
    """Validation losses (nats per byte) after each tenth of a fixed time of training, compilation included: same bytes,
    same rows, same machine."""
    seconds = 300 if torch.cuda.is_available() else 120
    checkouts, works = {"nanoGPT": args.nanogpt, "nanochat": args.nanochat}, {}
    for turn in range(3):  # contenders take turns
        for contender, (flags, rates) in RATES.items():
            if checkout := checkouts.get(contender, ROOT):
                name = f"{contender}, {rates[turn]:g}"
                command = [__file__, name, checkout, 0, seconds, *DEFAULT, *flags.split()]
                works[name] = partial(train, command, 10)
    return race(f"{seconds} s", "tokens/s", split_batch(parse_args(DEFAULT), 1)[1], works, 1)


if __name__ == "__main__":
    torch.manual_seed(0)
    name, folder, every, seconds, *flags, out = sys.argv[1:]
    train_here(name, Path(folder), int(every), float(seconds), flags, Path(out))
