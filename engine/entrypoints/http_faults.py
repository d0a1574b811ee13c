"""The errors with which a connection ends, each naming its limit and what to change."""

from __future__ import annotations

from engine.entrypoints.config import ConnectionConfig
from engine.errors import (
    Draining,
    HeadersTooLarge,
    InvalidRequest,
    RequestTimeout,
    TooManyConnections,
)

MAX_PIPELINED = 32
"""Requests of one connection that may wait for the answer to an earlier one."""


def headers_too_large(num_bytes: int, limits: ConnectionConfig) -> HeadersTooLarge:
    return HeadersTooLarge(
        f"the request line and headers have {num_bytes} bytes or more, the limit is "
        f"max_header_bytes={limits.max_header_bytes}: send less",
        limit=limits.max_header_bytes,
        value=num_bytes,
    )


def too_many_headers(count: int, limits: ConnectionConfig) -> HeadersTooLarge:
    return HeadersTooLarge(
        f"{count} headers or more, the limit is max_header_count={limits.max_header_count}: "
        "send fewer",
        limit=limits.max_header_count,
        value=count,
    )


def too_many_pipelined() -> InvalidRequest:
    return InvalidRequest(
        f"{MAX_PIPELINED} requests of this connection wait for their answers: read them before "
        "sending more",
        limit=MAX_PIPELINED,
    )


def too_much_framing(num_bytes: int, limits: ConnectionConfig) -> InvalidRequest:
    return InvalidRequest(
        f"{num_bytes} bytes of chunk extensions or trailers, the limit is "
        f"max_header_bytes={limits.max_header_bytes}: leave them out",
        limit=limits.max_header_bytes,
        value=num_bytes,
    )


def too_many_connections(limits: ConnectionConfig) -> TooManyConnections:
    limit = limits.max_connections
    return TooManyConnections(
        f"{limit} connections are open, the limit is max_connections={limit}: close some or raise "
        "the limit",
        limit=limit,
        value=limit + 1,
    )


def headers_too_slow(limits: ConnectionConfig) -> RequestTimeout:
    return RequestTimeout(
        f"the headers were not complete after header_timeout_s={limits.header_timeout_s:g}: "
        "send them at once",
        limit=limits.header_timeout_s,
    )


def body_too_slow(limits: ConnectionConfig) -> RequestTimeout:
    return RequestTimeout(
        f"the body paused for body_idle_timeout_s={limits.body_idle_timeout_s:g} or was not "
        f"complete after body_timeout_s={limits.body_timeout_s:g}: send it faster",
        limit=limits.body_timeout_s,
    )


def ending_before_body() -> Draining:
    return Draining("the server ends and waits for no body: send the request elsewhere")
