"""Times of variants that take turns, so that what the machine does meanwhile hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

Variant = Callable[[], float]
"""Runs once and returns the seconds that count."""

_FEW_RUNS = 3


class Times(NamedTuple):
    """Seconds of the runs of one variant: smallest, 10 %, median, and how many runs there were."""

    min_s: float
    p10_s: float
    median_s: float
    runs: int


def timed(work: Callable[[], object]) -> Variant:
    """The variant that calls `work` and counts all of it."""

    def run() -> float:
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    return run


def interleaved(
    variants: Mapping[str, Variant], *, rounds: int, budget_s: float = 60.0
) -> dict[str, Times]:
    """Times of each variant, one run of each a round, after a first round that does not count.

    A variant that has taken more than `budget_s` sits out what is left, but has at least 3 runs
    (or `rounds`, if that is less).
    """
    for variant in variants.values():
        variant()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    spent_s = dict.fromkeys(variants, 0.0)
    for _ in range(rounds):
        for name, variant in variants.items():
            if len(seconds[name]) >= _FEW_RUNS and spent_s[name] > budget_s:
                continue
            began_s = time.perf_counter()
            seconds[name].append(variant())
            spent_s[name] += time.perf_counter() - began_s
    return {name: _times(values) for name, values in seconds.items()}


def _times(values: list[float]) -> Times:
    low, median = np.percentile(values, (10, 50))
    return Times(min(values), float(low), float(median), len(values))


def rounded(value: float, digits: int = 4) -> float:
    """The value with so many significant digits, for result files."""
    return float(f"{value:.{digits}g}")
