"""plan.py: the oracles are what FSDP2 holds under a fake process group, and the peak memory of real steps."""

import ctypes
import gc
import itertools
import math
import re
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

import memory
import plan
import preflight
import shard
import train
from base import host
from base.disk import ROOT
from base.errors import exit_status
from base.ranks import ALONE, Ranks
from base.tensors import PINNED, local
from config import parse_args
from data import Batch
from optim import Gradients, make_optimizer
from test_shard import peak_rss, run_ranks

RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.args") if "each GPU: " in path.read_text())
H100 = plan.GPUS["h100-80"]


@pytest.fixture(params=[1, 64])
def fake_ranks(request):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    _clear_sharding_prop_cache()  # else DTensor finds an equal mesh of an earlier test, whose groups have ended
    yield Ranks(0, request.param, torch.device("cpu"))
    dist.destroy_process_group()


class Received(memory._Live):
    """Counts the bytes of existing tensors, and the bytes that come from other ranks."""

    def __init__(self, known, ranks: Ranks):
        super().__init__(known)
        self.ranks, self.bytes = ranks.world_size, dict.fromkeys(("shard_dim_alltoall", "all_gather_into_tensor"), 0)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented
        if "wrap_tensor" in op.name():  # its result has no memory
            return op(*args)
        out, name = super().__torch_dispatch__(op, types, args, kwargs), op.name().partition("::")[2]
        if name in self.bytes:
            size = 8 if name == "shard_dim_alltoall" else args[1]
            self.bytes[name] += out.nbytes * (size - 1) // size
        return out


@pytest.mark.parametrize("fake_ranks", [16, 64], indirect=True)
@pytest.mark.parametrize("layers", [3, 20])
@torch.no_grad()
def test_muon_receives_the_parts_of_stacks_that_it_needs(fake_ranks, layers, monkeypatch):
    """On meshes 2 x 8 and 8 x 8, as a GPU exchanges them. The memory is about what is planned."""
    monkeypatch.setattr("torch.distributed.tensor._collective_utils.local_tensor_mode", lambda: True)
    words = f"--model tiny-llama --dtype fp32 --optimizer muon --n_layers {layers} --shard_size 8 --compile none"
    config, mesh = parse_args(words.split()), shard.make_mesh(8, fake_ranks)
    model = train.build(config, fake_ranks, mesh)
    optimizer, known = make_optimizer(model, config), []
    optimizer.matrix_group["lr"] = 0.0
    for p, state in optimizer.state.items():
        p.grad = torch.zeros_like(p)
        known += [local(tensor) for tensor in (p, p.grad, *state.values())]
    for _ in range(2):  # at first, DTensor traces each operator on whole tensors that have no values
        with Received(known, fake_ranks) as live:
            optimizer.update(optimizer.matrix_group, torch.ones(()), torch.zeros(()))
    within, between, peak = memory.muon_stacks(config, fake_ranks.world_size)
    assert (within, between) == (*live.bytes.values(),)
    assert 0.75 * peak < max(live.peaks.values()) <= peak


# Experts in 64 parts, norms behind, a fused file, norms around, no gate.
NEW = ("qwen3-30b-a3b", "olmo3-7b", "phi-4", "gemma3-1b", "tiny-arcee")


def test_bytes_of_tensors_are_those_that_fsdp_holds(fake_ranks):
    ranks = fake_ranks.world_size
    lora = "--model llama3.2-1b --lora 8 --lora_targets q,down --dtype bf16"
    models = [f"--model {m}" for m in ("gpt2", "llama2-70b", "llama3.2-1b", "mixtral-8x22b", "tiny-mixtral", *NEW)]
    for words, size in itertools.product((*models, lora, f"{lora} --quantize nf4"), (0, 8) if ranks > 1 else (0,)):
        fixed = ["--n_layers=2", "--state_dtype=bf16", "--compile=none", f"--shard_size={size}", "--dtype=fp32"]
        config = parse_args([*fixed, *words.split()])
        mesh = shard.make_mesh(size, fake_ranks)
        built = train.build(config, replace(fake_ranks, device=torch.device("meta")), mesh)
        _, shards = shard.mesh_shape(size, ranks)
        held = sorted((local(p).numel(), p.requires_grad) for p in built.parameters())
        assert sorted((row.elements, row.trains) for row in memory.kept(config, shards)) == held, (words, size)
        parameters = sum(local(t).nbytes for t in (*built.parameters(), *built.buffers()))
        gradients = sum(local(p).nbytes for p in built.parameters() if p.requires_grad)
        expected = {"parameters": parameters, "gradients": gradients, "optimizer state": gradients}
        assert memory.state(config, shards) == expected and gradients > 0


SHAPES = [
    "--model tiny-llama --dim 512 --n_heads 8 --n_layers 8 --ffn_dim 1536 --seq_len 64 --micro_batch 1 --dtype fp32",
    "--model tiny-gpt2 --vocab_size 25000 --seq_len 128 --micro_batch 8 --checkpointing none --dtype fp32",
    "--model tiny-gemma3 --dim 512 --n_heads 8 --n_layers 8 --ffn_dim 1536 --seq_len 128 --micro_batch 4 --dtype fp32",
    "--model tiny-arcee --dim 512 --n_heads 8 --n_layers 8 --ffn_dim 2048 --seq_len 128 --micro_batch 4 --dtype fp32",
]


def measure_peaks() -> None:
    """Prints the peak of two steps of each model, in a process whose allocator gives memory back at once."""
    torch.set_num_threads(2)
    trim_threshold, mmap_threshold = -1, -3  # malloc.h; a forked process ignores MALLOC_ variables
    assert all(ctypes.CDLL(None).mallopt(parameter, 65536) for parameter in (trim_threshold, mmap_threshold))
    for words in ("--model tiny-mixtral --dtype fp32", *SHAPES):
        config = preflight.settle(parse_args([*words.split(), "--compile=none", "--tokenizer=bytes"]), ALONE)
        tokens = torch.randint(config.model_config.vocab_size, (config.micro_batch, config.seq_len))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = peak_rss(reset=True)
        model = train.build(config, ALONE, None)
        for p in model.parameters():
            torch.nn.init.normal_(p, 0.0, 0.02)
        optimizer, gradients = make_optimizer(model, config), Gradients(model, config, ALONE, None)
        for _ in range(2):
            scales = SimpleNamespace(refresh=int)
            train.train_step(model, optimizer, [Batch(tokens, tokens, None)], 1e-3, gradients, scales)
        print(peak_rss() - before)
        del model, optimizer, gradients, p


def test_peak_memory_of_steps_on_a_cpu(monkeypatch):
    monkeypatch.delitem(memory.KERNELS, torch.nn.functional.rms_norm)  # a CPU's is not fused
    _, *measured = map(int, run_ranks(1, "import test_plan; test_plan.measure_peaks()").split())
    cluster = plan.cluster_here(ALONE)  # the first shape also loads what all use
    for words, peak in zip(SHAPES, measured, strict=True):
        config = parse_args([*words.split(), "--compile", "none"])
        config = replace(config, attention="sdpa", batch_tokens=config.micro_batch * config.seq_len)
        host = memory.memory(config, cluster)["host"]
        needed = sum(host.values()) - host["processes"] - host["copies for saves"]
        assert needed == pytest.approx(peak, rel=0.12), words


def answer(capsys, words: str) -> tuple[int, str, str]:
    status = exit_status(plan.main, words.split())
    return status, *capsys.readouterr()


def planned(words: str) -> plan.Plan:
    return plan.predict(*plan.parse(words.split()))


@pytest.mark.parametrize("words, cheapest", [
    ("--model llama3.1-8b --seq_len 4096 --micro_batch 1", "--state_dtype bf16 --param_dtype bf16"),
    ("--model llama3.1-8b --seq_len 2048 --micro_batch 4 --gpu rtx4090", "--checkpointing block --lora 16"),
    ("--model mixtral-8x7b --gpu h100-80", "--offload cpu"),  # experts have no adapters
    ("@recipes/llama3.1-405b.args --gpus 8", "--lora 16"),
])  # fmt: skip
def test_a_newcomer_learns_what_makes_a_run_fit(capsys, words, cheapest):
    status, out, _ = answer(capsys, words)
    assert status == 0 and ": it does not fit.\n" in out
    assert not re.search("tokens/s|hours", out)  # of a run that cannot start
    run = planned(words)
    assert f"\nThe cheapest flags that make it fit: with `{cheapest}`, each {run.lacking()[0]}: " in out
    batch = f"--batch_tokens {run.config.batch_tokens}"
    assert not planned(f"{words} {cheapest} {batch}").lacking()
    for flag in re.findall(r"--\w+ \w+", cheapest):
        assert planned(f"{words} {cheapest.replace(flag, '')} {batch}").lacking(), flag


@pytest.mark.parametrize("words", ["--save_seconds 487 --failure_hours 12", "--save_seconds 20"])
def test_the_best_interval_of_saves_loses_least(capsys, words):
    """The oracle tries every interval, with failures spread evenly over it; by default one in 50,000 hours of a GPU.
    The guide shows the first."""
    words = f"@recipes/llama3.1-405b.args --nodes 8 --gpus 8 {words}"
    line, run = answer(capsys, words)[1].splitlines()[-1], planned(words)
    assert "--failure_hours" not in words or line in (ROOT / "guide/4-405b-on-8-machines.md").read_text("utf-8")
    every, hours = re.search(r"--save_every (\d+) loses least, ([\d,]+) GPU", line).groups()
    save, mean = run.cluster.save_seconds, 3600 * (run.cluster.failure_hours or 50000 / 64)
    lost = {n: 64 * 168 * (save + (n * run.seconds) ** 2 / 2 / mean) / (n * run.seconds) for n in range(1, 2000)}
    assert min(lost, key=lost.get) == pytest.approx(int(every), abs=1)
    assert int(hours.replace(",", "")) == pytest.approx(min(lost.values()), abs=1)


def test_gpus_and_hosts_are_judged_apart(capsys):
    _, out, _ = answer(capsys, "--model llama3.1-405b --gpu rtx4090 --host_gib 64")
    assert "\nNo flags make it fit: with `" in out
    words = "@recipes/llama3.1-405b.args --gpus 8"
    _, out, _ = answer(capsys, f"{words} --host_gib 7000 --price 2")
    assert "it fits" in out and "of 7,000 GiB (--host_gib)\n" in out and re.search(r" steps\), \$[\d,]+\n", out)
    assert planned(f"{words} --offload none").lacking() == ["GPU", "host"]


def test_pairs_need_the_time_of_their_reference_and_of_logits_twice(capsys):
    words = "--model llama3.2-1b --lr 1e-6"
    before, after = (planned(f"{words} --dpo {kind}").times for kind in ("none", "sigmoid"))
    assert after == before | {"lm_head and loss": pytest.approx(before["lm_head and loss"] * 4 / 3)}
    assert [len(re.findall("\n  reference: ", answer(capsys, f"{words} {dpo}")[1])) for dpo in (
        "", "--dpo ipo", "--dpo simpo --dpo_beta 2"
    )] == [0, 1, 0]  # fmt: skip


def test_saves_need_a_copy_of_the_state_and_on_a_gpu_pinned_memory():
    for words, copies in (("", True), (" --save_async off", False), (" --offload cpu", False)):
        config = parse_args(f"--dtype fp32{words}".split())
        for cluster, pinned in ((plan.cluster_here(ALONE), 0), (plan.Cluster(1, 1, H100), PINNED)):
            size = memory.memory(config, cluster, least=True)["host"].get("copies for saves", 0)
            assert size == copies * (memory.checkpoint_bytes(config) + pinned)


def test_shared_rows_take_the_activations_of_their_part():
    """Fewer by what the exchange lets go of, more by what it makes."""
    words = "--model llama3.2-1b --gpus 4 --micro_batch 1 --compile none --seq_len"
    whole = memory.trace(*plan.parse(f"{words} 256".split()))
    part = memory.trace(*plan.parse(f"{words} 1024 --context_parallel 4".split()))
    assert all(0.99 < b / a < 1.15 for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("words, message", [
    ("--gpus 0", "--gpus: 0 must be at least 1"), ("--gpu h1000", "--gpu: invalid choice: 'h1000' .*h100-80"),
    ("--gpus 6 --shard_size 4", "--shard_size 4 does not divide the 6 ranks"), ("--layers 3", "arguments: --layers 3"),
    ("--gpus 6 --context_parallel 4", "--context_parallel 4 does not divide the 6 ranks"),
    ("--batch_tokens 1000 --micro_batch 1", "does not divide by micro_batch x seq_len x ranks"),
    ("--gpus 8 --compile model", "--compile model with several processes"),
    ("--gpu a100-80 --fp8 tensor", "has no FP8"), ("--fp8 row --dtype fp32", "need --dtype bf16, not fp32"),
    ("--fp8 row --fp8_skip layers.99", "--fp8_skip: no layer is called layers.99"),
    ("--attention varlen --dtype fp32", "--attention varlen needs a GPU"),
    ("--epochs 2", "plan.py reads no data; give --steps"), ("--failure_hours 9", "no effect without --save_seconds"),
    ("--model llama3-8b --weights x --lora_weights y", "--lora_weights has no effect without --weights"),
])  # fmt: skip
def test_mistakes_are_refused_in_the_words_of_training(capsys, words, message):
    status, _, err = answer(capsys, words)
    assert status == 2 and re.search(message, err) and err.count("\n") == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_heads_of_recipes_are_what_the_plan_says(capsys, recipe):
    text = (ROOT / "recipes" / recipe).read_text()
    status, out, err = answer(capsys, re.search(r"Planned by `python plan.py (.*)`:\n", text)[1])
    assert status == 0, err
    lines = out.splitlines()
    head = [textwrap.fill(line, 120, initial_indent="# ", subsequent_indent="#     ") for line in lines]
    assert "\n".join([*head, ""]) in text, "\n".join(head)


def test_the_guide_s_table_is_what_the_plan_says():
    """Of one row of 4,096 tokens on each of 1, 8 and 64 H100."""
    text = (ROOT / "guide" / "memory.md").read_text("utf-8").partition("| model | setting | 1 GPU | 8 | 64 |\n")[2]
    rows, model = [line.split("|")[1:-1] for line in text.partition("\n\n")[0].splitlines()[1:]], ""
    assert len(rows) == 8
    for name, setting, *cells in rows:
        model, flags = name.strip() or model, re.findall("`(.*)`", setting)
        words = f"--model {model} --seq_len 4096 --micro_batch 1 {' '.join(flags)}"
        for cell, (nodes, gpus) in zip(cells, ((1, 1), (1, 8), (8, 8)), strict=True):
            if cell := cell.strip():
                size = planned(f"{words} --nodes {nodes} --gpus {gpus}").needs("GPU")
                output = f"{size:,.0f}" if size >= 100 else f"{size:.1f}"
                assert cell == output + " (too much)" * (size > 79.1), (words, gpus)


def test_the_guide_s_recipes_need_what_the_plan_says():
    page = (ROOT / "guide" / "2-fine-tune.md").read_text("utf-8")
    rows = re.findall(r"\| `(@recipes/\S+)` \| (\d) x \d+ GB \| ([\d.]+) \|", page)
    assert len(rows) == 7
    for recipe, gpus, size in rows:
        assert size == f"{planned(f'{recipe} --gpus {gpus}').needs('GPU'):.1f}", recipe


def test_what_is_predicted_of_a_record(monkeypatch):
    words = "--seq_len 64 --micro_batch 0 --batch_tokens 128 --dtype fp32 --compile none"
    words += " --n_layers 4 --fp8 row --fp8_skip layers.3"  # of which a trace has fewer blocks
    config, ranks = parse_args(words.split()), Ranks(0, 1, torch.device("cuda"))
    for gpu, names in ((H100._replace(tflops=0), ["mem_gib"]), (H100, ["mem_gib", "step_ms"])):
        monkeypatch.setattr(plan, "cluster_here", lambda ranks, gpu=gpu: plan.Cluster(1, 1, gpu))
        predicted = plan.predict_record(config, ranks)
        assert [*predicted] == names and all(0 < value < math.inf for value in predicted.values())
    assert predicted["mem_gib"] < 0.5


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA L40S", 362),
    ("NVIDIA GH200 480GB", 989), ("NVIDIA L40", 181), ("NVIDIA L4", 121), ("NVIDIA A10G", 70), ("NVIDIA A10", 125),
])  # fmt: skip
def test_known_peaks(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    flops, source = host.peak_flops(torch.device("cuda", 0), torch.bfloat16)
    assert flops == tflops * 1e12 and "data sheet" in source
