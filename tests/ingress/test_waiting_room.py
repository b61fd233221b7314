"""The waiting room: bounded, in order, with a deadline."""

import asyncio

import pytest

from nearkv.ingress.errors import NoRoomError, QueueFullError
from nearkv.ingress.waiting_room import RoomLimits, WaitingRoom


class Engines:
    """So many places; ``attempt`` takes one or finds none."""

    def __init__(self):
        self.places = 0
        self.served = []

    def attempt(self, name):
        def attempt():
            if not self.places:
                raise NoRoomError("full", retry_after_seconds=1)
            self.places -= 1
            self.served.append(name)
            return name

        return attempt


@pytest.fixture
def engines():
    return Engines()


def room(most=8, seconds=30.0):
    return WaitingRoom(RoomLimits(most, seconds, 7))


async def queue(place, engines, *names, model="m", priority=0):
    tasks = [
        asyncio.create_task(place.wait(model, priority, engines.attempt(name))) for name in names
    ]
    await asyncio.sleep(0)
    return tasks


async def test_whoever_came_first_is_served_first(engines):
    place = room()
    tasks = await queue(place, engines, *"abc")
    assert (place.count, place.waiting_for("m"), place.waiting_for("n")) == (3, 3, 0)
    for _ in tasks:
        engines.places += 1
        place.wake()
    assert await asyncio.gather(*tasks) == ["a", "b", "c"]
    assert engines.served == ["a", "b", "c"]
    assert (place.count, place.waiting_for("m")) == (0, 0)


async def test_urgent_requests_come_first_and_patient_ones_last(engines):
    place = room()
    tasks = [
        *await queue(place, engines, "patient", priority=-1),
        *await queue(place, engines, "usual"),
        *await queue(place, engines, "urgent", priority=2),
    ]
    engines.places = 3
    place.wake()
    await asyncio.gather(*tasks)
    assert engines.served == ["urgent", "usual", "patient"]


async def test_who_must_queue_behind_those_that_wait(engines):
    place = room()
    assert not place.must_queue("m", 0)
    (task,) = await queue(place, engines, "a")
    assert place.must_queue("m", 0)
    assert place.must_queue("m", -1)
    assert not place.must_queue("m", 1)
    assert not place.must_queue("other", 0)
    engines.places = 1
    assert await task == "a"
    assert not place.must_queue("m", 0)


async def test_models_do_not_wait_for_each_other(engines):
    place, others = room(), Engines()
    (stuck,) = await queue(place, engines, "a")
    (free,) = await queue(place, others, "b", model="n")
    others.places = 1
    place.wake()
    assert await free == "b"
    assert not stuck.done()
    engines.places = 1
    assert await stuck == "a"


async def test_room_that_nobody_announces_is_found_all_the_same(engines):
    (task,) = await queue(room(), engines, "a")
    engines.places = 1  # a reading of an agent, not the end of a request
    assert await asyncio.wait_for(task, 30) == "a"


async def test_when_the_time_is_up_the_engines_word_stands(engines):
    place = room(seconds=0.03)
    tasks = await queue(place, engines, "a", "b")
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in done] == [NoRoomError, NoRoomError]
    assert place.count == 0


async def test_a_full_room_turns_away(engines):
    place = room(most=1)
    (task,) = await queue(place, engines, "a")
    with pytest.raises(QueueFullError) as caught:
        await place.wait("m", 9, engines.attempt("b"))
    assert (caught.value.reason, caught.value.retry_after_seconds) == ("queue_full", 7)
    engines.places = 1
    assert await task == "a"


async def test_those_who_leave_make_way(engines):
    place = room()
    first, second = await queue(place, engines, "a", "b")
    first.cancel()
    engines.places = 1
    assert await asyncio.wait_for(second, 30) == "b"
    assert place.count == 0


async def test_an_attempt_that_fails_otherwise_ends_the_wait():
    def attempt():
        raise ValueError("broken")

    place = room()
    with pytest.raises(ValueError, match="broken"):
        await place.wait("m", 0, attempt)
    assert place.count == 0
