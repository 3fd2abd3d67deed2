"""profiler.py: events made up by hand, whose categories are known, and the traces of real runs."""

import re
from types import SimpleNamespace

import pytest
import torch

import profiler
from config import parse_args
from lib.errors import UserError
from log import Clock
from test_shard import ALONE
from test_train import FAST, records, train
from train import main as train_main


def event(name: str, start: float, end: float, cat: str = "cpu_op", tid: int = 1, **args) -> dict:
    return {"ph": "X", "name": name, "ts": start, "dur": end - start, "cat": cat, "tid": tid, "args": args}


def train_here(*words) -> None:
    """Trains in this process."""
    with torch._inductor.config.patch("cpp.enable_kernel_profile", False):  # which gives it its value back
        assert train_main([*map(str, words)]) == 0


def step(start: float, end: float) -> dict:
    return event("ProfilerStep#1", start, end, "user_annotation")


def spent(events: list[dict], vocab: int = 0) -> dict[str, float]:
    return {kind: time for kind, time in profiler.analyse(events, vocab)[0].items() if time}


def test_on_a_cpu_every_moment_is_the_innermost_operation_s():
    events = [
        step(0, 100),
        event("part: data", 0, 5, "user_annotation"),
        event("aten::to", 1, 3),  # while it waits for data
        event("Torch-Compiled Region: 0/0", 10, 50),
        event("graph_0_cpp_fused__to_copy_mean_mul_pow_rsqrt_0", 12, 15),
        event("aten::mm", 15, 25),
        event("aten::resolve_conj", 16, 17),  # inside it
        event("graph_0_cpp_fused__softmax__to_copy_le_masked_fill_2", 25, 29),
        event("aten::bmm", 29, 35),
        event("_LinearCrossEntropy", 50, 60),
        event("aten::mm", 52, 58),
        event("aten::_scaled_dot_product_flash_attention_for_cpu_backward", 60, 67),
        event("Optimizer.step#AdamW.step", 70, 80, "user_annotation"),
        event("aten::_fused_adamw_", 71, 79),
        event("FSDP::post_backward_reduce", 80, 84, "user_annotation"),
        event("aten::copy_", 81, 82),
        event("gloo:all_reduce", 78, 92, tid=2),
        event("aten::mul", 120, 130),  # after the steps
    ]
    assert spent(events) == pytest.approx({
        "data wait": 5, "norms and elementwise": 3, "matmul": 10, "attention": 10 + 7, "loss head": 10, "optimizer": 10,
        "communication": 4 + 8, "idle": 5 + 2 + 15 + 3 + 8,
    })  # fmt: skip


def test_on_a_gpu_kernels_are_told_by_name_and_by_who_launched_them():
    def launch(at: float, correlation: int, *around: str, tid: int = 1) -> list[dict]:
        ranges = [event(name, at - 0.5, at + 0.5, tid=tid) for name in around]
        return [*ranges, event("cudaLaunchKernel", at, at + 0.1, "cuda_runtime", tid, correlation=correlation)]

    def kernel(name: str, start: float, end: float, correlation: int, cat: str = "kernel") -> dict:
        return event(name, start, end, cat, tid=7, correlation=correlation)

    events = [
        step(0, 200),
        *launch(1, 1), kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", 10, 30, 1),
        *launch(2, 2), kernel("triton_poi_fused__scaled_dot_product_cudnn_attention_0", 30, 35, 2),
        *launch(3, 3), kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 35, 50, 3),
        *launch(4, 4, "_LinearCrossEntropy"), kernel("nvjet_tst_192x192", 50, 60, 4),
        *launch(5, 5, "Optimizer.step#AdamW.step"), kernel("void at::native::elementwise_kernel<128>", 60, 64, 5),
        *launch(6, 6, "CompiledFunctionBackward", tid=9), kernel("triton_red_fused_mul_0", 70, 80, 6),
        *launch(7, 7, "FSDP::all_gather"), kernel("void at::native::chunk_cat_cuda_kernel", 80, 83, 7),
        *launch(8, 8), kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 75, 100, 8),
        *launch(9, 9, "aten::to"), kernel("Memcpy HtoD (Pinned -> Device)", 110, 111, 9, "gpu_memcpy"),
        *launch(10, 10, "aten::mm"), kernel("some_new_library_kernel", 130, 140, 10),
        event("part: data", 100, 125, "user_annotation"),
        event("Optimizer.step#AdamW.step", 150, 170, "user_annotation"),
        event("aten::_fused_adamw_", 155, 165),  # of parameters that live on the CPU
        event("gpu range", 0, 200, "gpu_user_annotation", tid=7),
    ]  # fmt: skip
    assert spent(events) == pytest.approx({
        "matmul": 20 + 10, "norms and elementwise": 5 + 10 + 1, "attention": 15, "loss head": 10, "optimizer": 4 + 10,
        "communication": 20, "data wait": 24, "idle": 10 + 6 + 5 + 50,
    })  # fmt: skip


def test_a_product_with_the_vocabulary_in_it_is_the_loss_head_s():
    assert profiler.category(["CompiledFunction", "aten::mm"], 1000, [[64, 32], [32, 1000]]) == "loss head"
    assert profiler.category(["CompiledFunction", "aten::mm"], 1000, [[64, 32], [32, 96]]) == "matmul"
    assert profiler.category(["graph_0_cpp_fused_add_arange_exp_gather_logsumexp_sub_3"]) == "loss head"


def test_the_first_category_wins_and_the_sum_is_the_wall():
    overlapping = [(0.0, 10.0, "communication"), (2.0, 4.0, "matmul"), (3.0, 6.0, "attention"), (9.0, 99.0, "idle")]
    divided, names = profiler.divide([(*span, "its name") for span in overlapping], 1.0, 20.0)
    assert sum(divided.values()) == 19.0
    assert (divided["matmul"], divided["attention"], divided["communication"]) == (2.0, 2.0, 5.0)
    assert names["attention"] == {"its name": 2.0}


@pytest.mark.parametrize(
    ("flags", "ranks", "found"),
    [
        ("--compile none --model tiny-mixtral", 1, set()),
        pytest.param("--compile block --n_layers 1", 1, set(), marks=pytest.mark.slow),
        ("--compile none", 2, {"communication"}),
    ],
    ids=["moe", "compiled", "two processes"],
)
def test_a_profiled_run(tmp_path, text, flags, ranks, found):
    run = tmp_path / "run"
    words = [*FAST, "--data", text, "--steps", 5, "--log_every", 1, "--eval_every", 5, "--profile", 2, *flags.split()]
    words += ["--batch_tokens", 512, "--out", run]
    train_here(*words) if ranks == 1 else train(*words, ranks=ranks)
    assert len(records(run)) == 5
    assert sorted(p.name for p in (run / "profile").iterdir()) == ["rank-00000.trace.json.gz", "table.txt"]
    events = profiler.read_trace(run / "profile/rank-00000.trace.json.gz")
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    times, names, count = profiler.analyse(events, 258)
    wall = max(e["ts"] + e["dur"] for e in steps) - min(e["ts"] for e in steps)
    assert sum(times.values()) == pytest.approx(wall, rel=1e-6) and len(steps) == count == 2
    ours = {"matmul", "attention", "loss head", "norms and elementwise", "optimizer", "data wait", "idle"}
    # Step 5 is saved and evaluated, which is no part of the table.
    assert {kind for kind, time in times.items() if time} == {*ours, *found, profiler.OTHER}
    table = (run / "profile/table.txt").read_text()
    log = re.sub(r"(?m)^\S+ \S+ I \[profiler.py:\d+\] ", "", (run / "log.txt").read_text())
    assert table in log and "Profiling steps 4 to 5: slower, and so is what is recorded of them" in log
    rows = dict(re.findall(r"(?m)^(\S.*?) {2,}([\d.]+) {2}", table))
    assert float(rows.pop("wall time")) == pytest.approx(sum(map(float, rows.values())), abs=0.05 * len(rows))
    if "block" in flags:
        assert any("cpp_fused" in name for name in names["norms and elementwise"])
    if ranks == 1:  # profiling changes no value
        train_here(*words[:-1], tmp_path / "plain", "--profile", 0)
        values = [
            [(r["step"], r["loss"], r["grad_norm"]) for r in records(tmp_path / name)] for name in ("run", "plain")
        ]
        assert values[0] == values[1]


def run_at(folder, steps: int, profile: int) -> SimpleNamespace:
    """What `profiled` needs of a Run."""
    config = parse_args(["--steps", str(steps), "--profile", str(profile)])
    return SimpleNamespace(config=config, ranks=ALONE, folder=folder, phase=Clock().part)


def test_too_few_steps_are_refused(tmp_path):
    with pytest.raises(UserError, match="--profile 3 needs --steps 6: 3 come before .*; there are 5"):
        parse_args(["--steps", "5", "--profile", "3"])
    assert [*profiler.profiled(range(5, 9), run_at(tmp_path, 8, 3))] == [5, 6, 7, 8]  # a run that goes on from step 4
    assert not (tmp_path / "profile").exists()


def test_what_was_seen_is_written_when_the_run_is_stopped(tmp_path):
    """The loop is left in the second of four profiled steps."""
    for number in profiler.profiled(range(1, 10), run_at(tmp_path, 9, 4)):
        if number == 5:
            break
    assert (tmp_path / "profile/table.txt").read_text().rstrip().endswith("100.0%")
    events = profiler.read_trace(tmp_path / "profile/rank-00000.trace.json.gz")
    assert profiler.analyse(events)[2] == 2
