"""One contender of `bench.py --suite cpu`, in a process of its own:

    python bench_peers.py SPEC          SPEC: JSON, see bench_cpu.py

Builds its model, trains it for one step and answers with a line of JSON; then reads lines, each a number of steps, and
answers each when they are done. In between it sleeps. Peers are trained as their own scripts and manuals say: autocast
or pure bf16, torch.compile of the whole model, AdamW, gradients clipped to 1. Imports are few: starting is measured."""

import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import errors  # noqa: F401  (first: it finds the Python that has torch)

import torch  # isort: skip
from torch import Tensor, nn

from bench_rows import peak_rss

LR = 1e-5
SIDE = 2048  # of the matrices whose product is the limit

Loss = Callable[[Callable, Tensor, Tensor], Tensor]  # (model, tokens [B, T], targets [B, T]) -> mean loss


def make_tokens(spec: dict) -> tuple[Tensor, Tensor]:
    """-> tokens and targets [B, T]; the same for every contender."""
    shape = spec["rows"], spec["seq_len"] + 1
    drawn = torch.randint(0, spec["vocab_size"], shape, generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


# ---- peers: the model of the Hugging Face folder spec["model"], with its weights if spec["load"]


def transformers(spec: dict) -> tuple[nn.Module, Loss]:
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    kind, options = hf.AutoModelForCausalLM, {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if spec["load"]:
        model = kind.from_pretrained(spec["model"], **options)
    else:
        model = kind.from_config(hf.AutoConfig.from_pretrained(spec["model"]), **options)
    model.config.use_cache = False  # targets are shifted already
    return model, lambda call, tokens, targets: call(input_ids=tokens, labels=targets, shift_labels=targets).loss


def litgpt(spec: dict) -> tuple[nn.Module, Loss]:
    from litgpt import GPT, Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from litgpt.utils import chunked_cross_entropy

    values = json.loads(Path(spec["model"], "config.json").read_text())
    config = Config(
        name="bench", block_size=values["max_position_embeddings"], vocab_size=values["vocab_size"],
        padded_vocab_size=values["vocab_size"], n_layer=values["num_hidden_layers"], n_embd=values["hidden_size"],
        n_head=values["num_attention_heads"], n_query_groups=values["num_key_value_heads"], rotary_percentage=1.0,
        intermediate_size=values["intermediate_size"], norm_class_name="RMSNorm", norm_eps=values["rms_norm_eps"],
        mlp_class_name="LLaMAMLP", parallel_residual=False, bias=False, rope_base=int(values["rope_theta"]),
    )  # fmt: skip
    model = GPT(config)
    model.max_seq_length = spec["seq_len"]
    if spec["load"]:
        state = {}
        copy_weights_hf_llama(config, {}, state, _weights(spec))
        model.load_state_dict(state)
    return model, lambda call, tokens, targets: chunked_cross_entropy(call(tokens), targets)


def nanogpt(spec: dict) -> tuple[nn.Module, Loss]:
    """From the checkout spec["nanogpt"]; its GELU is the exact one, GPT-2's is the tanh form: --check compares that."""
    source = importlib.util.spec_from_file_location("nanogpt_model", Path(spec["nanogpt"], "model.py"))
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    values = json.loads(Path(spec["model"], "config.json").read_text())
    config = module.GPTConfig(
        block_size=values["n_positions"], vocab_size=values["vocab_size"], n_layer=values["n_layer"],
        n_head=values["n_head"], n_embd=values["n_embd"], dropout=0.0, bias=True,
    )  # fmt: skip
    model = module.GPT(config)
    if spec["load"]:
        own = model.state_dict()
        state = {
            name if name.startswith("transformer.") else f"transformer.{name}": w for name, w in _weights(spec).items()
        }
        # Hugging Face's GPT-2 keeps the matrices of its projections transposed.
        flipped = {n: w.t() if ".c_" in n and w.ndim == 2 else w for n, w in state.items() if n in own}
        model.load_state_dict(flipped | {"lm_head.weight": flipped["transformer.wte.weight"]})
    if spec["check"]:
        for block in model.transformer.h:
            block.mlp.gelu.approximate = "tanh"
    return model, lambda call, tokens, targets: call(tokens, targets)[1]


def _weights(spec: dict) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found = {}
    for path in Path(spec["model"]).glob("*.safetensors"):
        found |= load_file(path)
    return found


PEERS = {"transformers": transformers, "litgpt": litgpt, "nanogpt": nanogpt}


def their_step(spec: dict) -> Callable[[], Tensor]:
    model, loss_of = PEERS[spec["peer"]](spec)
    model.train()
    if spec["precision"] == "bf16-true":
        model.to(torch.bfloat16)
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), **{"fused": True} if spec["fused"] else {})
    call = torch.compile(model) if spec["compile"] else model
    tokens, targets = make_tokens(spec)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=spec["precision"] == "bf16-mixed"):
            loss = loss_of(call, tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def check_theirs(spec: dict) -> dict[str, float]:
    spec |= {"model": spec["scaled"]}
    model, loss_of = PEERS[spec["peer"]](spec)
    model.train()
    tokens, targets = (t[:1] for t in make_tokens(spec))
    loss = loss_of(model, tokens, targets)
    loss.backward()
    out = {"fp32": loss.item(), "gradient": _norm(model)}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return out | {"bf16": loss_of(model, tokens, targets).item()}


def _norm(model: nn.Module) -> float:
    return sum(p.grad.double().square().sum().item() for p in model.parameters()) ** 0.5


# ---- ours


def our_config(spec: dict, *more: str):
    import shard
    from config import parse_args
    from preflight import resolve

    ranks = shard.init_ranks()
    return resolve(parse_args([*spec["flags"], *more]), ranks.device, ranks.world_size), ranks


def our_step(spec: dict) -> Callable[[], Tensor]:
    import bench_gpu
    import machine
    import shard
    from data import Batch

    machine.keep_memory()
    config, ranks = our_config(spec)
    mine = slice(ranks.rank * config.micro_batch, (ranks.rank + 1) * config.micro_batch)
    batch = Batch(*(t[mine].contiguous() for t in make_tokens(spec)))
    return bench_gpu.our_step(config, ranks, batch, mesh=shard.make_mesh(config.shard_size, ranks)).step


@torch.no_grad()
def check_ours(spec: dict) -> dict[str, float]:
    """Also writes the weights for the peers: to spec["model"] what is trained, to spec["scaled"] what is compared: four
    times as large, for at their first values layers do so little that a wrong one hardly shows."""
    import shard
    import train
    from preflight import Made, first_values
    from weights import export_model

    tokens, targets = (t[:1] for t in make_tokens(spec))
    out = {}
    for dtype in ("bf16", "fp32"):
        config, ranks = our_config(spec, "--dtype", dtype, "--compile", "none")
        model = train.build(config, ranks, None, Made())
        shard.fill(model, *first_values(config, model, None))
        if dtype == "fp32":
            export_model(model, Path(spec["model"]))
        for p in model.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
        with torch.enable_grad():
            loss = model(tokens, targets) / targets.numel()
        out[dtype] = loss.item()
    loss.backward()
    export_model(model, Path(spec["scaled"]))
    return out | {"gradient": _norm(model)}


# ---- the process


def matmul_step(spec: dict) -> Callable[[], None]:
    dtype = torch.float32 if spec["precision"] == "32-true" else torch.bfloat16
    a, b = (torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(2))

    def step() -> None:
        torch.mm(a, b)

    return step


def main(spec: dict) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print

    def answer(out: dict) -> None:
        print(json.dumps(out), file=answers, flush=True)

    ours = spec["peer"] == "flatland"
    torch.manual_seed(0)
    if spec["check"]:
        return answer(check_ours(spec) if ours else check_theirs(spec))
    step = matmul_step(spec) if spec["peer"] == "matmul" else our_step(spec) if ours else their_step(spec)
    answer({"loss": _number(step())})
    asleep = time.process_time()
    for line in sys.stdin:
        begin, before, seconds = time.process_time(), resource.getrusage(resource.RUSAGE_SELF), []
        for _ in range(int(line)):
            start = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used = {"faults": after.ru_minflt - before.ru_minflt, "kernel": after.ru_stime - before.ru_stime}
        used |= {"peak": peak_rss(), "waiting": begin - asleep}
        answer({"seconds": seconds, "loss": _number(loss), **used})
        asleep = time.process_time()


def _number(loss: Tensor | None) -> float | None:
    return None if loss is None else loss.item()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
