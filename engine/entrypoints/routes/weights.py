"""Weights versions over HTTP: load beside the running one, activate, retire, list."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from engine.async_engine import AsyncEngine
from engine.commands import (
    RefreshPolicy,
    Result,
    VersionActivated,
    VersionRetired,
    WeightsList,
    WeightsStatus,
)
from engine.entrypoints import asgi
from engine.entrypoints.asgi import HttpResponse
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.protocol import decode_json, to_json
from engine.entrypoints.routes.routing import Access, Exchange, Route, RouteDoc

T = TypeVar("T")


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class LoadBody(_Body, frozen=True):
    """Body of `POST /v1/weights:load`.

    path: a model directory below `weights_root`. version: its name, else the directory's own.
    share: of both pools, more than 0 and less than 1. canary: share of users that take it at once.
    """

    path: str
    version: str | None = None
    share: float | None = None
    canary: float | None = None


class ActivateBody(_Body, frozen=True):
    """Body of `POST /v1/weights:activate`.

    policy: lazy keeps the old state, drop removes it, refresh computes the users seen last under
    the new weights first, for at most `budget_s` seconds.
    """

    version: str
    policy: RefreshPolicy = "lazy"
    budget_s: float = 30.0


class RetireBody(_Body, frozen=True):
    """Body of `POST /v1/weights:retire`. mode: wait for its requests, or fail them."""

    version: str
    mode: Literal["wait", "fail"] = "wait"


class CatalogueBody(_Body, frozen=True):
    """Body of `POST /v1/catalogue:load`.

    path: a model directory below `weights_root`, of which only the item table is read. version: of
    the weights that get it, the active ones if it is not given.
    """

    path: str
    version: str | None = None


_load_decoder = msgspec.json.Decoder(LoadBody)
_activate_decoder = msgspec.json.Decoder(ActivateBody)
_retire_decoder = msgspec.json.Decoder(RetireBody)
_catalogue_decoder = msgspec.json.Decoder(CatalogueBody)


class WeightsRoutes:
    """Owned by the server's event loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config

    def table(self) -> list[Route]:
        return [
            Route(
                "weights_list", "GET", "/v1/weights:list", self._list,
                doc=RouteDoc("The loaded weights versions.", (), (WeightsList,)),
            ),
            Route(
                "weights_load", "POST", "/v1/weights:load", self._load, Access.ADMIN,
                RouteDoc("Load weights beside the running ones.", (LoadBody,), (WeightsStatus,)),
            ),
            Route(
                "weights_activate", "POST", "/v1/weights:activate", self._activate, Access.ADMIN,
                RouteDoc("Let requests that name no version take this one.", (ActivateBody,),
                         (VersionActivated,)),
            ),
            Route(
                "weights_retire", "POST", "/v1/weights:retire", self._retire, Access.ADMIN,
                RouteDoc("Take a version out of service.", (RetireBody,), (VersionRetired,)),
            ),
            Route(
                "catalogue_load", "POST", "/v1/catalogue:load", self._grow, Access.ADMIN,
                RouteDoc("Take an item table with more rows.", (CatalogueBody,), (WeightsStatus,)),
            ),
        ]  # fmt: skip

    async def _list(self, exchange: Exchange) -> HttpResponse:
        return _answer(await self._engine.weights())

    async def _load(self, exchange: Exchange) -> HttpResponse:
        body = await self._read(exchange, _load_decoder)
        exchange.notes["version"] = body.version or ""
        status = await self._engine.load_weights(
            body.path, body.version, share=body.share, canary=body.canary
        )
        return HttpResponse(body=to_json(status))

    async def _activate(self, exchange: Exchange) -> HttpResponse:
        body = await self._read(exchange, _activate_decoder)
        exchange.notes["version"] = body.version or ""
        return _answer(
            await self._engine.activate_weights(
                body.version, policy=body.policy, budget_s=body.budget_s
            )
        )

    async def _retire(self, exchange: Exchange) -> HttpResponse:
        body = await self._read(exchange, _retire_decoder)
        exchange.notes["version"] = body.version or ""
        return _answer(await self._engine.retire_weights(body.version, mode=body.mode))

    async def _grow(self, exchange: Exchange) -> HttpResponse:
        body = await self._read(exchange, _catalogue_decoder)
        exchange.notes["version"] = body.version or ""
        status = await self._engine.load_catalogue(body.path, body.version)
        return HttpResponse(body=to_json(status))

    async def _read(self, exchange: Exchange, decoder: msgspec.json.Decoder[T]) -> T:
        body = await asgi.read_body(
            exchange.scope, exchange.receive, self._config.max_body_bytes, exchange.bodies
        )
        return decode_json(decoder, body, "the body")


def _answer(result: Result) -> HttpResponse:
    return HttpResponse(body=to_json(_untagged(result)))


def _untagged(value: object) -> object:
    """A result without the tag that tells results apart between processes."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value)
        return {name: _untagged(content) for name, content in fields.items()}
    if isinstance(value, tuple):
        return [_untagged(content) for content in value]
    return value
