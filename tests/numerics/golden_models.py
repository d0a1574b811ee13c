"""Golden files as models: their weights under the names of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from engine.models.config import (
    ContextFeature,
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
)
from engine.models.hstu.mask import MaskRule, candidate_kv_lo
from engine.models.hstu.model import HstuModel
from engine.models.hstu.tensors import expected_shapes

GOLDEN = Path(__file__).parents[1] / "golden"

_NAMES = {
    "meta_stu": {
        "uvqk.weight": "layers.{}._uvqk_weight",
        "uvqk.bias": "layers.{}._uvqk_beta",
        "input_norm.weight": "layers.{}._input_norm_weight",
        "input_norm.bias": "layers.{}._input_norm_bias",
        "attn_norm.weight": "layers.{}._output_norm_weight",
        "attn_norm.bias": "layers.{}._output_norm_bias",
        "output.weight": "layers.{}._output_weight",
    },
    "meta_research": {
        "uvqk.weight": "_attention_layers.{}._uvqk",
        "output.weight": "_attention_layers.{}._o.weight",
        "output.bias": "_attention_layers.{}._o.bias",
        "bias.position": "_attention_layers.{}._rel_attn_bias._pos_w",
        "bias.time": "_attention_layers.{}._rel_attn_bias._ts_w",
    },
    "nvidia": {
        "uvqk.weight": "layers.{}._linear_uvqk_weight",
        "uvqk.bias": "layers.{}._linear_uvqk_bias",
        "input_norm.weight": "layers.{}._input_layernorm_weight",
        "input_norm.bias": "layers.{}._input_layernorm_bias",
        "attn_norm.weight": "layers.{}._output_layernorm_weight",
        "attn_norm.bias": "layers.{}._output_layernorm_bias",
        "output.weight": "layers.{}._linear_proj_weight",
    },
}


def read_golden(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config, tensors) of a golden file."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        return config, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def golden_layers(config: dict[str, Any]) -> HstuLayers:
    """The layer part of a golden file's config."""
    family = {"meta_stu": "meta", "meta_research": "research", "nvidia": "nvidia"}[config["family"]]
    head_dim = config.get("head_dim")
    scale = config.get("scale_N") or config.get("scale_n") or config["scaling_seqlen"]
    return HstuLayers(
        family=family,
        num_layers=config["num_layers"],
        hidden_size=config.get("embedding_dim") or config["hidden_size"],
        num_heads=config["num_heads"],
        qk_dim=head_dim or config["attention_dim"],
        v_dim=head_dim or config.get("hidden_dim") or config["linear_dim"],
        scale_length=config["max_seqlen"] if scale == -1 else scale,
        alpha=config.get("attn_alpha") or config.get("alpha"),
        norm_eps=config.get("norm_eps") or config["layernorm_epsilon"],
        window=config.get("max_attn_len") or 0,
        target_group_size=config.get("target_group_size") or 1,
        residual=config.get("residual", True),
        group_norm=config.get("group_norm", False),
        concat_ua=config.get("concat_ua", False),
        relative_bias=config.get("use_timestamps", False),
    )


def golden_model(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], prefix: str = ""
) -> HstuModel:
    """A model with the file's layers, a one-row item table and a linear head of zeros."""
    layers = golden_layers(config)
    num_context = config.get("contextual_seq_len") or config.get("num_contextuals") or 0
    model_config = ModelConfig(
        name="golden",
        dtype=config["dtype"],
        layers=layers,
        inputs=Inputs(
            features=(Feature(name="item", num_rows=1),),
            context=tuple(ContextFeature(name=f"c{i}", num_rows=1) for i in range(num_context)),
            context_mask="bidirectional",
            max_history_events=layers.scale_length - 1,
        ),
        rank=RankHead(kind="mlp"),
    )
    found = {"catalogue.item_ids": torch.zeros(1, dtype=torch.int64)}
    for name, shape in expected_shapes(model_config).items():
        if name.startswith("layers."):
            index, _, rest = name.removeprefix("layers.").partition(".")
            source = _NAMES[config["family"]][rest].format(index)
            weight = tensors[prefix + source]
            found[name] = weight.t() if source.endswith("_o.weight") else weight
        elif name not in found:
            found[name] = torch.zeros([1 if size is None else size for size in shape])
    return HstuModel(model_config, found)


def visible_pairs(model: HstuModel, length: int, num_targets: int) -> torch.Tensor:
    """bool [length, length] from the model's intervals and chains; the last rows are targets."""
    history = length - num_targets
    lo, hi = model.history_intervals(0, history, history)
    visible = np.zeros((length, length), dtype=bool)
    for row in range(history):
        visible[row, lo[row] : hi[row]] = True
    group = model.config.layers.target_group_size
    rule = MaskRule(
        num_shared=model.spec.num_context,
        window=model.spec.window,
        has_rising_candidates=model.config.layers.family == "nvidia",
    )
    target_lo = candidate_kv_lo(rule, history, num_targets)
    for target in range(num_targets):
        row = history + target
        visible[row, target_lo[target] : history] = True
        visible[row, history + target // group * group : row + 1] = True
    return torch.from_numpy(visible)


def dense_layers(
    model: HstuModel,
    x_LD: torch.Tensor,
    visible_LL: torch.Tensor,
    bias_LL: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Outputs [L, D] of every layer for one user, attention written as one masked matrix."""
    outputs = []
    assert model.spec.scale is not None
    for layer in range(model.spec.num_layers):
        u, q, k, v = model.project(layer, x_LD)
        scores = torch.einsum("iha,jha->hij", q.double(), k.double()) * model.spec.alpha
        if bias_LL is not None:
            scores = scores + bias_LL[layer].double()
        weights = scores * torch.sigmoid(scores) * model.spec.scale * visible_LL
        attended = torch.einsum("hij,jhv->ihv", weights, v.double()).float()
        x_LD = model.output(layer, x_LD, u, attended)
        outputs.append(x_LD)
    return outputs
