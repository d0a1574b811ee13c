"""Traces of requests, collected by OpenTelemetry's SDK over the application and a fake core."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import AsyncIterator

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.entrypoints.app import App
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.tracing import Tracing
from tests.integration.server_process import FAKE_CORE, ROOT

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
RANK = {"user_id": "secret-user", "history": [1, 2], "candidates": [3]}


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    running = AsyncEngine(None, EngineConfig(), core_module=FAKE_CORE, drain_timeout_s=0)
    await running.start()
    yield running
    await running.stop()


def client_of(engine: AsyncEngine, tracing: Tracing) -> httpx.AsyncClient:
    app = App(engine, ServerConfig(), tracing)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def client(
    engine: AsyncEngine, exporter: InMemorySpanExporter
) -> AsyncIterator[httpx.AsyncClient]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with client_of(engine, Tracing(provider)) as connected:
        yield connected


def span_named(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = (span for span in exporter.get_finished_spans() if span.name == name)
    return found


async def test_a_request_is_a_span_of_its_callers_trace(
    client: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    answer = await client.post("/v1/rank", json=RANK, headers={"traceparent": TRACEPARENT})
    assert answer.status_code == 200
    assert "traceparent" not in answer.headers
    server = span_named(exporter, "POST /v1/rank")
    assert server.kind is SpanKind.SERVER
    assert server.context is not None and server.parent is not None
    assert f"{server.context.trace_id:032x}" == TRACE_ID
    assert f"{server.parent.span_id:016x}" == PARENT_ID
    assert server.attributes is not None
    assert dict(server.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/rank",
        "http.response.status_code": 200,
        "mtserve.request_id": answer.headers["x-request-id"],
        "mtserve.outcome": "ok",
    }


async def test_its_children_are_the_times_of_the_request(
    client: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    await client.post("/v1/rank", json=RANK)
    server = span_named(exporter, "POST /v1/rank")
    queue, onload, run, respond = (
        span_named(exporter, name) for name in ("queue", "onload", "run", "respond")
    )
    assert server.context is not None
    for child in (queue, onload, run, respond):
        assert child.parent is not None
        assert child.parent.span_id == server.context.span_id
    # The fake core says 3 ms in the queue, 5 ms in steps, 1 ms of them waiting for copies.
    assert [(span.end_time or 0) - (span.start_time or 0) for span in (queue, onload, run)] == [
        3_000_000,
        1_000_000,
        4_000_000,
    ]
    assert queue.end_time == onload.start_time
    assert onload.end_time == run.start_time
    assert (server.start_time or 0) <= (queue.start_time or 0)
    assert respond.end_time == server.end_time
    assert run.attributes is not None
    assert run.attributes["mtserve.computed_tokens"] == 2
    for span in exporter.get_finished_spans():
        assert "secret-user" not in span.to_json()


def test_without_opentelemetry_the_server_has_no_spans_and_still_starts() -> None:
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from engine.entrypoints import app, tracing\n"
        "assert not tracing.has_opentelemetry()\n"
        "tracing.Tracing()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


async def test_a_refused_request_has_no_children(
    client: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    await client.post("/v1/rank", content=b"{")
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["mtserve.outcome"] == "invalid_request"
    assert span.status.status_code is StatusCode.UNSET
    exporter.clear()
    await client.get("/v1/users-of-nobody/secret-user")
    (span,) = exporter.get_finished_spans()
    assert span.name == "GET -"


@pytest.mark.parametrize(
    ("sent", "trace_id"),
    [
        (TRACEPARENT, TRACE_ID),
        (TRACEPARENT.upper(), None),
        ("00-" + "0" * 32 + f"-{PARENT_ID}-01", None),
        (f"{TRACEPARENT}\tforged", None),
        ("nonsense", None),
    ],
)
async def test_the_trace_id_is_logged_with_or_without_an_sdk(
    engine: AsyncEngine, caplog: pytest.LogCaptureFixture, sent: str, trace_id: str | None
) -> None:
    caplog.set_level(logging.INFO, "engine.access")
    async with client_of(engine, Tracing()) as client:
        await client.post("/v1/rank", json=RANK, headers={"traceparent": sent})
    (line,) = (record.getMessage() for record in caplog.records)
    assert (f"trace_id={trace_id}" in line) == (trace_id is not None)
    assert ("trace_id" in line) == (trace_id is not None)
    assert "forged" not in line
