"""`mtserve replay` on a small log and a small model: the account, verification, unknown items."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from small_logs import save_model, write_log

from engine.entrypoints import replay
from engine.entrypoints.logs import by_user, read_log, trace_requests
from engine.errors import ConfigError, InvalidRequest
from engine.testing.oracle import Oracle
from engine.types import Response, Usage

PAGE_SIZE, CHUNK_SIZE = 4, 8
# One layer, 2 heads of 8 + 8 float32 values: 128 bytes a token.
BYTES_PER_TOKEN = 128
DEVICE_PAGES, HOST_CHUNKS = 24, 30


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.dat")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def options(log_path: Path, model: str) -> replay.ReplayOptions:
    return replay.ReplayOptions(
        model=model,
        trace=str(log_path),
        device_pages=DEVICE_PAGES,
        page_size=PAGE_SIZE,
        chunk_size=CHUNK_SIZE,
        host_bytes=HOST_CHUNKS * CHUNK_SIZE * BYTES_PER_TOKEN,
        threads=1,
    )


def _oracle(log_path: Path, *, num_chunks: int) -> Oracle:
    log = read_log(log_path)
    users = by_user(log)
    oracle = Oracle(
        num_pages=DEVICE_PAGES,
        page_size=PAGE_SIZE,
        num_chunks=num_chunks,
        pages_per_chunk=CHUNK_SIZE // PAGE_SIZE,
    )
    for user, length, _ in trace_requests(log, 60):
        oracle.request(user, users[user].items[:length].tolist())
    return oracle


@pytest.mark.parametrize("cache", ["device", "tiered"])
def test_sequential_account_equals_the_oracle(
    cache: str, options: replay.ReplayOptions, log_path: Path
) -> None:
    options = msgspec.structs.replace(options, cache=cache, sequential=True)

    report = replay.run(options)

    totals = _oracle(log_path, num_chunks=HOST_CHUNKS if cache == "tiered" else 0).totals
    page_bytes = PAGE_SIZE * BYTES_PER_TOKEN
    assert (report.requests, report.answered, report.failed) == (totals.requests,) * 2 + ({},)
    assert msgspec.structs.astuple(report.tokens) == (
        totals.history_tokens,
        totals.device_tokens,
        totals.host_tokens,
        totals.computed_tokens,
    )
    assert report.evicted_device_pages == totals.evicted_pages > 0
    assert report.dropped_tokens == totals.dropped_tokens
    assert report.evicted_host_pages == totals.evicted_host_pages
    assert report.offload_skipped == totals.offloads_skipped
    assert report.onload_bytes == totals.onloaded_pages * page_bytes
    assert report.offload_bytes == totals.offloaded_pages * page_bytes
    assert report.device_share == totals.device_tokens / totals.history_tokens
    assert (report.host_share > 0) == (cache == "tiered")


@pytest.mark.parametrize("sequential", [True, False])
def test_every_verified_answer_is_equal_in_every_bit(
    sequential: bool, options: replay.ReplayOptions
) -> None:
    options = msgspec.structs.replace(options, sequential=sequential, verify=1.0, concurrency=8)

    report = replay.run(options)

    assert report.verified == report.answered == report.requests
    assert report.bit_equal == report.verified
    assert report.max_abs_diff == 0.0
    assert report.tokens.host > 0


def test_a_share_of_the_answers_is_verified(options: replay.ReplayOptions) -> None:
    report = replay.run(msgspec.structs.replace(options, verify=0.25))

    assert 0 < report.verified < report.requests / 2


def test_verification_leaves_the_sequential_account_as_it_is(
    options: replay.ReplayOptions,
) -> None:
    options = msgspec.structs.replace(options, sequential=True, max_requests=120)

    plain = replay.run(options)
    verified = replay.run(msgspec.structs.replace(options, verify=0.5))

    assert verified.verified > 0
    assert plain.verified == 0
    assert verified.tokens == plain.tokens
    assert verified.offload_bytes == plain.offload_bytes


def test_cache_off_computes_everything(options: replay.ReplayOptions) -> None:
    report = replay.run(msgspec.structs.replace(options, cache="off", max_requests=60))

    assert report.tokens.computed == report.tokens.history > 0
    assert report.onload_bytes == report.offload_bytes == 0


def test_unknown_items_are_dropped_and_counted(
    options: replay.ReplayOptions, log_path: Path, tmp_path: Path
) -> None:
    model = save_model(tmp_path, num_items=20)

    report = replay.run(msgspec.structs.replace(options, model=model, verify=1.0))

    log = read_log(log_path)
    users = by_user(log)
    histories = [users[user].items[:length] for user, length, _ in trace_requests(log, 60)]
    known_tokens = sum(int((items < 20 * 7).sum()) for items in histories)
    assert report.unknown_items == 10
    assert report.unknown_events == (log.items >= 20 * 7).sum()
    assert report.unknown_history == "drop"
    assert report.dropped_events == sum(map(len, histories)) - known_tokens
    assert report.tokens.history == known_tokens
    # A history of unknown items alone leaves nothing to retrieve from.
    num_empty = sum(bool((items >= 20 * 7).all()) for items in histories)
    assert report.failed == {"invalid_request": num_empty}
    assert report.bit_equal == report.verified == report.answered == report.requests - num_empty


def test_requests_the_model_refuses_are_counted_and_the_replay_goes_on(
    options: replay.ReplayOptions, log_path: Path, tmp_path: Path
) -> None:
    model = save_model(tmp_path, num_items=29, unknown_history="error")

    report = replay.run(msgspec.structs.replace(options, model=model, sequential=True))

    log = read_log(log_path)
    users = by_user(log)
    num_refused = sum(
        bool((users[user].items[:length] == 29 * 7 + 3).any())
        for user, length, _ in trace_requests(log, 60)
    )
    assert report.failed == {"invalid_request": num_refused}
    assert report.answered == report.requests - num_refused > 0
    assert report.dropped_events == 0


def test_requests_in_flight_all_get_an_answer_with_progress(options: replay.ReplayOptions) -> None:
    progress: list[tuple[int, int]] = []

    report = replay.run(options, lambda done, total: progress.append((done, total)))

    assert report.answered == report.requests
    assert progress[-1] == (report.requests, report.requests)
    assert 0 < report.latency.p50_ms <= report.latency.p99_ms <= report.latency.max_ms


def test_a_difference_is_counted_and_measured() -> None:
    def answer(score: float, item: int = 1) -> Response:
        return Response(
            request_id="r",
            usage=Usage(),
            items=np.array([item]),
            item_scores=np.array([score], np.float32),
        )

    account = replay.Account()
    account.compare(answer(1.0), answer(1.0))
    account.compare(answer(1.0), answer(1.25))
    account.compare(answer(1.0), answer(1.0, item=2))

    assert (account.verified, account.bit_equal, account.max_abs_diff) == (3, 1, 0.25)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify": 1.5}, "verify is 1.5"),
        ({"window_s": -1}, "window_s is -1"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"chunk_size": 6}, "not a multiple of page_size"),
        ({"model": ""}, "model is empty"),
    ],
)
def test_options_that_cannot_work_are_refused(
    change: dict[str, object], message: str, options: replay.ReplayOptions
) -> None:
    with pytest.raises(ConfigError, match=message):
        msgspec.structs.replace(options, **change)


def test_a_missing_log_or_model_is_a_typed_error(options: replay.ReplayOptions) -> None:
    with pytest.raises(InvalidRequest, match="cannot read the log"):
        replay.run(msgspec.structs.replace(options, trace="nothing.csv"))
    with pytest.raises(ConfigError, match="missing"):
        replay.run(msgspec.structs.replace(options, model="nothing"))
