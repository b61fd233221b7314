"""Ready-made lists of distance levels: which node labels say how near two nodes are.

There is no standard for network topology on Kubernetes, so distance is an ordered list of
labels, nearest first. Each preset ends in zone and region. The costs are priors, in round
figures that such links reach in practice; what the agents measure takes their place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

_NIL_UUID = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What moving bytes over a link takes: seconds of set-up, then bytes per second.

    Raises ``ValueError`` for a set-up that is negative or a bandwidth that is not positive.
    """

    setup_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not 0 <= self.setup_seconds < float("inf"):
            raise ValueError(f"setup_seconds must be 0 or more, not {self.setup_seconds}")
        if not 0 < self.bytes_per_second < float("inf"):
            raise ValueError(f"bytes_per_second must be above 0, not {self.bytes_per_second}")

    def milliseconds(self, size_bytes: float) -> float:
        """Return the time to move so many bytes."""
        return 1e3 * (self.setup_seconds + size_bytes / self.bytes_per_second)


class Transform(StrEnum):
    """What is taken of a label's value."""

    WHOLE = "whole"
    BEFORE_LAST_DOT = "before_last_dot"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of distance: nodes with equal values are within it.

    The first of ``labels`` that a node has (and that is not empty) gives its value; several
    stand for the names that releases and clouds have used for one thing. ``needs_rdma`` is
    false for links that are no network, such as NVLink between hosts.
    """

    name: str
    labels: tuple[str, ...]
    cost: LinkCost
    transform: Transform = Transform.WHOLE
    needs_rdma: bool = True

    def value_of(self, labels: Mapping[str, str]) -> str:
        """Return the value that a node with these labels has here, empty where it has none.

        A value that begins with the nil UUID is none: hosts whose NVLink ends at the host may have
        that for a clique, all of them the same (meta-pytorch/torchcomms#1385).
        """
        for label in self.labels:
            value = labels.get(label)
            if value and not value.startswith(_NIL_UUID):
                if self.transform is Transform.BEFORE_LAST_DOT:
                    return value.rpartition(".")[0]
                return value
        return ""


SAME_NODE_COST = LinkCost(0.0003, 150e9)
BEYOND_COST = LinkCost(0.03, 0.6e9)
UNKNOWN_COST = LinkCost(0.005, 2.5e9)
WITHOUT_RDMA_COST = LinkCost(0.004, 2.5e9)
"""A 25 Gbit/s network by TCP; what is unknown counts as much."""

_NVLINK = LinkCost(0.0005, 100e9)
_LEAF = LinkCost(0.001, 45e9)
_BLOCK = LinkCost(0.0015, 35e9)
_SPINE = LinkCost(0.002, 25e9)
_CORE = LinkCost(0.0025, 18e9)
_ZONE = LinkCost(0.003, 11e9)
_REGION = LinkCost(0.005, 2.5e9)

_ZONES = (
    Level("zone", ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"), _ZONE),
    Level(
        "region",
        ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region"),
        _REGION,
    ),
)
_CLIQUE = Level("nvlink-partition", ("nvidia.com/gpu.clique",), _NVLINK, needs_rdma=False)
_CLIQUE_RACK = Level(
    "nvlink-rack", ("nvidia.com/gpu.clique",), _LEAF, transform=Transform.BEFORE_LAST_DOT
)
"""A clique is `<cluster UUID>.<clique id>`: one rack may be cut into several partitions."""

PRESETS: Mapping[str, tuple[Level, ...]] = MappingProxyType(
    {
        "generic": (
            Level("rack", ("nearkv.io/rack", "topology.kubernetes.io/rack"), _LEAF),
            *_ZONES,
        ),
        "nvlink": (_CLIQUE, _CLIQUE_RACK, *_ZONES),
        "topograph": (
            Level(
                "accelerator",
                ("accelerator.topograph.run/sub-domain", "network.topology.nvidia.com/accelerator"),
                _NVLINK,
                needs_rdma=False,
            ),
            Level(
                "leaf",
                ("fabric.topograph.run/tier-0", "network.topology.nvidia.com/block"),
                _LEAF,
            ),
            Level(
                "spine",
                ("fabric.topograph.run/tier-1", "network.topology.nvidia.com/spine"),
                _SPINE,
            ),
            Level(
                "core",
                ("fabric.topograph.run/tier-2", "network.topology.nvidia.com/datacenter"),
                _CORE,
            ),
            *_ZONES,
        ),
        # Amazon numbers its network layers toward the node: 3 is the leaf.
        "aws": (
            Level("ultraserver", ("topology.k8s.aws/ultraserver-id",), _NVLINK, needs_rdma=False),
            Level("network-layer-3", ("topology.k8s.aws/network-node-layer-3",), _LEAF),
            Level("network-layer-2", ("topology.k8s.aws/network-node-layer-2",), _BLOCK),
            Level("network-layer-1", ("topology.k8s.aws/network-node-layer-1",), _SPINE),
            *_ZONES,
        ),
        "gcp": (
            Level("subblock", ("cloud.google.com/gce-topology-subblock",), _LEAF),
            Level("block", ("cloud.google.com/gce-topology-block",), _BLOCK),
            *_ZONES,
        ),
        "oci": (
            Level(
                "rack",
                ("oci.oraclecloud.com/host.rack_id", "oci.oraclecloud.com/rdma.local_block_id"),
                _LEAF,
            ),
            Level(
                "network-block",
                (
                    "oci.oraclecloud.com/host.network_block_id",
                    "oci.oraclecloud.com/rdma.network_block_id",
                ),
                _BLOCK,
            ),
            Level("island", ("oci.oraclecloud.com/rdma.hpc_island_id",), _SPINE),
            *_ZONES,
        ),
        "coreweave": (
            Level("nvlink-domain", ("ds.coreweave.com/nvlink.domain",), _NVLINK, needs_rdma=False),
            Level("rack", ("node.coreweave.cloud/rack",), _LEAF),
            Level(
                "leafgroup",
                ("backend.coreweave.cloud/leafgroup", "ib.coreweave.cloud/leafgroup"),
                _BLOCK,
            ),
            Level(
                "fabric",
                ("backend.coreweave.cloud/fabric", "backend.coreweave.cloud/superpod"),
                _SPINE,
            ),
            *_ZONES,
        ),
    }
)
