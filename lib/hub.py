"""Hub ids on this disk, the check of downloads, errors of the hub, and the guard of its token. Imports no torch."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from lib.errors import Failure, Message, UserError
from lib.files import read_json, write_json
from lib.progress import advance

LIBRARIES = "huggingface_hub", "httpx", "httpx2"  # whose errors come from the hub or the network
BAD_NAMES = (
    r"(^|[/\\])\.{0,2}([/\\]|$)",  # a part that is empty, . or ..
    r"(^|[/\\])[a-zA-Z]:",  # a drive of Windows
    r"[\0-\x1f\x7f]",
)


def local_path(spec: str, flag: str) -> Path:
    """The folder or file that a flag names: a path, or ORG/NAME, NAME or either with @REVISION for a snapshot in
    HF_HOME's cache. UserError with the command to run, if there is none, or if files are missing or damaged; only the
    first process of a job looks for damage."""
    from multiprocessing import parent_process  # here, because it would double the time of --help

    path = Path(spec).expanduser()
    if not path.exists():
        path = find_snapshot(spec, flag)
    is_first = os.environ.get("RANK", "0") == "0" and parent_process() is None
    record = read_json(record_of(path))
    if is_first and (damaged := find_damage(path, record)):
        raise UserError(
            f"{flag} {spec}: {len(damaged)} files are missing or damaged in {path} ({damaged[0]} ...): continue the"
            f" download with: {record.get('command') or _command_for(path)}"
        )
    return path


def find_snapshot(spec: str, flag: str) -> Path:
    """The snapshot of HF_HOME's cache for ORG/NAME or ORG/NAME@REVISION. UserError with the command to run, if there is
    none."""
    from huggingface_hub import constants, errors, snapshot_download

    name, _, revision = spec.partition("@")
    where = split_name(name) | {"revision": revision or None}
    try:
        # No patterns: find_damage decides whether the snapshot is complete.
        return Path(snapshot_download(**where, local_files_only=True, allow_patterns=[]))
    except errors.HFValidationError:
        reason = ", and not the name of a repository"
    except errors.LocalEntryNotFoundError:
        reason = f", and no download of it in {constants.HF_HUB_CACHE}: python download.py {name}"
        reason += f" --revision {revision}" * bool(revision)
        folder = Path(spec).expanduser().parent
        if folder.name == "runs" or "/" in spec and folder.is_dir():
            names = sorted(path.name for path in folder.glob("*"))
            reason = f"; {folder} has {', '.join(names[:20]) or 'none'}"
    raise UserError(f"{flag} {spec}: there is no folder or file of this name{reason}")


def split_name(name: str) -> dict[str, str]:
    """ORG/NAME or datasets/ORG/NAME -> huggingface_hub's arguments for it"""
    repo = name.removeprefix("datasets/")
    return {"repo_id": repo, "repo_type": "model" if repo == name else "dataset"}


def record_of(folder: Path) -> Path:
    """The file that records what download.py put into a folder: the hashes of the hub, and size, time of change and
    hash of each file that was verified."""
    if folder.parent.name == "snapshots":
        return folder.parents[1] / "verified" / f"{folder.name}.json"
    return folder / ".cache" / "huggingface" / "verified.json"


def write_record(folder: Path, record: dict) -> None:
    record_of(folder).parent.mkdir(parents=True, exist_ok=True)
    write_json(record_of(folder), record)


def _repo_of(snapshot: Path) -> str:
    """models--ORG--NAME/snapshots/COMMIT -> ORG/NAME"""
    return snapshot.parents[1].name.removeprefix("models--").replace("--", "/")


def _command_for(snapshot: Path) -> str:
    return f"python download.py {_repo_of(snapshot)} --revision {snapshot.name}"


def describe_unverified(folder: Path) -> str:
    """A note for the log if the files of a snapshot were never compared with the hub's hashes; else empty."""
    if folder.parent.name != "snapshots" or read_json(record_of(folder)):
        return ""
    return f"{folder}: its files exist with the right sizes, but were not verified: {_command_for(folder)} --verify"


def find_damage(folder: Path, record: dict) -> list[str]:
    """Names of a downloaded folder's files that are missing or damaged. A file is hashed unless its size and time of
    change equal download.py's record, which then gets the new ones. Without a record, the files that a snapshot
    links to must exist, with the sizes of the hub's listing if huggingface_hub has kept that."""
    if not record:
        return _find_missing(folder) if folder.parent.name == "snapshots" else []
    verified, known = {}, record.get("verified", {})
    for name, expected in record["hashes"].items():
        path = folder / name
        if path.is_file():
            state = [path.stat().st_size, path.stat().st_mtime_ns, expected]
            if state == known.get(name) or hash_file(path, *state) == expected:
                verified[name] = state
    if verified != known:
        with contextlib.suppress(OSError):  # a cache that only others may write
            write_record(folder, record | {"verified": verified})
    return sorted(record["hashes"].keys() - verified.keys())


@cache  # once per process, also if the record cannot be written
def hash_file(path: Path, size: int, changed: int, expected: str) -> str:
    """sha256, or git's SHA-1 of a blob if the expected hash is shorter."""
    from huggingface_hub.utils import sha

    advance()
    with open(path, "rb") as file:
        return sha.sha_fileobj(file).hex() if len(expected) == 64 else sha.git_hash(file.read())


def _find_missing(snapshot: Path) -> list[str]:
    from huggingface_hub import errors, get_cached_repo_tree

    repo, sizes = split_name(_repo_of(snapshot)), {}
    with contextlib.suppress(errors.CachedRepoTreeNotFoundError):
        tree = get_cached_repo_tree(**repo, revision=snapshot.name, cache_dir=snapshot.parents[2])
        sizes = {snapshot / file.path: file.size for file in tree}
    return [
        str(path.relative_to(snapshot))
        for path in snapshot.rglob("*")
        if not path.exists() or path in sizes and path.stat().st_size != sizes[path]
    ]


# ---- the hub

LOG_IN = "log in (`hf auth login`, or set HF_TOKEN) as a user who may read it"
# What a user can do about an error: by its class in huggingface_hub.errors, or by the status of the hub's answer.
REFUSALS = {
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE forbids downloads: unset it",
    "HFValidationError": "{repo}: not the name of a repository, as ORG/NAME or datasets/ORG/NAME",
    "GatedRepoError": "{repo} is gated: accept its licence at {page}, then {log_in}",
    "RevisionNotFoundError": "the revision does not exist: {page}/tree/main lists the branches and tags",
    "RepositoryNotFoundError": "there is no {page}, or it is private: check the spelling, or {log_in}",
    401: "the hub answers {status} for {repo}: {log_in}",
    403: "the hub answers {status} for {repo}: {log_in}",
    404: "the hub answers 404 for {file}, which {page} lists: leave it out, or name another revision",
}


def is_busy(error: Exception) -> bool:
    """Whether an error says that the hub is busy, or that the network fails: for `retry`."""
    from huggingface_hub.errors import HTTPError

    status = getattr(getattr(error, "response", None), "status_code", 500)
    return isinstance(error, HTTPError) and (status in (408, 429) or status >= 500)


def refuse_names(names: Iterable[str], repo: str) -> None:
    """UserError if a listing has a name that could lead out of the folder of a download."""
    for name in names:
        if any(re.search(pattern, name) for pattern in BAD_NAMES):
            raise UserError(f"{repo} lists a file {name!r}, which leads out of a folder")


@contextlib.contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Raises errors of huggingface_hub as one message. repo: ORG/NAME or datasets/ORG/NAME. Errors of the disk,
    which have an errno, and bugs of ours pass unchanged."""
    try:
        yield
    except Exception as error:
        library = type(error).__module__.partition(".")[0]
        from_hub = library in LIBRARIES or isinstance(error, (OSError, json.JSONDecodeError))
        if getattr(error, "errno", None) or not from_hub:
            raise
        raise _describe_hub_error(error, repo) from error


def _describe_hub_error(error: Exception, repo: str) -> Message:
    """The message for an error of huggingface_hub, without the server's text, which could repeat the token."""
    from huggingface_hub import constants

    if isinstance(error, FileNotFoundError):
        error = error.__cause__ or error
    page, response = f"{constants.ENDPOINT}/{repo}", getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    for kind in (*(cls.__name__ for cls in type(error).__mro__), status):
        if kind in REFUSALS:
            path = unquote(response.url.path) if response else ""
            file = path.partition("/resolve/")[2].partition("/")[2] or "a file"
            return UserError(REFUSALS[kind].format(repo=repo, page=page, status=status, file=file, log_in=LOG_IN))
    reason = f"the hub answers {status} {response.reason_phrase}" if status else f"no answer of a hub: {error}"
    return Failure(f"{page}: {reason}; check the network and HF_ENDPOINT, or repeat the command later")


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
