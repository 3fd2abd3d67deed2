"""Where the time of a step goes: `--profile N` leaves a Chrome trace and a table of N steps in runs/NAME/profile/.

    python profiler.py runs/NAME/profile/rank-00000.trace.json.gz         the table of a trace, again

Every moment of the profiled steps belongs to one category: they add up to the wall time. On a GPU it is that of the
kernel that runs: computation before communication, so what is said of communication is what nothing hides; a gap is
`data wait` while the host waits for a batch, `optimizer` while it updates offloaded parameters, else `idle`. On a CPU
it is that of the innermost operation in the main thread; between operations it is `communication` while gloo sends,
else `idle`: Python and what it takes to call.

An operation is told by what it is called from (optimizer, loss head, FSDP), else by its own name, from inside to
outside. The names are those of torch's profiler, of inductor's kernels and of the libraries' (cuBLAS, cuDNN, NCCL)."""

import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from errors import UserError  # first: it finds the Python that has torch

import torch  # isort: skip
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from config import PROFILE_AFTER
from guard import Run
from log import logger

OTHER = "evaluation, saves and samples"  # that fall between profiled steps: none of a step's time
CATEGORIES = (
    "matmul", "attention", "loss head", "norms and elementwise", "optimizer", "communication", "data wait", OTHER,
    "idle",
)  # fmt: skip

WITHIN = (  # an operation is of the first of these that it, or what it is called from, matches
    (OTHER, r"^part: (evaluation|saves|samples)"),
    ("data wait", r"^part: data"),
    ("optimizer", r"^Optimizer\.|multi_tensor_apply|aten::_foreach_"),  # the latter two: the gradient norm, too
    ("loss head", r"LinearCrossEntropy|fused.*_logsumexp"),
    ("communication", r"^FSDP::|c10d|nccl|^gloo:|record_param_comms"),
)
KINDS = (  # else of the first that matches the innermost name that any does
    ("matmul", r"^triton_(tem|mm)|^cpp_.*_mm"),
    ("attention", r"fused.*softmax.*masked_fill"),  # of attention.py's blocks; the routers' softmax masks nothing
    ("norms and elementwise", r"^triton_|cpp_fused"),
    ("attention", r"(?i)scaled_?dot_?product|flash|fmha|sdpa|varlen_attn|aten::(_softmax|bmm|baddbmm)"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|xmma|splitK|aten::(mm|addmm|_?grouped_mm|_scaled_mm)$|mkldnn.*linear|gemv"),
)


@cache
def _first_match(name: str, rules: tuple) -> int | None:
    return next((i for i, (_, pattern) in enumerate(rules) if re.search(pattern, name)), None)


def category(names: list[str], vocab: int = 0, shapes: list | None = None) -> str:
    """names: of an operation and of all that it is called from, the outermost first; shapes: of a matrix product's
    operands. A product with a dimension of `vocab` is the loss head's."""
    within = [i for i in (_first_match(name, WITHIN) for name in names) if i is not None]
    if within:
        return WITHIN[min(within)][0]
    kinds = [i for i in (_first_match(name, KINDS) for name in names) if i is not None]
    if kinds:
        found = KINDS[kinds[-1]][0]
        head = found == "matmul" and vocab and any(vocab in shape for shape in shapes or [] if len(shape) == 2)
        return "loss head" if head else found
    ours = any(name.startswith("aten::") for name in names)
    return "norms and elementwise" if ours else "idle"  # a range of Python's own


def host_segments(events: list[dict], vocab: int = 0) -> tuple[list[tuple], dict[int, list]]:
    """One thread's events, which nest -> (start, end, category, name) of every stretch with the same innermost event;
    and [names, shapes] of all that surrounds the launch of each kernel, by its correlation id."""
    segments, launches, stack, now = [], {}, [], 0.0

    def until(moment: float) -> None:
        """Gives the time from `now` on to the events on the stack, which end meanwhile."""
        nonlocal now
        while stack:
            end, names, shapes, kind = stack[-1]
            if min(end, moment) > now:
                segments.append((now, min(end, moment), kind, names[-1]))
                now = min(end, moment)
            if end > moment:
                break
            stack.pop()
        now = moment

    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        until(event["ts"])
        args = event.get("args", {})
        names = [*(stack[-1][1] if stack else []), event["name"]]
        shapes = args.get("Input Dims") or (stack[-1][2] if stack else None)
        if event["cat"] in ("cuda_runtime", "cuda_driver"):
            launches[args.get("correlation")] = [names[:-1], shapes]
        stack.append((event["ts"] + event["dur"], names, shapes, category(names, vocab, shapes)))
    until(float("inf"))
    return segments, launches


def divide(segments: list[tuple], begin: float, end: float) -> dict[str, float]:
    """Shares out [begin, end] among (start, end, category, ...): of what overlaps, the first of CATEGORIES wins; what
    none covers is idle. They add up to end - begin."""
    moments = [(max(s[0], begin), 1, s[2]) for s in segments if s[1] > begin and s[0] < end]
    moments += [(min(s[1], end), -1, s[2]) for s in segments if s[1] > begin and s[0] < end]
    spent, running, now = dict.fromkeys(CATEGORIES, 0.0), Counter(), begin
    for moment, change, kind in sorted([*moments, (end, 0, "idle")]):
        spent[next((c for c in CATEGORIES if running[c]), "idle")] += moment - now
        running[kind] += change
        now = moment
    return spent


def analyse(events: list[dict], vocab: int = 0) -> tuple[dict[str, float], dict[str, Counter], int]:
    """Chrome trace events, times in microseconds -> (time by category, time by category and name, steps)."""
    events = [e for e in events if e.get("ph") == "X"]
    steps = [e for e in events if e["name"].startswith("ProfilerStep#") and e["cat"] == "user_annotation"]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    main, launches, segments = steps[0]["tid"], {}, []
    threads: dict[object, list[dict]] = {}
    for event in events:
        if event["cat"] in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"):
            threads.setdefault(event["tid"], []).append(event)
    for thread, of_thread in threads.items():
        found, launched = host_segments(of_thread, vocab)
        launches |= launched
        segments += found if thread == main else [s for s in found if s[3].startswith("gloo:")]
    kernels = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        updates = re.compile("fused_adamw|cpp_fused")  # --offload cpu
        beside = ("data wait", OTHER)  # what of the host's work is told of where the GPU has none
        segments = [s for s in segments if s[2] in beside or s[2] == "optimizer" and updates.search(s[3])]
        for e in kernels:
            names, shapes = launches.get(e.get("args", {}).get("correlation"), [[], None])
            kind = category([*names, e["name"]], vocab, shapes)
            kind = "norms and elementwise" if kind == "idle" else kind
            segments.append((e["ts"], e["ts"] + e["dur"], kind, e["name"]))
    names = {c: Counter() for c in CATEGORIES}
    for start, stop, kind, name in segments:
        names[kind][name] += max(min(stop, end) - max(start, begin), 0.0)
    return divide(segments, begin, end), names, len(steps)


def table(events: list[dict], vocab: int = 0) -> str:
    """Categories, milliseconds a step and shares of a step, the longest operation of each."""
    spent, names, steps = analyse(events, vocab)
    beside = spent.pop(OTHER)
    total = sum(spent.values())
    lines = [f"{'':24} ms a step    share   the most of it"]
    for kind, time in spent.items():
        name, most = (names[kind].most_common(1) or [("", 0.0)])[0]
        most = (
            f"   {most / 1e3 / steps:.1f} {re.sub('^graph_[0-9]+_', '', name)[:60]}" if most and kind != "idle" else ""
        )
        lines.append(f"{kind:24} {time / 1e3 / steps:9.1f}   {time / total:6.1%}{most}")
    lines.append(f"{'wall time':24} {total / 1e3 / steps:9.1f}   {1:6.1%}")
    return "\n".join([*lines, *[f"beside it: {OTHER}, {beside / 1e3:.1f} ms in all"] * (beside > 0)])


def read_trace(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as f:
        return json.load(f)["traceEvents"]


def profiled(steps: range, run: Run) -> Iterator[int]:
    """The steps, one after the other; on rank 0 torch's profiler watches --profile of them, from the fourth on. What it
    takes to start it and to write what it saw is not the steps' time. Ends as the loop does: what was seen is
    written."""
    config, ranks = run.config, run.ranks
    n, first = config.profile, steps.start + PROFILE_AFTER
    if n and len(steps) < PROFILE_AFTER + n:
        raise UserError(
            f"--profile {n} watches steps {first} to {first + n - 1}, when all is compiled and warm, and the run ends"
            f" with step {steps.stop - 1}: give --steps {first + n - 1}, or --profile 0"
        )
    if not n or ranks.rank:
        yield from steps
        return
    torch._inductor.config.cpp.enable_kernel_profile = True  # CPU kernels by name; before anything is compiled
    cuda = ranks.device.type == "cuda"
    folder = run.folder / "profile"

    def write(record: profile) -> None:
        folder.mkdir(exist_ok=True)
        path = folder / f"rank-{ranks.rank:05d}.trace.json.gz"
        record.export_chrome_trace(str(path))
        events = read_trace(path)
        if cuda and not any(e.get("cat") == "kernel" for e in events):
            return logger.warning("The profiler saw no kernel (is CUPTI allowed here?): no table, only %s", path)
        text = table(events, config.model_config.vocab_size)
        (folder / "table.txt").write_text(text + "\n")
        logger.info("Profile of rank 0, from step %d on; for chrome://tracing or perfetto: %s\n%s", first, path, text)

    record = profile(
        activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda],
        schedule=schedule(wait=0, warmup=1, active=n, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
    )
    try:
        for step in steps:
            if step == first - 1:
                with run.phase("profile"):
                    logger.info(
                        "Profiling steps %d to %d: slower, and so is what is recorded of them", first, first + n - 1
                    )
                    record.start()
            yield step
            if first - 1 <= step < first + n:
                with run.phase("profile"):
                    if cuda and step in (first - 1, first + n - 1):
                        torch.cuda.synchronize()  # the kernels of these steps are launched and end in them
                    record.step()
    finally:
        if record.current_action != ProfilerAction.NONE:  # the run ends before the last of them
            with run.phase("profile"):
                record.stop()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python profiler.py TRACE.json.gz")
    print(table(read_trace(Path(sys.argv[1]))))
