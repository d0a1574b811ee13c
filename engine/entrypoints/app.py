"""The ASGI application: routes, and which status an outcome has.

Health is answered from the age of the core's heartbeat and never waits for the core.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from engine.async_engine import AsyncEngine
from engine.core_client import Phase
from engine.entrypoints import asgi, metrics_export, native_api, oip
from engine.entrypoints.asgi import HttpResponse, Receive, Scope, Send
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.oip_metadata import model_metadata
from engine.entrypoints.protocol import ErrorBody, error_body, to_json
from engine.errors import (
    EngineDead,
    EngineError,
    InvalidRequest,
    Overloaded,
    UnknownModel,
)
from engine.types import CoreStats, Request, Response, Task
from engine.version import __version__

MAX_REQUEST_ID = 128

_STATS_WAIT_S = 0.5

log = logging.getLogger(__name__)
access_log = logging.getLogger("engine.access")


class ServerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `GET /v2`. Binary tensors are not accepted, so the extension is not listed."""

    name: str = "mtserve"
    version: str = __version__
    extensions: tuple[str, ...] = ()


class HealthBody(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to the health routes; `reason` says why not."""

    live: bool | msgspec.UnsetType = msgspec.UNSET
    ready: bool | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET


class StatusBody(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `GET /v1/status`."""

    phase: str
    model: str
    weights_versions: list[str]
    heartbeat_age_s: float
    requests_waiting: int
    requests_running: int
    steps: int
    device_pages_used: int
    device_pages_total: int
    host_chunks_used: int
    host_chunks_total: int
    users_resident: dict[str, int]
    copies_in_flight: dict[str, int]


class Exchange(NamedTuple):
    """One HTTP request on its way through a handler."""

    scope: Scope
    receive: Receive
    request_id: str
    arrival_s: float
    notes: list[str]


Handler = Callable[[Exchange], Awaitable[HttpResponse]]


class Route(NamedTuple):
    """What a path and a method lead to. `name` is the metrics' label."""

    name: str
    method: str
    handler: Handler


class App:
    """The application. Owned by the server's event loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config
        self._metrics = metrics_export.ServerMetrics()
        self._id_prefix = f"{os.getpid():x}-{int(time.time()):x}"
        self._numbers = itertools.count(1)
        self._routes: dict[str, Route] = {
            "/v2": Route("server_metadata", "GET", self._server_metadata),
            "/v2/health/live": Route("live", "GET", self._live),
            "/v2/health/ready": Route("ready", "GET", self._ready),
            "/v1/rank": Route("rank", "POST", self._rank),
            "/v1/retrieve": Route("retrieve", "POST", self._retrieve),
            "/v1/status": Route("status", "GET", self._status),
            "/metrics": Route("metrics", "GET", self._metrics_page),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request: never raises, except when its own task is cancelled."""
        if scope["type"] != "http":
            raise NotImplementedError(f"only HTTP is served, not {scope['type']}")
        arrival_s = time.monotonic()
        exchange = Exchange(scope, receive, self._request_id(scope), arrival_s, [])
        route_name = "unknown"
        self._metrics.in_flight += 1
        try:
            route = self._find(scope["path"])
            if route is None:
                exchange.notes.append("not_found")
                response = _error_response(404, ErrorBody(
                    error=f"no route {scope['path']!r}", code="not_found",
                    request_id=exchange.request_id,
                ))  # fmt: skip
            elif scope["method"] not in _allowed(route):
                response = _error_response(405, ErrorBody(
                    error=f"{scope['method']} is not served here: use {route.method}",
                    code="method_not_allowed", request_id=exchange.request_id,
                ))  # fmt: skip
                response.headers.append((b"allow", route.method.encode()))
            else:
                route_name = route.name
                response = await self._answer(route, exchange)
        finally:
            self._metrics.in_flight -= 1
        self._metrics.http_requests[route_name, str(response.status)] += 1
        if self._config.access_log:
            access_log.info(
                "%s %s %s %d %.1fms %s", exchange.request_id, scope["method"], scope["path"],
                response.status, (time.monotonic() - arrival_s) * 1e3, " ".join(exchange.notes),
            )  # fmt: skip
        await asgi.send_response(send, response, exchange.request_id)

    async def _answer(self, route: Route, exchange: Exchange) -> HttpResponse:
        try:
            return await route.handler(exchange)
        except EngineError as error:
            return self._failure(error, exchange)
        except Exception as error:
            log.exception("request %s failed in the server", exchange.request_id)
            return _error_response(500, ErrorBody(
                error=f"the server failed: {type(error).__name__}", code="internal",
                request_id=exchange.request_id,
            ))  # fmt: skip

    def _failure(self, error: EngineError, exchange: Exchange) -> HttpResponse:
        exchange.notes.append(error.code)
        response = _error_response(error.status, error_body(error, exchange.request_id))
        if isinstance(error, Overloaded):
            seconds = max(1, math.ceil(error.retry_after_s))
            response.headers.append((b"retry-after", str(seconds).encode()))
        elif isinstance(error, EngineDead) and self._engine.phase is Phase.STARTING:
            response.headers.append((b"retry-after", b"1"))
        elif error.status == 413:
            # What is left of the body will not be read.
            response.headers.append((b"connection", b"close"))
        return response

    def _request_id(self, scope: Scope) -> str:
        sent = asgi.header(scope, b"x-request-id")
        if sent and len(sent) <= MAX_REQUEST_ID and sent.isascii() and sent.isprintable():
            return sent
        return f"{self._id_prefix}-{next(self._numbers)}"

    # Routes

    def _find(self, path: str) -> Route | None:
        route = self._routes.get(path)
        if route is not None:
            return route
        match path.split("/"):
            case ["", "v2", "models", model, *rest]:
                version: str | None = None
                if len(rest) >= 2 and rest[0] == "versions":
                    version, rest = rest[1], rest[2:]
                match rest:
                    case []:
                        return Route(
                            "model_metadata", "GET", self._for(model, version, self._model)
                        )
                    case ["ready"]:
                        return Route("model_ready", "GET", self._for(model, version, self._ready))
                    case ["infer"]:
                        return Route("infer", "POST", self._for(model, version, self._infer))
        return None

    def _for(self, model: str, version: str | None, handler: Handler) -> Handler:
        """The handler, once the named model is known to be the one that is loaded."""

        async def checked(exchange: Exchange) -> HttpResponse:
            info = self._engine.info
            if model != info.name:
                raise UnknownModel(f"model {model!r} is not loaded: this server has {info.name!r}")
            if version is not None and version != info.weights_version:
                raise UnknownModel(
                    f"version {version!r} of {model!r} is not loaded: this server has "
                    f"{info.weights_version!r}"
                )
            return await handler(exchange)

        return checked

    async def _server_metadata(self, exchange: Exchange) -> HttpResponse:
        return HttpResponse(body=to_json(ServerMetadata()))

    def _why_not_live(self) -> str | None:
        engine = self._engine
        if engine.phase is Phase.DEAD or engine.phase is Phase.STOPPED:
            return "the core has ended"
        if engine.phase in (Phase.SERVING, Phase.DRAINING):
            age_s = engine.heartbeat_age_s
            if age_s > self._config.heartbeat_timeout_s:
                return f"the core's last heartbeat is {age_s:.1f} s old"
        return None

    async def _live(self, exchange: Exchange) -> HttpResponse:
        reason = self._why_not_live()
        if reason is None:
            return HttpResponse(body=to_json(HealthBody(live=True)))
        return HttpResponse(status=503, body=to_json(HealthBody(live=False, reason=reason)))

    async def _ready(self, exchange: Exchange) -> HttpResponse:
        reason = self._why_not_live()
        if reason is None and not self._engine.is_ready:
            reason = f"the engine is {self._engine.phase.value}"
        if reason is None:
            return HttpResponse(body=to_json(HealthBody(ready=True, name=self._engine.info.name)))
        return HttpResponse(status=503, body=to_json(HealthBody(ready=False, reason=reason)))

    async def _model(self, exchange: Exchange) -> HttpResponse:
        return HttpResponse(body=to_json(model_metadata(self._engine.info)))

    async def _stats(self) -> CoreStats | None:
        """The core's word of now, or its last one if it does not answer in time."""
        try:
            return await asyncio.wait_for(self._engine.stats(), _STATS_WAIT_S)
        except (EngineError, TimeoutError):
            return self._engine.last_stats

    async def _status(self, exchange: Exchange) -> HttpResponse:
        info, stats = self._engine.info, await self._stats()
        if stats is None:
            raise EngineDead("the core has not reported yet")
        values = {(sample.name, sample.labels): sample.value for sample in stats.samples}

        def gauge(name: str) -> int:
            return int(values.get((name, ()), 0))

        def by_label(name: str) -> dict[str, int]:
            return {labels[0]: int(value) for (key, labels), value in values.items() if key == name}

        return HttpResponse(
            body=to_json(
                StatusBody(
                    phase=self._engine.phase.value,
                    model=info.name,
                    weights_versions=[info.weights_version],
                    heartbeat_age_s=round(self._engine.heartbeat_age_s, 3),
                    requests_waiting=stats.num_waiting,
                    requests_running=stats.num_running,
                    steps=stats.num_steps,
                    device_pages_used=gauge("device_pages_used"),
                    device_pages_total=gauge("device_pages_total"),
                    host_chunks_used=gauge("host_chunks_used"),
                    host_chunks_total=gauge("host_chunks_total"),
                    users_resident=by_label("users_resident"),
                    copies_in_flight=by_label("copies_in_flight"),
                )
            )
        )

    async def _metrics_page(self, exchange: Exchange) -> HttpResponse:
        stats = await self._stats()
        body = metrics_export.render(
            () if stats is None else stats.samples,
            self._metrics.samples(self._engine.heartbeat_age_s),
        )
        return HttpResponse(body=body, content_type=metrics_export.CONTENT_TYPE)

    async def _infer(self, exchange: Exchange) -> HttpResponse:
        if asgi.header(exchange.scope, b"inference-header-content-length") is not None:
            raise InvalidRequest(
                "binary tensors are not accepted: send JSON (tritonclient: binary_data=False)"
            )
        body = await self._read(exchange)
        info = self._engine.info
        call = oip.decode_infer(
            body, info, request_id=exchange.request_id, arrival_s=exchange.arrival_s
        )
        response = await asgi.unless_disconnected(
            exchange.receive, self._engine.submit(call.request)
        )
        _note(exchange, response)
        answer = oip.encode_infer(call, response, info.name)
        return HttpResponse(body=to_json(answer))

    async def _rank(self, exchange: Exchange) -> HttpResponse:
        return await self._native(exchange, Task.RANK)

    async def _retrieve(self, exchange: Exchange) -> HttpResponse:
        return await self._native(exchange, Task.RETRIEVE)

    async def _native(self, exchange: Exchange, task: Task) -> HttpResponse:
        body = await self._read(exchange)
        call = native_api.decode_call(
            body,
            task,
            request_id=exchange.request_id,
            arrival_s=exchange.arrival_s,
            max_requests=self._config.max_requests_per_call,
        )
        if not call.is_batch:
            (request,) = call.requests
            assert isinstance(request, Request)
            response = await asgi.unless_disconnected(
                exchange.receive, self._engine.submit(request)
            )
            _note(exchange, response)
            return HttpResponse(body=to_json(native_api.encode_response(response)))
        results = await asgi.unless_disconnected(exchange.receive, self._submit_all(call))
        responses: list[native_api.NativeResponse | ErrorBody] = []
        for index, (request, result) in enumerate(zip(call.requests, results, strict=True)):
            if isinstance(result, Response):
                responses.append(native_api.encode_response(result))
            else:
                own_id = f"{exchange.request_id}.{index}"
                if isinstance(request, Request):
                    own_id = request.request_id
                responses.append(error_body(result, own_id, status=result.status))
        exchange.notes.append(f"requests={len(responses)}")
        return HttpResponse(body=to_json(native_api.NativeResponses(responses=responses)))

    async def _submit_all(self, call: native_api.NativeCall) -> list[Response | EngineError]:
        async def result_of(request: Request | EngineError) -> Response | EngineError:
            if isinstance(request, EngineError):
                return request
            try:
                return await self._engine.submit(request)
            except EngineError as error:
                return error

        return await asyncio.gather(*map(result_of, call.requests))

    async def _read(self, exchange: Exchange) -> bytes:
        """The body; an engine that takes no requests refuses before reading."""
        if not self._engine.is_ready:
            raise self._engine.refusal()
        return await asgi.read_body(exchange.scope, exchange.receive, self._config.max_body_bytes)


def _allowed(route: Route) -> tuple[str, ...]:
    return ("GET", "HEAD") if route.method == "GET" else (route.method,)


def _error_response(status: int, body: ErrorBody) -> HttpResponse:
    return HttpResponse(status=status, body=to_json(body))


def _note(exchange: Exchange, response: Response) -> None:
    usage = response.usage
    exchange.notes.append(
        f"ok id={response.request_id} device={usage.device_tokens} host={usage.host_tokens} "
        f"computed={usage.computed_tokens} queue_us={usage.queue_us} run_us={usage.run_us}"
    )
