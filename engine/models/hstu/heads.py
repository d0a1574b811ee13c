"""Heads: scores of candidate rows, and the exact top-k of a user over the whole catalogue.

Heads compute in float32 whatever the model's dtype. Legend: T rows, D hidden_size, I items.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal, Self

import numpy as np
import torch
from torch.nn import functional

from engine.models.config import RankHead, RetrieveHead
from engine.models.hstu.input_stage import ITEM_COLUMN
from engine.models.linear import Linear
from engine.types import Float32Array, Int64Array

_BLOCK_ITEMS = 8192


class RowNorm:
    """The norm in front of a head: rows [T, D] -> float32 [T, D]."""

    def __init__(
        self,
        kind: Literal["none", "l2", "layer_norm"],
        eps: float,
        prefix: str,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        self._kind = kind
        self._eps = eps
        if kind == "layer_norm":
            self._weight = tensors[prefix + "weight"].float().contiguous()
            self._bias = tensors[prefix + "bias"].float().contiguous()

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD.float().contiguous()
        if self._kind == "l2":
            return functional.normalize(x_TD, eps=self._eps)
        if self._kind == "layer_norm":
            return functional.layer_norm(x_TD, x_TD.shape[1:], self._weight, self._bias, self._eps)
        return x_TD


class Ranker:
    """Scores of candidate rows."""

    def __init__(
        self, config: RankHead, tensors: Mapping[str, torch.Tensor], item_table: torch.Tensor
    ) -> None:
        self._norm = RowNorm(config.norm, config.norm_eps, "heads.rank.norm.", tensors)
        self._item_table = item_table
        self._layers = []
        if config.kind == "mlp":
            for index in range(len(config.hidden) + 1):
                prefix = f"heads.rank.mlp.{index}."
                weight, bias = tensors[prefix + "weight"], tensors[prefix + "bias"]
                self._layers.append(Linear(weight.float(), bias))

    def with_item_table(self, item_table: torch.Tensor) -> Self:
        """The same head on another item table."""
        changed = copy.copy(self)
        changed._item_table = item_table
        return changed

    def __call__(self, x_TD: torch.Tensor, records_TW: torch.Tensor) -> torch.Tensor:
        """Rows and their records -> float32 [T, num_tasks]."""
        rows = self._norm(x_TD)
        if not self._layers:
            items_TD = self._item_table[records_TW[:, ITEM_COLUMN]].float()
            return (rows * items_TD).sum(dim=1, keepdim=True)
        for layer in self._layers[:-1]:
            rows = layer(rows).relu_()
        return self._layers[-1](rows)


class Retriever:
    """Exact top-k over the catalogue, block by block, in the order of the item ids.

    Holds a float32 copy of the catalogue's item rows, packed for the linear kernels.
    """

    def __init__(
        self,
        config: RetrieveHead,
        tensors: Mapping[str, torch.Tensor],
        item_table: torch.Tensor,
        item_ids: Int64Array,
        first_row: int,
    ) -> None:
        self._config = config
        self._norm = RowNorm(config.norm, config.norm_eps, "heads.retrieve.norm.", tensors)
        self._first_row = first_row
        self._pack(item_table, item_ids)

    def with_items(self, item_table: torch.Tensor, item_ids: Int64Array) -> Self:
        """The same head on other items; the first row stays."""
        changed = copy.copy(self)
        changed._pack(item_table, item_ids)
        return changed

    def _pack(self, item_table: torch.Tensor, item_ids: Int64Array) -> None:
        order = np.argsort(item_ids)
        self._item_ids = item_ids[order]
        self._place_of_row = np.empty(len(order), dtype=np.int64)
        self._place_of_row[order] = np.arange(len(order))
        self._blocks = []
        for start in range(0, len(order), _BLOCK_ITEMS):
            rows = torch.from_numpy(self._first_row + order[start : start + _BLOCK_ITEMS])
            items_ID = item_table[rows].float()
            if self._config.norm_items:
                items_ID = functional.normalize(items_ID, eps=self._config.norm_eps)
            self._blocks.append(Linear(items_ID.t(), None))

    def user_embedding(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Rows [n, D] -> float32 [n, D]."""
        return self._norm(x_TD)

    def top_items(
        self, user_D: torch.Tensor, top_k: int, excluded_rows: Int64Array
    ) -> tuple[Int64Array, Float32Array]:
        """(ids [k], scores [k]), best first, lower id first among equals; see `Model.retrieve`."""
        excluded = np.zeros(len(self._item_ids), dtype=np.bool_)
        places = excluded_rows - self._first_row
        places = places[(places >= 0) & (places < len(excluded))]
        excluded[self._place_of_row[places]] = True
        best_places = np.empty(0, dtype=np.int64)
        best_scores = np.empty(0, dtype=np.float32)
        start = 0
        for block in self._blocks:
            scores = block(user_D[None, :]).numpy()[0]
            stop = start + len(scores)
            is_wanted = ~excluded[start:stop]
            if len(best_scores) == top_k:
                # Later items have higher ids, so they must beat the last one, not equal it.
                is_wanted &= scores > best_scores[-1]
            found = np.flatnonzero(is_wanted)
            best_places = np.concatenate([best_places, found + start])
            best_scores = np.concatenate([best_scores, scores[found]])
            kept = _best(best_scores, top_k)
            best_places, best_scores = best_places[kept], best_scores[kept]
            start = stop
        return self._item_ids[best_places], best_scores


def _best(scores: Float32Array, top_k: int) -> Int64Array:
    """Indices of the top_k largest scores, descending; the lower index first among equals."""
    if len(scores) <= top_k:
        return np.argsort(-scores, kind="stable")
    threshold = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
    candidates = np.flatnonzero(scores >= threshold)
    return candidates[np.argsort(-scores[candidates], kind="stable")[:top_k]]
