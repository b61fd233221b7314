"""A program that pulls through a pool until it is killed: ``pool_host.py FD HOW``.

Prints the mover's process id, as JSON, once the pull was sent.
"""

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from nearkv.agent.movers.jobs import EngineMemory
from nearkv.agent.movers.pool import MoverPool
from tests.agent.movers.engines import (
    LAYOUT,
    SCRIBBLING,
    eventually,
    make_engine,
    scribble_job,
)


async def host(fd: int, how: str) -> None:
    engine = make_engine("p")
    engine.memory = EngineMemory("d", fd, LAYOUT)
    pool = MoverPool(command=SCRIBBLING)
    pull = asyncio.create_task(pool.pull(scribble_job(engine, engine, how)))
    await eventually(
        lambda: pool.describe() and pool.describe()[0].in_flight, what="the pull was sent"
    )
    sys.stdout.write(json.dumps({"mover": pool.describe()[0].pid}) + "\n")
    sys.stdout.flush()
    await pull


if __name__ == "__main__":
    # Its log must not come between what it prints for the test.
    import structlog

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(host(int(sys.argv[1]), sys.argv[2]))
