"""The block manager and the plain-Python oracle agree to the token on random request logs."""

from __future__ import annotations

import os

from block_shadow import Tokens, chain_of
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_manager.manager import BlockManager
from engine.block_manager.user_state import UserKey
from engine.metrics import Metrics
from engine.testing.fakes import FakeClock, ManualCopyEngine
from engine.testing.oracle import Oracle

LONG_RUN = int(os.environ.get("BLOCK_MANAGER_EXAMPLES", "0"))


@st.composite
def request_logs(draw: st.DrawFn) -> list[tuple[int, Tokens]]:
    """Requests of a few users: growing, shrinking, edited, gone back, now and then too long."""
    log: list[tuple[int, Tokens]] = []
    histories: dict[int, list[Tokens]] = {}
    token = 0
    for _ in range(draw(st.integers(1, 40))):
        user = draw(st.integers(0, 5))
        earlier = histories.setdefault(user, [[]])
        history = list(earlier[-1])
        act = draw(st.sampled_from(["append", "append", "append", "edit", "cut", "back"]))
        if act == "edit" and history:
            token += 1
            history[draw(st.integers(0, len(history) - 1))] = token
        elif act == "cut":
            history = history[: draw(st.integers(0, len(history)))]
        elif act == "back":
            history = list(draw(st.sampled_from(earlier)))
        grow = draw(st.integers(0, 9)) if act != "back" else 0
        history += range(token + 1, token + 1 + grow)
        token += grow
        earlier.append(history)
        log.append((user, history))
    return log


@settings(max_examples=LONG_RUN or 300, derandomize=LONG_RUN == 0)
@given(
    log=request_logs(),
    num_pages=st.integers(1, 14),
    page_size=st.integers(1, 4),
    num_chunks=st.integers(0, 9),
    pages_per_chunk=st.integers(1, 3),
)
def test_tokens_by_tier_equal_the_oracle_one_request_at_a_time(
    log: list[tuple[int, Tokens]],
    num_pages: int,
    page_size: int,
    num_chunks: int,
    pages_per_chunk: int,
) -> None:
    oracle = Oracle(
        num_pages=num_pages,
        page_size=page_size,
        num_chunks=num_chunks,
        pages_per_chunk=pages_per_chunk,
    )
    copies = ManualCopyEngine()
    metrics = Metrics()
    manager = BlockManager(
        num_pages=num_pages,
        page_size=page_size,
        num_chunks=num_chunks,
        pages_per_chunk=pages_per_chunk,
        copies=copies,
        metrics=metrics,
        page_bytes_all_layers=1,
        clock=FakeClock(),
    )
    for user, history in log:
        key = UserKey("", str(user), "v1")
        expected = oracle.request(user, history)
        if not manager.fits(len(history)):
            assert expected == (0, 0, len(history))
            continue
        chain = chain_of(history, key, page_size)
        reservation = manager.reserve(key, chain, stop=len(history), protected={key})
        assert reservation is not None, "one request at a time always fits"
        found = reservation.lookup
        computed = len(history) - reservation.start
        assert (found.device_hit, found.host_hit, computed) == expected
        jobs = [reservation.onload, manager.commit(reservation)]
        for job in jobs:
            if job is not None:
                copies.submit(job)
        for progress in copies.poll():
            manager.copy_progress(progress)
        manager.check_invariants(idle=True)
        for other in range(6):
            view = manager.user(UserKey("", str(other), "v1"))
            lengths = (view.device_len, view.host_len) if view else (0, 0)
            assert lengths == (oracle.device_len(other), oracle.host_len(other))
        usage = manager.usage()
        assert usage.pages_used == oracle.pages_in_use
        assert usage.chunks_used == oracle.chunks_in_use
    totals = oracle.totals
    assert metrics.value("evicted_pages_total", "device", "space") == totals.evicted_pages
    assert metrics.value("evicted_pages_total", "host", "space") == totals.evicted_host_pages
    assert metrics.value("dropped_tokens_total") == totals.dropped_tokens
    assert metrics.value("offload_skipped_total") == totals.offloads_skipped
    assert metrics.value("copy_bytes_total", "onload") == totals.onloaded_pages
    assert metrics.value("copy_bytes_total", "offload") == totals.offloaded_pages
