"""Assembly: from a model directory and a configuration to a running core."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.attention_backends.base import AttentionBackend
from engine.attention_backends.registry import attention_spec, create_backend
from engine.block_manager.manager import BlockManager
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.core_parts import CoreParts, ServedModel, TraceEvent, describe_served
from engine.errors import ConfigError
from engine.metrics import Metrics
from engine.model_loading import BackgroundLoader
from engine.models.base import Model, ModelSpec
from engine.models.bitwise import BitwiseReport, check_bitwise
from engine.models.loader import load_model_dir
from engine.models.random_weights import builtin_model
from engine.platforms.cpu import DeviceExecutor, HostArena, InlineExecutor, KvPools, Wake
from engine.runner.layers import layer_program
from engine.runner.runner import Runner
from engine.transfer.jobs import CopyEngine
from engine.transfer.native import NativeCopyEngine
from engine.transfer.python import PythonCopyEngine
from engine.transfer.select import make_copy_engine
from engine.types import ModelInfo, Reuse
from engine.warm_up import warm_up

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Hooks:
    """What tests and tools may put in; the defaults are what production runs.

    Attributes:
        wrap_copies: Put around the copy engine (faults, delays).
        observer: Told what the core does.
        uses_device_thread: Run steps in a device thread; otherwise in the caller.
    """

    wrap_copies: Callable[[CopyEngine], CopyEngine] | None = None
    observer: Callable[[TraceEvent], None] | None = None
    uses_device_thread: bool = True
    clock: Callable[[], float] = time.monotonic


def load_model(path: str | None) -> Model:
    """The model of a directory, or without one the small built-in model with random weights."""
    if path is None:
        _logger.warning(
            "no model directory was given: serving a built-in model with RANDOM weights, "
            "its scores mean nothing"
        )
        return builtin_model()
    return load_model_dir(path)


class ModelServer:
    """Makes what runs a model, for every version that shares the pools."""

    def __init__(
        self,
        config: EngineConfig,
        pools: KvPools,
        copies: CopyEngine,
        clock: Callable[[], float],
        *,
        warms_up: bool,
    ) -> None:
        self._config = config
        self._pools = pools
        self._copies = copies
        self._clock = clock
        self._warms_up = warms_up

    def serve(self, model: Model, *, is_random: bool = False) -> ServedModel:
        """The model with a backend and a runner of its own, warmed up.

        Raises ConfigError when it cannot be served exactly or by that backend, or when its longest
        history does not fit in the device pool."""
        config, spec = self._config, model.spec
        _check_budgets(config, spec)
        attention = config.attention
        backend = create_backend(
            attention.backend, attention_spec(spec, config.cache.page_size), attention.options
        )
        info = describe_served(
            model,
            config,
            backend=backend.name,
            exactness=_exactness(model, backend),
            token_bytes=self._pools.page_bytes * spec.num_layers // config.cache.page_size,
            is_random=is_random,
        )
        _check_pool(config, spec, info.reuse)
        _logger.info(
            "weights %s: reuse mode %s: %s; exactness %s",
            info.weights_version, info.reuse.value, info.reuse_reason, info.exactness,
        )  # fmt: skip
        runner = Runner(model, backend, self._pools, self._copies, self._clock)
        served = ServedModel(model=model, info=info, runner=runner)
        if self._warms_up:
            served.warm_up_s = warm_up(
                model,
                lambda num_pages: _warm_up_core(model, backend, info, config, num_pages),
                config.cache.page_size,
            )
        return served


def build_core(
    model: Model,
    config: EngineConfig,
    hooks: Hooks | None = None,
    *,
    is_random: bool = False,
    weights_root: Path | None = None,
) -> EngineCore:
    """A core around a loaded model: pools, arena, workers, backend, scheduler.

    weights_root: where other versions may be loaded from, unless the configuration says it.
    Raises ConfigError when the model cannot be served exactly, a budget cannot hold one row chain,
    or memory is short."""
    hooks = hooks or Hooks()
    spec, cache = model.spec, config.cache
    scratch_pages = -(-config.scheduler.max_uncut_tokens // cache.page_size)
    pools = KvPools(spec, cache.page_size, cache.device_pages, scratch_pages, cache.poison)
    host_bytes = cache.host_bytes if cache.tiers == "tiered" else 0
    arena = HostArena.within(host_bytes, pools, cache.chunk_size)
    with ExitStack() as undo:
        wake, metrics = Wake(), Metrics()
        undo.callback(wake.close)
        copies = make_copy_engine(config.transfer.workers, pools, arena, wake, hooks.clock)
        if hooks.wrap_copies is not None:
            copies = hooks.wrap_copies(copies)
        undo.callback(copies.close)
        # Without a device thread the caller waits for every step anyhow: nothing is to be gained.
        warms_up = config.warm_up and hooks.uses_device_thread
        server = ModelServer(config, pools, copies, hooks.clock, warms_up=warms_up)
        served = server.serve(model, is_random=is_random)
        _tell_sizes(config, pools, arena, copies)
        manager = BlockManager(
            num_pages=cache.device_pages,
            page_size=cache.page_size,
            num_chunks=arena.num_chunks,
            pages_per_chunk=arena.pages_per_chunk,
            copies=copies,
            metrics=metrics,
            eviction_policy=cache.eviction_policy,
            page_bytes_all_layers=pools.page_bytes * spec.num_layers,
            clock=hooks.clock,
            on_pages_freed=pools.poison_pages if cache.poison else None,
        )
        executor_type = DeviceExecutor if hooks.uses_device_thread else InlineExecutor
        if config.weights.weights_root is not None:
            weights_root = Path(config.weights.weights_root)
        parts = CoreParts(
            config=config,
            served=served,
            loader=BackgroundLoader(weights_root, server.serve, wake),
            manager=manager,
            copies=copies,
            executor=executor_type(wake, config.threads),
            wake=wake,
            metrics=metrics,
            clock=hooks.clock,
            observer=hooks.observer,
        )
        core = EngineCore(parts)
        undo.pop_all()
        return core


def core_from_model_dir(
    path: str | None, config: EngineConfig, hooks: Hooks | None = None
) -> EngineCore:
    """`build_core` around the model directory at `path` (None: the built-in random model)."""
    root = None if path is None else Path(path).resolve().parent
    return build_core(load_model(path), config, hooks, is_random=path is None, weights_root=root)


def _warm_up_core(
    model: Model, backend: AttentionBackend, info: ModelInfo, config: EngineConfig, num_pages: int
) -> EngineCore:
    """A core around the model and its backend that shares nothing else with what serves."""
    cache = msgspec.structs.replace(config.cache, tiers="device", device_pages=num_pages)
    config = msgspec.structs.replace(config, cache=cache, check_invariants=False)
    scratch_pages = -(-config.scheduler.max_uncut_tokens // cache.page_size)
    pools = KvPools(model.spec, cache.page_size, num_pages, scratch_pages, cache.poison)
    arena, wake = HostArena.within(0, pools, cache.chunk_size), Wake()
    copies = PythonCopyEngine(pools, arena, wake)
    metrics = Metrics()
    manager = BlockManager(
        num_pages=num_pages,
        page_size=cache.page_size,
        num_chunks=0,
        pages_per_chunk=arena.pages_per_chunk,
        copies=copies,
        metrics=metrics,
        page_bytes_all_layers=pools.page_bytes * model.spec.num_layers,
        clock=time.monotonic,
    )
    parts = CoreParts(
        config=config,
        served=ServedModel(
            model=model, info=info, runner=Runner(model, backend, pools, copies, time.monotonic)
        ),
        loader=BackgroundLoader(None, _serve_nothing, wake),
        manager=manager,
        copies=copies,
        executor=InlineExecutor(wake),
        wake=wake,
        metrics=metrics,
        clock=time.monotonic,
    )
    return EngineCore(parts)


def _serve_nothing(model: Model) -> ServedModel:
    raise AssertionError("a core that warms up loads no models")


def _exactness(model: Model, backend: AttentionBackend) -> str:
    """What the start-up self-check found: "bitwise", or by how much rows differ."""
    if not backend.is_bitwise:
        return f"within the tolerance of attention backend {backend.name}"
    report = check_bitwise(model, layer_program(model, backend), backend.spec.page_size)
    difference = max(report.max_difference, backend.row_difference())
    return str(BitwiseReport(is_bitwise=difference == 0.0, max_difference=difference))


def _tell_sizes(config: EngineConfig, pools: KvPools, arena: HostArena, copies: CopyEngine) -> None:
    cache = config.cache
    _logger.info(
        "device pool: %d pages of %d tokens, %.1f MiB",
        pools.num_pages, pools.page_size, pools.num_bytes / 2**20,
    )  # fmt: skip
    if cache.tiers != "tiered":
        return
    if arena.num_chunks == 0:
        chunk_bytes = arena.num_layers * arena.pages_per_chunk * arena.page_bytes
        _logger.warning(
            "the host tier is empty: host_bytes is %d, one chunk of %d tokens takes %d; nothing "
            "will be offloaded",
            cache.host_bytes, cache.chunk_size, chunk_bytes,
        )  # fmt: skip
        return
    _logger.info(
        "host arena: %d chunks of %d tokens, %.1f MiB; copies by %s",
        arena.num_chunks, cache.chunk_size, arena.num_bytes / 2**20,
        "native workers" if isinstance(copies, NativeCopyEngine) else "Python threads",
    )  # fmt: skip


def _check_budgets(config: EngineConfig, spec: ModelSpec) -> None:
    """One page of history and one suffix chain must fit in a step."""
    needed = config.cache.page_size + spec.max_chain + 1
    limit = config.scheduler.max_batch_tokens
    if limit < needed:
        raise ConfigError(
            f"max_batch_tokens is {limit}: a step must hold one page ({config.cache.page_size}) "
            f"and one suffix chain ({spec.max_chain + 1}), give at least {needed}",
            limit=needed,
            value=limit,
        )


def _check_pool(config: EngineConfig, spec: ModelSpec, reuse: Reuse) -> None:
    """The longest history must fit in the device pool, unless the user accepts that it does not."""
    cache = config.cache
    if cache.tiers == "off" or reuse is Reuse.REQUEST or cache.allow_small_pool:
        return
    needed = -(-spec.max_history_tokens // cache.page_size)
    if needed > cache.device_pages:
        raise ConfigError(
            f"device_pages is {cache.device_pages}: the longest history of model {spec.name}, "
            f"{spec.max_history_tokens} tokens, takes {needed} pages of {cache.page_size}. Set "
            f"device_pages to {needed} or more, or allow_small_pool to true: then longer histories "
            "are computed outside the cache, each time anew",
            limit=needed,
            value=cache.device_pages,
        )
