"""Delta requests: who may send one, what it has to show, and where the next one may start.

An answer names a *base*: the number of events up to a page boundary, and a fingerprint of all that
the rows below were computed from. A delta request names that base and sends only the events from
there on. It is served from the user's state or not at all: whenever the state does not hold the
base any more, the request ends with HistoryNeeded and the state is left as it is.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.block_manager.fingerprint import BaseFingerprint, HashChain
from engine.errors import HistoryNeeded, InvalidRequest
from engine.models.base import ModelSpec, PreparedRequest
from engine.types import CacheMode, Request, Reuse


class DeltaBase(NamedTuple):
    """Where a delta may start: events from the first one ever, and what to show for them."""

    length: int
    fingerprint: str


NO_BASE = DeltaBase(0, "")


def serves_deltas(spec: ModelSpec, reuse: Reuse) -> bool:
    """Rows below a base must be functions of earlier rows alone, and be kept."""
    return reuse is Reuse.APPEND and spec.bias is None


def check_delta(request: Request, spec: ModelSpec, reuse: Reuse, tiers: str) -> None:
    """Refuse a delta request that could never be answered. Raises InvalidRequest."""
    if request.base_length < 0 or request.is_delta != bool(request.base_fingerprint):
        raise InvalidRequest(
            f"base_length is {request.base_length} and base_fingerprint "
            f"{request.base_fingerprint!r:.60}: a delta request gives both as an earlier answer "
            "gave them, any other request neither"
        )
    if not request.is_delta:
        return
    reason = None
    if request.history is None:
        reason = "history is missing: send the events from base_length on"
    elif request.exclude_history:
        reason = "exclude_history needs the whole history: send it, or leave exclude_history out"
    elif request.cache is not CacheMode.USE:
        reason = f"cache is {request.cache.value}, which recomputes the whole history: send it"
    elif tiers == "off":
        reason = "this engine keeps no state (cache tiers off): send the whole history"
    elif reuse is not Reuse.APPEND:
        reason = (
            f"the reuse mode of model {spec.name} is {reuse.value}, which needs the whole history: "
            "send it"
        )
    elif spec.bias is not None:
        reason = (
            f"the attention bias of model {spec.name} reads the time of every event: send the "
            "whole history"
        )
    if reason is not None:
        raise InvalidRequest(f"a delta request cannot be served: {reason}")


def delta_chain(request: Request, prepared: PreparedRequest, page_size: int) -> HashChain:
    """The fingerprints of a prepared delta request, from its base on.

    Raises InvalidRequest for a fingerprint that no answer gave, HistoryNeeded when the base is
    not one of this context, of these weights, or of these pages."""
    shown = BaseFingerprint.parse(request.base_fingerprint)
    base_pages, rest = divmod(prepared.base_rows, page_size)
    if rest:
        raise HistoryNeeded(
            f"base_length {request.base_length} is {prepared.base_rows} tokens, which is no "
            f"boundary of pages of {page_size}: send the whole history",
            value=prepared.base_rows,
            limit=page_size,
        )
    chain = HashChain.from_records(
        prepared.records,
        prepared.seed,
        page_size,
        base_pages=base_pages,
        base_hash=shown.boundary,
    )
    if shown.seed != chain.seed_hash:
        raise HistoryNeeded(
            "base_fingerprint is of another context or of other weights: send the whole history"
        )
    return chain


def history_needed(request: Request, prepared: PreparedRequest) -> HistoryNeeded:
    """What a delta request ends with whose base is not in the user's state."""
    return HistoryNeeded(
        f"what is known of this user does not begin with the {prepared.base_rows} tokens of "
        f"base_length {request.base_length} and that base_fingerprint: send the whole history",
        value=prepared.base_rows,
    )


def next_base(prepared: PreparedRequest, chain: HashChain, spec: ModelSpec) -> DeltaBase:
    """The last page boundary that is an event boundary, lies before the last event, and has no
    event below it that the catalogue does not know. NO_BASE when there is none.

    A delta request with nothing better gets its own base back."""
    per_event, context = spec.tokens_per_event, spec.num_context
    num_events = min(prepared.num_events - 1, prepared.num_known_events)
    last = max(context + num_events * per_event, prepared.base_rows)
    newest = last // chain.page_size
    # Where pages end within an event repeats every `per_event` pages: no need to look further back.
    for pages in range(newest, newest - per_event, -1):
        tokens = pages * chain.page_size - context
        if tokens <= 0 or pages < chain.base_pages:
            break
        if tokens % per_event == 0:
            shown = BaseFingerprint(chain.seed_hash, int(chain.boundaries[pages - 1]))
            return DeltaBase(prepared.start_event + tokens // per_event, str(shown))
    return NO_BASE
