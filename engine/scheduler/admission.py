"""Admission: a request becomes a scheduled request, or an error that says why not.

Limits that no waiting can lift are checked here, once: what is admitted can run.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.block_manager.fingerprint import HashChain
from engine.block_manager.manager import BlockManager
from engine.block_manager.user_state import UserKey
from engine.config import EngineConfig
from engine.errors import DeadlineExceeded, HistoryNeeded, InvalidRequest, TooLarge
from engine.metrics import Metrics
from engine.models.base import PreparedRequest
from engine.scheduler.delta import check_delta, delta_chain
from engine.scheduler.queue import RequestQueue
from engine.scheduler.request import Line, ScheduledRequest
from engine.scheduler.version import ServedVersion
from engine.types import CacheMode, Request, Reuse, Task


class Admission:
    """Owned by the core thread."""

    def __init__(
        self,
        config: EngineConfig,
        manager: BlockManager,
        queue: RequestQueue,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._manager = manager
        self._queue = queue
        self._metrics = metrics
        self._clock = clock
        self._num_admitted = 0

    def admit(
        self, request: Request, version: ServedVersion, retry_after_s: float
    ) -> ScheduledRequest:
        """The request, checked and prepared for that version; it is not yet in the queue.

        Raises RequestError, Overloaded (with `retry_after_s`) or DeadlineExceeded."""
        now_s = self._clock()
        if request.deadline_s is not None and now_s >= request.deadline_s:
            self._metrics.add("deadline_drops_total", 1, "admission")
            raise DeadlineExceeded(
                f"the deadline passed {(now_s - request.deadline_s) * 1e3:.0f} ms ago"
            )
        self._check_room(request, version, 0, retry_after_s)
        prepared, scratch_reason = self._prepare(request, version)
        if prepared is not None:
            num_tokens = prepared.length + prepared.suffix_length
            self._check_room(request, version, num_tokens, retry_after_s)
            self._check_deadline(request, prepared, version, now_s)
        self._num_admitted += 1
        is_cached = prepared is not None and scratch_reason is None
        entry = ScheduledRequest(
            request=request,
            version=version,
            prepared=prepared,
            chain=None,
            key=UserKey(request.namespace, request.user_id, version.name),
            sequence=self._num_admitted,
            admitted_s=now_s,
            order_s=now_s + request.priority * self._config.scheduler.priority_ageing_s,
            scratch_reason=scratch_reason,
            needs_refresh=is_cached and request.cache is CacheMode.REFRESH,
        )
        if prepared is not None and is_cached:
            entry.chain = self._chain(request, prepared)
            if self._config.cache.tiers == "off":
                entry.make_transient()
        return entry

    def _chain(self, request: Request, prepared: PreparedRequest) -> HashChain:
        page_size = self._config.cache.page_size
        if request.is_delta:
            return delta_chain(request, prepared, page_size)
        return HashChain.from_records(prepared.records, prepared.seed, page_size)

    def _prepare(
        self, request: Request, version: ServedVersion
    ) -> tuple[PreparedRequest | None, str | None]:
        """The prepared request and, if it must run outside the cache, why."""
        check_delta(request, version.spec, version.reuse, self._config.cache.tiers)
        if request.history is None:
            if request.task is not Task.PREFETCH:
                raise InvalidRequest(f"history is missing: {request.task.value} needs one")
            return None, None
        prepared = version.model.prepare(request)
        reason = None
        if version.reuse is Reuse.REQUEST:
            reason = "query_time"
        elif request.cache is CacheMode.BYPASS:
            reason = "bypass"
        elif not self._manager.fits(prepared.length, version.name):
            reason = "never_fits"
        self._check_outside(request, prepared, version, reason)
        return prepared, reason

    def check_outside(self, entry: ScheduledRequest) -> None:
        """Whether a request that must leave the cache may run outside it. Raises RequestError."""
        assert entry.prepared is not None
        self._check_outside(entry.request, entry.prepared, entry.version, entry.scratch_reason)

    def _check_outside(
        self,
        request: Request,
        prepared: PreparedRequest,
        version: ServedVersion,
        reason: str | None,
    ) -> None:
        if request.task is Task.PREFETCH and reason is not None:
            raise InvalidRequest(
                f"nothing of this prefetch can be kept ({reason}; {prepared.length} tokens, "
                f"device_pages={self._config.cache.device_pages}): leave it out"
            )
        if request.is_delta and reason is not None:
            raise HistoryNeeded(
                f"the history of {prepared.length} tokens does not fit in the device pool of "
                f"device_pages={self._config.cache.device_pages}, so nothing of it is kept: send "
                "it whole"
            )
        self._check_uncut(prepared, version, reason)

    def _check_uncut(
        self, prepared: PreparedRequest, version: ServedVersion, scratch_reason: str | None
    ) -> None:
        if scratch_reason is not None:
            rows = prepared.length + prepared.suffix_length
        elif version.spec.has_bidirectional_context:
            rows = prepared.length
        else:
            return
        limit = self._config.scheduler.max_uncut_tokens
        if rows > limit:
            why = scratch_reason or "bidirectional context"
            raise TooLarge(
                f"{rows} tokens must run in one piece ({why}), the limit is max_uncut_tokens="
                f"{limit}: shorten the history, raise the limit, or raise device_pages if the "
                "history does not fit in the device pool",
                limit=limit,
                value=rows,
            )

    def _check_room(
        self, request: Request, version: ServedVersion, num_tokens: int, retry_after_s: float
    ) -> None:
        line = Line(request.namespace, request.user_id, version.name)
        refusal = self._queue.refuse_reason(line, num_tokens, retry_after_s)
        if refusal is not None:
            raise refusal

    def _check_deadline(
        self, request: Request, prepared: PreparedRequest, version: ServedVersion, now_s: float
    ) -> None:
        """Refuse a deadline that even an all-hit run alone on the device would miss.

        An idle engine tries whatever comes: if it only refused, one slow step would set what is
        expected for ever."""
        if request.deadline_s is None or not self._queue.has_unfinished:
            return
        rows = prepared.suffix_length
        least_s = version.cost.least_s(rows, rows * prepared.length)
        if now_s + least_s > request.deadline_s:
            self._metrics.add("deadline_drops_total", 1, "admission")
            raise DeadlineExceeded(
                f"{(request.deadline_s - now_s) * 1e3:.1f} ms are left and the request alone "
                f"takes {least_s * 1e3:.1f} ms or more: give it more time"
            )
