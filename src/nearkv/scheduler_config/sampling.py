"""How many nodes kube-scheduler looks at for one pod (pure).

From ``numFeasibleNodesToFind`` of kube-scheduler: below 100 nodes all of them; else the share that
is configured, or 50 % less 1 % for each 125 nodes, 5 % at least; and never fewer than 100.
"""

_LEAST_NODES = 100
_LEAST_PERCENT = 5


def sampled_nodes(nodes: int, percentage: int | None) -> int:
    """Return how many feasible nodes are enough; no percentage, or 0, means by size."""
    if nodes < _LEAST_NODES:
        return nodes
    share = percentage or max(_LEAST_PERCENT, 50 - nodes // 125)
    return max(_LEAST_NODES, nodes * share // 100)
