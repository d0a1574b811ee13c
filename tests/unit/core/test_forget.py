"""Forget: the state is found no more at once; the ticket ends when nothing touches the bytes."""

from core_harness import CoreUnderTest

from engine.commands import ForgetUser


def test_idle_user_is_forgotten_at_once_in_both_tiers():
    core = CoreUnderTest()
    core.warm("ann", 18)
    ticket = core.forget("ann")
    assert core.lengths("ann") is None
    core.step()
    assert core.forgotten[ticket].device_tokens == 18
    assert core.forgotten[ticket].host_tokens == 16
    assert core.core.usage().pages_used == 0
    assert core.value("invalidations_total", "forgotten") == 1


def test_unknown_user_is_forgotten_with_nothing():
    core = CoreUnderTest()
    ticket = core.forget("ann")
    core.step()
    assert core.forgotten[ticket].device_tokens == 0


def test_other_users_and_namespaces_stay():
    core = CoreUnderTest()
    for namespace in ("", "b"):
        core.warm("ann", 8, namespace=namespace)
    core.warm("bob", 8)
    core.forget("ann")
    core.settle()
    assert core.lengths("ann", "b") == (8, 8)
    assert core.lengths("bob") == (8, 8)


def test_running_request_finishes_on_its_pages_and_keeps_nothing():
    core = CoreUnderTest()
    core.warm("ann", 16)
    ann = core.rank("ann", 20)
    core.steps()
    ticket = core.forget("ann")
    core.steps()
    assert ticket not in core.forgotten, "the step still reads the pages"
    assert core.core.usage().pages_used == 5
    core.settle()
    assert core.hits(ann) == (16, 0, 4), "it ran on what was there"
    assert core.response(ann).usage.reuse == "append"
    assert core.forgotten[ticket].device_tokens == 16
    assert core.lengths("ann") is None
    assert core.core.usage().pages_used == 0


def test_planned_request_finishes_on_its_pages_and_keeps_nothing():
    core = CoreUnderTest()
    core.warm("ann", 16)
    core.rank("zed", 4)
    core.steps()
    ann = core.rank("ann", 20)
    core.steps()
    ticket = core.forget("ann")
    core.turn()
    assert ticket not in core.forgotten
    core.turn()
    assert core.hits(ann) == (16, 0, 4)
    assert ticket in core.forgotten
    assert core.lengths("ann") is None
    core.assert_everything_comes_back()


def test_waiting_request_runs_uncached_and_leaves_nothing_behind():
    core = CoreUnderTest(max_batch_requests=1, look_ahead=False)
    core.warm("ann", 16)
    core.rank("zed", 4)
    core.steps()
    before = core.rank("ann", 20)
    ticket = core.forget("ann")
    core.steps()
    assert ticket in core.forgotten, "it had not touched the state yet"
    after = core.rank("ann", 21)
    core.settle()
    assert core.hits(before) == (0, 0, 20)
    assert core.response(before).usage.reuse == "bypass"
    assert core.hits(after) == (0, 0, 21), "it came later: it finds nothing and is kept"
    assert core.lengths("ann") == (21, 20)
    assert core.core.usage().num_users == 2


def test_request_between_pieces_starts_over_uncached():
    core = CoreUnderTest(max_batch_tokens=16)
    ann = core.rank("ann", 40)
    core.steps()
    core.turn()
    ticket = core.forget("ann")
    core.settle()
    assert ticket in core.forgotten
    # The second piece ran to its end on its pages; what came after knew nothing of them.
    assert core.pieces == [
        [(0, 16, 0)], [(16, 32, 0)], [(0, 16, 0)], [(16, 32, 0)], [(32, 40, 3)],
    ]  # fmt: skip
    assert core.hits(ann) == (0, 0, 40)
    assert core.response(ann).usage.reuse == "bypass"
    assert core.lengths("ann") is None
    core.assert_everything_comes_back()


def test_request_that_waits_between_pieces_releases_its_rows():
    core = CoreUnderTest(pages=12, max_batch_requests=1, max_piece_tokens=8, look_ahead=False)
    ann = core.rank("ann", 24, priority=1)
    core.rank("bob", 4, priority=2)
    core.steps()
    core.rank("cid", 4)
    core.turn()
    assert core.lengths("ann") == (8, 8)
    ticket = core.forget("ann")
    core.step()
    assert core.forgotten[ticket].device_tokens == 8
    core.settle()
    assert core.hits(ann) == (0, 0, 24)
    assert core.lengths("ann") is None
    core.assert_everything_comes_back()


def test_scores_given_before_the_forget_are_kept():
    core = CoreUnderTest(max_batch_tokens=16)
    core.warm("ann", 16)
    ann = core.rank("ann", 16, candidates=40)
    core.steps()
    core.turn()
    core.forget("ann")
    core.settle()
    assert core.response(ann).scores.shape == (40, 2)
    core.assert_everything_comes_back()


def test_forget_waits_for_the_copies_that_read_the_state():
    core = CoreUnderTest(automatic_copies=False)
    core.rank("ann", 16)
    core.steps()
    core.turn()
    (offload,) = core.copies.offloads
    core.copies.start(offload)
    ticket = core.forget("ann")
    core.steps()
    assert ticket not in core.forgotten and not core.core.is_idle
    core.copies.finish(offload)
    core.steps()
    assert ticket in core.forgotten
    assert core.core.usage().chunks_used == 0


def test_forget_does_not_wait_for_a_copy_that_has_not_started():
    core = CoreUnderTest(automatic_copies=False)
    core.rank("ann", 16)
    core.steps()
    core.turn()
    ticket = core.forget("ann")
    core.steps()
    assert ticket in core.forgotten
    assert core.copies.offloads == []


def test_forget_during_an_onload_waits_for_step_and_copy():
    core = CoreUnderTest(pages=12)
    core.warm("ann", 16)
    core.evict_device()
    core.copies.is_automatic = False
    ann = core.rank("ann", 16)
    core.steps()
    (onload,) = core.copies.onloads
    core.copies.start(onload)
    ticket = core.forget("ann")
    core.turn()
    # The copy was late; the request goes on uncached, the bytes are still being written.
    assert ticket not in core.forgotten
    core.settle()
    assert core.hits(ann) == (0, 0, 16)
    assert ticket not in core.forgotten
    core.copies.finish(onload)
    core.settle()
    assert core.forgotten[ticket].host_tokens == 16
    core.assert_everything_comes_back()


def test_forget_during_a_move_ends_with_it():
    core = CoreUnderTest(pages=12)
    core.warm("ann", 16)
    core.evict_device()
    core.copies.is_automatic = False
    ann = core.prefetch("ann")
    core.steps()
    ticket = core.forget("ann")
    core.steps()
    assert ticket not in core.forgotten
    core.copies.finish(core.copies.onloads[0])
    core.steps()
    assert ticket in core.forgotten
    assert core.hits(ann) == (0, 0, 0)
    assert core.value("prefetch_wasted_bytes_total") == 400
    core.assert_everything_comes_back()


def test_forget_twice_ends_twice():
    core = CoreUnderTest(max_batch_tokens=16)
    core.rank("ann", 40)
    core.steps()
    first = core.forget("ann")
    core.turn()
    core.core.run("again", ForgetUser(namespace="", user_id="ann"))
    core.settle()
    assert {first, "again"} <= set(core.forgotten)
    core.assert_everything_comes_back()


def test_space_of_a_forgotten_user_is_used_at_once():
    core = CoreUnderTest(pages=8, automatic_copies=False)
    core.rank("ann", 16)
    core.steps()
    core.turn()
    core.copies.start(core.copies.offloads[0])
    core.rank("bob", 12)
    core.steps()
    core.turn()
    core.rank("zed", 4)
    core.steps()
    waiting = core.rank("cid", 16)
    core.steps()
    assert core.core.stats().num_waiting == 1
    core.turn()
    assert core.core.stats().num_waiting == 0, "bob's pages were taken: his copy had not started"
    core.settle()
    assert core.hits(waiting) == (0, 0, 16)


def test_forgotten_request_that_is_cancelled_leaves_nothing():
    core = CoreUnderTest(max_batch_tokens=16)
    ann = core.rank("ann", 40)
    core.steps()
    core.forget("ann")
    core.turn()
    core.turn()
    core.cancel(ann)
    core.settle()
    assert core.error(ann).code == "cancelled"
    assert core.core.usage().pages_used == 0
    core.assert_everything_comes_back()
