"""Races of training steps: train.py against other trainers' models, trained as their scripts and manuals say.

    python bench/peers.py NAME FOLDER OUT STEPS EVERY FLAGS          one peer, see train_peer

Memory, the allocator and the compiler belong to a process, so every turn of a contender is a new process. Ours is
train.py. Peers use autocast or pure bf16, torch.compile of the whole model, fused AdamW, and gradients clipped to 1."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import Row, Turn, race, train  # first: it finds the Python that has torch

import torch  # isort: skip
from torch import Tensor, nn

from config import parse_args
from lib.errors import ROOT, Failure

Loss = Callable[[Callable, Tensor, Tensor], Tensor]  # (model, tokens [B, T], targets [B, T]) -> mean loss
# The settings of train_peer, as flags.
SAME = "--lr 1e-5 --schedule constant --warmup_steps 0 --beta1 0.9 --beta2 0.95 --weight_decay 0 --clip 1"
SAME += " --eval_every 0 --save_every 0 --sample_every 0"
SAME_STEP = 1e-4  # largest relative difference of loss and gradient norm of the first step in fp32


# ---- models of a Hugging Face folder, with its weights if it has some


def transformers(folder: Path, weights: dict[str, Tensor]) -> tuple[nn.Module, Loss]:
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    kind, options = hf.AutoModelForCausalLM, {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if weights:
        model = kind.from_pretrained(folder, **options)
    else:
        model = kind.from_config(hf.AutoConfig.from_pretrained(folder), **options)
    model.config.use_cache = False
    return model, lambda call, tokens, targets: call(input_ids=tokens, labels=targets, shift_labels=targets).loss


def litgpt(folder: Path, weights: dict[str, Tensor]) -> tuple[nn.Module, Loss]:
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
    copy_weights_hf_llama(config, {}, state, weights)
    model.load_state_dict(state)
    return model, lambda call, tokens, targets: chunked_cross_entropy(call(tokens), targets)


PEERS = {"transformers": transformers, "litgpt": litgpt}


# ---- races


def race_training(
    title: str, flags: list[str], names: tuple[str, ...], folder: Path, steps: int, every: int, rounds: int,
    env: dict[str, str], end: float,
) -> Iterator[Row]:  # fmt: skip
    """Tokens/s of the contenders. flags: model and batch, for train.py and for the peers' batches. folder: config.json
    of the model. If it has weights, a peer is not timed unless its first step in fp32 equals ours. end:
    a deadline, in time.monotonic()."""
    config, loaded, exact = parse_args(flags), bool([*folder.glob("*.safetensors")]), {}

    def run(name: str, steps: int = steps) -> Turn:
        ours, _, more = name.partition(" ")
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary, "run")
            if ours == "flatland":
                command = [ROOT / "train.py", *flags, *SAME.split(), *["--weights", folder] * loaded, *more.split()]
                command += ["--steps", 10 * steps, "--log_every", every, "--out", out]
            else:
                command = [__file__, name, folder, out, steps, every, *flags]
            return train(command, out, steps, env, end - time.monotonic())

    def checked(name: str) -> Turn:
        peer = name.partition(",")[0]
        if loaded and peer in PEERS and peer not in exact:
            ours = exact.get("flatland") or run("flatland --dtype fp32 --compile none", 1)
            theirs = run(f"{peer}, fp32", 1)
            error = max(abs(theirs.losses[0] / ours.losses[0] - 1), abs(theirs.norm / ours.norm - 1))
            if not error <= SAME_STEP:
                raise Failure(f"its loss or gradient norm in fp32 differs from ours by a relative {error:.1e}")
            exact.update({"flatland": ours, peer: theirs})
        return run(name)

    works = {name: partial(checked, name) for name in names}
    case = f"{title}, {config.micro_batch} x {config.seq_len}"
    return race(case, "tokens/s", config.micro_batch * config.seq_len, works, rounds)


def train_peer(name: str, folder: Path, out: Path, steps: int, every: int, flags: list[str]) -> None:
    """Trains in this process and writes records like train.py's. name: PEER, PRECISION[, compiled]; precision: mixed
    (autocast, fp32 masters), bf16 or fp32."""
    from safetensors.torch import load_file

    from data import make_loader
    from lib.machine import find_device, memory_gib

    peer, precision, *compiled = name.split(", ")
    device = find_device(1)
    weights = {name: w for path in folder.glob("*.safetensors") for name, w in load_file(path).items()}
    model, loss_of = PEERS[peer](folder, weights)
    model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32).train()
    call = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    batches, last, begin = iter(make_loader(parse_args(flags))), 0, time.perf_counter()
    out.mkdir()
    for step in range(1, steps + 1):
        (batch,) = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "mixed"):
            loss = loss_of(call, batch.tokens.to(device), batch.targets.to(device))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 1 or step % every == 0:
            record = {"step": step, "loss": loss.item(), "grad_norm": norm.item()}  # waits for the device
            record["step_ms"] = 1e3 * (time.perf_counter() - begin) / (step - last)
            record |= {"mem_gib": memory_gib(device)}
            with open(out / "metrics.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")
            last, begin = step, time.perf_counter()


if __name__ == "__main__":
    torch.manual_seed(0)
    name, folder, out, steps, every, *flags = sys.argv[1:]
    train_peer(name, Path(folder), Path(out), int(steps), int(every), flags)
