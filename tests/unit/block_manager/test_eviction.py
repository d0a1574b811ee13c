"""The order of users, and loading a policy by name."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from block_harness import Blocks

from engine.block_manager import eviction
from engine.block_manager.eviction import GROUP, EvictionPolicy, Lru, load_policy
from engine.errors import ConfigError


def test_lru_order_is_the_order_of_touches() -> None:
    order: Lru[str] = Lru()
    for user in ("a", "b", "c", "a"):
        order.touch(user)
    assert list(order.victims()) == ["b", "c", "a"]
    order.remove("c")
    order.remove("never seen")
    assert list(order.victims()) == ["b", "a"]
    assert list(order.recent()) == ["a", "b"]
    assert "a" in order
    assert "c" not in order
    assert len(order) == 2


def test_lru_is_found_by_name() -> None:
    assert isinstance(load_policy("lru", {})(), Lru)


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'fifo' is not installed: choose one of lru"):
        load_policy("fifo", {})


class Fifo(Lru[str]):
    """A plug-in: a second touch does not count."""

    def __init__(self, options: dict[str, object]) -> None:
        super().__init__()
        self.options = options

    def touch(self, entry: str) -> None:
        if entry not in self:
            super().touch(entry)


class Counting(Lru[Hashable]):
    """A plug-in that counts how many users it was asked for, over all its objects."""

    made = 0
    walked = 0

    def __init__(self, options: dict[str, object]) -> None:
        super().__init__()
        Counting.made += 1

    def victims(self) -> Iterator[Hashable]:
        for entry in super().victims():
            Counting.walked += 1
            yield entry


def not_a_policy(options: dict[str, object]) -> object:
    return object()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points as packages would register them."""
    targets = {
        "fifo": (Fifo, "plugin:Fifo"),
        "counting": (Counting, "plugin:Counting"),
        "wrong": (not_a_policy, "plugin:not_a_policy"),
        "broken": (None, "no_such_module_anywhere:factory"),
    }

    class Installed(EntryPoint):
        def load(self) -> object:
            target = targets[self.name][0]
            return super().load() if target is None else target

    points = EntryPoints(Installed(name, value, GROUP) for name, (_, value) in targets.items())
    monkeypatch.setattr(eviction, "entry_points", lambda group: points.select(group=group))


@pytest.mark.usefixtures("installed")
def test_a_plug_in_is_made_with_its_options() -> None:
    policy = load_policy("fifo", {"limit": 3})()
    assert isinstance(policy, Fifo)
    assert policy.options == {"limit": 3}
    for user in ("a", "b", "a"):
        policy.touch(user)
    assert list(policy.victims()) == ["a", "b"]


class SmallestFirst(EvictionPolicy[str]):
    """A plug-in that keeps no order of use, and does not say how to walk from the other end."""

    def __init__(self) -> None:
        self._users: set[str] = set()

    def touch(self, entry: str) -> None:
        self._users.add(entry)

    def remove(self, entry: str) -> None:
        self._users.discard(entry)

    def victims(self) -> Iterator[str]:
        return iter(sorted(self._users))

    def __contains__(self, entry: object) -> bool:
        return entry in self._users

    def __len__(self) -> int:
        return len(self._users)


def test_a_policy_without_a_walk_from_the_other_end_gets_one() -> None:
    policy = SmallestFirst()
    for user in ("b", "c", "a"):
        policy.touch(user)
    assert list(policy.recent()) == ["c", "b", "a"]


@pytest.mark.usefixtures("installed")
def test_a_plug_in_that_cannot_be_loaded_is_loud() -> None:
    with pytest.raises(ConfigError, match=r"'broken' .* could not be loaded"):
        load_policy("broken", {})
    with pytest.raises(ConfigError, match="must return an EvictionPolicy"):
        load_policy("wrong", {})()


@pytest.mark.usefixtures("installed")
def test_a_version_at_its_quota_is_not_walked_through() -> None:
    blocks = Blocks(num_pages=400, num_chunks=0, eviction_policy="counting")
    Counting.made = 0
    blocks.manager.set_quotas({"v1": 0.75, "v2": 0.25})
    assert Counting.made == 4, "one a tier and version"
    for number in range(300):
        blocks.serve(f"u{number}", 4)
    for number in range(100):
        blocks.serve(f"w{number}@v2", 4)
    Counting.walked = 0
    blocks.serve("x@v2", 4)
    assert Counting.walked == 1, "v2 is at its quota, its oldest user goes"
    blocks.manager.set_quotas({"v1": 0.75, "v2": 0.245})
    blocks.serve("y", 12)
    assert blocks.used() == {"v1": (302, 0, 300), "v2": (98, 0, 98)}
    assert Counting.walked == 1 + 3, "two of v2, down to its quota, then one of v1"


@pytest.mark.usefixtures("installed")
def test_a_version_is_not_walked_through_once_it_is_down_to_its_quota() -> None:
    blocks = Blocks(num_pages=110, num_chunks=0, eviction_policy="counting")
    for user in [*(f"u{number}" for number in range(100)), *(f"w{number}@v2" for number in "0123")]:
        blocks.serve(user, 4)
    blocks.serve("x@v3", 24)
    blocks.manager.set_quotas({"v1": 0.9, "v2": 0.01, "v3": 0.09})
    Counting.walked = 0
    blocks.serve("y@v3", 12)
    assert blocks.used() == {"v1": (99, 0, 99), "v2": (2, 0, 2), "v3": (9, 0, 2)}
    assert Counting.walked == 2 + 2, "one of v1 and two of v2, and who came next in v1"
