"""Settings of reading GPUs; see docs/configuration.md for the generated table."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from nearkv.agent.gpu.health import APPLICATION_XIDS
from nearkv.settings import SettingsGroup


class GpuSettings(SettingsGroup):
    """Reading the node's GPUs."""

    enabled: Literal["auto", "off"] = Field(
        "auto", description="Read GPUs by NVML where there is a driver, or never."
    )
    interval_seconds: float = Field(5.0, gt=0, description="Pause between readings.")
    library_dir: Path | None = Field(
        None,
        description="Folder of libnvidia-ml.so.1; default: where the dynamic loader finds it.",
    )
    ignored_xids: tuple[int, ...] = Field(
        APPLICATION_XIDS,
        description="Driver errors (Xid) that do not make a GPU unhealthy: a faulty program "
        "causes them.",
    )
    release_seconds: float = Field(
        300.0, gt=0, description="How long NVML stays closed after SIGUSR1."
    )
    pod_resources_socket: Path | None = Field(
        Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        description="Socket of the kubelet that tells which pods have which GPUs. Mount its "
        "folder, for reading only.",
    )
    pod_resources_interval_seconds: float = Field(
        10.0, gt=0, description="Pause between questions to the kubelet."
    )
    pod_resources_timeout_seconds: float = Field(
        2.0, gt=0, description="Deadline of one question to the kubelet."
    )
