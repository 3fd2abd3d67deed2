"""One host's half of the launcher: what has to be looked at or done on the machine itself.

cluster.py sends this file, with a request, as one line of JSON to a `python3 -c` on the host, over ssh or, for
localhost, without; the answers come back as lines of JSON. So a host needs python3 and nothing of ours to be asked, and
what is secret in a request is never on a command line. Only the standard library is used here.

`python3 node.py agent LOGS TIMEOUT COMMAND...` runs torchrun (COMMAND) in its tmux session or under srun, and sees to
it that nothing of it is left when it ends. Files in LOGS, `runs/NAME/logs/HOST/ID`: agent.pid, agent.stderr.log,
agent.stdout.log, result.json at the end, with the first cause of a failure on this host; `stop` and `stop-now` appear
there when the run is to stop. A process of the run is known by LOGS in its command line, a worker by LOGS in the
environment that torchrun gave it."""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

ORPHANED = 40  # seconds without a word from cluster.py after which a watch ends
WITHOUT_WORKERS = 20  # seconds that torchrun may live on after its workers: its own barriers wait for dead peers
FULL_DISK = 30  # seconds that an agent tries to write its result where there is no room
# How sure it is that a cause is the first one of the whole job; of the same certainty, the earliest comes first.
KILLED, FAILED, FOLLOWED, TERMINATED, UNKNOWN, WAITED = range(6)
# What a rank says when it fails because another one did.
OF_A_PEER = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|[Tt]imed out|[Tt]imeout|remote process|unhandled system error|"
    r"Socket|peer|store|was not answered"
)
PLAIN_ENVIRONMENT = (
    "HOME",
    "LANG",
    "LOGNAME",
    "PATH",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TMUX_TMPDIR",
    "USER",
    "XDG_RUNTIME_DIR",
)


class Refused(Exception):
    """Cannot be done on this host; the message says why."""


# ---- processes


def read(path, default: str = "") -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return default


def write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise OSError(e.errno, e.strerror, str(path)) from None


def parent(pid: int) -> int:
    found = re.search(r"^PPid:\s*(\d+)", read(f"/proc/{pid}/status"), re.M)
    return int(found[1]) if found else 0


def environment_of(pid: int) -> dict:
    return dict(pair.split("=", 1) for pair in read(f"/proc/{pid}/environ").split("\0") if "=" in pair)


def processes(logs: str) -> tuple:
    """-> (pids with `logs` on their command line, pids whose torchrun environment names it); not this one. `logs` is a
    folder's real path, with a slash at its end."""
    ours, workers = [], []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        command = read(f"/proc/{entry}/cmdline")
        if f"TORCHELASTIC_ERROR_FILE={logs}" in read(f"/proc/{entry}/environ") and command:
            workers.append(int(entry))
        elif re.search(r"torch\.distributed\.run|node\.py", command) and any(
            f"{word}/".startswith(logs) for word in command.split("\0")
        ):
            ours.append(int(entry))
    return ours, workers


def workers_of(logs: str) -> dict:
    """pid -> (rank, local rank) of torchrun's workers, not of their children."""
    found = processes(logs)[1]
    out = {}
    for pid in found:
        if parent(pid) not in found:
            env = environment_of(pid)
            out[pid] = (int(env.get("RANK", -1)), int(env.get("LOCAL_RANK", -1)))
    return out


def kill(pids, number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(logs: str) -> None:
    """Kills every process of the folder."""
    for _ in range(50):  # the dying may just have started others
        ours, workers = processes(logs)
        if not ours and not workers:
            break
        kill(ours + workers, signal.SIGKILL)
        time.sleep(0.1)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: torchrun never outlives its keeper


# ---- the keeper of a torchrun


def agent(logs: Path, timeout: float, command: list) -> int:
    """Runs torchrun and cleans up after it -> its exit status. The first signal, or the file `stop`, lets the workers
    save and stop; the second, or `stop-now`, ends them at once. torchrun itself is not signalled: it would call the end
    a failure."""
    signals = []
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, _: signals.append(n))
    if interface_of(command[command.index("--local-addr") + 1]):
        # gloo looks its own hostname up otherwise, which Debian's /etc/hosts takes for 127.0.1.1.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(command[command.index("--local-addr") + 1]))
    marker = f"{os.path.realpath(logs)}/"
    screen, shown = Path(logs).parents[2] / "log.txt", None
    with open(logs / "agent.stdout.log", "ab") as out, open(logs / "agent.stderr.log", "ab") as err:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    write_whole(logs / "agent.pid", f"{os.getpid()} {platform.node()}\n")
    told, seen, last_seen, first_loss, waited = set(), set(), None, None, False
    while child.poll() is None:
        time.sleep(0.3)
        found = workers_of(marker)
        if seen - set(found):
            first_loss = first_loss or time.monotonic()
        seen |= set(found)
        wanted = max(min(len(signals), 2), (logs / "stop").exists(), 2 * (logs / "stop-now").exists())
        for pid in found:
            if wanted == 2:
                kill([pid], signal.SIGKILL)
            elif wanted and pid not in told:
                kill([pid], signal.SIGTERM)
                told.add(pid)
        if found:
            last_seen = time.monotonic()
        elif last_seen and time.monotonic() - last_seen > WITHOUT_WORKERS:
            waited = True
            kill([child.pid], signal.SIGKILL)
        shown = show(screen, shown)
    first_loss = first_loss or time.monotonic()
    # Killed, it leaves workers that have had their SIGTERM from init_ranks' PR_SET_PDEATHSIG and may be saving.
    end = time.monotonic() + timeout
    while workers_of(marker) and time.monotonic() < end and not (logs / "stop-now").exists():
        time.sleep(0.3)
    kill(processes(marker)[1], signal.SIGKILL)
    cause = None if signals and child.returncode < 0 else first_cause(logs, child.returncode, waited)
    result = {"exit": child.returncode, "first_loss": first_loss, "cause": cause}
    end = time.monotonic() + FULL_DISK
    while True:
        try:
            write_whole(logs / "result.json", json.dumps(result) + "\n")
            break
        except OSError as e:  # said where there is room: on the session's screen, or in Slurm's file
            said = f"{e.strerror} in {logs}"
            if cause and said not in cause["what"]:
                cause["what"] += f"; {said}"
            print(f"{cause['what'] if cause else said}: free some space, and launch again", file=sys.stderr, flush=True)
            if time.monotonic() > end:
                break
            time.sleep(5)
    return max(child.returncode, 0) or int(child.returncode != 0)


def first_cause(logs: Path, status: int, waited: bool):
    """What went wrong first on this host, where torchrun has ended with that status; None: nothing. waited: its workers
    had ended, it went on waiting for other hosts, and its agent killed it."""
    name, screen = logs.parent.name, logs / "agent.stderr.log"
    causes = []
    for rank, local, number in parse_failures(read(screen)):
        file = next(logs.glob(f"*/attempt_*/{local}/stderr.log"), "")
        end = tail(file, 30)
        how = f"was ended by {signal.Signals(-number).name}" if number < 0 else f"failed with status {number}"
        followed = OF_A_PEER.search(end) or (number > 0 and not end)
        sure = TERMINATED if number == -signal.SIGTERM else KILLED if number == -signal.SIGKILL else FAILED
        sure = FOLLOWED if followed and sure == FAILED and number != 2 else sure
        causes.append({"sure": sure, "what": f"rank {rank} on {name} {how}", "status": number, "file": str(file)})
        causes[-1]["tail"] = end
    if causes:  # torchrun kills those that do not end when another one has failed
        return min(causes, key=lambda cause: cause["sure"] or FAILED)
    if waited or status < 0:
        how = "waited for the other hosts in vain" if waited else f"was ended by {signal.Signals(-status).name}"
        sure, end = WAITED if waited else KILLED, ""
    elif status:
        sure, how, end = UNKNOWN, f"ended with status {status}", tail(screen, 30)
    else:
        return None
    return {"sure": sure, "what": f"torchrun on {name} {how}", "status": status, "file": str(screen), "tail": end}


def show(file: Path, offset) -> int:
    """Copies what is new in the run's log to the pane, for whoever attaches; a pane that does not take it misses it."""
    try:
        size = file.stat().st_size
        if offset is None:
            print(f"The run's log is {file}; Ctrl-B D leaves it going", flush=True)
            offset = size
        if size > offset:
            with open(file, "rb") as f:
                f.seek(offset)
                os.set_blocking(1, False)
                os.write(1, f.read(size - offset).replace(b"\n", b"\r\n" if os.isatty(1) else b"\n"))
        return size
    except OSError:
        return offset


def parse_failures(text: str) -> list:
    """What torchrun says of the workers that failed on this host, the one first that it saw failing first.
    -> (rank, local rank, exit status)"""
    others, _, root = text.rpartition("Root Cause")
    pattern = r"rank\s*:\s*(\d+) \(local_rank: (\d+)\)\s*\n\s*exitcode\s*:\s*(-?\d+)"
    found = re.findall(pattern, root) + re.findall(pattern, others)
    return [tuple(map(int, numbers)) for numbers in found]


def tail(file, lines: int) -> str:
    """The last lines of a file of any size."""
    if not file:
        return ""
    try:
        with open(file, "rb") as f:
            f.seek(max(0, os.path.getsize(file) - 65536))
            return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


# ---- what cluster.py asks for; every function takes the request and returns the answer


def own_files(root: Path) -> list:
    """The project's own files, sorted: the code, scripts and recipes; not `hosts`, which no run depends on."""
    patterns = (
        "*.py",
        "*.sh",
        "*.sbatch",
        "*.toml",
        "requirements.txt",
        "recipes/*.args",
        "launch/*.py",
        "bench/*.py",
        "bench/*.json",
    )
    return sorted(str(p.relative_to(root)) for pattern in patterns for p in root.glob(pattern) if p.is_file())


def content_hash(root: Path) -> str:
    total = hashlib.sha256()
    for name in own_files(root):
        data = (root / name).read_bytes()
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()[:16]


def tree_hash(root: Path) -> str:
    """Names and sizes of an environment's files; the contents would be gigabytes."""
    rows = []
    for folder, inside, files in os.walk(root):
        inside[:] = [d for d in inside if d != "__pycache__"]
        for name in files:
            path = os.path.join(folder, name)
            size = os.readlink(path) if os.path.islink(path) else os.path.getsize(path)
            rows.append(f"{os.path.relpath(path, root)}\0{size}")
    return hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()[:16] if rows else ""


def gpus(request: dict) -> list:
    """What CUDA_VISIBLE_DEVICES is to list for all GPUs that this run may use; [] where there are none."""
    visible = request["env"].get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if visible is not None:
        return [v for v in visible.split(",") if v and v != "-1"] if shutil.which("nvidia-smi") else []
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(i) for i in range(len(re.findall(r"^GPU \d", done.stdout, re.M)))] if done.returncode == 0 else []


def cores() -> int:
    return len(os.sched_getaffinity(0))


def probe(request: dict) -> dict:
    """What must be known of a host before anything starts."""
    root = Path(request["root"])
    return {
        "name": platform.node(),
        "connection": os.environ.get("SSH_CONNECTION", "").split(),
        "time": time.time(),
        "cores": cores(),
        "gpus": gpus(request),
        "code": content_hash(root) if (root / "launch" / "node.py").is_file() else "",
        "python": os.access(request["python"], os.X_OK),
        "tmux": bool(shutil.which("tmux")),
    }


def run(request: dict) -> dict:
    """A command in the checkout, with the run's environment -> its end."""
    try:
        done = subprocess.run(
            request["command"],
            cwd=request["root"],
            env={**os.environ, **request["env"]},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=request["limit"],
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{shlex.join(request['command'][:3])} ... took more than {request['limit']} s") from None
    return {"exit": done.returncode, "out": done.stdout, "err": done.stderr}


def prepare(request: dict) -> dict:
    """Makes the log folder, and makes sure that nothing of this run is alive here: refuses, or with `clear` ends it."""
    out = Path(request["root"], request["out"])
    folder = out / "logs" / request["label"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise Refused(f"{folder} cannot be made: {e.strerror}") from None
    marker = f"{os.path.realpath(folder)}/"
    if request["clear"]:
        kill_all(marker)
    ours, workers = processes(marker)
    if ours or workers:
        raise Refused(f"being trained already: processes {', '.join(map(str, ours + workers))}")
    steps = [
        int(p.parent.name[5:]) for p in out.glob("checkpoints/step-*[0-9]/manifest.json") if p.parent.name[5:].isdigit()
    ]
    return {
        "saved": max(steps, default=-1),
        "mark": read(out / "logs" / "launch.lock"),
        "port": probe_port(request["port"]),
    }


def probe_port(port: int) -> int:
    """A free port, or `port` itself if it is not 0 and free; 0 if it is taken."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return 0
        return s.getsockname()[1]


def interface_of(address: str) -> str:
    """The name of the network interface that has an address; empty if none is seen to have it."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def start(request: dict) -> dict:
    """Starts the agent, in a tmux session where there is tmux, else in the background -> where it is."""
    logs = log_folder(request)
    logs.mkdir(parents=True)
    env = {**os.environ, **request["env"]}
    if request["devices"] is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(request["devices"])
    elif request["processes_here"] > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // request["processes_here"])))
    torchrun = [*request["torchrun"], "--log-dir", str(logs), "train.py", *request["words"]]
    keeper = ["python3", "launch/node.py", "agent", str(logs), str(request["timeout"]), *torchrun]

    # The environment travels in a script that only its owner can read and that deletes itself: it belongs on no command
    # line and in no run folder, and a tmux server keeps the environment that it was started with.
    handle, script = tempfile.mkstemp(prefix="flatland-")
    with os.fdopen(handle, "w") as f:
        f.write('rm -f "$0"\n')
        for key, value in env.items():
            if re.fullmatch(r"[A-Za-z_]\w*", key) and key not in ("TMUX", "TMUX_PANE", "_"):
                f.write(f"export {key}={shlex.quote(value)}\n")
        f.write(f"cd {shlex.quote(request['root'])} && exec {shlex.join(keeper)}\n")
    plain = {key: os.environ[key] for key in PLAIN_ENVIRONMENT if key in os.environ}
    said = ""
    if shutil.which("tmux"):
        inner = ["env", "-i", "PATH=" + plain.get("PATH", os.defpath), "TERM=screen", "bash", script]
        done = subprocess.run(
            ["tmux", "new-session", "-d", "-s", request["session"], *inner], env=plain, capture_output=True, text=True
        )
        place, said = f"tmux session {request['session']}", done.stderr.strip()
        keep_off = ["tmux", "set-window-option", "-t", request["session"], "remain-on-exit", "off"]
        subprocess.run(keep_off, env=plain, capture_output=True)
    if not shutil.which("tmux") or done.returncode:
        place = "background" + (f" ({said})" if said else "")
        with open(logs / "background.stderr.log", "wb") as err:
            subprocess.Popen(
                ["bash", script], env=plain, stdin=subprocess.DEVNULL, stdout=err, stderr=err, start_new_session=True
            )
    end = time.monotonic() + request["limit"]
    while not (logs / "agent.pid").exists():
        if time.monotonic() > end:
            kill_all(f"{logs}/")
            Path(script).unlink(missing_ok=True)
            raise Refused(
                f"the agent did not start in {request['limit']} s ({place}): {tail(logs / 'agent.stderr.log', 3)}"
            )
        time.sleep(0.05)
    pid, name = read(logs / "agent.pid").split()
    if name != platform.node():
        raise Refused(f"tmux started the agent on {name}: set TMUX_TMPDIR to a folder that machines do not share")
    return {"place": place, "pid": int(pid)}


def read_json(path) -> dict:
    try:
        return json.loads(read(path))
    except ValueError:
        return {}


def log_folder(request: dict) -> Path:
    """Of the attempt on this host; its real path, for so the processes name it."""
    return Path(os.path.realpath(Path(request["root"], request["out"])), "logs", request["label"], request["id"])


def look(request: dict) -> dict:
    """The state of an attempt on this host, and its status.json."""
    logs = log_folder(request)
    pid = (read(logs / "agent.pid").split() or ["0"])[0]
    result, status = read_json(logs / "result.json"), read_json(logs.parents[2] / "status.json")
    if result:
        result["ago"] = time.monotonic() - result["first_loss"]
    times = [p.stat().st_mtime for p in logs.glob("*/attempt_*/*/std*.log")]
    return {
        "agent": str(logs) in read(f"/proc/{pid}/cmdline"),
        "workers": {str(rank): local for rank, local in workers_of(f"{logs}/").values()},
        "result": result,
        "status": status if status.get("attempt") == request["id"] else {},
        "age": max(0.0, time.time() - max(times)) if times else None,
    }


def listen() -> list:
    """-> [when cluster.py last gave a sign of life], kept up to date; ends this process when it is gone."""
    heard = [time.monotonic()]

    def loop() -> None:
        while sys.stdin.buffer.readline():
            heard[0] = time.monotonic()
        os._exit(0)

    threading.Thread(target=loop, daemon=True).start()
    return heard


def watch(request: dict) -> None:
    """A line of JSON with look() every second. Ends with its caller."""
    heard = listen()
    while time.monotonic() - heard[0] < ORPHANED:
        print(json.dumps(look(request)), flush=True)
        time.sleep(1)


def stop(request: dict) -> dict:
    """Lets the run stop here: its agent sees the file. Without an agent, what is left is ended directly."""
    logs, found = log_folder(request), look(request)
    if found["agent"]:
        (logs / ("stop-now" if request["now"] else "stop")).touch()
    else:
        kill(workers_of(f"{logs}/"), signal.SIGKILL if request["now"] else signal.SIGTERM)
    return found


def sweep(request: dict) -> dict:
    """Ends all that is left of an attempt, at once."""
    kill_all(f"{log_folder(request)}/")
    return look(request)


# ---- for doctor, sync and top


def examine(request: dict) -> dict:
    """All that doctor looks at on this host."""
    root, address = Path(request["root"]), request["address"]
    names = {}
    for name in [platform.node(), *request["names"]]:
        try:
            names[name] = sorted({found[4][0] for found in socket.getaddrinfo(name, None, socket.AF_INET)})
        except OSError as e:
            names[name] = [str(e)]
    try:
        reverse = socket.gethostbyaddr(address)[0]
    except OSError:
        reverse = ""
    code = (
        "import json, torch; nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None;"
        "print(json.dumps([torch.__version__, torch.version.cuda, nccl, torch.cuda.device_count()]))"
    )
    env = {**os.environ, **request["env"]}
    done = subprocess.run([request["python"], "-c", code], capture_output=True, text=True, env=env)
    torch = json.loads(done.stdout) if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]
    version = subprocess.run([request["python"], "-V"], capture_output=True, text=True).stdout.strip()
    driver = query("driver_version")
    free = {}
    for folder in (request["out"], tempfile.gettempdir(), "/dev/shm"):
        there = Path(root, folder)
        while not there.exists():
            there = there.parent
        free[folder] = shutil.disk_usage(there).free
    left = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and "TORCHELASTIC_RUN_ID=" in read(f"/proc/{entry}/environ"):
            env = environment_of(int(entry))
            left.append([int(entry), re.sub(r"/logs/.*", "", env.get("TORCHELASTIC_ERROR_FILE", ""))])
    return {
        "name": platform.node(),
        "names": names,
        "reverse": reverse,
        "python": version,
        "torch": torch,
        "driver": driver[0] if driver else "",
        "code": content_hash(root) if root.is_dir() else "",
        "shared": (root / request["mark"]).exists(),
        "gpus": len(gpus(request)),
        "gpu_memory": [int(float(m)) for m in query("memory.used")],
        "left": left,
        "free": free,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "port": probe_port(request["port"]),
        "tmux": bool(shutil.which("tmux")),
        "time": time.time(),
    }


def query(fields: str, what: str = "") -> list:
    """A line for each GPU, or of another query; [] where there are none, or nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-{what or f'gpu={fields}'}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def pairs(request: dict) -> None:
    """All-reduces with one other host after another, as cluster.py says in lines on stdin. Runs in the Python that has
    torch. Role 0 keeps the store, at a port of its choice, which it answers first."""
    name = interface_of(request["address"])
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.update(request["env"])
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=request["limit"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin.buffer:
        order = json.loads(line)
        try:
            address, port = order["address"], order["port"]
            store = dist.TCPStore(address, port, 2, order["role"] == 0, limit, wait_for_workers=False)
            if order["role"] == 0:
                print(json.dumps({"port": store.port}), flush=True)
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo", store=store, rank=order["role"], world_size=2, timeout=limit
            )
            data = torch.ones(request["bytes"] // 4, device=device)
            times = []
            for _ in range(6):
                begin = time.perf_counter()
                dist.all_reduce(data)
                data[0].item()
                times.append(time.perf_counter() - begin)
            answer = {"mb_per_s": request["bytes"] / 1e6 / min(times)}
            if data[-1].item() != 2**6:
                answer = {"error": f"the sum is wrong: {data[-1].item()}, expected {2**6}"}
            dist.barrier()
        except Exception as e:
            answer = {"error": str(e).splitlines()[0][:200]}
        if dist.is_initialized():
            dist.destroy_process_group()
        print(json.dumps(answer), flush=True)
    os._exit(0)


def usage(request: dict) -> None:
    """A line of JSON every few seconds with the load of this machine, its GPUs and its workers, for top.py."""
    heard = listen()
    before, spent = cpu_times(), {}
    mine = os.path.join(os.path.realpath(request["out"]), "logs", "") if request["out"] else ""
    while time.monotonic() - heard[0] < ORPHANED:
        time.sleep(request["every"] if spent else 0.5)
        now = cpu_times()
        busy, total = now[0] - before[0], now[1] - before[1]
        before = now
        memory = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+) kB", read("/proc/meminfo"), re.M)}
        ranks, seen = {}, {}
        for pid, (rank, local) in workers_of(mine).items():
            fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
            if fields:
                seen[pid] = (int(fields[11]) + int(fields[12]), time.monotonic())
                ticks, at = spent.get(pid, (0, 0.0))
                share = (seen[pid][0] - ticks) / os.sysconf("SC_CLK_TCK") / (seen[pid][1] - at) if pid in spent else 0.0
                ranks[str(rank)] = (local, share)
        spent = seen or {0: (0, 0.0)}
        answer = {
            "cpu": busy / total if total else 0.0,
            "cores": cores(),
            "load": os.getloadavg()[0],
            "mem_size": memory.get("MemTotal", 0) / 2**20,
            "mem_used": (memory.get("MemTotal", 0) - memory.get("MemAvailable", 0)) / 2**20,
            "ranks": ranks,
            "gpus": gpu_usage(),
        }
        print(json.dumps(answer), flush=True)


def cpu_times() -> tuple:
    """(busy, all) ticks of all cores together since the start."""
    fields = [int(n) for n in read("/proc/stat").splitlines()[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def gpu_usage() -> list:
    out, processes = [], query("", "compute-apps=gpu_uuid")
    names = "index,uuid,utilization.gpu,power.draw,power.limit,memory.used,memory.total,temperature.gpu,clocks.sm"
    for line in query(names):
        index, uuid, *values = [v.strip() for v in line.split(",")]
        busy, watts, limit, used, size, heat, clock = (float(v) if re.match(r"[\d.]+$", v) else 0.0 for v in values)
        row = {"index": int(index), "busy": busy / 100, "watts": watts, "limit": limit, "used": used / 1024}
        row |= {"size": size / 1024, "heat": heat, "clock": clock, "processes": processes.count(uuid)}
        out.append(row)
    return out


def unpack(request: dict) -> dict:
    """Takes the project's files, and after the request on stdin an environment as a tar, where it is sent."""
    root = Path(request["root"])
    root.mkdir(parents=True, exist_ok=True)
    if (root / request["mark"]).exists():
        return {"shared": True}
    for name in set(own_files(root)) - set(request["files"]):
        (root / name).unlink()
    for name, (mode, text) in request["files"].items():
        (root / name).parent.mkdir(exist_ok=True)
        write_whole(root / name, text)
        (root / name).chmod(mode)
    return {"shared": False, "code": content_hash(root), "environment": tree_hash(root / ".venv")}


def unpack_environment(request: dict) -> dict:
    """Takes .venv as a tar on stdin, and puts it in place once it is whole."""
    root = Path(request["root"])
    new, old = root / ".venv.new", root / ".venv.old"
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        archive.extractall(new, **({"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}))
    if (root / ".venv").exists():
        os.rename(root / ".venv", old)
    os.rename(new, root / ".venv")
    shutil.rmtree(old, ignore_errors=True)
    return {"environment": tree_hash(root / ".venv")}


OPERATIONS = (
    probe, run, prepare, start, look, watch, stop, sweep, examine, pairs, usage, unpack, unpack_environment,
)  # fmt: skip


def main(request: dict) -> None:
    operation = next(f for f in OPERATIONS if f.__name__ == request["op"])
    try:
        answer = operation(request)
    except (Refused, OSError, subprocess.SubprocessError, tarfile.TarError) as e:
        answer = {"refused": str(e)}
    if answer is not None:
        print(json.dumps(answer), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a thread may be reading stdin, which the interpreter's own end does not like


if __name__ == "__main__":
    if "request" in globals():  # sent by cluster.py
        main(globals()["request"])
    else:
        sys.exit(agent(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
