"""Open Inference Protocol v2 over HTTP: JSON, and the binary tensor extension.

A body with binary tensors is JSON of the length that the header `Inference-Header-Content-Length`
tells, then the values of each input with `binary_data_size`, in the order of the inputs, with
nothing between or after them. Answers are made in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from engine.entrypoints.oip import Call, InferCall, Wanted, answer_outputs, build_infer
from engine.entrypoints.oip_schema import (
    InferAnswer,
    InferBody,
    InferInput,
    OutputParameters,
    OutputTensor,
)
from engine.entrypoints.oip_tensors import Tensor
from engine.entrypoints.protocol import decode_json, to_json, usage_parameters
from engine.errors import InvalidRequest
from engine.types import ModelInfo, Response

HEADER_LENGTH = b"inference-header-content-length"

_body_decoder = msgspec.json.Decoder(InferBody)


class InferReply(NamedTuple):
    """A body to send. `json_bytes` is the length of its JSON if binary tensors follow it."""

    body: bytes
    json_bytes: int | None


def decode_infer(
    body: bytes,
    info: ModelInfo,
    *,
    request_id: str,
    arrival_s: float,
    header_length: str | None = None,
    weights_version: str | None = None,
    routed_user: str | None = None,
) -> InferCall:
    """An infer body as a request. Raises InvalidRequest naming the input or parameter.

    Arrays of binary inputs are views of the body.

    Args:
        info: The model that is asked.
        request_id: Used when the body has no `id`.
        arrival_s: Monotonic seconds; deadlines count from here.
        header_length: Value of the header `Inference-Header-Content-Length`, if there is one.
        weights_version: The one that the path names, if it does.
        routed_user: The user id of the routing header, if there is one.
    """
    json_part, binary_part = _split(body, header_length)
    parsed = decode_json(_body_decoder, json_part, "the body")
    outputs = None
    if parsed.outputs is not None:
        outputs = [Wanted(one.name, one.parameters.binary_data) for one in parsed.outputs]
    tensors = list(_tensors(parsed.inputs, binary_part))
    call = Call(parsed.id, tensors, parsed.parameters, outputs, weights_version, routed_user)
    return build_infer(call, info, request_id=request_id, arrival_s=arrival_s)


def _split(body: bytes, header_length: str | None) -> tuple[bytes | memoryview, memoryview | None]:
    """The JSON, and what follows it (None: the body is JSON only)."""
    if header_length is None:
        return body, None
    if not (header_length.isascii() and header_length.isdecimal()):
        raise InvalidRequest(
            f"Inference-Header-Content-Length is {header_length!r:.40}: give the number of bytes "
            "of the JSON"
        )
    length = int(header_length) if len(header_length) < 20 else len(body) + 1
    if length > len(body):
        raise InvalidRequest(
            f"Inference-Header-Content-Length is {header_length:.40}, but the body has "
            f"{len(body)} bytes: give the length of the JSON at its start",
            limit=len(body),
            value=length,
        )
    view = memoryview(body)
    return view[:length], view[length:]


def _tensors(inputs: list[InferInput], binary_part: memoryview | None) -> Iterator[Tensor]:
    """The inputs with their values. Raises InvalidRequest; for surplus bytes at the end."""
    start = 0
    for tensor in inputs:
        name, size = tensor.name, tensor.parameters.binary_data_size
        if size is None:
            if tensor.data is msgspec.UNSET:
                raise InvalidRequest(
                    f"input {name!r:.80} has no values: send `data`, or binary values with the "
                    "parameter binary_data_size"
                )
            yield Tensor(name, tensor.datatype, tensor.shape, tensor.data)
            continue
        if tensor.data is not msgspec.UNSET:
            raise InvalidRequest(
                f"input {name!r:.80} has both `data` and binary_data_size: send one of them"
            )
        if binary_part is None:
            raise InvalidRequest(
                f"input {name!r:.80} has binary_data_size, but the request has no header "
                "Inference-Header-Content-Length: send the length of the JSON in it"
            )
        left = len(binary_part) - start
        if not 0 <= size <= left:
            raise InvalidRequest(
                f"input {name!r:.80} has a binary_data_size of {size}, but {left} bytes are left "
                "after the JSON and the inputs before it",
                limit=left,
                value=size if abs(size) < 1 << 63 else None,
            )
        yield Tensor(name, tensor.datatype, tensor.shape, binary_part[start : start + size])
        start += size
    if binary_part is not None and start != len(binary_part):
        raise InvalidRequest(
            f"{len(binary_part)} bytes follow the JSON, but the inputs' binary_data_size add up "
            f"to {start}: they must agree",
            limit=start,
            value=len(binary_part),
        )


def encode_infer(call: InferCall, response: Response, model_name: str) -> InferReply:
    """The answer's body: the outputs asked for, or all that the task has."""
    outputs: list[OutputTensor] = []
    tails: list[bytes | memoryview] = []
    for name, datatype, values, is_binary in answer_outputs(call, response):
        shape = list(values.shape)
        if is_binary:
            tails.append(values.reshape(-1).data.cast("B") if values.size else b"")
            parameters = OutputParameters(binary_data_size=values.nbytes)
            outputs.append(
                OutputTensor(name=name, datatype=datatype, shape=shape, parameters=parameters)
            )
        else:
            flat = values.reshape(-1).tolist()
            outputs.append(OutputTensor(name=name, datatype=datatype, shape=shape, data=flat))
    answer = InferAnswer(
        model_name=model_name,
        model_version=response.usage.weights_version,
        id=call.id,
        parameters=usage_parameters(response.usage),
        outputs=outputs,
    )
    content = to_json(answer)
    if not tails:
        return InferReply(content, None)
    return InferReply(b"".join((content, *tails)), len(content))
