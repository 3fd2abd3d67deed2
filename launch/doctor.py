"""The machines: which ones a run is on, how to ask them, whether they are fit to train, and whether they have the same
files (`launch.sh doctor`, `launch.sh sync`). cluster.py runs jobs on them; node.py acts on one of them.

Every launch examines its hosts with `survey`. doctor examines more, has all hosts sum 64 MiB together, and draws a
table: a row for each check, a column for each host. Below the table, each red field has a line with its value and the
command that corrects it.

A *job* is a dictionary that every operation of node.py gets: launch.sh's settings, the words after train, the
environment, and later the run's folder (`out`) and the attempt's `id`."""

import argparse
import contextlib
import fnmatch
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest

import node
from lib.errors import ROOT, Parser, UserError, printable
from node import Refused, content_hash, last_line, own_files

HOST = re.compile(r"((?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[0-9a-fA-F:]+\]))(?::(\d+))?(?:\s+slots=([1-9]\d*))?")
CLOCK = 2.0  # seconds that clocks may differ; with more, logs of several hosts cannot be read together
REDUCED, LIMIT, WANTED = 64 * 2**20, 30, 100  # an all-reduce: bytes, seconds that it has, MB/s (1 Gbit/s has 100)
FREE = {"runs": 20, "/dev/shm": 1}  # GB that a run should find
ALIKE = {  # facts that should be the same on all hosts -> the remedy
    "code": "bash launch.sh sync",
    "torch": "bash launch.sh sync, or on that host: bash launch.sh setup",
    "driver": "install the same driver",
    "gpus": "see nvidia-smi; to use fewer on purpose: slots=N in hosts",
}


class Unreachable(Exception):
    """The host did not answer; the message is ssh's reason."""


@dataclass
class Host:
    """One line of `hosts`: a node of the job. Several lines may name one machine."""

    name: str  # localhost, host or user@host
    port: int = 0  # of ssh; 0 = ssh's own choice
    slots: int = 0  # ranks; 0 = one per GPU
    label: str = ""  # its name in messages and under logs/
    number: str = ""  # the label's end, for another node of one name: "-2" and so on
    session: str = ""
    node: int = 0  # its place in `hosts`
    address: str = ""  # as the other hosts reach it
    devices: list | None = None  # its share of the GPUs; None without GPUs
    ranks_here: int = 0  # ranks on its machine, including other nodes
    facts: dict = field(default_factory=dict)
    last: dict = field(default_factory=dict)  # its last answer to `look`
    heard: float = 0.0  # the time of that answer

    @property
    def local(self) -> bool:
        return self.line == "localhost"

    @property
    def line(self) -> str:
        """As it is written in `hosts` and after --hosts."""
        return self.name + (f":{self.port}" if self.port else "")

    @property
    def target(self) -> str:
        """As a person types it after ssh."""
        return f"-p {self.port} {self.name}" if self.port else self.name


def say(text: str, stream=None, end: str = "\n") -> None:
    print(printable(text), file=stream or sys.stdout, end=end, flush=True)


def refuse(problems: list[str]) -> None:
    if problems:
        raise UserError("\n".join(problems))


def columns(rows: list) -> str:
    """Rows of words, each column as wide as its longest word; the last word of a row may be longer."""
    widths = [max(map(len, column)) + 2 for column in zip_longest(*(row[:-1] for row in rows), fillvalue="")] + [0]
    return "\n".join("".join(map(str.ljust, row, widths)).rstrip() for row in rows)


# ---- arguments


def natural(text: str) -> int:
    if not text.isdecimal():
        raise ValueError  # argparse reports it with the flag's name
    return int(text)


def read_job(words: list[str], settings: dict) -> tuple[argparse.Namespace, list[Host], dict]:
    """The arguments of `train` and `doctor` -> (the launcher flags, the hosts, the job with the other words)."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hosts", default="")
    parser.add_argument("--nproc", type=natural, default=0)
    parser.add_argument("--retries", type=natural)
    parser.add_argument("--detach", action="store_true")
    flags, words = parser.parse_known_args(words)
    hosts, patterns = read_hosts(flags.hosts), settings["forward"].split()
    job = {**settings, "words": words or shlex.split(settings["default_args"]), "nproc": flags.nproc}
    job["env"] = {k: v for k, v in os.environ.items() if any(fnmatch.fnmatchcase(k, p) for p in patterns)}
    if flags.retries is not None or len(hosts) == 1:
        job["retries"] = flags.retries or 0
    return flags, hosts, job


def read_hosts(listed: str) -> list[Host]:
    """The hosts after --hosts, else the lines of the file `hosts`, else this machine alone."""
    path = ROOT / "hosts"
    if listed:
        lines = listed.split(",")
    else:
        lines = path.read_text(encoding="utf-8-sig").splitlines() if path.exists() else ["localhost"]
    hosts, labels = [], set()
    for line in filter(None, (line.split("#")[0].strip() for line in lines)):
        if not (match := HOST.fullmatch(line)):
            form = "expected host, user@host or host:port, then nothing or slots=N with N above 0"
            raise UserError(f"{'--hosts' if listed else 'hosts'}: '{line}' is not a host; {form}")
        host = Host(re.sub(r"[][]", "", match[1]), int(match[2] or 0), int(match[3] or 0))
        label = re.sub(r"[^\w.-]", "-", platform.node() if host.local else host.line.split("@")[-1])
        while label + host.number in labels:
            host.number = f"-{int(host.number[1:] or 1) + 1}"
        host.label = label + host.number
        labels.add(host.label)
        hosts.append(host)
    if not hosts:
        raise UserError("hosts names no machine; this one is called localhost")
    return hosts


# ---- asking a host


def ssh_command(host: Host, options: str) -> list[str]:
    port = ["-p", str(host.port)] if host.port else []
    return ["ssh", *shlex.split(options), *port, "--", host.name]


def call(host: Host, job: dict, operation: str, patience: float, interpreter: str = "", **more) -> dict:
    """Runs an operation of node.py on the host -> its answer. Raises Unreachable and Refused. interpreter: the Python
    to run it with; without one it runs in this process for localhost, and in python3 elsewhere."""
    request = {**vars(host), **job, **more}
    if host.local and not interpreter:
        answer = node.answer(operation, request)
    else:
        command = [interpreter or "python3", str(ROOT / "launch" / "node.py"), operation]
        if not host.local:
            command = [*ssh_command(host, job["ssh"]), "exec " + shlex.join(command)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, input=json.dumps(request).encode() + b"\n", capture_output=True, timeout=patience
            )
        except subprocess.TimeoutExpired:
            raise Unreachable(f"no answer in {patience:.0f} s") from None
        lines = [line for line in done.stdout.splitlines() if line.startswith(b"{") and line.endswith(b"}")]
        if not lines:  # other lines are a .bashrc's
            error = last_line(done.stderr.decode(errors="replace"))
            raise Unreachable(error or f"status {done.returncode} without an answer")
        answer = json.loads(lines[-1])
    if "refused" in answer:
        raise Refused(answer["refused"])
    return answer


def outcome(function, *words, **more):
    """The function's result, or the Unreachable or Refused that it raises."""
    try:
        return function(*words, **more)
    except (Unreachable, Refused) as error:
        return error


def call_all(hosts: list[Host], job: dict, operation: str, patience: float, **request) -> list:
    """call() on all hosts at once -> an answer or an exception from each."""
    with ThreadPoolExecutor(len(hosts) or 1) as pool:
        return list(pool.map(lambda host: outcome(call, host, job, operation, patience, **request), hosts))


def explain(host: Host, error: Exception) -> str:
    """A line about a host that did not do as asked, with what to try."""
    if isinstance(error, Refused):
        return f"{host.label}: {error}"
    if "can't open file" in str(error):
        return f"{host.label}: there is no {ROOT}/launch/node.py; bash launch.sh sync --hosts {host.line}"
    return f"{host.label} does not answer: {error}. Try: ssh {host.target} true"


def explain_all(hosts: list[Host], answers: list) -> list[str]:
    return [explain(h, a) for h, a in zip(hosts, answers, strict=True) if isinstance(a, Exception)]


# ---- before a launch


def survey(hosts: list[Host], job: dict) -> None:
    """Examines all hosts at once and settles their addresses, GPUs and ranks. Raises one UserError with all
    problems."""
    answers = call_all(hosts, job, "probe", 60)
    refuse(explain_all(hosts, answers))
    for host, answer in zip(hosts, answers, strict=True):
        host.facts = answer
    settle_addresses(hosts)
    sync = f"bash launch.sh sync --hosts {','.join(h.line for h in hosts if not h.local)}"
    code, problems, machines = content_hash(), [], {}
    for host in hosts:
        machines.setdefault(host.address, []).append(host)
        if host.facts["code"] != code:
            problems.append(f"{host.label}: the files in {ROOT} are not the ones here; {sync}")
        elif not host.facts["python"]:
            problems.append(f"{host.label}: there is no {job['python']}; {sync}")
    if not hosts[0].facts["port"]:
        problems.append(f"port {job['port']} is taken; set another at the top of launch.sh, or 0 for a free one")
    for together in machines.values():
        problems += share_machine(together, job["nproc"])
    without = ", ".join(h.label for h in hosts if not h.devices)
    if without and any(h.devices for h in hosts):
        advice = "take it out of hosts, or set CUDA_VISIBLE_DEVICES="
        problems.append(f"{without}: no GPU, while others have some; {advice}")
    refuse(problems)


def settle_addresses(hosts: list[Host]) -> None:
    """Sets the address that the other hosts use for each host: its ssh connection came in there. Its name may resolve
    to another address, or on Debian to 127.0.1.1."""
    for host in hosts:
        host.address = "127.0.0.1" if host.local else host.facts["connection"][2]
    away = next((h for h in hosts if not h.address.startswith("127.")), None)
    for host in hosts:
        if away and host.address.startswith("127."):  # this machine, as a host elsewhere sees it
            host.address = away.facts["connection"][0]


def share_machine(together: list[Host], nproc: int) -> list[str]:
    """Divides a machine's GPUs evenly among its nodes -> problems."""
    visible, problems = together[0].facts["gpus"], []
    share, left = divmod(len(visible), len(together))
    if left:
        return [f"{together[0].label}: {len(visible)} GPUs cannot be divided evenly among {len(together)} nodes"]
    for i, host in enumerate(together):
        host.slots = nproc or host.slots or share or 1
        if visible:
            host.devices = visible[i * share : i * share + share][: host.slots]
            if host.slots > share:
                found = f"{host.slots} processes, but {share} visible GPUs for them"
                problems.append(f"{host.label}: {found}; start one process per GPU (--nproc, or slots=N in hosts)")
    for host in together:
        host.ranks_here = sum(h.slots for h in together)
    return problems


def run_checks(hosts: list[Host], job: dict, total: int) -> list:
    """train.py's own check for a number of ranks, on some hosts -> how it ended on each."""
    return call_all(hosts, job, "run", 1800, command=[job["python"], "train.py", *job["words"], "--check", str(total)])


# ---- doctor


class Table:
    """Fields by (row, host); red ones have a line each that says what to do."""

    def __init__(self, hosts: list[Host]):
        self.hosts, self.rows, self.red = hosts, {}, []

    def put(self, row: str, host: Host, text: str, problem: str = ""):
        self.rows.setdefault(row, {})[host.label] = f"{'✗' if problem else '✓'} {printable(text)}"
        if problem:
            self.red.append(f"{host.label}: {row}: {problem}")

    def draw(self) -> str:
        labels = [host.label for host in self.hosts]
        rows = [[row, *(fields.get(label, "") for label in labels)] for row, fields in self.rows.items()]
        return "\n".join([columns([["", *labels], *rows]), *[""] * bool(self.red), *self.red])


def verb_doctor(words: list[str], settings: dict) -> int:
    _, hosts, job = read_job(words, settings)
    table, answering, sent = Table(hosts), [], time.time()
    with folder_mark() as mark:
        answers = call_all(hosts, job, "examine", 120, folder_mark=mark)
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, Exception):
            table.put("ssh", host, "no answer", explain(host, answer))
        else:
            table.put("ssh", host, "here" if host.local else "answers")
            off = max(answer["time"] - time.time(), sent - answer["time"])
            problem = f"{off:.0f} s from this machine's; sudo chronyc makestep" if off > CLOCK else ""
            table.put("clock", host, f"{off:.0f} s off" if problem else "agrees", problem)
            host.facts, host.slots = answer, host.slots or len(answer["gpus"]) or 1
            answering.append(host)
    compare(table, answering)
    settle_addresses(answering)
    machines = list({h.address: h for h in reversed(answering)}.values())
    for host, done in zip(machines, run_checks(machines, job, sum(h.slots for h in answering)), strict=True):
        if isinstance(done, Exception) or done["exit"]:
            error = explain(host, done) if isinstance(done, Exception) else last_line(done["err"])
            table.put("data, weights", host, "no", error.removeprefix("error: ") or "train.py --check failed")
        else:
            table.put("data, weights", host, "there")
            table.put("attention", host, "".join(re.findall("^attention=(.*)", done["out"], re.M)) or "unknown")
    if len(machines) > 1:
        check_network(table, machines, job)
    say(table.draw())
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


def compare(table: Table, hosts: list[Host]) -> None:
    """Puts the facts that `examine` found into the table."""
    for name, remedy in ALIKE.items():
        values = [str(h.facts[name]) for h in hosts]
        usual = content_hash() if name == "code" else max(values, key=values.count, default="")
        for host, value in zip(hosts, values, strict=True):
            table.put(name, host, value, f"{value}, others {usual}; {remedy}" if value != usual else "")
    for host in hosts:
        if error := host.facts["torch_error"]:
            table.put("torch", host, "no", f"{error}; {ALIKE['torch']}")
        table.put("folder", host, "shared" if host.facts["shared"] else "separate")
        for path, free in host.facts["free"].items():
            problem = f"{free:.1f} GB, at least {FREE[path]} are needed" if free < FREE[path] else ""
            table.put(f"free {path}", host, f"{free:.0f} GB", problem)


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


def is_fast(speed: float | Exception) -> bool:
    return isinstance(speed, float) and speed >= WANTED


def find_slow(hosts: list[Host], job: dict) -> list[Host]:
    """Halves the hosts until the all-reduce of a group is fast -> the hosts of the smallest slow group."""
    while len(hosts) > 2:
        halves = hosts[: len(hosts) // 2], hosts[len(hosts) // 2 :]
        slow = [half for half in halves if len(half) > 1 and not is_fast(outcome(measure, half, job))]
        if len(slow) != 1:
            break  # both halves, or only the way between them
        hosts = slow[0]
    return hosts


def check_network(table: Table, hosts: list[Host], job: dict) -> None:
    """One all-reduce over all hosts; if it is slow or fails, smaller groups find the suspect."""
    speed = outcome(measure, hosts, job)
    known = isinstance(speed, float)
    suspects = [] if is_fast(speed) else find_slow(hosts, job)
    why = f"slower than {WANTED} MB/s" if known else str(speed)
    names = ", ".join(h.label for h in suspects)
    for host in hosts:
        advice = f"{why}; suspect: {names}: see cable, firewall and the errors that `ip -s link` counts"
        table.put("all-reduce", host, f"{speed:.0f} MB/s" if known else "fails", advice if host in suspects else "")


# ---- sync


def verb_sync(words: list[str], settings: dict) -> int:
    parser = Parser(prog="launch.sh sync", add_help=False, allow_abbrev=False)
    parser.add_argument("--hosts", default="")
    hosts = [h for h in read_hosts(parser.parse_args(words).hosts) if not h.local]
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
