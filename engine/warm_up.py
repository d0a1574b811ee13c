"""Warm-up: made-up requests, so that no client's request is the first of its shape.

First steps are slow: kernels choose and build themselves for a shape, threads start, memory is
touched for the first time. The requests run through a core of their own (same scheduler, same
runner, small pools), so the pieces are those that serving cuts, and nothing that serves is touched.

Lengths grow by `GROWTH` from `FIRST_EVENTS` to the longest history that the model takes, as long as
the next round is expected to fit into `BUDGET_S`: a big model is warm for shorter histories then.
The first round says nothing about the next, as most of it happens only once; so there are two.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from engine.commands import CoreMessage
from engine.errors import EngineError, from_record
from engine.models.base import Model
from engine.types import Outcome, Request, Task

BUDGET_S = 3.0
FIRST_EVENTS = 64
GROWTH = 4
APPENDED_EVENTS = 16
NUM_CANDIDATES = 256

_logger = logging.getLogger(__name__)


class WarmUpCore(Protocol):
    """What warm-up needs of an `EngineCore` whose steps run in the caller."""

    def submit(self, request: Request) -> None: ...

    def step(self) -> bool: ...

    def take_outbox(self) -> list[CoreMessage]: ...

    def close(self) -> None: ...


def warm_up(
    model: Model,
    make_core: Callable[[int], WarmUpCore],
    page_size: int,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Run requests of growing length; the seconds it took.

    Each round computes a history, appends to it, and runs every task on the result.

    Args:
        make_core: A core around the model with a device pool of so many pages. It is closed here.
        page_size: Token slots of a page.
    """
    start_s = clock()
    max_events = model.describe().max_history_events
    num_events = min(FIRST_EVENTS, max_events)
    try:
        _run_round(model, make_core, page_size, num_events)
        expected_s = 0.0
        while num_events < max_events and clock() - start_s + expected_s <= BUDGET_S:
            num_events = min(GROWTH * num_events, max_events)
            round_start_s = clock()
            _run_round(model, make_core, page_size, num_events)
            expected_s = GROWTH**2 * (clock() - round_start_s)  # attention is quadratic at worst
    except EngineError as error:
        # A request that is refused here is refused to clients in the same words.
        _logger.warning("warm-up ends early: %s", error)
    took_s = clock() - start_s
    _logger.info(
        "warm-up of weights %s: histories up to %d events (the model takes %d) in %.2f s",
        model.spec.weights_version, num_events, max_events, took_s,
    )  # fmt: skip
    return took_s


def _run_round(
    model: Model, make_core: Callable[[int], WarmUpCore], page_size: int, num_events: int
) -> None:
    # A prefetch would leave no rows to append for the request that brings candidates.
    tasks = [task for task in model.spec.tasks if task is not Task.PREFETCH]
    shorter = model.sample_request(max(1, num_events - APPENDED_EVENTS), NUM_CANDIDATES, tasks[0])
    requests = [model.sample_request(num_events, NUM_CANDIDATES, task) for task in tasks]
    num_pages = -(-model.prepare(requests[0]).length // page_size) + 1
    core = make_core(num_pages)
    try:
        for request in (shorter, *requests):
            _serve(core, request)
    finally:
        core.close()


def _serve(core: WarmUpCore, request: Request) -> None:
    """Run one request to its end. Raises the EngineError it ended with."""
    core.submit(request)
    while not (messages := core.take_outbox()):
        core.step()
    (outcome,) = messages
    assert isinstance(outcome, Outcome)
    if outcome.error is not None:
        raise from_record(outcome.error)
