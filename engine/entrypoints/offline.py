"""What the offline commands share: the model and the sizes they run an embedded engine with."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from safetensors import SafetensorError, safe_open

from engine.config import (
    AttentionConfig,
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    TransferConfig,
    require,
)
from engine.errors import ConfigError
from engine.models.config import Catalogue
from engine.models.loader import CONFIG_FILE, TENSOR_FILE
from engine.types import Int64Array


class OfflineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model and the sizes an offline command runs with.

    Histories in public logs are short, so the defaults are small pages and chunks.

    Attributes:
        model: Model directory.
        cache: "off" recomputes every history, "device" keeps pages, "tiered" adds host chunks.
        device_pages: Usable pages of the device pool.
        page_size: Token slots of a page.
        chunk_size: Tokens of a host chunk, a multiple of page_size.
        host_bytes: Bytes of the host arena.
        backend: Attention backend, or "auto".
        workers: Copy workers: "native", "python" or "auto".
        threads: Threads of one step; 0 leaves torch's choice.
    """

    model: str
    cache: Literal["off", "device", "tiered"] = "tiered"
    device_pages: int = 8192
    page_size: int = 8
    chunk_size: int = 64
    host_bytes: int = 1 << 28
    backend: str = "auto"
    workers: Literal["auto", "native", "python"] = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        require(self.model != "", "model is empty: give a model directory")
        self.engine_config(SchedulerConfig())

    def engine_config(self, scheduler: SchedulerConfig) -> EngineConfig:
        """The engine's configuration; raises ConfigError when the sizes do not fit together."""
        return EngineConfig(
            cache=CacheConfig(
                tiers=self.cache,
                device_pages=self.device_pages,
                page_size=self.page_size,
                chunk_size=self.chunk_size,
                host_bytes=self.host_bytes,
                allow_small_pool=True,  # what a small pool does is a thing to find out
            ),
            scheduler=scheduler,
            transfer=TransferConfig(workers=self.workers),
            attention=AttentionConfig(backend=self.backend),
            threads=self.threads,
        )


class _Policy(msgspec.Struct, frozen=True):
    """The part of config.json that says what unknown items do."""

    catalogue: Catalogue = Catalogue()


def unknown_policy(model: str) -> str:
    """What an item that the catalogue of a model directory does not have does in a history."""
    path = Path(model) / CONFIG_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Policy).catalogue.unknown_history
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def catalogue_ids(model: str) -> Int64Array:
    """The catalogue's item ids, int64 [num_items], of a model directory."""
    path = Path(model) / TENSOR_FILE
    try:
        with safe_open(path, framework="numpy") as tensors:
            ids: Int64Array = tensors.get_tensor("catalogue.item_ids")
            return ids
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
