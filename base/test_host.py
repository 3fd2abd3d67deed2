"""The memory that a process may still take, on a made-up tree of control groups, and its open files."""

import resource

import pytest

from base.errors import prepare_python
from base.host import available_memory

GIB = 2**30
V2 = {"memory.max": 8 * GIB, "memory.current": 8 * GIB}
V2["memory.stat"] = f"file {7 * GIB}\nshmem {GIB}\nactive_file {4 * GIB}\ninactive_file {2 * GIB}\nanon {GIB}"
FREE = {**V2, "memory.max": "max"}
SMALL = {**V2, "memory.current": 9 * GIB, "memory.stat": "inactive_file 0"}
CASES = {  # lines of /proc/self/cgroup; the files by folder below /sys/fs/cgroup; free GiB
    "the cache is free": ("0::/", {"": V2}, 6),
    "of the process itself": ("0::/slurm/job_7", {"slurm/job_7": V2, "slurm": FREE}, 6),
    "a parent": ("0::/slurm/job_7/step_0", {"slurm/job_7/step_0": FREE, "slurm": V2}, 6),
    "another's": ("0::/a", {"b": SMALL}, 100),
    "full": ("0::/a", {"a": SMALL}, 0),
    "no limit": ("0::/a", {"a": FREE}, 100),
    "none": ("", {}, 100),
}


@pytest.mark.parametrize("kind", CASES)
def test_free_memory_is_what_every_control_group_leaves(tmp_path, kind):
    """Of a host with 100 GiB."""
    groups, folders, free = CASES[kind]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {100 * 2**20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, files in folders.items():
        folder = tmp_path / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, value in files.items():
            (folder / file).write_text(f"{value}\n")
    assert available_memory(tmp_path) == free * GIB


def test_a_script_may_open_as_many_files_as_the_system_lets_it():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    prepare_python()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
