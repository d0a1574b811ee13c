"""One admitted request, as the scheduler and the core keep it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.block_manager.fingerprint import HashChain
from engine.block_manager.user_state import UserKey
from engine.models.base import PreparedRequest
from engine.scheduler.life import Event, State, fire
from engine.scheduler.version import ServedVersion
from engine.types import Float32Array, Int64Array, Request


class Line(NamedTuple):
    """Whose requests run one after the other, in the order of their admission."""

    namespace: str
    user_id: str
    weights_version: str


@dataclass(slots=True, eq=False, kw_only=True)
class Answer:
    """What has been computed for a request so far. Owned by the core thread."""

    scores: list[Float32Array] = field(default_factory=list)
    user_embedding: Float32Array | None = None
    items: Int64Array | None = None
    item_scores: Float32Array | None = None
    onload_wait_s: float = 0.0
    run_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRequest:
    """Owned by the core thread.

    Attributes:
        version: The weights it is bound to, from admission to its end.
        prepared, chain: None only for the prefetch of a known state without a history.
        key: Which state it reads and extends; a key of its own when it must not share one.
        sequence: Order of admission.
        order_s: Place in the queue: arrival plus priority levels worth of ageing.
        scratch_reason: Why it runs outside the cache, in one piece; None when it does not.
        is_transient: Its state is dropped when it ends (cache off, or forgotten while queued).
        is_forgotten: Its user was forgotten while a step held its pages: if more pieces are to
            come, it starts over with a state of its own.
        needs_refresh: The state is to be invalidated when the first piece is planned.
        suffix_done: Suffix rows answered, the fixed ones not counted.
        was_passed_over: It once found no space; from then on nothing younger goes before it (else
            its rows could be taken between its pieces again and again).
        is_answered: Its outcome is out; its pages are still to be settled.
        is_retry: A copy failed; it goes to the head of the queue.
        device_tokens, host_tokens: Hits at the first planning; None before it.
    """

    request: Request
    version: ServedVersion
    prepared: PreparedRequest | None
    chain: HashChain | None
    key: UserKey
    sequence: int
    admitted_s: float
    order_s: float
    scratch_reason: str | None = None
    is_transient: bool = False
    is_forgotten: bool = False
    needs_refresh: bool = False
    state: State = State.WAITING
    suffix_done: int = 0
    was_passed_over: bool = False
    is_retry: bool = False
    is_answered: bool = False
    device_tokens: int | None = None
    host_tokens: int = 0
    first_planned_s: float | None = None
    answer: Answer = field(default_factory=Answer)

    def fire(self, event: Event) -> None:
        self.state = fire(self.state, event)

    @property
    def line(self) -> Line:
        return Line(self.request.namespace, self.request.user_id, self.version.name)

    @property
    def place(self) -> tuple[bool, float, int]:
        """Sort key of the queue."""
        return (not self.is_retry, self.order_s, self.sequence)

    @property
    def num_tokens(self) -> int:
        """History and suffix rows: what it weighs in the queue."""
        if self.prepared is None:
            return 0
        return self.prepared.length + self.prepared.suffix_length

    def is_expired(self, now_s: float) -> bool:
        deadline_s = self.request.deadline_s
        return deadline_s is not None and now_s >= deadline_s

    def forget_hits(self) -> None:
        """The state it was found in is gone: hits are counted anew at the next planning."""
        self.device_tokens = None
        self.host_tokens = 0

    def leave_cache(self, reason: str) -> None:
        """Run outside the cache from now on, in one piece."""
        self.scratch_reason = reason
        self.chain = None
        self.needs_refresh = False
        self.forget_hits()

    def leave_state(self) -> None:
        """Its user is forgotten: what comes after a piece in flight shares no state."""
        if self.state is State.WAITING:
            self.make_transient()
        else:
            self.is_forgotten = True

    def make_transient(self) -> None:
        """Give it a key that no other request has: its state is shared with nobody."""
        self.key = self.key._replace(private_to=self.sequence)
        self.is_transient = True
        self.is_forgotten = self.needs_refresh = False
        self.forget_hits()
