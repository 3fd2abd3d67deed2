"""train.sbatch under a real Slurm that the test starts: two virtual nodes on this machine. The oracle is the
uninterrupted run: the losses of every step, bit for bit."""

import contextlib
import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from test_launch import ROOT, command_lines, eventually, program

LIMIT = 400  # seconds for anything to happen
SLURM = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=60
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""


def until(condition, what: str) -> None:
    eventually(condition, what, LIMIT)


def idle(env: dict) -> bool:
    done = subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], env=env, capture_output=True, text=True)
    return done.stdout.strip() == "2"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Its environment. munged, slurmctld and two slurmd, all in the foreground, are children of the test."""
    if os.getuid():
        pytest.skip("slurmd needs root")
    munged, controller, daemon = (program(n, "slurm-wlm munge") for n in ("munged", "slurmctld", "slurmd"))
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    (folder / "munge").mkdir(mode=0o755)
    (folder / "munge" / "key-file").write_bytes(os.urandom(128))
    (folder / "munge" / "key-file").chmod(0o400)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [s.getsockname()[1] for s in sockets]
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(SLURM.format(host=host, folder=folder, ports=ports, cpus=os.cpu_count()))
    env = os.environ | {"SLURM_CONF": str(conf), "OMP_NUM_THREADS": "1"}
    munge = [munged, "--foreground", "--force"]
    munge += [f"--{k}={folder}/munge/{k}" for k in ("socket", "key-file", "pid-file", "log-file", "seed-file")]
    commands = [munge, [controller, "-D"], *([daemon, "-D", "-N", n] for n in ("n1", "n2"))]
    processes = []
    for command in commands:
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        time.sleep(1)

    until(lambda: idle(env) or any(p.poll() is not None for p in processes), "two idle nodes")
    if not idle(env):
        pytest.skip("Slurm does not start here: " + (folder / "slurmctld.log").read_text()[-300:])
    yield env
    subprocess.run(["scancel", "-u", "root"], env=env)
    until(lambda: not subprocess.run(["squeue", "-h"], env=env, capture_output=True).stdout, "the end of all jobs")
    for process in reversed(processes):
        process.terminate()
        process.wait(30)


def losses(run: Path) -> list:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["grad_norm"]) for r in rows if "loss" in r]


@pytest.mark.slow
def test_a_requeued_and_a_preempted_job_end_bit_equal_to_an_uninterrupted_one(slurm, tmp_path):
    text = tmp_path / "it's.txt"
    text.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(4000)))
    shape = ["--model", "tiny-llama", "--compile", "none", "--dtype", "fp32", "--seq_len", "32", "--micro_batch", "2"]
    often = ["--eval_every", "0", "--log_every", "1", "--save_every", "30"]
    flags = [*shape, *often, "--steps", "400", "--data", str(text)]

    def submit(out: Path, *more: str) -> str:
        command = ["sbatch", "--parsable", "--nodes", "2", "-o", f"{out}.out", "train.sbatch"]
        command += [*flags, *more, "--out", str(out)]
        return subprocess.run(command, env=slurm, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    def state(job: str) -> str:
        done = subprocess.run(["scontrol", "show", "job", job], env=slurm, capture_output=True, text=True).stdout
        return done.partition("JobState=")[2].split()[0] if "JobState=" in done else "gone"

    def reaches(run: Path, step: int) -> None:
        log = run / "log.txt"
        until(lambda: log.exists() and f"Batch {step} " in log.read_text(), f"step {step}")

    def goes_on(job: str) -> None:
        until(lambda: state(job) == "PENDING" and idle(slurm), "the requeue")
        time.sleep(2)
        subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], env=slurm)  # without Slurm's pause

    def ends(job: str, out: Path, expected: str) -> str:
        until(lambda: state(job) in ("COMPLETED", "FAILED"), "the end")
        output = Path(f"{out}.out").read_text()
        assert state(job) == expected, output[-2000:]
        return output

    def signal(job: str) -> None:  # as before the time limit
        subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=slurm, check=True)
        goes_on(job)

    truth, cut = tmp_path / "truth", tmp_path / "cut"
    ends(submit(truth), truth, "COMPLETED")
    job = submit(cut)
    until(lambda: any("--check" in line and str(cut) in line for line in command_lines().values()), "the check")
    signal(job)
    until(lambda: list(cut.glob("logs/*/*/agent.json")), "the ranks' start")
    signal(job)
    reaches(cut, 40)
    signal(job)
    status = json.loads((cut / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 0)  # and saved
    reaches(cut, 200)
    subprocess.run(["scontrol", "requeue", job], env=slurm, check=True)  # as when preempted
    goes_on(job)
    output = ends(job, cut, "COMPLETED")
    log = (cut / "log.txt").read_text()
    assert log.count("Resumed from") == log.count("Stopped by") == 2  # preempted, it saved as well
    assert losses(cut) == losses(truth) and len(losses(cut)) == 400
    assert sorted(p.name for p in (cut / "logs").iterdir() if p.is_dir()) == ["n1", "n2"]
    assert len(list(cut.glob("logs/n?/*/agent.stderr.log"))) == 8
    assert output.count("has not begun") == 1 and output.count("saves and stops") == 3  # none for a requeue's own TERM

    mistake = tmp_path / "mistake"
    output = ends(submit(mistake, "--lr", "-1"), mistake, "FAILED")
    assert "--lr" in output and "Traceback" not in output
