"""Benchmarks of flatland against other trainers, on this machine.

    python bench/run.py generate                         # greedy decoding, against transformers
    python bench/run.py cpu                              # training on a CPU, against transformers and litgpt
    python bench/run.py loss --nanogpt DIR --nanochat DIR  # validation loss after two minutes, against checkouts
    python bench/run.py gpu --parts models               # training on one GPU; without --parts, all parts
    python bench/run.py scale                            # starting on up to 1,024 simulated ranks, 100,000 shards

A row gives the median, the 10th and 90th percentile, the ratio to the first row of its case, MFU, and peak memory in
GiB. An error becomes a row, and then the status is 1. Missing peers are reported: `bash test.sh`
installs transformers; litgpt is installed by `pip install litgpt`."""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lib.errors import Failure, Parser, UserError, prepare_python, run_script

if __name__ == "__main__":
    prepare_python()

import torch  # isort: skip

import peers
import scale
import suites
from lib.machine import describe_environment

SUITES = {
    "generate": suites.bench_generate,
    "cpu": suites.bench_cpu,
    "gpu": suites.bench_gpu,
    "loss": peers.bench_loss,
    "scale": scale.bench_scale,
}


def parse(argv: list[str]) -> Namespace:
    parser = Parser(prog="bench/run.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parts = [*(suites.CPU | suites.GPU)]
    parser.add_argument("suite", choices=SUITES, help="what to measure")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="of cpu and gpu (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="cpu, generate: turns of each (default 5)")
    for peer in ("nanogpt", "nanochat"):
        parser.add_argument(f"--{peer}", type=Path, help="loss: folder of a checkout")
    args = parser.parse_args(argv)
    if args.suite == "gpu" and not torch.cuda.is_available():
        raise UserError("gpu: torch finds no GPU on this machine")
    return args


def print_line(cells):
    texts = ["" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(texts)} |", flush=True)


def main(argv: list[str]) -> None:
    args, failures = parse(argv), 0
    print(", ".join(f"{key} {value}" for key, value in describe_environment().items()))
    print(f"\n{SUITES[args.suite].__doc__}\n")
    for i, row in enumerate(SUITES[args.suite](args)):
        if not i:
            print_line(row)
            print_line(["---"] * len(row))
        failures += row["note"].startswith("failed: ")
        print_line(row.values())
    if failures:
        raise Failure(f"{failures} contenders failed: see the rows above")


if __name__ == "__main__":
    run_script(main)
