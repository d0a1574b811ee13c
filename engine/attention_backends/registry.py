"""Attention backends by name: three built in, others through `engine.attention_backends`.

An entry of that group is a factory without arguments that returns the backend's class; what the
backend needs (a GPU library, a kernel) is imported inside it, so a backend that is not used costs
nothing. The class is called with the spec and, as keyword arguments, the configured options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal

import torch

from engine.attention_backends.base import AttentionBackend, AttentionSpec
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.models.base import ModelSpec

GROUP = "engine.attention_backends"
AUTO_ORDER: Mapping[str, tuple[str, ...]] = {"cpu": ("cpu", "torch", "reference"), "cuda": ()}
"""What `auto` tries on each platform, best first. Plug-ins are chosen by name only."""

_log = logging.getLogger(__name__)


def _native() -> type[AttentionBackend]:
    from engine.attention_backends.native import CpuBackend

    return CpuBackend


def _torch_tiles() -> type[AttentionBackend]:
    from engine.attention_backends.torch_tiles import TorchBackend

    return TorchBackend


def _reference() -> type[AttentionBackend]:
    from engine.attention_backends.reference import ReferenceBackend

    return ReferenceBackend


_BUILT_IN: Mapping[str, Callable[[], type[AttentionBackend]]] = {
    "cpu": _native,
    "reference": _reference,
    "torch": _torch_tiles,
}


def backend_names() -> list[str]:
    """All registered names, sorted. Nothing is imported."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def backend_class(name: str) -> type[AttentionBackend]:
    """The class registered under the name.

    Raises ConfigError when there is none, when two distributions claim the name, and when the
    factory fails or returns something else.
    """
    plugins = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if name in _BUILT_IN and not plugins:
        return _BUILT_IN[name]()
    if not plugins:
        raise ConfigError(
            f"attention backend {name!r} is not registered: choose one of "
            f"{', '.join(backend_names())}, or install the package that provides it"
        )
    if name in _BUILT_IN or len(plugins) > 1:
        owners = [_owner(entry) for entry in plugins] + ["mtserve"] * (name in _BUILT_IN)
        raise ConfigError(
            f"attention backend {name!r} is registered by {' and by '.join(owners)}: "
            "uninstall all but one"
        )
    return _load(plugins[0])


def attention_spec(
    model: ModelSpec, page_size: int, platform: Literal["cpu", "cuda"] = "cpu"
) -> AttentionSpec:
    """What a model asks of a backend."""
    return AttentionSpec(
        platform=platform,
        dtype=torch.float32 if model.dtype == "float32" else torch.bfloat16,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        qk_dim=model.qk_dim,
        v_dim=model.v_dim,
        page_size=page_size,
        score=model.score,
        alpha=model.alpha,
        bias=model.bias,
    )


def create_backend(
    name: str, spec: AttentionSpec, options: Mapping[str, Any] | None = None
) -> AttentionBackend:
    """The backend of that name for the spec; `auto` takes the first of `AUTO_ORDER` that can.

    Raises ConfigError with every reason when it cannot serve the spec.
    """
    if name == "auto":
        return _create_auto(spec, options or {})
    backend_type = backend_class(name)
    reasons = backend_type.validate(spec)
    if reasons:
        raise ConfigError(
            f"attention backend {name!r} cannot serve this model: {'; '.join(reasons)}"
        )
    _log.info("attention backend %s: chosen by name", name)
    return _construct(name, backend_type, spec, options or {})


def _create_auto(spec: AttentionSpec, options: Mapping[str, Any]) -> AttentionBackend:
    refused: list[str] = []
    for name in AUTO_ORDER[spec.platform]:
        backend_type = backend_class(name)
        reasons = backend_type.validate(spec)
        if not reasons:
            why = "; ".join(refused) or "first choice"
            _log.info("attention backend %s: chosen for %s (%s)", name, spec.platform, why)
            return _construct(name, backend_type, spec, options)
        refused.append(f"{name}: {', '.join(reasons)}")
    raise ConfigError(
        f"no attention backend serves this model on {spec.platform}: "
        f"{'; '.join(refused) or 'none is built in'}; name one of {', '.join(backend_names())}"
    )


def _construct(
    name: str,
    backend_type: type[AttentionBackend],
    spec: AttentionSpec,
    options: Mapping[str, Any],
) -> AttentionBackend:
    try:
        return backend_type(spec, **options)
    except TypeError as error:
        raise ConfigError(
            f"attention backend {name!r} does not take the options {dict(options)}: {error}"
        ) from error


def _load(entry: EntryPoint) -> type[AttentionBackend]:
    where = f"attention backend {entry.name!r} of {_owner(entry)} ({entry.value})"
    try:
        backend_type = entry.load()()
    except Exception as error:
        raise ConfigError(f"{where} failed to load: {type(error).__name__}: {error}") from error
    if not (isinstance(backend_type, type) and issubclass(backend_type, AttentionBackend)):
        raise ConfigError(f"{where} is no AttentionBackend: its factory must return the class")
    return backend_type


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"
