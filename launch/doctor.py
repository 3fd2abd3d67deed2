"""`launch.sh doctor` and `launch.sh sync`: whether every machine is fit to train, and making their files the same.

doctor looks at all hosts at once, has every pair of machines sum 8 MB, and draws a table: a row for each check, a
column for each host. Below it stands, for each red field, what was found and the command that mends it. What a host can
judge by itself is in node.examine; here is what needs several of them."""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

from cluster import (
    Connection,
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
from node import OWN_FILES, Refused, content_hash, last_line, own_files, packages

CLOCK = 2.0  # seconds that clocks may differ: more, and logs of several hosts cannot be read together
PAIR_BYTES, PAIR_LIMIT = 8 * 2**20, 20  # what a pair sums, seconds it has
SLOW = 4  # a link this many times slower than the fastest is red
SETUP = "bash launch.sh sync, or {there}'cd {ROOT} && bash launch.sh setup'"
ALIKE = {  # how to mend what is not as most hosts have it
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
        check_links(table, machines, job)
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
    """The name of a file that tells whether another machine sees this folder."""
    path = ROOT / "runs" / f".seen-by-{os.getpid()}"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    try:
        yield str(path.relative_to(ROOT))
    finally:
        path.unlink()


def examine_all(table: Table, hosts: list[Host], job: dict) -> None:
    names = {h.name.split("@")[-1]: h.address for h in hosts if not h.local}
    sent = time.time()
    with folder_mark() as mark:
        answers = call_all(hosts, job, "examine", 120, first=hosts[0].label, folder_mark=mark, names=names)
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
    """Seconds that a clock is ahead of the answer's arrival, and behind the question -> what to show, and what is
    wrong."""
    off, direction = max(ahead, behind), "ahead of" if ahead > behind else "behind"
    if off <= CLOCK:
        return "agrees", ""
    return f"{off:.0f} s off", f"{off:.0f} s {direction} this machine's; {{there}}sudo chronyc makestep"


# ---- links


def check_links(table: Table, hosts: list[Host], job: dict) -> None:
    """An all-reduce of every pair, as many pairs at once as there are hosts for."""
    order = {"limit": PAIR_LIMIT, "bytes": PAIR_BYTES}
    probes = [Connection(h, job, "pairs", job["python"], **order) for h in hosts]
    ready = [probe for probe in probes if isinstance(outcome(probe.read, 90), dict)]
    links = {}  # pair -> (MB/s, what is wrong)
    with ThreadPoolExecutor(len(hosts)) as pool:
        for pairs in tournament(ready):
            links |= zip(pairs, pool.map(meet, pairs), strict=True)
    fastest = max([speed for speed, _ in links.values()], default=0.0)
    for pair, (speed, problem) in links.items():
        if not problem and speed * SLOW < fastest:
            speed, problem = max((speed, ""), meet(pair))  # once more, with nobody else on the network
            slow = f"is slow ({speed:.0f} MB/s, the fastest has {fastest:.0f})" if speed * SLOW < fastest else ""
            links[pair] = speed, problem or slow
    for probe in probes:
        probe.close()
        if probe in ready:
            table.put("links", probe.host, *judge_links(probe, links))
        else:
            table.put("links", probe.host, "none", "torch does not come up there; see the row torch")


def judge_links(probe: Connection, links: dict) -> tuple[str, str]:
    """A host's slowest link, and what is wrong with its links. One whose every link is bad is to blame for them, and
    the hosts at their other ends are not."""

    def problems(probe: Connection) -> list[str]:
        return [problem for pair, (_, problem) in links.items() if probe in pair]

    def is_blamed(probe: Connection) -> bool:
        return len(problems(probe)) > 1 and all(problems(probe))

    slowest = min([speed for pair, (speed, problem) in links.items() if probe in pair and not problem], default=0.0)
    problem = ""
    if is_blamed(probe):
        problem = f"every link of this host {problems(probe)[0]}"
    else:
        bad = [pair for pair, (_, why) in links.items() if why and probe in pair and not any(map(is_blamed, pair))]
        others = ", ".join(p.host.label for pair in bad for p in pair if p is not probe)
        if bad:
            problem = f"the link to {others} {links[bad[0]][1]}"
    advice = "; see its cable, firewall and the errors that `ip -s link` counts"
    return f"{slowest:.0f} MB/s", problem and problem + advice


def tournament(players: list) -> list[list[tuple]]:
    """Rounds of pairs: every two meet once, nobody twice in a round."""
    n = len(players)
    pairs = [(i, j) for i, j in combinations(range(n), 2)]
    return [[(players[i], players[j]) for i, j in pairs if (i + j) % n == turn] for turn in range(n)]


def meet(pair: tuple[Connection, Connection]) -> tuple[float, str]:
    """The speed of a link, and what is wrong with it."""
    first, second = pair
    order = {"address": first.host.address, "port": 0}
    first.tell(role=0, **order)
    answers = [outcome(first.read, PAIR_LIMIT + 5)]
    if isinstance(answers[0], dict):
        second.tell(role=1, **{**order, **answers[0]})
        answers = [outcome(probe.read, 4 * PAIR_LIMIT) for probe in (second, first)]
    for answer in answers:
        if isinstance(answer, Exception):
            return 0.0, f"is broken ({answer})"
    return answers[0]["mb_per_s"], ""


# ---- sync


def hosts_to_sync(words: list[str]) -> list[Host]:
    flags, rest = read_flags(words, "--hosts")
    if rest:
        raise UserError(f"sync takes --hosts and nothing else, not {rest[0]}")
    return [h for h in read_hosts(flags["--hosts"]) if not h.local]


def verb_sync(words: list[str], settings: dict) -> int:
    hosts = hosts_to_sync(words)
    if not hosts:
        say("No host but this machine: nothing to copy")
        return 0
    with folder_mark() as mark, ThreadPoolExecutor(len(hosts)) as pool:
        done = list(pool.map(lambda host: outcome(sync, host, {**settings, "env": {}}, mark), hosts))
    for host, answer in zip(hosts, done, strict=True):
        failed = isinstance(answer, Exception)
        say(explain(host, answer) if failed else f"{host.label}: {answer}", sys.stderr if failed else sys.stdout)
    return int(any(isinstance(answer, Exception) for answer in done))


def sync(host: Host, job: dict, mark: str) -> str:
    """Makes a host's files those that are here -> what was done. Raises Unreachable and Refused."""
    extra = ["hosts", "README.md", "BENCHMARKS.md", "LICENSE", ".gitignore"]
    files = [*own_files(), *(name for name in extra if (ROOT / name).exists())]
    unpack = f"if [ -e {mark} ]; then echo shared; else rm -f {OWN_FILES} && tar --no-same-owner -xf -; fi"
    if "shared" in send(host, job, unpack, ROOT, files).split():
        return "sees this very folder; nothing to copy"
    there, venv, python = call(host, job, "probe", 60), "", job["python"]
    if there["code"] != content_hash():
        raise Refused(f"the files differ after copying ({there['code']}, here {content_hash()}): is its disk full?")
    if packages():
        venv = ", .venv the same"
    if packages() and there["packages"] != packages():
        unpack = "rm -rf .venv.new && mkdir .venv.new && tar --no-same-owner -C .venv.new -xf - &&"
        send(host, job, f"{unpack} rm -rf .venv && mv .venv.new .venv", os.path.realpath(ROOT / ".venv"), ["."])
        venv = ", .venv copied"
    done = call(host, job, "run", 120, command=[python, "-c", "import torch"])
    if done["exit"]:
        setup = f"ssh {host.target} 'cd {shlex.quote(str(ROOT))} && bash launch.sh setup'"
        needs = f"It needs {os.path.realpath(python)}, or an environment of its own: {setup}"
        raise Refused(f"{python} does not run there: {last_line(done['err'])}. {needs}")
    return f"{len(files)} files, verified ({content_hash()}){venv}"


def send(host: Host, job: dict, script: str, folder, files: list[str]) -> str:
    """Runs a line of shell in the checkout's folder on a host, with an archive on its stdin -> what it prints."""
    root = shlex.quote(str(ROOT))
    command = [*ssh_command(host, job["ssh"]), "exec sh -c " + shlex.quote(f"mkdir -p {root} && cd {root} && {script}")]
    archive = ["tar", "-C", folder, "--exclude=__pycache__", "-cf", "-", "--", *files]
    with subprocess.Popen(archive, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tar:
        done = subprocess.run(command, stdin=tar.stdout, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise Unreachable(last_line(done.stderr) or f"status {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    run_verb(doctor=verb_doctor, sync=verb_sync)
