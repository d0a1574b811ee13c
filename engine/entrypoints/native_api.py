"""The native JSON face: one request, or several users in one body.

{"user_id": "u1", "history": {"item": [3, 14]}, "candidates": [9, 26]}
{"requests": [{...}, {...}]}   ->   {"responses": [{...}, {"error": "...", ...}]}
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.entrypoints.protocol import (
    ErrorBody,
    UsageParameters,
    decode_column,
    decode_integers,
    decode_json,
    usage_parameters,
)
from engine.errors import InvalidRequest, RequestError, TooLarge
from engine.request_builder import build_request
from engine.types import Request, Response, Task


class NativeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One user's request. `history` and `candidates`: item ids, or feature name -> values."""

    user_id: str | int
    history: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    candidates: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    context: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    query_time: int | None = None
    namespace: str = ""
    topk: int | None = None
    exclude_history: bool = False
    return_user_embedding: bool = False
    deadline_ms: float | None = None
    priority: int = 0
    cache: str = "use"
    history_start: int = 0
    base_length: int = 0
    base_fingerprint: str = ""
    ignore_extra: bool = False
    request_id: str | None = None


class NativeResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One user's answer. scores: one row per candidate, one column per task of the model."""

    request_id: str
    usage: UsageParameters
    scores: list[list[float]] | None = None
    items: list[int] | None = None
    item_scores: list[float] | None = None
    user_embedding: list[float] | None = None


class NativeResponses(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in the order of the requests, each a result or an error."""

    responses: list[NativeResponse | ErrorBody]


class NativeCall(NamedTuple):
    """A body: requests, or what is wrong with them, in order."""

    requests: list[Request | RequestError]
    is_batch: bool


_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_requests_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_request_decoder = msgspec.json.Decoder(NativeRequest)


def decode_call(
    body: bytes, task: Task, *, request_id: str, arrival_s: float, max_requests: int
) -> NativeCall:
    """A body of /v1/rank or /v1/retrieve.

    Raises InvalidRequest for a single request that is wrong and for a body that holds none;
    TooLarge for more than `max_requests`. In a batch a wrong request takes its error's place.
    """
    members = decode_json(_members_decoder, body, "the body")
    if "requests" not in members:
        request = _decode_request(body, task, "the body", request_id, arrival_s)
        return NativeCall([request], is_batch=False)
    if len(members) > 1:
        other = next(name for name in members if name != "requests")
        raise InvalidRequest(f"{other!r} stands beside `requests`: put it into each request")
    raws = decode_json(_requests_decoder, members["requests"], "requests")
    if not raws:
        raise InvalidRequest("requests is empty: send at least one")
    if len(raws) > max_requests:
        raise TooLarge(
            f"{len(raws)} requests in one body, the limit is max_requests_per_call="
            f"{max_requests}: send fewer at once",
            limit=max_requests,
            value=len(raws),
        )
    requests: list[Request | RequestError] = []
    for index, raw in enumerate(raws):
        try:
            requests.append(
                _decode_request(raw, task, f"requests[{index}]", f"{request_id}.{index}", arrival_s)
            )
        except RequestError as error:
            requests.append(error)
    return NativeCall(requests, is_batch=True)


def _decode_request(
    body: bytes | msgspec.Raw, task: Task, what: str, request_id: str, arrival_s: float
) -> Request:
    parsed = decode_json(_request_decoder, body, what)
    if parsed.topk is not None and parsed.topk < 1:
        raise InvalidRequest(f"topk is {parsed.topk}: give 1 or more", limit=1)
    return build_request(
        task=task,
        user_id=parsed.user_id,
        history=_decode_events(parsed.history, "history"),
        candidates=_decode_events(parsed.candidates, "candidates"),
        context=None if _is_null(parsed.context) else _decode_context(parsed.context),
        query_time=parsed.query_time,
        namespace=parsed.namespace,
        top_k=parsed.topk,
        exclude_history=parsed.exclude_history,
        return_user_embedding=parsed.return_user_embedding,
        deadline_ms=parsed.deadline_ms,
        priority=parsed.priority,
        cache=parsed.cache,
        history_start=parsed.history_start,
        base_length=parsed.base_length,
        base_fingerprint=parsed.base_fingerprint,
        ignore_extra=parsed.ignore_extra,
        request_id=parsed.request_id or request_id,
        arrival_s=arrival_s,
    )


def _is_null(raw: msgspec.Raw | msgspec.UnsetType) -> bool:
    return raw is msgspec.UNSET or bytes(raw).strip() == b"null"


def _decode_context(raw: msgspec.Raw | msgspec.UnsetType) -> np.ndarray:
    assert isinstance(raw, msgspec.Raw)
    if bytes(raw).lstrip()[:1] != b"[":
        raise InvalidRequest(
            "context is not a list: give one integer per contextual feature, in the model's order"
        )
    return decode_integers(raw, "context")


def _decode_events(
    raw: msgspec.Raw | msgspec.UnsetType, field: str
) -> dict[str, np.ndarray[Any, Any]] | None:
    if raw is msgspec.UNSET or _is_null(raw):
        return None
    if bytes(raw).lstrip()[:1] != b"{":
        return {"item": decode_column(raw, field)}
    columns = decode_json(_members_decoder, raw, field)
    return {name: decode_column(column, f"{field}.{name}") for name, column in columns.items()}


def encode_response(response: Response) -> NativeResponse:
    """One answer as its JSON struct."""
    return NativeResponse(
        request_id=response.request_id,
        usage=usage_parameters(response.usage),
        scores=_listed(response.scores),
        items=_listed(response.items),
        item_scores=_listed(response.item_scores),
        user_embedding=_listed(response.user_embedding),
    )


def _listed(array: np.ndarray | None) -> Any:
    return None if array is None else array.tolist()
