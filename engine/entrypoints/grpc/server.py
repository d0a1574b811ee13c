"""The gRPC server: its address, its bounds, its start and its end."""

from __future__ import annotations

import logging

import grpc

from engine.async_engine import AsyncEngine
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.grpc.health import HealthService
from engine.entrypoints.grpc.service import SERVICE, Authorize, InferenceService
from engine.errors import ConfigError

log = logging.getLogger("engine.server")


class GrpcServer:
    """Calls in the event loop that starts it, beside HTTP. Owned by that loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig, authorize: Authorize) -> None:
        self._engine = engine
        self._config = config
        self._authorize = authorize
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
        inference = InferenceService(self._engine, config, self._authorize)
        health = HealthService(self._engine, config.heartbeat_timeout_s, (SERVICE,))
        server.add_generic_rpc_handlers((inference.handlers(), health.handlers()))
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen for gRPC on {address}: it is taken or is no address of this machine"
            ) from error
        await server.start()
        self._server = server
        log.info("listening on grpc://%s:%d", host, port)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and cut off those that are left after `grace_s`."""
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None
