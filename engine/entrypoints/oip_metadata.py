"""Model metadata of the Open Inference Protocol: inputs, outputs, limits, reuse mode."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.types import ModelInfo, Task


class TensorMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """One input or output of the model; -1 stands for any extent."""

    name: str
    datatype: str
    shape: list[int]


class ModelParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What this engine says about a model beyond the protocol."""

    tasks: list[str]
    score_names: list[str]
    dtype: str
    reuse: str
    reuse_reason: str
    backend: str
    exactness: str
    cache_tiers: str
    page_size: int
    chunk_size: int
    token_bytes: int
    sample_items: list[int]
    max_history_events: int
    max_history_tokens: int
    max_batch_tokens: int
    keep_stride: int
    reads_query_time: bool
    context_features: list[str]
    is_random: bool


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `GET /v2/models/{model}`."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: ModelParameters


def model_metadata(info: ModelInfo, versions: Sequence[str]) -> ModelMetadata:
    """Inputs, outputs, limits and reuse mode of a loaded model; the versions that may be named."""
    inputs = [
        TensorMetadata(name="user_id", datatype="BYTES", shape=[1]),
        TensorMetadata(name="history", datatype="INT64", shape=[-1]),
    ]
    for feature in info.features:
        if feature.name == "item":
            continue
        datatype = "FP32" if feature.dtype == "float32" else "INT64"
        shape = [-1] if feature.dim == 0 else [-1, feature.dim]
        for is_there, prefix in (
            (feature.on_history, "history"),
            (feature.on_candidates, "candidate"),
        ):
            if is_there:
                inputs.append(
                    TensorMetadata(name=f"{prefix}_{feature.name}", datatype=datatype, shape=shape)
                )
    if info.context_features:
        inputs.append(
            TensorMetadata(name="context", datatype="INT64", shape=[len(info.context_features)])
        )
    outputs = []
    if Task.RANK in info.tasks:
        inputs.append(TensorMetadata(name="candidates", datatype="INT64", shape=[-1]))
        outputs.append(
            TensorMetadata(name="scores", datatype="FP32", shape=[-1, len(info.score_names)])
        )
    outputs.append(TensorMetadata(name="items", datatype="INT64", shape=[-1]))
    outputs.append(TensorMetadata(name="item_scores", datatype="FP32", shape=[-1]))
    if info.embedding_dim:
        outputs.append(
            TensorMetadata(name="user_embedding", datatype="FP32", shape=[info.embedding_dim])
        )
    return ModelMetadata(
        name=info.name,
        versions=list(versions),
        platform="mtserve",
        inputs=inputs,
        outputs=outputs,
        parameters=ModelParameters(
            tasks=[task.value for task in info.tasks],
            score_names=list(info.score_names),
            dtype=info.dtype,
            reuse=info.reuse.value,
            reuse_reason=info.reuse_reason,
            backend=info.backend,
            exactness=info.exactness,
            cache_tiers=info.cache_tiers,
            page_size=info.page_size,
            chunk_size=info.chunk_size,
            token_bytes=info.token_bytes,
            sample_items=list(info.sample_items),
            max_history_events=info.max_history_events,
            max_history_tokens=info.max_history_tokens,
            max_batch_tokens=info.max_batch_tokens,
            keep_stride=info.keep_stride,
            reads_query_time=info.reads_query_time,
            context_features=list(info.context_features),
            is_random=info.is_random,
        ),
    )
