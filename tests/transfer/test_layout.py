"""Memory layouts and copy plans, checked against a plain block-by-block copy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.transfer.errors import LayoutError
from nearkv.transfer.layout import KvMemory, cut_runs, plan_runs


def memory(layers=3, blocks=16, block_bytes=8, *, interleaved=False, offset=0):
    if interleaved:
        layer_stride, block_stride = block_bytes, block_bytes * layers
    else:
        layer_stride, block_stride = block_bytes * blocks, block_bytes
    size = offset + layers * blocks * block_bytes
    return KvMemory(
        size=size, layers=layers, blocks=blocks, layer_stride=layer_stride,
        block_stride=block_stride, block_bytes=block_bytes, offset=offset,
    )  # fmt: skip


def block(kv, buffer, layer, index):
    start = kv.offset + layer * kv.layer_stride + index * kv.block_stride
    return buffer[start : start + kv.block_bytes]


def carry_out(runs, source, target):
    for s, t, n in zip(runs.source, runs.target, runs.length, strict=True):
        target[t : t + n] = source[s : s + n]


BLOCKS = st.lists(st.integers(0, 15), max_size=16, unique=True)


@given(
    source_blocks=BLOCKS,
    target_order=st.permutations(range(16)),
    forms=st.tuples(st.booleans(), st.booleans()),
    chunk_bytes=st.integers(1, 200),
)
def test_a_plan_copies_exactly_the_blocks(source_blocks, target_order, forms, chunk_bytes):
    source, target = memory(interleaved=forms[0], offset=8), memory(interleaved=forms[1])
    target_blocks = target_order[: len(source_blocks)]
    data = np.random.default_rng(1).integers(1, 255, source.size, dtype=np.uint8)
    wanted = np.zeros(target.size, dtype=np.uint8)
    for layer in range(source.layers):
        for s, t in zip(source_blocks, target_blocks, strict=True):
            block(target, wanted, layer, t)[:] = block(source, data, layer, s)
    runs = plan_runs(source, target, source_blocks, target_blocks)
    for parts in ([runs], cut_runs(runs, chunk_bytes=chunk_bytes)):
        copied = np.zeros(target.size, dtype=np.uint8)
        for part in parts:
            carry_out(part, data, copied)
        assert (copied == wanted).all()
        assert sum(part.total_bytes for part in parts) == runs.total_bytes
    assert all(c.total_bytes <= chunk_bytes for c in cut_runs(runs, chunk_bytes=chunk_bytes))


def test_neighbours_on_both_sides_are_one_run():
    kv = memory(layers=1)
    assert len(plan_runs(kv, kv, [2, 3, 4, 9], [7, 8, 9, 10])) == 2
    assert len(plan_runs(kv, kv, [2, 3, 4], [9, 8, 7])) == 3


def test_a_whole_layer_and_the_next_are_one_run_where_they_touch():
    kv = memory(layers=3)
    assert len(plan_runs(kv, kv, range(16), range(16))) == 1


def test_interleaved_layers_of_neighbouring_blocks_stay_apart_by_layer():
    kv = memory(layers=3, interleaved=True)
    assert len(plan_runs(kv, kv, [1, 2], [1, 2])) == 6


@pytest.mark.parametrize(
    ("source_blocks", "target_blocks", "message"),
    [
        ([1], [1, 2], "1 blocks for 2 places"),
        ([16], [0], "source block"),
        ([1 << 63], [0], "source block"),
        ([-1], [0], "source block"),
        ([0], [16], "target block is outside"),
        ([0, 1], [5, 5], "named twice"),
    ],
)
def test_impossible_plans_are_refused(source_blocks, target_blocks, message):
    kv = memory()
    with pytest.raises(LayoutError, match=message):
        plan_runs(kv, kv, source_blocks, target_blocks)


@pytest.mark.parametrize("change", [{"layers": 2}, {"block_bytes": 16}], ids=["layers", "bytes"])
def test_layouts_that_differ_are_refused(change):
    with pytest.raises(LayoutError, match=f"^{next(iter(change))}:"):
        plan_runs(memory(**change), memory(), [0], [0])


@pytest.mark.parametrize(
    "change",
    [
        {"block_bytes": 9},
        {"layer_stride": 100},
        {"layer_stride": 4},
        {"size": 3 * 16 * 8 - 1},
        {"blocks": 0},
        {"offset": -1},
        {"offset": 1},
    ],
    ids=str,
)
def test_layouts_that_cannot_be_are_refused(change):
    fields = {
        "size": 3 * 16 * 8, "layers": 3, "blocks": 16, "layer_stride": 128, "block_stride": 8,
        "block_bytes": 8,
    }  # fmt: skip
    KvMemory(**fields)
    with pytest.raises(LayoutError):
        KvMemory(**{**fields, **change})


def test_nothing_to_copy_is_an_empty_plan():
    runs = plan_runs(memory(), memory(), [], [])
    assert len(runs) == 0
    assert cut_runs(runs, chunk_bytes=10) == []
