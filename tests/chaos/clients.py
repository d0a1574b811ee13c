"""Users of a server that do everything a user may do, and keep account of every answer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.judge import Answered

NUM_ITEMS = 500
MAX_EVENTS = 200
_ACTIONS = ("rank",) * 14 + ("delta",) * 6 + ("prefetch", "forget", "late", "leave", "edit")


@dataclass(slots=True)
class User:
    """What a client knows of one user.

    base: (base_length, fingerprint, history it was about) of the last answer.
    """

    name: str
    history: list[int] = field(default_factory=list)
    base: tuple[int, str, list[int]] | None = None


class Clients:
    """`num_tasks` requests at a time for `num_users` users.

    Attributes:
        outcomes: How requests ended: "ok", an error's code, "no server", "left".
        answered: Rank answers that nobody has judged yet.
        hanging: Requests without an outcome after `TIMEOUT_S`: there must be none.
    """

    TIMEOUT_S = 60.0

    def __init__(self, port: int, num_users: int, num_tasks: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._users = [User(f"user-{number}") for number in range(num_users)]
        self._num_tasks = num_tasks
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=self.TIMEOUT_S,
            limits=httpx.Limits(max_connections=2 * num_tasks),
        )  # fmt: skip
        self._is_stopping = False
        self.versions = ["v0"]
        self.outcomes: Counter[str] = Counter()
        self.answered: list[Answered] = []
        self.hanging: list[str] = []

    async def run(self) -> None:
        """Until `stop`."""
        await asyncio.gather(*(self._work() for _ in range(self._num_tasks)))
        await self._client.aclose()

    def stop(self) -> None:
        self._is_stopping = True

    async def _work(self) -> None:
        while not self._is_stopping:
            user = self._random.choice(self._users)
            action = self._random.choice(_ACTIONS)
            try:
                await getattr(self, f"_{action}")(user)
                await asyncio.sleep(0.005)
            except httpx.TimeoutException:
                self.hanging.append(f"{action} of {user.name}")
            except httpx.TransportError:
                self.outcomes["no server"] += 1
                await asyncio.sleep(0.2)

    # Actions

    async def _rank(self, user: User, **options: Any) -> None:
        history = self._grown(user)
        await self._ask(user, history, {"history": history}, **options)

    async def _delta(self, user: User) -> None:
        history = self._grown(user)
        if user.base is None or user.base[2] != history[: user.base[0]]:
            await self._ask(user, history, {"history": history})
            return
        length, fingerprint, _ = user.base
        body = {
            "history": history[length:], "base_length": length, "base_fingerprint": fingerprint,
        }  # fmt: skip
        code = await self._ask(user, history, body)
        if code == "history_needed":
            await self._ask(user, history, {"history": history})

    async def _late(self, user: User) -> None:
        await self._rank(user, deadline_ms=self._random.choice([0.5, 5, 30]))

    async def _edit(self, user: User) -> None:
        if user.history:
            user.history[self._random.randrange(len(user.history))] = self._item()
        await self._rank(user)

    async def _prefetch(self, user: User) -> None:
        body = {"requests": [{"user_id": user.name, "history": list(user.history)}]}
        if self._random.random() < 0.5 or not user.history:
            body = {"users": [user.name, "nobody"]}
        answer = await self._client.post("/v1/users:prefetch", json=body)
        self._count(answer)

    async def _forget(self, user: User) -> None:
        self._count(await self._client.delete(f"/v1/users/{user.name}"))

    async def _leave(self, user: User) -> None:
        """A client that goes away in the middle of its request."""
        asking = asyncio.ensure_future(self._rank(user))
        await asyncio.sleep(self._random.random() * 0.02)
        asking.cancel()
        try:
            await asking
        except asyncio.CancelledError:
            self.outcomes["left"] += 1

    # How requests are sent and answers kept

    async def _ask(
        self, user: User, history: list[int], body: dict[str, Any], **options: Any
    ) -> str:
        candidates = [self._item() for _ in range(self._random.randrange(1, 20))]
        if self._random.random() < 0.1:
            options["cache"] = "bypass" if "base_length" not in body else "use"
        answer = await self._client.post(
            "/v1/rank",
            json={"user_id": user.name, "candidates": candidates, **body, **options},
        )
        code = self._count(answer)
        if code != "ok":
            return code
        parsed = answer.json()
        usage = parsed["usage"]
        self.answered.append(
            Answered(
                request_id=parsed["request_id"],
                version=usage["weights_version"],
                history=history,
                candidates=candidates,
                scores=parsed["scores"],
            )
        )
        if usage["base_length"]:
            user.base = (
                usage["base_length"],
                usage["fingerprint"],
                history[: usage["base_length"]],
            )
        return code

    def _count(self, answer: httpx.Response) -> str:
        code = "ok" if answer.status_code == 200 else answer.json()["code"]
        self.outcomes[code] += 1
        return code

    def _grown(self, user: User) -> list[int]:
        """The user's history with a few events more; a copy."""
        user.history += [self._item() for _ in range(self._random.randrange(4))]
        if len(user.history) > MAX_EVENTS:
            user.history = []
            user.base = None
        return list(user.history)

    def _item(self) -> int:
        return 10 * self._random.randrange(NUM_ITEMS) + 1
