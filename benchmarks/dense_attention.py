"""What a competent person writes without an engine: a padded batch, dense scores, `torch.compile`.

The same step as `ragged_batch`: K and V of the history, of the new rows and of the candidates lie
side by side and contiguous in one padded tensor, so no page is read and nothing is gathered while
the clock runs. The mask is made beforehand too.

Legend: R requests, H heads, M rows of a request, N keys of the longest one, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from benchmarks.ragged_batch import RaggedBatch, split_requests

Dense = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q [R, H, M, D], k [R, H, N, D], v [R, H, N, D], mask) -> [R, H, M, D]."""


def silu_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """mask: [R, 1, M, N] in the dtype of q, 1 where a row sees a key, else 0."""
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5)
    return torch.matmul(functional.silu(scores) * mask, v)


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """mask: bool [R, 1, M, N]. torch's own fused kernel."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class DenseStep:
    """The step of a `RaggedBatch` as padded tensors in a dtype, and compiled code for it.

    Compiled when first called.
    """

    def __init__(self, ragged: RaggedBatch, dtype: torch.dtype) -> None:
        self._ragged = ragged
        is_silu = ragged.spec.score == "silu"
        self._q = _heads_first(split_requests(ragged.q, ragged.shape)).to(dtype)
        self._k, self._v = self._keys(dtype)
        mask = self._mask()
        self._mask_RMN = mask.to(dtype) if is_silu else mask
        self._run: Dense = torch.compile(
            silu_attention if is_silu else softmax_attention, dynamic=False
        )

    def __call__(self) -> torch.Tensor:
        """[R, H, M, D]."""
        return self._run(self._q, self._k, self._v, self._mask_RMN)

    def rows(self) -> torch.Tensor:
        """The same as rows of the step, float32 [T, H, D]."""
        return self().float().transpose(1, 2).flatten(0, 1)

    def _keys(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [R, H, N, D]: history, new rows and candidates, then zeros."""
        ragged = self._ragged
        joined: list[torch.Tensor] = []
        for own, part in ((ragged.k, 0), (ragged.v, 1)):
            parts = [
                torch.cat((before[part], rows))
                for before, rows in zip(
                    ragged.history, split_requests(own, ragged.shape), strict=True
                )
            ]
            padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
            joined.append(_heads_first(padded).to(dtype))
        return joined[0], joined[1]

    def _mask(self) -> torch.Tensor:
        """bool [R, 1, M, N]: history up to the row itself; candidates: history and themselves."""
        shape = self._ragged.shape
        num_keys = max(shape.lengths) + shape.candidates
        mask = torch.zeros(len(shape.lengths), 1, shape.rows, num_keys, dtype=torch.bool)
        for request, length in enumerate(shape.lengths):
            keys = torch.arange(num_keys)
            new = torch.arange(length - shape.new, length)[:, None]
            mask[request, 0, : shape.new] = keys <= new
            own = length + torch.arange(shape.candidates)[:, None]
            mask[request, 0, shape.new :] = (keys < length) | (keys == own)
        return mask


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[R, n, H, D] -> [R, H, n, D], contiguous."""
    return rows.transpose(1, 2).contiguous()
