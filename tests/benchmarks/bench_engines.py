"""Engine doubles in one process, for benchmarks; prints their URLs as a JSON line.

Given their number and, as a JSON object, the settings of smaller and slower ones.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack

from nearkv.serving import run
from tests.doubles.engine import EngineDouble, EngineDoubleConfig

_CONFIG = EngineDoubleConfig(
    num_blocks=40_000, max_model_len=400_000, response_tokens=1, requests_kept=1
)


async def _serve(count: int, config: EngineDoubleConfig) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(EngineDouble(config)) for _ in range(count)]
        sys.stdout.write(json.dumps([engine.url for engine in engines]) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    given = len(sys.argv) > 2
    config = EngineDoubleConfig(**json.loads(sys.argv[2])) if given else _CONFIG
    run(_serve(int(sys.argv[1]), config))
