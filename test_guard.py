"""guard.py: verdicts are the same on all ranks; the oracle for what is skipped is a run that never had it."""

from test_shard import run_ranks


def test_guard_suppresses_updates_on_all_ranks(tmp_path):
    """A gradient that is no number on one rank: no rank's parameters change, then or later; all raise for one step."""
    code = """
from optim import update
ranks = shard.init_ranks()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
gradients = guard.GradientGuard(model, 1.0, ranks, None)
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
    except guard.NotFinite as e:
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
