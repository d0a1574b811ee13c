"""The Open Inference Protocol v2, apart from how it travels: one call is one request of one user.

Inputs `user_id`, `history`, `history_<name>`, `candidates`, `candidate_<name>`, `context`;
everything else is a parameter. Outputs are listed by `outputs_of`. `oip_http` (JSON and binary
tensors) and `grpc.messages` bring calls here and carry the answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.entrypoints.oip_schema import InferParameters
from engine.entrypoints.oip_tensors import Tensor, feature_of, user_id_of, vector_of
from engine.entrypoints.protocol import agreed_user
from engine.errors import InvalidRequest
from engine.request_builder import build_request, integer
from engine.types import ModelInfo, Request, Response, Task


class Wanted(NamedTuple):
    """An output that was asked for, and whether as bytes (None: as the request's default says)."""

    name: str
    is_binary: bool | None


class Call(NamedTuple):
    """What was asked, before it is checked.

    `outputs` None: all that the task has. `weights_version` None: the active one. `routed_user`:
    the user id of the routing header, which may stand for the input and must agree with it.
    """

    id: str | None
    tensors: Iterable[Tensor]
    parameters: InferParameters
    outputs: Sequence[Wanted] | None
    weights_version: str | None = None
    routed_user: str | None = None


class InferCall(NamedTuple):
    """An infer request, and what its answer must look like: each output, and if as bytes."""

    request: Request
    id: str | None
    outputs: tuple[tuple[str, bool], ...]


class Output(NamedTuple):
    """One output of an answer. values: float32 or int64, C-contiguous."""

    name: str
    datatype: str
    values: np.ndarray[Any, Any]
    is_binary: bool


class _Features(NamedTuple):
    """The inputs by what they are about."""

    user_id: str | int | None
    history: dict[str, np.ndarray[Any, Any]]
    candidates: dict[str, np.ndarray[Any, Any]]
    context: np.ndarray[Any, Any] | None


def build_infer(
    call: Call,
    info: ModelInfo,
    *,
    request_id: str,
    arrival_s: float,
    timeout_ms: float | None = None,
    binary_default: bool = False,
) -> InferCall:
    """The call as a request. Raises InvalidRequest naming the input, output or parameter.

    Args:
        info: The model that is asked.
        request_id: Used when the call has no `id`.
        arrival_s: Monotonic seconds; deadlines count from here.
        timeout_ms: What the transport leaves; the earliest of all deadlines counts.
        binary_default: Whether outputs are bytes when the parameters do not say.
    """
    features = _features_of(call.tensors)
    parameters = call.parameters
    if not parameters.ignore_extra:
        _check_declared(features, info)
    has_candidates = bool(features.candidates)
    task = Task.RANK if has_candidates else Task.RETRIEVE
    if parameters.task is not None:
        task = Task(parameters.task)
    if parameters.topk is not None and parameters.topk < 1:
        raise InvalidRequest(f"topk is {parameters.topk}: give 1 or more", limit=1)
    if parameters.binary_data_output is not None:
        binary_default = parameters.binary_data_output
    outputs = _outputs(call.outputs, task, parameters.topk is not None, binary_default)
    request = build_request(
        task=task,
        user_id=agreed_user(features.user_id, call.routed_user),
        history=features.history or None,
        candidates=features.candidates or None,
        context=features.context,
        query_time=parameters.query_time,
        namespace=parameters.namespace,
        top_k=parameters.topk,
        exclude_history=parameters.exclude_history,
        return_user_embedding=any(name == "user_embedding" for name, _ in outputs),
        deadline_ms=_deadline_ms(parameters, timeout_ms),
        priority=parameters.priority,
        cache=parameters.cache,
        history_start=parameters.history_start,
        base_length=parameters.base_length,
        base_fingerprint=parameters.base_fingerprint,
        weights_version=call.weights_version,
        ignore_extra=parameters.ignore_extra,
        request_id=call.id or request_id,
        arrival_s=arrival_s,
    )
    return InferCall(request, call.id, outputs)


def _features_of(tensors: Iterable[Tensor]) -> _Features:
    user_id: str | int | None = None
    history: dict[str, np.ndarray[Any, Any]] = {}
    candidates: dict[str, np.ndarray[Any, Any]] = {}
    context = None
    seen: set[str] = set()
    for tensor in tensors:
        name = tensor.name
        if name in seen:
            raise InvalidRequest(f"input {name!r:.80} is there twice: send it once")
        seen.add(name)
        prefix, _, feature = name.partition("_")
        if name == "user_id":
            user_id = user_id_of(tensor)
        elif name == "history":
            history["item"] = vector_of(tensor)
        elif name == "candidates":
            candidates["item"] = vector_of(tensor)
        elif name == "context":
            context = vector_of(tensor)
        elif prefix == "history" and feature not in ("", "item"):
            history[feature] = feature_of(tensor)
        elif prefix == "candidate" and feature not in ("", "item"):
            candidates[feature] = feature_of(tensor)
        else:
            raise InvalidRequest(
                f"input {name!r:.80} is unknown: the inputs are user_id, history, "
                "history_<name>, candidates, candidate_<name> and context"
            )
    _require_items(history, "history", "history")
    _require_items(candidates, "candidates", "candidate")
    return _Features(user_id, history, candidates, context)


def _require_items(features: dict[str, np.ndarray[Any, Any]], name: str, prefix: str) -> None:
    if features and "item" not in features:
        extra = next(iter(features))
        raise InvalidRequest(f"input '{prefix}_{extra}' is there without '{name}': send both")


def _check_declared(features: _Features, info: ModelInfo) -> None:
    on_history = {feature.name for feature in info.features if feature.on_history}
    on_candidates = {feature.name for feature in info.features if feature.on_candidates}
    unread = [f"history_{name}" for name in features.history if name not in on_history]
    unread += [f"candidate_{name}" for name in features.candidates if name not in on_candidates]
    if unread:
        raise InvalidRequest(
            f"input {unread[0]!r} is not read by model {info.name!r}: leave it out, or set "
            "ignore_extra"
        )


def _deadline_ms(parameters: InferParameters, timeout_ms: float | None) -> float | None:
    limits = [limit for limit in (parameters.deadline_ms, timeout_ms) if limit is not None]
    if parameters.timeout is not None:
        limits.append(integer(parameters.timeout, "timeout") / 1000.0)
    return min(limits, default=None)


def outputs_of(task: Task, *, has_topk: bool) -> tuple[str, ...]:
    """Names of the outputs a task has, apart from `user_embedding`."""
    if task is Task.RETRIEVE:
        return ("items", "item_scores")
    return ("scores", "items", "item_scores") if has_topk else ("scores",)


def _outputs(
    wanted: Sequence[Wanted] | None, task: Task, has_topk: bool, binary_default: bool
) -> tuple[tuple[str, bool], ...]:
    own = outputs_of(task, has_topk=has_topk)
    if wanted is None:
        return tuple((name, binary_default) for name in own)
    known = (*own, "user_embedding")
    chosen: dict[str, bool] = {}
    for name, is_binary in wanted:
        if name not in known:
            raise InvalidRequest(
                f"output {name!r:.80} is not there for {task.value}"
                f"{' with topk' if has_topk and task is Task.RANK else ''}: "
                f"the outputs are {', '.join(known)}"
            )
        if name in chosen:
            raise InvalidRequest(f"output {name!r} is asked for twice: name it once")
        chosen[name] = binary_default if is_binary is None else is_binary
    return tuple(chosen.items())


def answer_outputs(call: InferCall, response: Response) -> list[Output]:
    """The outputs asked for, in their order; one that the engine left out is left out."""
    arrays = {
        "scores": response.scores,
        "items": response.items,
        "item_scores": response.item_scores,
        "user_embedding": response.user_embedding,
    }
    outputs = []
    for name, is_binary in call.outputs:
        if (array := arrays[name]) is not None:
            is_int64 = array.dtype == np.int64
            values = np.ascontiguousarray(array, dtype="<i8" if is_int64 else "<f4")
            outputs.append(Output(name, "INT64" if is_int64 else "FP32", values, is_binary))
    return outputs
