"""All attention of a step: the backend's part over history pages, and the suffix chains.

Written once for all backends. SiLU attention adds the two parts; softmax attention merges them by
log-sum-exp (natural log, float32, -inf for a row without visible keys). A row's terms are taken in
a fixed order: the history part first, then its chain, ancestors root first, the row itself last.
So a row's bits do not depend on the other rows.

Legend: T rows of a step, N suffix rows, C chain columns, H heads, K kv heads, A qk_dim, V v_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention_backends.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KvPages,
    LayerBias,
    Partial,
)
from engine.attention_backends.bias import bias_values, time_buckets


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """One column of the chains: `rows` [n] of the step read the suffix keys of `keys` [n]."""

    rows: torch.Tensor
    keys: torch.Tensor
    row_position: torch.Tensor | None
    key_position: torch.Tensor | None
    buckets: torch.Tensor | None


class StepAttention:
    """Attention of one step's rows, over history and suffix. Calls the backend's `prepare`."""

    def __init__(self, backend: AttentionBackend, batch: AttentionBatch) -> None:
        self._backend = backend
        backend.prepare(batch)
        self._suffix = None if backend.fuses_suffix else SuffixAttention(backend.spec, batch)

    def __call__(
        self,
        pages: KvPages,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: LayerBias | None = None,
    ) -> torch.Tensor:
        """One layer's q [T, H, A], k [T, K, A], v [T, K, V] -> float32 [T, H, V], before the
        model's constant scale. The new K/V of history rows are in the pages already."""
        if self._suffix is None:
            return self._backend.attend_with_suffix(pages, q, k, v, bias)
        return self._suffix.combine(self._backend.attend(pages, q, bias), q, k, v, bias)


class SuffixAttention:
    """The suffix part of one step; `combine` is called once per layer.

    Args:
        spec: Of the model.
        batch: The step. It is not modified.
    """

    def __init__(self, spec: AttentionSpec, batch: AttentionBatch) -> None:
        self.spec = spec
        chain_NC = batch.suffix_chain
        self._columns = [
            self._column(batch, chain_NC[:, column]) for column in range(chain_NC.shape[1])
        ]

    def _column(self, batch: AttentionBatch, keys_N: torch.Tensor) -> _Column:
        reading = torch.nonzero(keys_N >= 0).flatten()
        rows = batch.suffix_rows[reading]
        keys = keys_N[reading]
        bias = batch.bias if self.spec.bias is not None else None
        if bias is None:
            return _Column(rows, batch.suffix_rows[keys], None, None, None)
        return _Column(
            rows,
            batch.suffix_rows[keys],
            bias.row_position[rows],
            bias.suffix_position[keys],
            time_buckets(bias.row_next_time[rows], bias.suffix_time[keys]),
        )

    def combine(
        self,
        history: Partial,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: LayerBias | None = None,
    ) -> torch.Tensor:
        """History part [T, H, V] and the step's q [T, H, A], k [T, K, A], v [T, K, V].

        Returns float32 [T, H, V], before the model's constant scale. `history` is consumed: its
        tensors may be overwritten. q, k and v are not modified.
        """
        if self.spec.score == "silu":
            for column in self._columns:
                self._add_silu(column, history.out, q, k, v, bias)
            return history.out
        assert history.lse is not None, "softmax partials carry their log-sum-exp"
        return self._merge_softmax(history.out, history.lse, q, k, v, bias)

    def _scores(
        self, column: _Column, q: torch.Tensor, k: torch.Tensor, bias: LayerBias | None
    ) -> torch.Tensor:
        """alpha * q.k (+ bias), float32 [n, H]."""
        q_nHA = q.index_select(0, column.rows).float()
        k_nHA = self._expand(k.index_select(0, column.keys)).float()
        scores_nH = (q_nHA * k_nHA).sum(-1) * self.spec.alpha
        if bias is not None and column.buckets is not None:
            assert column.row_position is not None and column.key_position is not None
            scores_nH += bias_values(
                bias, column.row_position, column.key_position, column.buckets
            ).unsqueeze(1)
        return scores_nH

    def _add_silu(
        self,
        column: _Column,
        out_THV: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: LayerBias | None,
    ) -> None:
        if len(column.rows) == 0:
            return
        scores_nH = self._scores(column, q, k, bias)
        weights_nH = scores_nH / (1 + torch.exp(-scores_nH))
        v_nHV = self._expand(v.index_select(0, column.keys)).float()
        _add_to_rows(out_THV, column.rows, weights_nH.unsqueeze(2) * v_nHV)

    def _merge_softmax(
        self,
        out_THV: torch.Tensor,
        lse_TH: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: LayerBias | None,
    ) -> torch.Tensor:
        columns = [column for column in self._columns if len(column.rows)]
        scores = [self._scores(column, q, k, bias) for column in columns]
        top_TH = lse_TH.clone()
        for column, scores_nH in zip(columns, scores, strict=True):
            best = torch.maximum(top_TH.index_select(0, column.rows), scores_nH)
            top_TH.index_copy_(0, column.rows, best)
        top_TH = torch.where(top_TH == -torch.inf, 0.0, top_TH)
        weight_TH = torch.exp(lse_TH - top_TH)
        total_TH = weight_TH.clone()
        out_THV.mul_(weight_TH.unsqueeze(2))
        for column, scores_nH in zip(columns, scores, strict=True):
            weights_nH = torch.exp(scores_nH - top_TH.index_select(0, column.rows))
            v_nHV = self._expand(v.index_select(0, column.keys)).float()
            _add_to_rows(total_TH, column.rows, weights_nH)
            _add_to_rows(out_THV, column.rows, weights_nH.unsqueeze(2) * v_nHV)
        total_TH = torch.where(total_TH == 0, 1.0, total_TH)
        return out_THV.div_(total_TH.unsqueeze(2))

    def _expand(self, rows_nKA: torch.Tensor) -> torch.Tensor:
        """Each kv head repeated for the query heads that read it."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        return rows_nKA if group == 1 else rows_nKA.repeat_interleave(group, dim=1)


def _add_to_rows(target: torch.Tensor, rows: torch.Tensor, terms: torch.Tensor) -> None:
    """target[rows] += terms, in place; no row comes twice."""
    target.index_copy_(0, rows, target.index_select(0, rows).add_(terms))
