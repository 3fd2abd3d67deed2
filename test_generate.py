"""generate.py. Oracles: repeated argmax of the forward without a cache and transformers' generate for greedy text,
probabilities computed token by token for sampling."""

import math

import pytest
import torch
from torch import Tensor

from errors import UserError
from generate import check_length, choose, main, sample
from model import MODELS
from test_model import BASE, make_model, make_pair, random_tokens

PROBABILITIES = [
    [0.5, 0.25, 0.125, 0.0625, 0.0625],
    [0.02, 0.4, 0.08, 0.35, 0.15],
    [0.001, 0.001, 0.99, 0.004, 0.004],
]


def run(*args, **kwargs) -> Tensor:
    """All the steps of `sample`, [B, n]."""
    return torch.stack(list(sample(*args, **kwargs)), 1)


# ---- one choice


def kept(probabilities: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """What each token's probability should be."""
    heat = [p ** (1 / temperature) for p in probabilities]
    order = sorted(range(len(heat)), key=lambda i: -heat[i])[: top_k or None]
    total, reached, keep = sum(heat[i] for i in order), 0.0, []
    for i in order:
        if reached < top_p:
            keep.append(i)
        reached += heat[i] / total
    total = sum(heat[i] for i in keep)
    return [heat[i] / total if i in keep else 0.0 for i in range(len(heat))]


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(1, 0, 1), (0.5, 0, 1), (2, 0, 1), (1, 1, 1), (1, 3, 1), (1, 9, 1), (1, 0, 0.3), (1, 0, 0.7), (1, 0, 0.95),
     (1, 3, 0.8), (2, 0, 0.7), (0.5, 2, 0.8), (1, 0, 1e-6)],
)  # fmt: skip
def test_choices_have_the_right_probabilities(temperature, top_k, top_p):
    """Frequencies within five standard deviations; what is cut off never comes; each row for itself."""
    draws = 20_000
    logits = torch.tensor(PROBABILITIES).log().repeat(draws, 1) + 3.0
    ids = choose(logits, temperature, top_k, top_p, torch.Generator().manual_seed(0)).view(draws, len(PROBABILITIES))
    for row, probabilities in enumerate(PROBABILITIES):
        frequencies = torch.bincount(ids[:, row], minlength=5) / draws
        for found, p in zip(frequencies.tolist(), kept(probabilities, temperature, top_k, top_p), strict=True):
            assert abs(found - p) <= 5 * math.sqrt(p * (1 - p) / draws)


def test_temperature_zero_is_the_most_probable():
    logits = torch.tensor(PROBABILITIES).log()
    assert choose(logits, 0, 0, 1.0, torch.Generator()).tolist() == [0, 1, 2]


# ---- sequences


@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama3.1", "mixtral"])
def test_greedy_is_repeated_argmax(name):
    """A batch of prompts, each as on its own and without a cache; past rope scaling's original context."""
    model, prompts = make_model(name), random_tokens(3, 7)
    ids = prompts
    for _ in range(50):
        ids = torch.cat((ids, model.logits(ids)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(run(model, prompts, 50, temperature=0), ids[:, 7:])
    assert torch.equal(run(model, prompts[1:2], 50, temperature=0), ids[1:2, 7:])
    assert len(ids[:, 7:].unique()) > 10  # not one token for ever


@pytest.mark.parametrize("name", ["gpt2", "llama3", "mixtral"])
def test_greedy_is_transformers_generate(name):
    ours, theirs = make_pair(name)
    prompts = random_tokens(2, 9)
    expected = theirs.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    assert torch.equal(run(ours, prompts, 40, temperature=0), expected[:, 9:])


def test_sampled_text_follows_the_logits():
    """The same generator and the forward without a cache choose the same tokens."""
    model, ids, g = make_model("llama3"), random_tokens(2, 5), torch.Generator().manual_seed(3)
    found = run(model, ids, 30, 0.9, 20, 0.8, seed=3)
    for _ in range(30):
        ids = torch.cat((ids, choose(model.logits(ids)[:, -1], 0.9, 20, 0.8, g)[:, None]), 1)
    assert torch.equal(found, ids[:, 5:])


def test_seeds_repeat():
    """And the global generator, which data and training may use, is not touched."""
    model, prompts = make_model("llama2"), random_tokens(2, 5)
    state = torch.get_rng_state()
    first, again, other = (run(model, prompts, 20, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("n", [0, 1, 12])
def test_as_many_steps_as_asked_for(monkeypatch, n):
    """One forward pass each, of the prompt and then of single tokens, without gradients: ranks must agree on it."""
    model, seen = make_model("gpt2"), []
    forward = model.logits
    monkeypatch.setattr(
        model, "logits", lambda ids, **k: seen.append((*ids.shape, torch.is_grad_enabled())) or forward(ids, **k)
    )
    for ids in sample(model, random_tokens(2, 6), n):
        assert ids.shape == (2,) and ids.dtype == torch.int64 and ids.min() >= 0 and ids.max() < BASE.vocab_size
        assert torch.is_grad_enabled()
    assert seen == [(2, 6, False), *[(2, 1, False)] * (n - 1)][:n]


def test_compiled_blocks_are_not_compiled_again():
    """They run eagerly while sampling, where every length would be a new graph, and compiled before and after."""
    torch._dynamo.reset()
    model, graphs = make_model("llama2"), []
    for block in model.layers:
        block.compile(dynamic=False, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    tokens = random_tokens(2, 16)
    steps = sample(model, tokens, 10, temperature=0)
    next(steps)
    assert not graphs
    model(tokens, tokens)
    compiled = len(graphs)
    assert compiled
    assert len(list(steps)) == 9
    model(tokens, tokens)
    assert len(graphs) == compiled


def test_length_beyond_learned_positions_is_refused():
    check_length(MODELS["gpt2"], 1000, 24)
    with pytest.raises(UserError, match=r"prompt \(1000 tokens\) \+ 25 new ones.* 1024 learned positions"):
        check_length(MODELS["gpt2"], 1000, 25)
    check_length(MODELS["tiny-llama"], 10**6, 1)  # rotary positions have no end


@pytest.mark.parametrize("words", ["--temperature -1", "--top_p 0", "--top_p 1.1", "--top_k -1", "--tokens 0"])
def test_impossible_flags_are_refused(words):
    with pytest.raises(UserError, match="--temperature must be >= 0"):
        main(["--run", "nowhere", *words.split()])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="no whole checkpoint"):
        main(["--run", str(tmp_path / "nothing")])
