"""The host face of HSTU: from a request to records. numpy only.

1. read and check the arrays, 2. cut an over-long history, 3. map items to table rows and drop or
replace unknown ones, 4. write records, 5. add the suffix rows.

A delta request goes the same way as the whole request it stands for. Its base is as many events as
`base_length` and `start` say, all of them known (no other base is ever handed out), and their rows
are left empty.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from engine.errors import HistoryNeeded, InvalidRequest, TooLarge
from engine.models.base import PreparedRequest
from engine.models.catalogue import ItemLookup
from engine.models.config import ModelConfig
from engine.models.hstu import fields, input_stage, mask
from engine.models.hstu.events import EventReader, Events
from engine.models.hstu.input_stage import ITEM_COLUMN, RecordLayout
from engine.models.hstu.suffix import SuffixBuilder, SuffixRows
from engine.types import Int64Array, Request, Task

_NONE: Int64Array = np.empty(0, dtype=np.int64)


class _KeptEvents(NamedTuple):
    """Events sent that are used, oldest first; the absolute index of the first event used; and how
    many events of a delta request's base lie between it and the events sent."""

    events: Events
    start: int
    num_base: int


class Preparer:
    """Turns requests into prepared ones. Holds no state of any request."""

    def __init__(self, config: ModelConfig, lookup: ItemLookup) -> None:
        self._config = config
        self._inputs = config.inputs
        self._lookup = lookup
        self.layout = RecordLayout.from_config(config)
        self._has_bias = config.layers.relative_bias
        self._reader = EventReader(config, self.layout, lookup)
        self.reads_time = self._reader.reads_time
        is_shared = config.inputs.context_mask == "bidirectional"
        self._num_context = len(config.inputs.context)
        self.rule = mask.MaskRule(
            num_shared=self._num_context if is_shared else 0,
            window=config.layers.window,
            has_rising_candidates=config.layers.family == "nvidia",
        )
        self._suffix = SuffixBuilder(config, self.layout, self.rule)
        self._is_exact = config.inputs.positions == "from_newest" or self.rule.num_shared > 0
        table_rows = [feature.num_rows for feature in config.inputs.context]
        self._context_base = np.cumsum([0, *table_rows], dtype=np.int64)[:-1]

    def prepare(self, request: Request) -> PreparedRequest:
        """See `Model.prepare`."""
        query_time = self._check(request)
        context = self._read_context(request)
        kept, start, num_base = self._kept_events(request)
        used = self._replace_unknown(kept)
        candidates = None
        if request.task is Task.RANK:
            candidates = self._read_candidates(request)
        base_rows = 0
        if num_base:
            base_rows = self._num_context + num_base * self._inputs.tokens_per_event
        rows = self._history_rows(used, context, query_time, base_rows)
        suffix = self._suffix_rows(request, rows, base_rows, candidates, query_time)
        # The last row's bias needs the query's time: it is provisional and never kept.
        records = rows[:-1] if self._has_bias and len(rows) else rows
        return PreparedRequest(
            records=records,
            seed=self._seed(context, records),
            num_events=num_base + len(used),
            start_event=start,
            num_known_events=num_base + _num_leading(kept.rows >= 0),
            base_rows=base_rows,
            suffix_records=suffix.records,
            suffix_parent=suffix.parent,
            suffix_position=suffix.position,
            suffix_reads_self=suffix.reads_self,
            suffix_kv_lo=suffix.kv_lo,
            num_fixed_suffix=suffix.num_fixed,
            read_row=suffix.read_row,
            num_candidates=0 if candidates is None else len(candidates),
            chain_size=self._config.layers.target_group_size,
            candidate_items=_NONE if candidates is None else candidates.ids,
            excluded_rows=self._excluded_rows(request),
        )

    def _kept_events(self, request: Request) -> _KeptEvents:
        """Read and check the events sent, and leave out those that are too old."""
        assert request.history is not None
        sent = self._reader.read("history", request.history, request.ignore_extra)
        if not request.is_delta:
            start = self._start_event(request.history_start + len(sent), request.history_start)
            return _KeptEvents(sent.pick(slice(start - request.history_start, None)), start, 0)
        if not len(sent):
            raise InvalidRequest(
                "history is empty: a delta request sends the events from base_length on, at least 1"
            )
        if request.base_length <= request.history_start:
            raise InvalidRequest(
                f"base_length is {request.base_length} and history_start {request.history_start}: "
                "both count from the user's first event, give a base after the start",
                value=request.base_length,
                limit=request.history_start,
            )
        start = self._start_event(request.base_length + len(sent), request.history_start)
        num_base = request.base_length - start
        if num_base < 1:
            raise HistoryNeeded(
                f"base_length is {request.base_length}, but with the events sent the history that "
                f"the model uses begins at event {start}: send it whole",
                value=request.base_length,
                limit=start,
            )
        return _KeptEvents(sent, start, num_base)

    def _suffix_rows(
        self,
        request: Request,
        rows: Int64Array,
        base_rows: int,
        candidates: Events | None,
        query_time: int,
    ) -> SuffixRows:
        """The suffix of the history `rows`, of which the first `base_rows` are not known."""
        if request.task is Task.PREFETCH:
            return SuffixRows.none(self.layout)
        reads_last_row = request.task is Task.RETRIEVE or request.return_user_embedding
        if reads_last_row and len(rows) == base_rows > 0:
            raise HistoryNeeded(
                "no event of this delta request is known, so the user embedding is that of an "
                "event before it: send the whole history"
            )
        if reads_last_row and len(rows) == self._num_context:
            raise InvalidRequest(
                "history has no event that the model knows, so there is no user embedding: "
                "send at least one known item, or rank candidates"
            )
        return self._suffix.build(rows, candidates, query_time, reads_last_row=reads_last_row)

    def _excluded_rows(self, request: Request) -> Int64Array:
        """Table rows of all known items sent, those of a cut history too, if they are unwanted."""
        if not request.exclude_history:
            return _NONE
        assert request.history is not None
        rows = self._lookup.rows(request.history["item"].astype(np.int64, copy=False))
        return rows[rows >= 0]

    def _check(self, request: Request) -> int:
        """Check what needs no array; returns the query time, 0 when none is read."""
        task, config = request.task, self._config
        if request.history is None:
            raise InvalidRequest("history is missing: give the user's events, [] for none")
        if task is Task.RANK and config.rank is None:
            raise InvalidRequest(f"model {config.name} has no rank head: send a retrieve request")
        needs_retrieve = task is Task.RETRIEVE or request.return_user_embedding
        if needs_retrieve and config.retrieve is None:
            raise InvalidRequest(
                f"model {config.name} has no retrieve head: it can neither retrieve nor return "
                "user embeddings"
            )
        if task is Task.RANK and request.candidates is None:
            raise InvalidRequest("candidates is missing: rank needs at least one")
        if not request.ignore_extra:
            if task is not Task.RANK and request.candidates is not None:
                raise InvalidRequest(f"candidates does not go with task {task}: leave it out")
            if task is not Task.RETRIEVE and request.exclude_history:
                raise InvalidRequest(f"exclude_history does not go with task {task}: leave it out")
        if request.top_k is not None and request.top_k < 1:
            raise InvalidRequest(f"top_k is {request.top_k}: give at least 1", value=request.top_k)
        stride = config.inputs.keep_stride
        if request.history_start < 0 or request.history_start % stride:
            raise InvalidRequest(
                f"history_start is {request.history_start}: give a multiple of the model's "
                f"keep_stride, {stride}",
                value=request.history_start,
                limit=stride,
            )
        return self._query_time(request)

    def _query_time(self, request: Request) -> int:
        given = request.query_time
        if not self.reads_time:
            if given is not None and not request.ignore_extra:
                raise InvalidRequest(
                    f"query_time is {given}, but this model does not read it: leave it out or set "
                    "ignore_extra"
                )
            return 0
        if given is None:
            if request.task is Task.PREFETCH and not self._inputs.num_time_buckets:
                return 0
            raise InvalidRequest(
                "query_time is missing: this model reads it, and the clock never replaces it"
            )
        if not 0 <= given < 1 << 63:
            raise InvalidRequest(f"query_time is {given}: give seconds >= 0", value=given)
        return given

    def _read_context(self, request: Request) -> Int64Array:
        if not self._inputs.context:
            if request.context is not None and not request.ignore_extra:
                raise InvalidRequest(
                    "context is given, but this model reads none: leave it out or set ignore_extra"
                )
            return _NONE
        if request.context is None:
            names = ", ".join(feature.name for feature in self._inputs.context)
            raise InvalidRequest(f"context is missing: this model reads {names}")
        return fields.context_values(request.context, self._inputs.context)

    def _read_candidates(self, request: Request) -> Events:
        assert request.candidates is not None
        candidates = self._reader.read("candidates", request.candidates, request.ignore_extra)
        if not len(candidates):
            raise InvalidRequest("candidates is empty: give at least one", value=0, limit=1)
        return self._known(candidates, "candidates", self._config.catalogue.unknown_candidates)

    def _start_event(self, stop: int, history_start: int) -> int:
        """Absolute index of the first event to use, of the events [history_start, stop).

        Counts events as sent, unknown ones too."""
        limit, stride = self._inputs.max_history_events, self._inputs.keep_stride
        num_sent = stop - history_start
        if num_sent <= limit:
            return history_start
        if self._inputs.overlong == "error":
            raise TooLarge(
                f"history has {num_sent} events, the model serves {limit}: send the newest "
                f"{limit}, or set inputs.overlong to keep_newest in the model directory",
                value=num_sent,
                limit=limit,
            )
        return max(history_start, -(-(stop - limit) // stride) * stride)

    def _replace_unknown(self, events: Events) -> Events:
        policy = self._config.catalogue.unknown_history
        if policy == "drop":
            is_known = events.rows >= 0
            return events if is_known.all() else events.pick(is_known)
        return self._known(events, "history", policy)

    def _known(self, events: Events, where: str, policy: str) -> Events:
        is_unknown = events.rows < 0
        if not is_unknown.any():
            return events
        if policy == "unk":
            rows = np.where(is_unknown, self._config.catalogue.unk_row, events.rows)
            return replace(events, rows=rows)
        index = int(is_unknown.argmax())
        raise InvalidRequest(
            f"{where}.item[{index}] is {int(events.ids[index])}, which is not in the catalogue: "
            f"leave it out, or set catalogue.unknown_{where} in the model directory",
            value=float(events.ids[index]),
        )

    def _history_rows(
        self, events: Events, context: Int64Array, query_time: int, base_rows: int
    ) -> Int64Array:
        """Records int64 [h, W] of contextual rows and all tokens of the events.

        The events follow `base_rows` rows that are not known, contextual ones included: zeros."""
        layout, num_context = self.layout, 0 if base_rows else self._num_context
        num_tokens = len(events) * self._inputs.tokens_per_event - events.has_open_event
        records = layout.empty_records(num_context + num_tokens)
        times = np.zeros(num_context + num_tokens, dtype=np.int64)
        tokens, token_times = records[num_context:], times[num_context:]
        if layout.context is not None and num_context:
            records[:num_context, layout.context] = self._context_base + context
        step = self._inputs.tokens_per_event
        tokens[::step, ITEM_COLUMN] = events.rows
        tokens[::step, 1 : layout.features[-1].stop] = events.features
        token_times[::step] = events.times
        if layout.action is not None and events.actions is not None:
            num_actions = len(events) - events.has_open_event
            tokens[1::2, layout.action] = events.actions[:num_actions]
            token_times[1::2] = events.times[:num_actions]
        self._write_places(records, times, query_time, base_rows)
        if not base_rows:
            return records
        # Zeros that nobody writes or reads cost nothing, however long the base is.
        whole = np.zeros((base_rows + len(records), layout.num_columns), dtype=np.int64)
        whole[base_rows:] = records
        return whole

    def _write_places(
        self, records: Int64Array, times: Int64Array, query_time: int, first: int
    ) -> None:
        """Positions and times of history records, of which the first is row `first`."""
        layout, inputs, length = self.layout, self._inputs, len(records)
        if layout.position is not None:
            records[:, layout.position] = (
                input_stage.rows_from_start(inputs.num_positions, first, first + length)
                if inputs.positions == "from_start"
                else input_stage.rows_from_newest(
                    inputs.num_positions, self._num_context, length, 0
                )
            )
        if layout.time_bucket is not None:
            records[:, layout.time_bucket] = input_stage.time_bucket(
                inputs.num_time_buckets, query_time, times
            )
        if layout.time is not None and layout.next_time is not None and length:
            records[:, layout.time] = times
            records[:-1, layout.next_time] = times[1:]
            records[-1, layout.next_time] = query_time

    def _seed(self, context: Int64Array, records: Int64Array) -> bytes:
        config = self._config
        parts: list[str | bytes | int] = [
            config.name,
            config.weights_version,
            context.tobytes(),
        ]
        if self._is_exact:
            parts += [len(records), xxhash.xxh3_128_digest(records.data)]
        return msgspec.msgpack.encode(parts)


def _num_leading(is_known: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    return len(is_known) if is_known.all() else int(is_known.argmin())
