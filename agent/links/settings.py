"""Settings of the links group; see docs/configuration.md for the generated table."""

import re
from pathlib import Path

from pydantic import Field, field_validator

from nearkv.agent.links.model import pci_address
from nearkv.settings import SettingsGroup

_PAIR = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]=\S+")


class LinkSettings(SettingsGroup):
    """RDMA devices and network adapters of this node."""

    enabled: bool = Field(
        True,  # noqa: FBT003 (a default)
        description="Read links; without it, whether there is RDMA is unknown.",
    )
    root: Path = Field(
        Path("/"), description="Folder that holds the host's sys, such as /host in a container."
    )
    device_dir: Path | None = Field(
        Path("/dev/infiniband"),
        description="Folder of verbs devices that the agent must be able to open; null where "
        "engines move KV by RDMA themselves.",
    )
    interval_seconds: float = Field(15.0, gt=0, description="Pause between readings.")
    timeout_seconds: float = Field(
        5.0, gt=0, description="Longest wait for a reading; a driver may hang."
    )
    rdma_devices: tuple[str, ...] = Field(
        (), description="RDMA devices that KV may use, such as mlx5_0; empty means any."
    )
    affinity: tuple[str, ...] = Field(
        (),
        description="Adapters of GPUs where nearness is wrong, by PCI address: "
        "0000:17:00.0=mlx5_1.",
    )
    error_window_seconds: float = Field(
        300.0, gt=0, description="How long a link counts as degraded after a fault."
    )
    max_devices: int = Field(
        64, gt=0, le=1024, description="Devices of each sort that are read; physical ones first."
    )

    @field_validator("affinity")
    @classmethod
    def _pairs(cls, pairs: tuple[str, ...]) -> tuple[str, ...]:
        for pair in pairs:
            if not _PAIR.fullmatch(pair):
                raise ValueError(f"not GPU=adapter: {pair!r}; write 0000:17:00.0=mlx5_1")
        addresses = [pci_address(pair.partition("=")[0]) for pair in pairs]
        if len(set(addresses)) != len(addresses):
            raise ValueError("names a GPU twice")
        return pairs

    @property
    def adapter_of_gpu(self) -> dict[str, str]:
        """``affinity`` by GPU, addresses as sysfs writes them."""
        split = (pair.partition("=") for pair in self.affinity)
        return {pci_address(gpu): adapter for gpu, _, adapter in split}
