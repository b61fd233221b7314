"""The calls of NVML by name: the one module that knows ``nvidia-ml-py``, loaded when used.

Names are those of the C library, so that what is read, what is left out and what a double
offers are called alike. The library is found by the dynamic loader as ``libnvidia-ml.so.1``.
"""

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

from nearkv.agent.gpu.errors import NvmlError
from nearkv.agent.gpu.raw import Handle, Raw
from nearkv.agent.gpu.reasons import Missing, Reason, reason_of


def load_nvml() -> "Nvml":
    """Return NVML, not initialised yet; raises :class:`NvmlError` without ``nvidia-ml-py``."""
    try:
        binding = importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlError(Missing(Reason.NO_BINDING, str(error))) from error
    return Nvml(binding)


class Nvml:
    """NVML's calls; whatever goes wrong in one is raised as :class:`NvmlError`."""

    def __init__(self, binding: Raw) -> None:
        self._binding = binding
        self._versioned: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetMemoryInfo_v2": self._memory_v2,
            "nvmlDeviceGetTemperatureV": self._temperature_v1,
            "nvmlDeviceGetGpuFabricInfoV(3)": self._fabric_v3,
            "nvmlDeviceGetGpuFabricInfoV(2)": self._fabric_v2,
            "nvmlDeviceGetGpuFabricInfo": self._fabric_v1,
        }

    def call(self, name: str, *arguments: Raw) -> Raw:
        """Make a call; returns what ``nvidia-ml-py`` makes of its results."""
        try:
            function = self._versioned.get(name) or getattr(self._binding, name)
        except AttributeError as error:
            detail = "not in this nvidia-ml-py"
            raise NvmlError(Missing(Reason.MISSING_SYMBOL, detail)) from error
        try:
            return function(*arguments)
        except self._binding.NVMLError as error:
            raise NvmlError(_missing_of(error)) from error
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            raise NvmlError(Missing(Reason.UNREADABLE, detail)) from error

    def _memory_v2(self, handle: Handle) -> Raw:
        binding = self._binding
        return binding.nvmlDeviceGetMemoryInfo(handle, version=binding.nvmlMemory_v2)

    def _temperature_v1(self, handle: Handle, sensor: int) -> Raw:
        return self._binding.nvmlDeviceGetTemperatureV(handle, sensor)

    def _fabric_v3(self, handle: Handle) -> Raw:
        info = self._binding.c_nvmlGpuFabricInfo_v3_t()
        self._binding.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        return info

    def _fabric_v2(self, handle: Handle) -> Raw:
        info = self._binding.c_nvmlGpuFabricInfo_v2_t()
        self._binding.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        return info

    def _fabric_v1(self, handle: Handle) -> Raw:
        info = self._binding.c_nvmlGpuFabricInfo_t()
        self._binding.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
        return info


def _missing_of(error: Raw) -> Missing:
    reason = reason_of(error.value)
    told = reason in (Reason.NOT_SUPPORTED, Reason.MISSING_SYMBOL)
    return Missing(reason, "" if told else f"NVML {error.value}: {error}")


def same_device(one: Handle, other: Handle) -> bool:
    """Tell whether two handles are the same device."""
    return bool(ctypes.addressof(one.contents) == ctypes.addressof(other.contents))
