"""job/job.py: verdicts are the same on all ranks. Two jobs never have one run folder: the other job is a process of its
own."""

import errno
import json
import multiprocessing
import os
import pickle
import platform
import re
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from base import background, disk
from base.disk import read_json
from base.errors import FOLLOWED, UserError, exit_status
from base.ranks import ALONE, Ranks, init_ranks, leave
from job import job as guard
from job import watchdog
from job.job import take_lock
from test_shard import run_ranks


def vote() -> None:
    ranks = init_ranks()
    run, answers = guard.Run("", ranks), []
    for step in range(6):
        run.stop_reason = "SIGTERM" if step >= 2 and ranks.rank == 1 else ""
        answers.append(run.vote())
    assert answers == [step > 2 for step in range(6)], answers
    run = guard.Run("", ranks, profiles=True)
    time.sleep(0.3 * ranks.rank)
    run.vote()
    assert run.pending_vote[0].is_completed()
    if ranks.rank == 0:
        work = dist.all_reduce(run.pending_vote[1], group=ranks.control, async_op=True)
        assert watchdog.Watchdog._dump(mock.Mock(run=run, ranks=ranks)) == ["gloo:all_reduce of undefined waits"]
        ranks.store.set("dumped", "")
        work.wait()
    else:
        ranks.store.wait(["dumped"])
        dist.all_reduce(run.pending_vote[1], group=ranks.control)
    while watchdog.Watchdog._dump(mock.Mock(run=run, ranks=ranks)):  # torch's own thread notes that it is over
        time.sleep(0.1)
    leave(ranks)


def test_all_ranks_stop_after_the_same_step():
    """A vote to stop counts one step late; in a profiled run it is over when its step ends. Of the record of
    collectives the one is named that lacks a rank."""
    run_ranks(2, vote)


# ---- requests to stop, and the watchdog


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A run with a watchdog, whose `ended` has the exit status of the process that it would have ended."""
    monkeypatch.setattr(disk, "LEASE", 0.9)
    monkeypatch.setattr(watchdog, "BEAT", 0.1)
    before = {number: signal.getsignal(number) for number in watchdog.STOPS}
    run = guard.Run(tmp_path, ALONE)
    run.nonce = run._take_folder()
    run.began, run.clock.step = True, 7
    run.write_status("running", 7)

    def leave(status: int) -> None:
        run.watchdog.ended = [status]

    monkeypatch.setattr(os, "_exit", leave)
    run.watchdog = watchdog.Watchdog(run)
    yield run
    run.watchdog.ended = run.watchdog.ended or True
    run.lock.release()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("number", watchdog.STOPS)
def test_each_of_these_signals_is_a_vote_to_stop(watched, number):
    watched.clock.switch("steps")
    assert not watched.vote()
    os.kill(os.getpid(), number)
    wait_until(watched.vote)
    assert watched.stop_reason == number.name
    assert not watched.watchdog.ended


@pytest.mark.parametrize("ranks", [1, 2])
def test_told_to_stop_before_the_first_step_a_rank_ends_at_once(tmp_path, watched, capsys, ranks):
    """Reading weights may take longer than whoever asked waits. A resumed run keeps its step. What the main thread
    still writes does not count."""
    watched.watchdog.ranks = Ranks(0, ranks, ALONE.device)
    watched.watchdog._beat = lambda: None  # there are no groups
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: watched.watchdog.ended)
    assert watched.watchdog.ended == [ranks - 1]  # alone it is no failure; of several, torchrun ends the others
    watched.write_status("running", 8)
    status = read_json(tmp_path / "status.json")
    assert (status["state"], status["step"], status["exit_code"]) == ("stopped", 7, 0)
    assert re.fullmatch("rank 0 on .*: stopped by SIGTERM before the first step\n", capsys.readouterr().err)


@pytest.mark.parametrize("rank", ["no", "this", "another", "the only"])
def test_progress_of_any_rank_puts_off_the_end(watched, monkeypatch, rank):
    """In the start, beyond the limit. Nothing else counts, such as what the kernel says of this process's files."""
    monkeypatch.setattr(watchdog, "BEAT", 0.0)
    ranks = 1 if rank == "the only" else 2
    watched.watchdog.ranks = Ranks(0, ranks, ALONE.device)
    monkeypatch.setattr(watchdog.torch_private, "count_collectives", lambda group: 5)
    watched.store.set("1", json.dumps([1, [0, 15], 30.0 if rank == "another" else 90.0, "rank 1 is behind"]))
    watched.hang_limit, long_ago = 60, time.perf_counter() - 90
    monkeypatch.setattr(disk, "advanced_at", time.perf_counter() if rank in ("this", "the only") else 0.0)
    watched.clock.since = long_ago
    watched.watchdog._check_progress()
    assert watched.watchdog.ended == ([1] if rank == "no" else False)
    assert (time.perf_counter() - watched.watchdog.others_at < 40) == (rank == "another")


@pytest.mark.parametrize("phase", ["start", "steps", "data", "saves", "export"])
def test_the_end_of_another_rank_ends_this_one_in_every_phase(tmp_path, watched, phase):
    """Here the main thread does not notice it."""
    watched.clock.switch(phase)
    watched.store.set("end", json.dumps([3, "error", "rank 3 on b: a bad row"]))
    wait_until(lambda: watched.watchdog.ended)
    assert watched.watchdog.ended == [1]
    status = read_json(tmp_path / "status.json")
    assert (status["state"], status["message"]) == ("error", "rank 3 on b: a bad row")
    assert pickle.loads((tmp_path / "logs/flight_0").read_bytes())["entries"] == []


@pytest.mark.parametrize("others", [0, 1])
def test_a_rank_of_the_same_torchrun_that_is_killed_ends_this_one(watched, monkeypatch, others):
    """But no other child of a script between torchrun and this rank. The test stands for torchrun."""
    child, another = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    watched.watchdog.parent = os.getpid()
    children = len(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(children + others))
    watched.clock.switch("steps")
    dog = watched.watchdog
    for ended in (False, False if others else [1]):
        beats = dog.beats
        wait_until(lambda: dog.ended or dog.beats > beats + 3)  # noqa: B023
        assert dog.ended == ended
        child.kill()
        child.wait()
    another.kill()


@pytest.mark.parametrize(("ranks", "silent"), [(1, []), (3, []), (12, []), (6, [4])])
def test_hanging_ranks_name_the_one_behind_in_few_requests(monkeypatch, ranks, silent):
    """Rank 2 of 3 or more is a step behind. The requests of a rank do not grow with the ranks."""
    monkeypatch.setattr(watchdog, "BEAT", 0.3)
    monkeypatch.setattr(watchdog.torch_private, "count_collectives", lambda group: 5)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    named, stores, dogs = {}, {}, []
    for rank in range(ranks):
        client = dist.TCPStore("127.0.0.1", host.port, timeout=timedelta(seconds=60))
        stores[rank] = mock.Mock(wraps=client)
        run = guard.Run("", Ranks(rank, ranks, ALONE.device, store=stores[rank]))
        run.clock.step, run.clock.stack = 6 if rank == 2 else 7, ["saves"]
        with mock.patch.object(watchdog, "threading"), mock.patch.object(signal, "signal"):
            dogs.append(watchdog.Watchdog(run))
    signal.set_wakeup_fd(-1)

    def ask(rank: int) -> None:
        named[rank] = dogs[rank]._ask_all()[1]

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(ranks) if rank not in silent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [] if ranks == 1 else ["rank 4 does not answer"] if silent else ["rank 2 on .* its last step was 6"]
    for rank, messages in named.items():
        assert len(messages) == len(expected)
        assert all(map(re.match, expected, messages))
        assert len(stores[rank].method_calls) <= 6


@pytest.mark.parametrize("taken", [False, True])
def test_a_lock_that_is_gone_or_another_jobs_ends_the_run(tmp_path, watched, monkeypatch, taken, capsys):
    (tmp_path / "lock").unlink()
    if taken:
        (tmp_path / "lock").write_text("another's")
    wait_until(lambda: watched.watchdog.ended)
    assert watched.watchdog.ended == [1]
    assert "the lock is lost" in capsys.readouterr().err
    assert read_json(tmp_path / "status.json")["state"] == "running"  # which may be the other job's
    assert (tmp_path / "lock").exists() == taken


def test_a_lock_that_is_gone_for_a_moment_is_kept(watched, monkeypatch):
    """It is released at the end of a run, maybe while the watchdog looks."""
    looks = mock.Mock(side_effect=["it is gone", *[""] * 3, "it is gone", *[""] * 99])
    monkeypatch.setattr(watched.watchdog, "_lost_lock", looks)
    wait_until(lambda: looks.call_count > 5)
    assert not watched.watchdog.ended


def test_a_disk_that_does_not_answer_costs_no_lock(tmp_path, watched, monkeypatch, caplog):
    """Longer than the lease. When the disk answers, the lock is renewed, and it counts whose it is."""
    watched.watchdog.signals.settimeout(0.05)
    fail, lock = mock.Mock(side_effect=OSError(errno.ESTALE, os.strerror(errno.ESTALE))), tmp_path / "lock"
    with monkeypatch.context() as m:
        m.setattr(os, "lstat", fail)
        m.setattr(Path, "read_text", fail)
        wait_until(lambda: watched.watchdog.warned)
        failures = fail.call_count
        wait_until(lambda: fail.call_count > failures + 10)
    os.utime(lock, (1, 1))
    wait_until(lambda: lock.stat().st_mtime > 1)
    assert not watched.watchdog.ended
    assert caplog.text.count("lock cannot be renewed, which is tried again: [Errno 116] Stale file handle") == 1
    lock.write_text("another's")
    wait_until(lambda: watched.watchdog.ended)


# ---- the lock


def hold(folder, answers) -> None:
    """In a process of its own: tells its id when it has the lock, and keeps it."""
    lock = take_lock(folder)
    answers.put(os.getpid())
    time.sleep(60 * bool(lock))


def test_the_next_attempt_of_a_launch_takes_the_lock_over_at_once(tmp_path, monkeypatch):
    """Attempts are LAUNCH.NUMBER; another launch waits."""
    monkeypatch.setattr(guard, "PATIENCE", 0.3)
    monkeypatch.setattr(disk, "LEASE", 0.6)
    locks = []
    for attempt in ("20260101.0", "20260101.1"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", attempt)
        locks.append(take_lock(tmp_path))
    wait_until(lambda: locks[0].compromise)
    assert locks[0].compromise.reason == "owner-changed" and not locks[1].compromise
    for attempt in ("20260102.0", "x", ""):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", attempt)
        with pytest.raises(UserError, match="is training there"):
            take_lock(tmp_path)
    locks[1].release()


@pytest.mark.parametrize("age", [0, 3600])
def test_an_empty_lock_is_taken_over_when_nobody_fills_it(tmp_path, monkeypatch, age):
    """A young one within the same start, because it is no mistake of the user."""
    monkeypatch.setattr(disk, "LEASE", 1.5)
    monkeypatch.setattr(guard, "PATIENCE", 0.5)
    (tmp_path / "lock").touch()
    os.utime(tmp_path / "lock", (time.time() - age,) * 2)
    lock = take_lock(tmp_path)
    assert lock.token in (tmp_path / "lock").read_text()
    lock.release()


def test_a_second_job_is_refused_and_takes_over_when_the_first_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "PATIENCE", 0.5)
    monkeypatch.setattr(disk, "LEASE", 2.0)
    context = multiprocessing.get_context("fork")  # importing all again takes seconds
    answers = context.Queue()
    other = context.Process(target=hold, args=(tmp_path, answers), daemon=True)
    other.start()
    assert answers.get(timeout=60) == other.pid
    with pytest.raises(UserError, match=f"--out {re.escape(str(tmp_path))}: .* is training there.* remove"):
        take_lock(tmp_path)
    other.kill()
    other.join()
    lock = take_lock(tmp_path)
    assert lock.token in (tmp_path / "lock").read_text()
    lock.release()
    assert not list(tmp_path.iterdir())


def test_the_first_error_is_in_status_json_and_log_txt_and_each_in_its_error_json(tmp_path, monkeypatch, capsys):
    """Rank 1 fails first, rank 2 with the same error: it is shown once. The failure of rank 0 follows from it."""
    monkeypatch.setattr(guard.time, "sleep", lambda _: None)
    store = dist.HashStore()
    runs = [guard.Run(tmp_path, Ranks(rank, 3, ALONE.device, store=store)) for rank in range(3)]
    runs[0].begin(7)
    message = "the first\nhas two lines"
    for rank, text in ((1, message), (2, message), (0, "a connection was reset")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        monkeypatch.setenv("RANK", str(rank))
        runs[rank].report("error" if rank else "failed", text)
    status = read_json(tmp_path / "status.json")
    assert (status["state"], status["exit_code"], status["message"]) == ("error", 2, message)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split("] ")[1] for line in lines] == message.splitlines()
    assert capsys.readouterr() == ("", f"error: {message}\nerror: a connection was reset\n")
    errors = [read_json(tmp_path / f"{rank}.json") for rank in range(3)]
    assert [error["order"] for error in errors] == [FOLLOWED, 0, FOLLOWED]
    assert (errors[1]["rank"], errors[1]["kind"], errors[1]["message"]) == ("1", "error", message)


@pytest.mark.parametrize("error, order", [
    (RuntimeError("gloo: connection reset"), FOLLOWED - 1), (MemoryError(), 0), (UserError("no weights"), 0),
    (FileNotFoundError(2, "No such file", "data"), 0),
])  # fmt: skip
def test_an_error_before_the_run_names_its_rank_and_counts_more_than_a_lost_connection(
    tmp_path, monkeypatch, error, order
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "1")
    exit_status(mock.Mock(side_effect=error), [])
    written = read_json(tmp_path / "error.json")
    assert written["order"] == order
    assert written["message"].startswith(f"rank 1 on {platform.node()}: ")


def test_the_end_of_a_run_waits_for_a_disk_that_refuses_log_txt(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "PAUSES", (0.01,))
    refusals = [OSError(errno.ESTALE, "Stale file handle")] * 9

    def refuse(*how):
        if refusals:
            raise refusals.pop()
        return open(*how)

    monkeypatch.setattr(background, "open", refuse, raising=False)
    run = guard.Run(tmp_path, ALONE)
    run.begin(7)
    run.end("finished", 7)
    assert "Time taken: " in (tmp_path / "log.txt").read_text()


def test_a_stale_lock_does_not_make_a_folder_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "APPEARS", 1)
    run = guard.Run(tmp_path, ALONE)
    run.nonce = "of this job"
    (tmp_path / "lock").write_text("of a job that was killed")
    with pytest.raises(UserError, match="is not rank 0's folder"):
        run._check_shared()
    (tmp_path / "lock").write_text("of this job")
    run._check_shared()


def test_a_job_that_torchrun_restarts_tells_its_own_error(tmp_path, monkeypatch):
    """The store is the same."""
    monkeypatch.setattr(guard, "Watchdog", mock.Mock())
    store = dist.HashStore()
    for message in ("of the first start", "of the second start"):
        with guard.Run(tmp_path, Ranks(0, 1, ALONE.device, store=store)) as run:
            run.began = True
            raise UserError(message)
        assert read_json(tmp_path / "status.json")["message"] == message
