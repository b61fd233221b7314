"""Settings of warm-up."""

from pathlib import Path

from pydantic import Field

from nearkv.settings import SettingsGroup


class WarmingSettings(SettingsGroup):
    """Loading prefixes of hot documents into engines."""

    folder: Path | None = Field(
        None,
        description="Folder of prompts to load whenever an engine starts, such as a mounted "
        "ConfigMap: <id>.txt is a prompt, <id>.json a body of POST /v1/prefixes/<id>/warm.",
    )
    concurrency: int = Field(2, gt=0, le=64, description="Engines that load at once.")
    pause_seconds: float = Field(
        1.0, ge=0, description="Shortest time between two loads of one engine."
    )
    deadline_seconds: float = Field(120.0, gt=0, description="Longest time of one load.")
    priority: int = Field(
        100,
        description="Priority of loads, for engines that schedule by it: the larger, the later.",
    )
    max_prefixes: int = Field(256, gt=0, le=10_000, description="Prefixes kept; 429 beyond.")
    max_body_bytes: int = Field(4 << 20, gt=0, description="Largest request body; 413 beyond.")
    max_bytes: int = Field(
        64 << 20, gt=0, description="Memory bound of the prefixes' texts and tokens; 429 beyond."
    )
