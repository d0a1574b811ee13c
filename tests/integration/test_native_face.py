"""The native face over the real engine: prefetch, routing header, status, admission."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server_process import Reply, ServerProcess, eventually

SMALL = ["--allow-small-pool", "--device-pages", "64", "--page-size", "16", "--chunk-size", "64",
         "--host-bytes", "67108864", "--threads", "1"]  # fmt: skip
HISTORY = list(range(1, 33))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    flags = ["--max-queue-requests", "6", "--max-queue-requests-per-user", "2",
             "--max-queue-tokens", "300", "--max-requests-per-call", "20"]  # fmt: skip
    with ServerProcess(folder, *SMALL, *flags) as running:
        yield running.until_ready()


def rank(server: ServerProcess, user_id: str, **more: Any) -> Reply:
    return server.post(
        "/v1/rank", {"user_id": user_id, "history": HISTORY, "candidates": [5, 6], **more}
    )


def prefetch(server: ServerProcess, **body: Any) -> Any:
    reply = server.post("/v1/users:prefetch", body)
    assert reply.status == 200, reply.body
    return reply.body


def test_a_prefetch_brings_known_users_and_lists_unknown_ones(server: ServerProcess) -> None:
    assert rank(server, "known").status == 200
    answer = prefetch(server, users=["nobody", "known", "nobody-else"])
    assert answer["unknown"] == ["nobody", "nobody-else"]
    (user,) = answer["users"]
    assert (user["user_id"], user["history_length"], user["device_tokens"]) == ("known", 32, 32)
    assert prefetch(server, users=["known"], namespace="other") == {
        "users": [], "unknown": ["known"],
    }  # fmt: skip


def test_a_prefetched_history_is_not_computed_again(server: ServerProcess) -> None:
    answer = prefetch(
        server,
        requests=[
            {"user_id": "warm", "history": HISTORY},
            {"user_id": "wrong", "history": {"item": [1], "typo": [1]}},
        ],
    )
    warm, wrong = answer["users"]
    assert (warm["computed_tokens"], warm["device_tokens"], warm["history_length"]) == (32, 0, 32)
    assert "error" not in warm
    assert (wrong["error"]["code"], wrong["error"]["status"]) == ("invalid_request", 400)
    assert answer["unknown"] == []
    usage = rank(server, "warm").body["usage"]
    assert (usage["device_tokens"], usage["computed_tokens"]) == (32, 0)


def test_the_routing_header_names_the_user(server: ServerProcess) -> None:
    body = {"history": HISTORY, "candidates": [5]}
    assert server.post("/v1/rank", body, {"x-session-id": "routed"}).status == 200
    usage = rank(server, "routed").body["usage"]
    assert usage["device_tokens"] == 32
    other = server.post("/v1/rank", {"user_id": "b", **body}, {"x-session-id": "a"})
    assert (other.status, other.body["code"]) == (400, "invalid_request")
    accented = server.post(
        "/v1/rank", {"user_id": "\u00e9", **body}, {"x-session-id": "\u00c3\u00a9"}
    )
    assert accented.status == 200  # UTF-8 in the header, which http.client sends as Latin-1
    for wrong in ("", "x" * 1025, "\u00e9"):
        assert server.post("/v1/rank", body, {"x-session-id": wrong}).status == 400
    known = server.request("GET", "/v1/users/routed", headers={"x-session-id": "routed"})
    assert (known.status, known.body["states"][0]["length"]) == (200, 32)
    assert server.request("GET", "/v1/users/routed", headers={"x-session-id": "b"}).status == 400
    twice = [("x-session-id", "a"), ("x-session-id", "b")]
    url = f"http://{server.address}/v1/rank"
    assert httpx.post(url, json=body, headers=twice).status_code == 400
    missing = server.post("/v1/rank", body)
    assert (missing.status, "user_id" in missing.body["error"]) == (400, True)


def test_the_status_tells_what_is_kept(server: ServerProcess) -> None:
    rank(server, "kept")

    def is_idle() -> bool:
        status = server.get("/v1/status").body
        return status["requests_waiting"] == status["requests_running"] == 0 and status[
            "copies_in_flight"
        ] == {"onload": 0, "offload": 0}

    eventually(is_idle, "the engine is idle")
    status = server.get("/v1/status").body
    assert status["model"] == "builtin-hstu"
    assert status["weights_versions"] == ["random-1"]
    assert status["device_pages_total"] == 64
    assert 2 <= status["device_pages_used"] <= 64
    assert status["users_resident"]["device"] >= 1
    assert status["users_resident"]["host"] >= 1
    assert status["steps"] >= 1


def send_while_stopped(server: ServerProcess, bodies: list[dict[str, Any]]) -> list[Reply]:
    """The answers to requests that all reach the core before it looks at the first."""
    os.kill(server.core_pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(len(bodies)) as pool:
            futures = [pool.submit(server.post, "/v1/rank", body) for body in bodies]
            in_flight = f"mtserve_http_requests_in_flight {len(bodies) + 1}.0"
            eventually(lambda: in_flight in server.get("/metrics").body.decode(), "all are sent")
            os.kill(server.core_pid, signal.SIGCONT)
            return [future.result(60) for future in futures]
    finally:
        os.kill(server.core_pid, signal.SIGCONT)


def body_of(user_id: str, num_events: int) -> dict[str, Any]:
    return {"user_id": user_id, "history": [1] * num_events, "candidates": [2]}


@pytest.mark.parametrize(
    ("bodies", "num_taken", "limit_name", "limit"),
    [
        ([body_of(f"many{n}", 1) for n in range(10)], 6, "max_queue_requests=6", 6),
        ([body_of("one", 1) for _ in range(5)], 2, "max_queue_requests_per_user=2", 2),
        ([body_of(f"long{n}", 99) for n in range(5)], 3, "max_queue_tokens=300", 300),
    ],
    ids=["requests", "requests of a user", "tokens"],
)
def test_what_is_too_much_is_told_to_come_back(
    server: ServerProcess,
    bodies: list[dict[str, Any]],
    num_taken: int,
    limit_name: str,
    limit: int,
) -> None:
    replies = send_while_stopped(server, bodies)
    assert Counter(reply.status for reply in replies) == {
        200: num_taken, 429: len(bodies) - num_taken,
    }  # fmt: skip
    for reply in replies:
        if reply.status == 429:
            assert (reply.body["code"], reply.body["limit"]) == ("overloaded", limit)
            assert limit_name in reply.body["error"]
            assert 1 <= int(reply.headers["retry-after"]) <= 60


def test_a_deadline_that_has_passed_is_an_error_of_its_own(server: ServerProcess) -> None:
    replies = send_while_stopped(
        server, [body_of("late", 3) | {"deadline_ms": 1}, body_of("in-time", 3)]
    )
    assert [reply.status for reply in replies] == [504, 200]
    assert replies[0].body["code"] == "deadline_exceeded"


def test_better_priority_is_served_first(tmp_path: Path) -> None:
    flags = [*SMALL, "--max-batch-requests", "1", "--no-look-ahead", "--priority-ageing-s", "1000"]
    with ServerProcess(tmp_path, *flags) as server:
        server.until_ready()
        bodies = [body_of(f"p{n}", 3) | {"priority": -n} for n in range(6)]
        replies = send_while_stopped(server, bodies)
        waited_us = [reply.body["usage"]["queue_us"] for reply in replies]
    assert waited_us == sorted(waited_us, reverse=True)
