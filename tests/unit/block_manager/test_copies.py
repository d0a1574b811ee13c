"""Copies: what is offloaded and onloaded, progress, holes, old branches, failures, lateness."""

from __future__ import annotations

import pytest
from block_harness import PAGE_BYTES, Blocks, key_of

from engine.errors import InvariantError
from engine.transfer.jobs import CopyJob, Direction

EDITED = [0, 1, 2, 3, 4, 5, 6, 7, 8, -9, 10, 11, 12, 13, 14, 15]


def offload(blocks: Blocks, user: str, history: int | list[int]) -> CopyJob:
    job = blocks.commit(blocks.must_plan(user, history))
    assert job is not None
    return job


def on_host_only(blocks: Blocks, user: str, history: int) -> None:
    """The user's whole pages are on the host, nothing is on the device."""
    blocks.serve(user, history)
    blocks.drain()
    blocks.evict_device()


def test_whole_pages_are_offloaded_from_where_the_last_offload_ended(blocks: Blocks) -> None:
    first = offload(blocks, "a", 10)
    assert (first.direction, first.first_page, first.num_pages) == (Direction.OFFLOAD, 0, 2)
    second = offload(blocks, "a", 17)
    assert (second.first_page, second.num_pages) == (2, 2)
    table = blocks.must_plan("a", 17).block_table
    assert [*first.pages, *second.pages] == table[:4].tolist()
    slots = [*first.host_slots, *second.host_slots]
    assert slots == [slots[0], slots[0] + 1, slots[2], slots[2] + 1]
    assert slots[0] % 2 == slots[2] % 2 == 0


def test_a_tail_page_is_not_offloaded_until_it_is_full(blocks: Blocks) -> None:
    assert blocks.commit(blocks.must_plan("a", 3)) is None
    assert offload(blocks, "a", 4).num_pages == 1


def test_host_len_rises_page_by_page_as_an_offload_proceeds(blocks: Blocks) -> None:
    job = offload(blocks, "a", 17)
    blocks.report()
    assert blocks.user("a").host_len == 0
    for pages_done in (1, 3):
        blocks.copies.advance(job, pages_done)
        blocks.report()
        assert blocks.user("a").host_len == 4 * pages_done
        assert blocks.value("copy_bytes_total", "offload") == pages_done * PAGE_BYTES
    blocks.copies.finish(job)
    blocks.report()
    assert blocks.user("a").host_len == 16
    assert not blocks.user("a").is_copying
    assert blocks.value("copy_bytes_total", "offload") == 4 * PAGE_BYTES


def test_several_offloads_of_a_user_may_be_in_flight(blocks: Blocks) -> None:
    jobs = [offload(blocks, "a", length) for length in (5, 9, 18)]
    assert [(job.first_page, job.num_pages) for job in jobs] == [(0, 1), (1, 1), (2, 2)]
    blocks.check(idle=False)
    blocks.drain()
    assert blocks.lengths("a") == [(18, 16)]


def test_host_length_never_rises_past_a_hole_that_a_failure_left(blocks: Blocks) -> None:
    first, second = offload(blocks, "a", 13), offload(blocks, "a", 20)
    blocks.copies.fail(first, pages_done=1)
    blocks.copies.finish(second)
    blocks.report()
    assert blocks.user("a").host_len == 4
    assert blocks.value("copy_failures_total") == 1
    blocks.check()
    retry = offload(blocks, "a", 20)
    assert (retry.first_page, retry.num_pages) == (1, 4)
    blocks.drain()
    assert blocks.lengths("a") == [(20, 20)]
    blocks.check()


def test_a_job_beyond_a_hole_that_ends_after_the_retry_began_counts_for_nothing(
    blocks: Blocks,
) -> None:
    first, second = offload(blocks, "a", 13), offload(blocks, "a", 20)
    blocks.copies.fail(first, pages_done=1)
    blocks.report()
    retry = offload(blocks, "a", 20)
    blocks.copies.fail(second, pages_done=0)
    blocks.report()
    blocks.check(idle=False)
    assert blocks.user("a").host_len == 4
    blocks.copies.finish(retry)
    blocks.report()
    assert blocks.lengths("a") == [(20, 20)]
    blocks.check()


def test_a_failure_gives_back_chunks_that_nothing_needs(blocks: Blocks) -> None:
    job = offload(blocks, "a", 24)
    assert blocks.manager.usage().chunks_used == 3
    blocks.copies.fail(job, pages_done=1)
    blocks.report()
    assert blocks.manager.usage().chunks_used == 1
    blocks.check()


def test_an_offload_of_an_old_branch_counts_for_nothing(blocks: Blocks) -> None:
    old = offload(blocks, "a", 16)
    blocks.copies.start(old)
    new = offload(blocks, "a", EDITED)
    assert (new.first_page, new.num_pages) == (0, 4)
    blocks.copies.finish(old)
    blocks.report()
    assert blocks.user("a").host_len == 0
    blocks.copies.finish(new)
    blocks.report()
    assert blocks.lengths("a") == [(16, 16)]
    blocks.check()


def test_a_divergence_cancels_offloads_that_have_not_started(blocks: Blocks) -> None:
    old = offload(blocks, "a", 16)
    blocks.must_plan("a", EDITED)
    assert old not in blocks.copies.queued
    assert blocks.manager.usage().num_copies == 0
    assert blocks.manager.usage().chunks_used == 0


def test_pages_of_a_running_offload_are_not_reused_after_a_divergence() -> None:
    blocks = Blocks(num_pages=5)
    old = offload(blocks, "a", 16)
    blocks.copies.start(old)
    assert blocks.plan("a", EDITED) is None
    blocks.check(idle=False)
    assert blocks.lengths("a") == [(8, 0)]
    blocks.copies.finish(old)
    blocks.report()
    reservation = blocks.must_plan("a", EDITED)
    assert reservation.start == 8


def test_chunks_of_a_running_offload_are_not_reused_after_a_divergence() -> None:
    blocks = Blocks(num_chunks=2)
    old = offload(blocks, "a", 16)
    blocks.copies.start(old)
    job = blocks.commit(blocks.must_plan("a", [-1] * 16))
    assert job is None
    assert blocks.value("offload_skipped_total") == 1
    blocks.copies.finish(old)
    blocks.report()
    assert offload(blocks, "a", [-1] * 16).num_pages == 4


def test_what_only_the_host_has_is_onloaded(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    assert blocks.lengths("a") == [(0, 16)]
    reservation = blocks.must_plan("a", 21)
    assert reservation.lookup == (16, 0, 16, False)
    assert (reservation.start, reservation.stop) == (16, 21)
    job = reservation.onload
    assert job is not None
    assert (job.direction, job.first_page) == (Direction.ONLOAD, 0)
    assert job.pages.tolist() == reservation.block_table[:4].tolist()
    blocks.commit(reservation)
    assert blocks.lengths("a") == [(21, 16)]
    blocks.drain()
    assert blocks.lengths("a") == [(21, 20)]
    assert blocks.value("copy_bytes_total", "onload") == 4 * PAGE_BYTES
    blocks.check()


def test_an_onload_reads_the_slots_that_the_offload_wrote(blocks: Blocks) -> None:
    written = offload(blocks, "a", 18)
    blocks.drain()
    blocks.evict_device()
    job = blocks.must_plan("a", 18).onload
    assert job is not None
    assert job.host_slots.tolist() == written.host_slots.tolist()


def test_an_onload_begins_where_the_device_ends() -> None:
    blocks = Blocks(num_pages=8)
    blocks.serve("a", 24)
    blocks.drain()
    blocks.serve("b", 16)
    assert blocks.lengths("a") == [(16, 24)]
    blocks.drain()
    job = blocks.must_plan("a", 24).onload
    assert job is not None
    assert (job.first_page, job.num_pages) == (4, 2)


def test_a_prefix_onloads_only_what_it_reads(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.must_plan("a", 6)
    assert reservation.lookup == (4, 0, 4, True)
    assert reservation.onload is not None
    assert reservation.onload.num_pages == 1
    blocks.commit(reservation)
    assert blocks.lengths("a") == [(4, 16)]
    blocks.drain()
    blocks.check()


def test_a_failed_onload_cuts_the_host_to_its_first_page(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.must_plan("a", 18)
    assert reservation.onload is not None
    blocks.copies.fail(reservation.onload)
    blocks.report()
    blocks.manager.release(reservation, onload_failed=True)
    assert blocks.manager.user(key_of("a")) is None
    assert blocks.value("copy_failures_total") == 1
    usage = blocks.manager.usage()
    assert (usage.pages_used, usage.chunks_used) == (0, 0)
    blocks.check()


def test_a_failed_onload_keeps_what_the_device_had() -> None:
    blocks = Blocks(num_pages=8)
    blocks.serve("a", 24)
    blocks.drain()
    blocks.serve("b", 16)
    blocks.drain()
    reservation = blocks.must_plan("a", 24)
    assert reservation.onload is not None
    blocks.copies.fail(reservation.onload)
    blocks.report()
    blocks.manager.release(reservation, onload_failed=True)
    assert blocks.lengths("a") == [(16, 16)]
    blocks.check()


def test_a_late_onload_keeps_its_pages_and_chunks_until_it_ends(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.must_plan("a", 18)
    late = reservation.onload
    assert late is not None
    blocks.copies.start(late)
    blocks.manager.release(reservation, onload_failed=True)
    assert blocks.lengths("a") == [(0, 0)]
    usage = blocks.manager.usage()
    assert (usage.pages_used, usage.chunks_used, usage.num_copies) == (4, 2, 1)
    again = blocks.must_plan("a", 18)
    assert again.start == 0
    assert not set(again.block_table.tolist()) & set(late.pages.tolist())
    blocks.commit(again)
    blocks.check(idle=False)
    blocks.copies.finish(late)
    blocks.report()
    assert blocks.lengths("a") == [(18, 0)]
    assert blocks.value("copy_failures_total") == 1
    assert blocks.value("prefetch_wasted_bytes_total") == 4 * PAGE_BYTES
    blocks.drain()
    blocks.check()


def test_a_late_onload_that_then_fails_is_counted_once(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.must_plan("a", 18)
    assert reservation.onload is not None
    blocks.copies.start(reservation.onload)
    blocks.manager.release(reservation, onload_failed=True)
    blocks.copies.fail(reservation.onload)
    blocks.report()
    assert blocks.value("copy_failures_total") == 1
    assert blocks.value("prefetch_wasted_bytes_total") == 0
    blocks.check()


def test_an_onload_that_is_late_in_the_queue_is_cancelled(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.must_plan("a", 18)
    blocks.manager.release(reservation, onload_failed=True)
    assert blocks.copies.queued == []
    assert blocks.manager.usage().pages_used == 0
    blocks.check()


def test_committing_a_piece_whose_onload_failed_is_refused(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.must_plan("a", 18)
    assert reservation.onload is not None
    blocks.copies.fail(reservation.onload)
    blocks.report()
    with pytest.raises(InvariantError, match="onload failed"):
        blocks.manager.commit(reservation)


def test_a_dropped_piece_cancels_its_onload_and_keeps_the_host_copy(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.must_plan("a", 18)
    blocks.manager.release(reservation, onload_failed=False)
    assert blocks.copies.queued == []
    assert blocks.lengths("a") == [(0, 16)]
    assert blocks.value("prefetch_wasted_bytes_total") == 0
    blocks.check()


def test_a_dropped_piece_whose_onload_was_never_submitted_holds_nothing(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.manager.reserve(key_of("a"), blocks.chain(18), stop=18, protected=())
    assert reservation is not None
    blocks.manager.release(reservation, onload_failed=False)
    assert blocks.manager.usage().num_copies == 0
    blocks.check()


def test_pages_of_a_dropped_piece_stay_when_their_onload_is_complete(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.must_plan("a", 18)
    blocks.drain()
    blocks.manager.release(reservation, onload_failed=False)
    assert blocks.lengths("a") == [(16, 16)]
    assert blocks.must_plan("a", 18).lookup == (16, 16, 0, False)


def test_a_dropped_piece_whose_onload_runs_on_wastes_it(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.must_plan("a", 18)
    assert reservation.onload is not None
    blocks.copies.start(reservation.onload)
    blocks.manager.release(reservation, onload_failed=False)
    assert blocks.manager.usage().pages_used == 4
    blocks.check(idle=False)
    blocks.drain()
    assert blocks.manager.usage().pages_used == 0
    assert blocks.lengths("a") == [(0, 16)]
    assert blocks.value("prefetch_wasted_bytes_total") == 4 * PAGE_BYTES
    blocks.check()


def test_news_of_a_job_that_is_not_in_flight_is_refused(blocks: Blocks) -> None:
    job = offload(blocks, "a", 10)
    blocks.copies.finish(job)
    (progress,) = blocks.copies.poll()
    blocks.manager.copy_progress(progress)
    with pytest.raises(InvariantError, match="offload job 0 is not in flight"):
        blocks.manager.copy_progress(progress)


def test_prefetch_brings_back_what_the_host_has(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.manager.reserve_resident(key_of("a"), max_pages=3)
    assert reservation is not None
    assert (reservation.start, reservation.stop) == (12, 12)
    assert reservation.onload is not None
    blocks.copies.submit(reservation.onload)
    blocks.drain()
    assert blocks.commit(reservation) is None
    assert blocks.lengths("a") == [(12, 16)]
    blocks.check()


def test_prefetch_takes_free_pages_only() -> None:
    blocks = Blocks(num_pages=6)
    blocks.serve("a", 16)
    blocks.drain()
    blocks.serve("b", 16)
    blocks.drain()
    assert blocks.lengths("a", "b") == [(8, 16), (16, 16)]
    assert blocks.manager.reserve_resident(key_of("a"), max_pages=9) is None
    assert blocks.lengths("a", "b") == [(8, 16), (16, 16)]


def test_prefetch_of_what_is_there_or_unknown_or_planned_does_nothing(blocks: Blocks) -> None:
    assert blocks.manager.reserve_resident(key_of("a"), max_pages=9) is None
    on_host_only(blocks, "a", 16)
    reservation = blocks.must_plan("a", 16)
    assert blocks.manager.reserve_resident(key_of("a"), max_pages=9) is None
    blocks.commit(reservation)
    blocks.drain()
    assert blocks.manager.reserve_resident(key_of("a"), max_pages=9) is None


def test_a_prefetch_that_is_evicted_unread_is_waste(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.manager.reserve_resident(key_of("a"), max_pages=9)
    assert reservation is not None
    assert reservation.onload is not None
    blocks.copies.submit(reservation.onload)
    blocks.drain()
    blocks.commit(reservation)
    blocks.evict_device()
    assert blocks.value("prefetch_wasted_bytes_total") == 4 * PAGE_BYTES


def test_a_prefetch_that_was_read_is_no_waste(blocks: Blocks) -> None:
    on_host_only(blocks, "a", 18)
    reservation = blocks.manager.reserve_resident(key_of("a"), max_pages=9)
    assert reservation is not None
    assert reservation.onload is not None
    blocks.copies.submit(reservation.onload)
    blocks.drain()
    blocks.commit(reservation)
    assert blocks.serve("a", 18).lookup == (16, 16, 0, False)
    blocks.drain()
    blocks.evict_device()
    assert blocks.value("prefetch_wasted_bytes_total") == 0
