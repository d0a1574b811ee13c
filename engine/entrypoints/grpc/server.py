"""The gRPC server: its address, its bounds, its start and its end."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc

from engine.async_engine import AsyncEngine
from engine.entrypoints.config import SecurityConfig, ServerConfig
from engine.entrypoints.grpc.health import HealthService
from engine.entrypoints.grpc.service import SERVICE, InferenceService
from engine.errors import ConfigError

log = logging.getLogger("engine.server")


class GrpcServer:
    """Calls in the event loop that starts it, beside HTTP. Owned by that loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        """Raises ConfigError for keys that cannot be read."""
        self._config = config
        self._inference = InferenceService(engine, config)
        self._health = HealthService(engine, config.heartbeat_timeout_s, (SERVICE,))
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address is taken or wrong."""
        config = self._config
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ),
            maximum_concurrent_rpcs=config.grpc_max_calls,
        )
        server.add_generic_rpc_handlers((self._inference.handlers(), self._health.handlers()))
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        credentials = _credentials(config.security)
        try:
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen for gRPC on {address}: it is taken or is no address of this machine"
            ) from error
        await server.start()
        self._server = server
        scheme = "grpc" if credentials is None else "grpcs"
        log.info("listening on %s://%s:%d", scheme, host, port)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and cut off those that are left after `grace_s`."""
        if self._server is not None:
            self._health.end_watches()
            await self._server.stop(grace_s)
            self._server = None


def _credentials(config: SecurityConfig) -> grpc.ServerCredentials | None:
    """TLS with the files that the HTTP server has been started with; None without."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    pair = (Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes())
    client_ca = config.tls_client_ca
    return grpc.ssl_server_credentials(
        [pair],
        root_certificates=None if client_ca is None else Path(client_ca).read_bytes(),
        require_client_auth=client_ca is not None,
    )
