"""Golden losses: training runs whose losses must not change unless a change of the numerics is intended.

    python bench/golden.py                  # compare this checkout's losses with golden.json
    python bench/golden.py --set avx2       # the same, with another instruction set of this CPU
    python bench/golden.py --record         # replace this CPU maker's record by new measurements

train.py trains six tiny recipes for 60 steps, each on one rank and on two. golden.json holds the loss and the gradient
norm of every step and the final validation loss, per CPU maker and instruction set.
Runs use one thread per rank, no compiler, one instruction set in torch and oneDNN, and the MKL code that all x86 CPUs
share. The avx512_bf16 set computes in bf16, unless a recipe says fp32; the other sets compute in fp32.

With the same torch, CPU maker and family, and instruction set as the record, every figure must be equal bit for bit.
Any other machine or torch is compared within tolerances, and the result states why; no machine is skipped. ARM CPUs
have no x86 set: they use the set `default` (torch's portable kernels, fp32), compared with the EPYC's.
torch 2.11 computes the same bits as 2.13 on the EPYC; this is not assumed.

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
differences grow with the steps: after 60, losses differed by up to 3.3e-2 and validation losses by up to 1.3e-2. LATE
and VALIDATION still catch a run that stops learning. test_bench.py makes the three mistakes and checks that each is
caught."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lib.errors import Failure, Parser, run_script  # first: it finds the Python that has torch

FOLDER = Path(__file__).resolve().parent
STEPS = 60
RECORD = FOLDER / "golden.json"
TORCH = version("torch").partition("+")[0]
FIRST = 5  # steps that are compared closely
FINE, COARSE, LATE, VALIDATION = 2e-6, 5e-3, 0.1, 0.05  # relative differences; LATE: losses after the first steps
# Instruction sets, best first: ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, and the names in /proc/cpuinfo. The two
# variables restrict a better CPU to the set.
SETS = {
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}),
    "avx512": ("avx512", "AVX512_CORE", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx2": ("avx2", "AVX2", {"avx2", "fma"}),
    "default": ("default", "DEFAULT", set()),
}
COMMON = (
    f"--steps {STEPS} --log_every 1 --eval_every {STEPS} --eval_batches 2 --compile none --deterministic"
    " --seq_len 32 --micro_batch 0 --batch_tokens 128 --lr 5e-3 --min_lr 1e-4 --warmup_steps 6 --seed 7 --reshard never"
)
# A recipe without --dtype computes in bf16 in the avx512_bf16 set. FP8 scales experts per row, other layers per tensor.
RECIPES = {
    "llama": "--data a.txt --model tiny-llama",
    "gpt2": "--data a.txt --model tiny-gpt2 --n_layers 1 --dtype fp32 --micro_batch 2 --schedule linear --beta1 0.8",
    "tied": "--data a.txt --model tiny-llama3.2 --param_dtype bf16 --state_dtype bf16 --schedule wsd --clip 0.5",
    "mixtral": "--data a.txt:3 b.txt:1 --val_data b.txt --model tiny-mixtral --n_layers 1 --documents separate",
    "chat": "--data chat.jsonl --model tiny-llama --seq_len 64 --schedule constant --weight_decay 0.3",
    "fp8": "--data a.txt --model tiny-mixtral --n_layers 1 --dtype fp32 --fp8 tensor --fp8_all_gather",
}
INTENDED = "If this change of the numerics is intended: `python bench/golden.py --record`; explain it in the commit"
Figures = dict[str, list[float] | float]  # loss, grad_norm: one per step; val_loss


def cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def maker() -> str:
    """Maker and family of this CPU: AuthenticAMD family 25; on ARM, CPU implementer 0x41."""
    fields = dict(re.findall(r"^(vendor_id|cpu family|CPU implementer)\s*: (.*)$", cpuinfo(), re.M))
    if "vendor_id" in fields:
        return f"{fields['vendor_id']} family {fields.get('cpu family')}"
    return f"CPU implementer {fields.get('CPU implementer', 'unknown')}"


def sets_here() -> list[str]:
    """The instruction sets of this CPU, best first."""
    names = set(cpuinfo().split())
    return [name for name, (*_, needed) in SETS.items() if needed <= names]


def default_dtype(instructions: str) -> str:
    """The dtype of recipes without --dtype."""
    return "bf16" if instructions.endswith("bf16") else "fp32"


def write_data(folder: Path) -> None:
    """Texts and conversations from a generator that no version of Python or numpy changes."""
    state = 1

    def draw(n: int) -> int:
        nonlocal state
        state = (1103515245 * state + 12345) % 2**31  # the linear congruential generator of the C standard
        return (state >> 8) % n

    words = ["".join("aeioulnrst"[draw(10)] for _ in range(1 + draw(7))) for _ in range(60)]

    def sentence() -> str:
        return " ".join(words[min(draw(60), draw(60))] for _ in range(3 + draw(9))) + ".\n"

    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text("".join(sentence() for _ in range(800)))
    rows = []
    for _ in range(200):
        pairs = [{"role": role, "content": sentence()} for _ in range(1 + draw(2)) for role in ("user", "assistant")]
        rows.append(json.dumps({"messages": pairs}) + "\n")
    (folder / "chat.jsonl").write_text("".join(rows))


def skip_plots(replace_by: Callable = setattr) -> None:
    """Skips two parts of a run that take time and do not affect losses: measuring the CPU's peak, and plots."""
    import log

    replace_by(log, "peak_flops", lambda *_: (1e12, "not measured"))
    replace_by(log.Log, "draw", lambda self: None)


def train_rank(index: int, recipe: str, dtype: str, port: int) -> None:
    """One of the three processes that train a recipe: process 0 alone, processes 1 and 2 as two ranks."""
    import train
    from lib import rows

    ranks, rank = (2, index - 1) if index else (1, 0)
    job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in job.items()}, MASTER_ADDR="127.0.0.1")
    rows.CACHE = Path("cache").resolve()
    skip_plots()
    words = [*COMMON.split(), "--dtype", dtype, *RECIPES[recipe].split(), "--out", f"{recipe}-{ranks}"]
    sys.exit(train.main(words))


def figures(folder: Path) -> Figures:
    """The figures of a finished run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses, norms, (val_loss,) = (
        [record[key] for record in records if key in record] for key in ("loss", "grad_norm", "val_loss")
    )
    return {"loss": losses, "grad_norm": norms, "val_loss": val_loss}


def train_all(instructions: str) -> None:
    """Trains every recipe in the current folder and writes runs.json. The environment selects the instruction set."""
    import torch
    from torch.multiprocessing import start_processes

    import train  # noqa: F401  imported before the forks

    torch.use_deterministic_algorithms(True, warn_only=True)  # loads its modules before the forks
    write_data(Path())
    dtype, runs = default_dtype(instructions), {}
    for recipe in RECIPES:  # on one rank and on two at the same time, because two ranks often wait for each other
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        start_processes(train_rank, (recipe, dtype, port), nprocs=3, start_method="fork")
        for ranks in (1, 2):
            runs[f"{recipe} on {ranks} rank{'s' * (ranks > 1)}"] = figures(Path(f"{recipe}-{ranks}"))
    Path("runs.json").write_text(json.dumps(runs))


def measure(instructions: str) -> dict[str, Figures]:
    """All runs with one instruction set, in a new process: libraries detect the CPU once per process."""
    aten, onednn, _ = SETS[instructions]
    settings = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "ATEN_", "ONEDNN_", "DNNL_", "TORCH")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(settings)}
    environment |= {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_CBWR": "COMPATIBLE"}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        work = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import golden; golden.train_all({instructions!r})"
        done = subprocess.run([sys.executable, "-c", work], cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise Failure(f"The golden recipes could not be trained:\n{(done.stdout + done.stderr)[-4000:]}")
        return json.loads(Path(folder, "runs.json").read_text())


def in_order(run: Figures) -> dict[str, float]:
    """The figures of a run by name, in the order of training."""
    steps = {}
    for step, (loss, norm) in enumerate(zip(run["loss"], run["grad_norm"], strict=True), 1):
        steps |= {f"loss of step {step}": loss, f"gradient norm of step {step}": norm}
    return steps | {"validation loss": run["val_loss"]}


def agrees(run: str, figure: str, old: float | None, new: float | None, dtype: str) -> bool:
    """Whether a figure agrees with the record: bit for bit, or within the tolerances of recipes in this dtype."""
    if not dtype or old is None or new is None:
        return old == new
    flags = RECIPES[run.split()[0]]
    kind, _, step = figure.partition(" of step ")
    if step and int(step) <= FIRST:
        rounds = "--fp8" in flags or "bf16" in flags or ("--dtype" not in flags.split() and dtype == "bf16")
        limit = COARSE if rounds else FINE
    else:
        limit = {"loss": LATE, "validation loss": VALIDATION}.get(kind, math.inf)
    return limit == math.inf or abs(new - old) <= limit * abs(old)


def differences(expected: dict[str, Figures], measured: dict[str, Figures], dtype: str = "") -> list[str]:
    """One line per run that differs, with its first differing figure. dtype: of recipes without --dtype, to compare
    within tolerances; empty: bit for bit."""
    lines = []
    for name in expected | measured:
        was, now = (in_order(runs[name]) if name in runs else {} for runs in (expected, measured))
        for figure in was | now:
            old, new = was.get(figure), now.get(figure)
            if not agrees(name, figure, old, new, dtype):
                lines.append(f"{name}: the {figure} is {new}, recorded {old}; earlier figures agree")
                break
    return lines


def find_record(instructions: str) -> tuple[dict[str, Figures], str]:
    """The record to compare with, and why the comparison uses tolerances; "" if it is bit for bit."""
    record = json.loads(RECORD.read_text())
    here, makers = maker(), record["makers"]
    chosen = here if here in makers else next(iter(makers))
    sets = makers[chosen]["sets"]
    near = instructions if instructions in sets else [*sets][-1]  # the last one is fp32
    reasons = []
    if record["torch"] != TORCH:
        reasons.append(f"recorded with torch {record['torch']}, this is {TORCH}")
    if chosen != here:
        reasons.append(f"no record of this CPU ({here}), compared with {chosen}")
    if near != instructions:
        reasons.append(f"no record of the set {instructions}, compared with {near}")
    return sets[near], "; ".join(reasons)


def compare(instructions: str) -> tuple[list[str], str]:
    """Trains the recipes -> the differences from the record, and a statement of how they were compared."""
    expected, reason = find_record(instructions)
    measured = measure(instructions)
    lines = differences(expected, measured, default_dtype(instructions) if reason else "")
    how = f"within tolerances, not bit for bit: {reason}" if reason else "bit for bit"
    return lines, f"golden losses: {len(expected)} runs with {instructions}, compared {how}"


def record_here() -> None:
    """Replaces this maker's record. Removes other records if the numerics have changed on this machine."""
    from lib.machine import cpu_name

    record, here = json.loads(RECORD.read_text()), maker()
    makers, sets = record["makers"], {name: measure(name) for name in sets_here()}
    old = makers.pop(here, {}).get("sets")
    changed = old != sets if old else differences(find_record("default")[0], sets["default"], "fp32")
    if record["torch"] != TORCH or changed:
        print(f"The numerics changed, so these records are removed; record again there: {', '.join(makers) or 'none'}")
        makers = {}
    makers[here] = {"cpu": cpu_name(), "sets": sets}
    text = json.dumps({"torch": TORCH, "makers": dict(sorted(makers.items()))}, indent=1)
    RECORD.write_text(re.sub(r",\n +(?=[\d-])", ", ", text) + "\n")  # one line per list of losses


def main(argv: list[str]) -> None:
    parser = Parser("bench/golden.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="replace this CPU maker's record in golden.json")
    parser.add_argument("--set", choices=sets_here(), help="instruction set (default: the best of this CPU)")
    args = parser.parse_args(argv)
    if args.record:
        return record_here()
    lines, statement = compare(args.set or sets_here()[0])
    print(statement)
    if lines:
        raise Failure("\n".join([*lines, INTENDED]))
    print("no differences")


if __name__ == "__main__":
    run_script(main)
