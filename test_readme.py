"""README.md: what it prints is done as it is printed."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from config import parse_args
from model import MODELS
from weights import config_json

ROOT = Path(__file__).parent
README = (ROOT / "README.md").read_text("utf-8")


def test_the_printed_change_of_the_model_trains(tmp_path):
    """Copied sources, each hunk's old lines replaced by its new ones, five steps of the new model."""
    for path in [*ROOT.glob("*.py"), ROOT / "README.md"]:
        shutil.copy(path, tmp_path)
    changed, added = set(), 0
    for name, hunk in re.findall(r"^@@ (\S+)\n((?:[ +-].*\n|\n)+)", README, re.M):
        lines = [line or " " for line in hunk.splitlines()]
        old = "\n".join(line[1:] for line in lines if line[0] != "+")
        new = "\n".join(line[1:] for line in lines if line[0] != "-")
        text = (tmp_path / name).read_text("utf-8")
        assert text.count(old) == 1, old
        (tmp_path / name).write_text(text.replace(old, new), "utf-8")
        changed.add(name)
        added += sum(line[0] == "+" for line in lines)
    assert changed == {"model.py", "shapes.py"} and 0 < added <= 10
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 200)
    flags = re.search(r"`bash launch.sh (--model tiny-relu2 [^`]+)`", README)[1].split()
    flags += ["--data", "text.txt", "--compile", "none", "--seq_len", "32", "--eval_batches", "1", "--out", "run"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "train.py", *flags], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Batch 5 Loss" in done.stdout and "No export to hf/" in done.stdout


def test_the_run_folders_that_it_names_are_those_of_its_commands(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(config_json(MODELS["tiny-llama"], torch.float32)))
    monkeypatch.setattr("download.find", lambda spec, flag: tmp_path)  # the weights are fetched
    block = README.partition("## Use\n")[2].split("```")[1]
    launches = [line for line in block.splitlines() if re.match("bash launch.sh (@|--model|--weights)", line)]
    outs = {parse_args(shlex.split(line, comments=True)[2:]).out for line in launches} | {"runs/default", "runs/two"}
    named = set(re.findall(r"runs/[\w.-]+", block)) - {"runs/NAME"}
    assert len(outs) > 6 and len(named) > 2 and named <= outs
