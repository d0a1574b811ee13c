"""The loaded weights versions: which one a request takes, and each one's share of the pools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from engine.commands import ServedWeights
from engine.core_parts import ServedModel, StepRunner
from engine.errors import UnknownModel
from engine.metrics import Metrics
from engine.scheduler.cost import CostModel
from engine.scheduler.version import ServedVersion
from engine.types import ModelInfo, Request
from engine.weights.life import Event, State, fire


@dataclass(slots=True, eq=False, kw_only=True)
class LoadedVersion:
    """Owned by the core thread.

    Attributes:
        served: What requests are bound to.
        share: Of both pools, once the shares of all versions are scaled to 1.
        canary: Share of users whose requests take it while it stands by.
        load_s, warm_up_s: What loading it took.
    """

    served: ServedVersion
    info: ModelInfo
    runner: StepRunner
    share: float
    canary: float = 0.0
    state: State = State.STANDBY
    load_s: float = 0.0
    warm_up_s: float = 0.0

    @property
    def name(self) -> str:
        return self.served.name

    def fire(self, event: Event) -> None:
        self.state = fire(self.state, event)


class Versions:
    """At least one version, exactly one of them active. Owned by the core thread."""

    def __init__(self, first: ServedModel, metrics: Metrics) -> None:
        self._metrics = metrics
        self._loaded: dict[str, LoadedVersion] = {}
        self.active = self.add(first, share=1.0, canary=0.0)
        self._move(self.active, Event.ACTIVATE)

    def __iter__(self) -> Iterator[LoadedVersion]:
        """In the order of loading."""
        return iter(self._loaded.values())

    def __len__(self) -> int:
        return len(self._loaded)

    def __contains__(self, name: object) -> bool:
        return name in self._loaded

    def get(self, name: str) -> LoadedVersion:
        """The version of that name. Raises UnknownModel."""
        loaded = self._loaded.get(name)
        if loaded is None:
            known = ", ".join(repr(known) for known in self._loaded)
            raise UnknownModel(f"weights version {name!r} is not loaded: this engine has {known}")
        return loaded

    def bind(self, request: Request) -> LoadedVersion:
        """The version a new request takes. Raises UnknownModel for one that takes no requests."""
        if request.weights_version is not None:
            named = self.get(request.weights_version)
            if named.state not in (State.ACTIVE, State.STANDBY):
                raise UnknownModel(
                    f"weights version {named.name!r} is being retired: name another, or none to "
                    f"take {self.active.name!r}"
                )
            return named
        if len(self._loaded) > 1:
            place = _place_of_user(request)
            for loaded in self._loaded.values():
                if loaded.state is State.STANDBY and loaded.canary:
                    if place < loaded.canary:
                        return loaded
                    place -= loaded.canary
        return self.active

    def runner_of(self, served: ServedVersion) -> StepRunner:
        """What runs the steps of a version."""
        return self._loaded[served.name].runner

    @property
    def served(self) -> ServedWeights:
        """What requests may name."""
        infos = [
            loaded.info
            for loaded in self._loaded.values()
            if loaded.state in (State.ACTIVE, State.STANDBY)
        ]
        return ServedWeights(active=self.active.name, infos=tuple(infos))

    # Changes

    def add(self, model: ServedModel, *, share: float, canary: float) -> LoadedVersion:
        """A new version on standby. It takes `share` of the pools, the others keep their
        proportions in what is left."""
        name = model.info.weights_version
        assert name not in self._loaded, "the caller has looked whether there is place for it"
        for other in self._loaded.values():
            other.share *= 1.0 - share
        loaded = LoadedVersion(
            served=ServedVersion(
                name=name,
                model=model.model,
                reuse=model.info.reuse,
                cost=CostModel(model.model.spec),
            ),
            info=model.info,
            runner=model.runner,
            share=share,
            canary=canary,
            load_s=model.load_s,
            warm_up_s=model.warm_up_s,
        )
        self._loaded[name] = loaded
        self._metrics.set("weights_version_info", 1, name, loaded.state.value)
        return loaded

    def activate(self, loaded: LoadedVersion) -> LoadedVersion:
        """Make a version on standby the active one; the one it replaces stands by."""
        replaced, self.active = self.active, loaded
        self._move(replaced, Event.REPLACE)
        self._move(loaded, Event.ACTIVATE)
        replaced.canary = loaded.canary = 0.0
        return replaced

    def retire(self, loaded: LoadedVersion) -> None:
        """A version on standby takes no new requests; it keeps its share for those it has."""
        self._move(loaded, Event.RETIRE)

    def remove(self, loaded: LoadedVersion) -> None:
        """The retiring version is gone, and its share goes to the others."""
        self._move(loaded, Event.EMPTY)
        self._metrics.remove("weights_version_info", loaded.name, loaded.state.value)
        del self._loaded[loaded.name]
        left = sum(other.share for other in self._loaded.values())
        for other in self._loaded.values():
            other.share /= left

    def replace_model(self, loaded: LoadedVersion, model: ServedModel) -> None:
        """The same weights with a larger item table."""
        loaded.served.model = model.model
        loaded.info, loaded.runner = model.info, model.runner

    def quotas(self) -> Mapping[str, float]:
        """Share of both pools by version; empty when one version has everything."""
        if len(self._loaded) == 1:
            return {}
        return {loaded.name: loaded.share for loaded in self}

    def _move(self, loaded: LoadedVersion, event: Event) -> None:
        self._metrics.remove("weights_version_info", loaded.name, loaded.state.value)
        loaded.fire(event)
        self._metrics.set("weights_version_info", 1, loaded.name, loaded.state.value)


def _place_of_user(request: Request) -> float:
    """A number in [0, 1) that is always the same for a user."""
    user = f"{request.namespace}\0{request.user_id}".encode()
    return xxh3_64_intdigest(user) / 2**64
