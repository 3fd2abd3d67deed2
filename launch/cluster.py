"""The launcher on the machine where `bash launch.sh` is typed: it starts a run on all hosts, watches it to its end, and
starts it again.

launch.sh calls the verbs. doctor.py examines hosts; node.py acts on one. `train` checks all hosts, leaves a supervisor
behind, which is a separate process, and follows the run's log. The supervisor starts one agent on every host and
asks the hosts for their state every few seconds. It decides when the job has failed, ends it everywhere, and
relaunches it from the newest checkpoint under a new rendezvous id.

A run's state is in two files. Rank 0 writes `runs/NAME/status.json`: state, step and message of the training. The
supervisor writes `logs/launch.json`: hosts, attempt, and how the launch ended; `logs/launch.log` has the failures. The
file `logs/stop` is a request to stop: rank 0 reads it, and the ranks vote. A `localhost` line is a node on this
machine, which works in the same way without ssh. launch.json is the job of the verbs other than train.

The job is relaunched as a whole because an elastic torchrun regroups reliably only in the easy cases."""

import contextlib
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

sys.path.insert(1, str(Path(__file__).parents[1]))
from filelock import SoftFileLease, Timeout

from config import parse_args
from doctor import (
    Host,
    Unreachable,
    call_all,
    columns,
    explain,
    explain_all,
    read_job,
    refuse,
    run_checks,
    say,
    ssh_command,
    survey,
    verb_doctor,
    verb_sync,
)
from lib.errors import ROOT, Parser, UserError, missing_folders, remove_empty, run_script
from node import FOLLOWED, KILLED, read, read_json, tail, write_whole

GRACE = 20  # seconds that the others have to end by themselves once a part of the job is gone
LOOK, LOOK_OVER_SSH = 0.5, 3  # seconds between two looks at a state
NOW = 10  # seconds that rank 0 has to end a run that is stopped at once, before its processes are killed
STOP_REASON = "launch.sh stop"  # as lib/run.py writes it into status.json
ENDED = ("finished", "stopped", "error", "failed")
ROOM = 2**20  # free bytes below which a disk counts as full


class End(NamedTuple):
    """The end of an attempt or of the run."""

    state: str
    step: int
    message: str
    report: str = ""  # the report of a failure
    silent: tuple = ()  # the hosts that do not answer


@dataclass
class Node:
    """A host in an attempt: its last answer to `look`, and the time of that answer."""

    host: Host
    last: dict = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)


def check(host: Host, job: dict, total: int) -> bool:
    """Says what train.py's own check finds, and exits with its status where it refuses -> whether there is something
    left to train."""
    [done] = run_checks([host], job, total)
    refuse(explain_all([host], [done]))
    say(re.sub(r"^[a-z_]+=.*\n", "", done["out"], flags=re.M), end="")
    say(done["err"], sys.stderr, end="")
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
    free = shutil.disk_usage(out).free
    return f"the disk of {out} is full ({free} bytes left): free some space there, and launch again" * (free < ROOM)


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

    def run(self) -> None:
        job, saved, tries, report = self.job, last_saved(self.out), 0, ""
        while True:
            end = self.attempt()
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
            self.wait_for_hosts()
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

    def wait_for_hosts(self) -> None:
        """Waits until all hosts answer, at most host_wait seconds."""
        end = time.monotonic() + self.job["host_wait"]
        while any(isinstance(a, Unreachable) for a in self.ask("probe")):
            if time.monotonic() > end or self.stop_requested():
                break
            self.wait(2)

    def without(self, silent: tuple) -> str:
        """The command that continues with the other hosts."""
        others = ",".join(h.line for h in self.hosts if h not in silent)
        sentence = f"{', '.join(h.label for h in silent)} did not come back"
        if not others:
            return sentence
        words = [*self.job["words"], "--out", self.job["out"]]
        if tokens := read_json(self.out / "flags.json").get("batch_tokens"):
            words += ["--batch_tokens", str(tokens)]
        if self.job["nproc"]:
            words = ["--nproc", str(self.job["nproc"]), *words]
        command = shlex.join(["bash", "launch.sh", "--hosts", others, *words])
        return f"{sentence}. To continue from the newest checkpoint with the others:\n  {command}"

    def attempt(self) -> End:
        """One launch, to its end. A host that refuses the first attempt is the user's mistake."""
        first, tries = self.hosts[0], self.launch.get("attempt", 0) + 1
        self.job["id"] = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
        previous = read_json(self.out / "status.json").get("attempt", "")
        self.save(id=self.job["id"], previous=previous, state="starting", attempt=tries)
        endpoint = f"[{first.address}]" if ":" in first.address else first.address
        more = {"nodes": len(self.hosts), "endpoint": f"{endpoint}:{first.facts['port']}", "clear": tries > 1}
        answers = self.ask("start", self.job["start_limit"] + 20, **more)
        if problems := explain_all(self.hosts, answers):
            self.ask("sweep")
            silent = tuple(h for h, a in zip(self.hosts, answers, strict=True) if isinstance(a, Unreachable))
            report = "\n".join(problems)
            return End("failed", 0, problems[0], report, silent) if silent or tries > 1 else End("error", 0, report)
        self.save(message="", place=min(a["place"] for a in answers), pid=answers[0]["pid"])
        return self.watch()

    def status(self) -> dict:
        """What rank 0 of this attempt has written."""
        status = read_json(self.out / "status.json")
        return status if status.get("attempt") == self.launch.get("id") else {}

    def update(self, nodes: list[Node], operation: str) -> None:
        for node, answer in zip(nodes, self.ask(operation), strict=True):
            if isinstance(answer, dict):
                node.last, node.heard = answer, time.monotonic()

    def watch(self) -> End:
        """Waits until the attempt has ended everywhere, a part of it has failed, or a host does not answer."""
        nodes, failing, silent, patience = [Node(h) for h in self.hosts], 0.0, [], self.job["timeout"]
        pause = LOOK if all(h.local for h in self.hosts) else LOOK_OVER_SSH
        while not silent and not all(n.last.get("over") for n in nodes):
            time.sleep(pause)
            self.update(nodes, "look")
            now, state = time.monotonic(), self.status().get("state")
            if state and self.launch["state"] == "starting":
                self.save(state="running")
            silent = [n for n in nodes if now - n.heard > patience + GRACE]
            failing = (failing or now) if any(n.last.get("hurt") for n in nodes) else 0.0
            if failing and now - failing > min(GRACE, patience) * (3 if state in ("finished", "stopped") else 1):
                break
        now = time.monotonic()
        self.update(nodes, "sweep")
        return self.judge(nodes, [n for n in nodes if n in silent or n.heard < now])

    def judge(self, nodes: list[Node], silent: list[Node]) -> End:
        """How an attempt ended, and why."""
        status, stopped, cause = self.status(), self.stop_requested(), first_cause(nodes, silent)
        state, step, message = status.get("state"), status.get("step") or 0, status.get("message") or ""
        if state in ("finished", "error") or (state == "stopped" and (stopped or cause["sure"] == FOLLOWED)):
            return End(state, step, message)
        if not state and {w.last.get("result", {}).get("exit") for w in nodes} == {0}:
            return End("finished", 0, "")  # an earlier launch had done all
        if not state and cause.get("status") == 2:
            errors = re.findall(r"^error: (.*)", cause["tail"].rstrip(), re.M | re.S)
            return End("error", 0, errors[-1] if errors else cause["tail"].rstrip())
        if stopped and not state:
            return End("stopped", 0, "stopped before it had begun")
        if stopped and read(self.out / "logs" / "stop"):
            return End("stopped", step, "stopped at once, without saving")
        return self.failure(End(state, step, message), cause, silent)

    def failure(self, last: End, cause: dict, silent: list[Node]) -> End:
        """last: what rank 0 has written."""
        last_words = cause.get("tail", "").rstrip()
        what = "; ".join(filter(None, (cause["what"], full_disk(self.out))))
        report = f"---- the end of {cause['file']}\n{last_words}\n----\n" if last_words else ""
        if last.state == "failed" and cause["sure"] > KILLED and last.message not in report:
            report += last.message + "\n"
        report += f"{self.job['out']}: failed{at(last.step)}: {what}"
        return End("failed", last.step, what, report, tuple(w.host for w in silent))


def first_cause(nodes: list[Node], silent: list[Node]) -> dict:
    """The earliest of the surest causes that hosts report; a host that does not answer is a cause itself."""
    causes, now = [], time.monotonic()
    for w in nodes:
        result = w.last.get("result", {})
        if w in silent:
            what = f"{w.host.label} has not answered for {now - w.heard:.0f} s"
            causes.append((w.heard, {"sure": KILLED, "what": what}))
        elif result.get("cause"):
            causes.append((w.heard - result["ago"], result["cause"]))
    nothing = {"sure": FOLLOWED, "what": "it ended, and no host can say why"}
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
        while (end := state_of(self.out)).state not in ENDED:
            self.show_new()
            time.sleep(LOOK)
        self.show_new()
        return self.conclude(end)

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


def pick_run(verb: str, words: list[str], now: bool = False, which: bool = False) -> tuple:
    """The run of --out DIR; without it the run that was last launched or last wrote its status. now, which: the verb
    takes --now; a host or a rank. -> (folder, its name as typed, the flags)"""
    parser = Parser(prog=f"launch.sh {verb}", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", metavar="DIR")
    if now:
        parser.add_argument("--now", action="store_true")
    if which:
        parser.add_argument("which", nargs="?", default="")
    flags, runs = parser.parse_args(words), sorted((ROOT / "runs").glob("*/"))
    if not flags.out and not runs:
        raise UserError("There is no run in runs/ yet. Start one: bash launch.sh")
    name = flags.out or str(max(runs, key=last_used).relative_to(ROOT))
    if not (ROOT / name).is_dir():
        listed = ", ".join(r.name for r in runs) or "nothing"
        raise UserError(f"--out {name}: there is no such run folder. In runs/: {listed}")
    return ROOT / name, name.rstrip("/"), flags


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
        if flags.detach or (len(hosts) > 1 and not sys.stdout.isatty()):
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
    follower, supervisor = Follower(out, job["out"]), Supervisor(job, hosts)
    supervisor.save(id=job["mark"], state="starting", launched=time.time())
    pid = leave_behind(supervisor)
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


def leave_behind(supervisor: Supervisor) -> int:
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
            supervisor.run()
    except Exception as e:
        supervisor.save(state="failed", message=f"the launcher failed: {type(e).__name__}: {e}", report="")
        raise
    os._exit(0)


def verb_logs(words: list[str], settings: dict) -> int:
    out, name, flags = pick_run("logs", words, which=True)
    on_interrupt(f"{name} continues. {hints(name)}")
    return Follower(out, name, 20 if flags.which else 50, flags.which).to_the_end()


def find_host(launch: dict, label: str, problem: str) -> Host:
    for host in hosts_of(launch):
        if label in ("", host.label, host.line):
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
    launch, end = read_launch(out), state_of(out)
    batches = re.findall(r"Batch \d+ Loss.*", tail(out / "log.txt", 200))
    rows = {
        "run": name,
        "state": end.state,
        "step": end.step or "",
        "message": end.message.partition("\n")[0],
        "attempt": launch.get("attempt", ""),
        "place": launch.get("place", ""),
        "last batch": batches[-1] if batches else "",
    }
    say(columns([[key, str(value)] for key, value in rows.items()]))
    if hosts := hosts_of(launch):
        table = map(host_row, hosts, call_all(hosts, launch, "look", 20, gpus=True))
        say(columns([("host", "session", "agent", "ranks", "GPU load", "GPU memory"), *table]))


def host_row(host: Host, answer: dict | Exception) -> tuple:
    """A host's line in the table of `status`."""
    if isinstance(answer, Exception):
        return host.label, host.session, explain(host, answer)
    status, gpus = answer["result"].get("exit"), [list(map(float, gpu.split(","))) for gpu in answer["gpus"]]
    agent = "alive" if answer["agent"] else f"ended {status}" if status is not None else "gone"
    load = f"{sum(gpu[0] for gpu in gpus) / len(gpus):.0f} %" if gpus else ""
    memory = "{:.0f} of {:.0f} GiB".format(*(sum(gpu[i] for gpu in gpus) / 1024 for i in (1, 2))) if gpus else ""
    return host.label, host.session, agent, f"{answer['workers']} of {host.slots}", load, memory


def verb_stop(words: list[str], settings: dict) -> int:
    out, name, flags = pick_run("stop", words, now=True)
    launch, end, request_file = read_launch(out), state_of(out), out / "logs" / "stop"
    if end.state in ENDED:
        say(f"{name} is not running: {end.state}")
        return 0
    now = flags.now or request_file.exists()
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
    out, name, flags = pick_run("attach", words, which=True)
    launch, state = read_launch(out), state_of(out).state
    host = find_host(launch, flags.which, f"attach: {name} has no host")
    if state in ENDED or "tmux" not in launch.get("place", "tmux"):
        why = f"is not running: {state}" if state in ENDED else "runs without tmux"
        raise UserError(f"{name} {why}; see its log: bash launch.sh logs --out {shlex.quote(name)}")
    command = ["tmux", "attach", "-t", f"={host.session}"]
    if not host.local:
        command = [*ssh_command(host, f"-t {launch['ssh']}"), shlex.join(command)]
    os.execvp(command[0], command)


def main(argv: list[str]) -> int | None:
    """What launch.sh calls: NAME=SETTING ... -- VERB WORDS."""
    split = argv.index("--")
    settings = dict(word.split("=", 1) for word in argv[:split])
    settings |= {name: int(value) for name, value in settings.items() if value.isdigit()}
    verbs = (verb_train, verb_logs, verb_status, verb_stop, verb_top, verb_attach, verb_doctor, verb_sync)
    verb = next(verb for verb in verbs if verb.__name__ == f"verb_{argv[split + 1]}")
    return verb(argv[split + 2 :], settings)


if __name__ == "__main__":
    run_script(main)
