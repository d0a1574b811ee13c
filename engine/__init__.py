"""mtserve: serving generative-recommendation models with tiered user state.

Importing this package loads no torch: `Engine` is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.types import CacheMode, Outcome, Request, Response, Task

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.engine import Engine

__all__ = [
    "AsyncEngine",
    "CacheMode",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Outcome",
    "Request",
    "Response",
    "Task",
]

_LAZY = {"AsyncEngine": "engine.async_engine", "Engine": "engine.engine"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
