"""Fixtures that several test files use, and what all tests need before they start."""

import gc
import logging
import os
import subprocess

import fsspec
import pytest

from base.errors import prepare_python

prepare_python()  # before the import of torch, so that the tests run as the scripts do
gc.disable()  # until all tests are collected, which imports very many objects


def pytest_collection_modifyitems(items):
    import torch  # not above: with pytest-xdist, the first process runs no test and need not wait for torch

    items.sort(
        key=lambda item: item.path.parent.name in ("hf", "dataset", "job", "base")
    )  # short tests last, so that all processes end together
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish():
    gc.freeze()  # imported objects stay, so the collector need not visit them again and again
    gc.enable()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A small text, so that runs do not read the built-in one."""
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(4000)))
    return str(path)


@pytest.fixture(autouse=True)
def fresh_logger():
    """Resets the logger after a run in this process, so that caplog works in the next test."""
    yield
    logger = logging.getLogger("flatland")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True, scope="session")
def shared_cache(tmp_path_factory):
    """Tests do not write into the checkout's cache/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dataset.rows.CACHE", tmp_path_factory.getbasetemp() / "cache")
        yield


@pytest.fixture
def text_cache(tmp_path, monkeypatch):
    """A cache of tokenised text of the test's own."""
    monkeypatch.setattr("dataset.rows.CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def empty_memory():
    """Files of memory:// addresses end with their test."""
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def mount(tmp_path):
    """mount(size) -> a folder with a separate file system. Skips the test if only root may mount one."""
    disk = tmp_path / "disk"

    def mount(size: str):
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("only root can mount a disk")
        return disk

    yield mount
    subprocess.run(["umount", "-l", str(disk)], capture_output=True)
