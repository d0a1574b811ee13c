"""A core that answers at once, for measuring all that is around it: `python -m ...stub_core`.

Scores are always the same zeros. The server starts it in place of the real core. With
MTSERVE_STUB_CPU in the environment it keeps to that core of the machine.
"""

from __future__ import annotations

import os

import numpy as np

from engine.commands import Command, CoreMessage, QueryStats, Reply, ServedWeights, Statistics
from engine.config import EngineConfig
from engine.core_process import run_process
from engine.errors import Draining, EngineError, InvalidRequest, to_record
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

CPU_VARIABLE = "MTSERVE_STUB_CPU"
INFO = ModelInfo(
    name="stub",
    weights_version="1",
    dtype="float32",
    tasks=(Task.RANK,),
    score_names=("score",),
    features=(FeatureInfo(name="item", dtype="int64", dim=0, on_history=True, on_candidates=True),),
    context_features=(),
    reads_query_time=False,
    embedding_dim=0,
    max_history_events=1 << 20,
    max_history_tokens=1 << 20,
    max_batch_tokens=1 << 20,
    keep_stride=1,
    reuse=Reuse.APPEND,
    reuse_reason="a stub",
    backend="stub",
    exactness="bitwise",
    cache_tiers="off",
    page_size=32,
    chunk_size=256,
    token_bytes=512,
    sample_items=(1, 2),
)


class _NoWake:
    """A pipe that nobody writes to."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def clear(self) -> None:
        pass


class StubCore:
    """The face of EngineCore without a model; owned by one thread."""

    def __init__(self) -> None:
        self.served = ServedWeights(active=INFO.weights_version, infos=(INFO,))
        self.wake = _NoWake()
        self._outbox: list[CoreMessage] = []
        self._refusal: EngineError | None = None
        self._scores: dict[int, np.ndarray] = {}

    @property
    def is_idle(self) -> bool:
        return not self._outbox

    def submit(self, request: Request) -> None:
        """Answer at once, with as many zeros as there are candidates."""
        if self._refusal is not None:
            record = to_record(self._refusal)
            self._outbox.append(Outcome(request_id=request.request_id, error=record))
            return
        assert request.history is not None
        assert request.candidates is not None
        count = len(request.candidates["item"])
        scores = self._scores.get(count)
        if scores is None:
            scores = self._scores[count] = np.zeros((count, 1), np.float32)
        length = len(request.history["item"])
        usage = Usage(computed_tokens=length, history_length=length, weights_version="1")
        response = Response(request_id=request.request_id, usage=usage, scores=scores)
        self._outbox.append(Outcome(request_id=request.request_id, response=response))

    def cancel(self, request_id: str) -> None:
        pass

    def run(self, ticket: str, command: Command) -> None:
        """Tell statistics; nothing else makes sense here."""
        if isinstance(command, QueryStats):
            reply = Reply(ticket=ticket, result=Statistics(stats=self.stats()))
        else:
            error = InvalidRequest(f"the stub core knows no {type(command).__name__}")
            reply = Reply(ticket=ticket, error=to_record(error))
        self._outbox.append(reply)

    def take_outbox(self) -> list[CoreMessage]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def step(self) -> bool:
        return False

    def drain(self) -> None:
        self._refusal = Draining("draining")

    def abort(self, error: EngineError) -> None:
        self._refusal = error

    def close(self) -> None:
        pass

    def stats(self) -> CoreStats:
        return CoreStats(samples=[], num_waiting=0, num_running=0, num_steps=0, is_draining=False)


def _build(model_dir: str | None, config: EngineConfig) -> StubCore:
    return StubCore()


if __name__ == "__main__":
    if cpu := os.environ.get(CPU_VARIABLE):
        os.sched_setaffinity(0, {int(cpu)})
    os._exit(run_process(_build))
