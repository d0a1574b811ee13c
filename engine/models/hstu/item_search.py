"""The exact top-k of a user over the whole catalogue.

Natively the item table is read as it is; in torch a float32 copy, packed for the linear kernels.
Legend: D hidden_size, I items.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from engine.models.linear import Linear
from engine.native_library import load_library
from engine.types import Float32Array, Int64Array

_BLOCK_ITEMS = 8192


class ItemSearch(Protocol):
    """Finds the items with the largest dot product."""

    def top_items(
        self, user_D: torch.Tensor, top_k: int, excluded: Int64Array
    ) -> tuple[Int64Array, Float32Array]:
        """(ids [k], scores [k]) of a user float32 [D], best first, the lower id first among equals.

        Args:
            excluded: Places in [0, I) that are left out; others are ignored.
        """


def item_search(items_ID: torch.Tensor, item_ids: Int64Array, norm_eps: float | None) -> ItemSearch:
    """The search for this machine.

    Args:
        items_ID: float32 or bfloat16, contiguous; not modified, and kept.
        norm_eps: Divide every item by max(its l2 norm, norm_eps); None: do not.
    """
    search = NativeSearch if load_library() is None else PackedSearch
    return search(items_ID, item_ids, norm_eps)


class NativeSearch:
    """One pass over the item table, by native code on all threads."""

    def __init__(
        self, items_ID: torch.Tensor, item_ids: Int64Array, norm_eps: float | None
    ) -> None:
        self._items_ID = items_ID
        self._item_ids = torch.tensor(item_ids)
        self._norms_I = None
        if norm_eps is not None:
            norms = [
                block_ID.float().norm(dim=1) for block_ID in torch.split(items_ID, _BLOCK_ITEMS)
            ]
            self._norms_I = torch.cat(norms).clamp_min(norm_eps)

    def top_items(
        self, user_D: torch.Tensor, top_k: int, excluded: Int64Array
    ) -> tuple[Int64Array, Float32Array]:
        most = min(top_k, len(self._item_ids))
        ids, scores = torch.empty(most, dtype=torch.int64), torch.empty(most)
        count = torch.empty(1, dtype=torch.int64)
        torch.ops.engine.top_items(
            user_D.contiguous(),
            self._items_ID,
            self._norms_I,
            self._item_ids,
            torch.from_numpy(excluded),
            ids,
            scores,
            count,
        )
        found = int(count)
        return ids.numpy()[:found], scores.numpy()[:found]


class PackedSearch:
    """Block by block in the order of the item ids. Holds its own packed copy of the items."""

    def __init__(
        self, items_ID: torch.Tensor, item_ids: Int64Array, norm_eps: float | None
    ) -> None:
        order = np.argsort(item_ids)
        self._item_ids = item_ids[order]
        self._place_of_item = np.empty(len(order), dtype=np.int64)
        self._place_of_item[order] = np.arange(len(order))
        self._blocks = []
        for start in range(0, len(order), _BLOCK_ITEMS):
            block_ID = items_ID[torch.from_numpy(order[start : start + _BLOCK_ITEMS])].float()
            if norm_eps is not None:
                block_ID = functional.normalize(block_ID, eps=norm_eps)
            self._blocks.append(Linear(block_ID.t(), None))

    def top_items(
        self, user_D: torch.Tensor, top_k: int, excluded: Int64Array
    ) -> tuple[Int64Array, Float32Array]:
        is_excluded = np.zeros(len(self._item_ids), dtype=np.bool_)
        known = excluded[(excluded >= 0) & (excluded < len(is_excluded))]
        is_excluded[self._place_of_item[known]] = True
        best_places = np.empty(0, dtype=np.int64)
        best_scores = np.empty(0, dtype=np.float32)
        start = 0
        for block in self._blocks:
            scores = block(user_D[None, :]).numpy()[0]
            stop = start + len(scores)
            is_wanted = ~is_excluded[start:stop]
            if len(best_scores) == top_k:
                # Later items have higher ids, so they must beat the last one, not equal it.
                is_wanted &= ~(scores <= best_scores[-1])
            found = np.flatnonzero(is_wanted)
            best_places = np.concatenate([best_places, found + start])
            best_scores = np.concatenate([best_scores, scores[found]])
            kept = _best(best_scores, top_k)
            best_places, best_scores = best_places[kept], best_scores[kept]
            start = stop
        return self._item_ids[best_places], best_scores


def _best(scores: Float32Array, top_k: int) -> Int64Array:
    """Indices of the top_k largest scores, descending; the lower index first among equals.

    NaN is as good as -inf.
    """
    ranks = np.where(np.isnan(scores), -np.inf, scores)
    if len(ranks) <= top_k:
        return np.argsort(-ranks, kind="stable")
    threshold = np.partition(ranks, len(ranks) - top_k)[len(ranks) - top_k]
    candidates = np.flatnonzero(ranks >= threshold)
    return candidates[np.argsort(-ranks[candidates], kind="stable")[:top_k]]
