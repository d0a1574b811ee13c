"""Reference counts: an id is reused exactly when its last owner has let go."""

from __future__ import annotations

import numpy as np
import pytest

from engine.block_manager.page_pool import RefPool
from engine.errors import InvariantError


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_all_ids_are_handed_out_once() -> None:
    pool = RefPool(5, "page")
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    assert first.dtype == np.int32


def test_an_id_returns_with_its_last_owner_only() -> None:
    pool = RefPool(3, "page")
    held = pool.allocate(2)
    pool.retain(held)
    pool.retain(held[:1])
    pool.release(held)
    assert pool.num_free == 1
    pool.release(held)
    assert pool.num_free == 2
    pool.release(held[:1])
    assert sorted(pool.free_ids().tolist()) == [0, 1, 2]
    assert pool.counts().tolist() == [0, 0, 0]


def test_freed_ids_are_announced_once() -> None:
    freed: list[list[int]] = []
    pool = RefPool(4, "page", lambda pages: freed.append(sorted(pages.tolist())))
    held = pool.allocate(3)
    pool.retain(held[1:])
    pool.release(held)
    pool.release(held[1:])
    assert freed == [[0], [1, 2]]


def test_a_double_release_is_refused_and_changes_nothing() -> None:
    pool = RefPool(4, "page")
    held = pool.allocate(3)
    pool.release(held[:1])
    with pytest.raises(InvariantError, match="page 0 has no owner"):
        pool.release(held)
    assert pool.counts().tolist() == [0, 1, 1, 0]
    assert pool.num_free == 2


def test_retaining_a_free_id_is_refused() -> None:
    pool = RefPool(4, "chunk")
    with pytest.raises(InvariantError, match="chunk 2 has no owner"):
        pool.retain(ids(2))


@pytest.mark.parametrize("act", ["retain", "release"])
def test_a_repeated_id_in_one_call_is_refused_and_changes_nothing(act: str) -> None:
    pool = RefPool(4, "page")
    pool.retain(pool.allocate(3))
    with pytest.raises(InvariantError, match="page 1 appears twice"):
        getattr(pool, act)(ids(1, 2, 1))
    assert pool.counts().tolist() == [2, 2, 2, 0]


@pytest.mark.parametrize("count", [-1, 5])
def test_asking_for_more_than_is_free_is_refused(count: int) -> None:
    pool = RefPool(4, "page")
    with pytest.raises(InvariantError, match="4 are free"):
        pool.allocate(count)
    assert pool.num_free == 4


def test_nothing_is_no_work() -> None:
    pool = RefPool(0, "chunk")
    pool.retain(ids())
    pool.release(pool.allocate(0))
    assert pool.num_free == 0
