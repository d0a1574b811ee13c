"""How long will a step take? A rate learned from the steps that ran.

Work is counted in FLOPs as the model declares them: linear work per row, attention work per
(row, visible key) pair. The rate is an exponential average of measured FLOP/s. A small step is
mostly overhead, so that rate makes large ones look slower than they are: fine for filling a step,
not for refusing a request. `least_s` is for that.
"""

from __future__ import annotations

from engine.models.base import ModelSpec

_WEIGHT_OF_NEWEST = 0.2


class CostModel:
    """Owned by the core thread."""

    def __init__(self, spec: ModelSpec) -> None:
        self._flops_per_row = float(spec.flops_per_token)
        self._flops_per_pair = 2.0 * spec.num_layers * spec.num_heads * (spec.qk_dim + spec.v_dim)
        self._flops_per_s: float | None = None
        self._best_flops_per_s = 0.0
        self._largest_flops = 0.0

    def flops(self, num_rows: int, num_pairs: int) -> float:
        """num_pairs: (row, visible key) pairs of the step."""
        return self._flops_per_row * num_rows + self._flops_per_pair * num_pairs

    def predict_s(self, num_rows: int, num_pairs: int) -> float | None:
        """Seconds of device time, or None before any step was measured."""
        if self._flops_per_s is None:
            return None
        return self.flops(num_rows, num_pairs) / self._flops_per_s

    def least_s(self, num_rows: int, num_pairs: int) -> float:
        """Seconds below which no step is expected to end: as fast as the fastest step so far, and
        work beyond the largest step so far is not guessed at. 0 before any step was measured."""
        if self._best_flops_per_s == 0.0:
            return 0.0
        known = min(self.flops(num_rows, num_pairs), self._largest_flops)
        return known / self._best_flops_per_s

    def observe(self, num_rows: int, num_pairs: int, run_s: float) -> None:
        """Learn from a finished step."""
        if run_s <= 0.0 or num_rows == 0:
            return
        flops = self.flops(num_rows, num_pairs)
        rate = flops / run_s
        self._best_flops_per_s = max(self._best_flops_per_s, rate)
        self._largest_flops = max(self._largest_flops, flops)
        old = self._flops_per_s
        self._flops_per_s = rate if old is None else old + _WEIGHT_OF_NEWEST * (rate - old)
