"""Requests out of interaction logs, and the account of what their answers cost.

Nothing here loads torch: the same trace is replayed through an embedded engine and over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.entrypoints.logs import TraceRequest, UserEvents, by_user, read_log, trace_requests
from engine.request_builder import build_request
from engine.types import CacheMode, Request, Task

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with (requests answered, requests in all)."""

TOP_K = 10


class TokenUsage(Protocol):
    """The history tokens of one answer, by where they came from."""

    @property
    def history_length(self) -> int: ...
    @property
    def device_tokens(self) -> int: ...
    @property
    def host_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int: ...


class TokensByTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where history tokens came from.

    `history`, the denominator, is the sum of the history lengths of the requests; it equals
    `device + host + computed`.
    """

    history: int = 0
    device: int = 0
    host: int = 0
    computed: int = 0

    def plus(self, usage: TokenUsage) -> TokensByTier:
        """The account with one more request."""
        return TokensByTier(
            history=self.history + usage.history_length,
            device=self.device + usage.device_tokens,
            host=self.host + usage.host_tokens,
            computed=self.computed + usage.computed_tokens,
        )


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Milliseconds from submission to answer, over answered requests; all 0 without any."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float

    @classmethod
    def of(cls, latencies_s: Sequence[float]) -> Self:
        """Of the seconds that each answer took."""
        milliseconds = 1e3 * np.asarray(latencies_s or [0.0])
        p50, p90, p99, p999 = np.percentile(milliseconds, [50, 90, 99, 99.9]).tolist()
        largest = float(milliseconds.max())
        return cls(p50_ms=p50, p90_ms=p90, p99_ms=p99, p999_ms=p999, max_ms=largest)


def retrieve_request(
    events: UserEvents,
    length: int,
    *,
    query_time: int,
    exclude_history: bool,
    cache: CacheMode = CacheMode.USE,
    return_user_embedding: bool = False,
) -> Request:
    """Ask for the best items after a user's first `length` events.

    Item, time and whole-numbered actions are sent; what the model does not read is ignored.
    """
    history = {"item": events.items[:length], "time": events.times[:length]}
    if events.actions is not None:
        actions = events.actions[:length]
        if np.equal(actions, np.floor(actions)).all():
            history["action"] = actions.astype(np.int64)
    return build_request(
        task=Task.RETRIEVE,
        user_id=events.user_id,
        history=history,
        query_time=query_time,
        top_k=TOP_K,
        exclude_history=exclude_history,
        cache=cache,
        return_user_embedding=return_user_embedding,
        ignore_extra=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """A log as requests, in the order in which they are sent.

    `picked[i]` says whether the answer to request i is verified: recomputed and compared.
    """

    users: list[UserEvents]
    requests: list[TraceRequest]
    picked: NDArray[np.bool_]

    @classmethod
    def read(
        cls, log_path: str, *, window_s: int, max_requests: int, verify: float, seed: int
    ) -> Self:
        """The first `max_requests` requests of a log (0: all); see `logs.trace_requests`.

        `verify` is the share of answers that is picked. Raises InvalidRequest when the log cannot
        be read.
        """
        log = read_log(log_path)
        requests = trace_requests(log, window_s)[: max_requests or None]
        picked = np.random.default_rng(seed).random(len(requests)) < verify
        return cls(users=by_user(log), requests=requests, picked=picked)

    def request(self, index: int, *, cache: CacheMode = CacheMode.USE) -> Request:
        """Request `index`, asked at the time of its last event."""
        user, length, _ = self.requests[index]
        events = self.users[user]
        return retrieve_request(
            events,
            length,
            query_time=int(events.times[length - 1]),
            exclude_history=False,
            cache=cache,
            return_user_embedding=bool(self.picked[index]),
        )
