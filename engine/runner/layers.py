"""The layer loop, and the one way to a layer's pages, which always waits for its onloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from engine.attention_backends.base import (
    AttentionBackend,
    AttentionBatch,
    KvPages,
    LayerBias,
)
from engine.attention_backends.registry import attention_spec
from engine.attention_backends.suffix import StepAttention
from engine.errors import ConfigError
from engine.models.base import LayerProgram, Model, StepPages
from engine.transfer.jobs import CopyEngine, CopyJob

Clock = Callable[[], float]


class Pools(Protocol):
    """A device pool, as far as the layer loop needs it."""

    def layer(self, layer: int) -> KvPages:
        """Views of one layer's pages, the null page last."""


class OnloadWaits:
    """The onloads of a step. Owned by the device thread.

    Args:
        copies: Runs the jobs.
        jobs: One per piece, None for a piece that waits for nothing.
        deadline_s: Monotonic seconds; a job that is not there by then is given up.
        clock: Monotonic seconds.

    Attributes:
        failed: Per piece: its job failed or was late. It is not waited for again.
        waited_s: Seconds spent waiting so far.
    """

    def __init__(
        self,
        copies: CopyEngine,
        jobs: Sequence[CopyJob | None],
        deadline_s: float,
        clock: Clock,
    ) -> None:
        self._copies = copies
        self._pending = [(piece, job) for piece, job in enumerate(jobs) if job is not None]
        self._deadline_s = deadline_s
        self._clock = clock
        self.failed = [False] * len(jobs)
        self.waited_s = 0.0

    def wait(self, layer: int) -> None:
        """Block until the pages of this layer are there, or given up."""
        if not self._pending:
            return
        start_s = self._clock()
        arrived = []
        for piece, job in self._pending:
            if self._copies.wait_layer(job, layer, self._deadline_s):
                arrived.append((piece, job))
            else:
                self.failed[piece] = True
        self._pending = arrived
        self.waited_s += self._clock() - start_s


class LayerPages:
    """The pages of a step's layers. Whoever reads or writes them in a step gets them here."""

    def __init__(self, pools: Pools, waits: OnloadWaits | None) -> None:
        self._pools = pools
        self._waits = waits

    def layer(self, layer: int) -> KvPages:
        """The layer's pages, after its onloads have arrived."""
        if self._waits is not None:
            self._waits.wait(layer)
        return self._pools.layer(layer)


def layer_program(model: Model, backend: AttentionBackend) -> LayerProgram:
    """All layers of the model on that backend: the model's own program, or one after another.

    Raises ConfigError when the attention scale depends on the batch.
    """
    if model.spec.scale is None:
        raise ConfigError(
            f"the attention scale of {model.spec.name} depends on the batch: "
            "set layers.scale_length to the N it was trained with"
        )
    return model.layer_program(backend) or partial(run_layers, model, backend)


def run_layers(
    model: Model,
    backend: AttentionBackend,
    x: torch.Tensor,
    batch: AttentionBatch,
    pages: StepPages,
) -> torch.Tensor:
    """A `LayerProgram` of any model and backend."""
    scale = model.spec.scale
    assert scale is not None, "layer_program refuses a scale that depends on the batch"
    attention = StepAttention(backend, batch)
    has_bias = model.spec.bias is not None
    for layer in range(model.spec.num_layers):
        rows = model.project(layer, x)
        bias = LayerBias(*model.bias_tables(layer)) if has_bias else None
        layer_pages = pages.layer(layer)
        appended = batch.append_rows
        backend.append(
            layer_pages, rows.k.index_select(0, appended), rows.v.index_select(0, appended)
        )
        attended = attention(layer_pages, rows.q, rows.k, rows.v, bias)
        x = model.output(layer, x, rows.u, attended.mul_(scale))
    return x


def check_backend_fits(model: Model, backend: AttentionBackend, page_size: int) -> None:
    """Raise ConfigError unless the backend was made for this model and page size."""
    wanted = attention_spec(model.spec, page_size, backend.spec.platform)
    if wanted != backend.spec:
        raise ConfigError(
            f"attention backend {backend.name!r} was made for {backend.spec}, "
            f"the model and its pages are {wanted}"
        )
