"""download.py against a hub of our own on 127.0.0.1 that cuts, stalls, corrupts and refuses, with its large files on a
second origin. The oracle for the layout is the real huggingface_hub client, which fetches from the same server."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
from huggingface_hub import constants, file_download, scan_cache_dir, snapshot_download
from transformers import AutoConfig

import download
from download import UserError, find
from lib import errors

ROOT = Path(__file__).parent
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
NEVER = {
    name: b"x" + name.encode()
    for name in ("original/consolidated.00.pth", "original/params.json", "pytorch_model.bin", "model.onnx", "README.md",
                 "consolidated.safetensors", ".gitattributes", "onnx/config.json", "model.gguf", "train.py")
}  # fmt: skip
DATA = {"README.md": b"words", "en/c4-train.0.json.gz": BIG[:5000], "en/c4-val.json.gz": b"v", "de/x.json.gz": b"d"}
REPOS = {"models/org/model": MODEL | NEVER, "models/solo": {"config.json": b"{}"}, "datasets/org/data": DATA,
         "models/org/empty": {},
         "models/org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"}}  # fmt: skip


def is_large(path):
    return path.endswith((".safetensors", ".gz", ".bin", ".pth"))


def hash_of(path, content):
    digest = hashlib.sha256(content) if is_large(path) else hashlib.sha1(b"blob %d\0" % len(content) + content)
    return digest.hexdigest()


class FakeHub(ThreadingHTTPServer):
    """`faults[path]` befall the next requests for a file's content: cut, stall, flip or short at N bytes, plain (no
    ranges), or a status with headers. `refuse(path)` may answer any request in the hub's place."""

    daemon_threads = True

    def __init__(self, cdn=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.cdn = f"http://127.0.0.1:{self.server_port}", cdn
        self.repos = {}
        self.faults, self.refuse, self.seen, self.sent, self.slow = {}, lambda path: None, [], 0, 0
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

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.seen.append((self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if refusal := hub.refuse(path):
            return self.reply(*refusal[:2], **(refusal[2] if len(refusal) > 2 else {}))
        if path.startswith("/cdn/"):  # /cdn/HOPS/NAME: some redirects more, then the content
            _, _, hops, name = path.split("/", 3)
            if int(hops):
                return self.reply(302, Location=f"{hub.url}/cdn/{int(hops) - 1}/{quote(name)}")
            return self.content(name)
        if path.startswith("/cache/"):
            return self.content(path[7:])
        for repo, files in hub.repos.items():
            kind, name = repo.split("/", 1)
            if path.startswith(f"/api/{repo}/revision/"):
                sha = COMMITS.get(path.split("/revision/")[1], path.split("/revision/")[1])
                if len(sha) != 40:
                    return self.reply(404, X_Error_Code="RevisionNotFound")
                names = [{"rfilename": path} for path in files]
                return self.reply(200, json.dumps({"id": name, "sha": sha, "siblings": names}).encode())
            if path.startswith(f"/api/{repo}/tree/"):
                folder = "".join(path.split("/tree/")[1].split("/", 1)[1:])
                if folder and not any(file.startswith(f"{folder}/") for file in files):
                    return self.reply(404, X_Error_Code="EntryNotFound")
                return self.tree(files)
            prefix = f"/{'datasets/' * (kind == 'datasets')}{name}/resolve/"
            if path.startswith(prefix):
                return self.resolve(repo, *path[len(prefix) :].split("/", 1))
        self.reply(401 if not self.headers.get("Authorization") else 404, X_Error_Code="RepoNotFound")

    def tree(self, files):
        """Two pages; the address of the second names another origin, as a mirror's may."""
        entries = []
        for path, content in files.items():
            entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            if is_large(path):
                entry["lfs"] = {"oid": hash_of(path, content), "size": len(content), "pointerSize": 134}
            else:
                entry["oid"] = hash_of(path, content)
            entries.append(entry)
        if "cursor" in self.path or len(entries) < 4:
            return self.reply(200, json.dumps(entries[3:] if "cursor" in self.path else entries).encode())
        other = self.server.url if "huggingface" in self.headers["User-Agent"] else self.server.cdn.url
        page = [*entries[:3], {"type": "directory", "path": "original", "oid": "c" * 40, "size": 0}]
        link = f'<{other}{urlsplit(self.path).path}?cursor=2>; rel="next"'
        self.reply(200, json.dumps(page).encode(), Link=link)

    def resolve(self, repo, commit, path):
        content = self.server.repos[repo][path]
        about = {"X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        name = f"{repo}//{path}"
        if is_large(path):
            about |= {"X_Linked_Size": len(content), "X_Linked_Etag": f'"{hash_of(path, content)}"'}
            return self.reply(302, Location=f"{self.server.cdn.url}/cdn/1/{quote(name)}?sig=SIGNED", **about)
        if self.command == "HEAD":
            return self.reply(200, content, ETag=f'"{hash_of(path, content)}"', **about)
        self.reply(307, Location=f"/cache/{quote(name)}", **about)

    def content(self, name):
        hub, (repo, path) = self.server, name.split("//")
        content = hub.repos[repo][path]
        faults = hub.faults.get(path, [])
        kind, number, headers = (*(faults.pop(0) if faults else ("",)), 0, {})[:3]
        if kind == "status":
            return self.reply(number, **headers)
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1]) if kind != "plain" else 0
        if kind == "flip":
            content = content[:number] + bytes([content[number] ^ 1]) + content[number + 1 :]
        whole = len(content)
        content = content[:number] if kind == "short" else content
        if start and start >= len(content):
            return self.reply(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
        self.end_headers()
        end = start + number if kind in ("cut", "stall") else len(content)
        for at in range(start, end, 20000):
            piece = content[at : min(at + 20000, end)]
            self.wfile.write(piece)
            hub.sent += len(piece)
            time.sleep(hub.slow)
        if kind == "stall":
            time.sleep(2)
        self.close_connection = kind in ("cut", "stall")


@contextlib.contextmanager
def serve(tmp_path, monkeypatch, repos):
    """A hub and the second origin of its large files, for this process and for those that it starts."""
    cdn = FakeHub()
    server = FakeHub(cdn)
    server.repos = cdn.repos = repos
    cdn.faults = server.faults
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, file_download):  # the second is where versions before 1.0 look
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(download, "PAUSE", 0.01)
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
    for name, value in {"STALL": 0.5, "LIST_TRIES": 2, "TRIES": 4}.items():
        monkeypatch.setattr(download, name, value)
    with serve(tmp_path, monkeypatch, {name: dict(files) for name, files in REPOS.items()}) as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def main(argv) -> int:
    return errors.exit_status(download.main, argv)


def cache(tmp_path, name="models--org--model"):
    return tmp_path / "home" / "hub" / name


def layout(folder):
    """Path -> where its link points or what it holds; without what each of the two clients keeps for itself."""
    own = (".download", ".locks", "trees", "CACHEDIR.TAG")
    files = [p for p in sorted(folder.rglob("*")) if not p.is_dir() and not set(own) & set(p.relative_to(folder).parts)]
    return {str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_bytes() for p in files}


def run(*args):
    """download.py as a process of its own."""
    command = [sys.executable, str(ROOT / "download.py"), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# ---- the whole of it


@pytest.mark.parametrize(("name", "kind", "files"), [("org/model", "model", MODEL), ("solo", "model", ["config.json"]),
                                                     ("datasets/org/data", "dataset", [*DATA][1:])])  # fmt: skip
def test_the_cache_is_what_the_real_client_makes(hub, tmp_path, name, kind, files):
    assert main([name]) == 0
    repo = name.removeprefix("datasets/")
    snapshot_download(repo, repo_type=kind, cache_dir=tmp_path / "real", endpoint=hub.url, allow_patterns=[*files])
    ours, real = layout(tmp_path / "home" / "hub"), layout(tmp_path / "real")
    assert ours == real and len(ours) >= 2 * len(files)
    there = snapshot_download(repo, repo_type=kind, cache_dir=constants.HF_HUB_CACHE, local_files_only=True)
    assert [find(f"{name}{at}", "--weights") for at in ("", "@main", f"@{'a' * 40}")] == [Path(there)] * 3
    assert not scan_cache_dir(constants.HF_HUB_CACHE).warnings
    if name == "org/model":
        config = AutoConfig.from_pretrained(name, cache_dir=constants.HF_HUB_CACHE, local_files_only=True)
        assert config.hidden_size == 64


@pytest.mark.parametrize(("args", "expected"), [
    ([], set(MODEL)),
    (["--skip-model"], {"config.json", "tokenizer.json", "a name & more.json"}),
    (["--exclude", "model-*", "--exclude", "a *"], {"config.json", "tokenizer.json", "model.safetensors.index.json"}),
    (["--include", "original/*"], {"original/consolidated.00.pth", "original/params.json"}),
    (["--include", "*.json", "--exclude", "o*"], {n for n in MODEL if n.endswith(".json")}),
])  # fmt: skip
def test_what_is_fetched(hub, tmp_path, args, expected):
    assert main(["org/model", "--out", str(tmp_path / "out"), "--jobs", "2", *args]) == 0
    assert layout(tmp_path / "out") == {k: v for k, v in hub.repos["models/org/model"].items() if k in expected}


@pytest.mark.parametrize("login", ["", "private.SecretSecretSecret"])
def test_token_goes_to_the_hub_only_and_is_kept_nowhere(hub, tmp_path, tmp_path_factory, capfd, monkeypatch, login):
    if login:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path_factory.mktemp("login") / "token"))
        Path(constants.HF_TOKEN_PATH).write_text(login + "\n")
    token = login or TOKEN
    assert main(["org/model"]) == 0
    assert {auth for *_, auth in hub.seen} == {f"Bearer {token}"}
    assert {auth for *_, auth in hub.cdn.seen} == {None} and len(hub.cdn.seen) == 4  # two files, a redirect each
    hub.refuse = lambda path: (403, b"", {"X_Error_Message": f"what a token: {token}"})
    assert main(["org/model"]) == 2
    hub.refuse = lambda path: (401, b"")
    assert main(["org/model"]) == 2
    said = "".join(capfd.readouterr())
    assert f"refuses the token of {'the login' if login else 'HF_TOKEN'}" in said and token not in said
    assert main(["org/model", "--token", TOKEN]) == 2
    kept = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()] + ["".join(capfd.readouterr()).encode()]
    assert len(kept) > 5 and not any(token.encode() in text for text in kept)


# ---- faults that pass


@pytest.mark.parametrize(("faults", "again"), [
    ([("cut", 700_001)], 0),
    ([("cut", 0), ("cut", 300_000), ("cut", 1), ("stall", 5000)], 0),
    ([("status", 503), ("status", 500), ("status", 429, {"Retry_After": "0"})], 0),
    ([("status", 429, {"Retry_After": "0"})] * 15, 0),  # as often as the hub says when to come again
    ([("status", 403)], 0),  # a signed address that has expired
    ([("cut", 1_000_000), ("plain",)], None),  # the server cannot begin at a byte: again from the start
    ([("flip", 5)], len(BIG)),
    ([("cut", 500_000), ("flip", 1_500_000)], len(BIG)),
    ([("short", 400_000), ("short", 400_000)], 400_000),  # the second answers 416
])  # fmt: skip
def test_it_gets_there(hub, tmp_path, faults, again):
    shard = "model-00001-of-00002.safetensors"
    hub.faults[shard] = faults
    assert main(["org/model"]) == 0
    assert (find("org/model", "--weights") / shard).read_bytes() == BIG
    needed = len(BIG) + len(MODEL["model-00002-of-00002.safetensors"])
    assert again is None or hub.cdn.sent == needed + again  # no byte needlessly twice
    assert not [*cache(tmp_path).rglob("*.part")]


def test_kill_and_resume_from_the_last_byte(hub, tmp_path):
    hub.cdn.slow = 0.02
    child = run("org/model")
    wait_for(lambda: hub.cdn.sent > 300_000)
    assert TOKEN not in Path(f"/proc/{child.pid}/cmdline").read_text()
    child.kill()
    child.wait()
    with pytest.raises(UserError, match="5 of 6|1 of 6"):
        find("org/model", "--weights")
    (part,) = (p for p in cache(tmp_path).rglob("*.part") if p.stat().st_size > 10_000)
    size, hub.cdn.slow, hub.cdn.seen[:] = part.stat().st_size, 0, []
    assert main(["org/model"]) == 0
    assert [r for _, path, r, _ in hub.cdn.seen if "/cdn/0/" in path and "00001" in path] == [f"bytes={size}-"]
    assert find("org/model", "--weights").joinpath("model-00001-of-00002.safetensors").read_bytes() == BIG


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_ended_by_a_signal(hub, tmp_path, number):
    hub.cdn.slow = 0.02
    child = run("org/model")
    wait_for(lambda: hub.cdn.sent > 100_000)
    child.send_signal(number)
    said = child.communicate(timeout=10)[0]
    assert child.returncode == 128 + number and f"by {number.name}; the same command goes on" in said
    assert "Traceback" not in said and TOKEN not in said


@pytest.mark.parametrize("out", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_processes_share_the_work(hub, tmp_path, out):
    hub.cdn.slow = 0.005
    where = ["--out", str(tmp_path / "out")] if out else []
    children = [run("org/model", *where) for _ in range(3)]
    said = [child.communicate(timeout=30)[0] for child in children]
    assert [c.returncode for c in children] == [0, 0, 0], said
    assert hub.cdn.sent == sum(len(v) for k, v in MODEL.items() if is_large(k))
    folder = tmp_path / "out" if out else find("org/model", "--weights")
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == MODEL


# ---- faults that do not


def refuse_files(*answer):
    return lambda path: answer if "/resolve/" in path else None


def listing(entries, following=""):
    """Each page has these entries. following: where the next one is; {} gets a new number."""
    entry = {"type": "file", "path": "config.json", "size": 2, "oid": "c" * 40}
    body, number = json.dumps([entry | e for e in entries]).encode(), itertools.count()

    def refuse(path):
        if "/tree/" in path:
            url = following.replace("SELF", "?recursive=true&expand=false").format(next(number))
            return 200, body, {"Link": f'<http://hub{path}{url}>; rel="next"'} if following else {}

    return refuse


@pytest.mark.parametrize(("refuse", "args", "status", "words"), [
    (refuse_files(403, b"", {"X_Error_Code": "GatedRepo"}), [], 2, "gated: accept its licence at http.*org/model"),
    (refuse_files(401, b"", {"X_Error_Code": "GatedRepo"}), [], 2, "hf auth login"),
    (lambda p: (401, b"", {"X_Error_Message": "Invalid credentials in it"}), [], 2, "the token of HF"),
    (lambda p: (403, b"", {"X_Error_Message": "no right"}), [], 2, "no right"),
    (None, ["org/other"], 2, "no http.*/org/other, or it is private"),
    (None, ["org/model", "--revision", "v9"], 2, "no such revision"),
    (None, ["org/model", "--revision", "../x"], 2, "--revision"),
    (None, ["../model"], 2, "not the name"),
    (None, ["org/pickled"], 2, "only as pickles .pytorch_model.bin"),
    (None, ["org/model", "--include", "*.nothing"], 2, "none of its 16 files"),
    (None, ["org/empty"], 2, "org/empty: none of its 0 files is selected; it is empty$"),
    (None, ["datasets/org/data", "--skip-model"], 2, "--include"),
    (None, ["--jobs", "0"], 2, "1 to 64"),
    (lambda p: (429, b"", {"RateLimit": '"api";r=0;t=900'}), [], 1, "901 s"),
    (lambda p: (429, b"", {"Retry_After": "Wed, 21 Oct 2099 07:28:00 GMT"}), [], 1, "too many requests"),
    (refuse_files(500), [], 1, "answers 500, 4 times"),
    (refuse_files(429), [], 1, r"429 \(too many requests\) and wants 0 s of rest.*: wait, or log in"),
    (listing([{}], "SELF"), [], 1, "lists 'config.json' of org/model twice"),
    (listing([{"type": "directory", "path": "a"}], "?cursor={}"), [], 1, "lists 'a' of org/model twice"),
    (listing([{}, {"path": "config.json/deep.json"}]), [], 1, "lists 'config.json' as a file and as a folder"),
    *((listing([{"oid": oid}]), [], 1, "no hub would") for oid in ("../../../evil", "a" * 39, "")),
    (lambda p: (200, b"<html>Log in to the airport"), [], 1, "no JSON"),
    (lambda p: (200, b"[]") if "/tree/" not in p else None, [], 1, "no hub would"),
    (lambda p: (302, b"", {"Location": "http://127.0.0.1:9/"}), [], 1, "refused"),
])  # fmt: skip
def test_one_sentence_and_a_status(hub, tmp_path, capfd, monkeypatch, refuse, args, status, words):
    monkeypatch.setattr(download, "PATIENCE", 0.05)
    hub.refuse = refuse or hub.refuse
    assert main(args or ["org/model"]) == status
    said = capfd.readouterr().err
    assert re.search(words, said) and said.startswith("error: ") and said.count("\n") == 1, said
    with pytest.raises(UserError, match="no download of it|has not ended"):
        find("org/model", "--weights")


@pytest.mark.parametrize(("fault", "words"), [
    (("flip", 7), "is damaged (its hash is not"), (("short", 100), "is damaged (its hash is not"),
    (("cut", 0), "early, 4 times"), (("stall", 0), "nothing arrives, 4 times"),
])  # fmt: skip
def test_faults_that_last(hub, tmp_path, capfd, fault, words):
    shard = "model-00002-of-00002.safetensors"
    hub.faults[shard] = [fault] * 10
    assert main(["org/model"]) == 1
    assert words in capfd.readouterr().err
    assert not (cache(tmp_path) / "blobs" / hash_of(shard, MODEL[shard])).exists()
    with pytest.raises(UserError, match="has not ended, .*python download.py org/model"):
        find("org/model", "--weights")


@pytest.mark.parametrize("path", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a\\evil.json", "C:x.json",
                                  "x\x1b[2J.json", "./x.json", ".download/x.json"])  # fmt: skip
def test_hostile_names(hub, tmp_path, capfd, path):
    hub.repos["models/org/model"][path] = b"{}"
    before = sorted(tmp_path.rglob("*"))
    assert main(["org/model", "--include", "*"]) == 1
    said = capfd.readouterr().err
    assert "would not lie in its folder" in said and "\x1b" not in said
    assert sorted(tmp_path.rglob("*")) == before


def test_no_network_and_offline(hub, capfd, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["org/model"]) == 1
    assert "connection to 127.0.0.1: Connection refused" in capfd.readouterr().err
    for endpoint in (f"https://user:{TOKEN}@hub", "hub", "http://hub:99999"):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        assert main(["org/model"]) == 2
        said = capfd.readouterr().err
        assert "HF_ENDPOINT: expected" in said and TOKEN not in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["org/model"]) == 2
    assert "HF_HUB_OFFLINE" in capfd.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_Sécret two words")
    assert main(["org/model"]) == 2
    said = capfd.readouterr().err
    assert "anew" in said and "cret" not in said


def test_waits_are_told(hub, capfd, monkeypatch):
    """Where nothing arrives, and where the hub says when to come again: the host, what for, why, and when."""
    monkeypatch.setattr(download, "QUIET", 0.05)
    monkeypatch.setattr(download, "STALL", 10.0)
    monkeypatch.setattr(download.logger, "handlers", [])  # those that a run in this process has left
    refused, watched = set(), ("/revision/main", "/config.json")

    def refuse(path):
        if path.endswith(watched) and path not in refused:
            refused.add(path)
            threading.Event().wait(1.0)
            return 429, b"", {"Retry_After": 1}

    hub.refuse = refuse
    assert main(["org/model", "--include", "config.json"]) == 0
    said = "".join(capfd.readouterr())
    for name in ("the listing of org/model", "config.json"):
        for reason in (r"nothing has arrived for \d s", r"127.0.0.1 answers 429 \(too many.*; next try in 1 s"):
            assert re.search(f"waiting for {name} of 127.0.0.1: {reason}", said)


# ---- the disk


def test_full_disk(hub, tmp_path, capfd, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    assert main(["org/model"]) == 1
    assert "has 1.0 MB free and the download needs 2.1 MB" in capfd.readouterr().err
    assert hub.cdn.sent == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    write = os.pwrite

    def full(fd, data, at):
        if at > 500_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:70_000], at)

    monkeypatch.setattr(os, "pwrite", full)
    assert main(["org/model"]) == 1
    said = capfd.readouterr().err
    assert "the disk is full" in said and "the same command goes on" in said
    monkeypatch.setattr(os, "pwrite", write)
    sent = hub.cdn.sent
    assert main(["org/model"]) == 0
    assert hub.cdn.sent - sent < len(BIG) - 400_000


def test_a_damaged_file_on_disk_is_fetched_again(hub, tmp_path):
    assert main(["org/model"]) == 0
    sent = hub.cdn.sent
    assert main(["org/model"]) == 0 and hub.cdn.sent == sent  # nothing again
    shard = find("org/model", "--weights") / "model-00002-of-00002.safetensors"
    blob = shard.resolve()
    blob.write_bytes(b"x" * blob.stat().st_size)
    assert main(["org/model"]) == 0
    assert shard.read_bytes() == MODEL[shard.name] and hub.cdn.sent == sent + len(MODEL[shard.name])
    blob.write_bytes(b"short")
    with pytest.raises(UserError, match="1 of 6 files are missing"):
        find("org/model", "--weights")


def test_without_locks_and_without_links(hub, tmp_path, capfd, monkeypatch):
    def cannot(*_):
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(download.fcntl, "flock", cannot)
    for _ in range(2):
        assert main(["org/model"]) == 0
    assert {p.name: p.read_bytes() for p in find("org/model", "--weights").iterdir()} == MODEL
    assert hub.cdn.sent == sum(len(v) for k, v in MODEL.items() if is_large(k))
    monkeypatch.setattr(Path, "symlink_to", cannot)
    assert main(["solo"]) == 2
    assert "name a folder that you may write to" in capfd.readouterr().err
    assert main(["solo", "--out", str(tmp_path / "out")]) == 0


def test_out(hub, tmp_path, capfd, monkeypatch):
    out = tmp_path / "a folder"
    args = ["org/model", "--out", str(out), "--revision", "v1"]
    assert main(args) == 0
    record = json.loads((out / ".download" / "record.json").read_text())
    assert record["commit"] == "b" * 40 and "b" * 40 in capfd.readouterr().out
    assert find(str(out), "--weights") == out
    (out / "config.json").unlink()
    with pytest.raises(UserError, match="1 of 6 files are missing .* --revision v1"):
        find(str(out), "--weights")
    monkeypatch.setitem(COMMITS, "v1", "c" * 40)  # the branch moves on, the folder stays
    sent = hub.cdn.sent
    assert main(args) == 0 and find(str(out), "--weights") == out and hub.cdn.sent == sent
    assert json.loads((out / ".download" / "record.json").read_text())["commit"] == "b" * 40
    assert main(["solo", "--out", str(out)]) == 2
    assert "holds org/model at revision v1, not solo at main" in capfd.readouterr().err


def test_out_is_somebody_elses(hub, tmp_path, capfd):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    assert main(["org/model", "--out", str(tmp_path / "out")]) == 2
    assert (tmp_path / "out" / "config.json").read_text() == "mine"
    assert main(["org/model", "--out", str(tmp_path / "out" / "config.json")]) == 2
    assert "not as org/model has it" in capfd.readouterr().err


@pytest.mark.parametrize(("spec", "words"), [
    ("org/none", "--w org/none: no such folder or file, and no download of it in .*hub: python download.py org/none$"),
    ("gpt2@v1", "python download.py gpt2 --revision v1$"),
    ("./x.bin", "no such folder or file, and not the name"), ("a/b/c", "not the name"),
])  # fmt: skip
def test_find_nothing(hub, spec, words):
    with pytest.raises(UserError, match=words):
        find(spec, "--w")


def test_find_what_another_program_fetched(hub, tmp_path):
    there = snapshot_download("org/model", cache_dir=constants.HF_HUB_CACHE, endpoint=hub.url, revision="v1")
    assert [find(f"org/model{at}", "--weights") for at in ("@v1", f"@{'b' * 9}")] == [Path(there)] * 2
    for spec, words in (("org/model@v2", "--revision v2"), ("org/model", "there is org/model@b{12}: .* org/model$")):
        with pytest.raises(UserError, match=words):
            find(spec, "--weights")
    sent, damaged = hub.cdn.sent, Path(there, "model-00002-of-00002.safetensors")  # the other sees only its size
    damaged.resolve().write_bytes(b"x" * damaged.stat().st_size)
    assert main(["org/model", "--revision", "v1"]) == 0
    assert damaged.read_bytes() == MODEL[damaged.name] and hub.cdn.sent - sent == len(MODEL[damaged.name])
