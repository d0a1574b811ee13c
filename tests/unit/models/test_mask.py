"""Intervals against the published mask, pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.hstu.mask import MaskRule, candidate_kv_lo, history_intervals


def published_mask(
    num_context: int, window: int, group: int, history: int, targets: int, *, clips: bool
) -> np.ndarray:
    """allowed[i, j] by ranks: `clips` is Meta's rule (all targets share a rank)."""
    length, c, t = history + targets, num_context, targets
    top = length - t if c == 0 else length - c + 1 - t
    rank = [i if c == 0 else max(0, i - c + 1) for i in range(length)]
    if clips:
        rank = [min(r, top) for r in rank]
    allowed = np.zeros((length, length), dtype=bool)
    for i in range(length):
        for j in range(length):
            sees = i == j or rank[i] > rank[j]
            if window:
                sees = sees and rank[i] - rank[j] <= window
            if c:
                sees = sees or (rank[i] == 0 and rank[j] < top)
            if i >= history and j >= history and (i - history) // group != (j - history) // group:
                sees = False
            allowed[i, j] = sees
    return allowed


@given(
    num_context=st.integers(0, 4),
    events=st.integers(0, 9),
    targets=st.integers(0, 5),
    window=st.integers(0, 7),
    family=st.sampled_from(["meta", "nvidia"]),
)
def test_intervals_and_self_are_the_published_mask(
    num_context: int, events: int, targets: int, window: int, family: str
) -> None:
    history = num_context + events
    rule = MaskRule(num_shared=num_context, window=window, has_rising_candidates=family == "nvidia")
    expected = published_mask(num_context, window, 1, history, targets, clips=family == "meta")
    lo, hi = history_intervals(rule, 0, history, history)
    kv_lo = candidate_kv_lo(rule, history, targets)
    for row in range(history):
        seen = [j for j in range(history + targets) if expected[row, j]]
        assert list(range(lo[row], hi[row])) == seen
    for target in range(targets):
        row = history + target
        seen = [j for j in range(history + targets) if expected[row, j]]
        assert [*range(kv_lo[target], history), row] == seen


@given(start=st.integers(0, 12), size=st.integers(0, 12), shared=st.integers(0, 3))
def test_intervals_of_a_part_are_the_part_of_the_intervals(
    start: int, size: int, shared: int
) -> None:
    rule = MaskRule(num_shared=shared, window=3, has_rising_candidates=False)
    whole = history_intervals(rule, 0, 24, 24)
    part = history_intervals(rule, start, start + size, 24)
    assert part.lo.tolist() == whole.lo[start : start + size].tolist()
    assert part.hi.tolist() == whole.hi[start : start + size].tolist()
    assert part.lo.dtype == part.hi.dtype == np.int32


@pytest.mark.parametrize(("window", "lo"), [(0, [0, 0, 0, 0]), (2, [0, 0, 0, 1])])
def test_causal_rows_see_themselves_and_what_is_before(window: int, lo: list[int]) -> None:
    rule = MaskRule(num_shared=0, window=window, has_rising_candidates=False)
    intervals = history_intervals(rule, 0, 4, 4)
    assert intervals.lo.tolist() == lo
    assert intervals.hi.tolist() == [1, 2, 3, 4]
