"""Bodies of `POST /v1/users:prefetch`.

{"users": ["u1", "u2"], "namespace": ""}        bring what is known of them to the device
{"requests": [{"user_id": "u1", "history": [3, 14]}]}       compute histories and keep them
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from engine.entrypoints.native_api import (
    Context,
    Events,
    batch_of,
    decode_context,
    decode_events,
)
from engine.entrypoints.protocol import ErrorBody, agreed_user, decode_json
from engine.errors import InvalidRequest, RequestError, TooLarge
from engine.request_builder import build_request
from engine.types import Request, Response, Task


class PrefetchUsers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Users whose state is wanted on the device.

    Attributes:
        users: Their ids.
        namespace: Of all of them.
        weights_version: Whose state is meant; the active one's when not given.
    """

    users: list[str | int]
    namespace: str = ""
    weights_version: str | None = None


class PrefetchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A history to compute and keep; fields as in a request of `rank`."""

    history: Events
    user_id: str | int | msgspec.UnsetType = msgspec.UNSET
    context: Context | msgspec.UnsetType = msgspec.UNSET
    query_time: int | None = None
    namespace: str = ""
    deadline_ms: float | None = None
    priority: int = 0
    history_start: int = 0
    ignore_extra: bool = False
    weights_version: str | None = None


class PrefetchRequests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Histories of several users."""

    requests: list[PrefetchRequest]


class PrefetchedUser(msgspec.Struct, frozen=True, kw_only=True):
    """What is on the device for a user now, and where it came from; in tokens.

    Attributes:
        user_id: Whose state it is.
        device_tokens: Were there already, or were brought there without a history.
        host_tokens: Came from the host tier.
        computed_tokens: Were computed.
        history_length: All of them.
        error: Why it failed; then the numbers are 0.
    """

    user_id: str
    device_tokens: int = 0
    host_tokens: int = 0
    computed_tokens: int = 0
    history_length: int = 0
    error: ErrorBody | msgspec.UnsetType = msgspec.UNSET


class PrefetchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The users in the order they were sent; those of whom nothing is known are apart."""

    users: list[PrefetchedUser]
    unknown: list[str]


class PrefetchCall(NamedTuple):
    """One entry per user, in order: the id as far as it is known, and the request or its error."""

    user_ids: list[str]
    requests: list[Request | RequestError]


_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_users_decoder = msgspec.json.Decoder(PrefetchUsers)
_request_decoder = msgspec.json.Decoder(PrefetchRequest)


def decode_prefetch(
    body: bytes,
    *,
    request_id: str,
    arrival_s: float,
    max_requests: int,
    routed_user: str | None = None,
) -> PrefetchCall:
    """A body as requests.

    Raises InvalidRequest for a body that holds none, or a list of users with a wrong one in it;
    TooLarge for more than `max_requests`. A wrong history takes its error's place.
    """
    members = decode_json(_members_decoder, body, "the body")
    if "requests" not in members:
        return _decode_users(body, request_id, arrival_s, max_requests, routed_user)
    call = PrefetchCall([], [])
    for index, raw in enumerate(batch_of(members, max_requests)):
        try:
            request = _decode_history(raw, index, request_id, arrival_s, routed_user)
        except RequestError as error:
            call.user_ids.append("")
            call.requests.append(error)
        else:
            call.user_ids.append(request.user_id)
            call.requests.append(request)
    return call


def _decode_users(
    body: bytes, request_id: str, arrival_s: float, max_requests: int, routed_user: str | None
) -> PrefetchCall:
    parsed = decode_json(_users_decoder, body, "the body")
    if not parsed.users:
        raise InvalidRequest("users is empty: give at least one user id")
    if len(parsed.users) > max_requests:
        raise TooLarge(
            f"{len(parsed.users)} users in one body, the limit is max_requests_per_call="
            f"{max_requests}: send fewer at once",
            limit=max_requests,
            value=len(parsed.users),
        )
    requests: list[Request | RequestError] = []
    user_ids = [agreed_user(sent, routed_user) for sent in parsed.users]
    for index, user_id in enumerate(user_ids):
        requests.append(
            build_request(
                task=Task.PREFETCH,
                user_id=user_id,
                namespace=parsed.namespace,
                weights_version=parsed.weights_version,
                request_id=f"{request_id}.{index}",
                arrival_s=arrival_s,
            )
        )
    return PrefetchCall(user_ids, requests)


def _decode_history(
    raw: msgspec.Raw, index: int, request_id: str, arrival_s: float, routed_user: str | None
) -> Request:
    parsed = decode_json(_request_decoder, raw, f"requests[{index}]")
    history = decode_events(parsed.history, "history")
    if history is None:
        raise InvalidRequest("history is null: give events, or list the user under `users`")
    return build_request(
        task=Task.PREFETCH,
        user_id=agreed_user(parsed.user_id, routed_user),
        history=history,
        context=decode_context(parsed.context),
        query_time=parsed.query_time,
        namespace=parsed.namespace,
        deadline_ms=parsed.deadline_ms,
        priority=parsed.priority,
        history_start=parsed.history_start,
        ignore_extra=parsed.ignore_extra,
        weights_version=parsed.weights_version,
        request_id=f"{request_id}.{index}",
        arrival_s=arrival_s,
    )


def encode_prefetched(user_id: str, response: Response) -> PrefetchedUser:
    """A user of whom something is on the device now."""
    usage = response.usage
    return PrefetchedUser(
        user_id=user_id,
        device_tokens=usage.device_tokens,
        host_tokens=usage.host_tokens,
        computed_tokens=usage.computed_tokens,
        history_length=usage.history_length,
    )
