"""The launcher with a stand-in for train.py that needs no torch, under the real torchrun: on this machine, on localhost
nodes, and on hosts behind an sshd of the test's own. These tests use their own environment and install nothing. Last,
train.sbatch with the real train.py under a Slurm that the test starts."""

import inspect
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

import node

ROOT = Path(__file__).parents[1]
NAME = os.uname().nodename
PROGRAMS = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"  # sshd is often in the latter
LIMIT = 400  # seconds for anything to happen; it takes long only on a busy machine and under Slurm


def parse_args(words, trains=False):
    """Stands in for that of config.py."""
    out = words[words.index("--out") + 1] if "--out" in words else "runs/default"
    return SimpleNamespace(out=out, timeout=1, check="--check" in words)


def fake_train():
    """Keeps to what launch.sh relies on. --end says how the run ends, --steps how many tenths of a second it lasts."""
    args, signals = sys.argv[1:], []
    given = dict(zip(args, args[1:], strict=False))
    out, steps, end = Path(given.get("--out", "runs/default")), int(given.get("--steps", 3)), given.get("--end")
    if end == "mistake":
        sys.exit(print("error: found a mistake", file=sys.stderr) or 2)
    finished = (out / "status.json").exists() and "finished" in (out / "status.json").read_text()
    if finished:
        print(f"{out} is finished")
    else:
        print("a line for the user", file=sys.stderr)
    if "--check" in args:
        print(json.dumps({"out": str(out), "state": "finished" if finished else "fresh", "attention": "sdpa"}))
    if "--check" in args or finished:
        return
    rank = int(os.environ["RANK"])

    def say(text):
        if rank == 0:
            with open(out / "log.txt", "a") as log:
                log.write(time.strftime("%Y-%m-%d %H:%M:%S I [train.py:110] ") + text + "\n")

    def write(state, step):
        if rank == 0:
            status = {"state": state, "step": step, "exit_code": 0, "attempt": os.environ["TORCHELASTIC_RUN_ID"]}
            (out / "status.new").write_text(json.dumps(status))
            os.replace(out / "status.new", out / "status.json")

    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    start = max([int(p.name[5:]) for p in out.glob("checkpoints/step-*")], default=0)
    write("running", start)
    keys = [os.environ.get(name, "") for name in ("HF_TOKEN", "WANDB_API_KEY")]
    environment = os.environ["WORLD_SIZE"], os.environ.get("MARK"), len("".join(keys))
    say(f"arguments {json.dumps(args)}\nin {os.getcwd()}\nenvironment {json.dumps(environment)}")
    say(f"Began after step {start}")
    for step in range(start + 1, steps + 1):
        if "--save_every" in args and rank == 0:
            write("running", step)
            (out / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
            (out / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{}")
        if signals or (out / "logs" / "stop").exists():
            say("a request to stop")
            if end != "deaf":
                return write("stopped", step)
        say(f"Batch {step} Loss: 8.42184, Speed: 47.06 samples/sec, lr: 0.000100")
        time.sleep(0.1)
    if end == "crash" and rank == 1:
        message = "rank 1: ValueError: only this rank knows why"
        error = {"message": message, "timestamp": int(time.time()), "order": 0}  # as base/errors.py does
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(error))
        raise ValueError
    while end == "crash":
        time.sleep(0.1)
        if signals:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
    write("finished", step)


class Checkout:
    def __init__(self, folder: Path, short: Path):
        self.folder, self.short = folder, short
        for name in ("base", "hf", "dataset", "job", "launch"):
            shutil.copytree(ROOT / name, folder / name)
        for name in ("launch.sh", "requirements.txt", "hosts"):
            shutil.copy(ROOT / name, folder / name)
        self.replace("launch/cluster.py", "^LOOK, LOOK_OVER_SSH = .*", "LOOK, LOOK_OVER_SSH = 0.1, 1.0")
        imports = "import json, os, signal, sys, time\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        (folder / "train.py").write_text(f"{imports}{inspect.getsource(fake_train)}fake_train()\n")
        (folder / "config.py").write_text(f"{imports}{inspect.getsource(parse_args)}DEFAULT = ['--steps', '3']\n")
        for name in ("bin", "tmp"):
            (short / name).mkdir()
        # A separate tmux server and separate temporary files
        path = f"{short}/bin:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "TMUX_TMPDIR": str(short), "TMPDIR": f"{short}/tmp"}
        self.environment.pop("TMUX", None)
        # A finished .venv, so that not every launch has to look for a Python
        (folder / ".venv/bin").mkdir(parents=True)
        self.script(folder / ".venv/bin/python", f'exec "{sys.executable}" "$@"')
        wanted = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
        (folder / ".venv" / "flatland-run").write_text("\n".join([version("torch"), *wanted, ""]))

    def replace(self, name: str, pattern: str, value: str) -> None:
        path = self.folder / name
        text, count = re.subn(pattern, value, path.read_text(), flags=re.M)
        assert count == 1
        path.write_text(text)

    @staticmethod
    def script(path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def start(self, *words: str, cwd: Path | None = None) -> subprocess.Popen:
        command = ["bash", str(self.folder / "launch.sh"), *words]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=cwd or self.folder, env=self.environment, start_new_session=True, **pipes)

    def launch(self, *words: str, cwd: Path | None = None) -> tuple[int, str, str]:
        process = self.start(*words, cwd=cwd)
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out, err

    def says(self, *words: str, status: int = 0) -> str:
        """What a launch prints that ends with this status: on stderr if it fails."""
        result, out, err = self.launch(*words)
        assert result == status, out + err
        return err if status else out

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def is_alive(self, name: str) -> bool:
        return bool(node.processes(f"{self.run(name).resolve()}/logs"))

    def texts(self, name: str) -> list[str]:
        """All that could tell a secret: the run's files, the command lines, tmux's environment."""
        files = [path.read_text(errors="replace") for path in self.run(name).rglob("*") if path.is_file()]
        tmux = subprocess.run(["sh", "-c", "tmux show-environment -g"], env=self.environment, capture_output=True)
        return [*files, *command_lines(), tmux.stdout.decode()]


@pytest.fixture
def checkout(tmp_path):
    short = Path(tempfile.mkdtemp(prefix="fl"))  # a socket's path must be short
    checkout = Checkout(tmp_path / "flat land's", short)
    yield checkout
    for run in checkout.folder.glob("runs/*"):
        if checkout.is_alive(run.name):
            checkout.launch("stop", "--now", "--out", f"runs/{run.name}")
    shutil.rmtree(short, ignore_errors=True)


def command_lines() -> list[str]:
    lines = map(node.read, Path("/proc").glob("[0-9]*/cmdline"))
    return [line.replace("\0", " ") for line in lines]


def eventually(condition, what: str) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.1)


def program(name: str, package: str) -> str:
    return shutil.which(name, path=PROGRAMS) or pytest.skip(f"no {name} here: apt install {package}")


# ---- on this machine


def test_arguments_reach_train_as_typed_and_the_log_of_the_rank_that_failed_is_shown(checkout):
    """Without tmux. Relative paths are meant from where the user stands."""
    checkout.script(checkout.short / "bin" / "tmux", "exit 1")
    odd = ["two words", '"q"', "it's", "$HOME", ";", "a;", "*", "", "\\", '{"a": [1, 2]}', "\n", "{logs}", "--x={logs}"]
    typed = ["--end", "crash", "--steps", "1", "--x", *odd]
    stands = checkout.folder / "stands here"
    stands.mkdir()
    status, out, err = checkout.launch("--nproc=2", *typed, cwd=stands)
    assert status == 1
    assert re.search(r"^a line for the user\n.*ValueError: only this rank knows why\n$", err)
    log = (stands / "runs/default/log.txt").read_text()
    assert f"arguments {json.dumps(typed)}\n" in log
    assert f"in {stands}\n" in log
    assert f'environment ["2", null, {len(os.environ.get("HF_TOKEN", ""))}]' in log
    assert out.startswith("Started runs/default")
    assert out.endswith(log)  # every line, with its prefix, because this is not a terminal
    assert re.search(r"(?s)---- the end of [^\n]+/1/stderr\.log\n.*Traceback", out)
    messages = [node.read_json(f)["message"] for f in sorted(stands.glob("runs/default/logs/*/*/*/*/?/error.json"))]
    assert messages[0] == f"rank 0 on {NAME} was ended by SIGTERM"
    assert messages[1] == "rank 1: ValueError: only this rank knows why"
    assert "ValueError" in checkout.says("logs", "--out=stands here/runs/default/", status=1)
    assert not (checkout.folder / "runs").exists()


def test_a_finished_run_is_not_started_again(checkout):
    """Which the run's own checks find, or, with --check, are asked for."""
    run = checkout.run("default")
    run.mkdir(parents=True)
    node.write_json(run / "status.json", {"state": "finished", "step": 4})
    (run / "log.txt").write_text("the last line\n")
    for words in (["--steps", "4"], ["--check"]):
        assert checkout.launch(*words) == (0, "runs/default is finished\n", "")
    assert checkout.launch("logs") == (0, "the last line\nruns/default: finished at step 4\n", "")


@pytest.mark.skipif(not shutil.which("tmux"), reason="no tmux")
def test_an_interrupted_launcher_leaves_the_run_which_can_be_watched_and_stopped(checkout):
    checkout.environment.update(HF_TOKEN="hf_abcdefgh", MARK="marked")
    run, name = checkout.run("long.x"), ("--out", "runs/long.x")
    launcher, out = checkout.start("train", *name, "--end", "never", "--steps", "5000"), ""
    while "Batch 3 " not in out:
        out += launcher.stdout.readline()
        assert launcher.poll() is None
    os.killpg(launcher.pid, signal.SIGINT)
    out += launcher.communicate(timeout=LIMIT)[0]
    assert launcher.returncode == 130
    assert "launch.sh logs --out runs/long.x" in out
    assert "launch.sh stop --out runs/long.x" in out
    assert "flatland-long_x-" in subprocess.check_output(["tmux", "ls"], env=checkout.environment, text=True)
    assert 'environment ["1", "marked", 11]' in (run / "log.txt").read_text()
    assert not [text for text in checkout.texts("long.x") if "hf_abcdefgh" in text]
    assert list((checkout.short / "tmp").iterdir()) == []

    assert "being trained already" in checkout.says(*name, status=2)
    assert checkout.is_alive("long.x")
    assert re.search("(?s)running.*Loss: 8.42184", checkout.says("status", *name))
    watcher = checkout.start("logs", *name)
    assert "long.x: stopped at step" in checkout.says("stop", *name)
    assert not checkout.is_alive("long.x")
    out, err = watcher.communicate(timeout=LIMIT)
    assert watcher.returncode == 0
    assert "long.x: stopped at step" in out
    assert "a line for the user" in checkout.says("logs", NAME, *name)


@pytest.mark.parametrize("words, message", [
    (["recipe"], "'recipe' is not a verb: train setup recipes"), (["logs", "--nproc", "1"], "--nproc"),
    (["logs"], "runs is not a run folder"), (["--end", "mistake"], "error: found a mistake"),
    (["sync", "--hosts", ""], "'' is not a host"), (["stop", "--out", "launch"], "launch is not a run folder"),
])  # fmt: skip
def test_mistakes_end_with_2_and_one_message(checkout, words, message):
    status, out, err = checkout.launch(*words)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert not (checkout.folder / "runs").exists()


def test_verbs_that_start_nothing(checkout):
    assert "--nproc N" in checkout.says("train", "-h")
    assert f"torch {version('torch')}: " in checkout.says("setup")


# A Python without packages, whose `-m venv` makes an environment whose pip finds no torch for CPUs.
BARE_PYTHON = """case "$*" in
  *'-m venv'*) echo "$*"; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  *'-m pip'*) echo "$*"; exit 1 ;;
  *) exec "{python}" -S "$@" ;;
esac"""
DRIVER = '[ "$1" = -L ] && echo "GPU 0: X" || echo "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: {}  |"'


@pytest.mark.parametrize("torch, smi, reports, error", [
    ("", "exit 1", "/cpu torch==2.13.0+cpu\n", "Installing the requirements failed, see above"),
    ("", DRIVER.format("12.4"), "/cu126 torch==2.13.0+cu126\n", "Torch for CUDA 12 cannot be installed"),
    ("", DRIVER.format("13.0"), "check torch==2.13.0 numpy", "Installing the requirements failed"),
    ("2.10.1", "exit 1", "/cpu torch==2.13.0+cpu\n", "Installing the requirements failed"),
    ("2.15.0a0+git1", DRIVER.format("13.0"), "check torch==2.15.0a0+git1 numpy", "Installing the requirements failed"),
    ("2.16.0", DRIVER.format("13.0"), "check torch==2.13.0 numpy", "Installing the requirements failed"),
])  # fmt: skip
def test_torch_is_chosen_by_the_driver_or_python3_has_it(checkout, torch, smi, reports, error):
    """torch: the version that python3 has; empty: none."""
    if torch:
        info = checkout.short / "packages" / f"torch-{torch}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: torch\nVersion: {torch}\n")
        checkout.environment["PYTHONPATH"] = str(info.parent)
    shutil.rmtree(checkout.folder / ".venv")
    checkout.script(checkout.short / "bin" / "python3", BARE_PYTHON.format(python=sys.executable))
    checkout.script(checkout.short / "bin" / "nvidia-smi", smi)
    status, out, err = checkout.launch()
    assert status == 2 and reports in out and error in err
    assert ("--system-site-packages" in out) == (reports == f"check torch=={torch} numpy")


def test_a_rank_ends_with_its_torchrun():
    rank = "import time; from base import errors; errors.end_with_torchrun(); print('asked', flush=True)"
    rank += f"; time.sleep({LIMIT}); print('outlived it')"
    torchrun = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": os.environ | {"TORCHELASTIC_RUN_ID": "x"}}
    with subprocess.Popen([sys.executable, "-c", torchrun, rank], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == b"asked\n"
        process.kill()
        assert process.stdout.read() == b""  # until the rank, too, has closed it


# ---- several nodes


def ranks(run: Path) -> dict[str, int]:
    """rank -> process id"""
    found = node.processes(f"{os.path.realpath(run)}/logs")
    return {rank: pid for pid, environment in found.items() for rank in re.findall(r"\0RANK=(\d+)", environment)}


@pytest.fixture
def sshd(checkout):
    """Starts an sshd on an address; with `apart`, in a mount namespace where the checkout's folder is empty."""
    sshd, keygen = program("sshd", "openssh-server"), program("ssh-keygen", "openssh-client")
    folder = checkout.short / "ssh"
    folder.mkdir(mode=0o700)
    subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    processes = []

    def start(address: str, apart: bool = False) -> str:
        with socket.create_server((address, 0)) as s:
            port = s.getsockname()[1]
        command = [sshd, "-D", "-e", "-f", f"{folder}/server", "-p", str(port), "-o", f"ListenAddress={address}"]
        if apart:
            hide = f'mount -t tmpfs tmpfs "{checkout.folder}" && exec "$@"'
            command = ["unshare", "--mount", "bash", "-c", hide, "bash", *command]
        log = folder / address
        with open(log, "w") as err:
            processes.append(process := subprocess.Popen(command, stderr=err))
        eventually(lambda: "listening" in log.read_text() or process.poll() is not None, "sshd")
        if process.poll() is not None:
            pytest.skip(f"sshd does not start here: {log.read_text().strip().splitlines()[-1]}")
        return f"{address}:{port}"

    (folder / "server").write_text(
        f"HostKey {folder}/key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
        f"PasswordAuthentication no\nSetEnv TMUX_TMPDIR={checkout.short} HOME={folder}\n"
    )
    (folder / "config").write_text(
        f"Host *\n IdentityFile {folder}/key\n IdentitiesOnly yes\n BatchMode yes\n ConnectTimeout 5\n"
        f" StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    checkout.replace("launch/settings.py", '"ssh": .*', f"\"ssh\": '-F {folder}/config',")
    yield start
    for process in processes:
        process.terminate()
        process.wait(LIMIT)


def test_hosts_start_all_or_none(checkout, sshd):
    err = checkout.says("--hosts", f"{sshd('127.0.0.2')},127.0.0.4:9,localhost", status=2)
    assert re.fullmatch(r"error: 127\.0\.0\.4-9 does .*Connection refused.* ssh://127\.0\.0\.4:9 true\n.*\n", err)
    assert not (checkout.folder / "runs").exists()


def test_two_nodes_start_together_are_relaunched_and_end_at_the_second_stop(checkout, sshd):
    there, name = sshd("127.0.0.2"), ("--out", "runs/two")
    label = there.replace(":", "-")
    checkout.environment.update(HF_TOKEN="hf_abcdefgh", WANDB_API_KEY="secret")
    (checkout.folder / "hosts").write_bytes(f"localhost\r\n\r\n{there} # by ssh".encode())
    checkout.replace("launch/settings.py", '"retry_pause": 20', '"retry_pause": 0')
    odd = "$HOME; '\""
    status, out, err = checkout.launch(*name, "--steps", "5000", "--save_every", "1", "--end", "deaf", "--x", odd)
    assert (status, err) == (0, "a line for the user\n"), err  # it returns, because this is not a terminal
    assert f"Started runs/two on {NAME}, {label}. " in out
    run, log = checkout.run("two"), checkout.run("two") / "log.txt"
    eventually(lambda: "Batch 4 " in node.read(log), "some batches")
    assert json.dumps(["--x", odd])[1:-1] in log.read_text()
    assert 'environment ["2", null, 17]' in log.read_text()
    assert not [text for text in checkout.texts("two") if "hf_abcdefgh" in text or "secret" in text]
    assert re.search(rf"{label}: [1-9]$", checkout.says("status"), re.M)

    os.kill(ranks(run)["1"], signal.SIGKILL)
    eventually(lambda: log.read_text().count("Began after step") == 2, "the relaunch")
    assert re.search(rf"failed at step \d+: rank 1 on {label} was ended by SIGKILL", log.read_text())
    resumed = re.findall(r"Began after step (\d+)", log.read_text())[1]
    assert f"Relaunching from step-{int(resumed):08d} in" in log.read_text()

    first = checkout.start("stop")
    assert "saves" in first.stdout.readline()
    eventually(lambda: "a request to stop" in node.read(log), "the first request")
    os.killpg(first.pid, signal.SIGINT)
    assert "runs/two is running" in first.communicate(timeout=LIMIT)[0]
    assert first.returncode == 130
    assert ranks(run)
    assert "at once" in checkout.says("stop")
    assert "without saving" in (run / "status.json").read_text()
    assert not checkout.is_alive("two")


@pytest.mark.slow
def test_sync_makes_a_host_that_shares_nothing_the_same(checkout, sshd):
    if os.getuid() or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("a host with a local disk needs root and mount namespaces")
    here, apart = sshd("127.0.0.2"), sshd("127.0.0.3", apart=True)
    label = apart.replace(":", "-")
    (checkout.folder / "new_and_uncommitted.py").write_text("x = 1\n")
    err = checkout.says("--hosts", f"{here},{apart}", status=2)
    assert "launch.sh sync" in err and re.search(f"error: {label} does not answer: .*can't open file", err)
    assert checkout.says("sync", "--hosts", f"{here},{apart}").count(": copied\n") == 2
    (checkout.folder / "new_and_uncommitted.py").write_text("y = 2\n")
    err = checkout.says("--hosts", f"{here},{apart}", status=2)
    assert f"{label}: other code or packages than here\n" in err and "launch.sh sync" in err
    (checkout.folder / "base" / "gone.py").write_text("")
    assert "No such file" in checkout.says("--hosts", f"{here},{apart}", status=2)
    checkout.says("sync", "--hosts", apart)
    (checkout.folder / "base" / "gone.py").unlink()  # a further file there does no harm
    for hosts in (f"{apart},{here}", apart):
        err = checkout.says("--hosts", hosts, "--steps", "3", status=2)
        assert f"{label}: the folder {checkout.folder}/runs/default there is not the one here" in err and "--out" in err


@pytest.mark.slow
def test_doctor_names_what_is_wrong_and_how_to_mend_it(checkout, sshd):
    status, out, err = checkout.launch("doctor", "--hosts", f"{sshd('127.0.0.2')},{sshd('127.0.0.3')}")
    assert re.search(r"(?m)^127\.0\.0\.3-.*MB/s \d+, TFLOP/s none$", out) and not out.endswith("\n\n"), out
    status, out, err = checkout.launch("doctor", "--end", "mistake")
    assert status == 1 and re.search("✗ .*: found a mistake", out)


# ---- under Slurm

# Two virtual nodes on this machine
SLURM = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=60
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""
IDLE = ("sinfo", "-h", "-t", "idle", "-o", "%D")


@pytest.fixture
def slurm(tmp_path):
    """answer(*command) of a new Slurm. slurmctld and two slurmd, all in the foreground, are children of the test."""
    if os.getuid():
        pytest.skip("slurmd needs root")
    controller, daemon = (program(name, "slurm-wlm") for name in ("slurmctld", "slurmd"))
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    host, ports = socket.gethostname().split(".")[0], random.sample(range(10000, 20000), 3)
    conf = folder / "slurm.conf"
    conf.write_text(SLURM.format(host=host, folder=folder, ports=ports, cpus=os.cpu_count()))
    env = os.environ | {"SLURM_CONF": str(conf), "OMP_NUM_THREADS": "1"}

    def answer(*command: str) -> str:
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    processes = []
    for command in ([controller, "-D"], [daemon, "-D", "-N", "n1"], [daemon, "-D", "-N", "n2"]):
        with open(folder / "log", "a") as log:
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        time.sleep(1)
    eventually(lambda: answer(*IDLE) == "2" or any(p.poll() is not None for p in processes), "two idle nodes")
    if answer(*IDLE) != "2":
        pytest.skip("Slurm does not start here: " + (folder / "log").read_text()[-300:])
    yield answer
    answer("scancel", "-u", "root")
    eventually(lambda: not answer("squeue", "-h"), "the end of all jobs")
    for process in reversed(processes):
        process.terminate()
        process.wait(30)


def losses(run: Path) -> list:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["grad_norm"]) for r in rows if "loss" in r]


@pytest.mark.slow
def test_a_requeued_and_a_preempted_job_end_bit_equal_to_an_uninterrupted_one(slurm, tmp_path, text):
    text = shutil.copy(text, tmp_path / "it's.txt")
    shape = ["--model", "tiny-llama", "--compile", "none", "--dtype", "fp32", "--seq_len", "32", "--micro_batch", "2"]
    flags = [*shape, "--steps", "400", "--eval_every", "0", "--log_every", "1", "--save_every", "30"]

    def submit(out: Path, *more: str) -> str:
        command = ["sbatch", "--parsable", "--nodes", "2", "-o", f"{out}.out", "train.sbatch"]
        return slurm(*command, *flags, "--data", str(text), *more, "--out", str(out))

    def state(job: str) -> str:
        return re.search(r"JobState=(\w+)|$", slurm("scontrol", "show", "job", job))[1]

    def interrupt(job: str, *command: str) -> None:
        slurm(*command, job)
        eventually(lambda: state(job) == "PENDING" and slurm(*IDLE) == "2", "the requeue")
        time.sleep(2)
        slurm("scontrol", "update", f"jobid={job}", "StartTime=now")  # without Slurm's pause

    def ends(job: str, out: Path, expected: str) -> str:
        eventually(lambda: state(job) in ("COMPLETED", "FAILED"), "the end")
        output = Path(f"{out}.out").read_text()
        assert state(job) == expected, output[-2000:]
        return output

    near_the_time_limit = ("scancel", "--signal=USR1", "--batch")
    truth, cut = tmp_path / "truth", tmp_path / "cut"
    ends(submit(truth), truth, "COMPLETED")
    job = submit(cut)
    eventually(lambda: any("--check" in line and str(cut) in line for line in command_lines()), "the check")
    interrupt(job, *near_the_time_limit)
    eventually(lambda: list(cut.glob("logs/*/*/agent.json")), "the ranks' start")
    interrupt(job, *near_the_time_limit)
    eventually(lambda: "Batch 40 " in node.read(cut / "log.txt"), "step 40")
    interrupt(job, *near_the_time_limit)
    status = json.loads((cut / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 0)  # and saved
    eventually(lambda: "Batch 200 " in node.read(cut / "log.txt"), "step 200")
    interrupt(job, "scontrol", "requeue")  # as when preempted
    output = ends(job, cut, "COMPLETED")
    log = (cut / "log.txt").read_text()
    assert log.count("Resumed from") == log.count("Stopped by") == 2  # preempted, it saved as well
    assert losses(cut) == losses(truth) and len(losses(cut)) == 400
    assert sorted(p.name for p in (cut / "logs").iterdir() if p.is_dir()) == ["n1", "n2"]
    assert output.count("has not begun") == 1 and output.count("saves and stops") == 3  # none for a requeue's own TERM

    failing = tmp_path / "failing"
    job = submit(failing)
    for batch in (40, 100):
        eventually(lambda: f"Batch {batch} " in node.read(failing / "log.txt"), f"step {batch}")  # noqa: B023
        os.kill(ranks(failing)["1"], signal.SIGKILL)
    output = ends(job, failing, "COMPLETED")
    assert output.count("A failure on n2; try 1 of 3") == 2 and output.count("n2 has failed twice") == 1
    assert sorted(p.parent.name for p in failing.glob("logs/n?/*")) == ["n1"] * 3 + ["n2"] * 2

    mistake = tmp_path / "mistake"
    output = ends(submit(mistake, "--lr", "-1"), mistake, "FAILED")
    assert "--lr" in output and "Traceback" not in output
