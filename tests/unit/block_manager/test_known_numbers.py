"""The integers of the replacement policy, on the block manager and on the oracle."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pytest

from engine.block_manager.fingerprint import HashChain
from engine.block_manager.manager import BlockManager
from engine.block_manager.user_state import UserKey
from engine.metrics import Metrics
from engine.testing.fakes import FakeClock, ManualCopyEngine
from engine.testing.oracle import Oracle

FIRST = (700, 128, 336, 624, 486, 358, 716, 537)
GROWN = (1400, 256, 672, 1248, 973, 716, 1432, 1075)
GROWN_AGAIN = (2000, 512, 960, 1783, 1391, 1024, 2047, 1537)
OTHERS = (689, 1417, 1174, 1987, 596, 520, 1538, 1189)
LAST = (2500, 1024, 1280, 2377, 1854, 1365, 2729, 2049)
HOST_LENGTHS = [1376, 256, 672, 1248, 960, 704, 1408, 1056]


class Driver(Protocol):
    """One request at a time, transfers drained: pages of 32, chunks of 128, 512 pages."""

    def serve(self, user: int, length: int) -> tuple[int, int, int]: ...
    def pages_in_use(self) -> int: ...
    def evicted_pages(self) -> int: ...
    def dropped_tokens(self) -> int: ...
    def lengths(self, user: int) -> tuple[int, int]: ...
    def evict_device(self) -> None: ...


class OracleDriver:
    def __init__(self) -> None:
        self.oracle = Oracle(num_pages=512, page_size=32, num_chunks=400, pages_per_chunk=4)

    def serve(self, user: int, length: int) -> tuple[int, int, int]:
        return self.oracle.request(user, [(user, i) for i in range(length)])

    def pages_in_use(self) -> int:
        return self.oracle.pages_in_use

    def evicted_pages(self) -> int:
        return self.oracle.totals.evicted_pages

    def dropped_tokens(self) -> int:
        return self.oracle.totals.dropped_tokens

    def lengths(self, user: int) -> tuple[int, int]:
        return self.oracle.device_len(user), self.oracle.host_len(user)

    def evict_device(self) -> None:
        self.oracle.evict_device()


class ManagerDriver:
    def __init__(self) -> None:
        self.copies = ManualCopyEngine()
        self.metrics = Metrics()
        self.manager = BlockManager(
            num_pages=512,
            page_size=32,
            num_chunks=400,
            pages_per_chunk=4,
            copies=self.copies,
            metrics=self.metrics,
            page_bytes_all_layers=1,
            clock=FakeClock(),
        )

    def _reserve_and_commit(self, name: str, length: int) -> tuple[int, int, int]:
        key = UserKey("", name, "v1")
        records = np.arange(length, dtype=np.int64).reshape(length, 1)
        chain = HashChain.from_records(records, name.encode(), 32)
        reservation = self.manager.reserve(key, chain, stop=length, protected={key})
        assert reservation is not None
        if reservation.onload is not None:
            assert reservation.onload.num_pages * 32 == reservation.lookup.host_hit
        for job in (reservation.onload, self.manager.commit(reservation)):
            if job is not None:
                self.copies.submit(job)
        for progress in self.copies.poll():
            self.manager.copy_progress(progress)
        self.manager.check_invariants(idle=True)
        lookup = reservation.lookup
        return lookup.device_hit, lookup.host_hit, length - reservation.start

    def serve(self, user: int, length: int) -> tuple[int, int, int]:
        return self._reserve_and_commit(str(user), length)

    def pages_in_use(self) -> int:
        return self.manager.usage().pages_used

    def evicted_pages(self) -> int:
        return int(self.metrics.value("evicted_pages_total", "device", "space"))

    def dropped_tokens(self) -> int:
        return int(self.metrics.value("dropped_tokens_total"))

    def lengths(self, user: int) -> tuple[int, int]:
        view = self.manager.user(UserKey("", str(user), "v1"))
        return (view.device_len, view.host_len) if view else (0, 0)

    def evict_device(self) -> None:
        self._reserve_and_commit("everything", 512 * 32)
        assert self.manager.forget(("", "everything")).is_done()


@pytest.fixture(params=[ManagerDriver, OracleDriver])
def driver(request: pytest.FixtureRequest) -> Driver:
    driver: Driver = request.param()
    return driver


def serve_all(driver: Driver, first: int, lengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [driver.serve(first + i, length) for i, length in enumerate(lengths)]


def test_known_numbers_of_the_policy(driver: Driver) -> None:
    assert serve_all(driver, 0, FIRST) == [(0, 0, length) for length in FIRST]
    assert driver.pages_in_use() == 125

    served = serve_all(driver, 0, GROWN)
    assert [hits[0] for hits in served] == list(FIRST)
    assert driver.pages_in_use() == 245
    assert [driver.lengths(user)[1] for user in range(8)] == HOST_LENGTHS

    driver.evict_device()
    assert driver.pages_in_use() == 0
    assert driver.dropped_tokens() == 24 + 13 + 12 + 24 + 19
    served = serve_all(driver, 0, GROWN_AGAIN)
    assert [hits[:2] for hits in served] == [(0, host) for host in HOST_LENGTHS]
    assert driver.pages_in_use() == 354

    evicted = driver.evicted_pages()
    serve_all(driver, 8, OTHERS)
    assert driver.pages_in_use() == 512
    assert driver.evicted_pages() - evicted == 132
    # 63 + 16 + 30 pages of users 0, 1, 2 and 23 of the 56 of user 3: 33 stay.
    assert [driver.lengths(user)[0] for user in range(4)] == [0, 0, 0, 33 * 32]
    assert [driver.lengths(user)[0] for user in range(4, 16)] == [*GROWN_AGAIN[4:], *OTHERS]

    served = serve_all(driver, 0, LAST)
    assert [sum(hits[:2]) for hits in served[:3]] == [1984, 512, 960]
    lengths = [driver.lengths(user)[0] for user in range(16)]
    assert lengths[:8] == list(LAST)
    assert sum(-(-length // 32) for length in lengths[:8]) == 478
    assert lengths[8:15] == [0] * 7
    assert driver.pages_in_use() == 512
