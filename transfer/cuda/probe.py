"""Which way of sharing device memory works here: found out with a small allocation.

What a device says of itself is not enough: containers, MIG, driver settings and other
drivers' memory management decide as well.
"""

from contextlib import closing
from dataclasses import dataclass

from nearkv.transfer.cuda.abi import Attribute
from nearkv.transfer.cuda.driver import Driver
from nearkv.transfer.cuda.ipc import create_ipc
from nearkv.transfer.cuda.vmm import create_vmm, import_vmm
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.messages import CUDA_IPC, CUDA_VMM

_TRIAL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Sharing:
    """How memory of a device can be shared: ``kind`` as in a registration, empty for not at all.

    ``detail`` says what was tried and how it ended.
    """

    kind: str
    detail: str


def find_sharing(driver: Driver, ordinal: int) -> Sharing:
    """Try descriptors, then legacy handles; never raises, leaves nothing behind."""
    failures = []
    for kind, attempt in ((CUDA_VMM, _try_descriptor), (CUDA_IPC, _try_handle)):
        try:
            attempt(driver, ordinal)
        except PullError as error:
            failures.append(f"{kind}: {error}")
        else:
            return Sharing(kind, "; ".join([*failures, f"{kind} works"]))
    return Sharing("", "; ".join(failures))


def _try_descriptor(driver: Driver, ordinal: int) -> None:
    """Export memory and import it again, as another process would."""
    device = driver.device(ordinal)
    for attribute in (Attribute.VIRTUAL_MEMORY, Attribute.POSIX_DESCRIPTORS):
        if not driver.attribute(device, attribute):
            raise PullError(Reason.NO_PATH, f"the device has no {attribute.name.lower()}")
    with closing(create_vmm(driver, ordinal, _TRIAL_BYTES)) as memory:
        import_vmm(driver, ordinal, memory.fd, _TRIAL_BYTES, writable=True).close()


def _try_handle(driver: Driver, ordinal: int) -> None:
    """Ask for a handle; only another process could open it."""
    create_ipc(driver, ordinal, _TRIAL_BYTES).close()
