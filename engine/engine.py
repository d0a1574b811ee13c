"""Engine: the synchronous twin of `AsyncEngine`, with the core in this thread.

For offline work, tests and simulation. Steps run in the caller's thread; copies in the
background, as always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from engine.assembly import Hooks, core_from_model_dir
from engine.commands import Command, CoreMessage, ForgetUser, Forgotten, Reply, Result
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineDead, EngineError, InvalidRequest, from_record
from engine.request_builder import FeaturesLike, build_request, text, user_id_text
from engine.types import (
    CoreStats,
    ModelInfo,
    Outcome,
    Request,
    Response,
    Task,
)

_WAIT_S = 0.05


class Engine:
    """One request at a time (`rank`, `retrieve`, ...), or many batched (`run`)."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._num_commands = 0
        limits = core.config.scheduler
        self._max_open = min(limits.max_queue_requests, limits.max_queue_requests_per_user)

    @classmethod
    def from_model_dir(
        cls, path: str | None, config: EngineConfig | None = None, hooks: Hooks | None = None
    ) -> Self:
        """An engine around a model directory; None serves the built-in model with random weights.

        Raises ConfigError."""
        hooks = hooks or Hooks(uses_device_thread=False)
        return cls(core_from_model_dir(path, config or EngineConfig(), hooks))

    @property
    def info(self) -> ModelInfo:
        return self.core.info

    def rank(
        self, *, user_id: str | int, history: FeaturesLike, candidates: FeaturesLike, **options: Any
    ) -> Response:
        """Scores of the candidates; options as `engine.request_builder.build_request`.

        Raises the EngineError that ended the request."""
        return self._one(
            build_request(
                task=Task.RANK,
                user_id=user_id,
                history=history,
                candidates=candidates,
                **options,
            )
        )

    def retrieve(self, *, user_id: str | int, history: FeaturesLike, **options: Any) -> Response:
        """The best items of the catalogue for the user."""
        return self._one(
            build_request(task=Task.RETRIEVE, user_id=user_id, history=history, **options)
        )

    def prefetch(
        self, *, user_id: str | int, history: FeaturesLike | None = None, **options: Any
    ) -> Response:
        """Compute and keep a history; without one, bring a known state to the device."""
        return self._one(
            build_request(task=Task.PREFETCH, user_id=user_id, history=history, **options)
        )

    def forget(self, user_id: str | int, namespace: str = "") -> Forgotten:
        """Remove a user's state in every tier; what it removed, once nothing can touch it."""
        command = ForgetUser(namespace=text(namespace, "namespace"), user_id=user_id_text(user_id))
        result = self.command(command)
        assert isinstance(result, Forgotten)
        return result

    def command(self, command: Command) -> Result:
        """Carry out a command of `engine.commands`. Raises the EngineError that ended it."""
        self._num_commands += 1
        ticket = f"command-{self._num_commands}"
        self.core.run(ticket, command)
        while True:
            for message in self._advance():
                if isinstance(message, Reply) and message.ticket == ticket:
                    if message.error is not None:
                        raise from_record(message.error)
                    assert message.result is not None
                    return message.result

    def run(self, requests: Iterable[Request]) -> list[Outcome]:
        """All requests, batched as the scheduler sees fit; outcomes in the requests' order.

        No more requests are open at a time than the queue may hold, so that none is refused
        for its number."""
        coming = deque(requests)
        ids = [request.request_id for request in coming]
        if len(set(ids)) < len(ids):
            raise InvalidRequest("a request_id appears twice: give each request its own")
        open_ids: set[str] = set()
        outcomes: dict[str, Outcome] = {}
        while coming or open_ids:
            while coming and len(open_ids) < self._max_open:
                open_ids.add(coming[0].request_id)
                self.core.submit(coming.popleft())
            for message in self._advance():
                if isinstance(message, Outcome) and message.request_id in open_ids:
                    outcomes[message.request_id] = message
                    open_ids.remove(message.request_id)
        return [outcomes[request_id] for request_id in ids]

    def drain_transfers(self) -> None:
        """Return when no request, step or copy is in flight."""
        while self._step() or not self.core.is_quiet:
            pass

    def stats(self) -> CoreStats:
        return self.core.stats()

    def close(self) -> None:
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _one(self, request: Request) -> Response:
        outcome = self.run([request])[0]
        if outcome.error is not None:
            raise from_record(outcome.error)
        assert outcome.response is not None
        return outcome.response

    def _advance(self) -> list[CoreMessage]:
        """Step until something comes out."""
        while True:
            ready = self.core.take_outbox()
            if ready:
                return ready
            self._step()

    def _step(self) -> bool:
        """One pass; False: nothing was to do, and it waited a while for a copy or a step to end.

        A bug of the core is raised, and every unfinished request has ended then."""
        try:
            has_progress = self.core.step()
        except EngineError as error:
            self.core.abort(error)
            raise
        except Exception as error:
            self.core.abort(EngineDead(f"the engine has failed: {error!r}"))
            raise
        if not has_progress and not self.core.is_quiet:
            self.core.wait(_WAIT_S)
        return has_progress
