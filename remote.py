"""Data sets on the hub: which files an address names, and reading them while they arrive.

    hf://datasets/ORG/NAME[@REVISION][/PATH]        PATH: a file, a folder, or a pattern with * (within a name) and **

A revision is resolved to a commit once; files are named by it from then on. `RemoteFile` reads one file from its
beginning: a thread fetches ahead into a file without a name, used as a ring (so nothing is left behind, however the
process ends). Nothing counts as the end of a file before its size and hash hold."""

import errno
import io
import os
import re
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import download
from download import (
    LIST_TRIES,
    TRIES,
    Damaged,
    Failed,
    Hub,
    NotThere,
    Wait,
    disk_error,
    fetch,
    folder_of,
    new_digest,
    write_at,
)
from errors import UserError

PREFIX = "hf://datasets/"
LEAST = 4 * 2**20  # bytes of a file that are read ahead at least
VERIFIED_FIRST = 64 * 2**20  # bytes up to which a file is not read before its hash has been compared
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


def resolve(spec: str, flag: str, commit: str = "", tries: int = LIST_TRIES) -> list[Remote]:
    """The files that an address names, by path; with `commit`, as of it. Without a path, those of the train split."""
    found = re.fullmatch(rf"{PREFIX}([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", spec)
    if not found:
        raise UserError(f"{flag} {spec}: expected {PREFIX}ORG/NAME[@REVISION][/PATH]")
    repo, revision, path = found[1], found[2] or "main", (found[3] or "").strip("/")
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        raise UserError(f"{flag} {spec}: HF_HUB_OFFLINE is set: unset it, or give files that are here")
    hub = Hub("datasets", repo)
    commit = commit or hub.commit(revision, tries)
    try:
        tree = hub.tree(commit, re.split(r"[*?]", path)[0].rpartition("/")[0], tries)
    except NotThere:  # there is no such folder: the message names what there is
        tree = hub.tree(commit, "", tries)
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
    """The files in HF_HOME's cache, fetched and verified where they are not yet. Safe when several processes do it at
    the same time."""
    paths, missing = [], {}
    for file in files:
        base = folder_of(f"datasets/{file.repo}", file.commit)[2]
        paths.append(base / "snapshots" / file.commit / file.path)
        if not paths[-1].is_file() or paths[-1].stat().st_size != file.size:
            missing.setdefault((base, file.repo, file.commit), {})[file.path] = file.size, file.oid
    for (base, repo, commit), tree in missing.items():
        what = {"repo": f"datasets/{repo}", "revision": commit, "commit": commit}
        command = f"python download.py datasets/{repo} --revision {commit}"
        try:
            fetch(Hub("datasets", repo), base, tree, what | {"command": command})
        except OSError as e:
            raise disk_error(e) from None
    return paths


class RemoteFile(io.RawIOBase):
    """One file of the hub as a stream of bytes, from its beginning. ahead: bytes on disk that may wait to be read. A
    file that fits into them is verified before the first byte is given, unless it is too large to wait for. whole: all
    of it is, and `store` is that file."""

    def __init__(self, file: Remote, ahead: int, whole: bool = False):
        self.file, self.folder = file, tempfile.gettempdir()
        free = shutil.disk_usage(self.folder).free
        self.ring = min(file.size, file.size if whole else max(min(ahead, free // 2), LEAST))
        self.verified_first = whole or file.size <= min(self.ring, VERIFIED_FIRST)
        if free < self.ring:
            raise self._no_room()
        self.store = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self.arrived = self.given = 0
        self.ended, self.error, self.state = False, None, threading.Condition()
        self.hub = Hub("datasets", file.repo)
        self.wait = Wait(self.hub, file.path, TRIES)
        threading.Thread(target=self._run, daemon=True).start()

    def _no_room(self) -> Failed:
        free = shutil.disk_usage(self.folder).free / 1e6
        return Failed(
            f"{self.folder}: {os.strerror(errno.ENOSPC)}: reading ahead in {self.file.path} needs"
            f" {self.ring / 1e6:.1f} MB there and {free:.1f} MB are free; free some, or set TMPDIR to another disk"
        )

    def _run(self) -> None:
        try:
            self._fetch()
        except Exception as e:
            full = isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)
            self.error = self._no_room() if full else e
        with self.state:
            self.ended = True
            self.state.notify_all()

    def _fetch(self) -> None:
        file = self.file
        url = f"{self.hub.page}/resolve/{file.commit}/{quote(file.path)}"
        for chunk in self.hub.read(url, file.size, file.oid, new_digest(file.oid, file.size), 0, self.wait):
            while chunk:
                with self.state:
                    while not self.closed and self.arrived - self.given == self.ring:
                        self.state.wait()
                    if self.closed:
                        return
                    at = self.arrived % self.ring
                    count = min(len(chunk), self.ring - at, self.ring - (self.arrived - self.given))
                    write_at(self.store.fileno(), chunk[:count], at)
                    self.arrived, chunk = self.arrived + count, chunk[count:]
                    self.state.notify_all()

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.given

    def readinto(self, buffer) -> int:
        with self.state:
            while not self.ended and (self.verified_first or self.given == self.arrived):
                self.state.wait(0.5)
                if self.wait.news():
                    download.say(str(self.wait))
            waiting = self.arrived - self.given
            if self.error and (not waiting or self.verified_first or isinstance(self.error, Damaged)):
                raise self.error if isinstance(self.error, (UserError, Failed)) else Failed(str(self.error))
            at = self.given % self.ring if waiting else 0
            count = min(len(buffer), waiting, self.ring - at)
            data = os.pread(self.store.fileno(), count, at)
            if len(data) < count:
                raise Failed(f"{self.folder}: {len(data)} of {count} bytes that were written there can be read")
            self.given += count
            self.state.notify_all()
        buffer[:count] = data
        return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            with self.state:
                self.store.close()
                self.state.notify_all()
