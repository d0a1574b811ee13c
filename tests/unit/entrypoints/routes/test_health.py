"""What the access log says of a server that is not ready."""

import json
import time

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.routes.health import HealthRoutes
from engine.entrypoints.routes.routing import Exchange


async def receive():
    raise AssertionError("health reads no body")


async def test_health_of_a_server_that_has_not_started_is_logged_as_not_ready():
    health = HealthRoutes(AsyncEngine(None, EngineConfig()), ServerConfig())
    (ready,) = [route for route in health.table() if route.path == "/v2/health/ready"]
    exchange = Exchange(
        scope={"method": "GET"}, receive=receive, request_id="r1", arrival_s=time.monotonic()
    )

    answer = await ready.handler(exchange)

    assert answer.status == 503
    assert json.loads(answer.body)["ready"] is False
    assert exchange.outcome == "not_ready"
