"""The GPU suite of bench.py, as far as a CPU can run it: every part at small sizes."""

import json

import pytest
import torch

import bench
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
    assert set(EXPECTED) | twins == set(bench.PARTS)
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
        yield bench.note("breaks", "first")
        raise ValueError("no such kernel")

    parts = {"check": (0, lambda lab: [bench.note("check", "ok")]), "breaks": (0, breaks), "long": (999, breaks)}
    monkeypatch.setattr(bench, "PARTS", parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.shard, "init_ranks", lambda: Ranks(0, 1, torch.device("cpu")))
    found = [(row["case"], row["what"]) for row in bench.bench_gpu(False, 100.0, ["breaks", "long"])]
    assert found[:3] == [("check", "ok"), ("breaks", "first"), ("breaks", "failed: ValueError: no such kernel")]
    assert found[3][0] == "long" and found[3][1].startswith("skipped: it takes about 999 s, ")
    with pytest.raises(SystemExit, match="a part failed"):
        monkeypatch.setattr(bench, "describe", dict)
        bench.main(["--suite", "gpu", "--parts", "breaks", "--json", str(tmp_path / "rows.json")])
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 3


def test_what_is_wrong_is_not_measured():
    assert bench.check_bound("y", 0.03, 0.02, 0.045)["ratio"] == pytest.approx(2 / 3)
    for error in (0.0, 0.045, float("nan")):
        with pytest.raises(SystemExit, match="nothing is measured"):
            bench.check_bound("y", error, 0.02, 0.045)


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
    monkeypatch.setattr(bench, "gpu_state", lambda: {"clocks.sm": "1980 MHz"})
    lab = bench.Lab(Ranks(0, 1, torch.device("cuda")), False, float("inf"))
    seconds, peaks, state = bench.measure(lab, {"a": lambda: step("a", 3.0), "b": lambda: step("b", 4.0)}, 1, 2)
    assert seconds == {"a": [3.0] * 10, "b": [4.0] * 10} and peaks == {"a": 7, "b": 7}
    assert order == (["a"] * 5 + ["b"] * 5) * 3 and state == {"clocks.sm": "1980 MHz", "late graphs": 0}
    rows = bench.rows_of("case", "tokens/s", 12.0, (seconds, peaks, state | {"late graphs": 2}), lambda name, rate: "!")
    assert [row["median"] for row in rows] == [4.0, 3.0] and rows[0]["ratio"] == pytest.approx(4 / 3)
    assert rows[0]["what"] == "a!; 2 graphs compiled meanwhile"
    seconds, _, _ = bench.measure(lab._replace(deadline=0.0), {"a": lambda: step("a", 3.0)}, 1, 6)
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
    rows = {row["what"]: row["median"] for row in bench.kernel_rows("H", spent)}
    assert rows == {
        "matmul, 1 kernels": 60.0,
        "attention, 1 kernels: cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": 20.0,
        "compiled, 1 kernels": 10.0,
        "optimizer, 1 kernels": 6.0,
        "eager, 2 kernels": 3.5,
        "copies, 1 kernels": 0.5,
        "eager: void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel>": 3.0,
    }
