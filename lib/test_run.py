"""lib/run.py: verdicts are the same on all ranks. Two jobs never have one run folder: the other job is a process of its
own."""

import multiprocessing
import os
import re
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from lib import progress
from lib import run as guard
from lib.errors import UserError, describe_error
from lib.files import read_json
from lib.ranks import ALONE, Ranks
from lib.run import take_lock, write_status
from test_shard import run_ranks

# Each rank's watchdog names rank 1, which hangs before the first collective of the first step.
HANG = r"""
import re
ranks = init_ranks()
run = guard.Run(guard.Config(), ranks)
run.nonce = "first"
run.clock.switch("compile")
watchdog = guard.Watchdog(run)
first = lambda: torch.distributed.all_reduce(torch.ones(1), async_op=True)
work = None if ranks.rank else first()
behind = watchdog._find_behind()
watchdog.ended = True
(work or first()).wait()
assert re.fullmatch(r"rank 1 on \S+ is behind: its last step was 0, it is in 'compile'", *behind), behind
"""


def test_all_ranks_stop_after_the_same_step(tmp_path):
    """A hanging rank is named before the first collective. A vote to stop counts one step late; in a profiled run it is
    over when its step ends."""
    code = """
import time
run, answers = guard.Run(guard.Config(), ranks), []
for step in range(6):
    run.stop_reason = "SIGTERM" if step >= 2 and ranks.rank == 1 else ""
    answers.append(run.agrees_to_stop())
assert answers == [False] * 3 + [True] * 3, answers
run = guard.Run(guard.Config(profile=1), ranks)
time.sleep(0.3 * ranks.rank)
run.agrees_to_stop()
assert run.pending_vote[0].is_completed()
leave(ranks)
"""
    run_ranks(2, HANG + code, str(tmp_path))


# ---- requests to stop, and the watchdog


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A run with a watchdog, whose `ended` has the exit status of the process that it would have ended."""
    write_status(tmp_path, "running", 7)
    monkeypatch.setattr(guard, "LEASE", 0.9)
    monkeypatch.setattr(guard, "STATUS_LOCK", threading.RLock())  # an ending watchdog keeps it
    before = {number: signal.getsignal(number) for number in guard.STOPS}
    run = guard.Run(SimpleNamespace(out=str(tmp_path), timeout=600), ALONE)
    run.lock = take_lock(tmp_path)

    def leave(status: int) -> None:
        run.watchdog.ended = [status]

    monkeypatch.setattr(guard.os, "_exit", leave)
    run.watchdog = guard.Watchdog(run)
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


@pytest.mark.parametrize("number", guard.STOPS)
def test_each_of_these_signals_is_a_vote_to_stop(watched, number):
    watched.clock.switch("steps")
    assert not watched.agrees_to_stop()
    os.kill(os.getpid(), number)
    wait_until(watched.agrees_to_stop)
    assert watched.stop_reason == number.name
    assert not watched.watchdog.ended


@pytest.mark.parametrize("ranks", [1, 2])
def test_told_to_stop_before_the_first_step_a_rank_ends_at_once(tmp_path, watched, capsys, ranks):
    """Reading weights may take longer than whoever asked waits. A resumed run keeps its step. What the main thread
    still writes does not count."""
    watched.watchdog.ranks = Ranks(0, ranks, ALONE.device)
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: watched.watchdog.ended)
    assert watched.watchdog.ended == [ranks - 1]  # alone it is no failure; of several, torchrun ends the others
    late = threading.Thread(target=write_status, args=(tmp_path, "running", 8), daemon=True)
    late.start()
    late.join(0.2)
    status = read_json(tmp_path / "status.json")
    assert (status["state"], status["step"], status["exit_code"]) == ("stopped", 7, 0)
    assert re.fullmatch("rank 0 on .*: stopped before the first step\n", capsys.readouterr().err)


@pytest.mark.parametrize("rank", ["no", "this", "another", "the only"])
def test_progress_of_any_rank_puts_off_the_end(watched, monkeypatch, rank):
    """In the start, beyond the limit. Nothing else counts, such as what the kernel says of this process's files."""
    store = dist.HashStore()
    watched.watchdog.store = store if rank != "the only" else None
    watched.watchdog._find_behind = list
    store.add("flatland/progress", int(rank == "another"))
    watched.hang_limit, long_ago = 60, time.perf_counter() - 90
    monkeypatch.setattr(progress, "advanced_at", time.perf_counter() if rank in ("this", "the only") else 0.0)
    watched.clock.since = long_ago
    watched.watchdog._check_progress()
    assert watched.watchdog.ended == ([1] if rank == "no" else False)
    assert store.add("flatland/progress", 0) == int(rank in ("this", "another"))  # it tells the others


@pytest.mark.parametrize(("ranks", "silent"), [(1, []), (3, []), (12, []), (6, [4])])
def test_hanging_ranks_name_the_one_behind_in_few_requests(ranks, silent):
    """Rank 2 of 3 or more is a step behind. The requests of a rank do not grow with the ranks."""
    limit = timedelta(seconds=60)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = {rank: dist.TCPStore("127.0.0.1", host.port, timeout=limit) for rank in {*range(ranks)} - {*silent}}
    for client in clients.values() if silent else ():
        client.set_timeout(timedelta(seconds=1))
    named, stores = {}, {rank: mock.Mock(wraps=client) for rank, client in clients.items()}

    def ask(rank: int) -> None:
        clock = SimpleNamespace(step=6 if rank == 2 else 7, stack=["saves"])
        run = SimpleNamespace(ranks=Ranks(rank, ranks, ALONE.device), clock=clock, groups=(), nonce="7")
        watchdog = SimpleNamespace(run=run, ranks=run.ranks, clock=clock, store=stores[rank])
        with mock.patch.object(guard.torch_private, "count_collectives", lambda group: 5):
            named[rank] = guard.Watchdog._find_behind(watchdog)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [] if ranks == 1 else ["rank 4 does not answer"] if silent else ["rank 2 on .* its last step was 6"]
    for rank, requests in stores.items():
        assert len(named[rank]) == len(expected)
        assert all(map(re.match, expected, named[rank]))
        assert len(requests.method_calls) <= 5


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


# ---- the lock


def hold(folder, answers) -> None:
    """In a process of its own: tells its id when it has the lock, and keeps it."""
    lock = take_lock(folder)
    answers.put(os.getpid())
    time.sleep(60 * bool(lock))


def test_a_second_job_is_refused_and_takes_over_when_the_first_is_killed(tmp_path, monkeypatch):
    """filelock cannot tell an empty lock from one that a process is about to fill in."""
    monkeypatch.setattr(guard, "PATIENCE", 0.1)
    context = multiprocessing.get_context("fork")  # importing all again takes seconds
    answers = context.Queue()
    other = context.Process(target=hold, args=(tmp_path, answers), daemon=True)
    other.start()
    assert answers.get(timeout=60) == other.pid
    with pytest.raises(UserError, match=f"--out {re.escape(str(tmp_path))}: process {other.pid} on .* is training"):
        take_lock(tmp_path)
    other.kill()
    other.join()
    lock = take_lock(tmp_path)
    assert lock.token in (tmp_path / "lock").read_text()
    lock.release()
    assert not list(tmp_path.iterdir())
    (tmp_path / "lock").touch()
    with pytest.raises(UserError, match="an unnamed process is training .*remove .*/lock if no job"):
        take_lock(tmp_path)
    monkeypatch.setattr(guard, "PATIENCE", 10)
    os.utime(tmp_path / "lock", (1, 1))  # since a power failure
    take_lock(tmp_path).release()


@pytest.mark.parametrize("attempt, age, kept", [
    (None, 3600, False), (None, 0, True), ("plain", 3600, False), ("plain", 0, True), ("ours", 3600, True),
])  # fmt: skip
def test_only_an_old_request_to_stop_is_dropped(tmp_path, monkeypatch, attempt, age, kept):
    """Under plain torchrun, too; the launcher has made a log folder of the attempt and removed older requests."""
    monkeypatch.setattr(guard, "age_of", lambda process: 60 if process == (os.getppid() if attempt else "self") else 0)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if attempt:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", attempt)
    (tmp_path / "logs/node1/ours").mkdir(parents=True)
    request = tmp_path / "logs/stop"
    request.touch()
    os.utime(request, (time.time() - age,) * 2)
    guard.Run(SimpleNamespace(out=str(tmp_path), timeout=600), ALONE)._drop_old_request()
    assert request.exists() == kept


def test_a_broken_file_of_the_compiler_names_its_cache(capsys):
    for name in ("main.so: file too short", "main.cpp:3: error: at::vec"):
        error = RuntimeError(f"OSError: /tmp/own cache/x\n/tmp/torchinductor_me/ab/c{'z2' * 25}q.{name}")
        assert describe_error(error)[1].endswith("try again: rm -r /tmp/torchinductor_me")
    assert "rm -r" not in describe_error(RuntimeError("/tmp/ab/c.so: no"))[1]


def test_an_error_is_in_status_json_and_log_txt(tmp_path, capsys):
    run = guard.Run(SimpleNamespace(out=str(tmp_path), timeout=600), Ranks(1, 2, ALONE.device))
    write_status(tmp_path, "running", 7)
    for message in ("the first\nhas two lines", "of another rank"):  # only the first counts
        run.record_end(guard.Failure(message), "failed", 1, message)
    assert read_json(tmp_path / "status.json")["message"] == "the first\nhas two lines"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split("] ")[1] for line in lines] == ["the first", "has two lines"]
    assert " E [run.py:" in lines[0]
    assert not any(capsys.readouterr())
