"""Other nodes' agents, and how near their nodes are by labels (pure).

All pairs of many nodes would be too much. Of each class of distance a node probes a few peers
only: those that follow it on a ring made of the names, so that a node is probed by as many as it
probes.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nearkv.path_class import UNKNOWN, class_between, place_of

MAX_PEERS = 4096
_MAX_LABEL_LENGTH = 253


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node's agent: the base URL that it serves peers at, and its node's labels."""

    node: str
    url: str
    labels: Mapping[str, str] = field(default_factory=dict)


PeerProvider = Callable[[], Iterable[Peer]]
"""Says which agents there are: configured, of earlier transfers, from Kubernetes."""


class PeerBook:
    """All peers that providers know of; the provider named first is believed first."""

    def __init__(
        self,
        node: str,
        providers: Sequence[PeerProvider],
        *,
        levels: Sequence[str],
        labels: Mapping[str, str],
        peers_per_class: int,
        node_labels: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Make a book; ``labels`` of this node are configured and win over ``node_labels``."""
        self._node = node
        self._providers = providers
        self.levels = tuple(levels)
        self._labels = dict(labels)
        self._node_labels = node_labels
        self._peers_per_class = peers_per_class
        self._told: dict[str, Mapping[str, str]] = {}
        self._peers: dict[str, Peer] = {}
        self._classes: dict[str, str] = {}

    def __len__(self) -> int:
        """Return how many peers are known."""
        return len(self._peers)

    @property
    def labels(self) -> dict[str, str]:
        """What this node is at each level."""
        return place_of({**self._node_labels(), **self._labels}, self.levels)

    def refresh(self) -> None:
        """Ask the providers anew."""
        found: dict[str, Peer] = {}
        for provide in self._providers:
            for peer in provide():
                if peer.node != self._node and (peer.node in found or len(found) < MAX_PEERS):
                    known = found.get(peer.node)
                    if known is None or (peer.labels and not known.labels):
                        found[peer.node] = peer
        self._peers = found
        self._told = {node: labels for node, labels in self._told.items() if node in found}
        own = self.labels
        self._classes = {node: self._class_of(peer, own) for node, peer in found.items()}

    def told(self, node: str, labels: Mapping[str, str]) -> bool:
        """Take what a peer says of its own labels; tells whether that changes its class."""
        peer, before = self._peers.get(node), self._classes.get(node)
        if peer is None:
            return False
        self._told[node] = {
            level: labels[level][:_MAX_LABEL_LENGTH] for level in self.levels if labels.get(level)
        }
        self._classes[node] = self._class_of(peer, self.labels)
        return self._classes[node] != before

    def class_of(self, node: str) -> str:
        """Return the class of a node, from here."""
        return self._classes.get(node, UNKNOWN)

    def chosen(self) -> dict[str, list[Peer]]:
        """Return the peers to probe, by class."""
        by_class: dict[str, list[Peer]] = {}
        for node, peer in self._peers.items():
            by_class.setdefault(self._classes[node], []).append(peer)
        return {
            name: by_place(self._node, peers)[: self._peers_per_class]
            for name, peers in by_class.items()
        }

    def _class_of(self, peer: Peer, own: Mapping[str, str]) -> str:
        # What a provider says is of the configuration, or of Kubernetes.
        labels = {**self._told.get(peer.node, {}), **place_of(peer.labels, self.levels)}
        return class_between(own, labels, self.levels)


def by_place(node: str, peers: Iterable[Peer]) -> list[Peer]:
    """Return peers in the order in which they follow a node on the ring."""
    own = _place(node)
    return sorted(peers, key=lambda peer: _beyond(own, peer))


def _place(node: str) -> bytes:
    """Return where a node is on the ring."""
    return hashlib.blake2b(node.encode(), digest_size=8).digest()


def _beyond(own: bytes, peer: Peer) -> tuple[bool, bytes]:
    """Return a key that sorts peers by how far they follow a place on the ring."""
    place = _place(peer.node)
    return place < own, place
