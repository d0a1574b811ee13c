"""The files of the page, and how they are answered.

They are read once, at start, into a table of paths: no path of a request ever reaches the file
system. The page loads nothing from anywhere else, and its policy forbids that it could.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple

from engine.entrypoints import asgi
from engine.entrypoints.asgi import HttpResponse, Scope
from engine.entrypoints.routes.routing import Access, Exchange, Handler, Route, RouteDoc

INDEX = "index.html"

_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = (
    # A copy may be kept, but the server is asked each time whether it is still right.
    (b"cache-control", b"no-cache"),
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


class PageFile(NamedTuple):
    """One file. `etag` is quoted and changes with the content."""

    content_type: bytes
    content: bytes
    etag: str


def load() -> dict[str, PageFile]:
    """URL path -> file: `/` and one `/page/<name>` for every other file of the page."""
    table: dict[str, PageFile] = {}
    for entry in sorted(
        resources.files(__package__).joinpath("static").iterdir(), key=lambda entry: entry.name
    ):
        content = entry.read_bytes()
        path = "/" if entry.name == INDEX else f"/page/{entry.name}"
        table[path] = PageFile(
            _TYPES[entry.name.rpartition(".")[2]],
            content,
            f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        )
    return table


def respond(file: PageFile, scope: Scope) -> HttpResponse:
    """The file, or 304 without a body if the client says that it has it (`If-None-Match`)."""
    headers = [(b"etag", file.etag.encode()), *_HEADERS]
    known = asgi.header(scope, b"if-none-match")
    if known is not None and _names(known, file.etag):
        return HttpResponse(status=304, content_type=file.content_type, headers=headers)
    return HttpResponse(body=file.content, content_type=file.content_type, headers=headers)


def page_routes() -> list[Route]:
    """A route for each file, open to everybody: the page itself asks for the API key."""
    return [
        Route("page", "GET", path, _handler(file), Access.OPEN, _doc(file))
        for path, file in load().items()
    ]


def _doc(file: PageFile) -> RouteDoc:
    media_type = file.content_type.decode().partition(";")[0]
    if file.content_type.startswith(b"text/html"):
        return RouteDoc("A page for people that shows the server.", media_type=media_type)
    return RouteDoc("A file of that page.", media_type=media_type)


def _handler(file: PageFile) -> Handler:
    async def answer(exchange: Exchange) -> HttpResponse:
        return respond(file, exchange.scope)

    return answer


def _names(if_none_match: str, etag: str) -> bool:
    """Whether the header's list holds the tag; `*` is any, weak tags count (RFC 9110 13.1.2)."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags
