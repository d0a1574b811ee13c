"""The queue: who may come in, and in which order they are looked at.

Order is priority with ageing: `arrival + priority * ageing`, a constant per request, so a waiting
request climbs past later ones of better priority after that many seconds. Requests of one user
under one weights version keep their order of admission whatever their priority.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from engine.config import SchedulerConfig
from engine.errors import EngineError, Overloaded
from engine.scheduler.request import Line, ScheduledRequest


def _place(entry: ScheduledRequest) -> tuple[bool, float, int]:
    return entry.place


class RequestQueue:
    """Waiting requests, and the lines of unfinished ones. Owned by the core thread."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._waiting: list[ScheduledRequest] = []
        self._lines: dict[Line, deque[ScheduledRequest]] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        """Waiting requests, the one to be served first in front."""
        return iter(self._waiting)

    def refuse_reason(
        self, line: Line, num_tokens: int, retry_after_s: float
    ) -> EngineError | None:
        """Why a request of that size cannot come in now, or None."""
        config = self._config
        if len(self._waiting) >= config.max_queue_requests:
            return Overloaded(
                f"{len(self._waiting)} requests wait, the limit is max_queue_requests="
                f"{config.max_queue_requests}: retry in {retry_after_s:.0f} s or raise the limit",
                limit=config.max_queue_requests,
                value=len(self._waiting),
                retry_after_s=retry_after_s,
            )
        limit = config.max_queue_tokens
        if limit and self._waiting and self._num_tokens + num_tokens > limit:
            return Overloaded(
                f"{self._num_tokens} tokens wait and this request has {num_tokens}, the limit is "
                f"max_queue_tokens={limit}: retry in {retry_after_s:.0f} s or raise the limit",
                limit=limit,
                value=self._num_tokens + num_tokens,
                retry_after_s=retry_after_s,
            )
        num_own = len(self._lines.get(line, ()))
        if num_own >= config.max_queue_requests_per_user:
            return Overloaded(
                f"{num_own} requests of this user are unfinished, the limit is "
                f"max_queue_requests_per_user={config.max_queue_requests_per_user}: "
                f"retry in {retry_after_s:.0f} s",
                limit=config.max_queue_requests_per_user,
                value=num_own,
                retry_after_s=retry_after_s,
            )
        return None

    def admit(self, entry: ScheduledRequest) -> None:
        """Take a new request at the end of its line."""
        self._lines.setdefault(entry.line, deque()).append(entry)
        self.put(entry)

    def put(self, entry: ScheduledRequest) -> None:
        """Let an admitted request wait (again)."""
        insort(self._waiting, entry, key=_place)
        self._num_tokens += entry.num_tokens

    def take(self, entry: ScheduledRequest) -> None:
        """The request no longer waits; it stays in its line until `finish`."""
        index = bisect_left(self._waiting, entry.place, key=_place)
        assert self._waiting[index] is entry
        del self._waiting[index]
        self._num_tokens -= entry.num_tokens

    def finish(self, entry: ScheduledRequest) -> None:
        """The request has ended: the next one in its line may go."""
        line = self._lines[entry.line]
        line.remove(entry)
        if not line:
            del self._lines[entry.line]

    def is_first_in_line(self, entry: ScheduledRequest) -> bool:
        return self._lines[entry.line][0] is entry

    def unfinished_of(self, line: Line) -> list[ScheduledRequest]:
        """All unfinished requests of a line, oldest first."""
        return list(self._lines.get(line, ()))

    @property
    def has_unfinished(self) -> bool:
        return bool(self._lines)

    @property
    def num_unfinished(self) -> int:
        return sum(len(line) for line in self._lines.values())
