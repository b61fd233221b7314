"""What engines of today do, for replays (pure): a model on a node's share of GPUs.

Prefill rates follow from the data sheets as in :mod:`nearkv.break_even` (half of the dense peak),
decode steps from reading all weights once; KV sizes are the models' own at 16 bits. Measured
figures of your engines are better: ``nearkv report`` names them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model on certain GPUs; ``kv_tokens`` is what its KV cache takes."""

    prefill_tokens_per_second: float
    step_seconds: float
    step_seconds_per_kv_token: float
    kv_bytes_per_token: int
    kv_tokens: int


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "8b-h100": Preset(
            prefill_tokens_per_second=30_000,
            step_seconds=0.006,
            step_seconds_per_kv_token=4.5e-8,
            kv_bytes_per_token=131_072,
            kv_tokens=400_000,
        ),
        "70b-4xh100": Preset(
            prefill_tokens_per_second=14_000,
            step_seconds=0.014,
            step_seconds_per_kv_token=2.8e-8,
            kv_bytes_per_token=327_680,
            kv_tokens=450_000,
        ),
        "70b-8xa100": Preset(
            prefill_tokens_per_second=8_900,
            step_seconds=0.012,
            step_seconds_per_kv_token=2.3e-8,
            kv_bytes_per_token=327_680,
            kv_tokens=1_400_000,
        ),
    }
)
