"""The native JSON face: one request, or several users in one body.

{"user_id": "u1", "history": {"item": [3, 14]}, "candidates": [9, 26]}
{"requests": [{...}, {...}]}   ->   {"responses": [{...}, {"error": "...", ...}]}

Prefetch is in `prefetch_api`. The structs are also what the OpenAPI document is made from.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from engine.entrypoints.protocol import (
    UsageParameters,
    agreed_user,
    decode_column,
    decode_integers,
    decode_json,
    usage_parameters,
)
from engine.errors import InvalidRequest, RequestError, TooLarge
from engine.request_builder import build_request
from engine.types import Request, Response, Task

_ITEMS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "format": "int64"}}
_COLUMN: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]},
}
_EVENTS: dict[str, Any] = {
    "oneOf": [
        _ITEMS,
        {
            "type": "object",
            "properties": {"item": _ITEMS},
            "required": ["item"],
            "additionalProperties": _COLUMN,
        },
    ]
}

Events = Annotated[
    msgspec.Raw,
    msgspec.Meta(
        description="Item ids, or feature name -> one value (or row of values) per event.",
        extra_json_schema=_EVENTS,
    ),
]
Context = Annotated[
    msgspec.Raw,
    msgspec.Meta(
        description="One integer per contextual feature, in the model's order.",
        extra_json_schema={"anyOf": [_ITEMS, {"type": "null"}]},
    ),
]
"""Decoded later, by what the field is, so an error can name it."""


class NativeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One user's request.

    Attributes:
        user_id: Whose history it is; an integer is its decimal text. May stand in the routing
            header instead.
        history: The user's events, oldest first.
        candidates: The items to rank, with `rank` only.
        context: Contextual features.
        query_time: Seconds since the epoch, for models that read it.
        namespace: Keeps the states of equal user ids apart.
        topk: `retrieve`: how many items (10). `rank`: also return the best so many.
        exclude_history: `retrieve`: leave out what the history holds.
        return_user_embedding: Also return the user's vector.
        deadline_ms: From arrival; an answer that cannot come by then is an error.
        priority: Lower goes first; waiting requests age.
        cache: `use`, `bypass` (neither read nor write) or `refresh` (recompute and replace).
        history_start: Absolute index of the first event sent.
        base_length: Delta request: `history` holds only the events from here on.
        base_fingerprint: Delta request: what an earlier answer's `fingerprint` said.
        ignore_extra: Drop features that the model does not read instead of refusing them.
        weights_version: One of the loaded versions; the active one when not given.
        request_id: Comes back in the answer; made up when not given.
    """

    user_id: str | int | msgspec.UnsetType = msgspec.UNSET
    history: Events | msgspec.UnsetType = msgspec.UNSET
    candidates: Events | msgspec.UnsetType = msgspec.UNSET
    context: Context | msgspec.UnsetType = msgspec.UNSET
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
    weights_version: str | None = None
    request_id: str | None = None


class NativeRequests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of several users. Each has its own answer or error, in the same order."""

    requests: list[NativeRequest]


class NativeResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One user's answer.

    Attributes:
        request_id: The request's own, or one made up.
        usage: Where its history came from and what it waited for.
        scores: `rank`: one row per candidate, one column per task of the model.
        items: Best first; `retrieve`, or `rank` with `topk`.
        item_scores: Of `items`.
        user_embedding: When it was asked for.
    """

    request_id: str
    usage: UsageParameters
    scores: list[list[float]] | None = None
    items: list[int] | None = None
    item_scores: list[float] | None = None
    user_embedding: list[float] | None = None


Result = Annotated[
    msgspec.Raw,
    msgspec.Meta(
        extra_json_schema={
            "anyOf": [
                {"$ref": f"#/components/schemas/{name}"} for name in ("NativeResponse", "ErrorBody")
            ]
        }
    ),
]
"""A `NativeResponse` or an `ErrorBody`, encoded."""


class NativeResponses(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in the order of the requests, each a result or an error."""

    responses: list[Result]


class NativeCall(NamedTuple):
    """A body: requests, or what is wrong with them, in order."""

    requests: list[Request | RequestError]
    is_batch: bool


_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_requests_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_request_decoder = msgspec.json.Decoder(NativeRequest)


def decode_call(
    body: bytes,
    task: Task,
    *,
    request_id: str,
    arrival_s: float,
    max_requests: int,
    routed_user: str | None = None,
) -> NativeCall:
    """A body of /v1/rank or /v1/retrieve; `routed_user` is the user id of the routing header.

    Raises InvalidRequest for a single request that is wrong and for a body that holds none;
    TooLarge for more than `max_requests`. In a batch a wrong request takes its error's place.
    """
    members = decode_json(_members_decoder, body, "the body")
    if "requests" not in members:
        request = _decode_request(body, task, "the body", request_id, arrival_s, routed_user)
        return NativeCall([request], is_batch=False)
    requests: list[Request | RequestError] = []
    for index, raw in enumerate(batch_of(members, max_requests)):
        what, own_id = f"requests[{index}]", f"{request_id}.{index}"
        try:
            requests.append(_decode_request(raw, task, what, own_id, arrival_s, routed_user))
        except RequestError as error:
            requests.append(error)
    return NativeCall(requests, is_batch=True)


def batch_of(members: dict[str, msgspec.Raw], max_requests: int) -> list[msgspec.Raw]:
    """The undecoded requests of a `{"requests": [...]}` body. Raises InvalidRequest, TooLarge."""
    if len(members) > 1:
        other = next(name for name in members if name != "requests")
        raise InvalidRequest(f"{other!r:.80} stands beside `requests`: put it into each request")
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
    return raws


def _decode_request(
    body: bytes | msgspec.Raw,
    task: Task,
    what: str,
    request_id: str,
    arrival_s: float,
    routed_user: str | None,
) -> Request:
    parsed = decode_json(_request_decoder, body, what)
    if parsed.topk is not None and parsed.topk < 1:
        raise InvalidRequest(f"topk is {parsed.topk}: give 1 or more", limit=1)
    return build_request(
        task=task,
        user_id=agreed_user(parsed.user_id, routed_user),
        history=decode_events(parsed.history, "history"),
        candidates=decode_events(parsed.candidates, "candidates"),
        context=decode_context(parsed.context),
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
        weights_version=parsed.weights_version,
        request_id=parsed.request_id or request_id,
        arrival_s=arrival_s,
    )


def _is_null(raw: msgspec.Raw) -> bool:
    return bytes(raw).strip() == b"null"


def decode_context(raw: msgspec.Raw | msgspec.UnsetType) -> np.ndarray | None:
    """Contextual features as int64 [n], None when there are none. Raises InvalidRequest."""
    if isinstance(raw, msgspec.UnsetType) or _is_null(raw):
        return None
    if bytes(raw).lstrip()[:1] != b"[":
        raise InvalidRequest(
            "context is not a list: give one integer per contextual feature, in the model's order"
        )
    return decode_integers(raw, "context")


def decode_events(
    raw: msgspec.Raw | msgspec.UnsetType, field: str
) -> dict[str, np.ndarray[Any, Any]] | None:
    """Features of a history or of candidates, None when there are none. Raises InvalidRequest."""
    if isinstance(raw, msgspec.UnsetType) or _is_null(raw):
        return None
    if bytes(raw).lstrip()[:1] != b"{":
        return {"item": decode_column(raw, field)}
    columns = decode_json(_members_decoder, raw, field)
    return {name: decode_column(column, f"{field}.{name:.80}") for name, column in columns.items()}


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
