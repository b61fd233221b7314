"""The engine's side: KV memory on a device that the node's agent can be given.

It is allocated in the device's primary context, which is torch's too, and handed to torch as
an array of somebody else's. It is none of torch's own memory: neither expandable segments nor
sleep mode move or free it, and it stays until the process ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nearkv.transfer.cuda.driver import Driver, load_driver
from nearkv.transfer.cuda.ipc import IpcMemory, create_ipc
from nearkv.transfer.cuda.probe import find_sharing
from nearkv.transfer.cuda.vmm import VmmMemory, create_vmm
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.messages import CUDA_IPC, CUDA_VMM

Tensor = Any
"""A ``torch.Tensor``; torch is imported only inside vLLM."""

ARRAY_INTERFACE_VERSION = 3


@dataclass(slots=True, eq=False)
class DeviceKv:
    """KV memory of this process on a device: ``kind``, ``device`` and so on as registered."""

    kind: str
    device: str
    memory: VmmMemory | IpcMemory
    detail: str

    @property
    def address(self) -> int:
        """Where it begins, on the device."""
        return self.memory.address

    @property
    def size_bytes(self) -> int:
        """How long it is."""
        return self.memory.size_bytes

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors to register it with."""
        return (self.memory.fd,) if isinstance(self.memory, VmmMemory) else ()

    @property
    def handle(self) -> bytes:
        """The IPC handle to register it with, if it has one."""
        return self.memory.handle if isinstance(self.memory, IpcMemory) else b""

    def close(self) -> None:
        """Free it; nobody must use it any more. May be called twice."""
        self.memory.close()


def allocate_kv(
    ordinal: int, size_bytes: int, *, load: Callable[[], Driver] = load_driver
) -> DeviceKv:
    """Allocate zeroed KV memory in whichever way can be shared here.

    Raises :class:`PullError` with all that was tried, leaving nothing behind.
    """
    driver = load()
    found = find_sharing(driver, ordinal)
    device = driver.device_uuid(driver.device(ordinal))
    if found.kind == CUDA_VMM:
        return DeviceKv(CUDA_VMM, device, create_vmm(driver, ordinal, size_bytes), found.detail)
    if found.kind == CUDA_IPC:
        return DeviceKv(CUDA_IPC, device, create_ipc(driver, ordinal, size_bytes), found.detail)
    raise PullError(Reason.MEMORY, f"device memory cannot be shared here: {found.detail}")


class DeviceArray:
    """Device memory as an int8 array for torch, which keeps it for as long as a tensor does."""

    def __init__(self, kv: DeviceKv) -> None:
        self.kv = kv

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """What Python libraries have agreed on to pass device memory; see numba's docs."""
        return {
            "shape": (self.kv.size_bytes,),
            "typestr": "|i1",
            "data": (self.kv.address, False),
            "strides": None,
            "version": ARRAY_INTERFACE_VERSION,
        }


def as_tensor(kv: DeviceKv, device: Any) -> Tensor:  # noqa: ANN401 (a ``torch.device``)
    """Return an int8 tensor over the memory.

    Raises :class:`PullError` when torch does not take it, or made a copy.
    """
    import torch  # type: ignore[import-not-found] # noqa: PLC0415 - only inside vLLM

    try:
        tensor = torch.as_tensor(DeviceArray(kv), device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise PullError(Reason.MEMORY, f"torch does not take the memory: {error}") from error
    if tensor.data_ptr() != kv.address or tensor.numel() != kv.size_bytes:
        raise PullError(Reason.MEMORY, "torch made a copy of the memory instead of using it")
    return tensor
