"""What the routes that ask the engine have in common: reading the body, noting the answer."""

from __future__ import annotations

from engine.async_engine import AsyncEngine
from engine.entrypoints import asgi
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.routes.routing import Exchange
from engine.types import Response


async def read_body(engine: AsyncEngine, config: ServerConfig, exchange: Exchange) -> bytes:
    """The body; an engine that takes no requests refuses before reading."""
    if not engine.is_ready:
        raise engine.refusal()
    return await asgi.read_body(exchange.scope, exchange.receive, config.max_body_bytes)


def note_usage(exchange: Exchange, response: Response) -> None:
    """Put into the access log where the answer's history came from."""
    usage = response.usage
    exchange.notes.append(
        f"ok id={response.request_id} device={usage.device_tokens} host={usage.host_tokens} "
        f"computed={usage.computed_tokens} queue_us={usage.queue_us} run_us={usage.run_us}"
    )
