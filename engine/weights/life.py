"""The life of a weights version as a table.

A version that was loaded and warmed up stands by: requests may name it, and a share of users may be
led to it (canary). One version is active: requests that name none take it. Making another one
active puts it on standby, so that a roll-back finds its user state still there. A retiring version
takes no new requests; when the last one bound to it has ended and its user state is gone, it is
retired.
"""

from __future__ import annotations

from enum import Enum

from engine.transitions import next_state


class State(Enum):
    """Where a version is."""

    STANDBY = "standby"
    ACTIVE = "active"
    RETIRING = "retiring"
    RETIRED = "retired"


class Event(Enum):
    """What happens to it."""

    ACTIVATE = "activate"
    REPLACE = "replace"
    RETIRE = "retire"
    EMPTY = "empty"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.STANDBY, Event.ACTIVATE): State.ACTIVE,
    (State.ACTIVE, Event.REPLACE): State.STANDBY,
    (State.STANDBY, Event.RETIRE): State.RETIRING,
    (State.RETIRING, Event.EMPTY): State.RETIRED,
}


def fire(state: State, event: Event) -> State:
    """The state after the event; an absent pair is a bug and names both."""
    return next_state(TRANSITIONS, state, event, "a weights version")
