"""Processes of our own that do work for this one: a function's name and arguments go in, its result comes back.

A worker is a fresh Python that has not imported torch, so it starts in a fraction of a second, and shares no thread,
GPU or process group with its parent, as a fork would. It ends when its parent does, however that ends: its input
closes."""

import contextlib
import importlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import download
from download import Damaged, Failed
from errors import ROOT, UserError


class Worker:
    """One process. `worker(function, *args)` runs a function of a module of ours there, and waits for its result; what
    it raises is raised here, and `hear` gets what it says. For one thread at a time."""

    def __init__(self, hear: Callable[[str], None] = download.say):
        self.hear = hear
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "workers.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent
        )

    def __call__(self, function: Callable, *args):
        try:
            pickle.dump((function.__module__, function.__name__, args), self.process.stdin, pickle.HIGHEST_PROTOCOL)
            self.process.stdin.flush()
            while isinstance(answer := pickle.load(self.process.stdout), str):
                self.hear(answer)
            result, error = answer
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = self.process.wait()
            how = f"was ended by signal {-code} (9: out of memory?)" if code < 0 else f"ended with status {code}"
            raise RuntimeError(f"a worker process {how}") from None
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError, ValueError):  # what was to be sent to it is of no use any more
                pipe.close()


def in_order(function: Callable, jobs: Iterable[tuple], processes: int) -> Iterator:
    """function(*job) for each job, in their order, by so many processes; 0: here. Jobs are drawn as they are needed, so
    memory does not grow with their number."""
    if not processes:
        for job in jobs:
            yield function(*job)
        return
    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    workers = [Worker() for _ in range(processes)]
    for worker in workers:
        free.put(worker)

    def work(job):
        worker = free.get()
        try:
            return worker(function, *job)
        finally:
            free.put(worker)

    pool, waiting = ThreadPoolExecutor(processes), deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(work, job))
            if len(waiting) >= 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for worker in workers:
            worker.close()
        pool.shutdown(wait=False, cancel_futures=True)


def ahead(items: Iterator, count: int) -> Iterator:
    """The same items, drawn by a thread that is up to `count` ahead."""
    ready: queue.Queue = queue.Queue(count)
    left = threading.Event()

    def put(item) -> None:
        while not left.is_set():
            try:
                return ready.put(item, timeout=0.2)
            except queue.Full:
                pass

    def draw() -> None:
        try:
            for item in items:
                put((item, None))
                if left.is_set():
                    break
            else:
                put((None, StopIteration()))
        except BaseException as e:
            put((None, e))

    threading.Thread(target=draw, daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        left.set()


def _serve() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what is printed must not get among the results
    sending = threading.Lock()

    def send(answer: str | tuple) -> None:
        try:
            with sending:
                pickle.dump(answer, sink, pickle.HIGHEST_PROTOCOL)
                sink.flush()
        except BrokenPipeError:  # the parent is gone
            os._exit(1)

    download.say = send
    while True:
        try:
            module, name, args = pickle.load(source)
        except EOFError:
            return
        try:
            answer = getattr(importlib.import_module(module), name)(*args), None
        except (UserError, Failed) as e:
            answer = None, next(kind for kind in (UserError, Damaged, Failed) if isinstance(e, kind))(str(e))
        except Exception as e:
            import traceback

            traceback.print_exc()
            answer = None, RuntimeError(f"{type(e).__name__}: {e}")
        send(answer)


if __name__ == "__main__":
    _serve()
