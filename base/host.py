"""The devices, the compiler and the memory of this host."""

import contextlib
import ctypes
import gc
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from base.disk import ROOT, VERSION
from base.errors import UserError


class Gpu(NamedTuple):
    """A GPU model's values from its data sheet, and the measured speed of large matmuls.

    name: part of the device's name in torch. tflops: dense bf16. gib: memory that torch reports. bandwidth: bytes per
    second of the memory; link: from GPU to GPU within a node, in one direction; host: to the host's memory. reach:
    large matmuls run at this share of tflops. fp8: the speed of FP8 matmuls relative to bf16; 0 if the GPU has none."""

    name: str
    tflops: float
    gib: float
    bandwidth: float
    link: float
    host: float
    reach: float
    fp8: float


# By the value of --gpu. The first row whose name is part of a device's name describes it.
# name, tflops, gib, bandwidth, link, host, reach, fp8
GPUS = {
    "b200": Gpu("B200", 2250, 178, 7.7e12, 900e9, 50e9, 0.6, 1.7),
    "gh200": Gpu("GH200", 989, 94.5, 4.0e12, 450e9, 200e9, 0.62, 1.6),
    "h200": Gpu("H200", 989, 139.8, 4.8e12, 450e9, 50e9, 0.64, 1.6),
    "h100-pcie": Gpu("H100 PCIe", 756, 79.1, 2.0e12, 50e9, 50e9, 0.55, 1.6),
    "h100-nvl": Gpu("H100 NVL", 835, 93.0, 3.9e12, 300e9, 50e9, 0.6, 1.6),
    "h100-80": Gpu("H100", 989, 79.1, 3.35e12, 450e9, 50e9, 0.6, 1.6),
    "h800": Gpu("H800", 989, 79.1, 3.35e12, 200e9, 50e9, 0.6, 1.6),
    "a100-40": Gpu("A100-SXM4-40GB", 312, 39.4, 1.56e12, 300e9, 25e9, 0.8, 0),
    "a100-80": Gpu("A100", 312, 79.2, 2.04e12, 300e9, 25e9, 0.8, 0),
    "a800": Gpu("A800", 312, 79.2, 2.04e12, 200e9, 25e9, 0.8, 0),
    "mi300x": Gpu("MI300X", 1307, 191.7, 5.3e12, 350e9, 50e9, 0.45, 0),
    "l40s": Gpu("L40S", 362, 44.4, 0.86e12, 25e9, 25e9, 0.55, 1.6),
    "l40": Gpu("L40", 181, 44.4, 0.86e12, 25e9, 25e9, 0.7, 1.6),
    "l4": Gpu("L4", 121, 22.0, 0.3e12, 25e9, 25e9, 0.5, 1.6),
    "a10g": Gpu("A10G", 70, 22.0, 0.6e12, 25e9, 25e9, 0.8, 0),
    "a10": Gpu("A10", 125, 22.0, 0.6e12, 25e9, 25e9, 0.6, 0),
    # Their bf16 rate is a sixth of an H100's or less, their memory's bandwidth a third: matmuls reach a larger share.
    # Published for a 4090 and GPT-2 124M: 29 % of 312 TFLOP/s, 106,000 tokens/s (nanoGPT issue 182).
    "rtx4090": Gpu("RTX 4090", 165, 23.5, 1.01e12, 25e9, 25e9, 0.75, 1.6),
    "rtx3090": Gpu("RTX 3090", 71, 23.5, 0.94e12, 12e9, 25e9, 0.75, 0),
    "a6000": Gpu("A6000", 155, 47.4, 0.77e12, 25e9, 25e9, 0.6, 0),
}


def known_gpu(device: torch.device) -> Gpu | None:
    """The row of GPUS for a device, or None."""
    name = torch.cuda.get_device_name(device)
    return next((gpu for gpu in GPUS.values() if gpu.name in name), None)


def describe_environment() -> dict:
    """Code, versions and hardware, for env.json."""
    git = _output("git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty").strip()
    return {
        "version": VERSION,
        "git": git.removesuffix("-dirty") or None,
        "git_dirty": git.endswith("-dirty"),
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "host": platform.node(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [cpu_name()],
        "threads": torch.get_num_threads(),
    }


def _output(*command: str) -> str:
    """The output of a program; empty if it is not installed."""
    return subprocess.run(command, capture_output=True, text=True).stdout if shutil.which(command[0]) else ""


def cpu_name() -> str:
    name = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return name[1] if name else platform.processor()


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(peak FLOP/s of a device, its source): the data sheet's value for bf16 on a known GPU, else the fastest of six
    matmuls. Measuring resets the peak memory of a GPU."""
    if device.type == "cuda" and dtype == torch.bfloat16 and (gpu := known_gpu(device)):
        return gpu.tflops * 1e12, f"{gpu.name} data sheet, {gpu.tflops:g} TFLOP/s"

    n = 8192 if device.type == "cuda" else 1024  # a CPU without bf16 multiplies it a hundred times slower than fp32
    a = torch.linspace(-1, 1, n * n, device=device).view(n, n).to(dtype)
    flops = 2 * n**3 / min(timeit.repeat(lambda: (a @ a)[0, 0].item(), number=1, repeat=6))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return flops, f"the fastest of six {n} x {n} products in {str(dtype)[6:]}, {flops / 1e12:.3f} TFLOP/s"


def memory_gib(device: torch.device) -> float:
    """The peak so far: allocated memory on a GPU, the process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return _kib_of("VmHWM", "/proc/self/status") / 2**20  # not getrusage: a child inherits its parent's peak


def find_device(processes: int, local_rank: int = 0) -> torch.device:
    """The device of a rank when `processes` ranks run on this machine. Refuses too few GPUs, and GPUs that torch cannot
    use, unless CUDA_VISIBLE_DEVICES hides them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if processes > count:
            raise UserError(
                f"{processes} processes on this machine, but {count} visible GPUs (CUDA_VISIBLE_DEVICES is {visible})"
            )
        return torch.device("cuda", local_rank)
    gpus = "" if visible in ("", "-1") else _output("nvidia-smi", "-L")
    if "GPU 0" in gpus:
        raise UserError(
            f"nvidia-smi shows GPUs, but torch (CUDA {torch.version.cuda}) cannot use them: update the driver, or train"
            " on the CPU with CUDA_VISIBLE_DEVICES="
        )
    return torch.device("cpu")


def set_allocators() -> None:
    """Sets up the memory allocators. Call it before the first computation. Variables that the user has set are kept.

    On a CPU, glibc returns large blocks to the kernel and faults them in again in every step, which takes most of the
    training time, so glibc has to keep them, in one heap for all threads. oneDNN compiles a matmul kernel for each
    shape, and the shapes of experts change with every batch: more kernels are cached. On a GPU, torch's allocator
    uses expandable segments, which leave fewer gaps."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if not torch.cuda.is_available() and not any(k.startswith("MALLOC_") for k in os.environ):
        libc = ctypes.CDLL(None)
        # malloc.h: M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD, M_ARENA_MAX
        for parameter, value in ((-4, 0), (-1, -1), (-2, 2**28), (-8, 1)):
            libc.mallopt(parameter, value)


def set_numerics(dtype: str, deterministic: bool) -> None:
    """--dtype: a GPU multiplies fp32 matrices in TF32 unless it is fp32. --deterministic. Call it before the first
    product."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("highest" if dtype == "fp32" else "high")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's own condition for the same bits
        torch.use_deterministic_algorithms(True, warn_only=True)


def compiler_problem() -> str:
    """The reason why torch.compile cannot work on this host, with the command that fixes it; empty if it can."""
    compiler = os.environ.get("CXX") or "g++"  # inductor's choice
    if " " in torch.__file__:  # inductor splits its linker flags at spaces
        return f"torch is in a folder with a space in its name ({Path(torch.__file__).parent}): move the checkout"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which(compiler.split()[0]) and header.exists():
        return ""
    return f"{compiler} or {header} was not found: sudo apt install g++ python3-dev"


@contextlib.contextmanager
def without_collector() -> Iterator[Callable[[bool, bool], None]]:
    """-> collect(record, save), for the end of each step. Within, Python collects garbage only there: its own passes
    take up to 0.3 s, at another moment on each rank, and every time all ranks wait for one."""
    is_first = True

    def collect(record: bool, save: bool) -> None:
        nonlocal is_first
        if is_first:
            gc.collect()
            gc.freeze()  # later passes skip what the run keeps, which takes them a hundred times as long
        elif record:
            gc.collect(2 if save else 1)
        is_first = False

    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        gc.enable()


# ---- memory


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of the host's memory that are free, or the limit of this process's control group (version 2) or of a
    parent, as a container or Slurm sets it, if that is less. root: of the kernel's files."""
    sizes = [_kib_of("MemAvailable", root / "proc/meminfo") * 1024]
    groups = root / "proc/self/cgroup"
    group = re.search("^0::/(.*)", groups.read_text() if groups.exists() else "", re.M)
    innermost = root / "sys/fs/cgroup" / (group[1] if group else "")
    for folder in (innermost, *innermost.parents):
        with contextlib.suppress(OSError, ValueError):  # a folder without this file, or its limit is "max"
            sizes.append(int((folder / "memory.max").read_text()))
    return min(sizes)


def _kib_of(name: str, path: Path | str) -> int:
    """A value in kB of a file of the kernel's."""
    return int(re.search(rf"^{name}:\s*(\d+)", Path(path).read_text(), re.M)[1])
