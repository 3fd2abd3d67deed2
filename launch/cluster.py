"""The launcher's part on the machine where `bash launch.sh` is typed: which hosts, whether all are fit, starting them
together, watching them to the end, starting them again.

launch.sh calls its verbs. node.py acts on a host. `train` checks all hosts, then leaves a
supervisor behind, a separate process, and follows the run's log. The supervisor starts one agent on every host and
watches them through one ssh connection each; it decides when the job has failed, ends it everywhere, and relaunches it
from the newest checkpoint under a new rendezvous id.

A run's state is in two files. Rank 0 writes `runs/NAME/status.json`: state, step and message of the training. The
supervisor writes `logs/launch.json`: hosts, attempt, and how the launch ended; `logs/launch.log` tells its story. The
file `logs/stop` is a request to stop: rank 0 sees it, and the ranks vote. A `localhost` line is a node on this machine:
the same, without ssh.

A *job* is a dictionary that every operation of node.py gets: launch.sh's settings, the words after train, the
environment, and later the run's folder (`out`) and the attempt's `id`. launch.json is the job of the other verbs.

Why the job is relaunched as a whole: an elastic torchrun regroups reliably only in the easy cases."""

import contextlib
import fnmatch
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, NoReturn

sys.path.insert(1, str(Path(__file__).parents[1]))
from filelock import SoftFileLease, Timeout

from config import parse_args
from lib.errors import ROOT, UserError, missing_folders, printable, remove_empty, run_script
from node import KILLED, TERMINATED, WAITED, Refused, content_hash, last_line, read, read_json, tail, write_whole

GRACE = 20  # seconds that the others have to end by themselves once a part of the job is gone
LOOK = 0.5  # seconds between two looks
NOW = 10  # seconds that rank 0 has to end a run that is stopped at once, before its processes are killed
STOP_REASON = "launch.sh stop"  # as lib/run.py writes it into status.json
ENDED = ("finished", "stopped", "error", "failed")
ROOM = 2**20  # free bytes below which a disk counts as full
HOST = re.compile(r"((?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[0-9a-fA-F:]+\]))(?::(\d+))?")
LAUNCH_FLAGS = ("--hosts", "--nproc", "--retries", "--detach")
VALUES = {  # the launcher flags that take a value: its pattern and its description
    "--hosts": (".*[^, ].*", "machines, separated by commas, like node1,user@node2:2222"),
    "--nproc": (r"[1-9]\d*", "a number above 0"),
    "--retries": (r"\d+", "a number"),
    "--out": (".+", "a run folder"),
}
ADVICE = (  # what ssh or the host's shell says, and what to try then
    ("Permission denied", "{label}: {error}. It does not know your key: ssh-copy-id {target}"),
    (
        "verification failed",
        "{label}: {error} Its key is new or has changed. Look at it, and accept it: ssh {target} true",
    ),
    ("can't open file", "{label}: there is no {root}/launch/node.py; bash launch.sh sync --hosts {line}"),
    ("python3", "{label}: {error}. It needs python3: ssh {target} sudo apt install -y python3 python3-venv"),
    ("", "{label} does not answer: {error}. Try: ssh {target} true"),
)


@dataclass
class Host:
    """One line of `hosts`: a node of the job."""

    name: str  # localhost, host or user@host
    port: int = 0  # of ssh; 0 = ssh's own choice
    slots: int = 0  # ranks; 0 = one per GPU
    label: str = ""  # its name in messages and under logs/
    number: str = ""  # the label's end, for another node of one name: "-2" and so on
    session: str = ""
    address: str = ""  # as the other hosts reach it
    devices: list | None = None  # its share of the GPUs; None without GPUs
    ranks_here: int = 0  # ranks on its machine, including other nodes
    facts: dict = field(default_factory=dict)

    @property
    def local(self) -> bool:
        return self.name == "localhost"

    @property
    def line(self) -> str:
        """As it would stand in `hosts`, or after --hosts."""
        return self.name + (f":{self.port}" if self.port else "")

    @property
    def target(self) -> str:
        """As a person types it after ssh."""
        return f"-p {self.port} {self.name}" if self.port else self.name


class Unreachable(Exception):
    """The host did not answer; the message says in ssh's words why."""


class End(NamedTuple):
    """The end of an attempt or of the run."""

    state: str
    step: int
    message: str
    report: str = ""  # the report of a failure
    silent: tuple = ()  # the hosts that do not answer


def say(text: str, stream=None, end: str = "\n"):
    try:
        print(printable(text), file=stream or sys.stdout, end=end, flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os._exit(0)


def refuse(problems: list[str]) -> None:
    if problems:
        raise UserError("\n".join(problems))


# ---- arguments


def read_flags(words: list[str], *names: str, mixed: bool = False) -> tuple[dict[str, str], list[str]]:
    """Takes the launcher flags of these names out of the words: those before the first other word, or all of them if
    they may be mixed with others. -> (their values, empty where one was not given; the other words)"""
    flags, rest, words = dict.fromkeys(names, ""), [], list(words)
    while words and (mixed or not rest):
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name not in flags or (equals and name not in VALUES):
            rest.append(word)
            continue
        pattern, wanted = VALUES.get(name, ("", ""))
        if wanted and not equals:
            value = words.pop(0) if words else ""
        if not re.fullmatch(pattern, value, re.S):
            raise UserError(f"{name} takes {wanted}, not '{value}'")
        flags[name] = value or "yes"
    return flags, rest + words


def read_job(words: list[str], settings: dict) -> tuple[dict[str, str], list[Host], dict]:
    """What `train` and `doctor` are asked for -> (the launcher flags, the hosts, the job)."""
    flags, words = read_flags(words, *LAUNCH_FLAGS)
    for late in {word.partition("=")[0] for word in words} & {*LAUNCH_FLAGS}:
        raise UserError(f"{late} is the launcher's: give it before {words[0]}")
    hosts, patterns = read_hosts(flags["--hosts"]), settings["forward"].split()
    job = {**settings, "words": words or shlex.split(settings["default_args"])}
    job["env"] = {k: v for k, v in os.environ.items() if any(fnmatch.fnmatchcase(k, p) for p in patterns)}
    job["nproc"] = int(flags["--nproc"] or 0)
    job["retries"] = int(flags["--retries"] or settings["retries"] * (len(hosts) > 1))
    return flags, hosts, job


def parse_host(text: str, where: str) -> Host:
    name, *rest = text.split()
    match, slots = HOST.fullmatch(name), re.fullmatch(r"(?:slots=([1-9]\d*))?", " ".join(rest))
    if not match or not slots:
        wrong = " ".join(rest) if match else name
        form = "a line is host, user@host or host:port, then slots=N, with N above 0"
        raise UserError(f"{where}: '{wrong}' is no host; {form}")
    host = Host(re.sub(r"[][]", "", match[1]), int(match[2] or 0), int(slots[1] or 0))
    if host.port > 65535:
        raise UserError(f"{where}: {name}: there is no such port")
    if host.local and host.port:
        raise UserError(f"{where}: {name}: localhost is reached without ssh, it has no port")
    return host


def read_hosts(listed: str, path: Path | None = None) -> list[Host]:
    """The hosts after --hosts, else the lines of the file `hosts`, else this machine alone."""
    path, where = path or ROOT / "hosts", "hosts line {}"
    if listed:
        lines, where = listed.split(","), "--hosts"
    else:
        lines = path.read_text(encoding="utf-8-sig").splitlines() if path.exists() else ["localhost"]
    lines = [line.split("#")[0].strip() for line in lines]
    hosts = [parse_host(line, where.format(number)) for number, line in enumerate(lines, 1) if line]
    if not hosts:
        raise UserError("hosts names no machine; this one is called localhost")
    for i, host in enumerate(hosts):
        earlier = hosts[:i]
        if not host.local and host.line in [h.line for h in earlier]:
            raise UserError(f"{host.line} is listed twice; slots=N sets the number of its processes")
        name = platform.node() if host.local else host.line.split("@")[-1]
        label = re.sub(r"[^\w.-]", "-", name)
        while label + host.number in [h.label for h in earlier]:
            host.number = f"-{int(host.number[1:] or 1) + 1}"
        host.label = label + host.number
    return hosts


# ---- asking a host


def ssh_command(host: Host, options: str) -> list[str]:
    port = ["-p", str(host.port)] if host.port else []
    return ["ssh", *shlex.split(options), *port, "--", host.name]


def node_command(host: Host, job: dict, operation: str, interpreter: str = "python3") -> list[str]:
    """An operation of node.py on a host, which reads its request from stdin."""
    command = [interpreter, str(ROOT / "launch" / "node.py"), operation]
    if host.local:
        return [sys.executable, *command[1:]]
    return [*ssh_command(host, job["ssh"]), "exec " + shlex.join(command)]


def request(host: Host, job: dict, **more) -> bytes:
    return json.dumps({**vars(host), **job, **more}).encode() + b"\n"


def call(host: Host, job: dict, operation: str, patience: float, interpreter: str = "python3", **more) -> dict:
    """Has node.py on the host do something -> its answer. Raises Unreachable and Refused."""
    command = node_command(host, job, operation, interpreter)
    try:
        done = subprocess.run(
            command, cwd=ROOT, input=request(host, job, **more), capture_output=True, timeout=patience
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
    """A line on a host that did not do as asked, with what to try."""
    if isinstance(error, Refused):
        return f"{host.label}: {error}"
    advice = next(advice for pattern, advice in ADVICE if pattern in str(error))
    return advice.format(label=host.label, error=error, target=host.target, line=host.line, root=ROOT)


def explain_all(hosts: list[Host], answers: list) -> list[str]:
    return [explain(h, a) for h, a in zip(hosts, answers, strict=True) if isinstance(a, Exception)]


class Watcher(threading.Thread):
    """Keeps a connection to a host open, and the host's last answer to `watch`."""

    def __init__(self, host: Host, job: dict):
        super().__init__(daemon=True)
        self.host, self.job, self.last, self.heard, self.closed = host, job, {}, time.monotonic(), False
        self.start()

    def run(self):
        while not self.closed:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            with subprocess.Popen(node_command(self.host, self.job, "watch"), cwd=ROOT, **pipes) as process:
                with contextlib.suppress(OSError):
                    process.stdin.write(request(self.host, self.job))
                    process.stdin.flush()
                for line in process.stdout:
                    if line.startswith(b"{") and line.endswith(b"}\n"):
                        self.last, self.heard = json.loads(line), time.monotonic()
                    if self.closed:
                        break
                process.kill()
            time.sleep(2)


# ---- before a launch


def survey(hosts: list[Host], job: dict) -> None:
    """Looks at all hosts at once and settles their addresses, GPUs and ranks. Raises one UserError that tells all that
    is wrong."""
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
    for address, together in machines.items():
        names = sorted({h.line for h in together})
        if len(names) > 1:
            problems.append(f"{', '.join(names)} are the same machine ({address}); list it once")
        problems += share_machine(together, job["nproc"])
    without = ", ".join(h.label for h in hosts if not h.devices)
    if without and any(h.devices for h in hosts):
        advice = "take it out of hosts, or set CUDA_VISIBLE_DEVICES="
        problems.append(f"{without}: no GPU, while others have some; {advice}")
    refuse(problems)


def settle_addresses(hosts: list[Host]) -> None:
    """Sets the address by which others reach each host: the one at which its ssh connection came in. A name may mean
    another one, or on Debian 127.0.1.1."""
    for host in hosts:
        host.address = "127.0.0.1" if host.local else host.facts["connection"][2]
    away = next((h for h in hosts if not h.address.startswith("127.")), None)
    for host in hosts:
        if away and host.address.startswith("127."):  # this machine, as a host elsewhere sees it
            host.address = away.facts["connection"][0]


def share_machine(together: list[Host], nproc: int) -> list[str]:
    """Divides a machine's GPUs, or its cores, among its nodes -> problems."""
    visible, problems = together[0].facts["gpus"], []
    share, rest = divmod(len(visible), len(together))
    if visible and rest:
        return [f"{together[0].label}: {len(visible)} GPUs cannot be divided among {len(together)} nodes"]
    for i, host in enumerate(together):
        asked = f"--nproc {nproc}" if nproc else f"slots={host.slots}"
        host.slots = nproc or host.slots or share or 1
        if visible:
            host.devices = visible[i * share : i * share + share][: host.slots]
            if host.slots > share:
                problems.append(f"{host.label}: {asked}, but {share} visible GPUs for it; start one process per GPU")
    for host in together:
        host.ranks_here = sum(h.slots for h in together)
    return problems


def run_checks(hosts: list[Host], job: dict, total: int) -> list:
    """train.py's own check for a number of ranks, on some hosts -> how it ended on each."""
    return call_all(hosts, job, "run", 1800, command=[job["python"], "train.py", *job["words"], "--check", str(total)])


def check(host: Host, job: dict, total: int) -> bool:
    """Says what train.py's own check finds, and exits with its status where it refuses -> whether there is something
    left to train."""
    [done] = run_checks([host], job, total)
    refuse(explain_all([host], [done]))
    say(re.sub(r"^[a-z_]+=.*\n", "", done["out"], flags=re.M), end="")
    say(done["err"] if host.local else re.sub("^(?=.)", f"{host.label}: ", done["err"], flags=re.M), sys.stderr, end="")
    if done["exit"]:
        sys.exit(max(done["exit"], 1))
    return "state=finished\n" not in done["out"]


def supervisor_lock(out: Path) -> SoftFileLease:
    """Held by the run's supervisor, whose death frees it: at once here, after 30 s elsewhere."""
    return SoftFileLease(out / "logs" / "supervisor.lock", thread_local=False)


def is_supervised(out: Path) -> bool:
    """Whether a launcher, here or on another machine that sees this folder, looks after the run."""
    lock = supervisor_lock(out)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # a folder that we may not write to, or a full disk
        return lock.owner is not None
    lock.release()
    return False


def read_launch(out: Path) -> dict:
    return read_json(out / "logs" / "launch.json")


def full_disk(out: Path) -> str:
    """A sentence if the disk that a run folder is on has no room left for its logs."""
    try:
        disk = os.statvfs(out)
    except OSError:
        return ""
    free = disk.f_bavail * disk.f_frsize
    if free >= ROOM and (disk.f_favail or not disk.f_files):
        return ""
    left = f"{free} bytes" if free < ROOM else "no inodes"
    return f"the disk of {out} is full ({left} left): free some space there, and launch again"


def hosts_of(launch: dict) -> list[Host]:
    return [Host(**h) for h in launch.get("hosts", [])]


# ---- the supervisor


class Supervisor:
    """Runs the job, on all hosts or on none, to its end."""

    def __init__(self, job: dict, hosts: list[Host]):
        self.job, self.hosts, self.out = job, hosts, ROOT / job["out"]
        self.launch = {"out": job["out"], "mark": job["mark"], "ssh": job["ssh"], "hosts": [asdict(h) for h in hosts]}

    def save(self, words: str = "", **values) -> None:
        """Writes launch.json anew, and words to launch.log; on a full disk the next call tries again."""
        self.launch |= values
        with contextlib.suppress(OSError):
            write_whole(self.out / "logs" / "launch.json", json.dumps(self.launch, indent=1) + "\n")
            with open(self.out / "logs" / "launch.log", "a") as log:
                log.write(words)

    def stop_requested(self) -> bool:
        return (self.out / "logs" / "stop").exists() or STOP_REASON in self.status().get("message", "")

    def wait(self, seconds: float) -> None:
        end, stopped = time.monotonic() + seconds, self.stop_requested()
        while time.monotonic() < end and self.stop_requested() == stopped:
            time.sleep(LOOK)

    def ask(self, operation: str, patience: float = 20, **more) -> list:
        return call_all(self.hosts, self.job, operation, patience, **more)

    def run(self, answers: list) -> None:
        """answers: of `prepare`, on all hosts."""
        job, saved, tries, report = self.job, last_saved(self.out), 0, ""
        while True:
            end = self.attempt(answers)
            if end.state != "failed" or self.stop_requested():
                return self.end(end)
            newest = last_saved(self.out)
            if newest > saved:
                saved, tries, report = newest, 0, ""
            report = report or end.report
            if tries == job["retries"]:
                break
            pause = job["retry_pause"] * 2**tries
            tries += 1
            going_on = f"from step {newest}" if newest > 0 else "from the start"
            words = f"{end.report}\nRelaunching {going_on} in {pause} s: try {tries} of {job['retries']}\n"
            self.save(words, state="waiting", step=end.step, message=end.message)
            self.wait(pause)
            answers = self.prepare_again()
            if self.stop_requested():
                return self.end(End("stopped", end.step, "stopped between two tries"))
        if tries:
            report += f"\n{job['out']}: gave up after {tries} {'tries' if tries > 1 else 'try'} without progress"
        elif end.step:
            report += ". The same command resumes from the newest checkpoint" * bool(saved)
        if end.silent:
            report += "\n" + self.without(end.silent)
        return self.end(end._replace(report=report))

    def end(self, end: End) -> None:
        self.save(state=end.state, step=end.step, message=end.message, report=end.report)

    def prepare_again(self) -> list:
        """Prepares the hosts for another try; waits for hosts that do not answer."""
        end = time.monotonic() + self.job["host_wait"]
        while True:
            answers = self.ask("prepare", clear=True)
            away = any(isinstance(a, Unreachable) for a in answers)
            if not away or time.monotonic() > end or self.stop_requested():
                return answers
            self.wait(2)

    def without(self, silent: tuple) -> str:
        """The command that continues with the other hosts."""
        others = [h for h in self.hosts if h not in silent]
        sentence = f"{', '.join(h.label for h in silent)} did not come back"
        if not others:
            return sentence
        words = list(self.job["words"])
        defaults = {"--out": self.job["out"], "--batch_tokens": read_json(self.out / "flags.json").get("batch_tokens")}
        for flag, value in defaults.items():
            if flag not in words and value:
                words += [flag, str(value)]
        nproc = ["--nproc", str(others[0].slots)] if len({h.slots for h in others}) == 1 else []
        command = ["bash", "launch.sh", "--hosts", ",".join(h.line for h in others), *nproc, *words]
        return f"{sentence}. To continue from the newest checkpoint with the others:\n  {shlex.join(command)}"

    def attempt(self, answers: list) -> End:
        """One launch, on hosts that have answered `prepare`, to its end."""
        self.job["id"] = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
        previous = read_json(self.out / "status.json").get("attempt", "")
        self.save(id=self.job["id"], previous=previous, state="starting", attempt=self.launch.get("attempt", 0) + 1)
        if not explain_all(self.hosts, answers):
            address = self.hosts[0].address
            endpoint = f"[{address}]:{answers[0]['port']}" if ":" in address else f"{address}:{answers[0]['port']}"
            answers = self.ask("start", self.job["start_limit"] + 20, nodes=len(self.hosts), endpoint=endpoint)
        problems = explain_all(self.hosts, answers)
        if problems:
            self.ask("sweep")
            silent = [h for h, a in zip(self.hosts, answers, strict=True) if isinstance(a, Unreachable)]
            return End("failed", 0, problems[0], "\n".join(problems), tuple(silent))
        self.save(message="", place=min(a["place"] for a in answers), pid=answers[0]["pid"])
        return self.watch()

    def status(self) -> dict:
        """What rank 0 of this attempt has written."""
        status = read_json(self.out / "status.json")
        return status if status.get("attempt") == self.launch.get("id") else {}

    def watch(self) -> End:
        failing, silent, patience = 0.0, [], self.job["timeout"]
        watchers = [Watcher(h, self.job) for h in self.hosts]
        while not silent and not all(w.last.get("over") for w in watchers):
            time.sleep(LOOK)
            now, state = time.monotonic(), self.status().get("state")
            if state and self.launch["state"] == "starting":
                self.save(state="running")
            silent = [w for w in watchers if now - w.heard > patience + 3]
            failing = (failing or now) if any(w.last.get("hurt") for w in watchers) else 0.0
            if failing and now - failing > min(GRACE, patience) * (3 if state in ("finished", "stopped") else 1):
                break
        for w, answer in zip(watchers, self.ask("sweep"), strict=True):
            w.closed = True
            if w not in silent and isinstance(answer, Unreachable):
                silent.append(w)
            elif w not in silent and isinstance(answer, dict):
                w.last, w.heard = answer, time.monotonic()
        return self.judge(watchers, silent)

    def judge(self, watchers: list[Watcher], silent: list[Watcher]) -> End:
        """How an attempt ended, and why."""
        status, stopped, cause = self.status(), self.stop_requested(), first_cause(watchers, silent)
        state, step, message = status.get("state"), status.get("step") or 0, status.get("message") or ""
        if state in ("finished", "error") or (state == "stopped" and (stopped or cause["sure"] > TERMINATED)):
            return End(state, step, message)
        if not state and {w.last.get("result", {}).get("exit") for w in watchers} == {0}:
            return End("finished", 0, "")  # an earlier launch had done all
        if not state and cause.get("status") == 2:
            errors = re.findall(r"^error: (.*)", cause["tail"].rstrip(), re.M | re.S)
            return End("error", 0, errors[-1] if errors else cause["tail"].rstrip())
        if stopped and not state:
            return End("stopped", 0, "stopped before it had begun")
        if stopped and read(self.out / "logs" / "stop"):
            return End("stopped", step, "stopped at once, without saving")
        return self.failure(End(state, step, message), cause, silent)

    def failure(self, last: End, cause: dict, silent: list[Watcher]) -> End:
        """last: what rank 0 has written."""
        last_words = cause.get("tail", "").rstrip()
        what = "; ".join(filter(None, (cause["what"], full_disk(self.out))))
        report = f"---- the end of {cause['file']}\n{last_words}\n----\n" if last_words else ""
        if last.state == "failed" and cause["sure"] > KILLED and last.message not in report:
            report += last.message + "\n"
        report += f"{self.job['out']}: failed{at(last.step)}: {what}"
        return End("failed", last.step, what, report, tuple(w.host for w in silent))


def first_cause(watchers: list[Watcher], silent: list[Watcher]) -> dict:
    """The earliest of the surest causes that hosts report; silence is a cause, too: the surest."""
    causes = []
    if silent:
        since, names = min(w.heard for w in silent), ", ".join(w.host.label for w in silent)
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - since)))
        what = f"{names} {'has' if len(silent) == 1 else 'have'} not answered since {clock}"
        causes.append((since, {"sure": KILLED, "what": what}))
    for w in watchers:
        result = w.last.get("result", {})
        if w not in silent and result.get("cause"):
            causes.append((w.heard - result["ago"], result["cause"]))
    nothing = {"sure": WAITED, "what": "it ended, and no host can say why"}
    return min(causes, key=lambda cause: (cause[1]["sure"], cause[0]), default=(0, nothing))[1]


def last_saved(out: Path) -> int:
    """The step of a run's newest checkpoint; 0 if there is none."""
    steps = out.glob(f"checkpoints/step-{'[0-9]' * 8}/manifest.json")
    return max((int(path.parent.name[5:]) for path in steps), default=0)


def at(step: int) -> str:
    return f" at step {step}" if step else ""


# ---- following a run


class Follower:
    """Shows new lines of log.txt and launch.log, or of the output of one host or rank; first the last `lines` lines."""

    def __init__(self, out: Path, name: str, lines: int = 0, which: str = ""):
        self.out, self.name, self.which, self.shown, self.last = out, name, which, "", None
        self.offsets = {path: path.stat().st_size - len(tail(path, lines).encode()) for path in self.files()}

    def files(self) -> list[Path]:
        """Those that exist."""
        if self.which:
            return host_files(self.out, self.name, self.which)
        return [p for p in (self.out / "log.txt", self.out / "logs/launch.log") if p.exists()]

    def show_new(self) -> None:
        for path in self.files():
            with open(path, "rb") as file:
                file.seek(self.offsets.get(path, 0))
                text = file.read().decode(errors="replace")
                self.offsets[path] = file.tell()
            if not text:
                continue
            self.shown += text
            stream = sys.stderr if path.name == "launch.log" else sys.stdout
            if self.which and path != self.last:
                say(f"==> {path.relative_to(self.out)} <==", stream)
            self.last = path
            if stream.isatty():
                text = re.sub(r"^[\d-]{10} [\d:]{8} [A-Z] \[[^\]]*\] ", "", text, flags=re.M)
            say(text, stream, end="")

    def to_the_end(self) -> int:
        """Follows until the run is over -> the exit status."""
        told = ""
        while True:
            full = full_disk(self.out)
            if full != told:
                say(full, sys.stderr)
            told, end = full, state_of(self.out)
            self.show_new()
            if end.state in ENDED:
                return self.conclude(end)
            time.sleep(LOOK)

    def conclude(self, end: End) -> int:
        text = {"failed": f"{self.name}: failed{at(end.step)}: {end.message}", "error": f"error: {end.message}"}
        text = end.report or text.get(end.state, end.message)
        if text and text.removeprefix("error: ") not in self.shown:
            say(text, sys.stderr)
        if end.state in ("finished", "stopped"):
            say(f"{self.name}: {end.state}{at(end.step)}")
        return {"failed": 1, "error": 2}.get(end.state, 0)


def is_locked(out: Path) -> bool:
    """Whether a job holds the run folder, as far as this machine can tell."""
    owner = SoftFileLease(out / "lock").owner
    here = owner is not None and owner.hostname.partition("?")[0] == platform.node()
    return owner is not None and not (here and not Path(f"/proc/{owner.pid}").exists())


def state_of(out: Path) -> End:
    """The state of a run, started by a launcher, train.sbatch or the user's own torchrun. A status of another attempt
    is older than the launch if the launch found it, else newer."""
    supervised = is_supervised(out)  # first: a supervisor's last act is launch.json
    launch, status = read_launch(out), read_json(out / "status.json")
    state, step, message = status.get("state", ""), status.get("step") or 0, status.get("message", "")
    launched = bool(launch) and status.get("attempt", "") in (launch.get("id"), launch.get("previous"), "")
    if supervised or (launched and launch.get("state") in ENDED):
        step, message = step or launch.get("step", 0), launch.get("message") or message
        return End(launch.get("state", "starting"), step, message, launch.get("report", ""))
    if state in ENDED:
        return End(state, step, message)
    if is_locked(out):
        return End("running, but its launcher is gone: nobody would relaunch it" if launched else state, step, message)
    dead = "dead: it ended without a message" if status or launch else "it never began"
    return End("failed", step, full_disk(out) or dead)


# ---- the verbs


def pick_run(verb: str, words: list[str], *names: str, others: int = 0) -> tuple[Path, str, dict, list[str]]:
    """The run of --out DIR; without it the run that was last launched or last wrote its status.
    -> (folder, its name as typed, the flags, the other words)"""
    flags, rest = read_flags(words, "--out", *names, mixed=True)
    if len(rest) > others or any(word.startswith("-") for word in rest):
        takes = ["--out DIR", *names, *["a host or a rank"] * others]
        raise UserError(f"{verb} takes {', '.join(takes)}, not {' '.join(rest)}")
    runs, name = sorted((ROOT / "runs").glob("*/")), flags["--out"]
    if not name and not runs:
        raise UserError("There is no run in runs/ yet. Start one: bash launch.sh")
    name = name or str(max(runs, key=last_used).relative_to(ROOT))
    if not (ROOT / name).is_dir():
        problem = "is a file, not a run folder" if (ROOT / name).exists() else "there is no such run folder"
        raise UserError(f"--out {name}: {problem}. In runs/: {', '.join(r.name for r in runs) or 'nothing'}")
    return ROOT / name, name.rstrip("/"), flags, rest


def last_used(run: Path) -> float:
    return max(read_launch(run).get("launched", 0.0), read_json(run / "status.json").get("time", 0.0))


def hints(name: str) -> str:
    run = shlex.quote(name)
    return f"Watch it: bash launch.sh logs --out {run}   Stop it: bash launch.sh stop --out {run}"


def on_interrupt(farewell: str) -> None:
    """From now on Ctrl-C and the like end this process with a farewell, and nothing else."""

    def leave(*_) -> None:
        say(f"\n{farewell}")
        os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def verb_train(words: list[str], settings: dict) -> int:
    flags, hosts, job = read_job(words, settings)
    config = parse_args(job["words"], trains=True)
    survey(hosts, job)
    total, name, out = sum(h.slots for h in hosts), config.out, ROOT / config.out
    alone = total == 1 and config.check < 0  # then the run's own checks answer, which come at once
    if not alone and (not check(hosts[0], job, total) or config.check >= 0):
        return 0
    new_folders = missing_folders(out)
    job |= {"out": name, "timeout": float(config.timeout), "mark": secrets.token_hex(8), "first": hosts[0].label}
    follower, launch = start(hosts, job)
    logs = out / "logs" / job["first"] / launch["id"]
    if alone and launch["state"] in ("running", "finished"):
        follower.shown = read(logs / "agent.stderr.log")
        say(follower.shown, sys.stderr, end="")
    if launch["state"] == "finished" and not launch["step"]:  # it was finished before
        say(read(logs / "agent.stdout.log"), end="")
        return 0
    if launch["state"] == "running":
        say_started(name, launch)
        if flags["--detach"] or (len(hosts) > 1 and not sys.stdout.isatty()):
            say(hints(name))
            return 0
    status = follower.to_the_end()
    if status == 2 and new_folders and not read(out / "metrics.jsonl"):  # a mistake leaves nothing behind
        shutil.rmtree(out)
        remove_empty(new_folders[1:])
    return status


def start(hosts: list[Host], job: dict) -> tuple[Follower, dict]:
    """Leaves a supervisor behind, and waits until the run runs or ends -> launch.json."""
    out = ROOT / job["out"]
    for host in hosts:
        host.session = re.sub(r"[^\w-]", "_", f"flatland-{out.name}{host.number.replace('-', '_')}", flags=re.A)
    claim(out, job)
    answers = call_all(hosts, job, "prepare", 30, clear=False)
    problems = explain_all(hosts, answers)
    refuse(problems + [hints(job["out"])] * ("already" in str(problems)))
    follower, supervisor = Follower(out, job["out"]), Supervisor(job, hosts)
    supervisor.save(id=job["mark"], state="starting", launched=time.time())
    pid = leave_behind(supervisor, answers)
    on_interrupt(f"{job['out']} continues. {hints(job['out'])}")
    while (launch := read_launch(out))["state"] == "starting" and os.waitpid(pid, os.WNOHANG) == (0, 0):
        time.sleep(0.1)
    return follower, launch


def say_started(name: str, launch: dict) -> None:
    hosts = hosts_of(launch)
    where = f" on {len(hosts)} hosts" if len(hosts) > 1 else f", process {launch['pid']}"
    say(f"Started {name}: {launch['place']}{where}; log in {name}/log.txt")


def claim(out: Path, job: dict) -> None:
    """Leaves a mark in launch.json: a host that reads it sees the same folder."""
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        if is_supervised(out):
            raise UserError(f"{job['out']} is being trained already. {hints(job['out'])}")
        write_whole(out / "logs" / "launch.json", json.dumps(read_launch(out) | {"mark": job["mark"]}))
        (out / "logs" / "stop").unlink(missing_ok=True)
    except OSError as e:
        raise UserError(f"--out {job['out']}: {e}") from None


def leave_behind(supervisor: Supervisor, answers: list) -> int:
    """Starts the supervisor as a separate process -> its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    log = os.open(supervisor.out / "logs" / "supervisor.stderr.log", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in range(3):
        os.dup2(log, stream)
    try:
        with supervisor_lock(supervisor.out).acquire(timeout=60):
            supervisor.run(answers)
    except Exception as e:
        supervisor.save(state="failed", message=f"the launcher failed: {type(e).__name__}: {e}", report="")
        raise
    os._exit(0)


def verb_logs(words: list[str], settings: dict) -> int:
    out, name, _, which = pick_run("logs", words, others=1)
    on_interrupt(f"{name} continues. {hints(name)}")
    follower = Follower(out, name, 20 if which else 50, *which)
    if which and not any(path.stat().st_size for path in follower.files()):
        say(f"{which[0]} has printed nothing yet")
    return follower.to_the_end()


def find_host(launch: dict, label: str, problem: str) -> Host:
    for host in hosts_of(launch):
        if label in (host.label, host.line):
            return host
    raise UserError(f"{problem} '{label}'; hosts: {', '.join(h.label for h in hosts_of(launch)) or 'none'}")


def ranks_of(out: Path, launch: dict) -> dict:
    """rank -> [host's label, local rank], as the agents have written."""
    places = {}
    for path in out.glob(f"logs/*/{launch.get('id')}/agent.json"):
        places |= {rank: [path.parts[-3], local] for rank, local in read_json(path).get("ranks", {}).items()}
    return places


def host_files(out: Path, name: str, which: str) -> list[Path]:
    """The output files of one host, or of one rank, in the newest attempt."""
    launch = read_launch(out)
    processes, ranks = sum(h.slots for h in hosts_of(launch)), ranks_of(out, launch)
    if which not in ranks and which.isdigit() and int(which) < processes:  # it has not started yet
        return []
    label, local_rank = ranks.get(which, (which, "*"))
    host = find_host(launch, label, f"logs: {name} has ranks 0 to {processes - 1} and no host or rank")
    folder = out / "logs" / host.label / launch["id"]
    agent = [] if which in ranks and processes > 1 else folder.glob("agent.*.log")
    return sorted([*folder.glob(f"*/attempt_*/{local_rank}/*.log"), *agent])


def verb_status(words: list[str], settings: dict) -> None:
    show_status(*pick_run("status", words)[:2])


def verb_top(words: list[str], settings: dict) -> NoReturn:
    """The table of status again and again, until Ctrl-C."""
    out, name, *_ = pick_run("top", words)
    on_interrupt("")
    while True:
        say("\033[H\033[J" * sys.stdout.isatty() + time.strftime("%H:%M:%S"))
        show_status(out, name)
        time.sleep(2)


def show_status(out: Path, name: str) -> None:
    launch, log, end = read_launch(out), out / "log.txt", state_of(out)
    batches = re.findall(r"Batch \d+ Loss.*", tail(log, 200))
    rows = {
        "run": name,
        "state": end.state,
        "step": end.step or "",
        "message": end.message.partition("\n")[0],
        "disk": full_disk(out) or f"{shutil.disk_usage(out).free / 1e9:.1f} GB free",
        "attempt": launch.get("attempt", ""),
        "place": launch.get("place", ""),
        "last line": ago(time.time() - log.stat().st_mtime) if log.exists() else "",
        "last batch": batches[-1] if batches else "",
    }
    say(columns([[key, str(value)] for key, value in rows.items()]))
    if hosts := hosts_of(launch):
        table = map(host_row, hosts, call_all(hosts, launch, "look", 20, gpus=True))
        say(columns([("host", "session", "agent", "ranks", "GPU load", "GPU memory", "last output"), *table]))


def columns(rows: list) -> str:
    """Rows of words, each column as wide as its longest word; the last word of a row may be longer."""
    widths = [max(map(len, column)) + 2 for column in zip_longest(*(row[:-1] for row in rows), fillvalue="")] + [0]
    return "\n".join("".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def ago(seconds: float) -> str:
    return f"{max(0, seconds):.0f} s ago"


def host_row(host: Host, answer: dict | Exception) -> tuple:
    """A host's line in the table of `status`."""
    if isinstance(answer, Exception):
        return host.label, host.session, explain(host, answer)
    status, gpus = answer["result"].get("exit"), [list(map(float, gpu.split(","))) for gpu in answer["gpus"]]
    agent = "alive" if answer["agent"] else f"ended {status}" if status is not None else "gone"
    load = f"{sum(gpu[0] for gpu in gpus) / len(gpus):.0f} %" if gpus else ""
    memory = "{:.0f} of {:.0f} GiB".format(*(sum(gpu[i] for gpu in gpus) / 1024 for i in (1, 2))) if gpus else ""
    written = "none" if answer["age"] is None else ago(answer["age"])
    return host.label, host.session, agent, f"{answer['workers']} of {host.slots}", load, memory, written


def verb_stop(words: list[str], settings: dict) -> int:
    out, name, flags, _ = pick_run("stop", words, "--now")
    launch, end, request_file = read_launch(out), state_of(out), out / "logs" / "stop"
    if end.state in ENDED:
        say(f"{name} is not running: {end.state}")
        return 0
    now = bool(flags["--now"]) or request_file.exists()
    how = " at once, without saving" if now else ": it ends its step and saves. The same once more stops it at once."
    say(f"Stopping {name}{how}")
    follower = Follower(out, name)
    on_interrupt(f"{name} is still stopping. {hints(name)}")
    with contextlib.suppress(OSError):  # a full disk takes no text; the processes are killed below
        request_file.parent.mkdir(exist_ok=True)
        request_file.write_text("now" * now)
    if now:
        patience = time.monotonic() + NOW
        while time.monotonic() < patience and state_of(out).state not in ENDED:
            time.sleep(LOOK)
        call_all(hosts_of(launch), launch, "sweep", 20)
    return follower.to_the_end()


def verb_attach(words: list[str], settings: dict) -> NoReturn:
    out, name, _, labels = pick_run("attach", words, others=1)
    launch, state = read_launch(out), state_of(out).state
    labels += [*ranks_of(out, launch).get("0", []), *(h.label for h in hosts_of(launch)), ""]
    host = find_host(launch, labels[0], f"attach: {name} has no host")
    if state in ENDED or "tmux" not in launch.get("place", "tmux"):
        why = f"is not running: {state}" if state in ENDED else "runs without tmux"
        raise UserError(f"{name} {why}; see its log: bash launch.sh logs --out {shlex.quote(name)}")
    command = ["tmux", "attach", "-t", f"={host.session}"]
    if not host.local:
        command = [*ssh_command(host, f"-t {launch['ssh']}"), shlex.join(command)]
    os.execvp(command[0], command)


def run_verb(**verbs) -> NoReturn:
    """What launch.sh calls: NAME=SETTING ... -- VERB WORDS -> a function of these, and its exit status."""

    def main(argv):
        split = argv.index("--")
        settings = dict(word.split("=", 1) for word in argv[:split])
        numbers = {name: int(value) for name, value in settings.items() if value.isdigit()}
        return verbs[argv[split + 1]](argv[split + 2 :], settings | numbers)

    run_script(main)


if __name__ == "__main__":
    run_verb(
        train=verb_train,
        logs=verb_logs,
        status=verb_status,
        stop=verb_stop,
        top=verb_top,
        attach=verb_attach,
    )
