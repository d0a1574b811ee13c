"""The native JSON face: rank, retrieve and prefetch, one user or several in a body."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from engine.async_engine import AsyncEngine
from engine.entrypoints import asgi, native_api, prefetch_api
from engine.entrypoints.asgi import HttpResponse
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.protocol import error_body, to_json
from engine.entrypoints.routes.answering import read_body, routed_user, submit
from engine.entrypoints.routes.routing import Exchange, Route, RouteDoc
from engine.errors import EngineError
from engine.types import Request, Response, Task

_BODIES = (native_api.NativeRequest, native_api.NativeRequests)
_ANSWERS = (native_api.NativeResponse, native_api.NativeResponses)


class NativeRoutes:
    """Owned by the server's event loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config

    def table(self) -> list[Route]:
        return [
            Route(
                "rank", "POST", "/v1/rank", self._rank,
                doc=RouteDoc("Scores of candidates for a user, or several.", _BODIES, _ANSWERS),
            ),
            Route(
                "retrieve", "POST", "/v1/retrieve", self._retrieve,
                doc=RouteDoc("The best items of the catalogue for a user, or several.",
                             _BODIES, _ANSWERS),
            ),
            Route(
                "prefetch", "POST", "/v1/users:prefetch", self._prefetch,
                doc=RouteDoc(
                    "Bring users' states to the device, or compute histories and keep them.",
                    (prefetch_api.PrefetchUsers, prefetch_api.PrefetchRequests),
                    (prefetch_api.PrefetchAnswer,),
                ),
            ),
        ]  # fmt: skip

    async def _rank(self, exchange: Exchange) -> HttpResponse:
        return await self._native(exchange, Task.RANK)

    async def _retrieve(self, exchange: Exchange) -> HttpResponse:
        return await self._native(exchange, Task.RETRIEVE)

    async def _native(self, exchange: Exchange, task: Task) -> HttpResponse:
        body = await read_body(self._engine, self._config, exchange)
        call = native_api.decode_call(
            body,
            task,
            request_id=exchange.request_id,
            arrival_s=exchange.arrival_s,
            max_requests=self._config.max_requests_per_call,
            routed_user=routed_user(self._config, exchange),
        )
        results = await self._results(exchange, call.requests)
        if not call.is_batch:
            (result,) = results
            if isinstance(result, EngineError):
                raise result
            return HttpResponse(body=to_json(native_api.encode_response(result)))
        responses: list[msgspec.Raw] = []
        for index, (request, result) in enumerate(zip(call.requests, results, strict=True)):
            if isinstance(result, Response):
                answer = to_json(native_api.encode_response(result))
            else:
                own_id = f"{exchange.request_id}.{index}"
                if isinstance(request, Request):
                    own_id = request.request_id
                answer = to_json(error_body(result, own_id, status=result.status))
            responses.append(msgspec.Raw(answer))
        return HttpResponse(body=to_json(native_api.NativeResponses(responses=responses)))

    async def _prefetch(self, exchange: Exchange) -> HttpResponse:
        body = await read_body(self._engine, self._config, exchange)
        call = prefetch_api.decode_prefetch(
            body,
            request_id=exchange.request_id,
            arrival_s=exchange.arrival_s,
            max_requests=self._config.max_requests_per_call,
            routed_user=routed_user(self._config, exchange),
        )
        results = await self._results(exchange, call.requests)
        answer = prefetch_api.PrefetchAnswer(users=[], unknown=[])
        for user_id, request, result in zip(call.user_ids, call.requests, results, strict=True):
            if isinstance(result, EngineError):
                error = error_body(result, status=result.status)
                answer.users.append(prefetch_api.PrefetchedUser(user_id=user_id, error=error))
            elif _is_unknown(request, result):
                answer.unknown.append(user_id)
            else:
                answer.users.append(prefetch_api.encode_prefetched(user_id, result))
        return HttpResponse(body=to_json(answer))

    async def _results(
        self, exchange: Exchange, requests: Sequence[Request | EngineError]
    ) -> list[Response | EngineError]:
        """Each request's answer or error, in order; all are given up when the client leaves."""

        async def result_of(request: Request | EngineError) -> Response | EngineError:
            if isinstance(request, EngineError):
                return request
            try:
                return await submit(self._engine, exchange, request)
            except EngineError as error:
                return error

        async def all_results() -> list[Response | EngineError]:
            return await asyncio.gather(*map(result_of, requests))

        return await asgi.unless_disconnected(exchange.receive, all_results())


def _is_unknown(request: Request | EngineError, response: Response) -> bool:
    """Whether a prefetch without a history found nothing to bring."""
    is_by_id = isinstance(request, Request) and request.history is None
    return is_by_id and response.usage.history_length == 0
