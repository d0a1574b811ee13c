"""The body of a request that asks for another protocol (`Upgrade`), as some clients do with each.

The parser stops at such a request's headers and takes what follows for the other protocol. No other
is spoken here, so what follows is the body: a parser of its own reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")


class BodyTaker(Protocol):
    """A connection, as far as a request's body goes."""

    def on_body(self, body: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


class _BodyCalls:
    """The calls of the parser that reads only a body."""

    def __init__(self, taker: BodyTaker) -> None:
        self.on_body = taker.on_body
        self.on_message_complete = taker.on_message_complete


def has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a body follows these headers (names in lower case)."""
    return any(name in _FRAMING for name, _ in headers)


def body_parser(
    taker: BodyTaker, headers: Iterable[tuple[bytes, bytes]]
) -> httptools.HttpRequestParser:
    """A parser that takes the body behind these headers, and nothing behind the body."""
    parser = httptools.HttpRequestParser(_BodyCalls(taker))
    framing = b"".join(b"%b: %b\r\n" % pair for pair in headers if pair[0] in _FRAMING)
    parser.feed_data(b"POST / HTTP/1.1\r\nconnection: close\r\n" + framing + b"\r\n")
    return parser
