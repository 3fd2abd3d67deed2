"""Golden losses: a net under every change that must leave the numerics alone.

    python bench/golden.py                  # do the losses of this checkout agree with golden.json, bit for bit?
    python bench/golden.py --set avx2       # of another instruction set that this CPU has
    python bench/golden.py --record         # writes golden.json anew, of every set that this CPU has

Six tiny recipes, each on one rank and on two, are trained for 60 steps by train.py as a user starts it. golden.json
holds the loss and the gradient norm of every step, the validation loss at the end and a checksum of the exported
weights. Every figure must come again bit for bit, whatever the machine: one thread per rank, uncompiled, torch's
kernels and oneDNN's held to one instruction set, MKL to the code that all x86 CPUs share.

bf16 is recorded where the CPU multiplies it; in the other sets everything is fp32, which is what `--dtype auto` means
there. Another version of torch, or a CPU with none of the sets, has no record: that is said, not passed over."""

import argparse
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lib.errors import Failure, run_script  # first: it finds the Python that has torch

FOLDER = Path(__file__).resolve().parent
STEPS = 60
RECORD = FOLDER / "golden.json"
TORCH = version("torch").partition("+")[0]
# Named in /proc/cpuinfo; the best first. The environment holds a better CPU to the set.
SETS = {
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}),
    "avx512": ("avx512", "AVX512_CORE", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx2": ("avx2", "AVX2", {"avx2", "fma"}),
}
COMMON = (
    f"--steps {STEPS} --log_every 1 --eval_every {STEPS} --eval_batches 2 --compile none --deterministic"
    " --seq_len 32 --micro_batch 0 --batch_tokens 128 --lr 5e-3 --min_lr 1e-4 --warmup_steps 6 --seed 7 --reshard never"
)
# Flags of each; where one has no --dtype it is bf16 in the set that has it. FP8 scales experts row by row, the other
# layers as a whole.
RECIPES = {
    "llama": "--data a.txt --model tiny-llama",
    "gpt2": "--data a.txt --model tiny-gpt2 --n_layers 1 --dtype fp32 --micro_batch 2 --schedule linear --beta1 0.8",
    "tied": "--data a.txt --model tiny-llama3.2 --param_dtype bf16 --state_dtype bf16 --schedule wsd --clip 0.5",
    "mixtral": "--data a.txt:3 b.txt:1 --val_data b.txt --model tiny-mixtral --n_layers 1 --documents separate",
    "chat": "--data chat.jsonl --model tiny-llama --seq_len 64 --schedule constant --weight_decay 0.3",
    "fp8": "--data a.txt --model tiny-mixtral --n_layers 1 --dtype fp32 --fp8 tensor --fp8_all_gather",
}
MEANT = "If this change of the numerics is meant: `python bench/golden.py --record`, and say why in the commit"
Figures = dict[str, list[float] | float | str]  # loss, grad_norm: one per step; val_loss; weights: a checksum


def sets_here() -> list[str]:
    """The instruction sets that this CPU has, the best first."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return [name for name, (*_, needed) in SETS.items() if needed <= words]


def write_data(folder: Path) -> None:
    """Texts and conversations from a generator of our own: no version of Python or numpy changes them."""
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


def train_rank(index: int, recipe: str, dtype: str, port: int) -> None:
    """One of the three processes that train a recipe: the first alone, the others as two ranks."""
    import log
    import train
    from lib import rows

    ranks, rank = (2, index - 1) if index else (1, 0)
    job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in job.items()}, MASTER_ADDR="127.0.0.1")
    rows.CACHE = Path("cache").resolve()
    log.peak_flops = lambda *_: (1e12, "not measured")  # these two take time, and have no part in a loss
    log.Log.draw = lambda self, always: None
    words = [*COMMON.split(), "--dtype", dtype, *RECIPES[recipe].split(), "--out", f"{recipe}-{ranks}"]
    sys.exit(train.main(words))


def figures(folder: Path) -> Figures:
    """Of a finished run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses, norms, (val_loss,) = (
        [record[key] for record in records if key in record] for key in ("loss", "grad_norm", "val_loss")
    )
    return {"loss": losses, "grad_norm": norms, "val_loss": val_loss, "weights": checksum(folder / "hf")}


def checksum(folder: Path) -> str:
    from safetensors.torch import load_file

    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + tensor.numpy().tobytes())
    return total.hexdigest()[:16]


def train_all(instructions: str) -> None:
    """Trains every recipe in the current folder and writes runs.json. The environment holds the instruction set."""
    import torch
    from torch.multiprocessing import start_processes

    import train  # noqa: F401  (before the forks)

    torch.use_deterministic_algorithms(True, warn_only=True)  # which imports much, too
    write_data(Path())
    dtype, runs = "bf16" if instructions.endswith("bf16") else "fp32", {}
    for recipe in RECIPES:  # its runs at the same time: of two ranks one often waits for the other
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        start_processes(train_rank, (recipe, dtype, port), nprocs=3, start_method="fork")
        for ranks in (1, 2):
            runs[f"{recipe} on {ranks} rank{'s' * (ranks > 1)}"] = figures(Path(f"{recipe}-{ranks}"))
    Path("runs.json").write_text(json.dumps(runs))


def measure(instructions: str) -> dict[str, Figures]:
    """All runs with one instruction set, in a process of its own: what a CPU can do is asked once."""
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


def in_order(run: Figures) -> dict[str, float | str]:
    """Every figure of a run by its name, as they come in training."""
    steps = {}
    for step, (loss, norm) in enumerate(zip(run["loss"], run["grad_norm"], strict=True), 1):
        steps |= {f"loss of step {step}": loss, f"gradient norm of step {step}": norm}
    return steps | {"validation loss": run["val_loss"], "checksum of the weights": run["weights"]}


def differences(expected: dict[str, Figures], measured: dict[str, Figures]) -> list[str]:
    """A line for each run that differs: its first figure that does, and by how much."""
    lines = []
    for name in expected | measured:
        was, now = (in_order(runs[name]) if name in runs else {} for runs in (expected, measured))
        what = next((what for what in was | now if was.get(what) != now.get(what)), "")
        old, new = was.get(what), now.get(what)
        numbers = isinstance(old, float) and isinstance(new, float)
        change = f": {new - old:+.3g} ({new / old - 1:+.2g} of it)" if numbers else ""
        if what:
            lines.append(f"{name}: the {what} is {new}, recorded {old}{change}; all before it agree")
    return lines


def expected_runs(instructions: str) -> dict[str, Figures]:
    """The recorded runs. Raises Failure if there are none."""
    record, again = json.loads(RECORD.read_text()), "`python bench/golden.py --record` makes one"
    if record["torch"] != TORCH:
        raise Failure(f"the golden losses are of torch {record['torch']}, this is {TORCH}; {again}")
    if instructions not in record["sets"]:
        sets = ", ".join(SETS)
        raise Failure(f"no golden losses for this CPU, which has none of {sets}; add its set to SETS; {again}")
    runs = record["sets"][instructions]
    if "missing" in runs:
        raise Failure(f"no golden losses for {instructions}: {runs['missing']}; {again} on a CPU that has it")
    return runs


def record_all() -> None:
    from log import cpu_name

    missing = {"missing": f"the CPU of the last recording ({cpu_name()}) does not have it"}
    sets = {name: measure(name) if name in sets_here() else missing for name in SETS}
    text = json.dumps({"torch": TORCH, "cpu": cpu_name(), "sets": sets}, indent=1)
    text = re.sub(r",\n +(?=[\d-])", ", ", text)  # a list of losses is a line
    RECORD.write_text(text + "\n")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write golden.json anew")
    parser.add_argument("--set", choices=SETS, help="instruction set (default: the best that this CPU has)")
    args = parser.parse_args(argv)
    if args.record:
        return record_all()
    instructions = args.set or next(iter(sets_here()), "")
    expected = expected_runs(instructions)
    lines = differences(expected, measure(instructions))
    if lines:
        raise Failure("\n".join([*lines, MEANT]))
    print(f"{len(expected)} runs with {instructions}: every loss is the recorded one")


if __name__ == "__main__":
    run_script(main)
