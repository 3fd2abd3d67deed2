"""guide/: the printed changes work, the commands are understood, the links lead somewhere."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import plan
from config import parse_args
from shapes import MODELS
from weights import config_json

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / "launch"), str(ROOT / "bench")]
from cluster import LAUNCH_FLAGS, read_flags  # noqa: E402

PAGES = sorted((ROOT / "guide").glob("*.md"))
LAUNCHER = (ROOT / "launch.sh").read_text("utf-8")
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
from tokenizer import load_tokenizer
from weights import config_json, read_config

log.measured_flops, log.Log._draw = lambda *_: 1e9, lambda _: None  # which take seconds

base = "--compile none --dtype fp32 --seq_len 32 --micro_batch 2 --eval_every 0 --log_every 1 --schedule constant"
base += " --warmup_steps 0 --data rows.csv --text_field review --model tiny-relu2 --optimizer muon"
for run in ("--steps 4 --out whole", "--steps 2 --out parts", "--steps 4 --out parts"):
    assert train.main([*base.split(), *run.split()]) == 0, run
rope = base.replace("relu2", "linear").replace("muon", "adamw")
assert train.main([*rope.split(), "--steps", "1", "--out", "rope"]) == 0

for words in json.loads(sys.argv[1]):  # what the page runs
    parse_args(words, trains=True)
config = parse_args(base.split())
torch.manual_seed(0)
model = Transformer(config.model_config)
mlp, x = model.layers[0].mlp, torch.randn(3, 64)
assert torch.equal(mlp(x), (x @ mlp.up_proj.weight.T).clamp(min=0) ** 2 @ mlp.down_proj.weight.T)

before = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = make_optimizer(model, replace(config, weight_decay=0.0))
for p in model.parameters():
    p.grad = torch.randn_like(p)
optimizer.step()
moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
values = torch.linalg.svdvals(moved["layers.0.self_attn.o_proj.weight"])
assert values.max() < 3 * values.min()  # of a random matrix of that shape the ratio is above 50
step = moved["embed_tokens.weight"].abs()  # AdamW's first one is the learning rate
assert torch.allclose(step, torch.full_like(step, step.max().item()), rtol=1e-3)

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
    added = apply_hunks(CHANGES, tmp_path)
    assert len(added) == 7 and sum(added.values()) < 50, added
    rows = [f'"line {i} was good, not\nbad",{i}\n' for i in range(200)]  # a comma and a line break within a field
    (tmp_path / "rows.csv").write_text("review,number\n" + "".join(rows))
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


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command that a page prints."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def help_of(script: str, verb: list[str], capsys) -> str:
    module = importlib.import_module(script.removesuffix(".py").replace("bench/", ""))
    with pytest.raises(SystemExit):
        module.main([*verb, "--help"])
    return capsys.readouterr().out


def check_command(words: list[str], capsys) -> None:
    """Fails for a command of ours with an unknown script, verb or flag; other programs' are not looked at."""
    if "train.sbatch" in words:
        words = ["python", "train.py", *words[words.index("train.sbatch") + 1 :]]
    elif words[:2] == ["bash", "launch.sh"]:
        verb, rest = (words[2], words[3:]) if words[2:] and words[2][0] not in "@-" else ("train", words[2:])
        assert re.search(rf"^# bash launch.sh (\[train\]|{verb}\b)", LAUNCHER, re.M), words
        words = ["python", "train.py", *read_flags(rest, *LAUNCH_FLAGS)[1]]
        if verb not in ("train", "doctor"):
            assert {word for word in words if word[0] == "-"} <= {"--out", "--hosts", "--now"}, words
            return
    if words[0] != "python":
        return
    script, rest = words[1], words[2:]
    if script == "train.py":
        parse_args(rest, trains=True)
    elif script == "plan.py":
        plan.parse(rest)
    elif rest[:1] == ["show"]:
        parse_args(re.sub(r"--n \d+", "", shlex.join(rest[1:])).split())
    else:
        known = help_of(script, rest[: script == "data.py"], capsys)
        assert all(word.partition("=")[0] in known for word in rest if word.startswith("--")), words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_true_of_the_files(page, capsys, monkeypatch, tmp_path):
    """Widths, links, names of files, and the commands: their words are understood as if all was fetched."""
    text = page.read_text("utf-8")
    assert not [line for line in text.splitlines() if len(line) > 120]
    for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`([\w/.-]+\.(?:py|sh|sbatch|args|md|toml))`", text):
        assert any((ROOT / folder / name).exists() for folder in ("", "launch", "bench", "guide")), name
    (tmp_path / "config.json").write_text(json.dumps(config_json(MODELS["tiny-llama"], torch.float32)))
    monkeypatch.setattr("download.find", lambda spec, flag: tmp_path)
    monkeypatch.setattr("tokenizer.holds_tokenizer", lambda folder: True)
    for words in commands_of(page) if page.name != "8-change-it.md" else []:  # its own test runs them
        check_command(words, capsys)
