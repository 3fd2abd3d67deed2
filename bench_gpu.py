"""The GPU suite of bench.py: correctness, then training steps and their parts, against peers and limits.

    python bench.py --suite gpu [--parts NAME ...]

A part makes what it needs and frees it, so that any may be left out."""

import gc
import math
import re
import statistics
import subprocess
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from errors import ROOT  # first: it finds the Python that has torch

import torch  # isort: skip
import torch.distributed as dist
from torch import Tensor, nn

import fp8
import guard
import machine
import shard
import train
from bench_rows import Row, note, spread
from config import Config, parse_args
from data import Batch
from model import MODELS, LossHead, ModelConfig, Transformer, flops_per_token, initial_std, random_init
from optim import make_optimizer, update
from preflight import Made, first_values, prepare_fp8, resolve
from weights import config_json

PEAK = 989e12  # FLOP/s, dense bf16, of an H100 or H200 (SXM) by its data sheet; what MFU is a share of
LR = 1e-5
TINY = (
    "--dim 64 --n_layers 2 --n_heads 4 --n_kv_heads 4 --ffn_dim 176 --vocab_size 256 --seq_len 32 --micro_batch 2"
    " --dtype bf16 --attention sdpa"
)


class Lab(NamedTuple):
    """Where the GPU suite runs. tiny: small shapes, few steps. deadline: of time.monotonic()."""

    ranks: shard.Ranks
    tiny: bool
    deadline: float

    @property
    def cuda(self) -> bool:
        return self.ranks.device.type == "cuda"

    def layers(self, n: int) -> int:
        """Half of them where an 80 GB GPU could not hold the models of both contenders."""
        small = self.cuda and torch.cuda.get_device_properties(self.ranks.device).total_memory < 100e9
        return n // 2 if small else n


class Contender(NamedTuple):
    step: Callable[[], object]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def gpu_state() -> dict[str, str]:
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields.split(","), found.split(", "), strict=True))


def measure(lab: Lab, steps: dict[str, Callable], warm: int = 2, rounds: int = 6) -> tuple[dict, dict, dict]:
    """Rounds of 5 steps of each in turn, `warm` of them unmeasured, with no waiting inside a round -> seconds of each
    step, peak bytes, and what nvidia-smi said meanwhile, with the graphs that were compiled after the warm-up."""
    counters, seconds, peaks = torch._dynamo.utils.counters["stats"], {n: [] for n in steps}, dict.fromkeys(steps, 0)
    length, warm, rounds = (1, 1, 2) if lab.tiny else (5, warm, rounds)

    def mark():
        if not lab.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    with ThreadPoolExecutor(1) as thread:
        for turn in range(warm + rounds):
            if turn > warm and time.monotonic() > lab.deadline:
                break
            if turn == warm:
                graphs, state = counters["unique_graphs"], thread.submit(gpu_state)
            for name, step in steps.items():
                if lab.cuda:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                marks = [mark()]
                for _ in range(length):
                    step()
                    marks.append(mark())
                if lab.cuda:
                    torch.cuda.synchronize()
                    peaks[name] = torch.cuda.max_memory_allocated()
                if turn >= warm:
                    both = zip(marks, marks[1:], strict=False)
                    seconds[name] += [a.elapsed_time(b) / 1e3 if lab.cuda else b - a for a, b in both]
        return seconds, peaks, state.result() | {"late graphs": counters["unique_graphs"] - graphs}


def rows_of(case: str, unit: str, amount: float, measured: tuple, says: Callable[[str, float], str]) -> list[Row]:
    """A row for each contender, in amount per second; ratios to the last. says(name, amount per second): what to add to
    its name."""
    (seconds, _, state), rows = measured, []
    late = f"; {state['late graphs']} graphs compiled meanwhile" * bool(state["late graphs"])
    for name, values in seconds.items():
        rates = spread(amount, values)
        row = {"case": case, "what": f"{name}{says(name, rates['median'])}{late}", "unit": unit, **rates}
        rows.append(row | {"steps": len(values), "gpu": state})
    return [row | {"ratio": row["median"] / rows[-1]["median"]} for row in rows]


def held(contender: Contender) -> dict[int, int]:
    """Bytes of each of its parameters and moments on the GPU, by address: contenders may share them."""
    states = (t for state in contender.optimizer.state.values() for t in state.values())
    tensors = [shard.local(t.detach()) for t in (*contender.model.parameters(), *states)]
    return {t.data_ptr(): t.nbytes for t in tensors if t.device.type == "cuda"}


def race_training(lab: Lab, case: str, contenders: dict[str, Contender], flags: str, **rounds: int) -> list[Row]:
    """Tokens/s, MFU (causal) and peak memory, without what the others hold; ratios to the last."""
    config = flags_to_config(lab, flags)
    tokens, flops = config.micro_batch * config.seq_len, flops_per_token(config.model_config, config.seq_len)
    measured = measure(lab, {name: c.step for name, c in contenders.items()}, **rounds)
    own = {name: held(c) for name, c in contenders.items()}
    everything = {k: v for part in own.values() for k, v in part.items()}

    def says(name: str, rate: float) -> str:
        others = sum(everything.values()) - sum(own[name].values())
        return f"; MFU {rate * flops / PEAK:.1%}; {(measured[1][name] - others) / 2**30 * lab.cuda:.1f} GiB"

    return rows_of(case, "tokens/s", tokens, measured, says)


@cache
def flags_to_config(lab: Lab, flags: str) -> Config:
    words = f"--compile block {flags} {TINY * lab.tiny} {'--compile none' * (not lab.cuda)}".split()
    return resolve(parse_args(words), lab.ranks.device, 1)


def random_batch(lab: Lab, config: Config) -> Batch:
    own = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.model_config.vocab_size, (config.micro_batch, config.seq_len + 1), generator=own)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@torch.no_grad()
def fill_on_device(model: Transformer, device: torch.device) -> None:
    """Random values as of `random_init`, but drawn where it takes no time."""
    for name, p in model.named_parameters():
        std, target = initial_std(model.config, name), shard.local(p)
        if std:
            target.copy_(torch.randn(target.shape, device=device).mul_(std))
        else:
            target.fill_(1.0 if std is None else 0.0)


def ours(lab: Lab, flags: str, shared: Contender | None = None, mesh=None, own_units: bool = True) -> Contender:
    config = flags_to_config(lab, flags)
    return our_step(config, lab.ranks, random_batch(lab, config), shared, mesh, own_units)


def our_step(
    config: Config, ranks: shard.Ranks, batch: Batch, shared: Contender | None = None, mesh=None, own_units: bool = True
) -> Contender:
    """train.py's step on one micro-batch. shared: whose parameters and optimizer it trains."""
    number, model = 0, train.build(config, ranks, mesh if own_units else None, Made())
    if shared:
        model.load_state_dict(shared.model.state_dict(keep_vars=True), assign=True)
    elif ranks.device.type == "cuda":
        fill_on_device(model, ranks.device)
    else:
        shard.fill(model, *first_values(config, model, None))
    if not own_units:  # what build does, with the one argument that no flag sets
        shard.shard_model(model, mesh, model.dtype, reshard=config.reshard, prefetch=config.prefetch, own_units=False)
    scales = prepare_fp8(model, config, ranks, mesh)
    optimizer = shared.optimizer if shared else make_optimizer(model, config)
    gradients = guard.GradientGuard(model, config.clip, ranks, mesh)

    def step() -> Tensor:
        nonlocal number
        number += 1
        scales.refresh()
        shard.sync_gradients(model, True, config.reshard)
        here = batch.to(ranks.device)
        loss = model(here.tokens, here.targets)
        loss.backward()
        loss, _, grad_scale = gradients.reduce(loss.detach(), batch.targets.numel())
        update(optimizer, LR, grad_scale, gradients.suppress)
        model.take_router_sums()
        gradients.check(number)
        return loss

    return Contender(step, model, optimizer)


def theirs(lab: Lab, flags: str, compiled: bool, shared: Contender | None = None) -> Contender:
    """The same shape in transformers, all in bf16 (parameters and moments, too: ours are fp32), SDPA, clipping, fused
    AdamW."""
    import transformers

    config = flags_to_config(lab, flags)
    values = config_json(config.model_config, torch.bfloat16)
    if shared:
        model, optimizer = shared.model, shared.optimizer
    else:
        options = {k: v for k, v in values.items() if k not in ("architectures", "model_type", "torch_dtype")}
        shape = transformers.AutoConfig.for_model(values["model_type"], **options, use_cache=False)
        with torch.device(lab.ranks.device):
            kinds = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
            model = transformers.AutoModelForCausalLM.from_config(shape, **kinds).to(lab.ranks.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batch, call = random_batch(lab, config), model
    if compiled:
        call = torch.compile(model, dynamic=False, disable=lab.tiny)

    def step() -> None:
        tokens = batch.to(lab.ranks.device).tokens
        call(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Contender(step, model, optimizer)


KERNELS = {"compiled": "^triton", "attention": "sdpa|flash|fmha|attention", "optimizer": "multi_tensor_apply",
           "matmul": "gemm|nvjet|cutlass|cublas|xmma|splitK", "copies": "^Mem(cpy|set)"}  # fmt: skip


def profile_rows(lab: Lab, case: str, step: Callable) -> Iterator[Row]:
    from torch.profiler import ProfilerActivity, profile

    steps = 1 if lab.tiny else 3
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * lab.cuda]) as record:
        for _ in range(steps):
            step()
        if lab.cuda:
            torch.cuda.synchronize()
    events = [e for e in record.key_averages() if not getattr(e, "is_user_annotation", False)]
    side = torch.autograd.DeviceType.CUDA if lab.cuda else torch.autograd.DeviceType.CPU
    spent = {e.key: e.self_device_time_total if lab.cuda else e.self_cpu_time_total for e in events
             if e.device_type == side and not e.key.startswith("##")}  # fmt: skip
    yield from kernel_rows(case, {k: v / steps for k, v in spent.items()})
    waits = {k: 0.0 for k in ("cudaStreamSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")}
    waits |= {e.key: e.count / steps for e in events if e.key in waits}
    for name, count in waits.items():  # the event is that of the step before: it costs no waiting
        yield note(case, name, count, "per step")


def kernel_rows(case: str, spent: dict[str, float]) -> Iterator[Row]:
    """spent: microseconds by kernel. Shares of kernel time by kind; eager kernels above 1 % on their own."""
    total, kinds = sum(spent.values()), {}
    for name, time_ in spent.items():
        kind = next((kind for kind, pattern in KERNELS.items() if re.search(pattern, name)), "eager")
        kinds.setdefault(kind, {})[name] = time_
    for kind, named in sorted(kinds.items(), key=lambda item: -sum(item[1].values())):
        names = f": {max(named, key=named.get)[:120]}" if kind == "attention" else ""
        yield note(case, f"{kind}, {len(named)} kernels{names}", 100 * sum(named.values()) / total, "% of kernel time")
    for name, time_ in sorted(kinds.get("eager", {}).items(), key=lambda item: -item[1]):
        if time_ > total / 100:
            yield note(case, f"eager: {name[:120]}", 100 * time_ / total, "% of kernel time")


# ---- the parts


def check_bound(case: str, found: float, low: float, high: float) -> Row:
    if not low <= found < high:
        raise SystemExit(f"{case}: the error is {found:.2e}, not in [{low:.1e}, {high:.1e}): nothing is measured")
    return note(case, f"allowed {low:.1e} to {high:.1e}", found, "error", found / high)


def relative(found: Tensor, exact: Tensor) -> float:
    exact, found = exact.double().cpu(), found.detach().double().cpu()
    return ((found - exact).norm() / exact.norm()).nan_to_num(nan=math.inf).item()


def gpu_check(lab: Lab) -> Iterator[Row]:
    flags = "--model tiny-llama --dim 256 --n_layers 4 --ffn_dim 512 --seq_len 256 --micro_batch 2 --clip 0 --dtype"
    cpu = shard.Ranks(0, 1, torch.device("cpu"))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    results = {}
    for where, ranks, dtype in [(w, r, d) for w, r in (("cpu", cpu), ("gpu", lab.ranks)) for d in ("bf16", "fp32")]:
        config = flags_to_config(lab, f"{flags} {dtype}")
        config = replace(config, dtype=dtype, compile="none" if where == "cpu" else config.compile, attention="sdpa")
        model = train.build(config, ranks, None, Made())
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        shard.fill(model, random_init(config.model_config, shapes, 0))
        batch = random_batch(lab, config)
        here = batch.to(ranks.device)
        loss = model(here.tokens, here.targets)
        loss.backward()
        results[where, dtype] = [loss, *(p.grad for p in model.parameters())]
    exact = results.pop(("cpu", "fp32"))
    worst = {key: max(map(relative, found, exact)) for key, found in results.items()}
    torch.set_float32_matmul_precision(precision)
    yield check_bound("loss and gradients, fp32, against the CPU's", worst["gpu", "fp32"], 0, 1e-4)
    yield check_bound("the same, bf16; the CPU's own error x 2", worst["gpu", "bf16"], 1e-4, 2 * worst["cpu", "bf16"])

    M, K, N = (256, 512, 384) if lab.tiny else (2048, 4096, 6144)
    for recipe in fp8.RECIPES:
        torch.manual_seed(0)
        layer = nn.Linear(K, N, bias=False, dtype=torch.bfloat16, device=lab.ranks.device)
        nn.init.normal_(layer.weight)
        fp8.convert_linears(layer, recipe, small=True)
        if not lab.tiny:
            layer.compile(dynamic=False)
        x, g = (torch.randn(M, n, dtype=torch.bfloat16, device=lab.ranks.device) for n in (K, N))
        x.requires_grad_()
        y = layer(x)
        y.backward(g)
        wide = 0.07 if recipe == "tensor" else 0.045  # as in test_fp8.py: two-sided, so that bf16 would be noticed
        low, bounds = 0.05 if recipe == "tensor" else 0.02, {}
        X, W, G = (t.detach().double() for t in (x, layer.weight, g))
        bounds["y"] = relative(y, X @ W.T), 0.02, 0.045
        bounds["dx"] = relative(x.grad, G @ W), low, wide
        bounds["dw"] = relative(layer.weight.grad, G.T @ X), *((0, 0.004) if recipe == "row_gw_hp" else (low, wide))
        for name, (error, least, most) in bounds.items():
            yield check_bound(f"fp8 {recipe}, {M} x {K} x {N}, {name}", error, least, most)


def gpu_tests(lab: Lab) -> Iterator[Row]:
    files = [path.name for path in ROOT.glob("test_*.py") if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *(["--version"] if lab.tiny else files)]
    limit = min(150.0, max(lab.deadline - time.monotonic(), 10.0))
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
        code, out = done.returncode, done.stdout
    except subprocess.TimeoutExpired as stopped:
        code, out = -1, (stopped.stdout or b"") + f"\nstopped after {limit:.0f} s".encode()
    lines = out.decode(errors="replace").strip().splitlines()
    if code:
        print("\n".join(lines[-60:]), file=sys.stderr)
    yield note("pytest -m gpu", f"{'failed: ' if code else ''}{lines[-1]}")


def gpu_llama(lab: Lab, T: int, B: int) -> Iterator[Row]:
    flags = f"--model llama3-8b --n_layers {lab.layers(8)} --seq_len {T} --micro_batch {B}"
    mine, eager = ours(lab, flags), theirs(lab, flags, False)
    contenders = {"flatland": mine, "transformers, compiled": theirs(lab, flags, True, eager), "transformers": eager}
    case = f"A: Llama 8B, {lab.layers(8)} layers, {B} x {T}"
    yield from race_training(lab, case, contenders, flags)
    if B > 1:
        yield from profile_rows(lab, f"H: {case}", mine.step)


def gpu_fp8(lab: Lab, T: int, B: int) -> Iterator[Row]:
    flags = f"--model llama3-8b --n_layers 8 --fp8_log_every 0 --seq_len {T} --micro_batch {B}"
    bf16 = ours(lab, flags)
    contenders = {f"--fp8 {recipe}": ours(lab, f"{flags} --fp8 {recipe}", bf16) for recipe in fp8.RECIPES}
    case = f"B: Llama 8B, 8 layers, {B} x {T}"
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        yield note(case, "torchao on our model: not installed")
    else:
        names, ao = set(fp8.layers(contenders["--fp8 tensor"].model)), ours(lab, flags, bf16)
        options = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=not lab.cuda)
        convert_to_float8_training(ao.model, config=options, module_filter_fn=lambda module, name: name in names)
        contenders["torchao tensorwise on our model"] = ao
    yield from race_training(lab, case, contenders | {"bf16": bf16}, flags)


def gpu_recipe3(lab: Lab) -> Iterator[Row]:
    flags = f"--model llama2-7b --n_layers {lab.layers(8)} --seq_len 4096 --micro_batch 2"
    bf16 = ours(lab, flags)
    contenders = {"flatland --fp8 tensor": ours(lab, f"{flags} --fp8 tensor", bf16), "flatland": bf16}
    contenders["transformers"] = theirs(lab, flags, False)
    yield from race_training(lab, f"B: Llama 2 7B, {lab.layers(8)} layers, 2 x 4096", contenders, flags)


def roof(x: Tensor, w: Tensor, g: Tensor, recipe: str) -> list[Callable[[], Tensor]]:
    """The three products of a layer by torch._scaled_mm alone, of operands that are quantized and laid out already."""
    E4M3, E5M2, flip, q = fp8.E4M3, fp8.E5M2, fp8.column_major, fp8.quantize
    if recipe == "tensor":
        (xq, sx), (wq, sw), (gq, sg) = q(x, E4M3), q(w, E4M3), q(g, E5M2)
        products = [(xq, wq.t(), sx, sw), (gq, flip(wq), sg, sw), (gq.t().contiguous(), flip(xq), sg, sx)]
    else:
        (xq, sx), (wq, sw), (gq, sg), (wt, swt) = q(x, E4M3, 1), q(w, E4M3, 1), q(g, E4M3, 1), q(w, E4M3, 0)
        (gt, sgt), (xt, sxt) = q(g, E4M3, 0), q(x, E4M3, 0)
        products = [(xq, wq.t(), sx, sw.t()), (gq, flip(wt), sg, swt), (gt.t().contiguous(), flip(xt), sgt.t(), sxt)]
    fast, calls = recipe != "tensor", []
    for i, (a, b, sa, sb) in enumerate(products if recipe != "row_gw_hp" else products[:2]):
        scales = {"scale_a": sa.reciprocal(), "scale_b": sb.reciprocal(), "use_fast_accum": fast or i == 0}
        calls.append(partial(torch._scaled_mm, a, b, out_dtype=torch.bfloat16, **scales))
    return calls if recipe != "row_gw_hp" else [*calls, lambda: g.t() @ x.detach()]


def gpu_products(lab: Lab, recipes: tuple[str, ...]) -> Iterator[Row]:
    for name in ("llama3-8b", "llama3-70b", "llama3.1-405b"):
        for tokens in (2048, 8192):
            for recipe in recipes:
                yield from product_rows(lab, name, tokens, recipe)
                torch._dynamo.reset()


def product_rows(lab: Lab, name: str, tokens: int, recipe: str) -> list[Row]:
    """The linear layers of a block, forward and backward. (In a model the compiler joins casts with what comes before:
    their share there is smaller.)"""
    c = MODELS[name]
    if lab.tiny:
        c, tokens = replace(c, dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=176), 32
    wide = c.n_heads * c.head_dim
    shapes = [(wide + 2 * c.n_kv_heads * c.head_dim, c.dim), (c.dim, wide), (2 * c.ffn_dim, c.dim), (c.dim, c.ffn_dim)]
    with torch.device(lab.ranks.device):
        layers = nn.ModuleList(nn.Linear(K, N, bias=False, dtype=torch.bfloat16) for N, K in shapes)
        xs = [torch.randn(tokens, K, dtype=torch.bfloat16, requires_grad=True) for _, K in shapes]
        gs = [torch.randn(tokens, N, dtype=torch.bfloat16) for N, _ in shapes]
    fp8.convert_linears(layers, recipe, small=True)
    with torch.no_grad():
        three = zip(xs, layers, gs, strict=True)
        calls = [call for x, layer, g in three for call in roof(x, layer.weight, g, recipe)]

    def fp8_layers(xs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for x, layer in zip(xs, layers, strict=True)]

    def bf16_layers(xs: list[Tensor]) -> list[Tensor]:
        return [nn.functional.linear(x, layer.weight) for x, layer in zip(xs, layers, strict=True)]

    def step(run: Callable) -> None:
        torch.autograd.backward(run(xs), gs)
        for t in (*xs, *layers.parameters()):
            t.grad = None

    casts, alone = f"{recipe}, with casts", f"{recipe}, products alone"
    run = torch.compile(fp8_layers, dynamic=False, disable=lab.tiny)
    steps = {casts: partial(step, run), alone: lambda: [call() for call in calls], "bf16": partial(step, bf16_layers)}
    measured = measure(lab, steps, 1, 3)
    ms = {name: 1e3 * float(statistics.median(times)) for name, times in measured[0].items()}
    share = {casts: f"; casts {1 - ms[alone] / ms[casts]:.1%} of its time"}
    flops, case = 6 * tokens * sum(N * K for N, K in shapes), f"a block's products, {name}, {tokens} tokens"
    return rows_of(case, "TFLOP/s", flops / 1e12, measured, lambda name, _: f"; {ms[name]:.2f} ms{share.get(name, '')}")


def gpu_checkpointing(lab: Lab) -> Iterator[Row]:
    flags = f"--model llama3-8b --n_layers {lab.layers(8)} --seq_len 4096 --micro_batch 2"
    none, contenders = ours(lab, flags), {}
    for more in ("block", "selective", "block --offload_activations"):
        contenders[f"--checkpointing {more}"] = ours(lab, f"{flags} --checkpointing {more}", none)
    case = f"checkpointing: Llama 8B, {lab.layers(8)} layers, 2 x 4096"
    yield from race_training(lab, case, contenders | {"--checkpointing none": none}, flags)


NO_MESH, IN_ROOT = "no FSDP", "embedding and lm_head in the root's unit"


def one_by_one(lab: Lab, case: str, layers: int, variants: dict[str, str]) -> Iterator[Row]:
    """Under FSDP on one rank, contenders that do not fit side by side; ratios to the first. What one GPU cannot show:
    communication, thus what prefetching hides of it, and --reshard, since one rank has nothing to give back."""
    mesh, first = shard.make_mesh(0, lab.ranks, offload=True), 0.0
    flags = f"--model llama3-8b --n_layers {layers} --seq_len 4096 --micro_batch 2"
    for name, more in variants.items():
        contender = ours(lab, f"{flags} {more}", None, None if name == NO_MESH else mesh, name != IN_ROOT)
        title = f"{case}: Llama 8B, {layers} layers, 2 x 4096, one by one"
        (row,) = race_training(lab, title, {name: contender}, flags, warm=1, rounds=2)
        del contender
        free(lab)
        first = first or row["median"]
        yield row | {"ratio": row["median"] / first}


FSDP = {NO_MESH: "", "--prefetch 1": "", "--prefetch 0": "--prefetch 0", "--prefetch 2": "--prefetch 2",
        "--reshard never": "--reshard never", IN_ROOT: ""}  # fmt: skip
OFFLOAD = {"--offload none": "", "--offload cpu": "--offload cpu",
           "--offload cpu --prefetch 0": "--offload cpu --prefetch 0"}  # fmt: skip


def gpu_gpt2(lab: Lab) -> Iterator[Row]:
    flags = "--model gpt2 --vocab_size 50304 --seq_len 1024 --micro_batch 64"
    block, eager = ours(lab, flags), theirs(lab, flags, False)
    contenders = {"flatland --compile block": block}
    contenders["flatland --compile model"] = ours(lab, f"{flags} --compile model", block)
    contenders |= {"transformers": eager, "transformers, compiled": theirs(lab, flags, True, eager)}
    yield from race_training(lab, "C: GPT-2 124M, 64 x 1024", contenders, flags)


def gpu_head(lab: Lab) -> Iterator[Row]:
    for dtype in (torch.bfloat16, torch.float32):
        yield from head_rows(lab, dtype)
        torch._dynamo.reset()


def head_rows(lab: Lab, dtype: torch.dtype) -> list[Row]:
    """dtype: of the weight; x is bf16."""
    N, D, V = (64, 32, 256) if lab.tiny else (16384, 4096, 128256)
    shape = ModelConfig(vocab_size=V, dim=D, n_layers=1, n_heads=1, ffn_dim=D, max_seq_len=N)
    with torch.device(lab.ranks.device):
        head, targets = LossHead(shape).to(dtype), torch.randint(0, V, (1, N))
        nn.init.normal_(head.weight, std=0.02)
        x = torch.randn(1, N, D, dtype=torch.bfloat16, requires_grad=True)

    def plain() -> Tensor:
        logits = nn.functional.linear(x[0], head.weight.to(x.dtype)).float()
        return nn.functional.cross_entropy(logits, targets[0], reduction="sum")

    def fused() -> Tensor:
        return nn.functional.linear_cross_entropy(x[0], head.weight.to(x.dtype), targets[0], reduction="sum")

    def products() -> None:
        with torch.no_grad():
            w = head.weight.to(x.dtype)
            y = x[0] @ w.T
            _ = y @ w, y.T @ x[0]

    def step(loss: Callable) -> None:
        loss().backward()
        x.grad = head.weight.grad = None

    losses = {"flatland": lambda: head(x, targets), "compiled F.cross_entropy": torch.compile(plain, disable=lab.tiny)}
    if hasattr(nn.functional, "linear_cross_entropy"):
        losses["F.linear_cross_entropy"] = fused
    values = [loss().item() for loss in losses.values()]
    if max(values) - min(values) > 1e-2 * values[0]:  # torch's own sums to bf16
        raise RuntimeError(f"the results differ: {values}")
    rest = x.nbytes + head.weight.nbytes + (torch.cuda.memory_allocated() if lab.cuda else 0)  # with the gradients
    steps = {name: partial(step, loss) for name, loss in losses.items()} | {"its three products alone": products}
    measured = measure(lab, steps, 1, 4)

    def says(name: str, rate: float) -> str:
        beyond = f"; {(measured[1][name] - rest) / 2**30:.2f} GiB beyond gradients" if name in losses else ""
        return f"; {1e3 * statistics.median(measured[0][name]):.2f} ms{beyond}"

    case = f"F: loss head, {N} x {D} x {V}, weight in {str(dtype)[6:]}"
    return rows_of(case, "TFLOP/s", 6 * N * D * V / 1e12, measured, says)


def gpu_experts(lab: Lab) -> Iterator[Row]:
    size = f"--n_layers {lab.layers(2)} --seq_len 4096 --micro_batch 2"
    flags = f"--model mixtral-8x7b {size}"
    experts, peer = ours(lab, flags), theirs(lab, flags, False)
    dense = ours(lab, f"--model llama2-7b --n_kv_heads 8 --ffn_dim 28672 {size}")  # both of a token's experts as one
    case, contenders = f"E: Mixtral, {lab.layers(2)} layers, 2 x 4096", {"flatland": experts, "transformers": peer}
    yield from race_training(lab, case, contenders | {"flatland, dense, as many FLOPs": dense}, flags)
    yield from profile_rows(lab, f"H: {case}", experts.step)


# Most valuable first; seconds: a guess at what each takes on an H200 whose compiler has nothing cached.
PARTS = {
    "check": (45, gpu_check), "tests": (150, gpu_tests), "llama": (100, partial(gpu_llama, T=4096, B=2)),
    "fp8": (100, partial(gpu_fp8, T=4096, B=2)), "recipe3": (70, gpu_recipe3),
    "products": (70, partial(gpu_products, recipes=("tensor",))), "llama-2048": (70, partial(gpu_llama, T=2048, B=1)),
    "fp8-2048": (80, partial(gpu_fp8, T=2048, B=1)), "checkpointing": (80, gpu_checkpointing), "head": (25, gpu_head),
    "mesh": (110, partial(one_by_one, case="FSDP on one rank", layers=4, variants=FSDP)),
    "offload": (70, partial(one_by_one, case="offload", layers=2, variants=OFFLOAD)), "gpt2": (110, gpu_gpt2),
    "experts": (70, gpu_experts), "products-row": (120, partial(gpu_products, recipes=("row", "row_gw_hp"))),
}  # fmt: skip


def free(lab: Lab) -> None:
    gc.collect()
    if lab.cuda:
        torch.cuda.empty_cache()


def bench_gpu(args: Namespace) -> Iterator[Row]:
    """One GPU: correctness, then training steps and their parts against peers and limits."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    machine.set_products("bf16")
    lab = Lab(shard.init_ranks(), args.tiny, time.monotonic() + args.seconds)
    if args.tiny:
        yield note("--tiny", "small shapes and few steps under the names of the large ones: the figures say nothing")
    limit, torch._dynamo.config.recompile_limit = torch._dynamo.config.recompile_limit, 64  # contenders share code
    try:
        for name, (cost, part) in PARTS.items():
            left = lab.deadline - time.monotonic()
            if name != "check" and name not in args.parts:
                continue
            if left < cost and not args.tiny:
                yield note(name, f"skipped: it takes about {cost} s, {left:.0f} s are left")
                continue
            begin = time.monotonic()
            try:
                yield from part(lab)
            except Exception as error:  # the other parts are worth their time
                traceback.print_exc()
                yield note(name, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            torch._dynamo.reset()
            free(lab)
            print(f"({name}: {time.monotonic() - begin:.0f} s)", file=sys.stderr)
    finally:
        torch._dynamo.config.recompile_limit = limit
        if dist.is_initialized():
            dist.destroy_process_group()
