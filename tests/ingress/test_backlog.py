"""The backlog: what was sent to engines and is still to be computed."""

import pytest

from nearkv.ingress.backlog import Backlog

PER_TOKEN = 0.001


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def backlog(clock):
    return Backlog(clock)


def wait(backlog, engine="a", incarnation="i"):
    return backlog.load(engine, incarnation, PER_TOKEN)


def test_what_is_sent_counts_at_once_and_no_longer_than_until_it_is_answered(backlog):
    with backlog.counting("a", "i", 1000), backlog.counting("a", "i", 500):
        assert wait(backlog) == (2, pytest.approx(1.5))
        assert backlog.at("a", "i") == 1500
        assert wait(backlog, "b") == wait(backlog, incarnation="j") == (0, 0.0)
    assert (wait(backlog), backlog.at("a", "i")) == ((0, 0.0), 0)


def test_time_is_progress_on_the_oldest_one_and_on_no_other(backlog, clock):
    with backlog.counting("a", "i", 1000):
        with backlog.counting("a", "i", 500):
            clock.now += 0.4
            assert wait(backlog)[1] == pytest.approx(1.1)
            clock.now += 50  # it takes longer than expected: the next one still has to wait
            assert wait(backlog)[1] == pytest.approx(0.5)
        assert wait(backlog)[1] == pytest.approx(0.0)


def test_when_the_oldest_one_is_answered_the_next_one_begins(backlog, clock):
    first = backlog.counting("a", "i", 1000)
    second = backlog.counting("a", "i", 500)
    first.__enter__()
    second.__enter__()
    clock.now += 0.9
    first.__exit__(None, None, None)
    assert wait(backlog)[1] == pytest.approx(0.5)
    clock.now += 0.2
    assert wait(backlog)[1] == pytest.approx(0.3)
    second.__exit__(None, None, None)


def test_answers_that_do_not_tell_leave_once_their_prompt_should_be_computed(backlog, clock):
    with (
        backlog.counting("a", "i", 1000, tells=False),
        backlog.counting("a", "i", 500, tells=False),
    ):
        clock.now += 1.2
        assert wait(backlog)[1] == pytest.approx(0.3)
        clock.now += 60
        assert wait(backlog)[1] == 0.0


def test_a_clock_that_goes_back_takes_nothing_away(backlog, clock):
    with backlog.counting("a", "i", 1000):
        clock.now -= 5
        assert wait(backlog)[1] == pytest.approx(1.0)
