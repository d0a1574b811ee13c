"""The columns of a record, and the table rows of positions and times. numpy only.

A record is one row of the model before any arithmetic: indices into tables, dense values as bits,
and the times a bias reads. `embedding.py` turns records into rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.models.config import Feature, ModelConfig
from engine.types import Float32Array, Int64Array

ABSENT = -1
"""Table row of a feature that a record does not carry."""

ITEM_COLUMN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureColumns:
    """Columns [start, stop) of a declared feature: one table row, or one column a dense value."""

    feature: Feature
    start: int
    stop: int

    @property
    def is_dense(self) -> bool:
        return self.feature.num_rows == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """Where everything stands in a record of `num_columns` int64. None: the model has it not.

    Attributes:
        features: Features of an item row, `item` first (in column 0).
        action: Action of an action row (two tokens an event).
        context: Row of the joined tables of all contextual features.
        position, time_bucket: Table rows.
        time, next_time: Seconds, of the row's event and of the one after it.
    """

    features: tuple[FeatureColumns, ...]
    action: int | None
    context: int | None
    position: int | None
    time_bucket: int | None
    time: int | None
    next_time: int | None
    num_columns: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> RecordLayout:
        inputs = config.inputs
        has_action_rows = inputs.tokens_per_event == 2
        features, used = [], 0
        for feature in inputs.features:
            if has_action_rows and feature.name == "action":
                continue
            stop = used + (1 if feature.num_rows else feature.dim)
            features.append(FeatureColumns(feature=feature, start=used, stop=stop))
            used = stop
        has = {
            "action": has_action_rows,
            "context": bool(inputs.context),
            "position": inputs.positions != "none",
            "time_bucket": inputs.num_time_buckets > 0,
            "time": config.layers.relative_bias,
            "next_time": config.layers.relative_bias,
        }
        columns: dict[str, int | None] = {}
        for name, is_there in has.items():
            columns[name] = used if is_there else None
            used += is_there
        return cls(features=tuple(features), num_columns=used, **columns)

    def empty_records(self, num_records: int) -> Int64Array:
        """Records that carry nothing: indices ABSENT, dense values and times 0."""
        template = np.full(self.num_columns, ABSENT, dtype=np.int64)
        for columns in self.features:
            if columns.is_dense:
                template[columns.start : columns.stop] = 0
        for column in (self.position, self.time_bucket, self.time, self.next_time):
            if column is not None:
                template[column] = 0
        records = np.empty((num_records, self.num_columns), dtype=np.int64)
        records[:] = template
        return records


def float_bits(values: Float32Array) -> Int64Array:
    """Each float32 as its 32 bits in an int64; -0.0 becomes 0.0."""
    # Adding zero makes the two zeros one value, so that equal inputs have equal fingerprints.
    return (values + np.float32(0.0)).view(np.int32).astype(np.int64)


def rows_from_start(num_positions: int, start: int, stop: int) -> Int64Array:
    """Position rows of rows [start, stop): min(i, P - 1)."""
    return np.minimum(np.arange(start, stop, dtype=np.int64), num_positions - 1)


def rows_from_newest(
    num_positions: int, num_context: int, history_length: int, num_candidates: int
) -> Int64Array:
    """Position rows of a history (contextual rows included) and candidates, as Meta's encoder.

    Contextual row i uses row i, other rows i use min(h - min(i, h) + c, P - 1).
    """
    position = np.arange(history_length + num_candidates, dtype=np.int64)
    back = history_length - np.minimum(position, history_length) + num_context
    return np.where(position < num_context, position, np.minimum(back, num_positions - 1))


def time_bucket(num_buckets: int, query_time: int, times: Int64Array) -> Int64Array:
    """Rows of Meta's table of ages: min(floor(sqrt(max(q - t, 1e-6) / 60)), R - 1).

    In float32 after an exact integer subtraction, as the published kernel.
    """
    age = np.maximum((query_time - times).astype(np.float32), np.float32(1e-6))
    bucket = np.sqrt(age / np.float32(60.0)).astype(np.int64)
    return np.minimum(bucket, num_buckets - 1)
