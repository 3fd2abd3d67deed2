"""train.py from the outside, as a user meets it: runs of tiny models, their folders, their ends.

Oracles: an uninterrupted run for resume, one process for several, the metrics file for the screen."""

import errno
import json
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import checkpoint
import generate
from config import parse_args
from data import make_loader
from lib import machine, weights
from lib.errors import exit_status
from lib.text import write_shard
from model import Transformer
from shard import fill_parameters
from test_shard import run_code, skip_plots
from train import main as train_main

ROOT = Path(__file__).parent
FAST = ["--compile", "none", "--dtype", "fp32", "--seq_len", "64", "--micro_batch", "4", "--eval_batches", "1"]
LINE = re.compile(r"Batch (\d+) Loss: ([\d.]+), Speed: ([\d.]+) samples/sec, lr: ([\d.]+)")


SCRIPT = "from lib import errors\nimport os, train\n{}\nerrors.run_script(train.main)"


def train(*args, ranks: int = 1, env: dict | None = None, status: int = 0, code: str = ""):
    """train.py as a process of its own, or several; code: a fault in it. -> subprocess.CompletedProcess"""
    done = run_code(SCRIPT.format(code), ["train.py", *map(str, args)], ranks, env)
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def records(run: Path) -> list[dict]:
    """Of metrics.jsonl; what came later than a step's record is added to it."""
    steps = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record)
    return [*steps.values()]


def values(run: Path) -> dict[int, tuple]:
    return {r["step"]: (r["loss"], r["grad_norm"], r.get("val_loss")) for r in records(run)}


def test_a_run_leaves_all_that_it_promises(tmp_path, text):
    run = tmp_path / "run"
    flags = [*FAST, "--data", text, "--steps", 12, "--log_every", 5, "--eval_every", 10, "--save_every", 5]
    run_code("", ["nothing"])  # starts what the processes are forked from
    begin = time.perf_counter()
    done = train(*flags, "--sample_every", 10, "--prompt", "7 and", "--out", run, env={"PLOTS": "yes"})
    wall = time.perf_counter() - begin
    names = {p.name for p in run.iterdir()}
    files = "flags.json env.json status.json metrics.jsonl log.txt curves.png samples.txt checkpoints hf"
    assert names == set(files.split())
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("finished", 12, 0)
    rows = records(run)
    assert [r["step"] for r in rows] == [1, 5, 10, 12]
    assert [r["step"] for r in rows if "val_loss" in r] == [10, 12]
    assert [r["step"] for r in rows if "save_ms" in r] == [5, 10, 12]
    assert [r["tokens"] for r in rows] == [256 * r["step"] for r in rows]
    # the screen, log.txt and the metrics say the same
    for output in (done.stdout, (run / "log.txt").read_text()):
        parsed = [(int(a), float(b), float(c), float(d)) for a, b, c, d in LINE.findall(output)]
        assert parsed == [
            (r["step"], round(r["loss"], 5), round(r["samples_per_s"], 2), round(r["lr"], 6)) for r in rows
        ]
        for said in ("Creating Model", "Created model with total parameters: 125504 (126 K)", "Created optimizer"):
            assert said in output
    prefix = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [IWE] \[\w+\.py:\d+\] ")
    assert all(prefix.match(line) for line in (run / "log.txt").read_text().splitlines())
    assert (run / "samples.txt").read_text().count("7 and") == 2
    assert [r["step"] for r in rows if r.get("sample", "").startswith("7 and")] == [10, 12]
    flags = json.loads((run / "flags.json").read_text())
    assert flags["dtype"] == "fp32" and flags["batch_tokens"] == 256 and flags["attention"] == "sdpa"
    env = json.loads((run / "env.json").read_text())
    assert env["mesh"] == {"replicate": 1, "shard": 1} and env["data"]["train"][0]["tokens"] > 0
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000010", "step-00000012"]
    # the parts of the time add up to the wall
    total, parts = re.search(r"Time taken: ([\d.]+) seconds \((.*)\)", done.stdout).groups()
    seconds = {name: float(s) for name, s in (p.rsplit(" ", 1) for p in parts.split(", "))}
    assert {"start", "compile", "data", "steps", "evaluation", "saves"} <= seconds.keys()
    assert sum(seconds.values()) == pytest.approx(float(total), abs=0.05 * len(seconds) + 0.05)
    assert float(total) - 0.05 <= wall < float(total) + 2  # rounded; what is left is the start of the process


def test_several_processes_train_like_one(tmp_path, text):
    """Sixteen rows do not divide by three ranks: two are filled up with a row that is not trained on."""
    flags = [*FAST, "--data", text, "--log_every", 1, "--eval_every", 2, "--batch_tokens", 1024]
    flags += ["--steps", 4, "--sample_every", 4, "--micro_batch", 0]
    train(*flags, "--out", tmp_path / "one")
    train(*flags, "--out", tmp_path / "many", ranks=3)
    one, many = values(tmp_path / "one"), values(tmp_path / "many")
    assert one.keys() == many.keys() == set(range(1, 5))
    for step in one:
        for a, b in zip(one[step], many[step], strict=True):
            assert a == b or a == pytest.approx(b, rel=1e-5)
    said = (tmp_path / "many/log.txt").read_text()
    assert "Wrapped model with FSDP" in said and "filled with untrained rows" in said
    assert (tmp_path / "many/samples.txt").exists()


def test_ranks_save_their_masters_after_an_evaluation(tmp_path, text):
    """In bf16, evaluation, samples and saves at the same steps: fp32 weights and both moments of every parameter, from
    which one process goes on as two do, and two as one. One process computes what two do, to less than bf16's
    rounding."""
    flags = [*FAST, "--dtype", "bf16", "--data", text, "--log_every", 1, "--eval_every", 2, "--sample_every", 4]
    flags += ["--batch_tokens", 512, "--schedule", "constant"]
    train(*flags, "--steps", 4, "--out", tmp_path / "two", ranks=2)
    train(*flags, "--steps", 4, "--out", tmp_path / "one")
    two, one = values(tmp_path / "two"), values(tmp_path / "one")
    assert two[1][0] == pytest.approx(one[1][0], rel=1e-5)  # rounding rope's tables would give 1e-4
    manifest = json.loads((tmp_path / "two/checkpoints/step-00000004/manifest.json").read_text())
    places = [(key, place) for part in manifest["files"] for key, place in part["tensors"].items()]
    assert {place["dtype"] for _, place in places} == {"float32"}
    keys = {key for key, _ in places}
    names = {key.removeprefix("model.") for key in keys if key.startswith("model.")}
    assert keys == {f"{kind}.{name}" for kind in ("model", "exp_avg", "exp_avg_sq", "step") for name in names}
    shutil.copytree(tmp_path / "two", tmp_path / "alone")
    for name, ranks in (("two", 2), ("alone", 1), ("one", 2)):
        train(*flags, "--steps", 6, "--out", tmp_path / name, ranks=ranks)
    two, alone, one = (values(tmp_path / name) for name in ("two", "alone", "one"))
    assert one[6][0] == pytest.approx(two[6][0], rel=1e-3)
    assert two[5][0] == pytest.approx(alone[5][0], rel=1e-5) and two[6][2] == pytest.approx(alone[6][2], rel=1e-3)


def test_a_run_in_bf16_with_all_that_saves_memory_resumes_bit_for_bit(tmp_path, text, old_run):
    """On two processes, from weights that rank 0 reads: bf16 masters, moments and reduction, everything offloaded. The
    stochastic rounding of a resumed run is that of the uninterrupted one."""
    flags = [*FAST, "--data", text, "--log_every", 1, "--eval_every", 0, "--schedule", "constant", "--dtype", "bf16"]
    flags += ["--param_dtype", "bf16", "--state_dtype", "bf16", "--reduce_dtype", "bf16", "--reshard", "always"]
    flags += ["--offload", "cpu", "--checkpointing", "selective", "--offload_activations", "--prefetch", 2]
    flags += ["--load", "rank0", "--weights", old_run / "hf", "--timeout", 60, "--batch_tokens", 1024]
    train(*flags, "--steps", 6, "--out", tmp_path / "whole", ranks=2)
    train(*flags, "--steps", 3, "--out", tmp_path / "parts", ranks=2)
    train(*flags, "--steps", 6, "--out", tmp_path / "parts", ranks=2)
    assert values(tmp_path / "whole") == values(tmp_path / "parts") and len(values(tmp_path / "whole")) == 6
    manifest = json.loads((tmp_path / "parts/checkpoints/step-00000006/manifest.json").read_text())
    places = [(key, place) for part in manifest["files"] for key, place in part["tensors"].items()]
    assert {place["dtype"] for key, place in places if not key.startswith("step.")} == {"bfloat16"}
    losses = [loss for loss, _, _ in values(tmp_path / "whole").values()]
    assert losses[-1] < losses[0]


def test_a_rank_without_the_weights_is_named(tmp_path, text, old_run):
    """With --load direct; with rank0 it needs none."""
    shutil.copytree(old_run / "hf", tmp_path / "hf")
    code = """
from lib import check
if os.environ["RANK"] == "1":  # the other machine
    find = check.local_path
    check.local_path = lambda spec, flag: find(spec.replace("hf", "elsewhere") if flag == "--weights" else spec, flag)
"""
    flags = [*FAST, "--model", "tiny-llama", "--data", text, "--weights", tmp_path / "hf", "--steps", 1]
    flags += ["--eval_every", 0, "--out", tmp_path / "run", "--load"]
    said = train(*flags, "direct", ranks=2, status=2, code=code).stderr
    assert re.search(r"error: rank 1 on \S+: .*elsewhere", said) and not re.search(r"rank 0 on", said), said
    train(*flags, "rank0", ranks=2, code=code)


def test_a_signal_saves_and_stops_and_the_same_command_goes_on(tmp_path, text):
    """And the resumed run equals the uninterrupted one bit for bit. test_guard.py has the other signals."""
    flags = [*FAST, "--data", text, "--log_every", 1, "--eval_every", 5, "--steps", 20, "--out", tmp_path / "run"]
    code = """
rate = train.learning_rate
train.learning_rate = lambda c, step: (step == 7 and os.kill(os.getpid(), 15), rate(c, step))[1]
"""
    assert "SIGTERM" in train(*flags, code=code).stdout
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["state"] == "stopped" and 8 <= status["step"] < 12
    train(*flags)
    train(*flags[:-1], tmp_path / "whole")
    assert values(tmp_path / "run") == values(tmp_path / "whole")
    weights = [tmp_path / r / "checkpoints/step-00000020/rank-00000.safetensors" for r in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_memory_stays_flat(tmp_path, text):
    """From step 20 to the end, with evaluations, plots, saves and samples on the way."""
    flags = [*FAST, "--data", text, "--steps", 100, "--log_every", 20, "--eval_every", 10, "--save_every", 15]
    train(*flags, "--sample_every", 10, "--out", tmp_path / "run", env={"PLOTS": "yes"})
    memory = {r["step"]: r["mem_gib"] for r in records(tmp_path / "run")}
    assert memory[100] < 1.03 * memory[20], memory


def test_without_a_compiler_the_run_goes_on_uncompiled(tmp_path, text):
    flags = ["--data", text, "--steps", 2, "--eval_every", 0, "--seq_len", 64, "--out", tmp_path / "run"]
    done = train(*flags, env={"CXX": "no-such-compiler"})
    assert done.stderr.count("apt install g++") == 1
    assert json.loads((tmp_path / "run/flags.json").read_text())["compile"] == "none"
    refused = train(*flags, "--compile", "block", env={"CXX": "no-such-compiler"}, status=2)
    assert "--compile block" in refused.stderr and "apt install g++" in refused.stderr


@pytest.mark.slow
def test_the_default_recipe_learns_without_a_compiler(tmp_path):
    """A short default run: 100 steps, decay included, reached 2.56 nats per byte; byte frequencies alone give 3.3."""
    flags = ["@recipes/default.args", "--steps", 100, "--eval_every", 100, "--out", tmp_path / "run"]
    out = train(*flags, env={"CXX": "no-such-compiler"}).stdout
    assert records(tmp_path / "run")[-1]["val_loss"] < 2.7
    assert "Sample after step 100" in out


def test_a_finished_run_says_how_to_go_on(text, old_run, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    flags = [*FAST, "--data", text, "--steps", "1", "--eval_every", "0", "--out", str(old_run)]
    before = (old_run / "metrics.jsonl").read_text()
    for extra in ([], ["--check"]):
        assert train_main([*flags, *extra]) == 0
        said = capsys.readouterr().out
        assert "python generate.py --run" in said and "--steps" in said and "--out" in said
    assert "state=finished" in said
    assert (old_run / "metrics.jsonl").read_text() == before
    generate.main(["--run", str(old_run), "--prompt", "1 and", "--tokens", "20"])
    assert capsys.readouterr().out.startswith("1 and")


BAD = {  # other files' tests have more mistakes; these end in different parts of the start
    "an unknown flag": (["--larning_rate", "1"], "unknown flag --larning_rate"),
    "a misspelled recipe": (["@defaults"], "did you mean @recipes/default.args?"),
    "a misspelled file": (["--data", "READMI.md"], f"known format in {Path.cwd()}; did you mean README.md?"),
    "a file for --out": (["--out", "{md}"], "error: --out "),
    "no such checkpoint": (["--resume", "nowhere"], "--resume nowhere: the folder does not exist"),
    "too short a text": (["--data", "{short}"], "one row needs seq_len + 1 = 65"),
    "ids beyond the vocabulary": (["--data", "{ids}"], "the model's vocab_size is 258"),
    "a batch that does not divide": (["--batch_tokens", "1000"], "4 x 64 x 1 = 256"),
    "a run folder of another model": (["--model", "tiny-gpt2", "--out", "{old}"], "--model was 'tiny-llama'"),
    "weights that are not there": (["--weights", "{short}-not"], "--weights"),
    "weights of another shape": (["--weights", "{hf}", "--dim", "32"], "the model, which has {'dim': 32"),
    "something of the user's in hf/": (["--out", "{ids}"], "ids/hf exists already"),
    "bytes for weights with a larger vocabulary": (["--weights", "{near}", "--tokenizer", "bytes"], "trained on 300"),
    "tf32 on a CPU": (["--dtype", "tf32"], "--dtype tf32: only NVIDIA GPUs"),
    "a tokenizer that is too large": (["--tokenizer", "bytes", "--vocab_size", "100"], "bytes has 258 ids"),
}


@pytest.fixture(scope="module")
def old_run(tmp_path_factory, text):
    run = tmp_path_factory.mktemp("old") / "run"
    train(*FAST, "--data", text, "--steps", 1, "--eval_every", 0, "--out", run)
    near = run.parent / "near"
    shutil.copytree(run / "hf", near, ignore=lambda *_: ["tokenizer.json"])
    (near / "config.json").write_text(json.dumps(json.loads((near / "config.json").read_text()) | {"vocab_size": 300}))
    shutil.copytree(ROOT / "recipes", run.parent / "ids", ignore=lambda *_: ["default.args"])
    write_shard(run.parent / "ids/some.bin", np.arange(900) % 300, 300)
    (run.parent / "ids/hf").mkdir()
    (run.parent / "ids/hf/mine.txt").touch()
    return run


def test_the_export_is_the_last_checkpoint(old_run):
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(old_run / "hf", output_loading_info=True)
    assert not any(info.values())
    found = checkpoint.newest(old_run)
    ours = Transformer(found.model_config)
    fill_parameters(ours, found.read_weights)
    tokens = torch.arange(200)[None]
    with torch.no_grad():
        assert torch.allclose(ours.logits(tokens), theirs(tokens).logits, atol=1e-5)
    tokenizer, words = transformers.AutoTokenizer.from_pretrained(old_run / "hf"), "7 and é\n</s>"
    assert tokenizer.encode(words, split_special_tokens=True) == [256, *words.encode()]


def test_an_export_that_was_cut_short_is_made_up_for(tmp_path, text, capsys, monkeypatch):
    """A full disk at the end: the checkpoint is safe, and the same command writes hf/."""
    flags = [*map(str, (*FAST, "--data", text, "--steps", 1, "--eval_every", 0, "--out", tmp_path / "run"))]
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    skip_plots(monkeypatch.setattr)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(weights, "write_file", full)
        assert exit_status(train_main, flags) == 1
    assert "the disk is full" in capsys.readouterr().err and not (tmp_path / "run/hf").exists()
    assert train_main([*flags, "--check"]) == 0 and "state=resume" in capsys.readouterr().out
    assert train_main(flags) == 0 and "run/hf" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "run").glob("hf*")) == ["hf"]
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "finished"
    assert weights.load_model(tmp_path / "run/hf").config.vocab_size == 258


def test_training_starts_from_the_weights_of_a_folder(tmp_path, text, old_run):
    """The model, its tokenizer and its weights are the folder's; the first loss is that of transformers."""
    flags = [*FAST, "--data", text, "--weights", old_run / "hf", "--out", tmp_path / "run", "--eval_every", 0]
    out = train(*flags, "--steps", 1).stdout
    assert f"Reading weights from {old_run / 'hf'}" in out
    config = parse_args([*map(str, flags)])
    assert config.model == config.weights == config.tokenizer == str(old_run / "hf")
    batch = next(iter(make_loader(config)))[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(old_run / "hf")
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.targets.flatten())
    assert records(tmp_path / "run")[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("kind", BAD)
def test_a_mistake_gets_one_message_and_status_2(tmp_path, text, old_run, kind, capsys, monkeypatch):
    extra, message = BAD[kind]
    places = {"short": tmp_path / "short.txt", "old": old_run, "hf": old_run / "hf", "md": ROOT / "README.md"}
    places |= {name: old_run.parent / name for name in ("near", "ids")}
    places["short"].write_text("too short")
    out = tmp_path / "new/run"
    args = [*map(str, (*FAST, "--data", text, "--steps", 2, "--out", out)), *(a.format(**places) for a in extra)]
    if kind == "an unknown flag":  # once as a user does it
        done = train(*args, status=2)
        assert done.stderr.count("error: ") == 1 and message in done.stderr and "Traceback" not in done.stderr
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    for words in (args, [*args, "--check"]):
        assert exit_status(train_main, words) == 2
        said = capsys.readouterr().err
        assert said.count("error: ") == 1 and message in said and "Traceback" not in said


def test_fp32_is_not_multiplied_as_tf32(tmp_path, monkeypatch):
    products = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with monkeypatch.context() as m:
        m.setattr(machine, "set_products", products.append)
        words = ["--dtype", "fp32", "--data", "nowhere.txt", "--out", str(tmp_path / "run")]
        assert exit_status(train_main, words) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", products.append)
    for dtype in ("fp32", "tf32", "bf16"):
        machine.set_products(dtype)
    assert products == ["fp32", "highest", "high", "high"]


def test_a_mistake_is_said_once_by_several_processes(tmp_path, text):
    said = train(*FAST, "--data", text, "--batch_tokens", 1000, "--out", tmp_path / "run", ranks=2, status=2).stderr
    assert said.count("error: --batch_tokens 1000 does not divide") == 1 and "4 x 64 x 2 = 512" in said


def test_check_prints_what_would_be_done_and_trains_nothing(tmp_path, text, capsys):
    assert train_main([*FAST, "--data", text, "--out", str(tmp_path / "run"), "--check"]) == 0
    *out, memory = capsys.readouterr().out.splitlines()
    attention = "attention=sdpa, flash_attention"
    assert out == [attention, f"out={tmp_path / 'run'}", "device=cpu", "processes=1", "state=fresh", "timeout=600"]
    assert memory.startswith("memory=about 0.") and "processes 0." in memory
    assert not (tmp_path / "run").exists()
    for more in ([], ["--check"]):
        assert exit_status(train_main, ["--out", "é" * 128, *more]) == 2
        assert "File name too long" in capsys.readouterr().err
