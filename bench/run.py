"""Benchmarks: ours against what others use for the same work, on this machine.

    python bench/run.py                              # every suite that can run here
    python bench/run.py cpu --nanogpt PATH           # training on a CPU: whole steps, against peers
    python bench/run.py gpu --json gpu.json          # on one H200 or H100, at most 9 minutes
    python bench/run.py generate tokenizer load checkpoint data
    python bench/run.py switches growth reference    # whole runs of train.py
    python bench/run.py cpu gpu --parts NAME ...     # some parts of a suite
    python bench/run.py --check                      # only compares results, and times nothing
    python bench/run.py fp8 --run runs/NAME          # what FP8 does to each layer of a model; on a GPU, what it wins
    python bench/run.py fp8-parity                   # the same small Llama in bf16 (two seeds) and in each FP8 recipe

In a suite, first the results of all contenders are compared: what is timed computes the same. Then each runs once
unmeasured, and they take turns, so that what else the machine does meets them alike. A row gives the median speed of
its runs, and the 10th and 90th percentile; `ratio` is its median over that of the last of its case. The file of --json
is written anew after each row. Status 1 if a contender computed something else, or a part failed. Suites need what
`bash test.sh` installs on top of requirements.txt."""

import argparse
import json
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from errors import UserError  # first: it finds the Python that has torch

import torch  # isort: skip

import cpu
import fp8_layers
import gpu
import peers
import runs
import suites
from common import Failed, describe_machine, table_line
from fp8 import RECIPES
from log import write_whole

# Each takes the command line's flags and yields its rows; the first line of its docstring is the title.
SUITES = {**suites.SUITES, "cpu": cpu.bench_cpu, "gpu": gpu.bench_gpu, **runs.SUITES, "fp8": fp8_layers.bench_fp8}
PARTS = {"cpu": cpu.PARTS, "gpu": gpu.PARTS}


def parse(argv: list[str]) -> Namespace:
    parser = argparse.ArgumentParser(prog="bench/run.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}; default: all that can run here")
    add("--check", action="store_true", help="only compare the results of all contenders, time nothing")
    add("--repeats", type=int, default=0, help="measured runs of each contender (default 9; cpu: 5)")
    add("--json", type=Path, metavar="FILE", help="also write the rows and the machine to a file")
    add("--parts", nargs="+", default=[], metavar="PART", help="of cpu or gpu; default: all")
    add(
        "--peers", nargs="+", choices=peers.PEERS, default=list(peers.PEERS), help="of cpu; default: all that are there"
    )
    add("--nanogpt", type=Path, metavar="FOLDER", help="a checkout of github.com/karpathy/nanoGPT")
    add("--steps", type=int, default=0, help="of switches and reference; 0 = as written there")
    add("--disk", type=Path, metavar="FOLDER", help="of checkpoint; default: where temporary files go")
    add("--seconds", type=float, default=520.0, help="that gpu may take (default 520)")
    add("--run", type=Path, metavar="FOLDER", help="of fp8: a run folder")
    add("--recipe", default="", choices=("", *RECIPES), help="of fp8: another than the run's")
    add("--tiny", action="store_true", help="cpu and gpu in small, on a CPU, too: does the code run?")
    args = parser.parse_args(argv)
    if unknown := set(args.suites) - set(SUITES):
        raise UserError(f"{unknown.pop()} is no suite; there are {', '.join(SUITES)}")
    has_gpu = torch.cuda.is_available()
    args.suites = args.suites or [name for name in SUITES if name != "fp8" and (name != "gpu" or has_gpu)]
    if args.check:  # whole runs compare results while they are timed
        args.suites = [name for name in args.suites if name not in runs.SUITES]
    known = [part for name in args.suites for part in PARTS.get(name, ())]
    if unknown := [part for part in args.parts if part not in known]:
        choices = f"there are {', '.join(known)}" if known else "only cpu and gpu have parts"
        raise UserError(f"--parts {unknown[0]} is unknown: {choices}")
    if args.nanogpt and not (args.nanogpt / "model.py").exists():
        raise UserError(f"--nanogpt {args.nanogpt}: there is no model.py in it")
    if "fp8" in args.suites and not args.run:
        raise UserError("fp8 needs --run FOLDER, of the run whose model it looks at")
    if args.repeats < 0:
        raise UserError(f"--repeats {args.repeats}: it must be at least 1")
    if "gpu" in args.suites and not (args.tiny or has_gpu):
        raise UserError("gpu needs a GPU that torch can use; with --tiny its code runs on a CPU, in small")
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    machine, rows = describe_machine(), []
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for suite in args.suites:
        own = Namespace(**vars(args))
        own.repeats = 0 if args.check else args.repeats or (5 if suite == "cpu" else 9)
        own.parts = [part for part in PARTS.get(suite, ()) if part in args.parts or not args.parts]
        print(f"\n{SUITES[suite].__doc__.splitlines()[0]}\n\n| case | what | median | p10 | p90 | ratio |")
        print("|---|---|--:|--:|--:|--:|")
        for row in SUITES[suite](own):
            rows.append({"suite": suite} | row)
            print(table_line(row), flush=True)
            if args.json:
                write_whole(args.json, json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    if any(word in row["what"] for row in rows for word in ("failed: ", "refused: ")):
        raise SystemExit("a part failed, or a contender was refused: see above")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: `bash test.sh` installs what the suites need")
    except Failed as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
