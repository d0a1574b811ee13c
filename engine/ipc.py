"""Messages between a front (asyncio) and its core (a process of its own).

A message travels as four bytes of length, little-endian, then msgpack; arrays are raw bytes. Both
ends read whenever there is something to read, so neither can block the other for long; what one
end has not taken yet is bounded at the other one.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from engine.commands import Command, Reply, ServedWeights
from engine.config import EngineConfig
from engine.errors import ErrorRecord
from engine.types import CoreStats, Outcome, Request, decoder, encode

MAX_FRAME_BYTES = 1 << 30
_READ_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    pass


class Start(_Message, frozen=True, tag="start"):
    """First message to a core. `model_dir` None asks for the built-in random model."""

    model_dir: str | None
    config: EngineConfig


class Submit(_Message, frozen=True, tag="submit"):
    request: Request


class Cancel(_Message, frozen=True, tag="cancel"):
    request_id: str


class Run(_Message, frozen=True, tag="run"):
    """A command; its `Done` has the same ticket."""

    ticket: str
    command: Command


class Drain(_Message, frozen=True, tag="drain"):
    """Take nothing new; say Drained when the last request has been answered."""


class Shutdown(_Message, frozen=True, tag="shutdown"):
    """End what is left with `Draining` and exit."""


class Ready(_Message, frozen=True, tag="ready"):
    """The core serves."""

    weights: ServedWeights


class WeightsChanged(_Message, frozen=True, tag="weights_changed"):
    """Said before the reply to the command that changed them."""

    weights: ServedWeights


class Outcomes(_Message, frozen=True, tag="outcomes"):
    outcomes: list[Outcome]


class Done(_Message, frozen=True, tag="done"):
    reply: Reply


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    """The core's loop was alive at `sent_s`, monotonic seconds; `stats` are of that moment."""

    sent_s: float
    stats: CoreStats


class Drained(_Message, frozen=True, tag="drained"):
    pass


class Fatal(_Message, frozen=True, tag="fatal"):
    """The core ends now and says why."""

    error: ErrorRecord


ToCore: TypeAlias = Start | Submit | Cancel | Run | Drain | Shutdown
ToFront: TypeAlias = Ready | WeightsChanged | Outcomes | Done | Heartbeat | Drained | Fatal

to_core_decoder: msgspec.msgpack.Decoder[ToCore] = decoder(ToCore)  # type: ignore[arg-type]
to_front_decoder: msgspec.msgpack.Decoder[ToFront] = decoder(ToFront)  # type: ignore[arg-type]


class FrameError(Exception):
    """The other end does not speak this protocol, or does not read."""


def to_frame(message: ToCore | ToFront) -> bytes:
    """The message with its length in front."""
    payload = encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a message has {len(payload)} bytes, the limit is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class FrameSplitter:
    """Bytes in, whole payloads out. Owned by one reader."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Payloads that are complete now. Raises FrameError for an absurd length."""
        buffer = self._buffer
        buffer += received
        start = 0
        try:
            while len(buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"a frame of {length} bytes was announced")
                stop = start + _LENGTH.size + length
                if len(buffer) < stop:
                    break
                yield bytes(memoryview(buffer)[start + _LENGTH.size : stop])
                start = stop
        finally:
            del buffer[:start]


class CoreSocket:
    """The core's end: never blocks. Owned by the core's loop thread.

    Frames that the front has not taken yet wait here, up to `max_buffered_bytes`; beyond that the
    front is taken for dead (a live one always reads).
    """

    def __init__(self, sock: socket.socket, max_buffered_bytes: int = 1 << 30) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._splitter = FrameSplitter()
        self._frames: deque[memoryview] = deque()
        self._buffered_bytes = 0
        self._max_buffered_bytes = max_buffered_bytes

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._frames)

    def receive(self) -> list[ToCore]:
        """What has arrived, [] if nothing. Raises EOFError when the front has gone."""
        try:
            received = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            raise EOFError from None
        if not received:
            raise EOFError
        return [to_core_decoder.decode(payload) for payload in self._splitter.feed(received)]

    def send(self, message: ToFront) -> None:
        """Queue a message and send what the socket takes. Raises EOFError, FrameError."""
        frame = to_frame(message)
        self._frames.append(memoryview(frame))
        self._buffered_bytes += len(frame)
        self.flush()
        if self._buffered_bytes > self._max_buffered_bytes:
            raise FrameError(f"the front has left {self._buffered_bytes} bytes unread")

    def flush(self) -> None:
        """Send what the socket takes. Raises EOFError when the front has gone."""
        while self._frames:
            try:
                sent = self._socket.send(self._frames[0])
            except BlockingIOError:
                return
            except ConnectionError:
                raise EOFError from None
            self._buffered_bytes -= sent
            if sent == len(self._frames[0]):
                self._frames.popleft()
            else:
                self._frames[0] = self._frames[0][sent:]

    def flush_within(self, timeout_s: float) -> None:
        """Send everything, waiting at most `timeout_s` for each part. Only for the end."""
        self._socket.settimeout(timeout_s)
        try:
            while self._frames:
                self._socket.sendall(self._frames.popleft())
        except OSError:
            self._frames.clear()
