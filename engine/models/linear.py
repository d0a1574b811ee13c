"""Linear layers whose rows do not depend on how many rows are computed together.

oneDNN's prepacked kernels give a row the same bits for any number of rows from two on, and for
any number of threads; a single row is therefore never computed alone. Without oneDNN, torch's own
linear serves, and `check_bitwise` reports what that costs.

oneDNN prepares a kernel for every number of rows it meets, which takes about a millisecond and half
a megabyte, and keeps the last 1024. Steps differ in size all the time, so rows are filled up to one
of few numbers.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional

from engine.models.base import Model
from engine.types import Task


@cache
def has_prepacked(dtype: torch.dtype) -> bool:
    """Whether oneDNN's prepacked linear works here for that dtype."""
    rows, weight = torch.ones(2, 3, dtype=dtype), torch.ones(5, 3, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        result = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return False
    return bool(torch.equal(result, torch.full_like(result, 3.0)))


def filled_rows(num_rows: int) -> int:
    """The next number of the form n * 2**k, 8 <= n <= 16: at most an eighth more. At least 2."""
    step = 1 << max(0, (num_rows - 1).bit_length() - 4)
    return max(2, -(-num_rows // step) * step)


class Linear:
    """rows [T, in] @ weight + bias -> [T, out] in the weight's dtype, a row-wise function.

    Holds its own packed copy of the weight.
    """

    def __init__(self, weight_IO: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.in_features, self.out_features = weight_IO.shape
        self.dtype = weight_IO.dtype
        self._bias_O = None if bias_O is None else bias_O.to(weight_IO.dtype).contiguous()
        self._is_prepacked = has_prepacked(self.dtype)
        weight_OI = weight_IO.t().contiguous()
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight_OI) if self._is_prepacked else weight_OI
        )

    def __call__(self, rows_TI: torch.Tensor) -> torch.Tensor:
        num_rows = len(rows_TI)
        if num_rows == 0:
            return rows_TI.new_empty((0, self.out_features))
        missing = filled_rows(num_rows) - num_rows
        if missing:
            rows_TI = functional.pad(rows_TI, (0, 0, 0, missing))
        return self._compute(rows_TI)[:num_rows]

    def _compute(self, rows_TI: torch.Tensor) -> torch.Tensor:
        rows_TI = rows_TI.contiguous()
        if self._is_prepacked:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                rows_TI, self._weight, self._bias_O, "none", [], ""
            )
            return result
        return functional.linear(rows_TI, self._weight, self._bias_O)


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


@torch.inference_mode()
def check_bitwise(model: Model) -> BitwiseReport:
    """Compare rows computed in few with the same rows computed in many, on the model's own shapes.

    Covers projections and output of the first and last layer (all have the same shapes) and the
    user embedding. Run once at start, with the threads that will serve.
    """
    spec = model.spec
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    x_TD = torch.randn(_CHECK_ROWS, spec.hidden_size, generator=generator).to(dtype)
    attended_THV = torch.randn(_CHECK_ROWS, spec.num_heads, spec.v_dim, generator=generator)
    worst = 0.0
    for layer in {0, spec.num_layers - 1}:
        whole = model.project(layer, x_TD)
        whole_out = model.output(layer, x_TD, whole.u, attended_THV)
        for start, stop in _CHECK_SLICES:
            part = model.project(layer, x_TD[start:stop])
            for many, few in zip(whole, part, strict=True):
                worst = max(worst, _difference(many[start:stop], few))
            part_out = model.output(
                layer, x_TD[start:stop], whole.u[start:stop], attended_THV[start:stop]
            )
            worst = max(worst, _difference(whole_out[start:stop], part_out))
    if Task.RETRIEVE in spec.tasks:
        users = model.user_embedding(x_TD)
        for start, stop in _CHECK_SLICES:
            few = model.user_embedding(x_TD[start:stop])
            worst = max(worst, _difference(users[start:stop], few))
    return BitwiseReport(is_bitwise=worst == 0.0, max_difference=worst)


def _difference(many: torch.Tensor, few: torch.Tensor) -> float:
    """0.0 exactly when the bits are equal."""
    if torch.equal(many, few):
        return 0.0
    return max(float((many.double() - few.double()).abs().max()), 5e-324)
