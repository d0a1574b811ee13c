"""Deadlines at admission, in the queue and at launch. A step takes 10 ms."""

from core_harness import CoreUnderTest


def drops(core):
    return [core.value("deadline_drops_total", stage) for stage in ("admission", "queue", "launch")]


def test_deadline_that_has_passed_is_refused():
    core = CoreUnderTest()
    late = core.rank("ann", 8, deadline_ms=5, request_id="late")
    core.settle()
    request = core.requests[late]
    core.core.submit(request)
    (outcome,) = core.core.take_outbox()
    assert outcome.error.code == "deadline_exceeded"
    assert drops(core) == [1, 0, 0]


def test_deadline_that_even_a_full_hit_misses_is_refused():
    core = CoreUnderTest()
    core.rank("ann", 4, candidates=40)
    core.settle()
    core.rank("zed", 4)
    # 10 ms for 44 rows were measured: 40 candidates take about 9 ms.
    late = core.rank("bob", 4, candidates=40, deadline_ms=8)
    assert core.error(late).code == "deadline_exceeded"
    assert "give it more time" in core.error(late).message
    assert drops(core) == [1, 0, 0]
    small = core.rank("bob", 4, candidates=1, deadline_ms=30)
    core.settle()
    assert core.hits(small) == (0, 0, 4)


def test_small_steps_do_not_get_large_requests_refused():
    core = CoreUnderTest()
    core.rank("ann", 4, candidates=1)
    core.settle()
    core.rank("zed", 4)
    # 10 ms for 5 rows were measured, which says nothing about 40.
    large = core.rank("bob", 4, candidates=40, deadline_ms=30)
    core.settle()
    assert core.hits(large) == (0, 0, 4)


def test_idle_engine_tries_whatever_was_measured():
    core = CoreUnderTest()
    core.rank("ann", 4, candidates=40)
    core.settle()
    tight = core.rank("bob", 4, candidates=40, deadline_ms=8)
    core.settle()
    assert core.hits(tight) == (0, 0, 4), "it starts in time, and what has started is answered"


def test_request_expires_in_the_queue():
    core = CoreUnderTest(look_ahead=False)
    core.rank("zed", 4)
    core.steps()
    late = core.rank("ann", 8, deadline_ms=5)
    core.clock.advance(0.005)
    core.steps()
    assert core.error(late).code == "deadline_exceeded"
    assert drops(core) == [0, 1, 0]
    core.settle()
    assert core.lengths("ann") is None


def test_request_expires_between_its_pieces():
    core = CoreUnderTest(max_batch_tokens=16)
    late = core.rank("ann", 40, deadline_ms=15)
    core.settle()
    assert core.pieces == [[(0, 16, 0)], [(16, 32, 0)]], "20 ms have passed after two steps"
    assert core.error(late).code == "deadline_exceeded"
    assert drops(core) == [0, 1, 0]
    assert core.lengths("ann") == (32, 32)


def test_planned_request_expires_before_it_starts():
    core = CoreUnderTest()
    core.rank("zed", 4)
    core.steps()
    late = core.rank("ann", 8, deadline_ms=5)
    bob = core.rank("bob", 8, deadline_ms=50)
    core.steps()
    core.turn()
    assert core.error(late).code == "deadline_exceeded"
    assert drops(core) == [0, 0, 1]
    core.settle()
    assert core.pieces == [[(0, 4, 3)], [(0, 8, 3)]]
    assert core.hits(bob) == (0, 0, 8)
    core.assert_everything_comes_back()


def test_step_whose_requests_have_all_expired_does_not_run():
    core = CoreUnderTest()
    core.rank("zed", 4)
    core.steps()
    core.rank("ann", 8, deadline_ms=5)
    core.steps()
    core.rank("bob", 8, request_id="bob")
    core.run_device()
    core.settle()
    assert core.core.stats().num_steps == 2
    assert core.hits("bob") == (0, 0, 8)


def test_running_request_is_answered_although_its_deadline_passes():
    core = CoreUnderTest()
    ann = core.rank("ann", 8, deadline_ms=5)
    core.settle()
    assert core.hits(ann) == (0, 0, 8)
    assert drops(core) == [0, 0, 0]


def test_dropped_pieces_are_not_counted_as_rows_of_the_step():
    core = CoreUnderTest()
    core.rank("zed", 4)
    core.steps()
    core.rank("ann", 8, deadline_ms=5)
    core.rank("bob", 8)
    core.steps()
    core.settle()
    # 7 rows of zed, 11 of bob; ann's 11 never ran.
    assert core.value("step_tokens") == 18
    assert core.value("step_requests") == 2
