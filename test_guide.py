"""guide/8-change-it.md: the five changes that it prints work. The pages' commands and links are test_readme.py's."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
CHANGES = (ROOT / "guide" / "8-change-it.md").read_text("utf-8")

# What the changed files do, seen from inside: the five changes, each by what it alone brings about.
INSIDE = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch
import log, train
from config import parse_args
from data import make_loader
from model import MODELS, Transformer, rope_frequencies
from optim import make_optimizer
from lib.tokenizer import load_tokenizer
from lib.weights import config_json, read_config

log.measured_flops, log.Log._draw = lambda *_: 1e9, lambda _: None  # which take seconds

base = "--compile none --dtype fp32 --seq_len 32 --micro_batch 2 --eval_every 0 --log_every 1 --schedule constant"
base += " --warmup_steps 0 --data rows.csv --text_field review --model tiny-relu2 --optimizer lion"
for run in ("--steps 4 --out whole", "--steps 2 --out parts", "--steps 4 --out parts"):
    assert train.main([*base.split(), *run.split()]) == 0, run
rope = base.replace("relu2", "linear").replace("lion", "adamw")
assert train.main([*rope.split(), "--steps", "1", "--out", "rope"]) == 0

for words in json.loads(sys.argv[1]):  # what the page runs
    parse_args(words, trains=True)
config = parse_args(base.split())
torch.manual_seed(0)
model = Transformer(config.model_config)
for p in model.parameters():
    torch.nn.init.normal_(p)
mlp, x = model.layers[0].mlp, torch.randn(3, 64)
assert torch.equal(mlp(x), (x @ mlp.up_proj.weight.T).clamp(min=0) ** 2 @ mlp.down_proj.weight.T)

before = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = make_optimizer(model, replace(config, weight_decay=0.0))
for p in model.parameters():
    p.grad = torch.randn_like(p)
optimizer.step()
moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
for step in moved.values():  # each weight moves by the learning rate
    assert torch.allclose(step.abs(), torch.full_like(step, config.lr), rtol=1e-2)

ids = next(iter(make_loader(config)))[0].tokens.flatten().tolist()
text = load_tokenizer("bytes").decode(ids)
assert "was good, not" in text and "number" not in text and ",0" not in text

plain, linear = (rope_frequencies(MODELS[name], torch.device("cpu")) for name in ("tiny-llama", "tiny-linear"))
assert torch.equal(plain, 4 * linear)
Path("config.json").write_text(json.dumps(config_json(MODELS["tiny-linear"], torch.float32)))
assert read_config(Path()) == MODELS["tiny-linear"]
"""


def apply_hunks(page: str, folder: Path) -> dict[str, int]:
    """Replaces the old lines of each hunk by its new ones -> how many lines were added, by file."""
    added = {}
    for name, hunk in re.findall(r"^@@ (\S+)\n((?:[ +-].*\n|\n)+)", page, re.M):
        lines = [line or " " for line in hunk.splitlines()]
        old = "\n".join(line[1:] for line in lines if line[0] != "+")
        new = "\n".join(line[1:] for line in lines if line[0] != "-")
        text = (folder / name).read_text("utf-8")
        assert text.count(old) == 1, f"{name}: {old}"
        (folder / name).write_text(text.replace(old, new), "utf-8")
        added[name] = added.get(name, 0) + sum(line[0] == "+" for line in lines)
    return added


def test_the_five_changes_work_together(tmp_path):
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "lib", tmp_path / "lib")
    added = apply_hunks(CHANGES, tmp_path)
    assert len(added) == 7 and sum(added.values()) < 50, added
    rows = [f'"line {i} was good, not\nbad",{i}\n' for i in range(200)]  # a comma and a line break within a field
    rows.append(f'"{"was good, not bad " * 10000}",200\n')  # above the 128 KiB that the csv module accepts by default
    (tmp_path / "rows.csv").write_text("\ufeffreview,number\n" + "".join(rows), "utf-8")  # with Excel's BOM
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    commands = [shlex.split(line)[2:] for line in re.findall(r"^python train.py .*", CHANGES, re.M)]
    assert len(commands) == 4
    command = [sys.executable, "-c", INSIDE, json.dumps(commands)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No export to hf/" in done.stdout
    whole, parts = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    whole, parts = ([r for r in rows if "loss" in r] for rows in (whole, parts))
    assert [r["loss"] for r in whole] == [r["loss"] for r in parts] and len(whole) == 4
    for r in whole:
        assert r["perplexity"] == pytest.approx(2.718281828 ** r["loss"], rel=1e-5)
