"""Copying runs: the extension and the fallback do the same, and nothing outside the runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.transfer import copying
from nearkv.transfer.copying import Copier, check_within, native_copy
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.layout import Runs

SIZE = 100_000
NATIVE = [
    False,
    pytest.param(
        True, marks=pytest.mark.skipif(native_copy() is None, reason="the extension is not built")
    ),
]


def numbers(*values):
    return np.array(values, np.int64)


def pair():
    source = np.random.default_rng(3).integers(0, 256, SIZE, np.uint8)
    return source, np.zeros(SIZE, np.uint8)


def copy_with(how, source, target, runs):
    """Copy by the name of a way of the extension, or by the fallback."""
    if how == "fallback":
        Copier(memoryview(source), memoryview(target), native=False).copy(runs)
    else:
        native_copy()(target, source, runs.target, runs.source, runs.length, how)


def ways():
    """Return what can be compared on this processor."""
    if native_copy() is None:
        return ["fallback"]
    names = ["fallback", "memcpy", None]
    for name in ("avx2", "avx512"):
        try:
            copy_with(name, *pair(), Runs(numbers(), numbers(), numbers()))
        except ValueError:
            continue
        names.append(name)
    return names


RUN = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 40_000)).filter(
    lambda run: max(run[:2]) + run[2] <= SIZE
)


@pytest.mark.parametrize("how", ways())
@given(runs=st.lists(RUN, max_size=4))
def test_runs_are_copied_exactly_whatever_their_place_and_length(how, runs):
    source, target = pair()
    wanted = target.copy()
    for s, t, n in runs:
        wanted[t : t + n] = source[s : s + n]
    columns = [numbers(*column) for column in zip(*runs, strict=True)] or [numbers()] * 3
    copy_with(how, source, target, Runs(*columns))
    assert (target == wanted).all()


OUTSIDE = {
    "before the source": (-1, 0, 5),
    "before the target": (0, -1, 5),
    "behind the source": (SIZE - 4, 0, 5),
    "behind the target": (0, SIZE - 4, 5),
    "a negative length": (50, 50, -1),
    "a length that overflows": (50, 50, (1 << 63) - 1),
    "an offset that overflows": ((1 << 63) - 1, 0, 5),
    "longer than everything": (0, 0, SIZE + 1),
}


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("run", OUTSIDE.values(), ids=OUTSIDE)
def test_a_run_outside_is_refused_before_anything_is_written(run, native):
    source, target = pair()
    copier = Copier(memoryview(source), memoryview(target), native=native)
    columns = zip((0, 0, 1000), run, strict=True)
    with pytest.raises(PullError) as caught:
        copier.copy(Runs(*(numbers(*column) for column in columns)))
    assert caught.value.reason is Reason.RANGE
    assert not target.any()


@pytest.mark.skipif(native_copy() is None, reason="the extension is not built")
class TestTheExtensionItself:
    """It checks what it is given, whoever calls it."""

    @pytest.mark.parametrize("run", OUTSIDE.values(), ids=OUTSIDE)
    def test_a_run_outside_is_refused(self, run):
        source, target = pair()
        s, t, n = zip((0, 0, 1000), run, strict=True)
        with pytest.raises(ValueError, match="outside"):
            native_copy()(target, source, numbers(*t), numbers(*s), numbers(*n))
        assert not target.any()

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ((b"read-only", b"x", numbers(0), numbers(0), numbers(1)), TypeError),
            ((bytearray(9), b"x", [0], numbers(0), numbers(1)), TypeError),
            ((bytearray(9), b"x", numbers(0).astype(np.int32), numbers(0), numbers(1)), TypeError),
            ((bytearray(9), b"x", numbers(0) * 0.5, numbers(0), numbers(1)), TypeError),
            ((bytearray(9), b"x", numbers(0, 0, 0)[::2], numbers(0), numbers(1)), ValueError),
            ((bytearray(9), b"x", numbers(0, 0), numbers(0), numbers(1)), ValueError),
            ((bytearray(9), b"x", numbers(0), numbers(0, 0), numbers(1)), ValueError),
            ((bytearray(9), b"x", numbers(0), numbers(0), numbers(1), "by magic"), ValueError),
            ((bytearray(9),), TypeError),
        ],
        ids=range(9),
    )
    def test_what_it_cannot_use_is_an_error(self, arguments, error):
        with pytest.raises(error):
            native_copy()(*arguments)

    def test_a_failed_call_keeps_no_buffer(self):
        target = bytearray(9)
        with pytest.raises(ValueError, match="outside"):
            native_copy()(target, b"x", numbers(0), numbers(0), numbers(2))
        target.clear()  # raises BufferError while anything holds it

    def test_memory_may_overlap_itself(self):
        memory, wanted = pair()[0], pair()[0]
        wanted[100:50_100] = wanted[:50_000].copy()
        native_copy()(memory, memory, numbers(100), numbers(0), numbers(50_000))
        assert (memory == wanted).all()


def test_without_the_extension_memmove_is_taken(monkeypatch):
    monkeypatch.setattr(copying, "native_copy", lambda: None)
    source, target = pair()
    copier = Copier(memoryview(source), memoryview(target))
    assert copier.how == "memmove"
    copier.copy(Runs(numbers(5), numbers(7), numbers(9)))
    assert (target[7:16] == source[5:14]).all()
    with pytest.raises(ImportError):
        Copier(memoryview(source), memoryview(target), native=True)


def test_a_read_only_target_is_refused():
    with pytest.raises(PullError) as caught:
        Copier(memoryview(b"source"), memoryview(b"target"))
    assert caught.value.reason is Reason.MEMORY


@pytest.mark.parametrize("native", NATIVE)
def test_a_closed_copier_copies_nothing_and_holds_nothing(native):
    source, target = bytearray(b"source"), bytearray(b"target")
    copier = Copier(memoryview(source), memoryview(target), native=native)
    copier.close()
    copier.close()
    with pytest.raises(ValueError, match="closed"):
        copier.copy(Runs(numbers(0), numbers(0), numbers(1)))
    source.clear()
    target.clear()


def test_no_runs_are_within_anything():
    check_within(numbers(), numbers(), 0, "source")
