"""`mtserve evaluate`: ranking quality of a model directory, measured through the engine.

Leave-last-out on the k-core of a log: each user's history is sent in growing requests, the way it
would arrive, and the last request ranks the whole catalogue without the history's items. The user
is a hit when the held-out item is among the first ten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from engine.config import SchedulerConfig, require
from engine.engine import Engine
from engine.entrypoints.log_requests import OnProgress, TokensByTier, retrieve_request
from engine.entrypoints.logs import UserEvents, by_user, k_core, leave_last_out, read_log
from engine.entrypoints.offline import OfflineOptions
from engine.errors import InvalidRequest, RequestError, from_record
from engine.types import Outcome, Request, Response

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

    Attributes:
        hr_at_10: Share of the `num_users` evaluated users whose held-out item was found;
            `num_hits` is their number.
        num_skipped: Users left out of all of these figures, because the model refuses their whole
            history (it knows none of the items, say); `first_skipped` says who and why.
        num_requests: Requests that got an answer, in all rounds.
    """

    hr_at_10: float
    ndcg_at_10: float
    num_users: int
    num_hits: int
    num_skipped: int
    first_skipped: str | None
    num_requests: int
    cache: str
    tokens: TokensByTier


@dataclass(slots=True, eq=False)
class _Account:
    """What the rounds add up. Owned by the evaluating thread.

    `places` holds, per user, the place of the held-out item in the last round, from 0, or None.
    """

    num_requests: int = 0
    tokens: TokensByTier = field(default_factory=TokensByTier)
    places: list[int | None] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, user: UserEvents, outcome: Outcome, *, is_last_round: bool) -> None:
        """Count an answer. Raises what is not the fault of this user's history.

        An early round without a known item only means that there is nothing to keep yet: quality
        is measured in the last round, so that it does not depend on the number of rounds.
        """
        if outcome.error is not None:
            error = from_record(outcome.error)
            if not isinstance(error, RequestError):
                raise error
            if is_last_round:
                self.skipped.append(f"user {user.user_id}: {error.message}")
            return
        assert outcome.response is not None
        self.num_requests += 1
        self.tokens = self.tokens.plus(outcome.response.usage)
        if is_last_round:
            self.places.append(_place(user, outcome.response))


def run(options: EvaluateOptions, on_progress: OnProgress | None = None) -> EvaluateReport:
    """Evaluate; raises ConfigError for the model or sizes, RequestError for the log.

    A user whose history the model refuses is skipped and counted.
    """
    users = by_user(k_core(read_log(options.data), options.min_count))
    scheduler = SchedulerConfig(max_queue_requests=_BATCH)
    config = options.engine_config(scheduler)
    account = _Account()
    num_done, total = 0, options.rounds * len(users)
    with Engine.from_model_dir(options.model, config) as engine:
        for round_number in range(1, options.rounds + 1):
            # Every other round goes backwards: the users served last are met again first, so that
            # the device, the host and recomputation all take part when the pools are small.
            ordered = users if round_number % 2 else users[::-1]
            for start in range(0, len(ordered), _BATCH):
                batch = ordered[start : start + _BATCH]
                requests = [_request(user, round_number, options.rounds) for user in batch]
                for user, outcome in zip(batch, engine.run(requests), strict=True):
                    account.add(user, outcome, is_last_round=round_number == options.rounds)
                num_done += len(batch)
                if on_progress is not None:
                    on_progress(num_done, total)
    return _report(options, account)


def _report(options: EvaluateOptions, account: _Account) -> EvaluateReport:
    num_users, skipped = len(account.places), account.skipped
    if not num_users:
        raise InvalidRequest(
            f"no user of {options.data} can be evaluated, all {len(skipped)} are refused; "
            f"{skipped[0]}"
        )
    found = [place for place in account.places if place is not None]
    return EvaluateReport(
        hr_at_10=len(found) / num_users,
        ndcg_at_10=sum(1.0 / math.log2(place + 2) for place in found) / num_users,
        num_users=num_users,
        num_hits=len(found),
        num_skipped=len(skipped),
        first_skipped=skipped[0] if skipped else None,
        num_requests=account.num_requests,
        cache=options.cache,
        tokens=account.tokens,
    )


def growing_length(length: int, round_number: int, rounds: int) -> int:
    """Events sent in round `round_number` of `rounds`; the last round sends all `length`."""
    return -(-length * round_number // rounds)


def _request(user: UserEvents, round_number: int, rounds: int) -> Request:
    history = leave_last_out(len(user)).test
    length = growing_length(history, round_number, rounds)
    return retrieve_request(user, length, query_time=int(user.times[length]), exclude_history=True)


def _place(user: UserEvents, response: Response) -> int | None:
    """Place of the held-out item among the answer's items, from 0; None when it is not there."""
    assert response.items is not None
    target = user.items[leave_last_out(len(user)).test]
    places = (response.items == target).nonzero()[0]
    return int(places[0]) if len(places) else None
