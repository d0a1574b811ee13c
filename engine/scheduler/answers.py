"""Answers: what clients get once a request's last piece has run."""

from __future__ import annotations

import numpy as np

from engine.metrics import Metrics
from engine.scheduler.delta import NO_BASE, next_base, serves_deltas
from engine.scheduler.request import ScheduledRequest
from engine.types import Response, Reuse, Usage


class Answers:
    """Builds responses and counts them. Owned by the core thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def response(self, entry: ScheduledRequest, resident_tokens: int, now_s: float) -> Response:
        """The response; `resident_tokens` stand for the history of a prefetch without one."""
        usage = self._usage(entry, resident_tokens)
        self._count(entry, usage, now_s)
        request, answer = entry.request, entry.answer
        scores = np.concatenate(answer.scores) if answer.scores else None
        items, item_scores = answer.items, answer.item_scores
        if scores is not None and request.top_k is not None:
            assert entry.prepared is not None
            candidates = entry.prepared.candidate_items
            best = np.lexsort((candidates, -scores[:, 0]))[: request.top_k]
            items, item_scores = candidates[best], scores[best, 0]
        return Response(
            request_id=request.request_id,
            usage=usage,
            scores=scores,
            items=items,
            item_scores=item_scores,
            user_embedding=answer.user_embedding,
        )

    def _usage(self, entry: ScheduledRequest, resident_tokens: int) -> Usage:
        prepared, chain = entry.prepared, entry.chain
        if prepared is None:
            return Usage(
                device_tokens=resident_tokens,
                history_length=resident_tokens,
                weights_version=entry.version.name,
                reuse=entry.version.reuse,
            )
        device_tokens, host_tokens = entry.device_tokens or 0, entry.host_tokens
        base, version = NO_BASE, entry.version
        can_go_on = serves_deltas(version.spec, version.reuse) and not entry.is_transient
        if chain is not None and can_go_on:
            base = next_base(prepared, chain, version.spec)
        is_bypass = entry.is_transient or entry.scratch_reason not in (None, "query_time")
        first_planned_s = entry.first_planned_s or entry.admitted_s
        return Usage(
            device_tokens=device_tokens,
            host_tokens=host_tokens,
            computed_tokens=prepared.length - device_tokens - host_tokens,
            history_length=prepared.length,
            suffix_tokens=prepared.suffix_length,
            base_length=base.length,
            fingerprint=base.fingerprint,
            weights_version=version.name,
            reuse=Reuse.BYPASS if is_bypass else version.reuse,
            queue_us=int((first_planned_s - entry.admitted_s) * 1e6),
            onload_wait_us=int(entry.answer.onload_wait_s * 1e6),
            run_us=int(entry.answer.run_s * 1e6),
        )

    def _count(self, entry: ScheduledRequest, usage: Usage, now_s: float) -> None:
        metrics = self._metrics
        metrics.add("requests_total", 1, entry.request.task.value, "ok")
        metrics.observe("request_seconds", now_s - entry.admitted_s)
        metrics.observe("queue_seconds", usage.queue_us * 1e-6)
        if entry.scratch_reason is not None:
            metrics.add("scratch_runs_total", 1, entry.scratch_reason)
        if entry.prepared is None:
            return
        metrics.add("history_tokens_total", usage.history_length)
        metrics.add("hit_tokens_total", usage.device_tokens, "device")
        metrics.add("hit_tokens_total", usage.host_tokens, "host")
        metrics.add("computed_tokens_total", usage.computed_tokens)
        metrics.add("suffix_tokens_total", usage.suffix_tokens)
