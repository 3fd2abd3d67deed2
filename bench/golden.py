"""Golden losses: training runs whose losses must not change unless a change of the numerics is intended.

    python bench/golden.py                  # compare this checkout's losses with golden.json
    python bench/golden.py --record         # replace the records of this torch, CPU maker and family

train.py trains six tiny recipes for 60 steps, each on one rank and on two. golden.json holds the loss and the
gradient norm of every step and the final validation loss, per torch, CPU maker and family, and instruction set.
Runs use one thread per rank, no compiler, one instruction set in torch and oneDNN, and the MKL code that all x86 CPUs
share. The avx512_bf16 set computes in bf16, unless a recipe says fp32; the other sets compute in fp32.

With the same torch, CPU maker and family, and instruction set as the record, every figure must be equal bit for bit.
Any other machine or torch is compared within tolerances with the first record of the instruction set, and the result
says so; no machine is skipped. Delete records that no longer apply. ARM CPUs have no x86 set: they use the set
`default` (torch's portable kernels, fp32), compared with the EPYC's.
torch 2.11 computes the same bits as 2.13 on the EPYC; 2.15 does with avx2, while with avx512_bf16 4 of the 12 runs
differ by 2e-7 to 4e-7, well within FINE. None of this is assumed.

The tolerances lie between the differences of machines and the effect of wrong numerics. Largest relative differences of
losses and gradient norms in the first 5 steps: two makers (Xeon and EPYC, same set), and the EPYC's `default` set
against the Xeon's avx2 record. Then the effect of three deliberate mistakes on the loss (fp32 unless noted): AdamW's
eps 1e-7 instead of 1e-8, no bias correction, and a causal mask that is off by one (the smaller of both directions).

    recipe    makers   makers, bf16 set   default   eps      bias     mask
    llama     0        0                  2e-7      1.0e-5   4.5e-2   8.5e-3
    gpt2      9e-8     9e-8               1e-7      1.5e-5   4.1e-2   8.6e-4
    tied      1e-7     1e-7               9e-5      1.9e-5   5.4e-2   4.6e-3    bf16 parameters
    mixtral   2e-7     0                  1e-7      1.6e-5   5.3e-2   9.7e-3
    chat      1e-7     1e-4               1e-7      1.2e-5   4.3e-2   1.0e-3
    fp8       0        0                  2e-3      1.8e-4   5.6e-2   9.6e-3

Therefore FINE applies to fp32, and COARSE to bf16 and FP8, where a last bit can flip a rounded value. Rounding
differences grow with the steps: after 60, losses differed by up to 3.3e-2 and validation losses by up to 1.3e-2. The
limits in LATE still catch a run that stops learning. test_bench.py makes the three mistakes and checks that each is
caught. `pytest -m slow bench` compares the other instruction sets of this CPU."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from base.errors import Failure, Parser, prepare_python, run_script

if __name__ == "__main__":
    prepare_python()

from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import start_processes

import log
import train
from curves import read_records

FOLDER = Path(__file__).resolve().parent
RECORD = FOLDER / "golden.json"
CPUINFO = Path("/proc/cpuinfo")
TORCH = version("torch").partition("+")[0]
FIRST = 5  # steps that are compared closely
# Relative differences: of the first steps, and of later figures.
FINE, COARSE = 2e-6, 5e-3
LATE = {"loss": 0.1, "grad_norm": math.inf, "val_loss": 0.05}
# Instruction sets, best first: ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA, which restrict a better CPU to the set; a
# flag in /proc/cpuinfo that only CPUs with the whole set have; the dtype of recipes that may use any.
SETS = {
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "avx512_bf16", "bf16"),
    "avx512": ("avx512", "AVX512_CORE", "avx512bw", "fp32"),
    "avx2": ("avx2", "AVX2", "avx2", "fp32"),
    "default": ("default", "DEFAULT", "", "fp32"),
}
ENVIRONMENT = {
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "MASTER_ADDR": "127.0.0.1",
    "PYTHONPATH": str(FOLDER),
}
COMMON = [
    "--steps=60",
    "--eval_every=60",
    "--cache=cache",
    "--log_every=1",
    "--eval_batches=2",
    "--compile=none",
    "--deterministic",
    "--seq_len=32",
    "--micro_batch=0",
    "--batch_tokens=128",
    "--lr=5e-3",
    "--min_lr=1e-4",
    "--warmup_steps=6",
    "--seed=7",
    "--reshard=never",
]
# FP8 scales experts per row, other layers per tensor.
RECIPES = {
    "llama": "--data a.txt --model tiny-llama --dtype {dtype}",
    "gpt2": "--data a.txt --model tiny-gpt2 --n_layers 1 --dtype fp32 --micro_batch 2 --schedule linear --beta1 0.8",
    "tied": "--data a.txt --model tiny-llama3.2 --dtype {dtype} --param_dtype bf16 --state_dtype bf16 --schedule wsd"
    " --clip 0.5",
    "mixtral": "--data a.txt:3 b.txt:1 --val_data b.txt --model tiny-mixtral --n_layers 1 --dtype {dtype}"
    " --documents separate",
    "chat": "--data chat.jsonl --model tiny-llama --dtype {dtype} --seq_len 64 --schedule constant --weight_decay 0.3",
    "fp8": "--data a.txt --model tiny-mixtral --n_layers 1 --dtype fp32 --fp8 tensor --fp8_all_gather",
}
Figures = dict[str, list[float]]  # loss, grad_norm: one per step; val_loss: one


def sets_here() -> list[str]:
    """The instruction sets of this CPU, best first."""
    return [name for name, (_, _, flag, _) in SETS.items() if flag in CPUINFO.read_text()]


def write_data(folder: Path) -> None:
    """Texts and conversations of 60 invented words, from a generator that no version of Python or numpy changes."""
    state = 1

    def draw(n: int) -> int:
        nonlocal state
        state = (1103515245 * state + 12345) % 2**31  # the linear congruential generator of the C standard
        return (state >> 8) % n

    def sentence() -> str:
        return " ".join(words[min(draw(60), draw(60))] for _ in range(3 + draw(9))) + ".\n"

    words = ["".join("aeioulnrst"[draw(10)] for _ in range(1 + draw(7))) for _ in range(60)]
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text("".join(sentence() for _ in range(800)))
    with open(folder / "chat.jsonl", "w") as file:
        for _ in range(200):
            turns = ("user", "assistant") * (1 + draw(2))
            messages = [{"role": role, "content": sentence()} for role in turns]
            print(json.dumps({"messages": messages}), file=file)


def train_rank(index: int, dtype: str, ports: list[int]) -> None:
    """One of the three processes that train a recipe: the first alone, the others as two ranks."""
    recipe, port = [*RECIPES][index // 3], ports[index // 3]
    ranks, rank = (("1 rank", 0), ("2 ranks", 0), ("2 ranks", 1))[index % 3]
    os.environ.update(WORLD_SIZE=ranks[0], RANK=str(rank), MASTER_PORT=str(port))
    sys.exit(train.main([*COMMON, *RECIPES[recipe].format(dtype=dtype).split(), f"--out={recipe} on {ranks}"]))


def train_all(dtype: str) -> None:
    """Trains all recipes in the current folder at the same time, because two ranks often wait for each other. The
    environment selects the instruction set."""
    log.Log.draw = lambda *_, **__: None  # plots take time and do not affect losses
    ports = [get_free_port() for _ in RECIPES]
    start_processes(train_rank, (dtype, ports), nprocs=3 * len(RECIPES), start_method="fork")


def figures(folder: Path) -> Figures:
    """The figures of a finished run."""
    records = read_records(folder)
    return {key: [record[key] for record in records if key in record] for key in LATE}


def measure(instructions: str) -> dict[str, Figures]:
    """All runs with one instruction set, in a new process: libraries detect the CPU once per process."""
    aten, onednn, _, dtype = SETS[instructions]
    environment = os.environ | ENVIRONMENT | {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        command = [sys.executable, "-c", f"import golden; golden.train_all({dtype!r})"]
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        return {run.name: figures(run) for run in Path(folder).glob("* on *")}


def differences(expected: dict[str, Figures], measured: dict[str, Figures], dtype: str = "") -> list[str]:
    """The first differing figure of each kind and run. dtype: of the instruction set, to compare within tolerances;
    empty: bit for bit."""
    lines = []
    for run, kind in product(measured, LATE):
        flags = RECIPES[run.split()[0]].format(dtype=dtype)
        early = COARSE if "bf16" in flags or "--fp8" in flags else FINE
        figures = zip(expected[run][kind], measured[run][kind], strict=True)
        for step, (was, now) in enumerate(figures, 60 if kind == "val_loss" else 1):
            limit = early if step <= FIRST else LATE[kind]
            if not abs(now - was) <= (limit * abs(was) if dtype else 0):  # also if one is NaN
                lines.append(f"{run}: {kind} of step {step} is {now}, recorded {was}")
                break
    return lines


def main(argv: list[str]) -> None:
    asked = Parser({"--record": {"action": "store_true"}}).parse_args(argv)
    records = json.loads(RECORD.read_text())
    about = re.findall(r"^(?:vendor_id|cpu family)\s*: (.*)$", CPUINFO.read_text(), re.M)
    here = f"torch {TORCH} on {' family '.join(about[:2]) or 'unknown'} with "  # as AuthenticAMD family 25
    if asked.record:
        records |= {here + name: measure(name) for name in sets_here()}
        text = json.dumps(records, indent=1)
        RECORD.write_text(re.sub(r",\n +(?=[\d-])", ", ", text) + "\n")  # one line per list of losses
        return
    best = sets_here()[0]
    near, how, dtype = here + best, "bit for bit", ""
    if near not in records:
        near = next(name for name in records if name.endswith(best))
        how, dtype = f"within tolerances: the record is of {near}", SETS[best][-1]
    measured = measure(best)
    print(f"golden losses: {len(measured)} runs of {here}{best}, compared {how}")
    if lines := differences(records[near], measured, dtype):
        lines.append("If this change of the numerics is intended: --record; explain it in the commit")
        raise Failure("\n".join(lines))
    print("no differences")


if __name__ == "__main__":
    run_script(main)
