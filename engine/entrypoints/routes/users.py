"""Users' state over HTTP: what is known, forget, and the reset of all."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec

from engine.async_engine import AsyncEngine
from engine.commands import UserState
from engine.entrypoints.asgi import HttpResponse
from engine.entrypoints.protocol import to_json
from engine.entrypoints.routes.routing import Access, Exchange, QueryParameter, Route, RouteDoc
from engine.errors import InvalidRequest

MAX_LISTED = 1000
_DEFAULT_LISTED = 100


_NAMESPACE = (QueryParameter("namespace", "Of the user id."),)
_LISTED = (
    QueryParameter("limit", "How many.", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}),
    QueryParameter("tier", "Only those in it.", {"enum": ["device", "host"]}),
)


class UserBody(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `GET /v1/users/{user_id}`: one entry for each weights version with state."""

    user_id: str
    namespace: str
    states: tuple[UserState, ...]


class UsersBody(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `GET /v1/users`: the states used last; `total` counts all there are."""

    states: tuple[UserState, ...]
    total: int


class ForgottenBody(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `DELETE /v1/users/{user_id}`: what was removed, in tokens."""

    user_id: str
    namespace: str
    device_tokens: int
    host_tokens: int


class ResetBody(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `POST /v1/cache:reset`: what was removed."""

    states: int
    device_tokens: int
    host_tokens: int


class UserRoutes:
    """Owned by the server's event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def table(self) -> list[Route]:
        return [
            Route(
                "users", "GET", "/v1/users", self._list, Access.ADMIN,
                RouteDoc("The users with state, used last first.", (), (UsersBody,), query=_LISTED),
            ),
            Route(
                "user", "GET", "/v1/users/{user_id}", self._describe,
                doc=RouteDoc("What is kept of a user.", (), (UserBody,), query=_NAMESPACE),
            ),
            Route(
                "forget", "DELETE", "/v1/users/{user_id}", self._forget,
                doc=RouteDoc("Remove a user's state from every tier.", (), (ForgottenBody,),
                             query=_NAMESPACE),
            ),
            Route(
                "cache_reset", "POST", "/v1/cache:reset", self._reset, Access.ADMIN,
                RouteDoc("Remove the state of all users.", (), (ResetBody,)),
            ),
        ]  # fmt: skip

    async def _list(self, exchange: Exchange) -> HttpResponse:
        query = _query(exchange, ("limit", "tier"))
        limit = query.get("limit", str(_DEFAULT_LISTED))
        is_short = len(limit) <= len(str(MAX_LISTED))  # Python reads no number of 5000 digits
        if not (is_short and limit.isdecimal() and 1 <= int(limit) <= MAX_LISTED):
            raise InvalidRequest(f"limit is {limit!r:.40}: give 1 to {MAX_LISTED}")
        tier = query.get("tier")
        match tier:
            case None | "device" | "host":
                listed = await self._engine.users(int(limit), tier)
            case _:
                raise InvalidRequest(f"tier is {tier!r:.40}: give device or host, or leave it out")
        return HttpResponse(body=to_json(UsersBody(states=listed.states, total=listed.total)))

    async def _describe(self, exchange: Exchange) -> HttpResponse:
        user_id, namespace = _named_user(exchange)
        status = await self._engine.user(user_id, namespace)
        return HttpResponse(
            body=to_json(UserBody(user_id=user_id, namespace=namespace, states=status.states))
        )

    async def _forget(self, exchange: Exchange) -> HttpResponse:
        user_id, namespace = _named_user(exchange)
        forgotten = await self._engine.forget(user_id, namespace)
        exchange.user_ids.append(user_id)
        exchange.notes |= {
            "forgotten_device_tokens": forgotten.device_tokens,
            "forgotten_host_tokens": forgotten.host_tokens,
        }
        return HttpResponse(
            body=to_json(
                ForgottenBody(
                    user_id=user_id,
                    namespace=namespace,
                    device_tokens=forgotten.device_tokens,
                    host_tokens=forgotten.host_tokens,
                )
            )
        )

    async def _reset(self, exchange: Exchange) -> HttpResponse:
        reset = await self._engine.reset_cache()
        return HttpResponse(
            body=to_json(
                ResetBody(
                    states=reset.states,
                    device_tokens=reset.device_tokens,
                    host_tokens=reset.host_tokens,
                )
            )
        )


def _named_user(exchange: Exchange) -> tuple[str, str]:
    """(user id, namespace) of the path and the query."""
    return exchange.params["user_id"], _query(exchange, ("namespace",)).get("namespace", "")


def _query(exchange: Exchange, known: tuple[str, ...]) -> dict[str, str]:
    """The query's parameters. Raises InvalidRequest for unknown and for repeated ones."""
    raw = exchange.scope["query_string"].decode("latin-1")
    try:
        parsed = parse_qs(raw, keep_blank_values=True, strict_parsing=bool(raw), errors="strict")
    except (ValueError, UnicodeDecodeError):
        raise InvalidRequest(f"the query {raw!r:.60} cannot be read") from None
    for name, values in parsed.items():
        if name not in known:
            raise InvalidRequest(f"the query has {name!r:.40}: this route reads {', '.join(known)}")
        if len(values) > 1:
            raise InvalidRequest(f"the query has {name!r} {len(values)} times: give it once")
    return {name: values[0] for name, values in parsed.items()}
