"""Races against other trainers' models, trained as their scripts and manuals say: training steps, and time to loss.

    python bench/peers.py NAME FOLDER OUT STEPS EVERY FLAGS     one peer, see train_peer
    python bench/peers.py NAME CHECKOUT OUT SECONDS             one contender, see train_for

Memory, the allocator and the compiler belong to a process, so every turn of a contender is a new process. Ours is
train.py. Peers use autocast or pure bf16, torch.compile of the whole model, fused AdamW, and gradients clipped to 1."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from runpy import run_path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import Row, Turn, race, row, train

import torch  # isort: skip
from safetensors.torch import load_file
from torch import Tensor, nn

from config import DEFAULT, Config, parse_args
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
LITGPT = {  # litgpt's names of sizes -> those of config.json
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


# ---- models of a Hugging Face folder, with its weights if it has some -> (model, loss_of(model, tokens [B, T],
# targets [B, T]) -> mean loss)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Backward pass, clipping to 1 and the optimizer's step -> the gradient norm."""
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def load_weights(folder: Path) -> dict[str, Tensor]:
    return {name: w for path in folder.glob("*.safetensors") for name, w in load_file(path).items()}


def transformers(folder: Path) -> tuple[nn.Module, Callable]:
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


PEERS = {"transformers": transformers, "litgpt": litgpt}


# ---- races


def race_training(
    title: str, words: str, names: tuple[str, ...], folder: Path, steps: int, every: int, rounds: int, end: float
) -> Iterator[Row]:
    """Tokens/s of the contenders. words: flags for model and batch, of train.py and of the peers' batches. folder:
    config.json of the model. If it has weights, a peer is not timed unless its first step in fp32 equals ours. end: a
    deadline, in time.monotonic()."""
    flags, weights = words.split(), ["--weights", folder] * bool([*folder.glob("*.safetensors")])
    config = parse_args(flags)

    def run(name: str, steps: int) -> Turn:
        ours, _, more = name.partition(" ")
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary, "run")
            if ours == "flatland":
                command = [ROOT / "train.py", *flags, *SAME, *weights, *more.split()]
                command += ["--steps", 10 * steps, "--log_every", every, "--out", out]
            else:
                command = [__file__, name, folder, out, steps, every, *flags]
            return train(command, out, steps, end - time.monotonic())

    @cache
    def first_step(name: str) -> dict:
        return run(name, 1).records[0]

    def checked(name: str) -> Turn:
        peer = name.partition(",")[0]
        if weights and peer in PEERS:
            ours, theirs = first_step("flatland --dtype fp32 --compile none"), first_step(f"{peer}, fp32")
            error = max(abs(theirs[key] / ours[key] - 1) for key in ("loss", "grad_norm"))
            if not error <= SAME_STEP:
                raise Failure(f"its loss or gradient norm in fp32 differs from ours by a relative {error:.1e}")
        return run(name, steps)

    works = {name: partial(checked, name) for name in names}
    case = f"{title}, {config.micro_batch} x {config.seq_len}"
    return race(case, "tokens/s", config.micro_batch * config.seq_len, works, rounds)


def train_peer(name: str, folder: Path, out: Path, steps: int, every: int, flags: list[str]) -> None:
    """Trains in this process and writes records like train.py's. name: PEER, PRECISION[, compiled]; precision: mixed
    (autocast, fp32 masters), bf16 or fp32."""
    set_allocators()  # all contenders get the allocator that train.py sets up
    peer, precision, *compiled = name.split(", ")
    device = find_device(1)
    with device:  # random values for 3 B parameters take a CPU minutes
        model, loss_of = PEERS[peer](folder)
    model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32).train()
    call = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    batches, last, begin = iter(make_loader(parse_args(flags))), 0, time.perf_counter()
    out.mkdir()
    for step in range(1, steps + 1):
        (batch,) = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "mixed"):
            loss = loss_of(call, batch.tokens.to(device), batch.targets.to(device))
        norm = update(model, optimizer, loss)
        if step == 1 or step % every == 0:
            record = {"step": step, "loss": loss.item(), "grad_norm": norm.item()}  # waits for the device
            record |= {"step_ms": 1e3 * (time.perf_counter() - begin) / (step - last), "mem_gib": memory_gib(device)}
            with open(out / "metrics.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")
            last, begin = step, time.perf_counter()


# ---- the race in time to loss: (config, checkout of the peer, peak learning rate) -> (mean loss, one step)

Step = Callable[[Tensor, Tensor, float], None]  # tokens, targets, and the share of the time that has passed


def flatland(config: Config, checkout: Path, lr: float) -> tuple[Callable, Step]:
    import shard
    from lib import settle
    from optim import Gradients, learning_rate, make_optimizer, trainable_parameters
    from train import build, resolve, train_step

    device = find_device(1)
    config = replace(resolve(config, replace(ALONE, device=device)), lr=lr)
    model = build(config, replace(ALONE, device=device), None)
    shard.fill_parameters(model, settle.first_values(config, model, None), config.load)
    optimizer = make_optimizer(model, config)
    reducer, scales = Gradients([*trainable_parameters(model).values()], config.clip), Namespace(refresh=int)

    def step(tokens: Tensor, targets: Tensor, share: float) -> None:
        rate = learning_rate(config, int(share * config.steps) + 1)
        train_step(model, optimizer, [Batch(tokens, targets)], rate, reducer, scales, device)

    return lambda tokens, targets: model(tokens, targets) / tokens.numel(), step


def nanogpt(config: Config, checkout: Path, lr: float) -> tuple[Callable, Step]:
    """As in config/train_shakespeare_char.py: cosine decay to lr / 10."""
    theirs, c, device = run_path(str(checkout / "model.py")), config.model_config, find_device(1)
    shape = theirs["GPTConfig"](config.seq_len, c.vocab_size, c.n_layers, c.n_heads, c.dim, dropout=0.0, bias=False)
    model = theirs["GPT"](shape).to(device)
    optimizer, call = model.configure_optimizers(0.1, lr, (0.9, 0.99), device.type), torch.compile(model)

    def step(tokens: Tensor, targets: Tensor, share: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(share / 0.02 + 1e-3, 0.55 + 0.45 * math.cos(math.pi * share))
        update(model, optimizer, call(tokens, targets)[1])

    return lambda tokens, targets: model(tokens, targets)[1], step


def nanochat(config: Config, checkout: Path, lr: float) -> tuple[Callable, Step]:
    """As in scripts/base_train.py: MuonAdamW, a constant rate, then a linear decay in the last 65 %. lr: matrix_lr."""
    sys.path.insert(0, str(checkout))
    from nanochat.gpt import GPT, GPTConfig

    c = config.model_config
    shape = GPTConfig(config.seq_len, c.vocab_size, c.n_layers, c.n_heads, c.n_heads, c.dim, window_pattern="L")
    model = GPT(shape).to(find_device(1))
    model.init_weights()
    optimizer = model.setup_optimizer(unembedding_lr=0.008, embedding_lr=0.3, matrix_lr=lr)
    call = torch.compile(model, dynamic=False)

    def step(tokens: Tensor, targets: Tensor, share: float) -> None:
        decay = max(0.0, (share - 0.35) / 0.65)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(share / 0.02 + 1e-3, 1 - 0.95 * decay)
            if group["kind"] == "muon":
                group["momentum"] = min(0.85 + 0.12 * share / 0.2, 0.97 - 0.07 * decay)
        call(tokens, targets).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return model, step


CONTENDERS = {"flatland adamw": flatland, "flatland muon": flatland, "nanoGPT": nanogpt, "nanochat": nanochat}
RATES = {  # peak learning rates, for one turn each
    "flatland adamw": (6e-3, 3e-3, 1.5e-3),
    "flatland muon": (9e-3, 6e-3, 1.2e-2),
    "nanoGPT": (1e-3, 2e-3, 6e-3),
    "nanochat": (0.02, 0.03, 0.04),
}


def train_for(name: str, checkout: Path, out: Path, seconds: float) -> None:
    """Trains for `seconds`, with compilation, on the rows of the default recipe, and writes a record after each tenth
    of the time, which evaluations do not use up. name: CONTENDER, LR."""
    set_allocators()
    contender, rate = name.split(", ")
    adamw = "--optimizer adamw --embed_lr 0 --weight_decay 0.1 --beta1 0.9" * contender.endswith("adamw")
    config, device = parse_args([*DEFAULT, *adamw.split()]), find_device(1)
    batches = (b.to(device) for (b,) in make_loader(config))
    validation = [b.to(device) for part in make_loader(config, split="val") for b in part]
    begin, tokens, records = time.perf_counter(), 0, []
    loss_of, step = CONTENDERS[contender](config, checkout, float(rate))
    while len(records) < 10:
        batch = next(batches)
        step(batch.tokens, batch.targets, min((time.perf_counter() - begin) / seconds, 1.0))
        tokens += batch.tokens.numel()
        stop = time.perf_counter()
        if stop - begin >= (len(records) + 1) * seconds / 10:
            with torch.no_grad():
                losses = [loss_of(b.tokens, b.targets).item() for b in validation]
            records.append({"seconds": stop - begin, "tokens": tokens, "val_loss": sum(losses) / len(losses)})
            begin += time.perf_counter() - stop
    out.write_text(json.dumps(records))


def bench_loss(args: Namespace) -> Iterator[Row]:
    """Validation loss after a fixed time of training, compilation included: same bytes, same rows, same machine."""
    seconds = 300 if torch.cuda.is_available() else 120
    checkouts = {"nanoGPT": args.nanogpt, "nanochat": args.nanochat}
    for turn in range(3):  # contenders take turns
        for contender, rates in RATES.items():
            if checkout := checkouts.get(contender, ROOT):
                yield race_turn(f"{contender}, {rates[turn]:g}", checkout, seconds)


def race_turn(name: str, checkout: Path, seconds: float) -> Row:
    """One contender with one learning rate, in a new process that compiles anew."""
    with tempfile.TemporaryDirectory() as folder:
        out, compiles_anew = Path(folder, "records.json"), os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, __file__, name, str(checkout), out, str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, env=compiles_anew)
        if done.returncode:
            return row("loss", name, f"failed: {done.stderr[-400:]}")
        records = json.loads(out.read_text())
        bits = [f"{record['val_loss'] / math.log(2):.3f}" for record in records]
        note = f"{records[-1]['tokens']:,} tokens; after each tenth of {seconds:.0f} s: {' '.join(bits)}"
        return row("loss", name, note, median=float(bits[-1]), unit="bits per byte")


if __name__ == "__main__":
    torch.manual_seed(0)
    if len(sys.argv) == 5:
        train_for(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
    else:
        name, folder, out, steps, every, *flags = sys.argv[1:]
        train_peer(name, Path(folder), Path(out), int(steps), int(every), flags)
