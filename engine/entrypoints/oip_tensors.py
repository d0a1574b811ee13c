"""Input tensors of the Open Inference Protocol as numpy arrays, whichever way they came.

Values are never looked at one by one, except those of JSON. Arrays over bytes are views: read-only,
and possibly not aligned to their item size, which numpy reads as well.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from engine.entrypoints.protocol import (
    decode_column,
    decode_integers,
    decode_json,
    decode_numbers,
)
from engine.errors import InvalidRequest
from engine.types import Int64Array

TensorData: TypeAlias = "msgspec.Raw | memoryview | np.ndarray[Any, Any] | list[bytes]"
"""JSON; little-endian row-major bytes; or, from gRPC's typed contents, flat numbers or texts."""

MAX_DIMENSIONS = 2
MAX_VALUES = 1 << 48
"""More values than any body can hold; what is below it can be multiplied without care."""

_INT64 = np.dtype("<i8")
_FP32 = np.dtype("<f4")
_TEXT_LENGTH = struct.Struct("<I")
_texts = msgspec.json.Decoder(list[str])


class Tensor(NamedTuple):
    """One input, not decoded yet."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: TensorData

    @property
    def field(self) -> str:
        """How errors call it."""
        return f"input {self.name!r}"


def user_id_of(tensor: Tensor) -> str | int:
    """The one user of a BYTES [1] or INT64 [1] tensor. Raises InvalidRequest."""
    if tensor.datatype not in ("BYTES", "INT64"):
        raise _wrong_datatype(tensor, "BYTES or INT64")
    if list(tensor.shape) != [1]:
        raise InvalidRequest(
            f"{tensor.field} has shape {_shown(tensor.shape)}: send [1], one request is one user "
            "(several users: POST /v1/rank)"
        )
    if tensor.datatype == "INT64":
        return int(_integers_of(tensor)[0])
    return _text_of(tensor)


def vector_of(tensor: Tensor) -> Int64Array:
    """An INT64 [n] tensor as int64 [n]. Raises InvalidRequest."""
    if tensor.datatype != "INT64":
        raise _wrong_datatype(tensor, "INT64")
    if len(tensor.shape) != 1:
        raise InvalidRequest(
            f"{tensor.field} has shape {_shown(tensor.shape)}: send [n], one request is one user"
        )
    return _integers_of(tensor)


def feature_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """An INT64 or FP32 tensor, [n] or [n, d], as int64 or float32. Raises InvalidRequest."""
    if tensor.datatype not in ("INT64", "FP32"):
        raise _wrong_datatype(tensor, "INT64 or FP32")
    values = _integers_of(tensor) if tensor.datatype == "INT64" else _floats_of(tensor)
    return values.reshape(tuple(tensor.shape))


def _integers_of(tensor: Tensor) -> Int64Array:
    """The values of an INT64 tensor, flat unless JSON has them in rows."""
    count = _num_values(tensor)
    match tensor.data:
        case memoryview():
            return _from_bytes(tensor, tensor.data, count, _INT64)
        case np.ndarray():
            if tensor.data.dtype != np.int64:
                raise _wrong_contents(tensor, "int64_contents")
            values = tensor.data
        case list():
            raise _wrong_contents(tensor, "int64_contents")
        case _ if len(tensor.shape) == 1:
            values = decode_integers(tensor.data, tensor.field)
        case _:
            values = decode_column(tensor.data, tensor.field)
            if values.dtype != np.int64:
                raise InvalidRequest(
                    f"{tensor.field} is INT64 but has fractions: send integers, or FP32"
                )
    _check_rows(tensor, values, count)
    return values


def _floats_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The values of an FP32 tensor, flat unless JSON has them in rows."""
    count = _num_values(tensor)
    match tensor.data:
        case memoryview():
            return _from_bytes(tensor, tensor.data, count, _FP32)
        case np.ndarray():
            if tensor.data.dtype != np.float32:
                raise _wrong_contents(tensor, "fp32_contents")
            values = tensor.data
        case list():
            raise _wrong_contents(tensor, "fp32_contents")
        case _:
            values = decode_numbers(tensor.data, tensor.field)
    _check_rows(tensor, values, count)
    return values


def _text_of(tensor: Tensor) -> str:
    match tensor.data:
        case memoryview():
            encoded = _only_text(tensor, tensor.data)
        case list():
            _check_count(tensor, len(tensor.data), 1)
            encoded = tensor.data[0]
        case np.ndarray():
            raise _wrong_contents(tensor, "bytes_contents")
        case _:
            texts = decode_json(_texts, tensor.data, tensor.field)
            _check_count(tensor, len(texts), 1)
            return texts[0]
    try:
        return encoded.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{tensor.field} is no UTF-8 text: {error.reason}") from None


def _only_text(tensor: Tensor, raw: memoryview) -> bytes:
    """The element of BYTES [1]: four bytes of length, little-endian, then the text."""
    if len(raw) < _TEXT_LENGTH.size:
        raise InvalidRequest(
            f"{tensor.field} has {len(raw)} bytes: a BYTES element is "
            f"{_TEXT_LENGTH.size} bytes of length and then its bytes",
            limit=_TEXT_LENGTH.size,
            value=len(raw),
        )
    (length,) = _TEXT_LENGTH.unpack_from(raw)
    present = len(raw) - _TEXT_LENGTH.size
    if length != present:
        raise InvalidRequest(
            f"{tensor.field} announces a text of {length} bytes and has {present}: they must agree",
            limit=present,
            value=length,
        )
    return bytes(raw[_TEXT_LENGTH.size :])


def _from_bytes(
    tensor: Tensor, raw: memoryview, count: int, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    expected = count * dtype.itemsize
    if len(raw) != expected:
        raise InvalidRequest(
            f"{tensor.field} has {len(raw)} bytes, but {tensor.datatype} of shape "
            f"{_shown(tensor.shape)} takes {expected}: they must agree",
            limit=expected,
            value=len(raw),
        )
    return np.frombuffer(raw, dtype)


def _num_values(tensor: Tensor) -> int:
    """The product of the extents."""
    shape = tensor.shape
    if not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise InvalidRequest(
            f"{tensor.field} has {len(shape)} dimensions: send [n] or [n, d]",
            limit=MAX_DIMENSIONS,
            value=len(shape),
        )
    if min(shape) < 0:
        raise InvalidRequest(
            f"{tensor.field} has shape {_shown(shape)}: an extent is 0 or more", limit=0
        )
    if max(shape) > MAX_VALUES or (count := math.prod(shape)) > MAX_VALUES:
        raise InvalidRequest(
            f"{tensor.field} has shape {_shown(shape)}: that is too large", limit=MAX_VALUES
        )
    return count


def _check_rows(tensor: Tensor, values: np.ndarray[Any, Any], count: int) -> None:
    if values.ndim == 2 and list(values.shape) != list(tensor.shape):
        raise InvalidRequest(
            f"{tensor.field} has shape {_shown(tensor.shape)} but its data has "
            f"{list(values.shape)}: they must agree"
        )
    _check_count(tensor, values.size, count)


def _check_count(tensor: Tensor, count: int, expected: int) -> None:
    if count != expected:
        raise InvalidRequest(
            f"{tensor.field} has shape {_shown(tensor.shape)} but {count} values: they must agree",
            limit=expected,
            value=count,
        )


def _shown(shape: Sequence[int]) -> str:
    """The shape as text; absurd ones are cut."""
    text = f"[{', '.join(_shown_extent(extent) for extent in shape[:4])}"
    return text + (", ...]" if len(shape) > 4 else "]")


def _shown_extent(extent: int) -> str:
    return str(extent) if extent.bit_length() <= 128 else f"a number of {extent.bit_length()} bits"


def _wrong_datatype(tensor: Tensor, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{tensor.field} has datatype {tensor.datatype!r:.40}: send {expected}")


def _wrong_contents(tensor: Tensor, expected: str) -> InvalidRequest:
    return InvalidRequest(
        f"{tensor.field} is {tensor.datatype} but its contents are of another type: "
        f"fill {expected}, or send raw_input_contents"
    )
