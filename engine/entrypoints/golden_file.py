"""Golden files: one `.safetensors` of inputs, weights and outputs each, described by its metadata.

Only the metadata key `config` says what a file is; its name means nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ConfigError
from engine.models.config import (
    Catalogue,
    ContextFeature,
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
    RetrieveHead,
)


class GoldenConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a golden file. Keys that describe how it was made are not read.

    Several keys are one thing under the names of different publishers; the properties unite them.
    """

    family: str
    kind: str = ""
    dtype: str = "float32"
    num_layers: int = 0
    num_heads: int = 0
    embedding_dim: int | None = None
    hidden_size: int | None = None
    attention_dim: int | None = None
    hidden_dim: int | None = None
    linear_dim: int | None = None
    head_dim: int | None = None
    attn_alpha: float | None = None
    alpha: float | None = None
    norm_eps: float | None = None
    layernorm_epsilon: float | None = None
    l2_eps: float = 1e-6
    scale_meta: int | None = msgspec.field(default=None, name="scale_N")
    scale_n: int | None = None
    scaling_seqlen: int | None = None
    max_seqlen: int | None = None
    max_attn_len: int | None = None
    group_norm: bool = False
    target_group_size: int | None = None
    residual: bool = True
    concat_ua: bool = False
    use_timestamps: bool = False
    contextual_seq_len: int | None = None
    num_contextuals: int | None = None
    contextual: dict[str, int] | None = None
    num_targets: list[int] | None = None
    num_candidates: list[int] | None = None
    lengths: list[int] | None = None
    hist_lengths: list[int] | None = None
    new_history: int | None = None
    targets: int | None = None
    rounds: int = 0
    microbatch: int | None = None
    num_items: int = 0
    max_sequence_len: int = 0
    max_output_len: int = 0

    @property
    def width(self) -> int:
        """D."""
        return _first(self.embedding_dim, self.hidden_size, what="embedding_dim or hidden_size")

    @property
    def qk_dim(self) -> int:
        return _first(self.attention_dim, self.head_dim, what="attention_dim or head_dim")

    @property
    def v_dim(self) -> int:
        return _first(self.hidden_dim, self.linear_dim, self.head_dim, what="hidden_dim")

    @property
    def num_context(self) -> int:
        return self.contextual_seq_len or self.num_contextuals or 0

    @property
    def target_counts(self) -> list[int] | None:
        """Targets (candidates) of each user."""
        return self.num_targets if self.num_targets is not None else self.num_candidates

    @property
    def scale_length(self) -> int:
        """N; -1 is the longest sequence of the file."""
        scale = _first(self.scale_meta, self.scale_n, self.scaling_seqlen, what="scale_N")
        if scale != -1:
            return scale
        if self.max_seqlen is not None:
            return self.max_seqlen
        return max(self.lengths or [0])


@dataclass(frozen=True, slots=True, eq=False)
class GoldenFile:
    """An open golden file: its description and all of its tensors."""

    path: Path
    config: GoldenConfig
    tensors: dict[str, torch.Tensor]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor; ConfigError when the file lacks it."""
        if name not in self.tensors:
            raise ConfigError(f"{self.path.name} holds no tensor {name}")
        return self.tensors[name]

    def counts(self, name: str) -> list[int]:
        """An integer tensor as a list."""
        return [int(value) for value in self.tensor(name).tolist()]


def read_config(path: Path) -> dict[str, Any] | None:
    """The description of a file as it stands there; None when it carries none.

    Raises ConfigError when the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            config = json.loads(metadata["config"]) if "config" in metadata else None
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return config if isinstance(config, dict) else None


def read_file(path: Path) -> GoldenFile:
    """The whole file. Raises ConfigError when it carries no description, or a malformed one."""
    raw = read_config(path)
    if raw is None:
        raise ConfigError(f"{path.name} has no metadata key `config`")
    try:
        config = msgspec.convert(raw, GoldenConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path.name}: config: {error}") from error
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return GoldenFile(path, config, tensors)


_FAMILIES = {"meta_stu": "meta", "meta_research": "research", "nvidia": "nvidia"}
_TENSOR_NAMES = {
    "_input_norm_weight": "input_norm.weight",
    "_input_norm_bias": "input_norm.bias",
    "_uvqk_weight": "uvqk.weight",
    "_uvqk_beta": "uvqk.bias",
    "_output_weight": "output.weight",
    "_output_norm_weight": "attn_norm.weight",
    "_output_norm_bias": "attn_norm.bias",
    "_uvqk": "uvqk.weight",
    "_o.weight": "output.weight",
    "_o.bias": "output.bias",
    "_rel_attn_bias._pos_w": "bias.position",
    "_rel_attn_bias._ts_w": "bias.time",
    "_input_layernorm_weight": "input_norm.weight",
    "_input_layernorm_bias": "input_norm.bias",
    "_linear_uvqk_weight": "uvqk.weight",
    "_linear_uvqk_bias": "uvqk.bias",
    "_linear_proj_weight": "output.weight",
    "_output_layernorm_weight": "attn_norm.weight",
    "_output_layernorm_bias": "attn_norm.bias",
}
_LAYER_KEY = re.compile(r"^(?:.*\.)?(?:layers|_attention_layers)\.(\d+)\.(.+)$")


def layer_config(config: GoldenConfig) -> HstuLayers:
    """The stack of layers a file describes."""
    family = _FAMILIES[config.family]
    return HstuLayers(
        family=family,  # type: ignore[arg-type]
        num_layers=config.num_layers,
        hidden_size=config.width,
        num_heads=config.num_heads,
        qk_dim=config.qk_dim,
        v_dim=config.v_dim,
        scale_length=config.scale_length,
        alpha=config.attn_alpha if config.attn_alpha is not None else config.alpha,
        norm_eps=config.norm_eps if config.norm_eps is not None else config.layernorm_epsilon,
        window=config.max_attn_len or 0,
        target_group_size=(config.target_group_size or 1) if family == "nvidia" else 1,
        residual=config.residual,
        group_norm=config.group_norm,
        concat_ua=config.concat_ua,
        relative_bias=family == "research" and config.use_timestamps,
    )


def layer_tensors(file: GoldenFile, layers: HstuLayers) -> dict[str, torch.Tensor]:
    """The layers' weights under the names of a model directory, [in, out]."""
    tensors = {}
    for key, tensor in file.tensors.items():
        match = _LAYER_KEY.match(key)
        if match is None or match[2] not in _TENSOR_NAMES:
            continue
        name = _TENSOR_NAMES[match[2]]
        if name.startswith("bias.") and not layers.relative_bias:
            continue
        is_transposed = match[2] == "_o.weight"
        tensors[f"layers.{match[1]}.{name}"] = tensor.t() if is_transposed else tensor
    return tensors


def stack_config(config: GoldenConfig, max_history_events: int) -> ModelConfig:
    """A model around the layers whose inputs are placeholders: rows are given from outside."""
    return ModelConfig(
        name="golden",
        dtype="bfloat16" if config.dtype == "bfloat16" else "float32",
        layers=layer_config(config),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=1),),
            context=tuple(
                ContextFeature(name=f"context{index}", num_rows=1)
                for index in range(config.num_context)
            ),
            context_mask="bidirectional" if config.num_context else "causal",
            max_history_events=max(1, max_history_events),
        ),
        rank=RankHead(kind="dot") if any(config.target_counts or [config.targets]) else None,
        retrieve=RetrieveHead(),
    )


def stack_tensors(file: GoldenFile, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Tensors for `stack_config`: the file's layers, zero rows as inputs."""
    row = torch.zeros(1, config.layers.hidden_size)
    tensors = {"catalogue.item_ids": torch.zeros(1, dtype=torch.int64), "embeddings.item": row}
    for context in config.inputs.context:
        tensors[f"embeddings.context.{context.name}"] = row
    return {**tensors, **layer_tensors(file, config.layers)}


def retrieval_config(config: GoldenConfig) -> ModelConfig:
    """The whole `research` retrieval model."""
    num_positions = config.max_sequence_len + config.max_output_len
    return ModelConfig(
        name="golden",
        layers=layer_config(config),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=config.num_items + 1),),
            embedding_scale=True,
            positions="from_start",
            num_positions=num_positions,
            max_history_events=num_positions,
        ),
        catalogue=Catalogue(first_row=1),
        retrieve=RetrieveHead(norm="l2", norm_items=True, norm_eps=config.l2_eps),
    )


def retrieval_tensors(file: GoldenFile, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Tensors for `retrieval_config`, from the keys of the published checkpoint."""
    return {
        "catalogue.item_ids": torch.arange(1, file.config.num_items + 1),
        "embeddings.item": file.tensor("_embedding_module._item_emb.weight"),
        "positions.weight": file.tensor("_input_features_preproc._pos_emb.weight"),
        **layer_tensors(file, config.layers),
    }


def _first(*values: int | None, what: str) -> int:
    for value in values:
        if value is not None:
            return value
    raise ConfigError(f"the golden config does not say {what}")
