"""The same seed and the same global batch give the same losses, gradients and parameters, however the work is divided
and stored.

    python test_parity.py [--fuzz MINUTES] [--seed N]           random cells: shapes, meshes, flags, masks
    python test_parity.py --cell ranks=2 dtype=bf16 ...      one cell, as a failure prints it
    pytest test_parity.py                                    a short form
    on GPUs where there are as many as processes, else on the CPU

A cell builds the model as train.py does and takes two steps of `train_step`. The oracle is the plain model: one
process, fp32, nothing sharded, compiled or checkpointed, all rows in one forward pass, torch's plain AdamW. Compared
are losses, gradient norms, every gradient and, at the end, every parameter. AdamW's eps is large here: with the usual
1e-8 the first steps are full steps of rounding noise where a gradient is zero in theory.

fp32 must agree to 1e-5, or to 1.5 times what the oracle itself differs from fp64. The error of bf16 and FP8 is held
against that of the plain model in the same formats, on the same micro-batches: dividing the work changes only where
values are rounded, not how often."""

import contextlib
import gc
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from unittest import mock

import pytest
import torch
from torch import Tensor

import fp8
import preflight
import shard
import train
from base import host
from base.errors import Parser, UserError, run_script
from base.ranks import ALONE, Ranks, init_ranks, leave
from config import Config, check_values
from data import Batch
from hf import lora
from model import IGNORE, MODELS, ModelConfig, Transformer, document_begins
from optim import Gradients, make_optimizer, trainable_parameters
from test_shard import fill, run_code

TINY = ("tiny-llama", "tiny-llama3.2", "tiny-gpt2", "tiny-mixtral", "tiny-qwen2.5", "tiny-qwen3")
TINY += ("tiny-olmo3", "tiny-smollm3", "tiny-phi3", "tiny-qwen3-moe", "tiny-gemma3")
KEPT = (32, 3, 17, 0, 1, 32, 9, 30)  # trained tokens of the rows, over and over: very uneven masks
RATES = (1e-3, 2e-3)  # learning rates of the steps
EPS = 1e-2
TOLERANCE = 1e-5  # of fp32, relative
NOISE = 1.5  # of lower precision: a multiple of the plain model's error
TOGETHER = 16  # cells that are drawn at a time; those of a number of ranks share their processes
PATIENCE = 900  # seconds for a cell that compiles
# Fields that divide and store the same computation in another way.
DIVISION = ("ranks", "reduce_dtype", "fp8_all_gather", "shard_size", "reshard", "prefetch", "checkpointing", "compile")
DIVISION += ("context_parallel", "attention", "offload", "offload_activations", "head_rows")


@dataclass(frozen=True)
class Cell(Config):
    """One way of dividing the work, of a model: flags of train.py, some with another default, and the test's own."""

    model: str = "tiny-llama"
    n_layers: int = 3  # a first one, a last one, and one between
    n_heads: int = 4
    n_kv_heads: int = 2
    dim: int = 64
    ffn_dim: int = 176
    vocab_size: int = 258
    seq_len: int = 32
    micro_batch: int = 4
    clip: float = 0.0
    dtype: str = "fp32"
    compile: str = "none"
    attention: str = "sdpa"
    # not flags of train.py
    ranks: int = 1
    head_dim: int = 16
    n_experts: int = 4  # of a model that has experts
    top_k: int = 2
    accumulate: int = 1
    masks: str = "uneven"
    packed: bool = False
    head_rows: int = 1  # the loss head pads its weight to a multiple of it, as on a GPU; the oracle's does not

    def __str__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return " ".join(f"{k}={v}" for k, v in changed if v != getattr(Cell, k)) or "ranks=1"

    @staticmethod
    def parse(words: list[str]) -> "Cell":
        """What str gives."""
        values = dict(word.split("=") for word in words)
        kinds = {name: type(getattr(Cell, name)) for name in values}
        return Cell(**{k: v == "True" if kinds[k] is bool else kinds[k](v) for k, v in values.items()})

    @property
    def shape(self) -> ModelConfig:
        base = MODELS[self.model]
        sizes = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "ffn_dim", "vocab_size")
        experts = ("n_experts", "top_k") if base.n_experts else ()
        return replace(base, **{name: getattr(self, name) for name in (*sizes, *experts)})

    @property
    def config(self) -> "Cell":
        """With the flags that follow from others."""
        batch_tokens = self.parts * self.micro_batch * self.seq_len
        targets = tuple(lora.sizes(self.shape)) if self.lora else ()  # of a shape that some family has
        adapters = {"lora_alpha": 2.0 * self.lora, "lora_targets": targets}
        return replace(self, batch_tokens=batch_tokens, model_config=self.shape, **adapters)

    @property
    def parts(self) -> int:
        """Micro-batches of a step, of all ranks."""
        return self.ranks // self.context_parallel * self.accumulate


PADDED = Cell(ranks=2, n_layers=1, vocab_size=97, head_rows=64, accumulate=2)
SHARED = Cell(ranks=4, context_parallel=4, n_layers=2)
SHORT = [  # what few of the fuzzer's cells have
    Cell(ranks=2, context_parallel=2, dtype="bf16", checkpointing="block", compile="block", packed=True, accumulate=2),
    Cell(ranks=2, model="tiny-mixtral", dtype="bf16", lora=1, checkpointing="selective", offload="cpu"),
    Cell(ranks=2, model="tiny-mixtral", accumulate=2, shard_size=1, offload="cpu", checkpointing="selective"),
    PADDED,
    replace(PADDED, lora=3),
    replace(PADDED, shard_size=1),
    replace(PADDED, model="tiny-gpt2"),
    Cell(ranks=2, model="tiny-olmo3", packed=True, attention="blocked", checkpointing="selective"),
    Cell(ranks=2, model="tiny-gemma3", packed=True, attention="blocked", checkpointing="block"),
    Cell(ranks=2, context_parallel=2, model="tiny-ministral3", packed=True, checkpointing="selective"),
    Cell(ranks=2, model="tiny-granite", packed=True, lora=3, checkpointing="block"),
    Cell(ranks=2, model="tiny-arcee", dtype="bf16", fp8="tensor", checkpointing="selective"),
    Cell(ranks=2, model="tiny-qwen3-moe", n_layers=2, n_experts=16, dtype="bf16", fp8="tensor", checkpointing="block"),
    Cell(ranks=2, context_parallel=2, model="tiny-olmo3", attention="blocked", offload="cpu", masks="empty-parts"),
    # four ranks repeat the two key/value heads
    replace(SHARED, model="tiny-mixtral", packed=True, shard_size=2, accumulate=2),
    replace(SHARED, model="tiny-gpt2", n_kv_heads=4, dtype="bf16", fp8="tensor", masks="one-token"),
    replace(SHARED, model="tiny-mixtral", context_parallel=2, shard_size=1, lora=3, checkpointing="block"),
    # With an eps of 1e-3 its parameters were off by 0.41, those of the plain model by 0.19: the gradients of both are
    # off by 2 %, and one element's is close to zero. AdamW in fp64 makes the same parameters of the cell's gradients.
    Cell(
        model="tiny-gpt2", dim=16, n_layers=2, n_heads=2, n_kv_heads=1, seq_len=16, micro_batch=1, dtype="bf16",
        param_dtype="bf16", reduce_dtype="bf16", fp8="tensor", fp8_all_gather=True,
        offload_activations=True, checkpointing="block", attention="blocked", ranks=3, packed=True,
    ),
]  # fmt: skip


# ---- one cell


def rows_of(cell: Cell, step: int, text: int = 0) -> Batch:
    """All rows of a step, in the order of the micro-batches: those of the ranks, over and over. text: its number."""
    rows, T = cell.parts * cell.micro_batch, cell.seq_len
    g = torch.Generator().manual_seed(step + 10 * text)
    tokens, targets = (torch.randint(0, cell.vocab_size, (rows, T), generator=g) for _ in range(2))
    for row in range(rows):
        kept = {
            "all": T,
            "uneven": KEPT[row % len(KEPT)],
            "empty parts": T * (1 - row // cell.micro_batch % 2),  # of two ranks the second never has a trained token
            "one token": row == rows // 2,
        }[cell.masks.replace("-", " ")]
        targets[row, int(kept) :] = IGNORE
    if not cell.packed:
        return Batch(tokens, targets)
    ends = torch.rand(rows, T, generator=g) < 0.1
    ends[:, 0] = True
    index = torch.arange(T).expand(rows, T)
    return Batch(tokens, targets, index - torch.where(ends, index, 0).cummax(1).values)


def part_of(batch: Batch, rows: slice, columns: slice = slice(None)) -> Batch:
    packed = batch.positions is not None
    positions = (batch.positions[rows], document_begins(batch.positions[rows])) if packed else ()
    return Batch(batch.tokens[rows, columns], batch.targets[rows, columns], *positions)


def plain_steps(
    cell: Cell, text: int = 0, dtype: torch.dtype = torch.float32, reduces: bool = False
) -> list[list[Tensor]]:
    """The oracle: steps of the plain model in fp32 -> loss, norm and gradients of each, then the parameters. In
    as many forward passes as the cell has where there are experts: their auxiliary loss is one of a forward pass.
    reduces: in as many, whose gradients are rounded to bf16, as their sum is: what --reduce_dtype bf16 does."""
    model = Transformer(cell.shape, dtype)
    lora.add_adapters(model, cell.config)
    model.to(dtype)
    fill(model)
    parameters, out = [*trainable_parameters(model).values()], []
    decay = [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in parameters]
    optimizer = torch.optim.AdamW(decay, betas=(0.9, 0.95), eps=EPS, foreach=False)
    for step, rate in enumerate(RATES):
        whole, loss = rows_of(cell, step, text), 0.0
        sums = [torch.zeros_like(p) for p in parameters]
        for rows in torch.arange(len(whole.tokens)).chunk(cell.parts if reduces or cell.shape.n_experts else 1):
            batch = part_of(whole, slice(rows[0], rows[-1] + 1))
            part = model(batch.tokens, batch.targets, batch.positions)
            part.backward()
            loss += part.item()
            for p, total in zip(parameters, sums, strict=True) if reduces else ():
                total += p.grad.bfloat16()
                p.grad = None
        for p, total in zip(parameters, sums, strict=True) if reduces else ():
            p.grad = total.bfloat16().to(dtype)
        count = int((whole.targets != IGNORE).sum())
        for p in parameters:
            p.grad /= count
        norm = torch.cat([p.grad.double().flatten() for p in parameters]).norm()
        out.append([torch.tensor(loss / count), norm.float(), *[p.grad.clone() for p in parameters]])
        for group in optimizer.param_groups:
            group["lr"] = rate
        for p in parameters:
            p.grad /= max(1.0, norm.item() / cell.clip) if cell.clip else 1.0
        optimizer.step()
        optimizer.zero_grad()
    return [*out, [p.detach() for p in parameters]]


def whole_tensor(x: Tensor) -> Tensor:
    """All ranks must call."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().float().cpu().clone()


class Recorder(Gradients):
    """Keeps the gradients per trained token, as whole tensors, before the update frees them."""

    def global_sums(self, local_loss: Tensor, local_units: int) -> tuple[Tensor, Tensor, Tensor]:
        loss, tokens, squared_norm = sums = super().global_sums(local_loss, local_units)
        gradients = [whole_tensor(p.grad) / tokens.cpu() for p in self.parameters]
        self.seen = [(loss / tokens).cpu(), (squared_norm.sqrt() / tokens).cpu(), *gradients]
        return sums


def real_steps(cell: Cell, ranks: Ranks, text: int = 0) -> list[list[Tensor]]:
    """The same, the way train.py does it. All ranks must call."""
    torch._dynamo.reset()
    config = cell.config
    mesh = shard.make_mesh(config.shard_size, ranks, config.offload == "cpu")
    model = train.build(config, ranks, mesh, shard.make_row_group(config.context_parallel, ranks))
    scales = fp8.WeightScales(model, mesh, config.fp8_all_gather, cell.accumulate > 1, config.compile != "none")
    optimizer, out = make_optimizer(model, config), []
    optimizer.eps = EPS
    fill(model)
    gradients, size = Recorder(model, config, ranks, mesh), cell.micro_batch
    groups, sharing = ranks.world_size // cell.context_parallel, cell.context_parallel
    starts = [(m * groups + ranks.rank // sharing) * size for m in range(cell.accumulate)]
    part = ranks.rank % sharing * cell.seq_len // sharing
    columns = slice(part, part + cell.seq_len // sharing)
    for step, rate in enumerate(RATES):
        whole = rows_of(cell, step, text)
        batches = [part_of(whole, slice(a, a + size), columns) for a in starts]
        with mock.patch.dict("model.HEAD_ROWS", cpu=cell.head_rows):
            train.train_step(model, optimizer, batches, rate, gradients, scales)
        out.append(gradients.seen)
    return [*out, [whole_tensor(p) for p in trainable_parameters(model).values()]]


def error(got: list[list[Tensor]], want: list[list[Tensor]]) -> float:
    """The largest relative error of a loss, a norm, a gradient or a parameter. Of one that is nearly zero: relative to
    a thousandth of all gradients, or parameters."""
    worst = []
    for ours, theirs in zip(got, want, strict=True):
        floor = 1e-3 * torch.stack([b.norm() for b in theirs]).norm()
        worst += [(a - b).norm() / torch.maximum(b.norm(), floor) for a, b in zip(ours, theirs, strict=True)]
    return torch.stack(worst).max().item()  # NaN, if there is one


def bound(cell: Cell, text: int = 0) -> float:
    """The largest error that is right, as far as a text shows it."""
    if {cell.dtype, cell.param_dtype, cell.state_dtype, cell.reduce_dtype, cell.fp8} == {"fp32", "off"}:
        with mock.patch.object(Tensor, "float", Tensor.double):  # where the model computes in fp32, whatever its dtype
            exact = plain_steps(cell, text, torch.float64)
        return max(TOLERANCE, NOISE * error(plain_steps(cell, text), exact))
    plain = replace(cell, accumulate=cell.parts, **{name: getattr(Cell, name) for name in DIVISION})
    exact, noise = plain_steps(plain, text), 0.0
    if cell.reduce_dtype == "bf16":  # parts that cancel leave more than the rounding of a sum
        noise = error(plain_steps(cell, text, reduces=True), plain_steps(cell, text))
    return NOISE * (error(real_steps(plain, ALONE, text), exact) + noise) + TOLERANCE


def work(cells: list[str], texts: int) -> None:
    """A rank: all these cells; rank 0 prints the table. texts: the noise of a tiny model is a matter of luck; if that
    of the first text is too small to explain the cell's, it is the largest of so many texts."""
    torch.set_num_threads(1)
    host.set_allocators()
    ranks = init_ranks()
    torch.set_float32_matmul_precision("highest")  # no TF32 here
    for cell in (Cell.parse(words.split()) for words in cells):
        found = real_steps(cell, ranks)
        if ranks.rank == 0:
            wrong, allowed = error(found, plain_steps(cell)), TOLERANCE
            for text in range(texts):
                allowed = allowed if wrong <= allowed else max(allowed, bound(cell, text))
            verdict = "ok" if wrong <= allowed else "WRONG"
            print(f"{ranks.world_size} | {wrong:.1e} | {allowed:.1e} | {verdict} | {cell}", flush=True)
        gc.collect()
    leave(ranks)


def compute(todo: list[Cell], plant: str = "", texts: int = 10) -> Iterator[str]:
    """The table's rows of cells with the same number of ranks, in processes of their own. A cell that fails has a row
    that says how, and does not hide the others. plant: code that makes something wrong, for a test. texts: of work."""
    while todo:
        ranks = todo[0].ranks
        env = {} if ranks <= torch.cuda.device_count() else {"CUDA_VISIBLE_DEVICES": ""}
        compiled = sum(cell.compile != "none" for cell in todo)
        timeout = 60 + 60 * len(todo) + PATIENCE * compiled
        code = f"import test_parity, train\n{plant}\ntest_parity.work({list(map(str, todo))}, {texts})"
        done = run_code(code, ["test_parity.py"], ranks, env, timeout)
        rows = done.stdout.splitlines()
        yield from rows
        todo = todo[len(rows) :]
        if todo:
            last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            last = f"no end after {timeout} s" if done.returncode == -9 else last
            yield f"{ranks} | nan | nan | WRONG | {todo[0]}: {last[:300]}"
            todo = todo[1:]


# ---- the fuzzer


def draw(seed: int, number: int) -> Cell:
    """Cell `number` of a seed, from these two alone. Half of them are in fp32 throughout, where a small error shows."""
    rng = random.Random(f"{seed}/{number}")

    def some(usual, *others):  # the usual value half of the time
        return rng.choice((usual,) * len(others) + others)

    while True:
        cell = Cell(
            ranks=rng.choice((1, 2, 2, 3, 4)), model=rng.choice(TINY), n_layers=rng.randint(1, 4),
            vocab_size=some(258, 2, 97, 251, 300), n_experts=some(4, 2, 3, 5, 8), top_k=some(2, 1, 3),
            micro_batch=rng.randint(1, 4), accumulate=rng.choice((1, 1, 2, 3)),
            masks=some("uneven", "all", "empty-parts", "one-token"), packed=some(False, True), clip=some(0.0, 0.1, 1.0),
            reshard=some("auto", "always", "never"), prefetch=some(1, 0, 2, 3),
            checkpointing=some("none", "block", "selective"), compile=rng.choice(("none",) * 40 + ("block", "model")),
            attention=some("sdpa", "blocked"), offload=rng.choice(("none", "none", "cpu")),
            offload_activations=some(False, True),
        )  # fmt: skip
        formats_and_sizes = _draw_formats_and_sizes(rng)
        shards = [0, *(n for n in range(1, cell.ranks + 1) if cell.ranks % n == 0)]
        cell = replace(cell, shard_size=rng.choice(shards), **formats_and_sizes, lora=rng.choice((0, 0, 0, 1, 5)))
        cell = replace(cell, context_parallel=some(1, 2, 3, 4))
        with contextlib.suppress(UserError, ValueError):  # train.py refuses the cell
            check_values(cell.config)
            preflight.settle(cell.config, replace(ALONE, world_size=cell.ranks))
            if cell.top_k <= cell.n_experts:
                return cell


def _draw_formats_and_sizes(rng: random.Random) -> dict:
    out = {}
    if rng.random() < 0.5:
        out["dtype"] = rng.choice(("fp32", "bf16", "bf16"))
        for name in ("param_dtype", "state_dtype", "reduce_dtype"):
            out[name] = rng.choice(("fp32", "fp32", "bf16"))
        if rng.random() < 0.5:
            out["fp8"] = rng.choice(fp8.RECIPES)
            out["fp8_all_gather"] = out["fp8"] == "tensor" and rng.random() < 0.5
    multiples, heads = "fp8" in out, rng.choice((1, 2, 3, 4, 6))  # multiples: of 16, as FP8 needs them
    return out | {
        "n_heads": heads,
        "n_kv_heads": rng.choice([k for k in range(1, heads + 1) if heads % k == 0]),
        "head_dim": 16 if multiples else rng.choice((4, 6, 8, 10, 16)),
        "dim": rng.choice((16, 48, 64) if multiples else (16, 24, 36, 50, 64)),
        "ffn_dim": rng.choice((16, 80, 176) if multiples else (1, 7, 24, 130, 176)),
        "seq_len": rng.choice((16, 32) if multiples else (1, 7, 16, 32, 33, 130)),
    }


def fuzz(seed: int, minutes: float = float("inf")) -> Iterator[str]:
    """The rows of cells 0, 1, 2, ... of a seed, as many as there is time for."""
    end = time.monotonic() + 60 * minutes
    for first in itertools.count(0, TOGETHER):
        drawn = [draw(seed, n) for n in range(first, first + TOGETHER)]
        for ranks in (1, 2, 3, 4):
            if time.monotonic() > end:
                return
            yield from compute([cell for cell in drawn if cell.ranks == ranks])


# ---- tests


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_short_table_and_a_short_fuzz(ranks):
    """A seed with small cells, of which four share rows, three are in FP8, six are offloaded and four are Gemma 3."""
    todo = [cell for cell in (*SHORT, *(draw(12, n) for n in range(TOGETHER))) if cell.ranks == ranks]
    rows = [*compute(todo, texts=1)]
    assert len(rows) == len(todo) and [row for row in rows if "WRONG" in row] == []


# A planted fault: each micro-batch of a step doubles what those before it have left.
DOUBLED = "train.shard.prepare_backward = lambda m, *_: [p.grad.mul_(2) for p in m.parameters() if p.grad is not None]"


def test_a_cell_that_is_wrong_is_told():
    wrong, right = compute([Cell(n_layers=1, accumulate=2), Cell(n_layers=1)], DOUBLED)
    assert "| WRONG | n_layers=1 accumulate=2" in wrong and "| ok | n_layers=1" in right


def main(argv: list[str]) -> bool:
    parser = Parser()
    parser.add_argument("--fuzz", type=float, default=5, metavar="MINUTES")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cell", nargs="+", metavar="NAME=VALUE")
    args = parser.parse_args(argv)
    print("processes | largest relative error | allowed | | cell")
    count, wrong = 0, []
    for row in compute([Cell.parse(args.cell)]) if args.cell else fuzz(args.seed, args.fuzz):
        print(row, flush=True)
        count += 1
        if "WRONG" in row:
            wrong.append(f"python test_parity.py --cell {row.split(' | ')[4].partition(':')[0]}")
    print("\n".join([f"{count} cells, {len(wrong)} wrong", *wrong]))
    return bool(wrong)


if __name__ == "__main__":
    run_script(main)
