"""The same seed and the same global batch give the same losses and gradients, however the work is divided and stored.

    python test_parity.py            the whole table, on 1, 2 and 4 processes: some minutes
    pytest test_parity.py            a short form of it; pytest -m slow test_parity.py: the whole
    on GPUs where there are as many as processes, else on the CPU

The oracle is the plain model: one process, fp32, nothing sharded, compiled or checkpointed, all rows in one forward
pass. A cell trains two steps (plain SGD: the first steps of Adam are g / |g|, which makes full steps of the rounding
noise where a gradient is zero in theory) and compares both losses, both gradient norms and every gradient.

fp32 must agree to 1e-5. bf16 has no such number: its error depends on the model. So the error of a cell, against the
fp32 oracle, is held against that of the plain model in bf16. Dividing the work changes only where bf16 rounds, not how
often: its error must be of the same size, at most 1.5 times as large (and gradients that FSDP sums in fp32 usually make
it smaller). An accumulation in bf16 or a wrong reduction would be far outside."""

import itertools
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import pytest
import torch

import activations
import guard
import shard
from model import MODELS, Transformer, random_init
from optim import DTYPES
from test_shard import run_code

ROWS, T = 16, 32
KEPT = (32, 3, 17, 0, 1, 32, 9, 30)  # trained tokens of the rows, over and over: very uneven masks
TOLERANCE = {"fp32": 1e-5, "bf16": 1.5}  # absolute; a multiple of the plain model's error in bf16


@dataclass(frozen=True)
class Cell:
    """One way of dividing the work; the defaults are those of train.py."""

    model: str = "tiny-llama"
    dtype: str = "fp32"
    shard_size: int = 0
    accumulate: int = 1
    reshard: str = "auto"
    prefetch: int = 1
    checkpointing: str = "none"
    compile: str = "none"
    attention: str = "sdpa"
    offload: str = "none"
    offload_activations: bool = False
    packed: bool = False

    def __str__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self)]
        shown = [f"{k}={v}" for k, v in changed if v != getattr(Cell, k)]
        return " ".join(shown) or "defaults"


def cells(world_size: int, whole: bool) -> list[Cell]:
    sizes = {1: [0], 2: [1, 0], 4: [1, 2, 0]}[world_size]
    modes, dtypes = ("none", "block", "selective"), ("fp32", "bf16")
    models = ("tiny-llama", "tiny-llama3.2", "tiny-gpt2", "tiny-mixtral", "tiny-qwen2.5", "tiny-qwen3")
    out = [Cell(m, shard_size=s, accumulate=a) for m in models for s in sizes for a in (1, 2, 4)]
    # recipe 1: {compile} x {checkpointing} x {mesh} x {dtype} x {packed documents}
    matrix = itertools.product(("none", "block"), modes, sizes, dtypes, (False, True))
    out += [Cell(d_, d, s, 1, checkpointing=m, compile=c, packed=p) for c, m, s, d, p in matrix for d_ in models[:1]]
    out += [Cell(m, d, 0, 2, checkpointing=k, compile="block") for m in models[1:] for d in dtypes for k in modes]
    out += [Cell(dtype=d, attention="blocked", compile="block", packed=p) for d in dtypes for p in (False, True)]
    more = [Cell(offload="cpu", shard_size=s, accumulate=a, dtype=d) for s in sizes for a in (1, 2) for d in dtypes]
    more += [Cell(offload_activations=True, checkpointing=m, compile=c) for m in modes[1:] for c in ("none", "block")]
    if world_size > 1:
        gather = itertools.product(models, ("always", "never"), (0, 1, 2), (1, 2))
        more += [Cell(m, reshard=r, prefetch=p, accumulate=a) for m, r, p, a in gather]
    out += more + [replace(c, model="tiny-mixtral") for c in more if c.dtype == "fp32"]
    if whole:
        return list(dict.fromkeys(out))
    short = [
        Cell(dtype="bf16"),
        Cell("tiny-llama3.2", accumulate=2, shard_size=sizes[0], packed=True),
        Cell("tiny-gpt2", accumulate=4, reshard="never"),
        Cell("tiny-mixtral", accumulate=2, reshard="always", prefetch=2, shard_size=sizes[-1], checkpointing="block"),
        Cell(shard_size=sizes[0], accumulate=2, offload="cpu", checkpointing="selective"),
        Cell(checkpointing="block", offload_activations=True, prefetch=0, packed=True),
    ]
    if world_size == 2:  # recipe 1's bug
        short += [Cell(dtype="bf16", checkpointing="block", compile="block", packed=True)]
        short += [Cell("tiny-mixtral", offload="cpu"), Cell("tiny-gpt2", shard_size=1)]
        short += [Cell("tiny-qwen2.5", packed=True), Cell("tiny-qwen3", "bf16", checkpointing="selective")]
    return short


def batch(packed: bool):
    """All rows: tokens, targets with uneven masks, positions of packed documents or None."""
    g = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, 258, (ROWS, T), generator=g) for _ in range(2))
    for row in range(ROWS):
        targets[row, KEPT[row % len(KEPT)] :] = -100
    if not packed:
        return tokens, targets, None
    ends = torch.rand(ROWS, T, generator=g) < 0.1
    ends[:, 0] = True
    index = torch.arange(T).expand(ROWS, T)
    return tokens, targets, index - torch.where(ends, index, 0).cummax(1).values


def train(model, micro_batches, reduce, reshard: str = "auto") -> list[torch.Tensor]:
    """Two steps -> losses, norms and gradients per trained token, as whole tensors. reduce: see GradientGuard."""
    out = []
    for _ in range(2):
        loss, trained = 0.0, 0
        for i, (tokens, targets, positions) in enumerate(micro_batches):
            shard.sync_gradients(model, i == len(micro_batches) - 1, reshard)
            part = model(tokens, targets, positions)
            part.backward()
            loss, trained = loss + part.detach(), trained + int((targets != -100).sum())
        mean, norm, count = reduce(loss, trained)
        out += [mean.cpu(), norm.cpu()]
        for p in model.parameters():
            whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            out.append(whole.detach().cpu() / count.cpu())
        with torch.no_grad():
            for p in model.parameters():
                shard.local(p).sub_(shard.local(p.grad), alpha=0.1 / count.item())
                p.grad = None
    return out


def config_of(name: str):
    return replace(MODELS[name], n_layers=3)  # a first one, a last one, and one between


def make_model(name: str, dtype: str, attention: str = "sdpa") -> Transformer:
    with torch.device("meta"):
        return Transformer(config_of(name), DTYPES[dtype], attention)


def fill(model, name: str, device: torch.device | str = "cpu") -> None:
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    model.to_empty(device=device)
    model.tie_weights()
    shard.fill(model, random_init(config_of(name), shapes, 0))


@lru_cache
def oracle(name: str, dtype: str, packed: bool, parts: int) -> list[torch.Tensor]:
    """The plain model; in `parts` forward passes (MoE's auxiliary loss is one of a forward pass)."""
    model = make_model(name, dtype)
    fill(model, name)

    def reduce(loss, trained):
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm() / trained
        return loss / trained, norm.float(), torch.tensor(float(trained))

    whole = batch(packed)
    rows = [slice(i * ROWS // parts, (i + 1) * ROWS // parts) for i in range(parts)]
    return train(model, [[None if x is None else x[r] for x in whole] for r in rows], reduce)


def run(cell: Cell, ranks: shard.Ranks) -> list[torch.Tensor]:
    """The same, the way train.py builds it."""
    torch._dynamo.reset()
    offload = cell.offload == "cpu"
    mesh = shard.make_mesh(cell.shard_size, ranks, offload)
    model = make_model(cell.model, cell.dtype, cell.attention)
    activations.checkpoint_activations(model, cell.checkpointing)
    shard.compile_model(model, cell.compile)
    activations.offload_activations(model, cell.offload_activations, ranks.device)
    shard.shard_model(model, mesh, model.dtype, torch.float32, cell.reshard, cell.prefetch, offload)
    fill(model, cell.model, "cpu" if offload else ranks.device)
    micro = ROWS // (ranks.world_size * cell.accumulate)
    starts = [(m * ranks.world_size + ranks.rank) * micro for m in range(cell.accumulate)]
    whole = batch(cell.packed)
    mine = [[None if x is None else x[a : a + micro].to(ranks.device) for x in whole] for a in starts]
    return train(model, mine, guard.GradientGuard(model, guard.Config(clip=0.0), ranks, mesh).reduce, cell.reshard)


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest relative error of a loss, a norm or a gradient."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))


def work(whole: bool) -> None:
    """A rank: all cells of this number of processes; rank 0 prints the table."""
    torch.set_num_threads(1)
    ranks, bad = shard.init_ranks(), []
    torch.set_float32_matmul_precision("highest")  # no TF32 here
    for cell in cells(ranks.world_size, whole):
        parts = ranks.world_size * cell.accumulate if config_of(cell.model).mlp == "moe" else 1
        exact = oracle(cell.model, "fp32", cell.packed, parts)
        try:
            found, note = error(run(cell, ranks), exact), ""
        except Exception as e:  # a cell that fails must not hide the others
            found, note = float("nan"), f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
        bound = TOLERANCE[cell.dtype]
        if cell.dtype == "bf16":
            bound *= error(oracle(cell.model, "bf16", cell.packed, parts), exact)
        ok = found <= bound
        bad += [] if ok else [cell]
        if ranks.rank == 0:
            print(
                f"{ranks.world_size} | {found:.1e} | {bound:.1e} | {'ok' if ok else 'WRONG'} | {cell} {note}",
                flush=True,
            )
    print(f"rank {ranks.rank}: {len(bad)} wrong", flush=True)
    shard.leave(ranks)


def compare(world_size: int, whole: bool) -> subprocess.CompletedProcess:
    env = {} if world_size <= torch.cuda.device_count() else {"CUDA_VISIBLE_DEVICES": ""}
    return run_code(f"import test_parity; test_parity.work({whole})", ["test_parity.py"], world_size, env, 3000)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["short", "whole"])
def test_parity(world_size, whole):
    done = compare(world_size, whole)
    assert done.returncode == 0, done.stderr[-3000:]
    wrong = [line for line in done.stdout.splitlines() if "WRONG" in line]
    assert not wrong and done.stdout.count("| ok |") == len(cells(world_size, whole)), "\n".join(wrong)
    assert done.stdout.count(": 0 wrong") == world_size


if __name__ == "__main__":
    print("processes | largest relative error | allowed | | cell")
    for n in (1, 2, 4):
        print(compare(n, "--short" not in sys.argv).stdout)
