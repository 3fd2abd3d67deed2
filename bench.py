"""Measurements behind BENCHMARKS.md.

python bench.py load [--gb 2] [--folder DIR]      reading weights: speed and memory of both loaders
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from errors import UserError  # first: it finds the Python that has torch

import torch  # isort: skip
from torch import Tensor

import shard
from model import MODELS, ModelConfig, Transformer

# ---- load: `shard.fill` from a file of bf16 weights


def load_model_config(gb: float) -> ModelConfig:
    """A Llama of so many GB in bf16, its largest tensor a fifteenth of it."""
    row = replace(MODELS["llama3.2-1b"], vocab_size=16000, rope_scaling=None, tied=False)
    layer = 2 * row.dim * (row.n_heads + row.n_kv_heads) * row.head_dim + 3 * row.dim * row.ffn_dim
    return replace(row, n_layers=max(1, round((gb * 1e9 / 2 - 2 * row.vocab_size * row.dim) / layer)))


def raw_reader(path: Path, shapes: dict[str, tuple[int, ...]]) -> Callable[[str, tuple[slice, ...]], Tensor]:
    """-> read(name, slices) of a file that holds the tensors one after the other in bf16"""
    starts, at = {}, 0
    for name, shape in shapes.items():
        starts[name], at = at, at + 2 * torch.Size(shape).numel()
    file = os.open(path, os.O_RDONLY)

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        shape, rows = shapes[name], slices[0]
        width = 2 * torch.Size(shape[1:]).numel()
        out = torch.empty((rows.stop - rows.start) * width, dtype=torch.uint8)
        view, done = memoryview(out.numpy()), 0
        while done < len(view):
            done += os.preadv(file, [view[done:]], starts[name] + rows.start * width + done)
        return out.view(torch.bfloat16).view(-1, *shape[1:])[(slice(None), *slices[1:])]

    return read


def forget(path: Path) -> None:
    """Drops the file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def read_plainly(path: Path) -> None:
    """One process, from the first byte to the last, into memory of the file's size."""
    view, done = memoryview(torch.empty(path.stat().st_size, dtype=torch.uint8).numpy()), 0
    with open(path, "rb", buffering=0) as f:
        while done < len(view):
            done += f.readinto(view[done : done + 2**24])


def peak_rss(reset: bool = False) -> int:
    """Bytes; since the last reset (Linux: proc(5), clear_refs)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def load_rank(path: Path, config: ModelConfig, rounds: int) -> None:
    """A rank of the measurement; rank 0 prints a row per way of loading."""
    torch.set_num_threads(1)
    ranks = shard.init_ranks()
    mesh = shard.make_mesh(0, ranks)
    times, memory = {}, {}
    for cold in (True, False):
        for _ in range(rounds):
            for way in ("plain", "direct", "rank0"):
                with torch.device("meta"):
                    model = Transformer(config, torch.bfloat16)
                shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
                shard.shard_model(model, mesh, torch.bfloat16)
                model.to(torch.bfloat16).to_empty(device="cpu")
                read = raw_reader(path, shapes)
                if cold and ranks.rank == 0:
                    forget(path)
                shard.gather(None, ranks)
                before = peak_rss(reset=True)
                begin = time.perf_counter()
                if way != "plain":
                    shard.fill(model, read, way)
                elif ranks.rank == 0:
                    read_plainly(path)
                shard.gather(None, ranks)
                times.setdefault((cold, way), []).append(time.perf_counter() - begin)
                memory.setdefault(way, []).append(peak_rss() - before)
    whole = path.stat().st_size
    largest = 2 * max(torch.Size(s).numel() for s in shapes.values())
    own = whole / ranks.world_size
    for (cold, way), seconds in times.items():
        plain = times[cold, "plain"]
        share = statistics.median(p / s for p, s in zip(plain, seconds, strict=True))
        rate = whole / 1e9 / statistics.median(seconds)
        row = f"{ranks.world_size} | {'cold' if cold else 'cached'} | {way} | {rate:.2f}"
        rss = max(memory[way])
        row += f" | {share:.0%} | {rss / 1e9:.2f} | {rss / own:.2f} | {(rss - own) / largest:.2f}"
        if ranks.rank == 0:
            print(row if way != "plain" else row.rsplit(" | ", 4)[0], flush=True)
    shard.leave(ranks)


def bench_load(args) -> None:
    config = load_model_config(args.gb)
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in Transformer(config).named_parameters()}
    folder = tempfile.TemporaryDirectory(dir=args.folder)
    path = Path(folder.name) / "weights.bin"
    with folder, open(path, "wb") as f:
        for shape in shapes.values():
            f.write(torch.randn(shape).bfloat16().view(torch.uint8).numpy())
        f.flush()
        os.fsync(f.fileno())
        print(f"{path.stat().st_size / 1e9:.2f} GB in {len(shapes)} tensors, bf16 to bf16")
        print("processes | file | loader | GB/s | of plain | peak RSS, GB | in shards | beyond it, in largest tensors")
        for n in (1, 2, 4):
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
            words = [sys.executable, __file__, "load", f"--gb={args.gb}", f"--file={path}", f"--rounds={args.rounds}"]
            ranks = [
                subprocess.Popen(words, env=env | {"WORLD_SIZE": str(n), "RANK": str(rank), "OMP_NUM_THREADS": "1"})
                for rank in range(n)
            ]
            if any([rank.wait() for rank in ranks]):
                raise UserError(f"the measurement on {n} processes failed")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = parser.add_subparsers(required=True)
    load = suites.add_parser("load", help="reading weights")
    load.add_argument("--gb", type=float, default=2.0, help="size of the weights")
    load.add_argument("--folder", type=Path, help="where they are written (default: the system's temporary folder)")
    load.add_argument("--rounds", type=int, default=3)
    load.add_argument("--file", type=Path, help=argparse.SUPPRESS)  # a rank's
    load.set_defaults(run=bench_load)
    args = parser.parse_args(argv)
    if args.file:
        load_rank(args.file, load_model_config(args.gb), args.rounds)
    else:
        args.run(args)


if __name__ == "__main__":
    main(sys.argv[1:])
