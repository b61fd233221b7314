"""Settings of the worker_status group; see docs/configuration.md for the generated table."""

from pydantic import Field

from nearkv.agent.kubernetes.settings import Switch
from nearkv.settings import SettingsGroup


class WorkerStatusSettings(SettingsGroup):
    """Writing a WorkerStatus for each engine that is a pod."""

    enabled: Switch = Field(
        "auto",
        description="Write WorkerStatus objects; auto: where engines are found as pods. Needs the "
        "CRD and the right to create and patch them.",
    )
    heartbeat_seconds: float = Field(
        400.0,
        ge=10,
        le=3600,
        description="Pause between writes of a node without news, to the nearest of its moments; "
        "with several engines they take turns.",
    )
    spread_seconds: float = Field(
        200.0,
        ge=0,
        description="Period in which each node has a moment to write at, so that what changes on "
        "all nodes at once is not written at once. Nodes / 25 is enough, 5 does for 125.",
    )
    seconds_per_write: float = Field(
        200.0, ge=0, description="Longest run of writes is one in so long, after the first three."
    )
    max_prefixes: int = Field(
        16, ge=0, le=64, description="Named prefixes listed for an engine, the most used first."
    )
