"""What a connection is at, and until when: its phases and their deadlines.

    IDLE      between requests            header_timeout_s before the first one, then keep_alive_s
    HEADERS   in a request's headers      header_timeout_s
    BODY      in a request's body         body_timeout_s; body_idle_timeout_s since the last data
    ANSWER    a whole request is here     the engine's business
    CLOSING   only last bytes are sent    send_timeout_s per 64 KiB; a moment when all are sent

An answer that cannot be sent, in whatever phase, has the deadline of CLOSING as well. There is one
timer a connection; it is set anew only when a deadline comes nearer, so it mostly just stays.
"""

from __future__ import annotations

import asyncio
import math
from enum import Enum
from typing import Protocol

from engine.entrypoints.config import ConnectionConfig

LINGER_S = 2.0
"""How long what a client still sends is thrown away after the last answer."""

_MIN_SENT_BYTES = 1 << 16  # what a client must take of its answer in `send_timeout_s`


class Phase(Enum):
    """See the module."""

    IDLE = "idle"
    HEADERS = "headers"
    BODY = "body"
    ANSWER = "answer"
    CLOSING = "closing"


class Watched(Protocol):
    """What the watch asks of its connection."""

    @property
    def num_unsent(self) -> int:
        """Bytes written and not yet taken by the kernel."""

    @property
    def is_held_up(self) -> bool:
        """Whether reading is paused, so that the client cannot send."""

    def phase_is_over(self) -> None:
        """The phase's deadline has passed."""

    def answer_is_stuck(self) -> None:
        """The client does not take its answer, or lingers after it."""


class Watch:
    """One connection's phase and timer. Owned by the server's event loop."""

    def __init__(
        self, watched: Watched, limits: ConnectionConfig, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.phase = Phase.IDLE
        self._watched = watched
        self._limits = limits
        self._loop = loop
        self._is_fresh = True
        self._phase_since_s = self._data_seen_s = loop.time()
        # The answer that is being sent: since when, and how much was left then.
        self._unsent_since_s: float | None = None
        self._unsent_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, phase: Phase) -> None:
        """A phase begins now."""
        self.phase = phase
        self._phase_since_s = self._data_seen_s = self._loop.time()
        if phase is not Phase.IDLE:
            self._is_fresh = False
        self._arm()

    def saw_data(self) -> None:
        """The client has sent something."""
        self._data_seen_s = self._loop.time()

    def begin_sending(self) -> None:
        """From now on the client has to take what is unsent."""
        self._unsent_since_s = self._loop.time()
        self._unsent_bytes = self._watched.num_unsent
        self._arm()

    def end_sending(self) -> None:
        """The client has taken its answer."""
        self._unsent_since_s = None

    def stop(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()

    def _phase_deadline_s(self) -> float:
        limits, since_s = self._limits, self._phase_since_s
        if self.phase is Phase.IDLE:
            return since_s + (limits.header_timeout_s if self._is_fresh else limits.keep_alive_s)
        if self.phase is Phase.HEADERS:
            return since_s + limits.header_timeout_s
        if self.phase is Phase.BODY:
            return min(
                since_s + limits.body_timeout_s, self._data_seen_s + limits.body_idle_timeout_s
            )
        return math.inf

    def _send_deadline_s(self) -> float:
        if self._unsent_since_s is None:
            return math.inf
        is_lingering = self.phase is Phase.CLOSING and not self._unsent_bytes
        return self._unsent_since_s + (LINGER_S if is_lingering else self._limits.send_timeout_s)

    def _arm(self) -> None:
        deadline_s = min(self._phase_deadline_s(), self._send_deadline_s())
        if self._timer is not None:
            if self._timer.when() <= deadline_s:
                return  # it looks again when it is too early
            self._timer.cancel()
            self._timer = None
        if deadline_s < math.inf:
            self._timer = self._loop.call_at(deadline_s, self._check)

    def _check(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        if self._watched.is_held_up:
            self._phase_since_s = self._data_seen_s = now_s
        if now_s >= self._send_deadline_s() and not self._takes_enough():
            self._watched.answer_is_stuck()
        elif now_s >= self._phase_deadline_s():
            self._watched.phase_is_over()
        else:
            self._arm()

    def _takes_enough(self) -> bool:
        """Whether the client reads its answer; then it is given as much time again."""
        before = self._unsent_bytes
        self.begin_sending()
        return 0 < self._unsent_bytes <= before - _MIN_SENT_BYTES
