"""Where the time of a step goes: `--profile N` leaves a Chrome trace and a table of N steps in runs/NAME/profile/.

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
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from config import PROFILE_AFTER
from lib.run import Run
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
HOST_UPDATE = re.compile("fused_adamw|cpp_fused")  # of --offload cpu: told of where the GPU has no work


@cache
def _kind(names: tuple[str, ...]) -> str:
    for kind, pattern in WITHIN:
        if any(re.search(pattern, name) for name in names):
            return kind
    for name in reversed(names):
        for kind, pattern in KINDS:
            if re.search(pattern, name):
                return kind
    ours = any(name.startswith("aten::") for name in names)
    return "norms and elementwise" if ours else "idle"  # a range of Python's own


def category(names: list[str], vocab: int = 0, shapes: list = ()) -> str:
    """names: of an operation and of all that it is called from, the outermost first; shapes: of a matrix product's
    operands. A product with a dimension of `vocab` is the loss head's."""
    kind = _kind(tuple(names))
    head = kind == "matmul" and vocab and any(vocab in shape for shape in shapes if len(shape) == 2)
    return "loss head" if head else kind


class Event(NamedTuple):
    """Of a trace; times in microseconds."""

    start: float
    end: float
    name: str
    cat: str
    thread: int
    args: dict


def sweep(spans: list[tuple]) -> Iterator[tuple[float, float, list[tuple]]]:
    """Spans begin with (start, end) -> (start, end, the spans that cover it) of every stretch in which these are the
    same, in the order of their starts: of spans that nest the last is the innermost."""
    moments = []
    for span in spans:
        if span[1] > span[0]:
            moments += [(span[0], 1, -span[1], len(moments), span), (span[1], 0, 0, len(moments), span)]
    active, now = [], 0.0
    for moment, starts, _, _, span in sorted(moments, key=lambda m: m[:4]):
        if active and moment > now:
            yield now, moment, active[:]
        now = moment
        active.append(span) if starts else active.remove(span)


def divide(spans: list[tuple], begin: float, end: float) -> tuple[dict[str, float], dict[str, Counter]]:
    """Shares out [begin, end] among (start, end, category, name): of what overlaps, the first of CATEGORIES wins; what
    none covers is idle. -> time by category, which adds up to end - begin; by category and name."""
    names = {kind: Counter() for kind in CATEGORIES}
    for start, stop, active in sweep(spans):
        seconds = min(stop, end) - max(start, begin)
        if seconds > 0:
            *_, kind, name = min(active, key=lambda span: CATEGORIES.index(span[2]))
            names[kind][name] += seconds
    spent = {kind: sum(counter.values()) for kind, counter in names.items()}
    spent["idle"] += end - begin - sum(spent.values())
    return spent, names


def host_spans(events: list[Event], vocab: int, launches: dict) -> Iterator[tuple[float, float, str, str]]:
    """(start, end, category, name) of the innermost event at every moment of a thread. launches: by the correlation id
    of a kernel, gets the names and shapes around its launch."""
    for start, end, active in sweep(events):
        names = [event.name for event in active]
        shapes = [event.args["Input Dims"] for event in active if event.args.get("Input Dims")][-1:]
        if active[-1].cat.startswith("cuda_"):
            launches[active[-1].args.get("correlation")] = names[:-1], shapes
        yield start, end, category(names, vocab, *shapes), names[-1]


def is_told(span: tuple, main: bool, gpu: bool) -> bool:
    """Whether a span of a thread counts: on a GPU only where kernels leave gaps."""
    *_, kind, name = span
    if gpu:
        return main and (kind in ("data wait", OTHER) or kind == "optimizer" and HOST_UPDATE.search(name) is not None)
    return main or name.startswith("gloo:")


def analyse(trace: list[dict], vocab: int = 0) -> tuple[dict[str, float], dict[str, Counter], int]:
    """Chrome trace events -> (time by category, time by category and name, steps)."""
    events = [
        Event(e["ts"], e["ts"] + e["dur"], e["name"], e["cat"], e["tid"], e.get("args", {}))
        for e in trace
        if e.get("ph") == "X"
    ]
    steps = [e for e in events if e.name.startswith("ProfilerStep#") and e.cat == "user_annotation"]
    kernels = [e for e in events if e.cat in ("kernel", "gpu_memcpy", "gpu_memset")]
    host = [e for e in events if e.cat in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")]
    launches, spans = {}, []
    for thread in {e.thread for e in host}:
        own = host_spans([e for e in host if e.thread == thread], vocab, launches)
        spans += [span for span in own if is_told(span, thread == steps[0].thread, bool(kernels))]
    for e in kernels:
        names, shapes = launches.get(e.args.get("correlation"), ([], []))
        kind = category([*names, e.name], vocab, *shapes)
        spans.append((e.start, e.end, "norms and elementwise" if kind == "idle" else kind, e.name))
    return *divide(spans, min(e.start for e in steps), max(e.end for e in steps)), len(steps)


def table(events: list[dict], vocab: int = 0) -> str:
    """Categories, milliseconds a step and shares of a step, the longest operation of each."""
    spent, names, steps = analyse(events, vocab)
    beside = spent.pop(OTHER)
    total = sum(spent.values())
    lines = [f"{'':24} ms a step    share   the most of it"]
    for kind, time in spent.items():
        line = f"{kind:24} {time / 1e3 / steps:9.1f}   {time / total:6.1%}"
        for name, most in names[kind].most_common(kind != "idle"):
            line += f"   {most / 1e3 / steps:.1f} {re.sub('^graph_[0-9]+_', '', name)[:60]}"
        lines.append(line)
    lines.append(f"{'wall time':24} {total / 1e3 / steps:9.1f}   {1:6.1%}")
    return "\n".join([*lines, *[f"beside it: {OTHER}, {beside / 1e3:.1f} ms in all"] * (beside > 0)])


def read_trace(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as f:
        return json.load(f)["traceEvents"]


def make_profile(steps: int, cuda: bool, path: Path, then: Callable[[], None] = lambda: None, wait: int = 0) -> profile:
    """torch's profiler: waits for some steps, warms up for one, records `steps` into a file, and calls `then`."""

    def write(record: profile) -> None:
        path.parent.mkdir(exist_ok=True)
        record.export_chrome_trace(str(path))
        then()

    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]
    plan = schedule(wait=wait, warmup=1, active=steps, repeat=1)
    return profile(activities=activities, schedule=plan, on_trace_ready=write, record_shapes=True)


def write_table(path: Path, cuda: bool, vocab: int, first: int) -> None:
    """Of a trace that begins with step `first`, beside it."""
    events = read_trace(path)
    if cuda and not any(e.get("cat") == "kernel" for e in events):
        return logger.warning("The profiler saw no kernel (is CUPTI allowed here?): no table, only %s", path)
    text = table(events, vocab)
    path.with_name("table.txt").write_text(text + "\n")
    logger.info("Profile of rank 0, from step %d on; for chrome://tracing or perfetto: %s\n%s", first, path, text)


def profiled(steps: range, run: Run) -> Iterator[int]:
    """The steps, one after the other; on rank 0 torch's profiler watches --profile of them, from the fourth on. What it
    takes to start it and to write what it saw is not the steps' time. Ends as the loop does: what was seen is
    written."""
    n, first = run.config.profile, steps.start + PROFILE_AFTER
    last = first + n - 1
    if n and last >= steps.stop:  # of a run that goes on, for config.py refuses others
        logger.warning("--profile %d watches steps %d to %d of this start: more than are left", n, first, last)
    if not n or run.ranks.rank or last >= steps.stop:
        yield from steps
        return
    torch._inductor.config.cpp.enable_kernel_profile = True  # CPU kernels by name; before anything is compiled
    cuda, path = run.ranks.device.type == "cuda", run.folder / "profile/rank-00000.trace.json.gz"
    vocab = run.config.model_config.vocab_size
    record = make_profile(n, cuda, path, lambda: write_table(path, cuda, vocab, first), PROFILE_AFTER - 1)
    logger.info("Profiling steps %d to %d: slower, and so is what is recorded of them", first, last)
    record.start()
    try:
        for step in steps:
            yield step
            if step <= last:
                with run.phase("profile"):
                    if cuda and step in (first - 1, last):
                        torch.cuda.synchronize()  # the kernels of these steps are launched and end in them
                    record.step()
    finally:
        with run.phase("profile"):
            record.stop()
