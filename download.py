"""Fetches weights, tokenizers and data from the Hugging Face hub, verified and resumable; finds what was fetched.

A repository is pinned to a commit and listed. The listing names the content of each file by a hash: sha256 in the hub's
large-file storage, git's SHA-1 of a blob outside it. A file grows as a part in the folder `.download`; after a kill,
the next command hashes what it finds there and asks for the rest. Only a part with the right hash gets the file's name.
Whoever holds the lock on a part fetches it, so processes that share a folder share the work. Without --out the layout
is that of huggingface_hub's cache, which the ecosystem reads: blobs/HASH, snapshots/COMMIT/NAME as a link to it, and
last refs/REVISION with the commit. `.download/COMMIT.json` lists what was asked for: what lacks any of it is not whole.

Requests are urllib's: huggingface_hub 2.4 starts a killed file again from byte 0, compares only sizes, lists without a
timeout, and hands the token to the host that a list names for its next page. It provides the token, the endpoint and
the folder. Sources: huggingface.co/docs/hub/api, huggingface.co/docs/huggingface_hub/guides/manage-cache."""

import argparse
import contextlib
import email.utils
import errno
import fcntl
import fnmatch
import hashlib
import http.client
import importlib.util
import json
import os
import re
import shlex
import shutil
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from errors import UserError  # first of those that may be missing: it may go on in another Python

# isort: split
from huggingface_hub import constants

DEFAULT = "meta-llama/Llama-3.1-405B"
TEXT = "*.json|*.jinja|*.model|*.model.v*|*.tiktoken|merges.txt|vocab.*|LICENSE*|USE_POLICY*"  # beside the weights
PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")
STALL = 30.0  # seconds without a byte, after which a connection counts as cut
PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before the second try; doubled before each further one, up to the second
LONGEST_WAIT = 330.0  # seconds that a hub may ask us to wait; its limits hold for windows of 300
TRIES, LIST_TRIES = 10, 4  # in a row without a new byte, for a file and for a listing, where the user sits and waits
LINE_EVERY = 10.0  # seconds between two lines of progress where the screen is no terminal
CHUNK = 1 << 20
SAME = "the same command goes on from there"


class Failed(Exception):
    """Nobody's mistake: the network, the disk, the hub. One message, exit status 1."""


# ---- names and folders


def _folder_of(name: str, revision: str) -> tuple[str, str, Path]:
    """`ORG/NAME`, `NAME` or `datasets/ORG/NAME` -> (`models` or `datasets`, ORG/NAME, its folder in the cache)."""
    kind, repo = ("datasets", name[9:]) if name.startswith("datasets/") else ("models", name)
    if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", repo, re.ASCII) or "--" in repo or ".." in repo:
        raise UserError(f"{name}: not the name of a repository; expected ORG/NAME or datasets/ORG/NAME")
    if not re.fullmatch(r"\w[\w./-]*", revision, re.ASCII) or ".." in revision:
        raise UserError(f"--revision {revision}: expected a branch, a tag or a commit")
    return kind, repo, Path(constants.HF_HUB_CACHE) / f"{kind}--{repo.replace('/', '--')}"


def _record(path: Path) -> dict:
    """What a command noted about its download, or {}."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text("utf-8"))
    return {}


def _size(path: Path) -> int:
    """Bytes; -1 if there is no such file."""
    return path.stat().st_size if path.is_file() else -1


def find(spec: str, flag: str) -> Path:
    """A folder or file that exists -> its path; ORG/NAME, NAME or either with @REVISION -> the folder that holds it in
    HF_HOME's cache. UserError, with the command that mends it, if there is none or its download has not ended."""
    folder = Path(spec).expanduser()
    record = folder / ".download" / "record.json"
    if not folder.exists():
        name, _, revision = spec.partition("@")
        try:
            base = _folder_of(name, revision or "main")[2]
        except UserError:
            raise UserError(f"{flag} {spec}: no such folder or file, and not the name of a repository") from None
        ref = base / "refs" / (revision or "main")
        commit = ref.read_text("utf-8").strip() if ref.is_file() else revision if len(revision) >= 7 else ""
        there = [p for p in base.glob("snapshots/*") if p.is_dir()]
        found = [p for p in there if commit and p.name.startswith(commit)] or ([] if revision else there)
        if not found:
            command = f"python download.py {name}{revision and f' --revision {revision}'}"
            raise UserError(
                f"{flag} {spec}: no such folder or file, and no download of it in {constants.HF_HUB_CACHE}: {command}"
            )
        folder = max(found, key=lambda p: p.stat().st_mtime)
        record = base / ".download" / f"{folder.name}.json"  # other programs write none
    asked = _record(record)
    missing = [path for path, size in asked.get("files", {}).items() if _size(folder / path) != size]
    if missing:
        raise UserError(
            f"{flag} {spec}: its download has not ended, {len(missing)} of {len(asked['files'])} files are missing in"
            f" {folder}; go on with: {asked['command']}"
        )
    return folder


# ---- the hub


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or {"http": 80, "https": 443}.get(parts.scheme)


class Hub(urllib.request.HTTPRedirectHandler):
    """One repository on HF_ENDPOINT, as the user's token sees it. The token goes to no other origin."""

    def __init__(self, kind: str, repo: str):
        self.kind, self.repo, self.url = kind, repo, constants.ENDPOINT
        self.page = f"{self.url}/{'datasets/' * (kind == 'datasets')}{repo}"
        self.reached = threading.local()  # .host: the last one that this thread has asked
        try:
            _origin(self.url)
            good = re.fullmatch(r"https?://([\w.-]+|\[[\da-f:]+\])(:\d+)?(/[\w./-]*)?", self.url, re.ASCII)
        except ValueError:
            good = None
        if not good:
            raise UserError("HF_ENDPOINT: expected http://HOST or https://HOST, with a :PORT if need be")
        from huggingface_hub import get_token  # takes 0.25 s, which find() does without

        self.token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            raise UserError("the token (HF_TOKEN, or the login's file) holds characters that no token has: set it anew")
        trust = ssl.create_default_context()
        paths = ssl.get_default_verify_paths()
        found = paths.cafile or paths.capath and os.listdir(paths.capath)
        if not found and importlib.util.find_spec("certifi"):  # some Pythons know of no system's certificates
            trust.load_verify_locations(importlib.import_module("certifi").where())
        self.opener = urllib.request.build_opener(self, urllib.request.HTTPSHandler(context=trust))

    def _request(self, url: str, headers: dict[str, str]) -> urllib.request.Request:
        request = urllib.request.Request(url, headers=headers)
        self.reached.host = urlsplit(url).hostname
        if self.token and _origin(url) == _origin(self.url):
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        return request

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """urllib's hook: a redirect is a request of its own, for which we decide about the token anew."""
        return self._request(newurl, req.headers)

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302  # Python 3.10 lacks it

    def open(self, url: str, start: int = 0) -> http.client.HTTPResponse:
        """The answer from byte `start` on; OSError or HTTPException as urllib raises them."""
        headers = {"User-Agent": "flatland"} | ({"Range": f"bytes={start}-"} if start else {})
        return self.opener.open(self._request(url, headers), timeout=STALL)

    def ask(self, path: str) -> list:
        """The JSON that the hub's interface has for this repository at `path`: a list of its pages."""
        pages, url, tries = [], f"{self.url}/api/{self.kind}/{self.repo}/{path}", 0
        while url:
            try:
                with self.open(url) as answer:
                    pages.append(json.loads(answer.read()))
                    following = re.search(r"<([^>]*)>;\s*rel=\"?next", answer.headers.get("Link", ""))
            except ValueError:
                raise Failed(f"{self.url} answers no JSON, so it is no hub: check HF_ENDPOINT, or the proxy") from None
            except (OSError, http.client.HTTPException) as e:
                tries += 1
                time.sleep(self.pause(e, tries, LIST_TRIES)[0])
                continue
            here, tries = urlsplit(self.url), 0  # a mirror's list may name the hub itself for the next page
            url = following and urlsplit(following[1])._replace(scheme=here.scheme, netloc=here.netloc).geturl()
        return pages

    def tree(self, commit: str, folder: str = "") -> dict[str, tuple[int, str]]:
        """Path -> (bytes, hash) of all files at a commit, or of those in a folder and below."""
        files, where = {}, f"tree/{commit}{folder and '/' + quote(folder)}"
        for entry in (e for page in self.ask(f"{where}?recursive=true&expand=false") for e in page):
            if _checked(entry, "type", r"\w+") == "file":
                path, stored = _checked(entry, "path", r"[^\0]+"), entry.get("lfs") or entry
                if not path.isprintable() or re.search(r"[\\:]|(^|/)(\.{0,2}|\.download)(/|$)", path):
                    raise Failed(f"{self.repo} lists {path!r}, which would not lie in its folder: nothing was fetched")
                oid = _checked(stored, "oid", r"[0-9a-f]{40}" if stored is entry else r"[0-9a-f]{64}")
                files[path] = int(_checked(stored, "size", r"\d+")), oid
        return files

    def pause(self, error: Exception | str, tries: int, limit: int) -> tuple[float, str]:
        """-> (seconds to wait before the next try, why). Raises what the user should read if another try is no use or
        `limit` of them have brought nothing."""
        seconds, reason = min(PAUSE * 2 ** (tries - 1), LONGEST_PAUSE), getattr(error, "reason", error)
        if isinstance(error, urllib.error.HTTPError):
            ours = _origin(error.url) == _origin(self.url)  # else a signed address, which may have expired
            what = f"{self.reached.host} answers {error.code}"
            if ours and error.code in (401, 403, 404):
                raise UserError(self._refusal(error))
            if error.code == 429:
                seconds, what = _asked_wait(error.headers) or seconds, f"{what} (too many requests)"
                if seconds > LONGEST_WAIT:
                    raise Failed(f"{what} and wants {seconds:.0f} s of rest: wait, or log in for more; {SAME}")
            elif ours and error.code < 500 and error.code != 408:
                raise Failed(f"{what}: {self._says(error)}; check HF_ENDPOINT, or try later")
        elif isinstance(reason, ssl.SSLCertVerificationError):
            why = f"a certificate that is not trusted here ({reason.verify_message})"
            raise Failed(f"{self.reached.host} shows {why}; if that is your proxy's, set SSL_CERT_FILE to it")
        else:
            words = "nothing arrives" if isinstance(reason, TimeoutError) else getattr(reason, "strerror", None)
            what = f"connection to {self.reached.host}: {words or str(reason) or type(reason).__name__}"
        if tries >= limit:
            raise Failed(f"{what}, {tries} times in a row: check the network, HF_ENDPOINT and HTTPS_PROXY; {SAME}")
        return seconds, what

    def _says(self, error: urllib.error.HTTPError) -> str:
        """The hub's own words; a token that it repeats is not repeated by us."""
        words = error.headers.get("X-Error-Message") or str(error.reason)
        return "".join(filter(str.isprintable, words.replace(self.token or "\0", "***")))[:200]

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        """What to do about 401, 403 or 404: the hub tells cases apart by X-Error-Code and by whether it got a token."""
        code, log_in = error.headers.get("X-Error-Code", ""), "log in (`hf auth login`, or set HF_TOKEN)"
        if code == "GatedRepo":
            return f"{self.repo} is gated: accept its licence at {self.page}, then {log_in} as the one who did"
        if code == "RevisionNotFound":
            return f"{self.repo} has no such --revision: its branches and tags are at {self.page}/tree/main"
        if error.code == 401 and self.token:
            source = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the login"
            return f"the hub refuses the token of {source}: make a new one at {self.url}/settings/tokens and {log_in}"
        if code == "EntryNotFound":
            return f"{self.repo} no longer has a file of that commit: take another --revision (and --out folder)"
        if error.code == 403:
            return f"the hub refuses access to {self.repo} ({self._says(error)}): give the token the right to read it"
        return f"there is no {self.page}, or it is private: check the spelling, or {log_in} as one who may read it"


def _checked(entry: object, key: str, pattern: str) -> str:
    """What a hub says, before it becomes a path or a number."""
    value = str(entry.get(key)) if isinstance(entry, dict) else ""
    if not re.fullmatch(pattern, value):
        raise Failed(f"{constants.ENDPOINT} lists what no hub would ({key} {value[:80]!r}): check HF_ENDPOINT")
    return value


def _asked_wait(headers) -> float | None:
    """Seconds that a 429 asks for: Retry-After as a number or a date, or the hub's RateLimit: "api";r=0;t=55."""
    after, limit = headers.get("Retry-After", "").strip(), re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
    if after.isdigit():
        return float(after)
    with contextlib.suppress(TypeError, ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(after).timestamp() - time.time())
    return float(limit[1]) + 1 if limit else None


def select(tree: dict[str, tuple[int, str]], args: argparse.Namespace) -> list[str]:
    """The paths to fetch: those of --include; else all of a dataset, and of a model what a trainer reads: safetensors
    (the Hugging Face ones, where there are others too), configuration and tokenizer, all in the top folder."""

    def matching(paths, patterns):
        return [p for p in paths if any(fnmatch.fnmatchcase(p, pattern) for pattern in patterns)]  # * is also "/"

    weights = matching([p for p in tree if "/" not in p], ["*.safetensors"])
    pickles = [p for p in tree if p.endswith(PICKLES)]
    if args.include:
        paths = matching(tree, args.include)
    elif args.repo.startswith("datasets/"):
        paths = set(tree) - set(matching(tree, [".git*", "*.md", "*.py"]))
    elif pickles and not weights and not args.skip_model:
        raise UserError(
            f"{args.repo} has its weights only as pickles ({', '.join(pickles[:2])}), and only safetensors are loaded:"
            " convert them (transformers: from_pretrained, then save_pretrained), or give --skip-model for the rest"
        )
    else:
        ours = [p for p in weights if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", p)]
        paths = matching([p for p in tree if "/" not in p], TEXT.split("|")) + (ours or weights)
    if args.skip_model:
        paths = [p for p in paths if not p.endswith((".safetensors", ".safetensors.index.json", *PICKLES))]
    paths = sorted(set(paths) - set(matching(paths, args.exclude)))
    if not paths:
        raise UserError(f"{args.repo}: none of its {len(tree)} files is selected; it has {', '.join([*tree][:8])} ...")
    return paths


# ---- fetching


@dataclass
class File:
    url: str
    size: int
    oid: str  # sha256 (64 digits), or git's SHA-1 of the blob (40)
    home: Path  # where the content goes
    link: Path  # the name in the snapshot, or home itself
    part: Path
    mark: Path  # an empty file, not older than home if that has been verified

    def digest(self, fd: int, size: int):
        """The hash so far, of the first bytes on disk."""
        digest, at = hashlib.sha256() if len(self.oid) == 64 else hashlib.sha1(b"blob %d\0" % self.size), 0
        while at < size and (chunk := os.pread(fd, min(CHUNK, size - at), at)):
            digest.update(chunk)
            at += len(chunk)
        return digest

    def is_whole(self) -> bool:
        """Whether the content is in its place and right; read only if nobody has since it changed."""
        if _size(self.home) != self.size:
            return False
        if not self.mark.exists() or self.mark.stat().st_mtime_ns < self.home.stat().st_mtime_ns:
            with open(self.home, "rb") as f:
                return self.digest(f.fileno(), self.size).hexdigest() == self.oid
        return True


@dataclass
class Progress:
    total: int
    count: int
    done: int = 0  # bytes on disk
    fetched: int = 0  # bytes from the network
    files: int = 0
    note: str = ""  # what is amiss, and since when
    noted: float = -LINE_EVERY
    error: Exception | None = None
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, done: int = 0, fetched: int = 0, files: int = 0, note: str = "") -> None:
        """Called by every thread; raises the error of the first that failed, so that all end."""
        if self.error:
            raise self.error
        with self.lock:
            self.done, self.fetched, self.files = self.done + done, self.fetched + fetched, self.files + files
            if note:
                self.note, self.noted = note, time.monotonic()

    def line(self) -> str:
        seconds = time.monotonic() - self.began
        speed = self.fetched / max(seconds, 0.1)
        wait = (self.total - self.done) / max(speed, 1)
        left = (f"{wait / 60:.0f} min left" if wait > 90 else f"{wait:.0f} s left") if self.fetched and wait else ""
        share = self.done / max(self.total, 1)
        words = f"{_bytes(self.done)} of {_bytes(self.total)}", f"{_bytes(speed)}/s", left
        note = self.note if time.monotonic() - self.noted < LINE_EVERY else ""
        counts = f"{self.files} of {self.count} files", note
        return f"[{'#' * int(20 * share):20}] {100 * share:.0f} %, " + ", ".join(w for w in (*words, *counts) if w)


def _bytes(n: float) -> str:
    unit, name = next((u for u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if n >= u[0]), (1, "B"))
    return f"{n / unit:.{int(unit > 1)}f} {name}"


def _disk_error(error: OSError) -> Exception:
    what = f"{error.filename or constants.HF_HUB_CACHE}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failed(f"{what}; free some space, and {SAME}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return UserError(f"{what}; name a folder that you may write to, with --out or HF_HOME")
    return Failed(what)


def _write(fd: int, chunk: bytes, path: Path) -> None:
    try:
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]
    except OSError as e:  # no matter of the network's
        raise _disk_error(OSError(e.errno, e.strerror, str(path))) from None


def _open_part(part: Path) -> int | None:
    """-> the part's descriptor, locked for us, or None where somebody else is at it. On a file system without locks all
    write the same bytes to the same places, and still only the right content gets a name."""
    while True:
        fd = os.open(part, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            pass
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(part)):
                return fd
        os.close(fd)  # whoever held the lock has renamed it: look again


def _receive(hub: Hub, file: File, fd: int, progress: Progress) -> None:
    """Completes a part. A damaged one starts again from byte 0, once; Failed if that is damaged too."""
    for _ in range(2):
        have, tries = os.fstat(fd).st_size, 0
        digest = file.digest(fd, have)
        progress.add(have)
        os.lseek(fd, have, os.SEEK_SET)
        while have < file.size:
            trouble: Exception | str = f"{file.link.name} ends early"
            try:
                with hub.open(file.url, have) as answer:
                    if have and answer.status == 200:  # a server without ranges
                        progress.add(-have)
                        os.ftruncate(fd, 0)
                        have, digest = os.lseek(fd, 0, os.SEEK_SET), file.digest(fd, 0)
                    elif have and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                        break
                    while have < file.size and (chunk := answer.read1(min(CHUNK, file.size - have))):
                        _write(fd, chunk, file.part)
                        digest.update(chunk)
                        have, tries = have + len(chunk), 0
                        progress.add(len(chunk), len(chunk))
            except (OSError, http.client.HTTPException) as e:
                if getattr(e, "code", 0) == 416:  # the part is as long as the hub's file, or longer
                    break
                trouble = e
            if have < file.size:
                tries += 1
                seconds, why = hub.pause(trouble, tries, TRIES)
                progress.add(note=f"{why}: next try in {seconds:.0f} s")
                time.sleep(seconds)
        if have == file.size and digest.hexdigest() == file.oid:
            os.fsync(fd)
            return
        progress.add(-have, note=f"{file.link.name} is damaged: again from the start")
        os.ftruncate(fd, 0)
    raise Failed(f"{file.url}: what arrives is damaged, the second time too (its hash is not {file.oid}); try later")


def _settle(hub: Hub, file: File, progress: Progress) -> bool:
    """Brings one file into its place. False: somebody else is at it."""
    fd = _open_part(file.part)
    if fd is None:
        return False
    try:
        if file.is_whole():
            progress.add(file.size)
            os.unlink(file.part)
        else:
            _receive(hub, file, fd, progress)
            file.home.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # without locks, somebody else may have been faster
                os.replace(file.part, file.home)
            _sync(file.home.parent)
        file.mark.touch()
    finally:
        os.close(fd)
    if file.link != file.home:
        file.link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            file.link.symlink_to(os.path.relpath(file.home, file.link.parent))
    progress.add(files=1)
    return True


def _links_work(scratch: Path) -> bool:
    """Where they do not, a snapshot holds the files themselves, for the hub's own client too."""
    probe = scratch / f"link.{os.getpid()}"
    with contextlib.suppress(OSError):
        probe.symlink_to("nowhere")
        probe.unlink()
        return True
    return False


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some file systems cannot
        os.fsync(fd)
    os.close(fd)


def _note(path: Path, text: str, scratch: Path) -> None:
    """Writes a small file in one piece, for readers in other processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = scratch / f"{path.name}.{os.getpid()}"
    new.write_text(text, "utf-8")
    os.replace(new, path)


def _next(queue: deque[File]) -> File | None:
    with contextlib.suppress(IndexError):
        return queue.popleft()
    return None


def _work(hub: Hub, queue: deque[File], progress: Progress) -> None:
    """A thread. What another process is at goes to the end of the queue."""
    try:
        while file := _next(queue):
            if not _settle(hub, file, progress):
                queue.append(file)
                progress.add(note="waiting for a file that is being fetched already")
                time.sleep(0.3)
    except Exception as e:
        progress.error = progress.error or e


def _watch(threads: list[threading.Thread], progress: Progress) -> None:
    """Shows a bar until the threads have ended or one has failed. They are daemons: Ctrl-C leaves them behind."""
    terminal, shown = sys.stdout.isatty(), time.monotonic()
    for thread in threads:
        while thread.is_alive() and not progress.error:
            thread.join(0.1)
            if terminal:
                width = shutil.get_terminal_size().columns - 1
                print("\r\033[K" + progress.line()[:width], end="", flush=True)
            elif time.monotonic() - shown >= LINE_EVERY:
                shown = time.monotonic()
                print(progress.line(), flush=True)
    progress.note = progress.note if progress.error else ""
    print("\r\033[K" * terminal + progress.line(), flush=True)
    if progress.error:
        raise progress.error


def download(args: argparse.Namespace, command: str) -> None:
    """Fetches what the command line asks for. UserError or Failed, with one message, if that cannot be."""
    kind, repo, base = _folder_of(args.repo, args.revision)
    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set, so that nothing is fetched: unset it")
    if args.skip_model and kind == "datasets":
        raise UserError("--skip-model is for models: choose from a dataset with --include and --exclude")
    base = Path(args.out).expanduser() if args.out else base
    scratch = base / ".download"
    before = _record(scratch / "record.json") if args.out else {}
    if before and (before["repo"], before["revision"]) != (args.repo, args.revision):
        at = f"{before['repo']} at revision {before['revision']}"
        raise UserError(f"--out {args.out} holds {at}, not {args.repo} at {args.revision}: name another folder")
    hub = Hub(kind, repo)
    commit = before.get("commit") or _checked(
        hub.ask(f"revision/{quote(args.revision, safe='')}")[0], "sha", r"[0-9a-f]{40}"
    )
    tree = hub.tree(commit)
    folder, record = (base, "record.json") if args.out else (base / "snapshots" / commit, f"{commit}.json")
    paths = select(tree, args)
    scratch.mkdir(parents=True, exist_ok=True)
    plain = bool(args.out) or not _links_work(scratch)  # files in the folder itself, or links from it to blobs
    files = []
    for path in paths:
        (size, oid), link = tree[path], folder / path
        itself = plain or link.is_file() and not link.is_symlink()
        home = link if itself else base / "blobs" / oid
        name = hashlib.sha1(f"{path} {oid}".encode()).hexdigest() if itself else oid
        url = f"{hub.page}/resolve/{commit}/{quote(path)}"
        files.append(File(url, size, oid, home, link, scratch / f"{name}.part", scratch / f"{name}.ok"))
        if args.out and not before and home.exists() and _size(home) != size:
            raise UserError(f"{home} is there, and not as {repo} has it: name an empty folder with --out")

    progress = Progress(sum(f.size for f in files), len(files))
    need = sum(max(f.size - max(_size(f.part), 0), 0) for f in files if _size(f.home) != f.size)
    print(f"{args.repo} at {commit}: {len(files)} files, {_bytes(progress.total)}, {_bytes(need)} of it to fetch")
    free = shutil.disk_usage(next(p for p in (base.absolute(), *base.absolute().parents) if p.is_dir())).free
    if need > free:
        raise Failed(
            f"{base}: the disk has {_bytes(free)} free and the download needs {_bytes(need)}: free some space, choose"
            " another disk with --out or HF_HOME, or fetch less with --include or --exclude"
        )
    asked = {str(f.link.relative_to(folder)): f.size for f in files}
    what = {"repo": args.repo, "revision": args.revision, "commit": commit, "command": command, "files": asked}
    _note(scratch / record, json.dumps(what, indent=1), scratch)
    queue = deque(sorted(files, key=lambda f: f.size))  # small ones first: a refusal shows at once
    count = min(args.jobs, len(files))
    threads = [threading.Thread(target=_work, args=(hub, queue, progress), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    _watch(threads, progress)
    if not args.out and args.revision != commit:
        _note(base / "refs" / args.revision, commit, scratch)
    print(f"Verified, in {folder}\nRevision {commit}")
    if kind == "models":
        shown = shlex.quote(args.out or repo + f"@{args.revision}" * (args.revision != "main"))
        weights = any(p.endswith(".safetensors") for p in paths)
        print(f"Use it: {f'--weights {shown} ' * weights}--tokenizer {shown}")


# ---- the command line


def _jobs(text: str) -> int:
    if not re.fullmatch(r"[1-9]|[1-5]\d|6[0-4]", text):
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to 64")
    return int(text)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; --help lists all flags (none takes a token, which ps would show: set HF_TOKEN)")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python download.py",
        description="Fetches weights, tokenizers and data from the Hugging Face hub, verified and resumable.",
        epilog="Type the same again after any interruption: it goes on from the last byte. Gated repositories need a"
        " token: hf auth login, or the variable HF_TOKEN. HF_HOME says where the cache is, HF_ENDPOINT which hub.",
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("repo", nargs="?", default=DEFAULT, metavar="REPO", help=f"ORG/NAME or datasets/ORG/NAME (default: {DEFAULT})")
    flag("--revision", default="main", metavar="R", help="branch, tag or commit (default: main)")
    flag("--skip-model", action="store_true", help="configuration and tokenizer only, no weights")
    several = {"action": "append", "default": [], "metavar": "PATTERN"}
    only = "only files whose path matches (* is anything); may be repeated (default: what a trainer reads)"
    flag("--include", **several, help=only)
    flag("--exclude", **several, help="but not these; may be repeated")
    place = "a folder for plain files, which stays at the commit it began with (default: the cache in HF_HOME)"
    flag("--out", default="", metavar="DIR", help=place)
    flag("--jobs", type=_jobs, default=8, metavar="N", help="files at a time (default: 8)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command line -> exit status: 0, 2 for a user's mistake, 1 for the network or the disk, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        download(_make_parser().parse_args(argv), shlex.join(["python", "download.py", *argv]))
        return 0
    except BrokenPipeError:  # as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, Failed, OSError) as e:
        e = _disk_error(e) if isinstance(e, OSError) else e
        text = re.sub(r"hf_\w{6,}", "hf_***", str(e))  # it may be among the words that were typed
        print(f"error: {text}", file=sys.stderr)
        return 2 if isinstance(e, UserError) else 1
    except KeyboardInterrupt:
        print(f"\nInterrupted; {SAME}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
