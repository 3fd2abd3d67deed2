"""Conversations as rows, and mixtures. Oracles: what lib/tokenizer.py renders, first-fit as a loop, counting."""

import itertools
import json
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
import transformers

import train
from config import parse_args
from data import Batch, make_loader, open_data, show
from lib import rows
from lib.rows import turns
from lib.test_tokenizer import TEMPLATES, _chat_tokenizer, _conversations, _json, _llama2_json, _write
from lib.text import BEGINS, ID, TRAINED, Encoder, TextRow, find_files, prepare, write_shard
from lib.tokenizer import chat_template, load_tokenizer, render_chat
from lib.weights import export_model
from model import MODELS, Transformer
from shard import ALONE
from test_prepare import refused

BYTES = load_tokenizer("bytes")
pytestmark = pytest.mark.usefixtures("text_cache")


def config(*data, **flags):
    flags = {"vocab_size": 4096, "seq_len": 64, "micro_batch": 4} | flags
    return parse_args([f"--{k}={v}" for k, v in flags.items()] + ["--data", *map(str, data)])


def conversations(n=60) -> list[list[dict]]:
    out = []
    for i in range(n):
        system = [{"role": "system", "content": "Be brief."}] * (i % 3 == 0)
        pairs = [(f"Question {i}.{k}?", f"Answer {i}.{k}" + " and more" * (i * 5 % 7)) for k in range(i % 3 + 1)]
        roles = ("user", "assistant")
        turns_ = [{"role": r, "content": c} for pair in pairs for r, c in zip(roles, pair, strict=True)]
        out.append(system + turns_)
    return out


def write(path, messages):
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages))
    return path


def epoch(loader) -> list[Batch]:
    """The micro-batches of one epoch, or a little more."""
    return list(itertools.chain.from_iterable(itertools.islice(loader, -(-loader.rows // loader.step_rows))))


def documents(batches) -> list[tuple[list[int], list[int]]]:
    """(tokens, targets) of each document that is trained on, taken apart where positions restart."""
    out = []
    for b in batches:
        for tokens, targets, positions in zip(b.tokens.tolist(), b.targets.tolist(), b.positions.tolist(), strict=True):
            starts = [i for i, p in enumerate(positions) if p == 0]
            assert starts[0] == 0
            for a, z in itertools.pairwise([*starts, len(tokens)]):
                assert positions[a:z] == list(range(z - a))
                if max(targets[a:z]) >= 0:
                    out.append((tokens[a:z], targets[a:z]))
    return out


@pytest.mark.parametrize("family", ["chatml", "llama3.1", "mixtral"])
def test_rows_are_what_the_template_renders(tmp_path, family):
    """Each conversation once per epoch, whole; the targets are the assistant's words and the token that ends them.
    test_tokenizer.py has the templates."""
    (tmp_path / "tokenizer").mkdir()
    tokenizer = _chat_tokenizer(family, tmp_path / "tokenizer")
    every = conversations()
    model = "tiny-mixtral" if family == "mixtral" else "tiny-llama"
    c = config(write(tmp_path / "a.jsonl", every), tokenizer=tmp_path / "tokenizer", seq_len=700, model=model)
    loader = make_loader(c)
    expected = []
    for messages in (m for i, m in enumerate(every, 1) if i % 20):  # the others are held out
        ids, mask = render_chat(tokenizer, messages, tokenizer.chat_template)
        expected.append((ids[:-1], [i if trained else -100 for i, trained in zip(ids[1:], mask[1:], strict=True)]))
    assert sorted(documents(epoch(loader))[: len(expected)]) == sorted(expected)
    assert "57 conversations, 0 truncated to --seq_len 700 and 0 dropped" in "".join(loader.summary(None))


ASK, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
PARTS = [{"type": "text", "text": "W"}, {"type": "text", "text": "hy?", "image": None}]
SHARE = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
SAME = {  # rows that are the same conversation
    "messages": {"messages": [ASK, ANSWER]},
    "beside text": {"messages": [ASK, ANSWER | {"tool_calls": None}], "text": "Why? So.", "system": None},
    "parts": {"messages": [ASK | {"content": PARTS}, ANSWER]},
    "ShareGPT": {"id": 1, "conversations": SHARE},
    "OpenAI's keys": {"conversations": [ASK, ANSWER]},
    "one": {"conversation": [SHARE[0] | {"from": "user"}, SHARE[1] | {"from": "assistant"}]},
    "completion": {"prompt": "Why?", "completion": "So."},
    "lists": {"prompt": [ASK], "completion": [ANSWER]},
    "chosen": {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
    "chosen list": {"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER]},
    "chosen whole": {"prompt": "Why?", "chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]},
    "Alpaca": {"instruction": "Why?", "input": "", "output": "So.", "text": "### Instruction: Why?"},
    "no hint": {"hint": None, "ask": "Why?", "say": "So."},
    "an empty hint": {"hint": "", "ask": "Why?", "say": "So."},
    "weights": {"messages": [ASK | {"weight": None}, ANSWER | {"weight": 1, "train": True}]},
}
BRIEF = {"role": "system", "content": "Be brief."}
SYSTEM = {  # the same, with a system message
    "messages": {"messages": [BRIEF, ASK, ANSWER]},
    "ShareGPT": {"conversations": [{"from": "system", "value": "Be brief."}, *SHARE]},
    "beside": {"system": "Be brief.", "conversations": SHARE},
    "Alpaca": {"instruction": "Why?", "output": "So.", "system": "Be brief."},
    "fields": {"hint": "Be brief.", "ask": "Why?", "say": "So."},
}


def test_rows_that_are_conversations(tmp_path):
    """The usual forms on the hub. Files from Windows begin with a BOM."""
    encode = Encoder("bytes", chat_fields=("hint", "ask", "say"))
    for rows_, messages in ((SAME, [ASK, ANSWER]), (SYSTEM, [BRIEF, ASK, ANSWER])):
        ids, mask = render_chat(BYTES, messages, chat_template(BYTES, "llama"))
        bom = "\ufeff" * (rows_ is SYSTEM)
        (tmp_path / "a.jsonl").write_text(bom + "".join(json.dumps(row) + "\n" for row in rows_.values()))
        found = [encode(row) for row in find_files(str(tmp_path / "a.jsonl"), "")[0].rows()]
        tokens = [i | TRAINED * trained for i, trained in zip(ids, mask, strict=True)]
        for name, its_tokens in zip(rows_, found, strict=True):
            assert its_tokens == ([tokens[0] | BEGINS, *tokens[1:]], "chat"), name
        (tmp_path / "a.json").write_text(bom + json.dumps([*rows_.values()], indent=1))
        listed = [encode(row) for row in find_files(str(tmp_path / "a.json"), "")[0].rows()]
        assert listed == found
    row = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    tokens, _ = encode(TextRow(row))
    assert "[INST] Add.\n\n1, 2 [/INST] 3" in BYTES.decode([t & ID for t in tokens])
    named = Encoder("bytes", "body")(TextRow({"body": "x", "messages": [ASK, ANSWER]}))
    assert named == ([256, *b"x"], "text")  # a text field that was named counts first


def test_conversations_in_parquet(tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    for name, row in (SAME | {"fields": {"ask": "Why?", "say": "So."}}).items():
        if name == "parts":  # text and parts in one column
            row = {"messages": [ASK | {"content": PARTS}, ANSWER | {"content": [{"type": "text", "text": "So."}]}]}
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
        encode = Encoder("bytes", chat_fields=("ask", "say"))
        ((tokens, _),) = (encode(r) for r in find_files(str(tmp_path / "a.parquet"), "")[0].rows())
        ids, _ = render_chat(BYTES, [ASK, ANSWER], chat_template(BYTES, "llama"))
        assert [t & ID for t in tokens] == ids, name


def test_chat_fields_and_show(tmp_path):
    for count, held_out in ((1, "The validation split has 0 conversations"), (2, "1 conversations, 0 truncated")):
        (tmp_path / "a.jsonl").write_text((json.dumps({"q": "Why?", "a": "So."}) + "\n") * count)
        c = config(tmp_path / "a.jsonl", chat_fields="q,a")
        plain, *_, explained = show(c, 3, False)
        assert plain.splitlines()[:3] == ["--- row 1", "--- document", "<s>[INST] Why? [/INST][[ So. </s>]]"]
        assert re.search(r"--- \d+ places filled up", plain) and "\033[32m So. </s>\033[0m" in next(show(c, 1, True))
        assert f"not shown: {held_out}" in explained and "at least 1 if there are 2 or more" in explained
    for names in ("q", "a,b,c,d"):
        assert "expected two or three names" in refused(config, tmp_path / "a.jsonl", chat_fields=names)


TALKERS = [("bytes", "tiny-llama"), ("bytes", "tiny-gpt2"), ("gpt2", "tiny-gpt2"), ("llama2", "tiny-llama")]
TALKERS += [("llama3.1", "tiny-llama"), ("chatml", "tiny-qwen2.5"), ("chatml", "tiny-qwen3")]
TALKERS += [("mixtral", "tiny-mixtral"), ("mistral", "tiny-mistral"), ("control", "tiny-mistral")]


@pytest.mark.parametrize("kind, model", TALKERS)
def test_an_export_talks_as_it_was_trained_to(tmp_path, kind, model):
    """Transformers gives the ids of render_chat with the folder's template and tokenizer, and ends with the turn; so do
    we when we read the folder again. gpt2: a tokenizer that has Llama 3's control tokens and cuts otherwise."""
    (tmp_path / "own").mkdir()
    shape = replace(MODELS["tiny-llama"], family="mistral") if model == "tiny-mistral" else MODELS[model]
    if kind in TEMPLATES:
        ours = _chat_tokenizer(kind, tmp_path / "own")
    else:
        pieces = "control" if kind == "control" else "llama2"
        content = _json("gpt2") if kind == "gpt2" else _llama2_json(pieces, tmp_path / "model")
        ours = load_tokenizer("bytes" if kind == "bytes" else _write(tmp_path / "own", tokenizer__json=content))
    hf, template = tmp_path / "hf", chat_template(ours, shape.chat_format)
    export_model(Transformer(replace(shape, vocab_size=ours.vocab_size)), hf, tokenizer=ours, talks=True)
    theirs, again = transformers.AutoTokenizer.from_pretrained(hf), load_tokenizer(str(hf))
    assert theirs.chat_template == (hf / "chat_template.jinja").read_text()
    for messages in _conversations():
        if kind in ("control", "mixtral"):  # no message holds the text of a control token
            messages = [m | {"content": m["content"].replace("[INST]", "")} for m in messages]
        ids, mask = render_chat(ours, messages, template)
        asks = messages[-1]["role"] != "assistant"
        assert theirs.apply_chat_template(messages, return_dict=False, add_generation_prompt=asks) == ids, messages
        assert render_chat(again, messages, chat_template(again, shape.chat_format))[0] == ids
        if not asks:
            last = [i for i, trained in zip(ids, mask, strict=True) if trained][-1]
    for name in ("config.json", "generation_config.json"):
        ends = json.loads((hf / name).read_text())["eos_token_id"]
        assert {ours.eos_id, last} == set(ends if isinstance(ends, list) else [ends])
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)


@pytest.mark.parametrize("seed", range(3))
def test_pack_is_first_fit(seed):
    lengths = np.random.default_rng(seed).integers(1, 101, 400)
    room, expected = [], []
    for n in lengths:
        at = next((i for i, free in enumerate(room) if free >= n), len(room))
        room += [100] * (at == len(room))
        room[at] -= n
        expected.append(at)
    assert rows.pack(lengths, 100).tolist() == expected


def test_pack_of_very_many_closes_the_fullest(monkeypatch):
    monkeypatch.setattr(rows, "OPEN_ROWS", 10)
    lengths = np.random.default_rng(0).integers(1, 101, 3000)
    row = rows.pack(lengths, 100)
    filled = np.bincount(row, lengths)
    assert filled.max() <= 100 and filled.min() > 0 and filled.mean() > 88


def test_too_long_conversations(tmp_path):
    """Cut to what fits, dropped with the flag or where nothing that is trained on would be left; all counted."""
    rows_ = [[("x" * 10, "y" * 10)], [("x" * 10, "y" * 100)], *[[("x" * 100, "y" * 10)]] * 2]  # the last is held out
    path = write(tmp_path / "a.jsonl", [
        [{"role": r, "content": c} for pair in row for r, c in zip(("user", "assistant"), pair, strict=True)]
        for row in rows_
    ])  # fmt: skip
    loader = make_loader(config(path))
    assert "3 conversations, 1 truncated to --seq_len 64 and 1 dropped" in loader.summary(None)[1]
    (short, long) = sorted(documents(epoch(loader))[:2], key=lambda d: len(d[0]))
    assert len(long[0]) == 64 and bytes(t for t in long[1] if 0 <= t < 256).count(b"y") == 65 - 1 - 25 - 1
    loader = make_loader(config(path, long_chats="drop"))
    assert "0 truncated to --seq_len 64 and 2 dropped" in loader.summary(None)[1]
    assert documents(epoch(loader))[0] == short
    assert "The validation split has 1 conversations, and none is left" in refused(
        make_loader, config(path), split="val"
    )
    message = refused(make_loader, config(path, seq_len=20, long_chats="drop"))
    assert "3 conversations, and none is left" in message and "--seq_len" in message


# ---- mixtures


@pytest.mark.parametrize("weights", ["0.7 0.3", "1 1 1", "0.7 0.2 0.1", "5 0 2.5", "0.001 0.999", "0.123456789 1"])
def test_turns_have_exact_shares(weights):
    weights = [Fraction(w) for w in weights.split()]
    n = 20_000
    source, number = turns(np.arange(n), weights)
    for i, w in enumerate(weights):
        mine = source == i
        assert number[mine].tolist() == list(range(int(mine.sum())))  # none left out, none twice
        drift = np.abs(np.cumsum(mine) - np.arange(1, n + 1) * float(w / sum(weights))).max()
        assert drift < len(weights)  # not only in the long run: after every row
    some = np.array([17, 4, 19_999, 10**12])
    assert turns(some, weights)[0][:3].tolist() == source[some[:3]].tolist()


def numbered(path, first, n):
    write_shard(path, np.arange(first, first + n), 2**17)
    return path


def test_a_mixture(tmp_path):
    """Shares, order, resume and ranks; epochs of each source by itself."""
    a, b = numbered(tmp_path / "a.bin", 0, 8 * 50 + 1), numbered(tmp_path / "b.bin", 1000, 8 * 20 + 1)
    val = numbered(tmp_path / "val.bin", 0, 100)
    flags = {"seq_len": 8, "val_data": val, "vocab_size": 2**17}
    c = config(f"{a}:0.7", f"{b}:0.3", micro_batch=10, **flags)
    loader = make_loader(c)
    batches = [batch for (batch,) in itertools.islice(loader, 20)]
    whole = [row for batch in batches for row in batch.tokens[:, 0].tolist()]
    assert all(batch.sources.tolist() == [int(t >= 1000) for t in batch.tokens[:, 0]] for batch in batches)
    assert all(sum(batch.sources.tolist()) == 3 for batch in batches)
    of_a, of_b = [t for t in whole if t < 1000], [t for t in whole if t >= 1000]
    assert sorted(of_a[:50]) == sorted(of_a[50:100]) == [*range(0, 400, 8)] and of_a[:50] != of_a[50:100]
    assert sorted(of_b[:20]) == sorted(of_b[20:40]) == [*range(1000, 1160, 8)]
    c2 = config(f"{a}:0.7", f"{b}:0.3", micro_batch=2, batch_tokens=80, **flags)
    loaders = [make_loader(c2, rank, 3) for rank in range(3)]
    for part in loaders:
        part.load_state_dict(loader.state_dict() | {"samples": 70})
    found = []
    for micros in zip(*(itertools.islice(part, 5) for part in loaders), strict=True):
        for ranks in zip(*micros, strict=True):
            found += [int(r[0]) for m in ranks for r, t in zip(m.tokens, m.targets, strict=True) if t.max() >= 0]
    assert found == whole[70:120]
    other = make_loader(config(f"{a}:0.6", f"{b}:0.4", micro_batch=10, **flags))
    assert "other data" in refused(other.load_state_dict, loader.state_dict())


def test_a_mixture_of_kinds(tmp_path):
    """Text, conversations and a stream, each with its weight; validation has its share of each."""
    chat = write(tmp_path / "chat.jsonl", conversations(100))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"text {i} " * 20}) + "\n" for i in range(200)))
    loader = make_loader(config(f"{chat}:1", f"{tmp_path / 'text.jsonl'}:3", seq_len=256, micro_batch=8))
    for (batch,) in itertools.islice(loader, 3):
        assert batch.sources.tolist().count(0) == 2 and batch.positions is not None
        text_rows = batch.sources == 1
        assert torch.equal(batch.positions[text_rows], torch.arange(256).expand(6, 256))
        assert (batch.targets[text_rows] >= 0).all() and (batch.targets[~text_rows] == -100).any()
    val = make_loader(config(f"{chat}:1", f"{tmp_path / 'text.jsonl'}:3", seq_len=256, eval_batches=2), split="val")
    assert sum(b.sources.tolist().count(0) for (b,) in val) == 2


MIXTURES = {
    "a:0 b:0": "sum to nothing",
    "a:-1 b:2": "must not be negative",
    "a:0.5 b": "a weight for some",
    "chat text": "conversations",
}


@pytest.mark.parametrize("words", MIXTURES)
def test_wrong_mixtures(tmp_path, words):
    for name in "ab":
        numbered(tmp_path / f"{name}.bin", 0, 900)
    write(tmp_path / "chat.jsonl", conversations(30))
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    entries = [re.sub(r"^[ab]", r"\g<0>.bin", w) if w[0] in "ab" else f"{w}.jsonl" for w in words.split()]
    message = refused(make_loader, config(*(tmp_path / e for e in entries)))
    assert MIXTURES[words] in message


def test_prepared_conversations(tmp_path):
    """`prepare` keeps the mask. Another tokenizer than at that time is refused."""
    path = write(tmp_path / "a.jsonl", conversations())
    prepare(find_files(str(path), ""), Encoder("bytes"), tmp_path / "out", 2000, 20)
    assert len(list((tmp_path / "out").glob("*.bin"))) > 2
    folder, files = make_loader(config(tmp_path / "out")), make_loader(config(path))
    assert [b.targets.tolist() for b in epoch(folder)] == [b.targets.tolist() for b in epoch(files)]
    (tmp_path / "other").mkdir()
    _chat_tokenizer("llama3.1", tmp_path / "other")
    message = refused(make_loader, config(tmp_path / "out", tokenizer=tmp_path / "other"))
    assert "was prepared with --tokenizer bytes" in message
    assert BYTES.fingerprint in (tmp_path / "out" / "index.json").read_text()


def test_data_is_opened_once(tmp_path, monkeypatch):
    """In --check, and in a run: each file for both splits, and each split's conversations packed once."""
    path, calls = write(tmp_path / "a.jsonl", conversations()), []
    for place, name in ((rows, "open_shard"), (rows, "pack"), (rows.Catalog, "_open_shards")):
        function = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, f=function, n=name: calls.append(n) or f(*a))
    c = config(path, out=tmp_path / "run", compile="none", dtype="fp32")
    train.report(c, ALONE)
    once = ["_open_shards", *["open_shard"] * 2, *["pack"] * 2]
    assert sorted(calls) == once
    loader, val_loader = open_data(c, ALONE)
    assert sorted(calls) == sorted(once * 2) and loader.rows > val_loader.rows
