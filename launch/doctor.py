"""The machines: which ones a run is on, how to ask them, and whether they are fit to train (`launch.sh doctor`).
cluster.py runs jobs on them; node.py acts on one machine.

Every launch examines its hosts with `survey`, and so does doctor. Then doctor times a product on each GPU, repeats it
and a sum to see that the bits never differ, has all hosts sum 64 MiB together, runs train.py's own check on every host,
and prints a line for each host. Below them, each problem has a line.

A *job* is a dictionary that every operation of node.py gets: the settings and flags of the launcher, the words for
train.py, the environment, and later the run's folder (`out`) and the attempt's `id`. A host that refuses an operation
answers `refused` with the reason; if a host does not answer, `silent` is ssh's reason."""

import fnmatch
import json
import os
import platform
import random
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import node
from base.disk import ROOT
from base.errors import Parser, UserError, printable, within
from config import DEFAULT
from node import digest, last_line
from settings import SETTINGS

HOST = re.compile(r"([^\s,-][^\s,]*)(?:\s+slots=([1-9]\d*))?")
PATIENCE = 1800  # seconds for a host to read data and weights
INSTALLED = ".venv/flatland-run"  # the list of the packages in .venv, see env.sh
OWN_FILES = [
    "*.py",
    "*.sh",
    "*.sbatch",
    "*.toml",
    "requirements.txt",
    "recipes/*.args",
    "base/*.py",
    "hf/*.py",
    "dataset/*.py",
    "job/*.py",
    "hf/templates/*.jinja",
    "launch/*.py",
    "launch/*.sh",
    "bench/*.py",
    "bench/*.json",
]
# The project's own files: code, scripts and recipes; not `hosts`, which does not affect a run.
CODE = sorted(str(path.relative_to(ROOT)) for pattern in OWN_FILES for path in ROOT.glob(pattern))


@dataclass
class Host:
    """One line of `hosts`: a node of the job. Several lines may name one machine."""

    name: str  # as in `hosts`: localhost, host, user@host or host:port
    slots: int = 0  # ranks; 0 = one per GPU
    label: str = ""  # its name in messages and under logs/
    node: int = 0  # its place in `hosts`
    session: str = ""
    address: str = ""  # as the other hosts reach it
    devices: list | None = None  # its share of the GPUs; None without GPUs
    last: dict = field(default_factory=dict)  # its last answer
    heard: float = 0.0  # the time of that answer

    @property
    def local(self) -> bool:
        return self.name == "localhost"

    @property
    def problem(self) -> str:
        """A line about a host that did not do as asked, with what to try; empty if it did."""
        if "refused" in self.last:
            return f"{self.label}: {self.last['refused']}"
        if "silent" in self.last:
            return f"{self.label} does not answer: {self.last['silent']}. Try: ssh ssh://{self.name} true"
        return ""

    def ssh(self, options: str) -> list[str]:
        return ["ssh", *shlex.split(options), "--", f"ssh://{self.name}"]

    def call(self, job: dict, operation: str, patience: float = 20, **more) -> dict:
        """Runs an operation of node.py on the host, in this process for localhost -> its answer."""
        request = {**vars(self), **job, **more}
        self.last = node.answer(operation, request) if self.local else self.call_by_ssh(operation, request, patience)
        if "silent" not in self.last:
            self.heard = time.monotonic()
        return self.last

    def call_by_ssh(self, operation: str, request: dict, patience: float) -> dict:
        remote = f"exec {shlex.join([sys.executable, node.THIS_FILE])} serve {operation}"
        command = ["timeout", "--foreground", str(patience), *self.ssh(request["ssh"]), remote]
        pipes = {"input": json.dumps(request) + "\n", "capture_output": True, "text": True, "errors": "replace"}
        done = subprocess.run(command, **pipes)
        answer = last_line(done.stdout)  # other lines are a .bashrc's
        if answer.startswith("{"):
            return json.loads(answer)
        late = done.returncode == 124  # timeout's; stderr may have ssh's remarks
        return {"silent": f"no answer in {patience} s" if late else last_line(done.stderr)}


def say(text: str, stream=None, end: str = "\n") -> None:
    print(printable(text), file=stream, end=end, flush=True)


def ask(hosts: list[Host], job: dict, operation: str, patience: float = 20, **request) -> list[str]:
    """Calls all hosts at once; each keeps its answer in `last` -> the problems."""
    with ThreadPoolExecutor(len(hosts) or 1) as pool:
        list(pool.map(lambda host: host.call(job, operation, patience, **request), hosts))
    return [host.problem for host in hosts if host.problem]


# ---- arguments


FLAGS = {
    "--hosts": dict(),
    "--nproc": dict(type=within(int, 1), default=0),
    "--retries": dict(type=within(int, 0)),
    "--detach": dict(action="store_true"),
}


def read_job(words: list[str]) -> tuple[list[Host], dict]:
    """The arguments of `train` and `doctor` -> (the hosts, the job)"""
    flags, words = Parser(FLAGS, add_help=False).parse_known_args(words)
    hosts = read_hosts(flags.hosts)
    job = SETTINGS | {"nproc": flags.nproc, "detach": flags.detach, "words": words or DEFAULT}
    if flags.retries is not None or len(hosts) == 1:
        job["retries"] = flags.retries or 0
    # Systems give clients ports from 32768 on, so a port below is hardly ever taken
    job["port"] = job["port"] or random.randrange(20000, 30000)
    job["cwd"] = os.getcwd()  # relative paths are meant from here, on every host
    job["env"] = {k: v for k, v in os.environ.items() if any(fnmatch.fnmatchcase(k, p) for p in job["forward"])}
    return hosts, job


def read_hosts(listed: str | None) -> list[Host]:
    """The hosts after --hosts, else the lines of the file `hosts`, else this machine alone."""
    path, hosts = ROOT / "hosts", []
    text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
    lines = [*filter(None, (line.split("#")[0].strip() for line in text.splitlines()))] or ["localhost"]
    # After --hosts an empty name is a mistake, for example an empty variable of the shell.
    for line in lines if listed is None else map(str.strip, listed.split(",")):
        if not (match := HOST.fullmatch(line)):
            raise UserError(f"'{line}' is not a host: expected host, user@host or host:port, and perhaps slots=N")
        name, node = match[1], len(hosts)
        label = re.sub(r"[^\w.-]", "-", platform.node() if name == "localhost" else name.split("@")[-1])
        label += f"-{node + 1}" * (label in [host.label for host in hosts])
        hosts.append(Host(name, int(match[2] or 0), label, node))
    return hosts


# ---- before a launch


def survey(hosts: list[Host], job: dict) -> None:
    """Examines all hosts at once and settles their addresses, GPUs and ranks, and the command of train.py's own check.
    UserError with all problems."""
    files = [*CODE, INSTALLED]
    problems, here = ask(hosts, job, "probe", 60, files=files), digest(files)
    problems += [f"{h.label}: other code or packages than here" for h in hosts if h.last.get("digest", here) != here]
    if problems:
        raise UserError("\n".join([*problems, "To copy code and packages: bash launch.sh sync"]))
    assign_ranks(hosts, job["nproc"])
    job["first"], job["last"], job["nodes"] = hosts[0].address, hosts[-1].address, len(hosts)
    ranks = sum(host.slots for host in hosts)
    job["check"] = ["env", f"WORLD_SIZE={ranks}", sys.executable, f"{ROOT}/train.py", *job["words"], "--check"]


def assign_ranks(hosts: list[Host], nproc: int) -> None:
    """Sets the hosts' addresses, ranks and GPUs. The address of a host is where its ssh connection came in: its name
    may resolve to another address, or on Debian to 127.0.1.1. A machine's GPUs are divided evenly among its nodes."""
    remote = [host.last["connection"] for host in hosts if not host.local]
    away = [connection for connection in remote if not connection[2].startswith("127.")]
    for host in hosts:
        host.address = "127.0.0.1" if host.local else host.last["connection"][2]
        if away and host.address.startswith("127."):  # this machine, as a host elsewhere sees it
            host.address = away[0][0]
    for host in hosts:
        together = [other for other in hosts if other.address == host.address]
        visible = host.last["gpus"]
        share = len(visible) // len(together)
        first = share * together.index(host)
        host.devices = visible[first : first + share] if visible else None
        host.slots = nproc or host.slots or share or 1
    without = ", ".join(host.label for host in hosts if not host.devices)
    if without and any(host.last["gpus"] for host in hosts):
        raise UserError(f"{without}: no GPU is left, while others have some; CUDA_VISIBLE_DEVICES= trains on CPUs")


# ---- sync


def verb_sync(words: list[str]) -> int:
    """Copies the code to the same path on all hosts, and .venv where its list of packages differs."""
    Parser({"--hosts": {}}, add_help=False).parse_args(words)
    hosts, job = read_job(words)
    root, names, failed = shlex.quote(str(ROOT)), shlex.join(CODE), 0
    for host in (host for host in hosts if not host.local):
        installed = host.call(job, "probe", 60, files=[INSTALLED], cwd="/").get("digest")
        venv = "" if installed == digest([INSTALLED]) else ".venv"
        # The list of packages comes last: a copy that was interrupted does not look complete.
        pack = f"tar -cf - --exclude={INSTALLED} {names} {venv} && tar -cf - {INSTALLED}"
        unpack = shlex.join([*host.ssh(job["ssh"]), f"mkdir -p {root} && tar -C {root} -xif -"])
        status = subprocess.call(["bash", "-o", "pipefail", "-c", f"({pack}) | {unpack}"], cwd=ROOT)
        say(f"{host.label}: {'not ' * bool(status)}copied")
        failed |= status
    return bool(failed)


# ---- doctor


def verb_doctor(words: list[str]) -> int:
    hosts, job = read_job(words)
    survey(hosts, job)
    meeting = job["first"], job["last"], str(job["port"]), str(job["nodes"])
    measure = [sys.executable, node.THIS_FILE, "measure", *meeting, *job["check"]]
    ask(hosts, job, "run", PATIENCE, command=measure)
    problems = []
    for host in hosts:
        failure = host.problem or (host.last["exit"] and last_line(host.last["err"]))
        facts = {"problems": [failure]} if failure else json.loads(last_line(host.last["out"]))
        values = [f"{name} {facts.get(name) or 'none'}" for name in ("torch", "attention", "MB/s", "TFLOP/s")]
        say(f"{host.label}: {', '.join(values)}")
        problems += [f"✗ {host.label}: {problem}" for problem in facts["problems"]]
    for problem in problems:
        say(problem)
    return bool(problems)
