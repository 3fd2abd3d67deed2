"""The command line: what was typed is the oracle."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import config
from attention import BACKENDS, PACKED
from base.errors import UserError
from config import check_batch, parse_args
from hf.families import config_json
from inputs import settle_inputs, settle_model
from model import MODELS

ROOT = Path(config.__file__).parent
FIELDS = config.FIELDS
INTERNAL = ("test_", "curves")  # log.py starts curves.py
SCRIPTS = [p.name for p in sorted(ROOT.glob("*.py")) if not p.name.startswith(INTERNAL) and "__main__" in p.read_text()]


def refused(*words: str, trains: bool = False) -> str:
    with pytest.raises(UserError) as error:
        config = parse_args(list(words), trains)
        settle_inputs(config) if trains else settle_model(config)
    return str(error.value)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a recipe into a repository that is not the current folder."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(config, "ROOT", tmp_path)

    def write(name: str, text: str) -> str:
        (tmp_path / "recipes" / f"{name}.args").write_text(text)
        return f"@recipes/{name}.args"

    return write


# ---- words


@pytest.mark.parametrize("words, changes", [
    ("--seq_len 64", {"seq_len": 64}), ("--seq_len=64", {"seq_len": 64}), ("--seq-len 64", {"seq_len": 64}),
    ("--seq-len=64", {"seq_len": 64}), ("--seq_len 8 --seq-len=64", {"seq_len": 64}), ("--lr 1", {"lr": 1.0}),
    ("--check", {"check": True}), ("--delimiter -1", {"delimiter": -1}), ("--out='--a-b=c d'", {"out": "--a-b=c d"}),
    ("--track wandb,tensorboard", {"track": ("wandb", "tensorboard")}),
    *((f"--deterministic{word} --steps 7", {"deterministic": value, "steps": 7})
      for word, value in {"": True, "=on": True, "=off": False, " true": True, " FALSE": False}.items()),
])  # fmt: skip
def test_spellings_and_types_and_later_wins(words, changes):
    assert parse_args(shlex.split(words)) == dataclasses.replace(parse_args([]), **changes)


@pytest.mark.parametrize("field", [f for f in FIELDS if f.metadata["choices"]], ids=lambda f: f.name)
def test_choices(field):
    assert field.default in field.metadata["choices"]
    assert field.name != "attention" or field.metadata["choices"] == ("auto", *BACKENDS, *PACKED)
    needed = {"fp8": ["--fp8=tensor"], "weights": ["--weights", str(ROOT), "--model=tiny-llama"]}
    needed["lora"] = ["--lora=4", "--ffn_dim=192"]
    for choice in field.metadata["choices"]:
        words = [f"--{field.name}={choice}", *["--dpo_beta=2"] * (choice in ("simpo", "sigmoid_norm"))]
        words += ["--eval_score=x"] * (choice == "score_acc")
        words += [*(word for flag in field.metadata["needs"] for word in needed.get(flag, []))]
        assert getattr(parse_args(words), field.name) == choice
    message = refused(f"--{field.name}=nonsense")
    assert f"--{field.name}: invalid choice: 'nonsense'" in message
    assert all(choice in message for choice in field.metadata["choices"])


# ---- folders


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "Tiny-9B").mkdir()
    found = config_json(dataclasses.replace(MODELS["tiny-gpt2"], n_layers=3), "float32")
    (tmp_path / "Tiny-9B/config.json").write_text(json.dumps(found))
    return str(tmp_path / "Tiny-9B")


def test_a_folder_brings_its_model_and_tokenizer(folder):
    c = settle_model(parse_args(["--model", folder]))
    assert c.model_config == dataclasses.replace(MODELS["tiny-gpt2"], n_layers=3)
    assert (c.tokenizer, c.weights, Path(c.out)) == ("bytes", "", Path("runs/Tiny-9B"))
    assert settle_model(parse_args(["--model", folder, "--n_layers", "2"])).model_config == MODELS["tiny-gpt2"]
    assert parse_args([]).model == "tiny-llama" and parse_args(["--weights", folder]).model == folder
    assert parse_args(["--weights", folder, "--model=tiny-gpt2"]).model == "tiny-gpt2"
    (Path(folder) / "tokenizer.model").touch()
    for words in (["--weights", folder], ["--model", folder], ["--weights", folder, "--model", "tiny-gpt2"]):
        assert settle_model(parse_args(words)).tokenizer == folder
    assert settle_model(parse_args(["--weights", folder, "--tokenizer", "bytes"])).tokenizer == "bytes"


# ---- recipes


def test_recipes_hold_comments_quotes_and_other_recipes(recipe):
    recipe("base", "--steps 5   # five\n\n# --steps 6\n--lr=1e-3 --out 'to be # or \"not\"'\n")
    c = parse_args([recipe("own", '@recipes/base.args --data "a b.txt"\n c.bin\n--steps 7\n')])
    assert (c.steps, c.lr, c.out, c.data) == (7, 1e-3, 'to be # or "not"', ("a b.txt", "c.bin"))


@pytest.mark.parametrize("words, steps", [
    ("A --steps 3", 3), ("--steps 3 A", 1), ("A B", 2), ("B A B", 2), ("A @here.args", 9), ("--epochs 2 A", 1),
])  # fmt: skip
def test_later_flags_and_recipes_win(recipe, words, steps):
    places = {"A": recipe("a", "--steps 1 --lr 1e-3"), "B": recipe("b", "--steps 2")}
    Path("here.args").write_text("--steps 9")
    c = parse_args([places.get(word, word) for word in words.split()])
    assert (c.steps, c.lr, c.epochs) == (steps, 1e-3, 0)


def test_flags_after_a_recipe_replace_what_belongs_to_them(recipe):
    """--data the recipe's --val_data, and --epochs and --steps each other."""
    both = recipe("both", "--data a.txt --val_data b.txt c.txt --steps 3")
    assert parse_args([both, "--data=d.txt"]).val_data == ()
    assert parse_args([both, "--val_data", "e.txt", "--data", "d.txt"]).val_data == ("e.txt",)
    assert parse_args(["--data", "d.txt", both]).val_data == ("b.txt", "c.txt")
    c = parse_args([recipe("epochs", "--epochs 2"), "--steps=7"])
    assert (c.steps, c.epochs, parse_args([both, "--epochs", "0.5"]).epochs) == (7, 0, 0.5)


@pytest.mark.parametrize("words, warns", [
    ("--steps 10 --warmup_steps 11", "--warmup_steps 11"), ("--steps 10 --warmup_steps 10", ""), ("--steps 1", ""),
    ("--steps 10 --warmup_steps 0 --schedule wsd --decay_steps 50", "--decay_steps: only 10 steps"),
    ("--steps 10 --warmup_steps 0 --schedule wsd --decay_steps 10", ""), ("--seq_len 3000", ""),
    ("--schedule constant --min_lr 1e-5", "--min_lr has no effect"), ("--prompt x", "--prompt has no effect"),
    ("--weights FOLDER --seq_len 2048", ""), ("--weights FOLDER --seq_len 2049", "trained on rows of 2048 tokens"),
])  # fmt: skip
def test_a_schedule_and_rows_that_are_too_long_are_reported(words, warns, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(MODELS["tiny-llama"], "float32")))
    warnings = settle_model(parse_args(words.replace("FOLDER", str(tmp_path)).split())).warnings
    assert len(warnings) == bool(warns) and all(warns in warning for warning in warnings)


@pytest.mark.parametrize("text, message", [
    ("--steps 1\n--prompt 'abc\n", "own.args: No closing quotation"), ("--stepps 3", "own.args: .*--stepps 3; did"),
    ("# --lr\n--lr x", "own.args: argument --lr: invalid float value"), ("--steps 5\n stray", "arguments: stray"),
    ("--lr 1\n--min_lr 2", "own.args: --min_lr 2.0 is above --lr 1.0"), ("secret:x:1", "own.args is not a recipe"),
    ("@zzzz", "@zzzz: this recipe does not exist; `bash"), ("@recipes/own.args", "own.args: a recipe names itself"),
])  # fmt: skip
def test_mistakes_in_a_recipe_are_named(recipe, text, message):
    said = refused(recipe("own", text))
    assert re.search(message, said) and "secret" not in said and len(said) < 200


# ---- what is refused, and what is said of it


@pytest.mark.parametrize("words, message", [
    ("--steps 1.5", "--steps: invalid int value: '1.5'"), ("--steps", "--steps: expected one argument"),
    ("--steps 5 stray", "arguments: stray"), ("-x", "arguments: -x"), ("--check maybe", "on\\|off value: 'maybe'"),
    ("--data=", "--data  does not exist"), ("--compile 0", "--compile: invalid choice: '0'"),
    ("--batch 4 --stpes 5", "mean --micro_batch, --steps\\?"), ("--STEPS 4", "mean --steps\\?"),
    ("--stpes 5", "--stpes 5; .* --steps\\?; "), ("--sequ-len", "arguments: --sequ_len; .* --seq_len\\?; "),
    ("--data a.bin --sample_every 5", "--sample_every needs the --tokenizer"),
    ("--model lama2-7b", "unknown; did you mean llama2-7b\\? --help lists all"), ("--foo", "arguments: --foo; --help"),
    ("--model Llama-3-8B", "did you mean llama3-8b"), ("--model a/b", "unknown; --help lists all"),
    ("--data a.txt recipes/gpt2-124m.args", "gpt2-124m.args: a recipe begins with @"),
    ("--n_layers 2147483648", "no machine holds it: 2147483648 layers"),
    (f"--vocab_size {2**50}", f"no machine holds it.*{2**50} x 64"), (f"--dim {2**40} --n_heads 4", "no machine holds"),
    ("--min_lr 0.02 --lr 0.01", "--min_lr 0.02 .*--lr 0.01"),
    ("--delimiter 258", "--delimiter 258: the ids of tiny-llama are below 258"),
    ("--model gpt2 --seq_len 1025", "--seq_len 1025: gpt2 has 1024 learned positions"),
    ("--model llama3-8b --n_heads 12", "--model llama3-8b with other sizes: .*n_kv_heads 8"),
    ("--dim 66", "--model tiny-llama with other sizes: dim 66 .*n_heads 4"), ("--dim 36", "even head_dim, not 9"),
    ("--fp8_skip down_proj", "no effect without --fp8"), ("--fp8_all_gather on", "no effect without --fp8"),
    ("--load rank0", "no effect without --weights"), ("--data a.txt --lanes 1", "no effect without --stream"),
    ("--epochs 2 --steps 9", "exclude each other"), ("--lora 8 --tokenizer bytes", "--lora 8 without --weights"),
    ("--model llama3-8b --context_parallel 3", "must divide the 32 heads"),
    ("--model llama3-8b --context_parallel 4 --seq_len 4098", "--seq_len 4098$"),
    *((allowed, "") for allowed in (
        "--lr=0.01 --min_lr=0.01", "--model=gpt2 --seq_len=1024", "--model=llama2-7b --seq_len=5000", "--delimiter=257",
        "--stream --lanes=4", "--data=hf://datasets/a/b/c.jsonl --lanes=4", "--data=README.md --tokenizer bytes",
        "--data=a.bin --val_data=hf://datasets/a/b/c.jsonl --lanes=4")),
], ids=lambda text: text[:40])  # fmt: skip
def test_mistakes_are_named(words, message):
    if message:
        assert re.search(message, refused(*words.split(), trains="--lora" in words or "--data" in words))
    else:  # it is just allowed
        settle_model(parse_args(words.split()))


@pytest.mark.parametrize("flag, value", [(flag, value) for flags, values in [
    ("steps seq_len timeout", "0 -5"), ("delimiter lanes", "-2"), ("keep", "1 0"), ("beta1 beta2", "1 -0.1 nan"),
    ("seed vocab_size dim n_layers micro_batch batch_tokens seq_len steps timeout eval_batches", f"{2**70}"),
    ("batch_tokens shard_size prefetch log_every eval_every save_every sample_every n_heads n_kv_heads ffn_dim", "-1"),
    ("warmup_steps decay_steps weight_decay clip min_lr", "-0.1 nan"), ("warmup_steps decay_steps", "inf"),
    ("lr", "0 -1 nan inf"),
] for flag in flags.split() for value in values.split()])  # fmt: skip
def test_ranges(flag, value):
    assert f"argument --{flag}: {value} must be at least " in refused(f"--{flag}={value}")


@pytest.mark.parametrize("words, missing", [
    ("", "name --data"), ("--data a.jsonl:0.5 b.bin:0.5", "--tokenizer bytes"), ("--data tokens.v2", ""),
    ("--data b.bin --val_data a.txt.gz", "--tokenizer bytes"),
    ("--tokenizer bytes", ""), ("--data a --tokenizer bytes", ""),
])  # fmt: skip
def test_what_was_forgotten_is_refused_where_tokens_are_not_bytes(tmp_path, monkeypatch, words, missing):
    monkeypatch.chdir(tmp_path)
    Path("tokens.v2").mkdir()
    Path("tokens.v2/a.bin").touch()
    for name in ("a", "a.jsonl", "b.bin", "a.txt.gz"):
        Path(name).touch()
    for vocab_size, beside in ((1024, False), (1025, False), (32000, True)):
        found = config_json(dataclasses.replace(MODELS["tiny-gpt2"], vocab_size=vocab_size), "float32")
        Path("config.json").write_text(json.dumps(found))
        Path("tokenizer.json" if beside else "other.json").touch()
        argv = ["--model", str(tmp_path), *words.split()]
        if missing and vocab_size > 1024 and not (beside and words):
            assert missing in refused(*argv, trains=True)
        else:
            settle_inputs(parse_args(argv, trains=True))
        settle_model(parse_args(argv))


# ---- sizes


@pytest.mark.parametrize("words, base, sizes", [
    ("--n_heads 16", "llama2-7b", {"n_heads": 16, "n_kv_heads": 16, "head_dim": 256}),  # as many as heads, still
    ("--n_heads 16", "llama3-8b", {"n_heads": 16, "n_kv_heads": 8, "head_dim": 256}),  # grouped, still
    ("--n_kv_heads 4", "llama3-8b", {"n_kv_heads": 4}), ("--dim 4096", "llama2-70b", {"dim": 4096, "head_dim": 64}),
    ("--dim 1024 --n_heads 8", "gpt2", {"dim": 1024, "n_heads": 8, "n_kv_heads": 8, "head_dim": 128}),
    ("--model llama2-7b --dim 8192 --n_layers 80 --n_heads 64 --n_kv_heads 8 --ffn_dim 28672", "llama2-70b", {}),
])  # fmt: skip
def test_heads_follow_the_sizes_and_sizes_make_one_model_of_another(words, base, sizes):
    c = parse_args(["--model", base, *words.split()])
    assert c.model_config == dataclasses.replace(MODELS[base], **sizes)


@pytest.mark.parametrize("batch_tokens, near", [(1000, 1024), (10, 128), (129, 128)])
def test_batch_arithmetic(batch_tokens, near):
    c = parse_args(f"--micro_batch 4 --seq_len 16 --batch_tokens {batch_tokens}".split())
    with pytest.raises(UserError, match=f"{batch_tokens} .*4 x 16 x 2 = 128; the nearest multiple is {near}$"):
        check_batch(c, 2)
    check_batch(dataclasses.replace(c, batch_tokens=near), 2)
    check_batch(dataclasses.replace(c, batch_tokens=near, context_parallel=4), 8)


# ---- the run folder


@pytest.mark.parametrize("words, out", [
    ("--model tiny-gpt2", "runs/tiny-gpt2"), ("RECIPE --data /far/away/my_book.txt", "runs/default-my_book"),
    ("RECIPE --data a.txt b/", "runs/default-a-b"), ("RECIPE --data a.txt --out mine", "mine"),
    ("RECIPE --data fineweb-1.5 v2.1/c4.en.json.gz:0.3 x.y.bin", "runs/default-fineweb-1.5-c4.en-x.y"),
    *((f"--{flag} {model} --data a.txt", f"runs/{name}-a") for flag in ("weights", "model") for model, name in {
        "runs/talks/hf": "talks-hf", "org/Llama-3.1-8B": "Llama-3.1-8B", "x/a.gz": "a.gz", ".": "elsewhere"}.items()),
])  # fmt: skip
def test_out_is_named_after_recipe_or_model_and_data(recipe, words, out):
    """Though no folder of a model is there."""
    name = recipe("default", "--steps 5")
    assert Path(parse_args(words.replace("RECIPE", name).split()).out) == Path(out)


def test_run_folders_differ_and_have_names_of_one_line(recipe):
    outs = {parse_args(["--data", data]).out for data in ("books/*.txt", "papers/*.txt", "papers/a*.txt", ".")}
    assert len(outs) == 4 and all(re.fullmatch(r"runs/tiny-llama[\w.-]*", out) for out in outs)
    for name in ("a\nb", "a\x1b[31mb", "a\u2028b"):
        assert repr(f"runs/{name}") in refused("--out", f"runs/{name}")
        assert re.fullmatch(r"runs/a-[\w-]*b", parse_args([recipe(name, "--lr 1")]).out)


# ---- the table of flags


def test_help_shows_every_flag_with_its_default_and_choices(capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(["--help"])
    assert end.value.code == 0
    entries = capsys.readouterr().out.split("\n  --")[1:]
    shown = {entry.split()[0]: "".join(entry.split()) for entry in entries}  # a line may end at any hyphen
    assert set(shown) - {"version"} == {f.name for f in FIELDS} and len(FIELDS) <= 90
    for f in FIELDS:
        default = ",".join(f.default) if isinstance(f.default, tuple) else f.default
        assert "".join(f.metadata["help"].split()) + f"(default:{default})" in shown[f.name]
        assert "|".join(f.metadata["choices"]) in shown[f.name]


# ---- before torch is imported


def imports(script: str, *words: str, status: int) -> set[str]:
    """The modules that a script has imported when it ends, with that status."""
    command = [sys.executable, "-X", "importtime", ROOT / script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    return set(re.findall(r"\| +(\S+)$", done.stderr, re.M))


@pytest.mark.parametrize("script, words, status", [
    ("train.py", "--help", 0), ("train.py", "--stepps 3", 2), ("train.py", "--lr 0 --data a.txt", 2),
    ("download.py", "--help", 0), ("generate.py", "--run x --top_p 3", 2), ("checkpoint.py", "lst x", 2),
])  # fmt: skip
def test_words_are_answered_without_torch(script, words, status):
    imported = imports(script, *words.split(), status=status)
    assert "base.errors" in imported and not imported & {"torch", "numpy", "matplotlib", "transformers", "safetensors"}


def test_a_launcher_s_check_loads_neither_the_compiler_nor_dtensors(tmp_path, monkeypatch, text):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    words = ["--data", text, "--compile", "none", "--out", str(tmp_path / "run"), "--cache", str(tmp_path), "--check"]
    imported = imports("train.py", *words, status=0)
    assert "torch" in imported and not imported & {"torch._dynamo", "torch.distributed.tensor", "sympy", "matplotlib"}


# ---- started by a Python without torch


def copy_sources(folder: Path) -> None:
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, folder)
    for part in ("base", "hf", "dataset", "job"):
        shutil.copytree(ROOT / part, folder / part)


def test_without_torch_scripts_say_how_to_set_up_or_start_the_environment(tmp_path):
    copy_sources(tmp_path)

    def start(script: str, *words: str) -> subprocess.CompletedProcess:
        bare = [sys.executable, "-S", "-E"]  # no site-packages
        return subprocess.run([*bare, tmp_path / script, *words], capture_output=True, text=True, timeout=60)

    for script in SCRIPTS:
        done = start(script, "--help")
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch("error: .*torch.*bash launch.sh setup.*\n", done.stderr)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "<%s>" "$@"\nexit 7\n')
    python.chmod(0o755)
    done = start("train.py", "--prompt", "a b")
    assert (done.returncode, done.stdout) == (7, f"<{tmp_path / 'train.py'}><--prompt><a b>")


@pytest.mark.parametrize("flags, message", [
    ("--data /nope/x.txt", "error: --data /nope/x.txt does not exist"),
    ("--val_data none*.txt:0.5", "error: --val_data none*.txt does not exist"),
    ("--tokenizer nope.json", "error: --tokenizer nope.json: there is no folder or file of this name"),
    ("--weights /nope", "error: --weights /nope: there is no folder or file of this name"),
])  # fmt: skip
def test_missing_files_are_refused_before_torch_is_imported(tmp_path, flags, message):
    (tmp_path / "torch.py").write_text("raise SystemExit(9)")
    (tmp_path / "train.txt").write_text("x")
    words = [*flags.format(tmp=tmp_path).split(), "--out", tmp_path / "run"]
    how = {"capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": str(tmp_path)}}
    done = subprocess.run([sys.executable, ROOT / "train.py", *words], **how)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    found = subprocess.run([sys.executable, ROOT / "train.py", "--data", tmp_path / "t*.txt"], **how)
    assert found.returncode == 9, "torch is imported"
    how["env"]["RANK"] = "0"  # under torchrun the run reports its errors itself
    assert subprocess.run([sys.executable, ROOT / "train.py", "--data", "/nope"], **how).returncode == 9
