"""The kinds of engines, and what SGLang says of itself where vLLM has other endpoints (pure).

Which kind an engine is shows in its endpoints: SGLang has neither ``/version`` nor
``/kv_event_sources``, and tells both at ``/server_info``. KV events and metrics show their kind
themselves, so that a wrong setting makes neither of them wrong (docs/engines.md).
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from nearkv.agent.event_sources import EventSource, reachable_endpoint

_MAX_PORT = 65535
_MAX_RANKS = 1024

Port = Annotated[int, msgspec.Meta(ge=1, le=_MAX_PORT)]


class EngineKind(StrEnum):
    """Which server an engine is; ``auto`` asks it."""

    AUTO = "auto"
    VLLM = "vllm"
    SGLANG = "sglang"


class SglangEvents(msgspec.Struct):
    """How an SGLang server publishes KV events: one port for each data-parallel rank."""

    publisher: str = "zmq"
    endpoint_host: str = "*"
    endpoint_port_base: Port | None = None
    replay_endpoint_port_base: Port | None = None
    topic: str = ""
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_RANKS)] = 1


class SglangInfo(msgspec.Struct):
    """What is read of SGLang's ``/server_info``; vLLM's, in its developer mode, has no version."""

    version: str
    kv_events: SglangEvents | None = None


def sglang_event_sources(info: SglangInfo, host: str) -> dict[int, EventSource]:
    """Return the event endpoints by rank, as reached at ``host``; empty where there are none."""
    events = info.kv_events
    if events is None or events.publisher != "zmq" or events.endpoint_port_base is None:
        return {}
    sources = {}
    for rank in range(events.dp_size):
        endpoint = _endpoint(events, events.endpoint_port_base, rank, host)
        if endpoint is None:
            break
        replay = _endpoint(events, events.replay_endpoint_port_base, rank, host)
        sources[rank] = EventSource(endpoint, replay, events.topic)
    return sources


def _endpoint(events: SglangEvents, base: int | None, rank: int, host: str) -> str | None:
    if base is None or base + rank > _MAX_PORT:
        return None
    return reachable_endpoint(f"tcp://{events.endpoint_host}:{base + rank}", host)
