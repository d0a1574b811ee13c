"""`mtserve evaluate`: ranking quality of a model directory, measured through the engine.

Leave-last-out on the k-core of a log: each user's history is sent in growing requests, the way it
would arrive, and the last request ranks the whole catalogue without the history's items. The user
is a hit when the held-out item is among the first ten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from engine.config import SchedulerConfig, require
from engine.engine import Engine
from engine.entrypoints.logs import UserEvents, by_user, k_core, leave_last_out, read_log
from engine.entrypoints.offline import (
    OfflineOptions,
    OnProgress,
    TokensByTier,
    retrieve_request,
)
from engine.errors import from_record
from engine.types import Request, Response

_BATCH = 256
"""Requests handed to the engine at once."""


class EvaluateOptions(OfflineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranking quality of a model on a log, measured through the engine.

    Each user's last item is held out, the history before it is sent in growing requests, and the
    last one ranks the whole catalogue without the history's items. The quality is the same with
    every cache mode.

    Attributes:
        data: Interaction log: csv, tsv or `::`, with user, item, rating or action, time.
        min_count: Iterated k-core: users and items with fewer interactions are dropped.
        rounds: Growing requests each user's history is sent in; the last one is ranked.
    """

    data: str
    min_count: int = 5
    rounds: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.min_count >= 3, f"min_count is {self.min_count}: leave-last-out needs 3")
        require(self.rounds >= 1, f"rounds is {self.rounds}: give at least 1")


class EvaluateReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Full-ranking quality, and where the history tokens of all rounds came from.

    `num_hits` users of `num_users` found their held-out item; `hr_at_10` is their share.
    """

    hr_at_10: float
    ndcg_at_10: float
    num_users: int
    num_hits: int
    num_requests: int
    cache: str
    tokens: TokensByTier


def run(options: EvaluateOptions, on_progress: OnProgress | None = None) -> EvaluateReport:
    """Evaluate; raises ConfigError for the model or sizes, RequestError for the log."""
    users = by_user(k_core(read_log(options.data), options.min_count))
    scheduler = SchedulerConfig(max_queue_requests=_BATCH)
    config = options.engine_config(scheduler)
    tokens = TokensByTier()
    num_requests, total = 0, options.rounds * len(users)
    places: dict[str, int | None] = {}
    with Engine.from_model_dir(options.model, config) as engine:
        for round_number in range(1, options.rounds + 1):
            # Every other round goes backwards: the users served last are met again first, so that
            # the device, the host and recomputation all take part when the pools are small.
            ordered = users if round_number % 2 else users[::-1]
            for start in range(0, len(ordered), _BATCH):
                batch = ordered[start : start + _BATCH]
                requests = [_request(user, round_number, options.rounds) for user in batch]
                for user, response in zip(batch, _responses(engine, requests), strict=True):
                    tokens = tokens.plus(response.usage)
                    places[user.user_id] = _place(user, response)
                num_requests += len(batch)
                if on_progress is not None:
                    on_progress(num_requests, total)
    found = [place for place in places.values() if place is not None]
    return EvaluateReport(
        hr_at_10=len(found) / len(users),
        ndcg_at_10=sum(1.0 / math.log2(place + 2) for place in found) / len(users),
        num_users=len(users),
        num_hits=len(found),
        num_requests=num_requests,
        cache=options.cache,
        tokens=tokens,
    )


def growing_length(length: int, round_number: int, rounds: int) -> int:
    """Events sent in round `round_number` of `rounds`; the last round sends all `length`."""
    return -(-length * round_number // rounds)


def _request(user: UserEvents, round_number: int, rounds: int) -> Request:
    history = leave_last_out(len(user)).test
    length = growing_length(history, round_number, rounds)
    return retrieve_request(user, length, query_time=int(user.times[length]), exclude_history=True)


def _responses(engine: Engine, requests: list[Request]) -> Iterator[Response]:
    for outcome in engine.run(requests):
        if outcome.error is not None:
            raise from_record(outcome.error)
        assert outcome.response is not None
        yield outcome.response


def _place(user: UserEvents, response: Response) -> int | None:
    """Place of the held-out item among the answer's items, from 0; None when it is not there."""
    assert response.items is not None
    target = user.items[leave_last_out(len(user)).test]
    places = (response.items == target).nonzero()[0]
    return int(places[0]) if len(places) else None
