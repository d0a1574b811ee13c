"""The example's training code and the engine compute the same model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from small_logs import write_log

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.entrypoints.logs import by_user, read_log
from examples.movielens.train import Recommender, Sequences, TrainOptions, export, train

OPTIONS = TrainOptions(hidden_size=32, head_dim=16, num_positions=65, scale_length=32, epochs=3)
CACHE = CacheConfig(device_pages=64, page_size=4, chunk_size=8, host_bytes=1 << 20)


class Trained(NamedTuple):
    recommender: Recommender
    sequences: Sequences
    directory: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("model")
    users = by_user(read_log(write_log(directory / "log.dat")))
    recommender, sequences = train(users, OPTIONS)
    export(recommender, sequences, directory)
    return Trained(recommender, sequences, directory)


@torch.no_grad()
def test_retrieve_scores_equal_the_training_models(trained: Trained) -> None:
    recommender, sequences, directory = trained
    catalogue = sequences.catalogue
    with Engine.from_model_dir(str(directory), EngineConfig(cache=CACHE)) as engine:
        for user, rows in enumerate(sequences.items):
            for length in (1, len(rows) // 2, len(rows)):
                answer = engine.retrieve(
                    user_id=user, history=catalogue[rows[:length].numpy()], top_k=len(catalogue)
                )
                expected = recommender.item_scores(recommender(rows[None, :length])[0, -1])

                assert answer.items is not None
                assert answer.item_scores is not None
                assert sorted(answer.items) == catalogue.tolist()
                places = np.searchsorted(catalogue, answer.items)
                np.testing.assert_allclose(
                    answer.item_scores, expected.numpy()[places], rtol=0, atol=1e-4
                )


@torch.no_grad()
def test_rank_scores_equal_the_training_models(trained: Trained) -> None:
    recommender, sequences, directory = trained
    catalogue = sequences.catalogue
    candidates = torch.tensor([0, 5, 5, 17])
    with Engine.from_model_dir(str(directory), EngineConfig(cache=CACHE)) as engine:
        for user, rows in enumerate(sequences.items):
            answer = engine.rank(
                user_id=user,
                history=catalogue[rows.numpy()],
                candidates=catalogue[candidates.numpy()],
            )
            expected = [
                recommender.liked(recommender(torch.cat([rows, candidate[None]])[None])[0, -1])
                for candidate in candidates
            ]

            assert answer.scores is not None
            np.testing.assert_allclose(
                answer.scores, torch.stack(expected).numpy(), rtol=0, atol=1e-4
            )
