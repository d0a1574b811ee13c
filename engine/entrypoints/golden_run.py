"""Raw rows through the engine's own layers, pages and backend, user by user as pieces.

Legend: U users, L history rows of a user, S suffix rows, D hidden_size, H heads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from engine.attention_backends.registry import attention_spec, create_backend
from engine.errors import InvariantError
from engine.models.base import PreparedRequest
from engine.models.hstu.model import HstuModel
from engine.platforms.cpu import KvPools
from engine.runner.batch import assemble, piece_rows
from engine.runner.runner import Runner
from engine.runner.step import PieceResult, PieceWork
from engine.transfer.jobs import CopyJob, CopyProgress
from engine.types import Int64Array, Request, Task


class Variant(NamedTuple):
    """How a file is run. piece_size: history rows of a piece; 0 runs a history in one piece."""

    backend: str
    page_size: int
    piece_size: int


class UserRun(NamedTuple):
    """Rows of one user to run: history rows [start, L) and the suffix rows, as x rows [n, D]."""

    prepared: PreparedRequest
    start: int
    x: torch.Tensor
    suffix: Int64Array


class _NoCopies:
    """A copy engine for runs in which everything is on the device."""

    def submit(self, job: CopyJob) -> None:
        raise InvariantError("nothing is copied in a conformance run")

    def cancel(self, job: CopyJob) -> bool:
        return False

    def poll(self) -> list[CopyProgress]:
        return []

    def wait_layer(self, job: CopyJob, layer: int, deadline_s: float) -> bool:
        return False

    def close(self) -> None:
        return None


class GoldenUsers:
    """Users with pages in a pool that just holds them: NaN-poisoned, block tables shuffled.

    Args:
        model: Loaded.
        variant: Backend, page size and pieces.
        lengths: Most history rows of each user.
    """

    def __init__(self, model: HstuModel, variant: Variant, lengths: Sequence[int]) -> None:
        self._model = model
        self._variant = variant
        size = variant.page_size
        counts = [-(-length // size) for length in lengths]
        num_pages = sum(counts) + 1
        self._pools = KvPools(model.spec, size, num_pages, 1, poison=True)
        backend = create_backend(variant.backend, attention_spec(model.spec, size))
        self.runner = Runner(model, backend, self._pools, _NoCopies(), time.monotonic)
        order = np.random.default_rng(7).permutation(num_pages).astype(np.int32)
        ends = np.cumsum([0, *counts])
        self.tables = [order[start:stop] for start, stop in pairwise(ends)]

    @property
    def is_cut(self) -> bool:
        """Histories run in pieces."""
        return self._variant.piece_size > 0 and not self._model.spec.has_bidirectional_context

    @torch.inference_mode()
    def run(self, users: Sequence[UserRun]) -> list[torch.Tensor]:
        """Run each user's rows, all users together; returns float32 [n, D] per user."""
        pieces = [self._cut(user) for user in users]
        outputs: list[list[torch.Tensor]] = [[] for _ in users]
        for step in range(max(len(parts) for parts in pieces)):
            running = [number for number, parts in enumerate(pieces) if step < len(parts)]
            works = [self._work(number, users[number], *pieces[number][step]) for number in running]
            rows = [
                self._rows(users[number], work) for number, work in zip(running, works, strict=True)
            ]
            batch = assemble(
                [piece_rows(self._model, work) for work in works],
                self._variant.page_size,
                self._pools.null_page,
            )
            x = torch.cat(
                [users[number].x[part] for number, part in zip(running, rows, strict=True)]
            )
            out = self.runner.run_layers(x, batch, self._pools, None).float()
            parts = torch.split(out, [work.num_rows for work in works])
            for number, part in zip(running, parts, strict=True):
                outputs[number].append(part)
        return [torch.cat(parts) for parts in outputs]

    def retrieve(self, requests: Sequence[PreparedRequest], top_k: int) -> list[PieceResult]:
        """Retrieve requests of all users through `Runner.run`, histories computed anew."""
        users = [
            UserRun(prepared, 0, torch.empty(0), np.arange(prepared.suffix_length))
            for prepared in requests
        ]
        pieces = [self._cut(user) for user in users]
        results: dict[int, PieceResult] = {}
        for step in range(max(len(parts) for parts in pieces)):
            running = [number for number, parts in enumerate(pieces) if step < len(parts)]
            works = [
                replace(
                    self._work(number, users[number], *pieces[number][step]),
                    task=Task.RETRIEVE,
                    top_k=top_k,
                    wants_user_embedding=True,
                )
                for number in running
            ]
            found = self.runner.run(works, scratch=False, copy_deadline_s=0.0)
            results.update(zip(running, found.pieces, strict=True))
        return [results[number] for number in range(len(users))]

    def kept(self, layer: int, user: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K [n, H, A] and V [n, H, V] of a user's first rows, from the pages."""
        size = self._variant.page_size
        position = np.arange(num_rows)
        page = torch.from_numpy(self.tables[user][position // size].astype(np.int64))
        offset = torch.from_numpy(position % size)
        pages = self._pools.layer(layer)
        return pages.k[page, offset].float(), pages.v[page, offset].float()

    def _cut(self, user: UserRun) -> list[tuple[int, int]]:
        """History rows [start, stop) of each piece; the last one takes the suffix too."""
        start, stop, size = user.start, user.prepared.length, self._variant.piece_size
        if not self.is_cut:
            return [(start, stop)]
        ends = [*range(start + size, stop, size), stop]
        return list(zip([start, *ends], ends, strict=False))

    def _work(self, number: int, user: UserRun, start: int, stop: int) -> PieceWork:
        is_last = stop == user.prepared.length
        return PieceWork(
            prepared=user.prepared,
            start=start,
            stop=stop,
            suffix=user.suffix if is_last else user.suffix[:0],
            block_table=self.tables[number],
            onload=None,
            task=Task.PREFETCH,
            top_k=None,
            wants_user_embedding=False,
        )

    def _rows(self, user: UserRun, work: PieceWork) -> slice:
        """Where the piece's rows stand in the user's x."""
        first = work.start - user.start
        return slice(first, first + work.num_rows)


def prepare_rows(
    model: HstuModel,
    *,
    num_history: int,
    num_targets: int,
    times: Int64Array | None = None,
    query_time: int | None = None,
) -> PreparedRequest:
    """The engine's own plan of a sequence: contextual and history rows, then targets.

    num_history counts contextual rows. With a relative bias, `times` [num_history] are needed, and
    the last history row runs as the first suffix row.
    """
    num_context = model.spec.num_context
    num_events = num_history - num_context
    history = {"item": np.zeros(num_events, np.int64)}
    if times is not None:
        history["time"] = times
    task = Task.PREFETCH
    if num_targets:
        task = Task.RANK
    elif times is not None and num_events:
        task = Task.RETRIEVE
    return model.prepare(
        Request(
            request_id="golden",
            user_id="golden",
            task=task,
            history=history,
            candidates={"item": np.zeros(num_targets, np.int64)} if num_targets else None,
            context=np.zeros(num_context, np.int64) if num_context else None,
            query_time=query_time,
        )
    )
