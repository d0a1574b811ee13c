"""Rows from records, against sums written out."""

from __future__ import annotations

import numpy as np
import torch

from engine.models.config import (
    ContextFeature,
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
)
from engine.models.hstu.model import HstuModel
from engine.testing.models import random_tensors
from engine.types import Request, Task

LAYERS = HstuLayers(
    family="meta",
    num_layers=1,
    hidden_size=6,
    num_heads=1,
    qk_dim=4,
    v_dim=4,
    scale_length=64,
)


def rows_of(model: HstuModel, request: Request) -> np.ndarray:
    """History and suffix rows, [L + S, D]."""
    prepared = model.prepare(request)
    records = np.concatenate([prepared.records, prepared.suffix_records])
    return model.embed(torch.from_numpy(records)).numpy()


def test_concatenated_features_leave_zeros_where_a_row_has_none() -> None:
    config = ModelConfig(
        name="concat",
        layers=LAYERS,
        inputs=Inputs(
            features=(
                Feature(name="item", num_rows=9, width=2),
                Feature(name="price", dim=2, width=3, on="candidates"),
                Feature(name="genre", num_rows=4, width=1, on="history"),
            ),
            combine="concat",
            context=(
                ContextFeature(name="age", num_rows=3),
                ContextFeature(name="sex", num_rows=2),
            ),
            max_history_events=8,
        ),
        rank=RankHead(kind="mlp"),
    )
    tensors = random_tensors(config)
    model = HstuModel(config, tensors)
    table = {name: tensor.numpy() for name, tensor in tensors.items()}
    item, genre, price = (table[f"embeddings.{name}"] for name in ("item", "genre", "price"))
    # random_tensors gives row k the id 10 * k + 1.
    rows = rows_of(
        model,
        Request(
            request_id="r",
            user_id="u",
            task=Task.RANK,
            history={"item": np.array([41, 1]), "genre": np.array([3, 0])},
            candidates={
                "item": np.array([81]),
                "price": np.array([[0.5, -2.0]], dtype=np.float32),
            },
            context=np.array([2, 1]),
        ),
    )
    zeros = np.zeros(3)
    expected = [
        table["embeddings.context.age"][2],
        table["embeddings.context.sex"][1],
        np.concatenate([item[4], zeros, genre[3]]),
        np.concatenate([item[0], zeros, genre[0]]),
        np.concatenate([item[8], 0.5 * price[0] - 2.0 * price[1], [0.0]]),
    ]
    np.testing.assert_allclose(rows, np.array(expected), rtol=1e-6, atol=1e-7)


def test_summed_features_are_scaled_before_positions_are_added() -> None:
    config = ModelConfig(
        name="sum",
        layers=LAYERS,
        inputs=Inputs(
            features=(
                Feature(name="item", num_rows=9),
                Feature(name="action", num_rows=3, on="history"),
                Feature(name="genre", num_rows=4),
            ),
            tokens_per_event=2,
            embedding_scale=True,
            positions="from_start",
            num_positions=6,
            max_history_events=8,
        ),
        rank=RankHead(kind="mlp"),
    )
    tensors = random_tensors(config)
    model = HstuModel(config, tensors)
    item, action, genre, position = (
        tensors[name].numpy()
        for name in ("embeddings.item", "embeddings.action", "embeddings.genre", "positions.weight")
    )
    rows = rows_of(
        model,
        Request(
            request_id="r",
            user_id="u",
            task=Task.RANK,
            history={
                "item": np.array([41, 1]),
                "action": np.array([2]),
                "genre": np.array([3, 0]),
            },
            candidates={"item": np.array([81]), "genre": np.array([1])},
        ),
    )
    scale = 6**0.5
    expected = [
        (item[4] + genre[3]) * scale + position[0],
        action[2] * scale + position[1],
        (item[0] + genre[0]) * scale + position[2],
        (item[8] + genre[1]) * scale + position[3],
    ]
    np.testing.assert_allclose(rows, np.array(expected), rtol=1e-6, atol=1e-6)
