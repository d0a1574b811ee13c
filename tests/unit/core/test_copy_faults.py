"""Copies that fail or come too late are misses: never an error, never a stale row."""

from core_harness import CoreUnderTest


def core_with_host_state(*users, **options):
    """Every user's 16 tokens are on the host only; copies move by hand from now on."""
    core = CoreUnderTest(pages=12, **options)
    for user in users:
        core.warm(user, 16)
    core.evict_device()
    core.copies.is_automatic = False
    core.runner.steps.clear()
    core.outcome_order.clear()
    return core


def test_failed_onload_is_recomputed_and_its_batch_mate_is_answered():
    core = core_with_host_state("ann")
    ann, bob = core.rank("ann", 18), core.rank("bob", 8)
    core.steps()
    core.copies.fail(core.copies.onloads[0])
    core.turn()
    assert core.outcome_order == [bob]
    assert core.lengths("ann") == (0, 0), "host_len is cut to the first page of the job"
    core.settle()
    assert core.pieces == [[(16, 18, 3), (0, 8, 3)], [(0, 18, 3)]]
    assert core.hits(ann) == (0, 0, 18)
    assert core.value("copy_failures_total") == 1
    core.assert_everything_comes_back()


def test_failed_onload_leaves_what_the_device_has():
    core = core_with_host_state("ann")
    first = core.rank("ann", 16)
    core.steps()
    core.copies.finish(core.copies.onloads[0])
    core.turn()
    assert core.hits(first) == (0, 16, 0)
    core.rank("bob", 40)
    core.steps()
    core.turn()
    core.settle()
    assert core.lengths("ann") == (8, 16), "bob took ann's last two pages"
    ann = core.rank("ann", 16)
    core.steps()
    (onload,) = core.copies.onloads
    assert (onload.first_page, onload.num_pages) == (2, 2)
    core.copies.fail(onload)
    core.turn()
    assert core.lengths("ann") == (8, 8)
    core.settle()
    assert core.hits(ann) == (8, 0, 8)


def test_retry_goes_before_all_that_wait():
    core = core_with_host_state("ann", look_ahead=False, max_batch_requests=1)
    ann = core.rank("ann", 16, priority=9)
    core.steps()
    urgent = core.rank("bob", 8, priority=-9)
    core.copies.fail(core.copies.onloads[0])
    core.settle()
    assert core.outcome_order == [ann, urgent]


def test_late_onload_is_recomputed_and_its_pages_stay_out_of_use_until_it_ends():
    core = core_with_host_state("ann")
    ann = core.rank("ann", 16)
    core.steps()
    (onload,) = core.copies.onloads
    core.copies.start(onload)
    core.settle()
    assert core.hits(ann) == (0, 0, 16)
    usage = core.core.usage()
    assert (usage.pages_used, usage.num_onloads) == (8, 1), "4 of the answer, 4 of the late copy"
    assert core.value("copy_failures_total") == 1
    core.copies.finish(onload)
    core.steps()
    usage = core.core.usage()
    assert (usage.pages_used, usage.num_onloads) == (4, 0)
    again = core.rank("ann", 16)
    core.settle()
    assert core.hits(again) == (16, 0, 0)
    core.assert_everything_comes_back()


def test_onload_that_never_started_is_cancelled_when_it_is_late():
    core = core_with_host_state("ann")
    ann = core.rank("ann", 16)
    core.steps()
    core.settle()
    assert core.hits(ann) == (0, 0, 16)
    assert core.copies.onloads == []
    core.assert_everything_comes_back()


def test_late_copy_that_fails_in_the_end_is_counted_once():
    core = core_with_host_state("ann")
    core.rank("ann", 16)
    core.steps()
    (onload,) = core.copies.onloads
    core.copies.start(onload)
    core.settle()
    core.copies.fail(onload)
    core.settle()
    assert core.value("copy_failures_total") == 1


def test_failure_between_suffix_pieces_keeps_the_scores_that_are_there():
    core = CoreUnderTest(pages=12, max_batch_tokens=12, max_batch_requests=1, look_ahead=False)
    core.warm("ann", 16)
    core.runner.steps.clear()
    ann = core.rank("ann", 16, candidates=30)
    core.steps()
    core.rank("bob", 40, priority=-9)
    core.copies.is_automatic = False
    while not core.copies.onloads:
        core.turn()
    (onload,) = core.copies.onloads
    assert (onload.first_page, onload.num_pages) == (2, 2), "bob took two pages between the pieces"
    core.copies.fail(onload)
    core.settle()
    assert core.pieces[0] == [(16, 16, 12)]
    # The second dozen is garbage; the rows that were lost come with what fits, then the rest.
    assert core.pieces[-4:] == [[(16, 16, 12)], [(8, 16, 4)], [(16, 16, 12)], [(16, 16, 2)]]
    assert core.hits(ann) == (8, 0, 8)
    assert core.response(ann).scores.shape == (30, 2)
    core.assert_everything_comes_back()


def test_request_whose_copies_fail_twice_is_still_answered():
    core = core_with_host_state("ann", max_piece_tokens=4)
    ann = core.rank("ann", 16)
    core.steps()
    core.copies.fail(core.copies.onloads[0])
    core.turn()
    core.turn()
    assert core.hits(ann) == (0, 0, 16)
    core.copies.fail(core.copies.offloads[0])
    core.rank("bob", 48)
    core.settle()
    again = core.rank("ann", 16)
    core.settle()
    assert core.hits(again) == (0, 0, 16), "its offload had failed: nothing is left"
    core.assert_everything_comes_back()


def test_cancelled_request_with_a_failed_copy_keeps_no_row():
    core = core_with_host_state("ann")
    ann = core.rank("ann", 18)
    core.steps()
    core.cancel(ann)
    core.copies.fail(core.copies.onloads[0])
    core.settle()
    assert core.error(ann).code == "cancelled"
    assert core.lengths("ann") is None
    core.assert_everything_comes_back()


def test_failed_offload_is_tried_again_at_the_next_commit():
    core = CoreUnderTest(automatic_copies=False)
    core.rank("ann", 16)
    core.steps()
    core.turn()
    core.copies.fail(core.copies.offloads[0], pages_done=1)
    core.steps()
    assert core.lengths("ann") == (16, 4)
    core.rank("ann", 17)
    core.steps()
    core.turn()
    (offload,) = core.copies.offloads
    assert (offload.first_page, offload.num_pages) == (1, 3)
    core.copies.finish(offload)
    core.steps()
    assert core.lengths("ann") == (17, 16)


# Moves: prefetches without rows to compute.


def test_prefetch_of_a_history_that_the_host_has_only_moves():
    core = core_with_host_state("ann")
    ann = core.prefetch("ann", 16)
    core.steps()
    assert not core.executor.waiting and not core.core.is_idle
    core.copies.finish(core.copies.onloads[0])
    core.steps()
    assert core.hits(ann) == (0, 16, 0)
    assert core.lengths("ann") == (16, 16)
    assert core.pieces == []


def test_failed_move_is_recomputed():
    core = core_with_host_state("ann")
    ann = core.prefetch("ann", 16)
    core.steps()
    core.copies.fail(core.copies.onloads[0])
    core.settle()
    assert core.pieces == [[(0, 16, 0)]]
    assert core.hits(ann) == (0, 0, 16)
    core.assert_everything_comes_back()


def test_late_move_is_recomputed_once_its_time_is_up():
    core = core_with_host_state("ann", copy_timeout_s=2.0)
    ann = core.prefetch("ann", 16)
    core.steps()
    core.copies.start(core.copies.onloads[0])
    core.clock.advance(2.0)
    core.steps()
    assert ann not in core.outcomes
    core.clock.advance(0.001)
    core.settle()
    assert core.hits(ann) == (0, 0, 16)
    core.assert_everything_comes_back()


def test_prefetch_without_history_brings_a_known_state():
    core = core_with_host_state("ann")
    ann = core.prefetch("ann")
    core.steps()
    core.copies.finish(core.copies.onloads[0])
    core.steps()
    assert core.response(ann).usage.device_tokens == 16
    assert core.response(ann).usage.history_length == 16
    assert core.lengths("ann") == (16, 16)


def test_prefetch_without_history_of_an_unknown_user_is_answered_with_nothing():
    core = CoreUnderTest()
    ann = core.prefetch("ann")
    core.settle()
    assert core.hits(ann) == (0, 0, 0)
    assert core.core.is_idle


def test_prefetch_without_history_whose_copy_fails_is_answered_with_what_is_there():
    core = core_with_host_state("ann")
    ann = core.prefetch("ann")
    core.steps()
    core.copies.fail(core.copies.onloads[0])
    core.settle()
    assert core.hits(ann) == (0, 0, 0)
    core.assert_everything_comes_back()


def test_prefetch_without_history_takes_free_pages_only():
    core = core_with_host_state("ann")
    core.rank("bob", 40)
    core.settle()
    assert core.core.usage().pages_free == 2
    ann = core.prefetch("ann")
    core.steps()
    core.copies.finish(core.copies.onloads[0])
    core.settle()
    assert core.hits(ann) == (8, 0, 0)
    assert core.lengths("bob")[0] == 40


def test_request_behind_a_move_of_its_user_waits_for_it():
    core = core_with_host_state("ann")
    core.prefetch("ann")
    ann = core.rank("ann", 16)
    core.steps()
    assert not core.executor.waiting
    core.copies.finish(core.copies.onloads[0])
    core.settle()
    assert core.hits(ann) == (16, 0, 0)


def test_nothing_is_remembered_of_copies_that_served_nobody():
    core = core_with_host_state("ann", "bob")
    core.rank("zed", 4)
    core.steps()
    dropped = core.rank("bob", 16)
    late = core.rank("ann", 16)
    core.steps()
    for job in core.copies.onloads:
        core.copies.start(job)
    core.cancel(dropped)
    core.settle()
    assert core.hits(late) == (0, 0, 16)
    for job in core.copies.onloads:
        core.copies.finish(job)
    core.settle()
    assert core.core._meter._onload_ended_s == {}
    core.assert_everything_comes_back()
