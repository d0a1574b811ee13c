"""A synthetic interaction log and a model for it, small enough to replay in a test."""

from pathlib import Path

import numpy as np
import torch

from engine.models.config import (
    Catalogue,
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RetrieveHead,
)
from engine.models.loader import save_model_dir
from engine.testing.models import random_tensors

NUM_USERS, NUM_ITEMS = 24, 30


def write_log(path: Path, *, seed: int = 0) -> Path:
    """A `::` log: every user walks along the items in steps of 1 to 3, so there is something to
    learn; sessions of some users overlap in time."""
    rng = np.random.default_rng(seed)
    lines = []
    for user in range(NUM_USERS):
        length = int(rng.integers(12, 40))
        items = (rng.integers(NUM_ITEMS) + np.cumsum(rng.integers(1, 4, length))) % NUM_ITEMS
        times = 1000 + 150 * user + np.cumsum(rng.integers(0, 90, length))
        ratings = 1 + (items + user) % 5
        lines += [
            f"{user}::{item * 7 + 3}::{rating}::{time}"
            for item, rating, time in zip(items, ratings, times, strict=True)
        ]
    rng.shuffle(lines)
    path.write_text("\n".join(lines) + "\n")
    return path


def save_model(path: Path, *, num_items: int = NUM_ITEMS, unknown_history: str = "drop") -> str:
    """A random model whose catalogue holds the first `num_items` items of the log."""
    config = ModelConfig(
        name="small",
        layers=HstuLayers(
            family="meta",
            num_layers=1,
            hidden_size=16,
            num_heads=2,
            qk_dim=8,
            v_dim=8,
            scale_length=32,
        ),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=num_items),),
            positions="from_start",
            num_positions=65,
            max_history_events=64,
        ),
        catalogue=Catalogue(unknown_history=unknown_history),
        retrieve=RetrieveHead(norm="l2", norm_items=True),
    )
    item_ids = torch.arange(num_items) * 7 + 3
    save_model_dir(path, config, random_tensors(config) | {"catalogue.item_ids": item_ids})
    return str(path)
