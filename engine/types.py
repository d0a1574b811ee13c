"""Requests, responses and what crosses from one process to another.

Arrays are numpy; across a process boundary they travel as raw bytes (`encode`, `decoder`).
Nothing here imports torch or asyncio.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ErrorRecord
from engine.metrics import Sample

Int64Array = NDArray[np.int64]
Uint64Array = NDArray[np.uint64]
Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
Features = Mapping[str, "np.ndarray[Any, Any]"]
"""Feature name -> one value per event: `item`, `action`, `time` [n] int64, and whatever else the
model declares, int64 or float32, [n] or [n, d]."""


class Task(StrEnum):
    """What a request asks for."""

    RANK = "rank"
    RETRIEVE = "retrieve"
    PREFETCH = "prefetch"


class CacheMode(StrEnum):
    """How a request meets the user's state."""

    USE = "use"
    BYPASS = "bypass"
    REFRESH = "refresh"


class Reuse(StrEnum):
    """What was reused for an answer; see the reuse table in `docs/concepts.md`."""

    APPEND = "append"
    EXACT = "exact"
    REQUEST = "request"
    BYPASS = "bypass"


class Request(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """One user's request.

    `history` holds the events oldest first; None only for a prefetch of a state that is already
    known. A delta request (`base_length` > 0) holds only the events from `base_length` on, at least
    one; `base_fingerprint` is what an earlier answer gave with that base. `weights_version` None
    takes the active one (or its canary). `deadline_s` and `arrival_s` are monotonic seconds, which
    all processes of one machine share. Values are checked by the core at admission
    (`InvalidRequest` names the field).
    """

    request_id: str
    user_id: str
    task: Task
    history: dict[str, np.ndarray] | None = None
    candidates: dict[str, np.ndarray] | None = None
    context: np.ndarray | None = None
    query_time: int | None = None
    namespace: str = ""
    top_k: int | None = None
    exclude_history: bool = False
    return_user_embedding: bool = False
    deadline_s: float | None = None
    arrival_s: float = 0.0
    priority: int = 0
    cache: CacheMode = CacheMode.USE
    history_start: int = 0
    base_length: int = 0
    base_fingerprint: str = ""
    ignore_extra: bool = False
    weights_version: str | None = None

    @property
    def is_delta(self) -> bool:
        """Only the newest events are sent, to extend a state that is already known."""
        return self.base_length > 0


class Usage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a request's history came from and what it waited for.

    `device_tokens + host_tokens + computed_tokens == history_length` (tokens, contextual rows
    included). `base_length` (events) and `fingerprint` (hex) say where a delta may start.
    """

    device_tokens: int = 0
    host_tokens: int = 0
    computed_tokens: int = 0
    history_length: int = 0
    suffix_tokens: int = 0
    base_length: int = 0
    fingerprint: str = ""
    weights_version: str = ""
    reuse: Reuse = Reuse.APPEND
    queue_us: int = 0
    onload_wait_us: int = 0
    run_us: int = 0


class Response(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """The answer to one request.

    scores: float32 [num_candidates, num_tasks], rank only.
    items, item_scores: int64 [k], float32 [k]; retrieve, or rank with `top_k`.
    user_embedding: float32 [d], when asked for.
    """

    request_id: str
    usage: Usage
    scores: np.ndarray | None = None
    items: np.ndarray | None = None
    item_scores: np.ndarray | None = None
    user_embedding: np.ndarray | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """Exactly one per admitted request: a response or an error."""

    request_id: str
    response: Response | None = None
    error: ErrorRecord | None = None


class FeatureInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One declared input: `dim` 0 for a scalar per event; dtype is int64 or float32."""

    name: str
    dtype: str
    dim: int
    on_history: bool
    on_candidates: bool


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What clients may know about the loaded model and how it is served.

    `is_random` warns that the weights are made up. Limits are in tokens unless they say events.
    A page has `page_size` tokens and a chunk `chunk_size`; a token's rows take `token_bytes` over
    all layers, in either tier. `sample_items` are ids of the catalogue, to try a request with.
    """

    name: str
    weights_version: str
    dtype: str
    tasks: tuple[Task, ...]
    score_names: tuple[str, ...]
    features: tuple[FeatureInfo, ...]
    context_features: tuple[str, ...]
    reads_query_time: bool
    embedding_dim: int
    max_history_events: int
    max_history_tokens: int
    max_batch_tokens: int
    keep_stride: int
    reuse: Reuse
    reuse_reason: str
    backend: str
    exactness: str
    cache_tiers: str
    page_size: int
    chunk_size: int
    token_bytes: int
    sample_items: tuple[int, ...] = ()
    is_random: bool = False


class CoreStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A snapshot of the core."""

    samples: list[Sample]
    num_waiting: int
    num_running: int
    num_steps: int
    is_draining: bool


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        contiguous = np.ascontiguousarray(value)
        return (contiguous.dtype.str, contiguous.shape, contiguous.reshape(-1).data.cast("B"))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _decode_array(expected: type, value: Any) -> object:
    if expected is np.ndarray:
        dtype, shape, raw = value
        return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)
    raise NotImplementedError(f"cannot decode {expected!r}")


T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: object) -> bytes:
    """The message as msgpack; arrays as (dtype, shape, raw bytes)."""
    return _encoder.encode(message)


def decoder(message_type: type[T]) -> msgspec.msgpack.Decoder[T]:
    """A decoder for messages of that type (a struct or a tagged union). Arrays are read-only."""
    return msgspec.msgpack.Decoder(message_type, dec_hook=_decode_array)
