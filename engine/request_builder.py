"""From keyword arguments to a `Request`: the checks that need no model.

Both faces of the engine and the server build their requests here, so an error reads the same
everywhere. What needs the model (declared features, known items, limits) is checked by the core.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from engine.errors import InvalidRequest
from engine.types import CacheMode, Int64Array, Request, Task

ArrayLike: TypeAlias = "np.ndarray[Any, Any] | Sequence[Any]"
FeaturesLike: TypeAlias = "Mapping[str, ArrayLike] | ArrayLike"
"""Feature name -> values, or the bare values of `item`."""

MAX_TEXT = 1024
"""Longest user id, namespace or request id, in characters."""

MAX_ID_BITS = 128
"""Longest user id that is an integer."""

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_INTEGER_FEATURES = frozenset({"item", "action", "time"})
_request_numbers = itertools.count(1)


def user_id_text(user_id: object, field: str = "user_id") -> str:
    """The user id as text; an integer is its decimal text. Raises InvalidRequest."""
    if isinstance(user_id, (int, np.integer)) and not isinstance(user_id, bool):
        number = int(user_id)
        if (bits := number.bit_length()) > MAX_ID_BITS:
            raise InvalidRequest(
                f"{field} is an integer of {bits} bits, the limit is {MAX_ID_BITS}: give text",
                limit=MAX_ID_BITS,
                value=bits,
            )
        return str(number)
    if isinstance(user_id, str) and user_id:
        return text(user_id, field)
    raise InvalidRequest(f"{field} is {user_id!r}: give a non-empty text or an integer")


def text(value: object, field: str) -> str:
    """A text of at most MAX_TEXT characters that UTF-8 can hold. Raises InvalidRequest."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} is {value!r:.60}: give text")
    if len(value) > MAX_TEXT:
        raise InvalidRequest(
            f"{field} has {len(value)} characters, the limit is {MAX_TEXT}: shorten it",
            limit=MAX_TEXT,
            value=len(value),
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{field} is no valid Unicode text: {value!a:.60}") from None
    return str.__str__(value)  # of a subclass, its plain text


def integer(value: object, field: str, *, minimum: int = _INT64_MIN) -> int:
    """An int64 that is no bool and not below `minimum`. Raises InvalidRequest."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise InvalidRequest(f"{field} is {value!r}: give an integer")
    number = int(value)
    if not _INT64_MIN <= number <= _INT64_MAX:
        raise InvalidRequest(f"{field} does not fit in 64 bits: give an int64")
    if number < minimum:
        raise InvalidRequest(
            f"{field} is {number}: give {minimum} or more", limit=minimum, value=number
        )
    return number


def boolean(value: object, field: str) -> bool:
    """True or False and nothing that only resembles it. Raises InvalidRequest."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise InvalidRequest(f"{field} is {value!r}: give true or false")


def integers(values: object, field: str) -> Int64Array:
    """Values as int64 [n], C-contiguous; the caller's array itself if it already is one.

    Raises InvalidRequest for floats, bools, text, numbers beyond 64 bits and other shapes.
    """
    array = feature(values, field)
    if array.dtype != np.int64:
        if array.size:
            raise InvalidRequest(f"{field} has {array.dtype} values: give integers")
        array = array.astype(np.int64)  # np.array([]) is float64
    if array.ndim != 1:
        raise InvalidRequest(f"{field} has shape {list(array.shape)}: give one value per entry")
    return array


def feature(values: object, field: str) -> np.ndarray[Any, Any]:
    """Values as int64 or float32, [n] or [n, d], C-contiguous. Raises InvalidRequest."""
    if not isinstance(values, np.ndarray):
        if isinstance(values, (str, bytes, Mapping)) or np.isscalar(values) or values is None:
            raise InvalidRequest(f"{field} is {values!r:.60}: give a list of numbers")
        values = _from_sequence(values, field)
    if values.ndim not in (1, 2):
        raise InvalidRequest(
            f"{field} has {values.ndim} dimensions: give [n], or [n, d] for a vector feature"
        )
    kind = values.dtype.kind
    if kind == "f":
        if values.size and not np.isfinite(values).all():
            raise InvalidRequest(f"{field} has NaN or infinite values: give finite numbers")
        with np.errstate(over="ignore"):
            narrow = np.ascontiguousarray(values, dtype=np.float32)
        if values.dtype.itemsize > 4 and narrow.size and not np.isfinite(narrow).all():
            raise InvalidRequest(f"{field} has values beyond the range of float32")
        return narrow
    if kind == "u" and values.size and int(values.max()) > _INT64_MAX:
        raise InvalidRequest(f"{field} has a value that does not fit in 64 bits")
    if kind in "iu":
        return np.ascontiguousarray(values, dtype=np.int64)
    raise InvalidRequest(f"{field} has {values.dtype} values: give integers or floats")


def _from_sequence(values: Any, field: str) -> np.ndarray[Any, Any]:
    try:
        listed = list(values)
    except TypeError:
        raise InvalidRequest(f"{field} is {values!r:.60}: give a list of numbers") from None
    if not listed:
        return np.zeros(0, np.int64)
    flat = listed
    if not isinstance(listed[0], (int, float, np.generic)):
        try:
            flat = list(itertools.chain.from_iterable(listed))
        except TypeError:
            raise InvalidRequest(f"{field} mixes numbers and other values") from None
    kinds = set(map(type, flat))
    for kind in kinds:
        if issubclass(kind, (bool, np.bool_)):
            raise InvalidRequest(f"{field} has true or false among its values: give numbers")
        if not issubclass(kind, (int, float, np.number)):
            raise InvalidRequest(f"{field} has a {kind.__name__} among its values: give numbers")
    try:
        if all(issubclass(kind, (int, np.integer)) for kind in kinds):
            return np.array(listed, dtype=np.int64)
        return np.array(listed, dtype=np.float64)
    except OverflowError:
        raise InvalidRequest(f"{field} has a value that does not fit in 64 bits") from None
    except ValueError:
        raise InvalidRequest(f"{field} has rows of different lengths: give [n, d]") from None


def _events(values: FeaturesLike | None, field: str) -> dict[str, np.ndarray] | None:
    if values is None:
        return None
    named = values if isinstance(values, Mapping) else {"item": values}
    features: dict[str, np.ndarray] = {}
    for name, column in named.items():
        if not isinstance(name, str):
            raise InvalidRequest(f"{field} has the feature name {name!r}: give text")
        label = f"{field}.{name}"
        array = feature(column, label)
        if name in _INTEGER_FEATURES:
            array = integers(array, label)
        features[name] = array
    if "item" not in features:
        raise InvalidRequest(f"{field} has no `item`: give the item ids, oldest first")
    count = len(features["item"])
    for name, array in features.items():
        is_open_action = field == "history" and name == "action" and len(array) == count - 1
        if len(array) != count and not is_open_action:
            raise InvalidRequest(
                f"{field}.{name} has {len(array)} entries, {field}.item has {count}: "
                "give one per event"
            )
    return features


def _cache_mode(cache: CacheMode | str) -> CacheMode:
    try:
        return CacheMode(cache)
    except ValueError:
        raise InvalidRequest(f"cache is {cache!r}: give use, bypass or refresh") from None


def _deadline(deadline_ms: float | None, arrival_s: float) -> float | None:
    if deadline_ms is None:
        return None
    if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, (int, float, np.number)):
        raise InvalidRequest(f"deadline_ms is {deadline_ms!r}: give milliseconds from arrival")
    try:
        milliseconds = float(deadline_ms)
    except OverflowError:
        milliseconds = float("inf")
    if not 0 < milliseconds < float("inf"):
        raise InvalidRequest(
            f"deadline_ms is {milliseconds}: give more than 0", limit=0, value=milliseconds
        )
    return arrival_s + milliseconds / 1000.0


def build_request(
    *,
    task: Task,
    user_id: str | int,
    history: FeaturesLike | None = None,
    candidates: FeaturesLike | None = None,
    context: ArrayLike | None = None,
    query_time: int | None = None,
    namespace: str = "",
    top_k: int | None = None,
    exclude_history: bool = False,
    return_user_embedding: bool = False,
    deadline_ms: float | None = None,
    priority: int = 0,
    cache: CacheMode | str = CacheMode.USE,
    history_start: int = 0,
    base_length: int = 0,
    base_fingerprint: str = "",
    ignore_extra: bool = False,
    weights_version: str | None = None,
    request_id: str | None = None,
    arrival_s: float | None = None,
) -> Request:
    """A `Request` out of what a caller gave. Raises InvalidRequest naming the field.

    Args:
        task: Rank needs candidates; retrieve and prefetch take none. A prefetch may leave the
            history out (a state that is already known).
        user_id: Text, or an integer, which is its decimal text.
        history: Events, oldest first: feature name -> one value per event, or just the items.
            `action` may be one shorter: the last action is not known yet.
        candidates: The same for the candidates.
        context: Contextual features in the declared order.
        query_time: Seconds since the epoch; never replaced by the clock.
        top_k: Retrieve: how many (10 when not given). Rank: also return the best k.
        deadline_ms: From `arrival_s`, which is now when not given (monotonic seconds).
        priority: Lower goes first, with ageing.
        history_start: Absolute index of the first event given (of a delta request: of the whole
            history that it extends).
        base_length, base_fingerprint: A delta request: `history` holds only the events from
            `base_length` on, and both are what an earlier answer gave. Ends with HistoryNeeded
            when that history is not known any more.
        ignore_extra: Drop features that the model does not read instead of refusing them.
        weights_version: One of the loaded versions; the active one when not given.
        request_id: Made up when not given.
    """
    arrival = time.monotonic() if arrival_s is None else arrival_s
    if history is None and task is not Task.PREFETCH:
        raise InvalidRequest("history is missing: give the user's events, an empty list for none")
    if task is Task.RANK and candidates is None:
        raise InvalidRequest("candidates are missing: give the items to rank, or call retrieve")
    if task is not Task.RANK and candidates is not None:
        raise InvalidRequest(f"candidates do not go with {task.value}: leave them out, or rank")
    if exclude_history and task is not Task.RETRIEVE:
        raise InvalidRequest(f"exclude_history goes with retrieve, this is {task.value}")
    if top_k is None and task is Task.RETRIEVE:
        top_k = 10
    base_length = integer(base_length, "base_length", minimum=0)
    base_fingerprint = text(base_fingerprint, "base_fingerprint")
    if bool(base_length) != bool(base_fingerprint):
        raise InvalidRequest(
            f"base_length is {base_length} and base_fingerprint {base_fingerprint!r:.60}: a delta "
            "request gives both as an earlier answer gave them, any other request neither"
        )
    history_features = _events(history, "history")
    num_events = 0 if history_features is None else len(history_features["item"])
    history_start = integer(history_start, "history_start", minimum=0)
    if max(history_start, base_length) + num_events > _INT64_MAX:
        raise InvalidRequest(
            f"history_start is {history_start} and base_length {base_length}: the index of the "
            f"last of {num_events} events does not fit in 64 bits"
        )
    candidate_features = _events(candidates, "candidates")
    if candidate_features is not None and len(candidate_features["item"]) == 0:
        raise InvalidRequest("candidates is empty: give at least one item")
    return Request(
        request_id=text(request_id, "request_id") if request_id else _new_request_id(),
        user_id=user_id_text(user_id),
        task=task,
        history=history_features,
        candidates=candidate_features,
        context=None if context is None else integers(context, "context"),
        query_time=None if query_time is None else integer(query_time, "query_time"),
        namespace=text(namespace, "namespace"),
        top_k=None if top_k is None else integer(top_k, "top_k", minimum=1),
        exclude_history=boolean(exclude_history, "exclude_history"),
        return_user_embedding=boolean(return_user_embedding, "return_user_embedding"),
        deadline_s=_deadline(deadline_ms, arrival),
        arrival_s=arrival,
        priority=integer(priority, "priority"),
        cache=_cache_mode(cache),
        history_start=history_start,
        base_length=base_length,
        base_fingerprint=base_fingerprint,
        ignore_extra=boolean(ignore_extra, "ignore_extra"),
        weights_version=(
            None if weights_version is None else text(weights_version, "weights_version")
        ),
    )


def _new_request_id() -> str:
    return f"r{next(_request_numbers)}"
