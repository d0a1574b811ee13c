"""Exact top-k and head norms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.models.config import RankHead, RetrieveHead
from engine.models.hstu import heads
from engine.models.hstu.heads import Ranker, Retriever

NOTHING = np.empty(0, dtype=np.int64)


def retriever(
    table: torch.Tensor, ids: np.ndarray, first_row: int = 0, head: RetrieveHead | None = None
) -> Retriever:
    return Retriever(head or RetrieveHead(), {}, table, ids, first_row)


@pytest.mark.parametrize("top_k", [1, 3, 10, 97, 200])
@pytest.mark.parametrize("block_items", [8, 33, 8192])
def test_top_items_are_a_full_sort(
    monkeypatch: pytest.MonkeyPatch, block_items: int, top_k: int
) -> None:
    monkeypatch.setattr(heads, "_BLOCK_ITEMS", block_items)
    generator = np.random.default_rng(0)
    # Small integers: scores are exact and many of them are equal.
    table = generator.integers(-2, 3, size=(100, 4)).astype(np.float32)
    ids = generator.permutation(1000)[:97]
    user = np.array([1.0, -1.0, 2.0, 0.0], dtype=np.float32)
    excluded = np.array([5, 5, 40, 2, 0, 99])
    scores = table[2:99] @ user
    wanted = [k for k in range(97) if k + 2 not in (5, 40, 2)]
    expected = sorted(wanted, key=lambda k: (-scores[k], ids[k]))[:top_k]
    subject = retriever(torch.from_numpy(table), ids, first_row=2)
    items, item_scores = subject.top_items(torch.from_numpy(user), top_k, excluded)
    assert items.tolist() == [ids[k] for k in expected]
    assert item_scores.tolist() == [scores[k] for k in expected]
    assert items.dtype == np.int64
    assert item_scores.dtype == np.float32


def test_an_items_score_does_not_depend_on_how_many_are_asked_for() -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(500, 24, generator=generator)
    user = torch.randn(24, generator=generator)
    subject = retriever(table, np.arange(500))
    items, scores = subject.top_items(user, 500, NOTHING)
    few_items, few_scores = subject.top_items(user, 7, NOTHING)
    assert few_items.tolist() == items[:7].tolist()
    assert few_scores.tolist() == scores[:7].tolist()


def test_all_items_excluded_gives_none() -> None:
    subject = retriever(torch.ones(3, 2), np.arange(3))
    items, scores = subject.top_items(torch.ones(2), 2, np.arange(3))
    assert items.tolist() == []
    assert scores.tolist() == []


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
