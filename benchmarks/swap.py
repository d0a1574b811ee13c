"""What a swap of weights does to running requests: no failure, how much latency, how long to warm.

    python benchmarks/swap.py [--rate R] [--swaps N] [--policy lazy|drop|refresh] [--output FILE]

An engine with its core in a process of its own serves `--users` users in an open loop: requests
come at a fixed rate whatever the engine does, each user's history grows by a few events a visit.
Again and again, `--seconds` apart, other weights are loaded beside the running ones, activated, and
the old ones retired, while the same load goes on. Steps use one thread, loading uses the other core
(with the front, the clients and everything else). Latency is measured from the moment a request was
due.

Reported: failures; p50 and p99 before, during (first call to last) and after the swaps, and their
ratios; seconds of load and warm-up; seconds from the switch until the share of history tokens that
are found is back at nine tenths of what it was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from provenance import write_result

from engine.async_engine import AsyncEngine
from engine.config import CacheConfig, EngineConfig, SchedulerConfig, WeightsConfig
from engine.errors import EngineError
from engine.models.config import Feature, HstuLayers, Inputs, ModelConfig, RankHead
from engine.testing.models import save_random_model

NUM_ITEMS = 20_000
CANDIDATES = 100
MAX_EVENTS = 2048


class Sample(NamedTuple):
    """One request: when it was due, seconds to its answer, tokens found, tokens asked for."""

    due_s: float
    latency_s: float
    found: int
    asked: int


class Load:
    """Users that come back at random, in an open loop."""

    def __init__(self, engine: AsyncEngine, num_users: int, rate: float) -> None:
        self._engine = engine
        self._rate = rate
        self._random = random.Random(0)
        self._histories = [
            np.array([self._item() for _ in range(length)])
            for length in (self._random.randrange(200, 600) for _ in range(num_users))
        ]
        self._open: set[asyncio.Task[None]] = set()
        self.samples: list[Sample] = []
        self.failures: dict[str, int] = {}

    async def run(self) -> None:
        """Send until cancelled."""
        due_s = time.monotonic()
        while True:
            due_s += self._random.expovariate(self._rate)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            task = asyncio.ensure_future(self._ask(due_s))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def finish(self) -> None:
        await asyncio.gather(*self._open)

    def _item(self) -> int:
        """An id of the catalogue."""
        return 10 * self._random.randrange(NUM_ITEMS) + 1

    async def _ask(self, due_s: float) -> None:
        user = self._random.randrange(len(self._histories))
        new = [self._item() for _ in range(self._random.randrange(1, 4))]
        history = np.concatenate([self._histories[user], new])[-MAX_EVENTS:]
        self._histories[user] = history
        candidates = [self._item() for _ in range(CANDIDATES)]
        try:
            answer = await self._engine.rank(
                user_id=f"u{user}", history=history, candidates=candidates
            )
        except EngineError as error:
            self.failures[error.code] = self.failures.get(error.code, 0) + 1
            return
        usage = answer.usage
        found = usage.device_tokens + usage.host_tokens
        latency_s = time.monotonic() - due_s
        self.samples.append(Sample(due_s, latency_s, found, usage.history_length))

    def between(self, start_s: float, stop_s: float) -> list[Sample]:
        return [sample for sample in self.samples if start_s <= sample.due_s < stop_s]


def model_config(version: str) -> ModelConfig:
    return ModelConfig(
        name="swap",
        weights_version=version,
        layers=HstuLayers(
            family="meta", num_layers=4, hidden_size=128, num_heads=2, qk_dim=32, v_dim=32,
            scale_length=MAX_EVENTS,
        ),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=NUM_ITEMS),),
            max_history_events=MAX_EVENTS, positions="from_start", num_positions=MAX_EVENTS + 1,
        ),
        rank=RankHead(kind="dot"),
    )  # fmt: skip


def latencies(samples: list[Sample]) -> dict[str, float]:
    values = sorted(1e3 * sample.latency_s for sample in samples)
    return {
        "requests": len(values),
        "p50_ms": round(values[len(values) // 2], 2),
        "p99_ms": round(values[int(len(values) * 0.99)], 2),
        "max_ms": round(values[-1], 2),
    }


def found_share(samples: list[Sample]) -> float:
    asked = sum(sample.asked for sample in samples)
    return sum(sample.found for sample in samples) / asked if asked else 0.0


def warm_after_s(load: Load, switch_s: float, stop_s: float, goal: float) -> float | None:
    """Seconds from the switch to the first whole second whose share of found tokens is there."""
    second = switch_s
    while second < stop_s:
        window = load.between(second, second + 1.0)
        if window and found_share(window) >= goal:
            return second - switch_s
        second += 0.25
    return None


class Swap(NamedTuple):
    """Monotonic seconds of one swap, and what the engine said of it."""

    start_s: float
    loaded_s: float
    switched_s: float
    end_s: float
    load_s: float
    warm_up_s: float
    refreshed_users: int


async def swap_once(engine: AsyncEngine, number: int, policy: str) -> Swap:
    """Load weights beside the running ones, activate them, retire the others."""
    old, new = engine.info.weights_version, f"swap-{number}"
    start_s = time.monotonic()
    loaded = await engine.load_weights("odd" if number % 2 else "even", new)
    loaded_s = time.monotonic()
    activated = await engine.activate_weights(new, policy=policy)
    switched_s = time.monotonic()
    await engine.retire_weights(old)
    return Swap(
        start_s, loaded_s, switched_s, time.monotonic(), loaded.load_s, loaded.warm_up_s,
        activated.refreshed_users,
    )  # fmt: skip


async def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    for seed, folder in enumerate(("even", "odd")):
        save_random_model(root / folder, model_config(folder), seed=seed)
    engine_config = EngineConfig(
        cache=CacheConfig(device_pages=4096, host_bytes=1 << 28),
        scheduler=SchedulerConfig(max_queue_requests=4096),
        weights=WeightsConfig(refresh_users=options.users if options.policy == "refresh" else 0),
        threads=1,
    )
    swaps: list[Swap] = []
    async with AsyncEngine.from_model_dir(root / "even", engine_config) as engine:
        load = Load(engine, options.users, options.rate)
        sending = asyncio.ensure_future(load.run())
        await asyncio.sleep(options.seconds)
        for number in range(1, options.swaps + 1):
            await asyncio.sleep(options.seconds)
            swaps.append(await swap_once(engine, number, options.policy))
        await asyncio.sleep(options.seconds)
        stop_s = time.monotonic()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        await load.finish()
    return report(load, swaps, options.seconds / 2, stop_s)


def report(load: Load, swaps: list[Swap], window_s: float, stop_s: float) -> dict[str, Any]:
    """Each phase over all swaps; "before" is the second half of the pause before a swap."""
    phases: dict[str, list[Sample]] = {"before": [], "during_swap": [], "after": []}
    warm_s, shares = [], []
    for swap, next_s in zip(swaps, [swap.start_s for swap in swaps[1:]] + [stop_s], strict=True):
        before = load.between(swap.start_s - window_s, swap.start_s)
        phases["before"] += before
        phases["during_swap"] += load.between(swap.start_s, swap.end_s)
        phases["after"] += load.between(swap.end_s, swap.end_s + window_s)
        shares.append(found_share(before))
        warm_s.append(warm_after_s(load, swap.switched_s, next_s, 0.9 * shares[-1]))
    told = {name: latencies(samples) for name, samples in phases.items()}
    before_ms, during_ms = told["before"]["p99_ms"], told["during_swap"]["p99_ms"]
    return {
        "failures": load.failures,
        "phases": told,
        "p99_during_over_before": round(during_ms / before_ms, 3),
        "p50_during_over_before": round(
            told["during_swap"]["p50_ms"] / told["before"]["p50_ms"], 3
        ),
        "load_s": median([swap.load_s for swap in swaps]),
        "warm_up_s": median([swap.warm_up_s for swap in swaps]),
        "load_call_s": median([swap.loaded_s - swap.start_s for swap in swaps]),
        "activate_call_s": median([swap.switched_s - swap.loaded_s for swap in swaps]),
        "retire_call_s": median([swap.end_s - swap.switched_s for swap in swaps]),
        "refreshed_users": swaps[-1].refreshed_users,
        "found_share_before": median(shares),
        "warm_after_s": [value if value is None else round(value, 2) for value in warm_s],
    }


def median(values: list[float]) -> float:
    return round(sorted(values)[len(values) // 2], 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="between swaps")
    parser.add_argument("--swaps", type=int, default=8)
    parser.add_argument("--policy", choices=["lazy", "drop", "refresh"], default="lazy")
    parser.add_argument("--output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(options, Path(folder)))
    settings = {
        name: getattr(options, name) for name in ("users", "rate", "seconds", "swaps", "policy")
    }
    write_result(options.output, {"settings": settings, **result})


if __name__ == "__main__":
    main()
