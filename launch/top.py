"""A cluster on one screen: `bash launch.sh top`, or `python launch/top.py [hosts file] [--once] [--out DIR]`.

A line for each host (CPU, memory, workers) and each GPU (utilisation, power, memory, temperature, processes), their
sums, and the run's step, loss, speed and slowest rank. Every host is asked by a connection of its own, so one that does
not answer is shown as such and holds up nothing. Ctrl-C ends it.

Ranks wait for each other, so their own step times are all alike: which one holds the others back, the run measures
itself (pace.py) and writes into its records."""

import json
import shutil
import sys
import time
from pathlib import Path

from cluster import ENDED, Watcher, hosts_of, pick_run, read_hosts, read_launch, run_verb, say
from lib.errors import UserError, printable
from node import read_json, tail

EVERY = 2  # seconds between two pictures
SILENT = 6  # seconds after which a host counts as not answering
SSH = "-o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=3 -o ServerAliveCountMax=2"


def bar(share: float, width: int = 10) -> str:
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "·" * (width - full)


def picture(watchers: list[Watcher], out: Path | None, name: str) -> list[str]:
    """The whole screen, by lines; out, name: the run, where there is one."""
    lines, ranks, gpus = [], set(), []
    width = max(len(w.host.label) for w in watchers) + 2
    up = [w for w in watchers if w.last and time.monotonic() - w.heard <= SILENT]
    for w in watchers:
        label, a = w.host.label.ljust(width), w.last
        if w not in up:
            lines.append(label + (f"does not answer: {w.error}" if w.error else "asking ..."))
            continue
        memory = f"{a['mem_used']:6.1f} of {a['mem_size']:6.1f} GiB"
        load = f"load {a['load']:6.2f}  workers {len(a['ranks'])}"
        lines.append(f"{label}cpu {bar(a['cpu'])} {a['cpu']:4.0%} of {a['cores']:<4} mem {memory}  {load}")
        for gpu in a["gpus"]:
            busy, watts, limit, used, size, heat, clock = gpu["numbers"]
            text = f"{bar(busy / 100)} {busy:3.0f}%  {watts:4.0f} of {limit:.0f} W  {used / 1024:5.1f} of"
            text += f" {size / 1024:5.1f} GiB  {heat:3.0f} °C  {clock:5.0f} MHz  processes {gpu['processes']}"
            lines.append(f"{'':{width}}gpu {gpu['index']:<2} {text}")
        gpus += [gpu["numbers"] for gpu in a["gpus"]]
        ranks |= set(a["ranks"])
    head = f"{time.strftime('%H:%M:%S')}  {len(up)} of {len(watchers)} hosts, {len(ranks)} workers"
    if gpus:
        busy, watts, _, used, size, _, _ = map(sum, zip(*gpus, strict=True))
        head += f", {len(gpus)} GPUs at {busy / len(gpus):.0f}%, {watts / 1000:.2f} kW"
        head += f", {used / 1024:.0f} of {size / 1024:.0f} GiB"
    run = [run_line(out, name)] if out else []
    return [printable(line) for line in (head, *run, "", *lines)]


def run_line(out: Path, name: str) -> str:
    state = read_launch(out).get("state") or read_json(out / "status.json").get("state", "unknown")
    for text in reversed(tail(out / "metrics.jsonl", 20).splitlines()):
        record = json.loads(text) if text.endswith("}") else {}
        if record.get("loss") is not None:  # a save's duration is a record, too
            numbers = "step {step}  loss {loss:.4f}  {tok_per_s:.0f} tok/s  mfu {mfu:.1%}  {step_ms:.0f} ms a step"
            slow = f"  slowest {record['slowest']}" if "slowest" in record else ""
            return f"{name}: {state}  {numbers.format(**record)}{slow}"
    return f"{name}: {state}"


def verb_top(words: list[str], settings: dict) -> int:
    out, name, flags, files = pick_run("top", words, "--hosts", "--once", others=1)
    if files and not Path(files[0]).is_file():
        raise UserError(f"there is no hosts file {files[0]}")
    launch = read_launch(out) if out else {}
    if not flags["--hosts"] and not files and launch.get("state", "failed") not in ENDED:
        hosts = hosts_of(launch)  # those of the run, while it runs
    else:
        hosts = read_hosts(flags["--hosts"], *map(Path, files))
    job = {"ssh": SSH, **settings, "every": EVERY, "out": str(out or "")}
    watchers = [Watcher(h, job, "usage") for h in {h.line: h for h in hosts}.values()]  # each machine once
    if not flags["--once"] and sys.stdout.isatty():
        show_always(watchers, out, name)
    end = time.monotonic() + 2 * SILENT
    while time.monotonic() < end and any(not w.last and not w.error for w in watchers):
        time.sleep(0.1)
    say("\n".join(picture(watchers, out, name)))
    return 0


def show_always(watchers: list[Watcher], out: Path | None, name: str) -> None:
    """Redraws until Ctrl-C, on the terminal's other screen."""
    print("\033[?1049h\033[?25l")
    try:
        while True:
            columns, rows = shutil.get_terminal_size()
            lines = [line[:columns] for line in picture(watchers, out, name)]
            if len(lines) > rows:
                lines[rows - 1 :] = [f"... {len(lines) - rows + 1} lines more: a taller window shows them"]
            print("\033[H\033[J" + "\n".join(lines), end="", flush=True)
            time.sleep(EVERY)
    finally:
        print("\033[?25h\033[?1049l", end="", flush=True)


if __name__ == "__main__":
    if "--" not in sys.argv:  # typed by a person
        sys.argv[1:1] = ["--", "top"]
    run_verb(top=verb_top)
