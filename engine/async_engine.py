"""AsyncEngine: the engine for an asyncio program. The core runs in a process of its own, or by
option in a thread.

    async with AsyncEngine.from_model_dir("model") as engine:
        answer = await engine.rank(user_id="u1", history=[3, 14, 15], candidates=[9, 26, 5])

Every call ends with its answer or with one `EngineError`. Cancelling the awaiting task gives the
request up. When the core dies, all pending calls and all later ones raise `EngineDead`.
With a core process, torch is never imported here.
"""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Literal, Self, TypeVar

import msgspec

from engine.commands import (
    ActivateWeights,
    CacheReset,
    Command,
    DescribeUser,
    ForgetUser,
    Forgotten,
    ListUsers,
    ListWeights,
    LoadCatalogue,
    LoadWeights,
    QueryStats,
    RefreshPolicy,
    ResetCache,
    RetireWeights,
    ServedWeights,
    Statistics,
    UserList,
    UserStatus,
    VersionActivated,
    VersionRetired,
    WeightsList,
    WeightsLoaded,
    WeightsStatus,
)
from engine.config import EngineConfig
from engine.core_client import CoreClient, Phase
from engine.core_launch import CORE_MODULE, CoreOptions, CorePlace
from engine.errors import EngineError, from_record
from engine.request_builder import ArrayLike, FeaturesLike, build_request, text, user_id_text
from engine.types import CacheMode, CoreStats, ModelInfo, Request, Response, Task

T = TypeVar("T")


class AsyncEngine:
    """See the module. Owned by the event loop that called `start`; not for other threads."""

    def __init__(
        self,
        model_dir: str | None,
        config: EngineConfig,
        *,
        core: CorePlace = "process",
        drain_timeout_s: float = 30.0,
        exit_timeout_s: float = 10.0,
        core_module: str = CORE_MODULE,
        log_level: str = "INFO",
    ) -> None:
        """Nothing is started yet; `from_model_dir` is the usual way.

        Args:
            core: "process" (default), or "thread" of this process: see docs/embedding.md for what
                that costs and saves.
            drain_timeout_s: How long leaving `async with` waits for pending requests.
            exit_timeout_s: How long the core's end may take after that; then a process is killed.
            core_module: Module with the function `build` that makes the core.
            log_level: Of a core process, which logs to standard error.
        """
        self._model_dir = model_dir
        self._config = config
        self._drain_timeout_s = drain_timeout_s
        self._client = CoreClient(
            CoreOptions(
                place=core, module=core_module, log_level=log_level, exit_timeout_s=exit_timeout_s
            )
        )

    @classmethod
    def from_model_dir(
        cls,
        path: str | os.PathLike[str] | None = None,
        config: EngineConfig | None = None,
        *,
        core: CorePlace = "process",
    ) -> Self:
        """An engine for that model directory, to be used as `async with` or with `start`.

        Args:
            path: None serves the built-in model with random weights (its scores mean nothing).
            config: Defaults when not given.
            core: "process" or "thread", as the constructor says.
        """
        return cls(None if path is None else os.fspath(path), config or EngineConfig(), core=core)

    # Life

    async def start(self) -> None:
        """Start the core and wait until it serves.

        Raises ConfigError for a model or a setting that cannot work, EngineDead if the core ends.
        """
        await self._client.start(self._model_dir, self._config)

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for the pending ones; False if some are left."""
        return await self._client.drain(timeout_s)

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Drain, end the core, and wait until it has gone. Harmless when repeated.

        What is still pending after `drain_timeout_s` ends with `Draining`; then the core has
        `exit_timeout_s` to end, and a core process that has not is killed. Raises EngineDead when a
        core thread has not: nothing but the end of this process ends it.
        """
        timeout_s = self._drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        await self._client.stop(timeout_s)

    def kill(self) -> None:
        """End the core at once, without any answer. For the last exit of a program.

        A core thread cannot be killed: it ends with its next pass, or not at all if it hangs.
        """
        self._client.kill()

    async def wait_dead(self) -> EngineError:
        """Return only when the core has ended without being told to, with the reason."""
        return await self._client.wait_dead()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    # State

    @property
    def info(self) -> ModelInfo:
        """The model with the active weights. Raises EngineDead before the core is ready."""
        return self._client.served.info

    @property
    def served(self) -> ServedWeights:
        """The weights versions that requests may name. Raises EngineDead as `info` does."""
        return self._client.served

    @property
    def phase(self) -> Phase:
        return self._client.phase

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken now."""
        return self._client.phase is Phase.SERVING

    def refusal(self) -> EngineError:
        """Why a request is not taken now; for when `is_ready` is false."""
        return self._client.refusal()

    @property
    def core_pid(self) -> int | None:
        """Process id of the core; None before `start`, and for a core thread."""
        return self._client.pid

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the core's last sign of life; infinite before the first."""
        return max(0.0, time.monotonic() - self._client.heartbeat_s)

    @property
    def last_stats(self) -> CoreStats | None:
        """What the last heartbeat said (a fraction of a second old), None before the first."""
        return self._client.last_stats

    @property
    def num_pending(self) -> int:
        """Requests sent to the core and not answered."""
        return self._client.num_pending

    # Calls

    async def rank(
        self,
        *,
        user_id: str | int,
        history: FeaturesLike,
        candidates: FeaturesLike,
        context: ArrayLike | None = None,
        query_time: int | None = None,
        namespace: str = "",
        top_k: int | None = None,
        return_user_embedding: bool = False,
        deadline_ms: float | None = None,
        priority: int = 0,
        cache: CacheMode | str = CacheMode.USE,
        history_start: int = 0,
        base_length: int = 0,
        base_fingerprint: str = "",
        ignore_extra: bool = False,
        weights_version: str | None = None,
        request_id: str | None = None,
    ) -> Response:
        """Scores of the candidates, float32 [num_candidates, num_tasks]; see `build_request`."""
        return await self.submit(
            build_request(
                task=Task.RANK,
                user_id=user_id,
                history=history,
                candidates=candidates,
                context=context,
                query_time=query_time,
                namespace=namespace,
                top_k=top_k,
                return_user_embedding=return_user_embedding,
                deadline_ms=deadline_ms,
                priority=priority,
                cache=cache,
                history_start=history_start,
                base_length=base_length,
                base_fingerprint=base_fingerprint,
                ignore_extra=ignore_extra,
                weights_version=weights_version,
                request_id=request_id,
            )
        )

    async def retrieve(
        self,
        *,
        user_id: str | int,
        history: FeaturesLike,
        context: ArrayLike | None = None,
        query_time: int | None = None,
        namespace: str = "",
        top_k: int = 10,
        exclude_history: bool = False,
        return_user_embedding: bool = False,
        deadline_ms: float | None = None,
        priority: int = 0,
        cache: CacheMode | str = CacheMode.USE,
        history_start: int = 0,
        base_length: int = 0,
        base_fingerprint: str = "",
        ignore_extra: bool = False,
        weights_version: str | None = None,
        request_id: str | None = None,
    ) -> Response:
        """The best `top_k` items of the catalogue and their scores; see `build_request`."""
        return await self.submit(
            build_request(
                task=Task.RETRIEVE,
                user_id=user_id,
                history=history,
                context=context,
                query_time=query_time,
                namespace=namespace,
                top_k=top_k,
                exclude_history=exclude_history,
                return_user_embedding=return_user_embedding,
                deadline_ms=deadline_ms,
                priority=priority,
                cache=cache,
                history_start=history_start,
                base_length=base_length,
                base_fingerprint=base_fingerprint,
                ignore_extra=ignore_extra,
                weights_version=weights_version,
                request_id=request_id,
            )
        )

    async def prefetch(
        self,
        *,
        user_id: str | int,
        history: FeaturesLike | None = None,
        context: ArrayLike | None = None,
        query_time: int | None = None,
        namespace: str = "",
        deadline_ms: float | None = None,
        priority: int = 0,
        history_start: int = 0,
        base_length: int = 0,
        base_fingerprint: str = "",
        ignore_extra: bool = False,
        weights_version: str | None = None,
        request_id: str | None = None,
    ) -> Response:
        """Compute and keep a history; without one, bring a known state to the device."""
        return await self.submit(
            build_request(
                task=Task.PREFETCH,
                user_id=user_id,
                history=history,
                context=context,
                query_time=query_time,
                namespace=namespace,
                deadline_ms=deadline_ms,
                priority=priority,
                history_start=history_start,
                base_length=base_length,
                base_fingerprint=base_fingerprint,
                ignore_extra=ignore_extra,
                weights_version=weights_version,
                request_id=request_id,
            )
        )

    async def submit(self, request: Request) -> Response:
        """The answer to a request of `build_request`. Raises the EngineError it ended with."""
        outcome = await self._client.submit(request)
        if outcome.error is not None:
            raise from_record(outcome.error)
        assert outcome.response is not None
        return msgspec.structs.replace(outcome.response, request_id=request.request_id)

    # Control: users, the cache, weights

    async def forget(self, user_id: str | int, namespace: str = "") -> Forgotten:
        """Remove a user's state from all tiers; it is gone when this returns."""
        if not self.is_ready:
            raise self.refusal()
        command = ForgetUser(namespace=text(namespace, "namespace"), user_id=user_id_text(user_id))
        return await self._run(command, Forgotten)

    async def user(self, user_id: str | int, namespace: str = "") -> UserStatus:
        """What is known about a user, under each weights version."""
        command = DescribeUser(
            namespace=text(namespace, "namespace"), user_id=user_id_text(user_id)
        )
        return await self._run(command, UserStatus)

    async def users(
        self, limit: int = 100, tier: Literal["device", "host"] | None = None
    ) -> UserList:
        """The states of the users seen last, at most `limit`."""
        return await self._run(ListUsers(limit=limit, tier=tier), UserList)

    async def reset_cache(self) -> CacheReset:
        """Remove the state of all users; it is gone when this returns."""
        return await self._run(ResetCache(), CacheReset)

    async def weights(self) -> WeightsList:
        """The loaded weights versions."""
        return await self._run(ListWeights(), WeightsList)

    async def load_weights(
        self,
        path: str | os.PathLike[str],
        version: str | None = None,
        *,
        share: float | None = None,
        canary: float | None = None,
    ) -> WeightsStatus:
        """Load other weights of the model beside the running ones; see `commands.LoadWeights`.

        Raises ConfigError for a directory that cannot be served beside the running version.
        """
        command = LoadWeights(path=os.fspath(path), version=version, share=share, canary=canary)
        return (await self._run(command, WeightsLoaded)).status

    async def activate_weights(
        self, version: str, *, policy: RefreshPolicy = "lazy", budget_s: float = 30.0
    ) -> VersionActivated:
        """Let requests that name no version take this one; see `commands.RefreshPolicy`."""
        command = ActivateWeights(version=version, policy=policy, budget_s=budget_s)
        return await self._run(command, VersionActivated)

    async def retire_weights(
        self, version: str, *, mode: Literal["wait", "fail"] = "wait"
    ) -> VersionRetired:
        """Take a version out of service; it is gone when this returns."""
        return await self._run(RetireWeights(version=version, mode=mode), VersionRetired)

    async def load_catalogue(
        self, path: str | os.PathLike[str], version: str | None = None
    ) -> WeightsStatus:
        """Replace the item table by one that only adds rows; user state stays valid."""
        command = LoadCatalogue(path=os.fspath(path), version=version)
        return (await self._run(command, WeightsLoaded)).status

    async def stats(self) -> CoreStats:
        """The core's metrics as of now."""
        return (await self._run(QueryStats(), Statistics)).stats

    async def _run(self, command: Command, result_type: type[T]) -> T:
        result = await self._client.run(command)
        assert isinstance(result, result_type)
        return result
