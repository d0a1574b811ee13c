"""The model and the weights version that a path names."""

from __future__ import annotations

from engine.async_engine import AsyncEngine
from engine.entrypoints.routes.routing import Exchange
from engine.errors import UnknownModel
from engine.types import ModelInfo


def require_model(engine: AsyncEngine, exchange: Exchange) -> ModelInfo:
    """The model of the path's `{model}` and `{version}`. Raises UnknownModel, EngineDead."""
    served = engine.served
    info = served.info
    model, version = exchange.params["model"], exchange.params.get("version")
    if model != info.name:
        raise UnknownModel(f"model {model!r} is not loaded: this server has {info.name!r}")
    if version is None:
        return info
    for loaded in served.infos:
        if loaded.weights_version == version:
            return loaded
    known = ", ".join(map(repr, served.versions))
    raise UnknownModel(f"version {version!r} of {model!r} is not loaded: this server has {known}")
