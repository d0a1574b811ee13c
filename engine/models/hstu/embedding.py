"""From records to rows: table look-ups, dense projections, positions. A row-wise function.

Legend of tensor names: T rows, W record columns, D hidden_size, R table rows, E feature width.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Self

import torch

from engine.models.config import ModelConfig
from engine.models.hstu.input_stage import ITEM_COLUMN, FeatureColumns, RecordLayout


class Embedding:
    """The input stage of a model: tables in the model's dtype, sums in float32.

    Attributes:
        item_table: [R, E], also read by the heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: RecordLayout,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        def table(name: str) -> torch.Tensor:
            return tensors[name].to(dtype).contiguous()

        self._layout = layout
        self._dtype = dtype
        self._is_concat = config.inputs.combine == "concat"
        self._scale = config.layers.hidden_size**0.5 if config.inputs.embedding_scale else 1.0
        self._tables = [table(f"embeddings.{columns.feature.name}") for columns in layout.features]
        self._is_always_there = [
            layout.action is None
            and layout.context is None
            and (columns.start == ITEM_COLUMN or columns.feature.on == "both")
            for columns in layout.features
        ]
        self.item_table = self._tables[0]
        self._action_table = None if layout.action is None else table("embeddings.action")
        self._context_table = None
        if layout.context is not None:
            names = [f"embeddings.context.{feature.name}" for feature in config.inputs.context]
            self._context_table = torch.cat([table(name) for name in names])
        self._position_table = None if layout.position is None else table("positions.weight")
        self._time_table = None if layout.time_bucket is None else table("time_buckets.weight")

    def with_item_table(self, table_RE: torch.Tensor) -> Self:
        """The same stage with another item table, of the same width and dtype."""
        changed = copy.copy(self)
        changed._tables = [table_RE, *self._tables[1:]]
        changed.item_table = table_RE
        return changed

    def __call__(self, records_TW: torch.Tensor) -> torch.Tensor:
        """records int64 [T, W] -> x [T, D]."""
        layout = self._layout
        parts = [
            self._feature(index, columns, records_TW)
            for index, columns in enumerate(layout.features)
        ]
        if self._is_concat:
            x_TD = torch.cat(parts, dim=1)
        else:
            x_TD = parts[0]
            for part in parts[1:]:
                x_TD = x_TD + part
        for table, column in (
            (self._action_table, layout.action),
            (self._context_table, layout.context),
        ):
            if table is not None and column is not None:
                x_TD = x_TD + _look_up_or_zero(table, records_TW[:, column])
        if self._scale != 1.0:
            x_TD = x_TD * self._scale
        if self._position_table is not None and layout.position is not None:
            place_TD = self._position_table[records_TW[:, layout.position]].float()
            if self._time_table is not None and layout.time_bucket is not None:
                place_TD = place_TD + self._time_table[records_TW[:, layout.time_bucket]].float()
            x_TD = x_TD + place_TD
        return x_TD.to(self._dtype)

    def _feature(
        self, index: int, columns: FeatureColumns, records_TW: torch.Tensor
    ) -> torch.Tensor:
        """One feature of every record, float32 [T, E]; zeros where a record has it not."""
        table_RE = self._tables[index]
        if columns.is_dense:
            bits = records_TW[:, columns.start : columns.stop].to(torch.int32)
            return _project_few(bits.view(torch.float32), table_RE.float())
        rows_T = records_TW[:, columns.start]
        if self._is_always_there[index]:
            return table_RE[rows_T].float()
        return _look_up_or_zero(table_RE, rows_T)


def _look_up_or_zero(table_RE: torch.Tensor, rows_T: torch.Tensor) -> torch.Tensor:
    """Table rows float32 [T, E]; zeros for negative rows."""
    found_TE = table_RE[rows_T.clamp_min(0)].float()
    return found_TE.masked_fill_((rows_T < 0)[:, None], 0.0)


def _project_few(values_TN: torch.Tensor, weight_NE: torch.Tensor) -> torch.Tensor:
    """values @ weight for a few columns, one column after another: the order is fixed."""
    total_TE = values_TN[:, :1] * weight_NE[0]
    for column in range(1, len(weight_NE)):
        total_TE = total_TE + values_TN[:, column : column + 1] * weight_NE[column]
    return total_TE
