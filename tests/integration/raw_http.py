"""HTTP by hand over a socket, for requests that no client library would send."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.integration.server_process import ServerProcess

HEALTH = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"


@contextmanager
def connected(server: ServerProcess) -> Iterator[socket.socket]:
    """A plain connection to the server."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        yield client


def post(path: str, body: Any, *headers: str) -> bytes:
    """A whole POST request; a body that is not bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def answer(client: socket.socket) -> tuple[int, bytes]:
    """The next final answer: its status and its body; nothing behind it is read.

    Raises EOFError if the connection ends before it is complete.
    """
    while True:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += _exactly(client, 1)
        length = re.search(rb"content-length: (\d+)", head)
        body = b"" if length is None else _exactly(client, int(length[1]))
        if status_of(head) >= 200:
            return status_of(head), body


def _exactly(client: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = client.recv(count - len(received))
        if not part:
            raise EOFError(f"the connection ended after {received!r}")
        received += part
    return received


def until_closed(client: socket.socket) -> bytes:
    """Everything that still comes until the server ends the connection."""
    received = b""
    while True:
        try:
            part = client.recv(1 << 16)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


def status_of(received: bytes) -> int:
    """The status of an answer's bytes."""
    return int(received.split(b" ", 2)[1])
