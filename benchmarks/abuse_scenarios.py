"""What bad clients do to a server: each scenario is a function that raises if it got away with it.

A scenario talks to a running server over plain sockets and ends when the server has dealt with it.
`settled` then waits until the server is as if nothing had been, and `probe` measures one request.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HEALTH = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"  # the largest answer that costs no work
_SPAWN = multiprocessing.get_context("spawn")


class Target(NamedTuple):
    """A server on 127.0.0.1, with a model that has the items 1 to 100."""

    port: int
    pid: int


class Sizes(NamedTuple):
    """How much of everything."""

    connections: int
    body_bytes: int
    clients: int


def post(path: str, body: Any) -> bytes:
    """A whole POST request."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def rank_body(user: str, num_events: int = 8) -> dict[str, Any]:
    events = [1 + index % 100 for index in range(num_events)]
    return {"user_id": user, "history": events, "candidates": [1, 2, 3]}


def connect(target: Target, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    client.settimeout(120)
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", target.port))
    return client


@contextlib.contextmanager
def several(
    target: Target, count: int, receive_buffer: int | None = None
) -> Iterator[list[socket.socket]]:
    """That many connections."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect(target, receive_buffer)) for _ in range(count)]


def answer(client: socket.socket) -> tuple[int, bytes]:
    """The final answer to the only request of a connection. Raises EOFError without one."""
    received = b""
    while True:
        found = re.search(rb"HTTP/1.1 ([2-9]\d\d) .*?content-length: (\d+).*?\r\n\r\n", received,
                          re.DOTALL)  # fmt: skip
        if found is not None and len(received) >= found.end() + int(found[2]):
            return int(found[1]), received[found.end() : found.end() + int(found[2])]
        part = client.recv(1 << 16)
        if not part:
            raise EOFError(f"the connection ended after {received[:200]!r}")
        received += part


def ask(target: Target, request: bytes) -> tuple[int, Any]:
    """One request on a connection of its own; the body as JSON."""
    with connect(target) as client:
        client.sendall(request)
        status, body = answer(client)
        return status, json.loads(body)


def probe(target: Target, number: int) -> float:
    """Milliseconds of one small request, connection included. Raises if it is not answered."""
    began_s = time.perf_counter()
    status, body = ask(target, post("/v1/rank", rank_body(f"probe{number % 4}")))
    if status != 200:
        raise AssertionError(f"a probe was answered {status}: {body}")
    return (time.perf_counter() - began_s) * 1e3


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.02)


def status_of(target: Target) -> dict[str, Any]:
    """`GET /v1/status`."""
    status, body = ask(target, b"GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n")
    assert status == 200, body
    assert isinstance(body, dict)
    return body


def num_open(target: Target) -> int:
    """Connections of the server, that of this question included."""
    with connect(target) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        _, body = answer(client)
    found = re.search(rb"^mtserve_http_connections (\d+)", body, re.MULTILINE)
    assert found is not None
    return int(found[1])


def settled(target: Target) -> dict[str, Any]:
    """The status, once nothing waits, runs or is copied.

    A server with `--check-invariants` also checks its bookkeeping then, and ends if it is broken.
    """

    def is_idle() -> bool:
        status = status_of(target)
        return not (
            status["requests_waiting"]
            or status["requests_running"]
            or any(status["copies_in_flight"].values())
        )

    eventually(is_idle, "the engine is idle")
    eventually(lambda: num_open(target) == 1, "no connection is left")
    status = status_of(target)
    assert status["device_pages_used"] <= status["device_pages_total"], status
    assert status["host_chunks_used"] <= status["host_chunks_total"], status
    return status


# Scenarios


def slow_headers(target: Target, sizes: Sizes) -> None:
    """Clients that send their headers a byte at a time are cut off."""
    head = iter(b"GET /v2/health/live HTTP/1.1\r\nx: " + b"y" * 100_000)
    with several(target, sizes.clients) as clients:
        open_ones = set(clients)
        while open_ones:
            byte = bytes([next(head)])
            for client in list(open_ones):
                try:
                    client.sendall(byte)
                except OSError:
                    open_ones.discard(client)
            time.sleep(0.2)


def huge_bodies(target: Target, sizes: Sizes) -> None:
    """Bodies of a gigabyte, announced or not, are refused and not kept."""
    before = resident_bytes(target.pid)
    largest = before
    for start, piece in (
        (f"content-length: {sizes.body_bytes}", b" " * 65536),
        ("transfer-encoding: chunked", b"10000\r\n" + b" " * 65536 + b"\r\n"),
    ):
        head = f"POST /v1/rank HTTP/1.1\r\nhost: x\r\n{start}\r\n\r\n".encode()
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(_pour, target, head, piece, sizes.body_bytes) for _ in range(4)]
            while not all(future.done() for future in futures):
                largest = max(largest, resident_bytes(target.pid))
                time.sleep(0.01)
            for future in futures:
                future.result()
    # One body of the largest size that is allowed may be there per client, twice while it grows.
    allowed = 4 * 2 * MAX_BODY_BYTES + (64 << 20)
    if largest - before > allowed:
        raise AssertionError(f"the server grew by {largest - before} bytes, {allowed} are allowed")


MAX_BODY_BYTES = 4 << 20
"""`--max-body-bytes` of the servers that this is run against."""


def _pour(target: Target, head: bytes, piece: bytes, num_bytes: int) -> None:
    with connect(target) as client, contextlib.suppress(ConnectionError):
        client.sendall(head)
        for _ in range(num_bytes // len(piece) + 1):
            client.sendall(piece)
        raise AssertionError(f"the server took a body of {num_bytes} bytes")


@contextlib.contextmanager
def idle_connections(target: Target, count: int) -> Iterator[None]:
    """That many connections that have asked once and now stay open."""
    wanted = count + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    with several(target, count) as clients:
        for client in clients:
            client.sendall(HEALTH)
        for client in clients:
            status, _ = answer(client)
            assert status == 200
        yield


def half_closed(target: Target, sizes: Sizes) -> None:
    """Clients that close their sending side after the request are answered all the same."""
    with several(target, sizes.clients) as clients:
        for number, client in enumerate(clients):
            client.sendall(post("/v1/rank", rank_body(f"half{number % 8}", 64)))
            client.shutdown(socket.SHUT_WR)
        for client in clients:
            status, body = answer(client)
            assert status == 200, body


def never_reading(target: Target, sizes: Sizes) -> None:
    """Clients that ask for much and read nothing are cut off."""
    with several(target, sizes.clients, receive_buffer=4096) as clients:
        for client in clients:
            client.sendall(LARGE * 33)
        eventually(lambda: num_open(target) == 1, "the clients are cut off")


def vanishing(target: Target, sizes: Sizes) -> None:
    """Clients that reset their connection with a request in progress."""
    for number in range(sizes.clients * 4):
        with connect(target) as client:
            client.sendall(post("/v1/rank", rank_body(f"gone{number}", 200)))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def killed_clients(target: Target, sizes: Sizes) -> None:
    """Processes full of clients are killed in the middle of their load."""
    for _ in range(3):
        processes = [
            _SPAWN.Process(target=_hammer, args=(target, number, sizes.clients))
            for number in range(2)
        ]
        for process in processes:
            process.start()
        eventually(lambda: status_of(target)["requests_waiting"] > 0, "there is load")
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()


def _hammer(target: Target, number: int, num_threads: int) -> None:
    def send_for_ever(thread: int) -> None:
        user = f"load{number}-{thread}"
        with connect(target) as client:
            for num_events in range(50, 10_000):
                client.sendall(post("/v1/rank", rank_body(user, num_events % 400 + 50)))
                answer(client)

    threads = [threading.Thread(target=send_for_ever, args=(n,)) for n in range(num_threads)]
    for thread in threads:
        thread.start()


SCENARIOS: dict[str, Callable[[Target, Sizes], None]] = {
    "slow_headers": slow_headers,
    "huge_bodies": huge_bodies,
    "half_closed": half_closed,
    "never_reading": never_reading,
    "vanishing": vanishing,
    "killed_clients": killed_clients,
}
