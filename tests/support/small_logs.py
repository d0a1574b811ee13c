"""A synthetic interaction log, small enough to train and replay on in a test."""

from pathlib import Path

import numpy as np

NUM_USERS, NUM_ITEMS = 24, 30


def write_log(path: Path, *, seed: int = 0) -> Path:
    """A `::` log: every user walks along the items in steps of 1 to 3, so there is something to
    learn; sessions of some users overlap in time."""
    rng = np.random.default_rng(seed)
    lines = []
    for user in range(NUM_USERS):
        length = int(rng.integers(12, 40))
        items = (rng.integers(NUM_ITEMS) + np.cumsum(rng.integers(1, 4, length))) % NUM_ITEMS
        times = 1000 + 150 * user + np.cumsum(rng.integers(0, 90, length))
        ratings = 1 + (items + user) % 5
        lines += [
            f"{user}::{item * 7 + 3}::{rating}::{time}"
            for item, rating, time in zip(items, ratings, times, strict=True)
        ]
    rng.shuffle(lines)
    path.write_text("\n".join(lines) + "\n")
    return path
