"""How a mistake is said, exit statuses, the Python and the torchrun that our scripts run in, and small helpers that
more than one file needs. Import it before torch.

Started by a Python that lacks the requirements, a script goes on with .venv's, or says how to make one."""

import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import queue
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent


def human(n: int) -> str:
    """6889410560 -> 6.89 B"""
    unit, name = next((u for u in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if n >= u[0]), (1, ""))
    return f"{n / unit:.2f} {name}".strip()


def printable(text: object) -> str:
    """The text with control characters escaped as Python's repr does it, for a terminal obeys them and names from files
    and other machines may hold them. Line feeds and tabs stay."""
    return re.sub("[\0-\b\v-\x1f\x7f-\x9f\ud800-\udfff]", lambda found: repr(found[0])[1:-1], str(text))


def listed(names: Iterable[str]) -> str:
    """Names from a file or a folder in one line, whatever they hold."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names)


class Message(Exception):
    """What is said to a user without a traceback."""

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(Message):
    """What a user can get wrong: reported as one message, with exit status 2."""


class RankError(UserError):
    """One that a single rank may be the only one to see, and so to report."""


class Failure(Message):
    """Nobody's mistake here (a hub that does not answer, a loss that is no number): one message, with exit status 1."""


class RankFailure(Failure):
    """One that a single rank may be the only one to see, and so to report."""


def exit_status(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Calls main(argv) -> the status that it returns, or that its error stands for: 2 a user's mistake, 130 Ctrl-C, 1
    anything else; says the error. Of one that all ranks see alike only rank 0 speaks."""
    rank, status, message = int(os.environ.get("RANK", 0)), 1, ""
    try:
        return main(argv) or 0
    except SystemExit as end:  # argparse's, after --help
        return end.code or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError as error:  # | head
        message = f"what read this output has ended: {error}"
    except (UserError, PermissionError) as error:
        status = 2
        message = str(error) if rank == 0 or isinstance(error, RankError) else ""
    except (Failure, OSError) as error:
        message = str(error)
    except Exception as error:
        traceback.print_exc()
        message = f"rank {rank} on {platform.node()}: {type(error).__name__}: {error}"
    if message:
        with contextlib.suppress(OSError):  # stderr may be on a disk that is full
            print(f"error: {printable(message)}", file=sys.stderr)
    return status


def check_words(parse: Callable[[list[str]], object]) -> None:
    """Ends the process, as run_script does, if parse(argv) refuses the words or prints --help. For a script to call
    before it imports torch, which takes seconds."""
    status = exit_status(lambda argv: -bool(parse(argv)), sys.argv[1:])
    if status >= 0:
        _end(status)


def run_script(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Ends the process with main's exit_status."""
    _end(exit_status(main, sys.argv[1:]))


def _end(status: int) -> NoReturn:
    """Ends the process without the interpreter's own end: it takes seconds, and gloo's threads can abort it (pytorch
    pull request 179291)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 1
    os._exit(status)


def write_whole(path: Path, text: str, sync: bool = False) -> None:
    """Replaces a file at once: a reader sees the old content or the new one. sync: only when it is on the disk."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict:
    """{} if there is no such file, or no JSON object in it."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_ahead(items: Iterator, count: int) -> Iterator:
    """The same items, computed by a thread that begins at once and is up to `count` ahead. Closing it ends the
    thread."""
    ready: queue.Queue = queue.Queue(count)
    closed = threading.Event()

    def put(item) -> None:
        while not closed.is_set():
            try:
                return ready.put(item, timeout=0.2)
            except queue.Full:
                pass

    def draw() -> None:
        try:
            for item in items:
                put((item, None))
                if closed.is_set():
                    return
            put((None, StopIteration()))
        except BaseException as error:
            put((None, error))

    def take() -> Iterator:
        try:
            yield None  # what is closed before it has begun would not close the thread
            while True:
                item, error = ready.get()
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                yield item
        finally:
            closed.set()

    threading.Thread(target=draw, daemon=True).start()
    taken = take()
    next(taken)
    return taken


def missing_folders(folder: Path) -> list[Path]:
    """Of a folder and those around it, the ones that are not there, innermost first."""
    return [p for p in (folder, *folder.parents) if not p.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Innermost first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _use_venv() -> None:
    required = ("torch", "numpy", "safetensors", "huggingface_hub", "sentencepiece", "tiktoken", "matplotlib")
    missing = [name for name in required if importlib.util.find_spec(name) is None]
    if not missing:
        return
    python = ROOT / ".venv" / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        os.execv(python, [str(python), *sys.argv])
    lacking = f"This Python ({sys.executable}) lacks {', '.join(missing)}: run `bash launch.sh setup` first"
    sys.exit(print(f"error: {lacking}", file=sys.stderr) or 2)


def end_with_torchrun() -> None:
    """A rank whose torchrun is killed would train on unseen, or wait for peers that never come: from now on it gets
    SIGTERM then, and where torchrun is gone already it ends here. Call it before torch is imported, which takes
    seconds, and from the main thread."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG (prctl.h)
    pid = os.getppid()
    while pid:  # torchrun is the next Python above this one; what adopts an orphan is init, or another program
        try:
            if "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
                return
        except OSError:  # another user's
            pass
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    sys.exit("error: the torchrun that started this rank has ended already")


_use_venv()
for _name in ("stdout", "stderr"):
    if getattr(sys, _name) is None:  # closed by the shell that started us (>&-)
        setattr(sys, _name, open(os.devnull, "w"))  # noqa: SIM115
