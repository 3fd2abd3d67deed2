"""`launch.sh doctor` and `launch.sh sync`: whether every machine is fit to train, and making their files the same.

doctor looks at all hosts at once, has every pair of them sum 8 MB, and draws a table: a row for each check, a column
for each host. Below it stands, for each red field, what was found and the command that mends it."""

import contextlib
import json
import os
import re
import select
import shlex
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import SimpleNamespace

from cluster import (
    LAUNCH_FLAGS,
    Host,
    Unreachable,
    call,
    call_all,
    connect,
    explain,
    forwarded,
    read_flags,
    read_hosts,
    run_check,
    run_verb,
    say,
    settle_addresses,
    ssh_command,
)
from errors import ROOT, UserError, printable
from node import OWN_FILES, Refused, content_hash, last_line, own_files, tree_hash

CLOCK = 2.0  # seconds that clocks may differ: more, and logs of several hosts cannot be read together
DISK, SHM, FILES = 20, 1, 4096  # free GB, free GB, open files that a run should find
PAIR_BYTES, PAIR_LIMIT = 8 * 2**20, 20  # what a pair sums, seconds it has
SLOW = 4  # a link this many times slower than the fastest is red


def fine(f) -> bool:
    return False


# A row is its name, what is shown of a host's facts, whether that is wrong, and what mends it. An empty text leaves the
# field out. Of what should be alike everywhere, `usual` has what most hosts have.
ROWS = (
    # The own name may mean 127.0.1.1, as on Debian: the launcher passes addresses and interfaces, never that name.
    ("own name", "{own_name:.20}", fine, ""),
    (
        "other names",
        "{names_shown}",
        lambda f: f.wrong_names,
        "{wrong_names} there, not what this machine reaches; mend its /etc/hosts: {there}cat /etc/hosts",
    ),
    ("reverse name", "{reverse}", fine, ""),
    (
        "clock",
        "{clock}",
        lambda f: f.off > CLOCK,
        "{off:.0f} s {direction} this machine's; {there}sudo chronyc makestep",
    ),
    ("python", "{python}", lambda f: f.python != f.usual["python"], "{python}, others {usual[python]}; {setup}"),
    (
        "torch",
        "{torch}",
        lambda f: f.torch_error or f.torch != f.usual["torch"],
        "{torch_error}{torch}, others {usual[torch]}; {setup}",
    ),
    ("cuda, nccl", "{cuda}", fine, ""),
    (
        "driver",
        "{driver}",
        lambda f: f.driver != f.usual["driver"],
        "{driver}, others {usual[driver]}; install the same: {there}nvidia-smi",
    ),
    ("code", "{code}", lambda f: f.code != f.code_here, "{code}, here it is {code_here}; bash launch.sh sync"),
    ("folder", "{folder}", fine, ""),
    (
        "GPUs",
        "{gpus}",
        lambda f: f.gpus != f.usual["gpus"],
        "{gpus}, others {usual[gpus]}; {there}nvidia-smi; to use fewer on purpose: slots=N in hosts",
    ),
    ("left over", "{left_shown}", lambda f: f.in_use, "{in_use}; if it is of no use: {there}{end_it}"),
    (
        "free runs",
        "{free_runs:.0f} GB",
        lambda f: f.free_runs < DISK,
        "{free_runs:.1f} GB, at least {DISK} are wanted; {there}df -h {ROOT}",
    ),
    (
        "free /dev/shm",
        "{free_shm:.0f} GB",
        lambda f: f.free_shm < SHM,
        "{free_shm:.1f} GB, at least {SHM} are wanted; {there}df -h /dev/shm",
    ),
    (
        "open files",
        "{files}",
        lambda f: f.files < FILES,
        "{files}, at least {FILES} are wanted: `* - nofile 65536` in its /etc/security/limits.conf",
    ),
    (
        "locked memory",
        "{locked_shown}",
        lambda f: f.gpus and 0 <= f.locked < 2**30,
        "RDMA needs more: `* - memlock unlimited` in its /etc/security/limits.conf",
    ),
    ("tmux", "{tmux}", lambda f: f.tmux == "none", "{there}sudo apt install -y tmux"),
    ("port", "{port_shown}", lambda f: not f.port, "{port_shown} is taken; set another at the top of launch.sh"),
)


class Table:
    """Fields by (row, host); red ones have a line each that says what to do."""

    def __init__(self, hosts: list[Host]):
        self.hosts, self.rows, self.red = hosts, {}, []

    def put(self, row: str, host: Host, text: str, problem: str = ""):
        fields = self.rows.setdefault(row, {})
        if text:
            fields[host.label] = f"{'✗' if problem else '✓'} {printable(text)}"
        if problem:
            self.red.append(f"{host.label}: {row}: {problem}")

    def draw(self) -> str:
        first = max(map(len, self.rows)) + 2
        lines = [" " * first] + [row.ljust(first) for row in self.rows]
        for host in self.hosts:
            column = [host.label, *(fields.get(host.label, "") for fields in self.rows.values())]
            width = max(map(len, column)) + 2
            lines = [line + text.ljust(width) for line, text in zip(lines, column, strict=True)]
        return "\n".join(line.rstrip() for line in lines)


def verb_doctor(words: list[str], settings: dict) -> int:
    flags, words = read_flags(words, *LAUNCH_FLAGS)
    hosts, answering = read_hosts(flags["--hosts"]), []
    words = words or shlex.split(settings["default_args"])
    job, table = {**settings, "words": words, "env": forwarded(settings["forward"])}, Table(hosts)
    answers = call_all(hosts, job["ssh"], "probe", 60, python=job["python"], env=job["env"])
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, Exception):
            table.put("ssh", host, "no answer", explain(host, answer))
        else:
            table.put("ssh", host, "here" if host.local else "answers")
            host.facts = answer
            answering.append(host)
    if answering:
        settle_addresses(answering)
        examine_all(table, answering, job)
        check_data(table, answering, job)
    if len(answering) > 1:
        check_links(table, answering, job)
    text = printable(table.draw())
    if sys.stdout.isatty():
        for mark, colour in ("✗", 31), ("✓", 32):
            text = text.replace(mark, f"\033[{colour}m{mark}\033[0m")
    print(text)
    if table.red:
        say("\n" + "\n".join(table.red))
    return int(bool(table.red))


@contextlib.contextmanager
def mark():
    """The name of a file that tells whether another machine sees this folder."""
    path = ROOT / "runs" / f".seen-by-{os.getpid()}"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    try:
        yield str(path.relative_to(ROOT))
    finally:
        path.unlink()


def examine_all(table: Table, hosts: list[Host], job: dict):
    names = [h.name.split("@")[-1] for h in hosts if not h.local]
    request, sent = {"names": names, "python": job["python"], "env": job["env"], "port": job["port"]}, time.time()
    with mark() as name:
        answers = call_all(hosts, job["ssh"], "examine", 120, mark=name, **request)
    known = [a for a in answers if isinstance(a, dict)]
    alike = ("python", "torch", "driver", "gpus")
    usual = {key: Counter(a[key] for a in known).most_common(1)[0][0] for key in alike if known}
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, Exception):
            table.put("ssh", host, "fails", explain(host, answer))
            continue
        facts = SimpleNamespace(**answer, usual=usual, ROOT=ROOT, DISK=DISK, SHM=SHM, FILES=FILES)
        complete(facts, host, hosts, job, sent)
        for row, text, wrong, mend in ROWS:
            table.put(row, host, text.format(**vars(facts)), mend.format(**vars(facts)) if wrong(facts) else "")


def complete(f: SimpleNamespace, host: Host, hosts: list[Host], job: dict, sent: float):
    """Adds to what a host has answered what the table says of it in words."""
    f.there = "" if host.local else f"ssh {host.target} "
    f.setup = f"bash launch.sh sync, or {f.there}'cd {ROOT} && bash launch.sh setup'"
    f.code_here, f.folder = content_hash(), "shared" if f.shared else "its own"
    f.tmux = "there" if f.tmux else "none"
    f.locked_shown = "unlimited" if f.locked < 0 else f"{f.locked // 1024} KB"
    complete_names(f, [h for h in hosts if h is not host and not h.local])
    ahead, behind = f.time - time.time(), sent - f.time
    f.off, f.direction = max(ahead, behind), "ahead of" if ahead > behind else "behind"
    f.clock = f"{f.off:.0f} s off" if f.off > CLOCK else "agrees"
    busy = [f"{pid} ({run})" for pid, run in f.left]
    used = [f"GPU {i} {size} MiB" for i, size in enumerate(f.gpu_memory) if size > 1000]
    f.left_shown = f"{len(busy)} processes" if busy else ", ".join(used) or "nothing"
    f.in_use = ", ".join(busy + used)
    f.end_it = "kill " + " ".join(str(pid) for pid, _ in f.left) if busy else "nvidia-smi"
    f.port_shown = job["port"] or "a free one"
    if host is not hosts[0]:
        f.port, f.port_shown = True, ""


def complete_names(f: SimpleNamespace, others: list[Host]):
    addresses = [(other, f.names[other.name.split("@")[-1]]) for other in others]
    known = [(other, found) for other, found in addresses if re.match(r"[\d.]+$", found[0])]
    unknown = len(others) - len(known)
    f.names_shown = f"{unknown} unknown" if unknown else "known"
    f.wrong_names = ", ".join(f"{h.name} is {found[0]}" for h, found in known if is_wrong(h.address, found))


def is_wrong(address: str, found: list[str]) -> bool:
    return address not in found and not address.startswith("127.")


def check_data(table: Table, hosts: list[Host], job: dict):
    """train.py's own check of flags, data and weights, once on each machine."""
    machines = list({h.address: h for h in reversed(hosts)}.values())
    for host in hosts:
        host.slots = host.slots or len(host.facts["gpus"]) or 1
    total = sum(h.slots for h in hosts)

    def problem(host: Host) -> str:
        try:
            done = run_check(host, job, total)
        except (Unreachable, Refused) as e:
            return explain(host, e)
        return last_line(done["err"]).removeprefix("error: ") or "it failed" if done["exit"] else ""

    with ThreadPoolExecutor(len(machines)) as pool:
        for host, text in zip(machines, pool.map(problem, machines), strict=True):
            table.put("data, weights", host, "no" if text else "there", text)


# ---- links


def check_links(table: Table, hosts: list[Host], job: dict):
    """An all-reduce of every pair, as many pairs at once as there are hosts for."""
    probes = {h.label: LinkProbe(h, job) for h in hosts}
    ready = [label for label, probe in probes.items() if probe.read(90)]
    links = {}  # pair -> (MB/s, what is wrong)
    for pairs in tournament(ready):
        with ThreadPoolExecutor(len(pairs)) as pool:
            links |= zip(pairs, pool.map(lambda pair: meet(probes, *pair), pairs), strict=True)
    # Between nodes of one machine no network is used: the others are compared.
    far = [(a, b) for a, b in links if probes[a].host.address != probes[b].host.address]
    fastest = max([links[pair][0] for pair in far], default=0.0)
    for pair in far:
        speed, problem = links[pair]
        if not problem and speed * SLOW < fastest:
            speed, problem = max((speed, ""), meet(probes, *pair))  # once more, with nobody else on the network
            slow = f"is slow ({speed:.0f} MB/s, the fastest has {fastest:.0f})" if speed * SLOW < fastest else ""
            links[pair] = speed, problem or slow
    for probe in probes.values():
        probe.close()
    for host in hosts:
        if host.label in ready:
            table.put("links", host, *judge_links(host.label, links))
        else:
            table.put("links", host, "none", "torch does not come up there; see the row torch")


def judge_links(label: str, links: dict) -> tuple[str, str]:
    """A host's slowest link, and what is wrong with its links. One whose every link is bad is to blame for them, and
    the hosts at their other ends are not."""

    def all_bad(name: str) -> bool:
        problems = [problem for pair, (_, problem) in links.items() if name in pair]
        return len(problems) > 1 and all(problems)

    slowest = min([speed for pair, (speed, problem) in links.items() if label in pair and not problem], default=0.0)
    blamed, problem = all_bad(label), ""
    bad = [
        pair for pair, link in links.items() if label in pair and link[1] and (blamed or not any(map(all_bad, pair)))
    ]
    if bad:
        others = ", ".join(name for pair in bad for name in pair if name != label)
        which = "every link of this host" if blamed else f"the link to {others}"
        problem = f"{which} {links[bad[0]][1]}; see its cable, firewall and the errors that `ip -s link` counts"
    return f"{slowest:.0f} MB/s", problem


def tournament(names: list[str]) -> list:
    """Rounds of pairs: every two meet once, nobody twice in a round."""
    left, rounds = list(combinations(names, 2)), []
    while left:
        pairs = []
        for pair in left:
            if not {name for p in pairs for name in p} & set(pair):
                pairs.append(pair)
        rounds.append(pairs)
        left = [pair for pair in left if pair not in pairs]
    return rounds


class LinkProbe:
    """A process on a host that sums with others when told to."""

    def __init__(self, host: Host, job: dict):
        request = {"limit": PAIR_LIMIT, "bytes": PAIR_BYTES, "env": job["env"]}
        self.host, self.process = host, connect(host, job["ssh"], "pairs", job["python"], **request)

    def tell(self, **order):
        with contextlib.suppress(OSError):  # it has ended
            self.process.stdin.write(json.dumps(order).encode() + b"\n")

    def read(self, limit: float) -> dict:
        """Its next answer, or {}."""
        end = time.monotonic() + limit
        while select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))[0]:
            line = self.process.stdout.readline()
            if line.startswith(b"{"):
                return json.loads(line)
            if not line:
                break
        return {}

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def meet(probes: dict, *names: str) -> tuple[float, str]:
    """The speed of a link, and what is wrong with it."""
    first, second = (probes[name] for name in names)
    order = {"address": first.host.address, "port": 0}
    first.tell(role=0, **order)
    answers = [first.read(PAIR_LIMIT + 5)]
    if "port" in answers[0]:
        second.tell(role=1, **{**order, **answers[0]})
        answers = [probe.read(4 * PAIR_LIMIT) for probe in (second, first)]
    for answer in answers:
        if "mb_per_s" not in answer:
            return 0.0, f"is broken ({answer.get('error', 'no answer')})"
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
    with mark() as name, ThreadPoolExecutor(len(hosts)) as pool:
        lines = list(pool.map(lambda host: sync(host, settings, name), hosts))
    for line, failed in lines:
        say(line, sys.stderr if failed else sys.stdout)
    return int(any(failed for _, failed in lines))


def sync(host: Host, settings: dict, mark: str) -> tuple[str, bool]:
    """Makes a host's files those that are here -> (what was done or is wrong, whether it failed)."""
    extra = ["hosts", "README.md", "BENCHMARKS.md", "LICENSE", ".gitignore"]
    files = [*own_files(), *(name for name in extra if (ROOT / name).exists())]
    ssh, python, here, environment = settings["ssh"], settings["python"], content_hash(), tree_hash(ROOT / ".venv")
    probe = {"python": python, "env": {}, "environment": True}
    try:
        unpack = f"if [ -e {mark} ]; then echo shared; else rm -f {OWN_FILES} && tar --no-same-owner -xf -; fi"
        if "shared" in send(host, ssh, unpack, ROOT, files).split():
            return f"{host.label}: sees this very folder; nothing to copy", False
        found, venv = call(host, ssh, "probe", 60, **probe), ", .venv the same" if environment else ""
        if environment and found["environment"] != environment:
            unpack = "rm -rf .venv.new && mkdir .venv.new && tar --no-same-owner -C .venv.new -xf - &&"
            send(host, ssh, f"{unpack} rm -rf .venv && mv .venv.new .venv", os.path.realpath(ROOT / ".venv"), ["."])
            found, venv = call(host, ssh, "probe", 60, **probe), ", .venv copied"
        if found["code"] != here or (environment and found["environment"] != environment):
            return (
                f"{host.label}: the files differ after copying ({found['code']}, here {here}): is its disk full?",
                True,
            )
        done = call(host, ssh, "run", 120, env={}, command=[python, "-c", "import torch"], limit=100)
    except (Unreachable, Refused) as e:
        return explain(host, e), True
    if done["exit"]:
        problem = f"{host.label}: {python} does not run there: {last_line(done['err'])}. It needs"
        setup = f"ssh {host.target} 'cd {shlex.quote(str(ROOT))} && bash launch.sh setup'"
        return f"{problem} {os.path.realpath(python)}, or an environment of its own: {setup}", True
    return f"{host.label}: {len(files)} files, verified ({here}){venv}", False


def send(host: Host, ssh: str, script: str, folder, files: list[str]) -> str:
    """Runs a line of shell in the checkout's folder on a host, with an archive on its stdin -> what it prints."""
    root = shlex.quote(str(ROOT))
    command = [*ssh_command(host, ssh), "exec sh -c " + shlex.quote(f"mkdir -p {root} && cd {root} && {script}")]
    archive = ["tar", "-C", folder, "--exclude=__pycache__", "-cf", "-", "--", *files]
    with subprocess.Popen(archive, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tar:
        done = subprocess.run(command, stdin=tar.stdout, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise Unreachable(last_line(done.stderr) or f"status {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    run_verb(doctor=verb_doctor, sync=verb_sync)
