"""The launcher's part on the machine where `bash launch.sh` is typed: which hosts, whether all are fit, starting them
together, watching them to the end, starting them again.

launch.sh calls its verbs. What has to be done on a host is in node.py. `train` checks all hosts, then leaves a
supervisor behind, a process of its own, and follows the run's log. The supervisor starts one agent on every host and
watches them through one ssh connection each; it decides when the job has failed, ends it everywhere, and relaunches it
from the newest checkpoint under a new rendezvous id. It writes `runs/NAME/logs/launch.json` (hosts, state, attempt) and
`launch.log` (what happened), and holds the lock `launch.lock` as long as it lives; every other verb reads these. A
`localhost` line is a node on this machine: the same, without ssh.

Why the job is relaunched as a whole: an elastic torchrun regroups reliably only in the easy cases."""

import contextlib
import fcntl
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
from pathlib import Path
from typing import NamedTuple, NoReturn

sys.path.insert(1, str(Path(__file__).parents[1]))
from errors import ROOT, UserError, printable, run_script
from node import FULL_DISK, KILLED, TERMINATED, WAITED, Refused, content_hash, last_line, read_json, tail, write_whole

GRACE = 20  # seconds that the others have to end by themselves once a part of the job is gone
LOOK = 0.5  # seconds between two looks
ENDED = ("finished", "stopped", "error", "failed")
ROOM = 2**20  # free bytes below which a disk counts as full
HOST = re.compile(r"((?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[0-9a-fA-F:]+\]))(?::(\d+))?")
LAUNCH_FLAGS = ("--hosts", "--nproc", "--retries", "--detach")
VALUES = {  # the launcher flags that take a value: its pattern, and what it is
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
    slots: int = 0  # processes; 0 = one per GPU
    label: str = ""  # its name in messages and under logs/
    session: str = ""
    address: str = ""  # as the other hosts reach it
    devices: list | None = None  # its share of the GPUs, where there are some
    processes_here: int = 0  # on its machine, those of other nodes included
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
    """How an attempt, or the run, has ended."""

    state: str
    step: int
    message: str
    report: str = ""  # what is shown of a failure
    silent: tuple = ()  # the hosts that do not answer


def say(text: str, stream=None, end: str = "\n"):
    print(printable(text), file=stream or sys.stdout, end=end, flush=True)


def refuse(problems: list[str]) -> None:
    if problems:
        raise UserError("\n".join(problems))


# ---- what was typed


def read_flags(words: list[str], *names: str, mixed: bool = False) -> tuple[dict[str, str], list[str]]:
    """Takes the launcher flags of these names out of the words: those before the first other word, or all of them if
    they may be mixed with others. -> (their values, empty where one was not given; the other words)"""
    flags, rest, words = dict.fromkeys(names, ""), [], list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name not in flags or (equals and name not in VALUES):
            rest.append(word)
            if not mixed:
                break
        elif name in VALUES:
            pattern, wanted = VALUES[name]
            if not equals and words:
                value = words.pop(0)
            if not re.fullmatch(pattern, value, re.S):
                raise UserError(f"{name} takes {wanted}, not '{value}'")
            flags[name] = value
        else:
            flags[name] = "yes"
    return flags, rest + words


def parse_host(text: str, where: str) -> Host:
    name, *rest = text.split()
    found, slots = HOST.fullmatch(name), re.fullmatch(r"(?:slots=([1-9]\d*))?", " ".join(rest))
    if not found or not slots:
        wrong = " ".join(rest) if found else name
        form = "a line is host, user@host or host:port, then slots=N, with N above 0"
        raise UserError(f"{where}: '{wrong}' is no host; {form}")
    host = Host(re.sub(r"[][]", "", found[1]), int(found[2] or 0), int(slots[1] or 0))
    if host.port > 65535:
        raise UserError(f"{where}: {name}: there is no such port")
    if host.local and host.port:
        raise UserError(f"{where}: {name}: localhost is reached without ssh, it has no port")
    return host


def read_hosts(listed: str, path: Path | None = None) -> list[Host]:
    """The hosts after --hosts, else those of the file `hosts`, or another, else this machine alone."""
    path, where = path or ROOT / "hosts", "hosts line {}"
    if listed:
        lines, where = listed.split(","), "--hosts"
    else:
        lines = path.read_text(encoding="utf-8-sig").splitlines() if path.exists() else ["localhost"]
    lines = [line.split("#")[0].strip() for line in lines]
    hosts = [parse_host(line, where.format(number)) for number, line in enumerate(lines, 1) if line]
    if not hosts:
        raise UserError("hosts names no machine; this one is called localhost")
    labels, seen = set(), set()
    for host in hosts:
        if host.line in seen and not host.local:
            raise UserError(f"{host.line} is listed twice; slots=N sets the number of its processes")
        name = platform.node() if host.local else host.line.split("@")[-1]
        label, n = re.sub(r"[^\w.-]", "-", name), 1
        host.label = label
        while host.label in labels:
            n += 1
            host.label = f"{label}-{n}"
        labels.add(host.label)
        seen.add(host.line)
    return hosts


# ---- asking a host


def ssh_command(host: Host, options: str) -> list[str]:
    port = ["-p", str(host.port)] if host.port else []
    return ["ssh", *shlex.split(options), *port, "--", host.name]


def connect(host: Host, ssh: str, operation: str, interpreter: str = "python3", **request) -> subprocess.Popen:
    """Starts an operation of node.py on a host, and tells it the request and what is known of the host."""
    command = [interpreter, str(ROOT / "launch" / "node.py"), operation]
    if host.local:
        command[0] = sys.executable
    else:
        command = [*ssh_command(host, ssh), "exec " + shlex.join(command)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT, bufsize=0)
    with contextlib.suppress(OSError):  # it has ended already, and its stderr tells why
        process.stdin.write(json.dumps({**vars(host), **request}).encode() + b"\n")
    return process


def call(host: Host, ssh: str, operation: str, patience: float, **request) -> dict:
    """Has node.py on the host do something -> its answer. Raises Unreachable and Refused."""
    process = connect(host, ssh, operation, **request)
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Unreachable(f"no answer in {patience:.0f} s") from None
    answers = [line for line in out.splitlines() if line.startswith(b"{")]  # the others are a .bashrc's
    if not answers:
        error = last_line(err.decode(errors="replace"))
        raise Unreachable(error or f"status {process.returncode} without an answer")
    answer = json.loads(answers[-1])
    if "refused" in answer:
        raise Refused(answer["refused"])
    return answer


def call_all(hosts: list[Host], ssh: str, operation: str, patience: float, **request) -> list:
    """call() on all hosts at once -> an answer or an exception from each."""

    def one(host: Host):
        try:
            return call(host, ssh, operation, patience, **request)
        except (Unreachable, Refused) as e:
            return e

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(one, hosts))


def explain(host: Host, error: Exception) -> str:
    """A line on a host that did not do as asked, with what to try."""
    if isinstance(error, Refused):
        return f"{host.label}: {error}"
    advice = next(advice for pattern, advice in ADVICE if pattern in str(error))
    return advice.format(label=host.label, error=error, target=host.target, line=host.line, root=ROOT)


def explain_all(hosts: list[Host], answers: list) -> list[str]:
    return [explain(h, a) for h, a in zip(hosts, answers, strict=True) if isinstance(a, Exception)]


class Watcher(threading.Thread):
    """Keeps a connection to a host open, and its last answer to an operation that answers again and again."""

    def __init__(self, host: Host, ssh: str, operation: str, **request):
        super().__init__(daemon=True)
        self.host, self.ask = host, lambda: connect(host, ssh, operation, **request)
        self.last, self.heard, self.error, self.closed = {}, time.monotonic(), "", False
        self.start()

    def run(self):
        while not self.closed:
            process = self.ask()
            for line in process.stdout:
                if self.closed:
                    break
                if line.startswith(b"{") and line.endswith(b"}\n"):
                    self.last, self.heard = json.loads(line), time.monotonic()
            process.kill()
            self.error = last_line(process.stderr.read().decode(errors="replace")) or "the connection ended"
            process.wait()
            time.sleep(2)


# ---- before a launch


def forwarded(patterns: str) -> dict:
    """The variables of this shell that the hosts get."""
    return {k: v for k, v in os.environ.items() if any(fnmatch.fnmatchcase(k, p) for p in patterns.split())}


def survey(hosts: list[Host], job: dict) -> None:
    """Looks at all hosts at once and settles their addresses, GPUs and processes. Raises one UserError that tells all
    that is wrong."""
    answers = call_all(hosts, job["ssh"], "probe", 60, python=job["python"], env=job["env"])
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
        out_of_hosts = "take it out of hosts, or set CUDA_VISIBLE_DEVICES="
        problems.append(f"{without}: no GPU, while others have some; {out_of_hosts}")
    refuse(problems)


def settle_addresses(hosts: list[Host]) -> None:
    """What the other hosts can reach each one by: the address that its ssh connection came in at. A name may mean
    another one, or on Debian 127.0.1.1."""
    for host in hosts:
        host.address = "127.0.0.1" if host.local else host.facts["connection"][2]
    away = next((h for h in hosts if not h.address.startswith("127.")), None)
    for host in hosts:
        if away and host.address.startswith("127."):  # this machine, as a host elsewhere sees it
            host.address = away.facts["connection"][0]


def share_machine(together: list[Host], nproc: int) -> list[str]:
    """Divides a machine's GPUs, or its cores, among its nodes -> what is wrong with that."""
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
        host.processes_here = sum(h.slots for h in together)
    return problems


def run_check(host: Host, job: dict, total: int) -> dict:
    """train.py's own check, on a host -> its end."""
    command = [job["python"], "train.py", *job["words"], "--check", str(total)]
    env = {**job["env"], "LOCAL_WORLD_SIZE": str(host.slots)}
    return call(host, job["ssh"], "run", 1830, env=env, command=command, limit=1800)


def check(host: Host, job: dict, total: int) -> dict:
    """What train.py's own check answers; exits with its status where it refuses."""
    try:
        done = run_check(host, job, total)
    except (Unreachable, Refused) as e:
        raise UserError(explain(host, e)) from None
    answer = re.compile(r"^([a-z_]+)=(.*)\n", re.M)
    where = "" if host.local else f"{host.label}: "
    for text, prefix, stream in ((answer.sub("", done["out"]), "", sys.stdout), (done["err"], where, sys.stderr)):
        for line in text.splitlines():
            say(prefix + line, stream)
    if done["exit"]:
        sys.exit(max(done["exit"], 1))
    return dict(answer.findall(done["out"]))


def is_supervised(out: Path) -> bool:
    """Whether a launcher, here or on another machine that sees this folder, looks after the run."""
    if not (out / "logs" / "launch.lock").exists():
        return False
    lock = take_lock(out)
    if lock is None:
        return True
    os.utime(lock)  # by the clock of the folder's disk, which is set as it may be
    now, launch = os.fstat(lock).st_mtime, read_launch(out)
    os.close(lock)
    try:
        fresh = abs(now - (out / "logs" / "launch.json").stat().st_mtime) < 30
    except OSError:
        return False
    return fresh and launch.get("state") not in ENDED and launch.get("machine") != platform.node()


def take_lock(out: Path) -> int | None:
    """An open, locked descriptor; None: somebody else holds it."""
    lock = os.open(out / "logs" / "launch.lock", os.O_RDWR | os.O_CREAT, 0o644)
    for _ in range(5):  # others take it for a moment, to look whether it is taken
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # a file system without locks: what launch.json says must do
            return lock
    os.close(lock)
    return None


def written(path: Path, content: dict) -> bool:
    """Whether the disk took it."""
    try:
        write_whole(path, json.dumps(content, indent=1) + "\n")
        return True
    except OSError:
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

    def __init__(self, job: dict):
        self.job, self.hosts, self.out = job, hosts_of(job), ROOT / job["out"]
        self.launch = read_launch(self.out)
        self.saved, self.words = 0.0, ""

    def stopping(self) -> tuple:
        """What `launch.sh stop` has asked for."""
        return tuple(name for name in ("stop", "stop-now") if (self.out / "logs" / name).exists())

    def say(self, text):
        self.words += text.rstrip("\n") + "\n"
        self.save()

    def set(self, **values):
        self.launch.update(values)
        self.save()

    def save(self) -> bool:
        """Writes launch.json anew, and to launch.log what is new. -> whether the disk had room; else the next call
        tries again."""
        self.saved = time.monotonic()
        try:
            with open(self.out / "logs" / "launch.log", "a") as log:
                log.write(self.words)
            self.words = ""
        except OSError:
            return False
        return written(self.out / "logs" / "launch.json", self.launch)

    def wait(self, seconds):
        """Others see by the age of launch.json that this process is alive."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stopping():
            if time.monotonic() - self.saved > 5:
                self.save()
            time.sleep(LOOK)

    def ask(self, operation: str, patience: float, **request) -> list:
        common = {"out": self.job["out"], "id": self.launch["id"]}
        return call_all(self.hosts, self.job["ssh"], operation, patience, **common, **request)

    def run(self) -> None:
        job, saved, tries, report = self.job, self.job["saved"], 0, ""
        while True:
            end = self.attempt()
            if end.state != "failed" or self.stopping():
                return self.end(end)
            answers = self.prepare()  # ends what is left of it
            newest = max((a["saved"] for a in answers if isinstance(a, dict)), default=saved)
            if newest > saved:
                saved, tries, report = newest, 0, ""
            report = report or end.report
            if tries == job["retries"]:
                break
            pause = job["retry_pause"] * 2**tries
            tries += 1
            going_on = f"from step {newest}" if newest > 0 else "from the start"
            self.say(f"{end.report}\nRelaunching {going_on} in {pause} s: try {tries} of {job['retries']}")
            self.set(state="waiting", step=end.step, message=end.message)
            self.wait(pause)
            self.wait_for_hosts()
            if self.stopping():
                return self.end(End("stopped", end.step, "stopped between two tries"))
        if tries:
            report += f"\n{job['out']}: gave up after {tries} {'tries' if tries > 1 else 'try'} without progress"
        if end.silent:
            report += "\n" + self.without(end.silent)
        return self.end(end._replace(report=report))

    def end(self, end: End):
        """The last words; also in status.json, where rank 0 was killed before it could write its own, or where others
        took its end for a failure."""
        self.launch |= {"state": end.state, "step": end.step, "message": end.message, "report": end.report}
        last = time.monotonic() + FULL_DISK
        while not (self.save() and self.correct_status(end)) and time.monotonic() < last:
            time.sleep(LOOK)

    def correct_status(self, end: End) -> bool:
        status = read_json(self.out / "status.json")
        if status.get("state") == "running" or "stop-now" in self.stopping():
            status |= {"state": end.state, "exit_code": 1, "message": end.message}
            return written(self.out / "status.json", status)
        return True

    def prepare(self) -> list:
        return self.ask("prepare", 20, clear=self.launch.get("attempt", 0) > 0, port=self.job["port"])

    def wait_for_hosts(self) -> None:
        end = time.monotonic() + self.job["host_wait"]
        while time.monotonic() < end and not self.stopping():
            if not any(isinstance(a, Unreachable) for a in self.prepare()):
                return
            self.wait(2)

    def without(self, silent: tuple) -> str:
        """The command that goes on with the other hosts."""
        words, others = list(self.job["words"]), [h for h in self.hosts if h not in silent]
        sentence = f"{', '.join(h.label for h in silent)} did not come back"
        if not others:
            return sentence
        defaults = {"--out": self.job["out"], "--batch_tokens": read_json(self.out / "flags.json").get("batch_tokens")}
        for flag, value in defaults.items():
            if flag not in words and value:
                words += [flag, str(value)]
        nproc = ["--nproc", str(others[0].slots)] if len({h.slots for h in others}) == 1 else []
        hosts = ",".join(h.line for h in others)
        command = shlex.join(["bash", "launch.sh", "--hosts", hosts, *nproc, *words])
        return f"{sentence}. To go on, from the newest checkpoint, with the others:\n  {command}"

    def attempt(self) -> End:
        """One launch, to its end."""
        job, first = self.job, self.hosts[0]
        self.set(id=time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2), state="starting")
        answers = self.prepare()
        if not explain_all(self.hosts, answers):
            port = answers[0]["port"]
            if not port:
                text = port_taken(first, job)
                return End("failed", 0, text, text)
            self.set(attempt=self.launch.get("attempt", 0) + 1)
            address = f"[{first.address}]" if ":" in first.address else first.address
            request = {"nodes": len(self.hosts), "first": first.label, "endpoint": f"{address}:{port}"}
            answers = self.ask("start", job["start_limit"] + 20, job=job, **request)
        problems = explain_all(self.hosts, answers)
        if problems:
            self.ask("sweep", 20)
            silent = [h for h, a in zip(self.hosts, answers, strict=True) if isinstance(a, Unreachable)]
            return End("failed", 0, problems[0], "\n".join(problems), tuple(silent))
        self.set(state="running", message="", place=min(a["place"] for a in answers), pid=answers[0]["pid"])
        return self.watch()

    def status(self) -> dict:
        """What rank 0 of this attempt has written."""
        status = read_json(self.out / "status.json")
        return status if status.get("attempt") == self.launch["id"] else {}

    def watch(self) -> End:
        job, told, failing, silent = self.job, (), 0.0, []
        request = {"out": job["out"], "id": self.launch["id"]}
        watchers = [Watcher(h, job["ssh"], "watch", **request) for h in self.hosts]
        while not silent and not all(w.last.get("over") for w in watchers):
            self.wait(LOOK)
            if self.stopping() != told:
                told = self.stopping()
                threading.Thread(target=self.ask, args=("stop", 20), kwargs={"now": "stop-now" in told}).start()
            now, state = time.monotonic(), self.status().get("state")
            silent = [w for w in watchers if now - w.heard > job["timeout"] + 3]
            failing = (failing or now) if any(w.last.get("hurt") for w in watchers) else 0.0
            grace = min(GRACE, job["timeout"]) * (3 if state in ("finished", "stopped") else 1)
            if failing and now - failing > grace:
                break
        for w, answer in zip(watchers, self.ask("sweep", 20), strict=True):
            w.closed = True
            if w not in silent and isinstance(answer, Unreachable):
                silent.append(w)
            elif w not in silent and isinstance(answer, dict):
                w.last, w.heard = answer, time.monotonic()
        return self.judge(watchers, silent)

    def judge(self, watchers: list[Watcher], silent: list[Watcher]) -> End:
        """How an attempt ended, and why."""
        status, asked, cause = self.status(), self.stopping(), first_cause(watchers, silent)
        state, step, message = status.get("state"), status.get("step") or 0, status.get("message") or ""
        if state in ("finished", "error") or (state == "stopped" and (asked or cause["sure"] > TERMINATED)):
            return End(state, step, message)
        last_words = cause.get("tail", "")
        if cause.get("status") == 2 and not state:
            errors = re.findall(r"^error: (.*)", last_words, re.M | re.S)
            return End("error", 0, errors[-1] if errors else last_words)
        if asked and not state:
            return End("stopped", 0, "stopped before it had begun")
        if "stop-now" in asked:
            return End("stopped", step, "stopped at once, without saving")
        what = "; ".join(filter(None, (cause["what"], full_disk(self.out))))
        report = f"---- the end of {cause['file']}\n{last_words}\n----\n" if last_words else ""
        if state == "failed" and cause["sure"] > KILLED and message not in report:
            report += message + "\n"
        report += f"{self.job['out']}: failed{at(step)}: {what}"
        return End("failed", step, what, report, tuple(w.host for w in silent))


def first_cause(watchers: list[Watcher], silent: list[Watcher]) -> dict:
    """The earliest of the surest causes that hosts tell of, or cannot tell of any more."""
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


def at(step: int) -> str:
    return f" at step {step}" if step else ""


def port_taken(host: Host, job: dict) -> str:
    return f"{host.label}: port {job['port']} is taken; set another at the top of launch.sh, or 0 for a free one"


# ---- following a run


class Follower:
    """Shows log.txt and the supervisor's words as they come, or what one host or rank prints; from the files' ends on,
    or so many lines before."""

    def __init__(self, out: Path, name: str, lines: int = 0, which: str = ""):
        self.out, self.name, self.which, self.shown, self.offsets, self.last = out, name, which, "", {}, None
        for path in self.files():
            self.offsets[path] = path.stat().st_size
            if lines and self.offsets[path]:
                self.print(path, tail(path, lines) + "\n")

    def files(self) -> list[Path]:
        """Those that exist."""
        if self.which:
            return host_files(self.out, self.name, self.which)
        return [p for p in (self.out / "log.txt", self.out / "logs/launch.log") if p.exists()]

    def show(self):
        for path in self.files():
            with open(path, "rb") as f:
                f.seek(self.offsets.get(path, 0))
                text = f.read().decode(errors="replace")
                self.offsets[path] = f.tell()
            self.print(path, text)

    def print(self, path, text):
        if not text:
            return
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
            self.show()
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


def state_of(out: Path) -> End:
    """What a run is doing, or how it ended."""
    supervised = is_supervised(out)  # first: a supervisor's last act is launch.json
    launch, status = read_launch(out), read_json(out / "status.json")
    state, step = launch.get("state", ""), status.get("step") or launch.get("step") or 0
    message = status.get("message") or launch.get("message", "")
    if state in ENDED:
        return End(state, step, launch.get("message", ""), launch.get("report", ""))
    if supervised:
        return End(state, step, message)
    # A host that does not answer may have something left of the run.
    if any(isinstance(a, Exception) or not a["over"] for a in look_at(launch)):
        return End(f"{state}, but its launcher is gone: nobody would relaunch it", step, message)
    if status.get("state") in ENDED:
        return End(status["state"], step, message)
    return End("failed", step, full_disk(out) or ("dead: it ended without a word" if state else "it never began"))


def look_at(launch: dict) -> list:
    """What each host has left of a run, or why it does not say."""
    hosts = hosts_of(launch)
    return call_all(hosts, launch["ssh"], "look", 20, out=launch["out"], id=launch["id"]) if hosts else []


# ---- the verbs


def pick_run(verb: str, words: list[str], *names: str, others: int = 0) -> tuple[Path | None, str, dict, list[str]]:
    """The run of --out DIR; without it the newest, the one that was last launched or last wrote its status.
    -> (folder, its name as typed, the flags, the other words); top is content without a run"""
    flags, rest = read_flags(words, "--out", *names, mixed=True)
    if len(rest) > others or any(word.startswith("-") for word in rest):
        takes = ["--out DIR", *names, *["a host, a rank or a file"] * others]
        raise UserError(f"{verb} takes {', '.join(takes)}, not {' '.join(rest)}")
    runs, name = sorted((ROOT / "runs").glob("*/")), flags["--out"]
    if not name and not runs:
        if verb == "top":
            return None, "", flags, rest
        raise UserError("There is no run in runs/ yet. Start one: bash launch.sh")
    name = name or str(max(runs, key=last_used).relative_to(ROOT))
    if not (ROOT / name).is_dir():
        raise UserError(f"There is no run folder '{name}'. In runs/: {', '.join(r.name for r in runs) or 'nothing'}")
    return ROOT / name, name.rstrip("/"), flags, rest


def last_used(run: Path) -> float:
    status = run / "status.json"
    return max(read_launch(run).get("began", 0.0), status.stat().st_mtime if status.exists() else 0.0)


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
    flags, words = read_flags(words, *LAUNCH_FLAGS)
    words, hosts = words or shlex.split(settings["default_args"]), read_hosts(flags["--hosts"])
    job = {**settings, "words": words, "env": forwarded(settings["forward"]), "nproc": int(flags["--nproc"] or 0)}
    job["retries"] = int(flags["--retries"] or settings["retries"] * (len(hosts) > 1))
    survey(hosts, job)
    answer = check(hosts[0], job, sum(h.slots for h in hosts))
    if "out" not in answer or answer["state"] == "finished" or any(w.split("=")[0] == "--check" for w in words):
        return 0  # without a folder, it was asked for --help
    name, out = answer["out"], ROOT / answer["out"]
    job |= {"out": name, "timeout": float(answer.get("timeout", 600))}
    name_sessions(hosts, out)
    lock, mark = claim(out, name)
    prepare_hosts(hosts, job, mark)
    job["hosts"] = [asdict(h) for h in hosts]
    launch = {"id": mark, "state": "starting", "machine": platform.node(), "began": time.time()}
    launch |= {key: job[key] for key in ("out", "ssh", "hosts")}
    write_whole(out / "logs" / "launch.json", json.dumps(launch, indent=1) + "\n")
    follower, supervisor = Follower(out, name), start_supervisor(out, job, lock)
    on_interrupt(f"{name} goes on. {hints(name)}")
    while (launch := read_launch(out))["state"] == "starting" and supervisor.poll() is None:
        time.sleep(0.1)
    if launch["state"] == "running":
        where = f" on {len(hosts)} hosts" if len(hosts) > 1 else f", process {launch['pid']}"
        say(f"Started {name}: {launch['place']}{where}; log in {name}/log.txt")
        if flags["--detach"] or (len(hosts) > 1 and not sys.stdout.isatty()):
            say(hints(name))
            return 0
    return follower.to_the_end()


def name_sessions(hosts: list[Host], out: Path) -> None:
    """Nodes of one machine have the session's name with a number."""
    session = re.sub(r"[^\w-]", "_", f"flatland-{out.name}", flags=re.A)
    for i, host in enumerate(hosts):
        before = sum(h.address == host.address for h in hosts[:i])
        host.session = session + (f"_{before + 1}" if before else "")


def claim(out: Path, name: str) -> tuple[int, str]:
    """Locks a run folder, and leaves a mark in it by which hosts tell whether they see the same folder.
    -> (the lock, the mark)"""
    mark = secrets.token_hex(8)
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        lock = None if is_supervised(out) else take_lock(out)
        if lock is None:
            raise UserError(f"{name} is being trained already. {hints(name)}")
        os.truncate(lock, 0)
        os.write(lock, mark.encode())
        os.fsync(lock)  # for those that see the folder over a network
        for left in ("stop", "stop-now"):
            (out / "logs" / left).unlink(missing_ok=True)
    except OSError as e:
        raise UserError(f"--out {name}: {e}") from None
    return lock, mark


def prepare_hosts(hosts: list[Host], job: dict, mark: str) -> None:
    """Makes sure that nothing of the run is alive anywhere, that all see its folder, and that the port is free; notes
    the newest checkpoint."""
    name = job["out"]
    answers = call_all(hosts, job["ssh"], "prepare", 30, out=name, clear=False, port=job["port"])
    problems = explain_all(hosts, answers)
    refuse(problems + [hints(name)] * ("already" in str(problems)))
    apart = ", ".join(h.label for h, a in zip(hosts, answers, strict=True) if a["mark"] != mark)
    if apart:
        raise UserError(
            f"{apart}: the folder {name} there is not the one here. Hosts that do not share the folder keep"
            " a part of each checkpoint, and no launch can go on from it. Give --out a folder that all hosts and this"
            " machine see, or launch from a machine that sees it"
        )
    if not answers[0]["port"]:
        raise UserError(port_taken(hosts[0], job))
    job["saved"] = max(a["saved"] for a in answers)


def start_supervisor(out: Path, job: dict, lock: int) -> subprocess.Popen:
    """A process of its own that inherits the lock, and gets the job on stdin."""
    command = [sys.executable, __file__, "--", "supervise"]
    with open(out / "logs" / "supervisor.stderr.log", "ab") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "pass_fds": (lock,)}
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    process.stdin.write(json.dumps(job).encode())
    process.stdin.close()
    os.close(lock)
    return process


def verb_supervise(words: list[str], settings: dict) -> None:
    """Not for users: what `train` leaves behind."""
    supervisor = Supervisor(json.load(sys.stdin))
    try:
        supervisor.run()
    except Exception as e:
        supervisor.set(state="failed", message=f"the launcher failed: {type(e).__name__}: {e}", report="")
        raise


def verb_logs(words: list[str], settings: dict) -> int:
    out, name, _, which = pick_run("logs", words, others=1)
    on_interrupt(f"{name} goes on. {hints(name)}")
    return Follower(out, name, 20 if which else 50, *which).to_the_end()


def find_host(launch: dict, label: str, problem: str) -> Host:
    for host in hosts_of(launch):
        if label in (host.label, host.line):
            return host
    raise UserError(f"{problem} '{label}'; hosts: {', '.join(h.label for h in hosts_of(launch)) or 'none'}")


def ranks_of(out: Path, launch: dict) -> dict:
    """rank -> [host's label, local rank], as the agents have written."""
    found = {}
    for path in out.glob(f"logs/*/{launch.get('id')}/ranks.json"):
        found |= {rank: [path.parts[-3], local_rank] for rank, local_rank in read_json(path).items()}
    return found


def host_files(out: Path, name: str, which: str) -> list[Path]:
    """What the processes of one host, or one rank, print in the newest attempt."""
    launch = read_launch(out)
    processes, ranks = sum(h.slots for h in hosts_of(launch)), ranks_of(out, launch)
    if which not in ranks and which.isdigit() and int(which) < processes:  # it has not started yet
        return []
    label, local_rank = ranks.get(which, (which, "*"))
    host = find_host(launch, label, f"logs: {name} has ranks 0 to {processes - 1} and no host or rank")
    folder = out / "logs" / host.label / launch["id"]
    agent = [] if which in ranks else folder.glob("agent.*.log")
    return sorted([*folder.glob(f"*/attempt_*/{local_rank}/*.log"), *agent])


def verb_status(words: list[str], settings: dict):
    out, name, _, _ = pick_run("status", words)
    launch, log, end = read_launch(out), out / "log.txt", state_of(out)
    batches = re.findall(r"Batch \d+ Loss.*", log.read_text(errors="replace")) if log.exists() else []
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
    for key, value in rows.items():
        say(f"{key:<10} {value}")
    step = batches[-1].split()[1] if batches else str(rows["step"])
    table = [("host", "session", "agent", "ranks", "step", "last output")]
    table += [host_row(h, a, step) for h, a in zip(hosts_of(launch), look_at(launch), strict=True)]
    widths = [max(len(line[column]) for line in table) + 2 for column in (0, 1)] + [10, 10, 8, 0]
    for line in table[len(table) == 1 :]:
        say("".join(f"{word:<{width}}" for word, width in zip(line, widths, strict=False)))


def ago(seconds: float) -> str:
    return f"{max(0, seconds):.0f} s ago"


def host_row(host: Host, answer: dict | Exception, step: str) -> tuple:
    """A host's line in the table of `status`."""
    if isinstance(answer, Exception):
        return host.label, host.session, explain(host, answer)
    status = answer["result"].get("exit")
    agent = "alive" if answer["agent"] else f"ended {status}" if status is not None else "gone"
    written = "none" if answer["age"] is None else ago(answer["age"])
    return host.label, host.session, agent, f"{answer['workers']} of {host.slots}", str(step), written


def verb_stop(words: list[str], settings: dict) -> int:
    out, name, flags, _ = pick_run("stop", words, "--now")
    launch, end, files = read_launch(out), state_of(out), [out / "logs" / "stop", out / "logs" / "stop-now"]
    if end.state in ENDED:
        say(f"{name} is not running: {end.state}")
        return 0
    now = bool(flags["--now"]) or files[0].exists()
    how = ": it ends its step and saves. The same once more stops it at once, without saving."
    say(f"Stopping {name}{' at once, without saving' if now else how}")
    follower = Follower(out, name)
    for file in files[: 1 + now]:
        file.touch()
    if not is_supervised(out):
        call_all(hosts_of(launch), launch["ssh"], "stop", 20, out=launch["out"], id=launch["id"], now=now)
    on_interrupt(f"{name} is still stopping. {hints(name)}")
    return follower.to_the_end()


def verb_attach(words: list[str], settings: dict) -> NoReturn:
    out, name, _, labels = pick_run("attach", words, others=1)
    launch = read_launch(out)
    labels += [*ranks_of(out, launch).get("0", []), *(h.label for h in hosts_of(launch)), ""]
    host = find_host(launch, labels[0], f"attach: {name} has no host")
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
        supervise=verb_supervise,
        logs=verb_logs,
        status=verb_status,
        stop=verb_stop,
        attach=verb_attach,
    )
