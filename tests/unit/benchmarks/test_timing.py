"""Variants take turns, and a slow one sits out."""

import pytest
import torch

from benchmarks import ceilings
from benchmarks.instructions import differences
from benchmarks.timing import interleaved, rounded


def test_variants_take_turns_and_the_first_round_does_not_count():
    calls = []
    seconds = {"a": iter([9.0, 3.0, 1.0, 2.0]), "b": iter([9.0, 6.0, 5.0, 4.0])}

    def variant(name):
        def run():
            calls.append(name)
            return next(seconds[name])

        return run

    times = interleaved({name: variant(name) for name in "ab"}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert times["a"][:1] + times["a"][2:] == (1.0, 2.0, 3)
    assert times["b"][:1] + times["b"][2:] == (4.0, 5.0, 3)


def test_variant_over_its_budget_sits_out_after_three_runs():
    times = interleaved({"slow": lambda: 1.0, "other": lambda: 1.0}, rounds=7, budget_s=0.0)
    assert (times["slow"].runs, times["other"].runs) == (3, 3)


@pytest.mark.parametrize(("value", "expected"), [(0.00123456, 0.001235), (98765.4, 98770.0)])
def test_rounded_keeps_significant_digits(value, expected):
    assert rounded(value) == expected


def test_peak_isa_is_at_most_the_one_forced(monkeypatch):
    monkeypatch.setattr(ceilings, "isas", lambda: list(ceilings.ISAS))
    assert ceilings.peak_isa(torch.bfloat16) == "avx512_bf16"
    assert ceilings.peak_isa(torch.float32) == "avx512"
    assert ceilings.peak_isa(torch.bfloat16, "avx2") == "avx2"
    assert ceilings.peak_isa(torch.bfloat16, "base") == "sse2"


def test_count_that_moved_or_is_not_committed_is_a_difference():
    committed = {"same": 1000, "more": 1000, "less": 1000}
    found = differences({"same": 1019, "more": 1021, "less": 979, "new": 5}, committed)
    assert [line.partition(":")[0] for line in found] == ["more", "less", "new"]
