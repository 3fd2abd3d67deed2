"""What decides whether a GPU trains right: waits, kernels, graphs, memory, values, whole runs. More of it, against fp64
or a CPU, is in test_model.py, test_fp8.py, test_shard.py and test_optim.py.

    python -m pytest -m gpu                              on a GPU
    python -m pytest -m host                             of these, what is true of the host's side alone: torch's CUDA
                                                         build over a stand-in for the driver, whose kernels compute
                                                         nothing, decides it, too
    python -m pytest -m "gpu and not host and not real"  of these, what values decide: a stand-in that computes them on
                                                         the CPU will do"""

import contextlib
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

import attention
import checkpoint
import fp8
import model as model_module
import preflight
import shard
import train
from base.disk import ROOT
from base.errors import Failure
from base.ranks import ALONE, Ranks
from config import parse_args
from data import Batch
from model import IGNORE, cross_entropy_, document_begins
from optim import Gradients, make_optimizer
from test_model import begins, causal, compare_with_naive, cross_entropy_fp64, in_window, make_head, make_inputs, randn
from test_shard import fill
from test_train import values

pytestmark = pytest.mark.gpu
host, real = pytest.mark.host, pytest.mark.real
CUDA = torch.device("cuda", 0)
TINY = "--dim 256 --n_heads 4 --ffn_dim 512 --n_layers 2 --vocab_size 8192 --seq_len 512 --micro_batch 16"
SMALL = "--seq_len 128 --micro_batch 4"  # for tests of values, which a CPU may compute
KINDS = {
    "llama": "",
    "gpt2": "--model tiny-gpt2 --seq_len 256",
    "mixtral": "--model tiny-mixtral",
    "packed": "--documents separate",
    "selective": "--checkpointing selective",
    "offloaded activations": "--checkpointing block --offload_activations",
    "bf16 states": "--param_dtype bf16 --state_dtype bf16",
    "fp8 tensor": "--fp8 tensor",
    "fp8 row": "--fp8 row",
}


def make_batch(config, length: int = 128) -> Batch:
    """Random tokens, in documents of this length if the rows are packed."""
    generator = torch.Generator().manual_seed(0)
    shape = config.micro_batch, config.seq_len
    tokens = torch.randint(0, config.model_config.vocab_size, shape, generator=generator)
    if config.documents != "separate":
        return Batch(tokens, tokens)
    positions = (torch.arange(shape[1]) % length).expand(shape).contiguous()
    return Batch(tokens, tokens, positions, document_begins(positions))


def make_model(flags: str, device: torch.device = CUDA, mesh: bool = False, **changes):
    """-> resolved flags, with changes; a filled model, as train.py makes it; the mesh."""
    config = parse_args(f"--model tiny-llama --tokenizer bytes {TINY} {flags}".split())
    config, ranks = replace(preflight.settle(config, replace(ALONE, device=device)), **changes), Ranks(0, 1, device)
    grid = shard.make_mesh(1, ranks, offload=True) if mesh else None
    return config, fill(train.build(config, ranks, grid)), grid


def make_training(flags: str, mesh: bool = False):
    """-> step(): one optimizer step, as train.py makes it, returning the loss; the model; the optimizer."""
    config, model, grid = make_model(flags, mesh=mesh, compile="none")
    scales, optimizer = (
        fp8.WeightScales(model, grid, config.fp8_all_gather, False, config.compile != "none"),
        make_optimizer(model, config),
    )
    gradients, batch = Gradients(model, config, Ranks(0, 1, CUDA), grid), make_batch(config)

    def step(number: int) -> torch.Tensor:
        loss, _, _ = train.train_step(model, optimizer, [batch, batch], 1e-3, gradients, scales)
        with contextlib.suppress(Failure):  # over a stand-in, values are what lies in memory
            gradients.check(number)
        return loss

    return step, model, optimizer


@host
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_wait_for_the_gpu(kind):
    step, _, _ = make_training(KINDS[kind])
    step(1), step(2)  # the first makes the optimizer's state
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in (3, 4, 5):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@host
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 32, 128), (12, 12, 64), (25, 25, 64), (32, 8, 80)], ids=str)
def test_no_attention_keeps_all_probabilities(heads, dtype, separate):
    assert "math" not in attention.kernel("sdpa", separate, CUDA, dtype, heads)


@host
@pytest.mark.parametrize("mode, flags", [
    ("block", ""),
    ("block", "--checkpointing selective --documents separate"),
    ("block", "--checkpointing selective --fp8 row"),
    ("block", "--checkpointing block --model tiny-gpt2"),
    ("block", "--checkpointing selective --fp8 tensor --model tiny-mixtral"),
    ("model", ""),
    ("model", "--model tiny-mixtral"),
])  # fmt: skip
def test_a_model_is_a_graph_for_its_blocks_and_one_for_its_loss(mode, flags, monkeypatch):
    """In training, and as many in evaluation; packed rows have one more, for many documents."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # traced, not compiled
    config, model, _ = make_model(f"--n_layers 3 --seq_len 256 --micro_batch 2 {flags}", compile=mode)
    for length in (128, 32, 1):
        batch = make_batch(config, length).to(CUDA)
        given = batch.tokens, batch.targets, batch.positions, batch.documents
        model(*given).backward()
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model(*given)
    graphs = counters["stats"]["unique_graphs"]
    assert not counters["graph_break"] and graphs <= (4 if mode == "block" else 2) + ("separate" in flags)


@host
@pytest.mark.parametrize("heads, window", [((8, 8), 0), ((8, 2), 0), ((8, 2), 16)], ids=str)
def test_varlen_runs_the_kernel_that_the_log_names(heads, window):
    """torch 2.15 would choose cuDNN without a window."""
    q, k, v = (
        torch.zeros(1, 256, n, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for n in heads + heads[1:]
    )
    begins = torch.tensor([0, 128, 256], dtype=torch.int32, device=CUDA)
    with torch.profiler.profile() as profile:
        attention.attention(q, k, v, None, "varlen", window, begins).sum().backward()
    kernels = {event.key for event in profile.key_averages() if re.search("_attention_(forward|backward)$", event.key)}
    assert kernels == {"aten::_flash_attention_forward", "aten::_flash_attention_backward"}


def peak_of(run) -> int:
    """Bytes beyond what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


@host
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_compiled_loss_needs_nothing_as_large_as_its_logits(dtype):
    n, V = 1024, 128256
    logits, targets = torch.zeros(n, V, device=CUDA, dtype=dtype), torch.zeros(n, device=CUDA, dtype=torch.int64)
    compiled = torch.compile(cross_entropy_, dynamic=False)
    compiled(logits, targets, True)
    assert peak_of(lambda: compiled(logits, targets, True)) < logits.nbytes // 100


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_loss_head_against_fp64(monkeypatch, size, compiled):
    """Three chunks, of which the last is smaller; rows that are not trained on; logits of up to 1e4."""
    monkeypatch.setattr(model_module, "CHUNK_BYTES", 256 * 4096)
    head, x = make_head(4096, 256), randn(1, 640, 256).bfloat16()
    head.weight.data *= size / 16
    targets = torch.randint(0, 4096, (1, 640), generator=torch.Generator().manual_seed(0))
    targets[0, ::7] = IGNORE
    expected, *exact = cross_entropy_fp64(x, head.weight, targets)
    head, x = head.to(CUDA), x.to(CUDA).requires_grad_()
    if compiled:
        head.cross_entropy_ = torch.compile(head.cross_entropy_, dynamic=False)
    loss, _ = head(x, targets.to(CUDA))
    loss.backward()
    assert abs(loss.item() / expected.item() - 1) < 5e-3
    for found, wanted in zip((x.grad, head.weight.grad), exact, strict=True):
        assert (found.cpu().double() - wanted).norm() < 2e-2 * wanted.norm()
    assert not x.grad[0, ::7].any()


@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("documents", [0, 1, 33, 513])
@pytest.mark.parametrize("heads, h", [((4, 4), 64), ((8, 2), 64), ((8, 2), 128), ((8, 2), 256)], ids=str)
@pytest.mark.parametrize("backend", ["sdpa", *attention.PACKED])
def test_attention_kernels_against_fp64(backend, heads, h, documents, window):
    """Plain rows (0), or documents."""
    if backend == "flash":
        pytest.importorskip("flash_attn", reason=attention.INSTALL_FLASH)
    T = 1026
    document = torch.arange(T) // -(-T // max(documents, 1))
    mask = causal(T) & (document[:, None] == document)
    allowed = mask & in_window(T, window)
    given = None if not documents else mask.to(CUDA) if backend == "sdpa" else begins(mask).to(CUDA)
    how = (given, backend, window) if backend == "sdpa" else (None, backend, window, given)
    inputs = [t.to(CUDA) for t in make_inputs(1, T, heads, torch.bfloat16, h)]
    compare_with_naive(inputs, allowed, lambda q, k, v: attention.attention(q, k, v, *how), 2.0**-6)


@pytest.mark.parametrize("kind", ["llama", "bf16 states"])
def test_a_suppressed_update_changes_no_bit(kind):
    step, model, optimizer = make_training(f"{KINDS[kind]} {SMALL}")
    step(1)
    model.norm.weight.data[0] = float("nan")
    state = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    before = [t.detach().clone() for t in state]
    step(2)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(state, before, strict=True))


@pytest.mark.parametrize("kind", ["llama", "mixtral", "bf16 states"])
def test_offloading_changes_nothing(kind):
    losses = []
    for words, mesh in (("", False), ("--offload cpu", True)):
        step, _, _ = make_training(f"{KINDS[kind]} {SMALL} {words}", mesh)
        losses.append([step(n).item() for n in range(1, 4)])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_a_compiled_model_computes_what_a_cpu_does():
    """The loss and every gradient: in fp32 to 1e-4, in bf16 to twice the CPU's own error."""
    torch.set_float32_matmul_precision("highest")
    cpu, found = torch.device("cpu"), []
    for device, dtype in ((cpu, "fp32"), (cpu, "bf16"), (CUDA, "fp32"), (CUDA, "bf16")):
        changes = {"dtype": dtype, "compile": "none" if device == cpu else "block", "attention": "sdpa"}
        config, model, _ = make_model("--n_layers 4 --seq_len 256 --micro_batch 2", device, **changes)
        batch = make_batch(config).to(device)
        loss = model(batch.tokens, batch.targets)
        loss.backward()
        found.append([t.detach().double().cpu() for t in (loss, *(p.grad for p in model.parameters()))])
    pairs = [zip(values, found[0], strict=True) for values in found[1:]]
    cpu_bf16, fp32, bf16 = (torch.stack([(a - b).norm() / b.norm() for a, b in p]).max() for p in pairs)
    assert fp32 < 1e-4 and bf16 < 2 * cpu_bf16


# ---- whole runs


def run_train(out, words: str, status: int = 0, gpus: int = 1) -> str:
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if gpus > 1 else []
    line = [sys.executable, *several, "train.py", "--model", "tiny-llama", "--out", str(out), *words.split()]
    line += ["--cache", f"{out}-cache"]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == status, done.stdout
    return done.stdout


def test_resumed_runs_repeat_the_bits_of_an_uninterrupted_one(tmp_path, text):
    """Deterministic kernels; checkpoints are written while the training goes on."""
    words = f"{SMALL} --data {text} --deterministic --log_every 1 --save_every 4 --eval_every 0 --sample_every 0"
    words += " --schedule constant --steps"
    for out, steps in (("whole", 12), ("halves", 6), ("halves", 12)):
        run_train(tmp_path / out, f"--compile none {words} {steps}")
    assert values(tmp_path / "halves") == values(tmp_path / "whole")


@real
def test_what_does_not_fit_is_explained(tmp_path):
    """The inputs of the blocks take half of the memory, so that the run starts, and the rest does not fit."""
    row_bytes = 2048 * 2 * 64 * 2  # tokens, layers, dim, bf16
    rows = torch.cuda.get_device_properties(CUDA).total_memory // (2 * row_bytes)
    output = run_train(tmp_path / "run", f"--compile none --seq_len 2048 --micro_batch {rows}", status=1)
    assert "plan.py" in output and "out of memory" in output


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("words", ["--fp8 tensor --fp8_all_gather --compile block", "--offload cpu", "",
                                   "--shard_size 1 --param_dtype bf16 --state_dtype bf16"])  # fmt: skip
def test_two_gpus_train_as_one_evaluate_and_save(tmp_path, text, words):
    words += f" {SMALL} --data {text} --dim 256 --n_heads 4 --ffn_dim 512 --steps 4 --log_every 1 --eval_every 2"
    words += " --eval_batches 1 --save_every 2 --sample_every 0 --batch_tokens 1024"
    run_train(tmp_path / "one", words.replace("--fp8_all_gather", ""))
    run_train(tmp_path / "two", words, gpus=2)
    one, two = ([loss for loss, *_ in values(tmp_path / run).values()] for run in ("one", "two"))
    assert two == pytest.approx(one, rel=5e-3)
    assert checkpoint.verify(tmp_path / "two") == [(2, True, ""), (4, True, "")]
