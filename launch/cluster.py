"""The launcher on the machine where `bash launch.sh` is typed: it starts a run on all hosts, watches it, and starts it
again after a failure.

launch.sh calls the verbs. doctor.py examines hosts; node.py acts on one host. `train` checks all hosts, leaves a
supervisor behind, which is a separate process, and follows the run's log. The supervisor starts one agent on every host
and asks the hosts for their state every few seconds. It decides when the job has failed, ends it everywhere, and
relaunches it from the newest checkpoint under a new id.

`runs/NAME/status.json` has the run's state, step and message. Rank 0 writes it while it trains, the supervisor before
and after. The supervisor lives as long as it holds `logs/supervisor.lock`. It adds failures to log.txt.
`logs/launch.json` has the hosts and the attempt's id; for all verbs except train, this is the job. The file `logs/stop`
is a request to stop: rank 0 reads it, and the ranks vote. A `localhost` line is a node on this machine, which works in
the same way without ssh.

The job is relaunched as a whole because torchrun reliably regroups only in simple cases."""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(1, str(Path(__file__).parents[1]))
from base.errors import EXIT, STOP_REASON, Parser, UserError, logger, prepare_python, run_script, start_logging

if __name__ == "__main__":
    prepare_python()

from filelock import Timeout

from base.disk import LEASE, free_space, lease
from config import parse_args
from doctor import PATIENCE, Host, ask, read_job, say, survey, verb_doctor, verb_sync
from node import FOLLOWED, KILLED, START_LIMIT, read, read_json, tail, write_json

GRACE = 20  # seconds that the others have to end by themselves once a part of the job is gone
LOOK, LOOK_OVER_SSH = 0.5, 3  # seconds between two looks at a state
FULL = 2**20  # free bytes below which a disk counts as full
SUPERVISOR_LOCK = "logs/supervisor.lock"


class State(NamedTuple):
    """The state of a run: starting, running, waiting (for the next attempt), or a key of EXIT."""

    state: str
    step: int
    message: str

    def __str__(self) -> str:
        step = f" at step {self.step}" if self.step else ""
        return f"{self.state}{step}" + f": {self.message}" * bool(self.message)


def read_launch(out: Path) -> tuple[dict, list[Host]]:
    """The run's last launch: its job, as `attempt` writes it, and its hosts; both are empty without one."""
    launch = read_json(out / "logs/launch.json")
    return launch, [Host(**fields) for fields in launch.pop("hosts", [])]


def is_held(path: Path) -> bool:
    """Whether a process, on this machine or another that sees this file, holds a lock. A holder's death frees it: at
    once on the same machine, after 2 LEASE on others."""
    try:
        if time.time() - path.stat().st_mtime > 2 * LEASE:
            return False
    except OSError:  # also without its folder, which filelock would make
        return False
    lock = lease(path)
    try:
        with lock.acquire(timeout=0 if lock.owner else 3):  # filelock takes over a damaged lock after 2 s
            return False
    except (Timeout, ValueError):  # the latter: of version 0.3
        return True
    except OSError:  # a folder without write permission, or a full disk
        return lock.owner is not None


def state_of(out: Path) -> State:
    """The state of a run that a launcher, train.sbatch or the user's own torchrun started."""
    supervised = is_held(out / SUPERVISOR_LOCK)  # first: a supervisor writes status.json, then it ends
    status = read_json(out / "status.json")
    state, message = status.get("state", "running"), status.get("message") or ""
    if supervised and state in EXIT:  # rank 0 is done, but not the agents
        state, message = "running", ""
    elif not supervised and state not in EXIT and not is_held(out / "lock"):  # of the job, see job/job.py
        state, message = "failed", "dead: it ended without a message"
    return State(state, status.get("step", 0), message)


# ---- the supervisor


class Supervisor:
    """Runs the job, on all hosts or on none, to its end."""

    def __init__(self, job: dict, hosts: list[Host]):
        self.job, self.hosts, self.out = job, hosts, Path(job["out"])
        start_logging(self.out, on_screen=False)

    def write_status(self, state: str, message: str = "") -> State:
        """Writes status.json, and a failure into log.txt. A full disk is named when the attempt is judged."""
        status = State(state, read_json(self.out / "status.json").get("step", 0), message)
        more = {"exit_code": EXIT.get(state), "attempt": self.job.get("id"), "time": time.time()}
        with contextlib.suppress(OSError):
            write_json(self.out / "status.json", status._asdict() | more)
        if state == "failed":
            logger.error(status)
        return status

    def stop_requested(self) -> bool:
        message = read_json(self.out / "status.json").get("message", "")
        return STOP_REASON in message or (self.out / "logs/stop").exists()

    def run(self) -> None:
        launch = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
        saved, tries = "", 0
        for number in itertools.count():
            self.job["id"] = f"{launch}.{number}"  # attempts of one launch take over each other's lock
            end = self.attempt(first=number == 0)
            if end.state != "failed" or self.stop_requested():
                return
            manifests = self.out.glob("checkpoints/step-????????/manifest.json")
            newest = max((path.parent.name for path in manifests), default="")
            tries = 1 if newest > saved else tries + 1
            saved = max(saved, newest)
            if tries > self.job["retries"]:
                return
            pause = self.job["retry_pause"] * 2 ** (tries - 1)
            count = f"try {tries} of {self.job['retries']} without progress"
            logger.error(f"Relaunching from {newest or 'the start'} in {pause} s: {count}")
            self.write_status("waiting", end.message)
            limit = time.monotonic() + pause
            while time.monotonic() < limit and not self.stop_requested():
                time.sleep(LOOK)

    def attempt(self, first: bool) -> State:
        """One launch, to its end. If a host refuses the first start, this is the user's mistake; its silence is not."""
        if self.stop_requested():
            return self.write_status("stopped", "between two tries")
        self.write_status("starting")
        for host in self.hosts:  # a host that sees its new log folder shares the run folder
            host.last = {}
            host.session = re.sub(r"[^\w-]", "_", f"flatland-{self.out.name}-{self.job['id']}-{host.node}", flags=re.A)
            (self.out / "logs" / host.label / self.job["id"]).mkdir(parents=True)
        launch = {key: self.job[key] for key in ("out", "ssh", "id")}
        write_json(self.out / "logs/launch.json", launch | {"hosts": [asdict(host) for host in self.hosts]})
        if problems := ask(self.hosts, self.job, "start", patience=START_LIMIT + 20):
            refused = any("refused" in host.last for host in self.hosts)
            end = "error" if first and refused else "failed", "\n".join(problems)
        else:
            self.watch()
            error = first_error(self.hosts)
        ask(self.hosts, self.job, "sweep")
        return self.write_status(*(end if problems else self.judge(error)))

    def watch(self) -> None:
        """Waits until the attempt ended everywhere, a part of it failed, or a host does not answer."""
        failed_at, patience = math.inf, self.job["timeout"]
        pause = LOOK if all(h.local for h in self.hosts) else LOOK_OVER_SSH
        while any(h.last.get("processes", 1) for h in self.hosts):
            time.sleep(pause)
            ask(self.hosts, self.job, "look")
            now = time.monotonic()
            if any(h.last.get("exit", 0) != 0 for h in self.hosts):
                failed_at = min(failed_at, now)
            if now - failed_at > min(GRACE, patience) or any(now - h.heard > patience + GRACE for h in self.hosts):
                return

    def judge(self, error: dict) -> tuple[str, str]:
        """How an attempt ended: its state and message; log.txt gets the last lines of the process that failed."""
        status, stopped = read_json(self.out / "status.json"), self.stop_requested()
        if status.get("attempt") != self.job["id"]:  # another job has taken the folder
            status = {"state": "starting"}
        state, message = status.get("state"), status.get("message") or ""
        if state != "starting":
            self.job["meet"] = 120  # all have met, so their disks have what they import
        is_cause = error["order"] <= 0
        if state in ("finished", "error") or (state == "stopped" and (stopped or not is_cause)):
            return state, message
        if state == "starting" and error.get("kind") == "error":
            return "error", error["message"]
        if stopped and (state == "starting" or read(self.out / "logs/stop")):
            return "stopped", "without saving"
        if is_cause or state != "failed":
            message = error["message"]
        if output := error.get("tail", "").rstrip():
            logger.error(f"---- the end of {error['file']}\n{output}\n----")
        if free_space(self.out)[0] < FULL:
            message += f"; the disk of {self.out} is full: free some space, then run the same command again"
        return "failed", message


def first_error(hosts: list[Host]) -> dict:
    """The first of the hosts' errors. A host that does not answer is an error itself."""
    errors = [error for host in hosts for error in host.last.get("errors", [])]
    errors += [{"order": KILLED, "message": host.problem} for host in hosts if "silent" in host.last]
    errors.append({"order": FOLLOWED, "message": "it ended, and no host can name the reason"})
    return min(errors, key=lambda error: error["order"])


# ---- following a run


def wait(out: Path, *states: str) -> State:
    """Waits until the run leaves these states. Ctrl-C ends the waiting, not the run."""
    # As a KeyboardInterrupt it would be lost in a finalizer, for example of a lock.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    while (now := state_of(out)).state in states:
        if signal.sigtimedwait([signal.SIGINT], LOOK):
            say(f"\n{out} is {now.state}. {hints(out)}")
            raise KeyboardInterrupt
    return now


def follow(out: Path) -> int:
    """Shows the last lines of log.txt, and what it gets until the run is over -> the exit status."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as body:  # when it has ended, tail looks once more, and ends
        log = out.absolute() / "log.txt"
        viewer = subprocess.Popen(["tail", "-Fn50", "-s0.1", f"--pid={body.pid}", log], stderr=subprocess.DEVNULL)
        end = wait(out, "starting", "running", "waiting")
    viewer.wait()
    status = EXIT[end.state]
    say(f"{out}: {end}", sys.stderr if status else sys.stdout)
    return status


# ---- the verbs


OUT = {"metavar": "DIR", "type": Path}
FLAGS = {  # of the verbs that apply to a run
    "status": {"--out": OUT},
    "stop": {"--out": OUT, "--now": {"action": "store_true"}},
    "logs": {"--out": OUT, "which": {"nargs": "?"}},
    "attach": {"--out": OUT, "which": {"nargs": "?"}},
}


def hints(out: Path) -> str:
    run = shlex.quote(str(out))
    return f"Watch it: bash launch.sh logs --out {run}   Stop it: bash launch.sh stop --out {run}"


def verb_train(words: list[str]) -> int:
    hosts, job = read_job(words)
    config = parse_args(job["words"], trains=True)
    survey(hosts, job)
    # train.py's own check, on the first host
    done = hosts[0].call(job, "run", PATIENCE, command=job["check"])
    if hosts[0].problem:
        raise UserError(hosts[0].problem)
    say(done["err"], sys.stderr, end="")
    lines = done["out"].splitlines()
    about = {} if done["exit"] else json.loads(lines.pop())
    say("".join(f"{line}\n" for line in lines), end="")
    if done["exit"] or config.check or about["state"] == "finished":
        return abs(done["exit"])
    out = Path(config.out)
    job |= {"out": str(out.absolute()), "timeout": float(config.timeout)}
    if state_of(out).state not in EXIT:
        raise UserError(f"{out} is being trained already. {hints(out)}")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    (out / "logs/stop").unlink(missing_ok=True)
    leave_behind(Supervisor(job, hosts))
    if wait(out, "starting").state == "running":
        say(f"Started {out} on {', '.join(h.label for h in hosts)}. {hints(out)}")
        if job["detach"] or (len(hosts) > 1 and not sys.stdout.isatty()):
            return 0
    return follow(out)


def leave_behind(supervisor: Supervisor) -> None:
    """Starts the supervisor as a separate process, and waits until it has its lock."""
    supervisor.write_status("starting")
    log = open(supervisor.out / "logs/supervisor.stderr.log", "ab")  # noqa: SIM115
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os.read(reader, 1)  # until the other process has closed it
        return
    os.setsid()
    for stream in range(3):
        os.dup2(log.fileno(), stream)
    try:
        with lease(supervisor.out / SUPERVISOR_LOCK).acquire(timeout=2 * LEASE):
            os.close(writer)
            supervisor.run()
    except Exception as e:
        supervisor.write_status("failed", f"the launcher failed: {e!r}")
    os._exit(0)


def verb_logs(out: Path, flags: argparse.Namespace) -> int:
    if flags.which is None:
        return follow(out)
    launch, host = find_host(out, flags.which)
    files = (out / "logs" / host.label / launch["id"]).glob("**/*.log")
    return subprocess.call(["tail", "-vn50", *sorted(files)])


def find_host(out: Path, which: str | None) -> tuple[dict, Host]:
    """The job of the run's last launch, and its host of this label or name, or the first one."""
    launch, hosts = read_launch(out)
    for host in hosts:
        if which in (None, host.label, host.name):
            return launch, host
    raise UserError(f"no host '{which or ''}' in this run: bash launch.sh status")


def verb_status(out: Path, flags: argparse.Namespace) -> None:
    launch, hosts = read_launch(out)
    say(f"{out}: {state_of(out)}\n{tail(out / 'log.txt', 1)}", end="")
    ask(hosts, launch, "look", gpus=True)
    say("processes, load in % and memory in MiB of each GPU")
    for host in hosts:
        answer = {"processes": "?", "gpus": [host.problem]} | host.last
        say("; ".join([f"{host.label}: {answer['processes']}", *answer["gpus"]]))


def verb_stop(out: Path, flags: argparse.Namespace) -> int:
    launch, hosts = read_launch(out)
    request_file = out / "logs/stop"
    if state_of(out).state not in EXIT:
        at_once = flags.now or request_file.exists()
        say(f"Stopping {out} at once" if at_once else f"{out} ends its step and saves; once more stops it at once")
        with contextlib.suppress(OSError):  # a full disk takes no text; the processes are killed below
            request_file.write_text("now" * at_once)
        if at_once:
            ask(hosts, launch, "sweep")
    return follow(out)


def verb_attach(out: Path, flags: argparse.Namespace) -> int:
    launch, host = find_host(out, flags.which)
    command = ["tmux", "attach", "-t", f"={host.session}"]
    return subprocess.call(command if host.local else [*host.ssh(f"-t {launch['ssh']}"), shlex.join(command)])


ON_HOSTS = {
    "train": verb_train,
    "doctor": verb_doctor,
    "sync": verb_sync,
}
ON_A_RUN = {
    "logs": verb_logs,
    "status": verb_status,
    "stop": verb_stop,
    "attach": verb_attach,
}


def main(words: list[str]) -> int | None:
    verb, *words = words
    if verb in ON_HOSTS:
        return ON_HOSTS[verb](words)
    flags, runs = Parser(FLAGS[verb], add_help=False).parse_args(words), Path("runs")
    # without --out the run that was last launched or last wrote its status
    out = flags.out or max(runs.glob("*/"), key=lambda run: read_json(run / "status.json").get("time", 0), default=runs)
    if not (out / "status.json").exists():
        raise UserError(f"{out} is not a run folder: give --out DIR")
    return ON_A_RUN[verb](out, flags)


if __name__ == "__main__":
    run_script(main)
