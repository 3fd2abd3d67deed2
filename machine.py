"""What the machine under a rank has: devices, a compiler, memory."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from errors import UserError


def find_device(processes: int, local_rank: int = 0) -> torch.device:
    """The device of a rank when `processes` ranks run on this machine; refuses too few GPUs, and GPUs that torch cannot
    use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        if visible not in ("", "-1") and shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
            found = subprocess.run(query, capture_output=True, text=True)
            if found.returncode == 0 and found.stdout.strip():
                raise UserError(
                    f"nvidia-smi shows GPUs ({found.stdout.strip().splitlines()[0]}), but torch"
                    f" {torch.__version__} (CUDA {torch.version.cuda}) cannot use them: update the driver, install a"
                    " torch that suits it, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
                )
        return torch.device("cpu")
    if processes > torch.cuda.device_count():
        raise UserError(
            f"{processes} processes on this machine, but {torch.cuda.device_count()} visible GPUs"
            f" (CUDA_VISIBLE_DEVICES is {'not set' if visible is None else visible}):"
            " start one process per visible GPU"
        )
    return torch.device("cuda", local_rank)


def keep_memory() -> None:
    """glibc gives large blocks back to the kernel and faults them in again, every step: most of a CPU's training time.
    Without an NVIDIA GPU, and unless the user has set MALLOC_*, let it keep them."""
    if (
        platform.libc_ver()[0] == "glibc"
        and not torch.cuda.is_available()
        and not any(k.startswith("MALLOC_") for k in os.environ)
    ):
        libc = ctypes.CDLL(None)
        for parameter, value in ((-4, 0), (-1, -1), (-2, 2**28)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD (malloc.h)
            libc.mallopt(parameter, value)


def compiler_problem() -> str:
    """Why torch.compile cannot work here, with the command that mends it; empty if it can."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # the one inductor takes
    if " " in (torch.__file__ or ""):  # inductor's linker flags are split at it
        return f"torch is in a folder with a space in its name ({Path(torch.__file__).parent}): move the checkout"
    if not shutil.which(compiler.split()[0]):
        return f"no usable C++ compiler ({compiler} is not there): sudo apt install g++ python3-dev"
    source = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() < 0; }\n"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "try.cpp").write_text(source)
        flags = ["-fopenmp", "-I", sysconfig.get_paths()["include"], "-c", "try.cpp", "-o", "try.o"]
        done = subprocess.run([*compiler.split(), *flags], cwd=folder, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    return f"{compiler} cannot compile against Python.h and OpenMP: sudo apt install g++ python3-dev"
