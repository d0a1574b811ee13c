"""`docs/native-api.md` and `docs/openapi.json`: the server's routes, out of its table of routes."""

from __future__ import annotations

import json
from typing import Any

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.entrypoints import openapi
from engine.entrypoints.app import routes
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.metrics_export import ServerMetrics
from engine.entrypoints.routes.routing import Access, Route

_INTRO = """\
# The HTTP routes

This page is generated from the server's table of routes; `docs/openapi.json` is the same as an
OpenAPI document, which the server itself gives at `GET /openapi.json`. Inference by the Open
Inference Protocol (`/v2/...`) has the same meaning as here and other forms. Keys, limits, logs and
traces are described in [the front](front.md), errors in [errors](errors.md).

## Rank and retrieve

One user:

```sh
curl localhost:8000/v1/rank \\
    -d '{"user_id": "u1", "history": [50, 172, 181], "candidates": [96, 1]}'
```

```json
{"request_id": "589b-6b0e9096-1", "usage": {"device_tokens": 0, "host_tokens": 0,
 "computed_tokens": 3, "history_length": 3}, "scores": [[0.41], [0.07]]}
```

(`usage` has more fields, see below.) Several users, each with an answer or an error of its own, in
the same order; the status is 200:

```sh
curl localhost:8000/v1/retrieve -d '{"requests": [
    {"user_id": "u1", "history": [50, 172, 181], "topk": 2},
    {"user_id": "u2", "history": [210], "topk": 2}]}'
```

A body has at most `max_requests_per_call` requests; they are queued one by one, so each may be
refused for itself. When the client leaves, all that are unanswered are given up.

## The user id in a header

The user id may come in the header `x-session-id` (`routing_header` names another), so that a proxy
can send a user's requests to one server without reading bodies. The value is UTF-8. Where the body
or the path names a user as well, it must be the same one, else the answer is 400. In a body with
several requests this holds for each: one that names another user fails.

## Prefetch

`{"users": [...]}` brings the state of known users to the device, for example when a session begins.
Users of whom nothing is known under the active weights are listed under `unknown`:

```sh
curl localhost:8000/v1/users:prefetch -d '{"users": ["u1", "nobody"]}'
```

```json
{"users": [{"user_id": "u1", "device_tokens": 3, "host_tokens": 0, "computed_tokens": 0,
 "history_length": 3}], "unknown": ["nobody"]}
```

`{"requests": [{"user_id": "u1", "history": [...]}]}` computes histories and keeps them. A prefetch
never takes room from a request that is about to run.

## All routes

"client" routes need a key once keys are configured, "admin" routes an admin key once one is
configured. GET routes answer HEAD.
"""

_NATIVE = ("rank", "retrieve", "prefetch", "users", "user", "forget", "cache_reset", "status",
           "weights_list", "weights_load", "weights_activate", "weights_retire",
           "catalogue_load")  # fmt: skip

PAGE_FILES = "/page/"


def route_table() -> list[Route]:
    """The routes of a server that is not running."""
    return routes(AsyncEngine(None, EngineConfig()), ServerConfig(), ServerMetrics())


def openapi_document() -> str:
    """`docs/openapi.json`."""
    return json.dumps(openapi.document(route_table()), indent=1) + "\n"


def native_api() -> str:
    """`docs/native-api.md`."""
    table = route_table()
    schemas: dict[str, Any] = openapi.document(table)["components"]["schemas"]
    lines = [*_INTRO.splitlines(), "", "| route | key | what it does |", "|---|---|---|"]
    for route in table:
        assert route.doc is not None
        if route.path.startswith(PAGE_FILES):
            continue
        key = "none" if route.access is Access.OPEN else route.access.value
        lines.append(f"| `{route.method} {route.path}` | {key} | {route.doc.summary} |")
    lines.append(f"| `GET {PAGE_FILES}...` | none | The page's other files. |")
    lines += ["", "## Bodies and answers", ""]
    names: dict[str, None] = {}
    for route in table:
        if route.name in _NATIVE and route.doc is not None:
            for struct in (*route.doc.request, *route.doc.response):
                _collect(struct.__name__, schemas, names)
    _collect("ErrorBody", schemas, names)
    for name in names:
        lines += _struct(name, schemas[name])
    return "\n".join(lines).rstrip() + "\n"


def _collect(name: str, schemas: dict[str, Any], names: dict[str, None]) -> None:
    """The struct and those it refers to, in the order a reader meets them."""
    if name in names:
        return
    names[name] = None
    for part in json.dumps(schemas[name]).split('"#/components/schemas/')[1:]:
        _collect(part.partition('"')[0], schemas, names)


def _struct(name: str, schema: dict[str, Any]) -> list[str]:
    lines = [f"### {name}", "", schema["description"], ""]
    lines += ["| field | type | required | meaning |", "|---|---|---|---|"]
    required = schema.get("required", ())
    for field, content in schema["properties"].items():
        is_required = "yes" if field in required else ""
        default = content.get("default")
        meaning = content.get("description", "")
        if default not in (None, ""):
            meaning = f"{meaning} Default {json.dumps(default)}.".strip()
        lines.append(f"| `{field}` | {_kind(content)} | {is_required} | {meaning} |")
    return [*lines, ""]


def _kind(schema: dict[str, Any]) -> str:
    """A schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_kind(one) for one in schema[key])
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    match schema.get("type"):
        case "array":
            return f"list of {_kind(schema['items'])}" if "items" in schema else "list"
        case "object" if "additionalProperties" in schema:
            return "mapping"
        case "string":
            return "text"
        case "boolean":
            return "true or false"
        case str(other):
            return other
        case _:
            return "any"


if __name__ == "__main__":
    print(native_api(), end="")
