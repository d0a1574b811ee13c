"""A core without a model, for the process boundary and the wire: `python -m ...fake_core`.

Score of a candidate = (sum of the history's items) * 1000 + the candidate's id. User ids steer it:
`hold...` is never answered (until cancelled or aborted), `crash...` makes `step` raise,
`exit...` ends the process at once, `slow...` needs many passes, `hang...` keeps `step` from
returning until `let_go` is set.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np

from engine.commands import (
    Command,
    CoreMessage,
    ForgetUser,
    Forgotten,
    QueryStats,
    Reply,
    ServedWeights,
    Statistics,
)
from engine.config import EngineConfig
from engine.core_process import run_process
from engine.errors import (
    Cancelled,
    ConfigError,
    Draining,
    EngineError,
    InvalidRequest,
    InvariantError,
    Overloaded,
    to_record,
)
from engine.metrics import Metrics
from engine.types import (
    CoreStats,
    FeatureInfo,
    ModelInfo,
    Outcome,
    Request,
    Response,
    Reuse,
    Task,
    Usage,
)

INFO = ModelInfo(
    name="fake",
    weights_version="7",
    dtype="float32",
    tasks=(Task.RANK, Task.RETRIEVE),
    score_names=("click", "like"),
    features=(
        FeatureInfo(name="item", dtype="int64", dim=0, on_history=True, on_candidates=True),
        FeatureInfo(name="action", dtype="int64", dim=0, on_history=True, on_candidates=False),
        FeatureInfo(name="mood", dtype="float32", dim=2, on_history=True, on_candidates=True),
    ),
    context_features=("country",),
    reads_query_time=False,
    embedding_dim=4,
    max_history_events=1000,
    max_history_tokens=1000,
    max_batch_tokens=8192,
    keep_stride=1,
    reuse=Reuse.APPEND,
    reuse_reason="a fake",
    backend="fake",
    exactness="bitwise",
    cache_tiers="tiered",
    page_size=8,
    chunk_size=32,
    token_bytes=512,
    sample_items=tuple(range(1, 9)),
)


let_go = threading.Event()


class NoWake:
    """A pipe that nobody writes to."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def clear(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class FakeCore:
    """The face of EngineCore over a dictionary."""

    def __init__(self, config: EngineConfig) -> None:
        self.served = ServedWeights(active=INFO.weights_version, infos=(INFO,))
        self.wake = NoWake()
        self.metrics = Metrics()
        self._limit = config.scheduler.max_queue_requests
        self._live: dict[str, Request] = {}
        self._passes: dict[str, int] = {}
        self._outbox: list[CoreMessage] = []
        self._refusal: EngineError | None = None
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        return not self._live

    def submit(self, request: Request) -> None:
        if self._refusal is not None:
            self._emit_error(request, self._refusal)
        elif len(self._live) >= self._limit:
            self._emit_error(request, Overloaded("full", limit=self._limit, retry_after_s=2.0))
        elif request.user_id.startswith("bad"):
            self._emit_error(request, InvalidRequest("bad user", value=1, limit=0))
        else:
            self._live[request.request_id] = request

    def cancel(self, request_id: str) -> None:
        request = self._live.pop(request_id, None)
        if request is not None:
            self._emit_error(request, Cancelled("cancelled"))

    def run(self, ticket: str, command: Command) -> None:
        match command:
            case ForgetUser(namespace=namespace, user_id=user_id):
                removed = Forgotten(device_tokens=len(user_id), host_tokens=len(namespace))
                self._outbox.append(Reply(ticket=ticket, result=removed))
            case QueryStats():
                result = Statistics(stats=self.stats())
                self._outbox.append(Reply(ticket=ticket, result=result))
            case _:
                error = InvalidRequest(f"the fake core knows no {type(command).__name__}")
                self._outbox.append(Reply(ticket=ticket, error=to_record(error)))

    def take_outbox(self) -> list[CoreMessage]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def step(self) -> bool:
        for request_id, request in list(self._live.items()):
            passes = self._passes[request_id] = self._passes.get(request_id, 0) + 1
            if request.user_id.startswith("crash"):
                raise InvariantError("the fake core was told to crash")
            if request.user_id.startswith("exit"):
                os._exit(9)
            if request.user_id.startswith("hang"):
                let_go.wait()
            if request.user_id.startswith("hold"):
                continue
            if request.user_id.startswith("slow") and passes < 50:
                continue
            del self._live[request_id]
            self._emit(request)
        return any(not request.user_id.startswith("hold") for request in self._live.values())

    def drain(self) -> None:
        self._refusal = Draining("draining")

    def abort(self, error: EngineError) -> None:
        self._refusal = error
        for request in self._live.values():
            self._emit_error(request, error)
        self._live.clear()

    def close(self) -> None:
        self.abort(Draining("closed"))
        if not self._is_closed:
            self._is_closed = True
            self.wake.close()

    def describe(self) -> str:
        return f"a fake core with {len(self._live)} requests"

    def stats(self) -> CoreStats:
        self.metrics.set("requests_waiting", len(self._live))
        return CoreStats(
            samples=self.metrics.snapshot(),
            num_waiting=len(self._live),
            num_running=0,
            num_steps=0,
            is_draining=self._refusal is not None,
        )

    def _emit_error(self, request: Request, error: EngineError) -> None:
        self.metrics.add("requests_total", 1, request.task.value, error.code)
        self._outbox.append(Outcome(request_id=request.request_id, error=to_record(error)))

    def _emit(self, request: Request) -> None:
        self.metrics.add("requests_total", 1, request.task.value, "ok")
        self.metrics.observe("queue_seconds", 0.003)
        history = np.zeros(0, np.int64) if request.history is None else request.history["item"]
        usage = Usage(
            computed_tokens=len(history),
            history_length=len(history),
            fingerprint="00ff",
            weights_version=INFO.weights_version,
            queue_us=3000,
            onload_wait_us=1000,
            run_us=5000,
        )
        base = float(history.sum()) * 1000
        scores = items = item_scores = embedding = None
        if request.task is Task.RANK:
            assert request.candidates is not None
            ids = request.candidates["item"]
            scores = np.stack([base + ids, base - ids], axis=1).astype(np.float32)
            if request.top_k is not None:
                items = np.sort(ids)[::-1][: request.top_k].copy()
                item_scores = (base + items).astype(np.float32)
        elif request.task is Task.RETRIEVE:
            assert request.top_k is not None
            items = np.arange(request.top_k, dtype=np.int64)
            item_scores = (base - items).astype(np.float32)
        if request.return_user_embedding:
            embedding = np.full(INFO.embedding_dim, base, np.float32)
        response = Response(
            request_id=request.request_id,
            usage=usage,
            scores=scores,
            items=items,
            item_scores=item_scores,
            user_embedding=embedding,
        )
        self._outbox.append(Outcome(request_id=request.request_id, response=response))


def build(model_dir: str | None, config: EngineConfig) -> FakeCore:
    """A folder "missing" fails as a bad model directory does, "broken" as a bug does."""
    name = None if model_dir is None else Path(model_dir).name
    if name == "missing":
        raise ConfigError("model directory 'missing' has no config.json")
    if name == "broken":
        raise RuntimeError("a bug at start")
    return FakeCore(config)


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(run_process(build))
