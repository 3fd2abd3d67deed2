"""Data sets on the hub: which files an address names, and reading them while they arrive.

    hf://datasets/ORG/NAME[@REVISION][/PATH]        PATH: a file, a folder, or a pattern with * (within a name) and **

A revision is resolved to a commit once; files are named by it from then on. `RemoteFile` reads one file from its
beginning: a thread fetches ahead into files without a name (so nothing is left behind, however the process ends), up to
a share of a disk cap, goes on where a connection was cut, waits where the hub says so, and compares the hash."""

import hashlib
import http.client
import io
import os
import re
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from download import CHUNK, TRIES, Failed, Hub, _checked, main
from errors import UserError

PREFIX = "hf://datasets/"
PIECE = 8 * 2**20  # bytes of a file of what was read ahead
DATA_FILE = re.compile(r"\.(txt|jsonl|json|parquet)(\.gz)?$")
TRAIN_NAME = re.compile(r"(?:^|[^a-z])train(?:ing)?(?:[^a-z]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Remote:
    """A file of a data set at a commit."""

    repo: str
    commit: str
    path: str
    size: int
    oid: str  # as the hub lists it: sha256, or git's SHA-1 of the blob

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}@{self.commit[:8]}/{self.path}"


def _pattern(path: str) -> re.Pattern:
    words = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(words.get(w) or re.escape(w) for w in re.split(r"(\*\*|\*|\?)", path)))


def resolve(spec: str, flag: str, commit: str = "") -> list[Remote]:
    """The files that an address names, by path; with `commit`, as of it. Without a path, those of the train split."""
    found = re.fullmatch(rf"{PREFIX}([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", spec)
    if not found:
        raise UserError(f"{flag} {spec}: expected {PREFIX}ORG/NAME[@REVISION][/PATH]")
    repo, revision, path = found[1], found[2] or "main", (found[3] or "").strip("/")
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        raise UserError(f"{flag} {spec}: HF_HUB_OFFLINE is set: unset it, or give files that are here")
    hub = Hub("datasets", repo)
    commit = commit or _checked(hub.ask(f"revision/{quote(revision, safe='')}")[0], "sha", r"[0-9a-f]{40}")
    fixed = re.split(r"[*?]", path)[0]
    tree = hub.tree(commit, fixed.rpartition("/")[0])
    data = {p: entry for p, entry in sorted(tree.items()) if DATA_FILE.search(p)}
    if path in tree or _pattern(path).pattern != re.escape(path):
        chosen = [p for p in (tree if path in tree else data) if p == path or _pattern(path).fullmatch(p)]
    else:
        below = [p for p in data if not path or p.startswith(f"{path}/")]
        chosen = [p for p in below if TRAIN_NAME.search(p)] or ([] if not path else below)
        if len({p.rpartition("/")[0] for p in chosen}) > 1 or (below and not chosen):
            raise UserError(f"{flag} {spec} does not say which files: give one of {_candidates(repo, below)}")
    if not chosen:
        raise UserError(f"{flag} {spec}: no such data file there; there are {_candidates(repo, list(data))}")
    return [Remote(repo, commit, p, *tree[p]) for p in chosen]


def _candidates(repo: str, paths: list[str]) -> str:
    """Files that differ in numbers alone as one pattern each."""
    patterns = dict.fromkeys(re.sub(r"\d+-of-\d+|\d{3,}", "*", p) for p in paths)
    shown = [f"{PREFIX}{repo}/{p}" for p in patterns]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "") if shown else "none"


def fetch_whole(files: list[Remote]) -> list[Path]:
    """The files in HF_HOME's cache, fetched and verified by download.py where they are not yet. Safe when several
    processes do it at the same time."""
    from huggingface_hub import constants

    repo, commit = files[0].repo, files[0].commit
    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{repo.replace('/', '--')}" / "snapshots" / commit
    missing = [f.path for f in files if not (folder / f.path).is_file() or (folder / f.path).stat().st_size != f.size]
    if missing:
        words = [f"datasets/{repo}", "--revision", commit]
        status = main(words + [word for path in missing for word in ("--include", re.sub(r"([*?[])", r"[\1]", path))])
        if status:
            raise Failed(f"{PREFIX}{repo}: its files could not be fetched (see above)")
    return [folder / f.path for f in files]


class RemoteFile(io.RawIOBase):
    """One file of the hub as a stream of bytes. ahead: bytes on disk that may wait to be read."""

    def __init__(self, file: Remote, ahead: int):
        self.file, self.limit = file, max(ahead, 2 * PIECE)
        self.pieces: deque = deque()  # [file without a name, bytes in it, bytes read of it]
        self.waiting, self.ended, self.error = 0, False, None
        self.state = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._fetch()
        except Exception as e:
            self.error = e
        with self.state:
            self.ended = True
            self.state.notify_all()

    def _fetch(self) -> None:
        file, have, tries = self.file, 0, 0
        hub = Hub("datasets", file.repo)
        digest = hashlib.sha256() if len(file.oid) == 64 else hashlib.sha1(b"blob %d\0" % file.size)
        url = f"{hub.page}/resolve/{file.commit}/{quote(file.path)}"
        while have < file.size and not self.closed:
            trouble: Exception | str = f"{file.path} ends early"
            try:
                with hub.open(url, have) as answer:
                    skip = have if have and answer.status == 200 else 0  # a server without ranges
                    while have < file.size and not self.closed:
                        chunk = answer.read1(min(CHUNK, file.size - have + skip))
                        if not chunk:
                            break
                        skip, chunk = max(0, skip - len(chunk)), chunk[skip:]
                        digest.update(chunk)
                        self._keep(chunk)
                        have, tries = have + len(chunk), 0
            except (OSError, http.client.HTTPException) as e:
                trouble = e
            if have < file.size and not self.closed:
                tries += 1
                time.sleep(hub.pause(trouble, tries, TRIES)[0])
        if not self.closed and digest.hexdigest() != file.oid:
            raise Failed(f"{file}: what arrived is damaged (its hash is not {file.oid}); start again")

    def _keep(self, chunk: bytes) -> None:
        with self.state:
            while self.waiting + len(chunk) > self.limit and not self.closed:
                self.state.wait(1.0)
            if not self.pieces or self.pieces[-1][1] >= PIECE:
                self.pieces.append([tempfile.TemporaryFile(buffering=0), 0, 0])  # noqa: SIM115
            piece = self.pieces[-1]
            os.pwrite(piece[0].fileno(), chunk, piece[1])
            piece[1] += len(chunk)
            self.waiting += len(chunk)
            self.state.notify_all()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        with self.state:
            while not self.waiting and not self.ended:
                self.state.wait(1.0)
            if not self.waiting:
                if self.error:
                    raise self.error if isinstance(self.error, (UserError, Failed)) else Failed(str(self.error))
                return 0
            while self.pieces[0][2] == self.pieces[0][1]:
                self.pieces.popleft()[0].close()
            piece = self.pieces[0]
            data = os.pread(piece[0].fileno(), min(len(buffer), piece[1] - piece[2]), piece[2])
            piece[2] += len(data)
            self.waiting -= len(data)
            self.state.notify_all()
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with self.state:
                for piece in self.pieces:
                    piece[0].close()
                self.state.notify_all()
