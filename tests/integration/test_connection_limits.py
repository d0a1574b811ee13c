"""What one connection may cost: slow, endless, malformed and silent clients, over a fake core."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.raw_http import HEALTH, answer, connected, post, status_of, until_closed
from tests.integration.server_process import ServerProcess, eventually

RANK = {"user_id": "u", "history": [1], "candidates": [2]}
HOLD = {"user_id": "hold", "history": [1], "candidates": [2]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = (
        "--max-body-bytes 100000 --max-header-bytes 4096 --max-header-count 20 "
        "--header-timeout-s 1 --body-idle-timeout-s 1.5 --body-timeout-s 3 --send-timeout-s 1 "
        "--keep-alive-s 1 --max-connections 40"
    )
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, *flags.split(), fake=True) as running:
        yield running.until_ready()


def waiting(server: ServerProcess) -> int:
    return int(server.get("/v1/status").body["requests_waiting"])


def faults(server: ServerProcess, reason: str) -> float:
    name = f'mtserve_http_connection_faults_total{{reason="{reason}"}} '
    lines = server.get("/metrics").body.decode().splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_headers_that_come_a_byte_at_a_time_are_cut_off(server: ServerProcess) -> None:
    before = faults(server, "request_timeout")
    with connected(server) as client:
        client.settimeout(0.1)
        received = b""
        for byte in b"GET /v2/health/live HTTP/1.1\r\nhost: " + b"x" * 600:
            try:
                client.sendall(bytes([byte]))
                received = client.recv(4096)
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            break
        assert status_of(received) == 408
        assert b"header_timeout_s=1" in received
    assert faults(server, "request_timeout") == before + 1


def test_a_connection_that_says_nothing_is_closed(server: ServerProcess) -> None:
    with connected(server) as client:
        assert until_closed(client) == b""


def test_an_idle_connection_is_closed_after_its_time(server: ServerProcess) -> None:
    with connected(server) as client:
        client.sendall(HEALTH)
        assert answer(client)[0] == 200
        assert until_closed(client) == b""


@pytest.mark.parametrize(
    ("sent", "names"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 5000 + b"\r\n\r\n", b"max_header_bytes=4096"),
        (b"GET /" + b"y" * 5000 + b" HTTP/1.1\r\n\r\n", b"max_header_bytes=4096"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 600_000, b"max_header_bytes=4096"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 21 + b"\r\n", b"max_header_count=20"),
        (b"\r\n" * 300_000, b"max_header_bytes=4096"),
    ],
    ids=["value", "path", "endless value", "count", "empty lines"],
)
def test_headers_that_are_too_large_are_refused(
    server: ServerProcess, sent: bytes, names: bytes
) -> None:
    with connected(server) as client:
        client.sendall(sent)
        received = until_closed(client)
    assert status_of(received) == 431
    assert names in received


@pytest.mark.parametrize("pace", ["silent", "dripping"])
def test_a_body_that_does_not_come_is_given_up(server: ServerProcess, pace: str) -> None:
    with connected(server) as client:
        client.sendall(b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-length: 90000\r\n\r\n{")
        if pace == "dripping":
            client.settimeout(0.2)
            while not _has_answer(client):
                client.sendall(b" ")
            client.settimeout(60)
        status, content = answer(client)
    assert status == 408
    body = json.loads(content)
    assert body["code"] == "request_timeout"
    assert body["request_id"]


def _has_answer(client: socket.socket) -> bool:
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


def test_a_body_of_a_gigabyte_is_refused_unread(server: ServerProcess) -> None:
    with connected(server) as client:
        client.sendall(
            b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n" + b" " * 1000
        )
        status, body = answer(client)
        assert (status, json.loads(body)["limit"]) == (413, 100_000)
        assert until_closed(client) == b""


def test_an_unread_body_does_not_hide_the_answer(server: ServerProcess) -> None:
    with connected(server) as client:
        client.sendall(b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n")
        client.sendall(b" " * 400_000)
        assert answer(client)[0] == 404
        assert until_closed(client) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/rank HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"POST /v1/rank HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/rank HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
        b"POST /v1/rank HTTP/1.1\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/rank HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/rank HTTP/1.1\r\ncontent-length : 2\r\n\r\n{}",
        b"POST /v1/rank HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
        b"POST /v1/rank HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\nx: a\r\n folded\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\nx\x00y: a\r\n\r\n",
        b"GET /v1/status\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00",
    ],
)
def test_what_is_no_plain_request_is_refused_and_the_connection_ends(
    server: ServerProcess, sent: bytes
) -> None:
    with connected(server) as client:
        client.sendall(sent)
        client.sendall(HEALTH)  # would be smuggled in, if the lengths were read otherwise
        received = until_closed(client)
    assert status_of(received) == 400
    assert b"HTTP/1.1 200" not in received
    assert server.get("/v2/health/live").status == 200


def test_endless_chunk_extensions_and_trailers_are_refused(server: ServerProcess) -> None:
    start = b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for rest in (b"1;" + b"x" * 600_000, b"1\r\n{\r\n0\r\nx: " + b"y" * 600_000):
        with connected(server) as client:
            client.sendall(start)
            client.sendall(rest)
            assert status_of(until_closed(client)) == 400


def test_a_trailer_does_not_become_a_header(server: ServerProcess) -> None:
    with connected(server) as client:
        client.sendall(
            b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\nx-request-id: from-the-trailer\r\n\r\n"
        )
        status, body = answer(client)
    assert (status, b"from-the-trailer" in body) == (400, False)


def test_another_protocol_is_not_upgraded_to(server: ServerProcess) -> None:
    with connected(server) as client:
        client.sendall(
            b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\n"
            b"upgrade: websocket\r\n\r\nrest"
        )
        assert status_of(until_closed(client)) == 200


UPGRADE = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAA")


@pytest.mark.parametrize("size", [1, 100_000], ids=["in pieces", "at once"])
def test_a_body_that_comes_with_a_wish_for_another_protocol_is_read(
    server: ServerProcess, size: int
) -> None:
    content = json.dumps(RANK).encode()
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    head = "\r\n".join(
        ["POST /v1/rank HTTP/1.1", "host: x", *UPGRADE, "transfer-encoding: chunked"]
    )
    for request in (post("/v1/rank", RANK, *UPGRADE), head.encode() + b"\r\n\r\n" + chunked):
        with connected(server) as client:
            for start in range(0, len(request), size):
                client.sendall(request[start : start + size])
            status, body = answer(client)
            assert (status, json.loads(body)["scores"]) == (200, [[1002.0, 998.0]])
            assert until_closed(client) == b""


def test_what_follows_a_body_with_such_a_wish_is_not_taken_for_it(server: ServerProcess) -> None:
    with connected(server) as client:
        client.sendall(post("/v1/rank", RANK, *UPGRADE) + post("/v1/rank", b"more"))
        assert answer(client)[0] == 200
        assert until_closed(client) == b""


def test_a_broken_body_with_such_a_wish_is_refused(server: ServerProcess) -> None:
    head = ["POST /v1/rank HTTP/1.1", "host: x", *UPGRADE, "transfer-encoding: chunked"]
    with connected(server) as client:
        client.sendall("\r\n".join([*head, "", "zz\r\n"]).encode())
        assert answer(client)[0] == 400


def test_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
    slow = {"user_id": "slow", "history": [7], "candidates": [0]}
    with connected(server) as client:
        client.sendall(post("/v1/rank", slow) + post("/v1/rank", RANK) + HEALTH)
        first, second, third = (answer(client) for _ in range(3))
    assert json.loads(first[1])["scores"] == [[7000.0, 7000.0]]
    assert json.loads(second[1])["scores"] == [[1002.0, 998.0]]
    assert json.loads(third[1]) == {"live": True}


def test_a_fault_behind_a_pipelined_request_is_told_after_its_answer(
    server: ServerProcess,
) -> None:
    slow = {"user_id": "slow", "history": [7], "candidates": [0]}
    with connected(server) as client:
        client.sendall(post("/v1/rank", slow) + b"nonsense\r\n\r\n")
        assert answer(client)[0] == 200
        assert status_of(until_closed(client)) == 400


def test_too_many_pipelined_requests_end_the_connection(server: ServerProcess) -> None:
    with connected(server) as client:
        client.sendall(HEALTH * 5000)
        received = until_closed(client)
    assert received.count(b"HTTP/1.1 200") == 33
    assert b"32 requests of this connection wait" in received
    assert server.get("/v2/health/live").status == 200


def test_all_pipelined_requests_are_given_up_when_the_client_leaves(server: ServerProcess) -> None:
    with connected(server) as client:
        client.sendall(post("/v1/rank", HOLD) + post("/v1/rank", HOLD))
        eventually(lambda: waiting(server) == 1, "the first is pending")
    eventually(lambda: waiting(server) == 0, "nothing is pending")


def test_a_client_that_closes_its_sending_side_is_answered(server: ServerProcess) -> None:
    with connected(server) as client:
        client.sendall(post("/v1/rank", {"user_id": "slow", "history": [3], "candidates": [0]}))
        client.shutdown(socket.SHUT_WR)
        status, body = answer(client)
        assert (status, json.loads(body)["scores"]) == (200, [[3000.0, 3000.0]])
        assert until_closed(client) == b""


def test_a_client_that_leaves_is_told_from_one_that_only_stopped_sending(
    server: ServerProcess,
) -> None:
    with connected(server) as staying, connected(server) as leaving:
        for client in (staying, leaving):
            client.sendall(post("/v1/rank", HOLD))
        eventually(lambda: waiting(server) == 2, "both are pending")
        staying.shutdown(socket.SHUT_WR)
        leaving.close()
        eventually(lambda: waiting(server) == 1, "the one that left is given up")
        time.sleep(0.7)  # longer than the time between two looks at a half-closed client
        assert waiting(server) == 1
    eventually(lambda: waiting(server) == 0, "the other has left as well")


def test_half_a_request_that_ends_is_forgotten(server: ServerProcess) -> None:
    for sent in (b"GET / HT", b"POST /v1/rank HTTP/1.1\r\ncontent-length: 10\r\n\r\n{"):
        with connected(server) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            assert until_closed(client) == b""


def test_a_client_that_never_reads_is_cut_off(server: ServerProcess) -> None:
    before = faults(server, "answer_not_taken")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        body = {"user_id": "u", "history": [1], "topk": 900_000}
        client.sendall(post("/v1/retrieve", body))
        eventually(lambda: faults(server, "answer_not_taken") == before + 1, "it is cut off")
        client.settimeout(60)
        assert not until_closed(client).endswith(b"}")


def test_resets_leave_nothing_behind(server: ServerProcess) -> None:
    for _ in range(20):
        with connected(server) as client:
            client.sendall(post("/v1/rank", HOLD))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    eventually(lambda: waiting(server) == 0, "all are given up")


def test_more_connections_than_allowed_are_turned_away(server: ServerProcess) -> None:
    eventually(lambda: _num_open(server) == 1, "only this one is open")
    with ExitStack() as open_ones:
        clients = [open_ones.enter_context(connected(server)) for _ in range(39)]
        clients[0].sendall(HEALTH)
        assert answer(clients[0])[0] == 200
        clients.append(open_ones.enter_context(connected(server)))
        with connected(server) as one_more:
            received = until_closed(one_more)
        assert status_of(received) == 503
        assert b"max_connections=40" in received
    eventually(lambda: _num_open(server) == 1, "they are closed")


def _num_open(server: ServerProcess) -> int:
    lines = server.get("/metrics").body.decode().splitlines()
    (line,) = (line for line in lines if line.startswith("mtserve_http_connections "))
    return int(float(line.split()[1]))


@pytest.mark.parametrize(
    "body",
    [
        b'{"user_id":"u","history":' + b"[" * 40_000,
        b'{"user_id":"u","history":' + b"[" * 20_000 + b"]" * 20_000 + b',"candidates":[1]}',
        b'{"user_id":"u","history":{"item":' + b'{"a":' * 10_000,
        b"[" * 90_000,
        b'{"requests":' + b"[" * 40_000,
        b'{"inputs":' + b"[" * 40_000,
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/rank", "/v1/retrieve", "/v1/users:prefetch", "/v2/models/fake/infer"]
)
def test_deep_nesting_is_an_error_of_the_request(
    server: ServerProcess, path: str, body: bytes
) -> None:
    reply = server.post(path, body)
    assert (reply.status, reply.body["code"]) == (400, "invalid_request")


def test_bodies_of_all_requests_are_bounded_together(tmp_path: Path) -> None:
    flags = ["--max-body-bytes", "60000", "--max-bodies-bytes", "100000"]
    with ServerProcess(tmp_path, *flags, fake=True) as server:
        server.until_ready()
        held = json.dumps(HOLD).encode() + b" " * 55_000
        with connected(server) as client:
            client.sendall(post("/v1/rank", held))
            eventually(lambda: waiting(server) == 1, "the first is held")
            reply = server.post("/v1/rank", json.dumps(RANK).encode() + b" " * 55_000)
            assert (reply.status, reply.body["code"]) == (429, "overloaded")
            assert reply.body["limit"] == 100_000
            assert server.post("/v1/rank", RANK).status == 200
        eventually(lambda: waiting(server) == 0, "the first is given up")
        assert server.post("/v1/rank", json.dumps(RANK).encode() + b" " * 55_000).status == 200


def test_a_limit_that_files_do_not_allow_is_lowered_with_a_warning(tmp_path: Path) -> None:
    script = 'ulimit -n 200; exec "$0" -m engine.entrypoints.api_server --port 0 "$@"'
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-c", script, sys.executable, "--max-connections", "5000"],
            stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        eventually(lambda: "listening on" in log.read_text(), "it listens")
        assert "max_connections is 5000, but this process may open 200 files" in log.read_text()
    finally:
        process.terminate()
        process.wait(60)
