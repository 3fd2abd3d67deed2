"""The part of the launcher that runs on each host: it examines the machine, and starts and ends processes there.

`python3 launch/node.py serve OPERATION` answers cluster.py over ssh; for localhost, cluster.py calls `answer`. The
request is a line of JSON on stdin, so that no secret is on a command line: the host's line in `hosts`, facts about the
host, and the job. The answer is a line of JSON. It runs in the environment's Python, which has the same path on all
hosts.

The *agent* (`node.py agent`) is torchrun, in the host's tmux session or under Slurm's srun. When the ranks have ended,
it ends the remaining processes of the attempt. Its log folder is `runs/NAME/logs/HOST/ID`. There it writes
agent.stderr.log, and agent.json: {} until the end, then its exit status. A rank that fails writes error.json into its
folder below (base/errors.py); for a rank that was killed, the agent writes it. A process belongs to an attempt if its
variable TORCHELASTIC_ERROR_FILE is below this folder."""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from base.disk import ROOT
from base.errors import FOLLOWED, prepare_python

THIS_FILE = f"{ROOT}/launch/node.py"
# The variable that all processes of a run have, with a path in the attempt's log folder.
MARK = "TORCHELASTIC_ERROR_FILE"
START_LIMIT = 60  # seconds for an agent to appear
REPETITIONS = 5000  # of a product of 1.1 TFLOP and a sum, by doctor: 10 to 60 seconds
KILLED = -1  # the order of an end before the first cause, which has 0 as job/job.py says
# The variables that a tmux server gets. It keeps the environment of its start and shows it to everybody.
PLAIN_ENVIRONMENT = [
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
]
TORCHRUN = [  # its flags, with the fields of a request
    "--nnodes={nodes}",
    "--node-rank={node}",
    "--nproc-per-node={slots}",
    "--max-restarts=0",
    "--master-addr={first}",
    "--master-port={port}",
    "--signals-to-handle=SIGQUIT",
    "--rdzv-id={id}",
    "--rdzv-conf=timeout={meet}",
    "--redirects=3",
    "--tee=1",
    "--log-dir={logs}",
]


# ---- files and processes


def read(path):
    """The text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def read_json(path):
    """{} if the file is missing or not JSON. base/disk.py would wait for a disk that fails."""
    try:
        return json.loads(read(path))
    except ValueError:
        return {}


def write_json(path, value):
    """Replaces a file in one step: a reader sees the old content or the new content. On a full disk the old file is
    overwritten instead, because it has room."""
    temporary, text = path.with_suffix(".new"), json.dumps(value, indent=1) + "\n"
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        path.write_text(text)


def tail(path, lines):
    """The last lines of a file; empty if it cannot be read."""
    command = ["tail", "-n", str(lines), path]
    return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout


def last_line(text):
    return text.strip().rpartition("\n")[2]


def processes(logs):
    """process id -> environment as text, of all processes of the run that logs below this folder."""
    found = {int(path.parent.name): read(path) for path in Path("/proc").glob("[0-9]*/environ")}
    return {p: e for p, e in found.items() if f"{MARK}={logs}/" in e and p != os.getpid()}


def kill_all(logs):
    """Kills all other processes of the run."""
    for _ in range(50):  # a process may just have started another
        for pid in (pids := processes(logs)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.1)


# ---- the agent of a torchrun


def agent(parcel):
    """Is the agent of the request that `start` has left in a file."""
    request = read_json(parcel)
    os.unlink(parcel)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    return run_agent(request)


def join(out, attempt, ranks, port, meet, addresses, *words):
    """Is the agent of a Slurm node for the run `out`. meet: seconds for all agents to find each other; addresses: of
    the attempt's nodes, in their order; words: for train.py."""
    nodes = addresses.split()
    request = dict(
        out=out,
        label=os.environ["SLURMD_NODENAME"],
        id=attempt,
        nodes=len(nodes),
        node=int(os.environ["SLURM_NODEID"]),
        slots=int(ranks),
        first=nodes[0],
        last=nodes[-1],
        port=port,
        meet=meet,
        words=words,
    )
    log_folder(request).mkdir(parents=True)
    return run_agent(request)


def outcome(out, attempt, ranks, *nodes):
    """Prints how an attempt under Slurm ended, in a word of status.json or `none`, and the node that failed first: the
    node of the last rank in the message, because waiting ranks name the rank that is behind."""
    status, node = read_json(f"{out}/status.json"), ""
    state = status["state"] if status.get("attempt") == attempt else "none"
    files = Path(out).glob(f"logs/*/{attempt}/*/attempt_*/*/error.json")
    error = min(map(read_json, files), key=lambda error: error.get("order", FOLLOWED), default={})
    if error.get("order", FOLLOWED) <= 0 and state != "finished":
        state, ranks_named = error.get("kind", "failed"), re.findall(r"rank (\d+)", f"rank 0: {error['message']}")
        node = nodes[int(ranks_named[-1]) // int(ranks)]
    print(state, node)


def run_agent(request):
    """Runs torchrun in this process, then ends the processes that it has left -> its exit status. A signal becomes a
    request to stop, as from `launch.sh stop`. torchrun handles none, because it would report a failure."""
    logs = log_folder(request)
    write_json(logs / "agent.json", {})
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(logs / "agent.stderr.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: (logs.parents[1] / "stop").touch())
    prepare_python()  # raises the limit of open files: the first machine's torchrun has two connections to each rank
    # Seconds that ranks have to save when torchrun ends. torch 2.11 has no flag for it.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    if request["slots"] > 1:  # torchrun would give each rank one thread, also for AdamW on the CPU
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // request["slots"])))
    flags = [flag.format(**request, logs=logs) for flag in TORCHRUN]
    status = 1
    try:
        choose_interface(request["node"], request["first"], request["last"])
        status = torchrun(logs, [*flags, f"{ROOT}/train.py", *request["words"]])
    except BaseException:
        traceback.print_exc()  # before agent.json has the end: then the launcher shows this file
    kill_all(logs)
    write_json(logs / "agent.json", {"exit": status})
    return status


def torchrun(logs, words):
    """torch.distributed.run in this process -> its exit status. Writes error.json for ranks that were killed."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(words)
        return 0
    except ChildFailedError as error:
        first = min(failure.timestamp for failure in error.failures.values())
        for rank, failure in error.failures.items():
            file = next(logs.glob(f"*/attempt_*/{failure.local_rank}")) / "error.json"
            if not file.exists():
                code, late = failure.exitcode, failure.timestamp - first > 20
                # torchrun ends ranks with SIGTERM, later with SIGKILL. NCCL aborts a rank whose peers do not answer.
                follows = late or code in (-signal.SIGTERM, -signal.SIGABRT)
                order = FOLLOWED if follows else KILLED
                message = describe_end(f"rank {rank} on {logs.parent.name}", code)
                with contextlib.suppress(OSError):  # the disk is full
                    write_json(file, {"order": order, "message": message})
        return 1


def describe_end(who, status):
    if status is None:
        return f"{who} was gone: killed, or the machine restarted"
    return f"{who} failed with status {status}" if status > 0 else f"{who} was ended by {signal.Signals(-status).name}"


# ---- operations: each takes the request and returns the answer


def digest(names):
    """Identifies the content of these files of the checkout."""
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in names)).hexdigest()


def query(fields):
    """What nvidia-smi says of each GPU, in a line; [] if it is missing or fails."""
    command = ["timeout", "30", "nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    return [] if done.returncode else done.stdout.splitlines()


def probe(request):
    """Facts about a host for a launch. gpus: the values for CUDA_VISIBLE_DEVICES of the GPUs that it may use."""
    os.stat(request["cwd"])  # the error refuses a host that lacks the folder to which relative paths refer
    gpus, visible = query("index"), {**os.environ, **request["env"]}.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None:
        gpus = [gpu for gpu in visible.split(",") if gpu not in ("", "-1")]
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {"connection": connection, "gpus": gpus, "digest": digest(request["files"])}


def environment(request):
    """The environment of a process of the run on this host."""
    numbers = {"LOCAL_WORLD_SIZE": str(request["slots"]), "GROUP_RANK": str(request["node"])}  # as torchrun names them
    env = {**os.environ, **request["env"], **numbers}
    return env if request["devices"] is None else env | {"CUDA_VISIBLE_DEVICES": ",".join(request["devices"])}


def run(request):
    """Runs a command with the run's environment, in the folder where the user stands -> its exit status and output."""
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(request["command"], cwd=request["cwd"], env=environment(request), **pipes)
    return {"exit": done.returncode, "out": done.stdout, "err": done.stderr}


def choose_interface(node, first, last):
    """Makes gloo and NCCL use the network interface that leads to the first node, or from there to the last. gloo would
    look up its own hostname, which Debian's /etc/hosts maps to 127.0.1.1."""
    peer = first if node else last
    address = socket.getaddrinfo(peer, None)[0][4][0]  # Slurm has names
    route = subprocess.getoutput(f"ip -o route get {address}")
    if match := re.search(r" dev (\S+)", route):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", match[1])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={match[1]}")  # without `=`: every name that begins like this


def log_folder(request):
    """The attempt's log folder on this host, as a real path: the run's processes have it in their environment."""
    return Path(os.path.realpath(request["out"]), "logs", request["label"], request["id"])


def start(request):
    """Starts the agent, in a tmux session if tmux works, otherwise in the background. Kills the processes of earlier
    attempts. Refuses if this host does not see the run folder."""
    logs = log_folder(request)
    if not logs.is_dir():
        return {
            "refused": f"the folder {request['out']} there is not the one here: give an --out that all machines see"
        }
    kill_all(logs.parent)
    # The request travels in a file that only its owner can read, and that is removed when it has been read. Its
    # environment must not appear on a command line, in the run folder or in a tmux server.
    with tempfile.NamedTemporaryFile("w", prefix="flatland-", delete=False) as file:
        json.dump(request | {"env": environment(request)}, file)
    # The agent has the mark from its start, because /proc does not show a variable that it sets later.
    command = ["env", f"{MARK}={logs}/error.json", sys.executable, THIS_FILE, "agent", file.name]
    plain = {key: os.environ[key] for key in PLAIN_ENVIRONMENT if key in os.environ}
    tmux = ["tmux", "new-session", "-d", "-s", request["session"], *command]
    if not shutil.which("tmux") or subprocess.run(tmux, env=plain, capture_output=True).returncode:
        nothing = subprocess.DEVNULL
        subprocess.Popen(command, env=plain, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    end = time.monotonic() + START_LIMIT
    while not (logs / "agent.json").exists():
        if time.monotonic() > end:
            Path(file.name).unlink(missing_ok=True)
            return {"refused": f"the agent did not start in {START_LIMIT} s"}
        time.sleep(0.05)
    return {}


def look(request):
    """The state of an attempt on this host: the agent's record, errors, number of processes, and GPUs on request."""
    logs = log_folder(request)
    alive = processes(logs)
    record = read_json(logs / "agent.json")  # after the processes: writing the exit status is an agent's last act
    files = sorted(logs.glob("*/attempt_*/*/error.json"))  # rank 0 is first: it tells what all ranks have
    errors = [read_json(file) | {"file": str(file.with_name("stderr.log"))} for file in files]
    if not alive:
        record.setdefault("exit", None)
    if (status := record.get("exit", 0)) != 0:
        what, file = describe_end(f"the run on {request['label']}", status), str(logs / "agent.stderr.log")
        errors.append({"order": FOLLOWED if status else KILLED, "message": what, "file": file})
    errors = [error | {"tail": tail(error.get("file", ""), 30)} for error in errors if "order" in error]
    return {
        **record,
        "errors": errors,
        "processes": len(alive),
        "gpus": query("utilization.gpu,memory.used") if request.get("gpus") else [],
    }


def sweep(request):
    """Kills every process of an attempt."""
    kill_all(log_folder(request))
    return {}


def count_odd(factors, times):
    """factors: a bf16 matrix on each device. -> of each device, how many of so many repetitions of a product and a sum
    differ in a bit from its first. The devices work at the same time: some compute wrongly only under load."""
    import torch

    def compute(x):
        product, total = x @ x, x.sum(0, dtype=torch.float32)
        return torch.cat((product.view(torch.int16).flatten(), total.view(torch.int16)))

    first, odd = [compute(x) for x in factors], [0] * len(factors)
    for _ in range(times):
        for i, x in enumerate(factors):
            odd[i] += (compute(x) != first[i]).any()  # without waiting for the device
    return [int(count) for count in odd]


def measure(first, last, port, nodes, *check):
    """Prints, as JSON, this host's version of torch, the speed of a product on each GPU, the MB/s of the sum of 64 MiB
    over all hosts, the answer of train.py's own check, and problems, among them GPUs that compute wrongly."""
    node = int(os.environ["GROUP_RANK"])
    choose_interface(node, first, last)
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.utils.benchmark import Timer

    facts = {"torch": f"{torch.__version__} python {platform.python_version()}", "TFLOP/s": []}
    facts["problems"] = [f"lacks {name}" for name in ("tmux", "gcc", "ip") if not shutil.which(name)]
    factors = []
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.set_device(gpu)
        factors.append(x := torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda"))
        facts["TFLOP/s"].append(round(2 * 8192**3 / 1e12 / Timer("x @ x", globals=locals()).blocked_autorange().median))
    for gpu, odd in enumerate(count_odd(factors, REPETITIONS)):
        if odd:
            facts["problems"].append(f"GPU {gpu} computes wrongly: {odd} of {REPETITIONS} results differ: replace it")
    try:
        meeting = dict(init_method=f"tcp://{first}:{port}", rank=node, world_size=int(nodes))
        dist.init_process_group(**meeting, timeout=timedelta(seconds=30))
        data = torch.ones(2**24, device="cuda" if torch.cuda.is_available() else "cpu")
        if int(nodes) > 1:
            facts["MB/s"] = round(2**26 / 1e6 / Timer("dist.all_reduce(data)", globals=locals()).timeit(1).median)
        dist.barrier()
    except RuntimeError as e:
        facts["problems"].append(f"all-reduce: {last_line(str(e))}")
    done = subprocess.run(check, capture_output=True, text=True)
    if done.returncode:
        facts["problems"].append(last_line(done.stderr).removeprefix("error: "))
    else:
        facts |= json.loads(last_line(done.stdout))
    print(json.dumps(facts), flush=True)
    os._exit(0)


def answer(operation, request):
    """The answer of an operation, or the reason why it cannot be done."""
    try:
        return globals()[operation](request)
    except OSError as e:
        return {"refused": str(e)}


def serve(operation):
    """Answers the request on stdin."""
    print(json.dumps(answer(operation, json.loads(sys.stdin.buffer.readline()))))


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](*sys.argv[2:]))
