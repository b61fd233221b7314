"""The connector's settings, from ``kv_connector_extra_config`` and the environment (pure)."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

DEFAULT_SOCKET = "/run/nearkv/agent.sock"
_ENGINE_VARIABLE = "NEARKV_ENGINE"
_SOCKET_VARIABLE = "NEARKV_AGENT_SOCKET"


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the connector behaves.

    ``engine`` is the id that the agent knows the engine by (on Kubernetes the pod's UID);
    default: the variable NEARKV_ENGINE, else the host name. ``socket`` is the agent's;
    default: the variable NEARKV_AGENT_SOCKET. ``model_id`` replaces what is found out about
    the weights, for engines that load the same weights from different places. ``tenant``
    keeps engines of different tenants from using each other's KV.
    """

    engine: str = ""
    socket: str = ""
    model_id: str = ""
    tenant: str = ""
    lease_seconds: float = 30.0
    lookup_seconds: float = 2.0
    pull_seconds: float = 10.0
    lease_slots: int = 4096

    @property
    def socket_path(self) -> Path:
        """Where the agent listens."""
        return Path(self.socket)


def read_settings(
    extra: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> ConnectorSettings:
    """Read the settings; raises ``ValueError`` naming the field that is wrong.

    What cannot work ends the engine's start, rather than turning transfers off in silence.
    """
    environment = os.environ if environment is None else environment
    try:
        settings = msgspec.convert(dict(extra), ConnectorSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_connector_extra_config: {error}") from error
    for name in ("lease_seconds", "lookup_seconds", "pull_seconds", "lease_slots"):
        if getattr(settings, name) <= 0:
            raise ValueError(f"kv_connector_extra_config: {name} must be positive")
    return msgspec.structs.replace(
        settings,
        engine=settings.engine or environment.get(_ENGINE_VARIABLE) or socket.gethostname(),
        socket=settings.socket or environment.get(_SOCKET_VARIABLE) or DEFAULT_SOCKET,
    )
