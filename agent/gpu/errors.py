"""Errors of reading GPUs.

AgentError
└── GpuError
    ├── NvmlError            a call failed; says why
    ├── ReaderFailedError    NVML could not be opened
    ├── ReaderStuckError     a call did not return in time, or ended the process
    ├── ReaderEndedError     the process that reads ended
    └── PodResourcesError    the kubelet does not say which pods have which devices
"""

from nearkv.agent.errors import AgentError
from nearkv.agent.gpu.reasons import Missing, Reason


class GpuError(AgentError):
    """Base of what can go wrong when GPUs are read."""


class NvmlError(GpuError):
    """A call failed. ``missing`` says why, as it is told to others."""

    def __init__(self, missing: Missing) -> None:
        super().__init__(str(missing))
        self.missing = missing


class ReaderFailedError(GpuError):
    """NVML could not be opened, or not be asked which devices there are."""

    def __init__(self, missing: Missing) -> None:
        super().__init__(str(missing))
        self.missing = missing


class ReaderStuckError(GpuError):
    """A call did not come back: it hangs, or it took the process with it.

    ``device_index`` is -1 for calls that are about no device. ``call`` may be empty: it was
    not inside NVML.
    """

    def __init__(self, reason: Reason, *, device_index: int, call: str) -> None:
        where = f"{call or 'no call of NVML'} (device {device_index})"
        super().__init__(f"{reason.value} in {where}")
        self.reason = reason
        self.device_index = device_index
        self.call = call


class ReaderEndedError(GpuError):
    """The process ended outside of any call, or ``as_told``: no failure."""

    def __init__(self, message: str, *, as_told: bool = False) -> None:
        super().__init__(message)
        self.as_told = as_told


class PodResourcesError(GpuError):
    """The kubelet cannot be asked. ``reason`` is a short code."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
