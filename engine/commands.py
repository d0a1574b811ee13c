"""Commands to a running core, and what they give: users, the cache, weights versions, statistics.

A front sends a command under a ticket of its own; exactly one `Reply` with that ticket comes back,
with the result or an error. A command that takes a while (a load, a forget whose pages are still in
use) does not stop requests.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.errors import ErrorRecord, InvalidRequest
from engine.types import CoreStats, ModelInfo, Outcome

RefreshPolicy: TypeAlias = Literal["lazy", "drop", "refresh"]
"""What becomes of user state when other weights become active.

lazy: the old state stays until its version is retired, the new one is computed when users come.
drop: the old state is removed at once. refresh: as lazy, and the users seen last are computed
under the new weights before they become active."""


class _Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class QueryStats(_Command, frozen=True):
    """Metrics as of now; gives CoreStats."""


class ForgetUser(_Command, frozen=True):
    """Remove a user's state from every tier, under every weights version; gives Forgotten when
    nothing can touch it any more. Requests queued earlier run uncached."""

    namespace: str
    user_id: str


class DescribeUser(_Command, frozen=True):
    """What is known about a user; gives UserStatus."""

    namespace: str
    user_id: str


class ListUsers(_Command, frozen=True):
    """The users with state, most recently used first; gives UserList."""

    limit: int
    tier: Literal["device", "host"] | None = None


class ResetCache(_Command, frozen=True):
    """Remove the state of all users; gives CacheReset when nothing can touch it any more."""


class LoadWeights(_Command, frozen=True):
    """Load a model directory beside the running version, warm it up; gives WeightsLoaded.

    path: a directory below `weights_root`. version: its name; None takes the directory's own.
    share: of both pools, in (0, 1). canary: share of users whose requests take it, in [0, 1].
    """

    path: str
    version: str | None = None
    share: float | None = None
    canary: float | None = None


class ActivateWeights(_Command, frozen=True):
    """Let requests that name no version take this one; gives VersionActivated.

    budget_s: how long a refresh may take before the switch happens all the same.
    """

    version: str
    policy: RefreshPolicy = "lazy"
    budget_s: float = 30.0


class RetireWeights(_Command, frozen=True):
    """Take a version out of service; gives VersionRetired when its state and weights are gone.

    mode: "wait" lets its requests end, "fail" ends them with WeightsRetired.
    """

    version: str
    mode: Literal["wait", "fail"] = "wait"


class ListWeights(_Command, frozen=True):
    """The loaded versions; gives WeightsList."""


class LoadCatalogue(_Command, frozen=True):
    """Replace a version's item table by one that only adds rows; gives WeightsLoaded.

    User state stays valid. version: None means the active one.
    """

    path: str
    version: str | None = None


Command: TypeAlias = (
    QueryStats
    | ForgetUser
    | DescribeUser
    | ListUsers
    | ResetCache
    | LoadWeights
    | ActivateWeights
    | RetireWeights
    | ListWeights
    | LoadCatalogue
)


def check_types(command: Command) -> None:
    """Raise InvalidRequest unless the command's values have the declared types, which a host's code
    may get wrong: to a core such a message is one of another program, and it ends."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=type(command))
    except (msgspec.ValidationError, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{type(command).__name__} cannot be sent: {error}") from None


class _Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Forgotten(_Result, frozen=True):
    """What was removed, in tokens per tier."""

    device_tokens: int = 0
    host_tokens: int = 0


class CacheReset(_Result, frozen=True):
    """What was removed: states, and tokens per tier."""

    states: int
    device_tokens: int
    host_tokens: int


class UserState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One user's state under one weights version. Lengths in tokens.

    fingerprint: hex, at `length`. idle_s: seconds since a request used it.
    """

    namespace: str
    user_id: str
    weights_version: str
    device_tokens: int
    host_tokens: int
    length: int
    pages: int
    chunks: int
    residency: str
    idle_s: float
    fingerprint: str = ""


class UserStatus(_Result, frozen=True):
    """A user's states, the active version's first; none for an unknown user."""

    states: tuple[UserState, ...]


class UserList(_Result, frozen=True):
    """The first `limit` states, most recently used first; `total` counts all."""

    states: tuple[UserState, ...]
    total: int


class WeightsStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One loaded version.

    state: standby, active or retiring. share: of both pools (1 when it is alone). Pages and chunks
    are what its users hold. load_s, warm_up_s: what loading took.
    """

    version: str
    state: str
    catalogue_version: str
    share: float
    canary: float
    requests: int
    users: int
    pages: int
    chunks: int
    load_s: float
    warm_up_s: float


class WeightsLoaded(_Result, frozen=True):
    """The version that was loaded, or that got a larger catalogue."""

    status: WeightsStatus


class WeightsList(_Result, frozen=True):
    """The loaded versions in the order of loading."""

    active: str
    versions: tuple[WeightsStatus, ...]


class VersionActivated(_Result, frozen=True):
    """The switch has happened. refreshed_users: computed under the new weights before it;
    refresh_s: how long that took; is_complete: whether all kept users were."""

    active: str
    previous: str
    refreshed_users: int = 0
    refresh_s: float = 0.0
    is_complete: bool = True


class VersionRetired(_Result, frozen=True):
    """The version is gone; what its users had, in tokens per tier."""

    version: str
    device_tokens: int
    host_tokens: int


class Statistics(_Result, frozen=True):
    """The answer to QueryStats."""

    stats: CoreStats


Result: TypeAlias = (
    Statistics
    | Forgotten
    | CacheReset
    | UserStatus
    | UserList
    | WeightsLoaded
    | WeightsList
    | VersionActivated
    | VersionRetired
)


class Reply(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """Exactly one per command: a result or an error."""

    ticket: str
    result: Result | None = None
    error: ErrorRecord | None = None


class ServedWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The versions that requests may name. The core says it at start and after every change."""

    active: str
    infos: tuple[ModelInfo, ...]

    @property
    def versions(self) -> tuple[str, ...]:
        """Their names, in the order of loading."""
        return tuple(info.weights_version for info in self.infos)

    @property
    def info(self) -> ModelInfo:
        """The active version's model."""
        return next(info for info in self.infos if info.weights_version == self.active)


CoreMessage: TypeAlias = Outcome | Reply | ServedWeights
"""What a core gives out."""
