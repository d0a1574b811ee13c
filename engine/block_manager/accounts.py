"""What each weights version uses of the two pools, and what it may use.

A version has one account in each tier. A page or a chunk in use is on exactly one account, from
the moment it is taken until its last owner lets go of it: whether a state, a piece or a copy holds
it, and whether the state can still be found or not. So the accounts of a tier add up to what is in
use of its pool.

A quota is soft: it says whose space is taken first when there is not enough, not who may have
what is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.block_manager.eviction import EvictionPolicy
from engine.errors import InvariantError

if TYPE_CHECKING:
    from engine.block_manager.user_state import UserState

_ROUNDING = 1e-9  # 0.29 * 100 is a little less than 29


@dataclass(slots=True, eq=False, kw_only=True)
class Account:
    """One weights version in one tier. Owned by the ledger; compared by identity.

    Attributes:
        order: The version's users in this tier, the first to give up space first.
        quota: Pages or chunks that nobody else can take from it; None without quotas.
        used: Pages or chunks in use.
    """

    order: EvictionPolicy[UserState]
    quota: int | None = None
    used: int = 0

    @property
    def excess(self) -> int:
        """What is used above the quota, and so may go for anybody; all of it without quotas."""
        return max(0, self.used - (self.quota or 0))


@dataclass(slots=True, eq=False, kw_only=True)
class VersionAccounts:
    """A weights version's accounts. Owned by the ledger.

    Attributes:
        num_states: States of this version that can be found.
        num_leaving: Detached states of this version that a step or a copy still touches.
    """

    version: str
    device: Account
    host: Account
    num_states: int = 0
    num_leaving: int = 0

    @property
    def is_unused(self) -> bool:
        """No state refers to it. (What is in use belongs to a state, be it a leaving one.)"""
        return self.num_states == self.num_leaving == 0


class Quota(NamedTuple):
    """What a version may keep: pages on the device, chunks on the host."""

    pages: int
    chunks: int


class Ledger:
    """The accounts of all weights versions. Owned by the block manager (loop thread)."""

    __slots__ = ("_accounts", "_make_policy", "_num_chunks", "_num_pages", "_quotas")

    def __init__(
        self,
        *,
        num_pages: int,
        num_chunks: int,
        make_policy: Callable[[], EvictionPolicy[Any]],
    ) -> None:
        self._num_pages = num_pages
        self._num_chunks = num_chunks
        self._make_policy = make_policy
        self._accounts: dict[str, VersionAccounts] = {}
        self._quotas: dict[str, Quota] = {}

    def __iter__(self) -> Iterator[VersionAccounts]:
        return iter(self._accounts.values())

    def of(self, version: str) -> VersionAccounts:
        """The accounts of a version, opened when there are none."""
        accounts = self._accounts.get(version)
        if accounts is None:
            accounts = VersionAccounts(
                version=version,
                device=Account(order=self._make_policy()),
                host=Account(order=self._make_policy()),
            )
            self._apply_quota(accounts)
            self._accounts[version] = accounts
        return accounts

    def quota_of(self, version: str) -> Quota | None:
        """A version that is not named among the quotas may keep nothing; None without quotas."""
        return self._quotas.get(version, Quota(0, 0)) if self._quotas else None

    def set_quotas(self, shares: Mapping[str, float]) -> None:
        """Replace all quotas: weights version -> share of both pools, in (0, 1], together <= 1.

        Rounded down to whole pages and chunks, at least one page, which the largest quotas give:
        together they fit into the pools, if there is a page for each version. An empty mapping: no
        quotas. Raises InvariantError and changes nothing when a share is out of range.
        """
        for version, share in shares.items():
            if not 0 < share <= 1:
                raise InvariantError(f"share {share} of version {version!r} is not in (0, 1]")
        total = sum(shares.values())
        if total > 1 + _ROUNDING:
            raise InvariantError(f"the shares of {', '.join(shares)} add up to {total}, above 1")
        pages = self._whole_pages(shares)
        self._quotas = {
            version: Quota(pages=pages[version], chunks=int(share * self._num_chunks + _ROUNDING))
            for version, share in shares.items()
        }
        self.close_unused()
        for version in shares:
            self.of(version)
        for accounts in self:
            self._apply_quota(accounts)

    def _whole_pages(self, shares: Mapping[str, float]) -> dict[str, int]:
        pages = {
            version: max(1, int(share * self._num_pages + _ROUNDING))
            for version, share in shares.items()
        }
        surplus = sum(pages.values()) - max(self._num_pages, len(pages))
        for _ in range(surplus):
            pages[max(pages, key=pages.__getitem__)] -= 1
        return pages

    def _apply_quota(self, accounts: VersionAccounts) -> None:
        quota = self.quota_of(accounts.version)
        accounts.device.quota = None if quota is None else quota.pages
        accounts.host.quota = None if quota is None else quota.chunks

    def close_unused(self) -> None:
        """Let go of the accounts of versions that have neither quota nor state."""
        self._accounts = {
            version: accounts
            for version, accounts in self._accounts.items()
            if version in self._quotas or not accounts.is_unused
        }
