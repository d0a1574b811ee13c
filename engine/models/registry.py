"""Model architectures by name.

An architecture is an entry point of the group `engine.models`: its name is what
`layers.architecture` of config.json says, its value a factory (parsed config.json, tensors, name of
the source) -> Model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import torch

from engine.errors import ConfigError
from engine.models.base import Model

ModelFactory = Callable[[Mapping[str, Any], Mapping[str, torch.Tensor], str], Model]

GROUP = "engine.models"


def model_factory(architecture: str) -> ModelFactory:
    """The factory of that name. Raises ConfigError when there is none, or it fails to load."""
    if architecture == "hstu":
        from engine.models.hstu.model import build_hstu

        return build_hstu
    found = entry_points(group=GROUP)
    for entry_point in found:
        if entry_point.name == architecture:
            try:
                factory: ModelFactory = entry_point.load()
            except Exception as error:
                raise ConfigError(
                    f"model architecture {architecture!r} ({entry_point.value}) failed to load: "
                    f"{error!r}"
                ) from error
            return factory
    known = ", ".join(sorted({"hstu", *found.names}))
    raise ConfigError(
        f"layers.architecture is {architecture!r}, known are: {known}. Install the package that "
        f"registers it under the entry-point group {GROUP}"
    )
