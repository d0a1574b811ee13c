"""`mtserve replay`: run a real interaction log through the engine and account for every token.

The log becomes one retrieve request for each window of a user's activity (`log_requests.Trace`).
`sequential` sends one request at a time and lets all transfers end in between, which makes the
token account a deterministic function of the log and the sizes. Otherwise `concurrency` requests
are in flight, and the account may differ a little, because transfers overlap with requests.
`verify` recomputes a share of the answers from scratch and compares them bit for bit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
import numpy as np

from engine.config import SchedulerConfig, require
from engine.core import EngineCore
from engine.engine import Engine
from engine.entrypoints.log_requests import Latency, OnProgress, TokensByTier, Trace
from engine.entrypoints.offline import OfflineOptions, catalogue_ids, unknown_policy
from engine.errors import EngineError, from_record
from engine.types import CacheMode, CoreStats, Outcome, Request, Response

_WAIT_S = 0.05


class ReplayOptions(OfflineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replay a log as requests and account for every token.

    One retrieve request for each window of a user's activity, in the log's order. The report says
    how many history tokens were asked for, where they were found, what was evicted and moved, and
    how long answers took. The engine runs in this process; with `--server URL` the requests go to
    a running server, and the options are others (`mtserve replay --server URL --help`).

    Attributes:
        trace: Interaction log: csv, tsv or `::`, with user, item, rating or action, time.
        window_s: Seconds of a user's activity that make one request.
        sequential: One request at a time, transfers drained between, batch 1, no look-ahead.
        concurrency: Requests in flight otherwise.
        verify: Share of answers, 0 to 1, that are recomputed from scratch and compared.
        max_requests: Replay only the first so many requests; 0 for all.
        seed: Of the choice of answers to verify.
    """

    trace: str
    window_s: int = 60
    sequential: bool = False
    concurrency: int = 16
    verify: float = 0.0
    max_requests: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window_s >= 0, f"window_s is {self.window_s}: give 0 or more")
        require(self.concurrency >= 1, f"concurrency is {self.concurrency}: give at least 1")
        require(0 <= self.verify <= 1, f"verify is {self.verify}: give a share from 0 to 1")
        require(self.max_requests >= 0, f"max_requests is {self.max_requests}: give 0 or more")
        require(self.seed >= 0, f"seed is {self.seed}: give 0 or more")


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The account of a replay.

    Attributes:
        requests: Requests of the trace; `answered` of them got an answer, `failed` counts the
            others by error code (a history without any known item has nothing to retrieve from:
            invalid_request).
        tokens: History tokens by tier over answered requests, with the denominator.
        device_share, host_share: Of the denominator.
        unknown_items, unknown_events: Distinct items, and events, of the log that the model's
            catalogue does not have; `unknown_history` is the model's policy for them.
        dropped_events: Unknown events left out by that policy, summed over all requests.
        evicted_device_pages, evicted_host_pages: Pages that lost their place in the tier.
        dropped_tokens: Tokens evicted from the device that the host did not have.
        offload_skipped: Offloads that found no host chunk.
        onload_bytes, offload_bytes: Bytes moved host to device, device to host.
        duration_s: Seconds of the whole replay, verification included.
        verified, bit_equal: Answers recomputed, and how many of those were equal in every bit of
            items, scores and user embedding.
        max_abs_diff: Largest difference of a score or user embedding value; 0 without any.
    """

    requests: int
    answered: int
    failed: dict[str, int]
    tokens: TokensByTier
    device_share: float
    host_share: float
    unknown_items: int
    unknown_events: int
    unknown_history: str
    dropped_events: int
    evicted_device_pages: int
    evicted_host_pages: int
    dropped_tokens: int
    offload_skipped: int
    onload_bytes: int
    offload_bytes: int
    latency: Latency
    duration_s: float
    verified: int
    bit_equal: int
    max_abs_diff: float


@dataclass(slots=True, eq=False)
class Account:
    """What a replay adds up, request by request. Owned by the replaying thread."""

    answered: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    tokens: TokensByTier = field(default_factory=TokensByTier)
    latencies_s: list[float] = field(default_factory=list)
    verified: int = 0
    bit_equal: int = 0
    max_abs_diff: float = 0.0

    @property
    def num_ended(self) -> int:
        """Requests that got an answer or an error."""
        return self.answered + sum(self.failed.values())

    def add(self, outcome: Outcome, latency_s: float) -> Response | None:
        """Count an answer or an error; the answer, if it is one."""
        if outcome.error is not None:
            self.failed[outcome.error.code] = self.failed.get(outcome.error.code, 0) + 1
            return None
        assert outcome.response is not None
        self.answered += 1
        self.tokens = self.tokens.plus(outcome.response.usage)
        self.latencies_s.append(latency_s)
        return outcome.response

    def compare(self, served: Response, recomputed: Response) -> None:
        """Count one verification."""
        self.verified += 1
        pairs = [
            (served.item_scores, recomputed.item_scores),
            (served.user_embedding, recomputed.user_embedding),
        ]
        is_equal = np.array_equal(_values(served.items), _values(recomputed.items))
        for left, right in pairs:
            a, b = _values(left), _values(right)
            is_equal = is_equal and a.tobytes() == b.tobytes()
            if a.shape == b.shape and a.size:
                difference = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
                self.max_abs_diff = max(self.max_abs_diff, difference)
        self.bit_equal += is_equal


def run(options: ReplayOptions, on_progress: OnProgress | None = None) -> ReplayReport:
    """Replay; raises ConfigError for the model or sizes, InvalidRequest for the log.

    A request that the model refuses is counted in `failed`, and the replay goes on.
    """
    trace = Trace.read(
        options.trace,
        window_s=options.window_s,
        max_requests=options.max_requests,
        verify=options.verify,
        seed=options.seed,
    )
    config = options.engine_config(scheduler_config(options))
    account = Account()
    started_s = time.monotonic()
    with Engine.from_model_dir(options.model, config) as engine:
        replay_trace(engine, trace, options, account, on_progress)
        engine.drain_transfers()
        stats = engine.stats()
    duration_s = time.monotonic() - started_s
    return _report(options, trace, account, stats, duration_s)


def scheduler_config(options: ReplayOptions) -> SchedulerConfig:
    """One request a step and no look-ahead when sequential; otherwise room for `concurrency`."""
    if options.sequential:
        return SchedulerConfig(max_batch_requests=1, look_ahead=False)
    limit = 2 * options.concurrency
    return SchedulerConfig(max_queue_requests=limit, max_queue_requests_per_user=limit)


def replay_trace(
    engine: Engine,
    trace: Trace,
    options: ReplayOptions,
    account: Account,
    on_progress: OnProgress | None = None,
) -> None:
    """Send all requests of the trace and add them up in `account`."""
    if options.sequential:
        _replay_sequential(engine, trace, account, on_progress)
    else:
        _replay_concurrent(engine.core, trace, options.concurrency, account, on_progress)


def _replay_sequential(
    engine: Engine, trace: Trace, account: Account, on_progress: OnProgress | None
) -> None:
    for index in range(len(trace.requests)):
        request = trace.request(index)
        started_s = time.monotonic()
        outcome = engine.run([request])[0]
        served = account.add(outcome, time.monotonic() - started_s)
        engine.drain_transfers()
        if served is not None and trace.picked[index]:
            outcome = engine.run([trace.request(index, cache=CacheMode.BYPASS)])[0]
            account.compare(served, _response(outcome))
        if on_progress is not None:
            on_progress(index + 1, len(trace.requests))


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A submitted request; `served` is the answer it verifies, if it is a verification."""

    index: int
    started_s: float
    served: Response | None = None


def _replay_concurrent(
    core: EngineCore,
    trace: Trace,
    concurrency: int,
    account: Account,
    on_progress: OnProgress | None,
) -> None:
    upcoming = iter(range(len(trace.requests)))
    in_flight: dict[str, _InFlight] = {}

    def submit(request: Request, index: int, served: Response | None = None) -> None:
        in_flight[request.request_id] = _InFlight(index, time.monotonic(), served)
        core.submit(request)

    while True:
        while len(in_flight) < concurrency:
            index = next(upcoming, None)
            if index is None:
                break
            submit(trace.request(index), index)
        if not in_flight:
            return
        for outcome in _next_outcomes(core):
            ended = in_flight.pop(outcome.request_id)
            if ended.served is not None:
                account.compare(ended.served, _response(outcome))
                continue
            served = account.add(outcome, time.monotonic() - ended.started_s)
            if served is not None and trace.picked[ended.index]:
                submit(trace.request(ended.index, cache=CacheMode.BYPASS), ended.index, served)
            if on_progress is not None:
                on_progress(account.num_ended, len(trace.requests))


def _next_outcomes(core: EngineCore) -> list[Outcome]:
    """Step until something comes out. A bug in the core raises."""
    while True:
        outcomes = [message for message in core.take_outbox() if isinstance(message, Outcome)]
        if outcomes:
            return outcomes
        try:
            has_progress = core.step()
        except EngineError as error:
            core.abort(error)
            raise
        if not has_progress:
            core.wait(_WAIT_S)


def _response(outcome: Outcome) -> Response:
    if outcome.error is not None:
        raise from_record(outcome.error)
    assert outcome.response is not None
    return outcome.response


def _report(
    options: ReplayOptions, trace: Trace, account: Account, stats: CoreStats, duration_s: float
) -> ReplayReport:
    tokens = account.tokens
    denominator = max(1, tokens.history)
    known, policy = catalogue_ids(options.model), unknown_policy(options.model)
    is_unknown = [~np.isin(user.items, known) for user in trace.users]
    unknown = np.concatenate(
        [user.items[mask] for user, mask in zip(trace.users, is_unknown, strict=True)]
    )
    up_to = [np.cumsum(mask) for mask in is_unknown]
    in_requests = sum(int(up_to[user][length - 1]) for user, length, _ in trace.requests)
    return ReplayReport(
        requests=len(trace.requests),
        answered=account.answered,
        failed=account.failed,
        tokens=tokens,
        device_share=tokens.device / denominator,
        host_share=tokens.host / denominator,
        unknown_items=len(np.unique(unknown)),
        unknown_events=len(unknown),
        unknown_history=policy,
        dropped_events=in_requests if policy == "drop" else 0,
        evicted_device_pages=_total(stats, "evicted_pages_total", "device"),
        evicted_host_pages=_total(stats, "evicted_pages_total", "host"),
        dropped_tokens=_total(stats, "dropped_tokens_total"),
        offload_skipped=_total(stats, "offload_skipped_total"),
        onload_bytes=_total(stats, "copy_bytes_total", "onload"),
        offload_bytes=_total(stats, "copy_bytes_total", "offload"),
        latency=Latency.of(account.latencies_s),
        duration_s=duration_s,
        verified=account.verified,
        bit_equal=account.bit_equal,
        max_abs_diff=account.max_abs_diff,
    )


def _total(stats: CoreStats, name: str, label: str | None = None) -> int:
    """Sum of a counter's samples, of those with the label if one is given."""
    return int(
        sum(
            sample.value
            for sample in stats.samples
            if sample.name == name and (label is None or label in sample.labels)
        )
    )


def _values(values: np.ndarray | None) -> np.ndarray:
    return np.empty(0) if values is None else values
