"""Whether the server is alive and would take a request, and why not.

Told from the engine's phase and the age of the core's heartbeat, without waiting for the core.
"""

from __future__ import annotations

from engine.async_engine import AsyncEngine
from engine.core_client import Phase


def why_not_live(engine: AsyncEngine, heartbeat_timeout_s: float) -> str | None:
    """What is wrong with the core, or None; one that still starts is alive."""
    if engine.phase is Phase.DEAD or engine.phase is Phase.STOPPED:
        return "the core has ended"
    if engine.phase in (Phase.SERVING, Phase.DRAINING):
        age_s = engine.heartbeat_age_s
        if age_s > heartbeat_timeout_s:
            return f"the core's last heartbeat is {age_s:.1f} s old"
    return None


def why_not_ready(engine: AsyncEngine, heartbeat_timeout_s: float) -> str | None:
    """Why a request would not be taken now, or None."""
    reason = why_not_live(engine, heartbeat_timeout_s)
    if reason is None and not engine.is_ready:
        return f"the engine is {engine.phase.value}"
    return reason
