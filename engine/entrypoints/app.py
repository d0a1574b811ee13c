"""The ASGI application: from a connection's request to its one answer."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import time

from engine.async_engine import AsyncEngine
from engine.core_client import Phase
from engine.entrypoints import asgi
from engine.entrypoints.access_log import AccessLog
from engine.entrypoints.asgi import HttpResponse, Receive, Scope, Send
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.metrics_export import ServerMetrics
from engine.entrypoints.page.files import page_routes
from engine.entrypoints.protocol import ErrorBody, agreed_user, error_body, to_json
from engine.entrypoints.routes.answering import routed_user
from engine.entrypoints.routes.describe import DescribeRoutes
from engine.entrypoints.routes.health import HealthRoutes
from engine.entrypoints.routes.infer import InferRoutes
from engine.entrypoints.routes.native import NativeRoutes
from engine.entrypoints.routes.observe import ObserveRoutes
from engine.entrypoints.routes.routing import Exchange, Match, Route, Router
from engine.entrypoints.routes.users import UserRoutes
from engine.entrypoints.routes.weights import WeightsRoutes
from engine.entrypoints.security import Authenticator
from engine.entrypoints.tracing import Tracing
from engine.errors import EngineDead, EngineError, Overloaded, Unauthorized

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_NO_ROUTE = "-"

log = logging.getLogger(__name__)


def routes(engine: AsyncEngine, config: ServerConfig, metrics: ServerMetrics) -> list[Route]:
    """Every route of the server."""
    table = [
        *HealthRoutes(engine, config).table(),
        *InferRoutes(engine, config).table(),
        *NativeRoutes(engine, config).table(),
        *UserRoutes(engine).table(),
        *WeightsRoutes(engine, config).table(),
        *ObserveRoutes(engine, metrics).table(),
        *page_routes(),
    ]
    return [*table, *DescribeRoutes(table).table()]


class App:
    """The application. Owned by the server's event loop."""

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig, tracing: Tracing | None = None
    ) -> None:
        """Raises ConfigError for keys that cannot be read."""
        self.metrics = ServerMetrics()
        self._engine = engine
        self._config = config
        self._authenticator = Authenticator(config.security)
        self._tracing = tracing or Tracing()
        self._access_log = AccessLog(config.access_log_format, with_users=config.log_user_ids)
        self._bodies = asgi.BodyBudget(config.max_bodies_bytes)
        self._id_prefix = f"{os.getpid():x}-{int(time.time()):x}"
        self._numbers = itertools.count(1)
        self._router = Router(routes(engine, config, self.metrics))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request: never raises, except when its own task is cancelled."""
        if scope["type"] != "http":
            raise NotImplementedError(f"only HTTP is served, not {scope['type']}")
        exchange = Exchange(
            scope=scope,
            receive=receive,
            request_id=self._request_id(scope),
            arrival_s=time.monotonic(),
            bodies=asgi.BodyShare(self._bodies),
        )
        trace = self._tracing.start(exchange)
        found = self._router.find(scope["method"], scope["raw_path"].decode("latin-1"))
        route = found.route if isinstance(found, Match) else None
        path = _NO_ROUTE if route is None else route.path
        self.metrics.in_flight += 1
        try:
            if isinstance(found, Match):
                response = await self._answer(found, exchange)
            else:
                response = _no_route(exchange, found)
        finally:
            self.metrics.in_flight -= 1
            exchange.bodies.give_back()
        name = "unknown" if route is None else route.name
        self.metrics.http_requests[name, str(response.status)] += 1
        try:
            await asgi.send_response(send, response, exchange.request_id)
        finally:  # what is told of the answer does not hold it up
            self._access_log.write(exchange, path, response.status, trace.trace_id)
            trace.end(exchange, path, response.status)

    async def _answer(self, found: Match, exchange: Exchange) -> HttpResponse:
        exchange.params = found.params
        try:
            self._authenticator.authorize(exchange.scope["headers"], found.route.access)
            if "user_id" in found.params:
                agreed_user(found.params["user_id"], routed_user(self._config, exchange))
            return await found.route.handler(exchange)
        except EngineError as error:
            return self._failure(error, exchange)
        except Exception as error:
            log.exception("request %s failed in the server", exchange.request_id)
            exchange.outcome = "internal"
            return _error_response(500, ErrorBody(
                error=f"the server failed: {type(error).__name__}", code="internal",
                request_id=exchange.request_id,
            ))  # fmt: skip

    def _failure(self, error: EngineError, exchange: Exchange) -> HttpResponse:
        exchange.outcome = error.code
        response = _error_response(error.status, error_body(error, exchange.request_id))
        if isinstance(error, Overloaded):
            seconds = max(1, math.ceil(error.retry_after_s))
            response.headers.append((b"retry-after", str(seconds).encode()))
        elif isinstance(error, EngineDead) and self._engine.phase is Phase.STARTING:
            response.headers.append((b"retry-after", b"1"))
        elif isinstance(error, Unauthorized):
            response.headers.append((b"www-authenticate", b'Bearer realm="mtserve"'))
        return response

    def _request_id(self, scope: Scope) -> str:
        sent = asgi.header(scope, b"x-request-id")
        if sent is not None and _REQUEST_ID.fullmatch(sent):
            return sent
        return f"{self._id_prefix}-{next(self._numbers)}"


def _no_route(exchange: Exchange, allowed: list[str]) -> HttpResponse:
    scope = exchange.scope
    if not allowed:
        exchange.outcome = "not_found"
        return _error_response(404, ErrorBody(
            error=f"no route {scope['path']!r:.200}", code="not_found",
            request_id=exchange.request_id,
        ))  # fmt: skip
    exchange.outcome = "method_not_allowed"
    response = _error_response(405, ErrorBody(
        error=f"{scope['method']} is not served here: use {allowed[0]}",
        code="method_not_allowed", request_id=exchange.request_id,
    ))  # fmt: skip
    response.headers.append((b"allow", ", ".join(allowed).encode()))
    return response


def _error_response(status: int, body: ErrorBody) -> HttpResponse:
    return HttpResponse(status=status, body=to_json(body))
