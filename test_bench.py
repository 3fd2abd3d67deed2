"""bench.py: the GPU suite as far as a CPU can run it, in small; the CPU suite, in small, with a peer of our own."""

import json
import time
from argparse import Namespace

import pytest
import torch

import bench
import bench_cpu
import bench_gpu
from errors import UserError
from shard import Ranks

EXPECTED = {  # a row of each part: what its case and its name begin with
    "check": ("fp8 row_gw_hp", "allowed"), "tests": ("pytest -m gpu", "pytest"),
    "llama": ("A: Llama 8B", "transformers, compiled"), "fp8": ("B: Llama 8B", "--fp8 row_gw_hp"),
    "recipe3": ("B: Llama 2 7B", "flatland --fp8 tensor"), "products": ("a block's products", "tensor, with casts"),
    "checkpointing": ("checkpointing", "--checkpointing block --offload"), "head": ("F: loss head", "flatland"),
    "mesh": ("FSDP on one rank", "embedding and lm_head in"), "offload": ("offload", "--offload cpu --prefetch 0"),
    "gpt2": ("C: GPT-2", "flatland --compile model"), "experts": ("E: Mixtral", "transformers"),
    "products-row": ("a block's products", "row_gw_hp, products alone"),
}  # fmt: skip


def test_every_part_runs(tmp_path, capsys):
    twins = {"llama-2048", "fp8-2048"}  # parts whose code others run
    assert set(EXPECTED) | twins == set(bench_gpu.PARTS)
    bench.main(["--suite", "gpu", "--tiny", "--parts", *EXPECTED, "--json", str(tmp_path / "rows.json")])
    out = capsys.readouterr().out
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    for part, (case, what) in EXPECTED.items():
        assert any(row["case"].startswith(case) and row["what"].startswith(what) for row in rows), part
    raced = [row for row in rows if "steps" in row]
    assert len(raced) > 50 and all(row["ratio"] > 0 and row["p10"] <= row["median"] <= row["p90"] for row in raced)
    assert all(f"| {row['case']} | {row['what']} |" in out for row in rows)
    assert not any("skipped" in row["what"] or "failed" in row["what"] for row in rows)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="needs a GPU that torch can use; with --tiny"):
        bench.main(["--suite", "gpu"])


def test_what_does_not_fit_or_fails_is_named(monkeypatch, capsys, tmp_path):
    def breaks(lab):
        yield bench_gpu.note("breaks", "first")
        raise ValueError("no such kernel")

    parts = {"check": (0, lambda lab: [bench_gpu.note("check", "ok")]), "breaks": (0, breaks), "long": (999, breaks)}
    monkeypatch.setattr(bench_gpu, "PARTS", parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_gpu.shard, "init_ranks", lambda: Ranks(0, 1, torch.device("cpu")))
    args = Namespace(tiny=False, seconds=100.0, parts=["breaks", "long"])
    found = [(row["case"], row["what"]) for row in bench_gpu.bench_gpu(args)]
    assert found[:3] == [("check", "ok"), ("breaks", "first"), ("breaks", "failed: ValueError: no such kernel")]
    assert found[3][0] == "long" and found[3][1].startswith("skipped: it takes about 999 s, ")
    with pytest.raises(SystemExit, match="a part failed"):
        monkeypatch.setattr(bench, "describe", dict)
        bench.main(["--suite", "gpu", "--parts", "breaks", "--json", str(tmp_path / "rows.json")])
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 3


def test_what_is_wrong_is_not_measured():
    assert bench_gpu.check_bound("y", 0.03, 0.02, 0.045)["ratio"] == pytest.approx(2 / 3)
    for error in (0.0, 0.045, float("nan")):
        with pytest.raises(SystemExit, match="nothing is measured"):
            bench_gpu.check_bound("y", error, 0.02, 0.045)


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
    monkeypatch.setattr(bench_gpu, "gpu_state", lambda: {"clocks.sm": "1980 MHz"})
    lab = bench_gpu.Lab(Ranks(0, 1, torch.device("cuda")), False, float("inf"))
    seconds, peaks, state = bench_gpu.measure(lab, {"a": lambda: step("a", 3.0), "b": lambda: step("b", 4.0)}, 1, 2)
    assert seconds == {"a": [3.0] * 10, "b": [4.0] * 10} and peaks == {"a": 7, "b": 7}
    assert order == (["a"] * 5 + ["b"] * 5) * 3 and state == {"clocks.sm": "1980 MHz", "late graphs": 0}
    rows = bench_gpu.rows_of(
        "case", "tokens/s", 12.0, (seconds, peaks, state | {"late graphs": 2}), lambda name, rate: "!"
    )
    assert [row["median"] for row in rows] == [4.0, 3.0] and rows[0]["ratio"] == pytest.approx(4 / 3)
    assert rows[0]["what"] == "a!; 2 graphs compiled meanwhile"
    seconds, _, _ = bench_gpu.measure(lab._replace(deadline=0.0), {"a": lambda: step("a", 3.0)}, 1, 6)
    assert len(seconds["a"]) == 5  # no time is left: one round, and no more


def test_kernels_are_told_apart():
    spent = {
        "triton_poi_fused__scaled_dot_product_cudnn_attention_0": 100.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": 200.0,
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT": 600.0,
        "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel>": 30.0,
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": 5.0,
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>": 60.0,
        "Memcpy DtoD (Device -> Device)": 5.0,
    }
    rows = {row["what"]: row["median"] for row in bench_gpu.kernel_rows("H", spent)}
    assert rows == {
        "matmul, 1 kernels": 60.0,
        "attention, 1 kernels: cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": 20.0,
        "compiled, 1 kernels": 10.0,
        "optimizer, 1 kernels": 6.0,
        "eager, 2 kernels": 3.5,
        "copies, 1 kernels": 0.5,
        "eager: void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel>": 3.0,
    }


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


def run_cpu(folder, scale: float, *flags: str) -> list[tuple[str, str]]:
    (folder / "model.py").write_text(PEER.replace("SCALE", str(scale)))
    words = ["--suite", "cpu", "--tiny", "--nanogpt", str(folder), "--json", str(folder / "rows.json"), *flags]
    bench.main(words)
    return [(row["what"], row["ratio"]) for row in json.loads((folder / "rows.json").read_text())["rows"]]


@pytest.mark.slow
def test_training_on_a_cpu_against_a_peer(tmp_path):
    flags = ["--parts", "gpt2-shipped", "--peers", "nanogpt", "litgpt", "--repeats", "1"]
    rows = run_cpu(tmp_path, 1.0, *flags)
    assert not any("refused" in what or "failed" in what for what, _ in rows)
    assert any(what.startswith("litgpt: skipped: ") for what, _ in rows)
    raced = {what.partition(",")[0].partition(";")[0]: ratio for what, ratio in rows if " of the limit; " in what}
    assert list(raced) == ["flatland", "nanogpt"] and raced["nanogpt"] == 1.0
    reached = [what for what, _ in rows if what.startswith("target, times the best peer (nanogpt, ")]
    assert len(reached) == 1 and reached[0].endswith(
        " at least 1.5: " + ("reached" if raced["flatland"] >= 1.5 else "NOT reached")
    )


def test_a_peer_that_computes_something_else_is_not_timed(tmp_path, monkeypatch):
    left = []

    def shipped(bench):
        left.extend(bench.args.peers)
        yield bench_gpu.note("timed", "others")

    monkeypatch.setattr(bench_cpu, "KINDS", {"shipped": shipped})
    with pytest.raises(SystemExit, match="a contender was refused"):
        run_cpu(tmp_path, 1.1, "--parts", "gpt2-shipped", "--peers", "nanogpt")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert not left and "refused: its " in rows[2]["what"] and rows[-1]["what"] == "others"


def small(folder, **more) -> bench_cpu.Bench:
    flags = {"tiny": True, "repeats": 3, "peers": ["transformers", "nanogpt"], "nanogpt": folder}
    return bench_cpu.Bench("gpt2", Namespace(**flags | more), folder)


def test_turns_figures_and_targets(tmp_path, monkeypatch):
    """Processes of our own invention, whose speed and memory are known: 64 tokens a step."""
    (tmp_path / "model.py").touch()
    order, known = [], {"flatland": (1.0, 2e9, 5.5), "transformers": (2.0, 3e9, 5.501), "nanogpt": (4.0, 1e9, 5.6)}

    class Process:
        def __init__(self, bench, contender):
            self.peer = contender.peer
            self.seconds, self.peak, loss = known.get(self.peer, (0.001, 0, None))
            self.first = {"loss": loss}

        def steps(self, n):
            order.append(self.peer)
            used = {"faults": 7, "kernel": 0.5, "peak": self.peak, "waiting": 0.0, "loss": 5.0}
            return used | {"seconds": [self.seconds] * n}

        def close(self):
            order.append(f"{self.peer} ended")

    monkeypatch.setattr(bench_cpu, "Running", Process)
    rows = list(bench_cpu.bench_shipped(small(tmp_path)))
    assert order == ["nanogpt ended"] + ["matmul", "flatland", "transformers"] * 4 + [
        f"{peer} ended" for peer in ("matmul", "flatland", "transformers")
    ]
    said = [row["what"] for row in rows]
    assert "refused: its first loss, compiled as it is timed, is 5.600000, ours 5.500000" in said[0]
    assert rows[1]["median"] == pytest.approx(2 * 2048**3 / 0.001 / 1e9)
    assert [(row["median"], row["ratio"]) for row in rows if "share" in row] == [(64.0, 2.0), (32.0, 1.0)]
    assert "2.00 GB; 7 faults, 0.50 s in the kernel per step; loss 5.5000 to 5.0000" in said[3]
    ends = [(row["median"], row["what"].endswith("NOT reached")) for row in rows if "target" in row["what"]]
    assert ends[:3] == [(2.0, False)] * 3  # times the peer; GB, of all peers and of those with fp32 masters
    assert ends[3] == (pytest.approx(rows[3]["share"]), True)  # far from half of the limit
    known["transformers"] = (1.0, 1.5e9, 5.5)
    missed = [
        row["what"]
        for row in bench_cpu.bench_shipped(small(tmp_path, peers=["transformers"]))
        if row["what"].endswith("NOT reached")
    ]
    assert len(missed) == 4


def test_starting_cold_cached_and_uncompiled(tmp_path, monkeypatch):
    """Each in its turn, ours by train.py; 1.2 times the fastest uncompiled peer is the bound."""
    (tmp_path / "model.py").touch()
    order = []

    class Process:
        def __init__(self, bench, contender, cache, load):
            assert not load and cache.is_dir()
            order.append(cache)
            self.seconds = {"transformers": 5.0, "nanogpt": 4.0}[contender.peer] + 10 * contender.compile

        def close(self):
            pass

    def run(bench, cache, steps, *more):
        assert steps == 1
        return {"first step": 4.0 if more == ("--compile", "none") else 9.0}

    monkeypatch.setattr(bench_cpu, "Running", Process)
    monkeypatch.setattr(bench_cpu, "whole_run", run)
    rows = list(bench_cpu.bench_start(small(tmp_path, repeats=6)))
    figures = {row["what"]: (row["median"], row["ratio"]) for row in rows}
    assert figures["transformers, compiled, cached"] == (15.0, 3.75) and figures["nanogpt, uncompiled"] == (4.0, 1.0)
    assert [row["what"].endswith("NOT reached") for row in rows[-3:]] == [True, True, False]
    assert len(order) == 12 and len(set(order)) == 4  # two rounds of two peers: a fresh cache for each


@pytest.mark.slow
def test_one_process_two_processes_and_the_whole_run(tmp_path):
    bench_ = small(tmp_path, repeats=1)
    losses = []
    for processes in (1, 2):
        running = bench_cpu.Running(bench_, bench_cpu.ours(bench_, processes=processes))
        found = running.steps(2)
        running.close()
        losses.append((running.first["loss"], found["loss"]))
        assert len(found["seconds"]) == 2 and found["peak"] > processes * 1e8
        assert all(process.returncode == 0 for process in running.processes)
    assert losses[0] == pytest.approx(losses[1], rel=2**-8) and losses[0][1] < losses[0][0]
    begin = time.monotonic()
    run = bench_cpu.whole_run(bench_, tmp_path / "cache", 2)
    assert [record["step"] for record in run["records"]] == [1, 2] and 0 < run["first step"] < time.monotonic() - begin


def test_what_the_command_line_refuses(tmp_path):
    for words, message in (("--suite cpu --parts head", "--parts head is unknown: there are llama-shipped, "),
                           (f"--suite cpu --nanogpt {tmp_path} --tiny", "there is no model.py in it"),
                           ("--repeats -1", "it must be at least 1")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            bench.main(words.split())


def test_checkpoints_are_measured():
    rows = list(bench.bench_checkpoint(Namespace(check=False, repeats=1, disk=None), gb=0.05))
    assert len(rows) == 9 and all(row["median"] > 0 for row in rows)
