"""Pieces: how a request is cut, and what a step holds.

A piece runs some history rows `[start, stop)` and, once the history is complete, some suffix
rows. Its progress is not written down anywhere but in the user's state: the next piece looks the
state up again and starts where it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.block_manager.reservation import Reservation
from engine.models.base import PreparedRequest
from engine.scheduler.request import ScheduledRequest
from engine.scheduler.version import ServedVersion
from engine.types import Int64Array

NO_SUFFIX: Int64Array = np.empty(0, dtype=np.int64)


class PieceShape(NamedTuple):
    """History rows [start, stop) and suffix row indices."""

    start: int
    stop: int
    suffix: Int64Array

    @property
    def num_rows(self) -> int:
        return self.stop - self.start + len(self.suffix)

    def num_pairs(self, length: int) -> int:
        """(row, visible key) pairs, taking the mask as causal."""
        history = (self.stop * (self.stop + 1) - self.start * (self.start + 1)) // 2
        return history + len(self.suffix) * length


@dataclass(slots=True, eq=False, kw_only=True)
class Piece:
    """One planned piece. Owned by the core thread; the device thread only reads it.

    Attributes:
        reservation: The hold on pages; None for a scratch run.
        is_last: The request is answered after it.
    """

    entry: ScheduledRequest
    shape: PieceShape
    reservation: Reservation | None
    is_last: bool


@dataclass(slots=True, eq=False, kw_only=True)
class StepPlan:
    """The pieces that run together. It grows until it is full or the device is free for it.

    Attributes:
        num_pairs: (row, visible key) pairs.
        onload_bytes: Bytes that its onloads move.
        is_scratch: Its one piece runs outside the cache.
        is_uncut: Its one piece cannot be cut, whatever the budgets.
        is_closed: It takes no more pieces.
    """

    number: int
    pieces: list[Piece] = field(default_factory=list)
    num_rows: int = 0
    num_pairs: int = 0
    onload_bytes: int = 0
    is_scratch: bool = False
    is_uncut: bool = False
    is_closed: bool = False

    @property
    def version(self) -> ServedVersion:
        """The weights version of its pieces, of which there is at least one."""
        return self.pieces[0].entry.version

    def remove(self, piece: Piece) -> None:
        """The piece was given up before the step started; its onload stays counted."""
        assert piece.entry.prepared is not None
        self.pieces.remove(piece)
        self.num_rows -= piece.shape.num_rows
        self.num_pairs -= piece.shape.num_pairs(piece.entry.prepared.length)


def suffix_left(entry: ScheduledRequest) -> bool:
    """Whether suffix rows are still to be run once the history is there."""
    prepared = entry.prepared
    if prepared is None or prepared.suffix_length == 0:
        return False
    tail = prepared.suffix_length - prepared.num_fixed_suffix
    return entry.suffix_done < tail or (tail == 0 and entry.suffix_done == 0)


def take_suffix(entry: ScheduledRequest, prepared: PreparedRequest, max_rows: int) -> Int64Array:
    """The next suffix rows that fit: the fixed ones, then whole chains."""
    fixed = prepared.num_fixed_suffix
    first = fixed + entry.suffix_done
    left = prepared.suffix_length - first
    if fixed + left > max_rows:
        left = max(0, max_rows - fixed) // prepared.chain_size * prepared.chain_size
        if left == 0:
            return NO_SUFFIX
    rows = np.arange(fixed + left, dtype=np.int64)
    rows[fixed:] += entry.suffix_done
    return rows


def shape_piece(
    entry: ScheduledRequest,
    prepared: PreparedRequest,
    *,
    start: int,
    max_rows: int,
    max_history_rows: int | None,
    needs_suffix: bool,
) -> PieceShape | None:
    """The next piece from history row `start` on, or None when it needs more than `max_rows`.

    `max_history_rows` None: the history cannot be cut. `needs_suffix`: the history rows live no
    longer than the piece, so suffix rows must come along.
    """
    rows = prepared.length - start
    if max_history_rows is None:
        if rows > max_rows:
            return None
    else:
        rows = min(rows, max_rows, max_history_rows)
    stop = start + rows
    wants_suffix = suffix_left(entry)
    suffix = NO_SUFFIX
    if stop == prepared.length and wants_suffix:
        suffix = take_suffix(entry, prepared, max_rows - rows)
    is_stuck = rows == 0 and (wants_suffix or start < prepared.length)
    if len(suffix) == 0 and (is_stuck or (wants_suffix and needs_suffix)):
        return None
    return PieceShape(start, stop, suffix)


def ends_request(entry: ScheduledRequest, prepared: PreparedRequest, shape: PieceShape) -> bool:
    """Whether nothing is left to do after the piece."""
    if shape.stop < prepared.length:
        return False
    if not suffix_left(entry):
        return True
    done = entry.suffix_done + max(0, len(shape.suffix) - prepared.num_fixed_suffix)
    return len(shape.suffix) > 0 and done >= prepared.suffix_length - prepared.num_fixed_suffix
