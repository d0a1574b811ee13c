"""Infer bodies that are nearly right: a valid one, and some mutations chosen by a tape of bytes.

Every driver (hypothesis, atheris, the long run) only makes tapes; what a tape means is decided
here, so a tape found by one of them can be replayed by all. The property is `check_http` and
`check_grpc`: decoding gives a request that can be sent to the core, or raises an EngineError below
500 that can be sent to the client. Nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from wire_model import INFO

from engine.entrypoints.grpc import messages
from engine.entrypoints.grpc.inference_pb2 import ModelInferRequest
from engine.entrypoints.oip import InferCall
from engine.entrypoints.oip_http import decode_infer
from engine.entrypoints.protocol import error_body, to_json
from engine.errors import EngineError
from engine.ipc import Submit, to_core_decoder, to_frame

ODD_INTEGERS = (0, 1, -1, 2, 3, 7, 8, 23, 24, 25, 255, 2**31, 2**32, 2**61, 2**62, 2**63 - 1,
                2**63, -(2**63), 2**64 - 1, 2**64 + 3, 2**80, 10**400)  # fmt: skip
ODD_TEXTS = ("", "user_id", "history", "history_", "history_item", "history_mood", "candidates",
             "candidate_mood", "context", "INT64", "FP32", "BYTES", "INT32", "x" * 2000,
             "\x00", "\u00e9", "\U0001f600", "use", "bypass", "rank", "nan")  # fmt: skip
ODD_HEADERS = ("", "0", "1", "-1", "+5", "1e3", " 7", "99999999", "9" * 400, "\u0663", "0x10")
PARAMETERS = ("query_time", "namespace", "task", "topk", "exclude_history", "deadline_ms",
              "timeout", "priority", "cache", "history_start", "base_length",
              "base_fingerprint", "ignore_extra", "binary_data_output", "odd")  # fmt: skip


class Tape:
    """Choices out of bytes; all of them the first one when the tape has run out."""

    def __init__(self, tape: bytes) -> None:
        self._tape = tape
        self._at = 0

    def below(self, limit: int) -> int:
        """A number in [0, limit), limit at most 65536."""
        taken = self._tape[self._at : self._at + 2]
        self._at += 2
        return int.from_bytes(taken, "little") % limit

    def one_of(self, choices: Any) -> Any:
        return choices[self.below(len(choices))]

    def odd(self) -> Any:
        """Some value that a field may not expect."""
        kind = self.below(8)
        if kind < 3:
            return self.one_of(ODD_INTEGERS)
        if kind < 5:
            return self.one_of(ODD_TEXTS)
        return self.one_of((True, None, 1.5, -0.0, 1e300, [], [[1]], {}, [1, "a"], {"a": 1}))


class Sent:
    """A body while it is built: inputs with their values apart."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        count = tape.one_of((0, 1, 3, 16))
        items = np.arange(count, dtype="<i8") * 3 - 1
        mood = np.ones((count, 2), "<f4")
        user = b"u1" if tape.below(4) else "\u00e9".encode()
        self.inputs: list[dict[str, Any]] = []
        self.values: list[bytes] = []
        self.add("user_id", "BYTES", [1], struct.pack("<I", len(user)) + user)
        self.add("history", "INT64", [count], items.tobytes())
        if tape.below(2):
            self.add("candidates", "INT64", [3], struct.pack("<3q", 4, 9, 4))
        if tape.below(2):
            self.add("history_mood", "FP32", [count, 2], mood.tobytes())
        self.members: dict[str, Any] = {"inputs": self.inputs, "parameters": {}}

    def add(self, name: str, datatype: str, shape: list[int], values: bytes) -> None:
        self.inputs.append({"name": name, "datatype": datatype, "shape": shape})
        self.values.append(values)

    def mutate(self) -> None:
        """Change one thing."""
        tape = self.tape
        at = tape.below(len(self.inputs)) if self.inputs else 0
        kind = tape.below(10)
        if kind == 0:
            self.members["parameters"][tape.one_of(PARAMETERS)] = tape.odd()
        elif kind == 1:
            self.members[tape.one_of(("id", "inputs", "outputs", "odd"))] = tape.odd()
        elif kind == 2:
            names = ("scores", "items", "item_scores", "user_embedding", "odd")
            outputs = [{"name": tape.one_of(names)} for _ in range(tape.below(4))]
            self.members["outputs"] = outputs
        elif not self.inputs:
            self.add(tape.one_of(ODD_TEXTS), tape.one_of(ODD_TEXTS), [tape.below(9)], b"\0" * 8)
        elif kind == 3:
            self.inputs[at][tape.one_of(("name", "datatype"))] = tape.one_of(ODD_TEXTS)
        elif kind == 4:
            shape = [tape.one_of(ODD_INTEGERS) for _ in range(tape.one_of((0, 1, 1, 2, 3, 500)))]
            self.inputs[at]["shape"] = shape
        elif kind == 5:
            cut = tape.below(len(self.values[at]) + 1)
            self.values[at] = self.values[at][:cut] + bytes(tape.below(9))
        elif kind == 6:
            values = bytearray(self.values[at])
            for _ in range(tape.below(4) + 1 if values else 0):
                values[tape.below(len(values))] = tape.below(256)
            self.values[at] = bytes(values)
        elif kind == 7:
            self.inputs.append(dict(self.inputs[at]))
            self.values.append(self.values[at])
        elif kind == 8:
            del self.inputs[at], self.values[at]
        else:
            self.inputs[at][tape.one_of(("data", "parameters", "odd", "shape"))] = tape.odd()


def _flipped(tape: Tape, content: bytes) -> bytes:
    """The content with some of its bytes changed, cut or doubled."""
    changed = bytearray(content)
    for _ in range(tape.one_of((0, 0, 0, 1, 4))):
        at = tape.below(min(len(changed), 65536)) if changed else 0
        kind = tape.below(4)
        if kind == 0:
            del changed[at:]
        elif kind == 1:
            changed[at:at] = changed[at : at + tape.below(40)]
        elif changed:
            changed[at] = tape.below(256)
    return bytes(changed)


def http_case(content: bytes) -> tuple[bytes, str | None]:
    """A body, and the header that tells the length of its JSON (None: no such header)."""
    tape = Tape(content)
    sent = Sent(tape)
    tails: list[bytes] = []
    for _ in range(tape.one_of((0, 1, 1, 2, 4))):
        sent.mutate()
    for tensor, values in zip(sent.inputs, sent.values, strict=True):
        if tape.below(5) == 0 and tensor.get("datatype") == "INT64" and len(values) % 8 == 0:
            tensor.setdefault("data", np.frombuffer(values, "<i8").tolist())
            continue
        size = tape.odd() if tape.below(20) == 0 else len(values)
        tensor.setdefault("parameters", {"binary_data_size": size})
        tails.append(values)
    encoded = _flipped(tape, json.dumps(sent.members).encode())
    header: str | None = str(len(encoded))
    if tape.below(10) == 0:
        header = tape.one_of((None, *ODD_HEADERS))
    return encoded + _flipped(tape, b"".join(tails)), header


def grpc_case(content: bytes) -> bytes:
    """Bytes of a ModelInferRequest, or nearly."""
    tape = Tape(content)
    sent = Sent(tape)
    for _ in range(tape.one_of((0, 1, 1, 2, 4))):
        sent.mutate()
    message = ModelInferRequest(model_name="m")
    is_raw = tape.below(4) > 0
    for tensor, values in zip(sent.inputs, sent.values, strict=True):
        shape = [extent for extent in _listed(tensor["shape"]) if _is_int64(extent)]
        made = message.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=shape)
        if is_raw:
            message.raw_input_contents.append(values)
        if tape.below(4) == (1 if is_raw else 0):
            continue
        if not is_raw or tape.below(20) == 0:
            _fill(tape, made, values)
    parameters = sent.members["parameters"]
    for name, value in parameters.items():
        _set(message.parameters[name], value)
    for output in _listed(sent.members.get("outputs")):
        if isinstance(output, dict) and isinstance(output.get("name"), str):
            message.outputs.add(name=output["name"])
    return _flipped(tape, message.SerializeToString())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _fill(tape: Tape, tensor: Any, values: bytes) -> None:
    kind = tape.below(4)
    if kind == 0:
        tensor.contents.bytes_contents.append(values[4:])
    elif kind == 1:
        tensor.contents.fp32_contents.extend(np.frombuffer(values[: len(values) & ~3], "<f4"))
    elif kind == 2:
        tensor.contents.int64_contents.extend(np.frombuffer(values[: len(values) & ~7], "<i8"))
    else:
        tensor.contents.uint_contents.extend(values)


def _set(parameter: Any, value: Any) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif _is_int64(value):
        parameter.int64_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.SetInParent()


def _check(decode: Callable[[], InferCall]) -> bool:
    """Whether it is a request; fails on anything but a request and a client's error."""
    try:
        call = decode()
    except EngineError as raised:
        refusal = raised
    else:
        _check_sendable(call)
        return True
    assert 400 <= refusal.status < 500, refusal
    assert refusal.message
    to_json(error_body(refusal, "r"))
    return False


def _check_sendable(call: InferCall) -> None:
    frame = to_frame(Submit(request=call.request))
    received = to_core_decoder.decode(frame[4:])
    assert isinstance(received, Submit)
    assert received.request.user_id == call.request.user_id


def check_http(tape: bytes) -> bool:
    """Decode the HTTP body of a tape; whether it is a request."""
    body, header = http_case(tape)
    return _check(
        lambda: decode_infer(body, INFO, request_id="r", arrival_s=1.0, header_length=header)
    )


def check_grpc(tape: bytes) -> bool:
    """Decode the gRPC message of a tape; whether it is a request."""
    content = grpc_case(tape)
    return _check(
        lambda: messages.decode_request(
            messages.parse_request(content), INFO, request_id="r", arrival_s=1.0
        )
    )
