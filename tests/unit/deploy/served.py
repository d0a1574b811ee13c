"""Which routes the server has, asked of the application itself."""

from __future__ import annotations

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.entrypoints.app import App
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.routes.routing import Match, Route

_ROUTER = App(AsyncEngine(None, EngineConfig()), ServerConfig())._router


def served(method: str, path: str) -> Route | None:
    """The route of that method and path, or None."""
    found = _ROUTER.find(method, path)
    return found.route if isinstance(found, Match) else None
