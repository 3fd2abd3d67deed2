"""What a user can get wrong, and the Python and the torchrun that our scripts run in. Import it before torch.

Started by a Python that lacks the requirements, a script goes on with .venv's, or says how to make one."""

import contextlib
import ctypes
import importlib.util
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parent


class UserError(Exception):
    """What a user can get wrong: reported as one message, without a traceback, with exit status 2."""


class RankError(UserError):
    """One that a single rank may be the only one to see, and so to report."""


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
