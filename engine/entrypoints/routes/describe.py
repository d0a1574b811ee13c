"""The server's own description: `GET /openapi.json`."""

from __future__ import annotations

import functools

from engine.entrypoints import openapi
from engine.entrypoints.asgi import HttpResponse
from engine.entrypoints.protocol import to_json
from engine.entrypoints.routes.routing import Exchange, Route, RouteDoc


class DescribeRoutes:
    """Describes the other routes and itself. Owned by the server's event loop."""

    def __init__(self, others: list[Route]) -> None:
        self._others = others

    def table(self) -> list[Route]:
        summary = "This document."
        return [
            Route(
                "openapi", "GET", "/openapi.json", self._openapi, doc=RouteDoc(summary, (), (dict,))
            )
        ]

    @functools.cached_property
    def _document(self) -> bytes:
        return to_json(openapi.document([*self._others, *self.table()]))

    async def _openapi(self, exchange: Exchange) -> HttpResponse:
        return HttpResponse(body=self._document)
