"""A plain-Python oracle of the replacement policy: what must be found where, to the token.

Written from the policy's text, apart from the engine: histories are lists of tokens that are
compared one with another, space is counted, and nothing is hashed, pinned or copied. One request
at a time; its transfers are complete before the next one. Slow and obvious on purpose.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Served(NamedTuple):
    """Where the tokens of one request came from; the three sum to the history's length."""

    device_tokens: int
    host_tokens: int
    computed_tokens: int


@dataclass(slots=True, eq=False)
class OracleUser:
    """What the oracle knows of one user: the tokens, and how many of them each tier holds."""

    tokens: list[Hashable] = field(default_factory=list)
    device_len: int = 0
    host_len: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class OracleTotals:
    """Sums over all requests so far."""

    requests: int = 0
    history_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    computed_tokens: int = 0
    evicted_pages: int = 0
    dropped_tokens: int = 0
    evicted_host_pages: int = 0
    onloaded_pages: int = 0
    offloaded_pages: int = 0
    offloads_skipped: int = 0
    scratch_runs: int = 0


class Oracle:
    """The policy on plain lists.

    Args:
        num_pages, page_size: Device pages and tokens of a page.
        num_chunks, pages_per_chunk: Host chunks and pages of a chunk; no chunks: no host tier.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, num_chunks: int, pages_per_chunk: int
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_chunks = num_chunks
        self.chunk_tokens = pages_per_chunk * page_size
        self.totals = OracleTotals()
        self.users: dict[Hashable, OracleUser] = {}
        # Pages and chunks of the users that have any, the least recently planned user first.
        self._pages: OrderedDict[Hashable, int] = OrderedDict()
        self._chunks: OrderedDict[Hashable, int] = OrderedDict()
        self._pages_used = 0
        self._chunks_used = 0

    @property
    def pages_in_use(self) -> int:
        return self._pages_used

    @property
    def chunks_in_use(self) -> int:
        return self._chunks_used

    def device_len(self, user: Hashable) -> int:
        return self.users[user].device_len if user in self.users else 0

    def host_len(self, user: Hashable) -> int:
        return self.users[user].host_len if user in self.users else 0

    def request(self, user: Hashable, history: Sequence[Hashable]) -> Served:
        """Serve one request and return where its history came from."""
        length = len(history)
        self.totals.requests += 1
        self.totals.history_tokens += length
        if self._pages_of(length) > self.num_pages:
            self.totals.scratch_runs += 1
            return self._count(Served(0, 0, length))
        state = self.users.setdefault(user, OracleUser())
        for held in (self._pages, self._chunks):
            if user in held:
                held.move_to_end(user)
        matched, keeps_state = self._match(state, history)
        if not keeps_state and matched < len(state.tokens):
            del state.tokens[matched:]
            self._set_lengths(user, min(state.device_len, matched), min(state.host_len, matched))
        served = self._hits(state, matched, length)
        self._bring_in(user, matched, length)
        if not keeps_state and length > len(state.tokens):
            state.tokens.extend(history[len(state.tokens) :])
            self._set_lengths(user, length, state.host_len)
        self._offload(user)
        self._forget_if_empty(user)
        return self._count(served)

    def forget(self, user: Hashable) -> None:
        """Remove a user from both tiers."""
        if user in self.users:
            self._set_lengths(user, 0, 0)
            self._forget_if_empty(user)

    def evict_device(self) -> None:
        """Take all pages of all users, as one request that needs the whole device would."""
        for user in list(self.users):
            self._evict_pages(user, self._pages.get(user, 0))
            self._forget_if_empty(user)

    def _match(self, state: OracleUser, history: Sequence[Hashable]) -> tuple[int, bool]:
        """(matched tokens, the history is a shorter prefix and the state stays as it is)."""
        known, length = state.tokens, len(history)
        common = min(len(known), length)
        if known[:common] != list(history[:common]):
            common = 0
            while known[common] == history[common]:
                common += 1
        boundary = common - common % self.page_size
        own_boundary = length - length % self.page_size
        if length < len(known):
            return boundary, boundary == own_boundary
        return (common if common == len(known) else boundary), False

    def _hits(self, state: OracleUser, matched: int, length: int) -> Served:
        device_hit = min(matched, state.device_len)
        host_hit = max(0, min(matched, state.host_len) - device_hit)
        return Served(device_hit, host_hit, length - device_hit - host_hit)

    def _count(self, served: Served) -> Served:
        self.totals.device_tokens += served.device_tokens
        self.totals.host_tokens += served.host_tokens
        self.totals.computed_tokens += served.computed_tokens
        return served

    def _bring_in(self, user: Hashable, matched: int, length: int) -> None:
        """Find pages for the onload and for the new rows, and make the onload resident."""
        state = self.users[user]
        onload_end = max(state.device_len, min(matched, state.host_len))
        onload_pages = self._pages_of(onload_end) - self._pages_of(state.device_len)
        new_pages = self._pages_of(length) - self._pages_of(matched)
        shortage = onload_pages + new_pages - (self.num_pages - self._pages_used)
        while shortage > 0:
            victim = next((other for other in self._pages if other != user), None)
            if victim is None:
                break
            shortage -= self._evict_pages(victim, shortage)
            self._forget_if_empty(victim)
        if shortage > 0:
            # A prefix of a state that fills the device: only its own unread tail is left.
            self._evict_pages(user, shortage)
        if onload_pages:
            self._set_lengths(user, onload_end, state.host_len)
            self.totals.onloaded_pages += onload_pages

    def _evict_pages(self, user: Hashable, wanted: int) -> int:
        """Take up to `wanted` pages from a user's tail; how many were taken."""
        state = self.users[user]
        pages = self._pages.get(user, 0)
        taken = min(wanted, pages)
        if taken <= 0:
            return 0
        kept_tokens = (pages - taken) * self.page_size
        self.totals.dropped_tokens += max(0, state.device_len - max(kept_tokens, state.host_len))
        self.totals.evicted_pages += taken
        self._set_lengths(user, kept_tokens, state.host_len)
        return taken

    def _offload(self, user: Hashable) -> None:
        """Whole pages from host_len upwards, as far as chunks can be had."""
        state = self.users[user]
        target = state.device_len - state.device_len % self.page_size
        if self.num_chunks == 0 or target <= state.host_len:
            return
        room = self._chunks.get(user, 0) * self.chunk_tokens
        while room < target and self._find_chunk(user):
            room += self.chunk_tokens
            self._hold_chunks(user, room // self.chunk_tokens)
        if room < target:
            self.totals.offloads_skipped += 1
        target = min(target, room)
        self.totals.offloaded_pages += (target - state.host_len) // self.page_size
        self._set_lengths(user, state.device_len, max(target, state.host_len))

    def _find_chunk(self, extended: Hashable) -> bool:
        """A free chunk, if need be by taking the tail chunk of the least recent other user."""
        if self._chunks_used < self.num_chunks:
            return True
        victim = next((other for other in self._chunks if other != extended), None)
        if victim is None:
            return False
        state = self.users[victim]
        kept_tokens = (self._chunks[victim] - 1) * self.chunk_tokens
        self.totals.evicted_host_pages += (state.host_len - kept_tokens) // self.page_size
        self._set_lengths(victim, state.device_len, kept_tokens)
        self._forget_if_empty(victim)
        return True

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _hold_pages(self, user: Hashable, pages: int) -> None:
        self._pages_used += pages - self._pages.get(user, 0)
        _hold(self._pages, user, pages)

    def _hold_chunks(self, user: Hashable, chunks: int) -> None:
        self._chunks_used += chunks - self._chunks.get(user, 0)
        _hold(self._chunks, user, chunks)

    def _set_lengths(self, user: Hashable, device_len: int, host_len: int) -> None:
        state = self.users[user]
        state.device_len, state.host_len = device_len, host_len
        del state.tokens[max(device_len, host_len) :]
        self._hold_pages(user, self._pages_of(device_len))
        self._hold_chunks(user, -(-host_len // self.chunk_tokens))

    def _forget_if_empty(self, user: Hashable) -> None:
        state = self.users[user]
        if state.device_len == 0 and state.host_len == 0:
            del self.users[user]


def _hold(held: OrderedDict[Hashable, int], user: Hashable, count: int) -> None:
    """A new holder is the most recent one (only the user just planned gains anything)."""
    if count:
        held[user] = count
    else:
        held.pop(user, None)
