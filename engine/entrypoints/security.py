"""Keys: who may use which route, for HTTP and for gRPC alike.

A key comes as `Authorization: Bearer KEY` or as `x-api-key: KEY`. Keys are compared as digests, all
of them every time, so the time an answer takes says nothing about them. Nothing here ever puts a
key into a message.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from engine.entrypoints.config import SecurityConfig, ServerConfig
from engine.entrypoints.routes.routing import Access
from engine.errors import ConfigError, Forbidden, Unauthorized

HeaderText = str | bytes


class Authenticator:
    """Decides by the keys of a configuration. Immutable; any thread may ask."""

    def __init__(self, config: SecurityConfig) -> None:
        """Raises ConfigError for a key file that cannot be read and for a key of an odd form."""
        self._client = _digests(config.api_key, config.api_key_file, "api_key")
        self._admin = _digests(config.admin_api_key, config.admin_api_key_file, "admin_api_key")

    @property
    def has_keys(self) -> bool:
        return bool(self._client or self._admin)

    def authorize(self, headers: Iterable[tuple[HeaderText, HeaderText]], access: Access) -> None:
        """Let a request with these headers (names in lower case) pass, or not.

        Raises Unauthorized without a known key, Forbidden for a client's key on an admin route.
        """
        if access is Access.OPEN or not self._needs_key(access):
            return
        presented = [_digest(key) for key in _keys_of(headers)]
        if _is_among(presented, self._admin):
            return
        if _is_among(presented, self._client):
            if access is Access.ADMIN and self._admin:
                raise Forbidden("this route needs an admin key, the key sent is a client's")
            return
        if presented:
            raise Unauthorized("the key is not known: send one of this server's keys")
        raise Unauthorized("a key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`")

    def _needs_key(self, access: Access) -> bool:
        return bool(self._client or (access is Access.ADMIN and self._admin))


def _keys_of(headers: Iterable[tuple[HeaderText, HeaderText]]) -> list[bytes]:
    """Every key that was sent; a proxy may have put its own Authorization beside `x-api-key`."""
    keys = []
    for name, value in headers:
        name_text, content = _bytes(name), _bytes(value)
        if name_text == b"x-api-key":
            keys.append(content.strip())
        elif name_text == b"authorization":
            scheme, _, credentials = content.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(credentials.strip())
    return keys


def _bytes(text: HeaderText) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_among(presented: list[bytes], known: tuple[bytes, ...]) -> bool:
    found = False
    for one in presented:
        for other in known:
            found |= hmac.compare_digest(one, other)
    return found


def _digests(keys: tuple[str, ...], path: str | None, name: str) -> tuple[bytes, ...]:
    found = [*keys]
    if path is not None:
        in_file = _read_keys(path, name)
        if not in_file:
            raise ConfigError(f"{name}_file {path} has no key: write one a line")
        found += in_file
    for key in found:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"a key of {name} is empty or has blanks or odd characters")
    return tuple(_digest(key.encode()) for key in found)


def _read_keys(path: str, name: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{name}_file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}_file {path} is no text") from error
    stripped = (line.strip() for line in lines)
    return [line for line in stripped if line and not line.startswith("#")]


def exposure_warning(config: ServerConfig, authenticator: Authenticator) -> str | None:
    """What to warn of at start: an address that others reach, and no key; None if all is well."""
    is_closed = authenticator.has_keys or config.security.tls_client_ca is not None
    is_on_host = config.uds is None or config.grpc_port is not None  # gRPC has no Unix socket
    if not is_on_host or is_closed or _is_loopback(config.host):
        return None
    return (
        f"listening on {config.host} WITHOUT A KEY: everyone who reaches this address can use "
        "all routes. Give api_key_file (and admin_api_key_file), or listen on 127.0.0.1"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
