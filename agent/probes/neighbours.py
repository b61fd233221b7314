"""What the cluster says of a node and its like: its labels, and a few other agents (pure).

Whoever follows the cluster writes it, the probes read it. All agents of a large cluster would be
thousands, of which a node probes eight of each class.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nearkv.agent.probes.peers import Peer, by_place

ZONE_LABEL = "topology.kubernetes.io/zone"


@dataclass(slots=True)
class Neighbours:
    """The last that is known; nothing before anything is."""

    labels: Mapping[str, str] = field(default_factory=dict)
    peers: Sequence[Peer] = ()

    def take_labels(self, labels: Mapping[str, str]) -> None:
        """Take the own node's labels."""
        self.labels = dict(labels)

    def read_labels(self) -> Mapping[str, str]:
        """Return the own node's labels."""
        return self.labels

    def read_peers(self) -> Sequence[Peer]:
        """Return other nodes' agents."""
        return self.peers


def near_on_the_ring(peers: Iterable[Peer], *, node: str, zone: str, most: int) -> list[Peer]:
    """Return those that may be probed: the next on the ring in the own zone, and elsewhere."""
    others = [peer for peer in by_place(node, peers) if peer.node != node]
    near = [peer for peer in others if zone and peer.labels.get(ZONE_LABEL) == zone]
    far = [peer for peer in others if not zone or peer.labels.get(ZONE_LABEL) != zone]
    return near[:most] + far[:most]
