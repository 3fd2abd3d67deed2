"""The suites, in small: the GPU's as far as a CPU can run it, the CPU's with a peer of our own, the others."""

import contextlib
import json
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist

import cpu
import fp8
import gpu
import peers
import run
import suites
import train
from common import Run, Turn, guarded, race, row
from lib.errors import Failure, UserError
from shard import Ranks
from test_shard import skip_plots

EXPECTED = {  # of each part: what a case begins with, and some of its contenders
    "head": ("F: loss head", {"flatland", "its three products alone"}),
    "decode": ("decoding", {"a token"}),
    "products": ("a block's products, llama3-70b, 32 tokens, row_gw_hp", {"bf16", "with casts", "products alone"}),
    "llama": ("A: Llama 8B", {"flatland", "transformers", "transformers, compiled"}),
    "fp8": ("B: Llama 8B", {"flatland", "flatland --fp8 row_gw_hp"}),
    "gpt2-xl": ("D: GPT-2 1.5B", {"flatland", "transformers"}),
    "gpt2": ("C: GPT-2 124M", {"flatland --compile model", "nanogpt, compiled"}),
    "experts": ("E: Mixtral", {"flatland", "flatland --model llama2-7b --n_kv_heads 8 --ffn_dim 28672"}),
    "mesh": ("FSDP on one rank", {"flatland, FSDP --prefetch 2"}),
    "checkpointing": ("Llama 8B", {"flatland --checkpointing block --offload_activations"}),
    "offload": ("G: 405B's blocks", {"flatland --prefetch 1", "transformers, CPUOffloadPolicy"}),
}


SLOW = {"products", "fp8", "gpt2-xl", "mesh", "checkpointing"}  # whose code other parts run, too


@pytest.mark.parametrize("part", [pytest.param(p, marks=[pytest.mark.slow] * (p in SLOW)) for p in EXPECTED])
def test_every_part_of_the_gpu_suite_runs(part, tmp_path, capsys):
    (tmp_path / "model.py").write_text(PEER.replace("SCALE", "1.0"))
    gpu.run_part({"name": part, "tiny": True, "nanogpt": str(tmp_path)})
    if dist.is_initialized():
        dist.destroy_process_group()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"case"')]
    case, names = EXPECTED[part]
    timed = {r["what"]: r for r in rows if r["case"].startswith(case)}
    assert all(timed[name]["median"] >= 0 and timed[name]["unit"] for name in names)
    assert not any("failed" in r["note"] for r in rows)
    assert rows[-1]["case"] == "took"


def test_every_part_is_tested():
    assert gpu.PARTS.keys() - EXPECTED.keys() == {"check", "recipe3"}  # pytest; a twin of fp8


def test_a_part_that_fails_or_hangs_does_not_end_the_next(monkeypatch, tmp_path):
    """In processes of their own, which print rows and die in several ways."""
    (tmp_path / "part.py").write_text(
        "import json, os, sys, time\n"
        "name = json.loads(sys.argv[1])['name']\n"
        "print(json.dumps({'case': name, 'what': 'first', 'note': '', 'unit': 's', **dict.fromkeys("
        "('median', 'p10', 'p90', 'ratio'), 1.0)}), flush=True)\n"
        "{'check': lambda: sys.exit(3), 'dies': os.abort, 'hangs': lambda: time.sleep(60), 'works': int}[name]()\n"
    )
    parts = dict.fromkeys(("check", "dies", "works", "hangs", "late"))
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "part.py"))
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(run, "PARTS", {"gpu": parts})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "describe_machine", dict)

    def measure(*words: str) -> list[tuple[str, str, str]]:
        with pytest.raises(Failure, match="a part failed"):
            run.main(["gpu", "--json", str(tmp_path / "rows.json"), *words])
        return [(r["case"], r["what"], r["note"]) for r in json.loads((tmp_path / "rows.json").read_text())["rows"]]

    rows = measure("--budget", "3")
    assert [name for name, what, _ in rows if what == "first"] == ["check", "dies", "works", "hangs"]
    failures = [(name, note.removeprefix("failed: Failure: ")) for name, _, note in rows if "failed: " in note]
    assert failures[:2] == [("check", "ended with 3"), ("dies", "ended with -6")]
    assert failures[2][0] == "hangs" and failures[2][1].startswith("killed after ") and len(failures) == 3
    assert rows[-1][:2] == ("left out", "late")
    assert {name for name, *_ in measure("--check")} == {"check"}


def test_an_error_is_a_row_and_the_rest_goes_on():
    def rows(error: BaseException):
        yield row("a", "first")
        raise error

    for error, note in (
        (ValueError("no such\nkernel"), "failed: ValueError: no such kernel"),
        (SystemExit("no tiny GPU"), "failed: SystemExit: no tiny GPU"),
        (ModuleNotFoundError("No module named 'litgpt'"), "not here: No module named 'litgpt'"),
    ):
        assert [r["note"] for r in guarded("a", "all", rows(error))] == ["", note]
    works = {"a": lambda: 1 / 0, "b": lambda: None}
    first, second = race("case", "steps/s", 1.0, works, 2)
    assert first["note"] == "failed: ZeroDivisionError: division by zero" and second["ratio"] == 1.0


def test_steps_on_a_gpu_are_timed_by_its_events(monkeypatch):
    """The calls that no CPU has, by a clock of our own: steps of 3 and 4 seconds, in turns."""
    now, order = 0.0, []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    def step(name, seconds):
        nonlocal now
        now += seconds
        order.append(name)

    for name, value in (("Event", Event), ("synchronize", lambda: None), ("reset_peak_memory_stats", lambda: None),
                        ("memory_allocated", lambda: 3), ("max_memory_allocated", lambda: 10)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    lab = gpu.Lab(Ranks(0, 1, torch.device("cuda")))
    steps = {"a": lambda: step("a", 3.0), "b": lambda: step("b", 4.0)}
    rows = list(lab.race("case", "tokens/s", 12.0, steps, lambda name, rate, turns: f"{rate:.0f}; {turns[0].peak}", 5))
    assert [(row["what"], row["median"], row["note"]) for row in rows] == [("a", 4.0, "4; 7"), ("b", 3.0, "3; 7")]
    assert rows[1]["ratio"] == 0.75 and order == (["a"] * 5 + ["b"] * 5) * 4  # a turn of each is not measured


@pytest.mark.parametrize("unit, factor", [("tokens/s", 1.0), ("ms", -1.0)])
def test_two_files_of_results_side_by_side(unit, factor, tmp_path, capsys):
    def write(name: str, *values: float) -> str:
        rows = [{"suite": "gpu"} | row("A", str(i), value, unit) for i, value in enumerate(values)]
        (tmp_path / name).write_text(json.dumps({"rows": rows}))
        return str(tmp_path / name)

    before, same = write("a.json", 100.0, 100.0), write("b.json", 100.0 - 4 * factor, 100.0)
    run.main(["compare", before, same])
    slower = write("c.json", 100.0 - 6 * factor, 100.0, 7.0)
    with pytest.raises(Failure, match="1 rows are slower by 5 % or more"):
        run.main(["compare", before, slower])
    out = capsys.readouterr().out
    assert "SLOWER" in out and f"| A | 2 |  | 7 | {unit} |  | only after |" in out
    with pytest.raises(UserError, match="usage"):
        run.main(["compare", before])


# ---- the CPU suite

# GPT-2 in the names of nanoGPT; what it is scaled by is right, or wrong.
PEER = """
import math, torch
from collections import OrderedDict
from torch import nn
from torch.nn import functional as F
from types import SimpleNamespace as GPTConfig

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.c_proj = c.n_head, nn.Linear(c.n_embd, c.n_embd)
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd)
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE / math.sqrt(q.shape[-1]))
        return self.c_proj(y.transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(c.n_embd), Attention(c), nn.LayerNorm(c.n_embd)
        self.mlp = nn.Sequential(OrderedDict(
            c_fc=nn.Linear(c.n_embd, 4 * c.n_embd), gelu=nn.GELU(), c_proj=nn.Linear(4 * c.n_embd, c.n_embd)))
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(c.vocab_size, c.n_embd), "wpe": nn.Embedding(c.block_size, c.n_embd),
            "h": nn.Sequential(*(Block(c) for _ in range(c.n_layer))), "ln_f": nn.LayerNorm(c.n_embd)})
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
    def forward(self, tokens, targets):
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.lm_head(self.transformer.ln_f(self.transformer.h(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.fixture
def here(monkeypatch):
    """Contenders train in this process: importing torch anew takes seconds."""
    measured = lambda script, spec, env: json.dumps(peers.measure(json.loads(spec)))  # noqa: E731
    monkeypatch.setattr(cpu, "run_python", measured)


def run_cpu(folder, scale: float, *flags: str) -> list[dict]:
    (folder / "model.py").write_text(PEER.replace("SCALE", str(scale)))
    run.main(["cpu", "--tiny", "--nanogpt", str(folder), "--json", str(folder / "rows.json"), *flags])
    return json.loads((folder / "rows.json").read_text())["rows"]


@pytest.mark.slow
def test_training_on_a_cpu_against_a_peer(tmp_path):
    flags = ["--parts", "gpt2-shipped", "gpt2-start", "--peers", "nanogpt", "--repeats", "1"]
    rows = {r["what"]: r for r in run_cpu(tmp_path, 1.0, *flags)}
    assert not any("failed" in r["note"] for r in rows.values())
    raced = {what.partition(",")[0]: r["ratio"] for what, r in rows.items() if " of the limit; " in r["note"]}
    assert list(raced) == ["flatland", "nanogpt"] and raced["nanogpt"] == 1.0
    assert rows["nanogpt, uncompiled"]["ratio"] == 1.0


@pytest.mark.parametrize(("scale", "refused"), [(1.0, False), (1.1, True)])
def test_a_peer_that_computes_something_else_is_not_timed(tmp_path, monkeypatch, here, scale, refused):
    left = []

    def race(bench):
        left.extend(bench.peers)
        yield row("timed", "others")

    monkeypatch.setattr(cpu, "KINDS", {"shipped": race})
    flags = ["--parts", "gpt2-shipped", "--peers", "nanogpt", "litgpt"]
    with pytest.raises(Failure, match="computed something else") if refused else contextlib.nullcontext():
        run_cpu(tmp_path, scale, *flags)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert left == [] if refused else left == ["nanogpt"]
    assert rows[2]["what"] == "nanogpt" and rows[2]["note"].startswith("failed: its ") is refused
    assert rows[-1]["what"] == "others"


def test_a_peer_that_is_not_there_is_named(tmp_path, here):
    args = Namespace(tiny=True, peers=["nanogpt", "transformers"], nanogpt=None)
    bench = cpu.Bench("gpt2", args, tmp_path)
    notes = {r["what"]: r["note"] for r in cpu.check(bench)}
    assert notes["nanogpt"].startswith("not here: --nanogpt FOLDER") and bench.peers == ["transformers"]
    assert notes["transformers"].startswith("fp32 ")


def made_up_bench(folder, monkeypatch, speeds: dict[str, tuple[float, float]], repeats: int):
    """Turns of our own invention: (seconds of a step, first loss) by peer. -> (the bench, the order of turns)"""
    args = Namespace(tiny=True, repeats=repeats, peers=["transformers", "nanogpt"], nanogpt=folder)
    bench, order = cpu.Bench("gpt2", args, folder), []

    def turn(self, contender, steps, env=None):
        order.append(contender.peer)
        seconds, loss = speeds[contender.peer]
        if loss is None:
            raise Failure("no memory")
        first = seconds + 10 * contender.compile
        return Turn([seconds] * 3, int(2e9), 7, (loss, 5.0), first=first)

    monkeypatch.setattr(cpu.Bench, "run", turn)
    monkeypatch.setattr(cpu.time, "time", lambda: 0.0)
    return bench, order


def test_contenders_take_turns_and_the_wrong_are_refused(tmp_path, monkeypatch):
    speeds = {"matmul": (0.001, 0.0), "flatland": (1.0, 5.5), "transformers": (2.0, 5.501), "nanogpt": (4.0, 5.6)}
    bench, order = made_up_bench(tmp_path, monkeypatch, speeds, 3)
    rows = list(cpu.bench_race(bench, False))
    assert order == ["matmul", "flatland", "transformers", "nanogpt"] + ["matmul", "flatland", "transformers"] * 3
    assert "its first loss, compiled as it is timed, is 5.600000, ours 5.500000" in rows[0]["note"]
    assert rows[1]["median"] == pytest.approx(2 * 2048**3 / 0.001 / 1e9)
    assert [(r["median"], r["ratio"]) for r in rows[2:]] == [(64.0, 2.0), (32.0, 1.0)]
    assert "2.00 GB; 7 faults per step; loss 5.5000 to 5.0000" in rows[2]["note"]
    speeds["transformers"] = (2.0, None)
    notes = {r["what"]: r["note"] for r in cpu.bench_race(bench, False)}
    assert notes[f"transformers, {bench.mixed}, compiled"] == "failed: Failure: no memory"


def test_starting_cold_cached_and_uncompiled(tmp_path, monkeypatch):
    speeds = {"flatland": (3.0, 5.5), "transformers": (5.0, 5.5), "nanogpt": (4.0, 5.5)}
    bench, order = made_up_bench(tmp_path, monkeypatch, speeds, 6)
    start = Run([], {"start": 1.0, "data": 0.5, "compile": 1.5, "steps": 9.0})
    monkeypatch.setattr(cpu, "train_run", lambda *_, **__: start)
    figures = {r["what"]: (r["median"], r["ratio"]) for r in cpu.bench_start(bench)}
    assert figures["transformers, compiled, cached"] == (15.0, 3.75) and figures["nanogpt, uncompiled"] == (4.0, 1.0)
    assert figures["flatland, uncompiled"] == (3.0, 0.75) and len(order) == 2 * 2 * 3


# ---- the others


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpu", "gpu needs a GPU; with --tiny"),
        ("cpu --parts head", "--parts head is unknown: there are llama-shipped, "),
        ("cpu --nanogpt . --tiny", "no model.py in it"),
        ("data --repeats -1", "it must be at least 1"),
        ("cqu", "invalid choice: 'cqu' (choose from 'generate', "),
        ("fp8", "fp8 needs --run"),
    ],
)
def test_what_the_command_line_refuses(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        run.main(words.split())
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_checkpoints_are_measured():
    rows = list(suites.bench_checkpoint(Namespace(repeats=1), layers=1))
    assert len(rows) == 8 and all(r["median"] > 0 for r in rows)


@pytest.mark.slow
def test_weights_are_loaded_by_one_two_and_four_processes():
    rows = list(suites.bench_load(Namespace(repeats=1), layers=1))
    assert len(rows) == 3 * 2 * 3 and all(r["median"] > 0 for r in rows)
    assert all("shards" in r["note"] for r in rows if r["what"] in ("direct", "rank0"))


def test_the_layers_of_a_run_in_fp8(tmp_path, monkeypatch):
    skip_plots(monkeypatch.setattr)
    flags = "--steps 1 --eval_every 0 --compile none --dtype bf16 --fp8 row --seq_len 64 --micro_batch 2 --out"
    assert train.main([*flags.split(), f"{tmp_path}/run"]) == 0
    rows = list(gpu.bench_fp8(Namespace(run=tmp_path / "run")))
    assert len(rows) == 9 and "lm_head" in rows[-1]["case"] and "skipped" in rows[-1]["what"]
    down = next(r for r in rows if r["case"].startswith("layers.1.mlp.down_proj"))
    figures = dict(figure.split() for figure in down["note"].split(", "))
    assert down["what"] == "row, 128 tokens"
    assert figures.keys() == {f"{operand}_{figure}" for operand in "xwg" for figure in fp8.FIGURES}
    assert all(25 < float(figures[f"{operand}_snr_db"]) < 40 for operand in "xwg")
