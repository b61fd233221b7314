"""The probes of a node: answering and asking, put together."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from nearkv.agent.probes.answering import ProbeDesk
from nearkv.agent.probes.asking import AskingRules, Prober
from nearkv.agent.probes.budget import half_of
from nearkv.agent.probes.by_class import class_costs
from nearkv.agent.probes.carriers import Carriers
from nearkv.agent.probes.peers import Peer, PeerBook, PeerProvider
from nearkv.agent.probes.planning import ProbePlan
from nearkv.agent.probes.settings import ProbeSettings
from nearkv.agent.settings import TransferSettings
from nearkv.agent.transfer.backend_choice import BackendProbes
from nearkv.agent.transfer.metrics import TransferMetrics
from nearkv.agent.transfer.path_costs import PathCosts
from nearkv.agent.transfer.peer_client import PeerClient
from nearkv.path_class import SAME_NODE
from nearkv.state.model import PathClass, PathClasses


def configured_peers(settings: ProbeSettings) -> PeerProvider:
    """Return the provider of the agents that the settings name."""
    peers = [Peer(peer.node, peer.url, peer.labels) for peer in settings.peers]
    return lambda: peers


def why_off(settings: TransferSettings) -> str:
    """Return why this node neither probes nor answers; empty where it does."""
    if not settings.probes.enabled:
        return "transfer.probes.enabled is off"
    tls = settings.peer_tls
    if settings.peer_token is None and (tls is None or tls.ca is None):
        return "peers do not show who they are: set transfer.peer_token, or peer_tls with a ca"
    if not settings.paths:
        return "transfer.paths names no transport"
    return ""


class Probing:
    """Probes of one node. ``desk`` is ``None`` where they are off.

    ``is_moving`` tells whether KV moves now; probes give way to it. ``providers`` say which
    peers there are, ``node_labels`` what is known of this node beside its settings.
    """

    def __init__(  # noqa: PLR0913 (those it talks to; the last three are keyword-only)
        self,
        settings: TransferSettings,
        carriers: Carriers,
        probes: BackendProbes,
        peers: PeerClient,
        costs: PathCosts,
        metrics: TransferMetrics,
        *,
        node: str,
        node_labels: Callable[[], Mapping[str, str]],
        providers: Sequence[PeerProvider],
        is_moving: Callable[[], bool],
    ) -> None:
        own = settings.probes
        self._node = node
        self._costs = costs
        self._why_off = why_off(settings)
        self._book = PeerBook(
            node,
            providers,
            levels=own.levels,
            labels=own.labels,
            node_labels=node_labels,
            peers_per_class=own.peers_per_class,
        )
        self.desk: ProbeDesk | None = None
        self._prober: Prober | None = None
        if self._why_off:
            return
        bounds = {"bytes_per_second": own.max_bytes_per_second, "cpu_ratio": own.max_cpu_ratio}
        desk = self.desk = ProbeDesk(
            carriers,
            probes,
            half_of(**bounds),
            backends=settings.paths,
            require_rdma=settings.require_rdma,
            labels=lambda: self._book.labels,
            busy=lambda: is_moving() or prober.is_asking,
        )
        prober = self._prober = Prober(
            self._book,
            ProbePlan(
                interval_seconds=own.interval_seconds,
                fresh_seconds=own.fresh_seconds,
                spread=lambda: random.uniform(0.5, 1.5),  # noqa: S311 - spreads load
            ),
            half_of(**bounds),
            carriers,
            probes,
            peers,
            costs=costs,
            metrics=metrics,
            rules=AskingRules(
                node=node,
                backends=settings.paths,
                require_rdma=settings.require_rdma,
                deadline_seconds=own.deadline_seconds,
            ),
            busy=lambda: is_moving() or desk.has_reader,
        )

    async def run(self) -> None:
        """Probe until cancelled, where probes are on."""
        if self._prober is not None:
            await self._prober.run()

    async def look(self) -> None:
        """Probe a peer now, if one is due."""
        if self._prober is not None:
            await self._prober.look()

    async def tick(self) -> None:
        """End what has reached its end, or is in the way."""
        if self.desk is not None:
            await self.desk.tick()

    def class_costs(self) -> list[PathClass]:
        """Return what paths to this node cost, by class."""
        return class_costs(self._costs.all_measured(), self._class_of, time.monotonic())

    def classes(self) -> PathClasses:
        """Return where this node is, and what paths to it cost by class."""
        return PathClasses(
            levels=self._book.levels, labels=self._book.labels, costs=tuple(self.class_costs())
        )

    def describe(self) -> dict[str, Any]:
        """Return the probes as plain JSON types."""
        return {
            "off": self._why_off or None,
            "peers": len(self._book),
            "classes": [msgspec.to_builtins(cost) for cost in self.class_costs()],
        }

    def _class_of(self, node: str) -> str:
        return SAME_NODE if node == self._node else self._book.class_of(node)
