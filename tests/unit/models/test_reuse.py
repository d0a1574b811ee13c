"""The reuse mode follows from what a model declares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.random_weights import builtin_model
from engine.models.registry import model_factory
from engine.models.reuse import derive_reuse
from engine.types import Reuse


@pytest.mark.parametrize(
    ("declared", "mode", "reason"),
    [
        ({}, Reuse.APPEND, "causal"),
        ({"num_context": 2}, Reuse.APPEND, "causal"),
        ({"has_next_event_bias": True}, Reuse.APPEND, "computed anew"),
        ({"has_bidirectional_context": True}, Reuse.EXACT, "context_mask"),
        ({"has_positions_from_newest": True}, Reuse.EXACT, "newest event"),
        (
            {"has_positions_from_newest": True, "has_query_time_inputs": True},
            Reuse.REQUEST,
            "num_time_buckets",
        ),
    ],
)
def test_reuse_mode_and_reason(declared: dict[str, Any], mode: Reuse, reason: str) -> None:
    decision = derive_reuse(replace(builtin_model().spec, **declared))
    assert decision.mode is mode
    assert reason in decision.reason


def test_a_scale_that_depends_on_the_batch_names_the_option_that_fixes_it() -> None:
    with pytest.raises(ConfigError, match=r"set layers\.scale_length"):
        derive_reuse(replace(builtin_model().spec, scale=None))


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'decoder2', known are: hstu"):
        model_factory("decoder2")


def test_the_builtin_model_is_the_same_every_time() -> None:
    import torch

    records = torch.tensor([[5, 0], [17, 3]])
    assert torch.equal(builtin_model().embed(records), builtin_model().embed(records))
