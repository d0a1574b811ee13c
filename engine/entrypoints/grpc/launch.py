"""The gRPC server if one is wanted; the one place that needs no grpcio to be imported."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from engine.async_engine import AsyncEngine
from engine.entrypoints.config import ServerConfig
from engine.errors import ConfigError


class GrpcFace(Protocol):
    """See `server.GrpcServer`."""

    async def start(self) -> None: ...

    async def stop(self, grace_s: float) -> None: ...


def grpc_server(engine: AsyncEngine, config: ServerConfig) -> GrpcFace | None:
    """A server that is not started yet; None when no port is configured.

    Raises ConfigError when grpcio is not installed, and for keys that cannot be read.
    """
    if config.grpc_port is None:
        return None
    try:
        server = importlib.import_module("engine.entrypoints.grpc.server")
    except ImportError as error:
        raise ConfigError(
            f"grpc_port is {config.grpc_port}, but gRPC cannot be loaded ({error}): "
            "pip install mtserve[grpc]"
        ) from error
    return cast(GrpcFace, server.GrpcServer(engine, config))
