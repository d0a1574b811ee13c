"""A server process on loopback, and the plain HTTP client that its tests use."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).resolve().parent.parent.parent
FAKE_CORE = "tests.integration.fake_core"

_FAKE_SERVER = f"""
import sys
from engine.entrypoints import api_server, cli
config = cli.serve_config(cli.Arguments(sys.argv[1:], None))
sys.exit(api_server.serve(config, core_module={FAKE_CORE!r}))
"""


def eventually(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Poll until the condition holds, at most for that long."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


def process_is_gone(pid: int) -> bool:
    """Whether no such process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


class Reply(NamedTuple):
    """An HTTP answer; `body` is decoded if it is JSON."""

    status: int
    headers: dict[str, str]
    body: Any


class ServerProcess:
    """Started on entry, killed on exit if it still runs. `fake` serves the fake core."""

    def __init__(self, folder: Path, *flags: str, fake: bool = False) -> None:
        entry = ["-c", _FAKE_SERVER] if fake else ["-m", "engine.entrypoints.api_server"]
        self._command = [sys.executable, *entry, "--port", "0", *flags]
        self._log_path = folder / "server.log"
        self.port = 0
        self.core_pid = 0

    def __enter__(self) -> Self:
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            )
        try:
            eventually(
                lambda: "listening on " in self.log or self.process.poll() is not None, "listening"
            )
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        found = re.search(r"listening on https?://[\d.]+:(\d+)", self.log)
        self.port = 0 if found is None else int(found[1])
        return self

    def until_ready(self) -> Self:
        """Wait until requests are taken; then `core_pid` is known."""
        eventually(
            lambda: self.process.poll() is not None or self.get("/v2/health/ready").status == 200,
            "ready",
        )
        assert self.process.poll() is None, self.log
        (self.core_pid,) = self.children()
        return self

    def children(self) -> list[int]:
        """Process ids of the server's children."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return [
            int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()
        ]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)

    @property
    def log(self) -> str:
        """What the server and its core have logged."""
        return self._log_path.read_text()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def grpc_address(self) -> str:
        """Of a server that was started with `--grpc-port`."""
        pattern = r"listening on grpcs?://(127\.0\.0\.1:\d+)"
        eventually(lambda: re.search(pattern, self.log), "listening for gRPC")
        found = re.search(pattern, self.log)
        assert found is not None
        return found[1]

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit status."""
        return self.process.wait(timeout_s)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """One request on a connection of its own; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request(method, path, content, headers or {})
            answer = connection.getresponse()
            text = answer.read()
            answered = {name.lower(): value for name, value in answer.getheaders()}
            is_json = answered.get("content-type") == "application/json"
            decoded = json.loads(text) if is_json and text else text
            return Reply(answer.status, answered, decoded)
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.request("GET", path)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        return self.request("POST", path, body, headers)
