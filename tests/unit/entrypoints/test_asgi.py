"""Work for a client that may leave."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from engine.entrypoints.asgi import unless_disconnected
from engine.errors import Cancelled, TooLarge


class Client:
    """The receiving end of an exchange, and work that it can see being cancelled."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()
        self.may_finish = asyncio.Event()
        self.is_cancelled = False

    async def receive(self) -> dict[str, Any]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def work(self) -> str:
        try:
            await self.may_finish.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        return "done"


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_work_of_a_client_that_stays_is_done() -> None:
    client = Client()
    client.may_finish.set()
    assert await unless_disconnected(client.receive, client.work()) == "done"
    client.has_left.set()  # nobody watches any more
    await settle()
    assert len(asyncio.all_tasks()) == 1


async def test_the_work_of_a_client_that_leaves_is_cancelled() -> None:
    client = Client()
    asyncio.get_running_loop().call_soon(client.has_left.set)
    with pytest.raises(Cancelled, match="the client left"):
        await unless_disconnected(client.receive, client.work())
    assert client.is_cancelled
    await settle()  # the caller itself goes on
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancelled_caller_takes_its_work_along() -> None:
    client = Client()
    caller = asyncio.ensure_future(unless_disconnected(client.receive, client.work()))
    await settle()
    caller.cancel()
    client.has_left.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert client.is_cancelled


async def test_an_error_of_the_work_is_raised() -> None:
    async def fails() -> str:
        raise TooLarge("x")

    with pytest.raises(TooLarge):
        await unless_disconnected(Client().receive, fails())


async def test_a_client_that_leaves_as_the_work_ends_does_no_harm() -> None:
    client = Client()

    def both() -> None:
        client.may_finish.set()
        client.has_left.set()

    asyncio.get_running_loop().call_soon(both)
    with contextlib.suppress(Cancelled):
        assert await unless_disconnected(client.receive, client.work()) == "done"
    await settle()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
