"""The order of the loop: what happens before what, with and without look-ahead."""

from core_harness import CoreUnderTest


def two_users_on_the_host(**options):
    """Two users of whom only the host knows, on a core whose copies move by hand."""
    core = CoreUnderTest(pages=12, **options)
    core.warm("ann", 16)
    core.warm("bob", 16)
    core.evict_device()
    assert (core.lengths("ann"), core.lengths("bob")) == ((0, 16), (0, 16))
    core.copies.is_automatic = False
    core.observed.clear()
    core.runner.steps.clear()
    return core


def test_look_ahead_plans_and_onloads_the_next_step_before_the_running_one_commits():
    core = two_users_on_the_host()
    core.rank("ann", 16)
    core.steps()
    core.rank("bob", 16)
    core.steps()
    for job in core.copies.onloads:
        core.copies.finish(job)
    core.turn()
    core.turn()
    assert core.trace == [
        "plan 1", "onload 1", "launch 1",
        "plan 2", "onload 2",
        "launch 2", "run_end 1", "commit 1",
        "run_end 2", "commit 2",
    ]  # fmt: skip


def test_without_look_ahead_the_next_step_is_planned_after_the_commit():
    core = two_users_on_the_host(look_ahead=False)
    core.rank("ann", 16)
    core.steps()
    core.rank("bob", 16)
    core.steps()
    for job in core.copies.onloads:
        core.copies.finish(job)
    core.turn()
    for job in core.copies.onloads:
        core.copies.finish(job)
    core.turn()
    assert core.trace == [
        "plan 1", "onload 1", "launch 1",
        "run_end 1", "commit 1",
        "plan 2", "onload 2", "launch 2",
        "run_end 2", "commit 2",
    ]  # fmt: skip


def test_backlog_is_looked_ahead_into_without_any_new_arrival():
    core = CoreUnderTest(max_batch_requests=1)
    for user in ("ann", "bob", "cid"):
        core.rank(user, 8)
    core.steps()
    assert core.trace == ["plan 1", "launch 1", "plan 2"]
    core.turn()
    assert core.trace[3:] == ["launch 2", "run_end 1", "commit 1", "plan 3"]
    core.turn()
    assert core.trace[7:] == ["launch 3", "run_end 2", "commit 2"]


def test_upcoming_step_grows_while_the_device_is_busy():
    core = CoreUnderTest()
    core.rank("ann", 8)
    core.steps()
    core.rank("bob", 8)
    core.steps()
    core.rank("cid", 8)
    core.steps()
    core.turn()
    core.turn()
    assert core.pieces == [[(0, 8, 3)], [(0, 8, 3), (0, 8, 3)]]
    assert core.trace == [
        "plan 1", "launch 1", "plan 2", "plan 2",
        "launch 2", "run_end 1", "commit 1", "run_end 2", "commit 2",
    ]  # fmt: skip


def test_third_step_is_not_planned_ahead():
    core = CoreUnderTest(max_batch_requests=1)
    for user in ("ann", "bob", "cid"):
        core.rank(user, 8)
        core.steps()
    assert core.trace == ["plan 1", "launch 1", "plan 2"]
    assert core.core.stats().num_waiting == 1
    assert core.core.stats().num_running == 2


def test_copy_that_ended_behind_a_step_is_not_waited_for():
    core = two_users_on_the_host()
    core.rank("ann", 16)
    core.steps()
    core.rank("bob", 16)
    core.steps()
    ann_job, bob_job = core.copies.onloads
    core.copies.finish(ann_job)
    core.copies.finish(bob_job)
    core.turn()
    assert bob_job.succeeded is True, "known to have ended before its step starts"
    core.turn()
    assert core.hits("q4") == (0, 16, 0)
    assert core.hits("q5") == (0, 16, 0)
    # Steps take 10 ms; bob's copy was submitted and had ended before his step was launched.
    assert core.value("onload_seconds_total") == core.value("onload_hidden_seconds_total")


def test_answers_leave_before_the_offload_of_their_rows_has_moved():
    core = CoreUnderTest(automatic_copies=False)
    request_id = core.rank("ann", 16)
    core.steps()
    core.turn()
    assert core.hits(request_id) == (0, 0, 16)
    (job,) = core.copies.offloads
    assert (job.first_page, job.num_pages) == (0, 4)
    assert core.lengths("ann") == (16, 0)
    core.copies.advance(job, 3)
    core.steps()
    assert core.lengths("ann") == (16, 12)
    core.copies.finish(job)
    core.steps()
    assert core.lengths("ann") == (16, 16)


def test_core_without_work_has_nothing_to_do():
    core = CoreUnderTest()
    assert core.step() is False
    assert core.core.is_idle and core.core.is_quiet


def test_busy_device_leaves_the_core_with_nothing_to_do():
    core = CoreUnderTest()
    core.rank("ann", 8)
    core.steps()
    assert core.step() is False
    assert not core.core.is_idle


def test_requests_of_one_a_step_are_answered_in_queue_order():
    core = CoreUnderTest(max_batch_requests=1)
    ids = [core.rank(user, 8) for user in ("ann", "bob")]
    core.settle()
    assert core.outcome_order == ids
