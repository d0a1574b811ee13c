"""Facts that only a process with torch can tell: torch itself, native library, backends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import torch

import engine
from engine.attention_backends.base import AttentionSpec
from engine.attention_backends.registry import backend_class, backend_names
from engine.block_manager.page_hashes import is_native
from engine.native_library import cpu_isa, find_library, load_library, machine_isas
from engine.platforms.memory import available_bytes


def version() -> str:
    return str(torch.__version__)


def threads() -> str:
    return f"{torch.get_num_threads()}, between operations {torch.get_num_interop_threads()}"


def kernels_for() -> str:
    """The instruction set that torch's own kernels use here."""
    return str(torch.backends.cpu.get_cpu_capability())


def has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def cuda_devices() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def parallel_info() -> list[str]:
    """torch's own account of its threads, line by line."""
    lines = torch.__config__.parallel_info().splitlines()
    return [line.strip() for line in lines if line.strip()]


def native_library() -> str:
    """Where the native library was loaded from, or why it was not."""
    reason = load_library()
    if reason is not None:
        return f"not loaded: {reason}"
    return f"loaded from {find_library(engine.__path__)}"


def native_kernels() -> str | None:
    """The instruction set of the native kernels, and the others that this machine has.

    Raises ConfigError when ENGINE_CPU_ISA names one that cannot run here.
    """
    if load_library() is not None:
        return None
    return f"{cpu_isa()}, this machine has {', '.join(machine_isas())}"


def copy_workers() -> str:
    """What `transfer.workers: auto` takes."""
    return "native" if load_library() is None else "python, because there is no native library"


def fingerprints() -> str:
    """What hashes the pages of a history."""
    return "native" if is_native() else "python, because there is no native library"


def memory_left() -> int | None:
    """Bytes that pools and arenas may take; None when the system does not say."""
    return available_bytes()


def backends() -> list[str]:
    return backend_names()


def backend_verdicts(name: str) -> list[str]:
    """For usual shapes, whether the backend serves them, or every reason why not.

    Raises ConfigError when the backend of that name cannot be loaded.
    """
    backend_type = backend_class(name)
    verdicts = []
    for spec in _usual_specs():
        reasons = backend_type.validate(spec)
        verdict = f"no ({'; '.join(reasons)})" if reasons else "yes"
        dtype = str(spec.dtype).removeprefix("torch.")
        verdicts.append(f"{spec.platform} {dtype} {spec.score}: {verdict}")
    return verdicts


def _usual_specs() -> Iterator[AttentionSpec]:
    """4 heads of 128 + 128 on this machine's platforms, in both dtypes and score functions."""
    platforms: list[Literal["cpu", "cuda"]] = ["cpu"]
    if torch.cuda.is_available():
        platforms.append("cuda")
    scores: tuple[Literal["silu", "softmax"], ...] = ("silu", "softmax")
    for platform, dtype, score in itertools.product(
        platforms, (torch.float32, torch.bfloat16), scores
    ):
        yield AttentionSpec(
            platform=platform,
            dtype=dtype,
            num_heads=4,
            num_kv_heads=4,
            qk_dim=128,
            v_dim=128,
            page_size=32,
            score=score,
            alpha=128**-0.5,
            bias=None,
        )
