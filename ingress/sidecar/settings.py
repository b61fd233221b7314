"""Settings of the decode-side sidecar; part of the ingress's settings."""

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, Field

from nearkv.ingress.extproc.settings import PoolSettings
from nearkv.settings import Address, HttpUrl, SettingsGroup, parse_address


def _check_prefiller(text: str) -> str:
    if "/" in text:
        ipaddress.ip_network(text)
    elif parse_address(text).port == 0:
        raise ValueError(f"port 0 in {text!r} names nobody")
    return text


class SidecarSettings(SettingsGroup):
    """The sidecar beside a decode engine; used with mode sidecar."""

    listen: Address = Field(
        Address("127.0.0.1", 8000), description="Address to serve on: the pod's serving port."
    )
    engine: HttpUrl = Field(
        "http://127.0.0.1:8200", description="Base URL of the engine beside the sidecar."
    )
    prefillers: tuple[Annotated[str, AfterValidator(_check_prefiller)], ...] = Field(
        (),
        description="Who may be asked to prefill: host:port, or networks such as 10.0.0.0/8. "
        "Members of the pool may, too; others are not asked.",
    )
    pool: PoolSettings = Field(
        PoolSettings(), description="The InferencePool whose members may be asked to prefill."
    )
    prefill_seconds: float = Field(60.0, gt=0, description="Deadline of the prefill request.")
