"""Where user state lives: pages, chunks, fingerprints, eviction. Numbers and lists, no bytes.

`BlockManager` is the one public face.
"""

from engine.block_manager.fingerprint import HashChain
from engine.block_manager.manager import BlockManager
from engine.block_manager.reports import UserSummary
from engine.block_manager.reservation import (
    ForgetTicket,
    Lookup,
    PoolUsage,
    Reservation,
    VersionUsage,
)
from engine.block_manager.user_state import UserKey, UserView

__all__ = [
    "BlockManager",
    "ForgetTicket",
    "HashChain",
    "Lookup",
    "PoolUsage",
    "Reservation",
    "UserKey",
    "UserSummary",
    "UserView",
    "VersionUsage",
]
