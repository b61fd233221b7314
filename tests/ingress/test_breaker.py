"""One engine's breaker: opening, pausing, trials, and failures that are taken back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.ingress.breaker import Breaker, BreakerRules, BreakerState

RULES = BreakerRules(failures=3, window_requests=10, open_seconds=2.0, longest_seconds=30.0)
CLOSED, OPEN, HALF_OPEN = BreakerState


@pytest.fixture
def breaker():
    return Breaker(RULES)


def fail(breaker, now, *, reached=True, stretch=1.0):
    return breaker.failed(now, reached=reached, stretch=stretch)


def open_it(breaker, now=0.0):
    fail(breaker, now, reached=False)
    assert breaker.state_at(now) is OPEN


def test_an_engine_that_cannot_be_reached_opens_it_at_once(breaker):
    fail(breaker, 0.0, reached=False)
    assert [breaker.state_at(at) for at in (0.0, 1.99, 2.0)] == [OPEN, OPEN, HALF_OPEN]


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not_count_them_on(breaker):
    fail(breaker, 0.0)
    fail(breaker, 0.1)
    breaker.succeeded(0.2)
    fail(breaker, 0.3)
    fail(breaker, 0.4)
    assert breaker.state_at(0.4) is CLOSED
    fail(breaker, 0.5)
    assert breaker.state_at(0.5) is OPEN


@pytest.mark.parametrize(
    ("every", "seconds_apart", "state"),
    [(2, 0.1, OPEN), (3, 0.1, CLOSED), (2, 2.0, CLOSED)],
    ids=["half of them fail", "a third of them fails", "half of them, but too few in the window"],
)
def test_the_share_of_failures_opens_it(breaker, every, seconds_apart, state):
    for number in range(16):
        now = number * seconds_apart
        if number % every == every - 1:
            fail(breaker, now)
        else:
            breaker.succeeded(now)
    assert breaker.state_at(now) is state


@pytest.mark.parametrize(
    ("times", "pause"), [(1, 2.0), (2, 4.0), (3, 8.0), (4, 16.0), (5, 30.0), (5000, 30.0)]
)
def test_the_pause_doubles_with_each_failed_trial_up_to_a_bound(breaker, times, pause):
    now = 0.0
    open_it(breaker, now)
    for _ in range(times - 1):
        now = breaker.until
        assert breaker.begin(now)
        fail(breaker, now)
    assert breaker.until - now == pause


def test_the_jitter_never_leads_beyond_the_bound(breaker):
    fail(breaker, 0.0, reached=False, stretch=1.25)
    assert breaker.until == 2.5
    breaker.openings = 10
    fail(breaker, 3.0, stretch=1.25)
    assert breaker.until == 33.0


def test_failures_of_requests_that_were_on_their_way_make_the_pause_no_longer(breaker):
    for _ in range(50):
        fail(breaker, 0.0, reached=False)
    assert breaker.state_at(2.0) is HALF_OPEN


def test_half_open_lets_one_trial_through_and_no_more(breaker):
    open_it(breaker)
    assert breaker.blocks(1.9)
    assert not breaker.blocks(2.0)
    assert breaker.begin(2.0)
    assert breaker.blocks(2.1)
    assert not breaker.begin(2.1)


def test_a_trial_that_succeeds_closes_it(breaker):
    open_it(breaker)
    breaker.begin(2.0)
    assert breaker.succeeded(2.5)
    assert breaker.state_at(2.5) is CLOSED
    assert not breaker.blocks(2.5)


def test_a_trial_that_says_nothing_makes_way_for_another(breaker):
    open_it(breaker)
    breaker.begin(2.0)
    breaker.end_trial()
    assert not breaker.blocks(2.1)
    breaker.begin(2.2)
    assert breaker.blocks(2.2 + RULES.trial_seconds - 0.01)
    assert not breaker.blocks(2.2 + RULES.trial_seconds)


def test_successes_of_requests_sent_before_close_nothing(breaker):
    open_it(breaker)
    assert not breaker.succeeded(1.0)
    assert breaker.state_at(1.0) is OPEN


def test_a_request_sent_while_open_since_all_were_is_a_trial(breaker):
    open_it(breaker)
    assert breaker.begin(1.0)
    assert breaker.succeeded(1.1)
    assert breaker.state_at(1.1) is CLOSED


def test_an_engine_that_was_well_for_long_begins_with_the_first_pause_again(breaker):
    for now in (0.0, 2.0):
        open_it(breaker, now)
    assert breaker.until == 6.0
    breaker.succeeded(6.0)
    fail(breaker, 10.0, reached=False)
    assert breaker.until == 18.0, "it goes on where it was"
    breaker.succeeded(18.0)
    fail(breaker, 49.0, reached=False)
    assert breaker.until == 51.0


def test_a_failure_taken_back_closes_what_it_opened(breaker):
    fail(breaker, 0.0)
    fail(breaker, 0.1)
    strike = fail(breaker, 0.2)
    assert breaker.state_at(0.2) is OPEN
    breaker.retract(strike)
    assert breaker.state_at(0.2) is CLOSED
    fail(breaker, 0.3)
    assert breaker.state_at(0.3) is OPEN, "the others still count"


def test_a_failure_taken_back_does_not_close_what_others_keep_open(breaker):
    strikes = [fail(breaker, 0.1 * i) for i in range(5)]
    breaker.retract(strikes[2])
    assert breaker.state_at(0.5) is OPEN


def test_a_trial_taken_back_leaves_it_half_open(breaker):
    open_it(breaker)
    breaker.begin(2.0)
    strike = fail(breaker, 2.1)
    assert breaker.state_at(2.2) is OPEN
    breaker.retract(strike)
    assert breaker.state_at(2.2) is HALF_OPEN


@given(
    st.lists(
        st.tuples(st.sampled_from(["fail", "lost", "good", "begin", "quit"]), st.floats(0, 5)),
        max_size=60,
    )
)
def test_whatever_happens_it_lets_somebody_through_again_in_time(events):
    breaker, now = Breaker(RULES), 0.0
    for event, pause in events:
        now += pause
        if event in {"fail", "lost"}:
            fail(breaker, now, reached=event == "fail", stretch=1.25)
        elif event == "good":
            breaker.succeeded(now)
        elif event == "begin":
            breaker.begin(now)
        else:
            breaker.end_trial()
        assert len(breaker.outcomes) <= 256
    assert not breaker.blocks(now + RULES.longest_seconds + RULES.trial_seconds)
