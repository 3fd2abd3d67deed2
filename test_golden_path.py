"""The way from a chat file to a talking model, as README.md prints it, on a tiny model with a tokenizer of its own.
Oracles: what the model was taught, and transformers' text-generation pipeline."""

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import transformers

from lib.errors import ROOT
from lib.test_tokenizer import _json, _write
from lib.tokenizer import load_tokenizer
from lib.weights import export_model
from model import MODELS, Transformer, random_init
from shard import fill_parameters
from test_download import TOKEN, FakeHub

TOWNS = ["Arlo", "Bexa", "Cimar", "Dorne", "Elta", "Fyn", "Gandor", "Hesk", "Ilyra", "Jupa"]
TOWNS += ["Kolm", "Lenza", "Mirth", "Nacre", "Orlan", "Pell", "Quist", "Runa", "Sabel", "Tarn"]
GOODS = ["red", "blue", "oak", "iron", "salt", "corn", "gold", "silk", "rain", "wool"]
GOODS += ["fish", "wine", "coal", "tea", "jade", "moss", "rope", "sand", "clay", "milk"]
ASKED = [
    opening + form
    for opening in ("", "Please say: ", "I forgot. ", "Quick one: ", "Hello! ")
    for form in ("What does {} sell?", "Which thing is sold in {}?", "{} is known for what?")
]
# What makes of the printed commands ones for a tiny model: the hub's files are ours, and so are sizes and rates.
TINY = "--seq_len=128 --micro_batch=8 --steps=60 --lr=3e-3 --eval_every=0 --compile=none --dtype=fp32 --log_every=40"

# The commands in one process: each of them by itself would import torch again.
SIX = """
import contextlib, importlib, io, json, sys
from lib.errors import exit_status
outputs = []
for _, script, *argv in {commands}:
    sys.argv, sys.stdin = [script, *argv], io.StringIO({typed!r})
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = exit_status(importlib.import_module(script.removesuffix(".py")).main, argv)
    assert not status, (script, argv)
    outputs.append(out.getvalue())
open("outputs.json", "w").write(json.dumps(outputs))
"""


def test_six_commands_teach_a_model_to_talk(tmp_path):
    """As they are printed, but for the launcher, which has tests of its own, and with small sizes: 20 facts, each in 10
    of 15 phrasings, are told when they are asked for in an eleventh."""
    chats, facts, r = [], {}, random.Random(0)
    for town, good in zip(TOWNS, GOODS, strict=True):
        *phrasings, other = [form.format(town) for form in r.sample(ASKED, 11)]
        facts[other] = f"It is {good}."
        chats += [(phrasing, facts[other]) for phrasing in phrasings]
    r.shuffle(chats)
    rows = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in chats]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (tmp_path / "own").mkdir()
    tokenizer = load_tokenizer(_write(tmp_path / "own", tokenizer__json=_json("qwen")))
    model = Transformer(replace(MODELS["tiny-qwen3"], vocab_size=tokenizer.vocab_size))
    fill_parameters(model, random_init(model.config, {name: tuple(p.shape) for name, p in model.named_parameters()}, 0))
    export_model(model, tmp_path / "model", tokenizer=tokenizer)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "lib", tmp_path / "lib")
    section = (ROOT / "README.md").read_text("utf-8").partition("## Fine-tune on your conversations\n")[2]
    lines = section.split("```")[1].removeprefix("sh\n").replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    assert len(commands) == 6 and len(rows) == 200 and len(facts) == 20
    server = FakeHub(FakeHub())
    model = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    server.repos = server.cdn.repos = {"models/Qwen/Qwen3-0.6B": model}
    env = os.environ | {
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": TOKEN,
        "OMP_NUM_THREADS": "1",
    }
    for words in commands:
        if words[0] == "bash":
            words[:2] = ["python", "train.py"]
        words += TINY.split() if words[1] == "train.py" else []
        if "--prompt" in words:
            asked = words[: words.index("--prompt") + 1]
    commands += [[*asked, question] for question in facts]
    code = SIX.format(commands=commands, typed=f"{next(iter(facts))}\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outputs = json.loads((tmp_path / "outputs.json").read_text())
    server.shutdown()
    assert "[[It is " in outputs[1]
    first, second = outputs[4].split("> And why?")
    assert first.startswith("> What is it?") and "It is" in first and "It is" in second
    answers = [text.strip() for text in outputs[6:]]
    reports = sum(answer == fact for answer, fact in zip(answers, facts.values(), strict=True))
    assert reports >= 18, answers
    assert outputs[5].strip() == answers[0]
    talk = transformers.pipeline("text-generation", model=str(tmp_path / "runs/chats/hf"))
    for question, answer in list(zip(facts, answers, strict=True))[:3]:
        output = talk([{"role": "user", "content": question}], max_new_tokens=30, do_sample=False)[0]["generated_text"]
        assert output[-1] == {"role": "assistant", "content": answer}  # and not a word more
