"""Traces: one span per HTTP request, with the request's own times as children.

Only OpenTelemetry's API is used, and only if it is installed (`pip install 'mtserve[otel]'`). Where
spans go is the business of the SDK of whoever runs the server, for example
`opentelemetry-instrument mtserve serve`; without an SDK the spans are empty and cost nothing.

    POST /v1/rank                       server span; its parent is the caller's `traceparent`
      queue                             admitted until first planned
      onload                            steps waited for copies to the device
      run                               steps computed
      respond                           the answer was written

The engine reports durations, not moments: a child starts where the one before it ends.
"""

from __future__ import annotations

import importlib.util
import re
import time
from typing import TYPE_CHECKING

from engine.entrypoints import asgi
from engine.entrypoints.routes.routing import Exchange

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_NO_TRACE = "0" * 32


def has_opentelemetry() -> bool:
    """Whether OpenTelemetry's API is installed."""
    try:
        return importlib.util.find_spec("opentelemetry.trace") is not None
    except ModuleNotFoundError:
        return False


class RequestTrace:
    """The trace of one HTTP request; without an SDK it only knows the caller's trace id."""

    def __init__(self, trace_id: str | None, span: Span | None, tracer: Tracer | None) -> None:
        self.trace_id = trace_id
        self._span = span
        self._tracer = tracer

    def end(self, exchange: Exchange, route: str, status: int) -> None:
        """The answer has been sent."""
        span = self._span
        if span is None or self._tracer is None:
            return
        ended_ns = time.time_ns()
        method = exchange.scope["method"]
        span.update_name(f"{method} {route}")
        span.set_attributes(
            {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                "mtserve.request_id": exchange.request_id,
                "mtserve.outcome": exchange.outcome,
            }
        )
        if status >= 500:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, exchange.outcome))
        self._add_children(self._tracer, span, exchange, ended_ns)
        span.end(ended_ns)

    def _add_children(self, tracer: Tracer, span: Span, exchange: Exchange, ended_ns: int) -> None:
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(span)
        offset_ns = ended_ns - time.monotonic_ns()
        for answered in exchange.answers:
            usage = answered.usage
            start_ns = int(answered.submitted_s * 1e9) + offset_ns
            for name, duration_us in (
                ("queue", usage.queue_us),
                ("onload", usage.onload_wait_us),
                ("run", usage.run_us - usage.onload_wait_us),
            ):
                end_ns = start_ns + duration_us * 1000
                child = tracer.start_span(name, context=context, start_time=start_ns)
                if name == "run":
                    child.set_attributes(
                        {
                            "mtserve.device_tokens": usage.device_tokens,
                            "mtserve.host_tokens": usage.host_tokens,
                            "mtserve.computed_tokens": usage.computed_tokens,
                        }
                    )
                child.end(end_ns)
                start_ns = end_ns
        if exchange.answers:
            answered_ns = int(max(each.answered_s for each in exchange.answers) * 1e9) + offset_ns
            tracer.start_span("respond", context=context, start_time=answered_ns).end(ended_ns)


class Tracing:
    """Starts the trace of each request."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """The global tracer provider is used when none is given."""
        self._tracer: Tracer | None = None
        if has_opentelemetry():
            from opentelemetry import trace

            self._tracer = trace.get_tracer("mtserve", tracer_provider=provider)

    def start(self, exchange: Exchange) -> RequestTrace:
        """The trace that the request's `traceparent` belongs to, or a new one."""
        parent = asgi.header(exchange.scope, b"traceparent")
        found = None if parent is None else _TRACEPARENT.fullmatch(parent)
        trace_id = None if found is None or found[1] == _NO_TRACE else found[1]
        if self._tracer is None:
            return RequestTrace(trace_id, None, None)
        return self._start_span(self._tracer, exchange, parent if found else None, trace_id)

    @staticmethod
    def _start_span(
        tracer: Tracer, exchange: Exchange, parent: str | None, trace_id: str | None
    ) -> RequestTrace:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {} if parent is None else {"traceparent": parent}
        state = asgi.header(exchange.scope, b"tracestate")
        if state is not None:
            carrier["tracestate"] = state
        span = tracer.start_span(
            str(exchange.scope["method"]),
            context=TraceContextTextMapPropagator().extract(carrier, Context()),
            kind=SpanKind.SERVER,
            start_time=time.time_ns() - time.monotonic_ns() + int(exchange.arrival_s * 1e9),
        )
        if not span.is_recording():
            return RequestTrace(trace_id, None, None)
        return RequestTrace(f"{span.get_span_context().trace_id:032x}", span, tracer)
