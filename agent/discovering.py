"""Where engines come from. One source so far: the configuration (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nearkv.agent.engine_kinds import EngineKind
from nearkv.agent.event_sources import EventSource, endpoint_of_rank
from nearkv.agent.settings import ConfiguredEngine


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to watch, whatever source named it."""

    id: str
    url: str
    role: str = "both"
    group: str | None = None
    key_model: str | None = None
    events: EventSource | None = None
    dp_size: int = 1
    kv_bytes_per_token: int | None = None
    api_key: str | None = field(default=None, repr=False)
    kind: EngineKind = EngineKind.AUTO

    def rank_id(self, dp_rank: int, ranks: int) -> str:
        """Return the EngineId of one rank: the engine's own where there is only one."""
        return self.id if ranks == 1 else f"{self.id}/dp{dp_rank}"

    def event_sources(self) -> dict[int, EventSource]:
        """Return the configured event endpoints by rank; empty where none is configured."""
        if self.events is None:
            return {}
        replay = self.events.replay_endpoint
        return {
            rank: EventSource(
                endpoint=endpoint_of_rank(self.events.endpoint, rank),
                replay_endpoint=replay and endpoint_of_rank(replay, rank),
                topic=self.events.topic,
            )
            for rank in range(self.dp_size)
        }


def configured_engines(engines: Sequence[ConfiguredEngine]) -> list[EngineSpec]:
    """Return the engines of the configuration."""
    return [
        EngineSpec(
            id=engine.id,
            url=engine.url,
            role=engine.role,
            group=engine.group,
            key_model=engine.key_model,
            events=None
            if engine.kv_events is None
            else EventSource(engine.kv_events, engine.kv_replay, engine.topic),
            dp_size=engine.dp_size,
            kv_bytes_per_token=engine.kv_bytes_per_token,
            api_key=engine.api_key.get_secret_value() if engine.api_key else None,
            kind=engine.kind,
        )
        for engine in engines
    ]
