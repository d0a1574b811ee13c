"""A client of the native JSON face, as `mtserve replay --server` needs it: one try, one reply.

Every try ends with a `Reply`; what the network or the server did wrong is a code in it, so that a
replay counts it and goes on.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import httpx
import msgspec

from engine.entrypoints.oip_metadata import ModelMetadata
from engine.entrypoints.protocol import ErrorBody
from engine.entrypoints.routes.health import HealthBody
from engine.errors import ConfigError
from engine.types import CacheMode, Request, Task

OK = "ok"
T = TypeVar("T")


class AnswerUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an answer's `usage` that a replay adds up; the rest is ignored."""

    device_tokens: int
    host_tokens: int
    computed_tokens: int
    history_length: int
    weights_version: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay reads of an answer to a retrieve request."""

    usage: AnswerUsage
    items: list[int]
    item_scores: list[float]
    user_embedding: list[float] | None = None


class Reply(NamedTuple):
    """How one try ended.

    `code` is "ok" (then `answer` is there), the server's error code, or one of `timeout`,
    `connection_error`, `bad_answer` and `http_NNN`. `retry_after_s` is what a 429 asks for.
    """

    code: str
    answer: Answer | None = None
    retry_after_s: float | None = None


class _RetrieveBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    user_id: str
    history: dict[str, list[int]]
    topk: int | None
    query_time: int | None
    cache: CacheMode = CacheMode.USE
    return_user_embedding: bool = False
    deadline_ms: float | None = None
    ignore_extra: bool = False


_answer_decoder = msgspec.json.Decoder(Answer)
_error_decoder = msgspec.json.Decoder(ErrorBody)
_health_decoder = msgspec.json.Decoder(HealthBody)
_metadata_decoder = msgspec.json.Decoder(ModelMetadata)
_encoder = msgspec.json.Encoder()


class ReplayClient:
    """Connections to one server. Owned by the event loop that entered it.

    Args:
        url: Of the server, without a path.
        api_key: Sent as a bearer token; None sends none.
        timeout_s: Of one try, without the wait for a free connection.
        max_connections: Requests beyond it wait for a connection.

    Raises ConfigError for an address that is none.
    """

    def __init__(
        self, url: str, *, api_key: str | None, timeout_s: float, max_connections: int
    ) -> None:
        self._url = url
        try:
            base_url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"server is {url!r}: {error}; give http://HOST:PORT") from None
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_s, pool=None),
            limits=httpx.Limits(
                max_connections=max_connections, max_keepalive_connections=max_connections
            ),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def check_model(self, expected: str) -> ModelMetadata:
        """The served model. Raises ConfigError when it cannot be replayed against.

        Args:
            expected: The name it must have; "" takes any.
        """
        ready = await self._get("/v2/health/ready")
        health = self._decode(_health_decoder, ready)
        if ready.status_code != 200 or not isinstance(health.name, str):
            raise ConfigError(f"{self._url} is not ready: {health.reason or ready.status_code}")
        if expected and health.name != expected:
            raise ConfigError(f"{self._url} serves model {health.name!r}, not {expected!r}")
        described = await self._get(f"/v2/models/{health.name}")
        if described.status_code in (401, 403):
            raise ConfigError(f"{self._url} wants an API key: give one with --api-key-file")
        metadata = self._decode(_metadata_decoder, described)
        if Task.RETRIEVE not in metadata.parameters.tasks:
            raise ConfigError(
                f"model {health.name!r} serves {', '.join(metadata.parameters.tasks)}: "
                "a replay needs one with a retrieve head"
            )
        return metadata

    async def retrieve(self, request: Request, deadline_ms: float | None) -> Reply:
        """Send a retrieve request once."""
        assert request.history is not None
        body = _RetrieveBody(
            user_id=request.user_id,
            history={name: values.tolist() for name, values in request.history.items()},
            topk=request.top_k,
            query_time=request.query_time,
            cache=request.cache,
            return_user_embedding=request.return_user_embedding,
            deadline_ms=deadline_ms,
            ignore_extra=request.ignore_extra,
        )
        try:
            response = await self._http.post("/v1/retrieve", content=_encoder.encode(body))
        except httpx.TimeoutException:
            return Reply("timeout")
        except httpx.HTTPError:
            return Reply("connection_error")
        return _reply(response)

    async def _get(self, path: str) -> httpx.Response:
        try:
            return await self._http.get(path)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"{self._url} cannot be reached: {type(error).__name__}: {error}"
            ) from error

    def _decode(self, decoder: msgspec.json.Decoder[T], response: httpx.Response) -> T:
        try:
            return decoder.decode(response.content)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{response.url} answered {response.status_code} and nothing that mtserve says: "
                f"{error}; give the address of an mtserve server"
            ) from None


def _reply(response: httpx.Response) -> Reply:
    try:
        if response.status_code == 200:
            return Reply(OK, _answer_decoder.decode(response.content))
        code = _error_decoder.decode(response.content).code
    except msgspec.DecodeError:
        is_ok = response.status_code == 200
        code = "bad_answer" if is_ok else f"http_{response.status_code}"
    return Reply(code, retry_after_s=_retry_after_s(response))


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds of a 429's Retry-After; 1 when it says none that can be read."""
    if response.status_code != 429:
        return None
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 1.0
