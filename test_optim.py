"""The schedules against closed forms, the update against AdamW written out in fp64."""

import math

import pytest
import torch
from torch import nn

from config import parse_args
from optim import learning_rate, make_optimizer, update

# Rates with --lr 1 --min_lr 0.1 --steps 100, at the steps given.
RATES = [
    ("cosine", "", {10: 1, 40: 0.1 + 0.9 * 0.75, 55: 0.55, 70: 0.1 + 0.9 * 0.25, 100: 0.1, 150: 0.1}),
    ("cosine", "--decay_steps 40", {10: 1, 20: 0.1 + 0.9 * 0.75, 25: 0.55, 40: 0.1, 99: 0.1}),
    ("cosine", "--decay_steps 0.4", {10: 1, 20: 0.1 + 0.9 * 0.75, 25: 0.55, 40: 0.1, 99: 0.1}),
    ("cosine", "--min_lr 0", {55: 0.5, 99: 0.5 * (1 - math.cos(math.pi / 90)), 100: 0}),
    ("linear", "", {10: 1, 19: 0.91, 55: 0.55, 99: 0.11, 100: 0.1, 150: 0.1}),
    ("linear", "--decay_steps 60", {10: 1, 35: 0.55, 60: 0.1, 99: 0.1}),
    ("constant", "", {10: 1, 55: 1, 99: 1}),
    ("wsd", "", {10: 1, 55: 1, 80: 1, 81: 0.955, 90: 0.55, 99: 0.145, 100: 0.1}),
    ("wsd", "--decay_steps 40", {10: 1, 60: 1, 70: 0.775, 80: 0.55, 100: 0.1}),
    ("wsd", "--decay_steps 0.4", {10: 1, 60: 1, 70: 0.775, 80: 0.55, 100: 0.1}),
]


def scheduled(schedule: str, words: str = "", warmup: str = "10"):
    return parse_args(f"--lr 1 --min_lr 0.1 --steps 100 --schedule {schedule} --warmup_steps {warmup} {words}".split())


@pytest.mark.parametrize("warmup", ["10", "0.1"])
@pytest.mark.parametrize("schedule, words, rates", RATES)
def test_rates(schedule, words, rates, warmup):
    c = scheduled(schedule, words, warmup)
    for step, rate in ({0: 0.1, 4: 0.5, 9: 1} | rates).items():
        assert learning_rate(c, step) == pytest.approx(rate, abs=1e-12), step


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_a_rate_depends_on_the_step_alone(schedule):
    c = scheduled(schedule)
    rates = [learning_rate(c, step) for step in range(120)]
    assert [learning_rate(c, step) for step in reversed(range(120))] == rates[::-1]
    assert max(rates) == 1 and all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))
    assert learning_rate(scheduled(schedule, warmup="0"), 0) == 1


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "linear": nn.Linear(4, 3), "norm": nn.LayerNorm(3)})
    model["experts"] = nn.ParameterList([nn.Parameter(torch.randn(2, 3, 4))])
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def optimizer_of(model: nn.Module, weight_decay: float = 0.5):
    return make_optimizer(model, parse_args(f"--weight_decay {weight_decay} --beta1 0.8 --beta2 0.9".split()))


def set_gradients(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """-> the same, in fp64"""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * 10**seed
    return {name: p.grad.double() for name, p in model.named_parameters()}


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, moments and update counts."""
    state = optimizer.state
    return [t for p in model.parameters() for t in (p.detach(), *(state[p][k] for k in sorted(state[p])))]


def test_decay_groups():
    model = small_model()
    decay = {p: group["weight_decay"] for group in optimizer_of(model).param_groups for p in group["params"]}
    expected = {"embed.weight": 0.5, "linear.weight": 0.5, "experts.0": 0.5}
    expected |= {"linear.bias": 0, "norm.weight": 0, "norm.bias": 0}
    assert {name: decay[p] for name, p in model.named_parameters()} == expected


def test_update_is_adamw():
    model, beta1, beta2 = small_model(), 0.8, 0.9
    optimizer = optimizer_of(model)
    reference = {name: p.detach().double() for name, p in model.named_parameters()}
    m, v = ({name: torch.zeros_like(p) for name, p in reference.items()} for _ in range(2))
    for t, (lr, scale) in enumerate([(0.1, 1.0), (0.05, 7.0), (0.2, 1000.0), (0.01, 0.5)], 1):
        for name, g in set_gradients(model, t - 1).items():
            g = g / scale
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g**2
            p = reference[name] * (1 - lr * 0.5 if reference[name].ndim > 1 else 1)
            reference[name] = p - lr * m[name] / (1 - beta1**t) / ((v[name] / (1 - beta2**t)).sqrt() + 1e-8)
        update(optimizer, lr, torch.tensor(scale), torch.tensor(0.0))
        assert all(p.grad is None for p in model.parameters())
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach().double(), reference[name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("updates_before", [0, 2])
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_a_suppressed_update_changes_no_bit(updates_before, value):
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    model, other = small_model(), small_model()  # the other never sees the suppressed update
    optimizer, other_optimizer = optimizer_of(model), optimizer_of(other)
    for i in range(updates_before):
        set_gradients(model, i), set_gradients(other, i)
        update(optimizer, 0.1, one, zero), update(other_optimizer, 0.1, one, zero)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, value)
    update(optimizer, 0.1, torch.tensor(value), one)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert {int(s["step"]) for s in optimizer.state.values()} == {updates_before}
    assert all(p.grad is None for p in model.parameters())

    set_gradients(model, 1), set_gradients(other, 1)
    update(optimizer, 0.1, one, zero), update(other_optimizer, 0.1, one, zero)
    pairs = zip(snapshot(model, optimizer), snapshot(other, other_optimizer), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
