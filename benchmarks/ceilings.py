"""The machine's measured ceilings, from a small C file that the system's compiler builds.

Peaks are of loops that stay in registers, so they are what no kernel can pass; x86-64 only.
Variants (`fma`, `read`, `copy`) return seconds and go into `timing.interleaved` beside what is
measured against them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.timing import Variant, interleaved, rounded

SOURCE = Path(__file__).with_name("ceilings.c")
ISAS = ("sse2", "avx2", "avx512", "avx512_bf16")
_BF16_ISA = "avx512_bf16"
_FMA_ROUNDS = 100_000
_FMA_TRIES = 20
_GAP_S = 20e-6


class Fma(NamedTuple):
    """A register loop: the variant to time, and the FLOPs of one run of it."""

    run: Variant
    flops: int


class CopyPieces(NamedTuple):
    """Addresses of pieces of `piece_bytes` that are copied one after another."""

    sources: NDArray[np.uint64]
    targets: NDArray[np.uint64]
    piece_bytes: int


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled C file. Raises RuntimeError where there is no x86-64 or no compiler."""
    if platform.machine() != "x86_64":
        raise RuntimeError(f"the ceilings are measured on x86_64 only, not on {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ceilings.so"
        command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-pthread"]
        built = subprocess.run(
            [*command, str(SOURCE), "-o", str(path)], capture_output=True, text=True
        )
        if built.returncode:
            raise RuntimeError(f"{SOURCE.name} does not compile: {built.stderr}")
        loaded = ctypes.CDLL(str(path))
    loaded.ceilings_fma_flops.restype = ctypes.c_long
    for name in ("fma_s", "read_s", "copy_s", "jitter_s"):
        getattr(loaded, f"ceilings_{name}").restype = ctypes.c_double
    return loaded


def isas() -> list[str]:
    """The instruction sets of `ISAS` that this CPU has."""
    return [isa for number, isa in enumerate(ISAS) if library().ceilings_has(number)]


def has_bf16_instruction() -> bool:
    """Whether the CPU multiplies bf16; without, the bf16 peak is the fp32 FMA peak."""
    return _BF16_ISA in isas()


def peak_isa(dtype: torch.dtype, allowed: str | None = None) -> str:
    """The instruction set with the highest peak for the dtype.

    allowed: The value of ENGINE_CPU_ISA, if one is forced; nothing above it counts.
    """
    found = isas()
    if allowed is not None:
        last = {"base": "sse2"}.get(allowed, allowed)
        found = [isa for isa in found if ISAS.index(isa) <= ISAS.index(last)]
    if dtype != torch.bfloat16:
        found = [isa for isa in found if isa != _BF16_ISA]
    return found[-1]


def fma(isa: str, threads: int) -> Fma:
    """FMAs on so many threads; a run is the fastest of some loops of a fraction of a millisecond,
    so that a few runs are enough to see the peak on a machine that does something else as well."""
    loop = _fma_loop(isa, threads, _FMA_ROUNDS)
    return Fma(lambda: min(loop.run() for _ in range(_FMA_TRIES)), loop.flops)


def long_fma(isa: str, threads: int, seconds: float) -> Fma:
    """FMAs for about so long: what else the machine does slows them as it does other work."""
    short = fma(isa, threads)
    return _fma_loop(isa, threads, max(1, int(_FMA_ROUNDS * seconds / short.run())))


def _fma_loop(isa: str, threads: int, rounds: int) -> Fma:
    number = ISAS.index(isa)

    def run() -> float:
        seconds: float = library().ceilings_fma_s(number, ctypes.c_long(rounds), threads)
        return seconds

    return Fma(run, rounds * threads * library().ceilings_fma_flops(number))


def read(memory: torch.Tensor, threads: int) -> Variant:
    """Every byte of a contiguous tensor is read once, by so many threads."""
    address, size = memory.data_ptr(), memory.nbytes
    assert address % 32 == 0, "torch aligns its memory to 64 bytes"

    def run() -> float:
        seconds: float = library().ceilings_read_s(
            ctypes.c_void_p(address), ctypes.c_long(size), threads
        )
        return seconds

    return run


def copy(pieces: CopyPieces) -> Variant:
    """memcpy of the pieces on the calling thread. Their memory must outlive the variant."""

    def run() -> float:
        seconds: float = library().ceilings_copy_s(
            ctypes.c_void_p(pieces.targets.ctypes.data),
            ctypes.c_void_p(pieces.sources.ctypes.data),
            ctypes.c_long(len(pieces.sources)),
            ctypes.c_long(pieces.piece_bytes),
        )
        return seconds

    return run


def whole_pieces(source: torch.Tensor, target: torch.Tensor, piece_bytes: int) -> CopyPieces:
    """Two tensors of equal size cut into pieces, in order; a rest is not copied."""
    offsets = np.arange(source.nbytes // piece_bytes, dtype=np.uint64) * np.uint64(piece_bytes)
    return CopyPieces(
        offsets + np.uint64(source.data_ptr()), offsets + np.uint64(target.data_ptr()), piece_bytes
    )


def jitter(seconds: float = 2.0) -> dict[str, object]:
    """What other work and the host take from each core: share of the time lost in gaps above
    20 us of a loop on the clock, and the longest gap."""
    cpus = sorted(os.sched_getaffinity(0))
    lost, longest = np.zeros(len(cpus)), np.zeros(len(cpus))
    library().ceilings_jitter_s(
        ctypes.c_void_p(np.array(cpus, np.int32).ctypes.data),
        len(cpus),
        ctypes.c_double(seconds),
        ctypes.c_double(_GAP_S),
        ctypes.c_void_p(lost.ctypes.data),
        ctypes.c_void_p(longest.ctypes.data),
    )
    return {
        "seconds": seconds,
        "lost_share": [rounded(value / seconds, 3) for value in lost],
        "longest_gap_ms": [rounded(value * 1e3, 3) for value in longest],
    }


def fma_gflops(threads: Sequence[int], rounds: int) -> dict[str, dict[str, float]]:
    """Highest rate of each instruction set of this CPU, by number of threads."""
    loops = {(isa, count): fma(isa, count) for isa in isas() for count in threads}
    times = interleaved({f"{isa} {n}": loop.run for (isa, n), loop in loops.items()}, rounds=rounds)
    rates: dict[str, dict[str, float]] = {isa: {} for isa in isas()}
    for (isa, count), loop in loops.items():
        rates[isa][str(count)] = rounded(loop.flops / times[f"{isa} {count}"].min_s / 1e9)
    return rates
