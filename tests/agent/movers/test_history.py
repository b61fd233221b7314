"""When a mover may be started again (pure)."""

from nearkv.agent.movers.history import History
from nearkv.agent.movers.purposes import Kind, Purpose, purpose_of

PULL = Purpose(Kind.PULL, "d")


def history(**changes):
    return History(**{"pause_seconds": 1.0, "limit_seconds": 8.0, "jitter": lambda: 1.0} | changes)


def test_a_first_crash_costs_no_time():
    book = history()
    book.failed(PULL, "signal SIGKILL", now=100.0)
    assert book.wait_seconds(PULL, now=100.0) == 0.0
    assert book.fates[PULL].last_failure == "signal SIGKILL"


def test_pauses_double_up_to_the_limit_and_stay_there():
    book = history()
    waits = []
    for _ in range(1000):
        book.failed(PULL, "again", now=100.0)
        waits.append(book.wait_seconds(PULL, now=100.0))
    assert waits[:7] == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert waits[-1] == 8.0
    assert book.fates[PULL].restarts == 1000


def test_a_pause_passes():
    book = history(jitter=lambda: 0.5)
    for _ in range(2):
        book.failed(PULL, "again", now=100.0)
    assert book.wait_seconds(PULL, now=100.25) == 0.25
    assert book.wait_seconds(PULL, now=100.5) == 0.0


def test_a_pull_that_is_done_makes_up_for_all_crashes():
    book = history()
    for _ in range(5):
        book.failed(PULL, "again", now=100.0)
    book.succeeded(PULL)
    assert book.wait_seconds(PULL, now=100.0) == 0.0
    book.failed(PULL, "again", now=101.0)
    assert book.wait_seconds(PULL, now=101.0) == 0.0
    assert book.fates[PULL].restarts == 6


def test_an_engine_that_is_gone_is_forgotten_for_all_purposes():
    book = history()
    for purpose in (PULL, Purpose(Kind.SERVE, "d", "ucx"), Purpose(Kind.PULL, "e")):
        book.failed(purpose, "again", now=100.0)
    book.drop("d")
    assert list(book.fates) == [Purpose(Kind.PULL, "e")]


def test_libraries_that_disturb_each_other_get_movers_of_their_own():
    assert purpose_of(Kind.PULL, "d", "shm") == purpose_of(Kind.PULL, "d", "tcp")
    purposes = {purpose_of(Kind.PULL, "d", name) for name in ("tcp", "ucx", "nixl")}
    assert len(purposes) == 3
