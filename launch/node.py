"""One host's half of the launcher: it examines the machine, and starts and ends processes there.

`python3 launch/node.py OPERATION` does one thing for cluster.py over ssh; for localhost, cluster.py calls `answer`. The
request is a line of JSON on stdin, so nothing secret is on a command line: the host's line in `hosts`, facts about the
host, and the job. The answer is a line of JSON. Only the standard library is used here, so a host can be asked before
it has an environment; `torchrun` and `all_reduce` run in the environment's Python.

`python3 launch/node.py agent LOGS TIMEOUT RANKS COMMAND...` runs COMMAND in its tmux session or under srun, on a
machine with RANKS ranks in all, and makes sure that no process of the run remains when COMMAND ends. COMMAND is
`node.py torchrun`, or where the job is one process on one host, that process. LOGS is `runs/NAME/logs/HOST/ID`. There
the agent writes agent.stderr.log, agent.stdout.log, and agent.json: its process, its ranks, and at the end the first
cause of a failure on this host. A process belongs to the run if its command line names LOGS; a worker, if the
environment that torchrun gave it does."""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(os.path.abspath(__file__)).parents[1]
# How sure it is that a cause is the first one of the whole job; of equally sure ones, the earliest is the first.
KILLED, FAILED, FOLLOWED = range(3)
# The errors of a rank that failed because another one did (lib/run.py, torch.distributed), as its error file begins
OF_A_PEER = re.compile(r"(PeerFailure|Dist\w*Error): ")
# The variables that a tmux server gets: it keeps the environment that it was started with, and shows it to anyone.
PLAIN_ENVIRONMENT = "HOME LANG LOGNAME PATH SHELL TERM TMPDIR TMUX_TMPDIR USER XDG_RUNTIME_DIR"
OWN_FILES = (
    "*.py *.sh *.sbatch *.toml requirements.txt recipes/*.args lib/*.py launch/*.py launch/*.sh bench/*.py bench/*.json"
)


class Refused(Exception):
    """Cannot be done on this host; the message says why."""


# ---- files and processes


def read(path, default=""):
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return default


def read_json(path):
    """{} if the file is missing or not JSON."""
    try:
        return json.loads(read(path))
    except ValueError:
        return {}


def write_whole(path, text):
    """Replaces a file at once: a reader sees the old content or the new one."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def tail(path, lines):
    """The last lines of a file of any size."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 65536))
            return "".join(file.read().decode(errors="replace").splitlines(True)[-lines:] if lines else "")
    except OSError:
        return ""


def last_line(text):
    return (text.strip().splitlines() or [""])[-1]


def parent(pid):
    return int(re.search(r"^PPid:\s*(\d+)|$", read(f"/proc/{pid}/status"), re.M)[1] or 0)


def environment_of(pid):
    return dict(pair.split("=", 1) for pair in read(f"/proc/{pid}/environ").split("\0") if "=" in pair)


def all_pids():
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def processes(logs):
    """The processes of a folder, given as its real path with a slash at the end. -> (pids whose command line names it:
    agents and torchruns; pids whose torchrun environment does: workers and their children)"""
    keepers, workers = [], []
    for pid in all_pids():
        command = read(f"/proc/{pid}/cmdline")
        if f"TORCHELASTIC_ERROR_FILE={logs}" in read(f"/proc/{pid}/environ"):
            workers.append(pid)
        elif re.search(rf"node\.py.*\0{re.escape(logs[:-1])}[/\0]", command, re.S):
            keepers.append(pid)
    return keepers, workers


def workers_of(logs):
    """pid -> (rank, local rank) of torchrun's workers, not of their children."""
    pids, ranks = processes(logs)[1], {}
    for pid in pids:
        if parent(pid) not in pids:
            environment = environment_of(pid)
            ranks[pid] = (int(environment.get("RANK", -1)), int(environment.get("LOCAL_RANK", -1)))
    return ranks


def kill(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(logs):
    """Kills every process of the folder."""
    for _ in range(50):  # the dying may just have started others
        keepers, workers = processes(logs)
        if not keepers and not workers:
            break
        kill(keepers + workers, signal.SIGKILL)
        time.sleep(0.1)


# ---- the agent of a torchrun


def agent(logs, timeout, ranks, command):
    """Runs torchrun and cleans up after it -> its exit status. The first signal requests a stop, as `launch.sh stop`
    does; the second kills the workers. torchrun gets no signal, because it would report a failure."""
    signals, out, marker = [], logs.parents[2], f"{os.path.realpath(logs)}/"
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, _: signals.append(n))
    is_torchrun = "--local-addr" in command
    if is_torchrun:
        choose_interface(command[command.index("--local-addr") + 1])
    if ranks > 1:  # torchrun would give each rank one thread, also for AdamW on the CPU
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    with open(logs / "agent.stdout.log", "ab") as stdout, open(logs / "agent.stderr.log", "ab") as stderr:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: torchrun ends with us
        )
    record = {"pid": os.getpid(), "ranks": {}}
    write_whole(logs / "agent.json", json.dumps(record))
    print(f"The run's log is {out}/log.txt" + "; Ctrl-B D detaches" * ("TMUX" in os.environ), flush=True)
    follow = ["tail", "-n", "0", "-s", "0.2", "-F", "--pid", str(os.getpid()), out / "log.txt"]
    pane = subprocess.Popen(follow, stderr=subprocess.DEVNULL)
    attend(child, logs, marker, signals, record)
    # If torchrun was killed, its workers have had SIGTERM from end_with_torchrun, and may be saving
    end = time.monotonic() + timeout
    while workers_of(marker) and time.monotonic() < end and len(signals) < 2:
        time.sleep(0.3)
    kill(processes(marker)[1], signal.SIGKILL)
    status = record["exit"] = child.returncode
    failures = read_json(logs / "failures.json").get("failures", [])
    if status and not is_torchrun:
        failures = [[0, 0, status, ""]]
    record["cause"] = None if signals and status < 0 else cause_on_this_host(logs, status, failures)
    time.sleep(0.4)
    pane.terminate()
    write_whole(logs / "agent.json", json.dumps(record))
    return max(status, 0) or int(status != 0)


def attend(child, logs, marker, signals, record):
    """Waits until torchrun ends; records its ranks, and when the first of them was gone."""
    started = {}
    while child.poll() is None:
        time.sleep(0.3)
        ranks = workers_of(marker)
        if started.keys() - ranks.keys():
            record.setdefault("first_loss", time.monotonic())
        if ranks.keys() - started.keys():
            started |= ranks
            record["ranks"] = dict(started.values())
            with contextlib.suppress(OSError):  # the disk is full
                write_whole(logs / "agent.json", json.dumps(record))
        if signals:
            (logs.parents[1] / "stop").touch()
        if len(signals) > 1:
            kill(ranks, signal.SIGKILL)
    record.setdefault("first_loss", time.monotonic())


def cause_on_this_host(logs, status, failures):
    """The first cause of a failure on this host, where the agent's command exited with that status; None: no failure.
    failures: (rank, local rank, exit status, error) of each."""
    if failures:  # torchrun kills ranks that do not exit when another has failed: a failure is surer than a kill
        return min((rank_cause(logs, *failure) for failure in failures), key=lambda cause: cause["sure"] or FAILED)
    if not status:
        return None
    sure, how = (KILLED, f"was ended by {signal.Signals(-status).name}") if status < 0 else (FOLLOWED, "failed")
    screen = logs / "agent.stderr.log"
    end = tail(screen, 30) if status > 0 else ""
    what = f"torchrun on {logs.parent.name} {how}"
    return {"sure": sure, "what": what, "status": status, "file": str(screen), "tail": end}


def rank_cause(logs, rank, local_rank, status, error):
    """A failed rank's part in the end of the job, as far as its exit status and its error file tell."""
    file = next(logs.glob(f"*/attempt_*/{local_rank}/stderr.log"), logs / "agent.stderr.log")
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"
    # torchrun ends ranks with SIGTERM, and NCCL aborts a rank whose peers do not answer
    follows = OF_A_PEER.match(error) or status in (-signal.SIGTERM, -signal.SIGABRT)
    sure = FOLLOWED if follows else KILLED if status == -signal.SIGKILL else FAILED
    what = f"rank {rank} on {logs.parent.name} {how}"
    return {"sure": sure, "what": what, "status": status, "file": str(file), "tail": tail(file, 30)}


def torchrun(logs, words):
    """torch.distributed.run in this process. Failed ranks go to failures.json, the one first that torchrun saw failing
    first. An error file alone would not do: a rank that was killed writes none, and torchrun copies a single file
    to its own."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(words)
    except ChildFailedError as error:
        failures = []
        for rank, failure in error.failures.items():
            message = failure.message["message"] if isinstance(failure.message, dict) else ""
            failures.append([rank, failure.local_rank, failure.exitcode, message])
        write_whole(logs / "failures.json", json.dumps({"failures": failures}))
        return 1


# ---- operations: each takes the request and returns the answer


def content_hash(root=ROOT):
    total = hashlib.sha256()
    for name in own_files(root):
        data = (root / name).read_bytes()
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()[:16]


def own_files(root=ROOT):
    """The project's own files, sorted: the code, scripts and recipes; not `hosts`, which no run depends on."""
    return sorted(str(p.relative_to(root)) for pattern in OWN_FILES.split() for p in root.glob(pattern) if p.is_file())


def query(*words):
    """The lines that nvidia-smi answers; [] if it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def gpus(request):
    """The values for CUDA_VISIBLE_DEVICES of all GPUs that this run may use; [] without GPUs."""
    visible = request["env"].get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if visible is None:
        return [str(i) for i in range(sum(line.startswith("GPU ") for line in query("-L")))]
    return [v for v in visible.split(",") if v and v != "-1"] if shutil.which("nvidia-smi") else []


def probe(request):
    """The facts about a host that a launch needs."""
    return {
        "connection": os.environ.get("SSH_CONNECTION", "").split(),
        "gpus": gpus(request),
        "code": content_hash(),
        "python": os.access(request["python"], os.X_OK),
        "port": probe_port(request["port"]),
    }


def run(request):
    """A command in the checkout, with the run's environment -> its end."""
    env = {**os.environ, **request["env"], "LOCAL_WORLD_SIZE": str(request["slots"])}
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(request["command"], cwd=ROOT, env=env, **pipes)
    return {"exit": done.returncode, "out": done.stdout, "err": done.stderr}


def probe_port(port):
    """A free port, or `port` itself if it is not 0 and free; 0 if it is taken."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return 0
        return s.getsockname()[1]


def choose_interface(address):
    """Has gloo and NCCL use the network interface of this address. gloo would look its own hostname up, which Debian's
    /etc/hosts takes for 127.0.1.1."""
    name = "lo" if address.startswith("127.") else ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", interface[:15].encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    name = interface
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without = every name that begins so


def log_folder(request):
    """The attempt's log folder on this host, as a real path: the processes name it."""
    return Path(os.path.realpath(ROOT / request["out"]), "logs", request["label"], request["id"])


TORCHRUN = (
    "{python} launch/node.py torchrun {logs} --nnodes {nodes} --nproc-per-node {slots} --max-restarts 0"
    " --rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id {id}"
    " --rdzv-conf is_host={is_host:d},join_timeout={join_timeout} --local-addr {address} --redirects 3 --log-dir {logs}"
)
# One process alone needs no torchrun, which would import torch before it does.
ALONE = (
    "env TORCHELASTIC_RUN_ID={id} TORCHELASTIC_ERROR_FILE={logs}/error.json RANK=0 LOCAL_RANK=0 WORLD_SIZE=1"
    " LOCAL_WORLD_SIZE=1 {python}"
)


def start(request):
    """Starts the agent, in a tmux session if tmux works, else in the background -> where it is. Refuses if this host
    does not see the run's folder, or if a process of the run is alive here; with `clear` it ends these first."""
    logs = log_folder(request)
    if read_json(logs.parents[1] / "launch.json").get("mark") != request["mark"]:
        raise Refused(
            f"the folder {request['out']} there is not the one here. Hosts that do not share the folder keep a part of"
            " each checkpoint, and no launch can resume from it. Give --out a folder that all hosts and this machine"
            " see, or launch from a machine that sees it"
        )
    if request["clear"]:
        kill_all(f"{logs.parent}/")
    if pids := sorted(map(str, sum(processes(f"{logs.parent}/"), []))):
        raise Refused(f"being trained already: processes {', '.join(pids)}")
    logs.mkdir(parents=True)
    env = {**os.environ, **request["env"]}
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(request["shutdown_timeout"]))  # torch 2.11 has no flag for it
    if request["devices"] is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(request["devices"])
    launcher = ALONE if request["nodes"] == request["slots"] == 1 else TORCHRUN
    values = {**request, "logs": logs, "is_host": request["label"] == request["first"]}
    agent_words = [sys.executable, "launch/node.py", "agent", str(logs), request["timeout"], request["ranks_here"]]
    command = [*map(str, agent_words), *(word.format(**values) for word in launcher.split())]
    command += ["train.py", *request["words"]]

    # The environment travels in a file that only its owner can read and that is gone when it has been read: it belongs
    # on no command line, in no run folder and in no tmux server.
    handle, parcel = tempfile.mkstemp(prefix="flatland-")
    with os.fdopen(handle, "w") as file:
        json.dump([command, env], file)
    place = open_session(request["session"], [sys.executable, os.path.abspath(__file__), "enter", parcel], logs)
    end = time.monotonic() + request["start_limit"]
    while not (record := read_json(logs / "agent.json")):
        if time.monotonic() > end:
            kill_all(f"{logs}/")
            with contextlib.suppress(OSError):
                os.unlink(parcel)
            end = tail(logs / "agent.stderr.log", 3)
            raise Refused(f"the agent did not start in {request['start_limit']} s ({place}): {end}")
        time.sleep(0.05)
    return {"place": place, "pid": record["pid"]}


def open_session(session, command, logs):
    """Runs a command out of this process's reach, in tmux if that works -> where."""
    plain, said = {key: os.environ[key] for key in PLAIN_ENVIRONMENT.split() if key in os.environ}, ""
    if shutil.which("tmux"):
        tmux = ["tmux", "new-session", "-d", "-s", session, *command]
        tmux += [";", "set-window-option", "-t", f"={session}:", "remain-on-exit", "off"]
        done = subprocess.run(tmux, env=plain, capture_output=True, text=True)
        if done.returncode == 0:
            return f"tmux session {session}"
        said = f" ({done.stderr.strip()})"
    with open(logs / "background.stderr.log", "wb") as err:
        subprocess.Popen(command, env=plain, stdin=subprocess.DEVNULL, stdout=err, stderr=err, start_new_session=True)
    return "background" + said


def enter(parcel):
    """Becomes the command that start() has left in a file, with its environment."""
    command, env = json.loads(read(parcel))
    os.unlink(parcel)
    os.chdir(ROOT)
    os.execvpe(command[0], command, env)


GPU_LOAD = "--query-gpu=utilization.gpu,memory.used,memory.total"


def look(request):
    """The state of an attempt on this host."""
    logs = log_folder(request)
    agents, workers = processes(f"{logs}/")[0], len(workers_of(f"{logs}/"))
    record = read_json(logs / "agent.json")  # after the agents: writing it is an agent's last act
    over, result = not agents and not workers, {}
    if "exit" in record:
        result = {**record, "ago": time.monotonic() - record["first_loss"]}
    elif over:
        what = f"everything on {request['label']} was gone: killed, or the machine restarted"
        result = {"exit": None, "ago": 0.0, "cause": {"sure": KILLED, "what": what}}
    return {
        "agent": bool(agents),
        "workers": workers,
        "over": over,
        "hurt": workers < len(record.get("ranks", ())) or bool(result and result["exit"] != 0),
        "result": result,
        "gpus": query(GPU_LOAD, "--format=csv,noheader,nounits") if request.get("gpus") else [],
    }


def sweep(request):
    """Kills every process of an attempt -> its state before."""
    state = look(request)
    kill_all(f"{log_folder(request)}/")
    return state


# ---- for doctor and status

DISK, SHM = 20, 1  # free GB of the disk and of shared memory that a run should find
VERSIONS = """import torch; print(torch.__version__, "cuda", torch.version.cuda,
*("nccl", *torch.cuda.nccl.version()) if torch.cuda.is_available() else ())"""


def examine(request):
    """The facts that a launch needs; what doctor shows of this host: name -> [value, remedy or nothing if it is right],
    where {there} stands for the way to this host; values that should be the same on all hosts; the host's time; its
    torch's error."""
    rows, runs = {}, ROOT / "runs"
    rows["folder"] = ["shared" if (ROOT / request["folder_mark"]).exists() else "its own", ""]
    for name, path, least in ("free runs", runs if runs.exists() else ROOT, DISK), ("free /dev/shm", "/dev/shm", SHM):
        free = shutil.disk_usage(path).free / 1e9
        remedy = f"{free:.1f} GB, at least {least} are needed; {{there}}df -h {path}"
        rows[name] = [f"{free:.0f} GB", remedy if free < least else ""]
    left = [pid for pid in all_pids() if "TORCHELASTIC_RUN_ID" in environment_of(pid)]
    remedy = f"processes of other runs; to end them: {{there}}kill {' '.join(map(str, left))}" if left else ""
    rows["left over"] = [f"{len(left)} processes", remedy]
    python = subprocess.run([request["python"], "-V"], capture_output=True, text=True).stdout.strip()
    torch = run({**request, "command": [request["python"], "-c", VERSIONS]})
    driver = (query("--query-gpu=driver_version", "--format=csv,noheader") or ["none"])[0]
    alike = {"code": content_hash(), "python": python, "torch": torch["out"].strip(), "driver": driver}
    alike["GPUs"] = len(gpus(request))
    error = last_line(torch["err"]) if torch["exit"] else ""
    return {**probe(request), "rows": rows, "alike": alike, "time": time.time(), "torch_error": error}


def all_reduce(request):
    """Sums `bytes` over the hosts of a group, as one rank of it -> MB/s. Rank 0 keeps the store."""
    os.environ.update(request["env"])
    choose_interface(request["address"])
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    limit, cuda, (host, port) = timedelta(seconds=request["limit"]), torch.cuda.is_available(), request["store"]
    store = dist.TCPStore(host, port, request["size"], request["rank"] == 0, limit)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=request["rank"], world_size=request["size"], timeout=limit)
    data, seconds = torch.ones(request["bytes"] // 4, device="cuda" if cuda else "cpu"), []
    for _ in range(4):
        data.fill_(1)
        begin = time.perf_counter()
        dist.all_reduce(data)
        total = data[-1].item()
        seconds.append(time.perf_counter() - begin)
    if total != request["size"]:
        raise Refused(f"the sum is wrong: {total}, expected {request['size']}")
    dist.barrier()
    print(json.dumps({"mb_per_s": request["bytes"] / 1e6 / min(seconds)}), flush=True)
    os._exit(0)


OPERATIONS = (probe, run, start, look, sweep, examine, all_reduce)


def answer(name, request):
    """The answer of an operation, or why it cannot be done."""
    try:
        return next(f for f in OPERATIONS if f.__name__ == name)(request)
    except (Refused, OSError, RuntimeError, subprocess.SubprocessError) as e:
        return {"refused": str(e)}


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        sys.exit(agent(Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]))
    if sys.argv[1] == "torchrun":
        sys.exit(torchrun(Path(sys.argv[2]), sys.argv[3:]))
    if sys.argv[1] == "enter":
        enter(sys.argv[2])
    print(json.dumps(answer(sys.argv[1], json.loads(sys.stdin.buffer.readline()))), flush=True)
