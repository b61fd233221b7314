"""Messages between the agent and the process that reads GPUs; frames of ``transfer.framing``."""

import msgspec

from nearkv.agent.gpu.model import Reading, Xid
from nearkv.agent.gpu.reasons import Missing, Reason


class LeftOut(msgspec.Struct, frozen=True):
    """A call that is not made for a device, because it did not come back. ``*`` is every call."""

    device_index: int
    call: str
    reason: Reason


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The first message: open NVML. ``sysfs`` is where the kernel's view of devices is."""

    left_out: tuple[LeftOut, ...] = ()
    sysfs: str = "/sys"


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Read all devices; ``thorough`` reads what seldom changes as well."""

    thorough: bool


class Quit(msgspec.Struct, frozen=True, tag="quit"):
    """Close NVML and exit."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """NVML could not be opened; the process ends."""

    missing: Missing


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """NVML is open."""


ToReader = Open | Look | Quit
FromReader = Opened | Failed | Reading | Xid
