"""Backpressure: what the queue refuses, and when it says to come back."""

from core_harness import CoreUnderTest


def full_queue(**options):
    """zed's step runs, nothing is planned ahead."""
    core = CoreUnderTest(look_ahead=False, **options)
    core.rank("zed", 4)
    core.steps()
    return core


def test_full_queue_refuses_at_once_and_names_the_limit():
    core = full_queue(max_queue_requests=2)
    kept = [core.rank(user, 8) for user in ("ann", "bob")]
    error = core.error(core.rank("cid", 8))
    assert (error.code, error.limit, error.value, error.retry_after_s) == ("overloaded", 2, 2, 1.0)
    assert "max_queue_requests" in error.message
    core.settle()
    assert all(core.hits(request_id) == (0, 0, 8) for request_id in kept)
    assert core.value("requests_total", "rank", "overloaded") == 1


def test_full_queue_refuses_by_tokens():
    core = full_queue(max_queue_tokens=30)
    core.rank("ann", 20)
    error = core.error(core.rank("bob", 5))
    assert (error.code, error.limit, error.value) == ("overloaded", 30, 31)
    assert "max_queue_tokens" in error.message
    fits = core.rank("cid", 4)
    core.settle()
    assert core.hits(fits) == (0, 0, 4)


def test_one_user_cannot_fill_the_queue():
    core = full_queue(max_queue_requests_per_user=2)
    for _ in range(2):
        core.rank("ann", 8)
    error = core.error(core.rank("ann", 8))
    assert (error.code, error.limit, error.value) == ("overloaded", 2, 2)
    assert "max_queue_requests_per_user" in error.message
    other = core.rank("ann", 8, namespace="other")
    core.settle()
    assert core.hits(other) == (0, 0, 8)


def test_room_comes_back_when_requests_are_served_or_cancelled():
    core = full_queue(max_queue_requests=1)
    first = core.rank("ann", 8)
    assert core.error(core.rank("bob", 8)).code == "overloaded"
    core.cancel(first)
    second = core.rank("bob", 8)
    core.settle()
    assert core.hits(second) == (0, 0, 8)
    third = core.rank("cid", 8)
    core.settle()
    assert core.hits(third) == (0, 0, 8)


def test_retry_after_is_the_time_the_queue_takes_to_drain():
    core = CoreUnderTest(look_ahead=False, max_batch_requests=1, max_queue_requests=4)
    core.runner.run_s = 3.0
    for user in ("ann", "bob", "cid"):
        core.rank(user, 4)
    core.settle()
    core.rank("zed", 4)
    core.steps()
    for user in "abcd":
        core.rank(user, 4)
    assert core.error(core.rank("e", 4)).retry_after_s == 12.0


def test_retry_after_counts_answers_of_one_step_as_many():
    core = CoreUnderTest(look_ahead=False, max_batch_requests=2, max_queue_requests=4)
    core.runner.run_s = 10.0
    for _ in range(40):
        core.rank("ann", 4)
        core.rank("bob", 4)
        core.settle()
    core.rank("zed", 4)
    core.steps()
    for user in "abcd":
        core.rank(user, 4)
    retry_after_s = core.error(core.rank("e", 4)).retry_after_s
    assert 18.0 < retry_after_s < 22.0, "4 requests, 2 of them every 10 seconds"


def test_retry_after_does_not_count_hours_without_a_request():
    core = CoreUnderTest(look_ahead=False, max_batch_requests=1, max_queue_requests=4)
    core.runner.run_s = 3.0
    core.rank("ann", 4)
    core.settle()
    core.clock.advance(36_000.0)
    core.rank("zed", 4)
    core.steps()
    for user in "abcd":
        core.rank(user, 4)
    core.turn()
    core.rank("f", 4)
    assert core.error(core.rank("e", 4)).retry_after_s == 12.0


def test_retry_after_is_at_most_a_minute():
    core = CoreUnderTest(look_ahead=False, max_queue_requests=1)
    core.runner.run_s = 500.0
    core.rank("ann", 4)
    core.settle()
    core.rank("zed", 4)
    core.steps()
    core.rank("bob", 4)
    assert core.error(core.rank("cid", 4)).retry_after_s == 60.0


def test_priority_goes_first_and_ages():
    core = full_queue(max_batch_requests=1, priority_ageing_s=2.0)
    old = core.rank("ann", 4, priority=2)
    core.clock.advance(3.0)
    urgent = core.rank("bob", 4, priority=0)
    core.clock.advance(1.5)
    too_late = core.rank("cid", 4, priority=0)
    core.settle()
    # old counts as arrived 4 seconds later than it did, urgent as 3, too_late as 4.5.
    assert core.outcome_order[1:] == [urgent, old, too_late]
