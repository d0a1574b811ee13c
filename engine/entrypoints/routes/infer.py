"""Inference by the Open Inference Protocol: one body is one request."""

from __future__ import annotations

import msgspec

from engine.async_engine import AsyncEngine
from engine.entrypoints import asgi, oip
from engine.entrypoints.asgi import HttpResponse
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.protocol import to_json
from engine.entrypoints.routes.answering import note_usage, read_body
from engine.entrypoints.routes.models import require_model
from engine.entrypoints.routes.routing import Exchange, Route
from engine.errors import InvalidRequest


class InferRoutes:
    """Owned by the server's event loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config

    def table(self) -> list[Route]:
        return [
            Route("infer", "POST", f"/v2/models/{{model}}{version}/infer", self._infer)
            for version in ("", "/versions/{version}")
        ]

    async def _infer(self, exchange: Exchange) -> HttpResponse:
        info = require_model(self._engine, exchange)
        if asgi.header(exchange.scope, b"inference-header-content-length") is not None:
            raise InvalidRequest(
                "binary tensors are not accepted: send JSON (tritonclient: binary_data=False)"
            )
        body = await read_body(self._engine, self._config, exchange)
        call = oip.decode_infer(
            body, info, request_id=exchange.request_id, arrival_s=exchange.arrival_s
        )
        request = msgspec.structs.replace(
            call.request, weights_version=exchange.params.get("version")
        )
        response = await asgi.unless_disconnected(exchange.receive, self._engine.submit(request))
        note_usage(exchange, response)
        return HttpResponse(body=to_json(oip.encode_infer(call, response, info.name)))
