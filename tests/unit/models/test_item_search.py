"""The exact top-k, natively and in torch, against a full sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.models.hstu import item_search
from engine.models.hstu.item_search import NativeSearch, PackedSearch
from engine.native_library import load_library

NOTHING = np.empty(0, dtype=np.int64)
KINDS = (NativeSearch, PackedSearch)


@pytest.fixture(autouse=True)
def _library() -> None:
    assert load_library() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 3, 10, 2997, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_top_items_are_a_full_sort(
    monkeypatch: pytest.MonkeyPatch, kind: type[NativeSearch], top_k: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(item_search, "_BLOCK_ITEMS", 700)
    generator = np.random.default_rng(0)
    # Small integers: scores are exact and many of them are equal.
    items = generator.integers(-2, 3, size=(2997, 13)).astype(np.float32)
    ids = generator.permutation(9000)[:2997]
    user = generator.integers(-3, 4, size=13).astype(np.float32)
    excluded = np.array([5, 5, 40, 2996, 0, 2997, -1])
    scores = items @ user
    wanted = [k for k in range(2997) if k not in (5, 40, 2996, 0)]
    expected = sorted(wanted, key=lambda k: (-scores[k], ids[k]))[:top_k]
    subject = kind(torch.from_numpy(items).to(dtype), ids, None)
    found, found_scores = subject.top_items(torch.from_numpy(user), top_k, excluded)
    assert found.tolist() == [ids[k] for k in expected]
    assert found_scores.tolist() == [scores[k] for k in expected]
    assert found.dtype == np.int64
    assert found_scores.dtype == np.float32


@pytest.mark.parametrize("width", [1, 8, 24, 100])
@pytest.mark.parametrize("norm_eps", [None, 1e-6])
def test_native_scores_are_those_of_torch(norm_eps: float | None, width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    items = torch.randn(5000, width, generator=generator)
    items[17] = 0.0
    user = torch.randn(2 * width, generator=generator)[::2]
    ids = np.arange(5000)
    native = NativeSearch(items, ids, norm_eps).top_items(user, 5000, NOTHING)
    packed = PackedSearch(items, ids, norm_eps).top_items(user, 5000, NOTHING)
    np.testing.assert_allclose(
        native[1][np.argsort(native[0])], packed[1][np.argsort(packed[0])], atol=1e-5 * width**0.5
    )
    assert (np.diff(native[1]) <= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_items_score_does_not_depend_on_how_many_are_asked_for(
    kind: type[NativeSearch],
) -> None:
    generator = torch.Generator().manual_seed(1)
    items = torch.randn(5000, 24, generator=generator)
    user = torch.randn(24, generator=generator)
    subject = kind(items, np.arange(5000), None)
    ids, scores = subject.top_items(user, 5000, NOTHING)
    few_ids, few_scores = subject.top_items(user, 7, NOTHING)
    assert few_ids.tolist() == ids[:7].tolist()
    assert few_scores.tolist() == scores[:7].tolist()


def test_a_native_answer_does_not_depend_on_threads() -> None:
    generator = torch.Generator().manual_seed(2)
    items = torch.randint(-1, 2, (20_000, 3), generator=generator).float()
    subject = NativeSearch(items, np.arange(20_000)[::-1].copy(), None)
    before = torch.get_num_threads()
    answers = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        answers.append(subject.top_items(torch.ones(3), 500, NOTHING)[0].tolist())
    torch.set_num_threads(before)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("kind", KINDS)
def test_all_items_excluded_gives_none(kind: type[NativeSearch]) -> None:
    subject = kind(torch.ones(3, 2), np.arange(3), None)
    ids, scores = subject.top_items(torch.ones(2), 2, np.arange(3))
    assert ids.tolist() == []
    assert scores.tolist() == []


@pytest.mark.parametrize("block_items", [1, 2, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_items_without_a_score_come_last(
    monkeypatch: pytest.MonkeyPatch, kind: type[NativeSearch], block_items: int
) -> None:
    monkeypatch.setattr(item_search, "_BLOCK_ITEMS", block_items)
    items = torch.tensor([[torch.nan], [1.0], [torch.nan], [3.0], [torch.nan], [-2.0]])
    subject = kind(items, np.arange(6), None)
    for top_k in range(1, 7):
        ids, scores = subject.top_items(torch.ones(1), top_k, NOTHING)
        assert ids.tolist() == [3, 1, 5, 0, 2, 4][:top_k]
        assert scores[:3].tolist() == [3.0, 1.0, -2.0][:top_k]
        assert np.isnan(scores[3:]).all()
