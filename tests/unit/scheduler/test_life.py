"""The request life cycle is a table; what is absent from it is a bug."""

import itertools

import pytest

from engine.errors import InvariantError
from engine.scheduler.life import TRANSITIONS, Event, State, fire

EXPECTED = {
    ("waiting", "plan"): "planned",
    ("waiting", "answer"): "done",
    ("planned", "launch"): "running",
    ("planned", "requeue"): "waiting",
    ("planned", "abandon"): "abandoned",
    ("running", "requeue"): "waiting",
    ("running", "answer"): "done",
    ("running", "abandon"): "abandoned",
    ("abandoned", "release"): "done",
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_fire_follows_the_table_or_names_the_pair(state, event):
    expected = EXPECTED.get((state.value, event.value))
    if expected is None:
        with pytest.raises(InvariantError, match=f"{state.value}.*{event.value}"):
            fire(state, event)
    else:
        assert fire(state, event).value == expected


def test_every_state_but_done_can_end():
    reachable_end = {State.DONE}
    changed = True
    while changed:
        sources = {source for (source, _), target in TRANSITIONS.items() if target in reachable_end}
        changed = not sources <= reachable_end
        reachable_end |= sources
    assert reachable_end == set(State)
