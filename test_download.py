"""download.py against a hub on 127.0.0.1 that corrupts and refuses, with its large files on a second origin.
Oracles: the bytes that the hub holds, and huggingface_hub's view of the cache."""

import contextlib
import hashlib
import json
import re
import shlex
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import quote, unquote, urlsplit

import pytest
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

import download
from base import errors
from base.errors import UserError
from base.hub import local_path
from dataset.prepare import find_files

TOKEN = "hf_SecretSecretSecretSecret"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
BIG = bytes(range(256)) * 8000  # 2 MB, no two neighbouring bytes alike
MODEL = {
    "config.json": json.dumps({"model_type": "llama", "hidden_size": 64}).encode(),
    "model-00001-of-00002.safetensors": BIG,
    "model-00002-of-00002.safetensors": b"second" * 1000,
    "model.safetensors.index.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "a name & more.json": b"{}",
}
NEVER = """original/consolidated.00.pth original/params.json pytorch_model.bin model.onnx README.md onnx/config.json
consolidated.safetensors model.fp16.safetensors .gitattributes model.gguf train.py"""
DATA = {"README.md": b"words", "en/c4-train.0.json.gz": BIG[:5000], "en/c4-val.json.gz": b"v", "de/x.json.gz": b"d"}
UNWANTED = {name: b"x" + name.encode() for name in NEVER.split()}
SOLO = {"config.json": b"{}"}
REPOS = {
    "models/org/model": MODEL | UNWANTED,
    "models/solo": SOLO,
    "models/odd": {"x.pt": b""},
    "datasets/org/data": DATA,
}


def is_large(path):
    return path.endswith((".safetensors", ".gz", ".bin", ".pth"))


def hash_of(path, content):
    digest = hashlib.sha256(content) if is_large(path) else hashlib.sha1(b"blob %d\0" % len(content) + content)
    return digest.hexdigest()


def describe(path, content):
    """A file's entry in a listing."""
    oid, size = hash_of(path, content), len(content)
    lfs = {"lfs": {"oid": oid, "sha256": oid, "size": size, "pointerSize": 134}} if is_large(path) else {}
    return {"type": "file", "path": path, "rfilename": path, "size": size, "oid": oid, "blobId": oid} | lfs


class FakeHub(ThreadingHTTPServer):
    """`faults[path]` befall the next requests for a file's content: cut or flip at N bytes, a wait of N seconds, or a
    status with headers. `refuse(path)` may answer any request in the hub's place."""

    daemon_threads = True

    def __init__(self, cdn=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.cdn = f"http://{'127.0.0.1' if cdn else 'localhost'}:{self.server_port}", cdn
        self.repos, self.faults, self.refuse, self.seen, self.sent = {}, {}, lambda path: None, [], 0
        self.odd = {}  # fields of a file in a listing of a folder
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_):
        pass  # clients that go away


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content_Length": len(body)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.seen.append((self.command, self.path, self.headers.get("Authorization")))
        if refusal := hub.refuse(path):
            if isinstance(refusal, Exception):
                raise refusal
            return self.reply(*refusal[:2], **(refusal[2] if len(refusal) > 2 else {}))
        if path.startswith("/content/"):
            return self.content(path.removeprefix("/content/"))
        parts = re.fullmatch(r"/(?:api/)?(models/|datasets/)?(.+?)/(revision|tree|resolve)/([^/]+)/?(.*)", path)
        kind, name, asked, revision, file = parts.groups() if parts else (None, path, "", "", "")
        repo, sha = (kind or "models/") + name, COMMITS.get(revision, revision)
        if repo not in hub.repos:
            return self.reply(401 if not self.headers.get("Authorization") else 404, X_Error_Code="RepoNotFound")
        if asked != "revision":
            return self.tree(repo, file) if asked == "tree" else self.resolve(repo, revision, file)
        if len(sha) != 40:
            return self.reply(404, X_Error_Code="RevisionNotFound")
        siblings = [describe(*file) for file in hub.repos[repo].items()]
        self.listing({"id": name, "sha": sha, "siblings": siblings})

    do_HEAD = do_GET

    def listing(self, value, **headers):
        self.reply(200, json.dumps(value).encode(), **headers)

    def tree(self, repo, folder):
        """Two pages; the address of the second names another origin, as a mirror's may."""
        prefix, is_deep, entries = f"{folder}/" * bool(folder), "recursive=true" in self.path, {}
        original = {"type": "directory", "path": "original", "oid": "c" * 40, "size": 0}
        for path, content in self.server.repos[repo].items():
            if path.startswith(prefix):
                below, slash, _ = path[len(prefix) :].partition("/")
                is_file = is_deep or not slash
                name = path if is_file else prefix + below
                entries[name] = describe(path, content) | self.server.odd if is_file else original | {"path": name}
        entries = [*entries.values()]
        if "cursor" in self.path or len(entries) < 4:
            return self.listing(entries[3:] if "cursor" in self.path else entries)
        link = f'<{self.server.cdn.url}{self.path}&cursor=2>; rel="next"'
        self.listing([*entries[:3], original], Link=link)

    def resolve(self, repo, commit, path):
        content = self.server.repos[repo][path]
        about = {"X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        name = f"{repo}//{path}"
        if is_large(path):
            about |= {"X_Linked_Size": len(content), "X_Linked_Etag": f'"{hash_of(path, content)}"'}
            return self.reply(302, Location=f"{self.server.cdn.url}/content/{quote(name)}?sig=SIGNED", **about)
        if self.command == "HEAD":
            return self.reply(200, content, ETag=f'"{hash_of(path, content)}"', **about)
        self.reply(307, Location=f"/content/{quote(name)}", **about)

    def content(self, name):
        hub, (repo, path) = self.server, name.split("//")
        content, faults = hub.repos[repo][path], hub.faults.get(path, [])
        kind, number, headers = (*(faults.pop(0) if faults else ("",)), 0, {})[:3]
        if kind == "status":
            return self.reply(number, **headers)
        if kind == "wait":
            time.sleep(number)
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "bytes=0-").groups()
        start, end = int(first), min(len(content), int(last or len(content)) + 1)
        if kind == "flip":
            content = content[:number] + bytes([content[number] ^ 1]) + content[number + 1 :]
        about = {"Content_Range": f"bytes {start}-{end - 1}/{len(content)}"} if start else {}
        sent = content[start:end][: number if kind == "cut" else None]
        hub.sent += len(sent)
        self.reply(206 if start else 200, sent, **about | {"Content_Length": end - start})
        self.close_connection = kind == "cut"


@contextlib.contextmanager
def serve(tmp_path, monkeypatch, repos):
    """A hub and the second origin of its large files, for this process and its children. A machine may stall for longer
    than the library waits for an answer, and nothing sleeps between retries."""
    cdn = FakeHub()
    server = FakeHub(cdn)
    server.repos = cdn.repos = repos
    cdn.faults = server.faults
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 300)
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr("base.disk.WAITS", (0, 0))
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None)  # slow, and there is no https
    for name in ("HF_TOKEN", "HTTP_PROXY", "http_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    yield server
    for s in (server, cdn):
        s.shutdown()
        s.server_close()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serve(tmp_path, monkeypatch, {name: dict(files) for name, files in REPOS.items()}) as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def main(*argv) -> int:
    return errors.exit_status(download.main, [*map(str, argv)])


def content(folder: Path) -> dict:
    paths = [p for p in folder.rglob("*") if p.is_file() and ".cache" not in p.relative_to(folder).parts]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


SHARD, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


# ---- what arrives


@pytest.mark.parametrize(("name", "files"), [
    ("org/model", MODEL), ("solo", SOLO), ("datasets/org/data", dict([*DATA.items()][1:])),
])  # fmt: skip
def test_the_cache_is_found_by_every_name_of_the_revision(hub, name, files):
    assert main(name) == 0
    folder = local_path(name, "--weights")
    assert content(folder) == files
    assert [local_path(f"{name}@{revision}", "--weights") for revision in ("main", "a" * 40)] == [folder] * 2
    if name == "org/model":  # as transformers looks for it
        assert try_to_load_from_cache(name, "config.json") == str(folder / "config.json")


def test_a_model_can_be_left_out(hub, tmp_path):
    assert main("org/model", "--out", tmp_path / "out", "--skip-model") == 0
    assert content(tmp_path / "out").keys() == {"config.json", "tokenizer.json", "a name & more.json"}


def test_out_belongs_to_one_revision_of_one_repository(hub, tmp_path, capfd):
    out, mine = tmp_path / "a folder", tmp_path / "mine"
    assert main("org/model", "--out", out, "--revision", "v1") == 0
    assert local_path(str(out), "--weights") == out and "b" * 40 in capfd.readouterr().out
    mine.mkdir()
    (mine / "config.json").write_text("mine")
    for name, folder in (("solo", out), ("org/model", out), ("org/model", mine)):
        assert main(name, "--out", folder) == 2
        assert "is not empty and holds no download of" in capfd.readouterr().err
    (out / "config.json").unlink()
    assert main("org/model", "--out", out, "--revision", "v1") == 0 and content(out) == MODEL
    assert content(mine) == {"config.json": b"mine"}


# ---- the token


def test_the_token_goes_to_the_hub_alone_and_is_kept_nowhere(hub, tmp_path, capfd, caplog):
    """The listing names another origin for its second page, and large files are on another origin."""
    assert main("org/model") == 0
    assert {auth for _, path, auth in hub.seen if "org/model" in path} == {f"Bearer {TOKEN}"}
    assert {auth for *_, auth in hub.cdn.seen} == {None} and len(hub.cdn.seen) >= 3
    for status in (403, 401, 503):
        hub.refuse = lambda path, status=status: (status, b"", {"X_Error_Message": f"what a token: {TOKEN}"})
        assert main("org/model") == 1 + (status < 500)
    assert main("org/model", "--token", TOKEN) == 2
    output = "".join([*capfd.readouterr(), caplog.text]).encode()
    kept = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()]
    assert len(kept) > 5 and not any(TOKEN.encode() in text for text in [output, *kept])
    assert b"trying again" in output and b"hf_***" in output


# ---- wrong bytes


def test_a_damaged_file_is_downloaded_once_more_and_never_used(hub, capfd):
    hub.faults[SHARD] = [("flip", 7)] * 2
    assert main("org/model") == 1 and not hub.faults[SHARD]
    assert capfd.readouterr().err.count("error: ") == 1
    with pytest.raises(UserError, match="continue the download with: python download.py org/model$"):
        local_path("org/model", "--weights")
    assert main("org/model") == 0
    folder, sent, size = local_path("org/model", "--weights"), hub.cdn.sent, len(MODEL[SECOND])
    assert content(folder) == MODEL
    (folder / SECOND).resolve().write_bytes(b"x" * size)  # later
    assert main("org/model") == 0 and content(folder) == MODEL
    assert hub.cdn.sent - sent == size  # the other files not again


@pytest.mark.parametrize("out", [[], ["--out", "o*[1] a:b@c"]], ids=["cache", "out"])
def test_a_download_that_was_not_verified_is_refused(hub, monkeypatch, tmp_path, out):
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(download, "find_damaged", side_effect=KeyboardInterrupt):
        assert main("org/model", *out) == 130
    spec = out[1] if out else "org/model"
    command = f"python download.py {shlex.join(['org/model', *out])}"
    with pytest.raises(UserError, match=f"continue the download with: {re.escape(command)}$"):
        local_path(spec, "--weights")
    assert main("org/model", *out, "--verify") == 2
    assert main("org/model", *out) == 0 and content(local_path(spec, "--weights")) == MODEL
    assert main("org/model", *out, "--verify") == 0


@pytest.mark.parametrize(("damaged", "at_use"), [(None, True), (BIG[1:], True), (BIG[1:] + b"x", False), (BIG, False)])
def test_a_cache_that_the_library_filled(hub, damaged, at_use):
    """Missing files and wrong sizes are found at use, other damage by --verify, which deletes nothing."""
    folder = Path(snapshot_download("org/model", cache_dir=constants.HF_HUB_CACHE, revision="v1"))
    blob, command = (folder / SHARD).resolve(), f"python download.py org/model --revision {'b' * 40}"
    blob.write_bytes(damaged) if damaged else blob.unlink()
    with pytest.raises(UserError, match=f"{command}$") if at_use else contextlib.nullcontext():
        assert local_path("org/model@v1", "--weights") == folder
    assert main(*f"{command} --verify".split()[2:]) == (damaged != BIG)
    assert blob.exists() == bool(damaged)


def test_two_downloads_at_the_same_time_transfer_each_byte_once(hub, tmp_path):
    hub.faults[SHARD] = [("wait", 2)] * 2  # meanwhile both have asked for the listing
    words = [sys.executable, download.__file__, "org/model", "--out", "out"]
    commands = [subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [command.wait() for command in commands] == [0, 0]
    assert content(tmp_path / "out") == MODEL
    assert hub.cdn.sent == sum(len(MODEL[name]) for name in (SHARD, SECOND))


# ---- what leads out of the folder


BAD = "../victim.json", "/victim.json", "a/../../v.json", "a//b.json", "./a.json", "..", "", "..\\v", "C:v", "a\0b"


@pytest.mark.parametrize(("commit", "name"), [*(("a" * 40, name) for name in BAD), ("../" * 13 + "x", "fine.json")])
def test_nothing_is_downloaded_of_a_listing_that_leaves_the_folder(hub, tmp_path, monkeypatch, capfd, commit, name):
    monkeypatch.setitem(COMMITS, "main", commit)
    hub.repos["models/org/model"][name] = b"x"
    assert main("org/model", "--out", tmp_path / "out") == 2
    assert "leads out of a folder" in capfd.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "home").exists()


@pytest.mark.parametrize("out", [True, False])
def test_a_damaged_file_that_a_link_leads_to_is_not_deleted(hub, tmp_path, out):
    args = ["--out", tmp_path / "out"] if out else []
    assert main("org/model", *args) == 0
    folder, victim = tmp_path / "out" if out else local_path("org/model", "--weights"), tmp_path / "victim"
    victim.write_bytes(b"x" * len(BIG))
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(victim)
    assert main("org/model", *args) == (not out) and victim.read_bytes() == b"x" * len(BIG)


# ---- a hub that fails


@pytest.mark.parametrize("answer", [(429, b"", {"Retry_After": 1}), (503, b""), ConnectionResetError()])
def test_a_listing_that_fails_once_is_asked_for_again(hub, answer):
    failed = set()
    hub.refuse = lambda path: answer if "/api/" in path and path not in failed and not failed.add(path) else None
    assert main("org/model") == 0 and content(local_path("org/model", "--weights")) == MODEL
    assert [file.size for file in find_files("hf://datasets/org/data/en/*val*", "--data")] == [1]
    assert len(failed) >= 4


@pytest.mark.parametrize("size", ["x", float("inf"), None, ["a"]])
def test_a_size_of_data_that_is_no_number_is_refused(hub, size):
    hub.odd = {"size": size}
    with pytest.raises(UserError, match="no number of bytes") if size else contextlib.nullcontext():
        find_files("hf://datasets/org/data/en/*val*", "--data")


# ---- refusals


def refuse_files(*answer):
    return lambda path: answer if "/resolve/" in path else None


@pytest.mark.parametrize(("refuse", "args", "status", "words"), [
    (refuse_files(403, b"", {"X_Error_Code": "GatedRepo"}), [], 2, "gated: accept its licence at http.*org/model"),
    (lambda p: (401, b"", {"X_Error_Message": "Invalid credentials in Authorization header"}), [], 2, "HF_TOKEN"),
    (lambda p: (403, b""), [], 2, "answers 403"),
    (None, ["org/other"], 2, "no http.*/org/other, or it is private"),
    (None, ["org/model", "--revision", "v9"], 2, "the revision does not exist"),
    (None, ["../model"], 2, "not the name"),
    (None, ["odd"], 2, "none of its files"),
    (refuse_files(404), [], 2, "answers 404 for a file that .*org/model lists: leave it out"),
    (None, ["org/model", "--verify"], 2, "snapshots.* does not hold a complete download: name your commit"),
    (lambda p: (200, b"<html>Log in to the airport"), [], 1, "HF_ENDPOINT"),
    (lambda p: (302, b"", {"Location": "http://127.0.0.1:9/"}), [], 1, "refused"),
])  # fmt: skip
def test_one_message_and_a_status(hub, capfd, refuse, args, status, words):
    hub.refuse = refuse or hub.refuse
    assert main(*args or ["org/model"]) == status
    output = capfd.readouterr().err
    assert re.search(words, output) and output.count("error: ") == 1 and "Traceback" not in output, output
    with pytest.raises(UserError, match="no download of it|continue"):
        local_path("org/model", "--weights")
    with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
        assert main("org/model") == 2 and "HF_HUB_OFFLINE" in capfd.readouterr().err


@pytest.mark.parametrize(("spec", "words"), [
    ("org/none", "--w org/none: .* of this name, and no download of it in .*hub: python download.py org/none$"),
    ("gpt2@v1", "python download.py gpt2 --revision v1$"), ("./x.bin", "no folder or file"),
])  # fmt: skip
def test_a_name_without_a_download(hub, spec, words):
    with pytest.raises(UserError, match=words):
        local_path(spec, "--w")
