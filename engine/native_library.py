"""The native library: where it is, and why it may be missing."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import torch

import engine
from engine.errors import ConfigError
from engine.native_fakes import register_fakes

_LIBRARY = "_engine_cpu.so"


def load_library() -> str | None:
    """Load `torch.ops.engine` once. None: it is there; else the reason why not.

    Raises ConfigError when its kernels cannot use the instructions that ENGINE_CPU_ISA names.
    """
    return _load_from(tuple(engine.__path__))


@functools.cache
def _load_from(folders: tuple[str, ...]) -> str | None:
    path = find_library(folders)
    if path is None:
        return f"{_LIBRARY} is not in {', '.join(folders)}: it was installed without a C++ compiler"
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"{path} cannot be loaded: {error}"
    cpu_isa()
    register_fakes()
    return None


def cpu_isa() -> str:
    """The instruction set of the native kernels: `base`, `avx2` or `avx512_bf16`.

    The library must be loaded. Raises ConfigError when ENGINE_CPU_ISA names one that does not exist
    or that this machine lacks.
    """
    try:
        return str(torch.ops.engine.cpu_isa())
    except RuntimeError as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def machine_isas() -> list[str]:
    """Those that this machine has, the best one last. The library must be loaded."""
    return str(torch.ops.engine.machine_isas()).split()


def find_library(folders: Iterable[str]) -> Path | None:
    """The library in the first folder that has it.

    An editable install has the sources in one folder and the library in another; both are in the
    package's `__path__`.
    """
    return next((path for folder in folders if (path := Path(folder) / _LIBRARY).exists()), None)
