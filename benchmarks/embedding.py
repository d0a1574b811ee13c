"""What a busy host program does to the steps of an embedded engine, with the core in a process and
in a thread.

    python benchmarks/embedding.py [--rounds 5] [--busy-s 2] [--output FILE]

The host is this program: an event loop with an `AsyncEngine` over the built-in model, and beside it
a thread that computes in pure Python. In each round requests that recompute a history
(`cache: bypass`) come one after the other for `--busy-s` seconds each: beside an idle host, beside
the busy host, and beside an idle host and an unrelated process that runs the same computation. The
core reports how long its steps took; the mean of each stretch counts, and the ratios are medians
over the rounds. `to_unrelated` is what being embedded costs: where no processor is free, a busy
program slows its neighbours whether it is their host or not. One thread computes a step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from provenance import write_result

from engine.async_engine import AsyncEngine
from engine.config import CacheConfig, EngineConfig
from engine.core_launch import CorePlace

HISTORY = [(7 * number) % 9973 for number in range(1024)]
CANDIDATES = list(range(256))
CONFIG = EngineConfig(cache=CacheConfig(host_bytes=1 << 26), threads=1)


COMPUTE = """
number = 0
while True:
    for _ in range(1000):
        number = (number * 31 + 7) % 1_000_003
"""


class Steps(NamedTuple):
    """Steps since the start, and their seconds."""

    count: int
    seconds: float


@contextmanager
def busy_host() -> Iterator[None]:
    """A thread of this process that computes in pure Python."""
    is_over = threading.Event()

    def compute() -> None:
        number = 0
        while not is_over.is_set():
            for _ in range(1000):
                number = (number * 31 + 7) % 1_000_003

    thread = threading.Thread(target=compute, name="busy-host")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that computes the same."""
    with subprocess.Popen([sys.executable, "-c", COMPUTE]) as process:
        try:
            yield
        finally:
            process.kill()


async def steps_of(engine: AsyncEngine) -> Steps:
    (sample,) = [s for s in (await engine.stats()).samples if s.name == "step_seconds"]
    return Steps(sum(sample.bucket_counts), sample.value)


async def mean_step_s(engine: AsyncEngine, duration_s: float) -> float:
    """Mean seconds of a step, over requests one after the other for `duration_s`."""
    before = await steps_of(engine)
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        await engine.rank(user_id="u", history=HISTORY, candidates=CANDIDATES, cache="bypass")
    after = await steps_of(engine)
    return (after.seconds - before.seconds) / (after.count - before.count)


async def measure(place: CorePlace, rounds: int, busy_s: float) -> dict[str, Any]:
    """Mean step times beside an idle host, a busy host, and a busy process, round by round."""
    idle, busy, unrelated = [], [], []
    async with AsyncEngine.from_model_dir(None, CONFIG, core=place) as engine:
        await mean_step_s(engine, busy_s)
        for _ in range(rounds):
            idle.append(await mean_step_s(engine, busy_s))
            with busy_host():
                busy.append(await mean_step_s(engine, busy_s))
            with busy_process():
                unrelated.append(await mean_step_s(engine, busy_s))
    return {
        "idle_step_ms": round(statistics.median(idle) * 1e3, 3),
        "busy_step_ms": round(statistics.median(busy) * 1e3, 3),
        "unrelated_step_ms": round(statistics.median(unrelated) * 1e3, 3),
        "to_idle": ratio(busy, idle),
        "to_unrelated": ratio(busy, unrelated),
    }


def ratio(slower: list[float], faster: list[float]) -> float:
    """Median over the rounds."""
    return round(statistics.median(a / b for a, b in zip(slower, faster, strict=True)), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy-s", type=float, default=2.0)
    parser.add_argument("--output", help="write the result there, with its provenance")
    options = parser.parse_args()
    load_average = os.getloadavg()[0]
    result = {
        "process": asyncio.run(measure("process", options.rounds, options.busy_s)),
        "thread": asyncio.run(measure("thread", options.rounds, options.busy_s)),
    }
    settings = {"rounds": options.rounds, "busy_s": options.busy_s, "load_average": load_average}
    write_result(options.output, {**settings, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
