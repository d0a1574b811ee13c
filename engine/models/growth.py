"""A new item table for a model that runs: it may add items, and change nothing else.

Kept K/V was computed from rows of the old table. As long as those rows keep their bits and their
ids, every state stays exactly what a recompute would give, and the weights version stays too.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.errors import ConfigError
from engine.models.base import ItemCatalogue
from engine.models.catalogue import check_item_ids
from engine.types import Int64Array

_REMEDY = (
    "a new catalogue may only add items at its end; load a table that changed as a model with "
    "another weights_version"
)
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def check_growth(old: ItemCatalogue, new: ItemCatalogue, model: str) -> None:
    """Raise ConfigError, naming the first thing that is wrong, unless `new` only adds to `old`.

    Both tables are in the model's dtype. Rows that no item of `old` uses (spare rows after its last
    item) may change. Nothing is modified.
    """
    source = f"catalogue {new.settings.version!r} for model {model}"
    _check_settings(old, new, source)
    check_item_ids(new.item_ids, len(new.table), new.settings.first_row, source)
    _check_ids(old.item_ids, new.item_ids, source)
    _check_table(old, new, source)
    is_larger = len(new.item_ids) > len(old.item_ids)
    if is_larger and new.settings.version == old.settings.version:
        raise ConfigError(
            f"{source}: it has {len(new.item_ids)} items, the loaded one {len(old.item_ids)}, and "
            "both have that version: set catalogue.version in config.json to another text"
        )


def _check_settings(old: ItemCatalogue, new: ItemCatalogue, source: str) -> None:
    for name in old.settings.__struct_fields__:
        had, has = getattr(old.settings, name), getattr(new.settings, name)
        if name != "version" and had != has:
            raise ConfigError(
                f"{source}: catalogue.{name} is {has!r}, the loaded model has {had!r}: {_REMEDY}"
            )


def _check_ids(old: Int64Array, new: Int64Array, source: str) -> None:
    if len(new) < len(old):
        raise ConfigError(
            f"{source}: it has {len(new)} items, the loaded model has {len(old)}: {_REMEDY}",
            value=len(new),
            limit=len(old),
        )
    changed = np.flatnonzero(new[: len(old)] != old)
    if len(changed):
        item = int(changed[0])
        raise ConfigError(
            f"{source}: item {item} is the id {int(new[item])}, in the loaded model it is "
            f"{int(old[item])}: {_REMEDY}"
        )


def _check_table(old: ItemCatalogue, new: ItemCatalogue, source: str) -> None:
    num_rows, width = old.table.shape
    if new.table.dim() != 2 or new.table.shape[1] != width or len(new.table) < num_rows:
        raise ConfigError(
            f"{source}: embeddings.item is {list(new.table.shape)}, the loaded model has "
            f"{[num_rows, width]}: give at least as many rows of the same width"
        )
    if not bool(torch.isfinite(new.table).all()):
        raise ConfigError(f"{source}: embeddings.item holds NaN, infinity or values beyond range")
    first_row, unk_row = old.settings.first_row, old.settings.unk_row
    for start, stop in ((0, first_row + len(old.item_ids)), (unk_row, unk_row + 1)):
        bits = _BITS[old.table.dtype]
        had, has = old.table[start:stop].view(bits), new.table[start:stop].view(bits)
        if torch.equal(had, has):
            continue
        row = start + int((had != has).any(dim=1).int().argmax())
        item = row - first_row
        is_item = 0 <= item < len(old.item_ids)
        whose = f" of id {int(old.item_ids[item])}" if is_item else ""
        raise ConfigError(
            f"{source}: row {row} of embeddings.item{whose} is not what the loaded model has: "
            f"{_REMEDY}"
        )
