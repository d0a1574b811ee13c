"""The oracle of the replacement policy, on its own: literals, and a real log."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from engine.testing.oracle import Oracle, Served

RATINGS = Path(__file__).parents[4] / "shared/data/movietweetings/ratings.dat"


def oracle(num_pages: int = 4, num_chunks: int = 4) -> Oracle:
    """Pages of 4 tokens, chunks of 2 pages."""
    return Oracle(num_pages=num_pages, page_size=4, num_chunks=num_chunks, pages_per_chunk=2)


def test_a_history_is_found_as_far_as_it_matches() -> None:
    plain = oracle()
    assert plain.request("a", "abcdefghij") == Served(0, 0, 10)
    assert plain.request("a", "abcdefghijk") == Served(10, 0, 1)
    assert plain.request("a", "abcdeXghijk") == Served(4, 0, 7)
    assert plain.request("a", "abcdefghijk") == Served(4, 0, 7)
    assert plain.pages_in_use == 3


def test_a_prefix_is_served_to_its_last_page_and_keeps_the_state() -> None:
    plain = oracle()
    plain.request("a", "abcdefghij")
    assert plain.request("a", "abcdef") == Served(4, 0, 2)
    assert plain.request("a", "abcdefghij") == Served(10, 0, 0)


def test_evicted_pages_come_back_from_the_host_but_partial_ones_do_not() -> None:
    plain = oracle()
    plain.request("a", "abcdefghij")
    plain.request("b", "0123456789")
    assert (plain.device_len("a"), plain.host_len("a")) == (4, 8)
    assert plain.totals.dropped_tokens == 2
    assert plain.totals.evicted_pages == 2
    assert plain.request("a", "abcdefghij") == Served(4, 4, 2)
    assert plain.totals.onloaded_pages == 1


def test_a_request_that_never_fits_changes_nothing() -> None:
    plain = oracle()
    plain.request("a", "abcdefghij")
    assert plain.request("b", "0" * 17) == Served(0, 0, 17)
    assert plain.totals.scratch_runs == 1
    assert (plain.device_len("a"), plain.device_len("b")) == (10, 0)


def test_the_host_gives_up_tail_chunks_of_the_least_recent_user() -> None:
    plain = oracle(num_pages=16, num_chunks=3)
    plain.request("a", "a" * 16)
    plain.request("b", "b" * 12)
    assert (plain.host_len("a"), plain.host_len("b")) == (8, 12)
    assert plain.totals.evicted_host_pages == 2
    assert plain.chunks_in_use == 3
    plain.request("c", "c" * 4)
    assert (plain.host_len("a"), plain.host_len("b"), plain.host_len("c")) == (0, 12, 4)
    plain.request("d", "d" * 32)
    assert (plain.host_len("b"), plain.host_len("c"), plain.host_len("d")) == (0, 0, 24)
    assert plain.totals.offloads_skipped == 1


def test_a_forgotten_user_is_not_found() -> None:
    plain = oracle()
    plain.request("a", "abcdef")
    plain.forget("a")
    plain.forget("nobody")
    assert plain.users == {}
    assert (plain.pages_in_use, plain.chunks_in_use) == (0, 0)
    assert plain.request("a", "abcdef") == Served(0, 0, 6)


def windows_of_a_minute(path: Path) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Requests of a log: per user a window starts at the first event 60 s or more after the
    window's first event; one request a window with all its events, ordered by that first event.
    """
    rows = [line.split("::") for line in path.read_text().splitlines()]
    events = sorted(((int(row[3]), row[0], tuple(row)) for row in rows), key=lambda event: event[0])
    histories: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    opened: dict[str, list[int]] = {}
    requests: list[tuple[str, list[int]]] = []
    for time_s, user, row in events:
        window = opened.get(user)
        if window is None or time_s - window[0] >= 60:
            window = opened[user] = [time_s, 0]
            requests.append((user, window))
        histories[user].append(row)
        window[1] = len(histories[user])
    return [(user, histories[user][: window[1]]) for user, window in requests]


@pytest.mark.skipif(not RATINGS.exists(), reason=f"needs the MovieTweetings log at {RATINGS}")
def test_an_unlimited_cache_finds_the_known_share_of_a_real_log() -> None:
    requests = windows_of_a_minute(RATINGS)
    assert len(requests) == 90_593
    plain = Oracle(num_pages=10**9, page_size=8, num_chunks=0, pages_per_chunk=1)
    for user, history in requests:
        plain.request(user, history)
    # Histories only grow, and a page that is filled in part counts: the page size costs nothing.
    share = plain.totals.device_tokens / plain.totals.history_tokens
    assert share == pytest.approx(0.935, abs=5e-4)
