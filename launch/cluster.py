"""The launcher's part on the machine where `bash launch.sh` is typed: which hosts, whether all are fit, starting them
together, watching them to the end, starting them again.

launcher.py calls its verbs. What has to be done on a host is in node.py, which is sent there. `train` checks all
hosts, then leaves a supervisor behind, a process of its own, and follows the run's log. The supervisor starts one
agent on every host and watches them through one ssh connection each; it decides when the job has failed, ends it
everywhere, and relaunches it from the newest checkpoint under a new rendezvous id. It writes
`runs/NAME/logs/launch.json` (hosts, state, attempt) and `launch.log` (what happened), and holds the lock `launch.lock`
as long as it lives; every other verb reads these. A `localhost` line is a node on this machine: the same, without ssh.

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

sys.path.insert(1, str(Path(__file__).parents[1]))
from errors import ROOT, UserError
from node import FULL_DISK, KILLED, TERMINATED, WAITED, read_json, write_whole

BOOT = (
    "import json, sys; request = json.loads(sys.stdin.buffer.readline());"
    " exec(compile(request['source'], 'node.py', 'exec'))"
)
GRACE = 20  # seconds that the others have to end by themselves once a part of the job is gone
LOOK = 0.5  # seconds between two looks
ENDED = ("finished", "stopped", "error", "failed")
PORT_TAKEN = "port {} is taken; set another at the top of launch.sh, or 0 for a free one"
ROOM = 2**20  # free bytes below which a disk counts as full


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


class Unreachable(Exception):
    """The host did not answer; the message says in ssh's words why."""


class Refused(Exception):
    """The host answered that it cannot be done, and why."""


# ---- the list of hosts


def parse_host(text: str, where: str) -> Host:
    words = text.split()
    found = re.fullmatch(r"((?:\w[\w.-]*@)?(?:[\w][\w.-]*|\[[0-9a-fA-F:]+\]))(?::(\d+))?", words[0])
    if not found:
        raise UserError(f"{where}: '{words[0]}' is no host; a line is host, user@host or host:port, then slots=N")
    host = Host(found[1].replace("[", "").replace("]", ""), int(found[2] or 0))
    for word in words[1:]:
        number = re.fullmatch(r"slots=([1-9]\d*)", word)
        if not number:
            raise UserError(
                f"{where}: '{word}' after {words[0]} is not known; only slots=N, with N above 0, can follow"
            )
        host.slots = int(number[1])
    if host.port > 65535 or (host.local and host.port):
        problem = "localhost is reached without ssh, it has no port" if host.local else "there is no such port"
        raise UserError(f"{where}: {words[0]}: {problem}")
    return host


def read_hosts(listed: str, path: Path | None = None) -> list[Host]:
    """The hosts after --hosts, else those of the file `hosts`, or another, else this machine alone."""
    path = path or ROOT / "hosts"
    if listed:
        hosts = [parse_host(item, "--hosts") for item in listed.split(",") if item.strip()]
    elif path.exists():
        lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        hosts = [parse_host(line, f"hosts line {n}") for n, line in enumerate(lines, 1) if line]
    else:
        hosts = [Host("localhost")]
    if not hosts:
        raise UserError(f"{'--hosts' if listed else 'hosts'} names no machine; this one is called localhost")
    seen = set()
    for host in hosts:
        if host.line in seen and not host.local:
            raise UserError(f"{host.line} is listed twice; slots=N sets the number of its processes")
        seen.add(host.line)
        name = platform.node() if host.local else host.line.split("@")[-1]
        label = re.sub(r"[^\w.-]", "-", name)
        labels, n = [h.label for h in hosts], 1
        while (label if n == 1 else f"{label}-{n}") in labels:
            n += 1
        host.label = label if n == 1 else f"{label}-{n}"
    return hosts


# ---- asking a host


def remote_command(host: Host, ssh: str, python: str = "python3") -> list[str]:
    if host.local:
        return [sys.executable, "-c", BOOT]
    return [*ssh_command(host, ssh), f"exec {shlex.quote(python)} -c {shlex.quote(BOOT)}"]


def ssh_command(host: Host, options: str) -> list[str]:
    port = ["-p", str(host.port)] if host.port else []
    return ["ssh", *shlex.split(options), *port, "--", host.name]


def line_for(op: str, request: dict) -> bytes:
    return json.dumps({"op": op, "source": (ROOT / "launch" / "node.py").read_text(), **request}).encode() + b"\n"


def call(host: Host, ssh: str, op: str, limit: float, request: dict) -> dict:
    """Has node.py on the host do `op` -> its answer. Raises Unreachable and Refused."""
    process = subprocess.Popen(
        remote_command(host, ssh), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    try:
        out, err = process.communicate(line_for(op, request), timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Unreachable(f"no answer in {limit:.0f} s") from None
    answers = [line for line in out.decode(errors="replace").splitlines() if line.startswith("{")]  # not a .bashrc's
    if not answers:
        said = err.decode(errors="replace").strip().splitlines() or [f"status {process.returncode} without an answer"]
        raise Unreachable(said[-1])
    answer = json.loads(answers[-1])
    if "refused" in answer:
        raise Refused(answer["refused"])
    return answer


def call_all(hosts: list[Host], ssh: str, op: str, limit: float, request) -> list:
    """call() on all hosts at once; `request` is a dictionary or makes one from a host. -> answers and exceptions."""

    def one(host: Host):
        try:
            return call(host, ssh, op, limit, request(host) if callable(request) else request)
        except (Unreachable, Refused) as e:
            return e

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(one, hosts))


def mend(host: Host, error: Exception) -> str:
    """A line on a host that did not do as asked, with what to try."""
    if isinstance(error, Refused):
        return f"{host.label}: {error}"
    target = f"ssh {f'-p {host.port} ' if host.port else ''}{host.name}"
    if "Permission denied" in str(error):
        return f"{host.label}: {error}. It does not know your key: ssh-copy-id {target[4:]}"
    if "verification failed" in str(error):
        return f"{host.label}: {error} Its key is new or has changed. Look at it, and accept it: {target} true"
    if "python3" in str(error):
        return f"{host.label}: {error}. It needs python3: {target} sudo apt install -y python3 python3-venv"
    return f"{host.label} does not answer: {error}. Try: {target} true"


# ---- before a launch


def forwarded(patterns: str) -> dict:
    """The variables of this shell that the hosts get."""
    return {k: v for k, v in os.environ.items() if any(fnmatch.fnmatchcase(k, p) for p in patterns.split())}


def survey(hosts: list[Host], job: dict) -> None:
    """Looks at all hosts at once and settles their addresses, GPUs and processes. Raises one UserError that tells all
    that is wrong."""
    requests = {"root": job["root"], "python": job["python"], "env": job["env"]}
    answers = call_all(hosts, job["ssh"], "probe", 60, requests)
    problems = [mend(h, a) for h, a in zip(hosts, answers, strict=True) if isinstance(a, Exception)]
    if problems:
        raise UserError("\n".join(problems))
    for host, answer in zip(hosts, answers, strict=True):
        host.facts = answer
    code = call(Host("localhost"), "", "probe", 60, requests)["code"]
    remote = ",".join(h.line for h in hosts if not h.local)
    again = f"bash launch.sh sync --hosts {remote}"
    for host in hosts:
        if not host.facts["code"]:
            problems.append(f"{host.label}: there is no {job['root']}/launch/node.py; {again}")
        elif host.facts["code"] != code:
            problems.append(f"{host.label}: the files in {job['root']} are not the ones here; {again}")
        elif not host.facts["python"]:
            problems.append(f"{host.label}: there is no {job['python']}; {again}")
    settle_addresses(hosts)
    by_address = {}
    for host in hosts:
        by_address.setdefault(host.address, []).append(host)
    for together in by_address.values():
        names = {h.line for h in together}
        if len(names) > 1:
            problems.append(f"{', '.join(sorted(names))} are the same machine ({together[0].address}); list it once")
        problems += share_machine(together, job["nproc"])
    if len({bool(h.devices) for h in hosts}) > 1:
        without = ", ".join(h.label for h in hosts if not h.devices)
        problems.append(
            f"{without}: no GPU, while others have some; take it out of hosts, or set CUDA_VISIBLE_DEVICES="
        )
    if problems:
        raise UserError("\n".join(problems))


def settle_addresses(hosts: list[Host]) -> None:
    """What the other hosts can reach each one by: the address that its ssh connection came in at. A name may mean
    another one, or on Debian 127.0.1.1."""
    for host in hosts:
        host.address = "127.0.0.1" if host.local else host.facts["connection"][2]
    away = next((h for h in hosts if not h.address.startswith("127.")), None)
    if away:
        for host in hosts:
            if host.address.startswith("127."):  # this machine, as a host elsewhere sees it
                host.address = away.facts["connection"][0]


def share_machine(together: list[Host], nproc: int) -> list[str]:
    """Divides a machine's GPUs, or its cores, among its nodes -> what is wrong with that."""
    visible, problems = together[0].facts["gpus"], []
    share, rest = divmod(len(visible), len(together))
    if visible and rest:
        return [f"{together[0].label}: {len(visible)} GPUs cannot be divided among {len(together)} nodes"]
    for i, host in enumerate(together):
        asked = nproc or host.slots
        host.slots = asked or share or 1
        if visible:
            host.devices = visible[i * share : i * share + share][: host.slots]
            if host.slots > share:
                said = f"--nproc {nproc}" if nproc else f"slots={host.slots}"
                problems.append(f"{host.label}: {said}, but {share} visible GPUs for it; start one process per GPU")
    for host in together:
        host.processes_here = sum(h.slots for h in together)
    return problems


def check(host: Host, job: dict, total: int) -> dict:
    """train.py's own check, on a host -> what it answered; exits with its status where it refuses."""
    command = [job["python"], "train.py", *job["words"], "--check", str(total)]
    env = {**job["env"], "LOCAL_WORLD_SIZE": str(host.slots)}
    request = {"root": job["root"], "env": env, "command": command, "limit": 1800}
    try:
        done = call(host, job["ssh"], "run", 1830, request)
    except (Unreachable, Refused) as e:
        raise UserError(mend(host, e)) from None
    answer, rest = {}, []
    for line in done["out"].splitlines(keepends=True):
        found = re.fullmatch(r"([a-z_]+)=(.*)\n", line)
        if found:
            answer[found[1]] = found[2]
        else:
            rest.append(line)
    print("".join(rest), end="", flush=True)
    where = "" if host.local else f"{host.label}: "
    print("".join(f"{where}{line}\n" for line in done["err"].splitlines()), end="", file=sys.stderr)
    if done["exit"]:
        sys.exit(done["exit"] if done["exit"] > 0 else 1)
    return answer


def is_supervised(out: Path) -> bool:
    """Whether a launcher, here or on another machine that sees this folder, looks after the run."""
    if not (out / "logs" / "launch.lock").exists():
        return False
    lock = take_lock(out, fcntl.LOCK_SH)
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


def take_lock(out: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """An open, locked descriptor; None: somebody else holds it."""
    descriptor = os.open(out / "logs" / "launch.lock", os.O_RDWR | os.O_CREAT, 0o644)
    for _ in range(5):  # others take it for a moment, to look whether it is taken
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # a file system without locks: what launch.json says must do
            return descriptor
    os.close(descriptor)
    return None


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


class Watcher(threading.Thread):
    """Keeps a connection to a host open as long as it is wanted, and what the host said last."""

    def __init__(self, host: Host, ssh: str, request: dict):
        super().__init__(daemon=True)
        self.host, self.ssh, self.request = host, ssh, request
        self.last, self.heard, self.open, self.process = {}, time.monotonic(), True, None
        self.start()

    def run(self) -> None:
        while self.open:
            self.process = subprocess.Popen(
                remote_command(self.host, self.ssh),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT,
            )  # fmt: skip
            try:
                self.process.stdin.write(line_for("watch", self.request))
                self.process.stdin.flush()
                for line in self.process.stdout:
                    if not line.startswith(b"{"):
                        continue
                    self.last, self.heard = json.loads(line), time.monotonic()
                    self.process.stdin.write(b"\n")  # a sign of life
                    self.process.stdin.flush()
            except (OSError, ValueError):  # the connection broke
                pass
            self.process.kill()
            self.process.wait()
            for _ in range(20):
                if self.open:
                    time.sleep(0.1)

    def close(self) -> None:
        self.open = False
        if self.process:
            self.process.kill()


class Supervisor:
    """Runs the job, on all hosts or on none, to its end."""

    def __init__(self, job: dict):
        self.job, self.hosts, self.out = job, [Host(**h) for h in job["hosts"]], ROOT / job["out"]
        self.launch = read_launch(self.out)
        self.touched, self.unwritten = 0.0, {}

    def stopping(self) -> tuple:
        """What `launch.sh stop` has asked for."""
        return tuple(name for name in ("stop", "stop-now") if (self.out / "logs" / name).exists())

    def say(self, text: str) -> None:
        self.write("logs/launch.log", self.unwritten.get("logs/launch.log", "") + text.rstrip("\n"))

    def set(self, **values) -> None:
        self.launch.update(values)
        self.write("logs/launch.json", json.dumps(self.launch, indent=1))

    def write(self, name: str, text: str) -> None:
        """Of launch.log, what is new; of others, all. What the disk does not take is tried again."""
        self.unwritten[name] = text + "\n"
        self.write_again()

    def write_again(self) -> None:
        for name, text in list(self.unwritten.items()):
            with contextlib.suppress(OSError):
                if name.endswith(".log"):
                    with open(self.out / name, "a") as f:
                        f.write(text)
                else:
                    write_whole(self.out / name, text)
                del self.unwritten[name]

    def alive(self) -> None:
        self.write_again()
        if time.monotonic() - self.touched > 5:
            self.touched = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.out / "logs" / "launch.json")

    def ask(self, op: str, limit: float, **request) -> list:
        common = {"root": self.job["root"], "out": self.job["out"], "id": self.launch["id"]}
        return call_all(self.hosts, self.job["ssh"], op, limit, lambda h: {**common, "label": h.label, **request})

    def run(self) -> None:
        saved, tries, report = self.job["saved"], 0, ""
        while True:
            state, step, message, cause, dead = self.attempt()
            if state != "failed" or self.stopping():
                return self.end(state, step, message, cause)
            answers = self.prepare()  # ends what is left of it
            newest = max((a["saved"] for a in answers if isinstance(a, dict)), default=saved)
            if newest > saved:
                saved, tries, report = newest, 0, ""
            report = report or cause
            if tries == self.job["retries"]:
                break
            tries += 1
            pause = self.job["retry_pause"] * 2 ** (tries - 1)
            going_on = f"from step {newest}" if newest > 0 else "from the start"
            self.say(f"{cause}\nRelaunching {going_on} in {pause:.0f} s: try {tries} of {self.job['retries']}")
            self.set(state="waiting", step=step, message=message)
            self.wait(pause)
            self.wait_for_hosts()
            if self.stopping():
                return self.end("stopped", step, "stopped between two tries")
        if self.job["retries"]:
            report += f"\n{self.job['out']}: gave up after {tries} {'tries' if tries > 1 else 'try'} without progress"
        if dead:
            report += "\n" + self.without(dead)
        self.end("failed", step, message, report)

    def end(self, state: str, step: int, message: str, report: str = "") -> None:
        """The last words; also in status.json, where rank 0 was killed before it could write its own, or where others
        took its end for a failure."""
        status = read_json(self.out / "status.json")
        if status.get("state") == "running" or "stop-now" in self.stopping():
            self.write("status.json", json.dumps(status | {"state": state, "exit_code": 1, "message": message}))
        self.set(state=state, step=step, message=message, report=report)
        end = time.monotonic() + FULL_DISK
        while self.unwritten and time.monotonic() < end:
            time.sleep(LOOK)
            self.write_again()

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stopping():
            self.alive()
            time.sleep(LOOK)

    def prepare(self) -> list:
        return self.ask("prepare", 20, clear=self.launch.get("attempt", 0) > 0, port=self.job["port"])

    def wait_for_hosts(self) -> None:
        end = time.monotonic() + self.job["host_wait"]
        while time.monotonic() < end and not self.stopping():
            if not any(isinstance(a, Unreachable) for a in self.prepare()):
                return
            self.wait(2)

    def without(self, dead: list[Host]) -> str:
        """The command that goes on with the other hosts."""
        words, others = list(self.job["words"]), [h for h in self.hosts if h not in dead]
        names = ", ".join(h.label for h in dead)
        if not others:
            return f"{names} did not come back"
        words += [] if "--out" in words else ["--out", self.job["out"]]
        tokens = read_json(self.out / "flags.json").get("batch_tokens")
        words += [] if "--batch_tokens" in words or not tokens else ["--batch_tokens", str(tokens)]
        listed = ",".join(h.line for h in others)
        nproc = ["--nproc", str(others[0].slots)] if len({h.slots for h in others}) == 1 else []
        command = shlex.join(["bash", "launch.sh", "--hosts", listed, *nproc, *words])
        return f"{names} did not come back. To go on, from the newest checkpoint, with the others:\n  {command}"

    def attempt(self) -> tuple[str, int, str, str, list[Host]]:
        """One launch -> (state, step, message, the cause of a failure, hosts that do not answer)."""
        job = self.job
        self.set(id=time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2), state="starting", ranks={})
        answers = self.prepare()
        if not any(isinstance(a, Exception) for a in answers):
            if not answers[0]["port"]:
                text = f"{self.hosts[0].label}: {PORT_TAKEN.format(job['port'])}"
                return "failed", 0, text, text, []
            self.set(attempt=self.launch.get("attempt", 0) + 1)
            answers = self.start_all(answers[0]["port"])
        failed = [(h, a) for h, a in zip(self.hosts, answers, strict=True) if isinstance(a, Exception)]
        if failed:
            self.ask("sweep", 20)
            cause = "\n".join(mend(h, e) for h, e in failed)
            return "failed", 0, cause.splitlines()[0], cause, [h for h, e in failed if isinstance(e, Unreachable)]
        places = sorted({a["place"] for a in answers})
        self.set(state="running", message="", place=places[0], pid=answers[0]["pid"])
        return self.watch()

    def start_all(self, port: int) -> list:
        job, first = self.job, self.hosts[0]
        endpoint = f"[{first.address}]:{port}" if ":" in first.address else f"{first.address}:{port}"

        def request(host: Host) -> dict:
            torchrun = [
                job["python"], "-m", "torch.distributed.run",
                "--nnodes", str(len(self.hosts)), "--nproc-per-node", str(host.slots), "--max-restarts", "0",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", self.launch["id"],
                "--rdzv-conf", f"is_host={int(host is first)},join_timeout={job['join_timeout']}",
                "--local-addr", host.address, "--redirects", "3",
            ]  # fmt: skip
            env = {**(job["here"] if host.local else {}), **job["env"]}
            env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(job["shutdown_timeout"]))  # 2.11 has no flag for it
            return {
                "root": job["root"], "out": job["out"], "id": self.launch["id"], "label": host.label,
                "session": host.session, "address": host.address, "devices": host.devices, "env": env,
                "processes_here": host.processes_here, "torchrun": torchrun, "words": job["words"],
                "timeout": job["timeout"], "limit": job["start_limit"],
            }  # fmt: skip

        return call_all(self.hosts, job["ssh"], "start", job["start_limit"] + 20, request)

    def watch(self) -> tuple[str, int, str, str, list[Host]]:
        job = self.job
        common = {"root": job["root"], "out": job["out"], "id": self.launch["id"]}
        watchers = [Watcher(h, job["ssh"], {**common, "label": h.label}) for h in self.hosts]
        grace = min(GRACE, job["timeout"])
        seen = {w: {} for w in watchers}  # the most workers that a host has shown
        vanished, ranks, failing, status, told = {}, {}, None, {}, ()  # vanished, silent: watchers and since when
        while True:
            time.sleep(LOOK)
            self.alive()
            if self.stopping() != told:
                told = self.stopping()
                threading.Thread(target=self.ask, args=("stop", 20), kwargs={"now": "stop-now" in told}).start()
            now = time.monotonic()
            for w in watchers:
                if len(w.last.get("workers", {})) > len(seen[w]):
                    seen[w] = w.last["workers"]
                status = later(status, w.last.get("status", {}))
                if w.last and not w.last["agent"] and not w.last["result"] and not w.last["workers"]:
                    vanished.setdefault(w, now)
            found = {rank: [w.host.label, local] for w in watchers for rank, local in seen[w].items()}
            if found != ranks:
                ranks = found
                self.set(ranks=ranks)
            silent = {w: w.heard for w in watchers if now - w.heard > job["timeout"] + 3}
            over = [w for w in watchers if w.last and not w.last["agent"] and not w.last["workers"]]
            hurt = vanished or [w for w in watchers if (w.last.get("result") or {}).get("exit")]
            hurt = hurt or [w for w in watchers if len(w.last.get("workers", {})) < len(seen[w])]
            if len(over) == len(watchers) or silent:
                break
            failing = (failing or now) if hurt else None
            if failing and now - failing > grace * (3 if status.get("state") in ("finished", "stopped") else 1):
                break
        for w in watchers:
            w.close()
        answers = self.ask("sweep", 20)
        for w, a in zip(watchers, answers, strict=True):
            if isinstance(a, dict):
                w.last, w.heard = a, time.monotonic()
                status = later(status, a["status"])
            elif isinstance(a, Unreachable):
                silent.setdefault(w, w.heard)
        return self.judge(watchers, vanished, silent, status)

    def judge(self, watchers: list[Watcher], vanished: dict, silent: dict, status: dict):
        """How an attempt ended, and why: the earliest of the surest causes that hosts give."""
        state, step, message = status.get("state"), status.get("step") or 0, status.get("message") or ""
        causes = []  # (when, what an agent says, or cannot say any more)
        if silent:
            since, names = min(silent.values()), ", ".join(w.host.label for w in silent)
            at = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - since)))
            what = f"{names} {'has' if len(silent) == 1 else 'have'} not answered since {at}"
            causes.append((since, {"sure": KILLED, "what": what}))
        for w in watchers:
            result = w.last.get("result")
            if w in vanished and w not in silent:
                what = f"everything on {w.host.label} was gone: killed, or the machine restarted"
                causes.append((vanished[w], {"sure": KILLED, "what": what}))
            elif result and result["cause"] and w not in silent:
                causes.append((w.heard - result["ago"], result["cause"]))
        nothing = {"sure": WAITED, "what": "it ended, and no host can say why"}
        _, cause = min(causes, key=lambda c: (c[1]["sure"], c[0]), default=(0, nothing))
        asked = self.stopping()
        if state in ("finished", "error") or (state == "stopped" and (asked or cause["sure"] > TERMINATED)):
            return state, step, message, "", []
        end, what = cause.get("tail", ""), cause["what"]
        if cause.get("status") == 2 and not state:
            said = re.findall(r"^error: (.*)", end, re.M | re.S)
            return "error", 0, said[-1] if said else end, "", []
        if asked and not state:
            return "stopped", 0, "stopped before it had begun", "", []
        if "stop-now" in asked:
            return "stopped", step, "stopped at once, without saving", "", []
        if full := full_disk(self.out):
            what += f"; {full}"
        text = f"---- the end of {cause['file']}\n{end}\n----\n" if end else ""
        if state == "failed" and cause["sure"] > KILLED and message and message not in text:
            text += message + "\n"
        text += f"{self.job['out']}: failed{f' at step {step}' if step else ''}: {what}"
        return "failed", step, what, text, [w.host for w in silent]


def later(*statuses: dict) -> dict:
    """Which was written last: an attempt's end is, and hosts may not all see it yet."""
    return max(statuses, key=lambda s: (s.get("state") in ENDED, s.get("step", -1)))


# ---- following a run


class Follower:
    """Shows log.txt and the supervisor's words as they come, or what one host or rank prints; from the files' ends on,
    or so many lines before."""

    def __init__(self, out: Path, name: str, lines: int = 0, which: str = ""):
        self.out, self.name, self.which, self.shown, self.offsets, self.last = out, name, which, "", {}, None
        for path in self.files():
            with open(path, "rb") as f:
                f.seek(max(0, path.stat().st_size - 65536))
                end = f.read().splitlines(keepends=True)
                self.offsets[path] = f.tell() - sum(map(len, end[max(0, len(end) - lines) :]))

    def files(self) -> list[Path]:
        """Those that are there."""
        if self.which:
            return host_files(self.out, self.name, self.which)
        return [p for p in (self.out / "log.txt", self.out / "logs/launch.log") if p.exists()]

    def show(self) -> None:
        for path in self.files():
            with open(path, "rb") as f:
                f.seek(self.offsets.get(path, 0))
                text = f.read().decode(errors="replace")
                self.offsets[path] = f.tell()
            if not text:
                continue
            self.shown += text
            stream = sys.stderr if path.name == "launch.log" else sys.stdout
            if self.which and path != self.last:
                stream.write(f"==> {path.relative_to(self.out)} <==\n")
            self.last = path
            if stream.isatty():
                text = re.sub(r"^[\d-]{10} [\d:]{8} [A-Z] \[[^\]]*\] ", "", text, flags=re.M)
            stream.write(text)
            stream.flush()

    def to_the_end(self) -> int:
        """Follows until the run is over -> the exit status."""
        asked, told = 0.0, ""
        while True:
            full = full_disk(self.out)
            if full and not told:
                print(full, file=sys.stderr, flush=True)
            told = full
            over = read_launch(self.out).get("state") in ENDED
            if not over and not is_supervised(self.out) and time.monotonic() - asked > 3:
                over = not is_alive(read_launch(self.out))
                asked = time.monotonic()
            self.show()
            if over:
                return self.conclude(read_launch(self.out))
            time.sleep(LOOK)

    def conclude(self, launch: dict) -> int:
        state, message, report = final_state(self.out, launch)
        step = read_json(self.out / "status.json").get("step") or launch.get("step") or 0
        if state == "error":
            if message not in self.shown:
                print(f"error: {message}", file=sys.stderr)
            return 2
        if report and report not in self.shown:
            print(report, file=sys.stderr)
        elif message and message.splitlines()[0] not in self.shown and state != "failed":
            print(message, file=sys.stderr)
        if state in ("finished", "stopped"):
            print(f"{self.name}: {state}{f' at step {step}' if step else ''}")
            return 0
        if not report:
            print(f"{self.name}: failed{f' at step {step}' if step else ''}: {message}", file=sys.stderr)
        return 1


def final_state(out: Path, launch: dict) -> tuple[str, str, str]:
    """(state, message, report) of a run that nobody looks after any more."""
    if launch.get("state") in ENDED:
        return launch["state"], launch.get("message", ""), launch.get("report", "")
    status = read_json(out / "status.json")
    state = status.get("state", "")
    if state in ENDED:
        return state, status.get("message") or "", ""
    return "failed", full_disk(out) or ("dead: it ended without a word" if state or launch else "it never began"), ""


def is_alive(launch: dict) -> bool:
    """Whether any host has anything left of the run; a host that does not answer may have."""
    hosts = hosts_of(launch)
    if not hosts:
        return False
    request = {"root": launch["root"], "out": launch["out"], "id": launch["id"]}
    answers = call_all(hosts, launch["ssh"], "look", 20, lambda h: {**request, "label": h.label})
    return any(isinstance(a, Exception) or a["agent"] or a["workers"] for a in answers)


# ---- the verbs


def pick_run(words: list[str], verb: str) -> tuple[Path, str, list[str]]:
    """The run of --out DIR; without it the newest, the one that was last launched or last wrote its status.
    -> (folder, its name as typed, the other words)"""
    rest, name, words = [], "", list(words)
    while words:
        word = words.pop(0)
        if word == "--out" or word.startswith("--out="):
            name = word[6:] if "=" in word else words.pop(0) if words else ""
            if not name:
                raise UserError(f"{verb}: --out takes a run folder")
        else:
            rest.append(word)
    runs = sorted((ROOT / "runs").glob("*/"))
    if not name:

        def age(run: Path) -> float:
            status = run / "status.json"
            return max(read_launch(run).get("began", 0.0), status.stat().st_mtime if status.exists() else 0.0)

        if not runs:
            raise UserError("There is no run in runs/ yet. Start one: bash launch.sh")
        name = str(max(runs, key=age).relative_to(ROOT))
    out = ROOT / name
    if not out.is_dir():
        raise UserError(f"There is no run folder '{name}'. In runs/: {', '.join(r.name for r in runs) or 'nothing'}")
    return out, name.rstrip("/"), rest


def hints(name: str) -> tuple[str, str]:
    return tuple(f"{what}: bash launch.sh {verb} --out {shlex.quote(name)}" for what, verb in
                 (("Watch it", "logs"), ("Stop it", "stop")))  # fmt: skip


def on_interrupt(farewell: str) -> None:
    """From now on Ctrl-C and the like end this process with a farewell, and nothing else."""

    def leave(*_) -> None:
        print(f"\n{farewell}", flush=True)
        os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def launcher_flags(words: list[str], settings: dict) -> tuple[dict, list[str]]:
    """Splits `train`'s words: the first that is no launcher flag begins train.py's."""
    flags = {"detach": False, "nproc": 0, "hosts": "", "retries": None}
    words = list(words)
    while words:
        name, equals, value = words[0].partition("=")
        if name == "--detach" and not equals:
            flags["detach"] = True
            words.pop(0)
        elif name in ("--nproc", "--hosts", "--retries"):
            words.pop(0)
            if not equals:
                value = words.pop(0) if words else ""
            if name == "--hosts":
                if not value.strip(", "):
                    raise UserError("--hosts takes machines, separated by commas, like node1,user@node2:2222")
                flags["hosts"] = value
            elif not value.isdigit() or (name == "--nproc" and int(value) < 1):
                raise UserError(f"{name} takes a number, not '{value}'")
            else:
                flags[name[2:]] = int(value)
        else:
            break
    return flags, words


def verb_train(words: list[str], settings: dict) -> int:
    flags, words = launcher_flags(words, settings)
    words = words or shlex.split(settings["default_args"])
    hosts = read_hosts(flags["hosts"])
    job = {
        "root": str(ROOT), "words": words, "nproc": flags["nproc"], **{k: settings[k] for k in ("python", "ssh")},
        "env": forwarded(settings["forward"]), "here": dict(os.environ), "port": int(settings["port"]),
        "retries": flags["retries"] if flags["retries"] is not None else (int(settings["retries"]) * (len(hosts) > 1)),
        **{k: float(settings[k]) for k in ("retry_pause", "host_wait", "start_limit")},
        **{k: int(settings[k]) for k in ("join_timeout", "shutdown_timeout")},
    }  # fmt: skip
    survey(hosts, job)
    answer = check(hosts[0], job, sum(h.slots for h in hosts))
    if "out" not in answer or answer["state"] == "finished" or any(w.split("=")[0] == "--check" for w in words):
        return 0  # without a folder, it was asked for --help
    name, out = answer["out"], ROOT / answer["out"]
    job |= {"out": name, "timeout": float(answer.get("timeout", 600))}
    watch_it, stop_it = hints(name)
    session = re.sub(r"[^\w-]", "_", f"flatland-{out.name}", flags=re.A)
    for i, host in enumerate(hosts):
        before = sum(h.address == host.address for h in hosts[:i])
        host.session = session + (f"_{before + 1}" if before else "")

    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        lock = None if is_supervised(out) else take_lock(out)
        if lock is None:
            raise UserError(f"{name} is being trained already. {watch_it}   {stop_it}")
        mark = secrets.token_hex(8)
        os.truncate(lock, 0)
        os.write(lock, mark.encode())
        os.fsync(lock)  # for those that see the folder over a network
    except OSError as e:
        raise UserError(f"--out {name}: {e}") from None
    request = {"root": job["root"], "out": name, "clear": False, "port": job["port"]}
    answers = call_all(hosts, job["ssh"], "prepare", 30, lambda h: {**request, "label": h.label})
    problems = [mend(h, a) for h, a in zip(hosts, answers, strict=True) if isinstance(a, Exception)]
    if problems:
        raise UserError("\n".join([*problems, *([f"{watch_it}   {stop_it}"] if "already" in str(problems) else [])]))
    if not answers[0]["port"]:
        raise UserError(f"{hosts[0].label}: {PORT_TAKEN.format(job['port'])}")
    job["saved"] = max(a["saved"] for a in answers)
    apart = [h.label for h, a in zip(hosts, answers, strict=True) if a["mark"] != mark]
    if apart:
        raise UserError(
            f"{', '.join(apart)}: the folder {name} there is not the one here. Hosts that do not share the folder keep"
            " a part of each checkpoint, and no launch can go on from it. Give --out a folder that all hosts and this"
            " machine see, or launch from a machine that sees it"
        )
    job["hosts"] = [asdict(h) for h in hosts]

    for left in ("stop", "stop-now"):
        (out / "logs" / left).unlink(missing_ok=True)
    launch = {"id": mark, "state": "starting", "machine": platform.node(), "began": time.time(), "out": name}
    launch |= {k: job[k] for k in ("root", "ssh", "hosts")}
    write_whole(out / "logs" / "launch.json", json.dumps(launch, indent=1) + "\n")
    follower = Follower(out, name)
    with open(out / "logs" / "supervisor.stderr.log", "ab") as err:
        supervisor = subprocess.Popen(
            [sys.executable, str(ROOT / "launch" / "launcher.py"), "--", "supervise", name],
            stdin=subprocess.PIPE, stdout=err, stderr=err, cwd=ROOT, pass_fds=(lock,), start_new_session=True,
        )  # fmt: skip
    supervisor.stdin.write(json.dumps(job).encode())
    supervisor.stdin.close()
    os.close(lock)
    on_interrupt(f"{name} goes on. {watch_it}   {stop_it}")
    while (launch := read_launch(out))["state"] == "starting" and supervisor.poll() is None:
        time.sleep(0.1)
    if launch["state"] == "running":
        where = f" on {len(hosts)} hosts" if len(hosts) > 1 else f", process {launch['pid']}"
        print(f"Started {name}: {launch['place']}{where}; log in {name}/log.txt", flush=True)
    if launch["state"] == "running" and (flags["detach"] or (len(hosts) > 1 and not sys.stdout.isatty())):
        print(f"{watch_it}   {stop_it}")
        return 0
    return follower.to_the_end()


def verb_supervise(words: list[str], settings: dict) -> int:
    """Not for users: what `train` leaves behind. The job comes on stdin, the lock is inherited."""
    supervisor = Supervisor(json.load(sys.stdin))
    try:
        supervisor.run()
    except Exception as e:
        supervisor.set(state="failed", message=f"the launcher failed: {type(e).__name__}: {e}", report="")
        raise
    return 0


def verb_logs(words: list[str], settings: dict) -> int:
    out, name, rest = pick_run(words, "logs")
    if len(rest) > 1 or (rest and rest[0].startswith("-")):
        raise UserError(f"logs takes --out DIR and one host or rank, not {' '.join(rest)}")
    on_interrupt(f"{name} goes on. {'   '.join(hints(name))}")
    return Follower(out, name, 20 if rest else 50, *rest).to_the_end()


def host_files(out: Path, name: str, which: str) -> list[Path]:
    """What the processes of one host, or one rank, print in the newest attempt."""
    launch = read_launch(out)
    hosts, ranks = hosts_of(launch), launch.get("ranks", {})
    label, local = ranks.get(which, (which, None))
    host = next((h for h in hosts if label in (h.label, h.line)), None)
    if host is None:
        last = sum(h.slots for h in hosts) - 1
        if which.isdigit() and int(which) <= last:  # it has not started yet
            return []
        known = ", ".join(h.label for h in hosts) or "none"
        raise UserError(f"logs: {name} has no host or rank '{which}'; hosts: {known}; ranks: 0 to {last}")
    patterns = [f"*/attempt_*/{'*' if local is None else local}/*.log"] + (["agent.*.log"] if local is None else [])
    folder = out / "logs" / host.label / launch["id"]
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def verb_status(words: list[str], settings: dict) -> int:
    out, name, rest = pick_run(words, "status")
    if rest:
        raise UserError(f"status takes --out DIR and nothing else, not {rest[0]}")
    launch, status, hosts = read_launch(out), read_json(out / "status.json"), hosts_of(read_launch(out))
    request = {"root": launch.get("root"), "out": launch.get("out"), "id": launch.get("id")}
    asked = lambda h: {**request, "label": h.label}  # noqa: E731
    answers = call_all(hosts, launch["ssh"], "look", 20, asked) if hosts else []
    supervised = is_supervised(out)
    state, message, _ = final_state(out, launch)
    if supervised or any(isinstance(a, dict) and (a["agent"] or a["workers"]) for a in answers):
        state, message = launch.get("state", "running"), status.get("message") or launch.get("message", "")
        if not supervised:
            state += ", but its launcher is gone: nobody would relaunch it"
    log, age, batch = out / "log.txt", "", ""
    if log.exists():
        age = f"{max(0, time.time() - log.stat().st_mtime):.0f} s ago"
        batch = (re.findall(r"Batch \d+ Loss.*", log.read_text(errors="replace")) or [""])[-1]
    step = (re.findall(r"Batch (\d+)", batch) or [status.get("step") or ""])[0]
    rows = {
        "run": name,
        "state": state,
        "step": status.get("step") or "",
        "message": message.partition("\n")[0],
        "disk": full_disk(out) or f"{shutil.disk_usage(out).free / 1e9:.1f} GB free",
        "attempt": launch.get("attempt", ""),
        "place": launch.get("place", ""),
        "last line": age,
        "last batch": batch,
    }
    for key, value in rows.items():
        print(f"{key:<10} {value}")
    if hosts:
        width = max(len(word) for word in ("host", *(h.label for h in hosts))) + 2
        place = max(len(word) for word in ("session", *(h.session for h in hosts))) + 2
        print(f"{'host':<{width}}{'session':<{place}}{'agent':<10}{'ranks':<10}{'step':<8}last output")
    for host, answer in zip(hosts, answers, strict=True):
        line = f"{host.label:<{width}}{host.session:<{place}}"
        if isinstance(answer, Exception):
            print(line + mend(host, answer))
            continue
        ended = (answer["result"] or {}).get("exit")
        agent = "alive" if answer["agent"] else "gone" if ended is None else f"ended {ended}"
        ranks = f"{len(answer['workers'])} of {host.slots}"
        written = f"{answer['age']:.0f} s ago" if answer["age"] is not None else "none"
        print(f"{line}{agent:<10}{ranks:<10}{step:<8}{written}")
    return 0


def verb_stop(words: list[str], settings: dict) -> int:
    out, name, rest = pick_run(words, "stop")
    now = "--now" in rest
    if [w for w in rest if w != "--now"]:
        raise UserError(f"stop takes --out DIR and --now, not {' '.join(rest)}")
    launch, files = read_launch(out), [out / "logs" / "stop", out / "logs" / "stop-now"]
    supervised = is_supervised(out)
    if not supervised and not is_alive(launch):
        print(f"{name} is not running: {final_state(out, launch)[0]}")
        return 0
    now = now or files[0].exists()
    print(f"Stopping {name} at once, without saving" if now else
          f"Stopping {name}: it ends its step and saves. The same once more stops it at once, without saving.",
          flush=True)  # fmt: skip
    follower = Follower(out, name)
    for file in files[: 1 + now]:
        file.touch()
    if not supervised:
        request = {"root": launch["root"], "out": launch["out"], "id": launch["id"], "now": now}
        call_all(hosts_of(launch), launch["ssh"], "stop", 20, lambda h: {**request, "label": h.label})
    on_interrupt(f"{name} is still stopping. {hints(name)[0]}")
    return follower.to_the_end()


def verb_attach(words: list[str], settings: dict) -> int:
    out, name, rest = pick_run(words, "attach")
    launch = read_launch(out)
    hosts = hosts_of(launch)
    label = rest[0] if rest else launch.get("ranks", {}).get("0", [hosts[0].label if hosts else ""])[0]
    host = next((h for h in hosts if label in (h.label, h.line)), None)
    if host is None:
        raise UserError(f"attach: {name} has no host '{label}'; it has {', '.join(h.label for h in hosts) or 'none'}")
    command = ["tmux", "attach", "-t", f"={host.session}"]
    if not host.local:
        command = [*ssh_command(host, f"-t {launch['ssh']}"), shlex.join(command)]
    os.execvp(command[0], command)
