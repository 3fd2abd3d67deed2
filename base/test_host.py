"""The memory that a process may still take, on a made-up tree of control groups, and its open files."""

import resource

import pytest

from base.errors import prepare_python
from base.host import available_memory

GIB = 2**30
CASES = {  # lines of /proc/self/cgroup; limits by folder below /sys/fs/cgroup; free GiB
    "of the process itself": ("0::/slurm/job_7", {"slurm/job_7": 8 * GIB, "slurm": "max"}, 8),
    "a parent": ("0::/slurm/job_7/step_0", {"slurm/job_7/step_0": "max", "slurm": 8 * GIB}, 8),
    "another's": ("0::/a", {"b": GIB}, 100),
    "no limit": ("0::/a", {"a": "max"}, 100),
    "none": ("", {}, 100),
}


@pytest.mark.parametrize("kind", CASES)
def test_free_memory_is_within_the_limits_of_every_control_group(tmp_path, kind):
    """Of a host with 100 GiB."""
    groups, limits, free = CASES[kind]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {100 * 2**20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, limit in limits.items():
        folder = tmp_path / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
    assert available_memory(tmp_path) == free * GIB


def test_a_script_may_open_as_many_files_as_the_system_lets_it():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    prepare_python()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
