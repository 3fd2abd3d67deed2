"""Hub ids on this disk, errors of the hub, and the guard of its token. Imports no torch."""

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

from base.errors import Failure, UserError

UNFINISHED = ".cache/huggingface/unfinished"  # in a download: the command that completes and verifies it
LIBRARIES = {"huggingface_hub", "httpx", "httpx2"}  # they read the answers of the hub and the network


def local_path(spec: str, flag: str) -> Path:
    """The folder or file that a flag names: a path, or ORG/NAME, NAME or either with @REVISION for a snapshot in
    HF_HOME's cache. UserError with the command to run, if there is none, or if its download is not complete: files are
    missing, have the wrong size, or have not been verified."""
    path = Path(spec).expanduser()
    command = ""
    if not path.exists():
        path, command = find_snapshot(spec, flag)
    if (path / UNFINISHED).exists():
        command = (path / UNFINISHED).read_text()
    if command:
        raise UserError(f"{flag} {spec} is not complete: continue the download with: {command}")
    return path


def find_snapshot(spec: str, flag: str) -> tuple[Path, str]:
    """-> (the snapshot of HF_HOME's cache for ORG/NAME or ORG/NAME@REVISION; the command that completes it, if files
    are missing or have the wrong size). UserError if there is none."""
    from huggingface_hub import constants, errors, snapshot_download

    name, _, revision = spec.partition("@")
    command = f"python download.py {name}"
    try:
        # No patterns: a user may want only a part of a repository.
        where = split_name(name) | {"revision": revision or None}
        path = Path(snapshot_download(**where, local_files_only=True, allow_patterns=[]))
    except (errors.HFValidationError, errors.LocalEntryNotFoundError):
        command += f" --revision {revision}" * bool(revision)
        missing = f"there is no folder or file of this name, and no download of it in {constants.HF_HUB_CACHE}"
        raise UserError(f"{flag} {spec}: {missing}: {command}") from None
    for file, size in sizes_of(name, revision=path.name).items():
        link = path / file
        if os.path.lexists(link) and not (link.exists() and link.stat().st_size == size):
            return path, f"{command} --revision {path.name}"
    return path, ""


def sizes_of(repo: str, **where) -> dict[str, int]:
    """The size of each file of a downloaded repository, as huggingface_hub has kept them; empty if it has not."""
    from huggingface_hub import errors, get_cached_repo_tree

    try:
        return {file.path: file.size for file in get_cached_repo_tree(**split_name(repo), **where)}
    except errors.CachedRepoTreeNotFoundError:
        return {}


def split_name(name: str) -> dict[str, str]:
    """ORG/NAME or datasets/ORG/NAME -> huggingface_hub's arguments for it"""
    repo = name.removeprefix("datasets/")
    return {"repo_id": repo, "repo_type": "model" if repo == name else "dataset"}


# ---- the hub

# The remedies of errors, by an error's class in huggingface_hub.errors, or by the status of the hub's answer.
REFUSALS = {
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE forbids downloads: unset it",
    "HFValidationError": "{repo}: not the name of a repository, as ORG/NAME or datasets/ORG/NAME",
    "GatedRepoError": "{repo} is gated: accept its licence at {page}, then log in: `hf auth login`, or HF_TOKEN",
    "RevisionNotFoundError": "the revision does not exist: {page}/tree/main lists the branches and tags",
    "RepositoryNotFoundError": "there is no {page}, or it is private: check the name, or log in (`hf auth login`)",
    401: "the hub answers {status} for {repo}: log in as a user who may read it: `hf auth login`, or HF_TOKEN",
    404: "the hub answers 404 for a file that {page} lists: leave it out, or name another revision",
}
REFUSALS[403] = REFUSALS[401]


def is_busy(error: Exception) -> bool:
    """Whether an error says that the hub is busy, or that the network fails: for `retry`."""
    from huggingface_hub.errors import HTTPError

    status = getattr(getattr(error, "response", None), "status_code", 500)
    return isinstance(error, HTTPError) and (status in (408, 429) or status >= 500)


@contextlib.contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Raises any error of huggingface_hub as one message, because an answer of a hub may have any content. repo:
    ORG/NAME or datasets/ORG/NAME. Errors of the disk, which have an errno, and bugs of ours pass unchanged."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:
        names = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
        if getattr(error, "errno", None) or LIBRARIES.isdisjoint(name.partition(".")[0] for name in names):
            raise
        cause = (error.__cause__ or error) if isinstance(error, FileNotFoundError) else error
        page, response = f"{constants.ENDPOINT}/{repo}", getattr(cause, "response", None)
        status = getattr(response, "status_code", 0)
        kinds = [*(cls.__name__ for cls in type(cause).__mro__), status]
        # Without the server's text, which could repeat the token.
        if refusal := next((REFUSALS[kind] for kind in kinds if kind in REFUSALS), ""):
            raise UserError(refusal.format(repo=repo, page=page, status=status)) from error
        reason = f"the hub answers {status} {response.reason_phrase}" if status else repr(cause)[:500]
        raise Failure(f"{page}: {reason}; check the network and HF_ENDPOINT, or repeat the command later") from error


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
