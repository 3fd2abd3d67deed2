"""The progress that this process reports to the watchdog of lib/run.py.

Whatever moves bytes or rows calls `advance` as it goes: loading, hashing, saving, exporting, tokenizing, downloading.
The watchdog trusts only these calls, because the kernel counts neither reads of mapped files nor traffic of GPUs. A
worker process reports nothing: its parent does, when a result arrives."""

import time

advanced_at = 0.0  # the time.perf_counter() of the last call


def advance() -> None:
    """Call it from any thread after each piece of work, at least once every few minutes."""
    global advanced_at
    advanced_at = time.perf_counter()
