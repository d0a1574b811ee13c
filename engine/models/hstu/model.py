"""HSTU as a `Model`: host face, layers and heads put together."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from engine.attention_backends.base import AttentionBackend
from engine.errors import ConfigError
from engine.models.base import (
    BiasInputs,
    Intervals,
    ItemCatalogue,
    LayerProgram,
    Model,
    ModelFace,
    ModelSpec,
    PreparedRequest,
    Projected,
)
from engine.models.catalogue import ItemLookup
from engine.models.config import Catalogue, ModelConfig
from engine.models.growth import check_growth
from engine.models.hstu import mask
from engine.models.hstu.embedding import Embedding
from engine.models.hstu.heads import Ranker, Retriever
from engine.models.hstu.layers import HstuLayer
from engine.models.hstu.native_layers import NativeLayers
from engine.models.hstu.prepare import Preparer
from engine.models.hstu.sample import sample_items, sample_request
from engine.models.loader import check_tensors, decode_config
from engine.types import FeatureInfo, Float32Array, Int64Array, Request, Task


class HstuModel(Model):
    """An HSTU with its weights. Raises ConfigError when the tensors do not fit the config."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], source: str = "model"
    ) -> None:
        check_tensors(config, tensors, source)
        self.config = config
        self.spec = hstu_spec(config)
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self._item_ids: Int64Array = tensors["catalogue.item_ids"].numpy()
        first_row = config.catalogue.first_row
        self._preparer = Preparer(config, ItemLookup(self._item_ids, first_row))
        self._embedding = Embedding(config, self._preparer.layout, tensors, dtype)
        self._layers = [
            HstuLayer(config.layers, index, tensors, dtype)
            for index in range(config.layers.num_layers)
        ]
        table = self._embedding.item_table
        self._ranker = None if config.rank is None else Ranker(config.rank, tensors, table)
        self._retriever = None
        if config.retrieve is not None:
            self._retriever = Retriever(config.retrieve, tensors, table, self._item_ids, first_row)

    def describe(self) -> ModelFace:
        inputs = self.config.inputs
        features = [
            FeatureInfo(
                name=feature.name,
                dtype="int64" if feature.num_rows else "float32",
                dim=0 if feature.dim == 1 else feature.dim,
                on_history=feature.on in ("both", "history"),
                on_candidates=feature.on in ("both", "candidates"),
            )
            for feature in inputs.features
        ]
        if self._preparer.reads_time:
            features.append(
                FeatureInfo(name="time", dtype="int64", dim=0, on_history=True, on_candidates=False)
            )
        return ModelFace(
            features=tuple(features),
            context_features=tuple(feature.name for feature in inputs.context),
            score_names=() if self.config.rank is None else self.config.rank.tasks,
            reads_query_time=self._preparer.reads_time,
            embedding_dim=0 if self._retriever is None else self.config.layers.hidden_size,
            max_history_events=inputs.max_history_events,
            keep_stride=inputs.keep_stride,
            sample_items=sample_items(self._item_ids),
        )

    def prepare(self, request: Request) -> PreparedRequest:
        return self._preparer.prepare(request)

    def sample_request(
        self, num_events: int, num_candidates: int, task: Task | None = None
    ) -> Request:
        if task is None:
            task = Task.RETRIEVE if self._ranker is None else Task.RANK
        return sample_request(self.config, self._item_ids, task, num_events, num_candidates)

    @property
    def catalogue_version(self) -> str:
        return self.config.catalogue.version

    def with_catalogue(self, catalogue: ItemCatalogue) -> HstuModel:
        settings, item_ids = catalogue.settings, catalogue.item_ids
        old_table = self._embedding.item_table
        table = catalogue.table.to(old_table.dtype).contiguous()
        check_growth(
            ItemCatalogue(settings=self.config.catalogue, item_ids=self._item_ids, table=old_table),
            ItemCatalogue(settings=settings, item_ids=item_ids, table=table),
            self.spec.name,
        )
        grown = copy.copy(self)
        grown.config = _with_items(self.config, settings, len(table))
        grown._item_ids = item_ids
        grown._preparer = Preparer(grown.config, ItemLookup(item_ids, settings.first_row))
        grown._embedding = self._embedding.with_item_table(table)
        if self._ranker is not None:
            grown._ranker = self._ranker.with_item_table(table)
        if self._retriever is not None:
            grown._retriever = self._retriever.with_items(table, item_ids)
        return grown

    def history_intervals(self, start: int, stop: int, length: int) -> Intervals:
        return mask.history_intervals(self._preparer.rule, start, stop, length)

    def bias_inputs(self, records: Int64Array) -> BiasInputs:
        layout = self._preparer.layout
        if layout.time is None or layout.next_time is None:
            return super().bias_inputs(records)
        return BiasInputs(records[:, layout.time], records[:, layout.next_time])

    def embed(self, records: torch.Tensor) -> torch.Tensor:
        return self._embedding(records)

    def project(self, layer: int, x: torch.Tensor) -> Projected:
        return self._layers[layer].project(x)

    def output(
        self, layer: int, x: torch.Tensor, u: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        return self._layers[layer].output(x, u, attended)

    def layer_program(self, backend: AttentionBackend) -> LayerProgram | None:
        if backend.name != "cpu":
            return None
        assert self.spec.scale is not None, "the runner refuses a scale that depends on the batch"
        return NativeLayers(self.config.layers, self._layers, self.spec.alpha, self.spec.scale)

    def bias_tables(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        tables = self._layers[layer].bias_tables
        return super().bias_tables(layer) if tables is None else tables

    def rank(self, x: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        assert self._ranker is not None, "prepare refuses rank without a rank head"
        return self._ranker(x, records)

    def user_embedding(self, x: torch.Tensor) -> torch.Tensor:
        assert self._retriever is not None, "prepare refuses retrieve without a retrieve head"
        return self._retriever.user_embedding(x)

    def retrieve(
        self, user: torch.Tensor, top_k: int, excluded_rows: Int64Array
    ) -> tuple[Int64Array, Float32Array]:
        assert self._retriever is not None, "prepare refuses retrieve without a retrieve head"
        return self._retriever.top_items(user, top_k, excluded_rows)


def _with_items(config: ModelConfig, settings: Catalogue, num_rows: int) -> ModelConfig:
    """The config of the same model with another catalogue and as many rows of item table."""
    item, *others = config.inputs.features
    features = (msgspec.structs.replace(item, num_rows=num_rows), *others)
    inputs = msgspec.structs.replace(config.inputs, features=features)
    return msgspec.structs.replace(config, inputs=inputs, catalogue=settings)


def build_hstu(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], source: str
) -> HstuModel:
    """The model of a parsed config.json: the factory registered as `hstu`."""
    return HstuModel(decode_config(config, f"{source}/config.json"), tensors, source)


def hstu_spec(config: ModelConfig) -> ModelSpec:
    """What the engine has to know about a model of that config."""
    layers, inputs = config.layers, config.inputs
    tasks = [Task.PREFETCH]
    tasks += [Task.RANK] if config.rank is not None else []
    tasks += [Task.RETRIEVE] if config.retrieve is not None else []
    if len(tasks) == 1:
        raise ConfigError(f"model {config.name} has neither a rank nor a retrieve head")
    default_alpha = 1.0 if layers.family == "research" else layers.qk_dim**-0.5
    v_width, qk_width = layers.num_heads * layers.v_dim, layers.num_heads * layers.qk_dim
    output_parts = 3 if layers.family == "meta" or layers.concat_ua else 1
    weights = layers.hidden_size * ((2 + output_parts) * v_width + 2 * qk_width)
    return ModelSpec(
        name=config.name,
        weights_version=config.weights_version,
        dtype=config.dtype,
        num_layers=layers.num_layers,
        hidden_size=layers.hidden_size,
        num_heads=layers.num_heads,
        num_kv_heads=layers.num_heads,
        qk_dim=layers.qk_dim,
        v_dim=layers.v_dim,
        score="silu",
        alpha=default_alpha if layers.alpha is None else layers.alpha,
        scale=None if layers.scale_length == -1 else 1.0 / layers.scale_length,
        tokens_per_event=inputs.tokens_per_event,
        num_context=len(inputs.context),
        window=layers.window,
        has_bidirectional_context=bool(inputs.context) and inputs.context_mask == "bidirectional",
        has_positions_from_newest=inputs.positions == "from_newest",
        has_query_time_inputs=inputs.num_time_buckets > 0,
        has_next_event_bias=layers.relative_bias,
        bias="research" if layers.relative_bias else None,
        max_history_tokens=len(inputs.context)
        + inputs.tokens_per_event * inputs.max_history_events,
        max_chain=layers.target_group_size + layers.relative_bias,
        tasks=tuple(tasks),
        flops_per_token=2 * weights * layers.num_layers,
    )
