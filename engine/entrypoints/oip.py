"""Open Inference Protocol v2, JSON: one request is one user, one body is one request.

Inputs `user_id`, `history`, `history_<name>`, `candidates`, `candidate_<name>`, `context`;
everything else is a parameter. Outputs are listed by `outputs_of`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from engine.entrypoints.protocol import (
    UsageParameters,
    decode_column,
    decode_integers,
    decode_json,
    decode_numbers,
    usage_parameters,
)
from engine.errors import InvalidRequest
from engine.request_builder import build_request, integer
from engine.types import ModelInfo, Request, Response, Task


class TensorParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one input or output, of the binary tensor extension."""

    binary_data_size: int | None = None
    binary_data: bool | None = None


class InferInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One input tensor; `data` is decoded by its datatype."""

    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: TensorParameters = TensorParameters()


class RequestedOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An output by name. `binary_data` is a wish; JSON is always an answer to it."""

    name: str
    parameters: TensorParameters = TensorParameters()


class InferParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request parameters. `timeout` (microseconds) is what public clients call `deadline_ms`."""

    query_time: int | None = None
    namespace: str = ""
    task: Literal["rank", "retrieve"] | None = None
    topk: int | None = None
    exclude_history: bool = False
    deadline_ms: float | None = None
    timeout: int | None = None
    priority: int = 0
    cache: str = "use"
    history_start: int = 0
    base_length: int = 0
    base_fingerprint: str = ""
    ignore_extra: bool = False
    binary_data_output: bool = False


class InferBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of an infer request."""

    inputs: list[InferInput]
    id: str | None = None
    parameters: InferParameters = InferParameters()
    outputs: list[RequestedOutput] | None = None


class OutputTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One output tensor, values row by row."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any]


class InferAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of an answer."""

    model_name: str
    model_version: str
    parameters: UsageParameters
    outputs: list[OutputTensor]
    id: str | None = None


class InferCall(NamedTuple):
    """An infer request, and what its answer must look like."""

    request: Request
    id: str | None
    output_names: tuple[str, ...] | None


_body_decoder = msgspec.json.Decoder(InferBody)
_text_decoder = msgspec.json.Decoder(list[str])


def decode_infer(body: bytes, info: ModelInfo, *, request_id: str, arrival_s: float) -> InferCall:
    """An infer body as a request. Raises InvalidRequest naming the input or parameter.

    Args:
        info: The model that is asked.
        request_id: Used when the body has no `id`.
        arrival_s: Monotonic seconds; deadlines count from here.
    """
    parsed = decode_json(_body_decoder, body, "the body")
    inputs: dict[str, InferInput] = {}
    for tensor in parsed.inputs:
        if tensor.name in inputs:
            raise InvalidRequest(f"input {tensor.name!r} is there twice: send it once")
        inputs[tensor.name] = tensor
    if "user_id" not in inputs:
        raise InvalidRequest("input 'user_id' is missing: send BYTES [1] or INT64 [1]")
    history: dict[str, np.ndarray] = {}
    candidates: dict[str, np.ndarray] = {}
    context = None
    user_id: str | int = ""
    for name, tensor in inputs.items():
        match name.partition("_"):
            case ("user", _, "id"):
                user_id = _decode_user_id(tensor)
            case ("history", "", ""):
                history["item"] = _decode_int64(tensor)
            case ("candidates", "", ""):
                candidates["item"] = _decode_int64(tensor)
            case ("context", "", ""):
                context = _decode_int64(tensor)
            case ("history", "_", feature) if feature and feature != "item":
                history[feature] = _decode_feature(tensor)
            case ("candidate", "_", feature) if feature and feature != "item":
                candidates[feature] = _decode_feature(tensor)
            case _:
                raise InvalidRequest(
                    f"input {name!r} is unknown: the inputs are user_id, history, history_<name>, "
                    "candidates, candidate_<name> and context"
                )
    _require_items(history, "history", "history")
    _require_items(candidates, "candidates", "candidate")
    parameters = parsed.parameters
    if not parameters.ignore_extra:
        _check_declared(history, candidates, info)
    task = _task(parameters.task, has_candidates=bool(candidates))
    if parameters.topk is not None and parameters.topk < 1:
        raise InvalidRequest(f"topk is {parameters.topk}: give 1 or more", limit=1)
    names = None if parsed.outputs is None else tuple(output.name for output in parsed.outputs)
    _check_outputs(names, task, has_topk=parameters.topk is not None)
    request = build_request(
        task=task,
        user_id=user_id,
        history=history or None,
        candidates=candidates or None,
        context=context,
        query_time=parameters.query_time,
        namespace=parameters.namespace,
        top_k=parameters.topk,
        exclude_history=parameters.exclude_history,
        return_user_embedding=names is not None and "user_embedding" in names,
        deadline_ms=_deadline_ms(parameters),
        priority=parameters.priority,
        cache=parameters.cache,
        history_start=parameters.history_start,
        base_length=parameters.base_length,
        base_fingerprint=parameters.base_fingerprint,
        ignore_extra=parameters.ignore_extra,
        request_id=parsed.id or request_id,
        arrival_s=arrival_s,
    )
    return InferCall(request, parsed.id, names)


def _task(task: str | None, *, has_candidates: bool) -> Task:
    if task is None:
        return Task.RANK if has_candidates else Task.RETRIEVE
    return Task(task)


def _deadline_ms(parameters: InferParameters) -> float | None:
    if parameters.timeout is None:
        return parameters.deadline_ms
    timeout_ms = integer(parameters.timeout, "timeout") / 1000.0
    if parameters.deadline_ms is None:
        return timeout_ms
    return min(parameters.deadline_ms, timeout_ms)


def _require_items(features: dict[str, np.ndarray], name: str, prefix: str) -> None:
    if features and "item" not in features:
        extra = next(iter(features))
        raise InvalidRequest(f"input '{prefix}_{extra}' is there without '{name}': send both")


def _check_declared(
    history: dict[str, np.ndarray], candidates: dict[str, np.ndarray], info: ModelInfo
) -> None:
    on_history = {feature.name for feature in info.features if feature.on_history}
    on_candidates = {feature.name for feature in info.features if feature.on_candidates}
    unread = [f"history_{name}" for name in history if name not in on_history]
    unread += [f"candidate_{name}" for name in candidates if name not in on_candidates]
    if unread:
        raise InvalidRequest(
            f"input {unread[0]!r} is not read by model {info.name!r}: leave it out, or set "
            "ignore_extra"
        )


def outputs_of(task: Task, *, has_topk: bool) -> tuple[str, ...]:
    """Names of the outputs a task has, apart from `user_embedding`."""
    if task is Task.RETRIEVE:
        return ("items", "item_scores")
    return ("scores", "items", "item_scores") if has_topk else ("scores",)


def _check_outputs(names: tuple[str, ...] | None, task: Task, *, has_topk: bool) -> None:
    known = (*outputs_of(task, has_topk=has_topk), "user_embedding")
    for name in names or ():
        if name not in known:
            raise InvalidRequest(
                f"output {name!r} is not there for {task.value}"
                f"{' with topk' if has_topk and task is Task.RANK else ''}: "
                f"the outputs are {', '.join(known)}"
            )


# Inputs


def _raw_data(tensor: InferInput) -> msgspec.Raw:
    if tensor.parameters.binary_data_size is not None or tensor.data is msgspec.UNSET:
        raise InvalidRequest(
            f"input {tensor.name!r} has no JSON data: binary tensors are not accepted, "
            "send `data` (tritonclient: binary_data=False)"
        )
    return tensor.data


def _decode_user_id(tensor: InferInput) -> str | int:
    if tensor.datatype == "BYTES":
        texts = decode_json(_text_decoder, _raw_data(tensor), "input 'user_id'")
        _check_shape(tensor, len(texts))
        _require_one(tensor)
        return texts[0]
    if tensor.datatype == "INT64":
        numbers = decode_integers(_raw_data(tensor), "input 'user_id'")
        _check_shape(tensor, numbers.size)
        _require_one(tensor)
        return int(numbers[0])
    raise _wrong_datatype(tensor, "BYTES or INT64")


def _require_one(tensor: InferInput) -> None:
    if tensor.shape != [1]:
        raise InvalidRequest(
            f"input {tensor.name!r} has shape {tensor.shape}: send [1], one request is one user "
            "(several users: POST /v1/rank)"
        )


def _decode_int64(tensor: InferInput) -> np.ndarray:
    if tensor.datatype != "INT64":
        raise _wrong_datatype(tensor, "INT64")
    values = decode_integers(_raw_data(tensor), f"input {tensor.name!r}")
    _check_shape(tensor, values.size)
    if len(tensor.shape) != 1:
        raise InvalidRequest(
            f"input {tensor.name!r} has shape {tensor.shape}: send [n], one request is one user"
        )
    return values


def _decode_feature(tensor: InferInput) -> np.ndarray:
    field = f"input {tensor.name!r}"
    if tensor.datatype == "INT64":
        values = decode_column(_raw_data(tensor), field)
        if values.dtype != np.int64:
            raise InvalidRequest(f"{field} is INT64 but has fractions: send integers, or FP32")
    elif tensor.datatype == "FP32":
        values = decode_numbers(_raw_data(tensor), field)
    else:
        raise _wrong_datatype(tensor, "INT64 or FP32")
    if values.ndim == 2 and list(values.shape) != tensor.shape:
        raise InvalidRequest(
            f"{field} has shape {tensor.shape} but its data has {list(values.shape)}"
        )
    _check_shape(tensor, values.size)
    if len(tensor.shape) not in (1, 2):
        raise InvalidRequest(f"{field} has shape {tensor.shape}: send [n] or [n, d]")
    try:
        return values.reshape(tensor.shape)
    except (ValueError, OverflowError):  # no values, and more than an array can have of them
        raise InvalidRequest(f"{field} has shape {tensor.shape}: that is too large") from None


def _check_shape(tensor: InferInput, count: int) -> None:
    if any(extent < 0 for extent in tensor.shape) or math.prod(tensor.shape) != count:
        raise InvalidRequest(
            f"input {tensor.name!r} has shape {tensor.shape} but {count} values: they must agree",
            value=count,
        )


def _wrong_datatype(tensor: InferInput, expected: str) -> InvalidRequest:
    return InvalidRequest(
        f"input {tensor.name!r} has datatype {tensor.datatype!r}: send {expected}"
    )


# Answers


def encode_infer(call: InferCall, response: Response, model_name: str) -> InferAnswer:
    """The answer's body: the outputs asked for, or all that the task has."""
    request = call.request
    names = call.output_names
    if names is None:
        names = outputs_of(request.task, has_topk=request.top_k is not None)
    arrays = {
        "scores": response.scores,
        "items": response.items,
        "item_scores": response.item_scores,
        "user_embedding": response.user_embedding,
    }
    return InferAnswer(
        model_name=model_name,
        model_version=response.usage.weights_version,
        id=call.id,
        parameters=usage_parameters(response.usage),
        outputs=[_output(name, array) for name in names if (array := arrays[name]) is not None],
    )


def _output(name: str, array: np.ndarray) -> OutputTensor:
    return OutputTensor(
        name=name,
        datatype="INT64" if array.dtype == np.int64 else "FP32",
        shape=list(array.shape),
        data=array.ravel().tolist(),
    )
