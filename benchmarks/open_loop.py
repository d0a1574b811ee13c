"""An open-loop load: requests are due at given times, whatever the server does.

One thread, raw sockets, keep-alive connections with one request under way on each; a request that
finds none free gets a new one, up to a bound. A latency counts from the moment a request was due.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_READ_BYTES = 1 << 18
_DRAIN_S = 120.0


class Due(NamedTuple):
    """A whole HTTP request, and when it is due: seconds from the start."""

    at_s: float
    request: bytes


class Answer(NamedTuple):
    """What became of the request of that number.

    status: 0 when the connection was closed or the answer did not come before the end.
    """

    number: int
    latency_s: float
    status: int
    body: bytes


class Stop(NamedTuple):
    """When to give a load up: once more than `max_late` requests are later than `objective_s`, or
    failed."""

    objective_s: float
    max_late: int


class Outcome(NamedTuple):
    """Answers of the requests sent. `gave_up`: the rest was not sent."""

    answers: list[Answer]
    gave_up: bool


class _Connection:
    """One connection with at most one request under way."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number = -1
        self._received = b""

    def send(self, number: int, request: bytes) -> None:
        self.number = number
        self._received = b""
        self.socket.sendall(request)

    def receive(self) -> tuple[int, bytes] | None:
        """(status, body) once the answer is whole. Raises OSError when the server has closed."""
        part = self.socket.recv(_READ_BYTES)
        if not part:
            raise ConnectionError("the server closed the connection")
        self._received += part
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return None
        lines = head.lower().split(b"\r\n")
        (length,) = (
            int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")
        )
        return (int(head.split()[1]), body) if len(body) >= length else None


class OpenLoop:
    """Sends the requests. Used once; `max_connections` 1 or 2 make a closed loop of it."""

    def __init__(self, port: int, dues: Sequence[Due], max_connections: int = 256) -> None:
        self._port = port
        self._dues = dues
        self._max_connections = max_connections
        self._waiting: deque[int] = deque()
        self._idle: list[_Connection] = []
        self._busy: dict[int, _Connection] = {}
        self._poller = select.epoll()
        self._answers: list[Answer] = []
        self._num_bad = 0
        self._start_s = 0.0

    def run(self, stop: Stop | None = None) -> Outcome:
        """Send everything and wait for the answers, at most 120 s after the last is due."""
        self._start_s = time.perf_counter()
        next_due, gave_up = 0, False
        end_s = (self._dues[-1].at_s if self._dues else 0.0) + _DRAIN_S
        while next_due < len(self._dues) or self._waiting or self._busy:
            now_s = time.perf_counter() - self._start_s
            if now_s > end_s:
                break
            while next_due < len(self._dues) and self._dues[next_due].at_s <= now_s:
                self._waiting.append(next_due)
                next_due += 1
            self._send_waiting()
            pause_s = 0.1
            if next_due < len(self._dues):
                pause_s = min(pause_s, max(0.0, self._dues[next_due].at_s - now_s))
            for descriptor, _ in self._poller.poll(pause_s):
                self._receive(descriptor, stop)
            if stop is not None and not gave_up and self._num_late(stop) > stop.max_late:
                gave_up, next_due = True, len(self._dues)
                self._waiting.clear()
        self._close()
        return Outcome(self._answers, gave_up)

    def _send_waiting(self) -> None:
        while self._waiting:
            if not self._idle and len(self._busy) >= self._max_connections:
                return
            connection = self._idle.pop() if self._idle else self._connect()
            number = self._waiting.popleft()
            self._busy[connection.socket.fileno()] = connection
            connection.send(number, self._dues[number].request)

    def _connect(self) -> _Connection:
        connection = _Connection(self._port)
        self._poller.register(connection.socket.fileno(), select.EPOLLIN)
        return connection

    def _receive(self, descriptor: int, stop: Stop | None) -> None:
        connection = self._busy.get(descriptor)
        if connection is None:
            self._forget_idle(descriptor)
            return
        try:
            answer = connection.receive()
        except OSError:
            answer = 0, b""
            self._poller.unregister(descriptor)
            connection.socket.close()
        if answer is None:
            return
        del self._busy[descriptor]
        if answer[0]:
            self._idle.append(connection)
        self._take(connection.number, *answer, stop)

    def _forget_idle(self, descriptor: int) -> None:
        """The server has closed a connection that had nothing to do."""
        self._poller.unregister(descriptor)
        (closed,) = (one for one in self._idle if one.socket.fileno() == descriptor)
        self._idle.remove(closed)
        closed.socket.close()

    def _take(self, number: int, status: int, body: bytes, stop: Stop | None) -> None:
        latency_s = time.perf_counter() - self._start_s - self._dues[number].at_s
        self._answers.append(Answer(number, latency_s, status, body))
        if stop is not None and (status != 200 or latency_s > stop.objective_s):
            self._num_bad += 1

    def _num_late(self, stop: Stop) -> int:
        """Requests that are late or failed already, answered or not."""
        limit_s = time.perf_counter() - self._start_s - stop.objective_s
        pending = [one.number for one in self._busy.values()] + list(self._waiting)
        return self._num_bad + sum(self._dues[number].at_s < limit_s for number in pending)

    def _close(self) -> None:
        """Requests that are still under way have failed."""
        for connection in self._busy.values():
            self._take(connection.number, 0, b"", None)
        for connection in (*self._busy.values(), *self._idle):
            connection.socket.close()
        self._poller.close()
