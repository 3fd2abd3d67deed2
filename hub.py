"""Access to the hub for streams, until stream.py reads through huggingface_hub."""

import contextlib
import fcntl
import functools
import hashlib
import http.client
import json
import logging
import os
import re
import shutil
import signal
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import quote, urlsplit

from lib.errors import Failure, Progress, UserError, amount, printable, write_whole  # first

# isort: split
from huggingface_hub import constants

STALL = 30.0  # seconds without a byte, after which a connection counts as cut
PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before the second try; doubled before each further one, up to the second
PATIENCE = 1800.0  # seconds without a new byte through which we wait for a hub that limits our requests
TRIES, LIST_TRIES = 10, 4  # in a row without a new byte; the second for a listing, where the user sits and waits
QUIET = 2.0  # seconds after which a wait is told
CHUNK = 1 << 20
SAME = "the same command goes on from there"
logger = logging.getLogger("flatland")
Listing = dict[str, tuple[int, str]]  # path -> (bytes, hash): sha256 (64 digits), or git's SHA-1 of the blob (40)


class Damaged(Failure):
    """The bytes of a file that arrived do not have its hash."""


class NotThere(UserError):
    """The hub answers 404."""


def say(text: str) -> None:
    """A line for the user: in the log, where this process has one. A worker of stream.py replaces this: it hands the
    line to its parent."""
    if logger.handlers:
        logger.warning(text)
    else:
        print("\r\033[K" * sys.stderr.isatty() + printable(text), file=sys.stderr, flush=True)


# ---- names and folders


def folder_of(name: str, revision: str) -> tuple[str, str, Path]:
    """`ORG/NAME`, `NAME` or `datasets/ORG/NAME` -> (`models` or `datasets`, ORG/NAME, its folder in the cache)."""
    kind, repo = ("datasets", name[9:]) if name.startswith("datasets/") else ("models", name)
    if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", repo, re.ASCII) or "--" in repo or ".." in repo:
        raise UserError(f"{name}: not the name of a repository; expected ORG/NAME or datasets/ORG/NAME")
    if not re.fullmatch(r"\w[\w./-]*", revision, re.ASCII) or ".." in revision:
        raise UserError(f"--revision {revision}: expected a branch, a tag or a commit")
    return kind, repo, Path(constants.HF_HUB_CACHE) / f"{kind}--{repo.replace('/', '--')}"


def size_of(path: Path) -> int:
    """Bytes; -1 if there is no such file."""
    return path.stat().st_size if path.is_file() else -1


# ---- waiting


class Wait:
    """The tries to get one file or listing: how many have failed in a row, and what is being waited for. While this is
    entered, a thread tells the user of each try that takes long."""

    def __init__(self, hub: "Hub", name: str, limit: int):
        self.hub, self.name, self.limit, self.host = hub, name, limit, urlsplit(hub.url).hostname
        self.over = threading.Event()
        self.begin()

    def begin(self) -> None:
        """From now on bytes are waited for."""
        self.since, self.tries, self.told = time.monotonic(), 0, False

    def end(self) -> None:
        self.told = True

    def __enter__(self) -> "Wait":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()

    def _watch(self) -> None:
        while not self.over.wait(min(QUIET, 0.2)):
            silent = time.monotonic() - self.since
            if silent >= QUIET and not self.told:
                self._tell(f"nothing has arrived for {silent:.0f} s")

    def _tell(self, reason: str) -> None:
        self.told = True
        say(f"waiting for {self.name} of {self.host}: {reason}")

    def pause(self, error: Exception | str) -> None:
        """Sleeps until the next try. Raises what the user should read if another try is no use, if `limit` of them have
        brought nothing, or if the hub has limited our requests for too long."""
        reason, seconds = self._judge(error)
        if seconds is None:
            self.tries += 1
            seconds = min(PAUSE * 2 ** (self.tries - 1), LONGEST_PAUSE)
            if self.tries >= self.limit:
                mend = f"check the network, HF_ENDPOINT and HTTPS_PROXY; {SAME}"
                raise Failure(f"{reason}, {self.tries} times in a row: {mend}")
        elif time.monotonic() - self.since + seconds > PATIENCE:
            raise Failure(f"{reason} and wants {seconds:.0f} s of rest: wait, or log in for more; {SAME}")
        if seconds >= QUIET:
            self._tell(f"{reason}; next try in {seconds:.0f} s")
        time.sleep(seconds)

    def _judge(self, error: Exception | str) -> tuple[str, float | None]:
        """What has happened, and the seconds that the hub asks us to wait; raises what no other try can mend."""
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            why = f"a certificate that is not trusted here ({reason.verify_message})"
            raise Failure(f"{self.host} shows {why}; if that is your proxy's, set SSL_CERT_FILE to it")
        if not isinstance(error, urllib.error.HTTPError):
            words = "nothing arrives" if isinstance(reason, TimeoutError) else getattr(reason, "strerror", None)
            return f"connection to {self.host}: {words or str(reason) or type(reason).__name__}", None
        code, reason = error.code, f"{self.host} answers {error.code}"
        if code == 429:
            return f"{reason} (too many requests)", max(PAUSE, _asked_wait(error.headers))
        if code >= 500 or code == 408 or _origin(error.url) != _origin(self.hub.url):
            return reason, None  # a signed address may have expired
        if code in (401, 403, 404):
            raise (NotThere if code == 404 else UserError)(self.hub.refusal(error))
        raise Failure(f"{reason}: {self.hub.own_words(error)}; check HF_ENDPOINT, or try later")


def _asked_wait(headers) -> float:
    """Seconds that a 429 asks for: Retry-After: 30, or the hub's RateLimit: "api";r=0;t=55."""
    after, limit = headers.get("Retry-After", ""), re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
    return float(after) if after.isdigit() else float(limit[1]) + 1 if limit else 10 * PAUSE


# ---- the hub


def _origin(url: str) -> tuple[str, str]:
    return urlsplit(url.lower())[:2]  # scheme, and host with its port


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The system's certificates, of which some Pythons know none, and certifi's. Made once: it takes 0.2 s."""
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


class Hub(urllib.request.HTTPRedirectHandler):
    """One repository on HF_ENDPOINT, as the user's token sees it. The token goes to no other origin. tries: for a
    listing, in a row."""

    def __init__(self, kind: str, repo: str, tries: int | None = None):
        if constants.HF_HUB_OFFLINE:
            raise UserError("HF_HUB_OFFLINE is set, so that nothing is fetched: unset it, or give files that are here")
        self.kind, self.repo, self.url, self.tries = kind, repo, constants.ENDPOINT, tries or LIST_TRIES
        self.page = f"{self.url}/{'datasets/' * (kind == 'datasets')}{repo}"
        if not re.fullmatch(r"https?://([\w.-]+|\[[\da-f:]+\])(:[1-6]?\d{1,4})?(/[\w./-]*)?", self.url, re.ASCII):
            raise UserError("HF_ENDPOINT: expected http://HOST or https://HOST, with a :PORT if need be")
        from huggingface_hub import get_token  # takes 0.25 s, which find() does without

        self.token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            raise UserError("the token (HF_TOKEN, or the login's file) holds characters that no token has: set it anew")
        self.opener = urllib.request.build_opener(self, urllib.request.HTTPSHandler(context=_trusted()))

    def _request(self, url: str, headers: dict[str, str], wait: Wait) -> urllib.request.Request:
        request = urllib.request.Request(url, headers=headers)
        request.wait, wait.host = wait, urlsplit(url).hostname
        if self.token and _origin(url) == _origin(self.url):
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        return request

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """urllib's hook: a redirect is a request of its own, for which we decide about the token anew."""
        return self._request(newurl, req.headers, req.wait)

    def _open(self, url: str, wait: Wait, start: int = 0) -> http.client.HTTPResponse:
        """The answer from byte `start` on; OSError or HTTPException as urllib raises them."""
        headers = {"User-Agent": "flatland"} | ({"Range": f"bytes={start}-"} if start else {})
        return self.opener.open(self._request(url, headers, wait), timeout=STALL)

    def read(self, path: str, commit: str, size: int, oid: str, digest=None, have: int = 0) -> Iterator[bytes]:
        """The bytes of a file of a commit from number `have` on, over as many connections as it takes; `digest` is of
        those before. It ends after `size` bytes with the hash `oid`; Damaged if they are others, or if the hub cannot
        begin at a byte. What the caller does with the bytes cannot be taken for trouble with the network."""
        url, digest = f"{self.page}/resolve/{commit}/{quote(path)}", digest or new_digest(oid, size)
        with Wait(self, path, TRIES) as wait:
            while have < size:
                trouble: Exception | str = f"{path} ends early"
                try:
                    with self._open(url, wait, have) as answer:
                        if have and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                            break
                        while have < size and (chunk := answer.read1(min(CHUNK, size - have))):
                            digest.update(chunk)
                            have += len(chunk)
                            wait.end()
                            yield chunk
                            wait.begin()
                except (OSError, http.client.HTTPException) as e:
                    trouble = e
                if getattr(trouble, "code", 0) == 416:  # we have as many bytes as the hub's file, or more
                    break
                if have < size:
                    wait.pause(trouble)
        if have != size or digest.hexdigest() != oid:
            raise Damaged(f"{url}: what arrived is damaged (its hash is not {oid})")

    def ask(self, path: str) -> Iterator:
        """The JSON that the hub's interface has for this repository at `path`, page by page."""
        url = f"{self.url}/api/{self.kind}/{self.repo}/{path}"
        with Wait(self, f"the listing of {self.repo}", self.tries) as wait:
            while url:
                try:
                    with self._open(url, wait) as answer:
                        page = json.loads(answer.read())
                        following = re.search(r"<([^>]*)>;\s*rel=\"?next", answer.headers.get("Link", ""))
                except ValueError:
                    words = "answers no JSON, so it is no hub: check HF_ENDPOINT, or the proxy"
                    raise Failure(f"{self.url} {words}") from None
                except (OSError, http.client.HTTPException) as e:
                    wait.pause(e)
                    continue
                yield page
                wait.begin()
                if not (following and page):
                    return
                here = urlsplit(self.url)  # a mirror's list may name the hub itself for the next page
                url = urlsplit(following[1])._replace(scheme=here.scheme, netloc=here.netloc).geturl()

    def commit(self, revision: str) -> str:
        """The commit that a branch or a tag names."""
        return _checked(next(self.ask(f"revision/{quote(revision, safe='')}")), "sha", r"[0-9a-f]{40}")

    def tree(self, commit: str, folder: str = "") -> Listing:
        """All files at a commit, or those in a folder and below."""
        files, paths, where = {}, set(), f"tree/{commit}{folder and '/' + quote(folder)}"
        for entry in (e for page in self.ask(f"{where}?recursive=true&expand=false") for e in page):
            path, stored = _checked(entry, "path", r"[^\0]+"), entry.get("lfs") or entry
            if not path.isprintable() or re.search(r"[\\:]|(^|/)(\.{0,2}|\.download)(/|$)", path):
                raise Failure(f"{self.repo} lists {path!r}, which would not lie in its folder: nothing was fetched")
            if path in paths:
                raise Failure(f"{self.url} lists {path!r} of {self.repo} twice: check HF_ENDPOINT, or try later")
            paths.add(path)
            if _checked(entry, "type", r"\w+") == "file":
                oid = _checked(stored, "oid", r"[0-9a-f]{40}" if stored is entry else r"[0-9a-f]{64}")
                files[path] = int(_checked(stored, "size", r"\d+")), oid
        for folder in files.keys() & {str(folder) for path in paths for folder in PurePosixPath(path).parents}:
            raise Failure(f"{self.repo} lists {folder!r} as a file and as a folder: nothing was fetched")
        return files

    def own_words(self, error: urllib.error.HTTPError) -> str:
        """The hub's; a token that it repeats is not repeated by us."""
        words = error.headers.get("X-Error-Message") or str(error.reason)
        return "".join(filter(str.isprintable, words.replace(self.token or "\0", "***")))[:200]

    def refusal(self, error: urllib.error.HTTPError) -> str:
        """What to do about 401, 403 or 404: the hub tells cases apart by X-Error-Code and by whether it got a token."""
        code, log_in = error.headers.get("X-Error-Code", ""), "log in (`hf auth login`, or set HF_TOKEN)"
        if code == "GatedRepo":
            return f"{self.repo} is gated: accept its licence at {self.page}, then {log_in} as the one who did"
        if code == "RevisionNotFound":
            return f"{self.repo} has no such revision: its branches and tags are at {self.page}/tree/main"
        if error.code == 401 and self.token:
            source = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the login"
            return f"the hub refuses the token of {source}: make a new one at {self.url}/settings/tokens and {log_in}"
        if code == "EntryNotFound":
            return f"{self.repo} no longer has a file of that commit: take another revision (and --out folder)"
        if error.code == 403:
            words = self.own_words(error)
            return f"the hub refuses access to {self.repo} ({words}): give the token the right to read it"
        return f"there is no {self.page}, or it is private: check the spelling, or {log_in} as one who may read it"


def _checked(entry: object, key: str, pattern: str) -> str:
    """What a hub says, before it becomes a path or a number."""
    value = str(entry.get(key)) if isinstance(entry, dict) else ""
    if not re.fullmatch(pattern, value):
        raise Failure(f"{constants.ENDPOINT} lists what no hub would ({key} {value[:80]!r}): check HF_ENDPOINT")
    return value


# ---- fetching


def new_digest(oid: str, size: int):
    """For the hash that a listing has: sha256, or git's SHA-1 of a blob of so many bytes."""
    return hashlib.sha256() if len(oid) == 64 else hashlib.sha1(b"blob %d\0" % size)


def write_at(fd: int, chunk: bytes, at: int) -> None:
    """All of it: the disk may take a part at a time."""
    while chunk:
        count = os.pwrite(fd, chunk, at)
        chunk, at = chunk[count:], at + count


def hash_rest(file: BinaryIO, digest):
    """Updates a digest with what is left to read of a file -> the digest."""
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest


@dataclass
class File:
    """A file to be fetched. home: where the content goes. link: its name in the snapshot, or home itself. part: what
    has arrived of it. mark: a file that is locked while one thread fetches this, and those of other processes wait and
    find it whole; it holds the time of home's last change when its hash was right. fetched: bytes from the network."""

    path: str
    size: int
    oid: str
    home: Path
    link: Path
    part: Path
    mark: Path
    fetched: int = 0

    def is_whole(self) -> bool:
        """Whether the content is in its place and right; read only if it changed since that was verified."""
        if size_of(self.home) != self.size:
            return False
        if self.mark.read_text() == str(self.home.stat().st_mtime_ns):
            return True
        with open(self.home, "rb") as f:
            return hash_rest(f, new_digest(self.oid, self.size)).hexdigest() == self.oid

    def settle(self, hub: Hub, commit: str) -> None:
        """Brings the file into its place."""
        with open(self.mark, "a+") as mark:
            with contextlib.suppress(OSError):  # without locks all write the same bytes to the same places
                fcntl.flock(mark, fcntl.LOCK_EX)
            if self.is_whole():
                self.part.unlink(missing_ok=True)
            else:
                self._receive(hub, commit)
                self.home.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # without locks, somebody else may have been faster
                    os.replace(self.part, self.home)
            mark.truncate(0)
            mark.write(str(self.home.stat().st_mtime_ns))
        if self.link != self.home and not self.link.is_symlink():
            self.link.parent.mkdir(parents=True, exist_ok=True)
            self.link.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):
                self.link.symlink_to(os.path.relpath(self.home, self.link.parent))

    def _receive(self, hub: Hub, commit: str) -> None:
        """Completes a part. A damaged one starts again from byte 0, once; Damaged if that one is damaged too."""
        with open(os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as part:
            for again in (False, True):
                digest, have = hash_rest(part, new_digest(self.oid, self.size)), part.tell()
                try:
                    for chunk in hub.read(self.path, commit, self.size, self.oid, digest, have):
                        write_at(part.fileno(), chunk, have)
                        have += len(chunk)
                        self.fetched += len(chunk)
                    return os.fsync(part.fileno())
                except Damaged as e:
                    if again:
                        raise Damaged(f"{e}, the second time too; try later") from None
                    say(f"{self.path} is damaged: again from the start")
                    part.seek(part.truncate(0))


def fetch(hub: Hub, base: Path, tree: Listing, what: dict, out: bool = False, jobs: int = 8) -> Path:
    """Fetches the files of a listing -> the folder that they are in. base: the repository's folder in the cache, or
    with `out` a folder for plain files. what: the repository, the revision, its commit and the command, for the
    record."""
    commit, scratch = what["commit"], base / ".download"
    folder, record = (base, "record.json") if out else (base / "snapshots" / commit, f"{commit}.json")
    files = []
    for path, (size, oid) in tree.items():
        home = folder / path if out else base / "blobs" / oid
        files.append(File(path, size, oid, home, folder / path, scratch / f"{oid}.part", scratch / f"{oid}.ok"))
    need = sum(max(f.size - max(size_of(f.part), 0), 0) for f in files if size_of(f.home) != f.size)
    total = amount(sum(f.size for f in files))
    print(f"{what['repo']} at {commit}: {len(files)} files, {total}, {amount(need)} of it to fetch")
    scratch.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(scratch).free
    if need > free:
        raise Failure(
            f"{base}: the disk has {amount(free)} free and the download needs {amount(need)}: free some space,"
            " choose another disk with --out or HF_HOME, or fetch less with --include or --exclude"
        )
    asked = {path: size for path, (size, _) in tree.items()}
    write_whole(scratch / record, json.dumps(what | {"files": asked}, indent=1))
    if not out and what["revision"] != commit:
        ref = base / "refs" / what["revision"]
        ref.parent.mkdir(parents=True, exist_ok=True)
        write_whole(ref, commit)
    _fetch_all(hub, commit, files, need, jobs)
    return folder


def _fetch_all(hub: Hub, commit: str, files: list[File], need: int, jobs: int) -> None:
    """Shows a bar until all is fetched or a thread has failed. Ctrl-C leaves the threads behind."""
    progress, pool = Progress(need), ThreadPoolExecutor(jobs)
    in_order = sorted(files, key=lambda file: file.size)  # small ones first: a refusal shows at once
    left = [pool.submit(file.settle, hub, commit) for file in in_order]
    try:
        while left:
            done, left = wait(left, 0.2, FIRST_EXCEPTION)
            for future in done:
                future.result()
            fetched = sum(file.fetched for file in files)
            words = f"{amount(fetched)} of {amount(need)}", f"{len(files) - len(left)} of {len(files)} files"
            progress.show(fetched, fetched, *words, end=not left)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# ---- commands


def resumable(work: Callable[[], None]) -> int:
    """Runs what the same command can go on with -> 0; or, when Ctrl-C, SIGTERM or SIGHUP (but for nohup) has ended it,
    says so -> 128 + the signal's number."""

    def interrupt(number: int, _) -> None:
        raise KeyboardInterrupt(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, interrupt)
    try:
        work()
        return 0
    except KeyboardInterrupt as e:
        number = signal.Signals(e.args[0] if e.args else signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"\nInterrupted by {number.name}; {SAME}", file=sys.stderr)
        return 128 + number
