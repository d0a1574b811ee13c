"""The calls of `inference.GRPCInferenceService`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from engine.async_engine import AsyncEngine
from engine.entrypoints.access_log import AccessLog
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.grpc import messages
from engine.entrypoints.grpc.inference_pb2 import (
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
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
from engine.entrypoints.routes.routing import Access, Answered
from engine.entrypoints.security import Authenticator
from engine.errors import Cancelled, DeadlineExceeded, EngineError, UnknownModel
from engine.request_builder import user_id_text

SERVICE = "inference.GRPCInferenceService"
REQUEST_ID = "x-request-id"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behavior: TypeAlias = "Callable[[Any, Rpc], Awaitable[Any]]"

_REQUEST_ID = re.compile(r"[!-~]{1,128}")

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Rpc:
    """One call on its way through its behavior.

    Attributes:
        headers: The caller's metadata; of a repeated name the first.
        arrival_s: Monotonic seconds.
        outcome: "ok" or an error's code, for the log.
        answers: What the engine has answered.
        user_ids: Whom it was about.
        notes: What else the access log says of it.
    """

    context: Context
    headers: dict[str, str | bytes]
    request_id: str
    arrival_s: float
    outcome: str = "ok"
    answers: list[Answered] = field(default_factory=list)
    user_ids: list[str] = field(default_factory=list)
    notes: dict[str, str | int] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return "GRPC"

    def timeout_ms(self) -> float | None:
        """What is left of the caller's deadline. Raises DeadlineExceeded when nothing is."""
        remaining_s = self.context.time_remaining()
        if remaining_s is None:
            return None
        if remaining_s <= 0:
            raise DeadlineExceeded("the call's deadline has passed before it was read", value=0)
        return float(remaining_s) * 1000.0

    def routed_user(self, header: str) -> str | None:
        """The user id in the metadata of that name, None without one. Raises InvalidRequest."""
        content = self.headers.get(header)
        return None if content is None else user_id_text(content, header)


class InferenceService:
    """Owned by the server's event loop. Each call ends with an answer or with one status."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        """Raises ConfigError for keys that cannot be read."""
        self._engine = engine
        self._config = config
        self._authenticator = Authenticator(config.security)
        self._access_log = AccessLog(config.access_log_format, with_users=config.log_user_ids)
        self._id_prefix = f"{os.getpid():x}-g{int(time.time()):x}"
        self._numbers = itertools.count(1)

    def handlers(self) -> grpc.GenericRpcHandler:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes.

        ModelInfer gets its bytes as they are, so that a message that cannot be parsed is the
        client's error and not the server's.
        """
        table: dict[str, tuple[Behavior, Callable[[bytes], Any] | None, Access]] = {
            "ServerLive": (self._server_live, ServerLiveRequest.FromString, Access.OPEN),
            "ServerReady": (self._server_ready, ServerReadyRequest.FromString, Access.OPEN),
            "ModelReady": (self._model_ready, ModelReadyRequest.FromString, Access.OPEN),
            "ServerMetadata": (
                self._server_metadata, ServerMetadataRequest.FromString, Access.CLIENT,
            ),
            "ModelMetadata": (
                self._model_metadata, ModelMetadataRequest.FromString, Access.CLIENT,
            ),
            "ModelInfer": (self._model_infer, None, Access.CLIENT),
        }  # fmt: skip
        return grpc.method_handlers_generic_handler(SERVICE, {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(f"/{SERVICE}/{name}", behavior, access),
                request_deserializer=parse,
                response_serializer=_to_bytes,
            )
            for name, (behavior, parse, access) in table.items()
        })  # fmt: skip

    def _guarded(
        self, path: str, behavior: Behavior, access: Access
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        """The behavior for those who may use it; its errors as statuses; a line in the log."""

        async def answer(request: Any, context: Context) -> Any:
            rpc = self._begin(context)
            status = 200
            try:
                self._authenticator.authorize(rpc.headers.items(), access)
                return await behavior(request, rpc)
            except EngineError as error:
                status, rpc.outcome = error.status, error.code
                await _abort(rpc, status_code(error), details_of(error), trailing_metadata(error))
            except asyncio.CancelledError:
                status, rpc.outcome = Cancelled.status, Cancelled.code
                raise
            except Exception as error:
                status, rpc.outcome = 500, "internal"
                log.exception("request %s failed in the server", rpc.request_id)
                details = f"the server failed: {type(error).__name__}"
                await _abort(rpc, grpc.StatusCode.INTERNAL, details, (("code", "internal"),))
            finally:
                self._access_log.write(rpc, path, status, None)

        return answer

    def _begin(self, context: Context) -> Rpc:
        headers: dict[str, str | bytes] = {}
        for name, value in context.invocation_metadata() or ():
            headers.setdefault(name, value)
        sent = headers.get(REQUEST_ID)
        if not isinstance(sent, str) or not _REQUEST_ID.fullmatch(sent):
            sent = f"{self._id_prefix}-{next(self._numbers)}"
        context.set_trailing_metadata(((REQUEST_ID, sent),))
        return Rpc(context=context, headers=headers, request_id=sent, arrival_s=time.monotonic())

    async def _server_live(self, request: ServerLiveRequest, rpc: Rpc) -> ServerLiveResponse:
        reason = why_not_live(self._engine, self._config.heartbeat_timeout_s)
        return ServerLiveResponse(live=reason is None)

    async def _server_ready(self, request: ServerReadyRequest, rpc: Rpc) -> ServerReadyResponse:
        reason = why_not_ready(self._engine, self._config.heartbeat_timeout_s)
        return ServerReadyResponse(ready=reason is None)

    async def _model_ready(self, request: ModelReadyRequest, rpc: Rpc) -> ModelReadyResponse:
        reason = why_not_ready(self._engine, self._config.heartbeat_timeout_s)
        if reason is None:
            try:
                find_model(self._engine, request.name, request.version or None)
            except UnknownModel as error:
                reason = error.message
        return ModelReadyResponse(ready=reason is None)

    async def _server_metadata(
        self, request: ServerMetadataRequest, rpc: Rpc
    ) -> ServerMetadataResponse:
        metadata = ServerMetadata()
        return ServerMetadataResponse(
            name=metadata.name, version=metadata.version, extensions=metadata.extensions
        )

    async def _model_metadata(
        self, request: ModelMetadataRequest, rpc: Rpc
    ) -> ModelMetadataResponse:
        info = find_model(self._engine, request.name, request.version or None)
        return messages.metadata_message(info, self._engine.served.versions)

    async def _model_infer(self, content: bytes, rpc: Rpc) -> ModelInferResponse:
        message = messages.parse_request(content)
        info = find_model(self._engine, message.model_name, message.model_version or None)
        call = messages.decode_request(
            message,
            info,
            request_id=rpc.request_id,
            arrival_s=rpc.arrival_s,
            timeout_ms=rpc.timeout_ms(),
            routed_user=rpc.routed_user(self._config.routing_header),
        )
        rpc.user_ids.append(call.request.user_id)
        submitted_s = time.monotonic()
        response = await self._engine.submit(call.request)
        rpc.answers.append(Answered(response.usage, submitted_s, time.monotonic()))
        return messages.encode_response(call, response, info.name)


async def _abort(rpc: Rpc, code: grpc.StatusCode, details: str, trailing: Metadata) -> None:
    """End the call with that status; raises what gRPC unwinds the behavior with."""
    await rpc.context.abort(code, details, ((REQUEST_ID, rpc.request_id), *trailing))


def _to_bytes(message: Any) -> bytes:
    content: bytes = message.SerializeToString()
    return content
