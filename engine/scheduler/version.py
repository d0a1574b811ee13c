"""One weights version, as requests are bound to it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.base import Model, ModelSpec
from engine.scheduler.cost import CostModel
from engine.types import Reuse


@dataclass(slots=True, eq=False, kw_only=True)
class ServedVersion:
    """Owned by the core thread.

    Attributes:
        name: The weights version; part of every user's key and of every fingerprint.
        model: Replaced when its item table grows; what was prepared before stays valid.
        cost: Learned from the steps of this version.
        num_bound: Requests that are bound to it and unfinished.
    """

    name: str
    model: Model
    reuse: Reuse
    cost: CostModel
    num_bound: int = 0

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec
