"""`launch.sh doctor` and `launch.sh sync`: whether every machine is fit to train, and making their files the same.

doctor examines all hosts at once, has them sum 64 MiB together, and draws a table: a row for each check, a column for
each host. Below it a line for each red field tells the value and the command that corrects it. node.examine
has the checks of one host; this file has the checks that need several."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from cluster import (
    Host,
    Unreachable,
    call,
    call_all,
    columns,
    explain,
    outcome,
    read_flags,
    read_hosts,
    read_job,
    run_checks,
    run_verb,
    say,
    settle_addresses,
    ssh_command,
)
from lib.errors import ROOT, UserError, printable
from node import Refused, content_hash, last_line, own_files

CLOCK = 2.0  # seconds that clocks may differ: more, and logs of several hosts cannot be read together
REDUCED, LIMIT, WANTED = 64 * 2**20, 30, 100  # an all-reduce: bytes, seconds that it has, MB/s (1 Gbit/s has 100)
SETUP = "bash launch.sh sync, or {there}'cd {ROOT} && bash launch.sh setup'"
ALIKE = {  # the remedy for a value that differs from most hosts'
    "code": "bash launch.sh sync",
    "python": SETUP,
    "torch": SETUP,
    "driver": "install the same: {there}nvidia-smi",
    "GPUs": "{there}nvidia-smi; to use fewer on purpose: slots=N in hosts",
}


class Table:
    """Fields by (row, host); red ones have a line each that says what to do."""

    def __init__(self, hosts: list[Host]):
        self.hosts, self.rows, self.red = hosts, {}, []

    def put(self, row: str, host: Host, text: str, problem: str = ""):
        self.rows.setdefault(row, {})[host.label] = f"{'✗' if problem else '✓'} {printable(text)}"
        if problem:
            there = "" if host.local else f"ssh {host.target} "
            self.red.append(f"{host.label}: {row}: {problem.replace('{there}', there).replace('{ROOT}', str(ROOT))}")

    def draw(self) -> str:
        labels = [host.label for host in self.hosts]
        rows = [[row, *(fields.get(label, "") for label in labels)] for row, fields in self.rows.items()]
        return columns([["", *labels], *rows])


def verb_doctor(words: list[str], settings: dict) -> int:
    _, hosts, job = read_job(words, settings)
    table, answering = Table(hosts), []
    for host, answer in zip(hosts, call_all(hosts, job, "probe", 60), strict=True):
        if isinstance(answer, Exception):
            table.put("ssh", host, "no answer", explain(host, answer))
        else:
            table.put("ssh", host, "here" if host.local else "answers")
            host.facts = answer
            host.slots = host.slots or len(answer["gpus"]) or 1
            answering.append(host)
    settle_addresses(answering)
    machines = list({h.address: h for h in reversed(answering)}.values())
    if answering:
        examine_all(table, answering, job)
        total = sum(h.slots for h in answering)
        for host, done in zip(machines, run_checks(machines, job, total), strict=True):
            if isinstance(done, Exception):
                table.put("data, weights", host, "no", explain(host, done))
            else:
                error = last_line(done["err"]).removeprefix("error: ") or "it failed"
                table.put("data, weights", host, *("no", error) if done["exit"] else ("there",))
    if len(machines) > 1:
        check_network(table, machines, job)
    text = table.draw()
    if sys.stdout.isatty():
        for mark, colour in ("✗", 31), ("✓", 32):
            text = text.replace(mark, f"\033[{colour}m{mark}\033[0m")
    print(text)
    if table.red:
        say("\n" + "\n".join(table.red))
    return int(bool(table.red))


@contextlib.contextmanager
def folder_mark():
    """The name of a file that another machine sees if it shares this folder."""
    path = ROOT / "runs" / f".seen-by-{os.getpid()}"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    try:
        yield str(path.relative_to(ROOT))
    finally:
        path.unlink()


def examine_all(table: Table, hosts: list[Host], job: dict) -> None:
    sent = time.time()
    with folder_mark() as mark:
        answers = call_all(hosts, job, "examine", 120, folder_mark=mark)
    known = [a["alike"] for a in answers if isinstance(a, dict)]
    usual = {name: Counter(a[name] for a in known).most_common(1)[0][0] for name in ALIKE if known}
    usual["code"] = content_hash()
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, Exception):
            table.put("ssh", host, "fails", explain(host, answer))
            continue
        table.put("clock", host, *judge_clock(answer["time"] - time.time(), sent - answer["time"]))
        for name, value in answer["alike"].items():
            error = answer["torch_error"] if name == "torch" else ""
            problem = f"{error or value}, others {usual[name]}; {ALIKE[name]}"
            table.put(name, host, value or "no", problem if error or value != usual[name] else "")
        for name, (text, problem) in answer["rows"].items():
            table.put(name, host, text, problem)


def judge_clock(ahead: float, behind: float) -> tuple[str, str]:
    """Seconds that a clock is ahead of the answer's arrival, and behind the question -> the field, and the
    problem."""
    off, direction = max(ahead, behind), "ahead of" if ahead > behind else "behind"
    if off <= CLOCK:
        return "agrees", ""
    return f"{off:.0f} s off", f"{off:.0f} s {direction} this machine's; {{there}}sudo chronyc makestep"


# ---- the network


def measure(hosts: list[Host], job: dict) -> float:
    """MB/s of an all-reduce over these hosts. Raises Unreachable or Refused, with torch's reason."""
    store = (hosts[0].address, call(hosts[0], job, "probe", 60)["port"])

    def take_part(pair: tuple[int, Host]) -> float:
        rank, host = pair
        more = {"rank": rank, "size": len(hosts), "store": store, "bytes": REDUCED, "limit": LIMIT}
        return call(host, job, "all_reduce", 3 * LIMIT, job["python"], **more)["mb_per_s"]

    with ThreadPoolExecutor(len(hosts)) as pool:
        return min(pool.map(take_part, enumerate(hosts)))


def find_slow(hosts: list[Host], job: dict, wanted: float) -> list[Host]:
    """Halves the hosts until the all-reduce of a group is as fast as wanted -> the hosts of the smallest slow group."""
    while len(hosts) > 2:
        halves = hosts[: len(hosts) // 2], hosts[len(hosts) // 2 :]
        speeds = [outcome(measure, half, job) if len(half) > 1 else wanted for half in halves]
        slow = [half for half, speed in zip(halves, speeds, strict=True) if not is_fast(speed, wanted)]
        if len(slow) != 1:
            break  # both halves, or only the way between them
        hosts = slow[0]
    return hosts


def is_fast(speed: float | Exception, wanted: float) -> bool:
    return isinstance(speed, float) and speed >= wanted


def check_network(table: Table, hosts: list[Host], job: dict) -> None:
    """One all-reduce over all hosts; if it is slow or fails, smaller groups find the suspect."""
    speed = outcome(measure, hosts, job)
    shown = f"{speed:.0f} MB/s" if isinstance(speed, float) else "fails"
    suspects = [] if is_fast(speed, WANTED) else find_slow(hosts, job, WANTED)
    why = f"slower than {WANTED} MB/s" if isinstance(speed, float) else str(speed)
    names = ", ".join(h.label for h in suspects)
    for host in hosts:
        advice = f"{why}; suspect: {names}: see cable, firewall and the errors that `ip -s link` counts"
        table.put("all-reduce", host, shown, advice if host in suspects else "")


# ---- sync


def verb_sync(words: list[str], settings: dict) -> int:
    flags, rest = read_flags(words, "--hosts")
    if rest:
        raise UserError(f"sync takes --hosts and nothing else, not {rest[0]}")
    hosts = [h for h in read_hosts(flags["--hosts"]) if not h.local]
    if not hosts:
        say("No host but this machine: nothing to copy")
        return 0
    with folder_mark() as mark, ThreadPoolExecutor(len(hosts)) as pool:
        answers = list(pool.map(lambda host: outcome(sync, host, {**settings, "env": {}}, mark), hosts))
    for host, answer in zip(hosts, answers, strict=True):
        failed = isinstance(answer, Exception)
        say(explain(host, answer) if failed else f"{host.label}: {answer}", sys.stderr if failed else sys.stdout)
    return int(any(isinstance(answer, Exception) for answer in answers))


def sync(host: Host, job: dict, mark: str) -> str:
    """Copies the code and .venv to a host -> a summary. Raises Unreachable and Refused."""
    root, ssh = shlex.quote(str(ROOT)), ssh_command(host, job["ssh"])
    script = f"mkdir -p {root} && cd {root} && if [ -e {mark} ]; then echo shared; else command -v rsync; fi; true"
    answer = run_here([*ssh, script])
    if "shared" in answer.split():
        return "sees this very folder; nothing to copy"
    names = [*own_files(), *(name for name in ("hosts", "README.md", ".venv") if (ROOT / name).exists())]
    if shutil.which("rsync") and "rsync" in answer and ":" not in host.name:
        way = ["rsync", "-aRs", "-e", shlex.join(ssh[: ssh.index("--")]), "--", *names, f"{host.name}:{ROOT}/"]
    else:
        way = ["sh", "-c", f"tar -cf - -- {shlex.join(names)} | {shlex.join([*ssh, f'tar -C {root} -xf -'])}"]
    run_here(way)
    if call(host, job, "probe", 60)["code"] != content_hash():
        raise Refused(f"the files differ after copying: remove additional files from {ROOT} there")
    done = call(host, job, "run", 120, command=[job["python"], "-c", "import torch"])
    if done["exit"]:
        setup = f"ssh {host.target} 'cd {root} && bash launch.sh setup'"
        raise Refused(f"{job['python']} does not run there: {last_line(done['err'])}. Make an environment: {setup}")
    return f"{len(names)} files, verified ({content_hash()})"


def run_here(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise Unreachable(last_line(done.stderr) or f"status {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    run_verb(doctor=verb_doctor, sync=verb_sync)
