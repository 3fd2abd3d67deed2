"""Ranks, and what is done to a plain model so that it trains on them.

The order is fixed, each step one call, in train.py's `build`:

    meta device -> activation checkpointing -> compile each block -> fully_shard -> to_empty -> fill

Checkpointing goes first, because the compiler must see it; compilation before sharding, so that the compiled graph
holds the computation and not the gathering; memory is allocated last, when every rank knows which part is its own.
Nothing here wraps or renames a module: parameter names stay those of the model.

Replication, full sharding and hybrids are one 2-D mesh (replicate, shard): --shard_size 1 replicates, 0 shards over all
ranks. One rank alone is not wrapped. Works on any module with `.layers`."""

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from errors import UserError


@dataclass(frozen=True)
class Ranks:
    """This process among all. control: the gloo group for votes and checkpoints (None: alone); used by one thread
    only."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None


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


def init_ranks() -> Ranks:
    """Joins the process group that torchrun describes in the environment; without one, this process is alone. All ranks
    must call."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # Its agent killed, a rank would train on unseen: it stops as on any SIGTERM. (PR_SET_PDEATHSIG, prctl.h)
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    device = find_device(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        return Ranks(0, 1, device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=30))
    return Ranks(dist.get_rank(), world_size, device, dist.new_group(backend="gloo"))


def leave(ranks: Ranks) -> None:
    """Ends the process with status 0 when all ranks have come this far. All ranks must call. Several ranks skip the
    interpreter's own end: gloo's threads can still hold tensors then, and abort it (pytorch pull request 179291; seen
    here in 1 of 10 runs that had merely destroyed the group)."""
    sys.stdout.flush()
    sys.stderr.flush()
    if ranks.world_size > 1:
        dist.barrier(ranks.control)
        dist.destroy_process_group()
        os._exit(0)
    sys.exit(0)


def mesh_shape(shard_size: int, world_size: int) -> tuple[int, int]:
    """-> (replicate, shard): how many copies of the parameters there are, and over how many ranks each is spread."""
    size = shard_size or world_size
    if world_size % size:
        raise UserError(f"--shard_size {size} does not divide the {world_size} ranks")
    return world_size // size, size


def make_mesh(shard_size: int, ranks: Ranks) -> DeviceMesh | None:
    """The (replicate, shard) mesh; None for one rank. All ranks must call."""
    shape = mesh_shape(shard_size, ranks.world_size)
    if ranks.world_size == 1:
        return None
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


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


# ---- the build order


def checkpoint_activations(model: nn.Module, mode: str) -> None:
    """block: each block keeps its input only and computes the rest again in the backward pass (arXiv 1604.06174)."""
    if mode == "block":
        for block in model.layers:
            block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable) -> Callable:
    def run(*args):
        return checkpoint(forward, *args, use_reentrant=False)

    return run


def compile_model(model: nn.Module, mode: str) -> None:
    """block: every block on its own, sharing one compiled graph; model: everything as one graph. In place."""
    for module in {"none": [], "block": list(model.layers), "model": [model]}[mode]:
        module.compile(dynamic=False)


def shard_model(model: nn.Module, mesh: DeviceMesh | None, dtype: torch.dtype) -> None:
    """FSDP2 with a unit per block and one for the rest: parameters are gathered in `dtype`, gradients summed in
    fp32."""
    if mesh is None:
        return
    size = mesh["shard"].size()

    def placement(parameter: nn.Parameter) -> Shard | None:
        """Stacked experts shard on a dimension that the ranks divide; the default, dim 0, may be uneven."""
        if parameter.ndim < 3 or parameter.shape[0] % size == 0:
            return None
        return next((Shard(d) for d in (1, 2) if parameter.shape[d] % size == 0), None)

    # Inputs are not cast: the model does it, and its rope tables are to stay fp32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*model.layers, model]:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=size > 1 and module is not model,
            shard_placement_fn=placement,
        )
        module.set_gradient_divide_factor(
            1.0
        )  # sums: what they are divided by, the count of trained tokens, is known later
        module.set_force_sum_reduction_for_comms(True)  # and not as a multiplied sum, which gloo lacks
    register_fsdp_forward_method(model, "logits")


def fill(model: nn.Module, read: Callable[[str, tuple[slice, ...]], Tensor]) -> None:
    """Gives every parameter its values: read(name, slices) returns the part that this rank keeps."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local(parameter).copy_(read(name, local_slices(parameter)))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def owns(tensor: Tensor) -> bool:
    """Whether this rank, among those that hold the same part, is the one to save it."""
    if not isinstance(tensor, DTensor):
        return True
    return all(
        not p.is_replicate() or c == 0
        for p, c in zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    )


# ---- in the loop


def sync_gradients(model: nn.Module, on: bool) -> None:
    """Off while micro-batches accumulate: only the last one's backward pass reduces over ranks."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward one: gives back what stayed gathered. Until then parameters are whole
    copies in the compute dtype, nothing to save or to update."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class NotFinite(Exception):
    """The loss or the gradients stopped being numbers."""


class GradientGuard:
    """Global loss, gradient norm, clipping and the guard against non-finite values, from one all-reduce per step and
    without a host synchronisation. A non-finite loss or norm suppresses that update and all later ones, on every rank
    alike."""

    def __init__(self, model: nn.Module, clip: float, ranks: Ranks, mesh: DeviceMesh | None):
        self.parameters, self.clip, self.ranks = list(model.parameters()), clip, ranks
        self.replicas = 1 if mesh is None else mesh["replicate"].size()
        self.suppress = torch.zeros((), device=ranks.device)
        self.seen = None  # a copy of it on its way to the host

    def reduce(self, loss: Tensor, trained: int) -> tuple[Tensor, Tensor, Tensor]:
        """loss: this rank's sum over its `trained` tokens, gradients likewise -> (loss per token, gradient norm, what
        the gradients are to be divided by), global. All ranks must call."""
        norms = torch._foreach_norm([local(p.grad) for p in self.parameters])
        square = torch.stack(norms).float().square().sum() / self.replicas
        sums = torch.stack((square, loss, torch.full_like(loss, trained)))
        if self.ranks.world_size > 1:
            dist.all_reduce(sums)
        square, loss, count = sums.unbind()
        norm = square.sqrt() / count
        bad = ~(norm.isfinite() & loss.isfinite())
        self.suppress = torch.maximum(self.suppress, bad.float())
        excess = (norm / self.clip).clamp(min=1.0) if self.clip else torch.ones_like(norm)
        return loss / count, norm, count * excess

    def check(self, step: int, wait: bool = False) -> None:
        """Raises NotFinite if an update was suppressed: up to the step before, which costs no waiting, or up to this
        one. Call once a step; the outcome is the same on all ranks."""
        flag, event = torch.empty((), pin_memory=self.suppress.is_cuda), None
        flag.copy_(self.suppress, non_blocking=True)
        if self.suppress.is_cuda:
            event = torch.cuda.Event()
            event.record()
        before, self.seen = self.seen, (step, flag, event)
        for at, flag, event in ([before] if before else []) + ([self.seen] if wait else []):
            if event:
                event.synchronize()
            if flag.item():
                raise NotFinite(
                    f"The loss or the gradient norm of step {at} is not finite. That update and all later ones were"
                    " suppressed, on all ranks; the newest checkpoint is from before it. A smaller --lr, a longer"
                    " --warmup_steps or --dtype fp32 usually mend it"
                )


class StopVote:
    """Agreement to stop: SIGTERM, SIGINT, SIGHUP or SIGUSR1 on any rank, or a guard that tripped, ends the run on all
    ranks at the same step, one step after it was noticed: nobody waits for the answer. A second signal ends the process
    at once."""

    def __init__(self, ranks: Ranks, second_signal: Callable[[], None]):
        self.ranks, self.reason, self.second_signal = ranks, "", second_signal
        self.pending = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame) -> None:
        if self.reason:
            self.second_signal()
            os._exit(1)
        self.reason = signal.Signals(number).name

    def agreed(self) -> bool:
        """Casts this step's vote and returns the outcome of the step before. All ranks must call, once a step."""
        if self.ranks.world_size == 1:
            return bool(self.reason)
        outcome = False
        if self.pending is not None:
            work, vote = self.pending
            work.wait(timedelta(seconds=20)) if self.reason else work.wait()  # told to stop because a peer is dead?
            outcome = bool(vote.item())
        vote = torch.tensor([1 if self.reason else 0])
        self.pending = (dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.ranks.control, async_op=True), vote)
        return outcome


def on_first_rank(work: Callable, ranks: Ranks):
    """Rank 0 does it while the others wait; all get its result, or its error. All ranks must call."""
    result, error = None, None
    if ranks.rank == 0:
        try:
            result = work()
        except Exception as e:
            error = e
    result, error = gather((result, error), ranks)[0]
    if error is not None:
        raise UserError(str(error)) if isinstance(error, UserError) else error
    return result


def gather(value, ranks: Ranks) -> list:
    """One object of every rank, on all ranks. All ranks must call."""
    if ranks.world_size == 1:
        return [value]
    out = [None] * ranks.world_size
    dist.all_gather_object(out, value, group=ranks.control)
    return out
