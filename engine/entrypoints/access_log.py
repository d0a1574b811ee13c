"""The access log: one line per request, as text or as JSON.

What a line repeats of its client's words is the request id (visible ASCII only), a weights version
and, when asked for, user ids (both quoted as JSON). The path appears as the route's pattern. So no
client can write a line of its own, and no user is named unasked.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Literal, Protocol

import msgspec

from engine.entrypoints.protocol import to_json
from engine.entrypoints.routes.routing import Answered

_QUOTED = ("user_ids", "notes")

log = logging.getLogger("engine.access")


class Noted(Protocol):
    """What a line is made of: an exchange over HTTP, or a call over gRPC."""

    request_id: str
    arrival_s: float
    outcome: str
    answers: list[Answered]
    user_ids: list[str]
    notes: dict[str, str | int]

    @property
    def method(self) -> str: ...


class AccessRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. Tokens and microseconds are those of the answers in it: tokens summed, the longest
    times; `requests` is how many there were."""

    time: float
    request_id: str
    method: str
    route: str
    status: int
    ms: float
    outcome: str
    requests: int | None = None
    device_tokens: int | None = None
    host_tokens: int | None = None
    computed_tokens: int | None = None
    queue_us: int | None = None
    onload_wait_us: int | None = None
    run_us: int | None = None
    trace_id: str | None = None
    user_ids: list[str] | None = None
    notes: dict[str, str | int] | None = None


class AccessLog:
    """Writes the lines. Owned by the server's event loop."""

    def __init__(self, form: Literal["text", "json", "off"], *, with_users: bool) -> None:
        self._form = form
        self._with_users = with_users

    def write(self, exchange: Noted, route: str, status: int, trace_id: str | None) -> None:
        """The line of a request that is about to be answered with that status."""
        if self._form == "off":
            return
        record = self._record(exchange, route, status, trace_id)
        if self._form == "json":
            log.info("%s", to_json(record).decode())
        else:
            log.info("%s", _text(record))

    def _record(
        self, exchange: Noted, route: str, status: int, trace_id: str | None
    ) -> AccessRecord:
        usages = [answered.usage for answered in exchange.answers]
        is_named = self._with_users and bool(exchange.user_ids)
        record = AccessRecord(
            time=round(time.time(), 3),
            request_id=exchange.request_id,
            method=exchange.method,
            route=route,
            status=status,
            ms=round((time.monotonic() - exchange.arrival_s) * 1e3, 1),
            outcome=exchange.outcome,
            trace_id=trace_id,
            user_ids=exchange.user_ids if is_named else None,
            notes=exchange.notes or None,
        )
        if not usages:
            return record
        return msgspec.structs.replace(
            record,
            requests=len(usages),
            device_tokens=sum(usage.device_tokens for usage in usages),
            host_tokens=sum(usage.host_tokens for usage in usages),
            computed_tokens=sum(usage.computed_tokens for usage in usages),
            queue_us=max(usage.queue_us for usage in usages),
            onload_wait_us=max(usage.onload_wait_us for usage in usages),
            run_us=max(usage.run_us for usage in usages),
        )


def _text(record: AccessRecord) -> str:
    head = (
        f"{record.request_id} {record.method} {record.route} {record.status} {record.ms}ms "
        f"{record.outcome}"
    )
    rest = msgspec.structs.asdict(record)
    for name in ("time", "request_id", "method", "route", "status", "ms", "outcome"):
        del rest[name]
    pairs = [
        f"{name}={to_json(value).decode() if name in _QUOTED else value}"
        for name, value in rest.items()
        if value is not None
    ]
    return " ".join([head, *pairs])


def configure(form: Literal["text", "json", "off"]) -> None:
    """Send JSON lines, and nothing else, to standard output; text goes where all logs go."""
    if form == "json":
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
        log.setLevel(logging.INFO)
