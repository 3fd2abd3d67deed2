"""guard.Replay: a product of which a bit is flipped on one rank is found, and the rank is named; a replay changes
nothing of the run."""

import pytest

from config import parse_args, refuse_unsupported
from lib.errors import UserError
from test_parity import Cell
from test_shard import run_code

# Takes steps of a cell; prints what is said on each, and last a hash of the parameters. With FLIPS of them rank 1 flips
# one bit in one matrix product of each later step's first micro-batch, all over its passes: with the replay (even
# numbers), or with the step itself (odd ones).
CODE = """
import random, sys
import torch
import fp8, shard, test_parity, train
from lib import run as guard
from optim import keep_copies, make_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

every, flips, cell = int(sys.argv[1]), int(sys.argv[2]), test_parity.Cell.parse(sys.argv[3:])

class Flip(TorchDispatchMode):
    products, target, rng = 0, -1, random.Random(0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            if Flip.products == Flip.target:
                size, place = result.element_size(), Flip.rng.randrange(result.numel())
                bit = Flip.rng.randrange(12, 31) if size == 4 else Flip.rng.randrange(4, 15)
                ints = result.view(-1)[place : place + 1].view({2: torch.int16, 4: torch.int32}[size])
                ints.bitwise_xor_(1 << bit)
            Flip.products += 1
        return result

def step(n):
    whole, stride = test_parity.rows_of(cell, n), ranks.world_size * cell.micro_batch
    rows = range(ranks.rank * cell.micro_batch, len(whole.tokens), stride)
    batches = [test_parity.part_of(whole, slice(a, a + cell.micro_batch)) for a in rows]
    try:
        with gradients.replay(n, batches[0], weight_scales):
            train.train_step(model, optimizer, batches, 1e-3, gradients, weight_scales, ranks.device, config.reshard)
    except guard.Failure as error:
        print(error, flush=True)

ranks, config = shard.init_ranks(), cell.config
mesh = shard.make_mesh(config.shard_size, ranks, config.offload == "cpu")
model = train.build(config, ranks, mesh)
shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
weight_scales = fp8.prepare(model, config, mesh, cell.accumulate > 1)
optimizer = make_optimizer(model, config)
shard.fill(model, test_parity.random_init(cell.shape, shapes, 0))
keep_copies(model, optimizer, config, cell.accumulate > 1)
gradients = guard.GradientGuard(model, config, ranks, mesh)
gradients.replay = guard.Replay(model, every, ranks).watch
guard.logger.info = lambda *args: print(args[0] % args[1:], flush=True)
for n in range(1, 5 - 2 * bool(flips)):
    step(n)
if flips:
    with Flip():
        step(3)
    first = Flip.products // (1 + cell.accumulate)  # products of a micro-batch
    for i in range(flips):
        Flip.products, Flip.target = 0, i * first // flips + i % 2 * first if ranks.rank == 1 else -1
        with Flip():
            step(4 + i)
print(guard.parameter_hash(model), flush=True)
shard.leave(ranks)
"""


def run(cell: Cell, every: int, flips: int = 0) -> list[str]:
    """-> the lines of all ranks, one rank after the other."""
    done = run_code(CODE, ["test_replay.py", str(every), str(flips), *str(cell).split()], cell.ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


CELLS = {
    "sharded": Cell(ranks=2, accumulate=2, n_layers=2, checkpointing="block"),
    "replicated": Cell(ranks=2, accumulate=2, n_layers=2, shard_size=1, dtype="bf16"),
    "alone": Cell(accumulate=2, n_layers=2, model="tiny-mixtral", dtype="bf16"),
    "offloaded": Cell(ranks=2, n_layers=2, offload="cpu", model="tiny-llama3.2"),
    "fp8": Cell(ranks=2, accumulate=2, n_layers=2, fp8="tensor", fp8_all_gather=True),
    "compiled": Cell(ranks=2, n_layers=2, compile="block"),
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("replicated", "alone", "compiled")]


@pytest.mark.parametrize("name", ["sharded", "offloaded", "fp8", *SLOW])
def test_a_replay_changes_nothing(name):
    """The parameters after four steps, bit for bit; and an even machine is not accused."""
    replayed, plain = run(CELLS[name], 2), run(CELLS[name], 0)
    assert [line for line in replayed if not line.startswith("Replay: step")] == plain
    said = [line.partition(" it took ")[0] for line in replayed if line not in plain]
    assert said == [f"Replay: step {n} gave the same bits on all ranks;" for n in (2, 4)] * CELLS[name].ranks


@pytest.mark.parametrize(
    "flags", [{"accumulate": 2}, {"shard_size": 1, "dtype": "bf16"}], ids=["sharded", "replicated"]
)
def test_flips_on_one_rank_are_caught(flags):
    """Six on each mesh."""
    lines = run(Cell(ranks=2, n_layers=2, masks="all", **flags), 1, flips=6)
    found = [line for line in lines if "the same micro-batch computed twice" in line]
    assert len(found) == 2 * 6, lines
    assert all(": rank 1 on " in line and "rank 0 on" not in line for line in found)


def test_what_cannot_repeat_is_refused():
    for flags in (["--compile", "model"], ["--update_in_backward", "--clip", "0"], ["--attention", "flash"]):
        with pytest.raises(UserError, match="--replay_every with"):
            refuse_unsupported(parse_args(["--replay_every", "5", *flags]), 1)
