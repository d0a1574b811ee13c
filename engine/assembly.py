"""Assembly: from a model directory and a configuration to a running core."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.attention_backends.base import AttentionBackend
from engine.attention_backends.registry import attention_spec, create_backend
from engine.block_manager.manager import BlockManager
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.core_parts import CoreParts, TraceEvent
from engine.errors import ConfigError
from engine.metrics import Metrics
from engine.models.base import Model, ModelSpec
from engine.models.linear import BitwiseReport, check_bitwise
from engine.models.loader import load_model_dir
from engine.models.random_weights import builtin_model
from engine.models.reuse import derive_reuse
from engine.platforms.cpu import DeviceExecutor, HostArena, InlineExecutor, KvPools, Wake
from engine.runner.runner import Runner
from engine.transfer.jobs import CopyEngine
from engine.transfer.native import NativeCopyEngine
from engine.transfer.select import make_copy_engine
from engine.types import ModelInfo

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


def build_core(
    model: Model, config: EngineConfig, hooks: Hooks | None = None, *, is_random: bool = False
) -> EngineCore:
    """A core around a loaded model: pools, arena, workers, backend, scheduler.

    Raises ConfigError when the model cannot be served exactly, a budget cannot hold one row chain,
    or memory is short."""
    hooks = hooks or Hooks()
    spec, cache = model.spec, config.cache
    reuse, reason = derive_reuse(spec)
    _check_budgets(config, spec)
    backend = create_backend(
        config.attention.backend, attention_spec(spec, cache.page_size), config.attention.options
    )
    exactness = _exactness(model, backend)
    _logger.info("reuse mode %s: %s; exactness %s", reuse.value, reason, exactness)
    scratch_pages = -(-config.scheduler.max_uncut_tokens // cache.page_size)
    pools = KvPools(spec, cache.page_size, cache.device_pages, scratch_pages, cache.poison)
    host_bytes = cache.host_bytes if cache.tiers == "tiered" else 0
    arena = HostArena.within(host_bytes, pools, cache.chunk_size)
    wake, metrics = Wake(), Metrics()
    copies = make_copy_engine(config.transfer.workers, pools, arena, wake, hooks.clock)
    _tell_sizes(config, pools, arena, copies)
    if hooks.wrap_copies is not None:
        copies = hooks.wrap_copies(copies)
    bytes_per_page = pools.page_bytes * spec.num_layers
    manager = BlockManager(
        num_pages=cache.device_pages,
        page_size=cache.page_size,
        num_chunks=arena.num_chunks,
        pages_per_chunk=arena.pages_per_chunk,
        copies=copies,
        metrics=metrics,
        eviction_policy=cache.eviction_policy,
        page_bytes_all_layers=bytes_per_page,
        clock=hooks.clock,
        on_pages_freed=pools.poison_pages if cache.poison else None,
    )
    executor_type = DeviceExecutor if hooks.uses_device_thread else InlineExecutor
    parts = CoreParts(
        config=config,
        model=model,
        info=ModelInfo(
            name=spec.name,
            weights_version=spec.weights_version,
            dtype=spec.dtype,
            tasks=spec.tasks,
            max_history_tokens=spec.max_history_tokens,
            max_batch_tokens=config.scheduler.max_batch_tokens,
            reuse=reuse,
            reuse_reason=reason,
            backend=backend.name,
            exactness=exactness,
            cache_tiers=cache.tiers,
            page_size=cache.page_size,
            chunk_size=cache.chunk_size,
            token_bytes=bytes_per_page // cache.page_size,
            is_random=is_random,
            **model.describe()._asdict(),
        ),
        manager=manager,
        runner=Runner(model, backend, pools, copies, hooks.clock),
        copies=copies,
        executor=executor_type(wake, config.threads),
        wake=wake,
        metrics=metrics,
        clock=hooks.clock,
        observer=hooks.observer,
    )
    return EngineCore(parts)


def core_from_model_dir(
    path: str | None, config: EngineConfig, hooks: Hooks | None = None
) -> EngineCore:
    """`build_core` around the model directory at `path` (None: the built-in random model)."""
    return build_core(load_model(path), config, hooks, is_random=path is None)


def _exactness(model: Model, backend: AttentionBackend) -> str:
    """What the start-up self-check found: "bitwise", or by how much rows differ."""
    if not backend.is_bitwise:
        return f"within the tolerance of attention backend {backend.name}"
    difference = max(check_bitwise(model).max_difference, backend.row_difference())
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
