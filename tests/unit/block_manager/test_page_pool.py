"""Reference counts: an id is reused exactly when its last owner has let go."""

from __future__ import annotations

import numpy as np
import pytest

from engine.block_manager.accounts import Account
from engine.block_manager.eviction import Lru
from engine.block_manager.page_pool import RefPool
from engine.errors import InvariantError


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def account() -> Account:
    return Account(order=Lru())


def test_all_ids_are_handed_out_once(account: Account) -> None:
    pool = RefPool(5, "page")
    first, second = pool.allocate(2, account), pool.allocate(3, account)
    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    assert first.dtype == np.int32


def test_freed_ids_are_handed_out_before_those_never_used(account: Account) -> None:
    pool = RefPool(6, "page")
    held = pool.allocate(4, account)
    pool.release(held[1:3], account)
    assert sorted(pool.free_ids().tolist()) == [1, 2, 4, 5]
    assert sorted(pool.allocate(3, account).tolist()) == [1, 2, 4]
    assert (pool.free_ids().tolist(), pool.num_free, pool.num_used) == ([5], 1, 5)


def test_an_id_returns_with_its_last_owner_only(account: Account) -> None:
    pool = RefPool(3, "page")
    held = pool.allocate(2, account)
    pool.retain(held)
    pool.retain(held[:1])
    pool.release(held, account)
    assert pool.num_free == 1
    pool.release(held, account)
    assert pool.num_free == 2
    pool.release(held[:1], account)
    assert sorted(pool.free_ids().tolist()) == [0, 1, 2]
    assert pool.counts().tolist() == [0, 0, 0]


def test_freed_ids_are_announced_once(account: Account) -> None:
    freed: list[list[int]] = []
    pool = RefPool(4, "page", lambda pages: freed.append(sorted(pages.tolist())))
    held = pool.allocate(3, account)
    pool.retain(held[1:])
    pool.release(held, account)
    pool.release(held[1:], account)
    assert freed == [[0], [1, 2]]


def test_a_double_release_is_refused_and_changes_nothing(account: Account) -> None:
    pool = RefPool(4, "page")
    held = pool.allocate(3, account)
    pool.release(held[:1], account)
    with pytest.raises(InvariantError, match="page 0 has no owner"):
        pool.release(held, account)
    assert pool.counts().tolist() == [0, 1, 1, 0]
    assert pool.num_free == 2


def test_retaining_a_free_id_is_refused() -> None:
    pool = RefPool(4, "chunk")
    with pytest.raises(InvariantError, match="chunk 2 has no owner"):
        pool.retain(ids(2))


@pytest.mark.parametrize("act", ["retain", "release"])
def test_a_repeated_id_in_one_call_is_refused_and_changes_nothing(
    act: str, account: Account
) -> None:
    pool = RefPool(4, "page")
    pool.retain(pool.allocate(3, account))
    with pytest.raises(InvariantError, match="page 1 appears twice"):
        pool.retain(ids(1, 2, 1)) if act == "retain" else pool.release(ids(1, 2, 1), account)
    assert pool.counts().tolist() == [2, 2, 2, 0]


@pytest.mark.parametrize("count", [-1, 5])
def test_asking_for_more_than_is_free_is_refused(count: int, account: Account) -> None:
    pool = RefPool(4, "page")
    with pytest.raises(InvariantError, match="4 are free"):
        pool.allocate(count, account)
    assert pool.num_free == 4


def test_nothing_is_no_work(account: Account) -> None:
    pool = RefPool(0, "chunk")
    pool.retain(ids())
    pool.release(pool.allocate(0, account), account)
    assert pool.num_free == 0


def test_an_id_is_on_one_account_until_its_last_owner_lets_go() -> None:
    first, second = Account(order=Lru()), Account(order=Lru())
    pool = RefPool(6, "page")
    held, other = pool.allocate(3, first), pool.allocate(2, second)
    pool.retain(held[:2])
    assert (first.used, second.used) == (3, 2)
    pool.release(held, first)
    assert (first.used, second.used) == (2, 2)
    pool.release(held[:2], first)
    pool.release(other[:1], second)
    assert (first.used, second.used) == (0, 1)


def test_what_is_refused_is_on_no_account(account: Account) -> None:
    pool = RefPool(2, "page")
    held = pool.allocate(2, account)
    with pytest.raises(InvariantError, match="0 are free"):
        pool.allocate(1, account)
    pool.release(held[:1], account)
    with pytest.raises(InvariantError, match="no owner"):
        pool.release(held, account)
    assert account.used == 1
