"""README.md, guide/ and the other pages: their commands parse, their links and quoted messages exist, and the changes
that guide/8 prints work. Each recipe trains a tiny model, and its header states its true size."""

import ast
import contextlib
import gzip
import io
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from unittest import mock

import pytest
import transformers

import checkpoint
import data
import download
import generate
import golden
import plan
import run as bench
import test_parity
import train
from base.disk import ROOT
from base.errors import Parser, exit_status
from config import parse_args, with_recipes
from hf.families import config_json
from hf.test_tokenizer import _json, _write
from hf.tokenizer import load_tokenizer
from hf.weights import export_model
from inputs import settle_inputs, settled_args
from model import MODELS, Transformer, flops_per_token
from test_config import copy_sources
from test_download import serve
from test_shard import fill, skip_plots
from test_train import records, train_in_turn

PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "BENCHMARKS")]
PAGES += sorted((ROOT / "guide").glob("*.md"))
CHANGED = ROOT / "guide" / "8-change-it.md"  # test_the_five_changes_work_together runs its commands
VERBS = re.search("^verbs='(.*)'$", (ROOT / "launch.sh").read_text(), re.M)[1].split()
OTHERS = "cat cd export lm_eval nano pip scancel squeue srun ssh ssh-copy-id tail tmux torchrun"
OTHERS += " .venv/bin/python .venv/bin/hf"


# ---- pages


def commands(page: Path) -> list[list[str]]:
    """The words of each line of the page's ```sh blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


COMMANDS = [(page.relative_to(ROOT), words) for page in PAGES if page != CHANGED for words in commands(page)]


class ParsedError(Exception):
    pass


PARSERS = {
    "plan.py": plan.parse,
    "generate.py": generate.parse,
    "checkpoint.py": checkpoint.parse,
    "download.py": Parser(download.FLAGS).parse_args,
    "data.py": data.main,
    "bench/golden.py": golden.main,
    "bench/run.py": bench.main,
    "test_parity.py": test_parity.main,
}


def trainer_words(words: list[str]) -> list[str] | None:
    """The words that train.py gets from a command; None if it does not train."""
    if "train.sbatch" in words:
        return words[words.index("train.sbatch") + 1 :]
    launches = words[:2] == ["bash", "launch.sh"]
    if words[:2] != ["python", "train.py"] and (not launches or words[2:3] and words[2] in VERBS):
        return None
    words = words[2:]
    while words and words[0] in ("--hosts", "--nproc", "--retries", "--detach"):
        words = words[1 if words[0] == "--detach" else 2 :]
    return words


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small model with a tokenizer takes the place of everything that a command would look up on the hub."""
    (tmp_path / "config.json").write_text(json.dumps(config_json(MODELS["tiny-llama"], "float32")))
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("inputs.local_path", lambda spec, flag: tmp_path)
    monkeypatch.setenv("RANK", "0")  # the data need not be there
    return tmp_path


@pytest.mark.parametrize("page, words", COMMANDS, ids=[f"{page}:{shlex.join(words)[:60]}" for page, words in COMMANDS])
def test_commands_parse(page, words, folder, monkeypatch):
    words = [word.replace("NAME", "x").replace("$RUN", "x") for word in words if not re.fullmatch(r"\w+=.*", word)]
    for end in ("|", "&&"):
        words = words[: words.index(end)] if end in words else words
    if words[2:3] == ["doctor"]:  # it takes the flags of train
        words = words[:2] + words[3:]
    if (trained := trainer_words(words)) is not None:
        assert settle_inputs(parse_args(trained, trains=True))
    elif words[:2] == ["bash", "launch.sh"]:
        assert all(re.fullmatch(r"--out|--now|--hosts|runs/\S+|[\w,.-]+|\d+", word) for word in words[3:]), words
    elif words[0] == "python":
        for name in ("data.make_loader", "dataset.prepare.find_files", "golden.sets_here", "test_parity.fuzz"):
            monkeypatch.setattr(name, mock.Mock(side_effect=ParsedError))
        with contextlib.suppress(SystemExit if "--help" in words else ParsedError):
            PARSERS[words[1]](words[2:])
    elif words[:2] == ["bash", "test.sh"]:
        assert not words[2:] or words[2] in ("-k", "-m")
    else:
        assert words[0] in OTHERS.split(), words


def test_commands_create_the_run_folders_that_pages_name(folder):
    for page in set(PAGES) - {CHANGED, ROOT / "BENCHMARKS.md"}:
        trained = [words for words in map(trainer_words, commands(page)) if words is not None]
        outs = {"runs/default", *(parse_args(words, trains=True).out for words in trained)}
        named = set(re.findall(r"\bruns/[\w.-]+\w", page.read_text("utf-8"))) - {"runs/NAME"}
        assert named <= outs, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist_and_lines_are_short(page):
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for name in re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|sh|md|args|sbatch))`", text):
        assert any((ROOT / part / name).exists() for part in ("", "recipes", "launch", "bench")), name
    assert page.name == "BENCHMARKS.md" or [line for line in text.splitlines() if len(line) > 120] == []
    sentences = re.findall(r"[A-Z][^.|`]{60,}\.", text)
    assert len(sentences) == len(set(sentences))


FOLDERS = ("", "base", "hf", "dataset", "job", "launch", "bench")
# What the files of a folder may import, besides files of the same folder; "base" stands for all files in it.
MAY_IMPORT = {
    "base": (),
    "dataset": ("base", "config", "shapes", "hf.tokenizer", "hf.chat"),
    "hf": ("base", "config", "shapes", "model", "nf4", "shard"),
    "job": ("base", "config"),
}
MATHEMATICS = "model", "attention", "nf4", "shapes"  # these know no ranks, files or flags


def import_graph() -> dict[str, set[str]]:
    """Our files by module name, and the modules that each imports, within functions too."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources()}
    short = {name.rpartition(".")[2]: name for name in files if name.startswith(("launch.", "bench."))}
    graph = {}
    for name, path in files.items():
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = {short.get(other, other) for other in found} & files.keys() - {name}
    return graph


def sources() -> list[Path]:
    """Our Python files without tests."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
    return [path for path in paths if not re.match("test_|conftest", path.name)]


def test_imports_keep_the_rules():
    graph = import_graph()
    TopologicalSorter(graph).prepare()  # CycleError names a cycle
    wrong = []
    for name, others in graph.items():
        folder = name.rpartition(".")[0]
        for other in others:
            room = other.rpartition(".")[0]
            may = room == folder or not folder or folder in ("launch", "bench")
            may = may or {other, room} & {*MAY_IMPORT.get(folder, ())}
            if name == "config":
                may = other in ("base.disk", "base.errors", "shapes")
            if name in MATHEMATICS:
                may = other in (*MATHEMATICS, "base.errors", "base.torch_private")
            if other == "train" and folder != "bench" or room in ("launch", "bench") and room != folder:
                may = False
            wrong += [] if may else [f"{name} imports {other}"]
    assert wrong == []


def test_the_readme_lists_all_files():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert readme.count("\n") <= 150
    picture = readme.partition("## The files")[2].split("```")[1].partition("launch.sh")[0]
    listed = re.findall(r"([\w/]+)\.py\b", picture)
    graph = import_graph()
    assert sorted(listed) == sorted(
        name.replace(".", "/") for name in graph if not name.startswith(("launch.", "bench."))
    )


def test_quoted_messages_are_in_the_sources():
    code = "".join(path.read_text("utf-8") for path in [*sources(), *ROOT.glob("*.sh")])
    page = (ROOT / "guide" / "6-when-something-goes-wrong.md").read_text("utf-8")
    quoted = re.findall(r"^- `([^`]+)`:", page, re.M)
    assert len(quoted) > 15 and [words for words in quoted if words not in code] == []


def test_named_places_exist():
    page = (ROOT / "guide" / "7-how-it-works.md").read_text("utf-8")
    for name, file in re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", page):
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", (ROOT / file).read_text("utf-8")), (name, file)


def test_spelling():
    """codespell reads pages, recipes, and the comments and docstrings of the sources."""
    files = [*PAGES, *ROOT.glob("recipes/*.args"), *(path for part in FOLDERS for path in (ROOT / part).glob("*.py"))]
    known = "whats,nd"  # the title of a question; a class of Unicode
    command = [sys.executable, "-m", "codespell_lib", "-L", known, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the six commands of README.md, from a chat file to a talking model


MAINS = {"download.py": download.main, "data.py": data.main, "train.py": train.main, "generate.py": generate.main}


@pytest.fixture
def run_commands(monkeypatch):
    """run_commands(commands, text to be typed) -> what each printed on stdout. In this process: each of them by itself
    would import torch again."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    skip_plots(monkeypatch.setattr)

    def run(commands: list[list[str]], typed: str = "") -> list[str]:
        outputs = []
        for _, script, *argv in commands:
            monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert exit_status(MAINS[script], argv) == 0, (script, argv)
            outputs.append(out.getvalue())
        return outputs

    yield run
    signal.set_wakeup_fd(-1)


TOWNS = "Arlo Bexa Cimar Dorne Elta Fyn Gandor Hesk Ilyra Jupa Kolm Lenza Mirth Nacre Orlan Pell Quist Runa Sabel Tarn"
GOODS = "red blue oak iron salt corn gold silk rain wool fish wine coal tea jade moss rope sand clay milk"
OPENINGS = ("", "Please say: ", "I forgot. ", "Quick one: ", "Hello! ")
FORMS = ("What does {} sell?", "Which thing is sold in {}?", "{} is known for what?")
# Flags that make the printed commands fit a tiny model
TINY = "--seq_len=128 --micro_batch=8 --steps=60 --lr=5e-3 --eval_every=0 --compile=none --dtype=fp32 --log_every=40"


def write_chats(path: Path) -> dict[str, str]:
    """Writes 20 facts, each as the answer to 10 phrasings of a question -> an eleventh phrasing: the answer."""
    chats, facts, r = [], {}, random.Random(0)
    asked = [opening + form for opening in OPENINGS for form in FORMS]
    for town, good in zip(TOWNS.split(), GOODS.split(), strict=True):
        *phrasings, other = [form.format(town) for form in r.sample(asked, 11)]
        facts[other] = f"It is {good}."
        chats += [{"prompt": phrasing, "completion": facts[other]} for phrasing in phrasings]
    r.shuffle(chats)
    path.write_text("".join(json.dumps(row) + "\n" for row in chats))
    return facts


def test_six_commands_teach_a_model_to_talk(tmp_path, monkeypatch, run_commands):
    """As they are printed, but for the launcher, which has tests of its own, and with small sizes: 20 facts, each in 10
    of 15 phrasings, are told when they are asked for in an eleventh."""
    monkeypatch.chdir(tmp_path)
    facts = write_chats(tmp_path / "chats.jsonl")
    tokenizer = load_tokenizer(_write(tmp_path, tokenizer__json=_json("qwen")))
    random = fill(Transformer(replace(MODELS["tiny-qwen3"], vocab_size=tokenizer.vocab_size)))
    export_model(random, tmp_path / "model", tokenizer=tokenizer)
    six = commands(ROOT / "README.md")[-6:]
    assert six[0][1] == "download.py" and len(facts) == 20
    for words in six:
        if words[0] == "bash":
            words[:2] = ["python", "train.py"]
        words += TINY.split() if words[1] == "train.py" else []
    ask = six[4][: six[4].index("--prompt") + 1]
    model = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with serve(tmp_path, monkeypatch, {"models/Qwen/Qwen3-0.6B": model}):
        questions = [[*ask, question] for question in facts]
        outputs = run_commands(six + questions, typed=f"{next(iter(facts))}\n")
    assert "[[It is " in outputs[1]
    first, second = outputs[4].split("> And why?")
    assert first.startswith("> What is it?") and "It is" in first and "It is" in second
    answers = [text.strip() for text in outputs[6:]]
    reports = sum(answer == fact for answer, fact in zip(answers, facts.values(), strict=True))
    assert reports >= 18, answers
    assert outputs[5].strip() == answers[0]
    hf = tmp_path / "runs/chats/hf"
    theirs = transformers.AutoTokenizer.from_pretrained(hf)
    model = transformers.AutoModelForCausalLM.from_pretrained(hf)
    for question, answer in list(zip(facts, answers, strict=True))[:3]:
        ask = [{"role": "user", "content": question}]
        prompt = theirs.apply_chat_template(ask, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        output = model.generate(prompt, max_new_tokens=30, do_sample=False)[0, prompt.shape[1] :]
        assert theirs.decode(output) == f"{answer}<|im_end|>"  # and not a word more


# ---- the changes that guide/8 prints

# Runs in the changed copy and checks each change by an effect that only this change has.
INSIDE = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch
import log, memory, train
from config import parse_args
from data import make_loader
from model import MODELS, Transformer
from optim import make_optimizer
from attention import rope_frequencies
from hf.tokenizer import load_tokenizer
from hf.families import config_json, read_config

log.peak_flops, log.Log.draw = (lambda *_: (1e12, "not measured")), (lambda *_, **__: None)  # these take seconds

base = "--compile none --dtype fp32 --seq_len 32 --micro_batch 2 --eval_every 0 --log_every 1 --schedule constant"
base += " --state_dtype bf16 --warmup_steps 0 --data rows.fasta --text_field sequence --model tiny-relu"
base += " --optimizer lion"
for run in ("--steps 4 --out whole", "--steps 2 --out parts", "--steps 4 --out parts"):
    assert train.main([*base.split(), *run.split()]) == 0, run
rope = base.replace("relu", "ntk").replace("lion", "adamw")
assert train.main([*rope.split(), "--steps", "1", "--out", "rope"]) == 0

for words in json.loads(sys.argv[1]):  # the page's commands
    parse_args(words, trains=True)
config = parse_args(base.split())
torch.manual_seed(0)
model = Transformer(config.model_config)
for p in model.parameters():
    torch.nn.init.normal_(p)
mlp, x = model.layers[0].mlp, torch.randn(3, 64)
assert torch.equal(mlp(x), (x @ mlp.up_proj.weight.T).clamp(min=0) @ mlp.down_proj.weight.T)

before = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = make_optimizer(model, replace(config, weight_decay=0.0, state_dtype="bf16"))
for p in model.parameters():
    p.grad = torch.randn_like(p)
optimizer.step(config.lr, torch.tensor(1.0), torch.tensor(0.0))
assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
moments = sum(2 * p.numel() for p in model.parameters())
assert memory.state(config, 1)["optimizer state"] == moments  # plan.py counts one of two bytes for each weight
moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
for step in moved.values():  # each weight moves by the learning rate
    assert torch.allclose(step.abs(), torch.full_like(step, config.lr), rtol=1e-2)

ids = next(iter(make_loader(config)))[0].tokens.flatten().tolist()
text = load_tokenizer("bytes").decode(ids)
assert "MKV" * 21 in text and ">" not in text and "number" not in text

plain, ntk = (rope_frequencies(MODELS[name], torch.device("cpu"))[0] for name in ("tiny-llama", "tiny-ntk"))
tiny = MODELS["tiny-llama"]
wider = replace(tiny, rope_theta=tiny.rope_theta * 4 ** (tiny.head_dim / (tiny.head_dim - 2)))  # the paper's form
assert torch.allclose(ntk, rope_frequencies(wider, torch.device("cpu"))[0])
Path("config.json").write_text(json.dumps(config_json(MODELS["tiny-ntk"], "float32")))
assert read_config(Path()) == MODELS["tiny-ntk"]
"""


def apply_hunks(page: str, folder: Path) -> dict[str, int]:
    """Replaces the old lines of each hunk by the new ones -> number of added lines by file."""
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
    copy_sources(tmp_path)
    page = CHANGED.read_text("utf-8")
    added = apply_hunks(page, tmp_path)
    assert len(added) == 8 and sum(added.values()) < 50, added
    lines = "\n".join(["MKV" * 20] * 3)
    (tmp_path / "rows.fasta").write_text("".join(f">number {i}\n{lines}\n" for i in range(200)))
    for part in ("launch", "bench"):  # ruff's order of imports depends on them
        (tmp_path / part).symlink_to(ROOT / part)
    script = re.findall(r"^bash (test\.sh)", page, re.M)[-1]
    ruff = re.findall(r'^"\$python" -m ruff .*', (ROOT / script).read_text(), re.M)
    assert len(ruff) == 2
    for line in ruff:
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env={"python": sys.executable}, capture_output=True)
        assert not done.returncode, done.stdout.decode()
    words = [shlex.split(line)[2:] for line in re.findall(r"^python train.py .*", page, re.M)]
    assert len(words) == 4
    command, env = [sys.executable, "-c", INSIDE, json.dumps(words)], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No export to hf/" in done.stdout
    whole, parts = records(tmp_path / "whole"), records(tmp_path / "parts")
    assert [r["loss"] for r in whole] == [r["loss"] for r in parts] and len(whole) == 4
    assert all(r["perplexity"] == pytest.approx(math.exp(r["loss"]), rel=1e-5) for r in whole)


# ---- recipes

EVERY = sorted(path.name for path in (ROOT / "recipes").glob("*.args"))
RUN = [name for name in EVERY if "-70b" not in name]  # those differ from the 7B's and 8B's in learning rates only
WITH_DATA = [name for name in EVERY if "data" in with_recipes([f"@recipes/{name}"])]
RECIPES = [name for name in EVERY if name not in WITH_DATA]
CHATS = [name for name in WITH_DATA if "sft" in name or "lora" in name]
FRESH = ["--weights=", "--load=direct"]  # the real weights are not on this machine
# Sizes of 0 are those of the tiny model.
SHORT = "--seq_len=64 --micro_batch=1 --batch_tokens=0 --steps=1 --eval_batches=1 --sample_every=0 --log_every=1 "
SHORT += "--eval_every=1 --vocab_size=0 --dim=0 --n_layers=0 --n_heads=0 --n_kv_heads=0 --ffn_dim=0 --compile=none"


def write_sources(folder: Path) -> dict[str, list[str]]:
    """Writes small files and a model -> flags that replace a recipe's data and weights by them."""
    (folder / "text.txt").write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(500)))
    for split in ("train-0", "train-1", "train-2", "validation-0"):
        answer = {"role": "assistant", "content": f"It is one of {split}."}
        chats = [{"messages": [{"role": "user", "content": f"What is {i}?"}, answer]} for i in range(90)]
        rows = [{"text": f"{split} row {i} " * 9, "url": "x"} for i in range(90)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
        pairs = [{"prompt": f"{i}?", "chosen": f"{i}.", "rejected": "No."} for i in range(90)]
        (folder / f"{split}.pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
        (folder / f"{split}.json.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    model = fill(Transformer(replace(MODELS["tiny-llama"], ffn_dim=192)))  # blocks of NF4 divide it
    export_model(model, folder / "base")
    files = ["--tokenizer=bytes", "--data", f"{folder}/train-*%s", "--val_data", f"{folder}/validation-*%s"]
    return {
        "text": ["--data", str(folder / "text.txt")],
        "chats": [word.replace("*%s", "?.jsonl").replace("%s", ".jsonl") for word in files],
        "pairs": [word.replace("%s", ".pairs.jsonl") for word in files],
        "stream": [*(word.replace("%s", ".json.gz") for word in files), "--stream", "--lanes=4"],
        "weights": ["--ffn_dim=192", "--weights", str(folder / "base")],
    }


def shorten(recipe: str, sources: dict[str, list[str]], out: Path) -> list[str]:
    """The recipe's words, with a tiny model and small files."""
    tiny = next((tiny for tiny in ("gpt", "mixtral", "qwen3", "gemma3") if tiny in recipe), "llama").replace(
        "gpt", "gpt2"
    )
    words = [f"@recipes/{recipe}", *FRESH, "--model", f"tiny-{tiny}", *SHORT.split(), "--out", str(out)]
    words += ["--context_parallel=2"] * (recipe.endswith("k.args"))  # ranks
    words += sources["weights"] * ("lora" in recipe)
    if "dpo" in recipe:
        return words + sources["pairs"]
    return words + sources["text" if recipe in RECIPES else "chats" if recipe in CHATS else "stream"]


def test_recipes_run_on_one_or_two_processes(tmp_path, run_commands):
    """On one if they are made for one device."""
    sources, runs = write_sources(tmp_path), {True: [], False: []}
    for recipe in RUN:
        alone = recipe == "default.args" or " on 1 x 1 " in (ROOT / "recipes" / recipe).read_text()
        runs[alone].append(shorten(recipe, sources, tmp_path / recipe / "run"))
    assert len(runs[True]) == 7
    run_commands([["python", "train.py", *words] for words in runs[True]])
    train_in_turn(*runs[False])
    for recipe in RUN:
        run = tmp_path / recipe / "run"
        (record,) = records(run)
        assert record["step"] == 1
        if "dpo" in recipe:
            assert record["loss"] == pytest.approx(math.log(2)) and record["val_reward_margin"] != 0
            continue
        assert 3 < record["loss"] < 7
        assert 3 < record["val_loss"] < 7
        if recipe in WITH_DATA:
            head, log = (ROOT / "recipes" / recipe).read_text(), (run / "log.txt").read_text()
            assert (".venv/bin/python -m pip install pyarrow" in head) == (".parquet" in head)
            assert "python download.py" in head
            env = json.loads((run / "env.json").read_text())
            assert env["attention"].endswith(", boolean mask") == (recipe in CHATS) and env["data"]["val"]
            assert recipe not in CHATS or "tokens of answers, 0 truncated" in log


@pytest.mark.parametrize("recipe", RECIPES)
def test_headers_state_the_computed_sizes(recipe):
    header = (ROOT / "recipes" / recipe).read_text().partition("\n--")[0]
    config = settled_args([f"@recipes/{recipe}", *FRESH, "--dtype", "bf16"])  # `auto` has no optimizer yet
    number, unit = re.search(r"([\d.]+) ([BM]) parameters", header).groups()
    total = sum(plan.elements(config, 1))
    assert float(number) * {"B": 1e9, "M": 1e6}[unit] == pytest.approx(total, rel=5e-3)
    flops = re.search(r"([\d.]+) (GFLOP per token|TFLOP per row|PFLOP)", header)
    tokens = {"GFLOP per token": 1e-9, "TFLOP per row": 1e-12 * config.seq_len}
    tokens["PFLOP"] = 1e-15 * config.steps * config.batch_tokens
    computed = tokens[flops[2]] * flops_per_token(config.model_config, config.seq_len)
    assert float(flops[1]) == pytest.approx(computed, rel=5e-3 if flops[2] != "PFLOP" else 0.05)
    if config.batch_tokens and flops[2] != "PFLOP":
        assert f"Each step: {config.batch_tokens:,} tokens" in header


def test_fine_tuning_starts_from_the_weights_that_the_header_names():
    for name in ("llama3-8b", "llama3-8b-sft", "llama3.1-405b", "qwen3-4b-sft", "gemma3-1b-sft"):
        weights = parse_args([f"@recipes/{name}.args"]).weights
        head = (ROOT / f"recipes/{name}.args").read_text()
        assert weights.startswith(("meta-llama/", "Qwen/", "google/"))
        assert f"Needs, once:  python download.py {weights} " in head
