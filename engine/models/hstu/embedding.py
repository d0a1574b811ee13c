"""From records to rows: table look-ups, dense projections, positions. A row-wise function.

Every table adds one term to a row; terms are summed in float32, in a fixed order:

    x = (features + action + context) * scale + (position + time)

With the native library one pass over the records does it; otherwise torch, with the same bits.

Legend of tensor names: T rows, W record columns, D hidden_size, R table rows, E feature width.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch

from engine.models.config import ModelConfig
from engine.models.hstu.input_stage import RecordLayout
from engine.native_library import load_library


class Term(NamedTuple):
    """What one table adds to the columns [offset, offset + E) of a row.

    Attributes:
        table: [R, E]; [num_dense, E] for a dense feature.
        column: Of the record: a table row, negative for none, or the first of the dense values.
        num_dense: Dense values that the table projects; 0: a look-up.
    """

    table: torch.Tensor
    column: int
    num_dense: int = 0
    offset: int = 0


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

        self._dtype = dtype
        self._width = config.layers.hidden_size
        self._scale = self._width**0.5 if config.inputs.embedding_scale else 1.0
        self._scaled: list[Term] = []
        offset = 0
        for columns in layout.features:
            weight_RE = table(f"embeddings.{columns.feature.name}")
            self._scaled.append(
                Term(
                    table=weight_RE,
                    column=columns.start,
                    num_dense=columns.stop - columns.start if columns.is_dense else 0,
                    offset=offset,
                )
            )
            offset += weight_RE.shape[1] if config.inputs.combine == "concat" else 0
        self.item_table = self._scaled[0].table
        if layout.action is not None:
            self._scaled.append(Term(table("embeddings.action"), layout.action))
        if layout.context is not None:
            names = [f"embeddings.context.{feature.name}" for feature in config.inputs.context]
            joined = torch.cat([table(name) for name in names])
            self._scaled.append(Term(joined, layout.context))
        self._places: list[Term] = []
        if layout.position is not None:
            self._places.append(Term(table("positions.weight"), layout.position))
        if layout.time_bucket is not None:
            self._places.append(Term(table("time_buckets.weight"), layout.time_bucket))
        self._is_native = load_library() is None

    def with_item_table(self, table_RE: torch.Tensor) -> Self:
        """The same stage with another item table, of the same width and dtype."""
        changed = copy.copy(self)
        changed._scaled = [self._scaled[0]._replace(table=table_RE), *self._scaled[1:]]
        changed.item_table = table_RE
        return changed

    def __call__(self, records_TW: torch.Tensor) -> torch.Tensor:
        """records int64 [T, W] -> x [T, D]."""
        if self._is_native:
            return self._embed_natively(records_TW.contiguous())
        return self.embed_in_torch(records_TW)

    def embed_in_torch(self, records_TW: torch.Tensor) -> torch.Tensor:
        """The same, term by term."""
        x_TD = self._sum(self._scaled, records_TW) * self._scale
        return x_TD.add_(self._sum(self._places, records_TW)).to(self._dtype)

    def _embed_natively(self, records_TW: torch.Tensor) -> torch.Tensor:
        terms = [*self._scaled, *self._places]
        x_TD = torch.empty(len(records_TW), self._width, dtype=self._dtype)
        torch.ops.engine.embed(
            records_TW,
            [term.table for term in terms],
            [term.column for term in terms],
            [term.num_dense for term in terms],
            [term.offset for term in terms],
            len(self._scaled),
            self._scale,
            x_TD,
        )
        return x_TD

    def _sum(self, terms: Sequence[Term], records_TW: torch.Tensor) -> torch.Tensor:
        """float32 [T, D]."""
        total_TD = torch.zeros(len(records_TW), self._width)
        for term in terms:
            part_TE = _values(term, records_TW)
            total_TD[:, term.offset : term.offset + part_TE.shape[1]] += part_TE
        return total_TD


def _values(term: Term, records_TW: torch.Tensor) -> torch.Tensor:
    """What a term adds to each record, float32 [T, E]; zeros where a record has it not."""
    if term.num_dense:
        bits = records_TW[:, term.column : term.column + term.num_dense].to(torch.int32)
        return _project_few(bits.view(torch.float32), term.table.float())
    rows_T = records_TW[:, term.column]
    found_TE = term.table[rows_T.clamp_min(0)].float()
    return found_TE.masked_fill_((rows_T < 0)[:, None], 0.0)


def _project_few(values_TN: torch.Tensor, weight_NE: torch.Tensor) -> torch.Tensor:
    """values @ weight for a few columns, one column after another: the order is fixed."""
    total_TE = values_TN[:, :1] * weight_NE[0]
    for column in range(1, len(weight_NE)):
        total_TE = total_TE + values_TN[:, column : column + 1] * weight_NE[column]
    return total_TE
