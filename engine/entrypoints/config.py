"""Settings of the server; the engine's own are in `engine.config`."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from engine.config import EngineConfig, require

_HIDDEN = "(hidden)"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may use the server, and how it is encrypted.

    Without any key everything is open. Health and metrics never need a key. A command line can be
    read by other users of the machine, so keys are better kept in a file.

    Attributes:
        api_key: Keys that open the client routes; the flag may be given several times.
        api_key_file: File with more of them, one a line; `#` starts a comment.
        admin_api_key: Keys that open every route. Without one, admin routes take the client keys.
        admin_api_key_file: File with more of them.
        tls_cert: Certificate chain (PEM); with `tls_key` the server speaks TLS 1.2 or newer only.
        tls_key: Private key of the certificate (PEM), not encrypted.
        tls_client_ca: Certificates (PEM) one of which must have signed the client's own: without
            such a certificate no connection is made, not even for health.
    """

    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    admin_api_key: tuple[str, ...] = ()
    admin_api_key_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None

    def __post_init__(self) -> None:
        require(
            (self.tls_cert is None) == (self.tls_key is None),
            "tls_cert and tls_key go together: give both or neither",
        )
        require(
            self.tls_client_ca is None or self.tls_cert is not None,
            "tls_client_ca is given without tls_cert and tls_key: client certificates need TLS",
        )

    def __repr__(self) -> str:
        return f"SecurityConfig({msgspec.structs.asdict(self.without_keys())})"

    def without_keys(self) -> SecurityConfig:
        """The same with every key hidden, for logs."""
        return msgspec.structs.replace(
            self,
            api_key=(_HIDDEN,) * len(self.api_key),
            admin_api_key=(_HIDDEN,) * len(self.admin_api_key),
        )


class ConnectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one HTTP connection may cost.

    Attributes:
        max_connections: Open connections; one more is answered 503 and closed. Lowered at start,
            with a warning, when the process may not open that many files.
        max_header_bytes: Request line and headers of one request; more is answered 431.
        max_header_count: Headers of one request.
        header_timeout_s: From a connection's or a request's first moment to the end of its
            headers, TLS handshake included; then 408 and close.
        body_idle_timeout_s: Longest pause of a body that is being sent; then 408 and close.
        body_timeout_s: From the end of the headers to the end of the body.
        send_timeout_s: A client that takes its answer slower than 64 KiB in that time is cut off.
        keep_alive_s: How long an idle connection stays open.
    """

    max_connections: int = 16384
    max_header_bytes: int = 32768
    max_header_count: int = 100
    header_timeout_s: float = 10.0
    body_idle_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 20.0
    keep_alive_s: float = 75.0

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_header_bytes", "max_header_count"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: give at least 1")
        for name in ("header_timeout_s", "body_idle_timeout_s", "body_timeout_s",
                     "send_timeout_s", "keep_alive_s"):  # fmt: skip
            require(
                0 < getattr(self, name) < float("inf"),
                f"{name} is {getattr(self, name)}: give seconds above 0",
            )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the server listens and what it accepts.

    Attributes:
        host: Address to listen on; 0.0.0.0 for all interfaces.
        port: TCP port; 0 takes a free one, which the log names.
        uds: Path of a Unix socket to listen on instead of host and port.
        grpc_port: TCP port for gRPC on the same host, 0 takes a free one; null: no gRPC. Needs
            the extra `grpc`.
        grpc_max_calls: Calls over gRPC at the same time; more end with RESOURCE_EXHAUSTED.
        max_body_bytes: Largest request body; more is answered 413 without reading it.
        max_bodies_bytes: Bodies of all requests in progress together; more is answered 429.
        max_requests_per_call: Requests in one `{"requests": [...]}` body, users in one prefetch.
        routing_header: Header that may carry the user id, so that proxies can route by it.
        drain_timeout_s: How long pending requests may take after SIGTERM.
        heartbeat_timeout_s: Age of the core's last heartbeat at which it no longer counts as
            alive.
        access_log_format: One line per request, as text among the other log lines or as JSON
            lines on standard output; or none.
        log_user_ids: Name users in the access log.
        log_level: What the server and the core log.
        connections: What one HTTP connection may cost.
        security: Who may use the server, and how it is encrypted.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    grpc_port: int | None = None
    grpc_max_calls: int = 1024
    max_body_bytes: int = 64 << 20
    max_bodies_bytes: int = 1 << 30
    max_requests_per_call: int = 256
    routing_header: str = "x-session-id"
    drain_timeout_s: float = 30.0
    heartbeat_timeout_s: float = 1.5
    access_log_format: Literal["text", "json", "off"] = "text"
    log_user_ids: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    connections: ConnectionConfig = ConnectionConfig()
    security: SecurityConfig = SecurityConfig()

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"port is {self.port}: give 0 to 65535")
        require(
            self.grpc_port is None or 0 <= self.grpc_port <= 65535,
            f"grpc_port is {self.grpc_port}: give 0 to 65535",
        )
        for name in ("grpc_max_calls", "max_body_bytes", "max_requests_per_call"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: give at least 1")
        require(
            self.max_bodies_bytes >= self.max_body_bytes,
            f"max_bodies_bytes is {self.max_bodies_bytes}: give at least "
            f"max_body_bytes={self.max_body_bytes}",
        )
        require(
            _HEADER_NAME.fullmatch(self.routing_header) is not None,
            f"routing_header is {self.routing_header!r}: give a header's name in lower case",
        )
        require(self.drain_timeout_s >= 0, f"drain_timeout_s is {self.drain_timeout_s}: give >= 0")
        require(
            self.heartbeat_timeout_s >= 1,
            f"heartbeat_timeout_s is {self.heartbeat_timeout_s}: give at least 1, "
            "heartbeats come every 0.2 s",
        )


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that `mtserve serve` was told, after defaults, file and command line.

    Attributes:
        model: Model directory; null serves the built-in model with random weights.
        server: The server.
        engine: The engine.
    """

    model: str | None = None
    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()

    def without_keys(self) -> ServeConfig:
        """The same with every key hidden, for logs."""
        security = self.server.security.without_keys()
        server = msgspec.structs.replace(self.server, security=security)
        return msgspec.structs.replace(self, server=server)
