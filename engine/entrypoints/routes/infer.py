"""Inference by the Open Inference Protocol: one body is one request."""

from __future__ import annotations

from engine.async_engine import AsyncEngine
from engine.entrypoints import asgi, oip_http, oip_schema
from engine.entrypoints.asgi import HttpResponse
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.routes.answering import read_body, routed_user, submit
from engine.entrypoints.routes.models import require_model
from engine.entrypoints.routes.routing import Exchange, Route, RouteDoc


class InferRoutes:
    """Owned by the server's event loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config

    def table(self) -> list[Route]:
        return [
            Route(
                "infer", "POST", f"/v2/models/{{model}}{version}/infer", self._infer,
                doc=RouteDoc(
                    "Scores or items for one user, by the Open Inference Protocol.",
                    (oip_schema.InferBody,), (oip_schema.InferAnswer,),
                ),
            )
            for version in ("", "/versions/{version}")
        ]  # fmt: skip

    async def _infer(self, exchange: Exchange) -> HttpResponse:
        info = require_model(self._engine, exchange)
        header_length = asgi.header(exchange.scope, oip_http.HEADER_LENGTH)
        body = await read_body(self._engine, self._config, exchange)
        call = oip_http.decode_infer(
            body,
            info,
            request_id=exchange.request_id,
            arrival_s=exchange.arrival_s,
            header_length=header_length,
            weights_version=exchange.params.get("version"),
            routed_user=routed_user(self._config, exchange),
        )
        response = await asgi.unless_disconnected(
            exchange.receive, submit(self._engine, exchange, call.request)
        )
        reply = oip_http.encode_infer(call, response, info.name)
        if reply.json_bytes is None:
            return HttpResponse(body=reply.body)
        return HttpResponse(
            body=reply.body,
            content_type=asgi.OCTETS,
            headers=[(oip_http.HEADER_LENGTH, str(reply.json_bytes).encode())],
        )
