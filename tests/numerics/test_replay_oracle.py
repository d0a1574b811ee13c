"""Token hits on real logs: the engine's planning against the plain-Python oracle.

Prefixes of the logs, so that the tests stay short; `python -m benchmarks.replay_oracle LOG` does
the same on whole logs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.replay_oracle import (
    RealLog,
    engine_tokens,
    largest_difference,
    oracle_tokens,
    three_sizes,
)
from examples.movielens.data import FetchError, fetch

MOVIETWEETINGS = Path(__file__).parents[3] / "shared" / "data" / "movietweetings" / "ratings.dat"
NUM_REQUESTS = 4000


@pytest.fixture(scope="module")
def movietweetings() -> RealLog:
    if not MOVIETWEETINGS.exists():
        pytest.skip(f"the MovieTweetings log is not at {MOVIETWEETINGS}")
    return RealLog.read(MOVIETWEETINGS, max_requests=NUM_REQUESTS)


@pytest.fixture(scope="module")
def movielens() -> RealLog:
    try:
        path = fetch()
    except FetchError as error:
        pytest.skip(f"MovieLens-100K cannot be fetched: {error}")
    return RealLog.read(path, max_requests=NUM_REQUESTS)


@pytest.mark.parametrize("has_host", [False, True], ids=["device_only", "host_tier"])
@pytest.mark.parametrize("size", [0, 1, 2], ids=["small", "medium", "large"])
@pytest.mark.parametrize("log_name", ["movietweetings", "movielens"])
def test_tokens_equal_the_oracle_one_request_at_a_time(
    log_name: str, size: int, has_host: bool, request: pytest.FixtureRequest
) -> None:
    log: RealLog = request.getfixturevalue(log_name)
    sizes = three_sizes(log, has_host=has_host)[size]

    expected = oracle_tokens(log, sizes)

    assert engine_tokens(log, sizes, sequential=True) == expected
    assert expected.device > 0


@pytest.mark.parametrize("has_host", [False, True], ids=["device_only", "host_tier"])
@pytest.mark.parametrize("size", [0, 1, 2], ids=["small", "medium", "large"])
@pytest.mark.parametrize("log_name", ["movietweetings", "movielens"])
def test_tokens_are_within_half_a_percent_of_the_oracle_batched(
    log_name: str, size: int, has_host: bool, request: pytest.FixtureRequest
) -> None:
    log: RealLog = request.getfixturevalue(log_name)
    sizes = three_sizes(log, has_host=has_host)[size]

    found = engine_tokens(log, sizes, sequential=False)

    assert largest_difference(found, oracle_tokens(log, sizes)) <= 0.005


def test_the_small_sizes_put_every_tier_to_use(movietweetings: RealLog) -> None:
    sizes = three_sizes(movietweetings, has_host=True)[0]

    tokens = oracle_tokens(movietweetings, sizes)

    assert min(tokens.device, tokens.host, tokens.computed) > 0.02 * tokens.history
