"""AsyncEngine and its core process, on asyncio's own loop and on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop
from engine_models import CONFIGS

from engine.async_engine import AsyncEngine
from engine.config import CacheConfig, EngineConfig, HealthConfig, SchedulerConfig
from engine.core_client import Phase
from engine.core_launch import CORE_MODULE
from engine.entrypoints.config import ServerConfig
from engine.errors import (
    ConfigError,
    Draining,
    EngineDead,
    InvalidRequest,
    Overloaded,
)
from engine.models.config import Feature
from engine.testing.models import save_random_model

FAKE_CORE = "tests.integration.fake_core"
SMALL = EngineConfig(
    cache=CacheConfig(device_pages=256, page_size=16, chunk_size=64, host_bytes=1 << 26),
    warm_up=False,
    threads=1,
)
ROOT = Path(__file__).resolve().parent.parent.parent

Body = Callable[[], Coroutine[Any, Any, None]]
Run = Callable[[Body], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function on a fresh loop of each kind."""

    def run_body(body: Body) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(body(), 60))

    return run_body


@pytest.fixture(params=["process", "thread"])
def make_engine(request: pytest.FixtureRequest) -> Callable[..., AsyncEngine]:
    """Makes engines over the fake core, in a process and in a thread."""

    def make(
        model_dir: str | None = None, config: EngineConfig | None = None, **options: Any
    ) -> AsyncEngine:
        options = {"core": request.param, "core_module": FAKE_CORE, **options}
        return AsyncEngine(model_dir, config or EngineConfig(), **options)

    return make


MakeEngine = Callable[..., AsyncEngine]


def is_gone(engine: AsyncEngine) -> bool:
    """Whether nothing is left of an engine's core."""
    if engine.core_pid is not None:
        return process_is_gone(engine.core_pid)
    return all(thread.name != "engine-core" for thread in threading.enumerate())


def process_is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll a condition, at most for that long."""
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the condition did not come true in time")


def test_calls_are_answered(run: Run, make_engine: MakeEngine) -> None:
    async def body() -> None:
        async with make_engine() as engine:
            assert engine.info.name == "fake"
            ranked = await engine.rank(
                user_id=5, history=[1, 2], candidates=np.array([4, 9]), request_id="mine", top_k=1
            )
            assert ranked.request_id == "mine"
            assert ranked.scores is not None
            assert ranked.scores.dtype == np.float32
            assert ranked.scores.tolist() == [[3004.0, 2996.0], [3009.0, 2991.0]]
            assert ranked.items is not None
            assert ranked.items.tolist() == [9]
            retrieved = await engine.retrieve(
                user_id="u", history={"item": [1], "action": []}, top_k=3,
                return_user_embedding=True,
            )  # fmt: skip
            assert retrieved.items is not None
            assert retrieved.items.tolist() == [0, 1, 2]
            assert retrieved.user_embedding is not None
            assert retrieved.user_embedding.tolist() == [1000.0] * 4
            forgotten = await engine.forget(user_id="abc", namespace="ns")
            assert (forgotten.device_tokens, forgotten.host_tokens) == (3, 2)
            stats = await engine.stats()
            assert {sample.name for sample in stats.samples} >= {"requests_total", "queue_seconds"}
            prefetched = await engine.prefetch(user_id="a", history=[1, 2, 3])
            assert prefetched.usage.history_length == 3
            assert (await engine.prefetch(user_id="a")).usage.history_length == 0

    run(body)


def test_errors_keep_type_and_numbers(run: Run, make_engine: MakeEngine) -> None:
    async def body() -> None:
        config = EngineConfig(scheduler=SchedulerConfig(max_queue_requests=1))
        async with make_engine(config=config) as engine:
            with pytest.raises(InvalidRequest, match="bad user") as bad:
                await engine.rank(user_id="bad", history=[], candidates=[1])
            assert (bad.value.limit, bad.value.value) == (0, 1)
            held = asyncio.ensure_future(engine.rank(user_id="hold", history=[], candidates=[1]))
            await until(lambda: engine.num_pending == 1)
            with pytest.raises(Overloaded) as full:
                await engine.rank(user_id="u", history=[], candidates=[1])
            assert full.value.retry_after_s == 2.0
            held.cancel()
            with pytest.raises(asyncio.CancelledError):
                await held
            # The place in the queue is free again: the cancellation reached the core.
            await engine.rank(user_id="u", history=[], candidates=[1])

    run(body)


def test_many_calls_at_once_all_end(run: Run, make_engine: MakeEngine) -> None:
    async def body() -> None:
        async with make_engine() as engine:
            answers = await asyncio.gather(
                *(engine.rank(user_id=f"slow{n}", history=[n], candidates=[0]) for n in range(500))
            )
            firsts = [float(answer.scores[0, 0]) for answer in answers if answer.scores is not None]
            assert firsts == [n * 1000.0 for n in range(500)]

    run(body)


def test_answers_larger_than_the_socket_arrive_whole(run: Run, make_engine: MakeEngine) -> None:
    async def body() -> None:
        async with make_engine() as engine:
            answers = await asyncio.gather(
                *(engine.retrieve(user_id=n, history=[n], top_k=500_000) for n in range(6))
            )
            for number, answer in enumerate(answers):
                assert answer.items is not None
                assert answer.item_scores is not None
                assert answer.items[-1] == 499_999
                assert answer.item_scores[0] == number * 1000.0

    run(body)


def test_leaving_drains_then_ends_the_rest(run: Run, make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine(drain_timeout_s=0.2)
        await engine.start()
        held = asyncio.ensure_future(engine.rank(user_id="hold", history=[], candidates=[1]))
        slow = asyncio.ensure_future(engine.rank(user_id="slow", history=[], candidates=[1]))
        await until(lambda: engine.num_pending > 0)
        await engine.stop()
        assert (await slow).scores is not None
        with pytest.raises(Draining):
            await held
        with pytest.raises(Draining):
            await engine.rank(user_id="u", history=[], candidates=[1])
        assert engine.phase is Phase.STOPPED
        assert is_gone(engine)
        await engine.stop()

    run(body)


@pytest.mark.parametrize("cause", ["crash", "exit", "kill"])
def test_pending_and_later_calls_fail_when_the_core_dies(
    run: Run, make_engine: MakeEngine, cause: str
) -> None:
    async def body() -> None:
        async with make_engine() as engine:
            if cause == "exit" and engine.core_pid is None:
                pytest.skip("a core thread that ends the process ends the test as well")
            held = asyncio.ensure_future(engine.rank(user_id="hold", history=[], candidates=[1]))
            await until(lambda: engine.num_pending == 1)
            if cause == "kill":
                engine.kill()
            else:
                with pytest.raises(EngineDead):
                    await engine.rank(user_id=cause, history=[], candidates=[1])
            with pytest.raises(EngineDead):
                await held
            with pytest.raises(EngineDead):
                await engine.rank(user_id="u", history=[], candidates=[1])
            with pytest.raises(EngineDead):
                await engine.stats()
            assert isinstance(await engine.wait_dead(), EngineDead)
            assert engine.phase is Phase.DEAD
        assert is_gone(engine)

    run(body)


def test_start_raises_what_the_core_says(run: Run, make_engine: MakeEngine) -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match=r"config\.json"):
            await make_engine("missing").start()
        with pytest.raises(EngineDead, match="a bug at start"):
            await make_engine("broken").start()

    run(body)


def test_a_cancelled_start_leaves_no_core(run: Run, make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        start = asyncio.ensure_future(engine.start())
        while engine.phase is Phase.NEW:
            await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert is_gone(engine)

    run(body)


async def test_an_engine_that_was_not_started_says_so(make_engine: MakeEngine) -> None:
    with pytest.raises(EngineDead, match="not been started"):
        await make_engine().rank(user_id="u", history=[], candidates=[1])


async def test_invalid_arguments_are_refused_before_they_are_sent(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequest, match=r"history\.item has float32"):
            await engine.rank(user_id="u", history=[1.5], candidates=[1])
        with pytest.raises(InvalidRequest, match="candidates is empty"):
            await engine.rank(user_id="u", history=[1], candidates=[])
        with pytest.raises(InvalidRequest, match="top_k"):
            await engine.retrieve(user_id="u", history=[1], top_k=0)
        with pytest.raises(InvalidRequest, match=r"LoadWeights cannot be sent: .*share"):
            await engine.load_weights("x", share="half")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=r"RetireWeights cannot be sent: .*surrogates"):
            await engine.retire_weights("\ud800")
        with pytest.raises(InvalidRequest, match=r"ListUsers cannot be sent: .*ints"):
            await engine.users(1 << 64)


async def test_heartbeats_stop_when_the_core_is_stopped() -> None:
    async with AsyncEngine(None, EngineConfig(), core_module=FAKE_CORE) as engine:
        await until(lambda: engine.last_stats is not None)
        assert engine.core_pid is not None
        os.kill(engine.core_pid, signal.SIGSTOP)
        try:
            await until(lambda: engine.heartbeat_age_s > 1.0)
        finally:
            os.kill(engine.core_pid, signal.SIGCONT)
        await until(lambda: engine.heartbeat_age_s < 0.9)


def test_a_killed_host_leaves_no_core(tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            from engine.async_engine import AsyncEngine
            from engine.config import EngineConfig

            async def main():
                engine = AsyncEngine(None, EngineConfig(), core_module={FAKE_CORE!r})
                await engine.start()
                assert "torch" not in sys.modules
                print(engine.core_pid, flush=True)
                await asyncio.Event().wait()

            asyncio.run(main())
            """
        )
    )
    host = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    with host:
        assert host.stdout is not None
        core_pid = int(host.stdout.readline())
        assert not process_is_gone(core_pid)
        host.kill()
        host.wait(20)
    asyncio.run(until(lambda: process_is_gone(core_pid)))


async def test_a_hung_core_process_is_killed_within_one_exit_timeout() -> None:
    engine = AsyncEngine(None, EngineConfig(), core_module=FAKE_CORE, exit_timeout_s=1.0)
    await engine.start()
    assert engine.core_pid is not None
    os.kill(engine.core_pid, signal.SIGSTOP)
    held = asyncio.ensure_future(engine.rank(user_id="u", history=[], candidates=[1]))
    await until(lambda: engine.num_pending == 1)
    await engine.stop(0.0)
    with pytest.raises(Draining):
        await held
    assert process_is_gone(engine.core_pid)
    assert engine.phase is Phase.STOPPED


async def test_a_hung_core_thread_cannot_be_ended_and_stop_says_so() -> None:
    let_go = importlib.import_module(FAKE_CORE).let_go
    engine = AsyncEngine(
        None, EngineConfig(), core="thread", core_module=FAKE_CORE, exit_timeout_s=0.2
    )
    await engine.start()
    held = asyncio.ensure_future(engine.rank(user_id="hang", history=[], candidates=[1]))
    await until(lambda: engine.num_pending == 1)
    try:
        with pytest.raises(EngineDead, match="'engine-core' hangs and cannot be killed"):
            await engine.stop(0.0)
        with pytest.raises(Draining):
            await held
        assert not is_gone(engine)
    finally:
        let_go.set()
    await until(lambda: is_gone(engine))
    let_go.clear()


async def test_a_silent_core_thread_is_given_up_and_its_calls_fail() -> None:
    let_go = importlib.import_module(FAKE_CORE).let_go
    config = EngineConfig(health=HealthConfig(heartbeat_kill_s=3))
    engine = AsyncEngine(None, config, core="thread", core_module=FAKE_CORE)
    await engine.start()
    try:
        with pytest.raises(EngineDead, match="hung: it was silent for 5 s"):
            await engine.rank(user_id="hang", history=[], candidates=[1])
        assert engine.phase is Phase.DEAD
    finally:
        let_go.set()
    await engine.stop()
    let_go.clear()
    assert is_gone(engine)


def _open_files() -> list[str]:
    """What the open descriptors of this process lead to, sorted."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            names.append(re.sub(r"\[\d+\]", "", str(entry.readlink())))
    return sorted(names)


@pytest.mark.parametrize("module", [FAKE_CORE, CORE_MODULE])
def test_a_stopped_core_thread_leaves_no_thread_and_no_open_file(module: str) -> None:
    async def serve_once() -> None:
        async with AsyncEngine(None, SMALL, core="thread", core_module=module) as engine:
            answer = await engine.rank(user_id="u", history=[1, 2], candidates=[3])
            assert answer.scores is not None

    asyncio.run(serve_once())  # what is opened once and stays: torch's threads, libraries
    threads, files = set(threading.enumerate()), _open_files()
    asyncio.run(serve_once())
    assert set(threading.enumerate()) == threads
    assert _open_files() == files


async def test_a_core_thread_gives_the_answers_of_a_core_process() -> None:
    scores = []
    for place in ("process", "thread"):
        async with AsyncEngine.from_model_dir(None, SMALL, core=place) as engine:
            answers = await asyncio.gather(
                *(
                    engine.rank(user_id=n, history=[n, 5, 7 * n], candidates=[1, 2, 3])
                    for n in range(1, 9)
                )
            )
        scores.append([answer.scores for answer in answers])
    np.testing.assert_array_equal(scores[0], scores[1])


async def oldest_heartbeat_s(engine: AsyncEngine, work: Coroutine[Any, Any, Any]) -> float:
    """The greatest age of the core's heartbeat that is seen while `work` runs."""
    task = asyncio.ensure_future(work)
    oldest_s = 0.0
    while not task.done():
        await asyncio.sleep(0.02)
        oldest_s = max(oldest_s, engine.heartbeat_age_s)
    await task
    return oldest_s


async def test_a_core_is_not_taken_for_dead_while_a_step_takes_seconds() -> None:
    module = "tests.integration.busy_core"
    async with AsyncEngine(None, SMALL, core_module=module) as engine:
        work = engine.rank(user_id="u", history=[1, 2, 3], candidates=[4, 5])
        oldest_s = await oldest_heartbeat_s(engine, work)
        assert engine.last_stats is not None
    assert oldest_s < ServerConfig().heartbeat_timeout_s


async def test_a_core_is_not_taken_for_dead_while_a_thousand_requests_come() -> None:
    config = msgspec.structs.replace(SMALL, scheduler=SchedulerConfig(max_queue_requests=1000))
    async with AsyncEngine(None, config) as engine:

        async def ask_a_thousand() -> None:
            await asyncio.gather(
                *(
                    engine.rank(user_id=n, history=[n % 50 + 1, 2, 3], candidates=[4, 5])
                    for n in range(1000)
                )
            )

        oldest_s = await oldest_heartbeat_s(engine, ask_a_thousand())
    assert oldest_s < ServerConfig().heartbeat_timeout_s


async def test_a_core_is_not_taken_for_dead_while_weights_are_loaded(tmp_path: Path) -> None:
    inputs = msgspec.structs.replace(
        CONFIGS["append"].inputs, features=(Feature(name="item", num_rows=300_001),)
    )
    config = msgspec.structs.replace(CONFIGS["append"], inputs=inputs)
    for number in (1, 2):
        save_random_model(
            tmp_path / f"v{number}", msgspec.structs.replace(config, weights_version=f"v{number}")
        )
    async with AsyncEngine(str(tmp_path / "v1"), SMALL) as engine:
        work = engine.load_weights("v2")
        oldest_s = await oldest_heartbeat_s(engine, work)
        assert {info.weights_version for info in engine.served.infos} == {"v1", "v2"}
    assert oldest_s < ServerConfig().heartbeat_timeout_s
