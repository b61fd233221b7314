"""Having vLLM allocate its KV cache in memory that can be shared.

vLLM allocates one flat int8 buffer with ``torch.zeros`` and makes all layers views of it
(reference/vllm.md section 7). Inside the context that the connector gives it, that one call
is answered with a tensor over a sealed memfd, or over exportable memory of a CUDA device.
Whether it worked is checked afterwards, on the views themselves: a vLLM that allocates
otherwise merely cannot transfer.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from nearkv.transfer.cuda.allocation import DeviceKv, allocate_kv, as_tensor
from nearkv.transfer.errors import PullError, Reason, TransferError
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.memory import Memory, create_memory
from nearkv.transfer.messages import MEMFD

log = logging.getLogger(__name__)

Tensor = Any
"""A ``torch.Tensor``; torch is imported only inside vLLM."""
Theirs = Any
"""What torch or vLLM hand over, by their own signatures."""


AllocateKv = Callable[[int, int], DeviceKv]
"""Allocates on a device: its number among those that torch sees, and the size in bytes."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """KV memory as it is registered; see ``messages.RegisterWorker``."""

    fds: tuple[int, ...]
    kind: str = MEMFD
    device: str = ""
    handle: bytes = b""


class KvAllocation:
    """The memory that vLLM's KV cache was put into, if it was.

    ``refusal`` is why it was not, where that was tried.
    """

    def __init__(self, *, allocate_on_device: AllocateKv = allocate_kv) -> None:
        self.memory: Memory | DeviceKv | None = None
        self.base_address = 0
        self.refusal: TransferError | None = None
        self._allocate_on_device = allocate_on_device

    @property
    def size_bytes(self) -> int:
        """How much memory there is; 0 without any."""
        if isinstance(self.memory, DeviceKv):
            return self.memory.size_bytes
        return 0 if self.memory is None else len(self.memory.view)

    @property
    def shared(self) -> SharedMemory:
        """What to register; raises ``PullError`` when the KV cache lies elsewhere."""
        memory = self.memory
        if memory is None:
            raise PullError(Reason.MEMORY, "the KV cache is not in shared memory")
        if isinstance(memory, DeviceKv):
            return SharedMemory(memory.fds, memory.kind, memory.device, memory.handle)
        return SharedMemory((memory.fd,))

    def context(self) -> AbstractContextManager[Any]:
        """Return the context to allocate in."""
        return _interception(self)

    def allocate(self, size_bytes: int, device: Theirs) -> Tensor | None:
        """Return a zeroed int8 tensor over shared memory, or ``None`` when there is none.

        ``device`` is the ``torch.device`` that was asked for.
        """
        try:
            if device.type == "cuda":
                return self._on_device(size_bytes, device)
            return self._on_host(size_bytes)
        except TransferError as error:
            log.warning("nearkv: KV cache is not shared, transfers are off: %s", error)
            self.refusal = error
            return None

    def _on_host(self, size_bytes: int) -> Tensor:
        """Allocate a memfd, which is all zeros, as ``torch.zeros`` promises."""
        import torch  # type: ignore[import-not-found] # noqa: PLC0415 - only inside vLLM

        memory = create_memory(size_bytes)
        tensor = torch.frombuffer(memory.view, dtype=torch.int8)
        self.memory = memory
        self.base_address = tensor.data_ptr()
        log.info(
            "nearkv: KV cache of %.2f GiB is shared memory, %.0f %% of it on huge pages",
            size_bytes / 2**30,
            100 * memory.huge_bytes / size_bytes,
        )
        return tensor

    def _on_device(self, size_bytes: int, device: Theirs) -> Tensor:
        """Allocate on the device, in whichever way can be shared there."""
        import torch  # noqa: PLC0415 - only inside vLLM

        ordinal = torch.cuda.current_device() if device.index is None else device.index
        kv = self._allocate_on_device(ordinal, size_bytes)
        try:
            tensor = as_tensor(kv, torch.device("cuda", ordinal))
        except BaseException:
            kv.close()
            raise
        self.memory = kv
        self.base_address = tensor.data_ptr()
        log.info(
            "nearkv: KV cache of %.2f GiB is shared memory of %s (%s)",
            size_bytes / 2**30,
            kv.device,
            kv.detail,
        )
        return tensor


def _interception(allocation: KvAllocation) -> AbstractContextManager[Any]:
    import torch  # noqa: PLC0415 - only inside vLLM

    class Interception(torch.overrides.TorchFunctionMode):
        """Answers the first flat int8 allocation on the CPU or a CUDA device."""

        def __torch_function__(
            self,
            func: Theirs,
            types: Theirs,
            args: Theirs = (),
            kwargs: Theirs = None,
        ) -> Theirs:
            kwargs = kwargs or {}
            if func is torch.zeros and allocation.memory is None and _is_kv_buffer(args, kwargs):
                device = torch.device(kwargs.get("device") or "cpu")
                tensor = allocation.allocate(int(args[0]), device)
                if tensor is not None:
                    return tensor
            return func(*args, **kwargs)

    return Interception()


def _is_kv_buffer(args: Theirs, kwargs: Mapping[str, Any]) -> bool:
    import torch  # noqa: PLC0415 - only inside vLLM

    device = torch.device(kwargs.get("device") or "cpu")
    return (
        len(args) == 1
        and isinstance(args[0], int)
        and kwargs.get("dtype") is torch.int8
        and device.type in ("cpu", "cuda")
    )


def locate_blocks(
    kv_caches: Mapping[str, Any],
    tensors: Theirs,
    blocks: int,
    allocation: KvAllocation,
) -> KvMemory:
    """Return where blocks lie, and make sure that every view lies in the shared memory.

    Raises ``TransferError`` with the reason why this cache cannot be transferred.
    """
    if allocation.memory is None:
        raise allocation.refusal or PullError(Reason.MEMORY, "the KV cache is not in shared memory")
    if len(tensors) != 1:
        raise PullError(Reason.LAYOUT, f"{len(tensors)} sets of layers, expected one")
    (placed,) = tensors
    views = [kv_caches.get(name) for name in placed.layers]
    if not views or any(view is None for view in views):
        raise PullError(Reason.LAYOUT, "some layers have no cache")
    sizes = {_size_bytes(view) for view in views}
    if len(sizes) != 1 or (total := sizes.pop()) % blocks:
        raise PullError(Reason.LAYOUT, "layers differ in size, or are no whole blocks")
    layout = KvMemory(
        size=allocation.size_bytes,
        layers=len(views),
        blocks=blocks,
        layer_stride=placed.layer_stride,
        block_stride=placed.block_stride,
        block_bytes=total // blocks,
        offset=placed.offset,
    )
    for i, view in enumerate(views):
        _check_view(view, allocation.base_address + layout.offset + i * layout.layer_stride, layout)
    return layout


def _size_bytes(view: Tensor) -> int:
    return int(view.numel() * view.element_size())


def _check_view(view: Tensor, expected: int, layout: KvMemory) -> None:
    """Check that a layer's view begins where we think, and that its blocks follow in step.

    The view may cut a block into several kernel blocks; each must be contiguous within.
    """
    if view.data_ptr() != expected:
        raise PullError(Reason.MEMORY, "a layer's cache lies elsewhere than its placement says")
    pieces = view.shape[0] // layout.blocks
    stride = view.stride(0) * view.element_size()
    one_piece = view[0]
    if pieces * stride != layout.block_stride and pieces * stride != layout.block_bytes:
        raise PullError(Reason.LAYOUT, f"blocks are {stride} bytes apart, in {pieces} pieces")
    if pieces > 1 and stride * pieces != layout.block_bytes:
        raise PullError(Reason.LAYOUT, "the pieces of a block do not follow one another")
    span = 1 + sum(
        (length - 1) * step
        for length, step in zip(one_piece.shape, one_piece.stride(), strict=True)
    )
    if span * view.element_size() * pieces != layout.block_bytes:
        raise PullError(Reason.LAYOUT, "a block's bytes are not in one piece")
