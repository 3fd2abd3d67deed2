"""Error messages, the log, exit statuses, the parser of command lines, and the start of a script. Imports no torch."""

import argparse
import contextlib
import ctypes
import difflib
import errno
import faulthandler
import importlib.util
import json
import logging
import os
import platform
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from base.background import Appender


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


class Failure(Message):
    """A failure that is not the user's mistake, for example a silent hub or a non-finite loss: status 1."""


class Parser(argparse.ArgumentParser):
    """Raises UserError instead of printing the usage. flags: {names of a flag: its options for add_argument}."""

    def __init__(self, flags: dict[str, dict] | None = None, **options):
        super().__init__(allow_abbrev=False, **options)
        for names, how in (flags or {}).items():
            self.add_argument(*names.split(), **how)

    def error(self, message: str) -> NoReturn:
        words = message.partition("unrecognized arguments: ")[2].split()
        near, known = [], self._option_string_actions
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            ends = [name for name in known if name.endswith(f"_{flag[2:]}")]
            near.append(ends[0] if ends else nearest(flag, known))
        meant = ", ".join(filter(None, near))
        raise UserError(message + f"; did you mean {meant}?" * bool(meant) + "; --help lists all flags")


def within(kind: type, least: float, most: float = 2**53) -> Callable[[str], float]:
    """A type of flags: an int or a float from `least` to `most`."""

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}, and at most {most}")
        return value

    read.__name__ = kind.__name__  # for argparse's message about other words
    return read


REQUIRED = (
    "torch",
    "numpy",
    "safetensors",
    "huggingface_hub",
    "tokenizers",
    "sentencepiece",
    "jinja2",
    "matplotlib",
)
# The errors that a user's mistake in a path raises.
PATH_MISTAKES = errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG
FULL_DISK = errno.ENOSPC, errno.EDQUOT
MEMORY_ADVICE = "guide/memory.md lists what lowers it; `python plan.py` with the same flags, what fits on a GPU"
EXIT = {"finished": 0, "stopped": 0, "error": 2, "failed": 1}  # state of a run that ended -> exit status
STOP_REASON = "launch.sh stop"  # in status.json
logger = logging.getLogger("flatland")
FOLLOWED = 10**9  # the order of an end that another end has caused


def nearest(word: str, names: Iterable[str]) -> str:
    """The known name that is spelt most like a word; empty if none is near."""
    return "".join(difflib.get_close_matches(word.lower(), names, 1, 0.7))


def describe_error(error: Exception) -> tuple[int, str]:
    """-> (exit status, message). Prints the traceback of an unexpected error."""
    if isinstance(error, Message):
        return 2 if isinstance(error, UserError) else 1, str(error)
    rank = f"rank {os.environ.get('RANK', 0)} on {platform.node()}: "
    prefix = rank * ("RANK" in os.environ)
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return 1, f"{prefix}the disk is full: {error}"
    if isinstance(error, OSError) and error.filename:
        return 2 if error.errno in PATH_MISTAKES else 1, f"{prefix}a file or folder cannot be used: {error}"
    traceback.print_exception(error)
    advice = f"; {MEMORY_ADVICE}" * (type(error).__name__ == "OutOfMemoryError")  # torch's, of a GPU
    return 1, f"{rank}{type(error).__name__}: {error}{advice}"


def write_error(state: str, message: str, order: int, step: int = 0) -> None:
    """Writes error.json into the log folder that torchrun has made for this rank, if there is one. launch/node.py shows
    the launcher these files; torchrun reads `message` and `timestamp`. state: error (the user's), failed or stopped.
    order: 0 for the first cause, FOLLOWED for what another end has caused."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error = dict(kind=state, message=message, order=order, step=step, rank=os.environ.get("RANK"))
        error |= {"host": platform.node(), "timestamp": int(time.time())}
        with contextlib.suppress(OSError):  # the disk is full
            Path(path).write_text(json.dumps(error))


def say_error(message: str, kind: str = "error: ") -> None:
    with contextlib.suppress(OSError):  # stderr may be on a disk that is full
        over_progress = "\r\033[K" * os.isatty(2)
        print(f"{over_progress}{kind}{printable(message)}", file=sys.stderr)


class _PrefixEveryLine(logging.Formatter):
    """Puts the prefix on each line of a message and escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        record.asctime, record.message = self.formatTime(record, self.datefmt), ""
        prefix = self.formatMessage(record)
        return prefix + printable(record.getMessage()).replace("\n", f"\n{prefix}")


def start_logging(folder: Path | None, on_screen: bool = True) -> None:
    """Sends messages to the screen (with a prefix if it is not a terminal), and to log.txt in the folder by the last
    handler. None: this rank is silent."""
    logger.propagate = logging.raiseExceptions = False
    logger.setLevel(logging.INFO if folder else logging.CRITICAL + 1)
    logger.handlers = []
    if folder:
        prefixed = _PrefixEveryLine("%(asctime)s %(levelname).1s [%(filename)s:%(lineno)d] ", "%Y-%m-%d %H:%M:%S")
        screen, file = map(logging.StreamHandler, (sys.stdout, Appender(folder / "log.txt")))
        screen.setFormatter(_PrefixEveryLine() if sys.stdout.isatty() else prefixed)
        file.setFormatter(prefixed)
        logger.handlers = [screen, file] if on_screen else [file]


def exit_status(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Calls main(argv) and reports its error -> its result, or the error's status: 2 for a user error, 130 for Ctrl-C,
    141 for a closed pipe, 1 for anything else. Only rank 0 shows a user error, because each rank reads the same
    arguments."""
    try:
        status = main(argv) or 0
        sys.stdout.flush()
        return status
    except SystemExit as end:  # raised by argparse after --help
        return end.code or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # for example `| head`; the shell reports 141 after SIGPIPE
        return 141
    except Exception as error:
        status, message = describe_error(error)
        # gloo, NCCL and the store raise a RuntimeError at the end of a peer, which tells more.
        order = FOLLOWED - 1 if isinstance(error, RuntimeError) else 0
    rank = os.environ.get("RANK", "0")
    if status == 1 or rank == "0":
        say_error(message)
    if rank != "0" and not message.startswith("rank "):
        message = f"rank {rank} on {platform.node()}: {message}"
    write_error("error" if status == 2 else "failed", message, order)
    return status


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Puts a name, for example a flag and its value, before the message of a UserError."""
    try:
        yield
    except UserError as e:
        raise type(e)(f"{name}: {e}") from None


def check_words(parse: Callable[[list[str]], object]) -> None:
    """Ends the process if parse(argv) refuses the arguments or prints --help. Scripts call this before they import
    torch, which takes seconds."""
    run_script(lambda argv: -bool(parse(argv)))


def run_script(main: Callable[[list[str]], int | None]) -> None:
    """Ends the process with main's exit status, unless it is negative. Skips the interpreter's shutdown, which takes
    seconds and may be aborted by gloo's threads (pytorch pull request 179291). Characters that the encoding of the
    output lacks are printed as escapes."""
    sys.stdout.reconfigure(errors="backslashreplace")
    status = exit_status(main, sys.argv[1:])
    if status < 0:
        return
    with contextlib.suppress(OSError):  # exit_status has reported it
        sys.stdout.flush()
    os._exit(status)


# ---- the start of a script


def prepare_python() -> None:
    """Each script calls this before it imports torch. Restarts the script with .venv's Python if this one lacks the
    requirements, raises the limit of open files, and keeps OpenMP threads from spinning."""
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    venv = Path(__file__).parents[1] / ".venv"
    python = venv / "bin/python"
    if missing and python.exists() and Path(sys.prefix).resolve() != venv.resolve():
        os.execv(python, [str(python), *sys.argv])
    if missing:
        say_error(f"This Python ({sys.executable}) lacks {', '.join(missing)}: run `bash launch.sh setup` first")
        sys.exit(2)
    # A rank of N has about 2 N sockets, and files of data and checkpoints.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # OpenMP threads that wait for work spin and keep their cores. If another process needs these cores, training
    # becomes 10 to 50 times slower, so they spin only briefly. libgomp reads this when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def end_with_torchrun() -> None:
    """Makes the kernel send SIGTERM to this rank when its parent torchrun, if any, ends; otherwise it would train
    unsupervised. Call this from the main thread, before the import of torch, which takes seconds."""
    faulthandler.enable()  # tracebacks of segmentation faults
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG (prctl.h)
