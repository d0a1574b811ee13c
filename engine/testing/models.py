"""Models with random weights, for tests and benchmarks: any config, no training."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from engine.models.config import ModelConfig
from engine.models.hstu.tensors import expected_shapes
from engine.models.loader import save_model_dir


def random_tensors(config: ModelConfig, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor the config needs: weights N(0, 1/fan_in), norm scales near 1.

    Embeddings are N(0, 1). The catalogue holds one id per item row, 10 * row + 1, so that ids and
    rows differ.
    """
    generator = torch.Generator().manual_seed(seed)
    num_items = config.inputs.features[0].num_rows - config.catalogue.first_row
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        if name == "catalogue.item_ids":
            tensors[name] = torch.arange(num_items) * 10 + 1
            continue
        sizes = [size if size is not None else 1 for size in shape]
        values = torch.randn(sizes, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.startswith(("layers.", "heads.")):
            values = values / math.sqrt(sizes[0]) if len(sizes) > 1 else 0.1 * values
        tensors[name] = values
    return tensors


def save_random_model(path: str | Path, config: ModelConfig, *, seed: int = 0) -> None:
    """A model directory with `random_tensors`."""
    save_model_dir(path, config, random_tensors(config, seed=seed))
