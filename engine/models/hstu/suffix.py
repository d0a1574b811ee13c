"""Suffix rows of a request: the row that answers for the user, then the candidates. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.models.config import ModelConfig
from engine.models.hstu.events import Events
from engine.models.hstu.input_stage import ITEM_COLUMN, RecordLayout
from engine.models.hstu.mask import MaskRule, candidate_kv_lo, history_intervals
from engine.types import Int32Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SuffixRows:
    """The suffix part of a `PreparedRequest`; see there."""

    records: Int64Array
    parent: Int32Array
    position: Int32Array
    reads_self: NDArray[np.bool_]
    kv_lo: Int32Array
    num_fixed: int
    read_row: int | None

    @classmethod
    def none(cls, layout: RecordLayout) -> SuffixRows:
        """No suffix at all."""
        return cls(
            records=layout.empty_records(0),
            parent=np.empty(0, dtype=np.int32),
            position=np.empty(0, dtype=np.int32),
            reads_self=np.empty(0, dtype=np.bool_),
            kv_lo=np.empty(0, dtype=np.int32),
            num_fixed=0,
            read_row=None,
        )


class SuffixBuilder:
    """Adds the suffix rows of one model's requests."""

    def __init__(self, config: ModelConfig, layout: RecordLayout, rule: MaskRule) -> None:
        self._config = config
        self._layout = layout
        self._rule = rule

    def build(
        self,
        history: Int64Array,
        candidates: Events | None,
        query_time: int,
        *,
        reads_last_row: bool,
    ) -> SuffixRows:
        """Suffix rows for the records of a whole history, a provisional last row included.

        Suffix row 0 is the last history row when that is provisional (its K/V is not kept, and
        candidates read it as their parent), or when `reads_last_row`: then it answers for the user,
        as a query only if its K/V is kept. The history must not be empty then.
        """
        length = len(history)
        is_provisional = self._config.layers.relative_bias and length > 0
        num_fixed = int(is_provisional or reads_last_row)
        num_candidates = 0 if candidates is None else len(candidates)
        num_rows = num_fixed + num_candidates
        records = self._layout.empty_records(num_rows)
        parent = np.full(num_rows, -1, dtype=np.int32)
        position = np.full(num_rows, length, dtype=np.int32)
        reads_self = np.ones(num_rows, dtype=np.bool_)
        kv_lo = np.empty(num_rows, dtype=np.int32)
        kv_lo[num_fixed:] = candidate_kv_lo(self._rule, length, num_candidates)
        if num_fixed:
            records[0] = history[-1]
            position[0] = length - 1
            reads_self[0] = is_provisional
            kv_lo[0] = history_intervals(self._rule, length - 1, length, length).lo[0]
        if candidates is not None:
            self._fill_candidates(records[num_fixed:], candidates, length, query_time)
        if is_provisional:
            parent[1:] = 0
            # The kept history ends before the provisional row.
            np.minimum(kv_lo, length - 1, out=kv_lo)
        group = self._config.layers.target_group_size
        if group > 1:
            index = np.arange(num_candidates, dtype=np.int32)
            follows = index % group > 0
            parent[num_fixed:][follows] = num_fixed + index[follows] - 1
        return SuffixRows(
            records=records,
            parent=parent,
            position=position,
            reads_self=reads_self,
            kv_lo=kv_lo,
            num_fixed=num_fixed,
            read_row=0 if reads_last_row else None,
        )

    def _fill_candidates(
        self, records: Int64Array, candidates: Events, length: int, query_time: int
    ) -> None:
        """Candidate records: all at the position after the history, at the query's time."""
        layout, inputs = self._layout, self._config.inputs
        records[:, ITEM_COLUMN] = candidates.rows
        records[:, 1 : layout.features[-1].stop] = candidates.features
        if layout.position is not None:
            row = length if inputs.positions == "from_start" else len(inputs.context)
            records[:, layout.position] = min(row, inputs.num_positions - 1)
        if layout.time_bucket is not None:
            records[:, layout.time_bucket] = 0
        if layout.time is not None and layout.next_time is not None:
            records[:, layout.time] = query_time
            records[:, layout.next_time] = query_time
