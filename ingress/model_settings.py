"""Settings about models: other names, what clients may choose, responses that engines keep."""

from pydantic import Field, field_validator

from nearkv.settings import SettingsGroup


class ModelSettings(SettingsGroup):
    """What clients may call models, and what they may choose."""

    aliases: dict[str, str] = Field(
        {},
        description="Other names of models and adapters: requests under an alias are forwarded "
        "under the name it stands for.",
    )
    client_ranks: bool = Field(
        False,  # noqa: FBT003 - pydantic's default value
        description="Whether a client's X-data-parallel-rank header chooses the rank; otherwise "
        "it is removed.",
    )
    client_transfer_params: bool = Field(
        False,  # noqa: FBT003 - pydantic's default value
        description="Whether clients may send kv_transfer_params and the like, which say where KV "
        "lies and whose it is; otherwise a request with them is refused.",
    )
    response_ids: int = Field(
        100_000, ge=0, description="Responses remembered with the engine that made them."
    )
    response_seconds: float = Field(86_400.0, gt=0, description="How long they are remembered.")

    @field_validator("aliases")
    @classmethod
    def _stand_for_names(cls, aliases: dict[str, str]) -> dict[str, str]:
        for alias, name in aliases.items():
            if not alias or not name:
                raise ValueError("an alias and what it stands for cannot be empty")
            if name in aliases:
                raise ValueError(f"alias {alias!r} stands for {name!r}, which is an alias itself")
        return aliases
