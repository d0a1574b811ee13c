"""Frames and messages between the front and the core."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import ErrorRecord
from engine.ipc import (
    Cancel,
    CoreSocket,
    Drain,
    Fatal,
    FrameError,
    FrameSplitter,
    Outcomes,
    Start,
    Submit,
    to_core_decoder,
    to_frame,
    to_front_decoder,
)
from engine.types import Outcome, Request, Response, Task, Usage

FATAL = Fatal(error=ErrorRecord(code="engine_dead", message="m", limit=3))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    front, core = socket.socketpair()
    with front, core:
        yield front, core


def test_arrays_survive_the_crossing() -> None:
    arrays = [
        np.arange(5),
        np.zeros(0, np.int64),
        np.zeros((0, 3), np.float32),
        np.array([[1.5, -0.0], [np.inf, 3]], np.float32),
        np.arange(12).reshape(3, 4).T,
    ]
    history = {str(index): array for index, array in enumerate(arrays)}
    request = Request(request_id="r", user_id="u", task=Task.RANK, history=history)
    message = to_core_decoder.decode(to_frame(Submit(request=request))[4:])
    assert isinstance(message, Submit)
    assert message.request.history is not None
    for name, array in history.items():
        crossed = message.request.history[name]
        assert crossed.dtype == array.dtype
        assert crossed.shape == array.shape
        assert crossed.tobytes() == array.tobytes()
        assert not crossed.flags.writeable


def test_outcomes_and_errors_survive_the_crossing() -> None:
    scores = np.array([[0.5]], np.float32)
    response = Response(request_id="a", usage=Usage(computed_tokens=3), scores=scores)
    sent = Outcomes(
        outcomes=[
            Outcome(request_id="a", response=response),
            Outcome(request_id="b", error=FATAL.error),
        ]
    )
    message = to_front_decoder.decode(to_frame(sent)[4:])
    assert isinstance(message, Outcomes)
    first, second = message.outcomes
    assert first.response is not None
    assert first.response.usage == response.usage
    assert first.response.scores is not None
    assert first.response.scores.tolist() == [[0.5]]
    assert second.error == FATAL.error


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_frames_are_found_in_pieces_of_any_size(size: int) -> None:
    stream = to_frame(Drain()) + to_frame(Cancel(request_id="x" * 50)) + to_frame(Drain())
    splitter = FrameSplitter()
    payloads = [
        payload
        for start in range(0, len(stream), size)
        for payload in splitter.feed(stream[start : start + size])
    ]
    kinds = [type(to_core_decoder.decode(payload)) for payload in payloads]
    assert kinds == [Drain, Cancel, Drain]


def test_an_absurd_length_is_refused() -> None:
    with pytest.raises(FrameError, match="4294967295"):
        list(FrameSplitter().feed(b"\xff\xff\xff\xff"))


def test_the_core_s_end_receives_what_is_there(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    front, core_end = pair
    core = CoreSocket(core_end)
    assert core.receive() == []
    front.sendall(to_frame(Start(model_dir=None, config=EngineConfig())) + to_frame(Drain())[:3])
    (start,) = core.receive()
    assert isinstance(start, Start)
    assert start.config == EngineConfig()
    front.sendall(to_frame(Drain())[3:])
    assert isinstance(core.receive()[0], Drain)
    front.close()
    with pytest.raises(EOFError):
        core.receive()


def test_a_front_that_does_not_read_fills_a_bounded_buffer(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    front, core_end = pair
    core = CoreSocket(core_end, max_buffered_bytes=1_000_000)
    response = Response(request_id="r", usage=Usage(), items=np.zeros(1_000_000))
    with pytest.raises(FrameError, match="unread"):
        core.send(Outcomes(outcomes=[Outcome(request_id="r", response=response)]))
    assert core.has_unsent
    front.close()
    with pytest.raises(EOFError):
        core.flush()


def test_unsent_frames_go_out_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    front, core_end = pair
    core = CoreSocket(core_end)
    big = np.arange(200_000)
    request_ids = [f"r{number}" for number in range(5)]
    for request_id in request_ids:
        response = Response(request_id=request_id, usage=Usage(), items=big)
        core.send(Outcomes(outcomes=[Outcome(request_id=request_id, response=response)]))
    assert core.has_unsent
    splitter, received = FrameSplitter(), []
    front.settimeout(10)
    while len(received) < len(request_ids):
        for payload in splitter.feed(front.recv(1 << 16)):
            message = to_front_decoder.decode(payload)
            assert isinstance(message, Outcomes)
            received.append(message.outcomes[0].request_id)
        core.flush()
    assert received == request_ids
    assert not core.has_unsent
