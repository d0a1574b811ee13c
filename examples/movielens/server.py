"""Start the real server as a process of its own, and send it requests over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.config import EngineConfig

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 120.0
_QUEUED_PER_WORKER = 4


class ServerError(RuntimeError):
    """The server did not start, or answered with an error; the message says what it said."""


@contextlib.contextmanager
def serving(model: Path, engine: EngineConfig, work: Path) -> Iterator[int]:
    """Run the server until the block ends (SIGTERM); gives the port once it is ready.

    Its configuration and log are files in `work`.
    """
    with socket.create_server((_HOST, 0)) as probe:
        port = probe.getsockname()[1]
    settings = {
        "model": str(model),
        "server": {"host": _HOST, "port": port, "access_log_format": "off"},
        "engine": msgspec.to_builtins(engine),
    }
    work.mkdir(parents=True, exist_ok=True)
    config_file, log_file = work / "server.yaml", work / "server.log"
    config_file.write_text(json.dumps(settings, indent=2))  # JSON is YAML
    command = [sys.executable, "-m", "engine.entrypoints.api_server", "--config", str(config_file)]
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_ready(process, port, log_file)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(_HOST, port, timeout=5)
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    tail = log_file.read_text(errors="replace")[-2000:]
    raise ServerError(f"the server did not become ready; the end of {log_file}:\n{tail}")


class UserRequest(NamedTuple):
    """A retrieve request: the user and the items of the history, oldest first."""

    user_id: str
    items: list[int]


class Answer(NamedTuple):
    """The best items and their scores, best first."""

    items: list[int]
    scores: list[float]


@dataclass(slots=True, eq=False)
class Replayed:
    """What came back, in the order of the requests.

    Attributes:
        answers: One for each request.
        latencies_s: Seconds from sending a request to having its answer.
        history, device, host: Tokens: the denominator, and what was found in each tier.
        duration_s: Seconds of the whole replay.
    """

    answers: list[Answer] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    history: int = 0
    device: int = 0
    host: int = 0
    duration_s: float = 0.0

    def extend(self, more: Replayed) -> None:
        """Add the requests that came after."""
        self.answers += more.answers
        self.latencies_s += more.latencies_s
        self.history += more.history
        self.device += more.device
        self.host += more.host
        self.duration_s += more.duration_s


def replay(
    port: int,
    requests: Sequence[UserRequest],
    num_workers: int,
    on_answer: Callable[[], object] = lambda: None,
) -> Replayed:
    """Send the requests in order over `num_workers` connections.

    A user's requests share a connection, so they stay in order; each connection has one request
    in flight and a few waiting, so no worker runs far ahead of the others.
    """
    messages = [_message(request) for request in requests]
    replies: list[tuple[float, bytes] | None] = [None] * len(requests)
    errors: list[BaseException] = []
    reporting = threading.Lock()
    queues = [queue.Queue[int | None](_QUEUED_PER_WORKER) for _ in range(num_workers)]

    def work(mine: queue.Queue[int | None]) -> None:
        try:
            with socket.create_connection((_HOST, port), timeout=_ANSWER_TIMEOUT_S) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while (index := mine.get()) is not None:
                    started_s = time.monotonic()
                    connection.sendall(messages[index])
                    content = _read_answer(connection)
                    replies[index] = time.monotonic() - started_s, content
                    with reporting:
                        on_answer()
        except BaseException as error:
            errors.append(error)
            while mine.get() is not None:  # let the feeder finish
                pass

    threads = [threading.Thread(target=work, args=(mine,), daemon=True) for mine in queues]
    worker_of: dict[str, int] = {}
    started_s = time.monotonic()
    for thread in threads:
        thread.start()
    for index, request in enumerate(requests):
        worker = worker_of.setdefault(request.user_id, len(worker_of) % num_workers)
        queues[worker].put(index)
    for mine in queues:
        mine.put(None)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return _collect(replies, time.monotonic() - started_s)


def _message(request: UserRequest) -> bytes:
    """The whole HTTP request, made beforehand: the client shares the machine with the server."""
    fields = {
        "user_id": request.user_id,
        "history": {"item": request.items},
        "exclude_history": True,
    }
    body = json.dumps(fields).encode()
    head = f"POST /v1/retrieve HTTP/1.1\r\nHost: {_HOST}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _read_answer(connection: socket.socket) -> bytes:
    """The body of one answer. Raises ServerError unless its status is 200."""
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        received += _receive(connection)
    status, *lines = received[:end].decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(":") for line in lines)}
    body = received[end + 4 :]
    while len(body) < int(headers["content-length"]):
        body += _receive(connection)
    if status.split()[1] != "200":
        raise ServerError(f"{status}: {body[:500]!r}")
    return body


def _receive(connection: socket.socket) -> bytes:
    received = connection.recv(1 << 16)
    if not received:
        raise ServerError("the server closed the connection without an answer")
    return received


def _collect(replies: Sequence[tuple[float, bytes] | None], duration_s: float) -> Replayed:
    result = Replayed(duration_s=duration_s)
    for reply in replies:
        assert reply is not None
        latency_s, content = reply
        answer = json.loads(content)
        usage = answer["usage"]
        result.latencies_s.append(latency_s)
        result.answers.append(Answer(answer["items"], answer["item_scores"]))
        result.history += usage["history_length"]
        result.device += usage["device_tokens"]
        result.host += usage["host_tokens"]
    return result
