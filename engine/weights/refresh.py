"""Computing kept histories under new weights, beside the requests that are being served."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.types import Outcome, Request

BACKGROUND_PRIORITY = 1_000_000
"""Levels behind everything that clients ask for."""

_MAX_IN_FLIGHT = 2

_numbers = itertools.count(1)


class RequestSink(Protocol):
    """What a refresh needs of the core."""

    def submit_own(self, request: Request, listener: Callable[[Outcome], None]) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class Refresh:
    """One refresh, until all histories are computed or its time is over. Owned by the core thread.

    Attributes:
        num_computed: Histories whose state is there under the new weights.
    """

    def __init__(
        self,
        requests: list[Request],
        version: str,
        budget_s: float,
        core: RequestSink,
        clock: Callable[[], float],
    ) -> None:
        self._coming = deque(requests)
        self._version = version
        self._core = core
        self._clock = clock
        self._start_s = clock()
        self._stop_s = self._start_s + budget_s
        self._in_flight: set[str] = set()
        self.num_computed = 0

    @property
    def took_s(self) -> float:
        return self._clock() - self._start_s

    @property
    def is_complete(self) -> bool:
        """All histories have been tried."""
        return not self._coming

    def leave_out(self, user: tuple[str, str]) -> None:
        """The user (namespace, user id) was forgotten: nothing of it is submitted any more."""
        self._coming = deque(
            request for request in self._coming if (request.namespace, request.user_id) != user
        )

    def leave_out_all(self) -> None:
        self._coming.clear()

    def advance(self) -> bool:
        """Go on; True when it is over."""
        is_late = self._clock() >= self._stop_s
        if is_late:
            for request_id in list(self._in_flight):
                self._core.cancel(request_id)
        while self._coming and not is_late and len(self._in_flight) < _MAX_IN_FLIGHT:
            self._submit(self._coming.popleft())
        return not self._in_flight and (is_late or not self._coming)

    def _submit(self, request: Request) -> None:
        # The front ends the ids of clients' requests with a number: none is like this one.
        request_id = f"refresh/{next(_numbers)}/of {self._version!r}"
        self._in_flight.add(request_id)
        self._core.submit_own(
            msgspec.structs.replace(
                request,
                request_id=request_id,
                weights_version=self._version,
                priority=BACKGROUND_PRIORITY,
                arrival_s=self._clock(),
            ),
            self._receive,
        )

    def _receive(self, outcome: Outcome) -> None:
        self._in_flight.discard(outcome.request_id)
        self.num_computed += outcome.error is None
