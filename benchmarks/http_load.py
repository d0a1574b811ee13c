"""A light load generator: prebuilt requests over keep-alive connections, one thread, raw sockets.

It parses one answer of each connection; every later one must have the same length and status line,
which a stub core and a fixed request id make sure of.
"""

from __future__ import annotations

import select
import socket
import time
from typing import NamedTuple

_READ_BYTES = 1 << 18


class Load(NamedTuple):
    """What a load did: answers per second, and latencies in seconds, sorted."""

    per_second: float
    latencies_s: list[float]


class _Client:
    """One connection with at most one request under way."""

    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request
        self._received = 0
        self._sent_s = 0.0
        self.answer = self._first_answer()

    def _first_answer(self) -> bytes:
        self.socket.sendall(self._request)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._more()
        head, _, _ = answer.partition(b"\r\n\r\n")
        lengths = [
            int(line.partition(b":")[2])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        ]
        total = len(head) + 4 + lengths[0]
        while len(answer) < total:
            answer += self._more()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {answer[:300]!r}")
        return answer

    def _more(self) -> bytes:
        part = self.socket.recv(_READ_BYTES)
        if not part:
            raise RuntimeError("the server closed the connection")
        return part

    def send(self) -> None:
        self._received = 0
        self._sent_s = time.perf_counter()
        self.socket.sendall(self._request)

    def receive(self) -> float | None:
        """Seconds since it was sent once the answer is whole, else None."""
        part = self._more()
        if self._received == 0 and not part.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {part[:300]!r}")
        self._received += len(part)
        if self._received < len(self.answer):
            return None
        if self._received > len(self.answer):
            raise RuntimeError("an answer is longer than the first one was")
        return time.perf_counter() - self._sent_s


def run_load(port: int, request: bytes, num_connections: int, seconds: float) -> Load:
    """Keep one request under way on each connection for that long (closed loop)."""
    clients = {}
    poller = select.epoll()
    for _ in range(num_connections):
        client = _Client(port, request)
        clients[client.socket.fileno()] = client
        poller.register(client.socket.fileno(), select.EPOLLIN)
    latencies_s = []
    began_s = time.perf_counter()
    for client in clients.values():
        client.send()
    while time.perf_counter() - began_s < seconds:
        for descriptor, _ in poller.poll(1.0):
            client = clients[descriptor]
            latency_s = client.receive()
            if latency_s is not None:
                latencies_s.append(latency_s)
                client.send()
    took_s = time.perf_counter() - began_s
    for client in clients.values():
        client.socket.close()
    poller.close()
    return Load(len(latencies_s) / took_s, sorted(latencies_s))
