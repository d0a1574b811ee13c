"""Executors return values and errors, in order, and wake the core."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.platforms.cpu import DeviceExecutor, InlineExecutor, Wake


@pytest.fixture
def wake():
    wake = Wake()
    yield wake
    wake.close()


@pytest.fixture(params=[DeviceExecutor, InlineExecutor])
def executor(request, wake):
    executor = request.param(wake)
    yield executor
    executor.close()


def _next(executor, wake):
    while (ended := executor.done()) is None:
        assert wake.wait(60)
        wake.clear()
    return ended


def test_nothing_is_done_before_something_was_submitted(executor):
    assert executor.done() is None


def test_values_come_back_in_order_and_once(executor, wake):
    for number in range(5):
        executor.submit(lambda number=number: number * number)
    assert [_next(executor, wake).result() for _ in range(5)] == [0, 1, 4, 9, 16]
    assert executor.done() is None


def test_an_exception_is_returned_and_the_next_function_runs(executor, wake):
    def fail():
        raise ValueError("broken")

    executor.submit(fail)
    executor.submit(lambda: "fine")
    ended = _next(executor, wake)
    assert ended.value is None
    with pytest.raises(ValueError, match="broken"):
        ended.result()
    assert _next(executor, wake).value == "fine"


def test_even_an_exit_is_returned(executor, wake):
    def leave():
        raise SystemExit(3)

    executor.submit(leave)
    assert isinstance(_next(executor, wake).error, SystemExit)


def test_ends_can_be_taken_after_close(executor, wake):
    executor.submit(lambda: 7)
    executor.close()
    assert executor.done().value == 7


def test_device_functions_run_in_the_device_thread(wake):
    executor = DeviceExecutor(wake)
    executor.submit(lambda: threading.current_thread().name)
    assert _next(executor, wake).value == "device"
    executor.close()


def test_submit_and_done_do_not_wait_for_a_running_function(wake):
    executor, may_end = DeviceExecutor(wake), threading.Event()
    executor.submit(may_end.wait)
    executor.submit(lambda: "second")
    assert executor.done() is None
    may_end.set()
    assert [_next(executor, wake).value for _ in range(2)] == [True, "second"]
    executor.close()


@pytest.mark.parametrize("executor_type", [DeviceExecutor, InlineExecutor])
def test_torch_threads_are_set_for_the_function_only(executor_type, wake):
    before = torch.get_num_threads()
    executor = executor_type(wake, num_threads=before + 1)
    executor.submit(torch.get_num_threads)
    assert _next(executor, wake).value == before + 1
    executor.close()
    assert torch.get_num_threads() == before


def test_a_closed_device_executor_refuses_work(wake):
    executor = DeviceExecutor(wake)
    executor.close()
    executor.close()
    with pytest.raises(AssertionError, match="after close"):
        executor.submit(lambda: 1)
