"""Facts of a machine out of another machine's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.entrypoints import machine


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_processor_name_and_flags_are_those_of_the_first_core(tmp_path: Path) -> None:
    core = "processor : 0\nmodel name\t: Fast CPU 9\nflags\t\t: fpu avx2 amx_tile avx512f sse\n\n"
    write(tmp_path, "proc/cpuinfo", core + core.replace("Fast", "Other"))

    assert machine.cpu_model(tmp_path) == "Fast CPU 9"
    assert machine.cpu_flags(tmp_path) == ["avx2", "avx512f", "amx_tile"]


def test_an_arm_processor_lists_features(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "Features : fp asimd sve bf16\nCPU part : 0xd4f\n")

    assert machine.cpu_flags(tmp_path) == ["asimd", "bf16", "sve"]
    assert machine.cpu_model(tmp_path) == "0xd4f"


def test_a_file_without_the_fact_is_named(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "nothing : here\n")
    write(tmp_path, "proc/meminfo", "MemTotal:  8 kB\n")

    with pytest.raises(LookupError, match="names no model"):
        machine.cpu_model(tmp_path)
    with pytest.raises(LookupError, match="has no MemAvailable"):
        machine.memory_bytes("MemAvailable", tmp_path)
    with pytest.raises(FileNotFoundError, match="os-release"):
        machine.os_name(tmp_path)


def test_memory_lines_are_kib_or_plain_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal:  8 kB\nHugePages_Total:     3\n")

    assert machine.memory_bytes("MemTotal", tmp_path) == 8192
    assert machine.memory_bytes("HugePages_Total", tmp_path) == 3


def test_the_chosen_huge_page_mode_stands_in_brackets(tmp_path: Path) -> None:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    write(tmp_path, path, "always [madvise] never\n")

    assert machine.transparent_huge_pages(tmp_path) == "madvise"


def test_the_smallest_limit_up_the_group_tree_holds_in_version_2(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pod/box\n")
    write(tmp_path, "sys/fs/cgroup/pod/box/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/pod/cpu.max", "150000 100000\n")
    write(tmp_path, "sys/fs/cgroup/pod/box/memory.max", "4096\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", "max\n")

    assert machine.group_cores(tmp_path) == 1.5
    assert machine.group_memory_bytes(tmp_path) == 4096


def test_limits_of_version_1_are_found_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/host/box\n1:cpu,cpuacct:/host/box\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "8192\n")
    write(tmp_path, "sys/fs/cgroup/memory/host/box/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")

    assert machine.group_memory_bytes(tmp_path) == 8192
    assert machine.group_cores(tmp_path) == 0.5


def test_a_group_without_limits_has_none(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n1:cpu:/\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")

    assert machine.group_cores(tmp_path) is None
    assert machine.group_memory_bytes(tmp_path) is None
