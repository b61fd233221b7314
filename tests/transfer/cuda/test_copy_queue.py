"""Copies under way: never more than two batches, and never forgotten."""

import pytest

from nearkv.transfer.cuda.context import DeviceContext
from nearkv.transfer.cuda.copy_queue import CopyQueue
from nearkv.transfer.errors import PullError, Reason
from tests.transfer.cuda.device_rig import BrokenError, raise_broken

SIZE = 1 << 16


class Setting:
    """A process with two pieces of memory, ones and zeros, and a queue."""

    def __init__(self, driver, library):
        self.library = library
        self.pauses = []
        self.context = DeviceContext(driver, 0)
        with self.context.use():
            self.source, self.target = driver.allocate(SIZE), driver.allocate(SIZE)
            driver.fill(self.source, 1, SIZE)
            driver.fill(self.target, 0, SIZE)
        self.queue = CopyQueue(self.context, pause=self.pauses.append, broken=raise_broken)

    def copy(self, size=SIZE, times=1):
        def copies(driver, stream):
            for _ in range(times):
                driver.copy_on_device(self.target, self.source, size, stream)

        self.queue.submit(copies)

    @property
    def copied(self):
        return sum(self.library.bytes_at(self.target, SIZE))

    def close(self):
        self.queue.close()
        self.context.run(self.context.driver.free, self.source)
        self.context.run(self.context.driver.free, self.target)
        self.context.close()


@pytest.fixture
def setting(make_driver):
    setting = Setting(*make_driver())
    yield setting
    setting.close()


def test_a_copy_is_done_when_it_was_waited_for_and_not_before(setting):
    setting.copy()
    assert (len(setting.queue), setting.copied) == (1, 0)
    setting.queue.wait_all()
    assert (len(setting.queue), setting.copied) == (0, SIZE)


def test_no_more_than_two_batches_are_under_way(setting):
    for size in (1, 2, 3):
        setting.copy(size)
    assert (len(setting.queue), setting.copied) == (2, 1)
    setting.queue.wait_oldest()
    assert (len(setting.queue), setting.copied) == (1, 2)


def test_waiting_for_nothing_is_over_at_once(setting):
    setting.queue.wait_oldest()
    setting.queue.wait_all()
    assert "cuEventQuery" not in setting.library.calls


def test_a_long_wait_pauses_between_looks(setting):
    setting.library.polls = 100
    setting.copy()
    setting.queue.wait_all()
    assert len(setting.pauses) > 10


def test_closing_waits_for_what_is_under_way(setting):
    setting.copy()
    setting.queue.close()
    setting.queue.close()
    assert setting.copied == SIZE
    with pytest.raises(PullError, match="closed") as caught:
        setting.copy()
    assert caught.value.reason is Reason.NO_PATH


def test_what_was_queued_before_a_failure_is_waited_for_as_well(setting):
    def copies(driver, stream):
        driver.copy_on_device(setting.target, setting.source, SIZE, stream)
        raise ValueError("half a batch")

    with pytest.raises(ValueError, match="half"):
        setting.queue.submit(copies)
    assert setting.copied == 0
    setting.queue.wait_all()
    assert setting.copied == SIZE


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery"])
def test_the_process_ends_when_nobody_can_tell_whether_copies_are_under_way(setting, call):
    def copy_and_wait():
        setting.copy()
        setting.queue.wait_all()

    setting.library.fail[call] = 719
    with pytest.raises(BrokenError, match=call):  # in its place
        copy_and_wait()
    setting.library.fail.clear()
    with setting.context.use() as driver:
        driver.synchronise(setting.queue._stream)


def test_a_copy_that_broke_the_context_ends_the_process(setting):
    setting.queue.submit(
        lambda driver, stream: driver.copy_on_device(setting.target, 0x1234, SIZE, stream)
    )
    with pytest.raises(BrokenError, match="ILLEGAL_ADDRESS"):
        setting.queue.wait_all()


@pytest.mark.parametrize("call", ["cuStreamCreate", "cuEventCreate"])
def test_a_queue_that_cannot_be_made_leaves_nothing(make_driver, call):
    driver, library = make_driver()
    context = DeviceContext(driver, 0)
    library.fail[call] = 2
    with pytest.raises(PullError, match=call):
        CopyQueue(context)
    context.close()
