"""Base classes of all settings."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)


class SettingsGroup(BaseModel):
    """A group of settings inside a component's settings; frozen, unknown keys refused.

    Give every field a ``Field(description=...)``: it becomes the text of ``--help`` and
    of the documentation. Defaults belong to the group's own fields, so that setting one
    of them leaves the others alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ComponentSettings(BaseSettings):
    """All settings of one component; frozen, unknown keys refused.

    Constructing one directly takes its keyword arguments and nothing else: a test or an
    embedding program never picks up a stray environment variable. Flags, environment and
    file come in by ``load_settings`` only.
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - as above
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read keyword arguments only; ``load_settings`` has merged the rest already.

        The stock sources are switched off because they cannot say which source a value
        came from, pass over unknown environment variables, and stop at the first mistake.
        """
        return (init_settings,)


class ServiceSettings(ComponentSettings):
    """Settings that every long-running component has."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe events to log."
    )
