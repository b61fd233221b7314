"""Agents that move KV, each a node of its own, on loopback and under a short folder."""

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearkv.agent.app import NODE_STATE, TRANSFER
from nearkv.agent.app import build_app as build_agent
from nearkv.agent.node_state import NodeState
from nearkv.agent.settings import AgentSettings
from nearkv.agent.transfer.service import TransferService
from nearkv.serving import running
from tests.integration.stack import ANY_PORT, FAST_AGENT


@dataclass(slots=True)
class KvNode:
    """An agent that serves, with its transfer service."""

    name: str
    url: str
    socket: Path
    state: NodeState
    service: TransferService

    @property
    def leases(self) -> dict[str, int]:
        """How many leases its engines have, by state."""
        return dict(self.service.gauges().leases)


@asynccontextmanager
async def kv_node(
    name: str = "n1",
    *,
    folder: Path | None = None,
    engines: list[dict[str, Any]] | None = None,
    cluster_secret: str | None = None,
    **transfer: Any,
) -> AsyncIterator[KvNode]:
    """Run an agent with KV transfer; engines are not watched unless configured."""
    made = None if folder else Path(tempfile.mkdtemp(prefix="nkv-", dir="/tmp"))
    directory = folder or made
    app = build_agent(
        AgentSettings.model_validate(
            {
                **FAST_AGENT,
                "node": name,
                "engines": engines or [],
                "cluster_secret": cluster_secret,
                "transfer": {
                    "socket_dir": str(directory),
                    "peer_listen": "127.0.0.1:0",
                    "paths": [],
                    **transfer,
                },
            }
        )
    )
    try:
        async with running(app, ANY_PORT) as address:
            service = app[TRANSFER]
            yield KvNode(name, address.url, directory / "agent.sock", app[NODE_STATE], service)
    finally:
        if made is not None:
            shutil.rmtree(made)


def open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
