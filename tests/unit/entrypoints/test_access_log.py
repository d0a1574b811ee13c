"""One line per request, in both forms, with nothing that a client could forge."""

from __future__ import annotations

import json
import logging
import time

import pytest

from engine.entrypoints.access_log import AccessLog
from engine.entrypoints.routes.routing import Answered, Exchange
from engine.types import Usage

FORGED = 'u1"\n2026 INFO engine.access: forged GET / 200'


async def receive():
    raise AssertionError("no body is read here")


@pytest.fixture
def exchange():
    exchange = Exchange(
        scope={"method": "POST"},
        receive=receive,
        request_id="id-1",
        arrival_s=time.monotonic(),
    )
    exchange.user_ids += ["u0", FORGED]
    for tokens, queue_us in ((1, 40), (10, 30)):
        usage = Usage(
            device_tokens=tokens, host_tokens=2 * tokens, computed_tokens=3 * tokens,
            queue_us=queue_us, onload_wait_us=5, run_us=7,
        )  # fmt: skip
        exchange.answers.append(Answered(usage, 0.0, 0.0))
    return exchange


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "engine.access")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_text_line_names_no_user(exchange, lines):
    AccessLog("text", with_users=False).write(exchange, "/v1/users/{user_id}", 200, "ab" * 16)
    (line,) = lines()
    head, _, rest = line.partition("ms ")
    assert head.startswith("id-1 POST /v1/users/{user_id} 200 ")
    assert rest == (
        "ok requests=2 device_tokens=11 host_tokens=22 computed_tokens=33 queue_us=40 "
        "onload_wait_us=5 run_us=7 trace_id=" + "ab" * 16
    )


def test_a_json_line_has_the_same(exchange, lines):
    AccessLog("json", with_users=False).write(exchange, "/v1/rank", 200, None)
    (line,) = lines()
    record = json.loads(line)
    assert abs(record.pop("time") - time.time()) < 60
    assert record.pop("ms") >= 0
    assert record == {
        "request_id": "id-1", "method": "POST", "route": "/v1/rank", "status": 200,
        "outcome": "ok", "requests": 2, "device_tokens": 11, "host_tokens": 22,
        "computed_tokens": 33, "queue_us": 40, "onload_wait_us": 5, "run_us": 7,
    }  # fmt: skip


@pytest.mark.parametrize("form", ["text", "json"])
def test_users_are_named_when_asked_for_and_quoted(exchange, lines, form):
    AccessLog(form, with_users=True).write(exchange, "/v1/rank", 200, None)
    (line,) = lines()
    assert "\n" not in line
    assert json.dumps(["u0", FORGED], separators=(",", ":")) in line


def test_a_refused_request_has_its_code_and_no_tokens(lines):
    refused = Exchange(
        scope={"method": "GET"}, receive=receive, request_id="id-2",
        arrival_s=time.monotonic(), outcome="unauthorized",
    )  # fmt: skip
    AccessLog("text", with_users=True).write(refused, "-", 401, None)
    (line,) = lines()
    assert line.startswith("id-2 GET - 401 ")
    assert line.endswith("ms unauthorized")


def test_off_writes_nothing(exchange, lines):
    AccessLog("off", with_users=True).write(exchange, "/v1/rank", 200, None)
    assert lines() == []
