"""Which user gives up space first. One policy object a tier and weights version; LRU is built in.

A plug-in registers a factory under the entry-point group `engine.eviction_policies`; it is called
with its options once for each tier and weights version. The policy only orders the users of its
version: who may be taken at all (pins, copies in flight, protected users, quotas), how much (pages
from the tail), and which version is next (that of the next victim used least recently) is the
manager's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from engine.errors import ConfigError

GROUP = "engine.eviction_policies"
Entry = TypeVar("Entry", bound=Hashable)


class EvictionPolicy(ABC, Generic[Entry]):
    """An order over the users of one weights version in one tier. Owned by the loop thread."""

    @abstractmethod
    def touch(self, entry: Entry) -> None:
        """A piece of the user's request was planned; an unknown user enters the order."""

    @abstractmethod
    def remove(self, entry: Entry) -> None:
        """The user has nothing left in the tier. An unknown user is no error."""

    @abstractmethod
    def victims(self) -> Iterator[Entry]:
        """Users, the first to give up space first. The order must not change meanwhile."""

    def recent(self) -> Iterator[Entry]:
        """The same users from the other end, for reports. Here O(users); an order may be lazy."""
        return reversed(list(self.victims()))

    @abstractmethod
    def __contains__(self, entry: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...


class Lru(EvictionPolicy[Entry]):
    """Strict least-recently-used order; every operation is O(1), a walk O(users walked)."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[Entry, None] = OrderedDict()

    def touch(self, entry: Entry) -> None:
        self._order[entry] = None
        self._order.move_to_end(entry)

    def remove(self, entry: Entry) -> None:
        self._order.pop(entry, None)

    def victims(self) -> Iterator[Entry]:
        return iter(self._order)

    def recent(self) -> Iterator[Entry]:
        return reversed(self._order)

    def __contains__(self, entry: object) -> bool:
        return entry in self._order

    def __len__(self) -> int:
        return len(self._order)


def load_policy(name: str, options: Mapping[str, Any]) -> Callable[[], EvictionPolicy[Any]]:
    """A maker of policies by name: "lru", or an entry point of `engine.eviction_policies`.

    Raises ConfigError when the name is unknown, and when its factory cannot be loaded.
    """
    if name == "lru":
        return Lru
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted({"lru", *found}))
        raise ConfigError(
            f"eviction_policy {name!r} is not installed: choose one of {known}, or install a "
            f"package that registers it under the entry-point group {GROUP}"
        )
    try:
        factory = found[name].load()
    except Exception as error:
        raise ConfigError(
            f"eviction_policy {name!r} ({found[name].value}) could not be loaded: {error}"
        ) from error

    def make() -> EvictionPolicy[Any]:
        policy = factory(dict(options))
        if not isinstance(policy, EvictionPolicy):
            raise ConfigError(
                f"eviction_policy {name!r} made a {type(policy).__name__}: its factory must "
                f"return an EvictionPolicy"
            )
        return policy

    return make
