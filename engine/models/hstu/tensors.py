"""Names and shapes of the tensors of an HSTU model directory, as its config.json implies them.

Every weight that multiplies rows is stored [in, out]: rows @ weight.
"""

from __future__ import annotations

from itertools import pairwise

from engine.models.config import ModelConfig

Shape = tuple[int | None, ...]
"""None stands for a size that the config does not fix."""

NUM_TIME_WEIGHTS = 129
"""Rows of a research time bias: buckets 0 to 128."""


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """All tensors of the model, name -> shape. `catalogue.item_ids` is int64, others are float."""
    return {**_input_shapes(config), **_layer_shapes(config), **_head_shapes(config)}


def _input_shapes(config: ModelConfig) -> dict[str, Shape]:
    inputs, hidden_size = config.inputs, config.layers.hidden_size
    shapes: dict[str, Shape] = {"catalogue.item_ids": (None,)}
    for feature in inputs.features:
        rows = feature.num_rows or feature.dim
        shapes[f"embeddings.{feature.name}"] = (rows, feature.width or hidden_size)
    for context in inputs.context:
        shapes[f"embeddings.context.{context.name}"] = (context.num_rows, hidden_size)
    if inputs.positions != "none":
        shapes["positions.weight"] = (inputs.num_positions, hidden_size)
    if inputs.num_time_buckets:
        shapes["time_buckets.weight"] = (inputs.num_time_buckets, hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    layers = config.layers
    hidden_size, v_width = layers.hidden_size, layers.num_heads * layers.v_dim
    uvqk_width = 2 * v_width + 2 * layers.num_heads * layers.qk_dim
    concatenates = layers.family == "meta" or layers.concat_ua
    shapes: dict[str, Shape] = {}
    for index in range(layers.num_layers):
        prefix = f"layers.{index}."
        shapes[prefix + "uvqk.weight"] = (hidden_size, uvqk_width)
        shapes[prefix + "output.weight"] = (v_width * (3 if concatenates else 1), hidden_size)
        if layers.family == "research":
            shapes[prefix + "output.bias"] = (hidden_size,)
        else:
            norm_width = layers.num_heads if layers.group_norm else v_width
            shapes[prefix + "input_norm.weight"] = (hidden_size,)
            shapes[prefix + "input_norm.bias"] = (hidden_size,)
            shapes[prefix + "uvqk.bias"] = (uvqk_width,)
            shapes[prefix + "attn_norm.weight"] = (norm_width,)
            shapes[prefix + "attn_norm.bias"] = (norm_width,)
        if layers.relative_bias:
            is_fixed = layers.scale_length != -1
            shapes[prefix + "bias.position"] = (2 * layers.scale_length - 1 if is_fixed else None,)
            shapes[prefix + "bias.time"] = (NUM_TIME_WEIGHTS,)
    return shapes


def _head_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden_size = config.layers.hidden_size
    shapes: dict[str, Shape] = {}
    for name, head in (("rank", config.rank), ("retrieve", config.retrieve)):
        if head is not None and head.norm == "layer_norm":
            shapes[f"heads.{name}.norm.weight"] = (hidden_size,)
            shapes[f"heads.{name}.norm.bias"] = (hidden_size,)
    if config.rank is not None and config.rank.kind == "mlp":
        widths = (hidden_size, *config.rank.hidden, len(config.rank.tasks))
        for index, (width_in, width_out) in enumerate(pairwise(widths)):
            shapes[f"heads.rank.mlp.{index}.weight"] = (width_in, width_out)
            shapes[f"heads.rank.mlp.{index}.bias"] = (width_out,)
    return shapes
