"""What the routes that ask the engine have in common: the body, the user's id, the answer."""

from __future__ import annotations

import time

from engine.async_engine import AsyncEngine
from engine.entrypoints import asgi
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.routes.routing import Answered, Exchange
from engine.errors import InvalidRequest
from engine.request_builder import user_id_text
from engine.types import Request, Response


async def read_body(engine: AsyncEngine, config: ServerConfig, exchange: Exchange) -> bytes:
    """The body; an engine that takes no requests refuses before reading."""
    if not engine.is_ready:
        raise engine.refusal()
    return await asgi.read_body(
        exchange.scope, exchange.receive, config.max_body_bytes, exchange.bodies
    )


def routed_user(config: ServerConfig, exchange: Exchange) -> str | None:
    """The user id of the routing header, None without one. Raises InvalidRequest."""
    name = config.routing_header.encode()
    sent = {value for key, value in exchange.scope["headers"] if key == name}
    if not sent:
        return None
    if len(sent) > 1:  # a proxy may have routed by another one than is served
        raise InvalidRequest(f"{config.routing_header} is sent {len(sent)} times: send it once")
    try:
        return user_id_text(sent.pop().decode(), config.routing_header)
    except UnicodeDecodeError:
        raise InvalidRequest(f"{config.routing_header} is no UTF-8 text") from None


async def submit(engine: AsyncEngine, exchange: Exchange, request: Request) -> Response:
    """The engine's answer, noted for the log and the trace. Raises the request's EngineError."""
    exchange.user_ids.append(request.user_id)
    submitted_s = time.monotonic()
    response = await engine.submit(request)
    exchange.answers.append(Answered(response.usage, submitted_s, time.monotonic()))
    return response
