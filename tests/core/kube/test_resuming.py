import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.kube.errors import ApiError, Trouble
from nearkv.kube.resuming import Course, PauseLimits

LIMITS = PauseLimits()


def course_at(version="10"):
    course = Course(LIMITS)
    course.listed(version)
    return course


def fail(course, trouble, *, draw=0.5, retry_after=None):
    return course.failed(ApiError(trouble, "x", retry_after_seconds=retry_after), draw)


def test_a_course_begins_with_a_list():
    assert Course(LIMITS).version is None


def test_events_move_it_on():
    course = course_at("9")
    course.moved("10")
    course.moved("10")
    assert course.version == "10"


@pytest.mark.parametrize(("last", "new"), [("10", "9"), ("100", "99"), ("12", "11")])
def test_a_version_that_goes_back_needs_a_list(last, new):
    course = course_at(last)
    with pytest.raises(ApiError) as caught:
        course.moved(new)
    course.failed(caught.value, 0)
    assert caught.value.trouble is Trouble.REGRESSED
    assert course.version is None


@pytest.mark.parametrize("new", ["a", "09", "-1", "1.5", ""])
def test_versions_that_are_no_numbers_are_not_compared(new):
    course = course_at("100")
    course.moved(new)
    assert course.version == new


def test_an_expired_version_needs_a_list_after_a_random_pause():
    pauses = []
    for draw in (0.0, 0.5, 1.0):
        course = course_at()
        pauses.append(fail(course, Trouble.EXPIRED, draw=draw))
        assert course.version is None
    assert pauses == [0.25, 2.5, 5.0]


@pytest.mark.parametrize("trouble", [Trouble.UNREACHABLE, Trouble.THROTTLED, Trouble.UNAUTHORIZED])
def test_a_server_that_is_away_is_never_asked_for_a_list_for_that(trouble):
    course = course_at()
    for _ in range(100):
        fail(course, trouble)
    assert course.version == "10"


@pytest.mark.parametrize(
    "trouble", [Trouble.SERVER_ERROR, Trouble.GARBAGE, Trouble.TRUNCATED, Trouble.CLOSED_EARLY]
)
def test_a_version_that_leads_to_nonsense_is_given_up(trouble):
    course = course_at()
    for _ in range(LIMITS.doubts_in_a_row - 1):
        fail(course, trouble)
    assert course.version == "10"
    fail(course, trouble)
    assert course.version is None


def test_doubts_end_with_an_event():
    course = course_at()
    for version in range(11, 50):
        fail(course, Trouble.GARBAGE)
        course.moved(str(version))
    assert course.version == "49"


def test_watches_that_bring_nothing_at_all_need_a_list():
    course = course_at()
    for _ in range(LIMITS.quiet_watches_in_a_row - 1):
        fail(course, Trouble.SILENT)
    assert course.version == "10"
    course.ended(open_seconds=300, heard=False)
    assert course.version is None


def test_a_watch_that_brought_something_may_end_for_ever():
    course = course_at()
    for _ in range(10):
        course.moved("10")
        course.ended(open_seconds=300, heard=True)
    assert course.version == "10"


@pytest.mark.parametrize("heard", [True, False])
def test_a_watch_that_ends_at_once_is_a_failure(heard):
    with pytest.raises(ApiError) as caught:
        course_at().ended(open_seconds=0.1, heard=heard)
    assert caught.value.trouble is Trouble.CLOSED_EARLY


def test_pauses_grow_up_to_a_limit_and_begin_anew():
    course = course_at()
    pauses = [fail(course, Trouble.UNREACHABLE, draw=1.0) for _ in range(10)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    course.moved("11")
    assert fail(course, Trouble.UNREACHABLE, draw=0.0) == 0.25


def test_a_list_alone_does_not_end_the_growth_of_pauses():
    course = course_at()
    pauses = []
    for _ in range(4):
        pauses.append(fail(course, Trouble.EXPIRED, draw=0.0))
        course.listed("10")
    assert pauses == [0.25, 0.5, 1, 2]


def test_the_server_says_when_to_come_back():
    assert fail(course_at(), Trouble.THROTTLED, retry_after=7, draw=0.0) == 7
    assert fail(course_at(), Trouble.THROTTLED, retry_after=7, draw=1.0) == pytest.approx(8.4)
    assert fail(course_at(), Trouble.THROTTLED, retry_after=1e9, draw=0.0) == 120


@given(st.lists(st.tuples(st.sampled_from(list(Trouble)), st.floats(0, 1), st.integers(0, 10**6))))
def test_pauses_are_positive_and_bounded_whatever_happens(failures):
    course = course_at()
    for trouble, draw, retry_after in failures:
        pause = fail(course, trouble, draw=draw, retry_after=retry_after)
        assert 0.25 <= pause <= 120 * 1.2
