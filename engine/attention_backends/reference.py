"""The `reference` backend: the formulas row by row in float64, slow and obvious.

Every row reads exactly the keys of its own interval, in order, in NumPy on one thread; nothing
else enters its arithmetic. So it is bitwise, and a slot that no row may see is never read.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention_backends.base import (
    AttentionBackend,
    AttentionBatch,
    BiasBatch,
    KvPages,
    LayerBias,
    Partial,
)
from engine.attention_backends.bias import bias_values, time_buckets
from engine.attention_backends.paging import append_rows

Float64Array = NDArray[np.float64]


class ReferenceBackend(AttentionBackend):
    """Plain loops over rows; for tests and for reading."""

    name = "reference"
    platforms = ("cpu",)
    dtypes = (torch.float32, torch.bfloat16)
    scores = ("silu", "softmax")
    biases = ("research",)
    is_bitwise = True

    _batch: AttentionBatch

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def append(self, pages: KvPages, k: torch.Tensor, v: torch.Tensor) -> None:
        append_rows(pages, self._batch.slot_mapping, k, v)

    def attend(self, pages: KvPages, q: torch.Tensor, bias: LayerBias | None = None) -> Partial:
        batch = self._batch
        num_rows, num_heads = len(q), self.spec.num_heads
        out_THV = np.zeros((num_rows, num_heads, self.spec.v_dim), np.float64)
        lse_TH = np.full((num_rows, num_heads), -np.inf, np.float64)
        q_THA = _float64(q)
        kv_lo, kv_hi = batch.kv_lo.tolist(), batch.kv_hi.tolist()
        row_indptr = batch.row_indptr.tolist()
        for request, (start, stop) in enumerate(pairwise(row_indptr)):
            seen = [row for row in range(start, stop) if kv_lo[row] < kv_hi[row]]
            if not seen:
                continue
            first = min(kv_lo[row] for row in seen)
            last = max(kv_hi[row] for row in seen)
            k_SHA, v_SHV = self._gather(pages, request, first, last)
            for row in seen:
                keys = slice(kv_lo[row] - first, kv_hi[row] - first)
                scores_SH = np.multiply(k_SHA[keys], q_THA[row]).sum(-1) * self.spec.alpha
                if bias is not None and batch.bias is not None:
                    scores_SH += _row_bias(bias, batch.bias, request, row, kv_lo[row], kv_hi[row])[
                        :, None
                    ]
                out_THV[row], lse_TH[row] = self._reduce(scores_SH, v_SHV[keys])
        out = torch.from_numpy(out_THV).float()
        return Partial(out, torch.from_numpy(lse_TH).float() if self._is_softmax else None)

    @property
    def _is_softmax(self) -> bool:
        return self.spec.score == "softmax"

    def _gather(
        self, pages: KvPages, request: int, first: int, last: int
    ) -> tuple[Float64Array, Float64Array]:
        """K and V of history positions [first, last), one per query head."""
        position = torch.arange(first, last)
        page = self._batch.block_table[request][position // self.spec.page_size].long()
        offset = position % self.spec.page_size
        group = self.spec.num_heads // self.spec.num_kv_heads
        k_SKA, v_SKV = _float64(pages.k[page, offset]), _float64(pages.v[page, offset])
        return np.repeat(k_SKA, group, axis=1), np.repeat(v_SKV, group, axis=1)

    def _reduce(
        self, scores_SH: Float64Array, v_SHV: Float64Array
    ) -> tuple[Float64Array, Float64Array]:
        """One row: scores and values of its keys -> out [H, V], lse [H]."""
        if not self._is_softmax:
            with np.errstate(over="ignore"):
                weights_SH = scores_SH / (1.0 + np.exp(-scores_SH))
            return (weights_SH[:, :, None] * v_SHV).sum(0), np.full(len(scores_SH[0]), -np.inf)
        top_H = scores_SH.max(0)
        weights_SH = np.exp(scores_SH - top_H)
        total_H = weights_SH.sum(0)
        out_HV = (weights_SH[:, :, None] * v_SHV).sum(0) / total_H[:, None]
        return out_HV, np.log(total_H) + top_H


def _row_bias(
    tables: LayerBias, bias: BiasBatch, request: int, row: int, kv_lo: int, kv_hi: int
) -> Float64Array:
    """Bias of one row over the keys of its interval, [kv_hi - kv_lo]."""
    key_position = torch.arange(kv_lo, kv_hi)
    key_time = bias.key_time[request, kv_lo:kv_hi]
    buckets = time_buckets(bias.row_next_time[row], key_time)
    return _float64(bias_values(tables, bias.row_position[row], key_position, buckets))


def _float64(tensor: torch.Tensor) -> Float64Array:
    values: Float64Array = tensor.double().numpy()
    return values
