"""The cost model learns a rate from the steps that ran."""

import pytest
from core_harness import tiny_model

from engine.scheduler.cost import CostModel


@pytest.fixture
def cost():
    # 9728 FLOPs a row; 2 layers, 2 heads, 8 + 12 dims: 160 FLOPs a pair.
    return CostModel(tiny_model("append").spec)


def test_flops_are_linear_in_rows_and_pairs(cost):
    assert cost.flops(3, 5) == 3 * 9728 + 5 * 160


def test_nothing_is_predicted_before_a_step_was_measured(cost):
    assert cost.predict_s(10, 100) is None


def test_first_step_sets_the_rate(cost):
    cost.observe(10, 0, 0.5)
    assert cost.predict_s(20, 0) == pytest.approx(1.0)


def test_later_steps_move_the_rate_by_a_fifth(cost):
    cost.observe(10, 0, 1.0)
    cost.observe(20, 0, 1.0)
    # 10 rows a second, then 20: 12 rows a second.
    assert cost.predict_s(12, 0) == pytest.approx(1.0)


@pytest.mark.parametrize(("rows", "run_s"), [(0, 1.0), (10, 0.0), (10, -1.0)])
def test_steps_without_rows_or_time_teach_nothing(cost, rows, run_s):
    cost.observe(rows, 0, run_s)
    assert cost.predict_s(10, 0) is None


def test_least_time_is_that_of_the_fastest_step(cost):
    assert cost.least_s(10, 0) == 0.0
    cost.observe(10, 0, 1.0)
    cost.observe(100, 0, 2.0)
    cost.observe(10, 0, 5.0)
    assert cost.least_s(50, 0) == pytest.approx(1.0)


def test_small_steps_say_nothing_about_the_time_of_large_ones(cost):
    cost.observe(1, 0, 0.01)
    assert cost.predict_s(1000, 0) == pytest.approx(10.0)
    assert cost.least_s(1000, 0) == pytest.approx(0.01)
