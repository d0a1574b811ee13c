"""Events and candidates as a model reads them. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequest
from engine.models.catalogue import ItemLookup
from engine.models.config import ModelConfig
from engine.models.hstu import fields
from engine.models.hstu.input_stage import ABSENT, RecordLayout
from engine.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Events:
    """Checked events, or candidates.

    Attributes:
        ids: int64 [n] catalogue ids.
        rows: int64 [n] their table rows, -1 unknown.
        features: int64 [n, F], record columns [1, 1 + F) of an item row.
        actions: int64 [n] for action rows, ABSENT where the last one is not known yet; None
            when there are no action rows.
        times: int64 [n] seconds, zeros when none are read.
    """

    ids: Int64Array
    rows: Int64Array
    features: Int64Array
    actions: Int64Array | None
    times: Int64Array

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_open_event(self) -> bool:
        """The last event's action is not known yet: its action row is not there."""
        actions = self.actions
        return actions is not None and len(actions) > 0 and bool(actions[-1] == ABSENT)

    def pick(self, which: slice | NDArray[np.bool_]) -> Events:
        """The events of a slice or mask, in order."""
        return Events(
            ids=self.ids[which],
            rows=self.rows[which],
            features=self.features[which],
            actions=None if self.actions is None else self.actions[which],
            times=self.times[which],
        )


class EventReader:
    """Reads and checks the arrays of `history` and `candidates`."""

    def __init__(self, config: ModelConfig, layout: RecordLayout, lookup: ItemLookup) -> None:
        self._inputs = config.inputs
        self._layout = layout
        self._lookup = lookup
        self.reads_time = config.layers.relative_bias or config.inputs.num_time_buckets > 0

    def read(self, where: str, arrays: fields.Arrays, ignore_extra: bool) -> Events:
        """All declared features of `history` or `candidates`. The arrays are not modified.

        Raises InvalidRequest that names the field.
        """
        is_history = where == "history"
        read = [columns for columns in self._layout.features
                if columns.feature.on in ("both", where)]  # fmt: skip
        names = [columns.feature.name for columns in read]
        has_action_rows = is_history and self._layout.action is not None
        if has_action_rows:
            names.append("action")
        reads_time = is_history and self.reads_time
        if reads_time:
            names.append("time")
        fields.refuse_unread(where, arrays, names, ignore_extra)
        ids = fields.integers(f"{where}.item", fields.take(where, arrays, "item"))
        length = len(ids)
        features = self._layout.empty_records(length)[:, 1 : self._layout.features[-1].stop]
        for columns in read[1:]:
            name = columns.feature.name
            values = fields.take(where, arrays, name)
            features[:, columns.start - 1 : columns.stop - 1] = fields.feature_values(
                f"{where}.{name}", columns, values, length
            )
        times = np.zeros(length, dtype=np.int64)
        if reads_time:
            times = fields.integers(f"{where}.time", fields.take(where, arrays, "time"), length)
        return Events(
            ids=ids,
            rows=self._lookup.rows(ids),
            features=features,
            actions=self._read_actions(arrays, length) if has_action_rows else None,
            times=times,
        )

    def _read_actions(self, arrays: fields.Arrays, length: int) -> Int64Array:
        """Actions [n]; one fewer than items means that the last is not known yet."""
        field = "history.action"
        actions = fields.integers(field, fields.take("history", arrays, "action"))
        if len(actions) not in (length, length - 1):
            raise InvalidRequest(
                f"{field} has {len(actions)} values: give {length}, or {max(length - 1, 0)} when "
                "the last action is not known yet",
                value=len(actions),
                limit=length,
            )
        action = next(feature for feature in self._inputs.features if feature.name == "action")
        fields.check_rows(field, actions, action.num_rows)
        if len(actions) < length:
            actions = np.append(actions, ABSENT)
        return actions
