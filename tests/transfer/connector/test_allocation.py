"""Where vLLM's blocks lie: read off views and checked against what vLLM says.

The views are numpy arrays in a tensor's clothes; that torch's own fit as well is shown by the
tests on real vLLM.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from nearkv.transfer.connector.allocation import KvAllocation, locate_blocks
from nearkv.transfer.errors import Reason, TransferError
from nearkv.transfer.memory import address_of, create_memory

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 8, 2, 4, 16
PAGE = HEADS * TOKENS * WIDTH * 2


class View:
    """What is used of a tensor."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def data_ptr(self):
        return self.array.ctypes.data

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize

    def stride(self, dimension=None):
        strides = tuple(step // self.array.itemsize for step in self.array.strides)
        return strides if dimension is None else strides[dimension]

    def __getitem__(self, index):
        return View(self.array[index])


@pytest.fixture
def allocation():
    allocation = KvAllocation()
    allocation.memory = create_memory(LAYERS * BLOCKS * PAGE)
    allocation.base_address = address_of(allocation.memory.view)
    yield allocation
    allocation.memory.close()


def placed(**fields):
    names = [f"layer{i}" for i in range(LAYERS)]
    values = {"layers": names, "layer_stride": BLOCKS * PAGE, "block_stride": PAGE, "offset": 0}
    return SimpleNamespace(**{**values, **fields})


def views_of(buffer, *, interleaved=False):
    elements = np.frombuffer(buffer, np.float16)
    if interleaved:
        whole = elements.reshape(BLOCKS, LAYERS, HEADS, TOKENS, WIDTH)
        return {f"layer{i}": View(whole[:, i]) for i in range(LAYERS)}
    whole = elements.reshape(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
    return {f"layer{i}": View(whole[i]) for i in range(LAYERS)}


def refusal(*arguments):
    with pytest.raises(TransferError) as error:
        locate_blocks(*arguments)
    return error.value.reason


def test_layers_one_after_the_other(allocation):
    layout = locate_blocks(views_of(allocation.memory.view), [placed()], BLOCKS, allocation)
    assert (layout.layers, layout.blocks, layout.block_bytes) == (LAYERS, BLOCKS, PAGE)
    assert (layout.layer_stride, layout.block_stride) == (BLOCKS * PAGE, PAGE)


def test_layers_side_by_side_in_each_block(allocation):
    tensor = placed(layer_stride=PAGE, block_stride=LAYERS * PAGE)
    views = views_of(allocation.memory.view, interleaved=True)
    layout = locate_blocks(views, [tensor], BLOCKS, allocation)
    assert (layout.layer_stride, layout.block_stride) == (PAGE, LAYERS * PAGE)


def test_blocks_cut_into_kernel_blocks(allocation):
    views = {
        name: View(view.array.reshape(BLOCKS * 2, HEADS, TOKENS // 2, WIDTH))
        for name, view in views_of(allocation.memory.view).items()
    }
    assert locate_blocks(views, [placed()], BLOCKS, allocation).block_bytes == PAGE


def test_a_cache_that_lies_elsewhere_is_refused(allocation):
    views = views_of(bytearray(LAYERS * BLOCKS * PAGE))
    assert refusal(views, [placed()], BLOCKS, allocation) is Reason.MEMORY


def test_one_layer_elsewhere_is_enough_to_refuse(allocation):
    views = views_of(allocation.memory.view)
    views["layer1"] = views["layer2"]
    assert refusal(views, [placed()], BLOCKS, allocation) is Reason.MEMORY


def test_without_shared_memory_it_is_refused():
    assert refusal({}, [placed()], BLOCKS, KvAllocation()) is Reason.MEMORY


def test_several_sets_of_layers_are_refused(allocation):
    views = views_of(allocation.memory.view)
    assert refusal(views, [placed(), placed()], BLOCKS, allocation) is Reason.LAYOUT


def test_a_layer_without_a_cache_is_refused(allocation):
    views = views_of(allocation.memory.view)
    del views["layer1"]
    assert refusal(views, [placed()], BLOCKS, allocation) is Reason.LAYOUT


def test_heads_outside_blocks_are_refused(allocation):
    elements = np.frombuffer(allocation.memory.view, np.float16)
    whole = elements.reshape(LAYERS, HEADS, BLOCKS, TOKENS, WIDTH)
    views = {f"layer{i}": View(whole[i].swapaxes(0, 1)) for i in range(LAYERS)}
    assert refusal(views, [placed()], BLOCKS, allocation) is Reason.LAYOUT


def test_a_stride_that_vllm_does_not_name_is_refused(allocation):
    views = views_of(allocation.memory.view)
    tensor = placed(layer_stride=BLOCKS * PAGE, block_stride=PAGE // 2)
    assert refusal(views, [tensor], BLOCKS, allocation) is Reason.LAYOUT
