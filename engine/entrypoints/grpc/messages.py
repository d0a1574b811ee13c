"""Between the protocol's protobuf messages and the engine's requests and answers.

Nothing here knows of connections: bytes in, a request out; an answer in, a message out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from engine.entrypoints.grpc.inference_pb2 import (
    InferParameter,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
)
from engine.entrypoints.oip import Call, InferCall, Wanted, answer_outputs, build_infer
from engine.entrypoints.oip_metadata import model_metadata
from engine.entrypoints.oip_schema import InferParameters
from engine.entrypoints.oip_tensors import Tensor, TensorData
from engine.entrypoints.protocol import usage_parameters
from engine.errors import InvalidRequest
from engine.types import ModelInfo, Response

_EMPTY = memoryview(b"")
_NUMBERS = {"int64_contents": np.int64, "fp32_contents": np.float32}


def parse_request(content: bytes) -> ModelInferRequest:
    """The message in these bytes. Raises InvalidRequest."""
    try:
        message: ModelInferRequest = ModelInferRequest.FromString(content)
    except DecodeError:
        raise InvalidRequest("the message is no ModelInferRequest of the protocol v2") from None
    return message


def decode_request(
    message: ModelInferRequest,
    info: ModelInfo,
    *,
    request_id: str,
    arrival_s: float,
    timeout_ms: float | None = None,
    routed_user: str | None = None,
) -> InferCall:
    """The message as a request. Raises InvalidRequest naming the input or parameter.

    Arrays of raw inputs are views of the message's bytes. The answer's outputs come as bytes if
    the inputs did, unless `binary_data_output` says otherwise.

    Args:
        info: The model that is asked.
        request_id: Used when the message has no `id`.
        arrival_s: Monotonic seconds; deadlines count from here.
        timeout_ms: What the caller's own deadline leaves.
        routed_user: The user id of the routing metadata, if there is any.
    """
    parameters = _parameters_of(message.parameters)
    wanted = [_wanted(output) for output in message.outputs] or None
    call = Call(
        message.id or None,
        _tensors(message),
        parameters,
        wanted,
        message.model_version or None,
        routed_user,
    )
    return build_infer(
        call,
        info,
        request_id=request_id,
        arrival_s=arrival_s,
        timeout_ms=timeout_ms,
        binary_default=bool(message.raw_input_contents),
    )


def _parameters_of(sent: Mapping[str, InferParameter]) -> InferParameters:
    values: dict[str, bool | int | str | float] = {}
    for name, parameter in sent.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"parameter {name!r:.80} has no value: set one or leave it out")
        values[name] = getattr(parameter, kind)
    try:
        return msgspec.convert(values, InferParameters)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the parameters: {error}") from None


def _wanted(output: ModelInferRequest.InferRequestedOutputTensor) -> Wanted:
    if output.parameters:
        raise InvalidRequest(
            f"output {output.name!r:.80} has the parameter {next(iter(output.parameters))!r:.80}: "
            "over gRPC outputs have none, all come as binary_data_output says"
        )
    return Wanted(output.name, None)


def _tensors(message: ModelInferRequest) -> Iterator[Tensor]:
    """The inputs with their values. Raises InvalidRequest."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} entries for {len(message.inputs)} inputs: send "
            "one per input, or none",
            limit=len(message.inputs),
            value=len(raw),
        )
    for index, tensor in enumerate(message.inputs):
        name = tensor.name
        if tensor.parameters:
            raise InvalidRequest(
                f"input {name!r:.80} has the parameter {next(iter(tensor.parameters))!r:.80}: "
                "over gRPC inputs have none"
            )
        if not raw:
            values = _typed(tensor)
        elif tensor.HasField("contents"):
            raise InvalidRequest(
                f"input {name!r:.80} has contents beside raw_input_contents: send one of them"
            )
        else:
            values = memoryview(raw[index])
        yield Tensor(name, tensor.datatype, tuple(tensor.shape), values)


def _typed(tensor: ModelInferRequest.InferInputTensor) -> TensorData:
    filled = tensor.contents.ListFields()
    if not filled:
        return _EMPTY
    if len(filled) > 1:
        raise InvalidRequest(
            f"input {tensor.name!r:.80} has contents of {len(filled)} types: fill the one of its "
            "datatype",
            limit=1,
            value=len(filled),
        )
    ((field, values),) = filled
    if field.name == "bytes_contents":
        return list(values)
    if field.name not in _NUMBERS:
        raise InvalidRequest(
            f"input {tensor.name!r:.80} has {field.name}: fill int64_contents, fp32_contents or "
            "bytes_contents, or send raw_input_contents"
        )
    return np.fromiter(values, _NUMBERS[field.name], len(values))


def encode_response(call: InferCall, response: Response, model_name: str) -> ModelInferResponse:
    """The answer's message: the outputs asked for, all as bytes or all as typed contents."""
    answer = ModelInferResponse(
        model_name=model_name, model_version=response.usage.weights_version, id=call.id or ""
    )
    usage = msgspec.structs.asdict(usage_parameters(response.usage))
    for name, value in usage.items():
        if isinstance(value, str):
            answer.parameters[name].string_param = value
        else:
            answer.parameters[name].int64_param = value
    for name, datatype, values, is_binary in answer_outputs(call, response):
        output = answer.outputs.add(name=name, datatype=datatype, shape=values.shape)
        if is_binary:
            answer.raw_output_contents.append(values.tobytes())
        elif datatype == "INT64":
            output.contents.int64_contents.extend(values.reshape(-1).tolist())
        else:
            output.contents.fp32_contents.extend(values.reshape(-1).tolist())
    return answer


def metadata_message(info: ModelInfo, versions: Sequence[str]) -> ModelMetadataResponse:
    """What `GET /v2/models/{model}` tells, as far as the protocol's message has room for it."""
    metadata = model_metadata(info, versions)
    answer = ModelMetadataResponse(
        name=metadata.name, versions=metadata.versions, platform=metadata.platform
    )
    for tensors, field in ((metadata.inputs, answer.inputs), (metadata.outputs, answer.outputs)):
        for tensor in tensors:
            field.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return answer
