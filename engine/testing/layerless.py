"""A core without layers: real admission, planning, state and accounting, and no computation.

Answers are empty and copies complete when they are polled, so whole logs can be replayed in
seconds to see what would be found where. Nothing here may be asked for scores.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.block_manager.manager import BlockManager
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.core_parts import CoreParts, ServedModel, describe_served
from engine.metrics import Metrics
from engine.models.base import Model
from engine.platforms.cpu import Wake
from engine.runner.step import PieceResult, PieceWork, StepResult
from engine.testing.fakes import Ended, ManualCopyEngine, ManualLoader


class NoLayers:
    """A runner that answers every piece with nothing in it."""

    def run(
        self, works: Sequence[PieceWork], *, scratch: bool, copy_deadline_s: float
    ) -> StepResult:
        return StepResult([PieceResult() for _ in works], 0.0, 0.0)


class OnePassLate:
    """An executor whose step ends one pass of the core later, so that the core looks ahead."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._ended: deque[tuple[int, Ended[StepResult]]] = deque()
        self._num_polls = 0

    def submit(self, fn: Callable[[], StepResult]) -> None:
        self._ended.append((self._num_polls + 1, Ended(fn(), None)))
        self._wake.set()

    def done(self) -> Ended[StepResult] | None:
        self._num_polls += 1
        if self._ended and self._ended[0][0] < self._num_polls:
            return self._ended.popleft()[1]
        self._wake.set()
        return None

    def close(self) -> None:
        self._ended.clear()


def layerless_core(model: Model, config: EngineConfig, *, num_chunks: int) -> EngineCore:
    """A core around the model's front. The host tier has `num_chunks` chunks of no bytes; the
    config's `host_bytes` is not read."""
    cache = config.cache
    wake, metrics, copies = Wake(), Metrics(), ManualCopyEngine()
    manager = BlockManager(
        num_pages=cache.device_pages,
        page_size=cache.page_size,
        num_chunks=num_chunks if cache.tiers == "tiered" else 0,
        pages_per_chunk=cache.chunk_size // cache.page_size,
        copies=copies,
        metrics=metrics,
        eviction_policy=cache.eviction_policy,
        page_bytes_all_layers=1,
        clock=time.monotonic,
    )
    return EngineCore(
        CoreParts(
            config=config,
            served=ServedModel(
                model=model,
                info=describe_served(
                    model, config, backend="none", exactness="none", token_bytes=1
                ),
                runner=NoLayers(),
            ),
            loader=ManualLoader(),
            manager=manager,
            copies=copies,
            executor=OnePassLate(wake),
            wake=wake,
            metrics=metrics,
            clock=time.monotonic,
        )
    )
