"""The native JSON face: rank and retrieve, one user or several in a body."""

from __future__ import annotations

import asyncio

from engine.async_engine import AsyncEngine
from engine.entrypoints import asgi, native_api
from engine.entrypoints.asgi import HttpResponse
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.protocol import ErrorBody, error_body, to_json
from engine.entrypoints.routes.answering import note_usage, read_body
from engine.entrypoints.routes.routing import Exchange, Route
from engine.errors import EngineError
from engine.types import Request, Response, Task


class NativeRoutes:
    """Owned by the server's event loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config

    def table(self) -> list[Route]:
        return [
            Route("rank", "POST", "/v1/rank", self._rank),
            Route("retrieve", "POST", "/v1/retrieve", self._retrieve),
        ]

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
        )
        if not call.is_batch:
            (request,) = call.requests
            assert isinstance(request, Request)
            response = await asgi.unless_disconnected(
                exchange.receive, self._engine.submit(request)
            )
            note_usage(exchange, response)
            return HttpResponse(body=to_json(native_api.encode_response(response)))
        results = await asgi.unless_disconnected(exchange.receive, self._submit_all(call))
        responses: list[native_api.NativeResponse | ErrorBody] = []
        for index, (request, result) in enumerate(zip(call.requests, results, strict=True)):
            if isinstance(result, Response):
                responses.append(native_api.encode_response(result))
            else:
                own_id = f"{exchange.request_id}.{index}"
                if isinstance(request, Request):
                    own_id = request.request_id
                responses.append(error_body(result, own_id, status=result.status))
        exchange.notes.append(f"requests={len(responses)}")
        return HttpResponse(body=to_json(native_api.NativeResponses(responses=responses)))

    async def _submit_all(self, call: native_api.NativeCall) -> list[Response | EngineError]:
        async def result_of(request: Request | EngineError) -> Response | EngineError:
            if isinstance(request, EngineError):
                return request
            try:
                return await self._engine.submit(request)
            except EngineError as error:
                return error

        return await asyncio.gather(*map(result_of, call.requests))
