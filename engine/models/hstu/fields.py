"""Checks of the arrays of a request. Every error is an InvalidRequest that names the field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequest
from engine.models.config import ContextFeature
from engine.models.hstu.input_stage import FeatureColumns, float_bits
from engine.types import Int64Array

Arrays = Mapping[str, NDArray[Any]]


def refuse_unread(
    where: str, given: Collection[str], read: Collection[str], ignore_extra: bool
) -> None:
    """Refuse names that the model does not read, unless the request says to ignore them."""
    unread = [name for name in given if name not in read]
    if unread and not ignore_extra:
        raise InvalidRequest(
            f"{where} holds {', '.join(unread)}, which this model does not read "
            f"(it reads {', '.join(read)}): leave it out or set ignore_extra"
        )


def take(where: str, arrays: Arrays, name: str) -> NDArray[Any]:
    """The named array."""
    if name not in arrays:
        raise InvalidRequest(f"{where}.{name} is missing: this model reads it")
    return arrays[name]


def integers(field: str, values: object, length: int | None = None) -> Int64Array:
    """values as int64 [n] >= 0; n is checked when given."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
        raise InvalidRequest(f"{field} is {_type_text(values)}: give int64")
    if values.ndim != 1:
        raise InvalidRequest(f"{field} has shape {list(values.shape)}: give [n]")
    if length is not None and len(values) != length:
        raise InvalidRequest(
            f"{field} has {len(values)} values: give {length}, as many as there are items",
            value=len(values),
            limit=length,
        )
    if values.dtype == np.uint64 and len(values) and values.max() >= 1 << 63:
        raise InvalidRequest(f"{field} holds {values.max()}: give values below 2**63")
    converted = values.astype(np.int64, copy=False)
    if len(converted) and (smallest := int(converted.min())) < 0:
        raise InvalidRequest(f"{field} holds {smallest}: give values >= 0", value=smallest, limit=0)
    return converted


def feature_values(field: str, columns: FeatureColumns, values: object, length: int) -> Int64Array:
    """A declared feature as record columns: int64 [n, stop - start]."""
    if columns.is_dense:
        return _dense_values(field, columns.feature.dim, values, length)
    rows = integers(field, values, length)
    check_rows(field, rows, columns.feature.num_rows)
    return rows[:, None]


def check_rows(field: str, rows: Int64Array, num_rows: int) -> None:
    """Refuse a value that is no row of its table."""
    if len(rows) and (largest := int(rows.max())) >= num_rows:
        raise InvalidRequest(
            f"{field} holds {largest}: give values below {num_rows}",
            value=largest,
            limit=num_rows - 1,
        )


def context_values(context: object, features: tuple[ContextFeature, ...]) -> Int64Array:
    """The contextual features int64 [k], one of each, in the declared order."""
    names = ", ".join(feature.name for feature in features)
    values = integers("context", context)
    if len(values) != len(features):
        raise InvalidRequest(
            f"context has {len(values)} values: give {len(features)} ({names})",
            value=len(values),
            limit=len(features),
        )
    for feature, value in zip(features, values.tolist(), strict=True):
        if value >= feature.num_rows:
            raise InvalidRequest(
                f"context, {feature.name}, is {value}: give a value below {feature.num_rows}",
                value=value,
                limit=feature.num_rows - 1,
            )
    return values


def _dense_values(field: str, dim: int, values: object, length: int) -> Int64Array:
    # Whole numbers are fine: JSON has one type of number, and 1.0 is often written as 1.
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        raise InvalidRequest(f"{field} is {_type_text(values)}: give float32")
    shapes = [(length, dim), (length,)] if dim == 1 or length == 0 else [(length, dim)]
    if values.shape not in shapes:
        raise InvalidRequest(f"{field} has shape {list(values.shape)}: give {list(shapes[0])}")
    with np.errstate(over="ignore"):
        converted = values.astype(np.float32).reshape(length, dim)
    if not np.isfinite(converted).all():
        raise InvalidRequest(f"{field} holds NaN or infinity: give finite float32 values")
    return float_bits(converted)


def _type_text(values: object) -> str:
    return str(values.dtype) if isinstance(values, np.ndarray) else type(values).__name__
