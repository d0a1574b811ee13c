"""Model architectures by name, and the model that serves when none is given.

An architecture is an entry point of the group `engine.models`: its name is what
`layers.architecture` of config.json says, its value a factory (parsed config.json, tensors, name of
the source) -> Model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import torch

from engine.errors import ConfigError
from engine.models.base import Model
from engine.models.config import (
    Catalogue,
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
    RetrieveHead,
)

ModelFactory = Callable[[Mapping[str, Any], Mapping[str, torch.Tensor], str], Model]

GROUP = "engine.models"


def model_factory(architecture: str) -> ModelFactory:
    """The factory of that name. Raises ConfigError when there is none, or it fails to load."""
    if architecture == "hstu":
        from engine.models.hstu.model import build_hstu

        return build_hstu
    found = entry_points(group=GROUP)
    for entry_point in found:
        if entry_point.name == architecture:
            try:
                factory: ModelFactory = entry_point.load()
            except Exception as error:
                raise ConfigError(
                    f"model architecture {architecture!r} ({entry_point.value}) failed to load: "
                    f"{error!r}"
                ) from error
            return factory
    known = ", ".join(sorted({"hstu", *found.names}))
    raise ConfigError(
        f"layers.architecture is {architecture!r}, known are: {known}. Install the package that "
        f"registers it under the entry-point group {GROUP}"
    )


def builtin_model() -> Model:
    """A small HSTU with fixed random weights: it serves every task, its scores mean nothing.

    Catalogue ids 0 to 9999, histories to 4096 events, reuse mode append.
    """
    from engine.models.hstu.model import HstuModel
    from engine.models.hstu.tensors import expected_shapes

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
        catalogue=Catalogue(),
        rank=RankHead(kind="dot"),
        retrieve=RetrieveHead(norm="l2", norm_items=True),
    )
    generator = torch.Generator().manual_seed(20261201)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        sizes = [num_items if size is None else size for size in shape]
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(sizes)
        elif name.endswith(".bias"):
            tensors[name] = torch.zeros(sizes)
        else:
            fan_in = sizes[0] if name.endswith(("uvqk.weight", "output.weight")) else 1
            tensors[name] = torch.randn(sizes, generator=generator) * fan_in**-0.5
    tensors["catalogue.item_ids"] = torch.arange(num_items)
    return HstuModel(config, tensors, "built-in model")
