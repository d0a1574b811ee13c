"""Random weights for any config, and the small model that serves when no directory is given."""

from __future__ import annotations

import math

import torch

from engine.models.base import Model
from engine.models.config import (
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
    RetrieveHead,
)
from engine.models.hstu.tensors import expected_shapes

_BUILTIN_SEED = 20261201


def random_tensors(
    config: ModelConfig, *, item_ids: torch.Tensor, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Every tensor the config needs: weights N(0, 1/fan_in), norm scales near 1, small biases.

    Embeddings are N(0, 1). item_ids: int64 [num_items], the catalogue.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        if name == "catalogue.item_ids":
            tensors[name] = item_ids
            continue
        values = torch.randn([size or 1 for size in shape], generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.startswith(("layers.", "heads.")):
            values = values / math.sqrt(len(values)) if values.dim() > 1 else 0.1 * values
        tensors[name] = values
    return tensors


def builtin_model() -> Model:
    """A small HSTU with fixed random weights: it serves every task, its scores mean nothing.

    Catalogue ids 0 to 9999, histories to 4096 events, reuse mode append.
    """
    from engine.models.hstu.model import HstuModel

    num_items, max_events = 10_000, 4096
    config = ModelConfig(
        name="builtin-hstu",
        weights_version="random-1",
        layers=HstuLayers(
            family="meta",
            num_layers=4,
            hidden_size=64,
            num_heads=2,
            qk_dim=32,
            v_dim=32,
            scale_length=max_events,
        ),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=num_items),),
            positions="from_start",
            num_positions=max_events + 1,
            max_history_events=max_events,
            overlong="keep_newest",
            keep_stride=256,
        ),
        rank=RankHead(kind="dot"),
        retrieve=RetrieveHead(norm="l2", norm_items=True),
    )
    tensors = random_tensors(config, item_ids=torch.arange(num_items), seed=_BUILTIN_SEED)
    return HstuModel(config, tensors, "built-in model")
