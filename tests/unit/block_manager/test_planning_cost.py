"""What planning does, counted in calls: as much with many users as with few, and not more than now.

A call of a Python function or of a C function counts one. This is no timing, but nothing that costs
by the user or by the page in Python gets past it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from block_harness import Blocks, key_of

PAGES_OF_A_USER = 8
TOKENS = PAGES_OF_A_USER * Blocks.page_size


def calls_of(act: Callable[[], object]) -> int:
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def calls_to_plan(num_users: int, tokens: int) -> int:
    """Calls to reserve and commit for one of that many users, who fill the device."""
    blocks = Blocks(num_pages=num_users * PAGES_OF_A_USER, num_chunks=2 * num_users * TOKENS)
    for user in range(num_users):
        blocks.serve(str(user), TOKENS)
    blocks.drain()
    chain = blocks.chain(tokens)
    user = key_of("3")

    def plan() -> None:
        reservation = blocks.manager.reserve(user, chain, stop=tokens, protected=())
        assert reservation is not None
        blocks.manager.commit(reservation)

    return calls_of(plan)


@pytest.mark.parametrize(
    ("tokens", "at_most"), [(TOKENS, 80), (TOKENS + 2 * Blocks.page_size, 260)]
)
def test_planning_costs_the_same_calls_for_any_number_of_users(tokens: int, at_most: int) -> None:
    few, many = calls_to_plan(5, tokens), calls_to_plan(200, tokens)
    assert few == many
    assert many <= at_most
