"""The JSON of the Open Inference Protocol v2: what an infer body and its answer hold.

`docs/wire-reference.md` is generated from the texts here.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from engine.entrypoints.protocol import UsageParameters


class TensorDoc(NamedTuple):
    """What the wire reference says of an input or output; shapes in words."""

    name: str
    datatype: str
    shape: str
    meaning: str


INPUTS = (
    TensorDoc(
        "user_id", "BYTES or INT64", "[1]",
        "Whose history it is. An INT64 is its decimal text. Required, unless the routing header "
        "names the user; if both do, they must agree.",
    ),
    TensorDoc(
        "history", "INT64", "[n], n >= 0",
        "Item ids of the catalogue, oldest first. Required. Of a delta request only the events "
        "from `base_length` on.",
    ),
    TensorDoc(
        "history_action", "INT64", "[n] or [n - 1]",
        "One action per event, if the model reads actions; [n - 1] when the last one is not known "
        "yet.",
    ),
    TensorDoc(
        "history_<name>", "INT64 or FP32", "[n] or [n, d]",
        "Any further feature of the events that the model declares, `history_time` (seconds since "
        "the epoch) among them.",
    ),
    TensorDoc(
        "candidates", "INT64", "[c], c >= 1",
        "Items to rank; duplicates are legal. Without it the task is retrieve.",
    ),
    TensorDoc(
        "candidate_<name>", "INT64 or FP32", "[c] or [c, d]",
        "A feature of the candidates that the model declares.",
    ),
    TensorDoc("context", "INT64", "[k]", "Contextual features, in the order of the model."),
)  # fmt: skip

OUTPUTS = (
    TensorDoc("scores", "FP32", "[c, num_tasks]", "Rank: a row per candidate, in their order."),
    TensorDoc(
        "items", "INT64", "[k]",
        "Retrieve, or rank with `topk`: the best items, best first, the lower id first when equal.",
    ),
    TensorDoc("item_scores", "FP32", "[k]", "Their scores."),
    TensorDoc("user_embedding", "FP32", "[d]", "Only when it is asked for by name."),
)  # fmt: skip


class TensorParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one input or output; only the binary tensor extension has any.

    Attributes:
        binary_data_size: Input: its values are that many bytes after the JSON, not `data`.
        binary_data: Output: whether its values come as bytes after the JSON; the request's
            `binary_data_output` when not given.
    """

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
    """An output by name."""

    name: str
    parameters: TensorParameters = TensorParameters()


class InferParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a request, over HTTP and gRPC alike.

    Attributes:
        query_time: Seconds since the epoch. Required by models that read it; never replaced by
            the clock.
        namespace: Keeps users of the same id apart.
        task: What is asked for. `rank` when not given and there are candidates, else `retrieve`.
        topk: Rank: also return the best k of the candidates. Retrieve: how many items (10 when
            not given).
        exclude_history: Retrieve: leave items of the history out.
        deadline_ms: Milliseconds from arrival after which the answer is worth nothing.
        timeout: The same in microseconds, as public clients send it. The earlier one counts.
        priority: Lower goes first, with ageing.
        cache: `use` the user's state, `bypass` it (neither read nor written), or `refresh` it
            (recompute and replace).
        history_start: Absolute index of the first event sent, a multiple of the model's
            `keep_stride` (of a delta request: of the history that it extends).
        base_length: A delta request: `history` holds only the events from here on, at least one.
        base_fingerprint: Of that base; both as an earlier answer gave them. If the state is not
            there any more the request ends with 409 `history_needed`: send the whole history.
        ignore_extra: Drop inputs that the model does not read instead of refusing them.
        binary_data_output: Outputs come as bytes unless an output says otherwise. When not given:
            over HTTP as JSON; over gRPC as bytes if any input came so.
    """

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
    binary_data_output: bool | None = None


class InferBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of an infer request."""

    inputs: list[InferInput]
    id: str | None = None
    parameters: InferParameters = InferParameters()
    outputs: list[RequestedOutput] | None = None


class OutputParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Of an output that comes as bytes: how many of those after the JSON are its own."""

    binary_data_size: int


class OutputTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One output tensor: `data` row by row, or `parameters` if its values come as bytes."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: OutputParameters | msgspec.UnsetType = msgspec.UNSET


class InferAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of an answer."""

    model_name: str
    model_version: str
    parameters: UsageParameters
    outputs: list[OutputTensor]
    id: str | None = None
