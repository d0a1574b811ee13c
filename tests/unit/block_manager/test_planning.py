"""Look-up, reserve, commit and release, without evictions and failed copies."""

from __future__ import annotations

import pytest
from block_harness import PAGE_BYTES, Blocks, key_of

from engine.block_manager.reservation import Lookup
from engine.errors import InvariantError

EDITED = [0, 1, 2, 3, 4, -5, 6, 7, 8, 9]


def test_a_new_user_computes_everything_and_finds_it_again(blocks: Blocks) -> None:
    assert blocks.lookup("a", 10) == (0, 0, 0, False)
    reservation = blocks.must_plan("a", 10)
    assert (reservation.start, reservation.stop) == (0, 10)
    assert len(reservation.block_table) == 3
    assert reservation.onload is None
    assert not reservation.is_private
    blocks.commit(reservation)
    assert blocks.lookup("a", 10) == (10, 10, 0, False)
    assert blocks.lookup("a", 15) == (10, 10, 0, False)
    blocks.drain()
    assert blocks.lengths("a") == [(10, 8)]
    blocks.check()


def test_lookup_promises_and_changes_nothing(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    before = blocks.user("a")
    assert blocks.lookup("a", EDITED) == (4, 4, 0, False)
    assert blocks.user("a") == before
    blocks.check(idle=False)


def test_growth_continues_inside_the_last_page(blocks: Blocks) -> None:
    first = blocks.serve("a", 10)
    second = blocks.must_plan("a", 13)
    assert (second.start, second.stop) == (10, 13)
    assert second.block_table[:3].tolist() == first.block_table.tolist()
    assert len(second.block_table) == 4
    blocks.commit(second)
    assert blocks.user("a").length == 13


def test_a_piece_that_finds_all_rows_has_nothing_to_compute(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    reservation = blocks.must_plan("a", 10)
    assert (reservation.start, reservation.stop) == (10, 10)
    assert len(reservation.block_table) == 3
    blocks.commit(reservation)
    blocks.drain()
    blocks.check()


def test_pieces_of_one_request_follow_each_other(blocks: Blocks) -> None:
    for stop, start in ((3, 0), (9, 3), (14, 9), (14, 14)):
        reservation = blocks.must_plan("a", 14, stop=stop)
        assert (reservation.start, reservation.stop) == (start, stop)
        assert len(reservation.block_table) == -(-stop // 4)
        blocks.commit(reservation)
        assert blocks.user("a").device_len == stop
    blocks.drain()
    assert blocks.lengths("a") == [(14, 12)]


def test_a_piece_that_stops_below_what_is_there_reads_only_its_part(blocks: Blocks) -> None:
    blocks.serve("a", 14)
    reservation = blocks.must_plan("a", 14, stop=6)
    assert (reservation.start, reservation.stop) == (6, 6)
    assert len(reservation.block_table) == 2
    blocks.commit(reservation)
    assert blocks.user("a").device_len == 14


def test_an_empty_history_leaves_no_state(blocks: Blocks) -> None:
    reservation = blocks.must_plan("a", 0)
    assert len(reservation.block_table) == 0
    assert blocks.commit(reservation) is None
    assert blocks.manager.user(key_of("a")) is None
    blocks.check()


def test_a_prefix_runs_its_remaining_rows_in_private_pages(blocks: Blocks) -> None:
    whole = blocks.serve("a", 14)
    reservation = blocks.must_plan("a", 10)
    assert reservation.lookup == Lookup(8, 8, 0, True)
    assert (reservation.start, reservation.stop) == (8, 10)
    assert reservation.is_private
    assert reservation.block_table[:2].tolist() == whole.block_table[:2].tolist()
    assert reservation.block_table[2] not in whole.block_table
    used = blocks.manager.usage().pages_used
    blocks.commit(reservation)
    assert blocks.manager.usage().pages_used == used - 1
    assert blocks.user("a").length == 14
    assert blocks.value("invalidations_total", "diverged") == 0


def test_a_prefix_that_ends_at_a_page_needs_no_private_page(blocks: Blocks) -> None:
    blocks.serve("a", 14)
    reservation = blocks.must_plan("a", 8)
    assert (reservation.start, reservation.stop, reservation.is_private) == (8, 8, False)
    blocks.commit(reservation)
    assert blocks.user("a").length == 14


def test_an_edit_keeps_the_whole_pages_before_it_and_takes_fresh_ones(blocks: Blocks) -> None:
    first = blocks.serve("a", 10)
    blocks.drain()
    reservation = blocks.must_plan("a", EDITED)
    assert reservation.lookup == Lookup(4, 4, 0, False)
    assert reservation.start == 4
    assert reservation.block_table[0] == first.block_table[0]
    assert blocks.value("invalidations_total", "diverged") == 1
    view = blocks.user("a")
    assert (view.device_len, view.host_len, view.branch) == (4, 4, 1)
    blocks.commit(reservation)
    assert blocks.lookup("a", EDITED).matched == 10
    assert blocks.lookup("a", 10).matched == 4


def test_an_edit_inside_the_tail_page_never_writes_into_the_old_page(blocks: Blocks) -> None:
    first = blocks.serve("a", 10)
    reservation = blocks.must_plan("a", [*range(9), -9, 10])
    assert reservation.start == 8
    assert reservation.block_table[:2].tolist() == first.block_table[:2].tolist()
    blocks.commit(reservation)
    assert blocks.lookup("a", 10).matched == 8


def test_going_back_to_an_earlier_history_finds_only_what_it_shares(blocks: Blocks) -> None:
    blocks.serve("a", 12)
    blocks.serve("a", [0, 1, 2, 3, 4, -5, 6, 7, 8, 9, 10, 11])
    assert blocks.must_plan("a", 12).start == 4


def test_a_divergence_at_the_first_token_starts_anew(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    blocks.drain()
    reservation = blocks.must_plan("a", [-1, 1, 2, 3, 4])
    assert reservation.lookup == Lookup(0, 0, 0, False)
    blocks.commit(reservation)
    blocks.drain()
    assert blocks.lengths("a") == [(5, 4)]
    blocks.check()


def test_the_same_history_under_another_key_shares_nothing(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    for key in (key_of("a", version="v2"), key_of("a", namespace="shop"), key_of("b")):
        assert blocks.manager.lookup(key, blocks.chain(10)).matched == 0


def test_a_released_piece_leaves_what_was_there(blocks: Blocks) -> None:
    blocks.serve("a", 6)
    used = blocks.manager.usage().pages_used
    reservation = blocks.must_plan("a", 15)
    assert blocks.manager.usage().pages_used == used + 2
    blocks.manager.release(reservation, onload_failed=False)
    assert blocks.manager.usage().pages_used == used
    assert blocks.lookup("a", 15).matched == 6
    blocks.check(idle=False)


def test_a_piece_ends_once(blocks: Blocks) -> None:
    reservation = blocks.serve("a", 6)
    with pytest.raises(InvariantError, match="ended twice"):
        blocks.manager.commit(reservation)
    with pytest.raises(InvariantError, match="ended twice"):
        blocks.manager.release(reservation, onload_failed=False)


def test_a_user_has_one_piece_in_flight(blocks: Blocks) -> None:
    blocks.must_plan("a", 6)
    with pytest.raises(InvariantError, match="'a' has a piece in flight"):
        blocks.plan("a", 6)


@pytest.mark.parametrize("stop", [-1, 7])
def test_a_piece_ends_inside_its_history(blocks: Blocks, stop: int) -> None:
    with pytest.raises(InvariantError, match=f"ends at {stop} of a history of 6"):
        blocks.plan("a", 6, stop=stop)


def test_a_chain_of_another_page_size_is_refused(blocks: Blocks) -> None:
    blocks.serve("a", 6)
    chain = blocks.chain(6)
    chain.page_size = 8
    with pytest.raises(InvariantError, match="pages of 8, pages have 4"):
        blocks.manager.lookup(key_of("a"), chain)


def test_fits_is_about_the_whole_pool(blocks: Blocks) -> None:
    assert blocks.manager.fits(64)
    assert not blocks.manager.fits(65)
    assert (blocks.manager.num_pages, blocks.manager.page_size) == (16, 4)


def test_a_view_shows_the_fingerprint_at_the_length(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    assert blocks.user("a").fingerprint == blocks.chain(10).at(10)
    blocks.serve("a", 12)
    assert blocks.user("a").fingerprint == blocks.chain(12).at(12)


def test_without_chunks_nothing_is_offloaded_or_counted() -> None:
    blocks = Blocks(num_chunks=0)
    assert blocks.commit(blocks.must_plan("a", 10)) is None
    assert blocks.value("offload_skipped_total") == 0
    blocks.check()


def test_a_private_state_is_never_offloaded(blocks: Blocks) -> None:
    key = key_of("a")._replace(private_to=3)
    reservation = blocks.manager.reserve(key, blocks.chain(10), stop=10, protected=())
    assert reservation is not None
    assert blocks.manager.commit(reservation) is None
    assert blocks.lookup("a", 10).matched == 0
    blocks.manager.drop(key)
    assert blocks.manager.usage().pages_used == 0
    blocks.check()


def test_usage_counts_both_tiers_users_and_copies(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    blocks.must_plan("b", 5)
    usage = blocks.manager.usage()
    assert (usage.pages_used, usage.pages_free) == (5, 11)
    assert (usage.chunks_used, usage.chunks_free) == (1, 15)
    assert (usage.num_users, usage.users_device, usage.users_host) == (2, 2, 2)
    assert (usage.num_reservations, usage.num_copies, usage.num_onloads) == (1, 1, 0)
    blocks.drain()
    assert blocks.value("copy_bytes_total", "offload") == 2 * PAGE_BYTES
