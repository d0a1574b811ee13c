"""From catalogue ids to rows of the item table. numpy only."""

from __future__ import annotations

import numpy as np

from engine.errors import ConfigError
from engine.types import Int64Array

_DENSE_IDS = 1 << 22
"""Ids below this, or below 16 times the number of items, get a directly indexed table."""


class ItemLookup:
    """Maps item ids to table rows: item_ids[k] -> first_row + k, any other id -> -1."""

    def __init__(self, item_ids: Int64Array, first_row: int) -> None:
        max_id = int(item_ids.max())
        rows = np.arange(first_row, first_row + len(item_ids), dtype=np.int64)
        self._max_id = max_id
        self._row_of_id: Int64Array | None = None
        if max_id < max(_DENSE_IDS, 16 * len(item_ids)):
            self._row_of_id = np.full(max_id + 2, -1, dtype=np.int64)
            self._row_of_id[item_ids] = rows
        else:
            order = np.argsort(item_ids)
            self._sorted_ids = item_ids[order]
            self._sorted_rows = rows[order]

    def rows(self, item_ids: Int64Array) -> Int64Array:
        """Rows int64 [n] of ids int64 [n] >= 0; -1 for an id that is not in the catalogue."""
        if self._row_of_id is not None:
            return self._row_of_id[np.minimum(item_ids, self._max_id + 1)]
        place = np.searchsorted(self._sorted_ids, item_ids)
        np.minimum(place, len(self._sorted_ids) - 1, out=place)
        is_known = self._sorted_ids[place] == item_ids
        return np.where(is_known, self._sorted_rows[place], -1)


def check_item_ids(item_ids: Int64Array, num_rows: int, first_row: int, source: str) -> None:
    """Raise ConfigError unless ids int64 [num_items] are distinct, >= 0, and fit into the rows."""
    problem = None
    if not len(item_ids):
        problem = "is empty"
    elif first_row + len(item_ids) > num_rows:
        problem = (
            f"has {len(item_ids)} items from row {first_row} on, but embeddings.item has "
            f"{num_rows} rows: raise num_rows of the feature `item`"
        )
    elif int(item_ids.min()) < 0:
        problem = f"holds the negative id {int(item_ids.min())}"
    else:
        ordered = np.sort(item_ids)
        is_repeated = ordered[1:] == ordered[:-1]
        if is_repeated.any():
            problem = f"holds id {int(ordered[1:][is_repeated][0])} more than once"
    if problem is not None:
        raise ConfigError(f"{source}: catalogue.item_ids {problem}")
