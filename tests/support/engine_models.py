"""Small models, one for each way a history can be reused, shared by the engine's property tests."""

from engine.models.config import (
    Catalogue,
    ContextFeature,
    Feature,
    HstuLayers,
    Inputs,
    ModelConfig,
    RankHead,
    RetrieveHead,
)

NUM_ITEMS = 40
MAX_EVENTS = 48


def _layers(family, **changes):
    sizes = {
        "family": family,
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "qk_dim": 8,
        "v_dim": 8 if family == "nvidia" else 12,
        "scale_length": 64,
    }
    return HstuLayers(**{**sizes, **changes})


def _config(name, layers, *, dtype="float32", **inputs):
    features = inputs.pop("features", (Feature(name="item", num_rows=NUM_ITEMS + 1),))
    return ModelConfig(
        name=name,
        dtype=dtype,
        layers=layers,
        inputs=Inputs(features=features, max_history_events=MAX_EVENTS, **inputs),
        catalogue=Catalogue(first_row=1, unknown_candidates="unk"),
        rank=RankHead(kind="mlp", hidden=(8,), tasks=("click", "buy")),
        retrieve=RetrieveHead(norm="l2", norm_items=True),
    )


_FROM_START = {"positions": "from_start", "num_positions": MAX_EVENTS + 1}
_ITEM_ACTION = (
    Feature(name="item", num_rows=NUM_ITEMS + 1),
    Feature(name="action", num_rows=6, on="history"),
)

CONFIGS = {
    "append": _config("append", _layers("meta"), **_FROM_START),
    "append_bf16": _config("append_bf16", _layers("meta"), dtype="bfloat16", **_FROM_START),
    "stride": _config(
        "stride", _layers("meta"), overlong="keep_newest", keep_stride=8, **_FROM_START
    ),
    "interleaved": _config(
        "interleaved",
        _layers("nvidia", target_group_size=2),
        features=_ITEM_ACTION,
        tokens_per_event=2,
        context=(ContextFeature(name="segment", num_rows=4),),
        positions="from_start",
        num_positions=2 * MAX_EVENTS + 2,
    ),
    "window": _config("window", _layers("meta", window=5, group_norm=True), **_FROM_START),
    "research": _config("research", _layers("research", relative_bias=True), **_FROM_START),
    "exact": _config(
        "exact",
        _layers("meta"),
        context=(ContextFeature(name="segment", num_rows=4),),
        context_mask="bidirectional",
        **_FROM_START,
    ),
}
