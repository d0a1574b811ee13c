"""How a call that fails tells why: status code, message, and trailing metadata."""

from __future__ import annotations

import grpc

from engine.errors import EngineError, Overloaded

Metadata = tuple[tuple[str, str], ...]

MAX_DETAILS = 2048
"""Longest message of an error, in bytes, each of which may be three on the wire: clients bound what
they take beside messages, usually to 8 KiB, and see no error of ours above that."""

_BY_HTTP_STATUS = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def status_code(error: EngineError) -> grpc.StatusCode:
    """The gRPC status that means the same as the error's HTTP status."""
    other = grpc.StatusCode.INVALID_ARGUMENT if error.status < 500 else grpc.StatusCode.INTERNAL
    return _BY_HTTP_STATUS.get(error.status, other)


def details_of(error: EngineError) -> str:
    """The error's message, cut if it is very long."""
    return error.message.encode(errors="replace")[:MAX_DETAILS].decode(errors="ignore")


def trailing_metadata(error: EngineError) -> Metadata:
    """`code`, and where the error has them `limit`, `value` and `retry-after` (seconds)."""
    found = [("code", error.code)]
    for name, number in (("limit", error.limit), ("value", error.value)):
        if number is not None:
            found.append((name, f"{number:.15g}"))
    if isinstance(error, Overloaded):
        found.append(("retry-after", f"{error.retry_after_s:g}"))
    return tuple(found)
