"""The calls of `inference.GRPCInferenceService`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc

from engine.async_engine import AsyncEngine
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.grpc import messages
from engine.entrypoints.grpc.inference_pb2 import (
    ModelMetadataRequest,
    ModelReadyRequest,
    ModelReadyResponse,
    ServerLiveRequest,
    ServerLiveResponse,
    ServerMetadataRequest,
    ServerMetadataResponse,
    ServerReadyRequest,
    ServerReadyResponse,
)
from engine.entrypoints.grpc.statuses import (
    Metadata,
    details_of,
    status_code,
    trailing_metadata,
)
from engine.entrypoints.readiness import why_not_live, why_not_ready
from engine.entrypoints.routes.health import ServerMetadata
from engine.entrypoints.routes.models import find_model
from engine.errors import DeadlineExceeded, EngineError, InvalidRequest, UnknownModel

SERVICE = "inference.GRPCInferenceService"
REQUEST_ID = "x-request-id"
MAX_REQUEST_ID = 128

Headers: TypeAlias = Iterable[tuple[str, "str | bytes"]]
Authorize: TypeAlias = Callable[[Headers], None]
"""Raises an EngineError for a caller who may not ask for inference or metadata."""
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

log = logging.getLogger(__name__)


class InferenceService:
    """Owned by the server's event loop. Each call ends with an answer or with one status."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig, authorize: Authorize) -> None:
        self._engine = engine
        self._config = config
        self._authorize = authorize
        self._id_prefix = f"{os.getpid():x}-g{int(time.time()):x}"
        self._numbers = itertools.count(1)

    def handlers(self) -> grpc.GenericRpcHandler:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes.

        ModelInfer gets its bytes as they are, so that a message that cannot be parsed is the
        client's error and not the server's.
        """
        table: dict[str, tuple[Callable[..., Awaitable[Any]], Callable[[bytes], Any] | None]] = {
            "ServerLive": (self._server_live, ServerLiveRequest.FromString),
            "ServerReady": (self._server_ready, ServerReadyRequest.FromString),
            "ModelReady": (self._model_ready, ModelReadyRequest.FromString),
            "ServerMetadata": (self._server_metadata, ServerMetadataRequest.FromString),
            "ModelMetadata": (self._model_metadata, ModelMetadataRequest.FromString),
            "ModelInfer": (self._model_infer, None),
        }
        return grpc.method_handlers_generic_handler(SERVICE, {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(behavior), request_deserializer=parse, response_serializer=_to_bytes
            )
            for name, (behavior, parse) in table.items()
        })  # fmt: skip

    def _guarded(self, behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """The behavior, with the request id in its trailing metadata and errors as statuses."""

        async def answer(request: Any, context: Context) -> Any:
            headers = _headers(context)
            request_id = self._request_id(headers)
            trailing: Metadata = ((REQUEST_ID, request_id),)
            context.set_trailing_metadata(trailing)
            try:
                return await behavior(request, context, headers, request_id)
            except EngineError as error:
                trailing += trailing_metadata(error)
                await context.abort(status_code(error), details_of(error), trailing)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.exception("request %s failed in the server", request_id)
                await context.abort(
                    grpc.StatusCode.INTERNAL,
                    f"the server failed: {type(error).__name__}",
                    (*trailing, ("code", "internal")),
                )

        return answer

    def _request_id(self, headers: dict[str, str | bytes]) -> str:
        sent = headers.get(REQUEST_ID)
        if isinstance(sent, str) and 0 < len(sent) <= MAX_REQUEST_ID and sent.isprintable():
            return sent
        return f"{self._id_prefix}-{next(self._numbers)}"

    async def _server_live(self, *_: object) -> ServerLiveResponse:
        reason = why_not_live(self._engine, self._config.heartbeat_timeout_s)
        return ServerLiveResponse(live=reason is None)

    async def _server_ready(self, *_: object) -> ServerReadyResponse:
        reason = why_not_ready(self._engine, self._config.heartbeat_timeout_s)
        return ServerReadyResponse(ready=reason is None)

    async def _model_ready(self, request: ModelReadyRequest, *_: object) -> ModelReadyResponse:
        reason = why_not_ready(self._engine, self._config.heartbeat_timeout_s)
        if reason is None:
            try:
                find_model(self._engine, request.name, request.version or None)
            except UnknownModel as error:
                reason = error.message
        return ModelReadyResponse(ready=reason is None)

    async def _server_metadata(self, *_: object) -> ServerMetadataResponse:
        metadata = ServerMetadata()
        return ServerMetadataResponse(
            name=metadata.name, version=metadata.version, extensions=metadata.extensions
        )

    async def _model_metadata(
        self,
        request: ModelMetadataRequest,
        context: Context,
        headers: dict[str, str | bytes],
        request_id: str,
    ) -> Any:
        self._authorize(headers.items())
        info = find_model(self._engine, request.name, request.version or None)
        return messages.metadata_message(info)

    async def _model_infer(
        self, content: bytes, context: Context, headers: dict[str, str | bytes], request_id: str
    ) -> Any:
        arrival_s = time.monotonic()
        self._authorize(headers.items())
        message = messages.parse_request(content)
        info = find_model(self._engine, message.model_name, message.model_version or None)
        call = messages.decode_request(
            message,
            info,
            request_id=request_id,
            arrival_s=arrival_s,
            timeout_ms=_timeout_ms(context),
        )
        _check_routing(headers.get(self._config.routing_header), call.request.user_id)
        response = await self._engine.submit(call.request)
        return messages.encode_response(call, response, info.name)


def _to_bytes(message: Any) -> bytes:
    content: bytes = message.SerializeToString()
    return content


def _headers(context: Context) -> dict[str, str | bytes]:
    """The call's metadata; of a repeated name the first, as HTTP routes take it."""
    found: dict[str, str | bytes] = {}
    for name, value in context.invocation_metadata() or ():
        found.setdefault(name, value)
    return found


def _timeout_ms(context: Context) -> float | None:
    """What is left of the caller's deadline. Raises DeadlineExceeded when nothing is."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return None
    if remaining_s <= 0:
        raise DeadlineExceeded("the call's deadline has passed before it was read", value=0)
    return float(remaining_s) * 1000.0


def _check_routing(routed: str | bytes | None, user_id: str) -> None:
    if routed is not None and routed != user_id:
        raise InvalidRequest(
            f"the routing header says {routed!r:.80}, the input 'user_id' {user_id!r:.80}: they "
            "must agree"
        )
