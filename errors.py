"""What a user can get wrong, and the Python that our scripts run in. Import it before torch.

Started by a Python that lacks the requirements, a script goes on with .venv's, or says how to make one."""

import contextlib
import importlib.util
import os
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


_use_venv()
