"""Linear layers whose rows do not depend on how many rows are computed together.

oneDNN's prepacked kernels give a row the same bits for any number of rows from two on, and for
any number of threads; a single row is therefore never computed alone. Where oneDNN has no bfloat16
(a machine without AVX-512), its float32 kernels compute bfloat16 layers: rows and weights are
widened, results rounded. Without oneDNN, torch's own linear serves, and the self-check at
start reports what that costs.

oneDNN prepares a kernel for every number of rows it meets, which takes about a millisecond and half
a megabyte, and keeps the last 1024. Steps differ in size all the time, so rows are filled up to one
of few numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch.nn import functional


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


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the products of linear layers of that dtype are computed in."""
    return dtype if has_prepacked(dtype) or not has_prepacked(torch.float32) else torch.float32


class Linear:
    """activation(rows [T, in] @ weight + bias) -> [T, out] in the weight's dtype, row by row.

    Attributes:
        weight: A copy, [out, in] in the compute dtype; packed for oneDNN if `is_prepacked`.
        bias: [out] in the compute dtype.
    """

    def __init__(
        self,
        weight_IO: torch.Tensor,
        bias_O: torch.Tensor | None,
        activation: Literal["none", "relu"] = "none",
    ) -> None:
        self.in_features, self.out_features = weight_IO.shape
        self.dtype = weight_IO.dtype
        self._activation = activation
        self.compute_dtype = compute_dtype(self.dtype)
        self.is_prepacked = has_prepacked(self.compute_dtype)
        self.bias = None
        if bias_O is not None:
            self.bias = bias_O.to(self.dtype).to(self.compute_dtype).contiguous()
        weight_OI = weight_IO.to(self.compute_dtype).t().contiguous()
        self.weight: torch.Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight_OI) if self.is_prepacked else weight_OI
        )

    def __call__(self, rows_TI: torch.Tensor) -> torch.Tensor:
        num_rows = len(rows_TI)
        if num_rows == 0:
            return rows_TI.new_empty((0, self.out_features))
        missing = filled_rows(num_rows) - num_rows
        if missing:
            rows_TI = functional.pad(rows_TI, (0, 0, 0, missing))
        return self._compute(rows_TI.to(self.compute_dtype))[:num_rows].to(self.dtype)

    def _compute(self, rows_TI: torch.Tensor) -> torch.Tensor:
        rows_TI = rows_TI.contiguous()
        if self.is_prepacked:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                rows_TI, self.weight, self.bias, self._activation, [], ""
            )
            return result
        result = functional.linear(rows_TI, self.weight, self.bias)
        return result.relu_() if self._activation == "relu" else result
