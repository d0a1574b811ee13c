"""What each error is called over gRPC."""

from __future__ import annotations

import grpc
import pytest

from engine.entrypoints.grpc.statuses import details_of, status_code, trailing_metadata
from engine.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineError,
    HistoryNeeded,
    InvalidRequest,
    InvariantError,
    Overloaded,
    TooLarge,
    UnknownModel,
)


@pytest.mark.parametrize(
    ("error_type", "status"),
    [
        (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
        (TooLarge, grpc.StatusCode.INVALID_ARGUMENT),
        (UnknownModel, grpc.StatusCode.NOT_FOUND),
        (HistoryNeeded, grpc.StatusCode.FAILED_PRECONDITION),
        (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Cancelled, grpc.StatusCode.CANCELLED),
        (Draining, grpc.StatusCode.UNAVAILABLE),
        (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
        (InvariantError, grpc.StatusCode.INTERNAL),
    ],
)
def test_a_status_means_what_the_http_status_means(
    error_type: type[EngineError], status: grpc.StatusCode
) -> None:
    assert status_code(error_type("x")) is status


def test_numbers_are_in_the_trailing_metadata() -> None:
    assert trailing_metadata(InvalidRequest("x")) == (("code", "invalid_request"),)
    assert trailing_metadata(Overloaded("x", limit=3, value=4.5, retry_after_s=2.0)) == (
        ("code", "overloaded"),
        ("limit", "3"),
        ("value", "4.5"),
        ("retry-after", "2"),
    )


def test_a_very_long_message_is_cut() -> None:
    assert len(details_of(InvalidRequest("x" * 100_000))) == 2048


def test_a_long_message_is_cut_by_its_bytes_between_characters() -> None:
    # gRPC sends three bytes for one that is not ASCII, and clients refuse 8 KiB and more.
    assert details_of(InvalidRequest("x" + "\u6c49" * 100_000)) == "x" + "\u6c49" * 682
