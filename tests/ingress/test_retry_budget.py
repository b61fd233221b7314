"""The retry budget: a share of recent requests, and a floor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.ingress.retry_budget import BudgetRules, RecentCount, RetryBudget


def taken(budget, model, now, tries):
    return sum(budget.take(model, now) for _ in range(tries))


@pytest.mark.parametrize(("requests", "allowed"), [(0, 10), (100, 30), (1000, 210)])
def test_retries_are_a_share_of_the_requests_and_a_floor(requests, allowed):
    budget = RetryBudget(BudgetRules(ratio=0.2, floor_per_second=1.0, window_seconds=10.0))
    for number in range(requests):
        budget.count("m", number / 1000)
    assert taken(budget, "m", 1.0, 2000) == allowed


def test_an_outage_is_not_multiplied():
    budget = RetryBudget(BudgetRules(ratio=0.2, floor_per_second=0.0, window_seconds=10.0))
    sent = 0
    for number in range(10_000):  # 100 a second, each of which fails
        now = number / 100
        budget.count("m", now)
        sent += 1 + budget.take("m", now)
    assert 1.15 < sent / 10_000 <= 1.25


def test_what_is_past_counts_no_more():
    budget = RetryBudget(BudgetRules(ratio=1.0, floor_per_second=0.0, window_seconds=10.0))
    for _ in range(50):
        budget.count("m", 0.0)
    assert taken(budget, "m", 9.0, 20) == 20
    assert taken(budget, "m", 25.0, 20) == 0


def test_models_have_budgets_of_their_own():
    budget = RetryBudget(BudgetRules(floor_per_second=0.1, window_seconds=10.0))
    assert [budget.take(model, 0.0) for model in ("a", "a", "b")] == [True, False, True]


def test_names_that_clients_make_up_are_bounded():
    budget = RetryBudget(BudgetRules())
    for number in range(5000):
        budget.count(f"m{number}", 0.0)
    assert len(budget._of) == 1024


@given(st.lists(st.floats(0, 30), min_size=1, max_size=100))
def test_a_count_is_never_less_than_what_came_in_half_a_window(pauses):
    now, times = 0.0, []
    recent = RecentCount(10.0, now)
    for pause in pauses:
        now += pause
        recent.add(now)
        times.append(now)
    assert recent.at(now) <= len(times)
    assert recent.at(now) >= 1
    assert recent.at(now + 21.0) == 0
