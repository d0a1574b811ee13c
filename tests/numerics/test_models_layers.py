"""The layer formulas of the three families against published outputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.models.hstu.model import HstuModel
from tests.numerics.golden_models import dense_layers, golden_model, read_golden, visible_pairs

FULL = [
    "stu_1layer_hist_N16",
    "stu_1layer_hist_N64",
    "stu_3layer_targets",
    "stu_3layer_ctx_targets",
    "stu_3layer_window_targets",
    "stu_2layer_groupnorm_targets",
    "nv_1layer_hist_scale40",
    "nv_1layer_hist_scale_maxlen",
    "nv_3layer_candidates",
    "nv_3layer_ctx_candidates",
    "nv_3layer_target_group2",
    "nv_2layer_noresidual",
    "research_1layer_rab",
    "research_3layer_rab",
    "research_3layer_norab_concat_ua",
    "research_3layer_delta_base",
]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=5e-5, rtol=1e-4)


def research_bias(
    model: HstuModel, tensors: dict[str, torch.Tensor], user: int, length: int
) -> list[torch.Tensor] | None:
    """Bias [length, length] of each layer, by the formula, in Python integers and floats."""
    if not model.config.layers.relative_bias:
        return None
    times = tensors["timestamps"][user].tolist()
    n = model.config.layers.scale_length
    times.append(times[n - 1])
    biases = []
    for layer in range(model.spec.num_layers):
        position, time = (table.tolist() for table in model.bias_tables(layer))
        biases.append(
            torch.tensor(
                [
                    [
                        position[n - 1 + j - i]
                        + time[
                            min(
                                128,
                                math.floor(math.log(max(1, abs(times[i + 1] - times[j]))) / 0.301),
                            )
                        ]
                        for j in range(length)
                    ]
                    for i in range(length)
                ]
            )
        )
    return biases


def num_targets(config: dict[str, Any], user: int) -> int:
    targets = config.get("num_targets") or config.get("num_candidates")
    return targets[user] if targets else 0


@pytest.mark.parametrize("name", FULL)
def test_layers_give_published_outputs_for_full_sequences(name: str) -> None:
    config, tensors = read_golden(name)
    model = golden_model(config, tensors)
    for user, (start, stop) in enumerate(
        zip(tensors["offsets"], tensors["offsets"][1:], strict=False)
    ):
        length = int(stop - start)
        visible = visible_pairs(model, length, num_targets(config, user))
        bias = research_bias(model, tensors, user, length)
        x = tensors.get("x", tensors.get("x_base"))
        assert x is not None
        outputs = dense_layers(model, x[start:stop], visible, bias)
        for layer, output in enumerate(outputs):
            assert_close(output, tensors[f"layer_out.{layer}"][start:stop])
        assert_close(outputs[-1], tensors["out"][start:stop])


@pytest.mark.parametrize("name", ["nv_3layer_candidates", "nv_3layer_ctx_candidates"])
def test_projections_give_published_keys_and_values(name: str) -> None:
    config, tensors = read_golden(name)
    model = golden_model(config, tensors)
    x = tensors["x"]
    for layer in range(model.spec.num_layers):
        _, _, k, v = model.project(layer, x)
        assert_close(k, tensors[f"k.{layer}"])
        assert_close(v, tensors[f"v.{layer}"])
        x = tensors[f"layer_out.{layer}"]


def test_bf16_model_stays_as_near_to_float32_as_its_published_twin() -> None:
    config, tensors = read_golden("stu_3layer_targets_bf16")
    _, float_tensors = read_golden("stu_3layer_targets")
    model = golden_model(config, tensors)
    outputs = []
    for user, (start, stop) in enumerate(
        zip(tensors["offsets"], tensors["offsets"][1:], strict=False)
    ):
        visible = visible_pairs(model, int(stop - start), num_targets(config, user))
        outputs.append(dense_layers(model, tensors["x"][start:stop].bfloat16(), visible)[-1])
    output = torch.cat(outputs)
    assert output.dtype == torch.bfloat16
    assert (output.float() - float_tensors["out"]).abs().mean() <= 0.04


@pytest.mark.parametrize("name", ["stu_3layer_cached_targets", "stu_3layer_cached_ctx_targets"])
def test_projections_give_published_caches(name: str) -> None:
    config, tensors = read_golden(name)
    model = golden_model(config, tensors)
    start = 0
    for length in tensors["hist_lengths"].tolist():
        rows = slice(start, start + length)
        x = tensors["hist_x"][rows]
        outputs = dense_layers(model, x, visible_pairs(model, length, 0))
        for layer, output in enumerate(outputs):
            _, _, k, v = model.project(layer, x)
            assert_close(k, tensors[f"k_cache.{layer}"][rows])
            assert_close(v, tensors[f"v_cache.{layer}"][rows])
            x = output
        assert_close(outputs[-1], tensors["hist_out"][rows])
        start += length
