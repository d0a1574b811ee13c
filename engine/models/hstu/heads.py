"""Heads: scores of candidate rows, and what answers for a user.

Heads compute in float32 whatever the model's dtype. Legend: T rows, D hidden_size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal, Self

import torch
from torch.nn import functional

from engine.models.config import RankHead, RetrieveHead
from engine.models.hstu.input_stage import ITEM_COLUMN
from engine.models.hstu.item_search import ItemSearch, item_search
from engine.models.linear import Linear
from engine.types import Float32Array, Int64Array


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
                is_hidden = index < len(config.hidden)
                self._layers.append(Linear(weight.float(), bias, "relu" if is_hidden else "none"))

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
        for layer in self._layers:
            rows = layer(rows)
        return rows


class Retriever:
    """User embeddings, and the exact top-k of one over the catalogue."""

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
        self._search = self._search_of(item_table, item_ids)

    def with_items(self, item_table: torch.Tensor, item_ids: Int64Array) -> Self:
        """The same head on other items; the first row stays."""
        changed = copy.copy(self)
        changed._search = self._search_of(item_table, item_ids)
        return changed

    def _search_of(self, item_table: torch.Tensor, item_ids: Int64Array) -> ItemSearch:
        items_ID = item_table[self._first_row : self._first_row + len(item_ids)]
        return item_search(
            items_ID, item_ids, self._config.norm_eps if self._config.norm_items else None
        )

    def user_embedding(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Rows [n, D] -> float32 [n, D]."""
        return self._norm(x_TD)

    def top_items(
        self, user_D: torch.Tensor, top_k: int, excluded_rows: Int64Array
    ) -> tuple[Int64Array, Float32Array]:
        """(ids [k], scores [k]), best first, lower id first among equals; see `Model.retrieve`."""
        return self._search.top_items(user_D, top_k, excluded_rows - self._first_row)
