"""Changes of the weights versions while requests are served: load, activate, retire, a larger
catalogue.

Each method checks and starts a change and returns an attempt: called again and again by the core,
it gives the result once the change is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from engine.block_manager.manager import BlockManager
from engine.commands import (
    ActivateWeights,
    LoadCatalogue,
    LoadWeights,
    RetireWeights,
    VersionActivated,
    VersionRetired,
    WeightsList,
    WeightsLoaded,
    WeightsStatus,
)
from engine.config import WeightsConfig
from engine.core_parts import ModelLoader
from engine.errors import ConfigError, EngineError, InvalidRequest, UnknownModel, WeightsRetired
from engine.metrics import Metrics
from engine.scheduler.request import ScheduledRequest
from engine.types import Outcome, Request
from engine.weights.histories import Histories
from engine.weights.life import State
from engine.weights.refresh import Refresh
from engine.weights.removal import StateRemoval
from engine.weights.versions import LoadedVersion, Versions


class ChangedCore(Protocol):
    """What changes of weights need of the core."""

    def unfinished(self) -> Iterable[ScheduledRequest]: ...

    def give_up(self, entry: ScheduledRequest, error: EngineError) -> None: ...

    def submit_own(self, request: Request, listener: Callable[[Outcome], None]) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class WeightsChanges:
    """Owned by the core thread."""

    def __init__(
        self,
        core: ChangedCore,
        config: WeightsConfig,
        versions: Versions,
        manager: BlockManager,
        loader: ModelLoader,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._config = config
        self._versions = versions
        self._manager = manager
        self._loader = loader
        self._metrics = metrics
        self._clock = clock
        self._histories = Histories(config.refresh_users)
        self._refreshes: list[Refresh] = []

    # Histories, which a refresh computes

    def note(self, request: Request) -> None:
        """Keep the history of an admitted request of a client."""
        self._histories.note(request)

    def forget(self, namespace: str, user_id: str) -> None:
        """Drop what is kept of a user, also from refreshes under way."""
        self._histories.forget(namespace, user_id)
        for refresh in self._refreshes:
            refresh.leave_out((namespace, user_id))

    def forget_all(self) -> None:
        self._histories.clear()
        for refresh in self._refreshes:
            refresh.leave_out_all()

    # Commands

    def list(self) -> WeightsList:
        """All loaded versions."""
        return WeightsList(
            active=self._versions.active.name,
            versions=tuple(self._status(loaded) for loaded in self._versions),
        )

    def load(self, command: LoadWeights) -> Callable[[], WeightsLoaded | None]:
        """Load a version beside the others. Raises ConfigError, InvalidRequest."""
        config = self._config
        share = config.weights_share if command.share is None else command.share
        canary = config.canary_share if command.canary is None else command.canary
        with self._counting_failures():
            if not 0 < share < 1:
                raise InvalidRequest(
                    f"share is {share}: give more than 0 and less than 1", value=share
                )
            if not 0 <= canary <= 1:
                raise InvalidRequest(f"canary is {canary}: give 0 to 1", value=canary)
            self._check_place(command.version)
            beside = self._versions.active.served.model
            loading = self._loader.load(command.path, command.version, beside)

        def attempt() -> WeightsLoaded | None:
            with self._counting_failures():
                model = loading()
                if model is None:
                    return None
                self._check_place(model.info.weights_version)  # another load may have ended first
                loaded = self._versions.add(model, share=share, canary=canary)
            self._manager.set_quotas(self._versions.quotas())
            self._metrics.add("weights_changes_total", 1, "loaded")
            return WeightsLoaded(status=self._status(loaded))

        return attempt

    def _check_place(self, name: str | None) -> None:
        """Raise ConfigError if no version can be added, or none of that name."""
        limit, count = self._config.max_weights_versions, len(self._versions)
        num_pages = self._manager.num_pages
        if name is not None and name in self._versions:
            raise ConfigError(f"weights version {name!r} is loaded already: give another name")
        if count >= limit:
            raise ConfigError(
                f"{count} weights versions are loaded, the limit is max_weights_versions={limit}: "
                "retire one first, or raise the limit",
                limit=limit,
                value=count,
            )
        if count >= num_pages:
            raise ConfigError(
                f"{count} weights versions are loaded, and each needs a page of device_pages="
                f"{num_pages}: retire one first, or raise device_pages",
                limit=num_pages,
                value=count,
            )

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except EngineError:
            self._metrics.add("weights_changes_total", 1, "load_failed")
            raise

    def activate(self, command: ActivateWeights) -> Callable[[], VersionActivated | None]:
        """Switch what requests take that name no version. Raises UnknownModel."""
        loaded = self._usable(command.version)
        if not 0 <= command.budget_s < float("inf"):
            raise InvalidRequest(f"budget_s is {command.budget_s}: give seconds, 0 or more")
        refresh: Refresh | None = None
        if command.policy == "refresh" and loaded is not self._versions.active:
            refresh = Refresh(
                self._histories.newest_first(), loaded.name, command.budget_s, self._core,
                self._clock,
            )  # fmt: skip
            self._refreshes.append(refresh)

        previous: LoadedVersion | None = None
        removal: StateRemoval | None = None

        def attempt() -> VersionActivated | None:
            nonlocal previous, removal
            if previous is None:
                if refresh is not None:
                    if not refresh.advance():
                        return None
                    self._refreshes.remove(refresh)
                previous = self._switch(self._usable(command.version))
                if command.policy == "drop" and previous is not self._versions.active:
                    removal = StateRemoval(previous.name, self._manager)
            if removal is not None and not removal.advance():
                return None
            return VersionActivated(
                active=self._versions.active.name,
                previous=previous.name,
                refreshed_users=0 if refresh is None else refresh.num_computed,
                refresh_s=0.0 if refresh is None else refresh.took_s,
                is_complete=refresh is None or refresh.is_complete,
            )

        return attempt

    def _switch(self, loaded: LoadedVersion) -> LoadedVersion:
        """Make it active; the version that was active before (itself, if it was)."""
        if loaded is self._versions.active:
            return loaded
        self._metrics.add("weights_changes_total", 1, "activated")
        return self._versions.activate(loaded)

    def retire(self, command: RetireWeights) -> Callable[[], VersionRetired | None]:
        """Take a version out of service. Raises UnknownModel, ConfigError for the active one."""
        loaded = self._usable(command.version)
        if loaded is self._versions.active:
            raise ConfigError(
                f"weights version {loaded.name!r} is active: activate another one first"
            )
        self._versions.retire(loaded)
        if command.mode == "fail":
            self._fail_bound(loaded)
        removal = StateRemoval(loaded.name, self._manager)

        def attempt() -> VersionRetired | None:
            if loaded.served.num_bound or not removal.advance():
                return None
            self._versions.remove(loaded)
            self._manager.set_quotas(self._versions.quotas())
            self._metrics.add("weights_changes_total", 1, "retired")
            return VersionRetired(
                version=loaded.name,
                device_tokens=removal.device_tokens,
                host_tokens=removal.host_tokens,
            )

        return attempt

    def _fail_bound(self, loaded: LoadedVersion) -> None:
        for entry in list(self._core.unfinished()):
            if entry.version is loaded.served:
                self._core.give_up(
                    entry,
                    WeightsRetired(
                        f"weights version {loaded.name!r} was retired before the request ended: "
                        "send it again"
                    ),
                )

    def load_catalogue(self, command: LoadCatalogue) -> Callable[[], WeightsLoaded | None]:
        """Give a version a larger item table. Raises UnknownModel."""
        loaded = self._versions.active if command.version is None else self._usable(command.version)
        with self._counting_failures():
            growing = self._loader.grow(command.path, loaded.served.model)

        def attempt() -> WeightsLoaded | None:
            with self._counting_failures():
                model = growing()
            if model is None:
                return None
            self._versions.replace_model(self._usable(loaded.name), model)
            self._metrics.add("weights_changes_total", 1, "catalogue")
            return WeightsLoaded(status=self._status(loaded))

        return attempt

    def _usable(self, name: str) -> LoadedVersion:
        """A version that is not on its way out. Raises UnknownModel."""
        loaded = self._versions.get(name)
        if loaded.state is State.RETIRING:
            raise UnknownModel(f"weights version {name!r} is being retired")
        return loaded

    def _status(self, loaded: LoadedVersion) -> WeightsStatus:
        usages = [
            usage for usage in self._manager.usage().by_version if usage.version == loaded.name
        ]
        return WeightsStatus(
            version=loaded.name,
            state=loaded.state.value,
            catalogue_version=loaded.served.model.catalogue_version,
            share=loaded.share,
            canary=loaded.canary,
            requests=loaded.served.num_bound,
            users=sum(usage.num_users for usage in usages),
            pages=sum(usage.pages_used for usage in usages),
            chunks=sum(usage.chunks_used for usage in usages),
            load_s=loaded.load_s,
            warm_up_s=loaded.warm_up_s,
        )
