"""A whole published research model: input stage, layers, user embedding, all scores, top ten."""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.models.config import (
    Catalogue,
    Feature,
    Inputs,
    ModelConfig,
    RetrieveHead,
)
from engine.models.hstu.model import HstuModel
from engine.models.hstu.tensors import expected_shapes
from engine.types import Request, Task
from tests.numerics.golden_models import dense_layers, golden_layers, read_golden


def research_model() -> tuple[HstuModel, dict[str, torch.Tensor]]:
    golden, tensors = read_golden("research_e2e_retrieval")
    config = ModelConfig(
        name="research",
        layers=golden_layers(golden),
        inputs=Inputs(
            features=(Feature(name="item", num_rows=golden["num_items"] + 1),),
            embedding_scale=True,
            positions="from_start",
            num_positions=golden["scale_n"],
            max_history_events=golden["max_sequence_len"],
        ),
        catalogue=Catalogue(first_row=1),
        retrieve=RetrieveHead(norm="l2", norm_items=True),
    )
    found = {
        "catalogue.item_ids": torch.arange(1, golden["num_items"] + 1),
        "embeddings.item": tensors["_embedding_module._item_emb.weight"],
        "positions.weight": tensors["_input_features_preproc._pos_emb.weight"],
    }
    for layer in range(golden["num_layers"]):
        source = f"_hstu._attention_layers.{layer}."
        target = f"layers.{layer}."
        found[target + "uvqk.weight"] = tensors[source + "_uvqk"]
        found[target + "output.weight"] = tensors[source + "_o.weight"].t()
        found[target + "output.bias"] = tensors[source + "_o.bias"]
        found[target + "bias.position"] = tensors[source + "_rel_attn_bias._pos_w"]
        found[target + "bias.time"] = tensors[source + "_rel_attn_bias._ts_w"]
    assert set(found) == set(expected_shapes(config))
    return HstuModel(config, found), tensors


def bias(model: HstuModel, layer: int, times: np.ndarray, next_times: np.ndarray) -> torch.Tensor:
    """Bias [L, L] from the times that the records carry."""
    n, length = model.config.layers.scale_length, len(times)
    position, time = model.bias_tables(layer)
    result = torch.empty(length, length)
    for i in range(length):
        for j in range(length):
            seconds = max(1, abs(int(next_times[i]) - int(times[j])))
            bucket = min(128, math.floor(math.log(seconds) / 0.301))
            result[i, j] = position[n - 1 + j - i] + time[bucket]
    return result


def test_research_model_gives_published_embeddings_scores_and_top_ten() -> None:
    model, tensors = research_model()
    for user, length in enumerate(tensors["lengths"].tolist()):
        ids = tensors["past_ids"][user, :length].numpy()
        times = tensors["timestamps"][user].numpy()
        prepared = model.prepare(
            Request(
                request_id="r",
                user_id="u",
                task=Task.RETRIEVE,
                history={"item": ids, "time": times[:length]},
                query_time=int(times[length]),
                exclude_history=True,
            )
        )
        assert prepared.length == length - 1
        assert prepared.read_row == 0
        records = np.concatenate([prepared.records, prepared.suffix_records])
        x = model.embed(torch.from_numpy(records))
        torch.testing.assert_close(x, tensors["preprocessed"][user, :length], atol=5e-6, rtol=1e-5)
        bias_inputs = model.bias_inputs(records)
        biases = [
            bias(model, layer, bias_inputs.time, bias_inputs.next_time)
            for layer in range(model.spec.num_layers)
        ]
        visible = torch.ones(length, length).tril().bool()
        embedding = model.user_embedding(dense_layers(model, x, visible, biases)[-1][-1:])[0]
        torch.testing.assert_close(embedding, tensors["user_embedding"][user], atol=5e-5, rtol=1e-4)
        no_rows = np.empty(0, dtype=np.int64)
        all_items, all_scores = model.retrieve(embedding, 150, no_rows)
        expected = tensors["scores_all_items"][user].numpy()
        np.testing.assert_allclose(all_scores, expected[all_items - 1], atol=5e-5)
        items, scores = model.retrieve(embedding, 10, prepared.excluded_rows)
        assert items.tolist() == tensors["top10_ids_excluding_history"][user].tolist()
        np.testing.assert_allclose(scores, tensors["top10_scores"][user], atol=5e-5)
