"""One step of a state machine that is a table: (state, event) -> state.

The tables are in `scheduler/life.py`, `block_manager/user_state.py` and `weights/life.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from engine.errors import InvariantError

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


def next_state(
    transitions: Mapping[tuple[StateT, EventT], StateT], state: StateT, event: EventT, who: object
) -> StateT:
    """The state after the event. A pair that is not in the table is a bug: InvariantError names
    both, and whose state it is (`str(who)`, made only then)."""
    after = transitions.get((state, event))
    if after is None:
        raise InvariantError(f"{who}, {state.value}, cannot {event.value}")
    return after
