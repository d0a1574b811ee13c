"""Forgetting, refreshing and dropping users, also while steps and copies hold their bytes."""

from __future__ import annotations

from block_harness import PAGE_BYTES, Blocks, key_of


def test_forget_frees_both_tiers_and_says_what_went(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    blocks.drain()
    ticket = blocks.manager.forget(("", "a"))
    assert (ticket.device_tokens, ticket.host_tokens) == (10, 8)
    assert ticket.is_done()
    assert blocks.lookup("a", 10).matched == 0
    usage = blocks.manager.usage()
    assert (usage.pages_used, usage.chunks_used, usage.num_users) == (0, 0, 0)
    assert blocks.value("invalidations_total", "forgotten") == 1
    blocks.check()


def test_forget_of_an_unknown_user_is_done_at_once(blocks: Blocks) -> None:
    ticket = blocks.manager.forget(("", "nobody"))
    assert (ticket.device_tokens, ticket.host_tokens, ticket.is_done()) == (0, 0, True)


def test_forget_removes_every_weights_version_of_one_namespace(blocks: Blocks) -> None:
    keys = [key_of("a", "v1"), key_of("a", "v2"), key_of("a", "v1", "shop"), key_of("b", "v1")]
    for key in keys:
        reservation = blocks.manager.reserve(key, blocks.chain(5), stop=5, protected=())
        assert reservation is not None
        blocks.manager.commit(reservation)
    ticket = blocks.manager.forget(("", "a"))
    assert ticket.device_tokens == 10
    left = [key for key in keys if blocks.manager.user(key) is not None]
    assert left == keys[2:]


def test_forget_cancels_queued_offloads(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    assert blocks.manager.forget(("", "a")).is_done()
    assert blocks.copies.queued == []
    blocks.check()


def test_forget_waits_for_a_running_offload(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    job = blocks.copies.queued[0]
    blocks.copies.start(job)
    ticket = blocks.manager.forget(("", "a"))
    assert not ticket.is_done()
    usage = blocks.manager.usage()
    assert (usage.pages_used, usage.chunks_used, usage.num_leaving) == (2, 1, 1)
    blocks.check(idle=False)
    blocks.copies.finish(job)
    blocks.report()
    assert ticket.is_done()
    assert blocks.manager.usage().pages_used == 0
    assert blocks.manager.user(key_of("a")) is None
    blocks.check()


def test_progress_of_a_forgotten_users_offload_counts_for_nothing(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    job = blocks.copies.queued[0]
    blocks.copies.start(job)
    blocks.manager.forget(("", "a"))
    blocks.copies.advance(job, 1)
    blocks.report()
    blocks.check(idle=False)
    blocks.serve("a", 10)
    assert blocks.lengths("a") == [(10, 0)]


def test_a_forgotten_user_keeps_its_pages_until_its_piece_ends(blocks: Blocks) -> None:
    blocks.serve("a", 14)
    blocks.drain()
    reservation = blocks.must_plan("a", 14, stop=6)
    ticket = blocks.manager.forget(("", "a"))
    usage = blocks.manager.usage()
    assert (usage.pages_used, usage.chunks_used, ticket.is_done()) == (4, 0, False)
    blocks.check(idle=False)
    anew = blocks.serve("a", 10)
    assert not set(anew.block_table.tolist()) & set(reservation.block_table.tolist())
    blocks.commit(reservation)
    assert ticket.is_done()
    assert blocks.manager.usage().pages_used == 3
    blocks.drain()
    blocks.check()


def test_a_step_of_a_forgotten_user_finishes_without_indexing_or_offloading(
    blocks: Blocks,
) -> None:
    blocks.serve("a", 10)
    blocks.drain()
    reservation = blocks.must_plan("a", 15)
    ticket = blocks.manager.forget(("", "a"))
    assert not ticket.is_done()
    assert blocks.manager.usage().pages_used == 4
    assert blocks.commit(reservation) is None
    assert ticket.is_done()
    assert blocks.lookup("a", 15).matched == 0
    assert blocks.manager.usage().pages_used == 0
    blocks.check()


def test_the_first_step_of_a_user_can_be_forgotten(blocks: Blocks) -> None:
    reservation = blocks.must_plan("a", 10)
    ticket = blocks.manager.forget(("", "a"))
    assert not ticket.is_done()
    blocks.commit(reservation)
    assert ticket.is_done()
    assert blocks.manager.user(key_of("a")) is None
    blocks.check()


def test_a_user_may_come_back_while_the_forgotten_state_still_leaves(blocks: Blocks) -> None:
    first = blocks.must_plan("a", 10)
    ticket = blocks.manager.forget(("", "a"))
    second = blocks.must_plan("a", 10)
    assert second.start == 0
    assert not set(first.block_table.tolist()) & set(second.block_table.tolist())
    blocks.commit(second)
    blocks.commit(first)
    assert ticket.is_done()
    assert blocks.user("a").device_len == 10
    blocks.drain()
    blocks.check()


def test_forget_waits_for_an_onload_and_counts_it_as_waste(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    blocks.drain()
    blocks.evict_device()
    reservation = blocks.must_plan("a", 10)
    assert reservation.onload is not None
    blocks.copies.start(reservation.onload)
    ticket = blocks.manager.forget(("", "a"))
    blocks.manager.release(reservation, onload_failed=False)
    assert not ticket.is_done()
    assert blocks.manager.usage().chunks_used == 1
    blocks.drain()
    assert ticket.is_done()
    assert blocks.value("prefetch_wasted_bytes_total") == 2 * PAGE_BYTES
    usage = blocks.manager.usage()
    assert (usage.pages_used, usage.chunks_used) == (0, 0)
    blocks.check()


def test_a_second_forget_waits_for_what_the_first_one_still_waits_for(blocks: Blocks) -> None:
    reservation = blocks.must_plan("a", 10)
    first = blocks.manager.forget(("", "a"))
    second = blocks.manager.forget(("", "a"))
    assert not second.is_done()
    blocks.manager.release(reservation, onload_failed=False)
    assert first.is_done()
    assert second.is_done()
    assert blocks.value("invalidations_total", "forgotten") == 1


def test_forget_finds_a_private_state(blocks: Blocks) -> None:
    key = key_of("a")._replace(private_to=5)
    reservation = blocks.manager.reserve(key, blocks.chain(10), stop=10, protected=())
    assert reservation is not None
    ticket = blocks.manager.forget(("", "a"))
    assert not ticket.is_done()
    blocks.manager.commit(reservation)
    assert ticket.is_done()
    blocks.check()


def test_refresh_makes_the_next_request_compute_everything(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    blocks.drain()
    blocks.manager.refresh(key_of("a"))
    assert blocks.value("invalidations_total", "refreshed") == 1
    assert blocks.must_plan("a", 10).start == 0
    blocks.manager.refresh(key_of("unknown"))
    assert blocks.value("invalidations_total", "refreshed") == 1


def test_drop_is_counted_as_nothing(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    blocks.manager.drop(key_of("a"))
    blocks.manager.drop(key_of("a"))
    assert blocks.manager.user(key_of("a")) is None
    assert blocks.manager.usage().pages_used == 0
    names = ("forgotten", "refreshed", "diverged")
    assert [blocks.value("invalidations_total", name) for name in names] == [0, 0, 0]


def test_a_state_cut_to_nothing_leaves_while_its_old_offload_runs(blocks: Blocks) -> None:
    blocks.serve("a", 10)
    blocks.copies.start(blocks.copies.queued[0])
    reservation = blocks.must_plan("a", [-1] * 10)
    ticket = blocks.manager.forget(("", "a"))
    blocks.manager.release(reservation, onload_failed=False)
    assert not ticket.is_done()
    blocks.drain()
    assert ticket.is_done()
    blocks.check()
