"""Types of what NVML hands out: only ``nvidia-ml-py``, which has no types, knows them."""

from typing import Any

Raw = Any
"""An argument or a result of a call."""

Handle = Any
"""A device, or a MIG device."""
