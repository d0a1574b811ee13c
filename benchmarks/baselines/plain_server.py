"""A plain PyTorch + FastAPI server of an HSTU ranking model: what one builds without an engine.

    .venv/bin/python -m benchmarks.baselines.plain_server --model DIR --port 8001

POST /v1/rank {"user_id": "u", "history": [ids], "candidates": [ids]} -> {"scores": [...]}.
It keeps nothing of a user. While a batch runs, what arrives waits and becomes the next batch, of at
most `--max-batch` requests. GET /health answers once the model is there, with the form that was
found fastest at start (see `plain_model`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.baselines.plain_model import PlainRanker, Query, fastest_model


class RankRequest(BaseModel):
    """One user's request."""

    user_id: str
    history: list[int]
    candidates: list[int]


class RankResponse(BaseModel):
    """One score per candidate."""

    scores: list[float]


class Waiting(NamedTuple):
    """A query and who waits for its scores."""

    query: Query
    answer: asyncio.Future[list[float]]


class Batcher:
    """Runs what waits as one batch, in a thread. Owned by the event loop."""

    def __init__(self, ranker: PlainRanker, max_batch: int) -> None:
        self._ranker = ranker
        self._max_batch = max_batch
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1)

    async def rank(self, query: Query) -> list[float]:
        """The query's scores, computed together with others."""
        answer: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(Waiting(query, answer))
        return await answer

    async def run(self) -> None:
        """Form batches and answer them, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self._max_batch and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            queries = [waiting.query for waiting in batch]
            scores = await loop.run_in_executor(self._thread, self._ranker.rank, queries)
            for waiting, row in zip(batch, scores, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(row)


def make_app(ranker: PlainRanker, max_batch: int) -> FastAPI:
    batcher = Batcher(ranker, max_batch)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.ensure_future(batcher.run())
        yield
        running.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/rank")
    async def rank(request: RankRequest) -> RankResponse:
        return RankResponse(scores=await batcher.rank(Query(request.history, request.candidates)))

    @app.get("/health")
    async def health() -> dict[str, object]:
        return {"form": ranker.form, "tried_ms": ranker.tried_ms, "max_batch": max_batch}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--typical-history", type=int, default=2048)
    parser.add_argument("--typical-candidates", type=int, default=192)
    options = parser.parse_args()
    ranker = fastest_model(options.model, options.typical_history, options.typical_candidates)
    ranker.warm_up(options.typical_history, options.typical_candidates, options.max_batch)
    uvicorn.run(
        make_app(ranker, options.max_batch), host="127.0.0.1", port=options.port,
        log_level="warning", access_log=False, timeout_keep_alive=75,
    )  # fmt: skip


if __name__ == "__main__":
    main()
