"""Memory facts of this machine, and the one way in which pools and arenas are allocated."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import torch

from engine.errors import ConfigError

_HUGE_PAGE_BYTES = 2 << 20
_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def available_bytes() -> int | None:
    """Bytes this process may still take: of the machine, or of its control group if that is less.

    None when the system does not say.
    """
    limits = [
        limit
        for limit in (
            _machine_available(Path("/proc/meminfo")),
            _group_available(_CGROUP_V2 / "memory.max", _CGROUP_V2 / "memory.current"),
            _group_available(
                _CGROUP_V1 / "memory.limit_in_bytes", _CGROUP_V1 / "memory.usage_in_bytes"
            ),
        )
        if limit is not None
    ]
    return min(limits) if limits else None


def _machine_available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _group_available(limit: Path, usage: Path) -> int | None:
    try:
        limit_text, usage_text = limit.read_text().strip(), usage.read_text().strip()
    except OSError:
        return None
    if limit_text == "max":
        return None
    return max(0, int(limit_text) - int(usage_text))


def format_bytes(num_bytes: int) -> str:
    """1610612736 -> "1.5 GiB"."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def require_available(num_bytes: int, *, what: str, option: str, reserved_bytes: int = 0) -> None:
    """Raise ConfigError when `num_bytes` (besides `reserved_bytes` not yet touched) cannot be had.

    Args:
        what: "device pool" or "host arena".
        option: The setting that makes it smaller, with its value.
    """
    available = available_bytes()
    if available is None or num_bytes + reserved_bytes <= available:
        return
    beside = f" beside {format_bytes(reserved_bytes)} already promised" if reserved_bytes else ""
    raise ConfigError(
        f"the {what} needs {format_bytes(num_bytes)}{beside}, but this machine has "
        f"{format_bytes(available)} of memory available: lower {option}",
        value=num_bytes,
        limit=available,
    )


def allocate(num_bytes: int, *, what: str, option: str) -> torch.Tensor:
    """A zeroed uint8 tensor [num_bytes], page-aligned, its memory taken when first touched.

    Raises ConfigError when the system refuses.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"the {what} needs {format_bytes(num_bytes)}, which the system refused ({error}): "
            f"lower {option}",
            value=num_bytes,
        ) from error
    if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
