"""Order, limits and user lines of the queue."""

import pytest

from engine.config import SchedulerConfig
from engine.errors import Overloaded
from engine.scheduler.queue import RequestQueue
from engine.scheduler.request import Line


@pytest.fixture
def queue():
    return RequestQueue(
        SchedulerConfig(max_queue_requests=3, max_queue_tokens=50, max_queue_requests_per_user=2)
    )


def test_order_is_arrival_when_priorities_are_equal(queue, make_entry):
    later, earlier = make_entry("a", arrival_s=2.0), make_entry("b", arrival_s=1.0)
    queue.admit(later)
    queue.admit(earlier)
    assert list(queue) == [earlier, later]


def test_priority_goes_first_until_the_other_has_aged(queue, make_entry):
    old = make_entry("a", arrival_s=0.0, priority=3)
    urgent_soon = make_entry("b", arrival_s=2.9, priority=0)
    urgent_late = make_entry("c", arrival_s=3.1, priority=0)
    for entry in (urgent_late, old, urgent_soon):
        queue.admit(entry)
    assert list(queue) == [urgent_soon, old, urgent_late]


def test_retry_stands_at_the_head(queue, make_entry):
    first, second = make_entry("a", arrival_s=0.0), make_entry("b", arrival_s=1.0)
    queue.admit(first)
    queue.admit(second)
    queue.take(second)
    second.is_retry = True
    queue.put(second)
    assert list(queue) == [second, first]


def test_user_line_keeps_admission_order_whatever_the_priority(queue, make_entry):
    first = make_entry("a", arrival_s=0.0, priority=5)
    second = make_entry("a", arrival_s=0.0, priority=0)
    queue.admit(first)
    queue.admit(second)
    assert list(queue) == [second, first]
    assert queue.is_first_in_line(first) and not queue.is_first_in_line(second)
    queue.take(first)
    assert not queue.is_first_in_line(second), "a running request keeps its place in the line"
    queue.finish(first)
    assert queue.is_first_in_line(second)


def test_full_queue_refuses_and_names_the_limit(queue, make_entry):
    for user in "abc":
        queue.admit(make_entry(user, length=1, candidates=1))
    refusal = queue.refuse_reason(Line("", "d", "1"), 1, retry_after_s=4.0)
    assert isinstance(refusal, Overloaded)
    assert "max_queue_requests=3" in refusal.message
    assert (refusal.limit, refusal.value, refusal.retry_after_s) == (3, 3, 4.0)


def test_too_many_tokens_are_refused_but_one_request_always_fits(queue, make_entry):
    assert queue.refuse_reason(Line("", "a", "1"), 1000, 1.0) is None
    queue.admit(make_entry("a", length=40, candidates=4))
    assert queue.refuse_reason(Line("", "b", "1"), 6, 1.0) is None
    refusal = queue.refuse_reason(Line("", "b", "1"), 7, 1.0)
    assert isinstance(refusal, Overloaded) and "max_queue_tokens=50" in refusal.message


def test_tokens_leave_with_their_request(queue, make_entry):
    entry = make_entry("a", length=40, candidates=4)
    queue.admit(entry)
    queue.take(entry)
    queue.admit(make_entry("b", length=1, candidates=1))
    assert queue.refuse_reason(Line("", "c", "1"), 48, 1.0) is None


def test_one_user_cannot_fill_the_queue(queue, make_entry):
    queue.admit(make_entry("a", length=1, candidates=1))
    entry = make_entry("a", length=1, candidates=1)
    queue.admit(entry)
    queue.take(entry)
    refusal = queue.refuse_reason(Line("", "a", "1"), 1, 1.0)
    assert isinstance(refusal, Overloaded) and "max_queue_requests_per_user=2" in refusal.message
    assert queue.refuse_reason(Line("other", "a", "1"), 1, 1.0) is None
    assert queue.refuse_reason(Line("", "a", "2"), 1, 1.0) is None


def test_lines_of_two_weights_versions_are_apart(queue, make_entry):
    first, second = make_entry("a"), make_entry("a", version="2")
    queue.admit(first)
    queue.admit(second)
    assert queue.is_first_in_line(first) and queue.is_first_in_line(second)
    assert queue.unfinished_of(Line("", "a", "2")) == [second]
