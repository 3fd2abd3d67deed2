"""Trains transformers' model in the loop that its users write: autocast to bf16 above fp32 parameters, or pure bf16,
torch.compile of the whole model, fused AdamW, clipped gradients.

    python bench/transformers_loop.py FLAGS --out RUN          train.py's flags; writes records like train.py's

It reads the same batches with the same learning rates, in one process. It ignores --lora, --fp8 and --documents
separate."""

import json
import sys
import time
from dataclasses import replace
from itertools import islice
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
    set_allocators()  # as train.py does
    device = find_device(1)
    config = settle(parse_args(argv, trains=True), replace(ALONE, device=device))
    dtype, auto = DTYPES[config.param_dtype], transformers.AutoModelForCausalLM
    with device:  # random values for 3 B parameters take a CPU minutes
        if config.weights:
            model = auto.from_pretrained(config.weights, dtype=dtype)
        else:
            shape = config_json(config.model_config, "float32")
            model = auto.from_config(transformers.AutoConfig.for_model(**shape), dtype=dtype)
    model.train()
    if config.compile != "none":
        model.compile(dynamic=False)
    betas = config.beta1, config.beta2
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=config.weight_decay, fused=True)
    Path(config.out).mkdir(parents=True)
    begin, last = time.perf_counter(), 0
    for step, batches in enumerate(islice(make_loader(config), config.steps), 1):
        optimizer.param_groups[0]["lr"] = learning_rate(config, step)
        total = 0
        for batch in batches:
            batch = batch.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
                out = model(batch.tokens, shift_labels=batch.targets, labels=batch.targets, use_cache=False)
                loss = out.loss / len(batches)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % config.log_every == 0:
            record = {"step": step, "loss": total.item(), "grad_norm": norm.item(), "mem_gib": memory_gib(device)}
            now = time.perf_counter()
            record["tok_per_s"] = (step - last) * config.batch_tokens / (now - begin)
            with open(Path(config.out, "metrics.jsonl"), "a") as file:
                print(json.dumps(record), file=file)
            begin, last = now, step


if __name__ == "__main__":
    run_script(main)
