"""Facts of this machine out of the kernel's files: processor, memory, control group, huge pages.

Every function reads below a root folder, so that a test can give another machine's files. A fact
that the kernel does not tell raises OSError or LookupError with what is missing.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")

CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)
"""Instruction sets that decide which kernels run, x86 then Arm."""

_NO_LIMIT_V1 = 1 << 62
"""Control groups of version 1 say "no limit" with a number near 2^63."""


def cpu_model(root: Path = ROOT) -> str:
    """The processor's name."""
    fields = _colon_fields(root / "proc/cpuinfo")
    for name in ("model name", "Processor", "CPU part"):
        if name in fields:
            return fields[name]
    raise LookupError("/proc/cpuinfo names no model")


def cpu_flags(root: Path = ROOT) -> list[str]:
    """Those of CPU_FLAGS that the processor has."""
    fields = _colon_fields(root / "proc/cpuinfo")
    listed = fields.get("flags") or fields.get("Features")
    if listed is None:
        raise LookupError("/proc/cpuinfo lists no flags")
    has = set(listed.split())
    return [flag for flag in CPU_FLAGS if flag in has]


def memory_bytes(name: str, root: Path = ROOT) -> int:
    """A line of /proc/meminfo, in bytes."""
    fields = _colon_fields(root / "proc/meminfo")
    if name not in fields:
        raise LookupError(f"/proc/meminfo has no {name}")
    number, _, unit = fields[name].partition(" ")
    return int(number) * (1024 if unit == "kB" else 1)


def transparent_huge_pages(root: Path = ROOT) -> str:
    """always, madvise or never."""
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    text = (root / path).read_text()
    _, bracket, rest = text.partition("[")
    if not bracket:
        raise LookupError(f"/{path} reads {text.strip()!r}")
    return rest.partition("]")[0]


def os_name(root: Path = ROOT) -> str:
    """PRETTY_NAME of the distribution."""
    for line in (root / "etc/os-release").read_text().splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip('"')
    raise LookupError("/etc/os-release has no PRETTY_NAME")


def group_cores(root: Path = ROOT) -> float | None:
    """Cores that the control group may use at once; None without a limit."""
    cores: list[float] = []
    for folder in _group_folders(root, "cpu"):
        if (text := _read(folder / "cpu.max")) is not None:
            quota, _, period = text.partition(" ")
            if quota != "max":
                cores.append(int(quota) / int(period))
        quota_text = _read(folder / "cpu.cfs_quota_us")
        period_text = _read(folder / "cpu.cfs_period_us")
        if quota_text is not None and period_text is not None and int(quota_text) > 0:
            cores.append(int(quota_text) / int(period_text))
    return min(cores, default=None)


def group_memory_bytes(root: Path = ROOT) -> int | None:
    """Bytes that the control group may use; None without a limit."""
    limits: list[int] = []
    for folder in _group_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text is not None and text != "max" and int(text) < _NO_LIMIT_V1:
                limits.append(int(text))
    return min(limits, default=None)


def _group_folders(root: Path, controller: str) -> list[Path]:
    """This process's control group and those above it, in version 2 and in version 1.

    A limit of any of them holds. In a container the path may be one of the host that cannot be
    seen here; what remains is then the top folder, which is the container's own.
    """
    folders: list[Path] = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        own = top / path.lstrip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(top))]
    return folders


def _colon_fields(path: Path) -> dict[str, str]:
    """`name : value` lines; of a repeated name the first."""
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
