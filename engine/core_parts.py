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
from engine.models.reuse import derive_reuse
from engine.runner.step import PieceWork, StepResult
from engine.transfer.jobs import CopyEngine
from engine.types import ModelInfo


class StepRunner(Protocol):
    """Runs a step's pieces; called on the device thread."""

    def run(
        self, works: list[PieceWork], *, scratch: bool, copy_deadline_s: float
    ) -> StepResult: ...


def describe_served(
    model: Model,
    config: EngineConfig,
    *,
    backend: str,
    exactness: str,
    token_bytes: int,
    is_random: bool = False,
) -> ModelInfo:
    """What clients may know of a model that this configuration serves.

    Raises ConfigError when its state cannot be reused exactly."""
    spec = model.spec
    reuse, reason = derive_reuse(spec)
    return ModelInfo(
        name=spec.name,
        weights_version=spec.weights_version,
        dtype=spec.dtype,
        tasks=spec.tasks,
        max_history_tokens=spec.max_history_tokens,
        max_batch_tokens=config.scheduler.max_batch_tokens,
        reuse=reuse,
        reuse_reason=reason,
        backend=backend,
        exactness=exactness,
        cache_tiers=config.cache.tiers,
        page_size=config.cache.page_size,
        chunk_size=config.cache.chunk_size,
        token_bytes=token_bytes,
        is_random=is_random,
        **model.describe()._asdict(),
    )


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

    def set(self) -> None: ...

    def wait(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...


class TraceEvent(NamedTuple):
    """Something the core did, for tests and tracing: kind, step number, monotonic seconds."""

    kind: str
    step: int
    time_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class ServedModel:
    """A loaded model with what runs it; `info` names its weights version.

    Attributes:
        load_s, warm_up_s: Seconds that reading it and its first steps took.
    """

    model: Model
    info: ModelInfo
    runner: StepRunner
    load_s: float = 0.0
    warm_up_s: float = 0.0


class ModelLoader(Protocol):
    """Loads models in the background, one at a time.

    What `load` and `grow` return gives the model once it is there, None before, and raises
    ConfigError if it cannot be served.
    """

    def load(
        self, path: str, version: str | None, beside: Model
    ) -> Callable[[], ServedModel | None]:
        """The model directory at `path`, to be served beside a model with the same K/V layout and
        the same inputs; `version` None takes the name in the directory. Raises ConfigError."""

    def grow(self, path: str, model: Model) -> Callable[[], ServedModel | None]:
        """The model with the larger item table of the directory at `path`. Raises ConfigError."""

    def close(self) -> None:
        """Wait for a load that is under way; its result is dropped."""


@dataclass(slots=True, kw_only=True, eq=False)
class CoreParts:
    """What a core is put together from; tests put fakes in."""

    config: EngineConfig
    served: ServedModel
    loader: ModelLoader
    manager: BlockManager
    copies: CopyEngine
    executor: StepExecutor
    wake: Waker
    metrics: Metrics
    clock: Callable[[], float]
    observer: Callable[[TraceEvent], None] | None = None
