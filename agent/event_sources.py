"""Where an engine publishes its KV events, and the addresses that are made of it (pure)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one engine rank publishes, and where it answers replays."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


def reachable_endpoint(endpoint: str, host: str) -> str:
    """Turn an address that an engine binds into one that can be connected to.

    ``tcp://*:5557`` with host ``10.0.0.7`` becomes ``tcp://10.0.0.7:5557``.
    """
    shown = f"[{host}]" if ":" in host else host
    for wildcard in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://:::"):
        if endpoint.startswith(wildcard):
            return f"tcp://{shown}:{endpoint.removeprefix(wildcard)}"
    return endpoint


def endpoint_of_rank(endpoint: str, dp_rank: int) -> str:
    """Return the endpoint of a rank: vLLM adds the rank to the port of rank 0."""
    head, _, port = endpoint.rpartition(":")
    if dp_rank == 0 or not port.isdecimal():
        return endpoint
    return f"{head}:{int(port) + dp_rank}"
