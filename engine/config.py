"""The one configuration tree: defaults < file < command line, built once, never mutated.

Every rule stands in `__post_init__`, which the constructor, decoding and `replace` all run.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How user state is kept.

    Attributes:
        tiers: "off" recomputes everything, "device" keeps pages only, "tiered" adds host chunks.
        device_pages: Usable pages of the device pool.
        page_size: Token slots of a page.
        chunk_size: Tokens of a host chunk, a multiple of page_size.
        host_bytes: Bytes of the host arena; whole chunks are used.
        eviction_policy: Name of an `engine.eviction_policies` entry point.
        poison: Fill free pages with NaN, so that a read of a stale row shows (debug, slow).
        allow_small_pool: Start although the device pool cannot hold the longest history that the
            model takes; such histories are then computed outside the cache, each time anew.
    """

    tiers: Literal["off", "device", "tiered"] = "tiered"
    device_pages: int = 2048
    page_size: int = 32
    chunk_size: int = 256
    host_bytes: int = 1 << 30
    eviction_policy: str = "lru"
    poison: bool = False
    allow_small_pool: bool = False

    def __post_init__(self) -> None:
        require(self.device_pages >= 1, f"device_pages is {self.device_pages}: give at least 1")
        require(self.page_size >= 1, f"page_size is {self.page_size}: give at least 1")
        require(
            self.chunk_size >= self.page_size and self.chunk_size % self.page_size == 0,
            f"chunk_size {self.chunk_size} is not a multiple of page_size {self.page_size}: "
            f"give a multiple, for example {self.page_size * 4}",
        )
        require(self.host_bytes >= 0, f"host_bytes is {self.host_bytes}: give 0 or more")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step may hold and how much may wait.

    Attributes:
        max_batch_requests: Pieces of a step.
        max_batch_tokens: Rows of a step (history rows to compute + suffix rows).
        max_step_ms: Predicted time of a step, once steps have been measured; 0 for no limit.
        max_piece_tokens: History rows of one piece while others wait; 0 means a quarter of
            max_batch_tokens.
        max_uncut_tokens: Rows of a piece that cannot be cut (a scratch run, bidirectional context).
        max_queue_requests: Requests that may wait.
        max_queue_tokens: Tokens (history + suffix) that may wait; 0 for no limit.
        max_queue_requests_per_user: Requests of one user that may wait.
        priority_ageing_s: Seconds of waiting that weigh as much as one level of priority.
        look_ahead: Plan and start onloads for the next step while the current one runs.
    """

    max_batch_requests: int = 16
    max_batch_tokens: int = 8192
    max_step_ms: float = 0.0
    max_piece_tokens: int = 0
    max_uncut_tokens: int = 32768
    max_queue_requests: int = 1024
    max_queue_tokens: int = 0
    max_queue_requests_per_user: int = 64
    priority_ageing_s: float = 1.0
    look_ahead: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batch_requests", "max_batch_tokens", "max_uncut_tokens",
                     "max_queue_requests", "max_queue_requests_per_user"):  # fmt: skip
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: give at least 1")
        for name in ("max_step_ms", "max_piece_tokens", "max_queue_tokens"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}: give 0 or more")
        require(
            0 < self.priority_ageing_s < float("inf"),
            f"priority_ageing_s is {self.priority_ageing_s}: give a finite number above 0",
        )

    @property
    def piece_tokens(self) -> int:
        """History rows of one piece while others wait."""
        return self.max_piece_tokens or max(1, self.max_batch_tokens // 4)


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How copies between the tiers run.

    Attributes:
        workers: "native" (C++ threads), "python" (slower threads), or "auto".
        copy_timeout_s: A copy that takes longer is a miss; its pages stay out of use until it ends.
        max_onload_bytes: Bytes that the onloads of one step may move; 0 for no limit.
    """

    workers: Literal["auto", "native", "python"] = "auto"
    copy_timeout_s: float = 10.0
    max_onload_bytes: int = 0

    def __post_init__(self) -> None:
        require(self.copy_timeout_s > 0, f"copy_timeout_s is {self.copy_timeout_s}: give > 0")
        require(self.max_onload_bytes >= 0, f"max_onload_bytes is {self.max_onload_bytes}")


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which attention backend runs.

    Attributes:
        backend: A registered name, or "auto".
        options: Passed to the backend's factory.
    """

    backend: str = "auto"
    options: dict[str, Any] = {}


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights versions live beside each other.

    Attributes:
        weights_root: Folder that versions may be loaded from, with its subfolders; null means the
            folder that holds the model directory the engine started with.
        max_weights_versions: Versions loaded at a time.
        weights_share: Share of both pools for a newly loaded version, while others are alive.
        canary_share: Share of users whose requests take a newly loaded version before it is active.
        refresh_users: Users whose last history is kept, so that they can be computed under new
            weights before those become active; 0 keeps none.
    """

    weights_root: str | None = None
    max_weights_versions: int = 2
    weights_share: float = 0.5
    canary_share: float = 0.0
    refresh_users: int = 0

    def __post_init__(self) -> None:
        require(
            self.max_weights_versions >= 1,
            f"max_weights_versions is {self.max_weights_versions}: give at least 1",
        )
        require(
            0 < self.weights_share < 1,
            f"weights_share is {self.weights_share}: give more than 0 and less than 1",
        )
        require(0 <= self.canary_share <= 1, f"canary_share is {self.canary_share}: give 0 to 1")
        require(self.refresh_users >= 0, f"refresh_users is {self.refresh_users}: give 0 or more")


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the core counts as hung, and what is logged then.

    Attributes:
        watchdog_s: A step that runs longer on the device hangs: the core logs what it was doing,
            fails what is pending and ends. 0: never.
        heartbeat_kill_s: A core whose loop has made no pass for longer hangs: it logs what it was
            doing and ends; the front kills it 2 s later if it cannot. 0: never.
        dump_users: Name users in what is logged then; otherwise only requests are.
    """

    watchdog_s: float = 120.0
    heartbeat_kill_s: float = 30.0
    dump_users: bool = False

    def __post_init__(self) -> None:
        for name, least in (("watchdog_s", 1), ("heartbeat_kill_s", 3)):
            value = getattr(self, name)
            require(value == 0 or value >= least, f"{name} is {value}: give {least} or more, or 0")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the engine can be told.

    Attributes:
        cache: User state and its tiers.
        scheduler: Steps and queues.
        transfer: Copies between tiers.
        attention: Attention backend.
        weights: Weights versions.
        health: Watchdogs.
        warm_up: Run steps of the shapes that will be met before serving, at start and for every
            weights version loaded later.
        threads: Threads of one device step; 0 leaves torch's choice.
        check_invariants: Check the bookkeeping whenever the engine is idle (debug).
    """

    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    transfer: TransferConfig = TransferConfig()
    attention: AttentionConfig = AttentionConfig()
    weights: WeightsConfig = WeightsConfig()
    health: HealthConfig = HealthConfig()
    warm_up: bool = True
    threads: int = 0
    check_invariants: bool = False

    def __post_init__(self) -> None:
        require(self.threads >= 0, f"threads is {self.threads}: give 0 (automatic) or more")
        longest_s, watchdog_s = self.transfer.copy_timeout_s, self.health.watchdog_s
        require(
            watchdog_s == 0 or longest_s < watchdog_s,
            f"copy_timeout_s is {longest_s}: a step may wait that long for a copy, but counts as "
            f"hung after watchdog_s={watchdog_s:g}; give less, or more to watchdog_s",
        )
