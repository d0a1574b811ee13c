"""The HSTU mask as one interval a row.

A row has a rank: its position, except that bidirectional contextual rows share rank 0. Row i sees
row j if it is the same row, or if rank(i) > rank(j) and, with a window w, rank(i) - rank(j) <= w.
Bidirectional contextual rows see the whole history besides. Candidates have the rank after the
history's last; in the nvidia family each has one more than the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.models.base import Intervals
from engine.types import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRule:
    """What the intervals of a model depend on.

    Attributes:
        num_shared: Contextual rows that share rank 0 and see everything; 0 for plain rows.
        window: 0 shows all.
        has_rising_candidates: Each candidate has a rank of its own (nvidia).
    """

    num_shared: int
    window: int
    has_rising_candidates: bool


def history_intervals(rule: MaskRule, start: int, stop: int, length: int) -> Intervals:
    """[lo, hi) of history rows [start, stop) of a history of `length` rows."""
    position = np.arange(start, stop, dtype=np.int32)
    lo = _first_seen(rule, position)
    hi = position + np.int32(1)
    num_shared = min(max(rule.num_shared - start, 0), len(position))
    lo[:num_shared] = 0
    hi[:num_shared] = length
    return Intervals(lo, hi)


def candidate_kv_lo(rule: MaskRule, length: int, num_candidates: int) -> Int32Array:
    """First history row each candidate sees, for a history of `length` rows; at most `length`."""
    position = np.full(num_candidates, length, dtype=np.int32)
    if rule.has_rising_candidates:
        position += np.arange(num_candidates, dtype=np.int32)
    return np.minimum(_first_seen(rule, position), np.int32(length))


def _first_seen(rule: MaskRule, position: Int32Array) -> Int32Array:
    """First row that a row at each position, which is not a shared one, sees."""
    if rule.window == 0:
        return np.zeros(len(position), dtype=np.int32)
    first = position - np.int32(rule.window)
    # Rank 0 is all shared rows at once: a window that reaches it begins at row 0.
    return np.where(first < max(rule.num_shared, 1), 0, first).astype(np.int32)
