"""Index arithmetic: pieces of requests -> the rows of one step.

Rows are grouped by request: [history rows start..stop | suffix rows]. NumPy only, vectorised over
the pieces; nothing here depends on a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention_backends.base import AttentionBatch, BiasBatch
from engine.errors import InvariantError
from engine.models.base import Model
from engine.runner.step import PieceWork
from engine.types import Int32Array, Int64Array

BoolArray = NDArray[np.bool_]


class PieceBias(NamedTuple):
    """What a bias reads of one piece; n rows, s of them suffix rows. int64 each.

    row_position, row_next_time [n]; key_time [stop]; suffix_time, suffix_position [s].
    """

    row_position: Int64Array
    row_next_time: Int64Array
    key_time: Int64Array
    suffix_time: Int64Array
    suffix_position: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceRows:
    """The rows of one piece, and what they see.

    Attributes:
        start, stop: History rows [start, stop) come first.
        suffix: int64 [s], suffix rows of the request that follow, ascending, whole chains.
        suffix_parent, suffix_reads_self: int32, bool [S], of the whole request.
        kv_lo, kv_hi: int32 [stop - start + s], history interval of each row.
        block_table: int32, pages that cover what the rows see and [start, stop).
    """

    start: int
    stop: int
    suffix: Int64Array
    suffix_parent: Int32Array
    suffix_reads_self: BoolArray
    kv_lo: Int32Array
    kv_hi: Int32Array
    block_table: Int32Array
    bias: PieceBias | None = None


class _Spans(NamedTuple):
    """Of each piece: history rows, suffix rows, and where its rows begin (with the end). [R]."""

    history: Int64Array
    suffix: Int64Array
    row_indptr: Int64Array


def piece_rows(model: Model, work: PieceWork) -> PieceRows:
    """What the rows of a piece see, by the model's rules."""
    prepared, suffix = work.prepared, work.suffix
    seen = model.history_intervals(work.start, work.stop, prepared.length)
    suffix_hi = np.full(len(suffix), prepared.length, np.int32)
    return PieceRows(
        start=work.start,
        stop=work.stop,
        suffix=suffix,
        suffix_parent=prepared.suffix_parent,
        suffix_reads_self=prepared.suffix_reads_self,
        kv_lo=np.concatenate((seen.lo, prepared.suffix_kv_lo[suffix])),
        kv_hi=np.concatenate((seen.hi, suffix_hi)),
        block_table=work.block_table,
        bias=_piece_bias(model, work) if model.spec.bias is not None else None,
    )


def step_records(works: Sequence[PieceWork]) -> Int64Array:
    """The records of all rows, [T, W]."""
    parts = []
    for work in works:
        parts.append(work.prepared.records[work.start : work.stop])
        parts.append(work.prepared.suffix_records[work.suffix])
    return np.concatenate(parts)


def assemble(pieces: Sequence[PieceRows], page_size: int, null_page: int) -> AttentionBatch:
    """The step of these pieces. Raises InvariantError when a chain or a table is incomplete."""
    spans = _spans(pieces)
    block_table = _block_table(pieces, null_page)
    append_rows, slots = _appended(pieces, spans, block_table, page_size)
    suffix_rows = _ranges(spans.row_indptr[:-1] + spans.history, spans.suffix)
    return AttentionBatch(
        row_indptr=torch.from_numpy(spans.row_indptr.astype(np.int32)),
        kv_lo=torch.from_numpy(_joined([piece.kv_lo for piece in pieces], np.int32)),
        kv_hi=torch.from_numpy(_joined([piece.kv_hi for piece in pieces], np.int32)),
        block_table=torch.from_numpy(block_table),
        append_rows=torch.from_numpy(append_rows),
        slot_mapping=torch.from_numpy(slots),
        suffix_rows=torch.from_numpy(suffix_rows),
        suffix_chain=torch.from_numpy(_chains(pieces, spans)),
        bias=_bias_batch(pieces),
    )


def _spans(pieces: Sequence[PieceRows]) -> _Spans:
    history = np.array([piece.stop - piece.start for piece in pieces], np.int64)
    suffix = np.array([len(piece.suffix) for piece in pieces], np.int64)
    return _Spans(history, suffix, np.concatenate(([0], np.cumsum(history + suffix))))


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """The integers [starts[i], starts[i] + counts[i]) one after another."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def _block_table(pieces: Sequence[PieceRows], null_page: int) -> Int32Array:
    widths = np.array([len(piece.block_table) for piece in pieces], np.int64)
    table = np.full((len(pieces), max(1, widths.max(initial=0))), null_page, np.int32)
    used = np.arange(table.shape[1]) < widths[:, None]
    table[used] = _joined([piece.block_table for piece in pieces], np.int32)
    return table


def _appended(
    pieces: Sequence[PieceRows], spans: _Spans, block_table: Int32Array, page_size: int
) -> tuple[Int64Array, Int64Array]:
    """Rows whose K/V are kept, and the slot of each."""
    for piece in pieces:
        covered = len(piece.block_table) * page_size
        if covered < piece.stop:
            raise InvariantError(
                f"a piece ends at row {piece.stop} but its pages cover {covered} rows only"
            )
    rows = _ranges(spans.row_indptr[:-1], spans.history)
    starts = np.array([piece.start for piece in pieces], np.int64)
    positions = _ranges(starts, spans.history)
    owners = np.repeat(np.arange(len(pieces)), spans.history)
    pages = block_table[owners, positions // page_size].astype(np.int64)
    return rows, pages * page_size + positions % page_size


def _chains(pieces: Sequence[PieceRows], spans: _Spans) -> Int64Array:
    """For each suffix row of the step, the suffix rows it reads: [num_suffix, longest chain]."""
    total = int(spans.suffix.sum())
    if not total:
        return np.zeros((0, 1), np.int64)
    parent = _joined([piece.suffix_parent[piece.suffix] for piece in pieces], np.int64)
    reads_self = _joined([piece.suffix_reads_self[piece.suffix] for piece in pieces], np.bool_)
    parent = _place_in_step(pieces, spans, parent)
    current = np.where(reads_self, np.arange(total), -1)
    columns = [current]
    while True:
        current = np.where(current >= 0, parent[current], -1)
        if not (current >= 0).any():
            break
        columns.append(current)
    return np.ascontiguousarray(np.stack(columns[::-1], axis=1))


def _place_in_step(pieces: Sequence[PieceRows], spans: _Spans, parent: Int64Array) -> Int64Array:
    """Parents as suffix rows of their requests -> as suffix rows of the step."""
    owner = np.repeat(np.arange(len(pieces)), spans.suffix)
    stride = 1 + max(int(piece.suffix[-1]) for piece in pieces if len(piece.suffix))
    key = owner * stride + _joined([piece.suffix for piece in pieces], np.int64)
    wanted = owner * stride + parent
    place = np.minimum(np.searchsorted(key, wanted), len(key) - 1)
    lost = (parent >= 0) & (key[place] != wanted)
    if lost.any():
        row = int(np.flatnonzero(lost)[0])
        raise InvariantError(
            f"suffix row {int(key[row] % stride)} runs in a piece without the row "
            f"{int(parent[row])} it reads: chains must not be cut"
        )
    return np.where(parent >= 0, place, -1)


def _piece_bias(model: Model, work: PieceWork) -> PieceBias:
    prepared, suffix = work.prepared, work.suffix
    history = model.bias_inputs(prepared.records[: work.stop])
    rows = model.bias_inputs(prepared.suffix_records[suffix])
    position = prepared.suffix_position[suffix].astype(np.int64)
    return PieceBias(
        row_position=np.concatenate((np.arange(work.start, work.stop), position)),
        row_next_time=np.concatenate((history.next_time[work.start :], rows.next_time)),
        key_time=history.time,
        suffix_time=rows.time,
        suffix_position=position,
    )


def _bias_batch(pieces: Sequence[PieceRows]) -> BiasBatch | None:
    parts = [piece.bias for piece in pieces if piece.bias is not None]
    if not parts or len(parts) != len(pieces):
        return None
    lengths = np.array([len(part.key_time) for part in parts], np.int64)
    key_time = np.zeros((len(parts), max(1, lengths.max())), np.int64)
    key_time[np.arange(key_time.shape[1]) < lengths[:, None]] = np.concatenate(
        [part.key_time for part in parts]
    )
    return BiasBatch(
        row_position=_tensor([part.row_position for part in parts]),
        row_next_time=_tensor([part.row_next_time for part in parts]),
        key_time=torch.from_numpy(key_time),
        suffix_time=_tensor([part.suffix_time for part in parts]),
        suffix_position=_tensor([part.suffix_position for part in parts]),
    )


def _tensor(parts: Sequence[Int64Array]) -> torch.Tensor:
    return torch.from_numpy(_joined(parts, np.int64))
