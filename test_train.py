"""train.py from the outside, as a user meets it: runs of tiny models, their folders, their ends.

Oracles: an uninterrupted run for resume, one process for several, the metrics file for the screen."""

import gc
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import checkpoint
import memory
import train as train_module
from base import host
from base.errors import exit_status
from data import make_loader
from hf.weights import load_model
from inputs import settled_args
from test_shard import ROOT, run_code, run_ranks
from train import main as train_main

FAST = ["--compile", "none", "--dtype", "fp32", "--seq_len", "64", "--micro_batch", "4", "--eval_batches", "1"]
SCRIPT = "from base import errors\nimport os, train\n{}\nerrors.run_script(train.main)"


def train(*args, ranks: int = 1, env: dict | None = None, status: int = 0, code: str = ""):
    """train.py as a process of its own, or several; code: a fault in it. -> subprocess.CompletedProcess"""
    done = run_code(SCRIPT.format(code), ["train.py", *map(str, args)], ranks, env)
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


IN_TURN = """
import os, train
{}
ranks = init_ranks()
train.init_ranks, train.leave = lambda: ranks, lambda _: torch.distributed.barrier(ranks.control)
for words in {}:
    assert train.main(words) == 0
leave(ranks)
"""


def train_in_turn(*runs: list, code: str = "") -> None:
    """Runs of two ranks, one after the other in the same two processes."""
    run_ranks(2, IN_TURN.format(code, [[*map(str, words)] for words in runs]))


def metrics(run: Path) -> list[dict]:
    """The records of metrics.jsonl, which is strict JSON."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def records(run: Path) -> list[dict]:
    """What came later than a step's record is added to it."""
    steps = {}
    for record in metrics(run):
        steps.setdefault(record["step"], {}).update(record)
    return [*steps.values()]


def values(run: Path) -> dict[int, tuple]:
    return {r["step"]: (r["loss"], r["grad_norm"], r.get("val_loss")) for r in records(run)}


def test_a_run_leaves_all_that_it_promises_and_its_memory_stays_flat(tmp_path, text):
    run = tmp_path / "run"
    flags = [*FAST, "--data", text, "--steps", 62, "--log_every", 5, "--eval_every", 20, "--save_every", 20]
    code = "import log; log.peak_flops = lambda *_: (1e12, 'not measured')"
    done = train(*flags, "--sample_every", 30, "--prompt=7 and", "--out", run, env={"PLOTS": "yes"}, code=code)
    files = "flags.json env.json status.json metrics.jsonl log.txt logs curves.png samples.txt checkpoints hf"
    assert {p.name for p in run.iterdir()} == set(files.split())
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("finished", 62, 0)
    rows = records(run)
    assert [r["step"] for r in rows] == [1, *range(5, 61, 5), 62]
    assert [r["step"] for r in rows if "val_loss" in r] == [20, 40, 60, 62]
    assert [r["step"] for r in rows if "save_ms" in r] == [20, 40, 60, 62]
    assert [r["tokens"] for r in rows] == [256 * r["step"] for r in rows]
    # the screen, log.txt and the metrics say the same
    for output in (done.stdout, (run / "log.txt").read_text()):
        lines = re.findall(r"Batch (\d+) Loss: ([\d.]+), ", output)
        assert lines == [(str(r["step"]), f"{r['loss']:.5f}") for r in rows]
    samples = [(r["step"], r["sample"]) for r in rows if "sample" in r]
    assert [step for step, _ in samples] == [30, 60, 62]
    assert all(sample.startswith("7 and") for _, sample in samples)
    written = "".join(f"--- step {step}\n{sample}\n" for step, sample in samples)
    assert (run / "samples.txt").read_bytes() == written.encode()
    flags = json.loads((run / "flags.json").read_text())
    assert flags["dtype"] == "fp32" and flags["batch_tokens"] == 256 and flags["attention"] == "sdpa"
    env = json.loads((run / "env.json").read_text())
    assert env["mesh"] == {"replicate": 1, "shard": 1} and env["data"]["train"][0]["tokens"] > 0
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000060", "step-00000062"]
    memory = {r["step"]: r["mem_gib"] for r in rows}
    assert memory[60] < 1.02 * memory[20], memory


def test_several_processes_train_like_one(tmp_path, text):
    """Sixteen rows do not divide by three ranks: two are filled up with a row that is not trained on."""
    flags = [*FAST, "--data", text, "--log_every", 1, "--eval_every", 2, "--batch_tokens", 1024]
    flags += ["--steps", 2, "--sample_every", 2, "--micro_batch", 0]
    train(*flags, "--out", tmp_path / "one")
    train(*flags, "--out", tmp_path / "many", ranks=3)
    one, many = values(tmp_path / "one"), values(tmp_path / "many")
    assert one.keys() == many.keys() == {1, 2}
    for step in one:
        for a, b in zip(one[step], many[step], strict=True):
            assert a == b or a == pytest.approx(b, rel=1e-5)
    said = (tmp_path / "many/log.txt").read_text()
    assert "Wrapped model with FSDP" in said and "filled with untrained rows" in said
    assert (tmp_path / "many/samples.txt").exists()


def test_rows_that_ranks_share_train_like_whole_rows(tmp_path, text):
    """One run of one process; another that goes on with two and four ranks for each row, then with one process again:
    evaluation, losses of a mixture's sources, and the balancing loss. Nearly half of a row of b is unused."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes, and so on"}]
    (tmp_path / "b.jsonl").write_text(40 * (json.dumps({"messages": turns}) + "\n"))
    flags = [*FAST, "--model", "tiny-mixtral", "--data", f"{text}:2", f"{tmp_path / 'b.jsonl'}:1", "--log_every", 1]
    flags += ["--eval_every", 1, "--batch_tokens", 512, "--documents", "separate", "--schedule", "constant"]
    questions = [
        json.dumps({"prompt": f"{i} and {i} make", "choices": [f"{2 * i}", "7", "x"], "answer": 0}) for i in range(7)
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(questions))
    flags += ["--eval_score", tmp_path / "q.jsonl"]
    train(*flags, "--steps", 4, "--save_every", 1, "--keep", 4, "--out", tmp_path / "one")
    resume = ["--resume", tmp_path / "one/checkpoints/step-00000001"]
    for steps, ranks in ((2, 2), (3, 4), (4, 1)):
        more = ["--steps", steps, "--context_parallel", ranks, "--sample_every", 2 * (ranks == 2), *resume]
        train(*flags, *more, "--out", tmp_path / "shared", ranks=ranks, code="import score; score.BATCH_TOKENS = 64")
        resume = []
    kept = ("loss", "grad_norm", "val_loss", "router_aux_loss", "loss_numbers.txt", "loss_b.jsonl", "expert_load_0")
    kept += ("score_acc", "score_acc_norm")
    one, shared = ([[r.get(name) for name in kept] for r in records(tmp_path / name)] for name in ("one", "shared"))
    assert len(one) == len(shared) + 1 == 4 and None not in one[3]
    for ours, theirs in zip(shared, one[1:], strict=True):
        assert all(a == b or a == pytest.approx(b, rel=2e-5) for a, b in zip(ours, theirs, strict=True))


def saved_parts(run: Path) -> set[tuple[str, str]]:
    """(name, dtype) of the tensors' parts in the newest checkpoint."""
    return {(name, layout.dtype) for name, layout in checkpoint.newest(run).layouts.items()}


def test_ranks_save_their_masters_after_an_evaluation(tmp_path, text):
    """In bf16, evaluation, samples and saves at the same steps: fp32 weights and both moments of every parameter, from
    which one process goes on as two do, and two as one, with as many tokens per step. One process computes what two do,
    to less than bf16's rounding."""
    flags = [*FAST, "--dtype", "bf16", "--data", text, "--log_every", 1, "--eval_every", 2, "--sample_every", 2]
    flags += ["--schedule", "constant"]
    one, two, alone = (tmp_path / name for name in ("one", "two", "alone"))
    train(*flags, "--steps", 2, "--out", one, "--batch_tokens", 512)  # the default of two ranks
    train_in_turn(*([*flags, "--steps", steps, "--out", out] for out, steps in ((two, 2), (two, 3), (one, 3))))
    train(*flags, "--steps", 3, "--resume", checkpoint.step_folder(two, 2), "--out", alone)
    saved = saved_parts(two)
    names = {key.removeprefix("model.") for key, _ in saved if key.startswith("model.")}
    kinds = ("model", "exp_avg", "exp_avg_sq", "step")
    assert saved == {(f"{kind}.{name}", "float32") for kind in kinds for name in names}
    one, two, alone = map(values, (one, two, alone))
    assert two[1][0] == pytest.approx(one[1][0], rel=1e-5)  # rounding rope's tables would give 1e-4
    assert one[3][0] == pytest.approx(two[3][0], rel=1e-3)
    assert two[3][0] == pytest.approx(alone[3][0], rel=1e-5)
    assert two[3][2] == pytest.approx(alone[3][2], rel=1e-3)


def test_a_run_in_bf16_with_all_that_saves_memory_resumes_bit_for_bit(tmp_path, text, old_run):
    """On two processes, from weights that only rank 0 has: bf16 masters, moments and reduction, everything offloaded.
    The stochastic rounding of a resumed run is that of the uninterrupted one. With --load direct all ranks need the
    weights, and the one without them is named."""
    code = """
import preflight as settle
if os.environ["RANK"] == "1":  # the other machine
    find = settle.open_weights
    settle.open_weights = lambda folder, *words, **how: find(folder / "elsewhere", *words, **how)
"""
    flags = [*FAST, "--data", text, "--log_every", 1, "--eval_every", 0, "--schedule", "constant", "--dtype", "bf16"]
    flags += ["--param_dtype", "bf16", "--state_dtype", "bf16", "--reduce_dtype", "bf16", "--reshard", "always"]
    flags += ["--offload", "cpu", "--checkpointing", "selective", "--offload_activations", "--prefetch", 2]
    flags += ["--weights", old_run / "hf", "--timeout", 60, "--batch_tokens", 1024, "--load"]
    said = train(*flags, "direct", "--out", tmp_path / "whole", ranks=2, status=2, code=code).stderr
    assert re.search(r"error: rank 1 on \S+: .*elsewhere", said) and "rank 0 on" not in said, said
    runs = ((3, "whole"), (1, "parts"), (3, "parts"))
    train_in_turn(*([*flags, "rank0", "--steps", steps, "--out", tmp_path / name] for steps, name in runs), code=code)
    assert values(tmp_path / "whole") == values(tmp_path / "parts") and len(values(tmp_path / "whole")) == 3
    saved = saved_parts(tmp_path / "parts")
    assert {dtype for key, dtype in saved if not key.startswith("step.")} == {"bfloat16"}
    losses = [loss for loss, _, _ in values(tmp_path / "whole").values()]
    assert losses[-1] < losses[0]


def test_without_a_compiler_the_run_goes_on_uncompiled(tmp_path, text):
    flags = ["--data", text, "--steps", 2, "--eval_every", 0, "--seq_len", 64, "--out", tmp_path / "run"]
    done = train(*flags, env={"CXX": "no-such-compiler"})
    assert done.stderr.count("apt install g++") == 1
    assert json.loads((tmp_path / "run/flags.json").read_text())["compile"] == "none"
    refused = train(*flags, "--compile", "block", env={"CXX": "no-such-compiler"}, status=2)
    assert "--compile block" in refused.stderr and "apt install g++" in refused.stderr


BAD = {  # other files' tests have more mistakes; these end in different parts of the start
    "a file for --out": (["--out", str(ROOT / "README.md")], "README.md"),
    "too long a name": (["--out", "é" * 128], "File name too long"),
    "a run folder of another model": (["--model", "tiny-gpt2", "--out", "{old}"], "--model was 'tiny-llama'"),
    "weights that are not there": (["--weights", "{hf}-not"], "--weights"),
    "a run folder for --weights": (["--weights", "{old}"], "directory; the model of a run is in "),
    "a model for --lora_weights": (["--weights", "{hf}", "--lora_weights", "{hf}"], "adapter_config.json cannot be"),
    "weights of another shape": (["--weights", "{hf}", "--dim", "32"], "the model, which has {'dim': 32"),
    "something of the user's in hf/": (["--out", "{own}"], "own/hf exists already"),
    "bytes for weights with a larger vocabulary": (
        ["--weights", "{near}", "--tokenizer", "bytes"],
        "model with 300 ids",
    ),
    "more ids than the weights": (["--weights", "{less}", "--tokenizer", "bytes"], "bytes has 258 ids"),
    "tf32 on a CPU": (["--dtype", "tf32"], "--dtype tf32: only NVIDIA GPUs"),
    "a prompt in Latin-1": (["--sample_every", "1", "--prompt", "\udcef"], "error: --prompt: The text is not Unicode"),
    "a tokenizer that is too large": (["--tokenizer", "bytes", "--vocab_size", "100"], "bytes has 258 ids"),
}


@pytest.fixture(scope="module")
def old_run(tmp_path_factory, text):
    run = tmp_path_factory.mktemp("old") / "run"
    train(*FAST, "--data", text, "--steps", 1, "--eval_every", 0, "--out", run)
    for name, size in (("near", 300), ("less", 200)):
        shutil.copytree(run / "hf", run.parent / name, ignore=lambda *_: ["tokenizer.json"])
        config = json.loads((run / "hf/config.json").read_text()) | {"vocab_size": size}
        (run.parent / name / "config.json").write_text(json.dumps(config))
    (run.parent / "own/hf").mkdir(parents=True)
    (run.parent / "own/hf/mine.txt").touch()
    return run


def test_an_export_is_the_last_checkpoint_and_training_starts_from_it(tmp_path, text, old_run):
    """The model, its tokenizer and its weights are the folder's; the first loss is that of transformers, which computes
    with the checkpoint's weights."""
    folder = old_run / "hf"
    flags = [*FAST, "--data", text, "--weights", str(folder), "--out", str(tmp_path / "run"), "--eval_every", "0"]
    assert f"Reading weights from {folder}" in train(*flags, "--steps", 1).stdout
    config = settled_args(flags)
    assert config.model == config.weights == config.tokenizer == str(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    batch, saved = next(iter(make_loader(config)))[0], checkpoint.step_folder(old_run, 1) / "rank-00000.safetensors"
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.targets.flatten())
    assert records(tmp_path / "run")[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    saved = load_file(saved)
    assert all(torch.equal(p, saved[f"model.{name}"]) for name, p in load_model(folder).named_parameters())
    tokenizer, words = transformers.AutoTokenizer.from_pretrained(folder), "7 and é\n</s>"
    assert tokenizer.encode(words, split_special_tokens=True) == [256, *words.encode()]


@pytest.mark.parametrize("kind", BAD)
def test_a_mistake_gets_one_message_and_status_2(tmp_path, text, old_run, kind, capsys, monkeypatch):
    extra, message = BAD[kind]
    places = {"old": old_run, "hf": old_run / "hf"} | {name: old_run.parent / name for name in ("near", "less", "own")}
    flags = [*FAST, "--data", text, "--steps", "2", "--out", str(tmp_path / "new/run")]
    args = flags + [word.format(**places) for word in extra]
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    for words in (args, [*args, "--check"]):
        assert exit_status(train_main, words) == 2
        said = capsys.readouterr().err
        assert said.count("error: ") == 1 and message in said and "Traceback" not in said


def test_fp32_is_not_multiplied_as_tf32(tmp_path, text, monkeypatch):
    products = []

    def end(dtype, _) -> None:
        products.append(dtype)
        sys.exit(2)

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with monkeypatch.context() as m:
        m.setattr(host, "set_numerics", end)
        words = ["--dtype", "fp32", "--data", text, "--out", str(tmp_path / "run")]
        assert exit_status(train_main, words) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", products.append)
    for dtype in ("fp32", "tf32", "bf16"):
        host.set_numerics(dtype, False)
    assert products == ["fp32", "highest", "high", "high"]


def test_the_collector_runs_at_records_only(tmp_path, text, monkeypatch):
    """Whatever garbage a step leaves. The first pass and those at saves visit all generations."""
    passes, steps, rate = [], [0], train_module.learning_rate

    def litter(config, step):
        steps.append(step)
        for _ in range(3000):
            cycle = []
            cycle.append(cycle)
        return rate(config, step)

    def note(phase, info):
        passes.append((steps[-1], info["generation"]))

    monkeypatch.setattr(train_module, "learning_rate", litter)
    monkeypatch.setattr("log.Log.draw", lambda *_, **__: None)  # matplotlib takes seconds to start
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    gc.callbacks.append(note)
    try:
        flags = [*FAST, "--data", text, "--log_every", "10", "--save_every", "20", "--steps", "25"]
        assert train_main([*flags, "--eval_every", "0", "--out", str(tmp_path / "run")]) == 0
    finally:
        gc.callbacks.remove(note)
    assert [p for p in passes if 1 <= p[0] < 25][::2] == [(1, 2), (10, 1), (20, 2)] and gc.isenabled()


def test_a_mistake_is_said_once_by_several_processes(tmp_path, text):
    said = train(*FAST, "--data", text, "--batch_tokens", 1000, "--out", tmp_path / "run", ranks=2, status=2).stderr
    assert said.count("error: --batch_tokens 1000 does not divide") == said.count("error: ") == 1
    assert "4 x 64 x 2 = 512" in said and "Traceback" not in said


def test_check_prints_what_would_be_done_and_trains_nothing(tmp_path, text, capsys, monkeypatch):
    assert train_main([*FAST, "--data", text, "--out", str(tmp_path / "run"), "--check"]) == 0
    room, about = capsys.readouterr().out.splitlines()
    assert re.match(r"Memory: it fits: each host: 0\.\d GiB \(.*\) of [\d,]+(\.\d)? GiB$", room)
    expected = {"out": str(tmp_path / "run"), "device": "cpu", "processes": 1, "state": "fresh"}
    assert json.loads(about) == expected | {"attention": "sdpa, flash_attention"}
    monkeypatch.setattr(memory, "trace", lambda *_: torch.empty(1, device="meta").item())
    assert train_main([*FAST, "--data", text, "--out", str(tmp_path / "run"), "--check"]) == 0
    assert capsys.readouterr().out.startswith("Memory: no estimate for this model: ")
    assert not (tmp_path / "run").exists()
