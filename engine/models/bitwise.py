"""The self-check at start: rows come out the same in every company, on this machine."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.attention_backends.base import AttentionBatch, BiasBatch, KvPages
from engine.models.base import LayerProgram, Model
from engine.types import Task


class BitwiseReport(NamedTuple):
    """Whether rows came out the same in every grouping tried, and the largest difference seen."""

    is_bitwise: bool
    max_difference: float

    def __str__(self) -> str:
        if self.is_bitwise:
            return "bitwise"
        return f"not bitwise: rows differ by up to {self.max_difference:.3g}"


_CHECK_ROWS = 131
_CHECK_SLICES = tuple(
    (start, start + count)
    for count in (1, 2, 3, 5, 16, 17, 64, 100)
    for start in (0, 7, 31)
)  # fmt: skip


class _EmptyPages:
    """One page in every layer; no row sees it."""

    def __init__(self, model: Model, page_size: int) -> None:
        spec, dtype = model.spec, getattr(torch, model.spec.dtype)
        self._views = KvPages(
            k=torch.zeros(1, page_size, spec.num_kv_heads, spec.qk_dim, dtype=dtype),
            v=torch.zeros(1, page_size, spec.num_kv_heads, spec.v_dim, dtype=dtype),
        )

    def layer(self, layer: int) -> KvPages:
        return self._views


@torch.inference_mode()
def check_bitwise(model: Model, run_layers: LayerProgram, page_size: int) -> BitwiseReport:
    """Compare rows computed in few with the same rows computed in many, on the model's own shapes.

    Covers all that the layers do to a row that sees itself only, and the user embedding. What many
    keys do to a row is the backend's part: `row_difference`. Run once at start, with the threads
    that will serve.
    """
    spec = model.spec
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(_CHECK_ROWS, spec.hidden_size, generator=generator)
    x_TD = x_TD.to(getattr(torch, spec.dtype))
    pages = _EmptyPages(model, page_size)
    has_bias = spec.bias is not None
    whole_TD = run_layers(x_TD, _rows_alone(len(x_TD), has_bias), pages)
    worst = 0.0
    for start, stop in _CHECK_SLICES:
        few_TD = run_layers(x_TD[start:stop], _rows_alone(stop - start, has_bias), pages)
        worst = max(worst, _difference(whole_TD[start:stop], few_TD))
    if Task.RETRIEVE in spec.tasks:
        users = model.user_embedding(x_TD)
        for start, stop in _CHECK_SLICES:
            few = model.user_embedding(x_TD[start:stop])
            worst = max(worst, _difference(users[start:stop], few))
    return BitwiseReport(is_bitwise=worst == 0.0, max_difference=worst)


def _rows_alone(num_rows: int, has_bias: bool) -> AttentionBatch:
    """A step of suffix rows without a history; each reads itself."""
    row_T = torch.arange(num_rows)
    nothing_T = torch.zeros(num_rows, dtype=torch.int32)
    zero_T = torch.zeros(num_rows, dtype=torch.int64)
    bias = BiasBatch(
        row_position=zero_T,
        row_next_time=zero_T,
        key_time=torch.zeros(1, 1, dtype=torch.int64),
        suffix_time=zero_T,
        suffix_position=zero_T,
    )
    return AttentionBatch(
        row_indptr=torch.tensor([0, num_rows], dtype=torch.int32),
        kv_lo=nothing_T,
        kv_hi=nothing_T,
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        append_rows=torch.empty(0, dtype=torch.int64),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        suffix_rows=row_T,
        suffix_chain=row_T.unsqueeze(1),
        bias=bias if has_bias else None,
    )


def _difference(many: torch.Tensor, few: torch.Tensor) -> float:
    """0.0 exactly when the bits are equal."""
    if torch.equal(many, few):
        return 0.0
    return max(float((many.double() - few.double()).abs().max()), 5e-324)
