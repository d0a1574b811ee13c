"""The standard health service, `grpc.health.v1.Health`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from engine.async_engine import AsyncEngine
from engine.entrypoints.readiness import why_not_ready

SERVICE = "grpc.health.v1.Health"
WATCH_PERIOD_S = 0.25

_Status = health_pb2.HealthCheckResponse.ServingStatus


class HealthService:
    """Serving = a request would be taken now. Owned by the server's event loop.

    Known names are "" (the server) and the inference service's.
    """

    def __init__(
        self, engine: AsyncEngine, heartbeat_timeout_s: float, services: tuple[str, ...]
    ) -> None:
        self._engine = engine
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._names = frozenset(("", SERVICE, *services))
        self._is_over = False

    def end_watches(self) -> None:
        """Let every watch end, the next time it looks: they would never by themselves."""
        self._is_over = True

    def handlers(self) -> grpc.GenericRpcHandler:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        parse = health_pb2.HealthCheckRequest.FromString
        write = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(SERVICE, {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, parse, write),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, parse, write),
        })  # fmt: skip

    def _status(self, name: str) -> int:
        if name not in self._names:
            return int(_Status.SERVICE_UNKNOWN)
        is_ready = why_not_ready(self._engine, self._heartbeat_timeout_s) is None
        return int(_Status.SERVING if is_ready else _Status.NOT_SERVING)

    async def _check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no service {request.service!r:.80} is here"
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        told: int | None = None
        while not self._is_over:
            status = self._status(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(WATCH_PERIOD_S)
