"""Settings of the server; the engine's own are in `engine.config`."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import EngineConfig, require


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the server listens and what it accepts.

    Attributes:
        host: Address to listen on; 0.0.0.0 for all interfaces.
        port: TCP port; 0 takes a free one, which the log names.
        uds: Path of a Unix socket to listen on instead of host and port.
        max_body_bytes: Largest request body; more is answered 413 while it is read.
        max_requests_per_call: Requests in one `{"requests": [...]}` body.
        drain_timeout_s: How long pending requests may take after SIGTERM.
        heartbeat_timeout_s: Age of the core's last heartbeat at which it no longer counts as
            alive.
        keep_alive_s: How long an idle connection stays open.
        access_log: Log one line per request.
        log_level: What the server and the core log.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    max_body_bytes: int = 64 << 20
    max_requests_per_call: int = 256
    drain_timeout_s: float = 30.0
    heartbeat_timeout_s: float = 1.5
    keep_alive_s: int = 75
    access_log: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"port is {self.port}: give 0 to 65535")
        for name in ("max_body_bytes", "max_requests_per_call", "keep_alive_s"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: give at least 1")
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
