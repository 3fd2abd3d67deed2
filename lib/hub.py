"""Hub ids on this disk, the check of downloads, errors of the hub, and the guard of its token. Imports no torch."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.errors import Failure, Message, UserError
from lib.files import read_json, write_json


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
