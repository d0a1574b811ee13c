"""SiLU whose bits do not depend on where an element stands in its tensor.

torch's CPU kernel computes vectors in its body and single elements in the tail of every thread's
share, and the two differ by an ulp. Here every share is a whole number of vectors: large parts are
cut so that each thread gets a multiple of torch's grain, and the last few elements are padded.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_GRAIN = 32768
"""Elements below which torch uses one thread (at::internal::GRAIN_SIZE)."""

_VECTOR = 64
"""A multiple of the elements one round of the vector loop takes, for all types and CPUs."""


def silu_(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), in place; x is contiguous, float32 or bfloat16. Returns x."""
    flat = x.view(-1)
    num_elements = flat.numel()
    round_size = _GRAIN * torch.get_num_threads()
    shared = num_elements // round_size * round_size
    body = num_elements // _VECTOR * _VECTOR
    if shared:
        functional.silu(flat[:shared], inplace=True)
    for start in range(shared, body, _GRAIN):
        functional.silu(flat[start : min(start + _GRAIN, body)], inplace=True)
    if body < num_elements:
        tail = flat.new_zeros(_VECTOR)
        tail[: num_elements - body] = flat[body:]
        flat[body:] = functional.silu(tail)[: num_elements - body]
    return x
