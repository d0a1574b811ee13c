"""The little of ASGI and HTTP that the server needs: bodies with a bound, answers, disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from engine.errors import Cancelled, InvalidRequest, TooLarge

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
T = TypeVar("T")

JSON = b"application/json"


@dataclass(slots=True, kw_only=True)
class HttpResponse:
    """An answer that has not been sent. `headers` come on top of type, length and request id."""

    status: int = 200
    body: bytes = b""
    content_type: bytes = JSON
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that (lower case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body. Raises TooLarge as soon as it is too long, Cancelled if the client leaves."""
    encoding = header(scope, b"content-encoding")
    if encoding not in (None, "identity"):
        raise InvalidRequest(f"content-encoding {encoding!r} is not accepted: send plain JSON")
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    chunks: list[bytes] = []
    count = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left before its request was complete")
        chunk = message.get("body", b"")
        count += len(chunk)
        if count > max_bytes:
            raise _too_large(count, max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(count: int, max_bytes: int) -> TooLarge:
    return TooLarge(
        f"the body has {count} bytes or more, the limit is max_body_bytes={max_bytes}: send less",
        limit=max_bytes,
        value=count,
    )


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: then raises Cancelled."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client left")
    finally:
        for unfinished in (task, watch):
            if not unfinished.done():
                unfinished.cancel()
        if not task.done():
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # it ended just then; nobody is left to tell


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_response(send: Send, response: HttpResponse, request_id: str) -> None:
    """Send an answer whole."""
    headers = [
        (b"content-type", response.content_type),
        (b"x-request-id", request_id.encode()),
        *response.headers,
    ]
    if response.status != 304:  # there it would be the length of what is not sent
        headers.append((b"content-length", str(len(response.body)).encode()))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
