"""Checkpoints of public trainers, renamed into model directories, against their outputs.

The checkpoints lie beside the repository; without them these tests skip.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.models.config import (
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
    RetrieveHead,
)
from engine.models.hstu.input_stage import rows_from_newest, rows_from_start, time_bucket
from engine.models.hstu.model import HstuModel
from tests.numerics.golden_models import dense_layers, visible_pairs

CHECKPOINTS = Path(__file__).parents[3] / "shared" / "checkpoints"

pytestmark = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason=f"no checkpoints in {CHECKPOINTS}")


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=5e-5, rtol=1e-4)


def read(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config, expected tensors)."""
    config = json.loads((CHECKPOINTS / f"{name}_config.json").read_text())
    return config, load_file(CHECKPOINTS / f"{name}_expected.safetensors")


def renamed_layers(
    source: dict[str, torch.Tensor], prefix: str, names: dict[str, str], num_layers: int
) -> dict[str, torch.Tensor]:
    return {
        f"layers.{layer}.{target}": source[f"{prefix}{layer}.{name}"]
        for layer in range(num_layers)
        for target, name in names.items()
    }


def test_nvidia_checkpoint_gives_its_logits() -> None:
    config, expected = read("nvidia")
    path = CHECKPOINTS / config["checkpoint"]
    source = torch.load(path, weights_only=True)["model_state_dict"]
    names = {
        "uvqk.weight": "_linear_uvqk_weight",
        "uvqk.bias": "_linear_uvqk_bias",
        "input_norm.weight": "_input_layernorm_weight",
        "input_norm.bias": "_input_layernorm_bias",
        "attn_norm.weight": "_output_layernorm_weight",
        "attn_norm.bias": "_output_layernorm_bias",
        "output.weight": "_linear_proj_weight",
    }
    num_rows = len(expected["x"])
    model = HstuModel(
        ModelConfig(
            name="nvidia",
            layers=HstuLayers(
                family="nvidia",
                num_layers=config["num_layers"],
                hidden_size=config["hidden_size"],
                num_heads=config["num_heads"],
                qk_dim=config["head_dim"],
                v_dim=config["head_dim"],
                scale_length=config["scaling_seqlen"],
            ),
            inputs=Inputs(
                features=(Feature(name="item", num_rows=num_rows),),
                embedding_scale=True,
                positions="from_start",
                num_positions=config["num_position_buckets"],
                max_history_events=200,
            ),
            rank=RankHead(kind="mlp", hidden=(48,), tasks=("a", "b", "c"), norm="l2"),
        ),
        {
            **renamed_layers(source, "_hstu_block._attention_layers.", names, config["num_layers"]),
            "catalogue.item_ids": torch.arange(num_rows),
            "embeddings.item": expected["x"],
            "positions.weight": source[
                "_hstu_block._preprocessor._positional_encoder._position_embeddings_weight"
            ],
            "heads.rank.mlp.0.weight": source["_mlp._mlp.0.weight"].t(),
            "heads.rank.mlp.0.bias": source["_mlp._mlp.0.bias"],
            "heads.rank.mlp.1.weight": source["_mlp._mlp.2.weight"].t(),
            "heads.rank.mlp.1.bias": source["_mlp._mlp.2.bias"],
        },
    )
    logits = []
    for start, length, targets in zip(
        expected["offsets"].tolist(),
        expected["lengths"].tolist(),
        expected["num_candidates"].tolist(),
        strict=False,
    ):
        rows, history = slice(start, start + length), length - targets
        visible = visible_pairs(model, length, targets)
        assert_close(dense_layers(model, expected["x"][rows], visible)[-1], expected["out"][rows])
        positions = np.minimum(rows_from_start(128, 0, length), min(history, 127))
        assert positions.tolist() == expected["position_index"][rows].tolist()
        records = torch.from_numpy(np.stack([np.arange(start, start + length), positions], 1))
        x = model.embed(records)
        assert_close(x, expected["encoder_out"][rows])
        out = dense_layers(model, x, visible)[-1]
        assert_close(out, expected["encoder_stack_out"][rows])
        logits.append(model.rank(out[history:], records[history:]))
    assert_close(torch.cat(logits), expected["logits"])


def test_meta_checkpoint_gives_its_candidate_rows() -> None:
    config, expected = read("non_sparse")
    source = torch.load(CHECKPOINTS / config["checkpoint"], weights_only=True)["dense_dict"]
    names = {
        "uvqk.weight": "_uvqk_weight",
        "uvqk.bias": "_uvqk_beta",
        "input_norm.weight": "_input_norm_weight",
        "input_norm.bias": "_input_norm_bias",
        "attn_norm.weight": "_output_norm_weight",
        "attn_norm.bias": "_output_norm_bias",
        "output.weight": "_output_weight",
    }
    transducer = "_hstu_transducer."
    num_rows, num_times = len(expected["x"]), config["num_time_rows"]
    model = HstuModel(
        ModelConfig(
            name="meta",
            layers=HstuLayers(
                family="meta",
                num_layers=config["num_layers"],
                hidden_size=config["embedding_dim"],
                num_heads=config["num_heads"],
                qk_dim=config["attention_dim"],
                v_dim=config["hidden_dim"],
                scale_length=config["scale_N"],
            ),
            inputs=Inputs(
                features=(Feature(name="item", num_rows=num_rows),),
                embedding_scale=True,
                positions="from_newest",
                num_positions=config["num_position_rows"],
                num_time_buckets=num_times,
                max_history_events=200,
            ),
            retrieve=RetrieveHead(norm="layer_norm", norm_eps=config["output_layer_norm_eps"]),
        ),
        {
            **renamed_layers(
                source, transducer + "_stu_module._stu_layers.", names, config["num_layers"]
            ),
            "catalogue.item_ids": torch.arange(num_rows),
            "embeddings.item": expected["x"],
            "positions.weight": source[
                transducer + "_positional_encoder._position_embeddings_weight"
            ],
            "time_buckets.weight": source[
                transducer + "_positional_encoder._timestamp_embeddings_weight"
            ],
            "heads.retrieve.norm.weight": source[
                transducer + "_output_postprocessor._layer_norm.weight"
            ],
            "heads.retrieve.norm.bias": source[
                transducer + "_output_postprocessor._layer_norm.bias"
            ],
        },
    )
    outputs = []
    for start, length, targets in zip(
        expected["offsets"].tolist(),
        expected["lengths"].tolist(),
        expected["num_targets"].tolist(),
        strict=False,
    ):
        rows, history = slice(start, start + length), length - targets
        visible = visible_pairs(model, length, targets)
        assert_close(dense_layers(model, expected["x"][rows], visible)[-1], expected["out"][rows])
        times = expected["timestamps"][rows].numpy()
        positions = rows_from_newest(
            config["num_position_rows"], config["encoder_contextual_seq_len"], history, targets
        )
        buckets = time_bucket(num_times, int(times[-1]), times)
        assert positions.tolist() == expected["position_index"][rows].tolist()
        assert buckets.tolist() == expected["time_index"][rows].tolist()
        records = np.stack([np.arange(start, start + length), positions, buckets], 1)
        x = model.embed(torch.from_numpy(records))
        assert_close(x, expected["encoder_out"][rows])
        out = dense_layers(model, x, visible)[-1]
        assert_close(out, expected["encoder_stack_out"][rows])
        outputs.append(model.user_embedding(out[history:]))
    assert_close(torch.cat(outputs), expected["candidate_out"])
