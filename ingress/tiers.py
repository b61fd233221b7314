"""The tiers that engines keep blocks in, by how near they are (pure)."""

from collections.abc import Iterable, Mapping

from nearkv.state.model import TIER_DEVICE

DEVICE, _HOST, _DISK = range(3)


def rank_of(tier: str) -> int:
    """Return how near a tier is; engines name them differently (docs/engines.md)."""
    if tier == TIER_DEVICE:
        return DEVICE
    return _HOST if tier.startswith("CPU") else _DISK


def faster_depths(ladder: Iterable[tuple[int, int]], found: Mapping[int, int]) -> tuple[int, int]:
    """Return the leading blocks on the device, and on device or host."""
    on_device = on_host = 0
    for rank, slot in ladder:
        depth = found.get(slot, 0)
        if rank == DEVICE:
            on_device = depth
        if rank <= _HOST:
            on_host = depth
    return on_device, on_host
