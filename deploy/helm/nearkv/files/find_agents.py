# ruff: noqa: INP001 (a script that is mounted into a pod, in no package)
"""Write the ingress's settings with the agents behind a headless Service.

``find_agents.py SERVICE PORT SOURCE TARGET``: waits up to a minute for the Service to have an
address. Without one the ingress starts all the same, and serves the engines that it is told.
"""

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

_WAIT_SECONDS = 60.0
_PAUSE_SECONDS = 2.0


def agent_urls(service: str, port: int) -> list[str]:
    """Return the base URLs of all agents, none if the name has no address."""
    try:
        found = socket.getaddrinfo(service, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = {str(address[0]) for *_, address in found}
    return sorted(
        f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host in hosts
    )


def wait_for_agents(
    look: Callable[[], list[str]], *, wait_seconds: float, pause_seconds: float
) -> list[str]:
    """Look until there are agents, or the time is up."""
    give_up_at = time.monotonic() + wait_seconds
    while not (urls := look()) and time.monotonic() < give_up_at:
        time.sleep(pause_seconds)
    return urls


def main(service: str, port: int, source: Path, target: Path) -> None:
    """Find the agents and write the settings."""
    urls = wait_for_agents(
        lambda: agent_urls(service, port),
        wait_seconds=_WAIT_SECONDS,
        pause_seconds=_PAUSE_SECONDS,
    )
    settings = source.read_text(encoding="utf-8")
    # JSON is YAML, too.
    target.write_text(f"{settings.rstrip()}\nagents: {json.dumps(urls)}\n", encoding="utf-8")
    sys.stderr.write(f"{len(urls)} agents found\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
