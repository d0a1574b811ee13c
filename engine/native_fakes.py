"""Shapes of the native operators, for tracing (`torch.compile`, meta tensors).

They write into tensors that they are given, and return nothing.
"""

from __future__ import annotations

import torch

_WRITERS = (
    "append_kv",
    "attention",
    "embed",
    "gather_pages",
    "hstu_layer",
    "hstu_project",
    "scatter_pages",
    "time_buckets",
    "top_items",
)


def register_fakes() -> None:
    """Call once, after the library is loaded."""
    for name in _WRITERS:
        torch.library.register_fake(f"engine::{name}", _returns_nothing)


def _returns_nothing(*args: object) -> None:
    pass
