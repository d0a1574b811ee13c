"""Interaction logs: reading, k-core, leave-last-out, and the windows a trace is replayed in.

A log is a text file with one interaction a line: user, item, rating or action (optional), time.
Separators `::`, tab and comma are recognised; so are a header line with or without types
(`user_id:token`) and files without a header (columns in the order above). User ids may be any
text; item ids are catalogue ids, integers of 0 or more; times are seconds since the epoch.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequest
from engine.types import Int64Array

Float64Array = NDArray[np.float64]

_COLUMN_NAMES = {
    "user": ("user_id", "user", "userid", "uid"),
    "item": ("item_id", "item", "itemid", "iid", "movie_id", "movie", "movieid", "video_id"),
    "action": ("action", "action_id", "rating", "value", "label", "event", "weight"),
    "time": ("timestamp", "time", "ts", "time_s", "unix_timestamp"),
}
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InteractionLog:
    """E interactions of U users, in the order of the file.

    Attributes:
        user_ids: U texts.
        users: int64 [E], index into user_ids.
        items: int64 [E], catalogue ids.
        actions: float64 [E] rating or action; None when the file has no such column.
        times: int64 [E], seconds since the epoch.
    """

    user_ids: tuple[str, ...]
    users: Int64Array
    items: Int64Array
    actions: Float64Array | None
    times: Int64Array

    @property
    def num_events(self) -> int:
        return len(self.users)

    @property
    def num_users(self) -> int:
        return len(self.user_ids)

    def select(self, rows: NDArray[np.bool_] | Int64Array) -> InteractionLog:
        """The chosen rows, in the order given; users without a row are removed."""
        kept, users = np.unique(self.users[rows], return_inverse=True)
        return InteractionLog(
            user_ids=tuple(self.user_ids[index] for index in kept),
            users=users.astype(np.int64),
            items=self.items[rows],
            actions=None if self.actions is None else self.actions[rows],
            times=self.times[rows],
        )


class _Columns(NamedTuple):
    """Position of each column in a line; `action` is None when there is none."""

    user: int
    item: int
    action: int | None
    time: int


def read_log(path: str | Path) -> InteractionLog:
    """Read a log file.

    Raises InvalidRequest naming the line, the value and the remedy: a missing file or column, an
    item id that is not an integer, a time or rating that is not a number, an empty log.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the log {path}: {error}; give a text file") from error
    lines = _split(path, text)
    first = next(lines, None)
    if first is None:
        raise InvalidRequest(f"the log {path} is empty: give at least one interaction")
    columns = _header(path, first[1])
    rows = [first] if columns is None else []
    columns = columns or _positional(path, first[1])
    rows.extend(lines)
    if not rows:
        raise InvalidRequest(f"the log {path} has a header and no interactions")
    return _parse(path, columns, rows)


def _split(path: Path, text: str) -> Iterator[tuple[int, Sequence[str]]]:
    """(line number from 1, fields) of every line that is not blank."""
    lines = text.splitlines()
    sample = next((line for line in lines if line.strip()), "")
    if "::" in sample:
        return ((n, line.split("::")) for n, line in enumerate(lines, 1) if line.strip())
    return _csv_lines(path, lines, "\t" if "\t" in sample else ",")


def _csv_lines(
    path: Path, lines: Sequence[str], delimiter: str
) -> Iterator[tuple[int, Sequence[str]]]:
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        for fields in reader:
            if fields:
                yield reader.line_num, fields
    except csv.Error as error:
        raise InvalidRequest(f"{path}:{reader.line_num} cannot be read: {error}") from error


def _header(path: Path, fields: Sequence[str]) -> _Columns | None:
    """The columns a header line names, or None when the line is an interaction."""
    if _is_number(fields[-1]):
        return None
    names = [field.strip().split(":")[0].strip().lower() for field in fields]
    found: dict[str, int] = {}
    for column, aliases in _COLUMN_NAMES.items():
        for alias in aliases:
            if alias in names:
                found[column] = names.index(alias)
                break
    missing = [column for column in ("user", "item", "time") if column not in found]
    if missing:
        raise InvalidRequest(
            f"the header of {path} has no column for {', '.join(missing)}: it reads {names}; "
            f"name one of {', '.join(_COLUMN_NAMES[missing[0]])}"
        )
    return _Columns(found["user"], found["item"], found.get("action"), found["time"])


def _positional(path: Path, fields: Sequence[str]) -> _Columns:
    if len(fields) >= 4:
        return _Columns(0, 1, 2, 3)
    if len(fields) == 3:
        return _Columns(0, 1, None, 2)
    raise InvalidRequest(
        f"{path} has {len(fields)} columns and no header: give user, item, rating or action, time, "
        f"separated by `::`, tab or comma"
    )


def _parse(
    path: Path, columns: _Columns, rows: Sequence[tuple[int, Sequence[str]]]
) -> InteractionLog:
    index: dict[str, int] = {}
    users = np.empty(len(rows), np.int64)
    items = np.empty(len(rows), np.int64)
    times = np.empty(len(rows), np.int64)
    actions = None if columns.action is None else np.empty(len(rows), np.float64)
    width = max(column for column in columns if column is not None) + 1
    for row, (line, fields) in enumerate(rows):
        if len(fields) < width:
            raise InvalidRequest(f"{path}:{line} has {len(fields)} fields where {width} are needed")
        users[row] = index.setdefault(fields[columns.user].strip(), len(index))
        items[row] = _item_id(path, line, fields[columns.item])
        times[row] = int(_number(path, line, "time", fields[columns.time]))
        if actions is not None and columns.action is not None:
            actions[row] = _number(path, line, "rating or action", fields[columns.action])
    return InteractionLog(
        user_ids=tuple(index), users=users, items=items, actions=actions, times=times
    )


def _is_number(field: str) -> bool:
    try:
        return bool(np.isfinite(float(field)))
    except ValueError:
        return False


def _number(path: Path, line: int, column: str, field: str) -> float:
    if not _is_number(field):
        raise InvalidRequest(f"{path}:{line} has {column} {field!r}: give a finite number")
    value = float(field)
    if not _INT64.min <= value < _INT64.max:
        raise InvalidRequest(f"{path}:{line} has {column} {field!r}: it does not fit in 64 bits")
    return value


def _item_id(path: Path, line: int, field: str) -> int:
    try:
        value = int(field)
    except ValueError:
        raise InvalidRequest(
            f"{path}:{line} has item id {field!r}: catalogue ids are 64-bit integers; number the "
            f"items and use the same numbers in the model's catalogue"
        ) from None
    if value < 0:
        raise InvalidRequest(f"{path}:{line} has item id {field}: give 0 or more")
    if value > _INT64.max:
        raise InvalidRequest(f"{path}:{line} has item id {field}: it does not fit in 64 bits")
    return value


def k_core(log: InteractionLog, min_count: int) -> InteractionLog:
    """Drop users and items with fewer than `min_count` interactions until none is left.

    Raises InvalidRequest when nothing is left.
    """
    while log.num_events:
        _, item_index, item_counts = np.unique(log.items, return_inverse=True, return_counts=True)
        user_counts = np.bincount(log.users, minlength=log.num_users)
        keep = (item_counts[item_index] >= min_count) & (user_counts[log.users] >= min_count)
        if keep.all():
            return log
        log = log.select(keep)
    raise InvalidRequest(f"no interaction is left with min_count {min_count}: give a smaller one")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UserEvents:
    """One user's interactions by time, ties in file order: int64 [n]; actions float64 or None."""

    user_id: str
    items: Int64Array
    actions: Float64Array | None
    times: Int64Array

    def __len__(self) -> int:
        return len(self.items)


def by_user(log: InteractionLog) -> list[UserEvents]:
    """Every user's interactions sorted stably by time; users in order of first appearance."""
    order = np.lexsort((log.times, log.users))
    ends = np.cumsum(np.bincount(log.users, minlength=log.num_users))
    sequences = []
    for user, rows in enumerate(np.split(order, ends[:-1])):
        sequences.append(
            UserEvents(
                user_id=log.user_ids[user],
                items=log.items[rows],
                actions=None if log.actions is None else log.actions[rows],
                times=log.times[rows],
            )
        )
    return sequences


class Split(NamedTuple):
    """Leave-last-out: a user's last interaction is the test, the one before it the validation.

    train: events [0, train_stop); the history at test time is [0, test) and includes validation.
    """

    train_stop: int
    validation: int
    test: int


def leave_last_out(num_events: int) -> Split:
    """Split one user's events; raises InvalidRequest with fewer than three."""
    if num_events < 3:
        raise InvalidRequest(
            f"a user has {num_events} interactions where leave-last-out needs 3: raise min_count"
        )
    return Split(train_stop=num_events - 2, validation=num_events - 2, test=num_events - 1)


class TraceRequest(NamedTuple):
    """One request of a trace: user `user` (index into `by_user`) with its first `length` events."""

    user: int
    length: int
    time: int


def trace_requests(log: InteractionLog, window_s: int) -> list[TraceRequest]:
    """The requests of a log: one for each window of a user's activity.

    Events are sorted stably by time; per user a new window starts at the first event `window_s`
    seconds or more after the window's first event. A request's history includes the events of its
    window; requests are ordered by their window's first event, whose time they carry.
    """
    if window_s < 0:
        raise InvalidRequest(f"window_s is {window_s}: give 0 (a request an event) or more")
    order = np.argsort(log.times, kind="stable")
    counts = [0] * log.num_users
    open_request: list[int | None] = [None] * log.num_users
    requests: list[TraceRequest] = []
    for user, time in zip(log.users[order].tolist(), log.times[order].tolist(), strict=True):
        counts[user] += 1
        index = open_request[user]
        if index is None or time - requests[index].time >= window_s:
            open_request[user] = len(requests)
            requests.append(TraceRequest(user, counts[user], time))
        else:
            requests[index] = TraceRequest(user, counts[user], requests[index].time)
    return requests
