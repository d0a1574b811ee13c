"""Models with random weights, for tests and benchmarks: any config, no training."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.models import random_weights
from engine.models.config import ModelConfig
from engine.models.loader import save_model_dir


def random_tensors(config: ModelConfig, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor the config needs (see `random_weights`).

    The catalogue holds one id per item row, 10 * row + 1, so that ids and rows differ.
    """
    num_items = config.inputs.features[0].num_rows - config.catalogue.first_row
    item_ids = torch.arange(num_items) * 10 + 1
    return random_weights.random_tensors(config, item_ids=item_ids, seed=seed)


def save_random_model(path: str | Path, config: ModelConfig, *, seed: int = 0) -> None:
    """A model directory with `random_tensors`."""
    save_model_dir(path, config, random_tensors(config, seed=seed))
