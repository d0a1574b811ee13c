"""The life of a weights version is a table; what is absent from it is a bug."""

import itertools

import pytest

from engine.errors import InvariantError
from engine.weights.life import TRANSITIONS, Event, State, fire


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_fire_follows_the_table_and_refuses_what_is_not_in_it(state, event):
    if (state, event) in TRANSITIONS:
        assert fire(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(InvariantError, match=f"{state.value}, cannot {event.value}"):
            fire(state, event)


def test_a_version_can_go_back_and_forth_and_ends_retired():
    state = State.STANDBY
    for event in (Event.ACTIVATE, Event.REPLACE, Event.ACTIVATE, Event.REPLACE):
        state = fire(state, event)
    assert fire(fire(state, Event.RETIRE), Event.EMPTY) is State.RETIRED
    assert not any(before is State.RETIRED for before, _ in TRANSITIONS)
