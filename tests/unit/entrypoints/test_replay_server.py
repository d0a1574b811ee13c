"""`mtserve replay --server` against an HTTP server that answers as a test tells it to."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.entrypoints import cli, replay_server
from engine.entrypoints.replay_server import ServerReplayOptions
from engine.errors import ConfigError, InvalidRequest

USAGE = {
    "device_tokens": 2, "host_tokens": 1, "computed_tokens": 3, "history_length": 6,
    "weights_version": "1", "reuse": "append",
}  # fmt: skip
ANSWER = {"request_id": "r", "usage": USAGE, "items": [5, 3], "item_scores": [1.5, -0.25]}
METADATA = {
    "name": "small", "versions": ["1"], "platform": "mtserve", "inputs": [], "outputs": [],
    "parameters": {
        "tasks": ["rank", "retrieve"], "score_names": [], "dtype": "float32", "reuse": "append",
        "reuse_reason": "", "backend": "torch", "exactness": "bitwise", "cache_tiers": "tiered",
        "max_history_events": 1, "max_history_tokens": 1, "max_batch_tokens": 1, "keep_stride": 1,
        "page_size": 1, "chunk_size": 1, "token_bytes": 1, "sample_items": [],
        "reads_query_time": False, "context_features": [], "is_random": False,
    },
}  # fmt: skip


class Told(NamedTuple):
    """What the server answers: a body that is not bytes is sent as JSON."""

    status: int
    body: Any
    headers: tuple[tuple[str, str], ...] = ()


class Seen(NamedTuple):
    """A request that the server got."""

    body: dict[str, Any]
    headers: dict[str, str]


class ScriptedServer:
    """Answers GETs by path and POSTs by what the script says about the body."""

    def __init__(self) -> None:
        self.pages = {
            "/v2/health/ready": Told(200, {"ready": True, "name": "small"}),
            "/v2/models/small": Told(200, METADATA),
        }
        self.script: Callable[[dict[str, Any]], Told] = lambda body: Told(200, ANSWER)
        self.seen: list[Seen] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(owner.pages[self.path])

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                owner.seen.append(Seen(body, {k.lower(): v for k, v in self.headers.items()}))
                self._answer(owner.script(body))

            def _answer(self, told: Told) -> None:
                is_raw = isinstance(told.body, bytes)
                content = told.body if is_raw else json.dumps(told.body).encode()
                self.send_response(told.status)
                for name, value in told.headers:
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *_: None  # a client that gave up


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    thread = threading.Thread(target=scripted.http.serve_forever, args=(0.02,))
    thread.start()
    yield scripted
    scripted.http.shutdown()
    scripted.http.server_close()
    thread.join()


@pytest.fixture
def options(server: ScriptedServer, tmp_path: Path) -> ServerReplayOptions:
    """Ten requests: five users, two each, user by user an hour apart."""
    log = tmp_path / "log.csv"
    log.write_text(
        "".join(
            f"u{user},{10 * user + n},{3600 * n + user}\n" for n in range(2) for user in range(5)
        )
    )
    return ServerReplayOptions(
        server=f"http://127.0.0.1:{server.http.server_port}", trace=str(log), concurrency=2
    )


def with_options(options: ServerReplayOptions, **changes: Any) -> ServerReplayOptions:
    return msgspec.structs.replace(options, **changes)


def test_every_window_of_the_log_is_one_request_with_all_events_so_far(
    server: ScriptedServer, options: ServerReplayOptions
) -> None:
    report = replay_server.run(with_options(options, concurrency=1, deadline_ms=250))

    assert [(seen.body["user_id"], seen.body["history"]["item"]) for seen in server.seen] == [
        *((f"u{user}", [10 * user]) for user in range(5)),
        *((f"u{user}", [10 * user, 10 * user + 1]) for user in range(5)),
    ]
    first = server.seen[6].body
    assert first["history"]["time"] == [1, 3601]
    assert (first["query_time"], first["topk"], first["deadline_ms"]) == (3601, 10, 250)
    assert (report.requests, report.answered, report.failed, report.ended) == (10, 10, {}, "log")
    assert (report.model, report.unanswered, report.retries) == ("small", 0, 0)


def test_tokens_by_tier_are_added_up_over_their_denominator(options: ServerReplayOptions) -> None:
    report = replay_server.run(options)

    assert msgspec.structs.astuple(report.tokens) == (60, 20, 10, 30)
    assert (report.device_share, report.host_share) == (20 / 60, 10 / 60)
    assert 0 < report.latency.p50_ms <= report.latency.p99_ms <= report.latency.max_ms


def test_at_a_rate_all_are_sent_too(options: ServerReplayOptions) -> None:
    report = replay_server.run(with_options(options, rate=1000))

    assert (report.requests, report.answered, report.ended) == (10, 10, "log")


@pytest.mark.parametrize("rate", [0.001, 0.0])
def test_nothing_is_sent_after_the_duration(
    rate: float, server: ScriptedServer, options: ServerReplayOptions
) -> None:
    report = replay_server.run(with_options(options, rate=rate, duration_s=1e-9))

    assert (report.requests, report.ended, server.seen) == (0, "duration", [])
    assert (report.latency.p99_ms, report.requests_per_s) == (0, 0)


def test_only_the_first_requests_are_sent_when_so_told(options: ServerReplayOptions) -> None:
    report = replay_server.run(with_options(options, max_requests=3))

    assert (report.requests, report.ended) == (3, "log")


def _overloaded(retry_after: str) -> Told:
    body = {"error": "full", "code": "overloaded", "limit": 1}
    return Told(429, body, (("Retry-After", retry_after),))


def test_a_429_is_tried_again_after_its_time_and_the_tries_are_counted(
    server: ScriptedServer, options: ServerReplayOptions
) -> None:
    def full_twice(body: dict[str, Any]) -> Told:
        is_third = sum(seen.body == body for seen in server.seen) > 2
        return Told(200, ANSWER) if is_third else _overloaded("0")

    server.script = full_twice
    report = replay_server.run(with_options(options, retries=2))

    assert (report.requests, report.answered, report.retries, report.failed) == (10, 10, 20, {})
    assert report.retry_wait_s == 0


def test_a_429_without_further_tries_is_a_failure(
    server: ScriptedServer, options: ServerReplayOptions
) -> None:
    server.script = lambda body: _overloaded("30")

    report = replay_server.run(options)

    assert (report.answered, report.retries, report.failed) == (0, 0, {"overloaded": 10})


def test_failures_are_counted_by_code_and_the_replay_goes_on(
    server: ScriptedServer, options: ServerReplayOptions
) -> None:
    answers = {
        "u0": Told(504, {"error": "late", "code": "deadline_exceeded", "request_id": "r"}),
        "u1": Told(502, b"<html>bad gateway</html>"),
        "u2": Told(200, b"no json"),
        "u3": Told(200, {"usage": {}}),
    }
    server.script = lambda body: answers.get(body["user_id"], Told(200, ANSWER))

    report = replay_server.run(options)

    assert report.failed == {"deadline_exceeded": 2, "http_502": 2, "bad_answer": 4}
    assert (report.requests, report.answered) == (10, 2)


def test_an_answer_that_does_not_come_in_time_is_counted(
    server: ScriptedServer, options: ServerReplayOptions
) -> None:
    released = threading.Event()

    def hang(body: dict[str, Any]) -> Told:
        if body["user_id"] == "u0":
            released.wait(60)
        return Told(200, ANSWER)

    server.script = hang
    try:
        report = replay_server.run(with_options(options, timeout_s=0.5, concurrency=4))
    finally:
        released.set()

    assert report.failed == {"timeout": 2}
    assert report.answered == 8


def test_verification_asks_for_a_recompute_and_counts_what_differs(
    server: ScriptedServer, options: ServerReplayOptions
) -> None:
    def answer(body: dict[str, Any]) -> Told:
        if body.get("cache") != "bypass":
            return Told(200, ANSWER)
        if body["user_id"] == "u1":
            return Told(200, {**ANSWER, "item_scores": [1.5, -0.125]})
        if body["user_id"] == "u2":  # other weights: nothing to compare
            return Told(200, {**ANSWER, "usage": {**USAGE, "weights_version": "2"}})
        return Told(200, ANSWER)

    server.script = answer
    report = replay_server.run(with_options(options, verify=1.0))

    assert (report.requests, report.answered, len(server.seen)) == (10, 10, 20)
    assert (report.verified, report.equal) == (8, 6)
    assert report.tokens.history == 60


def test_the_api_key_of_the_file_is_sent(
    server: ScriptedServer, options: ServerReplayOptions, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("a-test-key\n")

    replay_server.run(with_options(options, api_key_file=str(key)))

    assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer a-test-key"}


def test_a_server_that_cannot_be_replayed_against_is_refused_before_anything_is_sent(
    server: ScriptedServer, options: ServerReplayOptions
) -> None:
    with pytest.raises(ConfigError, match="serves model 'small', not 'large'"):
        replay_server.run(with_options(options, model="large"))
    server.pages["/v2/models/small"] = Told(401, {"error": "no key", "code": "unauthorized"})
    with pytest.raises(ConfigError, match="--api-key-file"):
        replay_server.run(options)
    rank_only = {**METADATA, "parameters": {**METADATA["parameters"], "tasks": ["rank"]}}
    server.pages["/v2/models/small"] = Told(200, rank_only)
    with pytest.raises(ConfigError, match="serves rank: a replay needs"):
        replay_server.run(options)
    server.pages["/v2/health/ready"] = Told(503, {"ready": False, "reason": "it is draining"})
    with pytest.raises(ConfigError, match="not ready: it is draining"):
        replay_server.run(options)
    server.pages["/v2/health/ready"] = Told(200, b"welcome to another server")
    with pytest.raises(ConfigError, match="give the address of an mtserve server"):
        replay_server.run(options)
    assert server.seen == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"server": "localhost:8000"}, "give http://HOST:PORT"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"rate": -1.0}, "rate is -1.0"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0"),
        ({"retries": -1}, "retries is -1"),
        ({"verify": 2.0}, "verify is 2.0"),
    ],
)
def test_options_that_cannot_work_are_refused(
    change: dict[str, object], message: str, options: ServerReplayOptions
) -> None:
    with pytest.raises(ConfigError, match=message):
        msgspec.structs.replace(options, **change)


def test_what_cannot_be_reached_or_read_is_a_typed_error(
    options: ServerReplayOptions, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot be reached"):
        replay_server.run(with_options(options, server="http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="Invalid port"):
        replay_server.run(with_options(options, server="http://host:port"))
    with pytest.raises(InvalidRequest, match="cannot read the log"):
        replay_server.run(with_options(options, trace="nothing.csv"))
    with pytest.raises(ConfigError, match="API key file nowhere cannot be read"):
        replay_server.run(with_options(options, api_key_file="nowhere"))
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        replay_server.run(with_options(options, api_key_file=str(empty)))


def test_the_command_takes_the_server_from_a_flag_or_a_file(
    options: ServerReplayOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "replay.yaml"
    file.write_text(f"server: {options.server}\ntrace: {options.trace}\n")

    for arguments in (
        ["--server", options.server, "--trace", options.trace],
        ["--config", str(file)],
    ):
        assert cli.main(["replay", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["answered"] == 10


def test_a_replay_against_a_server_loads_no_torch() -> None:
    code = "import sys, engine.entrypoints.replay_server; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
