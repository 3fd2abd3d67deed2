"""shard.py: the oracle is one process that is not sharded; the workers below are real gloo processes under torchrun."""

import ctypes
import errno
import gc
import multiprocessing
import multiprocessing.connection
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.logging_tensor import capture_logs_with_logging_tensor_mode

import generate
import log
import nf4
import plan
import preflight
import shard
from base import host
from base import ranks as rank_module
from base.disk import ROOT
from base.errors import Failure, UserError
from base.ranks import ALONE, Ranks, gather, init_ranks, on_every_rank, on_first_rank, set_timeout
from base.tensors import local
from config import FIELDS, parse_args, refuse_conflicts
from dataset import rows
from model import MODELS, Transformer, random_init

# A run's processes are forked from one that has only imported what they need, which takes seconds each time.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["test_shard", "train", "transformers", "matplotlib.backends.backend_agg", "torch._dynamo"]
)


def skip_plots(replace_by=setattr) -> None:
    """From now on runs neither measure their device's peak nor draw curves: nine tenths of a tiny run's time."""
    replace_by(log, "peak_flops", lambda *_: (1e12, "not measured"))
    replace_by(log.Log, "draw", lambda *_, **__: None)


def be_rank(code: str, words: list[str], env: dict[str, str], folder: str, cache: Path) -> None:
    """Runs Python code in a process of its own: stdout and stderr go to files in the folder. Runs draw no curves but
    with PLOTS in env; their samples are short."""
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{stream}-{env.get('RANK', 0)}", os.O_CREAT | os.O_WRONLY), number)
        setattr(sys, stream, os.fdopen(number, "w", buffering=1))
    gc.freeze()  # imported objects stay, so the collector need not visit them again and again
    os.environ.update(env)
    rows.CACHE = cache
    sys.argv[:] = words
    torch.set_num_threads(1)
    generate.SAMPLE_TOKENS = 10
    if "PLOTS" not in env:
        skip_plots()
    exec(compile(code, words[0], "exec"), {"__name__": "__main__"})
    sys.stdout.flush()


def run_code(code: str, words: list[str], ranks: int = 1, env: dict | None = None, timeout: float = 400):
    """Runs Python code on so many gloo ranks, sys.argv being words -> subprocess.CompletedProcess with what they print,
    one rank after the other. The first that fails ends all."""
    env = {"OMP_NUM_THREADS": "1"} | (env or {})
    if ranks > 1:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            mine = env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
            started.append(SERVER.Process(target=be_rank, args=(code, words, mine, folder, rows.CACHE)))
            started[-1].start()
        deadline, waiting = time.monotonic() + timeout, list(started)
        while waiting and not any(p.exitcode for p in started) and time.monotonic() < deadline:
            multiprocessing.connection.wait([p.sentinel for p in waiting], 10)
            waiting = [p for p in started if p.exitcode is None]
        status = next((p.exitcode for p in started if p.exitcode), -9 if waiting else 0)
        for process in waiting:
            process.kill()
            process.join()
        out, err = ("".join(p.read_text() for p in sorted(Path(folder).glob(f"{n}-*"))) for n in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, status, out, err)


def run_ranks(n: int, code: str | Callable, *args: str) -> str:
    """Runs a test module's function on n gloo ranks, or Python code after a few imports -> what they print. Fails if
    one of them does."""
    if callable(code):
        code = f"from {code.__module__} import {code.__name__} as work; work()"
    imports = "import sys, torch, shard, test_shard; from dataclasses import replace\n"
    imports += "from base import host, ranks as rank_module\n"
    imports += "from job import job as guard; from base.tensors import *\n"
    imports += "from base.errors import Failure; from base.ranks import *\n"
    imports += "from model import MODELS, LossHead, Transformer, random_init\n"
    done = run_code(f"{imports}{code}\nleave(ALONE)", ["worker.py", str(ROOT), *args], n)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def allocate(config, mesh=None, dtype: torch.dtype = torch.float32, device: str = "cpu", **how) -> Transformer:
    """A model whose parameters, of this dtype, hold nothing yet."""
    with torch.device("meta"):
        model = Transformer(config, dtype).to(dtype)
    shard.shard_model(model, mesh, dtype, **how)
    model.to_empty(device=device)
    model.tie_weights()
    return model


def fill(model: Transformer) -> Transformer:
    """Random initial values."""
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    shard.fill_parameters(model, random_init(model.config, shapes, 0))
    return model


def peak_rss(reset: bool = False) -> int:
    """Bytes; since the last reset (Linux: proc(5), clear_refs)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def fill_on_every_mesh() -> None:
    ranks, shard.FILL_BYTES = init_ranks(), 4096
    kinds = ("tiny-llama3.2", 0, torch.float32, False), ("tiny-mixtral", 3, torch.bfloat16, True)
    for name, n_experts, dtype, offload in kinds:
        config = replace(MODELS[name], n_experts=n_experts, vocab_size=259, ffn_dim=136)
        whole = Transformer(config).to(dtype)
        # Of no norm's or bias's name: random values for these, too.
        draw = random_init(config, {n + "_": tuple(p.shape) for n, p in whole.named_parameters()}, 0)

        def read(name, slices, draw=draw):
            return draw(name + "_", slices)

        shard.fill_parameters(whole, read)
        for size in (1, 2, 4):
            for load in ("direct", "rank0"):
                model = allocate(config, shard.make_mesh(size, ranks), dtype, offload=offload)
                for p in model.parameters():
                    local(p.detach()).fill_(float("nan"))
                shard.fill_parameters(model, read if load == "direct" or ranks.rank == 0 else None, load, ranks)
                for (n, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
                    assert torch.equal(p.full_tensor(), q) and q.std() > 0, (size, load, n)
                assert (model.lm_head.weight is model.embed_tokens.weight) == config.tied


def test_both_loaders_give_every_rank_its_values():
    """Bit for bit, on every mesh of four ranks, in pieces that divide nothing evenly; three experts on four ranks."""
    run_ranks(4, fill_on_every_mesh)


def fail_in_reading(ranks: Ranks) -> None:
    """An error of rank 0 while it sends weights is raised on all."""
    shard.FILL_BYTES = 4096

    def read(name, slices):
        if name.startswith("layers.1."):
            raise OSError(5, "Input/output error", name)
        return torch.ones([s.stop - s.start for s in slices])

    read = None if ranks.rank else read
    for size in (1, 2):
        model = allocate(MODELS["tiny-llama"], shard.make_mesh(size, ranks))
        with pytest.raises(Failure, match="Input/output error: 'layers.1."):
            shard.fill_parameters(model, read, "rank0", ranks)
    model = Transformer(MODELS["tiny-llama"])
    nf4.convert_linear(model.layers[1].self_attn.o_proj)
    with pytest.raises(Failure, match="Input/output error: 'layers.1."):
        shard.fill_parameters(model, read, "rank0", ranks, only_frozen=True)


def measure_loading() -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "set here"  # what is freed is given back, and does not hide in the heap
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD (malloc.h): a forked process does not read the variable
    ranks, shard.FILL_BYTES = init_ranks(), 2**20

    def read(name, slices):
        return torch.ones([s.stop - s.start for s in slices], dtype=torch.bfloat16)

    models = []  # all are kept, else memory would be used again
    for dim in (64, 512):  # the first: what the first use takes
        config = replace(
            MODELS["tiny-llama"], dim=dim, n_layers=20, n_heads=8, n_kv_heads=8, ffn_dim=dim, vocab_size=8000
        )
        for load in ("direct", "rank0"):
            model = allocate(config, shard.make_mesh(0, ranks), torch.bfloat16)
            own, largest = sum(local(p).nbytes for p in model.parameters()), model.lm_head.weight.nbytes
            models.append(model)
            before = peak_rss(reset=True)
            shard.fill_parameters(model, read, load, ranks)
            used = peak_rss() - before
            room = largest if load == "direct" else 2 * largest
            assert dim == 64 or 0.9 * own < used < own + room, (load, ranks.rank, used, own, largest)


def test_loading_needs_the_shard_and_one_tensor():
    """Peak memory of every rank, beyond what it had, for 58 MB in bf16, the largest tensor 8 MB of it, on two ranks.
    From rank 0: the whole tensor, and its shard twice."""
    run_ranks(2, measure_loading)


class Needy(Exception):
    def __init__(self, *, why: str):
        super().__init__(why)


def meet_faults() -> None:
    ranks = init_ranks()
    assert gather(ranks.rank, ranks) == [0, 1]
    assert on_every_rank(lambda: ranks.rank, ranks) == ranks.rank
    assert on_first_rank(lambda: [ranks.rank] * 10**5, ranks) == [0] * 10**5
    with pytest.raises(Failure, match="^rank 0 on .*: ZeroDivisionError: division by zero$"):
        on_first_rank(lambda: 1 / 0, ranks)

    def fail(error):
        if ranks.rank == 1:
            raise error

    for code in (errno.EACCES, errno.EIO):
        message = f"^rank 1 on .*{os.strerror(code)}: '/weights/model.safetensors'$"
        error = OSError(code, os.strerror(code), "/weights/model.safetensors")
        with pytest.raises(UserError if code == errno.EACCES else Failure, match=message):
            on_every_rank(partial(fail, error), ranks)
    holder = RuntimeError("it is no pickle")
    holder.lock = threading.Lock()
    for unsendable in holder, Needy(why="it is no pickle"):
        with pytest.raises(Failure, match="^rank 1 on [^:]*: .*: it is no pickle$"):
            on_every_rank(partial(fail, unsendable), ranks)
    with pytest.raises(UserError, match="^rank 1 on [^:]*: no such file$"):
        on_every_rank(partial(fail, UserError("no such file")), ranks)
    fail_in_reading(ranks)
    mesh, rank_module.WATCHDOG = shard.make_mesh(0, ranks), 0
    set_timeout(1, ranks, shard.groups_of(mesh, None))
    for group in (None, mesh.get_group("shard")) if ranks.rank == 0 else ():
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier(ranks.control)
    os._exit(0)


def test_faults_of_ranks_are_told_to_all_and_late_ones_are_not_waited_for():
    """The second rank comes to no collective; it ends when the first has given up waiting."""
    run_ranks(2, meet_faults)


@pytest.mark.parametrize("words, device, chosen", [
    ("", "cpu", "none"), ("--steps 100000", "cpu", "block"), ("", "cuda", "block"),
])  # fmt: skip
def test_what_ends_before_compiling_pays_is_not_compiled(monkeypatch, words, device, chosen):
    monkeypatch.setattr("base.host.compiler_problem", lambda: "")
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    config = parse_args(["@recipes/default.args", "--compile=auto", *words.split()])
    assert preflight._choose_compile(config, torch.device(device)) == chosen


EXCLUDED = [(f"--{f.name} {value}".strip(), *rest) for f in FIELDS for value, *rest in f.metadata["excludes"]]


@pytest.mark.parametrize("excluded, words, ranks", [(excluded, *case) for excluded, case in zip(EXCLUDED, [
    ("--quantize nf4 --lora 8 --ffn_dim 192 --fp8 tensor", 1),
    ("--quantize nf4 --lora 8 --ffn_dim 192 --offload cpu --compile none", 1), ("--optimizer muon --lora 8", 1),
    ("--decay_steps 100 --schedule constant", 1), ("--fp8 tensor --offload cpu --compile none", 2),
    ("--fp8 row --fp8_all_gather", 1), ("--fp8 row_gw_hp --fp8_all_gather", 1),
    ("--offload_activations --compile none", 1), ("--compile model --offload cpu", 1),
    ("--compile model --offload_activations --checkpointing block", 1), ("--compile model", 2),
], strict=True)], ids=str)  # fmt: skip
def test_what_does_not_work_together_is_refused(excluded, words, ranks):
    first, second, reason = excluded
    with pytest.raises(UserError, match=f"^{re.escape(f'{first} with {second}: {reason}')}$"):
        refuse_conflicts(parse_args(words.split()), ranks)


# Flags, device, GiB of the host and of a GPU, what is said; 8.03 B parameters have 4 x 29.9 GiB in fp32.
@pytest.mark.parametrize("words, device, host_gib, gpu, message", [
    ("", "cpu", 100, 0, r"optimizer state 59.8, parameters 29.9.* of 100 GiB"),
    ("--offload cpu", "cuda:0", 90, 80, r"gradients 3[0-9].* of 90 GiB"),
    ("", "cuda:0", 9999, 25, r"fit: each GPU: .*optimizer state 15.0.* of 25 GiB.*plan.py"),
    ("", "cuda:0", 60, 80, r"copies for saves 90.2.* of 60 GiB"),
    ("--micro_batch 10000000000 --checkpointing block", "cuda:0", 10**9, 80, r"each GPU: .*or activations [1-9]"),
    (f"--batch_tokens {2**52} --seq_len 2 --micro_batch 1", "cpu", 200, 0, "tokens of a step 67,108,864.0"),
])  # fmt: skip
def test_a_run_without_room_is_refused_with_both_numbers(monkeypatch, words, device, host_gib, gpu, message):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = parse_args(["--model=llama3-8b", "--dtype=bf16", *words.split()])

    def refuse(host_gib: float, gpu: float) -> None:
        monkeypatch.setattr(host, "available_memory", lambda: host_gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=gpu * 2**30))
        monkeypatch.setattr(host, "known_gpu", lambda _: None)
        plan.refuse_without_room(config, Ranks(0, 4, torch.device(device)))

    with pytest.raises(UserError, match=message):
        refuse(host_gib, gpu)
    refuse(2**60, 2**60)


@pytest.mark.parametrize("amx, avx512, name, dtype", [
    (True, True, "Intel(R)", "bf16"), (False, True, "Intel(R)", "fp32"), (False, True, "AMD EPYC", "bf16"),
    (False, False, "AMD EPYC", "fp32"),
])  # fmt: skip
def test_auto_is_the_dtype_that_a_cpu_is_fast_in(monkeypatch, amx, avx512, name, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": amx, "avx512_bf16": avx512})
    monkeypatch.setattr(preflight, "cpu_name", lambda: name)
    assert preflight.settle(parse_args([]), ALONE).dtype == dtype


def test_too_few_gpus_and_gpus_that_torch_cannot_use_are_refused(monkeypatch, tmp_path):
    """Never a silent run on the CPU; unless the user hides the GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match=r"4 processes.* 2 visible GPUs \(CUDA_VISIBLE_DEVICES is 0,1\)"):
        host.find_device(4)
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match="nvidia-smi shows GPUs, but torch"):
        host.find_device(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert host.find_device(1).type == "cpu"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_offloaded_inputs_of_blocks_are_freed_and_change_no_bit(device):
    """Eight blocks, whose inputs (64 KiB each on a GPU) are not there when the backward pass begins."""
    rows, length, dim = (2, 256, 64) if device == "cuda" else (1, 8, 64)
    config = replace(MODELS["tiny-llama"], dim=dim, n_layers=8, n_heads=8, n_kv_heads=8, ffn_dim=dim)
    tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
    inputs, held, gradients = [], [], []
    for on in (False, True):
        model = fill(Transformer(config, torch.bfloat16)).to(device)
        shard.checkpoint_activations(model, "block")
        shard.offload_activations(model, on, torch.device(device))
        for block in model.layers:
            block.register_forward_pre_hook(lambda block, args: inputs.append(weakref.ref(args[0])))
        for _ in range(2):  # the second with pinned memory that has been used before
            model.zero_grad()
            inputs.clear()
            before = torch.cuda.memory_allocated()
            loss = model(tokens, tokens)
            if device == "cuda":
                torch.cuda.synchronize()
                held.append(torch.cuda.memory_allocated() - before)
            else:
                held.append(sum(ref() is not None for ref in inputs))
            loss.backward()
        gradients.append([p.grad.cpu() for p in model.parameters()])
        del model, loss
    assert held == [8, 8, 0, 0] if device == "cpu" else held[1] - held[3] > 6 * 2**16
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_selective_checkpointing_computes_no_product_and_no_attention_again(device):
    """Products and attention in the backward pass: as many as without checkpointing, with whichever attention kernel
    torch takes on this device; more than that with block."""
    config, counts, grads = replace(MODELS["tiny-llama"], dim=128, n_heads=2, n_kv_heads=2, head_dim=64), {}, {}
    tokens = torch.zeros(2, 128, dtype=torch.long, device=device)
    for mode in ("none", "selective", "block"):
        model = fill(Transformer(config, torch.bfloat16)).to(device)
        shard.checkpoint_activations(model, mode)
        loss = model(tokens, tokens)
        with capture_logs_with_logging_tensor_mode() as calls:  # what runs: checkpointing answers for what it has kept
            loss.backward()
        forward = [call for call in calls if "_backward." not in call]
        products = ("mm", "_scaled_dot_product")
        counts[mode] = [sum(f"= torch._ops.aten.{name}" in call for call in forward) for name in products]
        grads[mode] = [p.grad for p in model.parameters()]
    assert counts["selective"] == counts["none"] and counts["none"][1] == 0, counts
    assert counts["block"] == [counts["none"][0] + 3 * 2, 2], counts  # the last product of a block is not needed
    assert all(torch.equal(a, b) for mode in ("selective", "block") for a, b in zip(grads["none"], grads[mode]))  # noqa: B905
