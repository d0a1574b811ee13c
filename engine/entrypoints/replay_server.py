"""`mtserve replay --server URL`: a log replayed as requests against a running server.

Closed loop: `concurrency` requests are in flight, and the next one is sent when an answer came.
Open loop (`rate`): requests are sent at random times of that rate whatever the answers do, and
latency counts from the moment a request was due, so that a server that falls behind is not
flattered by a client that waits for it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from engine.config import require
from engine.entrypoints.log_requests import Latency, OnProgress, TokensByTier, Trace
from engine.entrypoints.replay_client import OK, Answer, ReplayClient, Reply
from engine.errors import ConfigError
from engine.types import CacheMode

Ending: TypeAlias = Literal["log", "duration", "interrupted"]


class ServerReplayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replay a log as requests against a running server.

    One retrieve request for each window of a user's activity, in the log's order. The report says
    how many requests were answered, how long it took, how the others ended, and where history
    tokens were found. Ctrl-C ends the replay and prints what there is.

    Attributes:
        server: Address of the server, http://HOST:PORT.
        trace: Interaction log: csv, tsv or `::`, with user, item, rating or action, time.
        window_s: Seconds of a user's activity that make one request.
        model: Name that the server's model must have; empty for any.
        concurrency: Connections; without `rate` this many requests are in flight.
        rate: Requests a second, sent at random times whatever the answers do; 0 sends the next
            one when an answer came.
        duration_s: Send no more after this many seconds; 0 for no limit.
        max_requests: Replay only the first so many requests; 0 for all.
        deadline_ms: Deadline that every request carries; 0 for none.
        timeout_s: A try that takes longer is given up and counted as `timeout`.
        retries: Further tries of a request that was answered 429, each after its Retry-After.
        verify: Share of answers, 0 to 1, that the server is asked to recompute (`cache: bypass`),
            to be compared.
        seed: Of arrival times and of the choice of answers to verify.
        api_key_file: File whose first line is the API key to send.
    """

    server: str
    trace: str
    window_s: int = 60
    model: str = ""
    concurrency: int = 16
    rate: float = 0.0
    duration_s: float = 0.0
    max_requests: int = 0
    deadline_ms: float = 0.0
    timeout_s: float = 60.0
    retries: int = 0
    verify: float = 0.0
    seed: int = 0
    api_key_file: str | None = None

    def __post_init__(self) -> None:
        require(
            self.server.startswith(("http://", "https://")),
            f"server is {self.server!r}: give http://HOST:PORT",
        )
        for name in ("window_s", "rate", "duration_s", "max_requests", "deadline_ms", "retries"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}: give 0 or more")
        require(self.concurrency >= 1, f"concurrency is {self.concurrency}: give at least 1")
        require(self.timeout_s > 0, f"timeout_s is {self.timeout_s}: give more than 0")
        require(0 <= self.verify <= 1, f"verify is {self.verify}: give a share from 0 to 1")
        require(self.seed >= 0, f"seed is {self.seed}: give 0 or more")


class ServerReplayReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The account of a replay against a server.

    Attributes:
        ended: What ended it: the log's last request, `duration_s`, or Ctrl-C.
        requests: Requests sent, retries not counted; `answered` of them got an answer, `failed`
            counts the others by code: the server's, or `timeout`, `connection_error`,
            `bad_answer`, `http_NNN`. `unanswered` were in flight at Ctrl-C.
        retries: Tries after a 429; `retry_wait_s` is what was waited for them, over all requests.
        requests_per_s: Answered requests a second.
        latency: From the moment a request was due to its answer, retries and waiting for a
            connection included, verification left out.
        max_send_lag_ms: Open loop: how late the client itself was at most. Where this is large,
            the client is the bottleneck.
        tokens: History tokens by tier over answered requests, with the denominator.
        device_share, host_share: Of the denominator.
        verified, equal: Answers recomputed by the server, and how many had equal items, scores
            and user embedding. Pairs that different weights versions answered are not counted.
    """

    server: str
    model: str
    ended: Ending
    requests: int
    answered: int
    failed: dict[str, int]
    unanswered: int
    retries: int
    retry_wait_s: float
    requests_per_s: float
    latency: Latency
    max_send_lag_ms: float
    tokens: TokensByTier
    device_share: float
    host_share: float
    duration_s: float
    verified: int
    equal: int


def run(options: ServerReplayOptions, on_progress: OnProgress | None = None) -> ServerReplayReport:
    """Replay; raises ConfigError for the server or the model, InvalidRequest for the log."""
    trace = Trace.read(
        options.trace,
        window_s=options.window_s,
        max_requests=options.max_requests,
        verify=options.verify,
        seed=options.seed,
    )
    return asyncio.run(_run(options, trace, on_progress))


async def _run(
    options: ServerReplayOptions, trace: Trace, on_progress: OnProgress | None
) -> ServerReplayReport:
    client = ReplayClient(
        options.server,
        api_key=_api_key(options.api_key_file),
        timeout_s=options.timeout_s,
        max_connections=options.concurrency,
    )
    try:
        metadata = await client.check_model(options.model)
        replay = ServerReplay(options, trace, client, on_progress)
        ended = await _until_interrupted(replay)
        return replay.report(metadata.name, ended)
    finally:
        await client.close()


def _api_key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        lines = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API key file {path} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"the API key file {path} is empty: its first line is the key")
    return lines[0]


async def _until_interrupted(replay: ServerReplay) -> Ending:
    """Replay to the end or to Ctrl-C, which drops what is in flight."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    work = asyncio.ensure_future(replay.send_all())
    watch = asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return "interrupted"
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        work.cancel()
        watch.cancel()
        await asyncio.wait((work, watch))


@dataclass(slots=True, eq=False)
class _Account:
    """What a replay adds up. Owned by the event loop."""

    sent: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    tokens: TokensByTier = field(default_factory=TokensByTier)
    retries: int = 0
    retry_wait_s: float = 0.0
    max_send_lag_s: float = 0.0
    verified: int = 0
    equal: int = 0

    @property
    def num_ended(self) -> int:
        """Requests that got an answer or failed."""
        return len(self.latencies_s) + self.failed.total()

    def compare(self, served: Answer, recomputed: Answer) -> None:
        """Count one verification; see the report."""
        if served.usage.weights_version != recomputed.usage.weights_version:
            return
        self.verified += 1
        self.equal += (served.items, served.item_scores, served.user_embedding) == (
            recomputed.items,
            recomputed.item_scores,
            recomputed.user_embedding,
        )


class ServerReplay:
    """One replay: sends the requests of a trace and adds up the replies."""

    def __init__(
        self,
        options: ServerReplayOptions,
        trace: Trace,
        client: ReplayClient,
        on_progress: OnProgress | None,
    ) -> None:
        self._options = options
        self._trace = trace
        self._client = client
        self._on_progress = on_progress
        self._account = _Account()
        self._started_s = time.monotonic()

    async def send_all(self) -> Ending:
        """Send requests until the log or the duration ends, and wait for their replies."""
        self._started_s = time.monotonic()
        upcoming = iter(range(len(self._trace.requests)))
        if self._options.rate:
            await self._send_at_rate(upcoming)
        else:
            workers = min(self._options.concurrency, len(self._trace.requests))
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(self._send_one_by_one(upcoming))
        return "log" if self._account.sent == len(self._trace.requests) else "duration"

    async def _send_one_by_one(self, upcoming: Iterator[int]) -> None:
        while not self._is_over(time.monotonic()) and (index := next(upcoming, None)) is not None:
            await self._ask(index, time.monotonic())

    async def _send_at_rate(self, upcoming: Iterator[int]) -> None:
        gaps = np.random.default_rng(self._options.seed)
        due_s = self._started_s
        async with asyncio.TaskGroup() as group:
            for index in upcoming:
                due_s += gaps.exponential(1.0 / self._options.rate)
                if self._is_over(due_s):
                    return
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                lag_s = time.monotonic() - due_s
                self._account.max_send_lag_s = max(self._account.max_send_lag_s, lag_s)
                group.create_task(self._ask(index, due_s))

    def _is_over(self, now_s: float) -> bool:
        duration_s = self._options.duration_s
        return bool(duration_s) and now_s - self._started_s >= duration_s

    async def _ask(self, index: int, due_s: float) -> None:
        account = self._account
        account.sent += 1
        reply = await self._try(index)
        for _ in range(self._options.retries):
            if reply.retry_after_s is None:
                break
            account.retries += 1
            account.retry_wait_s += reply.retry_after_s
            await asyncio.sleep(reply.retry_after_s)
            reply = await self._try(index)
        if reply.answer is None:
            account.failed[reply.code] += 1
        else:
            assert reply.code == OK
            account.latencies_s.append(time.monotonic() - due_s)
            account.tokens = account.tokens.plus(reply.answer.usage)
        if self._on_progress is not None:
            self._on_progress(account.num_ended, len(self._trace.requests))
        if reply.answer is not None and self._trace.picked[index]:
            recomputed = await self._try(index, CacheMode.BYPASS)
            if recomputed.answer is not None:
                account.compare(reply.answer, recomputed.answer)

    async def _try(self, index: int, cache: CacheMode = CacheMode.USE) -> Reply:
        request = self._trace.request(index, cache=cache)
        return await self._client.retrieve(request, self._options.deadline_ms or None)

    def report(self, model: str, ended: Ending) -> ServerReplayReport:
        """The account so far."""
        account = self._account
        duration_s = time.monotonic() - self._started_s
        answered = len(account.latencies_s)
        denominator = max(1, account.tokens.history)
        return ServerReplayReport(
            server=self._options.server,
            model=model,
            ended=ended,
            requests=account.sent,
            answered=answered,
            failed=dict(account.failed),
            unanswered=account.sent - account.num_ended,
            retries=account.retries,
            retry_wait_s=account.retry_wait_s,
            requests_per_s=answered / duration_s,
            latency=Latency.of(account.latencies_s),
            max_send_lag_ms=1e3 * account.max_send_lag_s,
            tokens=account.tokens,
            device_share=account.tokens.device / denominator,
            host_share=account.tokens.host / denominator,
            duration_s=duration_s,
            verified=account.verified,
            equal=account.equal,
        )
