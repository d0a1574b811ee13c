"""Keys and TLS of a real server process."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.entrypoints.config import SecurityConfig
from engine.entrypoints.tls import tls_context
from engine.errors import ConfigError
from tests.integration.certificates import Authority, Signed
from tests.integration.raw_http import HEALTH, answer, connected, until_closed
from tests.integration.server_process import ServerProcess, eventually

RANK = {"user_id": "u", "history": [1], "candidates": [2]}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "admin").write_text("the-admin-key\n")
    flags = ["--api-key", "first-key", "--api-key", "second-key",
             "--admin-api-key-file", str(folder / "admin")]  # fmt: skip
    with ServerProcess(folder, *flags, fake=True) as running:
        yield running.until_ready()


@pytest.mark.parametrize(
    "path",
    ["/v2/health/live", "/v2/health/ready", "/v2/models/fake/ready", "/metrics"],
)
def test_health_and_metrics_need_no_key(guarded: ServerProcess, path: str) -> None:
    assert guarded.get(path).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v2"), ("GET", "/v2/models/fake"), ("GET", "/v1/status"), ("POST", "/v1/rank"),
     ("POST", "/v1/users:prefetch"), ("POST", "/v2/models/fake/infer")],
)  # fmt: skip
def test_everything_else_needs_one(guarded: ServerProcess, method: str, path: str) -> None:
    body = RANK if method == "POST" else None
    reply = guarded.request(method, path, body)
    assert (reply.status, reply.body["code"]) == (401, "unauthorized")
    assert reply.headers["www-authenticate"] == 'Bearer realm="mtserve"'
    assert guarded.request(method, path, body, {"x-api-key": "wrong"}).status == 401
    for key in ("first-key", "second-key", "the-admin-key"):
        reply = guarded.request(method, path, body, {"authorization": f"Bearer {key}"})
        assert reply.status != 401


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/users"), ("POST", "/v1/cache:reset"), ("POST", "/v1/weights:load"),
     ("POST", "/v1/weights:activate"), ("POST", "/v1/weights:retire"),
     ("POST", "/v1/catalogue:load")],
)  # fmt: skip
def test_control_needs_an_admin_key(guarded: ServerProcess, method: str, path: str) -> None:
    client = guarded.request(method, path, None, {"x-api-key": "first-key"})
    assert (client.status, client.body["code"]) == (403, "forbidden")
    admin = guarded.request(method, path, None, {"x-api-key": "the-admin-key"})
    assert admin.status not in (401, 403)
    assert guarded.request(method, path).status == 401


def test_a_stranger_cannot_make_the_server_read_a_body(guarded: ServerProcess) -> None:
    with connected(guarded) as client:
        client.sendall(b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-length: 50000000\r\n\r\n")
        status, body = answer(client)
        assert (status, json.loads(body)["code"]) == (401, "unauthorized")
        assert until_closed(client) == b""


def test_keys_are_not_in_the_log(guarded: ServerProcess) -> None:
    guarded.get("/v1/status")
    for key in ("first-key", "second-key", "the-admin-key"):
        assert key not in guarded.log
    assert '"api_key":["(hidden)","(hidden)"]' in guarded.log


def test_an_open_server_on_all_interfaces_says_so(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--host", "0.0.0.0", fake=True) as server:
        assert "WITHOUT A KEY" in server.log


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def signed(authority: Authority) -> Signed:
    return authority.sign("server")


def client_context(authority: Authority, own: Signed | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.cert))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def status_over_tls(server: ServerProcess, context: ssl.SSLContext) -> int:
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as client,
    ):
        client.sendall(HEALTH)
        return answer(client)[0]


def tls_flags(signed: Signed) -> list[str]:
    return ["--tls-cert", str(signed.cert), "--tls-key", str(signed.key)]


def test_tls_is_spoken_and_nothing_else(
    tmp_path: Path, authority: Authority, signed: Signed
) -> None:
    with ServerProcess(
        tmp_path, *tls_flags(signed), "--header-timeout-s", "1", fake=True
    ) as server:
        assert f"listening on https://127.0.0.1:{server.port}" in server.log
        context = client_context(authority)
        assert status_over_tls(server, context) == 200
        old = client_context(authority)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert status_over_tls(server, old) == 200
        with connected(server) as client:
            client.sendall(HEALTH)
            assert b"HTTP/1.1" not in until_closed(client)
        with connected(server) as client:  # never begins its handshake
            assert until_closed(client) == b""


def test_clients_show_a_certificate_where_one_is_asked_for(
    tmp_path: Path, authority: Authority, signed: Signed
) -> None:
    flags = [*tls_flags(signed), "--tls-client-ca", str(authority.cert)]
    stranger = Authority(tmp_path, "stranger").sign("client-of-another")
    with ServerProcess(tmp_path, *flags, fake=True) as server:
        assert status_over_tls(server, client_context(authority, authority.sign("client"))) == 200
        for own in (None, stranger):
            with pytest.raises((ssl.SSLError, EOFError, ConnectionError)):
                status_over_tls(server, client_context(authority, own))


def test_files_that_cannot_be_used_are_named(
    tmp_path: Path, authority: Authority, signed: Signed
) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    locked = authority.sign("locked", password=b"secret")
    cert, key, missing = str(signed.cert), str(signed.key), str(tmp_path / "missing")
    for options, names in (
        ({"tls_cert": missing, "tls_key": key}, "tls_cert .*missing cannot be read"),
        ({"tls_cert": cert, "tls_key": missing}, "tls_key .*missing cannot be read"),
        ({"tls_cert": str(nonsense), "tls_key": key}, "no certificate and its key"),
        ({"tls_cert": cert, "tls_key": str(authority.sign("other").key)}, "key values mismatch"),
        ({"tls_cert": str(locked.cert), "tls_key": str(locked.key)}, "is encrypted"),
        ({"tls_cert": cert, "tls_key": key, "tls_client_ca": missing}, "tls_client_ca"),
        ({"tls_cert": cert, "tls_key": key, "tls_client_ca": str(nonsense)}, "tls_client_ca"),
    ):
        with pytest.raises(ConfigError, match=names):
            tls_context(SecurityConfig(**options))


def test_a_wrong_certificate_ends_the_start(tmp_path: Path) -> None:
    flags = ["--tls-cert", str(tmp_path / "no"), "--tls-key", str(tmp_path / "no")]
    with ServerProcess(tmp_path, *flags) as server:
        eventually(lambda: server.process.poll() is not None, "it ends")
        assert server.wait() == 2
    assert "mtserve serve: tls_cert" in server.log
    assert "listening" not in server.log
