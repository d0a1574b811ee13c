"""Which reuse of K/V a model's own properties allow."""

from __future__ import annotations

from typing import NamedTuple

from engine.errors import ConfigError
from engine.models.base import ModelSpec
from engine.types import Reuse


class ReuseDecision(NamedTuple):
    """The mode, and a sentence that says why."""

    mode: Reuse
    reason: str


def derive_reuse(spec: ModelSpec) -> ReuseDecision:
    """The most reuse that leaves every score as a recompute gives it.

    Raises ConfigError when the attention scale depends on the batch.
    """
    if spec.scale is None:
        raise ConfigError(
            f"model {spec.name}: the attention scale 1/N would depend on the batch, so no K/V "
            "could be reused: set layers.scale_length in config.json to the N of training"
        )
    if spec.has_query_time_inputs:
        return ReuseDecision(
            Reuse.REQUEST,
            "inputs of history rows depend on the query's time (inputs.num_time_buckets): the "
            "history is computed once for all candidates of a request and not kept",
        )
    causes = []
    if spec.has_positions_from_newest:
        causes.append("positions are counted from the newest event (inputs.positions)")
    if spec.has_bidirectional_context:
        causes.append("contextual rows read the whole history (inputs.context_mask)")
    if causes:
        return ReuseDecision(
            Reuse.EXACT, " and ".join(causes) + ": K/V is reused for the same whole history only"
        )
    if spec.has_next_event_bias:
        return ReuseDecision(
            Reuse.APPEND,
            "the history is causal; its last row reads the next event's time and is computed anew "
            "in every request (layers.relative_bias)",
        )
    return ReuseDecision(
        Reuse.APPEND, "the history is causal and no row depends on the query or on later events"
    )
