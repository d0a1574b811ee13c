"""The OpenAPI document is about the routes that are served."""

from __future__ import annotations

import msgspec
import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.entrypoints import openapi
from engine.entrypoints.app import routes
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.metrics_export import ServerMetrics
from engine.entrypoints.routes.routing import Access, Route, RouteDoc

TABLE = routes(AsyncEngine(None, EngineConfig()), ServerConfig(), ServerMetrics())
DOCUMENT = openapi.document(TABLE)


class Body(msgspec.Struct):
    """What is sent.

    Attributes:
        size: How large.
    """

    size: int


async def handler(exchange):
    raise AssertionError("no request is answered here")


def test_every_route_is_described():
    described = {
        (method.upper(), path)
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
    }
    assert described == {(route.method, route.path) for route in TABLE}
    assert ("POST", "/v1/rank") in described
    assert ("GET", "/openapi.json") in described


def test_operations_have_names_of_their_own_and_a_summary():
    operations = [
        operation for operations in DOCUMENT["paths"].values() for operation in operations.values()
    ]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    assert all(operation["summary"].endswith(".") for operation in operations)


def test_every_reference_leads_to_a_schema():
    schemas = DOCUMENT["components"]["schemas"]
    text = msgspec.json.encode(DOCUMENT).decode()
    found = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert found <= set(schemas)
    assert {"NativeRequest", "PrefetchAnswer", "ErrorBody"} <= found


def test_a_route_becomes_an_operation():
    doc = RouteDoc("Makes it.", (Body,), (Body,), (503,))
    route = Route("make", "POST", "/things/{name}/make", handler, Access.ADMIN, doc)
    document = openapi.document([route])
    operation = document["paths"]["/things/{name}/make"]["post"]
    assert operation["summary"] == "Makes it. It needs an admin key where there is one."
    assert operation["security"] == [{"bearer": []}, {"key": []}, {}]
    assert operation["parameters"] == [
        {"name": "name", "in": "path", "required": True,
         "schema": {"type": "string", "minLength": 1}}
    ]  # fmt: skip
    assert operation["requestBody"]["content"] == {
        "application/json": {"schema": {"$ref": "#/components/schemas/Body"}}
    }
    assert set(operation["responses"]) == {"200", "503", "default"}
    assert document["components"]["schemas"]["Body"]["description"] == "What is sent."
    properties = document["components"]["schemas"]["Body"]["properties"]
    assert properties == {"size": {"type": "integer", "description": "How large."}}


def test_an_open_route_asks_for_no_key():
    assert "security" not in DOCUMENT["paths"]["/v2/health/live"]["get"]
    assert "security" in DOCUMENT["paths"]["/v1/status"]["get"]


def test_a_route_without_a_description_is_an_error():
    with pytest.raises(ValueError, match="GET /a has no doc"):
        openapi.document([Route("a", "GET", "/a", handler)])
