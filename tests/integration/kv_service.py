"""A transfer service with scripted movers, behind its real sockets."""

import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from nearkv.agent.node_state import NodeState
from nearkv.agent.settings import TransferSettings
from nearkv.agent.state_log import StateLog
from nearkv.agent.transfer.abilities import TransferAbilities
from nearkv.agent.transfer.assembling import Surroundings
from nearkv.agent.transfer.metrics import TransferMetrics
from nearkv.agent.transfer.path_costs import PathCosts, path_priors
from nearkv.agent.transfer.service import TransferService
from nearkv.transfer.backends.contract import Probe
from tests.doubles.movers import FakeMovers

TCP = Probe(name="tcp", usable=True)
UCX = Probe(name="ucx", usable=True, rdma=True)


@dataclass(slots=True)
class ScriptedService:
    """A service that runs, its movers and its numbers."""

    socket: Path
    service: TransferService
    movers: FakeMovers
    state: NodeState
    registry: CollectorRegistry

    def count(self, name: str, **labels: str) -> float:
        """Return a counter's value."""
        value = self.registry.get_sample_value(f"nearkv_agent_transfer_{name}_total", labels)
        return value or 0.0

    @property
    def pair(self) -> dict[str, Any]:
        """The one pair of nodes that pulls were made between."""
        (pair,) = [p for p in self.service.describe()["pairs"] if p["pulls"] or p["failures"]]
        return pair


@asynccontextmanager
async def scripted_service(
    node: str = "n1",
    *,
    probes: tuple[Probe, ...] = (TCP,),
    modes: dict[str, str] | None = None,
    secret: bytes | None = None,
    **transfer: Any,
) -> AsyncIterator[ScriptedService]:
    """Run a service of a node."""
    directory = Path(tempfile.mkdtemp(prefix="nkv-", dir="/tmp"))
    settings = TransferSettings.model_validate({"peer_listen": "127.0.0.1:0", **transfer})
    abilities = TransferAbilities(modes or {})
    log = StateLog(boot="b", node=node, version="1", transfer_of=abilities.of)
    state = NodeState(log, boot="b", flush_seconds=0.0, now=time.monotonic)
    registry = CollectorRegistry()
    movers = FakeMovers(*probes)
    service = TransferService(
        directory,
        settings,
        Surroundings(
            node=node,
            state=state,
            abilities=abilities,
            metrics=TransferMetrics(registry),
            costs=PathCosts(node, path_priors(settings.priors)),
            packet_key=secret,
        ),
        make_pool=lambda _options: movers,
    )
    state.transfer = service
    try:
        async with service.running():
            yield ScriptedService(directory / "agent.sock", service, movers, state, registry)
    finally:
        shutil.rmtree(directory)
