"""Conformance of attention backends: random intervals and chains against dense float64.

    from engine.testing.attention import CASES, check_backend, check_case

    results = check_backend("my_backend")               # every case it can serve
    print(*results, sep="\\n")

    @pytest.mark.parametrize("case", CASES, ids=str)     # or as tests
    def test_backend_conforms(case):
        for result in check_case("my_backend", case):
            assert result.passed, result

A case is a few requests with random q, K, V, history intervals and suffix chains. The backend runs
them over a shuffled block table whose unused slots are NaN. Its results, after the shared suffix
part, must agree with an independent dense computation; a backend that says `is_bitwise` must give
the same bits alone, in other company, in pieces, and for other page sizes, block orders and thread
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

from engine.attention_backends.base import AttentionBackend, AttentionSpec
from engine.attention_backends.registry import backend_class, create_backend
from engine.testing.attention_dense import dense_attention
from engine.testing.attention_problem import (
    AttentionCase,
    Piece,
    Problem,
    RequestShape,
    run_step,
    whole_pieces,
)

__all__ = [
    "CASES",
    "AttentionCase",
    "CheckResult",
    "RequestShape",
    "check_backend",
    "check_case",
    "unserved_reasons",
]

_FLOOR = {"float32": 2e-6, "bfloat16": 2e-3}
"""Relative rms errors so small that they pass whatever the torch reference has."""


class CheckResult(NamedTuple):
    """One check of one case. `error` is relative to the rms of the exact result."""

    backend: str
    case: AttentionCase
    check: str
    passed: bool
    error: float
    reason: str = ""

    def __str__(self) -> str:
        word = "ok  " if self.passed else "FAIL"
        return (
            f"{word} {self.backend} {self.case} {self.check}: error {self.error:.2e} {self.reason}"
        ).rstrip()


def _mixed(*, suffix: int, chain: str) -> tuple[RequestShape, ...]:
    """Requests of every mask, on both sides of page and tile borders."""
    return (
        RequestShape(length=150, new=23, mask="causal", suffix=suffix, chain=chain),
        RequestShape(length=64, new=64, mask="causal", suffix=suffix, chain=chain),
        RequestShape(length=97, new=33, mask="full", suffix=3, chain="self"),
        RequestShape(length=131, new=40, mask="window", suffix=suffix, chain=chain),
        RequestShape(length=70, new=9, mask="prefix", suffix=0, chain="self"),
        RequestShape(length=0, new=0, mask="causal", suffix=suffix, chain=chain),
        RequestShape(length=1, new=1, mask="causal", suffix=1, chain="self"),
        RequestShape(length=33, new=2, mask="empty", suffix=suffix, chain=chain),
        RequestShape(length=200, new=75, mask="random", suffix=70, chain=chain),
        RequestShape(length=65, new=0, mask="causal", suffix=1, chain="rerun"),
        RequestShape(length=90, new=90, mask="context", suffix=suffix, chain=chain),
    )


_SHAPES = (
    # heads, kv heads, qk_dim, v_dim, page size
    (1, 1, 8, 8, 1),
    (3, 3, 12, 20, 7),
    (2, 2, 5, 7, 3),
    (4, 2, 64, 64, 64),
    (2, 2, 24, 8, 128),
    (4, 1, 60, 33, 5),
    (2, 2, 128, 128, 32),
)


def _cases() -> Iterator[AttentionCase]:
    small = (
        RequestShape(length=40, new=10, mask="random", suffix=5, chain="groups"),
        RequestShape(length=77, new=77, mask="causal", suffix=2, chain="levels"),
    )
    for score, dtype in product(("silu", "softmax"), ("float32", "bfloat16")):
        for chain in ("self", "groups", "levels", "provisional"):
            requests = _mixed(suffix=8, chain=chain)
            yield AttentionCase(score=score, dtype=dtype, requests=requests, seed=1)
        for heads, kv_heads, qk_dim, v_dim, page_size in _SHAPES:
            yield AttentionCase(
                score=score,
                dtype=dtype,
                num_heads=heads,
                num_kv_heads=kv_heads,
                qk_dim=qk_dim,
                v_dim=v_dim,
                page_size=page_size,
                requests=small,
                seed=2,
            )
        requests = _mixed(suffix=6, chain="provisional")
        yield AttentionCase(score=score, dtype=dtype, bias="research", requests=requests, seed=3)


CASES: tuple[AttentionCase, ...] = tuple(_cases())


def unserved_reasons(backend: str, case: AttentionCase) -> list[str]:
    """Why the backend does not serve the case; empty when it does."""
    return backend_class(backend).validate(case.spec)


def check_backend(
    backend: str,
    *,
    cases: Sequence[AttentionCase] = CASES,
    options: Mapping[str, Any] | None = None,
) -> list[CheckResult]:
    """Every check of every case that the backend serves.

    Raises ConfigError when the backend is not registered or fails to load.
    """
    results: list[CheckResult] = []
    for case in cases:
        if not unserved_reasons(backend, case):
            results += check_case(backend, case, options=options)
    return results


def check_case(
    backend: str, case: AttentionCase, *, options: Mapping[str, Any] | None = None
) -> list[CheckResult]:
    """All checks of one case. Raises ConfigError when the backend does not serve it."""
    with torch.inference_mode():
        problem = Problem(case)
        run = _Run(backend, problem, options or {})
        first = run.values(whole_pieces(problem))
        results = [run.against_dense(first)]
        if run.is_bitwise:
            results += run.bit_checks(first)
    return results


@dataclass(slots=True, eq=False)
class _Run:
    """One backend on one problem."""

    backend: str
    problem: Problem
    options: Mapping[str, Any]

    @property
    def is_bitwise(self) -> bool:
        return backend_class(self.backend).is_bitwise

    def values(
        self, steps: Sequence[Sequence[Piece]], *, page_size: int | None = None, shuffle: int = 0
    ) -> torch.Tensor:
        """Result of every row of the problem, float32 [rows, H, V], after running the steps."""
        return run_step(self._make, self.problem, steps, page_size=page_size, shuffle=shuffle)

    def _make(self, spec: AttentionSpec) -> AttentionBackend:
        return create_backend(self.backend, spec, self.options)

    def against_dense(self, values: torch.Tensor) -> CheckResult:
        case = self.problem.case
        exact = dense_attention(self.problem, torch.float64)
        plain = dense_attention(self.problem, case.torch_dtype)
        rms = float(exact.square().mean().sqrt()) or 1.0
        error = float((values.double() - exact).square().mean().sqrt()) / rms
        allowed = float((plain.double() - exact).square().mean().sqrt()) / rms
        allowed = max(2 * allowed, _FLOOR[case.dtype])
        finite = bool(torch.isfinite(values).all())
        passed = finite and error <= allowed
        reason = f"(allowed {allowed:.2e})" if finite else "a hidden slot was read: not finite"
        return CheckResult(self.backend, case, "dense", passed, error, reason)

    def bit_checks(self, first: torch.Tensor) -> Iterator[CheckResult]:
        problem = self.problem
        whole = whole_pieces(problem)
        reverse = [list(reversed(whole[0]))]
        yield self._same("order", first, self.values(reverse))
        alone = [[piece] for piece in whole[0]]
        yield self._same("alone", first, self.values(alone))
        yield self._same("pieces", first, self.values(problem.cut(7)))
        yield self._same("block order", first, self.values(whole, shuffle=1))
        for page_size in (1, 16, 48):
            yield self._same(
                f"page size {page_size}", first, self.values(whole, page_size=page_size)
            )
        for threads in (1, 2, 3):
            with _threads(threads):
                yield self._same(f"{threads} threads", first, self.values(whole))

    def _same(self, check: str, first: torch.Tensor, second: torch.Tensor) -> CheckResult:
        difference = float((first.double() - second.double()).abs().max()) if len(first) else 0.0
        reason = "" if torch.equal(first, second) else "bits differ"
        return CheckResult(self.backend, self.problem.case, check, not reason, difference, reason)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
