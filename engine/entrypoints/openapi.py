"""The OpenAPI document, out of the table of routes and the structs of their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from engine.entrypoints.docstrings import attribute_docs, summary_of
from engine.entrypoints.protocol import ErrorBody
from engine.entrypoints.routes.routing import Access, Route, RouteDoc
from engine.version import __version__

JsonObject = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_PLACE = re.compile(r"\{(\w+)\}")
_DESCRIPTION = (
    "Inference for generative recommenders with tiered user state. Every answer carries "
    "`x-request-id`; a 429 also carries `Retry-After`. Without configured keys no key is needed."
)


def document(routes: Iterable[Route]) -> JsonObject:
    """An OpenAPI 3.1 document of the routes. Raises ValueError for one that is not described."""
    table = list(routes)
    types = list(dict.fromkeys(_types_of(table)))
    references, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schemas = dict(zip(types, references, strict=True))
    for struct in _structs_of(types):
        _describe(components[struct.__name__], struct)
    paths: JsonObject = {}
    names: set[str] = set()
    for route in table:
        operations = paths.setdefault(route.path, {})
        operation = _operation(route, _doc_of(route), schemas)
        operations[route.method.lower()] = {"operationId": _name_of(route, names), **operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mtserve", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _doc_of(route: Route) -> RouteDoc:
    if route.doc is None:
        raise ValueError(f"route {route.method} {route.path} has no doc: give its Route a RouteDoc")
    return route.doc


def _types_of(table: list[Route]) -> Iterator[type]:
    yield ErrorBody
    for route in table:
        doc = _doc_of(route)
        yield from doc.request
        yield from doc.response


def _structs_of(types: list[type]) -> Iterator[type[msgspec.Struct]]:
    """The structs among the types, and those in their fields."""
    seen: set[type] = set()
    pending: list[msgspec.inspect.Type] = list(msgspec.inspect.multi_type_info(types))
    while pending:
        found = pending.pop()
        match found:
            case msgspec.inspect.StructType(cls=struct, fields=fields):
                if struct not in seen:
                    seen.add(struct)
                    yield struct
                    pending += [field.type for field in fields]
            case msgspec.inspect.UnionType(types=members):
                pending += members
            case (
                msgspec.inspect.ListType(item_type=item)
                | msgspec.inspect.VarTupleType(item_type=item)
            ):
                pending.append(item)
            case msgspec.inspect.DictType(value_type=value):
                pending.append(value)
            case msgspec.inspect.Metadata(type=inner):
                pending.append(inner)
            case _:
                pass


def _describe(schema: JsonObject, struct: type[msgspec.Struct]) -> None:
    schema["description"] = summary_of(struct)
    tag = struct.__struct_config__.tag_field
    if tag is not None:  # it tells results apart between processes and is not on the wire
        del schema["properties"][tag]
        schema["required"].remove(tag)
    for name, text in attribute_docs(struct).items():
        if name in schema["properties"]:
            schema["properties"][name]["description"] = text


def _name_of(route: Route, taken: set[str]) -> str:
    """The route's name; of a later one of that name, with what sets its path apart."""
    last = route.path.rpartition("/")[2]
    for ending in ("", "_version" if "{version}" in route.path else f"_{last}"):
        name = re.sub(r"\W", "_", route.name + ending)
        if name not in taken:
            taken.add(name)
            return name
    raise ValueError(f"two routes are called {name}: give {route.path} another name")


def _operation(route: Route, doc: RouteDoc, schemas: dict[type, Any]) -> JsonObject:
    operation: JsonObject = {
        "summary": doc.summary,
        "responses": _responses(doc, schemas),
    }
    parameters = _parameters(route, doc)
    if parameters:
        operation["parameters"] = parameters
    if doc.request:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _one_of(doc.request, schemas)}},
        }
    if route.access is not Access.OPEN:
        admin = " It needs an admin key where there is one." * (route.access is Access.ADMIN)
        operation["summary"] += admin
        operation["security"] = [{"bearer": []}, {"key": []}, {}]
    return operation


def _parameters(route: Route, doc: RouteDoc) -> list[JsonObject]:
    text = {"type": "string", "minLength": 1}
    in_path = [
        {"name": place, "in": "path", "required": True, "schema": text}
        for place in _PLACE.findall(route.path)
    ]
    in_query = [
        {
            "name": parameter.name,
            "in": "query",
            "description": parameter.meaning,
            "schema": parameter.schema,
        }
        for parameter in doc.query
    ]
    return [*in_path, *in_query]


def _responses(doc: RouteDoc, schemas: dict[type, Any]) -> JsonObject:
    schema: JsonObject = _one_of(doc.response, schemas) if doc.response else {"type": "string"}
    answer = {"description": "The answer.", "content": {doc.media_type: {"schema": schema}}}
    error = {"application/json": {"schema": schemas[ErrorBody]}}
    return {
        "200": answer,
        **{str(status): answer | {"description": "The answer, no."} for status in doc.statuses},
        "default": {"description": "An error; `code` says which.", "content": error},
    }


def _one_of(types: tuple[type, ...], schemas: dict[type, Any]) -> JsonObject:
    if len(types) == 1:
        only: JsonObject = schemas[types[0]]
        return only
    return {"anyOf": [schemas[one] for one in types]}
