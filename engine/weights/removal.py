"""Removing all user state of a weights version, a few users in each pass of the core."""

from __future__ import annotations

from engine.block_manager.manager import BlockManager
from engine.block_manager.reservation import ForgetTicket

_USERS_A_PASS = 1000
"""About ten milliseconds of the core's time."""


class StateRemoval:
    """Owned by the core thread.

    Attributes:
        device_tokens, host_tokens: What has been removed so far.
    """

    def __init__(self, version: str, manager: BlockManager) -> None:
        self._version = version
        self._manager = manager
        self._last: ForgetTicket | None = None
        self.device_tokens = 0
        self.host_tokens = 0

    def advance(self) -> bool:
        """Go on; True once nothing can touch the version's state any more."""
        if self._last is None:
            ticket = self._manager.drop_version(self._version, limit=_USERS_A_PASS)
            self.device_tokens += ticket.device_tokens
            self.host_tokens += ticket.host_tokens
            if ticket.num_found == _USERS_A_PASS:
                return False
            self._last = ticket
        return self._last.is_done()
