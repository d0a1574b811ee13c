"""Which handler a method and a path lead to.

A path is a pattern of segments; `{name}` stands for any one segment, which may be followed by
a fixed ending (`{name}:end`). Segments are matched before they are unquoted, so an id may contain
an encoded slash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple
from urllib.parse import unquote

from engine.entrypoints.asgi import BodyShare, HttpResponse, Receive, Scope
from engine.types import Usage


class Access(Enum):
    """Who may use a route, once keys are configured; see `engine.entrypoints.security`."""

    OPEN = "open"
    CLIENT = "client"
    ADMIN = "admin"


class Answered(NamedTuple):
    """One request that the engine has answered, for the log and the trace; monotonic seconds."""

    usage: Usage
    submitted_s: float
    answered_s: float


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One HTTP request on its way through a handler.

    Attributes:
        arrival_s: Monotonic seconds.
        params: What stood in the path's places, unquoted.
        bodies: Where the body counts while this request lives.
        outcome: "ok", an error's code, or "not_ready" of a health route; for the log.
        answers: What the engine has answered.
        user_ids: Whom it was about.
        notes: What else the access log says of it.
    """

    scope: Scope
    receive: Receive
    request_id: str
    arrival_s: float
    params: Mapping[str, str] = field(default_factory=dict)
    bodies: BodyShare = field(default_factory=BodyShare)
    outcome: str = "ok"
    answers: list[Answered] = field(default_factory=list)
    user_ids: list[str] = field(default_factory=list)
    notes: dict[str, str | int] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return str(self.scope["method"])


Handler = Callable[[Exchange], Awaitable[HttpResponse]]


class QueryParameter(NamedTuple):
    """A parameter of a route's query, all of which may be left out."""

    name: str
    meaning: str
    schema: Mapping[str, object] = {"type": "string"}


class RouteDoc(NamedTuple):
    """What the OpenAPI document says of a route.

    Attributes:
        summary: One sentence.
        request: Struct of the body; several if it may be one or the other.
        response: Struct of the answer, or several; none if it is no JSON.
        statuses: Other statuses than 200 with the same form of body.
        media_type: Of the answer.
        query: Parameters of the query.
    """

    summary: str
    request: tuple[type, ...] = ()
    response: tuple[type, ...] = ()
    statuses: tuple[int, ...] = ()
    media_type: str = "application/json"
    query: tuple[QueryParameter, ...] = ()


class Route(NamedTuple):
    """A pattern, a method and what they lead to. `name` is the metrics' label."""

    name: str
    method: str
    path: str
    handler: Handler
    access: Access = Access.CLIENT
    doc: RouteDoc | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods it answers: a GET route answers HEAD too."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


class Match(NamedTuple):
    """The route and the values of its path's places."""

    route: Route
    params: Mapping[str, str]


class Router:
    """The table of routes. Raises ValueError for two routes of one method and path."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._fixed: dict[str, list[Route]] = {}
        self._patterns: dict[int, list[tuple[list[str], Route]]] = {}
        seen: set[tuple[str, str]] = set()
        for route in routes:
            if (route.method, route.path) in seen:
                raise ValueError(f"two routes for {route.method} {route.path}")
            seen.add((route.method, route.path))
            if "{" not in route.path:
                self._fixed.setdefault(route.path, []).append(route)
            else:
                segments = route.path.split("/")
                self._patterns.setdefault(len(segments), []).append((segments, route))

    def find(self, method: str, raw_path: str) -> Match | list[str]:
        """The match, or the methods that the path would allow ([]: there is no such path)."""
        allowed: list[str] = []
        for match in self._matches(raw_path):
            if method in match.route.methods:
                return match
            allowed += match.route.methods
        return allowed

    def _matches(self, raw_path: str) -> Iterable[Match]:
        fixed = self._fixed.get(raw_path)
        if fixed is not None:
            for route in fixed:
                yield Match(route, {})
            return
        segments = raw_path.split("/")
        for pattern, route in self._patterns.get(len(segments), ()):
            params = _params(pattern, segments)
            if params is not None:
                yield Match(route, params)


def _params(pattern: list[str], segments: list[str]) -> dict[str, str] | None:
    """The values of the pattern's places, or None if the path is another."""
    params: dict[str, str] = {}
    for wanted, segment in zip(pattern, segments, strict=True):
        if not wanted.startswith("{"):
            if wanted != segment:
                return None
            continue
        name, _, ending = wanted[1:].partition("}")
        text = segment.removesuffix(ending)
        if not text or len(text) + len(ending) != len(segment):
            return None
        # What is no UTF-8 stays apart from all texts, so that it is nobody's id.
        params[name] = unquote(text, errors="surrogateescape")
    return params
