"""score.py. Oracles: transformers, one choice after the other, by the rules of lm-evaluation-harness 0.4.13 written out
here (the real one gave the same 80 rows to 2e-5); the equation behind Wilson's interval."""

import json
import math
from dataclasses import replace

import pytest
import torch
import transformers

import score
from base.errors import UserError
from base.ranks import ALONE
from generate import Source, main
from hf.tokenizer import ByteTokenizer
from model import MODELS
from test_faults import run_here  # noqa: F401
from test_generate import hub  # noqa: F401
from test_model import make_model, random_tokens
from test_train import records

CONTEXT = 512  # of the hub's models
CHOICES = ["Rome", "a", "日本語 text", "Paris, or so it seems"]
PROMPTS = ["The capital is", "The capital is  ", "", "x\n", "many words " * 400, "naïve"]


def write(path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@torch.no_grad()
def log_p(model, ids: list[int], scored: int) -> float:
    """Of the last ids, after truncation from the left."""
    ids = ids[-CONTEXT - 1 :]
    table = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    return sum(table[i - 1, ids[i]].item() for i in range(len(ids) - scored, len(ids)))


def score_choice(model, encode, prompt: str, choice: str, prefix: int) -> float:
    """HFLM.loglikelihood and TemplateLM._encode_pair; prefix: BOS."""
    if prompt == "":
        ids = encode(choice)
        added = ids[1:] if ids[0] == prefix else ids
        return log_p(model, [prefix, *added], len(added))
    n_spaces = len(prompt) - len(prompt.rstrip())
    if n_spaces > 0:
        choice = prompt[-n_spaces:] + choice
        prompt = prompt[:-n_spaces]
    whole, context = encode(prompt + choice), encode(prompt)
    added = whole[len(context) :]
    return log_p(model, context + added, len(added))


def check(results: list[dict], rows: list[dict], expected: list[list[float]]) -> tuple[float, float]:
    """-> acc and acc_norm of the expected scores"""
    right = []
    for result, row, scores in zip(results, rows, expected, strict=True):
        assert result["scores"] == pytest.approx(scores, rel=1e-4)
        answer, choices = row["answer"], row["choices"]
        answer = answer if isinstance(answer, int) else choices.index(answer)
        by_length = [s / len(choice) for s, choice in zip(scores, choices, strict=True)]
        right.append((scores[answer] == max(scores), by_length[answer] == max(by_length)))
        assert (result["acc"], result["acc_norm"]) == right[-1]
    return tuple(sum(column) / len(right) for column in zip(*right, strict=True))


def run_score(tmp_path, capsys, folder, rows: list[dict]) -> tuple[list[dict], dict[str, float]]:
    """-> (the lines of --out, the printed figures)"""
    main(["--run", str(folder), "--score", write(tmp_path / "rows.jsonl", rows), "--out", str(tmp_path / "out.jsonl")])
    printed = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    return [json.loads(line) for line in open(tmp_path / "out.jsonl")], {k: float(v) for k, v in printed.items()}


@pytest.mark.parametrize("name", ["gpt2", "llama3", "mixtral"])
def test_choices_are_scored_as_by_lm_eval(tmp_path, hub, capsys, monkeypatch, name):  # noqa: F811
    """In small batches, with prompts that are too long, end in spaces, or are empty; a tokenizer without BOS, and one
    with a space before a text."""
    monkeypatch.setattr(score, "BATCH_TOKENS", 100)
    folder, theirs, encode, _ = hub(name)
    bos = 1 if name == "mixtral" else 0
    rows = [{"prompt": prompt, "choices": CHOICES, "answer": CHOICES[0] if i % 2 else 1 + i // 2}
            for i, prompt in enumerate(PROMPTS)]  # fmt: skip
    expected = [[score_choice(theirs, encode, row["prompt"], f" {choice}", bos) for choice in CHOICES] for row in rows]
    results, printed = run_score(tmp_path, capsys, folder, rows)
    acc, acc_norm = check(results, rows, expected)
    assert printed == {"acc": round(acc, 4), "acc_norm": round(acc_norm, 4)}


def test_choices_after_messages_are_scored_as_by_lm_eval(tmp_path, hub, capsys):  # noqa: F811
    """In every form of a conversation, with its system message."""
    folder, theirs, _, _ = hub("llama3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    system, ask = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    rows = [
        {"messages": [ask]}, {"messages": json.dumps([ask])}, {"system": "Be brief.", "prompt": "Hi"},
        {"conversations": [{"from": "human", "value": "Hi"}], "system": "Be brief."},
    ]  # fmt: skip
    rows = [row | {"choices": CHOICES, "answer": 1} for row in rows]
    texts = [
        tokenizer.apply_chat_template([system, ask][count:], tokenize=False, add_generation_prompt=True)
        for count in (1, 1, 0, 0)
    ]

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # the text begins with BOS

    expected = [[score_choice(theirs, encode, text, choice, 0) for choice in CHOICES] for text in texts]
    check(run_score(tmp_path, capsys, folder, rows)[0], rows, expected)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_texts_have_the_losses_of_transformers(tmp_path, hub, capsys, name):  # noqa: F811
    """Windows of a long text as in lm-eval's get_rolling_token_windows."""
    folder, theirs, encode, _ = hub(name)
    texts, nats, count = ["A naïve 日本語 list", "One, two, three. " * 200, "x"], [], []
    for text in texts:
        ids, done = encode(text), 0
        ids = ids if name == "mixtral" else [0, *ids]
        nats.append(0.0)
        while done < len(ids) - 1:
            end = min(done + CONTEXT, len(ids) - 1)
            nats[-1] -= log_p(theirs, ids[: end + 1], end - done)
            done = end
        count.append(len(ids) - 1)
    results, printed = run_score(tmp_path, capsys, folder, [{"text": text} for text in texts])
    assert [r["nats"] for r in results] == pytest.approx(nats, rel=1e-4)
    assert [(r["tokens"], r["bytes"]) for r in results] == [
        (n, len(t.encode())) for n, t in zip(count, texts, strict=True)
    ]
    mean, size = sum(nats) / sum(count), sum(len(text.encode()) for text in texts)
    expected = {"nats_per_token": mean, "bits_per_byte": sum(nats) / size / math.log(2), "perplexity": math.exp(mean)}
    assert printed == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("row, message", [
    ({"prompt": "a"}, "expected a text, or prompt"), ({"text": ""}, "expected a text, or prompt"),
    ({"choices": ["a"], "answer": 0}, "the prompt is missing"),
    *(({"prompt": "a", "choices": ["b", "c"], "answer": answer}, "expected a text, or prompt") for answer in (2, True)),
    ({"prompt": "a", "choices": ["b", ""], "answer": 0}, "expected a text, or prompt"),
    ({"prompt": "a", "choices": [1, 2], "answer": 1}, "expected a text, or prompt"),
    ({"prompt": "a", "choices": ["b", "123456789"], "answer": 0}, "'123456789' has 10 tokens, expected 1 to 8"),
])  # fmt: skip
def test_bad_rows_are_named(tmp_path, row, message):
    source = Source("", MODELS["tiny-llama"], None, None, ByteTokenizer(), 8, True, ())
    with pytest.raises(UserError, match=f"rows.jsonl row 2: .*{message}"):
        score.read_questions(write(tmp_path / "rows.jsonl", [{"text": "fine"}, row]), "--score", source)


def test_ranks_share_the_batches(monkeypatch):
    """Rank 1 works first, and rank 0 gets its result."""
    monkeypatch.setattr(score, "BATCH_TOKENS", 50)
    model, shares = make_model("llama3"), []
    rows = [{"parts": [(ids, 3)], "bytes": 1} for ids in random_tokens(7, 20).tolist()]  # batches of 2, and one of 1

    def gather(found: dict, ranks) -> list[dict]:
        shares.append({**found})
        return [shares[0] if ranks.rank == 0 else dict.fromkeys(range(7), 0.0)]

    expected = score.score(model, rows, ALONE)
    monkeypatch.setattr(score, "gather", gather)
    for rank in (1, 0):
        results = score.score(model, rows, replace(ALONE, rank=rank, world_size=2))
    assert results == expected and [sorted(share) for share in shares] == [[2, 3, 6], [0, 1, 4, 5]]


@pytest.mark.parametrize("right, n", [(0, 5), (5, 5), (3, 7), (28, 80)])
def test_the_interval_is_wilson_s(right, n):
    """Its ends are the p for which the share lies 1.96 standard deviations of a binomial from p."""
    share = right / n
    for end, side in zip(score.interval(share, n)[1:-1].replace(",", " ").split()[::2], (1, -1), strict=False):
        p = float(end)
        assert share - p == pytest.approx(side * 1.96 * math.sqrt(max(p * (1 - p), 0) / n), abs=2e-4)


def test_a_run_scores_questions_and_keeps_the_best(tmp_path, run_here, capsys):  # noqa: F811
    rows = [{"prompt": f"{i} and {i + 1} make", "choices": [f"{2 * i + 1}", "x", "and"], "answer": 0} for i in range(9)]
    run, questions = tmp_path / "the run", write(tmp_path / "questions.jsonl", rows)
    flags = ["--steps", 12, "--eval_every", 4, "--eval_batches", 1, "--eval_score", questions]
    output = run_here(run, *flags, "--keep_best", "score_acc")
    found = {r["step"]: r["score_acc"] for r in records(run) if "score_acc" in r}
    best = max(found, key=found.get)
    assert [*found] == [4, 8, 12] and f"hf/ gets step {best}: best score_acc" in output
    assert f"score acc {found[12]:.4f}" in output
    assert f"lm_eval --model hf --model_args 'pretrained={run}/hf' --tasks" in output
    for step, folder in ((12, run), (best, run / f"checkpoints/step-{best:08d}")):
        main(["--run", str(folder), "--score", questions])
        output = capsys.readouterr()
        assert f"{found[step]:.4f}" in output.out and f"step-{best:08d}" in output.err + "step-00000012"
    write(tmp_path / "questions.jsonl", [row | {"choices": ["xx", "and"]} for row in rows])
    output = run_here(run, *flags, "--steps", 16, "--keep_best", "score_acc")
    forgotten = f"of step {best}, was judged by other data" in (run / "log.txt").read_text()
    assert forgotten and "hf/ gets step 16: best score_acc" in output
    flags[-1] = write(tmp_path / "texts.jsonl", [{"text": "x"}])
    output = run_here(tmp_path / "no", *flags, "--keep_best", "score_acc", status=2)
    assert "needs validation data, or rows with choices" in output
    chats = write(tmp_path / "chats.jsonl", [{"prompt": "Who?", "completion": "Me"}] * 50)
    output = run_here(tmp_path / "chats", "--data", chats, "--steps", 1, "--seq_len", 32)
    assert "hf --tasks hellaswag --apply_chat_template\n" in output
