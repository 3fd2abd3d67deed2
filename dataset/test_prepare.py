"""dataset/prepare.py. The oracle is a naive loop over what the test wrote: BOS and the text's bytes, row by row."""

import contextlib
import csv
import functools
import gzip
import io
import json
import os
import re
import struct
import sys
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import data
from base.errors import Failure, UserError
from base.ranks import ALONE
from data import open_data
from dataset import prepare
from dataset.files import find_info
from dataset.prepare import Encoder, TextRow, find_files, find_shard, verify_shards
from hf.test_tokenizer import _json, _write
from inputs import settled_args
from test_download import serve as download_server

pytestmark = pytest.mark.usefixtures("text_cache", "empty_memory")
BYTES, BOM = Encoder("bytes"), b"\xef\xbb\xbf"
ROWS = [f'row "{i}": naïve,\r\n日本語\n\n' + "word " * (i * 7 % 23) for i in range(300)]


def jsonl(rows, field="text") -> bytes:
    return b"".join(json.dumps({"id": i, field: row}).encode() + b"\n" for i, row in enumerate(rows))


def as_csv(rows) -> bytes:
    """As Excel writes it: with a BOM, and quotes where they are needed."""
    file = io.StringIO(newline="")
    csv.writer(file).writerows([("id", "text"), *enumerate(rows)])
    return file.getvalue().encode("utf-8-sig")


def naive(rows, val_every=20) -> dict[str, list[int]]:
    out = {"train": [], "val": []}
    for i, row in enumerate(rows, 1):
        out["val" if val_every and i % val_every == 0 else "train"] += [256, *row.encode()]
    return out


def tokens(folder, split) -> list[int]:
    shards = [find_shard(str(path), path.stat().st_size)[0] for path in sorted(folder.glob(f"{split}-*.bin"))]
    return [t for shard in shards for t in np.fromfile(shard.path, f"<u{shard.width}", offset=1024).tolist()]


def run(sources, out, shard_tokens=10**9, val_every=20, encoder=BYTES, **how):
    files = [file for source in sources for file in find_files(str(source), "--input")]
    return prepare.prepare_folder(files, encoder._replace(**how), out, shard_tokens, val_every)


open_alone = functools.partial(open_data, ranks=ALONE)  # as the only rank


def refused(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    return str(error.value)


@pytest.mark.parametrize("name, content", [
    ("a.jsonl", jsonl(ROWS)), ("a.json.gz", gzip.compress(jsonl(ROWS, "body"))), ("a.parquet", b""),
    ("a.csv", as_csv(ROWS)), ("a.csv.gz", gzip.compress(as_csv(ROWS))), ("bom.jsonl", BOM + jsonl(ROWS)),
    ("bom.json", BOM + json.dumps([{"text": row} for row in ROWS]).encode()),
    ("a.jsonl.gz", gzip.compress(jsonl(ROWS[:99])) + gzip.compress(jsonl(ROWS[99:]))),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_every_kind_gives_the_same_tokens(tmp_path, monkeypatch, name, content):
    """In one process, and (one kind) in several. Files from Windows begin with a byte order mark."""
    (tmp_path / name).write_bytes(content)
    if name == "a.parquet":
        table = pytest.importorskip("pyarrow").table({"id": range(len(ROWS)), "text": ROWS})
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / name, row_group_size=70)
    monkeypatch.setattr(prepare, "BATCH", 1000)
    monkeypatch.setattr(prepare, "PARALLEL", 0 if name == "a.jsonl" else 10**9)
    encoder = Encoder("bytes", "body" if name == "a.json.gz" else "text")
    index = run([tmp_path / name], tmp_path / "out", 4000, encoder=encoder)
    longest = max(len(row.encode()) for row in ROWS)
    for split, expected in naive(ROWS).items():
        assert tokens(tmp_path / "out", split) == expected
        assert sum(f["tokens"] for n, f in index["files"].items() if n.startswith(split)) == len(expected)
    assert len(index["files"]) > 4 and max(f["tokens"] for f in index["files"].values()) <= 4000 + longest
    assert index["delimiter"] == 256 and index["fingerprint"] == "bytes"
    verify_shards(tmp_path / "out")


GOOD = jsonl(["good"])
ASK, ANSWER = TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def chat(messages: list) -> bytes:
    return json.dumps({"messages": messages}).encode()


@pytest.mark.parametrize("place", ["memory", "hub"])
def test_every_file_system_gives_the_rows_of_local_files(tmp_path, monkeypatch, place):
    """Every format, compressed or not, some after row 7; token shards with their index."""
    folder = tmp_path / "files"
    (folder / "deep").mkdir(parents=True)
    listed, plain = json.dumps([{"text": row} for row in ROWS]).encode(), "\n".join(ROWS).encode()
    kinds = {"a.jsonl": jsonl(ROWS), "a.json": listed, "a.txt": plain, "a.csv": as_csv(ROWS), "deep/b.jsonl": GOOD}
    for name, content in kinds.items():
        (folder / name).write_bytes(content)
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    with contextlib.suppress(ImportError):
        from pyarrow import parquet, table

        parquet.write_table(table({"text": ROWS}), folder / "a.parquet")
    (tmp_path / "talks.jsonl").write_bytes((chat(TALK) + b"\n") * 30)
    run([tmp_path / "talks.jsonl"], folder / "shards", 500)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name, content in files.items():
        MemoryFileSystem().pipe(f"/data/{name}", content)
    address = "memory://data" if place == "memory" else "hf://datasets/org/data"
    with download_server(tmp_path, monkeypatch, {"datasets/org/data": files}):
        there, here = (find_files(f"{base}/a.*", "") + find_files(f"{base}/**/b.*", "") for base in (address, folder))
        assert len(there) == len(here) >= 10
        for remote, local in zip(there, here, strict=True):
            how = (7, 20) if local.name.endswith("z") else (0, 0)
            assert [*remote.rows(*how)] == [*local.rows(*how)], local.name
            assert remote.size == local.size and remote.version and remote.store
        found = []
        for base in (folder, address):
            config = settled_args(f"--seq_len 64 --vocab_size 300 --data {base}/shards/*.bin".split())
            sources = [source for loader in open_alone(config) for source in loader.sources]
            found.append([(type(s), s.read(0, s.tokens).tolist(), s.delimiter) for s in sources])
        assert found[0] == found[1] and len(found[0]) == 2


def test_a_missing_package_a_refusal_and_a_bug_of_ours(monkeypatch):
    """The install line; a store that fails ends with status 1, a missing file with 2, and a bug keeps its traceback."""
    MemoryFileSystem().pipe("/data/a.jsonl", jsonl(ROWS))
    monkeypatch.setattr("base.disk.WAITS", ())
    for package in ("s3fs", "gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, package, None)
    for address, message in (
        ("s3://b/*.jsonl", "s3fs.* -m pip install s3fs"), ("gs://b/a.txt", "-m pip install gcsfs"),
        ("az://b/a.txt", "install adlfs"), ("nfs5://b", "not known: nfs5"), ("memory://data/b", "b does not exist"),
    ):  # fmt: skip
        assert re.search(message, refused(find_files, address, "--data"))
    for error, kind in (
        (TypeError("ours"), TypeError), (ConnectionResetError("reset"), Failure), (zipfile.BadZipFile("odd"), Failure),
        (FileNotFoundError("gone"), UserError),
    ):  # fmt: skip
        monkeypatch.setattr(MemoryFileSystem, "_open", mock.Mock(side_effect=error))
        with pytest.raises(kind, match=str(error)):
            [*find_files("memory://data/a.jsonl", "")[0].rows()]


def test_text_is_tokenised_once(tmp_path, monkeypatch):
    """And again with another number of the code's format, in another --cache, or when it changes."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    encode_rows = mock.Mock(wraps=prepare.encode_rows)
    monkeypatch.setattr(prepare, "encode_rows", encode_rows)
    words = ["--seq_len", "16", "--data", str(tmp_path / "a.jsonl"), "--cache", str(tmp_path / "mine")]
    for count in (1, 2):
        for _ in range(2):
            open_alone(settled_args(words))
            assert encode_rows.call_count == count == len([*(tmp_path / "mine").iterdir()])
        monkeypatch.setattr(prepare, "FORMAT", 0)
    with monkeypatch.context() as patch:
        patch.setattr("filelock.FileLock", mock.Mock(side_effect=PermissionError))
        open_alone(settled_args(words))  # from a cache that others have filled and that is read-only
    before = (tmp_path / "a.jsonl").stat()
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS[::-1]))  # of the same size
    os.utime(tmp_path / "a.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns + 10**6))
    source = open_alone(settled_args(words))[0].sources[0]
    assert source.read(0, source.tokens).tolist() == naive(ROWS[::-1])["train"]


@pytest.mark.parametrize("at", [1, 9, 20])
def test_an_interrupted_call_resumes_after_its_last_shard(tmp_path, monkeypatch, at):
    """Interrupted at a batch, by a kill or by an error. What another call or the user left in the folder stays."""
    sources = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    sources[0].write_bytes(jsonl(ROWS))
    sources[1].write_bytes(jsonl(ROWS[::-1]))
    monkeypatch.setattr(prepare, "BATCH", 2000)
    whole = run(sources, tmp_path / "whole", shard_tokens=4000)
    seen, encode = [], prepare.encode_rows

    def interrupt(encoder, rows):
        seen.append(rows[0].number)
        if len(seen) == at:
            raise UserError("a bad row") if at == 9 else KeyboardInterrupt
        return encode(encoder, rows)

    monkeypatch.setattr(prepare, "encode_rows", interrupt)
    with pytest.raises((KeyboardInterrupt, UserError)):
        run(sources, tmp_path / "out", shard_tokens=4000)
    if at > 1:
        assert "not prepared to its end" in refused(open_alone, settled_args(["--data", str(tmp_path / "out")]))
    seen[:] = range(at)  # from now on there is no interruption
    assert run(sources, tmp_path / "out", shard_tokens=4000) == whole
    verify_shards(tmp_path / "out")
    assert at == 1 or seen[at] > 1  # finished shards are kept
    count = len(seen)
    assert run(sources, tmp_path / "out", shard_tokens=4000) == whole and len(seen) == count
    assert "holds train-00000.bin" in refused(run, sources, tmp_path / "out", shard_tokens=4000, val_every=7)
    (tmp_path / "index.json").write_text("{}")  # the user's
    assert "holds a.jsonl, made of other" in refused(run, sources, tmp_path)
    assert (tmp_path / "index.json").read_text() == "{}"
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*whole["files"], ".lock", "index.json"])


def test_command_line(tmp_path, capsys):
    """prepare, verify and show, and what they print."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    out = tmp_path / "out"
    words = f"prepare --input {tmp_path}/a.jsonl --tokenizer bytes --out {out} --val_every 0 --shard_tokens 20000"
    data.main(words.split())
    assert tokens(out, "train") == naive(ROWS, 0)["train"] and not list(out.glob("val*"))
    assert f"{out}: {len(naive(ROWS, 0)['train'])} tokens in 2 shards\n" in capsys.readouterr().out
    path = out / "train-00000.bin"
    content = path.read_bytes()
    path.write_bytes(content[:2000] + bytes([content[2000] ^ 1]) + content[2001:])
    assert "train-00000.bin has changed since it was prepared" in refused(data.main, ["verify", str(out)])
    data.main(["show", "--data", str(out), "--n", "2", "--seq_len", "40"])
    output = capsys.readouterr().out
    assert output.count("--- row") == 2 and "[[" in output
    path.write_bytes(content[:500])
    assert "500 bytes without llm.c's header" in refused(data.main, ["verify", str(path)])
    path.unlink()
    for verb in (["verify"], ["show", "--data"]):
        assert "lacks train-00000.bin, which its index.json lists" in refused(data.main, [*verb, str(out)])
    assert find_files(f"{out}/*", "--data")  # a pattern may name some of the shards
    (out / "index.json").unlink()
    (out / "progress.jsonl").touch()  # of version 0.3
    assert "is not prepared to its end" in refused(data.main, ["show", "--data", str(out)])


def header(tokens: int, version=1) -> bytes:
    return struct.pack("<3i", 20240520, version, tokens).ljust(1024, b"\0")


BAD = {
    "no bytes": ("a.json.gz", b"", "no rows are left"),
    "gzip cut": ("a.json.gz", gzip.compress(jsonl(ROWS))[:-200], r"gz: .*cut short, .* after row \d+"),
    "no gzip": ("a.json.gz", GOOD, "damaged, .*: Not a gzipped file"),
    "json": ("a.jsonl", GOOD + b"{'text': 1}\n", r"line 2: not JSON.*--skip_bad"),
    "array": ("a.json", b'[{"text": "x"}, 5]\n', "row 2: no text in field 'text'"),
    "open array": ("a.json", b'[{"text": "x"},\n', "damaged, .*not json in UTF-8 after row 0: "),
    "surrogate": ("a.jsonl", GOOD + b'{"text": "half a pair: \\ud83c"}', "line 2.*surrogate"),
    "field": ("a.jsonl", GOOD + jsonl(["x"], "body"), "line 2: no text .*id .int., body .str.*--text_field"),
    "Latin-1": ("a.txt", "naïve".encode("latin-1"), "not txt in UTF-8 after row 0: .*position 2"),
    "blank": ("a.jsonl", b"\n \n", "no rows are left"),
    "no assistant": ("a.jsonl", chat(TALK[:1]), "line 1: .*without an assistant"),
    "question": ("a.jsonl", b'{"question": "Why?", "answer": "So."}', "question .str., .* messages, .*--chat_fields"),
    "both kinds": ("a.jsonl", GOOD + chat(TALK), "line 2: documents and conv"),
    "CSV names": ("a.csv", b"text,text\na,b\n", "line 2 has not .* each of another name"),
    "CSV row": ("a.csv", b"text,n\na,1\n\na, b,1\n", "line 4 has not .* quotes"),
    "CSV quote": ("a.csv", b'text\n"a', "not csv in .*: unexpected end"),
    "version": ("a.bin", header(50, 7) + bytes(100), "a.bin is damaged: 100 bytes do not fit its header"),
    "shard cut": ("a.bin", header(50) + bytes(98), "98 bytes do not fit"),
    "no header": ("a.bin", bytes(500), "500 bytes without llm.c's header.*--data_dtype"),
    "odd": ("a.bin", bytes(99), "99 bytes.*uint16$"),
    "empty": ("a.bin", b"", ": 0 bytes.*uint16$"),
    "parquet": ("a.parquet", b"PAR1", "not parquet|needs pyarrow: .* -m pip install pyarrow"),
}  # fmt: skip


@pytest.mark.parametrize("name, content, pattern", BAD.values(), ids=BAD)
def test_bad_input_is_named(tmp_path, name, content, pattern):
    (tmp_path / name).write_bytes(content)
    flags = ["--data_dtype", "uint16"] * pattern.endswith("uint16$")
    message = refused(open_alone, settled_args(["--data", str(tmp_path / name), *flags]))
    assert str(tmp_path / name) in message and re.search(pattern, message, re.DOTALL)


def test_an_entry_without_data_is_refused(tmp_path):
    """Files in deeper folders need FOLDER/**."""
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/a.jsonl").write_bytes(GOOD)
    (tmp_path / "a.dat").touch()
    for spec in ("deep", "deep/*", "b.txt"):
        assert f"{spec} does not exist, or has no file" in refused(find_files, f"{tmp_path}/{spec}", "--data")
    assert "a.dat is of unknown kind (.dat): expected .txt, " in refused(find_files, f"{tmp_path}/a.dat", "--data")
    assert "does not exist" in refused(find_files, "", "--data")  # as in --data "$UNSET"
    assert [file.size for file in find_files(f"{tmp_path}/deep/**", "--data")] == [len(GOOD)]


def test_skip_bad_leaves_out_so_many(tmp_path, caplog):
    """Every later run names them, from the index of the cache or of a prepared folder."""
    lines = jsonl(ROWS[:12]).splitlines(keepends=True)
    lines[3], lines[7], lines[9] = b"{\n", b'{"txt": "x"}\n', b'{"txt": "y"}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(lines))
    assert "line 10" in refused(run, [path], tmp_path / "one", val_every=0, skip_bad=2)
    run([path], tmp_path / "out", val_every=0, skip_bad=3)
    kept = [row for i, row in enumerate(ROWS[:12]) if i not in (3, 7, 9)]
    assert tokens(tmp_path / "out", "train") == naive(kept, 0)["train"]
    assert "line 4" in caplog.text and "line 8" in caplog.text
    again = f"prepare --data {path} --tokenizer bytes --val_every 0 --skip_bad 3 --out {tmp_path}/again"
    for words in (f"{path} --skip_bad 3", f"{path} --skip_bad 3", f"{tmp_path}/out", again):
        caplog.clear()
        prepare.warn_once.cache_clear()  # as in another process
        if words == again:
            data.main(again.split())
        else:
            open_alone(settled_args(f"--seq_len 8 --data {words}".split()))
        assert f"{path}: bad rows left out, not JSON in UTF-8: 1 row, first in line 4: " in caplog.text
        assert f"{path}: bad rows left out, no text in field 'text' : 2 rows, first in line 8: " in caplog.text


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456789\n"


@pytest.mark.parametrize("content, message", [
    (LFS, "git-LFS pointer.*git lfs pull"), (b"\n<!DOCTYPE html><p>Sign in", "HTML or XML page"),
    (BOM + b"<?xml version='1.0'?><Error>", "HTML or XML page"), (b"404: Not Found", "server's message"),
])  # fmt: skip
@pytest.mark.parametrize("suffix", prepare.SUFFIXES + (prepare.SHARD,))
def test_what_was_stored_instead_of_a_file_is_named(tmp_path, suffix, content, message):
    """Also compressed, under the name of a compressed file, at an address, and beside an index."""
    names = {f"a{suffix}": content, f"b{suffix}.gz": content, f"c{suffix}.gz": gzip.compress(content)}
    for name, stored in names.items():
        (tmp_path / name).write_bytes(stored)
        MemoryFileSystem().pipe(f"/stored/{name}", stored)
        for base in (tmp_path, "memory://stored") if suffix != prepare.SHARD or name[0] == "a" else ():
            arguments = settled_args(f"--seq_len 8 --eval_every 0 --data {base}/{name}".split())
            assert re.search(f"{name}: a.*{message}", refused(open_alone, arguments)), (base, name)
    if suffix == prepare.SHARD:
        entry = {"tokens": 50, "sha256": ""}
        assert re.search(message, refused(find_shard, str(tmp_path / "a.bin"), len(content), recorded=entry))


def test_a_path_that_exists_is_no_pattern(tmp_path):
    (tmp_path / "d*[1]").mkdir()
    (tmp_path / "d11").mkdir()
    for name in ("a*1.txt", "ab1.txt", "b*[2].txt", "c?.txt", "cd.txt", "d*[1]/e*.txt", "d*[1]/ef.txt", "d11/g.txt"):
        (tmp_path / name).write_text(name)
        MemoryFileSystem().pipe(f"/{name}", name.encode())
    for spec, found in (
        ("a*1.txt", "a*1.txt"), ("b*[2].txt", "b*[2].txt"), ("c?.txt", "c?.txt"), ("d*[1]/e*.txt", "d*[1]/e*.txt"),
        ("[ab]*.txt", "a*1.txt ab1.txt b*[2].txt"), ("d*[1]", "d*[1]/e*.txt d*[1]/ef.txt"),
    ):  # fmt: skip
        names = [str(Path(file.name).relative_to(tmp_path)) for file in find_files(f"{tmp_path}/{spec}", "")]
        assert names == found.split()
    assert [file.name for file in find_files("memory://a*1.txt", "")] == ["memory:///a*1.txt"]


def test_data_of_several_tokenizers_are_refused(tmp_path, text_cache, monkeypatch):
    """Folders that say what made them, text, which is tokenised now, and --tokenizer."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    index = run([tmp_path / "a.jsonl"], tmp_path / "a")
    run([tmp_path / "a.jsonl"], tmp_path / "b")
    (tmp_path / "b/index.json").write_text(json.dumps(index | {"fingerprint": "0123", "tokenizer": "other"}))
    _write(tmp_path / "llama3", tokenizer__json=_json("llama3"))
    monkeypatch.chdir(tmp_path)
    open_alone(settled_args(["--seq_len", "16", "--data", "a", "a.jsonl"]))
    for words in ("a b", "b --val_data a", "b:1 a.jsonl:2", "b --tokenizer llama3 --vocab_size 4096"):
        message = refused(open_alone, settled_args(f"--seq_len 16 --data {words}".split()))
        assert "tokenised by several tokenizers: " in message and "b with --tokenizer other" in message


@pytest.mark.parametrize("count, whole", [(45, True), (19, False), (1, False)])
def test_documents_are_held_out_whole_where_there_are_enough(tmp_path, monkeypatch, count, whole):
    """Also in pieces."""
    monkeypatch.setattr("dataset.files.TXT_PIECE", 40)
    texts = [f"text {i}\n".encode() * 20 for i in range(count)]
    for i, content in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_bytes(content)
    sources = [tmp_path / "[0-9]*"]
    run(sources, tmp_path / "out")
    last = [len(content) * 19 // 20 for content in texts]  # a line begins there
    expected = {"train": [], "val": []}
    for i, content in enumerate(texts):
        is_val = whole and (i + 1) % 20 == 0
        expected["val" if is_val else "train"] += [256, *content[: None if whole else last[i]]]
        expected["val"] += [] if whole else [256, *content[last[i] :]]
    assert all(tokens(tmp_path / "out", split) == expected[split] for split in expected)
    (tmp_path / "few.jsonl").write_bytes((chat(TALK) + b"\n") * 3)  # the same for conversations
    run([tmp_path / "few.jsonl"], tmp_path / "few")
    assert len(tokens(tmp_path / "few", "train")) == 2 * len(tokens(tmp_path / "few", "val")) > 0


def test_a_web_server_that_does_not_answer_lacks_no_file():
    """fsspec raises FileNotFoundError for both."""
    error, no_answer = FileNotFoundError(), OSError("no answer")
    error.__cause__, store = no_answer, mock.Mock(info=mock.Mock(side_effect=error))
    no_answer.status = 404
    assert find_info(store, "https://x/a.txt") is None
    no_answer.status = 503
    with pytest.raises(OSError, match="no answer"):
        find_info(store, "https://x/a.txt")


def test_unknown_kinds_beside_data_are_no_data(tmp_path, caplog):
    for name in (".git", "a.txt", "b.csv", "README.md", "c", "d.py"):
        (tmp_path / name).touch()
    assert sorted(Path(file.name).name for file in find_files(f"{tmp_path}/", "")) == ["a.txt", "b.csv"]
    (tmp_path / "s.bin").touch()
    (tmp_path / "index.json").write_text("{}")
    assert [Path(file.name).name for file in find_files(str(tmp_path), "")] == ["s.bin"]
    assert f"{tmp_path}/: 3 files of unknown kind left out (.md, .py, no suffix)" in caplog.text
    assert f"{tmp_path}: 5 files beside token shards left out (.csv, .md, .py, .txt, no suffix)" in caplog.text


# ---- conversations; hf/test_chat.py has the forms of rows


@pytest.mark.parametrize("field, name, kind", [
    ("body", "body", "text"), ("text", "text", "text"), ("", "text", "chat"), ("text", "body", "chat"),
])  # fmt: skip
def test_a_text_field_that_was_named_counts_first(field, name, kind):
    words = ["--text_field", field] if field else []
    tokens, found, _ = Encoder.of(settled_args(words))(TextRow({name: "x", "prompt": "Why?", "completion": "So."}))
    assert found == kind and (tokens == [256, *b"x"]) == (kind == "text")


@pytest.mark.parametrize("stream", ["off", "on"])
def test_each_entry_has_its_text_field(tmp_path, stream):
    """By its path or its last part. Fields are part of the key of cached text, as they are used."""
    (tmp_path / "talks").mkdir()
    for name, field in (("a.jsonl", "body"), ("talks/b.jsonl", "content"), ("c.jsonl", "note"), ("v.jsonl", "text")):
        (tmp_path / name).write_bytes(jsonl([f"only {field} "] * 40, field))
    words = "--data {0}/a.jsonl {0}/talks {0}/c.jsonl --val_data {0}/v.jsonl --text_field note talks=content"
    words += " a.jsonl=body {0}/v.jsonl=text --seq_len 40 --micro_batch 30 --stream {1}"
    words += " --lanes 3" * (stream == "on")
    loader = data.make_loader(settled_args(words.format(tmp_path, stream).split()))
    seen = bytes(t for t in next(iter(loader))[0].tokens.flatten().tolist() if t < 256)
    assert all(field in seen for field in (b"only body", b"only content", b"only note")) and b"only text" not in seen
    for wrong in ("b.jsonl=body", "a.jsonl=", "x y", "a.jsonl=x a.jsonl=y"):
        assert "--text_field" in refused(settled_args, f"--data {tmp_path}/a.jsonl --text_field {wrong}".split())
    (tmp_path / "two.jsonl").write_text('{"first": "first ", "other": "other "}\n' * 40)
    for field in ("first", "other"):  # cached text has its field in its key
        loader = data.make_loader(settled_args(f"--data {tmp_path}/two.jsonl --seq_len 6 --text_field {field}".split()))
        assert field in bytes(loader.sources[0].read(1, 7).astype("u1")).decode()
