"""Why a value is not known: one code for each, and what NVML's return codes mean (pure)."""

from enum import StrEnum

import msgspec


class Reason(StrEnum):
    """Why something is not known; a metric label, and part of the status."""

    NOT_READ = "not_read"
    """It was not asked for yet."""
    OFF = "off"
    """Reading GPUs is switched off."""
    NO_DRIVER = "no_driver"
    """This host has no NVIDIA driver, or it is not loaded: normal where engines run on CPUs."""
    NO_BINDING = "no_binding"
    """``nvidia-ml-py`` is not installed here."""
    DRIVER_MISMATCH = "driver_mismatch"
    """The library is of another version than the kernel's driver, as after an upgrade."""
    RELEASED = "released"
    """NVML is closed on purpose, so that the driver can be changed."""
    STALE = "stale"
    """The last reading is too old to be told."""
    NOT_SUPPORTED = "not_supported"
    """The device or its driver says that it has no such thing."""
    MISSING_SYMBOL = "missing_symbol"
    """The driver's library does not have the call (it is older, or newer)."""
    VERSION_MISMATCH = "version_mismatch"
    """The driver does not know this version of the call's structure."""
    NO_PERMISSION = "no_permission"
    NO_DATA = "no_data"
    NOT_READY = "not_ready"
    TIMEOUT = "timeout"
    """NVML itself gave up waiting."""
    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    GPU_LOST = "gpu_lost"
    """The GPU fell off the bus, or was taken out."""
    ABSENT = "absent"
    """NVML does not list a device that it did list before."""
    RESET_REQUIRED = "reset_required"
    """The GPU must be reset before it can be used again."""
    MIG = "mig"
    """The device is split by MIG: the whole has no such value."""
    HUNG = "hung"
    """The call did not return; it is left out for a while."""
    CRASHED = "crashed"
    """The call ended the process that reads; it is left out for a while."""
    UNREADABLE = "unreadable"
    """The answer could not be read."""
    FAILED = "failed"
    """Any other error; the detail has NVML's code."""


class Missing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a value is null; ``detail`` is for people."""

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value} ({self.detail})" if self.detail else self.reason.value


# Values of nvmlReturn_t, as nvml.h documents them.
_RETURN_CODES = (
    (2, Reason.INVALID_ARGUMENT),
    (3, Reason.NOT_SUPPORTED),
    (4, Reason.NO_PERMISSION),
    (6, Reason.NOT_FOUND),
    (9, Reason.NO_DRIVER),
    (10, Reason.TIMEOUT),
    (12, Reason.NO_DRIVER),
    (13, Reason.MISSING_SYMBOL),
    (15, Reason.GPU_LOST),
    (16, Reason.RESET_REQUIRED),
    (18, Reason.DRIVER_MISMATCH),
    (21, Reason.NO_DATA),
    (22, Reason.NOT_SUPPORTED),
    (25, Reason.VERSION_MISMATCH),
    (27, Reason.NOT_READY),
    (28, Reason.ABSENT),
)


def reason_of(code: int) -> Reason:
    """Return what an ``nvmlReturn_t`` other than success means."""
    return next((reason for known, reason in _RETURN_CODES if known == code), Reason.FAILED)
