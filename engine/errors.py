"""Every error the engine raises on purpose.

    EngineError
     |- ConfigError            400  config_error: a setting or a model directory cannot work
     |- RequestError           the caller's fault; ends that request only
     |   |- InvalidRequest     400  invalid_request
     |   |- Unauthorized       401  unauthorized
     |   |- Forbidden          403  forbidden
     |   |- UnknownModel       404  unknown_model
     |   |- RequestTimeout     408  request_timeout
     |   |- HistoryNeeded      409  history_needed
     |   |- TooLarge           413  too_large
     |   |- UnsupportedBody    415  unsupported_body
     |   |- HeadersTooLarge    431  headers_too_large
     |- Overloaded             429  overloaded (carries retry_after_s)
     |- TooManyConnections     503  too_many_connections
     |- Cancelled              499  cancelled
     |- EngineDead             503  engine_dead
     |   |- Draining           503  draining
     |- WeightsRetired         503  weights_retired
     |- DeadlineExceeded       504  deadline_exceeded
     |- TransferError          500  internal: a copy failed; the engine turns it into a miss
     |- InvariantError         500  a bug in the engine

A message says what happened, the value, the limit, and what to change.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class EngineError(Exception):
    """Base of all errors of the engine.

    `limit` and `value` repeat, for machines, the numbers that the message names.
    """

    code: ClassVar[str] = "engine_error"
    status: ClassVar[int] = 500

    def __init__(
        self, message: str, *, limit: float | None = None, value: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.limit = limit
        self.value = value


class ConfigError(EngineError):
    """A setting, a model directory or a backend cannot work; raised before it is put to use."""

    code = "config_error"
    status = 400


class RequestError(EngineError):
    """The request cannot be served as it was sent."""

    code = "request_error"
    status = 400


class InvalidRequest(RequestError):
    """A field is missing, malformed, out of range or not read by the model."""

    code = "invalid_request"


class Unauthorized(RequestError):
    """The request carries no key, or none that is known."""

    code = "unauthorized"
    status = 401


class Forbidden(RequestError):
    """The key is known, and does not open this route."""

    code = "forbidden"
    status = 403


class UnknownModel(RequestError):
    """No model, or no weights version, of that name is loaded."""

    code = "unknown_model"
    status = 404


class RequestTimeout(RequestError):
    """The client took too long to send its request."""

    code = "request_timeout"
    status = 408


class HistoryNeeded(RequestError):
    """A delta request found no state to extend: send the whole history."""

    code = "history_needed"
    status = 409


class TooLarge(RequestError):
    """The request exceeds a limit that no waiting can lift."""

    code = "too_large"
    status = 413


class UnsupportedBody(RequestError):
    """The body is compressed, or of a form that this route does not read."""

    code = "unsupported_body"
    status = 415


class HeadersTooLarge(RequestError):
    """The request line and headers are too many or too long."""

    code = "headers_too_large"
    status = 431


class Overloaded(EngineError):
    """The queue is full; try again after `retry_after_s` seconds."""

    code = "overloaded"
    status = 429

    def __init__(
        self,
        message: str,
        *,
        limit: float | None = None,
        value: float | None = None,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message, limit=limit, value=value)
        self.retry_after_s = retry_after_s


class TooManyConnections(EngineError):
    """The server has as many connections as it may have."""

    code = "too_many_connections"
    status = 503


class Cancelled(EngineError):
    """The caller gave the request up."""

    code = "cancelled"
    status = 499


class EngineDead(EngineError):
    """The core has ended; nothing can be served until it is started again."""

    code = "engine_dead"
    status = 503


class Draining(EngineDead):
    """The engine is shutting down and takes no new requests."""

    code = "draining"


class WeightsRetired(EngineError):
    """The weights version that the request was bound to has been retired: send it again."""

    code = "weights_retired"
    status = 503


class DeadlineExceeded(EngineError):
    """The deadline passed, or cannot be met."""

    code = "deadline_exceeded"
    status = 504


class TransferError(EngineError):
    """A copy between tiers failed or came too late."""

    code = "transfer_error"


class InvariantError(EngineError):
    """The engine's own bookkeeping is broken: a bug."""

    code = "invariant_error"


_ALL: tuple[type[EngineError], ...] = (
    EngineError, ConfigError, RequestError, InvalidRequest, Unauthorized, Forbidden, UnknownModel,
    RequestTimeout, HistoryNeeded, TooLarge, UnsupportedBody, HeadersTooLarge, Overloaded,
    TooManyConnections, Cancelled, EngineDead, Draining, WeightsRetired, DeadlineExceeded,
    TransferError, InvariantError,
)  # fmt: skip
_BY_CODE = {error.code: error for error in _ALL}


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error on its way between processes."""

    code: str
    message: str
    limit: float | None = None
    value: float | None = None
    retry_after_s: float | None = None


def to_record(error: EngineError) -> ErrorRecord:
    """The error as a record that `from_record` turns back into the same type."""
    return ErrorRecord(
        code=error.code,
        message=error.message,
        limit=error.limit,
        value=error.value,
        retry_after_s=error.retry_after_s if isinstance(error, Overloaded) else None,
    )


def from_record(record: ErrorRecord) -> EngineError:
    """The error that `to_record` described; an unknown code becomes `EngineError`."""
    error_type = _BY_CODE.get(record.code, EngineError)
    if issubclass(error_type, Overloaded):
        return error_type(
            record.message,
            limit=record.limit,
            value=record.value,
            retry_after_s=record.retry_after_s or 1.0,
        )
    return error_type(record.message, limit=record.limit, value=record.value)
