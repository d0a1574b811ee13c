"""Eviction in both tiers: who, how much, and all or nothing."""

from __future__ import annotations

from block_harness import Blocks, key_of


def filled(num_pages: int = 12, num_chunks: int = 16) -> Blocks:
    """Users a, b, c with 4 pages each, all on the host too; the device is full."""
    blocks = Blocks(num_pages=num_pages, num_chunks=num_chunks)
    for user in "abc":
        blocks.serve(user, 16)
        blocks.drain()
    return blocks


def evicted(blocks: Blocks) -> tuple[float, float]:
    return (
        blocks.value("evicted_pages_total", "device", "space"),
        blocks.value("evicted_pages_total", "host", "space"),
    )


def test_pages_are_taken_from_the_tail_of_the_least_recent_user_only_as_needed() -> None:
    blocks = filled()
    blocks.serve("d", 9)
    assert blocks.lengths("a", "b", "c", "d") == [(4, 16), (16, 16), (16, 16), (9, 0)]
    assert evicted(blocks) == (3, 0)
    assert blocks.value("dropped_tokens_total") == 0
    blocks.drain()
    blocks.serve("e", 12)
    assert blocks.lengths("a", "b", "c", "d") == [(0, 16), (8, 16), (16, 16), (9, 8)]
    blocks.drain()
    blocks.check()


def test_planning_a_piece_makes_its_user_the_most_recent() -> None:
    blocks = filled()
    blocks.serve("a", 16)
    blocks.serve("d", 4)
    assert blocks.lengths("a", "b", "c") == [(16, 16), (12, 16), (16, 16)]


def test_planning_a_piece_makes_its_user_the_most_recent_on_the_host_too() -> None:
    blocks = filled(num_pages=32, num_chunks=6)
    blocks.serve("a", 16)
    blocks.serve("d", 8)
    assert blocks.lengths("a", "b", "c") == [(16, 16), (16, 8), (16, 16)]


def test_recency_follows_planning_not_commit() -> None:
    blocks = Blocks(num_pages=8)
    first, second = blocks.must_plan("a", 16), blocks.must_plan("b", 16)
    blocks.commit(second)
    blocks.commit(first)
    blocks.drain()
    blocks.serve("c", 4)
    assert blocks.lengths("a", "b") == [(12, 16), (16, 16)]


def test_a_lookup_does_not_touch() -> None:
    blocks = filled()
    blocks.lookup("a", 16)
    blocks.serve("d", 4)
    assert blocks.lengths("a") == [(12, 16)]


def test_evicting_a_partial_page_drops_and_counts_what_the_host_lacks() -> None:
    blocks = Blocks(num_pages=4)
    blocks.serve("a", 14)
    blocks.drain()
    assert blocks.lengths("a") == [(14, 12)]
    blocks.serve("b", 3)
    assert blocks.lengths("a") == [(12, 12)]
    assert blocks.value("dropped_tokens_total") == 2
    assert blocks.lookup("a", 14).matched == 12
    blocks.check()


def test_without_a_host_tier_an_evicted_user_is_gone() -> None:
    blocks = Blocks(num_pages=4, num_chunks=0)
    blocks.serve("a", 14)
    blocks.serve("b", 16)
    assert blocks.manager.user(key_of("a")) is None
    assert blocks.value("dropped_tokens_total") == 14
    blocks.check()


def test_protected_users_are_passed_over() -> None:
    blocks = filled()
    reservation = blocks.plan("d", 8, protected=["a", "b"])
    assert reservation is not None
    assert blocks.lengths("a", "b", "c") == [(16, 16), (16, 16), (8, 16)]


def test_users_with_a_piece_in_flight_are_passed_over() -> None:
    blocks = filled()
    blocks.must_plan("a", 16)
    blocks.must_plan("d", 8)
    assert blocks.lengths("a", "b") == [(16, 16), (8, 16)]


def test_when_there_is_not_enough_nothing_is_taken_and_nobody_is_touched() -> None:
    blocks = filled()
    assert blocks.plan("d", 24, protected=["b", "c"]) is None
    assert blocks.lengths("a", "b", "c", "d") == [(16, 16), (16, 16), (16, 16), (0, 0)]
    assert evicted(blocks) == (0, 0)
    assert blocks.manager.user(key_of("d")) is None
    assert blocks.plan("a", 32, protected=["b", "c"]) is None
    blocks.serve("d", 4)
    assert blocks.lengths("a") == [(12, 16)]
    blocks.drain()
    blocks.check()


def test_an_offload_that_has_not_started_is_cancelled_for_space() -> None:
    blocks = Blocks(num_pages=4)
    blocks.serve("a", 16)
    blocks.must_plan("b", 5)
    assert blocks.copies.queued == []
    assert blocks.lengths("a") == [(8, 0)]
    assert blocks.value("dropped_tokens_total") == 8
    assert blocks.manager.usage().chunks_used == 0
    blocks.check(idle=False)


def test_a_cancelled_offload_is_offered_again_at_the_next_commit() -> None:
    blocks = Blocks(num_pages=4)
    blocks.serve("a", 16)
    blocks.manager.release(blocks.must_plan("b", 5), onload_failed=False)
    job = blocks.commit(blocks.must_plan("a", 16))
    assert job is not None
    assert (job.first_page, job.num_pages) == (0, 4)


def test_a_user_whose_offload_runs_is_passed_over() -> None:
    blocks = Blocks(num_pages=8)
    blocks.serve("a", 16)
    blocks.copies.start(blocks.copies.queued[0])
    blocks.serve("b", 16)
    blocks.must_plan("c", 5)
    assert blocks.lengths("a", "b") == [(16, 0), (8, 0)]


def test_a_refused_cancel_leaves_the_books_in_order() -> None:
    blocks = Blocks(num_pages=8)
    blocks.serve("a", 8)
    blocks.copies.start(blocks.copies.queued[0])
    edited = [0, 1, 2, 3, -4, 5, 6, 7]
    blocks.serve("a", edited)
    assert len(blocks.copies.queued) == 1
    assert blocks.plan("b", 28) is None
    assert blocks.copies.queued == []
    blocks.check(idle=False)
    blocks.drain()
    assert blocks.lengths("a") == [(8, 0)]
    job = blocks.commit(blocks.must_plan("a", edited))
    assert job is not None
    assert job.num_pages == 2


def test_no_offload_is_cancelled_when_it_would_not_help() -> None:
    blocks = Blocks(num_pages=8)
    blocks.serve("a", 16)
    blocks.must_plan("b", 16)
    assert blocks.plan("c", 20) is None
    assert len(blocks.copies.queued) == 1
    assert blocks.lengths("a") == [(16, 0)]


def test_users_whose_onload_runs_are_passed_over() -> None:
    blocks = Blocks(num_pages=8)
    blocks.serve("a", 16)
    blocks.drain()
    blocks.evict_device()
    reservation = blocks.must_plan("a", 16)
    blocks.commit(reservation)
    assert blocks.plan("b", 24) is None
    blocks.drain()
    assert blocks.plan("b", 24) is not None


def test_a_prefix_of_a_state_that_fills_the_device_takes_its_own_unread_tail() -> None:
    blocks = Blocks(num_pages=4)
    blocks.serve("a", 16)
    blocks.drain()
    reservation = blocks.must_plan("a", 6)
    assert reservation.is_private
    assert (reservation.start, reservation.stop) == (4, 6)
    assert blocks.lengths("a") == [(12, 16)]
    blocks.commit(reservation)
    blocks.check()


def test_a_prefix_does_not_wait_for_an_offload_of_its_own_state_that_has_not_started() -> None:
    blocks = Blocks(num_pages=4)
    blocks.serve("a", 16)
    assert len(blocks.copies.queued) == 1
    blocks.commit(blocks.must_plan("a", 6))
    assert blocks.lengths("a") == [(12, 0)]
    blocks.drain()
    assert blocks.lengths("a") == [(12, 12)], "what is left is offered again"
    blocks.check()


def test_a_prefix_waits_for_an_offload_of_its_own_state_that_has_started() -> None:
    blocks = Blocks(num_pages=4)
    blocks.serve("a", 16)
    blocks.copies.start(blocks.copies.queued[0])
    assert blocks.plan("a", 6) is None
    blocks.drain()
    assert blocks.plan("a", 6) is not None


def test_a_prefix_may_take_the_only_page_of_its_own_state() -> None:
    blocks = Blocks(num_pages=1, num_chunks=0)
    blocks.serve("a", 4)
    reservation = blocks.must_plan("a", [9, 9])
    assert reservation.is_private
    blocks.commit(reservation)
    assert blocks.manager.user(key_of("a")) is None
    blocks.check()


def test_host_chunks_are_taken_from_the_tail_of_the_least_recent_user() -> None:
    blocks = filled(num_pages=32, num_chunks=6)
    assert blocks.manager.usage().chunks_free == 0
    blocks.serve("d", 6)
    blocks.drain()
    assert blocks.lengths("a", "b", "c", "d") == [(16, 8), (16, 16), (16, 16), (6, 4)]
    assert evicted(blocks) == (0, 2)
    assert blocks.value("dropped_tokens_total") == 0
    blocks.check()


def test_a_user_that_lost_its_last_chunk_and_page_is_gone() -> None:
    blocks = Blocks(num_pages=4, num_chunks=2)
    blocks.serve("a", 16)
    blocks.drain()
    blocks.serve("b", 16)
    blocks.drain()
    assert blocks.manager.user(key_of("a")) is None
    assert blocks.lengths("b") == [(16, 16)]
    assert blocks.manager.usage().num_users == 1
    blocks.check()


def test_an_offload_goes_as_far_as_chunks_can_be_had() -> None:
    blocks = Blocks(num_pages=16, num_chunks=2)
    blocks.serve("a", 24)
    blocks.drain()
    assert blocks.lengths("a") == [(24, 16)]
    assert blocks.value("offload_skipped_total") == 1
    blocks.check()


def test_the_user_being_extended_is_never_its_own_victim() -> None:
    blocks = Blocks(num_pages=16, num_chunks=2)
    blocks.serve("a", 16)
    blocks.drain()
    assert blocks.commit(blocks.must_plan("a", 24)) is None
    assert blocks.lengths("a") == [(24, 16)]
    assert blocks.value("offload_skipped_total") == 1


def test_a_skipped_offload_is_tried_again_at_the_next_commit() -> None:
    blocks = Blocks(num_pages=16, num_chunks=1)
    blocks.serve("a", 8)
    held = blocks.must_plan("b", 8)
    blocks.copies.start(blocks.copies.queued[0])
    assert blocks.commit(held) is None
    assert blocks.value("offload_skipped_total") == 1
    blocks.drain()
    job = blocks.commit(blocks.must_plan("b", 8))
    assert job is not None
    assert job.num_pages == 2
    assert blocks.lengths("a") == [(8, 0)]


def test_users_in_a_step_or_with_a_copy_in_flight_keep_their_chunks() -> None:
    blocks = filled(num_pages=32, num_chunks=6)
    blocks.must_plan("a", 16)
    job = blocks.commit(blocks.must_plan("b", 20))
    assert job is not None
    assert blocks.lengths("a", "b", "c") == [(16, 16), (20, 16), (16, 8)]
    blocks.commit(blocks.must_plan("d", 16))
    assert blocks.lengths("a", "b", "c") == [(16, 16), (20, 16), (16, 0)]
    assert blocks.value("offload_skipped_total") == 1
