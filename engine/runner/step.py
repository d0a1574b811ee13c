"""What the core hands to the runner, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.models.base import PreparedRequest
from engine.transfer.jobs import CopyJob
from engine.types import Float32Array, Int32Array, Int64Array, Task


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceWork:
    """One piece of one request, ready to run.

    Attributes:
        start, stop: History rows [start, stop) are computed and appended.
        suffix: int64, suffix rows that run in this piece, ascending, the fixed ones first; whole
            chains. Not empty only when stop == prepared.length.
        block_table: int32, pages that cover [0, stop).
        onload: Pages of this user that must be there, waited for layer by layer.
        top_k: Items to retrieve; None unless the task is retrieve.
        wants_user_embedding: Give it back (the request has a `read_row`).
    """

    prepared: PreparedRequest
    start: int
    stop: int
    suffix: Int64Array
    block_table: Int32Array
    onload: CopyJob | None
    task: Task
    top_k: int | None
    wants_user_embedding: bool

    @property
    def num_rows(self) -> int:
        """Rows of the step: history rows to compute, then suffix rows."""
        return self.stop - self.start + len(self.suffix)


class PieceResult(NamedTuple):
    """What one piece gave.

    scores: float32 [candidates of this piece, num_tasks], rank pieces with suffix rows.
    user_embedding: float32 [D]. items, item_scores: int64 [k], float32 [k], retrieve.
    copy_failed: the onload failed or was late: rows and values are garbage, no value is given.
    """

    scores: Float32Array | None = None
    user_embedding: Float32Array | None = None
    items: Int64Array | None = None
    item_scores: Float32Array | None = None
    copy_failed: bool = False


class StepResult(NamedTuple):
    """One result per piece, in order; seconds of the whole step, and of them waiting for copies."""

    pieces: list[PieceResult]
    run_s: float
    onload_wait_s: float
