"""A FastAPI application with the engine inside: one file to copy and change.

    pip install 'mtserve[server]' fastapi
    python examples/embed_in_fastapi.py --model DIR          # without --model: random weights

    curl localhost:8080/rank -H 'content-type: application/json' \
        -d '{"user_id": "u1", "history": [50, 172], "candidates": [181, 1]}'

The engine's core is a process of its own: its computing does not hold up this event loop. It starts
before the first request is taken and ends, pending requests first, when uvicorn is told to stop.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from engine import AsyncEngine, EngineConfig
from engine.entrypoints import metrics_export
from engine.errors import Cancelled, EngineError, Overloaded

HEARTBEAT_TIMEOUT_S = 1.5
T = TypeVar("T")


class Ask(BaseModel):
    """What rank and retrieve have in common. Limits and known items are the engine's to check."""

    model_config = ConfigDict(extra="forbid")

    user_id: str | int
    history: list[int]
    query_time: int | None = None
    deadline_ms: float | None = None


class AskRank(Ask):
    candidates: list[int]


class AskRetrieve(Ask):
    top_k: int = 10


class Usage(BaseModel):
    """Where the history's tokens were found."""

    history_length: int
    device_tokens: int
    host_tokens: int
    computed_tokens: int


class Ranked(BaseModel):
    """scores: a row per candidate, a column per task of the model."""

    scores: list[list[float]]
    usage: Usage


class Retrieved(BaseModel):
    items: list[int]
    item_scores: list[float]
    usage: Usage


def create_app(engine: AsyncEngine) -> FastAPI:
    """The application; the engine is started and stopped with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.engine = engine
        async with engine:
            yield

    app = FastAPI(title="recommender", lifespan=lifespan)
    app.add_exception_handler(EngineError, answer_error)
    app.add_api_route("/rank", rank, methods=["POST"])
    app.add_api_route("/retrieve", retrieve, methods=["POST"])
    app.add_api_route("/live", live)
    app.add_api_route("/ready", ready)
    app.add_api_route("/metrics", metrics)
    return app


def the_engine(request: Request) -> AsyncEngine:
    engine: AsyncEngine = request.app.state.engine
    return engine


Engine = Annotated[AsyncEngine, Depends(the_engine)]


async def rank(ask: AskRank, request: Request, engine: Engine) -> Ranked:
    """Scores of the candidates."""
    answer = await unless_disconnected(
        request,
        engine.rank(
            user_id=ask.user_id,
            history=ask.history,
            candidates=ask.candidates,
            query_time=ask.query_time,
            deadline_ms=ask.deadline_ms,
        ),
    )
    assert answer.scores is not None
    return Ranked(scores=answer.scores.tolist(), usage=usage_of(answer.usage))


async def retrieve(ask: AskRetrieve, request: Request, engine: Engine) -> Retrieved:
    """The best items of the catalogue."""
    answer = await unless_disconnected(
        request,
        engine.retrieve(
            user_id=ask.user_id,
            history=ask.history,
            top_k=ask.top_k,
            query_time=ask.query_time,
            deadline_ms=ask.deadline_ms,
        ),
    )
    assert answer.items is not None
    assert answer.item_scores is not None
    return Retrieved(
        items=answer.items.tolist(),
        item_scores=answer.item_scores.tolist(),
        usage=usage_of(answer.usage),
    )


def usage_of(usage: Any) -> Usage:
    return Usage.model_validate(usage, from_attributes=True)


async def unless_disconnected(request: Request, call: Coroutine[Any, Any, T]) -> T:
    """The result of the call, which is given up when the client leaves (then raises Cancelled).

    FastAPI has read the body, so the next message of the connection can only be the disconnect.
    Cancelling the awaiting task is all that the engine needs to drop a request.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, watch = asyncio.ensure_future(call), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Cancelled("the client left")
        return work.result()
    finally:
        work.cancel()
        watch.cancel()
        await asyncio.wait((work, watch))


async def answer_error(request: Request, error: Exception) -> Response:
    """Every error of the engine has a status and a code; its message says what to change."""
    assert isinstance(error, EngineError)
    body = {"error": error.message, "code": error.code, "limit": error.limit, "value": error.value}
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(body, error.status, headers)


async def live(engine: Engine) -> Response:
    """Whether the core's process is alive; answered without asking it."""
    is_live = engine.heartbeat_age_s < HEARTBEAT_TIMEOUT_S
    return JSONResponse({"live": is_live}, 200 if is_live else 503)


async def ready(engine: Engine) -> Response:
    """Whether a request would be taken now."""
    reason = None if engine.is_ready else engine.refusal().message
    return JSONResponse({"ready": reason is None, "reason": reason}, 200 if not reason else 503)


async def metrics(engine: Engine) -> Response:
    """The engine's metrics for Prometheus; of the last heartbeat when the core is gone."""
    stats = await engine.stats() if engine.is_ready else engine.last_stats
    samples = () if stats is None else stats.samples
    page = metrics_export.render(samples, metrics_export.ServerMetrics().samples(0.0))
    return Response(page, media_type=metrics_export.CONTENT_TYPE.decode())


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine inside of a FastAPI application.")
    parser.add_argument("--model", help="model directory; without it, random weights")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    engine = AsyncEngine.from_model_dir(options.model, EngineConfig())
    uvicorn.run(create_app(engine), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
