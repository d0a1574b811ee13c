"""What a core is put together from, as far as the core needs to know it.

`assembly` puts in the real parts, tests put in fakes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.block_manager.manager import BlockManager
from engine.config import EngineConfig
from engine.metrics import Metrics
from engine.models.base import Model
from engine.runner.step import PieceWork, StepResult
from engine.transfer.jobs import CopyEngine
from engine.types import ModelInfo


class StepRunner(Protocol):
    """Runs a step's pieces; called on the device thread."""

    def run(
        self, works: list[PieceWork], *, scratch: bool, copy_deadline_s: float
    ) -> StepResult: ...


class CompletedStep(Protocol):
    """The end of a step on the device."""

    def result(self) -> StepResult | None:
        """The result; raises what the step raised."""


class StepExecutor(Protocol):
    """One device thread (or none: then `submit` runs the step at once)."""

    def submit(self, fn: Callable[[], StepResult]) -> None: ...

    def done(self) -> CompletedStep | None:
        """The end of the submitted step, once; None while it runs."""

    def close(self) -> None: ...


class Waker(Protocol):
    """What the core sleeps on: copies and the device thread set it."""

    def fileno(self) -> int: ...

    def clear(self) -> None: ...

    def wait(self, timeout_s: float) -> bool: ...


class TraceEvent(NamedTuple):
    """Something the core did, for tests and tracing: kind, step number, monotonic seconds."""

    kind: str
    step: int
    time_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class CoreParts:
    """What a core is put together from; tests put fakes in."""

    config: EngineConfig
    model: Model
    info: ModelInfo
    manager: BlockManager
    runner: StepRunner
    copies: CopyEngine
    executor: StepExecutor
    wake: Waker
    metrics: Metrics
    clock: Callable[[], float]
    observer: Callable[[TraceEvent], None] | None = None
