"""The budget, counted by hand."""

from __future__ import annotations

from router.retry_budget import RetryBudget


def test_it_lasts_for_its_capacity() -> None:
    budget = RetryBudget(capacity=3, per_success=0.5)
    assert [budget.take() for _ in range(5)] == [True, True, True, False, False]


def test_successes_give_a_part_back_and_never_more_than_it_held() -> None:
    budget = RetryBudget(capacity=2, per_success=0.5)
    for _ in range(100):
        budget.succeeded()
    assert [budget.take() for _ in range(3)] == [True, True, False]
    budget.succeeded()
    assert not budget.take()
    budget.succeeded()
    assert budget.take()
