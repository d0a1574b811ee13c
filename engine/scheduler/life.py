"""A request's life as a table.

An admitted request WAITs until a step plan takes one of its pieces (PLANNED, its transfers may be
running), the step starts (RUNNING), and the piece ends: either more pieces are to come, or a copy
failed and the rows must be recomputed (back to WAITING), or the answer goes out (DONE). A request
that is cancelled or expires while a step holds its pages is ABANDONED: it has been answered, and
its pages are let go when the step lets them go.
"""

from __future__ import annotations

from enum import Enum

from engine.transitions import next_state


class State(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PLANNED = "planned"
    RUNNING = "running"
    ABANDONED = "abandoned"
    DONE = "done"


class Event(Enum):
    """What happens to it."""

    PLAN = "plan"
    LAUNCH = "launch"
    REQUEUE = "requeue"
    ANSWER = "answer"
    ABANDON = "abandon"
    RELEASE = "release"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.PLAN): State.PLANNED,
    (State.WAITING, Event.ANSWER): State.DONE,
    (State.PLANNED, Event.LAUNCH): State.RUNNING,
    (State.PLANNED, Event.REQUEUE): State.WAITING,
    (State.PLANNED, Event.ABANDON): State.ABANDONED,
    (State.RUNNING, Event.REQUEUE): State.WAITING,
    (State.RUNNING, Event.ANSWER): State.DONE,
    (State.RUNNING, Event.ABANDON): State.ABANDONED,
    (State.ABANDONED, Event.RELEASE): State.DONE,
}


def fire(state: State, event: Event) -> State:
    """The state after the event; an absent pair is a bug and names both."""
    return next_state(TRANSITIONS, state, event, "a request")
