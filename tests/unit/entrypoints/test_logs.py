"""Reading logs, k-core, split, windows; and the known counts of the two real logs."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from engine.entrypoints.logs import (
    InteractionLog,
    Split,
    TraceRequest,
    by_user,
    k_core,
    leave_last_out,
    read_log,
    trace_requests,
)
from engine.errors import InvalidRequest
from examples.movielens.data import FetchError, fetch

MOVIETWEETINGS = Path(__file__).parents[4] / "shared" / "data" / "movietweetings" / "ratings.dat"

ROWS = [("u2", 30, 4.0, 100), ("u1", 10, 3.5, 50), ("u2", 20, 5.0, 40)]


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _log(rows: list[tuple[str, int, int]]) -> InteractionLog:
    """A log of (user, item, time)."""
    index: dict[str, int] = {}
    return InteractionLog(
        users=np.array([index.setdefault(user, len(index)) for user, _, _ in rows], np.int64),
        user_ids=tuple(index),
        items=np.array([item for _, item, _ in rows], np.int64),
        actions=None,
        times=np.array([time for _, _, time in rows], np.int64),
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("double_colon", "u2::30::4::100\nu1::10::3.5::50\nu2::20::5::40\n"),
        ("tab", "u2\t30\t4\t100\nu1\t10\t3.5\t50\nu2\t20\t5\t40\n"),
        ("comma", "u2,30,4,100\nu1,10,3.5,50\nu2,20,5,40"),
        ("header", "timestamp,item,user,rating\n100,30,u2,4\n50,10,u1,3.5\n40,20,u2,5\n"),
        (
            "typed_header",
            (
                "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
                "u2\t30\t4\t100\nu1\t10\t3.5\t50\nu2\t20\t5\t40.0\n"
            ),
        ),
        ("quotes", '"u2","30","4","100"\n"u1","10","3.5","50"\n"u2","20","5","40"\n'),
        ("blank_lines_and_bom", "\ufeffu2,30,4,100\n\nu1,10,3.5,50\nu2,20,5,40\n\n"),
    ],
    ids=lambda value: value if "\n" not in value else "",
)
def test_reads_the_same_log_in_every_form(name: str, text: str, tmp_path: Path) -> None:
    log = read_log(_write(tmp_path / f"{name}.txt", text))

    assert log.actions is not None
    rows = zip(log.users, log.items, log.actions, log.times, strict=True)
    assert [(log.user_ids[user], *rest) for user, *rest in rows] == ROWS


def test_three_columns_are_user_item_time(tmp_path: Path) -> None:
    log = read_log(_write(tmp_path / "log.csv", "7,30,100\n8,31,101\n"))

    assert log.user_ids == ("7", "8")
    assert log.items.tolist() == [30, 31]
    assert log.times.tolist() == [100, 101]
    assert log.actions is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("user,item,time\n", "no interactions"),
        ("1,2\n", "2 columns"),
        ("user,thing,timestamp\n1,2,3\n", "no column for item"),
        ("1,tt0104257,5,100\n", "'tt0104257': catalogue ids are 64-bit integers"),
        ("1,2,5,100\n1,2.5,5,100\n", "log.csv:2 has item id '2.5'"),
        ("1,-2,5,100\n", "give 0 or more"),
        ("1,99999999999999999999,5,100\n", "does not fit in 64 bits"),
        ("1,2,5,100\n1,2,5,soon\n", "log.csv:2 has time 'soon'"),
        ("1,2,good,100\n", "rating or action 'good'"),
        ("1,2,5,100\n1,2,5\n", "log.csv:2 has 3 fields where 4 are needed"),
        ("1,2,5,100\n1,2,5," + "9" * 140_000, "log.csv:2 cannot be read: field larger than"),
    ],
)
def test_refuses_a_log_it_cannot_read(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_log(_write(tmp_path / "log.csv", text))


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read the log"):
        read_log(tmp_path / "nothing.csv")


def test_k_core_is_iterated_until_nothing_changes() -> None:
    # c has two events; one of them is on item 3, which only c has; then c falls, then item 4.
    rows = [("a", 1, 0), ("a", 2, 0), ("b", 1, 0), ("b", 2, 0), ("b", 4, 0), ("c", 3, 0),
            ("c", 4, 0)]  # fmt: skip

    core = k_core(_log(rows), 2)

    assert core.user_ids == ("a", "b")
    assert core.items.tolist() == [1, 2, 1, 2]


def test_k_core_refuses_to_leave_nothing() -> None:
    with pytest.raises(InvalidRequest, match="min_count 3"):
        k_core(_log([("a", 1, 0), ("b", 1, 0)]), 3)


def test_by_user_sorts_by_time_and_keeps_file_order_in_ties() -> None:
    rows = [("a", 1, 5), ("b", 2, 1), ("a", 3, 4), ("a", 4, 5), ("a", 5, 4)]

    first, second = by_user(_log(rows))

    assert (first.user_id, first.items.tolist()) == ("a", [3, 5, 1, 4])
    assert first.times.tolist() == [4, 4, 5, 5]
    assert (second.user_id, second.items.tolist()) == ("b", [2])


def test_leave_last_out_splits_off_two_events() -> None:
    assert leave_last_out(5) == Split(train_stop=3, validation=3, test=4)
    with pytest.raises(InvalidRequest, match="needs 3"):
        leave_last_out(2)


def test_a_window_ends_window_s_after_its_first_event() -> None:
    rows = [("a", 1, 0), ("a", 2, 59), ("a", 3, 60), ("b", 4, 10), ("a", 5, 119), ("b", 6, 200)]

    requests = trace_requests(_log(rows), 60)

    assert requests == [
        TraceRequest(user=0, length=2, time=0),
        TraceRequest(user=1, length=1, time=10),
        TraceRequest(user=0, length=4, time=60),
        TraceRequest(user=1, length=2, time=200),
    ]


def test_windows_follow_time_not_the_order_of_the_file() -> None:
    rows = [("a", 1, 100), ("b", 2, 100), ("b", 3, 0), ("a", 4, 100)]

    requests = trace_requests(_log(rows), 60)

    assert requests == [
        TraceRequest(user=1, length=1, time=0),
        TraceRequest(user=0, length=2, time=100),
        TraceRequest(user=1, length=2, time=100),
    ]


def test_a_window_of_zero_seconds_is_a_request_an_event() -> None:
    assert len(trace_requests(_log([("a", 1, 7), ("a", 2, 7), ("a", 3, 7)]), 0)) == 3
    with pytest.raises(InvalidRequest, match="window_s"):
        trace_requests(_log([("a", 1, 7)]), -1)


class Known(NamedTuple):
    """Numbers of a real log: percentages for 1, 5, 10, 25, 50 % of the users, then no limit."""

    num_requests: int
    token_shares: list[float]
    request_shares: list[float]


@pytest.fixture(scope="module")
def movietweetings() -> InteractionLog:
    if not MOVIETWEETINGS.exists():
        pytest.skip(f"the MovieTweetings log is not at {MOVIETWEETINGS}")
    return read_log(MOVIETWEETINGS)


@pytest.fixture(scope="module")
def movielens() -> InteractionLog:
    try:
        return read_log(fetch())
    except FetchError as error:
        pytest.skip(f"MovieLens-100K cannot be fetched: {error}")


@pytest.mark.parametrize(
    ("log_name", "known"),
    [
        ("movietweetings", Known(90593, [31.3, 60.3, 75.4, 89.8, 93.0, 93.5],
                                 [18.5, 38.1, 51.5, 71.3, 79.6])),
        ("movielens", Known(25818, [87.3, 90.9, 93.2, 95.5, 96.0, 96.2],
                            [90.7, 92.9, 94.3, 95.8, 96.2])),
    ],
    ids=["movietweetings", "movielens"],
)  # fmt: skip
def test_real_logs_give_the_known_requests_and_lru_shares(
    log_name: str, known: Known, request: pytest.FixtureRequest
) -> None:
    log: InteractionLog = request.getfixturevalue(log_name)

    requests = trace_requests(log, 60)
    shares = [_lru_shares(requests, int(part * log.num_users))
              for part in (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)]  # fmt: skip

    assert len(requests) == known.num_requests
    assert [round(100 * tokens, 1) for tokens, _ in shares] == known.token_shares
    assert [round(100 * hits, 1) for _, hits in shares[:-1]] == known.request_shares


def _lru_shares(requests: list[TraceRequest], capacity: int) -> tuple[float, float]:
    """Whole-user LRU: shares of history tokens found, and of requests that find anything."""
    resident: OrderedDict[int, int] = OrderedDict()
    found = hits = 0
    for user, length, _ in requests:
        known = resident.pop(user, 0)
        found, hits = found + known, hits + (known > 0)
        resident[user] = length
        if len(resident) > capacity:
            resident.popitem(last=False)
    return found / sum(request.length for request in requests), hits / len(requests)
