"""Start, stop and death of the server and of its core."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.core_loop import HEARTBEAT_S
from engine.entrypoints.config import ServerConfig
from tests.integration.raw_http import connected, status_of, until_closed
from tests.integration.server_process import (
    Reply,
    ServerProcess,
    eventually,
    process_is_gone,
)


@contextmanager
def pending_rank(server: ServerProcess, user_id: str) -> Iterator[Future[Reply]]:
    """A rank request that has reached the core."""
    before = int(server.get("/v1/status").body["requests_waiting"])
    body = {"user_id": user_id, "history": [], "candidates": [1]}
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.post, "/v1/rank", body)
        eventually(
            lambda: server.get("/v1/status").body["requests_waiting"] > before, "it is pending"
        )
        yield future


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(tmp_path: Path, number: signal.Signals) -> None:
    flags = ["--drain-timeout-s", "3"]
    with ServerProcess(tmp_path, *flags, fake=True) as server:
        server.until_ready()
        with pending_rank(server, "hold") as held:
            server.send_signal(number)
            eventually(lambda: server.get("/v2/health/ready").status == 503, "not ready")
            assert server.get("/v2/health/live").status == 200
            refused = server.post("/v1/rank", {"user_id": "u", "history": [], "candidates": [1]})
            assert (refused.status, refused.body["code"]) == (503, "draining")
            assert server.get("/v2/health/live").status == 200
            assert not held.done()
            # What is left at the end of the drain is told so.
            left = held.result(60)
        assert (left.status, left.body["code"]) == (503, "draining")
        assert server.wait() == 0
        assert process_is_gone(server.core_pid)


def test_a_drain_answers_what_is_pending(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, fake=True) as server:
        server.until_ready()
        with ThreadPoolExecutor(8) as pool:
            body = {"user_id": "slow", "history": [1], "candidates": [1]}
            futures = [pool.submit(server.post, "/v1/rank", body) for _ in range(8)]
            eventually(lambda: any(future.done() for future in futures), "the first answer")
            server.send_signal(signal.SIGTERM)
            statuses = {_status_or_refused(future) for future in futures}
        assert statuses <= {200, 503}
        assert server.wait() == 0


def test_an_end_waits_for_no_body(tmp_path: Path) -> None:
    def num_in_flight() -> bytes:
        found = re.search(rb"\nmtserve_http_requests_in_flight (.+)\n", server.get("/metrics").body)
        assert found is not None
        return found[1]

    with ServerProcess(tmp_path, fake=True) as server:
        server.until_ready()
        with connected(server) as client:
            client.sendall(b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            eventually(lambda: num_in_flight() == b"2.0", "the request is begun")  # and this one
            server.send_signal(signal.SIGTERM)
            received = until_closed(client)
        assert status_of(received) == 503 and b'"code":"draining"' in received
        assert server.wait() == 0
        assert "Traceback" not in server.log


def _status_or_refused(future: Future[Reply]) -> int:
    try:
        return future.result(60).status
    except ConnectionError:
        return 503  # not yet accepted when the listener closed


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--drain-timeout-s", "600", fake=True) as server:
        server.until_ready()
        with pending_rank(server, "hold") as held:
            server.send_signal(signal.SIGTERM)
            eventually(lambda: server.get("/v2/health/ready").status == 503, "not ready")
            server.send_signal(signal.SIGTERM)
            with pytest.raises(OSError):  # noqa: PT011 - reset or closed without an answer
                held.result(60)
        assert server.wait() == 128 + signal.SIGTERM
        eventually(lambda: process_is_gone(server.core_pid), "the core is gone")


@pytest.mark.parametrize("cause", ["kill", "crash", "exit"])
def test_a_dead_core_fails_pending_requests_and_the_server(tmp_path: Path, cause: str) -> None:
    with ServerProcess(tmp_path, fake=True) as server:
        server.until_ready()
        with pending_rank(server, "hold") as held:
            if cause == "kill":
                os.kill(server.core_pid, signal.SIGKILL)
            else:
                body = {"user_id": cause, "history": [], "candidates": [1]}
                assert server.post("/v1/rank", body).status == 503
            reply = held.result(60)
        assert (reply.status, reply.body["code"]) == (503, "engine_dead")
        assert server.get("/v2/health/live").status == 503
        assert server.get("/v2/health/ready").status == 503
        assert server.wait() == 1
        assert process_is_gone(server.core_pid)


def test_a_killed_server_leaves_no_core(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, fake=True) as server:
        server.until_ready()
        server.send_signal(signal.SIGKILL)
        server.wait()
        eventually(lambda: process_is_gone(server.core_pid), "the core is gone")


def test_a_stopped_core_is_not_live_until_it_goes_on(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, fake=True) as server:
        server.until_ready()
        os.kill(server.core_pid, signal.SIGSTOP)
        eventually(lambda: server.get("/v2/health/live").status == 503, "not live")
        reply = server.get("/v2/health/live")
        found = re.fullmatch(r"the core's last heartbeat is (\d\.\d) s old", reply.body["reason"])
        assert found is not None
        assert float(found[1]) >= 1.5
        assert server.get("/v2/health/ready").status == 503
        os.kill(server.core_pid, signal.SIGCONT)
        eventually(lambda: server.get("/v2/health/live").status == 200, "live again")
        assert server.get("/v2/health/ready").status == 200


def test_by_default_a_silence_of_two_seconds_is_seen() -> None:
    assert ServerConfig().heartbeat_timeout_s + HEARTBEAT_S < 2.0


def test_a_stopped_core_is_killed_and_the_server_ends(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--heartbeat-kill-s", "3", fake=True) as server:
        server.until_ready()
        with pending_rank(server, "hold") as held:
            os.kill(server.core_pid, signal.SIGSTOP)
            reply = held.result(60)
        assert (reply.status, reply.body["code"]) == (503, "engine_dead")
        assert "hung: it was silent for 5 s" in reply.body["error"]
        assert server.wait() == 1
        assert process_is_gone(server.core_pid)


def test_a_core_whose_loop_hangs_says_where_and_ends(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--heartbeat-kill-s", "3", fake=True) as server:
        server.until_ready()
        reply = server.post("/v1/rank", {"user_id": "hang", "history": [], "candidates": [1]})
        assert (reply.status, reply.body["code"]) == (503, "engine_dead")
        assert server.wait() == 1
        assert "no pass for more than heartbeat_kill_s=3" in server.log
        assert "a fake core with 1 requests" in server.log
        assert "let_go.wait()" in server.log


def test_sigusr1_writes_the_stacks_of_the_core(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, fake=True) as server:
        server.until_ready()
        os.kill(server.core_pid, signal.SIGUSR1)
        eventually(lambda: "in _run_pass" in server.log, "stacks")
        assert server.get("/v2/health/live").status == 200


def test_a_bug_is_dumped_before_the_core_ends(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, fake=True) as server:
        server.until_ready()
        body = {"user_id": "crash", "history": [], "candidates": [1]}
        assert server.post("/v1/rank", body).status == 503
        assert server.wait() == 1
        assert "dump of the core\na fake core with 1 requests\nthread " in server.log


def test_a_missing_model_is_found_before_anything_listens(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--model", str(tmp_path / "nowhere")) as server:
        assert server.wait() == 2
    assert f"model directory '{tmp_path / 'nowhere'}' does not exist" in server.log
    assert "listening" not in server.log
    assert "Traceback" not in server.log


def test_a_bad_model_ends_the_server_with_one_line(tmp_path: Path) -> None:
    model = tmp_path / "missing"
    model.mkdir()
    with ServerProcess(tmp_path, "--model", str(model), fake=True) as server:
        assert server.wait() == 2
    assert "cannot serve: model directory 'missing' has no config.json" in server.log
    assert "Traceback" not in server.log


def test_a_signal_while_it_starts_ends_it(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:  # the real core: its start takes a while
        eventually(lambda: server.children(), "the core has been started")
        (core_pid,) = server.children()
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        eventually(lambda: process_is_gone(core_pid), "the core is gone")


def test_a_taken_port_is_a_config_error(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, fake=True) as server:
        server.until_ready()
        (tmp_path / "second").mkdir()
        with ServerProcess(tmp_path / "second", "--port", str(server.port)) as second:
            assert second.wait() == 2
        assert "cannot listen" in second.log
