"""Error messages, exit statuses, the check of downloads, and helpers that many files share. Import it before torch.

If Python lacks the requirements, the import restarts the script with .venv's Python, or prints how to create .venv."""

import argparse
import contextlib
import ctypes
import difflib
import errno
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
# OpenMP threads that wait for work spin and keep their cores. If another process needs these cores, training becomes 10
# to 50 times slower, so they spin only briefly. libgomp reads this when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
VERSION = "0.2.0"  # CHANGELOG.md lists its changes


def human(n: float, units: str = " KMB") -> str:
    """6889410560 -> 6.89 B"""
    if n >= 999.5 and units[1:]:
        return human(n / 1000, units[1:])
    return f"{n:.3g} {units[0]}".strip()


def amount(size: float) -> str:
    """Bytes: 2.1 MB, 83 GB, 4.9 TB"""
    return f"{human(size, ' kMGT')}B"


def printable(text: object) -> str:
    """The text with control characters escaped as in repr, because names from files and other machines may contain
    terminal commands. Line feeds and tabs stay."""
    return re.sub("[\0-\b\v-\x1f\x7f-\x9f\ud800-\udfff]", lambda match: repr(match[0])[1:-1], str(text))


class Message(Exception):
    """An error that is reported as one message, without a traceback."""

    def __str__(self) -> str:
        """Hides the hub's tokens, which a user may have typed as an argument."""
        return re.sub(r"hf_[A-Za-z0-9]{20,}", "hf_***", printable(super().__str__()))


class UserError(Message):
    """A user's mistake: exit status 2."""


class RankError(UserError):
    """A UserError that may occur on one rank only, which must then report it."""


class Failure(Message):
    """A failure that is not the user's mistake, for example a silent hub or a non-finite loss: status 1."""


class RankFailure(Failure):
    """A Failure that may occur on one rank only, which must then report it."""


class Parser(argparse.ArgumentParser):
    """Raises UserError instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists all flags")


# The errors that a user's mistake in a path raises.
PATH_MISTAKES = errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG
FULL_DISK = errno.ENOSPC, errno.EDQUOT


def nearest(word: str, names: Iterable[str]) -> str:
    """The known name that is spelt most like a word; empty if none is near."""
    return "".join(difflib.get_close_matches(word, names, 1, 0.8))


def free_space(path: Path) -> tuple[int, Path]:
    """The free bytes of the disk that holds a path, which need not exist, and the nearest folder that does."""
    folder = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(folder).free, folder


def describe_error(error: Exception) -> tuple[int, str, bool]:
    """-> (exit status, message, whether the error may have occurred on this rank only). Prints the traceback of an
    unexpected error."""
    if isinstance(error, Message):
        return 2 if isinstance(error, UserError) else 1, str(error), isinstance(error, (RankError, RankFailure))
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return 1, f"the disk is full: free some space, then run the same command again: {error}", False
    if isinstance(error, OSError) and error.filename:
        return 2 if error.errno in PATH_MISTAKES else 1, f"a file or folder cannot be used: {error}", False
    traceback.print_exception(error)
    return 1, f"rank {os.environ.get('RANK', 0)} on {platform.node()}: {type(error).__name__}: {error}", True


def say_error(message: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be on a disk that is full
        over_progress = "\r\033[K" * os.isatty(2)
        print(f"{over_progress}error: {printable(message)}", file=sys.stderr)


def exit_status(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Calls main(argv) and reports its error -> its result, or the error's status: 2 for a user error, 130 for Ctrl-C,
    141 for a closed pipe, 1 for anything else. Only rank 0 reports a user error that all ranks have."""
    try:
        status = main(argv) or 0
        with contextlib.suppress(BrokenPipeError):  # nobody reads the output, but the work is done
            sys.stdout.flush()
        return status
    except SystemExit as end:  # raised by argparse after --help
        return end.code or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # for example `| head`; the shell reports 141 after SIGPIPE
        return 141
    except Exception as error:
        status, message, alone = describe_error(error)
    if status == 1 or alone or os.environ.get("RANK", "0") == "0":
        say_error(message)
    return status


def check_words(parse: Callable[[list[str]], object]) -> None:
    """Ends the process if parse(argv) refuses the arguments or prints --help. Scripts call this before they import
    torch, which takes seconds."""
    run_script(lambda argv: -bool(parse(argv)))


def run_script(main: Callable[[list[str]], int | None]) -> None:
    """Ends the process with main's exit status, unless it is negative. Skips the interpreter's shutdown, which takes
    seconds and may be aborted by gloo's threads (pytorch pull request 179291)."""
    status = exit_status(main, sys.argv[1:])
    if status < 0:
        return
    with contextlib.suppress(OSError):  # exit_status has reported it
        sys.stdout.flush()
    os._exit(status)


def write_whole(path: Path, text: str, sync: bool = False) -> None:
    """Replaces a file atomically: a reader sees the old content or the new one. sync: flush it to the disk first."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict:
    """The object in a JSON file; {} if the file is missing, cannot be read, or holds something else."""
    try:
        return read_object(path)
    except UserError:
        return {}


# ---- files that the user or the hub provides


def describe_content(head: bytes) -> str:
    """Names a file's content by its first bytes, if it is a pickle, a web page or a git-LFS pointer; else empty."""
    again = "`python download.py ORG/NAME`"
    kinds = {
        b"version https://git-lfs": f"a git-LFS pointer, not the file: run `git lfs pull` there, or {again}",
        rb"\s*<(!doctype|html|\?xml)": f"an HTML or XML page: the download went wrong, repeat it with {again}",
        b"PK\3\4|\x80[\2-\5]": "a pickle, which can run code",
    }
    return "".join(kind for pattern, kind in kinds.items() if re.match(pattern, head, re.IGNORECASE))


def read_file(path: Path) -> bytes:
    """The content of a configuration or tokenizer file. UserError if it cannot be read, or is something else."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    if wrong := describe_content(data[:512]):
        raise UserError(f"{path} is {wrong}")
    return data


def read_object(path: Path) -> dict:
    """The object in a JSON file. UserError if there is none."""
    try:
        value = json.loads(read_file(path))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is damaged: it is not JSON ({e})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object")
    return value


# ---- downloads


def local_path(spec: str, flag: str) -> Path:
    """The folder or file that a flag names: a path, or ORG/NAME, NAME or either with @REVISION for a snapshot in
    HF_HOME's cache. UserError with the command to run, if there is none, or if files are missing or damaged."""
    path = Path(spec).expanduser()
    if not path.exists():
        path = _find_snapshot(spec, flag)
    if damaged := find_damage(path):
        name = path.parents[1].name.replace("models--", "").replace("--", "/")
        command = read_json(record_of(path)).get("command", f"python download.py {name} --revision {path.name}")
        raise UserError(
            f"{flag} {spec}: {len(damaged)} files are missing or damaged in {path} ({damaged[0]} ...): the download is"
            f" incomplete; continue it with: {command}"
        )
    return path


def _find_snapshot(spec: str, flag: str) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    name, _, revision = spec.partition("@")
    kind, repo = split_name(name)
    try:
        # No patterns: find_damage decides whether the snapshot is complete.
        folder = snapshot_download(
            repo, repo_type=kind, revision=revision or None, local_files_only=True, allow_patterns=[]
        )
        return Path(folder)
    except errors.HFValidationError:
        raise UserError(f"{flag} {spec}: no such folder or file, and not the name of a repository") from None
    except errors.LocalEntryNotFoundError:
        command = f"python download.py {name}" + f" --revision {revision}" * bool(revision)
        missing = f"no such folder or file, and no download of it in {constants.HF_HUB_CACHE}"
        raise UserError(f"{flag} {spec}: {missing}: {command}") from None


def split_name(name: str) -> tuple[str, str]:
    """ORG/NAME or datasets/ORG/NAME -> (model or dataset, ORG/NAME)"""
    repo = name.removeprefix("datasets/")
    return "model" if repo == name else "dataset", repo


def record_of(folder: Path) -> Path:
    """The file that records what download.py put into a folder, and which of it was verified."""
    if folder.parent.name == "snapshots":
        return folder.parents[1] / "verified" / f"{folder.name}.json"
    return folder / ".cache" / "huggingface" / "verified.json"


def find_damage(folder: Path) -> list[str]:
    """Names of a downloaded folder's files that are missing, or differ from the hub's. A file is hashed unless its hash
    was right before and its size and time of change are the same. The expected hashes come from download.py's record,
    and in a cache that other programs filled from the names of its blobs: sha256, or git's SHA-1 of a blob."""
    place = record_of(folder)
    record = read_json(place)
    verified = record.get("verified", {})
    links = [p for p in folder.rglob("*") if p.is_symlink()] if folder.parent.name == "snapshots" else []
    blobs = {str(p.relative_to(folder)): p.readlink().name for p in links}
    hashes = {name: blob for name, blob in blobs.items() if len(blob) in (40, 64)} | record.get("hashes", {})

    def verify(name: str) -> list | None:
        """-> size, time of the last change and hash, if the file is right"""
        path, expected = folder / name, hashes[name]
        if not path.is_file():
            return None
        state = [path.stat().st_size, path.stat().st_mtime_ns, expected]
        if verified.get(name) == state:
            return state
        from huggingface_hub.utils import sha  # only here: other folders need not wait for this import

        with open(path, "rb") as file:
            found = sha.sha_fileobj(file).hex() if len(expected) == 64 else sha.git_hash(file.read())
        return state if found == expected else None

    with ThreadPoolExecutor() as pool:
        states = dict(zip(hashes, pool.map(verify, hashes), strict=True))
    if states != verified:
        with contextlib.suppress(OSError):  # a cache that only others may write: it is verified each time
            place.parent.mkdir(exist_ok=True)
            write_json(place, record | {"verified": states})
    return [name for name, state in states.items() if state is None]


@contextlib.contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Raises errors of huggingface_hub as one message. repo: ORG/NAME or datasets/ORG/NAME."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Message) or getattr(error, "errno", None):
            raise
        raise _describe_hub_error(error, repo) from None


def _describe_hub_error(error: Exception, repo: str) -> Message:
    """The message for an error of huggingface_hub, without the server's text, which could repeat the token."""
    from huggingface_hub import constants, errors

    if isinstance(error, FileNotFoundError):
        error = error.__cause__ or error
    log_in = "log in (`hf auth login`, or set HF_TOKEN) as a user who may read it"
    page, status = f"{constants.ENDPOINT}/{repo}", getattr(getattr(error, "response", None), "status_code", 0)
    messages = {
        errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE is set, so nothing can be downloaded: unset it",
        errors.HFValidationError: f"{repo}: not the name of a repository; expected ORG/NAME or datasets/ORG/NAME",
        errors.GatedRepoError: f"{repo} is gated: accept its licence at {page}, then {log_in}",
        errors.RevisionNotFoundError: f"{repo} has no such revision: its branches and tags are at {page}/tree/main",
        errors.RepositoryNotFoundError: f"there is no {page}, or it is private: check the spelling, or {log_in}",
    }
    for kind, message in messages.items():
        if isinstance(error, kind):
            return UserError(message)
    if status in (401, 403, 404):
        return UserError(f"the hub answers {status} for {repo}: its token (HF_TOKEN or the login) is refused; {log_in}")
    reason = f"the hub answers {status} {error.response.reason_phrase}" if status else f"no answer of a hub: {error}"
    return Failure(f"{page}: {reason}; check the network and HF_ENDPOINT, or try later: the same command resumes")


def guard_token() -> None:
    """From now on huggingface_hub sends the token to the hub alone. On its own, it sends the token to any host that a
    listing names for its next page."""
    from huggingface_hub import constants, get_session, set_client_factory

    session = get_session()

    def drop_elsewhere(request) -> None:
        if not str(request.url).startswith(f"{constants.ENDPOINT}/"):
            request.headers.pop("Authorization", None)

    hooks = {"request": [*session.event_hooks["request"], drop_elsewhere]}
    set_client_factory(lambda: type(session)(event_hooks=hooks, follow_redirects=True, timeout=None))


def read_ahead(items: Iterator, count: int) -> Iterator:
    """The same items, computed by a thread that starts immediately and stays up to `count` + 1 items ahead. Closing the
    iterator ends the thread."""
    pool = ThreadPoolExecutor(1)
    ready = deque(pool.submit(next, items) for _ in range(count + 1))

    def take() -> Iterator:
        try:
            while True:
                item = ready.popleft().result()
                ready.append(pool.submit(next, items))
                yield item
        except StopIteration:
            return
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    return take()


def _use_venv() -> None:
    required = "torch numpy safetensors huggingface_hub tokenizers sentencepiece jinja2 matplotlib"
    missing = [name for name in required.split() if importlib.util.find_spec(name) is None]
    if not missing:
        return
    venv = ROOT / ".venv"
    python = venv / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != venv.resolve():
        os.execv(python, [str(python), *sys.argv])
    say_error(f"This Python ({sys.executable}) lacks {', '.join(missing)}: run `bash launch.sh setup` first")
    sys.exit(2)


def end_with_torchrun() -> None:
    """Makes the kernel send SIGTERM to this rank when its parent torchrun, if any, ends; otherwise it would train
    unsupervised. Call this from the main thread, before the import of torch, which takes seconds."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG (prctl.h)


_use_venv()
