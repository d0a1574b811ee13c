"""Which copy engine serves."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Literal

from engine.errors import ConfigError
from engine.native_library import load_library
from engine.platforms.cpu import HostArena, KvPools, Wake
from engine.transfer.jobs import CopyEngine
from engine.transfer.native import NativeCopyEngine
from engine.transfer.python import PythonCopyEngine

_log = logging.getLogger(__name__)


def make_copy_engine(
    workers: Literal["auto", "native", "python"],
    pools: KvPools,
    arena: HostArena,
    wake: Wake,
    clock: Callable[[], float] = time.monotonic,
) -> CopyEngine:
    """The copy engine of that name; "auto" takes the native one if it is there, and says so once
    when it is not.

    Raises ConfigError when "native" was asked for and its library is not there.
    """
    if workers == "python":
        return PythonCopyEngine(pools, arena, wake, clock)
    reason = load_library()
    if reason is None:
        return NativeCopyEngine(pools, arena, wake, clock)
    if workers == "native":
        raise ConfigError(
            f"transfer.workers is 'native', but {reason}; install a C++ compiler and reinstall, "
            "or set transfer.workers to 'python'"
        )
    _warn_fallback(reason)
    return PythonCopyEngine(pools, arena, wake, clock)


@functools.cache
def _warn_fallback(reason: str) -> None:
    _log.warning(
        "copies between the tiers run in Python threads, which are slower and wait for the "
        "interpreter: %s",
        reason,
    )
