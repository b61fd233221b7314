"""Parts of a mover by themselves: kept links, and memory that is let go of."""

import fcntl
import os

import pytest

from nearkv.agent.movers.links import LinkShelf, closed_on_error
from nearkv.agent.movers.memories import SourceMemory, TargetMemory
from nearkv.transfer.errors import PullError, Reason
from tests.agent.movers.engines import LAYOUT, maps

NEAR = ("shm", "p", b"")
FAR = ("tcp", "", b"offer")


class Link:
    def __init__(self, *, fails=False):
        self.closed = 0
        self._fails = fails

    def close(self):
        self.closed += 1
        if self._fails:
            raise OSError("cannot close")


def test_a_link_is_with_one_pull_at_a_time():
    shelf, link = LinkShelf(2), Link()
    shelf.put(NEAR, link)
    assert shelf.take(FAR) is None
    assert shelf.take(NEAR) is link
    assert shelf.take(NEAR) is None


def test_the_link_unused_longest_makes_room():
    shelf, links = LinkShelf(2), [Link(), Link(), Link()]
    for link in links:
        shelf.put(NEAR, link)
    assert [link.closed for link in links] == [1, 0, 0]
    assert shelf.take(NEAR) is links[2]


def test_no_link_is_kept_where_none_may_be():
    shelf, link = LinkShelf(0), Link()
    shelf.put(NEAR, link)
    assert link.closed == 1


def test_dropping_a_source_closes_its_links_only():
    shelf, near, far = LinkShelf(8), [Link(fails=True), Link()], Link()
    for link in near:
        shelf.put(NEAR, link)
    shelf.put(FAR, far)
    shelf.drop("p")
    assert [link.closed for link in near] == [1, 1]
    assert (far.closed, shelf.take(FAR)) == (0, far)


def test_closing_closes_all():
    shelf, links = LinkShelf(8), [Link(), Link()]
    for way, link in zip((NEAR, FAR), links, strict=True):
        shelf.put(way, link)
    shelf.close()
    assert [link.closed for link in links] == [1, 1]


def test_a_link_is_closed_on_errors_only():
    link = Link()
    with closed_on_error(link):
        pass
    assert link.closed == 0
    with pytest.raises(KeyError), closed_on_error(link):
        raise KeyError
    assert link.closed == 1


def source_of(engine):
    return SourceMemory(os.dup(engine.kv.fd), os.dup(engine.slots.fd), LAYOUT, 4)


def test_a_source_is_mapped_when_needed_and_unmapped_for_good(engine):
    p = engine("p")
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count is all that is wanted
    memory = source_of(p)
    assert maps("self", p.name) == 1
    assert bytes(memory.source().region.view) == bytes(p.kv.view)
    assert memory.source() is memory.source()
    assert maps("self", p.name) == 2
    assert memory.unmap()
    assert maps("self", p.name) == 1
    assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208 - as above


def test_a_source_that_somebody_holds_says_so(engine):
    p = engine("p")
    memory = source_of(p)
    held = memory.source().region.view[10:20]
    assert not memory.unmap()
    assert maps("self", p.name) == 2
    del held
    assert maps("self", p.name) == 1


def test_a_source_never_mapped_leaves_no_descriptor(engine):
    p = engine("p")
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count is all that is wanted
    assert source_of(p).unmap()
    assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208 - as above


def test_memory_that_cannot_be_mapped_is_tried_again_and_then_its_descriptor_closed():
    fd = os.memfd_create("not-sealed-yet", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LAYOUT.size)
    memory = TargetMemory(fd, LAYOUT)
    for _ in range(2):
        with pytest.raises(PullError) as caught:
            memory.region()
        assert caught.value.reason == Reason.MEMORY
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    assert len(memory.region().view) == LAYOUT.size
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
