"""The lock of a run folder: two jobs never have one folder. The other job is a process of its own."""

import multiprocessing
import os
import re
import threading
import time

import pytest

from lib import run
from lib.errors import UserError
from lib.run import sees, take_lock


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run, "LEASE", 1.5)
    monkeypatch.setattr(run, "PATIENCE", 3.0)


def hold(folder, answers) -> None:
    """In a process of its own: tells whether it has the lock, and keeps it."""
    try:
        lock = take_lock(folder)
        answers.put("has it")
        time.sleep(60 * bool(lock))
    except UserError as error:
        answers.put(str(error))


def start_others(folder, count: int = 1) -> tuple[list, list[str]]:
    """-> (processes, what each of them told, in the order of their answers)"""
    context = multiprocessing.get_context("fork")  # importing all again takes seconds
    answers = context.Queue()
    others = [context.Process(target=hold, args=(folder, answers), daemon=True) for _ in range(count)]
    for other in others:
        other.start()
    return others, [answers.get(timeout=60) for _ in others]


def test_a_second_job_is_refused_and_takes_over_when_the_first_is_killed(tmp_path):
    [other], answers = start_others(tmp_path)
    assert answers == ["has it"]
    with pytest.raises(UserError, match=f"--out {re.escape(str(tmp_path))}: process {other.pid} on .* is training"):
        take_lock(tmp_path)
    other.kill()
    other.join()
    begin = time.monotonic()
    lock = take_lock(tmp_path)
    assert time.monotonic() - begin < 1 and sees(tmp_path, lock.token)
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_lock_of_another_machine_is_taken_over_if_nobody_renews_it(tmp_path):
    """By this process, for which the machine's name in the file is changed in place."""
    lock, file = take_lock(tmp_path), tmp_path / "lock"
    lock._stop_heartbeat()
    content = file.read_text()
    assert lock.owner.hostname in content
    file.write_text(content.replace(lock.owner.hostname, "node7"))
    done = threading.Event()
    threading.Thread(target=lambda: [os.utime(file) for _ in iter(lambda: done.wait(0.2), True)]).start()
    with pytest.raises(UserError, match=f"process {os.getpid()} on node7 is training there"):
        take_lock(tmp_path)
    done.set()
    begin = time.monotonic()
    successor = take_lock(tmp_path)
    assert time.monotonic() - begin > 1.2 and sees(tmp_path, successor.token)


def test_an_empty_lock_is_named(tmp_path):
    """filelock cannot tell it from a lock that a process is about to fill in."""
    (tmp_path / "lock").touch()
    with pytest.raises(UserError, match="lock names no process: remove it"):
        take_lock(tmp_path)


@pytest.mark.parametrize("text", ["{", "\0" * 99, '{"machine": 1, "pid": "x"}'])
def test_a_damaged_lock_is_nobodys(tmp_path, monkeypatch, text):
    monkeypatch.setattr(run, "APPEARS", 0.2)
    (tmp_path / "lock").write_text(text)
    assert not sees(tmp_path, "token")
    assert sees(tmp_path, take_lock(tmp_path).token)


@pytest.mark.parametrize("taken", [False, True])
def test_a_lock_that_is_gone_or_another_jobs_is_noticed(tmp_path, taken):
    lock = take_lock(tmp_path)
    (tmp_path / "lock").unlink()
    if taken:
        (tmp_path / "lock").write_text("another's")
    end = time.monotonic() + 10
    while not lock.compromise and time.monotonic() < end:
        time.sleep(0.1)
    assert lock.compromise.reason == ("owner-changed" if taken else "marker-missing")
    lock.release()
    assert (tmp_path / "lock").exists() == taken


def test_many_at_once_have_one_holder(tmp_path):
    """Over a stale lock."""
    [dead], _ = start_others(tmp_path)
    dead.kill()
    dead.join()
    others, answers = start_others(tmp_path, 6)
    for other in others:
        other.kill()
    assert answers.count("has it") == 1, answers
    assert sum("is training there" in answer for answer in answers) == 5
