"""Weights versions that share the pools: whose pages and chunks go, and whose never do.

Pages hold 4 tokens, chunks 8. "a@v2" is user a under weights version v2; "a" is under v1.
"""

from __future__ import annotations

import math

import pytest
from block_harness import Blocks, key_of

from engine.errors import InvariantError

HALVES = {"v1": 0.5, "v2": 0.5}


def serve_all(blocks: Blocks, histories: dict[str, int]) -> None:
    """One request after the other, each one's copies complete."""
    for user, history in histories.items():
        blocks.serve(user, history)
        blocks.drain()


def device(blocks: Blocks, *users: str) -> list[int]:
    return [device_len for device_len, _ in blocks.lengths(*users)]


def host(blocks: Blocks, *users: str) -> list[int]:
    return [host_len for _, host_len in blocks.lengths(*users)]


# Pages.


def test_without_quotas_all_versions_are_one_order() -> None:
    blocks = Blocks(num_pages=12)
    serve_all(blocks, {"a": 16, "b@v2": 16, "c": 16, "d@v2": 24})
    assert device(blocks, "a", "b@v2", "c", "d@v2") == [0, 8, 16, 24]
    blocks.check()


def test_a_version_above_its_quota_gives_up_pages_down_to_its_quota_then_the_asking_one() -> None:
    blocks = Blocks(num_pages=12)
    blocks.manager.set_quotas(HALVES)
    serve_all(blocks, {"a": 16, "b@v2": 16, "c": 16})
    assert blocks.used() == {"v1": (8, 4, 2), "v2": (4, 2, 1)}
    blocks.serve("d@v2", 12)
    assert device(blocks, "a", "b@v2", "c", "d@v2") == [8, 12, 16, 12]
    assert blocks.used()["v1"][0] == 6
    assert blocks.value("evicted_pages_total", "device", "space") == 3
    blocks.drain()
    blocks.check()


def test_a_version_at_its_quota_is_not_robbed_however_old_its_users_are() -> None:
    blocks = Blocks(num_pages=12)
    blocks.manager.set_quotas(HALVES)
    serve_all(blocks, {"a": 16, "b": 8, "c@v2": 24, "d@v2": 8})
    assert device(blocks, "a", "b", "c@v2", "d@v2") == [16, 8, 16, 8]
    blocks.check()


def test_a_version_below_its_quota_is_not_robbed_for_one_that_is_above() -> None:
    blocks = Blocks(num_pages=12)
    blocks.manager.set_quotas(HALVES)
    serve_all(blocks, {"a": 8, "b@v2": 32, "c@v2": 8, "d@v2": 8})
    assert device(blocks, "a", "b@v2", "c@v2", "d@v2") == [8, 24, 8, 8]
    blocks.check()


def test_when_only_others_within_their_quota_have_pages_nothing_is_taken() -> None:
    blocks = Blocks(num_pages=12)
    blocks.manager.set_quotas(HALVES)
    serve_all(blocks, {"a": 24, "b@v2": 8})
    held = blocks.must_plan("c@v2", 16)
    assert blocks.plan("d@v2", 12) is None, "b has two pages, three are asked for"
    assert device(blocks, "a", "b@v2") == [24, 8]
    assert blocks.plan("d@v2", 8) is not None
    assert device(blocks, "a", "b@v2") == [24, 0]
    blocks.commit(held)
    blocks.check(idle=False)


def test_versions_above_their_quota_are_one_order_and_each_stops_at_its_quota() -> None:
    blocks = Blocks(num_pages=12)
    blocks.manager.set_quotas({"v1": 0.25, "v2": 0.25, "v3": 0.5})
    serve_all(blocks, {"a": 8, "b@v2": 8, "c": 8, "d@v2": 12})
    assert [entry[0] for entry in blocks.used().values()] == [4, 5, 0]
    blocks.serve("e@v3", 20)
    assert device(blocks, "a", "b@v2", "c", "d@v2") == [4, 4, 8, 12]
    blocks.drain()
    blocks.serve("f@v3", 4)
    assert device(blocks, "a", "b@v2", "c", "d@v2", "e@v3") == [4, 0, 8, 12, 20]
    blocks.drain()
    blocks.serve("g@v3", 4)
    assert device(blocks, "a", "b@v2", "c", "d@v2", "e@v3") == [4, 0, 8, 12, 16]
    blocks.drain()
    blocks.check()


def test_the_order_over_versions_is_that_of_planning_not_of_the_versions() -> None:
    blocks = Blocks(num_pages=12)
    blocks.manager.set_quotas({"v1": 0.25, "v2": 0.25, "v3": 0.5})
    serve_all(blocks, {"a": 16, "b@v2": 16, "c@v3": 16})
    blocks.serve("a", 16)
    blocks.serve("d@v3", 4)
    assert device(blocks, "a", "b@v2", "c@v3") == [16, 12, 16]
    blocks.serve("e@v3", 4)
    assert device(blocks, "a", "b@v2", "c@v3") == [12, 12, 16]


def test_an_asking_version_above_its_quota_is_one_of_those_above() -> None:
    blocks = Blocks(num_pages=12)
    blocks.manager.set_quotas({"v1": 0.25, "v2": 0.25})
    serve_all(blocks, {"a": 16, "b@v2": 16, "c": 16, "d": 8})
    assert device(blocks, "a", "b@v2", "c", "d") == [8, 16, 16, 8]
    blocks.serve("e", 20)
    assert device(blocks, "a", "b@v2", "c", "d", "e") == [0, 12, 8, 8, 20]
    blocks.drain()
    blocks.check()


def test_an_asking_version_goes_on_with_its_own_users_below_its_quota() -> None:
    blocks = Blocks(num_pages=12)
    blocks.manager.set_quotas({"v1": 0.25, "v2": 0.75})
    serve_all(blocks, {"a": 16, "b": 8, "c@v2": 24, "d": 20})
    assert device(blocks, "a", "b", "c@v2", "d") == [0, 4, 24, 20]
    assert blocks.value("evicted_pages_total", "device", "space") == 5
    blocks.check()


def test_a_version_that_is_not_named_loses_all_first_however_new_its_users_are() -> None:
    blocks = Blocks(num_pages=12)
    serve_all(blocks, {"a@v2": 16, "b": 16, "c": 16})
    blocks.manager.set_quotas({"v2": 1.0})
    assert blocks.quotas() == {"v2": (12, 16), "v1": (0, 0)}
    blocks.serve("d@v2", 20)
    assert device(blocks, "a@v2", "b", "c", "d@v2") == [16, 0, 12, 20]
    blocks.drain()
    blocks.serve("e@v2", 16)
    assert device(blocks, "a@v2", "b", "c", "d@v2", "e@v2") == [12, 0, 0, 20, 16]
    blocks.drain()
    blocks.check()


def test_free_pages_go_to_whoever_asks() -> None:
    blocks = Blocks(num_pages=12)
    blocks.manager.set_quotas({"v1": 0.25, "v2": 0.75})
    serve_all(blocks, {"a": 24, "b": 16, "c@v9": 8})
    assert {name: pages for name, (pages, _, _) in blocks.used().items()} == {
        "v1": 10,
        "v2": 0,
        "v9": 2,
    }
    serve_all(blocks, {"d@v2": 36})
    assert device(blocks, "a", "b", "c@v9", "d@v2") == [0, 12, 0, 36]
    blocks.check()


def test_protected_held_and_copied_users_above_a_quota_are_passed_over() -> None:
    blocks = Blocks(num_pages=16)
    blocks.manager.set_quotas({"v2": 1.0})
    serve_all(blocks, {"a": 16, "b": 16, "c": 16})
    blocks.serve("d", 16)
    blocks.copies.start(blocks.copies.queued[0])
    held = blocks.must_plan("b", 16)
    assert blocks.plan("e@v2", 20, protected=["a"]) is None
    assert blocks.plan("e@v2", 16, protected=["a"]) is not None
    assert device(blocks, "a", "b", "c", "d") == [16, 16, 0, 16]
    blocks.commit(held)


def test_a_started_offload_makes_the_next_user_of_the_version_give_up_pages() -> None:
    blocks = Blocks(num_pages=12)
    blocks.manager.set_quotas(HALVES)
    serve_all(blocks, {"b": 8})
    blocks.serve("a", 16)
    blocks.serve("b", 8)
    blocks.serve("c", 16)
    blocks.copies.start(blocks.copies.queued[0])
    blocks.must_plan("d@v2", 24)
    assert device(blocks, "a", "b", "c") == [16, 0, 8]
    assert blocks.lengths("c") == [(8, 0)], "its offload had not started and was withdrawn"
    blocks.check(idle=False)


def test_the_asking_users_own_tail_comes_last() -> None:
    blocks = Blocks(num_pages=8)
    blocks.manager.set_quotas(HALVES)
    serve_all(blocks, {"z@v2": 16, "a": 12, "b": 4})
    blocks.commit(blocks.must_plan("a", 6))
    assert device(blocks, "z@v2", "a", "b") == [16, 12, 0]
    held = blocks.must_plan("b", 4)
    blocks.commit(blocks.must_plan("a", 6))
    assert device(blocks, "z@v2", "a") == [16, 8]
    blocks.commit(held)
    blocks.drain()
    blocks.check()


def test_setting_and_lifting_quotas_takes_nothing_by_itself() -> None:
    blocks = Blocks(num_pages=12)
    serve_all(blocks, {"a": 32, "b@v2": 16})
    blocks.manager.set_quotas(HALVES)
    blocks.manager.set_quotas({"v2": 0.5})
    blocks.manager.set_quotas({})
    assert blocks.quotas() == {"v1": (None, None), "v2": (None, None)}
    assert device(blocks, "a", "b@v2") == [32, 16]
    blocks.serve("a", 32)
    blocks.serve("c", 4)
    assert device(blocks, "a", "b@v2") == [32, 12], "one order again"


# Chunks.


def test_chunks_come_from_versions_above_their_quota_then_from_the_asking_one() -> None:
    blocks = Blocks(num_pages=32, num_chunks=6)
    blocks.manager.set_quotas(HALVES)
    serve_all(blocks, {"a": 16, "b@v2": 16, "c": 16, "d@v2": 16})
    assert host(blocks, "a", "b@v2", "c", "d@v2") == [8, 8, 16, 16]
    assert blocks.value("evicted_pages_total", "host", "space") == 4
    assert blocks.used() == {"v1": (8, 3, 2), "v2": (8, 3, 2)}
    blocks.check()


def test_chunks_of_a_version_within_its_quota_are_not_taken() -> None:
    blocks = Blocks(num_pages=32, num_chunks=6)
    blocks.manager.set_quotas(HALVES)
    serve_all(blocks, {"a": 24, "b@v2": 24})
    blocks.must_plan("b@v2", 24)
    assert blocks.commit(blocks.must_plan("c@v2", 16)) is None
    assert blocks.value("offload_skipped_total") == 1
    assert host(blocks, "a", "b@v2", "c@v2") == [24, 24, 0]


def test_an_extended_user_takes_chunks_of_its_version_but_never_its_own() -> None:
    blocks = Blocks(num_pages=32, num_chunks=6)
    blocks.manager.set_quotas(HALVES)
    serve_all(blocks, {"a": 24, "b@v2": 16, "c@v2": 6})
    serve_all(blocks, {"b@v2": 32})
    assert host(blocks, "a", "b@v2", "c@v2") == [24, 24, 0]
    assert blocks.value("offload_skipped_total") == 1
    blocks.check()


def test_a_chunk_in_part_counts_as_one_against_the_quota() -> None:
    blocks = Blocks(num_pages=32, num_chunks=4)
    blocks.manager.set_quotas(HALVES)
    serve_all(blocks, {"a": 20, "b@v2": 8, "c@v2": 8})
    assert host(blocks, "a", "b@v2", "c@v2") == [16, 8, 8]
    assert blocks.value("evicted_pages_total", "host", "space") == 1
    blocks.check()


def test_a_share_too_small_for_a_chunk_still_gets_free_ones() -> None:
    blocks = Blocks(num_pages=32, num_chunks=4)
    blocks.manager.set_quotas({"v1": 0.2, "v2": 0.8})
    assert blocks.quotas() == {"v1": (6, 0), "v2": (25, 3)}
    serve_all(blocks, {"a": 16})
    assert host(blocks, "a") == [16]
    serve_all(blocks, {"b@v2": 32})
    assert host(blocks, "a", "b@v2") == [0, 32]
    blocks.check()


# Quotas as numbers.


def test_quotas_are_rounded_down_and_at_least_one_page() -> None:
    blocks = Blocks(num_pages=100, num_chunks=100)
    blocks.manager.set_quotas({"v1": 0.29, "v2": 0.005, "v3": 0.678})
    assert blocks.quotas() == {"v1": (29, 29), "v2": (1, 0), "v3": (67, 67)}


def test_shares_that_add_up_to_one_in_tenths_are_accepted() -> None:
    blocks = Blocks(num_pages=10, num_chunks=10)
    blocks.manager.set_quotas({f"v{i}": 0.1 for i in range(10)})
    assert set(blocks.quotas().values()) == {(1, 1)}


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"v1": 0.0}, r"share 0.0 of version 'v1' is not in \(0, 1\]"),
        ({"v1": 0.5, "v2": -0.1}, "share -0.1 of version 'v2'"),
        ({"v1": 1.1}, "share 1.1 of version 'v1'"),
        ({"v1": math.nan}, "share nan of version 'v1'"),
        ({"v1": 0.6, "v2": 0.5}, "v1, v2 add up to 1.1, above 1"),
    ],
)
def test_shares_out_of_range_are_refused_and_change_nothing(
    shares: dict[str, float], message: str
) -> None:
    blocks = Blocks(num_pages=12, num_chunks=4)
    blocks.manager.set_quotas(HALVES)
    with pytest.raises(InvariantError, match=message):
        blocks.manager.set_quotas(shares)
    assert blocks.quotas() == {"v1": (6, 2), "v2": (6, 2)}


def test_what_can_ever_fit_is_measured_against_the_quota() -> None:
    blocks = Blocks(num_pages=12)
    fits = blocks.manager.fits
    assert (fits(48), fits(49), fits(48, "v1"), fits(49, "v1")) == (True, False, True, False)
    blocks.manager.set_quotas({"v1": 0.25, "v2": 0.5})
    assert (fits(12, "v1"), fits(13, "v1")) == (True, False)
    assert (fits(24, "v2"), fits(25, "v2")) == (True, False)
    assert (fits(0, "gone"), fits(1, "gone")) == (True, False)
    assert (fits(48), fits(49)) == (True, False)
    blocks.manager.set_quotas({})
    assert (fits(48, "gone"), fits(49, "gone")) == (True, False)


def test_a_history_of_exactly_the_quota_is_served_when_all_else_is_taken() -> None:
    blocks = Blocks(num_pages=12)
    blocks.manager.set_quotas({"v1": 0.25, "v2": 0.5, "v3": 0.25})
    serve_all(blocks, {"a@v3": 8, "b": 12, "c@v3": 16, "d": 12})
    assert blocks.manager.usage().pages_free == 0
    assert blocks.manager.fits(24, "v2")
    blocks.serve("e@v2", 24)
    assert {name: pages for name, (pages, _, _) in blocks.used().items()} == {
        "v1": 3,
        "v2": 6,
        "v3": 3,
    }
    assert device(blocks, "a@v3", "b", "c@v3", "d") == [0, 0, 12, 12]
    blocks.drain()
    blocks.check()


# Who holds what.


def test_a_piece_is_on_its_versions_account_from_planning_on(blocks: Blocks) -> None:
    held = blocks.must_plan("a@v2", 10)
    assert blocks.used() == {"v2": (3, 0, 1)}
    blocks.commit(held)
    assert blocks.used() == {"v2": (3, 1, 1)}
    blocks.manager.release(blocks.must_plan("a@v2", 19), onload_failed=False)
    assert blocks.used() == {"v2": (3, 1, 1)}
    blocks.check(idle=False)


def test_onloaded_and_prefetched_pages_are_on_the_account(blocks: Blocks) -> None:
    serve_all(blocks, {"a@v2": 16})
    blocks.evict_device()
    assert blocks.used() == {"v2": (0, 2, 1), "v1": (0, 0, 0)}
    held = blocks.must_plan("a@v2", 10)
    assert blocks.used()["v2"] == (3, 2, 1)
    blocks.manager.release(held, onload_failed=False)
    assert blocks.used()["v2"] == (0, 2, 1), "the onload had not started"


def test_a_private_page_is_on_the_account_until_the_piece_ends(blocks: Blocks) -> None:
    serve_all(blocks, {"a@v2": 16})
    held = blocks.must_plan("a@v2", 6)
    assert held.is_private
    assert blocks.used() == {"v2": (5, 2, 1)}
    blocks.commit(held)
    assert blocks.used() == {"v2": (4, 2, 1)}


def test_what_a_copy_still_touches_stays_on_the_account(blocks: Blocks) -> None:
    blocks.serve("a@v2", 10)
    blocks.copies.start(blocks.copies.queued[0])
    blocks.manager.forget(("", "a"))
    assert blocks.used() == {"v2": (2, 1, 0)}
    blocks.serve("a@v2", 6)
    assert blocks.used() == {"v2": (4, 2, 1)}
    blocks.drain()
    assert blocks.used() == {"v2": (2, 1, 1)}
    blocks.check()


def test_the_old_pages_of_a_diverged_user_stay_on_the_account_while_they_are_copied(
    blocks: Blocks,
) -> None:
    blocks.serve("a", 12)
    blocks.copies.start(blocks.copies.queued[0])
    blocks.serve("a", [0, 1, 2, 3, -4, 5, 6, 7, 8])
    assert blocks.used() == {"v1": (5, 3, 1)}, "of them two pages and two chunks of the old branch"
    blocks.drain()
    assert blocks.used() == {"v1": (3, 1, 1)}


def test_a_private_state_is_on_its_versions_account(blocks: Blocks) -> None:
    key = key_of("a@v2")._replace(private_to=3)
    held = blocks.manager.reserve(key, blocks.chain(10), stop=10, protected=())
    assert held is not None
    blocks.manager.commit(held)
    assert blocks.used() == {"v2": (3, 0, 1)}
    blocks.manager.drop(key)
    assert blocks.used() == {"v2": (0, 0, 0)}


def test_an_unused_version_is_forgotten_when_the_quotas_change(blocks: Blocks) -> None:
    serve_all(blocks, {"a": 10, "b@v2": 10})
    held = blocks.must_plan("c@v3", 0)
    blocks.manager.drop(held.key)
    blocks.manager.set_quotas({"v2": 1.0})
    assert list(blocks.used()) == ["v1", "v2", "v3"], "a step of v3 still runs"
    blocks.commit(held)
    blocks.manager.forget(("", "a"))
    blocks.manager.set_quotas({"v4": 1.0})
    assert list(blocks.used()) == ["v2", "v4"]
    blocks.check()
