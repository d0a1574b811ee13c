"""The residency table and the growing arrays of a state."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from engine.block_manager.accounts import Account, VersionAccounts
from engine.block_manager.eviction import Lru
from engine.block_manager.user_state import (
    TRANSITIONS,
    Event,
    Residency,
    UserKey,
    UserState,
)
from engine.errors import InvariantError

KEY = UserKey("shop", "u1", "v1")
ACCOUNTS = VersionAccounts(version="v1", device=Account(order=Lru()), host=Account(order=Lru()))


@pytest.mark.parametrize(("before", "event"), list(product(Residency, Event)))
def test_fire_follows_the_table_and_refuses_what_is_not_in_it(
    before: Residency, event: Event
) -> None:
    state = UserState(KEY, ACCOUNTS, residency=before)
    if (before, event) in TRANSITIONS:
        state.fire(event)
        assert state.residency is TRANSITIONS[before, event]
    else:
        with pytest.raises(InvariantError, match=f"{before.value}, cannot {event.value}"):
            state.fire(event)
        assert state.residency is before


def test_every_residency_can_be_left_and_ends_absent() -> None:
    for start in Residency:
        seen, front = {start}, {start}
        while front:
            front = {after for (at, _), after in TRANSITIONS.items() if at in front} - seen
            seen |= front
        assert Residency.ABSENT in seen


def test_arrays_grow_by_small_steps_and_give_room_back() -> None:
    state = UserState(KEY, ACCOUNTS)
    for page in range(1000):
        state.append_pages(np.array([page], dtype=np.int32))
    assert state.pages.tolist() == list(range(1000))
    assert state.array_bytes() <= 4 * 1000 * 9 // 8
    assert state.cut_pages(300).tolist() == list(range(300, 1000))
    assert state.pages.tolist() == list(range(300))
    assert state.array_bytes() <= 4 * 600
    state.append_pages(np.array([7, 8], dtype=np.int32))
    assert state.pages[-3:].tolist() == [299, 7, 8]


def test_cutting_to_more_than_there_is_changes_nothing() -> None:
    state = UserState(KEY, ACCOUNTS)
    state.append_chunks(np.array([3, 4], dtype=np.int32))
    state.append_hashes(np.array([5], dtype=np.uint64))
    assert state.cut_chunks(9).tolist() == []
    state.cut_hashes(9)
    assert (state.chunks.tolist(), state.hashes.tolist()) == ([3, 4], [5])


def test_an_emptied_state_holds_and_knows_nothing() -> None:
    state = UserState(KEY, ACCOUNTS, device_len=9, host_len=8, offload_len=8, used_len=9)
    state.append_pages(np.array([5, 6, 7], dtype=np.int32))
    state.append_chunks(np.array([3], dtype=np.int32))
    state.append_hashes(np.array([1, 2], dtype=np.uint64))
    assert (state.empty().tolist(), state.num_pages) == ([3], 3)
    assert state.drop_pages().tolist() == [5, 6, 7]
    assert (state.device_len, state.host_len, state.offload_len, state.used_len) == (0, 0, 0, 0)
    assert (state.num_pages, state.num_chunks, state.num_hashes) == (0, 0, 0)
    assert state.array_bytes() == 0
