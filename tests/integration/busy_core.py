"""The real core over the built-in model, whose every step keeps the device thread busy for
`BUSY_S` before it computes: `python -m ...busy_core`."""

from __future__ import annotations

import logging
import os
import time

import torch

from engine.assembly import Hooks, build_core
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.core_process import run_process
from engine.models.random_weights import builtin_model

BUSY_S = 3.0


def build(model_dir: str | None, config: EngineConfig) -> EngineCore:
    model = builtin_model()
    embed = model.embed

    def embed_slowly(records: torch.Tensor) -> torch.Tensor:
        """As a long step does: operations that let the interpreter go, and Python between them."""
        end_s = time.monotonic() + BUSY_S
        square = torch.ones(512, 512)
        while time.monotonic() < end_s:
            square = (square @ square).clamp(0, 1)
        return embed(records)

    model.embed = embed_slowly  # type: ignore[method-assign]
    return build_core(model, config, Hooks(), is_random=True)


if __name__ == "__main__":
    status = run_process(build)
    logging.shutdown()
    os._exit(status)
