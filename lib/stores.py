"""Addresses of files: hf://datasets/ORG/NAME[@REVISION]/PATH on the hub, and addresses of fsspec's other file systems,
for example s3://BUCKET/PATH. PATH is a file, a folder, or a pattern with * (within a name) and **. Names without ://
are local.

Packages, login and account are matters of each file system: s3fs reads AWS's files and variables, for example."""

import contextlib
import glob
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lib.errors import Failure, Message, UserError
from lib.hub import guard_token, hub_errors

HUB = "hf://datasets/"  # the address of a data set on the hub begins with it
ADDRESS = re.compile(rf"{HUB}([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")  # ORG/NAME, revision, path
BUFFER = 2**20  # bytes that are read together
# Names, in entries of file systems, of a value that changes with a file's content. The most reliable one is first.
VERSIONS = (
    "blob_id", "ETag", "etag", "md5Hash", "mtime",
    "LastModified", "Last-Modified", "last_modified", "created",
)  # fmt: skip


def list_files(spec: str, flag: str) -> tuple[object, list[tuple[str, int, str]]]:
    """-> (the fsspec file system of an address, None for a path; name, size and version of a file, of the matches of a
    pattern, or of the files in a folder). size: 0 if the listing has none. version: changes with the content; empty if
    the file system tells none."""
    address, is_local = spec, "://" not in spec
    if is_local:
        path = Path(spec).expanduser().absolute()
        folder = next(parent for parent in (path, *path.parents) if parent.exists())
        # Names of existing folders above a pattern may hold * ? and [].
        address = str(path if path == folder else Path(glob.escape(str(folder)), path.relative_to(folder)))
    with store_errors(spec):
        store, path = (_open_hub if spec.startswith("hf://") else _open_store)(address, flag)
        info = find_info(store, path)  # a name may hold * ? and []
        if info and info["type"] != "directory":
            infos = [info]
        else:
            infos = store.glob(glob.escape(path) + "/*" if info else path, detail=True).values()
    entries = []
    for info in infos:
        if info["type"] != "directory":
            name = info["name"] if is_local else store.unstrip_protocol(info["name"])
            if not isinstance(info["size"], int | None):  # a hub may list anything
                raise UserError(f"{name}: its listed size is {info['size']!r:.40}, which is no number of bytes")
            entries.append((name, info["size"] or 0, next((str(info[key]) for key in VERSIONS if info.get(key)), "")))
    return None if is_local else store, entries


def find_info(store, path: str) -> dict | None:
    """The entry of a file or folder; None if there is none. `store.exists` would take a cut connection for a missing
    file, and fsspec calls a file missing if a web server does not answer."""
    try:
        return store.info(path)
    except (FileNotFoundError, NotADirectoryError) as e:
        if path.startswith("http") and getattr(e.__cause__, "status", 0) not in (403, 404, 410):
            raise
        return None


def _open_store(spec, flag):
    from fsspec import url_to_fs

    try:
        return url_to_fs(spec)
    except (ImportError, ValueError) as e:  # a missing package; an unknown protocol, or one without an account
        package = getattr(e.__cause__ or e, "name", "")
        install = f": {sys.executable} -m pip install {package}" * bool(package)
        raise UserError(f"{flag} {spec}: {e}{install}") from None


def _open_hub(spec, flag):
    """The path names the data set's newest commit, or the commit of the revision."""
    from huggingface_hub import HfApi, HfFileSystem

    address = ADDRESS.fullmatch(spec)
    if not address:
        raise UserError(f"{flag} {spec}: expected {HUB}ORG/NAME[@REVISION]/PATH")
    repo, revision, path = address.groups()
    guard_token()
    commit = HfApi().dataset_info(repo, revision=revision or "main").sha
    store, path = HfFileSystem(skip_instance_cache=True), f"datasets/{repo}@{commit}/{path}"
    store.resolve_path(path)  # the store remembers the answer
    return store, path


def open_file(store, name: str, in_sequence: bool) -> io.BufferedIOBase:
    """Opens a path (store: None) or an address for reading, on the hub as one stream if it is read in sequence."""
    if not store:
        return open(name, "rb")
    if name.startswith("http"):  # the server may give whole files only
        file = tempfile.TemporaryFile()  # noqa: SIM115
        store.get_file(name, file)
        file.seek(0)
        return file
    raw = store.open(name, block_size=0 if in_sequence and name.startswith(HUB) else None)
    return io.BufferedReader(raw, BUFFER)  # the readline of some file systems gives nothing


@contextlib.contextmanager
def store_errors(address: str) -> Iterator[None]:
    """Raises errors of an address's store as one message. Bugs of ours (a TypeError) pass unchanged."""
    repo = ADDRESS.fullmatch(address)
    try:
        with hub_errors(f"datasets/{repo[1]}") if repo else contextlib.nullcontext():
            yield
    except Exception as error:
        is_ours = type(error).__module__ == "builtins" and not isinstance(error, OSError)
        if is_ours or repo or "://" not in address or isinstance(error, Message):
            raise
        cause = error.__cause__ or error
        status = getattr(cause, "status", 0)  # of a web server
        is_refusal = 400 <= status < 500 and status not in (408, 429) or "Credential" in type(error).__name__
        is_missing = not status and isinstance(error, (FileNotFoundError, PermissionError))
        kind = UserError if is_refusal or is_missing and not isinstance(error.__cause__, OSError) else Failure
        raise kind(f"{address}: {cause!r}") from None
