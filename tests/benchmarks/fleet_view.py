"""One extender's view over many agents: ``python -m ... URL COUNT``.

Prints how long it took until every agent was heard, then keeps following.
"""

import asyncio
import sys
import time

from nearkv.extender.ledger import Ledger
from nearkv.extender.presets import Level, LinkCost
from nearkv.extender.view.collecting import AgentTarget, SummaryCollector
from nearkv.extender.view.nodes import NodeFacts
from nearkv.extender.view.polling import CollectLimits
from nearkv.extender.view.state import ClusterState
from nearkv.serving import run

_LEVELS = (
    Level("rack", ("rack",), LinkCost(0.001, 10e9)),
    Level("zone", ("zone",), LinkCost(0.005, 1e9)),
)
_PUBLISH_SECONDS = 0.1


async def _follow(url: str, count: int) -> None:
    state = ClusterState(_LEVELS, Ledger(ttl_seconds=120.0, max_pods=1000))
    state.nodes_listed(
        NodeFacts(f"node-{i}", (f"rack-{i // 16}", f"zone-{i % 3}"), 8, -1) for i in range(count)
    )
    collector = SummaryCollector(state, limits=CollectLimits())
    began = time.perf_counter()
    collector.set_targets(AgentTarget(f"{url}/n/{i}", f"node-{i}") for i in range(count))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(collector.run())
        told = False
        while True:
            state.sweep(time.monotonic())
            if state.has_changes:
                state.publish(time.monotonic())
            if not told and len(state.summaries) == count:
                told = True
                sys.stdout.write(f"{time.perf_counter() - began}\n")
                sys.stdout.flush()
            await asyncio.sleep(_PUBLISH_SECONDS)


if __name__ == "__main__":
    run(_follow(sys.argv[1], int(sys.argv[2])))
