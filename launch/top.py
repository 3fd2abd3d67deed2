"""A cluster on one screen: `bash launch.sh top`, or `python top.py [hosts file] [--once] [--out DIR]`.

A line for each host (CPU, memory, workers) and each GPU (utilisation, power, memory, temperature, processes), their
sums, and the run's step, loss, speed and slowest rank. Every host is asked by a connection of its own, so one that does
not answer is shown as such and holds up nothing.

Ranks wait for each other, so their own step times are all alike. The slowest is found by what waiting looks like from
outside: with GPUs the one with the lowest SM clock, for a throttled GPU is the usual reason; on CPUs the worker that
computes most of the time, for the others block."""

import json
import re
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from cluster import (
    Host,
    hosts_of,
    launcher_flags,
    line_for,
    pick_run,
    read_hosts,
    read_json,
    read_launch,
    remote_command,
)
from errors import ROOT, UserError

EVERY = 2  # seconds between two pictures
SILENT = 6  # seconds after which a host counts as not answering
SSH = "-o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=3 -o ServerAliveCountMax=2"


class Feed(threading.Thread):
    """The newest numbers of one host."""

    def __init__(self, host: Host, ssh: str, out: str):
        super().__init__(daemon=True)
        self.out, self.host, self.ssh, self.last, self.heard, self.said = out, host, ssh, {}, 0.0, "asking"
        self.start()

    def run(self) -> None:
        while True:
            process = subprocess.Popen(
                remote_command(self.host, self.ssh),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
            )  # fmt: skip
            try:
                process.stdin.write(line_for("usage", {"every": EVERY, "out": self.out}))
                process.stdin.flush()
                for line in process.stdout:
                    if line.startswith(b"{"):
                        self.last, self.heard = json.loads(line), time.monotonic()
                        process.stdin.write(b"\n")
                        process.stdin.flush()
            except (OSError, ValueError):
                pass
            said = process.stderr.read().decode(errors="replace").strip().splitlines()
            self.said = said[-1] if said else "the connection ended"
            process.kill()
            process.wait()
            time.sleep(EVERY)

    @property
    def silent(self) -> bool:
        return time.monotonic() - self.heard > SILENT


def bar(share: float, width: int = 10) -> str:
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "·" * (width - full)


def picture(feeds: list[Feed], run: tuple | None) -> str:
    """The whole screen as text."""
    lines, totals, ranks = (
        [],
        {"gpus": 0, "busy": 0.0, "watts": 0.0, "used": 0.0, "size": 0.0, "workers": 0, "up": 0},
        {},
    )
    width = max(len(f.host.label) for f in feeds) + 2
    for feed in feeds:
        name = feed.host.label.ljust(width)
        if feed.silent:
            lines.append(
                f"{name}does not answer: {feed.said}" if feed.heard or feed.said != "asking" else f"{name}asking ..."
            )
            continue
        a = feed.last
        totals["up"] += 1
        totals["workers"] += len(a["ranks"])
        memory = f"{a['mem_used']:6.1f} of {a['mem_size']:6.1f} GiB"
        lines.append(
            f"{name}cpu {bar(a['cpu'])} {a['cpu']:4.0%} of {a['cores']:<4} mem {memory}"
            f"  load {a['load']:6.2f}  workers {len(a['ranks'])}"
        )
        clocks = {}
        for gpu in a["gpus"]:
            totals["gpus"] += 1
            for key in ("busy", "watts", "used", "size"):
                totals[key] += gpu[key]
            clocks[gpu["index"]] = gpu["clock"]
            g = SimpleNamespace(**gpu)
            lines.append(
                f"{'':{width}}gpu {g.index:<2} {bar(g.busy)} {g.busy:4.0%}  {g.watts:4.0f} of {g.limit:.0f} W"
                f"  {g.used:5.1f} of {g.size:5.1f} GiB  {g.heat:3.0f} °C  {g.clock:5.0f} MHz  processes {g.processes}"
            )
        for rank, (local, share) in a["ranks"].items():
            ranks[int(rank)] = (feed.host.label, clocks.get(int(local)), share)
    head = f"{totals['up']} of {len(feeds)} hosts, {totals['workers']} workers"
    if totals["gpus"]:
        head += (
            f", {totals['gpus']} GPUs at {totals['busy'] / totals['gpus']:.0%}, {totals['watts'] / 1000:.2f} kW,"
            f" {totals['used']:.0f} of {totals['size']:.0f} GiB"
        )
    return "\n".join([time.strftime("%H:%M:%S  ") + head, *run_lines(run, ranks), "", *lines])


def run_lines(run: tuple | None, ranks: dict) -> list[str]:
    if not run:
        return []
    out, name = run
    status, record = read_json(out / "status.json"), {}
    try:
        with open(out / "metrics.jsonl", "rb") as f:
            f.seek(max(0, f.seek(0, 2) - 8192))
            records = map(json.loads, f.read().decode().splitlines()[::-1])
            record = next(r for r in records if r.get("loss") is not None)  # a save's duration is a record, too
    except (OSError, ValueError, StopIteration):
        pass
    state = read_launch(out).get("state") or status.get("state", "unknown")
    line = f"{name}: {state}"
    if record:
        r = SimpleNamespace(**record)
        line += (
            f"  step {r.step}  loss {r.loss:.4f}  {r.tok_per_s:.0f} tok/s  mfu {r.mfu:.1%}  {r.step_ms:.0f} ms a step"
        )
    if len(ranks) > 1:
        clocked = {r: c for r, (_, c, _) in ranks.items() if c}
        if clocked:
            rank = min(clocked, key=clocked.get)
            line += f"  slowest rank {rank} on {ranks[rank][0]} ({clocked[rank]:.0f} MHz)"
        else:
            rank = max(ranks, key=lambda r: ranks[r][2])
            line += f"  slowest rank {rank} on {ranks[rank][0]} (computes {ranks[rank][2]:.0%} of the time)"
    return [line]


def verb_top(words: list[str], settings: dict) -> int:
    once, file, out, rest, listed = False, "", [], list(words), ""
    while rest:
        word = rest.pop(0)
        if word == "--hosts" or word.startswith("--hosts="):
            listed = launcher_flags([word, *rest[:1]], settings)[0]["hosts"]
            rest = rest["=" not in word :]
        elif word == "--once":
            once = True
        elif word == "--out" or word.startswith("--out="):
            out = [word] + ([rest.pop(0)] if word == "--out" and rest else [])
        elif not word.startswith("-") and not file:
            file = word
        else:
            raise UserError(f"top takes a hosts file, --hosts, --once and --out DIR, not {word}")
    run = pick_run(out, "top")[:2] if out or any((ROOT / "runs").glob("*/")) else None
    if file and not Path(file).is_file():
        raise UserError(f"there is no hosts file {file}")
    launch = read_launch(run[0]) if run else {}
    hosts = read_hosts(listed, Path(file) if file else None)
    if not listed and not file and launch.get("state") in ("starting", "running", "waiting"):
        hosts = hosts_of(launch)  # those of the run, while it runs
    shown = {h.line: h for h in reversed(hosts)}  # a machine once
    feeds = [Feed(h, settings.get("ssh", SSH), str(run[0]) if run else "") for h in reversed(shown.values())]
    if once or not sys.stdout.isatty():
        end = time.monotonic() + 2 * SILENT
        while time.monotonic() < end and any(f.silent and f.said == "asking" for f in feeds):
            time.sleep(0.1)
        print(picture(feeds, run))
        return 0
    return draw(feeds, run)


def draw(feeds: list[Feed], run: tuple | None) -> int:
    """Redraws until q or Ctrl-C, on the terminal's second screen."""
    import shutil
    import termios
    import tty

    keys = sys.stdin.isatty() and termios.tcgetattr(sys.stdin)
    sys.stdout.write("\033[?1049h\033[?25l")
    try:
        if keys:
            tty.setcbreak(sys.stdin)
        while True:
            columns, rows = shutil.get_terminal_size()
            lines = [line[: columns - 1] for line in picture(feeds, run).splitlines()]
            if len(lines) > rows - 1:
                lines = [*lines[: rows - 2], f"... {len(lines) - rows + 2} lines more: a taller window shows them"]
            text = "\n".join(line + "\033[K" for line in lines)
            sys.stdout.write("\033[H" + re.sub(r"(does not answer.*)", "\033[31m\\1\033[0m", text) + "\n\033[J")
            sys.stdout.flush()
            if keys and select.select([sys.stdin], [], [], EVERY)[0]:
                if sys.stdin.read(1) in ("q", "Q"):
                    return 0
            elif not keys:
                time.sleep(EVERY)
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write("\033[?25h\033[?1049l")
        sys.stdout.flush()
        if keys:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, keys)


if __name__ == "__main__":
    try:
        sys.exit(verb_top(sys.argv[1:], {"ssh": SSH}))
    except UserError as e:
        sys.exit(print(e, file=sys.stderr) or 2)
