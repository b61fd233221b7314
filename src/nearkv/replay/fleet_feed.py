"""What agents would tell of simulated engines: a snapshot, then deltas and heartbeats (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nearkv.block_keys import pack_keys
from nearkv.replay.engine_model import EngineProfile, SimulatedEngine
from nearkv.state.model import (
    BlockChange,
    Cursor,
    Delta,
    EngineGauges,
    EngineInfo,
    EngineState,
    EventsState,
    Frame,
    Heartbeat,
    PathReading,
    SnapshotBegin,
    SnapshotEnd,
    TransferInfo,
)

AGENT_URL = "http://replay"
MODEL = "replayed"
_NODE = "node"
_BOOT = "replay"


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """What moving KV between two engines takes."""

    setup_seconds: float = 0.005
    bytes_per_second: float = 10e9


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine of the fleet: its name, its role, what it can do."""

    name: str
    role: str
    profile: EngineProfile


class FleetFeed:
    """Makes the frames; with ``link``, the engines' KV can move."""

    def __init__(self, specs: Sequence[EngineSpec], link: LinkProfile | None) -> None:
        self._specs = specs
        self._link = link
        self._seq = 0
        self._told: dict[str, EngineGauges] = {}

    def snapshot(self) -> list[Frame]:
        """Return the frames that begin a stream: every engine, empty."""
        cursor = self._cursor()
        engines = tuple(self._info(spec) for spec in self._specs)
        names = [spec.name for spec in self._specs]
        link = self._link
        paths = () if link is None else _paths(names, link)
        begin = SnapshotBegin(
            cursor=cursor, node=_NODE, version="replay", engines=engines, gauges=(), paths=paths
        )
        return [begin, SnapshotEnd(cursor=cursor)]

    def blocks(self, engine: str, stored: Sequence[int], removed: Sequence[int]) -> Frame:
        """Return the delta for one engine's changed blocks."""
        self._seq += 1
        change = BlockChange(engine=engine, added=pack_keys(stored), removed=pack_keys(removed))
        return Delta(cursor=self._cursor(), blocks=(change,))

    def gauges(self, engines: Mapping[str, SimulatedEngine]) -> list[Frame]:
        """Return what a scrape of all engines has to say: the readings that changed, the ages."""
        changed = []
        for name, engine in engines.items():
            reading = read_gauges(name, engine)
            if self._told.get(name) != reading:
                self._told[name] = reading
                changed.append(reading)
        frames: list[Frame] = []
        if changed:
            self._seq += 1
            frames.append(Delta(cursor=self._cursor(), gauges=tuple(changed)))
        frames.append(Heartbeat(cursor=self._cursor(), ages_seconds=dict.fromkeys(engines, 0.0)))
        return frames

    def _cursor(self) -> Cursor:
        return Cursor(_BOOT, 1, self._seq)

    def _info(self, spec: EngineSpec) -> EngineInfo:
        profile = spec.profile
        transfer = None
        if self._link is not None:
            transfer = TransferInfo(
                mode="agent",
                compat=MODEL,
                kv_bytes_per_token=profile.kv_bytes_per_token,
                agent=AGENT_URL,
            )
        return EngineInfo(
            id=spec.name,
            incarnation="1",
            url=f"http://{spec.name}",
            node=f"node-of-{spec.name}",
            model=MODEL,
            models=(MODEL,),
            role=spec.role,
            state=EngineState.READY,
            events=EventsState.LIVE,
            block_size=profile.block_tokens,
            key_model=MODEL,
            transfer=transfer,
        )


def read_gauges(name: str, engine: SimulatedEngine) -> EngineGauges:
    """Return what an agent would read of an engine now."""
    profile = engine.profile
    total_tokens = profile.blocks * profile.block_tokens
    return EngineGauges(
        id=name,
        kv_used_ratio=engine.used_ratio,
        kv_total_tokens=total_tokens,
        kv_total_bytes=total_tokens * profile.kv_bytes_per_token,
        requests_running=engine.running,
        requests_waiting=engine.waiting,
        prefill_seconds_per_token=engine.seconds_per_token,
    )


def _paths(names: Sequence[str], link: LinkProfile) -> tuple[PathReading, ...]:
    return tuple(
        PathReading(
            source=f"node-of-{source}",
            target=f"node-of-{target}",
            path="tcp",
            setup_seconds=link.setup_seconds,
            bytes_per_second=link.bytes_per_second,
            points=1,
        )
        for source in names
        for target in names
        if source != target
    )
