"""Which key opens which route, and what is said of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.entrypoints.config import SecurityConfig, ServeConfig, ServerConfig
from engine.entrypoints.protocol import to_json
from engine.entrypoints.routes.routing import Access
from engine.entrypoints.security import Authenticator, exposure_warning
from engine.errors import ConfigError, Forbidden, Unauthorized

CLIENT, ADMIN = "client-key", "admin-key"
BOTH = SecurityConfig(api_key=("other-key", CLIENT), admin_api_key=(ADMIN,))


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", b"Bearer " + key.encode())]


def outcome(config: SecurityConfig, headers: list[tuple[bytes, bytes]], access: Access) -> int:
    try:
        Authenticator(config).authorize(headers, access)
    except (Unauthorized, Forbidden) as error:
        return error.status
    return 200


def test_errors_do_not_repeat_a_key() -> None:
    for key in ("wrong-key", CLIENT):
        with pytest.raises((Unauthorized, Forbidden)) as refused:
            Authenticator(BOTH).authorize(bearer(key), Access.ADMIN)
        for secret in (CLIENT, ADMIN, "wrong-key"):
            assert secret not in refused.value.message


@pytest.mark.parametrize(
    ("key", "opened", "client", "admin"),
    [
        (None, 200, 401, 401),
        ("wrong-key", 200, 401, 401),
        (CLIENT, 200, 200, 403),
        ("other-key", 200, 200, 403),
        (ADMIN, 200, 200, 200),
    ],
)
def test_keys_open_routes(key: str | None, opened: int, client: int, admin: int) -> None:
    headers = [] if key is None else bearer(key)
    assert outcome(BOTH, headers, Access.OPEN) == opened
    assert outcome(BOTH, headers, Access.CLIENT) == client
    assert outcome(BOTH, headers, Access.ADMIN) == admin


def test_without_keys_everything_is_open() -> None:
    for access in Access:
        assert outcome(SecurityConfig(), [], access) == 200
    assert not Authenticator(SecurityConfig()).has_keys


def test_without_an_admin_key_the_client_keys_open_admin_routes() -> None:
    config = SecurityConfig(api_key=(CLIENT,))
    assert outcome(config, bearer(CLIENT), Access.ADMIN) == 200
    assert outcome(config, [], Access.ADMIN) == 401


def test_with_an_admin_key_alone_only_admin_routes_are_closed() -> None:
    config = SecurityConfig(admin_api_key=(ADMIN,))
    assert outcome(config, [], Access.CLIENT) == 200
    assert outcome(config, [], Access.ADMIN) == 401
    assert outcome(config, bearer(ADMIN), Access.ADMIN) == 200


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        (b"x-api-key", b"client-key", 200),
        (b"x-api-key", b" client-key ", 200),
        (b"authorization", b"bearer client-key", 200),
        (b"authorization", b"Bearer   client-key", 200),
        (b"authorization", b"client-key", 401),
        (b"authorization", b"Basic client-key", 401),
        (b"authorization", b"Bearer", 401),
        (b"authorization", b"Bearer ", 401),
        (b"x-api-key", b"", 401),
        (b"x-api-key", b"client-ke", 401),
        (b"x-api-key", b"client-key\xff", 401),
        (b"cookie", b"client-key", 401),
    ],
)
def test_a_key_comes_in_two_ways(name: bytes, value: bytes, status: int) -> None:
    assert outcome(BOTH, [(name, value)], Access.CLIENT) == status


def test_a_key_beside_a_proxys_credentials_counts() -> None:
    headers = [(b"authorization", b"Basic cHJveHk6eA=="), (b"x-api-key", b"client-key")]
    assert outcome(BOTH, headers, Access.CLIENT) == 200


def test_headers_may_be_text_as_grpc_has_them() -> None:
    authenticator = Authenticator(BOTH)
    authenticator.authorize([("authorization", "Bearer client-key")], Access.CLIENT)
    with pytest.raises(Forbidden):
        authenticator.authorize([("x-api-key", CLIENT)], Access.ADMIN)


def test_keys_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the feed\nfile-key\n\n  spaced-key  \n")
    config = SecurityConfig(api_key=(CLIENT,), api_key_file=str(path))
    for key in (CLIENT, "file-key", "spaced-key"):
        assert outcome(config, bearer(key), Access.CLIENT) == 200
    assert outcome(config, bearer("# of the feed"), Access.CLIENT) == 401


@pytest.mark.parametrize(
    ("content", "names"),
    [(b"", "has no key"), (b"# only this\n", "has no key"), (b"two words\n", "blanks"),
     (b"\xff\xfe", "no text"), (None, "cannot be read")],
)  # fmt: skip
def test_a_key_file_that_cannot_be_used_is_a_config_error(
    tmp_path: Path, content: bytes | None, names: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=names):
        Authenticator(SecurityConfig(admin_api_key_file=str(path)))


def test_an_empty_key_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="api_key is empty"):
        Authenticator(SecurityConfig(api_key=("",)))


def test_the_logged_configuration_hides_keys() -> None:
    config = ServeConfig(server=ServerConfig(security=BOTH))
    logged = to_json(config.without_keys()).decode()
    assert '"api_key":["(hidden)","(hidden)"],' in logged
    for text in (logged, repr(config)):
        assert CLIENT not in text
        assert ADMIN not in text
    assert config.server.security == BOTH


@pytest.mark.parametrize(
    ("host", "is_warned"),
    [("127.0.0.1", False), ("::1", False), ("localhost", False), ("127.8.9.1", False),
     ("0.0.0.0", True), ("::", True), ("10.0.0.7", True), ("server.example", True)],
)  # fmt: skip
def test_an_open_server_that_others_reach_is_warned_of(host: str, is_warned: bool) -> None:
    server = ServerConfig(host=host)
    warning = exposure_warning(server, Authenticator(server.security))
    assert (warning is not None) == is_warned
    assert exposure_warning(server, Authenticator(BOTH)) is None
    socket = ServerConfig(host=host, uds="/run/socket")
    assert exposure_warning(socket, Authenticator(socket.security)) is None
    grpc = ServerConfig(host=host, uds="/run/socket", grpc_port=0)
    assert (exposure_warning(grpc, Authenticator(grpc.security)) is not None) == is_warned


@pytest.mark.parametrize(
    "options", [{"tls_cert": "c"}, {"tls_key": "k"}, {"tls_client_ca": "a"}], ids=str
)
def test_tls_options_go_together(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="tls_"):
        SecurityConfig(**options)
