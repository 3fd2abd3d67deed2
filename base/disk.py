"""Files: JSON objects, atomic writes, retries, free space, kinds of content by their first bytes, reading ahead; and
the progress that this process reports to the watchdog (job/watchdog.py). Imports no torch.

Whatever moves bytes or rows calls `advance` as it goes: loading, hashing, saving, exporting, tokenizing, downloading.
The watchdog trusts only these calls, because the kernel counts neither reads of mapped files nor traffic of GPUs. A
worker process reports nothing: its parent does, when a result arrives."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from base.errors import Failure, Message, UserError

BLOCK = 2**24  # bytes per read when checksums are computed
SAMPLE, SAMPLE_BLOCK = 2**27, 2**16  # bytes of all files, and of a file at a place, that sample_digest reads
MANY = 256  # files; of more, one block of each may do
logger = logging.getLogger("flatland")
ROOT = Path(__file__).parent.parent  # the checkout
VERSION = "0.3.0"  # CHANGELOG.md lists its changes
LEASE = 120.0  # seconds without renewal after which another process may take a lock
SUBSTITUTES = {  # first bytes -> a content that was stored instead of a file
    b"version https://git-lfs": "a git-LFS pointer, not the file: run `git lfs pull` there",
    rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml)": "an HTML or XML page, not the file: repeat the download",
    rb"(404: )?(entry |file )?not found\s*\Z": "a server's message, not the file: repeat the download",
}
KINDS = {**SUBSTITUTES, b"PK\3\4|\x80[\2-\5]": "a pickle, which can run code"}


def human(n: float, units: str = " KMB") -> str:
    """6889410560 -> 6.89 B"""
    if n >= 999.5 and units[1:]:
        return human(n / 1000, units[1:])
    return f"{n:.3g} {units[0]}".strip()


def plural(n: int, noun: str) -> str:
    """1 file, 2 files"""
    return f"{n} {noun}{'s' * (n != 1)}"


def amount(size: float) -> str:
    """Bytes: 2.1 MB, 83 GB, 4.9 TB"""
    return f"{human(size, ' kMGT')}B"


def free_space(path: Path) -> tuple[int, Path]:
    """The free bytes of the disk that holds a path, which need not exist, and the nearest folder that does."""
    folder = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(folder).free, folder


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


def describe_content(head: bytes, kinds: dict[bytes, str] = KINDS) -> str:
    """Names a file's content by its first 512 bytes, if it is neither configuration, weights nor data; else empty.
    kinds: SUBSTITUTES for data, whose first bytes may be any but those."""
    return "".join(kind for pattern, kind in kinds.items() if re.match(pattern, head, re.IGNORECASE))


def read_file(path: Path) -> bytes:
    """The content of a configuration or tokenizer file. UserError if it cannot be read, or is something else."""
    try:
        data = retry(path.read_bytes, path)
    except OSError as e:
        if e.errno in TRANSIENT:
            raise
        hint = f"; the model of a run is in {path.parent}/hf" * (path.parent / "checkpoints").is_dir()
        raise UserError(f"{path} cannot be read: {e.strerror}{hint}") from None
    if wrong := describe_content(data[:512]):
        raise UserError(f"{path} is {wrong}")
    return data


def read_object(path: Path) -> dict:
    """The object in a JSON file. UserError if there is none."""
    text, value = read_file(path), None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value


# ---- errors of reading and writing

MISSING_FILE = FileNotFoundError, NotADirectoryError, IsADirectoryError
# Errors of a disk, a network file system or a full table of open files, which may pass.
TRANSIENT = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EBUSY, errno.EREMOTEIO,
    errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH,
)  # fmt: skip
WAITS = 1, 5, 15, 60, 60  # seconds before each further try


def may_pass(error: Exception) -> bool:
    """Whether the disk, the network or a store may work again soon."""
    return isinstance(error, Failure) or getattr(error, "errno", None) in TRANSIENT


def retry(work: Callable, path: Path | str = "", transient: Callable[[Exception], bool] = may_pass):
    """Returns work(), which counts as progress. Tries again after an error that is `transient`; the last error is
    raised. An OSError gets this path as its own."""
    for wait in (*WAITS, None):
        try:
            result = work()
            advance()
            return result
        except Exception as e:
            if isinstance(e, OSError) and e.errno and path:
                e.filename = str(path)
            if wait is None or not transient(e):
                raise
            logger.warning(f"{Message(e)}; trying again in {wait} s")  # a server may repeat the token
        time.sleep(wait)


def exists(path: Path) -> bool:
    """Unlike Path.exists, it takes no file for missing because the disk fails."""
    try:
        retry(path.stat, path)
    except MISSING_FILE:
        return False
    return True


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""

    def read() -> int:
        crc = 0
        with open(path, "rb", buffering=0) as file:
            while block := file.read(BLOCK):
                crc = zlib.crc32(block, crc)
                advance()
        return crc

    return retry(read, path)


def sample_digest(files: list[Path]) -> str:
    """Identifies the content of files without reading all of it: evenly spaced blocks of each, at most SAMPLE bytes
    together but at least 8 blocks of each file, or 1 of more than MANY. Of files up to SAMPLE bytes together,
    everything is read."""
    sizes = [retry(path.stat, path).st_size for path in files]
    step, least = max(1, sum(sizes) // SAMPLE) * SAMPLE_BLOCK, 8 if len(files) <= MANY else 1
    digest = hashlib.sha256()

    def extended(path: Path, size: int):
        longer = digest.copy()
        longer.update(b"%d " % size)
        with open(path, "rb", buffering=0) as file:
            for start in range(0, size, max(SAMPLE_BLOCK, min(step, size // least))):
                file.seek(start)
                longer.update(file.read(SAMPLE_BLOCK))
        return longer

    for path, size in zip(files, sizes, strict=True):
        digest = retry(partial(extended, path, size), path)
    return digest.hexdigest()


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


def lease(path: Path):
    """A lock of a run folder: a filelock.SoftFileLease, which a thread renews until it is released."""
    from filelock import SoftFileLease

    # thread_local=False: the watchdog reads the state of the lock
    return SoftFileLease(path, lease_duration=LEASE, heartbeat_interval=LEASE / 12, thread_local=False)


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


advanced_at = 0.0  # the time.perf_counter() of the last call


def advance() -> None:
    """Call it from any thread after each piece of work, at least once every few minutes."""
    global advanced_at
    advanced_at = time.perf_counter()
