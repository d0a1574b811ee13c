"""The runner: one step of pieces in, one result per piece out.

It lives on the device thread. A piece whose onload failed runs to the end on whatever its pages
hold; its rows touch no other piece, and its values are not given back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention_backends.base import AttentionBackend, AttentionBatch, KvPages
from engine.models.base import Model
from engine.platforms.cpu import KvPools
from engine.runner.batch import assemble, piece_rows, step_records
from engine.runner.layers import (
    Clock,
    LayerPages,
    OnloadWaits,
    Pools,
    check_backend_fits,
    layer_program,
)
from engine.runner.step import PieceResult, PieceWork, StepResult
from engine.transfer.jobs import CopyEngine
from engine.types import Float32Array, Int64Array, Task


class _ScratchPools:
    """The scratch pool: the same physical pages in every layer."""

    def __init__(self, pools: KvPools) -> None:
        self._pages = pools.scratch_layer()

    def layer(self, layer: int) -> KvPages:
        return self._pages


class Runner:
    """Runs steps. Not thread-safe: owned by the device thread.

    Args:
        model: Loaded.
        backend: Made for this model and the pool's page size.
        pools: The device pool.
        copies: Runs the onloads that pieces wait for.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        pools: KvPools,
        copies: CopyEngine,
        clock: Clock,
    ) -> None:
        self._model = model
        self._pools = pools
        self._copies = copies
        self._clock = clock
        self._page_size = pools.layer(0).k.shape[1]
        check_backend_fits(model, backend, self._page_size)
        self._layers = layer_program(model, backend)

    @torch.inference_mode()
    def run(
        self, works: Sequence[PieceWork], *, scratch: bool, copy_deadline_s: float
    ) -> StepResult:
        """Run one step.

        Args:
            works: At least one piece; block tables are of the scratch pool with `scratch`.
            scratch: Keep one layer's K/V at a time, in scratch pages.
            copy_deadline_s: Monotonic seconds; an onload that is not there by then has failed.
        """
        start_s = self._clock()
        waits = OnloadWaits(
            self._copies, [work.onload for work in works], copy_deadline_s, self._clock
        )
        if any(work.num_rows for work in works):
            results = self._run_rows(works, scratch, waits)
        else:
            for layer in range(self._model.spec.num_layers):
                waits.wait(layer)
            results = [PieceResult(copy_failed=failed) for failed in waits.failed]
        return StepResult(results, self._clock() - start_s, waits.waited_s)

    def run_layers(
        self,
        x: torch.Tensor,
        batch: AttentionBatch,
        pools: Pools,
        waits: OnloadWaits | None,
    ) -> torch.Tensor:
        """Rows x [T, D] through all layers, over the pages of `pools`."""
        return self._layers(x, batch, LayerPages(pools, waits))

    def _run_rows(
        self, works: Sequence[PieceWork], scratch: bool, waits: OnloadWaits
    ) -> list[PieceResult]:
        pools: Pools = _ScratchPools(self._pools) if scratch else self._pools
        null_page = len(pools.layer(0).k) - 1
        pieces = [piece_rows(self._model, work) for work in works]
        batch = assemble(pieces, self._page_size, null_page)
        records = torch.from_numpy(step_records(works))
        x = self.run_layers(self._model.embed(records), batch, pools, waits)
        starts = batch.row_indptr[:-1].tolist()
        suffix_starts = [
            start + work.stop - work.start for start, work in zip(starts, works, strict=True)
        ]
        live = [not failed for failed in waits.failed]
        scores = self._rank(works, suffix_starts, live, x, records)
        users = self._user_embeddings(works, suffix_starts, live, x)
        return [
            self._result(work, failed, scores.get(piece), users.get(piece))
            for piece, (work, failed) in enumerate(zip(works, waits.failed, strict=True))
        ]

    def _rank(
        self,
        works: Sequence[PieceWork],
        suffix_starts: Sequence[int],
        live: Sequence[bool],
        x: torch.Tensor,
        records: torch.Tensor,
    ) -> dict[int, Float32Array]:
        """Scores of each rank piece that has suffix rows, all heads in one go."""
        rows: dict[int, Int64Array] = {}
        for piece, work in enumerate(works):
            if work.task is Task.RANK and live[piece] and len(work.suffix):
                is_candidate = work.suffix >= work.prepared.num_fixed_suffix
                rows[piece] = suffix_starts[piece] + np.flatnonzero(is_candidate)
        if not rows:
            return {}
        index = torch.from_numpy(np.concatenate(list(rows.values())))
        scores = self._model.rank(x.index_select(0, index), records.index_select(0, index))
        parts = torch.split(scores, [len(part) for part in rows.values()])
        return {piece: part.numpy().copy() for piece, part in zip(rows.keys(), parts, strict=True)}

    def _user_embeddings(
        self,
        works: Sequence[PieceWork],
        suffix_starts: Sequence[int],
        live: Sequence[bool],
        x: torch.Tensor,
    ) -> dict[int, torch.Tensor]:
        """User embedding of each piece that needs one."""
        rows: dict[int, int] = {}
        for piece, work in enumerate(works):
            read_row = work.prepared.read_row
            is_wanted = work.task is Task.RETRIEVE or work.wants_user_embedding
            if read_row is None or not is_wanted or not live[piece]:
                continue
            place = np.flatnonzero(work.suffix == read_row)
            if len(place):
                rows[piece] = suffix_starts[piece] + int(place[0])
        if not rows:
            return {}
        users = self._model.user_embedding(x.index_select(0, torch.tensor(list(rows.values()))))
        return dict(zip(rows.keys(), users, strict=True))

    def _result(
        self,
        work: PieceWork,
        failed: bool,
        scores: Float32Array | None,
        user: torch.Tensor | None,
    ) -> PieceResult:
        if failed:
            return PieceResult(copy_failed=True)
        embedding: Float32Array | None = None
        if user is not None and work.wants_user_embedding:
            embedding = user.numpy().copy()
        if user is None or work.task is not Task.RETRIEVE or work.top_k is None:
            return PieceResult(scores=scores, user_embedding=embedding)
        items, item_scores = self._model.retrieve(user, work.top_k, work.prepared.excluded_rows)
        return PieceResult(
            scores=scores, user_embedding=embedding, items=items, item_scores=item_scores
        )
