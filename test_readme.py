"""README.md, guide/ and the pages beside them: every command is understood, every link leads somewhere, every quoted
message is one of ours. That the changes which guide/8 prints work is in test_guide.py."""

import argparse
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import data
import generate
import plan
from checkpoint import parse as parse_checkpoint
from config import parse_args
from download import make_parser as make_download_parser
from lib.errors import ROOT
from lib.weights import config_json
from model import MODELS

sys.path.insert(0, str(ROOT / "launch"))
sys.path.insert(0, str(ROOT / "bench"))

PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "BENCHMARKS")]
PAGES += sorted((ROOT / "guide").glob("*.md"))
VERBS = re.findall(r"\w+", re.search(r"^  (train \| .*)\) verb=", (ROOT / "launch.sh").read_text(), re.M)[1])
OTHERS = "cat cd export nano pip scancel squeue srun ssh ssh-copy-id tail tmux torchrun .venv/bin/python .venv/bin/hf"


def commands(page: Path) -> list[list[str]]:
    """The words of each line of the page's ```sh blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


CHANGED = ROOT / "guide" / "8-change-it.md"  # whose commands are of a changed flatland: test_guide.py runs them
COMMANDS = [(page.relative_to(ROOT), words) for page in PAGES if page != CHANGED for words in commands(page)]


class Understood(Exception):
    pass


def parse_script(script: str, words: list[str], monkeypatch) -> None:
    """What a script makes of its words, up to the point where it would do something."""
    main_parsers = {
        "train.py": lambda words: parse_args(words, trains=True),
        "plan.py": plan.parse,
        "generate.py": generate.parse,
        "checkpoint.py": parse_checkpoint,
        "download.py": lambda words: make_download_parser().parse_args(words),
    }
    if script in main_parsers:
        return main_parsers[script](words)
    if script == "data.py" and words[0] == "show":
        monkeypatch.setattr(data, "show", lambda config, n, colour: [])
        return data.run_show(words[1:])
    parse = argparse.ArgumentParser.parse_args

    def stop(parser, *args):
        parse(parser, *args)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    sys.path.insert(0, str((ROOT / script).parent))
    monkeypatch.setattr(sys, "argv", [script, *words])
    main = __import__(Path(script).stem).main
    with pytest.raises((Understood, SystemExit)) as end:
        main(*[words] * len(inspect.signature(main).parameters))
    assert end.type is Understood or not end.value.code


def without_launcher_flags(words: list[str]) -> list[str]:
    while words and words[0] in ("--hosts", "--nproc", "--retries", "--detach"):
        words = words[1 if words[0] == "--detach" else 2 :]
    return words


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stands for whatever a command would find on the hub: a model that is small, with a tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(config_json(MODELS["tiny-llama"], torch.float32)))
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("config.local_path", lambda spec, flag: tmp_path)
    return tmp_path


@pytest.mark.parametrize("page, words", COMMANDS, ids=[f"{page}:{shlex.join(words)[:60]}" for page, words in COMMANDS])
def test_commands_are_understood(page, words, folder, monkeypatch):
    words = [word.replace("NAME", "x").replace("$RUN", "x") for word in words if not re.fullmatch(r"\w+=.*", word)]
    words = words[: words.index("|")] if "|" in words else words
    words = words[: words.index("&&")] if "&&" in words else words
    if words[:2] == ["bash", "launch.sh"]:
        verb = words[2] if len(words) > 2 and words[2] in VERBS else "train"
        rest = without_launcher_flags([word for word in words[2:] if word != verb])
        trains = verb == "train" or (verb == "doctor" and rest)
        assert not trains or parse_args(rest, trains=True)
        assert trains or all(re.fullmatch(r"--out|--now|--hosts|runs/\S+|[\w,.-]+|\d+", word) for word in rest), words
    elif words[0] == "python" and words[1:2] != ["-m"]:
        parse_script(words[1], words[2:], monkeypatch)
    elif words[0] == "sbatch":
        parse_args(words[words.index("train.sbatch") + 1 :], trains=True)
    elif words[:2] == ["bash", "test.sh"]:
        assert not words[2:] or words[2] in ("-k", "-m")
    else:
        assert words[0] in OTHERS.split(), words


def test_folders_of_runs_are_those_that_commands_make(folder):
    """A page that tells of runs/X has a command that trains into it."""
    for page in PAGES:
        if page == CHANGED:
            continue
        launches = [words[words.index("train.sbatch") + 1 :] for words in commands(page) if "train.sbatch" in words]
        launches += [
            words[2:] for words in commands(page) if words[:2] in (["bash", "launch.sh"], ["python", "train.py"])
        ]
        trained = [without_launcher_flags(w) for w in launches if not w or w[0] not in VERBS]
        made = {"runs/default", *(parse_args(words, trains=True).out for words in trained)}
        shown = set(re.findall(r"\bruns/[\w.-]+\w", page.read_text("utf-8"))) - {"runs/NAME"}
        assert page.name == "BENCHMARKS.md" or shown <= made, (page.name, shown - made)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_lines_are_short(page):
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for name in re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|sh|md|args|sbatch))`", text):
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "recipes", ROOT / "launch", ROOT / "bench")), (
            name
        )
    assert page.name == "BENCHMARKS.md" or [line for line in text.splitlines() if len(line) > 120] == []
    sentences = re.findall(r"[A-Z][^.|`]{60,}\.", text)
    assert len(sentences) == len(set(sentences))


def test_readme_is_read_in_two_minutes():
    assert (ROOT / "README.md").read_text("utf-8").count("\n") <= 150


def test_the_picture_of_the_files_is_true():
    """Each source file of the root is in it, and imports none that stands above it."""
    picture = (
        (ROOT / "README.md").read_text("utf-8").partition("## The files")[2].split("```")[1].partition("launch.sh")[0]
    )
    lines = [re.findall(r"(\w+)\.py\b", line) for line in picture.splitlines()]
    floor = {name: number for number, names in enumerate(lines) for name in names}
    sources = [*ROOT.glob("*.py"), *ROOT.glob("lib/*.py")]
    files = {path.stem: path for path in sources if not re.match("test_|conftest", path.name)}
    assert floor.keys() == files.keys()
    for name, path in files.items():
        code = re.sub(r"from lib import", "import", path.read_text("utf-8"))
        imported = set(re.findall(r"^\s*(?:from|import) (?:lib\.)?(\w+)", code, re.M)) & files.keys()
        assert [other for other in imported if floor[other] < floor[name]] == [], name


def test_quoted_messages_are_ours():
    sources = [*ROOT.glob("*.py"), *ROOT.glob("lib/*.py"), *ROOT.glob("*.sh"), *ROOT.glob("launch/*.py")]
    code = "".join(path.read_text("utf-8") for path in sources if not path.name.startswith("test_"))
    page = (ROOT / "guide" / "6-when-something-goes-wrong.md").read_text("utf-8")
    quoted = re.findall(r"^- `([^`]+)`:", page, re.M)
    assert len(quoted) > 15 and [words for words in quoted if words not in code] == []


def test_spelling():
    """codespell knows common misspellings; comments and docstrings of the sources are read, too."""
    words = "whats,nd"  # the title of a question; a class of Unicode
    files = [
        *PAGES,
        *ROOT.glob("*.py"),
        *ROOT.glob("lib/*.py"),
        *ROOT.glob("launch/*.py"),
        *ROOT.glob("bench/*.py"),
        *ROOT.glob("recipes/*.args"),
    ]
    command = [sys.executable, "-m", "codespell_lib", "-L", words, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
