"""Benchmarks: ours against what others use for the same work, on this machine.

    python bench/run.py                              # every suite that can run here
    python bench/run.py cpu --nanogpt PATH           # training on a CPU: whole steps, against peers
    python bench/run.py gpu --json gpu.json          # on one GPU, at most 520 s; --budget says how many
    python bench/run.py generate tokenizer load checkpoint data
    python bench/run.py switches growth reference    # whole runs of train.py
    python bench/run.py plan                         # what plan.py predicts of random runs, and of more and more GPUs
    python bench/run.py cpu gpu --parts NAME ...     # some parts of a suite
    python bench/run.py --check                      # only compares results, and times nothing
    python bench/run.py fp8 --run runs/NAME          # what FP8 does to each layer of a model; on a GPU, what it wins
    python bench/run.py fp8-parity                   # the same small Llama in bf16 (two seeds) and in each FP8 recipe
    python bench/run.py compare A.json B.json        # two files of --json side by side; status 1: B is slower by 5 %

In a suite, first the results of all contenders are compared: what is timed computes the same. Then each runs once
unmeasured, and they take turns, so that what else the machine does meets them alike. A row gives the median speed of
its runs, and the 10th and 90th percentile; `ratio` is its median over that of the first of its case. The file of --json
is written anew after each row. What fails is a row, and the rest is measured all the same; then the status is 1. Suites
need what `bash test.sh` installs on top of requirements.txt."""

import argparse
import json
import os
import sys
import time
from argparse import Namespace
from importlib.metadata import distributions
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lib.errors import (  # first: it finds the Python that has torch
    Failure,
    UserError,
    read_json,
    run_script,
    write_whole,
)

import torch  # isort: skip

import cpu
import gpu
import peers
import runs
import suites
from common import Row, guarded
from log import describe_environment

# Each takes the command line's flags and yields its rows; the first line of its docstring is the title.
SUITES = {
    "generate": suites.bench_generate,
    "tokenizer": suites.bench_tokenizer,
    "load": suites.bench_load,
    "checkpoint": suites.bench_checkpoint,
    "data": suites.bench_data,
    "cpu": cpu.bench_cpu,
    "gpu": gpu.bench_gpu,
    "switches": runs.bench_switches,
    "growth": runs.bench_growth,
    "reference": runs.bench_reference,
    "fp8-parity": runs.bench_fp8_parity,
    "plan": runs.bench_plan,
    "fp8": gpu.bench_fp8,
}
PARTS = {"cpu": cpu.PARTS, "gpu": gpu.PARTS}
COMPARE = ("generate", "tokenizer", "cpu", "gpu")  # suites with something to compare that is not timed
PACKAGES = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "litgpt", "torchao", "liger_kernel")
SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "TORCH")  # that change what is measured
SLOWER = 0.95  # of the speed before


def describe_machine() -> dict[str, object]:
    """For the head of the results."""
    machine = {"date": time.strftime("%Y-%m-%d %H:%M")} | describe_environment() | {"load": os.getloadavg()[0]}
    packages = {package.name: package.version for package in distributions() if package.name in PACKAGES}
    return machine | packages | {key: value for key, value in os.environ.items() if key.startswith(SETTINGS)}


def parse(argv: list[str]) -> Namespace:
    parser = argparse.ArgumentParser(prog="bench/run.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", choices=SUITES, help=f"{', '.join(SUITES)}; default: all that can run")
    add("--check", action="store_true", help="only compare the results of all contenders, time nothing")
    add("--repeats", type=int, default=5, help="measured runs of each contender (default 5)")
    add("--json", type=Path, metavar="FILE", help="also write the rows and the machine to a file")
    add("--parts", nargs="+", metavar="PART", help="of cpu or gpu; default: all")
    add("--peers", nargs="+", choices=peers.PEERS, default=[*peers.PEERS], help="of cpu; default: all that are there")
    add("--nanogpt", type=Path, metavar="FOLDER", help="a checkout of github.com/karpathy/nanoGPT")
    add("--steps", type=int, default=0, help="of switches, reference and fp8-parity; 0 = as written there")
    add("--budget", type=float, default=520.0, metavar="SECONDS", help="that gpu may take (default 520)")
    add("--run", type=Path, metavar="FOLDER", help="of fp8: a run folder")
    add("--tiny", action="store_true", help="cpu and gpu in small, on a CPU, too: does the code run?")
    args, has_gpu = parser.parse_args(argv), torch.cuda.is_available()
    suites = args.suites or [name for name in SUITES if name != "fp8" and (name != "gpu" or has_gpu)]
    args.suites = [name for name in suites if name in COMPARE or not args.check]
    parts = [part for name in args.suites for part in PARTS.get(name, ())]
    args.parts = args.parts or parts
    unknown, known = set(args.parts) - set(parts), ", ".join(parts) or "parts of cpu and gpu only"
    for wrong, message in (
        (unknown, f"--parts {' '.join(unknown)} is unknown: there are {known}"),
        (args.nanogpt and not Path(args.nanogpt, "model.py").exists(), f"--nanogpt {args.nanogpt}: no model.py in it"),
        ("fp8" in args.suites and not args.run, "fp8 needs --run FOLDER, of the run whose model it looks at"),
        (args.repeats < 1, f"--repeats {args.repeats}: it must be at least 1"),
        ("gpu" in args.suites and not (args.tiny or has_gpu), "gpu needs a GPU; with --tiny its code runs on a CPU"),
    ):
        if wrong:
            parser.error(message)
    args.repeats *= not args.check
    return args


def table(title: str, columns: str) -> None:
    """Prints the head of a table."""
    print(f"\n{title}\n\n| case | what | {columns} |\n|---|---|{'--:|' * columns.count('|')}---|")


def table_line(row: Row, *values: float | str | None) -> None:
    cells = ["" if value is None else value if isinstance(value, str) else f"{value:.4g}" for value in values]
    print(f"| {row['case']} | {row['what']} | {' | '.join(cells)} |", flush=True)


def run_suite(suite: str, args: Namespace, machine: dict, rows: list[Row]) -> None:
    """Prints the suite's rows as they come and adds them to `rows`."""
    table(SUITES[suite].__doc__.splitlines()[0], "median | unit | p10 | p90 | ratio | note")
    for row in guarded(suite, "all", SUITES[suite](args)):
        rows.append({"suite": suite} | row)
        table_line(row, *(row[key] for key in ("median", "unit", "p10", "p90", "ratio", "note")))
        if args.json:
            write_whole(args.json, json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def compare(paths: list[str]) -> None:
    """Prints the rows of two files side by side, as speeds of the second over the first where they are speeds or
    times."""
    files = [read_json(Path(path)) for path in paths]
    if len(files) != 2 or not all(files):
        raise UserError("usage: bench/run.py compare A.json B.json, two files of --json")
    before, after = ({(row["suite"], row["case"], row["what"]): row for row in file["rows"]} for file in files)
    table(" and ".join(paths), "before | after | unit | speed | note")
    slower = 0
    for key in before | after:
        old, new = before.get(key, {}), after.get(key, {})
        row, a, b = new or old, old.get("median"), new.get("median")
        speed, note = None, row["note"] if old and new else f"only {'after' if new else 'before'}"
        if a and b and (row["unit"].endswith("/s") or row["unit"] in ("s", "ms")):
            speed = b / a if row["unit"].endswith("/s") else a / b
            note = "SLOWER" if speed <= SLOWER else note
        slower += note == "SLOWER"
        table_line(row, a, b, row["unit"], speed, note)
    if slower:
        raise Failure(f"{slower} rows are slower by {100 * (1 - SLOWER):.0f} % or more")


def main(argv: list[str]) -> None:
    if argv[:1] == ["compare"]:
        return compare(argv[1:])
    args, rows, machine = parse(argv), [], describe_machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for suite in args.suites:
        run_suite(suite, args, machine, rows)
    if any("failed: " in row["note"] for row in rows):
        raise Failure("a part failed, or a contender computed something else: see above")


if __name__ == "__main__":
    run_script(main)
