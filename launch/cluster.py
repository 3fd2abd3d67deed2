"""The launcher on the machine where `bash launch.sh` is typed: it starts a run on all hosts, watches it, and starts it
again after a failure.

launch.sh calls the verbs. doctor.py examines hosts; node.py acts on one host. `train` checks all hosts, leaves a
supervisor behind, which is a separate process, and follows the run's log. The supervisor starts one agent on every host
and asks the hosts for their state every few seconds. It decides when the job has failed, ends it everywhere, and
relaunches it from the newest checkpoint under a new id.

Rank 0 writes `runs/NAME/status.json`: state, step and message of the run. At the end of an attempt, the supervisor
writes it, too. `logs/launch.json` has the hosts and the attempt's id, and the state while the supervisor lives, which
holds `logs/supervisor.lock`; `logs/launch.log` has the failures. The file `logs/stop` is a request to stop: rank 0
reads it, and the ranks vote. A `localhost` line is a node on this machine, which works in the same way without ssh. For
all verbs except train, launch.json is the job.

The job is relaunched as a whole because torchrun reliably regroups only in simple cases."""

import argparse
import contextlib
import hashlib
import math
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(1, str(Path(__file__).parents[1]))
from filelock import SoftFileLease, Timeout

from config import parse_args
from doctor import (
    PATIENCE,
    Host,
    ask,
    call,
    check_command,
    columns,
    problem,
    read_job,
    say,
    ssh_command,
    survey,
    verb_doctor,
    verb_sync,
)
from lib.errors import Parser, UserError, printable, run_script
from lib.files import FULL, ROOT, fill_old_lock, free_space
from node import FOLLOWED, KILLED, SILENT, read, read_json, tail, write_json

GRACE = 20  # seconds that the others have to end by themselves once a part of the job is gone
LOOK, LOOK_OVER_SSH = 0.5, 3  # seconds between two looks at a state
STOP_REASON = "launch.sh stop"  # as lib/run.py writes it into status.json
SUPERVISOR_LOCK = "logs/supervisor.lock"
ENDED = ("finished", "stopped", "error", "failed")
EXIT = {"failed": 1, "error": 2}  # statuses of states; others have 0


class End(NamedTuple):
    """The end of an attempt or of the run."""

    state: str
    step: int
    message: str

    def __str__(self) -> str:
        step = f" at step {self.step}" if self.step else ""
        return f"{self.state}{step}" + f": {self.message}" * bool(self.message)


def check(host: Host, job: dict, total: int) -> bool:
    """Prints the output of train.py's own check on a host, and exits with its status if it refuses -> whether there is
    something left to train."""
    done = call(host, job, "run", PATIENCE, command=check_command(job, total))
    if error := problem(host, done):
        raise UserError(error)
    say(re.sub(r"^[a-z_]+=.*\n", "", done["out"], flags=re.M), end="")
    say(done["err"], sys.stderr, end="")
    if done["exit"]:
        sys.exit(abs(done["exit"]))
    return "state=finished\n" not in done["out"]


def is_held(path: Path) -> bool:
    """Whether a process, on this machine or another that sees this file, holds a lock. A holder's death frees it: at
    once on the same machine, after 30 s on others."""
    fill_old_lock(path)
    lock = SoftFileLease(path)
    try:
        with lock.acquire(timeout=0 if lock.owner else 3):  # filelock takes over a damaged lock after 2 s
            return False
    except Timeout:
        return True
    except OSError:  # a folder without write permission, or a full disk
        return lock.owner is not None


def read_launch(out: Path) -> dict:
    return read_json(out / "logs/launch.json")


def hosts_of(launch: dict) -> list[Host]:
    return [Host(**h) for h in launch.get("hosts", [])]


# ---- the supervisor


class Supervisor:
    """Runs the job, on all hosts or on none, to its end."""

    def __init__(self, job: dict, hosts: list[Host]):
        self.job, self.hosts, self.out = job, hosts, Path(job["out"])
        self.launch = {"out": job["out"], "ssh": job["ssh"], "hosts": [asdict(h) for h in hosts]}

    def save(self, **values) -> None:
        """Writes launch.json. If the disk is full, the next call tries again."""
        self.launch |= values | {"time": time.time()}
        with contextlib.suppress(OSError):
            write_json(self.out / "logs/launch.json", self.launch)

    def report(self, words: str) -> None:
        """Appends to launch.log."""
        with contextlib.suppress(OSError), open(self.out / "logs/launch.log", "a") as log:
            log.write(words)

    def stop_requested(self) -> bool:
        return (self.out / "logs/stop").exists() or STOP_REASON in self.status().get("message", "")

    def ask(self, operation: str, *patience: float, **more) -> list[str]:
        return ask(self.hosts, self.job, operation, *patience, **more)

    def silent(self) -> list[Host]:
        """The hosts that have not answered."""
        return [host for host in self.hosts if "silent" in host.last]

    def run(self) -> None:
        job, saved, tries = self.job, last_saved(self.out), 0
        while (end := self.attempt()).state == "failed" and not self.stop_requested():
            newest = last_saved(self.out)
            if newest > saved:
                saved, tries = newest, 0
            if tries == job["retries"]:
                self.report(
                    f"Gave up after {tries} tries without progress\n" * bool(tries) + self.without(self.silent())
                )
                break
            pause = job["retry_pause"] * 2**tries
            tries += 1
            start = newest or "the start"
            self.report(f"{end}\nRelaunching from {start} in {pause} s: try {tries} of {job['retries']}\n")
            self.save(state="waiting", message=end.message)
            begin = time.monotonic()
            while not self.stop_requested() and time.monotonic() - begin < job["host_wait"]:
                if time.monotonic() - begin > pause and not (self.ask("look") and self.silent()):
                    break
                time.sleep(LOOK)

    def without(self, silent: list) -> str:
        """The command that continues without these hosts."""
        others = ",".join(h.name for h in self.hosts if h not in silent)
        if not silent or not others:
            return ""
        batch_tokens = read_json(self.out / "flags.json").get("batch_tokens", 0)
        words = ["--hosts", others, *self.job["words"], "--out", self.job["out"], "--batch_tokens", str(batch_tokens)]
        names = ", ".join(h.label for h in silent)
        return f"{names} did not come back. To continue with the others:\n  bash launch.sh {shlex.join(words)}\n"

    def attempt(self) -> End:
        """One launch, to its end. A host that refuses the first attempt is the user's mistake."""
        if self.stop_requested():
            return self.end("stopped", "between two tries")
        first, self.job["id"] = "id" not in self.launch, time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
        self.save(id=self.job["id"], state="starting", message="")
        for host in self.hosts:  # a host that sees its new log folder shares the run folder
            host.silence = ""
            (self.out / "logs" / host.label / self.job["id"]).mkdir(parents=True)
        more = {"nodes": len(self.hosts), "first": self.hosts[0].address}
        if problems := self.ask("start", self.job["start_limit"] + 20, **more):
            state = "error" if first and not self.silent() else "failed"
            self.ask("sweep")
            return self.end(state, "\n".join(problems))
        return self.end(*self.watch())

    def status(self) -> dict:
        """What rank 0 of this attempt has written."""
        status = read_json(self.out / "status.json")
        return status if status.get("attempt") == self.launch.get("id") else {}

    def watch(self) -> tuple[str, str]:
        """Waits until the attempt ended everywhere, a part of it failed, or a host does not answer."""
        failed, patience = math.inf, self.job["timeout"]
        pause = LOOK if all(h.local for h in self.hosts) else LOOK_OVER_SSH
        while any(h.last.get("processes", 1) for h in self.hosts):
            time.sleep(pause)
            self.ask("look")
            if self.launch["state"] == "starting" and self.status():
                self.save(state="running")
            now = time.monotonic()
            if any(h.last.get("exit", 0) != 0 for h in self.hosts):
                failed = min(failed, now)
            if now - failed > min(GRACE, patience) or any(now - h.heard > patience + GRACE for h in self.hosts):
                break
        cut = self.silent()
        self.ask("sweep")
        return self.judge(cut)

    def judge(self, cut: list[Host] = ()) -> tuple[str, str]:
        """How an attempt ended: its state and message; launch.log gets details. cut: the hosts that did not answer."""
        status, stopped, cause = self.status(), self.stop_requested(), first_cause(self.hosts, cut)
        state, message = status.get("state"), status.get("message") or ""
        if state in ("finished", "error") or (state == "stopped" and (stopped or cause["order"] >= SILENT)):
            return state, message
        words = cause.get("tail", "").rstrip()
        if cause.get("status") == 2 and not state:
            return "error", words.rpartition("error: ")[2]
        if stopped and (not state or read(self.out / "logs/stop")):
            return "stopped", "without saving"
        details = f"---- the end of {cause['file']}\n{words}\n----\n" if words else ""
        what, error = cause["what"], cause.get("error", "")
        if error:
            text = error.partition(": ")[2]  # without the type; a rank's report, if it is a Message
            what = message if text in message else text if text.startswith("rank ") else f"{what}: {error}"
        if state == "failed" and message not in details + what:
            details += message + "\n"
        if free_space(self.out)[0] < FULL:
            what += f"; the disk of {self.out} is full: free some space, then run the same command again"
        self.report(details)
        return "failed", what

    def end(self, state: str, message: str) -> End:
        """Writes an attempt's end into status.json, and a failure into log.txt: ranks that were killed, or that failed
        because another one did, have written nothing, or something else."""
        status = read_json(self.out / "status.json")
        end = End(state, status.get("step", 0), message)
        status |= end._asdict() | {"exit_code": EXIT.get(state, 0), "attempt": self.job.get("id"), "time": time.time()}
        prefix = time.strftime("%Y-%m-%d %H:%M:%S E [cluster.py] ")
        with contextlib.suppress(OSError):
            write_json(self.out / "status.json", status)
            if state == "failed":
                with open(self.out / "log.txt", "a") as log:
                    log.write(prefix + printable(end).replace("\n", "\n" + prefix) + "\n")
        return end


def first_cause(hosts: list[Host], cut: list[Host] = ()) -> dict:
    """The most likely first cause among the reports of the hosts. A host that did not answer is a cause itself, also if
    it answers again; an earlier silence counts only if nothing else explains the end."""
    causes = [host.last["cause"] for host in hosts if host.last.get("cause")]
    for host in hosts:
        if what := host.silence or problem(host, host.last):
            causes.append({"order": KILLED if host in cut or "silent" in host.last else SILENT, "what": what})
    causes.append({"order": FOLLOWED, "what": "it ended, and no host can name the reason"})
    return min(causes, key=lambda cause: cause["order"])


def last_saved(out: Path) -> str:
    """The name of a run's newest checkpoint; empty if there is none."""
    return max((path.parent.name for path in out.glob("checkpoints/step-????????/manifest.json")), default="")


# ---- following a run


class Follower:
    """Shows new lines of log.txt and launch.log."""

    def __init__(self, out: Path):
        self.out, self.files = out, {out / "log.txt": sys.stdout, out / "logs/launch.log": sys.stderr}
        self.offsets = {path: path.stat().st_size if path.exists() else 0 for path in self.files}

    def show_new(self) -> None:
        for path, stream in self.files.items():
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(self.offsets[path])
                text = file.read().decode(errors="replace")
                self.offsets[path] = file.tell()
                if stream.isatty():
                    text = re.sub(r"^[\d-]{10} [\d:]{8} [A-Z] \[[^\]]*\] ", "", text, flags=re.M)
                say(text, stream, end="")

    def to_the_end(self) -> int:
        """Follows until the run is over -> the exit status. Ctrl-C ends the following, not the run."""
        try:
            while (end := state_of(self.out)).state not in ENDED:
                self.show_new()
                time.sleep(LOOK)
        except KeyboardInterrupt:
            say(f"\n{self.out} is {end.state}. {hints(self.out)}")
            return 130
        self.show_new()
        status = EXIT.get(end.state, 0)
        text = f"error: {end.message}" if status == 2 else f"{self.out}: {end}"
        say(text, sys.stderr if status else sys.stdout)
        return status


def state_of(out: Path) -> End:
    """The state of a run that a launcher, train.sbatch or the user's own torchrun started."""
    supervised = is_held(out / SUPERVISOR_LOCK)  # first: a supervisor writes status.json, then it ends
    launch, status = read_launch(out), read_json(out / "status.json")
    step = status.get("step") or 0
    if supervised:
        return End(launch.get("state", "starting"), step, launch.get("message", ""))
    if status.get("state") in ENDED:
        return End(status["state"], step, status.get("message", ""))
    if is_held(out / "lock"):  # of the job, see lib/run.py
        launched = launch.get("id", "") == status.get("attempt")
        return End("running", step, "but its launcher is gone: nobody would relaunch it" * launched)
    return End("failed", step, "dead: it ended without a message")


# ---- the verbs


def pick_run(verb: str, words: list[str]) -> tuple[Path, argparse.Namespace]:
    """The run of --out DIR; without it the run that was last launched or last wrote its status -> (folder, flags)"""
    parser = Parser(prog=f"launch.sh {verb}", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", metavar="DIR", type=Path)
    if verb == "stop":
        parser.add_argument("--now", action="store_true")
    if verb in ("logs", "attach"):
        parser.add_argument("which", nargs="?", default="")
    flags = parser.parse_args(words)
    out = flags.out or max(Path("runs").glob("*/"), key=last_used, default=None)
    if not out or not out.is_dir():
        raise UserError(f"{Path.cwd()} has no run {out or 'runs/*'}. Give --out DIR, or start one: bash launch.sh")
    return out, flags


def last_used(run: Path) -> float:
    return max(read_launch(run).get("time", 0.0), read_json(run / "status.json").get("time", 0.0))


def hints(out: Path) -> str:
    run = shlex.quote(str(out))
    return f"Watch it: bash launch.sh logs --out {run}   Stop it: bash launch.sh stop --out {run}"


def verb_train(words: list[str], settings: dict) -> int:
    flags, hosts, job = read_job(words, settings)
    config = parse_args(job["words"], trains=True)
    survey(hosts, job)
    if not check(hosts[0], job, sum(h.slots for h in hosts)) or config.check >= 0:
        return 0
    out = Path(config.out)
    job |= {"out": str(out.absolute()), "timeout": float(config.timeout)}
    for host in hosts:
        host.session = session_of(out, host.node)
    if state_of(out).state not in ENDED:
        raise UserError(f"{out} is being trained already. {hints(out)}")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    (out / "logs/stop").unlink(missing_ok=True)
    follower = Follower(out)
    pid = leave_behind(Supervisor(job, hosts))
    while (state := read_launch(out)["state"]) == "starting" and os.waitpid(pid, os.WNOHANG) == (0, 0):
        time.sleep(0.1)
    if state == "running":
        say(f"Started {out} on {', '.join(h.label for h in hosts)}; log in {out}/log.txt")
        if flags.detach or (len(hosts) > 1 and not sys.stdout.isatty()):
            say(hints(out))
            return 0
    return follower.to_the_end()


def session_of(out: Path, number: int) -> str:
    """The tmux session of a run's n-th node. The hash of the checkout's and the run's path makes it this run's alone:
    other checkouts have runs of the same name."""
    path = hashlib.sha256(f"{ROOT.resolve()}\n{out.resolve()}".encode()).hexdigest()
    name = re.sub(r"[^\w-]", "_", f"flatland-{out.name}", flags=re.A)
    return f"{name}-{path[:6]}" + f"-{number}" * (number > 0)


def leave_behind(supervisor: Supervisor) -> int:
    """Starts the supervisor as a separate process -> its id."""
    supervisor.save(state="starting")
    log = open(supervisor.out / "logs/supervisor.stderr.log", "ab")  # noqa: SIM115
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    for stream in range(3):
        os.dup2(log.fileno(), stream)
    try:
        with SoftFileLease(supervisor.out / SUPERVISOR_LOCK).acquire(timeout=60):
            supervisor.run()
    except Exception as e:
        supervisor.end("failed", f"the launcher failed: {e!r}")
    os._exit(0)


def verb_logs(out: Path, flags: argparse.Namespace) -> int:
    if flags.which:
        follow = [] if state_of(out).state in ENDED else ["-F"]
        os.execvp("tail", ["tail", "-n", "20", *follow, "--", *map(str, output_files(out, flags.which))])
    follower = Follower(out)
    for path, stream in follower.files.items():
        say(tail(path, 50), stream, end="")
    return follower.to_the_end()


def find_host(launch: dict, label: str) -> Host:
    for host in hosts_of(launch):
        if label in ("", host.label, host.name):
            return host
    raise UserError(f"launch.sh started no host '{label}' for this run; `bash launch.sh status` lists them")


def output_files(out: Path, which: str) -> list[Path]:
    """The output files of one host, or of one rank, in the newest attempt. The ranks are in the order of the hosts."""
    launch = read_launch(out)
    ranks = [(h, f"*/attempt_*/{i}/*.log") for h in hosts_of(launch) for i in range(h.slots)]
    if which.isdigit() and int(which) < len(ranks):
        host, pattern = ranks[int(which)]
    else:
        host, pattern = find_host(launch, which), "**/*.log"
    return sorted((out / "logs" / host.label / launch["id"]).glob(pattern))


def verb_status(out: Path, flags: argparse.Namespace) -> None:
    launch, end = read_launch(out), state_of(out)
    batches = re.findall(r"Batch \d+ Loss.*", tail(out / "log.txt", 200))
    rows = {"run": str(out), "state": end.state, "step": str(end.step), "message": end.message}
    say(columns([*rows.items(), ("last batch", "".join(batches[-1:]))]))
    if hosts := hosts_of(launch):
        ask(hosts, launch, "look", gpus=True)
        say(columns([("host", "session", "ranks", "load in %, memory in MiB of each GPU"), *map(host_row, hosts)]))


def host_row(host: Host) -> tuple:
    """A host's line in the table of `status`."""
    answer = host.last
    if error := problem(host, answer):
        return host.label, host.session, "?", error
    ranks = f"ended {answer['exit']}" if "exit" in answer else f"{answer['ranks']} of {host.slots}"
    return host.label, host.session, ranks, "; ".join(answer["gpus"])


def verb_stop(out: Path, flags: argparse.Namespace) -> int:
    launch, end, request_file = read_launch(out), state_of(out), out / "logs/stop"
    if end.state in ENDED:
        say(f"{out} is not running: {end.state}")
        return 0
    now = flags.now or request_file.exists()
    how = " at once, without saving" if now else ": it ends its step and saves. The same once more stops it at once."
    say(f"Stopping {out}{how}")
    follower = Follower(out)
    with contextlib.suppress(OSError):  # a full disk takes no text; the processes are killed below
        request_file.parent.mkdir(exist_ok=True)
        request_file.write_text("now" * now)
    if now:
        ask(hosts_of(launch), launch, "sweep")
    return follower.to_the_end()


def verb_attach(out: Path, flags: argparse.Namespace) -> None:
    launch = read_launch(out)
    host = find_host(launch, flags.which)
    command = f"tmux attach -t ={host.session}"
    if not host.local:
        command = shlex.join([*ssh_command(host, f"-t {launch['ssh']}"), command])
    if state_of(out).state in ENDED or subprocess.call(command, shell=True):
        raise UserError(f"{out} has no tmux session there. {hints(out)}")


VERBS = {
    "train": verb_train,
    "doctor": verb_doctor,
    "sync": verb_sync,
    "logs": verb_logs,
    "status": verb_status,
    "stop": verb_stop,
    "attach": verb_attach,
}


def main(argv: list[str]) -> int | None:
    """launch.sh calls it with: NAME=SETTING ... -- VERB WORDS."""
    split = argv.index("--")
    pairs = (word.split("=", 1) for word in argv[:split])
    settings = {name: int(value) if value.isdigit() else value for name, value in pairs}
    verb, *words = argv[split + 1 :]
    if verb in ("train", "doctor", "sync"):
        return VERBS[verb](words, settings)
    return VERBS[verb](*pick_run(verb, words))


if __name__ == "__main__":
    run_script(main)
