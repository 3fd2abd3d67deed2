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
import multiprocessing
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from errors import Failure, run_script  # first: it finds the Python that has torch

FOLDER = Path(__file__).resolve().parent
STEPS = 60
RECORD = FOLDER / "golden.json"
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
STEP = ("loss", "gradient norm")
MEANT = "If this change of the numerics is meant: `python bench/golden.py --record`, and say why in the commit"
Figures = dict[str, list[float] | float | str]  # loss, grad_norm: one per step; val_loss; weights: a checksum


def sets_here() -> list[str]:
    """The instruction sets that this CPU has, the best first."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.M)
    return [name for name, (*_, needed) in SETS.items() if flags and needed <= set(flags[1].split())]


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


def train_rank(words: list[str], environment: dict[str, str], output: str) -> None:
    """A rank, in a process of its own."""

    import log
    import rows
    import train

    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    rows.CACHE = Path("cache").resolve()
    log.peak_flops = lambda *_: (1e12, "not measured")  # these two take time, and have no part in a loss
    log.Log.draw = lambda self, always: None
    sys.exit(train.main(words))


def start(recipe: str, ranks: int, dtype: str) -> list[multiprocessing.Process]:
    """Starts the ranks of a run in the current folder, which holds the data. They are forks: torch is imported."""
    out = f"{recipe}-{ranks}"
    words = [*COMMON.split(), "--dtype", dtype, *RECIPES[recipe].split(), "--out", out]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        environment = job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        arguments = words, environment, f"{out}.log"
        processes.append(multiprocessing.get_context("fork").Process(target=train_rank, args=arguments))
        processes[-1].start()
    return processes


def finish(recipe: str, ranks: int, processes: list[multiprocessing.Process]) -> Figures:
    """Waits for the ranks of a run -> its figures."""
    for process in processes:
        process.join()
    out = Path(f"{recipe}-{ranks}")
    if any(process.exitcode for process in processes):
        raise Failure(f"{out} failed:\n{Path(f'{out}.log').read_text()[-4000:]}")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    run: Figures = {key: [record[key] for record in records if key in record] for key in ("loss", "grad_norm")}
    val_loss = next(record["val_loss"] for record in reversed(records) if "val_loss" in record)
    return run | {"val_loss": val_loss, "weights": checksum(out / "hf")}


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

    import train  # noqa: F401  (before the forks)

    torch.use_deterministic_algorithms(True, warn_only=True)  # which imports much, too
    write_data(Path())
    dtype, runs = "bf16" if instructions.endswith("bf16") else "fp32", {}
    for recipe in RECIPES:  # the runs of a recipe at the same time: of two ranks one often waits for the other
        started = {ranks: start(recipe, ranks, dtype) for ranks in (1, 2)}
        for ranks, processes in started.items():
            runs[f"{recipe} on {ranks} rank{'s' * (ranks > 1)}"] = finish(recipe, ranks, processes)
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
            raise Failure(f"The golden recipes could not be trained:\n{done.stderr[-4000:]}")
        return json.loads(Path(folder, "runs.json").read_text())


def differences(expected: dict[str, Figures], measured: dict[str, Figures]) -> list[str]:
    """A line for each run that differs: its first figure that does, and by how much."""
    lines = []
    for name in expected | measured:
        if name not in expected or name not in measured:
            lines.append(f"{name}: {'recorded' if name in expected else 'trained'} only")
        elif expected[name] != measured[name]:
            lines.append(f"{name}: {first_difference(expected[name], measured[name])}")
    return lines


def in_order(run: Figures) -> dict[str, float | str]:
    """Every figure of a run by its name, as they come in training."""
    pairs = zip_longest(run["loss"], run["grad_norm"])
    steps = {
        f"{what} of step {i}": value for i, pair in enumerate(pairs, 1) for what, value in zip(STEP, pair, strict=True)
    }
    return steps | {"validation loss": run["val_loss"], "checksum of the weights": run["weights"]}


def first_difference(expected: Figures, measured: Figures) -> str:
    was, now = in_order(expected), in_order(measured)
    what = next(name for name in was | now if was.get(name) != now.get(name))
    old, new = was.get(what), now.get(what)
    if old is None or new is None:
        return f"the {what} is {'recorded' if new is None else 'trained'} only"
    change = "" if isinstance(old, str) else f": {new - old:+.3g} ({new / old - 1:+.2g} of it)"
    return f"the {what} is {new}, recorded {old}{change}; all before it agree"


def torch_version() -> str:
    import torch

    return torch.__version__.partition("+")[0]


def expected_runs(instructions: str) -> tuple[dict[str, Figures], str]:
    """-> (the recorded runs, why there are none)"""
    record, again = json.loads(RECORD.read_text()), "`python bench/golden.py --record` makes one"
    if record["torch"] != torch_version():
        return {}, f"the golden losses are of torch {record['torch']}, this is {torch_version()}; {again}"
    if instructions not in record["sets"]:
        return {}, f"no golden losses for this CPU, which has none of {', '.join(SETS)}; add its set to SETS; {again}"
    found = record["sets"][instructions]
    if "missing" in found:
        return {}, f"no golden losses for {instructions}: {found['missing']}; {again} on a CPU that has it"
    return found, ""


def record_all() -> None:
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    sets, name = {}, cpu[1] if cpu else platform.machine()
    for instructions in SETS:
        if instructions in sets_here():
            sets[instructions] = measure(instructions)
        else:
            sets[instructions] = {"missing": f"the CPU of the last recording ({name}) does not have it"}
    text = json.dumps({"torch": torch_version(), "cpu": name, "sets": sets}, indent=1)
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
    expected, problem = expected_runs(instructions)
    lines = [problem] if problem else differences(expected, measure(instructions))
    if lines:
        raise Failure("\n".join(lines if problem else [*lines, MEANT]))
    print(f"{len(expected)} runs with {instructions}: every loss is the recorded one")


if __name__ == "__main__":
    run_script(main)
