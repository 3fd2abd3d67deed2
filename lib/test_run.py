"""lib/run.py: verdicts are the same on all ranks; the oracle for what is skipped is a run that never had it."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch

from lib import run as guard
from lib.errors import read_json
from lib.run import Clock, write_status
from optim import update
from shard import Ranks
from test_shard import run_ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


def test_after_ten_bad_steps_in_a_row_nothing_is_updated_any_more():
    """The host learns of the tenth one step late: the eleventh, which is a number, must not be applied either."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    gradients = guard.GradientGuard(model, guard.Config(clip=1.0, on_nonfinite="skip"), ALONE, None)
    bad = {2, 3, *range(5, 15)}
    before, changed = model.weight.detach().clone(), []
    for step in range(1, 17):
        model(torch.ones(2, 4)).sum().backward()
        loss = torch.tensor(float("nan") if step in bad else 1.0)
        update(optimizer, 0.1, gradients.reduce(loss, 8)[2], gradients.suppress)
        changed += [step] if not torch.equal(before, model.weight) else []
        before = model.weight.detach().clone()
        if step < 15:
            gradients.check(step)
    assert changed == [1, 4]
    with pytest.raises(guard.Failure, match="Step 14: .*nan(?s:.*)of 10 steps in a row"):
        gradients.check(15)


@pytest.mark.parametrize(
    ("reports", "output"),
    [
        ([(0, 5), (0, 6)], r"rank 0 on a \| rank 1 on a"),
        ([(0, 5), (0, 6), (0, 5)], r"rank 1 on a \| rank 0 on a, rank 2 on a"),
        ([(0, 5), (1, 7), (0, 5), (1, 8)], r"rank 1 on a \| rank 3 on a"),
        ([(0, 5), (1, 7), (0, 5), (1, 7)], ""),
    ],
)
def test_the_copy_that_differs_is_named_where_that_can_be_known(monkeypatch, reports, output):
    """reports: (part of the parameters, hash) of each rank."""
    mesh = {"replicate": SimpleNamespace(size=lambda: 2)}
    mesh = type("Mesh", (dict,), {"get_coordinate": lambda self: (0, 0)})(mesh)
    monkeypatch.setattr(guard, "gather", lambda *_: [(*row, f"rank {rank} on a") for rank, row in enumerate(reports)])
    if not output:
        return guard.compare_replicas(torch.nn.Linear(2, 2), ALONE, mesh, 3)
    with pytest.raises(guard.Failure, match=f"After step 3 .*first: {output}\\. No checkpoint"):
        guard.compare_replicas(torch.nn.Linear(2, 2), ALONE, mesh, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hash_sees_flips_that_cancel_and_values_that_change_places(monkeypatch, dtype):
    """Of these the sum of the bits changes with the first alone. The hash takes 16 of the 40 values at a time."""
    monkeypatch.setattr(guard, "HASHED", 16)
    model = torch.nn.Linear(8, 5, bias=False, dtype=dtype)
    bits = model.weight.detach().view({4: torch.int32, 2: torch.int16}[dtype.itemsize]).view(-1)
    sign = torch.iinfo(bits.dtype).min
    bits[30] = bits[5] ^ sign
    before = bits.clone()
    changes = {
        "a flip": ([3], before[[3]] ^ 1),
        "two signs": ([3, 33], before[[3, 33]] ^ sign),
        "changes that cancel": ([2, 3, 4], before[2:5] + torch.tensor([1, -2, 1]).to(bits)),
        "an exchange": ([2, 20], before[[20, 2]]),
        "an exchange of signs": ([5, 30], before[[30, 5]]),
        "blocks exchanged": (slice(32), before[:32].roll(16)),
    }
    hashes = {guard.parameter_hash(model)}
    for kind, (places, values) in changes.items():
        bits[places] = values
        assert guard.parameter_hash(model) not in hashes, kind
        hashes.add(guard.parameter_hash(model))
        bits.copy_(before)
    assert guard.parameter_hash(model) in hashes


def test_guard_suppresses_updates_on_all_ranks(tmp_path):
    """A gradient that is no number on one rank: no rank's parameters change, then or later; all raise for one step."""
    code = """
from optim import update
ranks = shard.init_ranks()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
gradients = guard.GradientGuard(model, guard.Config(clip=1.0), ranks, None)
before, raised = None, None
for step in range(1, 6):
    model(torch.ones(2, 4)).sum().backward()
    if step == 3 and ranks.rank == 1:
        model.weight.grad[0, 0] = float("inf")
    loss, norm, scale = gradients.reduce(torch.ones(()), 8)
    if step == 3:
        before = model.weight.detach().clone()
    update(optimizer, 0.1, scale, gradients.suppress)
    try:
        gradients.check(step)
    except guard.Failure as e:
        raised = (step, str(e))
        break
assert raised and raised[0] == 4 and "Step 3" in raised[1], raised
assert torch.equal(before, model.weight)
assert all(s["step"].item() == 2 for s in optimizer.state.values())
print("done")
shard.leave(ranks)
"""
    assert run_ranks(2, code, str(tmp_path)).count("done") == 2


def test_stop_vote_is_one_step_late_and_unanimous(tmp_path):
    code = """
import os, signal
ranks = shard.init_ranks()
vote = guard.StopVote(ranks)
answers = []
for step in range(6):
    if step == 2 and ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    answers.append(vote.agreed())
assert answers == [False] * 3 + [True] * 3, answers
print("done")
shard.leave(ranks)
"""
    assert run_ranks(2, code, str(tmp_path)).count("done") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_each_of_these_signals_is_a_vote_to_stop(number):
    before = {stop: signal.getsignal(stop) for stop in guard.STOPS}
    try:
        vote = guard.StopVote(ALONE)
        assert not vote.agreed()
        os.kill(os.getpid(), number)
        assert vote.agreed() and vote.reason == signal.Signals(number).name
    finally:
        for stop, handler in before.items():
            signal.signal(stop, handler)


@pytest.mark.parametrize("ranks", [1, 2])
def test_told_to_stop_before_the_first_step_a_rank_ends_at_once(tmp_path, monkeypatch, ranks):
    """Reading weights may take longer than whoever asked waits. A resumed run keeps its step."""
    write_status(tmp_path, "running", 7)
    ended, code = threading.Event(), []

    def leave(status: int) -> None:
        code.append(status)
        watchdog.ended = True
        ended.set()

    monkeypatch.setattr(guard.os, "_exit", leave)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        config = SimpleNamespace(timeout=600)
        run = SimpleNamespace(config=config, ranks=ALONE, clock=Clock(), folder=tmp_path, lock=None)
        watchdog = guard.Watchdog(run)
        watchdog.ranks = Ranks(0, ranks, ALONE.device)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(30) and code == [ranks - 1]  # alone it is no failure; of several, torchrun ends the others
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
    status = read_json(tmp_path / "status.json")
    assert (status["state"], status["step"]) == ("stopped", 7)
