"""How many feasible nodes kube-scheduler looks for before it stops (pure)."""

_LEAST_NODES = 100
_LEAST_PERCENT = 5


def nodes_to_find(nodes: int, percentage: int = 0) -> int:
    """Return how many feasible nodes are enough; ``percentage`` 0 means by the cluster's size."""
    if nodes < _LEAST_NODES:
        return nodes
    if percentage == 0:
        percentage = max(_LEAST_PERCENT, 50 - nodes // 125)
    return max(_LEAST_NODES, nodes * percentage // 100)
