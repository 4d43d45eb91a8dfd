from __future__ import annotations

import pytest

from kvroute.config_groups import Retry
from kvroute.router.retry import RetryBudget


def _taken(budget: RetryBudget) -> int:
    count = 0
    while budget.take():
        count += 1
    return count


def test_a_burst_is_there_at_the_start() -> None:
    assert _taken(RetryBudget(Retry(budget_burst=7))) == 7


@pytest.mark.parametrize(("ratio", "requests", "retries"), [(0.25, 100, 25), (0.0, 100, 0), (1.0, 3, 3)])
def test_requests_earn_retries(ratio: float, requests: int, retries: int) -> None:
    budget = RetryBudget(Retry(budget_ratio=ratio, budget_burst=50))
    assert _taken(budget) == 50
    for _ in range(requests):
        budget.request()
    assert _taken(budget) == retries


def test_savings_end_at_the_burst() -> None:
    budget = RetryBudget(Retry(budget_ratio=1.0, budget_burst=5))
    for _ in range(1000):
        budget.request()
    assert _taken(budget) == 5


def test_a_burst_of_none_means_no_retries() -> None:
    budget = RetryBudget(Retry(budget_ratio=0.5, budget_burst=0))
    for _ in range(100):
        budget.request()
    assert _taken(budget) == 0
