"""Cancel, in every state a request can be in: one outcome, no answer after it, nothing leaks."""

import itertools

import pytest
from core_harness import CoreUnderTest


def busy_core(**options):
    """The device runs zed's step."""
    core = CoreUnderTest(**options)
    core.rank("zed", 4, request_id="zed")
    core.steps()
    return core


def test_waiting_request_is_gone_at_once():
    core = busy_core(look_ahead=False)
    ann = core.rank("ann", 8)
    core.cancel(ann)
    assert core.error(ann).code == "cancelled"
    assert core.core.stats().num_waiting == 0
    core.settle()
    assert core.lengths("ann") is None
    core.assert_everything_comes_back()


def test_planned_request_is_answered_at_once_and_never_runs():
    core = busy_core()
    ann = core.rank("ann", 8)
    bob = core.rank("bob", 8)
    core.steps()
    core.cancel(ann)
    assert core.error(ann).code == "cancelled"
    core.settle()
    assert core.pieces == [[(0, 4, 3)], [(0, 8, 3)]]
    assert core.hits(bob) == (0, 0, 8)
    assert core.lengths("ann") is None
    core.assert_everything_comes_back()


def test_planned_request_lets_go_of_its_onload():
    core = CoreUnderTest(pages=12)
    core.warm("ann", 16)
    core.evict_device()
    core.copies.is_automatic = False
    core.rank("zed", 4)
    core.steps()
    ann = core.rank("ann", 16)
    core.steps()
    (onload,) = core.copies.onloads
    core.cancel(ann)
    core.turn()
    assert core.copies.onloads == [], "it had not started: it is cancelled"
    assert onload.succeeded is False
    assert core.lengths("ann") == (0, 16), "the host copy is still good"
    core.assert_everything_comes_back()


def test_running_request_keeps_its_rows():
    core = CoreUnderTest()
    ann = core.rank("ann", 8)
    core.steps()
    core.cancel(ann)
    assert core.error(ann).code == "cancelled"
    core.settle()
    assert core.lengths("ann") == (8, 8)
    again = core.rank("ann", 8)
    core.settle()
    assert core.hits(again) == (8, 0, 0)


def test_request_between_pieces_keeps_the_rows_of_the_pieces_that_ran():
    core = CoreUnderTest(max_batch_tokens=16, look_ahead=False)
    ann = core.rank("ann", 40)
    core.steps()
    core.run_device()
    core.core.step()
    # The next piece is planned in the same pass; forget it by cancelling while it runs.
    core.cancel(ann)
    core.settle()
    assert core.pieces == [[(0, 16, 0)], [(16, 32, 0)]]
    assert core.lengths("ann") == (32, 32)
    core.assert_everything_comes_back()


def test_request_that_waits_between_pieces_is_gone_at_once():
    core = CoreUnderTest(max_batch_requests=1, max_piece_tokens=8, look_ahead=False)
    ann = core.rank("ann", 40, priority=1)
    core.rank("ann", 40, request_id="second")
    core.steps()
    core.rank("bob", 4, request_id="bob")
    core.turn()
    assert [len(step) for step in core.pieces] == [1]
    core.cancel(ann)
    core.settle()
    assert core.error(ann).code == "cancelled"
    assert core.outcome_order == [ann, "bob", "second"]
    assert core.hits("second") == (8, 0, 32)


def test_abandoned_request_is_cancelled_once():
    core = CoreUnderTest()
    ann = core.rank("ann", 8)
    core.steps()
    core.cancel(ann)
    core.cancel(ann)
    core.settle()
    assert core.outcome_order == [ann]


def test_finished_and_unknown_requests_are_ignored():
    core = CoreUnderTest()
    ann = core.rank("ann", 8)
    core.settle()
    core.cancel(ann, "nobody")
    assert core.outcome_order == [ann]
    assert core.hits(ann) == (0, 0, 8)


def test_next_request_of_the_user_waits_for_the_abandoned_one_to_leave():
    core = CoreUnderTest()
    first = core.rank("ann", 8)
    core.steps()
    core.cancel(first)
    second = core.rank("ann", 10)
    core.steps()
    assert core.trace == ["plan 1", "launch 1"]
    core.settle()
    assert core.hits(second) == (8, 0, 2)


def test_cancelled_prefetch_that_only_moves_ends_with_its_copy():
    core = CoreUnderTest(pages=12)
    core.warm("ann", 16)
    core.evict_device()
    core.copies.is_automatic = False
    moving = core.prefetch("ann", 16)
    core.steps()
    (onload,) = core.copies.onloads
    core.cancel(moving)
    core.steps()
    assert not core.core.is_idle
    core.copies.finish(onload)
    core.steps()
    assert core.core.is_idle
    assert core.lengths("ann") == (16, 16)
    core.assert_everything_comes_back()


def test_scratch_run_is_cancelled_like_any_other():
    core = busy_core()
    planned = core.rank("ann", 8, cache="bypass")
    core.steps()
    core.cancel(planned)
    core.settle()
    running = core.rank("ann", 8, cache="bypass")
    core.steps()
    core.cancel(running)
    core.settle()
    assert [len(step) for step in core.pieces] == [1, 1]
    core.assert_everything_comes_back()


def test_id_of_an_unfinished_request_is_not_taken_twice():
    core = CoreUnderTest()
    core.rank("ann", 8, request_id="same")
    core.steps()
    core.core.submit(core.requests["same"])
    (refusal,) = core.core.take_outbox()
    assert refusal.error.code == "invalid_request" and "'same'" in refusal.error.message
    core.settle()
    assert core.hits("same") == (0, 0, 8)


def test_id_may_be_used_again_once_its_request_has_ended():
    core = CoreUnderTest()
    core.rank("ann", 8, request_id="same")
    core.settle()
    del core.outcomes["same"]
    core.rank("ann", 8, request_id="same")
    core.settle()
    assert core.hits("same") == (8, 0, 0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_cancels_in_any_order_leave_the_others_alone(order):
    """One request waits, one is planned, one runs, one is between its pieces."""
    core = CoreUnderTest(pages=12, max_batch_requests=2, max_piece_tokens=8)
    ids = [core.rank(user, 20) for user in ("ann", "bob", "cid", "dot")]
    core.steps()
    core.turn()
    survivor = order[-1]
    for index in order[:-1]:
        core.cancel(ids[index])
        core.steps()
    core.settle()
    assert core.hits(ids[survivor])[2] > 0
    codes = [core.error(ids[index]).code for index in order[:-1]]
    assert codes == ["cancelled"] * 3
    core.assert_everything_comes_back()


def test_storm_of_cancels_ends_with_full_pools():
    core = CoreUnderTest(pages=12, chunks=4, max_batch_requests=2, max_piece_tokens=8)
    for user in ("ann", "bob", "cid"):
        core.warm(user, 16)
    for wave in range(12):
        ids = [core.rank(user, 16 + wave) for user in ("ann", "bob", "cid", "dot")]
        ids.append(core.prefetch("ann", 20))
        ids.append(core.prefetch("bob"))
        for _ in range(wave % 4):
            core.step()
        if wave % 3 and core.executor.waiting:
            core.run_device()
        core.cancel(*reversed(ids))
    core.settle()
    assert len(core.outcomes) == 75
    core.assert_everything_comes_back()
