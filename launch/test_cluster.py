"""The launcher on several hosts: localhost nodes, and hosts behind an sshd of the test's own; a stand-in for train.py
under the real torchrun. How an attempt is judged, and the list of hosts, are tested without processes."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

import cluster
import doctor
import node
from cluster import Supervisor
from doctor import Host, read_hosts, settle_addresses, share_machine
from lib.errors import UserError
from lib.run import take_lock
from test_launch import LIMIT, checkout, command_lines, contains, eventually, program  # noqa: F401

NAME = os.uname().nodename


# ---- without processes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost\nlocalhost slots=2", [("localhost", 0, NAME), ("localhost", 2, f"{NAME}-2")]),
        (
            "\ufeff# ours\r\n\r\n  me@node-1:2222\tslots=8 # big\r\na_b.example.org",
            [("me@node-1:2222", 8, "node-1-2222"), ("a_b.example.org", 0, "a_b.example.org")],
        ),
        ("10.0.0.1:22\n[fe80::1]:22", [("10.0.0.1:22", 0, "10.0.0.1-22"), ("[fe80::1]:22", 0, "-fe80--1--22")]),
        ("node1\nnode1 slots=2", [("node1", 0, "node1"), ("node1", 2, "node1-2")]),
    ],
)
def test_hosts_files(monkeypatch, tmp_path, text, expected):
    (tmp_path / "hosts").write_bytes(text.encode())
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert [(h.name, h.slots, h.label) for h in read_hosts("")] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# node1\n\n", "names no machine"),
        ("node1\n-oProxyCommand=evil", "hosts: '-oProxyCommand=evil'"),
        *((text, "is not a host") for text in ("node1;reboot", "-oProxyCommand@node1", ".a@node1", "$(reboot)")),
        ("node1:ssh", "is not a host"),
        ("node1 slots=0", "slots=N"),
        ("node1 slots=8 gpus=8", "slots=8 gpus=8"),
        ("node1, node2", "is not a host"),
    ],
)
def test_bad_hosts_files(monkeypatch, tmp_path, text, message):
    (tmp_path / "hosts").write_text(text)
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        read_hosts("")


def test_the_file_hosts_may_be_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert [h.name for h in read_hosts("")] == ["localhost"]
    assert [h.name for h in read_hosts("a,b@c:22, d")] == ["a", "b@c:22", "d"]


@pytest.mark.parametrize(
    ("connections", "expected"),
    [
        ([None, None], ["127.0.0.1", "127.0.0.1"]),
        (["10.0.0.9 5 10.0.0.1 22", "10.0.0.9 6 10.0.0.2 22"], ["10.0.0.1", "10.0.0.2"]),
        # this machine's own name means 127.0.1.1 to it, as on Debian
        (["127.0.0.1 5 127.0.1.1 22", "10.0.0.1 6 10.0.0.2 22"], ["10.0.0.1", "10.0.0.2"]),
        ([None, "10.0.0.1 6 10.0.0.2 22"], ["10.0.0.1", "10.0.0.2"]),
        (["127.0.0.1 5 127.0.0.2 22", "127.0.0.1 5 127.0.0.3 22"], ["127.0.0.2", "127.0.0.3"]),
    ],
)
def test_addresses_are_those_that_connections_came_in_at(connections, expected):
    hosts = [
        Host(f"h{i}" if c else "localhost", facts={"connection": (c or "").split()}) for i, c in enumerate(connections)
    ]
    settle_addresses(hosts)
    assert [h.address for h in hosts] == expected


@pytest.mark.parametrize(
    ("gpus", "slots", "nproc", "expected"),
    [
        ("", [0, 0], 0, [(1, None), (1, None)]),
        ("", [0, 3], 0, [(1, None), (3, None)]),
        ("0 1 2 3", [0], 0, [(4, ["0", "1", "2", "3"])]),
        ("4 5 6 7", [0, 0], 0, [(2, ["4", "5"]), (2, ["6", "7"])]),
        ("0 1 2 3", [0, 0], 1, [(1, ["0"]), (1, ["2"])]),
        ("0", [0, 0], 0, "1 processes, but 0 visible GPUs"),
        ("0 1", [4], 0, "4 processes, but 2 visible GPUs"),
    ],
)
def test_a_machines_gpus_are_divided_among_its_nodes(gpus, slots, nproc, expected):
    hosts = [Host("localhost", slots=n, label=f"h{i}", facts={"gpus": gpus.split()}) for i, n in enumerate(slots)]
    problems = share_machine(hosts, nproc)
    if isinstance(expected, str):
        assert expected in problems[0]
    else:
        assert not problems and [(h.slots, h.devices) for h in hosts] == expected
        assert {h.ranks_here for h in hosts} == {sum(n for n, _ in expected)}


BUG = "Traceback\nKeyError: 'x'"
PEER = "PeerFailure: RuntimeError: Connection reset by peer"
CAUSES = {
    # failed ranks as (rank, exit status, error), the first one first; torchrun's status -> order, words
    "a bug": ([(1, 1, "KeyError: 'x'"), (0, -15, "")], 1, node.FAILED, "rank 1 on a failed with status 1"),
    "a bug, and torchrun killed a deaf one": ([(1, 1, "KeyError"), (0, -9, "")], 1, node.FAILED, "rank 1 on a failed"),
    "a bug in restore": (
        [(1, 1, "RuntimeError: checkpoint.restore, Socket, peer")],
        1,
        node.FAILED,
        "rank 1 on a failed",
    ),
    "killed": ([(0, 1, PEER), (1, -9, "")], 1, node.KILLED, "rank 1 on a was ended by SIGKILL"),
    "a peer's end": ([(0, 1, PEER)], 1, node.FOLLOWED, "rank 0 on a failed with status 1"),
    "the store's end": ([(0, 1, "DistNetworkError: x")], 1, node.FOLLOWED, "rank 0 on a failed with status 1"),
    "NCCL's abort at a peer's end": ([(0, -6, "")], 1, node.FOLLOWED, "SIGABRT"),
    "a segmentation fault": ([(0, -11, "")], 1, node.FAILED, "rank 0 on a was ended by SIGSEGV"),
    "the user's mistake": ([(0, 2, "UserError: --timeout 0")], 1, node.FAILED, "status 2"),
    "ended from outside": ([(0, -15, "")], 1, node.FOLLOWED, "SIGTERM"),
    "torchrun was killed": ([], -9, node.KILLED, "the run on a was ended by SIGKILL"),
    "torchrun failed": ([], 1, node.FOLLOWED, "the run on a failed"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_cause_on_a_host(tmp_path, name):
    failed, status, order, words = CAUSES[name]
    logs = tmp_path / "a" / "id"
    for rank, number, _ in failed:
        file = logs / "x" / "attempt_0" / str(rank) / "stderr.log"
        file.parent.mkdir(parents=True)
        file.write_text(f"the end of {rank}: {number}")
    if failed:
        node.write_json(logs / "failures.json", [(rank, rank, number, error) for rank, number, error in failed])
    cause = node.first_cause(logs, status)
    assert cause["order"] == order and words in cause["what"]
    assert not failed or cause["tail"].endswith(f": {cause['status']}")
    assert node.first_cause(logs, 0) is None


FAILING_RANKS = """
import os, signal, sys, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "0":
        time.sleep(60)
    raise KeyError("store")
main()
"""


def test_torchrun_names_the_failed_ranks_with_their_errors(tmp_path):
    (tmp_path / "ranks.py").write_text(FAILING_RANKS)
    command = [sys.executable, cluster.ROOT / "launch" / "node.py", "torchrun", tmp_path, "--standalone"]
    command += ["--nproc-per-node", "2", "--log-dir", tmp_path, "--redirects", "3", tmp_path / "ranks.py"]
    assert subprocess.run(list(map(str, command)), capture_output=True, timeout=LIMIT).returncode == 1
    failures = node.read_json(tmp_path / "failures.json")
    assert failures == [[1, 1, 1, "KeyError: 'store'"], [0, 0, -signal.SIGTERM, failures[1][3]]]


def end(order: int, what: str, **more) -> dict:
    return {"exit": 1, "cause": {"order": order, "what": what, "file": "f", "tail": "", **more}}


LOST = end(node.FOLLOWED, "rank 0 on a failed")
KILLED = end(node.KILLED, "rank 1 on b was killed")
GONE = end(node.KILLED, "everything on b was gone")
FINE, SILENT = {"cause": None}, {"silent": "no answer in 20 s"}
SIGNALLED = end(node.FOLLOWED, "torchrun on a failed")
MISTAKE = end(node.FAILED, "rank 0 failed", tail="error: no GPU", status=2)
STOP, NOW = " ", "now"
JUDGEMENTS = {
    # state in status.json, request to stop, last answers of hosts a and b -> state, words of the message
    "finished": ("finished", "", [FINE, FINE], "finished", ""),
    "finished, though an agent was killed after it": ("finished", "", [FINE, GONE], "finished", ""),
    "a worker was stopped by hand": ("stopped", "", [FINE, FINE], "stopped", ""),
    "kill-session": ("stopped", "", [SIGNALLED, FINE], "stopped", ""),
    "an agent was killed, so all stopped": ("stopped", "", [FINE, KILLED], "failed", "rank 1 on b was killed"),
    "the user's mistake": ("error", "", [SIGNALLED, FINE], "error", ""),
    "the same, before it began": (None, "", [MISTAKE, LOST], "error", ""),
    "a worker was killed": ("running", "", [LOST, KILLED], "failed", "rank 1 on b was killed"),
    "a bug on one rank": ("failed", "", [LOST, end(node.FAILED, "b failed", tail=BUG)], "failed", "b failed"),
    "a machine restarted": ("failed", "", [LOST, GONE], "failed", "everything on b was gone"),
    "a cable was pulled": ("failed", "", [LOST, SILENT], "failed", "b does not answer"),
    "a switch lost its power": ("failed", "", [SILENT, SILENT], "failed", "a does not answer"),
    "stopped early": (None, STOP, [SIGNALLED, SIGNALLED], "stopped", ""),
    "stopped at once": ("running", NOW, [SIGNALLED, SIGNALLED], "stopped", ""),
    "stopped, but a peer was dead": ("running", STOP, [LOST, SILENT], "failed", "b does not answer"),
}


@pytest.fixture
def supervisor(tmp_path):
    (tmp_path / "logs").mkdir()
    supervisor = Supervisor({"out": str(tmp_path), "ssh": "", "id": "x", "mark": "m"}, [])
    supervisor.save(id="x")
    return supervisor


@pytest.mark.parametrize("name", JUDGEMENTS)
def test_how_an_attempt_is_judged(supervisor, name):
    status, asked, results, state, output = JUDGEMENTS[name]
    if asked:
        (supervisor.out / "logs" / "stop").write_text(asked.strip())
    if status:
        now = {"state": status, "step": 7, "message": "m", "attempt": "x"}
        (supervisor.out / "status.json").write_text(json.dumps(now))
    supervisor.hosts = [Host(n, label=n, last=r) for n, r in zip("ab", results, strict=True)]
    found = supervisor.judge()
    assert (found.state, output in found.message) == (state, True)
    if name == "a bug on one rank":
        assert BUG in found.details and "---- the end of f" in found.details


def test_a_write_that_fails_on_a_full_disk_is_made_up_for(supervisor, monkeypatch):
    write, launch = node.write_json, cluster.read_launch(supervisor.out)
    monkeypatch.setattr(cluster, "write_json", lambda *_: os.truncate(28, -1))  # an OSError
    supervisor.save(state="failed", message="m")
    assert cluster.read_launch(supervisor.out) == launch
    monkeypatch.setattr(cluster, "write_json", write)
    supervisor.save()
    assert cluster.read_launch(supervisor.out) == supervisor.launch and supervisor.launch["message"] == "m"


@pytest.mark.parametrize(
    ("state", "attempt", "age", "locked", "expected"),
    [
        ("running", "7-0", 0, True, ("running", "")),  # Slurm's
        ("running", "7-0", 0, False, ("failed", "dead: it ended without a message")),
        ("stopped", "7-0", 0, False, ("stopped", "m")),
        ("stopped", "old", 9, False, ("failed", "ours")),  # our launch came later, and never began
        ("finished", "x", 0, False, ("failed", "ours")),  # our attempt's: the supervisor knows better
    ],
)
def test_a_run_that_slurm_started_is_known_by_its_status_and_its_lock(
    supervisor, state, attempt, age, locked, expected
):
    out = supervisor.out
    supervisor.save(state="failed", message="ours")
    status = {"state": state, "step": 7, "message": "m" if state == "stopped" else "", "attempt": attempt}
    node.write_json(out / "status.json", status | {"time": time.time() - age})
    lock = take_lock(out) if locked else None
    end = cluster.state_of(out)
    assert (end.state, end.message) == expected
    assert lock is None or lock.release() is None


def test_a_launch_is_supervised_while_its_lock_is_held(supervisor):
    assert not cluster.is_supervised(supervisor.out)
    with cluster.supervisor_lock(supervisor.out):
        assert cluster.is_supervised(supervisor.out)
        supervisor.save(state="running")
        assert cluster.state_of(supervisor.out).state == "running"
    assert not cluster.is_supervised(supervisor.out)


def test_the_ranks_are_in_the_order_of_the_hosts(tmp_path):
    hosts = [asdict(Host(n, slots=2, label=n)) for n in "ab"]
    files = [tmp_path / "logs" / n / "1" / "x" / "attempt_0" / i / "stdout.log" for n in "ab" for i in "01"]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    node.write_json(tmp_path / "logs" / "launch.json", {"id": "1", "hosts": hosts})
    assert [cluster.output_files(tmp_path, which) for which in "0123"] == [[file] for file in files]
    assert cluster.output_files(tmp_path, "b") == files[2:]
    with pytest.raises(UserError, match="no host '4'"):
        cluster.output_files(tmp_path, "4")


def test_an_agent_records_that_its_torchrun_was_killed(tmp_path):
    logs = tmp_path / "logs" / "a" / "x"
    logs.mkdir(parents=True)
    command = [sys.executable, cluster.ROOT / "launch" / "node.py", "agent", logs, "1", "bash", "-c", "kill -9 $$"]
    done = subprocess.run([*command, "--local-addr", "127.0.0.1"], capture_output=True, text=True, timeout=LIMIT)
    record = json.loads((logs / "agent.json").read_text())
    assert (record["exit"], record["cause"]["order"], done.stderr) == (-9, node.KILLED, "")


@pytest.mark.parametrize(
    ("ranks", "given", "expected"),
    [(1, "", "None ="), (2, "", f"{max(1, len(os.sched_getaffinity(0)) // 2)} ="), (2, "7", "7 =")],
)
def test_what_an_agent_sets_for_its_ranks(tmp_path, ranks, given, expected):
    names = "'OMP_NUM_THREADS', 'NCCL_SOCKET_IFNAME', 'GLOO_SOCKET_IFNAME'"
    logs = tmp_path / "logs" / "a" / "x"
    logs.mkdir(parents=True)
    environment = {k: v for k, v in os.environ.items() if "_NUM_THREADS" not in k and "SOCKET" not in k}
    command = [sys.executable, cluster.ROOT / "launch" / "node.py", "agent", logs, str(ranks)]
    command += [sys.executable, "-c", f"import os; print(*map(os.environ.get, [{names}]))", "--local-addr", "127.0.0.1"]
    environment |= {"OMP_NUM_THREADS": given} if given else {}
    assert subprocess.check_output(command, env=environment, timeout=LIMIT, text=True) == f"{expected}lo lo\n"


def test_it_gives_up_after_its_tries_without_a_newer_checkpoint_and_names_the_first_cause(supervisor, monkeypatch):
    supervisor.job |= {"retries": 1, "retry_pause": 0, "host_wait": 0}
    ends = iter([cluster.End("failed", n, f"what {n}", f"details {n}\n") for n in range(9)])
    saved = iter(["", "step-4", "step-7", "step-7"])
    monkeypatch.setattr(Supervisor, "attempt", lambda self: next(ends))
    monkeypatch.setattr(Supervisor, "ask", lambda *_, **__: [])
    monkeypatch.setattr(cluster, "last_saved", lambda out: next(saved))
    supervisor.run()
    launch, log = cluster.read_launch(supervisor.out), (supervisor.out / "logs" / "launch.log").read_text()
    assert (launch["state"], launch["message"]) == ("failed", "what 2")
    assert log.count("Relaunching from step-4 in 0 s: try 1 of 1") == 1 and log.count("Relaunching from step-7") == 1
    assert log.endswith("try 1 of 1\ndetails 2\nGave up after 1 tries without progress\n")


@pytest.mark.parametrize(("state", "status"), [("error", 2), ("failed", 1)])
def test_how_a_run_ended_is_told(supervisor, capsys, state, status):
    follower = cluster.Follower(supervisor.out, "r")
    supervisor.save("details\n", state=state, step=3, message="m")
    assert follower.to_the_end() == status
    end = {"error": "error: m\n", "failed": "r: failed at step 3: m\n"}[state]
    assert capsys.readouterr() == ("", "details\n" + end)


def test_the_prefix_is_not_for_terminals(supervisor, capsys, monkeypatch):
    supervisor.save(state="finished", step=20, message="")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    follower = cluster.Follower(supervisor.out, "r")
    (supervisor.out / "log.txt").write_text("2024-05-15 02:37:59 I [train.py:110] Batch 20 Loss: 8.42184\nno prefix\n")
    assert follower.to_the_end() == 0
    assert capsys.readouterr().out == "Batch 20 Loss: 8.42184\nno prefix\nr: finished at step 20\n"


def test_attach_uses_ssh_where_the_session_is(supervisor, monkeypatch):
    supervisor.save(hosts=[asdict(Host("me@node1:22", label="a", session="s"))])
    ran = []
    monkeypatch.setattr(os, "execvp", lambda _, command: ran.append(command))
    cluster.verb_attach(supervisor.out, "r", SimpleNamespace(which="a"))
    assert ran == [["ssh", "-t", "--", "ssh://me@node1:22", "tmux attach -t =s"]]


def test_the_command_that_goes_on_with_the_others(tmp_path):
    (tmp_path / "flags.json").write_text('{"batch_tokens": 384}')
    hosts = [Host(n, slots=2, label=n) for n in ("a", "me@b:22", "c")]
    job = {"ssh": "", "out": str(tmp_path), "words": ["--data", "it's here"]}
    supervisor = Supervisor(job, hosts)
    first, _, last = supervisor.without([supervisor.hosts[2]]).partition("\n")
    command = """bash launch.sh --hosts a,me@b:22 --data 'it'"'"'s here' --out {} --batch_tokens 384"""
    assert "c did not come back" in first and last.strip() == command.format(tmp_path)


def test_a_host_where_nothing_is_left_says_so(tmp_path):
    (tmp_path / "logs" / "a" / "x").mkdir(parents=True)
    request = {"out": str(tmp_path), "label": "a", "id": "x"}
    for state in (node.look(request), node.sweep(request)):
        assert (state["processes"], state["exit"], state["cause"]["order"]) == (0, None, node.KILLED)
        assert state["cause"]["what"].startswith("everything on a was gone")
    (tmp_path / "logs" / "a" / "x" / "agent.json").write_text('{"exit": 0, "cause": null}')
    assert node.look(request)["cause"] is None


@pytest.mark.parametrize("slow", [{3}, {0}, {2, 3}, {0, 7}, set()])
def test_halving_names_the_slow_host(monkeypatch, slow):
    hosts = [Host(f"h{i}") for i in range(8)]
    monkeypatch.setattr(doctor, "measure", lambda group, _: (9 if slow & {int(h.name[1]) for h in group} else 900, ""))
    speed, error, suspects = doctor.find_slow(hosts, {})
    names = {int(h.name[1]) for h in suspects}
    assert (speed, error, len(names)) == ((9, "", 2) if slow else (900, "", 0)) and (names & slow or not slow)


def test_the_hash_sees_every_edit_and_every_new_file(tmp_path):
    for folder in ("recipes", "launch", "bench"):
        (tmp_path / folder).mkdir()
    seen = {node.content_hash(tmp_path)}
    for name in ("a.py 1", "a.py 2", "b.py", "recipes/x.args", "launch.sh", "launch/x.py", "bench/x.py"):
        (tmp_path / name.split()[0]).write_text(name[-1])
        seen.add(node.content_hash(tmp_path))
    assert len(seen) == 8
    (tmp_path / "hosts").write_text("node1")  # no run depends on it
    assert node.content_hash(tmp_path) in seen


# ---- nodes on this machine


def setting(checkout, **values) -> None:  # noqa: F811
    text = (checkout.folder / "launch.sh").read_text()
    for name, value in values.items():
        text, count = re.subn(rf"^{name}=\S*", f"{name}={value}", text, flags=re.M)
        assert count == 1
    (checkout.folder / "launch.sh").write_text(text)


def ranks(checkout, name: str) -> dict[str, int]:  # noqa: F811
    """rank -> process id"""
    found = node.processes(f"{os.path.realpath(checkout.run(name))}/logs")
    return {rank: pid for pid, environment in found.items() for rank in re.findall(r"\0RANK=(\d+)", environment)}


def ids(run: Path) -> list[str]:
    return sorted({p.name for p in run.glob("logs/*/2*")})


def test_two_nodes_start_together_and_a_killed_worker_is_relaunched(checkout):  # noqa: F811
    (checkout.folder / "hosts").write_bytes(b"localhost\r\n\r\nlocalhost # again")
    setting(checkout, retry_pause=1)
    checkout.environment.update(HF_TOKEN="hf_abcdefgh", MARK="marked", NCCL_DEBUG="WARN")
    words = ["--x", "two words", "$HOME;", "it's", '{"a": [1]}']
    status, out, err = checkout.launch("--out", "runs/two", "--steps", "5000", "--save_every", "1", *words)
    run = checkout.run("two")
    assert (status, err) == (0, "a line for the user\n"), err  # it returns, because this is not a terminal
    assert f"Started runs/two on {NAME}, {NAME}-2: " in out
    log = run / "log.txt"
    eventually(lambda: contains(log, "Batch 12 "), "some batches")
    assert 'environment ["2", "marked", 11]' in log.read_text()
    assert json.dumps(words)[1:-1] in log.read_text()
    if shutil.which("tmux"):
        listed = subprocess.run(["tmux", "ls", "-F", "#S"], env=checkout.environment, capture_output=True, text=True)
        assert listed.stdout.split() == ["flatland-two", "flatland-two-1"]
    assert not [text for text in checkout.texts("two") if "hf_abcdefgh" in text]
    assert len(list(run.glob(f"logs/{NAME}*/**/*stderr.log"))) == 4  # an agent and a worker each
    status, out, err = checkout.launch("status")
    assert re.search(rf"{NAME}-2 +flatland-two-1 +1 of 1$", out, re.M), out
    status, out, err = checkout.launch("--out", "runs/two")
    assert status == 2 and "being trained already" in err

    os.kill(ranks(checkout, "two")["1"], signal.SIGKILL)
    eventually(lambda: contains(log, "Resumed after step"), "the relaunch")
    assert len(ids(run)) == 2
    reports = (run / "logs" / "launch.log").read_text()
    assert re.search(rf"failed at step \d+: rank 1 on {NAME}(-2)? was ended by SIGKILL", reports)
    resumed = re.search(r"Resumed after step (\d+)", log.read_text())[1]
    assert f"Relaunching from step-{int(resumed):08d} in" in reports

    status, out, err = checkout.launch("stop")
    assert status == 0 and "runs/two: stopped at step" in out, out + err
    assert not ranks(checkout, "two") and not checkout.agent_lives("two")
    assert not [line for line in command_lines().values() if str(checkout.folder) in line and "cluster.py" in line]


# ---- hosts behind ssh


@pytest.fixture
def sshd(checkout):  # noqa: F811
    """Starts an sshd on an address; with `apart`, in a mount namespace where the checkout's folder is empty."""
    sshd, keygen = program("sshd", "openssh-server"), program("ssh-keygen", "openssh-client")
    folder = checkout.short / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    processes = []

    def start(address: str, apart: bool = False) -> str:
        with socket.socket() as s:
            s.bind((address, 0))
            port = s.getsockname()[1]
        config = folder / f"config-{address}"
        config.write_text(
            f"Port {port}\nListenAddress {address}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
            f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\nSetEnv TMUX_TMPDIR={checkout.short}\n"
        )
        command = [sshd, "-D", "-e", "-f", str(config)]
        if apart:
            hide = f'mount -t tmpfs tmpfs "{checkout.folder}" && exec "$@"'
            command = ["unshare", "--mount", "bash", "-c", hide, "bash", *command]
        log = folder / f"log-{address}"
        with open(log, "w") as err:
            processes.append(subprocess.Popen(command, stderr=err))
        eventually(lambda: "listening" in log.read_text() or processes[-1].poll() is not None, "sshd")
        if processes[-1].poll() is not None:
            pytest.skip(f"sshd does not start here: {log.read_text().strip().splitlines()[-1]}")
        return f"{address}:{port}"

    (folder / "config").write_text(
        f"Host *\n IdentityFile {folder}/user\n IdentitiesOnly yes\n BatchMode yes\n ConnectTimeout 5\n"
        f" StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    setting(checkout, ssh=f"'-F {folder}/config' #")
    yield start
    for process in processes:
        process.terminate()
        process.wait(LIMIT)


def test_hosts_behind_ssh_start_all_or_none(checkout, sshd):  # noqa: F811
    first, second = sshd("127.0.0.2"), sshd("127.0.0.3")
    with socket.socket() as s:
        s.bind(("127.0.0.4", 0))
        dead = f"127.0.0.4:{s.getsockname()[1]}"
    status, out, err = checkout.launch("--hosts", f"{first},{dead},{second}")
    assert status == 2 and len(err.splitlines()) == 1
    assert err.startswith("error: " + dead.replace(":", "-")) and "Connection refused" in err
    assert not (checkout.folder / "runs").exists()

    checkout.environment.update(HF_TOKEN="hf_abcdefgh", NCCL_DEBUG="WARN")
    status, out, err = checkout.launch("--hosts", f"{first},{second}", "--detach", "--steps", "4", "--x", "$HOME; '\"")
    assert status == 0, err
    log = checkout.run("default") / "log.txt"
    status, out, err = checkout.launch("logs")
    assert status == 0 and "default: finished at step 4" in out, err
    assert json.dumps(["--x", "$HOME; '\""])[1:-1] in log.read_text()
    assert 'environment ["2", null, 11]' in log.read_text()
    assert not [text for text in checkout.texts("default") if "hf_abcdefgh" in text]


@pytest.mark.slow
def test_sync_makes_a_host_that_shares_nothing_the_same(checkout, sshd):  # noqa: F811
    if os.getuid() or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("a host with a local disk needs root and mount namespaces")
    here, apart = sshd("127.0.0.2"), sshd("127.0.0.3", apart=True)
    label = apart.replace(":", "-")
    (checkout.folder / "new_and_uncommitted.py").write_text("x = 1\n")
    status, out, err = checkout.launch("--hosts", f"{here},{apart}")
    assert status == 2 and "launch.sh sync" in err and err.startswith(f"error: {label}: there is no")
    status, out, err = checkout.launch("sync", "--hosts", f"{here},{apart}")
    assert status == 0, err
    assert out.count("has the files of this folder") == 2
    with open(checkout.folder / "new_and_uncommitted.py", "a") as f:
        f.write("y = 2\n")
    status, out, err = checkout.launch("--hosts", f"{here},{apart}")
    assert status == 2 and f"{label}: the files in" in err
    status, out, err = checkout.launch("sync", "--hosts", apart)
    assert status == 0, err
    for hosts in (f"{apart},{here}", apart):
        status, out, err = checkout.launch("--hosts", hosts, "--steps", "3")
        assert status == 2 and f"{label}: the folder runs/default there is not the one here" in err and "--out" in err


@pytest.mark.slow
def test_doctor_names_what_is_wrong_and_how_to_mend_it(checkout, sshd):  # noqa: F811
    first, second = sshd("127.0.0.2"), sshd("127.0.0.3")
    status, out, err = checkout.launch("doctor", "--hosts", f"{first},{second}")
    assert "all-reduce" in out and "MB/s" in out
    assert re.search(r"^torch +✓ [^✓]+✓ ", out, re.M), out
    status, out, err = checkout.launch("doctor", "--hosts", f"{first},127.0.0.4:9")
    assert status == 2 and re.search(r"127\.0\.0\.4-9 does .*refused.* ssh://127\.0\.0\.4:9 true", err)
    status, out, err = checkout.launch("doctor", "--end", "mistake")
    assert status == 1 and "data, weights: found a mistake" in out
