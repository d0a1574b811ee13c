"""The users of `goodput`: who comes when, and what their requests are.

Arrivals are Poisson. Users come back by a Zipf-like law; each time a user's history has a few more
events and is sent whole. A few requests are of users who have never been there.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from benchmarks.open_loop import Due


class LoadShape(NamedTuple):
    """history: events of a user at the start are 7/8 to all of it; candidates: range, inclusive."""

    num_users: int
    history: int
    max_new: int
    candidates: tuple[int, int]
    zipf: float
    new_user_share: float
    num_items: int

    @property
    def longest(self) -> int:
        """Events at which a user is replaced by another one between two probes."""
        return self.history * 9 // 8

    @property
    def max_events(self) -> int:
        """What the model must be able to serve: a user grows during a probe too."""
        return 2 * self.history


class _User:
    """An id and the JSON text of its history."""

    def __init__(self, user_id: str, items: np.ndarray) -> None:
        self.user_id = user_id
        self.num_events = len(items)
        self.text = _numbers(items)

    def grow(self, items: np.ndarray) -> None:
        self.num_events += len(items)
        self.text += ", " + _numbers(items)


class Population:
    """All users, as one client knows them. Not thread-safe."""

    def __init__(self, shape: LoadShape, seed: int) -> None:
        self._shape = shape
        self._rng = np.random.default_rng(seed)
        weights = np.arange(1, shape.num_users + 1, dtype=np.float64) ** -shape.zipf
        self._weights = weights / weights.sum()
        self._num_made = 0
        self._users = [self._make() for _ in range(shape.num_users)]
        self._is_known = np.zeros(shape.num_users, np.bool_)

    def renew(self) -> list[Due]:
        """Replace users with long histories. One request of each user that no server has seen,
        all due at once, to make the servers know them."""
        for number, user in enumerate(self._users):
            if user.num_events >= self._shape.longest:
                self._users[number] = self._make()
                self._is_known[number] = False
        unknown = np.flatnonzero(~self._is_known)
        self._is_known[:] = True
        return [Due(0.0, self._request(self._users[number])) for number in unknown]

    def arrivals(self, rate: float, count: int) -> list[Due]:
        """The next requests, `rate` a second on average."""
        at_s = np.cumsum(self._rng.exponential(1 / rate, count))
        chosen = self._rng.choice(len(self._users), count, p=self._weights)
        is_new = self._rng.random(count) < self._shape.new_user_share
        return [
            Due(float(time_s), self._visit(self._make() if new else self._users[number]))
            for time_s, number, new in zip(at_s, chosen, is_new, strict=True)
        ]

    def _visit(self, user: _User) -> bytes:
        """The next request of a user, with new events (up to what the model serves)."""
        room = self._shape.max_events - user.num_events
        num_new = min(room, int(self._rng.integers(1, self._shape.max_new + 1)))
        if num_new:
            user.grow(self._items(num_new))
        return self._request(user)

    def _request(self, user: _User) -> bytes:
        low, high = self._shape.candidates
        candidates = self._items(int(self._rng.integers(low, high + 1)))
        return http_post(
            f'{{"user_id": "{user.user_id}", "history": [{user.text}], '
            f'"candidates": [{_numbers(candidates)}]}}'
        )

    def _make(self) -> _User:
        history = self._shape.history
        self._num_made += 1
        length = int(self._rng.integers(history * 7 // 8, history + 1))
        return _User(f"user-{self._num_made}", self._items(length))

    def _items(self, count: int) -> np.ndarray:
        """Ids of the catalogue that `engine.testing.models` makes: 10 * row + 1."""
        return self._rng.integers(0, self._shape.num_items, count) * 10 + 1


def http_post(body: str) -> bytes:
    """A request to rank."""
    content = body.encode()
    head = f"POST /v1/rank HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + content


def scores_of(body: bytes) -> np.ndarray:
    """Scores of an answer of either server, one per candidate."""
    return np.array(json.loads(body)["scores"], np.float64).reshape(-1)


def _numbers(items: np.ndarray) -> str:
    return ", ".join(map(str, items.tolist()))
