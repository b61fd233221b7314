"""The capture of a real vLLM 0.32 that the double must equal, and its configuration."""

import base64
from pathlib import Path
from typing import Any

import msgspec

from tests.doubles.engine.config import EngineDoubleConfig

CAPTURED = Path(__file__).resolve().parents[2] / "data" / "vllm"

CAPTURED_CONFIG = EngineDoubleConfig(
    model="tiny", block_size=32, num_blocks=24, max_model_len=512, topic="kv@e1@tiny"
)


class Exchange(msgspec.Struct):
    """One captured request and its answer."""

    name: str
    method: str
    path: str
    request: dict[str, Any] | None
    request_headers: dict[str, str]
    status: int
    response_headers: dict[str, str]
    response: str


class EventFrame(msgspec.Struct):
    """One captured event message; ``decoded`` is its payload."""

    topic: str
    seq: int
    payload_base64: str
    decoded: list[Any]

    @property
    def payload(self) -> bytes:
        """The msgpack bytes."""
        return base64.b64decode(self.payload_base64)


def captured_exchanges() -> list[Exchange]:
    """Return the captured HTTP exchanges in order."""
    return msgspec.json.decode(_lines("http.jsonl"), type=list[Exchange])


def captured_events() -> list[EventFrame]:
    """Return the captured event messages in order."""
    return msgspec.json.decode(_lines("kv_events.jsonl"), type=list[EventFrame])


def captured_replay() -> tuple[int, list[list[bytes]]]:
    """Return the sequence a replay was asked from, and the frames of each reply."""
    replay = msgspec.json.decode((CAPTURED / "kv_replay.json").read_bytes())
    asked = base64.b64decode(replay["request_frames_base64"][1])
    replies = [[base64.b64decode(part) for part in parts] for parts in replay["replies_base64"]]
    return int.from_bytes(asked, "big"), replies


def captured_metrics() -> str:
    """Return the captured metrics page."""
    return (CAPTURED / "metrics.txt").read_text()


def _lines(name: str) -> bytes:
    lines = (CAPTURED / name).read_bytes().splitlines()
    return b"[" + b",".join(line for line in lines if line.strip()) + b"]"
