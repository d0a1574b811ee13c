"""Space: who waits, who goes first, and what never fits. Pages have 4 tokens."""

from core_harness import CoreUnderTest


def test_request_that_cannot_fit_waits_and_goes_when_a_step_ends():
    core = CoreUnderTest(pages=8)
    ann = core.rank("ann", 12)
    core.steps()
    bob = core.rank("bob", 24)
    core.steps()
    assert core.trace == ["plan 1", "launch 1"], "6 pages are wanted, 5 are free"
    core.turn()
    assert core.hits(ann) == (0, 0, 12)
    assert core.trace[-2:] == ["plan 2", "launch 2"]
    core.settle()
    assert core.hits(bob) == (0, 0, 24)


def test_request_that_cannot_fit_goes_when_a_copy_ends():
    core = CoreUnderTest(pages=8, automatic_copies=False)
    core.rank("ann", 12)
    core.steps()
    core.turn()
    (offload,) = core.copies.offloads
    core.copies.start(offload)
    bob = core.rank("bob", 32)
    core.steps()
    assert core.core.stats().num_waiting == 1, "a copy reads ann's pages"
    assert not core.executor.waiting
    core.copies.finish(offload)
    core.steps()
    core.turn()
    assert core.hits(bob) == (0, 0, 32)
    assert core.lengths("ann") == (0, 12)


def test_offload_that_has_not_started_does_not_hold_space():
    core = CoreUnderTest(pages=8, automatic_copies=False)
    core.rank("ann", 12)
    core.steps()
    core.turn()
    bob = core.rank("bob", 32)
    core.steps()
    core.turn()
    assert core.hits(bob) == (0, 0, 32)
    assert core.lengths("ann") is None
    assert core.value("dropped_tokens_total") == 12


def test_nothing_younger_goes_before_a_request_passed_over_once():
    core = CoreUnderTest(pages=8, max_batch_requests=2)
    ann = core.rank("ann", 12)
    core.steps()
    bob = core.rank("bob", 24)
    cid = core.rank("cid", 4)
    core.steps()
    dot = core.rank("dot", 4)
    core.steps()
    core.turn()
    core.turn()
    core.settle()
    # cid went with the plan that passed bob over; dot had to wait for bob.
    assert core.pieces == [[(0, 12, 3)], [(0, 4, 3)], [(0, 24, 3), (0, 4, 3)]]
    assert core.outcome_order == [ann, cid, bob, dot]


def test_older_request_is_not_held_up_by_one_that_was_passed_over():
    core = CoreUnderTest(pages=8, look_ahead=False)
    core.rank("ann", 12)
    core.steps()
    big = core.rank("bob", 24, priority=3)
    urgent = core.rank("cid", 24, priority=0)
    core.settle()
    assert core.outcome_order[1:] == [urgent, big]


def test_users_of_the_running_and_the_upcoming_step_are_no_victims():
    core = CoreUnderTest(pages=8)
    core.rank("ann", 16)
    core.steps()
    core.rank("bob", 12)
    core.steps()
    waiting = core.rank("cid", 8)
    core.steps()
    assert core.core.usage().pages_used == 7
    assert core.core.stats().num_waiting == 1
    assert core.value("evicted_pages_total", "device", "space") == 0
    core.settle()
    assert core.hits(waiting) == (0, 0, 8)


def test_long_request_ends_although_younger_ones_keep_coming():
    core = CoreUnderTest(pages=8, chunks=0, max_batch_tokens=12, max_piece_tokens=4)
    core.rank("cid", 20)
    core.steps()
    long = core.rank("ann", 32, candidates=1)
    for turn in range(40):
        core.rank(f"young{turn}", 24, candidates=1)
        core.steps()
        core.turn()
        if long in core.outcomes:
            break
    assert core.hits(long)[2] == 32
    core.settle()
    core.assert_everything_comes_back()


def test_history_longer_than_the_pool_runs_as_scratch():
    core = CoreUnderTest(pages=8)
    core.warm("bob", 8)
    request_id = core.rank("ann", 33)
    core.settle()
    assert core.hits(request_id) == (0, 0, 33)
    assert core.response(request_id).usage.reuse == "bypass"
    assert core.runner.steps[-1].scratch
    assert core.runner.steps[-1].works[0].block_table.tolist() == list(range(9))
    assert core.lengths("ann") is None
    assert core.lengths("bob") == (8, 8)
    assert core.value("scratch_runs_total", "never_fits") == 1


def test_history_that_fills_the_pool_exactly_is_cached():
    core = CoreUnderTest(pages=8)
    request_id = core.rank("ann", 32)
    core.settle()
    assert core.response(request_id).usage.reuse == "append"
    assert core.lengths("ann") == (32, 32)


def test_scratch_run_above_the_uncut_limit_is_too_large_at_admission():
    core = CoreUnderTest(pages=8, max_uncut_tokens=35)
    fits = core.rank("ann", 33, candidates=2)
    refused = core.rank("bob", 33, candidates=3)
    error = core.error(refused)
    assert (error.code, error.limit, error.value) == ("too_large", 35, 36)
    assert "max_uncut_tokens" in error.message and "device_pages" in error.message
    core.settle()
    assert core.hits(fits) == (0, 0, 33)


def test_bidirectional_history_above_the_uncut_limit_is_too_large_at_admission():
    core = CoreUnderTest("exact", max_uncut_tokens=20)
    fits = core.rank("ann", 19, context=[1])
    error = core.error(core.rank("bob", 20, context=[1]))
    assert (error.code, error.limit, error.value) == ("too_large", 20, 21)
    core.settle()
    assert core.hits(fits) == (0, 0, 20)


def test_prefetch_that_cannot_be_kept_is_refused():
    core = CoreUnderTest(pages=8)
    assert core.error(core.prefetch("ann", 33)).code == "invalid_request"
    assert core.error(core.prefetch("ann", 8, cache="bypass")).code == "invalid_request"


def test_state_longer_than_the_request_gives_up_its_own_tail_only_as_a_last_resort():
    core = CoreUnderTest(pages=8)
    core.warm("ann", 32)
    shorter = core.rank("ann", 30)
    core.settle()
    assert core.hits(shorter) == (28, 0, 2)
    assert core.lengths("ann") == (28, 32), "its last page made room for the private rows"
