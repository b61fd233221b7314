"""Settings of decision records; part of the ingress's settings."""

from pathlib import Path

from pydantic import Field

from nearkv.settings import SettingsGroup


class DecisionSettings(SettingsGroup):
    """What is kept of requests, in memory and in a file; see docs/routing.md."""

    max_bytes: int = Field(
        8 << 20, ge=0, description="Memory bound of records kept for /v1/decisions; 0: none."
    )
    per_second: int = Field(
        200,
        ge=0,
        description="Ordinary requests kept in memory in a second, 0: all. Those that were "
        "refused, broken or tried more than once are always kept; the file gets all.",
    )
    file: Path | None = Field(
        None, description="File that records are appended to, one JSON object a line."
    )
    file_bytes: int = Field(
        64 << 20,
        ge=1 << 16,
        description="Size at which a new file is begun; the old one is FILE.1.",
    )
    files_kept: int = Field(4, ge=1, le=100, description="Old files kept.")
    max_waiting: int = Field(
        4096,
        ge=1,
        description="Records that may wait to be written; more are dropped, and counted.",
    )
    keys: bool = Field(
        False,  # noqa: FBT003 (pydantic's way to give a default)
        description="Write each prompt's block keys, unrecognisable, as hash_ids: nearkv replay "
        "needs them.",
    )
