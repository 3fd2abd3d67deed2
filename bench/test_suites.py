"""The suites, in small: the GPU's as far as a CPU can run it, the CPU's with a peer of our own, the others."""

import contextlib
import json
import sys
from argparse import Namespace

import pytest
import torch

import cpu
import gpu
import run
import suites
import train
from common import Run, Turn, row
from errors import Failure
from shard import Ranks

EXPECTED = {  # a row of each part: what its case and its name begin with
    "check": ("fp8 row_gw_hp", "allowed"), "tests": ("pytest -m gpu", "pytest"),
    "llama": ("A: Llama 8B", "transformers, compiled"), "fp8": ("B: Llama 8B", "--fp8 row_gw_hp"),
    "recipe3": ("B: Llama 2 7B", "flatland --fp8 tensor"), "products": ("a block's products", "tensor, with casts"),
    "checkpointing": ("Llama 8B", "--checkpointing block --offload"), "head": ("F: loss head", "flatland"),
    "mesh": ("FSDP on one rank", "embedding and lm_head in"), "offload": ("offload", "--offload cpu --prefetch 0"),
    "gpt2": ("C: GPT-2", "flatland --compile model"), "experts": ("H: E: Mixtral", "aten::_local_scalar_dense"),
    "products-row": ("a block's products", "row_gw_hp, products alone"),
}  # fmt: skip


def test_every_part_of_the_gpu_suite_runs(tmp_path, capsys):
    twins = {"llama-2048", "fp8-2048"}  # parts whose code others run
    assert set(EXPECTED) | twins == set(gpu.PARTS)
    with torch.backends.mkldnn.flags(enabled=False):  # whose products in FP8 are slow
        run.main(["gpu", "--tiny", "--parts", *EXPECTED, "--json", str(tmp_path / "rows.json")])
    out = capsys.readouterr().out
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    for part, (case, what) in EXPECTED.items():
        assert any(r["case"].startswith(case) and r["what"].startswith(what) for r in rows), part
    raced = [r for r in rows if "steps" in r]
    assert len(raced) > 50 and all(r["ratio"] > 0 and r["p10"] <= r["median"] <= r["p90"] for r in raced)
    assert all(f"| {r['case']} | {r['what']} |" in out for r in rows)
    assert not any("skipped" in r["what"] or "failed" in r["what"] for r in rows)


def test_what_does_not_fit_or_fails_is_named(monkeypatch, tmp_path):
    def breaks(lab):
        yield row("breaks", "first")
        raise ValueError("no such kernel")

    parts = {"check": (0, lambda lab: [row("check", "ok")]), "breaks": (0, breaks), "long": (999, breaks)}
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(run, "PARTS", {"gpu": parts})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.shard, "init_ranks", lambda: Ranks(0, 1, torch.device("cpu")))
    monkeypatch.setattr(run, "describe_machine", dict)
    words = ["gpu", "--seconds", "100", "--json", str(tmp_path / "rows.json")]
    with pytest.raises(Failure, match="a part failed"):
        run.main(words)
    found = [(r["case"], r["what"]) for r in json.loads((tmp_path / "rows.json").read_text())["rows"]]
    assert found[:3] == [("check", "ok"), ("breaks", "first"), ("breaks", "failed: ValueError: no such kernel")]
    assert found[3][0] == "long" and found[3][1].startswith("skipped: it takes about 999 s, ")
    parts["check"] = (0, lambda lab: [gpu.check_bound("y", 1.0, 0.0, 0.1)])
    with pytest.raises(Failure, match="y: the error is .* nothing is measured"):
        run.main(words)


def test_what_is_wrong_is_not_measured():
    assert gpu.check_bound("y", 0.03, 0.02, 0.045)["ratio"] == pytest.approx(2 / 3)
    for error in (0.0, 0.045, float("nan")):
        with pytest.raises(Failure, match="nothing is measured"):
            gpu.check_bound("y", error, 0.02, 0.045)


def test_steps_on_a_gpu_are_timed_by_its_events(monkeypatch):
    """The calls that no CPU has, by a clock of our own: steps of 3 and 4 seconds, in rounds, in turns."""
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
                        ("max_memory_allocated", lambda: 7)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu, "SMI", "echo 1980 MHz")
    lab = gpu.Lab(Ranks(0, 1, torch.device("cuda")))
    steps = {"a": lambda: step("a", 3.0), "b": lambda: step("b", 4.0)}
    rows = gpu.measure(lab, "case", "tokens/s", 12.0, steps, lambda name, rate, peak: f"; {rate:.0f}; {peak}", 1, 2)
    assert [row["median"] for row in rows] == [4.0, 3.0] and rows[0]["ratio"] == pytest.approx(4 / 3)
    assert [row["what"] for row in rows] == ["a; 4; 7", "b; 3; 7"]
    assert order == (["a"] * 5 + ["b"] * 5) * 3 and rows[0]["gpu"] == "1980 MHz" and rows[0]["steps"] == 10
    rows = gpu.measure(lab._replace(deadline=0.0), "case", "tokens/s", 12.0, steps, warm=1, rounds=6)
    assert rows[0]["steps"] == 5  # no time is left: one round, and no more


# ---- the CPU suite

# GPT-2 in the names of nanoGPT; what it is scaled by is right, or wrong.
PEER = """
import math, torch
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.c_proj = c.n_head, nn.Linear(c.n_embd, c.n_embd)
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd)
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        scores = SCALE * (q @ k.mT) / math.sqrt(q.shape[-1])
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).flatten(2))

class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc, self.gelu = nn.Linear(c.n_embd, 4 * c.n_embd), nn.GELU()
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd)
    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(c.n_embd), Attention(c), nn.LayerNorm(c.n_embd), MLP(c)
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(c.vocab_size, c.n_embd), "wpe": nn.Embedding(c.block_size, c.n_embd),
            "h": nn.ModuleList(Block(c) for _ in range(c.n_layer)), "ln_f": nn.LayerNorm(c.n_embd)})
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
    def forward(self, tokens, targets):
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def run_cpu(folder, scale: float, *flags: str) -> list[dict]:
    (folder / "model.py").write_text(PEER.replace("SCALE", str(scale)))
    run.main(["cpu", "--tiny", "--nanogpt", str(folder), "--json", str(folder / "rows.json"), *flags])
    return json.loads((folder / "rows.json").read_text())["rows"]


@pytest.mark.slow
def test_training_on_a_cpu_against_a_peer(tmp_path):
    flags = ["--parts", "gpt2-shipped", "gpt2-start", "--peers", "nanogpt", "--repeats", "1"]
    rows = {r["what"].partition(";")[0]: r for r in run_cpu(tmp_path, 1.0, *flags)}
    assert not any("refused" in what or "failed" in what for what in rows)
    raced = {what.partition(",")[0]: r["ratio"] for what, r in rows.items() if " of the limit; " in r["what"]}
    assert list(raced) == ["flatland", "nanogpt"] and raced["nanogpt"] == 1.0
    assert rows["nanogpt, uncompiled"]["ratio"] == 1.0


@pytest.mark.parametrize(("scale", "refused"), [(1.0, False), (1.1, True)])
def test_a_peer_that_computes_something_else_is_not_timed(tmp_path, monkeypatch, scale, refused):
    left = []

    def race(bench):
        left.extend(bench.peers)
        yield row("timed", "others")

    monkeypatch.setattr(cpu, "KINDS", {"shipped": race})
    flags = ["--parts", "gpt2-shipped", "--peers", "nanogpt", "litgpt"]
    with pytest.raises(Failure, match="a contender was refused") if refused else contextlib.nullcontext():
        run_cpu(tmp_path, scale, *flags)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert left == [] if refused else left == ["nanogpt"]
    assert ("nanogpt: refused: its " in rows[2]["what"]) is refused and rows[-1]["what"] == "others"


def test_a_peer_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "litgpt", None)
    args = Namespace(tiny=True, peers=["litgpt", "transformers"], nanogpt=None)
    bench = cpu.Bench("llama", args, tmp_path)
    whats = [r["what"] for r in cpu.check(bench)]
    assert "litgpt: skipped: import of litgpt" in whats[1] and bench.peers == ["transformers"]
    assert whats[2].startswith("transformers: bf16 ")


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
        return Turn([seconds] * 3, int(2e9), 7, (loss, 5.0), first)

    monkeypatch.setattr(cpu.Bench, "run", turn)
    monkeypatch.setattr(cpu.time, "time", lambda: 0.0)
    return bench, order


def test_contenders_take_turns_and_the_wrong_are_refused(tmp_path, monkeypatch):
    speeds = {"matmul": (0.001, 0.0), "flatland": (1.0, 5.5), "transformers": (2.0, 5.501), "nanogpt": (4.0, 5.6)}
    bench, order = made_up_bench(tmp_path, monkeypatch, speeds, 3)
    rows = list(cpu.bench_race(bench, False))
    assert order == ["flatland", "transformers", "nanogpt"] + ["matmul", "flatland", "transformers"] * 3
    assert "refused: its first loss, compiled as it is timed, is 5.600000, ours 5.500000" in rows[0]["what"]
    assert rows[1]["median"] == pytest.approx(2 * 2048**3 / 0.001 / 1e9)
    assert [(r["median"], r["ratio"]) for r in rows[2:]] == [(64.0, 2.0), (32.0, 1.0)]
    assert "2.00 GB; 7 faults per step; loss 5.5000 to 5.0000" in rows[2]["what"]
    speeds["transformers"] = (2.0, None)
    assert f"transformers, {bench.mixed}, compiled: failed: no memory" in [
        r["what"] for r in cpu.bench_race(bench, False)
    ]


def test_starting_cold_cached_and_uncompiled(tmp_path, monkeypatch):
    speeds = {"flatland": (3.0, 5.5), "transformers": (5.0, 5.5), "nanogpt": (4.0, 5.5)}
    bench, order = made_up_bench(tmp_path, monkeypatch, speeds, 6)
    start = Run([], 3.0, {"start": 1.0, "data": 0.5, "compile": 1.5, "steps": 9.0}, 0)
    monkeypatch.setattr(cpu, "train_run", lambda *_, **__: start)
    figures = {r["what"]: (r["median"], r["ratio"]) for r in cpu.bench_start(bench)}
    assert figures["transformers, compiled, cached"] == (15.0, 3.75) and figures["nanogpt, uncompiled"] == (4.0, 1.0)
    assert figures["flatland, uncompiled"] == (3.0, 0.75) and len(order) == 2 * 2 * 3


# ---- the others


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpu", "needs a GPU that torch can use; with --tiny"),
        ("cpu --parts head", "--parts head is unknown: there are llama-shipped, "),
        ("cpu --nanogpt . --tiny", "there is no model.py in it"),
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
    assert len(rows) == 9 and all(r["median"] > 0 for r in rows)


@pytest.mark.slow
def test_weights_are_loaded_by_one_two_and_four_processes():
    rows = list(suites.bench_load(Namespace(repeats=1), layers=1))
    assert len(rows) == 3 * 2 * 3 and all(r["median"] > 0 for r in rows)
    assert all("shards" in r["what"] for r in rows if r["what"][:5] in ("direc", "rank0"))


def test_the_layers_of_a_run_in_fp8(tmp_path):
    flags = f"--steps 1 --eval_every 0 --compile none --dtype bf16 --seq_len 64 --micro_batch 2 --out {tmp_path}/run"
    assert train.main(flags.split()) == 0
    with torch.backends.mkldnn.flags(enabled=False):
        rows = list(gpu.bench_fp8(Namespace(run=tmp_path / "run", recipe="row")))
    assert len(rows) == 9 and "lm_head" in rows[-1]["case"] and "skipped" in rows[-1]["what"]
    down = next(r for r in rows if r["case"].startswith("layers.1.mlp.down_proj"))
    recipe, *operands = down["what"].split("; ")
    assert recipe == "recipe row, 128 tokens" and [operand.split()[:2] for operand in operands] == [
        [name, "amax"] for name in "xwg"
    ]
    assert all(25 < float(operand.split()[-2]) < 40 for operand in operands)
