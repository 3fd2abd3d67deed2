"""How an attempt is judged, what is asked of hosts, and the list of hosts: without a launch."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from filelock import SoftFileLease
from torch.distributed.elastic.multiprocessing import errors

import cluster
import doctor
import node
from base.errors import UserError
from cluster import Supervisor
from doctor import Host, assign_ranks, read_hosts

NAME = os.uname().nodename
SHARE = str(max(1, len(os.sched_getaffinity(0)) // 2))  # of the cores, for one of two ranks


@pytest.mark.parametrize("text, expected", [
    ("localhost\nlocalhost slots=2", [("localhost", 0, NAME), ("localhost", 2, f"{NAME}-2")]),
    ("\ufeff# us\r\n\r\n  me@n-1:2\tslots=8 # big\r\na_b.org", [("me@n-1:2", 8, "n-1-2"), ("a_b.org", 0, "a_b.org")]),
    ("[fe80::1]:22", [("[fe80::1]:22", 0, "-fe80--1--22")]), (None, [("localhost", 0, NAME)]),
    ("# node1\n\n", [("localhost", 0, NAME)]), ("node1 slots=0", "slots=N"),
    *((text, "is not a host") for text in ("-oProxyCommand=evil", "a, b", "a b")),
])  # fmt: skip
def test_hosts_files(monkeypatch, tmp_path, text, expected):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    if text is not None:
        (tmp_path / "hosts").write_bytes(text.encode())
    if isinstance(expected, list):
        assert [(h.name, h.slots, h.label) for h in read_hosts(None)] == expected
    else:
        with pytest.raises(UserError, match=re.escape(expected)):
            read_hosts(None)
    assert [h.name for h in read_hosts("a,b@c:22, d")] == ["a", "b@c:22", "d"]


def test_addresses_are_those_that_connections_came_in_at():
    for connections, expected in (
        # this machine's own name means 127.0.1.1 to it, as on Debian
        (["127.0.0.1 5 127.0.1.1 22", "10.0.0.1 6 10.0.0.2 22"], ["10.0.0.1", "10.0.0.2"]),
        ([None, "10.0.0.1 6 10.0.0.2 22"], ["10.0.0.1", "10.0.0.2"]),
        (["127.0.0.1 5 127.0.0.2 22", "127.0.0.1 5 127.0.0.3 22"], ["127.0.0.2", "127.0.0.3"]),
    ):
        answers = [{"connection": (c or "").split(), "gpus": []} for c in connections]
        hosts = [Host("h" if a["connection"] else "localhost", last=a) for a in answers]
        assign_ranks(hosts, 0)
        assert [h.address for h in hosts] == expected


@pytest.mark.parametrize("wrong", [[], [0], [3], [3, 8]])
@pytest.mark.parametrize("name", ["matmul", "sum"])
def test_doctor_counts_results_that_differ_in_a_bit(monkeypatch, name, wrong):
    """Whether the first result or a later one is the wrong one."""
    factors, numbers = [torch.randn(32, 32, dtype=torch.bfloat16) for _ in range(2)], itertools.count()

    class Device(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            result = super().__torch_function__(function, types, args, kwargs or {})
            if function is getattr(torch.Tensor, name) and next(numbers) in wrong:
                result.view(torch.int16).flatten()[-1:].bitwise_xor_(1)
            return result

    counts = node.count_odd([factors[0], factors[1].as_subclass(Device)], 20)
    assert counts == [0, 20 if 0 in wrong else len(wrong)] and next(numbers) == 21


@pytest.mark.parametrize("gpus, slots, nproc, expected", [
    ("", [0, 3], 0, [(1, None), (3, None)]), ("0 1 2 3", [0], 0, [(4, ["0", "1", "2", "3"])]),
    ("4 5 6 7", [0, 0], 0, [(2, ["4", "5"]), (2, ["6", "7"])]), ("0", [0, 0], 0, "h0, h1: no GPU is left"),
    ("0 1 2 3", [0, 0], 1, [(1, ["0", "1"]), (1, ["2", "3"])]), ("0 1", [4], 0, [(4, ["0", "1"])]),  # train.py refuses
])  # fmt: skip
def test_a_machines_gpus_are_divided_among_its_nodes(gpus, slots, nproc, expected):
    hosts = [Host("localhost", slots=n, label=f"h{i}", last={"gpus": gpus.split()}) for i, n in enumerate(slots)]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            assign_ranks(hosts, nproc)
        return
    assign_ranks(hosts, nproc)
    assert [(h.slots, h.devices) for h in hosts] == expected


@pytest.mark.parametrize("visible, gpus", [(None, ["0", "1"]), ("", []), ("-1", []), ("1", ["1"])])
def test_hidden_gpus_do_not_count(monkeypatch, visible, gpus):
    monkeypatch.setattr(node, "query", lambda fields: ["0", "1"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert node.probe({"cwd": "/", "env": env, "files": []})["gpus"] == gpus


@pytest.mark.skipif(not shutil.which("ip"), reason="no ip: apt install iproute2")
@pytest.mark.parametrize("slots, given, threads", [(1, {}, "none"), (2, {}, SHARE), (2, {"OMP_NUM_THREADS": "7"}, "7")])
def test_what_an_agent_sets_for_its_ranks(tmp_path, slots, given, threads):
    """Ranks that print their environment."""
    python, parcel = tmp_path / "python", tmp_path / "parcel"
    shown = "${OMP_NUM_THREADS:-none} $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"
    python.write_text(f"#!/bin/sh\necho {shown}")
    python.chmod(0o755)
    (tmp_path / "logs/a/x").mkdir(parents=True)
    request = dict(out=str(tmp_path), label="a", id="x", cwd="/", env=given | {"PYTHON_EXEC": str(python)}, words=[])
    meeting = dict(nodes=1, node=0, slots=slots, first="127.0.0.1", last="127.0.0.1", port=0, meet=900)
    node.write_json(parcel, request | meeting)
    clean = {k: v for k, v in os.environ.items() if "_NUM_THREADS" not in k and "SOCKET" not in k}
    output = subprocess.check_output([sys.executable, node.THIS_FILE, "agent", parcel], env=clean, text=True)
    assert sorted(re.findall(r"\]:(.*)", output)) == [f"{threads} =lo lo"] * slots


CODES = {  # how a rank without error.json ended -> order
    -9: node.KILLED, -11: node.KILLED, -15: node.FOLLOWED, -6: node.FOLLOWED, 3: node.KILLED,
}  # fmt: skip


@pytest.mark.parametrize("status, ends", [
    (1, [(node.FOLLOWED, "the run on a failed with status 1")]), (0, []),
    (None, [(node.KILLED, "the run on a was gone: killed, or the machine restarted")]),
])  # fmt: skip
def test_the_errors_of_a_host(tmp_path, monkeypatch, status, ends):
    """Rank 0 has written its own error, the others were killed; then torchrun itself ends so."""
    logs, failures = tmp_path / "logs" / "a" / "x", {}
    for rank, code in enumerate([1, *CODES, -9]):
        folder = logs / "y" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"the end of {rank}")
        late = 60 * (rank == len(CODES) + 1)  # torchrun kills what does not end
        failures[rank] = SimpleNamespace(local_rank=rank, exitcode=code, timestamp=100 + late)
    own = {"order": 7, "kind": "error", "message": "m"}
    node.write_json(logs / "y/attempt_0/0/error.json", own)

    def fail(words):
        error = errors.ChildFailedError.__new__(errors.ChildFailedError)
        error.failures = failures
        raise error

    monkeypatch.setattr("torch.distributed.run.main", fail)
    assert node.torchrun(logs, []) == 1
    node.write_json(logs / "agent.json", {} if status is None else {"exit": status})
    state = node.look({"out": str(tmp_path), "label": "a", "id": "x"})
    assert (state["processes"], state["exit"]) == (0, status)
    found = state["errors"]
    ranks = {Path(error["file"]).parent.name: error for error in found if "agent" not in error["file"]}
    assert ranks["0"] == own | {"file": str(logs / "y/attempt_0/0/stderr.log"), "tail": "the end of 0"}
    assert [ranks[str(i)]["order"] for i in range(1, len(ranks))] == [*CODES.values(), node.FOLLOWED]
    assert ranks["1"]["message"] == "rank 1 on a was ended by SIGKILL" and ranks["5"]["message"].endswith("status 3")
    assert [(error["order"], error["message"]) for error in found if "agent" in error["file"]] == ends


def test_an_agent_that_cannot_start_torchrun_says_why_before_it_ends(tmp_path, monkeypatch, capsys):
    (tmp_path / "logs/a/x").mkdir(parents=True)
    said = []
    for owner, name in ((node, "prepare_python"), (os, "dup2"), (signal, "signal")):
        monkeypatch.setattr(owner, name, lambda *_: None)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(node, "kill_all", lambda _: said.append(capsys.readouterr().err))
    monkeypatch.setattr(node, "choose_interface", mock.Mock(side_effect=OSError("no such host")))
    request = dict(out=tmp_path, label="a", id="x", nodes=2, node=0, slots=1, first="", last="", port=1, meet=1)
    assert node.run_agent(request | {"words": []}) == 1
    assert "no such host" in said[0] and node.read_json(tmp_path / "logs/a/x/agent.json") == {"exit": 1}


def end(order: int, message: str, **more) -> dict:
    return {"exit": 1, "errors": [{"order": order, "message": message, "file": "f", "tail": "", **more}]}


LOST = end(node.FOLLOWED, "rank 0 on a failed")
KILLED = end(node.KILLED, "rank 1 on b was killed")
GONE = end(node.KILLED, "everything on b was gone")
FINE, SILENT = {}, {"silent": "no answer in 20 s"}
SIGNALLED = end(node.FOLLOWED, "torchrun on a failed")
MISTAKE = end(0, "no GPU", kind="error")
STOP, NOW = " ", "now"


JUDGEMENTS = {
    # state in status.json, request to stop, last answers of hosts a and b -> state, words of the message
    "finished, though an agent was killed after it": ("finished", "", [FINE, GONE], "finished", ""),
    "a worker was stopped by hand": ("stopped", "", [FINE, FINE], "stopped", ""),
    "kill-session": ("stopped", "", [SIGNALLED, FINE], "stopped", ""),
    "an agent was killed, so all stopped": ("stopped", "", [FINE, KILLED], "failed", "rank 1 on b was killed"),
    "the user's mistake": ("error", "", [SIGNALLED, FINE], "error", ""),
    "the same, before it began": ("starting", "", [MISTAKE, LOST], "error", "no GPU"),
    "a bug on one rank": ("failed", "", [LOST, end(0, "b failed")], "failed", "b failed"),
    "rank 0 knew": ("failed", "", [LOST, FINE], "failed", "m"),
    "a machine restarted": ("failed", "", [LOST, GONE], "failed", "everything on b was gone"),
    "a cable was pulled": ("failed", "", [LOST, SILENT], "failed", "b does not answer"),
    "stopped early": ("starting", STOP, [SIGNALLED, SIGNALLED], "stopped", ""),
    "stopped at once": ("running", NOW, [SIGNALLED, SIGNALLED], "stopped", ""),
    "stopped, but a peer was dead": ("running", STOP, [LOST, SILENT], "failed", "b does not answer"),
}


@pytest.fixture
def supervisor(tmp_path):
    (tmp_path / "logs").mkdir()
    supervisor = Supervisor({"out": str(tmp_path), "ssh": "", "id": "x"}, [])
    supervisor.write_status("starting")
    return supervisor


def write_status(supervisor, state: str, message: str = "m", attempt: str | None = "x") -> None:
    status = {"state": state, "step": 7, "message": message, "attempt": attempt}
    node.write_json(supervisor.out / "status.json", status)


def log(supervisor) -> str:
    """The supervisor's lines in log.txt, without their prefix."""
    lines = node.read(supervisor.out / "log.txt").splitlines()
    assert all(re.match(r"[\d-]{10} [\d:]{8} E \[cluster.py:\d+\] ", line) for line in lines)
    return "\n".join(line.split("] ", 1)[1] for line in lines)


@pytest.mark.parametrize("status, asked, answers, state, output", JUDGEMENTS.values(), ids=JUDGEMENTS)
def test_how_an_attempt_is_judged(supervisor, status, asked, answers, state, output):
    if asked:
        (supervisor.out / "logs" / "stop").write_text(asked.strip())
    if status != "starting":
        write_status(supervisor, status)
    hosts = [Host(n, label=n, last=answer) for n, answer in zip("ab", answers, strict=True)]
    ended, message = supervisor.judge(cluster.first_error(hosts))
    assert ended == state
    assert output in message
    assert supervisor.job.get("meet", 900) == (900 if status == "starting" else 120)


HUNG = {"order": 0, "kind": "failed", "message": "rank 0 on c: no step has ended; rank 2 on d is behind"}


@pytest.mark.parametrize("status, attempt, errors, expected", [
    ("running", "4-0", [], "none"), ("stopped", "4-1", [{}], "stopped"), ("finished", "4-1", [HUNG], "finished"),
    ("running", "4-1", [HUNG], "failed n2"), ("stopped", "4-1", [HUNG | {"order": node.FOLLOWED}], "stopped"),
    ("stopped", "4-1", [HUNG, {"order": node.KILLED, "message": "rank 1 on c was ended by SIGKILL"}], "failed n1"),
    ("running", "4-0", [{"order": 0, "kind": "error", "message": "no text"}], "error n1"),
])  # fmt: skip
def test_how_an_attempt_under_slurm_ended(tmp_path, capsys, status, attempt, errors, expected):
    """Two ranks on each of two nodes."""
    node.write_json(tmp_path / "status.json", {"state": status, "attempt": attempt})
    for i, error in enumerate(errors):
        file = tmp_path / f"logs/n1/4-1/x/attempt_0/{i}/error.json"
        file.parent.mkdir(parents=True)
        node.write_json(file, error)
    node.outcome(str(tmp_path), "4-1", "2", "n1", "n2")
    assert capsys.readouterr().out.strip() == expected


@pytest.mark.parametrize("state", ["running", "stopped", "finished"])
def test_the_status_of_another_job_in_the_folder_does_not_count(supervisor, state):
    write_status(supervisor, state, attempt=None)
    assert supervisor.judge(MISTAKE["errors"][0]) == ("error", "no GPU")


@pytest.mark.parametrize("state, attempt, lock, expected", [
    ("running", "7-0", "lock", ("running", "m")),  # Slurm's
    ("running", "7-0", "", ("failed", "dead: it ended without a message")),
    ("stopped", "7-0", "", ("stopped", "m")),
    ("waiting", "x", cluster.SUPERVISOR_LOCK, ("waiting", "m")),
    ("finished", "x", cluster.SUPERVISOR_LOCK, ("running", "")),  # its agents have not ended
    ("waiting", "x", "", ("failed", "dead: it ended without a message")),
    (None, "", "lock", ("running", "")),  # it has just begun
])  # fmt: skip
def test_the_state_of_a_run_follows_from_its_status_and_its_locks(supervisor, state, attempt, lock, expected):
    assert not cluster.is_held(supervisor.out / "absent/lock") and not (supervisor.out / "absent").exists()
    if state:
        write_status(supervisor, state, attempt=attempt)
    else:
        (supervisor.out / "status.json").unlink()
    with SoftFileLease(supervisor.out / lock).acquire() if lock else contextlib.nullcontext():
        now = cluster.state_of(supervisor.out)
    assert (now.state, now.message) == expected


ALIVE, BUG_ON_A = {"processes": 1}, end(0, "a bug")
LOST_B = end(node.FOLLOWED, "rank 1 on b failed")


@pytest.mark.parametrize("looks, expected", [
    ([(ALIVE, SILENT), (BUG_ON_A, SILENT), (BUG_ON_A, SILENT)], "b does not answer: no answer in 20 s.*"),
    ([(ALIVE, SILENT), (ALIVE, ALIVE), (BUG_ON_A, ALIVE), (BUG_ON_A, ALIVE)], "a bug"),
    ([(ALIVE, ALIVE), (LOST, LOST_B), (LOST, LOST_B)], "rank 0 on a failed"),
])  # fmt: skip
def test_a_host_that_was_cut_is_the_cause_unless_a_rank_knows_one(supervisor, monkeypatch, looks, expected):
    """Also if it answers again when the rest is killed."""
    answers = iter([({}, {}), *looks, ({}, {})])
    supervisor.hosts, supervisor.job["timeout"] = [Host(n, label=n) for n in "ab"], 0.0
    monkeypatch.setattr(cluster, "LOOK_OVER_SSH", 0.001)
    monkeypatch.setattr(doctor.ThreadPoolExecutor, "map", lambda _, function, hosts: map(function, hosts))
    now = []

    def answer(host, operation, request, patience):
        now[:] = now or next(answers)
        return now.pop(0)

    monkeypatch.setattr(Host, "call_by_ssh", answer)
    assert re.fullmatch(expected, supervisor.attempt(first=False).message)
    assert not list(answers)


@pytest.mark.parametrize("answer, state", [(SILENT, "failed"), ({"refused": "port 1 is taken"}, "error")])
def test_a_host_that_is_silent_at_the_first_start_is_a_failure(supervisor, monkeypatch, answer, state):
    supervisor.hosts = [Host("b", label="b")]
    monkeypatch.setattr(Host, "call_by_ssh", lambda host, operation, request, patience: answer)
    assert supervisor.attempt(first=True).state == state


def test_a_machine_without_the_files_of_a_run_can_start_it(monkeypatch):
    files = {"--weights": "no/w", "--lora_weights": "no/a", "--tokenizer": "no/t", "--data": "no/d.bin"}
    words = [word for pair in files.items() for word in pair]
    monkeypatch.setattr(cluster, "read_job", lambda words: ([], {"words": words}))
    monkeypatch.setattr(cluster, "survey", lambda hosts, job: sys.exit("asks the hosts"))
    with pytest.raises(SystemExit, match="asks the hosts"):
        cluster.verb_train(words)


@pytest.mark.parametrize("status, out", [(2, "Skipped {a}\n"), (0, 'Skipped {a}\n{"state": "finished"}\n')])
def test_what_the_first_host_says_is_shown_without_the_line_for_launchers(monkeypatch, capsys, status, out):
    answer = {"exit": status, "out": out, "err": ""}
    monkeypatch.setattr(cluster, "read_job", lambda words: ([Host("localhost")], {"words": ["@recipes/default.args"]}))
    monkeypatch.setattr(cluster, "survey", lambda hosts, job: job.update(check=[]))
    monkeypatch.setattr(Host, "call", lambda *_, **__: answer)
    assert cluster.verb_train([]) == status
    assert capsys.readouterr().out == "Skipped {a}\n"


def test_a_host_is_silent_although_ssh_warns(monkeypatch):
    done, host = SimpleNamespace(stdout="", stderr="Warning: Permanently added 'b'\n", returncode=124), Host("b")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    host.call({"ssh": ""}, "look")
    assert "no answer in 20 s" in host.problem


def test_sync_copies_what_programs_read():
    assert {"bench/golden.json", "hf/templates/chatml.jinja", "recipes/default.args"} <= {*doctor.CODE}


def test_logs_and_attach_find_a_host_by_its_label_or_name(tmp_path, monkeypatch):
    hosts = [asdict(Host(f"me@{n}:22", slots=2, label=n, session="s")) for n in "ab"]
    files = [tmp_path / "logs" / n / "x" / "y" / "attempt_0" / i / "stdout.log" for n in "ab" for i in "01"]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    node.write_json(tmp_path / "logs/launch.json", {"id": "x", "ssh": "-v", "hosts": hosts})
    monkeypatch.setattr(subprocess, "call", lambda command: command)
    for which, shown in (("a", files[:2]), ("me@b:22", files[2:])):
        assert cluster.verb_logs(tmp_path, SimpleNamespace(which=which))[2:] == shown
    with pytest.raises(UserError, match="no host 'c'"):
        cluster.verb_logs(tmp_path, SimpleNamespace(which="c"))
    command = cluster.verb_attach(tmp_path, SimpleNamespace(which="b"))
    assert command == ["ssh", "-t", "-v", "--", "ssh://me@b:22", "tmux attach -t =s"]


def test_it_gives_up_after_its_tries_without_a_newer_checkpoint(supervisor, monkeypatch):
    supervisor.job |= {"retries": 1, "retry_pause": 0}
    steps = iter([4, 7, 7])

    def attempt(self, first):
        step = next(steps)
        manifest = supervisor.out / f"checkpoints/step-{step:08d}/manifest.json"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.touch()
        return cluster.State("failed", step, f"what {step}")

    monkeypatch.setattr(Supervisor, "attempt", attempt)
    supervisor.run()
    assert re.findall("from step-(.*) in", log(supervisor)) == ["00000004", "00000007"]
    assert not list(steps)


def test_a_full_disk_is_named(supervisor, monkeypatch):
    monkeypatch.setattr(cluster, "free_space", lambda path: (0, path))
    assert f"the disk of {supervisor.out} is full" in supervisor.judge(KILLED["errors"][0])[1]


def test_a_status_replaces_the_old_one_even_on_a_full_disk(mount):
    disk = mount("32k")
    node.write_json(disk / "status.json", {"state": "running", "message": "x" * 99})
    with contextlib.suppress(OSError):
        (disk / "data").write_bytes(bytes(2**20))
    node.write_json(disk / "status.json", {"state": "failed"})
    assert node.read_json(disk / "status.json") == {"state": "failed"}
    assert {path.name for path in disk.iterdir()} == {"status.json", "data"}
