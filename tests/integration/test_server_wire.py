"""Routes, statuses and headers, over a core without a model."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.entrypoints.api_server import bind
from engine.entrypoints.config import ServerConfig
from engine.errors import ConfigError
from tests.integration.server_process import Reply, ServerProcess, eventually

USER = {"name": "user_id", "datatype": "INT64", "shape": [1], "data": [5]}
HISTORY = {"name": "history", "datatype": "INT64", "shape": [2], "data": [1, 2]}
CANDIDATES = {"name": "candidates", "datatype": "INT64", "shape": [2], "data": [4, 9]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    flags = ["--max-queue-requests", "200", "--max-body-bytes", "100000"]
    with ServerProcess(folder, *flags, fake=True) as running:
        yield running.until_ready()


def metric(server: ServerProcess, name: str, **labels: str) -> float:
    text = server.get("/metrics").body.decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_health_and_metadata(server: ServerProcess) -> None:
    assert server.get("/v2/health/live").body == {"live": True}
    assert server.get("/v2/health/ready").status == 200
    assert server.get("/v2").body["name"] == "mtserve"
    for path in ("/v2/models/fake", "/v2/models/fake/versions/7"):
        metadata = server.get(path).body
        assert metadata["name"] == "fake"
        assert metadata["versions"] == ["7"]
        assert metadata["parameters"]["reuse"] == "append"
    assert server.get("/v2/models/fake/ready").status == 200
    assert server.get("/v2/models/fake/versions/7/ready").status == 200
    assert server.get("/v1/status").body["phase"] == "serving"


def test_infer_echoes_ids_and_answers_without_a_content_type(server: ServerProcess) -> None:
    reply = server.post(
        "/v2/models/fake/versions/7/infer",
        {"id": "abc", "inputs": [USER, HISTORY, CANDIDATES]},
        {"x-request-id": "req-1"},
    )
    assert reply.status == 200
    assert reply.headers["x-request-id"] == "req-1"
    assert reply.body["id"] == "abc"
    assert reply.body["model_version"] == "7"
    assert reply.body["outputs"] == [
        {
            "name": "scores",
            "datatype": "FP32",
            "shape": [2, 2],
            "data": [3004.0, 2996.0, 3009.0, 2991.0],
        }
    ]
    assert reply.body["parameters"]["computed_tokens"] == 2
    made = server.post("/v2/models/fake/infer", {"inputs": [USER, HISTORY]})
    assert made.headers["x-request-id"]
    assert "id" not in made.body
    assert [output["name"] for output in made.body["outputs"]] == ["items", "item_scores"]
    assert made.body["outputs"][0]["shape"] == [10]


def test_native_routes_answer_one_and_many(server: ServerProcess) -> None:
    one = server.post("/v1/rank", {"user_id": "u", "history": [1], "candidates": [2]})
    assert one.status == 200
    assert one.body["scores"] == [[1002.0, 998.0]]
    many = server.post(
        "/v1/retrieve",
        {
            "requests": [
                {"user_id": "a", "history": [1], "topk": 2},
                {"user_id": "bad", "history": [1]},
                {"user_id": "b"},
            ]
        },
    )
    assert many.status == 200
    first, second, third = many.body["responses"]
    assert first["items"] == [0, 1]
    assert (second["code"], second["status"], second["limit"]) == ("invalid_request", 400, 0)
    assert "history" in third["error"]
    own_ids = [f"{many.headers['x-request-id']}.{index}" for index in range(3)]
    assert [answer["request_id"] for answer in many.body["responses"]] == own_ids


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nope", None, 404, "not_found"),
        ("POST", "/v2/models/other/infer", {"inputs": []}, 404, "unknown_model"),
        ("GET", "/v2/models/other", None, 404, "unknown_model"),
        ("GET", "/v2/models/other/ready", None, 404, "unknown_model"),
        ("POST", "/v2/models/fake/versions/8/infer", {"inputs": []}, 404, "unknown_model"),
        ("GET", "/v1/rank", None, 405, "method_not_allowed"),
        ("POST", "/v2/health/live", {}, 405, "method_not_allowed"),
        ("POST", "/v1/rank", b"{", 400, "invalid_request"),
        ("POST", "/v1/rank", b"", 400, "invalid_request"),
        ("POST", "/v2/models/fake/infer", {"inputs": [USER, USER]}, 400, "invalid_request"),
        ("POST", "/v1/rank", b" " * 100_001, 413, "too_large"),
    ],
)
def test_faults_have_their_status(
    server: ServerProcess, method: str, path: str, body: Any, status: int, code: str
) -> None:
    reply = server.request(method, path, body, {"x-request-id": "faulty"})
    assert (reply.status, reply.body["code"]) == (status, code)
    assert reply.body["error"]
    assert reply.headers["x-request-id"] == reply.body["request_id"] == "faulty"


def test_a_body_of_unknown_length_is_bounded_while_it_is_read(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            client.sendall(b"c350\r\n" + b" " * 50_000 + b"\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413")
    assert server.get("/v2/health/ready").status == 200


def test_a_body_of_another_form_is_refused(server: ServerProcess) -> None:
    header = {"inference-header-content-length": "9999"}
    reply = server.post("/v2/models/fake/infer", {"inputs": [USER, HISTORY]}, header)
    assert (reply.status, reply.body["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("path", ["/v2/models/fake/infer", "/v1/rank", "/v1/users:prefetch"])
def test_a_compressed_body_is_refused_with_the_remedy(server: ServerProcess, path: str) -> None:
    reply = server.post(path, b"\x1f\x8b\x08", {"content-encoding": "gzip"})
    assert (reply.status, reply.body["code"]) == (415, "unsupported_body")
    assert "as it is" in reply.body["error"]


def held(server: ServerProcess, user_id: str) -> socket.socket:
    """A connection whose request is never answered."""
    body = json.dumps({"user_id": user_id, "history": [], "candidates": [1]}).encode()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    client.sendall(
        b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    return client


def waiting(server: ServerProcess) -> int:
    return int(server.get("/v1/status").body["requests_waiting"])


def test_a_client_that_leaves_gives_its_request_up(server: ServerProcess) -> None:
    client = held(server, "hold-leave")
    eventually(lambda: waiting(server) == 1, "the request is pending")
    client.close()
    eventually(lambda: waiting(server) == 0, "the request is gone")


def test_a_full_queue_answers_429_with_retry_after(server: ServerProcess) -> None:
    clients = [held(server, f"hold{number}") for number in range(200)]
    try:
        eventually(lambda: waiting(server) == 200, "the queue is full")
        reply = server.post("/v1/rank", {"user_id": "u", "history": [], "candidates": [1]})
        assert (reply.status, reply.body["code"], reply.body["limit"]) == (429, "overloaded", 200)
        assert reply.headers["retry-after"] == "2"
    finally:
        for client in clients:
            client.close()
    eventually(lambda: waiting(server) == 0, "the queue is empty")


def test_a_thousand_concurrent_requests_all_end(server: ServerProcess) -> None:
    barrier = threading.Barrier(50)

    def send(worker: int) -> list[Reply]:
        barrier.wait()
        body = {
            "requests": [
                {"user_id": f"slow{worker}-{n}", "history": [n], "candidates": [0]}
                for n in range(20)
            ]
        }
        return [server.post("/v1/rank", body)]

    with ThreadPoolExecutor(50) as pool:
        replies = [reply for part in pool.map(send, range(50)) for reply in part]
    results = [result for reply in replies for result in reply.body["responses"]]
    assert len(results) == 1000
    assert {result.get("status", 200) for result in results} <= {200, 429}
    for number, result in enumerate(results):
        if "scores" in result:
            assert result["scores"][0][0] == (number % 20) * 1000.0
    eventually(lambda: waiting(server) == 0, "the queue is empty")


def test_metrics_are_prometheus_text(server: ServerProcess) -> None:
    before = metric(server, "mtserve_requests_total", task="rank", outcome="ok")
    server.post("/v1/rank", {"user_id": "u", "history": [1], "candidates": [2]})
    assert metric(server, "mtserve_requests_total", task="rank", outcome="ok") == before + 1
    assert metric(server, "mtserve_queue_seconds_count") > 0
    assert metric(server, "mtserve_queue_seconds_bucket", le="+Inf") == metric(
        server, "mtserve_queue_seconds_count"
    )
    assert metric(server, "mtserve_http_requests_total", route="rank", status="200") >= 1
    assert metric(server, "mtserve_heartbeat_age_seconds") < 60


def test_every_request_has_an_access_line(server: ServerProcess) -> None:
    server.post(
        "/v1/rank", {"user_id": "secret-user", "history": [1], "candidates": [2]},
        {"x-request-id": "logged-1"},
    )  # fmt: skip
    eventually(lambda: "logged-1" in server.log, "the line is there")
    line = next(line for line in server.log.splitlines() if "logged-1" in line)
    assert "POST /v1/rank 200" in line
    assert "computed_tokens=1" in line
    assert "secret-user" not in server.log


def test_a_unix_socket_is_served(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with ServerProcess(tmp_path, "--uds", str(path), fake=True) as running:
        eventually(lambda: "ready:" in running.log, "ready")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConfigError, match="another server listens there"):
            bind(ServerConfig(uds=str(path)))
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(stale))
    bind(ServerConfig(uds=str(stale))).close()
