"""What a core says of itself, and the step that takes too long."""

import pytest
from core_harness import CoreUnderTest

from engine.commands import LoadWeights
from engine.config import HealthConfig
from engine.errors import InvariantError


def busy_core():
    """A running step, a planned one, one request that waits and one that moves."""
    core = CoreUnderTest(pages=12, max_batch_requests=2)
    core.warm("mover", 8)
    core.evict_device()
    core.copies.is_automatic = False
    core.prefetch("mover", request_id="moving")
    for user in ("ann", "bob", "cid", "dot", "eve"):
        core.rank(user, 8, request_id=f"of-{user[0]}")
    core.steps()
    core.clock.advance(1.5)
    return core


def test_an_idle_core_says_that_it_is():
    core = CoreUnderTest()
    assert core.core.describe() == (
        "core at 1000.000 s: 0 requests wait, 0 are in steps, 0 commands are open, new requests "
        "are taken\n"
        "running step: none\n"
        "upcoming step: none\n"
        "moves: 0\n"
        "copies in flight: 0\n"
        "pages: 0 of 64 used; chunks: 0 of 64 used; users: 0, 0 leaving; reservations: 0\n"
        "unfinished requests: 0"
    )


def test_a_busy_core_names_steps_pieces_copies_and_requests():
    core = busy_core()
    core.core.run("load", LoadWeights(path="other"))
    core.core.drain()
    lines = core.core.describe().splitlines()
    assert lines[0].endswith(
        "1 requests wait, 5 are in steps, 1 commands are open, new requests are refused "
        "(the engine is shutting down: send the request elsewhere)"
    )
    (running,) = [line for line in lines if line.startswith("running step: ")]
    assert "2 pieces, 22 rows" in running and running.endswith("for 1.500 s")
    (upcoming,) = [line for line in lines if line.startswith("upcoming step: ")]
    assert "2 pieces, 22 rows" in upcoming
    pieces = [line for line in lines if "suffix rows, pages" in line]
    assert [line.split("'")[1] for line in pieces] == ["of-a", "of-b", "of-c", "of-d", "moving"]
    assert "rows [0, 8), 3 suffix rows, pages [" in pieces[0]
    (copy,) = [line for line in lines if line.startswith("  onload job")]
    assert "1.500 s old, 2 pages from page 0 of branch 0, device pages [" in copy
    assert "unfinished requests: 6" in lines
    assert "  rank 'of-e': waiting, admitted 1.500 s ago, 11 tokens, weights 1" in lines


@pytest.mark.parametrize("user", ["bob", "mover"])
def test_users_are_named_only_on_demand(user):
    assert user not in busy_core().core.describe()


def test_users_are_named_on_demand():
    core = CoreUnderTest(health=HealthConfig(dump_users=True))
    core.rank("ann", 8, request_id="q", namespace="shop")
    core.steps()
    assert "rank 'q' of shop/ann" in core.core.describe()


def test_long_lists_are_cut_and_say_so():
    core = CoreUnderTest(max_batch_requests=1)
    for number in range(60):
        core.rank(f"u{number}", 4)
    core.steps()
    lines = core.core.describe().splitlines()
    assert lines[-1] == "  and 10 more"
    assert len([line for line in lines if "admitted" in line]) == 50


def test_a_step_that_takes_too_long_is_a_bug():
    core = busy_core()
    core.clock.advance(118.5)
    core.step()
    core.clock.advance(0.1)
    with pytest.raises(InvariantError, match=r"has run for 120\.1 s, the limit is watchdog_s=120"):
        core.core.step()


def test_a_step_may_take_for_ever_without_a_watchdog():
    core = CoreUnderTest(health=HealthConfig(watchdog_s=0))
    core.rank("ann", 8)
    core.steps()
    core.clock.advance(1e6)
    assert not core.step()
