"""Scores of candidates, and head norms. The top-k is in test_item_search.py."""

from __future__ import annotations

import numpy as np
import torch

from engine.models.config import RankHead, RetrieveHead
from engine.models.hstu.heads import Ranker, Retriever

NOTHING = np.empty(0, dtype=np.int64)


def retriever(
    table: torch.Tensor, ids: np.ndarray, first_row: int = 0, head: RetrieveHead | None = None
) -> Retriever:
    return Retriever(head or RetrieveHead(), {}, table, ids, first_row)


def test_items_and_users_are_divided_by_their_norm() -> None:
    table = torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]])
    subject = retriever(table, np.arange(3), head=RetrieveHead(norm="l2", norm_items=True))
    user = subject.user_embedding(torch.tensor([[0.0, 5.0]]))
    assert user.tolist() == [[0.0, 1.0]]
    items, scores = subject.top_items(user[0], 3, NOTHING)
    assert items.tolist() == [1, 0, 2]
    np.testing.assert_allclose(scores, [1.0, 0.8, 0.0], atol=1e-7)


def test_dot_is_with_the_candidates_own_item_row() -> None:
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    ranker = Ranker(RankHead(kind="dot"), {}, table)
    x = torch.tensor([[5.0, 7.0], [5.0, 7.0], [5.0, 7.0]])
    records = torch.tensor([[2, 9], [0, 9], [1, 9]])
    assert ranker(x, records).tolist() == [[24.0], [5.0], [7.0]]


def test_mlp_has_relu_between_its_layers_only() -> None:
    tensors = {
        "heads.rank.mlp.0.weight": torch.tensor([[1.0, -1.0]]),
        "heads.rank.mlp.0.bias": torch.tensor([0.5, 0.0]),
        "heads.rank.mlp.1.weight": torch.tensor([[1.0, 0.0], [0.0, -3.0]]),
        "heads.rank.mlp.1.bias": torch.tensor([0.0, 1.0]),
    }
    head = RankHead(kind="mlp", hidden=(2,), tasks=("click", "buy"))
    ranker = Ranker(head, tensors, torch.zeros(1, 1))
    scores = ranker(torch.tensor([[2.0], [-2.0]]), torch.zeros(2, 1, dtype=torch.int64))
    assert scores.tolist() == [[2.5, 1.0], [0.0, -5.0]]
