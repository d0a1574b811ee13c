"""Removing a weights version or everything, and what is told about users and versions."""

from __future__ import annotations

from typing import Literal

import pytest
from block_harness import Blocks, key_of

from engine.block_manager.manager import BlockManager
from engine.block_manager.reports import UserSummary
from engine.block_manager.reservation import Reservation, VersionUsage
from engine.block_manager.user_state import Residency


def private(blocks: Blocks, user: str, history: int, number: int = 5) -> Reservation:
    key = key_of(user)._replace(private_to=number)
    held = blocks.manager.reserve(key, blocks.chain(history), stop=history, protected=())
    assert held is not None
    return held


def names(
    manager: BlockManager, limit: int, tier: Literal["device", "host"] | None = None
) -> list[str]:
    found = manager.users(limit, tier=tier)
    return [f"{user.user_id}@{user.weights_version}" for user in found]


# Removing a version.


def test_a_dropped_version_is_found_no_more_and_others_stay(blocks: Blocks) -> None:
    for user in ("a", "b", "a@v2"):
        blocks.serve(user, 10)
    blocks.drain()
    ticket = blocks.manager.drop_version("v1")
    assert (ticket.device_tokens, ticket.host_tokens, len(ticket.states)) == (20, 16, 2)
    assert ticket.is_done()
    assert blocks.lengths("a", "b", "a@v2") == [(0, 0), (0, 0), (10, 8)]
    assert blocks.used() == {"v2": (3, 1, 1)}
    assert blocks.value("invalidations_total", "retired") == 2
    blocks.check()


def test_dropping_an_unknown_version_is_done_at_once(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    ticket = blocks.manager.drop_version("v9")
    assert (ticket.device_tokens, len(ticket.states), ticket.is_done()) == (0, 0, True)
    assert blocks.value("invalidations_total", "retired") == 0
    assert blocks.lengths("a") == [(10, 0)]


def test_a_dropped_version_goes_when_its_steps_end(blocks: Blocks) -> None:
    blocks.serve("b", 10)
    blocks.drain()
    held = blocks.must_plan("a", 10)
    other = blocks.must_plan("a@v2", 10)
    ticket = blocks.manager.drop_version("v1")
    assert not ticket.is_done()
    assert blocks.used() == {"v1": (3, 0, 0), "v2": (3, 0, 1)}
    blocks.check(idle=False)
    assert blocks.commit(held) is None
    assert ticket.is_done()
    blocks.commit(other)
    blocks.drain()
    assert blocks.lengths("a", "b", "a@v2") == [(0, 0), (0, 0), (10, 8)]
    blocks.check()


def test_a_dropped_version_goes_when_its_running_copies_end(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    blocks.serve("b", 10)
    running, queued = blocks.copies.queued
    blocks.copies.start(running)
    ticket = blocks.manager.drop_version("v1")
    assert blocks.copies.queued == [], "the offload that had not started was cancelled"
    assert not ticket.is_done()
    assert blocks.used() == {"v1": (2, 1, 0)}
    blocks.copies.finish(running)
    blocks.report()
    assert ticket.is_done()
    assert queued.succeeded is False
    blocks.check()


def test_a_dropped_version_waits_for_what_was_leaving_before(blocks: Blocks) -> None:
    held = blocks.must_plan("a", 10)
    blocks.manager.forget(("", "a"))
    other = blocks.must_plan("b@v2", 10)
    ticket = blocks.manager.drop_version("v1")
    assert (len(ticket.states), ticket.is_done()) == (1, False)
    assert blocks.value("invalidations_total", "retired") == 0
    blocks.commit(held)
    assert ticket.is_done(), "a step of another version does not matter"
    blocks.commit(other)


def test_private_states_of_a_dropped_version_go_too(blocks: Blocks) -> None:
    blocks.manager.commit(private(blocks, "a", 10))
    blocks.manager.commit(private(blocks, "a@v2", 10, number=6))
    assert blocks.manager.drop_version("v1").is_done()
    assert blocks.used() == {"v2": (3, 0, 1)}
    blocks.manager.drop(key_of("a")._replace(private_to=5))
    blocks.check()


def test_a_dropped_version_may_come_back(blocks: Blocks) -> None:
    blocks.manager.set_quotas({"v1": 0.5})
    blocks.serve("a", 10)
    blocks.manager.drop_version("v1")
    assert blocks.used() == {"v1": (0, 0, 0)}
    assert blocks.quotas() == {"v1": (8, 8)}
    assert blocks.must_plan("a", 10).start == 0


# Removing everything.


def test_reset_removes_all_users_of_all_versions(blocks: Blocks) -> None:
    for user in ("a", "b", "a@v2"):
        blocks.serve(user, 10)
    blocks.drain()
    blocks.manager.commit(private(blocks, "c@v3", 4))
    ticket = blocks.manager.reset()
    assert (ticket.device_tokens, ticket.host_tokens, len(ticket.states)) == (34, 24, 4)
    assert ticket.is_done()
    usage = blocks.manager.usage()
    assert (usage.pages_used, usage.chunks_used, usage.num_users) == (0, 0, 0)
    assert usage.by_version == ()
    assert blocks.value("invalidations_total", "reset") == 4
    assert blocks.value("invalidations_total", "forgotten") == 0
    blocks.check()


def test_reset_waits_for_steps_copies_and_what_was_leaving_before(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    blocks.copies.start(blocks.copies.queued[0])
    gone = blocks.must_plan("b", 10)
    blocks.manager.forget(("", "b"))
    held = blocks.must_plan("c@v2", 10)
    ticket = blocks.manager.reset()
    assert len(ticket.states) == 3
    blocks.commit(gone)
    assert blocks.commit(held) is None
    assert not ticket.is_done()
    blocks.drain()
    assert ticket.is_done()
    assert blocks.manager.usage().pages_used == 0
    blocks.check()


def test_a_user_may_come_back_while_a_reset_still_waits(blocks: Blocks) -> None:
    held = blocks.must_plan("a", 10)
    ticket = blocks.manager.reset()
    blocks.serve("a", 10)
    blocks.drain()
    assert not ticket.is_done()
    blocks.commit(held)
    assert ticket.is_done()
    assert blocks.lengths("a") == [(10, 8)]
    blocks.check()


# Lists and views of users.


def test_users_are_listed_latest_used_first_over_versions_and_tiers(blocks: Blocks) -> None:
    for user in ("a", "b@v2", "c", "a@v2"):
        blocks.serve(user, 10)
        blocks.drain()
        blocks.clock.advance(1.5)
    blocks.must_plan("b@v2", 10)
    assert names(blocks.manager, 9) == ["b@v2", "a@v2", "c@v1", "a@v1"]
    assert names(blocks.manager, 2) == ["b@v2", "a@v2"]
    assert names(blocks.manager, 0) == []
    first, second = blocks.manager.users(2)
    assert first == UserSummary("", "b", "v2", 10, 8, 3, 1, Residency.PINNED, 1006.0)
    assert second == UserSummary("", "a", "v2", 10, 8, 3, 1, Residency.RESIDENT, 1004.5)


def test_users_of_one_tier_are_those_with_something_in_it() -> None:
    blocks = Blocks(num_pages=4, num_chunks=4)
    for user in ("a", "b@v2"):
        blocks.serve(user, 16)
        blocks.drain()
    blocks.serve("c", 3)
    assert blocks.lengths("a", "b@v2", "c") == [(0, 16), (12, 16), (3, 0)]
    assert names(blocks.manager, 9) == ["c@v1", "b@v2", "a@v1"]
    assert names(blocks.manager, 9, "device") == ["c@v1", "b@v2"]
    assert names(blocks.manager, 9, "host") == ["b@v2", "a@v1"]


def test_private_states_are_not_listed(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    blocks.manager.commit(private(blocks, "b", 10))
    assert names(blocks.manager, 9) == ["a@v1"]


def test_a_user_is_viewed_under_every_version_that_knows_it(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    blocks.drain()
    blocks.clock.advance(2.0)
    blocks.serve("a@v2", 6)
    blocks.serve("b@v3", 6)
    private(blocks, "a", 4)
    views = blocks.manager.user_versions("", "a")
    assert [(view.weights_version, view.device_len, view.host_len) for view in views] == [
        ("v1", 10, 8),
        ("v2", 6, 0),
    ]
    assert [view.last_used_s for view in views] == [1000.0, 1002.0]
    assert [view.fingerprint for view in views] == [
        blocks.chain(10).at(10),
        blocks.chain(6).at(6),
    ]
    assert blocks.manager.user_versions("shop", "a") == []


def test_the_last_use_of_a_user_is_when_a_piece_was_planned(blocks: Blocks) -> None:
    held = blocks.must_plan("a", 10)
    blocks.clock.advance(3.0)
    blocks.commit(held)
    blocks.drain()
    blocks.lookup("a", 10)
    assert blocks.user("a").last_used_s == 1000.0
    blocks.evict_device()
    prefetch = blocks.manager.reserve_resident(key_of("a"), max_pages=9)
    assert prefetch is not None
    assert blocks.user("a").last_used_s == 1003.0


def test_usage_is_told_by_version_and_adds_up(blocks: Blocks) -> None:
    blocks.manager.set_quotas({"v1": 0.25, "v2": 0.5})
    for user in ("a", "b@v2", "c@v2", "d@v9"):
        blocks.serve(user, 10)
    blocks.drain()
    usage = blocks.manager.usage()
    assert usage.by_version == (
        VersionUsage("v1", 4, 3, 4, 1, 1),
        VersionUsage("v2", 8, 6, 8, 2, 2),
        VersionUsage("v9", 0, 3, 0, 1, 1),
    )
    assert (usage.pages_used, usage.chunks_used, usage.num_users) == (12, 4, 4)


@pytest.mark.parametrize("removal", ["forget", "drop_version", "reset"])
def test_a_removed_prefetch_counts_what_nobody_used(blocks: Blocks, removal: str) -> None:
    blocks.serve("a", 16)
    blocks.drain()
    blocks.evict_device()
    prefetch = blocks.manager.reserve_resident(key_of("a"), max_pages=2)
    assert prefetch is not None
    assert prefetch.onload is not None
    blocks.copies.submit(prefetch.onload)
    blocks.drain()
    blocks.commit(prefetch)
    assert blocks.lengths("a") == [(8, 16)]
    {
        "forget": lambda: blocks.manager.forget(("", "a")),
        "drop_version": lambda: blocks.manager.drop_version("v1"),
        "reset": blocks.manager.reset,
    }[removal]()
    assert blocks.value("prefetch_wasted_bytes_total") == 2 * 1000
    blocks.check()


def test_version_is_dropped_a_few_users_at_a_time(blocks: Blocks) -> None:
    for user in ("a", "b", "c"):
        blocks.serve(user, 8)
    counts = [blocks.manager.drop_version("v1", limit=2).num_found for _ in range(3)]
    assert counts == [2, 1, 0]
    assert blocks.manager.usage().num_users == 0
