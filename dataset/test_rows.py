"""dataset/rows.py: streams, and conversations as rows. Oracles: naive loops over what the test itself wrote, what
hf/tokenizer.py renders, first-fit as a loop. A local server that cuts and refuses stands for the hub."""

import builtins
import errno
import functools
import gzip
import io
import itertools
import json
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import checkpoint
import preflight
import train
from base.errors import Failure
from base.ranks import Ranks
from config import choose_lanes
from data import Batch, make_loader, open_data
from dataset import prepare as text_module
from dataset import rows
from dataset.prepare import Encoder, find_files, prepare_folder, write_shard
from dataset.rows import Listing, merge_positions, permute
from dataset.test_prepare import refused
from hf.chat import chat_template, render_chat
from hf.test_tokenizer import _json, _write
from hf.tokenizer import load_tokenizer
from inputs import settled_args
from test_download import COMMITS, TOKEN, serve

T = 16
pytestmark = pytest.mark.usefixtures("text_cache", "empty_memory")


@pytest.fixture(autouse=True)
def workers(monkeypatch, request):
    """A thread instead of worker processes, which take half a second to start. One test with a hub starts them."""
    if request.function is not test_the_hub_gives_what_local_files_give:
        monkeypatch.setattr(text_module, "start_workers", lambda processes: ThreadPoolExecutor(1))


def text(file: int, row: int) -> str:
    return f"file {file} row {row} " + "word " * ((file * 5 + row * 7) % 11)


def write(folder, files=5, count=40):
    folder.mkdir(exist_ok=True)
    for f in range(files):
        lines = "".join(json.dumps({"text": text(f, r)}) + "\n" for r in range(count))
        (folder / f"part.{f}.json.gz").write_bytes(gzip.compress(lines.encode()))
    return f"{folder}/part.*.json.gz"


def config(data, **flags):
    flags = {"seq_len": T, "micro_batch": 12, "batch_tokens": 12 * T, "lanes": 4, "stream": "on"} | flags
    return settled_args([f"--{k}={v}" for k, v in ({"eval_every": 0} | flags).items()] + ["--data", *str(data).split()])


def naive_lane(lane, lanes, files, count, epochs):
    """All tokens of a lane, file by file."""
    mine = list(range(lane, files, lanes)) if files >= lanes else [lane % files]
    sharing = [other for other in range(lanes) if other % files == lane % files] if files < lanes else [lane]
    out = []
    for epoch in range(epochs):
        for k in permute(np.arange(len(mine)), len(mine), f"0/{epoch}/{lane}"):
            for row in range(sharing.index(lane), count, len(sharing)):
                out += [256, *text(mine[k], row).encode()]
    return out


def run(c, steps, world_size=1, state=None):
    """-> rows of each global batch [seq_len + 1 tokens], the merged position."""
    loaders = [make_loader(c, rank, world_size) for rank in range(world_size)]
    for loader in loaders if state else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    iterators, out = [iter(loader) for loader in loaders], []
    for _ in range(steps):
        micros = zip(*(next(i) for i in iterators), strict=True)
        parts, n = [part for ranks in micros for part in ranks], c.context_parallel  # n of them are a batch
        columns = [[(p.tokens, p.targets) for p in parts[i : i + n]] for i in range(0, len(parts), n)]
        batch = [Batch(*(torch.cat(tensors, 1) for tensors in zip(*pairs, strict=True))) for pairs in columns]
        shape, dtype = (c.micro_batch, c.seq_len), torch.int64
        assert all(t.shape == shape and t.dtype == dtype for b in batch for t in (b.tokens, b.targets))
        pairs = [(x, y) for b in batch for x, y in zip(b.tokens.tolist(), b.targets.tolist(), strict=True)]
        assert all(x[1:] == y[:-1] for x, y in pairs if max(y) >= 0)
        out.append([(*x, y[-1]) for x, y in pairs if max(y) >= 0])
    for i in iterators:
        i.close()
    return out, merge_positions([loader.state_dict() for loader in loaders])


@pytest.mark.parametrize("files, lanes", [(5, 4), (4, 4), (2, 5), (1, 3)])
def test_rows_are_those_of_the_lanes(tmp_path, files, lanes):
    """Row r is the next one of lane r mod lanes, over several epochs; with fewer files than lanes rows are dealt."""
    batches, state = run(config(write(tmp_path / "d", files, 9), lanes=lanes), 25)
    whole = sum(batches, [])
    for lane in range(lanes):
        expected, mine = naive_lane(lane, lanes, files, 9, 30), whole[lane::lanes]
        assert mine == [tuple(expected[i * T : i * T + T + 1]) for i in range(len(mine))]
    assert max(p[1] for p in state["lanes"]["0"].values()) >= 1  # an epoch has ended


@pytest.mark.parametrize("lanes, splits", [(4, [(3, 2), (2, 6)]), (8, [(2, 3), (5, 2)])])
def test_no_rank_changes_a_row_and_a_resume_repeats_none(tmp_path, lanes, splits):
    """Of a mixture, in which the stream gives the rows that it gives alone. Ranks and micro-batches divide a step and
    its lanes, or do not."""
    write_shard(tmp_path / "a.bin", np.arange(5000), 2**16)
    data, flags = write(tmp_path / "d"), {"lanes": lanes, "vocab_size": 5000, "val_data": tmp_path / "a.bin"}
    mixed = f"{data}:2 {tmp_path / 'a.bin'}:1"
    whole, _ = run(config(mixed, **flags), 9)
    streamed = [row for row in sum(whole, []) if max(row) <= 256 and row[1] != row[0] + 1]
    assert streamed[:60] == sum(run(config(data, **flags), 5)[0], []) and len(sum(whole, [])) == 108
    state, found = None, []
    for steps, (world_size, micro_batch) in zip((4, 5), splits, strict=True):
        part, state = run(config(mixed, micro_batch=micro_batch, **flags), steps, world_size, state)
        found += part
    assert found == whole


def test_lanes_are_chosen_for_the_ranks():
    """One rank reads each. The oracle deals rows to ranks."""
    for ranks, micro_batch in ((1, 8), (1, 12), (3, 5), (16, 8), (100, 2), (1024, 4)):
        lanes = choose_lanes(settled_args(["--micro_batch", str(micro_batch)]), ranks)
        numbers = np.arange(np.lcm(lanes, ranks * micro_batch))
        assert len(np.unique(numbers % lanes * ranks + numbers // micro_batch % ranks)) == lanes >= 64


def test_a_resume_keeps_what_depends_on_the_ranks(tmp_path):
    c = config(write(tmp_path / "d", 1, 1), lanes=0, batch_tokens=0, out=tmp_path / "run")
    folder = tmp_path / "run/checkpoints/step-00000002"
    assert checkpoint.keep_defaults(c) == c and preflight.settle(c, Ranks(0, 16, torch.device("cpu"))).lanes == 192
    folder.mkdir(parents=True)
    then = replace(c, batch_tokens=96, lanes=7)
    (folder / "manifest.json").write_text(json.dumps({"config": then.flags()}))
    kept = checkpoint.keep_defaults(c)
    saved = SimpleNamespace(config=then, model_config=c.model_config)
    assert (kept.lanes, kept.batch_tokens) == (7, 96) and checkpoint.changes(saved, kept) == {}
    given = replace(c, lanes=5, batch_tokens=32)
    assert checkpoint.keep_defaults(given) == given


def test_bad_rows(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text(0, r)}) + "\n" if r != 7 else "{\n" for r in range(30)]
    path.write_text("".join(lines))
    assert re.search(r"a\.jsonl line 8: not JSON.*--skip_bad", refused(run, config(path, lanes=1), 4))
    (found, *_), _ = run(config(path, lanes=1, skip_bad=1, batch_tokens=24 * T), 1)
    expected = [t for r in range(30) if r != 7 for t in (256, *text(0, r).encode())]
    assert found == [tuple(expected[i * T : i * T + T + 1]) for i in range(24)]
    assert re.search("skipped: .* line 8: ", caplog.text)


def test_a_store_that_tells_no_version(monkeypatch):
    """The fingerprint then has names and sizes; no address is taken for a local file to sample."""
    stores = [text_module.TextFile("https://a/b.jsonl", size, "", object()) for size in (5, 6)]
    monkeypatch.setattr("data.find_sources", lambda *_: {"--data": [Listing(stores[:1])]})
    first = make_loader(config("https://a/b.jsonl", lanes=1)).fingerprint
    stores.pop(0)
    assert make_loader(config("https://a/b.jsonl", lanes=1)).fingerprint != first


def test_what_cannot_be_streamed(tmp_path):
    data = write(tmp_path / "d", 1, 5)
    assert "needs a --val_data" in refused(make_loader, config(data, eval_every=10), split="val")
    assert "and --eval_batches" in refused(make_loader, config(data, eval_batches=0, val_data=data), split="val")
    for content, message in (("", "no rows are left"), ("a document", "has fewer rows than --lanes 4: give fewer")):
        (tmp_path / "one.txt").write_text(content)
        assert message in refused(run, config(tmp_path / "one.txt"), 1)


def test_validation_of_a_stream(tmp_path):
    """The same rows each time, on any number of ranks."""
    data, val = write(tmp_path / "d"), write(tmp_path / "v", 2, 40)
    seen = []
    for world_size, micro_batch in ((1, 12), (2, 3)):
        c = config(data, val_data=val, eval_every=1, eval_batches=2, micro_batch=micro_batch)
        loaders = [make_loader(c, rank, world_size, "val") for rank in range(world_size)]
        for _ in range(2):
            steps = zip(*loaders, strict=True)
            seen.append([t for ranks in steps for micro in zip(*ranks, strict=True) for b in micro for t in b.tokens])
    assert all(torch.equal(torch.stack(rows), torch.stack(seen[0])) for rows in seen) and len(seen[0]) == 24


# ---- disks that fail for a while


class Disk:
    """Reads below a folder fail from the `fault`-th on, for so many seconds of a clock that only waiting advances."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.lock = str(folder), threading.Lock()
        monkeypatch.setattr("base.disk.time", SimpleNamespace(sleep=self.sleep, perf_counter=time.perf_counter))
        for module, name in ((builtins, "open"), (os, "stat"), (os, "scandir"), (os, "pread")):
            monkeypatch.setattr(module, name, functools.partial(self.read, getattr(module, name)))
        for name in ("info", "open", "get_file"):
            work = getattr(MemoryFileSystem, name)
            monkeypatch.setattr(MemoryFileSystem, name, lambda *a, work=work, **how: self.touch() or work(*a, **how))

    def break_at(self, fault, seconds):
        self.fault, self.seconds, self.clock, self.count, self.begin = fault, seconds, 0, 0, None
        rows.open_file.cache_clear()

    def sleep(self, seconds):
        with self.lock:
            self.clock += seconds

    def touch(self, name=""):
        with self.lock:
            self.count += 1
            if self.count == self.fault:
                self.begin = self.clock
            if self.begin is not None and self.clock < self.begin + self.seconds:
                raise OSError(errno.ESTALE if self.fault % 2 else errno.EIO, "broken", name)

    def read(self, work, path, *args, **how):
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
        if not name.startswith(self.folder):
            return work(path, *args, **how)
        self.touch(name)
        if work is io.open and how.get("buffering", 1):
            return io.BufferedReader(type("Raw", (io.FileIO,), {"readinto": lambda *args: self.readinto(*args)})(name))
        return work(path, *args, **how)

    def readinto(self, raw, out):
        self.touch(raw.name)
        return io.FileIO.readinto(raw, out)


@pytest.mark.parametrize("kind", ["prepared", "bare", "documents", "stream", "store"])
def test_reads_wait_for_a_disk_that_fails(tmp_path, monkeypatch, kind):
    """For 90 s at least, whichever read it is, from the first look at --data on. Then the error itself is raised."""
    (tmp_path / "disk").mkdir()
    data, shards = write(tmp_path / "disk/text"), tmp_path / "disk/shards"
    prepare_folder(find_files(data, ""), Encoder("bytes"), shards)
    if kind == "bare":
        (shards / "index.json").unlink()
    for path in (tmp_path / "disk/text").iterdir():
        MemoryFileSystem().pipe(f"/{path.name}", path.read_bytes())
    data = {"prepared": shards, "bare": shards, "store": "memory://part.*.json.gz"}.get(kind, data)
    c, begun = config(data, stream="on" if kind == "stream" else "off", lanes=0), 0
    disk = Disk(tmp_path / "disk", monkeypatch)

    def read(fault=0, seconds=0):
        disk.break_at(fault, seconds)
        return run(replace(c, cache=str(tmp_path / f"cache-{fault}-{seconds}")), 3)

    expected = read()
    count = disk.count
    for i, fault in enumerate(range(1, count + 1, max(1, count // 15))):
        assert read(fault, (5, 25, 60)[i % 3]) == expected
        begun += disk.begin is not None  # threads read ahead, and may end earlier
    assert begun > 4
    for fault in (1, count // 2):
        with pytest.raises((OSError, Failure), match="broken"):
            read(fault, 1e9)
        assert disk.clock >= 90


# ---- the hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    write(tmp_path / "files", 3, 40)
    parts = enumerate(sorted((tmp_path / "files").iterdir()))
    content = {f"en/c4-train.{f:05}-of-00003.json.gz": path.read_bytes() for f, path in parts}
    content |= {"en/c4-validation.0.json.gz": gzip.compress(b'{"text": "val"}\n')}
    content |= {"de/train.json.gz": b"", "README.md": b""}
    repos = {"datasets/org/c4": content, "datasets/org/one": {"train.jsonl": b'{"text": "x"}\n'}}
    with serve(tmp_path, monkeypatch, repos) as server:
        yield server


C4 = "hf://datasets/org/c4/en/c4-train.*.json.gz"


def test_the_hub_gives_what_local_files_give(hub, tmp_path, monkeypatch):
    """Also when it cuts and asks to wait, and after a commit that leaves the files alone. The token goes to no other
    host."""
    first = "en/c4-train.00000-of-00003.json.gz"
    expected, _ = run(config(tmp_path / "files" / "part.*.json.gz", lanes=3), 6)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("base.disk.WAITS", (0,) * 5)
    hub.faults[first] = [("cut", 30), ("cut", 30), ("",), ("cut", 30)]
    hub.faults[first] += [("status", 429, {"Retry_After": 0}), ("status", 503)]
    batches, state = run(config(C4, lanes=3), 3)
    assert batches == expected[:3] and not hub.faults[first]
    monkeypatch.setitem(COMMITS, "main", "f" * 40)
    rest, state = run(config(C4, lanes=3), 3, 2, state)
    assert rest == expected[3:]  # the files are the same
    second = first.replace("00000", "00001", 1)
    hub.repos["datasets/org/c4"][second] = hub.repos["datasets/org/c4"][second][:-1] + b"x"  # of the same size
    assert "other data" in refused(run, config(C4, lanes=3), 1, 1, state)
    assert any(token for *_, token in hub.seen) and not [seen for seen in hub.cdn.seen if seen[-1]]


def test_few_files_are_kept_whole(hub, tmp_path):
    expected, sent = run(config(tmp_path / "files" / "part.*.json.gz", lanes=5), 4)[0], []
    for _ in range(2):
        assert run(config(C4, lanes=5), 4)[0] == expected
        sent.append(hub.cdn.sent)
    assert sent[1] - sent[0] < 2000  # only the first file's head


def test_a_run_waits_for_its_hub(hub, tmp_path, monkeypatch):
    """As long as WAITS says; what it was given before is not given again."""
    expected, _ = run(config(tmp_path / "files" / "part.*.json.gz", lanes=3), 6)
    monkeypatch.setattr("base.disk.WAITS", (0, 0))
    monkeypatch.setattr(rows, "LANE_BATCH", 100)
    failures, read = [1, 1], text_module.TextFile._rows

    def failing(self, *args):
        for row in read(self, *args):
            if row.number == 5 and failures:
                failures.pop()
                raise Failure("no answer of a hub")
            yield row

    monkeypatch.setattr(text_module.TextFile, "_rows", failing)
    assert run(config(C4, lanes=3), 6)[0] == expected
    failures[:] = [1] * 20
    with pytest.raises(Failure, match="no answer"):
        run(config(C4, lanes=3), 6)


def test_addresses(hub):
    for path, count in (("one/train.jsonl", 1), ("c4/en/*", 4), ("c4/**", 5), ("c4@v1/en/c4-validation.0.json.gz", 1)):
        found = find_files(f"hf://datasets/org/{path}", "--data")
        assert len(found) == count and all(f"@{COMMITS['v1' if '@v1' in path else 'main']}/" in f.name for f in found)
    for path, message in (
        ("c4", "expected hf://datasets/ORG/NAME"), ("c4/fr", "c4/fr does not exist"),
        ("no/a.txt", "there is no .*org/no"), ("c4@v9/en/*", "revision does not exist"),
    ):  # fmt: skip
        assert re.search(message, refused(find_files, f"hf://datasets/org/{path}", "--data"))


def test_the_hub_is_asked_once_in_a_job(hub, tmp_path, monkeypatch):
    """By --check; then by rank 0, which tells the others."""
    c = config(C4, val_data=C4, eval_every=1, compile="none", dtype="fp32", out=tmp_path / "run", lanes=3)

    def asked():
        files = [path for _, path, *_ in hub.cdn.seen if "/content/" in path]
        listings = [path for _, path, *_ in hub.seen if "/api/" in path]
        hub.seen.clear(), hub.cdn.seen.clear()
        return bool(listings), len(files)

    monkeypatch.setattr(train.plan, "refuse_without_room", lambda *_: None)
    preflight.check(c)
    assert asked() == (True, 2)  # the head of the first file of --data and of --val_data
    reports = []
    tell = lambda work, ranks: reports[0] if reports else reports.append(work()) or reports[0]  # noqa: E731
    monkeypatch.setattr(sys.modules["data"], "on_first_rank", tell)
    for rank in range(3):
        loader, val_loader = open_data(c, Ranks(rank, 3, torch.device("cpu")))
        assert loader.my_group == val_loader.my_group == rank and asked() == (not rank, 2 * (not rank))


# ---- packed conversations


def chat_config(*data, **flags):
    flags = {"vocab_size": 4096, "seq_len": 64, "micro_batch": 4} | flags
    return settled_args([f"--{k}={v}" for k, v in flags.items()] + ["--data", *map(str, data)])


def conversations() -> list[list[dict]]:
    out = []
    for i in range(60):
        pairs = [(f"Question {i}.{k}?", f"Answer {i}.{k}" + " and more" * (i * 5 % 7)) for k in range(i % 3 + 1)]
        out.append([{"role": "system", "content": "Be brief."}] * (i % 3 == 0) + talk(*pairs))
    return out


def talk(*pairs) -> list[dict]:
    return [{"role": r, "content": c} for pair in pairs for r, c in zip(("user", "assistant"), pair, strict=True)]


def write_chats(path, messages):
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages))
    return path


def epoch(loader) -> list[Batch]:
    """The micro-batches of one epoch, or a little more."""
    return list(itertools.chain.from_iterable(itertools.islice(loader, -(-loader.epoch_rows // loader.step_rows))))


def documents(batches) -> list[tuple[list[int], list[int]]]:
    """(tokens, targets) of each document that is trained on, taken apart where positions restart."""
    out = []
    for b in batches:
        for tokens, targets, positions in zip(b.tokens.tolist(), b.targets.tolist(), b.positions.tolist(), strict=True):
            starts = [i for i, p in enumerate(positions) if p == 0]
            for a, z in itertools.pairwise([*starts, len(tokens)]):
                assert positions[a:z] == list(range(z - a))
                if max(targets[a:z]) >= 0:
                    out.append((tokens[a:z], targets[a:z]))
    return out


@pytest.mark.parametrize("prepared", [False, True])
def test_rows_are_what_the_template_renders(tmp_path, prepared):
    """Each conversation once per epoch, whole; the targets are the assistant's words and the token that ends them."""
    spec = _write(tmp_path / "tokenizer", tokenizer__json=_json("llama3"))
    tokenizer = load_tokenizer(spec)
    template = chat_template(tokenizer, "llama")
    path = write_chats(tmp_path / "a.jsonl", conversations())
    if prepared:
        prepare_folder(find_files(str(path), ""), Encoder(spec), path := tmp_path / "out", 2000, 20)
        assert len(list(path.glob("*.bin"))) > 2
    loader = make_loader(chat_config(path, tokenizer=tmp_path / "tokenizer", seq_len=700))
    expected = []
    for messages in (m for i, m in enumerate(conversations(), 1) if i % 20):  # the others are held out
        ids, mask = render_chat(tokenizer, messages, template)
        expected.append((ids[:-1], [i if trained else -100 for i, trained in zip(ids[1:], mask[1:], strict=True)]))
    assert sorted(documents(epoch(loader))[: len(expected)]) == sorted(expected)
    assert "tokens of answers, 0 truncated to --seq_len 700 and 0 dropped" in "".join(loader.summary())


def test_pack_is_first_fit(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 101, 1000)
    room, expected = [], []
    for n in lengths:
        at = next((i for i, free in enumerate(room) if free >= n), len(room))
        room += [100] * (at == len(room))
        room[at] -= n
        expected.append(at)
    assert rows.pack(lengths, 100).tolist() == expected
    monkeypatch.setattr(rows, "OPEN_ROWS", 10)  # of very many, the fullest are closed
    filled = np.bincount(rows.pack(lengths, 100), lengths)
    assert filled.max() <= 100 and filled.min() > 0 and filled.mean() > 88


def test_too_long_conversations(tmp_path, caplog):
    """Cut to what fits, dropped with the flag or where nothing that is trained on would be left; all counted."""
    sizes = (10, 10), (10, 100), (100, 10), (100, 10)  # the last is held out
    path = write_chats(tmp_path / "a.jsonl", [talk(("x" * asked, "y" * answered)) for asked, answered in sizes])
    loader = make_loader(chat_config(path))
    note = "1 truncated to --seq_len 64 and 1 dropped"
    assert f"3 conversations with 129 tokens of answers, {note}; --seq_len" in loader.summary()[1]
    assert "in 2 rows: give a larger --seq_len" in caplog.text
    (short, long) = sorted(documents(epoch(loader))[:2], key=lambda d: len(d[0]))
    assert len(long[0]) == 64 and bytes(t for t in long[1] if 0 <= t < 256).count(b"y") == 65 - 1 - 25 - 1
    loader = make_loader(chat_config(path, long_chats="drop"))
    assert "0 truncated to --seq_len 64 and 2 dropped; " in loader.summary()[1]
    assert documents(epoch(loader))[0] == short
    message = refused(make_loader, chat_config(path), split="val")
    assert re.search("val split .*: 1 conversation .* 1 dropped.*: a larger --seq_len", message)


def test_a_mixture_of_kinds(tmp_path):
    """Text, conversations and a stream, each with its weight; validation has its share of each."""
    chat = write_chats(tmp_path / "chat.jsonl", conversations())
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"text {i} " * 20}) + "\n" for i in range(200)))
    c = chat_config(f"{chat}:1", f"{tmp_path / 'text.jsonl'}:3", seq_len=256, micro_batch=8, eval_batches=1)
    for (batch,) in itertools.islice(make_loader(c), 3):
        assert batch.sources.tolist().count(0) == 2 and batch.positions is not None
        text_rows = batch.sources == 1
        assert torch.equal(batch.positions[text_rows], torch.arange(256).expand(6, 256))
        assert (batch.targets[text_rows] >= 0).all() and (batch.targets[~text_rows] == -100).any()
    assert sum(b.sources.tolist().count(0) for (b,) in make_loader(c, split="val")) == 2
