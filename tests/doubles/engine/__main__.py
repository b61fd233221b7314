"""Run one engine double as a process: ``python -m tests.doubles.engine --port 0``.

Prints one JSON line with its addresses once it listens, then serves until SIGTERM or SIGINT.
Every option is a field of ``EngineDoubleConfig``.
"""

import argparse
import asyncio
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.server import EngineDouble


def parse_config(arguments: Sequence[str]) -> EngineDoubleConfig:
    """Return the configuration given by ``--field-name value`` options."""
    parser = argparse.ArgumentParser(prog="python -m tests.doubles.engine")
    hints = get_type_hints(EngineDoubleConfig)
    for field in dataclasses.fields(EngineDoubleConfig):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=field.default,
            help=f"default: {field.default}",
            **_argument(field.default, hints[field.name]),
        )
    given = vars(parser.parse_args(arguments))
    given["loras"] = tuple(given["loras"])
    given["missing_metrics"] = frozenset(given["missing_metrics"])
    return EngineDoubleConfig(**given)


def _argument(default: object, hint: object) -> dict[str, Any]:
    if isinstance(default, bool):
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(default, tuple | frozenset):
        return {"nargs": "*"}
    if default is None:
        return {"type": int}
    if isinstance(default, str):
        choices = getattr(hint, "__args__", None)
        return {"choices": choices} if choices else {}
    return {"type": Path if isinstance(default, Path) else type(default)}


async def serve(config: EngineDoubleConfig) -> None:
    """Serve until a signal asks to stop."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with EngineDouble(config) as engine:
        addresses = {
            "url": engine.url,
            "kv_events": next(iter(engine.kv_events_endpoints), None),
            "kv_replay": next(iter(engine.kv_replay_endpoints), None),
            "kv_events_by_rank": engine.kv_events_endpoints,
            "kv_replay_by_rank": engine.kv_replay_endpoints,
        }
        sys.stdout.write(json.dumps(addresses) + "\n")
        sys.stdout.flush()
        await stopping.wait()


def main() -> None:
    """Entry point."""
    config = parse_config(sys.argv[1:])
    try:
        import uvloop  # noqa: PLC0415 - optional, absent on some platforms
    except ImportError:
        asyncio.run(serve(config))
    else:
        uvloop.run(serve(config))


if __name__ == "__main__":
    main()
