"""guard.RunLock: two jobs never have one folder. The other job is a process of its own."""

import json
import multiprocessing
import os
import re
import threading
import time

import pytest

from lib import run as guard
from lib.errors import UserError
from lib.run import TAKEN, RunLock, sees


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(guard, "TOUCH", 0.3)
    monkeypatch.setattr(guard, "LOOK", 0.5)


def hold(folder, said) -> None:
    """In a process of its own: says whether it has the lock, and keeps it."""
    try:
        RunLock(folder)
        said.put("has it")
        time.sleep(60)
    except UserError as error:
        said.put(str(error))


def start_others(folder, count: int = 1) -> tuple[list, list[str]]:
    """-> (processes, what each of them said, in the order of their answers)."""
    context = multiprocessing.get_context("fork")  # importing all again takes seconds
    said = context.Queue()
    others = [context.Process(target=hold, args=(folder, said), daemon=True) for _ in range(count)]
    for other in others:
        other.start()
    return others, [said.get(timeout=30) for _ in others]


def start_other(folder):
    [other], said = start_others(folder)
    assert said == ["has it"]
    return other


def test_a_second_job_is_refused_with_the_first_ones_process_and_takes_over_when_it_is_killed(tmp_path):
    other = start_other(tmp_path)
    try:
        with pytest.raises(UserError, match=f"--out {re.escape(str(tmp_path))}: process {other.pid} on .* is training"):
            RunLock(tmp_path)
    finally:
        other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    begin = time.monotonic()
    lock = RunLock(tmp_path)  # the other one is a zombie
    assert time.monotonic() - begin < 2 and sees(tmp_path, lock.nonce)
    other.join()
    lock.release()
    assert not list(tmp_path.iterdir())


def change(path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_another_process_of_the_same_number_is_not_the_holder(tmp_path):
    other = start_other(tmp_path)
    try:
        began = json.loads((tmp_path / "lock").read_text())["began"]
        change(tmp_path / "lock", began=began - 1)
        RunLock(tmp_path)
    finally:
        other.kill()
        other.join()


def test_a_lock_of_another_machine_is_taken_over_if_it_is_not_touched(tmp_path, quick):
    RunLock(tmp_path)
    for theirs in ({"machine": "another"}, {"machine": "another", "host": "node7", "pid": 1}):
        change(tmp_path / "lock", **theirs)
        begin = time.monotonic()
        mine = RunLock(tmp_path)
        assert time.monotonic() - begin > 0.8 and sees(tmp_path, mine.nonce)
    change(tmp_path / "lock", machine="another", host="node7", pid=4711)
    done = threading.Event()
    threading.Thread(target=lambda: [os.utime(tmp_path / "lock") for _ in iter(lambda: done.wait(0.2), True)]).start()
    try:
        with pytest.raises(UserError, match="process 4711 on node7 is training there"):
            RunLock(tmp_path)
    finally:
        done.set()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock"]


@pytest.mark.parametrize("text", ["", "{", "null", "[1]", "5", "\0" * 99, '{"machine": 1, "pid": "x"}', "[" * 9**6])
def test_a_damaged_lock_is_nobodys(tmp_path, quick, monkeypatch, text):
    monkeypatch.setattr(guard, "TOUCH", 0.1)
    (tmp_path / "lock").write_text(text)
    assert not sees(tmp_path, "nonce")
    lock = RunLock(tmp_path)
    assert sees(tmp_path, lock.nonce)


def test_the_lock_of_this_machine_needs_all_its_fields(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(guard, "TOUCH", 0.1)
    lock = RunLock(tmp_path)
    for bad in ({"pid": None}, {"pid": "1"}, {"pid": 1, "began": None}, {"pid": -1}, {"pid": 10**30}):
        change(tmp_path / "lock", **bad)
        lock = RunLock(tmp_path)
    assert sees(tmp_path, lock.nonce)


def test_a_lock_that_is_gone_or_another_jobs_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "TOUCH", 0.0)
    run = tmp_path / "run"
    run.mkdir()
    lock = RunLock(run)
    assert lock.keep() == ""
    before = (run / "lock").read_text()
    for text in ("", "[]"):  # half written, damaged: not at once
        (run / "lock").write_text(text)
        assert lock.keep() == ""
    (run / "lock").write_text(before)
    assert lock.keep() == "" and lock.missed == 0
    change(run / "lock", nonce="another")
    assert lock.keep() == TAKEN
    lock.release()  # not this one's
    assert (run / "lock").exists()
    os.remove(run / "lock")
    assert [lock.keep(), lock.keep()] == ["", ""] and "has vanished" in lock.keep()
    run.rmdir()
    lock.release()


def test_many_at_once_have_one_holder(tmp_path):
    """Over a stale lock."""
    dead = start_other(tmp_path)
    dead.kill()
    dead.join()
    others, said = start_others(tmp_path, 6)
    for other in others:
        other.kill()
    assert said.count("has it") == 1, said
    assert sum("is training there" in message for message in said) == 5
