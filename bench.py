"""Benchmarks and reports.

    python bench.py fp8 --run runs/NAME          what FP8 does to each layer of a model; on a GPU, what it wins
    python bench.py fp8-parity [--flag value]    the same small Llama in bf16 (two seeds) and in each FP8 recipe

`fp8` reads a run's newest checkpoint (a bf16 run's, too) and sends one micro-batch of its data forward and backward."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from errors import ROOT, UserError  # first: it finds the Python that has torch

import torch  # isort: skip
from torch import Tensor, nn

import fp8
from config import split_batch
from data import make_loader
from generate import load_run
from shard import find_device


def snr_db(exact: Tensor, found: Tensor) -> float:
    exact, found = exact.double(), found.double()
    return 10 * torch.log10(exact.square().sum() / (found - exact).square().sum()).item()


def milliseconds(run) -> float:
    """Median of 20 on the GPU, each with its own events, after 5 that compile and warm up."""
    times = []
    for i in range(25):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times += [begin.elapsed_time(end)] if i >= 5 else []
    return sorted(times)[len(times) // 2]


def speed_up(shape: tuple[int, int], tokens: int, recipe: str) -> float:
    """Of a layer [N, K], forward and backward with all casts, over the same in bf16; both compiled."""
    spent = []
    for convert in (False, True):
        layer = nn.Linear(shape[1], shape[0], bias=False, device="cuda", dtype=torch.bfloat16)
        if convert:
            fp8.convert_linears(layer, recipe, small=True)
        x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(tokens, shape[0], device="cuda", dtype=torch.bfloat16)
        torch._dynamo.reset()
        layer.compile(dynamic=False)

        def run(layer=layer, x=x, g=g):
            layer(x).backward(g)
            x.grad = layer.weight.grad = None

        spent.append(milliseconds(run))
    return spent[0] / spent[1]


def report_fp8(run: Path, recipe: str) -> str:
    """A line per converted layer: amax, saturated and flushed shares and SNR of x, W and g; SNR of y against bf16; on a
    GPU the measured speed-up. Shares in parts per million."""
    device = find_device(1)
    config, model, step = load_run(run, device)
    recipe = recipe or (config.fp8 if config.fp8 != "off" else "tensor")
    grad_dtype = "e5m2" if config.fp8_grad_dtype == "auto" else config.fp8_grad_dtype
    rows = fp8.convert_linears(model, recipe, grad_dtype, config.fp8_skip, small=True)
    fp8.watch(model, list(fp8.layers(model)))
    model.train()
    outputs, hooks = {}, []
    for name, layer in fp8.layers(model).items():

        def compare(layer, inputs, output, name=name):
            layer.eval()
            with torch.no_grad():
                outputs[name] = snr_db(layer.forward(*inputs), output)
            layer.train()

        hooks.append(layer.register_forward_hook(compare))
    batch = next(iter(make_loader(config)))[0].to(device)
    model(batch.tokens, batch.targets, batch.positions).backward()
    found, speeds, lost = fp8.watched(model), {}, 0
    tokens = split_batch(config, 1)[0] * config.seq_len
    columns = "".join(f"  {o + ' amax':>9} {'sat':>6} {'flush':>7} {'dB':>5}" for o in "xwg")
    title = f"{run}, step {step}: FP8 recipe {recipe}, {tokens} tokens; saturated and flushed in parts per million"
    lines = [title, f"{'layer':36} {'shape':>14}{columns}  {'y dB':>5}{'  speed-up' if device.type == 'cuda' else ''}"]
    for name, shape, verdict in rows:
        if name not in outputs:
            lines.append(f"{name:36} {' x '.join(map(str, shape)):>14}  {verdict}")
            continue
        line = f"{name:36} {f'{shape[0]} x {shape[1]}':>14}"
        for o in "xwg":
            amax, saturated, flushed, snr = (found[f"fp8/{name}/{o}_{f}"] for f in fp8.FIGURES)
            snr = "-" if snr is None else f"{snr:.1f}"
            line += f"  {amax:9.2e} {1e6 * saturated:6.0f} {1e6 * flushed:7.0f} {snr:>5}"
        line += f"  {outputs[name]:5.1f}"
        if device.type == "cuda":
            if shape not in speeds:
                speeds[shape] = speed_up(shape, tokens, recipe)
            lost += speeds[shape] < 1
            line += f"  {speeds[shape]:6.2f} x{'  LOSES: --fp8_skip ' + name if speeds[shape] < 1 else ''}"
        lines.append(line)
    if device.type == "cuda":
        lines.append(f"{lost} of {len(outputs)} layers are slower than in bf16 at {tokens} tokens")
    else:
        lines.append("speed-up: on a GPU only")
    return "\n".join(lines)


PARITY = ["--model", "tiny-llama", "--dim", "128", "--n_layers", "4", "--n_heads", "4", "--n_kv_heads", "2",
          "--ffn_dim", "384", "--seq_len", "128", "--micro_batch", "8", "--steps", "300", "--lr", "6e-3",
          "--schedule", "linear", "--warmup_steps", "30", "--dtype", "bf16", "--log_every", "5", "--eval_every", "100",
          "--eval_batches", "40"]  # fmt: skip
RUNS = {"bf16": [], "bf16, another seed": ["--seed", "1"], "tensor": ["--fp8", "tensor"],
        "tensor, e4m3 gradients": ["--fp8", "tensor", "--fp8_grad_dtype", "e4m3"], "row": ["--fp8", "row"],
        "row_gw_hp": ["--fp8", "row_gw_hp"]}  # fmt: skip


def parity(out: Path, flags: list[str]) -> str:
    """Trains what is not there yet, draws the losses and -> the table, in Markdown."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = {}
    for name, own in RUNS.items():
        folder = out / name.replace(", ", "-").replace(" ", "-")
        command = [sys.executable, str(ROOT / "train.py"), *PARITY, *flags, *own, "--out", str(folder)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
        curves[name] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    base = curves["bf16"]
    lines = ["| run | training loss, last 50 steps | validation loss | less bf16's |", "|---|--:|--:|--:|"]
    for name, records in curves.items():
        steps, losses = [r["step"] for r in records], [r["loss"] for r in records]
        above.plot(steps, losses, lw=1, label=name)
        if name != "bf16":
            below.plot(steps, [a - b["loss"] for a, b in zip(losses, base, strict=True)], lw=1, label=name)
        late = [r["loss"] for r in records if r["step"] > records[-1]["step"] - 50]
        validation, other = records[-1]["val_loss"], base[-1]["val_loss"]
        lines.append(f"| {name} | {sum(late) / len(late):.4f} | {validation:.4f} | {validation - other:+.4f} |")
    above.set_ylabel("loss (nats per token)")
    below.set_ylabel("less bf16's, same data")
    below.set_xlabel("step")
    above.legend()
    for axis in (above, below):
        axis.grid(alpha=0.3)
    figure.savefig(out / "fp8-parity.png", dpi=90)
    plt.close(figure)
    return "\n".join([*lines, f"({out / 'fp8-parity.png'})"])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    report = verbs.add_parser("fp8", help="what FP8 does to each layer of a run's model")
    report.add_argument("--run", required=True, type=Path, help="run folder")
    report.add_argument("--recipe", default="", choices=("", *fp8.RECIPES), help="another than the run's")
    same = verbs.add_parser("fp8-parity", help="losses in bf16 and in each recipe; takes trainer flags, too")
    same.add_argument("--out", default=Path("runs/fp8-parity"), type=Path, help="folder of the runs and the plot")
    args, flags = parser.parse_known_args(argv)
    if flags and args.verb != "fp8-parity":
        raise UserError(f"{flags[0]} is unknown; python bench.py {args.verb} --help lists what there is")
    print(report_fp8(args.run, args.recipe) if args.verb == "fp8" else parity(args.out, flags))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
