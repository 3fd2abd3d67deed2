"""Shards, text, order and position. Where it can be, token t of a data set is the number t: so every row says where it
is from. The oracles are counting, slicing of the whole, and naive loops."""

import itertools
import json
import os
import pickle
import pydoc_data.topics
import re
import sys
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from base import disk
from base.errors import UserError
from base.ranks import Ranks
from data import epochs_as_steps, main, make_loader, open_data, show
from dataset import prepare as text_module
from dataset import rows
from dataset.files import builtin_documents
from dataset.prepare import find_files
from dataset.rows import find_sources, open_source, permute, turns
from dataset.test_prepare import open_alone, refused
from dataset.test_rows import run as run_ranks
from inputs import settled_args

pytestmark = pytest.mark.usefixtures("text_cache")
T = 8  # seq_len of most tests
GPT2, LLAMA3 = (20240520, 1, "<u2"), (20240801, 7, "<u4")  # llm.c's headers: magic, version, dtype


def config(*paths, **flags):
    flags = {"vocab_size": 2**18, "seq_len": T, "micro_batch": 1} | flags
    words = [f"--{name}={value}" for name, value in flags.items()]
    return settled_args(words + (["--data", *map(str, paths)] if paths else []))


def shard(path, tokens, kind=GPT2, **header):
    """Writes a shard as llm.c does, or with another version."""
    magic, version, dtype = kind
    head = np.zeros(256, "<i4")
    head[:3] = magic, header.get("version", version), len(tokens)
    path.write_bytes(head.tobytes() + np.asarray(tokens).astype(dtype).tobytes())
    return path


def headerless(path, tokens, dtype="<u2"):
    path.write_bytes(np.asarray(tokens).astype(dtype).tobytes())
    return path


def open_split(c, split):
    flag = "--val_data" if split == "val" and c.val_data else "--data"
    return open_source(find_sources(c, [flag])[flag][0], split, c)


def read(c, split="train") -> list[int]:
    source = open_split(c, split)
    return source.read(0, source.tokens).tolist()


@pytest.mark.parametrize("kind, delimiter", [(GPT2, 50256), (LLAMA3, 128000)])
def test_headers(tmp_path, kind, delimiter):
    tokens = np.random.default_rng(0).integers(0, 2 ** (16 if kind == GPT2 else 18), 400)
    c = config(shard(tmp_path / "a.bin", tokens, kind))
    assert read(c) + read(c, "val") == tokens.tolist()
    assert open_split(c, "train").delimiter == open_split(c, "val").delimiter == delimiter
    c = config(tmp_path / "a.bin", delimiter=5, data_dtype="uint32")  # a header wins
    assert open_split(c, "train").delimiter == 5
    text_module.write_shard(tmp_path / "ours.bin", tokens, 2**16 + (kind == LLAMA3))
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()
    c = config(headerless(tmp_path / "raw.bin", tokens, kind[2]), data_dtype=np.dtype(kind[2]).name)
    assert read(c) + read(c, "val") == tokens.tolist() and open_split(c, "train").delimiter is None


def test_folders_globs_and_lists(tmp_path):
    for i in (2, 0, 1):
        shard(tmp_path / f"s{i}.bin", range(100 * i, 100 * i + 100))
    (tmp_path / "notes.txt").write_text("not read: a folder is its .bin files")
    whole = [t for i in range(3) for t in range(100 * i, 100 * i + 95)]
    assert read(config(tmp_path)) == read(config(tmp_path / "s*.bin")) == whole
    assert read(config(tmp_path / "s2.bin", tmp_path / "s[01].bin")) == whole[190:] + whole[:190]
    assert read(config(shard(tmp_path / "book[1].bin", range(100)))) == list(range(95))  # not a glob


@pytest.mark.parametrize("has_index", [True, False])
def test_many_shards(tmp_path, monkeypatch, has_index):
    """Rank 0 opens the index twice, to see that no shard is missing, or each header once and its beginning for the
    fingerprint. Other ranks open shards when they read them. Few stay open."""
    folder, sent, opened, counts = tmp_path / "d", [], [], [0]
    folder.mkdir()
    shards = [shard(folder / f"train-{i:05}.bin", range(i, i + 100)) for i in range(300)]
    shards.append(shard(folder / "val-00000.bin", range(100)))
    index = {"tokenizer": "bytes", "fingerprint": "bytes", "vocab_size": 2**16, "delimiter": 256, "kind": "text"}
    index["files"] = {path.name: {"tokens": 100, "sha256": path.name} for path in shards}
    if has_index:
        (folder / "index.json").write_text(json.dumps(index))
    sys.addaudithook(lambda event, args: event == "open" and str(args[0]).startswith(f"{folder}/") and opened.append(1))
    monkeypatch.setattr("data.CHECKED", T)
    monkeypatch.setattr("data.on_first_rank", lambda work, _: sent[0] if sent else sent.append(work()) or sent[0])
    c = config(folder)
    for rank in (0, 2):
        loader, _ = open_data(c, Ranks(rank, 3, torch.device("cpu")))
        counts.append(len(opened))
    assert counts[1] <= (4 if has_index else 2 * 301 + 2) and counts[2] == counts[1]
    assert len(pickle.dumps(sent)) < 301 * 250
    descriptors = len(os.listdir("/proc/self/fd"))
    assert loader.sources[0].read(0, 30000).tolist() == [t for i in range(300) for t in range(i, i + 100)]
    assert len(os.listdir("/proc/self/fd")) - descriptors <= rows.OPEN_FILES
    if has_index:
        path = folder / "index.json"
        path.write_text(path.read_text().replace('"sha256": "train-00100', '"sha256": "train-00101'))
    else:
        shard(folder / "train-00100.bin", range(1, 101))
    assert make_loader(c).fingerprint != loader.fingerprint
    os.truncate(folder / "train-00007.bin", 1222)
    assert "00007.bin" in refused(make_loader, c)
    with pytest.raises(UserError, match="00007.bin on .* is shorter than at the start"):
        loader.sources[0].read(790, 801)


@pytest.mark.parametrize("name, is_val", [
    ("fineweb_val_000000", 1), ("x-VAL-1", 1), ("my.validation", 1), ("val01", 1), ("eval", 0), ("valley", 0),
])  # fmt: skip
def test_what_is_held_out(tmp_path, name, is_val):
    """Shards named *val*, or the last twentieth of each; with --val_data nothing else."""
    a, b, v = (shard(tmp_path / f"{n}.bin", range(i, i + 100)) for n, i in (("a", 0), (name, 500), ("other", 900)))
    train, val, all_of_b = (95, 5, 100) if not is_val else (100, 100, 0)
    assert read(config(a, b)) == [*range(train), *range(500, 500 + train * (not is_val))]
    assert read(config(a, b), "val") == [*range(train, 100), *range(600 - val, 600)]
    c = config(a, b, val_data=v)
    assert sorted(read(c)) == [*range(100), *range(500, 500 + all_of_b)]
    assert sorted(read(c, "val")) == [*range(900, 1000)]


def test_too_little_data(tmp_path, caplog):
    path = shard(tmp_path / "a.bin", range(20 * T))
    assert len(read(config(path, seq_len=19 * T - 1))) == 19 * T
    message = refused(make_loader, config(path, seq_len=19 * T))
    assert re.search(rf"train split .* {19 * T} tokens.* {19 * T + 1}:", message)
    message = refused(open_alone, config(path, val_data=shard(tmp_path / "short.bin", range(T))))
    assert re.search(rf"val split of --val_data: {T} tokens.* {T + 1}:", message)
    assert open_alone(config(path))[1] is None and "skips evaluation" in caplog.text


@pytest.mark.parametrize("at, split", [(0, "train"), (178, "train"), (190, "val"), (198, "val")])
def test_ids_beyond_the_vocabulary(tmp_path, at, split):
    tokens = np.full(200, 299)
    tokens[at] = 300
    first, second = shard(tmp_path / "a.bin", np.zeros(200)), shard(tmp_path / "b.bin", tokens)
    c = config(first, second, vocab_size=300, seq_len=2, eval_batches=0)
    loader = make_loader(c, split=split)
    for message in (refused(open_alone, c), refused(lambda: [*zip(range(loader.epoch_rows), loader, strict=False)])):
        assert f"{second}: id 300" in message and "vocab_size is 300" in message


@pytest.mark.parametrize("piece", [500, 2**24])
def test_txt(tmp_path, monkeypatch, piece):
    """Several files, in pieces of whole lines; and one with a single long line, which is split, too."""
    monkeypatch.setattr("dataset.files.TXT_PIECE", piece)
    for name, n in (("a", 300), ("b", 1000)):
        (tmp_path / f"{name}.txt").write_text(f"line of {name}: naïve 日本語 <s>\t\x0b\u2028 \r\n" * n, newline="")
    pieces = [row.content for row in find_files(str(tmp_path / "a.txt"), "")[0].rows()]
    assert all(piece.endswith("\n") for piece in pieces) and (len(pieces) == 2) == (piece > 500)
    c = config(tmp_path / "a.txt", tmp_path / "b.txt")
    splits = ([list(g) for bos, g in itertools.groupby(read(c, s), (256).__eq__) if not bos] for s in ("train", "val"))
    assert read(c).count(256) == read(c, "val").count(256) == 2 and read(c)[0] == read(c, "val")[0] == 256
    for name, train, val in zip("ab", *splits, strict=True):
        raw = (tmp_path / f"{name}.txt").read_bytes()
        assert bytes(train + val) == raw and bytes(train).endswith(b"\r\n")
        assert abs(len(val) - len(raw) / 20) < 60  # a line
    raw = ("one long line, naïve, " * 5000).encode()
    (tmp_path / "a.txt").write_bytes(raw)
    c = config(tmp_path / "a.txt")
    train, val = read(c), read(c, "val")
    assert train[0] == val[0] == 256 and bytes(train[1:] + val[1:]) == raw and 0.03 < len(val) / len(raw) < 0.06


def test_built_in_text(tmp_path, monkeypatch):
    """Python's topics, then docstrings, each once and if it is long; none of tests. Every 20th is held out."""
    docstrings = [f"Docstring {i} says {' '.join(['something'] * 20)}" for i in range(40)]
    own_of = {"stdlib": docstrings[:25], "torch": docstrings[15:], "torch/testing": ["Not this. " * 30]}
    for folder, own in own_of.items():
        (tmp_path / folder).mkdir()
        code = "".join(f'def f():\n    """{text}"""\n' for text in [*own, "Too short."])
        (tmp_path / folder / "a.py").write_text(code)
    with monkeypatch.context() as m:
        m.setattr(pydoc_data.topics, "topics", {"b": "Topic b. " * 30, "a": "Topic a. " * 30})
        m.setattr("sysconfig.get_paths", lambda: {"stdlib": tmp_path / "stdlib"})
        m.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin=tmp_path / "torch/__init__.py"))
        documents = list(builtin_documents())
    assert documents == ["Topic a. " * 30, "Topic b. " * 30, *docstrings]
    monkeypatch.setattr("dataset.files.builtin_documents", lambda: documents)
    train, val = read(config()), read(config(), "val")
    expected = [[256, *d.encode()] for d in documents]
    assert val == sum(expected[19::20], []) and train == sum((d for i, d in enumerate(expected, 1) if i % 20), [])


def test_permute_is_a_permutation():
    for n in (*range(1, 70), 255, 256, 257, 1000, 4097):
        order = permute(np.arange(n), n, f"key {n}")
        assert np.array_equal(np.sort(order), np.arange(n))
        some = np.arange(n)[::-3]
        assert np.array_equal(permute(some, n, f"key {n}"), order[some])  # each on its own
    # It never changes, or a run that is resumed with a newer flatland would repeat some rows and skip others.
    assert permute(np.arange(10), 10, "0/0").tolist() == [1, 0, 5, 4, 2, 3, 6, 7, 8, 9]


def numbered(folder, rows, shards=1):
    """A data set of so many rows, its tokens numbered from 0."""
    folder.mkdir(exist_ok=True)
    bounds = np.linspace(0, rows * T + 1, shards + 1).astype(int)
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        shard(folder / f"s{i}.bin", range(a, b))
    shard(folder / "val.bin", range(1000, 1000 + 21 * T + 1))
    return folder


def run(*args) -> tuple[list[list[int]], dict]:
    """-> the trained rows of each global batch, by micro-step and rank; the position afterwards."""
    batches, position = run_ranks(*args)
    assert all(row[0] % T == 0 and row == (*range(row[0], row[0] + T + 1),) for batch in batches for row in batch)
    return [[row[0] // T for row in batch] for batch in batches], position


def test_each_row_once_per_epoch(tmp_path):
    c = config(numbered(tmp_path / "d", 37, shards=3), micro_batch=5)
    loader = make_loader(c)
    assert [loader.state_dict()["samples"] for _ in zip(range(4), loader, strict=False)] == [5, 10, 15, 20]  # given out
    batches, state = run(c, 37)  # steps of 5 rows: 5 epochs, with steps that lie in two
    epochs = np.reshape(sum(batches, []), (5, 37))
    assert all(sorted(epoch) == [*range(37)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(37))}) == 6 and state["samples"] == 185
    other, _ = run(config(tmp_path / "d", micro_batch=5, seed=1), 1)
    assert sorted(other[0]) != sorted(batches[0])
    batches, _ = run(config(numbered(tmp_path / "e", 5), micro_batch=12), 5)  # a step of several epochs
    assert all(sorted(epoch) == [*range(5)] for epoch in np.reshape(sum(batches, []), (12, 5)))


def test_epochs_give_the_number_of_steps(tmp_path):
    numbered(tmp_path / "d", 48)
    c = config(tmp_path / "d", micro_batch=2)
    for epochs, world_size, steps in ((1, 1, 24), (2.5, 3, 20), (0.01, 1, 1)):
        assert epochs_as_steps(replace(c, epochs=epochs), world_size).steps == steps
    # 74 rows: the last step trains on 4 of its 10, once each, on any number of ranks; more epochs go on from there.
    c = config(numbered(tmp_path / "e", 37), micro_batch=1, batch_tokens=10 * T, epochs=2)
    for world_size in (1, 2, 5):
        loaders = [make_loader(c, rank, world_size) for rank in range(world_size)]
        steps = [[*itertools.islice(loader, 8)] for loader in loaders]
        rows = [[t[0].item() // T for s in steps for b in s[k] for t in b.targets if t[0] >= 0] for k in range(8)]
        assert [len(step) for step in rows] == [10] * 7 + [4] and {len(s[7]) for s in steps} == {-(-4 // world_size)}
        assert sorted(sum(rows, [])) == sorted([*range(37)] * 2)
    assert "are 2.00 epochs" in make_loader(replace(c, steps=8)).summary()[0]
    more, state = make_loader(replace(c, epochs=3)), loaders[0].state_dict()
    for position in (state, state | {"samples": 80, "end": 74}):  # the latter as version 0.3 wrote it
        more.load_state_dict(position)
        assert more.position["samples"] == state["samples"] == 74
    mixed = config(f"{tmp_path / 'd'}:1", f"{tmp_path / 'd'}:2", epochs=1)
    assert "--epochs needs one source" in refused(epochs_as_steps, mixed, 1)


@pytest.mark.parametrize("world_size, micro_batch, sharing", [
    (1, 1, 1), (1, 5, 1), (2, 6, 1), (3, 2, 1), (4, 3, 1), (5, 2, 1), (8, 1, 1), (7, 12, 1),
    (2, 3, 2), (4, 5, 2), (4, 12, 4),
])  # fmt: skip
def test_neither_ranks_nor_a_resume_change_the_order(tmp_path, world_size, micro_batch, sharing):
    """Also where they do not divide the 12 rows: the last micro-step is filled with rows that are not trained on."""
    path = numbered(tmp_path / "d", 37, shards=5)  # a shard ends within most rows
    whole, _ = run(config(path, micro_batch=12), 10)
    for k in (0, 4):
        first, state = run(config(path, micro_batch=3, batch_tokens=12 * T), k, 2)
        more = {"micro_batch": micro_batch, "batch_tokens": 12 * T, "context_parallel": sharing}
        rest, end = run(config(path, **more), 10 - k, world_size, state)
        assert first + rest == whole and end["samples"] == 120


@pytest.mark.parametrize("name, content, flags", [
    ("a.bin", np.arange(2**21, dtype="<i4").tobytes(), {"data_dtype": "uint32", "vocab_size": 2**22}),
    ("a.txt", b"one line\n" * 3000, {"stream": "on", "lanes": 1}),
], ids=["shards", "a stream"])  # fmt: skip
def test_a_change_in_the_middle_of_a_file_is_refused(tmp_path, name, content, flags):
    (tmp_path / name).write_bytes(content)
    c = config(tmp_path / name, eval_every=0, **flags)
    state = make_loader(c).state_dict()
    assert "seq_len 8, now 4" in refused(make_loader(replace(c, seq_len=4)).load_state_dict, state)
    (tmp_path / "moved").mkdir()
    (tmp_path / name).rename(tmp_path / "moved" / name)
    c = config(tmp_path / "moved" / name, eval_every=0, **flags)
    make_loader(c).load_state_dict(state)
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    (tmp_path / "moved" / name).write_bytes(changed)
    assert "other data" in refused(make_loader(c).load_state_dict, state)


def test_a_large_file_is_compared_all_over(tmp_path, monkeypatch):
    """64 blocks of 1 KiB out of 1 MiB: a change of two 64ths is seen wherever it is."""
    monkeypatch.setattr(disk, "SAMPLE_BLOCK", 2**10)
    monkeypatch.setattr(disk, "SAMPLE", 2**16)
    path, content = tmp_path / "a.bin", np.random.default_rng(0).bytes(2**20)
    path.write_bytes(content)
    digests = {disk.sample_digest([path])}
    for start in range(0, 2**20, 2**16):
        path.write_bytes(content[:start] + bytes(2**15) + content[start + 2**15 :])
        digests.add(disk.sample_digest([path]))
    assert len(digests) == 17


@pytest.mark.parametrize("stream", [{}, {"stream": "on", "lanes": 1, "eval_every": 0}], ids=["shards", "a stream"])
def test_show_prints_the_rows_of_a_step(tmp_path, capsys, stream):
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(999)))
    c = config(tmp_path / "a.txt", micro_batch=3, batch_tokens=6 * 16, seq_len=16, vocab_size=300, **stream)
    steps = [*itertools.islice(make_loader(c, 1, 2), 4)]
    other = {"flag_of_another_version": 1, "text_field": "text", "weights": "gone", "lora_weights": "gone", "lora": 4}
    (tmp_path / "flags.json").write_text(json.dumps(c.flags() | {"lora_alpha": 8.0} | other))
    main(["show", "--run", str(tmp_path), "--step", "4"])
    shown = capsys.readouterr().out.split("--- row ")[1:]
    expected = [bytes(t for t in row if t < 256).decode() for row in steps[3][0].tokens.tolist()]
    assert len(shown) == 6 and all(text.splitlines()[1] in "".join(shown[3:]) for text in expected)
    assert "arguments: --seq_len 3" in refused(main, ["show", "--run", str(tmp_path), "--seq_len", "3"])


def test_the_bytes_of_evaluated_text(tmp_path):
    """With --tokenizer bytes a token is a byte, but for the beginning of a document."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "é" * (i % 5)}) + "\n" for i in range(4000)))
    loader = make_loader(config(tmp_path / "a.jsonl", eval_batches=7, micro_batch=3), split="val")
    targets = torch.cat([batch.targets for (batch,) in loader]).flatten().tolist()
    assert loader.text_bytes() == (sum(t < 256 for t in targets), len(targets))
    assert 0 < sum(t < 256 for t in targets) < len(targets) == 7 * 3 * T
    assert make_loader(config(numbered(tmp_path / "d", 400)), split="val").text_bytes() == (0, 0)


def naive_positions(row, delimiter):
    begins = [i for i, token in enumerate(row) if i == 0 or token == delimiter]
    return [i - max(begin for begin in begins if begin <= i) for i in range(len(row))]


@pytest.mark.parametrize("delimiter", [3, -1])
def test_separate_documents(tmp_path, delimiter):
    tokens = np.random.default_rng(0).choice([3, 5, 50256], 2000, p=[0.2, 0.6, 0.2])
    flags = {"micro_batch": 16, "seq_len": 32, "delimiter": delimiter}
    path = shard(tmp_path / "a.bin", tokens)
    for (batch,) in itertools.islice(make_loader(config(path, documents="separate", **flags)), 5):
        expected = [naive_positions(row, 50256 if delimiter < 0 else delimiter) for row in batch.tokens.tolist()]
        assert batch.positions.tolist() == expected and batch.positions.dtype == torch.int64
    ((batch,),) = itertools.islice(make_loader(config(path, **flags)), 1)
    assert batch.positions is None
    path = headerless(tmp_path / "b.bin", range(400))
    unknown = config(path, documents="separate", data_dtype="uint16")
    assert "give --delimiter ID" in refused(open_alone, unknown)


@pytest.mark.parametrize("world_size, micro_batch", [(1, 6), (2, 3), (3, 2), (1, 2), (4, 1), (5, 1)])
@pytest.mark.parametrize("eval_batches, rows", [(1, 6), (2, 12), (3, 18), (4, 21), (0, 21), (100, 21)])
def test_validation(tmp_path, world_size, micro_batch, eval_batches, rows):
    """21 rows, in global batches of 6."""
    path = numbered(tmp_path / "d", 37)
    c = config(path, micro_batch=micro_batch, batch_tokens=6 * T, eval_batches=eval_batches)
    loaders = [make_loader(c, rank, world_size, "val") for rank in range(world_size)]
    passes = [[list(loader) for loader in loaders] for _ in range(2)]
    batches = [[b for rank in ranks for micros in rank for b in micros] for ranks in passes]
    seen = [sum(((b.tokens[b.targets[:, 0] >= 0, 0] // T).tolist() for b in part), []) for part in batches]
    assert seen[0] == seen[1] and len(seen[0]) == len(set(seen[0])) == rows
    first = sorted(seen[0])[0]
    gaps = np.diff([*sorted(seen[0]), first + 21])
    assert first == 1000 // T and gaps.max() - gaps.min() <= 1  # evenly spread
    counts = {tuple(len(micros) for micros in rank) for rank in passes[0]}
    assert len(counts) == 1 and len(counts.pop()) == -(-rows // 6)  # or the ranks would wait for each other


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
    some = np.array([17, 4, 19_999])
    assert turns(some, weights)[0].tolist() == source[some].tolist()


def test_a_mixture(tmp_path):
    """Shares, and epochs of each source by itself. test_rows.py resumes a mixture on other ranks."""
    a, b = numbered(tmp_path / "a", 50), numbered(tmp_path / "b", 20)
    loader, seen = make_loader(config(f"{a}:0.7", f"{b}:0.3", micro_batch=10)), ([], [])
    for (batch,) in itertools.islice(loader, 20):
        assert batch.sources.sum() == 3
        for source, token in zip(batch.sources.tolist(), batch.tokens[:, 0].tolist(), strict=True):
            seen[source].append(token // T)
    for numbers, count in zip(seen, (50, 20), strict=True):
        first, second = numbers[:count], numbers[count : 2 * count]
        assert sorted(first) == sorted(second) == [*range(count)] and first != second
    other = make_loader(config(f"{a}:0.6", f"{b}:0.4", micro_batch=10))
    assert "other data" in refused(other.load_state_dict, loader.state_dict())


@pytest.mark.parametrize("words, message", [
    ("a.bin:0 a.bin:0", "give each entry a weight"), ("a.bin:-1 a.bin:2", "none negative"),
    ("a.bin:0.5 a.bin", "give each entry"), ("chat.jsonl text.jsonl", "conversations"),
    ("a.bin:1/0", "a.bin:1/0 does not exist"),
])  # fmt: skip
def test_wrong_mixtures(tmp_path, words, message):
    shard(tmp_path / "a.bin", range(900))
    (tmp_path / "chat.jsonl").write_text('{"prompt": "Why?", "completion": "So."}\n' * 30)
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    assert message in refused(make_loader, config(*(tmp_path / word for word in words.split())))


def test_chat_fields_and_show(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "Why?", "a": "So."}\n' * 2)
    (shown,) = show(make_loader(config(tmp_path / "a.jsonl", chat_fields="q,a", seq_len=64)), 1, 1)
    assert shown.splitlines()[:3] == ["--- row 1", "--- document", "<s>[INST] Why? [/INST][[ So. </s>]]"]
    assert re.search(r"--- \d+ places filled up", shown)
    assert "expected two or three names" in refused(config, tmp_path / "a.jsonl", chat_fields="q")
