"""Trains transformers' model in the loop that its users write: autocast to bf16 above fp32 parameters, or pure bf16,
torch.compile of the whole model, fused AdamW, clipped gradients.

    python bench/transformers_loop.py FLAGS --out RUN          train.py's flags; writes records like train.py's

It reads the same batches with the same learning rates, in one process. It ignores --lora, --fp8 and --documents
separate."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from base.errors import prepare_python, run_script

if __name__ == "__main__":
    prepare_python()

import torch
import transformers

from base.host import find_device, memory_gib, set_allocators
from base.ranks import ALONE
from config import parse_args
from data import make_loader
from hf.families import config_json
from optim import DTYPES, learning_rate
from preflight import settle


def main(argv: list[str]) -> None:
    set_allocators()  # those of train.py
    device = find_device(1)
    config = settle(parse_args(argv, trains=True), replace(ALONE, device=device))
    loader = make_loader(config)
    how, auto = {"dtype": DTYPES[config.param_dtype], "attn_implementation": "sdpa"}, transformers.AutoModelForCausalLM
    shape = transformers.AutoConfig.for_model(**config_json(config.model_config, "float32"))
    with device:  # random values for 3 B parameters take a CPU minutes
        model = auto.from_pretrained(config.weights, **how) if config.weights else auto.from_config(shape, **how)
    model.train()
    model.config.use_cache = False
    call = model if config.compile == "none" else torch.compile(model, dynamic=False)
    betas, begin, last = (config.beta1, config.beta2), time.perf_counter(), 0
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=config.weight_decay, fused=True)
    Path(config.out).mkdir(parents=True)
    for step, batches in enumerate(loader, 1):
        optimizer.param_groups[0]["lr"] = learning_rate(config, step)
        losses = []
        for batch in (batch.to(device) for batch in batches):
            with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
                loss = call(input_ids=batch.tokens, shift_labels=batch.targets, labels=batch.targets).loss
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % config.log_every == 0:
            record = {"step": step, "loss": torch.stack(losses).mean().item(), "grad_norm": norm.item()}
            now = time.perf_counter()
            record |= {"tok_per_s": (step - last) * config.batch_tokens / (now - begin), "mem_gib": memory_gib(device)}
            with open(Path(config.out, "metrics.jsonl"), "a") as file:
                print(json.dumps(record), file=file)
            begin, last = now, step
        if step == config.steps:
            break


if __name__ == "__main__":
    run_script(main)
