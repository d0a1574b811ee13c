"""The end of a core: every request has exactly one outcome, whatever happens."""

import pytest
from core_harness import CoreUnderTest

from engine.commands import ForgetUser
from engine.engine import Engine
from engine.errors import Draining, EngineDead, InvariantError


def crowded_core(**options):
    """Requests that run, are planned, wait, move, and one that is abandoned; and a forget."""
    core = CoreUnderTest(pages=12, max_batch_requests=2, **options)
    core.warm("moved", 8)
    core.evict_device()
    core.copies.is_automatic = False
    core.outcome_order.clear()
    core.prefetch("moved", request_id="moving")
    for user in ("ann", "bob", "cid", "dot", "eve"):
        core.rank(user, 8, request_id=user)
    core.steps()
    core.cancel("bob")
    core.core.run("forget-ann", ForgetUser(namespace="", user_id="ann"))
    core.steps()
    assert core.core.stats().num_waiting == 1
    return core


ALL = {"moving", "ann", "bob", "cid", "dot", "eve"}


def test_drain_refuses_new_requests_and_finishes_the_others():
    core = crowded_core()
    core.core.drain()
    refused = core.rank("new", 8)
    assert core.error(refused).code == "draining"
    core.copies.is_automatic = True
    assert not core.core.is_idle
    core.settle()
    assert core.core.is_idle
    codes = {name: core.outcomes[name].error and core.outcomes[name].error.code for name in ALL}
    assert codes == {**dict.fromkeys(ALL), "bob": "cancelled"}
    assert core.core.stats().is_draining
    assert core.forgotten["forget-ann"].device_tokens == 0
    core.assert_everything_comes_back()


def test_abort_answers_everything_at_once():
    core = crowded_core()
    core.core.abort(EngineDead("the machine is on fire"))
    core.collect()
    assert set(core.outcome_order) == ALL
    codes = {name: core.error(name).code for name in ALL}
    assert codes == {**dict.fromkeys(ALL, "engine_dead"), "bob": "cancelled"}
    assert core.replies["forget-ann"].error.code == "engine_dead"
    assert core.error(core.rank("new", 8)).code == "engine_dead"


def test_steps_in_flight_at_an_abort_say_nothing_more_and_leak_nothing():
    core = crowded_core()
    core.core.abort(Draining("shutting down"))
    core.collect()
    count = len(core.outcomes)
    core.assert_everything_comes_back()
    assert len(core.outcomes) == count


def test_close_answers_everything_and_may_come_twice():
    core = crowded_core()
    core.core.close()
    core.core.close()
    core.collect()
    assert set(core.outcome_order) == ALL
    assert core.error("eve").code == "engine_dead"


def test_drain_then_abort_gives_one_outcome_each():
    core = crowded_core()
    core.core.drain()
    core.turn()
    core.core.abort(Draining("the time is up"))
    core.core.close()
    core.collect()
    assert set(core.outcome_order) == ALL


def test_refused_requests_hold_on_to_nothing():
    core = CoreUnderTest()
    core.core.drain()
    refusal = core.core._refusal
    for _ in range(3):
        core.rank("ann", 8)
    assert refusal.__traceback__ is None


def test_device_failure_raises_and_abort_answers_all():
    core = crowded_core()
    core.runner.error = RuntimeError("device lost")
    core.run_device()
    with pytest.raises(RuntimeError, match="device lost"):
        core.core.step()
    core.core.abort(EngineDead("device lost"))
    core.collect()
    assert set(core.outcome_order) == ALL
    assert core.error("ann").code == "engine_dead"
    core.cancel("ann", "cid")
    assert len(core.outcome_order) == len(ALL)


def test_bug_while_committing_gives_no_second_outcome():
    core = CoreUnderTest()
    core.rank("ann", 8, request_id="ann")
    core.rank("bob", 8, request_id="bob")
    core.steps()
    core.run_device()

    def break_down(job):
        raise InvariantError("a bug")

    core.copies.submit = break_down
    with pytest.raises(InvariantError):
        core.core.step()
    core.core.abort(EngineDead("a bug"))
    core.collect()
    assert core.hits("ann") == core.hits("bob") == (0, 0, 8), "their answers had gone out"


# The synchronous engine over such a core.


def engine_over(core):
    """An engine whose waiting runs the fake device."""
    engine = Engine(core.core)

    def wait(timeout_s):
        if core.executor.waiting:
            core.run_device()

    core.core.wait = wait
    return engine


def test_engine_fails_all_requests_when_the_device_dies_and_does_not_hang_after():
    core = CoreUnderTest()
    engine = engine_over(core)
    core.runner.error = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        engine.rank(user_id="ann", history=[1, 11], candidates=[1])
    with pytest.raises(EngineDead, match="device lost"):
        engine.rank(user_id="ann", history=[1, 11], candidates=[1])
    assert core.core.is_idle is False, "what was running is never known to have ended"


def test_engine_raises_the_error_that_ended_the_request():
    core = CoreUnderTest()
    engine = engine_over(core)
    core.core.drain()
    with pytest.raises(Draining):
        engine.rank(user_id="ann", history=[1], candidates=[1])


def test_engine_serves_one_request_and_forgets():
    core = CoreUnderTest()
    engine = engine_over(core)
    assert engine.rank(user_id=7, history=[1, 11, 21], candidates=[1, 11]).scores.shape == (2, 2)
    assert engine.rank(user_id="7", history=[1, 11, 21], candidates=[1]).usage.device_tokens == 3
    assert engine.forget(7).device_tokens == 3
    assert core.lengths("7") is None


def test_engine_drains_transfers_without_requests():
    core = CoreUnderTest(automatic_copies=False)
    engine = engine_over(core)
    engine.prefetch(user_id="ann", history=[10 * number + 1 for number in range(16)])
    waits = []

    def wait(timeout_s):
        waits.append(timeout_s)
        core.copies.finish(core.copies.offloads[0])

    core.core.wait = wait
    engine.drain_transfers()
    assert core.lengths("ann") == (16, 16)
    assert len(waits) == 1, "it sleeps only when there is nothing to do"
