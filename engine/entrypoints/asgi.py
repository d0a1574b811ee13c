"""The little of ASGI and HTTP that the server needs: bodies with a bound, answers, disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from engine.errors import Cancelled, EngineError, Overloaded, TooLarge, UnsupportedBody

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
T = TypeVar("T")

JSON = b"application/json"
OCTETS = b"application/octet-stream"
REFUSAL = "engine.refusal"
"""Key of a scope: the EngineError with which the connection gives up on the rest of the body."""


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


class BodyBudget:
    """Bytes of all bodies that are in memory. Owned by the server's event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class BodyShare:
    """One request's part of a budget; without one it only counts."""

    def __init__(self, budget: BodyBudget | None = None) -> None:
        self._budget = budget
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes in. Raises Overloaded, counting nothing, when that is too much for all."""
        budget = self._budget
        if budget is not None:
            if budget.num_bytes + num_bytes > budget.max_bytes:
                raise Overloaded(
                    f"the bodies of all requests would have {budget.num_bytes + num_bytes} bytes, "
                    f"the limit is max_bodies_bytes={budget.max_bytes}: retry in 1 s",
                    limit=budget.max_bytes,
                    value=budget.num_bytes + num_bytes,
                    retry_after_s=1.0,
                )
            budget.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        """The request has ended."""
        if self._budget is not None:
            self._budget.num_bytes -= self._num_bytes
        self._num_bytes = 0


async def read_body(scope: Scope, receive: Receive, max_bytes: int, share: BodyShare) -> bytes:
    """The whole body, counted in the share.

    Raises TooLarge as soon as it is known to be too long, UnsupportedBody for a compressed one,
    Overloaded when all bodies together are too much, Cancelled if the client leaves, and
    RequestTimeout or InvalidRequest if the connection gives up.
    """
    encoding = header(scope, b"content-encoding")
    if encoding not in (None, "identity"):
        raise UnsupportedBody(
            f"content-encoding {encoding!r:.40} is not accepted: send the body as it is"
        )
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    chunks: list[bytes] = []
    count = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left before its request was complete")
        refusal: EngineError | None = scope.get(REFUSAL)
        if refusal is not None:
            raise refusal
        chunk = message.get("body", b"")
        count += len(chunk)
        if count > max_bytes:
            raise _too_large(count, max_bytes)
        share.take(len(chunk))
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
    """The result of `work`, which is cancelled when the client leaves: then raises Cancelled.

    The work runs in the caller's task: only the watching needs one of its own.
    """
    caller = asyncio.current_task()
    assert caller is not None
    is_working, has_left = True, False

    def give_up(watch: asyncio.Task[None]) -> None:
        nonlocal has_left
        if is_working and not watch.cancelled():
            has_left = True
            caller.cancel()

    watch = asyncio.ensure_future(_disconnect(receive))
    watch.add_done_callback(give_up)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and caller.uncancel() == 0:  # else someone wants the caller itself to end
            raise Cancelled("the client left") from None
        raise
    finally:
        is_working = False
        watch.cancel()


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
