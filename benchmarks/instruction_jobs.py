"""The fixed small jobs of `instructions.py`; this runs under valgrind.

    valgrind --tool=callgrind --instr-atstart=no python -m benchmarks.instruction_jobs JOB LIBRARY

Nothing is counted but the job itself: not Python's start, not the imports, not the first runs.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Mapping
from typing import Literal

Job = Callable[[], object]
RUNS = 5
"""Counted one by one; the least of them is the result."""


def attention(dtype: Literal["bfloat16", "float32"], score: Literal["silu", "softmax"]) -> Job:
    """One layer of a small step through the `cpu` backend, with one thread."""
    import torch

    from benchmarks.ragged_batch import BatchShape, LayerRun, RaggedBatch
    from engine.attention_backends.registry import create_backend

    torch.set_num_threads(1)
    shape = BatchShape(lengths=(300, 517), new=40, candidates=50, num_heads=2, width=64)
    ragged = RaggedBatch(shape, getattr(torch, dtype), score)
    return LayerRun(ragged, create_backend(BACKEND, ragged.spec)).layer


def planning(length: int) -> Job:
    """Fingerprints, reservation and commit of one of 64 users' requests."""
    from benchmarks.planning import Population

    population = Population(64)
    records = population.records[:length]
    turn = iter(range(64))
    return lambda: population.plan(population.keys[next(turn)], records)


BACKEND = "cpu"
JOBS: Mapping[str, Callable[[], Job]] = {
    "attention_silu_float32": lambda: attention("float32", "silu"),
    "attention_silu_bfloat16": lambda: attention("bfloat16", "silu"),
    "attention_softmax_float32": lambda: attention("float32", "softmax"),
    "planning_hit": lambda: planning(4096),
    "planning_append": lambda: planning(4096 + 128),
}


def main() -> None:
    name, path = sys.argv[1:]
    library = ctypes.CDLL(path)
    job = JOBS[name]()
    job()
    job()
    gc.collect()
    gc.disable()
    for _ in range(RUNS):
        library.callgrind_start()
        job()
        library.callgrind_stop()


if __name__ == "__main__":
    main()
